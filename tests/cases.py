"""Shared cases: shapes, routings, layouts and storage forms, and how a result is judged.

A result is judged by the norm of its error against the reference computed in float64, tensor by tensor:
at most 1.1 times the norm of the error that the eager reference makes in the same dtype. Signals are of
order one. In tensors of a few numbers rounding falls either way, so tests of shapes add a slack of some
units of rounding; tests of accuracy (`STRICT`) use tensors large enough to do without.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fused_moe
from fused_moe import ops as codes

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOOSE, STRICT = 4.0, 0.01  # slack in units of the dtype's eps

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped")

# name -> (layout, gated, w1 as pairs (E, F, 2, D), transposed)
LAYOUTS = {
    "separate": ("separate", True, False, False),
    "separate.T": ("separate", True, False, True),
    "ungated": ("separate", False, False, False),
    "ungated.T": ("separate", False, False, True),
    "halves": ("halves", True, False, False),
    "halves.T": ("halves", True, False, True),
    "interleaved": ("interleaved", True, False, False),
    "interleaved.T": ("interleaved", True, False, True),
    "pairs": ("interleaved", True, True, False),
}

ROUTINGS = ("random", "repeats", "one", "gaps", "sentinels", "none")


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    return F64 if dtype == F64 else F32


# --- inputs ---------------------------------------------------------------------------------------


def make_ids(routing: str, tokens: int, top_k: int, num_experts: int, seed: int = 0):
    """ids (T, K): distinct, repeated, all to one expert, odd experts empty, some or all no expert's.

    Drawn from a seed of their own: cases of one shape share their ids, and with them the shapes of the
    products, for each of which PyTorch's bf16 product compiles a kernel.
    """
    draw = {"generator": torch.Generator().manual_seed(seed)}
    shape = (tokens, top_k)
    if routing == "repeats":
        return torch.randint(num_experts, shape, **draw)
    if routing == "one":
        return torch.full(shape, num_experts // 2)
    if routing == "gaps":
        return torch.randint(num_experts, shape, **draw) // 2 * 2
    if routing == "none":
        return torch.full(shape, -1)
    ids = torch.rand(tokens, num_experts, **draw).argsort(-1)[:, :top_k]
    if routing == "sentinels":
        others = torch.tensor([-1, -7, num_experts, num_experts + 9, 2**31 - 1, -(2**31)])
        others = others[torch.randint(len(others), shape, **draw)]
        ids = torch.where(torch.rand(shape, **draw) < 0.4, others, ids)
    return ids


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, every second number of a wider storage."""
    wide = t.new_full((*t.shape[:-1], 2 * t.size(-1)), 99)
    view = wide[..., ::2]
    return view.copy_(t)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous from an odd storage offset."""
    view = t.new_full((t.numel() + 3,), 99)[3:].view(t.shape)
    return view.copy_(t)


def swapped(t: torch.Tensor) -> torch.Tensor:
    """The same values, the last two dimensions swapped in memory."""
    return t.mT.contiguous().mT


FORMS = {"contiguous": lambda t: t, "strided": strided, "misaligned": misaligned, "swapped": swapped}


@dataclass(frozen=True)
class Case:
    """One call of the experts."""

    tokens: int = 33
    dim: int = 37
    hidden: int = 29
    num_experts: int = 5
    top_k: int = 2
    dtype: torch.dtype = F32
    routing: str = "random"
    layout: str = "separate"
    activation: str = "silu"
    bias: bool = False
    score_on: str = "output"
    seed: int = 0  # of the ids

    @property
    def limit(self) -> float:
        """Of swiglu_clamped: one that signals of order one do reach, but never in half precision.

        There the rounding of h would decide which side of the kink it is on, and with it the gradient.
        """
        return 1.0 if self.dtype in (F32, F64) else 7.0

    @property
    def options(self) -> dict:
        layout, _, _, transposed = LAYOUTS[self.layout]
        options = {"activation": self.activation, "limit": self.limit}
        return {**options, "layout": layout, "transposed": transposed}

    def weights(self, device) -> dict:
        """w1, w2, w3, b1, b2, b3 as the layout stores them, None where it has none."""
        layout, gated, pairs, transposed = LAYOUTS[self.layout]
        E, D, F = self.num_experts, self.dim, self.hidden
        packed = layout != "separate"
        shapes = {
            "w1": (E, F, 2, D) if pairs else (E, 2 * F if packed else F, D),
            "w2": (E, D, F),
            "w3": (E, F, D) if gated and not packed else None,
            "b1": (E, 2 * F if packed else F) if self.bias else None,
            "b2": (E, D) if self.bias else None,
            "b3": (E, F) if self.bias and gated and not packed else None,
        }
        made = {}
        for name, shape in shapes.items():
            if shape is None:
                made[name] = None
                continue
            fan_in = shape[-1] if name[0] == "w" else 1
            value = (torch.randn(shape, dtype=F64) / math.sqrt(fan_in)).to(device, self.dtype)
            made[name] = value.mT.contiguous() if transposed and name[0] == "w" else value
        return made

    def inputs(self, device) -> dict:
        """The differentiable arguments of fused_experts: x, weights, biases, scores."""
        x = torch.randn(self.tokens, self.dim, dtype=F64).to(device, self.dtype)
        scores = torch.rand(self.tokens, self.top_k, dtype=F64).add(0.1)
        return {"x": x, **self.weights(device), "scores": scores.to(device, score_dtype(self.dtype))}

    def ids(self, device, dtype=torch.int32) -> torch.Tensor:
        ids = make_ids(self.routing, self.tokens, self.top_k, self.num_experts, self.seed)
        return ids.to(device, dtype)

    def dout(self, device) -> torch.Tensor:
        return torch.randn(self.tokens, self.dim, dtype=F64).to(device, self.dtype)


ODD = (1, 2, 3, 7, 16, 37, 64, 129)


@st.composite
def experts_cases(draw, dtypes=(F32, BF16, F16, F64)) -> Case:
    """Any small layer: odd and tiny sizes, no tokens, every layout, routing and option."""
    num_experts = draw(st.sampled_from((1, 2, 3, 5, 8, 33)))
    return Case(
        tokens=draw(st.sampled_from((0, 1, 2, 17, 64, 130))),
        dim=draw(st.sampled_from(ODD)),
        hidden=draw(st.sampled_from(ODD)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 8))),
        dtype=draw(st.sampled_from(dtypes)),
        routing=draw(st.sampled_from(ROUTINGS)),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        score_on=draw(st.sampled_from(("output", "input"))),
        seed=draw(st.integers(0, 99)),
    )


def variants(case: Case):
    """The case with and without biases, its scores on either side."""
    for bias, score_on in itertools.product((False, True), ("output", "input")):
        yield replace(case, bias=bias, score_on=score_on)


# --- running --------------------------------------------------------------------------------------


def forward_backward(fn, inputs: dict, dout: torch.Tensor, **fixed) -> dict:
    """{"out", "dx", "dw1", ...}: what fn returns and the gradient of every tensor of `inputs`."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    out = fn(**{**inputs, **leaves}, **fixed)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}


def to_double(value):
    """Dicts, tuples and tensors in float64; integers and the rest as they are."""
    if isinstance(value, dict):
        return {n: to_double(v) for n, v in value.items()}
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def check_against_reference(name: str, inputs: dict, dout: torch.Tensor, slack=LOOSE, **fixed) -> dict:
    """Runs fused_moe.<name>, forward and backward, and judges every tensor. Returns ours."""
    fn, reference = getattr(fused_moe, name), getattr(fused_moe.reference, name)
    ours = forward_backward(fn, inputs, dout, **fixed)
    eager = forward_backward(reference, inputs, dout, **fixed)
    exact = forward_backward(reference, to_double(inputs), to_double(dout), **fixed)
    assert_as_good(ours, eager, exact, slack)
    return ours


def check_experts(case: Case, device, slack=LOOSE, form=None) -> dict:
    """fused_experts of one case against the reference; `form` stores every input otherwise."""
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    if form is not None:
        inputs = {n: t if t is None else form(t) for n, t in inputs.items()}
        dout, ids = form(dout), form(ids)
    return check_against_reference(
        "fused_experts", inputs, dout, slack, ids=ids, score_on=case.score_on, **case.options
    )


# --- every operator -------------------------------------------------------------------------------


def operator_calls(case: Case, device) -> dict:
    """{operator: [argument tuples]}: a typical call of every operator, and its rarer forms. Those named
    *_accumulate have none in float64."""
    T, D, F, E, K, dtype = (
        case.tokens, case.dim, case.hidden, case.num_experts, case.top_k, case.dtype
    )  # fmt: skip
    stored, gated, pairs, transposed = LAYOUTS[case.layout]
    t, ids = case.inputs(device), case.ids(device)
    code = codes.LAYOUTS[stored] if gated else codes.UNGATED
    act = (codes.ACTIVATION_CODES[case.activation], 1.702, case.limit)
    plan = fused_moe.route_plan(ids, E)
    moves, maps = plan[1:5], plan[1:]
    no_maps = (plan.offsets, None, None, None, plan.tiles)
    ends = plan.offsets[1:].contiguous()
    x, scores, b1, b2, b3 = (t[n] for n in ("x", "scores", "b1", "b2", "b3"))
    w1, w2, w3 = (w if w is None or not transposed else w.mT for w in (t["w1"], t["w2"], t["w3"]))
    w1 = w1.flatten(1, 2) if pairs else w1
    R, H = ids.numel(), 2 * F if gated else F

    def new(*shape):
        return torch.randn(shape).to(device, dtype)

    def main_grad(w):
        return None if w is None else torch.empty_like(w, dtype=F32).normal_()

    def accumulate(*calls):
        return [] if dtype == F64 else list(calls)

    main1, main2, main3 = map(main_grad, (w1, w2, w3))
    chosen = ids.clamp(0, E - 1)
    rows, a, h, dout, logits = new(R, D), new(R, F), new(R, H), new(T, D), new(T, E)
    up, down = (x, w1, w3, b1, b3), (w2, b2)
    need = [v is not None for v in (x, w1, w3, b1, b3)]
    on, off = [True] * len(need), [False] * 6
    return {
        "route": [
            (logits, None, K, 0, False, 1.0, 0, 0),
            (logits, torch.zeros(E).to(device), 1, 1, True, 2.0, E, min(E, 2)),
        ],
        "route_backward": [(scores, logits, chosen, 0, False, 1.0), (scores, logits, chosen, 1, True, 2.0)],
        "route_plan": [(ids, E), (ids.long(), E)],
        "count_plan": [(plan.counts, R), (plan.counts.to(torch.uint8), R)],
        "permute": [(x, *moves)],
        "unpermute": [(rows, scores, *moves), (rows, None, *moves)],
        "unpermute_backward": [
            (dout, rows, scores, *moves, True, True),
            (dout, rows, scores, *moves, False, True),
        ],
        "grouped_mm": [(a, w2, ends)],
        "wgrad": [(a, rows, ends), (a, x, ends, None, plan.row_token), (x, a, ends, plan.row_token)],
        "wgrad_accumulate": accumulate(
            (a, rows, ends, new(E, F, D).float()),
            (a, x, ends, new(E, D, F).float().mT, None, plan.row_token),
            (x, a, ends, new(E, D, F).float(), plan.row_token),
        ),
        "bias_grad": [(rows, ends)],
        "up_gate": [(*up, *maps, code, *act), (rows, *up[1:], *no_maps, code, *act)],
        "up_dgrad": [(h, w1, w3, plan.offsets, code)],
        "down_dgrad": [(dout, *down, h, scores, *maps, code, *act)],
        "act_dgrad": [(a, h, code, *act)],
        "experts_up": [
            (*up, None, *maps, code, *act, True),
            (*up, scores, *maps, code, *act, False),
            (rows, *up[1:], None, *no_maps, code, *act, True),
        ],
        "experts_up_backward": [
            (h, x, w1, w3, scores, *maps, code, *need, True),
            (h, x, w1, w3, None, *maps, code, *off),
            (h, rows, w1, w3, None, *no_maps, code, *need, False),
        ],
        "experts_up_backward_accumulate": accumulate(
            (h, x, w1, w3, scores, *maps, code, *need, True, main1, main3),
            (h, x, w1, w3, None, *maps, code, *off, main1, main3),
            (h, rows, w1, w3, None, *no_maps, code, *need, False, None, main3),
            (h, x, w1, w3, None, *maps, code, *need, False, main1, None),
        ),
        "experts_down": [
            (a, h, *down, scores, *maps, code, *act),
            (a, None, *down, None, *no_maps, code, *act),
        ],
        "experts_down_backward": [
            (dout, h, *down, scores, *maps, code, *act, True, True, b2 is not None, True),
            (dout, h, *down, None, *maps, code, *act, *on[:1], False, False, False),
            (rows, h, *down, None, *no_maps, code, *act, True, True, b2 is not None, False),
        ],
        "experts_down_backward_accumulate": accumulate(
            (dout, h, *down, scores, *maps, code, *act, True, True, b2 is not None, True, main2),
            (dout, h, *down, None, *maps, code, *act, *on[:1], False, False, False, main2),
            (rows, h, *down, None, *no_maps, code, *act, True, True, b2 is not None, False, main2),
        ),
    }


def call_operator(name: str, args) -> tuple:
    """The results of an operator, always as a tuple, then copies of the arguments that it writes, written."""
    op = getattr(torch.ops.fused_moe, name).default
    is_written = [a.is_write for a in op._schema.arguments]
    args = [a.clone() if w and a is not None else a for w, a in zip(is_written, args, strict=False)]
    result = op(*args)
    result = (result,) if isinstance(result, torch.Tensor) else result or ()
    return (*result, *(a for w, a in zip(is_written, args, strict=False) if w and a is not None))


# --- judging --------------------------------------------------------------------------------------


def assert_as_good(ours: dict, eager: dict, exact: dict, slack: float = LOOSE) -> None:
    """Every tensor of `ours` errs at most 1.1 times as much as eager's, in norm, plus the slack.

    One exception, in float32: dscores is <g, a>, where the loop takes <y, dout>, so that y is never kept.
    The product g sums over D where y sums over F, and a relu leaves <g, a> half as many terms.
    """
    for name, truth in exact.items():
        mine, other = ours[name], eager[name]
        assert mine.shape == truth.shape, f"{name}: {tuple(mine.shape)}, not {tuple(truth.shape)}"
        assert mine.dtype == other.dtype, f"{name}: {mine.dtype}, not {other.dtype}"
        error = (mine.double() - truth).norm().item()
        dot = name == "dscores" and ours["out"].dtype == F32
        factor = 1.3 if dot else 1.1
        limit = factor * (other.double() - truth).norm().item()
        norm = truth.norm().item()
        order_one = math.sqrt(truth.count_nonzero().item())
        # Half-precision inputs round gradients in their own dtype, scores in float32.
        eps = max(torch.finfo(v.dtype).eps for v in ours.values())
        limit += (1.5 if dot else 1.0) * slack * eps * max(norm, order_one)
        if truth.dtype == mine.dtype:
            # In float64 eager is the truth, and errs itself where hundreds of terms cancel: db2 of three
            # numbers was seen 42 eps apart.
            limit *= 32
        # A gradient that is zero by cancellation, as that of a single renormalised score.
        limit += 1e-15
        size = norm or 1.0
        message = f"{name}: error {error / size:.3e} of its norm, allowed {limit / size:.3e}"
        assert error <= limit, message  # also fails for NaN


def assert_near(ours, exact, slack=LOOSE) -> None:
    """Two tensors agree to a few units of rounding of the first one's dtype."""
    assert_as_good({"value": ours}, {"value": exact.to(ours.dtype)}, {"value": exact.double()}, slack)


def assert_same_bits(first: dict, second: dict) -> None:
    """Two runs gave the same numbers, to the last bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), f"{name} differs"


class Calls(TorchDispatchMode):
    """Records every operator call made inside: (name, arguments, result)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), args, result))
        return result

    def of(self, name: str) -> list:
        """(arguments, result) of every call of one of our operators."""
        return [(a, r) for n, a, r in self.calls if n == f"fused_moe::{name}"]
