"""Times forward and backward of a layer's experts in FP8 training, beside bf16 and SonicMoE.

    python benchmarks/bench_fp8_training.py --shape mixtral-8x7b --json out.json
    python benchmarks/bench_fp8_training.py --quick --peers sonicmoe --parts
    python benchmarks/bench_fp8_training.py --quick --shape olmoe --tokens 512,1024,2048,4096,8192,16384

Without --shape, all of shapes.json whose D and F are multiples of 128. Weights are separate; x, scores, w1,
w3 and w2 get gradients, which are dropped after each step. All ways are timed in turns, in one run; on a GPU
several steps are queued behind a long kernel, so the host's time does not count. The router is not in it.

A record is one way:

    experts                   bf16, the usual experts
    fp8                       weights quantised in every step, all GEMMs in FP8
    fp8, every 8th            a step with given codes, plus an eighth of quantise_us, which is timed apart
    fp8, wgrad bf16           as both above, with weight gradients of 16 bits
    fp8, wgrad bf16, every 8th

ratio_to_bf16 is the time of experts over its own: above 1, the way is faster. auto_wgrad is what
fp8_wgrad="auto" takes here. FLOPs: 18TKDF, two thirds of it without a gate. dense_ratio is the time of
cuBLAS on as many FLOPs over its own: GEMMs of the layer in bf16 for experts, else forward's alone, thrice, in
e4m3 with one scale per operand. Errors are norm-relative to float64, of out, dx and dscores on some tokens,
and of the weights' gradients of the first expert and the largest.

Memory is beyond inputs and parameters. peak_mib is a step's, with its gradients and copies_mib: those are the
codes, kept from step to step by a way that quantises every 8th, else freed in the step. activation_mib is
what forward leaves for backward, given codes not counted; codes that a step has made are, as far as backward
reads them. joules are a step's, of the board's energy counter over half a second; None without NVML.

--peers: of peers.py, whole layers with their routers. So ratio_to_sonicmoe is its time over the way's plus
router_us: that is our router, forward and backward, timed in the same run. time_us_, joules_, activation_mib_
and peak_mib_sonicmoe are its layer's.

--parts adds a record of each operator of a step, bench fp8_training_parts, on that step's own tensors:
TFLOP/s of those with GEMMs, GB/s of quantising, all bytes read and written once. layer is the way.

--quick: 3 repeats of 3 steps behind a shorter kernel, and no joules. A shape that fails is named; the others
still run.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import bench_decode
import bench_layer
import common
import profiling
import torch
from common import MIB
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

EVERY = 8  # steps for which codes serve
BLOCK = 128  # what D and F are multiples of
DENSE, DENSE_FP8 = "dense", "dense, fp8"
UNMETERED = ("router", DENSE, DENSE_FP8)
CHECKED_TOKENS = 32
BOUND = 0.15  # of right results' errors in FP8. A wrong scale is off by more.
QUICK = {"lead": 20_000_000, "calls": 3}
QUICK_REPEATS = 3


class Way(NamedTuple):
    """How experts are trained. fp8_wgrad None: not in FP8."""

    fp8_wgrad: str | None = None
    quantised_every: int | None = None

    @property
    def name(self) -> str:
        if self.fp8_wgrad is None:
            return "experts"
        wgrad = "" if self.fp8_wgrad == "fp8" else f", wgrad {self.fp8_wgrad}"
        return f"fp8{wgrad}" + ("" if self.quantised_every == 1 else f", every {self.quantised_every}th")


USUAL = Way()
WAYS = (USUAL, *(Way(wgrad, every) for wgrad in ("fp8", "bf16") for every in (1, EVERY)))


# --- flags --------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    add = flags.add_argument
    add("--tokens", type=bench_decode.counts, metavar="A,B,..", help="default: the shape's")
    add("--peers", default="", metavar="A,B,..", help="of peers.py")
    add("--parts", action="store_true", help="each operator of a step, too")
    add("--quick", action="store_true", help="few repeats, no joules")
    options = flags.parse_args(argv)
    options.peers = [name for name in options.peers.split(",") if name]
    options.dtype = options.dtype or ["bf16"]
    if "fp16" in options.dtype:
        flags.error("--dtype: expected bf16, or fp32 on the CPU, found fp16")
    if options.quick:
        options.repeats = options.repeats or QUICK_REPEATS
    options.failed = []
    return options


def misfit(sizes: common.Sizes) -> str | None:
    """Why FP8 does not train this layer."""
    wrong = [f"{name} = {n}" for name, n in (("D", sizes.dim), ("F", sizes.hidden_dim)) if n % BLOCK]
    return f"expected multiples of {BLOCK}, found {', '.join(wrong)}" if wrong else None


# --- a step -------------------------------------------------------------------------------------------


class Case:
    """A layer's experts and their input. `layer` is bench_layer's, with the same parameters and routing."""

    def __init__(self, sizes: common.Sizes, settings: common.Settings, dtype: str, options):
        self.layer = layer = bench_layer.Case(sizes, options.routing, dtype, options.device, settings)
        layer.dense_gemms = None  # some GiB: made when they are timed
        self.sizes, self.settings, self.device = sizes, settings, options.device
        self.x, self.dout = layer.x, layer.dout
        with torch.no_grad():
            scores, self.ids, _ = layer.ours.router(self.x, None)
        self.scores = scores.detach().requires_grad_()
        self.weights = {n: w for n in ("w1", "w3", "w2") if (w := getattr(layer.ours.experts, n)) is not None}
        self.inputs = {"dx": self.x, "dscores": self.scores} | {f"d{n}": w for n, w in self.weights.items()}

    @property
    def all_weights(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.weights["w1"], self.weights["w2"], self.weights.get("w3")

    def quantise(self):
        import fused_moe

        return fused_moe.fp8_weights(*self.all_weights)

    def forward(self, wgrad: str | None, codes) -> Tensor:
        """codes: what `quantise` made, or True, which makes them in the call."""
        import fused_moe

        options = {} if wgrad is None else {"fp8": codes, "fp8_wgrad": wgrad}
        activation = self.settings.activation
        return fused_moe.fused_experts(
            self.x, *self.all_weights, self.scores, self.ids, activation=activation, **options
        )

    def step(self, wgrad: str | None, codes=True) -> dict[str, Tensor]:
        out = self.forward(wgrad, codes)
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.dout)
        return {"out": out.detach(), **dict(zip(self.inputs, grads, strict=True))}

    def router(self) -> None:
        """Forward and backward of the router, and the sum of both gradients of x."""
        ours = self.layer.ours.router
        scores, *_ = ours(self.x, None)
        outputs = (scores, self.x.view_as(self.x))
        torch.autograd.grad(outputs, (self.x, ours.gate.weight), (self.scores.detach(), self.dout))

    def peer(self, layer: torch.nn.Module) -> None:
        layer(self.x).backward(self.dout)
        self.layer.clear_grads(layer)

    def dense(self) -> dict[str, Callable]:
        """Dense GEMMs of a step's FLOPs, by the dtype of the ways that they bound."""
        layer = self.layer
        gemms = common.dense_gemms(
            self.sizes, gated=self.settings.gated, device=self.device, dtype=self.x.dtype
        )
        layer.dense_gemms, forward = gemms, common.dense_in_8_bits(gemms)
        return {
            DENSE: partial(layer.dense, "forward_backward"),
            DENSE_FP8: lambda: [forward() for _ in range(3)],
        }

    def memory(self, way: Way) -> dict[str, float]:
        """MiB of one step, beyond inputs and parameters."""
        if self.device != "cuda":
            return {}
        gc.collect()  # what a way before has left in cycles would be freed meanwhile
        given, before = (way.quantised_every or 1) > 1, torch.cuda.memory_allocated()
        codes = self.quantise() if given else True
        torch.cuda.reset_peak_memory_stats()
        after_codes = torch.cuda.memory_allocated()
        out = self.forward(way.fp8_wgrad, codes)
        saved = torch.cuda.memory_allocated() - after_codes - out.nbytes  # out is the next layer's input
        grads = torch.autograd.grad(out, list(self.inputs.values()), self.dout)
        peak = torch.cuda.max_memory_allocated() - before
        del grads
        return {"activation_mib": round(saved / MIB, 1), "peak_mib": round(peak / MIB, 1)}


# --- errors -------------------------------------------------------------------------------------------


class Exact:
    """Parts of a step's results in float64."""

    def __init__(self, case: Case):
        (T, E, K, D, _), of_rows, ids = case.sizes, case.layer.exact_rows, case.ids.cpu()
        device, scores = case.device, case.scores.detach()
        tokens = torch.linspace(0, T - 1, min(T, CHECKED_TOKENS)).long()
        out, dx = (torch.zeros(tokens.numel(), D, dtype=torch.float64, device=device) for _ in range(2))
        dscores = torch.zeros(tokens.numel(), K, dtype=torch.float64, device=device)
        for expert in ids[tokens].unique().tolist():
            index, slot = (ids[tokens] == expert).nonzero(as_tuple=True)
            token, index, slot = (t.to(device) for t in (tokens[index], index, slot))
            some_out, some_dx, dscores[index, slot], *_ = of_rows(expert, token, scores[token, slot])
            out.index_add_(0, index, some_out)
            dx.index_add_(0, index, some_dx)
        self.tokens = tokens.to(device)
        self.parts = {"out": [out], "dx": [dx], "dscores": [dscores]}
        counts = ids.flatten().long().bincount(minlength=E)
        self.experts = sorted({0, int(counts.argmax())})
        names = [f"d{name}" for name in ("w1", "w2", "w3") if name in case.weights]
        for expert in self.experts:
            token, slot = (t.to(device) for t in (ids == expert).nonzero(as_tuple=True))
            _, _, _, *dw = of_rows(expert, token, scores[token, slot])
            for name, exact in zip(names, dw, strict=True):
                self.parts.setdefault(name, []).append(exact)

    def errors(self, found: dict[str, Tensor]) -> common.Error:
        error = common.Error()
        for name, exact in self.parts.items():
            if name.startswith("dw"):
                parts = [found[name][expert] for expert in self.experts]
            else:
                parts = [found[name][self.tokens]]
            for part, right in zip(parts, exact, strict=True):
                error.add(name, part, right)
        return error


def checked(case: Case, title: str, dtype: str) -> dict[str | None, tuple[dict, float]]:
    """Each error, and the largest, of both ways to compute weight gradients and of float experts."""
    exact, errors = Exact(case), {}
    for wgrad in dict.fromkeys(way.fp8_wgrad for way in WAYS):
        error = exact.errors(case.step(wgrad))
        name = Way(wgrad, 1).name
        errors[wgrad] = error.each(), error.check(f"{title}, {name}", dtype, wgrad and BOUND)
    return errors


# --- measuring ----------------------------------------------------------------------------------------


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    sizes, settings = common.layer_sizes(shape), common.layer_settings(shape)
    if reason := misfit(sizes):
        print(f"{shape} is left out: {reason}", flush=True)
        return
    for tokens in options.tokens or [sizes.num_tokens]:
        title = f"{shape}, {tokens} tokens"
        try:
            yield from time_case(sizes._replace(num_tokens=tokens), settings, title, shape, dtype, options)
        except (RuntimeError, SystemExit) as reason:  # memory, a GPU without FP8, a wrong result
            said = (str(reason).splitlines() or [type(reason).__name__])[0]
            options.failed.append(said if said.startswith(title) else f"{title}: {said}")
            print(f"failed: {options.failed[-1]}", flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def time_case(
    sizes: common.Sizes,
    settings: common.Settings,
    title: str,
    shape: str,
    dtype: str,
    options: argparse.Namespace,
) -> Iterator[dict]:
    from fused_moe.fp8 import wgrad_pays

    on_gpu, case = options.device == "cuda", Case(sizes, settings, dtype, options)
    auto_wgrad = "fp8" if wgrad_pays(case.ids.numel(), sizes.num_experts) else "bf16"
    errors = checked(case, title, dtype)
    gc.collect()
    memory = {way: case.memory(way) for way in WAYS}
    peers = bench_layer.checked_peers(case.layer, options.peers)
    peer_memory = {}
    for name, peer in peers.items():
        case.layer.clear_grads(case.layer.ours)
        peer_memory[name] = case.layer.memory(peer)
        case.layer.clear_grads(peer)
    case.layer.clear_grads(case.layer.ours)

    codes = case.quantise()
    runs: dict[object, Callable] = {"quantise": case.quantise}
    for way in WAYS:
        given = (way.quantised_every or 1) > 1
        runs[way] = partial(case.step, way.fp8_wgrad, codes if given else True)
    runs |= {name: partial(case.peer, peer) for name, peer in peers.items()}
    if peers:
        runs["router"] = case.router
    if on_gpu:
        runs |= case.dense()
    clock = timer(options)
    seconds = common.times(clock, runs, options.repeats)
    joules = dict.fromkeys(runs)
    if on_gpu and not options.quick:
        joules = {name: profiling.joules(run) for name, run in runs.items() if name not in UNMETERED}
    for way in WAYS:
        if (way.quantised_every or 1) > 1:  # its share
            seconds[way] += seconds["quantise"] / way.quantised_every
            if joules[way] is not None:
                joules[way] += joules["quantise"] / way.quantised_every

    about = {
        "shape": shape,
        "routing": options.routing,
        "mode": "queued" if on_gpu else common.DEFAULT_MODE,
        "dtype": dtype,
        "tokens": sizes.num_tokens,
    }
    for way in WAYS:
        taken, (each, worst) = seconds[way], errors[way.fp8_wgrad]
        measured = {
            "what": way.name,
            "time_us": round(taken * 1e6, 1),
            "tflops": round(case.layer.flops("forward_backward") / taken / 1e12, 4),
            "max_rel_error": worst,
            "errors": {name: float(f"{error:.3g}") for name, error in each.items()},
            "joules": None if joules[way] is None else round(joules[way], 4),
            **memory[way],
        }
        if on_gpu:
            dense = DENSE if way == USUAL else DENSE_FP8
            measured["dense_ratio"] = round(seconds[dense] / taken, 3)
        if way != USUAL:
            measured |= way._asdict() | {
                f"ratio_to_{dtype}": round(seconds[USUAL] / taken, 3),
                "quantise_us": round(seconds["quantise"] * 1e6, 1),
                "copies_mib": round(codes.nbytes / MIB, 1),
                "auto_wgrad": auto_wgrad,
            }
        for name, peer in peers.items():
            saved, peak = peer_memory[name]
            layer_taken = taken + seconds["router"]
            measured |= {
                f"ratio_to_{name}": round(seconds[name] / layer_taken, 3),
                f"time_us_{name}": round(seconds[name] * 1e6, 1),
                f"joules_{name}": None if joules[name] is None else round(joules[name], 4),
                f"activation_mib_{name}": saved,
                f"peak_mib_{name}": peak,
                "router_us": round(seconds["router"] * 1e6, 1),
            }
            if hasattr(peer, "about"):
                measured[f"about_{name}"] = peer.about
        measured |= case.layer.settings_that_are_unusual
        yield common.record(options, bench="fp8_training", **about, **measured)
    if options.parts:
        for measured in parts(case, codes, clock, options.repeats):
            yield common.record(options, bench="fp8_training_parts", **about, **measured)


def timer(options: argparse.Namespace) -> common.CpuClock | common.CudaClock:
    if not options.quick or options.device != "cuda":
        mode = "queued" if options.device == "cuda" else common.DEFAULT_MODE
        return common.clock(options.device, **common.MODES[mode])
    clock = common.clock(options.device, **QUICK)
    clock.warm_up = 1  # all has run before
    return clock


# --- operators ----------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps the calls of our operators, forward and backward."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused_moe":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def operators(case: Case, wgrad: str | None, codes) -> dict[str, Callable]:
    """The operators of a step by name, each to be called again."""
    with Recorder() as recorder:
        if wgrad is not None:
            case.quantise()
        case.step(wgrad, codes)
    found = {}
    for func, args, kwargs in recorder.calls:
        name = func.name().removeprefix("fused_moe::").partition(".")[0]
        if name == "fp8_weight":
            is_down = args[0].data_ptr() == case.weights["w2"].data_ptr()
            name = f"quantise {'w2' if is_down else 'w1, w3' if 'w3' in case.weights else 'w1'}"
        found[name] = partial(func, *args, **kwargs)
    return found


def parts(case: Case, codes, clock, repeats: int) -> Iterator[dict]:
    T, _, K, D, hidden = case.sizes
    sides, one = case.settings.matrices - 1, 2 * T * K * D * hidden
    flops = {
        "experts_up": sides * one,
        "experts_down": one,
        "experts_down_backward": 2 * one,
        "experts_up_backward": 2 * sides * one,
        "fp8_up": sides * one,
        "fp8_down": one,
        "fp8_down_backward": 2 * one,
        "fp8_up_backward": sides * one,
        "fp8_up_weights_backward": sides * one,
    }
    of_wgrad = {"fp8_down_backward", "fp8_up_weights_backward"}
    runs, seen = {}, {"fp8_up_weights"}  # which returns zeros
    for wgrad in dict.fromkeys(way.fp8_wgrad for way in WAYS):
        for name, run in operators(case, wgrad, codes).items():
            is_new = name not in seen or (wgrad == "bf16" and name in of_wgrad)
            if is_new:  # forward is the same with all weight gradients
                runs[Way(wgrad, 1).name, name] = run
            seen.add(name)
    with torch.no_grad():
        seconds = common.times(clock, runs, repeats)
        for (layer, name), taken in ((key, seconds[key]) for key in runs):
            measured = {"layer": layer, "what": name, "time_us": round(taken * 1e6, 1)}
            if name in flops:
                measured["tflops"] = round(flops[name] / taken / 1e12, 4)
            elif name.startswith("quantise"):
                call = runs[layer, name]
                tensors = [t for t in (*call.args, *call()) if isinstance(t, Tensor)]
                measured["gb_per_s"] = round(sum(t.nbytes for t in tensors) / taken / 1e9, 1)
            yield measured


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    asked = options.shape
    common.start(options)
    if options.device == "cuda" and options.dtype != ["bf16"]:
        raise SystemExit(f"--dtype: expected bf16 on a GPU, found {', '.join(options.dtype)}")
    if not asked:
        options.shape = [shape for shape in options.shape if not misfit(common.layer_sizes(shape))]
    common.report(options, measure)
    if options.failed:
        raise SystemExit("\n".join(["failed:", *options.failed]))


if __name__ == "__main__":
    main()
