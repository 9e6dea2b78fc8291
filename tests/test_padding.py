"""num_tokens: tokens from it on get no row, zero output and zero gradient, and nothing reads what they hold.
ids: a recorded choice is replayed. Both with the results of a call that never saw them."""

import copy
import itertools

import pytest
import torch
from cases import BF16, F16, F32, F64, Calls, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from test_module import EVERYTHING, SETTINGS, pair
from torch import nn
from torch.utils._pytree import tree_leaves

import fused_moe
from fused_moe import FusedMoE, load_balancing_loss, reference, route, router_z_loss
from fused_moe.ops import SCORE_FUNCS

pytestmark = pytest.mark.usefixtures("poison")

NAN = float("nan")
T, E, K = 12, 8, 2
COUNTS = (-3, 0, 1, 5, T - 1, T, T + 9)
DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
OPTIONS = {
    "softmax": {},
    "sigmoid": {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
    "sqrtsoftplus": {"score_func": "sqrtsoftplus", "route_norm": True, "route_norm_eps": 1e-3},
    "groups": {"route_norm": True, "num_expert_groups": 4, "num_limited_groups": 2, "group_score": "max"},
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
CHOICES = {
    "softmax": {},
    "sigmoid": {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
    "groups": {"groups": True, "route_norm": True, "num_expert_groups": 2, "num_limited_groups": 2},
}
GIVEN_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64)


def clamped(count: int) -> int:
    return max(0, min(count, T))


def scalars(count: int, device):
    """The number in every form that is taken."""
    for dtype, shape in itertools.product((torch.int32, torch.int64), ((), (1,), (1, 1))):
        yield torch.full(shape, count, dtype=dtype, device=device)


def poisoned_from(count: int, x: torch.Tensor) -> torch.Tensor:
    """A copy of x with NaN in its padded rows."""
    x = x.clone()
    x[count:] = NAN
    return x


def routed(logits, dscores, top_k=K, **options) -> dict:
    logits = logits.detach().requires_grad_()
    scores, ids = route(logits, top_k, **options)
    (dlogits,) = torch.autograd.grad(scores, logits, dscores)
    return {"scores": scores.detach(), "ids": ids, "dlogits": dlogits}


# --- route ----------------------------------------------------------------------------------------------


@pytest.mark.quick(one_in=5)
@DTYPES
@EVERY_OPTION
@pytest.mark.parametrize("count", COUNTS)
def test_route(device, count, options, dtype):
    """The bits of the real tokens alone; -1 and zeros for padding, whose logits and gradients are NaN."""
    n = clamped(count)
    logits, dscores = torch.randn(T, E, device=device).to(dtype), torch.randn(T, K, device=device)
    dscores = dscores.to(F64) if dtype == F64 else dscores
    dirty = poisoned_from(n, logits), poisoned_from(n, dscores)
    expected = routed(logits[:n], dscores[:n], **options)
    for num_tokens in scalars(count, device):
        found = routed(*dirty, **options, num_tokens=num_tokens)
        assert_same_bits({name: t[:n] for name, t in found.items()}, expected)
        assert (found["ids"][n:] == -1).all()
        assert not found["scores"][n:].count_nonzero() and not found["dlogits"][n:].count_nonzero()


@DTYPES
@EVERY_OPTION
def test_a_choice_replayed(device, options, dtype):
    """The same bits, from int32 and int64 ids, in scores and in their gradient; a bias that would choose
    others is not consulted, nor are groups."""
    logits, dscores = torch.randn(T, E, device=device).to(dtype), torch.randn(T, K, device=device)
    dscores = dscores.to(F64) if dtype == F64 else dscores
    chosen = routed(logits, dscores, **options)
    bias = torch.randn(E, device=device) * 100
    for ids in (chosen["ids"], chosen["ids"].long()):
        assert_same_bits(routed(logits, dscores, **options, ids=ids, bias=bias), chosen)


@pytest.mark.parametrize("dtype", GIVEN_DTYPES, ids=str)
def test_ids_of_any_dtype(device, dtype):
    """The bits of the choice itself, in every dtype that holds the ids; a -1 where there are signs."""
    for num_experts in {E, min(256, torch.iinfo(dtype).max + 1)}:
        logits, dscores = torch.randn(T, num_experts, device=device), torch.randn(T, K, device=device)
        chosen = routed(logits, dscores)
        assert_same_bits(routed(logits, dscores, ids=chosen["ids"].to(dtype)), chosen)
        if dtype.is_signed:
            ids = chosen["ids"].clone()
            ids[::2], ids[1, 1] = -1, -1
            assert_same_bits(
                routed(logits, dscores, ids=ids.to(dtype)), routed(logits, dscores, ids=ids.long())
            )


@pytest.mark.parametrize("num_experts, top_k", ((24, 1), (24, 8), (70, 9), (300, 2), (300, 20)))
@pytest.mark.parametrize("dtype", (F32, BF16, F64), ids=("f32", "bf16", "f64"))
@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_tokens_without_a_choice(device, options, dtype, num_experts, top_k):
    """A token whose ids are all -1 has the bits of the router's choice, whatever is given to the others: a
    choice or one expert and remote slots. The others have the bits that they have alone. Padding stays
    padding."""
    logits = torch.randn(40, num_experts, device=device).to(dtype)
    dscores = torch.randn(40, top_k, device=device).to(F64 if dtype == F64 else F32)
    options = {**options, "bias": torch.randn(num_experts, device=device)} if "groups" in options else options
    options = {name: value for name, value in options.items() if name != "groups"}
    chosen = routed(logits, dscores, top_k, **options)
    given = torch.rand(40, num_experts, device=device).topk(top_k).indices.int()
    given[::3, 1:] = -1
    fixed = {name: value for name, value in options.items() if "group" not in name and name != "bias"}
    alone = routed(logits, dscores, top_k, **fixed, ids=given)
    for chooses in (torch.arange(40) % 5 == 0, torch.arange(40) == 11, torch.arange(40) >= 0):
        chooses = chooses.to(device)
        ids = given.clone()
        ids[chooses] = -1
        for num_tokens in (None, torch.tensor(33, device=device)):
            found = routed(logits, dscores, top_k, **options, ids=ids, num_tokens=num_tokens)
            for name, value in found.items():
                expected = torch.where(chooses[:, None], chosen[name], alone[name])
                if num_tokens is not None:
                    expected[33:] = -1 if name == "ids" else 0
                assert torch.equal(value, expected), name


def test_the_reference_lets_tokens_choose(device):
    """Ids that are all -1, beside others, alone in a slot, and beside padding."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=F64, device=device).repeat(4, 1)
    ids = torch.tensor([[-1, -1], [-1, 0], [0, 1], [-1, -1]], device=device)
    num_tokens = torch.tensor(3, device=device)
    scores, found = reference.route(logits, 2, ids=ids, route_norm=True, num_tokens=num_tokens)
    assert found.tolist() == [[3, 2], [-1, 0], [0, 1], [-1, -1]]
    e = torch.e
    expected = [[e / (1 + e), 1 / (1 + e)], [0, 1], [1 / (1 + e), e / (1 + e)], [0, 0]]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=F64, device=device))


@given(
    top_k=st.sampled_from((1, 2, 5, 8, 17, 32)),
    num_experts=st.sampled_from((32, 40, 129, 520, 1024)),
    options=st.sampled_from(list(OPTIONS.values())[:2]),
    distinct=st.sampled_from((1, 3, 1000)),
    seed=st.integers(0, 99),
)
def test_any_ids(device, top_k, num_experts, options, distinct, seed):
    """Ids that no choice would have made, many of them equal or -1: the reference's scores and gradients."""
    draw = {"generator": torch.Generator().manual_seed(seed)}
    ids = torch.randint(-1, min(distinct, num_experts), (T, top_k), **draw).to(device)
    ids[2::5] = -1
    logits = torch.randn(T, num_experts, dtype=F64, **draw).to(device)
    dscores = torch.randn(T, top_k, dtype=F64, **draw).to(device)
    num_tokens = torch.tensor(9, device=device)
    for dtype, given_ids in ((F64, ids), (F32, ids.int())):
        fixed = {**options, "ids": given_ids, "num_tokens": num_tokens}
        found = routed(logits.to(dtype), dscores.to(dtype), top_k, **fixed)
        leaf = logits.to(dtype).double().requires_grad_()
        scores, exact_ids = reference.route(leaf, top_k, **options, ids=ids, num_tokens=num_tokens)
        (dlogits,) = torch.autograd.grad(scores, leaf, dscores.to(dtype).double())
        assert torch.equal(found["ids"], exact_ids)
        near = {"rtol": 1e-4, "atol": 1e-5} if dtype == F32 else {}
        torch.testing.assert_close(found["scores"].double(), scores, **near)
        torch.testing.assert_close(found["dlogits"].double(), dlogits, **near)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@EVERY_OPTION
def test_remote_ids(device, options, dtype):
    """The operator takes any ids: outside [0, E) a slot has id -1, score 0 and no gradient, and the token's
    other scores are normalised without it. A token of such slots alone has zeros, whatever its logits."""
    eps = options.get("route_norm_eps", 1e-20)
    options = {n: options[n] for n in ("score_func", "route_norm", "route_scale") if n in options}
    settings = (SCORE_FUNCS[options.get("score_func", "softmax")],)
    settings += (options.get("route_norm", False), options.get("route_scale", 1.0), eps)
    logits, dscores = torch.randn(T, E, device=device), torch.randn(T, K, device=device)
    ids = torch.randint(E, (T, K), dtype=dtype, device=device)
    info = torch.iinfo(dtype)
    outside = torch.tensor([-1, E, info.min, info.max, *([2**32 + 1] if dtype == torch.int64 else [E + 1])])
    ids[:5, 1] = outside.to(device, dtype)
    ids[5:7] = E
    ids[6, 0] = -1
    logits[6] = NAN
    dscores[:5, 1] = dscores[5:7] = NAN
    scores, kept = torch.ops.fused_moe.route(logits, None, K, *settings, 0, 0, 0, ids)
    dlogits = torch.ops.fused_moe.route_backward(dscores, logits, kept, *settings)
    assert (kept[:5, 1] == -1).all() and (kept[5:7] == -1).all() and torch.equal(kept[7:], ids[7:].int())
    assert not scores[:5, 1].count_nonzero() and not scores[5:7].count_nonzero()
    assert not dlogits[5:7].count_nonzero()
    options["route_norm_eps"] = eps
    alone = routed(logits[:5], dscores[:5, :1], 1, **options, ids=ids[:5, :1])
    torch.testing.assert_close(scores[:5, :1], alone["scores"])
    torch.testing.assert_close(dlogits[:5], alone["dlogits"], rtol=1e-5, atol=1e-6)


def test_out_of_range_values_are_read_on_the_cpu_alone(cpu):
    """Ids of real tokens are read; those of padding are not."""
    logits, ids = torch.randn(T, E), torch.zeros(T, K, dtype=torch.int32)
    ids[5, 1] = E
    with pytest.raises(ValueError, match=r"route: expected ids from -1 to 7, found ids\[5, 1\] = 8"):
        route(logits, K, ids=ids)
    with pytest.raises(ValueError, match=r"ids\[5, 1\] = 8"):
        route(logits, K, ids=ids, num_tokens=torch.tensor(6))
    assert (route(logits, K, ids=ids, num_tokens=torch.tensor(5))[1][5:] == -1).all()


# --- the layer ------------------------------------------------------------------------------------------


def called(layer, x, dout, **options) -> dict:
    """{"out", "ids", the losses, "dx", and every parameter's gradient}; the counter."""
    x = x.detach().requires_grad_()
    layer.tokens_per_expert.zero_()
    out, losses, ids = layer(x, return_losses=True, return_ids=True, **options)
    leaves = {"dx": x, **dict(layer.named_parameters())}
    total = (out.double(), losses.load_balancing, losses.z)
    ones = (dout.double(), torch.ones_like(losses.z), torch.ones_like(losses.z))
    grads = torch.autograd.grad(total, [*leaves.values()], ones)
    found = {"out": out.detach(), "ids": ids, "balance": losses.load_balancing.detach()}
    found |= {"z": losses.z.detach(), "counts": layer.tokens_per_expert.clone()}
    return found | dict(zip(leaves, grads, strict=True))


def assert_padded(found: dict, expected: dict, n: int) -> None:
    """`expected` is of the first n tokens alone."""
    for name, value in expected.items():
        mine = found[name]
        if name in ("out", "ids", "dx"):
            tail = mine[n:] + (name == "ids")
            assert not tail.count_nonzero(), f"{name} of padding"
            mine = mine[:n]
        torch.testing.assert_close(mine, value, msg=lambda text, name=name: f"{name}: {text}")


def apart(layer):
    """The router and the experts are two autograd nodes."""
    layer.router.register_forward_hook(lambda *_: None)


def hooked(layer):
    """The shared experts' own linear layers are called."""
    apart(layer)
    if layer.shared_experts is not None:
        layer.shared_experts.w2.register_forward_hook(lambda *_: None)


def foreign(layer):
    """The gate is PyTorch's, and the shared experts are not ours."""
    gate = nn.Linear(layer.dim, layer.num_experts, bias=layer.router.gate.bias is not None)
    gate.weight, gate.bias = layer.router.gate.weight, layer.router.gate.bias
    layer.router.gate = gate
    if layer.shared_experts is not None:
        layer.shared_experts.register_forward_hook(lambda *_: None)


def compiled(layer):
    layer.compile(fullgraph=True, backend="aot_eager", dynamic=False)


FORMS = {
    "joined": lambda layer: None,
    "apart": apart,
    "hooked": hooked,
    "foreign": foreign,
    "compiled": compiled,
}
ALL_SETTINGS = {**SETTINGS, "everything": EVERYTHING}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_layer(device, settings, form):
    """Output, losses, counts and every gradient of the real tokens alone, x and dout of the others NaN."""
    layer, loop = pair(device, F64, **ALL_SETTINGS[settings])
    FORMS[form](layer)
    torch._dynamo.reset()
    x, dout = (torch.randn(T, 24, dtype=F64, device=device) for _ in range(2))
    for count in (0, 7, T, T + 9) if form != "compiled" else (7, 0):
        n = clamped(count)
        expected = called(loop, x[:n], dout[:n])
        num_tokens = torch.tensor([count], device=device)
        for kind in (layer, loop):
            found = called(kind, poisoned_from(n, x), poisoned_from(n, dout), num_tokens=num_tokens)
            assert_padded(found, expected, n)


@pytest.mark.quick(one_in=4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", ALL_SETTINGS)
@torch.no_grad()
def test_layer_without_gradients(device, settings, form):
    """The same of the output; ours has then no kernel more than without num_tokens."""
    layer, _ = pair(device, F32, **ALL_SETTINGS[settings])
    alone = copy.deepcopy(layer) if form == "compiled" else layer  # which would compile each number of tokens
    FORMS[form](layer)
    x = torch.randn(T, 24, device=device)
    torch._dynamo.reset()
    for count in COUNTS:
        n = clamped(count)
        out, ids = layer(poisoned_from(n, x), num_tokens=torch.tensor(count, device=device), return_ids=True)
        assert not out[n:].count_nonzero() and (ids[n:] == -1).all()
        expected, expected_ids = alone(x[:n], return_ids=True)
        torch.testing.assert_close(out[:n], expected)
        assert torch.equal(ids[:n], expected_ids)


class DynamicallyScaled(nn.Linear):
    """Divides x by its largest element first, as dynamic quantisation does: one NaN is in every row."""

    def forward(self, x):
        scale = x.abs().amax().clamp_min(1e-3)
        return nn.functional.linear(x / scale, self.weight, self.bias) * scale


@pytest.mark.parametrize("where", ("router.gate", "shared_experts.w1", "shared_expert_gate"))
@pytest.mark.parametrize("gradients", (False, True))
def test_modules_that_mix_rows(device, where, gradients):
    """They see zeros in place of padding."""
    layer = FusedMoE(24, 20, E, K, num_shared_experts=1, shared_expert_gate=True, device=device)
    name, _, last = where.rpartition(".")
    parent, linear = layer.get_submodule(name), layer.get_submodule(where)
    other = DynamicallyScaled(linear.in_features, linear.out_features, linear.bias is not None, device=device)
    other.load_state_dict(linear.state_dict())
    setattr(parent, last, other)
    x = torch.randn(T, 24, device=device)
    with torch.set_grad_enabled(gradients):
        for count in (7, 0):
            out = layer(poisoned_from(count, x), num_tokens=torch.tensor(count, device=device))
            assert not out[count:].count_nonzero()
            if count:
                torch.testing.assert_close(out[:count], layer(x[:count]))


def test_no_pass_over_x_without_gradients(device):
    """Where our operators alone read x, none of PyTorch's copies it."""
    layer = FusedMoE(24, 20, E, K, num_shared_experts=1, shared_expert_gate=True, device=device).eval()
    x, num_tokens = torch.randn(T, 24, device=device), torch.tensor(5, device=device)
    with torch.no_grad(), Calls() as calls:
        layer(x, num_tokens=num_tokens)
    made = [(name, r.shape) for name, _, results in calls.calls for r in tree_leaves(results)]
    assert {name.split("::")[0] for name, shape in made if shape == x.shape} == {"fused_moe"}, made


def new_tensors(layer, *args, **given) -> int:
    """How many operators of a call make new tensors, each a launch or more on a GPU."""
    with torch.no_grad(), Calls() as calls:
        layer(*args, **given)
    storages = [{t.untyped_storage().data_ptr() for t in tree_leaves(args) if torch.is_tensor(t)}
                for _, args, _ in calls.calls]  # fmt: skip
    results = [tree_leaves(result)[0].untyped_storage().data_ptr() for _, _, result in calls.calls]
    return sum(result not in given for result, given in zip(results, storages, strict=True))


@pytest.mark.parametrize(
    "more, settings, hooked",
    (
        (0, {}, None),
        (0, {"load_balance_coeff": 1e-3, "num_expert_groups": 2, "num_limited_groups": 1}, None),
        (0, {"num_shared_experts": 1}, None),
        (4, {"num_shared_experts": 1, "shared_expert_gate": True}, None),
        (4, {}, "router.gate"),
        (8, {"num_shared_experts": 1}, "shared_experts"),
    ),
)
def test_what_padding_adds_without_gradients(device, more, settings, hooked):
    """No launch, except for the gate of the shared experts and for foreign modules."""
    layer = FusedMoE(24, 20, E, K, **settings, device=device).eval()
    if hooked:
        layer.get_submodule(hooked).register_forward_hook(lambda module, args, result: None)
    x, num_tokens = torch.randn(T, 24, device=device), torch.tensor(5, device=device)
    assert new_tensors(layer, x, num_tokens=num_tokens) == new_tensors(layer, x) + more


@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_a_layer_replays_its_choice(device, settings):
    """Ids of every token, and of the first ones: the same bits, counts and losses, in any leading shape, also
    after an update of the bias that would choose others."""
    layer = FusedMoE(24, 20, E, K, **ALL_SETTINGS[settings], device=device)
    x, dout = (torch.randn(T, 24, device=device) for _ in range(2))
    for options in ({}, {"num_tokens": torch.tensor(7, device=device)}):
        first = called(layer, x, dout, **options)
        if layer.expert_bias is not None:
            layer.expert_bias.add_(torch.randn(E, device=device) * 100)
        again = called(layer, x, dout, ids=first["ids"], **options)
        assert_same_bits(again, first)
        cube = (3, 4, -1)
        again = called(layer, x.view(cube), dout.view(cube), ids=first["ids"].view(cube).long(), **options)
        assert again["ids"].shape == (3, 4, K)
        assert_same_bits({n: t.flatten(0, 1) if t.dim() == 3 and n in ("out", "ids", "dx") else t
                          for n, t in again.items()}, first)  # fmt: skip


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "no grad"))
@pytest.mark.parametrize("settings", ALL_SETTINGS)
def test_a_layer_chooses_where_ids_are_all_minus_one(device, settings, grad):
    """Half of the tokens have been chosen for: the bits, counts and losses of the choice itself, with padding
    that stays padding, and ids of fewer bytes."""
    layer = FusedMoE(24, 20, E, K, **ALL_SETTINGS[settings], device=device)
    x, dout = (torch.randn(T, 24, device=device) for _ in range(2))
    for options in ({}, {"num_tokens": torch.tensor(7, device=device)}):
        expected = called(layer, x, dout, **options)
        ids = expected["ids"].clone()
        ids[::2] = -1
        for dtype in (torch.int32, torch.int8, torch.int64):
            if grad:
                assert_same_bits(called(layer, x, dout, ids=ids.to(dtype), **options), expected)
            else:
                with torch.no_grad():
                    out, found = layer(x, ids=ids.to(dtype), return_ids=True, **options)
                    assert torch.equal(out, layer(x, **options)) and torch.equal(found, expected["ids"])


def test_other_ids(device):
    """Ids that the router did not choose, some equal: the loop's results."""
    layer, loop = pair(device, F64, **EVERYTHING)
    x, dout = (torch.randn(T, 24, dtype=F64, device=device) for _ in range(2))
    ids = torch.randint(3, (T, K), device=device)
    expected = called(loop, x, dout, ids=ids)
    assert torch.equal(expected["ids"], ids.int())
    assert_padded(called(layer, x, dout, ids=ids), expected, T)


@pytest.mark.parametrize("shape", ((24,), (0, 24), (2, 0, 24), (1, 24), (2, 3, 24)))
def test_leading_shapes(device, shape):
    """One token without a batch, and none at all: ids have x's leading shape."""
    layer = FusedMoE(24, 20, E, K, num_shared_experts=1, device=device)
    x = torch.randn(shape, device=device)
    out, ids = layer(x, return_ids=True)
    assert ids.shape == (*shape[:-1], K) and ids.dtype == torch.int32
    num_tokens = torch.tensor(99, device=device)
    assert torch.equal(layer(x, ids=ids, num_tokens=num_tokens), out)
    assert not layer(x, num_tokens=torch.zeros_like(num_tokens)).count_nonzero()


def test_results_in_order(device):
    """out, then the losses, then the ids, of those that are asked for."""
    layer, x = FusedMoE(24, 20, E, K, device=device), torch.randn(T, 24, device=device)
    assert isinstance(layer(x), torch.Tensor)
    out, ids = layer(x, return_ids=True)
    all_out, losses, all_ids = layer(x, return_ids=True, return_losses=True)
    assert torch.equal(all_out, out) and torch.equal(all_ids, ids)
    assert losses._fields == ("load_balancing", "z")


def test_autocast(device):
    """Casts as without num_tokens."""
    layer = FusedMoE(24, 20, E, K, **EVERYTHING, device=device)
    x, num_tokens = torch.randn(T, 24, device=device), torch.tensor(7, device=device)
    with torch.autocast(device.type, BF16):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = layer(poisoned_from(7, x), num_tokens=num_tokens)
                expected = layer(x[:7])
                assert out.dtype == expected.dtype and not out[7:].count_nonzero()
                torch.testing.assert_close(out[:7], expected)


def test_checkpointing_counts_once(device):
    """Recomputed with the same num_tokens; the counter has the real tokens, once."""
    layer = FusedMoE(24, 20, E, K, device=device)
    x = poisoned_from(7, torch.randn(T, 24, device=device)).requires_grad_()
    num_tokens = torch.tensor(7, device=device)
    out = torch.utils.checkpoint.checkpoint(layer, x, num_tokens=num_tokens, use_reentrant=False)
    out.sum().backward()
    assert layer.tokens_per_expert.sum() == 7 * K and x.grad.isfinite().all()
    layer.eval()(x, num_tokens=num_tokens)
    assert layer.tokens_per_expert.sum() == 7 * K


def test_one_compiled_graph_for_any_count(device):
    """num_tokens is data: no count compiles again."""
    layer = FusedMoE(24, 20, E, K, num_shared_experts=1, load_balance_coeff=1e-3, device=device)
    torch._dynamo.reset()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, num_tokens = torch.randn(T, 24, device=device), torch.tensor(0, device=device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in range(T + 1):
            num_tokens.fill_(count)
            out, losses, ids = graph(x, num_tokens=num_tokens, return_losses=True, return_ids=True)
            expected = layer(x, num_tokens=num_tokens, return_losses=True, return_ids=True)
            torch.testing.assert_close((out, losses, ids), expected)
    torch._dynamo.reset()


def test_export(device):
    """num_tokens and ids are inputs of the exported program."""
    layer = FusedMoE(24, 20, E, K, num_shared_experts=1, device=device).eval()
    x, num_tokens = torch.randn(T, 24, device=device), torch.tensor(5, device=device)
    with torch.no_grad():
        _, ids = layer(x, return_ids=True)
        options = {"num_tokens": num_tokens, "ids": ids}
        program = torch.export.export(layer, (x,), options).module()
        for count in COUNTS:
            options = {"num_tokens": torch.tensor(count, device=device), "ids": ids.flip(0).contiguous()}
            assert torch.equal(program(x, **options), layer(x, **options))


# --- losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_losses(device, count):
    """Losses are those of the real tokens alone; NaN in the others gets gradients of zero."""
    n = clamped(count)
    logits = torch.randn(3, T // 3, E, dtype=F64, device=device)
    ids = route(logits.view(T, E), K)[1]
    clean = logits.view(T, E)[:n].clone().requires_grad_()
    dirty = poisoned_from(n, logits.view(T, E)).view_as(logits).requires_grad_()
    for num_tokens in scalars(count, device):
        of_dirty, of_clean = (dirty, ids.view(3, -1, K), E), (clean, ids[:n], E)
        losses = (
            (load_balancing_loss(*of_dirty, num_tokens=num_tokens), load_balancing_loss(*of_clean)),
            (router_z_loss(dirty, num_tokens=num_tokens), router_z_loss(clean)),
        )
        for found, expected in losses:
            torch.testing.assert_close(found, expected)
            (grad,) = torch.autograd.grad(found, dirty)
            (expected_grad,) = torch.autograd.grad(expected, clean)
            torch.testing.assert_close(grad.view(T, E)[:n], expected_grad)
            assert not grad.view(T, E)[n:].count_nonzero()


# --- what is wrong --------------------------------------------------------------------------------------

LAYER = FusedMoE(24, 20, E, K)
X = torch.zeros(3, 4, 24)
WRONG_CALLS = [
    ({"num_tokens": 5}, TypeError, "num_tokens to be a tensor of one integer, found int 5"),
    ({"num_tokens": torch.tensor(5.0)}, TypeError, "num_tokens of dtype int32 or int64, found torch.float32"),
    ({"num_tokens": torch.tensor(True)}, TypeError, "num_tokens of dtype int32 or int64, found torch.bool"),
    ({"num_tokens": torch.tensor([5, 5])}, ValueError, "num_tokens of one element, found shape (2,)"),
    ({"num_tokens": torch.zeros(0).int()}, ValueError, "num_tokens of one element, found shape (0,)"),
    ({"num_tokens": torch.tensor(5).to("meta")}, ValueError, "num_tokens on x's device cpu, found meta"),
    ({"ids": [[0, 1]]}, TypeError, "ids to be a tensor, found list"),
    (
        {"ids": torch.zeros(3, 4, K)},
        TypeError,
        "ids of dtype int32 or int64 or int16 or int8 or uint8 or uint16, found torch.float32",
    ),
    ({"ids": torch.zeros(T, K).int()}, ValueError, "ids of 3 dimensions, found shape (12, 2)"),
    ({"ids": torch.zeros(3, 4, 3).int()}, ValueError, "ids of shape (..., K) = (3, 4, 2), found (3, 4, 3)"),
    ({"ids": torch.zeros(3, 4, K).int().to("meta")}, ValueError, "ids on x's device cpu, found meta"),
]


@pytest.mark.parametrize("options, error, message", WRONG_CALLS, ids=[call[2] for call in WRONG_CALLS])
def test_wrong_calls_of_the_layer(cpu, options, error, message):
    with pytest.raises(error) as raised:
        LAYER(X, **options)
    assert str(raised.value) == f"FusedMoE: expected {message}"


def test_a_copied_layer_replays(device):
    """return_ids of one layer are ids= of another: the policy's choice in the trainer."""
    sampler = FusedMoE(24, 20, E, K, device=device).eval()
    trainer = copy.deepcopy(sampler).train()
    with torch.no_grad():
        trainer.router.gate.weight.add_(torch.randn_like(trainer.router.gate.weight))
    x = torch.randn(T, 24, device=device)
    _, ids = sampler(x, return_ids=True)
    out, replayed = trainer(x, ids=ids, return_ids=True)
    assert torch.equal(replayed, ids)
    scores, _ = fused_moe.route(fused_moe.router_logits(x, trainer.router.gate.weight), K, ids=ids)
    experts = trainer.experts
    expected = fused_moe.fused_experts(x, *experts.weights, scores, ids)
    torch.testing.assert_close(out, expected)
