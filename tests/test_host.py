"""csrc/schedule.h against naive lists, through the planners' operators and fused_moe._host."""

import heapq
import math
import random
from collections import Counter
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fused_moe.ops import FACTS

try:
    from fused_moe import _host
except ImportError:
    _host = None

ops = torch.ops.fused_moe
needs_host = pytest.mark.skipif(_host is None, reason="fused_moe._host was not built for this Python")
TILE_ROWS, SKINNY_ROWS, MIN_SLICE, MAX_CTAS, NUM_COUNTERS = 128, 64, 512, 512, 4096
SMS = 78, 114, 132, 144  # of an H20, an H100 PCIe, an H100 SXM or H200, and the whole chip
INT32_MAX = 2**31 - 1
MAX_ROWS = INT32_MAX - 1024  # of a call
COUNTS = st.lists(st.one_of(st.just(0), st.integers(1, SKINNY_ROWS), st.integers(0, 700)), max_size=40)
ORDER = {"group": 16, "interleave": True, "split_last_wave": 0}


def offs_of(counts):
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32)


def ceil_div(a, b):
    return -(-a // b)


def naive_row_tiles(counts, tile_rows):
    """(expert, first_row, num_rows) of every row tile, by a walk over all rows."""
    tiles, row = [], 0
    for expert, count in enumerate(counts):
        end = row + count
        while row < end:
            tiles.append((expert, row, min(tile_rows, end - row)))
            row += tiles[-1][2]
    return tiles


def is_skinny(rows):
    return rows <= SKINNY_ROWS


def test_constants():
    expected = {"TILE_ROWS": TILE_ROWS, "SKINNY_ROWS": SKINNY_ROWS, "MIN_SLICE": MIN_SLICE}
    expected |= {"MAX_CTAS": MAX_CTAS, "NUM_COUNTERS": NUM_COUNTERS}
    assert {name: FACTS["constants"][name] for name in expected} == expected
    assert ops.default_order() == (TILE_ROWS, 16, True)


# --- the schedule of a routing ------------------------------------------------------------------------


def naive_schedule(counts, tile_rows, slice_rows):
    """The schedule's words, with 0 past the last active expert."""
    experts = range(len(counts))
    full = [e for e in experts if counts[e] > SKINNY_ROWS]
    active = full + [e for e in experts if 0 < counts[e] <= SKINNY_ROWS]
    tile_end = list(accumulate(ceil_div(counts[e], tile_rows) for e in active))
    sliced = sorted(experts, key=lambda e: counts[e] <= slice_rows)  # stable
    slice_end = list(accumulate(max(1, ceil_div(counts[e], slice_rows)) for e in sliced))
    row_tiles, full_tiles = ([0, *tile_end][n] for n in (len(active), len(full)))
    share = math.ceil(2**32 * (row_tiles - full_tiles) / row_tiles) if full else 0
    head = [len(active), len(full), row_tiles, full_tiles, share, [0, *slice_end][-1], slice_rows, tile_rows]
    padding = [0] * (len(counts) - len(active))
    return head + active + padding + tile_end + padding + sliced + slice_end


@pytest.mark.quick
@given(counts=COUNTS, tile_rows=st.integers(1, 300), slice_rows=st.integers(1, 1000))
def test_schedule_words(counts, tile_rows, slice_rows):
    words = ops.tile_schedule(offs_of(counts), tile_rows, slice_rows).tolist()
    words[4] %= 2**32  # unsigned
    assert words == naive_schedule(counts, tile_rows, slice_rows)


def test_schedule_of_the_last_int32_row():
    offs = torch.tensor([0, INT32_MAX - 1, INT32_MAX - 1, INT32_MAX], dtype=torch.int32)
    words = ops.tile_schedule(offs, 128, 2**30).tolist()
    full = 2**24  # row tiles
    share = ceil_div(2**32, full + 1)
    assert words[:8] == [2, 1, full + 1, full, share, 5, 2**30, 128]
    assert words[8:10] + words[12:14] == [1, 3, full, full + 1]
    assert words[16:] == [1, 0, 2, 3, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("offs", "sizes", "message"),
    [
        ([5, 3], (128, 512), "expected offs that never decrease, from 0 up; found 3 after 5"),
        ([-1, 3], (128, 512), "from 0 up; found -1 after 0"),
        ([1, 3], (0, 512), "tile_schedule: expected tile_rows from 1 to .*, found 0"),
        ([1, 3], (128, 0), "tile_schedule: expected slice_rows from 1 to .*, found 0"),
        ([1, 3], (INT32_MAX, 512), f"expected tile_rows from 1 to .*, found {INT32_MAX}"),
        ([[1, 3]], (128, 512), r"expected offs of 1 dimensions, found shape \(1, 2\)"),
        ([1.0], (128, 512), "expected offs of dtype Int, found Float"),
    ],
)
def test_wrong_offs_and_sizes_are_refused(offs, sizes, message):
    dtype = torch.float32 if isinstance(offs[0], float) else torch.int32
    with pytest.raises(RuntimeError, match=message):
        ops.tile_schedule(torch.tensor(offs, dtype=dtype), *sizes)


# --- work tiles ---------------------------------------------------------------------------------------


def work_tiles(counts, num_n_tiles, tile_rows, order):
    """Every work tile, in order."""
    offs = offs_of(counts)
    schedule = ops.tile_schedule(offs, tile_rows, MIN_SLICE)
    return [tuple(tile) for tile in ops.work_tiles(schedule, offs, num_n_tiles, **order).tolist()]


def unsplit_tiles(tiles, num_tiles, split_last_wave):
    """(expert, first_row, num_rows, n_tile, skinny), with the last wave's halves put together.

    They exist if the last wave would leave half of the CTAs idle, or more.
    """
    last = num_tiles % split_last_wave if split_last_wave else 0
    num_split = last if last <= split_last_wave / 2 else 0
    halves = tiles[num_tiles - num_split :]
    assert len(halves) == 2 * num_split
    assert [tile[4] for tile in tiles] == [0] * (num_tiles - num_split) + [1, 2] * num_split
    assert [(*tile[:4], tile[5]) for tile in halves[::2]] == [(*tile[:4], tile[5]) for tile in halves[1::2]]
    return [(*tile[:4], tile[5]) for tile in (*tiles[: num_tiles - num_split], *halves[::2])]


def naive_work_tiles(counts, num_n_tiles, tile_rows, group, skinny):
    """The tiles of the full experts, or of the skinny ones, sorted by the order's own key."""
    tiles = [t for t in naive_row_tiles(counts, tile_rows) if is_skinny(counts[t[0]]) == skinny]
    first = {expert: i for i, (expert, *_) in reversed(list(enumerate(tiles)))}
    size = {}
    for expert, num_tiles in Counter(expert for expert, *_ in tiles).items():
        size[expert] = ceil_div(num_tiles, ceil_div(num_tiles, group))

    def key(work_tile):
        tile, n_tile = work_tile
        expert = tiles[tile][0]
        return expert, (tile - first[expert]) // size[expert], n_tile, tile

    in_order = sorted(product(range(len(tiles)), range(num_n_tiles)), key=key)
    return [(*tiles[tile], n_tile, int(skinny)) for tile, n_tile in in_order]


def check_work_tiles(counts, num_n_tiles, tile_rows, order):
    """Each tile once, each kind in its order, and the skinny experts spread or last."""
    num_tiles = len(naive_row_tiles(counts, tile_rows)) * num_n_tiles
    tiles = work_tiles(counts, num_n_tiles, tile_rows, order)
    tiles = unsplit_tiles(tiles, num_tiles, order["split_last_wave"])
    skinny = [tile for tile in tiles if tile[4]]
    full = [tile for tile in tiles if not tile[4]]
    assert skinny == naive_work_tiles(counts, num_n_tiles, tile_rows, order["group"], skinny=True)
    assert full == naive_work_tiles(counts, num_n_tiles, tile_rows, order["group"], skinny=False)
    if not order["interleave"]:
        assert tiles == full + skinny
        return
    # How far the skinny tiles among the first i are from their share, times the number of tiles. A window's
    # distance is the difference of two.
    ahead = list(accumulate((len(tiles) * tile[4] - len(skinny) for tile in tiles), initial=0))
    assert max(ahead) - min(ahead) <= len(tiles)


def random_counts(draw):
    """1 to 40 experts: some layers are nearly empty, some have skinny experts, some a huge one."""
    empty, skinny = draw.random(), draw.random()
    kinds = {0: empty, draw.randint(1, 63): skinny, 64: 0.05, 65: 0.05, draw.randint(66, 500): 0.3}
    counts = draw.choices(list(kinds), kinds.values(), k=draw.randint(1, 40))
    if draw.random() < 0.2:
        counts[draw.randrange(len(counts))] = draw.randint(1000, 5000)
    return counts


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_every_work_tile_once_and_in_order(group, interleave, tile_rows, request):
    """300 random layers each, 5400 in all."""
    draw = random.Random(f"{group} {interleave} {tile_rows} {request.config.getoption('seed')}")
    for _ in range(300):
        order = {"group": group, "interleave": interleave, "split_last_wave": draw.choice((0, 1, 5, 64, 132))}
        check_work_tiles(random_counts(draw), draw.randint(1, 4), tile_rows, order)


@pytest.mark.quick
@given(
    counts=COUNTS,
    num_n_tiles=st.integers(1, 12),
    tile_rows=st.sampled_from((16, 64, 128, 192)),
    order=st.fixed_dictionaries(
        {
            "group": st.one_of(st.integers(1, 20), st.just(INT32_MAX)),
            "split_last_wave": st.integers(0, 140),
            "interleave": st.booleans(),
        }
    ),
)
def test_any_order_has_every_work_tile_once(counts, num_n_tiles, tile_rows, order):
    check_work_tiles(counts, num_n_tiles, tile_rows, order)


def test_every_window_has_its_share_of_skinny_tiles():
    """As check_work_tiles, but window by window."""
    tiles = work_tiles([5] * 7 + [900, 0, 700], 5, 128, ORDER)
    skinny = [0, *accumulate(tile[5] for tile in tiles)]
    for first in range(len(tiles)):
        for last in range(first, len(tiles) + 1):
            assert abs(skinny[last] - skinny[first] - (last - first) * skinny[-1] / len(tiles)) <= 1


@needs_host
@given(
    experts=st.lists(st.integers(-1, 9), min_size=1, max_size=64),
    num_experts=st.integers(1, 8),
    num_n_tiles=st.integers(1, 12),
    split_last_wave=st.integers(0, 140),
)
def test_plan_of_few_slots(experts, num_experts, num_n_tiles, split_last_wave):
    """The rows and the work tiles that route_plan's plan has."""
    plan = ops.route_plan(torch.tensor(experts)[:, None], num_experts)
    offs, schedule, row_slot = plan[1][1:], plan[2], plan[4]
    expected = ops.work_tiles(schedule, offs, num_n_tiles, 16, True, split_last_wave).tolist()
    slots, tiles = _host.slot_plan(experts, num_experts, num_n_tiles, split_last_wave, True)
    assert slots == row_slot[row_slot >= 0].tolist()
    assert [list(tile) for tile in tiles] == expected
    unsplit = ops.work_tiles(schedule, offs, num_n_tiles, 16, True, 0).tolist()
    assert [
        list(t) for t in _host.slot_plan(experts, num_experts, num_n_tiles, split_last_wave, False)[1]
    ] == unsplit


@needs_host
@pytest.mark.parametrize("count", [0, 65])
def test_plans_of_other_numbers_of_slots_are_refused(count):
    with pytest.raises(ValueError, match=f"expected 1 to 64 slots, found {count}"):
        _host.slot_plan([0] * count, 1, 1, 0, True)


@pytest.mark.parametrize("counts", [[], [0, 0, 0]])
def test_no_rows_no_work_tiles(counts):
    assert work_tiles(counts, 3, 128, ORDER | {"split_last_wave": 132}) == []


@needs_host
@pytest.mark.parametrize("group", [1, 3, 16])
def test_tall_tiles_cover_what_their_pair_did(group, request):
    """Every quarter of a pair's rows and columns once. A pair is tall where its second row tile has more
    than 64 rows: then both of its tiles are; else its tiles are what they were."""
    draw = random.Random(request.node.name)
    for _ in range(20):
        counts = random_counts(draw) + [draw.choice([0, 128, 192, 193, 256, 300, 449, 1000])]
        offs, num_n_tiles = offs_of(counts), draw.randint(1, 4)
        words = ops.tile_schedule(offs, 128, MIN_SLICE).tolist(), offs.tolist(), sum(counts), num_n_tiles
        tiles = _host.any_work_tiles(*words, group, True, 0, tall=True)
        cover = Counter()
        for expert, first_row, num_rows, n_tile, n_half, skinny in tiles:
            first = int(offs[expert]) - counts[expert]
            done = first_row - first
            pair = min(counts[expert] - done // 256 * 256, 256)
            assert (num_rows > 128) == (n_half > 0) == (pair > 192) and not (skinny and n_half)
            assert num_rows == (pair if n_half else min(counts[expert] - done, 128))
            for half in (1, 2) if n_half == 0 else (n_half,):
                cover.update((expert, done + row, n_tile, half) for row in range(num_rows))
        rows = [(e, row) for e, count in enumerate(counts) for row in range(count)]
        quarters = product(rows, range(num_n_tiles), (1, 2))
        assert cover == Counter((*row, n_tile, half) for row, n_tile, half in quarters)


def sample_indices(num_tiles):
    """The last index, the first one and 2000 others."""
    draw = random.Random(0)
    return [num_tiles - 1, 0, *(draw.randrange(num_tiles) for _ in range(2000))]


@needs_host
@pytest.mark.parametrize("group", [1, 16, INT32_MAX])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_work_tiles_of_the_last_int32_rows(group, interleave, tile_rows):
    """Too many tiles to list: each sampled tile has the number within its kind that its order gives."""
    ends = [0, 1, 2**30, 2**30, INT32_MAX - 64, INT32_MAX]
    offs = torch.tensor(ends, dtype=torch.int32)
    schedule = ops.tile_schedule(offs, tile_rows, MIN_SLICE)
    words = schedule.tolist()
    tiles = [ceil_div(end - begin, tile_rows) for begin, end in pairwise(ends)]  # of experts 1 to 5
    full, share = tiles[1] + tiles[3], 2 / sum(tiles)
    num_n_tiles = INT32_MAX // sum(tiles)  # the most there may be
    num_tiles = sum(tiles) * num_n_tiles
    indices, found = sample_indices(num_tiles), {}
    sampled = _host.any_work_tiles(
        words, ends, INT32_MAX, num_n_tiles, group, interleave, 0, tile_rows=tile_rows, indices=indices
    )
    for index, tile in zip(indices, sampled, strict=True):
        expert, first_row, num_rows, n_tile, n_half, skinny = tile
        assert found.setdefault(tile, index) == index
        begin = ends[expert - 1]
        assert begin <= first_row < first_row + num_rows <= ends[expert]
        assert (first_row - begin) % tile_rows == 0
        assert num_rows == min(tile_rows, ends[expert] - first_row)
        assert 0 <= n_tile < num_n_tiles
        assert n_half == 0
        assert skinny == (expert in (1, 5))

        row_tile, row_tiles = (first_row - begin) // tile_rows, tiles[expert - 1]
        size = ceil_div(row_tiles, ceil_div(row_tiles, group))
        before = row_tile // size * size
        number = before * num_n_tiles + n_tile * min(size, row_tiles - before) + row_tile - before
        number += {1: 0, 2: 0, 4: tiles[1], 5: 1}[expert] * num_n_tiles
        if interleave:
            assert abs((number if skinny else index - number) - index * share) <= 1
        else:
            assert index == number + skinny * full * num_n_tiles
    last = sampled[0]
    assert (last[0], last[3]) == (5 if last[5] else 4, num_n_tiles - 1)
    for too_many in (num_n_tiles + 1, INT32_MAX):
        with pytest.raises(RuntimeError, match=r"expected fewer than 2\^31 tiles, found "):
            ops.work_tiles(schedule, offs, too_many, group, interleave, 0)


@needs_host
@pytest.mark.parametrize("skinny_experts", [1, 64, 3000])
def test_skinny_experts_have_their_share_of_nearly_2_to_the_31_tiles(skinny_experts):
    """The share in 32 bits is rounded up; over nearly 2^31 tiles that is half a tile at most."""
    offs = offs_of([1] * skinny_experts + [128 * 7919])
    words, ends = ops.tile_schedule(offs, 128, MIN_SLICE).tolist(), offs.tolist()
    row_tiles = skinny_experts + 7919
    num_n_tiles = INT32_MAX // row_tiles
    indices = sample_indices(row_tiles * num_n_tiles)
    sampled = _host.any_work_tiles(words, ends, ends[-1], num_n_tiles, 1, True, 0, indices=indices)
    for index, (expert, first_row, _, n_tile, _, skinny) in zip(indices, sampled, strict=True):
        row_tile = expert if skinny else (first_row - skinny_experts) // 128
        number = row_tile * num_n_tiles + n_tile
        skinny_before = number if skinny else index - number
        assert abs(skinny_before - index * skinny_experts / row_tiles) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_n_tiles": 0}, "expected num_n_tiles from 1 to .*, found 0"),
        ({"num_n_tiles": 2**29}, r"expected fewer than 2\^31 tiles, found 2147483648"),
        ({"group": 0}, "expected group from 1 to .*, found 0"),
        ({"split_last_wave": -1}, "expected split_last_wave from 0 to 512, found -1"),
        ({"split_last_wave": 513}, "expected split_last_wave from 0 to 512, found 513"),
    ],
)
def test_wrong_orders_are_refused(changes, message):
    offs = offs_of([1, 299])
    schedule = ops.tile_schedule(offs, 128, MIN_SLICE)
    with pytest.raises(RuntimeError, match=f"work_tiles: {message}"):
        ops.work_tiles(schedule, offs, **{"num_n_tiles": 2} | ORDER | changes)


def test_a_schedule_of_other_offs_is_refused():
    """Word by word: whatever was changed, tiles would lead elsewhere."""
    offs = offs_of([1, 299, 0, 2000])
    schedule = ops.tile_schedule(offs, 128, MIN_SLICE)
    num_active, num_words = 3, schedule.numel()
    unused = {8 + num_active, 12 + num_active}  # past the last active expert
    for word in range(num_words):
        changed = schedule.clone()
        changed[word] += 1
        if word in unused:
            assert torch.equal(
                ops.work_tiles(changed, offs, 2, **ORDER), ops.work_tiles(schedule, offs, 2, **ORDER)
            )
        elif word not in (6, 7):  # slice_rows and tile_rows, with which it may be a schedule of these offs
            for tiles in (
                lambda s: ops.work_tiles(s, offs, 2, **ORDER),
                lambda s: ops.wgrad_tiles(s, offs, 2, 1),
            ):
                with pytest.raises(RuntimeError, match="expected the schedule of these offs, found another"):
                    tiles(changed)
    for word in (6, 7):
        changed = schedule.clone()
        changed[word] = 0
        with pytest.raises(RuntimeError, match="_rows in schedule from 1 to .*, found 0"):
            ops.work_tiles(changed, offs, 2, **ORDER)
    with pytest.raises(RuntimeError, match="expected a schedule of 24 words for 4 experts, found 23"):
        ops.work_tiles(schedule[:-1], offs, 2, **ORDER)


# --- tiles of any words -------------------------------------------------------------------------------

WORD = st.one_of(st.integers(-3, 9), st.integers(-3, 1000), st.integers(-INT32_MAX - 1, INT32_MAX))


@st.composite
def wrong_plans(draw, max_rows):
    """(schedule, offs, R): those of counts, with any words in any places."""
    counts = draw(st.lists(st.integers(0, max_rows), min_size=1, max_size=6))
    offs = offs_of(counts)
    right = [*ops.tile_schedule(offs, TILE_ROWS, draw(st.integers(1, 300))).tolist(), *offs.tolist()]
    wrong = draw(st.lists(st.none() | WORD, min_size=len(right), max_size=len(right)))
    words = [r if w is None else w for r, w in zip(right, wrong, strict=True)]
    num_words = 8 + 4 * len(counts)
    return words[:num_words], words[num_words:], draw(st.integers(0, sum(counts) + 200))


@needs_host
@given(
    plan=wrong_plans(max_rows=600),
    num_n_tiles=st.integers(1, 5),
    group=st.one_of(st.integers(1, 20), st.just(INT32_MAX)),
    interleave=st.booleans(),
    split_last_wave=st.integers(0, 140),
)
def test_work_tiles_of_any_words_are_within_the_tensors(
    plan, num_n_tiles, group, interleave, split_last_wave
):
    """And no more than a right plan may have."""
    words, offs, R = plan
    tiles = _host.any_work_tiles(words, offs, R, num_n_tiles, group, interleave, split_last_wave)
    assert len(tiles) <= (R // TILE_ROWS + min(len(offs), R)) * num_n_tiles + split_last_wave // 2
    for expert, first_row, num_rows, n_tile, n_half, _ in tiles:
        assert 0 <= expert < len(offs)
        assert 0 <= first_row <= first_row + num_rows <= R
        assert 0 <= num_rows <= TILE_ROWS
        assert 0 <= n_tile < num_n_tiles
        assert n_half in ((0, 1, 2) if split_last_wave else (0,))


@needs_host
@given(plan=wrong_plans(max_rows=900), num_n_tiles=st.integers(1, 3), group=st.integers(1, 20))
def test_tall_tiles_of_any_words_are_within_the_tensors(plan, num_n_tiles, group):
    words, offs, R = plan
    tiles = _host.any_work_tiles(words, offs, R, num_n_tiles, group, True, 0, tall=True)
    for expert, first_row, num_rows, n_tile, n_half, _ in tiles:
        assert 0 <= expert < len(offs)
        assert 0 <= first_row <= first_row + num_rows <= R
        assert 0 <= num_rows <= (2 if n_half else 1) * TILE_ROWS
        assert 0 <= n_tile < num_n_tiles


@needs_host
@given(
    plan=wrong_plans(max_rows=300),
    weight_tiles=st.integers(1, 3),
    slice_rows=st.integers(1, 70),
    slices_per_tile=st.integers(0, 4),
    is_expected=st.booleans(),
)
def test_wgrad_tiles_of_any_words_are_within_the_tensors(
    plan, weight_tiles, slice_rows, slices_per_tile, is_expected
):
    """And no more than a right plan may have; every slice has a slot, shared or not."""
    words, offs, R = plan
    if is_expected:
        words[6] = slice_rows
    tiles = _host.any_wgrad_tiles(words, offs, R, weight_tiles, slice_rows, slices_per_tile)
    assert len(tiles) <= (R // slice_rows + len(offs)) * weight_tiles
    most = (words[6] == slice_rows and slices_per_tile * slice_rows) or INT32_MAX
    num_slots = _host.num_split_slots(R, most)
    for expert, first_row, num_rows, weight_tile, slice, num_slices in tiles:
        assert 0 <= expert < len(offs)
        assert 0 <= first_row <= first_row + num_rows <= R
        assert 0 <= num_rows <= most
        assert 0 <= weight_tile < weight_tiles
        assert 0 <= slice < max(1, num_slices) or num_slices == 0
        if num_slices > 1:
            first = first_row - slice * most
            assert 0 <= first <= R
            assert 0 <= _host.split_slot(first // most, 0, 1, 0) < num_slots // 2
            assert 0 <= _host.split_slot(first // most, num_slots // 2 - 1, 1, slice) < num_slots


# --- work tiles of a weight gradient ------------------------------------------------------------------


def wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile):
    offs = offs_of(counts)
    schedule = ops.tile_schedule(offs, 128, slice_rows)
    return [tuple(tile) for tile in ops.wgrad_tiles(schedule, offs, weight_tiles, slices_per_tile).tolist()]


def check_wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile, spare=0):
    """Every weight tile sums each row of its expert once; split tiles' slices have separate slots.

    spare: rows that R has beyond the experts'. Returns the number of slots.
    """
    tiles = wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile)
    most = slices_per_tile * slice_rows or INT32_MAX  # rows of a split-K slice
    first = [0, *accumulate(counts)]

    # Slice by slice, each with all weight tiles; then empty tiles, where a tile has several slices.
    assert [tile[3] for tile in tiles] == list(range(weight_tiles)) * (len(tiles) // weight_tiles)
    slices = tiles[::weight_tiles]
    for i in range(weight_tiles):
        assert [(*t[:3], *t[4:]) for t in tiles[i::weight_tiles]] == [(*t[:3], *t[4:]) for t in slices]
    assert len(slices) == sum(max(1, ceil_div(n, slice_rows)) if slices_per_tile else 1 for n in counts)
    summed = [tile for tile in slices if tile[5]]
    assert summed == slices[: len(summed)]
    if slices_per_tile:  # experts of several of the schedule's slices come first
        order = [expert for expert, *_ in summed]
        assert order == sorted(order, key=lambda e: (counts[e] <= slice_rows, e))
    for expert, count in enumerate(counts):
        number = max(1, ceil_div(count, most))
        assert [(*t[1:3], *t[4:]) for t in summed if t[0] == expert] == [
            (first[expert] + i * most, max(0, min(most, count - i * most)), i, number) for i in range(number)
        ]
    if _host is None or not slices_per_tile:
        assert slices_per_tile or all(tile[5] == 1 for tile in summed)
        return 0
    R = sum(counts) + spare
    num_slots = _host.num_split_slots(R, most)
    later = num_slots // 2 - 1
    slots = [_host.split_slot(first[e] // most, later, 1, i) for e, *_, i, number in summed if number > 1]
    assert len(slots) == len(set(slots))
    assert all(0 <= slot < num_slots for slot in slots)
    return num_slots


@pytest.mark.quick
@given(
    counts=st.lists(st.integers(0, 200), max_size=30),
    weight_tiles=st.integers(1, 3),
    slice_rows=st.integers(1, 70),
    slices_per_tile=st.integers(0, 4),
    spare=st.integers(0, 200),
)
def test_any_slices_cover_every_row_once(counts, weight_tiles, slice_rows, slices_per_tile, spare):
    check_wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile, spare)


@needs_host
@pytest.mark.parametrize("made_for", SMS)
@pytest.mark.parametrize("read_by", SMS)
def test_a_plan_of_another_device(made_for, read_by):
    """Its slices have other rows than the weight gradient expects: each tile sums all rows of its expert."""
    counts, weight_tiles = [3, 40_000, 0, 9_000], 12
    R, offs = sum(counts), offs_of(counts)
    made, read = (_host.slice_rows(R, len(counts), num_sms) for num_sms in (made_for, read_by))
    slices_per_tile = _host.slices_per_tile(R, read, weight_tiles, read_by, TILE_ROWS)
    assert slices_per_tile and (made == read) == (made_for == read_by)
    schedule = ops.tile_schedule(offs, TILE_ROWS, made)
    tiles = _host.any_wgrad_tiles(schedule.tolist(), offs.tolist(), R, weight_tiles, read, slices_per_tile)
    if made == read:
        assert tiles == wgrad_tiles(counts, weight_tiles, read, slices_per_tile)
        return
    first = [0, *accumulate(counts)]
    assert tiles == [(e, first[e], n, w, 0, 1) for e, n in enumerate(counts) for w in range(weight_tiles)]


def test_skewed_slices_keep_all_ctas_busy():
    """dw1 and dw3 of sonic-1.4b. A CTA fetches two tiles ahead of the one that it computes, and next_tile()
    claims one more. Claimed tiles cannot be stolen, so a CTA's static tiles must not all be long ones."""
    E, num_ctas, weight_tiles = 128, 132, 12
    share = [1 / (e + 1) for e in range(E)]
    counts = [min(38_000, int(327_680 * s / sum(share))) for s in share]
    slice_rows, slices_per_tile = 5120, 3
    rows = [t[2] if t[5] else 0 for t in wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile)]
    state, fetched = scheduler_state(num_ctas), [[] for _ in range(num_ctas)]

    def fetch(cta):
        while len(fetched[cta]) < 2 and (index := ops.next_tile(state, len(rows), cta)) < len(rows):
            fetched[cta] += [rows[index]] * (rows[index] > 0)

    for cta in range(num_ctas):
        fetch(cta)
    free, end = [(0, cta) for cta in range(num_ctas)], 0
    while free:  # the CTA that is free first computes its next tile; one without a tile is done
        now, cta = heapq.heappop(free)
        end = max(end, now)
        if fetched[cta]:
            heapq.heappush(free, (now + fetched[cta].pop(0), cta))
            fetch(cta)
    assert end < 1.15 * sum(rows) / num_ctas


def test_slots_of_experts_just_longer_than_a_slice():
    """The closest that slots come: of S + 1, S and S - 1 rows, whatever the slices' phase."""
    for size in (1, 2, 3, 8):
        for slices_per_tile in (1, 2):
            most = size * slices_per_tile
            for begin in range(2 * most):
                lengths = [most + 1, most + 1, most, 2 * most + 1, most - 1, most + 1, 2 * most]
                check_wgrad_tiles([begin, *lengths], 1, size, slices_per_tile)


@needs_host
@pytest.mark.parametrize("num_ctas", [1, *SMS])
@pytest.mark.parametrize("weight_tiles", [1, 12, 100, 300])
@pytest.mark.parametrize(
    "counts", [(100, 0, 3), (9000, 0, 1, 700, 0), (0,) * 5, (1,) * 300, (513,) * 40, (40_000, *(64,) * 127)]
)
@pytest.mark.parametrize("spare", [0, 5000])
def test_split_k_slices_of_a_layer(counts, weight_tiles, num_ctas, spare):
    """As the kernel chooses them; R may be more than the experts have."""
    R = sum(counts) + spare
    slice_rows = _host.slice_rows(R, len(counts), num_ctas)
    slices_per_tile = _host.slices_per_tile(R, slice_rows, weight_tiles, num_ctas)
    num_slots = check_wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile, spare)
    assert num_slots * weight_tiles * 2 <= 16 * num_ctas  # a semaphore per warpgroup


@needs_host
@given(
    counts=st.lists(
        st.one_of(st.just(0), st.integers(0, 700), st.integers(0, 40_000)), min_size=1, max_size=7
    ),
    weight_tiles=st.integers(1, 60),
    num_ctas=st.sampled_from(SMS),
    spare=st.sampled_from((0, 0, 290)),
)
@example(counts=[3, 40_000], weight_tiles=1, num_ctas=132, spare=0)  # slices of 1,216 rows: 9.5 blocks
def test_split_k_slices_are_whole_row_blocks(counts, weight_tiles, num_ctas, spare):
    """As 8-bit weight gradients read them: each block of an expert once, by each weight tile."""
    R = sum(counts) + spare
    slice_rows = _host.slice_rows(R, len(counts), num_ctas)
    slices_per_tile = _host.slices_per_tile(R, slice_rows, weight_tiles, num_ctas, TILE_ROWS)
    check_wgrad_tiles(counts, weight_tiles, slice_rows, slices_per_tile, spare)
    assert slices_per_tile * slice_rows % TILE_ROWS == 0
    read, first = Counter(), [0, *accumulate(counts)]
    for expert, first_row, num_rows, _, _, num_slices in wgrad_tiles(
        counts, weight_tiles, slice_rows, slices_per_tile
    ):
        if num_slices and num_rows:
            of_expert = first[expert] // TILE_ROWS + expert  # fused_moe_first_row_block
            block = of_expert + (first_row - first[expert]) // TILE_ROWS
            read.update(range(block, block + ceil_div(num_rows, TILE_ROWS)))
    blocks = [
        first[e] // TILE_ROWS + e + i for e, n in enumerate(counts) for i in range(ceil_div(n, TILE_ROWS))
    ]
    assert read == dict.fromkeys(blocks, weight_tiles) and len(set(blocks)) == len(blocks)
    assert max(blocks, default=-1) < R // TILE_ROWS + len(counts)


@needs_host
@given(
    R=st.one_of(st.integers(0, 10**6), st.integers(0, MAX_ROWS)),
    E=st.integers(1, 1000),
    num_sms=st.integers(1, MAX_CTAS),
    weight_tiles=st.one_of(st.integers(1, 600), st.integers(1, 10**5)),
    k_tile=st.sampled_from((64, 128)),
)
def test_slice_rules(R, E, num_sms, weight_tiles, k_tile):
    slice_rows = _host.slice_rows(R, E, num_sms)
    parts = max(E, num_sms // 2)
    assert slice_rows % 64 == 0
    assert min(R, max(MIN_SLICE, 2 * R // parts)) <= slice_rows
    assert slice_rows - 64 < max(MIN_SLICE, 2 * R / parts)
    assert slice_rows <= ceil_div(max(R, 1), 64) * 64
    assert ceil_div(R, E) <= slice_rows or E < num_sms // 2  # even routing cuts no expert

    slices_per_tile = _host.slices_per_tile(R, slice_rows, weight_tiles, num_sms, k_tile)
    most = slices_per_tile * slice_rows
    if slice_rows % k_tile:
        assert most % k_tile == 0
        slice_rows *= 2
    if not slices_per_tile:
        half_a_cta = R * weight_tiles // (2 * num_sms)
        assert R <= ceil_div(max(half_a_cta, 1), slice_rows) * slice_rows
        return
    assert most < R
    assert most - slice_rows < R * weight_tiles / (2 * num_sms) or most == slice_rows
    assert _host.num_split_slots(R, most) * weight_tiles * 2 <= 16 * num_sms


def test_the_counters_suffice():
    """wgrad needs one per CTA of the tile scheduler, one for the CTAs that have exited, and 8 semaphores per
    CTA at one CTA per SM. Half of the slots (test_slice_rules) are first slices', which have a semaphore."""
    assert MAX_CTAS + 32 + 16 // 2 * (MAX_CTAS // 2) <= NUM_COUNTERS


def test_wrong_wgrad_tiles_are_refused():
    offs = offs_of([1, 299])
    schedule = ops.tile_schedule(offs, 128, MIN_SLICE)
    for arguments, message in (
        ((0, 1), "expected weight_tiles from 1 to .*, found 0"),
        ((1, -1), "expected slices_per_tile from 0 to .*, found -1"),
        ((1, 2**22), "expected slices_per_tile from 0 to .*, found 4194304"),
        ((2**30, 0), r"expected fewer than 2\^31 tiles, found 2147483648"),
    ):
        with pytest.raises(RuntimeError, match=f"wgrad_tiles: {message}"):
            ops.wgrad_tiles(schedule, offs, *arguments)


# --- which CTA computes which tile --------------------------------------------------------------------


STATIC, ROTATED, IN_TURN = range(3)  # FusedMoeAssignment


def scheduler_state(num_ctas):
    return torch.zeros(3, num_ctas, dtype=torch.int32)


@pytest.mark.quick
@given(
    num_tiles=st.integers(0, 1000),
    num_ctas=st.integers(1, MAX_CTAS),
    late=st.floats(0, 1),
    assignment=st.sampled_from((STATIC, ROTATED)),
    seed=st.integers(),
)
def test_every_tile_is_claimed_once(num_tiles, num_ctas, late, assignment, seed):
    """Fast, slow and late CTAs: some start when others have stolen some or all of their tiles.

    A tile of another CTA is that CTA's next one, and no CTA has more left. Where each has one tile at most,
    no CTA steals.
    """
    state, chance, claimed = scheduler_state(num_ctas), random.Random(seed), []
    owners = [(i - i // num_ctas * (assignment == ROTATED)) % num_ctas for i in range(num_tiles)]
    assigned = [owners.count(cta) for cta in range(num_ctas)]
    running, absent = [], list(range(num_ctas))
    chance.shuffle(absent)
    while running or absent:
        if absent and (not running or chance.random() > late):
            running.append(absent.pop())
        cta = running[int(len(running) * chance.random() ** 3)]  # the first are the fastest
        before = state[0].tolist()
        index = ops.next_tile(state, num_tiles, cta, assignment)
        if index >= num_tiles:
            running.remove(cta)
            continue
        claimed.append(index)
        owner, number = owners[index], index // num_ctas
        if owner != cta:
            assert num_tiles > num_ctas
            left = [max(0, a - b) for a, b in zip(assigned, before, strict=True)]
            left[cta] = 0
            assert left[owner] == max(left)
            assert number == before[owner]
    assert sorted(claimed) == list(range(num_tiles))


@pytest.mark.quick
@given(
    num_full=st.integers(0, 500),
    num_skinny=st.integers(0, 500),
    num_ctas=st.integers(2, MAX_CTAS),
    share=st.floats(0, 1),
    assignment=st.sampled_from((STATIC, ROTATED)),
    seed=st.integers(),
)
def test_shared_tiles_are_claimed_once(num_full, num_skinny, num_ctas, share, assignment, seed):
    """Whichever CTA is next. Skinny tiles are the last CTAs' while these have some, full ones the others'."""
    num_tiles = max(num_full + num_skinny, num_ctas + 1)  # more than CTAs, as share_tiles has it
    skinny_ctas = 1 + int(share * (num_ctas - 2))
    state, chance, claimed = scheduler_state(num_ctas), random.Random(seed), []
    running = list(range(num_ctas))
    while running:
        cta, claims = chance.choice(running), state[1, :].tolist()
        index = ops.next_tile(state, num_tiles, cta, assignment, num_full, skinny_ctas)
        if index >= num_tiles:
            running.remove(cta)
            continue
        claimed.append(index)
        is_skinny, of_skinny = index >= num_full, cta >= num_ctas - skinny_ctas
        if state[2, cta] == 1:  # one of its own
            assert is_skinny == of_skinny, claims
    assert sorted(claimed) == list(range(num_tiles))


@given(counts=COUNTS, num_n_tiles=st.integers(1, 60), num_ctas=st.integers(1, 264))
@example([4089] * 8 + [1] * 56, 10, 132)
@example([1000] * 40 + [64] * 40, 8, 132)
def test_skinny_tiles_have_ctas_in_proportion(counts, num_n_tiles, num_ctas):
    """At most a fifth of the CTAs, so that both kinds take about the same time, if a skinny tile takes 45% of
    a full one's. None with less than two waves of full tiles, or without skinny ones."""
    offs = offs_of(counts)
    schedule = ops.tile_schedule(offs, TILE_ROWS, MIN_SLICE)
    tiles = naive_row_tiles(counts, TILE_ROWS)
    skinny = num_n_tiles * sum(is_skinny(counts[expert]) for expert, *_ in tiles)
    full = num_n_tiles * len(tiles) - skinny
    num_full, skinny_ctas = ops.share_tiles(schedule, offs, num_n_tiles, num_ctas)
    time = 0.45 * skinny + full
    share = num_ctas * 0.45 * skinny / time if time else 0
    if full < 2 * num_ctas or share < 0.49 or share > num_ctas // 5 + 0.51:
        assert skinny_ctas == 0
    elif 0.51 < share < num_ctas // 5 + 0.49:
        assert num_full == full
        assert abs(skinny_ctas - share) <= 0.51


@pytest.mark.parametrize("num_tiles", (0, 13, 14, 15, 16, 17, 201))
def test_tiles_in_turn_two_at_once(num_tiles):
    """A claim is two consecutive tiles of a weight gradient, the last one's maybe one (sm90/wgrad.cu)."""
    state, num_claims = scheduler_state(7), ceil_div(num_tiles, 2)
    claims = [ops.next_tile(state, num_claims, i % 7, IN_TURN) for i in range(num_claims + 14)]
    found = [
        i for claim in claims if claim < num_claims for i in range(2 * claim, min(2 * claim + 2, num_tiles))
    ]
    assert sorted(found) == list(range(num_tiles))


@pytest.mark.parametrize("num_tiles", (0, 6, 7, 8, 200))
def test_tiles_in_turn(num_tiles):
    """Whichever CTA asks gets the next tile of all. Where each has one tile at most, that is its own."""
    state, chance = scheduler_state(7), random.Random(0)
    ctas = [chance.randrange(7) for _ in range(3 * num_tiles)] + list(range(7))
    taken = [ops.next_tile(state, num_tiles, cta, IN_TURN) for cta in ctas]
    found = [index for index in taken if index < num_tiles]
    assert sorted(found) == list(range(num_tiles))
    if num_tiles <= 7:
        assert all(index == cta for cta, index in zip(ctas, taken, strict=True) if index < num_tiles)


def test_ctas_in_lockstep_steal_nothing():
    state = scheduler_state(7)
    assert [ops.next_tile(state, 200, i % 7) for i in range(200)] == list(range(200))


def test_rotated_ctas_share_out_the_short_tiles():
    """Every third tile is short, and a wave has six. Without rotation two CTAs would have all short ones."""
    state, waves = scheduler_state(6), 9
    taken = [[ops.next_tile(state, 6 * waves, cta, ROTATED) for cta in range(6)] for _ in range(waves)]
    assert [sorted(wave) for wave in taken] == [list(range(6 * w, 6 * w + 6)) for w in range(waves)]
    for tiles in zip(*taken, strict=True):
        assert sum(tile % 3 == 2 for tile in tiles) == waves // 3


def test_a_late_cta_steals_from_the_one_with_most_left():
    """CTA 2 starts when its only tile is stolen, and CTA 1 has one left."""
    state = scheduler_state(3)
    assert [ops.next_tile(state, 5, 0) for _ in range(4)] == [0, 3, 1, 2]
    assert ops.next_tile(state, 5, 2) == 4
    assert all(ops.next_tile(state, 5, cta) >= 5 for cta in range(3))


@pytest.mark.parametrize(
    ("state", "arguments", "message"),
    [
        (scheduler_state(132), (10, 132), "expected cta from 0 to 131, found 132"),
        (scheduler_state(132), (10, -1), "expected cta from 0 to 131, found -1"),
        (scheduler_state(132), (-1, 0), "expected num_tiles from 0 to .*, found -1"),
        (scheduler_state(513), (10, 0), "expected CTAs in state from 1 to 512, found 513"),
        (scheduler_state(3), (10, 0, 3), "expected assignment from 0 to 2, found 3"),
        (scheduler_state(3), (10, 0, 0, 5, 3), "expected skinny_ctas from 0 to 2, found 3"),
        (scheduler_state(3), (10, 0, 0, 11, 1), "expected num_full from 0 to 10, found 11"),
        (scheduler_state(0), (10, 0), "expected CTAs in state from 1 to 512, found 0"),
        (scheduler_state(3).mT, (10, 0), "expected a contiguous state of 3 rows"),
        (scheduler_state(3)[:2], (10, 0), "expected a contiguous state of 3 rows, found 2"),
        (scheduler_state(3).long(), (10, 0), "expected state of dtype Int, found Long"),
    ],
)
def test_wrong_scheduler_states_are_refused(state, arguments, message):
    with pytest.raises(RuntimeError, match=f"next_tile: {message}"):
        ops.next_tile(state, *arguments)
