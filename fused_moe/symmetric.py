"""Sends rows to the ranks of their experts and back through memory that the N ranks of a group share.

Each rank writes its tokens into its own part of the memory. The ranks of their experts read from there what
they need, a token once. The experts' rows come back the same way: their rank writes them, the token's rank
reads and adds them. Nothing is packed for the way, and the host need not know a size. Both ways are one
operator, `sum_peers`, and each is the other's gradient:

    there   x_recv[n*C + t] = tokens[n][t]              zero if none of the token's experts is here
    back    out[t] = sum over n of rows[n][rank*C + t]  in the order of ranks; or over the token's slots

Letters: T tokens of this rank, C the most that any rank has, D width, K experts per token, N ranks, E experts
in all, R the most rows that a rank's experts compute.
"""

from __future__ import annotations

import os
import platform
import tempfile
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks, function
from .exchange import FN, Facts, facts_of
from .ops import ops, run
from .plan import Plan

REFUSED = -1  # no Facts have it


class Memory:
    """`num_bytes` of each of N ranks, which every one of them has mapped: PyTorch's symmetric memory on GPUs,
    files in the host's memory on CPUs. All ranks make it at once."""

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device):
        self.group, self._handle = group, None
        if device.type != "cuda":
            self.ranks = _shared_files(num_bytes, group)
            return
        import torch.distributed._symmetric_memory as symmetric_memory

        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(own, group)
        self.ranks = [self._handle.get_buffer(n, (num_bytes,), torch.uint8) for n in range(group.size())]

    def barrier(self) -> None:
        """What any rank wrote before it, all can read after it. On GPUs the streams wait, not the hosts."""
        if self._handle is None:
            dist.barrier(self.group)
        else:
            self._handle.barrier()


def _shared_files(num_bytes: int, group: ProcessGroup) -> list[Tensor]:
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=in_memory) as file:
        file.truncate(num_bytes)
        ranks = [None] * group.size()
        dist.all_gather_object(ranks, (platform.node(), file.name), group)
        hosts = sorted({host for host, _ in ranks})
        if len(hosts) > 1:
            checks.fail(ValueError, FN, "ranks of one host with symmetric=True", f"hosts {', '.join(hosts)}")
        mapped = [torch.from_file(name, True, num_bytes, dtype=torch.uint8) for _, name in ranks]
        dist.barrier(group)  # a file may go when all have mapped it
    return mapped


class Areas(NamedTuple):
    """The parts of the memory, as N tensors each: the n-th is rank n's. Calls of every dtype find the first
    two at the same place."""

    ids: list[Tensor]  # (C+1, K) int32; the last row has Facts
    token_row: list[Tensor]  # (N*C, K) int32, of the plan of rows
    tokens: list[Tensor]  # (C, D) x, or the gradient of out
    rows: list[Tensor]  # (R, D) what experts have computed, or the gradient of what they were given
    scores: list[Tensor]  # (C, K)
    dscores: list[Tensor]  # (N*C, K)


class Peers:
    """The ranks of a group, as one of them sees their memory. Layers of one shape share it, one after the
    other. `dtype` is the widest of the calls' x."""

    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]
    ):
        """sizes: C, D, K and R."""
        self.rank, self.num_ranks = group.rank(), group.size()
        self.max_tokens, self.dim, self.top_k, self.num_rows = sizes
        self._dtype, self._areas = dtype, {}
        self._memory = Memory(self._layout(dtype)[-1][-1], group, device)

    def __deepcopy__(self, memo) -> Peers:
        return self  # another memory would be a collective

    def check(self, x: Tensor, ids: Tensor) -> None:
        """Raises where a call's tensors do not fit."""
        if x.size(0) > self.max_tokens:
            checks.fail(ValueError, FN, f"at most max_tokens = {self.max_tokens} tokens", x.size(0))
        checks.check_shape(FN, "x", x, "T, D", (x.size(0), self.dim))
        checks.check_shape(FN, "ids", ids, "T, K", (x.size(0), self.top_k))
        if x.dtype.itemsize > self._dtype.itemsize:
            checks.fail(TypeError, FN, f"x of {self._dtype}, as the weights", x.dtype)

    def areas(self, dtype: torch.dtype) -> Areas:
        if dtype not in self._areas:
            views = []
            for shape, of_area, start, end in self._layout(dtype):
                views.append([rank[start:end].view(of_area).view(shape) for rank in self._memory.ranks])
            self._areas[dtype] = Areas(*views)
        return self._areas[dtype]

    def _layout(self, dtype: torch.dtype) -> list[tuple]:
        """(shape, dtype, first byte, end) of each area."""
        tokens, received = self.max_tokens, self.num_ranks * self.max_tokens
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        areas = Areas(
            ids=((tokens + 1, self.top_k), torch.int32),
            token_row=((received, self.top_k), torch.int32),
            tokens=((tokens, self.dim), dtype),
            rows=((self.num_rows, self.dim), dtype),
            scores=((tokens, self.top_k), wide),
            dscores=((received, self.top_k), wide),
        )
        layout, end = [], 0
        for (rows, columns), of_area in areas:
            start = -(-end // 256) * 256
            end = start + rows * columns * of_area.itemsize
            layout.append(((rows, columns), of_area, start, end))
        return layout

    def write(self, *areas_and_values: tuple[list[Tensor], Tensor]) -> None:
        """Copies values into this rank's part of areas, from the first row on. After it all ranks' are
        written. It begins when the others have read what it overwrites."""
        self._memory.barrier()
        for area, values in areas_and_values:
            area[self.rank][: values.size(0)].copy_(values)
        self._memory.barrier()

    def refuse(self) -> None:
        """Takes part in the exchange of a call that has failed here, so that all ranks raise."""
        ids = self.areas(torch.float32).ids
        self.write((ids, torch.full_like(ids[self.rank], REFUSED)))


class Exchange:
    """The way of one call's rows there and back: T tokens x with ids, -1 for none, of E experts."""

    def __init__(self, peers: Peers, x: Tensor, scores: Tensor, ids: Tensor, num_experts: int):
        self.peers, self.areas = peers, peers.areas(x.dtype)
        self.facts, self.num_tokens = facts_of(x, ids), ids.size(0)
        self.scores = scores.detach()
        self.experts_per_rank = experts_per_rank = num_experts // peers.num_ranks
        self.ranks = ids.div(experts_per_rank, rounding_mode="floor")  # (T, K), -1 for none
        choice = F.pad(ids, (0, 0, 0, peers.max_tokens + 1 - self.num_tokens), value=-1)
        choice[-1].fill_(self.facts.packed())
        areas = self.areas
        peers.write((areas.ids, choice), (areas.tokens, x.detach()), (areas.scores, self.scores))
        choices = torch.stack(areas.ids)  # (N, C+1, K)
        self.others = choices[:, -1, 0]  # (N,) Facts of all ranks
        self.all_ids = choices[:, :-1].flatten(0, 1)  # (N*C, K)
        self.ids = self.all_ids - peers.rank * experts_per_rank  # other ranks' are outside [0, E/N)
        self.is_here = (self.ids >= 0) & (self.ids < experts_per_rank)
        index = torch.arange(self.ids.size(0), dtype=torch.int32, device=ids.device)
        self._there = torch.where(self.is_here.any(1), index, -1).unsqueeze(1)
        self._back = None  # (T, N) or (T, K)

    def check(self, *, waits: bool) -> int | None:
        """Raises on all ranks if Facts differ; without waiting, by an assertion on the device. If the host
        waits it returns the number of slots that are here."""
        own = self.facts.packed()
        what = f"{self.facts} on all ranks"
        if not waits:
            torch._assert_async((self.others == own).all(), f"{FN}: symmetric exchange needs {what}")
            return None
        *others, num_slots = torch.cat((self.others, self.is_here.sum().int()[None])).tolist()
        for rank, packed in enumerate(others):
            if packed != own:
                found = "a call that failed" if packed == REFUSED else Facts.unpacked(packed)
                checks.fail(ValueError, FN, what, f"{found} on rank {rank}")
        return num_slots

    def slots_of_ranks(self) -> Tensor:
        """(N,) int32: the slots that have their expert on each rank."""
        ranks = self.all_ids.div(self.experts_per_rank, rounding_mode="floor")
        return function.route_plan(ranks, self.peers.num_ranks).counts

    def there(self, x: Tensor, scores: Tensor, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
        """x (T, D) and scores (T, K) of all ranks -> x (N*C, D) and scores (N*C, K). With a plan of
        `ids` x is that of its rows, and these come `back`."""
        return _There.apply(x, scores, self, plan)

    def back(self, rows: Tensor, scores: Tensor, plan: Plan | None = None) -> Tensor:
        """What this rank's experts made of x, and the scores that `there` gave -> out (T, D) of this rank's
        tokens: the sum over ranks; with a plan over slots, weighted."""
        return _Back.apply(rows, scores, self, plan)

    def _received(self, area: list[Tensor]) -> Tensor:
        """An area of (N*C, K) -> (N, T, K), what the ranks have written there for this rank's tokens."""
        first = self.peers.rank * self.peers.max_tokens
        return torch.stack([of_rank[first : first + self.num_tokens] for of_rank in area])

    def _from_ranks(self) -> Tensor:
        """(T, N): where each rank that has some of a token's experts writes its sum, -1 for other ranks."""
        num_ranks, device = self.peers.num_ranks, self.ranks.device
        has_experts = torch.zeros(self.num_tokens, num_ranks + 1, dtype=torch.bool, device=device)
        has_experts = has_experts.scatter_(1, self.ranks.long() + 1, True)[:, 1:]
        rank = torch.arange(num_ranks, dtype=torch.int32, device=device)
        row = torch.arange(self.num_tokens, dtype=torch.int32, device=device).unsqueeze(1)
        row = row + self.peers.rank * self.peers.max_tokens
        return torch.where(has_experts, rank * self.peers.num_rows + row, -1)

    def _from_slots(self) -> Tensor:
        """(T, K): where each slot's row is, -1 where it has none. After token_row has been written."""
        row = self._received(self.areas.token_row)
        rank = torch.arange(row.size(0), dtype=torch.int32, device=row.device)[:, None, None]
        return torch.where(row < 0, -1, rank * self.peers.num_rows + row).amax(0)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scores: Tensor, exchange: Exchange, plan: Plan | None):
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        areas = exchange.areas
        rows = run(ops.sum_peers.default, areas.tokens, exchange._there)
        if plan is not None:
            rows = run(ops.permute.default, rows, plan.tensors)
        return rows, torch.cat(areas.scores)

    @staticmethod
    def backward(ctx, drows: Tensor | None, dscores: Tensor | None):
        exchange, areas = ctx.exchange, ctx.exchange.areas
        gradients = ((areas.rows, drows), (areas.dscores, dscores))
        exchange.peers.write(*((area, values) for area, values in gradients if values is not None))
        dx = None
        if drows is not None:
            dx = run(ops.sum_peers.default, areas.rows, exchange._back)
        if dscores is not None:  # other ranks' are zero
            dscores = exchange._received(areas.dscores).sum(0)
        return dx, dscores, None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, scores: Tensor, exchange: Exchange, plan: Plan | None):
        ctx.exchange, ctx.plan, areas = exchange, plan, exchange.areas
        if plan is None:
            exchange._back = exchange._from_ranks()
            exchange.peers.write((areas.rows, rows))
            return run(ops.sum_peers.default, areas.rows, exchange._back)
        ctx.save_for_backward(rows, scores)
        exchange.peers.write((areas.rows, rows), (areas.token_row, plan.token_row))
        exchange._back = exchange._from_slots()
        return run(ops.sum_peers.default, areas.rows, exchange._back, exchange.scores)

    @staticmethod
    def backward(ctx, dout: Tensor):
        exchange, areas = ctx.exchange, ctx.exchange.areas
        exchange.peers.write((areas.tokens, dout))
        dout = run(ops.sum_peers.default, areas.tokens, exchange._there)
        if ctx.plan is None:
            return dout, None, None, None
        rows, scores = ctx.saved_tensors
        need_rows, need_scores, *_ = ctx.needs_input_grad
        args = (dout, rows, scores, ctx.plan.tensors, need_rows, need_scores)
        drows, dscores = run(ops.unpermute_backward.default, *args)
        return drows if need_rows else None, dscores if need_scores else None, None, None
