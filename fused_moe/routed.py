"""The router and the experts as one call, where nothing may change or observe the calls between
(`paths.operands_to_join`).

With gradients router and up side are one autograd node, which spares backward an addition. As nodes of their
own each of them writes a gradient of x (T, D), and autograd reads both to write their sum. Here router_dgrad
adds the router's to the experts' in place, with the same roundings. Without gradients all is one operator,
which spares the host two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import function, widths
from .checks import (
    check_activation,
    check_experts,
    check_main_grads,
    check_router,
)
from .main_grad import operands_of
from .ops import (
    ACTIVATION_CODES,
    SCORE_FUNCS,
    infer,
    ops,
    route_gradients,
    route_plan,
    router_gradients,
    run,
    up_gradients,
)
from .paths import Operands
from .plan import Plan


class _Needs(NamedTuple):
    """Whether the gradient of each input is needed."""

    x: bool
    w1: bool
    w3: bool
    gate: bool
    gate_bias: bool
    expert_scale: bool
    b1: bool
    b3: bool


class _RoutedUp(torch.autograd.Function):
    """x -> h, a, scores, ids, logits and the plan. h, scores and logits have gradients."""

    @staticmethod
    def forward(
        ctx, x, w1, w3, gate, gate_bias, expert_scale, b1, b3, expert_bias, top_k, routing, settings,
        main_grads,
    ):  # fmt: skip
        logits = function.router_logits(x, gate, gate_bias)
        scale = None if expert_scale is None else expert_scale.to(logits.dtype)
        scores, ids = function.route(logits, top_k, bias=expert_bias, expert_scale=scale, **routing)
        plan = route_plan(ids, gate.size(0))
        h, a = run(
            ops.experts_up.default, x, w1, w3, b1, b3, None, plan.tensors, *settings, True, *main_grads
        )
        names = ("route_norm", "route_scale", "route_norm_eps")
        ctx.routing = (SCORE_FUNCS[routing["score_func"]], *(routing[name] for name in names))
        ctx.scale_dtype = None if scale is None else expert_scale.dtype
        ctx.layout, ctx.main_grads = settings[0], main_grads or (None, None)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(a, ids, *plan)
        ctx.save_for_backward(x, gate, scale, *widths.saved(ctx, w1, w3), logits, ids, *plan.tensors)
        return h, a, scores, ids, logits, *plan

    @staticmethod
    def backward(ctx, dh, _a, dscores, _ids, dlogits, *_plan):
        x, gate, scale, w1, w3, logits, ids, *plan = ctx.saved_tensors
        need = _Needs(*ctx.needs_input_grad[: len(_Needs._fields)])
        grads, of_router = {}, ()
        if dscores is not None:
            route = (dscores, logits, ids, ctx.routing, scale)
            of_scores, dscale = route_gradients(*route, True, need.expert_scale)
            dlogits = of_scores if dlogits is None else dlogits + of_scores
            if dscale is not None:
                grads["expert_scale"] = dscale.to(ctx.scale_dtype)
        if dlogits is not None:
            of_router = (dlogits.to(x.dtype), gate.to(x.dtype))
            needs = (need.x and dh is None, need.gate, need.gate_bias)
            dx, dgate, dbias = router_gradients(dlogits, *of_router, x, gate, *needs)
            grads |= {"x": dx, "gate": dgate, "gate_bias": dbias}
        if dh is not None:
            up = (dh, x, *widths.restored(ctx, w1, w3), None, plan)
            grads |= up_gradients(ctx, need, False, *up, *of_router)
        return *(grads.get(name) for name in _Needs._fields), *[None] * 5


def routed_experts(
    x: Tensor,
    operands: Operands,
    router: nn.Module,
    experts: nn.Module,
    expert_bias: Tensor | None,
    shared: tuple[Tensor | None, Tensor | None] = (None, None),
    **given: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What Router and Experts of these operands compute of x (T, D): out (T, D), counts (E,), ids (T, K),
    logits (T, E). `shared` are what `fused_experts` takes as shared and shared_gate, `given` the router's ids
    and num_tokens."""
    fn, (gate, gate_bias, expert_scale, w1, w2, w3, b1, b2, b3) = "fused_experts", operands
    # `function.experts_and_counts` checks what it shares with this in the same order.
    check_activation(fn, experts.activation, experts.alpha, experts.limit)
    *_, layout = check_experts(fn, "x", x, w1, w2, w3, b1, b2, b3, "separate", False)
    main_up, main_down = check_main_grads(fn, experts.main_grads, "x", x, (w1, w2, w3), False)
    if main_up or main_down:
        w1, w2, w3 = operands_of((w1, w2, w3), (w1, w2, w3), experts.main_grads)
    (w1, w2, w3), (b1, b2, b3) = _padded(x, (w1, w2, w3), (b1, b2, b3), layout)
    settings = (layout, ACTIVATION_CODES[experts.activation], [experts.alpha, experts.limit])
    up = (w1, w3, gate, gate_bias, expert_scale, b1, b3, expert_bias)
    how = (router.top_k, router.routing | given, settings, main_up)
    h, a, scores, ids, logits, *plan = _RoutedUp.apply(x, *up, *how)
    plan = Plan(*plan)
    down = (a, h, w2, b2, scores, plan.tensors, *settings, *(main_down or (None,)), *shared)
    return run(ops.experts_down.default, *down), plan.counts, ids, logits


def _padded(x: Tensor, weights: tuple, biases: tuple, layout: int) -> tuple[tuple, tuple]:
    """Weights and biases, padded where F has to be; D has not to be (`paths.operands_to_join`)."""
    if not widths.are_padded(x, *weights):
        return weights, biases
    return widths.padded(x, weights, biases, None, None, layout)[1:3]


def routed_experts_without_gradients(
    x: Tensor,
    operands: Operands,
    router: nn.Module,
    experts: nn.Module,
    expert_bias: Tensor | None,
    shared: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    ids: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """routed_experts by one operator."""
    gate, gate_bias, expert_scale, w1, w2, w3, b1, b2, b3 = operands
    fn = "fused_experts"
    check_router("router_logits", x, gate, gate_bias)
    given = {"expert_scale": expert_scale, "ids": ids, "num_tokens": num_tokens}
    bias, routing, *given = function.check_route(
        "x", x, gate.size(0), router.top_k, expert_bias, **router.routing, **given
    )
    # as in routed_experts
    check_activation(fn, experts.activation, experts.alpha, experts.limit)
    *_, layout = check_experts(fn, "x", x, w1, w2, w3, b1, b2, b3, "separate", False)
    top_k, score_func, route_norm, route_scale, route_norm_eps, *groups = routing
    ids, num_tokens, expert_scale = given
    of_router = (gate, gate_bias, bias, expert_scale, num_tokens, [top_k, score_func, route_norm, *groups])
    constants = [experts.alpha, experts.limit, route_scale, route_norm_eps]
    settings = (layout, ACTIVATION_CODES[experts.activation], constants)
    (w1, w2, w3), biases = _padded(x, (w1, w2, w3), (b1, b2, b3), layout)
    weights = ([w1], [w2], [] if w3 is None else [w3])
    out, counts, routed = infer(x, weights, biases, None, ids, settings, shared=shared, router=of_router)
    return out, counts, *routed
