"""Shared experts as operands of the combine: fused_experts by every route, and the layer in all its forms."""

import copy
from functools import partial

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    Calls,
    Case,
    assert_same_bits,
    check_against_reference,
    forward_backward,
    score_dtype,
)
from test_module import pair
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import FusedMoE, LoRA, fused_experts, quantize

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
GATED = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gate"))
SCORED = pytest.mark.parametrize("score_on", ("output", "input"))


def add_shared(case: Case, device, gated=True) -> dict:
    shared = torch.randn(case.tokens, case.dim, dtype=F64).to(device, case.dtype)
    gate = torch.randn(case.tokens, 1).to(device, score_dtype(case.dtype)) if gated else None
    return {"shared": shared, "shared_gate": gate}


# --- fused_experts --------------------------------------------------------------------------------------


@pytest.mark.quick(one_in=5)
@DTYPES
@GATED
@SCORED
@pytest.mark.parametrize("routing", ("random", "one", "sentinels", "none"))
def test_experts(device, dtype, gated, score_on, routing):
    """Output and all gradients against the reference."""
    case = Case(bias=True, dtype=dtype, routing=routing, score_on=score_on)
    inputs = {**case.inputs(device), **add_shared(case, device, gated)}
    fixed = {"ids": case.ids(device), "score_on": score_on, **case.options}
    check_against_reference("fused_experts", inputs, case.dout(device), **fixed)


@GATED
@SCORED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", (1, 33))
def test_routes(device, gated, score_on, layout, tokens):
    """One operator, into memory that is given, with a plan and with gradients: the same bits."""
    case = Case(tokens, layout=layout, dtype=BF16, routing="sentinels", score_on=score_on)
    inputs, ids = {**case.inputs(device), **add_shared(case, device, gated)}, case.ids(device)
    call = partial(fused_experts, ids=ids, score_on=score_on, **case.options)
    with Calls() as calls:
        out = call(**inputs)
    assert calls.ours() == ["experts"]
    assert torch.equal(call(**inputs, out=torch.full_like(out, torch.nan)), out)
    assert torch.equal(call(**inputs, plan=fused_moe.route_plan(ids, case.num_experts)), out)
    assert torch.equal(forward_backward(call, inputs, case.dout(device))["out"], out)


@GATED
@pytest.mark.parametrize("format", ("int8", "mxfp4"))
def test_quantised_experts(device, gated, format):
    """Without gradients and with them: rounded once, after the sum."""
    case = Case(33, 64, 32, 5, 2, BF16)
    t = case.inputs(device)
    weights = {n: quantize(t[n], format) for n in ("w1", "w2", "w3")}
    call = partial(fused_experts, t["x"], **weights, scores=t["scores"], ids=case.ids(device))
    added = add_shared(case, device, gated)
    plain = {n: w.dequantize(BF16) for n, w in weights.items()}
    expected = fused_experts(t["x"], **plain, scores=t["scores"], ids=case.ids(device), **added)
    assert torch.equal(call(**added), expected)
    found = forward_backward(call, added, case.dout(device))  # a composition, which rounds h
    torch.testing.assert_close(found["out"], expected, rtol=0.05, atol=0.05)


@GATED
def test_lora(device, gated):
    case = Case(33, 16, 12, 5, 2)
    E, D, F = 5, 16, 12
    shapes = ((E, 4, D), (E, F, 4), (E, 4, F), (E, D, 4), (E, 4, D), (E, F, 4))
    lora = LoRA(*(torch.randn(s).to(device) for s in shapes), scale=0.5)
    inputs = {**case.inputs(device), **add_shared(case, device, gated)}
    fixed = {"ids": case.ids(device), "lora": lora}
    check_against_reference("fused_experts", inputs, case.dout(device), **fixed)


def test_only_the_shared_experts_train(device):
    """Everything else is frozen: no gradient of the experts is computed, and h is not kept."""
    case = Case(bias=True)
    inputs, ids, added = case.inputs(device), case.ids(device), add_shared(case, device)
    dout = case.dout(device)
    together = forward_backward(fused_experts, {**inputs, **added}, dout, ids=ids)
    with Calls() as calls:
        found = forward_backward(partial(fused_experts, **inputs), added, dout, ids=ids)
    assert_same_bits(found, {n: together[n] for n in ("out", "dshared", "dshared_gate")})
    assert not calls.of("experts_down_backward") and not calls.of("experts_up_backward")
    [(_, (h, _))] = calls.of("experts_up")
    assert not h.numel()


def test_an_ungated_sum_keeps_nothing(device):
    """The gradient of shared is dout itself, by no operator."""
    case = Case()
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    found = forward_backward(fused_experts, {**inputs, **add_shared(case, device, False)}, dout, ids=ids)
    assert torch.equal(found["dshared"], dout)
    shared, kept = torch.randn_like(dout).requires_grad_(), []
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        fused_experts(**leaves, ids=ids, shared=shared)
    assert all(t is not shared for t in kept) and any(t is leaves["w2"] for t in kept)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("gradients", (False, True))
def test_autocast(device, dtype, gradients):
    """shared is cast as the weights are, the gate's logits are not."""
    case = Case()
    inputs, ids, added = case.inputs(device), case.ids(device), add_shared(case, device)
    halved = {n: t if t is None or n == "scores" else t.to(dtype) for n, t in inputs.items()}
    expected = fused_experts(**halved, ids=ids, **added | {"shared": added["shared"].to(dtype)})
    added["shared"].requires_grad_(gradients)
    with torch.autocast(device.type, dtype):
        found = fused_experts(**inputs, ids=ids, **added)
        rows, plan = fused_moe.permute(halved["x"], ids, 5)
        summed = fused_moe.unpermute(rows, plan, **added)
    assert found.dtype == summed.dtype == dtype and torch.equal(found, expected)
    if gradients:
        found.backward(torch.ones_like(found))
        assert added["shared"].grad.dtype == F32


# --- the layer ------------------------------------------------------------------------------------------

LAYERS = {
    "plain": {"num_shared_experts": 1},
    "gate": {"num_shared_experts": 2, "shared_expert_gate": True},
    "biases": {"num_shared_experts": 2, "shared_expert_gate": True, "bias": True, "score_func": "sigmoid"},
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def draw(name, device, dtype=BF16, tokens=33):
    layer = FusedMoE(24, 20, 8, 2, **LAYERS[name], device=device, dtype=dtype)
    return layer, torch.randn(tokens, 24, device=device).to(dtype)


@DTYPES
@EVERY_LAYER
@pytest.mark.parametrize("tokens", (0, 1, 33))
def test_layer(device, dtype, name, tokens):
    """One rounding of the sum: the same as fused_experts of the parts; near the loop in float64."""
    layer, x = draw(name, device, dtype, tokens)
    shared, experts = layer.shared_experts, layer.experts
    dense = shared(x)
    gate = layer.shared_expert_gate
    logits = None if gate is None else fused_moe.router_logits(x, gate.weight)
    scores, ids, _ = layer.router(x, None)
    expected, _ = experts(x, scores, ids, dense, logits)
    assert torch.equal(layer(x), expected)
    wide, loop = pair(device, F64, **LAYERS[name])
    x = torch.randn(tokens, 24, device=device, dtype=F64)
    torch.testing.assert_close(wide(x), loop(x))


# Scores have x's dtype, or a wider one. In 16 bits it shows where inductor fuses: results are rounded less.
@pytest.mark.parametrize("dtype, backend", ((F32, "aot_eager"), (BF16, "inductor")), ids=("f32", "bf16"))
@EVERY_LAYER
def test_eager_and_compiled(device, dtype, backend, name):
    """Bit for bit, in training and in inference, with x that needs a gradient and with one that does not."""
    layer, x = draw(name, device, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    out = layer(x)
    leaf = x.clone().requires_grad_()
    found = {"x": compiled(leaf), "parameters": compiled(x), "eager, x": layer(leaf)}
    with torch.no_grad():
        found |= {"nothing": compiled(x), "eager, nothing": layer(x)}
    found["checkpointed"] = checkpoint(layer, leaf, use_reentrant=False)
    for what, value in found.items():
        assert torch.equal(value, out), what
    grads = [torch.autograd.grad(o.sum(), layer.parameters()) for o in (out, compiled(x))]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


@EVERY_LAYER
def test_no_pass_of_its_own(device, name):
    """No operator of PyTorch's gives a matrix of x's size, forward or backward, but the sum of dx."""
    layer, x = draw(name, device)
    leaf = x.requires_grad_()
    dout = torch.randn_like(x)
    with Calls() as calls:
        torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], dout)
    sizes = [(n, r) for n, _, r in calls.calls if torch.is_tensor(r) and r.shape == x.shape]
    names = [n for n, _ in sizes if not n.startswith("fused_moe::")]
    assert names == ["aten::add.Tensor"] * (1 + (layer.shared_expert_gate is not None)), names


HOOKS = {
    "experts": lambda layer: layer.experts.register_forward_hook(lambda *_: None),
    "shared": lambda layer: layer.shared_experts.register_forward_hook(lambda *_: None),
    "linear": lambda layer: layer.shared_experts.w2.register_forward_hook(lambda *_: None),
}


@EVERY_LAYER
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("gradients", (False, True))
def test_hooks(device, name, hook, gradients):
    """What a hook sees is a module's own output, so the shared experts' is added after."""
    layer, x = draw(name, device, F32)
    plain, seen = copy.deepcopy(layer), []
    HOOKS[hook](layer)
    layer.experts.register_forward_hook(lambda module, args, out: seen.append((len(args), out[0])))
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(layer(x), plain(x))
        scores, ids, _ = plain.router(x, None)
        [(count, out)] = seen
        assert count == 3 and torch.equal(out, plain.experts(x, scores, ids)[0])


def test_other_experts(device):
    """A module in the experts' place is called with x, scores and ids."""

    class Doubling(nn.Module):
        def forward(self, x, scores, ids):
            return 2 * x, torch.zeros(8, device=x.device)

    layer, x = draw("gate", device, F32)
    layer.experts = Doubling()
    expected = 2 * x + layer.shared_expert_gate(x).sigmoid() * layer.shared_experts(x)
    torch.testing.assert_close(layer(x), expected)


@DTYPES
@EVERY_LAYER
def test_padding(device, dtype, name):
    """The real tokens alone, and zeros; the same bits compiled, in one graph, and without gradients."""
    layer, x = draw(name, device, dtype)
    dout = torch.randn_like(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def step(run, x, dout, **options):
        leaf = x.clone().requires_grad_()
        out = run(leaf, **options)
        leaves = {"dx": leaf, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(out, [*leaves.values()], dout)
        return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}

    for count in (0, 7, 33):
        num_tokens = torch.tensor(count, device=device)
        dirty, dirty_dout = (t.clone() for t in (x, dout))
        dirty[count:] = dirty_dout[count:] = torch.nan
        expected, outputs = step(layer, x[:count], dout[:count]), []
        for run in (layer, compiled):
            found = step(run, dirty, dirty_dout, num_tokens=num_tokens)
            for key, value in found.items():
                if key in ("out", "dx"):
                    assert not value[count:].count_nonzero(), key
                    value = value[:count]
                torch.testing.assert_close(value, expected[key])
            with torch.no_grad():
                outputs += [found["out"], run(dirty, num_tokens=num_tokens)]
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0])
