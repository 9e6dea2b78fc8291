"""Times builds of this library against the first one: whole layers and their kernels.

    python benchmarks/compare_builds.py --build d1353da=../old --build HEAD=. --shape qwen3-30b --rounds 5

Each build has two processes with the same layer. All processes take turns, so they get the same clocks and
temperature. A round queues several steps behind a long kernel, so only GPU time counts. Then it profiles some
steps: the times of the kernels of one step are summed by kind. Records have medians over the rounds, of
layers also over dense GEMMs of the same FLOPs.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from functools import partial
from itertools import product

import builds
import common
import profiling
import torch
from bench_layer import Case

LAYER = ("forward", "forward_backward")


# --- one build ----------------------------------------------------------------------------------------


class Worker:
    """Answers {shape, routing}, which makes a layer, and {what, steps}, which times it: microseconds."""

    def __call__(self, what: str = "", steps: int = 0, shape: str = "", routing: str = ""):
        if shape:
            self.case = None
            torch.cuda.empty_cache()
            self.case = case = Case(common.layer_sizes(shape), routing, "bf16", "cuda")
            for _ in range(3):
                case.step(case.ours, "forward_backward")
            return None
        if what == "kernels":
            return self.kernels()
        dense = what.removeprefix("dense_")
        if dense != what:
            return self.queued(lambda: self.case.dense(dense), steps)
        return self.queued(lambda: self.case.step(self.case.ours, what), steps)

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


def main(argv: list[str] | None = None) -> None:
    flags = builds.parser(__doc__, rounds=5)
    flags.add_argument("--shape", action="append", required=True, help="of shapes.json; may be repeated")
    flags.add_argument("--routing", default="random")
    flags.add_argument("--steps", type=int, default=6, help="of a layer, queued one behind the other")
    options = flags.parse_args(argv)
    processes = builds.start(options.build, __file__, twice=True)
    old, *others = (process.commit for process in processes[: len(options.build)])
    records = []
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
