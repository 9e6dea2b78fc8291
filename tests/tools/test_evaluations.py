"""benchmarks/evaluations.py, and what bench_evaluations.py computes without a GPU: orders, counters."""

from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evaluations.md"
SMALL = "24,8,2,64,32"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")


@pytest.fixture
def pages(load):
    return load("evaluations")


def test_the_page_has_what_the_program_prints(pages, tmp_path, capsys):
    pages.main(["--page", str(PAGE), "--check"])
    pages.main([])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed and printed == [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("| 1.02 ms, 9.1x |", "| 1.03 ms, 9.1x |"))
    with pytest.raises(SystemExit, match="out of date"):
        pages.main(["--page", str(page), "--check"])
    pages.main(["--page", str(page)])
    assert page.read_text() == PAGE.read_text()


def test_records_fill_the_tables(pages, run, monkeypatch):
    """Those of a GPU have the names of the evaluations' own shapes; without records nothing is measured."""
    found, records = [], pages.records
    monkeypatch.setattr(pages, "records", lambda name: found if name == pages.MEASURED else records(name))
    assert pages.static_table(found).count(pages.MISSING) == 12
    few = "--shape", SMALL, "--tokens", "1,2"
    for system in range(1, 6):
        found += run("bench_evaluations", "--system", str(system), *few)
    for r in found:
        r["tier"] = "hopper" if r["tier"] == "cpu" else r["tier"]
        r["torch_ratio"] = r["torch_ratio"] or 1.25
        if r["system"] == 3:
            r |= {"shape": "mixtral-8x7b", "launches": 3} if "model" not in r else {"model": "mixtral-8x7b"}
        if r["layer"] == "shared expert":
            r["tokens"] = pages.SHARED_TOKENS[r["tokens"] - 1]
    texts = pages.tables()
    for r in (r for r in found if r["system"] == 4 and r["layer"] == "gather"):
        cell = f"{r['tflops'] / pages.PEAK:.1%}, {r['dense_ratio']:.2f}, 1.25x"
        assert f" {cell} |" in texts["static"]
    assert texts["static"].count(pages.MISSING) == 0 and "a CPU" in texts["orders"]
    assert texts["shared"].count(pages.MISSING) == 0 and texts["shared"].count("same") == 2
    assert texts["experts"].count(pages.MISSING) == 2  # the CPU has one order
    first = next(r for r in found if r["layer"] == "layer" and r["system"] == 3)
    assert f"| {first['time_us'] / 1e3:.3g} ms, {first['ratio_to_loop']:.1f}x | " in texts["layers"]
    assert "| gate only, gelu | " in texts["modes"]


def test_orders_of_experts(load):
    """Each expert has a place of its own; all orders have the tiles of the kernels' and add no bytes."""
    bench = load("bench_evaluations")
    slots = bench.expert_slots([1, 9, 5, 7])
    assert slots["alternating"] == [1, 0, 3, 2]  # 9 1 7 5
    assert slots["half intervals"] == [3, 0, 1, 2]  # 9 5 7 1
    assert all(sorted(places) == [*range(37)] for places in bench.expert_slots([*range(37)]).values())
    counts = [640, 1, 640, 1]
    usual = bench.modelled(counts, 512, 512)
    assert usual == bench.modelled(counts, 512, 512, interleave=True)
    idle = [4096] * 8 + [1] * 56
    last, apart = (bench.modelled(idle, 2560, 3584, apart=apart, interleave=False) for apart in (False, True))
    assert apart["model_us"] < 0.9 * last["model_us"]
    for places in bench.expert_slots(counts).values():
        found = bench.modelled(counts, 512, 512, places, interleave=False)
        assert found["model_us"] > 0 and 0 <= found["model_l2_hits"] < 1


CSV = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","grouped_mm_kernel","lts__t_sector_hit_rate.pct","%","71.5"
"0","grouped_mm_kernel","dram__bytes_read.sum","Mbyte","1,234.5"
"1","grouped_mm_kernel","lts__t_sector_hit_rate.pct","%","n/a"
"""


@pytest.mark.parametrize(
    "program, said",
    (
        (None, "ncu is not installed"),
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'", "==ERROR== ERR_NVGPUCTRPERM - no permission"),
        ("true", "ncu counted 0 kernels, expected 1"),
        (f"cat <<'END'\n{CSV}END", "ncu counted 2 kernels, expected 1"),
    ),
    ids=["missing", "refused", "silent", "too many"],
)
def test_why_nothing_is_counted(load, monkeypatch, tmp_path, program, said):
    bench = load("bench_evaluations")
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\n{program}\n")
    ncu.chmod(0o755)
    monkeypatch.setattr(bench, "find_ncu", lambda: program and str(ncu))
    assert bench.counted(1, bench.OWN, "bf16", 1) == said


def test_counters_of_kernels(load):
    bench = load("bench_evaluations")
    assert bench.read_counters(CSV) == [{"l2_hits": 71.5, "dram_read_bytes": 1234.5e6}, {}]
    assert bench.read_counters("==ERROR== none") == []


@pytest.mark.parametrize("system, calls", ((1, 4), (2, 6)))
def test_what_ncu_counts(load, run, monkeypatch, system, calls):
    """One call of grouped_mm for each order, in the order of the records."""
    bench, asked = load("bench_evaluations"), []
    monkeypatch.setattr(bench, "ordered", lambda run, order: lambda: (asked.append(order), run()))
    flags = f"--system {system} --shape {SMALL} --dtype bf16 --device cpu --profiled"
    bench.main(flags.split())
    orders = bench.ORDERS if system == 1 else bench.FEW_ORDERS
    assert len(asked) == calls and [*dict.fromkeys(asked)] == [*orders]


def test_settings_are_put_back(load, monkeypatch):
    """A call under a schedule reads the environment again, and so do the calls after it."""
    bench = load("bench_evaluations")
    seen = []
    monkeypatch.setattr(bench.torch.ops.fused_moe, "cuda_reset", lambda: seen.append(bench.os.environ.copy()))
    bench.ordered(lambda: None, "linear")()
    bench.usual(SimpleNamespace(device="cuda", tier="hopper"))
    assert [env["FUSED_MOE_SCHEDULE"] for env in seen] == ["order=linear", ""]
    assert seen[1]["FUSED_MOE_TIER"] == "hopper"
