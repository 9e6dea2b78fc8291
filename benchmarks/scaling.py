"""Computes a training step on 8 to 1,024 GPUs by the model of scaling_model.py, and compares it with runs.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --shape sonic-120b --nvlink 370 --infiniband 90  # another layer, other links
    python benchmarks/scaling.py --page docs/scaling.md --plot docs/scaling.svg   # renew the page

All is computed but the column "run" of the table `runs`, whose errors the page sums up. Its runs are those
below, committed records, and those of bench_expert_parallel.py once results/expert_parallel_h200.json exists.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import common
from scaling_model import BOTH, HOST, RANK, SLOT, Layer, Links, experts_us, fullest_rank, memory, reach, step
from scaling_model import exchange_us as one_exchange

RESULTS = common.HERE / "results"
MEASURED = "expert_parallel_h200.json"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
LAYERS = {"qwen3-30b": Layer("qwen3-30b", 128, 16384), "dsv3": Layer("dsv3-8ranks", 256, 8192)}
IN_HOST = Links().gpus_per_host
GIB, MIB = 2**30, 2**20

# All-to-alls of bf16 rows between four H200s of one host (NCCL, PyTorch 2.11, random routing, medians of 20):
# the rows that a rank sends, a quarter of them to itself, and µs
EXCHANGES = (
    (LAYERS["qwen3-30b"], RANK, 59633, 601),
    (LAYERS["dsv3"], RANK, 29585, 1010),
    (Layer("mixtral-8x7b", 8, 8192), RANK, 15194, 346),
    (LAYERS["qwen3-30b"], SLOT, 131072, 1627),
    (LAYERS["dsv3"], SLOT, 65536, 2216),
    (Layer("mixtral-8x7b", 8, 8192), SLOT, 16384, 380),
)
# torchtitan 0.2.2, deepseek_v3 16B with all 27 layers, four H200s of one host, sequences of 4,096, one run of
# 20 steps each: ranks of EP, local batch, tokens/s per GPU; and MiB at the peak of FSDP2's batches
TITAN = ((1, 2, 16663), (1, 4, 21728), (4, 4, 16844))
TITAN_PEAK = {2: 70521, 4: 90974}
SEQUENCE = 4096


class Model(NamedTuple):
    layers: int
    moe_layers: int


TITAN_16B, TITAN_16B6 = Model(27, 26), Model(6, 5)


def way_of(ranks: int) -> str:
    return RANK if ranks <= IN_HOST else HOST


def most_ranks(layer: Layer, gpus: int) -> int:
    """Ranks of EP that share out the experts evenly; N is a power of two."""
    return math.gcd(gpus, layer.num_experts)


def titan_layer(batch: int) -> Layer:
    return Layer("dsv2-lite", 64, batch * SEQUENCE)


def records(name: str) -> list[dict]:
    path = RESULTS / name
    return common.read(path) if path.exists() else []


def rest_us(batch: int, links: Links) -> float:
    """A layer's time beside its MoE: a line through the recorded steps of 16B6 on two GPUs at four batches,
    less the computed time of its MoE layers."""
    found = [
        r
        for r in records("torchtitan_h200.json")
        if (r["what"], r["steps"]) == ("fused_moe", 40) and r["shape"].startswith("16B6, 2 GPUs, batch")
    ]
    batches = [r["local_batch_size"] for r in found]
    us = [
        r["time_us"]
        - TITAN_16B6.moe_layers * experts_us(titan_layer(b), 64, titan_layer(b).num_tokens * 6, BOTH, links)
        for r, b in zip(found, batches, strict=True)
    ]
    slope, fixed = statistics.linear_regression(batches, us)
    return (fixed + slope * batch) / TITAN_16B6.layers


def tokens_per_s(
    model: Model, gpus: int, ranks: int, batch: int, way: str, links: Links, hidden: float = 0.0
) -> float:
    """A GPU's, at `batch` sequences each."""
    rest = rest_us(batch, links)
    moe = step(titan_layer(batch), gpus, ranks, way, rest=rest, hidden=hidden, links=links).time
    us = model.moe_layers * moe + (model.layers - model.moe_layers) * rest
    return batch * SEQUENCE / us * 1e6


# --- tables -------------------------------------------------------------------------------------------


def table(header: str, rows: list[list[str]]) -> str:
    titles = header.split(" | ")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, ["---"] * len(titles), *rows))


def rate_table(links: Links) -> str:
    return table(
        "per GPU | rate | from",
        [
            [
                "NVLink, one direction",
                f"{links.nvlink:g} GB/s, {links.exchange_us:g} µs per exchange",
                "fitted to six exchanges on four H200s; nominal: 450 GB/s",
            ],
            [
                "InfiniBand, 400 Gb/s",
                f"{links.infiniband:g} GB/s",
                "https://github.com/deepseek-ai/DeepEP#performance: 90 GB/s on 2 hosts, 61 on 4, less the "
                "own host's share, which it counts",
            ],
            ["memory, read + write", f"{links.copy:,.0f} GB/s", "`bench_kernels.py` on an H200"],
            ["counts to the host", f"{links.host_us:g} µs", "measured on four H200s: 62 to 67"],
            [
                "launches from there to the experts",
                f"{links.launch_us:g} µs",
                "measured on two H200s: 760 to 1,240",
            ],
        ],
    )


def runs(links: Links) -> Iterator[tuple[str, str, float, float]]:
    """What, its unit, run, model."""
    for layer, way, rows, us in EXCHANGES:
        at = reach(layer, 4, 1)
        expected = layer.num_tokens * (at.ranks if way == RANK else layer.sizes.top_k)
        name = f"exchange, {layer.shape.removesuffix('-8ranks')}, {way}: {rows:,} rows"
        name += f" (computed {expected:,.0f})" if way == RANK else ""
        yield name, "µs", us, one_exchange(layer, 4, way, at, links)
    computed = {}
    for ranks, batch, tokens in TITAN:
        name = f"16B, 4 GPUs, {'FSDP2' if ranks == 1 else f'EP {ranks}, {SLOT}'}, batch {batch}"
        computed[ranks, batch] = tokens_per_s(TITAN_16B, 4, ranks, batch, SLOT, links)
        yield name, "tokens/s", tokens, computed[ranks, batch]
    yield (
        "16B, 4 GPUs, EP 4 over FSDP2, batch 4",
        "",
        TITAN[2][2] / TITAN[1][2],
        computed[4, 4] / computed[1, 4],
    )
    for shape, gpus, ranks in (("16B6, 4 GPUs", 4, 1), ("16B6, 2 GPUs, EP 2, batch 4", 2, 2)):
        found = [r for r in records("torchtitan_h200.json") if r["shape"] == shape]
        tokens = next(r["tokens_per_second"] for r in found if r["what"] == "fused_moe")
        yield (
            f"{shape.removesuffix(', batch 4')}, {'FSDP2' if ranks == 1 else RANK}, batch 4",
            "tokens/s",
            tokens,
            tokens_per_s(TITAN_16B6, gpus, ranks, 4, RANK, links),
        )
    state = memory(titan_layer(1), 4, 1)
    fixed = TITAN_16B.moe_layers * state.state + state.unsharded
    yield "16B, 4 GPUs, FSDP2: peak without tokens", "MiB", 2 * TITAN_PEAK[2] - TITAN_PEAK[4], fixed / MIB
    other = [r for r in records("other_layers_h200.json") if r["shape"] == "16384,512,8,2048,768"]
    us = next(r["time_us"] for r in other if r["what"] == BOTH)
    many = experts_us(LAYERS["qwen3-30b"], 512, 131072, BOTH, links)
    yield "qwen3-30b with 512 experts on one GPU", "µs", us, many
    yield from measured_layers(links)


def measured_layers(links: Links) -> Iterator[tuple[str, str, float, float]]:
    """bench_expert_parallel.py's: the time beyond that of the experts alone, with tokens once per rank, where
    the host waits and where it never does."""
    for exchange, waits in (("exact", True), ("symmetric, static", False)):
        for r in records(MEASURED):
            if r["layer"].startswith(f"rank, {exchange}, N") and r["routing"] == "random":
                layer = Layer(r["shape"], r["experts"], r["tokens"])
                found = step(layer, r["ranks"], r["ranks"], waits=waits, links=links)
                name = f"{r['shape']}, EP {r['ranks']}, {exchange}, beyond the experts alone"
                yield name, "µs", r["time_us"] - r["single_us"], found.time - found.compute


def error_table(links: Links) -> str:
    """The least and the largest error of the model, for each kind of runs."""
    kinds = (
        (r"exchange, ", "six exchanges of a layer, 4 GPUs"),
        (r".* over FSDP2, ", "16B: EP 4 over FSDP2, the ratio"),
        (r"16B6?, .* batch \d$", "torchtitan's steps of 16B and 16B6, 2 and 4 GPUs"),
        (r"16B, .* peak", "memory of 16B with FSDP2, 4 GPUs"),
        (r".* with 512 experts", "512 experts on one GPU"),
        (r".*, exact, beyond", "five layers, EP 2, beyond the experts alone: exact"),
        (r".*, static, beyond", "the same, shared memory, static"),
    )
    errors: dict[str, list[float]] = {}
    for what, _, run, model in runs(links):
        kind = next(name for pattern, name in kinds if re.match(pattern, what))
        errors.setdefault(kind, []).append(round(model / run - 1, 2) + 0)
    rows = []
    for kind, found in errors.items():
        ends = sorted({min(found), max(found)})
        rows.append([kind, " to ".join(f"{error:+.0%}" for error in ends)])
    return table("runs | model's error", [*rows, ["more than one host", "not measured"]])


def run_table(links: Links) -> str:
    def words(value: float, unit: str) -> str:
        return f"{value:,.0f} {unit}" if unit else f"{value:.2f}"

    rows = [
        [what, words(run, unit), words(model, unit), f"{round(model / run - 1, 2) + 0:+.0%}"]
        for what, unit, run, model in runs(links)
    ]
    if not records(MEASURED):
        rows.append([f"a layer with EP 2 and EP 4, {RANK}", "not measured yet", "", ""])
    rows.append(["more than one host", "not measured", "", ""])
    return table("what | run | model | error", rows)


def ways(layer: Layer, gpus: int, links: Links) -> dict[str, float]:
    """µs of a step, for each way to use the GPUs."""
    every = most_ranks(layer, gpus)
    return {
        "FSDP2": step(layer, gpus, 1, links=links).time,
        "EP 8, FSDP2": step(layer, gpus, IN_HOST, links=links).time,
        "EP, once per rank": step(layer, gpus, every, RANK, links=links).time,
        "EP": step(layer, gpus, every, way_of(every), links=links).time,
        "EP, half hidden": step(layer, gpus, every, way_of(every), hidden=0.5, links=links).time,
        "EP, all hidden": step(layer, gpus, every, way_of(every), hidden=1, links=links).time,
    }


def step_table(layers: dict[str, Layer], links: Links) -> str:
    rows, columns = [], ("FSDP2", "EP 8, FSDP2", "EP")
    for name, layer in layers.items():
        alone = experts_us(
            layer, layer.num_experts // IN_HOST, layer.num_tokens * layer.sizes.top_k, BOTH, links
        )
        for gpus in (8, 16, 64):
            found = ways(layer, gpus, links)
            cells = f"{name}, {alone / 1e3:.1f}", f"{gpus:,}"
            rows.append([*cells, *(f"{found[way] / 1e3:.1f}" for way in columns)])
    return table("layer, experts alone | GPUs | " + " | ".join(columns), rows)


def memory_table(layers: dict[str, Layer], links: Links) -> str:
    rows = []
    for name, layer in layers.items():
        for gpus in (8, 64):
            cells = []
            for ranks in (1, IN_HOST, most_ranks(layer, gpus)):
                found = memory(layer, gpus, ranks)
                cells.append(f"{found.state / GIB:.2f} + {found.unsharded / GIB:.1f}")
            rows.append([name, f"{gpus:,}", *cells])
    return table("layer | GPUs | FSDP2 | EP 8, FSDP2 | EP", rows)


def capacity_table(layers: dict[str, Layer], links: Links) -> str:
    rows = []
    for name, layer in layers.items():
        for ranks in sorted({IN_HOST, most_ranks(layer, 64)}):
            at, cells = reach(layer, ranks, ranks // IN_HOST), []
            for capacity in (None, 1.25, math.inf):
                found = memory(layer, ranks, ranks, RANK, capacity=capacity)
                us = one_exchange(layer, ranks, RANK, at, links, capacity)
                cells.append(f"{found.kept / GIB:.1f} + {found.working / GIB:.1f}, {us / 1e3:.1f} ms")
            rows.append([name, f"{ranks}", *cells])
    return table(
        "layer | ranks | exact | static, 1.25 of the mean | static, default",
        rows,
    )


def imbalance_table(links: Links) -> str:
    layer, rows = LAYERS["qwen3-30b"], []
    for routing in ("random", "zipf:0.5", "zipf:1"):
        cells = [routing]
        for ranks in (IN_HOST, 64):
            at = reach(layer, ranks, ranks // IN_HOST, routing)
            us = step(layer, ranks, ranks, way_of(ranks), routing=routing, links=links).time
            cells += [f"{at.load:.2f}x", f"{us / 1e3:.1f}"]
        rows.append(cells)
    return table("routing | EP 8: rows | ms | EP 64: rows | ms", rows)


def model_table(links: Links) -> str:
    rows = []
    for gpus in (8, 64, 1024):
        every = most_ranks(titan_layer(4), gpus)
        found = [
            tokens_per_s(TITAN_16B, gpus, ranks, 4, way_of(ranks), links, hidden)
            for ranks, hidden in ((1, 0), (IN_HOST, 0), (IN_HOST, 0.5), (every, 0), (every, 0.5))
        ]
        rows.append([f"{gpus:,}", *(f"{tokens:,.0f}" for tokens in found)])
    return table("GPUs | FSDP2 | EP 8, FSDP2 | half hidden | EP, up to 64 ranks | half hidden", rows)


def hiding_tokens(layer: Layer, gpus: int, ranks: int, links: Links) -> float:
    """Tokens per GPU from which experts alone last as long as FSDP2's traffic."""
    found = step(layer, gpus, ranks, links=links)
    return layer.num_tokens * found.shards / found.compute


def choice_table(links: Links) -> str:
    qwen, dsv3 = LAYERS.values()
    at8, at64 = reach(qwen, 8, 1), reach(qwen, 64, 8)
    us = {(name, gpus): ways(layer, gpus, links) for name, layer in LAYERS.items() for gpus in (8, 64)}

    def ms(name: str, gpus: int, way: str) -> str:
        return f"{us[name, gpus][way] / 1e3:.1f}"

    alone = experts_us(qwen, 128, 131072, BOTH, links) / 1e3
    gathered = [memory(dsv3, 8, ranks).unsharded / GIB for ranks in (IN_HOST, 1)]
    crossing = [rows * 7 / 8 for rows in (at64.hosts, at64.ranks)]  # 7 of 8 hosts are others
    titan = [tokens_per_s(TITAN_16B, 64, ranks, 4, way_of(ranks), links) for ranks in (1, IN_HOST)]
    return table(
        "your case | use | why",
        [
            [
                "the model fits one GPU",
                "one GPU; FSDP2 for more tokens",
                f"no exchange: qwen3-30b's layer takes {alone:.1f} ms, with EP 8 {ms('qwen3-30b', 8, 'EP')}",
            ],
            [
                "two gathered layers and a gradient fit, many tokens per GPU",
                "[FSDP2](fsdp2.md) alone",
                "traffic does not grow with tokens: qwen3-30b's experts hide it from "
                f"{hiding_tokens(qwen, 64, 1, links):,.0f} on; a 16B reaches {titan[0]:,.0f} tokens/s, "
                f"with EP 8 {titan[1]:,.0f}",
            ],
            [
                "they do not fit, or few tokens per GPU; one host",
                '[`ExpertParallel(combine="rank")`](expert_parallelism.md), by '
                "[shared memory](expert_parallelism.md#measured-on-two-h200s)",
                f"{at8.ranks:.1f} rows per token, not {qwen.sizes.top_k}; dsv3's gathered weights take "
                f"{gathered[0]:.1f} GiB, not {gathered[1]:.1f}; "
                f"its step {ms('dsv3', 8, 'EP')} ms, not {ms('dsv3', 8, 'FSDP2')}",
            ],
            [
                "the same, `fullgraph=True` or CUDA graphs",
                "`static=True` with a capacity (graphs: `symmetric=True`, too)",
                f"no wait of {links.host_us:g} µs per layer, nor up to {links.launch_us:g} µs of launches "
                "after it, fixed shapes; buffers [cost memory](#exact-and-static-sizes)",
            ],
            [
                "EP over several hosts",
                "[DeepEP](dispatchers.md)",
                f"{crossing[0]:.1f} rows per token between hosts, not {crossing[1]:.1f}: dsv3 takes "
                f"{ms('dsv3', 64, 'EP')} ms on 64 GPUs, not {ms('dsv3', 64, 'EP, once per rank')}; "
                f"EP 8 with FSDP2 {ms('dsv3', 64, 'EP 8, FSDP2')}",
            ],
            [
                "tiny batches, as in decoding",
                "[`ExpertTensorParallel`](expert_parallelism.md#tensor-parallelism)",
                f"one token: the fullest of 8 ranks reads {fullest_rank(128, 8, 8):.1f} experts on average; "
                "with F split each reads 1.0",
            ],
        ],
    )


def tables(layers: dict[str, Layer], links: Links) -> dict[str, str]:
    return {
        "choice": choice_table(links),
        "rates": rate_table(links),
        "errors": error_table(links),
        "runs": run_table(links),
        "steps": step_table(layers, links),
        "model": model_table(links),
        "memory": memory_table(layers, links),
        "capacity": capacity_table(layers, links),
        "imbalance": imbalance_table(links),
    }


ONLY_PRINTED = {"rates", "runs", "model"}  # not on the page


def filled(page: str, texts: dict[str, str], mark: str = "scaling") -> str:
    """The page with the table below each line `<!-- MARK: NAME -->` renewed."""
    found = re.findall(rf"<!-- {mark}: (\w+) -->\n", page)
    if sorted(found) != sorted(texts):
        raise SystemExit(
            f"--page: expected markers {' '.join(sorted(texts))}, found {' '.join(sorted(found))}"
        )
    table = re.compile(rf"(<!-- {mark}: (\w+) -->\n)(?:\|.*\n)*")
    return table.sub(lambda m: f"{m[1]}{texts[m[2]]}\n", page)


# --- picture ------------------------------------------------------------------------------------------


def curves(links: Links) -> dict[str, dict[str, list[float]]]:
    """The lines of each panel over GPUS."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, layer in LAYERS.items():
        every = [ways(layer, gpus, links) for gpus in GPUS]
        panel = found[f"{name}: ms of a layer's step"] = {
            way: [round(us[way] / 1e3, 2) for us in every]
            for way in every[0]
            if way not in ("EP, once per rank", "EP, all hidden")
        }
        compute = step(layer, 8, 8, links=links).compute
        panel["experts alone"] = [round(compute / 1e3, 2)] * len(GPUS)
        of_ranks: dict[str, Callable[[int], int]] = {
            "FSDP2": lambda gpus: 1,
            "EP 8, FSDP2": lambda gpus: IN_HOST,
            "EP": lambda gpus, layer=layer: most_ranks(layer, gpus),
        }
        found[f"{name}: GiB of a layer's weights"] = {
            way: [round(sum(memory(layer, gpus, ranks(gpus))[:2]) / GIB, 3) for gpus in GPUS]
            for way, ranks in of_ranks.items()
        }
    return found


def digest(panels: dict) -> str:
    return hashlib.sha256(json.dumps(panels).encode()).hexdigest()[:16]


def main(argv: list[str] | None = None) -> None:
    flags = common.new_parser(__doc__)
    add = flags.add_argument
    add("--shape", action="append", help="NAME,E of results/layer_h200.json; may be repeated")
    for name, value in Links()._asdict().items():
        if name != "gpus_per_host":
            flag = f"--{name.replace('_', '-')}"
            add(flag, type=float, default=value, metavar="X", help=f"default: {value:g}")
    add("--page", type=Path, metavar="FILE", help="replace the tables between its markers")
    add("--check", action="store_true", help="write nothing; fail if the page is out of date")
    add("--plot", type=Path, metavar="FILE", help="draw step times and memory over GPUs")
    options = flags.parse_args(argv)
    links = Links(*(getattr(options, name) for name in Links._fields if name != "gpus_per_host"))
    layers = dict(LAYERS)
    if options.shape:
        layers = {text: layer_of(text) for text in options.shape}
    texts = tables(layers, links)
    if options.plot:
        import plot

        panels = curves(links)
        plot.scaling(GPUS, panels, options.plot, digest(panels))
    if not options.page:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in texts.items()))
        return
    old = options.page.read_text()
    new = filled(old, {name: text for name, text in texts.items() if name not in ONLY_PRINTED})
    if options.check and new != old:
        raise SystemExit(f"{options.page} is out of date: python benchmarks/scaling.py --page {options.page}")
    if not options.check:
        options.page.write_text(new)


def layer_of(text: str) -> Layer:
    """As a flag: NAME or NAME,E."""
    name, _, experts = text.partition(",")
    sizes = common.layer_sizes(name)
    found = int(experts) if experts.isdigit() else sizes.num_experts
    if found % IN_HOST:
        raise SystemExit(f"--shape: expected E that is a multiple of {IN_HOST}, found {text}")
    return Layer(name, found, sizes.num_tokens)


if __name__ == "__main__":
    main()
