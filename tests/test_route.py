"""route: scores and ids against the reference in float64; ties, bias, groups, NaN and infinity."""

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    STRICT,
    assert_as_good,
    assert_near,
    assert_same_bits,
    score_dtype,
)
from hypothesis import given
from hypothesis import strategies as st

import fused_moe
from fused_moe import reference, route

pytestmark = pytest.mark.usefixtures("poison")

NAN, INF = float("nan"), float("inf")
FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")
EVERY_FUNC = pytest.mark.parametrize("score_func", FUNCS)
ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))


def run(fn, logits, dscores, top_k, **options) -> tuple[torch.Tensor, dict]:
    """ids, and {"scores", "dlogits"}."""
    logits = logits.detach().requires_grad_()
    scores, ids = fn(logits, top_k, **options)
    (dlogits,) = torch.autograd.grad(scores, logits, dscores.to(scores.dtype))
    return ids, {"scores": scores.detach(), "dlogits": dlogits}


def check(logits, top_k, slack=4.0, **options) -> None:
    """The reference's ids, and scores and gradient as accurate as eager in the same dtype."""
    dscores = torch.randn(logits.size(0), top_k, device=logits.device)
    ids, ours = run(route, logits, dscores, top_k, **options)
    exact_ids, exact = run(reference.route, logits.double(), dscores.double(), top_k, **options)
    _, eager = run(reference.route, logits, dscores, top_k, **options)
    assert ids.dtype == torch.int32
    assert ours["scores"].dtype == score_dtype(logits.dtype)
    assert torch.equal(ids, exact_ids)
    for name in exact:  # separately: scores are float32, the gradient may be bfloat16
        assert_as_good(*({name: results[name]} for results in (ours, eager, exact)), slack)


SIZES = (
    (1, 1), (2, 1), (2, 2), (7, 3), (8, 8), (37, 5), (64, 6), (128, 8), (256, 32), (1024, 1), (1024, 32)
)  # fmt: skip
GROUPS = ((64, 8, 3, 6), (12, 4, 1, 3), (9, 9, 4, 4), (256, 8, 4, 8))


@pytest.mark.quick(one_in=5)
@EVERY_FUNC
@ALL_DTYPES
@pytest.mark.parametrize("num_experts, top_k", SIZES)
def test_sizes(device, num_experts, top_k, dtype, score_func):
    """E from 1 to 1024 and K from 1 to min(E, 32), plain, renormalised and scaled."""
    logits = torch.randn(29, num_experts, device=device).to(dtype)
    check(logits, top_k, score_func=score_func)
    check(logits, top_k, score_func=score_func, route_norm=True, route_scale=2.5)


@EVERY_FUNC
@ALL_DTYPES
@pytest.mark.parametrize("route_norm", (False, True))
def test_accuracy(device, dtype, score_func, route_norm):
    """The errors of scores and gradient are at most 1.1 times those of eager."""
    logits = torch.randn(2000, 64, device=device).to(dtype)
    check(logits, 6, slack=STRICT, score_func=score_func, route_norm=route_norm)


@given(data=st.data())
def test_any_settings(device, data):
    """Any sizes with any combination of settings."""
    draw = data.draw
    num_groups = draw(st.sampled_from((None, 1, 2, 4, 8)), "groups")
    num_experts = draw(st.integers(1, 40), "experts") * (num_groups or 1)
    options = {
        "score_func": draw(st.sampled_from(FUNCS), "score_func"),
        "route_norm": draw(st.booleans(), "route_norm"),
        "route_scale": draw(st.sampled_from((1.0, 0.5, 16.0)), "route_scale"),
        "route_norm_eps": draw(st.sampled_from((0.0, 1e-20, 0.1)), "route_norm_eps"),
        "group_score": draw(st.sampled_from(("top2", "max")), "group_score"),
    }
    reach = num_experts
    if num_groups:
        kept = draw(st.integers(1, num_groups), "kept")
        options |= {"num_expert_groups": num_groups, "num_limited_groups": kept}
        reach = kept * num_experts // num_groups
    top_k = draw(st.integers(1, min(reach, 32)), "top_k")
    if draw(st.booleans(), "bias"):
        options["bias"] = torch.randn(num_experts, device=device) * 0.3
    if draw(st.booleans(), "expert_scale"):
        options["expert_scale"] = torch.randn(num_experts, device=device)
    tokens = draw(st.sampled_from((0, 1, 5, 64)), "tokens")
    # Scores of many experts have near-ties in float32, which rounding decides; logits have none.
    rounds = num_groups is not None or "bias" in options
    dtype = F64 if rounds else F32
    check(torch.randn(tokens, num_experts, dtype=dtype, device=device), top_k, **options)


def choice_values(logits, options):
    """The values whose top-k is chosen with a bias or groups."""
    scores = reference.SCORES[options["score_func"]](logits)
    return scores + options.get("bias", torch.zeros(())).double()


# --- the choice -----------------------------------------------------------------------------------


@EVERY_FUNC
def test_ties_go_to_the_lowest_id(device, score_func):
    """Equal experts are chosen in the order of their ids, with and without bias and groups."""
    groups = {"num_expert_groups": 4, "num_limited_groups": 2}
    zeros = torch.zeros(5, 64, device=device)
    first = torch.arange(6, dtype=torch.int32, device=device).expand(5, 6)
    for options in ({}, {"bias": torch.zeros(64, device=device)}, groups):
        assert torch.equal(route(zeros, 6, score_func=score_func, **options)[1], first)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]], device=device)
    expected = torch.tensor([[1, 3, 5, 2, 4]], dtype=torch.int32, device=device)
    assert torch.equal(route(logits, 5, score_func=score_func)[1], expected)


@EVERY_FUNC
def test_ties_of_few_values(device, score_func):
    """Logits of three values only: the reference's stable order, whatever K."""
    logits = torch.randint(-1, 2, (40, 130), device=device).float()
    for top_k in (1, 8, 32):
        expected = reference.route(logits, top_k, score_func=score_func)[1]
        assert torch.equal(route(logits, top_k, score_func=score_func)[1], expected)


def test_saturated_scores_keep_the_logits_order(device):
    """Sigmoid rounds logits of 40 and 50 to the same score; the top-k is still that of the logits."""
    logits = torch.tensor([[40.0, 60.0, 50.0, -40.0]], device=device)
    scores, ids = route(logits, 3, score_func="sigmoid")
    assert ids.tolist() == [[1, 2, 0]]
    assert scores.tolist() == [[1.0, 1.0, 1.0]]


@EVERY_FUNC
def test_bias_steers_the_choice_not_the_score(device, score_func):
    """A large bias chooses the worst expert; its score is the same as without the bias."""
    logits = torch.randn(50, 16, device=device)
    bias = torch.zeros(16, device=device)
    bias[11] = 100.0
    scores, ids = route(logits, 2, score_func=score_func, bias=bias)
    assert (ids[:, 0] == 11).all()
    probs = reference.SCORES[score_func](logits.double())
    assert_near(scores, probs.gather(-1, ids.long()))
    check(logits, 3, score_func=score_func, bias=torch.randn(16, device=device))


def test_bias_has_no_gradient(device):
    """The bias has its own update rule and no gradient."""
    bias = torch.zeros(8, device=device, requires_grad=True)
    logits = torch.randn(4, 8, device=device, requires_grad=True)
    route(logits, 2, bias=bias)[0].sum().backward()
    assert bias.grad is None and logits.grad is not None


@EVERY_FUNC
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("group_score, num_best", (("top2", 2), ("max", 1)))
@pytest.mark.parametrize("num_experts, groups, kept, top_k", GROUPS)
def test_groups(device, num_experts, groups, kept, top_k, group_score, num_best, with_bias, score_func):
    """Only experts of the best groups are chosen; a group's score is the sum of its two best, or its best."""
    logits = torch.randn(40, num_experts, device=device)
    options = {"score_func": score_func, "num_expert_groups": groups, "num_limited_groups": kept}
    options["group_score"] = group_score
    if with_bias:
        options["bias"] = 0.2 * torch.randn(num_experts, device=device)
    check(logits, top_k, **options)
    ids = route(logits, top_k, **options)[1].long()
    grouped = choice_values(logits.double(), options).unflatten(-1, (groups, -1))
    best = grouped.topk(min(num_best, num_experts // groups)).values.sum(-1).topk(kept).indices
    chosen_groups = ids // (num_experts // groups)
    assert (chosen_groups.unsqueeze(-1) == best.unsqueeze(1)).any(-1).all()


def test_the_best_expert_may_be_in_another_group_than_the_best_two(device):
    """[9, 0] is worth more than [5, 5] by its best expert, and less by its two best."""
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.0]], device=device).log()
    groups = {"num_expert_groups": 2, "num_limited_groups": 1}
    assert route(logits, 2, **groups)[1].tolist() == [[2, 3]]
    assert route(logits, 2, **groups, group_score="max")[1].tolist() == [[0, 1]]


def test_keeping_every_group_is_no_limit(device):
    """All groups kept: the choice without groups."""
    logits = torch.randn(40, 32, device=device)
    expected = route(logits, 5)
    found = route(logits, 5, num_expert_groups=4, num_limited_groups=4)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


@EVERY_FUNC
def test_negative_biased_scores_in_kept_groups(device, score_func):
    """Scores that the bias makes negative are still chosen before experts of groups that are not kept."""
    logits = torch.randn(30, 16, device=device)
    bias = torch.full((16,), -5.0, device=device)
    options = {"score_func": score_func, "num_expert_groups": 4, "num_limited_groups": 2}
    expected = route(logits, 6, **options)[1]
    assert torch.equal(route(logits, 6, bias=bias, **options)[1].sort().values, expected.sort().values)


def test_renormalised_scores_sum_to_the_scale(device):
    """route_norm makes each token's scores sum to route_scale."""
    for score_func in FUNCS:
        logits = torch.randn(50, 32, device=device)
        scores, _ = route(logits, 4, score_func=score_func, route_norm=True, route_scale=2.5)
        assert_near(scores.sum(-1), torch.full((50,), 2.5, dtype=F64, device=device))


def test_epsilon_of_the_norm(device):
    """It is added to the sum: scores of 0.1 over 0.1 + 0.3, and none where it and the scores are 0."""
    logits = torch.tensor([[0.1, 0.9], [0.5, 0.5]], device=device).log()
    scores, _ = route(
        logits, 1, route_norm=True, route_norm_eps=0.3, ids=torch.zeros_like(logits[:, :1]).int()
    )
    assert_near(scores, torch.tensor([[0.1 / 0.4], [0.5 / 0.8]], device=device, dtype=F64))
    nothing = torch.full((1, 4), -INF, device=device)
    assert route(nothing, 2, score_func="sigmoid", route_norm=True, route_norm_eps=0.0)[0].isnan().all()
    assert not route(nothing, 2, score_func="sigmoid", route_norm=True)[0].count_nonzero()


# --- a scale per expert ---------------------------------------------------------------------------


@EVERY_FUNC
@ALL_DTYPES
@pytest.mark.parametrize("scale_dtype", (F32, BF16, F16, F64), ids=str)
@pytest.mark.parametrize("route_norm", (False, True))
def test_expert_scale(device, route_norm, scale_dtype, dtype, score_func):
    """A factor on the final scores, with gradients of logits and of itself. The choice ignores it."""
    logits, scale = torch.randn(60, 12, device=device).to(dtype), torch.randn(12).to(device, scale_dtype)
    options = {"score_func": score_func, "route_norm": route_norm, "route_scale": 2.5}
    plain, chosen = route(logits, 3, **options)
    dscores = torch.randn_like(plain)
    results = []
    for fn, wide in ((route, False), (reference.route, False), (reference.route, True)):
        leaves = [t.double() if wide else t for t in (logits, scale)]
        leaves = [t.detach().requires_grad_() for t in leaves]
        scores, ids = fn(leaves[0], 3, expert_scale=leaves[1], **options)
        grads = torch.autograd.grad(scores, leaves, dscores.to(scores.dtype))
        assert torch.equal(ids, chosen)
        results.append({"scores": scores.detach(), "dlogits": grads[0], "dscale": grads[1]})
    assert results[0]["dscale"].dtype == scale_dtype
    assert_near(results[0]["scores"], plain.double() * scale.double()[chosen.long()])
    for name in results[0]:
        assert_as_good(*({name: r[name]} for r in results))


def test_expert_scale_of_any_ids(device):
    """Repeated, remote and padded slots, and a scale of zero, have the reference's gradients."""
    logits, num_tokens = torch.randn(7, 5, device=device, dtype=F64), torch.tensor(6, device=device)
    logits[6] = NAN
    ids = torch.tensor([[1, 1], [2, -1], [-1, -1], [0, 4], [4, 0], [3, 3], [1, 2]], device=device)
    scale = torch.tensor([0.0, 2.0, -1.0, 0.5, 3.0], device=device, dtype=F64)
    found = []
    for fn in (route, reference.route):
        leaves = [t.clone().requires_grad_() for t in (logits, scale)]
        scores, _ = fn(leaves[0], 2, expert_scale=leaves[1], route_norm=True, ids=ids, num_tokens=num_tokens)
        found.append((scores, *torch.autograd.grad(scores.square().sum(), leaves)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
    leaf = scale.clone().requires_grad_()
    scores, chosen = route(logits, 2, expert_scale=leaf, ids=ids, num_tokens=num_tokens)
    dscores = torch.where(chosen < 0, NAN, torch.ones_like(scores))  # what remote slots get is not read
    assert torch.autograd.grad(scores, leaf, dscores)[0].isfinite().all()


def test_expert_scale_has_the_same_bits_in_every_run(device):
    logits, scale = torch.randn(5000, 64, device=device), torch.randn(64, device=device, requires_grad=True)
    grads = [torch.autograd.grad(route(logits, 6, expert_scale=scale)[0].sum(), scale)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


# --- sqrt(softplus) -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F32, F64, BF16), ids=str)
def test_sqrtsoftplus_far_from_zero(device, dtype):
    """Scores and gradients where exp(x) alone underflows or overflows: they fall as exp(x / 2) and rise as
    sqrt(x)."""
    steps = torch.linspace(-160, 160, 321, dtype=F64).to(device, dtype)
    x = torch.cat([steps, torch.tensor([-INF, INF, 0.0, 1e30, -1e30]).to(device, dtype)]).unsqueeze(1)
    x.requires_grad_()
    scores, _ = route(x, 1, score_func="sqrtsoftplus")
    (grad,) = torch.autograd.grad(scores.sum(), x)
    wide = x.detach().double()
    exact = torch.where(wide < -30, (wide / 2).exp(), wide.clamp_min(-30).exp().log1p().sqrt())
    exact = torch.where(wide > 30, wide.sqrt(), exact)
    slope = torch.where(wide < -30, exact / 2, wide.sigmoid() / (2 * exact))
    small = 1e-12 if dtype == F64 else 1e-6
    torch.testing.assert_close(scores.double(), exact, rtol=small, atol=1e-37)
    torch.testing.assert_close(grad.double(), slope, rtol=1e-2 if dtype == BF16 else small, atol=1e-37)


# --- NaN and infinite logits ----------------------------------------------------------------------


@EVERY_FUNC
@pytest.mark.parametrize("groups, kept", ((None, None), (4, 3), (8, 8)))
@pytest.mark.parametrize("num_experts, top_k", ((8, 3), (40, 30), (1024, 32)))
@pytest.mark.parametrize("value", (NAN, INF, -INF))
def test_no_numbers(device, value, num_experts, top_k, groups, kept, score_func):
    """One or all logits NaN or infinite: ids stay valid and distinct, other tokens do not change."""
    options = {"num_expert_groups": groups, "num_limited_groups": kept}
    logits = torch.randn(6, num_experts, device=device)
    clean_scores, clean_ids = route(logits, top_k, score_func=score_func, **options)
    bad = logits.clone()
    bad[1, num_experts // 2] = value
    bad[3] = value
    bad[4, ::2] = value
    bad.requires_grad_()
    biases = (None, torch.randn(num_experts), torch.full((num_experts,), value))
    for bias in (b if b is None else b.to(device) for b in biases):
        scores, ids = route(bad, top_k, score_func=score_func, bias=bias, **options)
        if bias is not None and (bias == -INF).all():
            assert (ids == -1).all() and not scores.count_nonzero()
            continue
        assert ((ids >= 0) & (ids < num_experts)).all()
        assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "an expert was chosen twice"
        (dlogits,) = torch.autograd.grad(scores, bad, torch.ones_like(scores))
        assert dlogits[[0, 2, 5]].isfinite().all()
        if bias is None:
            assert torch.equal(ids[[0, 2, 5]], clean_ids[[0, 2, 5]])
            assert torch.equal(scores[[0, 2, 5]], clean_scores[[0, 2, 5]])
    # -inf and, but for softmax, +inf are limits: the reference's scores. Anything else is NaN.
    scores, ids = route(bad.detach(), top_k, score_func=score_func, **options)
    wide = bad.detach().double()
    expected = reference.SCORES[score_func](wide).gather(-1, ids.long())
    torch.testing.assert_close(scores.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-7)
    if value != value:
        assert scores[[1, 3, 4]].isnan().any(-1).all(), "a NaN logit does not show in the scores"


@EVERY_FUNC
@ALL_DTYPES
@pytest.mark.parametrize("route_norm", (False, True))
@pytest.mark.parametrize(
    "num_experts, groups, kept, top_k",
    ((24, None, None, 1), (24, 4, 2, 12), (70, None, None, 5), (300, 3, 2, 12)),
)
def test_barred_experts(device, top_k, num_experts, groups, kept, route_norm, dtype, score_func):
    """A bias of -inf: the expert is not chosen, with a NaN score neither. Slots for which no other is left
    have id -1, score 0 and no gradient, and route_norm divides by the sum of the rest."""
    options = {"score_func": score_func, "route_norm": route_norm, "num_expert_groups": groups}
    options["num_limited_groups"] = kept
    logits = torch.randn(9, num_experts, device=device).to(dtype)
    for num_allowed in (0, top_k - 1, top_k, top_k + 1):
        bias = torch.full((num_experts,), -INF, device=device)
        allowed = torch.randperm(num_experts, device=device)[:num_allowed]
        bias[allowed] = torch.randn(num_allowed, device=device)
        check(logits, top_k, **options, bias=bias)
        poisoned = torch.where(bias == -INF, NAN, logits)
        for values in (logits, poisoned):
            scores, ids = route(values, top_k, **options, bias=bias)
            assert torch.equal(ids, reference.route(values, top_k, **options, bias=bias)[1])
            is_expert = ids >= 0
            assert torch.isin(ids[is_expert], allowed.int()).all()
            assert not scores[~is_expert].count_nonzero()
            assert (is_expert[:, :-1] | ~is_expert[:, 1:]).all(), "experts are not first"
            if groups is None:
                assert (is_expert.sum(-1) == min(num_allowed, top_k)).all()


@EVERY_FUNC
def test_huge_logits(device, score_func):
    """Logits near float32's maximum neither overflow nor change the top-k."""
    logits = torch.tensor([[3e38, -3e38, 0.0, 1e38], [-3e38, -3e38, -3e38, -3e38]], device=device)
    logits.requires_grad_()
    scores, ids = route(logits, 2, score_func=score_func)
    assert ids.tolist() == [[0, 3], [0, 1]]
    (dlogits,) = torch.autograd.grad(scores.sum(), logits)
    assert scores.isfinite().all() and dlogits.isfinite().all()


# --- inputs, gradients, determinism ---------------------------------------------------------------


@pytest.mark.parametrize("form", [f for f in FORMS if f != "contiguous"])
def test_storage(device, form):
    """Strided, misaligned and swapped logits and gradients."""
    logits, dscores = torch.randn(33, 40, device=device), torch.randn(33, 4, device=device)
    ids, expected = run(route, logits, dscores, 4)
    strided_ids, found = run(route, FORMS[form](logits), FORMS[form](dscores), 4)
    assert torch.equal(ids, strided_ids)
    assert_same_bits(found, expected)


def test_no_tokens(device):
    """T = 0 gives empty results and an empty gradient."""
    logits = torch.randn(0, 8, device=device, requires_grad=True)
    scores, ids = route(logits, 2)
    assert scores.shape == ids.shape == (0, 2)
    (dlogits,) = torch.autograd.grad(scores.sum(), logits)
    assert dlogits.shape == (0, 8)


def test_sentinels_have_no_route_gradient(device):
    """route_backward with ids outside [0, E) accesses nothing out of range."""
    logits = torch.randn(3, 8, device=device)
    ids = torch.tensor([[0, -1], [8, 2**31 - 1], [-(2**31), 7]], dtype=torch.int32, device=device)
    try:
        dlogits = torch.ops.fused_moe.route_backward(
            torch.ones(3, 2, device=device), logits, ids, 1, False, 1.0, 1e-20
        )
    except RuntimeError:
        return  # refusing is as safe
    keep = torch.zeros(3, 8, dtype=torch.bool, device=device)
    keep[0, 0] = keep[2, 7] = True
    assert dlogits[keep].count_nonzero() == 2 and not dlogits[~keep].count_nonzero()


def test_same_bits(device):
    """Two runs give the same bits."""
    logits, dscores = torch.randn(1000, 64, device=device), torch.randn(1000, 6, device=device)
    first_ids, first = run(route, logits, dscores, 6, route_norm=True)
    ids, again = run(route, logits, dscores, 6, route_norm=True)
    assert torch.equal(ids, first_ids)
    assert_same_bits(first, again)


def test_same_bits_on_any_number_of_threads(cpu, threads):
    """1, 2 and 3 threads give the same bits."""
    logits, dscores = torch.randn(3000, 64, device=cpu), torch.randn(3000, 6, device=cpu)
    threads(1)
    first_ids, first = run(fused_moe.route, logits, dscores, 6)
    for n in (2, 3):
        threads(n)
        ids, again = run(fused_moe.route, logits, dscores, 6)
        assert torch.equal(ids, first_ids)
        assert_same_bits(first, again)


def test_double_backward_raises(device):
    """A second derivative of route raises."""
    logits = torch.randn(4, 8, device=device, requires_grad=True)
    scores, _ = route(logits, 2)
    (dlogits,) = torch.autograd.grad(scores.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dlogits.sum().backward()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
def test_ties_of_groups(device, dtype):
    """Sums of two scores are rounded to float32, as the scores are: sigmoid(0.5) + sigmoid(-0.5) ties with
    2 sigmoid(0), and the lower group is chosen."""
    logits = torch.tensor([[0, 0, -1, 9, 9, 9, -0.5, 0.5, -1]]).to(device, dtype)
    groups = {"num_expert_groups": 3, "num_limited_groups": 2}
    for function in (route, reference.route):
        _, ids = function(logits, 5, score_func="sigmoid", **groups)
        assert ids.tolist() == [[3, 4, 5, 0, 1]]
