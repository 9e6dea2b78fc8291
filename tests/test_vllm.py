"""fused_moe.vllm: layers of vLLM's factory through vLLM's runner, against the same in plain PyTorch."""

from vllm_harness import (  # noqa: F401
    PACKAGES,
    build_layer,
    load,
    make_layer,
    ours,
    pretended,
    route,
    run,
    sleep,
    vllm_config,
    wake,
)  # fmt: skip

# isort: split
import logging
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
import vllm.model_executor.custom_op as custom_op
import vllm.model_executor.layers.fused_moe.config as moe_config
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep as naive_dp_ep
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as vllm_method
from cases import BF16, F16, F32, F64, LOOSE, assert_as_good, clamped, halves, pairs
from torch import nn
from vllm import plugins
from vllm.config import ParallelConfig
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.eep_reconfigure import _make_eep_experts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.utils import weights_already_processed

import fused_moe.vllm
from fused_moe.vllm import experts as experts_module
from fused_moe.vllm import report, unquantized
from fused_moe.vllm.experts import FusedMoEExperts, why_no_kernels  # before the harness replaces it

T, D, HIDDEN, E, K = 21, 32, 16, 8, 2
SIZES = {"gate_proj": HIDDEN, "up_proj": HIDDEN, "down_proj": D}  # rows of an expert's matrices
LIMIT = 0.5  # signals of order one reach it


@pytest.fixture
def config(pretended, vllm_config):  # noqa: F811
    report._layers.clear()
    return vllm_config


def inputs(dtype=BF16, tokens=T, num_experts=E):
    return torch.randn(tokens, D, dtype=dtype), torch.randn(tokens, num_experts, dtype=dtype)


# --- what a layer computes ----------------------------------------------------------------------------


PLAIN = {"ckpt_names": ("up_proj", "down_proj", None)}


def situ(gate, up):
    return 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)


# name -> settings of the factory, what it computes of h
ACTIVATIONS = {
    "silu": ({}, halves(lambda gate, up: F.silu(gate) * up)),
    "gelu": ({}, halves(lambda gate, up: F.gelu(gate) * up)),
    "gelu_tanh": ({}, halves(lambda gate, up: F.gelu(gate, approximate="tanh") * up)),
    "silu limited": ({"swiglu_limit": LIMIT}, halves(clamped(1, 0, LIMIT))),
    "swigluoai": ({}, pairs(clamped(1.702, 1, 7))),
    "swigluoai limited": ({"swiglu_limit": LIMIT, "swiglu_alpha": 1.5}, pairs(clamped(1.5, 1, LIMIT))),
    "swigluoai_uninterleave": (
        {"swiglu_limit": LIMIT, "swiglu_alpha": 1.5, "swiglu_beta": 1.0},
        halves(clamped(1.5, 1, LIMIT)),
    ),
    "swigluoai_uninterleave without constants": ({"swiglu_limit": LIMIT}, halves(clamped(1, 0, LIMIT))),
    "situ": ({"activation_situ_beta": 2.0, "activation_situ_linear_beta": 3.0}, halves(situ)),
    "silu_no_mul": (PLAIN, F.silu),
    "gelu_no_mul": (PLAIN, F.gelu),
    "gelu_tanh_no_mul": (PLAIN, lambda h: F.gelu(h, approximate="tanh")),
    "relu2_no_mul": (PLAIN, lambda h: F.relu(h).square()),
}


def plain(layer, x, scores, ids, function, dtype, expert_map=None):
    """The experts of `layer` one by one, in plain PyTorch."""
    weights = layer.routed_experts
    x, out = x.to(dtype), torch.zeros_like(x, dtype=dtype)
    for e in range(weights.global_num_experts):
        local = e if expert_map is None else int(expert_map[e])
        if local < 0:
            continue
        w13, w2 = weights.w13_weight[local].to(dtype), weights.w2_weight[local].to(dtype)
        h, b2 = x @ w13.T, 0
        if hasattr(weights, "w13_bias"):
            h, b2 = h + weights.w13_bias[local].to(dtype), weights.w2_bias[local].to(dtype)
        out += (scores * (ids == e)).sum(-1, keepdim=True).to(dtype) * (function(h) @ w2.T + b2)
    return out


def check(layer, out, x, scores, ids, function=ACTIVATIONS["silu"][1], expert_map=None):
    """`out` is as near to the experts in float64 as plain PyTorch in out's dtype."""
    eager, exact = (plain(layer, x, scores, ids, function, t, expert_map) for t in (out.dtype, F64))
    assert_as_good({"out": out}, {"out": eager}, {"out": exact}, LOOSE)


@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(config, name, bias):
    settings, function = ACTIVATIONS[name]
    layer = make_layer(config, activation=name.split()[0], has_bias=bias, **settings)
    assert isinstance(ours(layer), FusedMoEExperts)
    x, logits = inputs()
    check(layer, run(config, layer, x, logits), x, *route(x, logits, K, True), function)


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("tokens", (1, 2, 64))
def test_batches(config, dtype, tokens):
    layer = make_layer(config, dtype=dtype)
    x, logits = inputs(dtype, tokens)
    check(layer, run(config, layer, x, logits), x, *route(x, logits, K, True))


def test_router_weight_on_input(config):
    """vLLM's prepare multiplies the input, for one expert per token; the output is summed unweighted."""
    layer = make_layer(config, top_k=1, apply_router_weight_on_input=True)
    x, logits = inputs()
    scores, ids = route(x, logits, 1, True)
    scaled = x * scores.to(BF16)
    check(layer, run(config, layer, x, logits), scaled, torch.ones_like(scores), ids)


def test_weights_stay_as_loaded(config, monkeypatch):
    """vLLM rearranges weights for the backend that it would choose without us; here one that swaps halves."""
    choice = UnquantizedMoeBackend.FLASHINFER_CUTLASS, TritonExperts
    monkeypatch.setattr(vllm_method, "select_unquantized_moe_backend", lambda moe_config: choice)
    layer, (x, logits) = fresh(config, checkpoint(0)), inputs()
    gate = layer.routed_experts.w13_weight[0, :HIDDEN]
    assert torch.equal(gate, checkpoint(0)["0.gate_proj.weight"])
    check(layer, run(config, layer, x, logits), x, *route(x, logits, K, True))


def test_shared_experts(config, monkeypatch):
    """They stay vLLM's, by vllm::moe_forward_shared."""
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")  # which is CUDA's
    shared = nn.Linear(D, D, dtype=BF16)
    layer = make_layer(config, shared_experts=shared)
    assert isinstance(ours(layer), FusedMoEExperts)
    x, logits = inputs()
    routed = run(config, layer, x, logits) - shared(x)
    scores, ids = route(x, logits, K, True)
    exact = plain(layer, x, scores, ids, ACTIVATIONS["silu"][1], F64)
    torch.testing.assert_close(routed.double(), exact, atol=0.03, rtol=0.03)


# --- expert parallelism -------------------------------------------------------------------------------


class Ranks:
    """The experts of two ranks, with random weights, built as vLLM builds those of each rank."""

    def __init__(self, config, monkeypatch, **settings):
        monkeypatch.setattr(config.parallel_config, "enable_expert_parallel", True)
        self.layers = []
        for rank in range(2):
            monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            self.layers.append(make_layer(config, tp_size=2, **settings))
        assert all(isinstance(ours(layer), FusedMoEExperts) for layer in self.layers)
        assert [layer.routed_experts.w2_weight.size(0) for layer in self.layers] == [E // 2] * 2

    def plain(self, rank, x, scores, ids):
        layer = self.layers[rank]
        expert_map = layer.routed_experts.expert_map
        return plain(layer, x, scores, ids, ACTIVATIONS["silu"][1], F64, expert_map)

    def kernel(self, rank, prepare_finalize):
        """vLLM's kernel of our experts with another exchange of tokens."""
        return mk.FusedMoEKernel(prepare_finalize, ours(self.layers[rank]))

    def apply(self, rank, kernel, x, scores, ids):
        weights = self.layers[rank].routed_experts
        return kernel.apply(
            x, weights.w13_weight, weights.w2_weight, topk_weights=scores, topk_ids=ids,
            activation=weights.activation, global_num_experts=E, expert_map=weights.expert_map,
            apply_router_weight_on_input=False,
        )  # fmt: skip


@pytest.fixture
def ranks(config, monkeypatch):
    return Ranks(config, monkeypatch)


def near(out, exact):
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0.02)


def test_each_rank_adds_its_experts(config, ranks):
    """All ranks have all tokens, as with tensor parallelism; the runner sums over ranks."""
    x, logits = inputs()
    for rank, layer in enumerate(ranks.layers):
        near(run(config, layer, x, logits), ranks.plain(rank, x, *route(x, logits, K, True)))


def test_all_gather(config, ranks, monkeypatch):
    """vLLM's all-gather and reduce-scatter: each rank computes its experts of all ranks' tokens."""
    (x, logits), (more_x, more_logits) = inputs(), inputs(tokens=T)
    scores, ids = route(x, logits, K, True)
    more_scores, more_ids = route(more_x, more_logits, K, True)
    gathered = []

    class Group:
        """The collectives as the first of two ranks sees them, the other's part of the sum left out."""

        def dispatch(self, x, scores, ids, **_):
            gathered[:] = torch.cat([x, more_x]), torch.cat([scores, more_scores]), torch.cat([ids, more_ids])
            return tuple(gathered)

        def allocate_combine_input(self, *_, **__):
            return None

        def combine_into_output(self, rows, output, **_):
            output.copy_(rows[: len(output)])

    monkeypatch.setattr(naive_dp_ep, "get_ep_group", Group)
    for rank in range(2):
        kernel = ranks.kernel(rank, naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular())
        out = ranks.apply(rank, kernel, x, scores, ids)
        near(out, ranks.plain(rank, *gathered)[: len(x)])


@pytest.mark.parametrize("remote", ("-1", "another rank's"))
def test_deepep_format(ranks, remote):
    """Rows that were received, int64 ids, -1 or an expert of another rank for what is computed elsewhere."""
    x, logits = inputs()
    scores, ids = route(x, logits, K, True)
    for rank in range(2):
        here = ids // (E // 2) == rank
        received = here.any(-1)
        rows, row_scores = x[received], scores[received]
        elsewhere = -1 if remote == "-1" else (E - 1 if rank == 0 else 0)
        row_ids = ids.where(here, elsewhere)[received].long()

        class Received(MoEPrepareAndFinalizeNoDPEPModular):
            def prepare(self, a1, *_, **__):
                return rows, None, None, row_ids, row_scores  # noqa: B023

            def finalize(self, output, fused_expert_output, *_):
                output.zero_()[received] = fused_expert_output  # noqa: B023

        out = ranks.apply(rank, ranks.kernel(rank, Received()), x, scores, ids)
        near(out, ranks.plain(rank, x, scores, ids))


def test_a_rank_that_received_nothing(ranks):
    class Nothing(MoEPrepareAndFinalizeNoDPEPModular):
        def prepare(self, a1, topk_weights, topk_ids, *_, **__):
            return a1[:0], None, None, topk_ids[:0], topk_weights[:0]

        def finalize(self, output, fused_expert_output, *_):
            assert fused_expert_output.shape == (0, D)
            output.zero_()

    x, logits = inputs()
    out = ranks.apply(0, ranks.kernel(0, Nothing()), x, *route(x, logits, K, True))
    assert not out.any()


# --- compilation and batches --------------------------------------------------------------------------


def test_compile(config):
    """vLLM compiles the model around the layer, whose operator it does not look into: the same bits."""
    layer, (x, logits) = make_layer(config), inputs()
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    expected = run(config, layer, x, logits)
    compiled = torch.compile(lambda x, logits: layer(x, logits) * 2, fullgraph=True, backend=backend)
    assert torch.equal(run(config, compiled, x, logits), expected * 2)
    assert len(graphs) == 1 and torch.ops.vllm.moe_forward in graphs[0]


def test_batch_invariance(config, monkeypatch):
    """vLLM asks its experts whether a token has the same bits in every batch; ours say yes."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert isinstance(ours(make_layer(config)), FusedMoEExperts)


# --- weights that change ------------------------------------------------------------------------------


def checkpoint(seed: int) -> dict:
    """The experts' weights as a checkpoint names them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (HIDDEN, D), "up_proj": (HIDDEN, D), "down_proj": (D, HIDDEN)}
    return {
        f"{e}.{name}.weight": torch.randn(shape, generator=generator, dtype=F32).to(BF16) / shape[1] ** 0.5
        for e in range(E)
        for name, shape in shapes.items()
    }


def fresh(config, weights, **settings):
    """A new layer that has loaded a checkpoint, as vLLM's loader does it."""
    layer = build_layer(config, **settings)
    record_metadata_for_reloading(layer)
    list(layer.load_weights(weights.items()))
    load(layer)
    return layer


def update_in_place(config, layer, weights):
    """A trainer copies into the parameters, in the layout that kernels read."""
    for name, parameter in fresh(config, weights).routed_experts.named_parameters():
        getattr(layer.routed_experts, name).data.copy_(parameter)


def update_by_loaders(config, layer, weights):
    """A trainer calls the model's load_weights, without anything after it."""
    list(layer.load_weights(weights.items()))


def update_layerwise(config, layer, weights):
    """vLLM's reload_weights: loaded into new memory, processed, copied into the old."""
    initialize_layerwise_reload(layer)
    list(layer.load_weights(weights.items()))
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=BF16))


def update_by_new_memory(config, layer, weights):
    """Parameters get other memory."""
    for name, parameter in fresh(config, weights).routed_experts.named_parameters():
        getattr(layer.routed_experts, name).data = parameter.data.clone()


UPDATES = (update_in_place, update_by_loaders, update_layerwise, update_by_new_memory)


@pytest.mark.parametrize("level", (1, 2), ids=("sleep 1", "sleep 2"))
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_updates(config, update, level):
    """Three updates with sleep and wake between: each time the bits of a layer that has loaded them."""
    layer, (x, logits) = fresh(config, checkpoint(0)), inputs()
    before = run(config, layer, x, logits)
    for step in range(1, 4):
        weights = checkpoint(step)
        kept = sleep(layer)
        with pytest.raises(RuntimeError, match="storage"):
            run(config, layer, x, logits)
        wake(layer, kept if level == 1 else None)  # the second level discards weights
        if level == 1:
            assert torch.equal(run(config, layer, x, logits), before)
        update(config, layer, weights)
        after = run(config, layer, x, logits)
        assert torch.equal(after, run(config, fresh(config, weights), x, logits))
        assert not torch.equal(after, before)
        before = after


def nothing(layer):
    """Parameters stay those that were loaded."""


def replace_parameters(layer):
    """As an offloader does for the time of a call."""
    for name, parameter in list(layer.routed_experts.named_parameters()):
        setattr(layer.routed_experts, name, nn.Parameter(parameter.clone(), requires_grad=False))


def reload_processed(layer):
    """A layerwise reload from vLLM's cache of weights: it builds the kernel while the layer has other
    parameters for a moment."""
    biases = {f"{e}.{n}.bias": torch.ones(size, dtype=BF16) for e in range(E) for n, size in SIZES.items()}
    with weights_already_processed():
        update_layerwise(None, layer, checkpoint(1) | biases)


@pytest.mark.parametrize("before", (nothing, replace_parameters, reload_processed), ids=lambda f: f.__name__)
def test_biases_follow(config, before):
    """vLLM gives biases once, but the layer's of this moment are added, which EPLB has moved, for example."""
    layer, (x, logits) = fresh(config, checkpoint(0), has_bias=True), inputs()
    before(layer)
    for _ in range(3):
        for parameter in layer.routed_experts.parameters():
            parameter.data.normal_(std=0.3)
        check(layer, run(config, layer, x, logits), x, *route(x, logits, K, True))


def test_experts_that_move(config):
    """vLLM's EPLB moves experts between places in place: the bits of a layer that was loaded so."""
    layer, (x, logits) = make_layer(config), inputs()
    weights, group = list(layer.routed_experts.get_expert_weights()), get_ep_group()
    for _ in range(3):
        before = [tensor.clone() for tensor in weights]
        places = torch.randperm(E)
        rearrange_expert_weights_inplace(
            torch.arange(E)[None], places[None], [weights], [torch.empty_like(t) for t in weights],
            group.cpu_group, TorchDistGlooStagedEplbCommunicator(group.cpu_group),
        )  # fmt: skip
        assert all(torch.equal(new, old[places]) for new, old in zip(weights, before, strict=True))
        new = build_layer(config)
        new.load_state_dict(layer.state_dict())
        load(new)
        assert torch.equal(run(config, layer, x, logits), run(config, new, x, logits))


def test_a_new_expert_map(config, ranks):
    """Elastic expert parallelism changes which experts a rank has."""
    layer, (x, logits) = ranks.layers[0], inputs()
    scores, ids = route(x, logits, K, True)
    for _ in range(3):
        experts = torch.randperm(E)[: E // 2]
        layer.routed_experts.expert_map.fill_(-1)[experts] = torch.arange(E // 2, dtype=torch.int32)
        near(run(config, layer, x, logits), ranks.plain(0, x, scores, ids))


def test_elastic(config):
    """vLLM builds the experts anew when ranks come or go, by the arguments that it knows."""
    old = ours(make_layer(config))
    method = SimpleNamespace(moe_quant_config=old.quant_config)
    new = _make_eep_experts(method, old, MoEPrepareAndFinalizeNoDPEPModular(), old.moe_config)
    assert isinstance(new, FusedMoEExperts) and new.arguments == old.arguments


# --- what is not taken --------------------------------------------------------------------------------

NOT_TAKEN = {
    "activation swiglustep": {"activation": "swiglustep"},
    "activation situ": {"activation": "situ", "activation_situ_beta": 2.0},
    "alpha 1.5 and beta 0.5": {
        "activation": "swigluoai_uninterleave",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.5,
        "swiglu_beta": 0.5,
    },
    "dtype torch.float32": {"dtype": F32},
    "activation situ, linear_beta unset": {
        "activation": "situ",
        "activation_situ_beta": 2.0,
        "activation_situ_linear_beta": -1.0,
    },
    "activation situ, negative beta": {
        "activation": "situ",
        "activation_situ_beta": -2.0,
        "activation_situ_linear_beta": 3.0,
    },
    "widths (36, 16)": {"dim": 36},
    "widths (32, 12)": {"hidden_dim": 12},
}


@pytest.mark.parametrize("reason", NOT_TAKEN)
def test_not_taken(config, reason):
    """Such a layer keeps vLLM's experts."""
    layer = make_layer(config, **NOT_TAKEN[reason])
    assert isinstance(ours(layer), TritonExperts)
    assert not report._layers  # written when the weights had been loaded


def test_reasons(config, monkeypatch, caplog):
    """One line for each model says how many layers run here, and why others do not."""
    caplog.set_level(logging.INFO, "vllm")
    layers = [build_layer(config) for _ in range(3)]
    layers += [build_layer(config, dim=36), build_layer(config, activation="swiglustep")]
    monkeypatch.setattr(config.kernel_config, "moe_backend", "triton")
    layers.append(build_layer(config))
    monkeypatch.undo()
    for layer in layers * 2:  # the second time, as after an update of the weights
        load(layer)
    lines = [record.getMessage() for record in caplog.records if record.name == report.logger.name]
    assert lines == [
        "fused_moe runs the experts of 3 of 6 MoE layers; 1 keep vLLM's own: widths (36, 16), not multiples "
        "of 8; 1 keep vLLM's own: activation swiglustep; 1 keep vLLM's own: --moe-backend triton"
    ]
    caplog.clear()
    load(build_layer(config))  # a draft model
    assert caplog.messages[0] == "fused_moe runs the experts of 1 of 1 MoE layers"


@pytest.mark.parametrize(
    "tiers, reason",
    (
        ({"hopper": "on: bf16 and fp16, widths that are multiples of 8"}, None),
        ({"hopper": "off: expected compute capability 9.0, found 8.0"}, "found 8.0"),
        ({}, "no CUDA kernels"),
    ),
)
def test_kernels(monkeypatch, tiers, reason):
    """vLLM's experts are better than our portable kernels."""
    monkeypatch.setattr(fused_moe, "info", lambda: {"tiers": tiers})
    found = why_no_kernels.__wrapped__()
    assert found is None if reason is None else reason in found


def test_exchanges():
    """Batched formats and experts that exchange tokens themselves are left to vLLM's experts."""
    parallel = moe_config.FusedMoEParallelConfig.make_no_parallel()
    supported = FusedMoEExperts._supports_parallel_config
    assert supported(parallel)
    parallel.use_ep, parallel.ep_size, parallel.dp_size = True, 2, 2
    backends = get_args(get_type_hints(ParallelConfig)["all2all_backend"])
    taken = {name for name in backends if supported(replace(parallel, all2all_backend=name))}
    assert taken == {"allgather_reducescatter", "deepep_high_throughput", "deepep_v2"}
    tensor_parallel = moe_config.FusedMoEParallelConfig.make_no_parallel()
    assert not supported(replace(tensor_parallel, all2all_backend="passthrough"))


# --- registration -------------------------------------------------------------------------------------


@pytest.fixture
def unregistered(config, monkeypatch):
    """vLLM as it is before our plugin has been loaded."""
    monkeypatch.delitem(op_registry_oot, unquantized.NAME)
    return op_registry_oot


def test_registered_once(config, caplog):
    fused_moe.vllm.register()
    assert op_registry_oot[unquantized.NAME] is unquantized.FusedMoEMethod and not caplog.messages


def test_switched_off(unregistered, monkeypatch):
    monkeypatch.setenv("FUSED_MOE_VLLM", "0")
    fused_moe.vllm.register()
    assert unquantized.NAME not in unregistered


def test_switched_on_in_part(unregistered, monkeypatch, caplog):
    monkeypatch.setenv("FUSED_MOE_VLLM", "int4,unquantized")
    fused_moe.vllm.register()
    assert unquantized.NAME in unregistered and not caplog.messages
    del unregistered[unquantized.NAME]
    monkeypatch.setenv("FUSED_MOE_VLLM", "unquantized,fp4")
    fused_moe.vllm.register()
    assert unquantized.NAME not in unregistered
    assert "expected 0, 1, unquantized, fp8, int8, int4, mxfp4, found 'fp4'" in caplog.text


def other_arguments(self, output, hidden_states):
    """An interface of another vLLM."""


@pytest.mark.parametrize(
    "where, name, value, words",
    (
        (mk.FusedMoEExpertsModular, "apply", other_arguments, "TypeError: apply expected to take"),
        (FusedMoEMethodBase, "apply", other_arguments, "TypeError: apply expected to take self, layer, x"),
        (mk.FusedMoEExpertsModular, "workspace_shapes", other_arguments, "TypeError: workspace_shapes"),
        (custom_op.CustomOp, "register_oot", None, "TypeError"),
    ),
)
def test_another_interface(unregistered, monkeypatch, caplog, where, name, value, words):
    """One clear line, and vLLM's own experts."""
    monkeypatch.setattr(where, name, value)
    fused_moe.vllm.register()
    assert unquantized.NAME not in unregistered
    [message] = caplog.messages
    assert (
        message.startswith("fused_moe does not fit vLLM 0.33.0, whose own experts are used")
        and words in message
    )


@pytest.mark.parametrize("name", ("fused_experts", "w1_bias"))
def test_a_property_that_is_gone(unregistered, monkeypatch, caplog, name):
    """Without it the first forward would raise; no part is registered."""
    cls = mk.FusedMoEKernel if name == "fused_experts" else mk.FusedMoEExperts
    monkeypatch.delattr(cls, name)
    fused_moe.vllm.register()
    assert unquantized.NAME not in unregistered
    [message] = caplog.messages
    assert "(unquantized, fp8, int8, int4, mxfp4 layers): TypeError" in message
    assert f"expected to have {name}" in message


def test_a_name_that_is_gone(unregistered, monkeypatch, caplog):
    monkeypatch.delattr(mk, "FusedMoEActivationFormat")
    for module in ("experts", "unquantized"):
        monkeypatch.delitem(sys.modules, f"fused_moe.vllm.{module}")
    fused_moe.vllm.register()
    assert unquantized.NAME not in unregistered
    assert "AttributeError" in caplog.text and "FusedMoEActivationFormat" in caplog.text


def test_a_configuration_that_differs(config):
    assert experts_module.why_not(SimpleNamespace()).startswith("AttributeError")


def test_another_plugin(unregistered, caplog):
    """Who came first stays."""
    unregistered[unquantized.NAME] = object
    fused_moe.vllm.register()
    assert unregistered[unquantized.NAME] is object
    assert "AssertionError" in caplog.text


def test_entry_point(unregistered, monkeypatch):
    """vLLM finds `register` where the package is installed."""
    if not entry_points(group=plugins.DEFAULT_PLUGINS_GROUP, name="fused_moe") and not PACKAGES:
        pytest.skip("needs fused_moe as an installed package")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    assert unregistered[unquantized.NAME] is unquantized.FusedMoEMethod


def test_import_needs_no_vllm():
    code = """
import sys
import fused_moe.vllm
assert "vllm" not in sys.modules
sys.modules["vllm"] = None
try:
    fused_moe.vllm.register()
except ImportError as error:
    assert "fused_moe.vllm needs vLLM: pip install vllm" in str(error), error
else:
    raise AssertionError("no ImportError")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
