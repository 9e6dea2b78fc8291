"""fused_moe._host: the tile plan of csrc/plan.h against a naive list of tiles."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_moe.plan import TILE_ROWS as PYTHON_TILE_ROWS

_host = pytest.importorskip("fused_moe._host", reason="fused_moe._host was not built for this Python")
COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, 700)), max_size=40)
TILE_ROWS = st.one_of(st.just(_host.TILE_ROWS), st.integers(1, 300))


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


def test_python_and_c_agree_on_the_tile():
    assert _host.TILE_ROWS == PYTHON_TILE_ROWS


@pytest.mark.quick
def test_build_info_names_what_built_it():
    info = _host.build_info()
    assert list(info) == ["c_compiler", "cxx_compiler", "nvcc", "gpu_targets", "abi_target", "torch"]
    assert all(info.values())
    assert info["abi_target"] == "2.10"
    assert (info["nvcc"] == "none") == (info["gpu_targets"] == "none")
