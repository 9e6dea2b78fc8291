"""quantize: a trained weight, or the experts of a trained model, as quantised ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, overload

import torch
from torch import Tensor, nn

from ..checks import FLOATING, check_bool, check_choice, check_int, check_plain, check_stored, fail
from ..finding import Module, experts_in
from . import formats
from .computing import check_compute, check_smooth
from .smoothing import from_experts, from_weights
from .weight import QuantizedWeight

FN = "quantize"


@overload
def quantize(
    module_or_weight: Tensor,
    format: str,
    *,
    group_size: int | None = ...,
    symmetric: bool | None = ...,
    per_tensor: bool | None = ...,
    trainable: bool = ...,
    compute: str = ...,
    smooth: Tensor | None = ...,
) -> QuantizedWeight: ...
@overload
def quantize(
    module_or_weight: Module,
    format: str,
    *,
    group_size: int | None = ...,
    symmetric: bool | None = ...,
    per_tensor: bool | None = ...,
    trainable: bool = ...,
    compute: str = ...,
    smooth: Mapping[str, tuple[Tensor, Tensor]] | None = ...,
) -> Module: ...
def quantize(
    module_or_weight: nn.Module | Tensor,
    format: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    per_tensor: bool | None = None,
    trainable: bool = False,
    compute: str = "codes",
    smooth: Mapping[str, tuple[Tensor, Tensor]] | Tensor | None = None,
) -> nn.Module | QuantizedWeight:
    """Quantises a weight, or in place the experts of every FusedMoE in a module.

    Each code is the one whose value is nearest.

    Args:
        module_or_weight: a weight (E, out, in) of a floating dtype; or a module. Its routers, gates, shared
            experts and biases stay as they are, and so do experts that are quantised already.
        format: fp8_block, fp8, int8, int4 or mxfp4; `fused_moe.quantized.formats` describes them.
        group_size: of int4: 32, 64 or 128 columns per scale; default 128.
        symmetric: of int4: False stores a zero point per group; default True.
        per_tensor: of fp8 and int8: one scale per expert instead of one per row; default False.
        trainable: for training through the weights, which stay frozen. On Hopper, where they are tiles, they
            are kept transposed, too: twice the packed bytes, and a faster backward while experts have up to
            768 rows on average. It changes no value, and has no effect elsewhere.
        compute: how experts multiply the weights: "codes", "fp8", "int8", "int8_smooth" or "auto";
            `QuantizedWeight.set_compute` says what they are. All but "codes" are forward only, and have
            float32 scales.
        smooth: of compute "int8_smooth", what the weights' inputs are divided by: of a module what
            `smooth_from` returns, of a weight (E, in) float32. Default: from the weights alone, the inverse
            square root of the peaks of their columns, of w1 and w3 together, divided by its geometric mean
            over the expert's columns (SmoothQuant, arXiv 2211.10438, with inputs of equal peaks).

    Returns:
        A QuantizedWeight; or the module itself.

    Raises:
        TypeError: for a wrong type or dtype, before anything is changed.
        ValueError: for a wrong shape or value, before anything is changed.

    Example:
        >>> moe = fused_moe.FusedMoE(64, 128, num_experts=4, top_k=2)
        >>> moe = fused_moe.quantize(moe, "int4", group_size=32)
        >>> moe.experts.w1
        QuantizedWeight(format='int4', shape=(4, 128, 64), dtype=torch.float32)
    """
    options, multiple = checked_options(format, group_size, symmetric, per_tensor)
    check_bool(FN, "trainable", trainable)
    check_compute(FN, compute, format, smooth)
    settings = {"trainable": trainable, "compute": compute}
    if not isinstance(module_or_weight, nn.Module):
        weight = module_or_weight
        _check_weight("weight", weight, multiple)
        if compute == "int8_smooth":
            smooth = from_weights(weight) if smooth is None else smooth
            check_smooth(FN, "smooth", smooth, weight.size(0), weight.size(2), weight.device)
        return _quantized(weight, format, options, cast("Tensor | None", smooth), settings)
    layers = {
        name: (experts, [w for w in ("w1", "w2", "w3") if isinstance(getattr(experts, w), nn.Parameter)])
        for name, experts in experts_in(FN, module_or_weight).items()
    }
    for experts, names in layers.values():
        for name in names:
            check_plain(FN, name, getattr(experts, name))
            _check_weight(name, getattr(experts, name), multiple)
        if names and compute != "codes":
            if experts.loras:
                fail(ValueError, FN, f"experts without adapters with compute {compute!r}", "some with them")
            if len(names) < sum(w is not None for w in experts.weights):
                expected = f"experts none of whose weights is quantised yet with compute {compute!r}"
                fail(ValueError, FN, expected, f"{' and '.join(names)} alone")
    smooths = _smooths_of(layers, smooth) if compute == "int8_smooth" else {}
    for layer, (experts, names) in layers.items():
        smooth1, smooth2 = smooths.get(layer, (None, None))
        for name in names:
            factors = smooth2 if name == "w2" else smooth1
            setattr(experts, name, _quantized(getattr(experts, name), format, options, factors, settings))
    return module_or_weight


def requantize(w: QuantizedWeight, values: Tensor) -> None:
    """Gives w other values (E, out, in), in float32, as codes of its own format, groups and dtypes."""
    tensors = formats.encode(values, w.format, **options_of(w), scale_dtype=w.scale.dtype)
    other = QuantizedWeight(*tensors, format=w.format, shape=tuple(w.shape), dtype=w.dtype)
    w.load_state_dict(other.state_dict())


def options_of(w: QuantizedWeight) -> dict:
    """The options of `quantize` that a weight of its format, groups and scales has."""
    scale = w.scale
    found = {
        "group_size": w.shape[2] // scale.size(2),
        "symmetric": w.zero is None,
        "per_tensor": scale.size(1) == 1,
    }
    return {name: found[name] for name in _defaults(formats.FORMATS[w.format])}


def _smooths_of(layers: dict, given) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (smooth1, smooth2)} of the layers that are to be quantised."""
    layers = {layer: experts for layer, (experts, names) in layers.items() if names}
    if given is None:
        return {layer: from_experts(experts) for layer, experts in layers.items()}
    if not isinstance(given, Mapping):
        fail(TypeError, FN, "smooth to be what smooth_from returns of the module", type(given).__name__)
    if missing := sorted(layers.keys() - given.keys()):
        fail(ValueError, FN, f"smooth of {missing}, as smooth_from returns", sorted(map(str, given)))
    for layer, experts in layers.items():
        if not isinstance(given[layer], (tuple, list)) or len(given[layer]) != 2:
            fail(TypeError, FN, f"smooth[{layer!r}] to be (smooth1, smooth2)", type(given[layer]).__name__)
        E, D, F = experts.w2.shape
        for i, (factors, width) in enumerate(zip(given[layer], (D, F), strict=True)):
            check_smooth(FN, f"smooth[{layer!r}][{i}]", factors, E, width, experts.w2.device)
    return {layer: tuple(given[layer]) for layer in layers}


def checked_options(format, group_size, symmetric, per_tensor) -> tuple[dict, int]:
    """The options of a format, with its defaults, and what a weight's input width has to be a multiple of."""
    check_choice(FN, "format", format, formats.FORMATS)
    given = {"group_size": group_size, "symmetric": symmetric, "per_tensor": per_tensor}
    rules = formats.FORMATS[format]
    options = _defaults(rules)
    for name, value in given.items():
        if value is None:
            continue
        if name not in options:
            fail(ValueError, FN, f"no {name} with format {format}", value)
        if name != "group_size":
            check_bool(FN, name, value)
        else:
            check_int(FN, name, value)
            if value not in rules.groups:
                fail(ValueError, FN, f"group_size of {' or '.join(map(str, rules.groups))}", value)
        options[name] = value
    return options, formats.width_multiple(format, options.get("group_size"))


def _defaults(rules: formats.Format) -> dict:
    """The options of a format, and their defaults."""
    options = {}
    if len(rules.groups) > 1:
        options["group_size"] = rules.groups[-1]
    if "zero" in rules.names:
        options["symmetric"] = True
    if rules.block == "row":
        options["per_tensor"] = False
    return options


def _check_weight(name: str, weight, multiple: int) -> None:
    check_stored(FN, name, weight, 3, FLOATING)
    if weight.size(2) % multiple:
        fail(ValueError, FN, f"{name} (E, out, in) with in a multiple of {multiple}", tuple(weight.shape))


def _quantized(
    weight: Tensor, format: str, options: dict, smooth: Tensor | None, settings: dict
) -> QuantizedWeight:
    w = weight.detach()
    scale_dtype = None if settings["compute"] == "codes" else torch.float32
    data, scale, zero = formats.encode(w, format, **options, scale_dtype=scale_dtype, smooth=smooth)
    # w1 and w3 have the same factors, but safetensors saves no two tensors in the same memory.
    smooth = None if smooth is None else smooth.clone()
    return QuantizedWeight(
        data, scale, zero, format=format, shape=tuple(w.shape), dtype=w.dtype, smooth=smooth, **settings
    )
