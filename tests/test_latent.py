"""Experts in a latent space: FusedMoE(latent_dim=), against a loop in plain PyTorch."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F32, F64, assert_as_good

from fused_moe import FusedMoE, add_lora, quantize, reference

D, L, H, E, K, T = 24, 16, 20, 8, 2, 60
SETTINGS = {
    "nemotron": {"score_func": "sigmoid", "route_norm": True, "gated": False, "activation": "relu"},
    "kimi": {"score_func": "sigmoid", "route_norm": True, "latent_norm": True},
}
ROUTINGS = pytest.mark.parametrize("settings", SETTINGS)


def new_layer(settings, device, dtype=None, latent_dim=L, **options):
    options = {"num_shared_experts": 1, "load_balance_coeff": 1e-3, **SETTINGS[settings], **options}
    return FusedMoE(D, H, E, K, latent_dim=latent_dim, **options, device=device, dtype=dtype)


def plain(layer, x, ids=None):
    """The layer of x (T, D), expert by expert; it routes in float32 or float64, as the layer does."""
    wide = torch.promote_types(x.dtype, F32)
    logits = F.linear(x.to(wide), layer.router.gate.weight.to(wide))
    scores, ids = reference.route(logits, K, bias=layer.expert_bias, **layer.router.routing, ids=ids)
    experts, latent = layer.experts, layer.latent_down(x)
    total = torch.zeros_like(latent, dtype=wide)
    for e in range(E):
        gate = latent @ experts.w1[e].T
        h = F.relu(gate) if experts.w3 is None else F.silu(gate) * (latent @ experts.w3[e].T)
        total = total + (scores * (ids == e)).sum(-1, keepdim=True) * (h @ experts.w2[e].T)
    total = total.to(x.dtype)
    if layer.latent_norm is not None:
        variance = total.to(wide).square().mean(-1, keepdim=True)
        total = (total.to(wide) * (variance + 1e-5).rsqrt() * layer.latent_norm.weight.to(wide)).to(x.dtype)
    out = layer.latent_up(total)
    if layer.shared_experts is not None:
        shared = layer.shared_experts
        hidden = F.relu(shared.w1(x)) if shared.w3 is None else F.silu(shared.w1(x)) * shared.w3(x)
        out = out + shared.w2(hidden)
    return out, ids


def run(layer, call, x, dout):
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    out = call(layer, leaf)
    out.backward(dout)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"out": out.detach(), "dx": leaf.grad, **grads}


@pytest.mark.quick
@ROUTINGS
@pytest.mark.parametrize("dtype", (F32, F64, BF16), ids=str)
@pytest.mark.parametrize("shared", (0, 1))
def test_is_the_loop(device, settings, dtype, shared):
    """Output and every gradient are as accurate as those of the loop in the same dtype."""
    layer = new_layer(settings, device, dtype, num_shared_experts=shared)
    if layer.latent_norm is not None:
        torch.nn.init.uniform_(layer.latent_norm.weight, 0.5, 1.5)
    x, dout = (torch.randn(T, D, device=device, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        _, ids = layer(x, return_ids=True)  # near ties, float64 may choose others
    ours = run(layer, lambda moe, leaf: moe(leaf, ids=ids), x, dout)
    by_loop = run(layer, lambda moe, leaf: plain(moe, leaf, ids)[0], x, dout)
    if dtype == F64:
        for name, value in by_loop.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-12)
        return
    exact = copy.deepcopy(layer).double()
    wide = run(exact, lambda moe, leaf: plain(moe, leaf, ids)[0], x.double(), dout.double())
    assert_as_good(ours, by_loop, wide)


@ROUTINGS
def test_calls_agree(device, settings):
    """The router's own choice, no gradients, any leading shape, the reference's layer, one that is compiled
    and one from a state dict: the same output, ids and counts."""
    layer, x = new_layer(settings, device), torch.randn(3, 20, D, device=device)
    expected, ids = layer(x, return_ids=True)
    loop, chosen = plain(layer, x.flatten(0, 1))
    torch.testing.assert_close(expected.flatten(0, 1), loop, rtol=1e-4, atol=1e-5)
    assert torch.equal(ids.flatten(0, 1), chosen.to(ids.dtype))
    assert torch.equal(layer.tokens_per_expert, ids.flatten().long().bincount(minlength=E))
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x.flatten(0, 1)), expected.flatten(0, 1))
        assert layer(x[:0]).shape == (0, 20, D)
    options = {"num_shared_experts": 1, "load_balance_coeff": 1e-3, "latent_dim": L, **SETTINGS[settings]}
    other = reference.FusedMoE(D, H, E, K, **options, device=device)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


@ROUTINGS
def test_padding(device, settings):
    """What padded rows hold reaches neither output nor gradient; their output is zero."""
    layer, x = new_layer(settings, device), torch.randn(T, D, device=device)
    dirty = torch.cat([x, torch.full((5, D), torch.nan, device=device)])
    num_tokens, dout = torch.tensor(T, device=device), torch.randn(T + 5, D, device=device)
    for norm_bias in (None, torch.nn.Linear(L, D, device=device)):
        if norm_bias is not None:
            layer.latent_up = norm_bias
        found = run(layer, lambda moe, leaf: moe(leaf, num_tokens=num_tokens), dirty, dout)
        expected = run(layer, lambda moe, leaf: moe(leaf), x, dout[:T])
        for name, value in expected.items():
            if name in ("out", "dx"):
                assert not found[name][T:].any()
                found[name] = found[name][:T]
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(layer(dirty, num_tokens=num_tokens), torch.cat([layer(x), x.new_zeros(5, D)]))


class MixingLinear(torch.nn.Linear):
    """Centres its result over the tokens."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("num_shared_experts", (0, 1))
def test_modules_that_mix_rows(device, num_shared_experts):
    """They get zeros in padded rows, with gradients and without."""
    layer = new_layer("kimi", device, num_shared_experts=num_shared_experts)
    x = torch.randn(T, D, device=device)
    layer.latent_down = MixingLinear(D, L, bias=False, device=device)
    num_tokens, padding = torch.tensor(T, device=device), x.new_zeros(5, D)
    for needs_grad in (False, True):
        with torch.set_grad_enabled(needs_grad):
            expected = layer(torch.cat([x, padding]), num_tokens=num_tokens)
            found = layer(torch.cat([x, torch.nan + padding]), num_tokens=num_tokens)
        assert torch.equal(found, expected) and found[:T].any() and not found[T:].any()


@ROUTINGS
def test_autocast(device, settings):
    """float32 parameters, bf16 output near the float32 one."""
    layer, x = new_layer(settings, device), torch.randn(T, D, device=device)
    expected, ids = layer(x, return_ids=True)
    with torch.autocast(device.type, dtype=BF16):
        out = layer(x, ids=ids)
    assert out.dtype == BF16
    assert (out - expected).norm() < 2e-2 * expected.norm()


@ROUTINGS
def test_losses_and_other_modules(device, settings):
    """The losses are of the router's logits; hooks on the linear layers run; adapters and quantised weights
    have the width L."""
    layer, x = new_layer(settings, device), torch.randn(T, D, device=device)
    expected, losses = layer(x, return_losses=True)
    losses.z.backward()
    assert layer.router.gate.weight.grad.any() and layer.latent_down.weight.grad is None
    seen = []
    handles = [
        m.register_forward_hook(lambda *_: seen.append(1)) for m in (layer.latent_down, layer.latent_up)
    ]
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    adapted = add_lora(copy.deepcopy(layer), 4)
    assert adapted.experts.lora.a1.size(-1) == L
    torch.testing.assert_close(adapted(x), expected, rtol=1e-4, atol=1e-5)
    quantize(layer, "int8")
    assert (layer(x) - expected).norm() < 0.1 * expected.norm()


def test_parameters(device):
    """Names and shapes; on meta and reset as made on the device; other dtypes; a layer pickled before."""
    options = {"latent_norm": True, "device": device}
    torch.manual_seed(3)
    layer = new_layer("kimi", dtype=BF16, **options)
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters() if n.startswith(("latent", "experts"))}
    assert shapes == {
        "experts.w1": (E, H, L),
        "experts.w2": (E, L, H),
        "experts.w3": (E, H, L),
        "latent_down.weight": (L, D),
        "latent_up.weight": (D, L),
        "latent_norm.weight": (L,),
    }
    assert all(p.dtype == BF16 and p.device.type == device.type for p in layer.parameters())
    empty = new_layer("kimi", "meta", BF16).to_empty(device=device)
    torch.manual_seed(3)
    empty.reset_parameters()
    for name, value in empty.state_dict().items():
        assert torch.equal(value, layer.state_dict()[name]), name
    other = FusedMoE(D, H, E, K, device=device)
    assert not any(name.startswith("latent") for name in other.state_dict())
    for name in ("latent_down", "latent_norm", "latent_up"):
        del other.__dict__[name]
    other = pickle.loads(pickle.dumps(other))
    assert other(torch.randn(3, D, device=device)).shape == (3, D)
    restored = pickle.loads(pickle.dumps(layer))
    x = torch.randn(T, D, device=device, dtype=BF16)
    assert torch.equal(restored(x), layer(x))


@pytest.mark.parametrize(
    "options, error, message",
    (
        ({"latent_dim": 2.0}, TypeError, "latent_dim to be an int, found float"),
        ({"latent_dim": True}, TypeError, "latent_dim to be an int, found bool"),
        ({"latent_dim": 0}, ValueError, "latent_dim >= 1, found 0"),
        ({"latent_dim": 4, "latent_norm": 1}, TypeError, "latent_norm to be True or False, found int"),
        ({"latent_norm": True}, ValueError, "latent_norm only with latent_dim, found latent_dim=None"),
    ),
    ids=str,
)
def test_wrong_arguments(cpu, options, error, message):
    with pytest.raises(error) as raised:
        FusedMoE(D, H, E, K, **options)
    assert str(raised.value).startswith(f"FusedMoE: expected {message}")
