"""Router and experts as one autograd node, and without gradients as one operator: the results of several, and
when they stay apart."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from cases import BF16, F16, F32, F64, Calls
from test_module import SETTINGS
from torch import nn
from torch.autograd import gradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fused_moe import FusedMoE, routed

PLAIN = {"gate_bias": True, "bias": True}


def make(device, dtype=F64, tokens=20, sizes=(24, 20, 8, 2), **settings):
    """A layer, and x that requires a gradient. sizes: D, F, E, K."""
    layer = FusedMoE(*sizes, **settings, device=device, dtype=dtype)
    if layer.router.expert_scale is not None:
        nn.init.normal_(layer.router.expert_scale)
    return layer, torch.randn(tokens, sizes[0], device=device, dtype=dtype, requires_grad=True)


def apart(layer):
    """A copy of the layer whose router and experts stay two nodes."""
    other = copy.deepcopy(layer)
    other.router.register_forward_hook(lambda *_: None)
    return other


def nodes(out) -> set[str]:
    """The names of all autograd nodes behind a tensor."""
    seen, stack = set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


def is_joined(out) -> bool:
    return "_RoutedBackward" in nodes(out)


def with_policy(monkeypatch) -> None:
    """From here on router and up side are one node, and the down side is another."""
    monkeypatch.setattr(routed, "has_policy", lambda: True)


def is_one_operator(layer, x) -> bool:
    """Whether router and routed experts are one operator without gradients."""
    with torch.no_grad(), Calls() as calls:
        layer(x)
    return calls.kinds() == ["routed"]


def loss_of(layer, x, use=("out", "balance", "z")):
    out, losses = layer(x, return_losses=True)
    parts = {"out": out.square().mean(), "balance": losses.load_balancing, "z": losses.z}
    return sum(parts[name] for name in use)


def gradients(layer, x, use=("out", "balance", "z")) -> dict:
    """{"x" or a parameter's name: its gradient}, None where it requires none."""
    leaves = {"x": x, **dict(layer.named_parameters())}
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(loss_of(layer, x, use), wanted.values(), allow_unused=True)
    return dict(zip(wanted, grads, strict=True))


def assert_same(found: dict, expected: dict) -> None:
    """The same bits, but of dx beside shared experts: autograd adds three gradients in another order."""
    assert found.keys() == expected.keys()
    shared = any(name.startswith("shared") for name in found)
    for name, grad in found.items():
        if grad is None or name != "x" or not shared:
            assert grad is expected[name] or torch.equal(grad, expected[name]), name
        else:
            unit = torch.finfo(grad.dtype).eps
            atol = unit * expected[name].double().norm() / max(grad.numel(), 1) ** 0.5
            torch.testing.assert_close(grad, expected[name], rtol=2 * unit, atol=4 * float(atol))


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (F64, F32, BF16), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_of_nodes_apart(device, settings, dtype):
    layer, x = make(device, dtype, **SETTINGS[settings])
    other = apart(layer)
    assert is_joined(layer(x)) and not is_joined(other(x))
    assert torch.equal(layer(x), other(x))
    assert_same(gradients(layer, x), gradients(other, x))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (F64, F32, BF16, F16), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
def test_one_node_or_two(device, settings, dtype, monkeypatch):
    """The bits of the nodes that a selective checkpoint gets, with a count, given ids and losses, too."""
    layer, x = make(device, dtype, **SETTINGS[settings])
    count, given = torch.tensor(13, device=device), torch.randint(8, (20, 2), device=device)
    calls = ({}, {"num_tokens": count}, {"ids": given}, {"ids": given.int(), "num_tokens": count})

    def results():
        found = []
        for options in calls:
            layer.tokens_per_expert.zero_()
            out, losses, ids = layer(x, return_losses=True, return_ids=True, **options)
            found += [out, ids, layer.tokens_per_expert.clone()]
            main, leaves = out.square().mean(), (x, *layer.parameters())
            for loss in (main, main + losses.load_balancing + losses.z):
                found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        return found, nodes(out)

    with Calls() as called:
        one, of_one = results()
    assert len(called.of("experts_backward")) == len(calls)  # without losses
    monkeypatch.setattr(routed, "MOST_BYTES", -1)
    with Calls() as called:
        sides, of_sides = results()
    assert not called.of("experts_backward")
    with_policy(monkeypatch)
    two, of_two = results()
    assert "_RoutedBackward" in of_one & of_sides and "_RoutedUpBackward" in of_two
    for a, b, c in zip(one, sides, two, strict=True):
        assert a is b is c is None or (torch.equal(a, b) and torch.equal(a, c))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (F64, F32, BF16), ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_without_gradients(device, settings, dtype):
    """Padded, with given ids and counted, too."""
    layer, x = make(device, dtype, **SETTINGS[settings])
    other = apart(layer)
    assert is_one_operator(layer, x) and not is_one_operator(other, x)
    count, given = torch.tensor(13, device=device), torch.randint(8, (20, 2), device=device)
    for options in ({}, {"num_tokens": count}, {"ids": given}, {"ids": given.int(), "num_tokens": count}):
        layer.tokens_per_expert.zero_(), other.tokens_per_expert.zero_()
        found, expected = (m(x, return_losses=True, return_ids=True, **options) for m in (layer, other))
        for one, two in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert torch.equal(one, two)
        assert torch.equal(layer.tokens_per_expert, other.tokens_per_expert)
    with torch.enable_grad():
        assert torch.equal(layer(x), layer(x.detach().requires_grad_()))


@pytest.mark.parametrize("use", (("out",), ("z",), ("balance", "z"), ("out", "balance")), ids=str)
def test_any_of_the_outputs(device, use):
    """Without the output the experts have no gradient; without a loss logits have none but the scores'."""
    layer, x = make(device, **PLAIN)
    assert_same(gradients(layer, x, use), gradients(apart(layer), x, use))


@pytest.mark.parametrize("tokens", (0, 1, 3))
def test_few_tokens(device, tokens):
    layer, x = make(device, tokens=tokens, **PLAIN)
    assert is_joined(layer(x))
    assert_same(gradients(layer, x), gradients(apart(layer), x))


@pytest.mark.parametrize("frozen", ("router", "router.gate.bias", "experts", "experts.w3", "experts.b1", ""))
def test_frozen_parameters(device, frozen):
    """They get no gradient, and their GEMMs are not computed."""
    layer, x = make(device, **PLAIN)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    with Calls() as calls:
        found = gradients(layer, x)
    assert is_joined(layer(x))
    assert_same(found, gradients(apart(layer), x))
    names = [name for name, _, _ in calls.calls]
    assert names.count("aten::mm") == ("router.gate.weight" in found)
    assert "fused_moe::router_dgrad" not in names  # experts_up_backward adds it


@pytest.mark.parametrize("asked", ("experts.w1", "experts.w2", "router.gate.weight"))
@pytest.mark.parametrize("gated", (True, False))
def test_main_grads_of_what_is_asked_for(device, gated, asked):
    """backward(inputs=[w]), by which pipelines split backward, adds to w's main_grad alone."""
    layer, x = make(device, F32, gated=gated, activation="silu" if gated else "relu2")
    expected = gradients(layer, x, ("out",))[asked]
    weights = {n: p for n, p in layer.named_parameters() if n.startswith("experts.")}
    for p in weights.values():
        p.main_grad = torch.zeros_like(p)
    out = layer(x)
    assert is_joined(out)
    out.square().mean().backward(inputs=[layer.get_parameter(asked)])
    assert {n for n, p in weights.items() if p.main_grad.any()} == {asked} & weights.keys()
    found = weights[asked].main_grad if asked in weights else layer.get_parameter(asked).grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("keep", (False, True))
def test_h_is_freed_within_backward(device, keep, monkeypatch):
    """h, the largest saved tensor, is freed once the down side has read it, unless the graph is kept."""
    layer, x = make(device, F32, tokens=64)
    monkeypatch.setattr(routed, "MOST_BYTES", 4 * 128 * 40 - 1)
    out = layer(x)
    with WatchH(width=40) as watch:
        out.backward(torch.ones_like(out), retain_graph=keep)
    assert watch.alive == [True, keep]


class WatchH(TorchDispatchMode):
    """Whether h (R, width), which the down side's backward reads, is in memory before each of both."""

    def __init__(self, width):
        super().__init__()
        self.width, self.alive = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "fused_moe::experts_down_backward":
            assert args[1].size(1) == self.width
            self.h = StorageWeakRef(args[1].untyped_storage())
        if func.name() in ("fused_moe::experts_down_backward", "fused_moe::experts_up_backward"):
            self.alive.append(not self.h.expired())
        return func(*args, **(kwargs or {}))


def test_backward_twice(device):
    layer, x = make(device, F32, **PLAIN)
    out = layer(x)
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(out.sum(), x)


def test_gradcheck(device):
    layer, x = make(device, tokens=5, sizes=(6, 5, 4, 2), **PLAIN)  # each number is two calls
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        assert is_joined(layer(x))
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(run, (x, *values))


def test_the_sum_has_no_pass_of_its_own(device):
    """Backward writes dx, with the router's part, and no other matrix of its size."""
    layer, x = make(device, F32)
    out = layer(x)
    dout = torch.randn_like(out)
    with Calls() as calls:
        (dx,) = torch.autograd.grad(out, x, dout)
    makers = [name for name, _, results in calls.calls if any(r is dx for r in as_tuple(results))]
    same_size = [
        name for name, _, results in calls.calls if any(r.shape == x.shape for r in as_tuple(results))
    ]
    assert makers == ["fused_moe::experts_backward"]
    assert same_size == makers


def as_tuple(results) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


# --- derivatives of derivatives, batches ----------------------------------------------------------------


def test_recorded_backward(device):
    """The same first derivatives; a second one through the experts raises, one of the z-loss is right."""
    layer, x = make(device, **PLAIN)
    (dx,) = torch.autograd.grad(loss_of(layer, x), x, create_graph=True)
    (expected,) = torch.autograd.grad(loss_of(layer, x), x)
    torch.testing.assert_close(dx, expected)
    with pytest.raises(RuntimeError, match="cannot be differentiated: double backward is not supported"):
        dx.sum().backward()
    second = []
    for module in (layer, apart(layer)):
        (dx,) = torch.autograd.grad(loss_of(module, x, ("z",)), x, create_graph=True)
        second += torch.autograd.grad(dx.square().sum(), (x, module.router.gate.weight))
    assert torch.equal(second[0], second[2]) and torch.equal(second[1], second[3])


def test_batched_gradients(device):
    layer, x = make(device)
    out = layer(x)
    douts = torch.randn(3, *out.shape, device=device, dtype=F64)

    def gradient(dout):
        return torch.autograd.grad(out, x, dout, retain_graph=True)[0]

    torch.testing.assert_close(torch.func.vmap(gradient)(douts), torch.stack([*map(gradient, douts)]))


def test_backward_under_autocast(device):
    """The experts' part of dx is not rounded to autocast's dtype."""
    layer, x = make(device, F32)
    with torch.no_grad():
        layer.router.gate.weight.zero_()
    out = layer(x)
    (expected,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    with torch.autocast(device.type, BF16):
        (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, expected)


# --- two nodes ------------------------------------------------------------------------------------------


class OtherLinear(nn.Linear):
    pass


class OtherTensor(torch.Tensor):
    pass


class PassFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def same_forward(module):
    module.forward = module.forward


def other_gate(layer):
    gate = OtherLinear(24, 8, bias=False, device=layer.experts.w1.device, dtype=F64)
    layer.router.gate = gate.requires_grad_()


def other_weight(layer):
    gate = layer.router.gate
    del gate.weight
    gate.weight = torch.randn(8, 24, dtype=F64, device=layer.experts.w1.device).as_subclass(OtherTensor)


def normed(module, name="weight"):
    parametrize.register_parametrization(module, name, nn.Identity())


HOOKS = {
    "forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "another forward": same_forward,
    "compiled": lambda module: module.compile(backend="eager"),
}
CHANGES = {
    **{
        f"{part}: {name}": lambda layer, part=part, change=change: change(layer.get_submodule(part))
        for part in ("router", "router.gate", "experts")
        for name, change in HOOKS.items()
    },
    "another gate": other_gate,
    "a parametrized gate": lambda layer: normed(layer.router.gate),
    "parametrized experts": lambda layer: normed(layer.experts, "w1"),
    "a subclass of Tensor": other_weight,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_modules(device, change):
    layer, x = make(device)
    assert is_joined(layer(x)) and is_one_operator(layer, x)
    CHANGES[change](layer)
    assert not is_joined(layer(x)) and not is_one_operator(layer, x)


def test_hooks_see_and_change_what_they_did(device):
    """A hook of the router gets its results, and what it returns is used."""
    layer, x = make(device)
    seen = []

    def hook(module, args, results):
        seen.append(results)
        scores, ids, logits = results
        return 2 * scores, ids, logits

    expected = 2 * layer(x)
    handle = layer.router.register_forward_hook(hook)
    torch.testing.assert_close(layer(x), expected)
    [(scores, ids, logits)] = seen
    assert scores.shape == ids.shape == (20, 2) and logits.shape == (20, 8) and logits.requires_grad
    handle.remove()
    assert is_joined(layer(x))


def autocast(x):
    return torch.autocast(x.device.type, BF16)


@pytest.mark.parametrize("context", (autocast, lambda x: PassFunctions()), ids=("autocast", "functions"))
def test_contexts(device, context):
    layer, x = make(device, F32)
    with context(x):
        assert not is_joined(layer(x)) and not is_one_operator(layer, x)


def test_hooks_of_all_modules(device):
    layer, x = make(device)
    names = []
    handle = register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    try:
        assert not is_joined(layer(x))
    finally:
        handle.remove()
    assert names == ["Gate", "Router", "Experts", "FusedMoE"]
    assert is_joined(layer(x))


def test_an_input_without_gradient(device):
    layer, x = make(device)
    assert not is_joined(layer(x.detach()))
    with torch.no_grad():
        assert layer(x).grad_fn is None


def test_torch_func(device):
    """Its transforms act before autograd does."""
    layer, x = make(device)
    found = torch.func.grad(partial(loss_of, layer))(x.detach())
    torch.testing.assert_close(found, gradients(layer, x)["x"])


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiled(device, backend):
    """One graph, of two nodes."""
    layer, x = make(device, **PLAIN)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend=backend)
    (found,) = torch.autograd.grad(compiled(layer, x), x)
    (expected,) = torch.autograd.grad(loss_of(layer, x), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("counted", ("forward", "backward", "both"))
def test_checkpoint_with_global_hooks_once(cpu, counted):
    """FlopCounterMode has hooks on all modules. Forward and recomputation save the same tensors though only
    one of them is counted."""
    module, x = FusedMoE(16, 24, 4, 2), torch.randn(10, 16, requires_grad=True)
    with FlopCounterMode(display=False) if counted != "backward" else nullcontext():
        out = checkpoint(module, x, use_reentrant=False)
    with FlopCounterMode(display=False) if counted != "forward" else nullcontext():
        out.sum().backward()
    found, x.grad = x.grad, None
    module(x).sum().backward()
    torch.testing.assert_close(found, x.grad)
