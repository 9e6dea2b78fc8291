"""activate and its gradients: the activation of experts that are composed of grouped GEMMs."""

import pytest
import torch
from cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    ODD,
    Calls,
    assert_near,
    assert_same_bits,
    forward_backward,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st

from fused_moe import ops as codes
from fused_moe import reference

pytestmark = pytest.mark.usefixtures("poison")

ops = torch.ops.fused_moe
LAYOUTS = {**codes.LAYOUTS, "ungated": codes.UNGATED}
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)
ALL_ACTIVATIONS = pytest.mark.parametrize("activation", ACTIVATIONS)
ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
# One element, one row, no rows; CTAs that end inside a row, and rows that end inside a CTA; odd widths.
SIZES = ((1, 1), (1, 40), (0, 16), (5, 0), (61, 37), (33, 64), (300, 72), (3, 5001), (2, 8192))


def activate(h, up, layout, activation, limit=1.0):
    return ops.activate(h, up, LAYOUTS[layout], codes.ACTIVATION_CODES[activation], [1.702, limit])


def plainly(h, up, layout, activation, limit=1.0):
    """The same by the reference."""
    gate = h
    if layout == "halves":
        gate, up = h.chunk(2, -1)
    elif layout == "interleaved":
        gate, up = h[:, 0::2], h[:, 1::2]
    return reference.activate(gate, up, activation=activation, limit=limit)


def in_layout(gate, up, layout) -> dict:
    """Gates and ups as the operator takes them."""
    if layout == "separate":
        return {"h": gate, "up": up}
    packed = {"halves": (gate, up), "interleaved": (gate, up), "ungated": (gate,)}[layout]
    h = torch.cat(packed, 1) if layout == "halves" else torch.stack(packed, -1).flatten(1)
    return {"h": h, "up": None}


def draw(device, rows, width, layout, dtype) -> tuple[dict, torch.Tensor]:
    """The operands, and da."""
    gate, up, da = (torch.randn(rows, width).to(device, dtype) for _ in range(3))
    return in_layout(gate, up, layout), da


def check(inputs: dict, da, **fixed) -> None:
    """Value and gradients are the reference's in float64, rounded once."""
    found = forward_backward(activate, inputs, da, **fixed)
    exact = forward_backward(plainly, to_double(inputs), da.double(), **fixed)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        assert found[name].dtype == da.dtype and found[name].is_contiguous()
        assert_near(found[name], value)


@pytest.mark.quick(one_in=5)
@ALL_LAYOUTS
@ALL_ACTIVATIONS
@ALL_DTYPES
def test_sizes(device, layout, activation, dtype):
    for rows, width in SIZES:
        inputs, da = draw(device, rows, width, layout, dtype)
        limit = 1.0 if dtype in (F32, F64) else 7.0
        check(inputs, da, layout=layout, activation=activation, limit=limit)


@given(
    rows=st.sampled_from((0, 1, 2, 17, 130)),
    width=st.sampled_from(ODD),
    layout=st.sampled_from(sorted(LAYOUTS)),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from((F32, BF16, F16, F64)),
    forms=st.tuples(*[st.sampled_from(sorted(FORMS))] * 3),
)
def test_any_storage(device, rows, width, layout, activation, dtype, forms):
    """Views that are strided, misaligned or transposed, each operand another."""
    inputs, da = draw(device, rows, width, layout, dtype)
    inputs = {n: t if t is None else FORMS[f](t) for (n, t), f in zip(inputs.items(), forms, strict=False)}
    check(inputs, FORMS[forms[2]](da), layout=layout, activation=activation)


@ALL_LAYOUTS
@ALL_ACTIVATIONS
@ALL_DTYPES
def test_edges_and_no_numbers(device, layout, activation, dtype):
    """At the kinks and beside them, far out, infinite and NaN: what PyTorch gives, and NaN where it has NaN.
    Flat sides pass no NaN; PyTorch's clamp is flat at NaN, too, and its relu is not."""
    nan, inf, near = float("nan"), float("inf"), (0.0, 1.0, 1.0625, 0.9375, 3.0)
    gates, ups = (
        [s * v for v in values for s in (1, -1)] + [nan]
        for values in ((*near, 10.0, 100.0, 30000.0, inf), (*near, inf))
    )
    points = (torch.tensor(values, dtype=dtype) for values in (gates, ups, (1.0, -0.5, nan)))
    gate, up, da = (t.flatten(1).to(device) for t in torch.meshgrid(*points, indexing="ij"))
    up = up.where((gate > -10) | up.isfinite(), 2)  # whether a gate so far out is 0 depends on the precision
    inputs, fixed = in_layout(gate, up, layout), {"layout": layout, "activation": activation}
    found = forward_backward(activate, inputs, da, **fixed)
    expected = forward_backward(plainly, to_double(inputs), da.double(), **fixed)
    for name, value in expected.items():
        value = value.to(dtype)
        assert torch.equal(found[name].isnan(), value.isnan()), name
        rtol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol, equal_nan=True, msg=name)


@ALL_ACTIVATIONS
@ALL_DTYPES
def test_small_signals(device, activation, dtype):
    """Nothing cancels near 0: each element is right to a rounding, where a norm would hide the small ones."""
    small = torch.logspace(-5, -0.5, 200)
    points = torch.cat([small, -small]).to(device, dtype)
    gate, up = torch.meshgrid(points, points, indexing="ij")
    inputs, da = in_layout(gate, up, "separate"), torch.ones_like(gate)
    fixed = {"layout": "separate", "activation": activation}
    found = forward_backward(activate, inputs, da, **fixed)
    expected = forward_backward(plainly, to_double(inputs), da.double(), **fixed)
    info = torch.finfo(dtype)
    rtol = 0.51 * info.eps if dtype.itemsize == 2 else 8 * info.eps
    for name, value in expected.items():
        atol = info.smallest_normal * info.eps
        torch.testing.assert_close(found[name].double(), value, rtol=rtol, atol=atol, msg=name)


@ALL_LAYOUTS
@ALL_DTYPES
def test_a_row_alone(device, layout, dtype):
    """A row's bits do not depend on the other rows."""
    inputs, da = draw(device, 70, 43, layout, dtype)
    fixed = {"layout": layout, "activation": "silu"}
    together = forward_backward(activate, inputs, da, **fixed)
    for r in (0, 33, 69):
        row = {n: t if t is None else t[r : r + 1] for n, t in inputs.items()}
        alone = forward_backward(activate, row, da[r : r + 1], **fixed)
        assert_same_bits(alone, {n: t[r : r + 1] for n, t in together.items()})


def test_same_bits_on_any_number_of_threads(cpu, threads):
    inputs, da = draw(cpu, 500, 700, "interleaved", BF16)
    fixed = {"layout": "interleaved", "activation": "gelu"}
    threads(1)
    first = forward_backward(activate, inputs, da, **fixed)
    for n in (2, 3):
        threads(n)
        assert_same_bits(forward_backward(activate, inputs, da, **fixed), first)


@pytest.mark.parametrize("name", ("h", "up"))
def test_one_gradient(device, name):
    """Gates and ups are two tensors, and one is frozen."""
    inputs, da = draw(device, 9, 16, "separate", F32)
    fixed = {"layout": "separate", "activation": "silu"}
    both = forward_backward(activate, inputs, da, **fixed)
    frozen = {n: t for n, t in inputs.items() if n != name}
    alone = forward_backward(activate, {name: inputs[name]}, da, **frozen, **fixed)
    assert_same_bits(alone, {n: both[n] for n in ("out", f"d{name}")})


def test_what_is_kept(device):
    """Backward keeps the operands, nothing else, and is one operator."""
    inputs, da = draw(device, 9, 16, "separate", BF16)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        Calls() as calls,
    ):
        forward_backward(activate, inputs, da, layout="separate", activation="silu")
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in inputs.values()]
    assert [n for n, *_ in calls.calls if "moe" in n] == [
        "fused_moe::activate",
        "fused_moe::activate_backward",
    ]


def test_transforms(device):
    """torch.func's grad and vmap; there is no forward mode."""
    inputs, da = draw(device, 12, 16, "halves", F32)
    h, three = inputs["h"], inputs["h"].view(3, 4, 32)

    def value(h, da):
        return (activate(h, None, "halves", "silu") * da).sum()

    expected = forward_backward(activate, inputs, da, layout="halves", activation="silu")
    assert torch.equal(torch.func.grad(value)(h, da), expected["dh"])
    per_sample = torch.func.vmap(torch.func.grad(value))(three, da.view(3, 4, 16))
    assert torch.equal(per_sample.view_as(h), expected["dh"])
    with pytest.raises(NotImplementedError, match="activate has no forward-mode derivative"):
        torch.func.jvp(lambda h: value(h, da), (h,), (h,))


def test_double_backward_raises(device):
    inputs, da = draw(device, 3, 4, "ungated", F32)
    h = inputs["h"].requires_grad_()
    (dh,) = torch.autograd.grad(activate(h, None, "ungated", "silu"), h, da, create_graph=True)
    with pytest.raises(RuntimeError, match="activate_backward cannot be differentiated: double backward"):
        dh.sum().backward()
