"""benchmarks/: every program runs on the CPU, times no wrong result, and leaves the records it documents.

The shapes are tiny: no time is checked. Skipped without a checkout, as when the tests run against an
installed wheel. Rules that programs share are in test_bench_rules.py, programs that start others in
test_bench_processes.py.
"""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fused_moe
from fused_moe.activation import ACTIVATIONS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PROGRAMS = [path.stem for path in sorted(BENCHMARKS.glob("*.py")) if "parse_args(" in path.read_text()]
SMALL = "24,8,2,64,32"
FLOATS = ("fp32", "bf16")
PASSES = ("forward", "forward_backward")
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
# What 8 bits cost beside the float weights' output: codes round one operand, the others both
LEAST_OF_8_BITS = {"codes": 2e-2, "fp8": 5e-2, "int8": 1.4e-2, "int8_smooth": 1.4e-2}
FIELDS = {
    *("bench", "shape", "routing", "tier", "schedule", "mode", "dtype", "layer", "what", "tokens"),
    *("time_us", "tflops", "dense_ratio", "torch_ratio", "peer", "peer_ratio", "activation_mib", "peak_mib"),
    *("max_rel_error", "cpu", "threads", "gpu", "torch", "cuda", "commit", "date"),
}
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="not in a checkout")

# --- programs -----------------------------------------------------------------------------------------

GEMMS = ["up_gate", "down", "up_dgrad", "dgrad_down", "down_dgrad", "wgrad_up", "wgrad_down"]
KERNELS = "router_logits route route_backward route_plan route_and_plan permute combine sum_peers"
KERNELS += " unpermute_backward"
EIGHT = ["fp8_block", "fp8_block, compute fp8", "fp8, compute fp8", "int8, compute int8"]
EIGHT += ["int8, compute int8_smooth"]
STAGES = "router_logits route_and_plan permute combine up_gate apart down".split()
WAYS = ["experts", "int8", "int8, compute int8", "int8, compute int8_smooth", "fp8", "fp8, compute fp8"]
CK_MODES = [
    ("only, gelu", WAYS),
    ("only, silu", WAYS[:1]),
    ("and up, gelu", WAYS[:1]),
    ("and up, silu", WAYS),
]
MODEL = "--shape 1,8,2,64,32 --dtype fp32 --layers 2 --new-tokens 4"
# A run: the program and its flags, names of fields, their values in each record.
RUNS = {
    "layer": ("bench_layer --routing balanced --peers loop,torch", "dtype what", product(FLOATS, PASSES)),
    "layer of K = 1": ("bench_layer --shape 24,8,1,64,32 --dtype fp16", "what", zip(PASSES)),
    "gemm": (
        f"bench_gemm --shape {SMALL} --shape 20,2,8,8 --dtype bf16 --routing balanced --routing zipf:1.2",
        "routing what",
        [
            *product(("balanced", "zipf:1.2"), GEMMS),
            *product(("balanced", "best", "worst", "one-each"), ["grouped_mm"]),
        ],
    ),
    "kernels": ("bench_kernels --routing zipf:1.2 --dtype bf16", "what", zip(KERNELS.split())),
    "activations": (
        "bench_kernels --dtype bf16 --activations",
        "what layer",
        product(("up_gate", "down_dgrad"), ACTIVATIONS),
    ),
    "linear": ("bench_linear --shape 24,40 --tokens 1,17", "what tokens", product(PASSES, (1, 17))),
    "expert parallelism": (
        "bench_expert_parallel --dtype bf16",
        "layer",
        [
            (f"{combine}, {exchange}, N = 1",)
            for combine in ("slot", "rank")
            for exchange in ("exact", "static", "symmetric", "symmetric, static")
        ],
    ),
    "few tokens": ("bench_decode --tokens 1,5 --dtype bf16 --peers loop,torch", "tokens", [(1,), (5,)]),
    "few tokens of a rank": (
        "bench_decode --tokens 5,9 --local-tokens 1,5 --format int8 --dtype bf16",
        "tokens what local_tokens",
        product((5, 9), ("experts", "int8"), (1, 5)),
    ),
    "few tokens, formats": (
        "bench_decode --tokens 3 --dtype bf16 --format fp8_block,int4,mxfp4 --compute codes,fp8",
        "what",
        zip(("experts", "fp8_block", "fp8_block, compute fp8", "int4 of 32", "mxfp4")),
    ),
    "few tokens, of a size": (
        "bench_decode --shape ck-default --dim 64 --hidden-dim 64 --tp 2 --init uniform --seed 5 --warmup 0",
        "shape tokens dtype init activation gated",
        [("128,32,5,64,32", 128, dtype, "uniform", "gelu", False) for dtype in FLOATS],
    ),
    "few tokens, sizes of flags": (
        "bench_decode --shape olmoe --tokens 3 --experts 8 --top-k 1 --dim 64 --hidden-dim 32 --dtype bf16",
        "shape tokens",
        [("16384,8,1,64,32", 3)],
    ),
    "quantised, forward": (
        "bench_quantised --time --tokens 1,5 --format int4,fp8 --compute codes,fp8 --dtype bf16",
        "tokens layer",
        product(
            (1, 5),
            "bf16|fp8|fp8 per tensor|fp8, compute fp8|int4 of 32|int4 of 32, zero points".split("|"),
        ),
    ),
    "quantised, backward": (
        "bench_quantised --backward --tokens 5 --format fp8_block,mxfp4",
        "dtype layer",
        [
            (d, name)
            for d in FLOATS
            for name in (d, "fp8_block", "mxfp4", "fp8_block, trainable", "mxfp4, trainable")
        ],
    ),
    "eight bits": ("bench_eight_bits --dtype bf16", "what", zip(["experts", *EIGHT])),
    "first call": ("first_call --dtype bf16", "what processes", [("up_gate_grouped_mm", 1)]),
    "evaluation of system 1": (
        "bench_evaluations --system 1 --dtype bf16",
        "system layer what",
        [(1, "GEMM", "grouped_mm"), *((1, "layer", what) for what in PASSES)],
    ),
    "evaluation of system 2": (
        "bench_evaluations --system 2 --tokens 1,5",
        "system dtype tokens what",
        [(2, *case) for case in product(("fp16", "bf16"), (1, 5), ("w1", "w2"))],
    ),
    "evaluation of system 3": (
        "bench_evaluations --system 3 --tokens 1,5",
        "dtype layer what",
        [("fp16", "layer", "forward")] * 2 + [("fp16", "stages", what) for what in STAGES],
    ),
    "evaluation of system 4": (
        "bench_evaluations --system 4",
        "layer routing what",
        [
            *(("GEMM", case, "grouped_mm") for case in ("balanced", "best", "worst", "one-each")),
            *(("gather", case, "up, relu") for case in ("balanced", "best", "one-each")),
            ("order of experts", "one-each", "grouped_mm"),
            *(("layer", *case) for case in product(("balanced", "worst", "one-each"), PASSES)),
            ("shared expert", "random", "forward"),
        ],
    ),
    "a part of an evaluation": (
        "bench_evaluations --part layer --tokens 5",
        "system dtype layer routing what tokens",
        [
            (3, "fp16", "layer", "random", "forward", 5),
            *((1, "bf16", "layer", "random", what, None) for what in PASSES),
            *(
                (4, "bf16", "layer", *case, None)
                for case in product(("balanced", "worst", "one-each"), PASSES)
            ),
        ],
    ),
    "evaluation of system 5": (
        "bench_evaluations --system 5",
        "layer what",
        [(f"gate {mode}", what) for mode, whats in CK_MODES for what in whats]
        + [(f"local tokens, {own} own tokens", "experts") for own in (1, 24)],
    ),
    "layer in transformers": ("bench_transformers --dtype fp32", "what", [("forward_backward",)]),
    "generate": (
        f"bench_transformers --generate {MODEL} --batch 1,3 --prompt 5",
        "what batch tokens layers same_tokens",
        [("generate", batch, batch, 2, 1) for batch in (1, 3)],
    ),
    "continuous batching": (
        f"bench_continuous_batching {MODEL} --requests 1,3 --prompt 20",
        "what requests tokens default_experts same_tokens",
        [("generate_batch", requests, requests, "grouped_mm", 1) for requests in (1, 3)],
    ),
    "LoRA": (
        "bench_lora --shape 1,8,2,128,128 --tokens 64 --sequence 32 --layers 1 --dtype fp32",
        "what",
        zip(("lora", "lora_grouped_mm", "lora_4bit", "full", "full_grouped_mm")),
    ),
}
RUNS = {name: (line.split(), names.split(), list(values)) for name, (line, names, values) in RUNS.items()}


def line_of(name: str) -> list[str]:
    """The program and the flags of a run."""
    line, *_ = RUNS[name]
    if name in ("generate", "continuous batching", "layer in transformers", "LoRA"):
        pytest.importorskip("transformers")
    if name == "LoRA":
        pytest.importorskip("peft")
    return line if "--shape" in line else [*line, "--shape", SMALL]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(load, monkeypatch, capsys, name):
    """On a screen."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        load(name).main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 0 and lines[0].startswith("usage:")
    assert len(lines) <= 40 and max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", RUNS)
def test_records(load, run, capsys, name):
    """One for each case, in order, with every field, and ratios of the times that it has."""
    records, (_, names, values) = run(*line_of(name)), RUNS[name]
    assert [tuple(r[field] for field in names) for r in records] == values
    for r in records:
        assert set(r) >= FIELDS and (r["tier"], r["gpu"], r["schedule"], r["mode"]) == (
            *("cpu", "none", "default", "eager"),
        )
        assert r["time_us"] > 0 and all(r[field] > 0 for field in r if field.startswith("ratio_to_"))
        if r["max_rel_error"] is not None:
            assert r["max_rel_error"] < (0.08 if "compute" in r else BOUNDS[r["dtype"]])
            assert r["max_rel_error"] > least_error(r) or r["bench"] == "kernel"
        if "floor_us" in r:
            assert r["floor_ratio"] == pytest.approx(r["floor_us"] / r["time_us"], rel=0.1, abs=1e-3)
        if "over_later_us" in r:
            excess = pytest.approx(r["time_us"] - r["later_us"], abs=1)
            assert r["over_later_us"] == r["over_later_us_worst"] == excess  # of one process
        if "ratio_to_default" in r:
            rates = r["tokens_per_s"] / r["tokens_per_s_default"]
            assert rates == pytest.approx(r["ratio_to_default"], rel=0.01)
    assert capsys.readouterr().out


def least_error(r: dict) -> float:
    """What rounding costs: a result with less was computed in another way than the record says."""
    if "compute" not in r:
        return 0
    return LEAST_OF_8_BITS[r["compute"]] if r["bench"] == "eight_bits" else 1e-2


class Planted(TorchDispatchMode):
    """The results of one operator of the library are half as large again, wherever it is called. `seen`: the
    operators that were called and have results of floating point."""

    def __init__(self, operator: str | None = None):
        super().__init__()
        self.operator, self.seen, self.calls = operator, [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found, name = op(*args, **(kwargs or {})), op._schema.name
        is_float = [torch.is_tensor(t) and t.is_floating_point() for t in tree_leaves(found)]
        if op.namespace != "fused_moe" or not any(is_float):
            return found
        self.seen.append(name)
        if name != self.operator:
            return found
        self.calls += 1
        return tree_map(lambda t: 1.5 * t if is_wide(t) else t, found)


def is_wide(t) -> bool:
    """Whether it is a tensor of floating point, but not of 8-bit codes."""
    return torch.is_tensor(t) and t.is_floating_point() and t.itemsize > 1


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("first call", "layer of K = 1")])
def test_a_wrong_result_is_never_timed(load, run, monkeypatch, name):
    """Each operator that a program times is wrong in turn: the program ends before it times that operator."""
    program, *flags = line_of(name)
    planted, timed = Planted(), set()

    def times(clock, runs, repeats):
        before, calls = len(planted.seen), planted.calls
        for call in runs.values():
            call()
        timed.update(planted.seen[before:])
        assert planted.calls == calls, f"{planted.operator} was timed"
        return dict.fromkeys(runs, 1e-3)

    monkeypatch.setattr(load("common"), "times", times)
    with planted:
        run(program, *flags)
    assert timed or program == "bench_continuous_batching"  # which transformers times
    for operator in timed or planted.seen:
        planted = Planted(operator)
        with planted, pytest.raises(SystemExit, match="wrong before it is fast"):
            run(program, *flags)
        assert planted.calls


# A run with these flags, and the text of its error
WRONG_FLAGS = (
    ("bench_layer --profile", "--profile: expected a GPU"),
    ("bench_layer --routing uniform", "expected random, balanced, .*found uniform"),
    ("bench_layer --shape gpt-5", "expected T,E,K,D,F or one of cpu-32-experts"),
    ("bench_gemm --order column", "expected --device cuda with flags .*, found cpu with order=column"),
    ("bench_gemm --expert-order in-turn --tails off", "found cpu with experts=in-turn,tails=off"),
    ("bench_linear --shape qkv,1", "--shape: expected IN,OUT or one of qkv, .*, found qkv,1"),
    ("bench_decode --tokens 0,1", "found 0,1"),
    ("bench_decode --peers sglang", "vllm-invariant, marlin, humming, humming-grouped, found sglang"),
    ("bench_decode --tp 3", "expected a divisor of F = 32, found 3"),
    ("bench_decode --top-k 9", "K <= E"),
    ("bench_decode --stride 63", "at least D = 64, found 63"),
    ("bench_decode --list-kernels", "expected a GPU"),
    ("bench_decode --format int4,int5", "fp8_block, fp8, int8, int4, mxfp4, found int5"),
    ("bench_decode --tokens 5 --local-tokens 6", "--local-tokens: expected at most T = 5, found 6"),
    ("bench_decode --tokens 3 --format fp8 --compute int8", "codes, fp8 with --format fp8, found int8"),
    (
        "bench_decode --shape 3,8,2,64,48 --tokens 1 --format int8,mxfp4",
        "--format mxfp4: expected widths that are multiples of 32, found D = 64, F = 48",
    ),
    ("bench_quantised --compute codes,auto", "codes, fp8, int8, int8_smooth, found auto"),
    ("bench_eight_bits --weight-format int8 --compute fp8", "fp8_block fp8 e8m0;.*found int8 fp8 any"),
    ("bench_eight_bits --scale-dtype e8m0 --compute codes", "found any codes e8m0"),
    ("bench_eight_bits --dtype bf16 --output-dtype fp32", "bf16 bf16; fp16 fp16, found bf16 fp32"),
    ("bench_eight_bits --peers marlin", "some of vllm, torch-gemms, deepgemm-gemms, found marlin"),
    ("bench_transformers --generate --batch 1,0", "numbers of sequences, found 1,0"),
    ("bench_vllm --variants ours", "--variants: expected some of stock"),
    ("bench_vllm --dtype fp32", "--dtype: expected one of bf16,fp16"),
)


@pytest.mark.parametrize("line, said", WRONG_FLAGS)
def test_wrong_flags(run, capsys, line, said):
    with pytest.raises(SystemExit) as stop:
        run(*line.split(), *([] if "--shape" in line else ["--shape", SMALL]))
    assert re.search(said, f"{stop.value} {capsys.readouterr().err}")


@pytest.mark.parametrize(
    "flags, said",
    (
        ("--variants grouped_mm --seeds 0,1", "--seeds: expected fused_moe in --variants"),
        ("--local-batch 4,-1", "--local-batch: expected positive integers"),
        ("--local-batch four", "--local-batch: expected positive integers"),
    ),
)
def test_wrong_flags_of_torchtitan(load, capsys, flags, said):
    with pytest.raises(SystemExit):
        load("bench_torchtitan").arguments(["--torchtitan", ".", *flags.split()])
    assert said in capsys.readouterr().err


PYTHON = """#!/bin/sh
case "$*" in *fp16*) exit 1 ;; esac
echo "$@" >>"$RAN"
"""
SMI = """#!/bin/sh
case "$1" in --list-gpus) printf 'GPU 0: a\\nGPU 1: b\\n' ;; *) echo NVIDIA H200 ;; esac
"""
# They need another package or two ranks: only their flags are looked at.
NOT_RUN = {f"bench_{name}" for name in "vllm transformers lora continuous_batching torchtitan".split()}


def measured(tmp_path, *flags: str, gpu: bool) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """measure.sh with small shapes and a stand-in for Python, and what it ran."""
    bin, ran = tmp_path / "bin", tmp_path / "ran"
    bin.mkdir(exist_ok=True)
    for name, text in (("python", PYTHON), ("nvidia-smi", SMI if gpu else "#!/bin/sh\nexit 9\n")):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    ran.write_text("")
    shapes = {"SHAPES": "24,8,2,128,128", "EXPERTS": "24,8,2,128,128", "OTHER_SHAPES": "24,8,2,128,128"}
    shapes |= {"PYTHON": str(bin / "python"), "RAN": str(ran), "SYSTEM_SHAPE": SMALL}
    command = [str(BENCHMARKS / "measure.sh"), str(tmp_path / "records"), *flags]
    env = os.environ | shapes | {"PATH": f"{bin}:{os.environ['PATH']}"}
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    return found, [line.split() for line in ran.read_text().splitlines()]


def test_measure_makes_the_committed_records(tmp_path):
    """Those of a program of benchmarks/, and no others, named after the card that it runs on."""
    made = set()
    for gpu, card in ((True, "h200"), (False, "cpu")):
        found, lines = measured(tmp_path, gpu=gpu)
        assert ("all done" in found.stdout) != gpu
        for line in lines:
            program = next(Path(word).name for word in line if word.endswith(".py"))
            name = Path(line[line.index("--json") + 1]).name
            assert name.endswith(f"_{card}.json")
            made.add((name, program))
    rows = re.findall(r"^\| (\S+\.json) \| (.*?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE)
    committed = {(name, program) for name, text in rows for program in re.findall(r"bench_\w+\.py", text)}
    assert made == {(name.replace("_h100", "_h200"), program) for name, program in committed}


def test_measure_runs_every_program(load, run, monkeypatch, tmp_path, capsys):
    """With flags that each takes. One that fails is named and stops no other; nothing runs past the limit."""
    found, lines = measured(tmp_path, gpu=True)
    failed = "failed or not run, after [0-9]+ s:\n  bench_layer --shape 24,8,2,128,128 .*fp16.*\n$"
    assert found.returncode == 1 and re.search(failed, found.stdout), found.stdout + found.stderr
    monkeypatch.chdir(tmp_path)
    for line in lines:
        start = next(i for i, word in enumerate(line) if word.endswith(".py"))
        name, flags, i = Path(line[start]).stem, line[start + 1 :], line.index("--json")
        assert line[i + 1].startswith(f"{tmp_path}/records/") and line[i + 2 :] == ["--append"]
        flags = line[start + 1 : i]
        few = ["--tokens", "1"] if re.search("decode|evaluations|linear|quantised", name) else []
        if name == "bench_linear":
            few += ["--shape", "64,64"]
        if name in NOT_RUN:
            with pytest.raises(SystemExit):
                load(name).main(["--help"])
            assert {f for f in flags if f.startswith("--")} <= set(
                re.findall(r"--[\w-]+", capsys.readouterr().out)
            )
        elif name != "bench_expert_parallel":
            assert run(name, *flags, *few)
    found, none = measured(tmp_path, "--limit", "0", gpu=True)
    assert found.returncode == 1 and found.stdout.count("\n  bench_") == len(lines) + 1 and not none


# --- peers --------------------------------------------------------------------------------------------


def test_a_peer_that_is_wrong_or_missing_is_left_out(load, run, monkeypatch, capsys):
    """Each peer has its own bound, in records its error; why one is left out is printed."""
    peers, bench = load("peers"), load("bench_decode")

    def convert(w1, w2, w3):
        return peers.stacked(w1, w3, lambda w: w.dequantize()), w2.dequantize()

    def by(factor):
        return lambda x, weights, scores, ids: (
            factor * fused_moe.reference.fused_experts(x, *weights, None, scores, ids, layout="halves")
        )

    found = {
        "marlin": peers.QuantisedPeer(convert, by(1)),
        "vllm": peers.QuantisedPeer(convert, by(1.04), peers.FP8_ACTIVATIONS_BOUND),
        "wrong": peers.QuantisedPeer(convert, by(1.04)),
        "broken": peers.QuantisedPeer(lambda *weights: 1 / 0, by(1)),
    }
    monkeypatch.setitem(sys.modules, "vllm", None)
    flags = f"--shape {SMALL} --tokens 3 --dtype bf16 --peers vllm,marlin --format int8"
    _, r = run("bench_decode", *flags.split())
    assert r["peer_errors"] == {} and not [name for name in r if name in ("ratio_to_vllm", "ratio_to_marlin")]
    printed = capsys.readouterr().out
    assert "marlin is left out of int8: marlin: expected int4, mxfp4, fp8_block, found int8" in printed
    assert "vllm is left out: vllm is not installed" in printed
    monkeypatch.setattr(bench, "find_quantised_peers", lambda *asked: found)
    _, r = run("bench_decode", *flags.replace("int8", "int4").split())
    assert r["peer_errors"]["marlin"] < 1e-2 < r["peer_errors"]["vllm"] < 0.05 and len(r["peer_errors"]) == 2
    assert r["ratio_to_marlin"] > 0 and r["ratio_to_vllm"] > 0
    printed = capsys.readouterr().out
    assert "int4 of 32: wrong is left out: int4 of 32 wrong bf16: wrong before it is fast" in printed
    assert "int4 of 32: broken is left out: division by zero" in printed


def test_a_wrong_layer_of_a_peer_is_left_out(load, run, monkeypatch, capsys):
    peers = load("peers")
    right = peers.PEERS["loop"]

    def wrong(ours):
        layer = right(ours)
        layer.register_forward_hook(lambda module, args, out: 1.1 * out)
        return layer

    monkeypatch.setitem(peers.PEERS, "loop", wrong)
    flags = f"--shape {SMALL} --dtype fp32 --peers loop,scattermoe"
    for r in run("bench_layer", *flags.split()):
        assert r["peer"] is None and "ratio_to_loop" not in r
    assert "loop is left out: out differs from ours by 1.0e-01" in capsys.readouterr().out


# --- ways of computing -------------------------------------------------------------------------------


def test_ways_are_those_of_the_library(load):
    """COMPUTE and the variants of each, and bench_eight_bits.py's. Models of shapes.json are measured."""
    from fused_moe.quantized.computing import FORMATS_OF

    common, bench, eight_bits = load("common"), load("bench_quantised"), load("bench_eight_bits")
    known = {(format, name) for name in bench.COMPUTE for format in FORMATS_OF[name]}
    assert {*FORMATS_OF} == {*bench.COMPUTE, "auto"}
    assert {(v.format, v.compute) for v in bench.VARIANTS} == known
    ways = {(way.weight_format, way.compute) for way in eight_bits.WAYS}
    assert ways == {way for way in known if way[0] in FORMATS_OF["auto"]}
    assert {*eight_bits.USUAL} < {*eight_bits.WAYS}
    measured = set(re.findall(r"[\w.-]+", (BENCHMARKS / "measure.sh").read_text()))
    assert set(common.MODELS) <= set(common.SHAPES["layers"]) & measured


def test_ratios_of_ways(load, run, monkeypatch):
    """A way's time is the denominator, whatever it is compared with."""
    seconds = {"ours": 1, "float": 6, "codes": 3, "fp8": 2, None: 6, "dense": 9, "read": 9}
    common = load("common")
    monkeypatch.setattr(common, "times", lambda clock, runs, repeats: {r: seconds.get(r, 2) for r in runs})
    flags = f"--shape {SMALL} --tokens 3 --dtype bf16 --format fp8_block --compute"
    _, codes, fp8 = run("bench_decode", *flags.split(), "codes,fp8")
    assert (codes["ratio_to_bf16"], codes["ratio_to_fp8"]) == (2, 0.667) and "ratio_to_codes" not in codes
    assert (fp8["ratio_to_bf16"], fp8["ratio_to_codes"]) == (3, 1.5) and "ratio_to_fp8" not in fp8
    _, fp8 = run("bench_quantised", "--time", *flags.split(), "fp8")
    assert fp8["ratio_to_float"] == 3
    _, r = run("bench_eight_bits", *flags.replace("--format", "--weight-format").split(), "fp8")
    assert r["ratio_to_bf16"] == 3 and "ratio_to_codes" not in r
    r, _ = run("bench_layer", "--shape", SMALL, "--dtype", "fp32", "--peers", "loop")
    assert (r["dense_ratio"], r["peer"], r["peer_ratio"], r["ratio_to_loop"]) == (9, "loop", 2, 2)


@pytest.fixture
def nanoseconds(load, monkeypatch):
    """Each run takes one, so that TFLOP/s are thousands of FLOPs and GB/s are bytes; a copy takes 1e5."""
    common = load("common")
    monkeypatch.setattr(
        common, "times", lambda clock, runs, _: {name: 1e-4 if name == "copy" else 1e-9 for name in runs}
    )
    return common


def test_rates_of_dense_layers(run, nanoseconds):
    records = run("bench_linear", "--shape", "24,40", "--tokens", "1,17")
    exact = [n * 2 * T * 24 * 40 / 1e3 for n in (1, 3) for T in (1, 17)]
    assert [r["tflops"] for r in records] == pytest.approx(exact)
    assert all((r["bench"], r["shape"], r["dtype"]) == ("linear", "24,40", "bf16") for r in records)
    assert all(r["dense_ratio"] == 1 and r["cublas_bits"] in ("same", "other") for r in records)
    assert all(r["cublas_bits"] == "same" for r in records if r["tokens"] == 17)


@pytest.mark.parametrize("shape, gated", (("olmoe", True), ("nemotron3-nano", False)))
def test_rates_of_8_bits(run, nanoseconds, monkeypatch, capsys, shape, gated):
    """FLOPs are those of the shape's matrices, bits those of codes and scales."""
    monkeypatch.setattr(nanoseconds, "layer_sizes", lambda name: nanoseconds.Sizes(24, 8, 2, 128, 128))
    flags = f"--shape {shape} --dtype bf16 --peers vllm,torch-gemms"
    ours, *records = run("bench_eight_bits", *flags.split())
    for r in (ours, *records):
        assert r["tflops"] == pytest.approx(2 * (2 + gated) * 24 * 2 * 128 * 128 / 1e3)
        assert (r["published_tflops"], r["input_dtype"], r["output_dtype"]) == (None, "bf16", "bf16")
    for r in records:
        assert (r["scale_dtype"], r["peer_errors"], r["max_rel_error"]) == ("fp32", {}, r["error_to_float"])
    # float32 scales of a tile or of a row, and int8_smooth's factors of the columns
    bits = [8 + 32 / n for n in (128**2, 128**2, 128, 128, 64)]
    assert [r["bits_per_weight"] for r in records] == pytest.approx(bits, abs=1e-3)
    printed = capsys.readouterr().out
    for name in ("vllm", "torch-gemms"):
        assert f"{name} is left out: {name}: expected a GPU" in printed


def test_rates_of_kernels(run, nanoseconds, monkeypatch):
    """Every input counts once and every output; activations stand beside silu."""
    records = run("bench_kernels", "--shape", SMALL, "--dtype", "bf16")
    x, rows, logits, slots = 24 * 64 * 2, 48 * 64 * 2, 24 * 8 * 2, 48 * 4  # of bf16; scores and ids
    exact = {"router_logits": x + 8 * 64 * 2 + 2 * logits, "route": logits + 2 * slots}
    exact |= {"route_backward": 2 * logits + 2 * slots, "permute": x + slots + rows}
    exact |= {"combine": rows + 2 * slots + x, "unpermute_backward": x + 2 * rows + 3 * slots}
    found = {r["what"]: r for r in records}
    assert {what: found[what]["gb_per_s"] for what in exact} == exact
    for r in records:
        assert (r["torch_ratio"], r["graph_us"], r["copy_gb_per_s"]) == (None, None, 1342.2)
        assert r["copy_ratio"] == pytest.approx(r["gb_per_s"] / 1342.2, abs=1e-3)
    monkeypatch.setattr(nanoseconds, "times", lambda clock, runs, _: {run: len(run[1]) for run in runs})
    for r in run("bench_kernels", "--shape", SMALL, "--dtype", "bf16", "--activations"):
        assert r["silu_ratio"] == len(r["layer"]) / 4


def test_rates_of_few_tokens(run, nanoseconds):
    """Two calls take a nanosecond. All tokens have the same two experts: 6 TKDF over three weights each."""
    flags = f"--shape {SMALL} --tokens 1,5 --dtype bf16 --routing worst --format int8"
    for r in run("bench_decode", *flags.split()):
        assert r["tflops"] == pytest.approx(2 * 6 * r["tokens"] * 2 * 64 * 32 / 1e3)
        assert r.get("intensity") == (r["tokens"] if r["what"] == "experts" else None)
    flags = f"--shape {SMALL} --tokens 2 --dtype fp32 --gate-only --format int8"
    _, int8 = run("bench_decode", *flags.split())
    assert int8["gated"] is False and int8["max_rel_error"] < 1e-5
    assert int8["bytes"] == 8 * (2 * 64 * 32 + 4 * (64 + 32))  # codes, and a float32 scale for each row


@pytest.mark.parametrize("flags", ("", "--gate-only --activation gelu"), ids=["gated", "gate only"])
def test_a_roofline_of_few_tokens(run, nanoseconds, tmp_path, flags):
    """Bytes are those of the experts with tokens; fusing needs fewer of them."""
    pytest.importorskip("matplotlib")
    picture, (T, K, D, F), sides = tmp_path / "roofline.png", (4, 2, 64, 32), 1 if flags else 2
    flags = f"--shape {SMALL} --tokens 4 --dtype bf16 --routing one --roofline {picture} {flags}"
    records = run("bench_decode", *flags.split())
    flops, R, w = 2 * T * K * D * F, T * K, 2 * D * F
    elementwise = 5 if sides == 2 else 2
    moved = {"up_gate": sides * w + T * D + R * F}
    moved |= {"apart": sides * (w + R * (D + F)) + elementwise * R * F, "down": w + R * (F + D)}
    assert [r["what"] for r in records] == [*moved]
    for r, elements in zip(records, moved.values(), strict=True):
        total = flops * (1 if r["what"] == "down" else sides)
        assert set(r) >= FIELDS and r["bench"] == "decode_kernels" and r["floor_ratio"] > 0
        assert (r["tflops"], r["gb_per_s"]) == pytest.approx((2 * total / 1e3, 2 * 2 * elements))
        assert r["intensity"] == pytest.approx(total / (2 * elements), abs=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_validating_times_nothing(load, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load("common"), "times", None)
    (tmp_path / "bench_decode.json").write_text("[]")
    flags = f"--shape {SMALL} --tokens 1,4 --dtype fp32 --validate --plot {tmp_path / 'plot.png'}"
    assert run("bench_decode", *flags.split()) == []
    assert len(re.findall("tokens: ours .*e-.*, loop .*e-", capsys.readouterr().out)) == 2


def test_the_loss_of_a_model(load, run, tmp_path, monkeypatch, capsys):
    """The records of the example, with the machine, of the formats that are asked for."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    train_lm = load("train_lm")
    monkeypatch.setattr(train_lm, "GENERATED_BYTES", 1)
    flags = (
        "--layers 1 --dim 32 --hidden-dim 32 --num-experts 4 --top-k 2 --seq-len 16 --steps 1 --device cpu"
    )
    train_lm.main([*flags.split(), "--out", str(tmp_path)])
    ways = ["float32", "fp8", "fp8, compute fp8", "int4 of 32", "int4 of 32, zero points"]
    for computes, names in (([], ways), (["--compute", "fp8"], [ways[0], ways[2]])):
        capsys.readouterr()
        records = run("bench_quantised", "--model", str(tmp_path), "--format", "fp8,int4", *computes)
        assert [r["layer"] for r in records] == names
        for r in records:
            assert set(r) >= FIELDS | {"format", "bytes"}
            assert (r["bench"], r["shape"], r["layers"], r["steps"]) == ("quantised_lm", "64,4,2,32,32", 1, 1)
            assert r["loss_change"] == r["loss"] - records[0]["loss"] and 1 < r["loss"] < 9
        printed = capsys.readouterr().out
        assert "bits per byte" in printed and f"{records[-1]['bytes']:,}" in printed


def test_a_program_runs_as_a_script(cpu):
    flags = f"bench_kernels.py --shape {SMALL} --dtype fp32 --device cpu --repeats 1 --what permute"
    command, options = [sys.executable, *flags.split()], {"capture_output": True, "text": True}
    assert "permute" in subprocess.run(command, cwd=BENCHMARKS, check=True, **options).stdout


def test_errors_of_formats(run, capsys):
    records = run("bench_quantised", "--shape", SMALL, "--quality", "--dtype", "fp32")
    found = {(r["what"], r["layer"]): r for r in records}
    for r in records:
        assert set(r) >= FIELDS and (r["bench"], r["tokens"]) == ("quantised_quality", 256)
        is_float = r["format"] == "fp32"
        assert r["weight_error"] == 0 if is_float else 1e-3 < r["weight_error"] < 0.5
        assert r["output_error"] < 1e-2 if is_float else r["weight_error"] < r["output_error"] < 1
    # A normal distribution rounded to 127 steps of its largest value, and to a mantissa of 3 bits
    assert 0.005 < found["gaussian", "int8"]["weight_error"] < 0.01
    assert 0.02 < found["gaussian", "fp8"]["weight_error"] < 0.03
    assert found["gaussian", "int4 of 32, zero points"]["bits_per_weight"] == 4 + (8 * 4 + 8) / 32
    # What rounding x adds; and what a channel of 20 times the others costs codes with one scale per row
    output = {
        name: r["output_error"] for (what, name), r in found.items() if what == "x with outlier channels"
    }
    assert output["fp8_block"] < output["fp8_block, compute fp8"] < 2 * output["fp8_block"]
    assert 2 * output["int8"] < output["int8, compute int8"]
    smooth = "int8, compute int8_smooth"
    assert output[f"{smooth}, calibrated"] < 0.7 * output[smooth]
    said = "int4 of 128 is left out: expected widths that are multiples of 128, found D = 64, F = 32"
    assert said in capsys.readouterr().out


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
    for what in PASSES:
        few, largest = (operands.rows(Product.apply, what, T) for T in (3, 4))
        seen = wrong == "out" or (wrong == "dx" and what == "forward_backward")
        assert bench.same_bits(few, largest) == (not seen)


def test_other_bits_of_ours_end_the_program(load, monkeypatch):
    bench = load("bench_linear")
    linear, operands = torch.nn.functional.linear, bench.Operands
    monkeypatch.setattr(fused_moe, "linear", lambda x, weight: linear(x, weight) + (x.size(0) == 3))
    monkeypatch.setattr(bench, "Operands", lambda *asked: operands(*asked[:3], "cpu"))
    with pytest.raises(SystemExit, match="forward 3 tokens: other bits than in a batch of 4"):
        list(bench.measure("24,40", "fp32", SimpleNamespace(tokens=[3, 4], device="cuda")))


@pytest.mark.parametrize("shape, experts", (("mixtral-8x7b", "num_local_experts"), ("olmoe", "num_experts")))
@pytest.mark.parametrize("quantization", ("none", "fp8_block", "int8", "int4"))
def test_the_models_of_vllm(load, shape, experts, quantization):
    """Sizes are those of shapes.json, all but the experts stays float, and transformers reads the rest."""
    config = load("bench_vllm").model_config(shape, 3, quantization, "bf16")
    sizes = load("common").layer_sizes(shape)
    assert (config["hidden_size"], config[experts]) == (sizes.dim, sizes.num_experts)
    assert config.get("moe_intermediate_size", config["intermediate_size"]) == sizes.hidden_dim
    quantized = config.pop("quantization_config", {})
    dense = quantized.get("modules_to_not_convert", quantized.get("ignore"))
    assert (dense is None) == (quantization == "none")
    assert dense is None or (len(dense) == 1 + 3 * 5 and not any("experts" in name for name in dense))
    transformers = pytest.importorskip("transformers")
    del config["architectures"]
    known = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    assert known.num_hidden_layers == 3 and known.num_experts_per_tok == sizes.top_k
