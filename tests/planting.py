"""Wrong integers planted in the arguments of an operator, and guards around tensors."""

import torch
from cases import Case
from torch.utils._pytree import tree_map

PLAN = ("offsets", "schedule", "row_token", "row_slot", "token_row")
PACKED = ("offsets", "ids")  # a packed plan, which begins with the offsets
# Any value is right.
CODES = [f"{name}{i}" for name in ("data", "scale", "zero") for i in ("", "_t", 1, 2, 3)]
CODES += ["a_codes", "dlink", "dlink_t", "dropped_rows"]
HEAD_WORDS = 8  # of a schedule
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def integer_arguments(name: str, args: tuple) -> dict[str, torch.Tensor]:
    """{name: tensor} of an operator's ids, counts, offsets and maps, those of a plan by their own names."""
    named = {}
    for argument, value in zip(
        getattr(torch.ops.fused_moe, name).default._schema.arguments, args, strict=True
    ):
        if argument.name in CODES or argument.name in ("w1", "w3", "w2"):
            continue
        members = [(argument.name, value)]
        if argument.name == "plan":
            is_packed = len(value) == 2 and value[1].dim() == 2
            members = zip(PACKED if is_packed else PLAN, value, strict=False)
        named |= {n: t for n, t in members if torch.is_tensor(t) and not t.is_floating_point()}
    return named


def calls_of(name: str, calls: list[tuple]) -> list[tuple]:
    """An operator's calls, and those with scores again for each result alone: what is checked, and what is
    read, depends on which results are needed."""
    arguments = getattr(torch.ops.fused_moe, name).default._schema.arguments
    index = {a.name: i for i, a in enumerate(arguments)}
    needs = [n for n in index if n.startswith("need_")]
    calls = list(calls)
    for call in [c for c in calls if needs and "scores" in index and c[index["scores"]] is not None]:
        for need in (n for n in needs if call[index[n]]):
            values = {**dict(zip(index, call, strict=True)), **dict.fromkeys(needs, False), need: True}
            calls.append(tuple(values.values()))
    return calls


def wrong_values(case: Case, label: str) -> dict[str, int]:
    """What no planner writes: just outside of what the argument may hold, and far outside."""
    rows = case.tokens * case.top_k
    end = {
        "ids": case.num_experts,
        "offsets": rows + 1,
        "schedule": rows + 1,  # no expert, tile, slice or prefix is that large
        "counts": rows + 1,
        "row_slot": rows,
        "token_row": rows,
    }
    below = -2 if label in ("token_row", "ids") else -1  # a slot without a row, or an expert, has -1
    return {"below": below, "above": end.get(label, case.tokens), "lowest": INT_MIN, "highest": INT_MAX}


def elements_of(label: str, tensor: torch.Tensor) -> list[int]:
    """Elements that tiles depend on: one, and of a schedule its head and the first of each list."""
    if label == "schedule":
        num_experts = (tensor.numel() - HEAD_WORDS) // 4
        return [*range(HEAD_WORDS), *range(HEAD_WORDS, tensor.numel(), num_experts)]
    return [1 if label == "offsets" and tensor.numel() > 1 else 0]


def planted(
    args: tuple, label: str, tensor: torch.Tensor, value: int, where: int | slice | None = None
) -> tuple:
    """The arguments with `value` in `tensor`: in the elements `where`, or in one that an expert reads."""
    wrong = tensor.to(torch.int32, copy=True)  # counts of 8 bits cannot hold most of the values
    wrong.view(-1)[elements_of(label, tensor)[0] if where is None else where] = value
    return replaced(args, tensor, wrong)


def replaced(args: tuple, old: torch.Tensor, new: torch.Tensor) -> tuple:
    return tree_map(lambda a: new if a is old else a, args)


class Guarded:
    """Tensors inside wider ones that hold NaN, or a large integer: what is read beyond them shows in the
    results, what is written there in the guards."""

    def __init__(self, elements: int = 1 << 16):
        self.elements = elements  # on either side
        self.guards = []

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        fill = torch.nan if t.is_floating_point() else torch.iinfo(t.dtype).max
        wide = t.new_full((t.numel() + 2 * self.elements,), fill)
        inner = wide[self.elements : self.elements + t.numel()].view(t.shape)
        self.guards += [(wide[: self.elements], fill), (wide[self.elements + t.numel() :], fill)]
        return inner.copy_(t)

    def all_of(self, args):
        """The arguments, every tensor guarded."""
        return tree_map(lambda a: self(a) if torch.is_tensor(a) else a, args)

    def are_intact(self) -> bool:
        return all(
            bool((guard.isnan() if fill != fill else guard == fill).all()) for guard, fill in self.guards
        )
