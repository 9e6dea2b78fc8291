"""What a MoE layer is in the files of a Hugging Face checkpoint: `Block`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Source(NamedTuple):
    """Where one tensor of FusedMoE's state_dict is in a checkpoint.

    A `*` in the name stands for the number of the expert: such tensors are stacked along a first dimension.

    Attributes:
        name: "model.layers.3.mlp.experts.*.up_proj.weight".
        transposed: whether the last two dimensions are swapped.
        rows: which rows, in dimension 1 of what is stacked and 0 of others, after the swap: "all"; "upper" or
            "lower", a half; "even" or "odd", every second one; or "first", the only one of a dimension that
            FusedMoE's tensor does not have.

    Example:
        >>> from fused_moe.checkpoint import Source
        >>> Source("model.layers.3.mlp.experts.*.up_proj.weight").rows
        'all'
    """

    name: str
    transposed: bool = False
    rows: str = "all"


class Block(NamedTuple):
    """One MoE layer of a model, as `blocks` finds it.

    Attributes:
        layer: its number among the model's layers.
        settings: {argument of FusedMoE: value}, but device and dtype.
        tensors: {tensor of FusedMoE's state_dict: where it is in a checkpoint}: the published place first,
            then others, such as the stacked tensors that transformers 5 has in memory.
        prefixes: what the names of this layer's tensors begin with, and no others': "model.layers.3.mlp.".

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> block = checkpoint.blocks(config | {"num_experts": 8, "num_hidden_layers": 1})[0]
        >>> block.tensors["experts.w3"][0].name
        'model.layers.0.mlp.experts.*.up_proj.weight'
    """

    layer: int
    settings: dict[str, Any]
    tensors: dict[str, tuple[Source, ...]]
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
