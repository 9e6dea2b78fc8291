"""The weights of a module of experts as fused_experts takes them, whatever a checkpoint stores."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from ..quantized import QuantizedWeight, formats, from_fp8_block, from_mxfp4

# What a quantised weight's parameters have after its name: FP8Experts, then MXFP4, then compressed-tensors.
PARTS = ("", "_scale_inv", "_blocks", "_scales", "_packed", "_scale", "_zero_point")


def first_name(experts: nn.Module) -> str:
    """The name of w1, or of w1 and w3 together."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def weight_of(experts: nn.Module, name: str) -> Tensor | QuantizedWeight:
    """A weight as fused_experts takes it. Parameters that are codes and scales become a QuantizedWeight of
    the same memory, which is made once and kept beside them, where no state_dict sees it."""
    w = getattr(experts, name, None)
    if isinstance(w, QuantizedWeight) or (w is not None and w.element_size() > 1):
        return w
    own = experts._parameters
    sources = [own[name + part] for part in PARTS if own.get(name + part) is not None]
    # `.to(device)` keeps a parameter and replaces its memory. Traced code can only ask for the device.
    places = [p.device if torch.compiler.is_compiling() else p.data_ptr() for p in sources]
    kept = experts.__dict__.setdefault("_fused_moe_weights", _Kept())
    if name in kept:
        kept_sources, kept_places, made = kept[name]
        if torch.compiler.is_compiling():
            kept_places = [made.device] * len(sources)
        same = len(sources) == len(kept_sources) and all(map(operator.is_, sources, kept_sources))
        if same and places == kept_places:
            return made
    with torch.inference_mode(False):  # converted scales may be saved for backward later
        made = _made(own, name)
    # accelerate's hook takes offloaded parameters away after the call, and nothing should hold their memory.
    if not getattr(getattr(experts, "_hf_hook", None), "offload", False):
        kept[name] = sources, places, made
    return made


class _Kept(dict):
    """{name: (parameters, addresses, QuantizedWeight)}, which a copy of the module makes anew."""

    def __deepcopy__(self, memo):
        return _Kept()

    def __reduce__(self):
        return _Kept, ()


@torch.compiler.disable(reason="call a model with quantised experts once before it is compiled as one graph")
def _made(own: dict, name: str) -> QuantizedWeight:
    """Made outside of any graph, which cannot make the parameters of a QuantizedWeight."""
    if f"{name}_blocks" in own:
        return from_mxfp4(own, name)
    if f"{name}_packed" in own:
        codes, scale, zero = own[f"{name}_packed"].view(torch.uint8), own[f"{name}_scale"], None
        E, rows, width = codes.shape
        if f"{name}_zero_point" in own:
            zero = formats.unpack_rows(own[f"{name}_zero_point"], rows).to(torch.int8) - formats.INT4_OFFSET
        return QuantizedWeight(codes, scale, zero, format="int4", shape=(E, rows, 2 * width))
    codes, scale = own[name], own[f"{name}_scale_inv"]
    if codes.dtype == torch.int8:  # two e2m1 codes per byte
        E, rows, width = codes.shape
        codes, scale = codes.view(torch.uint8), scale.view(torch.uint8)
        return QuantizedWeight(codes, scale, format="mxfp4", shape=(E, rows, 2 * width))
    return from_fp8_block(own, name)


def unknown_storage(experts: FP8Experts) -> str | None:
    """What of an FP8Experts' parameters is not supported."""
    for name in (first_name(experts), "down_proj"):
        codes, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        if codes.element_size() > 1:  # not quantised: transformers ignores the scales of such a weight
            continue
        if experts.activation_scheme == "static":
            return "static scales of activations"
        E, rows, width = codes.shape
        if codes.dtype == torch.int8:
            format, shape = "mxfp4", (E, rows, 2 * width)
            if scale.dtype != torch.float8_e8m0fnu:
                return f"FP4 with scales of dtype {scale.dtype}"
        else:
            format, shape = "fp8_block", (E, rows, width)
            if codes.dtype != formats.E4M3:
                return f"weights of dtype {codes.dtype}"
            if tuple(experts.block_size or ()) != (formats.BLOCK, formats.BLOCK):
                return f"blocks of {experts.block_size}"
        # A checkpoint's blocks begin anew where the gate ends and up begins.
        splits_block = name == "gate_up_proj" and format == "fp8_block" and rows % formats.BLOCK
        if splits_block or tuple(scale.shape) not in formats.scale_shapes(format, shape):
            return f"scales {tuple(scale.shape)} of a weight {shape}"
    return None
