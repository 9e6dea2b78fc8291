"""Counters: they move with their module, are no buffers, and count under every transform."""

import copy
import pickle

import pytest
import torch
from cases import BF16
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call, grad, jvp, vmap

from fused_moe import FusedMoE
from fused_moe.counting import Counting

E = 4


class Positives(Counting):
    """Multiplies by its weight, and counts the positive elements of every column of x (T, E)."""

    counters = ("positives",)

    def __init__(self, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, device=device))
        self.positives = torch.zeros(E, device=device)

    def forward(self, x):
        self._count("positives", (x > 0).int().sum(0, dtype=torch.int32))
        return x * self.weight


@pytest.fixture
def module(device):
    return Positives(device)


@pytest.fixture
def batch(device):
    """x (3, 7, E), and the positive elements of each column."""
    x = torch.randn(3, 7, E, device=device)
    return x, (x > 0).sum((0, 1)).float()


@pytest.mark.quick
def test_vmap_counts_the_batch(module, batch):
    x, expected = batch
    assert torch.equal(vmap(module)(x), x)
    assert torch.equal(module.positives, expected)
    vmap(module, in_dims=2, out_dims=2)(x.permute(1, 2, 0))
    assert torch.equal(module.positives, 2 * expected)
    vmap(vmap(module))(x[:, None])
    assert torch.equal(module.positives, 3 * expected)


def test_gradients_of_torch_func(module, batch):
    """grad, vmap of it, it of vmap, and jvp each count as one call."""
    x, expected = batch

    def loss(x):
        return module(x).square().sum()

    for x_grad in (
        grad(lambda x: loss(x.flatten(0, 1)))(x),
        vmap(grad(loss))(x),
        grad(lambda x: vmap(loss)(x).sum())(x),
    ):
        torch.testing.assert_close(x_grad, 2 * x)
    jvp(module, (x.flatten(0, 1),), (x.flatten(0, 1),))
    assert torch.equal(module.positives, 4 * expected)


def test_per_sample_gradients(module, batch):
    """torch.func's recipe: the parameters and the counter are functional_call's."""
    x, expected = batch
    total = torch.zeros_like(module.positives)

    def loss(weight, x):
        return functional_call(module, {"weight": weight, "positives": total}, x).sum()

    grads = vmap(grad(loss), in_dims=(None, 0))(module.weight.detach(), x)
    torch.testing.assert_close(grads, x.sum(1))
    assert torch.equal(total, expected)
    assert not module.positives.any()


def test_batched_counters(module, batch):
    """A counter for each member of an ensemble."""
    x, _ = batch
    totals = torch.zeros(3, E, device=x.device)
    vmap(lambda total, x: functional_call(module, {"positives": total}, x))(totals, x)
    assert torch.equal(totals, (x > 0).sum(1).float())
    vmap(lambda total, x: functional_call(module, {"positives": total}, x), in_dims=(0, None))(totals, x[0])
    assert torch.equal(totals, (x > 0).sum(1).float() + (x[0] > 0).sum(0).float())


def test_an_ensemble_on_meta(batch, device):
    """torch.func's recipe for ensembles runs a module that is on meta; its counter follows the tokens."""
    x, expected = batch
    module = Positives("meta")
    weights = torch.ones(3, E, device=device)
    vmap(lambda weight, x: functional_call(module, {"weight": weight}, x))(weights, x)
    assert torch.equal(module.positives, expected)


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_compile(module, batch, backend):
    """Compiled, and compiled around vmap."""
    x, expected = batch
    torch._dynamo.reset()
    run = torch.compile(lambda x: module(x.flatten(0, 1)), fullgraph=True, backend=backend)
    for step in range(1, 4):
        run(x)
        assert torch.equal(module.positives, step * expected)
    torch.compile(lambda x: vmap(module)(x), fullgraph=True, backend=backend)(x)
    assert torch.equal(module.positives, 4 * expected)


def test_no_cuda_graph_has_a_counter(device):
    """inductor cuts its CUDA graphs at the operator, and nothing else in a compiled step reads or writes the
    counter: it is no input and no output of a graph."""
    torch._dynamo.reset()
    module, graphs = FusedMoE(8, 4, E, 2, num_shared_experts=1, load_balance_coeff=1e-3, device=device), []

    def record(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    run = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    run(torch.randn(5, 8, device=device)).sum().backward()
    ours = torch.ops.fused_moe_counting.add.default
    assert all(
        torch.Tag.cudagraph_unsafe in op.tags for op in (ours, torch.ops.fused_moe_counting.start.default)
    )
    forward, backward = graphs
    (count,) = [n for n in forward.nodes if ours in (n.target, *n.args)]
    (counter,) = [n for n in count.all_input_nodes if n.op == "placeholder"]
    writes = [n for n in counter.users if n is not count]
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0] is counter for n in writes)
    assert counter not in forward.output_node().args[0]
    assert counter.name not in [n.name for n in backward.nodes]


def test_operator(device):
    total, amount = torch.zeros(E, device=device), torch.ones(E, dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.fused_moe_counting.add.default, (total, amount))
    torch.ops.fused_moe_counting.add(total, amount)
    assert torch.equal(total, torch.ones_like(total))


def test_counters_are_no_buffers(module):
    """DistributedDataParallel would overwrite a buffer. A state dict has no counter either."""
    assert not list(module.buffers())
    assert list(module.state_dict()) == ["weight"]


@pytest.mark.parametrize("clone", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))
def test_copies_have_their_own(module, batch, clone):
    x, expected = batch
    module(x.flatten(0, 1))
    other = clone(module)
    other(x.flatten(0, 1))
    assert torch.equal(module.positives, expected)
    assert torch.equal(other.positives, 2 * expected)


def test_moving(module, batch):
    """A counter moves as its module does, and keeps dtype and values."""
    x, expected = batch
    module(x.flatten(0, 1))
    for dtype in (BF16, torch.float64):
        module.to(dtype)
        assert module.weight.dtype == dtype
        assert module.positives.dtype == torch.float32 and torch.equal(module.positives, expected)
    parent = nn.Sequential(module).to("meta")
    assert module.positives.is_meta
    parent.to_empty(device=x.device)
    assert module.positives.device == x.device


def test_a_layer_materialised_by_its_state_dict(device):
    """load_state_dict(assign=True) leaves what is not in it on meta: the counter starts at 0."""
    layer = FusedMoE(8, 4, E, 2, load_balance_coeff=1e-3, device="meta")
    layer.load_state_dict(
        FusedMoE(8, 4, E, 2, load_balance_coeff=1e-3, device=device).state_dict(), assign=True
    )
    layer(torch.randn(5, 8, device=device))
    assert layer.tokens_per_expert.sum() == 10
    layer.update_expert_bias()
    assert layer.expert_bias.any()


@pytest.mark.gpu
def test_a_counter_left_behind(device):
    """`fully_shard` moves parameters and buffers only: the counter follows the tokens, with its values."""
    module = Positives()
    module(torch.ones(2, E))
    module.weight.data = module.weight.to(device)
    module(torch.ones(3, E, device=device))
    assert module.positives.device.type == device.type
    assert module.positives.tolist() == [5] * E


def assigned(**settings) -> FusedMoE:
    """A layer made on meta, whose state came by assignment: its counters stayed there."""
    with torch.device("meta"):
        layer = FusedMoE(8, 4, 4, 2, **settings)
    layer.load_state_dict(FusedMoE(8, 4, 4, 2, **settings).state_dict(), assign=True)
    assert layer.tokens_per_expert.is_meta
    return layer


@pytest.mark.parametrize("mode", (torch.inference_mode, torch.no_grad))
def test_a_counter_that_moved_outlives_its_call(mode):
    layer, x = assigned(), torch.randn(5, 8)
    with mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.tokens_per_expert.sum() == 2 * 5 * 2
    layer = assigned()
    parameters = dict(layer.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).sum())(parameters)
    assert copy.deepcopy(layer).tokens_per_expert.sum() == 5 * 2


def test_a_counter_on_meta(device):
    """Nothing was counted: the layer moves, reports and updates all the same."""
    assert "nothing counted" in str(assigned().load_report())
    assert assigned().to(device).tokens_per_expert.device.type == device.type
    layer = assigned(load_balance_coeff=1e-3)
    layer.update_expert_bias()
    assert not layer.expert_bias.is_meta and not layer.tokens_per_expert.is_meta


@pytest.mark.parametrize("backend", ("eager", "aot_eager", "inductor"))
def test_a_compiled_step_moves_a_counter(device, backend):
    """It is no output of what inductor would record as a CUDA graph: the operator that made it is outside."""
    torch._dynamo.reset()
    layer, eager = (assigned(load_balance_coeff=1e-3).to(device) for _ in range(2))
    layer.tokens_per_expert = layer.tokens_per_expert.to("meta")
    eager.load_state_dict(layer.state_dict())
    run = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(3):
        x = torch.randn(5, 8, device=device)
        for fn in (run, eager):
            fn(x).sum().backward()
        assert torch.equal(layer.tokens_per_expert, eager.tokens_per_expert)
    layer.update_expert_bias()
    assert layer.expert_bias.any() and not layer.tokens_per_expert.any()


def test_shapes_alone_are_not_counted():
    layer, x = FusedMoE(8, 4, 4, 2), torch.randn(5, 8)
    layer(x)
    state = {n: p.to("meta") for n, p in layer.state_dict().items()}
    torch.func.functional_call(layer, state, (x.to("meta"),))
    layer(x)
    assert layer.tokens_per_expert.sum() == 2 * 5 * 2
