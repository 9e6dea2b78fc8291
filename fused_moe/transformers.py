"""fused_moe in Hugging Face transformers: an implementation for its experts interface.

    import fused_moe.transformers

    fused_moe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fused_moe")

The model keeps its router, shared experts and checkpoint; only the computation of the routed experts is
replaced. Their parameters are used in place: packed in halves or interleaved, transposed or not. No step
copies a weight. The module tells what its experts compute: the flags that transformers' decorator sets, the
gate function and the activation. Experts with a gate, an activation or a norm that no kernel supports run
eager, and a warning says so once.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .function import fused_experts

try:
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    # The registry that models read. Earlier releases have none: they accept only built-in names.
    from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
except ImportError as error:
    raise ImportError(
        "fused_moe.transformers needs Hugging Face transformers with an experts interface that is open to "
        f"other implementations: pip install 'transformers>=5.7' ({error})"
    ) from error

__all__ = ["NAME", "experts_forward", "register"]

NAME = "fused_moe"

# Keyed by type: a configuration may have several names for one activation.
_ACTIVATIONS = {
    type(ACT2FN[their_name]): our_name
    for their_name, our_name in (
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu", "relu"),
    )
} | {F.silu: "silu"}

_warned: set[tuple[str, str]] = set()


def register() -> None:
    """Makes "fused_moe" a name that `experts_implementation=` and `set_experts_implementation` know.

    Call it before a model is loaded, or before its implementation is set. Calling it again does no harm.
    Source: transformers.integrations.moe.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers calls this instead of the forward of a class with `use_experts_implementation`.

    Args:
        experts: has the parameters gate_up_proj (E, 2F, D), or up_proj (E, F, D) without a gate, and
            down_proj (E, D, F); with biases also gate_up_proj_bias or up_proj_bias, and down_proj_bias. If
            `is_transposed`, the last two dimensions of the weights are swapped.
        hidden_states: (T, D). Outside of autocast it is cast to the weights' dtype, as in transformers'
            grouped_mm.
        top_k_index: (T, K) int32 or int64. An index of E or more is treated as remote: its slot is not
            computed, adds nothing, and its weight gets a zero gradient.
        top_k_weights: (T, K) of any floating dtype.

    Returns:
        (T, D) in hidden_states' dtype, differentiable in hidden_states, top_k_weights and parameters.

    Raises:
        TypeError, ValueError: as `fused_moe.fused_experts`.
    """
    settings = _settings(experts)
    if isinstance(settings, str):
        _warn_once(type(experts).__name__, settings)
        return type(experts).forward.__wrapped__(experts, hidden_states, top_k_index, top_k_weights)
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    w1 = getattr(experts, first)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(w1.dtype)
    out = fused_experts(
        x,
        w1,
        experts.down_proj,
        None,
        top_k_weights,
        top_k_index,
        b1=getattr(experts, f"{first}_bias") if experts.has_bias else None,
        b2=experts.down_proj_bias if experts.has_bias else None,
        transposed=experts.is_transposed,
        **settings,
    )
    return out.to(hidden_states.dtype)


def _settings(experts: nn.Module) -> dict | str:
    """The layout and activation of these experts, or the name of the part that is not supported."""
    if getattr(experts, "has_post_expert_norm", False):  # newer than the other flags
        return "the norm after each expert"
    layout = "separate"
    if experts.has_gate:
        gate = experts._apply_gate
        gate = getattr(gate, "__func__", gate)
        if gate is GptOssExperts._apply_gate:
            alpha, limit = float(experts.alpha), float(experts.limit)
            activation = {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit}
            return {"layout": "interleaved", **activation}
        if gate is not _default_apply_gate or not experts.is_concatenated:
            return f"the gate {_full_name(gate)}"
        layout = "halves"
    act_fn = getattr(experts, "act_fn", None)
    if isinstance(act_fn, nn.Module):
        act_fn = type(act_fn)
    if act_fn not in _ACTIVATIONS:
        return f"the activation {_full_name(act_fn)}"
    return {"layout": layout, "activation": _ACTIVATIONS[act_fn]}


def _full_name(thing) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__name__', thing)}"


def _warn_once(experts: str, reason: str) -> None:
    """Warns once per class of experts: a model has dozens of such layers and calls each every step."""
    if (experts, reason) not in _warned:
        _warned.add((experts, reason))
        warnings.warn(f"fused_moe does not compute {reason} of {experts}, which runs eager", stacklevel=2)
