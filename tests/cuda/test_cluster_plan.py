"""Choice and plan of 65 to 4096 slots by one cluster, the plan alone of 8192, without gradients: the bits of
route and route_plan."""

import pytest
import torch
from cases import BF16, F16, F64, poisoned
from gpu_cases import FAST_DTYPES, HALF_DTYPES, capture, check_at_once, launches, ops

import fused_moe
from fused_moe import FusedMoE, fused_experts

pytestmark = pytest.mark.gpu

# tokens, K, E. Spans of the CTAs: equal, unequal, empty; a chunk of 32 slots, part of one, the most; every
# number of lanes per token and of experts per lane; whole warps per token, and several rounds of tokens.
SHAPES = {
    "65 slots": (65, 1, 8),
    "three tokens of 32": (3, 32, 64),
    "nine tokens": (9, 8, 128),
    "odd": (13, 5, 33),
    "one expert": (70, 1, 1),
    "a token for each warp": (128, 8, 128),
    "and one more": (129, 8, 128),
    "2048 slots": (256, 8, 128),
    "2049 slots": (683, 3, 100),
    "4096 slots": (512, 8, 128),
    "deepseek": (512, 8, 256),
    "ten of 512": (409, 10, 512),
    "the longest span": (132, 31, 300),
    "32 of 1024": (128, 32, 1024),
    "one each": (4096, 1, 8),
    "4095": (4095, 1, 31),
}
SETTINGS = {
    "softmax": {},
    "sigmoid": {"score_func": 1, "route_norm": True, "route_scale": 2.5},
    "bias": {"has_bias": True},
    "groups": {"has_bias": True, "score_func": 1, "num_groups": 4, "num_limited_groups": 2},
    "sqrtsoftplus": {"has_bias": True, "score_func": 2, "route_norm": True, "route_norm_eps": 1e-3},
    "best expert": {"num_groups": 4, "num_limited_groups": 2, "group_score": 1},
    "scale": {"score_func": 2, "has_scale": True},
}
SHAPE = pytest.mark.parametrize("name", SHAPES)


def route_settings(
    has_bias=False, has_scale=False, score_func=0, route_norm=False, route_scale=1.0, route_norm_eps=1e-20,
    num_groups=0, num_limited_groups=0, group_score=0,
):  # fmt: skip
    groups = (num_groups, num_limited_groups, group_score)
    return score_func, route_norm, route_scale, route_norm_eps, *groups


def bits(t: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN."""
    return t.view(torch.int64 if t.dtype == F64 else torch.int32)


def assert_plan(counts, memory, ids, num_experts, expert_map=None) -> None:
    expected = fused_moe.Plan(*ops.route_plan(ids, num_experts, expert_map))
    assert torch.equal(counts, expected.counts)
    fields = ("offsets", "schedule", "row_token", "row_slot", "token_row")
    sizes = [getattr(expected, field).numel() for field in fields]
    for field, found in zip(fields, memory.split(sizes), strict=True):
        assert torch.equal(found, getattr(expected, field).flatten()), field


SOFTMAX = route_settings()  # settings of a choice


def choose_and_plan(logits, top_k, bias=None, given=None, num_tokens=None, settings=SOFTMAX, scale=None):
    """scores, ids, counts and the rest of their plan."""
    return ops.private_plan(logits, given, logits.size(1), None, bias, top_k, *settings, num_tokens, scale)


def plan_of_ids(ids, num_experts, expert_map=None):
    """counts and the rest of the plan."""
    return ops.private_plan(None, ids, num_experts, expert_map, None, 1, *SOFTMAX, None)[2:]


def check_choice(logits, top_k, bias=None, given=None, num_tokens=None, settings=SOFTMAX, scale=None):
    """Poisoned memory, then scores, ids and every tensor of the plan."""
    num_experts = logits.size(1)
    expected_scores, expected_ids = ops.route(logits, bias, top_k, *settings, given, num_tokens, scale)
    with poisoned():
        scores, ids, *plan = choose_and_plan(logits, top_k, bias, given, num_tokens, settings, scale)
    assert scores.dtype == expected_scores.dtype
    assert torch.equal(bits(scores), bits(expected_scores))
    assert torch.equal(ids, expected_ids)
    assert_plan(*plan, expected_ids, num_experts)


def check_plan(ids, num_experts, expert_map=None) -> None:
    with poisoned():
        plan = plan_of_ids(ids, num_experts, expert_map)
    assert_plan(*plan, ids, num_experts, expert_map)


# --- the choice and its plan ------------------------------------------------------------------------


@SHAPE
@pytest.mark.parametrize("options", SETTINGS)
def test_choice(device, name, options):
    """Random logits; all tokens alike, so that K experts have every row; ties in the low bits alone."""
    tokens, top_k, num_experts = SHAPES[name]
    settings = dict(SETTINGS[options])
    if num_experts % 4 or top_k > num_experts // 2:
        settings = {n: v for n, v in settings.items() if "group" not in n}
    bias = torch.randn(num_experts, device=device) / 4 if settings.get("has_bias") else None
    scale = torch.randn(num_experts, device=device) if settings.get("has_scale") else None
    random = torch.randn(tokens, num_experts, device=device)
    alike = random[:1].repeat(tokens, 1)
    ties = 1 + torch.randint(3, random.shape, device=device) * 2.0**-23
    for logits in (random, alike, ties, torch.zeros_like(random)):
        check_choice(logits, top_k, bias, settings=route_settings(**settings), scale=scale)


@SHAPE
@pytest.mark.parametrize("dtype", (BF16, F16, F64), ids=("bf16", "f16", "f64"))
def test_dtypes(device, name, dtype):
    """float64 has separate kernels, and more launches."""
    tokens, top_k, num_experts = SHAPES[name]
    check_choice(torch.randn(tokens, num_experts, device=device).to(dtype), top_k)


@pytest.mark.parametrize("name", ("odd", "4096 slots", "32 of 1024"))
def test_logits_that_are_no_numbers(device, name):
    tokens, top_k, num_experts = SHAPES[name]
    logits = torch.randn(tokens, num_experts, device=device)
    for garbage in (torch.nan, torch.inf, -torch.inf):
        logits[torch.rand(logits.shape, device=device) < 0.2] = garbage
        check_choice(logits, top_k)
    check_choice(logits.fill_(torch.nan), top_k)
    check_choice(logits.fill_(-torch.inf), top_k)


def test_logits_of_any_storage(device):
    """Rows that are not aligned to a lane's experts are read one by one."""
    logits = torch.randn(200 * 128 + 1, device=device)[1:].view(200, 128)
    check_choice(logits, 8)
    check_choice(torch.randn(128, 200, device=device).mT, 8)


@pytest.mark.parametrize("integers", (torch.int32, torch.int64, torch.int16))
@SHAPE
def test_given_ids(device, name, integers):
    """Repeated, out of range on both sides, far out, and none that is an expert; all -1, whose tokens choose,
    all of them, some, or one."""
    tokens, top_k, num_experts = SHAPES[name]
    logits = torch.randn(tokens, num_experts, device=device)
    given = torch.randint(-2, num_experts + 2, (tokens, top_k), device=device, dtype=integers)
    given[tokens // 2] = 2**40 if integers == torch.int64 else torch.iinfo(integers).max
    some, one = given.clone(), given.clamp_min(0)
    some[::3] = one[tokens // 2] = -1
    settings = route_settings(score_func=1, route_norm=True)
    bias = torch.randn(num_experts, device=device) / 4
    for ids in (given, given.clamp(0, 0), torch.full_like(given, -1), some, one):
        check_choice(logits, top_k, given=ids, settings=settings)
        check_choice(logits, top_k, bias, given=ids, settings=settings)
    _, ids, *_ = choose_and_plan(logits, top_k, given=torch.full_like(given, -1), settings=settings)
    assert torch.equal(ids, ops.route(logits, None, top_k, *settings)[1])


@SHAPE
@pytest.mark.parametrize("options", ("bias", "groups"))
def test_barred_experts(device, name, options):
    """A bias of -inf for most experts, and for all of them: slots that no expert is left for are remote."""
    tokens, top_k, num_experts = SHAPES[name]
    settings = SETTINGS[options]
    if num_experts % 4 or top_k > num_experts // 2:
        settings = SETTINGS["bias"]
    logits = torch.randn(tokens, num_experts, device=device)
    for num_allowed in (0, 1, (top_k + 1) // 2, top_k):
        bias = torch.full((num_experts,), -torch.inf, device=device)
        bias[:num_allowed] = 0.0
        check_choice(logits, top_k, bias, settings=route_settings(**settings))
        _, ids, counts, _ = choose_and_plan(logits, top_k, bias, settings=route_settings(**settings))
        assert not counts[num_allowed:].count_nonzero() and counts.sum() == (ids >= 0).sum()


@pytest.mark.parametrize("name", ("odd", "and one more", "2049 slots", "4096 slots", "one each"))
def test_padding(device, name):
    """num_tokens clamped at both ends; padding has NaN."""
    tokens, top_k, num_experts = SHAPES[name]
    for count in (0, -5, 1, tokens // 2, tokens - 1, tokens, tokens + 9):
        logits = torch.randn(tokens, num_experts, device=device)
        logits[max(0, count) :] = torch.nan
        for integers in (torch.int32, torch.int64):
            num_tokens = torch.tensor([count], dtype=integers, device=device)
            check_choice(logits, top_k, num_tokens=num_tokens)
            given = torch.randint(-1, num_experts, (tokens, top_k), device=device)
            check_choice(logits, top_k, given=given, num_tokens=num_tokens)


@pytest.mark.parametrize("seed", range(40))
def test_any_size(device, seed):
    """Drawn shapes within the limits, and just beyond them."""
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    num_experts = number(1, 1024)
    top_k = number(1, min(32, num_experts))
    tokens = number(max(1, 60 // top_k), 4200 // top_k)
    check_choice(torch.randn(tokens, num_experts, device=device), top_k)


# --- the plan of given ids --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    (
        *((65, 1), (1, 100), (1, 4096), (4096, 1), (63, 65), (512, 8), (683, 3), (256, 8), (2, 33)),
        *((4097, 1), (1024, 8), (1, 8000), (1170, 7), (8193, 1)),
    ),
)
@pytest.mark.parametrize("num_experts", (1, 8, 33, 128, 513, 1024, 1025))
def test_plan_of_ids(device, shape, num_experts):
    """Any number of ids per token; 1025 experts are beyond the cluster's shared memory."""
    for integers in (torch.int32, torch.int64, torch.int16):
        ids = torch.randint(-1, num_experts + 1, shape, device=device, dtype=integers)
        check_plan(ids, num_experts)
    check_plan(torch.full(shape, num_experts - 1, device=device), num_experts)
    check_plan(torch.full(shape, -1, device=device), num_experts)
    check_plan(torch.full(shape, 2**32, device=device), num_experts)


def test_plan_with_a_map(device):
    ids = torch.randint(-2, 300, (500, 7), device=device)
    expert_map = torch.randint(-2, 70, (290,), dtype=torch.int32, device=device)
    check_plan(ids, 64, expert_map)


# --- launches, graphs, tiers ------------------------------------------------------------------------


@SHAPE
def test_one_kernel(device, sm90, name):
    """It is the cluster's plans, and choices, that the tests above compare."""
    tokens, top_k, num_experts = SHAPES[name]
    logits = torch.randn(tokens, num_experts, device=device)
    ids = torch.randint(-1, num_experts + 1, (tokens, top_k), device=device, dtype=torch.int32)
    for given in (None, ids):
        (kernel,) = launches(lambda: choose_and_plan(logits, top_k, given=given))  # noqa: B023
        assert "choice_plan_kernel" in kernel
    (kernel,) = launches(lambda: plan_of_ids(ids, num_experts))
    assert "cluster_plan_kernel" in kernel


@pytest.mark.parametrize("shape", ((65, 1, 8), (256, 8, 128), (512, 8, 128), (512, 8, 127), (4096, 1, 8)))
@torch.no_grad()
def test_few_launches(device, sm90, shape):
    """The router's GEMM, choice and plan, up_gate, down, combine; one less if one launch has both GEMMs, and
    if the ids are given."""
    tokens, top_k, num_experts = shape
    layer = FusedMoE(256, 128, num_experts, top_k, device=device, dtype=BF16).eval()
    x = torch.randn(tokens, 256, device=device).to(BF16)
    names = launches(lambda: layer(x))
    num_gemms = 1 if tokens * top_k <= 32 * num_experts else 2
    assert len(names) == 3 + num_gemms, names
    assert sum("choice_plan_kernel" in name for name in names) == 1, names
    scores, ids = fused_moe.route(layer.router.gate(x), top_k)
    names = launches(lambda: fused_experts(x, *layer.experts.weights, scores, ids))
    assert len(names) == 2 + num_gemms, names
    assert sum("cluster_plan_kernel" in name for name in names) == 1, names


@torch.no_grad()
def test_where_no_cluster_plans(device, sm90, tier):
    """Up to 64 slots the GEMMs plan. Beyond 4096 the choice has its own kernel. Beyond 8192, and on the sm80
    tier, the plan has its own kernel, too."""
    layer = FusedMoE(256, 128, 16, 4, device=device, dtype=BF16).eval()

    def clusters(tokens: int) -> list[str]:
        x = torch.randn(tokens, 256, device=device).to(BF16)
        found = " ".join(launches(lambda: layer(x)))
        return [name for name in ("choice_plan", "cluster_plan", "scatter") if f"{name}_kernel" in found]

    assert clusters(16) == []
    assert clusters(17) == clusters(1024) == ["choice_plan"]
    assert clusters(1025) == clusters(2048) == ["cluster_plan"]
    assert clusters(2049) == ["scatter"]
    tier("portable")
    assert clusters(17) == ["scatter"]


def apart(layer, x, **options) -> torch.Tensor:
    """The layer's output by route, route_plan and the experts with that plan."""
    logits = layer.router.gate(x)
    scores, ids = fused_moe.route(logits, layer.router.top_k, **options)
    plan = fused_moe.route_plan(ids, logits.size(1))
    return fused_experts(x, *layer.experts.weights, scores, ids, plan=plan)


@pytest.mark.parametrize(
    "shape", ((33, 3, 12), (129, 8, 128), (512, 8, 128), (512, 8, 64), (1000, 8, 128), (512, 2, 4))
)
@FAST_DTYPES
@torch.no_grad()
def test_one_graph_of_any_logits(device, shape, dtype):
    """Captured with garbage in memory, counters too, and replayed on other tokens: where tiles outnumber SMs,
    GEMMs claim them by counters, which the plan's kernel zeroes."""
    tokens, top_k, num_experts = shape
    layer = FusedMoE(256, 384, num_experts, top_k, device=device, dtype=dtype).eval()
    x = torch.randn(tokens, 256, device=device).to(dtype)
    num_tokens = torch.tensor(tokens, device=device)
    with poisoned():
        graph, out = capture(lambda: layer(x, num_tokens=num_tokens))
    for count in (tokens, tokens - 1, 7, 0, tokens):
        x.normal_()
        if count == 7:
            x[:] = x[0].clone()
        num_tokens.fill_(count)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, apart(layer, x, num_tokens=num_tokens))


@HALF_DTYPES
@torch.no_grad()
def test_two_streams(device, dtype):
    """Two clusters at a time, again and again."""
    layer = FusedMoE(256, 128, 64, 8, device=device, dtype=dtype).eval()
    batches = [torch.randn(300 + i, 256, device=device).to(dtype) for i in range(2)]
    for x in batches:
        assert torch.equal(layer(x), apart(layer, x))
    check_at_once(device, [lambda x=x: {"out": layer(x)} for x in batches], 20, 300_000)


@pytest.mark.sanitizer
def test_under_the_sanitizer(device):
    for tokens, top_k, num_experts in ((13, 5, 33), (40, 2, 8), (66, 32, 65)):
        check_choice(torch.randn(tokens, num_experts, device=device), top_k)
        check_plan(torch.randint(-1, num_experts + 1, (tokens, top_k), device=device), num_experts)
