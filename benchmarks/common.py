"""What the benchmark programs share: flags, shapes, routing, timing and records.

A record is a flat dictionary, FIELDS first; fields that a program has not measured are None. A GPU's clocks
depend on its temperature, so everything that is compared is timed in one run, alternating. A ratio is
reliable within its record; a time is only that run's.

fused_moe is imported by the functions that need it, after `start`: the library reads the environment
variable behind --tier once.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPES = json.loads((HERE / "shapes.json").read_text())
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ERROR_BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
ZERO = 1e-9  # an exact tensor of this share of its terms is zero, rounded in float64
MIB = 2**20
DEFAULT_SCHEDULE = "default"  # in records; FUSED_MOE_SCHEDULE is not set
DEFAULT_MODE = "eager"  # of records that have none

# How a layer is timed: one call at a time, or several queued behind a long kernel, as in a step of many
# layers: then a GPU is never idle while the host prepares a launch.
MODES = {DEFAULT_MODE: {"lead": 500_000, "calls": 1}, "queued": {"lead": 40_000_000, "calls": 6}}

# The layers that ours is compared with, by the name in records, in words
PEERS = {
    "loop": "the loop",
    "scattermoe": "ScatterMoE",
    "sonicmoe": "SonicMoE",
    "torch": "PyTorch",
    "vllm": "vLLM",
    "vllm_invariant": "vLLM's batch-invariant tile",
    "marlin": "vLLM's Marlin",
    "humming": "Humming",
    "humming_grouped": "Humming's grouped GEMM",
    "torch_gemms": "PyTorch's grouped GEMMs alone",
    "deepgemm_gemms": "DeepGEMM's grouped GEMMs alone",
}

KEY = ("bench", "shape", "routing", "tier", "schedule", "mode", "dtype", "layer", "what", "tokens")
FIELDS = (
    *KEY,
    "time_us",
    "tflops",
    "dense_ratio",
    "torch_ratio",
    "peer",
    "peer_ratio",
    "activation_mib",
    "peak_mib",
    "max_rel_error",
)


class Sizes(NamedTuple):
    """T tokens, E experts, K experts per token, D model width, F expert hidden width."""

    num_tokens: int
    num_experts: int
    top_k: int
    dim: int
    hidden_dim: int


class Settings(NamedTuple):
    """What a layer's experts are beside their sizes."""

    activation: str = "silu"
    gated: bool = True

    @property
    def matrices(self) -> int:
        """Weights of an expert."""
        return 3 if self.gated else 2


USUAL = Settings()


# Layers that bench_decode.py times beside those of shapes.json: of DeepSeek-V3, gpt-oss, Qwen2-57B-A14B; the
# default of Composable Kernel's fused_moe example
FEW_TOKENS = {
    "deepseek-v3": Sizes(128, 256, 8, 7168, 2048),
    "gpt-oss-120b": Sizes(128, 128, 4, 2880, 2880),
    "qwen2-57b": Sizes(128, 64, 8, 3584, 2560),
    "ck-default": Sizes(128, 32, 5, 8192, 1024),
}

# This year's models in shapes.json, some of them with few rows in an expert
MODELS = (
    *("qwen3.6-35b", "qwen4-exp", "gemma4-26b", "gpt-oss-20b", "deepseek-v4-flash", "dsv4-pro-8ranks"),
    *("glm5-next", "minimax-m3", "kimi-k3-16ranks", "nemotron3-nano", "nemotron3-super", "hunyuan-v4"),
)


# --- flags --------------------------------------------------------------------------------------------


LAYER_SHAPE = "a name of benchmarks/shapes.json or T,E,K,D,F; may be repeated"


def new_parser(doc: str) -> argparse.ArgumentParser:
    """Its description is the first line of `doc`. --help has one line for the usage and, if metavar and help
    have 26 and 70 characters at most, one for each flag."""
    layout = functools.partial(argparse.HelpFormatter, max_help_position=30, width=100)
    usage, description = "%(prog)s [FLAGS]", doc.splitlines()[0]
    return argparse.ArgumentParser(usage=usage, description=description, formatter_class=layout)


def parser(doc: str, *, many_routings: bool = False, shape: str = LAYER_SHAPE) -> argparse.ArgumentParser:
    """The flags of every program that measures. The first line of `doc` is the description, `shape` the help
    of --shape."""
    routing = {"action": "append"} if many_routings else {"default": "random"}
    flags = new_parser(doc)
    add = flags.add_argument
    add("--shape", action="append", help=shape)
    add("--routing", **routing, help="random (default), balanced, worst or one, one-each, zipf:EXPONENT")
    add("--dtype", choices=DTYPES, action="append", help="may be repeated")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    tiers = ("auto", "portable", "hopper")
    add("--tier", choices=tiers, default="auto", metavar="TIER", help="CUDA kernels: portable or hopper")
    add("--repeats", type=int, metavar="N", help="default: 9 on the CPU, 20 on a GPU")
    add("--threads", type=int, metavar="N", help="default: PyTorch's own choice")
    add("--json", type=Path, metavar="FILE", help="where the records go")
    add("--append", action="store_true", help="keep the other records of that file")
    return flags


def start(options: argparse.Namespace) -> None:
    """Applies the flags that must precede the import of fused_moe, and fills in defaults."""
    os.environ["FUSED_MOE_TIER"] = options.tier
    if options.threads:
        torch.set_num_threads(options.threads)
    import fused_moe
    from fused_moe.ops import HAS_CUDA_KERNELS

    runs_on_gpu = HAS_CUDA_KERNELS and torch.cuda.is_available()
    if options.device == "cuda" and not runs_on_gpu:
        raise SystemExit(f"--device cuda: {fused_moe.info()['tiers']}")
    if options.device == "auto":
        options.device = "cuda" if runs_on_gpu else "cpu"
    on_cpu = options.device == "cpu"
    options.tier = "cpu" if on_cpu else tier_in_use(options.tier, fused_moe.info()["tiers"])
    options.routing = options.routing or ["random"]
    options.repeats = options.repeats or (9 if on_cpu else 20)
    options.dtype = options.dtype or (["fp32", "bf16"] if on_cpu else ["bf16"])
    options.shape = options.shape or [name for name in SHAPES["layers"] if name.startswith("cpu") == on_cpu]


def set_schedule(options: argparse.Namespace, **asked: str | None) -> None:
    """Sets FUSED_MOE_SCHEDULE; if nothing is asked for the environment's value stays. Call it after `start`:
    the library reads the variable once per process, and again after cuda_reset. The CPU has one schedule."""
    schedule = ",".join(f"{name}={value}" for name, value in asked.items() if value)
    if schedule and options.device == "cpu":
        raise SystemExit(f"expected --device cuda with flags of the tile schedule, found cpu with {schedule}")
    if schedule:
        os.environ["FUSED_MOE_SCHEDULE"] = schedule
        torch.ops.fused_moe.cuda_reset()


def tier_in_use(asked: str, tiers: dict[str, str]) -> str:
    if asked != "auto":
        return asked
    best_first = ("hopper", "portable")
    enabled = [name for name, state in tiers.items() if state.startswith("on")]
    return next((tier for tier in best_first if any(tier in name for name in enabled)), "auto")


# --- shapes and routing -------------------------------------------------------------------------------


def layer_sizes(shape: str) -> Sizes:
    layers = SHAPES["layers"].items()
    named = {name: Sizes(*(layer[size] for size in Sizes._fields)) for name, layer in layers} | FEW_TOKENS
    if shape in named:
        return named[shape]
    try:
        return Sizes(*map(int, shape.split(",")))
    except (TypeError, ValueError):
        raise SystemExit(f"--shape: expected T,E,K,D,F or one of {', '.join(named)}") from None


def layer_settings(shape: str) -> Settings:
    """Those of shapes.json, or the usual ones."""
    layer = SHAPES["layers"].get(shape, {})
    return Settings(**{name: layer[name] for name in Settings._fields if name in layer})


def routing_logits(routing: str, sizes: Sizes, device: str) -> Tensor:
    """Logits (T, E) with the distribution over experts that `routing` names.

    random: all experts have the same probability. balanced: counts differ by at most 1. zipf:S: probability
    falls as rank ** -S. worst, or one: all tokens go to the same K experts. one-each: so do all but one token
    of each other expert. Logits are small, so no score is denormal: denormals would slow down the arithmetic.
    """
    T, E, K, *_ = sizes
    noise = torch.randn(T, E, device=device)
    experts = torch.arange(E, device=device)
    if routing == "random":
        return noise
    if routing in ("worst", "one"):
        return noise + 16 * (experts < K)
    if routing == "one-each":  # token t has expert K + t in the place of expert t % K
        one = torch.arange(T, device=device)[:, None]
        busy = (experts < K) & ((experts != one % K) | (one >= E - K))
        return noise + 16 * (busy | (experts == K + one))
    if routing == "balanced":
        first = torch.arange(T, device=device)[:, None] * K
        return 0.5 * noise + 8 * ((experts - first) % E < K)
    if routing.startswith("zipf:"):  # the top K of log(weight) + Gumbel noise are K weighted draws
        gumbel = -torch.empty_like(noise).exponential_().log()
        return gumbel - float(routing.removeprefix("zipf:")) * (experts + 1).log()
    expected = "random, balanced, worst, one, one-each or zipf:EXPONENT"
    raise SystemExit(f"--routing: expected {expected}, found {routing}")


def tokens_and_gate(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Random x (T, D) and an orthonormal router weight (E, D) such that x @ weight.T = logits."""
    T, E = logits.shape
    if E > dim:
        raise SystemExit(f"--shape: expected at most D = {dim} experts, found {E}")
    gate = torch.linalg.qr(torch.randn(dim, E, device=logits.device)).Q.T
    x = torch.randn(T, dim, device=logits.device)
    return x + (logits - x @ gate.T) @ gate, gate


def aligned(width: int) -> int:
    """A multiple of 8 as it is; for other widths, slow or refused in GEMMs, the next multiple of 64."""
    return width if width % 8 == 0 else -(-width // 64) * 64


def dense_gemms(sizes: Sizes, *, gated: bool = True, **factory) -> list[list[Tensor]]:
    """Operands of dense GEMMs with the FLOPs of a layer's forward, of aligned widths: up and gate, down."""
    T, _, K, *widths = sizes
    D, hidden = map(aligned, widths)
    rows = T * K
    shapes = ((rows, D), (D, (1 + gated) * hidden)), ((rows, hidden), (hidden, D))
    return [[torch.randn(shape, **factory) for shape in pair] for pair in shapes]


def dense_in_8_bits(gemms: list[list[Tensor]]) -> Callable[[], list[Tensor]]:
    """The same GEMMs of e4m3 codes, with one scale per operand and fast accumulation: what cuBLAS can."""
    one = torch.ones((), device=gemms[0][0].device)
    codes = [(a.to(torch.float8_e4m3fn), b.T.contiguous().to(torch.float8_e4m3fn).T) for a, b in gemms]
    scaled = {"scale_a": one, "scale_b": one, "out_dtype": gemms[0][0].dtype, "use_fast_accum": True}
    return lambda: [torch._scaled_mm(a, b, **scaled) for a, b in codes]


# --- timing -------------------------------------------------------------------------------------------


class CpuClock:
    """Seconds of a call."""

    warm_up = 1

    def __call__(self, run: Callable) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class CudaClock:
    """Seconds per call between two events around `calls` of them; the first has a cold L2 cache.

    In a training step kernels are queued long before the GPU runs them. `lead` delays the GPU by that number
    of cycles, to the same effect. Without it the time of a short kernel includes its launch.
    """

    warm_up = 3

    def __init__(self, lead: int = 0, calls: int = 1):
        self.lead, self.calls = lead, calls
        self.flush = torch.empty(256 * MIB, dtype=torch.int8, device="cuda")

    def __call__(self, run: Callable) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        if self.lead:
            torch.cuda._sleep(self.lead)
        begin.record()
        for _ in range(self.calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.calls


def clock(device: str, lead: int = 500_000, calls: int = 1) -> CpuClock | CudaClock:
    return CudaClock(lead, calls) if device == "cuda" else CpuClock()


def times(clock: CpuClock | CudaClock, runs: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Median seconds of every run. The runs alternate, so all get the same clocks."""
    for run in runs.values():
        for _ in range(clock.warm_up):
            clock(run)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(clock(run))
    return {name: statistics.median(s) for name, s in samples.items()}


def as_graph(run: Callable) -> Callable:
    """`run` as the replay of a CUDA graph, without the gaps between its launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # one-time initialisation must not be captured
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def has_grouped_mm(device: str, dtype: str) -> bool:
    """Whether torch._grouped_mm is a single kernel on this device; otherwise it is a loop, or missing."""
    fast = device == "cuda" and dtype == "bf16" and torch.cuda.get_device_capability() >= (9, 0)
    return fast and hasattr(torch, "_grouped_mm")


# --- errors -------------------------------------------------------------------------------------------


class Error:
    """The largest norm-relative difference from exact tensors. Tensors of the same name count as one."""

    def __init__(self):
        self.squares: dict[str, list[float]] = {}

    def add(self, name: str, found: Tensor, exact: Tensor, terms: Tensor | None = None) -> None:
        """`terms`: of the size of what `exact` sums. Where all of it cancels, errors are relative to them."""
        found, exact = found.detach().double(), exact.detach().double()
        size = float(exact.square().sum())
        if terms is not None:
            terms_size = float(terms.detach().double().square().sum())
            size = terms_size if size < ZERO**2 * terms_size else size
        squares = self.squares.setdefault(name, [0.0, 0.0])
        squares[0] += float((found - exact).square().sum())
        squares[1] += size

    def add_equal(self, name: str, found: Tensor, exact: Tensor) -> None:
        """For integers, which must be equal."""
        self.squares[name] = [0.0 if torch.equal(found, exact) else torch.inf, 1.0]

    def each(self) -> dict[str, float]:
        return {name: (d / max(n, 1e-300)) ** 0.5 for name, (d, n) in self.squares.items()}

    def check(self, title: str, dtype: str, bound: float | None = None) -> float:
        """The error. Ends the program if it is too large: wrong results are not timed. bound: by default the
        dtype's."""
        bound = ERROR_BOUNDS[dtype] if bound is None else bound
        errors = self.each()
        worst = max(errors, key=errors.get)
        if not all(error < bound for error in errors.values()):
            found = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            raise SystemExit(f"{title} {dtype}: wrong before it is fast: {found}")
        return errors[worst]


# --- records ------------------------------------------------------------------------------------------


def record(options: argparse.Namespace, **measured) -> dict:
    asked = None if options.device == "cpu" else os.environ.get("FUSED_MOE_SCHEDULE")  # of CUDA kernels alone
    schedule = asked or DEFAULT_SCHEDULE
    used = {"tier": options.tier, "schedule": schedule, "mode": DEFAULT_MODE}
    return dict.fromkeys(FIELDS) | used | measured | machine(options.device)


def of_floor(floor: float, seconds: float) -> dict[str, float]:
    """The fields of a time beside its floor, both in seconds. A floor may be far below a microsecond."""
    return {"floor_us": round(floor * 1e6, 3), "floor_ratio": round(floor / seconds, 3)}


def read(*paths: Path) -> list[dict]:
    """The records of some files. Committed ones leave out what is None or usual: random routing, the default
    schedule, and the host of a GPU."""
    usual = dict.fromkeys(FIELDS) | {"routing": "random", "schedule": DEFAULT_SCHEDULE, "mode": DEFAULT_MODE}
    usual |= {"gpu": "none", "cpu": "", "threads": 0}
    return [usual | r for path in paths for r in json.loads(path.read_text())]


def schedule_of(r: dict) -> str:
    """The FUSED_MOE_SCHEDULE of a record. Older records have none: default."""
    return r.get("schedule") or DEFAULT_SCHEDULE


def mode_of(r: dict) -> str:
    """How a record was timed, one of MODES. Older records have none: eager."""
    return r.get("mode") or DEFAULT_MODE


def eager_beside_queued(records: list[dict]) -> list[dict]:
    """A record of single calls becomes a field of the same run's queued one; without one it stays."""

    def run(r: dict) -> tuple:
        others = (name for name in KEY if name != "mode")
        return tuple(r.get(name) for name in (*others, "gpu", "cpu", "torch", "commit", "date"))

    queued = {run(r): r | {"eager": None} for r in records if mode_of(r) == "queued"}
    kept = []
    for r in records:
        if mode_of(r) == DEFAULT_MODE and run(r) in queued:
            queued[run(r)]["eager"] = r
        else:
            kept.append(queued.get(run(r), r))
    return kept


def ratio(seconds: dict[str, float], name: str) -> float | None:
    """The time of `name` over the time of ours; None if it was not timed."""
    return round(seconds[name] / seconds["ours"], 3) if name in seconds else None


def machine(device: str) -> dict[str, str | int]:
    return _bf16_gemms(device) | {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": os.environ.get("COMMIT") or _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _bf16_gemms(device: str) -> dict[str, str]:
    """What runs our bfloat16 GEMMs, on a CPU."""
    if device != "cpu":
        return {}
    import fused_moe

    return {"bf16_gemms": fused_moe.info()["cpu"]["bfloat16 GEMMs"]}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor()])[0]


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def merge(old: Iterable[dict], new: Iterable[dict]) -> list[dict]:
    """Both lists. A new record replaces the old one with the same KEY."""
    by_key = {}
    for r in (*old, *new):
        whole = r | {"schedule": schedule_of(r), "mode": mode_of(r)}
        by_key[tuple(whole.get(name) for name in KEY)] = r
    return list(by_key.values())


def report(options: argparse.Namespace, measure: Callable[..., Iterable[dict]]) -> list[dict]:
    """Runs measure(shape, dtype, options) for every shape and dtype. Prints every record at once, and writes
    the file after each, so a stopped run keeps its records. Returns the records."""
    path, found = options.json, []
    old = json.loads(path.read_text()) if path and options.append and path.exists() else []
    every = ((shape, dtype) for shape in options.shape for dtype in options.dtype)
    for r in (r for shape, dtype in every for r in measure(shape, dtype, options)):
        print(line(r), flush=True)
        found.append(r)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(merge(old, found), indent=1) + "\n")
    return found


def line(r: dict) -> str:
    """A record as one line, without the fields that are None."""
    tflops = r["tflops"] or 0
    rate = f"{tflops:7.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:7.1f} GFLOP/s"
    peers = [name for name in r if name.startswith("ratio_to_")]
    parts = [
        (r.get("failed"), "failed: {}"),
        (r["tflops"], rate),
        (r.get("tokens"), "{} tokens"),
        (r.get("tokens_per_s"), "{:.1f} tokens/s"),
        (r.get("first_token_ms"), "first token after {:.1f} ms"),
        (r.get("first_token_ratio"), "{:.2f}x"),
        (r.get("floor_us"), "floor {:.0f} us"),
        (r.get("floor_ratio"), "{:.2f} of the floor"),
        (r.get("launches"), "{:g} launches"),
        (r.get("host_us"), "{:.0f} us of the host"),
        (r.get("watts"), "{:.0f} W"),
        (r.get("sm_mhz"), "{:.0f} MHz"),
        (r.get("joules"), "{:.2f} J"),
        (r.get("gb_per_s"), "{:7.0f} GB/s"),
        (r.get("extra"), "{:+.0%} over one rank"),
        (r.get("around_us"), "{:.0f} us around the experts"),
        (r.get("copies_us"), "{:.0f} us of copies"),
        (r["dense_ratio"], "{:.2f} of dense"),
        (r.get("cublas_bits"), "cuBLAS has {} bits"),
        (r.get("copy_ratio"), "{:.2f} of copy"),
        (r.get("silu_ratio"), "{:.3f} of silu"),
        (r.get("graph_us"), "{:.1f} us as a graph"),
        (r.get("over_later_us"), "{:.0f} us over a later call"),
        (r["torch_ratio"], "{:.2f}x torch"),
        *((r[name], f"{{:.2f}}x {name.removeprefix('ratio_to_')}") for name in peers),
        (r["activation_mib"], "keeps {:.0f} MiB"),
        (r["peak_mib"], "peak {:.0f} MiB"),
        (r["max_rel_error"], "error {:.1e}"),
    ]
    title = (
        f"{r['shape']:16} {r['routing']:9} {r['dtype']} {r['what']:17} {(r['time_us'] or 0) / 1e3:9.3f} ms"
    )
    said = {"schedule": DEFAULT_SCHEDULE, "mode": DEFAULT_MODE, "layer": None}
    title += "".join(f"  {r[name]}" for name, usual in said.items() if r.get(name) not in (None, usual))
    return "  ".join([title, *(text.format(value) for value, text in parts if value is not None)])
