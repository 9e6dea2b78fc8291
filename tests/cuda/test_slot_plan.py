"""Few slots without gradients: the GEMMs make the plan themselves, and everything is as with route_plan's."""

from dataclasses import replace

import pytest
import torch
from cases import BF16, F16, F32, Case, poisoned
from gpu_cases import HALF_DTYPES, calls_during, capture, check_own_plan, draw, launches

import fused_moe
from fused_moe import fused_experts, widths

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F: one slot; a slot more than a warp has lanes; all 64; more work tiles than SMs; more
# experts than a CTA has threads; a k whose last wave is split. With more than 32 slots per expert both GEMMs
# are separate launches.
SIZES = {
    "one slot": (1, 1, 3, 64, 64),
    "part tiles": (5, 3, 7, 200, 136),
    "33 slots": (11, 3, 4, 128, 64),
    "64 slots of two experts": (32, 2, 2, 256, 192),
    "64 slots of one expert": (32, 2, 1, 256, 192),
    "many tiles": (8, 8, 128, 2048, 768),
    "1500 experts": (6, 10, 1500, 64, 72),
    "a long k": (2, 2, 8, 512, 2816),
}
SHAPES = {name: Case(T, D, F, E, K, BF16, routing="repeats") for name, (T, K, E, D, F) in SIZES.items()}


@HALF_DTYPES
@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_shapes(device, name, dtype):
    case = replace(SHAPES[name], dtype=dtype)
    check_own_plan(*draw(case, device))
    (*rest, ids), options = draw(replace(case, layout="ungated", activation="gelu"), device)
    check_own_plan((*rest, torch.zeros_like(ids)), options)  # all slots to one expert


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_one_graph_of_any_ids(device, name):
    """Also without rows at all, and with a map. The counts are the plan's."""
    (x, w1, w2, w3, scores, ids), _ = draw(SHAPES[name], device)
    num_experts = w1.size(0)
    ids, expert_map = ids.int(), torch.empty(num_experts, dtype=torch.int32, device=device)
    code = torch.ops.fused_moe.experts
    arguments = (x, [w1], [w3], [w2], scores, ids, 0, 0, [1.0, 0.0])
    expert_map.copy_(torch.arange(num_experts))
    graph, (out, counts, _) = capture(lambda: code(*arguments, expert_map=expert_map))
    for i in range(20):
        ids.copy_(torch.randint(-1, num_experts + 1, ids.shape) if i else torch.full(ids.shape, -1))
        expert_map.copy_(torch.randperm(num_experts).where(torch.rand(num_experts) < 0.8, -1))
        out.fill_(torch.nan), counts.fill_(-7)
        graph.replay()
        plan = fused_moe.route_plan(ids, num_experts, expert_map)
        assert torch.equal(counts, plan.counts)
        expected = fused_experts(x, w1, w2, w3, scores, ids, plan=plan)
        assert torch.equal(out, expected)


@HALF_DTYPES
@torch.no_grad()
def test_ids_of_any_form(device, dtype):
    (*rest, ids), options = draw(replace(SHAPES["33 slots"], dtype=dtype), device)
    for given in (ids, ids.int(), ids.repeat(1, 2)[:, ::2], ids.mT.contiguous().mT):
        check_own_plan((*rest, given), options)


@pytest.mark.parametrize("integers", ("int64", "int16", "int8", "uint8"))
@torch.no_grad()
def test_ids_of_any_value(device, integers):
    """The operator's ids: those outside of the experts have no row, however far out they are."""
    (x, w1, w2, w3, scores, ids), _ = draw(SHAPES["33 slots"], device)
    integers = getattr(torch, integers)
    span = torch.iinfo(integers)
    outside = [
        v for v in (-1, 4, span.min, span.max, 2**32, 2**32 + 1, -(2**40)) if span.min <= v <= span.max
    ]
    ids.view(-1)[: len(outside)] = torch.tensor(outside, device=device)
    out, counts, _ = torch.ops.fused_moe.experts(
        x, [w1], [w3], [w2], scores, ids.to(integers), 0, 0, [1.0, 0.0]
    )
    given = ids.where((ids >= 0) & (ids < 4), -1)
    given = given.to(integers).long()  # uint8 has no -1: 255
    plan = fused_moe.route_plan(given, 4)
    assert torch.equal(counts, plan.counts)
    assert torch.equal(out, fused_experts(x, w1, w2, w3, scores, given, plan=plan))


@torch.no_grad()
def test_captured_with_up_gate_on_the_other_tier(device, sm90):
    """More tiles than SMs: the down GEMM claims tiles by counters, which the plan's kernel zeroes."""
    (*weights, ids), _ = draw(SHAPES["many tiles"], device)
    expected = fused_experts(*weights, ids, plan=fused_moe.route_plan(ids, 128), score_on="input")
    with poisoned():
        graph, out = capture(lambda: fused_experts(*weights, ids, score_on="input"))
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@torch.no_grad()
def test_where_a_gemm_runs_on_the_other_tier(device, sm90, monkeypatch):
    """There route_plan's kernel makes the plan before both. Functions would copy such weights."""
    monkeypatch.setattr(widths, "are_padded", lambda *_: False)
    (x, w1, w2, w3, scores, ids), _ = draw(SHAPES["33 slots"], device)
    odd = torch.empty(*w2.shape[:2], w2.size(2) + 1, device=device, dtype=BF16)[..., :-1].copy_(w2)
    odd1 = torch.empty(*w1.shape[:2], w1.size(2) + 1, device=device, dtype=BF16)[..., :-1].copy_(w1)

    def tiers(*weights, **options):
        def run():
            fused_experts(x, *weights, scores, ids, **options)

        check_own_plan((x, *weights, scores, ids), options)
        return calls_during("up_gate", run)[:2], calls_during("grouped_mm", run)[:2]

    assert tiers(w1, w2, w3) == ((1, 0), (1, 0))
    assert tiers(w1, odd, w3) == ((1, 0), (0, 1))
    assert tiers(odd1, w2, w3) == ((0, 1), (1, 0))
    assert tiers(odd1, odd, w3) == ((0, 1), (0, 1))
    assert tiers(w1, w2, w3, score_on="input") == ((0, 1), (1, 0))


@torch.no_grad()
def test_three_launches(device, sm90):
    case = replace(SHAPES["64 slots of one expert"], dtype=F16)
    (x, w1, w2, w3, scores, ids), _ = draw(case, device)
    more = [torch.cat([t, t]) for t in (x, scores, ids)]

    def count(x, scores, ids) -> int:
        return len(launches(lambda: fused_experts(x, w1, w2, w3, scores, ids)))

    assert count(x, scores, ids) == 3  # up_gate, down, unpermute: rows are too many for one launch
    assert count(*more) > 3


@torch.no_grad()
def test_float32(device):
    check_own_plan(*draw(replace(SHAPES["part tiles"], dtype=F32), device))


@pytest.mark.sanitizer
@torch.no_grad()
def test_under_the_sanitizer(device):
    for name in ("one slot", "part tiles", "64 slots of one expert"):
        check_own_plan(*draw(SHAPES[name], device))
