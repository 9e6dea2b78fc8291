"""The formats of quantised weights: what their tensors are, their values, and how a weight is quantised.

A weight (E, out, in) is stored as codes, with one scale, and for some formats one zero point, per block:

    value = (code - zero) * scale, in float32, then rounded to the dtype in which it is multiplied

| format      | codes                         | block of a scale          | scales             |
| ----------- | ----------------------------- | ------------------------- | ------------------ |
| `fp8_block` | e4m3                          | 128 x 128                 | float32            |
| `fp8`       | e4m3                          | a row, or the matrix      | any floating dtype |
| `int8`      | two's complement              | a row, or the matrix      | any floating dtype |
| `int4`      | 0 to 15, zero point 8 if none | 32, 64 or 128 of a row    | any floating dtype |
| `mxfp4`     | e2m1                          | 32 of a row               | e8m0, as uint8     |

Codes of 4 bits are stored two per byte, the even column in the lower half: `data` is uint8 (E, out, in / 2).
Sources: DeepSeek-V3 (arXiv 2412.19437, 3.3), OCP 8-bit floating point, OCP Microscaling Formats 1.0, and the
safetensors of compressed-tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SCALES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (32, 64, 128)
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # of fp8_block, in both dimensions
MX_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; bit 3 is the sign
E2M1_MIDDLES = tuple((low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False))
UINT4_ZERO = 8  # of int4 without zero points


class Format(NamedTuple):
    """What the tensors of a format have to be."""

    code: int  # FusedMoeFormat of csrc/fused_moe.h
    data_dtype: torch.dtype
    per_byte: int  # codes per element of data
    scale_dtypes: tuple[torch.dtype, ...]
    has_zero: bool


FORMATS = {
    "fp8_block": Format(0, E4M3, 1, (torch.float32,), False),
    "fp8": Format(1, E4M3, 1, SCALES, False),
    "int8": Format(2, torch.int8, 1, SCALES, False),
    "int4": Format(3, torch.uint8, 2, SCALES, True),
    "mxfp4": Format(4, torch.uint8, 2, (torch.uint8,), False),
}


def scale_shapes(format: str, shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """The shapes that scales of a weight (E, out, in) may have; none if the weight has no such format."""
    E, rows, cols = shape
    if format == "fp8_block":
        return [(E, -(-rows // BLOCK), -(-cols // BLOCK))]
    if format in ("fp8", "int8"):
        return [(E, rows, 1), (E, 1, 1)]
    groups = GROUPS if format == "int4" else (MX_GROUP,)
    return [(E, rows, cols // group) for group in groups if cols % group == 0]


# --- values -----------------------------------------------------------------------------------------------


def dequantize(format: str, data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight (E, out, in) in `dtype`. Nothing is copied from the host, so a CUDA graph may capture it."""
    if format == "mxfp4":
        values = _from_e2m1(_nibbles(data))
        scale = _power_of_two(scale)
    elif format == "int4":
        values = _nibbles(data).float()
    else:
        values = data.float()
    E, rows, cols = values.shape
    if format == "fp8_block":
        scale = scale.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[..., :cols]
        return (values * scale).to(dtype)
    blocks = values.view(E, rows, scale.size(2), -1)
    if format == "int4":
        blocks = blocks - (UINT4_ZERO if zero is None else zero.unsqueeze(-1).float())
    return (blocks * scale.unsqueeze(-1).float()).view(E, rows, cols).to(dtype)


def _nibbles(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes, as int32, twice as many."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2).int()


def _from_e2m1(codes: Tensor) -> Tensor:
    """The float32 values of codes, whose bits are a float32's but for the exponent's bias and subnormals."""
    magnitude = codes & 7
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = normal - (magnitude < 2) * (0.5 - 0.25 * magnitude)
    return value * (1 - 2 * (codes >> 3))


def _power_of_two(e8m0: Tensor) -> Tensor:
    """2^(code - 127) in float32, made of its bits; NaN for 255."""
    is_special = (e8m0 == 0) | (e8m0 == 255)  # subnormal, or infinite without a bit of its fraction
    return ((e8m0.int() << 23) + (is_special.int() << 22)).view(torch.float32)


# --- quantising -------------------------------------------------------------------------------------------


def quantize(
    w: Tensor, format: str, group_size: int, symmetric: bool, per_tensor: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """data, scale and zero of a weight (E, out, in), every code the nearest. Scales of int4, int8 and fp8
    have w's dtype (float32 for float64), and codes are of the rounded scale."""
    scale_dtype = torch.float32 if w.dtype == torch.float64 else w.dtype
    w = w.float()
    if format == "fp8_block":
        return _quantize_fp8_block(w)
    if format == "mxfp4":
        return _quantize_mxfp4(w)
    if format == "int4":
        return _quantize_int4(w, group_size, symmetric, scale_dtype)
    largest = {"fp8": 448, "int8": 127}[format]
    peak = w.abs().amax((1, 2) if per_tensor else 2, keepdim=True)
    scale = _scale(peak, largest, scale_dtype)
    scaled = (w / scale.float()).clamp(-largest, largest)
    return scaled.to(E4M3) if format == "fp8" else scaled.round().to(torch.int8), scale, None


def _scale(peak: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The scale that maps `largest` to peak, rounded; 1 where that is zero in the dtype."""
    scale = (peak / largest).to(dtype)
    return torch.where(scale == 0, 1, scale)


def _quantize_fp8_block(w: Tensor):
    E, rows, cols = w.shape
    row_blocks, col_blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = w.new_zeros(E, row_blocks * BLOCK, col_blocks * BLOCK)
    padded[:, :rows, :cols] = w
    blocks = padded.view(E, row_blocks, BLOCK, col_blocks, BLOCK)
    scale = _scale(blocks.abs().amax((2, 4)), 448, torch.float32)
    scaled = (blocks / scale[:, :, None, :, None]).view_as(padded)[:, :rows, :cols]
    return scaled.clamp(-448, 448).to(E4M3), scale, None


def _quantize_int4(w: Tensor, group_size: int, symmetric: bool, scale_dtype: torch.dtype):
    blocks = w.unflatten(-1, (-1, group_size))
    zero = None
    if symmetric:
        scale = _scale(blocks.abs().amax(-1), 7, scale_dtype)
        offset = UINT4_ZERO
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = _scale(high - low, 15, scale_dtype)
        zero = (-low / scale.float()).round().clamp(0, 15).nan_to_num().to(torch.uint8)
        offset = zero.unsqueeze(-1).float()
    codes = ((blocks / scale.unsqueeze(-1).float()).round() + offset).clamp(0, 15).nan_to_num()
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scale, zero


def _quantize_mxfp4(w: Tensor):
    blocks = w.unflatten(-1, (-1, MX_GROUP))
    peak = blocks.abs().amax(-1)
    # frexp: peak = m 2^e, 0.5 <= m < 1; the largest code, 6, is 1.5 * 2^2
    exponent = (torch.frexp(peak).exponent - 3).clamp(-127, 127)
    exponent = torch.where(peak == 0, 0, exponent)
    scale = torch.where(peak.isfinite(), exponent + 127, 255).to(torch.uint8)
    scaled = (blocks / _power_of_two(scale).unsqueeze(-1)).nan_to_num()
    middles = torch.tensor(E2M1_MIDDLES, device=w.device)
    # A tie goes to the even code, as IEEE 754 rounds: between 0 and 0.5 down, between 0.5 and 1 up, ...
    magnitude = scaled.abs().contiguous()
    down, up = torch.bucketize(magnitude, middles), torch.bucketize(magnitude, middles, right=True)
    codes = torch.where(down % 2 == 0, down, up)
    codes = codes | (scaled.signbit().int() << 3)
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scale, None


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits, two per byte, the even column in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def pack_rows(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits (E, rows, n) as int32 (E, ceil(rows / 8), n): eight rows per word, the first in
    the lowest bits, as compressed-tensors packs zero points."""
    E, rows, n = codes.shape
    padded = codes.new_zeros(E, -(-rows // 8) * 8, n)
    padded[:, :rows] = codes
    shifts = torch.arange(0, 32, 4, device=codes.device).view(8, 1)
    words = (padded.view(E, -1, 8, n).long() << shifts).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack_rows(words: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_rows`."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32).view(8, 1)
    return ((words.unsqueeze(2) >> shifts) & 15).flatten(1, 2)[:, :rows].to(torch.uint8)
