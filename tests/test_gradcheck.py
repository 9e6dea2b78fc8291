"""Numerical gradients in float64: every differentiable function, every layout."""

import pytest
import torch
from cases import ACTIVATIONS, F64, LAYOUTS, Case
from torch.autograd import gradcheck, gradgradcheck

from fused_moe import fused_experts, grouped_mlp, grouped_mm, permute, route, route_plan, unpermute
from fused_moe.ops import ACTIVATION_CODES

ops = torch.ops.fused_moe
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]  # or with kinks that no signal is near


def leaf(*shape, device):
    return torch.randn(shape, dtype=F64, device=device, requires_grad=True)


def check(fn, inputs: dict) -> None:
    """gradcheck by keyword, of the tensors that are not None."""
    given = {n: t.requires_grad_() for n, t in inputs.items() if t is not None}
    absent = {n: t for n, t in inputs.items() if t is None}
    assert gradcheck(
        lambda *values: fn(**dict(zip(given, values, strict=True)), **absent), tuple(given.values())
    )


@pytest.mark.parametrize("score_func", ("softmax", "sigmoid", "sqrtsoftplus"))
@pytest.mark.parametrize("route_norm", (False, True))
def test_route(device, score_func, route_norm):
    """route away from ties, with and without renormalisation, scaled as a whole and per expert."""
    logits = torch.stack([torch.randperm(9) for _ in range(4)]).to(device, F64) / 3
    logits.requires_grad_()
    options = {"score_func": score_func, "route_norm": route_norm, "route_scale": 1.5, "route_norm_eps": 0.2}
    assert gradcheck(lambda z: route(z, 3, **options)[0], logits)
    groups = {"num_expert_groups": 3, "num_limited_groups": 2, "group_score": "max"}
    scale = torch.randn(9, device=device, dtype=F64, requires_grad=True)
    assert gradcheck(lambda z, s: route(z, 3, **options, **groups, expert_scale=s)[0], (logits, scale))


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_experts(device, layout):
    """Every layout with biases: x, weights, biases and scores at once, scores on input or output."""
    for score_on in ("output", "input"):
        activation = SMOOTH[(list(LAYOUTS).index(layout) + len(score_on)) % len(SMOOTH)]
        case = Case(5, 3, 2, 4, 2, F64, "sentinels", layout, activation, bias=True, score_on=score_on, seed=1)
        ids = case.ids(device)
        shared = {"shared": leaf(5, 3, device=device), "shared_gate": leaf(5, 1, device=device)}
        check(
            lambda ids=ids, case=case, **t: fused_experts(
                **t, ids=ids, score_on=case.score_on, **case.options
            ),
            case.inputs(device) | shared,
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_mlp(device, layout):
    """Every layout without scores, an empty expert and a row past the last."""
    case = Case(dim=3, hidden=2, num_experts=3, dtype=F64, layout=layout, bias=True)
    counts = torch.tensor([2, 0, 3], device=device)
    inputs = {"x_rows": leaf(6, 3, device=device), **case.weights(device)}
    check(lambda **t: grouped_mlp(**t, counts=counts, **case.options), inputs)


def test_grouped_mm(device):
    """grouped_mm: first and second order."""
    a, b = leaf(7, 3, device=device), leaf(3, 2, 3, device=device)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=device)
    assert gradcheck(lambda a, b: grouped_mm(a, b, ends), (a, b))
    assert gradgradcheck(lambda a, b: grouped_mm(a, b, ends), (a, b))


def test_wgrad(device):
    """wgrad of contiguous rows: first and second order."""
    a, b = leaf(7, 3, device=device), leaf(7, 2, device=device)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32, device=device)
    assert gradcheck(lambda a, b: ops.wgrad(a, b, ends), (a, b))
    assert gradgradcheck(lambda a, b: ops.wgrad(a, b, ends), (a, b))


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("activation", SMOOTH)
def test_activate(device, layout, activation):
    """Gates and ups, in any layout."""
    inputs = {"h": leaf(5, 6, device=device), "up": leaf(5, 6, device=device) if layout == 0 else None}
    check(lambda h, up: ops.activate(h, up, layout, ACTIVATION_CODES[activation], [1.702, 1.0]), inputs)


def test_permute_and_unpermute(device):
    """Both, with sentinels; unweighted, also to second order."""
    ids = torch.tensor([[0, 2], [1, -1], [2, 0], [7, 7]], device=device)
    plan = route_plan(ids, 3)
    x, rows, scores = leaf(4, 3, device=device), leaf(8, 3, device=device), leaf(4, 2, device=device)
    assert gradcheck(lambda x: permute(x, ids, 3)[0], x)
    assert gradgradcheck(lambda x: permute(x, ids, 3)[0], x)
    assert gradcheck(lambda rows, scores: unpermute(rows, plan, scores), (rows, scores))
    assert gradcheck(lambda rows: unpermute(rows, plan), rows)
    assert gradgradcheck(lambda rows: unpermute(rows, plan), rows)


def test_unpermute_with_shared_experts(device):
    """All operands at once, the gate as a vector and as a column; without a gate to second order."""
    plan = route_plan(torch.tensor([[0, 2], [1, -1], [2, 0], [7, 7]], device=device), 3)
    rows, scores = leaf(8, 3, device=device), leaf(4, 2, device=device)
    for shape in ((4,), (4, 1)):
        inputs = {"rows": rows, "scores": scores, "shared": leaf(4, 3, device=device)}
        check(
            lambda **t: unpermute(**t, plan=plan), inputs | {"shared_gate": leaf(*shape, device=device) * 3}
        )
    assert gradgradcheck(lambda *t: unpermute(t[0], plan, shared=t[1]), (rows, leaf(4, 3, device=device)))


@pytest.mark.parametrize("layout", ("separate", "ungated", "interleaved"))
def test_up_gate(device, layout):
    """Gradients through h; a has none."""
    case = Case(4, 3, 2, 3, 2, F64, layout=layout, bias=True)
    inputs = {n: case.inputs(device)[n] for n in ("x", "w1", "w3", "b1", "b3")}
    code = {"separate": 0, "ungated": 3, "interleaved": 2}[layout]
    plan = route_plan(case.ids(device), 3).tensors

    def up_gate(x, w1, w3, b1, b3):
        h, a = ops.up_gate(x, w1, w3, b1, b3, plan, code, 0, [1.0, 1.0])
        assert not a.requires_grad
        return h

    check(up_gate, inputs)
