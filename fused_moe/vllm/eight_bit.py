"""Experts of 8 bits, whose checkpoints ask for activations of 8 bits, too (W8A8).

In the modes that FUSED_MOE_VLLM_COMPUTE names, "fp8" and "int8", `fused_experts` quantises activations, and
weights stay where vLLM has loaded them. In mode "codes" activations keep 16 bits, as with other formats,
and weights become tiles. A layer gets its mode when it is built, and has it for batches of any size.
"""

from __future__ import annotations

from vllm.config import get_current_vllm_config

from ..ops import TILE
from ..quantized import QuantizedWeight
from ..quantized.computing import WIDTH
from ..quantized.formats import BLOCK
from . import PARTS, modes_named, quantized
from .report import logger


class EightBitMethod(quantized.QuantizedMethod):
    PART: str  # of PARTS, and the mode that its checkpoints ask for
    NAMES = {"data": "weight", "scale": "weight_scale"}
    compute, power_of_two = "codes", False

    # --- what a subclass says ---

    @property
    def format(self) -> str:
        """The weights' format, as `QuantizedWeight` names it."""
        raise NotImplementedError

    @property
    def is_dynamic(self) -> bool:
        """Whether the checkpoint asks for activations whose scales are found in each call."""
        raise NotImplementedError

    # --- what quantized.py and vLLM call ---

    def why_not(self, layer):
        if self.format == "fp8_block":
            multiple = BLOCK  # or w3's rows begin within a block of w13
        else:
            multiple = TILE if self._mode() == "codes" else WIDTH
        widths = quantized.widths_of(layer)
        if any(w % multiple for w in widths):
            return f"widths {widths}, not multiples of {multiple}"
        return quantized.why_not_tiles(layer, self.format) if self._mode() == "codes" else None

    def create_weights(self, layer, *sizes, **settings):
        self.compute = self._mode()
        self.power_of_two = self.compute == "fp8" and scale_format() == "ue8m0"
        super().create_weights(layer, *sizes, **settings)

    def read(self, published):
        data, scale = published["data"], published["scale"]
        return QuantizedWeight(
            data, scale, format=self.format, shape=data.shape, dtype=self.moe.in_dtype,
            compute=self.compute, power_of_two=self.power_of_two,
        )  # fmt: skip

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        if self.compute == "codes":
            what = "multiplies %s weights by activations of 16 bits, which are not quantised (W8A16); "
        else:
            what = "quantises the activations of %s weights (W8A8); FUSED_MOE_VLLM_COMPUTE=codes does not, "
        others = ",".join(part for part in PARTS if part != self.PART)
        logger.info_once(f"fused_moe {what}FUSED_MOE_VLLM=%s keeps vLLM's experts", self.PART, others)

    def _mode(self) -> str:
        return self.PART if self.is_dynamic and self.PART in modes_named() else "codes"


def scale_format() -> str | None:
    """`scale_fmt` of the checkpoint's quantization_config: "ue8m0" where scales are powers of two."""
    model = get_current_vllm_config().model_config
    arch = getattr(model, "model_arch_config", None)
    return (getattr(arch, "quantization_config", None) or {}).get("scale_fmt")
