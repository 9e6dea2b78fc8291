"""fused_moe.sglang: layers of SGLang's through its runner, against the same in plain PyTorch."""

from sglang_harness import (  # noqa: F401
    PACKAGES,
    D,
    E,
    F,
    K,
    build_layer,
    engine,
    make_layer,
    pretended,
    run,
)

# isort: split
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import sglang.srt.layers.moe.moe_runner.runner as runner
import torch
import torch.nn.functional as functional
from cases import BF16, F16, F32, F64, LOOSE, assert_as_good, clamped, halves, pairs
from sglang.srt import plugins
from sglang.srt.layers.moe.moe_runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton import TritonRunnerCore
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_flags
from sglang.test.parallel_groups import parallel_scope

import fused_moe.sglang
from fused_moe.sglang import hooks
from fused_moe.sglang.core import NAME, FusedMoERunnerCore, why_no_kernels  # before the harness replaces it

T = 21
LIMIT = 0.5  # signals of order one reach it

# --- what a layer computes ----------------------------------------------------------------------------


def routing(tokens=T, top_k=K, num_experts=E):
    scores, ids = torch.rand(tokens, num_experts).topk(top_k)
    return scores, ids.int()


def situ(alpha):
    def function(gate, up):
        return alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)

    return function


PLAIN = {"is_gated": False}
GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": LIMIT}
MINIMAX = {**GPT_OSS, "gemm1_beta": 1.0, "gate_up_interleaved": False}
SITU = {"gemm1_clamp_limit": 3.0}
# name -> settings of the layer, what it computes of h
ACTIVATIONS = {
    "silu": ({}, halves(lambda gate, up: functional.silu(gate) * up)),
    "gelu": ({}, halves(lambda gate, up: functional.gelu(gate) * up)),
    "gelu_tanh": ({}, halves(lambda gate, up: functional.gelu(gate, approximate="tanh") * up)),
    "silu limited": ({"swiglu_limit": LIMIT}, halves(clamped(1, 0, LIMIT))),
    "silu gpt-oss": (GPT_OSS, pairs(clamped(1.702, 1, LIMIT))),
    "silu minimax": (MINIMAX, halves(clamped(1.702, 1, LIMIT))),
    "situ": (SITU, halves(situ(4))),
    "situ alpha": ({**SITU, "gemm1_alpha": 2.0}, halves(situ(2))),
    "silu plain": (PLAIN, functional.silu),
    "gelu plain": (PLAIN, functional.gelu),
    "relu2 plain": (PLAIN, lambda h: functional.relu(h).square()),
}  # fmt: skip
SILU = ACTIVATIONS["silu"][1]


def plain(layer, x, scores, ids, function, dtype, on_input=False):
    """The experts of `layer` one by one, in plain PyTorch."""
    x, out = x.to(dtype), torch.zeros_like(x, dtype=dtype)
    for e in range(layer.num_local_experts):
        weight = (scores * (ids == e)).sum(-1, keepdim=True).to(dtype)
        h = (x * weight if on_input else x) @ layer.w13_weight[e].to(dtype).T
        if layer.with_bias:
            h = h + layer.w13_weight_bias[e].to(dtype)
        y = function(h) @ layer.w2_weight[e].to(dtype).T
        if layer.with_bias:
            y = y + layer.w2_weight_bias[e].to(dtype)
        out += y * (weight != 0) if on_input else y * weight
    return out


def check(layer, out, x, scores, ids, function=SILU, factor=1, **options):
    """`out` is as near to the experts in float64 as plain PyTorch in out's dtype."""
    eager, exact = (factor * plain(layer, x, scores, ids, function, t, **options) for t in (out.dtype, F64))
    assert_as_good({"out": out}, {"out": eager}, {"out": exact}, LOOSE)


@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(pretended, name, bias):  # noqa: F811
    settings, function = ACTIVATIONS[name]
    layer = make_layer(activation=name.split()[0], with_bias=bias, **settings)
    assert isinstance(layer.runner.runner_core, FusedMoERunnerCore)
    x, routes = torch.randn(T, D, dtype=BF16), routing()
    check(layer, run(layer, x, *routes), x, *routes, function)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("tokens", (0, 1, 64))
def test_batches(pretended, dtype, tokens):  # noqa: F811
    layer = make_layer(params_dtype=dtype)
    x, routes = torch.randn(tokens, D, dtype=dtype), routing(tokens)
    check(layer, run(layer, x, *routes), x, *routes)


def test_dropped_slots(pretended):  # noqa: F811
    """An id of -1 adds nothing; SGLang gives it to padding, and to experts of other ranks."""
    layer, x, (scores, ids) = make_layer(), torch.randn(T, D, dtype=BF16), routing()
    ids[::3, 0] = -1
    ids[5] = -1
    out = run(layer, x, scores, ids)
    check(layer, out, x, scores, ids)
    assert not out[5].any()


@pytest.mark.parametrize("factor", (None, 2.5))
@pytest.mark.parametrize("on_input", (False, True), ids=("output", "input"))
def test_factors(pretended, on_input, factor):  # noqa: F811
    layer = make_layer(apply_router_weight_on_input=on_input, routed_scaling_factor=factor)
    x, routes = torch.randn(T, D, dtype=BF16), routing()
    check(layer, run(layer, x, *routes), x, *routes, factor=factor or 1, on_input=on_input)


def test_input_stays(pretended):  # noqa: F811
    """inplace allows writing to the input; nothing here does."""
    layer, x, routes = make_layer(inplace=True), torch.randn(T, D, dtype=BF16), routing()
    topk = SimpleNamespace(topk_weights=routes[0], topk_ids=routes[1])
    output = SimpleNamespace(hidden_states=x, topk_output=topk)
    before, info = x.clone(), layer.quant_method.get_triton_quant_info(layer)
    (out,) = layer.runner.runner_core.run_from_dispatch(output, info, layer.moe_runner_config)
    assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()


def test_loaded_weights(pretended):  # noqa: F811
    """w13 of a checkpoint: gate rows, then up rows."""
    layer = build_layer()
    shapes = {"w1": (F, D), "w3": (F, D), "w2": (D, F)}
    weights = {shard: torch.randn(E, *shape, dtype=BF16) / 5 for shard, shape in shapes.items()}
    for shard, values in weights.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        for e in range(E):
            layer.weight_loader(getattr(layer, name), values[e], name, shard, e)
    layer.quant_method.process_weights_after_loading(layer)
    x, (scores, ids) = torch.randn(T, D, dtype=BF16), routing()
    out, exact = run(layer, x, scores, ids), torch.zeros(T, D, dtype=F64)
    w1, w2, w3 = (weights[shard].double() for shard in ("w1", "w2", "w3"))
    for t in range(T):
        for score, e in zip(scores[t], ids[t], strict=True):
            gate, up = w1[e] @ x[t].double(), w3[e] @ x[t].double()
            exact[t] += score * (w2[e] @ (functional.silu(gate) * up))
    torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=0.03)


def test_weights_that_move(pretended):  # noqa: F811
    """Parameters written in place, and parameters that are replaced."""
    layer, x, routes = make_layer(with_bias=True), torch.randn(T, D, dtype=BF16), routing()
    first = run(layer, x, *routes)
    for parameter in layer.parameters():
        parameter.data.mul_(-1.5)
    second = run(layer, x, *routes)
    check(layer, second, x, *routes)
    assert not torch.equal(first, second)
    layer.w2_weight = torch.nn.Parameter(2 * layer.w2_weight, requires_grad=False)
    check(layer, run(layer, x, *routes), x, *routes)


def test_two_ranks(pretended):  # noqa: F811
    """The dispatcher maps ids to a rank's; the ranks' outputs sum to those of all experts."""
    whole, x, routes = make_layer(), torch.randn(T, D, dtype=BF16), routing()
    outs = []
    for rank in range(2):
        with parallel_scope(tp_size=2, attn_tp_size=2, moe_ep_size=2, moe_ep_rank=rank):
            layer, own = build_layer(), slice(rank * E // 2, (rank + 1) * E // 2)
            layer.w13_weight.data.copy_(whole.w13_weight[own])
            layer.w2_weight.data.copy_(whole.w2_weight[own])
            outs.append(run(layer, x, *routes))
    check(whole, sum(outs), x, *routes)


# --- what is not taken ----------------------------------------------------------------------------------

# settings of the layer, what the message says
REFUSED = {
    "float32": ({"params_dtype": F32}, "expected bfloat16 or float16 weights, found torch.float32"),
    "widths": ({"intermediate_size": 12}, r"expected widths that are multiples of 8, found \(32, 12\)"),
    "no sum": ({"no_combine": True}, "expected a sum over a token's experts, found no_combine=True"),
    "biases": (
        {"apply_router_weight_on_input": True, "with_bias": True},
        "expected no biases beside apply_router_weight_on_input, found with_bias=True",
    ),
    "fp8": ({"quant_config": Fp8Config()}, "expected unquantised experts, found Fp8MoEMethod"),
    "clamp after silu": ({"gemm1_clamp_limit": LIMIT}, "found silu with .* gemm1_clamp_limit=0.5"),
    "alpha without limit": ({"gemm1_alpha": 1.5}, "found silu with .* gemm1_alpha=1.5"),
    "beta": ({**GPT_OSS, "gemm1_beta": 0.0}, "found silu with .* gemm1_beta=0.0"),
    "situ without limit": ({"activation": "situ"}, "found situ with"),
    "gelu with a limit": ({"activation": "gelu", "gemm1_clamp_limit": LIMIT}, "found gelu with"),
    "silu_rounded": ({"activation": "silu_rounded"}, "found silu_rounded with"),
    "gelu_tanh plain": ({"activation": "gelu_tanh", **PLAIN}, "found gelu_tanh with is_gated=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pretended, name):  # noqa: F811
    settings, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message) as raised:
        build_layer(**settings)
    assert str(raised.value).startswith("--moe-runner-backend fused_moe expected ")


def test_refused_methods(pretended):  # noqa: F811
    """A method that takes another runner unasked."""

    class Method(UnquantizedFusedMoEMethod):
        def create_moe_runner(self, layer, moe_runner_config):
            self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    with pytest.raises(NotImplementedError, match="expected unquantised experts, found Method"):
        build_layer(quant_method=Method())


def test_refused_exchanges(pretended, monkeypatch):  # noqa: F811
    monkeypatch.setattr(get_flags().moe, "a2a_backend", MoeA2ABackend.DEEPEP)
    with pytest.raises(NotImplementedError, match="expected --moe-a2a-backend none, found deepep"):
        FusedMoERunnerCore(make_config())


def make_config(**settings):
    sizes = {"hidden_size": D, "intermediate_size_per_partition": F, "params_dtype": BF16}
    return MoeRunnerConfig(**{**sizes, **settings})


def test_refused_machines(engine):  # noqa: F811
    assert why_no_kernels() is not None  # on a machine without a GPU
    with pytest.raises(NotImplementedError, match="expected Hopper's kernels to be on, found them off"):
        FusedMoERunnerCore(make_config())


def test_refused_lora(pretended):  # noqa: F811
    with pytest.raises(NotImplementedError, match="expected no LoRA of experts"):
        FusedMoERunnerCore(make_config()).run_from_dispatch(None, None, None, hooks=object())


# --- the plugin -----------------------------------------------------------------------------------------


@pytest.fixture
def unregistered(engine, monkeypatch):  # noqa: F811
    """SGLang as it was before `register`: the choices of the flag."""
    monkeypatch.setattr(runner, "_CUSTOM_RUNNER_CORE_FACTORIES", {})
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    choices = hooks.MOE_RUNNER_BACKEND_CHOICES
    choices.remove(NAME)
    yield choices
    if NAME not in choices:
        choices.append(NAME)


def test_without_the_flag(engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(get_flags().moe, "runner_backend", MoeRunnerBackend.AUTO)
    assert isinstance(build_layer(params_dtype=F32).runner.runner_core, TritonRunnerCore)


def test_register(unregistered):
    for _ in range(2):
        fused_moe.sglang.register()
    assert unregistered.count(NAME) == 1
    assert runner._CUSTOM_RUNNER_CORE_FACTORIES == {NAME: FusedMoERunnerCore}
    assert {*HookRegistry._hooks} == {
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner",
        "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.__init__",
    }
    assert FusedMoERunnerCore.runner_backend.fget(None).value == NAME


def test_entry_point(unregistered, monkeypatch):
    """SGLang finds `register` where the package is installed."""
    if not entry_points(group=plugins.GENERAL_PLUGINS_GROUP, name=NAME) and not PACKAGES:
        pytest.skip("needs fused_moe as an installed package")
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()
    assert NAME in unregistered


def change_parameters(monkeypatch):
    def run_from_dispatch(self, dispatch_output, quant_info):
        pass

    expected = {run_from_dispatch: next(iter(hooks.PARAMETERS.values()))}
    monkeypatch.setattr(hooks, "PARAMETERS", expected)


def change_fields(monkeypatch):
    monkeypatch.setattr(hooks, "FIELDS", {MoeRunnerConfig: {"activation", "gemm1_gamma"}})


def lose_a_name(monkeypatch):
    monkeypatch.delattr("sglang.srt.layers.moe.moe_runner.register_moe_runner_core")
    monkeypatch.delitem(sys.modules, "fused_moe.sglang.hooks")
    monkeypatch.delattr(fused_moe.sglang, "hooks")


@pytest.mark.parametrize(
    "change, words",
    (
        (change_parameters, "run_from_dispatch expected to take self, dispatch_output, quant_info, runner"),
        (change_fields, "MoeRunnerConfig expected fields gemm1_gamma, found none"),
        (lose_a_name, "ImportError: cannot import name 'register_moe_runner_core'"),
    ),
)
def test_another_interface(unregistered, monkeypatch, caplog, change, words):
    change(monkeypatch)
    fused_moe.sglang.register()
    assert NAME not in unregistered and not runner._CUSTOM_RUNNER_CORE_FACTORIES and not HookRegistry._hooks
    (message,) = (record.getMessage() for record in caplog.records if record.name == "fused_moe.sglang")
    assert message.startswith("fused_moe does not fit SGLang ") and words in message


def test_import_needs_no_sglang():
    code = """
import sys
import fused_moe.sglang
assert "sglang" not in sys.modules
sys.modules["sglang"] = None
try:
    fused_moe.sglang.register()
except ImportError as error:
    assert "fused_moe.sglang needs SGLang: pip install sglang" in str(error), error
else:
    raise AssertionError("no ImportError")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
