"""tools/schedule.py: the model's schedule holds together, and the picture is drawn."""

import importlib.util
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "schedule.py"
if not SCRIPT.exists():
    pytest.skip("not in a checkout", allow_module_level=True)
spec = importlib.util.spec_from_file_location("schedule", SCRIPT)
schedule = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schedule)

WORST = [1] * 63 + [32768 - 63]  # of 64 experts, with K = 3584 and N = 2560
SMALL = "256,16,2,512,256"


def time_of(counts, depth, width, num_sms=132, **order):
    tiles = schedule.work_tiles(counts, width // schedule.TILE_N, **order)
    return max(run.end for run in schedule.simulate(tiles, depth, num_sms))


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
def test_the_order_is_the_librarys():
    """Row tiles, groups and interleaving have the sm90 tier's sizes by default."""
    tile_rows, group, interleave = schedule.ops.default_order()
    assert schedule.ORDERS == {"linear": 1, "grouped": group, "column": 2**31 - 1}
    options = schedule.parse(["--shape", SMALL])
    assert (options.tile_rows, options.group, options.interleave) == (tile_rows, group, interleave)
    counts, order = [5000, 3, 0, 700], {"tile_rows": tile_rows, "group": group, "interleave": interleave}
    assert schedule.work_tiles(counts, 3) == schedule.work_tiles(counts, 3, **order)
    tiles = schedule.work_tiles(counts, 3, interleave=False)
    assert tiles[:group] == [(0, tile_rows * i, tile_rows, 0, 0, 0) for i in range(group - 2)] + [
        (0, tile_rows * i, tile_rows, 1, 0, 0) for i in range(2)
    ]


@pytest.mark.parametrize("routing", ["zipf:1.2", "worst"])
@pytest.mark.parametrize("gemm", ["up_gate", "down"])
def test_a_picture_is_drawn(draw, capsys, routing, gemm):
    flags = ("--shape", SMALL, "--routing", routing, "--gemm", gemm)
    assert draw(*flags) == b"\x89PNG\r\n\x1a\n"
    sentence, path = capsys.readouterr().out.splitlines()
    assert sentence.startswith("A model of an H200 runs ") and path.endswith("schedule.png")


@pytest.mark.parametrize("routing", ["balanced", "zipf:1.2", "zipf:3", "worst"])
def test_no_two_texts_overlap(routing):
    """All texts are inside of the picture and beside each other, whatever the legend and the ticks are."""
    Text = pytest.importorskip("matplotlib.text").Text
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    sizes = schedule.layer_sizes("dsv2-lite")._replace(num_tokens=2048)
    tiles = schedule.work_tiles(schedule.rows_of_experts(routing, sizes), 8)
    figure = schedule.draw(schedule.simulate(tiles, sizes.dim), sizes.dim, 132, "a title\nof two lines")
    FigureCanvasAgg(figure).draw()
    ticks = [(axis, t) for a in figure.axes for axis in (a.xaxis, a.yaxis) for t in axis.get_major_ticks()]
    out_of_view = {
        id(label)
        for axis, tick in ticks
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in out_of_view
    ]
    boxes = {(t.get_text(), i): t.get_window_extent() for i, t in enumerate(texts)}
    assert {"time (\N{MICRO SIGN}s)", "SM number"} <= {text for text, _ in boxes}
    for name, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0, name
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, name
    assert not [(a, b) for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]


def test_the_caption_tells_the_figures():
    runs = schedule.simulate(schedule.work_tiles([128], 1), depth=1024, num_sms=2)
    time, read = runs[0].end, runs[0].bytes_read / 1e9
    assert schedule.caption(runs, 2) == (
        f"A model of an H200 runs 1 work tiles on 2 SMs in {time:.0f} \N{MICRO SIGN}s, with the SMs busy for "
        f"50.0% of the time, and reads {read:.2f} GB from memory."
    )


@pytest.mark.parametrize("order", schedule.ORDERS)
def test_every_flag(draw, order):
    sizes = ("--tile-rows", "64", "--group", "2", "--sms", "7", "--seed", "3")
    assert draw("--shape", SMALL, "--order", order, "--no-interleave", *sizes)


@pytest.mark.quick
@pytest.mark.parametrize("order", schedule.ORDERS)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("num_sms", [1, 7, 132])
def test_every_tile_runs_once_on_an_sm_of_its_own(order, interleave, num_sms):
    counts, num_n_tiles, depth = [700, 3, 0, 128, 1, 4000, 64, 65], 5, 256
    order = {"group": schedule.ORDERS[order], "interleave": interleave, "split_last_wave": num_sms}
    tiles = schedule.work_tiles(counts, num_n_tiles, **order)
    runs = schedule.simulate(tiles, depth, num_sms)
    assert [run.tile for run in runs] == tiles

    halves = Counter()  # of all rows: a whole N tile counts twice
    for tile in tiles:
        halves[tile.expert, tile.n_tile] += tile.num_rows * (1 if tile.n_half else 2)
    assert halves == {(e, n): 2 * rows for e, rows in enumerate(counts) if rows for n in range(num_n_tiles)}
    for sm in range(num_sms):
        spans = sorted((run.start, run.end) for run in runs if run.sm == sm)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert sum(run.start == 0 for run in runs) == min(num_sms, len(runs))


def test_a_tile_lasts_as_long_as_its_mmas_or_its_bytes():
    """One SM, and an expert whose second row tile hits the weight in L2."""
    depth = 1024
    missing, hitting = schedule.simulate(schedule.work_tiles([129], 1), depth, num_sms=1)
    weight, row = depth * 512, depth * 2
    assert (missing.bytes_read, hitting.bytes_read) == (weight + 128 * row, row)
    for run in (missing, hitting):
        mmas = 2 * 128 * 256 * depth / schedule.FLOPS_PER_SM
        reading = run.bytes_read / schedule.BANDWIDTH_PER_SM
        assert run.end - run.start == pytest.approx(max(mmas, reading) + schedule.EPILOGUE)


def test_equal_tiles_run_round_robin():
    runs = schedule.simulate(schedule.work_tiles([128 * 40], 5), depth=8192, num_sms=7)
    assert [run.sm for run in runs] == [index % 7 for index in range(200)]


def test_an_idle_sm_steals():
    """Every second tile is skinny, so round-robin alone would give one SM of two all full ones."""
    tiles = schedule.work_tiles([128 * 30] + [1] * 30, 1)
    assert [tile.skinny for tile in tiles] in ([0, 1] * 30, [1, 0] * 30)
    runs = schedule.simulate(tiles, depth=16384, num_sms=2)
    first, last = sorted(max(run.end for run in runs if run.sm == sm) for sm in (0, 1))
    assert last - first <= 2 * max(run.end - run.start for run in runs)
    assert sum(run.sm != index % 2 for index, run in enumerate(runs)) >= 2


def test_swap_ab_computes_the_rows_that_its_wgmma_has():
    for rows, n in ((1, 8), (8, 8), (9, 32), (33, 64), (64, 64)):
        assert schedule.mma_rows(*schedule.work_tiles([rows], 1)) == n
    assert [schedule.mma_rows(tile) for tile in schedule.work_tiles([128, 129], 1)] == [128, 128, 128]
    assert schedule.mma_rows(*schedule.work_tiles([65], 1)) == 128
    assert schedule.mma_rows(*schedule.work_tiles([150], 1, tile_rows=192), 192) == 192


def test_splitting_fills_the_last_wave():
    """Ten tiles on eight SMs: two waves, and the second takes half as long."""
    split, whole = (
        max(run.end for run in schedule.simulate(schedule.work_tiles([256], 5, split_last_wave=n), 8192, 8))
        for n in (8, 0)
    )
    assert 0.7 < split / whole < 0.8


def test_sms_share_the_memory():
    """A hundred experts of one row are read no faster than the bandwidth allows."""
    runs = schedule.simulate(schedule.work_tiles([1] * 100, 8), depth=2048)
    time = max(run.end for run in runs)
    read = sum(run.bytes_read for run in runs)
    assert 0.8 < read / schedule.BANDWIDTH / time < 1


def test_interleaving_hides_the_skinny_experts():
    for group in schedule.ORDERS.values():
        spread, last = (time_of(WORST, 3584, 2560, group=group, interleave=i) for i in (True, False))
        assert spread < 0.9 * last


def test_groups_read_less_than_columns():
    def read(order):
        tiles = schedule.work_tiles([32768], 16, group=schedule.ORDERS[order])
        return sum(run.bytes_read for run in schedule.simulate(tiles, 2048))

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


def test_shapes_have_names():
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
        (("--shape", SMALL, "--tile-rows", "0"), "expected tile_rows from 1 to .*, found 0"),
        (("--shape", SMALL, "--group", "0"), "expected group from 1 to .*, found 0"),
        (("--shape", SMALL, "--sms", "0"), "expected ctas from 1 to 512, found 0"),
        (("--shape", SMALL, "--sms", "513"), "expected ctas from 1 to 512, found 513"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(SystemExit, match=message):
        schedule.main([*flags, "-o", "not written.png"])


def test_help(capsys):
    with pytest.raises(SystemExit):
        schedule.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "python tools/schedule.py" in text and "dsv2-lite" in text
    for default in ("random", "up_gate", "grouped", "128", "132", "schedule.png"):
        assert f"default: {default}" in text


def test_matplotlib_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="^the picture needs matplotlib: pip install matplotlib"):
        schedule.main(["--shape", SMALL])
