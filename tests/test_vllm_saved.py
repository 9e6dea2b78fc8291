"""What save_pretrained writes of quantised experts, read by vLLM: its configurations and its loader."""

from vllm_harness import build_layer, load, ours, pretended, route, run, vllm_config  # noqa: F401

# isort: split
import json
from types import SimpleNamespace

import pytest
import torch
from cases import BF16
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.linear import (
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

import fused_moe.transformers
from fused_moe import reference
from fused_moe.transformers import quantize_experts
from fused_moe.vllm import report
from fused_moe.vllm.experts import FusedMoEExperts

E, K, D, F = 4, 2, 256, 128
SIZES = {
    "vocab_size": 96,
    "hidden_size": D,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": K,
    "num_experts": E,
    "num_local_experts": E,
}
NAMES = {  # of a layer's experts, and their matrices, in a checkpoint
    "qwen3_moe": ("model.layers.0.mlp.experts", ("gate_proj", "down_proj", "up_proj")),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w2", "w3")),
}
SAVED = {
    "int4": {"format": "int4", "group_size": 64},
    "int4, zero points": {"format": "int4", "group_size": 32, "symmetric": False},
    "int8": {"format": "int8", "compute": "int8"},
    "fp8": {"format": "fp8", "compute": "fp8"},
    "fp8_block": {"format": "fp8_block"},
    "mxfp4": {"format": "mxfp4"},
}
REFUSED = {
    "int8, 16-bit activations": ({"format": "int8"}, "^$"),
    "fp8, 16-bit activations": ({"format": "fp8"}, "only format"),
    "int8 per matrix": ({"format": "int8", "compute": "int8", "per_tensor": True}, "channelwise"),
    "fp8 per matrix": ({"format": "fp8", "compute": "fp8", "per_tensor": True}, "^$"),
}


@pytest.fixture
def config(pretended, vllm_config, monkeypatch):  # noqa: F811
    """Activations stay in 16 bits."""
    monkeypatch.setenv("FUSED_MOE_VLLM_COMPUTE", "codes")
    report._layers.clear()
    return vllm_config


def save(folder, family, options, **sizes):
    """Experts that are quantised and saved; and those of the first layer, in memory."""
    fused_moe.transformers.register()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SIZES, **sizes}), dtype=BF16, experts_implementation="fused_moe"
    )
    quantize_experts(model, **options)
    model.save_pretrained(folder)
    return model.model.layers[0].mlp.experts


def quantization(folder, hf_config=None):
    """As vLLM makes it of config.json."""
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    method = written["quant_method"]
    override = get_quantization_config("gpt_oss_mxfp4").override_quantization_method(written, None, hf_config)
    return get_quantization_config(override or method).from_config(written)


def layer_of(config, folder, family):
    """A layer as vLLM's model has it, with the weights that the folder has for it."""
    name, (gate, down, up) = NAMES[family]
    quant_config = quantization(folder)
    quant_config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    name = f"{len(config.compilation_config.static_forward_context)}.{name}"
    layer = build_layer(
        config, E, K, D, F, quant_config=quant_config, prefix=name, ckpt_names=(gate, down, up)
    )
    stem = NAMES[family][0] + "."
    tensors = load_file(folder / "model.safetensors")
    list(layer.load_weights((n.removeprefix(stem), t) for n, t in tensors.items() if n.startswith(stem)))
    load(layer)
    return layer


def check(config, layer, experts):
    x, logits = torch.randn(5, D, dtype=BF16), torch.randn(5, E, dtype=BF16)
    scores, ids = route(x, logits, K, True)
    gate, up = experts.gate_up_proj.dequantize(torch.float32).chunk(2, 1)
    down = experts.down_proj.dequantize(torch.float32)
    expected = reference.fused_experts(x.float(), gate, down, up, scores, ids)
    found = run(config, layer, x, logits).float()
    torch.testing.assert_close(found, expected, atol=0.02 * expected.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("kind", SAVED)
def test_a_layer(config, tmp_path, family, kind):
    """vLLM's loader takes every tensor of the experts, and the layer computes what they do."""
    experts = save(tmp_path, family, SAVED[kind])
    layer = layer_of(config, tmp_path, family)
    assert type(ours(layer)) is FusedMoEExperts
    check(config, layer, experts)


@pytest.mark.parametrize("kind", SAVED)
def test_dense_layers(config, tmp_path, kind):
    """To vLLM all other layers are unquantised, those that it fuses and shared experts among them."""
    sizes = {"n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes |= {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    save(tmp_path, "deepseek_v3", SAVED[kind], **sizes)
    quant_config = quantization(tmp_path)
    quant_config.packed_modules_mapping = {
        "gate_up_proj": ["gate_proj", "up_proj"],
        "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    }
    attention = "self_attn.fused_qkv_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"
    for name in (*attention, "mlp.gate", "mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"):
        layer = ReplicatedLinear(D, F, bias=False, quant_config=quant_config, prefix=f"model.layers.0.{name}")
        assert type(layer.quant_method) is UnquantizedLinearMethod, name


def test_gpt_oss(config, tmp_path, monkeypatch):
    """vLLM's names for the tensors of all experts, and what its layer makes of them."""
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=BF16, quantization_config=None))
    experts = save(tmp_path, "gpt_oss", {"format": "mxfp4"})
    settings = {"activation": "swigluoai", "has_bias": True}
    quant_config = quantization(tmp_path, AutoConfig.from_pretrained(tmp_path))
    layer = build_layer(config, E, K, D, F, quant_config=quant_config, **settings)
    stem, parameters = "model.layers.0.mlp.experts.", dict(layer.routed_experts.named_parameters())
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.startswith(stem):
            own = GptOssForCausalLM.hf_to_vllm_mapper._map_name(name).rpartition(".experts.")[2]
            parameter = parameters.pop(own)
            tensor = tensor.flatten(-2) if tensor.dim() == 4 else tensor
            parameter.weight_loader(parameter, tensor, weight_name=own, shard_id=None, expert_id=None)
    assert not parameters
    load(layer)
    assert type(ours(layer)) is FusedMoEExperts
    packed = [p.of(layer.routed_experts) for p in layer.routed_experts.quant_method._packed]
    for own, weight in zip(packed, (experts.gate_up_proj, experts.down_proj), strict=True):
        assert torch.equal(own.dequantize(torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_vllm_refuses(config, tmp_path, kind):
    """serving.md names it."""
    options, reason = REFUSED[kind]
    save(tmp_path, "qwen3_moe", options)
    with pytest.raises((ValueError, AssertionError), match=reason):
        layer_of(config, tmp_path, "qwen3_moe")
