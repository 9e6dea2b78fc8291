"""Weights that are multiplied 8 bits by 8 bits: their layouts on a GPU, and GPUs that multiply no FP8."""

from copy import deepcopy

import pytest
import torch
from cases import BF16, Case

import fused_moe
from fused_moe import fused_experts, quantize

pytestmark = pytest.mark.gpu
MODES = {"fp8_block": "fp8", "fp8": "fp8", "int8": "int8"}


def weights_of(inputs: dict, format: str, compute: str) -> dict:
    return {n: quantize(inputs[n], format, compute=compute) for n in ("w1", "w2", "w3")}


@pytest.mark.parametrize("format", MODES)
def test_layouts_on_hopper(device, sm90, format):
    """8 bits are as published, codes in tiles, auto is both; moved there, made there, and back."""
    weight = torch.randn(2, 128, 192)
    for compute in ("codes", MODES[format], "auto"):
        moved = quantize(weight, format, compute=compute).to(device)
        for w in (quantize(weight.to(device), format, compute=compute), moved):
            plain = deepcopy(w).to("cpu")
            assert w.is_tiled == (compute != MODES[format])
            assert (w.eight_bit_tensors is None) == (compute == "codes")
            assert (w.data_p is not None) == (compute == "auto")
            if compute != "codes":
                for found, expected in zip(w.eight_bit_tensors, plain.eight_bit_tensors, strict=True):
                    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
            w.to("cpu")
            assert not w.is_tiled and w.data_p is None
            assert torch.equal(w.data.view(torch.uint8), plain.data.view(torch.uint8))


@pytest.mark.parametrize("format", MODES)
@pytest.mark.parametrize("compute", ("asked", "auto"))
def test_the_portable_tier(device, tier, format, compute):
    """It multiplies int8 by int8. FP8 has the bits of codes there, and info() says so."""
    tier("portable")
    case = Case(tokens=100, dim=64, hidden=128, num_experts=4, dtype=BF16)
    inputs = case.inputs(device)
    compute = MODES[format] if compute == "asked" else compute
    weights = weights_of(inputs, format, compute)
    call = {"x": inputs["x"], "scores": inputs["scores"], "ids": case.ids(device)}
    found, codes = fused_experts(**call, **weights), fused_experts(**call, **weights, compute="codes")
    assert torch.equal(found, codes) == (format != "int8")
    assert (found - codes).norm() < 0.05 * codes.norm()
    modes = fused_moe.info()["compute"]
    assert modes["int8"] == "on"
    assert modes["fp8"].startswith("on for CPU tensors, as codes for CUDA tensors: ")


def test_rows_of_more_columns_than_a_gpu_quantises(device, sm90):
    """x has them in D, and by rows a has them in F; in blocks F may be any."""
    for format, dim, hidden, width in (("fp8", 64, 16400, "D and F"), ("fp8_block", 16400, 64, "D")):
        case = Case(tokens=3, dim=dim, hidden=hidden, num_experts=2, dtype=BF16)
        inputs = case.inputs(device)
        weights = weights_of(inputs, format, "fp8")
        call = {"x": inputs["x"], "scores": inputs["scores"], "ids": case.ids(device)}
        with pytest.raises(ValueError, match=f"{width} of at most 16384 with compute 'fp8', found"):
            fused_experts(**call, **weights)
