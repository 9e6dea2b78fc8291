"""unpermute on a GPU: widths about a warp's columns, slots about the rows in flight and the lanes, with and
without shared experts."""

import exact
import pytest
import torch
from cases import assert_near, score_dtype
from gpu_cases import ALL_DTYPES, HALF_DTYPES, draw_ids, poisoned

import fused_moe

pytestmark = pytest.mark.gpu

SHARED = pytest.mark.parametrize("shared", ("none", "plain", "gate"))
WIDTHS = (8, 248, 256, 264, 504, 512, 520, 1016, 1024, 1032, 1544, 2056)


def add_shared(form, num_tokens, width, dtype, device) -> tuple[dict, torch.Tensor | float]:
    """shared and shared_gate, and what they add in float64."""
    if form == "none":
        return {}, 0.0
    shared = torch.randn(num_tokens, width, device=device).to(dtype)
    if form == "plain":
        return {"shared": shared}, shared.double()
    gate = 3 * torch.randn(num_tokens, 1, device=device)
    return {"shared": shared, "shared_gate": gate}, gate.double().sigmoid() * shared.double()


def check_every_width(num_tokens, top_k, scored, shared, dtype, device) -> None:
    """Two fifths of the slots have no row, and NaN is past the last one. The same bits again."""
    num_experts = 40
    plan = fused_moe.route_plan(draw_ids("sentinels", num_tokens, top_k, num_experts, device), num_experts)
    scores = torch.randn(num_tokens, top_k, device=device) if scored else None
    has_row = (plan.token_row >= 0).double()
    weights = has_row if scores is None else has_row * scores.double()
    for width in WIDTHS:
        rows = torch.randn(num_tokens * top_k, width, device=device).to(dtype)
        rows[int(plan.offsets[-1]) :] = torch.nan
        added, more = add_shared(shared, num_tokens, width, dtype, device)
        with poisoned():
            out = fused_moe.unpermute(rows, plan, scores, **added)
        slots = rows.double()[plan.token_row.clamp_min(0).long()].nan_to_num()
        exact.check(out, (weights.unsqueeze(-1) * slots).sum(1) + more)
        assert torch.equal(out, fused_moe.unpermute(rows, plan, scores, **added))


@HALF_DTYPES
@SHARED
@pytest.mark.parametrize("scored", (True, False), ids=("scored", "plain"))
@pytest.mark.parametrize("top_k", (1, 3, 4, 5, 8, 32, 33))
def test_every_width(device, top_k, scored, shared, dtype):
    check_every_width(77, top_k, scored, shared, dtype, device)


@HALF_DTYPES
@SHARED
@pytest.mark.parametrize("top_k", (1, 7, 9, 32))
@pytest.mark.parametrize("num_tokens", (1, 512, 513))
def test_few_tokens(device, num_tokens, top_k, shared, dtype):
    """Up to 512 tokens have more warps each, and more rows in flight."""
    check_every_width(num_tokens, top_k, True, shared, dtype, device)


@HALF_DTYPES
@SHARED
@pytest.mark.parametrize("width", (8, 264, 1032, 2056))
@pytest.mark.parametrize("num_tokens", (1, 64, 77))
def test_both_kernels(device, num_tokens, width, shared, dtype):
    """A 33rd slot without a row selects the other kernel, with the same bits. So does a view that is aligned
    to one element."""
    top_k = 32
    ids = draw_ids("sentinels", num_tokens, top_k, 40, device)
    more_ids = torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)
    scores = torch.randn(num_tokens, top_k, device=device)
    more_scores = torch.cat([scores, torch.full_like(scores[:, :1], torch.nan)], 1)
    rows = torch.randn(num_tokens * top_k, width, device=device).to(dtype)
    more_rows = torch.cat([rows, torch.full_like(rows[:num_tokens], torch.nan)])
    added, _ = add_shared(shared, num_tokens, width, dtype, device)
    out = fused_moe.unpermute(rows, fused_moe.route_plan(ids, 40), scores, **added)
    more_plan = fused_moe.route_plan(more_ids, 40)
    assert torch.equal(fused_moe.unpermute(more_rows, more_plan, more_scores, **added), out)
    shifted = torch.empty(rows.numel() + 1, device=device, dtype=dtype)[1:].view_as(rows).copy_(rows)
    assert torch.equal(fused_moe.unpermute(shifted, fused_moe.route_plan(ids, 40), scores, **added), out)


@ALL_DTYPES
@pytest.mark.parametrize("width", (1, 7, 8, 250, 256, 264, 2056, 5001))
def test_shared_backward(device, width, dtype):
    """Against float64; each gradient alone, and of one token alone, has the same bits."""
    dout, shared = (torch.randn(77, width, device=device).to(dtype) for _ in range(2))
    gate = 3 * torch.randn(77, 1, device=device, dtype=torch.float64).to(score_dtype(dtype))
    run = torch.ops.fused_moe.shared_backward
    with poisoned():
        dshared, dgate = run(dout, shared, gate, True, True)
    wide = gate.double()
    exact.check(dshared, wide.sigmoid() * dout.double())
    slope = wide.sigmoid() * (-wide).sigmoid()
    assert_near(dgate, slope * (dout.double() * shared.double()).sum(-1, keepdim=True), slack=16.0)
    assert torch.equal(run(dout, None, gate, True, False)[0], dshared)
    assert torch.equal(run(dout, shared, gate, False, True)[1], dgate)
    for t in (0, 40, 76):
        token = slice(t, t + 1)
        alone = run(dout[token], shared[token], gate[token], True, True)
        assert torch.equal(alone[0], dshared[token]) and torch.equal(alone[1], dgate[token])
