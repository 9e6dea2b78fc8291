"""Folders that transformers has written: there and back, and models with FusedMoE in place of its blocks.

Small models of the six families that the documentation names, in shards.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import F32, assert_near
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
pytest.importorskip("peft")  # test_transformers.py

from test_checkpoint_files import (  # noqa: E402
    OTHERS,
    config_of,
    contents,
    convert,
    cut,
    layer_of,
    random_layer,
    write,
)
from test_transformers import tiny_model, token_ids  # noqa: E402
from test_transformers_checkpoint import tiny  # noqa: E402

from fused_moe import FusedMoE, checkpoint  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu")

SIX = pytest.mark.parametrize(
    "family", ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
)
EXAMPLE = Path(__file__).parents[1] / "examples" / "compare_checkpoint.py"


def saved(folder, model):
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="module")
def example():
    if not EXAMPLE.exists():
        pytest.skip("not in a checkout")
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("compare_checkpoint", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@SIX
def test_there_and_back(tmp_path, family):
    """The bytes of every tensor, and config.json, which from_pretrained reads as before."""
    model = tiny_model(family, "cpu")
    source = saved(tmp_path / "in", model)
    assert (source / "model.safetensors.index.json").exists()
    ours = convert(source, tmp_path / "ours", to="fused_moe", max_shard_size="50KB")
    back = convert(ours, tmp_path / "back", to="hf", max_shard_size="60KB")
    assert contents(back) == contents(source)
    assert (back / "config.json").read_text() == (source / "config.json").read_text()
    assert (back / "generation_config.json").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=F32)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in again.state_dict().items())


@SIX
@pytest.mark.parametrize("layout", ("hf", "fused_moe"))
def test_logits_and_gradients(tmp_path, example, family, layout):
    """FusedMoE layers that are loaded from the folder, in place of a model's blocks."""
    eager = tiny_model(family, "cpu")
    source = saved(tmp_path / "in", eager)
    folder = source if layout == "hf" else convert(source, tmp_path / "ours", to="fused_moe")
    ours = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=F32, attn_implementation="eager")
    example.replace_blocks(ours, folder, F32)
    ids = token_ids("cpu")
    expected, found = (model(input_ids=ids).logits for model in (eager, ours))
    assert_near(found.detach(), expected.detach(), slack=64)
    weight = torch.randn(expected.shape)
    gradients = [gradients_of(logits, model, weight) for logits, model in ((expected, eager), (found, ours))]
    theirs, own = gradients
    layers = [n for n, m in ours.named_modules() if isinstance(m, FusedMoE)]
    for block, name in zip(checkpoint.blocks(folder), layers, strict=True):
        here = name.removesuffix(".moe")
        inside = {key: theirs.pop(key) for key in [*theirs] if key.startswith(f"{here}.")}
        # The bias for the choice is a buffer.
        inside |= {n: b for n, b in eager.named_buffers() if n.startswith(f"{here}.")}
        for key, expected in checkpoint.from_hf(block, inside):
            if key != "expert_bias":
                assert_near(own.pop(f"{name}.{key}"), expected, slack=64)
    assert own.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert_near(own[key], expected, slack=64)


def gradients_of(logits, model: nn.Module, weight) -> dict:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(logits, parameters, weight), strict=True))


def test_tied_weights(tmp_path):
    """A file that has one of two tied tensors; with the other added, it is one more tensor."""
    model = tiny_model("qwen3_moe", "cpu", tie_word_embeddings=True)
    source = saved(tmp_path / "in", model)
    assert "lm_head.weight" not in checkpoint.open_folder(source)
    back = convert(convert(source, tmp_path / "ours", to="fused_moe"), tmp_path / "back", to="hf")
    assert contents(back) == contents(source)


def test_in_memory_names(tmp_path):
    """What transformers has in memory, saved as it is: stacked experts, gate above up; back as such."""
    model = tiny_model("qwen3_moe", "cpu")
    model.save_pretrained(tmp_path / "in", save_original_format=False)
    stacked = checkpoint.open_folder(tmp_path / "in")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked
    published = saved(tmp_path / "published", model)
    ours = convert(tmp_path / "in", tmp_path / "ours", to="fused_moe")
    assert contents(ours) == contents(convert(published, tmp_path / "same", to="fused_moe"))
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(tmp_path / "in")


@pytest.mark.parametrize("model_type", checkpoint.FAMILIES)
def test_every_family(tmp_path, model_type):
    """There and back, from random layers."""
    if model_type == "kimi_k2":  # which transformers has no class of
        config = tiny("deepseek_v3").to_dict() | {"model_type": model_type}
    else:
        config = tiny(model_type).to_dict()
    tensors = {}
    for block in checkpoint.blocks(config):
        tensors |= checkpoint.to_hf(block, random_layer(block).state_dict())
    write(tmp_path / "in", tensors, config, 4000)
    ours = convert(tmp_path / "in", tmp_path / "ours", to="fused_moe")
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(tmp_path / "in")


def test_transposed_experts(tmp_path):
    """As Qwen has published Qwen3-VL's: both layouts have one name, and each goes back as it came."""
    config = tiny("qwen3_vl_moe_text").to_dict()
    tensors = {}
    for block in checkpoint.blocks(config):
        tensors |= checkpoint.to_hf(block, random_layer(block).state_dict())
    turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    found = []
    for folder, given in ((tmp_path / "a", tensors), (tmp_path / "b", turned)):
        folder.mkdir()
        source = write(folder / "in", given, config)
        ours = convert(source, folder / "ours", to="fused_moe")
        assert contents(convert(ours, folder / "back", to="hf")) == contents(source)
        found.append(contents(ours))
    assert found[0] == found[1]


COMPRESSED = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    "int4-zero": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}


def compress(folder, case):
    """A folder whose experts compressed-tensors has compressed, and the values of each weight."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from fused_moe.checkpoint.files import write_json, write_shards

    format, args = COMPRESSED[case]
    args = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors, values = {}, {}
    for name, weight in checkpoint.open_folder(folder).items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        shape = (weight.size(0), weight.size(1) // 32 if args.strategy == "group" else 1)
        scale = (torch.rand(shape) / 8 + 0.05).bfloat16()
        plain = {"weight": weight.bfloat16(), "weight_scale": scale}
        if not args.symmetric:
            plain["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
        packed = compressor.compress(plain, scheme)
        values[name] = compressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    groups = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}
    method = {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}
    out = folder.with_name("compressed")
    out.mkdir()
    write_shards(out, tensors.items(), "40KB")
    write_json(out / "config.json", config_of(folder) | {"quantization_config": method})
    return out, values


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(tmp_path, case):
    """Against the package's decompress; there and back."""
    pytest.importorskip("compressed_tensors", "0.20", reason="compressed-tensors is not installed")
    model = tiny_model("qwen3_moe", "cpu", moe_intermediate_size=32)
    source, values = compress(saved(tmp_path / "in", model), case)
    ours = convert(source, tmp_path / "ours", to="fused_moe")
    assert contents(convert(ours, tmp_path / "back", to="hf")) == contents(source)
    plain = checkpoint.open_folder(convert(ours, tmp_path / "plain", to="hf", dequantize=True, dtype=F32))
    assert all(torch.equal(plain[name].bfloat16(), value) for name, value in values.items())
    moe = layer_of(ours, 1)
    for e in range(moe.num_experts):
        value = values[f"model.layers.1.mlp.experts.{e}.down_proj.weight"]
        assert torch.equal(moe.experts.w2.dequantize()[e], value)


def test_transformers_reads_what_was_gptq(tmp_path):
    """As compressed-tensors' int4, which config.json says: the logits of the dequantised folder."""
    pytest.importorskip("compressed_tensors", "0.20", reason="compressed-tensors is not installed")
    make, method = OTHERS["gptq"]
    model = tiny_model("qwen3_moe", "cpu", moe_intermediate_size=32)
    source = saved(tmp_path / "in", model)
    tensors = {}
    for name, tensor in checkpoint.open_folder(source).items():
        if "_proj." in name:
            packed = make(1, *tensor.shape)
            packed[".scales"] = packed[".scales"].float() / 32  # values about as large as before
            tensors |= cut(name.removesuffix(".weight"), packed)
        else:
            tensors[name] = tensor
    quantised = write(tmp_path / "quantised", tensors, config_of(source) | {"quantization_config": method})
    back = convert(quantised, tmp_path / "back", to="hf")
    plain = convert(quantised, tmp_path / "plain", to="hf", dequantize=True, dtype=F32)
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=F32)
    ids = token_ids("cpu")
    expected, found = (load(folder)(input_ids=ids).logits for folder in (plain, back))
    assert_near(found.detach(), expected.detach(), slack=64)


@SIX
def test_comparison(tmp_path, example, family):
    """In float32 the three agree."""
    source = saved(tmp_path / "in", tiny_model(family, "cpu"))
    rows = example.compare(source, token_ids("cpu"), F32, "cpu")
    assert len(rows) == 3
    assert all(row["max"] < 1e-3 and row["KL"] < 1e-6 and row["top-1"] == 1 for row in rows.values())


def test_the_example(tmp_path, example, monkeypatch, capsys):
    """Its lines."""
    source = saved(tmp_path / "in", tiny_model("deepseek_v3", "cpu"))
    options = ["--random", "30", "--dtype", "float32", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(source), *options])
    example.main()
    rows = [line.rsplit(maxsplit=4) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["eager, fused_moe", "eager, FusedMoE", "fused_moe, FusedMoE"]
    assert all(float(row[1]) < 1e-3 and row[4] == "100.00%" for row in rows)
