"""Sends rows to the ranks of their experts and back, by all-to-all over the N ranks of a process group.

A plan has grouped the rows by expert or by rank, so those for one rank are neighbours. `open_exact` and
`open_static` exchange the numbers of rows, and with them what has to be the same on all ranks. Both return an
exchange: `there` takes rows in the plan's order to their ranks, `back` is its inverse, and gradients take the
same ways in reverse. Any tensors of that order can go, with one row for each row of the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks
from .plan import Plan

FN = "ExpertParallel"


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


class Exact(NamedTuple):
    """An exchange of exact sizes, which the host knows."""

    group: ProcessGroup
    received: Tensor  # (N, m) rows from each rank for each of the m groups of the plan that are this rank's
    send_splits: list[int]
    receive_splits: list[int]
    num_slots: int  # the slots of the received rows that have an expert here
    num_rows: int  # R, with the rows past the last, which are not sent

    def there(self, rows: Tensor) -> Tensor:
        rows = _with_length(rows, sum(self.send_splits))
        return _all_to_all(rows, self.group, self.receive_splits, self.send_splits)

    def back(self, rows: Tensor) -> Tensor:
        rows = _all_to_all(rows, self.group, self.send_splits, self.receive_splits)
        return _with_length(rows, self.num_rows)

    def groups(self) -> Tensor:
        """Which of the m groups each received row is of."""
        groups = torch.arange(self.received.size(1), device=self.received.device)
        counts = self.received.flatten()
        return groups.repeat(self.received.size(0)).repeat_interleave(
            counts, output_size=sum(self.receive_splits)
        )


class Static(NamedTuple):
    """An exchange through buffers of C rows for every two ranks. Unused buffer rows are zero."""

    group: ProcessGroup
    received: Tensor  # (N, m), as Exact's
    row_of_buffer: Tensor  # (N * C,) -1 where a buffer row is unused
    buffer_of_row: Tensor  # (R,) -1 where a row is not sent
    dropped: Tensor  # () the rows above C

    def there(self, rows: Tensor) -> Tensor:
        return _all_to_all(_Gather.apply(rows, self.row_of_buffer, self.buffer_of_row), self.group)

    def back(self, rows: Tensor) -> Tensor:
        return _Gather.apply(_all_to_all(rows, self.group), self.buffer_of_row, self.row_of_buffer)

    def groups(self) -> Tensor:
        """As Exact's; m for an unused buffer row: the number of groups that end at or before it."""
        num_ranks = self.received.size(0)
        index = torch.arange(self.row_of_buffer.size(0) // num_ranks, device=self.received.device)
        return torch.searchsorted(self.received.cumsum(1), index.repeat(num_ranks, 1), right=True).flatten()


def open_exact(plan: Plan, group: ProcessGroup, facts: Facts, slots: Tensor | None = None) -> Exact:
    """`slots` (N,): how many slots have their expert on each rank, if a row is not one slot. The host waits
    here, once, and reads what is sent and received, at most 2 * (E + 2 * N) integers."""
    counts = plan.counts.view(group.size(), -1)
    own = facts.packed()
    sent = [counts, _column(counts, own)]
    if slots is not None:
        sent.append(slots.to(counts.dtype).unsqueeze(1))
    sent = torch.cat(sent, 1)
    received = _exchange(sent, group)
    num_groups = counts.size(1)
    sent_rows, received_rows = torch.stack((sent, received)).tolist()
    for rank, row in enumerate(received_rows):
        if row[num_groups] != own:
            found = f"{Facts.unpacked(row[num_groups])} on rank {rank}"
            checks.fail(ValueError, FN, f"{facts} on all ranks", found)
    send_splits, receive_splits = (
        [sum(row[:num_groups]) for row in rows] for rows in (sent_rows, received_rows)
    )
    num_slots = sum(row[-1] for row in received_rows) if slots is not None else sum(receive_splits)
    received = received[:, :num_groups]
    return Exact(group, received, send_splits, receive_splits, num_slots, plan.row_token.size(0))


def open_static(plan: Plan, group: ProcessGroup, facts: Facts, capacity: int, *, drops: bool) -> Static:
    """The host waits for nothing. What differs between ranks, and rows above the capacity unless `drops`,
    are found by assertions on the device, on every rank."""
    sent = plan.counts.view(group.size(), -1)
    dropped = (sent.sum(1) - capacity).clamp_min(0).sum()
    own = torch.cat((_column(sent, facts.packed()), _column(sent, capacity)), 1)
    table = torch.cat((sent, own, dropped.to(sent.dtype).expand(group.size(), 1)), 1)
    received, others, others_dropped = _exchange(table, group).split((sent.size(1), 2, 1), 1)
    # all-to-all does not check that all ranks send buffers of the same size.
    what = f"static exchange needs {facts} and one capacity on all ranks"
    torch._assert_async((others == own).all(), f"{FN}: {what}")
    if not drops:
        what = f"more than capacity = {capacity} rows for a rank"
        torch._assert_async((others_dropped == 0).all(), f"{FN}: {what}")

    # (N+1,): the first row for each rank, then the number of rows
    first = plan.offsets[:: sent.size(1)].long()
    index = torch.arange(capacity, device=sent.device)
    row_of_buffer = first[:-1, None] + index
    row_of_buffer = torch.where(row_of_buffer < first[1:, None], row_of_buffer, -1).flatten()
    row = torch.arange(plan.row_token.size(0), device=sent.device)
    rank = torch.bucketize(row, first[1:], right=True)  # N past the last row
    row_index = row - first[rank]  # among the rows for the same rank
    has_buffer = (rank < group.size()) & (row_index < capacity)
    buffer_of_row = torch.where(has_buffer, rank * capacity + row_index, -1)
    return Static(group, received, row_of_buffer, buffer_of_row, dropped)


def distinct(ranks: Tensor, num_ranks: int) -> Tensor:
    """ranks (T, K) of the N, -1 for none -> (T, min(K, N)): each rank of a token once, ascending, then -1."""
    ranks = torch.where(ranks < 0, num_ranks, ranks).sort(1).values
    ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], num_ranks)
    ranks = ranks.sort(1).values[:, :num_ranks]
    return torch.where(ranks < num_ranks, ranks, -1)


class _Gather(torch.autograd.Function):
    """out[i] = rows[source[i]], zero where source[i] is -1. Backward gathers by the inverse map; the backward
    of indexing would use atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return F.pad(rows, (0, 0, 0, 1))[source]  # -1 is the row of zeros

    @staticmethod
    def backward(ctx, dout: Tensor):
        source, inverse = ctx.saved_tensors
        return _Gather.apply(dout, inverse, source), None, None


def _column(counts: Tensor, value: int) -> Tensor:
    """(N, 1), the value in every row. A fill, because a copy from the host makes it wait."""
    return counts.new_full((counts.size(0), 1), value)


def _exchange(table: Tensor, group: ProcessGroup) -> Tensor:
    """(N, n), row i for rank i -> (N, n), row i from rank i."""
    return collectives.wait_tensor(collectives.all_to_all_single(table, None, None, group))


def _all_to_all(rows: Tensor, group: ProcessGroup, receive_splits=None, send_splits=None) -> Tensor:
    return collectives.all_to_all_single_autograd(rows, receive_splits, send_splits, group)


def _with_length(rows: Tensor, length: int) -> Tensor:
    """Appends zero rows, or drops the last ones; only the former copies."""
    missing = length - rows.size(0)
    if missing == 0:  # a slice of all would copy in backward
        return rows
    return F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows[:length]
