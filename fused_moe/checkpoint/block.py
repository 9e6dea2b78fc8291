"""What a MoE layer is in the files of a Hugging Face checkpoint: `Block`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Source(NamedTuple):
    """Where one tensor of FusedMoE's state_dict is.

    A `*` in the name stands for the number of the expert: such tensors are stacked along a first dimension.
    """

    name: str  # "model.layers.3.mlp.experts.*.up_proj.weight"
    transposed: bool = False  # whether the last two dimensions are swapped
    # Which rows, in dimension 1 of what is stacked and 0 of others, after the swap: all of them, the upper or
    # the lower half, or every second one, from the first or from the second. "first" is the only one of a
    # dimension that FusedMoE's tensor does not have.
    rows: str = "all"  # "all", "upper", "lower", "even", "odd", "first"


class Block(NamedTuple):
    """One MoE layer of a model."""

    layer: int  # its number among the model's layers
    settings: dict[str, Any]  # arguments of FusedMoE, but device and dtype
    # For each tensor of FusedMoE's state_dict, where it is in a checkpoint: the published place first, then
    # others, such as the stacked tensors that transformers 5 has in memory.
    tensors: dict[str, tuple[Source, ...]]
    # What the names of this layer's tensors begin with, and no others': "model.layers.3.mlp."
    prefixes: tuple[str, ...]


def rows_of(tensor: Tensor, rows: str, dim: int) -> Tensor:
    """A view of the rows, along dim, that `Source.rows` names."""
    if rows == "all":
        return tensor
    if rows == "first":
        return tensor[0]
    if rows in ("upper", "lower"):
        half = tensor.size(dim) // 2
        return tensor.narrow(dim, half * (rows == "lower"), half)
    return tensor[(slice(None),) * dim + (slice(rows == "odd", None, 2),)]
