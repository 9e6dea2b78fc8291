"""The formats of quantised weights: what their tensors are, their values, and how a weight is quantised.

A weight (E, out, in) is stored as codes, with one scale, and in int4 one zero point, per block of a matrix:

    value = (code - zero) * scale, in float32, then rounded to the dtype in which it is multiplied

| format      | codes                  | block of a scale       | scales                           |
| ----------- | ---------------------- | ---------------------- | -------------------------------- |
| `fp8_block` | e4m3                   | 128 x 128              | float32                          |
| `fp8`       | e4m3                   | a row, or the matrix   | float32, bfloat16 or float16     |
| `int8`      | -128 to 127            | a row, or the matrix   | float32, bfloat16 or float16     |
| `int4`      | -8 to 7, stored plus 8 | 32, 64 or 128 of a row | the same; zero points int8       |
| `mxfp4`     | e2m1                   | 32 of a row            | e8m0, as uint8                   |

Codes of 4 bits are stored two per byte, the even column in the lower half: `data` is uint8 (E, out, in / 2).
Sources: DeepSeek-V3 (arXiv 2412.19437, 3.3), OCP 8-bit floating point, OCP Microscaling Formats 1.0, and the
safetensors of compressed-tensors.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

SCALES, E8M0 = (torch.float32, torch.bfloat16, torch.float16), (torch.uint8,)
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # rows, and columns, of fp8_block's scales
GROUPS = (32, 64, 128)  # columns of int4's scales
MX_GROUP = 32
INT4_OFFSET = 8  # added to an int4 code where it is stored
E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
PART = 1 << 22  # elements that are converted at a time: temporaries take several times their bytes


class Format(NamedTuple):
    """What the tensors of a format have to be, and how its checkpoints keep them."""

    code: str  # the kind of its codes
    block: str  # of a scale: square_128, row (or the matrix), group (of a row) or group_32
    data_dtype: torch.dtype
    per_byte: int  # codes per byte of data
    scale_dtypes: tuple[torch.dtype, ...]
    names: dict[str, str]  # of data, scale and zero; without zero there are no zero points
    groups: tuple[int, ...] = ()  # columns per scale, where a row has several
    layout: str = "data"  # of codes in checkpoints: as data; words of int32; or blocks, one per group


_WEIGHT = {"data": "weight", "scale": "weight_scale"}
_PACKED = {"data": "weight_packed", "scale": "weight_scale", "zero": "weight_zero_point"}

# The facts and the order are also in csrc/formats.h.
FORMATS = {
    "fp8_block": Format(
        "e4m3", "square_128", E4M3, 1, (torch.float32,), {"data": "weight", "scale": "weight_scale_inv"}
    ),
    "fp8": Format("e4m3", "row", E4M3, 1, SCALES, _WEIGHT),
    "int8": Format("int8", "row", torch.int8, 1, SCALES, _WEIGHT),
    "int4": Format("int4", "group", torch.uint8, 2, SCALES, _PACKED, GROUPS, "words"),
    "mxfp4": Format(
        "e2m1", "group_32", torch.uint8, 2, E8M0, {"data": "blocks", "scale": "scales"}, (MX_GROUP,), "blocks"
    ),
}
NUMBERS = {name: number for number, name in enumerate(FORMATS)}  # as operators take formats


def named_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the codes of a weight (E, out, in) as the format's checkpoints have them."""
    E, rows, cols = shape
    rules = FORMATS[format]
    width = cols // rules.per_byte
    if rules.layout == "blocks":
        (group,) = rules.groups
        return E, rows, cols // group, group // rules.per_byte
    return E, rows, width // 4 if rules.layout == "words" else width


def scale_shapes(format: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes that scales of a weight (E, out, in) may have; none if the weight has no such format."""
    E, rows, cols = shape
    if FORMATS[format].block == "square_128":
        return [(E, -(-rows // BLOCK), -(-cols // BLOCK))]
    groups = FORMATS[format].groups
    if groups:
        return [(E, rows, cols // group) for group in groups if cols % group == 0]
    return [(E, rows, 1), (E, 1, 1)]


def width_multiple(format: str, group_size: int | None) -> int:
    """What the input width of a weight has to be a multiple of. group_size: where a format has several."""
    groups = FORMATS[format].groups
    return cast(int, group_size) if len(groups) > 1 else next(iter(groups), 1)


def parts(shape: tuple[int, ...]) -> list[slice]:
    """The experts of a weight, some at a time."""
    E, rows, cols = shape
    step = max(1, PART // (rows * cols))
    return [slice(e, min(e + step, E)) for e in range(0, E, step)]


def _part(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor[part]


# --- values -----------------------------------------------------------------------------------------------


def dequantize(format: str, data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight (E, out, in) in `dtype`. Nothing is copied from the host, so a CUDA graph may capture it."""
    E, rows, width = data.shape
    shape = E, rows, width * FORMATS[format].per_byte
    out = torch.empty(shape, dtype=dtype, device=data.device)
    for part in parts(shape):
        out[part] = _values(format, data[part], scale[part], _part(zero, part))
    return out


def _values(format: str, data: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """(E, out, in) in float32."""
    rules = FORMATS[format]
    if rules.code == "e2m1":
        values = _from_e2m1(nibbles(data))
    elif rules.code == "int4":
        values = nibbles(data).float() - INT4_OFFSET
    else:
        values = data.float()
    if rules.scale_dtypes == E8M0:
        scale = _power_of_two(scale)
    E, rows, cols = values.shape
    if rules.block == "square_128":
        scale = scale.repeat_interleave(BLOCK, 1)[:, :rows].repeat_interleave(BLOCK, 2)[..., :cols]
        return values * scale
    blocks = values.view(E, rows, scale.size(2), -1)
    if zero is not None:
        blocks = blocks - zero.unsqueeze(-1)
    return (blocks * scale.unsqueeze(-1).float()).view(E, rows, cols)


def nibbles(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes, two per byte."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _from_e2m1(codes: Tensor) -> Tensor:
    """The float32 values of codes, whose bits are a float32's but for the exponent's bias and subnormals."""
    codes = codes.int()
    magnitude = codes & 7
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = normal - (magnitude < 2) * (0.5 - 0.25 * magnitude)
    return value * (1 - 2 * (codes >> 3))


def _power_of_two(e8m0: Tensor) -> Tensor:
    """2^(code - 127) in float32, made of its bits; NaN for 255."""
    is_special = (e8m0 == 0) | (e8m0 == 255)  # subnormal, or infinite without a bit of its fraction
    return ((e8m0.int() << 23) + (is_special.int() << 22)).view(torch.float32)


# --- quantising -------------------------------------------------------------------------------------------


def encode(
    w: Tensor,
    format: str,
    *,
    group_size: int = GROUPS[-1],
    symmetric: bool = True,
    per_tensor: bool = False,
    scale_dtype: torch.dtype | None = None,
    smooth: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """data, scale and zero of a weight (E, out, in), times smooth (E, in), every code the nearest. Scales of
    int4, int8 and fp8 have `scale_dtype`, by default w's (float32 for float64), and codes are of the rounded
    scale."""
    encoded = []
    for part in parts(tuple(w.shape)):
        one = w[part] if scale_dtype is None else w[part].float()
        one = one if smooth is None else one * smooth[part].unsqueeze(1)
        own = one.dtype if scale_dtype is None else scale_dtype
        own = torch.float32 if own == torch.float64 else own
        encoded.append(_encode(one, format, group_size, symmetric, per_tensor, own))
    data, scale, zero = zip(*encoded, strict=True)
    return torch.cat(data), torch.cat(scale), None if zero[0] is None else torch.cat(zero)


def _encode(
    w: Tensor, format: str, group_size: int, symmetric: bool, per_tensor: bool, scale_dtype: torch.dtype
):
    w = w.float()
    rules = FORMATS[format]
    if rules.block == "square_128":
        return _encode_fp8_block(w)
    if rules.code == "e2m1":
        return _encode_mxfp4(w)
    if rules.code == "int4":
        return _encode_int4(w, group_size, symmetric, scale_dtype)
    largest = {"e4m3": 448, "int8": 127}[rules.code]
    peak = w.abs().amax((1, 2) if per_tensor else 2, keepdim=True)
    scale = _scale(peak, largest, scale_dtype)
    scaled = (w / scale.float()).clamp(-largest, largest)
    return (
        scaled.to(E4M3) if rules.code == "e4m3" else scaled.round().nan_to_num().to(torch.int8),
        scale,
        None,
    )


def _scale(peak: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """The scale that maps `largest` to peak, rounded; 1 where that is zero in the dtype."""
    scale = (peak / largest).to(dtype)
    return torch.where(scale == 0, 1, scale)


def _encode_fp8_block(w: Tensor):
    E, rows, cols = w.shape
    row_blocks, col_blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = w.new_zeros(E, row_blocks * BLOCK, col_blocks * BLOCK)
    padded[:, :rows, :cols] = w
    blocks = padded.view(E, row_blocks, BLOCK, col_blocks, BLOCK)
    scale = _scale(blocks.abs().amax((2, 4)), 448, torch.float32)
    scaled = (blocks / scale[:, :, None, :, None]).view_as(padded)[:, :rows, :cols]
    return scaled.clamp(-448, 448).to(E4M3), scale, None


def _encode_int4(w: Tensor, group_size: int, symmetric: bool, scale_dtype: torch.dtype):
    blocks = w.unflatten(-1, (-1, group_size))
    if symmetric:
        scale, zero = _scale(blocks.abs().amax(-1), 7, scale_dtype), None
        codes = blocks / scale.unsqueeze(-1).float()
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = _scale(high - low, 15, scale_dtype)
        zero = ((-low / scale.float()).round() - 8).clamp(-8, 7).nan_to_num().to(torch.int8)
        codes = (blocks / scale.unsqueeze(-1).float()) + zero.unsqueeze(-1)
    codes = codes.round().clamp(-8, 7).nan_to_num() + INT4_OFFSET
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scale, zero


def _encode_mxfp4(w: Tensor):
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
    down, up = (torch.bucketize(magnitude, middles, out_int32=True, right=right) for right in (False, True))
    codes = torch.where(down % 2 == 0, down, up) | (scaled.signbit().int() << 3)
    return pack_nibbles(codes.to(torch.uint8).flatten(-2)), scale, None


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits, two per byte, the even column in the lower half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_rows(words: Tensor, rows: int) -> Tensor:
    """Codes of 4 bits in int32 (E, ceil(rows / 8), n), eight rows per word, the first in the lowest bits, as
    uint8 (E, rows, n)."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32).view(8, 1)
    return ((words.unsqueeze(2) >> shifts) & 15).flatten(1, 2)[:, :rows].to(torch.uint8)


def pack_rows(codes: Tensor) -> Tensor:
    """The inverse of unpack_rows, of rows that are a multiple of 8."""
    E, rows, n = codes.shape
    packed = pack_nibbles(codes.unflatten(1, (-1, 8)).movedim(2, -1))
    return packed.flatten().view(torch.int32).view(E, rows // 8, n)


def unpack_zeros(words: Tensor, rows: int) -> Tensor:
    """Zero points that a checkpoint packs, which are of codes from 0 to 15, as those of codes from -8 to 7:
    int32 (E, ceil(rows / 8), n) -> int8 (E, rows, n)."""
    return unpack_rows(words, rows).to(torch.int8) - INT4_OFFSET


def pack_zeros(zero: Tensor) -> Tensor:
    """The inverse of unpack_zeros. The last word is filled up with 0."""
    codes = (zero + INT4_OFFSET).to(torch.uint8)
    return pack_rows(torch.nn.functional.pad(codes, (0, 0, 0, -codes.size(1) % 8)))
