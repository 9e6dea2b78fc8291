"""What the caller may get wrong: ids, counts, offsets and maps that lead outside the tensors, NaN past the
last row."""

import itertools

import pytest
import torch
from cases import (
    BF16,
    F32,
    Case,
    assert_same_bits,
    call_operator,
    forward_backward,
    operator_calls,
)
from gpu_cases import HALF_DTYPES, draw_rows, ops, poisoned
from planting import Guarded, calls_of, elements_of, integer_arguments, planted, replaced, wrong_values

import fused_moe
from fused_moe import grouped_mlp

pytestmark = pytest.mark.gpu

OPERATORS = sorted(operator_calls(Case(), "cpu"))
# Two experts of some 650 rows, more than a split-K slice of 512.
CUT = Case(1300, 24, 16, 2, 1, BF16, bias=True)
CUTTING = sorted(n for n in OPERATORS if n.startswith(("experts", "fp8")) and "backward" in n)


@pytest.mark.sanitizer
@pytest.mark.parametrize("alone", (False, True), ids=("everywhere", "one tensor"))
@pytest.mark.parametrize("name", OPERATORS)
def test_garbage_in_every_integer(device, name, alone):
    """Any integers in ids, counts, offsets, schedules and maps, in all of them or in one: no access leaves
    the tensors, the device lives."""
    case = Case(61, 24, 16, 5, 3, BF16, bias=True)
    for call in operator_calls(case, device)[name]:
        expected = [r.clone() for r in call_operator(name, call)]
        named = list(integer_arguments(name, call).values())
        for low, high in ((-(2**31), 2**31), (-3, 400), (0, 61), (0, 5)):
            for tensors in [[t] for t in named] if alone else [named]:
                wrong = call
                for tensor in tensors:
                    garbage = torch.randint(low, high, tensor.shape, dtype=torch.int32).to(device)
                    wrong = replaced(wrong, tensor, garbage)
                call_operator(name, wrong)
                torch.cuda.synchronize()
        assert_same_results(name, call, expected)


def assert_same_results(name: str, call: tuple, expected: list) -> None:
    for mine, other in zip(call_operator(name, call), expected, strict=True):
        assert torch.equal(mine, other), "a call after it gives other results"


def plant(name: str, case: Case, device, calls: list[tuple], places: tuple, elements: int) -> None:
    """Plants wrong values in one element, then in all, of each argument alone; guards have `elements`
    elements."""
    for call in calls:
        expected = [r.clone() for r in call_operator(name, call)]
        for label, tensor in integer_arguments(name, call).items():
            values = wrong_values(case, label)
            elements_or_all = [*elements_of(label, tensor), slice(None)]
            for value, where in itertools.product((values[p] for p in places), elements_or_all):
                guard = Guarded(elements)
                getattr(ops, name)(*guard.all_of(planted(call, label, tensor, value, where)))
                torch.cuda.synchronize()
                assert guard.are_intact(), f"written beyond a tensor: {label} has {value} at {where}"
        assert_same_results(name, call, expected)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("name", OPERATORS)
def test_planted_garbage(device, name, dtype):
    """Each argument alone just outside and far outside of what it may hold, for each result alone, too:
    nothing is written around any tensor. Widths of the sm90 tier, and odd ones."""
    for dim, hidden in ((24, 16), (19, 9)):
        case = Case(61, dim, hidden, 5, 3, dtype, bias=True)
        calls = calls_of(name, operator_calls(case, device)[name])
        plant(name, case, device, calls, ("below", "above", "lowest", "highest"), 4096)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", OPERATORS)
def test_planted_garbage_without_guards(device, name):
    """The same just outside, where the sanitizer also sees what is read: tensors end with their memory."""
    case = Case(9, 16, 8, 3, 2, BF16, bias=True)
    plant(name, case, device, operator_calls(case, device)[name][:1], ("below", "above"), 0)


@pytest.mark.parametrize("name", CUTTING)
def test_planted_garbage_where_experts_are_cut(device, name):
    """Split-K keeps accumulators and counts arrivals where offsets and schedule say."""
    plant(name, CUT, device, operator_calls(CUT, device)[name], ("below", "above", "lowest", "highest"), 4096)


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", CUTTING)
def test_schedules_of_other_routings(device, name):
    """Split-K with slices that never arrive, or twice: the next call finds its semaphores at zero."""
    for call in operator_calls(CUT, device)[name]:
        arguments = integer_arguments(name, call)
        expected = [r.clone() for r in call_operator(name, call)]
        for first in (0, 1, 512, 513, 1299, 1300):
            counts = torch.tensor([first, 1300 - first], device=device)
            _, _, other = ops.count_plan(counts, 1300)
            twice = other.clone()
            twice[12:14] = 0  # both experts of the sliced list are the first one
            for wrong in (other, twice):
                if "schedule" in arguments:
                    wrong_call = replaced(call, arguments["schedule"], wrong)
                else:  # in a packed plan it follows the offsets
                    packed = arguments["offsets"].clone()
                    packed[CUT.num_experts + 1 :][: wrong.numel()] = wrong
                    wrong_call = replaced(call, arguments["offsets"], packed)
                call_operator(name, wrong_call)
                assert_same_results(name, call, expected)


# counts, and what is left of them: each clamped to the 70 rows, the sum likewise
WRONG_COUNTS = {
    "negative": ([5, -1, 3], [5, 0, 3]),
    "too many": ([2**31 - 1, 1, 1], [70, 0, 0]),
    "64 bits": ([2**40, -(2**40), 3], [70, 0, 0]),
    "one too many": ([70, 0, 1], [70, 0, 0]),
    "later ones too many": ([20, 30, 50], [20, 30, 20]),
}


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("wrong, clamped", WRONG_COUNTS.values(), ids=WRONG_COUNTS)
def test_wrong_counts_are_clamped(device, wrong, clamped, dtype):
    """Counts that are negative or beyond the rows, unread by the host, are those that fit: the same bits
    of every result, NaN around every input, and no byte written around main_grads."""
    case = Case(dim=64, hidden=48, num_experts=3, dtype=dtype)
    rows, dout = (torch.randn(70, 64).to(device, dtype) for _ in range(2))
    weights = {n: w for n, w in case.weights(device).items() if w is not None}
    runs = []
    for counts in (wrong, clamped):
        guarded = Guarded()
        inputs = {"x_rows": guarded(rows), **{n: guarded(w) for n, w in weights.items()}}
        main_grads = [guarded(torch.zeros_like(w, dtype=F32)) for w in weights.values()]
        on_device = torch.tensor(counts, device=device)
        with poisoned():
            found = forward_backward(grouped_mlp, inputs, guarded(dout), counts=on_device)
            leaf = inputs["x_rows"].detach().requires_grad_()
            own = {n: w.detach().requires_grad_() for n, w in inputs.items() if n != "x_rows"}
            out = grouped_mlp(leaf, **own, counts=on_device, main_grads=tuple(main_grads))
            out.backward(guarded(dout))
        torch.cuda.synchronize()
        assert guarded.are_intact()
        runs.append(found | {f"main_grad {i}": grad for i, grad in enumerate(main_grads)})
    assert all(value.isfinite().all() for value in runs[0].values())
    assert_same_bits(*runs)
    assert not runs[0]["out"][sum(clamped) :].count_nonzero()


WRONG_OFFSETS = {
    "decreasing": ([50, 20, 60], [50, 50, 60]),
    "negative": ([-5, 20, 60], [0, 20, 60]),
    "too many": ([10, 2**31 - 1, 60], [10, 70, 70]),
}


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("wrong, clamped", WRONG_OFFSETS.values(), ids=WRONG_OFFSETS)
def test_wrong_offsets_are_clamped(device, wrong, clamped, dtype):
    """The same for the offsets of grouped_mm, wgrad and wgrad_accumulate."""
    guarded = Guarded()
    a, b = guarded(torch.randn(70, 72).to(device, dtype)), guarded(torch.randn(70, 136).to(device, dtype))
    weight = guarded(torch.randn(3, 136, 72).to(device, dtype))
    runs = []
    for values in (wrong, clamped):
        offsets = torch.tensor(values, dtype=torch.int32, device=device)
        dw = guarded(torch.ones(3, 72, 136, device=device))
        with poisoned():
            ops.wgrad_accumulate(a=a, b=b, offsets=offsets, dw=dw)
            runs.append(
                {
                    "out": ops.grouped_mm(a=a, b=weight, offsets=offsets),
                    "dw": ops.wgrad(a=a, b=b, offsets=offsets),
                    "dw accumulated": dw,
                }
            )
    assert guarded.are_intact()
    assert all(value.isfinite().all() for value in runs[0].values())
    assert_same_bits(*runs)


def test_maps_on_the_cpu_are_refused(device):
    """The dispatcher takes tensors of two devices; the operator does not."""
    x = torch.randn(6, 8, device=device)
    plan = fused_moe.route_plan(torch.zeros(6, 2, dtype=torch.int32), 3)
    with pytest.raises(RuntimeError, match="fused_moe::permute: expected .* on the device"):
        torch.ops.fused_moe.permute(x=x, plan=plan.tensors)


@HALF_DTYPES
@pytest.mark.parametrize("layout", ("separate", "halves", "interleaved.T", "ungated"))
def test_garbage_past_the_last_row(device, layout, dtype):
    """grouped_mlp with NaN in rows that are no expert's: the same bits, exact zeros there."""
    counts, spare = (5, 0, 193, 64, 1), 321
    case = Case(dim=72, hidden=136, num_experts=5, dtype=dtype, layout=layout, bias=True)
    x, _ = draw_rows(counts, 72, dtype, device, spare)
    dout, _ = draw_rows(counts, 72, dtype, device, spare)
    weights, on_device = case.weights(device), torch.tensor(counts, device=device)
    runs = []
    for x_rows, d in ((x.nan_to_num(), dout.nan_to_num()), (x, dout)):
        inputs = {"x_rows": x_rows, **weights}
        with poisoned():
            runs.append(forward_backward(grouped_mlp, inputs, d, counts=on_device, **case.options))
    assert_same_bits(*runs)
    for name in ("out", "dx_rows"):
        assert runs[1][name].isfinite().all()
        assert not runs[1][name][sum(counts) :].count_nonzero()
