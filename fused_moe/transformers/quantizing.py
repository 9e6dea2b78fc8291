"""quantize_experts: the experts of a model in memory as quantised ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checks import FLOATING, fail
from ..quantized import QuantizedWeight
from ..quantized.computing import check_compute
from ..quantized.quantizing import checked_options, options_of, quantize
from .experts import settings_of
from .weights import NAME, NAMES, add_hook, first_name, replace_parameters, weight_of


def is_experts(module: nn.Module) -> bool:
    """Whether its class has transformers' `use_experts_implementation`. A torch.compile around it has not."""
    flags = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated")
    return "_orig_mod" not in module._modules and all(hasattr(module, flag) for flag in flags)


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of experts, and their names."""
    return [(name, module) for name, module in model.named_modules() if is_experts(module)]


def quantize_experts(
    model: nn.Module,
    format: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    per_tensor: bool | None = None,
    compute: str = "codes",
) -> nn.Module:
    """Quantises the routed experts of a model in place, one weight after the other, freeing it.

    Experts that are quantised already stay as they are. Transposed weights, as gpt-oss has them, are turned
    once. Biases, routers, shared experts and everything else keep their dtype.

    Args:
        model: loaded with, or set to, experts_implementation="fused_moe". From then on no other will do. Give
            the whole model: what is not known to have quantised experts would be saved without them.
        format, group_size, symmetric, per_tensor, compute: as of `fused_moe.quantize`. In training experts
            compute as "codes" whatever compute says, so that there are gradients, but not "int8_smooth".

    Returns:
        The model. Each weight is a frozen QuantizedWeight, also in its state_dict: instead of
        `...experts.down_proj` that has, by format, `...experts.down_proj.weight` and `.weight_scale_inv`
        (fp8_block) or `.weight_scale` (fp8, int8), `.weight_packed`, `.weight_scale` and perhaps
        `.weight_zero_point` (int4), or `.blocks` and `.scales` (mxfp4). load_state_dict takes it in a model
        that was quantised alike; from_pretrained does not know it, so save_pretrained, push_to_hub and
        Trainer refuse to save the model. Adapters alone are saved.

    Raises:
        TypeError, ValueError: before anything is changed, with what was expected and what was found. Weights
            have to be parameters of their experts: not adapted, parametrised, pruned, sharded or offloaded.
    """
    fn = "quantize_experts"
    options, multiple = checked_options(format, group_size, symmetric, per_tensor)
    check_compute(fn, compute, format)
    found = experts_of(model) if isinstance(model, nn.Module) else []
    if not found:
        expected = "a transformers model with experts that have an experts_implementation"
        fail(ValueError, fn, expected, type(model).__name__)
    todo = []
    for module_name, experts in found:
        implementation = experts.config._experts_implementation
        if implementation not in NAMES:
            advice = f'; call set_experts_implementation("{NAME}") before'
            fail(ValueError, fn, f"experts_implementation={NAME!r}", repr(implementation) + advice)
        settings = settings_of(experts)
        if isinstance(settings, str):
            fail(ValueError, fn, "experts that fused_moe computes", f"{settings} of {module_name}")
        for name in (first_name(experts), "down_proj"):
            w = getattr(experts, name, None)
            if not isinstance(w, Tensor) or w.dtype not in FLOATING:
                continue
            if reason := _not_plain(module_name, experts, name):
                expected = f"{module_name}.{name} to be a plain parameter of its experts"
                fail(ValueError, fn, expected, f"{reason}; call quantize_experts before that")
            width = w.size(1 if experts.is_transposed else 2)
            if width % multiple:
                expected = f"{module_name}.{name} with an input width that is a multiple of {multiple}"
                fail(ValueError, fn, expected, width)
            todo.append((experts, name))
    if todo:
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and experts_of(module):
                _refuse_saving(module)
    for experts, name in todo:
        w = getattr(experts, name).detach()
        w = w.mT.contiguous() if experts.is_transposed else w
        delattr(experts, name)
        setattr(experts, name, quantize(w, format, **options, compute=compute))
        add_hook(experts)
    return model


# What PEFT calls the modules inside its own.
_ADAPTED = {"base_layer", "original_module", "modules_to_save"}


def _not_plain(module_name: str, experts: nn.Module, name: str) -> str | None:
    """What would not work any more with the weight replaced in its module, if anything."""
    if _ADAPTED & set(module_name.split(".")):
        return "one that a PEFT adapter is for"
    if name not in experts._parameters:
        how = "a parametrisation" if hasattr(experts, "parametrizations") else "a hook, as in pruning"
        return f"a tensor made by {how}"
    if type(getattr(experts, name)) is not nn.Parameter:
        return f"a {type(getattr(experts, name)).__name__}"
    if getattr(getattr(experts, "_hf_hook", None), "offload", False):
        return "one that accelerate offloads"
    return None


# --- adapters that are merged -------------------------------------------------------------------------------

merges = ContextVar("merges", default=False)  # whether quantised weights may be merged with adapters


@contextmanager
def requantized_merges() -> Iterator[None]:
    """Inside, PEFT's `merge_and_unload` takes quantised experts, too: a merged weight is the dequantised one
    plus the adapters, quantised with the same options. That rounds what the adapters learned, and cannot be
    undone, so `merge_adapter` raises, as `merge_and_unload` does outside.
    """
    token = merges.set(True)
    try:
        yield
    finally:
        merges.reset(token)


def check_requantize(experts: nn.Module, name: str) -> QuantizedWeight:
    """The weight, if it can have other scales."""
    w = weight_of(experts, name, "codes")
    parameter = experts._parameters.get(f"{name}_scale_inv", w.scale)
    parts = getattr(experts, "_fused_moe_parts", {}).get(name, {})  # of a weight that is in their place
    stored, _ = parts.get("_scale_inv", (parameter.dtype, None))
    if w.smooth is not None or w.power_of_two or (w.format == "fp8_block" and stored != torch.float32):
        expected = f"a weight {name} without smooth, whose scales may be any float32"
        fail(ValueError, "merge", expected, f"{w.format} of compute {w.compute!r}, scales of {stored}")
    return w


def requantize(experts: nn.Module, name: str, delta: Tensor) -> None:
    """Adds delta (E, out, in) to a quantised weight, whose format and options stay."""
    w = check_requantize(experts, name)
    values = w.dequantize(torch.float32) + delta
    values = values.to(w.scale.dtype if w.scale.is_floating_point() else w.dtype)
    made = quantize(values, w.format, **options_of(w), trainable=w.is_trainable, compute=w.compute)
    made = made.to(w.dtype)
    if isinstance(experts._modules.get(name), QuantizedWeight):
        setattr(experts, name, made)
    else:
        replace_parameters(experts, name, made)


# --- saving -----------------------------------------------------------------------------------------------


class _Quantizer(HfQuantizer):
    """The `hf_quantizer` of a model that transformers has not quantised."""

    is_trainable = is_compileable = True

    def is_serializable(self) -> bool:
        return False


class _IsSerializable:
    """`hf_quantizer.is_serializable` of one model. save_pretrained asks it, since a reload of what it would
    write would have random experts. It asks before it saves adapters, too, and then ignores the answer."""

    def __init__(self, model: PreTrainedModel):
        self.__setstate__(model)

    def __getstate__(self) -> PreTrainedModel:
        return self._model()  # a copy of the model, pickled or not, has an answer about the copy

    def __setstate__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)  # or nothing but the garbage collector would free a model

    def __call__(self, *args, **kwargs) -> bool:
        if not getattr(self._model(), "_hf_peft_config_loaded", False):
            advice = "save them by torch.save(model.state_dict(), FILE), for a model that is quantised alike"
            found = f"experts that quantize_experts quantised; {advice}"
            fail(ValueError, "save_pretrained", "weights that from_pretrained loads", found)
        return False


def _refuse_saving(model: PreTrainedModel) -> None:
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = _Quantizer(QuantizationConfigMixin(NAME))
    model.hf_quantizer.is_serializable = _IsSerializable(model)
