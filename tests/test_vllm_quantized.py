"""fused_moe.vllm: vLLM's quantised layers, loaded by vLLM, against the same weights in plain PyTorch."""

from vllm_harness import build_layer, load, ours, route, run, vllm_config  # noqa: F401

# isort: split
import pytest
import torch
from cases import BF16
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.model_loader.reload import (
    record_metadata_for_reloading,
)

from fused_moe import reference
from fused_moe.vllm import report
from fused_moe.vllm.experts import FusedMoEExperts

E, K, D, F, GROUP = 4, 2, 256, 128, 64
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
SHIFTS = torch.arange(0, 32, 4)


@pytest.fixture
def config(vllm_config, monkeypatch):  # noqa: F811
    report._layers.clear()
    monkeypatch.setattr(get_tp_group(), "device", torch.device("cpu"))  # where moe_wna16 repacks codes
    return vllm_config


# --- checkpoints: {name: tensor} of a matrix (out, in), and its values, in plain PyTorch -------------------


def fp8_block(rows, cols, scale_name="weight_scale_inv"):
    codes = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    scale = (torch.rand(rows // 128, cols // 128) + 0.5) * cols**-0.5
    values = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": codes, scale_name: scale}, values


def in_words(codes):
    """Eight codes of the last dimension in a word, the first in the lowest bits."""
    words = (codes.long().unflatten(-1, (-1, 8)) << SHIFTS).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def int4(rows, cols, has_zeros):
    codes = torch.randint(16, (rows, cols))
    scale = ((torch.rand(rows, cols // GROUP) + 0.5) * 0.25 * cols**-0.5).to(BF16)
    zeros = torch.randint(16, (rows, cols // GROUP)) if has_zeros else torch.full((rows, cols // GROUP), 8)
    values = (codes - zeros.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
    return codes, scale, zeros, values


def compressed_int4(rows, cols, has_zeros=False):
    codes, scale, zeros, values = int4(rows, cols, has_zeros)
    tensors = {"weight_packed": in_words(codes), "weight_scale": scale}
    if has_zeros:
        tensors["weight_zero_point"] = in_words(zeros.T).T.contiguous()
    return {**tensors, "weight_shape": torch.tensor([rows, cols])}, values


def gptq(rows, cols, has_zeros=False):
    codes, scale, zeros, values = int4(rows, cols, has_zeros)
    zeros = zeros.clamp(min=1) if has_zeros else zeros  # stored less 1
    values = (codes - zeros.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)
    qweight = in_words(codes).T.contiguous()
    return {"qweight": qweight, "qzeros": in_words((zeros - 1).T), "scales": scale.T.contiguous()}, values


def awq(rows, cols):
    codes, scale, zeros, values = int4(rows, cols, True)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    data, zeros = (in_words(t.T.unflatten(1, (-1, 8))[..., order].flatten(1)) for t in (codes, zeros))
    return {"qweight": data, "qzeros": zeros, "scales": scale.T.contiguous()}, values


def mxfp4(rows, cols):
    codes = torch.randint(16, (rows, cols))
    exponents = torch.randint(120, 124, (rows, cols // 32))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = magnitudes[codes % 8] * (1 - 2 * (codes // 8))
    values = values * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    data = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    return {"weight": data, "weight_scale": exponents.to(torch.uint8)}, values


def compressed(format, weights, inputs=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return CompressedTensorsConfig.from_config(
        {"config_groups": {"group_0": group}, "ignore": [], "format": format}
    )


def compressed_int4_config(symmetric=True, bits=4, group_size=GROUP, actorder=None):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder}
    return compressed("pack-quantized", {**weights, "strategy": "group", "group_size": group_size})


def compressed_fp8_config():
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**fp8, "strategy": "block", "block_structure": [128, 128]}
    inputs = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    return compressed("float-quantized", weights, inputs)


def fp8_config(blocks=(128, 128)):
    return Fp8Config(True, "dynamic", weight_block_size=list(blocks) if blocks else None)


def gptq_config(bits=4, group_size=GROUP, desc_act=False, **more):
    return AutoGPTQConfig(bits, group_size, desc_act, True, False, {}, {}, **more)


def wna16_config(symmetric):
    full = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": symmetric, "desc_act": False}
    return MoeWNA16Config.from_config(full)


def with_zeros(make):
    return lambda *shape: make(*shape, True)


FORMATS = {
    "fp8_block": (fp8_config, fp8_block),
    "compressed fp8_block": (compressed_fp8_config, lambda *shape: fp8_block(*shape, "weight_scale")),
    "compressed int4": (compressed_int4_config, compressed_int4),
    "compressed int4, zero points": (lambda: compressed_int4_config(False), with_zeros(compressed_int4)),
    "gptq": (gptq_config, gptq),
    "awq": (lambda: AutoAWQConfig(4, GROUP, True, False), awq),
    "moe_wna16": (lambda: wna16_config(True), gptq),
    "moe_wna16, zero points": (lambda: wna16_config(False), with_zeros(gptq)),
    "mxfp4": (Mxfp4Config, mxfp4),
}


def checkpoint(make):
    """What a model has for the layer: (name, tensor) for each, and {projection: its values (E, out, in)}."""
    tensors, values = [], {}
    for projection, shape in SHAPES.items():
        made = [make(*shape) for _ in range(E)]
        tensors += [
            (f"{e}.{projection}.{n}", t) for e, (named, _) in enumerate(made) for n, t in named.items()
        ]
        values[projection] = torch.stack([v for _, v in made])
    return tensors, values


def layer_of(config, name, tensors, **settings):
    make_config, _ = FORMATS[name]
    layer = build_layer(config, E, K, D, F, quant_config=make_config(), **settings)
    record_metadata_for_reloading(layer)
    list(layer.routed_experts.load_weights(tensors))
    load(layer)
    return layer


def expected(x, logits, values):
    scores, ids = route(x, logits, K, True)
    gate, up, down = (values[name] for name in SHAPES)
    return reference.fused_experts(x.float(), gate, down, up, scores, ids)


def inputs(T=5):
    return torch.randn(T, D, dtype=BF16), torch.randn(T, E, dtype=BF16)


# --- each format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer(config, name):
    tensors, values = checkpoint(FORMATS[name][1])
    layer = layer_of(config, name, tensors)
    assert type(ours(layer)) is FusedMoEExperts
    x, logits = inputs()
    out = run(config, layer, x, logits)
    torch.testing.assert_close(out.float(), expected(x, logits, values), atol=0.02, rtol=0.02)
