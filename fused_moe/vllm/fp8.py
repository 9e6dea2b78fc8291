"""fp8 with a scale per block of 128 x 128, as DeepSeek-V3 and Qwen3-FP8 publish it, or per row."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationStrategy
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

from ..quantized.formats import BLOCK
from . import quantized
from .eight_bit import EightBitMethod


class _Fp8(EightBitMethod):
    PART = "fp8"
    has_rows = False  # scales per row

    @property
    def format(self):
        return "fp8" if self.has_rows else "fp8_block"

    def why_not(self, layer):
        blocks = self.weight_block_size and [*self.weight_block_size]
        if not self.has_rows and blocks != [BLOCK, BLOCK]:
            return f"fp8 with scales of {f'blocks of {blocks}' if blocks else 'matrices'}"
        return super().why_not(layer)


class FusedMoEFp8Method(_Fp8, Fp8MoEMethod):
    NAMES = {"data": "weight", "scale": "weight_scale_inv"}

    @property
    def is_dynamic(self):
        return self.quant_config.activation_scheme == "dynamic"


class FusedMoECompressedFp8Method(_Fp8, CompressedTensorsW8A8Fp8MoEMethod):
    @property
    def has_rows(self):
        return self.weight_quant.strategy == QuantizationStrategy.CHANNEL

    @property
    def is_dynamic(self):
        return not self.static_input_scales


def register() -> None:
    quantized.register(FusedMoEFp8Method, FusedMoECompressedFp8Method)
