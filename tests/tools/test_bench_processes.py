"""Programs of benchmarks/ that start processes: builds, engines of vLLM, trainers of torchtitan. Stand-ins
answer."""

import importlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch.distributed.run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="not in a checkout")

# --- builds -------------------------------------------------------------------------------------------


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


def test_host_times_on_a_cpu(load, tmp_path):
    path = tmp_path / "out.json"
    load("bench_host").main(f"--build HEAD={ROOT} --device cpu --rounds 1 --json {path}".split())
    records = json.loads(path.read_text())
    layers, single = ["forward", "forward_backward"], ["fused_experts", "fused_experts out=", "FusedMoE"]
    assert [r["what"] for r in records] == layers + single
    for r in records:
        assert (r["bench"], r["commit"], r["device"]) == ("host", "HEAD", "cpu")
    for r in records[len(layers) :]:
        assert abs(r["operator_us"] + r["python_us"] - r["host_us"]) < 0.2


def test_builds_are_compared_with_the_first(load, tmp_path, monkeypatch):
    """Layers and their kernels beside dense GEMMs, and decoding, for any number of builds."""
    builds, us = load("builds"), {"A": 100, "B": 80, "C": 50}

    class Process:
        def __init__(self, build):
            self.commit = build.split("=")[0]

        def ask(self, what="", shape="", **_):
            half = us[self.commit] / 2
            return (
                None
                if shape
                else {"up_gate": half}
                if what == "kernels"
                else half * (1 + (what[:5] != "dense"))
            )

    monkeypatch.setattr(builds, "start", lambda trees, *_, twice: [Process(b) for b in trees + trees[::-1]])
    path = tmp_path / "out.json"
    flags = [*(f"--build={name}=." for name in us), "--shape", "olmoe", "--json", str(path)]
    load("compare_builds").main(flags)
    found = {(r["what"], r["new_commit"]): r for r in json.loads(path.read_text())}
    assert set(found) == set(product((*("forward", "forward_backward"), "up_gate"), "BC"))
    assert {r["old_commit"] for r in found.values()} == {"A"}
    assert (found["up_gate", "C"]["old_us"], found["up_gate", "C"]["new_us"]) == (50, 25)
    assert [found["forward", "B"][f"{age}_dense_ratio"] for age in ("old", "new")] == [0.5, 0.625]
    load("compare_builds").main([*flags, "--tokens", "1,64", "--format", ",int4"])
    found = json.loads(path.read_text())
    assert [(r["format"], r["tokens"], r["new_commit"], r["old_us"] / r["new_us"]) for r in found] == [
        (*case, *new) for *case, new in product(("", "int4"), (1, 64), (("B", 1.25), ("C", 2)))
    ]


# --- engines ------------------------------------------------------------------------------------------

ENGINE = """
import json, os, sys, time
from types import ModuleType, SimpleNamespace
__version__ = "0.33.0"
plugin = ModuleType("fused_moe.vllm")
plugin.register = lambda: print("INFO [report.py:9] fused_moe runs the experts of 2 of 2 MoE layers")
sys.modules["fused_moe.vllm"] = plugin
INVARIANT = os.environ["VLLM_BATCH_INVARIANT"] == "1"
SamplingParams = SimpleNamespace
now = 0.0
time.perf_counter = lambda: now


class LLM:
    def __init__(self, model, dtype, max_model_len, **settings):
        config = json.load(open(model + "/config.json"))
        print(json.dumps([config, dtype, max_model_len, settings]))
        if "quantization_config" not in config and os.environ["FUSED_MOE_VLLM"] == "0":
            sys.exit("this one cannot")
        print("INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: [].")
        print("INFO [unquantized.py:1] Using TRITON Unquantized MoE backend out of potential backends: [].")
        if not INVARIANT:
            print("INFO [fused_moe.py:1] Using configuration from /configs/E=128.json for MoE layer.")

    def generate(self, prompts, sampling, use_tqdm):
        global now
        time.sleep(600 if len(prompts) == 77 else 0)
        now += (0.01 + 0.002 * sampling.max_tokens) * (1 if os.environ["FUSED_MOE_VLLM"] == "1" else 2)
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
    """A package named vllm, with a clock of its own: its stock variant takes twice as long."""
    (tmp_path / "site/vllm").mkdir(parents=True)
    (tmp_path / "site/vllm/__init__.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_vllm_engines_in_every_variant(run, load, tmp_path, capsys, engine):
    """Each in its own process. Ours have ratios to the stock engine of the same mode, and to others that have
    run. One that fails has a record without a time, and the program fails."""
    own = ("fused_moe", "fused_moe_invariant", "fused_moe_codes", "fused_moe_float")
    ways = ("stock", "stock_invariant", *own, "stock_float")
    flags = (
        "--quantization fp8_block --batch 3,1 --prompt 5 --new-tokens 40 --layers 2 --at-once 7 --variants"
    )
    with pytest.raises(SystemExit, match="1"):
        run("bench_vllm", *flags.split(), ",".join(ways), "--work", str(tmp_path / "work"))
    printed, records = capsys.readouterr().out, json.loads((tmp_path / "bench_vllm.json").read_text())
    assert "this one cannot" in printed and "failed: 1" in printed
    assert [(r["what"], r["batch"]) for r in records] == list(product(ways, (3, 1)))
    modes = ",".join(importlib.import_module("fused_moe.vllm").MODES)
    for r in records:
        name, kind = r["what"], "none" if r["what"].endswith("float") else "fp8_block"
        ours, invariant = name.startswith("fused_moe"), name.endswith("invariant")
        assert (r["bench"], r["tokens"], r["quantization"]) == ("vllm", r["batch"], kind)
        assert r["shape"] == f"qwen3-30b, 2 layers, {'bf16' if kind == 'none' else kind}, prompt 5"
        log = (tmp_path / "work" / name / "log").read_text()
        assert ("quantization_config" in log) == (kind != "none")
        compute = load("bench_vllm").environment({"variant": name})["FUSED_MOE_VLLM_COMPUTE"]
        assert compute == ("codes" if name.endswith("codes") else modes)
        if name == "stock_float":
            assert (r["failed"], r["time_us"]) == ("1", None)
            continue
        assert all(r["samples"][field] == [r[field]] for field in ("first_token_ms", "tokens_per_s"))
        assert (r["failed"], r["vllm"], r["same_bits"]) == (None, "0.33.0", invariant)
        assert (r["attention"], r["backends"]) == (["FLASH_ATTN"], ["TRITON Unquantized MoE backend"])
        assert r["tiles"] == (None if invariant else ["E=128.json"])
        assert r["plugin"] == (["fused_moe runs the experts of 2 of 2 MoE layers"] if ours else [])
        peers = {n.removeprefix("ratio_to_") for n in r if n.startswith("ratio_to_")}
        peer = {"fused_moe_invariant": "stock_invariant", "fused_moe_float": None}.get(name, "stock")
        expected = {"stock", peer or "stock", *own[2:]} - {name}
        assert peers == (expected if ours else set())
        if ours and peer:
            assert r["same_tokens"] == 1 and r["peer"] == peer
            assert r["peer_ratio"] == r[f"ratio_to_{peer}"] == 2
            assert r["first_token_ratio"] == r[f"first_token_ratio_to_{peer}"] == 2
    log = (tmp_path / "work/fused_moe/log").read_text()
    config, dtype, length, settings = json.loads(next(line for line in log.splitlines() if line[0] == "["))
    assert (config["model_type"], config["num_hidden_layers"], dtype) == ("qwen3_moe", 2, "bfloat16")
    assert (length, settings["max_num_seqs"]) == (5 + 64, 3)


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


def test_a_vllm_engine_over_the_limit(run, tmp_path, capsys, engine):
    """It is stopped, and what it had answered does not count."""
    flags = "--batch 2,77 --prompt 5 --layers 1 --quantization int8 --limit 6 --variants stock --work"
    with pytest.raises(SystemExit, match="1"):
        run("bench_vllm", *flags.split(), str(tmp_path / "work"))
    records = json.loads((tmp_path / "bench_vllm.json").read_text())
    assert [(r["batch"], r["failed"], r["time_us"]) for r in records] == [(2, "-9", None), (77, "-9", None)]
    assert "stock failed (-9)" in capsys.readouterr().out


# --- trainers -----------------------------------------------------------------------------------------

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
    torchrun = tmp_path / "titan/torch/distributed/run.py"  # in place of PyTorch's, which takes seconds
    torchrun.parent.mkdir(parents=True)
    for package in (torchrun.parent, torchrun.parents[1]):
        (package / "__init__.py").touch()
    torchrun.write_text("import runpy\nrunpy.run_module('torchtitan.train', run_name='__main__')")
    (tmp_path / "titan/assets").mkdir()
    (tmp_path / "titan/assets/version.txt").write_text("0.2.2\n")
    return tmp_path / "titan"


def test_torchtitan_in_variants_and_batches(load, tmp_path, capsys, titan):
    """One variant fails and another does not fit one batch, which has a record; the others count. Warm-up
    and profiled steps do not."""
    path, work = tmp_path / "out.json", tmp_path / "work"
    flags = f"--torchtitan {titan} --steps 40 --profile 2 --nproc 1 --work {work} --json {path}"
    with pytest.raises(SystemExit, match="1"):
        load("bench_torchtitan").main([*flags.split(), "--ac", "full", "--compile", "--local-batch", "8,1"])
    assert "this one cannot" in capsys.readouterr().out
    found = {(r["what"], r["local_batch_size"]): r for r in json.loads(path.read_text())}
    assert set(found) == set(product(("grouped_mm", "fused_moe"), (8, 1)))
    assert found["grouped_mm", 8]["failed"] == "CUDA out of memory"
    assert found["grouped_mm", 8]["time_us"] is None and found["fused_moe", 8]["peer"] is None
    stock, ours = found["grouped_mm", 1], found["fused_moe", 1]
    for r in (stock, ours):
        assert (r["bench"], r["shape"]) == ("torchtitan", "16B6, 1 GPU, full AC, compiled, batch 1")
        assert (r["peak_mib"], r["timed_steps"], len(r["losses"]), r["torchtitan"]) == (2048, 32, 40, "0.2.2")
        assert r["final_loss"] == pytest.approx(sum(4 / step for step in range(37, 41)) / 4)
    assert [(r["time_us"], r["tokens_per_second"]) for r in (stock, ours)] == [(5e5, 2000), (2.5e5, 4000)]
    assert ours["ratio_to_grouped_mm"] == ours["peer_ratio"] == 2 and "ratio_to_loop" not in ours
    assert (ours["moe_time_over_grouped_mm"], ours["moe_share_over_grouped_mm"]) == (0.5, 0.75)
    assert ours["loss_over_grouped_mm"] == 1
    command = (work / "fused_moe_8/command").read_text()
    assert "--training.local_batch_size=8 " in command and "--activation_checkpoint.mode=full" in command
    assert "--compile.enable" in command
    flags = torch.distributed.run.parse_args(command.split()[3:])
    assert (flags.standalone, flags.nproc_per_node, flags.module) == (True, "1", True)
    assert flags.training_script == "torchtitan.train"
    texts = [json.loads(line)["text"] for line in (work / "text/data.json").open()]
    assert len(texts) > 1000 and max(map(len, texts)) == 4000
    assert stock["text"].startswith("Python 3.") and stock["text"].endswith("'s standard library")


def test_torchtitan_in_fp8_and_with_several_seeds(load, tmp_path, capsys, titan):
    """FP8's loss over that of the same seed, beside another seed's. The checkout's text is taken if there is
    some."""
    path, work, text = tmp_path / "out.json", tmp_path / "work", titan / "tests/assets/c4_test"
    text.mkdir(parents=True)
    (text / "data.json").touch()
    flags = f"--torchtitan {titan} --steps 40 --nproc 1 --seeds 3,4 --json {path} --work {work}"
    load("bench_torchtitan").main([*flags.split(), "--variants", "fused_moe,fused_moe_fp8"])
    usual, fp8, other = json.loads(path.read_text())
    assert [(r["what"], r["seed"]) for r in (usual, fp8, other)] == [
        *(("fused_moe", 3), ("fused_moe_fp8", 3), ("fused_moe, seed 4", 4)),
    ]
    assert usual["last_50_loss"] == pytest.approx(sum(7 / step for step in range(1, 41)) / 40)
    assert fp8["last_50_loss_over_fused_moe"] == pytest.approx(5 / 7, abs=1e-5)
    assert other["last_50_loss_over_fused_moe"] == pytest.approx(8 / 7, abs=1e-5)
    assert [r["ratio_to_fused_moe"] for r in (fp8, other)] == [1.25, 1] and fp8[
        "peak_mib_over_fused_moe"
    ] == 1
    assert "last_50_loss_over_fused_moe" not in usual and usual["text"] == "the checkout's"
    assert "loss of the last 50 steps -28.571%" in capsys.readouterr().out
    assert not (work / "text").exists()
    assert "--debug.seed=4" in (work / "fused_moe_4_seed4/command").read_text()
