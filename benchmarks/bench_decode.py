"""Times a layer's experts on few tokens, as in decoding, against the time of reading their weights once.

    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1,8,64,512 --json out.json
    python benchmarks/bench_decode.py --shape qwen3-30b --tokens 1 --eager --routing zipf:1.2

Calls take turns on the weights of several layers, each with routing of its own, so that a call reads its
weights from memory, as a decode step of a deep model does. On a GPU all calls are one CUDA graph; with
--eager the host makes them one by one. floor_us: the experts that have tokens, at the rate of a kernel that
only reads, or the dense product of equal FLOPs, where that takes longer; both in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import common
import profiling
import torch
import torch.nn.functional as F
from common import MIB, Error
from torch import Tensor

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,2048"
CALLS = 8  # at least, on a GPU; 2 on the CPU
REUSE = 1024 * MIB  # read before the same weight is read again
MEMORY = 64 * 1024 * MIB  # of all layers' weights
CHECKED_TOKENS = 16


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    flags.add_argument("--tokens", type=counts, default=TOKENS, help=f"comma-separated; default: {TOKENS}")
    flags.add_argument("--eager", action="store_true", help="single calls of the host, no CUDA graph")
    flags.add_argument(
        "--peers", help="of torch and loop, comma-separated; default: those that run fast here"
    )
    return flags.parse_args(argv)


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of tokens, found {text}")
    return numbers


class Case:
    """Some calls of the experts, the weights of several layers, and the dense product of a call's FLOPs."""

    def __init__(self, sizes: common.Sizes, routing: str, dtype: str, device: str):
        torch.manual_seed(0)
        self.sizes = sizes
        T, E, _, D, hidden = sizes
        factory = {"dtype": common.DTYPES[dtype], "device": device}
        self.x = torch.randn(T, D, **factory)
        self.expert_bytes = 3 * D * hidden * self.x.element_size()
        on_gpu = device == "cuda"
        first = self.route(routing)
        calls = max(CALLS, math.ceil(REUSE / self.touched_bytes(first[1]))) if on_gpu else 2
        layers = max(2, min(calls, MEMORY // (E * self.expert_bytes)))
        self.routings = [first, *(self.route(routing) for _ in range(calls - 1))]

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(E, rows, columns, **factory) / math.sqrt(columns)

        self.weights = [(weight(hidden, D), weight(D, hidden), weight(hidden, D)) for _ in range(layers)]
        self.dense_gemms = common.dense_gemms(sizes, **factory)

    def route(self, routing: str) -> tuple[Tensor, Tensor]:
        import fused_moe

        logits = common.routing_logits(routing, self.sizes, self.x.device)
        return fused_moe.route(logits, self.sizes.top_k, route_norm=True)

    def touched_bytes(self, ids: Tensor) -> int:
        return ids.unique().numel() * self.expert_bytes

    @property
    def bytes_of_a_call(self) -> float:
        return sum(self.touched_bytes(ids) for _, ids in self.routings) / len(self.routings)

    @property
    def flops_of_a_call(self) -> int:
        T, _, K, D, hidden = self.sizes
        return 6 * T * K * D * hidden

    def run(self, experts: Callable) -> None:
        """Every call once."""
        with torch.no_grad():
            for i, (scores, ids) in enumerate(self.routings):
                experts(self.x, *self.weights[i % len(self.weights)], scores, ids)

    def dense(self) -> None:
        for a, b in self.dense_gemms:
            a @ b

    def error(self, experts: Callable) -> Error:
        """Of the first call, on some tokens, in float64."""
        (scores, ids), (w1, w2, w3) = self.routings[0], self.weights[0]
        with torch.no_grad():
            found = experts(self.x, w1, w2, w3, scores, ids)[:CHECKED_TOKENS]
        x, scores, ids = (t[:CHECKED_TOKENS] for t in (self.x.double(), scores.double(), ids))
        exact = torch.zeros_like(x)
        for e in ids.unique():
            token, slot = (ids == e).nonzero(as_tuple=True)
            a = F.silu(x[token] @ w1[e].double().mT) * (x[token] @ w3[e].double().mT)
            exact.index_add_(0, token, scores[token, slot, None] * (a @ w2[e].double().mT))
        error = Error()
        error.add("out", found, exact)
        return error


def find_experts(options: argparse.Namespace, dtype: str) -> dict[str, Callable]:
    """Ours and the peers', by name: functions of x, w1, w2, w3, scores and ids."""
    from peers import torch_experts

    import fused_moe

    peers = {"torch": torch_experts, "loop": fused_moe.reference.fused_experts}
    usual = {"torch": common.has_grouped_mm(options.device, dtype), "loop": options.device == "cpu"}
    names = [n for n in peers if usual[n]] if options.peers is None else options.peers.split(",")
    for name in filter(None, names):
        if name not in peers:
            raise SystemExit(f"--peers: expected some of {', '.join(peers)}, found {name}")
    return {"ours": fused_moe.fused_experts} | {name: peers[name] for name in names if name}


def host_seconds(run: Callable[[], None]) -> float:
    """How long the host takes to queue all calls."""
    torch.cuda.synchronize()
    torch.cuda._sleep(profiling.LEAD)
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    on_gpu, experts = options.device == "cuda", find_experts(options, dtype)
    if on_gpu and "loop" in experts and not options.eager:
        raise SystemExit("--peers loop: expected --eager, since the loop reads counts on the host")
    source = torch.ones((1024 if on_gpu else 64) * MIB // 4, device=options.device)
    for tokens in options.tokens:
        sizes = common.layer_sizes(shape)._replace(num_tokens=tokens)
        case = Case(sizes, options.routing, dtype, options.device)
        errors = {name: case.error(fn).check(f"{shape} {name}", dtype) for name, fn in experts.items()}
        measured = time_case(case, experts, source, options) | {"max_rel_error": errors["ours"]}
        del case  # before the next one's weights
        about = {"bench": "decode", "shape": shape, "routing": options.routing, "dtype": dtype}
        yield common.record(options, **about, what="experts", tokens=tokens, **measured)


def time_case(case: Case, experts: dict[str, Callable], source: Tensor, options) -> dict:
    """What a record has of one number of tokens."""
    on_gpu = options.device == "cuda"
    eager, calls = options.eager or not on_gpu, [partial(case.run, fn) for fn in experts.values()]
    runs = dict(zip(experts, calls if eager else map(common.as_graph, calls), strict=True))
    runs |= {"dense": case.dense, "read": source.sum}
    clock = common.clock(options.device, lead=0 if options.eager else 500_000)
    seconds = common.times(clock, runs, options.repeats)
    number = len(case.routings)
    ours = seconds["ours"] / number
    floor = max(case.bytes_of_a_call * seconds["read"] / source.nbytes, seconds["dense"])
    on_host = {}
    if on_gpu:
        launches = profiling.launches(calls[0], steps=1)
        on_host = {
            "launches": round(len(launches) / number, 2),
            "host_us": round(host_seconds(calls[0]) / number * 1e6, 1),
        }
    return {
        "mode": common.DEFAULT_MODE if eager else "graph",
        "time_us": round(ours * 1e6, 1),
        "tflops": round(case.flops_of_a_call / ours / 1e12, 4),
        "torch_ratio": common.ratio(seconds, "torch"),
        "intensity": round(case.flops_of_a_call / case.bytes_of_a_call, 1),
        "floor_us": round(floor * 1e6, 1),
        "floor_ratio": round(floor / ours, 3),
        "read_gb_per_s": round(source.nbytes / seconds["read"] / 1e9, 1),
        **{f"ratio_to_{name}": common.ratio(seconds, name) for name in experts if name == "loop"},
        **on_host,
    }


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    common.start(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
