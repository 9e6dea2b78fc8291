"""The least time of a layer's kernels: the MMAs of a GEMM's tiles, or the bytes that a kernel moves.

A GEMM's floor is the larger of two times: the FLOPs of its tiles as they are scheduled, at the rate of the
dense GEMM in the same run, and its bytes, each operand read once and each result written once, at the rate of
a large copy. A gather reads tokens once if they fit the L2 cache, else once for each of their experts, since
experts come one after the other. Other kernels have bytes alone. Where experts have few rows, whole tiles and
weights are most of the time, and the dense GEMM of equal FLOPs is no measure.

Tiles are those of the sm90 tier: 128 rows of one expert by 256 columns, and 128 bytes of k. An expert of at
most 64 rows has its weight in wgmma's M instead, and in grouped_mm and up_gate only the columns that its rows
need.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import common
import torch
from common import MIB, Settings, Sizes

TILE_ROWS, TILE_COLUMNS, TILE_K = 128, 256, 64  # k of 16-bit elements
SKINNY_ROWS = (8, 32, 64)  # wgmma's N for the rows of a skinny expert: the first that holds them
DENSE, COPY = "dense", "copy"  # what a floor is made of


class Gemm(NamedTuple):
    """The work of one GEMM."""

    flops: int  # of its tiles
    elements: int  # read or written


class Floor(NamedTuple):
    us: float
    bound: str


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def tile_rows(counts: list[int], *, swaps: bool) -> int:
    """Rows that the MMAs compute. swaps: skinny experts swap operands."""
    total = 0
    for rows in filter(None, counts):
        skinny = next((n for n in SKINNY_ROWS if swaps and rows <= n), 0)
        total += skinny or up_to(rows, TILE_ROWS)
    return total


def tile_columns(columns: int, *, halves: bool) -> int:
    """halves: a last tile of at most half of the columns is half a tile."""
    return up_to(columns, TILE_COLUMNS // (1 + halves))


def gemms(
    sizes: Sizes,
    settings: Settings,
    counts: list[int],
    cached: int,
    *,
    backward: bool,
    tile_k: int = TILE_K,
) -> dict[str, Gemm]:
    """The GEMMs of a layer whose experts have `counts` rows. cached: elements that the L2 cache holds.
    backward: of a training step. tile_k: of operands that have not 16 bits."""
    T, E, _, D, F = sizes
    R, parts = sum(counts), settings.matrices - 1
    h, a, w = parts * F, F, D * F  # columns of rows, elements of an expert
    x = (T if T * D <= cached else R) * D  # gathered
    read = sum(rows > 0 for rows in counts)  # experts
    swapped, plain = (tile_rows(counts, swaps=swaps) for swaps in (True, False))
    hidden = parts * up_to(F, TILE_COLUMNS // parts)  # columns of up_gate's tiles
    deep, narrow = up_to(D, tile_k), up_to(F, tile_k)
    found = {
        "up_gate": Gemm(2 * swapped * hidden * deep, x + read * parts * w + R * (a + backward * h)),
        "down": Gemm(2 * swapped * tile_columns(D, halves=True) * narrow, R * a + read * w + R * D),
    }
    if not backward:
        return found
    sums = sum(up_to(rows, TILE_K) for rows in counts)  # k of the weight gradients
    columns = up_to(D, TILE_ROWS)
    return found | {
        "down_dgrad": Gemm(2 * plain * tile_columns(F, halves=True) * deep, x + read * w + R * (2 * h + a)),
        "wgrad_down": Gemm(2 * sums * up_to(F, TILE_COLUMNS) * columns, R * a + x + E * w),
        "up_dgrad": Gemm(
            2 * swapped * tile_columns(D, halves=True) * parts * narrow, R * h + read * parts * w + R * D
        ),
        "wgrad_up": Gemm(2 * sums * up_to(h, TILE_COLUMNS) * columns, R * h + x + E * parts * w),
    }


def bytes_moved(sizes: Sizes, element_size: int, *, backward: bool = True) -> dict[str, int]:
    """Bytes of the kernels that do no arithmetic to speak of. backward: those of a training step, each kind's
    launches together."""
    T, E, K, D, _ = sizes
    R = T * K
    gather_sum, logits, slots = (R + T) * D * element_size, T * E * element_size, 4 * R
    found = {
        "unpermute": gather_sum,
        "router GEMMs": T * D * element_size,  # x
        "route": logits + 2 * slots,  # scores, ids
        "schedule": 4 * slots,  # ids, three row maps
    }
    if not backward:
        return found
    return found | {
        "router GEMMs": 4 * T * D * element_size,  # x, x again, and dx read and written
        "unpermute_dx": gather_sum,
        "route_backward": 2 * logits + 2 * slots,
        "dscores": 2 * slots,
    }


def layer_us(
    sizes: Sizes,
    settings: Settings,
    counts: list[int],
    cached: int,
    element_size: int,
    flops_per_us: float,
    bytes_per_us: float,
    *,
    backward: bool,
) -> float:
    """A layer's floor, forward or a training step: the sum over its kernels."""
    every = gemms(sizes, settings, counts, cached, backward=backward).values()
    us = sum(max(g.flops / flops_per_us, g.elements * element_size / bytes_per_us) for g in every)
    return us + sum(bytes_moved(sizes, element_size, backward=backward).values()) / bytes_per_us


def experts_us(
    sizes: Sizes,
    settings: Settings,
    counts: list[int],
    cached: int,
    element_sizes: tuple[int, int],
    flops_per_us: float,
    bytes_per_us: float,
) -> float:
    """The floor of a layer's experts alone, forward. element_sizes: bytes of an element that GEMMs multiply,
    and of one of x and the output. Where those differ x is read, and its codes are written, before."""
    (T, _, _, D, _), (operand, element) = sizes, element_sizes
    tile_k = TILE_K * 2 // operand
    up, down = gemms(sizes, settings, counts, cached, backward=False, tile_k=tile_k).values()
    y = sum(counts) * D * (element - operand)  # bytes beyond an operand's
    us = max(up.flops / flops_per_us, up.elements * operand / bytes_per_us)
    us += max(down.flops / flops_per_us, (down.elements * operand + y) / bytes_per_us)
    moved = bytes_moved(sizes, element, backward=False)
    codes = T * D * (element + operand) if element != operand else 0
    return us + (moved["unpermute"] + moved["schedule"] + codes) / bytes_per_us


def large_copy(device: str) -> tuple[partial, int]:
    """A copy whose rate is the memory's, and the bytes that it moves."""
    source = torch.ones(1024 * MIB, dtype=torch.int8, device=device)
    return partial(torch.empty_like(source).copy_, source), 2 * source.nbytes


def cached_elements(x: torch.Tensor) -> int:
    """Elements like x's that the L2 cache of its GPU holds; on a CPU any number."""
    if not x.is_cuda:
        return 1 << 62
    return torch.cuda.get_device_properties(x.device).L2_cache_size // x.element_size()


def by_kind(
    sizes: Sizes,
    settings: Settings,
    counts: list[int],
    dense_gemms: list[list[torch.Tensor]],
    repeats: int,
) -> dict[str, Floor]:
    """The floor of each kind of kernel in a training step; a GEMM's rate is that of the dense GEMM of its own
    shape."""
    (x, w13), (a, w2) = dense_gemms
    h, y = x @ w13, a @ w2
    products = {
        "up_gate": (x, w13),
        "down": (a, w2),
        "down_dgrad": (y, w2.t()),
        "wgrad_down": (a.t(), y),
        "up_dgrad": (h, w13.t()),
        "wgrad_up": (x.t(), h),
    }
    copy, copied = large_copy(x.device.type)
    runs = {kind: partial(torch.mm, *pair) for kind, pair in products.items()} | {COPY: copy}
    seconds = common.times(common.clock(x.device.type, calls=3), runs, repeats)
    us_per_byte = seconds[COPY] / copied * 1e6
    found = {}
    for kind, gemm in gemms(sizes, settings, counts, cached_elements(x), backward=True).items():
        left, right = products[kind]
        us = seconds[kind] * 1e6 * gemm.flops / (2 * left.size(0) * left.size(1) * right.size(1))
        moved = gemm.elements * x.element_size() * us_per_byte
        found[kind] = Floor(us, DENSE) if us > moved else Floor(moved, COPY)
    sums = bytes_moved(sizes, x.element_size()) | {
        "permute": (sizes.num_tokens * (sizes.top_k + 1)) * sizes.dim * x.element_size(),
        "add": 3 * sizes.num_tokens * sizes.dim * x.element_size(),
    }
    return found | {kind: Floor(size * us_per_byte, COPY) for kind, size in sums.items()}
