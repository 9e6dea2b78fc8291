"""LoRA of the experts: low-rank additions to w1, w2 and w3, for weights that stay frozen."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .checks import FLOATING, check_like, check_real, check_tensor, fail


class LoRA(NamedTuple):
    """Adapters of w1, w2 and w3: expert e multiplies by w[e] + scale * b[e] @ a[e], which is never formed.

    Each a is (E, rank, in) and each b (E, out, rank), for the weight (E, out, in) as `fused_experts` computes
    with it: not transposed, and with layout "halves" or "interleaved" in the rows of w1. A weight without an
    adapter has None for both. Ranks may differ; multiples of 8 run on Hopper's kernels.

    Source: LoRA (arXiv 2106.09685), one pair of matrices per expert.
    """

    a1: Tensor | None = None
    b1: Tensor | None = None
    a2: Tensor | None = None
    b2: Tensor | None = None
    a3: Tensor | None = None
    b3: Tensor | None = None
    scale: float = 1.0

    @property
    def pairs(self) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """(a, b) of w1, w2 and w3."""
        return (self.a1, self.b1), (self.a2, self.b2), (self.a3, self.b3)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:6]


def check_lora(fn: str, lora, x_name: str, x: Tensor, weights: tuple) -> None:
    """Checks adapters against w1, w2 and w3 (E, out, in)."""
    if not isinstance(lora, LoRA):
        fail(TypeError, fn, "lora to be a fused_moe.LoRA", type(lora).__name__)
    check_real(fn, "lora.scale", lora.scale)
    for i, ((a, b), w) in enumerate(zip(lora.pairs, weights, strict=True), 1):
        if (a is None) != (b is None):
            fail(ValueError, fn, f"lora.a{i} and lora.b{i} together", "one of them")
        if a is None:
            continue
        if w is None:
            fail(ValueError, fn, f"lora.a{i} only beside w{i}", f"lora.a{i} without w{i}")
        E, rows, cols = w.shape
        for name, value in ((f"lora.a{i}", a), (f"lora.b{i}", b)):
            check_tensor(fn, name, value, 3, FLOATING)
            check_like(fn, name, value, x_name, x)
        rank = a.size(1)
        if tuple(a.shape) != (E, rank, cols) or rank < 1:
            fail(ValueError, fn, f"lora.a{i} of shape (E, rank, in) = ({E}, rank, {cols})", tuple(a.shape))
        if tuple(b.shape) != (E, rows, rank):
            fail(ValueError, fn, f"lora.b{i} of shape (E, out, rank) = {(E, rows, rank)}", tuple(b.shape))
