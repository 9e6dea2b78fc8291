"""torch.library.opcheck on every operator: schema, fake kernel, autograd registration, AOT dispatch."""

import pytest
import torch
from cases import BF16, F32, LAYOUTS, Case

import fused_moe
from fused_moe import ops as codes

ops = torch.ops.fused_moe
ACT = (codes.ACTIVATION_CODES["silu"], 1.702, 7.0)


def all_operators() -> set[str]:
    """Names of all operators of the library, as the dispatcher knows them."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fused_moe::"))
    return {n.removeprefix("fused_moe::") for n in names}


def arguments(device, layout: str, dtype, bias: bool) -> dict:
    """{operator: [argument tuples]}: a typical call of every operator, and its rarer forms."""
    case = Case(9, 6, 4, 3, 2, dtype, layout=layout, bias=bias)
    stored, gated, pairs, transposed = LAYOUTS[layout]
    t, ids = case.inputs(device), case.ids(device)
    code = codes.LAYOUTS[stored] if gated else codes.UNGATED
    plan = fused_moe.route_plan(ids, 3)
    moves, maps = plan[1:5], plan[1:]
    no_maps = (plan.offsets, None, None, None, plan.tiles)
    ends = plan.offsets[1:].contiguous()
    x, scores, b1, b2, b3 = (t[n] for n in ("x", "scores", "b1", "b2", "b3"))
    w1, w2, w3 = (w if w is None or not transposed else w.mT for w in (t["w1"], t["w2"], t["w3"]))
    w1 = w1.flatten(1, 2) if pairs else w1
    R, H = ids.numel(), 8 if gated else 4

    def new(*shape):
        return torch.randn(shape, device=device).to(dtype)

    rows, a, h, dout, logits = new(R, 6), new(R, 4), new(R, H), new(9, 6), new(9, 3)
    up, down = (x, w1, w3, b1, b3), (w2, b2)
    need = [v is not None for v in (x, w1, w3, b1, b3)]
    on, off = [True] * len(need), [False] * 6
    return {
        "route": [
            (logits, None, 2, 0, False, 1.0, 0, 0),
            (logits, torch.zeros(3, device=device), 1, 1, True, 2.0, 3, 2),
        ],
        "route_backward": [(scores, logits, ids, 0, False, 1.0), (scores, logits, ids, 1, True, 2.0)],
        "route_plan": [(ids, 3), (ids.long(), 3)],
        "count_plan": [(plan.counts, R), (plan.counts.to(torch.uint8), R)],
        "permute": [(x, *moves)],
        "unpermute": [(rows, scores, *moves), (rows, None, *moves)],
        "unpermute_backward": [
            (dout, rows, scores, *moves, True, True),
            (dout, rows, scores, *moves, False, True),
        ],
        "grouped_mm": [(a, w2, ends)],
        "wgrad": [(a, rows, ends), (a, x, ends, None, plan.row_token), (x, a, ends, plan.row_token)],
        "bias_grad": [(rows, ends)],
        "up_gate": [(*up, *maps, code, *ACT), (rows, *up[1:], *no_maps, code, *ACT)],
        "up_dgrad": [(h, w1, w3, plan.offsets, code)],
        "down_dgrad": [(dout, *down, h, scores, *maps, code, *ACT)],
        "act_dgrad": [(a, h, code, *ACT)],
        "experts_up": [
            (*up, None, *maps, code, *ACT, True),
            (*up, scores, *maps, code, *ACT, False),
            (rows, *up[1:], None, *no_maps, code, *ACT, True),
        ],
        "experts_up_backward": [
            (h, x, w1, w3, scores, *maps, code, *need, True),
            (h, x, w1, w3, None, *maps, code, *off),
            (h, rows, w1, w3, None, *no_maps, code, *need, False),
        ],
        "experts_down": [
            (a, h, *down, scores, *maps, code, *ACT),
            (a, None, *down, None, *no_maps, code, *ACT),
        ],
        "experts_down_backward": [
            (dout, h, *down, scores, *maps, code, *ACT, True, True, b2 is not None, True),
            (dout, h, *down, None, *maps, code, *ACT, *on[:1], False, False, False),
        ],
    }


DIFFERENTIABLE = {
    "route", "permute", "unpermute", "grouped_mm", "wgrad", "up_gate", "experts_up", "experts_down"
}  # fmt: skip
OPERATORS = sorted(arguments(torch.device("cpu"), "separate", F32, True))


def test_every_operator_is_here(device):
    """An operator without a call above fails this test, and so does a call of one that is gone."""
    assert set(OPERATORS) == all_operators()


@pytest.mark.quick
@pytest.mark.parametrize("name", OPERATORS)
def test_schema_and_fake_kernel(device, name):
    """Inputs are not changed, and the fake kernel tells shapes, strides and dtypes: every layout."""
    for layout in LAYOUTS:
        for dtype, bias in ((F32, False), (BF16, True)):
            for args in arguments(device, layout, dtype, bias)[name]:
                utils = ("test_schema", "test_faketensor")
                torch.library.opcheck(getattr(ops, name).default, args, test_utils=utils)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(device, name):
    """All of opcheck; the first call of a differentiable operator with inputs that require a gradient."""
    for i, args in enumerate(arguments(device, "separate", F32, True)[name]):
        if i == 0 and name in DIFFERENTIABLE:
            args = [
                a.detach().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a
                for a in args
            ]
        torch.library.opcheck(getattr(ops, name).default, tuple(args))


def test_every_operator_has_its_kernels(device):
    """Each has a CPU kernel, an autograd rule and a fake kernel."""
    for name in OPERATORS:
        for key in ("CPU", "Autograd"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fused_moe::{name}", key), name
        fake = torch._library.simple_registry.singleton.find(f"fused_moe::{name}").fake_impl
        assert fake.kernel is not None, name


def test_schemas_name_what_they_return(device):
    """Operators are functional: no argument is written, no result aliases an argument."""
    for name in OPERATORS:
        schema = getattr(ops, name).default._schema
        assert not schema.is_mutable
        assert all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
