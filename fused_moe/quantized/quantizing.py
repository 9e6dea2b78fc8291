"""quantize: a trained weight, or the experts of a trained model, as quantised ones."""

from __future__ import annotations

from torch import Tensor, nn

from ..checks import FLOATING, check_bool, check_choice, check_int, check_plain, check_stored, fail
from . import formats
from .weight import QuantizedWeight

FN = "quantize"


def quantize(
    module_or_weight: nn.Module | Tensor,
    format: str,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    per_tensor: bool | None = None,
    trainable: bool = False,
) -> nn.Module | QuantizedWeight:
    """Quantises a weight, or in place the experts of every FusedMoE in a module. Each code is the nearest.

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

    Returns:
        A QuantizedWeight; or the module itself.

    Raises:
        TypeError, ValueError: before anything is changed, with what was expected and what was found.
    """
    options, multiple = checked_options(format, group_size, symmetric, per_tensor)
    check_bool(FN, "trainable", trainable)
    if not isinstance(module_or_weight, nn.Module):
        return _quantized("weight", module_or_weight, format, multiple, options, trainable)
    from ..module import experts_in  # whose experts take quantised weights, so it imports this package

    weights = [
        (layer, name)
        for layer in experts_in(FN, module_or_weight)
        for name in ("w1", "w2", "w3")
        if isinstance(getattr(layer, name), nn.Parameter)
    ]
    for layer, name in weights:
        check_plain(FN, name, getattr(layer, name))
        _check_weight(name, getattr(layer, name), multiple)
    for layer, name in weights:
        setattr(layer, name, _quantized(name, getattr(layer, name), format, multiple, options, trainable))
    return module_or_weight


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
    name: str, weight: Tensor, format: str, multiple: int, options: dict, trainable: bool
) -> QuantizedWeight:
    _check_weight(name, weight, multiple)
    w = weight.detach()
    tensors = formats.encode(w, format, **options)
    return QuantizedWeight(*tensors, format=format, shape=tuple(w.shape), dtype=w.dtype, trainable=trainable)
