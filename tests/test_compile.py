"""torch.compile(fullgraph=True): the same results, one graph for every number of tokens."""

import io

import pytest
import torch
from cases import BF16, Case, assert_near, forward_backward

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp


@pytest.fixture(autouse=True)
def fresh():
    """Clears the graphs of other tests. Compiling a function twice is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compile_once(fn):
    """fn compiled once for every number of tokens, without a backend's code generation."""
    return torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")


def layer(device) -> FusedMoE:
    return FusedMoE(
        16, 12, 6, 2, score_func="sigmoid", route_norm=True, num_shared_experts=1,
        shared_expert_gate=True, load_balance_coeff=1e-3, device=device,
    )  # fmt: skip


def train(module, run, x) -> list:
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def test_layer(device):
    """FusedMoE forward and backward in one graph, for all numbers of tokens, counting its tokens."""
    module = layer(device)
    compiled = compile_once(module)
    for tokens in (8, 21, 130, 8):
        x = torch.randn(tokens, 16, device=device)
        expected = train(module, module, x)
        counted = module.tokens_per_expert.clone()
        found = train(module, compiled, x)
        for value, other in zip(found, expected, strict=True):
            assert_near(value, other, slack=16.0)  # the gate's gradient in another layout
        assert torch.equal(module.tokens_per_expert, 2 * counted)
        module.update_expert_bias()


@pytest.mark.parametrize("score_on", ("output", "input"))
def test_fused_experts(device, score_on):
    """All gradients of fused_experts in one dynamic graph, packed weights and biases, any T."""
    compiled = compile_once(fused_experts)
    for tokens in (17, 40, 130):
        case = Case(tokens, layout="halves.T", bias=True, score_on=score_on, routing="sentinels")
        inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
        fixed = {"ids": ids, "score_on": score_on, **case.options}
        expected = forward_backward(fused_experts, inputs, dout, **fixed)
        found = forward_backward(compiled, inputs, dout, **fixed)
        for name, value in expected.items():
            assert_near(found[name], value)


def test_grouped_mlp(device):
    """grouped_mlp with counts that change from call to call, together with grouped_mm and permute."""

    def layer(x, w1, w2, w3, ids, scores):
        rows, plan = fused_moe.permute(x, ids, 5)
        y = grouped_mlp(rows, w1, w2, w3, plan.counts)
        y = y + fused_moe.grouped_mm(rows, w1.new_ones(5, 37, 37), plan.offsets[1:])
        return fused_moe.unpermute(y, plan, scores)

    compiled = compile_once(layer)
    for tokens in (9, 33, 70):
        case = Case(tokens, routing="gaps", seed=tokens)
        inputs = {n: t for n, t in case.inputs(device).items() if t is not None}
        fixed = {"ids": case.ids(device)}
        dout = case.dout(device)
        expected = forward_backward(layer, inputs, dout, **fixed)
        found = forward_backward(compiled, inputs, dout, **fixed)
        for name, value in expected.items():
            assert_near(found[name], value)


def test_autocast_inside(device):
    """A region under autocast compiles, and its GEMMs run in bfloat16."""
    module = layer(device)

    def run(x):
        with torch.autocast(device.type, BF16):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 16, device=device)
    expected, found = train(module, run, x), train(module, compiled, x)
    assert found[0].dtype == BF16
    for value, other in zip(found, expected, strict=True):
        assert (value.double() - other.double()).norm() <= 0.02 * other.double().norm()


def test_inference(device):
    """Without gradients the compiled layer's experts are one operator, which adds the shared ones."""
    module = layer(device).eval()
    seen = []

    def backend(graph, example_inputs):
        seen.extend(n for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(20, 16, device=device)
    with torch.no_grad():
        assert_near(compiled(x), module(x))
    ours = [str(n.target) for n in seen if "fused_moe" in str(n.target)]
    shared = ("count_plan", "experts_up", "experts_down", "router_logits")
    assert ours == [f"fused_moe.{name}.default" for name in (*shared, "router_logits", "route", "experts")]


@pytest.mark.parametrize(
    "shared", ({}, {"num_shared_experts": 1}, {"num_shared_experts": 1, "shared_expert_gate": True})
)
def test_export(device, shared):
    """An exported program runs any number of tokens, after it was saved and loaded, too."""
    module = FusedMoE(16, 12, 6, 2, score_func="sigmoid", bias=True, device=device, **shared).eval()
    tokens = torch.export.Dim("tokens", min=0, max=1 << 20)
    file = io.BytesIO()
    with torch.no_grad():
        x = torch.randn(20, 16, device=device)
        torch.export.save(torch.export.export(module, (x,), dynamic_shapes=({0: tokens},)), file)
        file.seek(0)
        program = torch.export.load(file).module()
        for count in (0, 1, 2, 20, 300):
            x = torch.randn(count, 16, device=device)
            assert torch.equal(program(x), module(x))


def test_inductor(device):
    """The default backend: forward and backward of the layer."""
    module = layer(device)
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(33, 16, device=device)
    expected, found = train(module, module, x), train(module, compiled, x)
    for value, other in zip(found, expected, strict=True):
        assert_near(value, other, slack=16.0)
