"""Auxiliary router losses, in plain PyTorch: scalars that a trainer can add to its loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .function import fail


def load_balancing_loss(logits: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Switch Transformer's balance loss: E * sum over e of f_e * p_e, 1 when perfectly balanced.

    f_e is the share of (token, slot) pairs sent to expert e, p_e the mean router probability of e.
    Source: Fedus et al., "Switch Transformers", 2021, equations 4 to 6, over K slots instead of one.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).
        ids: (..., K) chosen experts of the same tokens, any integer dtype; others than [0, E) do not count.
        num_experts: E.

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    fn = "load_balancing_loss"
    logits = _checked(fn, logits)
    if not isinstance(num_experts, (int, torch.SymInt)) or isinstance(num_experts, bool):
        fail(TypeError, fn, "num_experts to be an int", type(num_experts).__name__)
    if num_experts != logits.size(-1):
        fail(ValueError, fn, f"num_experts of the logits, {logits.size(-1)}", num_experts)
    if not isinstance(ids, Tensor):
        fail(TypeError, fn, "ids to be a tensor", type(ids).__name__)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        fail(TypeError, fn, "ids of an integer dtype", ids.dtype)
    if ids.dim() != logits.dim() or ids.shape[:-1] != logits.shape[:-1]:
        tokens = f"ids (..., K) of the same tokens as logits {tuple(logits.shape)}"
        fail(ValueError, fn, tokens, tuple(ids.shape))
    if ids.device != logits.device:
        fail(ValueError, fn, f"ids on the logits' device {logits.device}", ids.device)
    probs = _mean(logits.reshape(-1, num_experts).softmax(-1))
    flat = ids.flatten().long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    load = flat.new_zeros(num_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    share = load[:num_experts].to(probs.dtype) / max(flat.numel(), 1)
    return num_experts * (share * probs).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """ST-MoE's z-loss: the mean over tokens of logsumexp(logits) squared; keeps logits small.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    logits = _checked("router_z_loss", logits)
    return _mean(logits.reshape(-1, logits.size(-1)).logsumexp(-1).square())


def _checked(fn: str, logits) -> Tensor:
    """The logits in the dtype of the computation."""
    if not isinstance(logits, Tensor):
        fail(TypeError, fn, "logits to be a tensor", type(logits).__name__)
    if not logits.is_floating_point():
        fail(TypeError, fn, "logits of a floating dtype", logits.dtype)
    if logits.dim() < 1 or logits.size(-1) < 1:
        fail(ValueError, fn, "logits of shape (..., E) with E >= 1", tuple(logits.shape))
    return logits if logits.dtype == torch.float64 else logits.float()


def _mean(x: Tensor) -> Tensor:
    """The mean over tokens, the first dimension; 0 without tokens."""
    return x.sum(0) / max(x.size(0), 1)
