"""QuantizedWeight: an expert weight of 8 or 4 bits, in place of the tensors w1, w2 and w3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import FLOATING, check_choice, check_range, check_tensor, fail
from . import formats
from .formats import FORMATS

FN = "QuantizedWeight"


class QuantizedWeight(nn.Module):
    """A frozen weight (E, out, in) as codes and scales; `fused_moe.quantized.formats` has the formats.

    `fused_experts`, `grouped_mlp` and the experts of `FusedMoE` take it in place of a weight that is not
    transposed. x and scores get gradients through it; it gets none.

    Its parameters need no gradient, and have the names and the layout of the format's checkpoints, with E as
    their first dimension, so its state_dict does, too: `weight` and `weight_scale_inv` (fp8_block), `weight`
    and `weight_scale` (fp8, int8), `weight_packed` int32, `weight_scale` and `weight_zero_point` int8 as of
    compressed-tensors (int4), `blocks` and `scales` as of gpt-oss (mxfp4).

    Args:
        data: codes. fp8_block, fp8: float8_e4m3fn (E, out, in); int8: int8 (E, out, in); int4, mxfp4: uint8
            (E, out, in / 2), the even column in the lower half of a byte. Codes of int4 are stored plus 8.
        scale: fp8_block: float32 (E, ceil(out / 128), ceil(in / 128)). fp8, int8: floating, (E, out, 1) or
            (E, 1, 1). int4: floating, (E, out, in / g) with g 32, 64 or 128. mxfp4: uint8 (E, out, in / 32),
            which means 2^(scale - 127), and NaN for 255. NaN makes its block NaN.
        zero: int4: int8 zero points from -8 to 7, of scale's shape; None: zeros.
        format: fp8_block, fp8, int8, int4 or mxfp4. shape: (E, out, in).
        dtype: of `dequantize()` without an argument, and of the adapters that `add_lora` makes.

    `.to(device)` moves it; `.to(dtype)` changes `dtype` alone.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """

    def __init__(
        self,
        data: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        *,
        format: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        check_choice(FN, "format", format, FORMATS)
        if dtype not in FLOATING:
            fail(TypeError, FN, "a floating dtype", dtype)
        if not isinstance(shape, (tuple, list)) or len(shape) != 3 or min(shape) < 1:
            fail(ValueError, FN, "shape (E, out, in) of sizes >= 1", shape)
        self.format, self.shape, self.dtype = format, torch.Size(shape), dtype
        rules = FORMATS[format]
        E, rows, cols = self.shape
        scale_shapes = formats.scale_shapes(format, self.shape)
        if not scale_shapes:
            groups = " or ".join(map(str, rules.groups))
            fail(ValueError, FN, f"format {format} of a width that is a multiple of {groups}", cols)
        check_tensor(FN, "data", data, 3, (rules.data_dtype,))
        _check_shape("data", data, [(E, rows, cols // rules.per_byte)])
        check_tensor(FN, "scale", scale, 3, rules.scale_dtypes)
        _check_shape("scale", scale, scale_shapes)
        if zero is not None:
            if "zero" not in rules.names:
                fail(ValueError, FN, f"no zero points in format {format}", "some")
            check_tensor(FN, "zero", zero, 3, (torch.int8,))
            _check_shape("zero", zero, [tuple(scale.shape)])
            check_range(FN, "zero", zero, -8, 7)
        for name, tensor in (("scale", scale), ("zero", zero)):
            if tensor is not None and tensor.device != data.device:
                fail(ValueError, FN, f"{name} on data's device {data.device}", tensor.device)
        for name, tensor in (("data", _published(format, data)), ("scale", scale), ("zero", zero)):
            if name in rules.names:
                self.register_parameter(rules.names[name], _frozen(tensor))

    def forward(self) -> Tensor:
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (E, out, in) in `dtype`, by default self.dtype."""
        return formats.dequantize(self.format, *self.tensors, dtype or self.dtype)

    @property
    def data(self) -> Tensor:
        """The codes, as the constructor takes them. A view."""
        published = self._of("data")
        if self.format == "int4":
            return published.view(torch.uint8)
        return published.flatten(-2) if self.format == "mxfp4" else published

    @property
    def scale(self) -> Tensor:
        return self._of("scale")

    @property
    def zero(self) -> Tensor | None:
        return self._of("zero") if "zero" in FORMATS[self.format].names else None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """data, scale, zero."""
        return self.data, self.scale, self.zero

    @property
    def code(self) -> int:
        """The format as `torch.ops.fused_moe.quantized_mm` takes it."""
        return formats.CODES[self.format]

    @property
    def device(self) -> torch.device:
        return self.scale.device

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parameters())

    def dim(self) -> int:
        return 3

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def extra_repr(self) -> str:
        return f"format={self.format!r}, shape={tuple(self.shape)}, dtype={self.dtype}"

    def _of(self, name: str) -> Tensor | None:
        return getattr(self, FORMATS[self.format].names[name])

    def _apply(self, fn, recurse=True):
        """As nn.Module, but codes and scales keep their dtypes: fn gets their bytes."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        for name, parameter in self.named_parameters(recurse=False):
            moved = fn(parameter.detach().contiguous().view(torch.uint8))
            if moved.dtype == torch.uint8:
                moved = moved.view(parameter.dtype)
            else:  # .type(dtype), which casts integers, too
                moved = parameter.detach().to(moved.device)
            self._parameters[name] = _frozen(moved)
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        """As nn.Module, but refuses other dtypes, which nn.Module casts or, with assign=True, takes as they
        are, and zero points outside -8 to 7 where they are on the CPU."""
        own = dict(self.named_parameters(recurse=False))
        for name, parameter in own.items():
            given = state_dict.get(prefix + name)
            if given is None:
                continue
            found = ""
            if given.dtype != parameter.dtype:
                found = f"expected dtype {parameter.dtype}, found {given.dtype}"
            elif name == FORMATS[self.format].names.get("zero"):
                try:
                    check_range(FN, "zero", given, -8, 7)
                except ValueError as error:
                    found = str(error)
            if found:
                error_msgs.append(f"{prefix}{name}: {found}")
                state_dict[prefix + name] = parameter.detach()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def _published(format: str, data: Tensor) -> Tensor:
    """The codes as the format's checkpoints have them."""
    if format == "int4":
        return data.contiguous().view(torch.int32)
    return data.unflatten(-1, (-1, formats.MX_GROUP // 2)) if format == "mxfp4" else data


def _check_shape(name: str, tensor: Tensor, shapes: list[tuple[int, int, int]]) -> None:
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        fail(ValueError, FN, f"{name} of shape {expected}", tuple(tensor.shape))
