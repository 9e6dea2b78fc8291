"""Folders of checkpoints: what is read, written and refused, float and quantised, and the memory it takes.

The tensors are those of random FusedMoE layers; test_transformers_convert.py has transformers' own files.
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_quantized import EVERY_FORMAT

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, checkpoint
from fused_moe.checkpoint import converting, quantized
from fused_moe.checkpoint.files import INDEX, ONE, new_folder, size_of, write_shards
from fused_moe.convert import main

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
pytestmark = pytest.mark.usefixtures("cpu")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_experts_per_tok": 2, "vocab_size": 32}
QWEN = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "norm_topk_prob": True,
} | SIZES
DEEPSEEK = {
    "model_type": "deepseek_v3", "moe_intermediate_size": 256, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "dtype": "bfloat16",
} | SIZES  # fmt: skip
TWO_LAYERS = DEEPSEEK | {"num_hidden_layers": 2}  # of which one has experts
GPT_OSS = {"model_type": "gpt_oss", "intermediate_size": 64, "num_local_experts": 4} | SIZES
CONFIGS = {
    "mixtral": {"model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4} | SIZES,
    "qwen3_moe": QWEN,
    "olmoe": {"model_type": "olmoe", "intermediate_size": 64, "num_experts": 4} | SIZES,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": {
        "model_type": "glm4_moe", "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    } | SIZES,
    "gpt_oss": GPT_OSS,
}  # fmt: skip


# --- checkpoints ------------------------------------------------------------------------------------------


def random_layer(block, dtype=BF16):
    moe = FusedMoE(**block.settings, dtype=dtype)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.normal_()
    return moe


def float_tensors(config, dtype=BF16):
    """The tensors of a checkpoint, of its MoE layers and some others."""
    tensors = {"model.embed_tokens.weight": torch.randn(32, 128, dtype=dtype)}
    found = {block.layer: block for block in checkpoint.blocks(config)}
    for layer in range(config["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.randn(128, 128, dtype=dtype)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(128)
        if layer in found:
            tensors |= checkpoint.to_hf(found[layer], random_layer(found[layer], dtype).state_dict())
        else:
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(256, 128, dtype=dtype)
    return tensors | {"model.layers.3.mlp.experts.0.up_proj.weight": torch.randn(2, 2)}  # of no layer


def write(folder, tensors, config, max_shard_size=100_000):
    with new_folder(folder) as out:
        write_shards(out, tensors.items(), max_shard_size)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (out / "tokenizer.json").write_text("{}")
        (out / "pytorch_model.bin").write_text("old")
    return folder


def contents(folder) -> dict:
    """{name: (dtype, shape, bytes)}"""
    return {
        name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in checkpoint.open_folder(folder).items()
    }


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def convert(source, out, **options):
    checkpoint.convert(source, out, progress=False, **options)
    return out


# --- whole folders ----------------------------------------------------------------------------------------


@pytest.mark.quick(one_in=3)
@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back(tmp_path, family):
    """The same bytes, the same configuration; other files but those of weights are copied."""
    config = CONFIGS[family]
    source = write(tmp_path / "in", float_tensors(config), config)
    ours = convert(source, tmp_path / "ours", to="fused_moe", max_shard_size="200KB")
    back = convert(ours, tmp_path / "back", to="hf")
    assert contents(back) == contents(source)
    assert (back / "config.json").read_text() == (source / "config.json").read_text()
    assert config_of(ours) == config | {"fused_moe": {"version": 1}}
    assert (ours / INDEX).exists() and (back / ONE).exists()
    for folder in (ours, back):
        assert (folder / "tokenizer.json").exists() and not (folder / "pytorch_model.bin").exists()
    again = convert(ours, tmp_path / "again", to="fused_moe")
    assert contents(again) == contents(ours) and config_of(again) == config_of(ours)
    assert contents(convert(source, tmp_path / "hf", to="hf")) == contents(source)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_is_the_state_dict(tmp_path, family):
    """FusedMoE's names, and what a layer of either folder computes."""
    config = CONFIGS[family]
    source = write(tmp_path / "in", float_tensors(config), config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    for block in checkpoint.blocks(config):
        moe = [FusedMoE(**block.settings, dtype=BF16) for _ in range(4)]
        checkpoint.load_layer(moe[0], source, layer=block.layer)
        checkpoint.load_layer(moe[1], ours, layer=block.layer)
        checkpoint.load_layer(moe[2], checkpoint.open_folder(ours), config, block.layer)
        prefix = next(p for p in block.prefixes if f"{p}router.gate.weight" in checkpoint.open_folder(ours))
        found = {
            name.removeprefix(prefix): tensor
            for name, tensor in checkpoint.open_folder(ours).items()
            if name.startswith(prefix)
        }
        moe[3].load_state_dict(found)
        x = torch.randn(16, 128, dtype=BF16)
        assert len({tuple(m(x).flatten().tolist()) for m in moe}) == 1


def test_load(tmp_path):
    """Every layer of a model, or some."""
    config = DEEPSEEK
    source = write(tmp_path / "in", float_tensors(config), config)
    found = checkpoint.blocks(config)

    def model():
        return torch.nn.ModuleList(FusedMoE(**block.settings, dtype=BF16) for block in found)

    expected, all_layers, one = model(), model(), model()
    for block, moe in zip(found, expected, strict=True):
        checkpoint.load_layer(moe, source, layer=block.layer)
    checkpoint.load(all_layers, source)
    checkpoint.load({2: one[1]}, source)
    x = torch.randn(5, 128, dtype=BF16)
    for i in range(2):
        assert torch.equal(all_layers[i](x), expected[i](x))
    assert torch.equal(one[1](x), expected[1](x)) and not torch.equal(one[0](x), expected[0](x))
    with pytest.raises(ValueError, match="a FusedMoE for each of 2 MoE layers, found 1"):
        checkpoint.load(model()[:1], source)
    with pytest.raises(ValueError, match="numbers of MoE layers, 1, 2, found 0"):
        checkpoint.load({0: one[0]}, source)


LAST = "model.layers.2.mlp.experts.3.down_proj.weight"
LATE = {
    "shape": ("float", lambda t: t.update({LAST: t[LAST][:5].clone()})),
    "missing": ("float", lambda t: t.pop(LAST)),
    "one too many": ("float", lambda t: t.update({LAST.replace(".3.", ".4."): t[LAST].clone()})),
    "a dtype": ("fp8", lambda t: t.update({LAST: t[LAST].view(torch.int8)})),
    "fp8 scale": ("fp8", lambda t: t.pop(f"{LAST}_scale_inv")),
    "int4 scale": ("int4", lambda t: t.pop(f"{LAST}_scale")),
    "gptq zeros": ("gptq", lambda t: t.pop(LAST.replace("weight", "qzeros"))),
    "awq scales": ("awq", lambda t: t.update({LAST.replace("weight", "scales"): torch.ones(2, 2).half()})),
    "dense": ("fp8", lambda t: t.pop("model.layers.2.mlp.shared_experts.up_proj.weight")),
}


@pytest.mark.parametrize("case", LATE)
def test_nothing_is_written_before_all_layers_are_right(tmp_path, monkeypatch, case):
    kind, change = LATE[case]
    make, method = (QUANTIZED | OTHERS).get(kind, (None, None))
    config = DEEPSEEK | ({"quantization_config": method} if method else {})
    tensors = quantised(make, config) if method else float_tensors(config)
    change(tensors)
    layers = [random_layer(block) for block in checkpoint.blocks(config)]
    before = [{name: t.clone() for name, t in moe.state_dict().items()} for moe in layers]
    error = TypeError if case == "a dtype" else ValueError
    refusal = pytest.raises(error, match=r"model\.layers\.2\.mlp\.\S*(down|up)_proj")
    with refusal:
        checkpoint.load(torch.nn.ModuleList(layers), tensors, config)
    for moe, expected in zip(layers, before, strict=True):
        assert_same_state(moe, expected)
    source, written = write(tmp_path / "in", tensors, config), []
    monkeypatch.setattr(safetensors, "save_file", lambda *args, **_: written.append(args))
    for options in ({"to": "hf"}, {"to": "fused_moe"}, {"to": "fused_moe", "dequantize": True}):
        with refusal:
            convert(source, tmp_path / "out", max_shard_size=1, **options)
    assert not written


def assert_same_state(moe, expected):
    assert moe.state_dict().keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in moe.state_dict().items())


@pytest.mark.parametrize("options", ({"to": "hf", "dequantize": True}, {"to": "hf"}))
def test_nothing_is_written_before_all_linear_layers_are_right(tmp_path, monkeypatch, options):
    """Those outside of MoE layers, where they do not stay as they are."""
    make, method = OTHERS["awq"]
    tensors = quantised(make, DEEPSEEK)
    del tensors["model.layers.2.self_attn.q_proj.scales"]
    source = write(tmp_path / "in", tensors, DEEPSEEK | {"quantization_config": method})
    convert(source, tmp_path / "same", to="fused_moe")
    monkeypatch.setattr(safetensors, "save_file", lambda *args, **_: pytest.fail("written"))
    refused(tmp_path, source, r"layers\.2\.self_attn\.q_proj\.scales", max_shard_size=1, **options)


class Failing(dict):
    """Tensors one of which has a shape, but no values."""

    def __init__(self, tensors, key, error):
        super().__init__(tensors)
        self.key, self.error, self.asked = key, error, 0

    def __getitem__(self, key):
        self.asked += key == self.key
        if self.asked > 1:
            raise self.error
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "case, error, raised",
    (
        ("float", OSError("no disk"), OSError),
        ("float", checkpoint.files.safetensors().SafetensorError("no disk"), RuntimeError),
        ("fp8", ValueError("no disk"), ValueError),
        ("int4", OSError("no disk"), OSError),
    ),
)
def test_a_source_that_fails(case, error, raised):
    """In the middle of a layer, which stays as it was; the error says which ones are written."""
    make, method = QUANTIZED.get(case, (None, None))
    config = DEEPSEEK | ({"quantization_config": method} if method else {})
    tensors = quantised(make, config) if method else float_tensors(config)
    found = checkpoint.blocks(config)
    layers, whole = ([random_layer(block) for block in found] for _ in range(2))
    checkpoint.load(torch.nn.ModuleList(whole), tensors, config)
    before = {name: t.clone() for name, t in layers[1].state_dict().items()}
    last = max(key for key in tensors if key.startswith("model.layers.2.mlp.shared_experts."))
    words = r"no disk \(layer 2 is as it was; layers that were written before it: 1\)"
    with pytest.raises(raised, match=words) as caught:
        checkpoint.load(torch.nn.ModuleList(layers), Failing(tensors, last, error), config)
    assert caught.value.__cause__ is error
    assert_same_state(layers[0], whole[0].state_dict())
    assert_same_state(layers[1], before)
    with pytest.raises(raised, match=r"layer 2 is as it was; layers that were written before it: none"):
        checkpoint.load_layer(layers[1], Failing(tensors, last, error), config, 2)


@pytest.mark.parametrize("case", ("float", "fp8", "int4", "awq"))
def test_every_tensor_is_read_once(tmp_path, monkeypatch, case):
    """Once for its shape, and once for its values."""
    make, method = (QUANTIZED | OTHERS).get(case, (None, None))
    config = DEEPSEEK | ({"quantization_config": method} if method else {})
    source = write(tmp_path / "in", quantised(make, config) if method else float_tensors(config), config)
    asked, read = [], checkpoint.files.Folder.__getitem__

    def counted(folder, key):
        asked.append(key)
        return read(folder, key)

    monkeypatch.setattr(checkpoint.files.Folder, "__getitem__", counted)
    for options in ({"to": "fused_moe"}, {"to": "hf"}, {"to": "hf", "dequantize": True}):
        convert(source, tmp_path / "out", **options)
        assert max(Counter(asked).values()) <= 2
        asked.clear()
        if options["to"] == "hf":
            shutil.rmtree(tmp_path / "out")
        else:
            source = (tmp_path / "out").rename(tmp_path / "ours")


def test_other_files(tmp_path):
    """Those of a hub's cache, which are links, and of folders; weights and hidden files are left out."""
    source = write(tmp_path / "in", float_tensors(QWEN), QWEN)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in [*source.iterdir()]:
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / "blobs" / file.name)
    for name in ("additional_chat_templates/tool_use.jinja", "original/model.bin", ".cache/x.json"):
        (source / name).parent.mkdir()
        (source / name).write_text("x")
    ours = convert(source, source / "ours", to="fused_moe")
    assert {str(file.relative_to(ours)) for file in ours.rglob("*") if file.is_file()} == {
        "config.json", ONE, "tokenizer.json", "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    assert not [file for file in ours.rglob("*") if file.is_symlink()]
    (source / "merges.txt").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="merges.txt"):
        convert(source, tmp_path / "out", to="fused_moe")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ("float", "fp8"))
def test_layers_that_predict_tokens(tmp_path, case):
    """Those beyond the model's, whose experts stay as they are, and whose bias keeps its dtype."""
    config = DEEPSEEK | ({"quantization_config": FP8} if case == "fp8" else {})
    tensors = quantised(fp8_block, config) if case == "fp8" else float_tensors(config)
    tensors |= {
        n.replace("layers.1.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.1." in n
    }
    source = write(tmp_path / "in", tensors, config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(source)
    cast = convert(source, tmp_path / "cast", to="hf", dtype=F16, dequantize=case == "fp8")
    found = checkpoint.open_folder(cast)
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert found[bias].dtype == tensors[bias].dtype != F16
    assert found["model.layers.3.mlp.experts.1.up_proj.weight"].dtype == F16


@pytest.mark.parametrize("to", ("hf", "fused_moe"))
def test_dtype(tmp_path, to):
    """All float tensors but the bias for the choice; the configuration says so."""
    tensors = float_tensors(DEEPSEEK)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = tensors[bias].float()
    tensors["model.ids"] = torch.arange(3)
    source = write(tmp_path / "in", tensors, DEEPSEEK)
    out = convert(source, tmp_path / "out", to=to, dtype=F16)
    back = contents(convert(out, tmp_path / "back", to="hf"))
    kept = {name: t for name, t in tensors.items() if name.endswith("bias") or name == "model.ids"}
    assert back == contents(write(tmp_path / "cast", {n: t.half() for n, t in tensors.items()} | kept, {}))
    assert config_of(out)["dtype"] == "float16"


def test_other_roots(tmp_path):
    """A model inside of another keeps what its names begin with."""
    config = {"model_type": "of_images", "text_config": QWEN}
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in float_tensors(QWEN).items()
    }
    source = write(tmp_path / "in", tensors, config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    assert "model.language_model.layers.1.mlp.experts.w1" in checkpoint.open_folder(ours)
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(source)


# --- quantised --------------------------------------------------------------------------------------------


def cut(name, tensors):
    """The tensors (E, ...) of a weight for each expert."""
    return {
        f"{name.replace('*', str(e))}{part}": t[e].clone()
        for part, t in tensors.items()
        for e in range(len(t))
    }


def codes(dtype, *shape):
    return torch.randint(0, 120, shape, dtype=torch.uint8).view(dtype)


def words(*shape):
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def scales(*shape, dtype=BF16):
    exact = torch.randint(120, 130, shape, dtype=torch.uint8).view(E8M0)
    return exact if dtype == E8M0 else (torch.rand(shape) + 0.5).to(dtype)


def fp8_block(E, rows, cols, dtype=F32):
    blocks = (-(-rows // 128), -(-cols // 128))
    return {".weight": codes(E4M3, E, rows, cols), ".weight_scale_inv": scales(E, *blocks, dtype=dtype)}


def int4(E, rows, cols, zero=None, dtype=BF16):
    tensors = {
        ".weight_packed": words(E, rows, cols // 8),
        ".weight_scale": scales(E, rows, cols // 32, dtype=dtype),
        ".weight_shape": torch.tensor([[rows, cols]] * E),
    }
    if zero == "packed":
        tensors[".weight_zero_point"] = words(E, -(-rows // 8), cols // 32)
    if zero == "middle":
        tensors[".weight_zero_point"] = torch.full((E, rows // 8, cols // 32), -0x77777778, dtype=torch.int32)
    if zero == "int8":
        tensors[".weight_zero_point"] = torch.randint(-8, 8, (E, rows, cols // 32), dtype=torch.int8)
    return tensors


def eight_bits(E, rows, cols, dtype=E4M3, shape=None):
    shape = (rows, 1) if shape is None else shape
    return {".weight": codes(dtype, E, rows, cols), ".weight_scale": scales(E, *shape)}


def compressed_block(E, rows, cols):
    tensors = fp8_block(E, rows, cols, BF16)
    return {".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}


def mxfp4(E, rows, cols):
    scale = torch.randint(110, 130, (E, rows, cols // 32), dtype=torch.uint8)
    return {".weight_packed": codes(torch.uint8, E, rows, cols // 2), ".weight_scale": scale}


def gptq(E, rows, cols):
    zero = torch.full((E, cols // 32, rows // 8), 0x77777777, dtype=torch.int32)
    g_idx = (torch.arange(cols) // 32).repeat(E, 1).to(torch.int32)
    scale = scales(E, cols // 32, rows, dtype=F16)
    return {".qweight": words(E, cols // 8, rows), ".qzeros": zero, ".scales": scale, ".g_idx": g_idx}


def awq(E, rows, cols):
    zero = words(E, cols // 32, rows // 8)
    return {
        ".qweight": words(E, cols, rows // 8),
        ".qzeros": zero,
        ".scales": scales(E, cols // 32, rows, dtype=F16),
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CT = {"quant_method": "compressed-tensors"}
# What a weight (E, rows, cols) is made of, and the configuration's quantization_config.
QUANTIZED = {
    "fp8": (fp8_block, FP8),
    "fp8 bf16": (lambda *s: fp8_block(*s, dtype=BF16), FP8),
    "fp8 e8m0": (lambda *s: fp8_block(*s, dtype=E8M0), FP8),
    "int4": (int4, CT),
    "int4 packed": (lambda *s: int4(*s, zero="packed"), CT),
    "int4 middle": (lambda *s: int4(*s, zero="middle", dtype=F16), CT),
    "int4 int8": (lambda *s: int4(*s, zero="int8", dtype=F32), CT),
    "fp8 rows": (eight_bits, CT),
    "fp8 tensor": (lambda *s: eight_bits(*s, shape=(1,)), CT),
    "fp8 scalar": (lambda *s: eight_bits(*s, shape=()), CT),
    "fp8 blocks": (compressed_block, CT),
    "int8 rows": (lambda *s: eight_bits(*s, dtype=torch.int8), CT),
    "mxfp4": (mxfp4, CT),
}
OTHERS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "sym": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
}


def quantised(make, config):
    """A checkpoint with all of its linear layers quantised but the first layer's MLP and the routers."""
    tensors = float_tensors(config)
    for name, tensor in [*tensors.items()]:
        is_linear = ".experts." in name or "q_proj" in name or "shared_experts" in name
        if is_linear and min(tensor.shape) >= 64:
            del tensors[name]
            tensors |= cut(name.removesuffix(".weight"), make(1, *tensor.shape))
    return tensors


@pytest.mark.quick(one_in=5)
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantised_there_and_back(tmp_path, case):
    """The same bytes, also of dense layers, scales of activations, and what loading passes over."""
    make, method = QUANTIZED[case]
    config = TWO_LAYERS | {"quantization_config": method}
    tensors = quantised(make, config)
    expert = "model.layers.1.mlp.experts.0.up_proj"
    for name in (f"{expert}.input_scale", "model.layers.0.self_attn.k_scale"):
        tensors[name] = torch.rand(())
    if "int4" in case:
        unset = torch.full((128,), -1, dtype=torch.int32)
        tensors |= {
            name.replace("_packed", "_g_idx"): unset.clone()
            for name in tensors
            if "up_proj.weight_packed" in name
        }
    source = write(tmp_path / "in", tensors, config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    back = convert(ours, tmp_path / "back", to="hf")
    assert contents(back) == contents(source) == contents(convert(source, tmp_path / "hf", to="hf"))
    assert config_of(back) == config
    assert contents(convert(ours, tmp_path / "again", to="fused_moe")) == contents(ours)
    usual = case in ("fp8", "int4", "int4 packed", "fp8 rows", "int8 rows", "mxfp4")
    assert ("quantized" in config_of(ours)["fused_moe"]) == (not usual)


def layer_of(folder, layer=1, **options):
    block = next(b for b in checkpoint.blocks(config_of(folder)) if b.layer == layer)
    moe = FusedMoE(**block.settings, dtype=BF16)
    checkpoint.load_layer(moe, folder, layer=layer, **options)
    return moe


@pytest.mark.parametrize("case", QUANTIZED | OTHERS)
def test_quantised_layers(tmp_path, case):
    """Either folder gives QuantizedWeights of the same values; so do dequantised folders and layers."""
    make, method = (QUANTIZED | OTHERS)[case]
    config = TWO_LAYERS | {"quantization_config": method}
    source = write(tmp_path / "in", quantised(make, config), config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    first = layer_of(source)
    values = {name: getattr(first.experts, name).dequantize() for name in ("w1", "w2", "w3")}
    floats = {name: t for name, t in first.state_dict().items() if not name.startswith("experts.")}
    assert floats["shared_experts.w1.weight"].dtype == BF16
    back = convert(ours, tmp_path / "back", to="hf")
    plain = [
        convert(source, tmp_path / "plain", to="hf", dequantize=True),
        convert(ours, tmp_path / "plain_ours", to="fused_moe", dequantize=True),
    ]
    for folder in (ours, back):
        moe = layer_of(folder)
        for name, value in values.items():
            w = getattr(moe.experts, name)
            assert isinstance(w, QuantizedWeight) and torch.equal(w.dequantize(), value)
        found = {name: t for name, t in moe.state_dict().items() if not name.startswith("experts.")}
        assert all(torch.equal(t, floats[name]) for name, t in found.items())
    on_meta = FusedMoE.from_hf(ours, 1, device="meta", dtype=BF16)
    checkpoint.load_layer(on_meta, ours, layer=1)
    assert torch.equal(on_meta.experts.w2.dequantize(), values["w2"])
    on_meta = FusedMoE.from_hf(ours, 1, device="meta", dtype=BF16)
    checkpoint.load_layer(on_meta, ours, layer=1, dequantize=True)
    for moe in (on_meta, layer_of(ours, dequantize=True), *(layer_of(folder) for folder in plain)):
        assert all(torch.equal(getattr(moe.experts, name), value) for name, value in values.items())
    for folder in plain:
        assert "quantization_config" not in config_of(folder)
        assert all(t.dtype in (BF16, F32) for t in checkpoint.open_folder(folder).values())


@pytest.mark.parametrize("case", OTHERS)
def test_gptq_and_awq_go_back_as_compressed_tensors(tmp_path, case):
    """Dense layers, too; the configuration says what is and what is not."""
    make, method = OTHERS[case]
    config = DEEPSEEK | {"quantization_config": method}
    source = write(tmp_path / "in", quantised(make, config), config)
    (source / "quantize_config.json").write_text("{}")
    assert (convert(source, tmp_path / "ours", to="fused_moe") / "quantize_config.json").exists()
    back = convert(source, tmp_path / "back", to="hf")
    assert not (back / "quantize_config.json").exists()
    tensors, found = checkpoint.open_folder(back), config_of(back)["quantization_config"]
    (group,) = found["config_groups"].values()
    assert (found["format"], group["weights"]["group_size"]) == ("pack-quantized", 32)
    assert group["weights"]["symmetric"] == (case == "gptq")
    assert {"model.layers.1.mlp.gate", "model.embed_tokens"} <= {*found["ignore"]}
    assert not [name for name in found["ignore"] if f"{name}.weight" not in tensors]
    assert not [name for name in tensors if "qweight" in name]
    q_proj = "model.layers.0.self_attn.q_proj"
    old = quantized.matrix(checkpoint.open_folder(source), _codes(q_proj, case), method)
    new = quantized.matrix(tensors, _codes(q_proj, "compressed-tensors"), found)
    assert torch.equal(old.dequantize(F32), new.dequantize(F32))


@pytest.mark.parametrize("said", (None, 64), ids=("nothing said", "64 said"))
@pytest.mark.parametrize("case", OTHERS)
def test_mixed_group_sizes(tmp_path, case, said, monkeypatch):
    """compressed-tensors has one for all modules: an error that names the others, before a tensor is written.
    FusedMoE's own layout keeps each one's, and float weights have none."""
    make, method = OTHERS[case]
    config = DEEPSEEK | {"quantization_config": method | ({} if said is None else {"group_size": said})}
    tensors = quantised(make, config)
    odd = {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.shared_experts.up_proj"}
    odd |= {f"model.layers.2.mlp.experts.{e}.down_proj" for e in range(4)}
    for stem in odd:
        for part in (".scales", ".qzeros"):
            tensors[stem + part] = tensors[stem + part][::2].contiguous()
        if case == "gptq":
            tensors[f"{stem}.g_idx"] //= 2
    source = write(tmp_path / "in", tensors, config)
    named = {stem.replace(".0.down", ".*.down") for stem in odd if not re.search(r"[1-3]\.down", stem)}
    with monkeypatch.context() as patch:
        patch.setattr(converting, "write_shards", lambda *_: pytest.fail("a tensor was written"))
        patch.setattr(converting, "_copy", lambda *_: pytest.fail("a file was copied"))
        with pytest.raises(ValueError, match="expected .* columns per scale in all int4 weights") as error:
            convert(source, tmp_path / "out", to="hf")
    expected, found = said or 32, str(error.value).partition(", found ")[2]
    assert f"expected {expected} columns" in str(error.value)
    if expected == 32:
        assert {f"64 in {name}" for name in named} == {*re.findall(r"64 in [\w.*]+\w", found)}
    else:
        assert found.count("32 in model.layers.") == 8 and not any(name in found for name in named)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    assert convert(ours, tmp_path / "floats", to="hf", dequantize=True).is_dir()


def _codes(name, kind):
    return quantized.Codes(checkpoint.Source(name), kind)


@EVERY_FORMAT
@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_a_layer_that_quantize_made(family, format):
    """Its state_dict under published keys, and back."""
    config = CONFIGS[family]
    block = checkpoint.blocks(config)[1]
    moe = random_layer(block)
    options = {"group_size": 32} if format == "int4" else {}
    fused_moe.quantize(moe, format, **options)
    if family == "gpt_oss" and format != "mxfp4":
        with pytest.raises(ValueError, match=f"experts.gate_up_proj of format mxfp4, .* found {format}"):
            dict(checkpoint.to_hf(block, moe.state_dict()))
        return
    tensors = dict(checkpoint.to_hf(block, moe.state_dict()))
    if format == "fp8_block":
        in_ct = dict(checkpoint.to_hf(block, moe.state_dict(), config | {"quantization_config": CT}))
        assert {name.replace("_scale_inv", "_scale") for name in tensors} == in_ct.keys() != tensors.keys()
    found = FusedMoE(**block.settings, dtype=BF16)
    checkpoint.load_layer(found, tensors, config, block.layer)
    assert found.experts.w1.format == format
    x = torch.randn(9, 128, dtype=BF16)
    assert torch.equal(found(x), moe(x))
    other = random_layer(block._replace(settings=block.settings | {"hidden_dim": 128}))
    fused_moe.quantize(other, format, **options)
    with pytest.raises(ValueError, match=r"experts.w\d of shape \(4, \d+, \d+\), found \(4, 128, 128\)"):
        checkpoint.to_hf(block, other.state_dict())


def test_act_order(tmp_path):
    """GPTQ's `down` with columns in any order: the layer computes what the float one does."""
    config = DEEPSEEK | {"quantization_config": OTHERS["gptq"][1]}
    tensors = quantised(gptq, config)
    for e in range(4):
        order = torch.randperm(256)
        tensors[f"model.layers.1.mlp.experts.{e}.down_proj.g_idx"] = (order // 32).to(torch.int32)
    source = write(tmp_path / "in", tensors, config)
    back = convert(convert(source, tmp_path / "ours", to="fused_moe"), tmp_path / "back", to="hf")
    x = torch.randn(9, 128, dtype=BF16)
    assert torch.equal(layer_of(source)(x), layer_of(back)(x))


def test_gpt_oss(tmp_path):
    """Rows of gate and up in turn, biases beside."""
    config = GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}
    tensors = float_tensors(config)
    for layer in range(3):
        for name, rows, cols in (("gate_up_proj", 128, 128), ("down_proj", 128, 64)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            tensors[f"{key}_blocks"] = codes(torch.uint8, 4, rows, cols // 32, 16)
            tensors[f"{key}_scales"] = torch.randint(110, 130, (4, rows, cols // 32), dtype=torch.uint8)
    source = write(tmp_path / "in", tensors, config)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(source)
    assert config_of(ours)["fused_moe"] == {"version": 1}
    plain = convert(source, tmp_path / "plain", to="hf", dequantize=True)
    assert checkpoint.open_folder(plain)["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 128, 128)
    quantised, floats, dequantised = layer_of(ours), layer_of(plain), layer_of(source, dequantize=True)
    x = torch.randn(9, 128, dtype=BF16)
    assert torch.equal(floats(x), dequantised(x))
    torch.testing.assert_close(quantised(x), floats(x))


# --- bad input --------------------------------------------------------------------------------------------


def sharded(tmp_path):
    return write(tmp_path / "in", float_tensors(QWEN), QWEN, max_shard_size=50_000)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def refused(tmp_path, source, match, error=ValueError, **options):
    """Nothing is left behind."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=match):
        convert(source, tmp_path / "out", **{"to": "fused_moe"} | options)
    assert sorted(tmp_path.iterdir()) == before


KEY = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.quick
def test_shards_that_are_wrong(tmp_path):
    source = sharded(tmp_path)
    places = json.loads((source / INDEX).read_text())["weight_map"]
    shard, other = places[KEY], next(file for file in places.values() if file != places[KEY])
    whole = tmp_path / "whole"
    shutil.copytree(source, whole)

    (source / shard).unlink()
    refused(tmp_path, source, rf"{shard}, which {INDEX} names for model\S+, found none")
    (source / shard).write_bytes((whole / shard).read_bytes()[:-8])
    refused(tmp_path, source, rf"{shard} to be a whole file of safetensors, found")
    shutil.copy(whole / shard, source)

    edit_index(source, lambda names: names.update({"lm_head.weight": shard}))
    refused(tmp_path, source, rf"lm_head.weight in .*{shard}, as {INDEX} says, found none")
    edit_index(source, lambda names: (names.pop("lm_head.weight"), names.pop(KEY)))
    refused(tmp_path, source, rf"{KEY}, a key of .*{shard}, in {INDEX}, found none")
    edit_index(source, lambda names: names.update({KEY: other}))
    refused(tmp_path, source, rf"{KEY} in {other} alone, as {INDEX} says, found one in .*{shard}, too")
    (source / INDEX).write_text("{}")
    refused(tmp_path, source, rf'{INDEX} with a "weight_map"')
    (source / INDEX).unlink()
    refused(tmp_path, source, rf"{ONE} or {INDEX} in .*/in, found config.json, model-00001")
    refused(tmp_path, source, "pickled weights are not read")
    refused(tmp_path, tmp_path / "none", "found no such folder")


def changed(change, config=QWEN):
    def make(tmp_path):
        tensors, other = float_tensors(config), dict(config)
        change(tensors, other)
        return write(tmp_path / "in", tensors, other)

    return make


def quantised_with(change, case="int4"):
    method = (QUANTIZED | OTHERS)[case][1]
    config = DEEPSEEK | {"quantization_config": method}

    def make(tmp_path):
        tensors, other = quantised((QUANTIZED | OTHERS)[case][0], config), dict(config)
        change(tensors, other)
        return write(tmp_path / "in", tensors, other)

    return make


FILE = r"in .*in/model-0000\d-of-0000\d\.safetensors"
BAD = {
    "a tensor too few": (changed(lambda t, c: t.pop(KEY)), rf"{KEY}.*found no.*, in .*/in$"),
    "a key too many": (
        changed(lambda t, c: t.update({KEY.replace(".2.", ".4."): t[KEY]})),
        r"experts\.4\.up_proj\.weight.*" + FILE,
    ),
    "a shape": (
        changed(lambda t, c: t.update({KEY: t[KEY][:32]})),
        rf"{KEY} of shape \(64, 128\), found \(32, 128\), {FILE}",
    ),
    "a shape that the configuration says": (
        changed(lambda t, c: c.update(hidden_size=64)),
        rf"of shape \(4, 64\), found \(4, 128\), {FILE}",
    ),
    "a dtype": (
        changed(lambda t, c: t.update({KEY: t[KEY].int()})),
        rf"{KEY} of a floating dtype.*int32, {FILE}",
    ),
    "a layer too few": (
        changed(lambda t, c: c.update(num_hidden_layers=5)),
        r"layers\.4\.\S*<\.\.\.>, as layer 4 has experts, found none",
    ),
    "a family": (changed(lambda t, c: c.update(model_type="gpt_2")), "model_type.*found 'gpt_2'"),
    "a field": (changed(lambda t, c: c.update(moe_dropout=0.1)), "moe_dropout"),
    "a version": (
        changed(lambda t, c: c.update(fused_moe={"version": 2})),
        "version 1 of the layout .*, found 2",
    ),
    "a method": (
        quantised_with(lambda t, c: c.update(quantization_config={"quant_method": "x"})),
        "found 'x'",
    ),
    "a scale too few": (
        quantised_with(lambda t, c: t.pop(KEY.replace("weight", "weight_scale"))),
        r"up_proj\.weight_scale, .*/in$",
    ),
    "a shape of codes": (
        quantised_with(lambda t, c: t.update({KEY.replace("weight", "weight_packed"): words(64, 16)})),
        rf"2\.up_proj\.weight_packed of shape \(256, 16\), found \(64, 16\), {FILE}",
    ),
    "codes of another shape than the configuration's": (
        quantised_with(lambda t, c: c.update(moe_intermediate_size=128)),
        r"down_proj of shape \(4, 128, 128\) in all",
    ),
    "qweight of no method": (
        quantised_with(lambda t, c: c.pop("quantization_config"), "gptq"),
        r"quantization_config of gptq or awq",
    ),
    "bits": (
        quantised_with(lambda t, c: c["quantization_config"].update(bits=8), "awq"),
        "bits of quant_method awq to be 4",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(tmp_path, case):
    make, match = BAD[case]
    refused(tmp_path, make(tmp_path), match)


def test_bad_calls(tmp_path, monkeypatch):
    source = sharded(tmp_path)
    refused(tmp_path, source, "to to be one of", to="tf")
    refused(tmp_path, source, "max_shard_size in bytes", max_shard_size="5 pages")
    refused(tmp_path, source, "dtype to be None or a floating one", TypeError, dtype=torch.int8)
    refused(tmp_path, source, "dequantize to be True or False", TypeError, dequantize=1)
    refused(tmp_path, source, "flavor from or to torchtitan, and with no other, found .16B", flavor="16B")
    refused(tmp_path, source, "and with no other, found None", to="torchtitan")
    with pytest.raises(TypeError, match="config beside a mapping of tensors, found None"):
        checkpoint.load({}, dict(checkpoint.open_folder(source)))
    with pytest.raises(ValueError, match="since nothing is written over, found one"):
        checkpoint.convert("nowhere", source, to="hf")  # before anything is read
    with pytest.raises(ValueError, match="expected the folder .*/no for out, found none"):
        checkpoint.convert(source, tmp_path / "no" / "out", to="hf")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    refused(tmp_path, source, "pip install safetensors", ImportError)


def test_sizes():
    assert [size_of(size) for size in (7, "7", "5GB", "1.5 kib", "2mb")] == [7, 7, 5 * 10**9, 1536, 2 * 10**6]


def test_write_shards(tmp_path):
    """A shard is full before it is too large; a tensor that is larger than that is alone."""
    tensors = {f"t{i}": torch.zeros(n) for i, n in enumerate((10, 10, 30, 10))}
    write_shards(tmp_path, tensors.items(), 80)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 240
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == dict(zip(tensors, [files[0], files[0], files[1], files[2]], strict=True))
    with pytest.raises(ValueError, match="one tensor a, found two"):
        write_shards(tmp_path, [("a", torch.zeros(1)), ("a", torch.zeros(1))])


@pytest.mark.parametrize("case", ("float", "ours", "fp8"))
def test_torchtitan_gets_published_float_tensors(tmp_path, monkeypatch, case):
    """What is handed to its adapters; test_distributed_checkpoint.py has those."""
    calls = []

    def write_titan(state, config, out, *, flavor, progress):
        calls.append((contents(state.path), config["model_type"], flavor))
        progress(1)
        out.mkdir()

    def check_flavor(config, flavor):
        if flavor != "16B":
            raise ValueError(f"no flavor {flavor}")

    titan = SimpleNamespace(write=write_titan, check_flavor=check_flavor)
    monkeypatch.setitem(sys.modules, "fused_moe.checkpoint.torchtitan", titan)
    config = DEEPSEEK | ({"quantization_config": FP8} if case == "fp8" else {})
    source = write(
        tmp_path / "in", quantised(fp8_block, config) if case == "fp8" else float_tensors(config), config
    )
    published = source
    if case == "ours":
        source = convert(source, tmp_path / "ours", to="fused_moe")
    if case == "fp8":
        refused(tmp_path, source, "dequantize=True with to=", to="torchtitan", flavor="16B")
        published = convert(source, tmp_path / "plain", to="hf", dequantize=True)
    before = {*tmp_path.iterdir()}
    out = convert(source, tmp_path / "out", to="torchtitan", flavor="16B", dequantize=case == "fp8")
    assert calls == [(contents(published), "deepseek_v3", "16B")]
    assert {*tmp_path.iterdir()} == before | {out}
    monkeypatch.setattr(safetensors, "save_file", lambda *args, **_: pytest.fail("written"))
    if case != "float":
        out.rmdir()
        options = {"to": "torchtitan", "flavor": "9B", "dequantize": case == "fp8"}
        refused(tmp_path, source, "no flavor 9B", **options)


@pytest.mark.parametrize("to", ("hf", "fused_moe"))
@pytest.mark.parametrize("dtype", (None, F16))
def test_a_folder_of_torchtitan(tmp_path, monkeypatch, to, dtype):
    """Published names out of its adapters, with the files beside a configuration."""
    tensors = float_tensors(DEEPSEEK)

    def read(folder, config, *, flavor):
        assert (folder, flavor) == (tmp_path / "titan", "16B") and "quantization_config" not in config
        return iter(tensors.items())

    monkeypatch.setitem(sys.modules, "fused_moe.checkpoint.torchtitan", SimpleNamespace(read=read))
    source = tmp_path / "titan"
    source.mkdir()
    (source / ".metadata").write_text("")
    published = write(tmp_path / "in", tensors, DEEPSEEK)
    of_fp8 = write(tmp_path / "fp8", tensors, DEEPSEEK | {"quantization_config": FP8})
    options = {"to": to, "dtype": dtype}
    expected = convert(published, tmp_path / "expected", **options)
    before = {*tmp_path.iterdir()}
    out = convert(source, tmp_path / "out", flavor="16B", config=of_fp8, **options)
    assert contents(out) == contents(expected) and config_of(out) == config_of(expected)
    assert (out / "tokenizer.json").exists() and {*tmp_path.iterdir()} == before | {out}
    other = convert(source, tmp_path / "other", flavor="16B", config=DEEPSEEK, **options)
    assert contents(other) == contents(expected)
    for folder in (out, other):
        shutil.rmtree(folder)
    refused(tmp_path, source, "config and to other than torchtitan", flavor="16B")
    refused(tmp_path, source, "flavor from or to torchtitan", config=DEEPSEEK)
    refused(tmp_path, source, "to='torchtitan'", config=DEEPSEEK, flavor="16B", to="torchtitan")


# --- the command ------------------------------------------------------------------------------------------


def test_command(tmp_path, monkeypatch, capsys):
    """In a process of its own; what it refuses, in this one."""
    source = sharded(tmp_path)
    args = [str(source), str(tmp_path / "out"), "--to", "fused_moe"]
    command = [sys.executable, "-m", "fused_moe.convert", *args, "--dtype", "float16"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert checkpoint.open_folder(tmp_path / "out")["model.layers.0.mlp.experts.w1"].dtype == F16
    monkeypatch.setenv("COLUMNS", "80")
    for given, status, text in ((args, 1, "nothing is written over"), (["--help"], 0, "--dequantize")):
        monkeypatch.setattr(sys, "argv", ["convert", *given])
        with pytest.raises(SystemExit) as end:
            main()
        printed = "".join(capsys.readouterr())
        assert end.value.code == status and text in printed and len(printed.splitlines()) <= 30


def test_command_that_is_stopped(tmp_path, monkeypatch, capsys):
    """SIGTERM leaves nothing behind; errors of the system are printed."""
    source = sharded(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert", str(source), str(tmp_path / "out"), "--to", "hf", "--quiet"])
    handler = signal.getsignal(signal.SIGTERM)

    def stop(*args):
        os.kill(os.getpid(), signal.SIGTERM)

    def fill(*args, **kwargs):
        raise checkpoint.files.safetensors().SafetensorError("No space left on device")

    try:
        for name, replacement, status in (("copyfile", stop, 143), ("save_file", fill, 1)):
            with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
                patch.setattr(shutil if name == "copyfile" else safetensors, name, replacement)
                main()
            assert end.value.code == status and [*tmp_path.iterdir()] == [source]
        assert "No space left on device" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_lines_in_place_of_a_bar(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.INFO, "fused_moe"):
        checkpoint.convert(sharded(tmp_path), tmp_path / "out", to="fused_moe")
    lines = [record.getMessage() for record in caplog.records if record.name == "fused_moe"]
    assert not capsys.readouterr().out
    assert 3 < len(lines) <= 11 and lines[-1] == "100% of 0.0 GB"


# --- the documentation ------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """What docs/checkpoints.md has between its marks."""
    places: dict[str, list[str]] = {}
    for name, family in checkpoint.FAMILIES.items():
        places.setdefault(family.layouts[0]["experts.w1"].name, []).append(f"`{name}`")
    reasons: dict[str, list[str]] = {}
    for name, why in checkpoint.REFUSED.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    largest_first = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    by_name = sorted((sorted(names), why) for why, names in reasons.items())
    return {
        "families": "\n".join(f"- `{place}`: {', '.join(sorted(names))}" for place, names in largest_first),
        "refused": "\n".join(f"- {', '.join(names)}: {why}" for names, why in by_name),
    }


def with_tables(page: str) -> str:
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + table + end + rest.partition(end)[2]
    return page


def test_the_page_has_every_family():
    if not PAGE.exists():
        pytest.skip("not in a checkout")
    page = PAGE.read_text()
    assert page == with_tables(page), "python tests/test_checkpoint_files.py writes it"


# --- memory -----------------------------------------------------------------------------------------------

# Prints the bytes of private memory that conversions, and loading, take at their peak beside those before.
MEASURE = """
import safetensors.torch, sys, threading, time, torch
from fused_moe import FusedMoE, checkpoint

def private():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def watch():
    global peak
    while is_running:
        peak = max(peak, private())
        time.sleep(0.0002)

def measure(fn, *args, **options):
    global peak, is_running
    before = peak = private()
    is_running, watcher = True, threading.Thread(target=watch)
    watcher.start()
    fn(*args, **options)
    is_running = False
    watcher.join()
    print(peak - before)

source, ours, back = sys.argv[1:]
torch.set_num_threads(1)
options = {"max_shard_size": "5MB", "progress": False}
measure(checkpoint.convert, source, ours, to="fused_moe", **options)
measure(checkpoint.convert, ours, back, to="hf", **options)
found = checkpoint.blocks(source)
model = torch.nn.ModuleList(FusedMoE(**block.settings, dtype=torch.bfloat16) for block in found)
measure(checkpoint.load, model, source)
"""


def test_memory(tmp_path):
    """One layer and one shard, or one layer more than the result, of 76 MB; 5 MB are for a tensor."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 8, "num_hidden_layers": 6}
    tensors, config = {}, QWEN | sizes
    for block in checkpoint.blocks(config):
        moe = FusedMoE(**block.settings, device="meta", dtype=BF16).to_empty(device="cpu")
        tensors |= checkpoint.to_hf(block, moe.state_dict())
    source = write(tmp_path / "in", tensors, config, "20MB")
    command = [sys.executable, "-c", MEASURE, source, tmp_path / "ours", tmp_path / "back"]
    # Else malloc keeps blocks of the size of these tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    layer, shard, more = 12.6e6, 5e6, 5e6
    to_ours, to_hf, load = map(int, found.stdout.split())
    assert max(to_ours, to_hf) < layer + shard + more and load < layer + more, found.stdout


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
