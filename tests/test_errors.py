"""Wrong calls raise TypeError or ValueError with expected and found, before anything runs."""

import contextlib
import inspect
import re
from functools import partial

import pytest
import torch
from cases import BF16, F16, F32, Calls
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, permute, quantized, route, unpermute
from fused_moe.distributed import ExpertParallel
from fused_moe.ops import UNGATED
from fused_moe.tensor_parallel import ExpertTensorParallel

ops = torch.ops.fused_moe
T, D, F, E, K = 6, 8, 4, 3, 2
FLOAT = r"dtype float32 or bfloat16 or float16 or float64"
CPP_FILE = r"csrc|\w\.(c|cc|cpp|cu|cuh|h|hpp)\b"


def experts(**changes):
    """A valid call of fused_experts, except for `changes`."""
    arguments = {
        "x": torch.randn(T, D),
        "w1": torch.randn(E, F, D),
        "w2": torch.randn(E, D, F),
        "w3": torch.randn(E, F, D),
        "scores": torch.rand(T, K),
        "ids": torch.zeros(T, K, dtype=torch.int32),
    }
    return fused_experts, arguments | changes


def mlp(**changes):
    """A valid call of grouped_mlp, except for `changes`."""
    _, arguments = experts()
    rows = {"x_rows": arguments["x"], "counts": torch.tensor([2, 0, 4])}
    return grouped_mlp, {n: arguments[n] for n in ("w1", "w2", "w3")} | rows | changes


def router(**changes):
    return route, {"logits": torch.randn(T, 8), "top_k": 2} | changes


def gate(**changes):
    """A valid call of router_logits, except for `changes`."""
    operands = {"x": torch.randn(T, D), "weight": torch.randn(E, D), "bias": torch.randn(E)}
    return fused_moe.router_logits, operands | changes


def gemm(**changes):
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    return grouped_mm, {"a": torch.randn(T, D), "b": torch.randn(E, F, D), "offsets": ends} | changes


def permutation(**changes):
    ids = torch.zeros(T, K, dtype=torch.int32)
    return permute, {"x": torch.randn(T, D), "ids": ids, "num_experts": E} | changes


def combination(**changes):
    plan = fused_moe.route_plan(torch.zeros(T, K, dtype=torch.int32), E)
    return unpermute, {"rows": torch.randn(T * K, D), "plan": plan} | changes


def planned(**changes):
    return fused_moe.route_plan, {"ids": torch.zeros(T, K, dtype=torch.int32), "num_experts": E} | changes


def counted(**changes):
    return fused_moe.plan_from_counts, {"counts": torch.tensor([2, 0, 4]), "num_rows": T} | changes


def strict(**changes):
    ids = torch.zeros(T, K, dtype=torch.int32)
    return fused_moe.reference.check_ids, {"ids": ids, "num_experts": E} | changes


def module(**changes):
    size = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": K}
    return FusedMoE, size | changes


def plan_of(tokens: int, top_k: int, num_experts: int) -> fused_moe.Plan:
    return fused_moe.route_plan(torch.zeros(tokens, top_k, dtype=torch.int32), num_experts)


def integers(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def fp8(*shape) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def complexes(*shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.complex64)


counts_plan = fused_moe.plan_from_counts(torch.tensor([T * K, 0, 0]), T * K)
half = torch.randn(T, D, dtype=F16)
rows_of_both = torch.randn(2 * T - 1, D)  # the first T rows and the last T have one in common
nan, inf = float("nan"), float("inf")
INT = "dtype int32 or int64"
INT_IDS = f"ids of {INT}"
SHAPE_1, SHAPE_3 = (rf"{name} of shape \(E, F, D\) = \(3, 4, 8\)" for name in ("w1", "w3"))
SHAPE_2 = r"w2 of shape \(E, D, F\) = \(3, 8, 4\)"
SCORES = r"scores of shape \(T, K\) = \(6, 2\)"
ANY_INT = "dtype int32 or int64 or int16 or int8 or uint8"
GIVEN_IDS = f"ids of {ANY_INT} or uint16"


def shared_rows(call, like: str) -> list:
    """Wrong shared and shared_gate of a call, whose first tensor is `like`."""

    def gated(gate):
        return call(shared=torch.randn(T, D), shared_gate=gate)

    return [
        (call(shared=[1.0]), TypeError, "shared to be a tensor", "list"),
        (call(shared=integers(T, D)), TypeError, f"shared of {FLOAT}", "torch.int32"),
        (call(shared=torch.randn(T, D, 1)), ValueError, "shared of 2 dimensions", r"shape \(6, 8, 1\)"),
        (call(shared=torch.randn(T, 7)), ValueError, r"shared of shape \(T, D\) = \(6, 8\)", r"\(6, 7\)"),
        (
            call(shared=torch.randn(T * K, D)),
            ValueError,
            r"shared of shape \(T, D\) = \(6, 8\)",
            r"\(12, 8\)",
        ),
        (call(shared=half), TypeError, f"shared of {like}'s dtype torch.float32", "torch.float16"),
        (call(shared_gate=torch.randn(T)), ValueError, "shared_gate only beside shared", "without shared"),
        (gated(1.0), TypeError, "shared_gate to be a tensor", "float"),
        (gated(integers(T)), TypeError, f"shared_gate of {FLOAT}", "torch.int32"),
        (gated(torch.randn(5)), ValueError, r"shared_gate of shape \(T\) = \(6,\)", r"\(5,\)"),
        (gated(torch.randn(T, K)), ValueError, r"shared_gate of shape \(T, 1\) = \(6, 1\)", r"\(6, 2\)"),
        (gated(torch.randn(1, T)), ValueError, r"shared_gate of shape \(T, 1\) = \(6, 1\)", r"\(1, 6\)"),
        (gated(torch.randn(T, 1, 1)), ValueError, "shared_gate of 1 dimensions", r"shape \(6, 1, 1\)"),
    ]


# group -> rows of (call, exception, expected, found)
TABLE = {
    "router_logits": [
        (gate(x=[[1.0]]), TypeError, "x to be a tensor", "list"),
        (gate(x=integers(T, D)), TypeError, f"x of {FLOAT}", "torch.int32"),
        (gate(x=fp8(T, D)), TypeError, f"x of {FLOAT}", "torch.float8_e4m3fn"),
        (gate(x=torch.randn(D)), ValueError, "x of 2 dimensions", r"shape \(8,\)"),
        (gate(x=torch.randn(2, 3, D)), ValueError, "x of 2 dimensions", r"shape \(2, 3, 8\)"),
        (gate(weight=None), TypeError, "weight to be a tensor", "NoneType"),
        (gate(weight=integers(E, D)), TypeError, f"weight of {FLOAT}", "torch.int32"),
        (gate(weight=torch.randn(D)), ValueError, "weight of 2 dimensions", r"shape \(8,\)"),
        (gate(weight=torch.randn(E, 7)), ValueError, r"weight of shape \(E, D\) = \(3, 8\)", r"\(3, 7\)"),
        (gate(weight=torch.randn(D, E)), ValueError, r"weight of shape \(E, D\) = \(8, 8\)", r"\(8, 3\)"),
        (gate(weight=torch.randn(0, D)), ValueError, "weight of 1 to 1024 experts", "0"),
        (gate(weight=torch.randn(1025, D)), ValueError, "weight of 1 to 1024 experts", "1025"),
        (gate(x=torch.randn(T, 0), weight=torch.randn(E, 0)), ValueError, "weight of D >= 1", r"\(3, 0\)"),
        (gate(weight=torch.randn(E, D, dtype=F16)), TypeError, "weight of x's dtype", "torch.float16"),
        (gate(x=half.double()), TypeError, "weight of x's dtype torch.float64", "torch.float32"),
        (gate(x=half, bias=torch.randn(E).half()),
         TypeError, "bias of weight's dtype torch.float32", "torch.float16"),
        (gate(x=half, weight=torch.randn(E, D).double()), TypeError, "weight of x's dtype", "torch.float64"),
        (gate(bias=torch.randn(E, 1)), ValueError, "bias of 1 dimensions", r"shape \(3, 1\)"),
        (gate(bias=torch.randn(D)), ValueError, r"bias of shape \(E\) = \(3,\)", r"\(8,\)"),
        (gate(bias=integers(E)), TypeError, f"bias of {FLOAT}", "torch.int32"),
        (gate(bias=torch.randn(E).double()), TypeError, "bias of x's dtype torch.float32", "torch.float64"),
    ],
    "route's logits": [
        (router(logits=[[1.0]]), TypeError, "logits to be a tensor", "list"),
        (router(logits=None), TypeError, "logits to be a tensor", "NoneType"),
        (router(logits=integers(T, 8)), TypeError, f"logits of {FLOAT}", "torch.int32"),
        (router(logits=integers(T, 8).bool()), TypeError, f"logits of {FLOAT}", "torch.bool"),
        (router(logits=complexes(T, 8)), TypeError, f"logits of {FLOAT}", "torch.complex64"),
        (router(logits=fp8(T, 8)), TypeError, f"logits of {FLOAT}", "torch.float8_e4m3fn"),
        (router(logits=torch.randn(8)), ValueError, "logits of 2 dimensions", r"shape \(8,\)"),
        (router(logits=torch.randn(2, 3, 8)), ValueError, "logits of 2 dimensions", r"shape \(2, 3, 8\)"),
        (router(logits=torch.randn(T, 0)), ValueError, "1 to 1024 experts", "0"),
        (router(logits=torch.randn(T, 1025)), ValueError, "1 to 1024 experts", "1025"),
    ],
    "route's numbers": [
        (router(top_k=0), ValueError, "top_k from 1 to 8, the number of experts", "0"),
        (router(top_k=-1), ValueError, "top_k from 1 to 8, the number of experts", "-1"),
        (router(top_k=9), ValueError, "top_k from 1 to 8, the number of experts", "9"),
        (router(logits=torch.randn(T, 64), top_k=33), ValueError, "top_k from 1 to 32", "33"),
        (router(top_k=2.0), TypeError, "top_k to be an int", "float 2.0"),
        (router(top_k="2"), TypeError, "top_k to be an int", "str '2'"),
        (router(top_k=True), TypeError, "top_k to be an int", "bool True"),
        (router(top_k=None), TypeError, "top_k to be an int", "NoneType"),
        (router(top_k=torch.tensor(2)), TypeError, "top_k to be an int", "Tensor"),
        (router(route_scale="2.5"), TypeError, "route_scale to be a number", "str '2.5'"),
        (router(route_scale=None), TypeError, "route_scale to be a number", "NoneType"),
        (router(route_scale=True), TypeError, "route_scale to be a number", "bool True"),
        (router(route_scale=1j), TypeError, "route_scale to be a number", "complex"),
        (router(route_scale=torch.tensor(2.0)), TypeError, "route_scale to be a number", "Tensor"),
        (router(route_scale=nan), ValueError, "route_scale to be a finite number", "nan"),
        (router(route_scale=-inf), ValueError, "route_scale to be a finite number", "-inf"),
        (router(route_norm_eps="0"), TypeError, "route_norm_eps to be a number", "str '0'"),
        (router(route_norm_eps=inf), ValueError, "route_norm_eps to be a finite number", "inf"),
        (router(route_norm_eps=nan), ValueError, "route_norm_eps to be a finite number", "nan"),
        (router(route_norm_eps=-1e-20), ValueError, "route_norm_eps >= 0", "-1e-20"),
        (router(route_norm=1), TypeError, "route_norm to be True or False", "int 1"),
        (router(route_norm=None), TypeError, "route_norm to be True or False", "NoneType"),
    ],
    "route's words and bias": [
        (router(score_func="tanh"), ValueError, r"one of \['sigmoid', 'softmax', 'sqrtsoftplus'\]", "'tanh'"),
        (router(score_func=None), ValueError, r"one of \['sigmoid', 'softmax', 'sqrtsoftplus'\]", "None"),
        (router(score_func=["softmax"]), ValueError, r"one of \['sigmoid', 'softmax'", r"\['softmax'\]"),
        (router(group_score="sum"), ValueError, r"group_score to be one of \['max', 'top2'\]", "'sum'"),
        (router(group_score=None), ValueError, r"group_score to be one of \['max', 'top2'\]", "None"),
        (router(expert_scale=2.0), TypeError, "expert_scale to be a tensor", "float"),
        (router(expert_scale=torch.ones(7)), ValueError, r"expert_scale of shape \(E\)", r"\(7,\)"),
        (router(expert_scale=torch.ones(8, 1)), ValueError, "expert_scale of 1 dim", r"shape \(8, 1\)"),
        (router(expert_scale=integers(8)), TypeError, f"expert_scale of {FLOAT}", "torch.int32"),
        (router(bias=1.0), TypeError, "bias to be a tensor", "float"),
        (router(bias=torch.zeros(7)), ValueError, r"bias of shape \(E\) = \(8,\)", r"\(7,\)"),
        (router(bias=torch.zeros(1, 8)), ValueError, "bias of 1 dimensions", r"shape \(1, 8\)"),
        (router(bias=torch.zeros(8, dtype=torch.int64)), TypeError, f"bias of {FLOAT}", "torch.int64"),
        (router(bias=complexes(8)), TypeError, f"bias of {FLOAT}", "torch.complex64"),
    ],
    "route's given ids and number of tokens": [
        (router(ids=[[0, 1]]), TypeError, "ids to be a tensor", "list"),
        (router(ids=torch.zeros(T, 2)), TypeError, GIVEN_IDS, "torch.float32"),
        (router(ids=integers(T, 2).to(torch.uint32)), TypeError, GIVEN_IDS, "torch.uint32"),
        (router(ids=integers(T)), ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
        (router(ids=integers(T, 3)), ValueError, r"ids of shape \(T, K\) = \(6, 2\)", r"\(6, 3\)"),
        (router(ids=integers(5, 2)), ValueError, r"ids of shape \(T, K\) = \(6, 2\)", r"\(5, 2\)"),
        (router(num_tokens=4), TypeError, "num_tokens to be a tensor of one integer", "int 4"),
        (router(num_tokens=torch.tensor(4.0)), TypeError, f"num_tokens of {INT}", "torch.float32"),
        (router(num_tokens=torch.tensor(4).short()), TypeError, f"num_tokens of {INT}", "torch.int16"),
        (router(num_tokens=integers(2)), ValueError, "num_tokens of one element", r"shape \(2,\)"),
        (router(num_tokens=integers(0)), ValueError, "num_tokens of one element", r"shape \(0,\)"),
    ],
    "route's groups": [
        (router(num_expert_groups=4), ValueError, "num_limited_groups together", r"\(4, None\)"),
        (router(num_limited_groups=4), ValueError, "num_limited_groups together", r"\(None, 4\)"),
        (router(num_expert_groups=3, num_limited_groups=1), ValueError, "divide the 8 experts", "3"),
        (router(num_expert_groups=0, num_limited_groups=1), ValueError, "divide the 8 experts", "0"),
        (router(num_expert_groups=4, num_limited_groups=5), ValueError, "limited_groups from 1 to 4", "5"),
        (router(num_expert_groups=4, num_limited_groups=0), ValueError, "limited_groups from 1 to 4", "0"),
        (router(top_k=3, num_expert_groups=4, num_limited_groups=1),
         ValueError, "top_k within the 2 experts", "3"),
        (router(num_expert_groups=4.0, num_limited_groups=2),
         TypeError, "num_expert_groups to be an int", "float 4.0"),
        (router(num_expert_groups=True, num_limited_groups=1),
         TypeError, "num_expert_groups to be an int", "bool True"),
        (router(num_expert_groups=4, num_limited_groups="2"),
         TypeError, "num_limited_groups to be an int", "str '2'"),
        (router(num_expert_groups=4, num_limited_groups=2.0),
         TypeError, "num_limited_groups to be an int", "float 2.0"),
    ],
    "route_plan": [
        (planned(ids=[[0, 1]]), TypeError, "ids to be a tensor", "list"),
        (planned(ids=None), TypeError, "ids to be a tensor", "NoneType"),
        (planned(ids=torch.zeros(T, K)), TypeError, f"ids of {ANY_INT}", "torch.float32"),
        (planned(ids=integers(T, K).bool()), TypeError, f"ids of {ANY_INT}", "torch.bool"),
        (planned(ids=complexes(T, K)), TypeError, f"ids of {ANY_INT}", "torch.complex64"),
        (planned(ids=integers(T)), ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
        (planned(ids=integers(2, 3, K)), ValueError, "ids of 2 dimensions", r"shape \(2, 3, 2\)"),
        (planned(num_experts=0), ValueError, "num_experts >= 1", "0"),
        (planned(num_experts=-3), ValueError, "num_experts >= 1", "-3"),
        (planned(num_experts=3.0), TypeError, "num_experts to be an int", "float 3.0"),
        (planned(num_experts="3"), TypeError, "num_experts to be an int", "str '3'"),
        (planned(num_experts=True), TypeError, "num_experts to be an int", "bool True"),
        (planned(num_experts=None), TypeError, "num_experts to be an int", "NoneType"),
        (planned(expert_map=[0, 1]), TypeError, "expert_map to be a tensor", "list"),
        (planned(expert_map=integers(9).long()), TypeError, "expert_map of dtype int32", "torch.int64"),
        (planned(expert_map=integers(9, 1)), ValueError, "expert_map of 1 dimensions", r"shape \(9, 1\)"),
        (planned(expert_map=integers(0)), ValueError, "expert_map of at least one expert", r"\(0,\)"),
        (planned(max_rows=1.5), TypeError, "max_rows to be an int", "float 1.5"),
        (planned(max_rows=0), ValueError, "max_rows >= 1", "0"),
        (planned(dropped_rows=torch.tensor(0)), ValueError, "no dropped_rows without max_rows", "one"),
        (planned(max_rows=3, dropped_rows=0), TypeError, "dropped_rows to be a tensor", "int"),
        (planned(max_rows=3, dropped_rows=torch.zeros(())), TypeError, "dropped_rows of dtype int64", "32"),
        (planned(max_rows=3, dropped_rows=integers(1).long()), ValueError, "dropped_rows of 0 dim", "1"),
    ],
    "plan_from_counts": [
        (counted(counts=[2, 0, 4]), TypeError, "counts to be a tensor", "list"),
        (counted(counts=torch.tensor([2.0, 4.0])), TypeError, f"counts of {ANY_INT}", "torch.float32"),
        (counted(counts=torch.tensor([True])), TypeError, f"counts of {ANY_INT}", "torch.bool"),
        (counted(counts=integers(2, 3)), ValueError, "counts of 1 dimensions", r"shape \(2, 3\)"),
        (counted(counts=integers()), ValueError, "counts of 1 dimensions", r"shape \(\)"),
        (counted(counts=integers(0)), ValueError, "counts of at least one expert", r"\(0,\)"),
        (counted(num_rows=6.0), TypeError, "num_rows to be an int", "float 6.0"),
        (counted(num_rows="6"), TypeError, "num_rows to be an int", "str '6'"),
        (counted(num_rows=True), TypeError, "num_rows to be an int", "bool True"),
        (counted(num_rows=None), TypeError, "num_rows to be an int", "NoneType"),
        (counted(num_rows=-1), ValueError, "num_rows >= 0", "-1"),
    ],
    "permute": [
        (permutation(x=None), TypeError, "x to be a tensor", "NoneType"),
        (permutation(x=torch.randn(T, D).long()), TypeError, f"x of {FLOAT}", "torch.int64"),
        (permutation(x=complexes(T, D)), TypeError, f"x of {FLOAT}", "torch.complex64"),
        (permutation(x=fp8(T, D)), TypeError, f"x of {FLOAT}", "torch.float8_e4m3fn"),
        (permutation(x=torch.randn(D)), ValueError, "x of 2 dimensions", r"shape \(8,\)"),
        (permutation(ids=[[0, 1]] * T), TypeError, "ids to be a tensor", "list"),
        (permutation(ids=torch.zeros(T, K)), TypeError, INT_IDS, "torch.float32"),
        (permutation(ids=integers(T, K).bool()), TypeError, INT_IDS, "torch.bool"),
        (permutation(ids=integers(T)), ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
        (permutation(ids=integers(5, K)), ValueError, "ids for x's 6 tokens", r"\(5, 2\)"),
        (permutation(ids=integers(T, 0)), ValueError, "at least one slot", r"\(6, 0\)"),
        (permutation(num_experts=0), ValueError, "num_experts >= 1", "0"),
        (permutation(num_experts=3.0), TypeError, "num_experts to be an int", "float 3.0"),
        (permutation(num_experts="3"), TypeError, "num_experts to be an int", "str '3'"),
        (permutation(num_experts=True), TypeError, "num_experts to be an int", "bool True"),
    ],
    "unpermute": [
        (combination(rows=[1.0]), TypeError, "rows to be a tensor", "list"),
        (combination(rows=integers(T * K, D)), TypeError, f"rows of {FLOAT}", "torch.int32"),
        (combination(rows=torch.randn(T, K, D)), ValueError, "rows of 2 dimensions", r"shape \(6, 2, 8\)"),
        (combination(rows=torch.randn(11, D)), ValueError, "the plan's 12 rows", r"\(11, 8\)"),
        (combination(plan=plan_of(5, K, E)), ValueError, "the plan's 10 rows", r"\(12, 8\)"),
        (combination(plan=(1, 2, 3)), TypeError, "plan to be a fused_moe.Plan", "tuple"),
        (combination(plan=None), TypeError, "plan to be a fused_moe.Plan", "NoneType"),
        (combination(plan=tuple(plan_of(T, K, E))), TypeError, "plan to be a fused_moe.Plan", "tuple"),
        (combination(plan=counts_plan), ValueError, "a plan made from ids", "a plan made from counts"),
        (combination(scores=1.0), TypeError, "scores to be a tensor", "float"),
        (combination(scores=torch.rand(T, 3)), ValueError, SCORES, r"\(6, 3\)"),
        (combination(scores=torch.rand(T * K)), ValueError, "scores of 2 dimensions", r"shape \(12,\)"),
        (combination(scores=integers(T, K)), TypeError, f"scores of {FLOAT}", "torch.int32"),
        (combination(scores=complexes(T, K)), TypeError, f"scores of {FLOAT}", "torch.complex64"),
    ],
    "unpermute's shared experts": shared_rows(combination, "rows"),
    "fused_experts's shared experts": shared_rows(experts, "x"),
    "grouped_mm": [
        (gemm(a=None), TypeError, "a to be a tensor", "NoneType"),
        (gemm(a=torch.randn(T)), ValueError, "a of 2 dimensions", r"shape \(6,\)"),
        (gemm(a=integers(T, D)), TypeError, f"a of {FLOAT}", "torch.int32"),
        (gemm(a=fp8(T, D)), TypeError, f"a of {FLOAT}", "torch.float8_e4m3fn"),
        (gemm(b=[1.0]), TypeError, "b to be a tensor", "list"),
        (gemm(b=complexes(E, F, D)), TypeError, f"b of {FLOAT}", "torch.complex64"),
        (gemm(b=torch.randn(F, D)), ValueError, "b of 3 dimensions", r"shape \(4, 8\)"),
        (gemm(b=torch.randn(E, F, 7)), ValueError, r"= \(3, 4, 8\)", r"\(3, 4, 7\)"),
        (gemm(b=torch.randn(E, D, F)), ValueError, r"\(E, out, in\) = \(3, 8, 8\)", r"\(3, 8, 4\)"),
        (gemm(b=torch.randn(0, F, D)), ValueError, "b of E, out, in >= 1", r"\(0, 4, 8\)"),
        (gemm(b=torch.randn(E, 0, D)), ValueError, "b of E, out, in >= 1", r"\(3, 0, 8\)"),
        (gemm(b=torch.randn(E, F, D).double()), TypeError, "b of a's dtype torch.float32", "torch.float64"),
        (gemm(offsets=[2, 2, 6]), TypeError, "offsets to be a tensor", "list"),
        (gemm(offsets=torch.tensor([2, 2, 6])), TypeError, "offsets of dtype int32", "torch.int64"),
        (gemm(offsets=integers(1, 3)), ValueError, "offsets of 1 dimensions", r"shape \(1, 3\)"),
        (gemm(offsets=integers(4)), ValueError, r"\(E\) = \(3,\)", r"\(4,\)"),
    ],
    "fused_experts's x, ids and scores": [
        (experts(x=[1.0]), TypeError, "x to be a tensor", "list"),
        (experts(x=integers(T, D)), TypeError, f"x of {FLOAT}", "torch.int32"),
        (experts(x=integers(T, D).bool()), TypeError, f"x of {FLOAT}", "torch.bool"),
        (experts(x=complexes(T, D)), TypeError, f"x of {FLOAT}", "torch.complex64"),
        (experts(x=fp8(T, D)), TypeError, f"x of {FLOAT}", "torch.float8_e4m3fn"),
        (experts(x=torch.randn(2, T, D)), ValueError, "x of 2 dimensions", r"shape \(2, 6, 8\)"),
        (experts(x=torch.randn(T, 7)), ValueError, r"x of shape \(T, D\) = \(6, 8\)", r"\(6, 7\)"),
        (experts(x=half), TypeError, "w1 of x's dtype torch.float16", "torch.float32"),
        (experts(scores=None), TypeError, "scores to be a tensor", "NoneType"),
        (experts(scores=integers(T, K)), TypeError, f"scores of {FLOAT}", "torch.int32"),
        (experts(scores=torch.rand(T, 3)), ValueError, SCORES, r"\(6, 3\)"),
        (experts(scores=torch.rand(5, K)), ValueError, SCORES, r"\(5, 2\)"),
        (experts(scores=torch.rand(T)), ValueError, "scores of 2 dimensions", r"shape \(6,\)"),
        (experts(ids=[[0, 0]] * T), TypeError, "ids to be a tensor", "list"),
        (experts(ids=integers(T, K).to(torch.uint8)), TypeError, INT_IDS, "torch.uint8"),
        (experts(ids=torch.rand(T, K)), TypeError, INT_IDS, "torch.float32"),
        (experts(ids=integers(5, K)), ValueError, "ids for x's 6 tokens", r"\(5, 2\)"),
        (experts(ids=integers(T)), ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
        (experts(ids=integers(T, 0)), ValueError, "at least one slot", r"\(6, 0\)"),
    ],
    "fused_experts's weights": [
        (experts(w1=None), TypeError, "w1 to be a tensor", "NoneType"),
        (experts(w1=integers(E, F, D)), TypeError, f"w1 of {FLOAT}", "torch.int32"),
        (experts(w1=fp8(E, F, D)), TypeError, f"w1 of {FLOAT}", "torch.float8_e4m3fn"),
        (experts(w2=None), TypeError, "w2 to be a tensor", "NoneType"),
        (experts(w2=complexes(E, D, F)), TypeError, f"w2 of {FLOAT}", "torch.complex64"),
        (experts(w2=torch.randn(D, F)), ValueError, "w2 of 3 dimensions", r"shape \(8, 4\)"),
        (experts(w3=[1.0]), TypeError, "w3 to be a tensor", "list"),
        (experts(w3=integers(E, F, D)), TypeError, f"w3 of {FLOAT}", "torch.int32"),
        (experts(w3=torch.randn(E, F, D, dtype=BF16)),
         TypeError, "w3 of x's dtype torch.float32", "torch.bfloat16"),
        (experts(w1=torch.randn(0, F, D), w2=torch.randn(0, D, F), w3=torch.randn(0, F, D)),
         ValueError, "E, D, F >= 1", r"w2 of shape \(0, 8, 4\)"),
        (experts(w1=torch.randn(E, 0, D), w2=torch.randn(E, D, 0), w3=torch.randn(E, 0, D)),
         ValueError, "E, D, F >= 1", r"w2 of shape \(3, 8, 0\)"),
    ],
    "fused_experts's one weight of another shape": [
        (experts(w1=torch.randn(E, 5, D)), ValueError, SHAPE_1, r"\(3, 5, 8\)"),
        (experts(w1=torch.randn(E, D, F)), ValueError, SHAPE_1, r"\(3, 8, 4\)"),
        (experts(w1=torch.randn(2, F, D)), ValueError, SHAPE_1, r"\(2, 4, 8\)"),
        (experts(w2=torch.randn(0, D, F)), ValueError, SHAPE_2, r"\(0, 8, 4\)"),
        (experts(w2=torch.randn(E, D, 5)), ValueError, SHAPE_2, r"\(3, 8, 5\)"),
        (experts(w2=torch.randn(E, 9, F)), ValueError, SHAPE_2, r"\(3, 9, 4\)"),
        (experts(w2=torch.randn(E, F, D)), ValueError, SHAPE_2, r"\(3, 4, 8\)"),
        (experts(w2=torch.randn(2, D, F)), ValueError, SHAPE_2, r"\(2, 8, 4\)"),
        (experts(w3=torch.randn(E, F, 9)), ValueError, SHAPE_3, r"\(3, 4, 9\)"),
        (experts(w3=torch.randn(5, F, D)), ValueError, SHAPE_3, r"\(5, 4, 8\)"),
        (experts(w3=None, w2=torch.randn(E, F, D)),
         ValueError, SHAPE_2, r"\(3, 4, 8\)"),
        (experts(w3=None, w2=torch.randn(E, 9, F)),
         ValueError, SHAPE_2, r"\(3, 9, 4\)"),
        (experts(w3=None, w2=torch.randn(2, D, F)),
         ValueError, SHAPE_2, r"\(2, 8, 4\)"),
        (experts(w3=None, w1=torch.randn(2, F, D), b1=torch.randn(E, F)),
         ValueError, SHAPE_1, r"\(2, 4, 8\)"),
    ],
    "fused_experts's layouts": [
        (experts(layout="halves"), ValueError, "no w3 with layout 'halves'", "w3"),
        (experts(layout="halves", w3=None),
         ValueError, r"w1 of shape \(E, 2F, D\) = \(3, 8, 8\)", r"\(3, 4, 8\)"),
        (experts(layout="halves", w3=None, w1=torch.randn(E, 9, D)),
         ValueError, r"w1 of shape \(E, 2F, D\) = \(3, 8, 8\)", r"\(3, 9, 8\)"),
        (experts(layout="interleaved", w3=None, w1=torch.randn(E, F, 3, D)),
         ValueError, r"\(E, F, 2, D\)", r"\(3, 4, 3, 8\)"),
        (experts(layout="interleaved", w3=None, w1=torch.randn(E, 5, 2, D)),
         ValueError, r"w1 of shape \(E, F, 2, D\) = \(3, 4, 2, 8\)", r"\(3, 5, 2, 8\)"),
        (experts(layout="separate", w1=torch.randn(E, F, 2, D)),
         ValueError, "w1 of 3 dimensions", r"\(3, 4, 2, 8\)"),
        (experts(transposed=True), ValueError,
         r"w1 of shape \(E, D, F\) = \(3, 8, 4\) with transposed=True",
         r"\(3, 4, 8\); all weights fit transposed=False"),
        (experts(w1=torch.randn(E, D, F), w2=torch.randn(E, F, D), w3=torch.randn(E, D, F)), ValueError,
         SHAPE_1, r"\(3, 8, 4\); all weights fit transposed=True"),
        (experts(transposed=True, w2=torch.randn(E, F, D)), ValueError,
         r"w1 of shape \(E, D, F\) = \(3, 8, 4\) with transposed=True", r"\(3, 4, 8\)$"),
        (experts(transposed=True, w1=torch.randn(E, D, F), w3=torch.randn(E, D, F)), ValueError,
         r"w2 of shape \(E, F, D\) = \(3, 4, 8\) with transposed=True", r"\(3, 8, 4\)$"),
        (experts(transposed=1), TypeError, "transposed to be True or False", "int 1"),
        (experts(layout="packed"), ValueError, "layout to be one of", "'packed'"),
        (experts(layout=None), ValueError, "layout to be one of", "None"),
    ],
    "fused_experts's biases": [
        (experts(b1=[0.0]), TypeError, "b1 to be a tensor", "list"),
        (experts(b1=integers(E, F)), TypeError, f"b1 of {FLOAT}", "torch.int32"),
        (experts(b1=torch.randn(E, 5)), ValueError, r"b1 of shape \(E, F\) = \(3, 4\)", r"\(3, 5\)"),
        (experts(layout="halves", w3=None, w1=torch.randn(E, 2 * F, D), b1=torch.randn(E, F)),
         ValueError, r"b1 of shape \(E, 2F\) = \(3, 8\)", r"\(3, 4\)"),
        (experts(b2=torch.randn(E, F)), ValueError, r"b2 of shape \(E, D\) = \(3, 8\)", r"\(3, 4\)"),
        (experts(b2=torch.randn(2, D)), ValueError, r"b2 of shape \(E, D\) = \(3, 8\)", r"\(2, 8\)"),
        (experts(b2=torch.randn(E, D).double()), TypeError, "b2 of x's dtype torch.float32", "torch.float64"),
        (experts(b3=torch.randn(F)), ValueError, "b3 of 2 dimensions", r"shape \(4,\)"),
        (experts(w3=None, b3=torch.randn(E, F)), ValueError, "b3 only beside w3", "b3 without w3"),
    ],
    "fused_experts's settings": [
        (experts(activation="swish"), ValueError, "activation to be one of", "'swish'"),
        (experts(activation=torch.relu), ValueError, "activation to be one of", "relu"),
        (experts(score_on="both"), ValueError, r"score_on to be one of \['input', 'output'\]", "'both'"),
        (experts(alpha="1.7"), TypeError, "alpha to be a number", "str '1.7'"),
        (experts(alpha=None), TypeError, "alpha to be a number", "NoneType"),
        (experts(alpha=nan), ValueError, "alpha to be a finite number", "nan"),
        (experts(alpha=inf), ValueError, "alpha to be a finite number", "inf"),
        (experts(limit="7"), TypeError, "limit to be a number", "str '7'"),
        (experts(limit=False), TypeError, "limit to be a number", "bool False"),
        (experts(limit=nan), ValueError, "limit to be a number", "nan"),
        (experts(limit=torch.tensor(7.0)), TypeError, "limit to be a number", "Tensor"),
        (experts(activation="swiglu_clamped", limit=-1), ValueError, "limit >= 0 .* 'swiglu_clamped'", "-1"),
        (experts(activation="swiglu_limited", limit=-inf), ValueError, "limit >= 0 .*_limited'", "-inf"),
        (experts(activation="situ", alpha=0.0), ValueError, "a finite alpha > 0 .* 'situ'", "0.0"),
        (experts(activation="situ", alpha=-2), ValueError, "a finite alpha > 0 .* 'situ'", "-2"),
        (experts(activation="situ", limit=0), ValueError, "a finite limit > 0 .* 'situ'", "0"),
        (experts(activation="situ", limit=inf), ValueError, "a finite limit > 0 .* 'situ'", "inf"),
        (experts(main_grads="w1"), TypeError, "main_grads to be a tuple", "str"),
        (experts(main_grads=(None, None)), ValueError, "main_grads of w1, w2 and w3", "2 of them"),
        (experts(main_grads=(1.0, None, None)), TypeError, r"main_grads\[0\] to be a tensor", "float"),
    ],
    "fused_experts's plan": [
        (experts(plan="plan"), TypeError, "plan to be a fused_moe.Plan", "str"),
        (experts(plan=tuple(plan_of(T, K, E))), TypeError, "plan to be a fused_moe.Plan", "tuple"),
        (experts(plan=fused_moe.plan_from_counts(torch.tensor([2, 0, 4]), T)),
         ValueError, "a plan made from ids", "a plan made from counts"),
        (experts(plan=plan_of(5, K, E)), ValueError, r"shape \(T, K\) = \(6, 2\)", r"a plan of \(5, 2\)"),
        (experts(plan=plan_of(T, 1, E)), ValueError, r"shape \(T, K\) = \(6, 2\)", r"a plan of \(6, 1\)"),
        (experts(plan=plan_of(K, T, E)), ValueError, r"shape \(T, K\) = \(6, 2\)", r"a plan of \(2, 6\)"),
        (experts(plan=plan_of(T, K, 4)), ValueError, "a plan of E = 3 experts", "4"),
        (experts(plan=plan_of(T, K, E), expert_map=integers(9)),
         ValueError, "expert_map without plan", "both"),
        (experts(expert_map=torch.zeros(9)), TypeError, "expert_map of dtype int32", "torch.float32"),
        (experts(plan=plan_of(T, K, E), max_rows=3), ValueError, "max_rows without plan", "both"),
        (experts(max_rows=True), TypeError, "max_rows to be an int", "bool True"),
        (experts(max_rows=-2), ValueError, "max_rows >= 1", "-2"),
        (experts(dropped_rows=torch.tensor(0)), ValueError, "no dropped_rows without max_rows", "one"),
        (experts(max_rows=3, dropped_rows=integers()), TypeError, "dropped_rows of dtype int64", "int32"),
    ],
    "fused_experts's out": [
        (experts(out=[1.0]), TypeError, "out to be a tensor", "list"),
        (experts(out=torch.empty(T, D).double()), TypeError, "out of dtype float32", "torch.float64"),
        (experts(out=torch.empty(T, D, 1)), ValueError, "out of 2 dimensions", r"shape \(6, 8, 1\)"),
        (experts(out=torch.empty(T, 9)), ValueError, r"out of shape \(T, D\) = \(6, 8\)", r"\(6, 9\)"),
        (experts(out=torch.empty(D, T).mT), ValueError, "a contiguous out", r"strides \(1, 6\)"),
        (experts(x=rows_of_both[:T], out=rows_of_both[T - 1 :]),
         ValueError, "out that shares no memory", "one that does"),
        (experts(w2=torch.randn(E, D, F).requires_grad_(), out=torch.empty(T, D)),
         ValueError, "out where no gradient is needed", "an argument that requires one"),
        (experts(shared=torch.randn(T, D).requires_grad_(), out=torch.empty(T, D)),
         ValueError, "out where no gradient is needed", "an argument that requires one"),
        (experts(shared=rows_of_both[:T], out=rows_of_both[T - 1 :]),
         ValueError, "out that shares no memory", "one that does"),
        (experts(out=torch.empty(T, D).requires_grad_()),
         ValueError, "out that requires no gradient itself", "requires_grad=True"),
        (experts(out=torch.empty(T, D).requires_grad_().sigmoid()),
         ValueError, "out that requires no gradient itself", "requires_grad=True"),
    ],
    "grouped_mlp": [
        (mlp(x_rows=[1.0]), TypeError, "x_rows to be a tensor", "list"),
        (mlp(x_rows=integers(T, D)), TypeError, f"x_rows of {FLOAT}", "torch.int32"),
        (mlp(x_rows=torch.randn(T, 9)), ValueError, r"x_rows of shape \(R, D\) = \(6, 8\)", r"\(6, 9\)"),
        (mlp(x_rows=half), TypeError, "w1 of x_rows's dtype torch.float16", "torch.float32"),
        (mlp(counts=[2, 0, 4]), TypeError, "counts to be a tensor", "list"),
        (mlp(counts=torch.tensor([2.0, 0.0, 4.0])), TypeError, f"counts of {ANY_INT}", "torch.float32"),
        (mlp(counts=torch.tensor([True] * 3)), TypeError, f"counts of {ANY_INT}", "torch.bool"),
        (mlp(counts=torch.tensor([2, 4])), ValueError, r"counts of shape \(E\) = \(3,\)", r"\(2,\)"),
        (mlp(counts=integers(1, 3)), ValueError, "counts of 1 dimensions", r"shape \(1, 3\)"),
        (mlp(w2=torch.randn(E, F, D)), ValueError, SHAPE_2, r"\(3, 4, 8\)"),
        (mlp(w3=torch.randn(2, F, D)), ValueError, SHAPE_3, r"\(2, 4, 8\)"),
        (mlp(layout="interleaved"), ValueError, "no w3 with layout 'interleaved'", "w3"),
        (mlp(activation=0), ValueError, "activation to be one of", "0"),
        (mlp(alpha=1j), TypeError, "alpha to be a number", "complex"),
        (mlp(limit=None), TypeError, "limit to be a number", "NoneType"),
        (mlp(activation="situ", limit=-1.0), ValueError, "a finite limit > 0 .* 'situ'", "-1.0"),
        (mlp(main_grads={"w1": None}), TypeError, "main_grads to be a tuple", "dict"),
    ],
    "FusedMoE": [
        (module(dim=0), ValueError, "dim >= 1", "0"),
        (module(dim=8.0), TypeError, "dim to be an int", "float"),
        (module(hidden_dim=-1), ValueError, "hidden_dim >= 1", "-1"),
        (module(hidden_dim="4"), TypeError, "hidden_dim to be an int", "str"),
        (module(num_experts=1025), ValueError, "1 to 1024 experts", "1025"),
        (module(num_experts=0), ValueError, "1 to 1024 experts", "0"),
        (module(num_experts="4"), TypeError, "num_experts to be an int", "str '4'"),
        (module(num_experts=4.0), TypeError, "num_experts to be an int", "float 4.0"),
        (module(num_experts=True), TypeError, "num_experts to be an int", "bool True"),
        (module(top_k=4), ValueError, "top_k from 1 to 3, the number of experts", "4"),
        (module(top_k=2.0), TypeError, "top_k to be an int", "float 2.0"),
        (module(top_k=None), TypeError, "top_k to be an int", "NoneType"),
        (module(activation="tanh"), ValueError, "activation to be one of .*'relu2'.*'situ'", "'tanh'"),
        (module(alpha="1"), TypeError, "alpha to be a number", "str '1'"),
        (module(limit=nan), ValueError, "limit to be a number", "nan"),
        (module(activation="situ", alpha=0), ValueError, "a finite alpha > 0 .* 'situ'", "0"),
        (module(activation="swiglu_limited", limit=-7.0), ValueError, "limit >= 0 .*_limited'", "-7.0"),
        (module(group_score="min"), ValueError, "group_score to be one of", "'min'"),
        (module(route_norm_eps=-1.0), ValueError, "route_norm_eps >= 0", "-1.0"),
        (module(router_dtype=F16), TypeError, "router_dtype to be None or torch.float32", "torch.float16"),
        (module(router_dtype="float32"), TypeError, "router_dtype to be None or torch.float32", "float32"),
        (module(router_dtype=torch.float32, dtype=torch.float64),
         TypeError, "router_dtype=None with parameters of float64", "torch.float32"),
        (module(expert_scale=1), TypeError, "expert_scale to be True or False", "int 1"),
        (module(score_func="relu"), ValueError, "score_func to be one of", "'relu'"),
        (module(num_expert_groups=2, num_limited_groups=1), ValueError, "divide the 3 experts", "2"),
        (module(num_expert_groups=3, num_limited_groups="1"),
         TypeError, "num_limited_groups to be an int", "str '1'"),
        (module(num_shared_experts=-1), ValueError, "num_shared_experts >= 0", "-1"),
        (module(shared_expert_gate=True),
         ValueError, "shared_expert_gate only with shared experts", "num_shared_experts=0"),
    ],
    "reference.check_ids": [
        (strict(ids=[[0]]), TypeError, "ids to be a tensor", "list"),
        (strict(ids=torch.zeros(T, K)), TypeError, f"ids of {ANY_INT}", "torch.float32"),
        (strict(ids=integers(T)), ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
        (strict(num_experts=0), ValueError, "num_experts >= 1", "0"),
        (strict(num_experts="3"), TypeError, "num_experts to be an int", "str '3'"),
        (strict(ids=torch.tensor([[0, 1], [2, 3]])),
         ValueError, "ids from 0 to E - 1 = 2", "1 outside, the first 3 at token 1, slot 1$"),
        (strict(ids=torch.tensor([[0, -1], [-1, 7]])),
         ValueError, "ids from 0 to E - 1 = 2", "3 outside, the first -1 at token 0, slot 1$"),
        (strict(ids=torch.tensor([[1, 2], [3, 1]])), ValueError, "ids from 0 to E - 1 = 2",
         "1 outside, the first 3 at token 1, slot 0; they run from 1 to E, so subtract 1"),
    ],
}  # fmt: skip
ROWS = {f"{group}-{i}": row for group, rows in TABLE.items() for i, row in enumerate(rows)}

UNDER_AUTOCAST = [
    (experts(x=integers(T, D)), TypeError, f"x of {FLOAT}", "torch.int32"),
    (experts(x=torch.randn(T, D, dtype=BF16), w1=torch.randn(E, F, D).double()),
     TypeError, "w1 of x's dtype torch.bfloat16, because autocast does not cast float64", "torch.float64"),
    (experts(x=torch.randn(T, D).double()),
     TypeError, "w1 of x's dtype torch.float64, because autocast does not cast float64", "torch.float32"),
    (experts(b2=torch.randn(E, D).double()), TypeError, "b2 of x's dtype .* does not cast", "torch.float64"),
    (experts(scores=integers(T, K)), TypeError, f"scores of {FLOAT}", "torch.int32"),
    (mlp(w3=torch.randn(E, F, D).double()), TypeError, "w3 of x_rows's dtype .* does not cast", "float64"),
    (gemm(b=torch.randn(E, F, D).double()), TypeError, "b of a's dtype .* does not cast", "torch.float64"),
    (gemm(b=integers(E, F, D)), TypeError, f"b of {FLOAT}", "torch.int32"),
]  # fmt: skip

COUNTS, OFFSETS = (
    "counts >= 0 that sum to at most the 6 rows given",
    "offsets that rise from 0 to at most the 6",
)
VALUES_ON_THE_CPU = [
    (mlp(counts=torch.tensor([2, -1, 4])), ValueError, COUNTS, r"\[2, -1, 4\]"),
    (mlp(counts=torch.tensor([2, 1, 4])), ValueError, COUNTS, r"\[2, 1, 4\]"),
    (counted(counts=torch.tensor([2**62, 2**62])), ValueError, COUNTS, rf"\[{2**62}, {2**62}\]"),
    (counted(counts=torch.tensor([-1, 1], dtype=torch.int8)), ValueError, COUNTS, r"\[-1, 1\]"),
    (gemm(offsets=torch.tensor([4, 2, 6]).int()), ValueError, OFFSETS, r"offsets\[1\] = 2 after 4"),
    (gemm(offsets=torch.tensor([-1, 2, 6]).int()), ValueError, OFFSETS, r"offsets\[0\] = -1 after 0"),
    (gemm(offsets=torch.tensor([2, 2, 7]).int()), ValueError, OFFSETS, r"offsets\[2\] = 7 after 2"),
    (router(ids=integers(T, 2) - 2), ValueError, "ids from -1 to 7", r"ids\[0, 0\] = -2"),
    (router(ids=integers(T, 2) + 8), ValueError, "ids from -1 to 7", r"ids\[0, 0\] = 8"),
    (router(ids=torch.full((T, 2), 255, dtype=torch.uint8)), ValueError, "ids from -1 to 7", "= 255"),
    (router(ids=torch.full((T, 2), 65535).to(torch.uint16)), ValueError, "ids from -1 to 7", "= 65535"),
    (router(ids=torch.full((T, 2), -128, dtype=torch.int8)), ValueError, "ids from -1 to 7", "= -128"),
    (planned(expert_map=integers(9) + E), ValueError, "expert_map from -1 to 2", r"expert_map\[0\] = 3"),
    (experts(expert_map=integers(9) - 2), ValueError, "expert_map from -1 to 2", r"expert_map\[0\] = -2"),
]  # fmt: skip


def moved(arguments: dict, device) -> dict:
    """The arguments on the device, with a plan's tensors. Views of one tensor stay views of one tensor."""
    bases = [id(value._base) for value in arguments.values() if torch.is_tensor(value)]
    on_device = {}

    def move(value):
        if isinstance(value, fused_moe.Plan):
            return fused_moe.Plan(*map(move, value))
        if not torch.is_tensor(value):
            return value
        base = value._base
        if base is None or bases.count(id(base)) == 1:
            return value.to(device)
        base = on_device.setdefault(id(base), base.to(device))
        return base.as_strided(value.size(), value.stride(), value.storage_offset())

    return {name: move(value) for name, value in arguments.items()}


def bits(arguments: dict) -> dict:
    """A copy of every tensor's bytes, also of those in a plan."""
    tensors = {}
    for name, value in arguments.items():
        for i, t in enumerate(value if isinstance(value, tuple) else (value,)):
            if torch.is_tensor(t):
                tensors[name, i] = t.detach().cpu().clone().reshape(-1).view(torch.uint8)
    return tensors


def check_raises(call, error, expected: str, found: str, autocast) -> None:
    """The call raises the error with expected and found, runs no operator and changes no argument."""
    fn, arguments = call
    before = bits(arguments)
    with Calls() as calls, autocast, pytest.raises(error) as raised:
        fn(**arguments)
    assert type(raised.value) is error
    assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")], "an operator ran"
    after = bits(arguments)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    message = str(raised.value)
    assert re.fullmatch(rf"{fn.__name__}: expected .+, found .+", message), message
    assert not re.search(CPP_FILE, message), message
    said, _, what = message.rpartition(", found ")
    assert re.search(expected, said), message
    assert re.search(found, what), message


@pytest.mark.quick
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_table(device, row):
    """A wrong call raises the right type of error with expected and found, and runs no operator."""
    (fn, arguments), *said = row
    check_raises((fn, moved(arguments, device)), *said, contextlib.nullcontext())


@pytest.mark.parametrize("row", UNDER_AUTOCAST)
def test_table_under_autocast(device, row):
    """The same where autocast casts everything but float64 and integers."""
    (fn, arguments), *said = row
    check_raises((fn, moved(arguments, device)), *said, torch.autocast(device.type, BF16))


@pytest.mark.parametrize("row", VALUES_ON_THE_CPU)
def test_values_are_checked_on_the_cpu(cpu, row):
    """Counts and offsets beyond the rows, ids of no expert; on a GPU reading them would synchronise."""
    check_raises(*row, contextlib.nullcontext())


def test_the_table_is_long():
    """Every public function is in it."""
    assert len(ROWS) >= 150
    named = {call[0].__name__ for call, *_ in ROWS.values()}
    public = {
        "router_logits",
        "route",
        "route_plan",
        "plan_from_counts",
        "permute",
        "unpermute",
        "grouped_mm",
    }
    assert named >= public | {"fused_experts", "grouped_mlp", "FusedMoE", "check_ids"}


@pytest.mark.parametrize("name", ("expert_map", *(f"plan.{field}" for field in fused_moe.Plan._fields)))
def test_out_in_memory_of_maps(device, name):
    """Integers that kernels read while they write out: out's memory starts with them."""
    fn, arguments = experts()
    arguments = moved(arguments, device)
    plan = fused_moe.route_plan(arguments["ids"], E)
    maps = integers(9).to(device) if name == "expert_map" else getattr(plan, name.removeprefix("plan."))
    memory = integers(T * D).to(device)
    inside = memory[: maps.numel()].copy_(maps.flatten()).view(maps.shape)
    given = {"expert_map": inside}
    if name != "expert_map":
        given = {"plan": plan._replace(**{name.removeprefix("plan."): inside})}
    out = memory.view(F32).view(T, D)
    with pytest.raises(ValueError, match="expected out that shares no memory .*, found one that does"):
        fn(**arguments, **given, out=out)
    apart = torch.empty(T, D, device=device)
    assert torch.equal(fn(**arguments, **given, out=apart), fn(**arguments, **given))


def test_out_may_require_a_gradient_without_grad_mode(device):
    fn, arguments = experts()
    arguments, out = moved(arguments, device), torch.empty(T, D, device=device, requires_grad=True)
    with torch.no_grad():
        assert fn(**arguments, out=out) is out and torch.equal(out, fn(**arguments))


# --- every argument of every public function --------------------------------------------------------------


def quantised(**changes):
    w = fused_moe.quantize(torch.randn(E, 32, 64), "int8")
    arguments = {"data": w.data, "scale": w.scale, "format": "int8", "shape": w.shape}
    return fused_moe.QuantizedWeight, arguments | changes


def packed(**changes):
    return fused_moe.quantize, {"module_or_weight": torch.randn(E, 32, 128), "format": "int4"} | changes


def loaders() -> list:
    """Each reads one expert."""
    gptq = {"qweight": integers(8, 64), "qzeros": integers(2, 8), "scales": torch.ones(2, 64)}
    tensors = {
        **{f"0.{part}.{name}": tensor for part in ("gate", "up", "down") for name, tensor in gptq.items()},
        **{
            "0.awq.qweight": integers(64, 2),
            "0.awq.qzeros": integers(2, 2),
            "0.awq.scales": torch.ones(2, 16),
        },
        **{"0.fp8.weight": fp8(128, 128), "0.fp8.weight_scale_inv": torch.ones(1, 1)},
        **{"0.int8.weight": integers(8, 32).char(), "0.int8.weight_scale": torch.ones(8, 1)},
        **{"mx_blocks": integers(1, 8, 2, 16).byte(), "mx_scales": integers(1, 8, 2).byte()},
    }
    names = {
        quantized.from_gptq: {"name": "*.gate"},
        quantized.from_gptq_experts: {"gate": "*.gate", "up": "*.up", "down": "*.down"},
        quantized.from_awq: {"name": "*.awq"},
        quantized.from_fp8_block: {"name": "*.fp8"},
        quantized.from_compressed_tensors: {"name": "*.int8"},
        quantized.from_mxfp4: {"name": "mx"},
    }
    return [(fn, {"state_dict": tensors, **given}) for fn, given in names.items()]


def layer(**options) -> FusedMoE:
    return FusedMoE(D, F, E, K, **options)


def balanced():
    model = layer(load_balance_coeff=1e-3)
    return fused_moe.balance, {"model": model, "optimizer": torch.optim.SGD(model.parameters())}


def adapters():
    lora = adapted().experts.lora
    return lora.load, {"lora": lora()}


def adapted() -> FusedMoE:
    return fused_moe.add_lora(layer(), 2)


# Each makes a right call, a new one each time, since add_lora changes its module.
MAKERS = [
    *(experts, mlp, gate, router, gemm, permutation, combination, planned, counted, strict, module),
    *(quantised, packed, balanced, adapters),
    lambda: (layer().forward, {"x": torch.randn(T, D)}),
    lambda: (
        fused_moe.load_balancing_loss,
        {"logits": torch.randn(T, E), "ids": integers(T, K), "num_experts": E},
    ),
    lambda: (fused_moe.router_z_loss, {"logits": torch.randn(T, E)}),
    lambda: (
        fused_moe.linear,
        {"x": torch.randn(T, D), "weight": torch.randn(F, D), "bias": torch.randn(F)},
    ),
    lambda: (fused_moe.load_report, {"model": layer(load_balance_coeff=1e-3)}),
    lambda: (fused_moe.refresh_weights, {"module": layer()}),
    lambda: (fused_moe.path, {"layer": layer(), "x": torch.randn(T, D)}),
    lambda: (fused_moe.smooth_from, {"module": layer(), "batches": [torch.randn(T, D)]}),
    lambda: (fused_moe.add_lora, {"module": layer(), "rank": 2}),
    lambda: (fused_moe.set_lora, {"module": adapted(), "names": "default"}),
    lambda: (fused_moe.merge_lora, {"module": adapted()}),
    lambda: (fused_moe.remove_lora, {"module": adapted()}),
    lambda: (fused_moe.lora_state_dict, {"module": adapted()}),
    lambda: (
        fused_moe.load_lora_state_dict,
        {"module": adapted(), "state_dict": fused_moe.lora_state_dict(adapted())},
    ),
    lambda: (
        fused_moe.LoRA.from_peft,
        {"num_experts": E, "w1": (torch.randn(6, D), torch.randn(F, 6))},
    ),
    lambda: (
        fused_moe.upcycle,
        {"mlp": (torch.randn(F, D), torch.randn(D, F)), "num_experts": E, "top_k": K},
    ),
    lambda: (
        fused_moe.clip_grad_norm_,
        {"parameters": list(layer().parameters()), "max_norm": 1.0, "norm_type": 2.0},
    ),
    lambda: (ExpertParallel, {"static": True, "capacity": 8}),
    lambda: (ExpertTensorParallel, {"use_local_output": False}),
    lambda: (fused_moe.enable_fp8, {"module": FusedMoE(128, 768, E, K)}),
    lambda: (fused_moe.fp8_weights, {name: torch.randn(1, 128, 128) for name in ("w1", "w2", "w3")}),
    *(partial(lambda i: loaders()[i], i) for i in range(len(loaders()))),
]
RIGHT_CALLS = {make()[0].__qualname__: make for make in MAKERS}
# What is right there alone: any word; no parameters, and tensors of any kind, which have no gradients.
FITTING = {
    ("add_lora", "name"): {"text"},
    ("clip_grad_norm_", "parameters"): {"dict", "list", "complex", "bools"},
}

ANY_ARGUMENT = [
    (name, argument, parameter)
    for name, make in RIGHT_CALLS.items()
    for argument, parameter in inspect.signature(make()[0]).parameters.items()
]
# What nothing takes for right, except where an annotation has the type on the right.
WRONG_VALUES = {
    "None": (None, ("None",)),
    "text": ("text", ()),
    "dict": ({}, ()),
    "list": ([], ()),
    "object": (object(), ()),
    "type": (int, ()),
    "float": (1.5, ("float",)),
    "bool": (True, ("bool",)),
    "nan": (nan, ()),
    "plan": (fused_moe.Plan(*[1] * 6), ()),
    "lora": (fused_moe.LoRA(a1=1, b1=2), ()),
    "complex": (complexes(T, D), ()),
    "bools": (integers(T, K).bool(), ()),
}


@pytest.mark.parametrize(
    "call, error, message",
    (
        (experts(plan=plan_of(T, K, E)._replace(counts=None)), TypeError, "a plan as .*, found NoneType, "),
        (combination(plan=plan_of(T, K, E)._replace(row_slot=[0])), TypeError, "a plan as .*, list, Tensor$"),
        (experts(lora=fused_moe.LoRA(a1=1.0, b1=2.0)), TypeError, "lora.a1 to be a tensor, found float"),
        (experts(main_grads=({}, None, None)), TypeError, r"main_grads\[0\] to be a tensor, found dict"),
        (quantised(shape=(E, "32", 64)), ValueError, "shape .* of sizes >= 1, found "),
        (quantised(shape=(E, 32.0, 64)), ValueError, "shape .* of sizes >= 1, found "),
        (quantised(shape=(E, None, 64)), ValueError, "shape .* of sizes >= 1, found "),
        (packed(group_size=64.0), TypeError, "group_size to be an int, found float 64.0"),
    ),
)  # fmt: skip
def test_wrong_parts(device, call, error, message):
    """Wrong parts of a compound argument."""
    fn, arguments = call
    with pytest.raises(error, match=f"{fn.__name__}: expected {message}"):
        fn(**moved(arguments, device))


@pytest.mark.parametrize("name, argument, parameter", ANY_ARGUMENT, ids=lambda v: v if type(v) is str else "")
def test_any_argument_of_any_function(device, name, argument, parameter):
    """None, words, dicts and tensors of no use raise TypeError or ValueError, and run no operator."""
    types = str(parameter.annotation).split(" | ")
    for label, (value, fits) in WRONG_VALUES.items():
        if value is parameter.default or set(fits) & set(types):
            continue
        if label in FITTING.get((name, argument), ()):
            continue
        fn, arguments = RIGHT_CALLS[name]()
        arguments = moved(arguments | {argument: value}, device)
        try:
            with Calls() as calls:
                fn(**arguments)
        except (TypeError, ValueError) as error:
            assert type(error) in (TypeError, ValueError)
            assert re.fullmatch(r"\w+: expected .+, found .+", str(error)), (label, str(error))
        else:
            pytest.fail(f"{name}({argument}={label}) raised nothing")
        assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")], label


def test_any_public_function_is_called(cpu):
    """Rightly. Named tuples that functions return, info(), which takes nothing, and contexts, which check
    when they are entered (test_replay.py) or nothing (fp8_shares), are left out."""
    called = set()
    for make in MAKERS:
        fn, arguments = make()
        fn(**arguments)
        called.add(fn)
    others = {"LoRA", "LoadReport", "ModelLoadReport", "Plan", "RouterLosses", "info", "reference"}
    others |= {"Routes", "record_routing", "replay_routing", "Fp8Weights", "Fp8Shares", "fp8_shares"}
    assert {name for name in fused_moe.__all__ if getattr(fused_moe, name) not in called} == others
    assert called >= {getattr(quantized, name) for name in quantized.__all__}


def test_right_calls_are_right(device):
    """The table's calls without changes run: each fails for its own reason."""
    for call in (experts, mlp, gate, router, gemm, permutation, combination, planned, counted, strict):
        fn, arguments = call()
        fn(**moved(arguments, device))
    fn, arguments = module()
    fn(**arguments, device=device)(torch.randn(T, D, device=device))


@pytest.mark.parametrize(
    "x, found",
    ((torch.randn(T, 7), r"\(6, 7\)"), (torch.randn(()), r"\(\)"), ([1.0], "list")),
    ids=("width", "scalar", "list"),
)
def test_layer_input(device, x, found):
    """FusedMoE's forward names the width that it expects."""
    x = x.to(device) if torch.is_tensor(x) else x
    with pytest.raises((TypeError, ValueError), match=rf"FusedMoE: expected .*D = 8, found {found}"):
        FusedMoE(D, F, E, K, device=device)(x)


@pytest.mark.parametrize("without_gradients", (False, True))
def test_the_layer_raises_before_its_routed_experts_run(device, without_gradients):
    """Where parameters were replaced by wrong ones, and where ids on the CPU are out of range."""

    def replace(name, value):
        return lambda layer: setattr(layer.experts, name, torch.nn.Parameter(value))

    def accumulate(layer):
        layer.experts.w1.main_grad = torch.zeros(3, device=device)

    wrong = [
        (replace("w2", torch.randn(E, D, 5, device=device)), {}, "w2 of shape"),
        (replace("w1", torch.randn(E, F, D, device="meta")), {}, "w1 on x's device"),
    ]
    if not without_gradients:
        wrong.append((accumulate, {}, r"main_grads\[0\] of 3 dimensions"))
    if device.type == "cpu":
        wrong.append((lambda layer: None, {"ids": integers(T, K) + E}, "ids from .* to 2"))
    for change, given, expected in wrong:
        layer = FusedMoE(D, F, E, K, device=device)
        change(layer)
        x = torch.randn(T, D, device=device, requires_grad=not without_gradients)
        with Calls() as calls, torch.set_grad_enabled(not without_gradients):
            with pytest.raises((TypeError, ValueError), match=rf"\w+: expected {expected}.*, found"):
                layer(x, **given)
        ran = {n for n, _, _ in calls.calls if n.startswith("fused_moe::")}
        assert ran <= {"fused_moe::router_logits", "fused_moe::route"}


def test_float16_overflows_where_the_docs_say(device):
    """act(gate) * up of 288 each, in float16 and bfloat16; the loop does the same."""
    for dtype, overflows in ((F16, True), (BF16, False)):
        layer, loop = (
            cls(64, 32, 8, 2, device=device, dtype=dtype) for cls in (FusedMoE, fused_moe.reference.FusedMoE)
        )
        with torch.no_grad():
            for weight, value in ((layer.experts.w1, 1), (layer.experts.w3, 1), (layer.experts.w2, 2**-10)):
                weight.fill_(value)
        loop.load_state_dict(layer.state_dict())
        x = torch.full((3, 64), 4.5, device=device, dtype=dtype)
        for module in (layer, loop):
            assert module(x).isinf().all() == overflows and not module(x).isnan().any()


def test_dtypes_on_meta_are_checked_under_autocast(device):
    """autocast leaves the meta device alone, so two dtypes are an error there."""
    fn, arguments = experts()
    arguments = {name: t.to("meta") for name, t in arguments.items()} | {
        "w2": torch.empty(E, D, F, dtype=BF16, device="meta")
    }
    with torch.autocast(device.type, BF16), pytest.raises(TypeError, match="w2 of x's dtype torch.float32"):
        fn(**arguments)


@pytest.mark.parametrize("changed", ({"alpha": -1.0}, {"limit": 0.0}))
@pytest.mark.parametrize("grad", (True, False))
def test_constants_that_were_assigned_to_a_layer(device, changed, grad):
    """They are checked in each call, also where the layer is one operator."""
    layer = FusedMoE(D, F, E, K, activation="situ", device=device)
    for name, value in changed.items():
        setattr(layer.experts, name, value)
    [(name, value)] = changed.items()
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=f"a finite {name} > 0 .* {value}"):
        layer(torch.randn(T, D, device=device))


@pytest.mark.parametrize("activation, constants, message", (
    ("situ", [0.0, 1.0], "finite constants > 0 with situ, found 0"),
    ("situ", [1.0, inf], "finite constants > 0 with situ, found inf"),
    ("swiglu_limited", [1.0, -1.0], "a limit >= 0 with an activation that clamps, found -1"),
    ("swiglu_clamped", [1.0, nan], "a limit >= 0 with an activation that clamps, found nan"),
))  # fmt: skip
def test_constants_of_the_operator(device, activation, constants, message):
    h = torch.randn(3, 4, device=device)
    code = fused_moe.ops.ACTIVATION_CODES[activation]
    with pytest.raises(RuntimeError, match=f"activate: expected {message}"):
        torch.ops.fused_moe.activate(h, None, fused_moe.ops.UNGATED, code, constants)


@pytest.mark.parametrize("call", (experts, mlp, router, gemm, permutation, combination, planned, counted))
def test_a_device_without_kernels(device, monkeypatch, call):
    """The first tensor's device is named, and where kernels for it can be built, how."""
    monkeypatch.setattr(fused_moe.checks, "DEVICES", ("cpu",))
    fn, arguments = call()
    arguments = moved(arguments, "meta")
    message = f"{fn.__name__}: expected .* on a device that this build has kernels for (.*cpu.*), found meta"
    with pytest.raises(ValueError, match=message):
        fn(**arguments)


def test_a_build_without_cuda_kernels_says_what_to_do(cpu, monkeypatch):
    """A CUDA tensor in a build of the CPU tier alone."""
    monkeypatch.setattr(fused_moe.checks, "DEVICES", ("cpu", "meta"))
    with FakeTensorMode():  # a CUDA tensor without a GPU
        x = torch.empty(T, 8, device="cuda")
    with pytest.raises(ValueError, match="found cuda:0; this build has no CUDA kernels: put nvcc on PATH or"):
        route(x, 2)


@pytest.mark.parametrize("activation", ("swiglu_clamped", "swiglu_limited"))
def test_an_infinite_limit_is_a_number(device, activation):
    """limit=inf clamps nothing."""
    fn, arguments = experts(activation=activation, limit=inf)
    arguments = moved(arguments, device)
    assert torch.equal(fn(**arguments), fn(**arguments | {"limit": 1e30}))


def test_right_ids_pass_the_strict_check(device):
    """Every id in [0, E), of any integer dtype, none at all included."""
    for ids in (torch.tensor([[0, 2], [1, 1]]), integers(0, 2), torch.tensor([[2]], dtype=torch.uint8)):
        assert fused_moe.reference.check_ids(ids.to(device), E) is None


def traced(run, value):
    return make_fx(run)(value)


def functionalized(run, value):
    return torch.func.functionalize(run)


def mapped(run, value):
    return lambda value: torch.vmap(run)(value[None])[0]


@pytest.mark.parametrize(
    "call, name, transform",
    (
        (gemm, "offsets", traced),
        (gemm, "offsets", functionalized),
        (gemm, "offsets", mapped),
        (mlp, "counts", traced),
        (mlp, "counts", functionalized),
    ),
)
def test_values_are_not_read_where_there_are_none(cpu, call, name, transform):
    """A transformed call takes offsets and counts as arguments, and they do not become constants."""
    fn, arguments = call()

    def run(value):
        return fn(**arguments | {name: value})

    transformed = transform(run, arguments[name])
    other = arguments[name].clone()
    other[-1] -= 1
    with torch.no_grad():
        assert torch.equal(transformed(other), run(other))


def test_meta_arguments_are_not_mixed(device):
    """A weight on another device is named before anything runs."""
    changes = {
        "w2": torch.randn(E, D, F, device="meta"),
        "ids": torch.zeros(T, K, dtype=torch.int32, device="meta"),
        "shared": torch.randn(T, D, device="meta"),
    }
    for name, value in changes.items():
        fn, arguments = experts()
        arguments = moved(arguments, device) | {name: value}
        with pytest.raises(ValueError, match=f"{name} on x's device {device.type}.*, found meta"):
            fn(**arguments)


@pytest.mark.parametrize(
    "call, name, like",
    (
        (router(ids=integers(T, 2)), "ids", "logits"),
        (router(num_tokens=torch.tensor(4)), "num_tokens", "logits"),
        (router(expert_scale=torch.ones(8)), "expert_scale", "logits"),
        (planned(expert_map=integers(9)), "expert_map", "ids"),
        (experts(expert_map=integers(9)), "expert_map", "ids"),
        (experts(max_rows=3, dropped_rows=torch.tensor(0)), "dropped_rows", "ids"),
        (experts(shared=torch.randn(T, D), shared_gate=torch.randn(T)), "shared_gate", "x"),
        (combination(shared=torch.randn(T, D)), "shared", "rows"),
        (combination(shared=torch.randn(T, D), shared_gate=torch.randn(T)), "shared_gate", "rows"),
    ),
)
def test_other_arguments_on_meta_are_not_mixed(device, call, name, like):
    """Nor ids, numbers of tokens, scales, maps and shared experts. On the right device they are right."""
    fn, arguments = call
    arguments = moved(arguments, device)
    fn(**arguments)
    with pytest.raises(ValueError, match=f"{name} on {like}'s device {device.type}.*, found meta"):
        fn(**arguments | {name: arguments[name].to("meta")})


# --- torch.ops called directly: no access out of range --------------------------------------------


def operator_calls(device) -> tuple[dict, dict]:
    """Calls that would read or write out of range if the operator did not check: by shape, and by value."""
    plain = (0, False, 1.0, 1e-20, 0, 0, 0)  # settings of a choice
    ids = torch.arange(T * K, device=device, dtype=torch.int32).remainder(E).view(T, K)
    plan = fused_moe.route_plan(ids, E)
    maps, no_maps = plan.tensors, plan.tensors[:2]  # offsets, schedule, row_token, row_slot, token_row
    x, rows, scores = (torch.randn(s, device=device) for s in ((T, D), (T * K, D), (T, K)))
    w1, w2, w3 = (torch.randn(s, device=device) for s in ((E, F, D), (E, D, F), (E, F, D)))
    a, h = torch.randn(T * K, F, device=device), torch.randn(T * K, 2 * F, device=device)
    ends, act = plan.offsets[1:].contiguous(), (0, [1.0, 1.0])
    up = (x, w1, w3, None, None)
    one_each, no_router, routed = (x, [w1], [w3], [w2]), [*[None] * 6, False], (0, 0, [1.0] * 4)  # of experts
    router = (w1[:, 0], None, None, None, None, [1, 0, 0, 0, 0, 0])

    def changed(i, value):
        return [value if j == i else v for j, v in enumerate(maps)]

    far = torch.full_like(plan.row_token, 10**6)
    before = torch.full_like(plan.row_token, -5)
    falling = torch.tensor([0, 12, 3, 12], dtype=torch.int32, device=device)
    beyond = torch.tensor([0, 4, 8, 9999], dtype=torch.int32, device=device)
    shapes = {
        "router_logits: narrow weight": (ops.router_logits, x, w1[0, :, :7], None),
        "router_logits: half weight": (ops.router_logits, x, w1[0].half(), None),
        "router_logits: long bias": (ops.router_logits, x, w1[0], x[0]),
        "router_logits: 1025 experts": (ops.router_logits, x, torch.randn(1025, D, device=device), None),
        "router_logits: no width": (ops.router_logits, x[:, :0], w1[0, :, :0], None),
        "router_logits: integers": (ops.router_logits, ids, ids, None),
        "router_dgrad: dlogits of other experts": (ops.router_dgrad, x, w1[0]),
        "router_dgrad: half dlogits": (ops.router_dgrad, x[:, :4].half(), w1[0]),
        "router_dgrad: a weight of experts": (ops.router_dgrad, x[:, :4], w1),
        "route: ids of other tokens": (ops.route, x, None, 2, *plain, ids[:5]),
        "route: ids of floats": (ops.route, x, None, 2, *plain, scores),
        "route: two numbers of tokens": (ops.route, x, None, 2, *plain, None, ids[0]),
        "route: no number of tokens": (ops.route, x, None, 2, *plain, None, ids[0, :0]),
        "route: a float number of tokens": (ops.route, x, None, 2, *plain, None, scores[0, :1]),
        "route_plan: a map of int64": (ops.route_plan, ids, E, plan.counts.long()),
        "route_plan: a matrix for a map": (ops.route_plan, ids, E, ids),
        "route_plan: an empty map": (ops.route_plan, ids, E, plan.counts[:0]),
        "route_plan: negative rows": (ops.route_plan, ids, E, None, -1),
        "route_plan_dropped: an int32 count": (ops.route_plan_dropped, ids, E, None, 3, plan.counts[0]),
        "route_plan_dropped: E counts": (ops.route_plan_dropped, ids, E, None, 3, plan.counts.long()),
        "route: k beyond E": (ops.route, x, None, 9, *plain),
        "route: k of 0": (ops.route, x, None, 0, *plain),
        "route: k beyond 32": (ops.route, torch.randn(2, 64, device=device), None, 33, *plain),
        "route: 1025 experts": (ops.route, torch.randn(2, 1025, device=device), None, 1, *plain),
        "route: groups that do not divide": (ops.route, x, None, 1, 0, False, 1.0, 1e-20, 3, 1, 0),
        "route: k beyond the kept groups": (ops.route, x, None, 3, 0, False, 1.0, 1e-20, 4, 1, 0),
        "route: short bias": (ops.route, x, torch.zeros(3, device=device), 1, *plain),
        "route: double bias": (ops.route, x, torch.zeros(8, device=device).double(), 1, *plain),
        "route: unknown score function": (ops.route, x, None, 1, 7, False, 1.0, 1e-20, 0, 0, 0),
        "route: unknown group score": (ops.route, x, None, 1, 0, False, 1.0, 1e-20, 0, 0, 2),
        "route: short scale": (ops.route, x, None, 1, *plain, None, None, w1[0, 0, :3]),
        "route: integer logits": (ops.route, ids, None, 1, *plain),
        "route_backward: ids of 5 tokens": (ops.route_backward, scores, x, ids[:5], 0, False, 1.0, 1e-20),
        "route_backward: int64 ids": (ops.route_backward, scores, x, ids.long(), 0, False, 1.0, 1e-20),
        "route_backward: half gradient": (ops.route_backward, scores.half(), x, ids, 0, False, 1.0, 1e-20),
        "route_plan: no experts": (ops.route_plan, ids, 0),
        "route_plan: negative experts": (ops.route_plan, ids, -3),
        "route_plan: float ids": (ops.route_plan, scores, 3),
        "route_plan: flat ids": (ops.route_plan, ids.flatten(), 3),
        "count_plan: float counts": (ops.count_plan, torch.ones(3, device=device), 9),
        "count_plan: negative rows": (ops.count_plan, torch.zeros(3, device=device).int(), -1),
        "pad: a matrix": (ops.pad, x, 1, 8, 8),
        "pad: a negative size": (ops.pad, x[None, None], 1, -1, 8),
        "pad: too many rows": (ops.pad, x[None, None], 2**20, 2**20, 1),
        "pad: a size beyond 32 bits": (ops.pad, x[None, None], 1, 2**31, 1),
        "pad: integers": (ops.pad, ids[None, None], 1, 8, 8),
        "permute: short row_token": (ops.permute, x, changed(2, plan.row_token[:5])),
        "permute: int64 row_token": (ops.permute, x, changed(2, plan.row_token.long())),
        "permute: maps of more tokens": (ops.permute, x[:3], maps),
        "sum_peers: no ranks": (ops.sum_peers, [], plan.token_row),
        "sum_peers: too many ranks": (ops.sum_peers, [x] * 129, plan.token_row),
        "sum_peers: rows of other shapes": (ops.sum_peers, [x, x[:2]], plan.token_row),
        "sum_peers: rows of other dtypes": (ops.sum_peers, [x, x.half()], plan.token_row),
        "sum_peers: rows with strides": (ops.sum_peers, [x, x.T.contiguous().T], plan.token_row),
        "sum_peers: int64 index": (ops.sum_peers, [x], plan.token_row.long()),
        "sum_peers: scores of another shape": (ops.sum_peers, [x], plan.token_row, scores[:, :1]),
        "unpermute: short rows": (ops.unpermute, rows[:7], None, maps),
        "unpermute: scores of another shape": (ops.unpermute, rows, scores[:, :1], maps),
        "unpermute: half scores": (ops.unpermute, rows, scores.half(), maps),
        "unpermute: short shared": (ops.unpermute, rows, None, maps, x[:4]),
        "unpermute: half shared": (ops.unpermute, rows, None, maps, x.half()),
        "unpermute: a gate without shared": (ops.unpermute, rows, None, maps, None, scores[:, 0]),
        "unpermute: short gate": (ops.unpermute, rows, None, maps, x, scores[:4, 0]),
        "unpermute: a gate of two columns": (ops.unpermute, rows, None, maps, x, scores),
        "unpermute: half gate": (ops.unpermute, rows, None, maps, x, scores[:, 0].half()),
        "shared_backward: short gate": (ops.shared_backward, x, x, scores[:4, 0], True, True),
        "shared_backward: narrow shared": (ops.shared_backward, x, x[:, :3], scores[:, 0], True, True),
        "shared_backward: no shared": (ops.shared_backward, x, None, scores[:, 0], True, True),
        "unpermute_backward: short dout": (ops.unpermute_backward, x[:2], rows, scores, maps, True, True),
        "grouped_mm: int64 offsets": (ops.grouped_mm, a, w2, ends.long()),
        "grouped_mm: offsets of fewer experts": (ops.grouped_mm, a, w2, ends[:2]),
        "grouped_mm: another width": (ops.grouped_mm, rows, w2, ends),
        "grouped_mm: another dtype": (ops.grouped_mm, a, w2.half(), ends),
        "wgrad: fewer rows in b": (ops.wgrad, a, rows[:5], ends),
        "wgrad: both gathered": (ops.wgrad, a, x, ends, plan.row_token, plan.row_token),
        "wgrad_accumulate: fewer experts in dw": (ops.wgrad_accumulate, a, rows, ends, w1[:2]),
        "activate: no up": (ops.activate, a, None, 0, *act),
        "activate: up with a packed layout": (ops.activate, h, a, 1, *act),
        "activate: up without gates": (ops.activate, a, a, 3, *act),
        "activate: short up": (ops.activate, a, a[:5], 0, *act),
        "activate: half up": (ops.activate, a, a.half(), 0, *act),
        "activate: odd packed width": (ops.activate, h[:, 1:], None, 2, *act),
        "activate: flat h": (ops.activate, h[0], None, 2, *act),
        "activate: integers": (ops.activate, ids, None, 3, *act),
        "activate: unknown layout": (ops.activate, h, None, 4, *act),
        "activate: unknown activation": (ops.activate, h, None, 1, 17, [1.0, 1.0]),
        "activate: one constant": (ops.activate, h, None, 1, 0, [1.0]),
        "activate_backward: narrow h": (ops.activate_backward, a, a, None, 1, *act),
        "activate_backward: short h": (ops.activate_backward, a, h[:5], None, 2, *act),
        "activate_backward: half h": (ops.activate_backward, a, h.half(), None, 2, *act),
        "activate_backward: no up": (ops.activate_backward, a, a, None, 0, *act),
        "activate_backward: narrow up": (ops.activate_backward, a, a, a[:, :2], 0, *act),
        "activate_backward: flat da": (ops.activate_backward, a[0], a, None, 3, *act),
        "activate_backward: integers": (ops.activate_backward, ids, ids, None, 3, *act),
        "up_gate: a plan of three tensors": (ops.up_gate, *up, maps[:3], 0, *act),
        "up_gate: an empty plan": (ops.up_gate, *up, [], 0, *act),
        "up_gate: int64 schedule": (ops.up_gate, *up, changed(1, plan.schedule.long()), 0, *act),
        "up_gate: one constant": (ops.up_gate, *up, maps, 0, 0, [1.0]),
        "up_gate: three constants": (ops.up_gate, *up, maps, 0, 0, [1.0, 1.0, 1.0]),
        "permute: a plan without row maps": (ops.permute, x, no_maps),
        "unpermute: a plan without row maps": (ops.unpermute, rows, None, no_maps),
        "up_gate: unknown layout": (ops.up_gate, *up, maps, 9, *act),
        "up_gate: unknown activation": (ops.up_gate, *up, maps, 0, 17, [1.0, 1.0]),
        "up_gate: w3 with a packed layout": (ops.up_gate, *up, maps, 1, *act),
        "up_gate: b3 with a packed layout": (
            ops.up_gate, x, w1, None, None, w1[:, : w1.size(1) // 2, 0], maps, 1, *act),
        "up_gate: narrow b1": (ops.up_gate, x, w1, w3, w1[:, 0, :1], None, maps, 0, *act),
        "up_gate: odd packed width": (ops.up_gate, x, w1[:, :3], None, None, None, maps, 2, *act),
        "up_gate: offsets of fewer experts": (ops.up_gate, *up, changed(0, plan.offsets[:3]), 0, *act),
        "up_gate: schedule of another size": (ops.up_gate, *up, changed(1, plan.schedule[:3]), 0, *act),
        "up_dgrad: narrow dh": (ops.up_dgrad, a, w1, w3, maps, 0),
        "down_dgrad: narrow h": (ops.down_dgrad, x, w2, None, a, scores, maps, 0, *act),
        "experts_up: scores without maps": (
            ops.experts_up, rows, w1, w3, None, None, scores, no_maps, 0, *act, True),
        "experts_up: other width of x": (ops.experts_up, a, *up[1:], None, no_maps, 0, *act, True),
        "experts_down: shared without maps": (
            ops.experts_down, a, None, w2, None, None, no_maps, 0, *act, None, rows),
        "experts: short shared": (
            ops.experts, *one_each, scores, ids, 0, *act, *no_router, False, [], *[None] * 4, x[:4]),
        "experts: ids of other tokens": (ops.experts, *one_each, scores[:4], ids[:4], 0, *act),
        "experts: scores of other slots": (
            ops.experts, *one_each, scores[:, :1], ids, 0, *act, *no_router, True),
        "experts: w2 of fewer experts": (ops.experts, x, [w1], [w3], [w2[:1]], scores, ids, 0, *act),
        "experts: no w1": (ops.experts, x, [], [w3], [w2], scores, ids, 0, *act),
        "experts: two tensors, no formats": (ops.experts, x, [w1, w1], [w3], [w2], scores, ids, 0, *act),
        "experts: two formats": (ops.experts, *one_each, scores, ids, 0, *act, *no_router, False, [2, 2]),
        "experts: one tensor with a format": (
            ops.experts, *one_each, scores, ids, 0, *act, *no_router, False, [2, 2, 2]),
        "experts: eight_bits without formats": (
            ops.experts, *one_each, scores, ids, 0, *act, *no_router, False, [], *[None] * 6, True),
        "experts: neither ids nor a gate": (ops.experts, *one_each, scores, None, 0, *act),
        "experts: scores beside a gate": (ops.experts, *one_each, scores, None, *routed, *router),
        "experts: a gate of other experts": (
            ops.experts, *one_each, None, None, *routed, w1[:1, 0], *router[1:]),
        "experts: a gate without routing": (ops.experts, *one_each, None, None, *routed, w1[:, 0]),
        "experts: a gate without its constants": (
            ops.experts, *one_each, None, None, 0, *act, *router),
        "experts: routing without a gate": (
            ops.experts, *one_each, scores, ids, 0, *act, None, *router[1:]),
        "experts_out: short out": (ops.experts_out, x[:4].clone(), *one_each, scores, ids, 0, *act),
        "experts_out: half out": (ops.experts_out, x.half(), *one_each, scores, ids, 0, *act),
        "experts_up_backward: w3 wanted but absent": (
            ops.experts_up_backward, a, x, w1, None, None, maps, 3, *[True] * 3, *[False] * 3),
        "experts_up_backward: dlogits of other experts": (
            ops.experts_up_backward, h, x, w1, w3, None, maps, 0, *[True] * 3, *[False] * 3, x[:, :1], w1[0]),
        "experts_up_backward: dlogits without gate": (
            ops.experts_up_backward, h, x, w1, w3, None, maps, 0, *[True] * 3, *[False] * 3, x),
        "experts_up_backward: no h's gradient": (
            ops.experts_up_backward, h[:0], x, w1, w3, None, maps, 0, *[True] * 3, *[False] * 3),
        "experts_up_backward_accumulate: main_grad of another shape": (
            ops.experts_up_backward_accumulate, h, x, w1, w3, None, maps, 0, *[True] * 3, *[False] * 3,
            w1, w2),
        "experts_down_backward_accumulate: half main_grad": (
            ops.experts_down_backward_accumulate, x, h, w2, None, None, maps, 0, *act, *[True] * 2,
            *[False] * 2, w2.half()),
        "experts_down: short a": (ops.experts_down, a[:5], None, w2, None, scores, maps, 0, *act),
        "experts_down_backward: no h": (
            ops.experts_down_backward, x, h[:0], w2, None, None, maps, 0, *act, *[True] * 2, *[False] * 2),
        "experts_down_backward: db2 wanted without rows": (
            ops.experts_down_backward, x[:2], h, w2, None, None, maps, 0, *act, *[True] * 2, *[False] * 2),
    }  # fmt: skip
    values = {
        "count_plan: negative count": (ops.count_plan, torch.tensor([-1, 5], device=device), 9),
        "count_plan: more than the rows": (ops.count_plan, torch.tensor([5, 5], device=device), 9),
        "permute: row_token far away": (ops.permute, x, changed(2, far)),
        "permute: row_token below zero": (ops.permute, x, changed(2, before)),
        "permute: offsets beyond the rows": (ops.permute, x, changed(0, beyond)),
        "permute: falling offsets": (ops.permute, x, changed(0, falling)),
        "unpermute: token_row far away": (ops.unpermute, rows, None, changed(4, far.view(T, K))),
        "unpermute: token_row below -1": (ops.unpermute, rows, None, changed(4, before.view(T, K))),
        "unpermute_backward: row_slot far away": (
            ops.unpermute_backward, x, rows, scores, changed(3, far), True, True),
        "grouped_mm: falling offsets": (ops.grouped_mm, a, w2, falling[1:]),
        "grouped_mm: offsets beyond the rows": (ops.grouped_mm, a, w2, beyond[1:]),
        "grouped_mm: negative offsets": (ops.grouped_mm, a, w2, -ends),
        "wgrad: row_token far away": (ops.wgrad, a, x, ends, None, far),
        "wgrad_accumulate: row_token far away": (
            ops.wgrad_accumulate, a, x, ends, torch.zeros_like(w1), None, far),
        "bias_grad: offsets beyond the rows": (ops.bias_grad, a, beyond[1:]),
        "up_gate: row_token far away": (ops.up_gate, *up, changed(2, far), 0, *act),
        "down_dgrad: row_slot far away": (
            ops.down_dgrad, x, w2, None, h, scores, changed(3, far), 0, *act),
        "experts_down: token_row far away": (
            ops.experts_down, a, None, w2, None, scores, changed(4, far.view(T, K)), 0, *act),
    }  # fmt: skip
    return shapes, values


SHAPES, VALUES = operator_calls("cpu")


def check_message(name: str, message: str) -> None:
    """The operator that was called, expected and found, and no place in our C++ files."""
    op, _ = name.split(":")
    assert re.fullmatch(rf"fused_moe::{op}: expected .+, found .+", message), message
    assert not re.search(CPP_FILE, message), message


@pytest.mark.parametrize("name", SHAPES)
def test_operators_called_directly(device, name):
    """RuntimeError of the operator, instead of an access out of range."""
    op, *args = operator_calls(device)[0][name]
    with pytest.raises(RuntimeError) as raised:
        op(*args)
    check_message(name, str(raised.value))


@pytest.mark.parametrize("name", VALUES)
def test_maps_that_lead_astray(device, name):
    """RuntimeError on the CPU. A GPU does not read them back: its kernels stay inside of the tensors."""
    op, *args = operator_calls(device)[1][name]
    if device.type == "cpu":
        with pytest.raises(RuntimeError) as raised:
            op(*args)
        check_message(name, str(raised.value))
    else:
        op(*args)
        torch.cuda.synchronize()


def test_operators_tell_both_sides(device):
    """The operators' own messages name expected and found, too."""
    with pytest.raises(RuntimeError, match=r"grouped_mm: expected .*\(3, 4, 8\).*found \(3, 4, 7\)"):
        ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
        ops.grouped_mm(torch.randn(T, D, device=device), torch.randn(E, F, 7, device=device), ends)


def test_experts_without_h_have_no_gradient(device):
    """The backward of experts_down without h raises."""
    x = torch.randn(T, F, device=device, dtype=F32)
    plan = fused_moe.plan_from_counts(torch.tensor([2, 0, 4], device=device), T)
    w2 = torch.randn(E, D, F, device=device, requires_grad=True)
    out = ops.experts_down(x, None, w2, None, None, plan.tensors, 0, 0, [1.0, 1.0])
    with pytest.raises(RuntimeError, match="was given no h"):
        out.sum().backward()


@pytest.mark.parametrize("name", ("bias_grad", "up_dgrad", "route_backward"))
def test_operators_without_a_gradient_say_so(device, name):
    """An operator without a derivative raises instead of cutting the graph silently."""
    x = torch.randn(T, F, device=device, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
    ids = torch.zeros(T, 1, dtype=torch.int32, device=device)
    plan = fused_moe.plan_from_counts(torch.tensor([2, 0, 4], device=device), T).tensors
    results = {
        "bias_grad": lambda: ops.bias_grad(x, ends),
        "up_dgrad": lambda: ops.up_dgrad(x, torch.randn(3, F, D, device=device), None, plan, UNGATED),
        "route_backward": lambda: ops.route_backward(
            torch.ones(T, 1, device=device), x, ids, 0, False, 1.0, 1e-20
        ),
    }
    with pytest.raises(RuntimeError, match=f"fused_moe: {name} (has no gradient|cannot be differentiated)"):
        results[name]().sum().backward()


def test_sizes_that_kernels_cannot_count_are_refused(device):
    """A weight too wide, and a plan too long, for 32-bit arithmetic in the kernels: refused first."""
    zero = torch.zeros(1, 1, device=device)
    ends = torch.ones(1, dtype=torch.int32, device=device)
    wide = zero.view(1, 1, 1).expand(1, 2**30, 1)
    with pytest.raises(RuntimeError, match=r"a weight's width from 0 to 1073740799, found 1073741824"):
        ops.grouped_mm(zero, wide, ends)
    counts = torch.ones(1, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=r"num_rows from 0 to 2147482623, found 2147483647"):
        ops.count_plan(counts, 2**31 - 1)


def test_memory_that_runs_out_is_named(cpu):
    """The size that was asked for, and PyTorch's own reason, which its headers would drop."""
    a, ends = torch.zeros(2**20, 1), torch.ones(1, dtype=torch.int32)
    wide = torch.zeros(1, 1, 1).expand(1, 2**29, 1)
    with pytest.raises(RuntimeError) as raised:
        ops.grouped_mm(a, wide, ends)
    message = str(raised.value)
    expected = (
        "fused_moe::allocation: expected memory for a tensor of shape (1048576, 536870912), found none: "
    )
    assert message.startswith(expected), message
    assert len(message) > len(expected) and "API call failed" not in message, message
