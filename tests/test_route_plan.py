"""route_plan and plan_from_counts: every field against the reference, and the invariants of a plan."""

from functools import partial

import pytest
import torch
from cases import FORMS, ROUTINGS, make_ids
from hypothesis import given
from hypothesis import strategies as st

import fused_moe
from fused_moe import Plan, reference
from fused_moe.ops import FACTS

pytestmark = pytest.mark.usefixtures("poison")

TILE_ROWS, SKINNY_ROWS, HEAD_WORDS = (
    FACTS["constants"][name] for name in ("TILE_ROWS", "SKINNY_ROWS", "HEAD_WORDS")
)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def assert_same_plan(found: Plan, expected: Plan) -> None:
    for name, value in expected._asdict().items():
        actual = getattr(found, name)
        if value is None:
            assert actual is None, name
        else:
            assert actual.dtype == torch.int32, name
            assert actual.shape == value.shape, name
            assert torch.equal(actual, value), name


def assert_same_private_plan(counts, memory, ids: torch.Tensor, num_experts: int) -> None:
    expected = reference.route_plan(ids, num_experts)
    assert torch.equal(counts, expected.counts)
    fields = (expected.offsets, expected.schedule, expected.row_token, expected.row_slot, expected.token_row)
    assert torch.equal(memory, torch.cat([field.flatten() for field in fields]))


def assert_is_plan_of(plan: Plan, ids: torch.Tensor, num_experts: int) -> None:
    """The row maps fit the ids, checked without the reference."""
    ids = ids.long()
    has_row = (ids >= 0) & (ids < num_experts)
    num_rows = int(has_row.sum())
    assert plan.counts.tolist() == [int((ids == e).sum()) for e in range(num_experts)]
    assert plan.offsets[0] == 0 and plan.offsets[-1] == num_rows
    assert torch.equal(plan.offsets.diff(), plan.counts)
    assert ((plan.token_row >= 0) == has_row).all()
    assert (plan.row_slot[num_rows:] == -1).all() and (plan.row_token[num_rows:] == -1).all()
    slots = plan.row_slot[:num_rows].long()
    rows = torch.arange(num_rows, device=ids.device)
    assert torch.equal(plan.token_row.flatten()[slots].long(), rows)
    assert torch.equal(plan.row_token[:num_rows].long(), slots // ids.size(1))
    row_expert = torch.repeat_interleave(plan.counts.long())
    assert torch.equal(ids.flatten()[slots], row_expert)
    order = row_expert * ids.numel() + slots
    assert (order.diff() > 0).all(), "rows of an expert are in the order of t*K + k"


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(device, routing, dtype):
    """Distinct and repeated ids, one active expert, gaps and sentinels, int32 and int64."""
    ids = make_ids(routing, 300, 3, 7).to(device, dtype)
    plan = fused_moe.route_plan(ids, 7)
    assert_same_plan(plan, reference.route_plan(ids, 7))
    assert_is_plan_of(plan, ids, 7)


@given(
    tokens=st.sampled_from((0, 1, 2, 127, 128, 129, 1000)),
    top_k=st.integers(1, 32),
    num_experts=st.sampled_from((1, 2, 31, 32, 33, 128, 129, 256, 320, 384, 385, 1023, 1024)),
    routing=st.sampled_from(("repeats", "one", "gaps", "none")),
    seed=st.integers(0, 999),
    form=st.sampled_from(sorted(FORMS)),
)
def test_any_ids(device, tokens, top_k, num_experts, routing, seed, form):
    """Any sizes, routing and storage."""
    ids = FORMS[form](make_ids(routing, tokens, top_k, num_experts, seed).to(device))
    plan = fused_moe.route_plan(ids, num_experts)
    assert_same_plan(plan, reference.route_plan(ids, num_experts))
    assert_is_plan_of(plan, ids, num_experts)


@given(
    tokens=st.sampled_from((0, 1, 127, 129, 1000)),
    top_k=st.integers(1, 9),
    num_experts=st.sampled_from((1, 2, 33, 128, 1024)),
    routing=st.sampled_from(ROUTINGS),
    part=st.sampled_from((0.0, 0.01, 0.3, 0.5, 0.99, 1.0, 2.0)),
    seed=st.integers(0, 99),
)
def test_max_rows(device, tokens, top_k, num_experts, routing, part, seed):
    """The plan of the slots that come first by expert, with as many rows as asked for."""
    ids = make_ids(routing, tokens, min(top_k, num_experts), num_experts, seed).to(device)
    max_rows = max(1, int(part * ids.numel()))
    dropped = torch.zeros((), dtype=torch.int64, device=device)
    plan = fused_moe.route_plan(ids, num_experts, max_rows=max_rows, dropped_rows=dropped)
    assert_same_plan(plan, reference.route_plan(ids, num_experts, max_rows=max_rows))
    assert len(plan.row_token) == min(max_rows, ids.numel())
    assert_is_plan_of(plan, ids.masked_fill(plan.token_row < 0, -1), num_experts)
    whole = fused_moe.route_plan(ids, num_experts)
    rows = whole.row_slot[whole.row_slot >= 0]
    kept = plan.row_slot[plan.row_slot >= 0]
    assert torch.equal(kept, rows[:max_rows]) and int(dropped) == len(rows) - len(kept)


def cut(whole: Plan, R: int) -> Plan:
    """The plan of a plan's first R rows."""
    counts = whole.offsets.clamp_max(R).diff()
    _, offsets, schedule, *_ = reference.plan_from_counts(counts, R)
    token_row = whole.token_row.masked_fill(whole.token_row >= R, -1)
    return Plan(counts, offsets, schedule, whole.row_token[:R], whole.row_slot[:R], token_row)


@given(
    tokens=st.sampled_from((0, 1, 127, 129, 500, 2000)),
    top_k=st.integers(1, 9),
    num_experts=st.sampled_from((1, 2, 33, 512, 513, 1024, 1025, 1500)),
    routing=st.sampled_from((*ROUTINGS, "repeats", "none")),
    dtype=st.sampled_from(INTEGERS),
    has_map=st.booleans(),
    R=st.integers(0, 18000),
    seed=st.integers(0, 99),
)
def test_any_bound(device, tokens, top_k, num_experts, routing, dtype, has_map, R, seed):
    """The whole plan, cut at any row: before the first one, within an expert, past the last one. What is cut
    off is added to the count that is given, and autograd is told."""
    ids = make_ids(routing, tokens, min(top_k, num_experts), num_experts, seed).to(device, dtype)
    draw = {"generator": torch.Generator().manual_seed(seed)}
    expert_map = (
        torch.randint(-1, num_experts, (num_experts,), dtype=torch.int32, **draw) if has_map else None
    )
    expert_map = expert_map if expert_map is None else expert_map.to(device)
    dropped = torch.tensor(7, device=device)
    whole = Plan(*torch.ops.fused_moe.route_plan(ids, num_experts, expert_map))
    found = Plan(*torch.ops.fused_moe.route_plan_dropped(ids, num_experts, expert_map, R, dropped))
    assert_same_plan(found, cut(whole, min(R, ids.numel())))
    assert int(dropped) == 7 + max(int(whole.offsets[-1]) - R, 0) and dropped._version == 1
    assert_same_plan(Plan(*torch.ops.fused_moe.route_plan(ids, num_experts, expert_map, R)), found)


@pytest.mark.parametrize("num_experts", (9, 600))
@pytest.mark.parametrize("slots", (8192, 8193, 200_000))
def test_many_slots(device, slots, num_experts):
    """Slots that every CTA counts, slots with a launch that counts, and spans of several passes."""
    ids = make_ids("repeats", slots, 1, num_experts + 1).to(device)  # some have no expert
    plan = fused_moe.route_plan(ids, num_experts, max_rows=slots // 2)
    assert_same_plan(plan, reference.route_plan(ids, num_experts, max_rows=slots // 2))


def test_bounds_of_samples(device):
    """Under vmap each sample has a plan, and one count may be that of all."""
    ids = torch.stack([make_ids("repeats", 9, 2, 3, seed) for seed in range(4)]).to(device)
    dropped = torch.zeros((), dtype=torch.int64, device=device)
    call = partial(fused_moe.route_plan, num_experts=3, max_rows=8, dropped_rows=dropped)
    plans = torch.vmap(call)(ids)
    assert int(dropped) == 4 * (18 - 8)
    for i, sample in enumerate(ids):
        assert_same_plan(Plan(*(t[i] for t in plans)), reference.route_plan(sample, 3, max_rows=8))


def test_ids_beyond_int32_are_no_experts(device):
    """int64 ids are compared in all 64 bits: 2**32 + 1 is not expert 1."""
    ids = torch.tensor([[1, 2**32 + 1], [-(2**63), 2**63 - 1], [2**32, 0]], device=device)
    plan = fused_moe.route_plan(ids, 4)
    assert plan.counts.tolist() == [1, 1, 0, 0]
    assert_is_plan_of(plan, ids, 4)


@given(
    tokens=st.sampled_from((0, 1, 9, 127, 129, 500)),
    top_k=st.integers(1, 9),
    num_experts=st.sampled_from((9, 33, 128, 1024)),
    settings=st.sampled_from(((0, False, 1.0, 0.0), (1, True, 2.5, 1e-20), (2, True, 2.5, 1e-3))),
    given_ids=st.booleans(),
    count=st.sampled_from((None, 0, 5, 9999)),
    seed=st.integers(0, 99),
)
def test_private_plan(device, tokens, top_k, num_experts, settings, given_ids, count, seed):
    """What experts chooses and plans with a router: what route chooses, and route_plan's plan of it."""
    draw = {"generator": torch.Generator().manual_seed(seed)}
    logits = torch.randn(tokens, num_experts, **draw).to(device)
    ids = make_ids("sentinels", tokens, top_k, num_experts, seed).to(device) if given_ids else None
    ids = None if ids is None else ids.clamp(0, num_experts - 1)
    num_tokens = None if count is None else torch.tensor(count, device=device)
    route = (top_k, *settings, 0, 0, 0)
    scores, chosen, counts, memory = torch.ops.fused_moe.private_plan(
        logits, ids, num_experts, None, None, *route, num_tokens
    )
    expected_scores, expected_ids = torch.ops.fused_moe.route(logits, None, *route, ids, num_tokens)
    assert torch.equal(scores, expected_scores) and torch.equal(chosen, expected_ids)
    assert_same_private_plan(counts, memory, chosen, num_experts)


@given(
    tokens=st.sampled_from((0, 1, 65, 129, 500)),
    top_k=st.sampled_from((1, 3, 8, 70)),
    num_experts=st.sampled_from((1, 33, 1024, 1500)),
    routing=st.sampled_from(("repeats", "one", "gaps", "none")),
    seed=st.integers(0, 99),
)
def test_private_plan_of_ids(device, tokens, top_k, num_experts, routing, seed):
    """What experts plan for themselves: route_plan's plan."""
    ids = make_ids(routing, tokens, top_k, num_experts, seed).to(device)
    route = (1, 0, False, 1.0, 1e-20, 0, 0, 0)
    _, _, counts, memory = torch.ops.fused_moe.private_plan(None, ids, num_experts, None, None, *route, None)
    assert_same_private_plan(counts, memory, ids, num_experts)


@given(
    tokens=st.sampled_from((0, 1, 127, 129, 1000)),
    top_k=st.integers(1, 9),
    sizes=st.sampled_from(((1, 1), (8, 3), (3, 8), (64, 16), (1500, 1024))),
    routing=st.sampled_from(("repeats", "one", "gaps", "none", "sentinels")),
    dtype=st.sampled_from((torch.int32, torch.int64)),
    seed=st.integers(0, 99),
)
def test_expert_map(device, tokens, top_k, sizes, routing, dtype, seed):
    """Ids of E_global experts, some of them local: the plan of the ids that the map gives."""
    num_ids, num_experts = sizes
    ids = make_ids(routing, tokens, min(top_k, num_ids), num_ids, seed).to(device, dtype)
    draw = {"generator": torch.Generator().manual_seed(seed)}
    expert_map = torch.randint(-1, num_experts, (num_ids,), dtype=torch.int32, **draw).to(device)
    plan = fused_moe.route_plan(ids, num_experts, expert_map)
    assert_same_plan(plan, reference.route_plan(ids, num_experts, expert_map))
    is_id = (ids >= 0) & (ids < num_ids)
    mapped = torch.where(is_id, expert_map[torch.where(is_id, ids, 0).long()], -1)
    assert_is_plan_of(plan, mapped, num_experts)
    assert_same_plan(plan, fused_moe.route_plan(mapped, num_experts))


def test_expert_maps_that_lead_astray(device):
    """Operators take any value of a map: outside [0, E) the expert is remote. So are ids beyond the map."""
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 2**32]], device=device)
    expert_map = torch.tensor([2, 3, -1, -(2**31), 2**31 - 1, 0], dtype=torch.int32, device=device)
    expected = torch.tensor([[2, -1], [-1, -1], [-1, 0], [-1, -1]], device=device)
    found = torch.ops.fused_moe.route_plan(ids, 3, expert_map)
    assert_same_plan(Plan(*found), fused_moe.route_plan(expected, 3))


@pytest.mark.parametrize("count", (SKINNY_ROWS + 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 5 * TILE_ROWS))
def test_row_tiles(device, count):
    """Full experts, then skinny ones, with the inclusive prefix of their row tiles; none for an empty one."""
    ids = torch.tensor([3] * count + [1] * 2, device=device).unsqueeze(1)
    schedule = fused_moe.route_plan(ids, 5).schedule
    tiles = -(-count // TILE_ROWS)
    num_active, num_full, num_tiles, num_full_tiles, *_, tile_rows = schedule[:HEAD_WORDS].tolist()
    assert (num_active, num_full, num_tiles, num_full_tiles, tile_rows) == (2, 1, tiles + 1, tiles, TILE_ROWS)
    lists = schedule[HEAD_WORDS:].view(4, 5)
    assert lists[0, :2].tolist() == [3, 1] and lists[1, :2].tolist() == [tiles, tiles + 1]


def test_slices(device):
    """Experts of several split-K slices come first; an empty expert has one slice of no rows."""
    counts = [10, 0, 5000, 600]
    schedule = fused_moe.plan_from_counts(torch.tensor(counts, device=device), 6000).schedule
    num_slices, slice_rows = schedule[5:7].tolist()
    assert slice_rows % 64 == 0
    order = sorted(range(4), key=lambda e: counts[e] <= slice_rows)  # stable
    slices = [max(1, -(-counts[e] // slice_rows)) for e in order]
    lists = schedule[HEAD_WORDS:].view(4, 4)
    assert lists[2].tolist() == order
    assert lists[3].tolist() == [sum(slices[: i + 1]) for i in range(4)]
    assert num_slices == sum(slices)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", INTEGERS)
def test_counts_of_any_integer_dtype(device, dtype):
    """A plan from counts: offsets and schedule, the same from every integer dtype."""
    counts = torch.tensor([3, 0, 127, 100, 0, 1], dtype=dtype, device=device)
    plan = fused_moe.plan_from_counts(counts, 400)
    assert_same_plan(plan, reference.plan_from_counts(counts, 400))
    assert plan.offsets.tolist() == [0, 3, 3, 130, 230, 230, 231]


def test_large_unsigned_counts(device):
    """uint8 counts above 127 are not negative."""
    counts = torch.tensor([255, 200], dtype=torch.uint8, device=device)
    assert fused_moe.plan_from_counts(counts, 455).offsets.tolist() == [0, 255, 455]


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=64), spare=st.integers(0, 9))
def test_any_counts(device, counts, spare):
    """Any counts, and rows past their sum."""
    counts = torch.tensor(counts, device=device)
    num_rows = int(counts.sum()) + spare
    plan = fused_moe.plan_from_counts(counts, num_rows)
    assert_same_plan(plan, reference.plan_from_counts(counts, num_rows))


def test_strided_counts(device):
    """Counts that are every second element of a tensor."""
    wide = torch.tensor([2, 99, 0, 99, 5, 99], device=device)
    assert fused_moe.plan_from_counts(wide[::2], 7).offsets.tolist() == [0, 2, 2, 7]


@pytest.mark.parametrize("counts", ([5, -1], [2**62, 2**62], [2**31 - 1, 1], [4, 7], [-1, 5]))
def test_impossible_counts_on_the_cpu(cpu, counts):
    """Negative counts and counts beyond the given rows raise, from the function and from the operator."""
    counts = torch.tensor(counts, device=cpu)
    with pytest.raises(ValueError, match="counts >= 0 that sum to at most the 10 rows"):
        fused_moe.plan_from_counts(counts, 10)
    with pytest.raises(RuntimeError, match="row counts"):
        torch.ops.fused_moe.count_plan(counts, 10)


def test_negative_counts_of_a_small_dtype(cpu):
    """An int8 count of -1 is not 255 rows."""
    with pytest.raises(RuntimeError, match="row counts"):
        torch.ops.fused_moe.count_plan(torch.tensor([-1], dtype=torch.int8, device=cpu), 1000)


def test_same_plan_on_any_number_of_threads(cpu, threads):
    """The plan does not depend on the number of threads."""
    ids = torch.randint(-1, 64, (5000, 4), device=cpu)
    plans = []
    for n in (1, 2, 3):
        threads(n)
        plans.append(fused_moe.route_plan(ids, 64))
    assert_same_plan(plans[1], plans[0])
    assert_same_plan(plans[2], plans[0])


def test_maps_have_no_gradient(device):
    """A plan has integers only: nothing in it requires a gradient."""
    plan = fused_moe.route_plan(torch.zeros(3, 1, dtype=torch.int32, device=device), 2)
    assert not any(t.requires_grad for t in plan)
