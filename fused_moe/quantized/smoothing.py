"""Smoothing: rows are divided by factors, and the columns of their weight multiplied, before both are int8.

A row of int8 has one scale, so a channel that is a hundred times as large as the others leaves few codes for
them. Dividing it moves that range into the weight (SmoothQuant, arXiv 2211.10438). Factors have the geometric
mean 1 in each expert: a common factor would change scales, but no code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..activation import activate, activation_of
from ..checks import check_plain, check_real, fail
from ..finding import experts_in
from ..ops import ops, route_plan, run

if TYPE_CHECKING:
    from ..module import Experts

FN = "smooth_from"


def smooth_from(module: nn.Module, batches: Iterable, alpha: float = 0.5) -> dict[str, tuple[Tensor, Tensor]]:
    """Measures what `quantize(module, "int8", compute="int8_smooth", smooth=...)` divides by.

    It runs the module, whose experts are not quantised yet, on batches, in eval mode and without gradients.
    For each expert it takes the peaks of the inputs of its weights, and of the weights' columns, and returns
    peak_x^alpha / peak_w^(1 - alpha), the formula of SmoothQuant (arXiv 2211.10438), divided by its geometric
    mean over the expert's channels. w1 and w3 share their input and so their factors. Channels without a
    finite peak > 0 have the factor 1. Experts that had no token have the factors that `quantize` takes
    without `smooth`.

    Args:
        module: with a FusedMoE in it. It is as before afterwards.
        batches: inputs of the module: tensors, tuples of positional or mappings of keyword arguments.
        alpha: from 0 to 1, how much of the range goes from the rows to the weights.

    Returns:
        {name of the experts in the module: (smooth1 (E, D), smooth2 (E, F))} in float32: of x, and of
        act(w1 x) * (w3 x).

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(64, 128, num_experts=4, top_k=2)
        >>> smooth = fused_moe.smooth_from(moe, [torch.randn(16, 64) for _ in range(2)])
        >>> moe = fused_moe.quantize(moe, "int8", compute="int8_smooth", smooth=smooth)
        >>> with torch.no_grad():
        ...     moe(torch.randn(5, 64)).shape
        torch.Size([5, 64])
    """
    named = experts_in(FN, module)
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        fail(TypeError, FN, "batches to be an iterable of inputs", type(batches).__name__)
    check_real(FN, "alpha", alpha)
    if not 0 <= alpha <= 1:
        fail(ValueError, FN, "alpha from 0 to 1", alpha)
    for name, experts in named.items():
        if experts.loras:
            fail(ValueError, FN, "experts without adapters", f"{name} with them")
        for key, w in zip(("w1", "w2", "w3"), experts.weights, strict=True):
            if w is not None and not isinstance(w, nn.Parameter):
                fail(ValueError, FN, f"{key} of experts that are not quantised yet", type(w).__name__)
            if w is not None:
                check_plain(FN, key, w)
    peaks = {name: _Peaks(experts) for name, experts in named.items()}
    hooks = [named[name].register_forward_pre_hook(peaks[name].see) for name in named]
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                _call(module, batch)
    finally:
        for hook in hooks:
            hook.remove()
        for m in training:
            m.training = True
    for name, found in peaks.items():
        if not found.is_called:
            fail(ValueError, FN, f"batches that reach the experts {name!r}", "none that does")
    return {name: found.factors(alpha) for name, found in peaks.items()}


def from_weights(*weights: Tensor) -> Tensor:
    """The factors (E, in) of weights (E, out, in) that have the same input, of the weights alone: the inverse
    square root of the peaks of their columns, that is alpha = 1/2 and inputs whose channels have one peak."""
    return _normalised(_column_peaks(weights).rsqrt())


def from_experts(experts: Experts) -> tuple[Tensor, Tensor]:
    """smooth1 (E, D) and smooth2 (E, F) of the experts' weights alone."""
    w1, w2, w3 = experts.weights
    w1, w2, w3 = w1.detach(), w2.detach(), None if w3 is None else w3.detach()
    return from_weights(w1) if w3 is None else from_weights(w1, w3), from_weights(w2)


def _column_peaks(weights: Iterable[Tensor]) -> Tensor:
    peaks = [w.detach().abs().amax(1).float() for w in weights]
    return torch.stack(peaks).amax(0)


def _normalised(factors: Tensor) -> Tensor:
    """Divided by their geometric mean in each expert; 1 where they are not finite and > 0."""
    is_right = factors.isfinite() & (factors > 0)
    logs = torch.where(is_right, factors, 1).log()
    mean = logs.sum(1, keepdim=True) / is_right.sum(1, keepdim=True).clamp_min(1)
    return torch.where(is_right, (logs - mean).exp(), 1)


class _Peaks:
    """The largest magnitudes that each expert's x and act(w1 x) * (w3 x) had in each channel."""

    def __init__(self, experts: Experts):
        E, D, F = experts.w2.shape
        self.experts, self.is_called = experts, False
        new = experts.w2.new_zeros
        # The last row is of the rows past the last expert's.
        self.x, self.a = (new(E + 1, width, dtype=torch.float32, requires_grad=False) for width in (D, F))
        self.counts = new(E, dtype=torch.int64, requires_grad=False)

    def see(self, experts: Experts, args: tuple) -> None:
        """A hook before the experts' forward."""
        x, _, ids = args[:3]
        plan = route_plan(ids, experts.num_experts)
        rows, ends = run(ops.permute.default, x, plan.tensors), plan.offsets[1:]
        gate = run(ops.grouped_mm.default, rows, experts.w1, ends, experts.b1)
        up = None if experts.w3 is None else run(ops.grouped_mm.default, rows, experts.w3, ends, experts.b3)
        a = activate(gate, up, **activation_of(experts))
        row = torch.arange(rows.size(0), device=rows.device, dtype=ends.dtype)
        expert = torch.bucketize(row, ends, right=True).unsqueeze(1)
        for peaks, seen in ((self.x, rows), (self.a, a)):
            peaks.scatter_reduce_(0, expert.expand_as(seen), seen.abs().float(), "amax")
        self.counts += plan.counts
        self.is_called = True

    def factors(self, alpha: float) -> tuple[Tensor, Tensor]:
        w1, w2, w3 = self.experts.weights
        of_x = (w1,) if w3 is None else (w1, w3)
        has_tokens = (self.counts > 0).unsqueeze(1)
        found = []
        for peaks, weights in ((self.x, of_x), (self.a, (w2,))):
            measured = peaks[:-1].pow(alpha) / _column_peaks(weights).pow(1 - alpha)
            found.append(torch.where(has_tokens, _normalised(measured), from_weights(*weights)))
        smooth1, smooth2 = found
        return smooth1, smooth2


def _call(module: nn.Module, batch) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, (tuple, list)):
        module(*batch)
    else:
        module(batch)
