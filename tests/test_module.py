"""FusedMoE: names, initialisation, equality with the reference's layer, balancing and reports."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.multiprocessing
from cases import BF16, F16, F32, F64, assert_as_good
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import FusedMoE, add_lora, load_balancing_loss, reference, router_z_loss
from fused_moe.module import PATIENCE

EVERYTHING = {
    "num_shared_experts": 2,
    "shared_expert_gate": True,
    "load_balance_coeff": 1e-2,
    "bias": True,
    "gate_bias": True,
}
SETTINGS = {
    "plain": {},
    "deepseek": {
        "score_func": "sigmoid", "route_norm": True, "route_scale": 2.5, "num_expert_groups": 4,
        "num_limited_groups": 2, "num_shared_experts": 1, "load_balance_coeff": 1e-3,
    },
    "qwen2": {"route_norm": True, "num_shared_experts": 2, "shared_expert_gate": True},
    "biases": {"bias": True, "gate_bias": True, "activation": "gelu"},
    "ungated": {"gated": False, "activation": "relu", "bias": True, "num_shared_experts": 1},
    "gpt-oss": {"activation": "swiglu_clamped", "alpha": 1.3, "limit": 0.2, "bias": True},
    "deepseek-v4": {
        "activation": "swiglu_limited", "limit": 0.3, "num_shared_experts": 1, "route_norm": True,
        "score_func": "sqrtsoftplus", "load_balance_coeff": 1e-3,
    },
    "kimi-k3": {
        "activation": "situ", "alpha": 0.5, "limit": 2.0, "score_func": "sigmoid", "num_shared_experts": 1,
    },
    "nemotron": {
        "activation": "relu2", "gated": False, "score_func": "sigmoid", "route_norm": True,
        "num_shared_experts": 1,
    },
    "deepseek-v2": {"num_expert_groups": 4, "num_limited_groups": 2, "group_score": "max"},
    "gemma4": {"route_norm": True, "route_norm_eps": 1e-2, "expert_scale": True, "activation": "gelu_tanh"},
}  # fmt: skip


def pair(device, dtype=None, dim=24, hidden=20, experts=8, top_k=2, **settings):
    """FusedMoE and the reference's layer with the same parameters."""
    size = (dim, hidden, experts, top_k)
    ours = FusedMoE(*size, **settings, device=device, dtype=dtype)
    if ours.router.expert_scale is not None:
        nn.init.normal_(ours.router.expert_scale)
    loop = reference.FusedMoE(*size, **settings, device=device, dtype=dtype)
    loop.load_state_dict(ours.state_dict())
    return ours, loop


def run(layer, x, dout) -> dict:
    """{"out", "dx", and every parameter's gradient}."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = layer(x)
    out.backward(dout)
    grads = {n: p.grad for n, p in layer.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, **grads}


# --- names and parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("module", (FusedMoE, reference.FusedMoE), ids=("ours", "reference"))
@pytest.mark.parametrize("shape", ((6, 16), (2, 3, 16), (1, 2, 3, 16), (16,)), ids=str)
def test_results_are_no_views(device, module, shape):
    """Which may be written in place, with FSDP2's hooks on them."""
    layer = module(16, 12, 6, 2, num_shared_experts=1, shared_expert_gate=True, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    for result in (layer(x), layer.router.gate(x)):
        assert not result._is_view() and result.requires_grad
    out = layer(x)
    out += x
    out.square().sum().backward()
    twin = x.detach().requires_grad_()
    (layer(twin) + twin).square().sum().backward()
    assert torch.equal(x.grad, twin.grad)


@pytest.mark.quick
def test_state_dict_has_torchtitans_names(device):
    """Parameters and persistent buffers by the names of torchtitan, with their shapes."""
    layer = FusedMoE(6, 4, 3, 1, **EVERYTHING, device=device)
    assert {n: tuple(t.shape) for n, t in layer.state_dict().items()} == {
        "expert_bias": (3,),
        "router.gate.weight": (3, 6),
        "router.gate.bias": (3,),
        "experts.w1": (3, 4, 6),
        "experts.w2": (3, 6, 4),
        "experts.w3": (3, 4, 6),
        "experts.b1": (3, 4),
        "experts.b2": (3, 6),
        "experts.b3": (3, 4),
        "shared_experts.w1.weight": (8, 6),
        "shared_experts.w1.bias": (8,),
        "shared_experts.w2.weight": (6, 8),
        "shared_experts.w2.bias": (6,),
        "shared_experts.w3.weight": (8, 6),
        "shared_experts.w3.bias": (8,),
        "shared_expert_gate.weight": (1, 6),
    }
    assert dict(layer.named_buffers()).keys() == {"expert_bias"}


def test_plain_state_dict(device):
    """Without options: the gate and three weights, and no buffer is stored."""
    layer = FusedMoE(6, 4, 3, 1, device=device)
    names = ["router.gate.weight", "experts.w1", "experts.w2", "experts.w3"]
    assert list(layer.state_dict()) == names
    assert layer.expert_bias is None
    assert list(FusedMoE(6, 4, 3, 1, gated=False).state_dict()) == names[:3]


def test_state_dict_round_trip(device):
    """A loaded layer gives the saved layer's bits."""
    layer = FusedMoE(6, 4, 3, 2, **EVERYTHING, device=device)
    layer.expert_bias.normal_()
    other = FusedMoE(6, 4, 3, 2, **EVERYTHING, device=device)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(10, 6, device=device)
    assert torch.equal(layer(x), other(x))


@pytest.mark.quick
@pytest.mark.parametrize("settings", SETTINGS)
def test_same_seed_same_parameters_as_the_reference(device, settings):
    """FusedMoE and reference.FusedMoE initialise the same parameters in the same order."""
    layers = []
    for kind in (FusedMoE, reference.FusedMoE, FusedMoE):
        torch.manual_seed(7)
        layers.append(kind(12, 8, 8, 2, **SETTINGS[settings], device=device))
    torch.manual_seed(7)
    layers[2].reset_parameters()
    first = layers[0].state_dict()
    for layer in layers[1:]:
        assert layer.state_dict().keys() == first.keys()
        for name, value in layer.state_dict().items():
            assert torch.equal(value, first[name]), name


def test_initial_scale(device):
    """Weights are uniform in +-1/sqrt(fan in), as nn.Linear's."""
    layer = FusedMoE(64, 16, 8, 2, bias=True, device=device)
    for name, fan_in in (("w1", 64), ("w2", 16), ("w3", 64), ("b1", 64), ("b2", 16), ("b3", 64)):
        value = getattr(layer.experts, name)
        bound = fan_in**-0.5
        assert 0.9 * bound < value.abs().max() <= bound, name
        assert value.mean().abs() < 0.2 * bound


def test_meta_device(device):
    """A layer made on meta, then to_empty and reset, equals a layer made on the device."""
    layer = FusedMoE(12, 8, 8, 2, **EVERYTHING, device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers(), layer.tokens_per_expert))
    layer.to_empty(device=device)
    for t in (*layer.parameters(), *layer.buffers(), layer.tokens_per_expert):
        t.data.fill_(float("nan") if t.is_floating_point() else 77)
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    expected = FusedMoE(12, 8, 8, 2, **EVERYTHING, device=device)
    for (name, value), other in zip(layer.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert not layer.tokens_per_expert.count_nonzero()
    assert torch.equal(layer(torch.ones(4, 12, device=device)), expected(torch.ones(4, 12, device=device)))


class Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


class Invertible(Doubled):
    def right_inverse(self, w):
        return w / 2


@pytest.mark.parametrize("step", (None, Doubled, Invertible))
def test_altered_parameters_are_reset(device, step):
    """Everywhere in the layer: a pruned parameter has new values and its mask, a parametrised one values of
    the same range, where it can be inverted."""
    layer = FusedMoE(12, 8, 8, 2, **EVERYTHING, device=device)
    layer = add_lora(layer, 4, targets=("w1",))
    shared = layer.shared_experts
    owners = (
        layer.experts,
        shared.w1,
        shared.w2,
        layer.shared_expert_gate,
        layer.router.gate,
        layer.experts.lora,
    )
    for owner, name in zip(owners, ("w1", *["weight"] * 4, "a1"), strict=True):
        if step is None:
            prune.random_unstructured(owner, name, 0.5)
        else:
            parametrize.register_parametrization(owner, name, step())
    for parameter in layer.parameters():
        parameter.data.fill_(torch.nan)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.count_nonzero() or name.endswith("lora.b1"), name
    for owner, name, fan_in in zip(
        owners, ("w1", *["weight"] * 4, "a1"), (12, 12, 8, 12, 12, 12), strict=True
    ):
        if step is None:
            bound, value = fan_in**-0.5, getattr(owner, f"{name}_orig")
            assert 0.3 < getattr(owner, f"{name}_mask").mean() < 0.7
        else:
            bound, value = (2 if step is Doubled else 1) * fan_in**-0.5, getattr(owner, name)
        assert 0.5 * bound < value.abs().max() <= 1.0001 * bound, name


def test_weight_norm_of_old_cannot_be_reset(device):
    """torch.nn.utils.weight_norm keeps a weight in two new parameters."""
    layer = FusedMoE(12, 8, 8, 2, device=device)
    layer.experts.register_parameter("w1_g", layer.experts._parameters.pop("w1"))
    with pytest.raises(TypeError, match="reset_parameters: expected w1 to be a parameter, .*, found w1_g"):
        layer.reset_parameters()


def test_device_and_dtype(device):
    """device and dtype are the parameters'; the bias stays float32, the counter int64."""
    layer = FusedMoE(12, 8, 8, 2, **EVERYTHING, device=device, dtype=BF16)
    assert all(p.dtype == BF16 and p.device.type == device.type for p in layer.parameters())
    for t, dtype in ((layer.expert_bias, F32), (layer.tokens_per_expert, torch.int64)):
        assert t.dtype == dtype and t.device.type == device.type
    assert layer(torch.randn(5, 12, device=device, dtype=BF16)).dtype == BF16


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("dtype", (BF16, F16, F64), ids=str)
def test_loading_keeps_float32(device, dtype, assign):
    """A checkpoint of another dtype gives its values to a float32 bias, which an update moves."""
    layer = FusedMoE(12, 8, 8, 2, **EVERYTHING, device=device)
    state = {name: t.to(dtype) for name, t in layer.state_dict().items()}
    state["expert_bias"] += 1
    before = dict(state)
    model = torch.nn.Sequential(layer)
    model.load_state_dict({f"0.{name}": t for name, t in state.items()}, assign=assign)
    assert layer.expert_bias.dtype == F32 and (layer.expert_bias == 1).all()
    assert all(state[name] is t for name, t in before.items()), "the caller's state dict was changed"
    layer.load_state_dict(state, assign=assign)
    layer.tokens_per_expert.copy_(torch.arange(8))
    layer.update_expert_bias()
    assert (layer.expert_bias != 1).all()
    assert layer(torch.randn(5, 12, device=device, dtype=layer.experts.w1.dtype)).isfinite().all()


ROUTERS_OWN = {"router.gate.weight", "router.gate.bias", "router.expert_scale", "shared_expert_gate.weight"}
FLOAT32_ROUTER = {**EVERYTHING, "expert_scale": True, "router_dtype": F32}


def dtypes_of(layer) -> dict:
    return {name: t.dtype for name, t in layer.named_parameters()}


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
def test_a_float32_router_stays_so(device, dtype):
    """Made so, and after every cast, with its values and gradients in all bits; other parameters are cast."""
    wanted = {
        n: F32 if n in ROUTERS_OWN else dtype for n in dtypes_of(FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER))
    }
    assert ROUTERS_OWN < wanted.keys()
    assert dtypes_of(FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER, device=device, dtype=dtype)) == wanted
    casts = (
        lambda m: m.to(dtype), lambda m: m.type(dtype), lambda m: m.bfloat16() if dtype == BF16 else m.half(),
        lambda m: m.to(device=device, dtype=dtype), lambda m: m.to("meta").to(dtype),
    )  # fmt: skip
    for cast in casts:
        layer = FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER, device=device)
        layer(torch.randn(5, 12, device=device)).sum().backward()
        before = {n: (p.detach().clone(), p.grad.clone()) for n, p in layer.named_parameters()}
        model = torch.nn.Sequential(layer)
        cast(model)
        assert dtypes_of(layer) == wanted and layer.expert_bias.dtype == F32
        for name in ROUTERS_OWN if layer.router.gate.weight.device.type != "meta" else ():
            now = layer.get_parameter(name)
            assert torch.equal(now, before[name][0]) and torch.equal(now.grad, before[name][1]), name
    layer = FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER, device=device).to(dtype)
    x = torch.randn(5, 12, device=device, dtype=dtype)
    for module in (layer, copy.deepcopy(layer)):
        out = module(x)
        assert out.dtype == dtype
        out.sum().backward()
        assert all(p.grad.dtype == p.dtype for p in module.parameters())
    layer.router.to(dtype)
    assert dtypes_of(layer) == wanted


@pytest.mark.parametrize("assign", (False, True))
def test_a_16_bit_checkpoint_leaves_a_float32_router(device, assign):
    """Values of the checkpoint; the caller's state dict is not changed."""
    layer = FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER, device=device, dtype=BF16)
    wanted = dtypes_of(layer)
    state = {n: torch.randn_like(t, dtype=BF16) for n, t in layer.state_dict().items()}
    before = dict(state)
    model = torch.nn.Sequential(layer)
    model.load_state_dict({f"0.{n}": t for n, t in state.items()}, assign=assign)
    assert dtypes_of(layer) == wanted and layer.expert_bias.dtype == F32
    assert all(state[n] is t for n, t in before.items())
    for name, p in layer.named_parameters():
        assert torch.equal(p, state[name].to(p.dtype)), name
    with torch.device("meta"):
        layer = FusedMoE(12, 8, 8, 2, **FLOAT32_ROUTER, dtype=BF16)
    layer.load_state_dict(state, assign=True)
    assert dtypes_of(layer) == wanted


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("hooked", (False, True), ids=("joined", "apart"))
def test_a_float32_router_is_the_references(device, hooked, dtype):
    """Outputs and all gradients, as accurate as the loop's; the logits are those of the float32 weight."""
    settings = {**SETTINGS["qwen2"], "gate_bias": True, "expert_scale": True, "router_dtype": F32}
    ours, loop = pair(device, dtype, **settings)
    exact = copy.deepcopy(loop)
    exact.router.gate.router_dtype = exact.shared_expert_gate.router_dtype = None
    exact.double()
    if hooked:
        ours.router.register_forward_hook(lambda *_: None)
        ours.shared_experts.w2.register_forward_hook(lambda *_: None)
    x, dout = torch.randn(50, 24, device=device, dtype=dtype), torch.randn(50, 24, device=device, dtype=dtype)
    results = [run(ours, x, dout), run(loop, x, dout), run(exact, x.double(), dout.double())]
    for name, grad in results[0].items():
        assert grad.dtype == (dtype if name in ("out", "dx") else ours.get_parameter(name).dtype), name
    assert_as_good(*results)
    _, ids, logits = ours.router(x, None)
    assert_near = torch.testing.assert_close
    assert_near(logits.double(), exact.router.gate(x.double()), rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, exact.router(x.double(), None)[1])


def test_a_float32_router_under_autocast(device):
    """Experts are cast and the router is not: logits are those of float32 operands, in both layers."""
    ours, loop = pair(device, None, router_dtype=F32, num_shared_experts=1, shared_expert_gate=True)
    x = torch.randn(30, 24, device=device)
    with torch.autocast(device.type, BF16):
        logits = [layer.router(x, None)[2] for layer in (ours, loop)]
        out, expected = ours(x), loop(x)
        half = ours(x.to(BF16))
    assert out.dtype == expected.dtype == half.dtype == BF16
    for found in logits:
        torch.testing.assert_close(found, nn.functional.linear(x, ours.router.gate.weight))
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.05, atol=0.02)


def test_a_float32_router_takes_other_linear_layers_errors(device):
    layer = FusedMoE(12, 8, 8, 2, router_dtype=F32, device=device, dtype=BF16)
    with pytest.raises(TypeError, match="x of the parameters' dtype torch.float32, found torch.float64"):
        layer(torch.randn(5, 12, device=device, dtype=F64))


def test_counts_in_a_file_are_dropped(device):
    """A file of a layer that saves its counts, torchtitan's say, loads strictly; the counts stay."""
    layer = FusedMoE(12, 8, 8, 2, device=device)
    layer(torch.randn(5, 12, device=device))
    counted = layer.tokens_per_expert.clone()
    for model, prefix in ((layer, ""), (torch.nn.Sequential(layer), "0.")):
        state = model.state_dict() | {f"{prefix}tokens_per_expert": torch.ones(8, device=device)}
        for assign in (False, True):
            model.load_state_dict(state, assign=assign)
            assert torch.equal(layer.tokens_per_expert, counted)
        assert f"{prefix}tokens_per_expert" in state
    with pytest.raises(RuntimeError, match="Unexpected key.*tokens_per_experts"):
        layer.load_state_dict({**layer.state_dict(), "tokens_per_experts": counted})


def test_a_bias_set_to_another_dtype(device):
    """Setting it goes past all that keeps its dtype: forward and update raise, with gradients and without."""
    layer = FusedMoE(12, 8, 8, 2, load_balance_coeff=1e-3, device=device)
    x = torch.randn(5, 12, device=device)
    wrong = r"^FusedMoE: expected expert_bias of dtype float32, found torch.bfloat16$"
    for change in (
        lambda: setattr(layer, "expert_bias", layer.expert_bias.bfloat16()),
        lambda: setattr(layer.expert_bias, "data", layer.expert_bias.bfloat16()),
    ):
        change()
        for leaf in (x, x.clone().requires_grad_()):
            with pytest.raises(TypeError, match=wrong):
                layer(leaf)
        with torch.no_grad(), pytest.raises(TypeError, match=wrong):
            layer(x)
        with pytest.raises(TypeError, match=wrong):
            layer.update_expert_bias()
        layer.float()
        layer(x)
        layer.update_expert_bias()


def test_moving_keeps_float32(device):
    """.to(bfloat16), .half() and .double() move parameters; counter and bias keep dtype and values."""
    layer = FusedMoE(12, 8, 8, 2, **EVERYTHING, device=device)
    layer.expert_bias.copy_(torch.arange(8) * 1e-4 + 1)
    layer.tokens_per_expert.copy_(torch.arange(8) * 1000 + 257)
    values = layer.expert_bias.clone(), layer.tokens_per_expert.clone()
    for move in (lambda m: m.to(BF16), lambda m: m.half(), lambda m: m.double(), lambda m: m.float()):
        move(layer)
        for t, value in zip((layer.expert_bias, layer.tokens_per_expert), values, strict=True):
            assert t.dtype == value.dtype and torch.equal(t, value)
    assert layer.expert_bias.dtype == F32 and layer.tokens_per_expert.dtype == torch.int64
    assert layer.to(BF16).experts.w1.dtype == BF16


def test_repr_tells_the_settings(device):
    """print(layer) names sizes, routing and activation."""
    text = repr(FusedMoE(12, 8, 16, 2, score_func="sigmoid", load_balance_coeff=0.5, device=device))
    for part in (
        "num_experts=16",
        "top_k=2",
        "score_func='sigmoid'",
        "activation='silu'",
        "dim=12",
        "hidden_dim=8",
        "0.5",
    ):
        assert part in text, part


def test_repr_tells_the_constants_of_an_activation(device):
    """Those alone that it uses."""
    for activation, text in (
        ("situ", "activation='situ', alpha=4.0, limit=10.0, gated"),
        ("swiglu_limited", "activation='swiglu_limited', limit=10.0, gated"),
        ("relu2", "activation='relu2', gated"),
    ):
        layer = FusedMoE(12, 8, 16, 2, activation=activation, alpha=4.0, limit=10.0, device=device)
        assert text in repr(layer.experts)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("joined", "apart", "no gradients", "hooked shared experts"))
@pytest.mark.parametrize("activation, constants", (
    ("swiglu_clamped", {"alpha": 1.0, "limit": 0.2}), ("swiglu_limited", {"limit": 0.2}),
    ("situ", {"alpha": 0.3, "limit": 0.5}),
))  # fmt: skip
def test_constants_reach_the_kernels(device, activation, constants, form):
    """Those of the layer, in routed and shared experts, however the layer is called."""
    settings = {"activation": activation, "num_shared_experts": 1, "dtype": F64}
    x = torch.randn(30, 24, dtype=F64, device=device)
    ours, loop = pair(device, **settings, **constants)
    if form == "apart":
        ours.router.gate.register_forward_hook(lambda *_: None)
    if form == "hooked shared experts":
        ours.shared_experts.w1.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(form != "no gradients"):
        expected = loop(x)
        torch.testing.assert_close(ours(x), expected, rtol=1e-10, atol=1e-10)
        for part in (loop.experts, loop.shared_experts):  # and they matter in both
            part.limit, limit = 7.0, part.limit
            assert (loop(x) - expected).abs().max() > 1e-3
            part.limit = limit


def test_layers_of_an_older_version_have_gpt_oss_constants(cpu):
    """Pickled as a whole, before experts had constants of their own."""
    layer = FusedMoE(24, 20, 8, 2, activation="swiglu_clamped", num_shared_experts=1)
    expected = layer(x := torch.randn(9, 24))
    for part in (layer.experts, layer.shared_experts):
        del part.__dict__["alpha"], part.__dict__["limit"]
    older = pickle.loads(pickle.dumps(layer))
    assert older.experts.alpha == 1.702 and older.shared_experts.limit == 7.0
    assert torch.equal(older(x), expected) and "alpha=1.702, limit=7.0" in repr(older.experts)


@pytest.mark.quick
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_agrees_with_the_reference_layer(device, settings, dtype):
    """Output and every gradient, the router's included, are as accurate as the for-loop layer's."""
    given = SETTINGS[settings]
    if dtype == BF16 and given.get("activation") in ("swiglu_clamped", "swiglu_limited"):
        given = given | {"limit": 7.0}  # the rounding of h would decide on which side of a kink it is
    ours, loop = pair(device, dtype, **given)
    x = torch.randn(60, 24, device=device).to(dtype)
    if dtype == BF16:  # all three choose by the same rounded logits
        ours, loop = separated(ours), separated(loop)
    exact = copy.deepcopy(loop).double()
    dout = torch.randn(60, 24, device=device).to(dtype)
    results = [run(ours, x, dout), run(loop, x, dout), run(exact, x.double(), dout.double())]
    assert torch.equal(ours.tokens_per_expert, loop.tokens_per_expert)
    assert torch.equal(ours.tokens_per_expert, exact.tokens_per_expert), "another expert was chosen"
    assert_as_good(*results)


def separated(layer):
    """Expert biases far apart, so that rounding of the logits does not change the choice."""
    gate = layer.router.gate
    with torch.no_grad():
        gate.weight.mul_(0.1)
    if gate.bias is None:
        gate.bias = torch.nn.Parameter(torch.empty(gate.out_features, dtype=gate.weight.dtype))
    with torch.no_grad():
        spread = torch.linspace(-3, 3, gate.out_features)
        gate.bias.copy_(spread[torch.tensor([3, 6, 0, 5, 2, 7, 1, 4])])
    gate.to(layer.experts.w1.device)
    return layer


@pytest.mark.quick
@pytest.mark.parametrize("shape", ((24,), (5, 24), (2, 3, 24), (2, 3, 4, 24), (0, 24), (3, 0, 24)))
def test_any_leading_shape(device, shape):
    """(..., D) gives what its tokens give, in its shape; no token gives none."""
    layer = FusedMoE(24, 20, 8, 2, num_shared_experts=1, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    assert torch.equal(out.flatten(), layer(x.reshape(-1, 24)).flatten())
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is not None for p in layer.parameters())


def test_non_contiguous_input(device):
    """A transposed (S, B, D) input works."""
    layer = FusedMoE(24, 20, 8, 2, device=device)
    x = torch.randn(4, 6, 24, device=device)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


def test_shared_experts_are_added(device):
    """out = routed + shared, and with a gate routed + sigmoid(gate x) * shared."""
    layer = FusedMoE(24, 20, 8, 2, **EVERYTHING, device=device)
    x = torch.randn(10, 24, device=device)
    scores, ids, _ = layer.router(x, layer.expert_bias)
    routed, _ = layer.experts(x, scores, ids)
    shared = layer.shared_experts
    dense = shared.w2(torch.nn.functional.silu(shared.w1(x)) * shared.w3(x))
    expected = routed + torch.sigmoid(layer.shared_expert_gate(x)) * dense
    torch.testing.assert_close(layer(x), expected)
    assert shared.w1.out_features == 2 * 20


@pytest.mark.parametrize("gate", (False, True), ids=("plain", "gate"))
def test_other_shared_experts(device, gate):
    """Another module in their place gets x alone; hooks on their linear layers are called."""
    settings = {"num_shared_experts": 1, "shared_expert_gate": gate, "device": device}
    layer, x = FusedMoE(24, 20, 8, 2, **settings), torch.randn(30, 24, device=device)
    expected = layer(x)
    seen = []
    handle = layer.shared_experts.w1.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), expected)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    torch.testing.assert_close(layer(x), expected)
    handle.remove()
    assert seen[0] == 1 and layer.shared_experts.w2 in seen
    shared = layer.shared_experts
    layer.shared_experts = torch.nn.Identity()
    factor = layer.shared_expert_gate(x).sigmoid() if gate else 1
    torch.testing.assert_close(layer(x), expected - shared(x) * factor + x * factor)


@pytest.mark.parametrize("score_func", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_losses(device, score_func):
    """return_losses adds the balance loss of the layer's scores and the z-loss, both of this call and
    differentiable in the router."""
    layer = FusedMoE(24, 20, 8, 2, score_func=score_func, device=device)
    x = torch.randn(3, 10, 24, device=device)
    out, losses = layer(x, return_losses=True)
    assert torch.equal(out, layer(x))
    _, ids, logits = layer.router(x.flatten(0, 1), None)
    balance = load_balancing_loss(logits, ids, 8, score_func=score_func)
    assert torch.equal(losses.load_balancing, balance)
    assert torch.equal(losses.z, router_z_loss(logits))
    (losses.load_balancing + losses.z).backward()
    assert layer.router.gate.weight.grad.count_nonzero()
    assert layer.experts.w1.grad is None


@pytest.mark.parametrize("score_func", ("softmax", "sigmoid", "sqrtsoftplus"))
def test_which_tokens_the_losses_count(device, score_func):
    """loss_mask and per_sequence are those of the functions, of x's leading shape; the output is the same."""
    layer = FusedMoE(24, 20, 8, 2, score_func=score_func, device=device)
    x = torch.randn(2, 3, 10, 24, device=device)
    mask = torch.rand(2, 3, 10, device=device) < 0.5
    num_tokens = torch.tensor(47, device=device)
    out, ids = layer(x, num_tokens=num_tokens, return_ids=True)
    logits = layer.router.gate(x)
    for options in ({}, {"mask": mask}, {"per_sequence": True}, {"mask": mask, "per_sequence": True}):
        given = {"loss_mask" if n == "mask" else n: value for n, value in options.items()}
        found, losses = layer(x, num_tokens=num_tokens, return_losses=True, **given)
        assert torch.equal(found, out)
        settings = {"score_func": score_func, "num_tokens": num_tokens, **options}
        assert torch.equal(losses.load_balancing, load_balancing_loss(logits, ids, 8, **settings))
        z = router_z_loss(logits, num_tokens=num_tokens, mask=options.get("mask"))
        assert torch.equal(losses.z, z)


@pytest.mark.parametrize("how", ("plain", "checkpointed", "reentrant", "compiled"))
def test_losses_over_micro_batches(device, how):
    """load=layer.tokens_per_expert: each micro-batch's f_e is that of all so far, this one counted once."""
    layer, x = FusedMoE(24, 20, 8, 2, device=device), torch.randn(3, 10, 24, device=device)
    torch._dynamo.reset()

    def balance(x):
        return layer(x, return_losses=True, load=layer.tokens_per_expert)[1].load_balancing

    run = torch.compile(balance, fullgraph=True, backend="aot_eager") if how == "compiled" else balance
    found, expected, load = [], [], torch.zeros(8, dtype=torch.int64, device=device)
    for micro_batch in x:
        leaf = micro_batch.clone().requires_grad_()
        checkpointed = how in ("checkpointed", "reentrant")
        loss = checkpoint(run, leaf, use_reentrant=how == "reentrant") if checkpointed else run(leaf)
        found += (
            [loss.detach(), *torch.autograd.grad(loss, leaf)] if how != "reentrant" else backward(loss, leaf)
        )
        twin = micro_batch.clone().requires_grad_()
        logits = layer.router.gate(twin)
        ids = fused_moe.route(logits, 2)[1]
        loss = load_balancing_loss(logits, ids, 8, load=load)
        expected += [loss.detach(), *torch.autograd.grad(loss, twin)]
        load += ids.flatten().long().bincount(minlength=8)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(layer.tokens_per_expert, load)
    layer.eval()
    torch.testing.assert_close(
        balance(x[0]),
        load_balancing_loss(layer.router.gate(x[0]), layer(x[0], return_ids=True)[1], 8, load=load),
    )
    assert torch.equal(layer.tokens_per_expert, load)


def backward(loss, leaf):
    """A reentrant checkpoint takes no torch.autograd.grad."""
    loss.backward()
    return [loss.detach(), leaf.grad]


X, MASK, LOAD = torch.ones(3, 8), torch.ones(3, dtype=torch.bool), torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "options, error, message",
    (
        ({"loss_mask": [True]}, TypeError, "loss_mask to be a tensor, found list"),
        ({"loss_mask": MASK.int()}, TypeError, "loss_mask of dtype bool, found torch.int32"),
        ({"loss_mask": MASK[:2]}, ValueError, "loss_mask of shape (...) = (3,), found (2,)"),
        ({"loss_mask": MASK.to("meta")}, ValueError, "loss_mask on x's device cpu, found meta"),
        ({"per_sequence": "yes"}, TypeError, "per_sequence to be True or False, found str 'yes'"),
        ({"x": X[0], "per_sequence": True}, ValueError,
         "x of shape (..., S, D) with per_sequence, found (8,)"),
        ({"group": 3}, TypeError, "group to be a ProcessGroup that this rank is in, found int"),
        ({"load": LOAD.float()}, TypeError, "load of an integer dtype, found torch.float32"),
        ({"load": LOAD[:3]}, ValueError, "load of shape (E) = (4,), found (3,)"),
        ({"load": LOAD.to("meta")}, ValueError, "load on x's device cpu, found meta"),
        ({"load": LOAD, "per_sequence": True}, ValueError,
         "neither group nor load with per_sequence, found one of them"),
        ({"loss_mask": MASK, "return_losses": False}, ValueError,
         "loss_mask, per_sequence, group and load only with return_losses=True, found return_losses=False"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_tokens_of_the_losses(cpu, options, error, message):
    layer = FusedMoE(8, 4, 4, 1)
    with pytest.raises(error) as raised:
        layer(**{"x": X, "return_losses": True, **options})
    assert str(raised.value) == f"FusedMoE: expected {message}"
    assert not layer.tokens_per_expert.any()


def test_training_lowers_the_loss(device):
    """A few steps of a real optimizer: the layer learns a target, every parameter moves."""
    layer = FusedMoE(16, 32, 4, 2, num_shared_experts=1, device=device)
    before = copy.deepcopy(layer.state_dict())
    x = torch.randn(64, 16, device=device)
    target = x.roll(1, -1)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2, weight_decay=0)
    losses = []
    for _ in range(40):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for name, value in layer.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_deepcopy_is_independent(device):
    """A deep copy computes the same and shares nothing."""
    layer = FusedMoE(24, 20, 8, 2, **EVERYTHING, device=device)
    x = torch.randn(10, 24, device=device)
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    with torch.no_grad():
        other.experts.w1.zero_()
    assert layer.experts.w1.count_nonzero()


# --- load -----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_tokens_per_expert_counts(device):
    """Every training forward adds its slots; evaluation does not; the sum over experts is T*K per call."""
    layer = FusedMoE(24, 20, 8, 2, device=device)
    x = torch.randn(50, 24, device=device)
    _, ids, _ = layer.router(x, None)
    expected = ids.flatten().long().bincount(minlength=8)
    layer(x)
    assert torch.equal(layer.tokens_per_expert, expected)
    layer(x)
    assert torch.equal(layer.tokens_per_expert, 2 * expected)
    layer.eval()(x)
    assert torch.equal(layer.tokens_per_expert, 2 * expected)
    layer.train()
    with torch.no_grad():
        layer(x)
    assert torch.equal(layer.tokens_per_expert, 3 * expected)


@pytest.mark.parametrize("tokens", (7, 300))
@pytest.mark.parametrize("num_allowed", (0, 1, 3))
def test_barred_experts(device, num_allowed, tokens):
    """A bias of -inf, in one operator and in autograd's: the loop's results, counts; updates keep it."""
    settings = {"score_func": "sigmoid", "route_norm": True, "load_balance_coeff": 1e-3}
    layer, loop = pair(device, F32, **settings)
    for moe in (layer, loop):
        moe.expert_bias[num_allowed:] = -torch.inf
    x = torch.randn(tokens, 24, device=device)
    expected, ids = loop(x, return_ids=True)
    assert (ids < num_allowed).all() and ((ids >= 0).sum(-1) == min(num_allowed, layer.top_k)).all()
    for leaf in (x, x.clone().requires_grad_()):
        layer.tokens_per_expert.zero_()
        with torch.set_grad_enabled(leaf.requires_grad):
            out, found = layer(leaf, return_ids=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, ids) and torch.equal(layer.tokens_per_expert, loop.tokens_per_expert)
    out.sum().backward()
    assert leaf.grad.isfinite().all()
    layer.update_expert_bias()
    assert (layer.expert_bias[num_allowed:] == -torch.inf).all()
    assert layer.expert_bias[:num_allowed].isfinite().all()


def test_expert_bias_steers_but_is_not_in_the_output(device):
    """A large expert_bias routes every token to one expert, weighted by its unbiased score."""
    layer = FusedMoE(24, 20, 8, 1, load_balance_coeff=1e-3, device=device)
    layer.expert_bias[5] = 100.0
    x = torch.randn(30, 24, device=device)
    out = layer(x)
    assert layer.tokens_per_expert[5] == 30
    score = layer.router.gate(x).softmax(-1)[:, 5:6]
    w1, w2, w3 = (getattr(layer.experts, n)[5] for n in ("w1", "w2", "w3"))
    expert = (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
    torch.testing.assert_close(out, score * expert, rtol=1e-4, atol=1e-6)


@pytest.mark.quick
def test_update_expert_bias_moves_against_the_load(device):
    """The bias falls by the coefficient for a high load, rises for a low one; centred; counts are reset."""
    layer = FusedMoE(24, 20, 4, 1, load_balance_coeff=0.5, device=device)
    layer.tokens_per_expert.copy_(torch.tensor([10.0, 2.0, 5.0, 3.0]))
    layer.update_expert_bias()
    delta = torch.tensor([-0.5, 0.5, 0.0, 0.5])  # against the mean of 5
    torch.testing.assert_close(layer.expert_bias.cpu(), delta - delta.mean())
    assert not layer.tokens_per_expert.count_nonzero()


@pytest.mark.parametrize("most", (2**24, 2**40))
def test_counts_past_float32(device, most):
    """A step of many micro-batches: counts go on past 2**24, where float32 stops, and a load that is a token
    above the mean is told from it."""
    layer = FusedMoE(24, 20, 4, 1, load_balance_coeff=0.5, device=device)
    layer.tokens_per_expert.fill_(most)
    layer(torch.randn(1, 24, device=device))
    assert layer.tokens_per_expert.sum() == 4 * most + 1
    report = layer.load_report()
    assert report.tokens.sum() == 4 * most + 1 and report.share.tolist() == [0.25] * 4
    busiest = report.tokens.argmax()
    layer.update_expert_bias()
    assert layer.expert_bias.argmin() == busiest and layer.expert_bias[busiest] == -0.75


def test_update_without_coefficient_restarts_the_counts(device):
    """A layer without expert_bias only resets its counts."""
    layer = FusedMoE(24, 20, 4, 1, device=device)
    layer(torch.randn(9, 24, device=device))
    layer.update_expert_bias()
    assert not layer.tokens_per_expert.count_nonzero()


def test_balancing_evens_the_load(device):
    """Some updates spread tokens that were all routed to the same experts."""
    layer = FusedMoE(
        24, 20, 8, 2, score_func="sigmoid", load_balance_coeff=0.02, gate_bias=True, device=device
    )
    with torch.no_grad():
        layer.router.gate.bias.copy_(torch.linspace(-2, 2, 8))
    x = torch.randn(400, 24, device=device)
    layer(x)
    first = layer.load_report().max_over_mean
    for _ in range(60):
        layer.update_expert_bias()
        layer(x)
    assert first > 2.0
    assert layer.load_report().max_over_mean < 1.3


def test_load_report(device):
    """Counts, shares, max over mean and idle experts, printed one line per expert."""
    layer = FusedMoE(24, 20, 4, 1, device=device)
    layer.tokens_per_expert.copy_(torch.tensor([6.0, 0.0, 2.0, 0.0]))
    report = layer.load_report()
    assert report.tokens.tolist() == [6, 0, 2, 0]
    assert report.share.tolist() == [0.75, 0.0, 0.25, 0.0]
    assert report.max_over_mean == 3.0 and report.idle == 2
    lines = str(report).splitlines()
    assert lines[0] == "load: the busiest expert has 3.00x the mean, 2 of 4 experts are idle"
    assert lines[1].split() == ["expert", "tokens", "share"]
    assert len(lines) == 6 and lines[2].split()[:3] == ["0", "6", "75.00%"]
    assert lines[2].count("#") > lines[4].count("#") > lines[3].count("#") == 0
    layer.update_expert_bias()
    assert report.tokens.tolist() == [6, 0, 2, 0]


def test_load_report_before_any_token(device):
    """Nothing counted yet, or since the last update: it says so, and divides by no zero."""
    layer = FusedMoE(24, 20, 4, 1, device=device)
    for _ in range(2):
        report = layer.load_report()
        assert report.max_over_mean == 0.0 and report.idle == 4
        assert str(report) == (
            "load: nothing counted since the last update of the bias; read it before optimizer.step()\n"
            "only training passes count"
        )
        layer(torch.randn(9, 24, device=device))
        assert "idle" in str(layer.load_report())
        layer.update_expert_bias()


def test_float64_layer(device):
    """A float64 layer routes in float64."""
    ours, loop = pair(device, F64, **SETTINGS["deepseek"])
    x = torch.randn(20, 24, dtype=F64, device=device)
    torch.testing.assert_close(ours(x), loop(x), rtol=1e-12, atol=1e-13)


def test_router_is_the_public_route(device):
    """The layer's scores and ids are fused_moe.route's of its logits."""
    layer = FusedMoE(24, 20, 8, 3, **{**SETTINGS["deepseek"], "num_shared_experts": 0}, device=device)
    layer.expert_bias.normal_()
    x = torch.randn(20, 24, device=device)
    scores, ids, logits = layer.router(x, layer.expert_bias)
    options = {n: v for n, v in SETTINGS["deepseek"].items() if n in layer.router.routing}
    expected = fused_moe.route(logits, 3, bias=layer.expert_bias, **options)
    assert torch.equal(scores, expected[0]) and torch.equal(ids, expected[1])


# --- a bias that is never updated -----------------------------------------------------------------------


def forgetful(device, coefficient=1e-3, **options):
    """A layer, and how to run it as often as may be without a warning."""
    layer = FusedMoE(8, 4, 4, 1, load_balance_coeff=coefficient, device=device, **options)
    x = torch.randn(2, 8, device=device)

    def run(times=PATIENCE - 1):
        for _ in range(times):
            layer(x)

    return layer, run


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_a_forgotten_update_warns(device):
    """Warns once, after a number of training forward passes, and not again."""
    layer, run = forgetful(device)
    run()
    with pytest.warns(
        UserWarning, match=r"expected fused_moe.balance\(model, optimizer\), or update_expert_bias\(\) after"
    ) as caught:
        run(2 * PATIENCE)
    assert len(caught) == 1


def update(layer):
    layer.update_expert_bias()


def update_by_hand(layer):
    """As torchtitan's hook does."""
    load = layer.tokens_per_expert.double()
    layer.expert_bias.add_(torch.sign(load.mean() - load), alpha=1e-3)
    layer.tokens_per_expert.zero_()


@pytest.mark.parametrize("updated", (update, update_by_hand))
def test_updates_do_not_warn(device, no_warning, updated):
    layer, run = forgetful(device)
    for _ in range(3):
        run()
        updated(layer)


def test_layers_without_balancing_do_not_warn(device, no_warning):
    layer, run = forgetful(device, None)
    run(PATIENCE)
    layer, run = forgetful(device)
    layer.eval()
    run(PATIENCE)
    with torch.inference_mode():
        layer, run = forgetful(device)
        run(PATIENCE)


def test_compiled_layers_do_not_count_forward_passes(device, no_warning):
    """That would compile each of them anew."""
    layer, _ = forgetful(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(2, 8, device=device)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(PATIENCE):
            compiled(x)
    assert layer.tokens_per_expert.sum() == 2 * PATIENCE


# --- wrong arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument, error, message",
    (
        ({"dim": True}, TypeError, "dim to be an int, found bool"),
        ({"hidden_dim": "4"}, TypeError, "hidden_dim to be an int, found str"),
        ({"num_shared_experts": 1.5}, TypeError, "num_shared_experts to be an int, found float"),
        ({"num_shared_experts": True}, TypeError, "num_shared_experts to be an int, found bool"),
        ({"route_norm": 3}, TypeError, "route_norm to be True or False, found int"),
        ({"gated": None}, TypeError, "gated to be True or False, found NoneType"),
        ({"bias": "no"}, TypeError, "bias to be True or False, found str"),
        ({"gate_bias": 1}, TypeError, "gate_bias to be True or False, found int"),
        ({"shared_expert_gate": 1}, TypeError, "shared_expert_gate to be True or False, found int"),
        ({"route_scale": "x"}, TypeError, "route_scale to be a number, found str"),
        ({"route_scale": True}, TypeError, "route_scale to be a number, found bool"),
        ({"route_scale": float("nan")}, ValueError, "route_scale to be a finite number, found nan"),
        ({"load_balance_coeff": "a"}, TypeError, "load_balance_coeff to be a number, found str"),
        ({"load_balance_coeff": False}, TypeError, "load_balance_coeff to be a number, found bool"),
        ({"load_balance_coeff": -1e-3}, ValueError, "load_balance_coeff >= 0, found -0.001"),
        ({"load_balance_coeff": float("nan")}, ValueError,
         "load_balance_coeff to be a finite number, found nan"),
        ({"load_balance_coeff": float("inf")}, ValueError,
         "load_balance_coeff to be a finite number, found inf"),
        ({"dtype": int}, TypeError,
         "dtype to be None or float32 or bfloat16 or float16 or float64, found <class 'int'>"),
        ({"dtype": torch.int32}, TypeError,
         "dtype to be None or float32 or bfloat16 or float16 or float64, found torch.int32"),
    ),
    ids=str,
)  # fmt: skip
def test_constructor(argument, error, message):
    """A wrong argument is named, with what was expected and what was found."""
    with pytest.raises(error) as raised:
        FusedMoE(**{"dim": 8, "hidden_dim": 4, "num_experts": 4, "top_k": 1} | argument)
    assert str(raised.value).startswith(f"FusedMoE: expected {message}")


@pytest.mark.quick
@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize(
    "dtype, expected",
    (
        (BF16, "x of the parameters' dtype torch.float32"),
        (torch.float16, "x of the parameters' dtype torch.float32"),
        (F64, "x of the parameters' dtype torch.float32"),
        (torch.int64, "x of dtype float32 or bfloat16 or float16 or float64"),
        (torch.complex64, "x of dtype float32 or bfloat16 or float16 or float64"),
        (torch.float8_e4m3fn, "x of dtype float32 or bfloat16 or float16 or float64"),
    ),
    ids=str,
)
def test_input_of_another_dtype(device, dtype, expected, autocast):
    """It is named, unless autocast casts it."""
    layer = FusedMoE(8, 4, 4, 1, device=device)
    x = torch.ones(3, 8, device=device).to(dtype)
    with torch.autocast(device.type, dtype=BF16, enabled=autocast):
        if autocast and dtype in (BF16, torch.float16):
            assert layer(x).dtype == BF16
            return
        with pytest.raises(TypeError) as raised:
            layer(x)
    assert str(raised.value) == f"FusedMoE: expected {expected}, found {dtype}"


@pytest.mark.parametrize("gate_bias", (False, True))
def test_input_on_another_device(device, gate_bias):
    """On meta, too, where a linear layer without bias takes anything."""
    layer = FusedMoE(8, 4, 4, 1, gate_bias=gate_bias, device=device)
    expected = r"FusedMoE: expected x on the parameters' device .*, found meta"
    with pytest.raises(ValueError, match=expected):
        layer(torch.ones(3, 8, device="meta"))


def test_a_parameter_left_on_meta(device):
    """In a layer that was loaded in part: an error, not memory that nothing has written."""
    names = dict(FusedMoE(8, 4, 4, 1, **EVERYTHING).named_parameters())
    assert len(names) == 15
    for name in names:
        layer = FusedMoE(8, 4, 4, 1, **EVERYTHING, device=device)
        path, _, last = name.rpartition(".")
        module = layer.get_submodule(path)
        setattr(module, last, torch.nn.Parameter(getattr(module, last).to("meta")))
        with pytest.raises(ValueError, match="device .*meta"):
            layer(torch.ones(3, 8, device=device))


class CastingLinear(torch.nn.Linear):
    """Computes in its own dtype, as adapters and quantised weights may."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def test_a_router_that_casts(device):
    """A gate kept in float32 beside experts in bfloat16 is not refused."""
    layer = FusedMoE(8, 4, 4, 1, device=device, dtype=BF16)
    layer.router.gate = CastingLinear(8, 4, bias=False, device=device)
    assert layer(torch.ones(3, 8, device=device, dtype=BF16)).dtype == BF16


def test_other_errors_of_the_router_pass(device):
    """An error that has nothing to do with x is not explained by it."""
    layer = FusedMoE(8, 4, 4, 1, device=device)

    def fails(module, args):
        raise RuntimeError("something else")

    layer.router.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="something else"):
        layer(torch.ones(3, 8, device=device))


@pytest.mark.parametrize("default", (BF16, F64), ids=str)
def test_default_dtype(device, default):
    """A layer made and run under another default dtype returns its losses in float32, or float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        layer = FusedMoE(8, 4, 4, 1, load_balance_coeff=1e-3, device=device)
        out, losses = layer(torch.randn(5, 8, device=device), return_losses=True)
    finally:
        torch.set_default_dtype(before)
    assert out.dtype == default
    assert all(loss.dtype == (F64 if default == F64 else F32) for loss in losses)
    assert layer.expert_bias.dtype == F32 and layer.tokens_per_expert.dtype == torch.int64
