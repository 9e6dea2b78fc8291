"""Every operator at once: every element is written, and rows past the last one are never read."""

import pytest
import torch
from cases import BF16, F16, F32, F64, Case, call_operator, operator_calls
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.usefixtures("poison")

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
# Sizes of the fast paths, with rows of a multiple of 16 bytes, and sizes of the general path only.
SIZES = {"whole": (61, 64, 40), "odd": (61, 37, 29)}
OPERATORS = sorted(operator_calls(Case(), "cpu"))


class Calls:
    """The calls of one operator on one case, and which of its tensors have one row per slot."""

    def __init__(self, name, device, drawn_calls, size, dtype, layout, routing):
        tokens, dim, hidden = SIZES[size]
        case = Case(tokens, dim, hidden, 5, 3, dtype, routing, layout, bias=True)
        self.name, self.calls = name, drawn_calls(case)[name]
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
        """The results; those with one row per slot are cut after the last row."""
        return [r[: self.num_rows] if self.has_rows(r) else r for r in call_operator(self.name, args)]


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal, NaN to NaN included, as in scores of an unwritten row."""
    return torch.equal(first.nan_to_num(7.25), second.nan_to_num(7.25))


@ALL_DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("routing", ("sentinels", "gaps", "none"))
@pytest.mark.parametrize("name", OPERATORS)
def test_everything_is_written(device, drawn_calls, name, routing, size, dtype):
    """No NaN of the poisoned memory is left, and a second run gives the same bits."""
    for layout in ("separate", "interleaved.T"):
        calls = Calls(name, device, drawn_calls, size, dtype, layout, routing)
        for args in calls.calls:
            first, second = calls.run(args), calls.run(args)
            for i, (a, b) in enumerate(zip(first, second, strict=True)):
                assert a.isfinite().all(), f"result {i} has elements that were not written"
                if not a.is_floating_point():  # of bytes the largest is a NaN's code
                    assert (a < torch.iinfo(a.dtype).max).all(), f"result {i} has ids that were not written"
                assert torch.equal(a, b), f"result {i} differs in a second run"


# Guarantees for rows past the last one: zero in these, and in h, a, out and dx without row maps. h and a with
# row maps, and dh, are undefined there. activate has no last row.
ZERO_TAILS = {"permute", "unpermute_backward", "grouped_mm", "up_dgrad"}
NO_PROMISE = {"experts_down_backward", "experts_down_backward_accumulate", "route_plan"}
NO_PROMISE |= {"activate", "activate_backward", "experts"}


@ALL_DTYPES
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ("separate", "interleaved", "ungated.T"))
@pytest.mark.parametrize("name", OPERATORS)
def test_garbage_past_the_last_row(device, drawn_calls, name, layout, size, dtype):
    """NaN in every tensor's rows past the last one, and any value in the row maps: no other row changes."""
    calls = Calls(name, device, drawn_calls, size, dtype, layout, "sentinels")
    assert 0 < calls.num_rows < calls.num_slots
    for args in calls.calls:
        with_maps = any(map(calls.is_map, tree_leaves(args)))
        expected = calls.run(args)
        dirty = tree_map(lambda a: a.clone() if calls.has_rows(a) else a, args)
        for value in filter(calls.has_rows, tree_leaves(dirty)):
            tail = value[calls.num_rows :]
            if value.is_floating_point():
                tail.fill_(float("nan"))
            else:
                tail.copy_(torch.randint(-(2**31), 2**31, tail.shape, dtype=torch.int32))
        found = call_operator(calls.name, dirty)
        for i, (value, other) in enumerate(zip(found, expected, strict=True)):
            if not calls.has_rows(value):
                assert same_bits(value, other), f"result {i} depends on rows past the last one"
                continue
            assert same_bits(value[: calls.num_rows], other), f"result {i}: rows depend on the tail"
            if name in ZERO_TAILS or not (with_maps or name in NO_PROMISE):
                assert not value[calls.num_rows :].count_nonzero(), f"result {i}: the tail is not zero"
