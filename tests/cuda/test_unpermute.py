"""unpermute on a GPU: widths about a warp's columns, slots about the rows in flight and the lanes."""

import exact
import pytest
import torch
from gpu_cases import HALF_DTYPES, poisoned

import fused_moe

pytestmark = pytest.mark.gpu

WIDTHS = (8, 248, 264, 504, 512, 520, 1016, 1024, 1032, 1544, 2056)


@HALF_DTYPES
@pytest.mark.parametrize("scored", (True, False), ids=("scored", "plain"))
@pytest.mark.parametrize("top_k", (1, 3, 4, 5, 8, 32, 33))
def test_every_width(device, top_k, scored, dtype):
    """A fifth of the slots has no row, and NaN is past the last one. The same bits again."""
    num_tokens, num_experts = 77, 40
    ids = torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k].int().to(device)
    ids[torch.rand(ids.shape, device=device) < 0.2] = -1
    plan = fused_moe.route_plan(ids, num_experts)
    scores = torch.randn(num_tokens, top_k, device=device) if scored else None
    has_row = (plan.token_row >= 0).double()
    weights = has_row if scores is None else has_row * scores.double()
    for width in WIDTHS:
        rows = torch.randn(num_tokens * top_k, width, device=device).to(dtype)
        rows[int(plan.offsets[-1]) :] = torch.nan
        with poisoned():
            out = fused_moe.unpermute(rows, plan, scores)
        slots = rows.double()[plan.token_row.clamp_min(0).long()].nan_to_num()
        exact.check(out, (weights.unsqueeze(-1) * slots).sum(1))
        assert torch.equal(out, fused_moe.unpermute(rows, plan, scores))
