"""What the adapters of all torchtitan releases share: its router's settings, and experts on its weights.

Letters: T tokens, D model width, F expert hidden width, E experts, K experts per token, R rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import function
from ..checks import DEVICES, fail, is_mixed
from ..exact import exchanged_experts
from ..exchange import Ranks
from ..expert_bias import check_expert_bias
from ..fp8 import WIDE, width_pays
from ..fp8_training import Fp8Training
from ..gate import Gate
from ..ops import BLOCK, ops, route_plan
from ..paths import why_other_linear
from ..plan import Plan
from ..replay import FINDERS, tape_of

# The operators that selective checkpointing saves. The routing is small, and must not change in
# recomputation. Only experts_down of the experts' two operators is saved, as torchtitan saves every second
# mm: that avoids a third of the recomputation, whereas h and a of experts_up are the bulk of a layer's
# activations. fp8_down is the same operator of experts that train in FP8.
SAVED_OPS = frozenset(
    op.default for op in (ops.route, ops.route_plan, ops.count_plan, ops.experts_down, ops.fp8_down)
)


class Routing(NamedTuple):
    """Which experts compute which token, as one keyword argument for torchtitan's modules and hooks."""

    scores: Tensor  # (T, K) float32
    ids: Tensor  # (T, K)
    plan: Plan | None = None  # of ids, if it has been computed already
    score_on: str = "output"

    @property
    def rows(self) -> tuple[Plan, Tensor]:
        """The plan and the slot of each row, of a routing that `choose` made."""
        assert self.plan is not None and self.plan.row_slot is not None
        return self.plan, self.plan.row_slot


class Exchanged:
    """What experts get in place of counts when they exchange tokens with the ranks of `mesh`. The output of
    `shared` is added to theirs. FSDP's mixed precision finds no tensor to cast in a class of its own."""

    def __init__(self, routing: Routing, mesh: DeviceMesh, shared: Callable[[], Tensor] | None):
        self.routing, self.mesh, self.shared = routing, mesh, shared


def logits_of(gate: Any, x: Tensor) -> Tensor:
    """The logits of x (..., D), by our operator and in float32 where the gate is a linear layer that nothing
    has altered. torchtitan scores logits in float32, so this only spares them a rounding."""
    return gate(x) if why_other_linear(gate) else Gate.forward(gate, x)


def float32_logits(gate: Any, x: Tensor) -> Tensor:
    """The logits that torchtitan computes with operands cast to float32. Our operator takes a 16-bit x beside
    float32 parameters without a cast."""
    is_wide = all(type(p) is nn.Parameter and is_mixed(x, p) for p in gate.parameters())
    if is_wide and type(x) is Tensor and x.device.type in DEVICES and not why_other_linear(gate):
        with torch.autocast(x.device.type, enabled=False):
            logits = function.router_logits(x.reshape(-1, x.size(-1)), gate.weight, gate.bias)
        return logits.view(*x.shape[:-1], logits.size(-1))
    with torch.autocast(x.device.type, dtype=torch.float32):
        return logits_of(gate, x)


def choose(layer: Any, logits: Tensor, expert_bias: Tensor | None, score_on: str = "output") -> Routing:
    """The routing of logits (T, E) by the attributes of the layer's TokenChoiceTopKRouter, and its plan.
    Within `replay_routing` the ids are those of the routes."""
    check_expert_bias("fused_moe.torchtitan", expert_bias)
    router, tape = layer.router, tape_of(layer)
    ids = None if tape is None else tape.take(logits, router.top_k)
    scores, ids = function.route(
        logits,
        router.top_k,
        score_func=router.score_func,
        bias=expert_bias,
        route_norm=router.route_norm,
        route_scale=router.route_scale,
        num_expert_groups=getattr(router, "num_expert_groups", None),  # since 0.2.1
        num_limited_groups=getattr(router, "num_limited_groups", None),
        ids=ids,
    )
    if tape is not None:
        tape.note(ids)
    return Routing(scores, ids, route_plan(ids, logits.size(1)), score_on)


def find_layers(ours: type[Any], theirs: type) -> None:
    """Lets `record_routing` and `replay_routing` find the layers of a class of ours, in place of theirs."""

    def sizes_of(module: nn.Module) -> tuple[int, int] | None:
        if isinstance(module, ours):
            return module.router.num_experts, module.router.top_k
        if isinstance(module, theirs):
            _refuse(f"a {type(module).__name__} that is torchtitan's own")
        return None

    FINDERS.append(sizes_of)


def check_no_tape(layer: nn.Module) -> None:
    """Raises in a recording or a replay of a layer whose router cannot take part."""
    if tape_of(layer) is not None:
        _refuse("a call that torchtitan's own routes")


def _refuse(found: str) -> None:
    expected = "MoE layers whose router is fused_moe's"
    fail(RuntimeError, "record_routing, replay_routing", expected, found)


def changes_nothing(cls: type, base: type) -> bool:
    """Whether a class derived from base defines no method or attribute apart from how it is built."""
    if not issubclass(cls, base):
        return False
    derived = cls.__mro__[: cls.__mro__.index(base)]
    defined = {name for c in derived for name in vars(c) if not name.startswith("__")}
    return defined <= {"Config", "_abc_impl"} and cls.__call__ is base.__call__


def warn(what: str, reason: str) -> None:
    """Says once for each reason what is not replaced: a model has dozens of equal layers."""
    warnings.warn(f"fused_moe: torchtitan computes {what}, since {reason}", stacklevel=2)


def warn_of_16_bits(reason: str) -> None:
    """Says once for each reason which experts do not train in FP8 in a model that asks for it."""
    warnings.warn(f"fused_moe: experts are not trained in FP8, since {reason}", stacklevel=2)


# In a compiled graph the warning would break it.
@torch.compiler.assume_constant_result
def _warn_of_width(width: int) -> None:
    needed = f"FP8 needs {WIDE} and a multiple of {BLOCK} on each rank"
    warn_of_16_bits(f"{needed}, and tensor parallelism leaves F={width}")


def routed_rows(x: Tensor, routing: Routing) -> Tensor:
    """The rows for a dispatcher to send to the experts: x (T, D) -> (T * K, D), grouped by expert."""
    plan, row_slot = routing.rows
    rows = ops.permute(x, plan.tensors)
    if routing.score_on == "output":
        return rows
    scores = routing.scores.flatten().index_select(0, row_slot)
    return (rows.float() * scores[:, None]).to(x.dtype)


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """Sums every token's rows, which a dispatcher has sent back: (T * K, D) -> (T, D)."""
    plan, row_slot = routing.rows
    # For torch.compile, to which the length that the exchange returns is data-dependent.
    torch._check(rows.size(0) == row_slot.size(0))
    return function.unpermute(rows, plan, routing.scores if routing.score_on == "output" else None)


def swiglu(w1: Tensor, w2: Tensor, w3: Tensor) -> dict:
    """The experts of most models, as keyword arguments of our functions: gate w1 (E, F, D), down w2
    (E, D, F), up w3 (E, F, D)."""
    return {"w1": w1, "w2": w2, "w3": w3}


def gpt_oss(weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, limit: float, tp: int) -> dict:
    """gpt-oss's experts likewise: gate and up in turn in weight1 (E, 2F, D) and bias1 (E, 2F), down weight2
    (E, D, F) and bias2 (E, D).

    Over `tp` ranks of tensor parallelism each rank's output is one of tp summands, and bias2 is replicated.
    So each rank adds its part of bias2, whose gradient is not divided, as in torchtitan.
    """
    bias2 = _local(bias2)
    if tp > 1:
        value = bias2.detach()
        bias2 = value / tp + (bias2 - value)
    how = {"activation": "swiglu_clamped", "limit": limit, "layout": "interleaved"}
    return {"w1": weight1, "b1": bias1, "w2": weight2, "b2": bias2, "w3": None, **how}


def mesh_size(t: Tensor, dim: str) -> int:
    """The size of this dimension of a DTensor's mesh; 1 for a mesh without it, and for other tensors."""
    if not isinstance(t, DTensor):
        return 1
    names = t.device_mesh.mesh_dim_names or ()
    return t.device_mesh.size(names.index(dim)) if dim in names else 1


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def run_experts(
    x: Tensor,
    experts: dict,
    counts: Tensor | Exchanged,
    routing: Routing | None,
    *,
    dtype: torch.dtype | None,
    fp8: Fp8Training | None = None,
    max_rows: int | None = None,
) -> Tensor:
    """The experts of this rank, on tokens or on rows from a dispatcher.

    Args:
        x: with a routing or Exchanged (T, D), else (R, D) grouped by expert; rows past counts.sum() may be
            garbage.
        experts: from `swiglu` or `gpt_oss`, of tensors that are local or DTensors, of any floating dtype.
        counts: (E,) of any integer dtype, ignored with a routing; or Exchanged, where a mesh of ranks has the
            experts.
        dtype: of the GEMMs; None: x's, or autocast's.
        fp8: how the experts train in FP8; None: in `dtype`.
        max_rows: as that of `fused_experts`, with a routing without a plan.

    Returns:
        The shape and dtype of x.
    """
    rows = x if dtype is None else x.to(dtype)
    if isinstance(counts, Exchanged):
        return _exchanged(rows, experts, counts, {"dtype": dtype, "fp8": fp8}).to(x.dtype)
    experts = {
        name: _local(value).to(dtype or value.dtype) if isinstance(value, Tensor) else value
        for name, value in experts.items()
    }
    if fp8 is not None:
        width = experts["w2"].size(-1)  # this rank's part of F, which tensor parallelism divides
        if width_pays(width):
            experts |= {"fp8": fp8, "fp8_wgrad": fp8.wgrad}
        else:
            _warn_of_width(width)
    if routing is None:
        out = function.grouped_mlp(rows, counts=counts, **experts)
    else:
        scores, ids, plan, score_on = routing
        experts |= {"scores": scores, "ids": ids}
        out = function.fused_experts(rows, plan=plan, score_on=score_on, max_rows=max_rows, **experts)
    return out.to(x.dtype)


def _exchanged(x: Tensor, experts: dict, tokens: Exchanged, how: dict) -> Tensor:
    scores, ids, plan, score_on = tokens.routing
    assert plan is not None
    counts = plan.counts

    def run(rows: Tensor, scores: Tensor, ids: Tensor, max_rows: int | None) -> Tensor:
        routing = Routing(scores, ids, score_on=score_on)
        return run_experts(rows, experts, counts, routing, max_rows=max_rows, **how)

    ranks = Ranks(tokens.mesh.get_group(), counts.size(0), by_slot=False)
    return exchanged_experts(ranks, x, scores, ids, plan, lambda: run, tokens.shared)
