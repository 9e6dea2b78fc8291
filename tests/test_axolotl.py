"""fused_moe.axolotl in the real package: its plugin manager, its validation, its command's training on a CPU.

Not run: GPUs, several processes, bitsandbytes' weights, datasets and models of the network.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import assert_near

if os.environ.get("FUSED_MOE_TEST_PACKAGES") != "1":  # then a missing axolotl is a failure
    pytest.importorskip("axolotl")

import yaml  # noqa: E402
from axolotl.cli.config import prepare_plugins  # noqa: E402
from axolotl.integrations.base import PluginManager  # noqa: E402
from axolotl.utils.config import validate_config  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_docs import ROOT, blocks  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

import fused_moe  # noqa: E402

OURS, KERNELS = "fused_moe.axolotl.FusedMoEPlugin", "axolotl.integrations.kernels.KernelsPlugin"
EXPERT_PARALLEL = "axolotl.integrations.expert_parallel.ExpertParallelPlugin"
PAGE = ROOT / "docs" / "finetuning.md"
((_, _, LINES),) = blocks(PAGE, "yaml")
CONFIG = yaml.safe_load("\n".join(LINES))
FLOAT = {"fused_moe_quantize": None}
FULL = {key: None for key in CONFIG if key.startswith("lora")} | {"adapter": None} | FLOAT
# What a CPU and a folder without the network need: each run's own keys come after these.
SMALL = {"base_model": "tiny", "datasets": [{"path": "data.jsonl", "type": "completion"}], "sequence_len": 64}
SMALL |= {
    "max_steps": 2,
    "optimizer": "sgd",
    "learning_rate": 10.0,
    "lr_scheduler": "constant",
    "logging_steps": 1,
}
SMALL |= {"bf16": False, "fp16": False, "num_epochs": 1, "sample_packing": False, "seed": 3}
RUNS = {  # full fine-tuning first: axolotl's changes to attention for adapters stay in the process
    "full": FULL,
    "theirs": FLOAT | {"plugins": None},
    "ours": FLOAT,
    "quantised": {},
}
TRAIN = """
import json, sys
from unittest import mock
from axolotl.cli.train import do_cli
from fused_moe.transformers import experts

for name in sys.argv[1:]:
    with mock.patch.object(experts, "fused_experts", wraps=experts.fused_experts) as computed:
        do_cli(f"{name}.yml")
    calls = {(type(c.args[1]).__name__, c.kwargs["lora"] is not None) for c in computed.mock_calls}
    json.dump(sorted(calls), open(f"{name}.json", "w"))
"""


def validated(config: dict) -> DictDefault:
    """As `load_cfg` of axolotl's command does it."""
    PluginManager.get_instance().plugins.clear()
    config = DictDefault(config)
    prepare_plugins(config)
    capabilities = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}
    return validate_config(config, capabilities, {"torch_version": "2.13.0"})


def test_the_page_is_valid(cpu):
    found = validated(CONFIG)
    assert (found.experts_implementation, found.fused_moe_quantize) == ("fused_moe", "int4")
    assert {key: found[key] for key in CONFIG if key != "datasets"} | {
        "datasets": CONFIG["datasets"]
    } == CONFIG


@pytest.mark.parametrize("plugins", ([OURS], [OURS, KERNELS], [KERNELS, OURS]), ids=("ours", "first", "last"))
@pytest.mark.parametrize("name", (None, "fused_moe", "fused_moe_fp8"))
def test_it_has_the_last_word(cpu, plugins, name):
    """axolotl's plugin of kernels sets "eager" for a name that is not its own, and where there is none."""
    found = validated(CONFIG | FULL | {"plugins": plugins, "experts_implementation": name})
    assert found.experts_implementation == (name or "fused_moe")
    theirs = validated(CONFIG | FULL | {"plugins": [KERNELS], "experts_implementation": name})
    assert theirs.experts_implementation == "eager"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"experts_implementation": "eager"}, "fused_moe or fused_moe_fp8, or none, found eager"),
        ({"experts_implementation": "grouped_mm"}, "fused_moe or fused_moe_fp8, or none, found grouped_mm"),
        ({"use_scattermoe": True}, "expected no use_scattermoe"),
        ({"use_sonicmoe": True}, "expected no use_sonicmoe"),
        ({"expert_backend": "sonicmoe"}, "expected no expert_backend, .* found sonicmoe"),
        ({"expert_parallel_size": 2}, "expected expert_parallel_size 1, found 2"),
        ({"fused_moe_quantize": "int3"}, "'fp8_block', 'fp8', 'int8', 'int4' or 'mxfp4'"),
        (FULL | {"fused_moe_quantize": "int4"}, "expected an adapter beside fused_moe_quantize"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_contradictions(cpu, keys, message):
    for others in ([KERNELS, EXPERT_PARALLEL], []):
        with pytest.raises(ValueError, match=message):
            validated(CONFIG | {"plugins": [OURS, *others]} | keys)


def test_an_old_transformers_is_an_error(cpu, monkeypatch):
    """axolotl passes over a plugin that it cannot import, with a line in its log."""
    monkeypatch.setitem(sys.modules, "fused_moe.transformers", None)
    with pytest.raises(ImportError):
        validated(CONFIG)


def write_tiny_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(92))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model("qwen3_moe", num_experts=8, num_experts_per_tok=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tiny")
    texts = [" ".join(f"w{(7 * i + j * j) % 92}" for j in range(40)) for i in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(folder: Path, *command: str) -> str:
    path = os.pathsep.join([str(Path(fused_moe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    offline = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **offline}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, timeout=900, **pipes)
    assert done.returncode == 0, done.stdout[-20000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder in which axolotl's command has trained the page's model, but for its size, in every way."""
    folder = tmp_path_factory.mktemp("axolotl")
    write_tiny_model(folder)
    for name, keys in RUNS.items():
        text = yaml.safe_dump(CONFIG | SMALL | keys | {"output_dir": name})
        (folder / f"{name}.yml").write_text(text)
    run(folder, "-c", TRAIN, *RUNS)
    return folder


def weights_of(folder: Path) -> dict:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("theirs", []),
        ("ours", [["Parameter", True]]),
        ("quantised", [["QuantizedWeight", True]]),
        ("full", [["Parameter", False]]),
    ],
)
def test_what_computes(cpu, trained, name, calls):
    assert json.loads((trained / f"{name}.json").read_text()) == calls


def test_adapters_are_theirs(cpu, trained):
    """The files of two steps of gradient descent: names, shapes and values of axolotl's own experts."""
    theirs, ours = weights_of(trained / "theirs"), weights_of(trained / "ours")
    assert theirs.keys() == ours.keys() == weights_of(trained / "quantised").keys()
    assert sum("experts" in name for name in ours) == 2 * 2 * 2
    for name, value in theirs.items():
        assert value.any()  # PEFT's lora_B is zero at first
        assert_near(ours[name], value, slack=256)


def test_experts_train(cpu, trained):
    before, after = weights_of(trained / "tiny"), weights_of(trained / "full")
    assert before.keys() == after.keys()
    assert not [name for name in before if "experts" in name and torch.equal(before[name], after[name])]


def test_merge(cpu, trained):
    """merge_method: legacy, of the page, merges adapters of quantised experts into the float model."""
    run(trained, "-m", "axolotl.cli.merge_lora", "quantised.yml", "--lora-model-dir", "quantised")
    before, merged = weights_of(trained / "tiny"), weights_of(trained / "quantised" / "merged")
    assert before.keys() == merged.keys()
    assert not [name for name in before if "experts" in name and torch.equal(before[name], merged[name])]
