"""Times a whole layer, router to combine, against the for-loop and against dense products of equal FLOPs.

    python benchmarks/bench_layer.py --shape cpu-32-experts --dtype fp32 --json out.json

Both layers have the same parameters and see the same tokens; the result is checked in float64 before
anything is timed. Each repeat runs ours, the loop and the dense products one after another, so that all
three meet the same machine, and the medians are compared. FLOPs: 6TKDF forward, 18TKDF with backward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch import Tensor

import fused_moe

HERE = Path(__file__).parent
SHAPES = json.loads((HERE / "shapes.json").read_text())
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ("num_tokens", "num_experts", "top_k", "dim", "hidden_dim")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", action="append", help="a name of shapes.json or T,E,K,D,F; may be repeated"
    )
    parser.add_argument("--routing", default="random", help="random, balanced, worst or zipf:EXPONENT")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be repeated")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="default: PyTorch's own choice")
    parser.add_argument("--json", type=Path, help="where the records go")
    options = parser.parse_args()
    options.shape = options.shape or [name for name in SHAPES if name.startswith("cpu")]
    options.dtype = options.dtype or ["fp32", "bf16"]
    return options


def sizes_of(shape: str) -> dict[str, int]:
    if shape in SHAPES:
        return SHAPES[shape]
    return dict(zip(SIZES, map(int, shape.split(",")), strict=True))


def favour(routing: str, num_experts: int, top_k: int) -> Tensor:
    """What is added to every token's logits so that the tokens fall on the experts as asked."""
    if routing == "worst":  # the same K experts take every token, at ordinary scores among themselves
        return 30.0 * (torch.arange(num_experts) < top_k)
    if routing.startswith("zipf:"):
        rank = torch.arange(1, num_experts + 1)
        return -float(routing.removeprefix("zipf:")) * rank.log()
    if routing in ("random", "balanced"):
        return torch.zeros(num_experts)
    raise SystemExit(f"--routing: expected random, balanced, worst or zipf:EXPONENT, found {routing}")


class Case:
    """The inputs of one shape and dtype, and the three things that are timed on them."""

    def __init__(self, sizes: dict[str, int], routing: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.T, self.E, self.K, self.D, self.F = (sizes[name] for name in SIZES)
        self.dtype = dtype
        layer = {name: sizes[name] for name in SIZES[1:]} | {"dtype": dtype, "gate_bias": True}
        self.ours = fused_moe.FusedMoE(**layer)
        self.loop = fused_moe.reference.FusedMoE(**layer)
        with torch.no_grad():
            tokens = torch.randn(self.T, self.D)
            if routing == "balanced":  # token t has its largest logits at experts t*K .. t*K + K
                wanted = torch.arange(self.T)[:, None] * self.K + torch.arange(self.K)
                self.ours.router.gate.weight.copy_(torch.randn(self.E, self.D))
                tokens = 0.1 * tokens + self.ours.router.gate.weight.float()[wanted % self.E].sum(1)
            self.ours.router.gate.bias.copy_(favour(routing, self.E, self.K))
            self.loop.load_state_dict(self.ours.state_dict())
        self.x = tokens.to(dtype).requires_grad_()
        self.dout = torch.randn(self.T, self.D).to(dtype)
        rows = self.T * self.K
        random = (torch.randn(*s).to(dtype) for s in ((rows, self.D), (self.D, 2 * self.F)))
        self.dense_up = tuple(random)
        random = (torch.randn(*s).to(dtype) for s in ((rows, self.F), (self.F, self.D)))
        self.dense_down = tuple(random)

    def flops(self, what: str) -> int:
        return (6 if what == "forward" else 18) * self.T * self.K * self.D * self.F

    def layer(self, layer: torch.nn.Module, what: str) -> None:
        if what == "forward":
            with torch.no_grad():
                layer(self.x)
            return
        self.x.grad = None
        layer.zero_grad(set_to_none=True)
        layer(self.x).backward(self.dout)

    def dense(self, what: str) -> None:
        for a, b in (self.dense_up, self.dense_down):
            out = a @ b
            if what != "forward":
                out @ b.t()
                a.t() @ out

    def error(self) -> float:
        """The largest norm-relative error of the output and of every gradient, in float64's eyes."""
        exact = fused_moe.reference.FusedMoE(
            self.D, self.F, self.E, self.K, gate_bias=True, dtype=torch.float64
        )
        exact.load_state_dict(self.ours.state_dict())
        results = []
        for layer, dtype in ((self.ours, self.dtype), (exact, torch.float64)):
            x = self.x.detach().to(dtype).requires_grad_()
            # the same choice for both: near ties would fall either way in lower precision
            scores, ids, _ = self.ours.router(self.x.detach(), None)
            out, _ = layer.experts(x, scores.detach().to(dtype), ids)
            out.backward(self.dout.to(dtype))
            results.append([out.detach(), x.grad, *(p.grad for p in layer.experts.parameters())])
        return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def timed(run, *args) -> float:
    start = time.perf_counter()
    run(*args)
    return time.perf_counter() - start


def machine() -> dict[str, str | int]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE
    )
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": (model or [platform.processor()])[0],
        "threads": torch.get_num_threads(),
        "gpu": "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def records(shape: str, routing: str, dtype: str, repeats: int):
    case = Case(sizes_of(shape), routing, DTYPES[dtype])
    error = case.error()
    bound = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}[dtype]
    if not error < bound:
        raise SystemExit(f"{shape} {dtype}: wrong before it is fast: relative error {error:.1e}")
    for what in ("forward", "forward_backward"):
        runs = {
            "ours": (case.layer, case.ours, what),
            "loop": (case.layer, case.loop, what),
            "dense": (case.dense, what),
        }
        for run in runs.values():
            timed(*run)
        samples = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                samples[name].append(timed(*run))
        median = {name: statistics.median(s) for name, s in samples.items()}
        yield {
            "bench": "layer",
            "shape": shape,
            "routing": routing,
            "tier": "cpu",
            "dtype": dtype,
            "what": what,
            "time_us": round(median["ours"] * 1e6, 1),
            "tflops": round(case.flops(what) / median["ours"] / 1e12, 4),
            "dense_ratio": round(median["dense"] / median["ours"], 3),
            "torch_ratio": None,
            "peer": "loop",
            "peer_ratio": round(median["loop"] / median["ours"], 3),
            "max_rel_error": error,
            **machine(),
        }


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    found = []
    for shape in options.shape:
        for dtype in options.dtype:
            for r in records(shape, options.routing, dtype, options.repeats):
                found.append(r)
                print(
                    f"{r['shape']:16} {r['routing']:9} {r['dtype']} {r['what']:17} "
                    f"{r['time_us'] / 1e3:9.1f} ms {r['tflops'] * 1e3:7.1f} GFLOP/s  "
                    f"{r['dense_ratio']:.2f} of dense  {r['peer_ratio']:.2f}x the loop  "
                    f"error {r['max_rel_error']:.1e}",
                    flush=True,
                )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
