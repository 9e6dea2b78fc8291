"""permute and unpermute: exact copies, weighted sums, and adjoint to each other."""

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    ODD,
    ROUTINGS,
    STRICT,
    assert_near,
    assert_same_bits,
    check_against_reference,
    forward_backward,
    make_ids,
    score_dtype,
)
from hypothesis import given
from hypothesis import strategies as st

from fused_moe import permute, reference, unpermute

pytestmark = pytest.mark.usefixtures("poison")

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))


def setup(device, dtype=F32, tokens=61, dim=37, num_experts=6, top_k=3, routing="random", seed=0):
    """ids, their plan, x (T, D), rows (T*K, D), scores (T, K)."""
    ids = make_ids(routing, tokens, top_k, num_experts, seed).to(device)
    plan = reference.route_plan(ids, num_experts)
    x = torch.randn(tokens, dim, device=device).to(dtype)
    rows = torch.randn(tokens * top_k, dim, device=device).to(dtype)
    scores = torch.rand(tokens, top_k, device=device).to(score_dtype(dtype))
    return ids, plan, x, rows, scores


def rows_of(x, ids, num_experts):
    return permute(x, ids, num_experts)[0]


@pytest.mark.quick
@ALL_DTYPES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_permute(device, dtype, routing):
    """Every row is its token's bits, rows past the last one are zero, and the plan is that of the ids."""
    ids, expected, x, _, _ = setup(device, dtype, routing=routing)
    rows, plan = permute(x, ids, 6)
    assert rows.dtype == dtype
    for found, wanted in zip(plan, expected, strict=True):
        assert torch.equal(found, wanted)
    num_rows = int(plan.offsets[-1])
    assert torch.equal(rows[:num_rows], x[plan.row_token[:num_rows].long()])
    assert not rows[num_rows:].count_nonzero()


@pytest.mark.quick
@ALL_DTYPES
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("weighted", (False, True))
def test_unpermute(device, dtype, routing, weighted):
    """The weighted sum of every token's rows, and the gradients of rows and scores."""
    ids, plan, x, rows, scores = setup(device, dtype, routing=routing)
    inputs = {"rows": rows, "scores": scores if weighted else None}
    ours = check_against_reference("unpermute", inputs, torch.randn_like(x), plan=plan)
    if weighted:
        others = (ids < 0) | (ids >= 6)
        assert not ours["dscores"][others].count_nonzero()


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
def test_unpermute_accuracy(device, dtype):
    """The sum's error is at most 1.1 times that of the eager sum in float32."""
    _, plan, x, rows, scores = setup(device, dtype, 500, 129, 8, 8)
    inputs = {"rows": rows, "scores": scores}
    check_against_reference("unpermute", inputs, torch.randn_like(x), STRICT, plan=plan)


@pytest.mark.parametrize("routing", ("random", "sentinels"))
@ALL_DTYPES
def test_permute_gradient(device, dtype, routing):
    """The gradient of permute sums the rows of every token, in float32, rounded once."""
    ids, plan, x, rows, _ = setup(device, dtype, routing=routing)
    ours = forward_backward(rows_of, {"x": x}, rows, ids=ids, num_experts=6)
    assert_near(ours["dx"], reference.unpermute(rows.double(), plan))


@given(
    tokens=st.sampled_from((0, 1, 2, 17, 130)),
    dim=st.sampled_from(ODD),
    num_experts=st.sampled_from((1, 2, 5, 64, 1024)),
    top_k=st.integers(1, 32),
    routing=st.sampled_from(("repeats", "one", "gaps", "none")),
    dtype=st.sampled_from((F32, BF16, F16, F64)),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 999),
)
def test_any_rows(device, tokens, dim, num_experts, top_k, routing, dtype, form, seed):
    """Any sizes, routing, dtype and storage."""
    ids, plan, x, rows, scores = setup(device, dtype, tokens, dim, num_experts, top_k, routing, seed)
    assert torch.equal(
        rows_of(FORMS[form](x), FORMS[form](ids), num_experts), reference.permute(x, ids, num_experts)[0]
    )
    inputs = {"rows": FORMS[form](rows), "scores": FORMS[form](scores)}
    check_against_reference("unpermute", inputs, FORMS[form](torch.randn_like(x)), plan=plan)


@pytest.mark.parametrize("routing", ("random", "sentinels"))
def test_adjoint(device, routing):
    """<permute(x), y> = <x, unpermute(y)>, in float64."""
    ids, plan, x, rows, _ = setup(device, F64, routing=routing)
    left = (rows_of(x, ids, 6) * rows).sum()
    right = (x * unpermute(rows, plan)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=0)


def test_rows_past_the_last_are_not_read(device):
    """NaN in rows without a slot affects neither the sum nor a gradient."""
    _, plan, x, rows, scores = setup(device, routing="sentinels")
    num_rows = int(plan.offsets[-1])
    assert num_rows < rows.size(0)
    dout = torch.randn_like(x)
    expected = forward_backward(unpermute, {"rows": rows, "scores": scores}, dout, plan=plan)
    poisoned = rows.clone()
    poisoned[num_rows:] = float("nan")
    found = forward_backward(unpermute, {"rows": poisoned, "scores": scores}, dout, plan=plan)
    assert_same_bits(found, expected)
    assert not found["drows"][num_rows:].count_nonzero()


def test_gradient_past_the_last_row_is_not_read(device):
    """NaN in the gradient of rows without a token does not affect x."""
    ids, plan, x, rows, _ = setup(device, routing="sentinels")
    expected = forward_backward(rows_of, {"x": x}, rows, ids=ids, num_experts=6)
    rows[int(plan.offsets[-1]) :] = float("nan")
    found = forward_backward(rows_of, {"x": x}, rows, ids=ids, num_experts=6)
    assert_same_bits({"dx": found["dx"]}, {"dx": expected["dx"]})


def test_scores_alone_or_rows_alone(device):
    """Each gradient alone is the same as both together."""
    _, plan, x, rows, scores = setup(device)
    dout = torch.randn_like(x)
    both = forward_backward(unpermute, {"rows": rows, "scores": scores}, dout, plan=plan)
    only_rows = forward_backward(unpermute, {"rows": rows}, dout, scores=scores, plan=plan)
    only_scores = forward_backward(unpermute, {"scores": scores}, dout, rows=rows, plan=plan)
    assert torch.equal(only_rows["drows"], both["drows"])
    assert torch.equal(only_scores["dscores"], both["dscores"])


def test_round_trip(device):
    """unpermute of permute, weighted by 1/K with K a power of two, gives the bits of x."""
    for dtype in (F32, BF16, F16):
        ids, _, x, _, _ = setup(device, dtype, top_k=4)
        rows, plan = permute(x, ids, 6)
        scores = torch.full((x.size(0), 4), 0.25, device=device)
        assert torch.equal(unpermute(rows, plan, scores), x)


def test_same_bits_on_any_number_of_threads(cpu, threads):
    """1, 2 and 3 threads give the same bits."""
    _, plan, x, rows, scores = setup(cpu, F32, 700, 96, 16, 4)
    inputs, dout = {"rows": rows, "scores": scores}, torch.randn_like(x)
    threads(1)
    first = forward_backward(unpermute, inputs, dout, plan=plan)
    for n in (2, 3):
        threads(n)
        assert_same_bits(forward_backward(unpermute, inputs, dout, plan=plan), first)


def test_weighted_double_backward_raises(device):
    """A second derivative of the weighted sum raises."""
    _, plan, _, rows, scores = setup(device)
    rows.requires_grad_()
    out = unpermute(rows, plan, scores.requires_grad_())
    (drows,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        drows.sum().backward()
