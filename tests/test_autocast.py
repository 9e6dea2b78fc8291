"""Autocast: GEMMs in its dtype, as torch's linear; routing and weighted sums in float32."""

import pytest
import torch
from cases import BF16, F16, F32, F64, Calls, Case, assert_same_bits, forward_backward, operator_calls
from torch.utils._pytree import tree_map

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, reference

BOTH = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))


def under(fn, device, dtype):
    """fn inside autocast."""

    def run(**arguments):
        with torch.autocast(device.type, dtype):
            return fn(**arguments)

    return run


EXPERTS_ARGUMENTS = [a.name for a in torch.ops.fused_moe.experts.default._schema.arguments]


def is_floating(value) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


def halved(inputs: dict, dtype) -> dict:
    return {n: t if t is None or n == "scores" else t.to(dtype) for n, t in inputs.items()}


@pytest.mark.quick
@BOTH
@pytest.mark.parametrize("layout", ("separate", "halves", "pairs", "interleaved.T", "ungated"))
def test_fused_experts(device, dtype, layout):
    """The same bits as inputs cast by hand, and float32 gradients of float32 leaves."""
    case = Case(layout=layout, bias=True)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device).to(dtype)
    fixed = {"ids": ids, **case.options}
    found = forward_backward(under(fused_experts, device, dtype), inputs, dout, **fixed)
    assert found["out"].dtype == dtype
    expected = forward_backward(fused_experts, halved(inputs, dtype), dout, **fixed)
    for name, value in inputs.items():
        if value is not None:
            assert found[f"d{name}"].dtype == F32, name
    assert_same_bits(found, {n: v.float() if n != "out" else v for n, v in expected.items()})


@BOTH
def test_without_gradients(device, dtype):
    """Functions and the operator cast alike. The functions cast the weights of one side at a time."""
    case = Case(bias=True)
    inputs, ids = case.inputs(device), case.ids(device)
    with torch.no_grad():
        expected = fused_experts(**halved(inputs, dtype), ids=ids)
        with torch.autocast(device.type, dtype), Calls() as calls:
            found = fused_experts(**inputs, ids=ids)
            [arguments, *_] = operator_calls(case, device)["experts"]
            raw, *_ = torch.ops.fused_moe.experts(*arguments)
        named = zip(EXPERTS_ARGUMENTS, arguments, strict=True)
        kept = ("scores", "shared_gate")
        cast = [
            tree_map(lambda t: t.to(dtype) if is_floating(t) else t, v) if n not in kept else v
            for n, v in named
        ]
        assert torch.equal(raw, torch.ops.fused_moe.experts(*cast)[0])
    assert torch.equal(found, expected) and found.dtype == raw.dtype == dtype
    order = [name for name, *_ in calls.calls if name.startswith("fused_moe::experts")]
    assert order == ["fused_moe::experts_up", "fused_moe::experts_down", "fused_moe::experts"]


@BOTH
def test_grouped_mm_and_grouped_mlp(device, dtype):
    """Both cast their floating inputs, too."""
    case = Case(dim=12, hidden=8, num_experts=3, bias=True)
    counts = torch.tensor([4, 0, 9], device=device)
    rows = {"x_rows": torch.randn(13, 12, device=device), **case.weights(device)}
    dout = torch.randn(13, 12, device=device).to(dtype)
    found = forward_backward(under(grouped_mlp, device, dtype), rows, dout, counts=counts)
    expected = forward_backward(grouped_mlp, halved(rows, dtype), dout, counts=counts)
    assert_same_bits(found, {n: v.float() if n != "out" else v for n, v in expected.items()})
    assert found["out"].dtype == dtype

    operands = {"a": rows["x_rows"], "b": rows["w1"]}
    offs = counts.cumsum(0).int()
    dout = torch.randn(13, 8, device=device).to(dtype)
    found = forward_backward(under(grouped_mm, device, dtype), operands, dout, offsets=offs)
    expected = forward_backward(grouped_mm, halved(operands, dtype), dout, offsets=offs)
    assert_same_bits(found, {n: v.float() if n != "out" else v for n, v in expected.items()})


def test_mixed_dtypes_meet_in_autocasts(device):
    """bfloat16 x with float32 weights is an error outside of autocast and works inside, as for linear."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["x"] = inputs["x"].to(BF16)
    with pytest.raises(TypeError, match=r"expected w1 of x's dtype"):
        fused_experts(**inputs, ids=ids)
    with torch.autocast(device.type, BF16):
        out = fused_experts(**inputs, ids=ids)
    assert torch.equal(out, fused_experts(**halved(inputs, BF16), ids=ids))


def test_float64_is_left_alone(device):
    """As in torch: autocast does not touch float64."""
    inputs, ids = Case(dtype=F64).inputs(device), Case().ids(device)
    with torch.autocast(device.type, BF16):
        out = fused_experts(**inputs, ids=ids)
        linear = torch.nn.functional.linear(inputs["x"], inputs["w1"][0])
    assert out.dtype == linear.dtype == F64
    assert torch.equal(out, fused_experts(**inputs, ids=ids))


def test_disabled_inside(device):
    """autocast(enabled=False) inside restores the dtypes given."""
    inputs, ids = Case().inputs(device), Case().ids(device)
    with torch.autocast(device.type, BF16), torch.autocast(device.type, enabled=False):
        out = fused_experts(**inputs, ids=ids)
    assert out.dtype == F32 and torch.equal(out, fused_experts(**inputs, ids=ids))


@BOTH
def test_routing_stays_in_float32(device, dtype):
    """route gives the same float32 scores under autocast; so does the weighted sum of rows."""
    logits = torch.randn(20, 8, device=device)
    expected = fused_moe.route(logits, 3)
    x = torch.randn(20, 16, device=device)
    with torch.autocast(device.type, dtype):
        scores, ids = fused_moe.route(logits, 3)
        rows, plan = fused_moe.permute(x, ids, 8)
        out = fused_moe.unpermute(rows, plan, scores)
    assert scores.dtype == F32 and torch.equal(scores, expected[0]) and torch.equal(ids, expected[1])
    assert out.dtype == rows.dtype == F32


@BOTH
def test_layer(device, dtype):
    """The whole layer trains in float32 parameters under autocast, as accurately as the for-loop layer."""
    layer = FusedMoE(24, 16, 6, 2, num_shared_experts=1, shared_expert_gate=True, device=device)
    loop = reference.FusedMoE(24, 16, 6, 2, num_shared_experts=1, shared_expert_gate=True, device=device)
    loop.load_state_dict(layer.state_dict())
    x = torch.randn(50, 24, device=device)
    results = []
    for module in (layer, loop):
        with torch.autocast(device.type, dtype):
            out = module(x)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        results.append((out, [p.grad for p in module.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0.05, atol=0.02)
    for grad, other in zip(results[0][1], results[1][1], strict=True):
        assert grad.dtype == F32
        assert (grad - other).norm() <= 0.03 * other.norm()
