"""Times a layer's experts on few tokens, as in decoding, against the time of reading their weights once.

    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1,8,64,512 --json out.json --plot out.png
    python benchmarks/bench_decode.py --shape mixtral-8x7b --peers torch,vllm,vllm-invariant
    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1 --eager --routing zipf:1.2
    python benchmarks/bench_decode.py --shape mixtral-8x7b --shape deepseek-v3 --tokens 512 --roofline out.png
    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1,8,64 --format fp8_block,int4,mxfp4
    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1,8,64 --format int4 --peers marlin,humming
    python benchmarks/bench_decode.py --shape mixtral-8x7b --tokens 1,8 --format fp8_block --compute codes,fp8
    python benchmarks/bench_decode.py --shape ck-default --tokens 128 --local-tokens 1,16,64,128

Calls alternate between the weights of several layers, each with its own routing, so that a call reads its
weights from memory, as a decode step of a deep model does. On a GPU all calls are one CUDA graph; with
--eager the host makes them one by one. floor_us: the experts that have tokens, at the rate of a kernel that
only reads, or the dense GEMM of equal FLOPs, where that takes longer and does more than read; both in the
same run. floor_ratio is floor_us over our time; torch_ratio and ratio_to_PEER are the peer's time over ours;
launches and host_us are of one eager call.

vllm is the Triton path of vLLM, if that is installed (0.33), with the tile that it has tuned for the shape or
its default; vllm-invariant has the tile of its batch-invariant mode. All of a peer's kernels count, from
sorting the chosen experts to the sum over them.

--format adds a record for each format of quantised weights (bench decode_quantised). ratio_to_bf16, or the
other dtype in its place, is the time with float weights over the time with the format; the two take turns.
bytes are those of a layer's weights, and floor_us counts the format's. int4 has groups of 128, or of 32 where
a width is no multiple of 128.
Peers of quantised weights, in turns with ours and with the same codes: marlin, of vLLM, for int4, mxfp4 and
fp8_block (whose scales it rounds to 16 bits); vllm, its Triton kernel, for fp8_block, whose activations are
of 8 bits, too; humming, the GEMMs that humming-kernels compiles (0.1.19), for int4, int8, mxfp4 and fp8_block
(its scales again of 16 bits), and humming-grouped, on copied rows. Their ratio_to_PEER and peer_errors are in
the format's record; a peer whose error is too large is not timed.

--compute computes each format in several ways, in turns, with a record for each: codes multiplies 16-bit
activations by the weights' values, the others multiply 8-bit activations by their codes. ratio_to_codes is
the time of that way over this one's. Each way has layers of its own in memory.

--local-tokens times nothing else: batches of --tokens of which so many are own (bench decode_local), with
float weights and each format; local_tokens.py says how.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import bench_quantised
import common
import local_tokens
import profiling
import torch
from common import MIB
from decode_case import Case, Setup, Weights, clock_of
from torch import Tensor

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"
SHAPES = ("qwen3-30b", "mixtral-8x7b", *common.FEW_TOKENS, *common.MODELS)  # by default, on a GPU
# Composable Kernel's default has 128 tokens and no up projection.
CK_TOKENS, CK_SETTINGS = [128], common.Settings("gelu", gated=False)
PEERS = ("torch", "loop", "vllm", "vllm-invariant", "marlin", "humming", "humming-grouped")


# --- flags --------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    add = flags.add_argument
    add("--tokens", type=counts, metavar="A,B,..", help="default: powers of two up to 4096")
    add("--local-tokens", type=counts, metavar="A,B,..", help="own tokens of a batch, the others are padding")
    given = "in place of the shape's E; likewise --top-k K, --dim D, --hidden-dim F"
    add("--experts", type=int, metavar="E", help=given)
    for flag in ("--top-k", "--dim", "--hidden-dim"):
        add(flag, type=int, help=argparse.SUPPRESS)
    add("--tp", type=int, default=1, metavar="RANKS", help="that share each expert: F is divided by it")
    add("--stride", type=int, metavar="N", help="elements from a row of x to the next; default: D")
    names = "silu gelu gelu_tanh relu swiglu_clamped swiglu_limited relu2 situ".split()
    add("--activation", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--gate-only", action="store_true", help="plain experts, without w3: a = act(x w1)")
    inits, orders = ("normal", "uniform", "zeros"), ("linear", "grouped", "column")
    add("--init", choices=inits, default="normal", metavar="NAME", help=f"of weights: {', '.join(inits)}")
    add("--seed", type=int, default=0)
    add("--warmup", type=int, metavar="N", help="untimed runs first; default: 1 on the CPU, 3 on a GPU")
    add("--order", choices=orders, metavar="NAME", help="of an expert's tiles: linear, grouped or column")
    add("--eager", action="store_true", help="single calls of the host, no CUDA graph")
    add("--peers", metavar="A,B,..", help=f"of {','.join(PEERS)}")
    formats, computes = bench_quantised.FORMATS, bench_quantised.COMPUTE
    add(
        "--format",
        type=bench_quantised.formats,
        default=[],
        metavar="A,B,..",
        help=f"of quantised weights: {', '.join(formats)}",
    )
    add(
        "--compute",
        type=bench_quantised.computes,
        default=["codes"],
        metavar="A,B,..",
        help=f"of each format, those that it has: {', '.join(computes)}",
    )
    add("--validate", action="store_true", help="only check the results, time nothing")
    add("--list-kernels", action="store_true", help="only list kernels: launches and µs of a call")
    add("--plot", type=Path, metavar="FILE", help="picture of latency over tokens")
    add("--roofline", type=Path, metavar="FILE", help="picture of the GEMMs, gate and up fused and apart")
    return flags.parse_args(argv)


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of tokens, found {text}")
    return numbers


def resized(shape: str, options: argparse.Namespace) -> str:
    """The shape with the flags' sizes: its own name if they change nothing."""
    sizes = common.layer_sizes(shape)
    asked = {"num_experts": options.experts, "top_k": options.top_k, "dim": options.dim}
    asked["hidden_dim"] = options.hidden_dim
    new = sizes._replace(**{name: size for name, size in asked.items() if size is not None})
    if options.tp < 1 or new.hidden_dim % options.tp:
        raise SystemExit(f"--tp: expected a divisor of F = {new.hidden_dim}, found {options.tp}")
    new = new._replace(hidden_dim=new.hidden_dim // options.tp)
    if min(new) < 1 or new.top_k > new.num_experts:
        raise SystemExit(f"expected E, K, D, F >= 1 and K <= E, found {new}")
    return shape if new == sizes else ",".join(map(str, new))


# --- experts ------------------------------------------------------------------------------------------


def find_experts(setup: Setup, asked: str | None) -> dict[str, Callable]:
    """Functions of x, Weights, scores and ids: ours and the peers'. A peer that cannot run is named."""
    import peers

    import fused_moe

    def separate(experts: Callable) -> Callable:
        return lambda x, w, *routed: experts(x, w.w1, w.w2, w.w3, *routed, activation=setup.activation)

    def stacked(invariant: bool) -> Callable:
        experts = peers.vllm_experts(setup.activation, gated=setup.gated, invariant=invariant)
        if setup.device != "cuda":
            raise peers.Unavailable("vllm: expected a GPU")
        return lambda x, w, *routed: experts(x.contiguous(), w.w13, w.w2, *routed)

    makers = {
        "torch": lambda: separate(peers.torch_experts),
        "loop": lambda: separate(fused_moe.reference.fused_experts),
        "vllm": lambda: stacked(invariant=False),
        "vllm-invariant": lambda: stacked(invariant=True),
    }
    only_quantised = set(peers.QUANTISED_PEERS) - set(makers)
    usual = {"torch": common.has_grouped_mm(setup.device, setup.dtype), "loop": setup.device == "cpu"}
    names = [name for name in usual if usual[name]] if asked is None else asked.split(",")
    experts = {"ours": separate(fused_moe.fused_experts)}
    for name in filter(None, names):
        if name in only_quantised:
            continue
        if name not in makers:
            raise SystemExit(f"--peers: expected some of {', '.join(PEERS)}, found {name}")
        try:
            experts[name.replace("-", "_")] = makers[name]()
        except peers.Unavailable as reason:
            print(f"{name} is left out: {reason}", flush=True)
    return experts


def find_quantised_peers(setup: Setup, asked: str | None, format: str) -> dict:
    """The peers asked for that take the format. One that cannot run here is named."""
    import peers

    found = {}
    for name in (name for name in (asked or "").split(",") if name in peers.QUANTISED_PEERS):
        try:
            peer = peers.QUANTISED_PEERS[name](format, setup.activation, gated=setup.gated)
            if setup.device != "cuda":
                raise peers.Unavailable(f"{name}: expected a GPU")
            found[name.replace("-", "_")] = peer
        except peers.Unavailable as reason:
            print(f"{name} is left out of {format}: {reason}", flush=True)
    return found


def checked(case: Case, experts: dict[str, Callable], title: str) -> dict[str, float]:
    """The error of each; of those only that are right. Ours must be."""
    errors = {}
    for name, fn in experts.items():
        try:
            errors[name] = case.error(fn).check(f"{title} {name}", case.setup.dtype)
        except (Exception, SystemExit) as reason:  # a peer may fail in any way; the others still run
            if name == "ours":
                raise
            print(f"{title}: {name} is left out: {reason}", flush=True)
    return errors


# --- measuring ----------------------------------------------------------------------------------------


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    on_gpu, is_ck = options.device == "cuda", shape == "ck-default"
    usual = CK_SETTINGS if is_ck else common.layer_settings(shape)
    activation, gated = options.activation or usual.activation, usual.gated and not options.gate_only
    about = (activation, gated, options.init, options.seed, options.stride)
    setup = Setup(options.routing, dtype, options.device, *about)
    experts = find_experts(setup, options.peers)
    captured = on_gpu and not (options.eager or options.validate or options.list_kernels)
    if captured and "loop" in experts:
        raise SystemExit("--peers loop: expected --eager, since the loop reads counts on the host")
    if options.list_kernels and not on_gpu:
        raise SystemExit("--list-kernels: expected a GPU")
    source = torch.ones((1024 if on_gpu else 64) * MIB // 4, device=options.device)
    shape = resized(shape, options)
    sizes = common.layer_sizes(shape)
    variants = {name: variants_of(name, options.compute, sizes) for name in options.format}
    for tokens in options.tokens or (CK_TOKENS if is_ck else counts(TOKENS)):
        case = Case(common.layer_sizes(shape)._replace(num_tokens=tokens), setup)
        errors = checked(case, experts, f"{shape}, {tokens} tokens")
        right = {name: fn for name, fn in experts.items() if name in errors}
        key = {"shape": shape, "routing": options.routing, "dtype": dtype, "tokens": tokens} | setup.unusual
        if options.validate:
            print(
                f"{shape}, {tokens} tokens:", ", ".join(f"{n} {e:.1e}" for n, e in errors.items()), flush=True
            )
        elif options.list_kernels:
            list_kernels(case, right, f"{shape}, {tokens} tokens")
        elif options.local_tokens:
            for variant in (None, *chain(*variants.values())):
                for measured in local_tokens.measure(case, experts["ours"], variant, options):
                    yield common.record(options, bench="decode_local", **key, **measured)
        elif options.roofline:
            import decode_roofline

            for measured in decode_roofline.measure(case, source, clock_of(options), options):
                yield common.record(options, bench="decode_kernels", **key, **measured)
        else:
            measured = time_case(case, right, source, options) | {"max_rel_error": errors["ours"]}
            yield common.record(options, bench="decode", what="experts", **key, **measured)
            for of_format in variants.values():
                for measured in time_format(case, experts["ours"], of_format, source, options):
                    yield common.record(options, bench="decode_quantised", **key, **measured)
        del case  # before the next one's weights


def time_case(case: Case, experts: dict[str, Callable], source: Tensor, options: argparse.Namespace) -> dict:
    """What a record has of one number of tokens."""
    on_gpu, number = options.device == "cuda", len(case.routings)
    eager = options.eager or not on_gpu
    calls = {name: partial(case.run, fn) for name, fn in experts.items()}
    runs = {name: call if eager else common.as_graph(call) for name, call in calls.items()}
    seconds = common.times(clock_of(options), runs | roofs(case, source, eager), options.repeats)
    ours = seconds["ours"] / number
    return {
        "mode": common.DEFAULT_MODE if eager else "graph",
        "time_us": round(ours * 1e6, 1),
        "tflops": round(case.flops_of_a_call / ours / 1e12, 4),
        "torch_ratio": common.ratio(seconds, "torch"),
        "intensity": round(case.flops_of_a_call / case.bytes_of_a_call, 1),
        **floor_of(case, case.bytes_of_a_call, source, seconds, ours),
        **{
            f"ratio_to_{name}": common.ratio(seconds, name)
            for name in experts
            if name not in ("ours", "torch")
        },
        **(on_host(calls, number) if on_gpu else {}),
    }


def roofs(case: Case, source: Tensor, eager: bool) -> dict[str, Callable]:
    """A dense GEMM of a call's FLOPs, and a kernel that only reads."""
    return {"dense": case.dense if eager else common.as_graph(case.dense), "read": source.sum}


def floor_of(case: Case, size: float, source: Tensor, seconds: dict, ours: float) -> dict:
    """The least time of a call that reads `size` bytes of weights: that of reading them, or that of the dense
    GEMM. With few rows the GEMM only reads its operands, which have fewer bytes in a format: it takes less
    than twice the time of reading them."""
    read = seconds["read"] / source.nbytes
    only_reads = seconds["dense"] < 2 * read * sum(b.nbytes for _, b in case.dense_gemms)
    floor = max(size * read, 0 if only_reads else seconds["dense"])
    return common.of_floor(floor, ours) | {"read_gb_per_s": round(source.nbytes / seconds["read"] / 1e9, 1)}


def variants_of(format: str, computes: list[str], sizes: common.Sizes) -> list[bench_quantised.Variant]:
    """For each of `computes` that the format has its first variant that the widths take."""
    every = [v for v in bench_quantised.VARIANTS if v.format == format]
    known = dict.fromkeys(v.compute for v in every)
    found = []
    for name in (name for name in computes if name in known):
        variants = [v for v in every if v.compute == name]
        reasons = [bench_quantised.misfit(variant, sizes) for variant in variants]
        if None not in reasons:
            raise SystemExit(f"--format {format}: {reasons[-1]}")
        found.append(variants[reasons.index(None)])
    if not found:
        expected = f"some of {', '.join(known)} with --format {format}"
        raise SystemExit(f"--compute: expected {expected}, found {','.join(computes)}")
    return found


def time_format(
    case: Case,
    ours: Callable,
    variants: list[bench_quantised.Variant],
    source: Tensor,
    options: argparse.Namespace,
) -> Iterator[dict]:
    """What records have of one format, computed in some ways. Its layers are freed before the next format's:
    they take memory."""
    dtype, number = case.setup.dtype, len(case.routings)
    eager = options.eager or options.device != "cuda"
    layers, errors, calls = {}, {}, {"float": partial(case.run, ours)}
    for v in variants:
        layers[v.compute] = of_mode = [case.weights[0].quantised(v)]
        errors[v.compute] = case.error(ours, of_mode[0]).check(v.name, dtype, v.bound)  # takes memory, too
        of_mode += [weights.quantised(v) for weights in case.weights[1:]]
        calls[v.compute] = partial(case.run, ours, of_mode)
    first, peer_errors = variants[0], {}
    for name, peer in find_quantised_peers(case.setup, options.peers, first.format).items():
        try:
            title = f"{first.name} {name}"
            converted, peer_errors[name] = convert_for(peer, case, layers[first.compute], title)
        except (Exception, SystemExit) as reason:  # a peer may fail in any way; ours still runs
            print(f"{first.name}: {name} is left out: {reason}", flush=True)
        else:
            calls[name] = partial(case.run, converted_experts(peer), converted)
    runs = calls if eager else {name: common.as_graph(call) for name, call in calls.items()}
    seconds = common.times(clock_of(options), runs | roofs(case, source, eager), options.repeats)
    touched = case.bytes_of_a_call / case.expert_bytes  # experts
    for v in variants:
        taken = seconds[v.compute] / number
        stored = bench_quantised.storage([w for w in layers[v.compute][0] if w is not None])
        others = {dtype: "float"} | {name: name for name in (*layers, *peer_errors) if name != v.compute}
        yield {
            "mode": common.DEFAULT_MODE if eager else "graph",
            "what": v.name,
            "format": v.format,
            **v.options,
            "time_us": round(taken * 1e6, 1),
            "tflops": round(case.flops_of_a_call / taken / 1e12, 4),
            **floor_of(case, touched * stored["bytes"] / case.sizes.num_experts, source, seconds, taken),
            **{
                f"ratio_to_{name}": round(seconds[other] / seconds[v.compute], 3)
                for name, other in others.items()
            },
            **stored,
            "max_rel_error": errors[v.compute],
            "peer_errors": peer_errors,
        }


def converted_experts(peer) -> Callable:
    """As ours, a function of x, weights, scores and ids. Peers take no strided x."""
    return lambda x, weights, *routed: peer.experts(x.contiguous(), weights, *routed)


def convert_for(peer, case: Case, layers: list[Weights], title: str) -> tuple[list, float]:
    """The layers as the peer takes them, and its error, which is small enough."""
    converted = [peer.convert(w.w1, w.w2, w.w3) for w in layers]
    experts = converted_experts(peer)
    error = case.error(lambda x, _, *routed: experts(x, converted[0], *routed), layers[0])
    return converted, error.check(title, case.setup.dtype, peer.bound)


def on_host(calls: dict[str, Callable[[], None]], number: int) -> dict:
    """Launches and the host's microseconds of a call of ours, and of each peer's, made one by one."""
    launches = {name: len(profiling.launches(call, steps=1)) / number for name, call in calls.items()}
    us = {name: host_seconds(call) / number * 1e6 for name, call in calls.items()}
    return {
        "launches": round(launches.pop("ours"), 2),
        "host_us": round(us.pop("ours"), 1),
        "peer_launches": {name: round(found, 2) for name, found in launches.items()},
        "peer_host_us": {name: round(found, 1) for name, found in us.items()},
    }


def host_seconds(run: Callable[[], None]) -> float:
    """How long the host takes to queue all calls."""
    torch.cuda.synchronize()
    torch.cuda._sleep(profiling.LEAD)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def list_kernels(case: Case, experts: dict[str, Callable], title: str) -> None:
    """Prints every kernel's launches and microseconds of a call, the longest first."""
    for name, fn in experts.items():
        launches = profiling.launches(partial(case.run, fn), steps=1)
        times, us, calls = Counter(), Counter(), len(case.routings)
        for launch in launches:
            times[launch.name] += 1
            us[launch.name] += launch.us
        print(f"{title}, {name}: {len(launches) / calls:g} launches, {us.total() / calls:.1f} µs")
        for kernel, total in us.most_common():
            print(f"  {times[kernel] / calls:6.2f} {total / calls:8.1f} µs  {kernel[:120]}", flush=True)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    asked = options.shape
    common.start(options)
    common.set_schedule(options, order=options.order)
    if not asked and options.device == "cuda":
        options.shape = list(SHAPES)
    records = common.report(options, measure)
    if records and options.plot and not options.roofline:
        import plot

        plot.decode(records, options.plot)
    if records and options.roofline:
        import decode_roofline

        decode_roofline.draw(records, options.roofline)


if __name__ == "__main__":
    main()
