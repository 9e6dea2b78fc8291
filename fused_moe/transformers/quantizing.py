"""quantize_experts: the experts of a model in memory as quantised ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checks import FLOATING, fail
from ..quantized import QuantizedWeight
from ..quantized.computing import check_compute
from ..quantized.quantizing import checked_options, options_of, quantize
from .experts import settings_of
from .saving import hold_quantizer
from .weights import (
    NAME,
    NAMES,
    PARTS,
    add_hook,
    experts_of,
    first_name,
    is_adapted,
    replace_parameters,
    weight_of,
)

if TYPE_CHECKING:
    from .weights import ExpertsModule


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
        format: as that of `fused_moe.quantize`.
        group_size: as that of `fused_moe.quantize`.
        symmetric: as that of `fused_moe.quantize`.
        per_tensor: as that of `fused_moe.quantize`.
        compute: as that of `fused_moe.quantize`, but not "int8_smooth". In training experts compute as
            "codes" whatever it is, so that there are gradients.

    Returns:
        The model. Each weight is a frozen QuantizedWeight, also in its state_dict: instead of
        `...experts.down_proj` that has, by format, `...experts.down_proj.weight` and `.weight_scale_inv`
        (fp8_block) or `.weight_scale` (fp8, int8), `.weight_packed`, `.weight_scale` and perhaps
        `.weight_zero_point` (int4), or `.blocks` and `.scales` (mxfp4). load_state_dict takes it in a model
        that was quantised alike. save_pretrained, push_to_hub and Trainer write a published layout instead,
        which from_pretrained reads (`fused_moe.transformers.saving`), or raise ValueError where there is
        none. With adapters on the model they save these alone.

    Raises:
        TypeError: for a wrong type, before anything is changed.
        ValueError: for a wrong value or model, before anything is changed. Weights have to be parameters of
            their experts: not adapted, parametrised, pruned, sharded or offloaded.

    Example:
        Needs transformers, and a model with experts_implementation="fused_moe".

        >>> model = fused_moe.transformers.quantize_experts(model, "int4", group_size=128)  # doctest: +SKIP
        >>> model.save_pretrained("folder")  # doctest: +SKIP
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
                hold_quantizer(module)
    for experts, name in todo:
        w = getattr(experts, name).detach()
        w = w.mT.contiguous() if experts.is_transposed else w
        delattr(experts, name)
        setattr(experts, name, quantize(w, format, **options, compute=compute))
        add_hook(experts)
    return model


def _not_plain(module_name: str, experts: ExpertsModule, name: str) -> str | None:
    """What would not work any more with the weight replaced in its module, if anything."""
    if is_adapted(module_name):
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
    """Lets PEFT's `merge_and_unload` take quantised experts, too, within the context.

    A merged weight is the dequantised one plus the adapters, quantised with the same options. That rounds
    what the adapters learned, and cannot be undone, so `merge_adapter` raises, as `merge_and_unload` does
    outside.

    Example:
        Needs transformers and PEFT.

        >>> with fused_moe.transformers.requantized_merges():  # doctest: +SKIP
        ...     model = model.merge_and_unload()
    """
    token = merges.set(True)
    try:
        yield
    finally:
        merges.reset(token)


def check_merge(experts: ExpertsModule, name: str) -> QuantizedWeight:
    """The weight, if it can have other scales."""
    w: Any = weight_of(experts, name, "codes")
    own, parts = experts._parameters, getattr(experts, "_fused_moe_parts", {}).get(name, {})
    stored = {part: (own[name + part].dtype, own[name + part].shape) for part in PARTS if name + part in own}
    stored |= parts  # of a weight that is in their place
    dtype, _ = stored.get("_scale_inv", (w.scale.dtype, None))
    if w.smooth is not None or w.power_of_two or (w.format == "fp8_block" and dtype != torch.float32):
        expected = f"a weight {name} without smooth, whose scales may be any float32"
        fail(ValueError, "merge", expected, f"{w.format} of compute {w.compute!r}, scales of {dtype}")
    _, shape = stored.get("_scale", (None, ()))
    if len(shape) == 2 and shape[1] > 1:
        fail(ValueError, "merge", f"a weight {name} with scales by rows", "one for gate and one for up")
    return w


def merge_quantized(experts: ExpertsModule, name: str, delta: Tensor) -> None:
    """Adds delta (E, out, in) to a quantised weight, whose format and options stay."""
    w = check_merge(experts, name)
    values = w.dequantize(torch.float32) + delta
    values = values.to(w.scale.dtype if w.scale.is_floating_point() else w.dtype)
    made: Any = quantize(values, w.format, **options_of(w), trainable=w.is_trainable, compute=w.compute)
    made = made.to(w.dtype)
    if isinstance(experts._modules.get(name), QuantizedWeight):
        setattr(experts, name, made)
    else:
        replace_parameters(experts, name, made)
