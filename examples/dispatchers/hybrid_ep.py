"""HybridEP, `deep_ep.HybridEPBuffer` of DeepEP's branch hybrid-ep: rows grouped by expert, a score for each.

`experts` takes a rank's tokens and the weights of its experts. HybridEP wants bfloat16 tokens, as many
on every rank, and distinct ids in a token.
"""

import torch

import fused_moe


class Dispatch(torch.autograd.Function):
    """Tokens and scores (T, E) to rows with a score and an id. Backward is a combine."""

    @staticmethod
    def forward(ctx, x, scores, is_chosen, buffer, num_local, num_rows):
        routing = {"routing_map": is_chosen, "probs": scores, "num_of_experts_per_rank": num_local}
        sizes = {"num_permuted_tokens": num_rows, "non_blocking": num_rows is not None}
        x_rows, row_scores, _, counts, handle = buffer.dispatch_with_permute(hidden=x, **routing, **sizes)
        row = torch.arange(x_rows.size(0), device=x.device)
        row_ids = torch.searchsorted(counts.to(x.device).cumsum(0), row, right=True)  # past the last: E_local
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(row_ids)
        return x_rows, row_scores, row_ids, handle

    @staticmethod
    def backward(ctx, dx, dscores, *_):
        grads = {"hidden": dx.contiguous(), "probs": dscores.contiguous()}
        return *ctx.buffer.combine_with_unpermute(**grads, handle=ctx.handle), None, None, None, None


class Combine(torch.autograd.Function):
    """Adds up each token's rows. Backward dispatches with the same handle."""

    @staticmethod
    def forward(ctx, y_rows, buffer, handle):
        ctx.buffer, ctx.cached = buffer, {"handle": handle, "num_permuted_tokens": y_rows.size(0)}
        return buffer.combine_with_unpermute(hidden=y_rows, handle=handle)[0]

    @staticmethod
    def backward(ctx, dout):
        cached = ctx.cached | {"non_blocking": True}  # the number of rows is known
        return ctx.buffer.dispatch_with_permute(hidden=dout.contiguous(), **cached)[0], None, None


def experts(x, w1, w2, w3, scores, ids, buffer, num_experts, num_rows=None, **options):
    """num_rows: a capacity. Rows past it are dropped, and nothing waits for the host."""
    column = torch.where(ids >= 0, ids, num_experts).long()  # a slot without an expert: the last, cut off
    dense = scores.new_zeros(x.size(0), num_experts + 1, dtype=torch.float32)
    is_chosen = dense.bool().scatter(1, column, True)[:, :-1].contiguous()
    dense = dense.scatter(1, column, scores.float())[:, :-1].contiguous()
    rows = Dispatch.apply(x.contiguous(), dense, is_chosen, buffer, w2.size(0), num_rows)
    x_rows, row_scores, row_ids, handle = rows
    per_row = (row_scores.unsqueeze(1), row_ids.unsqueeze(1))
    return Combine.apply(fused_moe.fused_experts(x_rows, w1, w2, w3, *per_row, **options), buffer, handle)
