"""Times builds of this library against the first one: whole layers and their kernels, or decoding.

    python benchmarks/compare_builds.py --build d1353da=../old --build HEAD=. --shape qwen3-30b --rounds 5
    python benchmarks/compare_builds.py --build A=../old --build B=. --shape qwen3-30b --tokens 1,8,64
    python benchmarks/compare_builds.py --build A=../old --build B=. --shape olmoe --tokens 1 --format int4

Each build has two processes with the same layer. All processes take turns, so they get the same clocks and
temperature. A round queues several steps behind a long kernel, so only GPU time counts. Then it profiles some
steps: the times of the kernels of one step are summed by kind. Records have medians over the rounds, of
layers also over dense GEMMs of the same FLOPs.

--tokens times decoding instead, as bench_decode.py does: the experts' calls of several layers as one CUDA
graph, at each number of tokens; --format likewise with quantised weights.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import product

import bench_decode
import builds
import common
import decode_case
import profiling
import torch
from bench_layer import Case

LAYER = ("forward", "forward_backward")
MEMORY = 9 * 1024 * common.MIB  # of a process's weights in decoding: four processes share the GPU


# --- one build ----------------------------------------------------------------------------------------


class Worker:
    """Answers {shape, routing}, which makes a layer, with tokens decoding, and {what, steps}, which times it:
    microseconds."""

    def __call__(
        self,
        what: str = "",
        steps: int = 0,
        shape: str = "",
        routing: str = "",
        tokens: int = 0,
        format: str = "",
    ):
        if shape:
            self.case = self.decode = None
            torch.cuda.empty_cache()
            if tokens:
                return self.make_decode(shape, routing, tokens, format)
            self.case = case = Case(common.layer_sizes(shape), routing, "bf16", "cuda")
            for _ in range(3):
                case.step(case.ours, "forward_backward")
            return None
        if what == "kernels":
            return self.kernels()
        if what == "decode":
            return self.queued(self.decode, steps) / len(self.case.routings)
        dense = what.removeprefix("dense_")
        if dense != what:
            return self.queued(lambda: self.case.dense(dense), steps)
        return self.queued(lambda: self.case.step(self.case.ours, what), steps)

    def make_decode(self, shape: str, routing: str, tokens: int, format: str) -> None:
        decode_case.MEMORY = MEMORY
        sizes, setup = (
            common.layer_sizes(shape)._replace(num_tokens=tokens),
            decode_case.Setup(routing, device="cuda"),
        )
        self.case = case = decode_case.Case(sizes, setup)
        layers = case.weights
        if format:
            (variant,) = bench_decode.variants_of(format, ["codes"], sizes)
            for i, weights in enumerate(layers):  # a layer at a time, for the memory
                layers[i] = weights.quantised(variant)
        experts = bench_decode.find_experts(setup, "")["ours"]
        self.decode = common.as_graph(partial(case.run, experts, layers))
        for _ in range(3):
            self.decode()

    def queued(self, step, steps: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(profiling.LEAD)
        start.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / steps * 1e3

    def kernels(self) -> dict[str, float]:
        step = partial(self.case.step, self.case.ours, "forward_backward")
        return profiling.us_by_kind(profiling.launches(step))


# --- all ------------------------------------------------------------------------------------------------


def compare(
    processes: list[builds.Process], shape: str, routing: str, rounds: int, steps: int
) -> dict[str, dict]:
    """{what: {commit: median us}}, of layers also {"dense": median us}."""
    for process in processes:
        process.ask(shape=shape, routing=routing)
    found = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for what in LAYER:
            processes[-1].ask(what=what, steps=steps)  # as hot for the first one as for the others
            for commit, times in builds.in_turns(processes, 1, what=what, steps=steps).items():
                found[what][commit] += times
            found[what]["dense"].append(processes[0].ask(what=f"dense_{what}", steps=steps))
        for commit, answers in builds.in_turns(processes, 1, what="kernels").items():
            for kind, us in ((kind, us) for times in answers for kind, us in times.items()):
                found[kind][commit].append(us)
        processes = builds.rotated(processes)
    return {
        what: {name: statistics.median(us) for name, us in times.items()} for what, times in found.items()
    }


def compare_decode(processes: list[builds.Process], rounds: int, steps: int, **case) -> dict[str, float]:
    """{commit: median us of a call}."""
    for process in processes:
        process.ask(**case)
    found = defaultdict(list)
    for _ in range(rounds):
        processes[-1].ask(what="decode", steps=steps)
        for commit, times in builds.in_turns(processes, 1, what="decode", steps=steps).items():
            found[commit] += times
        processes = builds.rotated(processes)
    return {commit: statistics.median(times) for commit, times in found.items()}


def decode_records(processes: list[builds.Process], old: str, others: list[str], options) -> Iterator[dict]:
    tokens = [int(part) for part in options.tokens.split(",")]
    for shape, format, T in product(options.shape, options.format.split(","), tokens):
        case = {"shape": shape, "routing": options.routing, "tokens": T, "format": format}
        us = compare_decode(processes, options.rounds, options.steps, **case)
        for new in others:
            line = f"{shape} {options.routing} decode {format or 'bf16':9} T {T:5}{us[old]:9.1f} us"
            print(f"{line}, {new}{us[new]:9.1f} {us[old] / us[new]:.3f}", flush=True)
            key = {"bench": "builds", "what": "decode", **case, "old_commit": old, "new_commit": new}
            key |= {"rounds": options.rounds, "steps": options.steps}
            yield key | {"old_us": round(us[old], 1), "new_us": round(us[new], 1)}


def main(argv: list[str] | None = None) -> None:
    flags = builds.parser(__doc__, rounds=5)
    add, shapes = flags.add_argument, "of shapes.json; required, may be repeated"
    add("--shape", action="append", required=True, help=shapes)
    add("--routing", default="random")
    add("--steps", type=int, default=6, metavar="N", help="of a layer, queued one behind the other")
    add("--tokens", metavar="A,B,..", help="numbers of tokens: decoding instead of layers")
    add("--format", default="", metavar="A,B,..", help="of quantised weights, with --tokens")
    options = flags.parse_args(argv)
    processes = builds.start(options.build, __file__, twice=True)
    old, *others = (process.commit for process in processes[: len(options.build)])
    records = []
    if options.tokens:
        for record in decode_records(processes, old, others, options):
            records.append(record)
            if options.json:
                options.json.write_text(json.dumps(records, indent=1) + "\n")
        return
    for shape in options.shape:
        found = compare(processes, shape, options.routing, options.rounds, options.steps)
        for what, new in product(found, others):
            us = found[what]
            old_us, new_us = (round(us.get(commit, 0), 1) for commit in (old, new))
            key = {"bench": "builds", "shape": shape, "routing": options.routing, "what": what}
            key |= {"old_commit": old, "new_commit": new, "rounds": options.rounds, "steps": options.steps}
            records.append(key | {"old_us": old_us, "new_us": new_us})
            line = f"{shape} {options.routing} {what:17}{old_us:9.1f} us, {new}{new_us:9.1f}"
            if new_us:
                line += f" {old_us / new_us:.3f}"
            if what in LAYER:
                old_ratio, new_ratio = (round(us["dense"] / t, 3) for t in (old_us, new_us))
                records[-1] |= {"old_dense_ratio": old_ratio, "new_dense_ratio": new_ratio}
                line += f" ({old_ratio:.3f}, {new_ratio:.3f} of dense)"
            print(line, flush=True)
        if options.json:
            options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    builds.run(main, Worker())
