"""What a QuantizedWeight takes from a state_dict: all that its format leaves open."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..checks import check_range, fail
from . import formats
from .formats import FORMATS

FN = "QuantizedWeight.load_state_dict"


def given_tensors(format: str, state_dict: Mapping, prefix: str) -> dict[str, Tensor]:
    """data, scale and zero of a state_dict, if it has them."""
    given = {}
    for key, name in FORMATS[format].names.items():
        value = state_dict.get(prefix + name)
        if value is not None:
            if not isinstance(value, Tensor):
                fail(TypeError, FN, f"{prefix}{name} to be a tensor", type(value).__name__)
            if value.layout != torch.strided:
                fail(TypeError, FN, f"{prefix}{name} to be a dense tensor", f"layout {value.layout}")
            given[key] = value
    return given


def foreign_format(format: str, state_dict: Mapping, prefix: str) -> str | None:
    """A message if the state_dict has names of another format alone."""
    own = FORMATS[format].names.values()
    for other, rules in FORMATS.items():
        for name in rules.names.values():
            if name not in own and prefix + name in state_dict:
                return f"{prefix}{name}: expected a weight of format {format}, found one of format {other}"
    return None


def wrong_tensors(format: str, shape: tuple[int, ...], given: dict[str, Tensor]) -> dict[str, str]:
    """{data, scale or zero: what is wrong}. nn.Module compares shapes, but not of new zero points."""
    rules = FORMATS[format]
    dtypes = {
        "data": (torch.int32 if rules.layout == "words" else rules.data_dtype,),
        "scale": rules.scale_dtypes,
        "zero": (torch.int8,),
    }
    wrong = {}
    for key, tensor in given.items():
        if tensor.dtype not in dtypes[key]:
            wrong[key] = f"expected dtype {' or '.join(map(str, dtypes[key]))}, found {tensor.dtype}"
    zero, scale = given.get("zero"), given.get("scale")
    if zero is None or "zero" in wrong:
        return wrong
    right = formats.scale_shapes(format, shape)
    if scale is not None and tuple(scale.shape) in right:
        right = [tuple(scale.shape)]
    if tuple(zero.shape) not in right:
        wrong["zero"] = f"expected shape {' or '.join(map(str, right))}, found {tuple(zero.shape)}"
        return wrong
    try:
        check_range("QuantizedWeight", "zero", zero, -8, 7)
    except ValueError as error:
        wrong["zero"] = str(error)
    return wrong


def replacements(
    format: str, shape: tuple[int, ...], own: dict[str, Tensor | None], given: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """{scale or zero: the given tensor, whose shape and dtype the parameter has to take}; None for zero
    points that go, because the state_dict has codes and scales without them. Those on meta are missing."""
    scale_shapes = formats.scale_shapes(format, shape)
    found: dict[str, Tensor | None] = {}
    for key in ("scale", "zero"):
        tensor, parameter = given.get(key), own.get(key)
        if tensor is None or tuple(tensor.shape) not in scale_shapes:
            continue
        if parameter is None or (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
            found[key] = tensor
    zero = own.get("zero")
    if zero is not None and not zero.is_meta and "zero" not in given and {"data", "scale"} <= given.keys():
        found["zero"] = None
    return found


def described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"one of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
