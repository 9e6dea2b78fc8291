"""Layers for kernels.kernelize: their forward takes the place of that of a block of transformers.

tools/hub.py writes this file as `layers.py` of a kernel. A layer here has no state and no other method: its
`self` is the block. The router is called as a module, so its hooks, and recordings of its logits, still work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MegaBlocksMoeMLP(nn.Module):
    """transformers' GptOssMLP, by the name that its class asks the hub for."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        from .transformers.experts import experts_forward

        x = hidden_states.reshape(-1, hidden_states.size(-1))
        _, scores, ids = self.router(x)
        return experts_forward(self.experts, x, ids, scores).view_as(hidden_states), scores


class FusedMoEBlock(nn.Module):
    """A block with a `gate` and `experts`, and without shared experts: Mixtral's, Qwen3-MoE's and others'."""

    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        shared = getattr(self, "shared_expert", None), getattr(self, "shared_experts", None)
        if shared != (None, None):
            raise ValueError(f"FusedMoEBlock: expected no shared experts, found {type(self).__name__}")
        from .transformers.experts import experts_forward

        x = hidden_states.reshape(-1, hidden_states.size(-1))
        if self.training and getattr(self, "jitter_noise", 0) > 0:  # Mixtral's
            x = x * torch.empty_like(x).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        _, scores, ids = self.gate(x)
        return experts_forward(self.experts, x, ids, scores).view_as(hidden_states)
