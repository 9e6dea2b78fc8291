"""benchmarks/: every program runs on the CPU, and its inputs and records are what it documents.

The shapes are tiny: no time is checked. Skipped without a checkout, as when the tests run against an
installed wheel.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fused_moe
from fused_moe.activation import ACTIVATIONS
from fused_moe.quantized import formats

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = (
    *("bench_layer", "bench_gemm", "bench_kernels", "bench_transformers", "bench_continuous_batching"),
    *("bench_torchtitan", "bench_vllm", "first_call"),
    *(
        "bench_host",
        "bench_decode",
        "bench_eight_bits",
        "bench_fp8_training",
        "bench_linear",
        "bench_quantised",
        "compare_builds",
        "table",
        "plot",
    ),
)
SMALL = "192,8,2,64,32"
FIELDS = {
    *("bench", "shape", "routing", "tier", "schedule", "mode", "dtype", "what", "time_us", "tflops"),
    *("dense_ratio", "torch_ratio", "peer", "peer_ratio", "activation_mib", "peak_mib", "max_rel_error"),
    *("gpu", "torch", "cuda", "commit", "date"),
}
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="not in a checkout")


def rows_of(logits, top_k):
    """Rows of each expert, by the layer's own choice."""
    _, ids = fused_moe.route(logits, top_k)
    return ids.flatten().bincount(minlength=logits.size(1))


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(load, capsys, name):
    with pytest.raises(SystemExit) as left:
        load(name).main(["--help"])
    assert left.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_layer_leaves_records_with_every_field(run):
    records = run("bench_layer", "--shape", SMALL, "--routing", "balanced", "--peers", "loop,torch")
    assert [(r["dtype"], r["what"]) for r in records] == [
        (dtype, what) for dtype in ("fp32", "bf16") for what in ("forward", "forward_backward")
    ]
    for r in records:
        assert set(r) >= FIELDS
        assert (r["bench"], r["shape"], r["tier"], r["gpu"]) == ("layer", SMALL, "cpu", "none")
        assert r["schedule"] == "default"
        assert r["time_us"] > 0 and r["dense_ratio"] > 0 and r["ratio_to_loop"] > 0
        assert r["peer"] in ("loop", "torch")
        assert r["max_rel_error"] < 1e-2


def test_a_peer_that_is_missing_is_named(run, capsys):
    records = run("bench_layer", "--shape", SMALL, "--dtype", "fp32", "--peers", "scattermoe,sonicmoe")
    printed = capsys.readouterr().out
    for name in ("scattermoe", "sonicmoe"):
        if importlib.util.find_spec(name) is None:
            assert f"{name} is left out: {name} is not installed" in printed
            assert f"ratio_to_{name}" not in records[0]


def test_products(run):
    records = run("bench_gemm", "--shape", SMALL, "--shape", "100,10,16,24", "--dtype", "bf16")
    layer = ["up_gate", "down", "up_dgrad", "dgrad_down", "down_dgrad", "wgrad_up", "wgrad_down"]
    assert [r["what"] for r in records] == [*layer, *["grouped_mm"] * 3]
    assert [r["routing"] for r in records[-3:]] == ["balanced", "best", "worst"]
    for r in records:
        assert set(r) >= FIELDS
        assert r["torch_ratio"] is None
        assert r["dense_ratio"] > 0 and 0 < r["max_rel_error"] < 1e-2


def test_products_of_several_routings(run):
    records = run(
        "bench_gemm", "--shape", SMALL, "--shape", "20,2,8,8", "--dtype", "fp32", "--what", "down", "--what",
        "grouped_mm", "--routing", "balanced", "--routing", "zipf:1.2",
    )  # fmt: skip
    found = [(r["what"], r["routing"]) for r in records]
    plain = [("grouped_mm", name) for name in ("balanced", "best", "worst")]
    assert found == [("down", "balanced"), ("down", "zipf:1.2"), *plain]


def test_dense_layers(run, capsys):
    """Both sides, with and without backward, and as many tokens as out's size allows."""
    records = run("bench_linear", "--shape", "24,40", "--tokens", "1,3,17")
    found = [(r["what"], r["tokens"]) for r in records]
    assert found == [(what, T) for what in ("forward", "forward_backward") for T in (1, 3, 17)]
    for r in records:
        assert set(r) >= FIELDS
        assert (r["bench"], r["shape"], r["dtype"]) == ("linear", "24,40", "bf16")
        assert r["cublas_us"] / r["time_us"] == pytest.approx(r["dense_ratio"], rel=0.1)
        assert r["cublas_bits"] in ("same", "other") and 0 < r["max_rel_error"] < 1e-2
        num_products = 1 if r["what"] == "forward" else 3
        tflops = num_products * 2 * r["tokens"] * 24 * 40 / r["time_us"] / 1e6
        assert r["tflops"] == pytest.approx(tflops, rel=0.1, abs=1e-4)
    assert all(r["cublas_bits"] == "same" for r in records if r["tokens"] == 17)
    assert "17 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", (None, "out", "dx"))
def test_bits_of_dense_layers(load, wrong):
    """Rows that change with the batch are seen, in backward those of dx, too."""
    bench = load("bench_linear")

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x.new_full((x.size(0), weight.size(0)), wrong == "out" and x.size(0) == 3)

        @staticmethod
        def backward(ctx, dout):
            x, weight = ctx.saved_tensors
            return torch.full_like(x, wrong == "dx" and x.size(0) == 3), torch.zeros_like(weight)

    operands = bench.Operands((24, 40), 4, "fp32", "cpu")
    for what in ("forward", "forward_backward"):
        few, largest = (operands.rows(Product.apply, what, T) for T in (3, 4))
        seen = wrong == "out" or (wrong == "dx" and what == "forward_backward")
        assert bench.same_bits(few, largest) == (not seen)


def test_other_bits_of_ours_end_the_program(load, monkeypatch):
    bench = load("bench_linear")
    linear, operands = torch.nn.functional.linear, bench.Operands
    monkeypatch.setattr(fused_moe, "linear", lambda x, weight: linear(x, weight) + (x.size(0) == 3))
    monkeypatch.setattr(
        bench, "Operands", lambda sizes, tokens, dtype, _: operands(sizes, tokens, dtype, "cpu")
    )
    options = argparse.Namespace(tokens=[3, 4], device="cuda")
    with pytest.raises(SystemExit, match="forward 3 tokens: other bits than in a batch of 4"):
        list(bench.measure("24,40", "fp32", options))


@pytest.mark.parametrize("shape", ("qkv,1", "24", "1,2,3"))
def test_wrong_shapes_of_dense_layers(run, shape):
    with pytest.raises(SystemExit, match=f"--shape: expected IN,OUT or one of qkv, .*, found {shape}"):
        run("bench_linear", "--shape", shape)


@pytest.mark.parametrize(
    "name, flags, said",
    (
        ("bench_gemm", ("--order", "column"), "order=column"),
        ("bench_gemm", ("--expert-order", "in-turn", "--tails", "off"), "experts=in-turn,tails=off"),
        ("bench_decode", ("--order", "linear"), "order=linear"),
    ),
)
def test_the_cpu_has_one_schedule(run, monkeypatch, name, flags, said):
    """Flags of the tile schedule are refused there, and a variable for CUDA kernels is in no record."""
    with pytest.raises(SystemExit, match=f"expected --device cuda with flags .*, found cpu with {said}"):
        run(name, "--shape", SMALL, "--dtype", "fp32", *flags)
    assert "FUSED_MOE_SCHEDULE" not in os.environ
    monkeypatch.setenv("FUSED_MOE_SCHEDULE", said)
    (r, *_) = run(name, "--shape", SMALL, "--dtype", "fp32")
    assert r["schedule"] == "default"


def test_schedules_stand_beside_each_other(load, run, tmp_path, capsys, monkeypatch):
    """A flag sets FUSED_MOE_SCHEDULE, --append keeps both records, and --gains compares them."""
    flags = ("--shape", SMALL, "--dtype", "fp32", "--what", "down", "--append")
    run("bench_gemm", *flags)
    assert "FUSED_MOE_SCHEDULE" not in os.environ
    # As if the CPU were a GPU, which has schedules.
    common = load("common")
    record, set_schedule, on_cpu = common.record, common.set_schedule, common.machine("cpu")
    gpu = argparse.Namespace(device="cuda", tier="cpu")
    monkeypatch.setattr(common, "machine", lambda device: on_cpu)
    monkeypatch.setattr(common, "record", lambda options, **measured: record(gpu, **measured))
    monkeypatch.setattr(common, "set_schedule", lambda options, **asked: set_schedule(gpu, **asked))
    run("bench_gemm", *flags, "--order", "column")
    schedule = "order=linear,experts=in-turn,tails=off"
    chosen = ("--tails", "off", "--order", "linear", "--expert-order", "in-turn")
    records = run("bench_gemm", *flags, *chosen)
    assert os.environ["FUSED_MOE_SCHEDULE"] == schedule
    assert [r["schedule"] for r in records] == ["default", "order=column", schedule]
    assert schedule in capsys.readouterr().out

    path = tmp_path / "bench_gemm.json"
    for r, ratio in zip(records, (0.8, 0.6, 1.0), strict=True):
        r["dense_ratio"] = ratio
    path.write_text(json.dumps(records))
    load("table").main([str(path), "--gains"])
    header, _, row = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-3:])
    assert [name.strip(" |") for name in header[-2:]] == ["order=column", schedule.replace(",", ", ")]
    assert [cell.strip(" |") for cell in row[-3:]] == ["0.80", "0.75x", "1.25x"]
    load("table").main([str(path)])
    assert "| order=column" in capsys.readouterr().out
    path.write_text(json.dumps(records[1:]))
    load("table").main([str(path), "--gains"])
    assert "no GEMM was measured on the default schedule" in capsys.readouterr().out


def test_the_first_call(load, run, capsys):
    (r,) = run("first_call", "--shape", SMALL, "--dtype", "bf16")
    assert set(r) >= FIELDS
    assert r["what"] == "up_gate_grouped_mm" and r["processes"] == 1
    assert (
        r["over_later_us"] == r["over_later_us_worst"] == pytest.approx(r["time_us"] - r["later_us"], abs=1)
    )
    assert "us over a later call" in capsys.readouterr().out


def test_the_first_call_is_a_gpus(load):
    """Unless the CPU is asked for by name."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="--device cuda: "):
        load("first_call").main([])


def test_kernels(run):
    records = run("bench_kernels", "--shape", SMALL, "--routing", "zipf:1.2", "--dtype", "bf16")
    names = "router_logits route route_backward route_plan route_and_plan permute combine unpermute_backward"
    assert [r["what"] for r in records] == names.split()
    for r in records:
        assert set(r) >= FIELDS
        assert r["gb_per_s"] >= 0 and r["copy_ratio"] >= 0 and r["copy_gb_per_s"] > 0
        assert r["torch_ratio"] is None and r["graph_us"] is None


def test_activations(run):
    records = run("bench_kernels", "--shape", SMALL, "--dtype", "bf16", "--activations")
    assert [(r["what"], r["layer"]) for r in records] == [
        (what, name) for what in ("up_gate", "down_dgrad") for name in ACTIVATIONS
    ]
    for r in records:
        assert set(r) >= FIELDS and r["time_us"] > 0
        assert r["layer"] != "silu" or r["silu_ratio"] == 1


def test_a_wrong_result_is_not_timed(load):
    error = load("common").Error()
    error.add("out", torch.ones(4), torch.ones(4))
    error.add_equal("ids", torch.arange(3), torch.arange(3))
    assert error.check("shape", "fp32") == 0
    error.add("dx", torch.full((4,), 1.1), torch.ones(4))
    with pytest.raises(SystemExit, match=r"wrong before it is fast.*dx 1\.0e-01"):
        error.check("shape", "bf16")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_expert_per_token(run, dtype):
    """Renormalised, its score is constant and the router's gradient is zero: no error is relative to that."""
    records = run("bench_layer", "--shape", "192,8,1,64,32", "--dtype", dtype)
    assert [r["what"] for r in records] == ["forward", "forward_backward"]


@pytest.mark.parametrize(
    "exact, found, error",
    [(1e-17, 1e-6, 1e-6), (1e-17, 0.1, 0.1), (1e-6, 1.1e-6, 0.1)],
    ids=["rounding", "wrong", "not all cancel"],
)
def test_an_error_where_all_terms_cancel(load, exact, found, error):
    """It is relative to the terms, but only there."""
    ours = load("common").Error()
    ours.add("dgate", torch.full((4,), found), torch.full((4,), exact), terms=torch.ones(4))
    if error < 1e-5:
        assert ours.check("K = 1", "fp32") == pytest.approx(error, rel=1e-3)
        return
    with pytest.raises(SystemExit, match=r"dgate 1\.0e-01"):
        ours.check("K = 1", "fp32")


def test_both_modes_of_a_layer_are_one_row(load, run, tmp_path, capsys):
    flags = ("--shape", SMALL, "--dtype", "fp32", "--mode", "queued", "--mode", "eager")
    eager = run("bench_layer", *flags)
    assert [(r["mode"], r["what"]) for r in eager] == [("eager", "forward"), ("eager", "forward_backward")]
    records = [r | {"mode": mode} for mode in ("queued", "eager") for r in eager]  # as a GPU has them
    for r in records:
        r |= {"time_us": 7000, "ratio_to_sonicmoe": 1.25, "torch_ratio": 2.5} if r["mode"] == "eager" else {}
    path = tmp_path / "bench_layer.json"
    capsys.readouterr()
    path.write_text(json.dumps(records))
    load("table").main([str(path)])
    text = capsys.readouterr().out
    assert ", queued, fp32" in text and "| mode" not in text
    rows = [line for line in text.splitlines() if line.startswith("| 192")]
    assert [row.rsplit("|", 2)[1].strip() for row in rows] == ["7000 µs, 1.25x SonicMoE, 2.50x PyTorch"] * 2
    records[2]["commit"] = "another"  # no longer of the same run
    path.write_text(json.dumps(records))
    load("table").main([str(path)])
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| 192")]) == 3


def test_each_gpu_has_a_table(load, tmp_path, capsys):
    """With SonicMoE's ratio and peak where it was timed, and the tiles that it chose from."""
    sonic = {"ratio_to_sonicmoe": 1.125, "peak_mib_sonicmoe": 4321.0, "about_sonicmoe": "SonicMoE, two tiles"}
    records = json.loads((BENCHMARKS / "results" / "layer_h200.json").read_text())
    queued = (r for r in records if r["mode"] == "queued")
    h200 = [{k: v for k, v in r.items() if k not in sonic} | {"peer": None} for r in queued]
    h100 = [r | {"gpu": "NVIDIA H100 80GB HBM3"} | sonic for r in h200]
    for name, records in (("h200", h200), ("h100", h100)):
        (tmp_path / f"{name}.json").write_text(json.dumps(records))
    load("table").main([str(tmp_path / "h200.json"), str(tmp_path / "h100.json")])
    first, second = capsys.readouterr().out.split("NVIDIA H100 80GB HBM3, ")
    assert first.startswith("NVIDIA H200, ") and "SonicMoE" not in first
    text = " ".join(second.split())
    assert "SonicMoE, two tiles." in text and "MiB at SonicMoE's peak | against SonicMoE |" in text
    assert text.count("| 4321 | 1.12x |") == len(h100)


QUACK = "kernel_cutlass_kernel_quackgemm_"
# One step's kernels as the profiler names them, ours and SonicMoE's, in order, and microseconds
STEP = {
    "ours": [
        ("router_logits_kernel<bf16>", 10),
        ("fused_moe::route_kernel<float, 4>", 5),
        ("void fused_moe::(anonymous namespace)::count_kernel(Sort)", 3),
        ("up_gate_kernel<Config>", 500),
        ("grouped_mm_kernel<Config>", 200),
        ("unpermute_kernel<bf16>", 50),
        ("down_dgrad_kernel<Config>", 300),
        ("dscores_kernel", 4),
        ("wgrad_kernel<Config>", 220),
        ("route_backward_kernel<float, 4>", 6),
        ("router_dgrad_kernel<bf16>", 11),
        ("nvjet_tst_64x8", 12),
        ("grouped_mm_kernel<Config>", 410),
        ("wgrad_kernel<Config>", 450),
        ("unpermute_kernel<bf16>", 60),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add>", 9),
        ("direct_copy_kernel_cuda", 1),
    ],
    "sonicmoe": [
        ("kernel_cutlass_kernel_sonicmoefunctionaltopkSoftmax_Over_TopK_object", 8),
        (f"{QUACK}actGemmGatedSm90_object_at", 520),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", 210),
        ("token_gather_sum_kernel", 45),
        (f"{QUACK}dactGemmDGatedSm90_object_at", 350),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", 230),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", 420),
        (f"{QUACK}default_epiGemmDefaultSm90_obje", 480),
        ("token_gather_sum_kernel", 55),
    ],
}


def fake_profile(load) -> list[dict]:
    """Records as bench_layer.py --profile writes them on a GPU."""
    profiling, common = load("profiling"), load("common")
    Floor = load("floors").Floor
    floors = {"up_gate": Floor(450, "dense"), "unpermute": Floor(40, "copy")}
    power = {"watts": 690.5, "sm_mhz": 1500, "joules": 1.5}
    records = []
    for layer, step in {**STEP, "dense": [("nvjet_tst", 1900)]}.items():
        launches = [profiling.Launch(name, us + i) for i in (0, 2) for name, us in step]
        found = profiling.measured(launches, floors, power)
        key = dict.fromkeys(common.FIELDS) | {"bench": "profile", "shape": "qwen3-30b", "routing": "random"}
        key |= {"tier": "hopper", "mode": "queued", "dtype": "bf16", "layer": layer, **common.machine("cpu")}
        records += [key | {"gpu": "NVIDIA H200"} | r for r in (found[-1:] if layer == "dense" else found)]
    return records


def test_kernels_of_a_step_by_kind(load):
    found = {layer: {} for layer in (*STEP, "dense")}
    for r in fake_profile(load):
        found[r["layer"]][r["what"]] = r
    us = {layer: {kind: r["time_us"] for kind, r in kinds.items()} for layer, kinds in found.items()}
    gemms = ("up_gate", "down", "down_dgrad", "wgrad_down", "up_dgrad", "wgrad_up")
    assert [us["ours"][kind] for kind in gemms] == [501, 201, 301, 221, 411, 451]
    assert [us["sonicmoe"][kind] for kind in gemms] == [521, 211, 351, 231, 421, 481]
    others = {"unpermute": 51, "unpermute_dx": 61, "router GEMMs": 36, "add": 10, "route": 6, "schedule": 4}
    others |= {"route_backward": 7, "dscores": 5, "rest": 2}
    assert {kind: value for kind, value in us["ours"].items() if kind not in (*gemms, "step")} == others
    assert (us["sonicmoe"]["unpermute"], us["sonicmoe"]["unpermute_dx"], us["sonicmoe"]["route"]) == (
        46,
        56,
        9,
    )
    for layer, step in STEP.items():
        assert us[layer]["step"] == sum(us + 1 for _, us in step)
    up_gate = found["ours"]["up_gate"]
    assert (up_gate["floor_us"], up_gate["gap_us"], up_gate["bound"], up_gate["launches"]) == (
        450,
        51,
        "dense",
        1,
    )
    assert found["ours"]["router GEMMs"]["launches"] == 3 and "floor_us" not in found["ours"]["down"]
    assert list(found["dense"]) == ["step"] and found["dense"]["step"]["watts"] == 690.5


def test_time_that_kernels_share_counts_once(load):
    """A dependent launch starts under the kernel before it; the last but one is over before that one."""
    kernels = [("spin_kernel", 0, 10), ("a", 8, 12), ("b", 11, 20), ("c", 13, 15), ("d", 25, 26)]
    launches = load("profiling").without_overlap(reversed(kernels))
    assert launches == [("a", 2), ("b", 8), ("c", 0), ("d", 1)]


@pytest.mark.parametrize("longest, gaps", ((0.5, 0), (2, 2), (5, 2), (6, 8)))
def test_gaps_between_kernels(load, longest, gaps):
    """They take 2 and 6; "c" is over before "b", at whose end the next gap begins."""
    kernels = [("a", 0, 10), ("b", 12, 20), ("c", 13, 15), ("d", 26, 27)]
    assert load("profiling").short_gaps(reversed(kernels), longest) == gaps


def test_kernels_out_of_order_keep_one_kind(load):
    """A third grouped_mm in a step: no telling which one is up_dgrad."""
    profiling = load("profiling")
    launches = [profiling.Launch("grouped_mm_kernel", us) for us in (1, 2, 3, 1, 2, 3)]
    assert profiling.us_by_kind(launches) == {"grouped_mm": 6}
    assert profiling.us_by_kind(launches[:4]) == {"down": 2, "up_dgrad": 1.5}


def test_kernels_of_two_launches_have_one_kind(load):
    """A wide wgrad computes half of the columns at a time."""
    profiling = load("profiling")
    launches = [profiling.Launch("wgrad_kernel", us) for us in (1, 2, 5, 6, 1, 2, 5, 6)]
    assert profiling.us_by_kind(launches) == {"wgrad_down": 3, "wgrad_up": 11}


def test_a_profile_as_table_and_picture(load, tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(fake_profile(load)))
    load("table").main([str(path), "--profile"])
    text = " ".join(capsys.readouterr().out.split())
    assert "| qwen3-30b | up_gate | 1 | 501 | 450 | 51 | 0.90 | 521 |" in text
    assert "| qwen3-30b | unpermute_dx | 1 | 61 | | | | 56 |" in text
    assert "| qwen3-30b | dense | 1901 | 690 | 1500 | 1.50 |" in text
    load("table").main([str(path)])
    assert not capsys.readouterr().out.strip()
    load("plot").main([str(path), "-o", str(tmp_path)])
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_power_is_of_the_last_third(load, monkeypatch):
    profiling = load("profiling")
    event = type("Event", (), {"record": lambda self: None, "synchronize": lambda self: time.sleep(0.002)})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    start = time.perf_counter()
    monkeypatch.setattr(profiling, "board", lambda: (600 if time.perf_counter() > start + 0.3 else 100, 1500))
    steps = []
    found = profiling.power(lambda: steps.append(time.perf_counter()), seconds=0.6, period=0.005)
    each = (steps[-1] - steps[0]) / len(steps)
    assert (found["watts"], found["sm_mhz"]) == (600, 1500)
    assert found["joules"] == pytest.approx(600 * each, rel=0.2)
    monkeypatch.setattr(profiling, "board", lambda: None)
    nothing = {"watts": None, "sm_mhz": None, "joules": None}
    assert profiling.power(lambda: None, seconds=0.05, period=0.005) == nothing


def test_floors_have_the_flops_of_whole_tiles(load, monkeypatch):
    """And the kernels' bytes: with a clock that counts, and a copy of no cost or of all, a floor is what it
    does."""
    floors, bench_layer, common = load("floors"), load("bench_layer"), load("common")
    case = bench_layer.Case(common.layer_sizes("512,2,2,256,256"), "random", "fp32", "cpu")
    assert case.counts == [512, 512]
    copied = [1e-9]

    def flops_of(clock, runs, repeats):
        found = {}
        for name, run in runs.items():
            with FlopCounterMode(display=False) as counter:
                run()
            found[name] = counter.get_total_flops() or copied[0]
        return found

    def by_kind():
        return floors.by_kind(case.sizes, case.settings, case.counts, case.dense_gemms, 1)

    monkeypatch.setattr(common, "times", flops_of)
    monkeypatch.setattr(floors, "MIB", 1)
    T, E, K, D, F = case.sizes
    up, down = 4 * T * K * D * F, 2 * T * K * D * F
    exact = {"up_gate": up, "down": down, "down_dgrad": down, "wgrad_down": down}
    exact |= {"up_dgrad": up, "wgrad_up": up}  # no tile is cut: dense's own FLOPs
    assert {kind: floor.us / 1e6 for kind, floor in by_kind().items() if floor.bound == "dense"} == exact
    assert sum(exact.values()) == case.flops("forward_backward")
    copied[0] = 2 * 1024 * 1e9  # a byte takes 1e9 s: every floor is its bytes
    found = by_kind()
    R, w = T * K, E * D * F
    elements = {
        "up_gate": T * D + 2 * w + R * 3 * F,
        "down": R * F + w + R * D,
        "down_dgrad": T * D + w + R * 5 * F,
        "wgrad_down": R * F + T * D + w,
        "up_dgrad": R * 2 * F + 2 * w + R * D,
        "wgrad_up": R * 2 * F + T * D + 2 * w,
        "unpermute": (R + T) * D,
    }
    assert {kind: found[kind].us / 1e15 / 4 for kind in elements} == pytest.approx(elements)
    assert all(floor.bound == "copy" for floor in found.values())
    assert set(found) <= set(load("profiling").ORDER)


@pytest.mark.parametrize(
    "counts, swapped, plain, sums",
    [([0, 1, 8, 9, 64], 8 + 8 + 32 + 64, 4 * 128, 4 * 64), ([65, 128, 129], 512, 512, 128 + 128 + 192)],
)
def test_floors_count_the_rows_of_tiles(load, counts, swapped, plain, sums):
    """And their columns: in grouped_mm and down_dgrad a last half tile is cheaper."""
    floors, common = load("floors"), load("common")
    sizes = common.Sizes(sum(counts), len(counts), 1, 320, 100)
    found = floors.gemms(sizes, common.Settings(), counts, sizes.num_tokens * 320, backward=True)
    flops = {kind: gemm.flops // 2 for kind, gemm in found.items()}
    assert flops == {
        "up_gate": swapped * 256 * 320,
        "down": swapped * 384 * 128,
        "down_dgrad": plain * 128 * 320,
        "wgrad_down": sums * 256 * 384,
        "up_dgrad": swapped * 384 * 256,
        "wgrad_up": sums * 256 * 384,
    }
    case = sizes, common.Settings(), counts, sizes.num_tokens * 320, 2
    only_flops = floors.layer_us(*case, 1.0, 1e30, backward=True)  # every byte in no time
    assert only_flops == 2 * sum(flops.values())
    only_bytes = floors.layer_us(*case, 1e30, 2.0, backward=True)
    moved = sum(floors.bytes_moved(sizes, 2).values()) + 2 * sum(gemm.elements for gemm in found.values())
    assert only_bytes == moved / 2 > floors.layer_us(*case, 1e30, 2.0, backward=False)
    small_cache = floors.gemms(
        sizes._replace(top_k=2), common.Settings(), [2 * n for n in counts], 1, backward=True
    )
    large_cache = floors.gemms(
        sizes._replace(top_k=2), common.Settings(), [2 * n for n in counts], 10**9, backward=True
    )
    read_again = {kind: gemm.elements - large_cache[kind].elements for kind, gemm in small_cache.items()}
    gathered = dict.fromkeys(("up_gate", "down_dgrad", "wgrad_down", "wgrad_up"), sizes.num_tokens * 320)
    assert read_again == {"down": 0, "up_dgrad": 0} | gathered
    plain_experts = floors.gemms(sizes, common.Settings(gated=False), counts, 1, backward=False)
    assert plain_experts["up_gate"].flops // 2 == swapped * 256 * 320
    assert set(plain_experts) == {"up_gate", "down"}


def test_a_profile_needs_a_gpu(run):
    with pytest.raises(SystemExit, match="--profile: expected a GPU"):
        run("bench_layer", "--shape", SMALL, "--profile")


def test_sonicmoe_chooses_from_the_tiles_that_are_said(load, monkeypatch):
    """With a stand-in for QuACK's tuning lists."""
    peers = load("peers")
    fields = ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n", "swap_ab")
    every = [
        SimpleNamespace(kwargs={"config": SimpleNamespace(**dict(zip(fields, values, strict=True)))})
        for values in product((128, 192, 256), (128, 192, 256), (False, True), (1, 2), (1, 2), (False, True))
    ]
    names = ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned")
    tuners = {name: SimpleNamespace(configs=list(every)) for name in names}
    quack = SimpleNamespace(gemm_interface=SimpleNamespace(**tuners))
    monkeypatch.setitem(sys.modules, "quack", quack)
    for _ in range(2):  # again for the next layer
        peers.restrict_tiles()
    for tuner in tuners.values():
        kept = {tuple(getattr(c.kwargs["config"], name) for name in fields) for c in tuner.configs}
        tiles = {(128, 256, False), (256, 128, False), (128, 192, True), (128, 128, True)}
        assert kept == {(*tile, 2, 1, False) for tile in tiles} and len(tuner.configs) == 4
    words = (
        "128x256 cooperative, 256x128 cooperative, 128x192 ping-pong, 128x128 ping-pong, in clusters of 2x1"
    )
    assert peers.tiles_in_words() == words


def test_routings_are_what_their_names_say(load):
    common = load("common")
    sizes = common.Sizes(4096, 16, 2, 64, 32)
    rows = {
        name: rows_of(common.routing_logits(name, sizes, "cpu"), 2)
        for name in ("balanced", "random", "zipf:1", "worst")
    }
    assert rows["balanced"].tolist() == [512] * 16
    assert (rows["random"] / 512 - 1).abs().max() < 0.25
    assert rows["worst"].tolist() == [4096] * 2 + [0] * 14
    first = common.routing_logits("zipf:1", sizes, "cpu").argmax(-1).bincount(minlength=16)
    share = 1 / torch.arange(1, 17)
    assert torch.allclose(first / 4096, share / share.sum(), atol=0.03)
    with pytest.raises(SystemExit, match="expected random, balanced"):
        common.routing_logits("uniform", sizes, "cpu")


def test_tokens_give_the_router_these_logits(load):
    common = load("common")
    logits = torch.randn(50, 8)
    x, gate = common.tokens_and_gate(logits, 32)
    torch.testing.assert_close(x @ gate.T, logits, rtol=0, atol=1e-4)


def test_distributions_of_plain_products(load):
    row_counts = load("bench_gemm").row_counts
    assert row_counts("balanced", 10, 4).tolist() == [3, 3, 2, 2]
    assert row_counts("best", 160, 10).tolist() == [20] * 8 + [0] * 2
    assert row_counts("worst", 160, 4).tolist() == [1, 1, 1, 157]


def test_shapes(load):
    common = load("common")
    assert common.layer_sizes("olmoe") == (16384, 64, 8, 2048, 1024)
    assert common.layer_sizes("1,2,3,4,5") == (1, 2, 3, 4, 5)
    assert common.layer_settings("nemotron3-nano") == ("relu2", False)
    assert common.layer_settings("olmoe") == common.layer_settings("1,2,3,4,5") == ("silu", True)
    assert set(common.MODELS) <= set(common.SHAPES["layers"])
    assert set(common.MODELS) <= set(re.findall(r"[\w.-]+", (BENCHMARKS / "measure.sh").read_text()))
    with pytest.raises(SystemExit, match="expected T,E,K,D,F or one of cpu-32-experts"):
        common.layer_sizes("gpt-5")


def test_records_with_the_same_key_are_replaced(load):
    common = load("common")
    key = dict.fromkeys(common.KEY, "same")
    old = [key | {"time_us": 1}, key | {"what": "other", "time_us": 2}]
    new = [key | {"time_us": 3}]
    assert common.merge(old, new) == [key | {"time_us": 3}, key | {"what": "other", "time_us": 2}]


def test_records_from_before_the_schedule_had_the_default(load):
    common = load("common")
    new = dict.fromkeys(common.KEY, "same") | {"schedule": "default"}
    old = {name: value for name, value in new.items() if name != "schedule"}
    other = new | {"schedule": "order=linear"}
    assert common.merge([old], [new, other]) == [new, other]
    assert common.schedule_of(old) == "default"


def test_append_keeps_the_others(run):
    flags = ("--shape", SMALL, "--dtype", "fp32", "--append")
    assert len(run("bench_kernels", *flags, "--what", "route")) == 1
    assert [r["what"] for r in run("bench_kernels", *flags, "--what", "permute")] == ["route", "permute"]


def test_a_commit_without_git(load, monkeypatch):
    common = load("common")
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert common.machine("cpu")["commit"] == "unknown"
    monkeypatch.setenv("COMMIT", "abc")
    assert common.machine("cpu")["commit"] == "abc"


def test_a_page_holds_the_committed_results(load):
    files = map(str, sorted((BENCHMARKS / "results").glob("layer_*.json")))
    load("table").main([*files, "--page", str(ROOT / "docs" / "performance.md"), "--check"])


def test_the_table_fills_the_markers(load, tmp_path):
    table, page = load("table"), tmp_path / "page.md"
    flags = [str(BENCHMARKS / "results" / "layer_cpu.json"), "--page", str(page)]
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    with pytest.raises(SystemExit, match="out of date"):
        table.main([*flags, "--check"])
    table.main(flags)
    table.main([*flags, "--check"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "old" not in text and "| 4096, 32, 4, 512, 256" in text
    page.write_text("no markers\n")
    with pytest.raises(SystemExit, match="performance: begin"):
        table.main(flags)


def test_plots(load, run, tmp_path):
    plot = load("plot")
    run("bench_gemm", "--shape", SMALL, "--dtype", "fp32", "--what", "down")
    run("bench_kernels", "--shape", SMALL, "--dtype", "fp32", "--what", "route")
    committed = BENCHMARKS / "results" / "layer_cpu.json"
    plot.main([*map(str, tmp_path.glob("*.json")), str(committed), "-o", str(tmp_path / "pictures")])
    for name in ("roofline.png", "ratios.png"):
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


TRAINER = """
import json, os, sys, time
settings = json.loads(os.environ["BENCH_TORCHTITAN"])
while not os.path.exists(settings["start_file"]):
    time.sleep(0.01)
if settings["variant"] == "loop":
    sys.exit("this one cannot")
if settings["variant"] == "grouped_mm" and "--training.local_batch_size=8" in sys.argv:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
ours, fp8 = ("--model.converters=" + name in sys.argv for name in ("fused_moe", "fused_moe_fp8"))
seed = int([flag for flag in sys.argv if flag.startswith("--debug.seed=")][0].split("=")[1])
with open(settings["record"], "w") as file:
    write = lambda entry: file.write(json.dumps(entry) + "\\n")
    for step in range(1, 41):
        seconds = 9 if step < 5 else 8 if step > 38 else 0.25 if ours else 0.2 if fp8 else 0.5
        loss = (5 if fp8 else 4 + seed) / step
        write({"step": step, "loss": loss, "grad_norm": 1, "seconds": seconds, "data_seconds": 0,
               "tokens": 1000, "peak_gib": 2, "profiled": step > 38})
    write({"profile": {"moe_us": 1 if ours else 3, "shared_experts_us": 1, "busy_us": 4 if ours else 6}})
    write({"model": {"moe": "MoE"}})
"""


@pytest.fixture
def titan(tmp_path):
    """A checkout whose trainer only writes torchtitan_spec.py's output."""
    trainer = tmp_path / "titan/torchtitan/train.py"
    trainer.parent.mkdir(parents=True)
    trainer.write_text(TRAINER)
    (tmp_path / "titan/assets").mkdir()
    (tmp_path / "titan/assets/version.txt").write_text("0.2.2\n")
    return tmp_path / "titan"


def test_torchtitan_in_three_variants(load, tmp_path, capsys, titan):
    """One variant fails; the others count."""
    path, work = tmp_path / "out.json", tmp_path / "work"
    flags = f"--torchtitan {titan} --steps 40 --profile 2 --nproc 1 --work {work} --json {path}"
    with pytest.raises(SystemExit, match="1"):
        load("bench_torchtitan").main([*flags.split(), "--ac", "full", "--compile"])
    assert "this one cannot" in capsys.readouterr().out
    stock, ours = json.loads(path.read_text())
    for r in (stock, ours):
        assert set(r) >= FIELDS
        assert (r["bench"], r["shape"]) == ("torchtitan", "16B6, 1 GPU, full AC, compiled, batch 4")
        assert (r["peak_mib"], r["timed_steps"], len(r["losses"]), r["torchtitan"]) == (2048, 32, 40, "0.2.2")
        assert r["final_loss"] == pytest.approx(sum(4 / step for step in range(37, 41)) / 4)
    assert (stock["what"], stock["time_us"], stock["tokens_per_second"]) == ("grouped_mm", 5e5, 2000)
    assert (ours["what"], ours["time_us"], ours["tokens_per_second"]) == ("fused_moe", 2.5e5, 4000)
    assert ours["ratio_to_grouped_mm"] == ours["peer_ratio"] == 2 and "ratio_to_loop" not in ours
    assert (ours["moe_time_over_grouped_mm"], ours["moe_share_over_grouped_mm"]) == (0.5, 0.75)
    assert ours["loss_over_grouped_mm"] == 1
    command = (work / "fused_moe_4/command").read_text()
    assert "--activation_checkpoint.mode=full" in command and "--compile.enable" in command
    texts = [json.loads(line)["text"] for line in (work / "text/data.json").open()]
    assert len(texts) > 1000 and max(map(len, texts)) == 4000
    assert any("def heappush(" in text for text in texts)
    assert stock["text"].startswith("Python 3.") and stock["text"].endswith("'s standard library")


def test_torchtitan_in_fp8_and_with_several_seeds(load, tmp_path, capsys, titan):
    """FP8's loss over that of the same seed, beside another seed's. The checkout's text is taken if there is
    some."""
    path, work, text = tmp_path / "out.json", tmp_path / "work", titan / "tests/assets/c4_test"
    text.mkdir(parents=True)
    (text / "data.json").touch()
    flags = (
        f"--torchtitan {titan} --steps 40 --nproc 1 --local-batch 2 --seeds 3,4 --json {path} --work {work}"
    )
    load("bench_torchtitan").main([*flags.split(), "--variants", "fused_moe,fused_moe_fp8"])
    usual, fp8, other = json.loads(path.read_text())
    assert [(r["what"], r["seed"]) for r in (usual, fp8, other)] == [
        ("fused_moe", 3),
        ("fused_moe_fp8", 3),
        ("fused_moe, seed 4", 4),
    ]
    assert usual["last_50_loss"] == pytest.approx(sum(7 / step for step in range(1, 41)) / 40)
    assert fp8["last_50_loss_over_fused_moe"] == pytest.approx(5 / 7, abs=1e-5)
    assert other["last_50_loss_over_fused_moe"] == pytest.approx(8 / 7, abs=1e-5)
    assert (fp8["ratio_to_fused_moe"], fp8["peak_mib_over_fused_moe"], other["ratio_to_fused_moe"]) == (
        1.25,
        1,
        1,
    )
    assert "last_50_loss_over_fused_moe" not in usual and usual["text"] == "the checkout's"
    assert "loss of the last 50 steps -28.571%" in capsys.readouterr().out
    assert not (work / "text").exists()
    assert "--debug.seed=4" in (work / "fused_moe_2_seed4/command").read_text()
    load("table").main([str(path)])
    assert "fused_moe, seed 4" in capsys.readouterr().out


def test_torchtitan_compares_seeds_of_fused_moe(load, capsys):
    with pytest.raises(SystemExit):
        load("bench_torchtitan").arguments("--torchtitan . --variants grouped_mm --seeds 0,1".split())
    assert "--seeds: expected fused_moe in --variants with several seeds" in capsys.readouterr().err


def test_torchtitan_in_several_batches(load, tmp_path, capsys, titan):
    """A batch that does not fit has a record, too. Later records of other variants get their ratios."""
    path = tmp_path / "out.json"

    usual = f"--torchtitan {titan} --nproc 1 --steps 40 --layers 27 --local-batch 8,1 --json {path} --append"
    for name in ("fused_moe", "grouped_mm"):
        load("bench_torchtitan").main([*usual.split(), "--variants", name, "--work", str(tmp_path / name)])
    found = {(r["what"], r["local_batch_size"]): r for r in json.loads(path.read_text())}
    assert len(found) == 4
    assert found["grouped_mm", 8]["failed"] == "CUDA out of memory"
    for (what, batch), r in found.items():
        assert set(r) >= FIELDS
        assert r["shape"] == f"16B6, 27 layers, 1 GPU, batch {batch}"
        command = (tmp_path / what / f"{what}_{batch}/command").read_text()
        assert f"--training.local_batch_size={batch} " in command
        assert ("failed" in r) == (r["time_us"] is None) == ((what, batch) == ("grouped_mm", 8))
    assert "grouped_mm batch  8  CUDA out of memory" in capsys.readouterr().out

    load("table").main([str(path)])
    rows = [[cell.strip() for cell in row.split("|")[2:-1]] for row in capsys.readouterr().out.splitlines()]
    assert rows[-4:] == [
        ["1", "fused_moe", "40", "4,000", "", "2,048", "0.1040", ""],
        ["1", "grouped_mm", "40", "2,000", "2.00x", "2,048", "0.1040", "1.0000"],
        ["8", "fused_moe", "40", "4,000", "", "2,048", "0.1040", ""],
        ["8", "grouped_mm", "40", "CUDA out of memory", "", "", "", ""],
    ]
    load("plot").main([str(path), "-o", str(tmp_path)])
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_after_fewer_steps_is_not_compared(load):
    table = load("table")
    same = {"shape": "16B6, 2 GPUs", "local_batch_size": 4, "commit": "a", "date": "b", "peak_mib": 1}
    runs = ("fused_moe", 40, 300, 2.0), ("grouped_mm", 40, 200, 2.0), ("loop", 20, 100, 3.0)
    names = ("what", "steps", "tokens_per_second", "final_loss")
    text = table.training([same | dict(zip(names, values, strict=True)) for values in runs])
    cells = [[cell.strip() for cell in row.split("|")] for row in text.splitlines()[2:]]
    assert [(row[3], row[6], row[9]) for row in cells] == [
        ("fused_moe", "", ""),
        ("grouped_mm", "1.50x", "1.0000"),
        ("loop", "3.00x", ""),
    ]


@pytest.mark.parametrize("batches", ["0", "4,-1", "4,,8", "four"])
def test_torchtitan_takes_positive_batches(load, capsys, batches):
    with pytest.raises(SystemExit):
        load("bench_torchtitan").arguments(["--torchtitan", ".", "--local-batch", batches])
    assert "--local-batch: expected positive integers" in capsys.readouterr().err


class Block(torch.nn.Module):
    """A single GEMM, and a layer with two GEMMs, one of them a shared expert's."""

    def __init__(self):
        super().__init__()
        self.own, self.moe = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.moe.shared_experts = torch.nn.Linear(8, 8, bias=False)
        self.moe.register_forward_hook(lambda moe, args, out: out + moe.shared_experts(args[0]))

    def forward(self, x):
        return x + self.moe(self.own(x))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_kernels_are_attributed_to_layers(load, tmp_path, again):
    """The GEMMs in a CPU trace, as if each had launched a kernel."""
    profiled = load("moe_profile")
    blocks = [Block(), Block()]
    marks = profiled.Marks([block.moe for block in blocks], blocks)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            out = x
            for block in blocks:
                out = checkpoint(block, out, use_reentrant=False) if again else block(out)
            out.mm(torch.ones(8, 1)).sum().backward()
    marks.remove()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    gemms = [e for e in events if e["name"] == "aten::mm"]
    for i, e in enumerate(gemms):
        launch = {"ph": "X", "args": {"correlation": i}, "dur": 0.001}
        events.append(launch | {"cat": "cuda_runtime", "name": "launch", "tid": e["tid"], "ts": e["ts"]})
        events.append(launch | {"cat": "kernel", "name": "mm", "tid": 7, "ts": 100 * i, "dur": 10})
    nccl = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "tid": 8, "ts": 105, "dur": 10}
    found = profiled.by_part([*events, nccl], marks.nodes, steps=2)
    each = 2 * (4 if again else 3) * 10  # two blocks; forward, backward twice, and perhaps forward again
    assert found["moe_us"] == found["shared_experts_us"] == each
    assert found["rest_us"] == each + 20  # the last GEMM's backward has only the input's gradient
    assert (found["communication_us"], found["moe_communication_us"], found["without_launch_us"]) == (5, 0, 5)
    assert found["busy_us"] == 3 * each + 20 + 2.5
    assert found["kernels"] == [["mm", each, each / 10]]


def test_builds_take_turns(load, tmp_path):
    """Each build has a process, or two in mirrored order; every other round begins with the other build."""
    builds = load("builds")
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import builds, fused_moe, sys\n"
        "def answer(path=None):\n"
        "    print(fused_moe.NAME, end=' ', flush=True, file=open(path or sys.exit(), 'a'))\n"
        "    return fused_moe.NAME\n"
        "builds.run(None, answer)"
    )
    for tree in ("old", "new"):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "fused_moe.py").write_text(f"NAME = {tree!r}")
    trees = [f"A={tmp_path / 'old'}", f"B={tmp_path / 'new'}"]
    for twice, order in ((False, "old new  new old"), (True, "old new new old  new old old new")):
        processes = builds.start(trees, str(script), twice=twice)
        answers = builds.in_turns(processes, 2, path=str(log))
        assert answers == {"A": len(processes) * ["old"], "B": len(processes) * ["new"]}
        assert log.read_text().split() == order.split()
        log.unlink()
    with pytest.raises(SystemExit, match="A: its process ended"):
        processes[0].ask()


def test_single_calls_have_two_parts(load, tmp_path):
    path = tmp_path / "out.json"
    flags = ["--build", f"HEAD={ROOT}", "--device", "cpu", "--rounds", "1", "--json", str(path)]
    load("bench_host").main(flags)
    records = json.loads(path.read_text())
    assert [r["what"] for r in records] == ["fused_experts", "fused_experts out=", "FusedMoE"]
    for r in records:
        assert (r["bench"], r["commit"], r["device"]) == ("host", "HEAD", "cpu")
        assert abs(r["operator_us"] + r["python_us"] - r["host_us"]) < 0.2


def test_builds_are_compared_with_the_first(load, tmp_path, monkeypatch, capsys):
    """Each build after the first has its records, with layers beside dense GEMMs, for any number of
    builds."""
    builds, compare_builds = load("builds"), load("compare_builds")
    microseconds = {"A": 100, "B": 80, "C": 50}

    class Process:
        def __init__(self, build):
            self.commit = build.split("=")[0]

        def ask(self, what="", shape="", **_):
            us = microseconds[self.commit]
            if shape:
                return None
            return {"up_gate": us / 2} if what == "kernels" else us / (2 if what.startswith("dense") else 1)

    def start(trees, script, *, twice):
        return [Process(build) for build in (*trees, *reversed(trees))]

    monkeypatch.setattr(builds, "start", start)
    path = tmp_path / "out.json"
    trees = [flag for name in microseconds for flag in ("--build", f"{name}=.")]
    compare_builds.main([*trees, "--shape", "olmoe", "--rounds", "3", "--json", str(path)])
    found = {(r["what"], r["new_commit"]): r for r in json.loads(path.read_text())}
    assert set(found) == {
        (what, new) for what in ("forward", "forward_backward", "up_gate") for new in "BC"
    }  # fmt: skip
    assert all(r["old_commit"] == "A" for r in found.values())
    assert (found["up_gate", "C"]["old_us"], found["up_gate", "C"]["new_us"]) == (50, 25)
    forward = found["forward", "B"]
    assert (forward["old_dense_ratio"], forward["new_dense_ratio"]) == (0.5, 0.625)
    assert "2.000 (0.500, 1.000 of dense)" in capsys.readouterr().out

    decode = ["--shape", "olmoe", "--tokens", "1,64", "--format", ",int4", "--json", str(path)]
    compare_builds.main([*trees, *decode])
    found = [
        (r["format"], r["tokens"], r["new_commit"], r["old_us"] / r["new_us"])
        for r in json.loads(path.read_text())
    ]
    expected = product(("", "int4"), (1, 64), (("B", 1.25), ("C", 2)))
    assert found == [(format, T, *new) for format, T, new in expected]


def test_few_tokens(load, run, tmp_path, capsys):
    """A record for each number of tokens, beside the floor and both peers; in a table and a picture."""
    flags = ("--tokens", "1,5", "--dtype", "bf16", "--peers", "loop,torch", "--routing", "worst")
    records = run("bench_decode", "--shape", SMALL, *flags)
    assert [(r["tokens"], r["what"], r["mode"]) for r in records] == [(n, "experts", "eager") for n in (1, 5)]
    for r in records:
        assert set(r) >= FIELDS and r["torch_ratio"] > 0 and r["ratio_to_loop"] > 0
        assert r["floor_ratio"] == pytest.approx(r["floor_us"] / r["time_us"], rel=0.05, abs=1e-3)
        # all tokens have the same 2 of 8 experts: 6 TKDF over three weights each
        assert r["intensity"] == round(6 * r["tokens"] * 2 * 64 * 32 / (2 * 3 * 64 * 32 * 2), 1)
    path = tmp_path / "bench_decode.json"
    capsys.readouterr()
    load("table").main([str(path)])
    table = capsys.readouterr().out
    assert "of the floor" in table and "| 5, 8, 2, 64, 32" in table
    load("plot").main([str(path), "-o", str(tmp_path)])
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flag, found",
    (
        ("--tokens=0,1", "found 0,1"),
        ("--peers=sglang", "vllm-invariant, marlin, humming, humming-grouped, found sglang"),
        ("--tp=3", "expected a divisor of F = 32, found 3"),
        ("--top-k=9", "K <= E"),
        ("--stride=63", "at least D = 64, found 63"),
        ("--routing=most", "worst, one or zipf:EXPONENT, found most"),
        ("--list-kernels", "expected a GPU"),
        ("--format=int4,int5", "fp8_block, fp8, int8, int4, mxfp4, found int5"),
        ("--local-tokens=0", "found 0"),
        ("--compute=int4", "codes, fp8, int8, int8_smooth, found int4"),
    ),
)
def test_wrong_flags_of_decode(run, capsys, flag, found):
    with pytest.raises(SystemExit) as stop:
        run("bench_decode", "--shape", SMALL, flag)
    assert found in f"{stop.value} {capsys.readouterr().err}"


def test_weights_of_layers_take_turns(load):
    """A wrong result is not timed, and each call has its own routing."""
    bench, common = load("bench_decode"), load("common")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(dtype="fp32"))
    seen = []
    case.run(lambda x, w, scores, ids: seen.append((w.w1.data_ptr(), ids.data_ptr())))
    assert len(seen) == 2 and len({w for w, _ in seen}) == 2 and len({i for _, i in seen}) == 2
    error = case.error(lambda x, w, scores, ids: x)
    with pytest.raises(SystemExit, match="wrong before it is fast"):
        error.check("3,8,2,64,32", "fp32")


def test_a_wrong_peer_is_left_out(load, capsys):
    bench, common = load("bench_decode"), load("common")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(dtype="fp32"))
    experts = bench.find_experts(case.setup, "loop")
    assert set(bench.checked(case, experts | {"wrong": lambda x, *rest: x}, "small")) == {"ours", "loop"}
    assert "small: wrong is left out: small wrong fp32: wrong before it is fast" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="small ours fp32"):
        bench.checked(case, {"ours": lambda x, *rest: x}, "small")


@pytest.mark.parametrize("gated", (True, False))
def test_weights_as_a_peer_stacks_them(load, gated):
    bench, common = load("bench_decode"), load("common")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(gated=gated, init="uniform", stride=72))
    w = case.weights[0]
    parts = [w.w1, w.w3] if gated else [w.w1]
    assert torch.equal(w.w13, torch.cat(parts, dim=1)) and w.w13.shape == (8, 32 * len(parts), 64)
    assert case.expert_bytes == (len(parts) + 1) * 64 * 32 * 2 and case.x.stride() == (72, 1)
    assert case.flops_of_a_call == 2 * (len(parts) + 1) * 3 * 2 * 64 * 32
    assert sum(a.size(0) * b.numel() * 2 for a, b in case.dense_gemms) == case.flops_of_a_call


@pytest.mark.parametrize(
    "shape, flags, asked",
    (
        ("deepseek-v3", ("--experts=8", "--dim=64", "--hidden-dim=32"), "128,8,8,64,32"),
        ("mixtral-8x7b", ("--dim=64", "--hidden-dim=64", "--tp=4", "--top-k=1"), "8192,8,1,64,16"),
        (SMALL, ("--tp=1",), SMALL),
    ),
)
def test_sizes_of_flags(run, shape, flags, asked):
    flags += ("--tokens", "3", "--dtype", "fp32", "--init", "zeros", "--seed", "5", "--warmup", "0")
    (r,) = run("bench_decode", "--shape", shape, *flags, "--activation", "gelu")
    assert (r["shape"], r["tokens"], r["init"], r["seed"], r["activation"]) == (asked, 3, "zeros", 5, "gelu")
    assert "gated" not in r and r["max_rel_error"] == 0


def test_own_tokens_of_a_batch(run):
    """A record for each number of them, of float weights and each format."""
    flags = ("--tokens", "5,9", "--local-tokens", "1,5", "--format", "int8", "--dtype", "bf16")
    records = run("bench_decode", "--shape", SMALL, *flags)
    assert [(r["tokens"], r["what"], r["local_tokens"]) for r in records] == [
        (T, what, own) for T in (5, 9) for what in ("experts", "int8") for own in (1, 5)
    ]
    for r in records:
        assert set(r) >= FIELDS and (r["bench"], r["layer"]) == (
            "decode_local",
            f"{r['local_tokens']} own tokens",
        )
        assert r["time_us"] > 0 and r["ratio_to_own"] > 0
    with pytest.raises(SystemExit, match="--local-tokens: expected at most T = 5, found 6"):
        run("bench_decode", "--shape", SMALL, "--tokens", "5", "--local-tokens", "6")


@pytest.mark.parametrize("wrong", (None, "own tokens", "padding"))
def test_padding_of_a_batch(load, wrong):
    """It is zeros, and own tokens have the output of their own batch."""
    bench, common, local_tokens = load("bench_decode"), load("common"), load("local_tokens")
    case = bench.Case(common.layer_sizes("7,8,2,64,32"), bench.Setup(dtype="fp32"))
    ours = bench.find_experts(case.setup, "")["ours"]

    def experts(x, w, scores, ids):
        out = ours(x, w, scores, ids)
        if len(x) == 7 and wrong:
            out[2 if wrong == "own tokens" else 3] += 1
        return out

    error = local_tokens.Batch(case, experts, case.weights).error(3)
    if wrong is None:
        assert error.check("7 tokens", "fp32") < 1e-5
        return
    with pytest.raises(SystemExit, match=f"7 tokens fp32: wrong before it is fast.*{wrong} ([1-9]|inf)"):
        error.check("7 tokens", "fp32")


def test_composable_kernels_default(run):
    """No up projection, gelu, 128 tokens, on peers as well."""
    flags = ("--dim", "64", "--hidden-dim", "32", "--dtype", "bf16", "--routing", "one")
    (r,) = run("bench_decode", "--shape", "ck-default", *flags, "--peers", "torch,loop")
    assert (r["shape"], r["tokens"], r["activation"], r["gated"]) == ("128,32,5,64,32", 128, "gelu", False)
    assert r["torch_ratio"] > 0 and r["ratio_to_loop"] > 0 and r["schedule"] == "default"


def test_formats_beside_the_float_weights(load, run, tmp_path):
    """A record for each, in table and picture beside that of the float weights."""
    flags = ("--tokens", "1,5", "--format", "fp8_block,int4,mxfp4")
    records = run("bench_decode", "--shape", SMALL, "--dtype", "bf16", *flags)
    names = (None, "fp8_block", "int4", "mxfp4")
    assert [(r["tokens"], r.get("format")) for r in records] == [(n, name) for n in (1, 5) for name in names]
    assert [r["what"] for r in records[:4]] == ["experts", "fp8_block", "int4 of 32", "mxfp4"]
    for r in records:
        assert set(r) >= FIELDS and r["time_us"] > 0
        if r.get("format"):
            assert r["bench"] == "decode_quantised" and r["ratio_to_bf16"] > 0
            assert r["floor_ratio"] == pytest.approx(r["floor_us"] / r["time_us"], rel=0.1, abs=1e-3)
            assert 0 < r["max_rel_error"] < 1e-2  # against the values that the weight stands for
            assert r["bytes"] == r["bits_per_weight"] / 8 * 3 * 8 * 64 * 32 or r["format"] == "fp8_block"
    assert (records[2]["group_size"], records[2]["symmetric"]) == (32, True)
    load("table").main([str(tmp_path / "bench_decode.json")])
    load("plot").main([str(tmp_path / "bench_decode.json"), "-o", str(tmp_path)])


def test_ways_of_computing_a_format(run):
    """A record for each that the format has, with the ratio to the others."""
    flags = ("--tokens", "3", "--format", "fp8_block,int8,int4", "--compute", "codes,fp8,int8_smooth")
    _, *records = run("bench_decode", "--shape", SMALL, "--dtype", "bf16", *flags)
    expected = [
        ("fp8_block", None),
        ("fp8_block", "fp8"),
        ("int8", None),
        ("int8", "int8_smooth"),
        ("int4", None),
    ]
    assert [(r["format"], r.get("compute")) for r in records] == expected
    for r in records:
        assert r["ratio_to_bf16"] > 0 and r["peer_errors"] == {}
        others = {"fp8_block": {"fp8"}, "int8": {"int8_smooth"}, "int4": set()}[r["format"]]
        others = {"codes"} if "compute" in r else others
        assert {name for name in r if name.startswith("ratio_to_")} == {
            f"ratio_to_{n}" for n in ("bf16", *others)
        }
        assert (1e-2 < r["max_rel_error"] < 0.08) if "compute" in r else r["max_rel_error"] < 1e-2
    ratios = [r[f"ratio_to_{name}"] for r, name in zip(records, ("fp8", "codes"), strict=False)]
    assert ratios[0] * ratios[1] == pytest.approx(1, abs=0.05, rel=0.2)
    with pytest.raises(SystemExit, match="expected some of codes, fp8 with --format fp8, found int8"):
        run("bench_decode", "--shape", SMALL, "--tokens", "3", "--format", "fp8", "--compute", "int8")


def test_ways_are_those_of_the_library(load):
    """COMPUTE and the variants of each, and bench_eight_bits.py's."""
    from fused_moe.quantized.computing import FORMATS_OF

    bench, eight_bits = load("bench_quantised"), load("bench_eight_bits")
    known = {(format, name) for name in bench.COMPUTE for format in FORMATS_OF[name]}
    assert {*FORMATS_OF} == {*bench.COMPUTE, "auto"}
    assert {(v.format, v.compute) for v in bench.VARIANTS} == known
    ways = {(way.weight_format, way.compute) for way in eight_bits.WAYS}
    assert ways == {way for way in known if way[0] in FORMATS_OF["auto"]} and {*eight_bits.USUAL} < {
        *eight_bits.WAYS
    }


def test_peers_of_a_format(load, run, monkeypatch, capsys, tmp_path):
    """Each has the weights in its own layout and its own tolerance; a wrong one is not timed."""
    peers = load("peers")

    def convert(w1, w2, w3):
        return peers.stacked(w1, w3, lambda w: w.dequantize()), w2.dequantize()

    def experts(x, weights, scores, ids):
        assert x.is_contiguous()
        return fused_moe.reference.fused_experts(x, *weights, None, scores, ids, layout="halves")

    def rough(x, weights, scores, ids):
        return 1.04 * experts(x, weights, scores, ids)

    found = {
        "marlin": peers.QuantisedPeer(convert, experts),
        "vllm": peers.QuantisedPeer(convert, rough, peers.FP8_ACTIVATIONS_BOUND),
        "wrong": peers.QuantisedPeer(convert, rough),
        "broken": peers.QuantisedPeer(lambda *weights: 1 / 0, experts),
    }
    monkeypatch.setattr(load("bench_decode"), "find_quantised_peers", lambda *asked: found)
    flags = ("--tokens", "3", "--dtype", "bf16", "--format", "int4", "--stride", "72")
    _, r = run("bench_decode", "--shape", SMALL, *flags)
    assert r["ratio_to_marlin"] > 0 and r["ratio_to_vllm"] > 0 and set(r["peer_errors"]) == {"marlin", "vllm"}
    assert r["peer_errors"]["marlin"] < 1e-2 < r["peer_errors"]["vllm"] < 0.05
    printed = capsys.readouterr().out
    assert "int4 of 32: wrong is left out: int4 of 32 wrong bf16: wrong before it is fast" in printed
    assert "int4 of 32: broken is left out: division by zero" in printed and "x marlin" in printed
    load("table").main([str(tmp_path / "bench_decode.json")])
    assert "against vLLM's Marlin" in capsys.readouterr().out


def test_peers_of_a_format_that_cannot_run(load, run, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "humming")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "humming", None)
    names = "marlin,vllm,humming,humming-grouped"
    flags = ("--tokens", "2", "--dtype", "bf16", "--format", "fp8,int8,fp8_block", "--peers", names)
    _, *records = run("bench_decode", "--shape", SMALL, *flags)
    assert [r["peer_errors"] for r in records] == [{}] * 3 and "ratio_to_marlin" not in records[-1]
    printed = capsys.readouterr().out
    assert "marlin is left out of int8: marlin: expected int4, mxfp4, fp8_block, found int8" in printed
    assert "vllm is left out of int8: vllm: expected fp8_block, found int8" in printed
    assert "humming is left out of fp8: humming: expected int4, int8, mxfp4, fp8_block, found fp8" in printed
    for name in names.split(","):
        library = name.split("-")[0].replace("marlin", "vllm")
        assert f"{name} is left out of fp8_block: {library} is not installed" in printed


@dataclass(frozen=True)
class HummingConfig:
    """The config of a weight (num_experts, rows, columns)."""

    num_experts: int
    rows: int
    columns: int


@dataclass
class HummingSchema:
    b_dtype: str
    bs_dtype: str | None
    weight_scale_group_size: int

    def convert_symmetric_integer_weight(self, tensors):
        return self, tensors


def humming_values(tensors, rows, columns, schema, *, num_experts, torch_dtype, device, **pads):
    """The values that Humming's words and scales stand for, in place of its layout."""
    data, scale = tensors["weight"].view(torch.uint8), tensors["weight_scale"].float()
    codes = data if "8" in schema.b_dtype else formats.nibbles(data)
    values = {
        "uint4": lambda: codes.float() - 8,
        "uint8": lambda: codes.float() - 128,
        "float4e2m1": lambda: formats._from_e2m1(codes),
        "float8e4m3": lambda: codes.view(torch.float8_e4m3fn).float(),
    }[schema.b_dtype]()
    assert values.shape == (num_experts, rows, columns)
    assert scale.size(2) == columns // (schema.weight_scale_group_size or columns)
    weight = values * scale.repeat_interleave(columns // scale.size(2), 2)
    return HummingConfig(num_experts, rows, columns), {"weight": weight, "weight_scale": scale}


def humming_rows(config, num_rows, gemm_type):
    return {"block_shape": (8 if config.rows > config.columns else 12, 64, 64)}


def humming_gemm(
    config, x, weight, weight_scale, locks, valid_shape_m, compute_config, tuning_config,
    sorted_ids=None, expert_ids=None, num_tokens_padded=None, expert_layout=None, top_k=1,
):  # fmt: skip
    kind, size = json.loads(compute_config)["gemm_type"], json.loads(tuning_config)["block_shape"][0]
    assert size == humming_rows(config, valid_shape_m, kind)["block_shape"][0]
    assert weight.shape == (config.num_experts, config.rows, config.columns)
    if kind == "grouped_contiguous":
        ends = expert_layout.tolist()
        return torch.cat([x[i:j] @ w.mT for i, j, w in zip(ends, ends[1:], weight, strict=False)])
    out = x.new_empty(valid_shape_m, config.rows)
    for block in range(int(num_tokens_padded) // size):
        slots = sorted_ids[block * size : (block + 1) * size].long()
        slots = slots[slots < valid_shape_m]
        out[slots] = x[slots // top_k] @ weight[expert_ids[block]].mT
    return out


def humming_activation(config, h, *, activation_type, activation_impl):
    gate, up = h.chunk(2, dim=1) if activation_type == "binary_split" else (h, 1)
    assert activation_impl == "a / (1.f + __expf(-a))" + " * b" * (activation_type == "binary_split")
    return torch.nn.functional.silu(gate) * up, None, None


def aligned(ids, num_experts, sizes):
    """What moe_align.align returns."""

    def blocks(size):
        slots = [(ids.flatten() == e).nonzero().flatten().tolist() for e in range(num_experts)]
        padded = [group + [ids.numel()] * (-len(group) % size) for group in slots]
        experts = [e for e, group in enumerate(padded) for _ in group[::size]]
        return torch.tensor(sum(padded, [])), torch.tensor(experts), torch.tensor([size * len(experts)])

    return tuple(map(blocks, sizes))


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("name", ("humming", "humming-grouped"))
@pytest.mark.parametrize("format", ("int4", "int8", "mxfp4", "fp8_block"))
def test_what_humming_is_given(load, monkeypatch, name, format, gated):
    """Its functions, here a loop over the blocks or the experts, get the values, the slots and the tile."""
    stand_in = {
        "humming": {},
        "humming.forward": {"humming_forward": humming_gemm, "may_process_input": humming_activation},
        "humming.schema": {"HummingWeightSchema": HummingSchema},
        "humming.transform": {"prepare_and_transform_humming_tensors": humming_values},
        "humming.tune": {"get_heuristics_config": humming_rows},
        "moe_align": {"align": aligned},
    }
    for module_name, contents in stand_in.items():
        module = ModuleType(module_name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module_name, module)
    bench, common, peers = load("bench_decode"), load("common"), load("peers")
    monkeypatch.setattr(peers, "parts", lambda shape: [slice(0, 3), slice(3, shape[0])])
    case = bench.Case(common.layer_sizes("9,5,2,128,256"), bench.Setup(dtype="fp32", gated=gated))
    layers = [case.weights[0].map(lambda w: fused_moe.quantize(w, format))]
    peer = peers.QUANTISED_PEERS[name](format, gated=gated)
    _, error = bench.convert_for(peer, case, layers, "stand-in")
    assert error < 1e-5
    narrow = fused_moe.quantize(torch.zeros(2, 96, 80), "int8")
    with pytest.raises(
        peers.Unavailable, match="expected widths that are multiples of .*, found D = 80, F = 96"
    ):
        peer.convert(narrow, narrow, None)
    with pytest.raises(peers.Unavailable, match="expected silu, gelu, gelu_tanh, found relu"):
        peers.humming(format, "relu")


ALIGN = """
import json, sys, torch
from moe_align import align
cases = json.load(sys.stdin)
found = [align(torch.tensor(ids, dtype=torch.int32), E, sizes) for ids, E, sizes in cases]
print(json.dumps([[[t.tolist() for t in blocks] for blocks in both] for both in found]))
"""


def test_blocks_of_one_expert(cpu):
    """Every slot occurs once, in blocks of its expert; padding of a block is past the last slot."""
    pytest.importorskip("triton")
    shapes = ((1, 8, 2), (70, 16, 3), (3, 1, 1), (600, 4, 2))
    cases = [
        (torch.rand(T, E).topk(K).indices.tolist(), E, sizes)
        for (T, E, K), sizes in product(shapes, ((8, 8), (8, 12)))
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", ALIGN]
    run = subprocess.run(command, env=env, input=json.dumps(cases), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for (ids, E, sizes), both in zip(cases, json.loads(run.stdout), strict=True):
        ids = torch.tensor(ids)
        expected_of = zip(both, aligned(ids, E, sizes), sizes, strict=True)
        for (rows, experts, num_rows), expected, size in expected_of:
            blocks = expected[0].view(-1, size).tolist()
            assert num_rows == expected[2].tolist()
            assert experts[: len(blocks)] == expected[1].tolist()
            found = [rows[i * size : (i + 1) * size] for i in range(len(blocks))]
            assert sorted(sum(found, [])) == sorted(sum(blocks, []))
            slot_experts = [*ids.flatten().tolist(), None]
            for e, block in zip(experts, found, strict=False):
                assert {slot_experts[slot] for slot in block} <= {e, None}


def test_formats_without_an_up_projection(run):
    flags = ("--gate-only", "--tokens", "2", "--format", "int8", "--dtype", "fp32")
    float_weights, int8 = run("bench_decode", "--shape", SMALL, *flags)
    assert int8["gated"] is False and int8["ratio_to_fp32"] > 0 and int8["max_rel_error"] < 1e-5
    assert int8["bytes"] == 8 * (2 * 64 * 32 + 4 * (64 + 32))  # codes, and a float32 scale for each row


@pytest.mark.parametrize("name", ("int4", "mxfp4"))
def test_a_width_that_a_format_does_not_take(run, name):
    message = f"--format {name}: expected widths that are multiples of 32, found D = 64, F = 48"
    with pytest.raises(SystemExit, match=message):
        run("bench_decode", "--shape", "3,8,2,64,48", "--tokens", "1", "--format", f"int8,{name}")


FLOATS = {"fp32": 4, "bf16": 2}
SMOOTH = "int8, compute int8_smooth"
VARIANTS = ["fp8_block", "fp8_block, compute fp8", "fp8", "fp8 per tensor", "fp8, compute fp8"]
VARIANTS += ["int8", "int8 per tensor", "int8, compute int8", SMOOTH, f"{SMOOTH}, calibrated"]
VARIANTS += ["int4 of 32", "int4 of 32, zero points", "mxfp4"]  # of widths that are no multiples of 128


def test_errors_of_formats(run, capsys):
    records = run("bench_quantised", "--shape", SMALL, "--quality")
    kinds = ("gaussian", "student t, 3 degrees", "outlier columns")
    kinds += ("x of student t", "x with outlier channels", "both of student t")
    expected = [(t, kind, name) for t in FLOATS for kind in kinds for name in (t, *VARIANTS)]
    assert [(r["dtype"], r["what"], r["layer"]) for r in records] == expected
    found = {(r["dtype"], r["what"], r["layer"]): r for r in records}
    for r in records:
        assert set(r) >= FIELDS and r["bench"] == "quantised_quality" and r["tokens"] == 256
        assert r["layer"].startswith(r["format"])
        is_float = r["format"] in FLOATS
        assert r["weight_error"] == 0 if is_float else 1e-3 < r["weight_error"] < 0.5
        assert r["output_error"] < 1e-2 if is_float else r["weight_error"] < r["output_error"] < 1
    for dtype, size in FLOATS.items():
        assert found[dtype, "gaussian", dtype]["bytes"] == size * 3 * 8 * 64 * 32
        # A normal distribution rounded to 127 steps of its largest value, and to a mantissa of 3 bits
        assert 0.005 < found[dtype, "gaussian", "int8"]["weight_error"] < 0.01
        assert 0.02 < found[dtype, "gaussian", "fp8"]["weight_error"] < 0.03
        zero_points = found[dtype, "gaussian", "int4 of 32, zero points"]
        assert (zero_points["group_size"], zero_points["symmetric"]) == (32, False)
        assert zero_points["bits_per_weight"] == 4 + (8 * size + 8) / 32
        assert found[dtype, "gaussian", "fp8 per tensor"]["per_tensor"] is True
        # What rounding x adds; and what a channel of 20 times the others costs codes with one scale per row
        output = {name: found[dtype, "x with outlier channels", name]["output_error"] for name in VARIANTS}
        assert output["fp8_block"] < output["fp8_block, compute fp8"] < 2 * output["fp8_block"]
        assert 2 * output["int8"] < output["int8, compute int8"]
        assert output[f"{SMOOTH}, calibrated"] < 0.7 * output[SMOOTH]
    printed = capsys.readouterr().out
    assert (
        "int4 of 128 is left out: expected widths that are multiples of 128, found D = 64, F = 32" in printed
    )
    (row,) = (r for r in printed.split(", random, bf16")[1].splitlines() if r.startswith("mxfp4"))
    r = found["bf16", "gaussian", "mxfp4"]
    assert row.split()[:4] == ["mxfp4", "4.25", f"{r['weight_error']:.2%}", f"{r['output_error']:.2%}"]


def test_random_weights(load):
    """All of a norm, with the tails that their names say."""
    bench, common = load("bench_quantised"), load("common")
    torch.manual_seed(0)
    largest = {}
    for kind in bench.VALUES:
        weights = bench.random_weights(kind, common.Sizes(1, 8, 2, 512, 256), torch.float32, "cpu")
        assert [tuple(w.shape) for w in weights] == [(8, 256, 512), (8, 512, 256), (8, 256, 512)]
        for w in weights:
            assert w.norm() == pytest.approx((w.numel() / w.size(2)) ** 0.5, rel=1e-4)
        scaled = weights[0] * 512**0.5
        largest[kind] = scaled.abs().max().item()
        if kind == "outliers":
            norms = scaled.square().mean((0, 1)).sort().values
            assert norms[-5] > 300 * norms[-6]
    assert largest["gaussian"] < 6 and largest["student t"] > 20


def test_times_of_formats(load, run, tmp_path, capsys):
    flags = ("--time", "--tokens", "1,5", "--format", "int4,fp8", "--compute", "codes,fp8")
    records = run("bench_quantised", "--shape", SMALL, *flags)
    names = ("fp8", "fp8 per tensor", "fp8, compute fp8", "int4 of 32", "int4 of 32, zero points")
    assert [(r["dtype"], r["tokens"], r["layer"]) for r in records] == [
        (dtype, n, name) for dtype in FLOATS for n in (1, 5) for name in (dtype, *names)
    ]
    for r in records:
        assert set(r) >= FIELDS and (r["bench"], r["what"], r["mode"]) == ("quantised", "forward", "eager")
        assert r["time_us"] > 0 and r["ratio_to_float"] > 0 and r["bytes"] > 0
        bound = 0.08 if "compute" in r else {"fp32": 1e-5, "bf16": 1e-2}[r["dtype"]]
        assert 0 < r["max_rel_error"] < bound
        assert r["ratio_to_float"] == 1 or r["format"] not in FLOATS
    assert "5 tokens" in capsys.readouterr().out
    flags = ("--quality", "--format", "fp8", "--compute", "codes", "--dtype", "fp32", "--append")
    again = run("bench_quantised", "--shape", SMALL, *flags)
    assert again[: len(records)] == records and len(again) == len(records) + 6 * 3
    load("table").main([str(tmp_path / "bench_quantised.json")])


def test_times_of_backward(run):
    flags = ("--backward", "--tokens", "5", "--format", "fp8_block,mxfp4")
    records = run("bench_quantised", "--shape", SMALL, *flags)
    names = ("fp8_block", "mxfp4", "fp8_block, trainable", "mxfp4, trainable")
    assert [(r["dtype"], r["layer"], r["what"]) for r in records] == [
        (dtype, name, "backward") for dtype in FLOATS for name in (dtype, *names)
    ]
    for r in records:
        assert r["time_us"] > 0 and 0 < r["max_rel_error"] < {"fp32": 1e-5, "bf16": 2e-2}[r["dtype"]]


def test_wrong_values_of_a_format_are_not_timed(load):
    bench = load("bench_quantised")
    weights = [torch.randn(4, 32, 32) for _ in range(3)]
    layer = [bench.Variant("mxfp4").quantise(w) for w in weights]
    x, scores, ids = torch.randn(3, 32), torch.ones(3, 1), torch.tensor([[0], [1], [3]])
    routed_x = (x, scores, ids)
    right = fused_moe.fused_experts(x, *layer, scores, ids)
    assert bench.checked_error(lambda: right, layer, routed_x, "mxfp4", "fp32") < 1e-5
    with pytest.raises(SystemExit, match="mxfp4 fp32: wrong before it is fast"):
        wrong = fused_moe.fused_experts(x, *weights, scores, ids)
        bench.checked_error(lambda: wrong, layer, routed_x, "mxfp4", "fp32")


@pytest.mark.parametrize(
    "flag, found",
    (
        ("--format=int5", "fp8_block, fp8, int8, int4, mxfp4, found int5"),
        ("--compute=codes,auto", "codes, fp8, int8, int8_smooth, found auto"),
        ("--tokens=0", "tokens, found 0"),
    ),
)
def test_wrong_flags_of_quantised(run, capsys, flag, found):
    with pytest.raises(SystemExit, match="2"):
        run("bench_quantised", flag)
    assert found in capsys.readouterr().err


def test_the_loss_of_a_model(load, run, tmp_path, monkeypatch, capsys):
    """The records of the example, with the machine."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train_lm = load("train_lm")
    monkeypatch.setattr(train_lm, "GENERATED_BYTES", 1)
    flags = "--layers 1 --dim 32 --hidden-dim 32 --num-experts 4 --top-k 2 --seq-len 16 --steps 1"
    train_lm.main([*flags.split(), "--device", "cpu", "--out", str(tmp_path)])
    capsys.readouterr()
    flags = ("--format", "fp8,int4,mxfp4")
    records = run("bench_quantised", "--model", str(tmp_path), *flags)
    names = ["float32", "fp8", "fp8, compute fp8", "int4 of 32", "int4 of 32, zero points", "mxfp4"]
    assert [r["layer"] for r in records] == names
    for r in records:
        assert set(r) >= FIELDS | {"format", "bytes"}
        assert (r["bench"], r["shape"], r["layers"], r["steps"]) == ("quantised_lm", "64,4,2,32,32", 1, 1)
        assert r["loss_change"] == r["loss"] - records[0]["loss"] and 1 < r["loss"] < 9
    printed = capsys.readouterr().out
    assert "bits per byte" in printed and f"{records[-1]['bytes']:,}" in printed
    names = ["float32", "fp8, compute fp8"]
    again = run("bench_quantised", "--model", str(tmp_path), "--format", "fp8,int4", "--compute", "fp8")
    assert [r["layer"] for r in again] == names


def test_validating_times_nothing(run, load, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load("common"), "times", None)
    path = tmp_path / "bench_decode.json"
    path.write_text("[]")
    flags = ("--tokens", "1,4", "--dtype", "fp32", "--validate", "--plot", str(tmp_path / "plot.png"))
    assert run("bench_decode", "--shape", SMALL, *flags) == []
    assert len(re.findall("tokens: ours .*e-.*, loop .*e-", capsys.readouterr().out)) == 2


def test_launches_of_a_call(load, monkeypatch, capsys):
    """Each is counted over all calls, and shared by their number."""
    bench, common, profiling = load("bench_decode"), load("common"), load("profiling")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), bench.Setup(dtype="fp32"))
    names = ("up_gate", "down", "up_gate", "down", "memset")
    found = [profiling.Launch(name, us) for us, name in enumerate(names, 1)]
    monkeypatch.setattr(profiling, "launches", lambda step, steps: found)
    bench.list_kernels(case, {"ours": lambda *args: None}, "small")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small, ours: 2.5 launches, 7.5 µs"
    assert [line.split() for line in lines[1:]] == [
        ["1.00", "3.0", "µs", "down"], ["0.50", "2.5", "µs", "memset"], ["1.00", "2.0", "µs", "up_gate"],
    ]  # fmt: skip
    monkeypatch.setattr(bench, "host_seconds", lambda run: 1e-5)
    told = bench.on_host({"ours": None, "torch": None, "vllm_invariant": None}, number=2)
    assert (told["launches"], told["host_us"]) == (2.5, 5)
    assert told["peer_launches"] == {"torch": 2.5, "vllm_invariant": 2.5} and len(told["peer_host_us"]) == 2


VLLM = "vllm.model_executor.layers.fused_moe"


def test_generate(load, run, capsys):
    """A model's generate() with either experts: the same tokens in float32."""
    pytest.importorskip("transformers")
    flags = "--generate --shape 1,8,2,64,32 --dtype fp32 --layers 2 --batch 1,3 --prompt 5 --new-tokens 4"
    records = run("bench_transformers", *flags.split())
    assert [r["batch"] for r in records] == [r["tokens"] for r in records] == [1, 3]
    for r in records:
        assert set(r) >= FIELDS
        assert (r["bench"], r["what"], r["layers"], r["mode"]) == ("generate", "generate", 2, "eager")
        assert r["same_tokens"] == 1 and r["max_rel_error"] < 1e-5
        assert r["tokens_per_s"] == pytest.approx(r["batch"] / r["time_us"] * 1e6, abs=0.1)
        assert r["tokens_per_s"] / r["tokens_per_s_default"] == pytest.approx(r["ratio_to_default"], rel=0.01)
    assert f"{records[1]['tokens_per_s']:.1f} tokens/s" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run("bench_transformers", "--generate", "--batch", "1,0")
    assert "numbers of sequences, found 1,0" in capsys.readouterr().err


def test_wrong_experts_do_not_generate(load, monkeypatch):
    transformers = pytest.importorskip("transformers")
    bench, common = load("bench_transformers"), load("common")
    options = SimpleNamespace(layers=1, device="cpu", hidden_act="silu")
    ours = bench.two_models(common.layer_sizes("1,8,2,64,32"), torch.float32, options)["ours"]
    registry = transformers.modeling_utils.ALL_EXPERTS_FUNCTIONS
    right = registry["fused_moe"]
    monkeypatch.setitem(registry, "fused_moe", lambda *args: 1.01 * right(*args))
    with pytest.raises(SystemExit, match="wrong before it is fast: out 1.0e-02"):
        bench.error_of_experts(ours, 2).check("generate", "fp32")


def test_continuous_batching(run, capsys):
    """generate_batch with either experts: the same tokens in float32."""
    pytest.importorskip("transformers")
    flags = "--shape 1,8,2,64,32 --dtype fp32 --layers 2 --requests 1,3 --prompt 20 --new-tokens 4"
    records = run("bench_continuous_batching", *flags.split())
    assert [r["requests"] for r in records] == [r["tokens"] for r in records] == [1, 3]
    for r in records:
        assert set(r) >= FIELDS
        assert (r["bench"], r["what"], r["layers"]) == ("continuous_batching", "generate_batch", 2)
        assert (r["mode"], r["default_experts"]) == ("eager", "grouped_mm")
        assert r["same_tokens"] == 1 and r["max_rel_error"] < 1e-5
        assert r["tokens_per_s"] / r["tokens_per_s_default"] == pytest.approx(r["ratio_to_default"], rel=0.01)
        for name, end in (("ours", ""), ("default", "_default")):
            for field in ("first_token_ms", "tokens_per_s"):
                assert r["samples"][name][field] == [r[field + end]]  # of one repeat
        assert r["first_token_ratio"] == pytest.approx(
            r["first_token_ms_default"] / r["first_token_ms"], abs=0.001
        )
    assert "first token after" in capsys.readouterr().out


def test_the_table_of_continuous_batching(load, capsys, tmp_path):
    """Columns of other engines are left out."""
    said = {"gpu": "NVIDIA H100", "torch": "2.11.0", "cuda": "13.0", "tier": "hopper", "mode": "eager"}
    said |= {"bench": "continuous_batching", "shape": "qwen3-30b", "what": "generate_batch", "dtype": "bf16"}
    said |= {"layers": 12, "prompt": 512, "date": "2026-11-27", "default_experts": "grouped_mm", "tokens": 8}
    said |= {"tokens_per_s": 3000.4, "tokens_per_s_default": 2000, "peer_ratio": 1.5, "first_token_ms": 20}
    said |= {"first_token_ms_default": 25, "first_token_ratio": 1.25, "transformers": "5.17.0"}
    said |= {"intensity": None, "dense_ratio": None, "torch_ratio": None, "routing": "random", "cpu": "a"}
    path = tmp_path / "records.json"
    path.write_text(json.dumps([said, said | {"mode": "graphs", "tokens": 64}]))
    load("table").main([str(path)])
    *_, eager, graphs = capsys.readouterr().out.splitlines()
    model = "qwen3-30b, 12 layers, bf16, prompts up to 512"
    cells = ["grouped_mm", "8", "20.0 against 25.0", "1.25x", "3,000 against 2,000", "1.50x"]
    assert [cell.strip() for cell in eager.split("|")[1:-1]] == [model, *cells]
    assert [cell.strip() for cell in graphs.split("|")[1:4]] == [f"{model}, CUDA graphs", "grouped_mm", "64"]
    load("plot").main([str(path), "-o", str(tmp_path)])
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_ragged(load):
    """From a sixteenth of the longest to all of it, the same in every run."""
    random_prompts = load("bench_continuous_batching").random_prompts
    prompts = random_prompts(200, 64)
    lengths = {len(prompt) for prompt in prompts}
    assert (min(lengths), max(lengths)) == (4, 64) and len(lengths) > 40
    assert prompts == random_prompts(200, 64)


def test_a_request_that_ends_early_is_not_timed(load):
    bench = load("bench_continuous_batching")
    pytest.importorskip("transformers")
    out = SimpleNamespace(generated_tokens=[5], error="no room", created_time=0.0, timestamps=[1.0])
    model = SimpleNamespace(generate_batch=lambda *args, **settings: {"a": out})
    options = SimpleNamespace(device="cpu", prompt=4, cuda_graphs=False)
    with pytest.raises(SystemExit, match=r"expected 2 tokens of each request, found \[1\]; \{'no room'\}"):
        bench.serve(model, [[1, 2]], 2, options)


ENGINE = """
import json, os, sys, time
from types import ModuleType, SimpleNamespace
__version__ = "0.33.0"
plugin = ModuleType("fused_moe.vllm")
plugin.register = lambda: print("INFO [report.py:9] fused_moe runs the experts of 2 of 2 MoE layers")
sys.modules["fused_moe.vllm"] = plugin
INVARIANT = os.environ["VLLM_BATCH_INVARIANT"] == "1"
OURS = os.environ["FUSED_MOE_VLLM"] == "1"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, dtype, max_model_len, **settings):
        config = json.load(open(model + "/config.json"))
        print(json.dumps([config, dtype, max_model_len, settings]))
        if "quantization_config" in config and INVARIANT:
            sys.exit("this one cannot")
        print("INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: [].")
        print("INFO [unquantized.py:1] Using TRITON Unquantized MoE backend out of potential backends: [].")
        if not INVARIANT:
            print("INFO [fused_moe.py:1] Using configuration from /configs/E=128.json for MoE layer.")

    def generate(self, prompts, sampling, use_tqdm):
        if len(prompts) == 77:
            time.sleep(600)
        time.sleep((0.01 + 0.002 * sampling.max_tokens) * (1 if OURS else 2))
        outputs = []
        for prompt in prompts:
            ids = [prompt["prompt_token_ids"][0] + i for i in range(sampling.max_tokens)]
            lp = 0.5 if INVARIANT else 0.5 + len(prompts)
            each = [{i: SimpleNamespace(logprob=lp)} for i in ids] if sampling.logprobs is not None else None
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=each)]))
        return outputs
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A package named vllm, whose engine sleeps: its stock variant twice as long."""
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_a_vllm_engine_in_four_variants(run, load, tmp_path, capsys, engine):
    """Each in its own process. Ours have ratios to both stock engines."""
    flags = f"--batch 1,3 --prompt 5,9 --new-tokens 40 --layers 2 --work {tmp_path}/work"
    records = run("bench_vllm", *flags.split())
    variants = ("stock", "fused_moe", "stock_invariant", "fused_moe_invariant")
    sizes = [(prompt, batch) for prompt in (5, 9) for batch in (1, 3)]
    assert [(r["what"], r["prompt"], r["batch"]) for r in records] == [
        (v, *s) for v in variants for s in sizes
    ]
    for r in records:
        assert set(r) >= FIELDS and r["failed"] is None
        assert r["shape"] == f"qwen3-30b, 2 layers, bf16, prompt {r['prompt']}"
        assert (r["bench"], r["tokens"], r["vllm"]) == ("vllm", r["batch"], "0.33.0")
        ours, invariant = r["what"].startswith("fused_moe"), r["what"].endswith("invariant")
        for name in ("first_token_ms", "tokens_per_s"):
            assert r["samples"][name] == [r[name]]  # of one repeat
        assert r["same_bits"] is invariant
        assert r["backends"] == ["TRITON Unquantized MoE backend"]
        assert r["attention"] == ["FLASH_ATTN"]
        assert r["tiles"] == (None if invariant else ["E=128.json"])
        assert r["plugin"] == (["fused_moe runs the experts of 2 of 2 MoE layers"] if ours else [])
        assert ("ratio_to_stock" in r) == ("first_token_ratio" in r) == ours
        if ours:
            assert r["same_tokens"] == 1
            assert r["peer"] == ("stock_invariant" if invariant else "stock")
            assert r["peer_ratio"] == r[f"ratio_to_{r['peer']}"] and 1.2 < r["peer_ratio"] < 3
            assert r["first_token_ratio"] == r[f"first_token_ratio_to_{r['peer']}"] > 1.2
    log = (tmp_path / "work/fused_moe/log").read_text()
    config, dtype, length, settings = json.loads(next(line for line in log.splitlines() if line[0] == "["))
    assert (config["model_type"], config["num_experts"], config["num_hidden_layers"]) == ("qwen3_moe", 128, 2)
    assert (dtype, length, settings["max_num_seqs"]) == ("bfloat16", 9 + 64, 3)
    assert "first token after" in capsys.readouterr().out

    load("table").main([str(tmp_path / "bench_vllm.json")])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in capsys.readouterr().out.splitlines()]
    r = next(r for r in records if r["what"] == "fused_moe_invariant")
    theirs = next(r for r in records if r["what"] == "stock_invariant")
    assert [row[:3] for row in rows[-8:]] == [
        [f"qwen3-30b, 2 layers, bf16, prompt {prompt}{mode}", f"TRITON Unquantized{tiles}", str(batch)]
        for mode, tiles in (("", ", tuned tiles"), (", batch-invariant", ""))
        for prompt, batch in sizes
    ]
    assert rows[-4][3:] == [
        f"{r['first_token_ms']:.1f} against {theirs['first_token_ms']:.1f}", f"{r['first_token_ratio']:.2f}x",
        f"{r['tokens_per_s']:,.0f} against {theirs['tokens_per_s']:,.0f}", f"{r['peer_ratio']:.2f}x",
        "yes against yes",
    ]  # fmt: skip
    load("plot").main([str(tmp_path / "bench_vllm.json"), "-o", str(tmp_path)])
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_eight_bits_in_an_engine_four_ways(run, load, tmp_path, capsys, engine):
    """On the same call's clocks; the float model's records say that it is not quantised."""
    ways = ("stock", "fused_moe", "fused_moe_codes", "fused_moe_float")
    flags = "--quantization fp8_block --batch 2 --prompt 5 --new-tokens 9 --layers 1 --variants"
    records = run("bench_vllm", *flags.split(), ",".join(ways), "--work", str(tmp_path / "work"))
    found = dict(zip(ways, records, strict=True))
    for name, r in found.items():
        kind = "bf16" if name.endswith("float") else "fp8_block"
        assert (r["what"], r["shape"]) == (name, f"qwen3-30b, 1 layers, {kind}, prompt 5")
        assert r["quantization"] == ("none" if name.endswith("float") else "fp8_block")
        log = (tmp_path / "work" / name / "log").read_text()
        assert ("quantization_config" in log) == (not name.endswith("float"))
        others = {n.removeprefix("first_token_ratio_to_") for n in r if n.startswith("first_token_ratio_to_")}
        assert others == ({*ways} - {name, "fused_moe"} if name != "stock" else set())
    for name in ("fused_moe", "fused_moe_codes"):
        assert found[name]["peer"] == "stock" and found[name]["first_token_ratio"] > 1.2
    assert found["fused_moe_float"]["peer"] is None
    compute = {
        name: load("bench_vllm").environment({"variant": name})["FUSED_MOE_VLLM_COMPUTE"] for name in ways
    }
    eight_bits = ",".join(importlib.import_module("fused_moe.vllm").MODES)
    assert compute == {name: "codes" if name.endswith("codes") else eight_bits for name in ways}
    capsys.readouterr()
    load("table").main([str(tmp_path / "bench_vllm.json")])
    assert "fp8_block, prompt 5, 16-bit activations | TRITON" in capsys.readouterr().out


def test_what_the_log_of_vllm_says(load):
    """Lines as vLLM 0.33 writes them; the first comes before its log is set up."""
    lines = (
        "Using TRITON Fp8 MoE backend out of potential backends: ['DEEPGEMM', 'TRITON'].",
        "Using 'MARLIN' WNA16 MoE backend.",
        "Using TritonExperts MoE backend",
        "Using TritonExperts MoE backend",
        "Using default MoE config. Performance might be sub-optimal! Config file not found at /a/b.json",
        "Using AttentionBackendEnum.FLASH_ATTN backend.",
        "fused_moe runs the experts of 1 of 2 MoE layers; 1 keep vLLM's own: an activation",
    )
    prefix = "(MainProcess pid=10641) INFO 11-27 01:51:38 [fused_moe.py:9] "
    said = load("bench_vllm").said("\n".join(["fused_moe does not fit", *(prefix + line for line in lines)]))
    assert said == {
        "backends": ["TRITON Fp8 MoE backend", "MARLIN WNA16 MoE backend", "TritonExperts MoE backend"],
        "tiles": None,
        "attention": ["AttentionBackendEnum.FLASH_ATTN"],
        "plugin": ["fused_moe does not fit", lines[-1]],
    }


def test_a_vllm_variant_that_fails(run, load, tmp_path, capsys, engine):
    """It has records without a time; the others count, and the program fails."""
    flags = "--shape mixtral-8x7b --quantization fp8_block --batch 1,2 --prompt 5 --new-tokens 9 --layers 1"
    flags += " --at-once 2"
    with pytest.raises(SystemExit, match="1"):
        run("bench_vllm", *flags.split(), "--variants", "stock,stock_invariant,fused_moe_invariant")
    records = json.loads((tmp_path / "bench_vllm.json").read_text())
    assert [(r["what"], bool(r["failed"])) for r in records] == [
        *[("stock", False)] * 2,
        *[("stock_invariant", True)] * 2,
        *[("fused_moe_invariant", True)] * 2,
    ]
    assert all(r["shape"] == "mixtral-8x7b, 1 layers, fp8_block, prompt 5" for r in records)
    assert not any(name.startswith("ratio") for r in records for name in r)
    printed = capsys.readouterr().out
    assert "this one cannot" in printed and "failed: 1" in printed


def test_a_vllm_engine_over_the_limit(run, tmp_path, capsys, engine):
    """It is stopped, and what it had answered does not count."""
    flags = "--batch 2,77 --prompt 5 --layers 1 --limit 8 --variants stock --work"
    with pytest.raises(SystemExit, match="1"):
        run("bench_vllm", *flags.split(), str(tmp_path / "work"))
    records = json.loads((tmp_path / "bench_vllm.json").read_text())
    assert [(r["batch"], r["failed"], r["time_us"]) for r in records] == [(2, "-9", None), (77, "-9", None)]
    assert "stock failed (-9)" in capsys.readouterr().out


@pytest.mark.parametrize("shape, experts", (("mixtral-8x7b", "num_local_experts"), ("olmoe", "num_experts")))
@pytest.mark.parametrize("quantization", ("none", "fp8_block", "fp8", "int8", "int4"))
def test_the_models_of_vllm(load, shape, experts, quantization):
    """Sizes are those of shapes.json, and transformers reads the configuration."""
    bench, common = load("bench_vllm"), load("common")
    config = bench.model_config(shape, 3, quantization, "bf16")
    sizes = common.layer_sizes(shape)
    assert (config["hidden_size"], config[experts]) == (sizes.dim, sizes.num_experts)
    assert config.get("moe_intermediate_size", config["intermediate_size"]) == sizes.hidden_dim
    quantized = config.get("quantization_config", {})
    moe = "block_sparse_moe" if shape == "mixtral-8x7b" else "mlp"
    parts = (f"{moe}.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))
    dense = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in range(3) for part in parts)]
    assert quantized.get("modules_to_not_convert", quantized.get("ignore")) == (
        None if quantization == "none" else dense
    )
    transformers = pytest.importorskip("transformers")
    names = {"architectures", "model_type", "quantization_config"}
    rest = {name: value for name, value in config.items() if name not in names}
    known = transformers.AutoConfig.for_model(config["model_type"], **rest)
    assert known.num_hidden_layers == 3 and known.num_experts_per_tok == sizes.top_k


@pytest.mark.parametrize("flags", ("--variants ours", "--dtype fp32", "--batch 0"))
def test_wrong_flags_of_vllm(run, capsys, flags):
    with pytest.raises(SystemExit, match="2"):
        run("bench_vllm", *flags.split())
    assert "expected" in capsys.readouterr().err


def test_vllm_is_not_installed(run, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    flags = ("--tokens", "2", "--dtype", "fp32", "--peers", "vllm,vllm-invariant")
    (r,) = run("bench_decode", "--shape", SMALL, *flags)
    assert not [name for name in r if name.startswith("ratio_to")]
    printed = capsys.readouterr().out
    for name in ("vllm", "vllm-invariant"):
        assert f"{name} is left out: vllm is not installed" in printed


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("invariant", (True, False))
def test_what_vllm_is_given(load, monkeypatch, gated, invariant):
    """Its function, here the loop on stacked weights, is right, and gets the activation and the tile."""
    seen, tiles = [], []

    @contextmanager
    def override_config(tile):
        tiles.append(tile)
        yield
        tiles.append(None)

    def fused_experts(x, w13, w2, scores, ids, activation):
        seen.append((activation, tiles[-1]))
        layout = {"layout": "halves"} if gated else {}
        return fused_moe.reference.fused_experts(x, w13, w2, None, scores, ids, activation="gelu", **layout)

    stand_in = {
        VLLM: {"override_config": override_config},
        f"{VLLM}.activation": {"MoEActivation": SimpleNamespace(from_str=lambda name: f"<{name}>")},
        f"{VLLM}.fused_moe": {"fused_experts": fused_experts},
    }
    for end in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, end, ModuleType(end))
    for name, contents in stand_in.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    bench, common, peers = load("bench_decode"), load("common"), load("peers")
    setup = bench.Setup(dtype="fp32", gated=gated, activation="gelu")
    case = bench.Case(common.layer_sizes("3,8,2,64,32"), setup)
    experts = peers.vllm_experts("gelu", gated=gated, invariant=invariant)
    error = case.error(lambda x, w, scores, ids: experts(x, w.w13, w.w2, scores, ids))
    assert error.check("stand-in", "fp32") < 1e-5
    tile = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "SPLIT_K": 1}
    assert (
        seen == [("<gelu>" if gated else "<gelu_no_mul>", tile if invariant else None)] and tiles[-1] is None
    )
    with pytest.raises(peers.Unavailable, match="expected silu, gelu, gelu_tanh, found relu"):
        peers.vllm_experts("relu")


def test_vllm_stands_in_tables_and_pictures(load, run, tmp_path, capsys):
    path = tmp_path / "bench_decode.json"
    records = run("bench_decode", "--shape", SMALL, "--tokens", "1,5", "--dtype", "fp32")
    for r, ratio in zip(records, (1.5, None), strict=True):  # left out of the second
        r |= {"ratio_to_vllm": ratio, "ratio_to_vllm_invariant": 2.25}
    path.write_text(json.dumps(records))
    capsys.readouterr()
    load("table").main([str(path)])
    text = capsys.readouterr().out
    assert "against vLLM " in text and "1.50x" in text
    assert "against vLLM's batch-invariant tile" in text and text.count("2.25x") == 2
    load("plot").decode(records, tmp_path / "latency.png")
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", ((), ("--gate-only", "--activation", "gelu")), ids=["gated", "gate only"])
def test_a_roofline_of_few_tokens(run, tmp_path, flags):
    """Bytes are those of the experts with tokens; fusing needs fewer of them."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roofline.png"
    flags = ("--tokens", "4", "--dtype", "bf16", "--routing", "one", "--roofline", str(picture), *flags)
    records = run("bench_decode", "--shape", SMALL, *flags)
    assert [r["what"] for r in records] == ["up_gate", "apart", "down"]
    up_gate, apart, down = records
    T, K, D, F = 4, 2, 64, 32
    sides = 1 if "--gate-only" in flags else 2
    exact = 2 * T * K * D * F * sides / (2 * (2 * D * F * sides + T * D + T * K * F))
    assert up_gate["intensity"] == pytest.approx(exact, abs=0.01) and apart["intensity"] < exact
    assert down["intensity"] == pytest.approx(T * K * D * F / (2 * D * F + T * K * (F + D)), abs=0.01)
    assert all(set(r) >= FIELDS and r["bench"] == "decode_kernels" and r["floor_ratio"] > 0 for r in records)
    assert picture.read_bytes().startswith(b"\x89PNG")


def measure(folder, *args) -> subprocess.CompletedProcess:
    shapes = {"SHAPES": SMALL, "OTHER_SHAPES": "", "PYTHON": sys.executable}
    command = [str(BENCHMARKS / "measure.sh"), str(folder), *args]
    return subprocess.run(command, env=os.environ | shapes, capture_output=True, text=True)


def test_measure_runs_every_program(cpu, tmp_path):
    """Each leaves its records; one that fails, as a profile without a GPU, is named and stops no other."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = measure(tmp_path)
    failed = f"failed or not run, after [0-9]+ s:\n  bench_layer --shape {SMALL} --mode queued .*--profile\n"
    assert run.returncode == 1 and re.search(f"{failed}$", run.stdout), run.stdout + run.stderr
    found = sorted(file.stem for file in tmp_path.iterdir())
    assert found == ["decode", "dtypes", "eight_bits", "gemm", "kernels", "zipf"]
    (record, *_) = json.loads((tmp_path / "zipf.json").read_text())
    assert (record["bench"], record["shape"], record["routing"]) == ("layer", SMALL, "zipf:1.2")


def test_measure_stops_at_its_limit(cpu, tmp_path):
    run = measure(tmp_path, "--limit", "0")
    assert run.returncode == 1 and not list(tmp_path.iterdir())
    assert run.stdout.count("\n  bench_") == 8


def test_a_program_runs_as_a_script(cpu):
    command = [sys.executable, str(BENCHMARKS / "bench_kernels.py"), "--shape", SMALL, "--dtype", "fp32"]
    command += ["--device", "cpu", "--repeats", "1", "--what", "permute"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "permute" in found.stdout
