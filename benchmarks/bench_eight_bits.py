"""Times a layer's experts in prefill with 8 bits on both operands, beside bf16 and beside 16-bit x.

    python benchmarks/bench_eight_bits.py --shape mixtral-8x7b --json out.json
    python benchmarks/bench_eight_bits.py --shape olmoe --peers vllm,torch-gemms,deepgemm-gemms
    python benchmarks/bench_eight_bits.py --shape 8192,32,6,4096,2048 --shape dsv4-pro-8ranks
    python benchmarks/bench_eight_bits.py --shape olmoe --weight-format fp8_block --scale-dtype e8m0

A way is a format of weights, how it is computed, and the dtype of scales. Without flags that name some, those
of USUAL are timed, and float weights (what "experts") always: all in turns, in one run, with the shape's own
number of tokens. On a GPU several calls are queued behind a long kernel, so the host's time does not count.
The router is not in it.

A record is one way. ratio_to_bf16, or the other dtype in its place, is the float weights' time over its own;
ratio_to_codes is that of the same format with x of 16 bits; above 1, the way is faster. error_to_float is the
output's relative difference from the float weights' output, all tokens, with Gaussian weights and x. The
output's dtype is the input's. Scales are those of x and of the hidden values; e8m0: rounded up to powers of
two, as checkpoints with scale_fmt ue8m0 expect. FLOPs: 6TKDF, two thirds of it without a gate. On Hopper
dense_ratio is to a dense GEMM of equal FLOPs in the same run, where both operands have 8 bits to
torch._scaled_mm. Its rate is that of floor_us (floors.py), too.

--peers: vllm is its Triton kernel, the whole experts in fp8_block. torch-gemms and deepgemm-gemms are two
grouped GEMMs alone (eight_bit_peers.py), on operands that are gathered and quantised already, so that their
layer would take longer. peer_errors are to the float weights' output, too, and peer_tflops count as ours.

published_tflops: what DeepGEMM has published for the forward of a whole layer on one of eight H200s, with the
exchange of tokens. Ours beside it is of the shape that is local there, and exchanges nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import bench_decode
import bench_quantised
import common
import decode_case
import floors
import torch
from bench_quantised import Variant
from torch import Tensor

SCALES = {"fp32": False, "e8m0": True}  # whether they are powers of two
CHECKED_TOKENS = 16
# Errors of right outputs, by the float weights' output. A wrong scale is off by more.
BOUNDS = {"fp8_block": 0.1, "fp8": 0.1, "int8": 0.05}
# (T, K, D, F) of a rank -> TFLOP/s
PUBLISHED = {(8192, 6, 4096, 2048): 757, (8192, 6, 7168, 3072): 818}
PEERS = ("vllm", "torch-gemms", "deepgemm-gemms")
DENSE = {16: "dense", 8: "dense of 8 bits"}  # GEMMs, by the bits of their operands


class Way(NamedTuple):
    """How quantised experts are computed."""

    weight_format: str
    compute: str
    scale_dtype: str = "fp32"

    @property
    def variant(self) -> Variant:
        options = {} if self.compute == "codes" else {"compute": self.compute}
        return Variant(self.weight_format, options, power_of_two=SCALES[self.scale_dtype])


WAYS = (
    *(Way(name, "codes") for name in ("fp8_block", "fp8", "int8")),
    *(Way(name, "fp8", scales) for name in ("fp8_block", "fp8") for scales in SCALES),
    *(Way("int8", name) for name in ("int8", "int8_smooth")),
)
USUAL = (
    *(Way("fp8_block", name) for name in ("codes", "fp8")),
    Way("fp8", "fp8"),
    *(Way("int8", name) for name in ("int8", "int8_smooth")),
)


# --- flags --------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    add, dtypes = flags.add_argument, {"choices": common.DTYPES, "metavar": "DTYPE"}
    add("--input-dtype", dest="dtype", **dtypes, action="append", help="--dtype, of x")
    add("--output-dtype", **dtypes, help="that of x")
    for name, values in (
        ("weight-format", dict.fromkeys(way.weight_format for way in WAYS)),
        ("compute", dict.fromkeys(way.compute for way in WAYS)),
        ("scale-dtype", SCALES),
    ):
        listed = f"{', '.join(values)}; may be repeated"
        add(f"--{name}", choices=values, action="append", metavar="NAME", help=listed)
    add("--tokens", type=bench_decode.counts, metavar="A,B,..", help="default: the shape's")
    add("--peers", default="", metavar="A,B,..", help=f"of {', '.join(PEERS)}")
    options = flags.parse_args(argv)
    options.peers = [name for name in options.peers.split(",") if name]
    if not set(options.peers) <= set(PEERS):
        flags.error(f"--peers: expected some of {', '.join(PEERS)}, found {','.join(options.peers)}")
    options.ways = ways_of(options)
    return options


def ways_of(options: argparse.Namespace) -> list[Way]:
    """Those that the flags name, each combination of them. One that does not exist ends the program."""
    asked = (options.weight_format, options.compute, options.scale_dtype)
    if not any(asked):
        return list(USUAL)
    found = []
    for combination in product(*(values or [None] for values in asked)):
        these = [way for way in WAYS if all(a in (None, w) for a, w in zip(combination, way, strict=True))]
        if not these:
            exist = "; ".join(" ".join(way) for way in WAYS)
            said = " ".join(value or "any" for value in combination)
            raise SystemExit(f"expected --weight-format --compute --scale-dtype of {exist}, found {said}")
        found += these if combination[2] else [way for way in these if way.scale_dtype == "fp32"]
    return found


def check_dtypes(options: argparse.Namespace) -> None:
    known = [name for name in common.DTYPES if options.device == "cpu" or name != "fp32"]
    for name in options.dtype:
        output = options.output_dtype or name
        if name not in known or output != name:
            exist = "; ".join(f"{each} {each}" for each in known)
            raise SystemExit(f"expected --input-dtype --output-dtype of {exist}, found {name} {output}")


# --- measuring ----------------------------------------------------------------------------------------


class Case:
    """The experts' input, and what the floor is made of."""

    def __init__(
        self, sizes: common.Sizes, settings: common.Settings, dtype: str, options: argparse.Namespace
    ):
        import fused_moe

        T, E, K, D, hidden = self.sizes = sizes
        self.settings, self.device = settings, options.device
        factory = {"device": options.device, "dtype": common.DTYPES[dtype]}
        logits = common.routing_logits(options.routing, sizes, options.device)
        self.routed = fused_moe.route(logits, K, route_norm=True)
        self.x = torch.randn(T, D, **factory)
        self.flops = 2 * settings.matrices * T * K * D * hidden
        self.counts = self.routed[1].flatten().long().bincount(minlength=E).tolist()
        self.dense_gemms = common.dense_gemms(sizes, gated=settings.gated, **factory)

    def run(self, weights: list) -> Callable[[], Tensor]:
        import fused_moe

        w1, w2, w3 = weights
        activation = self.settings.activation
        return partial(fused_moe.fused_experts, self.x, w1, w2, w3, *self.routed, activation=activation)

    def check(self, out: Tensor, weights: list[Tensor | None], title: str, dtype: str) -> float:
        """The error of some tokens with float weights, in float64."""
        scores, ids = (t[:CHECKED_TOKENS] for t in self.routed)
        w = decode_case.Weights(*weights)
        exact = decode_case.exact_experts(
            self.x[:CHECKED_TOKENS], w, scores, ids, activation=self.settings.activation
        )
        error = common.Error()
        error.add("out", out[:CHECKED_TOKENS], exact)
        return error.check(title, dtype)

    def roofs(self) -> dict[str, Callable]:
        """What the floor's rates are measured by: GEMMs of a call's FLOPs in 16 and in 8 bits, and a copy."""
        copy, self.copied = floors.large_copy(self.device)
        return {
            DENSE[16]: lambda: [a @ b for a, b in self.dense_gemms],
            DENSE[8]: common.dense_in_8_bits(self.dense_gemms),
            floors.COPY: copy,
        }

    def floor(self, seconds: dict, bits: int) -> float:
        """Microseconds, with operands of 8 or 16 bits."""
        rates = self.flops / seconds[DENSE[bits]] / 1e6, self.copied / seconds[floors.COPY] / 1e6
        x, operand = self.x, bits // 8
        cached = floors.cached_elements(x) * x.element_size() // operand
        sizes = (operand, x.element_size())
        return floors.experts_us(self.sizes, self.settings, self.counts, cached, sizes, *rates)


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    settings, sizes = common.layer_settings(shape), common.layer_sizes(shape)
    torch.manual_seed(0)
    weights = bench_quantised.random_weights("gaussian", sizes, common.DTYPES[dtype], options.device)
    if not settings.gated:
        weights[2] = None
    layers = {}
    for way in options.ways:
        if reason := bench_quantised.misfit(way.variant, sizes):
            print(f"{way.variant.name} is left out: {reason}", flush=True)
        else:
            layers[way] = way.variant.layer(weights)
    for tokens in options.tokens or [sizes.num_tokens]:
        case = Case(sizes._replace(num_tokens=tokens), settings, dtype, options)
        with torch.no_grad():
            yield from time_case(case, weights, layers, shape, dtype, options)


def time_case(
    case: Case, weights: list, layers: dict[Way, list], shape: str, dtype: str, options: argparse.Namespace
) -> Iterator[dict]:
    title, on_gpu = f"{shape}, {case.sizes.num_tokens} tokens", options.device == "cuda"
    mode = "queued" if on_gpu else common.DEFAULT_MODE
    ours = {None: case.run(weights)} | {way: case.run(layer) for way, layer in layers.items()}
    right = ours[None]()
    errors = {None: case.check(right, weights, title, dtype)}
    for way in layers:
        errors[way] = beside(right, ours[way](), f"{title}, {way.variant.name}", BOUNDS[way.weight_format])
    peers, peer_errors = find_peers(case, weights, right, title, options.peers)
    del right
    runs = ours | peers | (case.roofs() if options.tier == "hopper" else {})
    seconds = common.times(common.clock(options.device, **common.MODES[mode]), runs, options.repeats)
    for way in ours:
        taken = seconds[way]
        measured = {
            "what": "experts" if way is None else way.variant.name,
            "max_rel_error": errors[way],
            "time_us": round(taken * 1e6, 1),
            "tflops": round(case.flops / taken / 1e12, 4),
            "published_tflops": PUBLISHED.get((case.sizes.num_tokens, *case.sizes[2:])),
            "input_dtype": dtype,
            "output_dtype": dtype,
        }
        bits = 8 if way is not None and way.compute != "codes" else 16
        if DENSE[bits] in seconds:
            measured["dense_ratio"] = round(seconds[DENSE[bits]] / taken, 3)
            if way is None or bits == 8:  # codes' own floor has bytes of 8 bits and FLOPs of 16
                floor = case.floor(seconds, bits)
                measured |= common.of_floor(floor / 1e6, taken)
        if way is not None:
            stored = bench_quantised.storage([w for w in layers[way] if w is not None])
            measured |= way._asdict() | stored | {"error_to_float": errors[way]}
            others = {dtype: None, "codes": Way(way.weight_format, "codes")}
            others |= {name.replace("-", "_"): name for name in peers}
            measured |= {
                f"ratio_to_{name}": round(seconds[other] / taken, 3)
                for name, other in others.items()
                if other in seconds and other != way
            }
            measured["peer_errors"] = peer_errors
            measured["peer_tflops"] = {
                name.replace("-", "_"): round(case.flops / seconds[name] / 1e12, 4) for name in peers
            }
        yield common.record(
            options, bench="eight_bits", shape=shape, routing=options.routing, mode=mode, dtype=dtype,
            tokens=case.sizes.num_tokens, **measured,
        )  # fmt: skip


def beside(right: Tensor, found: Tensor, title: str, bound: float) -> float:
    """The relative difference of all tokens. One of a wrong result ends the program."""
    error = bench_quantised.norm_error([found], [right])
    if not error < bound:
        raise SystemExit(f"{title}: wrong before it is fast: {error:.1e} from the float weights' output")
    return error


def find_peers(
    case: Case, weights: list, right: Tensor, title: str, asked: list[str]
) -> tuple[dict[str, Callable], dict[str, float]]:
    """The peers' calls and errors. One that cannot run here, or is wrong, is named."""
    import peers
    from eight_bit_peers import EIGHT_BIT_PEERS, prepared

    activation, found, errors = case.settings.activation, {}, {}
    for name in asked:
        try:
            if case.device != "cuda":
                raise peers.Unavailable(f"{name}: expected a GPU")
            layer = Variant("fp8" if name == "torch-gemms" else "fp8_block").layer(weights)
            if name == "vllm":
                peer = peers.vllm_fp8_block("fp8_block", activation, gated=case.settings.gated)
                run = partial(peer.experts, case.x, peer.convert(*layer), *case.routed)
                out = run()
            else:
                run, out = prepared(EIGHT_BIT_PEERS[name], tuple(layer), case.x, *case.routed, activation)
            errors[name.replace("-", "_")] = beside(right, out, f"{title}, {name}", BOUNDS["fp8"])
        except (Exception, SystemExit) as reason:  # a peer may fail in any way; the others still run
            print(f"{name} is left out: {reason}", flush=True)
        else:
            found[name] = run
    return found, errors


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    common.start(options)
    check_dtypes(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
