"""int4 with scales of groups: compressed-tensors' pack-quantized, GPTQ and AWQ.

vLLM itself refuses act-order (g_idx), which scatters the columns of a group.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Method

from ..quantized import QuantizedWeight, from_awq, from_compressed_tensors
from ..quantized.formats import GROUPS, INT4_OFFSET, nibbles
from . import quantized


class _Int4(quantized.QuantizedMethod):
    NAMES = {"data": "qweight", "scale": "scales", "zero": "qzeros"}

    def scheme(self) -> tuple[int, int]:
        """Bits of a code, and columns of a group."""
        return self.quant_config.weight_bits, self.quant_config.group_size

    def why_not(self, layer):
        bits, group_size = self.scheme()
        if bits != 4:
            return f"integers of {bits} bits"
        if group_size not in GROUPS:
            return f"int4 with groups of {group_size} columns, not of {' or '.join(map(str, GROUPS))}"
        widths = quantized.widths_of(layer)
        if any(width % group_size for width in widths):
            return f"widths {widths}, not multiples of a group's {group_size} columns"
        return quantized.why_not_tiles(layer, "int4")

    def packed(self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> QuantizedWeight:
        """The weight of int32 codes (E, out, in / 8), scales (E, out, in / g) and maybe zero points, as
        compressed-tensors has them."""
        tensors = {"w.weight_packed": packed, "w.weight_scale": scale}
        if zero is None:
            return from_compressed_tensors(tensors, "w", dtype=self.moe.in_dtype)
        tensors["w.weight_zero_point"] = zero
        return _with_zeros(from_compressed_tensors(tensors, "w", dtype=self.moe.in_dtype))


def _with_zeros(w: QuantizedWeight) -> QuantizedWeight:
    """The weight with its zero points, which loaders drop if none differs from 0: others may follow."""
    if w.zero is not None:
        return w
    scale = w.scale
    zero = torch.zeros_like(scale, dtype=torch.int8)
    return QuantizedWeight(w.data, scale, zero, format=w.format, shape=w.shape, dtype=w.dtype)


class FusedMoECompressedInt4Method(_Int4, CompressedTensorsWNA16MoEMethod):
    NAMES = {"data": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point"}

    def scheme(self):
        return self.num_bits, self.group_size

    def read(self, published):
        return self.packed(published["data"], published["scale"], published.get("zero"))


class FusedMoEGptqMethod(_Int4, AutoGPTQMoEMethod):
    """Symmetric, as vLLM takes it: stored zero points say nothing."""

    def read(self, published):
        return self.packed(published["data"].mT, published["scale"].mT, None)

    def process_weights_after_loading(self, layer):
        for name in {"w13_bias", "w2_bias"} - layer._loaded_expert_biases:  # made in any case, but not loaded
            layer.register_parameter(name, None)
        super().process_weights_after_loading(layer)


class FusedMoEAwqMethod(_Int4, AutoAWQMoEMethod):
    def why_not(self, layer):
        return super().why_not(layer) if self.quant_config.zero_point else "AWQ without zero points"

    def read(self, published):
        tensors = {f"w.{self.NAMES[part]}": tensor for part, tensor in published.items()}
        return _with_zeros(from_awq(tensors, "w", dtype=self.moe.in_dtype))


class FusedMoEWna16Method(_Int4, MoeWNA16Method):
    """GPTQ or AWQ, which vLLM's loader has repacked: bytes of two codes along a row, and of two zero points
    along out."""

    def read(self, published):
        zero = published.get("zero")
        if zero is not None and zero.numel():
            zero = nibbles(zero.mT).mT.to(torch.int8) - INT4_OFFSET
        else:
            zero = None
        return self.packed(published["data"].view(torch.int32), published["scale"], zero)


def register() -> None:
    quantized.register(
        FusedMoECompressedInt4Method, FusedMoEGptqMethod, FusedMoEAwqMethod, FusedMoEWna16Method
    )
