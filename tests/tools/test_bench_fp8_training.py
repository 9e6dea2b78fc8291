"""bench_fp8_training.py, on the CPU."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SMALL = "24,8,2,128,128"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="not in a checkout")

WAYS = ["experts", "fp8", "fp8, every 8th", "fp8, wgrad bf16", "fp8, wgrad bf16, every 8th"]
OPERATORS = [
    *(("experts", name) for name in ("route_plan", "experts_up", "experts_down")),
    *(("experts", name) for name in ("experts_down_backward", "experts_up_backward")),
    *(("fp8", name) for name in ("quantise w1, w3", "quantise w2")),
    *(("fp8", name) for name in ("fp8_up", "fp8_down", "fp8_down_backward", "fp8_up_backward")),
    ("fp8", "fp8_up_weights_backward"),
    *(("fp8, wgrad bf16", name) for name in ("fp8_down_backward", "fp8_up_weights_backward")),
]


@pytest.mark.parametrize(
    "shape, gated", ((SMALL, True), ("nemotron3-nano", False), ("kimi-k3-16ranks", True))
)
def test_each_way_has_a_record(load, run, monkeypatch, tmp_path, capsys, shape, gated):
    """All of one run, with the shape's activation and errors of everything that has a gradient."""
    common = load("common")
    monkeypatch.setattr(common, "layer_sizes", lambda name: common.Sizes(24, 8, 2, 128, 128))
    records = run("bench_fp8_training", "--shape", shape, "--peers", "loop", "--quick")
    assert [r["what"] for r in records] == WAYS
    names = {"out", "dx", "dscores", "dw1", "dw2", *(["dw3"] if gated else [])}
    for r in records:
        assert set(r) >= {*common.FIELDS} and r["time_us"] > 0
        assert (r["bench"], r["tokens"], r["dtype"], r["mode"]) == ("fp8_training", 24, "bf16", "eager")
        flops = 6 * (2 + gated) * 24 * 2 * 128 * 128
        assert r["tflops"] == pytest.approx(flops / r["time_us"] / 1e6, rel=0.05, abs=1e-4)
        assert set(r["errors"]) == names and r["max_rel_error"] == pytest.approx(
            max(r["errors"].values()), 0.01
        )
        layer = r["time_us"] + r["router_us"]
        assert r["ratio_to_loop"] == pytest.approx(r["time_us_loop"] / layer, rel=0.05, abs=1e-3)
        assert r["joules"] is r["peak_mib"] is None
    experts, every, eighth, *_ = records
    assert experts["max_rel_error"] < 1e-2 and "ratio_to_bf16" not in experts
    for r in records[1:]:
        assert r["ratio_to_bf16"] == pytest.approx(experts["time_us"] / r["time_us"], rel=0.05, abs=1e-3)
        assert 2e-2 < r["errors"]["out"] < 0.15 and r["auto_wgrad"] == "bf16"
        assert r["time_us"] * 8 > r["quantise_us"] > 0
        elements = (2 + gated) * 8 * 128 * 128
        assert r["copies_mib"] == round(2 * elements * (1 + 4 / 128**2) / 2**20, 1)
    assert [(r["fp8_wgrad"], r["quantised_every"]) for r in records[1:]] == [
        (wgrad, every) for wgrad in ("fp8", "bf16") for every in (1, 8)
    ]
    assert every["errors"] == eighth["errors"] != records[3]["errors"]
    assert every["errors"]["out"] == records[3]["errors"]["out"]
    capsys.readouterr()
    load("table").main([str(tmp_path / "bench_fp8_training.json")])
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("against bf16", "MiB of copies", "fp8, wgrad bf16, every 8th"))


def test_operators_of_a_step(run):
    """By the names of their operators, with a rate each but for the plan."""
    records = run("bench_fp8_training", "--shape", SMALL, "--tokens", "24,9", "--parts")
    assert [r["tokens"] for r in records] == [T for T in (24, 9) for _ in (*WAYS, *OPERATORS)]
    parts = [r for r in records if r["bench"] == "fp8_training_parts" and r["tokens"] == 24]
    assert [(r["layer"], r["what"]) for r in parts] == OPERATORS
    shares = {"up": 4, "down": 2, "down_backward": 4, "up_backward": 8, "up_weights_backward": 4}
    for r in parts:
        kind = r["what"].removeprefix("fp8_").removeprefix("experts_")
        if kind in shares:
            share = 4 if r["what"] == "fp8_up_backward" else shares[kind]
            exact = share * 24 * 2 * 128 * 128 / r["time_us"] / 1e6
            assert r["tflops"] == pytest.approx(exact, rel=0.05, abs=1e-4)
        if kind == "quantise w2":
            moved = 8 * 128 * 128 * 4 + 2 * 8 * 4
            assert r["gb_per_s"] == pytest.approx(moved / r["time_us"] / 1e3, rel=0.05, abs=0.06)


def test_what_fp8_does_not_train(run, capsys):
    """Other widths are left out, and other dtypes are refused."""
    with pytest.raises(FileNotFoundError):
        run("bench_fp8_training", "--shape", "3,4,2,40,128")
    assert "is left out: expected multiples of 128, found D = 40" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run("bench_fp8_training", "--shape", SMALL, "--dtype", "fp16")


def test_a_wrong_way_is_not_timed(load, run, monkeypatch, capsys):
    """The other shapes still run, and the program fails."""
    bench = load("bench_fp8_training")
    right = bench.Case.step

    def wrong(self, wgrad, codes=True):
        found = right(self, wgrad, codes)
        if wgrad == "bf16" and self.sizes.num_tokens == 24:
            found["dw2"] = found["dw2"] * 1.2
        return found

    monkeypatch.setattr(bench.Case, "step", wrong)
    with pytest.raises(
        SystemExit, match="24 tokens, fp8, wgrad bf16 bf16: wrong before it is fast.*dw2 2.[0-9]e-01"
    ):
        run("bench_fp8_training", "--shape", SMALL, "--tokens", "24,9")
    assert "9 tokens  0" in capsys.readouterr().out


def test_joules_of_a_counter_that_moves_seldom(load, monkeypatch):
    """500 W and steps of 2 ms are 1 J, wherever in a step the counter moves."""
    profiling, clock, done = load("profiling"), itertools.count(), []

    def now():
        return next(clock) * 1e-4

    class Event:
        def record(self):
            self.end = max(done[-1] if done else 0, now()) + 2e-3
            done.append(self.end)

        def query(self):
            return now() >= self.end

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(profiling, "energy_counter", lambda: lambda: now() // 0.03 * 0.03 * 500)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert profiling.joules(lambda: None) == pytest.approx(1, rel=0.05)
    monkeypatch.setattr(profiling, "energy_counter", lambda: lambda: 7.0)
    assert profiling.joules(lambda: None) is None
    monkeypatch.setattr(profiling, "energy_counter", lambda: None)
    assert profiling.joules(lambda: None) is None
