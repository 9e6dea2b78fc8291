"""Times the host side of a layer and counts its launches, on eight small layers in a row.

    python benchmarks/bench_host.py --commit $(git rev-parse --short HEAD) --json out.json

host_us is the time of one layer where the host is the bottleneck: the GPU computes so small a layer in less
time than Python and the launches take. launches counts this library's kernels and memsets per layer;
other_launches counts PyTorch's (the router's GEMMs, the sum of two gradients, the token counter).
"""

from __future__ import annotations

import json
import statistics
import time

import common
import torch

LAYERS, TOKENS, EXPERTS, TOP_K, WIDTH = 8, 2048, 32, 4, 256
STEPS, REPEATS = 10, 15
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
    """Microseconds per layer, median of REPEATS."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step(stack, x, what)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / (STEPS * LAYERS) * 1e6)
    return statistics.median(times)


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


def main(argv: list[str] | None = None) -> None:
    flags = common.parser(__doc__)
    flags.add_argument("--commit", required=True, help="the commit that was built")
    options = flags.parse_args(argv)
    common.start(options)
    stack, x = layers()
    records = []
    for what in ("forward", "forward_backward"):
        for _ in range(3):
            step(stack, x, what)
        time_us = host_us(stack, x, what)
        own, others, names = launches(stack, x, what)
        print(f"{what:17} {time_us:7.1f} us per layer, {own:g} launches of ours, {others:g} of PyTorch's")
        for name in names:
            print("   ", name[:150])
        records.append(
            {
                "bench": "host",
                "what": what,
                "commit": options.commit,
                "host_us": round(time_us, 1),
                "launches": own,
                "other_launches": others,
            }
        )
    if options.json:
        old = json.loads(options.json.read_text()) if options.append and options.json.exists() else []
        options.json.write_text(json.dumps([*old, *records], indent=1) + "\n")


if __name__ == "__main__":
    main()
