"""quantize: turns a trained weight, or the experts of a trained model, into quantised ones."""

from __future__ import annotations

from torch import Tensor, nn

from ..checks import FLOATING, check_bool, check_choice, check_int, check_plain, check_tensor, fail
from . import formats
from .weight import QuantizedWeight

FN = "quantize"


def quantize(
    module_or_weight: nn.Module | Tensor,
    format: str,
    *,
    group_size: int = 128,
    symmetric: bool = True,
    per_tensor: bool = False,
) -> nn.Module | QuantizedWeight:
    """Quantises a weight, or in place the experts of every FusedMoE in a module. Each code is the nearest.

    Args:
        module_or_weight: a weight (E, out, in) of a floating dtype; or a module. Its routers, gates, shared
            experts and biases stay as they are, and so do experts that are quantised already.
        format: fp8_block, fp8, int8, int4 or mxfp4; `fused_moe.quantized.formats` describes them.
        group_size: of int4: 32, 64 or 128 columns per scale.
        symmetric: of int4: False stores a zero point per group.
        per_tensor: of fp8 and int8: one scale per expert instead of one per row.

    Returns:
        A QuantizedWeight; or the module itself.

    Raises:
        TypeError, ValueError: before anything is changed, with what was expected and what was found.
    """
    check_choice(FN, "format", format, formats.FORMATS)
    check_int(FN, "group_size", group_size)
    check_bool(FN, "symmetric", symmetric)
    check_bool(FN, "per_tensor", per_tensor)
    if group_size not in formats.GROUPS:
        fail(ValueError, FN, f"group_size of {' or '.join(map(str, formats.GROUPS))}", group_size)
    options = (format, group_size, symmetric, per_tensor)
    if not isinstance(module_or_weight, nn.Module):
        return _quantized("weight", module_or_weight, *options)
    from ..module import Experts  # which takes quantised weights, so it imports this package

    experts = [m for m in module_or_weight.modules() if isinstance(m, Experts)]
    if not experts:
        fail(ValueError, FN, "a module with a FusedMoE in it", type(module_or_weight).__name__)
    weights = [
        (layer, name, getattr(layer, name))
        for layer in experts
        for name in ("w1", "w2", "w3")
        if isinstance(getattr(layer, name), nn.Parameter)
    ]
    for _, name, weight in weights:
        check_plain(FN, name, weight)
        _check_weight(name, weight, format, group_size)
    for layer, name, weight in weights:
        setattr(layer, name, _quantized(name, weight, *options))
    return module_or_weight


def _check_weight(name: str, weight, format: str, group_size: int) -> None:
    check_tensor(FN, name, weight, 3, FLOATING)
    group = {"int4": group_size, "mxfp4": formats.MX_GROUP}.get(format, 1)
    if weight.size(2) % group:
        fail(ValueError, FN, f"{name} (E, out, in) with in a multiple of {group}", tuple(weight.shape))


def _quantized(name: str, weight: Tensor, format, group_size, symmetric, per_tensor) -> QuantizedWeight:
    _check_weight(name, weight, format, group_size)
    w = weight.detach()
    tensors = formats.quantize(w, format, group_size, symmetric, per_tensor)
    return QuantizedWeight(*tensors, format=format, shape=tuple(w.shape), dtype=w.dtype)
