"""What the adapters of all torchtitan releases share: its router's settings, and experts on its weights.

Letters: T tokens, D model width, F expert hidden width, E experts, K experts per token, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import function
from ..expert_bias import check_expert_bias
from ..gate import Gate
from ..ops import ops, route_plan
from ..plan import Plan
from ..routed import is_plain_linear

# The operators that selective checkpointing saves. The routing is small, and must not change in
# recomputation. Only experts_down of the experts' two operators is saved, as torchtitan saves every second
# mm: that avoids a third of the recomputation, whereas h and a of experts_up are the bulk of a layer's
# activations.
SAVED_OPS = frozenset(op.default for op in (ops.route, ops.route_plan, ops.count_plan, ops.experts_down))


class Routing(NamedTuple):
    """Which experts compute which token, as one keyword argument for torchtitan's modules and hooks."""

    scores: Tensor  # (T, K) float32
    ids: Tensor  # (T, K)
    plan: Plan | None = None  # of ids, if it has been computed already
    score_on: str = "output"


def logits_of(gate: nn.Module, x: Tensor) -> Tensor:
    """The logits of x (..., D), by our operator and in float32 where the gate is a linear layer that nothing
    has altered. torchtitan scores logits in float32, so this only spares them a rounding."""
    return Gate.forward(gate, x) if is_plain_linear(gate) else gate(x)


def choose(
    router: nn.Module, logits: Tensor, expert_bias: Tensor | None, score_on: str = "output"
) -> Routing:
    """The routing of logits (T, E) by the attributes of torchtitan's TokenChoiceTopKRouter, and its plan."""
    check_expert_bias("fused_moe.torchtitan", expert_bias)
    scores, ids = function.route(
        logits,
        router.top_k,
        score_func=router.score_func,
        bias=expert_bias,
        route_norm=router.route_norm,
        route_scale=router.route_scale,
        num_expert_groups=getattr(router, "num_expert_groups", None),  # since 0.2.1
        num_limited_groups=getattr(router, "num_limited_groups", None),
    )
    return Routing(scores, ids, route_plan(ids, logits.size(1)), score_on)


def routed_rows(x: Tensor, routing: Routing) -> Tensor:
    """The rows for a dispatcher to send to the experts: x (T, D) -> (T * K, D), grouped by expert."""
    plan = routing.plan
    rows = ops.permute(x, plan.tensors)
    if routing.score_on == "output":
        return rows
    scores = routing.scores.flatten().index_select(0, plan.row_slot)
    return (rows.float() * scores[:, None]).to(x.dtype)


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """Sums every token's rows, which a dispatcher has sent back: (T * K, D) -> (T, D)."""
    plan = routing.plan
    # For torch.compile, to which the length that the exchange returns is data-dependent.
    torch._check(rows.size(0) == plan.row_slot.size(0))
    return function.unpermute(rows, plan, routing.scores if routing.score_on == "output" else None)


def run_experts(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    counts: Tensor,
    routing: Routing | None,
    *,
    dtype: torch.dtype | None,
) -> Tensor:
    """The experts of this rank, on tokens or on rows from a dispatcher.

    Args:
        x: with a routing (T, D), without (R, D) grouped by expert; rows past counts.sum() may be garbage.
        weights: gate (E, F, D), down (E, D, F), up (E, F, D), local or DTensor, of any floating dtype.
        counts: (E,) of any integer dtype; ignored with a routing.
        dtype: of the GEMMs; None: x's, or autocast's.

    Returns:
        The shape and dtype of x.
    """
    w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
    rows = x
    if dtype is not None:
        rows, w1, w2, w3 = (t.to(dtype) for t in (rows, w1, w2, w3))
    if routing is None:
        out = function.grouped_mlp(rows, w1, w2, w3, counts)
    else:
        scores, ids, plan, score_on = routing
        out = function.fused_experts(rows, w1, w2, w3, scores, ids, plan=plan, score_on=score_on)
    return out.to(x.dtype)
