"""Times the first up_gate and grouped_mm of a fresh process against later ones.

    python benchmarks/first_call.py --shape olmoe --repeats 5 --json out.json

The first call includes one-time costs: loading the kernels' code, their attributes, tensor maps and the
allocator's first blocks. Each measurement runs in a new process. Before the first call PyTorch and the
library are loaded, the CUDA context exists and the inputs are on the GPU. The plan is made on the CPU, so no
kernel of ours has run. Times are the host's, synchronised. time_us is the median of the first call over the
processes, over_later_us the median of its excess over a later call, over_later_us_worst the largest excess.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import common
import torch

LATER_CALLS = 20


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    flags.add_argument(
        "--in-this-process", action="store_true", help="one measurement in this process; used internally"
    )
    return flags.parse_args(argv)


def first_and_later(shape: str, routing: str, dtype: str, device: str) -> tuple[float, float]:
    """Seconds of the first call in this process, and the median of later ones."""
    import fused_moe

    sizes = common.layer_sizes(shape)
    T, E, K, D, hidden = sizes
    factory = {"dtype": common.DTYPES[dtype], "device": device}
    torch.manual_seed(0)
    x, w1, w3, w2 = (
        torch.randn(s, **factory) for s in ((T, D), (E, hidden, D), (E, hidden, D), (E, D, hidden))
    )
    ids = common.routing_logits(routing, sizes, "cpu").topk(K).indices
    plan = [t.to(device) for t in fused_moe.route_plan(ids, E).tensors]
    offs = plan[0][1:].clone()
    layout, silu = 0, 0  # w1 and w3 separate
    ops = torch.ops.fused_moe

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def call() -> float:
        synchronize()
        start = time.perf_counter()
        _, a = ops.up_gate(x, w1, w3, None, None, plan, layout, silu, [0.0, 0.0])
        ops.grouped_mm(a, w2, offs)
        synchronize()
        return time.perf_counter() - start

    first = call()
    return first, statistics.median(call() for _ in range(LATER_CALLS))


def in_a_fresh_process(shape: str, routing: str, dtype: str, device: str) -> tuple[float, float]:
    """The process inherits the environment, so the tier and the schedule."""
    flags = ["--shape", shape, "--routing", routing, "--dtype", dtype, "--device", device]
    command = [sys.executable, __file__, *flags, "--in-this-process"]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{shape} {dtype}: a process failed:\n{found.stderr}")
    return tuple(json.loads(found.stdout.splitlines()[-1]))


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    case = (shape, options.routing, dtype, options.device)
    found = [in_a_fresh_process(*case) for _ in range(options.repeats)]
    excess = [first - later for first, later in found]
    first, later = (statistics.median(seconds) for seconds in zip(*found, strict=True))
    yield common.record(
        options,
        bench="first_call",
        shape=shape,
        routing=options.routing,
        dtype=dtype,
        what="up_gate_grouped_mm",
        time_us=round(first * 1e6, 1),
        later_us=round(later * 1e6, 1),
        over_later_us=round(statistics.median(excess) * 1e6, 1),
        over_later_us_worst=round(max(excess) * 1e6, 1),
        processes=len(found),
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.device == "auto":
        options.device = "cuda"  # the CPU tier has no one-time costs worth measuring
    options.repeats = options.repeats or 5
    if options.in_this_process:
        print(
            json.dumps(first_and_later(options.shape[0], options.routing, options.dtype[0], options.device))
        )
        return
    options.shape = options.shape or ["olmoe"]
    common.start(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
