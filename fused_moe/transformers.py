"""fused_moe in Hugging Face transformers: an implementation for its experts interface.

    import fused_moe.transformers

    fused_moe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fused_moe")

The model keeps its router, shared experts and checkpoint; only the computation of the routed experts is
replaced. Their parameters are used in place: packed in halves or interleaved, transposed or not, quantised or
not. No step copies a weight. The module tells what its experts compute: the flags that transformers'
decorator sets, the gate function and the activation. Experts with a gate, an activation, a norm or a storage
that no kernel supports run eager, and a warning says so once.

Three things keep quantised experts packed. `experts_forward` reads the parameters of FP8Experts. The
quantizers registered here load MXFP4 and int4 experts as the checkpoint stores them, where transformers would
unpack them. And `quantize_experts` quantises the experts of a model in memory.
"""

from __future__ import annotations

import operator
import re
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import FLOATING, fail
from .function import fused_experts
from .quantized import QuantizedWeight, formats, from_fp8_block, from_mxfp4, quantize

try:
    from transformers.activations import ACT2FN
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import _default_apply_gate

    # The registry that models read. Earlier releases have none: they accept only built-in names.
    from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module
except ImportError as error:
    raise ImportError(
        "fused_moe.transformers needs Hugging Face transformers with an experts interface that is open to "
        f"other implementations: pip install 'transformers>=5.7' ({error})"
    ) from error

__all__ = ["NAME", "experts_forward", "quantize_experts", "register"]

NAME = "fused_moe"

# Keyed by type: a configuration may have several names for one activation.
_ACTIVATIONS = {
    type(ACT2FN[their_name]): our_name
    for their_name, our_name in (
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
    )
} | {F.silu: "silu"}

_warned: set[tuple[str, str]] = set()


def register() -> None:
    """Makes "fused_moe" a name that `experts_implementation=` and `set_experts_implementation` know.

    Call it before a model is loaded, or before its implementation is set. Calling it again does no harm.
    FP8 experts have a registry of their own. Checkpoints in MXFP4 and of compressed-tensors get quantizers
    that do what transformers' do, and keep the experts packed in models that ask for "fused_moe".
    Source: transformers.integrations.moe, finegrained_fp8; transformers.quantizers.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if not hasattr(HfQuantizer, "serialized_names"):
        return  # an earlier release, which loads checkpoints otherwise: it unpacks them
    # transformers' register_quantizer takes new names alone, but the checkpoint says the name.
    for method, ours in (("mxfp4", PackedMxfp4), ("compressed-tensors", PackedCompressedTensors)):
        if AUTO_QUANTIZER_MAPPING[method] in ours.__bases__:  # not another package's
            AUTO_QUANTIZER_MAPPING[method] = ours


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers calls this instead of the forward of a class with `use_experts_implementation`.

    Args:
        experts: has the parameters gate_up_proj (E, 2F, D), or up_proj (E, F, D) without a gate, and
            down_proj (E, D, F); with biases also gate_up_proj_bias or up_proj_bias, and down_proj_bias. If
            `is_transposed`, the last two dimensions of the weights are swapped. Quantised weights are
            QuantizedWeights, never transposed, or parameters as a checkpoint has them.
        hidden_states: (T, D). Outside of autocast it is cast to the weights' dtype, as in transformers'
            grouped_mm. Beside quantised weights it keeps its dtype, and biases are cast to that.
        top_k_index: (T, K) int32 or int64. An index of E or more is treated as remote: its slot is not
            computed, adds nothing, and its weight gets a zero gradient.
        top_k_weights: (T, K) of any floating dtype.

    Returns:
        (T, D) in hidden_states' dtype, differentiable in hidden_states, top_k_weights and parameters that are
        not quantised.

    Raises:
        TypeError, ValueError: as `fused_moe.fused_experts`.
    """
    settings = _settings(experts)
    if isinstance(settings, str):
        _warn_once(type(experts).__name__, settings)
        return _eager_forward(experts)(experts, hidden_states, top_k_index, top_k_weights)
    first = _first(experts)
    w1, w2 = _weight(experts, first), _weight(experts, "down_proj")
    b1, b2 = (getattr(experts, f"{name}_bias") if experts.has_bias else None for name in (first, "down_proj"))
    is_quantized = isinstance(w1, QuantizedWeight)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        if not is_quantized:
            x = x.to(w1.dtype)
        elif experts.has_bias:
            b1, b2 = b1.to(x.dtype), b2.to(x.dtype)
    out = fused_experts(
        x,
        w1,
        w2,
        None,
        top_k_weights,
        top_k_index,
        b1=b1,
        b2=b2,
        transposed=experts.is_transposed and not is_quantized,
        **settings,
    )
    return out.to(hidden_states.dtype)


def _first(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _settings(experts: nn.Module) -> dict | str:
    """The layout and activation of these experts, or the name of the part that is not supported."""
    if getattr(experts, "has_post_expert_norm", False):  # newer than the other flags
        return "the norm after each expert"
    if isinstance(experts, FP8Experts) and (reason := _unknown_storage(experts)):
        return reason
    layout = "separate"
    if experts.has_gate:
        gate = experts._apply_gate
        gate = getattr(gate, "__func__", gate)
        if gate is GptOssExperts._apply_gate:
            return {"layout": "interleaved", **_clamped(experts.alpha, experts.limit)}
        layout = "halves"
        if gate is FP8Experts._apply_gate:
            # It computes those of several models, told apart by these attributes.
            if getattr(experts, "gate_softcap", None) is not None:
                return "the gate with a softcap"
            limit = getattr(experts, "swiglu_limit", None)
            if getattr(experts, "swiglu_alpha", None) is not None:
                return {"layout": layout, **_clamped(experts.swiglu_alpha, limit)}
            if limit is not None:
                return "the gate with a limit"
        elif gate is not _default_apply_gate or not experts.is_concatenated:
            return f"the gate {_full_name(gate)}"
    act_fn = getattr(experts, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        act_fn = type(act_fn)
    if act_fn not in _ACTIVATIONS:
        return f"the activation {_full_name(act_fn)}"
    return {"layout": layout, "activation": _ACTIVATIONS[act_fn]}


def _clamped(alpha: float, limit: float) -> dict:
    return {"activation": "swiglu_clamped", "alpha": float(alpha), "limit": float(limit)}


def _eager_forward(experts: nn.Module):
    """The forward of the class itself. FP8Experts is decorated anew for each layer of a model."""
    forward = type(experts).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _full_name(thing) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__name__', thing)}"


def _warn_once(experts: str, reason: str) -> None:
    """Warns once per class of experts: a model has dozens of such layers and calls each every step."""
    if (experts, reason) not in _warned:
        _warned.add((experts, reason))
        warnings.warn(f"fused_moe does not compute {reason} of {experts}, which runs eager", stacklevel=2)


# --- quantised experts ------------------------------------------------------------------------------------

# What a quantised weight's parameters have after its name: FP8Experts, then MXFP4, then compressed-tensors.
_PARTS = ("", "_scale_inv", "_blocks", "_scales", "_packed", "_scale", "_zero_point")


def _weight(experts: nn.Module, name: str) -> Tensor | QuantizedWeight:
    """A weight as fused_experts takes it. Parameters that are codes and scales become a QuantizedWeight of
    the same memory, which is made once and kept beside them, where no state_dict sees it."""
    w = getattr(experts, name, None)
    if isinstance(w, QuantizedWeight) or (w is not None and w.element_size() > 1):
        return w
    own = experts._parameters
    sources = [own[name + part] for part in _PARTS if own.get(name + part) is not None]
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


def _unknown_storage(experts: FP8Experts) -> str | None:
    """What of an FP8Experts' parameters is not supported."""
    for name in (_first(experts), "down_proj"):
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


def _experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules with transformers' `use_experts_implementation`, and their names."""
    flags = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated")
    return [
        (name, module) for name, module in model.named_modules() if all(hasattr(module, f) for f in flags)
    ]


def quantize_experts(
    model: nn.Module,
    format: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    per_tensor: bool | None = None,
) -> nn.Module:
    """Quantises the routed experts of a model in place, one weight after the other, freeing it.

    Experts that are quantised already stay as they are. Transposed weights, as gpt-oss has them, are turned
    once. Biases, routers, shared experts and everything else keep their dtype.

    Args:
        model: loaded with, or set to, experts_implementation="fused_moe". From then on no other will do.
        format, group_size, symmetric, per_tensor: as of `fused_moe.quantize`.

    Returns:
        The model. Each weight is a frozen QuantizedWeight, also in its state_dict: instead of
        `...experts.down_proj` that has, by format, `...experts.down_proj.weight` and `.weight_scale_inv`
        (fp8_block) or `.weight_scale` (fp8, int8), `.weight_packed`, `.weight_scale` and perhaps
        `.weight_zero_point` (int4), or `.blocks` and `.scales` (mxfp4). load_state_dict takes it in a model
        that was quantised alike; save_pretrained and from_pretrained do not know it.

    Raises:
        TypeError, ValueError: before anything is changed, with what was expected and what was found.
    """
    fn = "quantize_experts"
    options = {"group_size": group_size, "symmetric": symmetric, "per_tensor": per_tensor}
    width = max(formats.GROUPS)
    trial = quantize(torch.zeros(1, 1, width), format, **options)  # which checks the options
    group = width // trial.scale.size(2) if format in ("int4", "mxfp4") else 1
    found = _experts_of(model) if isinstance(model, nn.Module) else []
    if not found:
        expected = "a transformers model with experts that have an experts_implementation"
        fail(ValueError, fn, expected, type(model).__name__)
    todo = []
    for module_name, experts in found:
        implementation = experts.config._experts_implementation
        if implementation != NAME:
            advice = f'; call set_experts_implementation("{NAME}") before'
            fail(ValueError, fn, f"experts_implementation={NAME!r}", repr(implementation) + advice)
        settings = _settings(experts)
        if isinstance(settings, str):
            fail(ValueError, fn, "experts that fused_moe computes", f"{settings} of {module_name}")
        for name in (_first(experts), "down_proj"):
            w = getattr(experts, name, None)
            if not isinstance(w, Tensor) or w.dtype not in FLOATING:
                continue
            width = w.size(1 if experts.is_transposed else 2)
            if width % group:
                expected = f"{module_name}.{name} with an input width that is a multiple of {group}"
                fail(ValueError, fn, expected, width)
            todo.append((experts, name))
    for experts, name in todo:
        w = getattr(experts, name).detach()
        w = w.mT.contiguous() if experts.is_transposed else w
        delattr(experts, name)
        setattr(experts, name, quantize(w, format, **options))
        _add_hook(experts)
    return model


def _add_hook(experts: nn.Module) -> None:
    if _require_ours not in experts._forward_pre_hooks.values():
        experts.register_forward_pre_hook(_require_ours)


# --- packed checkpoints -----------------------------------------------------------------------------------


def _pack(experts: nn.Module, name: str, parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Replaces a weight, before it is loaded, by the parameters that the checkpoint has in its place."""
    device = getattr(experts, name).device
    delattr(experts, name)
    for part, (shape, dtype) in parts.items():
        stored = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        experts.register_parameter(name + part, stored)
    _add_hook(experts)
    experts._is_hf_initialized = True  # or transformers would draw values for the weight that has gone


def _sizes(experts: nn.Module, name: str) -> tuple[int, int, int]:
    """E, out and in of a weight."""
    E, rows, cols = getattr(experts, name).shape
    return (E, cols, rows) if experts.is_transposed else (E, rows, cols)


class _Packed:
    """What the quantizers have in common."""

    is_packed = False

    def _ours(self, model: nn.Module, use_kernels: bool) -> list[tuple[str, nn.Module]]:
        """The experts that may stay packed, and their names. Kernels of the hub replace layers as a whole."""
        if use_kernels or self.quantization_config.dequantize or not self.pre_quantized:
            return []
        return [found for found in _experts_of(model) if found[1].config._experts_implementation == NAME]

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.is_packed:
            for _, experts in _experts_of(model):
                for name, parameter in experts.named_parameters(recurse=False):
                    if name.endswith(_PARTS[1:]):  # loading makes scales require a gradient
                        parameter.requires_grad_(False)
        return super()._process_model_after_weight_loading(model, **kwargs)


class PackedMxfp4(_Packed, Mxfp4HfQuantizer):
    """Loads gpt-oss' experts as they are stored, in models whose experts are fused_moe's.

    transformers has kernels for MXFP4 on some machines, which want the codes in their own order, and
    dequantises on others. In other models, and with dequantize=True, this is transformers' quantizer.
    """

    _environment = None

    def validate_environment(self, *args, **kwargs):
        self._environment = args, kwargs  # of transformers' kernels, which may not be needed

    def _process_model_before_weight_loading(self, model, use_kernels=False, **kwargs):
        unquantized = self.quantization_config.modules_to_not_convert
        for name, experts in self._ours(model, use_kernels):
            if isinstance(experts, GptOssExperts) and should_convert_module(name, unquantized):
                self.is_packed = True
                for weight in ("gate_up_proj", "down_proj"):
                    E, rows, cols = _sizes(experts, weight)
                    groups = E, rows, cols // formats.MX_GROUP
                    shapes = {"_blocks": (*groups, formats.MX_GROUP // 2), "_scales": groups}
                    _pack(experts, weight, {part: (shape, torch.uint8) for part, shape in shapes.items()})
        if not self.is_packed:
            if self._environment is not None:
                args, environment = self._environment
                super().validate_environment(*args, **environment)
            super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)

    def get_weight_conversions(self):
        """None for packed experts, whose parameters have the checkpoint's names."""
        return [] if self.is_packed else super().get_weight_conversions()

    @property
    def is_trainable(self) -> bool:
        return self.is_packed or super().is_trainable


class PackedCompressedTensors(_Packed, CompressedTensorsHfQuantizer):
    """Loads int4 experts as they are stored, in models whose experts are fused_moe's.

    The checkpoint has each expert's weight_packed, weight_scale and, if asymmetric, weight_zero_point. Where
    a module has parameters of these names, transformers stacks them as it does plain weights; otherwise it
    unpacks them before. Dense layers, and everything with dequantize=True, are left to transformers.
    """

    def _process_model_before_weight_loading(self, model, use_kernels=False, checkpoint_files=None, **kwargs):
        super()._process_model_before_weight_loading(
            model, use_kernels=use_kernels, checkpoint_files=checkpoint_files, **kwargs
        )
        found = [experts for _, experts in self._ours(model, use_kernels)]
        args = _int4_of_experts(self.compressor.quantization_config)
        if args is None or not found:
            return
        reason = _not_packed(model, found, args, checkpoint_files)
        if reason is not None:
            warnings.warn(f"fused_moe does not keep the experts packed: {reason}", stacklevel=2)
            return
        self.is_packed = True
        for experts in found:
            for weight in (_first(experts), "down_proj"):
                E, rows, cols = _sizes(experts, weight)
                groups = cols // args.group_size
                num_sizes = 4 if weight == "gate_up_proj" else 2  # out and in of each matrix
                parts = {
                    "_packed": ((E, rows, cols // 8), torch.int32),
                    "_scale": ((E, rows, groups), getattr(experts, weight).dtype),
                    "_shape": ((E, num_sizes), torch.int64),  # so that a saved checkpoint has them
                }
                if not args.symmetric:
                    parts["_zero_point"] = (E, rows // 8, groups), torch.int32
                _pack(experts, weight, parts)


def _int4_of_experts(config):
    """How the experts' weights are quantised, or None if that is not pack-quantized int4."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    if config is None or not config.config_groups:
        return None
    scheme = get_experts_scheme(config)
    args = scheme.weights
    is_int4 = (
        args is not None
        and (scheme.format or config.format) == "pack-quantized"
        and (args.num_bits, args.type) == (4, "int")
    )
    return args if is_int4 else None


def _not_packed(model: nn.Module, found: list[nn.Module], args, checkpoint_files) -> str | None:
    """Why int4 experts cannot be used as they are stored."""
    if args.strategy != "group" or args.group_size not in formats.GROUPS:
        found_scales = f"per {args.strategy} with group_size {args.group_size}"
        return f"their scales are {found_scales}, not per group of {' or '.join(map(str, formats.GROUPS))}"
    if args.actorder == "group":
        return "their columns are in act-order"
    for experts in found:
        settings = _settings(experts)
        if isinstance(settings, str):
            return f"they have {settings}, which no kernel supports"
        if experts.is_transposed or settings["layout"] == "interleaved" or experts.has_bias:
            return f"{type(experts).__name__} are transposed, interleaved or have biases"
        for weight in (_first(experts), "down_proj"):
            # A multiple is one of 8, too, by which codes and zero points are packed.
            cols = _sizes(experts, weight)[2]
            if cols % args.group_size:
                return f"{weight} has {cols} columns, which are not whole groups of {args.group_size}"
    if not _only_merges(model, found):
        return "transformers changes these weights as it loads them"
    if not _all_packed(checkpoint_files):
        return "some of them are not packed in the checkpoint, or it has no safetensors"
    return None


def _only_merges(model: nn.Module, found: list[nn.Module]) -> bool:
    """Whether transformers makes the stacked weights by stacking experts, and gate above up, alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    merged = set()
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        names = {target.rpartition(".")[2] for target in converter.target_patterns}
        names &= {"gate_up_proj", "up_proj", "down_proj"}
        operations = {(type(op), getattr(op, "dim", None)) for op in converter.operations}
        is_merge = operations <= {(MergeModulelist, 0), (Concatenate, 1)}
        if names and not (is_merge and all(s.endswith(".weight") for s in converter.source_patterns)):
            return False
        merged |= names
    return all({_first(experts), "down_proj"} <= merged for experts in found)


def _all_packed(checkpoint_files: list[str] | None) -> bool:
    """Whether the checkpoint has its experts' weights packed alone."""
    from safetensors import safe_open

    files = checkpoint_files or []
    names = set()
    for file in files:
        if not str(file).endswith(".safetensors"):
            return False
        with safe_open(file, framework="pt") as tensors:
            names |= {key.rpartition(".")[2] for key in tensors.keys() if re.search(r"\.experts\.\d+\.", key)}
    return "weight_packed" in names and "weight" not in names
