"""Activation checkpointing, full and selective: the same gradients, and what is recomputed."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import F32, Calls, Case, operator_calls, quantize_options
from planting import CODES
from test_opcheck import DIFFERENTIABLE, OPERATORS
from test_quantized import EVERY_FORMAT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fused_moe
from fused_moe import FusedMoE, exchange, main_grad, reference, tensor_parallel
from fused_moe.distributed import ExpertParallel

ops = torch.ops.fused_moe


def layer_and_input(device):
    layer = FusedMoE(24, 16, 6, 2, num_shared_experts=1, load_balance_coeff=1e-3, device=device)
    return layer, torch.randn(40, 24, device=device)


def gradients(layer, x, run):
    """Output, and the gradients of x and every parameter."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = run(layer, x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.quick
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_full(device, use_reentrant):
    """A layer recomputed in backward gives the same bits, and counts its tokens once."""
    layer, x = layer_and_input(device)
    expected = gradients(layer, x, lambda layer, x: layer(x))
    counted = layer.tokens_per_expert.clone()
    layer.tokens_per_expert.zero_()
    found = gradients(layer, x, partial(checkpoint, use_reentrant=use_reentrant))
    assert_equal(found, expected)
    assert counted.sum() == 80
    assert torch.equal(layer.tokens_per_expert, counted)


def selective(*saved):
    """A policy that saves the results of the given operators and recomputes the rest."""

    def policy(ctx, op, *args, **kwargs):
        keep = CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
        return keep

    return partial(create_selective_checkpoint_contexts, policy)


EXPERTS = (
    ops.route.default,
    ops.route_plan.default,
    ops.experts_up.default,
    ops.experts_down.default,
)


@pytest.mark.parametrize(
    "saved",
    ((), EXPERTS[:2], EXPERTS[2:3], EXPERTS[3:], EXPERTS),
    ids=("nothing", "routing", "experts_up", "experts_down", "everything"),
)
def test_selective(device, saved):
    """Policies keyed by our operators: the same bits; what was saved runs once, the rest twice."""
    layer, x = layer_and_input(device)
    expected = gradients(layer, x, lambda layer, x: layer(x))
    counted = layer.tokens_per_expert.clone()
    layer.tokens_per_expert.zero_()

    def run(layer, x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=selective(*saved))

    with Calls() as calls:
        found = gradients(layer, x, run)
    assert_equal(found, expected)
    assert torch.equal(layer.tokens_per_expert, counted)
    for op in EXPERTS:
        times = len(calls.of(op.name().removeprefix("fused_moe::")))
        per_pass = 2 if op in EXPERTS[2:] else 1  # for the routed and for the shared experts
        assert times == per_pass * (1 if op in saved else 2), f"{op.name()} ran {times} times"


def compiled(run, backend):
    return torch.compile(run, fullgraph=True, backend=backend)


# name -> how a layer runs, given a backend. Outside of a compiled graph it is not known, until it runs,
# whether forward is recomputed; inside the compiler decides what is.
RECOMPUTED = {
    "compiled": lambda layer, backend: partial(checkpoint, compiled(layer, backend), use_reentrant=False),
    "compiled, reentrant": lambda layer, backend: partial(
        checkpoint, compiled(layer, backend), use_reentrant=True
    ),
    "compiled, selective": lambda layer, backend: partial(
        checkpoint, compiled(layer, backend), use_reentrant=False, context_fn=selective(*EXPERTS[:2])
    ),
    "inside": lambda layer, backend: compiled(
        lambda x: checkpoint(layer, x.sin(), use_reentrant=False).cos(), backend
    ),
    "inside, selective": lambda layer, backend: compiled(
        lambda x: checkpoint(layer, x.sin(), use_reentrant=False, context_fn=selective(*EXPERTS[:2])).cos(),
        backend,
    ),
}


@pytest.mark.parametrize("backend", ("eager", "inductor"))
@pytest.mark.parametrize("form", RECOMPUTED)
def test_compiled_layers_count_once(device, form, backend):
    """A checkpointed compiled layer, and a checkpoint in a compiled model, in every step."""
    torch._dynamo.reset()
    layer, x = layer_and_input(device)
    run = RECOMPUTED[form](layer, backend)
    for step in range(1, 4):
        run(x.clone().requires_grad_()).square().sum().backward()
        assert layer.tokens_per_expert.sum() == 80 * step
    assert layer.experts.w1.grad.count_nonzero()


def test_a_checkpointed_layer_keeps_its_input_only(device):
    """Between forward and backward nothing is saved but what checkpoint itself saves."""
    layer, x = layer_and_input(device)
    kept = []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    own = {p.data_ptr() for p in layer.parameters()}
    others = [t for t in kept if t.data_ptr() not in own]
    assert sum(t.numel() for t in others) <= x.numel()


# --- saved tensors are unpacked once ---------------------------------------------------------------------


class Unpacked(torch.autograd.graph.saved_tensors_hooks):
    """Counts how often each saved tensor is unpacked: non-reentrant checkpointing refuses a second time."""

    def __init__(self):
        self.times = Counter()
        self.saved = 0

        def pack(t):
            self.saved += 1
            return self.saved, t

        def unpack(packed):
            self.times[packed[0]] += 1
            return packed[1]

        super().__init__(pack, unpack)

    def __enter__(self):
        super().__enter__()
        return self


def differentiable(args):
    """The same values; the floating tensors that may, require gradients."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, args
    )


def call_with_gradients(name: str, args):
    arguments = getattr(ops, name).default._schema.arguments
    args = [
        arg if a.name in CODES or a.is_write or "main_grad" in a.name else differentiable(arg)
        for a, arg in zip(arguments, args, strict=True)
    ]
    return getattr(ops, name).default(*args)


def call_layer(device):
    layer, x = layer_and_input(device)
    return layer(x.requires_grad_())


def call_under_a_policy(device):
    layer, x = layer_and_input(device)
    with selective()()[0]:
        return layer(x.requires_grad_())


def call_gather(device):
    order = torch.randperm(6, device=device)
    return exchange._Gather.apply(torch.randn(6, 4, device=device).requires_grad_(), order, order.argsort())


def call_parallel(device, **options):
    """A layer over a group of one rank, whose tokens go to itself."""
    layer, x = layer_and_input(device)
    mesh = init_device_mesh(device.type, (1,))
    return parallelize_module(layer, mesh, ExpertParallel(**options))(x.requires_grad_())


def call_own_rows(device):
    return tensor_parallel._OwnRows.apply(torch.randn(6, 4, device=device).requires_grad_(), 0, 2)


def call_once(device):
    return tensor_parallel._Once.apply(torch.randn(6, device=device).requires_grad_(), False)


def call_with_main_grad(device):
    w = torch.randn(3, 4, 5, device=device)
    return main_grad.WithMainGrad.apply(w.requires_grad_(), [w])


def call_reference_with_main_grad(device):
    w = torch.randn(3, 4, 5, device=device)
    return reference._WithMainGrad.apply(w.clone().requires_grad_(), w)


def call_reference_in_fp8(device):
    def rows(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device).requires_grad_()

    act = torch.nn.functional.silu
    args = rows(5, 128), rows(128, 128), rows(128, 128), rows(5, 1)
    return reference._Fp8Expert.apply(*args, act, "fp8", F32)


FUNCTIONS = {
    "_Routed": call_layer,
    "_RoutedUp": call_under_a_policy,
    "_Gather": call_gather,
    "Dispatch": partial(call_parallel, static=True),
    "Combine": partial(call_parallel, static=True),
    "There": call_parallel,
    "Send": call_parallel,
    "Receive": partial(call_parallel, combine="rank"),
    "_There": partial(call_parallel, symmetric=True, max_tokens=64, combine="rank"),
    "_Back": partial(call_parallel, symmetric=True, max_tokens=64),
    "_OwnRows": call_own_rows,
    "_Once": call_once,
    "WithMainGrad": call_with_main_grad,
    "_WithMainGrad": call_reference_with_main_grad,
    "_Fp8Expert": call_reference_in_fp8,
}


def assert_unpacked_once(unpacked: Unpacked, results):
    results = [r for r in pytree.tree_leaves(results) if torch.is_tensor(r) and r.requires_grad]
    torch.autograd.backward(results, [torch.randn_like(r) for r in results])
    assert bool(unpacked.times) == bool(unpacked.saved)
    assert set(unpacked.times.values()) <= {1}


def test_every_backward_is_here():
    """A function of ours that is neither an operator nor listed above fails this test."""
    bases = torch.autograd.Function, torch.autograd.function._SingleLevelFunction  # operators have the latter
    functions = [f for base in bases for f in base.__subclasses__()]
    ours = {f.__name__ for f in functions if f.__module__.startswith("fused_moe")}
    saving_nothing = {"_WithoutGradient", "_Undifferentiable"}
    assert ours - set(OPERATORS) == {*FUNCTIONS, *saving_nothing}
    assert {"experts_up", "quantized_mm"} <= ours


@pytest.mark.quick
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_backward_unpacks_once(device, name):
    """Or it has no gradient: nothing was saved, or an error of ours says so."""
    differentiated = 0
    for args in operator_calls(Case(9, 8, 16, 3, 2, F32, bias=True), device)[name]:
        try:
            with Unpacked() as unpacked:
                results = call_with_gradients(name, args)
            if unpacked.saved:
                assert_unpacked_once(unpacked, results)
                differentiated += 1
        except RuntimeError as error:
            assert "fused_moe" in str(error)
            assert set(unpacked.times.values()) <= {1}
    assert differentiated or name not in DIFFERENTIABLE - {"pad"}  # which saves sizes alone


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_backward_unpacks_once(device, group_of_one, name):
    with Unpacked() as unpacked:
        results = FUNCTIONS[name](device)
    assert_unpacked_once(unpacked, results)


@pytest.mark.parametrize("use_reentrant", (False, True))
@EVERY_FORMAT
def test_quantised_experts(device, format, use_reentrant):
    """Adapters beside quantised weights, recomputed: the same bits."""
    layer = FusedMoE(128, 64, 4, 2, device=device)
    fused_moe.add_lora(fused_moe.quantize(layer, format, trainable=True, **quantize_options(format)), 4)
    for p in layer.experts.lora.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(12, 128, device=device)
    expected = gradients(layer, x, lambda layer, x: layer(x))
    assert_equal(gradients(layer, x, partial(checkpoint, use_reentrant=use_reentrant)), expected)
