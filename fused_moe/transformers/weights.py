"""The weights of a module of experts as fused_experts takes them, whatever a checkpoint stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from ..checks import check_stored, fail
from ..quantized import QuantizedWeight, computing, formats, from_mxfp4
from ..quantized.refreshing import KEPT
from ..quantized.weight import as_bytes, untraced, write_state

if TYPE_CHECKING:

    class ExpertsModule(nn.Module):
        """A module of experts, with what transformers' `use_experts_implementation` gives it."""

        config: Any  # of transformers
        _modules: dict[str, Any]
        _parameters: dict[str, Any]  # looked up by names that they have
        has_gate: bool
        has_bias: bool
        is_transposed: bool
        is_concatenated: bool
        down_proj: Any  # a parameter, or a QuantizedWeight
        _fused_moe_parts: dict[str, dict[str, tuple[torch.dtype, torch.Size]]]
        _is_hf_initialized: bool


NAME = "fused_moe"
FP8_NAME = "fused_moe_fp8"  # the same, and float experts multiply in FP8
NAMES = (NAME, FP8_NAME)

# What a quantised weight's parameters have after its name: FP8Experts, then MXFP4, then compressed-tensors.
PARTS = ("", "_scale_inv", "_blocks", "_scales", "_packed", "_scale", "_zero_point")


def is_experts(module: nn.Module) -> TypeGuard[ExpertsModule]:
    """Whether its class has transformers' `use_experts_implementation`. A torch.compile around it has not."""
    flags = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated")
    return "_orig_mod" not in module._modules and all(hasattr(module, flag) for flag in flags)


def experts_of(model: nn.Module) -> list[tuple[str, ExpertsModule]]:
    """The modules of experts, and their names."""
    return [(name, module) for name, module in model.named_modules() if is_experts(module)]


def is_adapted(module_name: str) -> bool:
    """Whether the module is inside one of PEFT's."""
    return not {"base_layer", "original_module", "modules_to_save"}.isdisjoint(module_name.split("."))


def first_name(experts: ExpertsModule) -> str:
    """The name of w1, or of w1 and w3 together."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def weight_of(experts: ExpertsModule, name: str, compute: str) -> Tensor | QuantizedWeight:
    """A weight as fused_experts takes it. Parameters that are codes and scales become a QuantizedWeight once:
    one that reads them at each call and is kept beside them, where no state_dict sees it; or it is tiled and
    takes their place. `compute` is that of FP8."""
    w = getattr(experts, name, None)
    if isinstance(w, QuantizedWeight) or (w is not None and w.element_size() > 1):
        return w
    kept = experts._modules.get(KEPT)
    w = None if kept is None else kept.weights.get(name)
    return w if w is not None and w.is_of(experts._parameters) else _make(experts, name, compute)


def is_quantized(experts: ExpertsModule, name: str) -> bool:
    """Whether a weight is a QuantizedWeight, or parameters that become one."""
    if name in experts._modules.get("parametrizations", ()):
        return False
    w = getattr(experts, name, None)
    return w is None or isinstance(w, QuantizedWeight) or w.element_size() == 1


def shape_of(experts: ExpertsModule, name: str) -> torch.Size:
    """(E, out, in) of a quantised weight."""
    w = experts._modules.get(name)
    if w is None:
        w = _made({key: p.to("meta") for key, p in experts._parameters.items() if p is not None}, name)
    return w.shape


# --- parameters that are read as they are -----------------------------------------------------------------


class _Kept(nn.Module):
    """What is kept beside the parameters of experts: {name: weight}. It is a module, without parameters, so
    that moving the experts to another device frees it. A copy of the experts makes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, _Stored] = {}

    def refresh(self, experts: ExpertsModule) -> None:
        """As `fused_moe.refresh_weights` asks."""
        for w in self.weights.values():
            w.refresh()

    def _apply(self, fn, recurse=True):
        self.weights.clear()
        return self

    def __deepcopy__(self, memo):
        return _Kept()

    def __reduce__(self):
        return _Kept, ()


class _Stored(QuantizedWeight):
    """A weight that reads the experts' parameters, as the checkpoint stores them, at each call. So it sees
    every write to them. Only zero points are kept as operators take them, since a byte stores two. They are
    unpacked again if a parameter's version or memory shows that it was written, in compiled code at each
    call, and by `fused_moe.refresh_weights`."""

    if TYPE_CHECKING:
        _data: Tensor
        _scale: Tensor
        _words: Tensor | None
        _zero: Tensor | None
        _zero_state: tuple | None

    def __init__(self, made: QuantizedWeight, sources: dict[str, nn.Parameter]):
        nn.Module.__init__(self)
        vars(self).update(vars(made) | {"_parameters": {"smooth": None}})
        self._sources = sources  # by their names in the experts, whose parameters they remain
        vars(self).update(zip(("_data", "_scale", "_words"), (*sources.values(), None), strict=False))
        self._made_of = made.device, self._scale.dtype
        self._dtypes = made.data.dtype, made.scale.dtype
        self._zero, self._zero_state = None, None

    def is_of(self, own: dict[str, nn.Parameter]) -> bool:
        """Whether these are the parameters of the experts, still on the device where they make no tiles, and
        of the dtype that they had: PEFT's preparation for training makes 16 bits 32."""
        same = all(own.get(key) is source for key, source in self._sources.items())
        return same and (self._scale.device, self._scale.dtype) == self._made_of

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._published("data"), self._published("scale"), self._published("zero")

    def refresh(self) -> None:
        if self._words is not None:
            self._unpack_zero(self._words)

    def _of(self, name: str) -> Any:
        """For checks: of the shape that a parameter of a QuantizedWeight has."""
        if name == "scale":
            return _by_rows(self._scale, self.shape[1])
        if name == "zero":
            return self._unpacked_zero()
        is_flat = self.format == "mxfp4" and self._data.dim() == 3  # of FP8Experts
        return self._data.unflatten(-1, (-1, formats.MX_GROUP // 2)) if is_flat else self._data

    def _published(self, name: str) -> Any:
        """This is what operators take, too, as it is never tiled."""
        if name == "zero":
            return self._unpacked_zero()
        stored, dtype = (self._data, self._dtypes[0]) if name == "data" else (self._scale, self._dtypes[1])
        stored = stored.detach() if stored.requires_grad else stored
        if stored.dtype != dtype:
            # Scales of blocks of 128 x 128 are few, and float32 here. Others are the same bytes.
            stored = stored.to(dtype) if dtype == torch.float32 else as_bytes(stored)
        if name == "scale":
            stored = _by_rows(stored, self.shape[1])
        return stored.flatten(-2) if stored.dim() == 4 else stored

    def _unpacked_zero(self) -> Tensor | None:
        words = self._words
        if words is None or torch.compiler.is_compiling():
            return None if words is None else formats.unpack_zeros(words, self.shape[1])
        if self._zero is None or write_state(words) != self._zero_state:
            self._unpack_zero(words)
        return self._zero

    def _unpack_zero(self, words: Tensor) -> None:
        """Into the memory that there is, which a CUDA graph may read."""
        zero = self._zero
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            untraced(),
        ):  # or backward could not use what is made here
            found = formats.unpack_zeros(words, self.shape[1])
            if zero is not None and zero.device == found.device:
                zero.copy_(found)
            else:
                self._zero = found
        self._zero_state = write_state(words)


def _by_rows(scale: Tensor, rows: int) -> Tensor:
    """Scales (E, n) of n matrices that are one weight, gate and up, as one per row (E, rows, 1), or of one
    matrix as (E, 1, 1). Others as they are."""
    if scale.dim() != 2:
        return scale
    scale = scale.unsqueeze(-1)
    return scale if scale.size(1) == 1 else scale.repeat_interleave(rows // scale.size(1), 1)


@torch.compiler.disable(reason="call a model with quantised experts once before it is compiled as one graph")
def _make(experts: ExpertsModule, name: str, compute: str) -> QuantizedWeight:
    own = experts._parameters
    sources = {name + part: own[name + part] for part in PARTS if own.get(name + part) is not None}
    with torch.inference_mode(False), untraced():
        made = _made(own, name, compute if _runs_in_8_bits(experts) else "codes")
    # accelerate's hook takes offloaded parameters away after the call, and nothing should hold their memory.
    # What is made of such parameters is made for each call, tiles too.
    if getattr(getattr(experts, "_hf_hook", None), "offload", False):
        return made
    if made.is_tiled:
        replace_parameters(experts, name, made)
        return made
    if not all(p.is_contiguous() for p in sources.values()):
        return made  # copies, which are made for each call
    if KEPT not in experts._modules:
        experts.add_module(KEPT, _Kept())
    experts._modules[KEPT].weights[name] = w = _Stored(made, sources)
    return w


def _runs_in_8_bits(experts: ExpertsModule) -> bool:
    """Whether the checkpoint asks for tokens that are quantised, and GPUs have kernels for the widths."""
    if getattr(experts, "activation_scheme", None) != "dynamic":
        return False
    _, D, F = experts.down_proj.shape
    scale = getattr(experts, "down_proj_scale", None)  # FP8Experts have blocks, and another name
    has_blocks = scale is None or (scale.dim() == 3 and scale.size(1) != D)
    of_F = computing.HALF_BLOCK if has_blocks and experts.down_proj.is_cuda else computing.WIDTH
    return D % computing.WIDTH == F % of_F == 0


def _made(own: dict, name: str, compute: str = "codes") -> QuantizedWeight:
    """The weight that parameters are. compute: "codes", or "fp8" for 8 bits on both operands."""
    if f"{name}_blocks" in own:
        return from_mxfp4(own, name)
    if f"{name}_packed" in own:
        packed, scale, zero = own[f"{name}_packed"], own[f"{name}_scale"], None
        codes = packed.view(torch.uint8)
        E, rows, width = codes.shape
        if f"{name}_zero_point" in own:
            zero = formats.unpack_zeros(own[f"{name}_zero_point"], rows)
        format = "mxfp4" if packed.dtype == torch.uint8 else "int4"
        return QuantizedWeight(codes, scale, zero, format=format, shape=(E, rows, 2 * width))
    codes = own[name]
    if f"{name}_scale" in own:
        scale, rows = own[f"{name}_scale"], codes.size(1)
        if codes.dtype == torch.int8:
            format, compute = "int8", "int8" if compute == "fp8" else compute
        elif scale.dim() == 2 or scale.size(1) == rows:
            format = "fp8"
        else:
            format, scale = "fp8_block", scale.float()
        scale = _by_rows(scale, rows)
        return QuantizedWeight(codes, scale, format=format, shape=codes.shape, compute=compute)
    scale = own[f"{name}_scale_inv"]
    if codes.dtype == torch.int8:  # two e2m1 codes per byte
        E, rows, width = codes.shape
        codes, scale = codes.view(torch.uint8), scale.view(torch.uint8)
        return QuantizedWeight(codes, scale, format="mxfp4", shape=(E, rows, 2 * width))
    check_stored("FP8Experts", f"{name}_scale_inv", scale, 3, (*formats.SCALES, torch.float8_e8m0fnu))
    power_of_two = compute == "fp8" and scale.dtype == torch.float8_e8m0fnu
    return QuantizedWeight(
        codes,
        scale.float(),
        format="fp8_block",
        shape=codes.shape,
        compute=compute,
        power_of_two=power_of_two,
    )


# --- tiles in place of parameters -------------------------------------------------------------------------


def replace_parameters(experts: ExpertsModule, name: str, made: QuantizedWeight) -> None:
    """Makes a weight a part of the module, in place of the parameters that a checkpoint has for it, so that
    only one of the two is in memory. Hooks keep the state_dict as it was."""
    if KEPT in experts._modules:
        experts._modules[KEPT].weights.pop(name, None)
    if not hasattr(experts, "_fused_moe_parts"):
        experts._fused_moe_parts = {}  # {name: {part: (dtype, shape) of the parameter}}
        experts.register_state_dict_post_hook(_publish)
        experts.register_load_state_dict_pre_hook(_take_published)
        add_hook(experts)
    own = experts._parameters
    parts = {part: own.pop(name + part) for part in PARTS if own.get(name + part) is not None}
    experts._fused_moe_parts[name] = {part: (p.dtype, p.shape) for part, p in parts.items()}
    setattr(experts, name, made)


def _publish(experts: ExpertsModule, state_dict: dict, prefix: str, _) -> None:
    """A hook after state_dict: the tensors of a QuantizedWeight as the parameters in whose place it is."""
    for name, parts in experts._fused_moe_parts.items():
        w = getattr(experts, name)
        own = [n for n, _ in w.named_parameters()]
        for (part, (dtype, shape)), n in zip(parts.items(), own, strict=True):
            tensor = state_dict.pop(f"{prefix}{name}.{n}")
            if part == "_zero_point":
                tensor = formats.pack_zeros(tensor)
            # FP8Experts have other dtypes for our bytes, and narrower ones for scales that are float32 here.
            same_size = tensor.element_size() == dtype.itemsize
            tensor = tensor.view(dtype) if same_size else tensor.to(dtype)
            if part == "_scale" and len(shape) == 2:
                tensor = tensor.unflatten(1, (shape[1], -1))[:, :, 0].contiguous()  # of each matrix
            tensor = tensor.view(shape)
            state_dict[f"{prefix}{name}{part}"] = w._copies.give(n, tensor)


def _take_published(
    experts: ExpertsModule, state_dict: dict, prefix: str, _, __, missing: list, *___
) -> None:
    """A hook before load_state_dict, the inverse of `_publish`. What it does not give stays as it is."""
    for name, parts in experts._fused_moe_parts.items():
        keys = {name + part: f"{prefix}{name}{part}" for part in parts}
        given = {own: state_dict.pop(key) for own, key in keys.items() if key in state_dict}
        if not given:
            continue  # the weight reports its missing keys
        if len(given) < len(keys):
            missing += [key for own, key in keys.items() if own not in given]
            device, now = next(iter(given.values())).device, experts.state_dict()
            given = {own: given[own] if own in given else now[own].to(device) for own in keys}
        state_dict.update(_made(given, name).state_dict(prefix=f"{prefix}{name}."))


# --- what is supported ------------------------------------------------------------------------------------


def _require_ours(experts: ExpertsModule, args: tuple) -> None:
    """A forward pre-hook of packed experts, whose weights no other implementation reads."""
    found = experts.config._experts_implementation
    if found not in NAMES:
        fail(
            ValueError,
            type(experts).__name__,
            f"experts_implementation={NAME!r} for packed experts",
            repr(found),
        )


def add_hook(experts: ExpertsModule) -> None:
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
