"""The specification: every public name of fused_moe in plain PyTorch, differentiable by autograd.

It is written for clarity and is correct in any floating dtype, float64 included. The tests compare the
kernels with it. `reference.fused_experts` is also the for-loop baseline of the benchmarks and of
`examples/train_lm.py --experts loop`: it sorts rows by expert once, then computes one expert after another.

Letters: T tokens, D model width, F expert hidden width, E experts, K experts per token, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from . import module
from .activation import activate
from .checks import INTEGERS, check_num_experts, check_tensor, fail, is_autocast_enabled
from .fp8 import peak_scale, wgrad_pays
from .lora import LoRA
from .losses import load_balancing_loss, router_z_loss
from .main_grad import gradient_of
from .ops import FACTS, schedule_words
from .padding import is_real, zero_padding
from .plan import Plan
from .quantized.computing import auto_takes_codes, mode_of
from .quantized.formats import E8M0, FORMATS
from .quantized.weight import QuantizedWeight, check_weight, read

__all__ = [
    "FusedMoE",
    "activate",
    "check_ids",
    "dequantize",
    "fused_experts",
    "grouped_mlp",
    "grouped_mm",
    "linear",
    "load_balancing_loss",
    "permute",
    "plan_from_counts",
    "quantize_rows",
    "route",
    "route_plan",
    "router_logits",
    "router_z_loss",
    "unpermute",
]

# --- routing ------------------------------------------------------------------------------------------


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `fused_moe.router_logits`: logits (T, E) = x @ weight.T + bias in float32 or wider.

    Operands are those that autocast has rounded. Arguments are not checked.

    Example:
        >>> x, weight = torch.randn(5, 8), torch.randn(3, 8)
        >>> expected = fused_moe.reference.router_logits(x, weight)
        >>> torch.allclose(fused_moe.router_logits(x, weight), expected, atol=1e-5)
        True
    """
    if is_autocast_enabled(x):
        if x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return router_logits(x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def _top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, largest first, ties to the lowest index, NaN first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _sqrtsoftplus(x: Tensor) -> Tensor:
    """sqrt(softplus(x)). Far below zero that is exp(x / 2), which does not underflow as exp(x) does."""
    low = x < -37
    high = F.softplus(torch.where(low, 0, x), threshold=50).sqrt()
    return torch.where(low, (torch.where(low, x, 0) / 2).exp(), high)


SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": Tensor.sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}


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
    """Computes `fused_moe.route`: scores (T, K) and ids (T, K) int32 of every token's K best experts.

    Arguments are not checked. Without bias and groups the top-k is that of the logits, so it does not depend
    on how a tier rounds its exponential. With them it is that of score + bias, as in torchtitan, among
    experts whose bias is not -infinity. A token whose given ids are all -1 has the K best. Slots without an
    expert have id -1, score 0 and no gradient: those of other given ids outside [0, E), those of tokens from
    num_tokens on, and those for which no expert is left.

    Example:
        >>> logits = torch.randn(5, 4)
        >>> expected, ids = fused_moe.reference.route(logits, top_k=2)
        >>> torch.equal(fused_moe.route(logits, top_k=2)[1], ids)
        True
    """
    logits = zero_padding(logits if logits.dtype == torch.float64 else logits.float(), num_tokens)
    all_scores = SCORES[score_func](logits)
    with torch.no_grad():
        choice = logits if bias is None and num_expert_groups is None else all_scores
        if bias is not None:
            bias = bias.float()
            choice = torch.where(bias == -torch.inf, bias, choice + bias)
        if num_expert_groups is not None:
            assert num_limited_groups is not None
            groups = choice.unflatten(-1, (num_expert_groups, -1))
            num_best = 2 if group_score == "top2" else 1
            worth = groups.sort(-1, descending=True).values[..., :num_best].sum(-1)
            kept = torch.zeros_like(worth, dtype=torch.bool)
            kept.scatter_(-1, _top_k(worth, num_limited_groups), True)
            choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        best = _top_k(choice, top_k)
        if bias is not None:
            best = torch.where(choice.gather(-1, best) == -torch.inf, -1, best)
        ids = best if ids is None else torch.where((ids.long() == -1).all(-1, True), best, ids.long())
        has_expert = (ids >= 0) & (ids < logits.size(-1))
        if num_tokens is not None:
            has_expert = has_expert & is_real(num_tokens, ids).unsqueeze(-1)
        ids = torch.where(has_expert, ids, -1)
    scores = torch.where(has_expert, all_scores.gather(-1, ids.clamp_min(0)), 0)
    if route_norm:
        scores = scores / (scores.sum(-1, keepdim=True) + route_norm_eps)
    scores = scores * route_scale
    if expert_scale is not None:
        scores = scores * torch.where(has_expert, expert_scale.to(scores.dtype)[ids], 0)
    return scores, ids.int()


def _slice_rows(num_rows: int, num_experts: int, num_sms: int) -> int:
    """Rows of a split-K slice, at most: fused_moe_slice_rows of csrc/schedule.h."""
    parts = max(num_experts, num_sms // 2)
    rows = max(2 * num_rows // parts if parts else num_rows, FACTS["constants"]["MIN_SLICE"])
    return -(-min(rows, max(num_rows, 1)) // 64) * 64


def _schedule(counts: Tensor, num_rows: int) -> Tensor:
    """The tile schedule of csrc/schedule.h for at most num_rows rows. Words past its lists are zeros."""
    names = "TILE_ROWS", "SKINNY_ROWS", "SLICE_SMS"
    tile_rows, skinny_rows, num_sms = (FACTS["constants"][name] for name in names)
    E, device = counts.numel(), counts.device
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    slice_rows = _slice_rows(num_rows, E, num_sms)

    def experts_of(*masks: Tensor) -> Tensor:
        return torch.cat([mask.nonzero().flatten() for mask in masks])

    def ends(experts: Tensor, rows: int) -> Tensor:
        return ((counts[experts] + rows - 1) // rows).clamp_min(1).cumsum(0)

    full, skinny = counts > skinny_rows, (counts > 0) & (counts <= skinny_rows)
    active = experts_of(full, skinny)
    sliced = experts_of(counts > slice_rows, counts <= slice_rows)
    tile_ends, slice_ends = ends(active, tile_rows), ends(sliced, slice_rows)
    num_full = int(full.sum())
    tiles = int(tile_ends[-1]) if len(active) else 0
    full_tiles = int(tile_ends[num_full - 1]) if num_full else 0
    share = -(-(tiles - full_tiles) * 2**32 // tiles) if full_tiles else 0
    share -= 2**32 if share >= 2**31 else 0  # uint32, in an int32 tensor
    head = (len(active), num_full, tiles, full_tiles, share, int(slice_ends[-1]), slice_rows, tile_rows)
    schedule = torch.zeros(schedule_words(E), dtype=torch.int32, device=device)
    lists = schedule[len(head) :].view(4, E)
    schedule[: len(head)] = torch.tensor(head, dtype=torch.int32)
    lists[0, : len(active)], lists[1, : len(active)] = active, tile_ends
    lists[2], lists[3] = sliced, slice_ends
    return schedule


def route_plan(
    ids: Tensor, num_experts: int, expert_map: Tensor | None = None, *, max_rows: int | None = None
) -> Plan:
    """Computes `fused_moe.route_plan`: a stable sort of the slots of ids (T, K) by expert.

    Arguments are not checked. Ids outside [0, E) get no row, nor do the last ones of the sort past max_rows.
    With expert_map (E_global,), id i is the expert expert_map[i]; ids outside [0, E_global) get no row.

    Example:
        >>> ids = torch.tensor([[1, 0], [1, 2]])
        >>> expected = fused_moe.reference.route_plan(ids, num_experts=3)
        >>> torch.equal(fused_moe.route_plan(ids, 3).token_row, expected.token_row)
        True
    """
    size = ids.numel() if max_rows is None else min(max_rows, ids.numel())
    flat = ids.flatten().long()
    if expert_map is not None:
        is_known = (flat >= 0) & (flat < len(expert_map))
        flat = torch.where(is_known, expert_map[torch.where(is_known, flat, 0)].long(), -1)
    has_row = (flat >= 0) & (flat < num_experts)
    order = torch.where(has_row, flat, num_experts).argsort(stable=True)
    has_row = has_row.index_fill(0, order[size:], False)
    counts = flat[has_row].bincount(minlength=num_experts)
    num_rows = int(counts.sum())
    row_slot = torch.full_like(order, -1)
    row_slot[:num_rows] = order[:num_rows]
    row_token = torch.full_like(order, -1)
    row_token[:num_rows] = order[:num_rows] // ids.size(1)
    token_row = torch.full_like(order, -1)
    token_row[order[:num_rows]] = torch.arange(num_rows, device=ids.device)
    return Plan(
        counts.int(),
        F.pad(counts.cumsum(0), (1, 0)).int(),
        _schedule(counts, size),
        row_token[:size].int(),
        row_slot[:size].int(),
        token_row.view(ids.shape).int(),
    )


def plan_from_counts(counts: Tensor, num_rows: int) -> Plan:
    """Computes `fused_moe.plan_from_counts`: the plan of contiguous rows that are grouped by expert already.

    Arguments are not checked.

    Example:
        >>> fused_moe.reference.plan_from_counts(torch.tensor([2, 0, 3]), num_rows=5).offsets.tolist()
        [0, 2, 2, 5]
    """
    counts = counts.long()
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    return Plan(counts.int(), offsets, _schedule(counts, num_rows), None, None, None)


def check_ids(ids: Tensor, num_experts: int) -> None:
    """Raises if an id is outside [0, E), where the functions treat it as remote and skip its slot.

    Ids that start at 1 would otherwise give every token the next expert, and the last expert's tokens none.
    The message has the number of such ids, the first one, and whether they look off by one. It reads the
    ids, so on a GPU the host synchronises: call it on the first batch only.

    Args:
        ids: (T, K) of any integer dtype.
        num_experts: E.

    Raises:
        TypeError: ids are no tensor of an integer dtype.
        ValueError: an id is outside [0, E).

    Example:
        >>> fused_moe.reference.check_ids(torch.tensor([[0, 1]]), num_experts=2)
        >>> fused_moe.reference.check_ids(torch.tensor([[1, 2]]), num_experts=2)
        Traceback (most recent call last):
        ValueError: ...they run from 1 to E, so subtract 1
    """
    fn = "check_ids"
    check_tensor(fn, "ids", ids, 2, INTEGERS)
    check_num_experts(fn, num_experts)
    bad = ((ids < 0) | (ids >= num_experts)).nonzero().tolist()
    if bad:
        token, slot = bad[0]
        off_by_one = int(ids.min()) == 1 and int(ids.max()) == num_experts
        advice = "; they run from 1 to E, so subtract 1" if off_by_one else ""
        found = f"{len(bad)} outside, the first {int(ids[token, slot])} at token {token}, slot {slot}{advice}"
        fail(ValueError, fn, f"ids from 0 to E - 1 = {num_experts - 1}", found)


# --- rows ------------------------------------------------------------------------------------------------


def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Plan]:
    """Computes `fused_moe.permute`: rows (T*K, D), the token of every row, zero past the last row; and the
    plan.

    Arguments are not checked.

    Example:
        >>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]])
        >>> fused_moe.reference.permute(x, ids, num_experts=2)[0].tolist()
        [[2.0], [1.0]]
    """
    plan = route_plan(ids, num_experts)
    return _permuted(x, plan), plan


def _permuted(x: Tensor, plan: Plan) -> Tensor:
    assert plan.row_token is not None
    in_use = (plan.row_token >= 0).unsqueeze(-1)
    return torch.where(in_use, x[plan.row_token.clamp_min(0).long()], 0)


def unpermute(
    rows: Tensor,
    plan: Plan,
    scores: Tensor | None = None,
    *,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Computes `fused_moe.unpermute`: every token's rows, weighted by the scores and summed.

    out[t] = sum over k of scores[t, k] * rows[token_row[t, k]] + sigmoid(shared_gate[t]) * shared[t], summed
    in float32 or wider and rounded once. Without a gate shared[t] is added as it is. Arguments are not
    checked.

    Example:
        >>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 2]])
        >>> rows, plan = fused_moe.reference.permute(x, ids, num_experts=3)
        >>> fused_moe.reference.unpermute(rows, plan).tolist()
        [[2.0], [4.0]]
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    assert plan.token_row is not None
    has_row = (plan.token_row >= 0).unsqueeze(-1)
    gathered = torch.where(has_row, rows[plan.token_row.clamp_min(0).long()], 0).to(wide)
    if scores is not None:
        gathered = gathered * scores.unsqueeze(-1).to(wide)
    out = gathered.sum(1)
    if shared is not None:
        gate = 1 if shared_gate is None else shared_gate.to(wide).sigmoid().view(-1, 1)
        out = out + gate * shared.to(wide)
    return out.to(rows.dtype)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """Computes `fused_moe.grouped_mm`: out[r] = a[r] @ b[e].T + bias[e] for the rows r of expert e.

    Rows past the last one are zero. Arguments are not checked.

    Example:
        >>> a, b, offsets = torch.randn(3, 2), torch.randn(2, 4, 2), torch.tensor([1, 3], dtype=torch.int32)
        >>> expected = fused_moe.reference.grouped_mm(a, b, offsets)
        >>> torch.allclose(fused_moe.grouped_mm(a, b, offsets), expected, atol=1e-5)
        True
    """
    out, first = [], 0
    biases = [None] * b.size(0) if bias is None else bias.unbind()
    for expert, expert_bias, end in zip(b.unbind(), biases, offsets.tolist(), strict=True):
        out.append(F.linear(a[first:end], expert, expert_bias))
        first = end
    return torch.cat([*out, out[0].new_zeros(a.size(0) - first, b.size(1))])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `fused_moe.linear` by torch.nn.functional.linear.

    Example:
        >>> fused_moe.reference.linear(torch.randn(5, 8), torch.randn(3, 8)).shape
        torch.Size([5, 3])
    """
    return F.linear(x, weight, bias)


# --- experts ---------------------------------------------------------------------------------------------


def dequantize(w: QuantizedWeight, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the values of a QuantizedWeight (E, out, in), computed one block after another.

    value = (code - zero) * scale in float32, rounded to dtype (default: w's).

    Example:
        >>> w = fused_moe.quantize(torch.randn(2, 8, 64), "int8")
        >>> torch.equal(fused_moe.reference.dequantize(w), w.dequantize())
        True
    """
    w = read(w)
    check_weight("dequantize", "", w)
    E, rows, cols = w.shape
    data, scales, zeros = w.data, w.scale, w.zero
    codes, rules = data, FORMATS[w.format]
    if rules.per_byte == 2:
        codes = torch.zeros(E, rows, cols, dtype=torch.long, device=w.device)
        codes[..., 0::2], codes[..., 1::2] = data % 16, data // 16
    if rules.code == "e2m1":
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=w.device)
        values = magnitudes[codes % 8] * torch.where(codes < 8, 1, -1)
    else:
        values = codes.float() - (8 if rules.code == "int4" else 0)
    out = torch.empty_like(values)
    num_row_blocks, num_col_blocks = scales.shape[1:]
    is_square = rules.block == "square_128"
    height = 128 if is_square else rows // num_row_blocks
    width = 128 if is_square else cols // num_col_blocks
    for i in range(num_row_blocks):
        for j in range(num_col_blocks):
            block = (slice(None), slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale = scales[:, i, j]
            zero: Tensor | int = 0
            if rules.scale_dtypes == E8M0:
                scale = torch.where(scale == 255, torch.nan, 2.0 ** (scale.double() - 127))
            if zeros is not None:
                zero = zeros[:, i, j].view(E, 1, 1)
            out[block] = (values[block] - zero) * scale.float().view(E, 1, 1)
    return out.to(w.dtype if dtype is None else dtype)


class _WithMainGrad(torch.autograd.Function):
    """A weight whose gradient is accumulated into main_grad; `gradient_of` says what its .grad is."""

    @staticmethod
    def forward(ctx, w: Tensor, main_grad: Tensor) -> Tensor:
        ctx.w, ctx.main_grad = w, main_grad
        return w.view_as(w)

    @staticmethod
    def backward(ctx, dw: Tensor):
        ctx.main_grad.add_(dw)
        return gradient_of(ctx.w, ctx.next_functions[0][0]), None


def _activated(x: Tensor, w1, w3, b1, b3, layout: str, **activation) -> Tensor:
    """a (R_e, F) of one expert's rows (R_e, D); weights are (out, in)."""
    gate, up = F.linear(x, w1, b1), None
    if layout == "halves":
        gate, up = gate.chunk(2, dim=-1)
    elif layout == "interleaved":
        gate, up = gate[..., 0::2], gate[..., 1::2]
    elif w3 is not None:
        up = F.linear(x, w3, b3)
    return activate(gate, up, **activation)


def _expert(x: Tensor, w1, w2, w3, b1, b2, b3, layout: str, **activation) -> Tensor:
    """One expert on its rows (R_e, D)."""
    return F.linear(_activated(x, w1, w3, b1, b3, layout, **activation), w2, b2)


@overload
def _operand(w: Tensor | QuantizedWeight, main_grad: Tensor | None, dtype: torch.dtype) -> Tensor: ...
@overload
def _operand(
    w: Tensor | QuantizedWeight | None, main_grad: Tensor | None, dtype: torch.dtype
) -> Tensor | None: ...
def _operand(
    w: Tensor | QuantizedWeight | None, main_grad: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The values of a weight; their gradient is added to main_grad."""
    values = dequantize(w, dtype) if isinstance(w, QuantizedWeight) else w
    return values if main_grad is None else _WithMainGrad.apply(values, main_grad)


@overload
def _adapted(w: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor: ...
@overload
def _adapted(w: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor | None: ...
def _adapted(w: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor | None:
    """w + scale * b a, where there are adapters."""
    if a is None:
        return w
    assert w is not None and b is not None
    return w + scale * (b.to(w.dtype) @ a.to(w.dtype))


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
    lora: LoRA | None = None,
) -> Tensor:
    """Computes `fused_moe.grouped_mlp`, one expert after another; zero past the last row.

    Arguments are not checked.

    Example:
        >>> w1, w2, w3 = (torch.randn(3, *s) for s in ((16, 8), (8, 16), (16, 8)))
        >>> args = torch.randn(6, 8), w1, w2, w3, torch.tensor([4, 0, 2])
        >>> expected = fused_moe.reference.grouped_mlp(*args)
        >>> torch.allclose(fused_moe.grouped_mlp(*args), expected, atol=1e-3)
        True
    """
    dtype = x_rows.dtype
    g1, g2, g3 = main_grads or (None, None, None)
    w1, w2, w3 = _operand(w1, g1, dtype), _operand(w2, g2, dtype), _operand(w3, g3, dtype)
    num_experts = w2.size(0)
    if layout == "interleaved" and w1.dim() == 4:
        w1 = w1.flatten(1, 2)
    if transposed:
        w1, w2 = w1.mT, w2.mT
        w3 = None if w3 is None else w3.mT
    if lora is not None:
        (a1, l1), (a2, l2), (a3, l3) = lora.pairs
        w1, w2 = _adapted(w1, a1, l1, lora.scale), _adapted(w2, a2, l2, lora.scale)
        w3 = _adapted(w3, a3, l3, lora.scale)
    # unbind, not w[e]: its backward stacks E gradients once; that of indexing fills E full tensors
    params: list[Sequence[Any]]
    params = [[None] * num_experts if p is None else p.unbind() for p in (w1, w2, w3, b1, b2, b3)]
    act: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit}
    rows = x_rows.split([*counts.tolist(), x_rows.size(0) - int(counts.sum())])
    out = [
        _expert(x, m1, m2, m3, c1, c2, c3, layout, **act)
        for x, m1, m2, m3, c1, c2, c3 in zip(rows[:-1], *params, strict=True)
    ]
    return torch.cat([*out, out[0].new_zeros(rows[-1].shape)])


def fused_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    scores: Tensor,
    ids: Tensor,
    *,
    score_on: str = "output",
    expert_map: Tensor | None = None,
    max_rows: int | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    compute: str | None = None,
    smooth1: Tensor | None = None,
    smooth2: Tensor | None = None,
    fp8: bool | None = None,
    fp8_wgrad: str = "auto",
    **experts: Any,
) -> Tensor:
    """Computes `fused_moe.fused_experts`, one expert after another.

    out[t] = sum over k of scores[t, k] * expert(ids[t, k])(x[t]) + sigmoid(shared_gate[t]) * shared[t]. The
    arguments in `experts` are those of `grouped_mlp`. Arguments are not checked.

    Example:
        >>> x, w1, w2, w3 = torch.randn(5, 8), *(torch.randn(4, *s) for s in ((16, 8), (8, 16), (16, 8)))
        >>> args = x, w1, w2, w3, *fused_moe.route(torch.randn(5, 4), top_k=2)
        >>> expected = fused_moe.reference.fused_experts(*args)
        >>> torch.allclose(fused_moe.fused_experts(*args), expected, atol=1e-3)
        True
    """
    compute = mode_of("fused_experts", compute, (w1, w2, w3))
    if compute == "auto" and auto_takes_codes(ids.numel(), w2.size(0)):
        compute = "codes"
    plan = route_plan(ids, w2.size(0), expert_map, max_rows=max_rows)
    if fp8:
        if fp8_wgrad == "auto":
            assert plan.row_token is not None
            fp8_wgrad = "fp8" if wgrad_pays(plan.row_token.numel(), w2.size(0)) else "bf16"
        return _fp8_experts(x, w1, w2, w3, scores, plan, fp8_wgrad, shared, shared_gate, **experts)
    rows = _permuted(x, plan)
    if score_on == "input":
        wide = torch.promote_types(x.dtype, torch.float32)
        assert plan.row_slot is not None
        row_scores = scores.flatten()[plan.row_slot.clamp_min(0).long()].unsqueeze(-1)
        rows = (rows.to(wide) * row_scores.to(wide)).to(x.dtype)
    if compute == "codes":
        y = grouped_mlp(rows, w1, w2, w3, plan.counts, **experts)
    else:
        q1, q2, q3 = cast("tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight | None]", (w1, w2, w3))
        y = _eight_bit_mlp(rows, q1, q2, q3, plan.counts, smooth1, smooth2, **experts)
    of_rows = scores if score_on == "output" else None
    return unpermute(y, plan, of_rows, shared=shared, shared_gate=shared_gate)


# --- experts, 8 bits by 8 bits -----------------------------------------------------------------------------


def quantize_rows(rows: Tensor, format: str, *, power_of_two: bool = False) -> Tensor:
    """Returns the values of rows (R, width) that are rounded to 8 bits with one scale each.

    They are rounded to e4m3, or, beside a weight of format int8, to integers from -127 to 127. scale = peak /
    largest in float32, peak being a row's largest magnitude and `largest` 448 or 127. It is 1 where the peak
    is 0, else at least 2^-120, and rounded up to a power of two if that is asked for. code = value * (1 /
    scale), rounded to the nearest, ties to even. A NaN makes its row NaN.

    Example:
        >>> fused_moe.reference.quantize_rows(torch.tensor([[127.0, 1.4]]), "int8")
        tensor([[127.,   1.]])
    """
    largest = 127.0 if format == "int8" else 448.0
    rows, wide = rows.float(), torch.promote_types(rows.dtype, torch.float32)
    peak = rows.abs().amax(-1, keepdim=True)
    scale = peak_scale(peak, largest)
    if power_of_two:
        mantissa, exponent = scale.frexp()  # mantissas from 0.5 to 1
        rounded = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = torch.where(scale <= 1e38, rounded, scale)
    codes = rows * (1 / scale)
    codes = codes.round().clamp(-largest, largest) if format == "int8" else codes.to(torch.float8_e4m3fn)
    return codes.to(wide) * scale.to(wide)


@torch.no_grad()
def _eight_bit_mlp(
    x_rows: Tensor,
    w1: QuantizedWeight,
    w2: QuantizedWeight,
    w3: QuantizedWeight | None,
    counts: Tensor,
    smooth1: Tensor | None,
    smooth2: Tensor | None,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    layout: str = "separate",
    lora: None = None,
    **activation,
) -> Tensor:
    """grouped_mlp of rows that are rounded to the weights' 8 bits before each GEMM. Without gradients.

    Sums and h are float32; a is, too, beside fp8_block, else it is rounded to x's dtype.
    """
    format, dtype = w2.format, x_rows.dtype
    smooth1 = w1.smooth if smooth1 is None else smooth1
    smooth2 = w2.smooth if smooth2 is None else smooth2
    wide = torch.promote_types(dtype, torch.float32)

    def quantized(rows: Tensor, smooth: Tensor | None, e: int) -> Tensor:
        rows = rows if smooth is None else (rows.float() * (1 / smooth[e])).to(wide)
        return quantize_rows(rows, format, power_of_two=w2.power_of_two)

    gate, up, down = dequantize(w1, wide), None if w3 is None else dequantize(w3, wide), dequantize(w2, wide)
    out = x_rows.new_zeros(x_rows.size(0), w2.size(1))
    first = 0
    for e, end in enumerate(counts.cumsum(0).tolist()):
        m1, m3, c1, c3 = (None if t is None else t[e].to(wide) for t in (gate, up, b1, b3))
        a = _activated(quantized(x_rows[first:end], smooth1, e), m1, m3, c1, c3, layout, **activation)
        if format == "fp8_block":  # one scale for 128 columns of a row
            a = torch.cat([quantized(part, None, e) for part in a.split(128, dim=-1)], -1)
        else:
            a = quantized(a.to(dtype), smooth2, e)
        bias = None if b2 is None else b2[e].to(wide)
        out[first:end] = F.linear(a.to(wide), down[e], bias)
        first = end
    return out


# --- experts trained in FP8 --------------------------------------------------------------------------------


def _by_128_columns(rows: Tensor) -> Tensor:
    """rows (R, width), with one scale for 128 columns of a row."""
    return torch.cat([quantize_rows(part, "fp8_block").double() for part in rows.split(128, dim=-1)], -1)


def _by_blocks(w: Tensor) -> Tensor:
    """w (out, in), with one scale for a block of 128x128."""
    blocks = w.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = peak_scale(blocks.abs().amax((1, 3), keepdim=True))
    codes = (blocks * (1 / scale)).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(2).flatten(0, 1)


def _by_columns(rows: Tensor, other_scale: Tensor) -> Tensor:
    """rows (R, width) as a weight gradient reads them, with one scale for 128 rows and 128 columns. The
    scales (R, 1) of the other operand's rows are folded into the codes."""
    values = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
    if not len(rows):
        return values
    blocks = (t.split(128) for t in (rows.float(), other_scale, values))
    for block, scales, out in zip(*blocks, strict=True):
        for part, into in zip(block.split(128, dim=1), out.split(128, dim=1), strict=True):
            scale = peak_scale((scales * part.abs()).amax())
            codes = (part * (scales * (1 / scale))).to(torch.float8_e4m3fn)
            into.copy_(codes.double() * (scale.double() / scales.double()))
    return values


class _Fp8Expert(torch.autograd.Function):
    """scores * expert(x) for rows of one expert. GEMMs are float64, of operands that were quantised."""

    @staticmethod
    def forward(ctx, x, up, down, scores, act, wgrad, dtype):
        """x (R, D) and scores (R, 1) float64, x rounded to dtype. up (H, D): gates, then ups. down (D, F)."""
        h = quantize_rows(x.to(dtype), "fp8_block").double() @ _by_blocks(up).mT
        y = (_by_128_columns(act(h)) @ _by_blocks(down).mT).to(dtype).double()
        ctx.save_for_backward(x.to(dtype), up, down, scores, h.to(dtype))
        ctx.act, ctx.wgrad = act, wgrad
        return scores * y

    @staticmethod
    def backward(ctx, dout):
        x, up, down, scores, h = ctx.saved_tensors
        dout = dout.to(x.dtype)
        g = (quantize_rows(dout, "fp8_block").double() @ _by_blocks(down)).to(x.dtype).double()
        with torch.enable_grad():
            leaf = h.double().requires_grad_()
            a = ctx.act(leaf)
        (dh,) = torch.autograd.grad(a, leaf, scores * g)
        dh, a_scaled = dh.to(x.dtype), (scores * a.detach()).to(x.dtype)
        dx = _by_128_columns(dh) @ _by_blocks(up)
        if ctx.wgrad == "fp8":
            x_scale, dout_scale = (peak_scale(t.float().abs().amax(-1, keepdim=True)) for t in (x, dout))
            dh, a_scaled = _by_columns(dh, x_scale), _by_columns(a_scaled, dout_scale)
            x, dout = (quantize_rows(t, "fp8_block") for t in (x, dout))
        dup = dh.double().mT @ x.double()
        ddown = dout.double().mT @ a_scaled.double()
        dscores = (g * a.detach()).sum(-1, keepdim=True)
        return dx.to(h.dtype).double(), dup.to(up.dtype), ddown.to(down.dtype), dscores, None, None, None


def _fp8_experts(
    x, w1, w2, w3, scores, plan: Plan, wgrad: str, shared, shared_gate, *, layout="separate",
    transposed=False, main_grads=None, **activation,
):  # fmt: skip
    """fused_experts of a call that trains in FP8."""
    w1, w2, w3 = (
        w if main_grad is None else _WithMainGrad.apply(w, main_grad)
        for w, main_grad in zip((w1, w2, w3), main_grads or (None,) * 3, strict=True)
    )
    if layout == "interleaved" and w1.dim() == 4:
        w1 = w1.flatten(1, 2)
    if transposed:
        w1, w2, w3 = w1.mT, w2.mT, None if w3 is None else w3.mT
    if layout == "interleaved":
        w1 = torch.cat((w1[:, 0::2], w1[:, 1::2]), 1)
    elif w3 is not None:
        w1 = torch.cat((w1, w3), 1)
    is_gated = w1.size(1) == 2 * w2.size(2)

    def act(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1) if is_gated else (h, None)
        return activate(gate, up, **activation)

    assert plan.row_token is not None and plan.row_slot is not None
    counts = [*plan.counts.tolist(), len(plan.row_token) - int(plan.counts.sum())]
    *rows, rest = _permuted(x.double(), plan).split(counts)
    row_scores = scores.double().flatten()[plan.row_slot.clamp_min(0).long()].unsqueeze(-1)
    parts = zip(rows, w1.unbind(), w2.unbind(), row_scores.split(counts)[:-1], strict=True)
    y = torch.cat([*(_Fp8Expert.apply(*part, act, wgrad, x.dtype) for part in parts), rest])
    return unpermute(y, plan, shared=shared, shared_gate=shared_gate).to(x.dtype)


class _Router(module.Router):
    def forward(self, x: Tensor, expert_bias: Tensor | None, **given) -> tuple[Tensor, Tensor, Tensor]:
        keeps_dtype = self.gate.router_dtype is not None
        with torch.autocast(x.device.type, enabled=False) if keeps_dtype else nullcontext():
            logits = router_logits(x, self.gate.weight, self.gate.bias)
        given["expert_scale"] = self.expert_scale
        scores, ids = route(logits, self.top_k, bias=expert_bias, **self.routing, **given)
        return scores, ids, logits


class _Experts(module.Experts):
    def forward(  # type: ignore[override]  # shared experts are added after it
        self, x: Tensor, scores: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        settings = {name: value for name, value in self.settings.items() if value is not None}
        if "fp8" in settings:
            settings["fp8"] = True
        out = fused_experts(x, self.w1, self.w2, self.w3, scores, ids, **settings)
        return out, route_plan(ids, self.num_experts).counts


class FusedMoE(module.FusedMoE):
    """`fused_moe.FusedMoE` with the same parameters, computed by this file's for-loop over the experts.

    Example:
        >>> fused = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> plain = fused_moe.reference.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> _ = plain.load_state_dict(fused.state_dict())
        >>> x = torch.randn(5, 8)
        >>> torch.allclose(fused(x), plain(x), atol=1e-5)
        True
    """

    router_type = _Router
    experts_type = _Experts
