"""Runs the evaluations of the five systems whose methods fused_moe implements, each on its authors' shapes.

    python benchmarks/bench_evaluations.py --system 4 --json evaluations.json --append
    python benchmarks/bench_evaluations.py --system 1 --system 2 --shape 24,8,2,64,32  # any layer's sizes
    python benchmarks/bench_evaluations.py --system 4 --part layer  # a part: what records call `layer`

docs/evaluations.md names the systems and has their published figures beside the records. What another program
measures comes from there: bench_gemm.py, bench_layer.py, bench_kernels.py and bench_decode.py run on the
shapes of the evaluation, and `system` and `layer` in their records say what for. The rest is here:

1  orders: the tiles of one grouped GEMM in four orders, in turns, beside a loop of GEMMs, and on the portable
   tier, which has one CTA per tile. ratio_to_loop and dense_ratio are of each order's own time.
2  few rows: one GEMM of few rows in three orders. floor_us: the weights of experts that have rows, read once.
3  layer: router to combine over T. In ours the host makes 3 to 5 launches; in `halves` gate and up are one
   launch and the rest is apart, `apart` has a launch for each part. The loop is not in a graph.
4  gather: the GEMM with token indices in place of copied rows. model_us: what tools/schedule.py computes for
   orders of experts, among them those that no kernel of ours has.
   shared expert: one more of the routed experts, in their launch, beside launches of its own (`apart`).

Cache hits and bytes from memory are ncu's (`counters`), in a process of its own; where ncu is missing or may
not count, `counters` says so. model_l2_hits are those of tools/schedule.py.
"""

from __future__ import annotations

import argparse
import csv
import glob
import importlib.util
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import bench_decode
import bench_gemm
import bench_kernels
import bench_layer
import common
import profiling
import torch
from common import Error
from decode_case import CHECKED_TOKENS, Case, Setup, Weights, exact_experts
from torch import Tensor

OWN = "own"  # the shapes of the evaluation
ORDERS = {"default": "", "linear": "order=linear", "group 4": "group=4", "column": "order=column"}
FEW_ORDERS = ("default", "linear", "column")
MODEL_GROUPS = {"default": 16, "linear": 1, "group 4": 4, "column": 2**31 - 1}
FEW_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LAYER_TOKENS = (1, 32, 128, 512, 2048, 4096)
STAGES_AT = 512  # tokens
PROFILED_AT = 2
LOCAL_TOKENS = "1,64"
SHARED_TOKENS = (4096, 8192)
COUNTERS = {
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "l1_hits": "l1tex__t_sector_hit_rate.pct",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__, shape="of shapes.json or T,E,K,D,F; default: those of the evaluation")
    add = flags.add_argument
    add("--system", type=int, choices=SYSTEMS, action="append", help="may be repeated; default: all")
    parts = list(dict.fromkeys(name for parts, _ in SYSTEMS.values() for name in parts))
    add("--part", choices=parts, metavar="NAME", help=f"default: all of {', '.join(parts)}")
    add(
        "--tokens",
        type=bench_decode.counts,
        metavar="A,B,..",
        help="of systems 2 and 3, and of the shared expert",
    )
    add("--profiled", action="store_true", help="only runs the kernels of --system that ncu counts")
    return flags.parse_args(argv)


# --- records of other programs ------------------------------------------------------------------------


def by(module: ModuleType, flags: str, shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    """Another program's records of one shape, on this program's device."""
    asked = module.arguments(flags.split())
    for name in ("device", "tier", "repeats"):
        setattr(asked, name, getattr(options, name))
    asked.routing = asked.routing or ["random"]
    if module is bench_layer:
        asked.mode = ["queued" if options.device == "cuda" else common.DEFAULT_MODE]
    yield from module.measure(shape, dtype, asked)


def named(part: str, records: Iterator[dict]) -> Iterator[dict]:
    for r in records:
        yield r | {"layer": part}


def text_of(sizes: common.Sizes) -> str:
    return ",".join(map(str, sizes))


def source_of(options: argparse.Namespace) -> Tensor:
    """What a kernel reads that only reads."""
    return torch.ones((1024 if options.device == "cuda" else 16) * common.MIB // 4, device=options.device)


# --- schedules, counters and the model ----------------------------------------------------------------


def with_environment(run: Callable, **variables: str) -> Callable:
    """`run` under these settings of the library, which reads them again."""

    def under() -> object:
        os.environ.update(variables)
        torch.ops.fused_moe.cuda_reset()
        return run()

    return under


def ordered(run: Callable, order: str) -> Callable:
    return with_environment(run, FUSED_MOE_SCHEDULE=ORDERS[order])


def usual(options: argparse.Namespace) -> None:
    """Back to the schedule and tier that other parts expect."""
    if options.device == "cuda":
        with_environment(lambda: None, FUSED_MOE_SCHEDULE="", FUSED_MOE_TIER=options.tier)()


def find_ncu() -> str | None:
    installed = sorted(glob.glob("/usr/local/cuda*/bin/ncu") + glob.glob("/opt/nvidia/nsight-compute/*/ncu"))
    return shutil.which("ncu") or next(iter(installed[::-1]), None)


def counted(system: int, shape: str, dtype: str, number: int, kernel: str = "grouped_mm") -> list[dict] | str:
    """What ncu counts of `number` kernels, those that `--profiled` launches, or why it cannot."""
    program = find_ncu()
    if program is None:
        return "ncu is not installed"
    command = [program, "--clock-control", "none", "--csv", "--kernel-name", f"regex:{kernel}"]
    command += ["--metrics", ",".join(COUNTERS.values()), sys.executable, __file__, "--profiled"]
    command += ["--system", str(system), "--dtype", dtype]
    command += [] if shape == OWN else ["--shape", shape]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "ncu took more than 120 s"
    found = read_counters(done.stdout)
    if len(found) == number and all(found):
        return found
    said = [text for text in (done.stdout + done.stderr).splitlines() if "ERR" in text or "rror" in text]
    return (said or [f"ncu counted {len(found)} kernels, expected {number}"])[0][:120]


def read_counters(text: str) -> list[dict]:
    """The counters of each kernel in ncu's CSV, in the order of launches."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict] = {}
    names = {metric: name for name, metric in COUNTERS.items()}
    scale = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    for row in csv.DictReader(io.StringIO("\n".join(lines[first:]))):
        own = kernels.setdefault(row["ID"], {})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # n/a
            continue
        own[names[row["Metric Name"]]] = value * scale.get(row["Metric Unit"], 1)
    return list(kernels.values())


def model() -> ModuleType:
    """tools/schedule.py"""
    path = common.HERE.parent / "tools" / "schedule.py"
    spec = importlib.util.spec_from_file_location("schedule_of_tools", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modelled(
    counts: list[int], columns: int, depth: int, slots: list[int] | None = None, apart: bool = False, **order
) -> dict:
    """Time and L2 hits of a grouped GEMM by tools/schedule.py. slots: each expert's place in the order.
    apart: skinny tiles, which are last, have SMs of their own, where the kernels give them some."""
    tool = model()
    num_n_tiles = -(-columns // tool.TILE_N)
    tiles = tool.work_tiles(counts, num_n_tiles, **order)
    if slots:
        tiles.sort(key=lambda tile: slots[tile.expert])
    own = tool.skinny_sms(counts, num_n_tiles) if apart else 0
    runs = tool.simulate(tiles, depth, skinny_sms=own)
    needed = sum(sum(tool.operands(tile, depth).values()) for tile in tiles)
    hits = 1 - sum(run.bytes_read for run in runs) / needed
    return {"model_us": round(max(run.end for run in runs), 1), "model_l2_hits": round(hits, 4)}


def expert_slots(counts: list[int]) -> dict[str, list[int]]:
    """System 4's orders of experts. alternating: the busiest, the idlest, the next busiest, and so on. half
    intervals: the busiest first, the next one half of the list further on, then at quarters, and so on, so
    that busy ones are spread over the list."""
    E = len(counts)
    busiest = sorted(range(E), key=lambda e: -counts[e])
    alternating = [busiest[i // 2] if i % 2 == 0 else busiest[E - 1 - i // 2] for i in range(E)]
    bits = max(1, (E - 1).bit_length())
    places = sorted(range(E), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    halves = [0] * E
    for place, e in zip(places, busiest, strict=True):
        halves[place] = e
    return {
        name: [order.index(e) for e in range(E)]
        for name, order in (("alternating", alternating), ("half intervals", halves))
    }


# --- system 1: a persistent, cache-aware grouped GEMM -------------------------------------------------


def grouped_launch(shape: str, dtype: str, options: argparse.Namespace) -> bench_gemm.Plain:
    """Contiguous rows, the same number for each expert."""
    own = common.SHAPES["gemms"]["grouped-launch"]
    sizes = tuple(own[name] for name in ("num_rows", "num_experts", "k", "n"))
    if shape != OWN:
        T, E, K, D, hidden = common.layer_sizes(shape)
        sizes = (T * K, E, D, hidden)
    return bench_gemm.Plain(sizes, "balanced", dtype, options.device)


def orders(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    case = grouped_launch(shape, dtype, options)
    gemm, ends, on_gpu = case.grouped_mm(), case.offs.tolist(), options.device == "cuda"
    rows, weights = case.a.split([b - a for a, b in zip([0, *ends], ends, strict=False)]), case.b.unbind()
    loop = partial(lambda: [a @ w.T for a, w in zip(rows, weights, strict=True)])
    names = ORDERS if on_gpu else ("default",)
    ours = {name: ordered(gemm.ours, name) if on_gpu else gemm.ours for name in names}
    if options.tier == "hopper":
        ours["portable"] = with_environment(gemm.ours, FUSED_MOE_SCHEDULE="", FUSED_MOE_TIER="portable")
        ours |= {name: with_environment(ours[name], FUSED_MOE_TIER="auto") for name in names}
    errors = {}
    for name, run in ours.items():
        checked = gemm._replace(ours=run)
        errors[name] = bench_gemm.error_of(checked, case.offs).check(f"grouped_mm, {name} order", dtype)
    runs = ours | {"dense": gemm.dense, "loop": loop}
    if common.has_grouped_mm(options.device, dtype):
        runs["torch"] = gemm.torch
    seconds = common.times(common.clock(options.device), runs, options.repeats)
    usual(options)
    counters = counted(1, shape, dtype, len(names)) if on_gpu else "a CPU"
    counts = torch.tensor(ends).diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
    text = ",".join(map(str, (case.a.size(0), *case.b.shape[:1], case.a.size(1), case.b.size(1))))
    for i, name in enumerate(ours):
        taken = seconds[name]
        of_order = counters[i] if isinstance(counters, list) and name in names else counters
        made = {}
        if name in MODEL_GROUPS:
            made = modelled(counts, case.b.size(1), case.a.size(1), group=MODEL_GROUPS[name])
        yield common.record(
            options,
            bench="evaluation",
            shape=text,
            routing="balanced",
            dtype=dtype,
            layer="GEMM",
            what="grouped_mm",
            time_us=round(taken * 1e6, 1),
            tflops=round(gemm.flops / taken / 1e12, 4),
            dense_ratio=round(seconds["dense"] / taken, 3),
            torch_ratio=round(seconds["torch"] / taken, 3) if "torch" in seconds else None,
            ratio_to_loop=round(seconds["loop"] / taken, 3),
            max_rel_error=errors[name],
            counters=of_order if name in names else "not counted",
            **made,
        ) | ({"schedule": name} if name in ORDERS else {"tier": name, "schedule": "default"})


def trained_layer(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    layer = "dsv2-lite" if shape == OWN else shape
    yield from named("layer", by(bench_layer, "--peers loop,torch", layer, dtype, options))


def profiled_orders(shape: str, dtype: str, options: argparse.Namespace) -> None:
    gemm = grouped_launch(shape, dtype, options).grouped_mm()
    for name in ORDERS:
        ordered(gemm.ours, name)()


# --- system 2: few rows -------------------------------------------------------------------------------


class FewRows:
    """The two GEMMs of an expert, w1 and w2, on T tokens."""

    def __init__(self, sizes: common.Sizes, dtype: str, device: str):
        torch.manual_seed(0)
        self.sizes, self.factory = sizes, {"dtype": common.DTYPES[dtype], "device": device}
        _, E, _, D, hidden = sizes
        self.weights = {
            name: torch.randn(E, *shape, **self.factory).mul_(shape[1] ** -0.5)
            for name, shape in (("w1", (hidden, D)), ("w2", (D, hidden)))
        }

    def gemms(self, tokens: int) -> tuple[dict[str, bench_gemm.Gemm], Tensor]:
        """Each GEMM of some tokens, randomly routed, and the ends of the experts' rows. A number of tokens
        has one routing, so that ncu counts what is timed."""
        import fused_moe

        torch.manual_seed(tokens)
        sizes = self.sizes._replace(num_tokens=tokens)
        logits = common.routing_logits("random", sizes, self.factory["device"])
        _, ids = fused_moe.route(logits, sizes.top_k)
        offs = fused_moe.route_plan(ids, sizes.num_experts).offsets[1:].clone()
        found = {}
        for name, w in self.weights.items():
            a = torch.randn(tokens * sizes.top_k, w.size(2), **self.factory)
            found[name] = bench_gemm.Gemm(
                2 * a.size(0) * w.size(1) * w.size(2),
                (a, w),
                partial(torch.ops.fused_moe.grouped_mm, a, w, offs),
                partial(lambda a, w: a @ w[0].T, a, w),
                partial(lambda a, w: torch._grouped_mm(a, w.mT, offs=offs), a, w),
                partial(lambda a, w, found, e, r: [(found[r], a[r].double() @ w[e].double().T)], a, w),
            )
        return found, offs


def few_rows_sizes(shape: str) -> common.Sizes:
    return common.layer_sizes("mixtral-8x7b" if shape == OWN else shape)


def few_rows(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    on_gpu, sizes = options.device == "cuda", few_rows_sizes(shape)
    case, names = FewRows(sizes, dtype, options.device), FEW_ORDERS if on_gpu else ("default",)
    source = source_of(options)
    counters = counted(2, shape, dtype, 2 * len(names)) if on_gpu else "a CPU"
    for tokens in options.tokens or FEW_TOKENS:
        gemms, offs = case.gemms(tokens)
        active = int(offs.diff(prepend=offs.new_zeros(1)).gt(0).sum())
        for g, (what, gemm) in enumerate(gemms.items()):
            ours = {name: ordered(gemm.ours, name) if on_gpu else gemm.ours for name in names}
            errors = {
                name: bench_gemm.error_of(gemm._replace(ours=run), offs).check(f"{what}, {tokens}", dtype)
                for name, run in ours.items()
            }
            runs = ours | {"read": source.sum}
            if common.has_grouped_mm(options.device, dtype):
                runs["torch"] = gemm.torch
            seconds = common.times(common.clock(options.device), runs, options.repeats)
            weight = gemm.operands[1]
            floor = weight[0].nbytes * active * seconds["read"] / source.nbytes
            for i, name in enumerate(names):
                taken = seconds[name]
                here = counters[i * 2 + g] if isinstance(counters, list) else counters
                yield common.record(
                    options,
                    bench="evaluation",
                    shape=text_of(sizes),
                    routing="random",
                    dtype=dtype,
                    layer="few rows",
                    what=what,
                    tokens=tokens,
                    time_us=round(taken * 1e6, 1),
                    tflops=round(gemm.flops / taken / 1e12, 4),
                    torch_ratio=round(seconds["torch"] / taken, 3) if "torch" in seconds else None,
                    **common.of_floor(floor, taken),
                    experts=active,
                    max_rel_error=errors[name],
                    counters=here if tokens == PROFILED_AT else None,
                ) | {"schedule": name}
    usual(options)


def profiled_few_rows(shape: str, dtype: str, options: argparse.Namespace) -> None:
    gemms, _ = FewRows(few_rows_sizes(shape), dtype, options.device).gemms(PROFILED_AT)
    for name in FEW_ORDERS:
        for gemm in gemms.values():
            ordered(gemm.ours, name)()


# --- system 3: the dispatch of a whole layer ----------------------------------------------------------


class Routed(Case):
    """Calls of whole layers: each has a router of its own."""

    def __init__(self, sizes: common.Sizes, setup: Setup):
        super().__init__(sizes, setup)
        self.gates = [
            torch.randn(sizes.num_experts, sizes.dim, dtype=self.x.dtype, device=self.x.device).mul_(
                sizes.dim**-0.5
            )
            for _ in self.routings
        ]
        self.routings = [self.router(gate)[1:] for gate in self.gates]

    def router(self, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        import fused_moe

        logits = fused_moe.router_logits(self.x, gate)
        return logits, *fused_moe.route(logits, self.sizes.top_k, route_norm=True)

    def layers(self, experts: Callable) -> None:
        """Every layer once, router included."""
        with torch.no_grad():
            for gate, (weights, *_) in zip(self.gates, self.calls(), strict=True):
                experts(self.x, weights, *self.router(gate)[1:])

    def loop(self, experts: Callable) -> None:
        """The same with the router in PyTorch."""
        from peers import route

        with torch.no_grad():
            for gate, (weights, *_) in zip(self.gates, self.calls(), strict=True):
                experts(self.x, weights, *route(self.x, gate, self.sizes.top_k))

    def router_error(self) -> Error:
        logits, scores, ids = (t[:CHECKED_TOKENS] for t in self.router(self.gates[0]))
        exact = self.x[:CHECKED_TOKENS].double() @ self.gates[0].double().T
        chosen = exact.softmax(-1).gather(-1, ids.long())
        error = Error()
        error.add("logits", logits, exact)
        error.add("scores", scores, chosen / chosen.sum(-1, keepdim=True))
        return error


def layer_runs() -> dict[str, Callable]:
    """Experts as functions of x, weights, scores and ids: ours, with fewer parts fused, and the loop."""
    import fused_moe
    from fused_moe.function import ALPHA, LIMIT
    from fused_moe.ops import ACTIVATION_CODES, LAYOUTS

    silu = LAYOUTS["separate"], ACTIVATION_CODES["silu"], [ALPHA, LIMIT], False

    def ours(x, w, scores, ids):
        return fused_moe.fused_experts(x, w.w1, w.w2, w.w3, scores, ids)

    def halves(x, w, scores, ids):
        plan = fused_moe.route_plan(ids, w.w1.size(0))
        up = torch.ops.fused_moe.experts_up
        a = up(x, w.w1, w.w3, None, None, None, plan.tensors, *silu)[1]
        y = fused_moe.grouped_mm(a, w.w2, plan.offsets[1:])
        return fused_moe.unpermute(y, plan, scores)

    def apart(x, w, scores, ids):
        rows, plan = fused_moe.permute(x, ids, w.w1.size(0))
        offs = plan.offsets[1:]
        gate, up = (fused_moe.grouped_mm(rows, part, offs) for part in (w.w1, w.w3))
        a = fused_moe.reference.activate(gate, up, activation="silu")
        return fused_moe.unpermute(fused_moe.grouped_mm(a, w.w2, offs), plan, scores)

    def loop(x, w, scores, ids):
        return fused_moe.reference.fused_experts(x, w.w1, w.w2, w.w3, scores, ids)

    return {"ours": ours, "halves": halves, "apart": apart, "loop": loop}


def dispatched_layer(shape: str, tokens: int, dtype: str, options: argparse.Namespace) -> dict:
    on_gpu, sizes = options.device == "cuda", common.layer_sizes(shape)._replace(num_tokens=tokens)
    case, found = Routed(sizes, Setup(dtype=dtype, device=options.device)), layer_runs()
    title, number = f"{shape}, {tokens} tokens", len(case.gates)
    case.router_error().check(f"{title}, router", dtype)
    errors = {name: case.error(fn).check(f"{title}, {name}", dtype) for name, fn in found.items()}
    calls = {name: partial(case.layers, fn) for name, fn in found.items() if name != "loop"}
    runs = {name: common.as_graph(call) if on_gpu else call for name, call in calls.items()}
    runs |= bench_decode.roofs(case, source_of(options), not on_gpu)
    runs["loop"] = partial(case.loop, found["loop"])
    seconds = common.times(common.clock(options.device), runs, options.repeats)
    ours = seconds["ours"] / number
    measured = {
        "mode": "graph" if on_gpu else common.DEFAULT_MODE,
        "time_us": round(ours * 1e6, 1),
        "tflops": round(case.flops_of_a_call / ours / 1e12, 4),
        **{f"ratio_to_{name}": common.ratio(seconds, name) for name in ("halves", "apart", "loop")},
        **bench_decode.floor_of(case, case.bytes_of_a_call, source_of(options), seconds, ours),
        "max_rel_error": errors["ours"],
    }
    if on_gpu:
        each = {name: len(profiling.launches(call, steps=1)) / number for name, call in calls.items()}
        each["loop"] = len(profiling.launches(runs["loop"], steps=1)) / number
        measured |= {"launches": each.pop("ours"), "other_launches": each}
    return measured


def dispatched_models(shape: str) -> tuple[str, ...]:
    return ("mixtral-8x7b", "deepseek-v3") if shape == OWN else (shape,)


def dispatched_layers(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for name in dispatched_models(shape):
        for tokens in options.tokens or LAYER_TOKENS:
            about = {"bench": "evaluation", "shape": name, "routing": "random", "dtype": dtype}
            measured = dispatched_layer(name, tokens, dtype, options)
            yield common.record(options, **about, layer="layer", what="forward", tokens=tokens, **measured)


def stages(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for name in dispatched_models(shape):
        tokens = STAGES_AT if shape == OWN else common.layer_sizes(name).num_tokens
        sizes = text_of(common.layer_sizes(name)._replace(num_tokens=tokens))
        kernels = " ".join(f"--what {what}" for what in ("router_logits", "route_and_plan", "permute"))
        found = by(bench_kernels, f"{kernels} --what combine", sizes, dtype, options)
        yield from (r | {"model": name, "tokens": tokens} for r in named("stages", found))
        peer = "" if options.device == "cuda" else "--peers loop"
        flags = f"--tokens {tokens} --roofline none {peer}"
        yield from named("stages", by(bench_decode, flags, name, dtype, options))


# --- system 4: static batching ------------------------------------------------------------------------


def static_layer(shape: str) -> str:
    return "4096,64,8,3584,2560" if shape == OWN else shape


def static_gemm(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    T, E, K, D, hidden = common.layer_sizes(static_layer(shape))
    gemm = "static-batching" if shape == OWN else f"{T * K},{E},{D},{hidden}"
    yield from named("GEMM", by(bench_gemm, "", gemm, dtype, options))


def gathers(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for distribution in ("balanced", "best", "one-each"):
        yield gather(static_layer(shape), distribution, dtype, options)


def gather(shape: str, distribution: str, dtype: str, options: argparse.Namespace) -> dict:
    """One GEMM that reads rows by their tokens: up_gate without a gate, relu in its epilogue, h not kept."""
    import fused_moe
    from fused_moe.ops import ACTIVATION_CODES, UNGATED

    torch.manual_seed(0)
    sizes = common.layer_sizes(shape)
    T, E, K, D, hidden = sizes
    factory = {"dtype": common.DTYPES[dtype], "device": options.device}
    x, w = torch.randn(T, D, **factory), torch.randn(E, hidden, D, **factory).mul_(D**-0.5)
    counts = bench_gemm.row_counts(distribution, T * K, E)
    ids = torch.repeat_interleave(torch.arange(E), counts).view(K, T).T.contiguous().int()
    plan = fused_moe.route_plan(ids.to(options.device), E)
    offs, rows = plan.offsets[1:].clone(), x.index_select(0, plan.row_token)
    none = [None] * 4  # no w3, biases or scores
    settings = UNGATED, ACTIVATION_CODES["relu"], [0.0, 0.0], False
    gemm = bench_gemm.Gemm(
        2 * T * K * D * hidden,
        (rows, w),
        lambda: torch.ops.fused_moe.experts_up(x, w, *none, plan.tensors, *settings)[1],
        lambda: rows @ w[0].T,
        lambda: torch._grouped_mm(rows, w.mT, offs=offs),
        lambda found, e, r: [(found[r], (rows[r].double() @ w[e].double().T).relu())],
    )
    error = bench_gemm.error_of(gemm, offs).check(f"gather, {distribution}", dtype)
    runs = {"ours": gemm.ours, "dense": gemm.dense}
    if common.has_grouped_mm(options.device, dtype):
        runs["torch"] = gemm.torch
    seconds = common.times(common.clock(options.device), runs, options.repeats)
    return common.record(
        options,
        bench="evaluation",
        shape=text_of(sizes),
        routing=distribution,
        dtype=dtype,
        layer="gather",
        what="up, relu",
        time_us=round(seconds["ours"] * 1e6, 1),
        tflops=round(gemm.flops / seconds["ours"] / 1e12, 4),
        dense_ratio=common.ratio(seconds, "dense"),
        torch_ratio=common.ratio(seconds, "torch"),
        max_rel_error=error,
    )


def expert_orders(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    """The worst case with skinny experts on SMs of their own and after the others; and by the model, in
    system 4's two orders, too."""
    T, E, K, D, hidden = sizes = common.layer_sizes(static_layer(shape))
    case = bench_gemm.Plain((T * K, E, D, hidden), "one-each", dtype, options.device)
    gemm, on_gpu = case.grouped_mm(), options.device == "cuda"
    settings = {"default": "", "experts=in-turn": "experts=in-turn"} if on_gpu else {"default": ""}
    ours = {
        name: with_environment(gemm.ours, FUSED_MOE_SCHEDULE=value) if on_gpu else gemm.ours
        for name, value in settings.items()
    }
    errors = {
        name: bench_gemm.error_of(gemm._replace(ours=run), case.offs).check(f"one-each, {name}", dtype)
        for name, run in ours.items()
    }
    seconds = common.times(common.clock(options.device), ours | {"dense": gemm.dense}, options.repeats)
    usual(options)
    counts = bench_gemm.row_counts("one-each", T * K, E).tolist()
    made = {
        "apart": modelled(counts, hidden, D, apart=True, interleave=False),
        "in turn": modelled(counts, hidden, D, interleave=False),
    }
    for name, slots in expert_slots(counts).items():
        made[name] = modelled(counts, hidden, D, slots, interleave=False)
    for name in ours:
        yield common.record(
            options,
            bench="evaluation",
            shape=text_of(sizes),
            routing="one-each",
            dtype=dtype,
            layer="order of experts",
            what="grouped_mm",
            time_us=round(seconds[name] * 1e6, 1),
            tflops=round(gemm.flops / seconds[name] / 1e12, 4),
            dense_ratio=round(seconds["dense"] / seconds[name], 3),
            max_rel_error=errors[name],
            models_us={name: found["model_us"] for name, found in made.items()},
        ) | {"schedule": name}


def static_layers(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for routing in ("balanced", "worst", "one-each"):  # worst: as best, all tokens have the same K experts
        flags = f"--routing {routing} --peers torch"
        yield from named("layer", by(bench_layer, flags, static_layer(shape), dtype, options))


def shared_experts(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    name = "dsv3-8ranks" if shape == OWN else shape
    sizes = common.layer_sizes(name)
    for tokens in options.tokens or (SHARED_TOKENS if shape == OWN else (sizes.num_tokens,)):
        about = {"bench": "evaluation", "shape": name, "routing": "random", "dtype": dtype}
        measured = shared_expert(sizes._replace(num_tokens=tokens), dtype, options)
        yield common.record(
            options, **about, layer="shared expert", what="forward", tokens=tokens, **measured
        )


def shared_expert(sizes: common.Sizes, dtype: str, options: argparse.Namespace) -> dict:
    """Routed experts and a shared one of their width. `joined`: it is expert E of the same launches, and each
    token has a slot of score 1 for it. `apart`: it has launches of its own, as in FusedMoE, and the combine
    adds its output."""
    import fused_moe

    torch.manual_seed(0)
    T, E, K, D, hidden = sizes
    factory = {"dtype": common.DTYPES[dtype], "device": options.device}
    x = torch.randn(T, D, **factory)
    w1, w3 = (torch.randn(E + 1, hidden, D, **factory).mul_(D**-0.5) for _ in range(2))
    w2 = torch.randn(E + 1, D, hidden, **factory).mul_(hidden**-0.5)
    weights = Weights(w1, w2, w3)
    (*routed, _), (*shared, _) = weights.map(lambda w: w[:E]), weights.map(lambda w: w[E:])
    scores, ids = fused_moe.route(common.routing_logits("random", sizes, options.device), K, route_norm=True)
    slots = torch.cat((scores, scores.new_ones(T, 1)), 1), torch.cat((ids, ids.new_full((T, 1), E)), 1)
    counts = ids.new_full((1,), T)

    def joined() -> Tensor:
        return fused_moe.fused_experts(x, w1, w2, w3, *slots)

    def apart() -> Tensor:
        added = fused_moe.grouped_mlp(x, *shared, counts)
        return fused_moe.fused_experts(x, *routed, scores, ids, shared=added)

    some = torch.linspace(0, T - 1, min(T, bench_layer.CHECKED_TOKENS), device=options.device).long()
    exact = exact_experts(x[some], weights, *(t[some] for t in slots), activation="silu")
    outs, error = {"joined": joined(), "apart": apart()}, Error()
    for name, out in outs.items():
        error.add(name, out[some], exact)
    checked = error.check(f"shared expert, {T} tokens", dtype)
    gemms = common.dense_gemms(sizes._replace(top_k=K + 1), **factory)
    runs = {"ours": joined, "apart": apart, "dense": lambda: [a @ b for a, b in gemms]}
    mode = "queued" if options.device == "cuda" else common.DEFAULT_MODE
    seconds = common.times(common.clock(options.device, **common.MODES[mode]), runs, options.repeats)
    return {
        "mode": mode,
        "time_us": round(seconds["ours"] * 1e6, 1),
        "tflops": round(6 * T * (K + 1) * D * hidden / seconds["ours"] / 1e12, 4),
        "dense_ratio": common.ratio(seconds, "dense"),
        "ratio_to_apart": common.ratio(seconds, "apart"),
        "apart_bits": "same" if torch.equal(outs["joined"], outs["apart"]) else "other",
        "max_rel_error": checked,
    }


# --- system 5: one kernel for all ---------------------------------------------------------------------


MODES = (
    (
        "gate only, gelu",
        "--gate-only --activation gelu --format int8,fp8 --compute codes,int8,int8_smooth,fp8",
    ),
    ("gate only, silu", "--gate-only --activation silu"),
    ("gate and up, gelu", "--activation gelu"),
    ("gate and up, silu", "--activation silu --format int8,fp8 --compute codes,int8,int8_smooth,fp8"),
)


def one_kernel_sizes(shape: str) -> common.Sizes:
    return common.layer_sizes("ck-default" if shape == OWN else shape)


def modes(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    sizes = one_kernel_sizes(shape)
    for name, flags in MODES:
        asked = f"--tokens {sizes.num_tokens} {flags}"
        yield from named(name, by(bench_decode, asked, text_of(sizes), dtype, options))


def local_tokens(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    sizes = one_kernel_sizes(shape)
    tokens = sizes.num_tokens
    local = LOCAL_TOKENS if shape == OWN else f"1,{tokens}"
    flags = f"--tokens {tokens} --gate-only --activation gelu --local-tokens {local}"
    for r in by(bench_decode, flags, text_of(sizes), dtype, options):
        yield r | {"layer": f"local tokens, {r['layer']}"}


# --- command line -------------------------------------------------------------------------------------


# The parts of a system, and the dtypes that its evaluation has
SYSTEMS = {
    1: ({"GEMM": orders, "layer": trained_layer}, ("bf16",)),
    2: ({"few rows": few_rows}, ("fp16", "bf16")),
    3: ({"layer": dispatched_layers, "stages": stages}, ("fp16",)),
    4: (
        {
            "GEMM": static_gemm,
            "gather": gathers,
            "order of experts": expert_orders,
            "layer": static_layers,
            "shared expert": shared_experts,
        },
        ("bf16",),
    ),
    5: ({"modes": modes, "local tokens": local_tokens}, ("bf16",)),
}
PROFILED = {1: profiled_orders, 2: profiled_few_rows}


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    shapes, dtypes = options.shape or [OWN], options.dtype
    common.start(options)
    options.shape, options.dtype = shapes, dtypes or ["fp16", "bf16"]

    def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
        for number in options.system or SYSTEMS:
            parts, own = SYSTEMS[number]
            if options.profiled and number in PROFILED:
                PROFILED[number](shape, dtype, options)
            elif not options.profiled and (dtypes or dtype in own):
                for part in (part for name, part in parts.items() if options.part in (None, name)):
                    yield from (r | {"system": number} for r in part(shape, dtype, options))

    common.report(options, measure)


if __name__ == "__main__":
    main()
