"""DeepEP 2's `deep_ep.ElasticBuffer`, its layout with a row per token: each token goes once to every rank.

`experts` takes a rank's tokens and the weights of its experts. DeepEP wants bfloat16 tokens.
"""

import torch

import fused_moe


class Dispatch(torch.autograd.Function):
    """Tokens, scores and ids to the ranks of their experts. Backward is a combine."""

    @staticmethod
    def forward(ctx, x, scores, ids, buffer, num_experts, waits):
        routing = {"topk_idx": ids, "topk_weights": scores, "num_experts": num_experts}
        recv_x, recv_ids, recv_scores, handle, _ = buffer.dispatch(x, **routing, do_cpu_sync=waits)
        if not waits:  # ids past the received rows are not written
            row = torch.arange(recv_ids.size(0), device=x.device).unsqueeze(1)
            recv_ids.masked_fill_(row >= handle.psum_num_recv_tokens_per_scaleup_rank[-1], -1)
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_ids)
        return recv_x, recv_scores, recv_ids, handle

    @staticmethod
    def backward(ctx, dx, dscores, *_):
        dx, dscores, _ = ctx.buffer.combine(dx.contiguous(), ctx.handle, topk_weights=dscores.contiguous())
        return dx, dscores, None, None, None, None


class Combine(torch.autograd.Function):
    """Adds up the ranks' partial sums of each token. Backward dispatches with the same handle."""

    @staticmethod
    def forward(ctx, partial, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(partial, handle)[0]

    @staticmethod
    def backward(ctx, dout):
        return ctx.buffer.dispatch(dout.contiguous(), handle=ctx.handle)[0], None, None


def experts(x, w1, w2, w3, scores, ids, buffer, num_experts, waits=True, **options):
    """waits=False: rows for num_max_tokens_per_rank tokens of every rank, and nothing waits for the host."""
    call = (scores.float(), ids.long(), buffer, num_experts, waits)
    recv_x, recv_scores, recv_ids, handle = Dispatch.apply(x.contiguous(), *call)
    partial = fused_moe.fused_experts(recv_x, w1, w2, w3, recv_scores, recv_ids, **options)
    return Combine.apply(partial, buffer, handle)
