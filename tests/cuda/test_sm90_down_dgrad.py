"""The sm90 tier's down_dgrad: every layout and activation, gathered rows and rows in expert order."""

import exact
import pytest
import torch
from cases import ACTIVATIONS, Case, assert_near
from gpu_cases import (
    BOUNDARIES,
    COUNTS,
    HALF_DTYPES,
    OTHER_COUNTS,
    UNPAIRED_LAYOUTS,
    ids_of,
    ops,
    plan_of,
    poisoned,
    settings_of,
    weights_of,
)

import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]


def check_down_dgrad(case: Case, counts, device) -> None:
    """dh, a_scaled and dscores of tokens gathered from any place, and dh of rows in expert order."""
    (_, down), settings = weights_of(case, device), settings_of(case)
    plan = fused_moe.route_plan(ids_of(counts, device), len(counts))
    num_rows, offsets = sum(counts), plan.offsets[1:]
    slots = plan.row_slot[:num_rows].long()
    dout = torch.randn(plan.token_row.size(0), case.dim).to(device, case.dtype)
    scores = torch.rand(plan.token_row.shape, device=device)
    width = case.hidden * (1 if case.layout.startswith("ungated") else 2)
    h = torch.randn(plan.row_slot.numel(), width).to(device, case.dtype)
    h[num_rows:] = torch.nan
    call = {"dout": dout, **down, "h": h, "scores": scores, "plan": plan.tensors, **settings}
    with poisoned():
        found = dh, a_scaled, dscores = ops.down_dgrad(**call)

    rows = dout[plan.row_token[:num_rows].long()]
    exact_dh, exact_a, exact_dscores = exact.down_dgrad(
        case, rows, h[:num_rows], scores.flatten()[slots], down, offsets
    )
    exact.check(dh, exact_dh, roundings=2, atol=1e-3)
    exact.check(a_scaled, exact_a, roundings=2, atol=1e-3)
    assert_near(dscores.flatten()[slots].to(case.dtype), exact_dscores)
    assert not dscores[plan.token_row < 0].count_nonzero()
    for _ in range(3):
        again = ops.down_dgrad(**call)
        assert all(torch.equal(t[:num_rows], u[:num_rows]) for t, u in zip(found[:2], again[:2], strict=True))
        assert torch.equal(dscores, again[2])

    in_order = torch.full((h.size(0), case.dim), torch.nan, dtype=case.dtype, device=device)
    in_order[:num_rows] = rows
    plan = plan_of(counts, h.size(0), device)
    with poisoned():
        dh, _, _ = ops.down_dgrad(
            dout=in_order, w2=down["w2"], b2=None, h=h, scores=None, plan=plan.tensors, **settings
        )
    ones = torch.ones(num_rows, device=device)
    exact_dh, _, _ = exact.down_dgrad(case, rows, h[:num_rows], ones, down, offsets)
    exact.check(dh, exact_dh, roundings=2, atol=1e-3)


@HALF_DTYPES
@pytest.mark.parametrize("layout", UNPAIRED_LAYOUTS)
@pytest.mark.parametrize("size", ((8, 520), (72, 136), (200, 8), (328, 264)))
def test_every_boundary(device, size, layout, dtype):
    dim, hidden = size
    case = Case(dim=dim, hidden=hidden, num_experts=len(BOUNDARIES), dtype=dtype, layout=layout)
    check_down_dgrad(case, BOUNDARIES, device)


@HALF_DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_every_activation(device, bias, layout, activation, dtype):
    case = Case(
        dim=136, hidden=200, num_experts=4, dtype=dtype, layout=layout, bias=bias, activation=activation
    )
    check_down_dgrad(case, (70, 0, 129, 300), device)


@HALF_DTYPES
@OTHER_COUNTS
def test_any_number_of_experts(device, name, dtype):
    case = Case(dim=72, hidden=136, num_experts=len(COUNTS[name]), dtype=dtype)
    check_down_dgrad(case, COUNTS[name], device)
