"""Times the host side of a layer and counts its launches: eight small layers in a row, one build or more.

    python benchmarks/bench_host.py --build d1353da=../old --build HEAD=. --json out.json
    python benchmarks/bench_host.py --build HEAD=. --device cpu

The GPU computes so small a layer in less time than Python and the launches take, so a layer's time is the
host's: host_us. On a CPU, where kernels run on the host, the layers are narrower and have few tokens.
launches counts this library's kernels and memsets per layer; other_launches counts PyTorch's (the gradient of
the router's weight, the token counter).

Single calls without gradients, of one token: operator_us is what their operators take when they are called
by themselves, with arguments converted, memory allocated and kernels launched (on a CPU: run, on one thread).
python_us is the rest.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import builds
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LAYERS, TOKENS, EXPERTS, TOP_K, WIDTH = 8, 2048, 32, 4, 256
STEPS = 10
CALLS = ("fused_experts", "fused_experts out=", "FusedMoE")
FEW_EXPERTS, FEW_SLOTS, NARROW = 4, 2, 16  # of the single calls, and of the layers on a CPU
FEW_TOKENS = 4
# Our kernels' names contain one of these; PyTorch's do not.
OWN = ("fused_moe",)


def layers(device: str = "cuda"):
    import fused_moe

    torch.manual_seed(0)
    factory = {"device": device, "dtype": torch.bfloat16}
    sizes, tokens = (WIDTH, WIDTH, EXPERTS, TOP_K), TOKENS
    if device == "cpu":
        torch.set_num_threads(1)  # threads take longer to start than so small a layer takes
        sizes, tokens = (NARROW, NARROW, FEW_EXPERTS, FEW_SLOTS), FEW_TOKENS
    stack = [fused_moe.FusedMoE(*sizes, **factory) for _ in range(LAYERS)]
    x = torch.randn(tokens, sizes[0], **factory, requires_grad=True)
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
    synchronize = torch.cuda.synchronize if x.is_cuda else bool
    synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        step(stack, x, what)
    synchronize()
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


# --- single calls -------------------------------------------------------------------------------------


def single_calls(device: str) -> dict[str, Callable]:
    import fused_moe

    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)  # threads take longer to start than so small a layer takes
    factory = {"device": device, "dtype": torch.bfloat16}
    layer = fused_moe.FusedMoE(NARROW, NARROW, FEW_EXPERTS, FEW_SLOTS, **factory).eval()
    x = torch.randn(1, NARROW, **factory)
    w1, w2, w3 = (w.detach() for w in layer.experts.weights)
    scores, ids = torch.rand(1, FEW_SLOTS, device=device), torch.arange(FEW_SLOTS, device=device)[None].int()
    out = torch.empty_like(x)
    return {
        "fused_experts": lambda: fused_moe.fused_experts(x, w1, w2, w3, scores, ids),
        "fused_experts out=": lambda: fused_moe.fused_experts(x, w1, w2, w3, scores, ids, out=out),
        "FusedMoE": lambda: layer(x),
    }


class Operators(TorchDispatchMode):
    """Lists this library's operators and their arguments."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fused_moe":
            self.found.append((op, args))
        return op(*args, **(kwargs or {}))


def us_per_call(call: Callable, device: str, number: int = 100) -> float:
    """Microseconds of host time per call. The calls are few enough for a GPU to queue all launches."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


@torch.no_grad()
def parts(call: Callable, device: str) -> tuple[float, float]:
    """Microseconds of a call, and of its operators."""
    call()
    with Operators() as operators:
        call()

    def run_operators():
        for op, args in operators.found:
            op(*args)

    whole = us_per_call(call, device)
    with torch._C._AutoDispatchBelowAutograd():
        return whole, us_per_call(run_operators, device)


class Worker:
    """Answers {what} with microseconds per layer, {count} with launches, and {call} with its parts."""

    def __init__(self):
        self.layers = self.calls = None

    def __call__(self, what: str = "", count: str = "", call: str = "", device: str = "cuda"):
        if call:
            self.calls = self.calls or single_calls(device)
            return parts(self.calls[call], device)
        self.layers = self.layers or layers(device)
        if count:
            own, others = launches(*self.layers, count)
            return {"launches": own, "other_launches": others}
        return host_us(*self.layers, what)


def time_calls(processes: list[builds.Process], rounds: int, device: str) -> list[dict]:
    records = []
    for call in CALLS:
        builds.in_turns(processes, 1, call=call, device=device)  # warm-up
        for commit, answers in builds.in_turns(processes, rounds, call=call, device=device).items():
            us, operator_us = (statistics.median(times) for times in zip(*answers, strict=True))
            times_us = {
                "host_us": round(us, 1),
                "least_us": round(min(whole for whole, _ in answers), 1),
                "operator_us": round(operator_us, 1),
                "python_us": round(us - operator_us, 1),
            }
            print(
                f"{commit:10} {call:18} {us:6.1f} us (least {times_us['least_us']}): "
                f"{operator_us:.1f} in operators, {times_us['python_us']} in Python"
            )
            records.append({"bench": "host", "what": call, "commit": commit, "device": device, **times_us})
    return records


def time_layers(processes: list[builds.Process], rounds: int, device: str) -> list[dict]:
    records = []
    for what in ("forward", "forward_backward"):
        builds.in_turns(processes, 1, what=what, device=device)  # warm-up
        times = builds.in_turns(processes, rounds, what=what, device=device)
        for process in processes:
            us, counts, counted = times[process.commit], {"device": device}, ""
            if device == "cuda":
                counts = process.ask(count=what)
                counted = (
                    f", {counts['launches']:g} launches of ours, {counts['other_launches']:g} of PyTorch's"
                )
            median, least = round(statistics.median(us), 1), round(min(us), 1)
            print(f"{process.commit:10} {what:17} {median:7.1f} us per layer (least {least}){counted}")
            times_us = {"host_us": median, "least_us": least}
            records.append({"bench": "host", "what": what, "commit": process.commit, **times_us, **counts})
    return records


def main(argv: list[str] | None = None) -> None:
    flags = builds.parser(__doc__, rounds=30)
    flags.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = flags.parse_args(argv)
    processes = builds.start(options.build, __file__)
    records = time_layers(processes, options.rounds, options.device)
    records += time_calls(processes, options.rounds, options.device)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    builds.run(main, Worker())
