"""torch.func, forward mode, and what else has to see a call before autograd does. `ops.run` lets it."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from cases import (
    BF16,
    F32,
    F64,
    LAYOUTS,
    Calls,
    Case,
    call_operator,
    distinct,
    operator_calls,
    quantize_options,
)
from planting import CODES
from torch._vmap_internals import _vmap as older_vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fused_moe import (
    FusedMoE,
    add_lora,
    fused_experts,
    grouped_mlp,
    grouped_mm,
    ops,
    permute,
    quantize,
    reference,
    route,
    unpermute,
)
from fused_moe.quantized.formats import FORMATS

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


@pytest.fixture
def rows(device):
    """a (3, 5, 4), three batches of 5 rows; b (2, 3, 4); offsets of two experts."""
    a, b = torch.randn(3, 5, 4, device=device), torch.randn(2, 3, 4, device=device)
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    return a.requires_grad_(), b.requires_grad_(), offsets


def test_vmap_inside_autograd(device, rows):
    """The batched tensors require no gradient, what they wrap does."""
    a, b, offsets = rows
    out = torch.func.vmap(lambda x: grouped_mm(x, b, offsets))(a)
    expected = torch.stack([grouped_mm(x, b, offsets) for x in a])
    assert torch.equal(out, expected)
    for mine, other in zip(
        torch.autograd.grad(out.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b)), strict=True
    ):
        torch.testing.assert_close(mine, other)
    assert torch.func.vmap(lambda x: route(x, 2)[0])(a).requires_grad


def test_batched_gradients_of_gradients(device, rows):
    a, b, offsets = rows
    x = a[0].detach().requires_grad_()
    out = grouped_mm(x, b, offsets)
    douts = torch.randn(3, *out.shape, device=device)
    (batched,) = torch.autograd.grad(out, x, douts, is_grads_batched=True, create_graph=True)
    (second,) = torch.autograd.grad(batched.sum(), b)
    (single,) = torch.autograd.grad(out, x, douts.sum(0), create_graph=True)
    (expected,) = torch.autograd.grad(single.sum(), b)
    torch.testing.assert_close(second, expected)


@pytest.fixture
def layer(device):
    """The layer, its parameters, and x of three samples."""
    module = FusedMoE(
        16, 8, 4, 2, score_func="sigmoid", route_norm=True, bias=True, num_shared_experts=1, device=device
    )
    return module.eval(), dict(module.named_parameters()), torch.randn(3, 5, 16, device=device)


def loss_of(module, parameters, x):
    return torch.func.functional_call(module, parameters, x).square().sum()


def test_func_grad_and_vjp(device, layer):
    module, parameters, x = layer
    expected = torch.autograd.grad(loss_of(module, parameters, x), list(parameters.values()))
    found = torch.func.grad(loss_of, argnums=1)(module, parameters, x)
    assert_close_all(found.values(), expected)
    _, vjp = torch.func.vjp(lambda p: loss_of(module, p, x), parameters)
    assert_close_all(vjp(torch.ones((), device=device))[0].values(), expected)


def test_nested_func_grad_of_grouped_mm(device):
    """The gradient's gradient, through the output and through what was saved of the operands."""
    rows, weight = (torch.randn(*shape, 8, dtype=F64, device=device) for shape in ((6,), (2, 5)))
    offsets = torch.tensor([2, 6], dtype=torch.int32, device=device)

    def of(product):
        loss = torch.func.grad(lambda a, b: product(a, b).pow(3).sum(), argnums=(0, 1))
        return torch.func.grad(lambda a, b: sum(g.square().sum() for g in loss(a, b)), argnums=(0, 1))

    found = of(lambda a, b: grouped_mm(a, b, offsets))(rows, weight)
    assert_close_all(found, of(lambda a, b: torch.cat([a[:2] @ b[0].T, a[2:] @ b[1].T]))(rows, weight))


DOUBLES = (
    "(experts|up|down|unpermute|route)_backward cannot be differentiated: double backward is not supported"
)


@pytest.mark.parametrize("of", ["parameters", "x"])
def test_nested_func_grad_of_layers_is_refused(device, layer, of):
    """It would be zero where the outer transform did not see the operators of the inner one's backward."""
    module, parameters, x = layer
    argnums = 1 if of == "parameters" else 2

    def outer(*args):
        grads = torch.func.grad(loss_of, argnums)(*args)
        return sum(g.square().sum() for g in (grads.values() if of == "parameters" else [grads]))

    with pytest.raises(RuntimeError, match=DOUBLES):
        torch.func.grad(outer, argnums)(module, parameters, x)


def test_gradients_of_samples(device, layer):
    module, parameters, x = layer
    found = torch.func.vmap(torch.func.grad(loss_of, argnums=1), in_dims=(None, None, 0))(
        module, parameters, x
    )
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(loss_of(module, parameters, sample), list(parameters.values()))
        assert_close_all([grad[i] for grad in found.values()], expected)


def test_jacrev(device, layer):
    module, _, x = layer
    token = x[0, 0]
    expected = torch.autograd.functional.jacobian(module, token)
    torch.testing.assert_close(torch.func.jacrev(module)(token), expected)


def test_ensembles(device, layer):
    """vmap over stacked parameters, the batched plan within, trained by what is outside."""
    module, parameters, x = layer
    stacked = {n: torch.stack([p, 2 * p, -p]) for n, p in parameters.items()}
    stacked = {n: p.detach().requires_grad_() for n, p in stacked.items()}
    found = torch.func.vmap(lambda p, x: torch.func.functional_call(module, p, x))(stacked, x)
    expected = torch.stack(
        [
            torch.func.functional_call(module, {n: p[i] for n, p in stacked.items()}, sample)
            for i, sample in enumerate(x)
        ]
    )
    torch.testing.assert_close(found, expected)
    leaves = list(stacked.values())
    assert_close_all(*(torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)))


def test_gradients_of_a_frozen_layers_inputs_through_vmap(device, layer):
    module, _, x = layer
    module.requires_grad_(False)
    x.requires_grad_()
    found, expected = torch.func.vmap(module)(x), module(x)
    assert_close_all(*(torch.autograd.grad(out.square().sum(), x) for out in (found, expected)))


def test_a_training_layer_counts_under_transforms(device, layer):
    """Every sample's tokens, and what the counter was moved to is a plain tensor."""
    module, parameters, x = layer
    module.train()
    torch.func.vmap(torch.func.grad(loss_of, argnums=1), in_dims=(None, None, 0))(module, parameters, x)
    assert module.tokens_per_expert.sum() == x.size(0) * x.size(1) * module.top_k


# is_grads_batched and vectorize=True go through a vmap that is older than torch.func's.
VMAPS = {"torch.func": torch.func.vmap, "is_grads_batched": older_vmap}
TINY = Case(9, 6, 4, 3, 2, F32, bias=True)


def samples_of(name: str, args) -> list:
    """Two samples of each tensor among an operator's arguments: numbers are others in the second."""
    names = [a.name for a in getattr(ops.ops, name).default._schema.arguments]

    def samples(t, is_number):
        return (
            torch.stack([t, t / 2 if is_number and t.is_floating_point() else t]) if torch.is_tensor(t) else t
        )

    return [
        tree_map(lambda t, n=n: samples(t, n not in CODES), value)
        for n, value in zip(names, args, strict=True)
    ]


@pytest.mark.parametrize("depth", (1, 2))
@pytest.mark.parametrize("vmap", VMAPS)
@pytest.mark.parametrize("name", operator_calls(TINY, torch.device("cpu")))
def test_every_operator_under_vmap(drawn_calls, name, vmap, depth):
    """The results of one call after another, and what is written; also nested, and with lists batched. Each
    layout is in one of the two depths of either vmap, and in both over the two."""
    first = (depth + list(VMAPS).index(vmap)) % 2
    every = (drawn_calls(replace(TINY, layout=layout))[name] for layout in list(LAYOUTS)[first::2])
    for args in distinct(chain(*every)):
        args = samples_of(name, args)
        if depth == 2:  # the outer samples differ, the inner ones are equal
            args = tree_map(lambda t: torch.stack([t, t], 1) if torch.is_tensor(t) else t, args)
        leaves, spec = tree_flatten(args)
        places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)]

        def call(*tensors, leaves=leaves, spec=spec, places=places):
            given = dict(zip(places, tensors, strict=True))
            return call_operator(name, tree_unflatten([given.get(i, x) for i, x in enumerate(leaves)], spec))

        batched = call
        for _ in range(depth):
            batched = VMAPS[vmap](batched)
        found = batched(*(leaves[i] for i in places))
        for index in ((0,) * depth, (1,) * depth):
            expected = call(*(leaves[i][index] for i in places))
            assert_close_all([t[index] for t in found], expected)


LAYER_KINDS = {
    "float": {},
    "biases": {"bias": True, "gate_bias": True, "score_func": "sigmoid", "route_norm": True},
    "groups": {"num_expert_groups": 2, "num_limited_groups": 1, "load_balance_coeff": 1e-3},
    "shared": {"num_shared_experts": 1, "shared_expert_gate": True},
    **{format: {} for format in FORMATS},
}


def make_layer(kind: str, device) -> FusedMoE:
    """Float, or quantised with adapters."""
    layer = FusedMoE(64, 32, 4, 2, **LAYER_KINDS[kind], device=device)
    if kind in FORMATS:
        add_lora(quantize(layer, kind, **({"group_size": 32} if kind == "int4" else {})), 4)
        for name in ("b1", "b2", "b3"):
            torch.nn.init.normal_(getattr(layer.experts.lora, name), std=0.1)
    return layer


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_batched_gradients_of_a_layer(device, kind):
    """is_grads_batched and vectorize=True against one backward after another: of x and every parameter."""
    layer = make_layer(kind, device)
    x = torch.randn(2, 3, 64, device=device, requires_grad=True)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    out = layer(x)
    douts = torch.randn(3, *out.shape, device=device)
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    for i, dout in enumerate(douts):
        single = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert_close_all([grad[i] for grad in batched], single)
    token, jacobian = x[0, 0].detach(), torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(layer, token, vectorize=True), jacobian(layer, token))


def test_batched_gradients_of_fused_experts(device):
    """x, weights, biases and scores."""
    inputs, ids = TINY.inputs(device), TINY.ids(device)

    def out_of(*tensors):
        return fused_experts(**dict(zip(inputs, tensors, strict=True)), ids=ids)

    vectorized, one_by_one = (
        torch.autograd.functional.jacobian(out_of, tuple(inputs.values()), vectorize=v) for v in (True, False)
    )
    assert_close_all(vectorized, one_by_one)


def test_vmap_over_no_samples(device, rows):
    a, b, offsets = rows
    with pytest.raises(ValueError, match="expected vmap of grouped_mm over at least one sample, found 0"):
        torch.func.vmap(lambda x: grouped_mm(x, b, offsets))(a[:0])


def assert_close_all(found, expected):
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def experts_calls(device):
    """(function, name of the operator that refuses, its input), each function differentiable in the input."""
    x, logits = torch.randn(5, 16, device=device), torch.randn(5, 3, device=device)
    w1, w2, w3 = (torch.randn(3, *shape, device=device) for shape in ((8, 16), (16, 8), (8, 16)))
    scores, ids = route(logits, 2)
    _, plan = permute(x, ids, 3)
    counts = torch.tensor([2, 0, 3], device=device)
    offsets = counts.cumsum(0).int()
    return {
        "route": (lambda t: route(t, 2)[0], logits),
        "permute": (lambda t: permute(t, ids, 3)[0], x),
        "unpermute": (lambda t: unpermute(t, plan, scores), torch.randn(10, 16, device=device)),
        "grouped_mm": (lambda t: grouped_mm(t, w1, offsets), x),
        "experts_up": (lambda t: fused_experts(t, w1, w2, w3, scores, ids), x),
        "experts_down": (lambda t: fused_experts(x, w1, t, w3, scores, ids), w2),
        "experts_up_of_rows": (lambda t: grouped_mlp(t, w1, w2, w3, counts), x),
    }


@pytest.mark.parametrize("no_grad", (False, True))
@pytest.mark.parametrize("name", experts_calls(torch.device("cpu")))
def test_forward_mode_is_refused(device, name, no_grad):
    """Not answered with a tangent of zeros; other calls go on."""
    function, primal = experts_calls(device)[name]
    tangent = torch.randn_like(primal)
    operator = "experts(_up|_down)?" if name.startswith("experts") else name
    with torch.set_grad_enabled(not no_grad):
        with pytest.raises(NotImplementedError, match=f"{operator} has no forward-mode derivative"):
            torch.func.jvp(function, (primal,), (tangent,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(primal, tangent)
            with pytest.raises(NotImplementedError, match=f"{operator} has no forward-mode derivative"):
                function(dual)
            torch.testing.assert_close(function(primal), function(primal.clone()))


def test_the_reference_has_forward_mode(device):
    x, w = torch.randn(5, 16, device=device), torch.randn(3, 8, 16, device=device)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]], device=device)
    _, tangent = torch.func.jvp(
        lambda t: reference.fused_experts(t, w, w.mT, w, torch.ones(5, 2, device=device), ids), (x,), (x,)
    )
    assert tangent.count_nonzero()


MODES = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
SHARED = {"num_shared_experts": 1, "shared_expert_gate": True, "bias": True}


def frozen(layer):
    return layer.requires_grad_(False)


def quantised(layer):
    return add_lora(quantize(layer, "int8"), 4)


TRACED = {
    "plain": ({}, None),
    "shared": (SHARED, None),
    "balanced": ({"num_shared_experts": 1, "load_balance_coeff": 1e-3}, None),
    "frozen": (SHARED, frozen),
    "quantised": ({}, quantised),
    "quantised, frozen": ({}, lambda layer: frozen(quantised(layer))),
    "quantised, trained router": ({}, lambda layer: quantize(layer, "int8")),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings, change", TRACED.values(), ids=TRACED)
@pytest.mark.parametrize("shape", ((5, 16), (2, 3, 16)), ids=str)
def test_trace(device, settings, change, shape, mode, tmp_path):
    """A traced layer passes trace's own check, which traces again without gradients. It is saved and loaded,
    and takes any number of tokens."""
    layer = FusedMoE(16, 8, 4, 2, device=device, **settings)
    layer = layer if change is None else change(layer)
    with MODES[mode]():
        torch.jit.trace(layer, torch.randn(shape, device=device)).save(tmp_path / "layer.pt")
        traced = torch.jit.load(tmp_path / "layer.pt")
        for tokens in (shape[0], 1, 9, 0):
            x = torch.randn(tokens, *shape[1:], device=device)
            assert torch.equal(traced(x), layer(x))
    has_one_operator = "fused_moe::experts(" in str(traced.inlined_graph)
    assert has_one_operator == (change is frozen or (mode == "inference" and change is None))


@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_trace_of_eight_bits(device, bias, tmp_path):
    """A layer that has no gradient is traced without them. A traced one raises where it would need one."""
    layer = FusedMoE(64, 128, 4, 2, bias=bias, device=device, dtype=BF16)
    layer = quantize(layer, "int8", compute="int8")
    x = torch.randn(9, 64, device=device, dtype=BF16)
    with torch.no_grad():
        torch.jit.trace(layer, x[:5]).save(tmp_path / "layer.pt")
        traced = torch.jit.load(tmp_path / "layer.pt")
        assert torch.equal(traced(x), layer(x))
    with pytest.raises(RuntimeError, match="experts has no gradient"):
        traced(x.requires_grad_())


@pytest.mark.parametrize("format", FORMATS)
def test_trace_of_every_format(device, format, tmp_path):
    """Saved and loaded, with the gradient of x."""
    layer = quantize(FusedMoE(64, 32, 4, 2, device=device), format, **quantize_options(format))
    torch.jit.trace(layer, torch.randn(5, 64, device=device)).save(tmp_path / "layer.pt")
    traced = torch.jit.load(tmp_path / "layer.pt")
    x = torch.randn(9, 64, device=device, requires_grad=True)
    assert torch.equal(traced(x), layer(x))
    assert_close_all(*(torch.autograd.grad(run(x).sum(), x) for run in (traced, layer)))


@pytest.mark.parametrize("mode", MODES)
def test_trace_of_padding_and_given_ids(device, mode):
    layer = FusedMoE(16, 8, 4, 2, num_shared_experts=1, device=device)
    wrapped = Padded(layer)

    def batch(tokens):
        ids = torch.randint(4, (tokens, 2), device=device)
        return torch.randn(tokens, 16, device=device), ids, torch.tensor(tokens - 1, device=device)

    with MODES[mode]():
        traced = torch.jit.trace(wrapped, batch(5))
        for tokens in (2, 9):
            given = batch(tokens)
            assert torch.equal(traced(*given), wrapped(*given))


class Padded(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, ids, num_tokens):
        return self.layer(x, ids=ids, num_tokens=num_tokens)


def test_gradients_of_a_traced_layer(device):
    layer = FusedMoE(16, 8, 4, 2, device=device, **SHARED)
    traced = torch.jit.trace(layer, torch.randn(5, 16, device=device))
    x, found = torch.randn(9, 16, device=device), []
    for run in (layer, traced):
        layer.zero_grad()
        run(x).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for expected, grad in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected)


def test_trace_of_a_plan_from_counts(device):
    """Rows and counts are those of the call."""
    w1, w2, w3 = (torch.randn(3, *shape, device=device) for shape in ((8, 16), (16, 8), (8, 16)))

    def run(rows, counts):
        return grouped_mlp(rows, w1, w2, w3, counts)

    counts = torch.tensor([1, 0, 3], device=device)
    traced = torch.jit.trace(run, (torch.randn(6, 16, device=device), counts))
    for factor in (0, 1, 5):
        given = torch.randn(6 * factor, 16, device=device), factor * counts
        assert torch.equal(traced(*given), run(*given))


def test_torch_function_mode(device, rows):
    """It gets the operator's call, and what it does with the result is differentiated."""
    a, b, offsets = rows
    scale = torch.tensor(2.0, device=device, requires_grad=True)

    class Scale(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * scale if function is ops.ops.grouped_mm.default else result

    with Scale():
        out = grouped_mm(a[0], b, offsets)
    out.sum().backward()
    torch.testing.assert_close(scale.grad, grouped_mm(a[0], b, offsets).sum())


def test_dispatch_mode(device, rows):
    """Each operator is seen once."""
    a, b, offsets = rows
    with Calls() as calls:
        grouped_mm(a[0], b, offsets)
    assert [name for name, *_ in calls.calls if "fused_moe" in name] == ["fused_moe::grouped_mm"]


def test_a_plain_call_goes_past_the_dispatcher(device, rows):
    """The sets of dispatch keys that `run` compares are PyTorch's; if these change, calls become slower."""
    a, b, offsets = rows
    assert ops._is_plain((a, b, offsets))
    with torch.autocast(device.type, torch.bfloat16):
        assert not ops._is_plain((a, b, offsets))
    with Calls():
        assert not ops._is_plain((a, b, offsets))
