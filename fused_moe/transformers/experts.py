"""The routed experts of a transformers model, computed by fused_experts: `experts_forward`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS, PreTrainedModel

from ..checks import fail
from ..fp8_layers import why_not
from ..fp8_training import Fp8Training
from ..function import fused_experts
from ..lora import LoRA
from ..quantized import QuantizedWeight
from .gates import gate_of
from .weights import NAME, first_name, unknown_storage, weight_of

if TYPE_CHECKING:
    from .weights import ExpertsModule

_warned: set[tuple[str, str]] = set()


def experts_forward(
    experts: ExpertsModule,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    compute: str = "fp8",
    fp8: bool = False,
    max_rows: int | None = None,
) -> Tensor:
    """Computes transformers' experts, in place of the forward of a class with `use_experts_implementation`.

    Args:
        experts: has the parameters gate_up_proj (E, 2F, D), or up_proj (E, F, D) without a gate, and
            down_proj (E, D, F); with biases also gate_up_proj_bias or up_proj_bias, and down_proj_bias. If
            `is_transposed`, the last two dimensions of the weights are swapped. Quantised weights are
            QuantizedWeights, never transposed, or parameters as a checkpoint has them.
        hidden_states: (T, D). Outside of autocast it is cast to the weights' dtype, as in transformers'
            grouped_mm. Beside quantised weights it keeps its dtype, and biases are cast to that.
        top_k_index: (T, K) int32 or int64. An index below 0, or of E or more, is treated as remote: its slot
            is not computed, adds nothing, and its weight gets a zero gradient.
        top_k_weights: (T, K) of any floating dtype.
        compute: as of `register`.
        fp8: float experts multiply e4m3 by e4m3, forward and backward, if they gain from it; of others a
            warning says why not. Quantised ones compute as without.

    Returns:
        (T, D) in hidden_states' dtype, differentiable in hidden_states, top_k_weights, PEFT's adapters and
        parameters that are not quantised; where experts compute in 8 bits, in none of them.

    Raises:
        TypeError: as `fused_moe.fused_experts`.
        ValueError: as `fused_moe.fused_experts`.

    Example:
        Needs transformers, which calls it: `register` names it "fused_moe".

        >>> y = experts_forward(mlp.experts, x, top_k_index, top_k_weights)  # doctest: +SKIP
    """
    settings = settings_of(experts)
    if isinstance(settings, str):
        return _their_forward(experts, settings)(experts, hidden_states, top_k_index, top_k_weights)
    first = first_name(experts)
    w1, w2 = (weight_of(experts, name, compute) for name in (first, "down_proj"))
    b1, b2 = (getattr(experts, f"{name}_bias") if experts.has_bias else None for name in (first, "down_proj"))
    is_quantized = isinstance(w1, QuantizedWeight)
    x = hidden_states
    if not torch.is_autocast_enabled(x.device.type):
        if not is_quantized:
            x = x.to(w1.dtype)
        elif b1 is not None and b2 is not None:
            b1, b2 = b1.to(x.dtype), b2.to(x.dtype)
    lora = _lora_of(experts, x, first)
    if fp8 and not is_quantized:
        reason: str | None = "they have adapters"
        if lora is None:
            reason = _why_not_fp8(experts, x, w2, top_k_index.size(1))
        if reason is None:
            settings = settings | {"fp8": _fp8_training()}
        else:
            warn_once(type(experts).__name__, f"does not compute {type(experts).__name__} in FP8: {reason}")
    compute_of_call = _compute_of_call(experts, w1, x, compute, lora)
    if is_quantized and not (compute_of_call == "codes" and torch.is_grad_enabled()):
        max_rows = None  # 8 bits take none, and the one operator that reads codes makes its own plan
    out = fused_experts(
        x,
        w1,
        w2,
        None,
        top_k_weights,
        top_k_index,
        b1=b1,
        b2=b2,
        transposed=experts.is_transposed and not is_quantized,
        compute=compute_of_call,
        max_rows=max_rows,
        lora=lora,
        **settings,
    )
    return out.to(hidden_states.dtype)


def _compute_of_call(
    experts: ExpertsModule, w1: Tensor | QuantizedWeight, x: Tensor, compute: str, lora: LoRA | None
) -> str | None:
    """None for what the weights say. In training quantised weights are computed so that there are gradients,
    and so they are on GPUs beside float32, which 8-bit kernels do not take. Nor do they take adapters."""
    if not isinstance(w1, QuantizedWeight) or w1.smooth is not None:
        return None
    is_wide = x.dtype == torch.float32 and x.is_cuda and not torch.is_autocast_enabled("cuda")
    wants_codes = compute == "codes" and hasattr(experts, "activation_scheme")  # not of quantize_experts
    return "codes" if wants_codes or experts.training or is_wide or lora is not None else None


ADAPTERS = "_fused_moe_adapters"  # {name: (a, b, scale)} of weights, in the experts while PEFT calls them


def _lora_of(experts: ExpertsModule, x: Tensor, first: str) -> LoRA | None:
    """The adapters of this call."""
    own = experts._modules.get("parametrizations", {})
    for name in (first, "down_proj"):
        if name in own and any(type(part).__module__.startswith("peft.") for part in own[name]):
            what = "finds PEFT's adapters added to the weights, which costs each weight's gradient: call "
            what += "register() before get_peft_model, without mixed=True or another package's class for LoRA"
            warn_once(type(experts).__name__, what)
    handed = vars(experts).get(ADAPTERS)
    if not handed:
        return None
    if getattr(experts, "_is_expert_parallel", False):
        fail(ValueError, "experts_forward", "no adapters of experts under expert parallelism", "PEFT's")
    handed["taken"] = True  # or PEFT's call raises
    (a1, b1, s1), (a2, b2, s2) = (handed.get(name, (None, None, None)) for name in (first, "down_proj"))
    if s1 is not None and s2 is not None and s1 != s2:
        b1, b2, s1, s2 = b1 * s1, b2 * s2, 1.0, 1.0
    # PEFT casts adapters of any dtype to the weight's. Ours may be float32 beside 16 bits.
    keeps = (x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32)
    a1, b1, a2, b2 = (t if t is None or t.dtype in keeps else t.to(x.dtype) for t in (a1, b1, a2, b2))
    return LoRA(a1, b1, a2, b2, scale=s2 if s1 is None else s1)


def _why_not_fp8(experts: ExpertsModule, x: Tensor, w2: Tensor | QuantizedWeight, top_k: int) -> str | None:
    """Why float experts compute in their own dtype where FP8 is asked for; None: they compute in FP8."""
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    takes = dtype == torch.bfloat16 or (dtype == torch.float32 and not x.is_cuda)
    if not takes or w2.dtype not in (dtype, torch.float32):
        return f"it takes bfloat16, and they have tokens of {dtype} and weights of {w2.dtype}"
    D, F = w2.shape[:0:-1] if experts.is_transposed else w2.shape[1:]
    return why_not(D, F, w2.size(0), top_k, has_bias=experts.has_bias)


# FSDP gathers a call's weights for it. Those look like any others, and modules of transformers do not see
# them set, as ours do. So in a process group no codes are kept from forward to backward, which makes those
# that it needs. Kept codes would only take memory: 2 bytes for each element of all layers' weights. Where
# weights are never freed, as with DistributedDataParallel, they are read once more.
_WHOLE, _GATHERED = Fp8Training(), Fp8Training()
_GATHERED.is_gathered = True


def _fp8_training() -> Fp8Training:
    dist = torch.distributed
    return _GATHERED if dist.is_available() and dist.is_initialized() else _WHOLE


def settings_of(experts: ExpertsModule) -> dict | str:
    """The layout and activation of these experts, or the name of the part that is not supported."""
    if getattr(experts, "has_post_expert_norm", False):  # newer than the other flags
        return "the norm after each expert"
    if isinstance(experts, FP8Experts) and (reason := unknown_storage(experts)):
        return reason
    return gate_of(experts)


# --- the implementation of models that are asked for none -------------------------------------------------

_THEIRS = PreTrainedModel.get_correct_experts_implementation


def _ours_for_none(model: PreTrainedModel, requested_experts: str | None) -> str:
    """In place of transformers' method, which a class whose default is another, such as eager, overrides."""
    if requested_experts is None and model._can_set_experts_implementation():
        requested_experts = NAME
    return _THEIRS(model, requested_experts)


def set_default(is_ours: bool) -> None:
    """As `default` of `register`."""
    now, other = (_THEIRS, _ours_for_none) if is_ours else (_ours_for_none, _THEIRS)
    if PreTrainedModel.get_correct_experts_implementation is now:  # and not another package's
        PreTrainedModel.get_correct_experts_implementation = other


# --- experts that we do not compute -----------------------------------------------------------------------


def _their_forward(experts: ExpertsModule, reason: str) -> Callable[..., Tensor]:
    """What transformers would run without us. From now on the configuration says so: generate() changes the
    experts of a model to batched_mm while it decodes, if the configuration has grouped_mm."""
    registry = ALL_FP8_EXPERTS_FUNCTIONS if isinstance(experts, FP8Experts) else ALL_EXPERTS_FUNCTIONS
    name = _their_choice(type(experts.config))
    if name not in registry or getattr(experts, "activation_scheme", None) == "static":
        name = "eager"  # the others refuse static scales of activations
    of = type(experts).__name__
    warn_once(of, f"does not compute {reason} of {of}, which runs {name}, as transformers would choose")
    if not torch.compiler.is_compiling():
        experts.config._experts_implementation_internal = name  # of its own, not of the configurations in it
    return registry.get_interface(name, _eager_forward(experts))


@torch.compiler.assume_constant_result
def _their_choice(config_class: type) -> str:
    """The implementation of a model with such a configuration that was asked for none. Only the model's class
    decides, but no module of experts knows it."""
    for model_class in _subclasses(PreTrainedModel):
        if model_class.config_class is config_class:
            choose = model_class.get_correct_experts_implementation
            choose = _THEIRS if choose is _ours_for_none else choose
            return choose(model_class.__new__(model_class), None)
    return "grouped_mm"


def _subclasses(parent: Any) -> Iterator[Any]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _eager_forward(experts: ExpertsModule) -> Callable[..., Tensor]:
    """The forward of the class itself. FP8Experts is decorated anew for each layer of a model."""
    forward = type(experts).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


@torch.compiler.assume_constant_result  # or a graph would break here
def warn_once(experts: str, what: str) -> None:
    """Warns once per class of experts: a model has dozens of such layers and calls each every step."""
    if (experts, what) not in _warned:
        _warned.add((experts, what))
        warnings.warn(f"fused_moe {what}", stacklevel=2)
