"""`fused_moe.linear`: F.linear by the grouped GEMM of one group; cuda/test_batch_invariance.py has bits."""

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F16, F32, F64, FORMS, assert_same_bits, check_against_reference, forward_backward
from hypothesis import given
from hypothesis import strategies as st

import fused_moe
from fused_moe import linear

pytestmark = pytest.mark.usefixtures("poison")


def setup(device, dtype=F32, tokens=(33,), width_in=64, width_out=40, bias=True):
    """x (*tokens, in), weight (out, in), bias (out,) and dout."""

    def draw(*shape):
        return torch.randn(shape, device=device).to(dtype)

    inputs = {"x": draw(*tokens, width_in), "weight": (draw(width_out, width_in) / width_in**0.5).to(dtype)}
    return inputs | {"bias": draw(width_out) if bias else None}, draw(*tokens, width_out)


@pytest.mark.quick(one_in=3)
@pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
@pytest.mark.parametrize("tokens", ((33,), (), (3, 5), (0,), (2, 0, 4)), ids=str)
@pytest.mark.parametrize("bias", (False, True))
def test_linear(device, dtype, tokens, bias):
    """out, dx, dweight and dbias."""
    inputs, dout = setup(device, dtype, tokens, bias=bias)
    check_against_reference("linear", inputs, dout)


@given(
    tokens=st.sampled_from((0, 1, 2, 16, 129, 600)),
    widths=st.tuples(st.sampled_from((1, 7, 8, 64, 131)), st.sampled_from((1, 7, 8, 72, 257))),
    dtype=st.sampled_from((F32, BF16, F64)),
    form=st.sampled_from(sorted(FORMS)),
    bias=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_sizes(device, tokens, widths, dtype, form, bias, seed):
    """Any widths, dtype and storage."""
    torch.manual_seed(seed)
    inputs, dout = setup(device, dtype, (tokens,), *widths, bias=bias)
    inputs = {n: t if t is None or t.dim() < 2 else FORMS[form](t) for n, t in inputs.items()}
    check_against_reference("linear", inputs, FORMS[form](dout))


def test_gradients_of_gradients(device):
    inputs, _ = setup(device, F64, (5,), 8, 6, bias=False)
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]
    assert torch.autograd.gradcheck(linear, leaves) and torch.autograd.gradgradcheck(linear, leaves)


def test_the_bias_is_added_before_the_sum_is_rounded(device):
    """256 + 1 has no bfloat16, and is a tie; with a half more it is rounded up."""
    x = torch.tensor([[256.0] + [1.0] + [0.0] * 6], device=device, dtype=BF16)
    out = linear(
        x, torch.ones(8, 8, device=device, dtype=BF16), torch.full((8,), 0.5, device=device, dtype=BF16)
    )
    assert out.tolist() == [[258.0] * 8]


def test_autocast(device):
    """As F.linear: operands are cast, float64 is not."""
    inputs, _ = setup(device)
    with torch.autocast(device.type, BF16):
        out = linear(**inputs)
    assert out.dtype == BF16
    assert torch.equal(out, linear(**{n: t.to(BF16) for n, t in inputs.items()}))


@pytest.mark.parametrize("dynamic", (False, True))
def test_compile(device, dynamic):
    """In one graph; other numbers of tokens too."""
    compiled = torch.compile(linear, fullgraph=True, dynamic=dynamic)
    for tokens in ((3, 7), (3, 9), (4, 9)):
        inputs, dout = setup(device, tokens=tokens)
        found = forward_backward(compiled, inputs, dout)
        assert_same_bits(found, forward_backward(linear, inputs, dout))


def test_a_module_of_it(device):
    """The forward of an nn.Linear: same parameters, same values."""

    class Linear(torch.nn.Linear):
        def forward(self, x):
            return linear(x, self.weight, self.bias)

    layer, x = Linear(64, 24, device=device), torch.randn(2, 9, 64, device=device)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def call(**changes):
    return {"x": torch.randn(6, 8), "weight": torch.randn(4, 8), "bias": torch.randn(4)} | changes


@pytest.mark.parametrize(
    "arguments, error, message",
    (
        (call(x=[1.0]), TypeError, "x to be a tensor, found list"),
        (call(x=torch.tensor(1.0)), ValueError, r"x of shape \(..., in\), found \(\)"),
        (call(x=torch.ones(6, 8).int()), TypeError, "x of .*, found torch.int32"),
        (call(weight=None), TypeError, "weight to be a tensor, found NoneType"),
        (
            call(weight=torch.randn(4, 7)),
            ValueError,
            r"weight of shape \(out, in\) = \(4, 8\), found \(4, 7\)",
        ),
        (call(weight=torch.randn(4, 8, 1)), ValueError, "weight of 2 dimensions"),
        (call(weight=torch.randn(4, 8).double()), TypeError, "weight of x's dtype torch.float32"),
        (call(weight=torch.randn(0, 8)), ValueError, r"weight of out, in >= 1, found \(0, 8\)"),
        (call(x=torch.randn(6, 0), weight=torch.randn(4, 0)), ValueError, "weight of out, in >= 1"),
        (call(weight=torch.randn(4, 8, device="meta")), ValueError, "weight on x's device cpu, found meta"),
        (call(bias=torch.randn(5)), ValueError, r"bias of shape \(out\) = \(4,\), found \(5,\)"),
        (call(bias=torch.randn(1, 4)), ValueError, "bias of 1 dimensions"),
        (call(bias=torch.randn(4).half()), TypeError, "bias of x's dtype torch.float32"),
    ),
)
def test_wrong_calls(cpu, arguments, error, message):
    with pytest.raises(error, match=f"linear: expected {message}"):
        linear(**arguments)


def test_wrong_bias_of_grouped_mm(cpu):
    ends, a, b = torch.tensor([2, 6], dtype=torch.int32), torch.randn(6, 8), torch.randn(2, 4, 8)
    for bias, error in (
        (torch.randn(2, 5), ValueError),
        (torch.randn(4), ValueError),
        (torch.randn(2, 4).half(), TypeError),
    ):
        with pytest.raises(error, match="grouped_mm: expected bias of"):
            fused_moe.grouped_mm(a, b, ends, bias=bias)


def test_bias_of_grouped_mm(device):
    """Against the reference, with an empty expert and rows of none."""
    ends = torch.tensor([5, 5, 36, 40], dtype=torch.int32, device=device)
    inputs = {
        "a": torch.randn(47, 24, device=device),
        "b": torch.randn(4, 16, 24, device=device) / 5,
        "bias": torch.randn(4, 16, device=device),
    }
    found = check_against_reference("grouped_mm", inputs, torch.randn(47, 16, device=device), offsets=ends)
    assert not found["out"][40:].any() and not found["dbias"][1].any()
