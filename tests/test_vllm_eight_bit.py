"""fused_moe.vllm where activations are quantised, as checkpoints of 8 bits ask for: against the reference."""

from vllm_harness import build_layer, load, ours, pretended, route, run, sleep, vllm_config, wake  # noqa: F401

# isort: split
import logging
from types import SimpleNamespace

import pytest
import test_vllm_quantized as quantized
import torch
import vllm.model_executor.layers.fused_moe.config as moe_config
from cases import BF16
from test_vllm_quantized import SHAPES, D, E, F, K, checkpoint, in_tiles, inputs, layer_of, reload  # noqa: F401

import fused_moe.vllm
from fused_moe import QuantizedWeight, reference
from fused_moe.vllm import eight_bit, report
from fused_moe.vllm.experts import FusedMoEExperts

FORMATS = {
    "fp8_block": "fp8_block",
    "compressed fp8_block": "fp8_block",
    "compressed fp8": "fp8",
    "compressed int8": "int8",
}
ALL_FORMATS = pytest.mark.parametrize("name", FORMATS)
WIDE = {n: tuple(2 * F if size == F else size for size in shape) for n, shape in SHAPES.items()}


@pytest.fixture
def config(pretended, vllm_config):  # noqa: F811
    report._layers.clear()
    return vllm_config


def compute_of(name):
    return "int8" if FORMATS[name] == "int8" else "fp8"


def weight(name, tensors, projection, **settings):
    """A projection of a checkpoint as one weight of all experts."""
    data, scale = (
        torch.stack([t for n, t in tensors if f".{projection}." in n and ("scale" in n) == is_scale])
        for is_scale in (False, True)
    )
    settings = {"compute": compute_of(name), **settings}
    return QuantizedWeight(data, scale, format=FORMATS[name], shape=tuple(data.shape), **settings)


def check(out, x, logits, name, tensors, projections=tuple(SHAPES), activation="silu", **settings):
    """`out` is what the reference has, which quantises activations in the same way."""
    scores, ids = route(x, logits, K, True)
    *up, down = (weight(name, tensors, projection, **settings) for projection in projections)
    w1, w3 = (*up, None)[:2]
    expected = reference.fused_experts(x, w1, down, w3, scores, ids, activation=activation)
    difference = (out.float() - expected.float()).norm() / expected.float().norm()
    # codes of a that were rounded to their other neighbours; a GPU's sums of e4m3 have fewer bits
    assert difference < (0.02 if out.is_cuda else 0.01)


def error(out, x, logits, values):
    """Relative to what the weights' values give with activations that are not quantised."""
    scores, ids = route(x, logits, K, True)
    gate, up, down = (values[name] for name in SHAPES)
    expected = reference.fused_experts(x.float(), gate, down, up, scores, ids)
    return ((out.float() - expected).norm() / expected.norm()).item()


def stored(layer):
    """Where the layer's parameters are."""
    return {name: p.data_ptr() for name, p in layer.routed_experts.named_parameters()}


# --- what a layer computes ----------------------------------------------------------------------------


@ALL_FORMATS
def test_a_layer(config, name):
    """It has the reference's result, near to that of 16-bit activations and to vLLM's own arithmetic."""
    tensors, values = checkpoint(name, WIDE)
    layer, (x, logits) = layer_of(config, name, tensors, hidden_dim=2 * F), inputs(33)
    assert type(ours(layer)) is FusedMoEExperts
    out = run(config, layer, x, logits)
    check(out, x, logits, name, tensors)
    theirs = as_vllm_does(x, logits, values, name)
    most = 0.03 if name == "compressed int8" else 0.08
    assert 0.005 < error(out, x, logits, values) < most
    assert ((out.float() - theirs).norm() / theirs.norm()).item() < most


def rounded(rows, columns, name):
    """Rows of float32 with one scale for each so many columns, as vLLM quantises them."""
    groups = rows.unflatten(-1, (-1, columns))
    largest = 127 if name == "compressed int8" else 448
    scale = groups.abs().amax(-1, keepdim=True) / largest
    codes = groups / scale
    codes = codes.round() if largest == 127 else codes.to(torch.float8_e4m3fn).float()
    return (codes * scale).flatten(-2)


def as_vllm_does(x, logits, values, name):
    """vLLM's arithmetic: x, too, has a scale for 128 columns beside blocks, and h is rounded to x's dtype."""
    scores, ids = route(x, logits, K, True)
    out = torch.zeros(len(x), D)
    columns = {"fp8_block": (128, 128)}.get(FORMATS[name], (D, values["down_proj"].size(2)))
    for slot in range(K):
        gate, up, down = (values[projection][ids[:, slot].long()] for projection in SHAPES)
        rows = rounded(x.float(), columns[0], name)
        h = (torch.einsum("td,tfd->tf", rows, w).to(BF16).float() for w in (gate, up))
        a = (torch.nn.functional.silu(next(h)) * next(h)).to(BF16).float()
        y = torch.einsum("tf,tdf->td", rounded(a, columns[1], name), down)
        out += scores[:, slot, None] * y
    return out


@ALL_FORMATS
def test_a_token_in_every_batch(config, name):
    """A token alone has the bits that it has among others."""
    layer, (x, logits) = layer_of(config, name, checkpoint(name)[0]), inputs(65)
    out = run(config, layer, x, logits)
    for t in (0, 31, 64):
        assert torch.equal(run(config, layer, x[t : t + 1], logits[t : t + 1]), out[t : t + 1])


@ALL_FORMATS
def test_codes(config, name, monkeypatch):
    """FUSED_MOE_VLLM_COMPUTE=codes keeps activations in 16 bits. A layer keeps the mode of its making."""
    tensors, values = checkpoint(name)
    x, logits = inputs(33)
    eight_bits = layer_of(config, name, tensors)
    monkeypatch.setenv("FUSED_MOE_VLLM_COMPUTE", "codes")
    layer = layer_of(config, name, tensors)
    quantized.check(run(config, layer, x, logits), x, logits, values)
    assert error(run(config, layer, x, logits), x, logits, values) < 0.005
    reload(eight_bits, tensors)
    check(run(config, eight_bits, x, logits), x, logits, name, tensors)


@ALL_FORMATS
@pytest.mark.parametrize("named", ("fp8", "int8", "int8,fp8"))
def test_modes_that_are_named(config, name, named, monkeypatch):
    monkeypatch.setenv("FUSED_MOE_VLLM_COMPUTE", named)
    layer = layer_of(config, name, checkpoint(name)[0])
    modes = {packed.weight.compute for packed in layer.routed_experts.quant_method._packed}
    assert modes == {compute_of(name) if compute_of(name) in named.split(",") else "codes"}


def test_scales_that_are_powers_of_two(config, monkeypatch):
    """The activations have such scales where the checkpoint's configuration has `scale_fmt: ue8m0`."""
    name = "fp8_block"
    tensors, (x, logits) = checkpoint(name)[0], inputs(33)
    before = run(config, layer_of(config, name, tensors), x, logits)
    arch = SimpleNamespace(quantization_config={"scale_fmt": "ue8m0"})
    text = SimpleNamespace()
    model = SimpleNamespace(dtype=BF16, quantization_config=None, model_arch_config=arch, hf_text_config=text)
    with monkeypatch.context() as patch:
        patch.setattr(config, "model_config", model)
        layer = layer_of(config, name, tensors)
        of_int8 = layer_of(config, "compressed int8", checkpoint("compressed int8")[0])
        patch.setenv("FUSED_MOE_VLLM_COMPUTE", "codes")
        in_codes = layer_of(config, name, tensors)
    out = run(config, layer, x, logits)
    check(out, x, logits, name, tensors, power_of_two=True)
    assert not torch.equal(out, before)
    assert not any(
        packed.weight.power_of_two
        for other in (of_int8, in_codes)
        for packed in other.routed_experts.quant_method._packed
    )


def test_static_scales(config, monkeypatch):
    """Where the checkpoint has scales of activations, these are not found in each call: mode codes."""
    monkeypatch.setattr(
        "fused_moe.vllm.fp8.FusedMoECompressedFp8Method.is_dynamic", property(lambda self: False)
    )
    name = "compressed fp8_block"
    (tensors, values), (x, logits) = checkpoint(name), inputs()
    layer = layer_of(config, name, tensors)
    quantized.check(run(config, layer, x, logits), x, logits, values)


@ALL_FORMATS
def test_expert_map(config, name, monkeypatch):
    """A rank's experts are some of all: the others' slots add nothing."""
    tensors, values = checkpoint(name)
    layer, (x, logits) = layer_of(config, name, tensors), inputs()
    place = torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    monkeypatch.setitem(layer.routed_experts._buffers, "_expert_map", place)
    out = run(config, layer, x, logits)
    values = {n: torch.where(place[:, None, None] < 0, 0, v[place.long()]) for n, v in values.items()}
    assert error(out, x, logits, values) < 0.1


@ALL_FORMATS
def test_without_a_gate(config, name):
    projections = ("up_proj", "down_proj")
    tensors, _ = checkpoint(name, {n: SHAPES[n] for n in projections})
    names = {"ckpt_names": (*projections, None), "activation": "relu2_no_mul"}
    layer, (x, logits) = layer_of(config, name, tensors, **names), inputs()
    check(run(config, layer, x, logits), x, logits, name, tensors, projections, "relu2")


@ALL_FORMATS
def test_tensor_parallel(config, name, monkeypatch):
    """Each of two ranks has half of F; the ranks' outputs are summed."""
    (tensors, values), (x, logits) = checkpoint(name, WIDE), inputs(33)
    out = torch.zeros(len(x), D)
    for rank in range(2):
        monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = layer_of(config, name, tensors, hidden_dim=2 * F, tp_size=2)
        assert layer.routed_experts.intermediate_size_per_partition == F
        out += run(config, layer, x, logits).float()
    assert error(out, x, logits, values) < 0.1


@pytest.mark.parametrize("widths, reason", (((112, 48), None), ((112, 40), "(112, 40), not multiples of 16")))
def test_widths_by_rows(config, widths, reason):
    """Weights that never become tiles may have other widths."""
    sizes = dict(zip(("dim", "hidden_dim"), widths, strict=True))
    build_layer(config, num_experts=E, top_k=K, quant_config=quantized.by_rows_config("int"), **sizes)
    assert report._layers == {reason and f"widths {reason}": 1}


# --- weights ------------------------------------------------------------------------------------------


@ALL_FORMATS
def test_weights_stay_where_they_are(config, name, in_tiles):  # noqa: F811
    """Nothing is arranged, on Hopper neither."""
    layer = build_layer(config, E, K, D, F, quant_config=quantized.FORMATS[name][0]())
    before = stored(layer)
    tensors, _ = checkpoint(name)
    list(layer.load_weights(tensors))
    load(layer)
    assert stored(layer) == before
    for packed in layer.routed_experts.quant_method._packed:
        w = packed.of(layer.routed_experts)
        assert not w.is_tiled
        pointers = {t.data_ptr() for t in w.eight_bit_tensors}
        assert pointers <= set(before.values())


@pytest.mark.parametrize("level", (1, 2), ids=("sleep 1", "sleep 2"))
@ALL_FORMATS
def test_updates(config, name, level):
    """Three updates with sleep and wake between: each time the bits of a layer that has loaded them."""
    layer, (x, logits) = layer_of(config, name, checkpoint(name)[0]), inputs()
    before = run(config, layer, x, logits)
    for _ in range(3):
        tensors, _ = checkpoint(name)
        wake(layer, sleep(layer))
        assert torch.equal(run(config, layer, x, logits), before)
        if level == 2:  # which discards weights
            for parameter in layer.routed_experts.parameters():
                parameter.data.view(torch.uint8).fill_(255)
        reload(layer, tensors)
        after = run(config, layer, x, logits)
        assert torch.equal(after, run(config, layer_of(config, name, tensors), x, logits))
        check(after, x, logits, name, tensors)
        before = after


@ALL_FORMATS
def test_experts_that_move(config, name, in_tiles):  # noqa: F811
    """By vLLM's EPLB, as in the other formats."""
    quantized.test_experts_that_move(config, name, in_tiles)


@ALL_FORMATS
def test_writes_are_followed(config, name, in_tiles):  # noqa: F811
    """load_weights alone is enough: parameters are as published."""
    (tensors, _), (x, logits) = checkpoint(name), inputs()
    layer = layer_of(config, name, checkpoint(name)[0])
    before = stored(layer)
    list(layer.load_weights(tensors))
    check(run(config, layer, x, logits), x, logits, name, tensors)
    assert stored(layer) == before


# --- what is said -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("fp8_block", "compressed int8"))
def test_lines_of_the_log(config, caplog, monkeypatch, name):
    caplog.set_level(logging.INFO, "vllm")
    monkeypatch.setattr(eight_bit.logger, "info_once", eight_bit.logger.info)
    layer_of(config, name, checkpoint(name)[0])
    [_, line] = [record.getMessage() for record in caplog.records if record.name == report.logger.name]
    kept = "fp8" if compute_of(name) == "int8" else "int8"
    assert line == (
        f"fused_moe quantises the activations of {compute_of(name)} weights (W8A8); "
        f"FUSED_MOE_VLLM_COMPUTE=codes does not, "
        f"FUSED_MOE_VLLM=unquantized,{kept},int4,mxfp4 keeps vLLM's experts"
    )


def test_a_mode_that_is_unknown(config, monkeypatch, caplog):
    monkeypatch.setenv("FUSED_MOE_VLLM_COMPUTE", "fp8,int4")
    fused_moe.vllm.register()
    [message] = caplog.messages
    assert message == (
        "vLLM's own experts are used: FUSED_MOE_VLLM_COMPUTE expected codes, fp8, int8, found 'int4'"
    )
