"""Every operator at once: nothing is left unwritten, what lies past the last row is never read."""

import pytest
import torch
from cases import BF16, F16, F32, F64, Case, call_operator, operator_calls

pytestmark = pytest.mark.usefixtures("poison")

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
# Sizes that the fast paths take, whole 16 bytes a row, and such that no path but the general one does.
SIZES = {"whole": (61, 64, 40), "odd": (61, 37, 29)}
OPERATORS = sorted(operator_calls(Case(), "cpu"))


class Calls:
    """The calls of one operator on one case, and which of their tensors have a row for every slot."""

    def __init__(self, name, device, size, dtype, layout, routing):
        tokens, dim, hidden = SIZES[size]
        case = Case(tokens, dim, hidden, 5, 3, dtype, routing, layout, bias=True)
        self.name, self.calls = name, operator_calls(case, device)[name]
        if not self.calls:
            pytest.skip(f"{name} takes no {dtype}")
        ids = case.ids(device)
        self.num_rows = int(((ids >= 0) & (ids < 5)).sum())
        self.num_slots = ids.numel()  # differs from every other size

    def has_rows(self, value) -> bool:
        return torch.is_tensor(value) and value.dim() > 0 and value.size(0) == self.num_slots

    def is_map(self, value) -> bool:
        return self.has_rows(value) and value.dim() == 1 and value.dtype == torch.int32

    def run(self, args) -> list[torch.Tensor]:
        """The results, those with a row for every slot cut after the last row."""
        return [r[: self.num_rows] if self.has_rows(r) else r for r in call_operator(self.name, args)]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal, NaN beside NaN too, as in scores of an unwritten row."""
    return torch.equal(first.nan_to_num(7.25), second.nan_to_num(7.25))


@ALL_DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("routing", ("sentinels", "gaps", "none"))
@pytest.mark.parametrize("name", OPERATORS)
def test_everything_is_written(device, name, routing, size, dtype):
    """Memory that held NaN before holds numbers after, the same ones in a second run."""
    for layout in ("separate", "interleaved.T"):
        calls = Calls(name, device, size, dtype, layout, routing)
        for args in calls.calls:
            first, second = calls.run(args), calls.run(args)
            for i, (a, b) in enumerate(zip(first, second, strict=True)):
                assert a.isfinite().all(), f"result {i} has numbers that nobody wrote"
                assert (a.abs() < torch.iinfo(torch.int32).max).all(), f"result {i} has ids that nobody wrote"
                assert torch.equal(a, b), f"result {i} differs in a second run"


# What is promised of rows past the last one: zero in these, and in h, a, out and dx without maps. Nothing is
# promised of h and a beside maps, of dh, and of act_dgrad, which knows no last row.
ZERO_TAILS = {"permute", "unpermute_backward", "grouped_mm", "up_dgrad"}
NO_PROMISE = {
    "act_dgrad", "experts_down_backward", "experts_down_backward_accumulate", "route_plan"
}  # fmt: skip


@ALL_DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ("separate", "interleaved", "ungated.T"))
@pytest.mark.parametrize("name", OPERATORS)
def test_garbage_past_the_last_row(device, name, layout, size, dtype):
    """NaN in every tensor's rows past the last one, and any number in the maps: nothing else changes."""
    calls = Calls(name, device, size, dtype, layout, "sentinels")
    assert 0 < calls.num_rows < calls.num_slots
    for args in calls.calls:
        with_maps = any(map(calls.is_map, args))
        expected = calls.run(args)
        dirty = [a.clone() if calls.has_rows(a) else a for a in args]
        for value in filter(calls.has_rows, dirty):
            tail = value[calls.num_rows :]
            if value.is_floating_point():
                tail.fill_(float("nan"))
            else:
                tail.copy_(torch.randint(-(2**31), 2**31, tail.shape, dtype=torch.int32))
        found = call_operator(name, dirty)
        for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
            if not calls.has_rows(mine):
                assert same_bits(mine, other), f"result {i} depends on what lies past the last row"
                continue
            assert same_bits(mine[: calls.num_rows], other), f"result {i}: rows depend on the tail"
            if name in ZERO_TAILS or not (with_maps or name in NO_PROMISE):
                assert not mine[calls.num_rows :].count_nonzero(), f"result {i}: the tail is not zero"
