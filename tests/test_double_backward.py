"""Second derivatives: right, or an error; never missing where another path has some."""

import pytest
import torch
from cases import BF16, F32
from ranks import started
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fused_moe import FusedMoE, add_lora, enable_fp8, fused_experts, grouped_mlp, quantize, routed
from fused_moe.distributed import ExpertParallel

RANKS, T, D, E, K = 2, 12, 16, 4, 2
NOT_SUPPORTED = "cannot be differentiated: double backward is not supported"


@pytest.fixture(scope="module")
def workers(cpu, tmp_path_factory):
    yield from started(RANKS, cpu, tmp_path_factory)


def found_without_error(fn, leaves: dict) -> dict:
    """{(a, b): the derivative by b of the gradient of a}, where autograd raises no error. The loss is linear
    in fn(): otherwise the gradient of the output would depend on every input."""
    found = {}
    for a, leaf in leaves.items():
        (grad,) = torch.autograd.grad((fn() / 3).sum(), leaf, create_graph=True)
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        for b, other in leaves.items():
            try:
                found[a, b] = torch.autograd.grad(grad.sum(), other, retain_graph=True, allow_unused=True)[0]
            except RuntimeError as error:
                assert NOT_SUPPORTED in str(error), (a, b, error)
    return found


def with_values(layer):
    for p in layer.parameters():
        if not p.any():
            nn.init.normal_(p)
    return layer


def with_lora(layer):
    add_lora(layer, 2)
    return layer


def in_fp8(layer):
    enable_fp8(layer)
    assert layer.experts.fp8 is not None
    return layer


BIASES = {"bias": True, "gate_bias": True}
LAYERS = {  # name -> (D, F, dtype, settings, change)
    "one node": (D, 8, F32, BIASES, None),
    "shared experts": (D, 8, F32, {"num_shared_experts": 1, "shared_expert_gate": True}, None),
    "lora": (D, 8, F32, {}, with_lora),
    "fp8": (128, 768, BF16, {}, in_fp8),
}


def make(name, device):
    D, F, dtype, settings, change = LAYERS[name]
    layer = with_values(FusedMoE(D, F, E, K, **settings, device=device, dtype=dtype))
    x = torch.randn(T, D, device=device, dtype=dtype, requires_grad=True)
    return with_values(layer if change is None else change(layer)), x


def are_independent(a, b) -> bool:
    """Whether the two parameters are factors of different summands."""
    return a.startswith("shared") and b.startswith(("experts", "router"))


@pytest.mark.parametrize("is_large", (False, True), ids=("small", "large"))
@pytest.mark.parametrize("name", LAYERS)
def test_layer(device, name, is_large, monkeypatch):
    monkeypatch.setattr(routed, "MOST_BYTES", -1 if is_large else routed.MOST_BYTES)
    layer, x = make(name, device)
    leaves = {"x": x, **{n: p for n, p in layer.named_parameters() if p.requires_grad}}
    found = found_without_error(lambda: layer(x), leaves)
    assert all(are_independent(a, b) and grad is None for (a, b), grad in found.items()), found.keys()


def test_nodes_of_a_selective_checkpoint(device, monkeypatch):
    monkeypatch.setattr(routed, "has_policy", lambda: True)
    layer, x = make("one node", device)
    assert not found_without_error(lambda: layer(x), {"x": x, **dict(layer.named_parameters())})


@pytest.mark.parametrize("frozen", ("w1", "w2", "w3", "x"))
@pytest.mark.parametrize("name", LAYERS)
def test_experts_with_something_frozen(device, name, frozen):
    layer, x = make(name, device)
    scores, ids = layer.router(x.detach(), None)[:2]
    leaves = {"x": x, "scores": scores.detach().requires_grad_(), **dict(layer.experts.named_parameters())}
    leaves[frozen].requires_grad_(False)
    trained = {n: t for n, t in leaves.items() if t.requires_grad}
    assert not found_without_error(lambda: layer.experts(x, leaves["scores"], ids)[0], trained)


@pytest.mark.parametrize("fp8", (False, True))
def test_grouped_mlp(device, fp8):
    shapes = {"x_rows": (T, 128), "w1": (E, 128, 128), "w2": (E, 128, 128), "w3": (E, 128, 128)}
    leaves = {n: torch.randn(s, device=device, dtype=BF16, requires_grad=True) for n, s in shapes.items()}
    counts = torch.full((E,), T // E, device=device, dtype=torch.int32)
    assert not found_without_error(lambda: grouped_mlp(**leaves, counts=counts, fp8=fp8), leaves)


def test_quantised_weights_with_shared(device):
    w1, w2, w3 = (quantize(torch.randn(E, D, D, device=device, dtype=BF16), "int8") for _ in range(3))
    ids = torch.randint(E, (T, K), device=device)
    leaves = {
        "x": torch.randn(T, D, device=device, dtype=BF16, requires_grad=True),
        "scores": torch.rand(T, K, device=device, requires_grad=True),
    }
    assert not found_without_error(lambda: fused_experts(w1=w1, w2=w2, w3=w3, ids=ids, **leaves), leaves)


MODES = {
    "slot": {},
    "rank": {"combine": "rank"},
    "slot, static": {"static": True},
    "rank, static": {"combine": "rank", "static": True},
    "slot, symmetric": {"symmetric": True, "max_tokens": T},
    "rank, symmetric": {"combine": "rank", "symmetric": True, "max_tokens": T},
}


def parallel_experts(rank, device, options):
    torch.manual_seed(0)
    layer = FusedMoE(D, 8, E, K, device=device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    x = torch.randn(T, D, device=device, requires_grad=True)
    scores, ids = layer.router(x.detach(), None)[:2]
    leaves = {"x": x, "scores": scores.detach().requires_grad_(), **dict(layer.experts.named_parameters())}
    return found_without_error(lambda: layer.experts(x, leaves["scores"], ids)[0], leaves)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_parallel_experts(workers, cpu, options):
    assert not any(workers(parallel_experts, options))
