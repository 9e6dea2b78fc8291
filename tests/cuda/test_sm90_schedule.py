"""The sm90 tier's tile schedule and its memory accesses: no order changes a bit, none leaves the
tensors."""

from math import ceil

import exact
import pytest
import torch
from cases import BF16, F32, Case, assert_near, assert_same_bits, swapped
from gpu_cases import (
    HALF_DTYPES,
    draw_weights,
    every_gemm,
    ids_of,
    ops,
    poisoned,
    settings_of,
    weights_of,
    wgrad_operands,
)

import fused_moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]

SCHEDULES = [
    f"order={order},experts={experts},tails={tails}"
    for order in ("linear", "grouped", "column")
    for experts in ("interleaved", "in-turn")
    for tails in ("on", "off")
]


@HALF_DTYPES
def test_same_bits_in_every_schedule(device, choose, dtype):
    """An order says when a tile is computed, not what is in it."""
    run, ids = every_gemm(dtype, device)
    ids[:, 0] = torch.arange(len(ids), device=device) % 32  # skinny experts beside full ones
    ids[64:, :][ids[64:, :] > 24] = 0
    choose(FUSED_MOE_SCHEDULE=None)
    first = run()
    for schedule in SCHEDULES:
        choose(FUSED_MOE_SCHEDULE=schedule)
        assert_same_bits(first, run())


@pytest.mark.sanitizer
@HALF_DTYPES
@pytest.mark.parametrize("skinny", (24, 90, 600))
def test_skinny_experts_have_ctas_of_their_own(device, choose, dtype, skinny):
    """Experts of 64, 1 and 40 rows, among empty ones, beside four tiles of full experts for each SM: the same
    bits as when they come last. All CTAs share the tiles of 600 of them, which take too long for a few."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    full = [1100, 0, 1024, *[1153] * ceil(4 * num_sms / 10)]
    counts = [*full, *[(64, 1, 0, 40)[i % 4] for i in range(skinny)]]
    case = Case(dim=72, hidden=264, num_experts=len(counts), dtype=dtype)
    (up, _), settings = weights_of(case, device), settings_of(case)
    w2 = draw_weights(len(counts), 72, 264, dtype, device)
    plan = fused_moe.route_plan(ids_of(counts, device), len(counts))
    x, offsets = torch.randn(plan.token_row.size(0), 72).to(device, dtype), plan.offsets[1:]
    for n_tiles in (1, 3):
        _, own = ops.share_tiles(plan.schedule.cpu(), offsets.cpu(), n_tiles, num_sms)
        assert (own > 0) == (skinny < 600)

    def run() -> dict:
        with poisoned():
            h, a = ops.up_gate(x=x, **up, plan=plan.tensors, **settings)
            out = ops.grouped_mm(a=a, b=w2, offsets=offsets)
            dx = ops.up_dgrad(dh=h, w1=up["w1"], w3=up["w3"], plan=plan.tensors, layout=settings["layout"])
        return {"h": h, "a": a, "out": out, "dx": dx}

    choose(FUSED_MOE_SCHEDULE=None)
    found, num_rows = run(), sum(counts)
    exact.check(found["out"], exact.grouped_mm(found["a"], w2, offsets))
    rows = x[plan.row_token[:num_rows].long()]
    exact.check(found["h"], exact.up_gate(case, rows, up, offsets)[0])
    choose(FUSED_MOE_SCHEDULE="experts=in-turn")
    assert_same_bits(run(), found)


@pytest.mark.sanitizer
@HALF_DTYPES
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
def test_every_gemm_on_few_tiles(device, layout, dtype):
    """Part tiles, part k-tiles and every way to read a weight, for the sanitizer."""
    counts = (0, 1, 64, 65, 0, 129, 193)
    case = Case(dim=72, hidden=264, num_experts=len(counts), dtype=dtype, layout=layout, bias=True)
    (up, _), settings = weights_of(case, device), settings_of(case)
    plan = fused_moe.route_plan(ids_of(counts, device), len(counts))
    offsets, row_token = plan.offsets[1:], plan.row_token
    x = torch.randn(plan.token_row.size(0), 72).to(device, dtype)
    w2 = draw_weights(len(counts), 72, 264, dtype, device)
    h, a = ops.up_gate(x=x, **up, plan=plan.tensors, **settings)
    rows = ops.grouped_mm(a=a, b=w2, offsets=offsets)
    da = ops.grouped_mm(a=rows, b=w2.mT, offsets=offsets)
    dx = ops.up_dgrad(dh=h, w1=up["w1"], w3=up["w3"], plan=plan.tensors, layout=settings["layout"])
    scores = torch.rand(plan.token_row.shape, device=device)
    dh, a_scaled, dscores = ops.down_dgrad(
        dout=x, w2=w2, b2=None, h=h, scores=scores, plan=plan.tensors, **settings
    )
    dw1 = ops.wgrad(a=dh, b=x, offsets=offsets, b_row_token=row_token)
    dw2 = ops.wgrad(a=x, b=a_scaled, offsets=offsets, a_row_token=row_token)
    for dw in (torch.zeros_like(dw1, dtype=F32), swapped(torch.zeros_like(dw1, dtype=F32))):
        ops.wgrad_accumulate(a=dh, b=x, offsets=offsets, dw=dw, b_row_token=row_token)
        assert_near(dw.to(dtype), dw1.double())
    torch.cuda.synchronize()
    num_rows = sum(counts)
    for value in (h, a, rows, da, dx, dh, a_scaled):
        assert value[:num_rows].isfinite().all()
    for value in (dscores, dw1, dw2):
        assert value.isfinite().all()


@pytest.mark.sanitizer
def test_split_k_under_the_sanitizer(device):
    """An expert of several split-K slices, in both kinds of results."""
    for call, rows in wgrad_operands((1100, 0, 3), (264, 136), BF16, device):
        expected = exact.wgrad(*rows, call["offsets"]).flatten(0, 1)
        exact.check(ops.wgrad(**call).flatten(0, 1), expected)
        dw = torch.zeros(3, 264, 136, device=device)
        ops.wgrad_accumulate(**call, dw=dw)
        exact.check(dw.to(BF16).flatten(0, 1), expected)
