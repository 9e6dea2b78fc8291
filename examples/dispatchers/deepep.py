"""DeepEP's normal kernels, `deep_ep.Buffer`: each token goes once to every rank that has one of its experts.

`experts` takes a rank's tokens and the weights of its experts. DeepEP wants bfloat16 tokens.
"""

import torch

import fused_moe


class Dispatch(torch.autograd.Function):
    """Tokens, scores and ids to the ranks of their experts. Backward is a combine."""

    @staticmethod
    def forward(ctx, x, scores, ids, buffer, num_experts, num_worst_tokens):
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node}
        layout |= {"num_tokens_per_expert": per_expert, "is_token_in_rank": is_in_rank}
        routing = {"topk_idx": ids, "topk_weights": scores, "num_worst_tokens": num_worst_tokens}
        recv_x, recv_ids, recv_scores, _, handle, _ = buffer.dispatch(x, **layout, **routing)
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


def experts(x, w1, w2, w3, scores, ids, buffer, num_experts, num_worst_tokens=0, **options):
    """num_worst_tokens > 0, on one host: rows of that capacity, and nothing waits for the host."""
    call = (scores.float(), ids.long(), buffer, num_experts, num_worst_tokens)
    recv_x, recv_scores, recv_ids, handle = Dispatch.apply(x.contiguous(), *call)
    partial = fused_moe.fused_experts(recv_x, w1, w2, w3, recv_scores, recv_ids, **options)
    return Combine.apply(partial, buffer, handle)
