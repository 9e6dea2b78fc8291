"""docs/training_loop.md: the layer that it puts together of functions, against a loop in plain PyTorch."""

import torch
from cases import F64

import fused_moe


def test_zero_and_copy_experts(device):
    """Experts without weights add nothing, or x by their scores; values and gradients of the loop."""
    T, D, F, E, Z, K = 40, 12, 8, 6, 3, 3
    sizes = ((T, D), (E + Z, D), (E, F, D), (E, D, F), (E, F, D))
    leaves = [torch.randn(size, dtype=F64, device=device, requires_grad=True) for size in sizes]
    x, gate, w1, w2, w3 = leaves
    dout = torch.randn(T, D, dtype=F64, device=device)

    scores, ids = fused_moe.route(fused_moe.router_logits(x, gate), K)
    zero = fused_moe.fused_experts(x, w1, w2, w3, scores, ids)
    copy = zero + (scores * (ids >= E)).sum(-1, keepdim=True) * x
    assert (ids >= E).any() and (ids < E).any()

    plain_scores = (x @ gate.T).softmax(-1)
    best = plain_scores.topk(K)
    for found, factor in ((zero, 0), (copy, 1)):
        rows = []
        for t in range(T):
            row = torch.zeros(D, dtype=F64, device=device)
            for score, e in zip(best.values[t], best.indices[t].tolist(), strict=True):
                if e < E:
                    row = row + score * (w2[e] @ (torch.nn.functional.silu(w1[e] @ x[t]) * (w3[e] @ x[t])))
                else:
                    row = row + score * factor * x[t]
            rows.append(row)
        expected = torch.stack(rows)
        torch.testing.assert_close(found, expected)
        grads = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for out in (found, expected))
        for ours, plain in zip(*grads, strict=True):
            torch.testing.assert_close(ours, plain)
