"""The sm90 tier's grouped_mm and up_dgrad: every boundary of tiles, k-tiles and N, weights dense either
way."""

import exact
import pytest
import torch
from cases import BF16, Case, swapped
from gpu_cases import (
    BOUNDARIES,
    COUNTS,
    FEW_ROWS,
    FEW_ROWS_OF,
    HALF_DTYPES,
    HEIGHTS,
    OTHER_COUNTS,
    UNPAIRED_LAYOUTS,
    calls_during,
    check_gemm,
    draw_rows,
    draw_weights,
    few_rows_tiles,
    ops,
    plan_of,
    poisoned,
    settings_of,
    weights_of,
    with_idle_experts,
)

from fused_moe import ops as codes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]


def check_up_dgrad(case: Case, counts, device) -> None:
    """dgate w1 + dup w3 in one accumulator, where a part's depth ends inside a k-tile."""
    up, _ = weights_of(case, device, len(counts))
    w13 = exact.joined(up["w1"], up["w3"])
    dh, offsets = draw_rows(counts, w13.size(1), case.dtype, device, spare=70)
    dh = dh / (w13.size(1) / case.dim) ** 0.5  # so that dx is of order one
    plan = plan_of(counts, dh.size(0), device)
    code = settings_of(case)["layout"]
    with poisoned():
        dx = ops.up_dgrad(dh=dh, w1=up["w1"], w3=up["w3"], plan=plan.tensors, layout=code)
    exact.check(dx, exact.grouped_mm(dh, w13.mT, offsets))


def draw_few_rows(k, n, height, dtype, device) -> tuple:
    """Operands for tiles of at most 16 or 64 rows."""
    a, offsets = draw_rows(FEW_ROWS_OF[height], k, dtype, device, spare=200)
    b = draw_weights(len(FEW_ROWS), n, k, dtype, device)
    return a, with_idle_experts(b, offsets.size(0)), offsets


def calls_of(a, b, offsets) -> tuple[int, int]:
    return calls_during("grouped_mm", lambda: ops.grouped_mm(a=a, b=b, offsets=offsets))[:2]


@HALF_DTYPES
@pytest.mark.parametrize("n", (8, 136, 264, 520))
@pytest.mark.parametrize("k", (8, 72, 200, 328))
def test_every_boundary(device, k, n, dtype):
    """Row counts about all tile heights, tails of k and of N, weights dense either way."""
    a, offsets = draw_rows(BOUNDARIES, k, dtype, device, spare=200)
    b = draw_weights(len(BOUNDARIES), n, k, dtype, device)
    for weights in (b, swapped(b)):
        check_gemm(a, weights, offsets)


@HALF_DTYPES
@pytest.mark.parametrize("n", (512, 640))
@pytest.mark.parametrize("k", (8, 136, 256, 328))
def test_many_tiles_per_cta(device, k, n, dtype):
    """Each tile is stored under the next one's main loop if that has k-tiles enough; skinny experts and
    half-N tiles, too."""
    counts = (49_000, 3, 0, 64, 129, 3000)
    a, offsets = draw_rows(counts, k, dtype, device, spare=70)
    b = draw_weights(len(counts), n, k, dtype, device)
    for weights in (b, swapped(b)):
        check_gemm(a, weights, offsets)
    w1, w3 = (draw_weights(len(counts), k, n, dtype, device) for _ in range(2))
    dh = torch.cat((a, a.flip(1)), 1) / 2**0.5
    plan = plan_of(counts, a.size(0), device)
    with poisoned():
        dx = ops.up_dgrad(dh=dh, w1=w1, w3=w3, plan=plan.tensors, layout=codes.LAYOUTS["separate"])
    exact.check(dx, exact.grouped_mm(dh, exact.joined(w1, w3).mT, offsets))


@HALF_DTYPES
@pytest.mark.parametrize("layout", UNPAIRED_LAYOUTS)
@pytest.mark.parametrize("size", ((72, 136), (264, 200)))
def test_up_dgrad_at_every_boundary(device, size, layout, dtype):
    dim, hidden = size
    case = Case(dim=dim, hidden=hidden, num_experts=len(BOUNDARIES), dtype=dtype, layout=layout)
    check_up_dgrad(case, BOUNDARIES, device)


@HALF_DTYPES
@OTHER_COUNTS
def test_any_number_of_experts(device, name, dtype):
    """One row each, all rows to one, 1024 experts, all but one of them empty, no rows at all."""
    counts = COUNTS[name]
    a, offsets = draw_rows(counts, 72, dtype, device, spare=50)
    b = draw_weights(len(counts), 136, 72, dtype, device)
    for weights in (b, swapped(b)):
        check_gemm(a, weights, offsets)


@pytest.mark.parametrize("width", (72, 76))
def test_weights_in_wider_ones(device, width):
    """Views of 64 columns: the pitch and the first element's address decide which tier runs."""
    a, offsets = draw_rows((5, 0, 130), 64, BF16, device)
    b = draw_weights(3, 136, width, BF16, device)
    for first in (0, 4, 8):
        some = b[..., first : first + 64]
        assert calls_of(a, some, offsets) == ((1, 0) if width % 8 == first % 8 == 0 else (0, 1))
        check_gemm(a, some, offsets)


def test_weights_with_experts_innermost(device):
    """Rows of all experts are side by side: an expert's stride is smaller than that of its rows."""
    a, offsets = draw_rows((5, 0, 130, 70), 72, BF16, device)
    for shape, order in (((136, 4, 72), (1, 0, 2)), ((72, 4, 136), (1, 2, 0))):
        b = torch.randn(shape).to(device, BF16).permute(order)
        assert b.shape == (4, 136, 72) and b.stride(0) < max(b.stride())
        assert calls_of(a, b, offsets) == (1, 0)
        check_gemm(a, b, offsets)


@HALF_DTYPES
@pytest.mark.parametrize("size", ((72, 136), (200, 8), (8, 264)))
def test_garbage_around_the_weights(device, size, dtype):
    """Weights cut out of wider ones that hold NaN: neither a tail of k nor one of N reads it."""
    k, n = size
    a, offsets = draw_rows((5, 0, 193, 64, 1), k, dtype, device, spare=70)
    b = draw_weights(5, n, k, dtype, device)
    for k_major in (True, False):
        dense = b if k_major else b.mT
        wide = dense.new_full((5, dense.size(1) + 16, dense.size(2) + 24), torch.nan)
        inner = wide[:, 8:-8, 8:-16]
        inner.copy_(dense)
        weights = inner if k_major else inner.mT
        assert calls_of(a, weights, offsets) == (1, 0)
        check_gemm(a, weights, offsets)


# --- tiles of few rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_rows, k, tiles",
    (
        (16, 2552, [(16, 2)]),
        (16, 2560, [(16, 1)]),
        (17, 2560, [(64, 2)]),
        (128, 64, [(64, 2)]),
        (129, 64, []),
    ),
)
def test_which_tiles(device, num_rows, k, tiles):
    """The rows and subtiles of a tile, for eight experts."""
    a, offsets = draw_rows((num_rows,) + (0,) * 7, k, BF16, device)
    b = draw_weights(8, 136, k, BF16, device)
    assert few_rows_tiles(lambda: ops.grouped_mm(a=a, b=b, offsets=offsets)) == tiles


@HALF_DTYPES
@HEIGHTS
@pytest.mark.parametrize("n", (8, 72, 136, 200))
@pytest.mark.parametrize("k", (8, 72, 456))
def test_few_rows(device, k, n, height, dtype):
    """Row counts about all heights, tails of k and of N, a k of more k-tiles than there are stages."""
    a, b, offsets = draw_few_rows(k, n, height, dtype, device)
    for weights in (b, swapped(b)):
        check_gemm(a, weights, offsets)


@HALF_DTYPES
@pytest.mark.parametrize("n", (8, 72, 200))
@pytest.mark.parametrize("k", (2560, 2568))
def test_few_rows_and_a_long_k(device, k, n, dtype):
    """Tiles of 64 columns."""
    a, b, offsets = draw_few_rows(k, n, 16, dtype, device)
    for weights in (b, swapped(b)):
        check_gemm(a, weights, offsets)


@HALF_DTYPES
@HEIGHTS
@pytest.mark.parametrize("n", (72, 136))
def test_few_rows_with_a_bias(device, n, height, dtype):
    """The down side's, of rows in expert order."""
    a, b, offsets = draw_few_rows(200, n, height, dtype, device)
    bias = with_idle_experts(torch.randn(len(FEW_ROWS), n).to(device, dtype), b.size(0))
    plan = plan_of(FEW_ROWS_OF[height], a.size(0), device)
    settings = settings_of(Case())
    with poisoned():
        out = ops.experts_down(a=a, h=None, w2=b, b2=bias, scores=None, plan=plan.tensors, **settings)
    exact.check(out, exact.linear(a[: sum(FEW_ROWS)].double(), b.double(), bias.double(), offsets))


@HALF_DTYPES
@HEIGHTS
@pytest.mark.parametrize("layout", UNPAIRED_LAYOUTS)
def test_up_dgrad_of_few_rows(device, layout, height, dtype):
    case = Case(dim=264, hidden=200, num_experts=len(FEW_ROWS), dtype=dtype, layout=layout)
    check_up_dgrad(case, FEW_ROWS_OF[height], device)
