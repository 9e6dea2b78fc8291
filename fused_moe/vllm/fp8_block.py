"""fp8 with a scale per block of 128 x 128, as DeepSeek-V3 and the FP8 models of Qwen3 publish it."""

from __future__ import annotations

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from ..quantized import from_fp8_block
from ..quantized.formats import BLOCK
from . import quantized
from .report import logger


class _Fp8Block(quantized.QuantizedMethod):
    def why_not(self, layer):
        blocks = self.weight_block_size and [*self.weight_block_size]
        if blocks != [BLOCK, BLOCK]:
            return f"fp8 with scales of {'blocks of ' + str(blocks) if blocks else 'matrices or rows'}"
        widths = quantized.widths_of(layer)
        if any(width % BLOCK for width in widths):  # or w3's rows begin within a block of w13
            return f"widths {widths}, not multiples of {BLOCK}"
        return None

    def read(self, published):
        return from_fp8_block(
            {"w": published["data"], "w_scale_inv": published["scale"]}, "w", dtype=self.moe.in_dtype
        )

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        logger.info_once(
            "fused_moe multiplies fp8 weights by activations of 16 bits, which are not quantised (W8A16); "
            "FUSED_MOE_VLLM=unquantized,int4,mxfp4 keeps vLLM's experts for them"
        )


class FusedMoEFp8Method(_Fp8Block, Fp8MoEMethod):
    NAMES = {"data": "weight", "scale": "weight_scale_inv"}


class FusedMoECompressedFp8Method(_Fp8Block, CompressedTensorsW8A8Fp8MoEMethod):
    NAMES = {"data": "weight", "scale": "weight_scale"}


def register() -> None:
    quantized.register(FusedMoEFp8Method, FusedMoECompressedFp8Method)
