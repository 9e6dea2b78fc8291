"""What FlopCounterMode counts, against the GEMMs of the operators' definitions."""

import subprocess
import sys

import pytest
import torch
from cases import BF16, F32, Case
from torch.utils.flop_counter import FlopCounterMode

from fused_moe import FusedMoE, add_lora, fused_experts, grouped_mlp, grouped_mm, quantize, widths


def flops_of(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.quick
@pytest.mark.parametrize("layout, gemms", (("separate", 3), ("halves", 3), ("ungated", 2)))
def test_experts(device, layout, gemms):
    """2 TKDF per GEMM forward, twice that backward: 6 and 12 TKDF of a gated layer."""
    case = Case(6, 10, 7, 4, 2, layout=layout)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    outs = []
    forward = flops_of(lambda: outs.append(fused_experts(**leaves, ids=ids, **case.options)))
    assert forward == gemms * 2 * 6 * 2 * 10 * 7
    assert flops_of(lambda: outs[0].sum().backward()) == 2 * forward


@pytest.mark.quick
@pytest.mark.parametrize("layout, gemms", (("separate", 3), ("halves", 3), ("ungated", 2)))
def test_fp8_training(device, layout, gemms):
    case = Case(6, 256, 128, 4, 2, BF16, layout=layout)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items() if n[0] != "b"}
    outs = []
    forward = flops_of(lambda: outs.append(fused_experts(**leaves, ids=ids, fp8=True, **case.options)))
    assert forward == gemms * 2 * 6 * 2 * 256 * 128
    assert flops_of(lambda: outs[0].sum().backward()) == 2 * forward


@pytest.mark.quick
def test_experts_without_gradients(device):
    case = Case(6, 10, 7, 4, 2)
    inputs, ids = case.inputs(device), case.ids(device)
    assert flops_of(lambda: fused_experts(**inputs, ids=ids)) == 6 * 6 * 2 * 10 * 7


@pytest.mark.quick
@pytest.mark.parametrize("compute", ("codes", "int8"))
def test_experts_of_8_bits(device, compute):
    case = Case(6, 16, 32, 4, 2, BF16)
    inputs, ids = case.inputs(device), case.ids(device)
    for name in ("w1", "w2", "w3"):
        inputs[name] = quantize(inputs[name], "int8", compute=compute)
    assert flops_of(lambda: fused_experts(**inputs, ids=ids)) == 6 * 6 * 2 * 16 * 32


@pytest.mark.quick
def test_what_is_not_needed_does_not_count(device):
    case = Case(6, 10, 7, 4, 2)
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["w2"].requires_grad_()
    out = fused_experts(**inputs, ids=ids)
    # g = dout w2, which the recomputed a's scores do not need, and dw2
    assert flops_of(lambda: out.sum().backward()) == 2 * 2 * 6 * 2 * 10 * 7


@pytest.mark.quick
def test_main_grads_count_alike(device):
    case = Case(6, 10, 7, 4, 2)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    sums = tuple(torch.zeros_like(inputs[w], dtype=F32) for w in ("w1", "w2", "w3"))
    out = fused_experts(**leaves, ids=ids, main_grads=sums)
    assert flops_of(lambda: out.sum().backward()) == 12 * 6 * 2 * 10 * 7


@pytest.mark.quick
def test_rows(device):
    """grouped_mlp and grouped_mm count the rows given."""
    case = Case(6, 10, 7, 4, 1)
    weights = {n: w for n, w in case.weights(device).items() if n in ("w1", "w2", "w3")}
    counts = torch.tensor([1, 0, 2, 3], device=device)
    x = torch.randn(6, 10, device=device, requires_grad=True)
    assert flops_of(lambda: grouped_mlp(x, **weights, counts=counts)) == 6 * 6 * 10 * 7
    offsets, w1 = counts.cumsum(0).int(), weights["w1"].requires_grad_()
    outs = []
    assert flops_of(lambda: outs.append(grouped_mm(x, w1, offsets))) == 2 * 6 * 10 * 7
    assert flops_of(lambda: outs[0].sum().backward()) == 2 * 2 * 6 * 10 * 7


@pytest.mark.quick
def test_layer(device):
    """With the gate, which is a linear layer."""
    layer = FusedMoE(10, 7, 4, 2, device=device)
    x = torch.randn(6, 10, device=device, requires_grad=True)
    assert flops_of(lambda: layer(x).sum().backward()) == 18 * 6 * 2 * 10 * 7 + 3 * 2 * 6 * 10 * 4


def layer_of_13(device):
    return FusedMoE(13, 11, 4, 2, num_shared_experts=1, device=device, dtype=BF16)


def with_main_grads(device):
    layer = layer_of_13(device)
    for p in layer.experts.parameters():
        p.main_grad = torch.zeros_like(p, dtype=F32)
    return layer


def with_lora(device):
    layer = FusedMoE(13, 11, 4, 2, device=device, dtype=BF16)
    add_lora(layer, 4)
    return layer


PADDED = {
    "D and F": layer_of_13,
    "F alone": lambda device: FusedMoE(16, 11, 4, 2, device=device, dtype=BF16),
    "main_grads": with_main_grads,
    "lora": with_lora,
}


@pytest.mark.quick
@pytest.mark.parametrize("case", PADDED)
def test_padding_does_not_count(device, case, monkeypatch):
    """Widths that are no multiple of 8, padded or not: with gradients, and without."""
    counts = []
    layer = PADDED[case](device)
    x = torch.randn(6, layer.dim, device=device, dtype=BF16, requires_grad=True)
    for is_padded in (True, False):
        monkeypatch.setattr(widths, "ON_CPU", is_padded)
        if device.type == "cpu":
            assert widths.are_padded(x, *layer.experts.weights) == is_padded
        outs = []
        forward = flops_of(lambda outs=outs: outs.append(layer(x)))
        backward = flops_of(lambda outs=outs: outs[0].sum().backward())
        with torch.no_grad():
            counts.append((forward, backward, flops_of(lambda: layer(x))))
    assert counts[0] == counts[1]
    if case == "F alone":
        experts, router = 6 * 6 * 2 * 16 * 11, 2 * 6 * 16 * 4
        assert counts[0] == (experts + router, 2 * (experts + router), experts + router)


@pytest.mark.parametrize("layout", ("separate", "halves", "interleaved"))
def test_padded_layouts(device, layout, monkeypatch):
    monkeypatch.setattr(widths, "ON_CPU", True)
    case = Case(6, 13, 11, 4, 2, BF16, layout=layout)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    outs = []
    forward = flops_of(lambda: outs.append(fused_experts(**leaves, ids=ids, **case.options)))
    assert forward == 6 * 6 * 2 * 13 * 11
    assert flops_of(lambda: outs[0].sum().backward()) == 2 * forward


@pytest.mark.parametrize(
    "order", ("fused_moe, torch.utils.flop_counter", "torch.utils.flop_counter, fused_moe")
)
def test_order_of_imports(cpu, order):
    """The counter knows the operators whichever is imported first, and is not imported by the package."""
    script = f"""
import sys, torch, {order.split(",")[0]}
assert "{order}".startswith("torch") or "torch.utils.flop_counter" not in sys.modules
import importlib.util
assert importlib.util.find_spec("torch.utils.flop_counter")  # to look is not to import
import {order.split(",")[1]}
from torch.utils.flop_counter import flop_registry
assert torch.ops.fused_moe.experts_up in flop_registry
importlib.reload(sys.modules["fused_moe.flops"])
importlib.reload(sys.modules["torch.utils.flop_counter"])
assert torch.ops.fused_moe.experts_up in sys.modules["torch.utils.flop_counter"].flop_registry
"""
    subprocess.run([sys.executable, "-c", script], check=True)
