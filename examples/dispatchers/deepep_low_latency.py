"""DeepEP's low-latency kernels: rows (E_local, capacity, D) and a count per expert, for decoding.

`experts` takes a rank's tokens and the weights of its experts. The rows carry no scores: the combine
multiplies by them where the tokens came from. So there is no backward. DeepEP wants bfloat16 tokens.
"""

import torch

import fused_moe


def experts(x, w1, w2, w3, scores, ids, buffer, num_experts, num_max_tokens, **options):
    """num_max_tokens: as many tokens or more as any rank has, the same on all ranks."""
    if torch.is_grad_enabled():
        raise RuntimeError("the low-latency kernels have no backward: call them under torch.no_grad()")
    scores, ids = scores.float().contiguous(), ids.long()
    x_rows, counts, handle, _, _ = buffer.low_latency_dispatch(
        x.contiguous(), ids, num_max_tokens, num_experts, use_fp8=False
    )
    E, capacity, D = x_rows.shape
    row = torch.arange(capacity, device=x.device)
    expert = torch.arange(E, device=x.device, dtype=torch.int32).unsqueeze(1)
    row_ids = torch.where(row < counts.unsqueeze(1), expert, -1).view(-1, 1)  # the rest is not computed
    ones = torch.ones_like(row_ids, dtype=torch.float32)
    y_rows = fused_moe.fused_experts(x_rows.view(-1, D), w1, w2, w3, ones, row_ids, **options)
    return buffer.low_latency_combine(y_rows.view_as(x_rows), ids, scores, handle)[0]
