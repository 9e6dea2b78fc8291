"""Plan: the maps between rows, tokens and experts, and the tile schedule. Integers, without gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """The row maps of a call: which token and expert each row belongs to, without gradients.

    Rows are the slots that have an expert here, grouped by expert. All tensors are int32, on the device of
    the ids or counts. R is T * K, or max_rows where that is less. The last three, the row maps, are None in a
    plan made from counts: there row r is token r.

    Attributes:
        counts: (E,) rows of each expert.
        offsets: (E+1,) first row of each expert, then the number of rows.
        schedule: (8+4E,) the tile schedule of csrc/schedule.h; words past its lists are zeros.
        row_token: (R,) token of each row, -1 past the last row.
        row_slot: (R,) t * K + k of each row, -1 past the last row.
        token_row: (T, K) row of each slot, -1 where a slot has none.

    Example:
        >>> plan = fused_moe.route_plan(torch.tensor([[1], [0], [1]]), num_experts=2)
        >>> plan.counts.tolist(), plan.row_token.tolist()
        ([1, 2], [1, 0, 2])
    """

    counts: Tensor
    offsets: Tensor
    schedule: Tensor
    row_token: Tensor | None
    row_slot: Tensor | None
    token_row: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """The list that `torch.ops.fused_moe.*` take as `plan`."""
        return [*self[1:3]] if self.row_token is None else [*self[1:]]  # type: ignore[list-item]


def tensors_again(plan: Plan, copied: int = 0) -> list[Tensor]:
    """plan.tensors, for a second operator; for a third one with another tensor `copied`. In a graph of
    torch.jit equal lists become one, and PyTorch moves the tensors out of a list into the operator: the
    second one would find none."""
    if not torch.jit.is_tracing():
        return plan.tensors  # torch.compile of PyTorch 2.10 passes it on, and cannot unpack it
    return [t.clone() if i == copied else t for i, t in enumerate(plan.tensors)]
