"""quantized_mm on a GPU: no tier has a kernel for it yet, so weights are dequantised for the call.

They are freed again after each GEMM, forward and backward: a layer holds one 16-bit weight at a time. Where
rows are fewer than experts, as in decoding, it is the weights of the active experts alone. Nothing waits for
the host, so a CUDA graph may capture it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import HAS_CUDA_KERNELS, _library, ops
from . import formats

NAMES = tuple(formats.FORMATS)


def quantized_mm(
    a: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offsets: Tensor,
    format: int,
    transposed: bool = False,
) -> Tensor:
    """As the operator of this name."""
    if a.size(0) < data.size(0):
        experts, offsets = _active(offsets, max(a.size(0), 1))
        data, scale, zero = (t if t is None else _select(t, experts) for t in (data, scale, zero))
    w = formats.dequantize(NAMES[format], data, scale, zero, a.dtype)
    return ops.grouped_mm(a, w.mT if transposed else w, offsets)


def _active(offsets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """`most` experts, all that have rows among them, and the ends of their rows."""
    is_empty = offsets == F.pad(offsets[:-1], (1, 0))
    experts = is_empty.int().argsort(stable=True)[:most]
    # Empty experts come last here, where all rows have ended.
    return experts, offsets[experts].where(~is_empty[experts], offsets[-1])


def _select(tensor: Tensor, experts: Tensor) -> Tensor:
    """The experts' part of a tensor, as bytes: not every float8 can be indexed."""
    return tensor.view(torch.uint8)[experts].view(tensor.dtype)


if HAS_CUDA_KERNELS:
    _library.impl("quantized_mm", quantized_mm, "CUDA")
