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

import math
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from . import checks, function
from .exchange import FN, REFUSED, check_facts, facts_of
from .ops import ops, run, undifferentiable
from .plan import Plan

WHAT = "symmetric exchange"


def outside_of_modes():
    """Hides calls from dispatch modes. A selective checkpoint is such a mode: instead of making a view of
    shared memory, a write to it or a barrier again, it would return the cached result."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


class Memory:
    """`num_bytes` of each of N ranks, which every one of them has mapped: PyTorch's symmetric memory on GPUs,
    files in the host's memory on CPUs. All ranks make it at once."""

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device):
        self.group, self._handle = group, None
        if device.type != "cuda":
            self.ranks = _shared_files(num_bytes, group)
            return
        import torch.distributed._symmetric_memory as symmetric_memory

        def allocate() -> Tensor:
            return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)

        timeout = self.group._get_backend(device).options._timeout
        self._timeout_ms = math.ceil(timeout.total_seconds() * 1000)
        self._own = _on_all_ranks(f"{num_bytes} bytes of {device}", group, allocate)
        self._handle = symmetric_memory.rendezvous(self._own, group)
        self.ranks = [self._handle.get_buffer(n, (num_bytes,), torch.uint8) for n in range(group.size())]

    def barrier(self) -> None:
        """What any rank wrote before it, all can read after it. On GPUs the streams wait, not the hosts. It
        fails after the group's timeout, if a rank does not come."""
        if self._handle is not None:
            self._handle.barrier(timeout_ms=self._timeout_ms)
            return
        try:
            dist.barrier(self.group)
        except RuntimeError as error:
            expected = f"{FN}: expected all {self.group.size()} ranks in the symmetric exchange"
            raise RuntimeError(f"{expected}, found on rank {self.group.rank()}: {error}") from error


def _shared_files(num_bytes: int, group: ProcessGroup) -> list[Tensor]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        ranks: list[Any] = [None] * group.size()

        def allocate() -> None:  # without it a write where no memory is left would end the process
            os.posix_fallocate(file.fileno(), 0, num_bytes)

        def mapped() -> list[Tensor]:
            return [torch.from_file(name, True, num_bytes, dtype=torch.uint8) for _, name in ranks]

        _on_all_ranks(f"{num_bytes} bytes in {folder}", group, allocate)
        dist.all_gather_object(ranks, (platform.node(), file.name), group)
        hosts = sorted({host for host, _ in ranks})
        if len(hosts) > 1:
            checks.fail(ValueError, FN, "ranks of one host with symmetric=True", f"hosts {', '.join(hosts)}")
        return _on_all_ranks("the other ranks' files", group, mapped)  # a file may go when all have mapped it


def _on_all_ranks(what: str, group: ProcessGroup, fn: Callable):
    """fn(). If it fails on one rank, all raise."""
    result, error = None, None
    try:
        result = fn()
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    errors = [None] * group.size()
    dist.all_gather_object(errors, error, group)
    for rank, error in enumerate(errors):
        if error is not None:
            checks.fail(RuntimeError, FN, f"{what} on all ranks", f"{error} on rank {rank}")
    return result


class SharedMemory:
    """The Peers of the layers of one style, one for each shape."""

    def __init__(self):
        self._peers = {}

    def __deepcopy__(self, memo) -> SharedMemory:
        return self  # layers that are copied share it, too

    def peers(self, mesh: DeviceMesh, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Peers:
        key = (mesh.get_group(), dtype, sizes)
        if key not in self._peers:
            self._peers[key] = Peers(mesh.get_group(), torch.device(mesh.device_type), dtype, sizes)
        return self._peers[key]


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

    @torch.inference_mode(False)  # or no later call could write into it
    def __init__(
        self, group: ProcessGroup, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int]
    ):
        """sizes: C, D, K and R."""
        self.rank, self.num_ranks = group.rank(), group.size()
        self.max_tokens, self.dim, self.top_k, self.num_rows = sizes
        ranks: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(ranks, sizes, group)
        for rank, (*_, top_k, _) in enumerate(ranks):
            if ranks[rank] != sizes:
                checks.fail(
                    ValueError, FN, f"ids (T, {self.top_k}) on all ranks", f"(T, {top_k}) on rank {rank}"
                )
        self._dtype = dtype
        self._areas: dict[torch.dtype, Areas] = {}
        self._memory = Memory(self._layout(dtype)[-1][-1], group, device)

        # What the calls' indices are made of.
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.no_ids = torch.full((self.max_tokens + 1, self.top_k), -1, **int32)
        self.all_ranks = torch.arange(self.num_ranks, **int32)  # (N,)
        self.received = torch.arange(self.num_ranks * self.max_tokens, **int32).unsqueeze(1)  # (N*C, 1)
        sent = self.received[self.rank * self.max_tokens :][: self.max_tokens]
        self.sums = self.all_ranks * self.num_rows + sent  # (C, N) where each rank writes a token's sum

    def __deepcopy__(self, memo) -> Peers:
        return self  # another memory would be a collective

    def __reduce__(self):
        checks.fail(TypeError, FN, "to save a state dict", "a layer with symmetric=True")

    def check(self, x: Tensor, scores: Tensor, ids: Tensor) -> None:
        """Raises if a call's tensors do not fit."""
        checks.check_tensor(FN, "x", x, 2, checks.FLOATING)
        checks.check_device(FN, "x", x, "the layer", self.received)
        if x.size(0) > self.max_tokens:
            checks.fail(ValueError, FN, f"at most max_tokens = {self.max_tokens} tokens", x.size(0))
        checks.check_shape(FN, "x", x, "T, D", (x.size(0), self.dim))
        if x.dtype.itemsize > self._dtype.itemsize:
            checks.fail(TypeError, FN, f"x of {self._dtype}, as the weights", x.dtype)
        checks.check_ids(FN, ids, x)
        checks.check_shape(FN, "ids", ids, "T, K", (x.size(0), self.top_k))
        checks.check_scores(FN, scores, ids)

    def refuse(self) -> None:
        """Takes a failed call's part in an `Exchange`. Then the other ranks' `Exchange.check` raises."""
        ids = self.areas(self._dtype).ids
        self.write((ids, torch.full_like(ids[self.rank], REFUSED)))

    @torch.inference_mode(False)  # as the memory
    def areas(self, dtype: torch.dtype) -> Areas:
        if dtype not in self._areas:
            views = []
            with outside_of_modes():
                for shape, of_area, start, end in self._layout(dtype):
                    views.append([rank[start:end].view(of_area).view(shape) for rank in self._memory.ranks])
            self._areas[dtype] = Areas(*views)
        return self._areas[dtype]

    def _layout(self, dtype: torch.dtype) -> list[tuple]:
        """(shape, dtype, first byte, end) of each area."""
        tokens, received = self.max_tokens, self.num_ranks * self.max_tokens
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        areas = {
            "ids": ((tokens + 1, self.top_k), torch.int32),
            "token_row": ((received, self.top_k), torch.int32),
            "tokens": ((tokens, self.dim), dtype),
            "rows": ((self.num_rows, self.dim), dtype),
            "scores": ((tokens, self.top_k), wide),
            "dscores": ((received, self.top_k), wide),
        }
        layout, end = [], 0
        for (rows, columns), of_area in (areas[name] for name in Areas._fields):
            start = -(-end // 256) * 256
            end = start + rows * columns * of_area.itemsize
            layout.append(((rows, columns), of_area, start, end))
        return layout

    def write(self, *areas_and_values: tuple[list[Tensor], Tensor], are_read: bool = True) -> None:
        """Copies values into this rank's part of areas, from the first row on. After it all ranks' are
        written. It begins when the others have read what it overwrites; not `are_read`: they have before
        the last barrier."""
        with outside_of_modes():
            if are_read:
                self._memory.barrier()
            for area, values in areas_and_values:
                area[self.rank][: values.size(0)].copy_(values)
            self._memory.barrier()


@dataclass
class Ways:
    """What backward needs of an exchange, beside what it saves: `sum_peers`' indices."""

    peers: Peers
    areas: Areas
    num_tokens: int
    there: Tensor  # (N*C, 1) of the tokens
    back: Tensor | None = None  # (T, N) or (T, K) of the rows; `Exchange.back` sets it

    def received(self, area: list[Tensor]) -> Tensor:
        """An area of (N*C, K) -> (N, T, K), what the ranks have written there for this rank's tokens."""
        first = self.peers.rank * self.peers.max_tokens
        with outside_of_modes():
            of_ranks = [of_rank[first : first + self.num_tokens] for of_rank in area]
        return torch.stack(of_ranks)


class Exchange:
    """The way of one call's rows there and back: T tokens x with ids, of E experts. Ids outside [0, E) are
    -1 or E."""

    def __init__(self, peers: Peers, x: Tensor, scores: Tensor, ids: Tensor, num_experts: int):
        self.peers, self.facts, num_tokens = peers, facts_of(x, ids), x.size(0)
        areas, experts_per_rank = peers.areas(x.dtype), num_experts // peers.num_ranks
        last = torch.full_like(peers.no_ids[:1], self.facts.packed())
        choice = torch.cat((ids, peers.no_ids[num_tokens:-1], last))
        peers.write((areas.ids, choice), (areas.tokens, x.detach()), (areas.scores, scores.detach()))
        choices = torch.stack(areas.ids)  # (N, C+1, K)
        self.others = choices[:, -1, 0]  # (N,) Facts of all ranks
        all_ids = choices[:, :-1].flatten(0, 1)  # (N*C, K)
        self.ranks = all_ids.div(experts_per_rank, rounding_mode="floor")  # -1 or N for none
        self.ids = all_ids - peers.rank * experts_per_rank  # other ranks' are outside [0, E/N)
        self.is_here = self.ranks == peers.rank
        there = torch.where(self.is_here.any(1, keepdim=True), peers.received, -1)
        self.ways = Ways(peers, areas, num_tokens, there)

    def check(self, *, waits: bool) -> int | None:
        """Raises on all ranks if Facts differ; without waiting, by an assertion on the device. If the host
        waits it returns the number of slots that are here."""
        if not waits:
            what = f"symmetric exchange needs {self.facts} on all ranks"
            torch._assert_async((self.others == self.facts.packed()).all(), f"{FN}: {what}")
            return None
        num_slots = self.is_here.sum(dtype=torch.int32).unsqueeze(0)
        *others, num_slots = torch.cat((self.others, num_slots)).tolist()
        check_facts(self.facts, others)
        return num_slots

    def slots_of_ranks(self) -> Tensor:
        """(N,) int32: the slots that have their expert on each rank."""
        return function.route_plan(self.ranks, self.peers.num_ranks).counts

    def there(self, x: Tensor, scores: Tensor, plan: Plan | None = None) -> tuple[Tensor, Tensor]:
        """x (T, D) and scores (T, K) of all ranks -> x (N*C, D) and scores (N*C, K). With a plan of
        `ids` x is that of its rows, and these come `back`."""
        return _There.apply(x, scores, self.ways, plan)

    def back(self, rows: Tensor, scores: Tensor, plan: Plan | None = None) -> Tensor:
        """What this rank's experts made of x, and the scores that `there` gave -> out (T, D) of this rank's
        tokens: the sum over ranks; with a plan over slots, weighted."""
        peers = self.peers
        if plan is None:
            first = peers.rank * peers.max_tokens
            ranks = self.ranks[first : first + self.ways.num_tokens].unsqueeze(2)
            has_experts = (ranks == peers.all_ranks).any(1)  # (T, N)
            self.ways.back = torch.where(has_experts, peers.sums[: self.ways.num_tokens], -1)
        return _Back.apply(rows, scores, self.ways, plan)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scores: Tensor, ways: Ways, plan: Plan | None):
        ctx.ways = ways
        ctx.set_materialize_grads(False)
        rows = run(ops.sum_peers.default, ways.areas.tokens, ways.there)
        if plan is not None:
            rows = run(ops.permute.default, rows, plan.tensors)
        return rows, torch.cat(ways.areas.scores)

    @staticmethod
    def backward(ctx, drows: Tensor | None, dscores: Tensor | None):
        return *undifferentiable(WHAT, _There._gradients(ctx, drows, dscores), drows, dscores), None, None

    @staticmethod
    @torch.no_grad()
    def _gradients(ctx, drows: Tensor | None, dscores: Tensor | None) -> tuple:
        ways, areas = ctx.ways, ctx.ways.areas
        gradients = ((areas.rows, drows), (areas.dscores, dscores))
        ways.peers.write(*((area, values) for area, values in gradients if values is not None))
        dx = None
        if drows is not None:
            dx = run(ops.sum_peers.default, areas.rows, ways.back)
        if dscores is not None:  # other ranks' are zero
            dscores = ways.received(areas.dscores).sum(0)
        return dx, dscores


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, scores: Tensor, ways: Ways, plan: Plan | None):
        ctx.ways, ctx.plan, areas, peers = ways, plan, ways.areas, ways.peers
        if plan is None:
            peers.write((areas.rows, rows), are_read=False)
            return run(ops.sum_peers.default, areas.rows, ways.back)
        ctx.save_for_backward(rows, scores)
        first = peers.rank * peers.num_rows
        assert plan.token_row is not None
        token_row = F.threshold(plan.token_row + first, first - 1, -1)  # -1 stays
        peers.write((areas.rows, rows), (areas.token_row, token_row), are_read=False)
        ways.back = ways.received(areas.token_row).amax(0)
        with outside_of_modes():
            scores = areas.scores[peers.rank][: ways.num_tokens]
        return run(ops.sum_peers.default, areas.rows, ways.back, scores)

    @staticmethod
    def backward(ctx, dout: Tensor):
        saved = ctx.saved_tensors
        return *undifferentiable(WHAT, _Back._gradients(ctx, dout, *saved), dout, *saved), None, None

    @staticmethod
    @torch.no_grad()
    def _gradients(ctx, dout: Tensor, rows: Tensor | None = None, scores: Tensor | None = None) -> tuple:
        ways, areas = ctx.ways, ctx.ways.areas
        ways.peers.write((areas.tokens, dout))
        dout = run(ops.sum_peers.default, areas.tokens, ways.there)
        if ctx.plan is None:
            return dout, None
        need_rows, need_scores, *_ = ctx.needs_input_grad
        args = (dout, rows, scores, ctx.plan.tensors, need_rows, need_scores)
        drows, dscores = run(ops.unpermute_backward.default, *args)
        return drows if need_rows else None, dscores if need_scores else None
