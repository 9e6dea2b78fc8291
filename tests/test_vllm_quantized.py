"""fused_moe.vllm: vLLM's quantised layers, loaded by vLLM, against the same weights in plain PyTorch."""

from vllm_harness import build_layer, load, ours, pretended, route, run, sleep, vllm_config, wake  # noqa: F401

# isort: split
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.layers.fused_moe.config as moe_config
from cases import BF16
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.experts_int8 import ExpertsInt8Config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

import fused_moe.vllm
from fused_moe import reference
from fused_moe.quantized import tiles
from fused_moe.vllm import eight_bit as eight_bit_part
from fused_moe.vllm import quantized, report
from fused_moe.vllm.experts import FusedMoEExperts

E, K, D, F, GROUP = 4, 2, 256, 128, 64
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
SHIFTS = torch.arange(0, 32, 4)


@pytest.fixture
def config(pretended, vllm_config, monkeypatch):  # noqa: F811
    """Activations stay in 16 bits; test_vllm_eight_bit.py is for those that are quantised."""
    monkeypatch.setenv("FUSED_MOE_VLLM_COMPUTE", "codes")
    report._layers.clear()
    monkeypatch.setattr(get_tp_group(), "device", torch.device("cpu"))  # where moe_wna16 repacks codes
    return vllm_config


# --- checkpoints: {name: tensor} of a matrix (out, in), and its values, in plain PyTorch -------------------


def fp8_block(rows, cols, scale_name="weight_scale_inv"):
    codes = torch.randn(rows, cols).to(torch.float8_e4m3fn)
    scale = (torch.rand(rows // 128, cols // 128) + 0.5) * cols**-0.5
    values = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"weight": codes, scale_name: scale}, values


def by_rows(rows, cols, dtype):
    """8 bits with a scale per row, as compressed-tensors has them."""
    largest = 1 if dtype.is_floating_point else 40
    codes = (largest * torch.randn(rows, cols)).clamp(-127, 127).to(dtype)
    scale = (torch.rand(rows, 1) + 0.5) * cols**-0.5 / largest
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


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


def compressed_int4_config(symmetric=True, bits=4, group_size=GROUP):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    return compressed("pack-quantized", {**weights, "strategy": "group", "group_size": group_size})


def compressed_fp8_config():
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**fp8, "strategy": "block", "block_structure": [128, 128]}
    inputs = {**fp8, "strategy": "group", "group_size": 128, "dynamic": True}
    return compressed("float-quantized", weights, inputs)


def by_rows_config(type):
    code = {"num_bits": 8, "type": type, "symmetric": True}
    inputs = {**code, "strategy": "token", "dynamic": True}
    return compressed(f"{type}-quantized", {**code, "strategy": "channel"}, inputs)


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
    "compressed fp8": (lambda: by_rows_config("float"), lambda *shape: by_rows(*shape, torch.float8_e4m3fn)),
    "compressed int8": (lambda: by_rows_config("int"), lambda *shape: by_rows(*shape, torch.int8)),
    "compressed int4": (compressed_int4_config, compressed_int4),
    "compressed int4, zero points": (lambda: compressed_int4_config(False), with_zeros(compressed_int4)),
    "gptq": (gptq_config, gptq),
    "awq": (lambda: AutoAWQConfig(4, GROUP, True, False), awq),
    "moe_wna16": (lambda: wna16_config(True), gptq),
    "moe_wna16, zero points": (lambda: wna16_config(False), with_zeros(gptq)),
    "mxfp4": (Mxfp4Config, mxfp4),
}


def checkpoint(name, shapes=SHAPES):
    """What a model has for the layer: (name, tensor) for each, and {projection: its values (E, out, in)}."""
    tensors, values = [], {}
    for projection, shape in shapes.items():
        made = [FORMATS[name][1](*shape) for _ in range(E)]
        tensors += [
            (f"{e}.{projection}.{n}", t) for e, (named, _) in enumerate(made) for n, t in named.items()
        ]
        values[projection] = torch.stack([v for _, v in made])
    return tensors, values


def layer_of(config, name, tensors, hidden_dim=F, **settings):
    """A layer that has loaded a checkpoint, as vLLM's loader does it."""
    layer = build_layer(config, E, K, D, hidden_dim, quant_config=FORMATS[name][0](), **settings)
    record_metadata_for_reloading(layer)
    list(layer.load_weights(tensors))
    load(layer)
    return layer


def inputs(T=5):
    return torch.randn(T, D, dtype=BF16), torch.randn(T, E, dtype=BF16)


def check(out, x, logits, values):
    scores, ids = route(x, logits, K, True)
    gate, up, down = (values[name] for name in SHAPES)
    expected = reference.fused_experts(x.float(), gate, down, up, scores, ids)
    torch.testing.assert_close(out.float(), expected, atol=0.06, rtol=0.02)


def dequantized(layer):
    """w13 and w2 as the layer's next call would read them."""
    experts = layer.routed_experts
    return [packed.of(experts).dequantize(torch.float32) for packed in experts.quant_method._packed]


def bits(layer):
    return {name: p.detach().clone().view(torch.uint8) for name, p in layer.routed_experts.named_parameters()}


def same_bits(layer, other):
    found, expected = bits(layer), bits(other)
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.fixture
def in_tiles(monkeypatch):
    """Weights are kept as on Hopper, whose kernels the CPU has not: nothing is computed."""
    monkeypatch.setattr(tiles, "are_wanted", lambda device, shape, *_: tiles.fit(shape))


# --- what a layer computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer(config, name):
    tensors, values = checkpoint(name)
    layer, (x, logits) = layer_of(config, name, tensors), inputs()
    assert type(ours(layer)) is FusedMoEExperts
    check(run(config, layer, x, logits), x, logits, values)


@pytest.mark.parametrize("name", FORMATS)
def test_tiles(config, name, in_tiles):
    """The parameters are tiles of the checkpoint's values."""
    tensors, values = checkpoint(name)
    layer = layer_of(config, name, tensors)
    w13, w2 = dequantized(layer)
    assert torch.equal(w13, torch.cat([values["gate_proj"], values["up_proj"]], 1))
    assert torch.equal(w2, values["down_proj"])
    assert all(p.is_contiguous() and len(p) == E for p in layer.routed_experts.parameters())


def test_gpt_oss(config, monkeypatch):
    """Its gate and up rows alternate, and vLLM's loader takes all experts at a time."""
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=BF16, quantization_config=None))
    settings = {"activation": "swigluoai", "has_bias": True}
    layer = build_layer(config, E, K, D, F, quant_config=GptOssMxfp4Config(), **settings)
    made = {stem: [mxfp4(*shape) for _ in range(E)] for stem, shape in (("w13", (2 * F, D)), ("w2", (D, F)))}
    experts = layer.routed_experts
    for stem, matrices in made.items():
        loaded = {n: torch.stack([named[n] for named, _ in matrices]) for n in ("weight", "weight_scale")}
        loaded["bias"] = torch.randn(E, len(matrices[0][1]), dtype=BF16)
        for name, tensor in loaded.items():
            parameter = getattr(experts, f"{stem}_{name}")
            parameter.weight_loader(parameter, tensor, weight_name=name, shard_id=None, expert_id=None)
    load(layer)
    assert type(ours(layer)) is FusedMoEExperts
    x, logits = inputs()
    w13, w2 = (torch.stack([values for _, values in made[stem]]) for stem in ("w13", "w2"))
    scores, ids = route(x, logits, K, True)
    b13, b2 = experts.w13_bias.float(), experts.w2_bias.float()
    expected = torch.zeros(len(x), D)
    for slot in range(K):
        e = ids[:, slot]
        h = torch.einsum("td,tfd->tf", x.float(), w13[e]) + b13[e]
        gate, up = h[:, 0::2].clamp(max=7), h[:, 1::2].clamp(-7, 7)
        a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        expected += scores[:, slot, None] * (torch.einsum("tf,tdf->td", a, w2[e]) + b2[e])
    torch.testing.assert_close(run(config, layer, x, logits).float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ("fp8_block", "compressed int4", "mxfp4"))
def test_expert_map(config, name, monkeypatch):
    """A rank's experts are some of all: the others' slots add nothing."""
    tensors, values = checkpoint(name)
    layer, (x, logits) = layer_of(config, name, tensors), inputs()
    place = torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    monkeypatch.setitem(layer.routed_experts._buffers, "_expert_map", place)
    out = run(config, layer, x, logits)
    values = {n: torch.where(place[:, None, None] < 0, 0, v[place.long()]) for n, v in values.items()}
    check(out, x, logits, values)


@pytest.mark.parametrize("name", ("fp8_block", "compressed int4", "mxfp4"))
def test_without_a_gate(config, name):
    tensors, values = checkpoint(name, {n: SHAPES[n] for n in ("up_proj", "down_proj")})
    names = {"ckpt_names": ("up_proj", "down_proj", None), "activation": "relu2_no_mul"}
    layer, (x, logits) = layer_of(config, name, tensors, **names), inputs()
    assert type(ours(layer)) is FusedMoEExperts
    scores, ids = route(x, logits, K, True)
    up, down = values["up_proj"], values["down_proj"]
    expected = reference.fused_experts(x.float(), up, down, None, scores, ids, activation="relu2")
    torch.testing.assert_close(run(config, layer, x, logits).float(), expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("name", [name for name in FORMATS if "wna16" not in name])
def test_tensor_parallel(config, name, monkeypatch):
    """Each of two ranks has half of F; the ranks' outputs are summed."""
    tensors, values = checkpoint(name, {n: tuple(2 * F if s == F else s for s in SHAPES[n]) for n in SHAPES})
    x, logits = inputs()
    out = torch.zeros(len(x), D)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = layer_of(config, name, tensors, hidden_dim=2 * F, tp_size=2)
        assert layer.routed_experts.intermediate_size_per_partition == F
        out += run(config, layer, x, logits).float()
    check(out, x, logits, values)


def test_biases_of_gptq(config):
    """vLLM makes some in any case; those that the checkpoint has count."""
    tensors, values = checkpoint("gptq")
    layer, (x, logits) = layer_of(config, "gptq", tensors), inputs()
    run(config, layer, x, logits)
    assert ours(layer).biases == (None, None)
    biases = [(f"{e}.down_proj.bias", torch.randn(D, dtype=BF16)) for e in range(E)]
    layer = layer_of(config, "gptq", tensors + biases)
    scores, ids = route(x, logits, K, True)
    added = (torch.stack([b for _, b in biases]).float()[ids.long()] * scores[..., None]).sum(1)
    check(run(config, layer, x, logits).float() - added, x, logits, values)


# --- weights that change ------------------------------------------------------------------------------


def reload(layer, tensors):
    """vLLM's reload_weights: loaded into new memory, processed, copied into the old."""
    initialize_layerwise_reload(layer)
    list(layer.load_weights(tensors))
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=BF16))


def places(layer):
    return {name: p.data_ptr() for name, p in layer.routed_experts.named_parameters()}


@pytest.mark.parametrize("level", (1, 2), ids=("sleep 1", "sleep 2"))
@pytest.mark.parametrize("name", FORMATS)
def test_updates(config, name, level):
    """Three updates with sleep and wake between: each time the bits of a layer that has loaded them."""
    layer, (x, logits) = layer_of(config, name, checkpoint(name)[0]), inputs()
    before = run(config, layer, x, logits)
    for _ in range(3):
        tensors, values = checkpoint(name)
        kept = sleep(layer)
        with pytest.raises(RuntimeError, match="storage"):
            run(config, layer, x, logits)
        wake(layer, kept)
        assert torch.equal(run(config, layer, x, logits), before)
        if level == 2:  # which discards weights
            for parameter in layer.routed_experts.parameters():
                parameter.data.view(torch.uint8).fill_(255)
        reload(layer, tensors)
        after = run(config, layer, x, logits)
        assert torch.equal(after, run(config, layer_of(config, name, tensors), x, logits))
        check(after, x, logits, values)
        before = after


@pytest.mark.parametrize("name", FORMATS)
def test_updates_of_tiles(config, name, in_tiles):
    """The same in tiles, which keep their memory: CUDA graphs read it."""
    layer = layer_of(config, name, checkpoint(name)[0])
    before = places(layer)
    for step in range(3):
        tensors, _ = checkpoint(name)
        with torch.inference_mode(step == 2):
            reload(layer, tensors)
        fresh = layer_of(config, name, tensors)
        assert same_bits(layer, fresh) and places(layer) == before
        assert all(map(torch.equal, dequantized(layer), dequantized(fresh)))


def test_zero_points_that_come_and_go(config, in_tiles):
    """Zero points that are all 0 are kept: the next ones are written over them."""
    name = "compressed int4, zero points"
    tensors, _ = checkpoint(name)
    zero = 0x88888888 - 2**32
    without = [(n, torch.full_like(t, zero) if "zero_point" in n else t) for n, t in tensors]
    for first, second in ((tensors, without), (without, tensors)):
        layer = layer_of(config, name, first)
        before = places(layer)
        reload(layer, second)
        assert same_bits(layer, layer_of(config, name, second)) and places(layer) == before


def test_a_reload_leaves_no_memory(config, in_tiles):
    """The weights that a reload packed are gone when they have been copied, and a call keeps none."""
    layer = layer_of(config, "fp8_block", checkpoint("fp8_block")[0])
    reload(layer, checkpoint("fp8_block")[0])
    for packed in layer.routed_experts.quant_method._packed:
        assert packed.names and not list(packed.weight.parameters())
        assert list(packed.of(layer.routed_experts).parameters()) and not list(packed.weight.parameters())


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_that_are_replaced(config, name):
    """vLLM may give the layer other parameters for the time of a call: offloaded ones."""
    (tensors, values), (x, logits) = checkpoint(name), inputs()
    layer, other = layer_of(config, name, checkpoint(name)[0]), layer_of(config, name, tensors)
    run(config, layer, x, logits)
    for own, parameter in other.routed_experts.named_parameters():
        setattr(
            layer.routed_experts, own, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
        )
    check(run(config, layer, x, logits), x, logits, values)


def test_biases_that_move(config):
    """They are the layer's after a reload, too."""
    tensors, _ = checkpoint("gptq")
    tensors += [(f"{e}.down_proj.bias", torch.randn(D, dtype=BF16)) for e in range(E)]
    layer, (x, logits) = layer_of(config, "gptq", tensors), inputs()
    reload(layer, tensors)
    before = run(config, layer, x, logits)
    layer.routed_experts.w2_bias.data.add_(1)
    moved = run(config, layer, x, logits).float() - before.float()
    scores, _ = route(x, logits, K, True)
    torch.testing.assert_close(moved, scores.sum(1, keepdim=True).expand_as(moved), atol=0.05, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_write_that_would_be_lost(config, name, in_tiles):
    """load_weights alone cannot follow: it raises, and the weights stay."""
    layer = layer_of(config, name, checkpoint(name)[0])
    before = bits(layer)
    tensors, _ = checkpoint(name)
    of_weights = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "qweight", "scales")
    for entry in tensors:
        if entry[0].rsplit(".", 1)[1] in of_weights:
            with pytest.raises(RuntimeError, match="is packed by fused_moe: update weights by vLLM's"):
                list(layer.load_weights([entry]))
    assert all(torch.equal(p, before[n]) for n, p in bits(layer).items())


def test_a_write_into_published_weights(config):
    """Where weights are as published, load_weights alone is followed."""
    tensors, values = checkpoint("fp8_block")
    layer, (x, logits) = layer_of(config, "fp8_block", checkpoint("fp8_block")[0]), inputs()
    list(layer.load_weights(tensors))
    check(run(config, layer, x, logits), x, logits, values)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_that_move(config, name, in_tiles):
    """vLLM's EPLB moves experts between places in place, tiles and their scales alike."""
    layer = layer_of(config, name, checkpoint(name)[0])
    assert layer.routed_experts.quant_method.supports_eplb
    weights, group = list(layer.routed_experts.get_expert_weights()), get_ep_group()
    for _ in range(3):
        before, order = dequantized(layer), torch.randperm(E)
        rearrange_expert_weights_inplace(
            torch.arange(E)[None], order[None], [weights], [torch.empty_like(t) for t in weights],
            group.cpu_group, TorchDistGlooStagedEplbCommunicator(group.cpu_group),
        )  # fmt: skip
        after = dequantized(layer)
        assert all(torch.equal(new, old[order]) for new, old in zip(after, before, strict=True))


# --- what is not taken --------------------------------------------------------------------------------

NOT_TAKEN = {
    "fp8 with scales of blocks of [64, 64]": (lambda: fp8_config((64, 64)), {}),
    "fp8 with scales of matrices": (lambda: fp8_config(None), {}),
    "widths (320, 128), not multiples of 128": (fp8_config, {"dim": 320}),
    "integers of 8 bits": (lambda: compressed_int4_config(bits=8), {}),
    "int4 with groups of 16 columns, not of 32 or 64 or 128": (
        lambda: compressed_int4_config(group_size=16),
        {},
    ),
    "AWQ without zero points": (lambda: AutoAWQConfig(4, GROUP, False, False), {}),
    "widths (96, 128), not multiples of 64": (lambda: by_rows_config("int"), {"dim": 96}),
    "widths (256, 96), not multiples of 64": (lambda: gptq_config(group_size=32), {"hidden_dim": 96}),
    "widths (288, 128), not multiples of 64": (Mxfp4Config, {"dim": 288}),
    "mxfp4 weights beside activations of torch.float16": (Mxfp4Config, {"dtype": torch.float16}),
    "activation swiglustep": (fp8_config, {"activation": "swiglustep"}),
    "dtype torch.float32": (fp8_config, {"dtype": torch.float32}),
    "method Int8OnlineMoEMethod": (ExpertsInt8Config, {}),
}


@pytest.mark.parametrize("reason", NOT_TAKEN)
def test_not_taken(config, reason):
    """Such a layer keeps vLLM's method."""
    make_config, settings = NOT_TAKEN[reason]
    sizes = {"num_experts": E, "top_k": K, "dim": D, "hidden_dim": F, **settings}
    layer = build_layer(config, quant_config=make_config(), **sizes)
    assert not isinstance(layer.routed_experts.quant_method, quantized.QuantizedMethod)
    assert report._layers == {reason: 1}


def test_a_backend_that_was_asked_for(config, monkeypatch):
    monkeypatch.setattr(config.kernel_config, "moe_backend", "triton")
    layer = build_layer(config, E, K, D, F, quant_config=fp8_config())
    assert report._layers == {"--moe-backend triton": 1}
    assert not isinstance(layer.routed_experts.quant_method, quantized.QuantizedMethod)


def test_elastic_ranks(config, monkeypatch):
    monkeypatch.setattr(config.parallel_config, "enable_elastic_ep", True)
    build_layer(config, E, K, D, F, quant_config=fp8_config())
    assert report._layers == {"elastic expert parallelism of quantised weights": 1}


def test_activations_that_were_asked_for(config, monkeypatch):
    """By the user, not by the checkpoint's configuration."""
    asked = QuantizationConfigArgs(moe=QuantSpec(activation="fp8_per_tensor_dynamic"))
    monkeypatch.setattr(config, "model_config", SimpleNamespace(dtype=BF16, quantization_config=asked))
    build_layer(config, E, K, D, F, quant_config=Mxfp4Config())
    [reason] = report._layers
    assert reason.startswith("--quantization-config asks for activations of")


def test_lines_of_the_log(config, caplog, monkeypatch):
    """The second one says that activations are not quantised, as the checkpoint's configuration asks for."""
    caplog.set_level(logging.INFO, "vllm")
    monkeypatch.setattr(eight_bit_part.logger, "info_once", eight_bit_part.logger.info)
    layer_of(config, "fp8_block", checkpoint("fp8_block")[0])
    own = [record.getMessage() for record in caplog.records if record.name == report.logger.name]
    assert own[0] == "fused_moe runs the experts of 1 of 1 MoE layers"
    assert "which are not quantised (W8A16); FUSED_MOE_VLLM=unquantized,int8,int4,mxfp4 keeps" in own[1]


# --- registration -------------------------------------------------------------------------------------


@pytest.fixture
def unregistered(config, monkeypatch):
    """vLLM as it is before our plugin has been loaded."""
    monkeypatch.setattr(RoutedExperts, "_get_quant_method", quantized.THEIRS)
    monkeypatch.setattr(quantized, "METHODS", {})
    return monkeypatch


def taken(config, name):
    layer = build_layer(config, E, K, D, F, quant_config=FORMATS[name][0]())
    return isinstance(layer.routed_experts.quant_method, quantized.QuantizedMethod)


def test_registered_once(unregistered, config):
    for _ in range(2):
        fused_moe.vllm.register()
        assert RoutedExperts._get_quant_method is quantized.get_quant_method
        assert taken(config, "fp8_block")
    assert report._layers == {None: 2}


def test_parts(unregistered, config):
    """FUSED_MOE_VLLM names the parts that are on."""
    unregistered.setenv("FUSED_MOE_VLLM", "unquantized,int4")
    fused_moe.vllm.register()
    assert [taken(config, name) for name in ("fp8_block", "gptq", "mxfp4")] == [False, True, False]


def test_another_interface(unregistered, config, caplog):
    """One clear line, and vLLM's own experts."""
    unregistered.setattr(quantized, "THEIRS", lambda self, prefix: None)
    fused_moe.vllm.register()
    [message] = caplog.messages
    assert "(fp8, int8, int4, mxfp4 layers): TypeError: _get_quant_method expected to take" in message
    assert RoutedExperts._get_quant_method is not quantized.get_quant_method


def test_a_name_that_is_gone(unregistered, config, caplog):
    """The other formats are taken."""
    unregistered.delattr("vllm.model_executor.layers.quantization.auto_awq.AutoAWQMoEMethod")
    unregistered.delitem(sys.modules, "fused_moe.vllm.int4")
    fused_moe.vllm.register()
    [message] = caplog.messages
    assert "(int4 layers): ImportError" in message and "AutoAWQMoEMethod" in message
    assert taken(config, "fp8_block") and not taken(config, "compressed int4")


def test_a_method_that_fails(unregistered, config):
    """An error of ours keeps vLLM's method."""
    unregistered.setattr(quantized, "widths_of", None)
    fused_moe.vllm.register()
    assert not taken(config, "fp8_block")
    [reason] = report._layers
    assert reason.startswith("TypeError")
