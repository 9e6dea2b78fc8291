"""torch.ops.fused_moe.*: loads the library and adds what its C++ cannot hold.

csrc/torch_ops.cpp has the schemas and the kernels. Here stand, operator by operator, the fake kernel
(shapes and dtypes for torch.compile), the autograd formula and the autocast rule. A formula calls
operators only, so it can be traced. Gradients that nobody asked for are not computed: the coarse
backward operators take one flag a gradient and return an empty tensor in its place. All operators are
functional but those named *_accumulate, which add a weight's gradient to a float32 one that they are given.

Names and shapes are those of csrc/fused_moe.h. `offsets` is the plan's (E+1,), except in grouped_mm,
wgrad and bias_grad, where it is the (E,) cumulative ends that torch._grouped_mm takes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .activation import ACTIVATIONS
from .plan import Plan

SCORE_FUNCS = {"softmax": 0, "sigmoid": 1}
LAYOUTS = {"separate": 0, "halves": 1, "interleaved": 2}
UNGATED = 3  # layout "separate" without w3
ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}

LIBRARY = Path(__file__).with_name("_ops.so")
if not LIBRARY.exists():
    raise ImportError(
        f"fused_moe is not built: {LIBRARY} is missing. Build it with `make build`, or install with "
        "`pip install --no-build-isolation .`"
    )
torch.ops.load_library(str(LIBRARY))

ops = torch.ops.fused_moe
HAS_CUDA_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("fused_moe::experts_up", "CUDA")
_library = torch.library.Library("fused_moe", "IMPL")


def _register(name: str, *, fake, backward=None, setup_context=None, autocast: tuple[int, ...] = ()):
    """Adds the Python half of an operator; without `backward` a gradient through it raises."""
    torch.library.register_fake(f"fused_moe::{name}", fake)
    rule = _autograd_rule(name, backward or _no_backward(name), setup_context)
    _library.impl(name, rule, "Autograd", with_keyset=True)
    if autocast:
        for device in ("CPU", "CUDA"):
            _library.impl(name, _autocast_rule(name, device, autocast), f"Autocast{device}")


def _below_autograd(op, keyset, args):
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _autograd_rule(name: str, backward, setup_context):
    """What torch.library.register_autograd makes, but for its look into the schema for every argument of
    every call, a third of a small step's time."""
    op = getattr(ops, name).default
    defaults = tuple(a.default_value for a in op._schema.arguments)

    def forward(ctx, *args):
        *args, keyset = args
        output = _below_autograd(op, keyset, args)
        if setup_context is not None:
            setup_context(ctx, (*args, *defaults[len(args) :]), output)
        return output

    def with_keyset(ctx, *grads):
        return *backward(ctx, *grads), None

    members = {"forward": staticmethod(forward), "backward": staticmethod(with_keyset)}
    node = type(name, (torch.autograd.Function,), members)

    def rule(keyset, *args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return node.apply(*args, keyset)
        return _below_autograd(op, keyset, args)

    return rule


def _no_backward(name: str):
    def backward(ctx, *grads):
        if name.endswith(("_backward", "_dgrad", "_accumulate")):
            raise RuntimeError(
                f"fused_moe: {name} cannot be differentiated: double backward is not supported"
            )
        raise RuntimeError(f"fused_moe: {name} has no gradient")

    return backward


def _register_accumulate(name: str, *, fake):
    """As _register, for an operator that adds to an argument. Where a gradient of that could be asked for it
    refuses: what it writes has no history, which would cut the graph in silence."""
    op = getattr(ops, name).default

    def rule(keyset, *args):
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            _no_backward(name)(None)
        return _below_autograd(op, keyset, args)

    torch.library.register_fake(f"fused_moe::{name}", fake)
    _library.impl(name, rule, "Autograd", with_keyset=True)


def _autocast_rule(name: str, device: str, positions: tuple[int, ...]):
    """Casts the floating inputs at `positions` as autocast does for linear; float64 stays."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def rule(*args):
        dtype = torch.get_autocast_dtype(device.lower())
        args = list(args)
        for i in positions:
            if args[i] is not None and args[i].dtype != torch.float64:
                args[i] = args[i].to(dtype)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return getattr(ops, name).default(*args)

    return rule


def _returned(need: tuple[bool, ...], main_grads: dict[int, Tensor | None]) -> tuple[bool, ...]:
    """Of the gradients needed, those that are not added to a main_grad; keys are their places."""
    return tuple(n and main_grads.get(i) is None for i, n in enumerate(need))


def _wanted(needed: bool, grad: Tensor) -> Tensor | None:
    return grad if needed else None


def score_dtype(x: Tensor) -> torch.dtype:
    """Of scores beside x: float32, float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _num_rows(x: Tensor, row_slot: Tensor | None) -> int:
    return x.size(0) if row_slot is None else row_slot.size(0)


def _num_tokens(rows: Tensor, token_row: Tensor | None) -> int:
    return rows.size(0) if token_row is None else token_row.size(0)


def _widths(w1: Tensor, layout: int) -> tuple[int, int]:
    """F and the width H of h."""
    rows = w1.size(1)
    if layout in (LAYOUTS["halves"], LAYOUTS["interleaved"]):
        return rows // 2, rows
    return rows, rows if layout == UNGATED else 2 * rows


# --- routing ------------------------------------------------------------------------------------------


def _route_fake(logits, bias, top_k, *settings):
    scores = logits.new_empty(logits.size(0), top_k, dtype=score_dtype(logits))
    return scores, torch.empty_like(scores, dtype=torch.int32)


def _route_setup(ctx, inputs, output):
    logits, _, _, ctx.score_func, ctx.route_norm, ctx.route_scale, _, _ = inputs
    ctx.save_for_backward(logits, output[1])


def _route_backward(ctx, dscores, _):
    dlogits = ops.route_backward(dscores, *ctx.saved_tensors, ctx.score_func, ctx.route_norm, ctx.route_scale)
    return dlogits, None, None, None, None, None, None, None


def _route_backward_fake(dscores, logits, ids, *settings):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _tiles_fake(like, num_experts):
    return like.new_empty(2 + 2 * num_experts, dtype=torch.int32)


def _route_plan_fake(ids, num_experts):
    def new(*shape):
        return ids.new_empty(shape, dtype=torch.int32)

    slots = ids.size(0) * ids.size(1)
    return (
        new(num_experts),
        new(num_experts + 1),
        new(slots),
        new(slots),
        new(ids.size(0), ids.size(1)),
        _tiles_fake(ids, num_experts),
    )


def _count_plan_fake(counts, num_rows):
    num_experts = counts.size(0)
    return (
        counts.new_empty(num_experts, dtype=torch.int32),
        counts.new_empty(num_experts + 1, dtype=torch.int32),
        _tiles_fake(counts, num_experts),
    )


_register("route", fake=_route_fake, backward=_route_backward, setup_context=_route_setup)
_register("route_backward", fake=_route_backward_fake)
_register("route_plan", fake=_route_plan_fake)
_register("count_plan", fake=_count_plan_fake)


# --- rows: permute and unpermute are each other's adjoint ------------------------------------------------


def _permute_fake(x, offsets, row_token, row_slot, token_row):
    return x.new_empty(row_slot.size(0), x.size(1))


def _permute_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _permute_backward(ctx, drows):
    return ops.unpermute(drows, None, *ctx.saved_tensors), None, None, None, None


def _unpermute_fake(rows, scores, offsets, row_token, row_slot, token_row):
    return rows.new_empty(token_row.size(0), rows.size(1))


def _unpermute_setup(ctx, inputs, output):
    rows, scores, *maps = inputs
    needs_scores = scores is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if needs_scores else None, scores, *maps)


def _unpermute_backward(ctx, dout):
    rows, scores, *maps = ctx.saved_tensors
    if scores is None:
        return ops.permute(dout, *maps), None, None, None, None, None
    need = ctx.needs_input_grad[:2]
    drows, dscores = ops.unpermute_backward(dout, rows, scores, *maps, *need)
    return _wanted(need[0], drows), _wanted(need[1], dscores), None, None, None, None


def _unpermute_backward_fake(
    dout, rows, scores, offsets, row_token, row_slot, token_row, need_drows, need_dscores
):
    rows_shape = (row_slot.size(0), dout.size(1)) if need_drows else (0,)
    scores_shape = token_row.shape if need_dscores else (0,)
    return dout.new_empty(rows_shape), dout.new_empty(scores_shape, dtype=score_dtype(dout))


_register("permute", fake=_permute_fake, backward=_permute_backward, setup_context=_permute_setup)
_register("unpermute", fake=_unpermute_fake, backward=_unpermute_backward, setup_context=_unpermute_setup)
_register("unpermute_backward", fake=_unpermute_backward_fake)


# --- grouped products: grouped_mm and wgrad close under differentiation ----------------------------------


def _grouped_mm_fake(a, b, offsets):
    return a.new_empty(a.size(0), b.size(1))


def _grouped_mm_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx, dout):
    a, b, offsets = ctx.saved_tensors
    da = ops.grouped_mm(dout, b.mT, offsets) if ctx.needs_input_grad[0] else None
    db = ops.wgrad(dout, a, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None


def _wgrad_fake(a, b, offsets, a_row_token=None, b_row_token=None):
    return a.new_empty(offsets.size(0), a.size(1), b.size(1))


def _wgrad_setup(ctx, inputs, output):
    a, b, offsets, a_row_token, b_row_token = inputs
    ctx.gathered = a_row_token is not None or b_row_token is not None
    ctx.save_for_backward(a, b, offsets)


def _wgrad_backward(ctx, dw):
    if ctx.gathered:
        _no_backward("wgrad with a gathered operand")(ctx, dw)
    a, b, offsets = ctx.saved_tensors
    da = ops.grouped_mm(b, dw, offsets) if ctx.needs_input_grad[0] else None
    db = ops.grouped_mm(a, dw.mT, offsets) if ctx.needs_input_grad[1] else None
    return da, db, None, None, None


def _wgrad_accumulate_fake(a, b, offsets, dw, a_row_token=None, b_row_token=None):
    return None


def _bias_grad_fake(rows, offsets):
    return rows.new_empty(offsets.size(0), rows.size(1))


_register(
    "grouped_mm",
    fake=_grouped_mm_fake,
    backward=_grouped_mm_backward,
    setup_context=_grouped_mm_setup,
    autocast=(0, 1),
)
_register("wgrad", fake=_wgrad_fake, backward=_wgrad_backward, setup_context=_wgrad_setup)
_register_accumulate("wgrad_accumulate", fake=_wgrad_accumulate_fake)
_register("bias_grad", fake=_bias_grad_fake)


# --- experts, fine-grained: for composition and for tests -------------------------------------------------


def _up_gate_fake(x, w1, w3, b1, b3, offsets, row_token, row_slot, token_row, tiles, layout, *activation):
    num_rows = _num_rows(x, row_slot)
    width, h_width = _widths(w1, layout)
    return x.new_empty(num_rows, h_width), x.new_empty(num_rows, width)


def _up_gate_setup(ctx, inputs, output):
    x, w1, w3, _, _, offsets, row_token, row_slot, token_row, _, ctx.layout, *ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w3, offsets, row_token, row_slot, token_row, output[0])


def _up_gate_backward(ctx, dh, da):
    x, w1, w3, offsets, row_token, row_slot, token_row, h = ctx.saved_tensors
    if da is not None:
        from_a = ops.act_dgrad(da, h, ctx.layout, *ctx.activation)
        dh = from_a if dh is None else dh + from_a
    if dh is None:
        return (None,) * 14
    need_x, need_w1, need_w3, need_b1, need_b3 = ctx.needs_input_grad[:5]
    dx = dw1 = dw3 = db1 = db3 = None
    ends = offsets[1:]
    if need_x:
        dx = ops.up_dgrad(dh, w1, w3, offsets, ctx.layout)
        if row_token is not None:
            dx = ops.unpermute(dx, None, offsets, row_token, row_slot, token_row)
    dgate, dup = (dh, None) if w3 is None else dh.chunk(2, dim=1)
    if need_w1:
        dw1 = ops.wgrad(dgate, x, ends, None, row_token)
    if need_w3:
        dw3 = ops.wgrad(dup, x, ends, None, row_token)
    if need_b1:
        db1 = ops.bias_grad(dgate, ends)
    if need_b3:
        db3 = ops.bias_grad(dup, ends)
    return dx, dw1, dw3, db1, db3, *(None,) * 9


def _up_dgrad_fake(dh, w1, w3, offsets, layout):
    return dh.new_empty(dh.size(0), w1.size(2))


def _down_dgrad_fake(dout, w2, b2, h, scores, offsets, row_token, row_slot, token_row, tiles, *activation):
    slots = dout.new_empty(dout.size(0), 1) if token_row is None else token_row
    return (
        torch.empty_like(h),
        h.new_empty(h.size(0), w2.size(2)),
        torch.empty_like(slots, dtype=score_dtype(dout)),
    )


def _act_dgrad_fake(da, h, *activation):
    return torch.empty_like(h, memory_format=torch.contiguous_format)


_register(
    "up_gate",
    fake=_up_gate_fake,
    backward=_up_gate_backward,
    setup_context=_up_gate_setup,
    autocast=(0, 1, 2, 3, 4),
)
_register("up_dgrad", fake=_up_dgrad_fake)
_register("down_dgrad", fake=_down_dgrad_fake)
_register("act_dgrad", fake=_act_dgrad_fake)


# --- experts, coarse: the layer's two autograd nodes ------------------------------------------------------
#
# The up side keeps x, the down side keeps h; `a` has no gradient, because the down side's backward
# computes it again from h and returns dh as the gradient of h. So h is freed between the two.
#
# A main_grad is an argument of forward for the formula's sake. It is kept beside the saved tensors, whose
# versions autograd checks: the backward of one micro-batch may write it before another's reads it.


def _experts_up_fake(
    x,
    w1,
    w3,
    b1,
    b3,
    scores,
    offsets,
    row_token,
    row_slot,
    token_row,
    tiles,
    layout,
    activation,
    alpha,
    limit,
    save_h,
    main_grad1=None,
    main_grad3=None,
):
    num_rows = _num_rows(x, row_slot)
    width, h_width = _widths(w1, layout)
    return x.new_empty(num_rows if save_h else 0, h_width), x.new_empty(num_rows, width)


def _experts_up_setup(ctx, inputs, output):
    x, w1, w3, _, _, scores, *maps, ctx.layout, _, _, _, _, main_grad1, main_grad3 = inputs
    ctx.main_grads = (main_grad1, main_grad3)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w3, scores, *maps)


def _experts_up_backward(ctx, dh, _):
    if dh is None:
        return (None,) * 18
    need = ctx.needs_input_grad[:6]
    args = (dh, *ctx.saved_tensors, ctx.layout, *need)
    main_grad1, main_grad3 = ctx.main_grads
    if main_grad1 is None and main_grad3 is None:
        grads = ops.experts_up_backward(*args)
    else:
        grads = ops.experts_up_backward_accumulate(*args, main_grad1, main_grad3)
        need = _returned(need, {1: main_grad1, 2: main_grad3})
    return *(map(_wanted, need, grads)), *(None,) * 12


def _experts_up_backward_fake(
    dh,
    x,
    w1,
    w3,
    scores,
    offsets,
    row_token,
    row_slot,
    token_row,
    tiles,
    layout,
    need_dx,
    need_dw1,
    need_dw3,
    need_db1,
    need_db3,
    need_dscores,
):
    bias_shape = w1.shape[:2]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else dh.new_empty(0),
        torch.empty_like(w1) if need_dw1 else dh.new_empty(0),
        torch.empty_like(w3) if need_dw3 else dh.new_empty(0),
        w1.new_empty(bias_shape) if need_db1 else dh.new_empty(0),
        w1.new_empty(bias_shape) if need_db3 else dh.new_empty(0),
        torch.empty_like(scores) if need_dscores else dh.new_empty(0, dtype=score_dtype(dh)),
    )


def _experts_up_backward_accumulate_fake(*args):
    *args, main_grad1, main_grad3 = args
    args[11:17] = _returned(args[11:17], {1: main_grad1, 2: main_grad3})
    return _experts_up_backward_fake(*args)


def _experts_down_fake(a, h, w2, b2, scores, offsets, row_token, row_slot, token_row, tiles, *settings):
    return a.new_empty(_num_tokens(a, token_row), w2.size(1))


def _experts_down_setup(ctx, inputs, output):
    _, h, w2, b2, scores, *maps, ctx.layout, ctx.activation, ctx.alpha, ctx.limit, ctx.main_grad = inputs
    ctx.save_for_backward(h, w2, b2, scores, *maps)


def _experts_down_backward(ctx, dout):
    h, w2, b2, scores, *maps = ctx.saved_tensors
    if h is None:
        raise RuntimeError("fused_moe: experts_down was given no h, so it has no gradient")
    need = ctx.needs_input_grad[1:5]
    act = (ctx.layout, ctx.activation, ctx.alpha, ctx.limit)
    args = (dout, h, w2, b2, scores, *maps, *act, *need)
    if ctx.main_grad is None:
        grads = ops.experts_down_backward(*args)
    else:
        grads = ops.experts_down_backward_accumulate(*args, ctx.main_grad)
        need = _returned(need, {1: ctx.main_grad})
    return None, *(map(_wanted, need, grads)), *(None,) * 10


def _experts_down_backward_fake(
    dout,
    h,
    w2,
    b2,
    scores,
    offsets,
    row_token,
    row_slot,
    token_row,
    tiles,
    layout,
    activation,
    alpha,
    limit,
    need_dh,
    need_dw2,
    need_db2,
    need_dscores,
):
    return (
        torch.empty_like(h) if need_dh else dout.new_empty(0),
        torch.empty_like(w2) if need_dw2 else dout.new_empty(0),
        w2.new_empty(w2.shape[:2]) if need_db2 else dout.new_empty(0),
        torch.empty_like(scores) if need_dscores else dout.new_empty(0, dtype=score_dtype(dout)),
    )


def _experts_down_backward_accumulate_fake(*args):
    *args, main_grad2 = args
    args[14:18] = _returned(args[14:18], {1: main_grad2})
    return _experts_down_backward_fake(*args)


_register(
    "experts_up",
    fake=_experts_up_fake,
    backward=_experts_up_backward,
    setup_context=_experts_up_setup,
    autocast=(0, 1, 2, 3, 4),
)
_register("experts_up_backward", fake=_experts_up_backward_fake)
_register_accumulate("experts_up_backward_accumulate", fake=_experts_up_backward_accumulate_fake)
_register(
    "experts_down",
    fake=_experts_down_fake,
    backward=_experts_down_backward,
    setup_context=_experts_down_setup,
    autocast=(0, 1, 2, 3),
)
_register("experts_down_backward", fake=_experts_down_backward_fake)
_register_accumulate("experts_down_backward_accumulate", fake=_experts_down_backward_accumulate_fake)


def route_plan(ids: Tensor, num_experts: int) -> Plan:
    """The plan of chosen ids (T, K)."""
    return Plan(*ops.route_plan(ids, num_experts))


def plan_from_counts(counts: Tensor, num_rows: int) -> Plan:
    """The plan of `num_rows` rows that are grouped by expert already; counts (E,) of any integer dtype."""
    counts, offsets, tiles = ops.count_plan(counts, num_rows)
    return Plan(counts, offsets, None, None, None, tiles)
