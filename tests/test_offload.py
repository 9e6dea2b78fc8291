"""Modules whose parameters exist only while the module is called: hooks of the ZeRO-3 kind, and those of
accelerate that offload, around a layer with quantised weights and adapters."""

import copy

import pytest
import torch
from cases import quantize_options

from fused_moe import FusedMoE, add_lora, fused_experts, grouped_mlp, quantize, reference
from fused_moe.quantized.formats import FORMATS

T, D, F, E, K = 7, 128, 64, 4, 2
KINDS = (None, *FORMATS)
EVERY_KIND = pytest.mark.parametrize("format", KINDS, ids=lambda f: f or "float")
LORA = pytest.mark.parametrize("rank", (0, 4), ids=("plain", "lora"))


def new_layer(format, rank=0, device="cpu"):
    layer = FusedMoE(D, F, E, K, num_shared_experts=1, shared_expert_gate=True, bias=True, device=device)
    if format is not None:
        quantize(layer, format, **quantize_options(format))
    if rank:
        add_lora(layer, rank)
        for parameter in layer.experts.lora.parameters():
            torch.nn.init.normal_(parameter, 0, 0.1)
    return layer


def gather_around_calls(model):
    """As ZeRO-3 does: each module's own parameters have memory from before its call until after it, and again
    from before its backward. Returns what releases all of them."""
    releases = []
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        full = [p.detach().clone() for p in own]

        def gather(*_, own=own, full=full):
            for parameter, values in zip(own, full, strict=True):
                parameter.data = values.clone()

        def release(*_, own=own):
            for parameter in own:
                parameter.data = parameter.data.new_empty(0)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        module.register_full_backward_pre_hook(gather)
        releases.append(release)
    return lambda: [release() for release in releases]


def check_like_plain(model, plain, device):
    """Output and gradients have the bits of a layer without hooks, called in the same way, with and without
    gradients."""
    x = torch.randn(T, D, device=device)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    for _ in range(2):
        x, other = (x.detach().clone().requires_grad_() for _ in range(2))
        out, expected = model(x), plain(other)
        assert torch.equal(out, expected)
        out.square().mean().backward()
        expected.square().mean().backward()
        assert torch.equal(x.grad, other.grad)


def unjoined(layer):
    """The same layer, whose router and experts are called one after the other, as those with hooks are."""
    layer.router.gate.register_forward_hook(lambda *_: None)
    for linear in (*layer.shared_experts.children(), layer.shared_expert_gate):
        linear.register_forward_hook(lambda *_: None)
    layer.experts.register_forward_hook(lambda *_: None)
    return layer


@EVERY_KIND
@LORA
def test_gathered_for_the_call(device, format, rank):
    model = new_layer(format, rank, device)
    plain = unjoined(copy.deepcopy(model))
    release = gather_around_calls(model)
    release()
    assert all(p.numel() == 0 for p in model.parameters())
    check_like_plain(model, plain, device)
    trained = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert trained.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(dict(model.named_parameters())[n].grad, grad) for n, grad in trained.items())
    release()


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_what_calling_a_weight_returns_is_read(device, format):
    """By every function that takes it, and `dequantize`; a hook may replace the tensors."""
    w1, other = (
        quantize(torch.randn(E, F, D, device=device), format, **quantize_options(format)) for _ in range(2)
    )
    w2, calls = torch.randn(E, D, F, device=device), []

    def replace(module, args, kwargs, tensors):
        calls.append(kwargs)
        return other(as_stored=True)

    x, scores = torch.randn(T, D, device=device), torch.rand(T, K, device=device)
    ids, counts = torch.randint(E, (T, K), device=device), torch.tensor([3, 0, 2, 1], device=device)
    functions = (
        lambda w: fused_experts(x, w, w2, None, scores, ids),
        lambda w: grouped_mlp(x, w, w2, None, counts),
        lambda w: w.dequantize(),
        reference.dequantize,
    )
    expected = [function(other) for function in functions]
    w1.register_forward_hook(replace, with_kwargs=True)
    for function, values in zip(functions, expected, strict=True):
        assert torch.equal(function(w1), values)
    assert calls == [{"as_stored": True}] * len(functions)


# --- accelerate -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accelerate():
    return pytest.importorskip("accelerate", reason="needs accelerate, as .ci/run's transformers step has it")


@EVERY_KIND
@LORA
@pytest.mark.parametrize("place", ("cpu", "disk"))
def test_accelerate_offloads(accelerate, device, tmp_path, format, rank, place):
    """Parameters are on meta before and after the call."""
    layer = new_layer(format, rank)
    plain = unjoined(copy.deepcopy(layer).to(device))
    if format is not None and device.type == "cuda":  # loaded as published, and not arranged for each call
        for name in ("w1", "w2", "w3"):
            setattr(plain.experts, name, copy.deepcopy(getattr(layer.experts, name)))
            for parameter in getattr(plain.experts, name).parameters():
                parameter.data = parameter.data.to(device)
    model = torch.nn.Sequential(layer)
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=device)
    assert all(p.is_meta for p in model.parameters())
    check_like_plain(model, plain, device)
    assert all(p.is_meta for p in model.parameters())
    accelerate.hooks.remove_hook_from_submodules(model)
    with torch.no_grad():
        x = torch.randn(T, D)
        assert torch.equal(layer(x), plain.cpu()(x))
