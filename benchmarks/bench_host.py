"""Times the host side of a layer and counts its launches: eight small layers in a row, one build or more.

    python benchmarks/bench_host.py --build d1353da=../old --build HEAD=. --json out.json

The GPU computes so small a layer in less time than Python and the launches take, so a layer's time is the
host's: host_us. launches counts this library's kernels and memsets per layer; other_launches counts
PyTorch's (the gradient of the router's weight, the token counter).
"""

from __future__ import annotations

import json
import statistics
import time

import builds
import torch

LAYERS, TOKENS, EXPERTS, TOP_K, WIDTH = 8, 2048, 32, 4, 256
STEPS = 10
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


def launches(stack, x, what: str) -> tuple[float, float]:
    """Per layer, ours and PyTorch's."""
    from torch.profiler import ProfilerActivity, profile

    step(stack, x, what)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(stack, x, what)
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    own = [n for n in names if any(part in n for part in OWN) or "memset" in n.lower()]
    return len(own) / LAYERS, (len(names) - len(own)) / LAYERS


class Worker:
    """Answers {what} with microseconds per layer, and {count} with launches."""

    def __init__(self):
        self.layers = None

    def __call__(self, what: str = "", count: str = ""):
        self.layers = self.layers or layers()
        if count:
            own, others = launches(*self.layers, count)
            return {"launches": own, "other_launches": others}
        return host_us(*self.layers, what)


def main(argv: list[str] | None = None) -> None:
    options = builds.parser(__doc__, rounds=30).parse_args(argv)
    processes = builds.start(options.build, __file__)
    records = []
    for what in ("forward", "forward_backward"):
        builds.in_turns(processes, 1, what=what)  # warm-up
        times = builds.in_turns(processes, options.rounds, what=what)
        for process in processes:
            us, counts = times[process.commit], process.ask(count=what)
            median, least = round(statistics.median(us), 1), round(min(us), 1)
            print(
                f"{process.commit:10} {what:17} {median:7.1f} us per layer (least {least}), "
                f"{counts['launches']:g} launches of ours, {counts['other_launches']:g} of PyTorch's"
            )
            times_us = {"host_us": median, "least_us": least}
            records.append({"bench": "host", "what": what, "commit": process.commit, **times_us, **counts})
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    builds.run(main, Worker())
