"""The router and the experts as one call, where nothing may change or observe the calls between
(`paths.operands_to_join`).

Both are one operator. With gradients it keeps what backward reads, and is one autograd node. Each node costs
the host time. Router and up side as nodes of their own would each write a gradient of x (T, D), and autograd
would read both to write their sum. Here router_dgrad adds the router's to the experts' in place, with the
same roundings.

A selective checkpoint's policy names operators. Under checkpoints router and up side are one node, and the
down side is another (`paths.has_policy`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import function, widths
from .checks import (
    check_activation,
    check_experts,
    check_main_grads,
    check_router,
)
from .main_grad import compiled_autograd_key, less_unasked, operands_of
from .ops import (
    ACTIVATION_CODES,
    down_gradients,
    infer,
    ops,
    parameter_gradients,
    route_gradients,
    route_plan,
    router_gradients,
    run,
    scale_gradient,
    shared_gradients,
    undifferentiable,
    up_gradients,
)
from .paths import Operands, has_policy
from .plan import Plan

if TYPE_CHECKING:
    from .module import Experts, Router


class _Call(NamedTuple):
    """What both nodes take beside differentiable tensors."""

    expert_bias: Tensor | None
    ids: Tensor | None
    num_tokens: Tensor | None
    settings: tuple  # layout, activation and constants of the operator `experts`, which has a router
    routing: list  # of the same
    main_up: tuple  # main_grads of w1 and w3, or empty
    main_down: tuple  # that of w2, or empty


# --- one node -----------------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """Whether the gradient of each input is needed."""

    x: bool
    w1: bool
    w3: bool
    w2: bool
    gate: bool
    gate_bias: bool
    expert_scale: bool
    b1: bool
    b3: bool
    b2: bool
    shared: bool
    shared_gate: bool


_NUM_INPUTS = len(_Needs._fields)


class _Routed(torch.autograd.Function):
    """x -> out, counts, ids, logits. out and logits have gradients."""

    _compiled_autograd_key = staticmethod(compiled_autograd_key)

    @staticmethod
    def forward(
        ctx, x, w1, w3, w2, gate, gate_bias, expert_scale, b1, b3, b2, shared, shared_gate, call: _Call
    ):  # fmt: skip
        expert_bias, ids, num_tokens, settings, routing, main_up, main_down = call
        weights = ([w1], [w2], [] if w3 is None else [w3])
        router = (gate, gate_bias, expert_bias, expert_scale, num_tokens, routing)
        out, counts, (ids, logits, scores, h, packed) = infer(
            x, weights, (b1, b2, b3), None, ids, settings, shared=(shared, shared_gate), router=router,
            keeps=True,
        )  # fmt: skip
        ctx.settings, ctx.routing = settings, routing
        ctx.main_grads = None
        if main_up or main_down:
            ctx.main_grads = (*(main_up or (None, None)), *(main_down or (None,)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(counts, ids)
        if shared is not None:
            need = _Needs(*ctx.needs_input_grad[:_NUM_INPUTS])
            shared = shared if need.shared_gate else None
            shared_gate = shared_gate if need.shared or need.shared_gate else None
        operands = widths.saved(ctx, w1, w3, w2)
        ctx.save_for_backward(
            x, *operands, gate, expert_scale, b2, shared, shared_gate, ids, logits, scores, h, packed
        )
        return out, counts, ids, logits

    @staticmethod
    def backward(ctx, dout, _counts, _ids, dlogits):
        x, w1, w3, w2, gate, expert_scale, b2, shared, shared_gate, ids, logits, scores, h, packed = (
            ctx.saved_tensors
        )
        need = _Needs(*ctx.needs_input_grad[:_NUM_INPUTS])
        of_router = (x, gate, logits, ids, expert_scale)
        is_compiling = torch.compiler.is_compiling()  # by compiled autograd
        if dout is None and is_compiling:  # which takes no undefined gradient of an input
            dout = torch.zeros_like(x)
        if dout is None:
            dx, dgate, dgate_bias, _, _ = _router_gradients(ctx, need, need.x, None, dlogits, *of_router)
            return dx, None, None, None, dgate, dgate_bias, *[None] * 7
        of_shared = {}
        if need.shared or need.shared_gate:
            of_shared = shared_gradients(need, dout, shared, shared_gate)
        main_grads, plan = ctx.main_grads, [packed, ids]
        if dlogits is None and main_grads is None and h.numel() * h.itemsize <= MOST_BYTES:
            w1, w3, w2 = widths.restored(ctx, w1, w3, w2)
            needs = [need.w1, need.w3, need.w2, need.b1, need.b3, need.b2, need.expert_scale]
            operands = (dout, x, w1, w3, w2, gate, h, scores, logits, plan)
            grads = run(_BACKWARD, *operands, *ctx.settings, ctx.routing, needs, b2, expert_scale)
            dx, dlogits, *grads = grads
            rounded = grads.pop(0) if dlogits.dtype != x.dtype else dlogits
            dgate, dgate_bias = parameter_gradients(dlogits, rounded, x, gate, need.gate, need.gate_bias)
            grads = iter(grads)
            dw1, dw3, dw2, db1, db3, db2, dscores = [next(grads) if wanted else None for wanted in needs]
            dscale = None if dscores is None else scale_gradient(dscores, logits, ids, _of_route(ctx))
        else:
            # Both sides' backward apart: h is freed between them, unless the graph is kept.
            h, scores = undifferentiable("experts_down_backward", (h, scores), logits)
            layout, activation, constants = ctx.settings
            main1, main3, main2 = main_grads or (None, None, None)
            if main_grads is not None:
                places = {"w1": 1, "w3": 2, "w2": 2 if w3 is None else 3}  # among the tensors of the inputs
                accumulate = [n for n, grad in zip(places, main_grads, strict=True) if grad is not None]
                need = less_unasked(ctx, need, **{name: places[name] for name in accumulate})
            (w2,) = widths.restored(ctx, w2, first=2)
            how = (layout, activation, constants[:2], True, need.w2, need.b2, True)
            dh, dw2, db2, dscores = down_gradients((dout, h, w2, b2, scores, plan, *how), main2)
            del h, w2
            if not is_compiling:
                ctx.maybe_clear_saved_tensors()
            dx, dgate, dgate_bias, dscale, rounded = _router_gradients(
                ctx, need, False, dscores, dlogits, *of_router
            )
            w1, w3 = widths.restored(ctx, w1, w3)
            how = (layout, True, need.w1, need.w3, need.b1, need.b3, False)
            args = (dh, x, w1, w3, None, plan, *how)
            dx, dw1, dw3, db1, db3, _ = up_gradients(args, (main1, main3), *rounded)
            dw1 = dw1 if need.w1 and main1 is None else None
            dw3 = dw3 if need.w3 and main3 is None else None
            dw2 = dw2 if need.w2 and main2 is None else None
            db1, db3, db2 = db1 if need.b1 else None, db3 if need.b3 else None, db2 if need.b2 else None
        of_experts, of_shared = (db1, db3, db2), (of_shared.get("shared"), of_shared.get("shared_gate"))
        return dx, dw1, dw3, dw2, dgate, dgate_bias, dscale, *of_experts, *of_shared, None


# With an h of at most this size backward is one operator, since the host may take longer than the GPU. On an
# H200 that saves up to 12% of a step with 16 MiB, and little with 32 MiB or more. A larger h is freed between
# the backward operators of both sides.
MOST_BYTES = 32 << 20
_BACKWARD = ops.experts_backward.default
# Function.apply itself takes more time: it looks for what torch.func needs.
_apply = super(torch.autograd.Function, _Routed).apply


def _of_route(ctx) -> tuple:
    """The arguments of route from score_func to route_norm_eps."""
    (_, _, constants), (_, score_func, route_norm, *_) = ctx.settings, ctx.routing
    return score_func, route_norm, *constants[2:]


def _router_gradients(
    ctx, need, need_dx: bool, dscores, dlogits, x, gate, logits, ids, expert_scale
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, tuple]:
    """dx, dgate, dgate_bias and dexpert_scale, each None if it is not needed; and dlogits and gate in x's
    dtype, or nothing, if logits have no gradient."""
    dscale = None
    if dscores is not None:
        route = (dscores, logits, ids, _of_route(ctx), expert_scale)
        of_scores, dscale = route_gradients(*route, True, need.expert_scale)
        dlogits = of_scores if dlogits is None else dlogits + of_scores
    if dlogits is None:
        return None, None, None, dscale, ()
    rounded = (dlogits.to(x.dtype), gate.to(x.dtype))
    needs = (need_dx, need.gate, need.gate_bias)
    return *router_gradients(dlogits, *rounded, x, gate, *needs), dscale, rounded


# --- two nodes ----------------------------------------------------------------------------------------


class _NeedsOfUp(NamedTuple):
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

    _compiled_autograd_key = staticmethod(compiled_autograd_key)

    @staticmethod
    def forward(ctx, x, w1, w3, gate, gate_bias, expert_scale, b1, b3, call: _Call):
        logits = run(ops.router_logits.default, x, gate, gate_bias)
        given = (call.ids, call.num_tokens, expert_scale)
        top_k, score_func, route_norm, *groups = call.routing
        layout, activation, (*constants, route_scale, route_norm_eps) = call.settings
        how = (top_k, score_func, route_norm, route_scale, route_norm_eps, *groups)
        scores, ids = run(ops.route.default, logits, call.expert_bias, *how, *given)
        plan = route_plan(ids, gate.size(0))
        operands = (x, w1, w3, b1, b3, None, plan.tensors, layout, activation, constants)
        h, a = run(ops.experts_up.default, *operands, True, *call.main_up)
        ctx.settings, ctx.routing, ctx.main_grads = call.settings, call.routing, call.main_up
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(a, ids, *plan)
        weights = widths.saved(ctx, w1, w3)
        ctx.save_for_backward(x, gate, expert_scale, *weights, logits, ids, *plan.tensors)
        return h, a, scores, ids, logits, *plan

    @staticmethod
    def backward(ctx, dh, _a, dscores, _ids, dlogits, *_plan):
        x, gate, expert_scale, w1, w3, logits, ids, *plan = ctx.saved_tensors
        need = _NeedsOfUp(*ctx.needs_input_grad[: len(_NeedsOfUp._fields)])
        of_router = (dscores, dlogits, x, gate, logits, ids, expert_scale)
        dx, dgate, dgate_bias, dscale, rounded = _router_gradients(
            ctx, need, need.x and dh is None, *of_router
        )
        if dh is None:
            return dx, None, None, dgate, dgate_bias, dscale, None, None, None
        main1, main3 = ctx.main_grads or (None, None)
        if not main1 is main3 is None:
            need = less_unasked(ctx, need, w1=1, w3=2)
        needs = (need.x, need.w1, need.w3, need.b1, need.b3, False)
        args = (dh, x, *widths.restored(ctx, w1, w3), None, plan, ctx.settings[0], *needs)
        dx, dw1, dw3, db1, db3, _ = up_gradients(args, (main1, main3), *rounded)
        return (
            dx if need.x else None,
            dw1 if need.w1 and main1 is None else None,
            dw3 if need.w3 and main3 is None else None,
            dgate,
            dgate_bias,
            dscale,
            db1 if need.b1 else None,
            db3 if need.b3 else None,
            None,
        )


# --- calls --------------------------------------------------------------------------------------------


def routed_experts(
    x: Tensor,
    operands: Operands,
    router: Router,
    experts: Experts,
    expert_bias: Tensor | None,
    shared: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    ids: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What Router and Experts of these operands compute of x (T, D): out (T, D), counts (E,), ids (T, K),
    logits (T, E). `shared` are what `fused_experts` takes as shared and shared_gate, `ids` and `num_tokens`
    what the router takes."""
    fn, (gate, gate_bias, expert_scale, w1, w2, w3, b1, b2, b3) = "fused_experts", operands
    check_router("router_logits", x, gate, gate_bias)
    given = {"expert_scale": expert_scale, "ids": ids, "num_tokens": num_tokens}
    bias, given_routing, ids, num_tokens, expert_scale = function.check_route(
        "x", x, gate.size(0), router.top_k, expert_bias, **router.routing, **given
    )
    # `function.experts_and_counts` checks what it shares with this in the same order.
    check_activation(fn, experts.activation, experts.alpha, experts.limit)
    *_, layout = check_experts(fn, "x", x, w1, w2, w3, b1, b2, b3, "separate", False)
    is_recorded = torch.is_grad_enabled()
    main_up = main_down = ()
    if is_recorded:
        main_up, main_down = check_main_grads(fn, experts.main_grads, "x", x, (w1, w2, w3), False)
        if main_up or main_down:
            w1, w2, w3 = operands_of((w1, w2, w3), (w1, w2, w3), experts.main_grads)
    if widths.are_padded(x, w1, w2, w3):  # F; D is not (`paths.operands_to_join`)
        padded = widths.padded(x, (w1, w2, w3), (b1, b2, b3), None, None, layout)
        (w1, w2, w3), (b1, b2, b3) = padded.weights, padded.biases
    top_k, score_func, route_norm, route_scale, route_norm_eps, *groups = given_routing
    routing = [top_k, score_func, route_norm, *groups]
    constants = [experts.alpha, experts.limit, route_scale, route_norm_eps]
    settings = (layout, ACTIVATION_CODES[experts.activation], constants)
    if not is_recorded:
        of_router = (gate, gate_bias, bias, expert_scale, num_tokens, routing)
        weights = ([w1], [w2], [] if w3 is None else [w3])
        out, counts, routed = infer(
            x, weights, (b1, b2, b3), None, ids, settings, shared=shared, router=of_router
        )
        return out, counts, *routed  # type: ignore[return-value]
    call = _Call(bias, ids, num_tokens, settings, routing, main_up, main_down)
    if not has_policy():
        return _apply(x, w1, w3, w2, gate, gate_bias, expert_scale, b1, b3, b2, *shared, call)
    of_up = (x, w1, w3, gate, gate_bias, expert_scale, b1, b3)
    h, a, scores, ids, logits, *plan = _RoutedUp.apply(*of_up, call)
    plan = Plan(*plan)
    how = (*settings[:2], constants[:2], *(main_down or (None,)))
    out = run(ops.experts_down.default, a, h, w2, b2, scores, plan.tensors, *how, *shared)
    return out, plan.counts, ids, logits
