"""Wrong calls raise TypeError or ValueError with expected and found, before anything runs."""

import re

import pytest
import torch
from cases import BF16, F16, F32, Calls

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, permute, route, unpermute
from fused_moe.ops import UNGATED

ops = torch.ops.fused_moe
T, D, F, E, K = 6, 8, 4, 3, 2
FLOAT = r"dtype float32 or bfloat16 or float16 or float64"


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


def gemm(**changes):
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    return grouped_mm, {"a": torch.randn(T, D), "b": torch.randn(E, F, D), "offsets": ends} | changes


def permutation(**changes):
    ids = torch.zeros(T, K, dtype=torch.int32)
    return permute, {"x": torch.randn(T, D), "ids": ids, "num_experts": E} | changes


def combination(**changes):
    plan = fused_moe.route_plan(torch.zeros(T, K, dtype=torch.int32), E)
    return unpermute, {"rows": torch.randn(T * K, D), "plan": plan} | changes


def module(**changes):
    size = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": K}
    return FusedMoE, size | changes


counts_plan = fused_moe.plan_from_counts(torch.tensor([T * K, 0, 0]), T * K)
half = torch.randn(T, D, dtype=F16)

# (call, exception, expected, found)
TABLE = [
    # route
    (router(logits=[[1.0]]), TypeError, "logits to be a tensor", "list"),
    (router(logits=torch.ones(T, 8, dtype=torch.int32)),
     TypeError, f"logits of {FLOAT}", "torch.int32"),
    (router(logits=torch.randn(8)), ValueError, "logits of 2 dimensions", r"shape \(8,\)"),
    (router(logits=torch.randn(T, 0)), ValueError, "1 to 1024 experts", "0"),
    (router(logits=torch.randn(T, 1025)), ValueError, "1 to 1024 experts", "1025"),
    (router(top_k=0), ValueError, r"top_k from 1 to min\(E, 32\) = 8", "0"),
    (router(top_k=9), ValueError, r"top_k from 1 to min\(E, 32\) = 8", "9"),
    (router(logits=torch.randn(T, 64), top_k=33),
     ValueError, r"top_k from 1 to min\(E, 32\) = 32", "33"),
    (router(score_func="tanh"),
     ValueError, r"score_func to be one of \['sigmoid', 'softmax'\]", "'tanh'"),
    (router(bias=1.0), TypeError, "bias to be a tensor", "float"),
    (router(bias=torch.zeros(7)), ValueError, r"bias of shape \(E\) = \(8,\)", r"\(7,\)"),
    (router(bias=torch.zeros(8, dtype=torch.int64)), TypeError, f"bias of {FLOAT}", "torch.int64"),
    (router(num_expert_groups=4), ValueError, "num_limited_groups together", r"\(4, None\)"),
    (router(num_limited_groups=4), ValueError, "num_limited_groups together", r"\(None, 4\)"),
    (router(num_expert_groups=3, num_limited_groups=1), ValueError, "divide the 8 experts", "3"),
    (router(num_expert_groups=0, num_limited_groups=1), ValueError, "divide the 8 experts", "0"),
    (router(num_expert_groups=4, num_limited_groups=5),
     ValueError, "num_limited_groups from 1 to 4", "5"),
    (router(num_expert_groups=4, num_limited_groups=0),
     ValueError, "num_limited_groups from 1 to 4", "0"),
    (router(top_k=3, num_expert_groups=4, num_limited_groups=1),
     ValueError, "top_k within the 2 experts", "3"),
    # permute, unpermute
    (permutation(x=None), TypeError, "x to be a tensor", "NoneType"),
    (permutation(x=torch.randn(T, D).long()), TypeError, f"x of {FLOAT}", "torch.int64"),
    (permutation(ids=torch.zeros(T, K)), TypeError, "ids of dtype int32 or int64", "torch.float32"),
    (permutation(ids=torch.zeros(T, dtype=torch.int32)),
     ValueError, "ids of 2 dimensions", r"shape \(6,\)"),
    (permutation(ids=torch.zeros(5, K, dtype=torch.int32)), ValueError, "6 tokens", r"\(5, 2\)"),
    (permutation(ids=torch.zeros(T, 0, dtype=torch.int32)),
     ValueError, "at least one slot", r"\(6, 0\)"),
    (permutation(num_experts=0), ValueError, "num_experts >= 1", "0"),
    (combination(rows=torch.randn(11, D)), ValueError, "the plan's 12 rows", "11"),
    (combination(plan=(1, 2, 3)), TypeError, "plan to be a fused_moe.Plan", "tuple"),
    (combination(plan=counts_plan), ValueError, "a plan made from ids", "a plan made from counts"),
    (combination(scores=torch.rand(T, 3)),
     ValueError, r"scores of shape \(T, K\) = \(6, 2\)", r"\(6, 3\)"),
    (combination(scores=torch.zeros(T, K).int()), TypeError, f"scores of {FLOAT}", "torch.int32"),
    # grouped_mm
    (gemm(a=torch.randn(T)), ValueError, "a of 2 dimensions", r"shape \(6,\)"),
    (gemm(b=torch.randn(F, D)), ValueError, "b of 3 dimensions", r"shape \(4, 8\)"),
    (gemm(b=torch.randn(E, F, 7)), ValueError, r"= \(3, 4, 8\)", r"\(3, 4, 7\)"),
    (gemm(b=torch.randn(E, F, D).double()),
     TypeError, "a's dtype torch.float32", "torch.float64"),
    (gemm(offsets=torch.tensor([2, 2, 6])), TypeError, "offsets of dtype int32", "torch.int64"),
    (gemm(offsets=torch.zeros(4, dtype=torch.int32)), ValueError, r"\(E\) = \(3,\)", r"\(4,\)"),
    # fused_experts
    (experts(x=torch.randn(2, T, D)), ValueError, "x of 2 dimensions", r"shape \(2, 6, 8\)"),
    (experts(x=torch.randn(T, 7)), ValueError, r"x of shape \(T, D\) = \(6, 8\)", r"\(6, 7\)"),
    (experts(x=half), TypeError, "w1 of x's dtype torch.float16", "torch.float32"),
    (experts(w1=None), TypeError, "w1 to be a tensor", "NoneType"),
    (experts(w1=torch.randn(E, 5, D)),
     ValueError, r"w1 of shape \(E, F, D\) = \(3, 4, 8\)", r"\(3, 5, 8\)"),
    (experts(w2=torch.randn(D, F)), ValueError, "w2 of 3 dimensions", r"shape \(8, 4\)"),
    (experts(w2=torch.randn(0, D, F)), ValueError, "E, D, F >= 1", r"\(0, 8, 4\)"),
    (experts(w2=torch.randn(E, D, 0)), ValueError, "E, D, F >= 1", r"\(3, 8, 0\)"),
    (experts(w3=torch.randn(E, F, 9)),
     ValueError, r"w3 of shape \(E, F, D\) = \(3, 4, 8\)", r"\(3, 4, 9\)"),
    (experts(w3=torch.randn(E, F, D, dtype=BF16)),
     TypeError, "w3 of x's dtype torch.float32", "torch.bfloat16"),
    (experts(b1=torch.randn(E, 5)), ValueError, r"b1 of shape \(E, 4\) = \(3, 4\)", r"\(3, 5\)"),
    (experts(b2=torch.randn(E, 4)), ValueError, r"b2 of shape \(E, 8\) = \(3, 8\)", r"\(3, 4\)"),
    (experts(b3=torch.randn(F)), ValueError, "b3 of 2 dimensions", r"shape \(4,\)"),
    (experts(w3=None, b3=torch.randn(E, F)), ValueError, "b3 only beside w3", "b3 without w3"),
    (experts(b2=torch.randn(E, D).double()),
     TypeError, "b2 of x's dtype torch.float32", "torch.float64"),
    (experts(scores=torch.rand(T, 3)),
     ValueError, r"scores of shape \(T, K\) = \(6, 2\)", r"\(6, 3\)"),
    (experts(scores=None), TypeError, "scores to be a tensor", "NoneType"),
    (experts(ids=torch.zeros(T, K, dtype=torch.uint8)),
     TypeError, "ids of dtype int32 or int64", "torch.uint8"),
    (experts(ids=torch.zeros(5, K).int()), ValueError, "x's 6 tokens", r"\(5, 2\)"),
    (experts(activation="swish"), ValueError, "activation to be one of", "'swish'"),
    (experts(layout="packed"), ValueError, "layout to be one of", "'packed'"),
    (experts(score_on="both"),
     ValueError, r"score_on to be one of \['input', 'output'\]", "'both'"),
    (experts(layout="halves"), ValueError, "no w3 with layout 'halves'", "w3"),
    (experts(layout="halves", w3=None),
     ValueError, r"w1 of shape \(E, 2F, D\) = \(3, 8, 8\)", r"\(3, 4, 8\)"),
    (experts(layout="interleaved", w3=None, w1=torch.randn(E, F, 3, D)),
     ValueError, r"\(E, F, 2, D\)", r"\(3, 4, 3, 8\)"),
    (experts(layout="separate", w1=torch.randn(E, F, 2, D)),
     ValueError, "w1 of 3 dimensions", r"\(3, 4, 2, 8\)"),
    (experts(transposed=True), ValueError, r"x of shape \(T, D\) = \(6, 4\)", r"\(6, 8\)"),
    (experts(transposed=True, w2=torch.randn(E, F, D)),
     ValueError, r"F, D stored transposed\) = \(3, 4, 8\)", r"\(3, 8, 4\)"),
    # grouped_mlp
    (mlp(counts=torch.tensor([2.0, 0.0, 4.0])),
     TypeError, "counts of dtype int32 or int64 or int16", "torch.float32"),
    (mlp(counts=torch.tensor([2, 4])), ValueError, r"counts of shape \(E\) = \(3,\)", r"\(2,\)"),
    (mlp(counts=[2, 0, 4]), TypeError, "counts to be a tensor", "list"),
    (mlp(x_rows=torch.randn(T, 9)), ValueError, r"= \(6, 8\)", r"\(6, 9\)"),
    (mlp(layout="interleaved"), ValueError, "no w3 with layout 'interleaved'", "w3"),
    # FusedMoE
    (module(dim=0), ValueError, "dim >= 1", "0"),
    (module(dim=8.0), TypeError, "dim to be an int", "float"),
    (module(hidden_dim=-1), ValueError, "hidden_dim >= 1", "-1"),
    (module(num_experts=1025), ValueError, "1 to 1024 experts", "1025"),
    (module(top_k=4), ValueError, r"top_k from 1 to min\(E, 32\) = 3", "4"),
    (module(activation="tanh"), ValueError, "activation to be one of", "'tanh'"),
    (module(score_func="relu"), ValueError, "score_func to be one of", "'relu'"),
    (module(num_expert_groups=2, num_limited_groups=1), ValueError, "divide the 3 experts", "2"),
    (module(num_shared_experts=-1), ValueError, "num_shared_experts >= 0", "-1"),
    (module(shared_expert_gate=True),
     ValueError, "shared_expert_gate only with shared experts", "num_shared_experts=0"),
]  # fmt: skip


def names() -> list[str]:
    return [f"{i}-{call[0].__name__}-{expected[:30]}" for i, (call, _, expected, _) in enumerate(TABLE)]


def moved(arguments: dict, device) -> dict:
    """The arguments with their tensors, also those of a plan, on the device."""

    def move(value):
        if isinstance(value, fused_moe.Plan):
            return fused_moe.Plan(*map(move, value))
        return value.to(device) if torch.is_tensor(value) else value

    return {name: move(value) for name, value in arguments.items()}


@pytest.mark.quick
@pytest.mark.parametrize("call, error, expected, found", TABLE, ids=names())
def test_table(device, call, error, expected, found):
    """A wrong call raises the right type of error with expected and found, and runs no operator."""
    fn, arguments = call
    arguments = moved(arguments, device)
    before = {n: t.clone() for n, t in arguments.items() if torch.is_tensor(t)}
    with Calls() as calls, pytest.raises(error) as raised:
        fn(**arguments)
    assert type(raised.value) is error
    assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")], "an operator ran"
    for name, value in before.items():
        assert torch.equal(arguments[name], value)
    message = str(raised.value)
    assert re.match(rf"{fn.__name__}: expected .*", message), message
    said, _, what = message.rpartition(", found ")
    assert re.search(expected, said), message
    assert re.search(found, what), message


@pytest.mark.parametrize("counts", ([2, -1, 4], [2, 1, 4]))
def test_counts_are_checked_on_the_cpu(cpu, counts):
    """Negative counts and counts beyond the rows; on a GPU reading them would synchronise."""
    fn, arguments = mlp(counts=torch.tensor(counts))
    found = re.escape(str(counts))
    with pytest.raises(ValueError, match=f"counts >= 0 that sum to at most the 6 rows given, found {found}"):
        fn(**arguments)


def test_right_calls_are_right(device):
    """The table's calls without changes run: each fails for its own reason."""
    for call in (experts, mlp, router, gemm, permutation, combination):
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


def test_meta_arguments_are_not_mixed(device):
    """A weight on another device is named before anything runs."""
    changes = {
        "w2": torch.randn(E, D, F, device="meta"),
        "ids": torch.zeros(T, K, dtype=torch.int32, device="meta"),
    }
    for name, value in changes.items():
        fn, arguments = experts()
        arguments = moved(arguments, device) | {name: value}
        with pytest.raises(ValueError, match=f"{name} on x's device {device.type}.*, found meta"):
            fn(**arguments)


# --- torch.ops called directly: no access out of range --------------------------------------------


def operator_calls(device) -> tuple[dict, dict]:
    """Calls that would read or write out of range if the operator did not check: by shape, and by value."""
    ids = torch.arange(T * K, device=device, dtype=torch.int32).remainder(E).view(T, K)
    plan = fused_moe.route_plan(ids, E)
    maps, no_maps = plan.tensors, plan.tensors[:2]  # offsets, schedule, row_token, row_slot, token_row
    x, rows, scores = (torch.randn(s, device=device) for s in ((T, D), (T * K, D), (T, K)))
    w1, w2, w3 = (torch.randn(s, device=device) for s in ((E, F, D), (E, D, F), (E, F, D)))
    a, h = torch.randn(T * K, F, device=device), torch.randn(T * K, 2 * F, device=device)
    ends, act = plan.offsets[1:].contiguous(), (0, [1.0, 1.0])
    up = (x, w1, w3, None, None)

    def changed(i, value):
        return [value if j == i else v for j, v in enumerate(maps)]

    far = torch.full_like(plan.row_token, 10**6)
    before = torch.full_like(plan.row_token, -5)
    falling = torch.tensor([0, 12, 3, 12], dtype=torch.int32, device=device)
    beyond = torch.tensor([0, 4, 8, 9999], dtype=torch.int32, device=device)
    shapes = {
        "route: k beyond E": (ops.route, x, None, 9, 0, False, 1.0, 0, 0),
        "route: k of 0": (ops.route, x, None, 0, 0, False, 1.0, 0, 0),
        "route: k beyond 32": (ops.route, torch.randn(2, 64, device=device), None, 33, 0, False, 1.0, 0, 0),
        "route: 1025 experts": (ops.route, torch.randn(2, 1025, device=device), None, 1, 0, False, 1.0, 0, 0),
        "route: groups that do not divide": (ops.route, x, None, 1, 0, False, 1.0, 3, 1),
        "route: k beyond the kept groups": (ops.route, x, None, 3, 0, False, 1.0, 4, 1),
        "route: short bias": (ops.route, x, torch.zeros(3, device=device), 1, 0, False, 1.0, 0, 0),
        "route: double bias": (ops.route, x, torch.zeros(8, device=device).double(), 1, 0, False, 1.0, 0, 0),
        "route: unknown score function": (ops.route, x, None, 1, 7, False, 1.0, 0, 0),
        "route: integer logits": (ops.route, ids, None, 1, 0, False, 1.0, 0, 0),
        "route_backward: ids of another shape": (ops.route_backward, scores, x, ids[:5], 0, False, 1.0),
        "route_backward: int64 ids": (ops.route_backward, scores, x, ids.long(), 0, False, 1.0),
        "route_backward: half gradient": (ops.route_backward, scores.half(), x, ids, 0, False, 1.0),
        "route_plan: no experts": (ops.route_plan, ids, 0),
        "route_plan: negative experts": (ops.route_plan, ids, -3),
        "route_plan: float ids": (ops.route_plan, scores, 3),
        "route_plan: flat ids": (ops.route_plan, ids.flatten(), 3),
        "count_plan: float counts": (ops.count_plan, torch.ones(3, device=device), 9),
        "count_plan: negative rows": (ops.count_plan, torch.zeros(3, device=device).int(), -1),
        "permute: short row_token": (ops.permute, x, changed(2, plan.row_token[:5])),
        "permute: int64 row_token": (ops.permute, x, changed(2, plan.row_token.long())),
        "permute: maps of more tokens": (ops.permute, x[:3], maps),
        "unpermute: short rows": (ops.unpermute, rows[:7], None, maps),
        "unpermute: scores of another shape": (ops.unpermute, rows, scores[:, :1], maps),
        "unpermute: half scores": (ops.unpermute, rows, scores.half(), maps),
        "unpermute_backward: short dout": (ops.unpermute_backward, x[:2], rows, scores, maps, True, True),
        "grouped_mm: int64 offsets": (ops.grouped_mm, a, w2, ends.long()),
        "grouped_mm: offsets of fewer experts": (ops.grouped_mm, a, w2, ends[:2]),
        "grouped_mm: another width": (ops.grouped_mm, rows, w2, ends),
        "grouped_mm: another dtype": (ops.grouped_mm, a, w2.half(), ends),
        "wgrad: fewer rows in b": (ops.wgrad, a, rows[:5], ends),
        "wgrad: both gathered": (ops.wgrad, a, x, ends, plan.row_token, plan.row_token),
        "wgrad_accumulate: fewer experts in dw": (ops.wgrad_accumulate, a, rows, ends, w1[:2]),
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
        "experts_up_backward: w3 wanted but absent": (
            ops.experts_up_backward, a, x, w1, None, None, maps, 3, *[True] * 3, *[False] * 3),
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


@pytest.mark.parametrize("name", SHAPES)
def test_operators_called_directly(device, name):
    """RuntimeError of the operator, instead of an access out of range."""
    op, *args = operator_calls(device)[0][name]
    with pytest.raises(RuntimeError, match="fused_moe"):
        op(*args)


@pytest.mark.parametrize("name", VALUES)
def test_maps_that_lead_astray(device, name):
    """RuntimeError on the CPU. A GPU does not read them back: its kernels stay inside of the tensors."""
    op, *args = operator_calls(device)[1][name]
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="fused_moe"):
            op(*args)
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
        "route_backward": lambda: ops.route_backward(torch.ones(T, 1, device=device), x, ids, 0, False, 1.0),
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
