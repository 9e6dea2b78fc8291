"""python -m fused_moe.schedule: the model's schedule holds together, and the picture is drawn."""

import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("fused_moe._host", reason="fused_moe._host was not built for this Python")
from fused_moe import schedule  # noqa: E402

WORST = [1] * 63 + [32768 - 63]  # of 64 experts, with K = 3584 and N = 2560
KERNELS = Path(__file__).parents[1] / "csrc" / "kernels" / "hopper"
SMALL = "256,16,2,512,256"


def time_of(counts, depth, width, num_sms=132, **changes):
    items = schedule.items_of(counts, width // schedule.TILE_COLUMNS, **changes)
    return max(run.end for run in schedule.simulate(items, depth, num_sms))


@pytest.fixture
def draw(tmp_path):
    """Runs the command and returns the picture's first bytes."""
    pytest.importorskip("matplotlib")

    def draw(*flags):
        path = tmp_path / "new folder" / "schedule.png"
        schedule.main([*flags, "-o", str(path)])
        return path.read_bytes()[:8]

    return draw


@pytest.mark.quick
def test_the_schedule_is_the_kernels():
    """SCHEDULE has what schedule_for of plan.cu starts from, for the tile of engine.cuh."""
    if not KERNELS.exists():
        pytest.skip("not in a checkout")
    defaults = r"FusedMoeSchedule s = \{tile_rows, (\d+), (\d+), ([01]), split_last_wave\};"
    plan = (KERNELS / "plan.cu").read_text()
    ((skinny_rows, group, interleave),) = re.findall(defaults, plan)
    orders = dict(re.findall(r'"order=(\w+)"\)\) s.group = (\w+);', plan))
    assert orders == {"linear": "1", "column": "INT32_MAX"}
    assert schedule.ORDERS == {"linear": 1, "grouped": int(group), "column": 2**31 - 1}
    box = re.search(r"int BOX = (\d+)", (KERNELS / "wgmma.cuh").read_text())[1]
    engine = (KERNELS / "engine.cuh").read_text()
    warpgroups = re.search(r"int WARPGROUPS = (\d+)", engine)[1]
    columns = re.search(r"int BM = BOX \* WARPGROUPS, BN = (\d+)", engine)[1]
    assert int(columns) == schedule.TILE_COLUMNS
    assert schedule.SCHEDULE == {
        "tile_rows": int(box) * int(warpgroups),
        "skinny_rows": int(skinny_rows),
        "group": int(group),
        "interleave": interleave == "1",
        "split_last_wave": 0,
    }


@pytest.mark.parametrize("routing", ["zipf:1.2", "worst"])
@pytest.mark.parametrize("product", ["up_gate", "down"])
def test_a_picture_is_drawn(draw, capsys, routing, product):
    flags = ("--shape", SMALL, "--routing", routing, "--product", product)
    assert draw(*flags) == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.endswith("schedule.png\n")


@pytest.mark.parametrize("order", schedule.ORDERS)
def test_every_flag(draw, order):
    sizes = ("--tile-rows", "64", "--few-rows", "16", "--group", "2", "--sms", "7", "--seed", "3")
    assert draw("--shape", SMALL, "--order", order, "--no-interleave", *sizes)


@pytest.mark.quick
@pytest.mark.parametrize("order", schedule.ORDERS)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_every_tile_runs_once_on_an_sm_of_its_own(order, interleave, num_sms):
    counts, num_columns, depth = [700, 3, 0, 128, 1, 4000, 64, 65], 5, 256
    how = {"group": schedule.ORDERS[order], "interleave": interleave, "split_last_wave": num_sms}
    items = schedule.items_of(counts, num_columns, **how)
    runs = schedule.simulate(items, depth, num_sms)
    assert [run.item for run in runs] == items

    halves = Counter()  # of all rows: a whole item counts twice
    for item in items:
        halves[item.expert, item.column] += item.num_rows * (1 if item.half else 2)
    assert halves == {(e, c): 2 * n for e, n in enumerate(counts) if n for c in range(num_columns)}
    for sm in range(num_sms):
        mine = sorted((run.start, run.end) for run in runs if run.sm == sm)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    assert sum(run.start == 0 for run in runs) == min(num_sms, len(runs))


def test_an_item_lasts_as_long_as_its_product_or_its_bytes():
    """One SM, and an expert whose second row tile finds the weight in L2."""
    depth = 1024
    long, short = schedule.simulate(schedule.items_of([129], 1), depth, num_sms=1)
    weight, row = depth * 512, depth * 2
    assert (long.bytes_read, short.bytes_read) == (weight + 128 * row, row)
    for run in (long, short):
        product = 2 * 128 * 256 * depth / schedule.ARITHMETIC
        reading = run.bytes_read / schedule.MEMORY_OF_SM
        assert run.end - run.start == pytest.approx(max(product, reading) + schedule.EPILOGUE)


def test_equal_items_are_taken_by_turns():
    runs = schedule.simulate(schedule.items_of([128 * 40], 5), depth=8192, num_sms=7)
    assert [run.sm for run in runs] == [number % 7 for number in range(200)]


def test_who_is_through_takes_from_who_is_behind():
    """Every second item is of few rows, so that one SM of two has all that last long."""
    items = schedule.items_of([128 * 30] + [1] * 30, 1)
    assert [item.few for item in items] in ([False, True] * 30, [True, False] * 30)
    runs = schedule.simulate(items, depth=16384, num_sms=2)
    (first, last), longest = (
        sorted(max(r.end for r in runs if r.sm == sm) for sm in (0, 1)),
        max(r.end - r.start for r in runs),
    )
    assert last - first <= 2 * longest
    assert sum(run.sm != number % 2 for number, run in enumerate(runs)) >= 2


def test_few_rows_cost_the_tokens_that_a_swapped_product_has_room_for():
    for rows, room in ((1, 8), (8, 8), (9, 32), (33, 64), (64, 64)):
        assert schedule.multiplied_rows(*schedule.items_of([rows], 1)) == room
    assert [schedule.multiplied_rows(i) for i in schedule.items_of([128, 129], 1)] == [128, 128, 128]
    assert schedule.multiplied_rows(*schedule.items_of([100], 1, skinny_rows=128)) == 128
    assert schedule.multiplied_rows(*schedule.items_of([150], 1, tile_rows=192), 192) == 192


def test_halves_fill_the_last_turn():
    """Ten tiles on eight SMs: two turns, of which the second is cut to half its length."""
    half, whole = (
        max(run.end for run in schedule.simulate(schedule.items_of([256], 5, split_last_wave=h), 8192, 8))
        for h in (8, 0)
    )
    assert 0.7 < half / whole < 0.8


def test_sms_share_the_memory():
    """A hundred experts of one row are read no faster than the memory allows."""
    runs = schedule.simulate(schedule.items_of([1] * 100, 8), depth=2048)
    time = max(run.end for run in runs)
    read = sum(run.bytes_read for run in runs)
    assert 0.8 < read / schedule.MEMORY / time < 1


def test_interleaving_hides_the_experts_with_few_rows():
    for group in schedule.ORDERS.values():
        spread, last = (time_of(WORST, 3584, 2560, group=group, interleave=i) for i in (True, False))
        assert spread < 0.9 * last


def test_groups_read_less_than_columns():
    def read(order):
        items = schedule.items_of([32768], 16, group=schedule.ORDERS[order])
        return sum(run.bytes_read for run in schedule.simulate(items, 2048))

    assert read("grouped") < 0.5 * read("column")


@pytest.mark.parametrize("routing", ["random", "balanced", "worst", "zipf:1.2"])
def test_every_token_has_its_experts(routing):
    sizes = schedule.layer_sizes("300,8,3,16,16")
    counts = schedule.rows_of_experts(routing, sizes)
    assert (len(counts), sum(counts)) == (8, 900)
    assert max(counts) <= 300
    assert counts == schedule.rows_of_experts(routing, sizes)
    if routing == "balanced":
        assert max(counts) - min(counts) <= 1
    if routing == "worst":
        assert counts == [300] * 3 + [0] * 5


def test_shapes_have_names_in_a_checkout():
    if not schedule.SHAPES.exists():
        pytest.skip("not in a checkout")
    assert schedule.layer_sizes("dsv2-lite") == (16384, 64, 6, 2048, 1408)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--shape", "huge"), "--shape: expected T,E,K,D,F from 1 up with K <= E.*found huge"),
        (("--shape", "1,2,3,4"), "--shape: expected T,E,K,D,F"),
        (("--shape", "8,2,3,4,4"), "with K <= E"),
        (("--shape", "8,0,0,4,4"), "from 1 up"),
        (("--shape", SMALL, "--routing", "zipf"), "--routing: expected random, .*found zipf"),
        (("--shape", SMALL, "--routing", "zipf:x"), "--routing: expected random, .*found zipf:x"),
        (("--shape", SMALL, "--routing", "flat"), "--routing: expected random, .*found flat"),
        (("--shape", SMALL, "--few-rows", "200"), "skinny_rows: expected 0 to tile_rows = 128, found 200"),
        (("--shape", SMALL, "--group", "0"), "group: expected at least 1, found 0"),
        (("--shape", SMALL, "--sms", "0"), "sms: expected 1 to 256, found 0"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(SystemExit, match=message):
        schedule.main([*flags, "-o", "not written.png"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        schedule.main(["--help"])
    assert "python -m fused_moe.schedule" in capsys.readouterr().out


def test_matplotlib_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="needs matplotlib"):
        schedule.main(["--shape", SMALL])
