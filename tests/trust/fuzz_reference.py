"""What the public functions compute, once more in plain PyTorch, with autograd for the gradients.

Nothing here is shared with the kernels or with fused_moe.reference: rows are padded to (E, C) batches, so
there is no sort and no loop over experts. Every function is evaluated twice:

  exact   in float64
  eager   in float32 (float64 for float64), rounded where PyTorch's operators would round to 16 bits.
          PyTorch's own 16-bit GEMMs compile a kernel for every new shape, which takes longer than a case.

Both take the side of a kink from h as it is stored, as the kernels do: otherwise rounding h to 16 bits would
decide a gradient. `near_kink` says which rows float32's own errors could move across one.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

F32, F64 = torch.float32, torch.float64
NEAR = 1e-5  # scores that float32 may take for equal, or for the other way round
MARGIN = 2e-5  # of an h of order one: many times what float32 sums in another order differ by


class _Round(torch.autograd.Function):
    """Rounds to a narrower dtype and back: the value, and the gradient on its way back."""

    @staticmethod
    def forward(ctx, t, dtype):
        ctx.dtype = dtype
        return t.to(dtype).to(t.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


class _RoundGradient(torch.autograd.Function):
    """Rounds the gradient alone, as the router does: its logits are not rounded."""

    @staticmethod
    def forward(ctx, t, dtype):
        ctx.dtype = dtype
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


class Arithmetic(NamedTuple):
    wide: torch.dtype  # that is computed in
    stored: torch.dtype  # of the tensors between operators
    rounds: bool  # to `stored`
    near: list  # the tokens that near_kink has found

    def round(self, t):
        return _Round.apply(t, self.stored) if self.rounds else t

    def round_gradient(self, t):
        return _RoundGradient.apply(t, self.stored) if self.rounds else t


def exact(stored: torch.dtype) -> Arithmetic:
    return Arithmetic(F64, stored, False, [])


def eager(stored: torch.dtype) -> Arithmetic:
    return Arithmetic(F64 if stored == F64 else F32, stored, stored.itemsize == 2, [])


# --- activations ----------------------------------------------------------------------------------


def _at_most(h, limit: float, stored):
    return torch.where(h.detach().to(stored) > limit, limit, h)


def _gate(h, activation: str, alpha: float, limit: float, stored):
    if activation in ("relu", "relu2"):
        h = torch.where(h.detach().to(stored) > 0, h, 0.0)
        return h * h if activation == "relu2" else h
    if activation in ("swiglu_clamped", "swiglu_limited"):
        h = _at_most(h, limit, stored)
        return h * torch.sigmoid(alpha * h if activation == "swiglu_clamped" else h)
    if activation == "situ":
        return alpha * torch.tanh(h / alpha) * torch.sigmoid(h)
    if activation == "silu":
        return h * torch.sigmoid(h)
    return F.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def _up(h, activation: str, limit: float, stored):
    if activation == "situ":
        return limit * torch.tanh(h / limit)
    if activation not in ("swiglu_clamped", "swiglu_limited"):
        return h
    h = -_at_most(-_at_most(h, limit, stored), limit, stored)
    return h + 1 if activation == "swiglu_clamped" else h


def activate(gate, up, activation: str, alpha: float, limit: float, arithmetic: Arithmetic):
    value = arithmetic.round(_gate(gate, activation, alpha, limit, arithmetic.stored))
    return value if up is None else arithmetic.round(value * _up(up, activation, limit, arithmetic.stored))


def near_kink(gate, up, activation: str, limit: float, stored):
    """Which rows have an element that an error of float32 could move to the other side of a kink."""

    def sides(h, kink):
        return (h - MARGIN).to(stored).gt(kink) != (h + MARGIN).to(stored).gt(kink)

    if activation == "relu":
        return sides(gate, 0.0).any(-1)
    if activation not in ("swiglu_clamped", "swiglu_limited"):
        return torch.zeros(gate.shape[:-1], dtype=torch.bool)
    near = sides(gate, limit).any(-1)
    return near if up is None else near | sides(up, limit).any(-1) | sides(-up, limit).any(-1)


# --- experts --------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Where each slot t * K + k is in (E, C) batches. What is empty has the index past the end."""

    slots: torch.Tensor  # (E, C) slot of each place
    places: torch.Tensor  # (T, K) place of each slot
    tokens: torch.Tensor  # (E, C)


def places_of(ids: torch.Tensor, num_experts: int) -> Places:
    (T, K), flat = ids.shape, ids.flatten().long()
    chosen = flat.unsqueeze(1) == torch.arange(num_experts)  # (T * K, E)
    rank = chosen.cumsum(0)
    capacity = int(rank[-1].max()) if len(flat) else 0
    place = num_experts * capacity
    slots = torch.full((num_experts, capacity), T * K)
    places = torch.full((T * K,), place)
    slot, expert = chosen.nonzero(as_tuple=True)
    place_in_expert = rank[slot, expert] - 1
    slots[expert, place_in_expert] = slot
    places[slot] = expert * capacity + place_in_expert
    return Places(slots, places.view(T, K), (slots // K).clamp_max(T))


def _padded(t):
    """With a row of zeros at the end, for what is empty."""
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


def _linear(rows, w, b, arithmetic: Arithmetic):
    out = rows @ w.mT
    return arithmetic.round(out if b is None else out + b.unsqueeze(1))


def experts(
    x, w1, w2, w3, b1, b2, b3, scores, ids, arithmetic: Arithmetic, *,
    activation="silu", alpha=1.702, limit=7.0, layout="separate", transposed=False, score_on="output",
):  # fmt: skip
    """fused_experts; without scores grouped_mlp, whose ids say which expert's each row is."""
    dtype = x.dtype
    x, w1, w2, w3, b1, b2, b3, scores = (
        t if t is None else t.to(arithmetic.wide) for t in (x, w1, w2, w3, b1, b2, b3, scores)
    )
    w1 = w1.flatten(1, 2) if w1.dim() == 4 else w1
    if transposed:
        w1, w2, w3 = w1.mT, w2.mT, w3 if w3 is None else w3.mT
    places = places_of(ids, w2.size(0))
    rows = arithmetic.round(_padded(x)[places.tokens])
    if scores is not None and score_on == "input":
        scale = _padded(scores.reshape(-1))[places.slots].unsqueeze(-1)
        product = rows * scale
        if arithmetic.stored.itemsize == 2:
            # One float32 product, rounded: known to the bit, so that it moves no h across a kink.
            value = (rows.detach().float() * scale.detach().float()).to(arithmetic.stored)
            product = product + (value.to(product.dtype) - product).detach()
        rows = arithmetic.round(product)
    gate, up = _linear(rows, w1, b1, arithmetic), None
    if layout == "halves":
        gate, up = gate.chunk(2, -1)
    elif layout == "interleaved":
        gate, up = gate[..., 0::2], gate[..., 1::2]
    elif w3 is not None:
        up = _linear(rows, w3, b3, arithmetic)
    with torch.no_grad():
        near = near_kink(gate, up, activation, limit, arithmetic.stored)
        arithmetic.near.append(places.tokens[near & (places.slots < ids.numel())])
    y = _linear(activate(gate, up, activation, alpha, limit, arithmetic), w2, b2, arithmetic)
    y = _padded(y.flatten(0, 1))[places.places]  # (T, K, D)
    if scores is not None and score_on == "output":
        y = y * scores.unsqueeze(-1)
    return y.sum(1).to(dtype)


def grouped_mm(a, b, counts: list[int], arithmetic: Arithmetic):
    ids = ids_of_counts(counts, a.size(0))
    places = places_of(ids, b.size(0))
    rows = _padded(a.to(arithmetic.wide))[places.tokens]
    out = _linear(rows, b.to(arithmetic.wide), None, arithmetic)
    return _padded(out.flatten(0, 1))[places.places.flatten()].to(a.dtype)


def ids_of_counts(counts: list[int], num_rows: int) -> torch.Tensor:
    """(R, 1): the expert of each row, -1 past the last."""
    ids = torch.full((num_rows,), -1)
    ids[: sum(counts)] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids.unsqueeze(1)


# --- rows -----------------------------------------------------------------------------------------


def row_slots(ids: torch.Tensor, num_experts: int) -> list[int]:
    """The slot of every row, in expert order."""
    flat = ids.flatten().tolist()
    return sorted((s for s, e in enumerate(flat) if 0 <= e < num_experts), key=lambda s: (flat[s], s))


def permute(x, slots: list[int], ids):
    rows = x[torch.tensor(slots, dtype=torch.long) // ids.size(1)]
    return torch.cat([rows, rows.new_zeros(ids.numel() - len(slots), x.size(1))])


def unpermute(rows, slots: list[int], ids, scores, arithmetic: Arithmetic):
    row_of = torch.full((ids.numel(),), ids.numel())
    row_of[torch.tensor(slots, dtype=torch.long)] = torch.arange(len(slots))
    wide = _padded(rows.to(arithmetic.wide))[row_of.view(ids.shape)]
    if scores is not None:
        wide = wide * scores.to(arithmetic.wide).unsqueeze(-1)
    return wide.sum(1).to(rows.dtype)


# --- routing --------------------------------------------------------------------------------------


def all_scores(logits, score_func):
    """The scores of all experts."""
    if score_func == "sqrtsoftplus":
        low = logits < -37  # sqrt has no derivative at 0
        root = torch.logaddexp(logits.masked_fill(low, 0.0), torch.zeros_like(logits)).sqrt()
        return torch.where(low, (logits.masked_fill(~low, 0.0) / 2).exp(), root)
    return logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()


def scores_of(
    logits, ids, arithmetic: Arithmetic, *, score_func, route_norm, route_scale, route_norm_eps,
    expert_scale=None,
):  # fmt: skip
    """The scores of experts that have been chosen."""
    every = all_scores(logits.to(arithmetic.wide), score_func)
    scores = every.gather(-1, ids.long())
    if route_norm:
        scores = scores / (scores.sum(-1, keepdim=True) + route_norm_eps)
    scores = scores * route_scale
    return scores if expert_scale is None else scores * expert_scale.to(scores.dtype)[ids.long()]


def check_choice(logits, ids, *, score_func, bias, groups, kept, group_score) -> None:
    """ids are the top-k of every token; ties go to the lowest id. Where float32's rounding decides between
    two experts, or two groups, either is right."""
    T, K = ids.shape
    assert ids.dtype == torch.int32
    ordered = ids.sort(-1).values
    assert ((ids >= 0) & (ids < logits.size(1))).all() and (ordered[:, 1:] > ordered[:, :-1]).all(), "ids"
    values, unclear = logits.double(), torch.zeros(T, dtype=torch.bool)
    if bias is not None or groups:
        values = all_scores(values, score_func)
        values = values if bias is None else values + bias.double()
    if groups:
        grouped = values.unflatten(-1, (groups, -1))
        pairs = grouped.sort(-1, descending=True).values[..., : 2 if group_score == "top2" else 1]
        best = pairs.sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True)
        pairs = pairs.gather(1, chosen.indices.unsqueeze(-1).expand(pairs.shape))
        # sums of other terms may be equal here and not in float32
        unclear |= _close(chosen.values, kept, (pairs[:, :-1] != pairs[:, 1:]).any(-1))
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen.indices[:, :kept], True)
        values = grouped.masked_fill(~is_kept.unsqueeze(-1), -math.inf).flatten(1)
    order = values.sort(dim=-1, descending=True, stable=True)
    if bias is not None or groups:
        # scores that are equal here may differ where exp is rounded otherwise, if their logits differ
        chosen = logits.gather(-1, order.indices)
        unclear |= _close(order.values, K, chosen[:, :-1] != chosen[:, 1:])
    wrong = (order.indices[:, :K] != ids).any(-1) & ~unclear
    assert not wrong.any(), f"ids of token {int(wrong.nonzero()[0])}"


def _close(values, k: int, may_differ=False):
    """Which rows of descending values have two that hardly differ among the k first and their equals. Equal
    ones differ where `may_differ`."""
    gaps = (values[:, :-1] - values[:, 1:]).nan_to_num(posinf=1.0)
    counts = values[:, :-1] >= values[:, k - 1 : k] - NEAR
    return (((gaps > 0) | may_differ) & (gaps < NEAR) & counts).any(-1)


def losses_of(logits, ids, arithmetic: Arithmetic, score_func: str):
    """The balance loss and the z loss."""
    logits = logits.to(arithmetic.wide)
    E = logits.size(1)
    load = (ids.reshape(-1, 1) == torch.arange(E)).to(arithmetic.wide).mean(0)
    scores = all_scores(logits, score_func)
    probs = scores if score_func == "softmax" else scores / scores.sum(-1, keepdim=True)
    balance = E * (load * probs.mean(0)).sum()
    return balance, logits.exp().sum(-1).log().square().mean()


# --- the layer ------------------------------------------------------------------------------------


def layer(x, params: dict, ids, routing: dict, arithmetic: Arithmetic, act: dict):
    """FusedMoE on experts that have been chosen: out, and the logits."""
    round_, wide = arithmetic.round, arithmetic.wide
    p = {n: t.to(wide) for n, t in params.items()}
    tokens = x.to(wide)

    def linear(name, rows):
        out, bias = rows @ p[f"{name}.weight"].T, p.get(f"{name}.bias")
        return round_(out if bias is None else out + bias)

    logits = arithmetic.round_gradient(tokens @ p["router.gate.weight"].T)
    if "router.gate.bias" in p:
        logits = logits + p["router.gate.bias"]
    scores = scores_of(logits, ids, arithmetic, **routing, expert_scale=p.get("router.expert_scale"))
    weights = (p.get(f"experts.{n}") for n in ("w1", "w2", "w3", "b1", "b2", "b3"))
    out = experts(tokens, *weights, scores, ids, arithmetic, **act)
    if "shared_experts.w1.weight" in p:
        gate = linear("shared_experts.w1", tokens)
        up = linear("shared_experts.w3", tokens) if "shared_experts.w3.weight" in p else None
        with torch.no_grad():
            near = near_kink(gate, up, act["activation"], act["limit"], arithmetic.stored)
            arithmetic.near.append(near.nonzero().flatten())
        shared = linear("shared_experts.w2", activate(gate, up, **act, arithmetic=arithmetic))
        if "shared_expert_gate.weight" in p:
            shared = round_(round_(linear("shared_expert_gate", tokens).sigmoid()) * shared)
        out = out + shared
    return round_(out).to(x.dtype), logits
