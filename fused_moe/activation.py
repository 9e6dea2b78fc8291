"""Activations in plain PyTorch: the specification of csrc/activation.h, in the same order.

An expert computes a = f(gate) * m(up); without up, a = f(gate). swiglu_clamped is
gpt-oss's, swiglu_limited DeepSeek-V4's, relu2 Nemotron's and situ Kimi K3's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _linear(up: Tensor, limit: float) -> Tensor:
    return up


# name -> (f, m)
ACTIVATIONS = {
    "silu": (lambda x, alpha, limit: F.silu(x), _linear),
    "gelu": (lambda x, alpha, limit: F.gelu(x), _linear),
    "gelu_tanh": (lambda x, alpha, limit: F.gelu(x, approximate="tanh"), _linear),
    "relu": (lambda x, alpha, limit: F.relu(x), _linear),
    "swiglu_clamped": (
        lambda x, alpha, limit: x.clamp(max=limit) * torch.sigmoid(alpha * x.clamp(max=limit)),
        lambda up, limit: up.clamp(-limit, limit) + 1,
    ),
    "swiglu_limited": (
        lambda x, alpha, limit: F.silu(x.clamp(max=limit)),
        lambda up, limit: up.clamp(-limit, limit),
    ),
    "relu2": (lambda x, alpha, limit: F.relu(x).square(), _linear),
    "situ": (
        lambda x, alpha, limit: alpha * torch.tanh(x / alpha) * torch.sigmoid(x),
        lambda up, limit: limit * torch.tanh(up / limit),
    ),
}


# The constants that an activation uses.
CONSTANTS = {
    "swiglu_clamped": ("alpha", "limit"),
    "swiglu_limited": ("limit",),
    "situ": ("alpha", "limit"),
}


def activate(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """Computes f(gate) * m(up), or f(gate) without up, in plain PyTorch.

    Args:
        gate: (..., F), floating.
        up: as gate, or None.
        activation: silu, gelu, gelu_tanh, relu, swiglu_clamped, swiglu_limited, relu2 or situ.
        alpha: as that of `fused_experts`.
        limit: as that of `fused_experts`.

    Returns:
        A tensor like gate.

    Raises:
        KeyError: for another name of an activation.

    Example:
        >>> gate, up = torch.tensor([-1.0, 2.0]), torch.tensor([5.0, 3.0])
        >>> fused_moe.reference.activate(gate, up, activation="relu2")
        tensor([ 0., 12.])
    """
    f, m = ACTIVATIONS[activation]
    value = f(gate, alpha, limit)
    return value if up is None else value * m(up, limit)


def activation_of(experts: nn.Module) -> dict:
    """The activation of Experts or SharedExperts, as functions take it."""
    return {"activation": experts.activation, "alpha": experts.alpha, "limit": experts.limit}
