"""quantized_mm on a GPU: no tier has a kernel for it yet, so the weight is dequantised for the call.

It is freed again after each GEMM, forward and backward: a layer holds one 16-bit weight at a time.
"""

from __future__ import annotations

from ..ops import HAS_CUDA_KERNELS, _library, ops
from . import formats

NAMES = {found.code: name for name, found in formats.FORMATS.items()}


def quantized_mm(a, data, scale, zero, offsets, format, transposed=False):
    w = formats.dequantize(NAMES[format], data, scale, zero, a.dtype)
    return ops.grouped_mm(a, w.mT if transposed else w, offsets)


if HAS_CUDA_KERNELS:
    _library.impl("quantized_mm", quantized_mm, "CUDA")
