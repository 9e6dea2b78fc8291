"""PyTorch's symmetric memory over NVSHMEM, `torch.ops.symm_mem.all_to_all_vdev_2d`: sizes stay on the device.

One `Exchange`, of the same sizes on all ranks, serves all layers. Each call to the experts is followed by one
back, and in backward likewise, so no rank still reads a buffer that a call overwrites.
"""

import torch
import torch.distributed._symmetric_memory as symm_mem

import fused_moe


class Exchange:
    def __init__(self, group_name, num_experts, num_sent, num_received, dim, dtype, device):
        """num_sent: T * K. num_received: enough for any rank's rows, and one more for each of its experts."""
        sizes = ((num_sent, dim), (num_received, dim), (num_experts,), (2, num_experts), (2, num_experts))
        dtypes = (dtype, dtype, torch.int64, torch.int64, torch.int64)
        made = [symm_mem.empty(*s, dtype=d, device=device) for s, d in zip(sizes, dtypes, strict=True)]
        for tensor in made:
            symm_mem.rendezvous(tensor, group_name)
        self.sent, self.received, self.counts, self.layout, self.returned = made
        self.group_name = group_name

    def __call__(self, rows, splits):
        """Rows grouped by expert to their ranks, by counts (E,); or back, by a layout (2, E). Also returns
        the splits of the way back: a layout has counts and first rows of each local expert and rank."""
        ops, goes = torch.ops.symm_mem, splits.dim() == 1
        op = ops.all_to_all_vdev_2d if goes else ops.all_to_all_vdev_2d_offset
        call = (self.sent, self.received, self.counts, self.layout)
        source, out, own, made = call if goes else (self.received, self.sent, self.layout, self.returned)
        source[: rows.size(0)] = rows
        own.copy_(splits)
        op(source, out, own, made, self.group_name)
        return out.clone(), (made if goes else made[0]).clone()


class Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, splits, exchange):
        moved, way_back = exchange(rows, splits)
        ctx.exchange, ctx.way_back, ctx.num_rows = exchange, way_back, rows.size(0)
        ctx.mark_non_differentiable(way_back)
        return moved, way_back

    @staticmethod
    def backward(ctx, dmoved, _):
        return ctx.exchange(dmoved, ctx.way_back)[0][: ctx.num_rows], None, None


def experts(x, w1, w2, w3, scores, ids, exchange, num_experts, **options):
    rows, plan = fused_moe.permute(x, ids, num_experts)
    received, layout = Move.apply(rows, plan.counts, exchange)
    counts, starts = layout.view(2, w2.size(0), -1)
    first, row = starts[:, 0].contiguous(), torch.arange(received.size(0), device=x.device)
    expert = torch.searchsorted(first, row, right=True) - 1
    row_ids = torch.where(row < (first + counts.sum(1))[expert], expert, -1).unsqueeze(1)  # -1 in the gaps
    y = fused_moe.fused_experts(received, w1, w2, w3, torch.ones_like(row_ids).float(), row_ids, **options)
    return fused_moe.unpermute(Move.apply(y, layout, exchange)[0][: rows.size(0)], plan, scores)
