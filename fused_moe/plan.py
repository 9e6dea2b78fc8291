"""The plan: which row belongs to which token and expert. Index arithmetic alone, no gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

TILE_ROWS = 128  # FUSED_MOE_TILE_ROWS of csrc/plan.h


class Plan(NamedTuple):
    """Rows grouped by expert, all tensors int32 on the device of the ids it was made from.

    The three maps are None in a plan made from counts: there row r is token r.
    """

    counts: Tensor  # (E,)    rows of each expert
    offsets: Tensor  # (E+1,)  first row of each expert, then the number of rows
    row_token: Tensor | None  # (R,)    token of each row, -1 past the last row
    row_slot: Tensor | None  # (R,)    t * K + k of each row, -1 past the last row
    token_row: Tensor | None  # (T, K)  row of each slot, -1 where a slot has none
    tiles: Tensor  # (2+2E,) the tile plan of csrc/plan.h
