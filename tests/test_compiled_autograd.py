"""Compiled autograd: a backward pass that PyTorch traces and compiles, of a forward that ran eagerly."""

import pytest
import torch
from cases import BF16, F32
from test_routed import assert_same
from torch import nn
from torch._dynamo import compiled_autograd

from fused_moe import FusedMoE, add_lora, enable_fp8, widths


def with_main_grads(layer):
    for p in layer.experts.parameters():
        p.main_grad = torch.zeros_like(p, dtype=F32)
    return layer


def with_lora(layer):
    add_lora(layer, 4)
    for p in layer.parameters():
        if not p.any():
            nn.init.normal_(p, std=0.1)
    return layer


def apart(layer):
    layer.router.register_forward_hook(lambda *_: None)
    return layer


def in_fp8(layer):
    enable_fp8(layer)
    assert layer.experts.fp8 is not None
    return layer


SHARED = {"num_shared_experts": 1, "shared_expert_gate": True, "bias": True}
CASES = {  # name -> (D, F, dtype, settings, change)
    "one node": (16, 24, F32, {"gate_bias": True}, None),
    "several nodes": (16, 24, F32, {}, apart),
    "shared experts": (16, 24, F32, SHARED, None),
    "main_grads": (16, 24, F32, {}, with_main_grads),
    "lora": (16, 24, F32, {}, with_lora),
    "fp8": (128, 768, BF16, {}, in_fp8),
    "fp8, main_grads": (128, 768, BF16, {}, lambda layer: with_main_grads(in_fp8(layer))),
    "padded": (13, 11, BF16, SHARED, None),
    "padded F, main_grads": (16, 11, BF16, {}, with_main_grads),
    "padded, lora": (16, 11, BF16, {}, with_lora),
}


def make(case, device):
    D, F, dtype, settings, change = CASES[case]
    layer = FusedMoE(D, F, 4, 2, **settings, device=device, dtype=dtype)
    return layer if change is None else change(layer)


def step(layer, x, use=("out",)) -> dict:
    """{name: gradient} of x and parameters, {name.main: main_grad}."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    main_grads = {f"{n}.main": p.main_grad for n, p in layer.named_parameters() if hasattr(p, "main_grad")}
    for main_grad in main_grads.values():
        main_grad.zero_()
    out, losses = layer(x, return_losses=True)
    parts = {"out": out.square().mean(), "z": losses.z}
    sum(parts[name] for name in use).backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}
    return {n: t if t is None else t.clone() for n, t in {"x": x.grad, **grads, **main_grads}.items()}


def compiled_step(layer, x, use=("out",)) -> dict:
    """As `step`; the backward pass is one graph."""

    def compile_graph(graph):
        return torch.compile(graph, backend="aot_eager", fullgraph=True)

    torch._dynamo.reset()
    with compiled_autograd._enable(compile_graph):
        return step(layer, x, use)


@pytest.mark.parametrize("case", CASES)
def test_gradients(device, case, monkeypatch):
    """The bits of the uncompiled backward pass, and None where it gives None. Gradients of x are added in
    another order."""
    monkeypatch.setattr(widths, "ON_CPU", case.startswith("padded"))
    layer = make(case, device)
    x = torch.randn(24, layer.dim, device=device, dtype=CASES[case][2])
    expected, found = step(layer, x), compiled_step(layer, x)
    assert all(t.any() for t in expected.values() if t is not None)
    assert_same(found, expected)


def test_an_output_that_is_not_used(device):
    """Where the uncompiled pass leaves a gradient undefined, the compiled one has zeros."""
    layer = make("shared experts", device)
    x = torch.randn(24, layer.dim, device=device)
    expected, found = step(layer, x, ("z",)), compiled_step(layer, x, ("z",))
    assert any(grad is None for grad in expected.values()) and expected["x"].any()
    for name, grad in expected.items():
        assert not found[name].any() if grad is None else torch.equal(grad, found[name]), name


@pytest.mark.parametrize("case", [name for name in CASES if "main_grads" in name])
def test_main_grads_that_are_not_asked_for(device, case, monkeypatch):
    """Passes that ask for the gradients of x, of x and one weight, and of all, each compiled anew."""
    monkeypatch.setattr(widths, "ON_CPU", case.startswith("padded"))
    layer = make(case, device)
    x = torch.randn(24, layer.dim, device=device, dtype=CASES[case][2]).requires_grad_()
    weights = [layer.experts.w1, layer.experts.w2, layer.experts.w3]

    def main_grads_of(asked) -> list:
        for w in weights:
            w.main_grad.zero_()
        layer(x).square().mean().backward(inputs=[x, *asked])
        return [w.main_grad.clone() for w in weights]

    passes = ([], [weights[1]], [weights[0]], weights, [])
    expected = [main_grads_of(asked) for asked in passes]
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        found = [main_grads_of(asked) for asked in passes]
    for asked, ours, theirs in zip(passes, found, expected, strict=True):
        for w, a, b in zip(weights, ours, theirs, strict=True):
            assert torch.equal(a, b) and bool(a.any()) == any(w is other for other in asked)


@torch._dynamo.config.patch(compiled_autograd=True)
def test_setting_of_dynamo(device):
    """torch.compile of a training step whose layer stays eager."""
    layer = make("one node", device)
    x = torch.randn(24, layer.dim, device=device)
    expected = step(layer, x)
    torch._dynamo.reset()
    x_again = x.clone().requires_grad_()
    layer.zero_grad()
    out = torch._dynamo.disable(layer)(x_again)
    torch.compile(lambda loss: loss.backward(), backend="aot_eager")(out.square().mean())
    assert torch.equal(x_again.grad, expected["x"])
    assert torch.equal(layer.experts.w1.grad, expected["experts.w1"])
