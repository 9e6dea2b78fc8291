"""Tiles: a quantised weight in the order in which Hopper's kernels read it, so that TMA can load it.

A weight (E, out, in) whose sides are multiples of 64 is cut into tiles of 64 x 64, each contiguous:

    data         (E, out / 64, in / 64, B), B = 4096 bytes for codes of 8 bits, 2048 for codes of 4 bits
    scale, zero  (E, out / 64, c, S), c being the number of scales along a row

**Codes.** In a tile, row i = 16 w + 8 h + g and column j = 16 s + 8 u + 2 t + v: as in wgmma's register
operand, lane 4 g + t of warp w holds, for every k = 16 s, two rows (h) of two pairs (u) of columns (v). Code
(i, j) is, with lane = 4 g + t,

    8 bits: byte 2048 h + 512 w + 16 lane + 4 s + 2 u + v
    4 bits: nibble 2 (s % 2) + u + 4 v of the little-endian word of 32 bits at byte
            1024 h + 256 w + 8 lane + 4 (s // 2), nibble n being bits 4 n to 4 n + 3

of e2m1 codes nibble n of each half of the word in other bits: a sign in bit SIGNS[n], the others from bit
MAGNITUDES[n] on. That takes a kernel fewer shifts. So in a tile a lane's codes of a row are 16 or 8
contiguous bytes, and a warp's are 512 or 256. csrc/quantized_tile.h reads them.

**Scales and zero points.** One per row, or per group of a row: S = 64, the scales of a tile's rows. One per
matrix, or per block of 128 x 128: S = 4 equal copies, since 16 bytes are the least that TMA loads. Scales of
8-bit codes are float32 here; those of 4-bit codes, and zero points, keep their dtype. No value changes.

**The second packing** is of the transposed weight, for the gradient of the rows. It is made on request,
beside the tiles:

    data_t           (E, in / 64, out / 64, B): the tiles of the transposed codes, laid out as above
    scale_t, zero_t  (E, in / 64, c, 4): the tiles of the transposed scales, where a matrix or block has one;
                     (E, c, out / 64, 64), where a row has one or c, one per group

In a tile of data_t the weight's rows are the columns j = 16 s + 8 u + 2 t + v, and each lane has those of
one t. So the 64 scales of rows are sorted by lanes: that of row j is at 16 t + 4 s + 2 u + v. Dtypes are
those of `scale` and `zero` above.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from ..ops import HAS_CUDA_KERNELS, TILE
from . import formats
from .formats import BLOCK, FORMATS

COPIES = 4  # of a scale that all rows of a tile have in common
ROWS = (4, 2, 8)  # w, h, g
MAGNITUDES, SIGNS = (6, 9, 3, 0), (15, 13, 12, 14)  # of e2m1 codes in a halfword
# By codes per byte, how 64 columns are split: s, u, t, v; or s // 2, s % 2, u, t, since a byte has both v.
COLUMNS = {1: (4, 2, 4, 2), 2: (2, 2, 2, 4)}
# How tiles order the dimensions E, out / 64, w, h, g, in / 64, *COLUMNS:
# E, out / 64, in / 64, h, w, g, t, s, u, v; or .., t, s // 2, v, s % 2, since a byte has both u.
ORDER = {1: (0, 1, 5, 3, 2, 4, 8, 6, 7, 9), 2: (0, 1, 5, 3, 2, 4, 9, 6, 8, 7)}


def are_wanted(
    device: torch.device,
    shape: tuple[int, ...],
    format: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
) -> bool:
    """Whether a weight (E, out, in) of this dtype on this device is kept in tiles."""
    return fit(shape) and have_kernels(format, dtype, scale_dtype) and are_read_on(device)


def have_kernels(format: str, dtype: torch.dtype, scale_dtype: torch.dtype) -> bool:
    """Whether kernels multiply rows of a weight's dtype by its tiles: bf16 rows by every format's, fp16 rows
    by int4's with scales of fp16. A weight of another dtype is taken to meet rows of bf16, under autocast.
    (has_dequantizer in csrc/kernels/sm90/quantized_launch.cuh)"""
    return dtype != torch.float16 or (FORMATS[format].code == "int4" and scale_dtype == dtype)


def fit(shape: tuple[int, ...]) -> bool:
    return shape[1] % TILE == 0 and shape[2] % TILE == 0


def are_read_on(device: torch.device) -> bool:
    """Whether kernels for tiles run there: on GPUs of compute capability 9.x, unless FUSED_MOE_TIER asks for
    the sm80 tier's, which read the published layout. (The rule of a call is device_reason's, in
    csrc/kernels/device.cu.)"""
    if os.environ.get("FUSED_MOE_TIER") == "portable":
        return False
    if device.type != "cuda" or not HAS_CUDA_KERNELS or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


# --- parameters -------------------------------------------------------------------------------------------


def parameter_shape(tiles: tuple[int, ...], published: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter that is tiles: flattened to (E, n) if a tensor of the published shape, of all
    experts or of one, could be broadcast into them. So a write by mistake, by `parameter.copy_`, raises."""
    for source, target in ((published, tiles), (published[1:], tiles[1:])):
        pairs = zip(reversed(source), reversed(target), strict=False)
        if len(source) <= len(target) and all(size in (1, other) for size, other in pairs):
            return tiles[0], math.prod(tiles[1:])
    return tuple(tiles)


def data_shape(format: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tiles of codes of a weight (E, out, in)."""
    E, rows, cols = shape
    return E, rows // TILE, cols // TILE, TILE * TILE // FORMATS[format].per_byte


def scale_shape(format: str, rows: int, scale: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tiles of scales of a published shape, of a weight with `rows` rows."""
    E, row_blocks, num_scales = scale
    by_row = FORMATS[format].groups or row_blocks == rows
    return E, rows // TILE, num_scales, TILE if by_row else COPIES


def scale_parameter(format: str, rows: int, scale: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the parameter that scales or zero points of a weight with `rows` rows become."""
    shape = parameter_shape(scale_shape(format, rows, scale.shape), scale.shape)
    return shape, scale.dtype if FORMATS[format].per_byte == 2 else torch.float32


def data_of(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tiles of codes of a weight (E, out, in)."""
    if parameter.dim() == 4:
        return parameter
    return parameter.unflatten(1, (shape[1] // TILE, shape[2] // TILE, -1))


def scale_of(format: str, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tiles of scales or zero points of a weight (E, out, in)."""
    if parameter.dim() == 4:
        return parameter
    row_tiles = shape[1] // TILE
    if FORMATS[format].block == "square_128":
        return parameter.unflatten(1, (row_tiles, -1, COPIES))
    if FORMATS[format].groups:
        return parameter.unflatten(1, (row_tiles, -1, TILE))
    return parameter.unflatten(1, (row_tiles, 1, -1))


# --- codes ------------------------------------------------------------------------------------------------


def tiled_data(format: str, data: Tensor, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """The tiles (E, out / 64, in / 64, B) of codes as QuantizedWeight takes them, in data's dtype; written to
    `out` if that is given. Some experts at a time, as on the way back: temporaries stay small."""
    E, rows, cols = shape
    per_byte = FORMATS[format].per_byte
    if out is None:
        out = data.new_empty(data_shape(format, shape))
    source, target = data.contiguous().view(torch.uint8), out.view(torch.uint8)
    for part in formats.parts(shape):
        split = source[part].unflatten(2, (-1, *COLUMNS[per_byte])).unflatten(1, (-1, *ROWS))
        split = split if per_byte == 1 else _transposed_nibbles(split)
        tiles = split.permute(ORDER[per_byte]).flatten(3)
        target[part] = _spread(tiles) if FORMATS[format].code == "e2m1" else tiles
    return out


def transposed_data(format: str, data: Tensor, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """The tiles (E, in / 64, out / 64, B) of the transposed weight's codes; data and `out` are as in
    `tiled_data`."""
    E, rows, cols = shape
    is_packed = FORMATS[format].per_byte == 2
    if out is None:
        out = data.new_empty(data_shape(format, (E, cols, rows)))
    for part in formats.parts(shape):
        codes = data[part].view(torch.uint8)
        codes = formats.pack_nibbles(formats.nibbles(codes).mT) if is_packed else codes.mT
        tiled_data(format, codes, (codes.size(0), cols, rows), out[part])
    return out


def published_data(format: str, tiles: Tensor) -> Tensor:
    """The inverse of `tiled_data`."""
    per_byte = FORMATS[format].per_byte
    E, row_tiles, col_tiles, tile_bytes = tiles.shape
    out = tiles.new_empty(E, TILE * row_tiles, col_tiles * tile_bytes // TILE)
    source, target = tiles.view(torch.uint8), out.view(torch.uint8)
    order = ORDER[per_byte]
    split_shape = row_tiles, *ROWS, col_tiles, *COLUMNS[per_byte]
    tile_shape = [split_shape[d - 1] for d in order[3:]]
    for part in formats.parts(tuple(out.shape)):
        found = _gathered(source[part]) if FORMATS[format].code == "e2m1" else source[part]
        split = found.unflatten(3, tile_shape).permute([order.index(d) for d in range(len(order))])
        split = split if per_byte == 1 else _transposed_nibbles(split)
        target[part] = split.flatten(5).flatten(1, 4)
    return out


def _transposed_nibbles(split: Tensor) -> Tensor:
    """Bytes for each u, of both v, as bytes for each v, of both u; and back. u, or v, is dimension 8."""
    first, second = split.unbind(8)
    return torch.stack(((first & 15) | (second << 4), (first >> 4) | (second & 240)), 8)


def _spread(nibbles: Tensor) -> Tensor:
    """Bytes of e2m1 codes, with the bits of each halfword where MAGNITUDES and SIGNS say."""
    halves = nibbles.view(torch.int16).int()
    found = torch.zeros_like(halves)
    for n in range(4):
        code = halves >> 4 * n & 15
        found |= (code & 7) << MAGNITUDES[n] | code >> 3 << SIGNS[n]
    return found.short().view(torch.uint8)


def _gathered(tiles: Tensor) -> Tensor:
    """The inverse of `_spread`."""
    halves = tiles.view(torch.int16).int()
    found = torch.zeros_like(halves)
    for n in range(4):
        found |= (halves >> MAGNITUDES[n] & 7 | (halves >> SIGNS[n] & 1) << 3) << 4 * n
    return found.short().view(torch.uint8)


# --- scales and zero points -------------------------------------------------------------------------------


def tiled_scale(format: str, scale: Tensor, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """The tiles (E, out / 64, c, S) of scales or zero points as QuantizedWeight takes them; written to `out`
    if that is given."""
    rows = shape[1]
    row_tiles = rows // TILE
    if FORMATS[format].groups or scale.size(1) == rows:
        tiles = scale.unflatten(1, (row_tiles, TILE)).mT
    else:
        tiles = scale.repeat_interleave(_tiles_per_scale(format, row_tiles), 1)[:, :row_tiles]
        tiles = tiles.unsqueeze(-1).expand(-1, -1, -1, COPIES)
    return _stored(format, tiles, out)


def transposed_scale(format: str, scale: Tensor, shape: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """The scales or zero points of the second packing; scale and `out` are as in `tiled_scale`."""
    E, rows, cols = shape
    if not (FORMATS[format].groups or scale.size(1) == rows):
        return tiled_scale(format, scale.mT, (E, cols, rows), out)
    # E, c, out / 64, s, u, t, v
    lanes = scale.mT.unflatten(2, (rows // TILE, *COLUMNS[1])).permute(0, 1, 2, 5, 3, 4, 6).flatten(3)
    return _stored(format, lanes, out)


def _stored(format: str, scale: Tensor, out: Tensor | None) -> Tensor:
    """Arranged scales or zero points, contiguous and in the dtype that tiles have."""
    scale = scale.contiguous() if FORMATS[format].per_byte == 2 else scale.float().contiguous()
    return scale if out is None else out.copy_(scale)


def published_scale(format: str, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `tiled_scale`, in the dtype that the scales or zero points had."""
    if tiles.size(3) == TILE:
        scale = tiles.mT.flatten(1, 2)
    else:
        scale = tiles[:, :: _tiles_per_scale(format, tiles.size(1)), :, 0]
    return scale.to(dtype).clone(memory_format=torch.contiguous_format)  # strides, too, that are contiguous


def _tiles_per_scale(format: str, row_tiles: int) -> int:
    """How many tiles along out have one scale."""
    return BLOCK // TILE if FORMATS[format].block == "square_128" else row_tiles
