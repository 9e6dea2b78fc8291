"""permute and unpermute: exact copies, weighted sums with shared experts, and adjoint to each other."""

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
    Calls,
    assert_near,
    assert_same_bits,
    check_against_reference,
    forward_backward,
    make_ids,
    score_dtype,
)
from hypothesis import given
from hypothesis import strategies as st

from fused_moe import permute, reference, route_plan, unpermute

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


SHARED = ("none", "plain", "gate", "column")


def add_shared(form, x) -> dict:
    """shared (T, D) like x, and logits (T,) or (T, 1), or none."""
    if form == "none":
        return {}
    shape = (x.size(0), 1) if form == "column" else (x.size(0),)
    gate = torch.randn(shape, device=x.device).to(score_dtype(x.dtype))
    return {"shared": torch.randn_like(x), "shared_gate": None if form == "plain" else gate}


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


@pytest.mark.quick(one_in=5)
@ALL_DTYPES
@pytest.mark.parametrize("routing", ("random", "sentinels", "none"))
@pytest.mark.parametrize("form", SHARED[1:])
@pytest.mark.parametrize("weighted", (False, True))
def test_shared(device, dtype, routing, form, weighted):
    """The shared experts' row of every token, gated or not, and the gradients of all."""
    _, plan, x, rows, scores = setup(device, dtype, routing=routing)
    inputs = {"rows": rows, "scores": scores if weighted else None, **add_shared(form, x)}
    ours = check_against_reference("unpermute", inputs, torch.randn_like(x), plan=plan)
    if form != "plain":
        assert ours["dshared_gate"].shape == inputs["shared_gate"].shape


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("form", SHARED)
def test_unpermute_accuracy(device, dtype, form):
    """The sum's error is at most 1.1 times that of the eager sum in float32."""
    _, plan, x, rows, scores = setup(device, dtype, 500, 129, 8, 8)
    inputs = {"rows": rows, "scores": scores, **add_shared(form, x)}
    check_against_reference("unpermute", inputs, torch.randn_like(x), STRICT, plan=plan)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("form", SHARED[1:])
def test_shared_is_rounded_once(device, dtype, form):
    """Output and gradient of shared are those of the same float32 operands, rounded."""
    _, plan, x, rows, scores = setup(device, dtype, 100, 256, 8, 4)
    inputs, dout = {"rows": rows, **add_shared(form, x)}, torch.randn_like(x)
    found = forward_backward(unpermute, inputs, dout, scores=scores, plan=plan)
    wide = {n: t if t is None else t.float() for n, t in inputs.items()}
    expected = forward_backward(unpermute, wide, dout.float(), scores=scores, plan=plan)
    for name in ("out", "dshared"):
        assert torch.equal(found[name], expected[name].to(dtype)), name
    assert not torch.equal(found["out"], unpermute(rows, plan, scores) + inputs["shared"])


def test_shared_is_added_last(device):
    """After the slots, in their order: in float32 1e8 + 1 is 1e8."""
    plan = reference.route_plan(torch.tensor([[0, 1]], device=device), 2)
    rows = torch.tensor([[1e8], [1.0]], device=device).expand(2, 64).contiguous()
    for gate in (None, torch.tensor([200.0], device=device)):
        out = unpermute(rows, plan, shared=torch.full((1, 64), -1e8, device=device), shared_gate=gate)
        assert not out.count_nonzero()


def test_a_shut_and_an_open_gate(device):
    """Logits so large that one of sigmoid and its derivative is 0, or near it: no NaN, and no digits lost."""
    gate = torch.tensor([-500.0, -88, -30, 0, 12, 30, 88, 500], device=device)
    _, plan, x, rows, _ = setup(device, tokens=8, routing="none")
    shared, dout = torch.randn_like(x), torch.randn_like(x)
    found = forward_backward(unpermute, {"shared_gate": gate}, dout, rows=rows, plan=plan, shared=shared)
    wide = gate.double()
    slope = wide.sigmoid() * (-wide).sigmoid()
    expected = {"out": wide.sigmoid().unsqueeze(-1) * shared.double()}
    expected["dshared_gate"] = (dout.double() * shared.double()).sum(-1) * slope
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-37)


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
    shared=st.sampled_from(SHARED),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 999),
)
def test_any_rows(device, tokens, dim, num_experts, top_k, routing, dtype, shared, form, seed):
    """Any sizes, routing, dtype and storage."""
    ids, plan, x, rows, scores = setup(device, dtype, tokens, dim, num_experts, top_k, routing, seed)
    assert torch.equal(
        rows_of(FORMS[form](x), FORMS[form](ids), num_experts), reference.permute(x, ids, num_experts)[0]
    )
    inputs = {"rows": rows, "scores": scores, **add_shared(shared, x)}
    inputs = {n: t if t is None or t.dim() < 2 else FORMS[form](t) for n, t in inputs.items()}
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


@pytest.mark.parametrize("form", SHARED)
def test_each_gradient_alone(device, form):
    """It is the same as all together, and no operator computes another one."""
    _, plan, x, rows, scores = setup(device)
    inputs, dout = {"rows": rows, "scores": scores, **add_shared(form, x)}, torch.randn_like(x)
    inputs = {n: t for n, t in inputs.items() if t is not None}
    together = forward_backward(unpermute, inputs, dout, plan=plan)
    for name, value in inputs.items():
        others = {n: t for n, t in inputs.items() if n != name}
        with Calls() as calls:
            alone = forward_backward(unpermute, {name: value}, dout, **others, plan=plan)
        assert_same_bits(alone, {n: together[n] for n in ("out", f"d{name}")})
        backward = "unpermute_backward" if name in ("rows", "scores") else "shared_backward"
        made = [t for _, results in calls.of(backward) for t in results if t.numel()]
        assert len(made) == (name != "shared" or form != "plain")
        assert not calls.of({"unpermute_backward": "shared_backward"}.get(backward, "unpermute_backward"))


def test_round_trip(device):
    """unpermute of permute, weighted by 1/K with K a power of two, gives the bits of x."""
    for dtype in (F32, BF16, F16):
        ids, _, x, _, _ = setup(device, dtype, top_k=4)
        rows, plan = permute(x, ids, 6)
        scores = torch.full((x.size(0), 4), 0.25, device=device)
        assert torch.equal(unpermute(rows, plan, scores), x)


@pytest.mark.quick
def test_rows_without_columns(device):
    """Tensors without elements have no memory, whose address no kernel may use."""
    ops, plan = torch.ops.fused_moe, route_plan(torch.tensor([[0, 2], [2, -1]], device=device), 3)
    empty = {n: torch.empty(n, 0, device=device) for n in (2, 4)}
    scores, gate = torch.rand(2, 2, device=device), torch.randn(2, device=device)
    assert ops.permute(empty[2], plan.tensors).shape == (4, 0)
    assert ops.unpermute(empty[4], scores, plan.tensors, empty[2], gate).shape == (2, 0)
    drows, dscores = ops.unpermute_backward(empty[2], empty[4], scores, plan.tensors, True, True)
    assert drows.shape == (4, 0) and not dscores.any()
    dshared, dgate = ops.shared_backward(empty[2], empty[2], gate, True, True)
    assert dshared.shape == (2, 0) and not dgate.any()
    assert ops.bias_grad(empty[4], plan.offsets[1:]).shape == (3, 0)
    activation = [0, 0, [1.702, 7.0]]
    assert ops.activate(empty[4], empty[4], *activation).shape == (4, 0)
    assert [t.shape for t in ops.activate_backward(empty[4], empty[4], empty[4], *activation)] == [(4, 0)] * 2


def test_same_bits_on_any_number_of_threads(cpu, threads):
    """1, 2 and 3 threads give the same bits."""
    _, plan, x, rows, scores = setup(cpu, F32, 700, 96, 16, 4)
    inputs, dout = {"rows": rows, "scores": scores, **add_shared("gate", x)}, torch.randn_like(x)
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
