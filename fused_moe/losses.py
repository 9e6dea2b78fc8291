"""Auxiliary router losses, in plain PyTorch: scalars that a trainer can add to its loss.

Letters: N sequences of S tokens, E experts, K experts per token. Without per_sequence all tokens are one
sequence.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .checks import check_bool, check_choice, check_device, check_group, check_num_tokens, check_shape, fail
from .padding import is_real


def load_balancing_loss(
    logits: Tensor,
    ids: Tensor,
    num_experts: int,
    *,
    score_func: str = "softmax",
    num_tokens: Tensor | None = None,
    mask: Tensor | None = None,
    per_sequence: bool = False,
    group: dist.ProcessGroup | None = None,
    load: Tensor | None = None,
) -> Tensor:
    """Computes Switch Transformer's balance loss: E * sum over e of f_e * p_e, 1 when perfectly balanced.

    f_e is the share of (token, slot) pairs sent to expert e, p_e the mean router probability of e: the
    token's scores divided by their sum over all experts.
    Source: Fedus et al., "Switch Transformers", 2021, equations 4 to 6, over K slots instead of one. Other
    scores than softmax's, and per_sequence: DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20. group and
    load: Qiu et al., "Demons in the Detail" (arXiv 2501.11873), whose buffer of counts is `load`.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).
        ids: (..., K) chosen experts of the same tokens, any integer dtype; others than [0, E) do not count.
        num_experts: E.
        score_func: "softmax", "sigmoid" or "sqrtsoftplus", the router's.
        num_tokens: as that of `route`: tokens from it on are padding and do not count.
        mask: (...) bool: tokens that are False do not count, whatever they hold.
        per_sequence: whether to take the loss of each sequence over its own tokens, logits (..., S, E), and
            return their mean. Sequences without tokens that count are left out.
        group: ranks whose tokens are one batch. f_e is taken over all of them, by one all-reduce of E + 2
            integers, which every rank of the group has to join. The losses' mean over the ranks is then
            the loss of the whole batch, in value and gradient, also where ranks have different numbers of
            tokens: DDP and FSDP, which average gradients, need no factor. Not with per_sequence.
        load: (E,) tokens per expert in the earlier micro-batches of this step, on this rank, of any integer
            dtype: f_e is that of load and this call together, p_e of this call. It is read and not changed.
            Not with per_sequence.

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> logits = torch.zeros(4, 2)  # all experts have the same probability
        >>> fused_moe.load_balancing_loss(logits, torch.tensor([[0], [1], [0], [1]]), num_experts=2)
        tensor(1.)
    """
    fn = "load_balancing_loss"
    logits = _checked(fn, logits, num_tokens, mask)
    if not isinstance(num_experts, (int, torch.SymInt)) or isinstance(num_experts, bool):
        fail(TypeError, fn, "num_experts to be an int", type(num_experts).__name__)
    if num_experts != logits.size(-1):
        fail(ValueError, fn, f"num_experts of the logits, {logits.size(-1)}", num_experts)
    if not isinstance(ids, Tensor):
        fail(TypeError, fn, "ids to be a tensor", type(ids).__name__)
    if not _is_integral(ids):
        fail(TypeError, fn, "ids of an integer dtype", ids.dtype)
    if ids.dim() != logits.dim() or ids.shape[:-1] != logits.shape[:-1]:
        expected = f"ids (..., K) of the same tokens as logits {tuple(logits.shape)}"
        fail(ValueError, fn, expected, tuple(ids.shape))
    if ids.device != logits.device:
        fail(ValueError, fn, f"ids on the logits' device {logits.device}", ids.device)
    check_choice(fn, "score_func", score_func, LOG_SCORES)
    check_scope(fn, per_sequence, group, load, num_experts, "logits", logits)
    if per_sequence and logits.dim() < 2:
        fail(ValueError, fn, "logits of shape (..., S, E) with per_sequence", tuple(logits.shape))

    top_k = ids.size(-1)
    num_sequences = logits.shape[:-2].numel() if per_sequence else 1
    length = logits.size(-2) if per_sequence else logits.shape[:-1].numel()
    real = _real(logits, num_tokens, mask)
    rows = _rows(logits, real)
    # softmax(log s) = s / sum(s), also where all scores underflow
    probs = _zeroed(LOG_SCORES[score_func](rows).softmax(-1), real)
    probs = probs.reshape(num_sequences, length, num_experts).sum(1)
    flat = ids.reshape(-1, top_k).long()
    has_expert = (flat >= 0) & (flat < num_experts)
    if real is None:
        tokens = flat.new_full((num_sequences, 1), length)
    else:
        has_expert = has_expert & real.unsqueeze(1)
        tokens = real.reshape(num_sequences, length).sum(1, keepdim=True)
    # in bin E: slots that do not count
    flat = torch.where(has_expert, flat, num_experts).view(num_sequences, length * top_k)
    bins = flat + torch.arange(num_sequences, device=flat.device).unsqueeze(1) * (num_experts + 1)
    counts = flat.new_zeros(num_sequences * (num_experts + 1))
    counts = counts.scatter_add(0, bins.flatten(), torch.ones_like(bins).flatten())
    counts = counts.view(num_sequences, num_experts + 1)[:, :num_experts]

    slots = tokens * top_k
    if load is not None:
        load = load.detach().long()
        counts, slots = counts + load, slots + load.sum()
    scale = num_experts
    if group is not None:
        counts, slots, tokens = _summed((counts, slots, tokens), group)
        scale = num_experts * group.size()
    share, mean = counts / slots.clamp_min(1).to(probs.dtype), probs / tokens.clamp_min(1)
    if not per_sequence:
        return scale * (share * mean).sum()
    return num_experts * (share * mean).sum() / (tokens > 0).sum().clamp_min(1)


def router_z_loss(logits: Tensor, *, num_tokens: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Computes ST-MoE's z-loss: the mean over tokens of logsumexp(logits) squared, which keeps logits small.

    Source: Zoph et al., "ST-MoE", 2022, equation 5.

    Args:
        logits: (..., E) router logits, any floating dtype; computed in float32 (float64 stays).
        num_tokens: as that of `route`: tokens from it on are padding and do not count.
        mask: (...) bool: tokens that are False do not count, whatever they hold.

    Returns:
        A scalar, differentiable in logits; 0 without tokens.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> fused_moe.router_z_loss(torch.zeros(4, 1))
        tensor(0.)
    """
    logits = _checked("router_z_loss", logits, num_tokens, mask)
    real = _real(logits, num_tokens, mask)
    squares = _zeroed(_rows(logits, real).logsumexp(-1).square(), real)
    count = max(squares.numel(), 1) if real is None else real.sum().clamp_min(1)
    return squares.sum() / count


def check_mask(fn: str, name: str, mask, like_name: str, like: Tensor) -> None:
    """Checks a bool for each token of like (..., width)."""
    if not isinstance(mask, Tensor):
        fail(TypeError, fn, f"{name} to be a tensor", type(mask).__name__)
    if mask.dtype != torch.bool:
        fail(TypeError, fn, f"{name} of dtype bool", mask.dtype)
    check_shape(fn, name, mask, "...", like.shape[:-1])
    check_device(fn, name, mask, like_name, like)


def check_scope(fn: str, per_sequence, group, load, num_experts: int, like_name: str, like: Tensor) -> None:
    """Checks which tokens a balance loss is taken over."""
    if per_sequence is not False:
        check_bool(fn, "per_sequence", per_sequence)
    check_group(fn, group)
    if load is not None:
        if not isinstance(load, Tensor):
            fail(TypeError, fn, "load to be a tensor", type(load).__name__)
        if not _is_integral(load):
            fail(TypeError, fn, "load of an integer dtype", load.dtype)
        check_shape(fn, "load", load, "E", (num_experts,))
        check_device(fn, "load", load, like_name, like)
    if per_sequence and not (group is None and load is None):
        fail(ValueError, fn, "neither group nor load with per_sequence", "one of them")


def _checked(fn: str, logits, num_tokens, mask) -> Tensor:
    """The logits in the dtype of the computation."""
    if not isinstance(logits, Tensor):
        fail(TypeError, fn, "logits to be a tensor", type(logits).__name__)
    if not logits.is_floating_point():
        fail(TypeError, fn, "logits of a floating dtype", logits.dtype)
    if logits.dim() < 1 or logits.size(-1) < 1:
        fail(ValueError, fn, "logits of shape (..., E) with E >= 1", tuple(logits.shape))
    if num_tokens is not None:
        check_num_tokens(fn, num_tokens, "logits", logits)
    if mask is not None:
        check_mask(fn, "mask", mask, "logits", logits)
    return logits if logits.dtype == torch.float64 else logits.float()


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _log_sqrt_softplus(x: Tensor) -> Tensor:
    """log(sqrt(log(1 + exp(x)))). softplus(x) is exp(x) to the last bit of a double for x < -40, which
    underflows in float32 soon after."""
    low = -40
    softplus = -F.logsigmoid(-x.clamp_min(low))
    return 0.5 * torch.where(x < low, x, softplus.log())


LOG_SCORES = {"softmax": lambda x: x, "sigmoid": F.logsigmoid, "sqrtsoftplus": _log_sqrt_softplus}


def _real(logits: Tensor, num_tokens: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """(T,) bool: tokens that count; None: all do."""
    real = None if mask is None else mask.reshape(-1)
    if num_tokens is None:
        return real
    in_front = is_real(num_tokens, logits[..., 0].reshape(-1))
    return in_front if real is None else real & in_front


def _rows(logits: Tensor, real: Tensor | None) -> Tensor:
    """(T, E). Rows that do not count are zeros already here: the gradient of a softmax of NaN is NaN."""
    return _zeroed(logits.reshape(-1, logits.size(-1)), real)


def _zeroed(x: Tensor, real: Tensor | None) -> Tensor:
    """x (T, ...) with zeros in rows that do not count."""
    return x if real is None else torch.where(real.view(-1, *[1] * (x.dim() - 1)), x, 0)


def _summed(parts: tuple[Tensor, ...], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Integers (1, n) each, summed over the group by one all-reduce."""
    import torch.distributed._functional_collectives as collectives  # 0.3 s that no other call needs

    total = collectives.all_reduce(torch.cat(parts, dim=1), "sum", group)
    return total.split([part.size(1) for part in parts], dim=1)
