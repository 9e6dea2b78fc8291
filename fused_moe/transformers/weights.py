"""The weights of a module of experts as fused_experts takes them, whatever a checkpoint stores."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from ..checks import fail
from ..quantized import QuantizedWeight, formats, from_fp8_block, from_mxfp4

NAME = "fused_moe"

# What a quantised weight's parameters have after its name: FP8Experts, then MXFP4, then compressed-tensors.
PARTS = ("", "_scale_inv", "_blocks", "_scales", "_packed", "_scale", "_zero_point")


def first_name(experts: nn.Module) -> str:
    """The name of w1, or of w1 and w3 together."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def weight_of(experts: nn.Module, name: str) -> Tensor | QuantizedWeight:
    """A weight as fused_experts takes it. Parameters that are codes and scales become a QuantizedWeight once.
    It has their memory and is kept beside them, where no state_dict sees it; or it is tiled and takes their
    place."""
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
    # Tiles of such parameters are made for each call.
    if getattr(getattr(experts, "_hf_hook", None), "offload", False):
        return made
    if made.is_tiled:
        kept.pop(name, None)
        _replace_parameters(experts, name, made)
    else:
        kept[name] = sources, places, made
    return made


class _Kept(dict):
    """{name: (parameters, addresses, QuantizedWeight)}, which a copy of the module makes anew."""

    def __deepcopy__(self, memo):
        return _Kept()

    def __reduce__(self):
        return _Kept, ()

    def refresh(self, experts: nn.Module) -> None:
        """As `fused_moe.refresh_weights` asks: the next call makes them anew."""
        self.clear()


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


# --- tiles in place of parameters -------------------------------------------------------------------------


@torch.compiler.disable(reason="call a model with quantised experts once before it is compiled as one graph")
def _replace_parameters(experts: nn.Module, name: str, made: QuantizedWeight) -> None:
    """Makes a tiled weight a part of the module, in place of the parameters that it was made of, so that only
    one of the two is in memory. Hooks keep the state_dict as it was."""
    if not hasattr(experts, "_fused_moe_parts"):
        experts._fused_moe_parts = {}  # {name: {part: (dtype, shape) of the parameter}}
        experts.register_state_dict_post_hook(_publish)
        experts.register_load_state_dict_pre_hook(_take_published)
        add_hook(experts)
    own = experts._parameters
    parts = {part: own.pop(name + part) for part in PARTS if own.get(name + part) is not None}
    experts._fused_moe_parts[name] = {part: (p.dtype, p.shape) for part, p in parts.items()}
    setattr(experts, name, made)


def _publish(experts: nn.Module, state_dict: dict, prefix: str, _) -> None:
    """A hook after state_dict: the tensors of a QuantizedWeight as the parameters in whose place it is."""
    for name, parts in experts._fused_moe_parts.items():
        own = [n for n, _ in getattr(experts, name).named_parameters()]
        for (part, (dtype, shape)), n in zip(parts.items(), own, strict=True):
            tensor = state_dict.pop(f"{prefix}{name}.{n}")
            if part == "_zero_point":
                tensor = formats.pack_rows((tensor + formats.INT4_OFFSET).to(torch.uint8))
            # FP8Experts have other dtypes for our bytes, and narrower ones for scales that are float32 here.
            same_size = tensor.element_size() == dtype.itemsize
            tensor = tensor.view(dtype) if same_size else tensor.to(dtype)
            state_dict[f"{prefix}{name}{part}"] = tensor.view(shape)


def _take_published(experts: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """A hook before load_state_dict, the inverse of `_publish`."""
    for name, parts in experts._fused_moe_parts.items():
        keys = {name + part: f"{prefix}{name}{part}" for part in parts}
        if all(key in state_dict for key in keys.values()):
            given = {own: state_dict.pop(key) for own, key in keys.items()}
            state_dict.update(_made(given, name).state_dict(prefix=f"{prefix}{name}."))


# --- what is supported ------------------------------------------------------------------------------------


def _require_ours(experts: nn.Module, args: tuple) -> None:
    """A forward pre-hook of packed experts, whose weights no other implementation reads."""
    found = experts.config._experts_implementation
    if found != NAME:
        fail(
            ValueError,
            type(experts).__name__,
            f"experts_implementation={NAME!r} for packed experts",
            repr(found),
        )


def add_hook(experts: nn.Module) -> None:
    if _require_ours not in experts._forward_pre_hooks.values():
        experts.register_forward_pre_hook(_require_ours)


def unknown_storage(experts: FP8Experts) -> str | None:
    """What of an FP8Experts' parameters is not supported."""
    for name in (first_name(experts), "down_proj"):
        codes = getattr(experts, name)
        # Quantised by us; or not at all, and then transformers ignores the scales.
        if isinstance(codes, QuantizedWeight) or codes.element_size() > 1:
            continue
        scale = getattr(experts, f"{name}_scale_inv")
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
