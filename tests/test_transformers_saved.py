"""Experts that quantize_experts has quantised, saved by save_pretrained and loaded by from_pretrained.

Each format in each family comes back bit by bit; what is written is what our loaders of published checkpoints
read, too, and what transformers unpacks without us. test_vllm_saved.py reads it with vLLM.
"""

import copy
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from cases import BF16, F32, Calls, assert_near, assert_same_bits, make_ids
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")  # of the models that are taken from test_transformers.py
pytest.importorskip("compressed_tensors")

from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers import registered, tiny_config, tiny_model, token_ids  # noqa: E402, F401
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402

import fused_moe.transformers  # noqa: E402
from fused_moe import quantized  # noqa: E402
from fused_moe.transformers import quantize_experts  # noqa: E402
from fused_moe.transformers.weights import experts_of, weight_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

NAMES = ("gate_up_proj", "down_proj")
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
FAMILIES = {
    "mixtral": {**SIZES, "intermediate_size": 128},
    "qwen3_moe": SIZES,
    "deepseek_v3": SIZES,  # with shared experts, and a dense layer
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}
# kind -> arguments of quantize_experts, quant_method, format, and what names have after `weight`
KINDS = {
    "fp8_block": ({"format": "fp8_block", "compute": "fp8"}, "fp8", None, ("", "_scale_inv")),
    "fp8": ({"format": "fp8"}, "compressed-tensors", "float-quantized", ("", "_scale")),
    "fp8, 8 bits": (
        {"format": "fp8", "compute": "fp8"},
        "compressed-tensors",
        "float-quantized",
        ("", "_scale"),
    ),
    "fp8 per matrix": (
        {"format": "fp8", "per_tensor": True},
        "compressed-tensors",
        "float-quantized",
        ("", "_scale"),
    ),
    "int8": ({"format": "int8"}, "compressed-tensors", "int-quantized", ("", "_scale")),
    "int8, 8 bits": (
        {"format": "int8", "compute": "int8"},
        "compressed-tensors",
        "int-quantized",
        ("", "_scale"),
    ),
    "int8 per matrix": (
        {"format": "int8", "per_tensor": True, "compute": "int8"},
        "compressed-tensors",
        "int-quantized",
        ("", "_scale"),
    ),
    "int4": (
        {"format": "int4"},
        "compressed-tensors",
        "pack-quantized",
        ("_packed", "_scale", "_shape"),
    ),
    "int4, zero points": (
        {"format": "int4", "group_size": 32, "symmetric": False},
        "compressed-tensors",
        "pack-quantized",
        ("_packed", "_scale", "_shape", "_zero_point"),
    ),
    "mxfp4": ({"format": "mxfp4"}, "compressed-tensors", "mxfp4-pack-quantized", ("_packed", "_scale")),
}
STACKED = [family for family in FAMILIES if family != "gpt_oss"]  # by transformers, of each expert's matrices
CASES = [(family, kind) for family in STACKED for kind in KINDS] + [("gpt_oss", "mxfp4")]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)


def needs_packed_loading() -> None:
    if not hasattr(HfQuantizer, "serialized_names"):
        pytest.skip("this transformers unpacks checkpoints as it loads them")


def made(family="qwen3_moe", dtype=F32, **more) -> nn.Module:
    """A model whose experts are ours, not quantised yet."""
    if dtype == F32:
        model = tiny_model(family, "cpu", **{**FAMILIES[family], **more}).eval()
        model.set_experts_implementation("fused_moe")
        return model
    config = tiny_config(family, **{**FAMILIES[family], **more})
    settings = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "fused_moe"}
    return AutoModelForCausalLM.from_config(config, **settings).eval()


def quantised(family="qwen3_moe", kind="int4", **settings) -> nn.Module:
    return quantize_experts(made(family, **settings), **KINDS[kind][0])


def load(folder, implementation="fused_moe", **settings) -> nn.Module:
    chosen = {"attn_implementation": "eager", "dtype": "auto", **settings}
    if implementation is not None:
        chosen["experts_implementation"] = implementation
    return AutoModelForCausalLM.from_pretrained(folder, **chosen)


def written(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def as_bytes(tensors: dict) -> dict:
    return {name: t.reshape(-1).view(torch.uint8) for name, t in tensors.items()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(1, 81).view(2, 40)).logits


# --- back and forth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_round_trip(cpu, tmp_path, family, kind):
    """Codes, scales, zero points and logits come back bit by bit; a second save writes the same."""
    needs_packed_loading()
    model = quantised(family, kind)
    model.save_pretrained(tmp_path / "first")
    loaded = load(tmp_path / "first")
    assert torch.equal(logits(loaded), logits(model))
    for (_, ours), (_, theirs) in zip(experts_of(model), experts_of(loaded), strict=True):
        for name in NAMES:
            w, found = getattr(ours, name), weight_of(theirs, name, "fp8")
            assert (found.format, found.compute) == (w.format, w.compute)
            scale = w.scale.expand_as(found.scale)  # of each matrix, where w has one of both
            for own, other in ((w.data, found.data), (scale, found.scale), (w.zero, found.zero)):
                assert (own is None) == (other is None)
                assert own is None or (own.dtype == other.dtype and torch.equal(own, other))
    loaded.save_pretrained(tmp_path / "second")
    first, second = (written(tmp_path / name) for name in ("first", "second"))
    assert_same_bits(as_bytes(second), as_bytes(first))
    assert {n: (t.shape, t.dtype) for n, t in second.items()} == {
        n: (t.shape, t.dtype) for n, t in first.items()
    }
    again = load(tmp_path / "second")
    assert torch.equal(logits(again), logits(model))


def test_a_router_that_is_a_linear_layer(cpu, tmp_path):
    """transformers would quantise it, unless it finds the name that it has itself in the list."""
    needs_packed_loading()
    model = tiny_model("phimoe", "cpu", **SIZES, intermediate_size=128).eval()
    model.set_experts_implementation("fused_moe")
    quantize_experts(model, "fp8_block", compute="fp8").save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    names = config_of(tmp_path)["modules_to_not_convert"]
    assert {"model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"} <= set(names)


@pytest.mark.parametrize("kind", ("int4", "int8, 8 bits", "mxfp4"))
def test_round_trip_in_bfloat16(cpu, tmp_path, kind):
    """Scales keep their dtype: those of 8 bits on both operands are float32 beside 16-bit weights."""
    needs_packed_loading()
    model = quantised(kind=kind, dtype=BF16)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    scales = {t.dtype for name, t in written(tmp_path).items() if name.endswith("weight_scale")}
    assert scales == {{"int4": BF16, "int8, 8 bits": F32, "mxfp4": torch.uint8}[kind]}


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_is_written(cpu, tmp_path, family, kind):
    """The family's own names, and tensors that the loaders of published checkpoints read."""
    _, method, _, parts = KINDS[kind]
    model = quantised(family, kind)
    plain = copy.deepcopy(model)
    for _, experts in experts_of(plain):
        for name in NAMES:
            values = getattr(experts, name).dequantize(F32)
            delattr(experts, name)
            values = values.mT.contiguous() if experts.is_transposed else values
            experts.register_parameter(name, nn.Parameter(values))
    del plain.hf_quantizer
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "packed")
    packed, plain = (written(tmp_path / name) for name in ("packed", "plain"))
    is_expert = re.compile(r".*\.experts\.(\d+\.\w+\.weight|\w+_proj)$")
    weights = [name for name in plain if is_expert.match(name)]
    if family == "gpt_oss":
        method, parts = "mxfp4", ("_blocks", "_scales")
    assert len(weights) == (4 if family == "gpt_oss" else 24 if family == "deepseek_v3" else 48)
    assert packed.keys() == (plain.keys() - weights) | {name + part for name in weights for part in parts}
    read = {"fp8": quantized.from_fp8_block, "mxfp4": quantized.from_mxfp4}
    for name in weights:
        stem = name.removesuffix(".weight")
        w = read.get(method, quantized.from_compressed_tensors)(_one(packed, stem, family), "one")
        values = w.dequantize(F32)
        assert torch.equal(values.mT if family == "gpt_oss" else values[0], plain[name])


def _one(tensors: dict, stem: str, family: str) -> dict:
    """The tensors of one name, for all experts."""
    own = {
        f"one{n.removeprefix(stem)}": t for n, t in tensors.items() if re.match(rf"{re.escape(stem)}[._]", n)
    }
    return own if family == "gpt_oss" else {name: t[None] for name, t in own.items()}


NAMED = [
    ("mixtral", "fp8_block"),
    ("deepseek_v3", "int4"),
    ("deepseek_v3", "fp8_block"),
    ("gpt_oss", "mxfp4"),
]


@pytest.mark.parametrize(("family", "kind"), [*(("qwen3_moe", kind) for kind in KINDS), *NAMED])
def test_the_configuration(cpu, tmp_path, family, kind):
    """It says how experts are quantised, and that nothing else is."""
    options, method, format, _ = KINDS[kind]
    quantised(family, kind).save_pretrained(tmp_path)
    config, names = config_of(tmp_path), written(tmp_path)
    dense = {n.removesuffix(".weight") for n, t in names.items() if ".experts." not in n and t.dim() == 2}
    dense = {name for name in dense if not name.endswith(("bias", "sinks"))}
    if family == "gpt_oss":
        assert config == {"quant_method": "mxfp4", "modules_to_not_convert": config["modules_to_not_convert"]}
        assert set(config["modules_to_not_convert"]) == dense
        return
    assert config["quant_method"] == method and config.get("format") == format
    assert set(config["ignore" if format else "modules_to_not_convert"]) == dense
    if format is None:
        assert config["weight_block_size"] == [128, 128] and config["activation_scheme"] == "dynamic"
        return
    ((group, scheme),) = config["config_groups"].items()
    (target,) = scheme["targets"]
    modules = {name.rpartition(".")[0] for name in names}
    matched = {name for name in modules if re.match(target.removeprefix("re:"), name)}
    assert matched == {name for name in modules if re.search(r"\.experts\.\d+\.", name)}
    strategy = "group" if "_packed" in KINDS[kind][3] else "tensor" if "per_tensor" in options else "channel"
    assert scheme["weights"]["strategy"] == strategy
    assert scheme["weights"]["symmetric"] == options.get("symmetric", True)
    inputs = scheme["input_activations"]
    assert (inputs is not None) == ("compute" in options)
    assert inputs is None or (inputs["strategy"], inputs["dynamic"]) == ("token", True)


# What transformers makes of these checkpoints alone; serving.md and transformers.md name it.
RAISES_ALONE = ("int4, zero points", "int8", "int8, 8 bits", "int8 per matrix")


@ALL_KINDS
def test_transformers_alone(cpu, tmp_path, kind):
    """Any other implementation has the dequantised weights, or transformers raises."""
    needs_packed_loading()
    model = quantised(kind=kind, dtype=BF16 if kind == "mxfp4" else F32)
    model.save_pretrained(tmp_path)
    if kind in RAISES_ALONE:
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            load(tmp_path, "eager")
        return
    theirs = load(tmp_path, "eager")
    for (_, ours), (_, found) in zip(experts_of(model), experts_of(theirs), strict=True):
        for name in NAMES:
            values = getattr(ours, name).dequantize(model.dtype)
            torch.testing.assert_close(getattr(found, name), values, atol=0, rtol=0)


def test_gpt_oss_by_transformers_alone(cpu, tmp_path):
    model = quantised("gpt_oss", "mxfp4")
    model.save_pretrained(tmp_path)
    assert_near(logits(load(tmp_path, "eager")), logits(model), slack=64)


def test_fp8_blocks_without_quantised_activations(cpu, tmp_path):
    """Their layout has no word for it: register says it for what is loaded."""
    needs_packed_loading()
    model = quantize_experts(made(), "fp8_block")
    model.save_pretrained(tmp_path)
    fused_moe.transformers.register(compute="codes")
    try:
        assert torch.equal(logits(load(tmp_path)), logits(model))
    finally:
        fused_moe.transformers.register()
    assert not torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("kind", ("int4", "fp8_block"))
def test_shards(cpu, tmp_path, kind):
    needs_packed_loading()
    model = quantised(kind=kind)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(tmp_path)), logits(model))
    (first, *_) = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises((OSError, ValueError), match=first.name):
        load(tmp_path)


@pytest.mark.parametrize("kind", ("int4", "fp8 per matrix", "mxfp4"))
def test_no_tensor_is_copied(cpu, tmp_path, kind):
    """What is written is the weights' own memory, each tensor a storage of its own, or save_pretrained would
    copy the whole model before the first shard."""
    model = quantised(kind=kind)
    owned = [p for _, experts in experts_of(model) for p in experts.parameters() if p.nbytes > 2048]
    owned = [range(p.data_ptr(), p.data_ptr() + p.nbytes) for p in owned]
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    tensors = [t for n, t in state.items() if n.endswith((".weight", "_packed")) and ".experts." in n]
    assert len(tensors) == 48
    assert all(any(t.data_ptr() in memory for memory in owned) for t in tensors)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


@pytest.mark.parametrize("kind", ("int4", "fp8_block"))
def test_a_loaded_model_is_copied(cpu, tmp_path, kind):
    """No hook is left for layers that are not there; the target matches a module, or each load would warn."""
    needs_packed_loading()
    model = quantised(kind=kind)
    model.save_pretrained(tmp_path / "first")
    loaded = load(tmp_path / "first")
    torch.save(loaded, tmp_path / "model.pt")
    pickled = torch.load(tmp_path / "model.pt", weights_only=False)
    for again in (pickled, copy.deepcopy(loaded)):
        assert torch.equal(logits(again), logits(model))
        again.save_pretrained(tmp_path / "again")
        assert_same_bits(as_bytes(written(tmp_path / "again")), as_bytes(written(tmp_path / "first")))
    if kind == "int4":
        (target,) = config_of(tmp_path / "first")["config_groups"]["group_0"]["targets"]
        matched = [n for n, _ in loaded.named_modules() if re.match(target.removeprefix("re:"), n)]
        assert matched == [n for n, _ in experts_of(loaded)]


@pytest.mark.parametrize("kind", ("int4", "fp8_block"))
def test_offloaded(cpu, tmp_path, kind):
    pytest.importorskip("accelerate")
    needs_packed_loading()
    model = quantised(kind=kind)
    model.save_pretrained(tmp_path / "first")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = load(tmp_path / "first", device_map=places, offload_folder=tmp_path / "disk")
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert_same_bits(as_bytes(written(tmp_path / "again")), as_bytes(written(tmp_path / "first")))


@pytest.mark.parametrize("how", ("copied", "pickled", "the base model", "loaded", "written before"))
def test_models_of_any_origin(cpu, tmp_path, how):
    """A copy saves itself; a base model and one that was loaded have the names of the whole model's file."""
    needs_packed_loading()
    model = made()
    if how == "loaded":
        model.save_pretrained(tmp_path / "plain")
        model = load(tmp_path / "plain")
    quantize_experts(model, "int4")
    expected = logits(model)
    if how == "copied":
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.neg_()
        expected = -expected
    elif how == "pickled":
        torch.save(model, tmp_path / "model.pt")
        model = torch.load(tmp_path / "model.pt", weights_only=False)
    elif how == "written before":
        model.save_pretrained(tmp_path / "saved")
    if how == "the base model":
        model.model.save_pretrained(tmp_path / "saved")
        base = AutoModel.from_pretrained(
            tmp_path / "saved", experts_implementation="fused_moe", attn_implementation="eager"
        )
        expected, found = (m(torch.arange(8)[None]).last_hidden_state for m in (model.model, base))
        assert torch.equal(found, expected)
        return
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), expected)


def test_trainer_and_push_to_hub(cpu, tmp_path, monkeypatch):
    """Trainer's checkpoints, and what is uploaded, are what save_pretrained writes."""
    pytest.importorskip("accelerate")  # of Trainer
    needs_packed_loading()
    model, uploaded = quantised(), []
    model.save_pretrained(tmp_path / "saved")
    expected = as_bytes(written(tmp_path / "saved"))
    rows = [{"input_ids": row, "labels": row} for row in token_ids("cpu")]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trained"),
        use_cpu=True,
        max_steps=1,
        save_steps=1,
        learning_rate=0.0,
        report_to=[],
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    checkpoint = tmp_path / "trained" / "checkpoint-1"
    assert_same_bits(as_bytes(written(checkpoint)), expected)
    trainer.save_model(tmp_path / "model")
    assert torch.equal(logits(load(tmp_path / "model")), logits(model.eval()))
    hub = SimpleNamespace(create_repo=lambda *args, **kwargs: SimpleNamespace(repo_id="model"))
    module = sys.modules["transformers.utils.hub"]
    if hasattr(module, "hf_api"):
        monkeypatch.setattr(module, "hf_api", lambda: hub)
    else:
        monkeypatch.setattr(module, "create_repo", hub.create_repo)
    monkeypatch.setattr(
        module, "create_and_tag_model_card", lambda *a, **k: SimpleNamespace(save=lambda f: None)
    )

    def upload(self, working_dir, *args, **kwargs):
        uploaded.append(written(tmp_path.__class__(working_dir)))

    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    model.push_to_hub("model")
    (found,) = uploaded
    assert_same_bits(as_bytes(found), expected)


# --- what has no layout -----------------------------------------------------------------------------------


def partly() -> nn.Module:
    model = quantised(kind="int8")
    first = model.model.layers[0].mlp.experts
    values = first.down_proj.dequantize()
    del first.down_proj
    first.register_parameter("down_proj", nn.Parameter(values))
    return model


def mixed() -> nn.Module:
    model = made()
    quantize_experts(model.model.layers[0], "int8")
    return quantize_experts(model, "int4")


def with_powers_of_two() -> nn.Module:
    model = quantised(kind="fp8, 8 bits")
    for _, experts in experts_of(model):
        for name in NAMES:
            getattr(experts, name).set_compute("fp8", power_of_two=True)
    return model


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    return peft.get_peft_model(quantised(), config).base_model.model


NO_LAYOUT = {
    "adapted": (adapted, "they have PEFT's adapters; save those, or merge or unload them"),
    "gpt-oss, int8": (
        lambda: quantised("gpt_oss", "int8"),
        "gpt-oss is published in mxfp4, and they are int8",
    ),
    "smoothed": (lambda: quantize_experts(made(), "int8", compute="int8_smooth"), "compute 'int8' is saved"),
    "some": (partly, "some of the model's experts are not quantised"),
    "two formats": (mixed, "they differ in format, options or compute"),
    "scales": (with_powers_of_two, "their power_of_two is in no layout"),
    "blocks": (
        lambda: quantize_experts(made(moe_intermediate_size=64), "fp8_block"),
        "gate and up have 64 rows each, and blocks of 128 x 128 begin anew",
    ),
    "another gate": (
        lambda: quantize_experts(made("mixtral", moe_intermediate_size=64), "fp8_block"),
        "transformers' FP8Experts do not compute what MixtralExperts do",
    ),
}


@pytest.mark.parametrize("case", NO_LAYOUT)
def test_what_has_no_layout(cpu, tmp_path, case):
    """It raises before anything is written, and says why."""
    make, reason = NO_LAYOUT[case]
    model = make()
    with pytest.raises(ValueError, match=rf"{reason}.*; save them by torch\.save"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert getattr(model.config, "quantization_config", None) is None


# --- checkpoints of compressed-tensors that others have written ---------------------------------------------

WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
INPUTS = {**WEIGHTS, "strategy": "token", "dynamic": True}
BLOCKS = {**WEIGHTS, "strategy": "block", "block_structure": [128, 128]}
# case -> format, weights, input_activations, and the compute that experts have
PUBLISHED = {
    "fp8 by rows": ("fp8", {**WEIGHTS, "strategy": "channel"}, INPUTS, "fp8"),
    "fp8 per matrix": ("fp8", {**WEIGHTS, "strategy": "tensor"}, None, "codes"),
    "fp8 blocks": ("fp8_block", BLOCKS, {**INPUTS, "strategy": "group", "group_size": 128}, "fp8"),
    "fp8 blocks alone": ("fp8_block", BLOCKS, None, "codes"),
    "int8 by rows": (
        "int8",
        {**WEIGHTS, "type": "int", "strategy": "channel"},
        {**INPUTS, "type": "int"},
        "int8",
    ),
}


def publish(case: str, folder) -> nn.Module:
    """Writes a checkpoint whose matrices are quantised one by one; its values in a float model."""
    format, weights, inputs, _ = PUBLISHED[case]
    model = made()
    model.save_pretrained(folder)
    tensors = written(folder)
    for name in [n for n in tensors if ".experts." in n]:
        per_tensor = {"per_tensor": True} if weights["strategy"] == "tensor" else {}
        w = fused_moe.quantize(tensors[name][None], format, **per_tensor)
        tensors[name] = w.data[0]
        tensors[f"{name}_scale"] = w.scale[0].flatten() if per_tensor else w.scale[0]
        module, _, own = name.removesuffix(".weight").partition(".experts.")
        experts, (e, matrix) = model.get_submodule(f"{module}.experts"), own.split(".")
        stacked = experts.down_proj if matrix == "down_proj" else experts.gate_up_proj
        rows = {"up_proj": slice(128, 256)}.get(matrix, slice(128))
        stacked.data[int(e), rows] = w.dequantize()[0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["re:.*\\.experts\\..*_proj$"], "weights": weights, "input_activations": inputs}
    kind = "int-quantized" if format == "int8" else "float-quantized"
    rewrite(
        folder, quant_method="compressed-tensors", format=kind, quantization_status="compressed",
        config_groups={"group_0": group}, ignore=["lm_head"],
    )  # fmt: skip
    return model


def rewrite(folder, **changed) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **changed}
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("case", PUBLISHED)
def test_published(cpu, tmp_path, case):
    """Experts stay packed and compute as the checkpoint asks; register(compute="codes") keeps activations."""
    needs_packed_loading()
    plain = publish(case, tmp_path)
    model = load(tmp_path)
    packed = sum(t.nbytes for n, t in written(tmp_path).items() if ".experts." in n)
    assert packed == sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    with Calls() as calls:
        found = logits(model)
    compute = PUBLISHED[case][3]
    assert calls.kinds() == ["values" if compute == "codes" else "8 bits"] * 2
    expected = logits(plain)
    near = (found - expected).norm() / expected.norm()
    assert near < (1e-5 if compute == "codes" else 0.1) and (compute == "codes" or near > 1e-4)
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".experts." in n)
    fused_moe.transformers.register(compute="codes")
    try:
        assert_near(logits(load(tmp_path)), expected, slack=64)
    finally:
        fused_moe.transformers.register()
    model.save_pretrained(tmp_path / "again")
    assert_same_bits(as_bytes(written(tmp_path / "again")), as_bytes(written(tmp_path)))


def test_static_scales_are_left_to_transformers(cpu, tmp_path):
    needs_packed_loading()
    plain = publish("fp8 by rows", tmp_path)
    scheme = {"weights": PUBLISHED["fp8 by rows"][1], "targets": ["re:.*experts.*"]}
    static = {**WEIGHTS, "strategy": "tensor", "dynamic": False}
    rewrite(tmp_path, config_groups={"group_0": {**scheme, "input_activations": static}})
    with pytest.warns(UserWarning, match="not keep the experts packed: their activations have static scales"):
        model = load(tmp_path)
    assert_near(logits(model), logits(plain), slack=64)


# --- checkpoints that are damaged ---------------------------------------------------------------------------


def without(tensors: dict, name: str) -> None:
    del tensors[name]


def shorter(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def other_dtype(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name].to(torch.int8 if tensors[name].dtype == torch.uint8 else torch.uint8)


DAMAGED = [
    ("qwen3_moe", "int4", ".1.mlp.experts.3.up_proj.weight_packed"),
    ("qwen3_moe", "int8", ".0.mlp.experts.7.down_proj.weight_scale"),
    ("mixtral", "mxfp4", ".1.block_sparse_moe.experts.0.w1.weight_packed"),
    ("gpt_oss", "mxfp4", ".1.mlp.experts.gate_up_proj_blocks"),
]


@pytest.mark.parametrize(("family", "kind", "stem"), DAMAGED)
@pytest.mark.parametrize("damage", (without, shorter, other_dtype))
def test_damaged(cpu, tmp_path, family, kind, stem, damage):
    """A ValueError names the tensor and where it should be, before a weight is loaded. Where dtypes tell that
    some are not packed, transformers loads the checkpoint, if it can."""
    needs_packed_loading()
    quantised(family, kind).save_pretrained(tmp_path)
    tensors = written(tmp_path)
    name = f"model.layers{stem}"
    damage(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    where = f"{re.escape(name)} in {re.escape(str(tmp_path))}.*model.safetensors of (shape|dtype)"
    if damage is without:
        own = name.replace("block_sparse_moe", "mlp").partition(".experts.")[0]
        expert = re.search(r"experts\.(\d)", name)
        missing = rf"\[{expert[1]}\]" if expert else r"\[0, 1, 2, 3, 4, 5, 6, 7\]"
        where = rf"{re.escape(own)}\.experts\.\w+ of every expert in {re.escape(str(tmp_path))}.*{missing}"
    if damage is other_dtype and family != "gpt_oss":
        with pytest.warns(UserWarning, match="not keep the experts packed"), pytest.raises(RuntimeError):
            load(tmp_path)
        return
    with pytest.raises(ValueError, match=where):
        load(tmp_path)


def published_experts(kind: str, folder) -> dict[str, torch.Tensor]:
    needs_packed_loading()
    quantised(kind=kind).save_pretrained(folder)
    return written(folder)


@pytest.mark.parametrize("damage", (without, shorter))
def test_damaged_fp8(cpu, tmp_path, damage):
    """transformers would load the rest, and draw the layer's scales at random."""
    tensors = published_experts("fp8_block", tmp_path)
    for name in [n for n in tensors if ".1.mlp.experts." in n and n.endswith("_scale_inv")]:
        damage(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.experts\..*_scale_inv (in|of every expert in) "
    ):
        load(tmp_path)


@pytest.mark.parametrize("kind", ("int4", "fp8_block"))
def test_an_expert_too_many(cpu, tmp_path, kind):
    tensors = published_experts(kind, tmp_path)
    more = {n.replace("s.7.", "s.8."): t.clone() for n, t in tensors.items() if ".1.mlp.experts.7." in n}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    where = r"_proj\w* of 8 experts, found model\.layers\.1\.mlp\.experts\.8\.\w+\.\w+ in .*model.safetensors"
    with pytest.raises(ValueError, match=where):
        load(tmp_path)


# --- parameters of packed experts ---------------------------------------------------------------------------

LOADED = ("fp8", "fp8 per matrix", "int8", "mxfp4")  # test_transformers_quantized.py has the others


def packed_experts(kind: str, folder) -> tuple[nn.Module, tuple]:
    needs_packed_loading()
    quantised(kind=kind).save_pretrained(folder)
    model = load(folder)
    call = torch.randn(7, 128), make_ids("random", 7, 2, 8), torch.rand(7, 2)
    return model, call


@pytest.mark.parametrize("kind", LOADED)
@torch.no_grad()
def test_writes_are_seen(cpu, tmp_path, kind):
    """By the next call, as those to a linear layer, and in compiled code, too."""
    model, call = packed_experts(kind, tmp_path)
    (_, experts), (_, other) = experts_of(model)
    before = experts(*call)
    assert len(experts._fused_moe_weights.weights) == 2
    try:
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call), before)
        for name, parameter in experts.named_parameters():
            parameter.data.copy_(getattr(other, name))
        expected = other(*call)
        assert torch.equal(experts(*call), expected) and torch.equal(compiled(*call), expected)
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("kind", LOADED)
def test_tiles(cpu, tmp_path, kind, request):
    """Where they take the parameters' place, state_dict and save_pretrained have the checkpoint's tensors."""
    model, _ = packed_experts(kind, tmp_path)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    request.getfixturevalue("tiling")
    for _, experts in experts_of(model):
        assert all(weight_of(experts, name, "codes").is_tiled for name in NAMES)
        assert not [n for n, _ in experts.named_parameters(recurse=False) if not n.endswith("_shape")]
    assert_same_bits(as_bytes(model.state_dict()), as_bytes(expected))
    changed = {n: t.roll(1, 0) if ".experts." in n else t for n, t in expected.items()}
    model.load_state_dict(changed)
    assert_same_bits(as_bytes(model.state_dict()), as_bytes(changed))
    model.load_state_dict(expected)
    model.save_pretrained(tmp_path / "again")
    assert_same_bits(as_bytes(written(tmp_path / "again")), as_bytes(written(tmp_path)))


@pytest.mark.parametrize("kind", ("fp8", "int8, 8 bits", "fp8 per matrix"))
def test_adapters_are_merged(cpu, tmp_path, kind):
    """As into any quantised weight; not where gate and up have a scale each, which no row's sum fits."""
    peft = pytest.importorskip("peft")
    model, _ = packed_experts(kind, tmp_path)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=[f"mlp.experts.{n}" for n in NAMES])
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        expected = logits(adapted)
    with fused_moe.transformers.requantized_merges():
        if kind == "fp8 per matrix":
            with pytest.raises(ValueError, match="scales by rows, found one for gate and one for up"):
                adapted.merge_and_unload()
            return
        merged = adapted.merge_and_unload()
    assert (logits(merged) - expected).norm() / expected.norm() < 0.1
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


# --- register(default=) -------------------------------------------------------------------------------------


@pytest.fixture
def by_default():
    fused_moe.transformers.register(default=True)
    yield
    fused_moe.transformers.register(default=False)


def implementation(model: nn.Module) -> str:
    return model.config._experts_implementation


def test_the_default_of_transformers(cpu, tmp_path):
    """Without the argument it is grouped_mm, and packed experts are unpacked."""
    made().save_pretrained(tmp_path)
    assert implementation(load(tmp_path, None)) == "grouped_mm"


def test_ours_by_default(cpu, tmp_path, by_default):
    """from_pretrained and from_config; an argument wins, and False restores transformers' choice."""
    fused_moe.transformers.register(default=True)  # again does no harm
    fused_moe.transformers.register()  # nor does this
    made().save_pretrained(tmp_path)
    model = load(tmp_path, None)
    assert implementation(model) == implementation(model.model) == "fused_moe"
    with Calls() as calls:
        logits(model)
    assert len(calls.of("experts")) == 2
    for name in ("eager", "grouped_mm", "fused_moe_fp8"):
        assert implementation(load(tmp_path, name)) == name
    config = tiny_config("qwen3_moe")
    assert implementation(AutoModelForCausalLM.from_config(config)) == "fused_moe"
    model.set_experts_implementation("eager")
    assert implementation(model) == "eager"
    fused_moe.transformers.register(default=False)
    fused_moe.transformers.register(default=False)
    assert implementation(load(tmp_path, None)) == "grouped_mm"
    assert "fused_moe" not in PreTrainedModel.get_correct_experts_implementation.__module__


def test_packed_by_default(cpu, tmp_path, by_default):
    needs_packed_loading()
    model = quantised()
    model.save_pretrained(tmp_path)
    found = load(tmp_path, None)
    assert found.model.layers[0].mlp.experts.down_proj_packed.dtype == torch.int32
    assert torch.equal(logits(found), logits(model))


def test_models_without_experts_are_untouched(cpu, by_default):
    dense = tiny_config("llama")
    assert implementation(AutoModelForCausalLM.from_config(dense)) == "eager"


def test_experts_without_kernels_by_default(cpu, by_default, monkeypatch):
    """They run as transformers would choose, and a warning says so."""
    monkeypatch.setattr(fused_moe.transformers.experts, "_warned", set())
    config = tiny_config("qwen3_moe", hidden_act="quick_gelu")
    model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="QuickGELU.* of Qwen3MoeExperts, which runs grouped_mm"):
        logits(model)
    assert implementation(model) == "grouped_mm"


def test_a_class_that_wants_eager_keeps_it(cpu, by_default):
    privacy = pytest.importorskip("transformers.models.openai_privacy_filter.modeling_openai_privacy_filter")
    own = privacy.OpenAIPrivacyFilterPreTrainedModel
    assert own.get_correct_experts_implementation(own.__new__(own), None) == "eager"


def test_bad_calls_of_register(cpu):
    with pytest.raises(TypeError, match="register: expected default to be True or False, found int 1"):
        fused_moe.transformers.register(default=1)
