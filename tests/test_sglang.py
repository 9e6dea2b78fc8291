"""fused_moe.sglang: SGLang's runner, in stubs of its interface, against the same in plain PyTorch."""

import importlib
import logging
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import sglang_stubs as stubs
import torch
import torch.nn.functional as F
from cases import LOOSE, assert_near

T, D, F_, E, K = 12, 32, 24, 6, 3


@pytest.fixture
def sglang(monkeypatch):
    """The stubs after `register`, with the flag."""
    state = stubs.install(monkeypatch)
    importlib.import_module("fused_moe.sglang").register()
    state.backend = "fused_moe"
    return state


def inputs(config, bias=False, dtype=torch.float32):
    """x, topk and quant_info; some ids are -1, as SGLang's dispatcher marks remote experts."""
    torch.manual_seed(7)
    rows = 2 * F_ if config.is_gated else F_
    x = torch.randn(T, D, dtype=dtype)
    ids = torch.randint(-1, E, (T, K), dtype=torch.int32)
    topk = stubs.TopKOutput(torch.rand(T, K), ids, None)
    info = stubs.TritonMoeQuantInfo(
        torch.randn(E, rows, D, dtype=dtype) / D**0.5,
        torch.randn(E, D, F_, dtype=dtype) / F_**0.5,
        torch.randn(E, rows, dtype=dtype) if bias else None,
        torch.randn(E, D, dtype=dtype) if bias else None,
    )
    return x, topk, info


def run(method, x, topk, info, hooks=None):
    dispatched = stubs.StandardDispatchOutput(x, None, topk)
    combined = method.runner.run(dispatched, info, hooks)
    assert isinstance(combined, stubs.StandardCombineInput)
    return combined.hidden_states


def plain(config, act, x, topk, info):
    """Each token's experts, one by one, in float64."""
    scale = config.routed_scaling_factor or 1.0
    w13, w2, b13, b2 = (
        None if w is None else w.double() for w in (info.w13_weight, info.w2_weight, info.b13, info.b2)
    )
    out = torch.zeros(T, D, dtype=torch.float64)
    for t, k in torch.cartesian_prod(torch.arange(T), torch.arange(K)).tolist():
        e, score = topk.topk_ids[t, k].item(), topk.topk_weights[t, k].double()
        if e < 0:
            continue
        row = x[t].double() * (score if config.apply_router_weight_on_input else 1)
        h = w13[e] @ row + (0 if b13 is None else b13[e])
        y = w2[e] @ act(h) + (0 if b2 is None else b2[e])
        out[t] += scale * (y if config.apply_router_weight_on_input else score * y)
    return out


def halves(f, m=lambda up: up):
    return lambda h: f(h[:F_]) * m(h[F_:])


def clamped(gate, up):
    gate = gate.clamp(max=3.0)
    return gate * torch.sigmoid(1.5 * gate) * (up.clamp(-3.0, 3.0) + 1)


OAI = {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 3.0}
CASES = {
    "silu": ({}, halves(F.silu)),
    "gelu": ({"activation": "gelu"}, halves(F.gelu)),
    "gelu_tanh": ({"activation": "gelu_tanh"}, halves(lambda x: F.gelu(x, approximate="tanh"))),
    "interleaved": (OAI, lambda h: clamped(h[::2], h[1::2])),
    "clamped": (OAI | {"gate_up_interleaved": False}, lambda h: clamped(h[:F_], h[F_:])),
    "limited": (
        {"swiglu_limit": 0.5},
        halves(lambda x: F.silu(x.clamp(max=0.5)), lambda up: up.clamp(-0.5, 0.5)),
    ),
    "situ": (
        {"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 3.0},
        halves(lambda x: 2 * torch.tanh(x / 2) * torch.sigmoid(x), lambda up: 3 * torch.tanh(up / 3)),
    ),
    "situ of 4": (
        {"activation": "situ", "gemm1_clamp_limit": 3.0},
        halves(lambda x: 4 * torch.tanh(x / 4) * torch.sigmoid(x), lambda up: 3 * torch.tanh(up / 3)),
    ),
    "plain silu": ({"is_gated": False}, F.silu),
    "plain gelu": ({"is_gated": False, "activation": "gelu"}, F.gelu),
    "plain relu2": ({"is_gated": False, "activation": "relu2"}, lambda h: F.relu(h).square()),
    "scaled": ({"routed_scaling_factor": 2.5}, halves(F.silu)),
    "on the input": ({"apply_router_weight_on_input": True}, halves(F.silu)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_run(sglang, name, bias):
    options, act = CASES[name]
    config = stubs.MoeRunnerConfig(**options)
    if bias and config.apply_router_weight_on_input:
        bias = False  # refused; test_refused_calls has it
    method = stubs.build(sglang, config)
    x, topk, info = inputs(config, bias)
    before = x.clone()
    out = run(method, x, topk, info)
    assert_near(out, plain(config, act, x, topk, info), LOOSE)
    assert torch.equal(x, before), "inplace permits writing x; nothing here does"


def test_updated_weights(sglang):
    config = stubs.MoeRunnerConfig()
    method = stubs.build(sglang, config)
    x, topk, info = inputs(config)
    first = run(method, x, topk, info)
    info.w13_weight.mul_(0.5)
    info.w2_weight = -info.w2_weight
    assert_near(run(method, x, topk, info), plain(config, halves(F.silu), x, topk, info), LOOSE)
    assert not torch.equal(first, run(method, x, topk, info))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(sglang, tokens):
    config = stubs.MoeRunnerConfig()
    x, topk, info = inputs(config, dtype=torch.bfloat16)
    few = stubs.TopKOutput(topk.topk_weights[:tokens], topk.topk_ids[:tokens], None)
    out = run(stubs.build(sglang, config), x[:tokens], few, info)
    assert out.shape == (tokens, D) and out.dtype == torch.bfloat16


REFUSED = [
    ({"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit 7.0"),
    ({"gemm1_alpha": 1.702}, "gemm1_alpha 1.702"),
    (OAI | {"gemm1_beta": 0.0}, "gemm1_beta 0.0"),
    ({"activation": "gelu", "swiglu_limit": 7.0}, "found gelu"),
    ({"activation": "situ"}, "found situ"),
    ({"activation": "silu_rounded"}, "found silu_rounded"),
    ({"activation": "relu2"}, "found relu2"),
    ({"activation": "gelu_tanh", "is_gated": False}, "is_gated False"),
    ({"no_combine": True, "inplace": False}, "found no_combine"),
    ({"apply_router_weight_on_input": True, "routed_scaling_factor": 2.5}, "found 2.5"),
]


@pytest.mark.parametrize("options, found", REFUSED)
def test_refused_layers(sglang, options, found):
    with pytest.raises(ValueError, match="--moe-runner-backend fused_moe expected .*" + found):
        stubs.build(sglang, stubs.MoeRunnerConfig(**options))


def test_refused_exchange(sglang):
    sglang.exchange = "deepep"
    with pytest.raises(ValueError, match="expected --moe-a2a-backend none, found deepep"):
        stubs.build(sglang, stubs.MoeRunnerConfig())


def test_refused_methods(sglang):
    class Fp8MoEMethod:
        pass

    with pytest.raises(ValueError, match="expected unquantised experts, found Fp8MoEMethod"):
        stubs.build(sglang, stubs.MoeRunnerConfig(), Fp8MoEMethod())

    class WithOwnRunner(sglang.method):
        def create_moe_runner(self, layer, moe_runner_config):
            self.runner = None

    with pytest.raises(ValueError, match="expected unquantised experts, found WithOwnRunner"):
        stubs.build(sglang, stubs.MoeRunnerConfig(), WithOwnRunner())
    sglang.backend = "triton"
    stubs.build(sglang, stubs.MoeRunnerConfig(), Fp8MoEMethod())


def test_refused_calls(sglang):
    config = stubs.MoeRunnerConfig(apply_router_weight_on_input=True)
    method = stubs.build(sglang, config)
    with pytest.raises(ValueError, match="no biases beside apply_router_weight_on_input, found biases"):
        run(method, *inputs(config, bias=True))
    with pytest.raises(ValueError, match="expected no LoRA on experts, found LoRA"):
        run(method, *inputs(config), hooks=object())


def test_without_the_flag(sglang):
    sglang.backend = "auto"
    method = stubs.build(sglang, stubs.MoeRunnerConfig(activation="silu_rounded"))
    assert method.runner.runner_backend.value == "triton" and method.runner.runner_core is None


def test_register_twice(sglang, caplog):
    with caplog.at_level(logging.WARNING):
        importlib.import_module("fused_moe.sglang").register()
    assert not caplog.records
    assert sglang.choices == ["auto", "triton", "fused_moe"] and list(sglang.cores) == ["fused_moe"]


@pytest.mark.parametrize(
    "module, name, found",
    [
        ("layers.moe.moe_runner", "register_moe_runner_core", "register_moe_runner_core"),
        ("layers.moe.moe_runner.base", "DispatchMoeRunnerCore", "DispatchMoeRunnerCore"),
        ("plugins.hook_registry", "HookRegistry", "HookRegistry"),
    ],
)
def test_interface_without_a_name(monkeypatch, caplog, module, name, found):
    state = stubs.install(monkeypatch)
    delattr(state.modules[f"sglang.srt.{module}"], name)
    importlib.import_module("fused_moe.sglang").register()
    (record,) = caplog.records
    assert "does not fit SGLang 0.5.23" in record.getMessage() and found in record.getMessage()
    assert state.choices == ["auto", "triton"] and not state.cores and not state.hooks


def test_interface_with_other_arguments(monkeypatch, caplog):
    state = stubs.install(monkeypatch)
    monkeypatch.setattr(state.method, "create_moe_runner", lambda self, layer: None)
    importlib.import_module("fused_moe.sglang").register()
    (record,) = caplog.records
    assert "expected to take self, layer, moe_runner_config, found self, layer" in record.getMessage()
    assert state.choices == ["auto", "triton"] and not state.cores and not state.hooks


def test_without_sglang(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.delitem(sys.modules, "sglang.version", raising=False)
    with pytest.raises(ImportError, match="pip install sglang"):
        importlib.import_module("fused_moe.sglang").register()


def test_import_fused_moe_alone():
    code = "import fused_moe, sys; assert not [m for m in sys.modules if m.partition('.')[0] == 'sglang']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_entry_point():
    found = entry_points(group="sglang.srt.plugins", name="fused_moe")
    if not found:
        pytest.skip("fused_moe is not installed with its entry points")
    (entry,) = {entry.value for entry in found}
    assert entry == "fused_moe.sglang:register"
