"""Auxiliary router losses, in plain PyTorch: scalars that a trainer can add to its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_choice, check_num_tokens, fail
from .ops import SCORE_FUNCS
from .padding import is_real, zero_padding


def load_balancing_loss(
    logits: Tensor,
    ids: Tensor,
    num_experts: int,
    *,
    score_func: str = "softmax",
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Switch Transformer's balance loss: E * sum over e of f_e * p_e, 1 when perfectly balanced.

    f_e is the share of (token, slot) pairs sent to expert e, p_e the mean router probability of e: the
    softmax of the logits, or their sigmoids divided by the token's sum of sigmoids over all experts.
    Source: Fedus et al., "Switch Transformers", 2021, equations 4 to 6, over K slots instead of one; with
    sigmoid DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20, over all tokens of the call.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).
        ids: (..., K) chosen experts of the same tokens, any integer dtype; others than [0, E) do not count.
        num_experts: E.
        score_func: "softmax" or "sigmoid", the router's.
        num_tokens: as that of `route`: tokens from it on are padding and do not count.

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    fn = "load_balancing_loss"
    logits = _checked(fn, logits, num_tokens)
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
    check_choice(fn, "score_func", score_func, SCORE_FUNCS)
    rows = _rows(logits, num_tokens)
    # softmax(log s) = s / sum(s), also where all sigmoids underflow
    probs = _mean((F.logsigmoid(rows) if score_func == "sigmoid" else rows).softmax(-1), num_tokens)
    flat = ids.flatten().long()
    has_expert = (flat >= 0) & (flat < num_experts)
    if num_tokens is not None:
        has_expert = has_expert & is_real(num_tokens, rows).repeat_interleave(ids.size(-1))
    flat = torch.where(has_expert, flat, num_experts)
    load = flat.new_zeros(num_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    share = load[:num_experts].to(probs.dtype) / _at_least_one(rows.size(0), num_tokens, ids.size(-1))
    return num_experts * (share * probs).sum()


def router_z_loss(logits: Tensor, *, num_tokens: Tensor | None = None) -> Tensor:
    """ST-MoE's z-loss: the mean over tokens of logsumexp(logits) squared; keeps logits small.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).
        num_tokens: as that of `route`: tokens from it on are padding and do not count.

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    rows = _rows(_checked("router_z_loss", logits, num_tokens), num_tokens)
    return _mean(rows.logsumexp(-1).square(), num_tokens)


def _checked(fn: str, logits, num_tokens) -> Tensor:
    """The logits in the dtype of the computation."""
    if not isinstance(logits, Tensor):
        fail(TypeError, fn, "logits to be a tensor", type(logits).__name__)
    if not logits.is_floating_point():
        fail(TypeError, fn, "logits of a floating dtype", logits.dtype)
    if logits.dim() < 1 or logits.size(-1) < 1:
        fail(ValueError, fn, "logits of shape (..., E) with E >= 1", tuple(logits.shape))
    if num_tokens is not None:
        check_num_tokens(fn, num_tokens, "logits", logits)
    return logits if logits.dtype == torch.float64 else logits.float()


def _rows(logits: Tensor, num_tokens: Tensor | None) -> Tensor:
    """(T, E). Padded rows are zeros already here: the gradient of a softmax of NaN is NaN."""
    return zero_padding(logits.reshape(-1, logits.size(-1)), num_tokens)


def _mean(x: Tensor, num_tokens: Tensor | None) -> Tensor:
    """The mean over tokens, the first dimension; 0 without tokens."""
    return zero_padding(x, num_tokens).sum(0) / _at_least_one(x.size(0), num_tokens)


def _at_least_one(count: int, num_tokens: Tensor | None, per_token: int = 1):
    """The number of real tokens, or of what each has per_token of."""
    if num_tokens is None:
        return max(count * per_token, 1)
    return num_tokens.reshape(()).clamp(0, count).mul(per_token).clamp_min(1)
