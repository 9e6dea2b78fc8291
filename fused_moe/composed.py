"""The experts as a composition of grouped GEMMs: for quantised weights, and for LoRA.

    rows = permute(x),  h = rows w1^T | rows w3^T,  a = act(h),  y = a w2^T,  out = unpermute(y, scores)

Every step is an operator with its own gradient, so a weight needs no more than its GEMM. The fused
operators keep less and do not write rows of x; these steps are for what has no fused kernel.

Where gate and up are quantised, x to a is one operator, `quantized_up`, which rounds h only to keep it. What
adapters add to h is its argument. So a token's output has the bits of experts without gradients, and adapters
that add zeros change none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import is_autocast_enabled
from .lora import LoRA, pairs_of
from .ops import ops, run
from .plan import Plan, tensors_again
from .quantized.weight import QuantizedWeight


def experts(
    x: Tensor,
    weights: tuple,
    biases: tuple,
    scores: Tensor | None,
    plan: Plan,
    activation: tuple[int, int, list[float]],
    score_on: str,
    lora: LoRA | None,
    shared: tuple = (None, None),
) -> Tensor:
    """As `fused_experts`, and of a plan without row maps as `grouped_mlp`, of checked arguments. Weights are
    tensors (E, out, in), QuantizedWeights or None. `activation` is layout, activation and constants of
    operators, `shared` are shared and shared_gate."""
    offsets = plan.offsets[1:]
    has_maps = plan.row_token is not None
    pairs: Sequence[tuple[Tensor | None, Tensor | None]] = ((None, None),) * 3
    scale = 1.0
    if lora is not None:
        pairs, scale = pairs_of(lora), lora.scale
        if not is_autocast_enabled(x):  # which casts them itself
            dtype = x.dtype
            pairs = [(a if a is None else a.to(dtype), b if b is None else b.to(dtype)) for a, b in pairs]

    def gemm(rows: Tensor, i: int) -> Tensor:
        return _gemm(rows, weights[i], biases[i], *pairs[i], scale, offsets)

    is_quantized = all(w is None or isinstance(w, QuantizedWeight) for w in (weights[0], weights[2]))
    pair = _joined(pairs[0], pairs[2], weights[0], weights[2]) if is_quantized else None
    rows, of_x, tensors = x, scores if score_on == "input" else None, plan.tensors
    if has_maps and (pair is not None or not is_quantized):
        rows, of_x = run(ops.permute.default, x, tensors), None
        tensors = [plan.offsets, plan.schedule]  # rows are grouped now
        if score_on == "input":
            rows = _scored(rows, scores, plan)
    if is_quantized:
        addend = None if pair is None else _low_rank(rows, *pair, scale, offsets)
        a = _quantized_up(rows, weights, biases, of_x, addend, tensors, activation)
    else:
        h = gemm(rows, 0)
        up = None if weights[2] is None else gemm(rows, 2)
        a = run(ops.activate.default, h, up, *activation)
    y = gemm(a, 1)
    if not has_maps:
        return y
    if shared[0] is not None:
        shared = shared[0].to(y.dtype), shared[1]  # as autocast casts it
    return run(
        ops.unpermute.default, y, scores if score_on == "output" else None, tensors_again(plan), *shared
    )


def _quantized_up(x, weights, biases, scores, addend, plan: list[Tensor], activation) -> Tensor:
    w1, _, w3 = weights
    b1, _, b3 = biases
    of_w1 = (_packings(w1), w1.code)
    of_w3 = ([], 0) if w3 is None else (_packings(w3), w3.code)
    operands = (x, *of_w1, *of_w3, b1, b3, scores, addend, plan)
    return run(ops.quantized_up.default, *operands, *activation, False)[1]  # autograd's rule keeps h


def _packings(w: QuantizedWeight) -> list[Tensor]:
    """A weight as `quantized_up` takes it."""
    return [t for t in (*w.tensors, *w.transposed_tensors) if t is not None]


def _joined(gate: tuple, up: tuple, w1, w3) -> tuple[Tensor, Tensor] | None:
    """(a, b) of all that adapters add to h. Where gate and up are two weights, ranks of both are one after
    the other, and b is zero where a gate would read the up's."""
    (a1, b1), (a3, b3) = gate, up
    if w3 is None:
        return None if a1 is None else gate
    width = w3.size(1)
    if a1 is None:
        return None if a3 is None else (a3, F.pad(b3, (0, 0, width, 0)))
    if a3 is None:
        return a1, F.pad(b1, (0, 0, 0, width))
    b = torch.cat((F.pad(b1, (0, b3.size(2))), F.pad(b3, (b1.size(2), 0))), 1)
    return torch.cat((a1, a3), 1), b


def _low_rank(rows: Tensor, a: Tensor, b: Tensor, scale: float, offsets: Tensor) -> Tensor:
    """scale (rows a^T) b^T."""
    low = run(ops.grouped_mm.default, rows, a, offsets) * scale
    return run(ops.grouped_mm.default, low, b, offsets)


def _scored(rows: Tensor, scores: Tensor | None, plan: Plan) -> Tensor:
    """Each row times its score, rounded to rows' dtype."""
    assert scores is not None and plan.row_slot is not None
    row_scores = scores.flatten()[plan.row_slot.clamp_min(0).long()].unsqueeze(-1)
    return (rows.to(scores.dtype) * row_scores).to(rows.dtype)


def _gemm(rows: Tensor, w, bias, a, b, scale: float, offsets: Tensor) -> Tensor:
    """rows w^T + bias + scale (rows a^T) b^T, of the rows' experts; zero past the last row."""
    if isinstance(w, QuantizedWeight):
        tensors, transposed = w.tensors, w.transposed_tensors
        out = run(ops.quantized_mm.default, rows, *tensors, offsets, w.code, False, *transposed, bias)
    else:
        out = run(ops.grouped_mm.default, rows, w, offsets, bias)
    return out if a is None else out + _low_rank(rows, a, b, scale, offsets)
