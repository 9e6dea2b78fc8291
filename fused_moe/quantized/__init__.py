"""Quantised weights: `QuantizedWeight`, `quantize`, and loaders of published checkpoints.

`formats` says what each format stores, `loaders` reads checkpoints' tensors.
"""

from .loaders import (
    from_awq,
    from_compressed_tensors,
    from_fp8_block,
    from_gptq,
    from_gptq_experts,
    from_mxfp4,
)
from .quantizing import quantize
from .refreshing import refresh_weights
from .smoothing import smooth_from
from .weight import QuantizedWeight

__all__ = [
    "QuantizedWeight",
    "from_awq",
    "from_compressed_tensors",
    "from_fp8_block",
    "from_gptq",
    "from_gptq_experts",
    "from_mxfp4",
    "quantize",
    "refresh_weights",
    "smooth_from",
]
