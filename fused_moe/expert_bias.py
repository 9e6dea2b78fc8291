"""The bias of balancing without auxiliary loss stays float32, whatever its layer is cast to or loaded from.

An update moves it by 1e-3 or so. A bfloat16 bias of 1 does not move by that: the load would not be balanced,
without a word.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import fail
from .kept_dtypes import KeepsDtypes


class KeepsExpertBias(KeepsDtypes):
    """A module with such a bias, or None, in the buffer named `bias_name`."""

    bias_name = "expert_bias"

    def _kept_dtypes(self) -> dict[str, torch.dtype]:
        return {**super()._kept_dtypes(), self.bias_name: torch.float32}


def check_expert_bias(fn: str, bias: Tensor | None) -> None:
    """Checks a bias that may have been set, past all that keeps its dtype."""
    if bias is not None and bias.dtype != torch.float32:
        fail(TypeError, fn, "expert_bias of dtype float32", bias.dtype)


@torch.no_grad()
def update_biases(layers: list, group=None) -> None:
    """Moves each FusedMoE's expert_bias by its load_balance_coeff against its load, and zeroes its counts.
    One all-reduce sums the counts of all layers over the group."""
    for layer in layers:
        if layer.tokens_per_expert.is_meta:  # parameters came by assignment, nothing is counted
            layer._move_counter("tokens_per_expert", layer.expert_bias.device)
    loads = joined([layer.tokens_per_expert for layer in layers])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(loads, group=group)
    for layer in layers:  # not before, or the other ranks would wait for one that raises
        check_expert_bias("FusedMoE", layer.expert_bias)
    for layer, load in zip(layers, loads.split([layer.num_experts for layer in layers]), strict=True):
        shortfall = load.sum() - layer.num_experts * load  # E times (mean - load), exactly
        delta = layer.load_balance_coeff * torch.sign(shortfall).float()
        bias = layer.expert_bias
        bias.add_((delta - delta.mean()).to(bias.device))
        layer.tokens_per_expert.zero_()


def joined(counts: list[Tensor]) -> Tensor:
    """Counts of layers one after another, on the first one's device."""
    return torch.cat([count.detach().to(counts[0].device) for count in counts])
