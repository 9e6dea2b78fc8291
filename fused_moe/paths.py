"""Which path a call takes, and why.

A call of a layer asks whether router and experts may be one call (`operands_to_join`), whether the combine
may add the shared experts (`why_added_after`), and whether its padded rows may stay as they are
(`keeps_padding`). Where router and experts are apart, and in `fused_experts`, `path_of_experts` chooses the
operators. `path` tells users all of it.

What is fused passes modules over, so a fused call is for modules that would compute the same if they were
called: of our classes, with the forward that we wrote, and without hooks. A function `why_...` returns what
is against the faster way, as the rest of a sentence with "since", or None.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .checks import DEVICES, check_on_meta, check_tokens, fail, is_autocast_enabled, is_mixed
from .finding import MoELayer
from .ops import is_recording
from .widths import are_padded

_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
FN = "FusedMoE"  # as its messages begin
PLAIN = (Tensor, nn.Parameter)
TRACED = (*PLAIN, FakeTensor, FunctionalTensor)  # with what stands for them while shapes or graphs are traced
OPTIONAL = {*PLAIN, type(None)}


class Path(Enum):
    """What computes the routed experts of a call; a value names the operators."""

    ROUTED = "experts: router, up and down projections in one operator, without gradients"
    ROUTED_NODE = "experts: router, up and down projections as one autograd node"
    ROUTED_UP = "router and experts_up as one autograd node, then experts_down"
    EXPERTS = "experts: up and down projections in one operator, without gradients"
    UP_DOWN = "experts_up, then experts_down"
    FP8 = "fp8_up, then fp8_down"
    EIGHT_BIT = "experts, by 8 bits, or by values where 8 bits do not pay or run"
    QUANTIZED = "experts of quantised weights: up and down projections in one operator, without gradients"
    COMPOSED = "permute, one GEMM after the other, unpermute"
    OTHER = "a forward that is not fused_moe's"


# An enum's attribute takes Python 3.11 a microsecond.
ROUTED, ROUTED_NODE, ROUTED_UP, EXPERTS, UP_DOWN, FP8, EIGHT_BIT, QUANTIZED, COMPOSED, OTHER = Path


class Choice(NamedTuple):
    """The path of a call, and what kept it from faster ones.

    Attributes:
        path: what computes the routed experts.
        reasons: sentences that say what kept the call from a faster path.
    """

    path: Path
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join((self.path.value, *self.reasons))


ModuleType = TypeVar("ModuleType", bound=type[nn.Module])


# --- modules ----------------------------------------------------------------------------------------------

# {place in a layer: (the class that fused calls stand for, the forward that we wrote)}: users may set another
STOCK: dict[str, tuple[type[nn.Module], Callable]] = {}
_LINEAR = nn.Linear.forward


def stock(place: str) -> Callable[[ModuleType], ModuleType]:
    """Says that fused calls compute what this class's forward does, in this place of a layer."""

    def register(cls: ModuleType) -> ModuleType:
        STOCK[place] = cls, cls.forward
        return cls

    return register


def why_altered(module: nn.Module) -> str | None:
    """How calling the module does more, or something else, than its class's forward."""
    if (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    ):
        return "has hooks"
    if module._compiled_call_impl:
        return "is compiled by itself"
    if "forward" in vars(module):
        return "has a forward of its own"
    return None


def why_changed(place: str, module: nn.Module | None) -> str | None:
    """How calling the module in this place may do something else than a fused call."""
    cls, forward = STOCK[place]
    if module is None or type(module) is not cls:
        return f"layer.{place} is a {type(module).__name__}"
    if cls.forward is not forward or cls.__call__ is not nn.Module.__call__:
        return f"{cls.__name__} has another forward than fused_moe's"
    if reason := why_altered(module):
        return f"layer.{place} {reason}"
    return None


def why_observed() -> str | None:
    """Which hooks are to be called for all modules. None while saved tensors are packed: checkpointing runs
    forward again, perhaps without such hooks (FlopCounterMode has some), and expects the same number of saved
    tensors. torch.compile calls no such hooks."""
    if torch.compiler.is_compiling():
        return None
    if _has_any_global_hook() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return "all modules have hooks"
    return None


def why_other_linear(linear: nn.Module) -> str | None:
    """Why calling a linear layer may compute something else than nn.Linear's GEMM, or do more."""
    cls = type(linear)
    if cls.forward not in (_LINEAR, STOCK["router.gate"][1]) or cls.__call__ is not nn.Module.__call__:
        return f"{cls.__name__} has another forward than nn.Linear's"
    if reason := why_altered(linear):
        return f"a linear layer {reason}"
    return why_observed()


def why_unfit(x: Tensor, linear: nn.Linear) -> str | None:
    """Why our operators do not take x and the parameters of a linear layer."""
    dtype, device = x.dtype, x.device
    keeps_dtype = getattr(linear, "router_dtype", None) is not None
    if type(x) not in TRACED or device.type not in DEVICES:
        return f"x is a {type(x).__name__} on {device}"
    for p in (linear.weight, linear.bias):
        if p is None:
            continue
        if type(p) not in TRACED or p.device != device:
            return f"a linear layer's parameter is a {type(p).__name__} on {p.device}"
        if p.dtype == dtype:
            continue
        if keeps_dtype:
            if not is_mixed(x, p):
                return f"a linear layer's parameter is {p.dtype}, and x {dtype}"
        elif torch.float64 in (dtype, p.dtype) or not is_autocast_enabled(x):
            return f"a linear layer's parameter is {p.dtype}, and x {dtype}"
    return None


def why_called(x: Tensor, *linears: nn.Linear | None) -> str | None:
    """Why linear layers have to be called on x, as our operators may compute something else."""
    for linear in linears:
        if linear is None:
            continue
        if reason := why_other_linear(linear):
            return reason
        if reason := why_unfit(x, linear):
            check_on_meta(FN, x, linear.weight, linear.bias)
            return reason
    return None


# --- a layer's call ---------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The parameters of a Router's gate, its expert_scale, and those of Experts."""

    gate: Tensor
    gate_bias: Tensor | None
    expert_scale: Tensor | None
    w1: Tensor
    w2: Tensor
    w3: Tensor | None
    b1: Tensor | None
    b2: Tensor | None
    b3: Tensor | None


def why_transformed() -> str | None:
    """What acts on operators before autograd does. Dispatch modes act after it."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the call"
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms the call"
    if torch._C._is_torch_function_mode_enabled():
        return "a TorchFunctionMode is on"
    if torch.jit.is_tracing():
        return "torch.jit traces the call"
    if forward_ad._current_level >= 0:
        return "forward-mode AD is on"
    return None


def operands_to_join(layer: MoELayer, x: Tensor) -> Operands | str:
    """The parameters of a layer whose router and experts may be one call on x (T, D), or why they may not."""
    if reason := why_transformed():
        return reason
    if torch.is_grad_enabled() and not x.requires_grad:
        return "x requires no gradient, so fusing them saves no addition of two gradients"
    if layer.latent_down is not None:
        return "the experts have a width of their own"
    modules: dict[str, Any] = layer._modules  # an attribute takes ten times as long
    router: Any = modules.get("router")
    experts: Any = modules.get("experts")
    if reason := why_changed("router", router) or why_changed("experts", experts):
        return reason
    gate = router._modules.get("gate")
    if reason := why_changed("router.gate", gate) or why_observed():
        return reason
    if experts.active_loras:
        return "the experts have adapters"
    if experts.fp8 is not None:
        return "the experts train in FP8"
    of_router = (*_members(gate, ("weight", "bias")), *_members(router, ("expert_scale",)))
    operands = Operands(*of_router, *_members(experts, Operands._fields[3:]))
    weight = operands.gate
    if type(x) not in PLAIN or not OPTIONAL.issuperset(map(type, operands)):
        return "x or a parameter is quantised, or of a subclass of Tensor"
    if x.dtype != weight.dtype and (gate.router_dtype is None or not is_mixed(x, weight)):
        return f"layer.router.gate is {weight.dtype}, and x {x.dtype}"
    if x.device != weight.device:
        return f"layer.router.gate is on {weight.device}, and x on {x.device}"
    if x.size(1) % 8 and are_padded(x, operands.w1, operands.w2, operands.w3):
        return "D is no multiple of 8, and is padded for the experts"
    return operands


CHECKPOINT = "torch.utils.checkpoint runs without reentrancy, and its policy may name operators"


def has_policy() -> bool:
    """Whether a selective checkpoint may run, in forward or while it runs forward again. Its policy may name
    the experts' operators, and it caches their results. Inside of it a plain checkpoint runs forward again
    without a mode, and expects the same saved tensors: so this is True under every checkpoint with hooks."""
    hooks = _top_saved_tensors_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(
        type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack()
    )


def _members(module: nn.Module, names: tuple[str, ...]) -> list:
    """The module's attributes of these names. Most are parameters, which nn.Module looks for last, in ten
    times the time."""
    parameters = module._parameters
    return [parameters[name] if name in parameters else getattr(module, name) for name in names]


def why_added_after(layer: MoELayer, x: Tensor) -> str | None:
    """Why the shared experts' output is added after the combine, with a rounding of its own. The combine adds
    it, in eager and compiled layers alike, only where nothing changes or observes either."""
    if layer.latent_down is not None:
        return "the experts have a width of their own"
    modules: dict[str, Any] = layer._modules
    shared = modules["shared_experts"]
    return (
        why_changed("experts", modules.get("experts"))
        or why_changed("shared_experts", shared)
        or why_called(x, shared.w1, shared.w2, shared.w3, layer.shared_expert_gate)
    )


def runs_shared(experts: Any) -> bool:
    """Whether experts run what is in their `beside` beside their exchange: those over several ranks. A
    wrapper, as checkpoints have, passes attributes on, so the type is asked."""
    return getattr(type(experts), "runs_shared", False) and not torch.compiler.is_compiling()


def keeps_padding(layer: MoELayer, x: Tensor, joined: Operands | str, combines: bool) -> bool:
    """Whether what padded rows of x hold stays in their rows of the logits: no gradient sums over tokens, and
    our operators alone read x. `combines` is whether the combine adds shared experts."""
    if is_recording() or layer.latent_down is not None:
        return False
    if layer.shared_experts is not None and not combines:
        return False
    if type(joined) is Operands:
        return True
    router = layer.router
    return not (
        why_changed("router", router)
        or why_changed("experts", layer.experts)
        or why_changed("router.gate", router.gate)
        or why_unfit(x, router.gate)
    )


# --- the experts' call ------------------------------------------------------------------------------------


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be needed. Inside of torch.func a tensor does not tell whether what it wraps
    requires one."""
    if not is_recording():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False


def path_of_experts(
    x: Tensor, weights: tuple, mode: str, trains_fp8: bool, is_composed: bool, lora, plan, records: bool
) -> tuple[Path, str | None]:
    """The path of experts of given scores, and why it is not one operator. `mode` is how quantised weights
    multiply, `is_composed` whether some are, or have adapters, `records` whether a gradient may be needed."""
    if trains_fp8:
        return FP8, None
    if mode != "codes":
        return EIGHT_BIT, None
    slower = COMPOSED if is_composed else UP_DOWN
    if lora is not None:
        return slower, "the experts have adapters"
    if records:
        return slower, "a gradient may be needed"
    if plan is not None:
        return slower, "a plan is given"
    if not is_composed:
        # Autocast would cast all weights before one operator, and keep the casts of both sides at a time.
        return (slower, "autocast is on") if is_autocast_enabled(x) else (EXPERTS, None)
    # In the check of a trace no scores require a gradient, as they may have in the trace.
    if torch.jit.is_tracing():
        return slower, "torch.jit traces the call"
    w1, w2, w3 = weights
    if isinstance(w1, Tensor) or isinstance(w2, Tensor) or isinstance(w3, Tensor):
        return slower, "some weights are not quantised"
    return QUANTIZED, None


# --- for users --------------------------------------------------------------------------------------------


def path(layer: MoELayer, x: Tensor) -> Choice:
    """Tells which path the call layer(x) takes: with the grad mode, autocast and hooks of now.

    Nothing is computed. In a compiled call router and experts are apart; else it chooses alike. Parameters
    that FSDP2 gathers for a call are seen as they are between calls; of a compiled layer, give the layer.

    Args:
        layer: a FusedMoE.
        x: (..., D), as the layer takes it.

    Returns:
        A `Choice`: `path`, what computes the routed experts, and `reasons`, sentences that say why router and
        experts, the experts' two sides, or combine and shared experts are not one, or why weights are copied.
        It prints as lines.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> with torch.no_grad():
        ...     print(fused_moe.path(moe, torch.randn(5, 8)))
        experts: router, up and down projections in one operator, without gradients
    """
    fn = "path"
    if not isinstance(layer, MoELayer):
        fail(TypeError, fn, "layer to be a FusedMoE", type(layer).__name__)
    check_tokens(fn, x, layer.dim)
    router, experts, shared = layer.router, layer.experts, layer.shared_experts
    after = None if shared is None else why_added_after(layer, x)
    added: tuple[str, ...] = (
        () if after is None else (f"shared experts are added after the combine, since {after}",)
    )
    apart = operands_to_join(layer, x)
    if isinstance(apart, Operands):
        added += _copied(experts.weights, x)
        if torch.is_grad_enabled() and has_policy():
            return Choice(ROUTED_UP, (f"the experts are several operators, since {CHECKPOINT}", *added))
        return Choice(ROUTED_NODE if torch.is_grad_enabled() else ROUTED, added)
    reasons: tuple[str, ...] = (f"router and experts are apart, since {apart}",)
    if type(experts).forward is not STOCK["experts"][1] or "forward" in vars(experts):
        changed = why_changed("experts", experts)
        return Choice(OTHER, (f"the experts are not fused_moe's, since {changed}", *added))
    weights, combined = experts.weights, () if added else (shared, layer.shared_expert_gate)
    modes = {w.compute for w in weights if w is not None and not isinstance(w, Tensor)}
    loras = experts.active_loras or None
    is_composed = bool(modes) or loras is not None
    read = [m for m in (layer.latent_down, router, experts, *combined) if m is not None]
    records = needs_grad(x, *(p for m in read for p in m.parameters()))
    mode = modes.pop() if modes else "codes"
    how = (mode, experts.fp8 is not None, is_composed, loras, None, records)
    chosen, several = path_of_experts(x, weights, *how)
    if several is not None:
        reasons += (f"the experts are several operators, since {several}",)
    copied = () if chosen is FP8 else _copied(weights, x)  # which quantises weights as they are
    return Choice(chosen, reasons + added + copied)


def _copied(weights: tuple, x: Tensor) -> tuple[str, ...]:
    if not all(w is None or isinstance(w, Tensor) for w in weights) or not are_padded(x, *weights):
        return ()
    why = "D or F is no multiple of 8, or one is not aligned to 16 bytes"
    return (f"weights are copied in each call, since {why}",)
