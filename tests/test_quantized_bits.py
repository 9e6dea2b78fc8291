"""Quantised experts round the same way with and without gradients, with and without adapters: a sampler and
the LoRA that trains through the same codes agree bit for bit."""

import copy

import pytest
import torch
from cases import BF16, F32, F64, Case, assert_as_good, forward_backward, to_double
from test_quantized import EVERY_OPTION, OPTIONS, STORED, quantized_inputs, values

import fused_moe
from fused_moe import FusedMoE, LoRA, fused_experts, grouped_mlp

pytestmark = pytest.mark.usefixtures("poison")

WEIGHTS = ("w1", "w2", "w3")
RANK = 8
# (tokens, D, F, E), K = 2: on Hopper tiles of 16, 64, 128 rows, past 384 rows of an expert, where codes are
# multiplied by tall tiles without h, and past 3072, where they are dequantised first; hidden columns that end
# within a line of 64, and a layout as published, since 96 is no multiple of 64.
SIZES = {
    "one token": (1, 64, 64, 5),
    "16 rows": (33, 64, 192, 5),
    "64 rows": (130, 128, 320, 5),
    "128 rows": (700, 192, 128, 8),
    "tall": (1100, 64, 192, 4),
    "dequantised": (3300, 64, 64, 2),
    "published": (130, 64, 96, 5),
}
SMALL = ("one token", "16 rows", "published")


def sizes_of(device) -> list[str]:
    return list(SIZES) if device.type == "cuda" else list(SMALL)


def make(size: str, device, option: str, **how) -> tuple[dict, dict, dict]:
    """fused_experts' differentiable inputs, its weights and the rest."""
    tokens, dim, hidden, num_experts = SIZES[size]
    case = Case(tokens, dim, hidden, num_experts, dtype=how.pop("dtype", BF16), routing="sentinels", **how)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(WEIGHTS, option))
    return inputs, weights, {"ids": case.ids(device), "score_on": case.score_on, **case.options}


def adapters(weights: dict, dtype, *, targets=WEIGHTS, rank: int = RANK, zero: bool = False) -> LoRA:
    """Random adapters; with b of zeros they add nothing."""
    made = {}
    for name in targets:
        w = weights[name]
        if w is None:
            continue
        E, rows, cols = w.shape
        factory = {"device": w.device, "dtype": dtype}
        made[f"a{name[1]}"] = torch.randn(E, rank, cols, **factory) / cols**0.5
        made[f"b{name[1]}"] = (
            torch.zeros(E, rows, rank, **factory) if zero else torch.randn(E, rows, rank, **factory)
        )
    return LoRA(**made, scale=0.5)


def with_and_without(inputs: dict, **others) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a recorded call, and of one under no_grad."""
    leaves = {n: None if v is None else v.clone().requires_grad_() for n, v in inputs.items()}
    recorded = fused_experts(**leaves, **others)
    assert recorded.requires_grad
    with torch.no_grad():
        return recorded.detach(), fused_experts(**inputs, **others)


@EVERY_OPTION
@pytest.mark.parametrize("bias", (False, True), ids=("", "biases"))
def test_same_bits_with_and_without_gradients(device, option, bias):
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, option, bias=bias)
        recorded, plain = with_and_without(inputs, **weights, **fixed)
        assert torch.equal(recorded, plain), size


@EVERY_OPTION
@pytest.mark.parametrize("bias", (False, True), ids=("", "biases"))
def test_same_bits_with_adapters_of_zeros(device, option, bias):
    """The adapters that training starts with: the policy is the reference."""
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, option, bias=bias)
        zeros = adapters(weights, BF16, zero=True)
        with torch.no_grad():
            plain = fused_experts(**inputs, **weights, **fixed)
        for found in with_and_without(inputs, **weights, **fixed, lora=zeros):
            assert torch.equal(found, plain), size


@EVERY_OPTION
@pytest.mark.parametrize("targets", (WEIGHTS, ("w1",), ("w2",), ("w3",)), ids=("all", *WEIGHTS))
def test_same_bits_of_adapters_with_and_without_gradients(device, option, targets):
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, option, bias=True)
        trained = adapters(weights, BF16, targets=targets)
        recorded, plain = with_and_without(inputs, **weights, **fixed, lora=trained)
        assert torch.equal(recorded, plain), size
        with torch.no_grad():
            assert not torch.equal(plain, fused_experts(**inputs, **weights, **fixed)), size


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("activation", ("silu", "swiglu_clamped", "relu2"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_same_bits_in_every_layout(device, layout, score_on, activation, dtype):
    how = {"layout": layout, "score_on": score_on, "activation": activation, "bias": True, "dtype": dtype}
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, "int4", **how)
        found = with_and_without(inputs, **weights, **fixed)
        found += with_and_without(inputs, **weights, **fixed, lora=adapters(weights, dtype, zero=True))
        assert all(torch.equal(found[0], other) for other in found[1:]), size
        recorded, plain = with_and_without(inputs, **weights, **fixed, lora=adapters(weights, dtype))
        assert torch.equal(recorded, plain), size


def test_same_bits_of_a_token_in_every_batch(device):
    """With adapters, on a GPU: alone, in a small batch, in one whose weights are dequantised."""
    if device.type != "cuda":
        pytest.skip("on the CPU the bits are the same in every run of the same batch alone")
    for option in OPTIONS:
        inputs, weights, fixed = make("dequantised", device, option, bias=True)
        trained, ids = adapters(weights, BF16), fixed.pop("ids")
        with torch.no_grad():
            out = fused_experts(**inputs, **weights, **fixed, ids=ids, lora=trained)
        for size in (1, 9, 130, 700, 1500):
            some = torch.randperm(len(out), device=device)[:size]
            part = {n: v[some] if n in ("x", "scores") else v for n, v in inputs.items()}
            found = with_and_without(part, **weights, **fixed, ids=ids[some], lora=trained)
            assert all(torch.equal(one, out[some]) for one in found), (option, size)


@EVERY_OPTION
def test_same_bits_as_float_experts(device, option):
    """Codes are as good as the values that they stand for, with gradients too."""
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, option, bias=True)
        recorded, _ = with_and_without(inputs, **weights, **fixed)
        with torch.no_grad():
            assert torch.equal(recorded, fused_experts(**inputs, **values(weights, BF16), **fixed)), size


def test_same_bits_of_rows(device):
    """grouped_mlp, whose plan has no row maps; rows past the last are zeros."""
    for size in sizes_of(device):
        inputs, weights, fixed = make(size, device, "mxfp4", bias=True)
        biases = {n: v for n, v in inputs.items() if n[0] == "b"}
        tokens, dim, _, num_experts = SIZES[size]
        rows = torch.randn(tokens, dim, device=device, dtype=BF16)
        counts = torch.full((num_experts,), max(1, tokens // num_experts - 1), device=device)
        counts[1:] = 0 if tokens < num_experts else counts[1:]
        found = []
        for lora in (None, adapters(weights, BF16, zero=True)):
            x = rows.clone().requires_grad_()
            found.append(grouped_mlp(x, **weights, **biases, counts=counts, lora=lora).detach())
            with torch.no_grad():
                found.append(grouped_mlp(rows, **weights, **biases, counts=counts, lora=lora))
        assert all(torch.equal(found[0], other) for other in found[1:]), size
        assert not found[0][int(counts.sum()) :].any() and found[0].any()


@EVERY_OPTION
def test_same_bits_of_a_layer(device, option):
    """A sampler without adapters, and the layer that trains adapters of zeros, then trained ones."""
    format, options = OPTIONS[option]
    layer = FusedMoE(64, 64, 8, 2, num_shared_experts=1, device=device, dtype=BF16)
    fused_moe.quantize(layer, format, **options)
    sampler, x = copy.deepcopy(layer).eval(), torch.randn(3, 20, 64, device=device, dtype=BF16)
    fused_moe.add_lora(layer, RANK, alpha=16)
    with torch.inference_mode():
        expected = sampler(x)
    assert torch.equal(layer(x), expected)
    with torch.no_grad():
        for name, adapter in layer.experts.lora.named_parameters():
            if name[0] == "b":
                adapter.normal_()
        expected = layer(x)
    out = layer(x)
    out.float().square().mean().backward()
    assert torch.equal(out, expected) and all(p.grad.any() for p in layer.experts.lora.parameters())


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("targets", (WEIGHTS, ("w1",), ("w3",)), ids=("all", "w1", "w3"))
@pytest.mark.parametrize("dtype", (F64, BF16), ids=("f64", "bf16"))
def test_gradients_beside_adapters(device, layout, score_on, targets, dtype):
    """Gradients of all inputs and adapters, against experts whose weights have the products added."""
    for size in ("16 rows", "128 rows", "tall") if device.type == "cuda" else ("16 rows",):
        how = {"layout": layout, "score_on": score_on, "bias": True, "dtype": dtype}
        check_gradients(size, targets, *make(size, device, "int8", **how))


def check_gradients(size: str, targets, inputs: dict, weights: dict, fixed: dict) -> None:
    dtype = inputs["x"].dtype
    lora = adapters(weights, dtype, targets=targets)
    names = [name for name in LoRA._fields[:-1] if getattr(lora, name) is not None]
    if not names:
        return  # w3 alone, of a packed weight
    inputs = inputs | {f"lora_{name}": getattr(lora, name) for name in names}
    dout = torch.randn_like(inputs["x"])

    def ours(**inputs):
        given = LoRA(**{name: inputs.pop(f"lora_{name}") for name in names}, scale=0.5)
        return fused_experts(**inputs, **weights, **fixed, lora=given)

    def merged(**inputs):
        given = {name: inputs.pop(f"lora_{name}") for name in names}
        plain = values(weights, inputs["x"].dtype)
        for i in {name[1] for name in names}:
            plain[f"w{i}"] = plain[f"w{i}"] + 0.5 * (given[f"b{i}"] @ given[f"a{i}"])
        return fused_experts(**inputs, **plain, **fixed)

    found = forward_backward(ours, inputs, dout)
    exact = forward_backward(merged, to_double(inputs), dout.double())
    if dtype == F64:
        for name, value in exact.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8, msg=f"{size} {name}")
    else:
        assert_as_good(found, forward_backward(merged, inputs, dout), exact)
