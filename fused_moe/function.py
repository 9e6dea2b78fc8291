"""The functional interface: checks the arguments, then calls the operators.

A wrong argument raises TypeError (type or dtype) or ValueError (shape, device or value) before anything
runs. The message says what was expected and what was found. Below, T is the number of tokens, D the model
width, F the expert hidden width, E the number of experts, K experts per token and R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops as _ops
from .activation import ACTIVATIONS
from .ops import ops
from .plan import Plan

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_DEVICES = ("cpu", "meta", *(["cuda"] if _ops.HAS_CUDA_KERNELS else []))


# --- checks ---------------------------------------------------------------------------------------------


def fail(error: type[Exception], fn: str, expected: str, found) -> None:
    """Raises a failed check's error. A message formatted before would make sizes static in torch.compile."""
    raise error(f"{fn}: expected {expected}, found {found}")


def _check_tensor(fn: str, name: str, value, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor):
        fail(TypeError, fn, f"{name} to be a tensor", type(value).__name__)
    if value.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        fail(TypeError, fn, f"{name} of dtype {names}", value.dtype)
    if value.dim() != dim:
        fail(ValueError, fn, f"{name} of {dim} dimensions", f"shape {tuple(value.shape)}")


def _check_input(fn: str, name: str, value, dim: int) -> None:
    """Checks for a floating tensor on a device that this build has kernels for."""
    _check_tensor(fn, name, value, dim, _FLOATING)
    if value.device.type not in _DEVICES:
        kernels = f"{name} on a device that this build has kernels for ({', '.join(_DEVICES)})"
        fail(ValueError, fn, kernels, value.device)


def _check_shape(fn: str, name: str, value: Tensor, letters: str, shape: tuple) -> None:
    if tuple(value.shape) != tuple(shape):
        fail(ValueError, fn, f"{name} of shape ({letters}) = {tuple(shape)}", tuple(value.shape))


def _check_like(fn: str, name: str, value: Tensor, x_name: str, x: Tensor) -> None:
    """Checks for the same device, and for the same dtype unless autocast casts it."""
    if value.device != x.device:
        fail(ValueError, fn, f"{name} on {x_name}'s device {x.device}", value.device)
    if value.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        fail(TypeError, fn, f"{name} of {x_name}'s dtype {x.dtype}", value.dtype)


def _check_choice(fn: str, name: str, value, choices) -> None:
    if value not in choices:
        fail(ValueError, fn, f"{name} to be one of {sorted(choices)}", repr(value))


def check_routing(
    fn: str, num_experts: int, top_k: int, score_func: str, num_expert_groups, num_limited_groups
) -> None:
    """Checks E, K and the groups against each other, for `route` and for the module's constructor."""
    _check_choice(fn, "score_func", score_func, _ops.SCORE_FUNCS)
    if not 1 <= num_experts <= 1024:
        fail(ValueError, fn, "1 to 1024 experts", num_experts)
    most = min(num_experts, 32)
    if not 1 <= top_k <= most:
        fail(ValueError, fn, f"top_k from 1 to min(E, 32) = {most}", top_k)
    if (num_expert_groups is None) != (num_limited_groups is None):
        both = "num_expert_groups and num_limited_groups together"
        fail(ValueError, fn, both, (num_expert_groups, num_limited_groups))
    if num_expert_groups is None:
        return
    if num_expert_groups < 1 or num_experts % num_expert_groups:
        fail(ValueError, fn, f"num_expert_groups to divide the {num_experts} experts", num_expert_groups)
    if not 1 <= num_limited_groups <= num_expert_groups:
        fail(ValueError, fn, f"num_limited_groups from 1 to {num_expert_groups}", num_limited_groups)
    reach = num_limited_groups * (num_experts // num_expert_groups)
    if top_k > reach:
        fail(ValueError, fn, f"top_k within the {reach} experts of the kept groups", top_k)


def check_activation(fn: str, activation: str, layout: str, score_on: str) -> None:
    _check_choice(fn, "activation", activation, ACTIVATIONS)
    _check_choice(fn, "layout", layout, _ops.LAYOUTS)
    _check_choice(fn, "score_on", score_on, ("input", "output"))


def _check_ids(fn: str, ids, x: Tensor) -> None:
    _check_tensor(fn, "ids", ids, 2, (torch.int32, torch.int64))
    if ids.size(0) != x.size(0):
        fail(ValueError, fn, f"ids for x's {x.size(0)} tokens", tuple(ids.shape))
    if ids.size(1) < 1:
        fail(ValueError, fn, "ids with at least one slot", tuple(ids.shape))
    if ids.device != x.device:
        fail(ValueError, fn, f"ids on x's device {x.device}", ids.device)


def _check_scores(fn: str, scores, ids: Tensor) -> None:
    _check_tensor(fn, "scores", scores, 2, _FLOATING)
    _check_shape(fn, "scores", scores, "T, K", ids.shape)
    if scores.device != ids.device:
        fail(ValueError, fn, f"scores on {ids.device}", scores.device)


def _check_counts(fn: str, counts, num_experts: int, rows: Tensor) -> None:
    _check_tensor(fn, "counts", counts, 1, _INTEGERS)
    _check_shape(fn, "counts", counts, "E", (num_experts,))
    if counts.device != rows.device:
        fail(ValueError, fn, f"counts on {rows.device}", counts.device)
    # On a GPU reading the values would synchronise. Its kernels never access rows outside of the tensor.
    if counts.device.type == "cpu" and type(counts) is Tensor and not torch.compiler.is_compiling():
        bad = bool((counts < 0).any()) or int(counts.sum()) > rows.size(0)
        if bad:
            expected = f"counts >= 0 that sum to at most the {rows.size(0)} rows given"
            fail(ValueError, fn, expected, counts.tolist())


def _check_plan(fn: str, plan, rows: Tensor) -> None:
    if not isinstance(plan, Plan):
        fail(TypeError, fn, "plan to be a fused_moe.Plan", type(plan).__name__)
    if plan.token_row is None:
        fail(ValueError, fn, "a plan made from ids", "a plan made from counts")
    if plan.row_slot.size(0) != rows.size(0):
        fail(ValueError, fn, f"the plan's {plan.row_slot.size(0)} rows", rows.size(0))
    if plan.offsets.device != rows.device:
        fail(ValueError, fn, f"plan on {rows.device}", plan.offsets.device)


def _expert_weights(fn: str, x: Tensor, w1, w2, w3, b1, b2, b3, layout: str, transposed: bool):
    """Checks the weights and returns w1 (E, H, D), w2 (E, D, F), w3 (E, F, D) as views, and the layout."""
    packed = layout != "separate"
    pairs = layout == "interleaved" and isinstance(w1, Tensor) and w1.dim() == 4 and not transposed
    _check_tensor(fn, "w1", w1, 4 if pairs else 3, _FLOATING)
    if pairs:
        if w1.size(2) != 2:
            fail(ValueError, fn, "w1 of shape (E, F, 2, D)", tuple(w1.shape))
        w1 = w1.flatten(1, 2)
    _check_tensor(fn, "w2", w2, 3, _FLOATING)
    if w3 is not None:
        if packed:
            fail(ValueError, fn, f"no w3 with layout {layout!r}, which packs it in w1", "w3")
        _check_tensor(fn, "w3", w3, 3, _FLOATING)
    if transposed:
        w1, w2, w3 = w1.mT, w2.mT, None if w3 is None else w3.mT
    num_experts, dim, hidden = w2.shape
    width = 2 * hidden if packed else hidden
    stored = " stored transposed" if transposed else ""
    if num_experts < 1 or dim < 1 or hidden < 1:
        fail(ValueError, fn, "E, D, F >= 1", tuple(w2.shape))
    _check_shape(fn, "x", x, "T, D", (x.size(0), dim))
    _check_shape(fn, "w1", w1, f"E, {'2F' if packed else 'F'}, D{stored}", (num_experts, width, dim))
    if w3 is not None:
        _check_shape(fn, "w3", w3, f"E, F, D{stored}", (num_experts, hidden, dim))
    biases = (("b1", b1, width), ("b2", b2, dim), ("b3", b3, hidden))
    for name, bias, size in biases:
        if bias is not None:
            _check_tensor(fn, name, bias, 2, _FLOATING)
            _check_shape(fn, name, bias, f"E, {size}", (num_experts, size))
    if b3 is not None and w3 is None:
        fail(ValueError, fn, "b3 only beside w3", "b3 without w3")
    for name, value in (("w1", w1), ("w2", w2), ("w3", w3), *((n, b) for n, b, _ in biases)):
        if value is not None:
            _check_like(fn, name, value, "x", x)
    code = _ops.UNGATED if not packed and w3 is None else _ops.LAYOUTS[layout]
    return w1, w2, w3, code


def _main_grads(fn: str, main_grads, x: Tensor, weights: tuple, transposed: bool) -> tuple:
    """Checks main_grads against w1, w2 and w3 as stored. Returns the main_grad arguments of experts_up and of
    experts_down: views of shape (E, out, in), or empty tuples."""
    if main_grads is None:
        return (), ()
    if not isinstance(main_grads, (tuple, list)):
        fail(TypeError, fn, "main_grads to be a tuple, of w1, w2 and w3", type(main_grads).__name__)
    if len(main_grads) != 3:
        fail(ValueError, fn, "main_grads of w1, w2 and w3", f"{len(main_grads)} of them")
    views = [None, None, None]
    for i, (grad, w) in enumerate(zip(main_grads, weights, strict=True)):
        if grad is None:
            continue
        name, weight = f"main_grads[{i}]", f"w{i + 1}"
        if w is None:
            fail(ValueError, fn, f"{name} only beside {weight}", f"{name} without {weight}")
        if x.dtype == torch.float64:
            fail(TypeError, fn, "x of dtype float32 or bfloat16 or float16 with main_grads", x.dtype)
        _check_tensor(fn, name, grad, w.dim(), (torch.float32,))
        _check_shape(fn, name, grad, f"{weight}'s", w.shape)
        if grad.device != x.device:
            fail(ValueError, fn, f"{name} on x's device {x.device}", grad.device)
        if grad.requires_grad:
            fail(ValueError, fn, f"{name} that requires no gradient itself", "requires_grad=True")
        if any(stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True)):
            fail(ValueError, fn, f"{name} whose elements do not overlap", f"strides {grad.stride()}")
        if grad.dim() == 4:
            if grad.size(1) > 1 and grad.stride(1) != 2 * grad.stride(2):
                fail(ValueError, fn, f"{name} that can be viewed as (E, 2F, D)", f"strides {grad.stride()}")
            grad = grad.flatten(1, 2)
        views[i] = grad.mT if transposed else grad
    w1, w2, w3 = views
    return () if w1 is None and w3 is None else (w1, w3), () if w2 is None else (w2,)


# --- routing ----------------------------------------------------------------------------------------------


def route(
    logits: Tensor,
    top_k: int,
    *,
    score_func: str = "softmax",
    bias: Tensor | None = None,
    route_norm: bool = False,
    route_scale: float = 1.0,
    num_expert_groups: int | None = None,
    num_limited_groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the K best experts of every token: softmax or sigmoid, fused with top-k.

    Ties go to the lowest expert id. Slots are sorted by score, best first. NaN or infinite logits give
    NaN scores, and ids that are still valid and distinct. Source: the routers of DeepSeek-V3 (arXiv
    2412.19437, 2.1.2) and Mixtral.

    Args:
        logits: (T, E) of any floating dtype, E from 1 to 1024. Computed in float32 (float64 stays).
        top_k: K, from 1 to min(E, 32).
        score_func: "softmax" over all experts, or "sigmoid".
        bias: (E,) added to the scores for the top-k only, not to the returned scores.
        route_norm: divide each token's K scores by their sum.
        route_scale: factor on the scores.
        num_expert_groups, num_limited_groups: only experts of the `num_limited_groups` best groups may
            be chosen; a group's score is the sum of its two best experts.

    Returns:
        scores (T, K) float32 (float64 for float64 logits), differentiable in logits; ids (T, K) int32.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    _check_input("route", "logits", logits, 2)
    check_routing("route", logits.size(1), top_k, score_func, num_expert_groups, num_limited_groups)
    if bias is not None:
        _check_tensor("route", "bias", bias, 1, _FLOATING)
        _check_shape("route", "bias", bias, "E", (logits.size(1),))
        if bias.device != logits.device:
            fail(ValueError, "route", f"bias on {logits.device}", bias.device)
        bias = bias.detach().float()
    return _ops.run(
        ops.route.default,
        logits,
        bias,
        top_k,
        _ops.SCORE_FUNCS[score_func],
        route_norm,
        route_scale,
        num_expert_groups or 0,
        num_limited_groups or 0,
    )


# --- rows -------------------------------------------------------------------------------------------------


def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Plan]:
    """Copies every token to the rows of its experts. Rows are grouped by expert.

    Args:
        x: (T, D), floating. ids: (T, K) int32 or int64; a slot whose id is outside [0, E) gets no row.
        num_experts: E.

    Returns:
        rows (T*K, D), zero past the last row, differentiable in x; and the plan for `unpermute`.
    """
    _check_input("permute", "x", x, 2)
    _check_ids("permute", ids, x)
    if num_experts < 1:
        fail(ValueError, "permute", "num_experts >= 1", num_experts)
    plan = _ops.route_plan(ids, num_experts)
    return _ops.run(ops.permute.default, x, plan.tensors), plan


def unpermute(rows: Tensor, plan: Plan, scores: Tensor | None = None) -> Tensor:
    """Sums every token's rows, weighted: out[t] = sum over k of scores[t, k] * rows[token_row[t, k]].

    Args:
        rows: (T*K, D), floating. plan: from `permute` or `route_plan`.
        scores: (T, K), any floating dtype; None: every row has weight 1.

    Returns:
        (T, D) in rows' dtype, summed in float32 or wider, differentiable in rows and scores.
    """
    _check_input("unpermute", "rows", rows, 2)
    _check_plan("unpermute", plan, rows)
    if scores is not None:
        _check_scores("unpermute", scores, plan.token_row)
        scores = scores.to(_ops.score_dtype(rows))
    return _ops.run(ops.unpermute.default, rows, scores, plan.tensors)


# --- experts ----------------------------------------------------------------------------------------------


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """out[r] = a[r] @ b[e].T for the rows r of expert e, zero past the last row.

    Args:
        a: (R, in), rows grouped by expert. b: (E, out, in), a's dtype (cast under autocast).
        offsets: (E,) int32 cumulative ends on a's device, as torch._grouped_mm's offs.

    Returns:
        (R, out), differentiable in a and b, to any order.
    """
    _check_input("grouped_mm", "a", a, 2)
    _check_tensor("grouped_mm", "b", b, 3, _FLOATING)
    _check_shape("grouped_mm", "b", b, "E, out, in", (b.size(0), b.size(1), a.size(1)))
    _check_like("grouped_mm", "b", b, "a", a)
    _check_tensor("grouped_mm", "offsets", offsets, 1, (torch.int32,))
    _check_shape("grouped_mm", "offsets", offsets, "E", (b.size(0),))
    if offsets.device != a.device:
        fail(ValueError, "grouped_mm", f"offsets on {a.device}", offsets.device)
    return _ops.run(ops.grouped_mm.default, a, b, offsets)


def _experts(
    x, w1, w2, w3, b1, b2, b3, scores, plan: Plan, code, activation, alpha, limit, score_on, main_grads
):
    """The two autograd nodes. h is saved only if a gradient may be needed."""
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, w1, w2, w3, b1, b2, b3, scores)
    )
    settings = (plan.tensors, code, _ops.ACTIVATION_CODES[activation], [alpha, limit])
    on_input = score_on == "input"
    main_up, main_down = main_grads
    up = (x, w1, w3, b1, b3, scores if on_input else None)
    h, a = _ops.run(ops.experts_up.default, *up, *settings, needs_grad, *main_up)
    down = (a, h if needs_grad else None, w2, b2, None if on_input else scores)
    return _ops.run(ops.experts_down.default, *down, *settings, *main_down)


def fused_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scores: Tensor,
    ids: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    layout: str = "separate",
    transposed: bool = False,
    score_on: str = "output",
    plan: Plan | None = None,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    """The routed experts of a layer: out[t] = sum over k of scores[t, k] * expert(ids[t, k])(x[t]).

    expert(e)(x) = w2[e] @ (act(w1[e] @ x + b1[e]) * (w3[e] @ x + b3[e])) + b2[e].
    Only x, h (T*K, 2F), scores and the int32 row maps are saved for backward. Double backward raises.

    Args:
        x: (T, D). T may be 0.
        w1, w2, w3: gate (E, F, D), down (E, D, F), up (E, F, D), all of x's dtype (cast under autocast).
            w3=None with layout "separate" computes act(w1 x), without a gate. The gradient of a weight
            that requires none is not computed.
        scores: (T, K), any floating dtype; used in float32 (float64 for float64 x).
        ids: (T, K) int32 or int64. Ids outside [0, E) are treated as remote: their slots are not computed,
            contribute zero and get a zero score gradient.
        b1, b2, b3: biases (E, F), (E, D), (E, F); b1 is (E, 2F) in w1's layout when packed.
        activation: silu, gelu, gelu_tanh, relu, or swiglu_clamped (gpt-oss), which uses alpha and limit.
        layout: "separate"; "halves": w1 is (E, 2F, D), gate rows then up rows; "interleaved": w1 is
            (E, 2F, D) or (E, F, 2, D), gate0, up0, gate1, ... With the last two w3 is None.
        transposed: weights are stored (E, D, F or 2F) and (E, F, D), as gpt-oss does.
        score_on: "output", or "input": rows are x * score, rounded to x's dtype, and summed unweighted.
        plan: the plan of `ids`, if it has been computed already.
        main_grads: Megatron-style float32 buffers of the shapes of w1, w2 and w3; each may be None. Backward
            accumulates the weight's gradient into its buffer, without rounding to the weight's dtype, and
            the weight's .grad stays None. x may have any dtype except float64. Under torch.compile each
            forward's backward must run before the next forward; otherwise autograd raises, because a
            main_grad was modified in place.

    Returns:
        (T, D) in x's dtype (autocast's under autocast), differentiable in x, weights, biases, scores.

    Raises:
        TypeError, ValueError: before anything runs, with what was expected and what was found.
    """
    fn = "fused_experts"
    _check_input(fn, "x", x, 2)
    check_activation(fn, activation, layout, score_on)
    stored = (w1, w2, w3)
    w1, w2, w3, code = _expert_weights(fn, x, w1, w2, w3, b1, b2, b3, layout, transposed)
    main_grads = _main_grads(fn, main_grads, x, stored, transposed)
    _check_ids(fn, ids, x)
    _check_scores(fn, scores, ids)
    if plan is None:
        plan = _ops.route_plan(ids, w2.size(0))
    scores = scores.to(_ops.score_dtype(x))
    return _experts(
        x, w1, w2, w3, b1, b2, b3, scores, plan, code, activation, alpha, limit, score_on, main_grads
    )


def grouped_mlp(
    x_rows: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    counts: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    layout: str = "separate",
    transposed: bool = False,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> Tensor:
    """Applies every expert to its own rows, which are contiguous, as a token dispatcher returns them.

    Args:
        x_rows: (R, D): counts[0] rows of expert 0, then counts[1] of expert 1, ... Rows past counts.sum()
            may hold garbage: they are never read. Output and gradients are zero there.
        counts: (E,) of any integer dtype, on x_rows' device. On a GPU the host never reads them.
        Other arguments: as those of `fused_experts`.

    Returns:
        (R, D), differentiable in x_rows, weights and biases.
    """
    fn = "grouped_mlp"
    _check_input(fn, "x_rows", x_rows, 2)
    check_activation(fn, activation, layout, "output")
    stored = (w1, w2, w3)
    w1, w2, w3, code = _expert_weights(fn, x_rows, w1, w2, w3, b1, b2, b3, layout, transposed)
    main_grads = _main_grads(fn, main_grads, x_rows, stored, transposed)
    _check_counts(fn, counts, w2.size(0), x_rows)
    plan = _ops.plan_from_counts(counts, x_rows.size(0))
    return _experts(
        x_rows, w1, w2, w3, b1, b2, b3, None, plan, code, activation, alpha, limit, "output", main_grads
    )
