"""The GEMMs of bench_decode.py --roofline: how close they come to the memory's rate, fused and apart.

up_gate is our kernel: it gathers x, multiplies by both weights and applies the activation. apart is the
ablation: our grouped_mm on rows gathered before, for gate and for up, then the activation in PyTorch. down
is the same grouped_mm. A kernel's bytes are those of the weights of experts that have tokens, of its inputs
and of its outputs, once each; those of `apart` add up over its kernels, so its FLOPs per byte are fewer.

grouped_mm makes its tile schedule in the call; up_gate gets the plan's.

Roofs: a kernel that only reads, and the dense GEMM of the layer's FLOPs, both timed in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import common
import torch
from torch import Tensor

MARKERS = {"up_gate": "o", "apart": "s", "down": "^"}


class Kernel(NamedTuple):
    run: Callable[[], None]  # all calls of a case
    flops: int  # of a call
    bytes: float  # of a call


def kernels(case) -> dict[str, Kernel]:
    """Those of a `decode_case.Case`."""
    import fused_moe
    from fused_moe import reference
    from fused_moe.function import ALPHA, LIMIT
    from fused_moe.ops import ACTIVATION_CODES, LAYOUTS, UNGATED

    T, E, K, D, hidden = case.sizes
    activation, gated = case.setup.activation, case.setup.gated
    plans = [fused_moe.route_plan(ids, E) for _, ids in case.routings]
    offs = [plan.offsets[1:].clone() for plan in plans]
    rows = [case.x.index_select(0, plan.row_token) for plan in plans]
    a = [torch.randn(T * K, hidden, dtype=case.x.dtype, device=case.x.device) for _ in plans]
    settings = (
        LAYOUTS["separate"] if gated else UNGATED,
        ACTIVATION_CODES[activation],
        [ALPHA, LIMIT],
        False,
    )

    def up_gate(i: int, w) -> Tensor:
        return torch.ops.fused_moe.experts_up(
            case.x, w.w1, w.w3, None, None, None, plans[i].tensors, *settings
        )[1]

    def apart(i: int, w) -> Tensor:
        gate = fused_moe.grouped_mm(rows[i], w.w1, offs[i])
        up = fused_moe.grouped_mm(rows[i], w.w3, offs[i]) if gated else None
        return reference.activate(gate, up, activation=activation)

    def down(i: int, w) -> Tensor:
        return fused_moe.grouped_mm(a[i], w.w2, offs[i])

    def every(kernel: Callable) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for i, (w, *_) in enumerate(case.calls()):
                    kernel(i, w)

        return run

    R, item, sides = T * K, case.x.element_size(), case.matrices - 1
    weights = case.bytes_of_a_call / case.matrices  # of one of the two or three matrices
    elementwise = 5 if gated else 2  # silu reads one and writes one; the product reads two and writes one
    flops = 2 * R * D * hidden
    return {
        "up_gate": Kernel(every(up_gate), sides * flops, sides * weights + item * (T * D + R * hidden)),
        "apart": Kernel(
            every(apart),
            sides * flops,
            sides * weights + item * R * (sides * (D + hidden) + elementwise * hidden),
        ),
        "down": Kernel(every(down), flops, weights + item * R * (hidden + D)),
    }


def measure(case, source: Tensor, clock, options: argparse.Namespace) -> Iterator[dict]:
    """What the records of one number of tokens have, one for each of MARKERS."""
    eager, number = options.eager or options.device != "cuda", len(case.routings)
    found = kernels(case)
    runs = {name: kernel.run if eager else common.as_graph(kernel.run) for name, kernel in found.items()}
    seconds = common.times(clock, runs | {"dense": case.dense, "read": source.sum}, options.repeats)
    read, dense = source.nbytes / seconds["read"], case.flops_of_a_call / seconds["dense"]
    for name, (_, flops, moved) in found.items():
        each = seconds[name] / number
        yield {
            "what": name,
            "mode": common.DEFAULT_MODE if eager else "graph",
            "time_us": round(each * 1e6, 1),
            "tflops": round(flops / each / 1e12, 4),
            "intensity": round(flops / moved, 2),
            "gb_per_s": round(moved / each / 1e9, 1),
            "read_gb_per_s": round(read / 1e9, 1),
            "dense_tflops": round(dense / 1e12, 4),
            "floor_ratio": round(max(moved / read, flops / dense) / each, 3),
        }


def draw(records: list[dict], path: Path) -> None:
    """TFLOP/s over FLOPs per byte, both logarithmic, below the two roofs; an arrow from apart to fused."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.5))
    read = max(r["read_gb_per_s"] for r in records) / 1e3
    dense = max(r["dense_tflops"] for r in records)
    low, high = min(r["intensity"] for r in records) / 2, 4 * dense / read
    low, high = min(low, dense / read / 4), max(high, 2 * max(r["intensity"] for r in records))
    axes.plot([low, dense / read, high], [low * read, dense, dense], "k-", linewidth=1)
    spot = {"textcoords": "offset points", "fontsize": 8}
    axes.annotate(f"read: {read:.3g} TB/s", (low, low * read), xytext=(12, 0), va="top", **spot)
    text = f"dense: {dense:.3g} TFLOP/s"
    axes.annotate(text, (high, dense), xytext=(0, 3), ha="right", va="bottom", **spot)
    groups: dict[tuple, dict[str, dict]] = {}
    for r in records:
        groups.setdefault((r["shape"], r["routing"], r["dtype"], r["tokens"]), {})[r["what"]] = r
    for i, ((shape, routing, dtype, tokens), kinds) in enumerate(groups.items()):
        for what, r in kinds.items():
            label = (
                f"{shape}, {routing}, {dtype}, {tokens} tokens: {what}, {r['floor_ratio']:.0%} of the roof"
            )
            axes.plot(r["intensity"], r["tflops"], MARKERS[what], color=f"C{i}", markersize=6, label=label)
        before, after = ((kinds[what]["intensity"], kinds[what]["tflops"]) for what in ("apart", "up_gate"))
        axes.annotate("", after, before, arrowprops={"arrowstyle": "->", "color": f"C{i}", "alpha": 0.6})
    first = records[0]
    title = first["cpu"] if first["gpu"] == "none" else first["gpu"]
    axes.set(xscale="log", yscale="log", title=title, ylabel="TFLOP/s")
    axes.set_xlabel("FLOPs per byte of weights, inputs and outputs")
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(path)
