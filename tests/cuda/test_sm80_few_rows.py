"""The sm80 tier where experts have few rows: its small tiles give the bits of its usual ones."""

import exact
import pytest
import torch
from cases import BF16, LAYOUTS, Case, assert_same_bits, forward_backward, swapped
from gpu_cases import (
    HALF_DTYPES,
    check_gemm,
    draw_rows,
    draw_weights,
    ids_of,
    launches,
    ops,
    plan_of,
    poisoned,
    settings_of,
    weights_of,
)

from fused_moe import fused_experts, grouped_mlp

pytestmark = pytest.mark.gpu

# Rows of each expert. The first three have tiles of 16 rows, also with a few spare rows, the others of 64.
COUNTS = {
    "part tiles": (1, 0, 16, 2, 0, 3, *(0,) * 12),
    "16 rows, cut": (17, 0, 33, 1, 0, 16, *(0,) * 26, 5, *(1,) * 40),
    "all rows to one": (0, 0, 0, 129, *(0,) * 70),
    "64 rows": (5, 1, 0, 40),
    "64 rows, cut": (64, 0, 65, 3, 16, 70, *(0,) * 10),
}
EVERY_COUNTS = pytest.mark.parametrize("name", COUNTS)


@pytest.fixture
def tiles(choose):
    """tiles(small): the calls that follow have small tiles where experts have few rows, or the usual ones."""
    return lambda small: choose(FUSED_MOE_TIER="portable", FUSED_MOE_SCHEDULE=None if small else "tails=off")


@EVERY_COUNTS
def test_which_tile(device, tiles, name):
    """The rule is on shapes: the rows, spare ones too, and the experts."""
    a, offsets = draw_rows(COUNTS[name], 72, BF16, device, spare=5)
    b = draw_weights(len(COUNTS[name]), 136, 72, BF16, device)
    rows = 64 if "64" in name else 16
    for weights, k_major in ((b, "true"), (swapped(b), "false")):
        tiles(True)
        kernels = "\n".join(launches(lambda w=weights: ops.grouped_mm(a=a, b=w, offsets=offsets)))
        assert f"DenseColumns<__nv_bfloat16, {k_major}, {rows}>" in kernels
        tiles(False)
        kernels = "\n".join(launches(lambda w=weights: ops.grouped_mm(a=a, b=w, offsets=offsets)))
        assert "FewRowsTile" not in kernels


@HALF_DTYPES
@EVERY_COUNTS
@pytest.mark.parametrize("n", (8, 136, 328))
@pytest.mark.parametrize("k", (8, 72, 264, 520))
def test_products(device, tiles, k, n, name, dtype):
    """Tails of k and N, fewer k-tiles than stages and more, weights dense either way, NaN in spare rows."""
    a, offsets = draw_rows(COUNTS[name], k, dtype, device, spare=5)
    b = draw_weights(len(COUNTS[name]), n, k, dtype, device)
    for weights in (b, swapped(b)):
        found = {}
        for small in (True, False):
            tiles(small)
            with poisoned():
                found[small] = ops.grouped_mm(a=a, b=weights, offsets=offsets)
        assert_same_bits({"out": found[True]}, {"out": found[False]})
        exact.check(found[True], exact.grouped_mm(a, weights, offsets))


@HALF_DTYPES
@EVERY_COUNTS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ((72, 136), (328, 264)))
def test_experts(device, tiles, size, layout, name, dtype):
    """Gathered rows, biases, h kept and not, the gradient of the rows, of one part and of two."""
    ids = ids_of(COUNTS[name], device)
    dim, hidden = size
    case = Case(ids.size(0), dim, hidden, len(COUNTS[name]), 2, dtype, layout=layout, bias=True)
    inputs, dout = case.inputs(device), case.dout(device)
    found = {}
    for small in (True, False):
        tiles(small)
        with poisoned():
            found[small] = forward_backward(fused_experts, inputs, dout, ids=ids, **case.options)
            with torch.no_grad():
                found[small]["alone"] = fused_experts(**inputs, ids=ids, **case.options)
    assert_same_bits(found[True], found[False])


@HALF_DTYPES
@EVERY_COUNTS
def test_rows_in_order(device, tiles, name, dtype):
    """Rows that are grouped already, with rows past the last one, whose results are zeros."""
    counts = torch.tensor(COUNTS[name], dtype=torch.int32, device=device)
    case = Case(sum(COUNTS[name]) + 5, 72, 136, len(COUNTS[name]), 1, dtype, bias=True)
    inputs, dout = case.inputs(device), case.dout(device)
    inputs["x_rows"] = inputs.pop("x")
    del inputs["scores"]
    found = {}
    for small in (True, False):
        tiles(small)
        with poisoned():
            found[small] = forward_backward(grouped_mlp, inputs, dout, counts=counts, **case.options)
    assert_same_bits(found[True], found[False])
    assert not found[True]["out"][-5:].count_nonzero()


@pytest.mark.sanitizer
def test_a_wrong_plan(device, tiles):
    """Any integers in offsets and schedule lead nowhere outside of the tensors, and the next call is right.
    test_misuse.py has too many rows for tiles of 16."""
    tiles(True)
    counts = COUNTS["part tiles"]
    case = Case(dim=72, hidden=136, num_experts=len(counts), dtype=BF16)
    (up, _), settings = weights_of(case, device), settings_of(case)
    rows, _ = draw_rows(counts, case.dim, BF16, device)
    plan = plan_of(counts, len(rows), device).tensors
    expected = ops.up_gate(x=rows, **up, plan=plan, **settings)
    for low, high in ((-(2**31), 2**31), (-3, 400), (0, len(rows)), (0, len(counts))):
        for i in range(len(plan)):
            wrong = list(plan)
            wrong[i] = torch.randint(low, high, plan[i].shape, dtype=torch.int32).to(device)
            ops.up_gate(x=rows, **up, plan=wrong, **settings)
            torch.cuda.synchronize()
    for ours, other in zip(ops.up_gate(x=rows, **up, plan=plan, **settings), expected, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.sanitizer
def test_under_the_sanitizer(device, tiles):
    tiles(True)
    for counts in COUNTS.values():
        a, offsets = draw_rows(counts, 72, BF16, device, spare=5)
        b = draw_weights(len(counts), 136, 72, BF16, device)
        for weights in (b, swapped(b)):
            check_gemm(a, weights, offsets)
        ids = ids_of(counts, device)
        case = Case(ids.size(0), 72, 136, len(counts), 2, BF16)
        with torch.no_grad():
            assert fused_experts(**case.inputs(device), ids=ids).isfinite().all()
