"""All-to-alls over the N ranks of a process group, of exact sizes or of C rows for every two ranks.

A plan has grouped the rows by rank, or by expert and hence by rank, so those for one rank are neighbours.
`Opening` and `check_static` exchange what has to be the same on all ranks, and the former the numbers of
rows. An exchange takes rows in the plan's order `there`, to their ranks, and `back`, which is the inverse.
Gradients take the same ways in reverse. Any tensors of that order can go, with one row for each row of the
plan. combine="slot" takes rows there by one exchange and back by another. The nodes of autograd are in
`fused_moe/exact.py` and `fused_moe/slots.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks
from .ops import route_plan, run
from .plan import Plan

FN = "ExpertParallel"
REFUSED = -1  # no packed Facts: a call that failed, where the other ranks are told


class Facts(NamedTuple):
    """What a call has to have in common with those of the other ranks."""

    dim: int  # D
    top_k: int  # K
    dtype: int  # in checks.FLOATING

    def __str__(self) -> str:
        return f"x (T, {self.dim}) of {checks.FLOATING[self.dtype]} and ids (T, {self.top_k})"

    def packed(self) -> int:
        """One int32, because each value that is exchanged costs a fill: exact for D < 2^19 and K < 2^10."""
        return (self.dim << 12 | self.top_k << 2 | self.dtype) & 0x7FFFFFFF

    @classmethod
    def unpacked(cls, value: int) -> Facts:
        return cls(value >> 12, value >> 2 & 1023, value & 3)


def facts_of(x: Tensor, ids: Tensor) -> Facts:
    return Facts(x.size(1), ids.size(1), checks.FLOATING.index(x.dtype))


def check_facts(facts: Facts, ranks: list[int]) -> None:
    """Raises if those of any rank, packed, differ."""
    for rank, packed in enumerate(ranks):
        if packed != facts.packed():
            found = "a call that failed" if packed == REFUSED else Facts.unpacked(packed)
            checks.fail(ValueError, FN, f"{facts} on all ranks", f"{found} on rank {rank}")


class Ranks(NamedTuple):
    """How E experts are spread over the N ranks of a group, and what tokens take along: K scores and ids. An
    exchange by slots sends a row back for each slot, another one the sum over a rank's experts."""

    group: ProcessGroup
    num_experts: int  # E
    by_slot: bool

    @property
    def first_expert(self) -> int:
        return self.num_experts // self.group.size() * self.group.rank()

    def plan_of(self, ids: Tensor) -> Plan:
        """The plan of this rank's tokens by the ranks of their experts, each of which gets a token once."""
        N = self.group.size()
        return route_plan(distinct(ids.div(self.num_experts // N, rounding_mode="floor"), N), N)

    def slots_of(self, counts: Tensor) -> Tensor:
        """counts (E,) of experts -> (N,) of their ranks."""
        return counts.view(self.group.size(), -1).sum(1, dtype=counts.dtype)

    def choice(self, scores: Tensor, ids: Tensor) -> Tensor:
        """(T, 2K): scores, and ids as whole numbers that are exact in float32. By slots these are indices of
        `slot_groups`. 0, which unused buffer rows have, is no expert's."""
        first = 1 + (self.num_experts + 2) * self.group.rank() if self.by_slot else 1
        return torch.cat((scores, (ids.clamp(-1, self.num_experts) + first).to(scores.dtype)), 1)

    def received_ids(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Received tokens' scores, and their ids among this rank's experts; others are outside [0, E/N)."""
        scores, ids = choice.tensor_split(2, 1)
        return scores, ids.detach().int() - (1 + self.first_expert)

    def received_slots(self, choice: Tensor, groups: Tensor) -> tuple[Tensor, Plan]:
        """Received tokens' scores, and the plan of those of their slots that have an expert here, by source
        rank and expert, of `slot_groups`."""
        scores, group = choice.tensor_split(2, 1)
        return scores, route_plan(group.int(), self.num_experts, groups)

    def local_ids(self, received: Plan, *, has_room: bool) -> Tensor:
        """(R, 1): which of this rank's experts each received slot has. With room past the last row it is -1
        there."""
        group = row_groups(received)
        local = group % (self.num_experts // self.group.size())
        if has_room:
            local = torch.where(group < self.num_experts, local, -1)
        return local.unsqueeze(1)

    def slot_groups(self, device: torch.device) -> Tensor:
        """(N * (E + 2),): the group of a slot by source rank and by id + 1, -1 where another rank has the
        expert, or none. Groups are in the order of source ranks, and of this rank's experts."""
        N, E = self.group.size(), self.num_experts
        first = 1 + self.first_expert
        groups = torch.arange(E, dtype=torch.int32, device=device).view(N, -1)
        return F.pad(groups, (first, E + 2 - first - E // N), value=-1).flatten()


class Exact(NamedTuple):
    """An exchange of sizes that the host knows."""

    group: ProcessGroup
    send_splits: list[int]
    receive_splits: list[int]

    def start_there(self, rows: Tensor) -> Tensor:
        """What arrives of rows, which may be read after `wait`. Autograd does not see it."""
        return _start(rows, self.receive_splits, self.send_splits, self.group)

    def start_back(self, rows: Tensor) -> Tensor:
        return _start(rows, self.send_splits, self.receive_splits, self.group)


class Even(NamedTuple):
    """An exchange of as many rows for every two ranks."""

    group: ProcessGroup

    def __call__(self, rows: Tensor) -> Tensor:
        return _all_to_all(rows, self.group)


class Static(NamedTuple):
    """An exchange through buffers of C rows for every two ranks. Unused buffer rows are zero."""

    group: ProcessGroup
    row_of_buffer: Tensor  # (N * C,) -1 where a buffer row is unused
    buffer_of_row: Tensor  # (R,) -1 where a row is not sent

    def there(self, rows: Tensor) -> Tensor:
        return _all_to_all(_Gather.apply(rows, self.row_of_buffer, self.buffer_of_row), self.group)

    def back(self, rows: Tensor) -> Tensor:
        return _Gather.apply(_all_to_all(rows, self.group), self.buffer_of_row, self.row_of_buffer)


def refuse(group: ProcessGroup, device: torch.device) -> None:
    """Takes a failed call's part in `Opening` or `check_static`, so that the other ranks raise, too."""
    _exchange(torch.full((group.size(), 3), REFUSED, dtype=torch.int32, device=device), group)


class Opening:
    """Learns the sizes of an exact exchange: of this rank's rows and of its slots, given how many there are
    for each rank, (N,). What is launched before `exchanges` runs while the host waits there."""

    def __init__(self, group: ProcessGroup, facts: Facts, rows: Tensor, slots: Tensor):
        self.group, self.facts, self.event = group, facts, None
        table = torch.stack((rows, slots, torch.full_like(rows, facts.packed())), 1)
        tables = torch.stack((table, _exchange(table, group)))
        self.tables = tables.to("cpu", non_blocking=True)
        if rows.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def exchanges(self) -> tuple[Exact, Exact]:
        """Those of rows and of slots. The host waits here, once, and reads 6 * N integers."""
        if self.event is not None:
            self.event.synchronize()
        sent, received = self.tables.tolist()
        check_facts(self.facts, [other for *_, other in received])
        of_rows, of_slots = (
            Exact(self.group, [row[i] for row in sent], [row[i] for row in received]) for i in range(2)
        )
        return of_rows, of_slots


def check_static(
    group: ProcessGroup, facts: Facts, counts: Tensor, capacity: int, buffers: int, what: str, *, drops: bool
) -> Tensor:
    """How many of this rank's rows, counts (N,) for each rank, exceed the capacity: (). The host waits for
    nothing. What differs between ranks, and rows above the capacity unless `drops`, are found by assertions
    on the device, on every rank. `buffers` is how many rows go there between two ranks, `what` its name."""
    dropped = (counts - capacity).clamp_min(0).sum()
    own = torch.cat((_column(counts, facts.packed()), _column(counts, buffers)), 1)
    table = torch.cat((own, dropped.to(counts.dtype).expand(group.size(), 1)), 1)
    others, others_dropped = _exchange(table, group).split((2, 1), 1)
    # all-to-all does not check that all ranks send buffers of the same size.
    what = f"static exchange needs {facts} and one {what} on all ranks"
    torch._assert_async((others == own).all(), f"{FN}: {what}")
    if not drops:
        what = f"more than capacity = {capacity} rows for a rank"
        torch._assert_async((others_dropped == 0).all(), f"{FN}: {what}")
    return dropped


def row_of_buffer(plan: Plan, num_ranks: int, capacity: int) -> Tensor:
    """(N * C,): the plan's rows in the order of buffers, -1 where one is unused."""
    first = _first_rows(plan, num_ranks)
    row = first[:-1, None] + torch.arange(capacity, device=first.device)
    return torch.where(row < first[1:, None], row, -1).flatten()


def buffer_of_row(plan: Plan, num_ranks: int, capacity: int) -> Tensor:
    """(R,): the buffer row of each of the plan's rows, -1 where it is not sent."""
    assert plan.row_token is not None
    first = _first_rows(plan, num_ranks)
    row = torch.arange(plan.row_token.size(0), device=first.device)
    rank = torch.bucketize(row, first[1:], right=True)  # N past the last row
    row_index = row - first[rank]  # among the rows for the same rank
    has_buffer = (rank < num_ranks) & (row_index < capacity)
    return torch.where(has_buffer, rank * capacity + row_index, -1)


def _first_rows(plan: Plan, num_ranks: int) -> Tensor:
    """(N+1,): the first row for each rank, then the number of rows."""
    return plan.offsets[:: plan.counts.size(0) // num_ranks].long()


def distinct(ranks: Tensor, num_ranks: int) -> Tensor:
    """ranks (T, K), outside [0, N) for none -> (T, N): column r is r where a token has that rank, else -1."""
    column = ranks.clamp(-1, num_ranks).remainder(num_ranks + 1).long()  # N for none
    return column.new_full((ranks.size(0), num_ranks + 1), -1).scatter(1, column, column)[:, :-1]


def cut(plan: Plan, num_rows: int) -> Plan:
    """The plan without what it has room for past `num_rows`, where it has no row."""
    assert plan.row_token is not None and plan.row_slot is not None
    return plan._replace(row_token=plan.row_token[:num_rows], row_slot=plan.row_slot[:num_rows])


def row_groups(plan: Plan) -> Tensor:
    """(R,): which of the plan's groups each row is in, their number past the last row."""
    assert plan.row_token is not None
    offsets = plan.offsets[1:]
    row = torch.arange(plan.row_token.size(0), dtype=offsets.dtype, device=offsets.device)
    return torch.bucketize(row, offsets, right=True)


def gather(rows: Tensor, source: Tensor) -> Tensor:
    """out[i] = rows[source[i]], zero where source[i] is -1."""
    return F.pad(rows, (0, 0, 0, 1))[source]  # -1 is the row of zeros


class _Gather(torch.autograd.Function):
    """`gather`. Backward gathers by the inverse map; the backward of indexing would use atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return gather(rows, source)

    @staticmethod
    def backward(ctx, dout: Tensor):
        source, inverse = ctx.saved_tensors
        return _Gather.apply(dout, inverse, source), None, None


def _column(counts: Tensor, value: int) -> Tensor:
    """(N, 1), the value in every row. A fill, because a copy from the host makes it wait."""
    return counts.new_full((counts.size(0), 1), value)


def _exchange(table: Tensor, group: ProcessGroup) -> Tensor:
    """(N, n), row i for rank i -> (N, n), row i from rank i."""
    splits = [1] * group.size()
    return wait(_start(table, splits, splits, group))


def wait(arriving: Tensor) -> Tensor:
    """What a collective brings: from here on the device's stream, and not the host, waits for it."""
    return run(torch.ops._c10d_functional.wait_tensor.default, arriving)


def summed(t: Tensor, group: ProcessGroup) -> Tensor:
    """Its sum over the ranks. PyTorch wraps what its functions return, which takes the host longer."""
    return wait(run(torch.ops._c10d_functional.all_reduce.default, t, "sum", group.group_name))


def _start(rows: Tensor, receive_splits: list[int], send_splits: list[int], group: ProcessGroup) -> Tensor:
    """NCCL takes no rows of padded widths, whose pitch is wider than they are."""
    op = torch.ops._c10d_functional.all_to_all_single.default
    return run(op, rows.contiguous(), receive_splits, send_splits, group.group_name)


def _all_to_all(rows: Tensor, group: ProcessGroup) -> Tensor:
    return collectives.all_to_all_single_autograd(rows.contiguous(), None, None, group)
