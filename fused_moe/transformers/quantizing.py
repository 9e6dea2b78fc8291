"""quantize_experts: the experts of a model in memory as quantised ones."""

from __future__ import annotations

from torch import Tensor, nn

from ..checks import FLOATING, fail
from ..quantized.quantizing import checked_options, quantize
from .experts import settings_of
from .weights import NAME, add_hook, first_name


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
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
    options, multiple = checked_options(format, group_size, symmetric, per_tensor)
    found = experts_of(model) if isinstance(model, nn.Module) else []
    if not found:
        expected = "a transformers model with experts that have an experts_implementation"
        fail(ValueError, fn, expected, type(model).__name__)
    todo = []
    for module_name, experts in found:
        implementation = experts.config._experts_implementation
        if implementation != NAME:
            advice = f'; call set_experts_implementation("{NAME}") before'
            fail(ValueError, fn, f"experts_implementation={NAME!r}", repr(implementation) + advice)
        settings = settings_of(experts)
        if isinstance(settings, str):
            fail(ValueError, fn, "experts that fused_moe computes", f"{settings} of {module_name}")
        for name in (first_name(experts), "down_proj"):
            w = getattr(experts, name, None)
            if not isinstance(w, Tensor) or w.dtype not in FLOATING:
                continue
            width = w.size(1 if experts.is_transposed else 2)
            if width % multiple:
                expected = f"{module_name}.{name} with an input width that is a multiple of {multiple}"
                fail(ValueError, fn, expected, width)
            todo.append((experts, name))
    for experts, name in todo:
        w = getattr(experts, name).detach()
        w = w.mT.contiguous() if experts.is_transposed else w
        delattr(experts, name)
        setattr(experts, name, quantize(w, format, **options))
        add_hook(experts)
    return model
