"""TileSchedulers a grouped product's schedule: which SM works on which expert's tile when.

    python -m fused_moe.schedule --shape 16384,64,6,2048,1408 --routing zipf:1.2 -o schedule.png

The items, their order and who takes which are the kernels' own: csrc/schedule.h, asked through
fused_moe._host. The times are a model's, with the constants below. An item lasts as long as its product, or
as reading what L2 does not hold if this takes longer, and then an epilogue; SMs that read at one time share
the memory. So much is enough to see what the decisions are for: interleaved, an expert with few rows reads
its weight while others multiply; grouped, items that run together share operands.

Sources: the prefix over busy experts and their interleaving are those of Li et al., "Static Batching of
Irregular Workloads on GPUs", 2025; persistent num_ctas and the grouped order those of PyTorch's
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

from . import _host

# The kernels' own, members of FusedMoeSchedule: schedule_for in csrc/kernels/hopper/plan.cu.
SCHEDULE = {"tile_rows": 128, "skinny_rows": 64, "group": 16, "interleave": True, "split_last_wave": 0}
ORDERS = {"linear": 1, "grouped": SCHEDULE["group"], "column": 2**31 - 1}  # groups of so many row tiles
TILE_COLUMNS = 256  # columns of a product that a tile computes; of up_gate 128 of gate and 128 of up
ROWS_OF_SWAPPED = (8, 32, 64)  # an expert's few rows, with swapped operands, take the first that has room
NUMBER = 2  # bytes of a 16-bit operand
# Of an H200 with 132 SMs.
ARITHMETIC = 5.7e6  # FLOP/us of one SM: 750 TFLOP/s of all
MEMORY = 4.2e6  # bytes/us of all SMs together
MEMORY_OF_SM = 0.15e6  # bytes/us of one SM: 192 KiB on their way for 1.3 us
L2_SIZE = 50e6  # bytes
EPILOGUE = 2.0  # us a tile

SHAPES = Path(__file__).parents[1] / "benchmarks" / "shapes.json"  # there in a checkout


class Sizes(NamedTuple):
    """T tokens, E experts, K experts per token, D model width, F expert hidden width."""

    num_tokens: int
    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int


class Item(NamedTuple):
    """A work item: one row tile times one tile of columns."""

    expert: int
    first_row: int
    num_rows: int
    column: int
    half: int  # 0: all of the tile's columns; 1, 2: the left ones, the right ones
    few: bool  # of an expert with few rows


class Run(NamedTuple):
    """An item, and when it ran where."""

    item: Item
    sm: int
    start: float  # us
    end: float  # us
    bytes_read: int  # from memory; the other operands were in L2


# --- the model ----------------------------------------------------------------------------------------


def items_of(counts: list[int], num_columns: int, **changes) -> list[Item]:
    """The items of experts with `counts` rows times `num_columns` tiles of columns, in their order.

    changes: of SCHEDULE.
    """
    ends, how = list(accumulate(counts)), SCHEDULE | changes
    work = _host.plan_work(ends, **how)
    num_items = _host.num_items(work, num_columns, how["split_last_wave"])
    return [Item(*_host.find_work_tile(work, ends, num_columns, i, **how)) for i in range(num_items)]


def operands(item: Item, depth: int) -> dict[tuple, int]:
    """Bytes of the rows and of the tile of weight that an item reads, by a name; depth: the sum's length."""
    rows, size = ("rows", item.first_row), TILE_COLUMNS // 2 * depth * NUMBER
    halves = (item.half,) if item.half else (1, 2)
    weight = {("weight", item.expert, item.column, half): size for half in halves}
    return {rows: item.num_rows * depth * NUMBER, **weight}


def bring(needed: dict[tuple, int], l2: OrderedDict) -> int:
    """Bytes of the operands that come from memory. L2 drops what was not used for the longest time."""
    missed = sum(size for name, size in needed.items() if name not in l2)
    for name, size in needed.items():
        l2[name] = size
        l2.move_to_end(name)
    while sum(l2.values()) > L2_SIZE:
        l2.popitem(last=False)
    return missed


def multiplied_rows(item: Item, tile_rows: int = SCHEDULE["tile_rows"]) -> int:
    """An item's rows with those that fill the tile, or with swapped operands the tensor cores' shape."""
    return next((n for n in ROWS_OF_SWAPPED if item.few and item.num_rows <= n), tile_rows)


def simulate(
    items: list[Item], depth: int, num_sms: int = 132, tile_rows: int = SCHEDULE["tile_rows"]
) -> list[Run]:
    """The items' runs on the SMs, in the items' order.

    depth is the length of the product's sums: D for up_gate, F for down. SMs that read get equal shares of
    the memory, so `progress`, the bytes read by one that reads all the time, tells when each is through.
    """
    if not 1 <= num_sms <= _host.MAX_CTAS:
        raise ValueError(f"sms: expected 1 to {_host.MAX_CTAS}, found {num_sms}")
    l2, runs, draws = OrderedDict(), {}, _host.TileSchedulers(len(items), num_sms)
    now = progress = 0.0
    free = [(now, sm) for sm in range(num_sms)]
    reading: list[tuple] = []
    while free or reading:
        rate = min(MEMORY_OF_SM, MEMORY / max(len(reading), 1))
        all_read = now + (reading[0][0] - progress) / rate if reading else float("inf")
        if free and free[0][0] < all_read:
            then, sm = heappop(free)
            progress += rate * (then - now)
            now, number = then, draws.next(sm)
            if number is not None:
                missed = bring(operands(items[number], depth), l2)
                heappush(reading, (progress + missed, number, sm, now, missed))
        else:
            progress, number, sm, start, missed = heappop(reading)
            now = all_read
            columns = TILE_COLUMNS // 2 if items[number].half else TILE_COLUMNS
            product = 2 * multiplied_rows(items[number], tile_rows) * columns * depth / ARITHMETIC
            end = max(now, start + product) + EPILOGUE
            runs[number] = Run(items[number], sm, start, end, missed)
            heappush(free, (end, sm))
    return [runs[number] for number in range(len(items))]


# --- shapes and routing -------------------------------------------------------------------------------


def layer_sizes(shape: str) -> Sizes:
    """T,E,K,D,F, or in a checkout a name of benchmarks/shapes.json."""
    named = json.loads(SHAPES.read_text())["layers"] if SHAPES.exists() else {}
    if shape in named:
        return Sizes(**named[shape])
    try:
        sizes = Sizes(*map(int, shape.split(",")))
    except (TypeError, ValueError):
        sizes = None
    if not sizes or min(sizes) < 1 or sizes.top_k > sizes.num_experts:
        names = f", or one of {', '.join(named)}" if named else ""
        raise SystemExit(f"--shape: expected T,E,K,D,F from 1 up with K <= E{names}; found {shape}")
    return sizes


def rows_of_experts(routing: str, sizes: Sizes, seed: int = 0) -> list[int]:
    """Rows of each expert.

    random: every expert is as likely. balanced: all counts are equal, up to one. zipf:S: the chance to be
    drawn falls as rank ** -S. worst: the same K experts take every token.
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
    gumbel = -torch.empty(T, E).exponential_(generator=generator).log()  # K draws by weight
    logits = gumbel - exponent * torch.arange(1, E + 1).log()
    return logits.topk(K).indices.flatten().bincount(minlength=E).tolist()


# --- the picture --------------------------------------------------------------------------------------


def draw(runs: list[Run], depth: int, num_sms: int, title: str, path: Path) -> None:
    """Writes the picture: SMs over time on the left, the first wave's order on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    timeline, order = figure.subplots(1, 2, width_ratios=(3.2, 1))
    draw_timeline(timeline, runs, num_sms)
    draw_order(order, runs, depth, num_sms)
    time = max(run.end for run in runs)
    busy = sum(run.end - run.start for run in runs) / (time * num_sms)
    read = sum(run.bytes_read for run in runs) / 1e9
    facts = f"{len(runs)} tiles in {time:.0f} \N{MICRO SIGN}s, SMs busy {busy:.1%}, {read:.2f} GB from memory"
    figure.suptitle(f"{title}\n{facts}", fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def draw_timeline(axes, runs: list[Run], num_sms: int) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    shades = colormaps["tab20"].colors
    palette = [c for i, c in enumerate(shades[0::2] + shades[1::2]) if i % 10 != 7]  # 7: grey
    colour = {run.item.expert: palette[run.item.expert % len(palette)] for run in runs}
    outlined = {"edgecolor": "black", "hatch": "/////"}
    for few, style in (False, {"edgecolor": "white"}), (True, outlined):
        mine = [run for run in runs if run.item.few == few]
        spans = [(run.start, run.end, run.sm - 0.5, run.sm + 0.5) for run in mine]
        boxes = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in spans]
        faces = [colour[run.item.expert] for run in mine]
        width = min(0.4, 4000 / len(runs))
        axes.add_collection(PolyCollection(boxes, facecolor=faces, linewidth=width, **style))
    axes.set(xlim=(0, max(run.end for run in runs)), xlabel="time (\N{MICRO SIGN}s)")
    axes.set(ylim=(num_sms - 0.5, -0.5), ylabel="SM")
    axes.set_title("Who works on what when: a bar is one tile", fontsize=12)

    rows = dict.fromkeys(colour, 0)
    for expert, _, num_rows in {run.item[:3] for run in runs}:
        rows[expert] += num_rows
    largest = sorted(rows, key=rows.get, reverse=True)[:8]
    legend = [Patch(color=colour[e], label=f"expert {e}: {rows[e]} rows") for e in largest]
    if others := len(rows) - len(largest):
        least = f"{others} more, down to {min(rows.values())} rows;\ncolours repeat"
        legend.append(Patch(facecolor="none", label=least))
    if any(run.item.few for run in runs):
        legend.append(Patch(facecolor="white", label="of an expert with few rows", **outlined))
    legend.append(Patch(facecolor="white", edgecolor="0.8", label="idle"))
    axes.figure.legend(handles=legend, ncols=6, loc="outside lower center", frameon=False)


def draw_order(axes, runs: list[Run], depth: int, num_sms: int) -> None:
    wave = runs[:num_sms]
    tiles = sorted({(run.item.few, run.item.first_row, run.item.expert) for run in wave})
    place = {first_row: i for i, (_, first_row, _) in enumerate(tiles)}
    num_columns = 1 + max(run.item.column for run in runs)
    drawn = [[float("nan")] * num_columns for _ in tiles]
    read: dict[tuple, int] = {}
    for number, run in enumerate(wave):
        column, row = run.item.column, place[run.item.first_row]
        drawn[row][column] = number
        read |= operands(run.item, depth)
        if len(tiles) <= 40 and num_columns <= 12:
            shade = "white" if number < 0.7 * len(wave) else "black"
            axes.annotate(number, (column, row), ha="center", va="center", fontsize=8, color=shade)
    image = axes.imshow(drawn, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="number")
    ticks: list[int] = []
    for i, (_, _, expert) in enumerate(tiles):  # an expert's first row tile, where there is room
        if not ticks or (tiles[i - 1][2] != expert and i - ticks[-1] >= len(tiles) / 40):
            ticks.append(i)
    axes.set_yticks(ticks, [f"expert {tiles[i][2]}" for i in ticks], fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="tile of columns", ylabel="row tile", facecolor="0.9")
    weights = sum(name[0] == "weight" for name in read)
    sums = f"{len(read) - weights} row tiles, {weights} tiles of weight: {sum(read.values()) / 1e6:.0f} MB"
    axes.set_title(f"The first {len(wave)} items share\n{sums}", fontsize=12)


# --- command line -------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog="python -m fused_moe.schedule", description=__doc__.splitlines()[0])
    add = flags.add_argument
    add("--shape", required=True, help="T,E,K,D,F, or in a checkout a name of benchmarks/shapes.json")
    add("--routing", default="random", help="random, balanced, worst or zipf:EXPONENT")
    add("--product", choices=("up_gate", "down"), default="up_gate")
    add("--order", choices=ORDERS, default="grouped", help="of an expert's tiles")
    add("--group", type=int, help="row tiles of a group, at most; default: as the order has it")
    add("--no-interleave", dest="interleave", action="store_false", help="experts with few rows come last")
    add("--tile-rows", type=int)
    add("--few-rows", type=int, help="an expert with so many rows, or fewer, has few")
    add("--sms", type=int, default=132, help="num_ctas")
    add("--seed", type=int, default=0, help="of the routing")
    add("-o", "--output", type=Path, default=Path("schedule.png"))
    flags.set_defaults(**SCHEDULE | {"group": None})
    options = flags.parse_args(argv)
    if options.group is None:
        options.group = ORDERS[options.order]
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    sizes = layer_sizes(options.shape)
    counts = rows_of_experts(options.routing, sizes, options.seed)
    up = options.product == "up_gate"
    depth, width = (sizes.dim, 2 * sizes.hidden_dim) if up else (sizes.hidden_dim, sizes.dim)
    how = {name: getattr(options, name) for name in SCHEDULE}
    if not up and (width - 1) % TILE_COLUMNS >= TILE_COLUMNS // 2:  # as in csrc/kernels/hopper/grouped_mm.cu
        how["split_last_wave"] = max(options.sms, 0)
    try:
        items = items_of(counts, -(-width // TILE_COLUMNS), **how)
        runs = simulate(items, depth, options.sms, options.tile_rows)
    except ValueError as error:
        raise SystemExit(error) from None
    spread = "interleaved" if options.interleave else "few rows last"
    title = f"{options.shape} {options.product}, {options.routing} routing: {options.order} order, {spread}"
    try:
        draw(runs, depth, options.sms, title, options.output)
    except ImportError as error:
        raise SystemExit(f"{error}: the picture needs matplotlib, as in fused_moe[bench]") from None
    print(options.output)


if __name__ == "__main__":
    main()
