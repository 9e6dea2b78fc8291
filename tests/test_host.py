"""fused_moe._host: the tile plan of csrc/plan.h and the schedule of csrc/schedule.h against naive lists."""

import math
import random
from collections import Counter
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_moe.plan import TILE_ROWS as PYTHON_TILE_ROWS

_host = pytest.importorskip("fused_moe._host", reason="fused_moe._host was not built for this Python")
COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 700)), max_size=40)
TILE_ROWS = st.one_of(st.just(_host.TILE_ROWS), st.integers(1, 300))
HOPPER = {"tile_rows": 128, "skinny_rows": 64, "group": 16, "interleave": True, "split_last_wave": 0}


def naive_tiles(counts, tile_rows):
    """(expert, first row, number of rows) of every tile, by walking over all rows."""
    tiles, row = [], 0
    for expert, count in enumerate(counts):
        last = row + count
        while row < last:
            tiles.append((expert, row, min(tile_rows, last - row)))
            row += tiles[-1][2]
    return tiles


@pytest.mark.quick
@given(counts=COUNTS, tile_rows=TILE_ROWS)
def test_tiles_are_those_of_a_walk_over_the_rows(counts, tile_rows):
    ends = list(accumulate(counts))
    expected = naive_tiles(counts, tile_rows)
    plan = _host.plan_tiles(ends, tile_rows)
    assert plan[1] == len(expected)
    assert [_host.find_tile(plan, ends, i, tile_rows) for i in range(len(expected))] == expected


@given(counts=COUNTS, tile_rows=TILE_ROWS)
def test_plan_lists_busy_experts_then_zeros(counts, tile_rows):
    num_experts = len(counts)
    plan = _host.plan_tiles(list(accumulate(counts)), tile_rows)
    busy = [expert for expert, count in enumerate(counts) if count]
    tile_end = list(accumulate(-(-counts[expert] // tile_rows) for expert in busy))
    zeros = [0] * (num_experts - len(busy))
    assert plan == [
        len(busy),
        sum(-(-count // tile_rows) for count in counts),
        *busy,
        *zeros,
        *tile_end,
        *zeros,
    ]


def test_row_numbers_up_to_the_last_int32():
    last = 2**31 - 1
    ends = [0, last - 1, last - 1, last]
    plan = _host.plan_tiles(ends)
    num_tiles = -(-(last - 1) // _host.TILE_ROWS) + 1
    assert plan[:2] == [2, num_tiles]
    assert _host.find_tile(plan, ends, num_tiles - 1) == (3, last - 1, 1)
    expert, first_row, num_rows = _host.find_tile(plan, ends, num_tiles - 2)
    assert (expert, first_row + num_rows) == (1, last - 1)


@pytest.mark.parametrize(
    ("ends", "tile_rows", "message"),
    [
        ([5, 3], 128, "never decrease"),
        ([-1, 3], 128, "from 0 up"),
        ([1, 3], 0, "tile_rows: expected at least 1, found 0"),
    ],
)
def test_wrong_plans_are_refused(ends, tile_rows, message):
    with pytest.raises(ValueError, match=message):
        _host.plan_tiles(ends, tile_rows)


def test_wrong_tiles_are_refused():
    ends = [1, 300]
    plan = _host.plan_tiles(ends)
    for tile in (-1, plan[1]):
        with pytest.raises(IndexError, match="expected 0 <= tile < 4"):
            _host.find_tile(plan, ends, tile)
    with pytest.raises(ValueError, match="not the plan of these ends"):
        _host.find_tile(plan, [1, 400], 0)


# --- the schedule -------------------------------------------------------------------------------------


def drawn(counts, num_columns, schedule):
    """Every item of the schedule, in order."""
    ends = list(accumulate(counts))
    work = _host.plan_work(ends, **schedule)
    num_items = _host.num_items(work, num_columns, schedule["split_last_wave"])
    return [_host.find_work_tile(work, ends, num_columns, i, **schedule) for i in range(num_items)]


def whole_tiles(items, num_tiles, split_last_wave):
    """The items' tiles. The last come as two halves where they would leave half of the num_ctas idle."""
    last = num_tiles % split_last_wave if split_last_wave else 0
    cut = last if last <= split_last_wave / 2 else 0
    halves = items[num_tiles - cut :]
    assert len(halves) == 2 * cut
    assert [item[4] for item in items] == [0] * (num_tiles - cut) + [1, 2] * cut
    assert [item[:4] for item in halves[::2]] == [item[:4] for item in halves[1::2]]
    return [(*item[:4], item[5]) for item in (*items[: num_tiles - cut], *halves[::2])]


def naive_items(counts, num_columns, schedule, few):
    """The tiles of one kind of experts, sorted by the order's own key."""
    tiles = [
        t for t in naive_tiles(counts, schedule["tile_rows"]) if is_skinny(counts[t[0]], schedule) == few
    ]
    first = {expert: i for i, (expert, *_) in reversed(list(enumerate(tiles)))}
    size = {}
    for expert, num_tiles in Counter(expert for expert, *_ in tiles).items():
        num_groups = math.ceil(num_tiles / schedule["group"])
        size[expert] = math.ceil(num_tiles / num_groups)

    def place(item):
        tile, column = item
        expert = tiles[tile][0]
        return expert, (tile - first[expert]) // size[expert], column, tile

    items = sorted(product(range(len(tiles)), range(num_columns)), key=place)
    return [(*tiles[tile], column, few) for tile, column in items]


def is_skinny(rows, schedule):
    return rows <= schedule["skinny_rows"]


def check_schedule(counts, num_columns, schedule):
    """Each tile once, each kind in its order, and the experts with few rows spread or last."""
    num_tiles = len(naive_tiles(counts, schedule["tile_rows"])) * num_columns
    items = whole_tiles(drawn(counts, num_columns, schedule), num_tiles, schedule["split_last_wave"])
    few = [item for item in items if item[4]]
    assert few == naive_items(counts, num_columns, schedule, few=True)
    assert [item for item in items if not item[4]] == naive_items(counts, num_columns, schedule, few=False)
    if not schedule["interleave"]:
        assert items[len(items) - len(few) :] == few
        return
    # How far the few items of the first i are from their share, times the number of items. A window's
    # distance is the difference of two.
    ahead = list(accumulate((len(items) * item[4] - len(few) for item in items), initial=0))
    assert max(ahead) - min(ahead) <= len(items)


def random_counts(draw):
    """1 to 40 experts: some layers are nearly empty, some have experts with few rows, some a huge one."""
    empty, few = draw.random(), draw.random()
    kinds = {0: empty, draw.randint(1, 64): few, 64: 0.05, 65: 0.05, draw.randint(66, 500): 0.3}
    counts = draw.choices(list(kinds), kinds.values(), k=draw.randint(1, 40))
    if draw.random() < 0.2:
        counts[draw.randrange(len(counts))] = draw.randint(1000, 5000)
    return counts


@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_every_item_is_drawn_once_and_in_order(group, interleave, tile_rows, request):
    """300 random layers each, 5400 in all."""
    draw = random.Random(f"{group} {interleave} {tile_rows} {request.config.getoption('seed')}")
    for _ in range(300):
        sizes = {"skinny_rows": draw.choice((0, 16, 64)), "split_last_wave": draw.choice((0, 1, 5, 64, 132))}
        schedule = sizes | {"group": group, "interleave": interleave, "tile_rows": tile_rows}
        check_schedule(random_counts(draw), draw.randint(1, 4), schedule)


@pytest.mark.quick
@given(
    counts=COUNTS,
    num_columns=st.integers(1, 12),
    schedule=st.fixed_dictionaries(
        {
            "tile_rows": st.sampled_from((64, 128, 192)),
            "skinny_rows": st.integers(0, 64),
            "group": st.one_of(st.integers(1, 20), st.just(2**31 - 1)),
            "split_last_wave": st.integers(0, 140),
            "interleave": st.booleans(),
        }
    ),
)
def test_any_schedule_draws_every_item_once_and_in_order(counts, num_columns, schedule):
    check_schedule(counts, num_columns, schedule)


@pytest.mark.quick
@given(num_items=st.integers(0, 1000), num_ctas=st.integers(1, 256), late=st.floats(0, 1), seed=st.integers())
def test_every_item_is_drawn_by_one_worker(num_items, num_ctas, late, seed):
    """Whoever is fast, slow or late: some num_ctas come when others have claimed some or all of their turns."""
    draws, chance, drawn = _host.TileSchedulers(num_items, num_ctas), random.Random(seed), []
    present, absent = [], list(range(num_ctas))
    chance.shuffle(absent)
    while present or absent:
        if absent and (not present or chance.random() > late):
            present.append(absent.pop())
        cta = present[int(len(present) * chance.random() ** 3)]  # the first are the fastest
        item = draws.next(cta)
        drawn.append(item)
        if item is None:
            present.remove(cta)
    assert sorted(item for item in drawn if item is not None) == list(range(num_items))
    assert drawn.count(None) == num_ctas


def test_a_late_worker_takes_from_who_is_behind():
    """Worker 2 comes when its only turn is claimed, and cta 1 has one left."""
    draws = _host.TileSchedulers(5, 3)
    assert [draws.next(0) for _ in range(4)] == [0, 3, 1, 2]
    assert draws.next(2) == 4
    assert [draws.next(cta) for cta in range(3)] == [None] * 3


def test_every_window_has_its_share_of_few_rows():
    """As check_schedule, but window by window."""
    items = drawn([5] * 7 + [900, 0, 700], 5, HOPPER)
    few = [0, *accumulate(item[5] for item in items)]
    for first in range(len(items)):
        for last in range(first, len(items) + 1):
            assert abs(few[last] - few[first] - (last - first) * few[-1] / len(items)) <= 1


@pytest.mark.parametrize("group", [1, 16, 2**31 - 1])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("tile_rows", [64, 128, 192])
def test_schedules_of_the_last_int32_rows(group, interleave, tile_rows):
    """Too many items to draw all: of those drawn each is as many-th of its kind as its order tells."""
    last = 2**31 - 1
    ends = [0, 1, 2**30, 2**30, last - 64, last]
    schedule = HOPPER | {"group": group, "interleave": interleave, "tile_rows": tile_rows}
    work = _host.plan_work(ends, **schedule)
    tiles = [-(-(end - begin) // tile_rows) for begin, end in pairwise(ends)]  # of experts 1 to 5
    full, share = tiles[1] + tiles[3], 2 / sum(tiles)
    assert work[:9] == [4, 2, full + 2, full, math.ceil(2**32 * share), 2, 4, 1, 5]
    num_columns = last // work[2]  # the most there may be
    num_items = work[2] * num_columns
    draw, found = random.Random(0), {}
    for index in [0, num_items - 1, *(draw.randrange(num_items) for _ in range(2000))]:
        item = _host.find_work_tile(work, ends, num_columns, index, **schedule)
        expert, first_row, num_rows, column, half, few = item
        assert found.setdefault(item, index) == index
        begin = ends[expert - 1]
        assert begin <= first_row < first_row + num_rows <= ends[expert]
        assert (first_row - begin) % tile_rows == 0
        assert num_rows == min(tile_rows, ends[expert] - first_row)
        assert 0 <= column < num_columns
        assert half == 0
        assert few == (expert in (1, 5))

        tile, num_tiles = (first_row - begin) // tile_rows, tiles[expert - 1]
        size = -(-num_tiles // -(-num_tiles // group))
        before = tile // size * size
        number = before * num_columns + column * min(size, num_tiles - before) + tile - before
        number += {1: 0, 2: 0, 4: tiles[1], 5: 1}[expert] * num_columns
        if interleave:
            assert abs((number if few else index - number) - index * share) <= 1
        else:
            assert index == number + few * full * num_columns
    expert, *_, column, _, few = _host.find_work_tile(work, ends, num_columns, num_items - 1, **schedule)
    assert (expert, column) == (5 if few else 4, num_columns - 1)
    with pytest.raises(IndexError, match=f"found {num_items}"):
        _host.find_work_tile(work, ends, num_columns, num_items, **schedule)
    for too_many in (num_columns + 1, last):
        with pytest.raises(ValueError, match=r"num_columns: expected fewer than 2\^31 tiles, found "):
            _host.find_work_tile(work, ends, too_many, 0, **schedule)


@pytest.mark.parametrize("few_experts", [1, 64, 3000])
def test_few_rows_have_their_share_of_nearly_2_to_the_31_items(few_experts):
    """The share in 32 bits is rounded up; over so many items that comes to half an item at most."""
    counts = [1] * few_experts + [128 * 7919]
    ends, schedule = list(accumulate(counts)), HOPPER | {"group": 1}
    work = _host.plan_work(ends, **schedule)
    num_columns = (2**31 - 1) // work[2]
    num_items, draw = work[2] * num_columns, random.Random(0)
    for index in [num_items - 1, *(draw.randrange(num_items) for _ in range(2000))]:
        expert, first_row, _, column, _, few = _host.find_work_tile(
            work, ends, num_columns, index, **schedule
        )
        tile = expert if few else (first_row - few_experts) // 128
        number = tile * num_columns + column
        skinny_before = number if few else index - number
        assert abs(skinny_before - index * few_experts / work[2]) <= 1


@pytest.mark.parametrize("num_ctas", [1, 132])
@pytest.mark.parametrize("num_tiles", [1, 12, 7168])
@pytest.mark.parametrize(
    "counts", [(100, 0, 3), (9000, 0, 1, 700, 0), (0,) * 5, (1,) * 300, (513,) * 40, (40_000, *(64,) * 127)]
)
def test_pieces_of_sums(counts, num_tiles, num_ctas):
    """Every expert has its weight's tiles, one without rows too; long sums are cut, and come first."""
    how, most = _host.split_k_schedule(max(sum(counts), 1), num_tiles, num_ctas)
    ends, rows = list(accumulate(counts)), how["tile_rows"]
    assert rows % 64 == 0
    work = _host.plan_work(ends, **how)
    slices = {e: max(1, -(-count // rows)) for e, count in enumerate(counts)}
    assert work[0] == len(counts)
    assert work[2] == sum(slices.values())
    assert work[3] == sum(n for n in slices.values() if n > 1) <= most
    assert most * num_tiles <= 4 * num_ctas  # slices are kept in memory
    # none is longer than half of a cta's share, or 512 rows, rounded up
    assert rows - 64 < max(512, sum(counts) * num_tiles / (2 * num_ctas))
    found = [_host.find_work_tile(work, ends, num_tiles, i * num_tiles, **how) for i in range(work[2])]
    assert [few for *_, few in found] == sorted(few for *_, few in found)
    for expert, n in slices.items():
        mine = [(first, size) for e, first, size, *_ in found if e == expert]
        begin = ends[expert] - counts[expert]
        sizes = [min(rows, counts[expert] - i * rows) for i in range(n)]
        assert mine == [(begin + i * rows, size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("ends", "changes", "message"),
    [
        ([5, 3], {}, "never decrease"),
        ([5], {"tile_rows": 0}, "tile_rows: expected at least 1, found 0"),
        ([5], {"skinny_rows": 129}, "skinny_rows: expected 0 to tile_rows = 128, found 129"),
        ([5], {"skinny_rows": -1}, "skinny_rows: expected 0 to tile_rows = 128, found -1"),
        ([5], {"group": 0}, "group: expected at least 1, found 0"),
        ([5], {"split_last_wave": -1}, "split_last_wave: expected at least 0, found -1"),
    ],
)
def test_wrong_schedules_are_refused(ends, changes, message):
    with pytest.raises(ValueError, match=message):
        _host.plan_work(ends, **HOPPER | changes)
    with pytest.raises(ValueError, match=message):
        _host.find_work_tile([1, 0, 1, 0, 0, 0, 1], ends, 1, 0, **HOPPER | changes)


def test_wrong_items_are_refused():
    ends = [1, 300]
    work = _host.plan_work(ends, **HOPPER)
    for index in (-1, 8):
        with pytest.raises(IndexError, match=f"expected 0 <= index < 8, found {index}"):
            _host.find_work_tile(work, ends, 2, index, **HOPPER)
    with pytest.raises(ValueError, match="not the plan of these ends"):
        _host.find_work_tile(work, [1, 400], 2, 0, **HOPPER)
    with pytest.raises(ValueError, match="num_columns: expected at least 1, found 0"):
        _host.find_work_tile(work, ends, 0, 0, **HOPPER)
    with pytest.raises(ValueError, match=r"num_columns: expected fewer than 2\^31 tiles, found 4 row tiles"):
        _host.find_work_tile(work, ends, 2**29, 0, **HOPPER)
    with pytest.raises(ValueError, match="cta: expected less than 132, found 132"):
        _host.TileSchedulers(10, 132).next(132)
    with pytest.raises(ValueError, match="num_ctas: expected 1 to 256, found 257"):
        _host.TileSchedulers(10, 257)


def test_no_rows_no_items():
    for counts in ([], [0, 0, 0]):
        assert drawn(counts, 3, HOPPER | {"split_last_wave": 132}) == []


def test_python_and_c_agree_on_the_tile():
    assert _host.TILE_ROWS == PYTHON_TILE_ROWS


@pytest.mark.quick
def test_build_info_names_what_built_it():
    info = _host.build_info()
    assert list(info) == ["c_compiler", "cxx_compiler", "nvcc", "gpu_targets", "abi_target", "torch"]
    assert all(info.values())
    assert info["abi_target"] == "2.10"
    assert (info["nvcc"] == "none") == (info["gpu_targets"] == "none")
