"""Splits the GPU time of a training step into MoE layers, communication and everything else.

    marks = Marks(layers, blocks)                 # hooks that leave ranges in the profiler's trace
    with torch.profiler.profile() as profiler:    # CPU and CUDA activities
        a few steps
    marks.remove()
    by_part(trace_events, marks.nodes)

A kernel belongs to the innermost range that was open on its launching thread at its launch (kernel and launch
share a correlation id). In the forward pass that is the range of a module's forward. In the backward pass it
is an autograd node, and a node belongs to the module whose forward created it: autograd numbers its nodes in
order of creation, the hooks record the number before and after each forward, and the trace has the number of
each node. Recomputation by activation checkpointing runs the modules' hooks again, inside the node that
triggered it. FSDP's ranges within an MoE layer count as FSDP (under expert parallelism the experts are their
own FSDP unit). So router, permutation, padding, gathers, scatters, shared experts and their gradients
count as MoE, whatever the names of their kernels; all-gather and reduce-scatter do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn

RANGE = "moe_profile: "
NODE = "autograd::engine::evaluate_function: "
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
PARTS = ("moe", "shared_experts", "moe_communication", "communication", "fsdp", "rest")

Nodes = list[tuple[str, int, int]]  # part, first sequence number, the number after the last


class Marks:
    """Hooks on MoE layers and on the blocks around them, until `remove`."""

    def __init__(self, layers: Iterable[nn.Module], blocks: Iterable[nn.Module] = ()):
        self.nodes: Nodes = []
        self._handles = []
        for block in blocks:  # may be recomputed as a whole, inside a node of the layer
            self._mark(block, "rest")
        for layer in layers:
            self._mark(layer, "moe")
            if getattr(layer, "shared_experts", None) is not None:
                self._mark(layer.shared_experts, "shared_experts")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _mark(self, module: nn.Module, part: str) -> None:
        running: list[tuple] = []
        enter, leave = partial(self._enter, part, running), partial(self._leave, part, running)
        self._handles += [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _enter(self, part: str, running: list, module: nn.Module, args) -> None:
        mark = torch.profiler.record_function(RANGE + part)
        mark.__enter__()
        running.append((mark, None if _in_backward() else torch.autograd._get_sequence_nr()))

    def _leave(self, part: str, running: list, module: nn.Module, args, out) -> None:
        mark, first = running.pop()
        mark.__exit__(None, None, None)
        if first is not None:
            self.nodes.append((part, first, torch.autograd._get_sequence_nr()))


def _in_backward() -> bool:
    """Sequence numbers are per thread, and recomputed nodes have no backward pass: not recorded."""
    return torch._C._current_graph_task_id() != -1


def by_part(events: list[dict], nodes: Nodes, steps: int = 1, longest: int = 15) -> dict:
    """Microseconds per step of each part, from the traceEvents of a Chrome trace of several steps.

    busy_us is the time in which anything ran on the GPU; overlapping parts add up to more. `kernels` are the
    longest of the MoE layers: name, microseconds and launches per step.
    """
    part_of_node = {}
    widest_first = sorted(nodes, key=lambda node: node[1] - node[2])
    for part, first, after in widest_first:  # inner ranges overwrite outer ones
        part_of_node.update(dict.fromkeys(range(first, after), part))
    ranges, launches, kernels = defaultdict(list), {}, []
    for e in events:
        if e.get("ph") != "X":
            continue
        kind, name, args = e.get("cat"), e["name"], e.get("args", {})
        if kind in ON_GPU:
            kernels.append(e)
        elif kind in LAUNCHES:
            if "correlation" in args:
                launches[args["correlation"]] = (e["tid"], e["ts"])
        elif name.startswith(RANGE) and kind == "user_annotation":
            ranges[e["tid"]].append((e["ts"], e["ts"] + e["dur"], name.removeprefix(RANGE)))
        elif name.startswith("FSDP::") and kind in ("user_annotation", "cpu_op"):
            ranges[e["tid"]].append((e["ts"], e["ts"] + e["dur"], "fsdp"))
        elif name.startswith(NODE):
            part = part_of_node.get(args.get("Sequence number"), "rest")
            ranges[e["tid"]].append((e["ts"], e["ts"] + e["dur"], part))

    launch_times = defaultdict(set)
    for thread, moment in launches.values():
        launch_times[thread].add(moment)
    part_at = {
        (thread, moment): part
        for thread, moments in launch_times.items()
        for moment, part in _innermost(sorted(moments), sorted(ranges[thread], key=lambda r: (r[0], -r[1])))
    }
    times, own, without = dict.fromkeys(PARTS, 0.0), defaultdict(lambda: [0.0, 0]), 0.0
    for e in kernels:
        launch = launches.get(e.get("args", {}).get("correlation"))
        part = part_at.get(launch, "rest")
        if launch is None:
            without += e["dur"]
        if "nccl" in e["name"].lower():
            part = "moe_communication" if part in ("moe", "shared_experts") else "communication"
        times[part] += e["dur"]
        if part == "moe":
            own[e["name"]][0] += e["dur"]
            own[e["name"]][1] += 1
    return {
        "steps": steps,
        **{f"{part}_us": round(times[part] / steps, 1) for part in PARTS},
        "busy_us": round(_covered((e["ts"], e["ts"] + e["dur"]) for e in kernels) / steps, 1),
        "without_launch_us": round(without / steps, 1),
        "launches": round(len(kernels) / steps),
        "moe_launches": round(sum(count for _, count in own.values()) / steps),
        "kernels": [
            [name[:120], round(us / steps, 1), round(count / steps, 1)]
            for name, (us, count) in sorted(own.items(), key=lambda item: -item[1][0])[:longest]
        ],
    }


def _innermost(moments: list[float], ranges: list[tuple]) -> Iterator[tuple[float, str]]:
    """The part of the innermost range at each moment. Moments and nested ranges are sorted by start."""
    open_ranges, following = [], 0
    for moment in moments:
        while following < len(ranges) and ranges[following][0] <= moment:
            while open_ranges and open_ranges[-1][1] < ranges[following][0]:
                open_ranges.pop()
            open_ranges.append(ranges[following])
            following += 1
        while open_ranges and open_ranges[-1][1] < moment:
            open_ranges.pop()
        yield moment, open_ranges[-1][2] if open_ranges else "rest"


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the spans' union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def moe_us(profile: dict) -> float:
    """Microseconds of the MoE layers, shared experts included."""
    return profile["moe_us"] + profile["shared_experts_us"]


def share(profile: dict) -> float:
    """The time of the MoE layers over the time in which the GPU was busy."""
    return moe_us(profile) / max(profile["busy_us"], 1e-9)
