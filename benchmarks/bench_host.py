"""Times the host side of a layer and counts its launches: eight small layers in a row, one build or more.

    python benchmarks/bench_host.py --build d1353da=../old --build HEAD=. --json out.json

The GPU computes so small a layer in less time than Python and the launches take, so a layer's time is the
host's: host_us. Builds are checkouts with their libraries; there is a process for each, and they take turns.
launches counts this library's kernels and memsets per layer; other_launches counts PyTorch's (the router's
GEMMs, the sum of two gradients, the token counter).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from compare_builds import Build

LAYERS, TOKENS, EXPERTS, TOP_K, WIDTH = 8, 2048, 32, 4, 256
STEPS, ROUNDS = 10, 30
# Our kernels' names contain one of these; PyTorch's do not.
OWN = ("fused_moe",)


def layers(device: str = "cuda"):
    import fused_moe

    torch.manual_seed(0)
    factory = {"device": device, "dtype": torch.bfloat16}
    stack = [fused_moe.FusedMoE(WIDTH, WIDTH, EXPERTS, TOP_K, **factory) for _ in range(LAYERS)]
    x = torch.randn(TOKENS, WIDTH, **factory, requires_grad=True)
    return stack, x


def step(stack, x, what: str) -> None:
    out = x
    if what == "forward":
        with torch.no_grad():
            for layer in stack:
                out = layer(out)
        return
    for layer in stack:
        out = layer(out)
    out.backward(torch.ones_like(out))
    for layer in stack:
        layer.zero_grad(set_to_none=True)
    x.grad = None


def host_us(stack, x, what: str) -> float:
    """Microseconds per layer."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step(stack, x, what)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / (STEPS * LAYERS) * 1e6


def launches(stack, x, what: str) -> tuple[float, float, list[str]]:
    """Launches per layer, ours and PyTorch's, and the names of all kernels."""
    from torch.profiler import ProfilerActivity, profile

    step(stack, x, what)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(stack, x, what)
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    own = [n for n in names if any(part in n for part in OWN) or "memset" in n.lower()]
    return len(own) / LAYERS, (len(names) - len(own)) / LAYERS, sorted(set(names))


def worker() -> None:
    """Answers requests, one line of JSON each: {"what"} times, {"count"} counts launches."""
    stack, x = layers()
    for line in sys.stdin:
        request = json.loads(line)
        if "count" in request:
            own, others, names = launches(stack, x, request["count"])
            answer = {"launches": own, "other_launches": others, "names": names}
        else:
            answer = {"us": host_us(stack, x, request["what"])}
        print(json.dumps(answer), flush=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--build", action="append", required=True, help="COMMIT=TREE; may be repeated")
    flags.add_argument("--json", type=Path, help="where the records go")
    options = flags.parse_args()
    trees = dict(build.split("=", 1) for build in options.build)
    builds = {commit: Build(Path(tree).resolve(), __file__) for commit, tree in trees.items()}
    records = []
    for what in ("forward", "forward_backward"):
        times = {commit: [] for commit in builds}
        for build in builds.values():
            build.ask(what=what)  # warm-up
        for _ in range(ROUNDS):
            for commit, build in builds.items():
                times[commit].append(build.ask(what=what)["us"])
        for commit, build in builds.items():
            found = build.ask(count=what)
            median = round(statistics.median(times[commit]), 1)
            print(
                f"{commit:10} {what:17} {median:7.1f} us per layer (least {min(times[commit]):.1f}), "
                f"{found['launches']:g} launches of ours, {found['other_launches']:g} of PyTorch's"
            )
            counts = {name: found[name] for name in ("launches", "other_launches")}
            records.append({"bench": "host", "what": what, "commit": commit, "host_us": median, **counts})
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        main()
