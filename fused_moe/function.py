"""The functional interface: checks the arguments, then calls the operators.

A wrong argument raises TypeError (type or dtype) or ValueError (shape, device or value) before an operator
runs. The message says what was expected and what was found. Below, T is the number of tokens, D the model
width, F the expert hidden width, E the number of experts, K experts per token and R rows. A slot is one of a
token's K choices; one whose id is no expert's here is remote: it gets no row, and its score counts as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from . import composed, fp8_shares, paths, widths
from . import ops as _ops
from .checks import (
    FLOATING,
    INTEGERS,
    check_activation,
    check_counts,
    check_device,
    check_expert_map,
    check_experts,
    check_given_ids,
    check_ids,
    check_input,
    check_int,
    check_layout,
    check_like,
    check_main_grads,
    check_max_rows,
    check_num_experts,
    check_num_tokens,
    check_offsets,
    check_out,
    check_plan_of_ids,
    check_plan_of_rows,
    check_router,
    check_routing,
    check_scores,
    check_shape,
    check_shared,
    check_tensor,
    fail,
    is_autocast_enabled,
)
from .fp8 import Fp8Weights, check_operands, check_options, wgrad_pays
from .fp8_training import Fp8Training
from .lora import LoRA, check_lora
from .main_grad import operands_of
from .ops import ops
from .plan import Plan, tensors_again
from .quantized import computing
from .quantized.weight import QuantizedWeight, check_weight, read

# What the three weights w1, w2 and w3 are: tensors, QuantizedWeights, or None for w3.
Weights = tuple[Any, Any, Any]
# What `ops.infer` takes behind the weights.
Call = tuple[Any, Any, Any, Any, Any, Any, Any]

# --- routing ----------------------------------------------------------------------------------------------


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the router's linear layer: logits[t] = weight @ x[t] + bias, summed in float32 and not
    rounded.

    On a GPU a token's logits have the same bits in every batch: how D is split into sums depends on D alone,
    where cuBLAS splits by the number of tokens, too. On the CPU they have the same bits in every run of the
    same batch.

    Args:
        x: (T, D), floating. T may be 0.
        weight: (E, D), E from 1 to 1024, of x's dtype, or float32 beside a bfloat16 or float16 x, and on its
            device (cast under autocast, as for linear).
        bias: (E,) of weight's dtype.

    Returns:
        (T, E) float32 (float64 for float64 x), differentiable in x, weight and bias. Their gradients have
        their dtypes; the GEMMs of the first two multiply the logits' gradient rounded to that dtype. Beside
        a 16-bit x a float32 weight is rounded for x's gradient alone.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> x, weight = torch.randn(5, 8), torch.randn(3, 8)
        >>> fused_moe.router_logits(x, weight).shape
        torch.Size([5, 3])
    """
    fn = "router_logits"
    check_input(fn, "x", x, 2)
    check_router(fn, x, weight, bias)
    return _ops.run(ops.router_logits.default, x, weight, bias)


def route(
    logits: Tensor,
    top_k: int,
    *,
    score_func: str = "softmax",
    bias: Tensor | None = None,
    route_norm: bool = False,
    route_scale: float = 1.0,
    route_norm_eps: float = 1e-20,
    num_expert_groups: int | None = None,
    num_limited_groups: int | None = None,
    group_score: str = "top2",
    expert_scale: Tensor | None = None,
    ids: Tensor | None = None,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the K best experts of every token, and returns their scores and ids.

    Ties go to the lowest expert id. Slots are sorted by what the choice was made by (score, plus bias if
    there is one), best first; given ids keep their order. NaN logits, and +inf under softmax, give NaN
    scores; other infinite ones give their limits. Chosen ids are valid and distinct in any case. Source: the
    routers of Mixtral, DeepSeek-V2 (arXiv 2405.04434, 2.2), V3 (arXiv 2412.19437, 2.1.2) and V4, and
    Gemma 4.

    Args:
        logits: (T, E) of any floating dtype, E from 1 to 1024. Computed in float32 (float64 stays).
        top_k: K, from 1 to min(E, 32).
        score_func: "softmax" over all experts, "sigmoid", or "sqrtsoftplus", sqrt(log(1 + exp(logit))).
        bias: (E,) added to the scores for the top-k only, not to the returned scores. An expert whose bias is
            -infinity is never chosen: where fewer than K others can be, the slots left have id -1, score 0,
            gradient 0, and route_norm divides by the sum of the rest.
        route_norm: divide each token's K scores by their sum.
        route_scale: factor on the scores.
        route_norm_eps: added to the sum that route_norm divides by, >= 0.
        num_expert_groups, num_limited_groups: only experts of the `num_limited_groups` best groups may
            be chosen.
        group_score: what a group is worth: "top2", the sum of its two best experts, as in DeepSeek-V3; or
            "max", its best expert, as in DeepSeek-V2.
        expert_scale: (E,) floating, differentiable: a factor on the final scores of each expert, after norm
            and route_scale. It has no part in the choice. Cast to the scores' dtype.
        ids: (T, K) uint8, int8, int16, uint16, int32 or int64, a choice made before: scores and gradients
            are as if it had been made here. Bias and groups are not consulted, and an id may repeat. A token
            whose K ids are all -1 has no choice yet: it is made here. A -1 beside other ids is a remote slot:
            id -1, score 0, gradient 0, and route_norm divides by the sum of the rest. Other ids outside
            [0, E) raise on the CPU; on a GPU the host never reads them, and they are remote, too.
        num_tokens: one int32 or int64 on the logits' device, in a tensor of any shape; clamped to [0, T]. The
            tokens from it on are padding: id -1, score 0, gradient 0, whatever their logits.

    Returns:
        scores (T, K) float32 (float64 for float64 logits), differentiable in logits and expert_scale;
        ids (T, K) int32.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0]])
        >>> scores, ids = fused_moe.route(logits, top_k=2, route_norm=True)
        >>> ids
        tensor([[1, 2]], dtype=torch.int32)
        >>> scores.round(decimals=2)
        tensor([[0.7300, 0.2700]])
    """
    check_input("route", "logits", logits, 2)
    groups = (num_expert_groups, num_limited_groups, group_score)
    routing = (score_func, route_norm, route_scale, route_norm_eps, *groups)
    tensors = (expert_scale, ids, num_tokens)
    num_experts = logits.size(1)
    bias, settings, *given = check_route("logits", logits, num_experts, top_k, bias, *routing, *tensors)
    return _ops.run(ops.route.default, logits, bias, *settings, *given)


def check_route(
    name, like, num_experts, top_k, bias, score_func, route_norm, route_scale, route_norm_eps,
    num_expert_groups, num_limited_groups, group_score, expert_scale, ids, num_tokens,
) -> tuple[Tensor | None, tuple, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Checks the arguments of `route` for the T tokens of `like`. Returns the bias as the operator takes it,
    its arguments from top_k to group_score, and ids, num_tokens and expert_scale as it takes them."""
    fn = "route"
    groups = (num_expert_groups, num_limited_groups, group_score)
    check_routing(fn, num_experts, top_k, score_func, *groups, route_norm, route_scale, route_norm_eps)
    if bias is not None:
        check_tensor(fn, "bias", bias, 1, FLOATING)
        check_shape(fn, "bias", bias, "E", (num_experts,))
        check_device(fn, "bias", bias, name, like)
    if num_tokens is not None:
        check_num_tokens(fn, num_tokens, name, like)
    if ids is not None:
        ids = check_given_ids(fn, ids, num_tokens, name, like, num_experts, top_k)
    if expert_scale is not None:
        check_tensor(fn, "expert_scale", expert_scale, 1, FLOATING)
        check_shape(fn, "expert_scale", expert_scale, "E", (num_experts,))
        check_device(fn, "expert_scale", expert_scale, name, like)
        expert_scale = expert_scale.to(_ops.score_dtype(like))
    groups = (num_expert_groups or 0, num_limited_groups or 0, _ops.GROUP_SCORES[group_score])
    bias = None if bias is None else bias.detach().float()
    scores = (_ops.SCORE_FUNCS[score_func], route_norm, route_scale, route_norm_eps)
    return bias, (top_k, *scores, *groups), ids, num_tokens, expert_scale


# --- rows -------------------------------------------------------------------------------------------------


def route_plan(
    ids: Tensor,
    num_experts: int,
    expert_map: Tensor | None = None,
    *,
    max_rows: int | None = None,
    dropped_rows: Tensor | None = None,
) -> Plan:
    """Sorts the slots of expert ids by expert, and returns the row maps as a `Plan`. The sort is stable.

    Args:
        ids: (T, K) of any integer dtype; a slot whose id is outside [0, E) gets no row.
        num_experts: E.
        expert_map: (E_global,) int32, which of the E experts an id stands for, -1 for remote experts. Ids
            outside [0, E_global) get no row. On the CPU, values outside [-1, E) raise; on a GPU the host
            never reads them, and they are remote.
        max_rows: as that of `fused_experts`.
        dropped_rows: as that of `fused_experts`.

    Returns:
        A `Plan` with R = min(T*K, max_rows) rows. It serves `fused_experts`, `unpermute` and the operators.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> ids = torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
        >>> plan = fused_moe.route_plan(ids, num_experts=3)
        >>> plan.counts.tolist(), plan.token_row.tolist()
        ([1, 2, 1], [[1, 0], [2, 3]])
    """
    check_input("route_plan", "ids", ids, 2, INTEGERS)
    check_num_experts("route_plan", num_experts)
    if expert_map is not None:
        check_expert_map("route_plan", expert_map, ids, num_experts)
    check_max_rows("route_plan", max_rows, dropped_rows, ids)
    return _ops.route_plan(ids, num_experts, expert_map, max_rows, dropped_rows)


def plan_from_counts(counts: Tensor, num_rows: int) -> Plan:
    """Makes the plan of `num_rows` contiguous rows that are grouped by expert already.

    Args:
        counts: (E,) of any integer dtype, >= 0, with a sum of at most num_rows. On a GPU the host never reads
            them.
        num_rows: R, with the rows past counts.sum(), which are no expert's.

    Returns:
        A `Plan` without row maps: row r is token r.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> fused_moe.plan_from_counts(torch.tensor([2, 0, 3]), num_rows=5).offsets.tolist()
        [0, 2, 2, 5]
    """
    fn = "plan_from_counts"
    check_input(fn, "counts", counts, 1, INTEGERS)
    check_int(fn, "num_rows", num_rows)
    if num_rows < 0:
        fail(ValueError, fn, "num_rows >= 0", num_rows)
    if counts.size(0) < 1:
        fail(ValueError, fn, "counts of at least one expert", tuple(counts.shape))
    check_counts(fn, counts, num_rows)
    return _ops.plan_from_counts(counts, num_rows)


def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Plan]:
    """Copies every token to the rows of its experts, which are grouped by expert.

    Args:
        x: (T, D), floating.
        ids: (T, K) int32 or int64; a slot whose id is outside [0, E) gets no row.
        num_experts: E.

    Returns:
        rows (T*K, D), zero past the last row, differentiable in x; and the plan for `unpermute`.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]])
        >>> rows, plan = fused_moe.permute(x, ids, num_experts=2)
        >>> rows.tolist()
        [[2.0], [1.0]]
    """
    check_input("permute", "x", x, 2)
    check_ids("permute", ids, x)
    check_num_experts("permute", num_experts)
    plan = _ops.route_plan(ids, num_experts)
    return _ops.run(ops.permute.default, x, plan.tensors), plan


def unpermute(
    rows: Tensor,
    plan: Plan,
    scores: Tensor | None = None,
    *,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Sums every token's rows, weighted: out[t] = sum over k of scores[t, k] * rows[token_row[t, k]].

    Args:
        rows: (T*K, D), floating.
        plan: from `permute` or `route_plan`.
        scores: (T, K), any floating dtype; None: every row has weight 1.
        shared: (T, D) of rows' dtype (cast under autocast), added to the sum: the output of shared experts.
        shared_gate: logits (T,) or (T, 1) of any floating dtype; shared[t] is multiplied by their sigmoid.

    Returns:
        (T, D) in rows' dtype, summed in float32 or wider and rounded once, differentiable in rows, scores,
        shared and shared_gate.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 2]])
        >>> rows, plan = fused_moe.permute(x, ids, num_experts=3)
        >>> fused_moe.unpermute(rows, plan, scores=torch.full((2, 2), 0.5)).tolist()
        [[1.0], [2.0]]
    """
    check_input("unpermute", "rows", rows, 2)
    check_plan_of_rows("unpermute", plan, rows)
    token_row = plan.token_row
    assert token_row is not None
    if scores is not None:
        check_scores("unpermute", scores, token_row)
    check_shared("unpermute", shared, shared_gate, "rows", rows, (token_row.size(0), rows.size(1)))
    scores = _as_scores(scores, rows)
    if shared is None:
        return _ops.run(ops.unpermute.default, rows, scores, tensors_again(plan))
    shared, shared_gate = shared.to(rows.dtype), _as_scores(shared_gate, rows)
    return _ops.run(ops.unpermute.default, rows, scores, tensors_again(plan), shared, shared_gate)


def _as_scores(values: Tensor | None, x: Tensor) -> Tensor | None:
    if values is None:
        return None
    dtype = _ops.score_dtype(x)
    return values if values.dtype == dtype else values.to(dtype)


# --- experts ----------------------------------------------------------------------------------------------

ALPHA, LIMIT = 1.702, 7.0  # gpt-oss's


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Multiplies each expert's rows by its matrix: out[r] = a[r] @ b[e].T + bias[e] for the rows r of expert
    e.

    On a GPU a row of the output and of a's gradient has the same bits among any others.

    Args:
        a: (R, in), floating, rows grouped by expert.
        b: (E, out, in), a's dtype (cast under autocast). In 16 bits it runs on Hopper's kernels; widths that
            are no multiple of 8 cost a copy of a and b in each call.
        offsets: (E,) int32 cumulative ends on a's device, as torch._grouped_mm's offs. They rise from 0 to at
            most R; the values are checked on the CPU, and on a GPU the host never reads them.
        bias: (E, out), a's dtype (cast under autocast), added before the sum is rounded.

    Returns:
        (R, out) in a's dtype, zero past the last row; differentiable in a and b, to any order, and in bias.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> a, b = torch.ones(3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> fused_moe.grouped_mm(a, b, torch.tensor([1, 3], dtype=torch.int32)).tolist()
        [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    """
    fn = "grouped_mm"
    check_input(fn, "a", a, 2)
    check_tensor(fn, "b", b, 3, FLOATING)
    check_shape(fn, "b", b, "E, out, in", (b.size(0), b.size(1), a.size(1)))
    if b.size(0) < 1 or b.size(1) < 1 or b.size(2) < 1:
        fail(ValueError, fn, "b of E, out, in >= 1", tuple(b.shape))
    check_like(fn, "b", b, "a", a)
    if bias is not None:
        check_tensor(fn, "bias", bias, 2, FLOATING)
        check_shape(fn, "bias", bias, "E, out", tuple(b.shape[:2]))
        check_like(fn, "bias", bias, "a", a)
    check_tensor(fn, "offsets", offsets, 1, (torch.int32,))
    check_shape(fn, "offsets", offsets, "E", (b.size(0),))
    check_device(fn, "offsets", offsets, "a", a)
    check_offsets(fn, offsets, a.size(0))
    return _grouped_mm(a, b, offsets, bias)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    out = b.size(1)
    a, b, bias = widths.padded_mm(a, b, bias)
    return _narrowed(_ops.run(ops.grouped_mm.default, a, b, offsets, bias), out)


def _narrowed(y: Tensor, width: int) -> Tensor:
    """The first columns of y (T, D), contiguous. Tokens are in pad's first dimension, as in widths.py."""
    if y.size(1) == width:
        return y
    return _ops.reshaped(_ops.run(ops.pad.default, y[:, None, None], 1, 1, width), (y.size(0), width))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes torch.nn.functional.linear by the kernels of `grouped_mm`: out = x @ weight.T + bias.

    On a GPU a token's output, and its gradient of x, have the same bits in every batch, where cuBLAS chooses
    its kernel by the number of tokens. docs/performance.md has what that costs. On the CPU the bits are the
    same in every run of the same batch.

    Args:
        x: (..., in), floating; it may have no tokens.
        weight: (out, in) of x's dtype and on its device (cast under autocast). In 16 bits it runs on Hopper's
            kernels; widths that are no multiple of 8 cost a copy of x and weight in each call.
        bias: (out,), as weight.

    Returns:
        (..., out) in x's dtype, the bias added before the sum is rounded; differentiable in x and weight, to
        any order, and in bias.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> x, weight = torch.randn(2, 5, 8), torch.randn(3, 8)
        >>> torch.allclose(fused_moe.linear(x, weight), x @ weight.T, atol=1e-5)
        True
    """
    fn = "linear"
    if not isinstance(x, Tensor):
        fail(TypeError, fn, "x to be a tensor", type(x).__name__)
    if x.dim() < 1:
        fail(ValueError, fn, "x of shape (..., in)", tuple(x.shape))
    tokens = x if x.dim() == 2 else x.reshape(-1, x.size(-1))
    check_input(fn, "x", tokens, 2)
    check_tensor(fn, "weight", weight, 2, FLOATING)
    check_shape(fn, "weight", weight, "out, in", (weight.size(0), x.size(-1)))
    if weight.size(0) < 1 or weight.size(1) < 1:
        fail(ValueError, fn, "weight of out, in >= 1", tuple(weight.shape))
    check_like(fn, "weight", weight, "x", x)
    if bias is not None:
        check_tensor(fn, "bias", bias, 1, FLOATING)
        check_shape(fn, "bias", bias, "out", (weight.size(0),))
        check_like(fn, "bias", bias, "x", x)
    ends = torch.full((1,), tokens.size(0), dtype=torch.int32, device=x.device)
    of_group = None if bias is None else bias[None]
    out = _grouped_mm(tokens, weight[None], ends, of_group)
    return out if x.dim() == 2 else _ops.reshaped(out, (*x.shape[:-1], weight.size(0)))


def _experts(
    x, w1, w2, w3, b1, b2, b3, scores, plan: Plan, code, activation, alpha, limit, score_on, main_grads,
    shared=(None, None),
):  # fmt: skip
    """The two autograd nodes. h is saved only if a gradient may be needed."""
    needs_grad = paths.needs_grad(x, w1, w2, w3, b1, b2, b3, scores)
    settings = (code, _ops.ACTIVATION_CODES[activation], [alpha, limit])
    on_input = score_on == "input"
    main_up, main_down = main_grads
    up = (x, w1, w3, b1, b3, scores if on_input else None)
    h, a = _ops.run(ops.experts_up.default, *up, plan.tensors, *settings, needs_grad, *main_up)
    down = (a, h if needs_grad else None, w2, b2, None if on_input else scores)
    return _ops.run(
        ops.experts_down.default, *down, tensors_again(plan), *settings, *(main_down or (None,)), *shared
    )


def _fp8_experts(
    x, w1, w2, w3, scores, plan: Plan, fp8: Fp8Weights, code, activation, constants, wgrad, main_grads,
    shared,
):  # fmt: skip
    """The autograd nodes of FP8 training. h is saved only if a gradient may be needed."""
    settings = (code, _ops.ACTIVATION_CODES[activation], [*constants])
    main_up, main_down = main_grads
    wgrad = _ops.WGRADS[wgrad]
    if is_autocast_enabled(x):  # once for both operators
        x = x.to(torch.get_autocast_dtype(x.device.type))
    needs_grad, links_t = paths.needs_grad(x, w1, w2, w3, scores), (None, None)
    if paths.needs_grad(w1, w3):  # called first, so that its backward runs last
        of_weights = (x.detach(), w1, w3, tensors_again(plan, 1), code, wgrad, *main_up)
        links_t = _ops.run(ops.fp8_up_weights.default, *of_weights)
    if not torch.compiler.is_compiling():
        _ops.refuse_tangents("fp8_up_weights", (w1, w3))  # which detach would drop
    values = (w if w is None else w.detach() for w in (w1, w3))
    up = (x, *values, plan.tensors, [*fp8.up], *settings, needs_grad)
    made = _ops.run(ops.fp8_up.default, *up)
    down = (*made, w2, *links_t, scores, tensors_again(plan), [*fp8.down], *settings, wgrad)
    y = _ops.run(ops.fp8_down.default, *down, *(main_down or (None,)), *shared)
    if (shares := fp8_shares.current()) is not None:
        shares.add_call(x, fp8, made, links_t[0], plan, y, wgrad)
    return y


_experts_with_main_grads = _disable_dynamo(_experts) if _ops.WRITES_BESIDE_VIEWS else _experts
_fp8_with_main_grads = _disable_dynamo(_fp8_experts) if _ops.WRITES_BESIDE_VIEWS else _fp8_experts


def fused_experts(
    x: Tensor,
    w1: Tensor | QuantizedWeight,
    w2: Tensor | QuantizedWeight,
    w3: Tensor | QuantizedWeight | None,
    scores: Tensor,
    ids: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    layout: str = "separate",
    transposed: bool = False,
    score_on: str = "output",
    plan: Plan | None = None,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    expert_map: Tensor | None = None,
    max_rows: int | None = None,
    dropped_rows: Tensor | None = None,
    out: Tensor | None = None,
    lora: LoRA | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    compute: str | None = None,
    smooth1: Tensor | None = None,
    smooth2: Tensor | None = None,
    fp8: Fp8Weights | bool | None = None,
    fp8_wgrad: str = "auto",
) -> Tensor:
    """Computes the routed experts of a layer: out[t] = sum over k of scores[t, k] * expert(ids[t, k])(x[t]).

    expert(e)(x) = w2[e] @ (act(w1[e] @ x + b1[e]) * (w3[e] @ x + b3[e])) + b2[e].
    Only x, h (R, 2F), scores and the int32 row maps are saved for backward, R = min(T*K, max_rows). Double
    backward raises.

    Args:
        x: (T, D), floating. T may be 0.
        w1: gate (E, F, D) of x's dtype (cast under autocast), as w2 and w3. Each may be a QuantizedWeight,
            which is frozen, unless `transposed`. The gradient of a weight that requires none is not computed.
        w2: down (E, D, F).
        w3: up (E, F, D). None with layout "separate" computes act(w1 x), without a gate.
        scores: (T, K), any floating dtype; used in float32 (float64 for float64 x).
        ids: (T, K) int32 or int64. Ids outside [0, E) are treated as remote: their slots are not computed,
            contribute zero and get a zero score gradient. So ids that are off by one go unnoticed here;
            `fused_moe.reference.check_ids` raises for them.
        b1, b2, b3: biases (E, F), (E, D), (E, F); b1 is (E, 2F) in w1's layout when packed.
        activation: silu, gelu, gelu_tanh, relu, swiglu_clamped (gpt-oss), swiglu_limited (DeepSeek-V4), relu2
            (Nemotron) or situ (Kimi K3); `fused_moe/activation.py` has the formulas.
        alpha: of swiglu_clamped; of situ, where it is > 0. The other activations do not use it.
        limit: of swiglu_clamped and swiglu_limited, >= 0, where inf clamps nothing; of situ, where it is
            finite and > 0. The other activations do not use it.
        layout: "separate"; "halves": w1 is (E, 2F, D), gate rows then up rows; "interleaved": w1 is
            (E, 2F, D) or (E, F, 2, D), gate0, up0, gate1, ... With the last two w3 is None.
        transposed: weights are stored (E, D, F or 2F) and (E, F, D), as gpt-oss does.
        score_on: "output", or "input": rows are x * score, rounded to x's dtype, and summed unweighted.
        plan: route_plan(ids, E) or route_plan(ids, E, expert_map), if it has been computed already. Beside a
            plan expert_map raises.
        main_grads: Megatron-style float32 buffers of the shapes of w1, w2 and w3; each may be None. Backward
            accumulates the weight's gradient into its buffer, without rounding to the weight's dtype, and the
            weight's .grad stays None. A backward that does not ask for the weight's gradient, as
            autograd.grad of x alone, adds nothing, unless torch.compile compiled it with its forward. x may
            have any dtype except float64. A backward that is itself recorded (create_graph=True,
            torch.func.grad) raises. Under torch.compile each forward's backward must run before the next
            forward; otherwise autograd raises, because a main_grad was modified in place. Before PyTorch 2.13
            main_grads are not compiled: fullgraph=True raises. Under compiled autograd a backward may use
            each weight once: PyTorch fails to add two undefined gradients there.
        expert_map: as that of `route_plan`, where the weights are those of some of E_global experts.
        max_rows: the most slots that get a row, and the number of rows that memory is allocated for, in calls
            where many slots are remote and the host does not know how many. The slots past it, the last ones
            of the highest expert ids, are dropped: they count as remote. Beside a plan it raises, and below
            T*K beside a compute other than "codes".
        dropped_rows: () int64 on x's device, to which each call adds the number of dropped slots, also where
            activation checkpointing repeats it.
        out: (T, D), contiguous, of the result's dtype: it is written and returned. Only where no gradient is
            recorded, and in memory that no other argument has a part of.
        lora: adapters that are added to the weights' GEMMs. Beside it and beside quantised weights
            main_grads raise.
        shared: (T, D) of x's dtype (cast under autocast), added to the sum before it is rounded: the output
            of shared experts.
        shared_gate: logits (T,) or (T, 1) of any floating dtype; shared[t] is multiplied by their sigmoid.
        compute: how quantised weights are multiplied, "codes", "fp8", "int8", "int8_smooth" or "auto":
            `QuantizedWeight.set_compute` says what they are; default: what the weights say. All but "codes"
            want three quantised weights of one format as published (`eight_bit_tensors`), x of bfloat16 or
            float16 (float32 on the CPU, too), and on a GPU D and F that are multiples of 16. They have no
            gradient: backward raises. lora, plan, main_grads and transposed raise; all else works.
        smooth1, smooth2: of "int8_smooth", (E, D) and (E, F) float32, finite and > 0: what an expert's x, and
            act(w1 x) * (w3 x), are divided by. Default: the weights' own `smooth`, or ones.
        fp8: train in FP8: all GEMMs, forward and backward, multiply e4m3 by e4m3. True quantises the weights
            in every call, forward alone; `fp8_weights` does it once for several. w1, w2 and w3 get their
            gradients as ever, but their values are read only by what quantises them. x is bfloat16 (float32
            on the CPU, too; autocast casts x alone, and weights may stay float32), D and F are multiples of
            128, and a GPU has to be one of Hopper's. Biases, score_on "input", lora, quantised weights and
            compute raise; all else works. Without gradients the output has the same bits.
        fp8_wgrad: "fp8": weight gradients multiply e4m3 by e4m3, too; "bf16": they are GEMMs of x's dtype, of
            operands that are not quantised; "auto": "fp8" if experts have 256 rows or more on average.

    Returns:
        (T, D) in x's dtype (autocast's under autocast), differentiable in x, weights, biases, scores,
        adapters, shared and shared_gate.

    Raises:
        TypeError: for a wrong type or dtype, before an operator runs.
        ValueError: for a wrong shape, device, value or combination, before an operator runs.
        RuntimeError: in a backward with a compute other than "codes", and in a double backward.

    Example:
        >>> T, D, F, E, K = 5, 8, 16, 4, 2
        >>> x, w1, w2, w3 = torch.randn(T, D), *(torch.randn(E, *s) for s in ((F, D), (D, F), (F, D)))
        >>> scores, ids = fused_moe.route(torch.randn(T, E), K)
        >>> fused_moe.fused_experts(x, w1, w2, w3, scores, ids).shape
        torch.Size([5, 8])
    """
    weights, biases, constants = (w1, w2, w3), (b1, b2, b3), (alpha, limit)
    return experts_and_counts(
        x, weights, scores, ids, biases, activation, constants, layout, transposed, score_on, plan,
        main_grads, expert_map, out, lora, shared, shared_gate, compute, (smooth1, smooth2), fp8, fp8_wgrad,
        max_rows, dropped_rows,
    )[0]  # fmt: skip


def experts_and_counts(
    x, weights: Weights, scores, ids, biases: tuple[Any, Any, Any], activation,
    constants: tuple[float, float] = (ALPHA, LIMIT), layout="separate",
    transposed=False, score_on="output", plan=None, main_grads=None, expert_map=None, out=None, lora=None,
    shared=None, shared_gate=None, compute=None, smooth=(None, None), fp8=None, fp8_wgrad="auto",
    max_rows=None, dropped_rows=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fused_experts, and how many slots each expert has: counts (E,) int32. fp8 may be a layer's Fp8Training,
    too."""
    fn = "fused_experts"
    check_input(fn, "x", x, 2)
    check_activation(fn, activation, *constants)
    check_layout(fn, layout, score_on)
    on_input = score_on == "input"
    training, fp8 = _fp8_training(fp8)
    trains_fp8 = (fp8 is not None or fp8_wgrad != "auto") and check_options(
        fn, fp8, fp8_wgrad, weights, biases, score_on, lora, compute, smooth
    )
    stored, weights, is_composed = _plain_weights(fn, "x", x, weights, transposed, main_grads, lora)
    w1, w2, w3, code = check_experts(fn, "x", x, *weights, *biases, layout, transposed)
    if trains_fp8:
        check_operands(fn, fp8, x, w1, w2, w3, code)
    if lora is not None:
        check_lora(fn, lora, "x", x, (w1, w2, w3))
    mode = "codes"
    if is_composed or compute is not None or smooth[0] is not None or smooth[1] is not None:
        mode, smooth = computing.check_call(fn, compute, smooth, x, stored, lora, plan)
    given, main_grads = main_grads, check_main_grads(fn, main_grads, "x", x, weights, transposed)
    check_ids(fn, ids, x)
    check_scores(fn, scores, ids)
    if max_rows is not None or dropped_rows is not None:
        check_max_rows(fn, max_rows, dropped_rows, ids, plan)
    if plan is not None:
        check_plan_of_ids(fn, plan, ids, w2.size(0))
    if expert_map is not None:
        if plan is not None:
            fail(ValueError, fn, "expert_map without plan, which is made with it", "both")
        check_expert_map(fn, expert_map, ids, w2.size(0))
    if max_rows is not None and max_rows < ids.numel():
        if mode != "codes":
            fail(ValueError, fn, f"max_rows >= T*K = {ids.numel()} with compute {mode!r}", max_rows)
        plan = _ops.route_plan(ids, w2.size(0), expert_map, max_rows, dropped_rows)
    if shared is not None or shared_gate is not None:
        check_shared(fn, shared, shared_gate, "x", x, x.shape)
    adapters = () if lora is None else lora[:6]
    needs_grad = paths.needs_grad(x, w1, w2, w3, *biases, scores, *adapters, shared, shared_gate)
    if out is not None:
        if needs_grad:
            fail(ValueError, fn, "out where no gradient is needed", "an argument that requires one")
        maps = (expert_map, *(plan or ()))
        inputs = (
            x,
            *_tensors_of(stored),
            *biases,
            scores,
            ids,
            *adapters,
            shared,
            shared_gate,
            *maps,
            *smooth,
        )
        check_out(fn, out, x, x.shape, inputs)
    scores, shared_gate = _as_scores(scores, x), _as_scores(shared_gate, x)
    path, _ = paths.path_of_experts(x, stored, mode, trains_fp8, is_composed, lora, plan, needs_grad)
    if path is paths.FP8:
        if plan is None:
            plan = _ops.route_plan(ids, w2.size(0), expert_map)
        how = (training, fp8, fp8_wgrad, needs_grad)
        made = (code, activation, constants, stored, given, main_grads, (shared, shared_gate))
        y = _trained_in_fp8(x, (w1, w2, w3), scores, plan, *how, *made)
        return y if out is None else out.copy_(y), plan.counts
    weights = _operands((w1, w2, w3), stored, given if any(main_grads) else None, is_composed)
    D, written = x.size(1), out
    # The portable tier computes experts of scored inputs at any width.
    if not on_input and _are_padded(x, weights, is_composed):
        x, weights, biases, lora, shared = widths.padded(x, weights, biases, lora, shared, code)
        if x.size(1) > D and out is not None:
            written = x.new_empty(x.shape)
    settings, shared = (code, _ops.ACTIVATION_CODES[activation], [*constants]), (shared, shared_gate)
    call = (biases, scores, ids, settings, on_input, expert_map, shared)
    if path is paths.EIGHT_BIT or path is paths.QUANTIZED:
        eight_bit = None
        if path is paths.EIGHT_BIT:
            eight_bit = computing.eight_bit_tensors(fn, mode, x, ids, stored, layout)
        return _quantized_experts(x, stored, eight_bit, smooth, call, out, needs_grad)
    if path is paths.EXPERTS:
        w1, w2, w3 = weights
        lists = ([w1], [w2], [] if w3 is None else [w3])
        y, counts, _ = _ops.infer(x, lists, *call, out=written)
    else:
        if plan is None:
            plan = _ops.route_plan(ids, w2.size(0), expert_map)
        counts = plan.counts
        if path is paths.COMPOSED:
            y = composed.experts(x, weights, biases, scores, plan, settings, score_on, lora, shared)
        else:
            experts = _experts_with_main_grads if any(main_grads) else _experts
            alpha, limit = constants
            operands = (x, *weights, *biases, scores)
            y = experts(*operands, plan, code, activation, alpha, limit, score_on, main_grads, shared)
    y = _narrowed(y, D)
    return (y if out is None or y is out else out.copy_(y)), counts


def _operands(weights: Weights, stored: Weights, main_grads: tuple | None, is_composed: bool) -> Weights:
    """w1, w2 and w3 as the experts' operators or their composition take them."""
    if main_grads is not None:
        weights = operands_of(stored, weights, main_grads)
    return _unless_quantized(weights, stored) if is_composed else weights


def _are_padded(x: Tensor, weights: Weights, is_composed: bool) -> bool:
    return not (is_composed and True in _is_quantized(weights)) and widths.are_padded(x, *weights)


def _trained_in_fp8(
    x, weights: Weights, scores, plan: Plan, training: Fp8Training, fp8, wgrad, needs_grad, code, activation,
    constants, stored, given, main_grads, shared=(None, None),
):  # fmt: skip
    """out of checked arguments. `fp8` is True or codes, `stored` and `given` are the caller's weights and
    main_grads."""
    if fp8 is True:
        fp8 = training.weights(*weights, code, needs_grad)
    if wgrad == "auto":
        assert plan.row_token is not None
        wgrad = "fp8" if wgrad_pays(plan.row_token.numel(), weights[1].size(0)) else "bf16"
    experts = _fp8_experts
    if any(main_grads):
        experts = _fp8_with_main_grads
        weights = operands_of(stored, weights, given)
    return experts(x, *weights, scores, plan, fp8, code, activation, constants, wgrad, main_grads, shared)


_EVERY_CALL = Fp8Training()


def _fp8_training(fp8) -> tuple[Fp8Training, Fp8Weights | bool | None]:
    """What quantises weights for a call, and what the caller may have said in its place."""
    return (fp8, True) if isinstance(fp8, Fp8Training) else (_EVERY_CALL, fp8)


def _plain_weights(
    fn: str, x_name: str, x: Tensor, weights: Weights, transposed: bool, main_grads, lora
) -> tuple[Weights, Weights, bool]:
    """The weights as operators read them; with tensors of their shapes in place of quantised ones, for the
    checks; and whether experts are computed as a composition."""
    quantized = _is_quantized(weights)
    if lora is None and True not in quantized:
        return weights, weights, False
    stored, plain = [*weights], [*weights]
    for i, name in enumerate(("w1", "w2", "w3")):
        if not quantized[i]:
            continue
        if transposed:
            fail(ValueError, fn, f"transposed=False with a quantised {name}", "transposed=True")
        stored[i] = w = read(weights[i])
        check_weight(fn, name, w, x_name, x)
        plain[i] = x.new_empty_strided(w.shape, (0, 0, 0))  # of one element
    if main_grads is not None and any(grad is not None for grad in main_grads):
        what = "lora" if lora is not None else "quantised weights"
        fail(ValueError, fn, f"no main_grads beside {what}", "some")
    return (stored[0], stored[1], stored[2]), (plain[0], plain[1], plain[2]), True


def _is_quantized(weights: tuple) -> list[bool]:
    w1, w2, w3 = weights
    return [
        isinstance(w1, QuantizedWeight),
        isinstance(w2, QuantizedWeight),
        isinstance(w3, QuantizedWeight),
    ]


class _WithoutGradient(torch.autograd.Function):
    """y, computed from inputs to which no gradient can flow: backward raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y, *inputs):
        return _ops._unsafe_view(y, y.shape)  # no view, so that callers may write it in place

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("fused_moe: fused_experts with another compute than 'codes' has no gradient")


# Function.apply itself reads the signature of forward first, which takes three times as long.
_apply_plainly = super(torch.autograd.Function, _WithoutGradient).apply


def _quantized_experts(
    x, weights: tuple, eight_bit: list | None, smooth: tuple, call: Call, out, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """(out, counts) by one operator, which keeps nothing for backward. Where 8 bits are multiplied by 8 bits,
    `eight_bit` are the weights' lists, and x and a are divided by `smooth`; else it is None, and values are
    multiplied. `call` is what `infer` takes behind the weights."""
    w1, w2, w3 = weights
    formats = [w1.code, 0 if w3 is None else w3.code, w2.code]  # in the schema's order; lists: w1, w2, w3
    quantized: tuple
    lists: Sequence[list[Tensor]]
    if eight_bit is None:
        quantized = (formats,)
        lists = (_listed(w1), _listed(w2), _listed(w3))
    else:
        quantized = (formats, True, w2.power_of_two)
        lists = eight_bit
        for own, factors in zip(eight_bit, smooth, strict=False):
            if factors is not None:
                own.append(factors)
    if not needs_grad:
        return _ops.infer(x, lists, *call, quantized=quantized, out=out)[:2]
    with torch.no_grad():
        y, counts, *_ = _ops.infer(x, lists, *call, quantized=quantized)
    if torch.jit.is_tracing():  # which has no place for a function of Python; the operator refuses gradients
        return y, counts
    biases, scores, *_, shared = call
    is_plain = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    apply = _apply_plainly if is_plain else _WithoutGradient.apply
    return apply(y, x, *biases, scores, *shared), counts


def _listed(w: QuantizedWeight | None) -> list[Tensor]:
    """A weight's tensors as operators take them: data, scale, and zero if there is one."""
    if w is None:
        return []
    data, scale, zero = w.tensors
    return [data, scale] if zero is None else [data, scale, zero]


def _unless_quantized(views: Weights, stored: Weights) -> Weights:
    """The checked views of the weights; of a quantised one itself."""
    w1, w2, w3 = (
        w if isinstance(w, QuantizedWeight) else view for view, w in zip(views, stored, strict=True)
    )
    return w1, w2, w3


def _tensors_of(weights: tuple) -> list[Tensor | None]:
    return [t for w in weights for t in (w.tensors if isinstance(w, QuantizedWeight) else (w,))]


def grouped_mlp(
    x_rows: Tensor,
    w1: Tensor | QuantizedWeight,
    w2: Tensor | QuantizedWeight,
    w3: Tensor | QuantizedWeight | None,
    counts: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    layout: str = "separate",
    transposed: bool = False,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    lora: LoRA | None = None,
    fp8: Fp8Weights | bool | None = None,
    fp8_wgrad: str = "auto",
) -> Tensor:
    """Applies every expert to its own rows, which are contiguous, as a token dispatcher returns them.

    The arguments that are not listed are those of `fused_experts`. Quantised weights have compute "codes".
    With fp8_wgrad="auto" rows past counts.sum() are counted as an expert's.

    Args:
        x_rows: (R, D), floating: counts[0] rows of expert 0, then counts[1] of expert 1, ... Rows past
            counts.sum() may hold garbage, which has no effect. Output and gradients are zero there.
        w1: gate (E, F, D).
        w2: down (E, D, F).
        w3: up (E, F, D), or None.
        counts: (E,) of any integer dtype, on x_rows' device. On a GPU the host never reads them.

    Returns:
        (R, D) in x_rows' dtype, differentiable in x_rows, weights, biases and adapters.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> w1, w2, w3 = (torch.randn(3, *s) for s in ((16, 8), (8, 16), (16, 8)))
        >>> fused_moe.grouped_mlp(torch.randn(6, 8), w1, w2, w3, torch.tensor([4, 0, 2])).shape
        torch.Size([6, 8])
    """
    fn = "grouped_mlp"
    check_input(fn, "x_rows", x_rows, 2)
    check_activation(fn, activation, alpha, limit)
    check_layout(fn, layout)
    weights, biases = (w1, w2, w3), (b1, b2, b3)
    training, fp8 = _fp8_training(fp8)
    trains_fp8 = (fp8 is not None or fp8_wgrad != "auto") and check_options(
        fn, fp8, fp8_wgrad, weights, biases, "output", lora, None, ()
    )
    stored, plain, is_composed = _plain_weights(fn, "x_rows", x_rows, weights, transposed, main_grads, lora)
    if is_composed:
        computing.check_codes(fn, stored)
    w1, w2, w3, code = check_experts(fn, "x_rows", x_rows, *plain, *biases, layout, transposed)
    if lora is not None:
        check_lora(fn, lora, "x_rows", x_rows, (w1, w2, w3))
    given, main_grads = main_grads, check_main_grads(fn, main_grads, "x_rows", x_rows, plain, transposed)
    check_tensor(fn, "counts", counts, 1, INTEGERS)
    check_shape(fn, "counts", counts, "E", (w2.size(0),))
    check_device(fn, "counts", counts, "x_rows", x_rows)
    check_counts(fn, counts, x_rows.size(0))
    if trains_fp8:
        check_operands(fn, fp8, x_rows, w1, w2, w3, code)
        # Rows are tokens of one slot, as passes over tokens go by a plan with row maps.
        row = torch.arange(x_rows.size(0), device=counts.device)
        ids = torch.searchsorted(counts.to(torch.int64).cumsum(0), row, right=True).unsqueeze(1)
        scores = torch.ones_like(ids, dtype=torch.float32)
        how = (training, fp8, fp8_wgrad, paths.needs_grad(x_rows, w1, w2, w3))
        made = (code, activation, (alpha, limit), stored, given, main_grads)
        return _trained_in_fp8(x_rows, (w1, w2, w3), scores, _ops.route_plan(ids, w2.size(0)), *how, *made)
    weights = _operands((w1, w2, w3), stored, given if any(main_grads) else None, is_composed)
    D = x_rows.size(1)
    if _are_padded(x_rows, weights, is_composed):
        x_rows, weights, biases, lora, _ = widths.padded(x_rows, weights, biases, lora, None, code)
    plan = _ops.plan_from_counts(counts, x_rows.size(0))
    if is_composed:
        settings = (code, _ops.ACTIVATION_CODES[activation], [alpha, limit])
        y = composed.experts(x_rows, weights, biases, None, plan, settings, "output", lora)
    else:
        experts = _experts_with_main_grads if any(main_grads) else _experts
        operands = (x_rows, *weights, *biases, None)
        y = experts(*operands, plan, code, activation, alpha, limit, "output", main_grads)
    return _narrowed(y, D)
