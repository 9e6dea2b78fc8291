"""mxfp4: gpt-oss's, whose gate and up rows alternate, and that of other models."""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4 import (  # noqa: E501
    CompressedTensorsW4A4Mxfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod

from ..quantized import from_mxfp4
from ..quantized.formats import MX_GROUP
from . import quantized


class _Mxfp4(quantized.QuantizedMethod):
    NAMES = {"data": "weight", "scale": "weight_scale"}

    def why_not(self, layer):
        return quantized.why_not_tiles(layer, "mxfp4")

    def maybe_roundup_sizes(self, *sizes_and_settings, **settings):
        """Without what vLLM's kernels want; padding is not loaded, and would be undefined after a reload."""
        return FusedMoEMethodBase.maybe_roundup_sizes(self, *sizes_and_settings, **settings)

    def read(self, published):
        blocks = published["data"].unflatten(-1, (-1, MX_GROUP // 2))
        return from_mxfp4({"w_blocks": blocks, "w_scales": published["scale"]}, "w", dtype=self.moe.in_dtype)


class FusedMoEGptOssMethod(_Mxfp4, GptOssMxfp4MoEMethod):
    pass


class FusedMoEMxfp4Method(_Mxfp4, Mxfp4MoEMethod):
    pass


class FusedMoECompressedMxfp4Method(_Mxfp4, CompressedTensorsW4A4Mxfp4MoEMethod):
    NAMES = {"data": "weight_packed", "scale": "weight_scale"}


def register() -> None:
    quantized.register(FusedMoEGptOssMethod, FusedMoEMxfp4Method, FusedMoECompressedMxfp4Method)
