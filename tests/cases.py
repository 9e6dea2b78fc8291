"""Shared cases: shapes, routings, layouts and storage forms. Signals are of order one; judging.py judges."""

import itertools
import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from judging import (  # noqa: F401 - tests take them from here
    LOOSE,
    STRICT,
    assert_as_good,
    assert_near,
    assert_same_bits,
    check_against_reference,
    forward_backward,
    to_double,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fused_moe
from fused_moe import ops as codes
from fused_moe.info import why_no_fp8

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped", "swiglu_limited", "relu2", "situ")

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

    Drawn from their own seed: cases of one shape share their ids, and with them the shapes of the GEMMs.
    PyTorch's bf16 GEMM compiles a kernel for each shape.
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


def weight_shapes(layout: str, E: int, D: int, F: int, bias: bool) -> dict:
    """{weight or bias: its shape in a layout, before it is transposed; None where there is none}."""
    stored, gated, pairs, _ = LAYOUTS[layout]
    packed = stored != "separate"
    return {
        "w1": (E, F, 2, D) if pairs else (E, 2 * F if packed else F, D),
        "w2": (E, D, F),
        "w3": (E, F, D) if gated and not packed else None,
        "b1": (E, 2 * F if packed else F) if bias else None,
        "b2": (E, D) if bias else None,
        "b3": (E, F) if bias and gated and not packed else None,
    }


@contextmanager
def poisoned():
    """Fresh memory, outputs and workspaces, holds NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
        """The clamps' limit: signals of order one reach it, but never in half precision.

        There the rounding of h would decide on which side of the kink it is, and with it the gradient.
        """
        return 1.0 if self.dtype in (F32, F64) else 7.0

    @property
    def options(self) -> dict:
        layout, _, _, transposed = LAYOUTS[self.layout]
        options = {"activation": self.activation, "limit": self.limit}
        return {**options, "layout": layout, "transposed": transposed}

    def weights(self, device) -> dict:
        """w1, w2, w3, b1, b2, b3 as the layout stores them, None where it has none."""
        transposed = LAYOUTS[self.layout][3]
        E, D, F = self.num_experts, self.dim, self.hidden
        shapes = weight_shapes(self.layout, E, D, F, self.bias)
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


def quantize_options(format: str) -> dict:
    """Options of fused_moe.quantize for narrow weights."""
    return {"group_size": 32} if format == "int4" else {}


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


def torchrun(num_processes: int) -> list[str]:
    """The start of a command line. By address: on a bare machine not even localhost may be a name."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={num_processes}"]


# --- running --------------------------------------------------------------------------------------


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


def arguments_of(name: str, **named) -> tuple:
    """The arguments of an operator in the order of its schema."""
    args = getattr(torch.ops.fused_moe, name).default._schema.arguments
    assert named.keys() <= {a.name for a in args}, f"{name} has no {named.keys() - {a.name for a in args}}"
    return tuple(named[a.name] if a.name in named else a.default_value for a in args)


def arguments_by_name(name: str, args: tuple) -> dict:
    """{name: value} of an operator's arguments, with the defaults of those that were not passed."""
    names = [a.name for a in getattr(torch.ops.fused_moe, name).default._schema.arguments]
    passed = dict(zip(names, args, strict=False))
    return dict(zip(names, arguments_of(name, **passed), strict=True))


def eight_bit_calls(case: Case, device, act: dict) -> list[dict]:
    """Calls of experts with eight_bits, of int8, since opcheck cannot reckon with e4m3. Widths and dtype are
    the nearest that every device takes."""
    dtype = case.dtype if case.dtype in (BF16, F16) else BF16
    wide = replace(case, dim=-(-case.dim // 16) * 16, hidden=-(-case.hidden // 16) * 16, dtype=dtype)
    t, E, D, F = wide.inputs(device), wide.num_experts, wide.dim, wide.hidden
    _, _, pairs, transposed = LAYOUTS[case.layout]
    call = {"x": t["x"], "scores": t["scores"], "ids": wide.ids(device), "eight_bits": True, **act}
    call |= {name: t[name] for name in ("b1", "b3", "b2")}
    for i in (1, 3, 2):
        w = t[f"w{i}"]
        if w is not None:
            w = w.flatten(1, 2) if pairs and i == 1 else w.mT.contiguous() if transposed else w
            w = fused_moe.quantize(w, "int8", compute="int8")
            call["formats"] = [w.code] * 3
        call[f"w{i}"] = [*w.eight_bit_tensors] if w else []
    smooth = {"w1": torch.rand(E, D) + 0.5, "w2": torch.rand(E, F) + 0.5}
    smooth = {name: [*call[name], factors.to(device)] for name, factors in smooth.items()}
    shared = {"shared": torch.randn_like(t["x"]), "shared_gate": torch.randn(case.tokens).to(device)}
    expert_map = torch.arange(-1, E, dtype=torch.int32, device=device)
    return [
        call | shared,
        call | smooth,
        call | {"score_on_input": True, "expert_map": expert_map, "ids": call["ids"].long()},
    ]


class OperatorCalls(dict):
    """Calls by operator. A test that asks for FP8 training's is skipped where they are left out."""

    def __missing__(self, name: str):
        if name not in FP8_OPERATORS:
            raise KeyError(name)
        pytest.skip(f"{name}: {why_no_fp8()}")


def fp8_calls(case: Case, device, act: dict) -> dict[str, list[dict]]:
    """Calls of FP8 training's operators, none where it does not run. Widths and dtype are the nearest that
    the device takes."""
    takes_float = torch.device(device).type == "cpu"
    if not takes_float and why_no_fp8():
        return {}
    dtype = case.dtype if case.dtype == BF16 or (case.dtype == F32 and takes_float) else BF16
    case = replace(case, dim=-(-case.dim // 128) * 128, hidden=-(-case.hidden // 128) * 128, dtype=dtype)
    _, _, pairs, transposed = LAYOUTS[case.layout]
    t, ids, T = case.inputs(device), case.ids(device), case.tokens
    w1, w2, w3 = (w if w is None or not transposed else w.mT for w in (t["w1"], t["w2"], t["w3"]))
    w1 = w1.flatten(1, 2) if pairs else w1
    plan = {"plan": fused_moe.route_plan(ids, case.num_experts).tensors}
    up = torch.ops.fused_moe.fp8_weight(w1, w3, act["layout"])
    down = torch.ops.fused_moe.fp8_weight(w2, None, codes.UNGATED)
    main1, main2, main3 = (
        None if w is None else torch.empty_like(w, dtype=F32).normal_() for w in (w1, w2, w3)
    )
    x, scores, dout = t["x"], t["scores"], case.dout(device)
    layout = {"layout": act["layout"]}
    calls = {name: [] for name in FP8_OPERATORS}
    calls["fp8_weight"] = [
        {"w": w1, "w3": w3, **layout},
        *({"w": w2.float(), "w3": None, "layout": codes.UNGATED, "orders": orders} for orders in (3, 2, 1)),
    ]
    needs_up = {"need_dw1": True, "need_dw3": w3 is not None}
    needs_down = {"need_dlink": True, "need_dlink_t": True, "need_dw2": True, "need_dscores": True}
    of_x = {"x": x, "w1": w1, "w3": w3, **plan, **layout}
    operands = {**of_x, "quantized": [*up], **act}
    calls["fp8_up"] = [
        operands | {"save_h": True},
        operands | {"save_h": False, "quantized": [*up[:2]]},
    ]
    with torch.autocast(x.device.type, enabled=False):  # of the test that asks, in a dtype that is refused
        made = torch.ops.fused_moe.fp8_up(*arguments_of("fp8_up", **operands, save_h=True))
    names = ("link", "link_scale", "h", "a_codes", "a_scale", "x_scale")
    made = {name: t.contiguous() for name, t in zip(names, made, strict=True)}
    for wgrad in codes.WGRADS.values():
        calls["fp8_up_weights"] += [of_x | {"wgrad": wgrad}]
        with torch.autocast(x.device.type, enabled=False):
            links_t = torch.ops.fused_moe.fp8_up_weights(*arguments_of("fp8_up_weights", **of_x, wgrad=wgrad))
        links_t = dict(zip(("link_t", "link_t_scale"), (t.contiguous() for t in links_t), strict=True))
        operands = {"w2": w2, "scores": scores, **plan, "quantized": [*down], **act, "wgrad": wgrad}
        calls["fp8_down"] += [
            {**made, **links_t, **operands, "shared": dout, "shared_gate": torch.randn(T).to(device)},
            {**made, "link_t": None, "link_t_scale": None, **operands, "scores": None},
            {**made, **links_t, **operands, "quantized": [*down[:2]]},
        ]
        backward = operands | {"dout": dout, "h": made["h"], "x_scale": made["x_scale"]}
        backward["quantized"] = [*down[2:]]
        of_down = [
            backward | needs_down,
            backward | dict.fromkeys(needs_down, False),
            *(backward | needs_down | {name: False} for name in ("need_dlink", "need_dlink_t")),
            backward | {"scores": None} | needs_down | {"need_dscores": False},
        ]
        calls["fp8_down_backward"] += of_down
        calls["fp8_down_backward_accumulate"] += [{**call, "main_grad2": main2} for call in of_down]
        args = arguments_of("fp8_down_backward", **of_down[0])
        dlink, dlink_scale, dlink_t, dlink_t_scale, *_ = torch.ops.fused_moe.fp8_down_backward(*args)
        calls["fp8_up_backward"] += [
            {"dlink": dlink, "dlink_scale": dlink_scale, "x": x, **plan, "quantized": [*up[2:]]}
        ]
        backward = {"dlink_t": dlink_t, "dlink_t_scale": dlink_t_scale, **of_x, "wgrad": wgrad}
        of_up = [backward | needs_up, backward | dict.fromkeys(needs_up, False)]
        calls["fp8_up_weights_backward"] += of_up
        calls["fp8_up_weights_backward_accumulate"] += [
            {**call, "main_grad1": grad1, "main_grad3": grad3}
            for call, (grad1, grad3) in zip(
                (*of_up, of_up[0]), ((main1, main3), (main1, main3), (None, main3)), strict=True
            )
        ]
    return calls


FP8_OPERATORS = (
    "fp8_weight", "fp8_up_weights", "fp8_up_weights_backward", "fp8_up_weights_backward_accumulate", "fp8_up",
    "fp8_up_backward", "fp8_down", "fp8_down_backward", "fp8_down_backward_accumulate",
)  # fmt: skip


def operator_calls(case: Case, device) -> OperatorCalls:
    """{operator: [argument tuples]}: a typical call of every operator, and its rarer forms. Those named
    *_accumulate have none in float64."""
    T, D, F, E, K, dtype = (
        case.tokens, case.dim, case.hidden, case.num_experts, case.top_k, case.dtype
    )  # fmt: skip
    stored, gated, pairs, transposed = LAYOUTS[case.layout]
    t, ids = case.inputs(device), case.ids(device)
    plan = fused_moe.route_plan(ids, E)
    rows_plan, moves = plan.tensors[:2], {"plan": plan.tensors}
    offs = plan.offsets[1:].contiguous()
    x, scores, b1, b2, b3 = (t[n] for n in ("x", "scores", "b1", "b2", "b3"))
    w1, w2, w3 = (w if w is None or not transposed else w.mT for w in (t["w1"], t["w2"], t["w3"]))
    w1 = w1.flatten(1, 2) if pairs else w1
    R, H = ids.numel(), 2 * F if gated else F
    of_two = torch.where(plan.token_row < 0, -1, plan.token_row + R * (ids % 2).int())  # ranks' rows

    def new(*shape):
        return torch.randn(shape).to(device, dtype)

    def main_grad(w):
        return None if w is None else torch.empty_like(w, dtype=F32).normal_()

    main1, main2, main3 = map(main_grad, (w1, w2, w3))
    rows, a, h, dout, logits = new(R, D), new(R, F), new(R, H), new(T, D), new(T, E)
    gate = new(E, D)
    of_router = {"dlogits": logits, "gate": gate}
    by_token = {"shared_gate": torch.randn(T).to(device, score_dtype(dtype))}
    column = {"shared_gate": by_token["shared_gate"].unsqueeze(-1)}
    add_shared = {"shared": dout, **by_token}
    layout = {"layout": codes.LAYOUTS[stored] if gated else codes.UNGATED}
    act = {**layout, "activation": codes.ACTIVATION_CODES[case.activation], "constants": [1.702, case.limit]}
    softmax = {"score_func": 0, "route_norm": False, "route_scale": 1.0, "route_norm_eps": 1e-20}
    sigmoid = {"score_func": 1, "route_norm": True, "route_scale": 2.0, "route_norm_eps": 0.0}
    all_groups, two_groups = (
        {"num_groups": num, "num_limited_groups": limited, "group_score": group_score}
        for num, limited, group_score in ((0, 0, 0), (E, min(E, 2), 1))
    )
    expert_scale = torch.randn(E).to(device, score_dtype(dtype))
    given = {"given_ids": ids, "num_tokens": torch.tensor(T - 1, device=device), "expert_scale": expert_scale}
    expert_map = torch.arange(-1, E, dtype=torch.int32, device=device)  # of E + 1 ids
    num_dropped = torch.tensor(5, device=device)
    up, down = {"w1": w1, "w3": w3, "b1": b1, "b3": b3}, {"w2": w2, "b2": b2}
    up_needs = {f"need_d{n}": v is not None for n, v in {"x": x, **up}.items()}
    up_backward = {"dh": h, "x": x, "w1": w1, "w3": w3, "scores": None, **moves, **layout}
    up_backwards = [
        {**up_backward, "scores": scores, **up_needs, "need_dscores": True, **of_router},
        {**up_backward, **dict.fromkeys(up_needs, False), "need_dscores": False},
        {**up_backward, "x": rows, "plan": rows_plan, **up_needs, "need_dscores": False},
        {**up_backward, **up_needs, "need_dscores": False},
    ]
    main_grads = [(main1, main3), (main1, main3), (None, main3), (main1, None)]
    down_needs = {"need_dh": True, "need_dw2": True, "need_db2": b2 is not None}
    only_dh = {**dict.fromkeys(down_needs, False), "need_dh": True}
    down_backward = {"dout": dout, "h": h, **down, "scores": None, **moves, **act}
    down_backwards = [
        {**down_backward, "scores": scores, **down_needs, "need_dscores": True},
        {**down_backward, **only_dh, "need_dscores": False},
        {**down_backward, "dout": rows, "plan": rows_plan, **down_needs, "need_dscores": False},
    ]
    packed_plan = [torch.cat([t.flatten() for t in plan.tensors]), ids.int().clamp(0, E - 1)]
    backward = {"dout": dout, "x": x, "w1": w1, "w3": w3, **down, "gate": gate, "h": h, "scores": scores}
    backward |= {
        "logits": logits.to(score_dtype(dtype)),
        "plan": packed_plan,
        **act,
        "routing": [K, 1, 1, 0, 0, 0],
    }
    backward |= {"constants": [*act["constants"], 2.0, 0.0], "expert_scale": expert_scale}
    backward["needs"] = [True, w3 is not None, True, b1 is not None, b3 is not None, b2 is not None, True]
    quantized = [  # not fp8, with whose codes opcheck cannot reckon
        fused_moe.quantize(torch.randn(E, rows, 64).to(device), format, trainable=True, **options)
        for format, options in (("int4", {"group_size": 32, "symmetric": False}), ("mxfp4", {}), ("int8", {}))
        for rows in (6, 64)  # on Hopper the second is tiled, and has a second packing
    ]
    of_quantized = [
        {"a": new(R, width), **dict(zip(("data", "scale", "zero"), w.tensors, strict=True)), "offsets": offs}
        | {"format": w.code, "transposed": transposed}
        | dict(zip(("data_t", "scale_t", "zero_t"), w.transposed_tensors, strict=True))
        for w in quantized
        for width, transposed in ((64, False), (w.size(1), True))
    ]
    of_quantized[0]["bias"] = new(E, 6)
    packed, formats = {}, []
    for i, w in ((1, w1), (3, w3), (2, w2)):
        w = None if w is None else fused_moe.quantize(w.detach().contiguous(), "int8")
        packed[f"w{i}"] = [] if w is None else [t for t in w.tensors if t is not None]
        formats.append(0 if w is None else w.code)
    coded = {"w1": packed["w1"], "w3": packed["w3"], "format1": formats[0], "format3": formats[1]}
    coded |= {name: up[name] for name in ("b1", "b3")}
    float_weights = {f"w{i}": [] if w is None else [w] for i, w in ((1, w1), (3, w3), (2, w2))}
    of_x = {"x": x, **float_weights, "b1": b1, "b3": b3, "b2": b2, **act}
    of_ids, on_input = (
        of_x | {"scores": scores, "ids": ids},
        {"score_on_input": True, "expert_map": expert_map},
    )

    def with_router(top_k, route_scale, route_norm_eps, **numbers):
        names = ("score_func", "route_norm", "num_groups", "num_limited_groups", "group_score")
        routing = [top_k, *(int(numbers[name]) for name in names)]
        constants = [*act["constants"], route_scale, route_norm_eps]
        return of_x | {"gate": gate, "routing": routing, "constants": constants}

    of_act = {"h": a, "up": new(R, F), **act} if w3 is not None else {"h": h, "up": None, **act}
    inference = [
        *(of_ids | side for side in (add_shared, {"ids": ids.long(), **on_input})),
        with_router(K, **softmax, **all_groups) | {"expert_bias": torch.zeros(E).to(device)},
        with_router(K, **sigmoid, **all_groups)
        | {
            "gate_bias": new(E),
            "ids": ids,
            "num_tokens": given["num_tokens"],
            "expert_scale": expert_scale,
        }
        | add_shared,
        with_router(K, **softmax, **all_groups) | {"keeps": True},
        with_router(K, **sigmoid, **all_groups) | {"ids": ids, "keeps": True} | add_shared,
        *(of_ids | packed | {"formats": formats} | side for side in (add_shared, {"score_on_input": True})),
        with_router(K, **softmax, **all_groups) | packed | {"formats": formats},
        *eight_bit_calls(case, device, act),
    ]
    calls = {
        "router_logits": [{"x": x, "weight": gate, "bias": b} for b in (new(E), None)],
        "router_dgrad": [{"dlogits": logits, "weight": w} for w in (gate, new(D, E).mT)],
        "route": [
            {"logits": logits, "bias": None, "top_k": K, **softmax, **all_groups},
            {"logits": logits, "bias": torch.zeros(E).to(device), "top_k": 1, **sigmoid, **two_groups},
            {"logits": logits, "bias": None, "top_k": K, **sigmoid, **all_groups, **given},
        ],
        "route_backward": [
            {"dscores": scores, "logits": logits, "ids": ids.clamp(0, E - 1), **settings, "expert_scale": s}
            for settings, s in ((softmax, None), (sigmoid, expert_scale))
        ],
        "route_plan": [
            {"ids": i, "num_experts": E, "expert_map": m, "max_rows": n}
            for i, m, n in ((ids, None, None), (ids.long(), expert_map, None), (ids, None, R // 2))
        ],
        "route_plan_dropped": [
            {"ids": i, "num_experts": E, "expert_map": m, "max_rows": R // 2, "dropped_rows": num_dropped}
            for i, m in ((ids, None), (ids.long(), expert_map))
        ],
        "count_plan": [
            {"counts": plan.counts, "num_rows": R},
            {"counts": plan.counts.to(torch.uint8), "num_rows": 0, "rows": rows},
        ],
        "pad": [{"x": w[:, None], "a": a, "b": 9, "c": 24} for w, a in ((w1, 1), (w1.mT, 2))],
        "permute": [{"x": x, **moves}],
        "unpermute": [
            {"rows": rows, "scores": s, **moves, **added}
            for s, added in ((scores, add_shared), (None, {"shared": dout}), (scores, {}))
        ],
        "sum_peers": [{"rows": [rows, new(R, D)], "index": of_two, "scores": s} for s in (scores, None)],
        "unpermute_backward": [
            {"dout": dout, "rows": rows, "scores": scores, **moves, "need_drows": need, "need_dscores": True}
            for need in (True, False)
        ],
        "shared_backward": [
            {"dout": dout, "shared": x, **by_token, "need_dshared": True, "need_dshared_gate": True},
            {"dout": dout, "shared": None, **column, "need_dshared": True, "need_dshared_gate": False},
            {"dout": dout, "shared": x, **column, "need_dshared": False, "need_dshared_gate": True},
        ],
        "grouped_mm": [
            {"a": a, "b": w2, "offsets": offs},
            {"a": a, "b": w2, "offsets": offs, "bias": new(E, D)},
        ],
        "quantized_mm": of_quantized,
        "wgrad": [
            {"a": a, "b": rows, "offsets": offs},
            {"a": a, "b": x, "offsets": offs, "b_row_token": plan.row_token},
            {"a": x, "b": a, "offsets": offs, "a_row_token": plan.row_token},
        ],
        "wgrad_accumulate": [
            {"a": a, "b": rows, "offsets": offs, "dw": new(E, F, D).float()},
            {"a": a, "b": x, "offsets": offs, "dw": new(E, D, F).float().mT, "b_row_token": plan.row_token},
            {"a": x, "b": a, "offsets": offs, "dw": new(E, D, F).float(), "a_row_token": plan.row_token},
        ],
        "bias_grad": [{"rows": rows, "offsets": offs}],
        "activate": [of_act],
        "activate_backward": [{"da": a, **of_act}],
        "up_gate": [{"x": x, **up, **moves, **act}, {"x": rows, **up, "plan": rows_plan, **act}],
        "up_dgrad": [{"dh": h, "w1": w1, "w3": w3, "plan": p, **layout} for p in (plan.tensors, rows_plan)],
        "down_dgrad": [{"dout": dout, **down, "h": h, "scores": scores, **moves, **act}],
        "experts_up": [
            {"x": x, **up, "scores": None, **moves, **act, "save_h": True},
            {"x": x, **up, "scores": scores, **moves, **act, "save_h": False},
            {"x": rows, **up, "scores": None, "plan": rows_plan, **act, "save_h": True},
        ],
        "quantized_up": [
            {"x": x, **coded, "scores": None, "addend": h, **moves, **act, "save_h": True},
            {"x": x, **coded, "scores": scores, "addend": None, **moves, **act, "save_h": False},
            {"x": rows, **coded, "scores": None, "addend": h, "plan": rows_plan, **act, "save_h": True},
        ],
        "experts_backward": [backward, backward | {"needs": [False] * 7, "b2": None, "w3": w3}],
        "experts_up_backward": up_backwards[:3],
        "experts_up_backward_accumulate": [
            {**call, "main_grad1": grad1, "main_grad3": grad3}
            for call, (grad1, grad3) in zip(up_backwards, main_grads, strict=True)
        ],
        "experts_down": [
            {"a": a, "h": h, **down, "scores": scores, **moves, **act, **add_shared},
            {"a": a, "h": None, **down, "scores": None, "plan": rows_plan, **act},
        ],
        "experts": inference,
        "experts_out": [
            {**call, "out": torch.empty_like(call["x"])} for call in inference if not call.get("keeps")
        ],
        "experts_down_backward": down_backwards,
        "experts_down_backward_accumulate": [{**call, "main_grad2": main2} for call in down_backwards],
        **fp8_calls(case, device, act),
    }
    if dtype == F64:
        calls |= {name: [] for name in calls if name.endswith("_accumulate")}
    return OperatorCalls(
        {name: [arguments_of(name, **call) for call in each] for name, each in calls.items()}
    )


def call_operator(name: str, args) -> tuple:
    """The results of an operator, always as a flat tuple, then copies of what it writes, written."""
    op = getattr(torch.ops.fused_moe, name).default
    is_written = [a.is_write for a in op._schema.arguments]
    args = [a.clone() if w and a is not None else a for w, a in zip(is_written, args, strict=True)]
    result = op(*args)
    result = [r for r in tree_leaves(result) if r is not None]
    return (*result, *(a for w, a in zip(is_written, args, strict=True) if w and a is not None))


def distinct(calls) -> list[tuple]:
    """Without calls that differ from one before in numbers alone: layouts are nothing to many operators."""

    def facts(value):
        return (value.shape, value.stride(), value.dtype) if torch.is_tensor(value) else value

    return list({str(tree_map(facts, args)): args for args in reversed(list(calls))}.values())


# --- watching ------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records every operator call made inside: (name, arguments, result)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.name(), args, result))
        return result

    def kinds(self) -> list[str]:
        """What each call of experts or experts_out computes: "routed", "8 bits", "values" or "floats"."""
        named = []
        for name, args, _ in self.calls:
            if name in ("fused_moe::experts", "fused_moe::experts_out"):
                given = arguments_by_name(name.removeprefix("fused_moe::"), args)
                by_codes = "8 bits" if given["eight_bits"] else "values" if given["formats"] else "floats"
                named.append(by_codes if given["gate"] is None else "routed")
        return named

    def ours(self) -> list[str]:
        """Our operators in the order of their calls, but for copies of odd widths, which GPUs make."""
        names = [n.removeprefix("fused_moe::") for n, *_ in self.calls if n.startswith("fused_moe::")]
        return [name for name in names if name != "pad"]

    def of(self, name: str) -> list:
        """(arguments, result) of every call of one of our operators."""
        return [(a, r) for n, a, r in self.calls if n == f"fused_moe::{name}"]


# --- activations in plain PyTorch, for the tests of serving engines -------------------------------------


def halves(function):
    """A function of h (..., 2F), whose gate columns come before its up columns."""
    return lambda h: function(*h.chunk(2, dim=-1))


def pairs(function):
    """A function of h (..., 2F), whose gate and up columns alternate."""
    return lambda h: function(h[..., 0::2], h[..., 1::2])


def clamped(alpha, beta, limit):
    def function(gate, up):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    return function
