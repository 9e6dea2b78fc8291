"""grouped_mlp: experts on contiguous rows, and the rows past counts.sum()."""

import pytest
import torch
from cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LAYOUTS,
    ODD,
    STRICT,
    Case,
    assert_same_bits,
    check_against_reference,
    forward_backward,
)
from hypothesis import given
from hypothesis import strategies as st

from fused_moe import fused_experts, grouped_mlp, route_plan

pytestmark = pytest.mark.usefixtures("poison")

BOTH_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
COUNTS = (4, 0, 129, 1, 33)


def setup(case: Case, device, counts=COUNTS, spare=0):
    """x_rows and weights, dout, counts."""
    num_rows = sum(counts) + spare

    def draw():
        return torch.randn(num_rows, case.dim, device=device).to(case.dtype)

    inputs = {"x_rows": draw(), **case.weights(device)}
    return inputs, draw(), torch.tensor(counts, device=device)


@pytest.mark.quick(one_in=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@BOTH_DTYPES
def test_layouts(device, dtype, layout):
    """Every layout and activation, with and without biases: all gradients."""
    for i, activation in enumerate(ACTIVATIONS):
        case = Case(layout=layout, activation=activation, bias=i % 2 == 0, dtype=dtype)
        inputs, dout, counts = setup(case, device, spare=3)
        check_against_reference("grouped_mlp", inputs, dout, counts=counts, **case.options)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
def test_accuracy(device, dtype):
    """No tensor's error exceeds 1.1 times that of the eager loop in the same dtype."""
    case = Case(dim=128, hidden=96, num_experts=4, dtype=dtype, bias=True)
    inputs, dout, counts = setup(case, device, (300, 120, 0, 180))
    check_against_reference("grouped_mlp", inputs, dout, STRICT, counts=counts, **case.options)


@given(
    counts=st.lists(st.sampled_from((0, 1, 2, 7, 40, 257)), min_size=1, max_size=6),
    spare=st.sampled_from((0, 1, 5)),
    dim=st.sampled_from(ODD),
    hidden=st.sampled_from(ODD),
    layout=st.sampled_from(sorted(LAYOUTS)),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    dtype=st.sampled_from((F32, BF16, F64)),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 999),
)
def test_any_case(device, counts, spare, dim, hidden, layout, activation, bias, dtype, form, seed):
    """Any counts, sizes, layout, activation, dtype and storage."""
    torch.manual_seed(seed)
    case = Case(
        dim=dim, hidden=hidden, num_experts=len(counts), layout=layout, activation=activation,
        bias=bias, dtype=dtype,
    )  # fmt: skip
    inputs, dout, counts = setup(case, device, counts, spare)
    inputs = {n: t if t is None else FORMS[form](t) for n, t in inputs.items()}
    check_against_reference("grouped_mlp", inputs, FORMS[form](dout), counts=counts, **case.options)


@pytest.mark.parametrize("layout", ("separate", "ungated", "interleaved.T"))
@pytest.mark.parametrize("poison", (float("nan"), float("inf")))
@BOTH_DTYPES
def test_tail_rows_do_not_leak(device, dtype, layout, poison):
    """Rows past counts.sum() are not read; results are zero there, forward and backward."""
    case = Case(layout=layout, bias=True, dtype=dtype)
    inputs, dout, counts = setup(case, device, spare=41)
    expected = forward_backward(grouped_mlp, inputs, dout, counts=counts, **case.options)
    inputs["x_rows"][-41:] = poison
    dout[-41:] = poison
    found = forward_backward(grouped_mlp, inputs, dout, counts=counts, **case.options)
    assert_same_bits(found, expected)
    assert not found["out"][-41:].count_nonzero()
    assert not found["dx_rows"][-41:].count_nonzero()


def test_empty_experts_get_exact_zeros(device):
    """Weight and bias gradients of an expert without rows are zero, whatever the memory had before."""
    case = Case(bias=True)
    inputs, dout, counts = setup(case, device)
    ours = forward_backward(grouped_mlp, inputs, dout, counts=counts)
    for name in ("dw1", "dw2", "dw3", "db1", "db2", "db3"):
        assert not ours[name][1].count_nonzero(), name
        assert ours[name][0].count_nonzero(), name


@pytest.mark.parametrize("counts", ((0, 0, 0, 0, 0), (0, 0, 7, 0, 0)))
@pytest.mark.parametrize("spare", (0, 5))
def test_few_rows(device, counts, spare):
    """No rows at all, and one active expert."""
    case = Case(bias=True)
    inputs, dout, counts = setup(case, device, counts, spare)
    check_against_reference("grouped_mlp", inputs, dout, counts=counts)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))
def test_counts_of_any_integer_dtype(device, dtype):
    """The same bits from counts of every integer dtype."""
    case = Case()
    inputs, dout, counts = setup(case, device, (4, 0, 100, 1, 33))
    expected = forward_backward(grouped_mlp, inputs, dout, counts=counts)
    found = forward_backward(grouped_mlp, inputs, dout, counts=counts.to(dtype))
    assert_same_bits(found, expected)


def test_same_as_fused_experts(device):
    """Permuted rows give the same as fused_experts with K = 1 and scores of one."""
    case = Case(tokens=100, top_k=1)
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["scores"].fill_(1)
    expected = fused_experts(**inputs, ids=ids)
    plan = route_plan(ids, case.num_experts)
    weights = {n: inputs[n] for n in ("w1", "w2", "w3")}
    rows = grouped_mlp(inputs["x"][plan.row_token.long()], counts=plan.counts, **weights)
    assert torch.equal(rows, expected[plan.row_token.long()])


def test_double_backward_raises(device):
    """A second derivative raises a clear message."""
    inputs, _, counts = setup(Case(), device)
    inputs["x_rows"].requires_grad_()
    out = grouped_mlp(**inputs, counts=counts)
    (dx,) = torch.autograd.grad(out.square().sum(), inputs["x_rows"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.sum().backward()
