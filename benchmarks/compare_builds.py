"""Times two builds of this library against each other: whole layers and their kernels.

    python benchmarks/compare_builds.py OLD_TREE NEW_TREE --shape qwen3-30b --rounds 5

Each tree is a checkout with its library built in place. One process per build has the same layer. The
processes alternate, so both get the same clocks and temperature. A round queues several steps behind a long
kernel, so only GPU time counts. Then it profiles some steps: the times of the kernels of one step are summed
by kind. The output has medians over the rounds and old / new: above 1 the new build is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

STEPS = 6
# Kind of kernel -> parts of the kernels' names, of old and new builds; the first match counts.
KINDS = {
    "schedule": (
        "plan_kernel",
        "schedule_kernel",
        "count_kernel",
        "scan_kernel",
        "scatter_kernel",
        "finish_kernel",
    ),
    "unpermute": ("unpermute",),
    "dscores": ("dscores",),
    "route": ("route_kernel", "route_backward"),
    "up_gate": ("up_gate",),
    "down_dgrad": ("down_dgrad",),
    "wgrad": ("wgrad",),
    "grouped_mm": ("grouped_mm",),
    "memset": ("memset", "Memset"),
}
# Kinds with two launches per step, in their order.
IN_ORDER = {"wgrad": ("wgrad_down", "wgrad_up"), "grouped_mm": ("down", "up_dgrad")}


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "PyTorch")


# --- one build ----------------------------------------------------------------------------------------


def worker() -> None:
    """Answers requests, one line of JSON each: {"shape", "routing"} makes a layer, {"what"} times it."""
    import common
    import torch
    from torch.profiler import ProfilerActivity, profile

    import fused_moe

    layer = x = dout = None

    def step(what: str) -> None:
        if what == "forward":
            with torch.no_grad():
                layer(x)
            return
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(dout)

    def queued_us(what: str) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        start.record()
        for _ in range(STEPS):
            step(what)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / STEPS * 1e3

    def kernels_us() -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            torch.cuda._sleep(40_000_000)
            for _ in range(2):
                step("forward_backward")
            torch.cuda.synchronize()
        times, seen = defaultdict(float), defaultdict(int)
        events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        for event in sorted(events, key=lambda e: e.time_range.start):
            kind = kind_of(event.name)
            if kind == "PyTorch" and "spin" in event.name:
                continue
            if kind in IN_ORDER:
                names = IN_ORDER[kind]
                seen[kind] += 1
                kind = names[(seen[kind] - 1) % len(names)]
            times[kind] += event.device_time / 2
        return times

    for line in sys.stdin:
        request = json.loads(line)
        if "shape" in request:
            layer = x = dout = None
            torch.cuda.empty_cache()
            sizes = common.layer_sizes(request["shape"])
            T, E, K, D, hidden = sizes
            torch.manual_seed(0)
            factory = {"device": "cuda", "dtype": torch.bfloat16}
            layer = fused_moe.FusedMoE(D, hidden, E, K, route_norm=True, **factory)
            tokens, gate = common.tokens_and_gate(common.routing_logits(request["routing"], sizes, "cuda"), D)
            with torch.no_grad():
                layer.router.gate.weight.copy_(gate)
            x = tokens.to(torch.bfloat16).requires_grad_()
            dout = torch.randn(T, D, **factory)
            for _ in range(3):
                step("forward_backward")
            torch.cuda.synchronize()
            answer = {}
        elif request["what"] == "kernels":
            answer = kernels_us()
        else:
            answer = {"us": queued_us(request["what"])}
        print(json.dumps(answer), flush=True)


class Build:
    """A process that imports one tree's library and answers requests; `script` is run with --worker."""

    def __init__(self, tree: Path, script: str = __file__):
        environment = {**os.environ, "PYTHONPATH": f"{tree}:{Path(__file__).parent}"}
        command = [sys.executable, script, "--worker"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, **request) -> dict:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# --- both -----------------------------------------------------------------------------------------------


def compare(builds: dict[str, Build], shape: str, routing: str, rounds: int) -> dict:
    """{what: {build: median us}}"""
    times: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for build in builds.values():
        build.ask(shape=shape, routing=routing)
    for number in range(rounds):
        order = list(builds.items())[:: 1 if number % 2 else -1]
        for what in ("forward", "forward_backward"):
            for name, build in order:
                times[what][name].append(build.ask(what=what)["us"])
        for name, build in order:
            for kind, us in build.ask(what="kernels").items():
                times[kind][name].append(us)
    return {what: {n: statistics.median(v) for n, v in by_build.items()} for what, by_build in times.items()}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("old", type=Path)
    flags.add_argument("new", type=Path)
    flags.add_argument("--shape", action="append", required=True, help="of shapes.json; may be repeated")
    flags.add_argument("--routing", default="random")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--json", type=Path, help="where the records go")
    options = flags.parse_args()
    builds = {"old": Build(options.old.resolve()), "new": Build(options.new.resolve())}
    records = []
    for shape in options.shape:
        medians = compare(builds, shape, options.routing, options.rounds)
        line = []
        for what, by_build in medians.items():
            old, new = by_build.get("old", 0.0), by_build.get("new", 0.0)
            record = {"bench": "builds", "shape": shape, "routing": options.routing, "what": what}
            records.append(record | {"old_us": round(old, 1), "new_us": round(new, 1)})
            line.append(f"{what} {old:.0f}/{new:.0f}" + (f" {old / new:.3f}" if new else ""))
        print(f"{shape} {options.routing}: " + ", ".join(line), flush=True)
        if options.json:
            options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker()
    else:
        main()
