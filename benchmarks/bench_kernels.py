"""Times the memory-bound kernels, routing and permutation, against a copy on the same device.

    python benchmarks/bench_kernels.py --shape olmoe --what route --what permute --json out.json

GB/s counts every input read once and every output written once. copy_ratio is that rate over the rate of a
large copy, counted likewise. On a GPU graph_us is the same call replayed from a CUDA graph, so without the
gaps between its launches.

    python benchmarks/bench_kernels.py --shape qwen3-30b --activations

times up_gate and down_dgrad with every activation instead, alternating: silu_ratio is the time over silu's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import common
import torch
from common import MIB, Error
from torch import Tensor

CHECKED_TOKENS = 1024
WHATS = (
    "router_logits",
    "route",
    "route_backward",
    "route_plan",
    "route_and_plan",
    "permute",
    "combine",
    "sum_peers",
    "unpermute_backward",
)


class Kernel(NamedTuple):
    """A call to time, the tensors that it must read, and the check of its result."""

    inputs: tuple[Tensor, ...]
    run: Callable[[], object]
    check: Callable[[Error, object], None]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    what = f"of {', '.join(WHATS)}; may be repeated"
    flags.add_argument("--what", choices=WHATS, action="append", metavar="KERNEL", help=what)
    flags.add_argument("--activations", action="store_true", help="what each costs beside silu")
    return flags.parse_args(argv)


class Case:
    """The tensors of a layer's routing, and each kernel on them."""

    def __init__(self, sizes: common.Sizes, routing: str, dtype: str, device: str):
        import fused_moe

        torch.manual_seed(0)
        T, self.num_experts, self.top_k, D, _ = sizes
        self.ops, self.reference = torch.ops.fused_moe, fused_moe.reference
        factory = {"dtype": common.DTYPES[dtype], "device": device}
        self.logits = common.routing_logits(routing, sizes, device).to(factory["dtype"])
        self.scores, self.ids = fused_moe.route(self.logits, self.top_k)
        self.dscores = torch.randn_like(self.scores)
        self.plan = fused_moe.route_plan(self.ids, self.num_experts)
        self.plan_tensors = self.plan.tensors
        self.x, self.dout = torch.randn(T, D, **factory), torch.randn(T, D, **factory)
        self.gate = torch.randn(self.num_experts, D, **factory) / D**0.5
        self.rows = torch.randn(T * self.top_k, D, **factory)
        # the last tokens are checked: their offsets are the largest
        self.last = slice(max(0, T - CHECKED_TOKENS), T)
        self.last_rows = self.plan.token_row[self.last].long()

    def router_logits(self) -> Kernel:
        def check(error: Error, found) -> None:
            error.add("logits", found[self.last], self.x[self.last].double() @ self.gate.double().T)

        return Kernel((self.x, self.gate), lambda: self.ops.router_logits(self.x, self.gate, None), check)

    def route(self) -> Kernel:
        def check(error: Error, found) -> None:
            scores, ids = self.reference.route(self.logits, self.top_k)
            error.add_equal("ids", found[1], ids)
            error.add("scores", found[0], scores)

        softmax, plain = 0, (False, 1.0, 1e-20, 0, 0, 0)
        return Kernel(
            (self.logits,),
            lambda: self.ops.route(self.logits, None, self.top_k, softmax, *plain),
            check,
        )

    def route_backward(self) -> Kernel:
        def check(error: Error, found) -> None:
            logits = self.logits.double().requires_grad_()
            scores = logits.softmax(-1).gather(-1, self.ids.long())
            error.add("dlogits", found, *torch.autograd.grad(scores, logits, self.dscores.double()))

        inputs = self.dscores, self.logits, self.ids
        return Kernel(inputs, lambda: self.ops.route_backward(*inputs, 0, False, 1.0, 1e-20), check)

    def route_plan(self) -> Kernel:
        def check(error: Error, found) -> None:
            exact = self.reference.route_plan(self.ids, self.num_experts)
            for name, ours, right in zip(exact._fields, found, exact, strict=True):
                error.add_equal(name, ours, right)

        return Kernel((self.ids,), lambda: self.ops.route_plan(self.ids, self.num_experts), check)

    def route_and_plan(self) -> Kernel:
        """Everything between the router's GEMM and the experts."""
        route, plan = self.route(), self.route_plan()

        def run():
            scores, ids = route.run()
            return scores, ids, *self.ops.route_plan(ids, self.num_experts)

        def check(error: Error, found) -> None:
            route.check(error, found[:2])
            plan.check(error, found[2:])

        return Kernel((self.logits,), run, check)

    def permute(self) -> Kernel:
        def check(error: Error, found) -> None:
            error.add("rows", found[self.last_rows], self.x[self.last].unsqueeze(1).double())

        return Kernel(
            (self.x, self.plan.row_token), lambda: self.ops.permute(self.x, self.plan_tensors), check
        )

    def combine(self) -> Kernel:
        def check(error: Error, found) -> None:
            exact = self.scores[self.last].unsqueeze(1).double() @ self.rows[self.last_rows].double()
            error.add("out", found[self.last], exact.squeeze(1))

        inputs = self.rows, self.scores
        return Kernel(
            (*inputs, self.plan.token_row), lambda: self.ops.unpermute(*inputs, self.plan_tensors), check
        )

    def sum_peers(self) -> Kernel:
        """combine, by the kernel that reads the memory of several ranks; here it is that of one GPU."""
        parts = 4 if self.rows.size(0) % 4 == 0 else 1
        combine, args = self.combine(), (list(self.rows.chunk(parts)), self.plan.token_row, self.scores)
        return Kernel(combine.inputs, lambda: self.ops.sum_peers(*args), combine.check)

    def unpermute_backward(self) -> Kernel:
        def check(error: Error, found) -> None:
            drows, dscores = found
            dout, scores = self.dout[self.last].unsqueeze(1).double(), self.scores[self.last].double()
            error.add("drows", drows[self.last_rows], scores.unsqueeze(-1) * dout)
            error.add("dscores", dscores[self.last], (self.rows[self.last_rows].double() * dout).sum(-1))

        inputs = self.dout, self.rows, self.scores
        return Kernel(
            (*inputs, self.plan.token_row),
            lambda: self.ops.unpermute_backward(*inputs, self.plan_tensors, True, True),
            check,
        )


def size_of(tensors: object) -> int:
    """Bytes of a tensor or of several."""
    return sum(t.nbytes for t in ((tensors,) if isinstance(tensors, Tensor) else tensors))


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    case = Case(common.layer_sizes(shape), options.routing, dtype, options.device)
    whats = options.what or WHATS
    kernels = {what: getattr(case, what)() for what in whats}
    errors, sizes = {}, {}
    for what, kernel in kernels.items():
        found, error = kernel.run(), Error()
        kernel.check(error, found)
        errors[what] = error.check(f"{shape} {what}", dtype)
        sizes[what] = size_of(kernel.inputs) + size_of(found)

    source = torch.empty((1024 if options.device == "cuda" else 64) * MIB, dtype=torch.int8)
    source = source.fill_(1).to(options.device)
    target = torch.empty_like(source)
    runs = {what: kernel.run for what, kernel in kernels.items()} | {"copy": lambda: target.copy_(source)}
    if options.device == "cuda":
        for what, kernel in kernels.items():
            try:
                runs[f"{what} as a graph"] = common.as_graph(kernel.run)
            except RuntimeError as error:
                print(f"{what} is not timed as a graph: {error}", flush=True)
    seconds = common.times(common.clock(options.device, lead=0), runs, options.repeats)
    copy_rate = 2 * source.nbytes / seconds["copy"] / 1e9
    for what in whats:
        rate = sizes[what] / seconds[what] / 1e9
        graph = seconds.get(f"{what} as a graph")
        yield common.record(
            options,
            bench="kernel",
            shape=shape,
            routing=options.routing,
            dtype=dtype,
            what=what,
            time_us=round(seconds[what] * 1e6, 1),
            max_rel_error=errors[what],
            graph_us=graph and round(graph * 1e6, 1),
            gb_per_s=round(rate, 1),
            copy_ratio=round(rate / copy_rate, 3),
            copy_gb_per_s=round(copy_rate, 1),
        )


def measure_activations(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    from fused_moe import ops as codes
    from fused_moe import route, route_plan
    from fused_moe.activation import ACTIVATIONS, activate
    from fused_moe.function import ALPHA, LIMIT

    torch.manual_seed(0)
    (T, E, K, D, hidden), ops = common.layer_sizes(shape), torch.ops.fused_moe
    gated = common.layer_settings(shape).gated
    factory = {"dtype": common.DTYPES[dtype], "device": options.device}
    scores, ids = route(common.routing_logits(options.routing, common.layer_sizes(shape), options.device), K)
    x, dout = torch.randn(T, D, **factory), torch.randn(T, D, **factory)
    w1, w3 = (torch.randn(E, hidden, D, **factory) / D**0.5 for _ in range(2))
    w2, w3 = torch.randn(E, D, hidden, **factory) / hidden**0.5, w3 if gated else None
    plan, layout = route_plan(ids, E), codes.LAYOUTS["separate"] if gated else codes.UNGATED

    def settings(activation: str) -> tuple:
        return plan.tensors, layout, codes.ACTIVATION_CODES[activation], [ALPHA, LIMIT]

    def up_gate(activation: str):
        return ops.up_gate(x, w1, w3, None, None, *settings(activation))

    h, _ = up_gate("silu")

    def down_dgrad(activation: str):
        return ops.down_dgrad(dout, w2, None, h, scores, *settings(activation))

    # The first rows are those of one expert, which is the first that has any.
    expert = int(plan.counts.nonzero()[0])
    rows = slice(0, min(CHECKED_TOKENS, int(plan.counts[expert])))
    da = dout[plan.row_token[rows].long()].double() @ w2[expert].double()
    da *= scores.flatten()[plan.row_slot[rows].long()].double().unsqueeze(-1)
    errors = {}
    for name in ACTIVATIONS:
        exact, error = h[rows].double().requires_grad_(), Error()
        gate, up = exact.chunk(2, -1) if gated else (exact, None)
        a = activate(gate, up, activation=name, alpha=ALPHA, limit=LIMIT)
        error.add("a", up_gate(name)[1][rows], a)
        error.add("dh", down_dgrad(name)[0][rows], *torch.autograd.grad(a, exact, da))
        errors[name] = error.check(f"{shape} {name}", dtype)

    runs = {(f, name): partial(f, name) for f in (up_gate, down_dgrad) for name in ACTIVATIONS}
    seconds = common.times(common.clock(options.device), runs, options.repeats)
    for f, name in runs:
        yield common.record(
            options,
            bench="activation",
            shape=shape,
            routing=options.routing,
            dtype=dtype,
            layer=name,
            what=f.__name__,
            time_us=round(seconds[f, name] * 1e6, 1),
            max_rel_error=errors[name],
            silu_ratio=round(seconds[f, name] / seconds[f, "silu"], 3),
        )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    common.start(options)
    common.report(options, measure_activations if options.activations else measure)


if __name__ == "__main__":
    main()
