"""record_routing and replay_routing: the bits of forward(ids=), in every way that a model is run."""

import copy
import gc
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

from fused_moe import FusedMoE, Routes, record_routing, reference, replay_routing

D, F, E, K = 24, 16, 6, 2
T = 15


class Block(nn.Module):
    """x + layer(x), the layer checkpointed unless use_reentrant is None."""

    def __init__(self, layer, use_reentrant=None):
        super().__init__()
        self.layer, self.use_reentrant = layer, use_reentrant

    def forward(self, x, **ids):
        if self.use_reentrant is None:
            return x + self.layer(x, **ids)
        return x + checkpoint(partial(self.layer, **ids), x, use_reentrant=self.use_reentrant)


def make_model(device, use_reentrant=None, layers=2, dtype=None, **options):
    """Residual layers, the first with shared experts."""
    made = [
        FusedMoE(D, F, E, K, num_shared_experts=1 - i, device=device, dtype=dtype, **options)
        for i in range(layers)
    ]
    return nn.Sequential(*(Block(layer, use_reentrant) for layer in made))


def make_input(device, tokens=T, dtype=None):
    return torch.randn(tokens, D, device=device, dtype=dtype, requires_grad=True)


def make_routes(device, tokens=T, layers=2):
    """Random ids; in each layer a token without a choice and one with a remote slot."""
    ids = torch.randint(0, E, (layers, tokens, K), device=device)
    ids[:, 1] = -1
    ids[:, 2, 0] = -1
    return Routes(list(ids), E)


def with_ids(model, x, routes):
    """What the model computes of x (T, D) with ids=."""
    for block, ids in zip(model, routes, strict=True):
        x = block(x, ids=ids)
    return x


def gradients(model, x, run):
    """The output, and all gradients of its sum of squares."""
    model.zero_grad()
    x.grad = None
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def tapes_of(model):
    gc.collect()
    return [m for m in model.modules() if "_tape" in m.__dict__]


# --- recording ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_record(device):
    """A prefill of three sequences and two decode steps: each layer's ids, in the order of the calls."""
    model = make_model(device)
    expected = [[], []]
    calls = [torch.randn(3, length, D, device=device) for length in (5, 1, 1)]
    with record_routing(model) as routes, torch.no_grad():
        for x in calls:
            model(x)
    for x in calls:
        for ids, block in zip(expected, model, strict=True):
            out, chosen = block.layer(x, return_ids=True)
            ids.append(chosen)
            x = x + out
    assert len(routes) == 2 and routes.num_tokens == [21, 21]
    for i, ids in enumerate(expected):
        assert routes[i].dtype == torch.uint8 and routes[i].device.type == device.type
        assert torch.equal(routes[i].int(), torch.cat([part.view(-1, K) for part in ids]))
    padded = routes.to_tensor(batch_size=3)  # (B, S, L, K), each sequence's tokens in a row
    assert torch.equal(padded.int(), torch.stack([torch.cat(ids, 1) for ids in expected], 2))
    assert not tapes_of(model)


def test_a_sampler_records_what_a_trainer_replays(device):
    """Records in decode order, replayed in that of whole sequences: the bits of the recorded outputs."""
    model = make_model(device, dtype=torch.float64)
    x = torch.randn(3, 7, D, device=device, dtype=torch.float64)
    with record_routing(model) as routes, torch.no_grad():
        steps = [model(part) for part in x.split((5, 1, 1), 1)]
    with replay_routing(model, Routes.from_tensor(routes.to_tensor(batch_size=3).cpu())):
        out = model(x)
    torch.testing.assert_close(out, torch.cat(steps, 1), rtol=1e-12, atol=1e-12)
    with replay_routing(model, routes):  # in the recorded order the bits are the same on CPUs, too
        again = [model(part) for part in x.split((5, 1, 1), 1)]
    assert_equal(again, steps)


@pytest.mark.parametrize("num_experts, dtype", ((256, torch.uint8), (300, torch.int16)))
def test_recorded_dtype(device, num_experts, dtype):
    layer = FusedMoE(D, F, num_experts, K, device=device)
    with torch.no_grad():
        layer.router.gate.weight[:-2] = 0
    with record_routing(layer) as routes:
        out, ids = layer(make_input(device), return_ids=True)
    assert ids.max() == num_experts - 1
    assert routes[0].dtype == dtype and torch.equal(routes[0].int(), ids)


def test_padding_is_recorded_as_no_expert(device):
    layer = FusedMoE(D, F, E, K, device=device)
    real = torch.tensor(4, device=device)
    with record_routing(layer) as routes:
        layer(make_input(device), num_tokens=real)
    assert routes[0].dtype == torch.int16
    assert (routes[0][4:] == -1).all() and (routes[0][:4] >= 0).all()


# --- replaying ----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("grad", (True, False))
def test_replay_is_forward_with_ids(device, grad):
    model, x, routes = make_model(device), make_input(device), make_routes(device)

    def run(x):
        with replay_routing(model, routes):
            return model(x)

    if grad:
        expected = gradients(model, x, lambda x: with_ids(model, x, routes))
        assert_equal(gradients(model, x, run), expected)
    else:
        with torch.inference_mode():
            assert torch.equal(run(x), with_ids(model, x, routes))
    assert not tapes_of(model)


def test_gradients_in_float64(device):
    """Against the reference's layers with the same ids, where the router's own choice differs."""
    routes = make_routes(device)
    options = {"dtype": torch.float64, "score_func": "sigmoid", "route_norm": True}
    model = make_model(device, **options)
    plain = [
        reference.FusedMoE(D, F, E, K, num_shared_experts=1 - i, device=device, **options) for i in (0, 1)
    ]
    plain = nn.Sequential(*map(Block, plain))
    plain.load_state_dict(model.state_dict())
    x = make_input(device, dtype=torch.float64)
    with replay_routing(model, routes):
        found = gradients(model, x, model)
    expected = gradients(plain, x, lambda x: with_ids(plain, x, routes))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_what_a_layer_returns_and_counts(device):
    """return_ids, losses, num_tokens and the counters see the replayed ids."""
    layer = FusedMoE(D, F, E, K, load_balance_coeff=1e-3, device=device)
    x, routes = make_input(device), make_routes(device, layers=1)
    how = {"return_ids": True, "return_losses": True, "num_tokens": torch.tensor(11, device=device)}
    expected = layer(x, ids=routes[0], **how)
    counted = layer.tokens_per_expert.clone()
    layer.tokens_per_expert.zero_()
    with record_routing(layer) as again, replay_routing(layer, routes):
        found = layer(x, **how)
    assert_equal([found[0], *found[1], found[2]], [expected[0], *expected[1], expected[2]])
    assert torch.equal(layer.tokens_per_expert, counted)
    assert torch.equal(again[0].int(), expected[2])


def test_given_ids_go_before_the_routes(device):
    layer, x, routes = FusedMoE(D, F, E, K, device=device), make_input(device), make_routes(device, layers=1)
    ids = torch.randint(0, E, (T, K), device=device)
    with replay_routing(layer, routes):
        out = layer(x, ids=ids)
        assert torch.equal(layer(x), layer(x, ids=routes[0]))
    assert torch.equal(out, layer(x, ids=ids))


def test_routes_move_to_the_layers_device(device):
    layer, x, routes = FusedMoE(D, F, E, K, device=device), make_input(device), make_routes(device, layers=1)
    expected = layer(x, ids=routes[0])
    with replay_routing(layer, routes.to("cpu")):
        assert torch.equal(layer(x), expected)


def test_layers_of_different_sizes(device):
    """Several E and K, a layer that is called twice, one that is in two places, one that is not called."""
    model = nn.ModuleDict(
        {"a": FusedMoE(D, F, 6, 2, device=device), "b": FusedMoE(D, F, 300, 3, device=device),
         "unused": FusedMoE(D, F, 6, 2, device=device)}
    )  # fmt: skip
    model["again"] = model["a"]
    x = make_input(device)

    def run(x, ids=(None, None, None)):
        x = x + model["a"](x, ids=ids[0])
        x = x + model["b"](x, ids=ids[1])
        return x + model["again"](x, ids=ids[2])

    with record_routing(model) as routes:
        run(x)
    assert (
        routes.num_tokens == [2 * T, T, 0] and routes.top_k == [2, 3, 2] and routes.num_experts == [6, 300, 6]
    )
    first, second = torch.randint(0, 6, (2, T, 2), device=device)
    other = Routes([torch.cat((first, second)), torch.randint(0, 300, (T, 3), device=device), first[:0]])
    expected = gradients(model, x, lambda x: run(x, (first, other[1], second)))
    with replay_routing(model, other):
        assert_equal(gradients(model, x, run), expected)


def test_micro_batches(device):
    """Micro-batches share a context, or have one each; their gradients accumulate."""
    model, x, routes = make_model(device), make_input(device), make_routes(device)
    parts = [slice(0, 4), slice(4, 5), slice(5, T)]

    def accumulate(run):
        model.zero_grad()
        for part in parts:
            run(part).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def own_context(part):
        with replay_routing(model, routes.select(part)):
            return model(x[part])

    expected = accumulate(lambda part: with_ids(model, x[part], routes.select(part)))
    assert_equal(accumulate(own_context), expected)
    with replay_routing(model, routes):
        assert_equal(accumulate(lambda part: model(x[part])), expected)


def test_nested_contexts(device):
    layer, x = FusedMoE(D, F, E, K, device=device), make_input(device)
    outer, inner = make_routes(device, layers=1), make_routes(device, layers=1)
    own = layer(x, return_ids=True)[1]
    with record_routing(layer) as every:
        layer(x)
        with replay_routing(layer, outer):
            with replay_routing(layer, inner), record_routing(layer) as some:
                assert torch.equal(layer(x), layer(x, ids=inner[0]))
            assert torch.equal(layer(x), layer(x, ids=outer[0]))
        layer(x)
    resolved = [layer(x, ids=routes[0], return_ids=True)[1] for routes in (inner, outer)]
    assert torch.equal(some[0].int(), torch.cat([resolved[0]] * 2))
    assert torch.equal(every[0].int(), torch.cat([own, *[resolved[0]] * 2, *[resolved[1]] * 2, own]))


# --- checkpointing ------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("backward", ("inside", "after"))
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(device, use_reentrant, backward):
    """Recomputation takes the same ids; nothing of it is recorded, and nothing is left on the layers."""
    model, x, routes = make_model(device, use_reentrant), make_input(device), make_routes(device)
    expected = gradients(model, x, lambda x: with_ids(model, x, routes))

    def run(x):
        with replay_routing(model, routes):
            return model(x)

    with record_routing(model) as recorded:
        if backward == "after":
            found = gradients(model, x, run)
        else:
            with replay_routing(model, routes):
                found = gradients(model, x, model)
    assert_equal(found, expected)
    assert recorded.num_tokens == [T, T]
    assert not tapes_of(model)


@pytest.mark.parametrize("order", ("first", "last", "sum", "pipeline"))
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_outstanding_micro_batches(device, use_reentrant, order):
    """Backward passes in any order, each layer's calls with the same number of tokens."""
    model = make_model(device, use_reentrant)
    xs = [make_input(device) for _ in range(3)]
    routes = [make_routes(device) for _ in xs]

    def total(run):
        """Losses and gradients."""
        model.zero_grad()
        losses = []

        def backward(i):
            losses[i].backward()

        for i in range(3):
            losses.append(run(i).square().sum())
            if order == "pipeline" and i > 0:
                backward(i - 1)
        if order == "sum":
            sum(losses).backward()
        else:
            for i in {"first": (0, 1, 2), "last": (2, 1, 0), "pipeline": (2,)}[order]:
                backward(i)
        return [p.grad.clone() for p in model.parameters()]

    def replayed(i):
        with replay_routing(model, routes[i]):
            return model(xs[i])

    assert_equal(total(replayed), total(lambda i: with_ids(model, xs[i], routes[i])))


class Twice(nn.Module):
    """One layer twice, in one checkpoint or inside of another one."""

    def __init__(self, layer, nested, use_reentrant):
        super().__init__()
        self.layer, self.nested, self.use_reentrant = layer, nested, use_reentrant

    def inner(self, x):
        return x + self.layer(x)

    def both(self, x):
        x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant) if self.nested else self.inner(x)
        return self.inner(x)

    def forward(self, x):
        return checkpoint(self.both, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("nested", (False, True), ids=("flat", "nested"))
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_layer_twice_in_a_checkpoint(device, use_reentrant, nested):
    model = Twice(FusedMoE(D, F, E, K, device=device), nested, use_reentrant)
    x, routes = make_input(device), make_routes(device, layers=1, tokens=2 * T)

    def run(x):
        with replay_routing(model, routes):
            return model(x)

    def plain(x):
        for ids in routes[0].split(T):
            x = x + model.layer(x, ids=ids)
        return x

    found, expected = (gradients(model, x, f) for f in (run, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert not tapes_of(model)


def test_backward_twice(device):
    model, x, routes = make_model(device, False), make_input(device), make_routes(device)
    with replay_routing(model, routes):
        out = model(x)
    first = torch.autograd.grad(out.square().sum(), list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    assert_equal(second, first)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_context_inside_of_a_checkpoint(device, use_reentrant):
    model, x, routes = make_model(device), make_input(device), make_routes(device)

    def inner(x):
        with replay_routing(model, routes):
            return model(x)

    found = gradients(model, x, lambda x: checkpoint(inner, x, use_reentrant=use_reentrant))
    assert_equal(found, gradients(model, x, lambda x: with_ids(model, x, routes)))
    assert not tapes_of(model)


class OwnCheckpoint(torch.autograd.Function):
    """As frameworks write their own."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, dout)
        return None, x.grad


def test_another_checkpoint(device):
    model, x, routes = make_model(device), make_input(device), make_routes(device)

    def run(x):
        with replay_routing(model, routes):
            return OwnCheckpoint.apply(model, x)

    found = gradients(model, x, run)
    assert_equal(found, gradients(model, x, lambda x: with_ids(model, x, routes)))
    assert not tapes_of(model)


def test_a_module_that_checkpoints_itself(device):
    model, x, routes = make_model(device), make_input(device), make_routes(device)
    expected = gradients(model, x, lambda x: with_ids(model, x, routes))
    for block in model:
        composable_checkpoint(block.layer)

    def run(x):
        with replay_routing(model, routes):
            return model(x)

    assert_equal(gradients(model, x, run), expected)
    assert not tapes_of(model)


def test_a_layer_called_in_backward_otherwise(device):
    """Which call it repeats is not known: never the ids of another one."""
    layer, x, routes = FusedMoE(D, F, E, K, device=device), make_input(device), make_routes(device, layers=1)
    out = x * 1
    out.register_hook(lambda grad: layer(x))
    with replay_routing(layer, routes):
        with pytest.raises(
            RuntimeError, match="replay_routing: expected a recomputation by torch.utils.checkpoint"
        ):
            out.sum().backward()
        layer(x)


def test_a_pass_outside_while_another_is_outstanding(device):
    """The router chooses for a pass without a replay, also where one with it may still run again."""
    model, routes = make_model(device, False), make_routes(device)
    x, other = make_input(device), make_input(device)
    expected = gradients(model, other, model)
    with replay_routing(model, routes):
        out = model(x)
    assert len(tapes_of(model)) == 2
    assert_equal(gradients(model, other, model), expected)
    del out
    assert not tapes_of(model)


# --- torch.compile ------------------------------------------------------------------------------------


def compiled(model, where):
    """The model's call, compiled without graph breaks; and the number of graphs."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    if where == "layers":
        for block in model:
            block.layer.compile(backend=backend, fullgraph=True)
        return model, backend
    return torch.compile(model, backend=backend, fullgraph=True), backend


@pytest.mark.parametrize("first", ("outside", "inside"))
@pytest.mark.parametrize(
    "where, use_reentrant",
    (("model", None), ("model", False), ("model", True), ("layers", False), ("layers", True)),
)
def test_compile(device, where, use_reentrant, first):
    """Compiled before or in a context: one compilation more, no other for other routes, and each is taken."""
    model, x = make_model(device, use_reentrant), make_input(device)
    run, backend = compiled(model, where)
    if first == "outside":
        gradients(model, x, run)
    outside = backend.frame_count

    def check(routes):
        def replayed(x):
            with replay_routing(model, routes):
                return run(x)

        found = gradients(model, x, replayed)
        expected = gradients(model, x, lambda x: plain_with_ids(model, x, routes))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    graphs = None
    for _ in range(3):
        check(make_routes(device))
        assert graphs in (None, backend.frame_count)
        graphs = backend.frame_count
    if first == "outside":
        assert graphs == 2 * outside
    with record_routing(model) as recorded:
        gradients(model, x, run)
    assert recorded.num_tokens == [T, T]
    check(recorded)
    assert backend.frame_count == graphs


def plain_with_ids(model, x, routes):
    """with_ids past a compiled __call__."""
    for block, ids in zip(model, routes, strict=True):
        x = x + block.layer.forward(x, ids=ids)
    return x


def test_compiled_layer_twice_in_a_checkpoint(device):
    """Compiled backward repeats the two calls in its own order: an error, not the other call's ids."""
    layer = FusedMoE(D, F, E, K, device=device)
    model = nn.Sequential(Block(layer, False), Block(layer, False))
    run, _ = compiled(model, "model")
    with replay_routing(model, make_routes(device, layers=1, tokens=2 * T)):
        out = run(make_input(device))
    with pytest.raises(RuntimeError, match="expected one call of a layer in a compiled region"):
        out.sum().backward()


# --- what is left ---------------------------------------------------------------------------------------


def test_nothing_is_left(device):
    """No entry of a state dict, no hook, no attribute; copies made inside have no part in the context."""
    model, x, routes = make_model(device), make_input(device), make_routes(device)
    names, attributes = list(model.state_dict()), [set(m.__dict__) for m in model.modules()]
    with record_routing(model), replay_routing(model, routes):
        assert list(model.state_dict()) == names
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        expected = model(x)
        for other in copies:
            assert not torch.equal(other(x), expected)
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for other in (*copies, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_an_exception_ends_a_context(device):
    model, routes = make_model(device), make_routes(device)
    with pytest.raises(KeyError), record_routing(model), replay_routing(model, routes):
        raise KeyError  # and not that no token was replayed
    assert not tapes_of(model)


# --- wrong calls ----------------------------------------------------------------------------------------


def layers_of(*sizes):
    return nn.Sequential(*(FusedMoE(D, F, num_experts, top_k) for num_experts, top_k in sizes))


@pytest.mark.parametrize(
    "ids, num_experts, message",
    (
        ([(T, 2)], None, "expected routes of the model's 2 layers, found routes of 1"),
        ([(T, 2)] * 3, None, "expected routes of the model's 2 layers, found routes of 3"),
        ([(T, 2), (T, 3)], None, "expected routes of layer '1' with K = 2, found K = 3"),
        ([(T, 2)] * 2, (6, 5), "expected routes of layer '1' with E = 6, found E = 5"),
        ([(T, 2)] * 2, (8, 6), "expected routes of layer '0' with E = 6, found E = 8"),
    ),
)
def test_routes_of_another_model(cpu, ids, num_experts, message):
    model = layers_of((6, 2), (6, 2))
    routes = Routes([torch.zeros(size, dtype=torch.int32) for size in ids], num_experts)
    with pytest.raises(ValueError, match=f"replay_routing: {message}"), replay_routing(model, routes):
        pass
    assert not tapes_of(model)


def test_ids_of_more_experts(cpu):
    routes = Routes([torch.tensor([[0, 6]])])
    message = "replay_routing: expected ids of layer '' below E = 6, found 6"
    with pytest.raises(ValueError, match=message), replay_routing(FusedMoE(D, F, 6, 2), routes):
        pass


@pytest.mark.parametrize("tokens", (T - 1, T + 1))
def test_other_tokens(device, tokens):
    """A pass with more tokens than the routes, and one with fewer."""
    model, routes = make_model(device), make_routes(device)
    message = (
        "replay_routing: expected at most 15 more of the routes' 15 tokens in layer '0.layer', found 16"
        if tokens > T
        else "replay_routing: expected a replay of all 15 tokens of the routes in layer '0.layer', found 14"
    )
    with pytest.raises(ValueError, match=message), replay_routing(model, routes):
        model(make_input(device, tokens))
    assert not tapes_of(model)


@pytest.mark.parametrize("context", (record_routing, lambda model: replay_routing(model, make_routes("cpu"))))
@pytest.mark.parametrize("model, error", ((3, TypeError), (nn.Linear(2, 2), ValueError)))
def test_no_model(cpu, context, model, error):
    expected = "expected model to be a module with a FusedMoE in it, found (int|Linear)"
    with pytest.raises(error, match=expected), context(model):
        pass


def test_no_routes(cpu):
    message = "replay_routing: expected routes to be a fused_moe.Routes, found Tensor"
    with pytest.raises(TypeError, match=message), replay_routing(layers_of((6, 2)), torch.zeros(3, 1, 2)):
        pass


def test_transforms(cpu):
    """ids of a transform would outlive it."""
    layer, x = FusedMoE(D, F, E, K), torch.randn(T, D)
    for context in (record_routing(layer), replay_routing(layer, make_routes("cpu", layers=1))):
        with pytest.raises(RuntimeError, match="expected no transform of torch.func"), context:
            torch.func.grad(lambda x: layer(x).sum())(x)


# --- Routes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64))
def test_packed_tensor(device, dtype):
    ids = torch.randint(0, E, (T, 3, K), device=device).to(dtype)
    routes = Routes.from_tensor(ids)
    assert len(routes) == 3 and routes.num_tokens == [T] * 3 and routes.top_k == [K] * 3
    for i in range(3):
        assert routes[i].dtype == torch.uint8 and torch.equal(routes[i], ids.int()[:, i].to(torch.uint8))
        assert routes[i].is_contiguous()
    assert torch.equal(routes.to_tensor(), ids.to(torch.uint8))


def test_padded_tensor(device):
    """(B, S, L, K), -1 at padded positions, where the router chooses."""
    model = make_model(device)
    ids = torch.randint(0, E, (3, 5, 2, K), device=device)
    ids[1, 3:] = -1
    x = torch.randn(3, 5, D, device=device)
    routes = Routes.from_tensor(ids)
    assert routes[0].dtype == torch.int16 and torch.equal(routes.to_tensor().view(3, 5, 2, K), ids.short())
    with record_routing(model) as used, replay_routing(model, routes):
        out = model(x)
    expected = x
    for i, block in enumerate(model):
        expected = expected + block.layer(expected, ids=ids[:, :, i])
    assert torch.equal(out, expected)
    chosen = used.to_tensor(batch_size=3)
    real = (ids >= 0).all(-1).all(-1)
    assert torch.equal(chosen[real], ids[real].byte()) and chosen.dtype == torch.uint8


def test_select(device):
    routes = make_routes(device)
    shuffled = torch.randperm(T, device=device)
    mask = torch.rand(T, device=device) < 0.5
    for tokens in (slice(2, 7), shuffled, mask):
        some = routes.select(tokens)
        assert some.num_experts == [E, E]
        assert_equal(list(some), [ids[tokens] for ids in routes])
    assert routes.select(slice(3, 8)).num_tokens == [5, 5]


@pytest.mark.parametrize(
    "make, error, message",
    (
        (lambda: Routes(torch.zeros(2, 3, 4)), TypeError, "expected layers to be a list of tensors"),
        (lambda: Routes([]), ValueError, "expected at least one layer, found 0"),
        (lambda: Routes([[1]]), TypeError, r"expected layers\[0\] to be a tensor, found list"),
        (lambda: Routes([torch.zeros(3, 2)]), TypeError, "of an integer dtype, found torch.float32"),
        (lambda: Routes([torch.zeros(3, dtype=int)]), ValueError, r"of shape \(N, K\).*, found \(3,\)"),
        (lambda: Routes([torch.tensor([[6]])], 6), ValueError, "ids of layer 0 from -1 to 5, found 6"),
        (lambda: Routes([torch.tensor([[-2]])], 6), ValueError, "ids of layer 0 from -1 to 5, found -2"),
        (lambda: Routes([torch.tensor([[40000]])]), ValueError, "from -1 to 32767, found 40000"),
        (lambda: Routes([torch.tensor([[2**32]])]), ValueError, "from -1 to 32767, found 4294967296"),
        (lambda: Routes([torch.tensor([[1]])], [6, 6]), ValueError, "num_experts of 1 layers, found 2"),
        (lambda: Routes([torch.tensor([[1]])], 6.0), TypeError, "num_experts"),
        (lambda: Routes.from_tensor([1]), TypeError, r"of shape \(..., L, K\), found list"),
        (lambda: Routes.from_tensor(torch.ones(3, 2).int()), ValueError, r"found \(3, 2\)"),
        (lambda: make_routes("cpu").select(3), TypeError, "a slice or a tensor, found int"),
        (lambda: make_routes("cpu").select(torch.ones(2, 2)), ValueError, r"found \(2, 2\)"),
        (lambda: make_routes("cpu").to_tensor(4), ValueError, r"divides .* \[15\], found 4"),
        (lambda: two_tokens(1, 2).to_tensor(), ValueError, r"the same tokens, found \[1, 2\] tokens"),
        (lambda: two_tokens(1, 2).select(slice(1)), ValueError, r"the same tokens, found \[1, 2\] tokens"),
        (lambda: two_k().to_tensor(), ValueError, r"layers of one K, found \[1, 2\]"),
    ),
)
def test_wrong_routes(cpu, make, error, message):
    with pytest.raises(error, match=message):
        make()


def two_tokens(*tokens):
    return Routes([torch.zeros(n, 2, dtype=torch.int32) for n in tokens])


def two_k():
    return Routes([torch.zeros(3, k, dtype=torch.int32) for k in (1, 2)])
