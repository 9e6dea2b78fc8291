"""The sm90 tier's up_gate: every layout and activation, gathered rows and rows in expert order."""

import exact
import pytest
import torch
from cases import ACTIVATIONS, BF16, LAYOUTS, Case
from gpu_cases import (
    BOUNDARIES,
    COUNTS,
    FEW_ROWS,
    FEW_ROWS_OF,
    HALF_DTYPES,
    HEIGHTS,
    OTHER_COUNTS,
    UNPAIRED_LAYOUTS,
    draw_rows,
    few_rows_tiles,
    ids_of,
    ops,
    plan_of,
    poisoned,
    settings_of,
    weights_of,
)

import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]


def check_up_gate(case: Case, counts, device) -> None:
    """Tokens gathered from any place, and rows in expert order with NaN behind them."""
    (up, _), settings = weights_of(case, device, len(counts)), settings_of(case)
    ids = ids_of(counts, device)
    plan = fused_moe.route_plan(ids, len(counts))
    num_rows, offsets = sum(counts), plan.offsets[1:]
    x = torch.randn(ids.size(0), case.dim).to(device, case.dtype)
    rows, _ = draw_rows(counts, case.dim, case.dtype, device, spare=200)
    in_order = plan_of(counts, rows.size(0), device)
    token = plan.row_token[:num_rows].long()
    for source, row_map, expected in ((x, plan, x[token]), (rows, in_order, rows[:num_rows])):
        with poisoned():
            h, a = ops.up_gate(x=source, **up, plan=row_map.tensors, **settings)
        exact_h, exact_a = exact.up_gate(case, expected, up, offsets)
        exact.check(h[:num_rows], exact_h)
        exact.check(a[:num_rows], exact_a)
        with poisoned():  # in inference h is not kept
            _, alone = ops.experts_up(
                x=source, **up, scores=None, plan=row_map.tensors, **settings, save_h=False
            )
        assert torch.equal(alone[:num_rows], a[:num_rows])


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ((8, 520), (72, 136), (200, 8), (328, 264)))
def test_every_boundary(device, size, layout, dtype):
    """Both ways to read rows, every layout stored either way round, with biases."""
    dim, hidden = size
    experts = len(BOUNDARIES)
    case = Case(dim=dim, hidden=hidden, num_experts=experts, dtype=dtype, layout=layout, bias=True)
    check_up_gate(case, BOUNDARIES, device)


@HALF_DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_every_activation(device, bias, layout, activation, dtype):
    """Each with and without biases, on columns that fill a tile and a part of the next."""
    case = Case(
        dim=136, hidden=200, num_experts=5, dtype=dtype, layout=layout, activation=activation, bias=bias
    )
    check_up_gate(case, (130, 0, 64, 1, 257), device)


@HALF_DTYPES
@OTHER_COUNTS
def test_any_number_of_experts(device, name, dtype):
    case = Case(dim=72, hidden=136, num_experts=len(COUNTS[name]), dtype=dtype, bias=True)
    check_up_gate(case, COUNTS[name], device)


# --- tiles of few rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_rows, dim, tiles",
    (
        (16, 2560, [(16, 2)]),
        (17, 2560, [(64, 2)]),
        (128, 64, [(64, 2)]),
        (129, 64, []),
    ),
)
def test_which_tiles(device, num_rows, dim, tiles):
    """The rows and subtiles of a tile, for eight experts."""
    case = Case(dim=dim, hidden=136, num_experts=8, dtype=BF16)
    (up, _), settings = weights_of(case, device), settings_of(case)
    x, _ = draw_rows((num_rows,), dim, BF16, device)
    plan = plan_of((num_rows,) + (0,) * 7, num_rows, device)
    assert few_rows_tiles(lambda: ops.up_gate(x=x, **up, plan=plan.tensors, **settings)) == tiles


@HALF_DTYPES
@HEIGHTS
@pytest.mark.parametrize("layout", UNPAIRED_LAYOUTS)
@pytest.mark.parametrize("size", ((72, 136), (456, 200)))
def test_few_rows(device, size, layout, height, dtype):
    """Row counts about all heights, tails of k and of N, a k of more k-tiles than there are stages; biases
    with the other one."""
    dim, hidden = size
    case = Case(dim=dim, hidden=hidden, num_experts=len(FEW_ROWS), dtype=dtype, layout=layout, bias=dim == 72)
    check_up_gate(case, FEW_ROWS_OF[height], device)
