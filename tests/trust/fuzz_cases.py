"""One call of a public function, with everything that may differ about it: drawn from a seed and an index,
made smaller while it fails, and printed as a test.

Drawn with random.Random: hypothesis takes longer to draw these fields than most cases take to run, and a
crashed worker's case has to be known by its seed and index alone.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from cases import ACTIVATIONS, BF16, F16, F32, F64, LAYOUTS, ROUTINGS

from fused_moe.ops import WRITES_BESIDE_VIEWS

FUNCTIONS = {  # and how often each is drawn
    "fused_experts": 10,
    "grouped_mlp": 4,
    "grouped_mm": 2,
    "permute": 2,
    "route": 3,
    "FusedMoE": 3,
}
FORMS = ("strided", "padded", "swapped", "misaligned", "outer", "expanded")
WEIGHTS = ("w1", "w2", "w3")
SIZES = {"tokens": 0, "dim": 1, "hidden": 1, "num_experts": 1, "top_k": 1, "spare": 0}  # and the least
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class FuzzCase:
    """A call, its inputs' storage, and the way it runs. What a function has no use for keeps its default."""

    function: str = "fused_experts"
    tokens: int = 3  # rows, of grouped_mlp and grouped_mm
    dim: int = 4
    hidden: int = 3
    num_experts: int = 2
    top_k: int = 1
    dtype: torch.dtype = F32
    seed: int = 0  # of the values
    layout: str = "separate"
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    bias: bool = False
    score_on: str = "output"
    scores_dtype: torch.dtype | None = None  # None: float32, or float64 for float64
    routing: str = "random"
    integers: torch.dtype = torch.int32  # of ids or counts
    spare: int = 0  # rows of NaN past counts.sum()
    # --- storage and gradients, by the names of the inputs
    forms: tuple[tuple[str, str], ...] = ()
    frozen: tuple[str, ...] = ()
    main_grads: tuple[str, ...] = ()
    # --- the way it runs
    grad: str = "grad"  # or no_grad, inference
    autocast: torch.dtype | None = None  # inputs are float32, and the result is that of `dtype`
    mode: str = "eager"  # or a backend of torch.compile
    planted: tuple[str, float] | None = None  # (input, NaN or infinity) in one token's row
    # --- CUDA
    tier: str | None = None  # of FUSED_MOE_TIER
    stream: bool = False
    graph: bool = False
    # --- route and FusedMoE
    score_func: str = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    route_norm_eps: float = 1e-20
    groups: int = 0
    kept: int = 0
    group_score: str = "top2"
    expert_scale: bool = False
    expert_bias: bool = False
    padding: int = 0  # rows of NaN past num_tokens
    ties: bool = False
    size: float = 1.0  # of the logits
    shared: int = 0
    shared_gate: bool = False
    gate_bias: bool = False
    losses: bool = False
    training: bool = True

    def form(self, name: str) -> str:
        return dict(self.forms).get(name, "contiguous")

    def __repr__(self):
        """As it can be pasted: the fields that have another value than their default."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        # repr would print nan and inf, which are no Python
        if self.planted:
            given["planted"] = f'("{self.planted[0]}", float("{self.planted[1]}"))'
        shown = (f"{n}={v if n == 'planted' else repr(v)}" for n, v in given.items())
        return f"FuzzCase({', '.join(shown)})"


def input_names(case: FuzzCase) -> list[str]:
    """The tensors that a case's storage and gradients speak of, by the names of the function's arguments."""
    if case.function == "grouped_mm":
        return ["a", "b", "offsets", "dout"]
    if case.function == "permute":
        return ["x", "rows", "scores", "ids", "dout"]
    if case.function == "route":
        return ["logits", *(["expert_scale"] if case.expert_scale else []), "dout"]
    if case.function == "FusedMoE":
        return ["x", "router.gate.weight", "experts.w1", "experts.w2", "dout"]
    names = ["w1", "w2", *(["w3"] if case.layout.startswith("separate") else [])]
    names += [f"b{n[1:]}" for n in names] if case.bias else []
    if case.function == "grouped_mlp":
        return ["x_rows", *names, "counts", "dout"]
    return ["x", *names, "scores", "ids", "dout"]


def is_legal(case: FuzzCase) -> bool:
    """Whether the functions take it, and the checks know what it should give."""
    names = input_names(case)
    on_experts = case.function in ("fused_experts", "grouped_mlp")
    reach = case.num_experts
    if case.groups:
        if case.num_experts % case.groups or not 1 <= case.kept <= case.groups:
            return False
        reach = case.kept * (case.num_experts // case.groups)
    return (
        1 <= case.top_k <= min(reach, 32)
        and min(case.dim, case.hidden, case.num_experts) >= 1
        and all(name in names for name, _ in case.forms)
        and (
            case.planted is None
            or (case.planted[0] in names and case.tokens > 0 and case.form(case.planted[0]) != "expanded")
        )
        and (not case.main_grads or (case.dtype != F64 and on_experts and set(case.main_grads) <= set(names)))
        and (case.autocast is None or case.dtype == case.autocast)
        and not (case.graph and case.mode != "eager")
        and not (WRITES_BESIDE_VIEWS and case.mode != "eager" and case.main_grads)
        and not (case.losses and (not case.tokens or case.dtype == F64))  # losses are float32
        and not (case.shared_gate and not case.shared)
    )


# --- drawing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """How many cases in ten thousand are compiled, by backend: compiling one takes the time of many runs."""

    aot_eager: int = 50
    inductor: int = 1


def draw(seed: int, index: int, shares: Shares = Shares()) -> FuzzCase:  # noqa: B008 - it is frozen
    """The case of a seed and an index."""
    rng = random.Random(f"{seed}:{index}")
    function = rng.choices(list(FUNCTIONS), FUNCTIONS.values())[0]
    big, is_aligned = rng.random() < 0.04, rng.random() < 0.5  # aligned: for the sm90 tier
    num_experts = rng.choice((8, 16, 33, 130) if big else (1, 2, 3, 4, 5, 6, 8, 12))
    most = 8
    if function == "route":
        num_experts, most = rng.choice((num_experts, num_experts, 64, 257, 1024)), 32
    dtype = rng.choice((F32, F32, BF16, BF16, F16, F64))

    def size() -> int:
        if big:
            return rng.choice((64, 72, 200, 256) if is_aligned else (37, 64, 129, 201))
        return 8 * rng.randint(1, 5) if is_aligned else rng.randint(1, 20)

    case = FuzzCase(
        function=function,
        tokens=rng.randint(50, 400) if big else rng.choice((0, 1, 2, 3, 5, 7, 8, 12, 17, 33)),
        dim=size(),
        hidden=size(),
        num_experts=num_experts,
        top_k=rng.randint(1, min(num_experts, most)),
        dtype=dtype,
        seed=rng.getrandbits(30),
        tier=rng.choice((None, None, "portable")),
        stream=rng.random() < 0.2,
        graph=rng.random() < 0.1,
        grad=rng.choices(("grad", "no_grad", "inference"), (12, 1, 1))[0],
    )
    case = replace(case, **OPTIONS[function](rng, case))
    names = input_names(case)
    if rng.random() < 0.6:
        share = rng.choice((0.2, 1.0))
        forms = {n: rng.choice(FORMS) for n in names if rng.random() < share}
        if case.planted:  # an expanded input has one row alone
            forms = {n: f for n, f in forms.items() if (n, f) != (case.planted[0], "expanded")}
        case = replace(case, forms=tuple(forms.items()))
    if rng.random() < 0.4:
        share = rng.choice((0.3, 0.8, 1.0))
        case = replace(case, frozen=tuple(n for n in names if rng.random() < share))
    in_ten_thousand = rng.random() * 10_000
    if in_ten_thousand < shares.aot_eager + shares.inductor:
        mode = "aot_eager" if in_ten_thousand < shares.aot_eager else "inductor"
        if is_legal(compiled := replace(case, mode=mode, graph=False)):
            case = compiled
    assert is_legal(case), case
    return case


def _of_experts(rng: random.Random, case: FuzzCase) -> dict:
    grouped = case.function == "grouped_mlp"
    options = {
        "layout": rng.choice(list(LAYOUTS)),
        "activation": rng.choice(ACTIVATIONS),
        "alpha": rng.choice((0.5, 1.702, 4.0)),
        "limit": rng.choice((0.5, 1.0, 7.0)),
        "bias": rng.random() < 0.5,
        "routing": rng.choice(ROUTINGS),
        "integers": rng.choice(INTEGERS if grouped and case.tokens < 120 else INTEGERS[:2]),
    }
    if grouped:
        options |= {"top_k": 1, "spare": rng.choice((0, 0, 1, 2, 9, 40))}
    else:
        options["score_on"] = rng.choice(("output", "input"))
        options["scores_dtype"] = rng.choice((None, None, None, case.dtype, F64))
    if case.dtype != F64 and rng.random() < 0.25:
        weights = [n for n in input_names(replace(case, **options)) if n in WEIGHTS]
        options["main_grads"] = tuple(n for n in weights if rng.random() < 0.7)
    if case.dtype in (BF16, F16) and rng.random() < 0.15:
        options["autocast"] = case.dtype
    if case.tokens and rng.random() < 0.25:
        where = ("x_rows", "dout") if grouped else ("x", "dout", "scores")
        options["planted"] = (rng.choice(where), rng.choice((float("nan"), float("inf"), -float("inf"))))
    return options


def _of_grouped_mm(rng: random.Random, case: FuzzCase) -> dict:
    planted = (rng.choice(("a", "dout")), float("nan")) if case.tokens and rng.random() < 0.25 else None
    autocast = case.dtype if case.dtype in (BF16, F16) and rng.random() < 0.15 else None
    routing, spare = rng.choice(ROUTINGS), rng.choice((0, 0, 1, 9, 40))
    return {"top_k": 1, "routing": routing, "spare": spare, "planted": planted, "autocast": autocast}


def _of_permute(rng: random.Random, case: FuzzCase) -> dict:
    planted = (rng.choice(("x", "rows", "scores")), float("nan"))
    return {
        "routing": rng.choice(ROUTINGS),
        "integers": rng.choice(INTEGERS[:2]),
        "scores_dtype": rng.choice((None, None, case.dtype)),
        "planted": planted if case.tokens and rng.random() < 0.25 else None,
    }


def _of_route(rng: random.Random, case: FuzzCase) -> dict:
    planted = ("logits", rng.choice((float("nan"), float("inf"), -float("inf"))))
    return {
        **_of_routing(rng, case),
        "ties": rng.random() < 0.3,
        "size": rng.choice((1.0, 1.0, 30.0, 1000.0)),
        "planted": planted if case.tokens and rng.random() < 0.25 else None,
    }


def _of_routing(rng: random.Random, case: FuzzCase) -> dict:
    return {
        "score_func": rng.choice(("softmax", "sigmoid", "sqrtsoftplus")),
        "route_norm": rng.random() < 0.4,
        "route_scale": rng.choice((1.0, 1.0, 0.5, 2.5)),
        "route_norm_eps": rng.choice((1e-20, 1e-20, 1e-20, 0.1)),
        "group_score": rng.choice(("top2", "max")),
        "expert_scale": rng.random() < 0.25,
        "expert_bias": rng.random() < 0.4,
        "padding": rng.choice((0, 0, 0, 1, 9, 70)),
        **_groups(rng, case),
    }


def _groups(rng: random.Random, case: FuzzCase) -> dict:
    """The number of groups of the E that was drawn, and how many are kept."""
    groups = rng.choice([g for g in (0, 0, 1, 2, 4) if not g or case.num_experts % g == 0])
    if not groups:
        return {"groups": 0}
    size = case.num_experts // groups
    return {"groups": groups, "kept": rng.randint(-(-case.top_k // size), groups)}


def _of_layer(rng: random.Random, case: FuzzCase) -> dict:
    shared = rng.choice((0, 0, 1, 2))
    return {
        **_of_routing(rng, case),
        "layout": rng.choice(("separate", "ungated")),
        "activation": rng.choice(ACTIVATIONS),
        "alpha": rng.choice((0.5, 1.702, 4.0)),
        "limit": rng.choice((0.5, 1.0, 7.0)),
        "bias": rng.random() < 0.4,
        "shared": shared,
        "shared_gate": bool(shared) and rng.random() < 0.5,
        "gate_bias": rng.random() < 0.3,
        "losses": case.tokens > 0 and case.dtype != F64 and rng.random() < 0.3,
        "training": rng.random() < 0.7,
    }


OPTIONS = {
    "fused_experts": _of_experts,
    "grouped_mlp": _of_experts,
    "grouped_mm": _of_grouped_mm,
    "permute": _of_permute,
    "route": _of_route,
    "FusedMoE": _of_layer,
}


# --- making smaller -------------------------------------------------------------------------------


def minimise(case: FuzzCase, fails: Callable[[FuzzCase], bool], most: int = 300) -> FuzzCase:
    """The smallest and plainest case that greedy steps find among those that fail, in `most` attempts."""
    progress = True
    while progress and most > 0:
        progress = False
        for smaller in _simpler(case):
            most -= 1
            if most >= 0 and is_legal(smaller) and fails(smaller):
                case, progress = smaller, True
                break
    return case


def _simpler(case: FuzzCase) -> Iterator[FuzzCase]:
    for name, least in SIZES.items():
        value = getattr(case, name)
        for smaller in sorted({least, value // 2, value - 1}):
            if least <= smaller < value:
                yield replace(case, **{name: smaller})
    for field in fields(case):
        name, value = field.name, getattr(case, field.name)
        if value != field.default and name not in ("function", *SIZES):
            yield replace(case, **{name: field.default})
            if name in ("forms", "frozen", "main_grads") and len(value) > 1:
                for i in range(len(value)):
                    yield replace(case, **{name: value[:i] + value[i + 1 :]})


def as_test(case: FuzzCase, name: str) -> str:
    """A test that fails as the case does, for a file in tests/trust."""
    return (
        "import torch  # noqa: F401\n"
        "from fuzz_cases import FuzzCase\n"
        "from fuzz_checks import check\n\n\n"
        f"def test_fuzz_{name}(device):\n"
        f"    check({case!r}, device)\n"
    )
