"""The sm90 tier's wgrad: either operand gathered or contiguous, split-K, float32 main gradients."""

from functools import partial

import exact
import pytest
import torch
from cases import FORMS
from gpu_cases import (
    BOUNDARIES,
    COUNTS,
    HALF_DTYPES,
    OTHER_COUNTS,
    calls_during,
    draw_rows,
    draw_weights,
    ids_of,
    ops,
    plan_of,
    poisoned,
    wgrad_operands,
)

import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]

MANY_SPLIT = (1200,) * 36 + (0,) * 44  # more than a warp's lanes; a tile has two of the schedule's slices
SPLIT = (9001, 0, 1, 700, 64, 1500)  # the first and the last have several split-K slices


def check_wgrad(counts, widths, dtype, device, repeats=0) -> None:
    """Exact zeros for experts without rows; the same bits again."""
    for call, rows in wgrad_operands(counts, widths, dtype, device):
        with poisoned():
            dw = ops.wgrad(**call)
        # some of millions of sums cancel: their rounding is that of their parts
        exact.check(dw.flatten(0, 1), exact.wgrad(*rows, call["offsets"]).flatten(0, 1), atol=1e-3)
        assert not dw[torch.tensor(counts) == 0].count_nonzero()
        for _ in range(repeats):
            assert torch.equal(dw, ops.wgrad(**call))


@HALF_DTYPES
@pytest.mark.parametrize("widths", ((8, 520), (72, 136), (264, 200), (520, 8)))
def test_every_boundary(device, widths, dtype):
    """Sums over any number of rows, part tiles of both sides."""
    check_wgrad(BOUNDARIES, widths, dtype, device)


@HALF_DTYPES
@OTHER_COUNTS
def test_any_number_of_experts(device, name, dtype):
    check_wgrad(COUNTS[name], (72, 136), dtype, device)


@HALF_DTYPES
def test_split_k(device, dtype):
    """An expert with most of the rows: its slices are reduced in their order, so the bits are the same."""
    check_wgrad(SPLIT, (520, 264), dtype, device, repeats=10)


@HALF_DTYPES
def test_many_experts_of_several_slices(device, dtype):
    check_wgrad(MANY_SPLIT, (520, 264), dtype, device, repeats=3)


@HALF_DTYPES
def test_rows_gathered_first(device, dtype):
    """With 8,192 columns of one operand the other's rows are gathered first, in two halves."""
    counts, widths = (200, 0, 65, 1), (8200, 512)
    check_wgrad(counts, widths, dtype, device, repeats=3)
    for call, rows in wgrad_operands(counts, widths, dtype, device):
        for form in ("contiguous", "swapped"):
            dw = FORMS[form](torch.ones(len(counts), *widths, device=device))
            ops.wgrad_accumulate(**call, dw=dw)
            torch.testing.assert_close(
                dw.double(), 1 + exact.wgrad(*rows, call["offsets"]), rtol=1e-5, atol=1e-3
            )


@HALF_DTYPES
@pytest.mark.parametrize("counts", (BOUNDARIES, SPLIT), ids=("boundaries", "split-K"))
def test_accumulate(device, counts, dtype):
    """In float32 the results are added to memory; experts without rows keep theirs."""
    for call, rows in wgrad_operands(counts, (72, 136), dtype, device):
        before = torch.randn(len(counts), 72, 136, device=device)
        for form in ("contiguous", "swapped"):
            dw = FORMS[form](before.clone())
            run = partial(ops.wgrad_accumulate, **call, dw=dw)
            assert calls_during("wgrad", run)[:2] == (1, 0)
            expected = before.double() + exact.wgrad(*rows, call["offsets"])
            torch.testing.assert_close(dw.double(), expected, rtol=1e-5, atol=1e-3)
            empty = torch.tensor(counts) == 0
            assert torch.equal(dw[empty], before[empty])


@HALF_DTYPES
@pytest.mark.parametrize("hidden", (64, 72, 192, 200, 320))
def test_tiles_of_the_gradients_of_gate_and_up(device, hidden, dtype):
    """w1's and w3's gradients are tiled as one: a tile may have rows of both. Or one of the two is not
    wanted."""
    dim, experts = 136, len(BOUNDARIES)
    ids = ids_of(BOUNDARIES, device)
    gathered = fused_moe.route_plan(ids, experts)
    counts = torch.tensor(BOUNDARIES, device=device)
    tokens = torch.randn(ids.size(0), dim).to(device, dtype)
    rows, offsets = draw_rows(BOUNDARIES, dim, dtype, device, spare=70)
    num_rows = sum(BOUNDARIES)
    w1, w3 = (draw_weights(experts, hidden, dim, dtype, device) for _ in range(2))
    for x, plan, in_order in (
        (tokens, gathered, tokens[gathered.row_token[:num_rows].long()]),
        (rows, plan_of(BOUNDARIES, rows.size(0), device), rows[:num_rows]),
    ):
        capacity = rows.size(0) if plan.row_slot is None else plan.row_slot.size(0)
        dh, _ = draw_rows(BOUNDARIES, 2 * hidden, dtype, device, spare=capacity - num_rows)
        expected = [exact.wgrad(part, in_order, offsets) for part in dh[:num_rows].chunk(2, dim=1)]
        for need in ((True, True), (True, False), (False, True)):
            with poisoned():
                _, *found = ops.experts_up_backward(
                    dh=dh, x=x, w1=w1, w3=w3, scores=None, plan=plan.tensors, layout=0, need_dx=False,
                    need_dw1=need[0], need_dw3=need[1], need_db1=False, need_db3=False, need_dscores=False,
                )[:3]  # fmt: skip
            for dw, truth, wanted in zip(found, expected, need, strict=True):
                if wanted:
                    exact.check(dw.flatten(0, 1), truth.flatten(0, 1))
                    assert not dw[counts == 0].count_nonzero()
