"""QuantizedWeight: an expert weight of 8 or 4 bits, which stands where w1, w2 and w3 do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import FLOATING, check_choice, check_range, check_tensor, fail
from . import formats
from .formats import FORMATS

FN = "QuantizedWeight"

# How a state_dict stores each format: the buffers' names there.
PUBLISHED = {
    "fp8_block": {"data": "weight", "scale": "weight_scale_inv"},
    "fp8": {"data": "weight", "scale": "weight_scale"},
    "int8": {"data": "weight", "scale": "weight_scale"},
    "int4": {"data": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point"},
    "mxfp4": {"data": "blocks", "scale": "scales"},
}


class QuantizedWeight(nn.Module):
    """A frozen weight (E, out, in) as codes and scales; `fused_moe.quantized.formats` has the formats.

    It stands wherever `fused_experts`, `grouped_mlp` and the experts of `FusedMoE` take a weight that is not
    transposed. Its values are frozen: x and scores get gradients through it, it gets none.

    Args:
        data: codes. fp8_block, fp8: float8_e4m3fn (E, out, in); int8: int8 (E, out, in); int4, mxfp4: uint8
            (E, out, in / 2), the even column in the lower half of a byte.
        scale: fp8_block: float32 (E, ceil(out / 128), ceil(in / 128)). fp8, int8: floating, (E, out, 1) or
            (E, 1, 1). int4: floating, (E, out, in / g) with g 32, 64 or 128. mxfp4: uint8 (E, out, in / 32),
            which stands for 2^(scale - 127), 255 for NaN. NaN makes its block NaN.
        zero: int4: uint8 zero points 0 to 15 of scale's shape; None stands for 8.
        format: fp8_block, fp8, int8, int4 or mxfp4. shape: (E, out, in).
        dtype: of `dequantize()` without an argument.

    `.to(device)` moves it; `.to(dtype)` changes `dtype` alone. Its state_dict has the names and the layout of
    the format's checkpoints: `weight` and `weight_scale_inv` (fp8_block), `weight` and `weight_scale` (fp8,
    int8), `weight_packed`, `weight_scale`, `weight_zero_point` and `weight_shape` as of compressed-tensors
    (int4), `blocks` and `scales` as of gpt-oss (mxfp4), all but weight_shape with E as their first dimension.

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
        if len(shape) != 3 or min(shape) < 1:
            fail(ValueError, FN, "shape (E, out, in) of sizes >= 1", tuple(shape))
        self.format, self.shape, self.dtype = format, torch.Size(shape), dtype
        found = FORMATS[format]
        E, rows, cols = self.shape
        scale_shapes = formats.scale_shapes(format, self.shape)
        if not scale_shapes:
            groups = " or ".join(map(str, formats.GROUPS if format == "int4" else (formats.MX_GROUP,)))
            fail(ValueError, FN, f"format {format} of a width that is a multiple of {groups}", cols)
        check_tensor(FN, "data", data, 3, (found.data_dtype,))
        _check_shape("data", data, [(E, rows, cols // found.per_byte)])
        check_tensor(FN, "scale", scale, 3, found.scale_dtypes)
        _check_shape("scale", scale, scale_shapes)
        if zero is not None:
            if not found.has_zero:
                fail(ValueError, FN, f"no zero points in format {format}", "some")
            check_tensor(FN, "zero", zero, 3, (torch.uint8,))
            _check_shape("zero", zero, [tuple(scale.shape)])
            check_range(FN, "zero", zero, 0, 15)
        for name, tensor in (("scale", scale), ("zero", zero)):
            if tensor is not None and tensor.device != data.device:
                fail(ValueError, FN, f"{name} on data's device {data.device}", tensor.device)
        self.register_buffer("data", data.detach().contiguous())
        self.register_buffer("scale", scale.detach().contiguous())
        self.register_buffer("zero", None if zero is None else zero.detach().contiguous())

    def forward(self) -> Tensor:
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight (E, out, in) in `dtype`, by default self.dtype."""
        return formats.dequantize(self.format, self.data, self.scale, self.zero, dtype or self.dtype)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """data, scale, zero."""
        return self.data, self.scale, self.zero

    @property
    def code(self) -> int:
        """The format as `torch.ops.fused_moe.quantized_mm` takes it."""
        return FORMATS[self.format].code

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors if t is not None)

    def dim(self) -> int:
        return 3

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def extra_repr(self) -> str:
        return f"format={self.format!r}, shape={tuple(self.shape)}, dtype={self.dtype}"

    def _apply(self, fn, recurse=True):
        """As nn.Module, but codes and scales keep their dtypes: fn gets their bytes."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        for name, tensor in self.named_buffers(recurse=False):
            self._buffers[name] = fn(tensor.view(torch.uint8)).view(tensor.dtype)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name, published in PUBLISHED[self.format].items():
            if self._buffers[name] is not None:
                destination[prefix + published] = self._published(name, self._buffers[name])
        if self.format == "int4":
            destination[prefix + "weight_shape"] = torch.tensor(self.shape[1:])

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        state_dict.pop(prefix + "weight_shape", None)
        names = {prefix + published: name for name, published in PUBLISHED[self.format].items()}
        for published, name in names.items():
            own, found = self._buffers[name], state_dict.pop(published, None)
            if found is None:
                if own is not None and strict:
                    missing_keys.append(published)
            elif own is None:
                unexpected_keys.append(published)
            else:
                state_dict[prefix + name] = found = self._stored(name, found)
                expected = own.dtype, tuple(own.shape)
                if expected != (found.dtype, tuple(found.shape)):
                    error_msgs.append(
                        f"{published}: expected {expected[0]} of shape {expected[1]}, "
                        f"found {found.dtype} of shape {tuple(found.shape)}"
                    )
                    del state_dict[prefix + name]
        missing = []  # they are above, by their published names
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
        )

    def _published(self, name: str, tensor: Tensor) -> Tensor:
        """A buffer as the format's checkpoints store it."""
        if self.format == "mxfp4" and name == "data":
            return tensor.unflatten(-1, (-1, formats.MX_GROUP // 2))
        if self.format == "int4" and name == "data":
            return tensor.view(torch.int32)
        if self.format == "int4" and name == "zero":
            return formats.pack_rows(tensor)
        return tensor

    def _stored(self, name: str, published: Tensor) -> Tensor:
        """The inverse of `_published`."""
        if self.format == "mxfp4" and name == "data" and published.dim() == 4:
            return published.flatten(-2)
        if self.format == "int4" and name == "data" and published.dtype == torch.int32:
            return published.contiguous().view(torch.uint8)
        if self.format == "int4" and name == "zero" and published.dtype == torch.int32:
            return formats.unpack_rows(published, self.shape[1])
        return published


def _check_shape(name: str, tensor: Tensor, shapes: list[tuple[int, int, int]]) -> None:
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        fail(ValueError, FN, f"{name} of shape {expected}", tuple(tensor.shape))
