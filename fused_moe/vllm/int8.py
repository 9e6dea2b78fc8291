"""int8 with a scale per row, of compressed-tensors. vLLM itself refuses static scales of activations."""

from __future__ import annotations

from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)

from . import quantized
from .eight_bit import EightBitMethod


class FusedMoECompressedInt8Method(EightBitMethod, CompressedTensorsW8A8Int8MoEMethod):
    PART = format = "int8"
    is_dynamic = True


def register() -> None:
    quantized.register(FusedMoECompressedInt8Method)
