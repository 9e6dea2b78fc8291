"""Times single grouped products against one dense product of equal FLOPs and against torch._grouped_mm.

    python benchmarks/bench_gemm.py --shape olmoe --what up_gate --what wgrad_up --json out.json
    python benchmarks/bench_gemm.py --shape static-batching --shape grouped-launch
    python benchmarks/bench_gemm.py --routing balanced --routing zipf:1.2 --order linear --json out.json

The six products of a layer, with the gathers, activations and scores that ours fuses; dense and torch get
contiguous rows and do the product alone. Beside them dgrad_down, the product in down_dgrad without what it
fuses: plain as down and up_dgrad are. FLOPs: 4TKDF for up_gate, up_dgrad and wgrad_up, 2TKDF for the others.
The `gemms` of shapes.json, or R,E,k,n, are plain products of rows that are grouped already, in
distributions of their own.

--order, --expert-order and --tails are decisions of the Hopper engine's schedule (csrc/schedule.h), switched
off one by one to measure what each is worth: `table.py --gains` compares the records.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import common
import torch
import torch.nn.functional as F
from common import Error
from torch import Tensor

LAYER_PRODUCTS = ("up_gate", "down", "up_dgrad", "dgrad_down", "down_dgrad", "wgrad_up", "wgrad_down")
DISTRIBUTIONS = ("balanced", "best", "worst")


class Product(NamedTuple):
    """What is timed, and how to check it expert by expert."""

    flops: int
    operands: tuple[Tensor, ...]  # of the dense product, for its arithmetic intensity
    ours: Callable[[], object]
    dense: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    # (result of ours, expert, its rows) -> pairs of what was found and what is exact
    check: Callable[[object, int, slice], list[tuple[Tensor, Tensor]]]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__, many_routings=True)
    add = flags.add_argument
    choices = (*LAYER_PRODUCTS, "grouped_mm")
    add("--what", choices=choices, action="append", help="may be repeated; default: all")
    add("--order", choices=("linear", "grouped", "column"), help="of an expert's tiles; default: grouped")
    add("--expert-order", choices=("interleaved", "in-turn"), help="busy and idle; default: interleaved")
    add("--tails", choices=("on", "off"), help="few rows and the last turn's tiles made smaller; default: on")
    return flags.parse_args(argv)


def set_schedule(options: argparse.Namespace) -> None:
    """FUSED_MOE_SCHEDULE is read at every launch. Without any of the flags the environment's own holds."""
    asked = {"order": options.order, "experts": options.expert_order, "tails": options.tails}
    if any(asked.values()):
        parts = (f"{name}={value}" for name, value in asked.items() if value)
        os.environ["FUSED_MOE_SCHEDULE"] = ",".join(parts)


class Layer:
    """The products of a layer's step. Rows are contiguous copies beside tokens that ours gathers."""

    def __init__(self, sizes: common.Sizes, routing: str, dtype: str, device: str):
        import fused_moe

        torch.manual_seed(0)
        T, E, K, D, hidden = sizes
        rows = T * K
        self.flops = 2 * rows * D * hidden

        def new(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, dtype=common.DTYPES[dtype], device=device).mul_(scale)

        self.scores, ids = fused_moe.route(common.routing_logits(routing, sizes, device), K)
        self.plan = fused_moe.route_plan(ids, E)
        self.ends = self.plan.offsets[1:].clone()
        self.x, self.dout = new(T, D), new(T, D)
        self.a, self.h, self.dh = new(rows, hidden), new(rows, 2 * hidden), new(rows, 2 * hidden)
        self.w1, self.w3 = (new(E, hidden, D, scale=D**-0.5) for _ in range(2))
        self.w2 = new(E, D, hidden, scale=hidden**-0.5)
        self.w13 = torch.cat([self.w1, self.w3], dim=1)
        self.x_rows, self.dout_rows = (t.index_select(0, self.plan.row_token) for t in (self.x, self.dout))
        layout, silu = 0, 0  # w1 and w3 separate
        self.activation = (layout, silu, 0.0, 0.0)
        self.ops = torch.ops.fused_moe

    def grouped(self, a: Tensor, b: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=self.ends)

    def up_gate(self) -> Product:
        def check(found, e: int, rows: slice):
            h = self.x_rows[rows].double() @ self.w13[e].double().T
            gate, up = h.chunk(2, dim=1)
            return [(found[0][rows], h), (found[1][rows], F.silu(gate) * up)]

        return Product(
            2 * self.flops,
            (self.x_rows, self.w13, self.h),
            lambda: self.ops.up_gate(self.x, self.w1, self.w3, None, None, *self.plan[1:], *self.activation),
            lambda: self.x_rows @ self.w13[0].T,
            lambda: self.grouped(self.x_rows, self.w13.mT),
            check,
        )

    def down(self) -> Product:
        return Product(
            self.flops,
            (self.a, self.w2, self.x_rows),
            lambda: self.ops.grouped_mm(self.a, self.w2, self.ends),
            lambda: self.a @ self.w2[0].T,
            lambda: self.grouped(self.a, self.w2.mT),
            lambda found, e, rows: [(found[rows], self.a[rows].double() @ self.w2[e].double().T)],
        )

    def up_dgrad(self) -> Product:
        return Product(
            2 * self.flops,
            (self.dh, self.w13, self.x_rows),
            lambda: self.ops.up_dgrad(self.dh, self.w1, self.w3, self.plan.offsets, self.activation[0]),
            lambda: self.dh @ self.w13[0],
            lambda: self.grouped(self.dh, self.w13),
            lambda found, e, rows: [(found[rows], self.dh[rows].double() @ self.w13[e].double())],
        )

    def dgrad_down(self) -> Product:
        return Product(
            self.flops,
            (self.dout_rows, self.w2, self.a),
            lambda: self.ops.grouped_mm(self.dout_rows, self.w2.mT, self.ends),
            lambda: self.dout_rows @ self.w2[0],
            lambda: self.grouped(self.dout_rows, self.w2),
            lambda found, e, rows: [(found[rows], self.dout_rows[rows].double() @ self.w2[e].double())],
        )

    def down_dgrad(self) -> Product:
        def check(found, e: int, rows: slice):
            dh, a_scaled, dscores = found
            slots = self.plan.row_slot[rows].long()
            s = self.scores.flatten()[slots, None].double()
            h = self.h[rows].double().requires_grad_()
            gate, up = h.chunk(2, dim=1)
            a = F.silu(gate) * up
            g = self.dout_rows[rows].double() @ self.w2[e].double()
            (exact_dh,) = torch.autograd.grad(a, h, s * g)
            a = a.detach()
            exact_dscores = (g * a).sum(1)
            return [
                (dh[rows], exact_dh),
                (a_scaled[rows], s * a),
                (dscores.flatten()[slots], exact_dscores),
            ]

        return Product(
            self.flops,
            (self.dout_rows, self.w2, self.h, self.dh, self.a),
            lambda: self.ops.down_dgrad(
                self.dout, self.w2, None, self.h, self.scores, *self.plan[1:], *self.activation
            ),
            lambda: self.dout_rows @ self.w2[0],
            lambda: self.grouped(self.dout_rows, self.w2),
            check,
        )

    def wgrad_up(self) -> Product:
        """Both weights in one launch, as the layer's backward has it."""

        def ours():
            wanted = (False, True, True, False, False, False)  # of dx, dw1, dw3, db1, db3, dscores
            maps, layout = self.plan[1:], self.activation[0]
            return self.ops.experts_up_backward(
                self.dh, self.x, self.w1, self.w3, None, *maps, layout, *wanted
            )[1:3]

        def check(found, e: int, rows: slice):
            exact = self.dh[rows].double().T @ self.x_rows[rows].double()
            return list(zip((dw[e] for dw in found), exact.chunk(2), strict=True))

        return Product(
            2 * self.flops,
            (self.dh, self.x_rows, self.w13),
            ours,
            lambda: self.dh.T @ self.x_rows,
            lambda: self.grouped(self.dh.mT, self.x_rows),
            check,
        )

    def wgrad_down(self) -> Product:
        return Product(
            self.flops,
            (self.dout_rows, self.a, self.w2),
            lambda: self.ops.wgrad(self.dout, self.a, self.ends, self.plan.row_token, None),
            lambda: self.dout_rows.T @ self.a,
            lambda: self.grouped(self.dout_rows.mT, self.a),
            lambda found, e, rows: [(found[e], self.dout_rows[rows].double().T @ self.a[rows].double())],
        )


class Gemm:
    """One plain product a (R, k), b (E, n, k), with rows on the experts as `distribution` says."""

    def __init__(self, sizes: tuple[int, ...], distribution: str, dtype: str, device: str):
        torch.manual_seed(0)
        rows, E, k, n = sizes
        factory = {"dtype": common.DTYPES[dtype], "device": device}
        self.a, self.b = torch.randn(rows, k, **factory), torch.randn(E, n, k, **factory)
        self.ends = row_counts(distribution, rows, E).cumsum(0, dtype=torch.int32).to(device)
        self.flops = 2 * rows * n * k

    def grouped_mm(self) -> Product:
        return Product(
            self.flops,
            (self.a, self.b, self.a.new_empty(self.a.size(0), self.b.size(1))),
            lambda: torch.ops.fused_moe.grouped_mm(self.a, self.b, self.ends),
            lambda: self.a @ self.b[0].T,
            lambda: torch._grouped_mm(self.a, self.b.mT, offs=self.ends),
            lambda found, e, rows: [(found[rows], self.a[rows].double() @ self.b[e].double().T)],
        )


def row_counts(distribution: str, num_rows: int, num_experts: int) -> Tensor:
    """Rows of each expert. balanced: equal, up to one. best: eight experts share all. worst: one row each,
    all others in the last expert."""
    experts = torch.arange(num_experts)
    if distribution == "worst":
        return torch.where(experts < num_experts - 1, 1, num_rows - num_experts + 1)
    busy = min(8, num_experts) if distribution == "best" else num_experts
    return torch.where(experts < busy, num_rows // busy + (experts < num_rows % busy), 0)


def cases(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[tuple[str, Layer | Gemm]]:
    """The routings of a shape, each with its operands."""
    gemm = common.SHAPES["gemms"].get(shape)
    if gemm:
        sizes = tuple(gemm[name] for name in ("num_rows", "num_experts", "k", "n"))
        distributions = gemm["distributions"]
    elif shape.count(",") == 3:
        sizes, distributions = tuple(map(int, shape.split(","))), DISTRIBUTIONS
    else:
        sizes, distributions = common.layer_sizes(shape), ()
        for routing in options.routing:
            yield routing, Layer(sizes, routing, dtype, options.device)
    for distribution in distributions:
        yield distribution, Gemm(sizes, distribution, dtype, options.device)


def error_of(product: Product, ends: Tensor) -> Error:
    """On the first, a middle, the last and the busiest expert, in float64."""
    error, found = Error(), product.ours()
    ends = [0, *ends.tolist()]
    sizes = [end - first for first, end in zip(ends, ends[1:], strict=False)]
    for e in sorted({0, len(sizes) // 2, len(sizes) - 1, sizes.index(max(sizes))}):
        for i, (ours, exact) in enumerate(product.check(found, e, slice(ends[e], ends[e + 1]))):
            error.add(f"result {i}", ours, exact)
    return error


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for routing, case in cases(shape, dtype, options):
        known = LAYER_PRODUCTS if isinstance(case, Layer) else ("grouped_mm",)
        for what in (name for name in known if name in (options.what or known)):
            product = getattr(case, what)()
            error = error_of(product, case.ends).check(f"{shape} {what}", dtype)
            runs = {"ours": product.ours, "dense": product.dense}
            if common.has_grouped_mm(options.device, dtype):
                runs["torch"] = product.torch
            seconds = common.times(common.clock(options.device), runs, options.repeats)
            yield common.record(
                options,
                bench="gemm",
                shape=shape,
                routing=routing,
                dtype=dtype,
                what=what,
                time_us=round(seconds["ours"] * 1e6, 1),
                tflops=round(product.flops / seconds["ours"] / 1e12, 4),
                dense_ratio=common.ratio(seconds, "dense"),
                torch_ratio=common.ratio(seconds, "torch"),
                max_rel_error=error,
                intensity=round(product.flops / sum(t.nbytes for t in product.operands), 1),
            )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    all_shapes = options.shape is None
    set_schedule(options)
    common.start(options)
    if all_shapes and options.device == "cuda":
        options.shape += common.SHAPES["gemms"]
    common.report(options, measure)


if __name__ == "__main__":
    main()
