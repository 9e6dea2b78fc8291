"""refresh_weights: makes anew what is kept beside weights, after writes that PyTorch does not record."""

from __future__ import annotations

from typing import Protocol, cast

from torch import nn

from ..checks import fail
from .weight import QuantizedWeight

# The name of a module's child whose `refresh(module)` makes anew what is kept beside the module's parameters.
KEPT = "_fused_moe_weights"


class Refreshable(Protocol):
    """What is kept beside a module's weights."""

    def refresh(self, module: nn.Module) -> None: ...


def refresh_weights(module: nn.Module) -> None:
    """Rebuilds what is kept beside weights, from the weights as they are now.

    That is the second packing of trainable QuantizedWeights in tiles; beside tiles with compute "auto", codes
    as published; float32 scales, beside those of 16 bits; and converted copies beside the parameters of
    transformers' experts.

    Call it after weights were written through `.data`, or in inference mode. `load_state_dict`, and
    writes that move a tensor's version, need no call. Memory that was right in size is written in place, so
    a CUDA graph sees the new weights.

    Args:
        module: any module, a model for instance. Modules that keep nothing are left alone.

    Raises:
        TypeError: module is no nn.Module.

    Example:
        >>> moe = fused_moe.quantize(fused_moe.FusedMoE(64, 128, num_experts=4, top_k=2), "int8")
        >>> moe.experts.w1.weight.data.zero_()[0, 0, 0]  # PyTorch records no write through .data
        tensor(0, dtype=torch.int8)
        >>> fused_moe.refresh_weights(moe)
    """
    if not isinstance(module, nn.Module):
        fail(TypeError, "refresh_weights", "module to be an nn.Module", type(module).__name__)
    for part in module.modules():
        if isinstance(part, QuantizedWeight):
            part.refresh()
        kept = part._modules.get(KEPT)
        if kept is not None:
            cast(Refreshable, kept).refresh(part)
