"""Draws a grouped GEMM's schedule: which SM works on which expert's tile when.

    python tools/schedule.py --shape dsv2-lite --routing zipf:1.2 -o schedule.png

The work tiles, their order and the CTA that claims each come from the functions that the kernels run:
csrc/schedule.h, through the operators of csrc/torch/planners.cpp. The times are those of a model with the
constants below. A tile takes the longer of its MMAs and its reads that miss L2, and then an epilogue. SMs
that read at the same time share the memory's bandwidth. This is enough to show what the order is for: with
SMs of their own, or interleaved, skinny experts read their weights while full tiles multiply; grouped, tiles
in flight together share operands in L2.

Sources: the prefix over active experts and their interleaving are those of Li et al., "Static Batching of
Irregular Workloads on GPUs", 2025; the persistent grid and the grouped order those of PyTorch's
"Accelerating MoE's with a Triton Persistent Cache-Aware Grouped GEMM Kernel", 2025.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from fused_moe.ops import ops

# The order of the sm90 tier.
TILE_ROWS, GROUP, INTERLEAVE = ops.default_order()
TILE_N = 256  # columns of the output per N tile; of up_gate 128 of gate and 128 of up
ORDERS = {"linear": 1, "grouped": GROUP, "column": 2**31 - 1}  # row tiles of a group, at most
SWAP_AB_N = (8, 32, 64)  # the wgmma N of a skinny expert, swap-AB: the first that its rows fit
ELEMENT_SIZE = 2  # bytes of a 16-bit operand
# An H200 with 132 SMs.
FLOPS_PER_SM = 5.7e6  # per us: 750 TFLOP/s of all SMs
BANDWIDTH = 4.2e6  # bytes/us of all SMs together
BANDWIDTH_PER_SM = 0.15e6  # bytes/us: 192 KiB in flight for 1.3 us
L2_SIZE = 50e6  # bytes
EPILOGUE = 2.0  # us per tile

SHAPES = json.loads((Path(__file__).parents[1] / "benchmarks" / "shapes.json").read_text())["layers"]


class Sizes(NamedTuple):
    """T tokens, E experts, K experts per token, D model width, F expert hidden width."""

    num_tokens: int
    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int


class WorkTile(NamedTuple):
    """One row tile times one N tile: FusedMoeWorkTile of csrc/schedule.h."""

    expert: int
    first_row: int
    num_rows: int
    n_tile: int
    n_half: int  # 0: the whole N tile; 1, 2: its left, right half
    skinny: int  # 1: of a skinny expert


class Run(NamedTuple):
    """A work tile, the SM that it ran on, and when."""

    tile: WorkTile
    sm: int
    start: float  # us
    end: float  # us
    bytes_read: int  # from memory; other operands hit L2


# --- the model ----------------------------------------------------------------------------------------


def work_tiles(
    counts: list[int],
    num_n_tiles: int,
    *,
    tile_rows: int = TILE_ROWS,
    group: int = GROUP,
    interleave: bool = INTERLEAVE,
    split_last_wave: int = 0,
) -> list[WorkTile]:
    """The work tiles of experts with `counts` rows, in order. split_last_wave: the number of CTAs, or 0."""
    offs = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    schedule = ops.tile_schedule(offs, tile_rows, slice_rows=tile_rows)  # slices are for wgrad only
    tiles = ops.work_tiles(schedule, offs, num_n_tiles, group, interleave, split_last_wave)
    return [WorkTile(*tile) for tile in tiles.tolist()]


def skinny_sms(counts: list[int], num_n_tiles: int, num_sms: int = 132, tile_rows: int = TILE_ROWS) -> int:
    """The number of SMs that have the skinny experts' tiles to themselves; 0: these are interleaved."""
    offs = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
    schedule = ops.tile_schedule(offs, tile_rows, slice_rows=tile_rows)
    return ops.share_tiles(schedule, offs, num_n_tiles, num_sms)[1]


def operands(tile: WorkTile, depth: int) -> dict[tuple, int]:
    """Bytes of its rows and of its weight's N tile that a work tile reads; depth: the k extent."""
    rows, half_size = ("rows", tile.first_row), TILE_N // 2 * depth * ELEMENT_SIZE
    halves = (tile.n_half,) if tile.n_half else (1, 2)
    weight = {("weight", tile.expert, tile.n_tile, half): half_size for half in halves}
    return {rows: tile.num_rows * depth * ELEMENT_SIZE, **weight}


def read_through(l2: OrderedDict, needed: dict[tuple, int]) -> int:
    """Bytes of the operands that miss L2, which evicts the least recently used operand."""
    missed = sum(size for name, size in needed.items() if name not in l2)
    for name, size in needed.items():
        l2[name] = size
        l2.move_to_end(name)
    while sum(l2.values()) > L2_SIZE:
        l2.popitem(last=False)
    return missed


def mma_rows(tile: WorkTile, tile_rows: int = TILE_ROWS) -> int:
    """The rows that a work tile's MMAs compute: those of a full tile, or with swap-AB the wgmma N."""
    return next((n for n in SWAP_AB_N if tile.skinny and tile.num_rows <= n), tile_rows)


def simulate(
    tiles: list[WorkTile],
    depth: int,
    num_sms: int = 132,
    tile_rows: int = TILE_ROWS,
    skinny_sms: int = 0,
) -> list[Run]:
    """Runs the work tiles on SMs with one persistent CTA each; returns the runs in the tiles' order.

    depth is the GEMM's k extent: D for up_gate, F for down. The last skinny_sms SMs have the skinny tiles,
    which are then last; 0: all SMs have all tiles. SMs that read get equal shares of the bandwidth.
    `progress` counts the bytes that an SM would have read if it read all the time; a read ends when progress
    has grown by the read's bytes.
    """
    if num_sms < 1:
        raise ValueError(f"num_sms: expected at least 1, found {num_sms}")
    state = torch.zeros(3, num_sms, dtype=torch.int32)  # of the CTAs' tile schedulers
    shares = {"num_full": sum(not tile.skinny for tile in tiles), "skinny_ctas": skinny_sms}
    l2, runs = OrderedDict(), {}
    now = progress = 0.0
    free = [(now, sm) for sm in range(num_sms)]
    reading: list[tuple] = []
    while free or reading:
        rate = min(BANDWIDTH_PER_SM, BANDWIDTH / max(len(reading), 1))
        all_read = now + (reading[0][0] - progress) / rate if reading else float("inf")
        if free and free[0][0] < all_read:
            free_at, sm = heappop(free)
            progress += rate * (free_at - now)
            now, index = free_at, ops.next_tile(state, len(tiles), sm, **shares)
            if index < len(tiles):
                missed = read_through(l2, operands(tiles[index], depth))
                heappush(reading, (progress + missed, index, sm, now, missed))
        else:
            progress, index, sm, start, missed = heappop(reading)
            now = all_read
            columns = TILE_N // 2 if tiles[index].n_half else TILE_N
            mma_time = 2 * mma_rows(tiles[index], tile_rows) * columns * depth / FLOPS_PER_SM
            end = max(now, start + mma_time) + EPILOGUE
            runs[index] = Run(tiles[index], sm, start, end, missed)
            heappush(free, (end, sm))
    return [runs[index] for index in range(len(tiles))]


# --- shapes and routing -------------------------------------------------------------------------------


def layer_sizes(shape: str) -> Sizes:
    """shape: T,E,K,D,F, or a name of shapes.json."""
    if shape in SHAPES:
        return Sizes(*(SHAPES[shape][size] for size in Sizes._fields))
    try:
        sizes = Sizes(*map(int, shape.split(",")))
    except (TypeError, ValueError):
        sizes = None
    if not sizes or min(sizes) < 1 or sizes.top_k > sizes.num_experts:
        names = ", ".join(SHAPES)
        raise SystemExit(
            f"--shape: expected T,E,K,D,F from 1 up with K <= E, or one of {names}; found {shape}"
        )
    return sizes


def rows_of_experts(routing: str, sizes: Sizes, seed: int = 0) -> list[int]:
    """Rows of each expert.

    random: all experts have the same probability. balanced: counts differ by at most 1. zipf:S: probability
    falls as rank ** -S. worst: all tokens go to the same K experts.
    """
    T, E, K, *_ = sizes
    if routing == "balanced":
        return [T * K // E + (expert < T * K % E) for expert in range(E)]
    if routing == "worst":
        return [T * (expert < K) for expert in range(E)]
    name, _, exponent = routing.partition(":")
    try:
        exponent = {"random": 0.0}[routing] if name != "zipf" else float(exponent)
    except (KeyError, ValueError):
        expected = "random, balanced, worst or zipf:EXPONENT"
        raise SystemExit(f"--routing: expected {expected}, found {routing}") from None
    generator = torch.Generator().manual_seed(seed)
    gumbel = -torch.empty(T, E).exponential_(generator=generator).log()  # its top K are K weighted draws
    logits = gumbel - exponent * torch.arange(1, E + 1).log()
    return logits.topk(K).indices.flatten().bincount(minlength=E).tolist()


# --- the picture --------------------------------------------------------------------------------------


def caption(runs: list[Run], num_sms: int) -> str:
    """What the figures are, in one sentence."""
    time = max(run.end for run in runs)
    active = sum(run.end - run.start for run in runs) / (time * num_sms)
    read = sum(run.bytes_read for run in runs) / 1e9
    return (
        f"A model of an H200 runs {len(runs)} work tiles on {num_sms} SMs in {time:.0f} \N{MICRO SIGN}s, "
        f"with the SMs busy for {active:.1%} of the time, and reads {read:.2f} GB from memory."
    )


def draw(runs: list[Run], depth: int, num_sms: int, title: str):
    """The picture, a matplotlib Figure: SMs over time on the left, the first wave's order on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    timeline, order = figure.subplots(1, 2, width_ratios=(3, 1))
    legend = draw_timeline(timeline, runs, num_sms)
    draw_order(order, runs, depth, num_sms)
    figure.suptitle(title, fontsize=13)
    below = {"loc": "outside lower center", "title": caption(runs, num_sms)}
    figure.legend(handles=legend, ncols=5, frameon=False, **below)
    return figure


def draw_timeline(axes, runs: list[Run], num_sms: int) -> list:
    """Returns the legend's entries."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    shades = colormaps["tab20"].colors
    palette = [c for i, c in enumerate(shades[0::2] + shades[1::2]) if i % 10 != 7]  # 7: grey
    colour = {run.tile.expert: palette[run.tile.expert % len(palette)] for run in runs}
    outlined = {"edgecolor": "black", "hatch": "/////"}
    for skinny, style in (0, {"edgecolor": "white"}), (1, outlined):
        kind = [run for run in runs if run.tile.skinny == skinny]
        spans = [(run.start, run.end, run.sm - 0.5, run.sm + 0.5) for run in kind]
        bars = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in spans]
        faces = [colour[run.tile.expert] for run in kind]
        width = min(0.4, 4000 / len(runs))
        axes.add_collection(PolyCollection(bars, facecolor=faces, linewidth=width, **style))
    axes.set(xlim=(0, max(run.end for run in runs)), xlabel="time (\N{MICRO SIGN}s)")
    axes.set(ylim=(num_sms - 0.5, -0.5), ylabel="SM number")
    axes.set_title("One bar per work tile; the colour tells its expert", fontsize=11)

    rows = dict.fromkeys(colour, 0)
    for expert, _, num_rows in {run.tile[:3] for run in runs}:
        rows[expert] += num_rows
    largest = sorted(rows, key=rows.get, reverse=True)[:8]
    legend = [Patch(color=colour[e], label=f"expert {e}: {rows[e]} rows") for e in largest]
    if others := len(rows) - len(largest):
        least = f"{others} others: {min(rows.values())} rows or more"
        legend.append(Patch(facecolor="none", label=least))
    if any(run.tile.skinny for run in runs):
        legend.append(Patch(facecolor="white", label="of a skinny expert", **outlined))
    legend.append(Patch(facecolor="white", edgecolor="0.8", label="idle"))
    return legend


def draw_order(axes, runs: list[Run], depth: int, num_sms: int) -> None:
    wave = runs[:num_sms]
    row_tiles = sorted({(run.tile.skinny, run.tile.first_row, run.tile.expert) for run in wave})
    row_of = {first_row: i for i, (_, first_row, _) in enumerate(row_tiles)}
    num_n_tiles = 1 + max(run.tile.n_tile for run in runs)
    places = [[float("nan")] * num_n_tiles for _ in row_tiles]
    read: dict[tuple, int] = {}
    for place, run in enumerate(wave):
        places[row_of[run.tile.first_row]][run.tile.n_tile] = place
        read |= operands(run.tile, depth)
    image = axes.imshow(places, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="place in the order; grey: later")
    ticks: list[int] = []
    for i, (_, _, expert) in enumerate(row_tiles):  # labels an expert's first row tile, if it fits
        if not ticks or (row_tiles[i - 1][2] != expert and i - ticks[-1] >= len(row_tiles) / 30):
            ticks.append(i)
    axes.set_yticks(ticks, [row_tiles[i][2] for i in ticks], fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=f"N tile ({TILE_N} columns each)", ylabel="row tile; number: its expert", facecolor="0.9")
    # A weight's N tile counts as two halves.
    weights = sum(name[0] == "weight" for name in read)
    shared = f"{len(read) - weights} row tiles and {weights / 2:g} of weight"
    size = sum(read.values()) / 1e6
    axes.set_title(f"The first {len(wave)} work tiles share\n{shared}: {size:.0f} MB", fontsize=11)


# --- command line -------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog="python tools/schedule.py", description=__doc__.splitlines()[0])
    add = flags.add_argument
    names = ", ".join(SHAPES)
    add(
        "--shape",
        required=True,
        help=f"the layer: tokens T, experts E, top-k K, widths D and F, as T,E,K,D,F; or {names}",
    )
    add(
        "--routing",
        default="random",
        help="how the tokens choose: random (all experts alike), balanced (equal counts), worst (all tokens "
        "the same K experts) or zipf:S (expert i with a probability that falls as i ** -S); default: random",
    )
    add(
        "--gemm",
        choices=("up_gate", "down"),
        default="up_gate",
        help="of the forward pass: up_gate multiplies by w1 and w3, down by w2; default: up_gate",
    )
    add(
        "--order",
        choices=ORDERS,
        default="grouped",
        help="of an expert's tiles: row by row, in groups of row tiles as the kernels do, or column by "
        "column; default: grouped",
    )
    add("--group", type=int, help=f"row tiles of a group, at most; default: {GROUP} with --order grouped")
    add(
        "--no-interleave",
        dest="interleave",
        action="store_false",
        default=INTERLEAVE,
        help="skinny experts (few rows) come last, instead of beside the others",
    )
    add("--tile-rows", type=int, default=TILE_ROWS, help="rows of a full work tile; default: %(default)s")
    add(
        "--sms",
        type=int,
        default=132,
        help="SMs, with one persistent CTA each; default: %(default)s, an H200's",
    )
    add("--seed", type=int, default=0, help="of the routing's random numbers; default: %(default)s")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("schedule.png"),
        help="the picture's file; default: %(default)s",
    )
    options = flags.parse_args(argv)
    if options.group is None:
        options.group = ORDERS[options.order]
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    sizes = layer_sizes(options.shape)
    counts = rows_of_experts(options.routing, sizes, options.seed)
    up = options.gemm == "up_gate"
    depth, width = (sizes.dim, 2 * sizes.hidden_dim) if up else (sizes.hidden_dim, sizes.dim)
    # As csrc/kernels/sm90/grouped_mm.cu: no splitting if at least half of the last N tile is empty.
    split = not up and (width - 1) % TILE_N >= TILE_N // 2
    num_n_tiles, tile_rows = -(-width // TILE_N), options.tile_rows
    try:
        own = skinny_sms(counts, num_n_tiles, options.sms, tile_rows) if options.interleave else 0
        tiles = work_tiles(
            counts,
            num_n_tiles,
            tile_rows=tile_rows,
            group=options.group,
            interleave=options.interleave and not own,
            split_last_wave=options.sms if split and not own else 0,
        )
        runs = simulate(tiles, depth, options.sms, tile_rows, own)
    except (ValueError, RuntimeError) as error:  # the model or the planners reject a flag's value
        raise SystemExit(error) from None
    spread = f"skinny experts on {own} SMs" if own else "skinny experts interleaved"
    spread = spread if options.interleave else "skinny experts last"
    layer = ", ".join(f"{letter}={size}" for letter, size in zip("TEKDF", sizes, strict=True))
    named = f"{options.shape}: " if options.shape in SHAPES else ""
    title = (
        f"Schedule of the {options.gemm} GEMM of a layer ({named}{layer})\n"
        f"{options.routing} routing, {options.order} order, {spread}"
    )
    try:
        figure = draw(runs, depth, options.sms, title)
    except ImportError as error:
        raise SystemExit(f"the picture needs matplotlib: pip install matplotlib ({error})") from None
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=150)
    print(caption(runs, options.sms))
    print(options.output)


if __name__ == "__main__":
    main()
