"""Auxiliary router losses, in plain PyTorch: scalars that a trainer can add to its loss."""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(logits: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Switch Transformer's balance loss: E * sum over e of f_e * p_e, 1 when perfectly balanced.

    f_e is the share of (token, slot) pairs sent to expert e, p_e the mean router probability of e.
    Source: Fedus et al., "Switch Transformers", 2021, equations 4 to 6, over K slots instead of one.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32.
        ids: (..., K) chosen experts, any integer dtype; ids outside [0, E) are not counted.
        num_experts: E.

    Returns:
        A scalar, differentiable in logits.
    """
    probs = logits.flatten(0, -2).float().softmax(-1).mean(0)
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    ones = torch.ones_like(flat, dtype=torch.float32)
    load = torch.zeros(num_experts + 1, device=ids.device).scatter_add_(0, flat, ones)
    return num_experts * (load[:num_experts] / max(flat.numel(), 1) * probs).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """ST-MoE's z-loss: the mean over tokens of logsumexp(logits) squared; keeps logits small.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32.

    Returns:
        A scalar, differentiable in logits.
    """
    return logits.float().logsumexp(-1).square().mean()
