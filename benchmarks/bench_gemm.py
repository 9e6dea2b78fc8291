"""Times single grouped GEMMs against one dense GEMM of equal FLOPs and against torch._grouped_mm.

    python benchmarks/bench_gemm.py --shape olmoe --what up_gate --what wgrad_up --json out.json
    python benchmarks/bench_gemm.py --shape static-batching --shape grouped-launch
    python benchmarks/bench_gemm.py --routing balanced --routing zipf:1.2 --order linear --json out.json

The six GEMMs of a layer are timed with the gathers, activations and scores that our kernels fuse; dense and
torch get contiguous rows and compute the GEMM only. dgrad_down is the GEMM of down_dgrad without anything
fused, as in down and up_dgrad. FLOPs: 4TKDF for up_gate, up_dgrad and wgrad_up, 2TKDF for the others. The
`gemms` of shapes.json, or R,E,k,n, are plain GEMMs on contiguous rows, with their own distributions.

--order, --expert-order and --tails set parts of the sm90 tier's tile schedule (csrc/schedule.h). One record
for each setting shows what that part is worth: `table.py --gains` compares the records.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import common
import torch
import torch.nn.functional as F
from common import Error
from torch import Tensor

LAYER_GEMMS = ("up_gate", "down", "up_dgrad", "dgrad_down", "down_dgrad", "wgrad_up", "wgrad_down")
DISTRIBUTIONS = ("balanced", "best", "worst", "one-each")


class Gemm(NamedTuple):
    """A GEMM in three implementations, and a check of ours for one expert."""

    flops: int
    operands: tuple[Tensor, ...]  # of the dense GEMM, for its arithmetic intensity
    ours: Callable[[], object]
    dense: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    # (our result, expert, its rows) -> pairs (ours, exact)
    check: Callable[[object, int, slice], list[tuple[Tensor, Tensor]]]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__, many_routings=True)
    add = flags.add_argument
    choices = (*LAYER_GEMMS, "grouped_mm")
    what = f"of {', '.join(choices)}; may be repeated"
    add("--what", choices=choices, action="append", metavar="GEMM", help=what)
    orders, expert_orders = ("linear", "grouped", "column"), ("interleaved", "in-turn")
    add("--order", choices=orders, metavar="NAME", help="of an expert's tiles: linear, grouped or column")
    skinny = (
        "skinny experts: interleaved or on SMs of their own (interleaved, the default), or last (in-turn)"
    )
    add("--expert-order", choices=expert_orders, metavar="NAME", help=skinny)
    add("--tails", choices=("on", "off"), help="swap-AB and splitting the last wave; default: on")
    return flags.parse_args(argv)


class Layer:
    """The GEMMs of a layer's step. Our kernels gather tokens; the others get contiguous rows."""

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
        self.offs = self.plan.offsets[1:].clone()
        self.x, self.dout = new(T, D), new(T, D)
        self.a, self.h, self.dh = new(rows, hidden), new(rows, 2 * hidden), new(rows, 2 * hidden)
        self.w1, self.w3 = (new(E, hidden, D, scale=D**-0.5) for _ in range(2))
        self.w2 = new(E, D, hidden, scale=hidden**-0.5)
        self.w13 = torch.cat([self.w1, self.w3], dim=1)
        self.x_rows, self.dout_rows = (t.index_select(0, self.plan.row_token) for t in (self.x, self.dout))
        layout, silu = 0, 0  # w1 and w3 separate
        self.activation = (layout, silu, [0.0, 0.0])
        self.ops = torch.ops.fused_moe

    def grouped(self, a: Tensor, b: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=self.offs)

    def up_gate(self) -> Gemm:
        def check(found, e: int, rows: slice):
            h = self.x_rows[rows].double() @ self.w13[e].double().T
            gate, up = h.chunk(2, dim=1)
            return [(found[0][rows], h), (found[1][rows], F.silu(gate) * up)]

        return Gemm(
            2 * self.flops,
            (self.x_rows, self.w13, self.h),
            lambda: self.ops.up_gate(
                self.x, self.w1, self.w3, None, None, self.plan.tensors, *self.activation
            ),
            lambda: self.x_rows @ self.w13[0].T,
            lambda: self.grouped(self.x_rows, self.w13.mT),
            check,
        )

    def down(self) -> Gemm:
        return Gemm(
            self.flops,
            (self.a, self.w2, self.x_rows),
            lambda: self.ops.grouped_mm(self.a, self.w2, self.offs),
            lambda: self.a @ self.w2[0].T,
            lambda: self.grouped(self.a, self.w2.mT),
            lambda found, e, rows: [(found[rows], self.a[rows].double() @ self.w2[e].double().T)],
        )

    def up_dgrad(self) -> Gemm:
        return Gemm(
            2 * self.flops,
            (self.dh, self.w13, self.x_rows),
            lambda: self.ops.up_dgrad(self.dh, self.w1, self.w3, self.plan.tensors, self.activation[0]),
            lambda: self.dh @ self.w13[0],
            lambda: self.grouped(self.dh, self.w13),
            lambda found, e, rows: [(found[rows], self.dh[rows].double() @ self.w13[e].double())],
        )

    def dgrad_down(self) -> Gemm:
        return Gemm(
            self.flops,
            (self.dout_rows, self.w2, self.a),
            lambda: self.ops.grouped_mm(self.dout_rows, self.w2.mT, self.offs),
            lambda: self.dout_rows @ self.w2[0],
            lambda: self.grouped(self.dout_rows, self.w2),
            lambda found, e, rows: [(found[rows], self.dout_rows[rows].double() @ self.w2[e].double())],
        )

    def down_dgrad(self) -> Gemm:
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

        return Gemm(
            self.flops,
            (self.dout_rows, self.w2, self.h, self.dh, self.a),
            lambda: self.ops.down_dgrad(
                self.dout, self.w2, None, self.h, self.scores, self.plan.tensors, *self.activation
            ),
            lambda: self.dout_rows @ self.w2[0],
            lambda: self.grouped(self.dout_rows, self.w2),
            check,
        )

    def wgrad_up(self) -> Gemm:
        """Both weights in one launch, as in the layer's backward."""

        def ours():
            needs = (False, True, True, False, False, False)  # of dx, dw1, dw3, db1, db3, dscores
            plan, layout = self.plan.tensors, self.activation[0]
            return self.ops.experts_up_backward(
                self.dh, self.x, self.w1, self.w3, None, plan, layout, *needs
            )[1:3]

        def check(found, e: int, rows: slice):
            exact = self.dh[rows].double().T @ self.x_rows[rows].double()
            return list(zip((dw[e] for dw in found), exact.chunk(2), strict=True))

        return Gemm(
            2 * self.flops,
            (self.dh, self.x_rows, self.w13),
            ours,
            lambda: self.dh.T @ self.x_rows,
            lambda: self.grouped(self.dh.mT, self.x_rows),
            check,
        )

    def wgrad_down(self) -> Gemm:
        return Gemm(
            self.flops,
            (self.dout_rows, self.a, self.w2),
            lambda: self.ops.wgrad(self.dout, self.a, self.offs, self.plan.row_token, None),
            lambda: self.dout_rows.T @ self.a,
            lambda: self.grouped(self.dout_rows.mT, self.a),
            lambda found, e, rows: [(found[e], self.dout_rows[rows].double().T @ self.a[rows].double())],
        )


class Plain:
    """One plain GEMM a (R, k), b (E, n, k); `distribution` gives the rows of each expert."""

    def __init__(self, sizes: tuple[int, ...], distribution: str, dtype: str, device: str):
        torch.manual_seed(0)
        rows, E, k, n = sizes
        factory = {"dtype": common.DTYPES[dtype], "device": device}
        self.a, self.b = torch.randn(rows, k, **factory), torch.randn(E, n, k, **factory)
        self.offs = row_counts(distribution, rows, E).cumsum(0, dtype=torch.int32).to(device)
        self.flops = 2 * rows * n * k

    def grouped_mm(self) -> Gemm:
        return Gemm(
            self.flops,
            (self.a, self.b, self.a.new_empty(self.a.size(0), self.b.size(1))),
            lambda: torch.ops.fused_moe.grouped_mm(self.a, self.b, self.offs),
            lambda: self.a @ self.b[0].T,
            lambda: torch._grouped_mm(self.a, self.b.mT, offs=self.offs),
            lambda found, e, rows: [(found[rows], self.a[rows].double() @ self.b[e].double().T)],
        )


def row_counts(distribution: str, num_rows: int, num_experts: int) -> Tensor:
    """Rows of each expert. balanced: counts differ by at most 1. best: eight experts share all rows. worst:
    the last expert has all rows but one of each other expert. one-each: eight experts share all rows but one
    of each other expert."""
    experts = torch.arange(num_experts)
    if distribution == "one-each":
        busy = min(8, num_experts - 1)
        shared = num_rows - (num_experts - busy)
        return torch.where(experts < busy, shared // busy + (experts < shared % busy), 1)
    if distribution == "worst":
        return torch.where(experts < num_experts - 1, 1, num_rows - num_experts + 1)
    active = min(8, num_experts) if distribution == "best" else num_experts
    return torch.where(experts < active, num_rows // active + (experts < num_rows % active), 0)


def cases(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[tuple[str, Layer | Plain]]:
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
        yield distribution, Plain(sizes, distribution, dtype, options.device)


def error_of(gemm: Gemm, offs: Tensor) -> Error:
    """In float64, of the first, a middle, the last and the largest expert."""
    error, found = Error(), gemm.ours()
    ends = [0, *offs.tolist()]
    sizes = [end - first for first, end in zip(ends, ends[1:], strict=False)]
    for e in sorted({0, len(sizes) // 2, len(sizes) - 1, sizes.index(max(sizes))}):
        for i, (ours, exact) in enumerate(gemm.check(found, e, slice(ends[e], ends[e + 1]))):
            error.add(f"result {i}", ours, exact)
    return error


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    for routing, case in cases(shape, dtype, options):
        known = LAYER_GEMMS if isinstance(case, Layer) else ("grouped_mm",)
        for what in (name for name in known if name in (options.what or known)):
            gemm = getattr(case, what)()
            error = error_of(gemm, case.offs).check(f"{shape} {what}", dtype)
            runs = {"ours": gemm.ours, "dense": gemm.dense}
            if common.has_grouped_mm(options.device, dtype):
                runs["torch"] = gemm.torch
            seconds = common.times(common.clock(options.device), runs, options.repeats)
            yield common.record(
                options,
                bench="gemm",
                shape=shape,
                routing=routing,
                dtype=dtype,
                what=what,
                time_us=round(seconds["ours"] * 1e6, 1),
                tflops=round(gemm.flops / seconds["ours"] / 1e12, 4),
                dense_ratio=common.ratio(seconds, "dense"),
                torch_ratio=common.ratio(seconds, "torch"),
                max_rel_error=error,
                intensity=round(gemm.flops / sum(t.nbytes for t in gemm.operands), 1),
            )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    all_shapes = options.shape is None
    common.start(options)
    common.set_schedule(options, order=options.order, experts=options.expert_order, tails=options.tails)
    if all_shapes and options.device == "cuda":
        options.shape += common.SHAPES["gemms"]
    common.report(options, measure)


if __name__ == "__main__":
    main()
