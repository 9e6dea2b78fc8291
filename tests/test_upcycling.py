"""upcycle: the dense MLP's output and gradients at the start, its noise, router and errors."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from cases import BF16, F16, F32, F64
from torch import nn

import fused_moe
from fused_moe import FusedMoE, upcycle
from fused_moe.activation import activate
from fused_moe.module import SharedExperts

T, D, F, E = 40, 12, 16, 8


class Dense(nn.Module):
    """An MLP as transformers' models have them."""

    def __init__(self, names, bias=False, act_fn=functional.silu, dtype=F64, device=None):
        super().__init__()
        for name in names:
            sizes = (F, D) if name in ("down_proj", "fc2", "w2") else (D, F)
            self.add_module(name, nn.Linear(*sizes, bias=bias, dtype=dtype, device=device))
        self.names, self.act_fn = names, act_fn

    @property
    def parts(self):
        return [getattr(self, name) for name in self.names]

    def forward(self, x):
        up, *gate, down = self.parts
        h = self.act_fn(gate[0](x)) * up(x) if gate else self.act_fn(up(x))
        return down(h)


GATED = ("up_proj", "gate_proj", "down_proj")
GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2, "score_func": "sigmoid"}
# what differs from a gated MLP without biases, and the arguments
CASES = {
    "plain": ({}, (E, 2), {}),
    "one of one": ({}, (1, 1), {}),
    "biases": ({"bias": True}, (E, 3), {"gate_bias": True, "score_func": "sigmoid"}),
    "halves": ({}, (E, 2), {"granularity": 2}),
    "quarters, twice": ({"bias": True}, (E, 8), {"granularity": 4, "load_balance_coeff": 1e-3}),
    "groups": ({}, (E, 4), {"granularity": 2, **GROUPS}),
    "relu2": (
        {"names": ("up_proj", "down_proj"), "act_fn": lambda x: functional.relu(x).square()},
        (E, 4),
        {"granularity": 2, "activation": "relu2", "score_func": "sqrtsoftplus"},
    ),
    "fc": (
        {"names": ("fc1", "fc2"), "act_fn": nn.GELU()},
        (E, 2),
        {"activation": "gelu", "expert_scale": True},
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_dense_mlp(device, case):
    """Output and gradient of x in float64; the experts' gradients sum to those of the dense weights."""
    changes, sizes, options = CASES[case]
    dense = Dense(**{"names": GATED, "device": device} | changes)
    moe = upcycle(dense, *sizes, **options, router_std=1.0)
    x, dout = torch.randn(2, T, D, dtype=F64, device=device)
    found = []
    for module in (dense, moe):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(dout)
        found.append((out.detach(), leaf.grad))
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)
    assert (moe.tokens_per_expert > 0).sum() > 1 or sizes == (1, 1)
    G = options.get("granularity", 1)
    up, *gate, down = dense.parts
    for name, part in zip(("w1", "w2", "w3"), (*gate, down, up) if gate else (up, down), strict=False):
        along = 1 if name == "w2" else 0
        for kind, grad in (("w", part.weight.grad), ("b", part.bias.grad if part.bias is not None else None)):
            if grad is not None:
                shards = getattr(moe.experts, f"{kind}{name[1]}").grad
                copies = shards.view(-1, G, *shards.shape[1:]).sum(0)
                if (kind, name) == ("b", "w2"):
                    total = copies.sum(0) / G  # b2 is the dense bias over G
                else:
                    total = torch.cat(list(copies), along)
                torch.testing.assert_close(total, grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("score_func", ("softmax", "sigmoid", "sqrtsoftplus"))
@pytest.mark.parametrize("granularity", (1, 2))
def test_scores_that_are_not_normalised(device, score_func, granularity):
    """Where all logits are 0 the output is the dense one."""
    dense = Dense(GATED, device=device)
    options = {"route_norm": False, "router_std": 0.0, "score_func": score_func, "granularity": granularity}
    x = torch.randn(T, D, dtype=F64, device=device)
    torch.testing.assert_close(upcycle(dense, E, 4, **options)(x), dense(x), rtol=1e-11, atol=1e-12)


def test_virtual_groups(device):
    """A token's experts are whole copies, of which tokens choose different ones."""
    moe = upcycle(Dense(GATED, device=device), E, 4, granularity=2)
    _, ids = moe(torch.randn(200, D, dtype=F64, device=device), return_ids=True)
    copies = ids.sort(1).values.view(200, 2, 2)
    assert torch.equal(copies[..., 0] + 1, copies[..., 1]) and not (copies[..., 0] % 2).any()
    assert moe.tokens_per_expert.count_nonzero() == E
    assert (upcycle(Dense(GATED), E, 4, granularity=2).router.gate.weight.std() - 0.02).abs() < 0.01


def test_noise(cpu):
    """Each expert has its own, of the standard deviation that was asked for, on a part of the elements."""
    w1, w2 = torch.randn(200, 50) / 7, torch.randn(50, 200) / 14
    moe = upcycle((w1, w2), 3, 1, noise=0.1, noise_fraction=0.25)
    for stacked, dense in ((moe.experts.w1, w1), (moe.experts.w2, w2)):
        added = stacked.detach() - dense
        changed = added != 0
        assert abs(changed.float().mean() - 0.25) < 0.02
        assert abs(added[changed].std() / dense.std() - 0.1) < 0.005
        assert not torch.equal(added[0], added[1])
    same = [upcycle((w1, w2), 3, 1, noise=0.1, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in same), strict=True))
    state = torch.get_rng_state()
    upcycle((w1, w2), 3, 1, noise=0.1, generator=torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)  # nothing else draws


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_dtype_and_sources(device, dtype):
    """Modules of every kind and tuples give the same bits; the source is not changed or shared."""
    dense = Dense(GATED, dtype=dtype, device=device)
    up, gate, down = dense.parts
    shared = SharedExperts(
        D, F, activation="silu", alpha=1.0, limit=1.0, gated=True, bias=False, device=device, dtype=dtype
    )
    for ours, theirs in zip((shared.w1, shared.w2, shared.w3), (gate, down, up), strict=True):
        ours.weight.data.copy_(theirs.weight)
    layers = [
        upcycle(source, E, 2, granularity=2, router_dtype=F32, generator=torch.Generator().manual_seed(1))
        for source in (dense, shared, (gate, down, up), (gate.weight, down.weight, up.weight))
    ]
    for layer in layers:
        assert layer.experts.w1.dtype == dtype and layer.router.gate.weight.dtype == F32
        assert layer.experts.w1.device.type == device.type and layer.experts.w1.requires_grad
        for ours, first in zip(layer.parameters(), layers[0].parameters(), strict=True):
            assert torch.equal(ours, first)
    copies = layers[0].experts.w2.detach().view(4, 2, D, F // 2)
    assert torch.equal(torch.cat([copies[3, 0], copies[3, 1]], 1), down.weight)
    assert upcycle(
        (torch.empty(F, D, device="meta"), torch.empty(D, F, device="meta")), E, 2
    ).experts.w1.is_meta


WEIGHTS = (torch.randn(F, D), torch.randn(D, F), torch.randn(F, D))
ODD = nn.ModuleDict({"gate_up_proj": nn.Linear(D, 2 * F), "down_proj": nn.Linear(F, D)})
MORE = Dense(GATED)
MORE.norm = nn.RMSNorm(D)
TURNED = (torch.randn(F, D), torch.randn(F, D))


@pytest.mark.parametrize(
    "mlp, options, error, message",
    (
        (ODD, {}, TypeError, "gate_proj/down_proj/up_proj or .*, found ModuleDict with gate_up_proj"),
        (nn.Identity(), {}, TypeError, "found Identity with no parts"),
        (MORE, {}, ValueError, "no parameters beside gate_proj, down_proj, up_proj, found norm.weight"),
        (WEIGHTS[:1], {}, TypeError, r"a tuple \(w1, w2, w3\) or \(w1, w2\), found 1 parts"),
        ((WEIGHTS[0], nn.Conv1d(D, F, 1)), {}, TypeError, "w2 to be an nn.Linear or a tensor, found Conv1d"),
        (TURNED, {}, ValueError, r"w2 of shape \(D, F\) = \(12, 16\), found \(16, 12\)"),
        ((WEIGHTS[0].half(), *WEIGHTS[1:]), {}, TypeError, "w2 of w1's dtype torch.float16"),
        ((WEIGHTS[0].int(), WEIGHTS[1].int()), {}, TypeError, "w1 of dtype float32 or .*, found torch.int32"),
        (WEIGHTS, {"granularity": 3, "num_experts": 6, "top_k": 3}, ValueError, "granularity = 3 divides"),
        (WEIGHTS, {"granularity": 4}, ValueError, "top_k to be a multiple of granularity = 4, found 2"),
        (WEIGHTS, {"granularity": 2, "num_experts": 7}, ValueError, "num_experts to be a .*, found 7"),
        (WEIGHTS, {"granularity": 0}, ValueError, "granularity >= 1, found 0"),
        (WEIGHTS, {"granularity": 2, "num_expert_groups": 8, "num_limited_groups": 2}, ValueError,
         "expert groups of whole copies, of a multiple of granularity = 2 experts, found 1"),
        (WEIGHTS, {"noise": -1.0}, ValueError, "noise >= 0, found -1.0"),
        (WEIGHTS, {"noise_fraction": 1.5}, ValueError, "noise_fraction >= 0 and <= 1, found 1.5"),
        (WEIGHTS, {"generator": 7}, TypeError, "generator to be a torch.Generator or None, found int"),
        (WEIGHTS, {"gated": False}, TypeError, "other settings to be among activation, .*, found gated"),
        (WEIGHTS, {"route_scale": 2.0}, TypeError, "other settings to be among .*, found route_scale"),
        (WEIGHTS, {"num_shared_experts": 1}, TypeError, "among .*, found num_shared_experts"),
        (Dense(GATED, act_fn=nn.GELU()), {}, ValueError,
         r"Dense's output to be down\(act\(gate\(x\)\) \* up\(x\)\) with activation='silu', found a"),
        (Dense(GATED, act_fn=nn.GELU()), {"activation": "gelu_tanh"}, ValueError, "'gelu_tanh', found a"),
        (FusedMoE(D, F, 4, 2, num_shared_experts=1, activation="relu").shared_experts, {}, ValueError,
         "SharedExperts's output to be .* with activation='silu', found"),
    ),
)  # fmt: skip
def test_wrong_calls(cpu, mlp, options, error, message):
    with pytest.raises(error, match=f"upcycle: expected .*{message}"):
        upcycle(mlp, **{"num_experts": E, "top_k": 2} | options)


LIMITED = {"activation": "swiglu_limited", "limit": 1.0}


@pytest.mark.parametrize(
    "names, forward, options",
    (
        (GATED, lambda m, x: m.down_proj(functional.silu(m.gate_proj(x)) * m.up_proj(x) * 0.5), None),
        (GATED, lambda m, x: Dense.forward(m, x) * torch.nan, None),
        (("w1", "w3", "w2"), lambda m, x: m.w2(functional.silu(m.w3(x)) * m.w1(x)), None),
        (("w1", "w3", "w2"), lambda m, x: m.w2(functional.silu(m.w1(x)) * m.w3(x)), {}),
        (("fc1", "fc2"), lambda m, x: m.fc2(functional.gelu(m.fc1(x))), None),
        (("fc1", "fc2"), lambda m, x: m.fc2(functional.gelu(m.fc1(x))), {"activation": "gelu"}),
        (GATED, lambda m, x: m.down_proj(activate(m.gate_proj(x), m.up_proj(x), **LIMITED)), None),
        (GATED, lambda m, x: m.down_proj(activate(m.gate_proj(x), m.up_proj(x), **LIMITED)), LIMITED),
    ),
)
def test_what_a_module_computes(cpu, names, forward, options):
    """A module that computes something else with parts of these names is refused; options: it is not."""
    mlp = type("Other", (Dense,), {"forward": forward})(names)
    if options is None:
        with pytest.raises(ValueError, match="expected Other's output to be .*, found a relative difference"):
            upcycle(mlp, E, 2)
    else:
        x = 3 * torch.randn(T, D, dtype=F64)
        torch.testing.assert_close(upcycle(mlp, E, 2, **options)(x), mlp(x))


@pytest.mark.parametrize("dtype", (BF16, F16, F32), ids=str)
def test_rounding_is_no_difference(device, dtype):
    """Nor is dropout, nor a part that is zero; the module stays in training, and nothing is drawn."""
    mlp = Dense(GATED, dtype=dtype, device=device, act_fn=nn.Sequential(nn.SiLU(), nn.Dropout(0.5)))
    state = torch.get_rng_state()
    for part in (None, mlp.down_proj, mlp.gate_proj):
        if part is not None:
            nn.init.zeros_(part.weight)
        upcycle(mlp, E, 2, generator=torch.Generator())
    assert mlp.act_fn[1].training and torch.equal(torch.get_rng_state(), state)


def test_activations(cpu):
    """A module's own function is compared on the points where activations differ."""
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        dense = Dense(GATED, act_fn=lambda x, name=name: activate(x, activation=name))
        x = torch.randn(T, D, dtype=F64)
        torch.testing.assert_close(fused_moe.upcycle(dense, 4, 2, activation=name)(x), dense(x))


SCRIPT = Path(__file__).parent.parent / "examples" / "upcycle.py"


@pytest.mark.parametrize("flags", ((), ("--granularity", "2")), ids=("copies", "halves"))
def test_the_example(cpu, capsys, monkeypatch, flags):
    """The upcycled model starts with the dense one's loss; both go on to learn."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    if not SCRIPT.exists():
        pytest.skip("needs examples/")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    sizes = (
        "--steps 20 --dim 32 --hidden-dim 32 --layers 1 --seq-len 32 --batch-size 16 --num-experts 4".split()
    )
    dense, upcycled, *later = importlib.import_module("upcycle").main([*sizes, *flags])
    assert upcycled == pytest.approx(dense, abs=1e-5)
    assert all(bits < dense - 0.1 for bits in later)
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["dense, 2", "upcycled"] * 2
