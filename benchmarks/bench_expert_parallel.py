"""Times expert parallelism: a layer's experts over the ranks of one host, and what their exchange costs.

    torchrun --nproc-per-node 4 benchmarks/bench_expert_parallel.py --json out.json
    torchrun --nproc-per-node 2 benchmarks/bench_expert_parallel.py --combine rank --routing zipf:1
    python benchmarks/bench_expert_parallel.py --device cpu --shape 64,8,2,64,32  # one rank

Each of N ranks has T tokens and E/N experts. Times of a record are those of forward and backward with every
gradient, on the slowest rank:
  time_us    the experts under ExpertParallel
  single_us  fused_experts of this rank's tokens and weights alone, ids modulo E/N: as many rows, no exchange
  around_us  all but the experts: sorting, exchange and sums of rows that come back as they arrived
  copies_us  four all-to-alls of as many rows, and nothing else
`extra` is time_us / single_us - 1. Before anything is timed, a step is checked in float64: out, dx, dscores
of some tokens, and weight gradients of some experts, which are sums over the ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Error, Sizes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

COMBINES = "slot", "rank"
EXCHANGES = "exact", "static", "symmetric", "symmetric, static"  # the first two by all-to-all
CHECKED_TOKENS = 512


class Case:
    """A rank's part of the layer, and its tokens."""

    def __init__(self, sizes: Sizes, routing: str, dtype: torch.dtype, device: str):
        from fused_moe import FusedMoE
        from fused_moe.distributed import ExpertParallel

        T, E, K, D, hidden = sizes
        torch.manual_seed(0)  # the same weights on all ranks
        layer = FusedMoE(D, hidden, E, K, device=device, dtype=dtype)
        self.experts = layer.experts
        self.whole = [w.detach().clone() for w in self.experts.weights]
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        ExpertParallel(symmetric=True, max_tokens=T)._apply(layer, self.mesh)
        torch.manual_seed(1 + dist.get_rank())
        scores, self.ids = common.routing_logits(routing, sizes, device).softmax(-1).topk(K)
        self.inputs = torch.randn(T, D, device=device).to(dtype).requires_grad_(), scores.requires_grad_()
        self.dout = torch.randn(T, D, device=device).to(dtype)
        self.own = [w.to_local().detach().requires_grad_() for w in self.experts.weights]

    def choose(self, combine: str, exchange: str) -> None:
        self.experts.combine = combine
        self.experts.static, self.experts.symmetric = "static" in exchange, "symmetric" in exchange
        self.experts.open_memory(self.ids.size(1))

    def step(self) -> tuple[Tensor, ...]:
        x, scores = self.inputs
        out, _ = self.experts(x, scores, self.ids)
        return out, *torch.autograd.grad(out, (x, scores, *self.experts.parameters()), self.dout)

    def around(self) -> None:
        """A step whose experts return what they get."""
        x, scores = self.inputs
        self.experts._local_experts = lambda rows, *_, **__: rows
        out, _ = self.experts(x, scores, self.ids)
        del self.experts._local_experts
        torch.autograd.grad(out, x, self.dout)

    def single(self) -> None:
        from fused_moe import fused_experts

        x, scores = self.inputs
        out = fused_experts(x, *self.own, scores, self.ids % self.own[0].size(0))
        torch.autograd.grad(out, (x, scores, *self.own), self.dout)

    def exact_rows(self, expert: int, tokens: Tensor, slots: Tensor) -> list[Tensor]:
        """One expert on some of this rank's tokens in float64: its part of out, dx, dscores, dw1 to dw3."""
        x, scores = self.inputs
        x, s, dout = (t.detach().double() for t in (x[tokens], scores[tokens, slots], self.dout[tokens]))
        w1, w2, w3 = (w[expert].double() for w in self.whole)
        inputs = [t.requires_grad_() for t in (x, s, w1, w2, w3)]
        out = s[:, None] * F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def error(self, title: str, dtype: str) -> float:
        error, (T, K), E = Error(), self.ids.shape, self.experts.num_experts
        out, dx, dscores, *dw = self.step()
        tokens = torch.linspace(0, T - 1, min(T, CHECKED_TOKENS), device=out.device).long()
        exact_out, exact_dx = (out.new_zeros(len(tokens), out.size(1), dtype=torch.float64) for _ in range(2))
        exact_dscores = exact_out.new_zeros(len(tokens), K)
        for expert in range(E):
            index, slots = (self.ids[tokens] == expert).nonzero(as_tuple=True)
            parts = self.exact_rows(expert, tokens[index], slots)
            exact_out.index_add_(0, index, parts[0])
            exact_dx.index_add_(0, index, parts[1])
            exact_dscores[index, slots] = parts[2]
        error.add("out", out[tokens], exact_out)
        error.add("dx", dx[tokens], exact_dx)
        error.add("dscores", dscores[tokens], exact_dscores)
        names = [name for name, _ in self.experts.named_parameters()]
        first = self.mesh.get_local_rank() * len(self.own[0])
        for expert in (0, E // 2, E - 1):
            exact = self.exact_rows(expert, *(self.ids == expert).nonzero(as_tuple=True))[3:]
            for name, of_all in zip(("w1", "w2", "w3"), exact, strict=True):
                dist.all_reduce(of_all)
                if first <= expert < first + len(self.own[0]):
                    error.add(f"d{name}", dw[names.index(name)].to_local()[expert - first], of_all)
        return error.check(title, dtype)

    def copies(self, combine: str) -> Callable[[], None]:
        """Four all-to-alls of the rows that a step exchanges."""
        num_ranks = self.mesh.size()
        ranks = self.ids // (self.experts.num_experts // num_ranks)
        per_rank = [(ranks == n) if combine == "slot" else (ranks == n).any(1) for n in range(num_ranks)]
        sent = torch.stack([rows.sum() for rows in per_rank])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        there, back = (self.dout.new_empty(sum(rows), self.dout.size(1)) for rows in (sent, received))

        def run() -> None:
            for _ in range(2):
                dist.all_to_all_single(back, there, received, sent)
                dist.all_to_all_single(there, back, sent, received)

        return run


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    sizes = common.layer_sizes(shape)
    sizes = sizes._replace(num_experts=options.experts or sizes.num_experts)
    T, _, K, D, hidden = sizes
    clock = common.clock(options.device, lead=40_000_000)
    for routing in options.routing:
        case = Case(sizes, routing, common.DTYPES[dtype], options.device)
        for combine in options.combine:
            copies = case.copies(combine)
            for exchange in options.exchange:
                case.choose(combine, exchange)
                error = case.error(f"{shape}, {combine}, {exchange}", dtype)
                runs = {"time": case.step, "single": case.single, "around": case.around, "copies": copies}
                us = slowest(common.times(clock, runs, options.repeats), options.device)
                yield common.record(
                    options,
                    bench="expert_parallel",
                    shape=shape,
                    routing=routing,
                    dtype=dtype,
                    layer=f"{combine}, {exchange}, N = {dist.get_world_size()}",
                    what="forward_backward",
                    tokens=T,
                    time_us=us["time"],
                    tflops=round(18 * T * K * D * hidden / us["time"] / 1e6, 3),
                    single_us=us["single"],
                    around_us=us["around"],
                    copies_us=us["copies"],
                    extra=round(us["time"] / us["single"] - 1, 3),
                    experts=sizes.num_experts,
                    ranks=dist.get_world_size(),
                    max_rel_error=error,
                )


def slowest(seconds: dict[str, float], device: str) -> dict[str, float]:
    """Microseconds of the slowest rank."""
    found = torch.tensor([*seconds.values()], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(seconds, (round(s * 1e6, 1) for s in found.tolist()), strict=True))


def main(argv: list[str] | None = None) -> None:
    flags = common.parser(__doc__, many_routings=True)
    add = flags.add_argument
    for flag, values in (("--combine", COMBINES), ("--exchange", EXCHANGES)):
        listed = f"{' or '.join(values)}; may be repeated; default: both"
        add(flag, choices=values, action="append", metavar="NAME", help=listed)
    add("--experts", type=int, metavar="E", help="of all ranks, in place of a shape's E")
    options = flags.parse_args(argv)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    common.start(options)
    options.combine, options.exchange = options.combine or COMBINES, options.exchange or EXCHANGES
    backend = "nccl" if options.device == "cuda" else "gloo"
    one = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **one)
    try:
        if dist.get_rank() == 0:
            common.report(options, measure)
        else:
            for shape in options.shape:
                for dtype in options.dtype:
                    list(measure(shape, dtype, options))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
