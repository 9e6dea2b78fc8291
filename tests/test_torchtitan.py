"""The torchtitan adapters against torchtitan's own modules, in the installed release."""

import copy
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pkgutil import iter_modules

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from cases import BF16, F32, Calls
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import torchtitan.models  # noqa: E402
from torchtitan.distributed import parallel_dims  # noqa: E402

from fused_moe import Routes, record_routing, replay_routing  # noqa: E402
from fused_moe.ops import route_plan  # noqa: E402
from fused_moe.torchtitan.layer import Routing, combine, routed_rows  # noqa: E402

HAS_OVERRIDES = find_spec("torchtitan.config.override") is not None

D, F, E = 32, 24, 8
SHARDED_F = 48  # of two ranks of tensor parallelism: torch._grouped_mm wants rows of 16 bytes
TOKENS = 16  # length of a sequence, for the whole model

# torchtitan's models, by the names that both releases share.
FLAVORS = {
    "deepseek_v3": {"top_k": 3, "score_func": "softmax", "shared": 2},
    "groups": {
        "top_k": 2,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "shared": 1,
    },
    "qwen3": {"top_k": 2, "score_func": "softmax", "route_norm": True, "load_balance_coeff": None},
    "gpt_oss": {"top_k": 4, "score_func": "softmax", "route_norm": True, "swiglu_limit": 4.0},
    "balanced": {"top_k": 2, "score_func": "softmax", "_debug_force_load_balance": True},
}

DENSE = {"flux", "llama3", "llama3_ft", "muse_glimmer", "common", "moe"}

# --- the two releases: a model of one block, stock or fused -----------------------------------------------


class Block(nn.Module):
    """The parts of a transformer block that torchtitan's code needs."""

    moe_enabled = True

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x)


class Model(nn.Module):
    def __init__(self, moe: nn.Module):
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(moe)})

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x

    @property
    def moe(self):
        return self.layers["0"].moe


if HAS_OVERRIDES:
    import spmd_types as spmd
    from torchtitan.config import OverrideConfig, ParallelismConfig, derive
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts, MoE
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.models.deepseek_v3 import config_registry, parallelize
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE, ScaleBiasForward
    from torchtitan.models.gpt_oss.moe import swiglu as clamped_swiglu
    from torchtitan.models.gpt_oss.sharding import _GPT_OSS_EXPERTS_PARAM_LAYOUT as GPT_OSS_LAYOUT
    from torchtitan.protocols.module import Module

    FUSIONS = ("fused_experts", "fused_routed_experts", "fused_moe")
    PRECISIONS = ("float32", "autocast", "bfloat16")
    WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
    GPT_OSS_WEIGHTS = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    MODELS = {
        "deepseek_v3": "debugmodel",
        "gpt_oss": "debugmodel",
        "kimi_k2_7": "debugmodel",
        "qwen3": "debugmodel_moe",
        "qwen3_5": "debugmodel_moe",
    }
    IS_FLAT = "x_TD" in signature(MoE.forward).parameters  # after 0.3.0: tokens without a batch dimension

    class Root(Module):
        """Has the config under test as a node: overrides do not replace the root of a tree."""

        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            node: object

    class OtherDispatcher(AllToAllTokenDispatcher):
        """As a dispatcher that changes torchtitan's derives from it."""

        @dataclass(kw_only=True, slots=True)
        class Config(AllToAllTokenDispatcher.Config):
            pass

    def overridden(config, *names):
        """The config after `--override.imports` of ours."""
        wrapped = Root.Config(node=config)
        lines = apply_overrides(
            OverrideConfig(imports=[f"fused_moe.torchtitan.{name}" for name in names]), wrapped
        )
        assert len(lines) == len(names)
        return wrapped.node

    def layer_config(
        *,
        top_k,
        shared=0,
        load_balance_coeff=1e-3,
        _debug_force_load_balance=False,
        swiglu_limit=None,
        hidden_dim=F,
        **router,
    ):
        init = {"weight": partial(nn.init.trunc_normal_, std=0.2)}
        is_gpt_oss = swiglu_limit is not None
        gate_init = init | ({"bias": nn.init.normal_} if is_gpt_oss else {})
        experts = {name: partial(nn.init.trunc_normal_, std=0.2) for name in WEIGHTS}
        router = config_utils.make_router_config(
            dim=D, num_experts=E, top_k=top_k, gate_param_init=gate_init, bias=is_gpt_oss, **router
        )
        router._debug_force_load_balance = _debug_force_load_balance
        ffn = {"dim": D, "hidden_dim": F * shared, "w1_param_init": init, "w2w3_param_init": init}
        config = config_utils.make_moe_config(
            num_experts=E,
            router=router,
            routed_experts=config_utils.make_routed_experts_config(
                dim=D,
                hidden_dim=hidden_dim,
                num_experts=E,
                top_k=top_k,
                param_init=experts,
                comm_backend="standard",
            ),
            shared_experts=config_utils.make_ffn_config(**ffn) if shared else None,
            load_balance_coeff=load_balance_coeff,
        )
        if is_gpt_oss:
            config.routed_experts.inner_experts = gpt_oss_config(swiglu_limit, hidden_dim)
            config = derive(config, GptOssMoE.Config)
        return config

    def gpt_oss_config(swiglu_limit, hidden_dim):
        init = {name: partial(nn.init.trunc_normal_, std=0.2) for name in GPT_OSS_WEIGHTS}
        sizes = {"dim": D, "hidden_dim": hidden_dim, "num_experts": E}
        return GptOssGroupedExperts.Config(**sizes, swiglu_limit=swiglu_limit, param_init=init)

    EXPERTS_LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    FP8_FUSIONS = ("fused_moe_fp8", "fused_routed_experts_fp8")

    def build(fusion=None, **flavor):
        config = layer_config(**flavor)
        if fusion:
            config = overridden(config, fusion)
        model = Model(config.build())
        torch.manual_seed(0)
        model.moe.init_states(buffer_device=torch.device("cpu"))
        return model

    def debug_model(name, fused):
        if name == "qwen3_5":
            pytest.importorskip("fla", reason="torchtitan's qwen3_5 needs flash-linear-attention")
        wrapped = Root.Config(
            node=import_module(f"torchtitan.models.{name}").model_registry(MODELS[name]).model
        )
        if fused:
            imports = ["fused_moe.torchtitan.fused_moe"]
            assert apply_overrides(OverrideConfig(imports=imports), wrapped)
        return wrapped.node.build()

    def experts_of(model):
        return model.moe.routed_experts.inner_experts

    def build_experts(fused, is_gpt_oss):
        config = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
        if is_gpt_oss:
            config = gpt_oss_config(7.0, F)
        return (overridden(config, "fused_experts") if fused else config).build()

    def buffers_of(model):
        return model.moe.tokens_per_expert_E, model.moe.expert_bias_E

    def checkpointed(model, mode):
        if mode == "full":
            FullAC.Config().build().apply(model)
        else:
            overridden(SelectiveAC.Config(), "selective_ac").build().apply(model)
        return model

    # FlexAttention has no backward on a CPU.
    @wraps(FlexAttention.forward)
    def causal_attention(self, q, k, v, **kwargs):
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2)

    FlexAttention.forward = causal_attention

    class UnequalParts:
        """torch.distributed for spmd_types, since gloo's all_to_all takes parts of one size only."""

        def __getattr__(self, name):
            return getattr(dist, name)

        def all_to_all(self, outputs, inputs, group):
            received, sent = ([part.size(0) for part in parts] for parts in (outputs, inputs))
            rows = outputs[0].new_empty(sum(received), *outputs[0].shape[1:])
            dist.all_to_all_single(rows, torch.cat(inputs), received, sent, group=group)
            for out, part in zip(outputs, rows.split(received), strict=True):
                out.copy_(part)

    # FSDP of PyTorch 2.13 refuses parameters with SPMD types: it gets those of one rank without them.
    parallelize.resolve_fsdp_mesh = lambda dims: (dims.get_mesh("dp_shard"), None)
    parallelize.resolve_sparse_fsdp_mesh = lambda dims: (dims.get_optional_mesh("efsdp"), None)

    def deepseek(fused, ep, compiled):
        """The debug model of two layers as torchtitan's Trainer makes it, its optimizers, its FLOPs and the
        context of its steps."""
        config = config_registry.deepseek_v3_debugmodel()
        spec, training, parallelism = config.model_spec, config.training, config.parallelism
        spec.model.layers = spec.model.layers[:2]
        setattr(training, "max_context_length" if IS_FLAT else "seq_len", 2 * TOKENS)
        training.mixed_precision_param = "float32"  # bf16 scores tie: a CPU's autocast cannot widen the gate
        parallelism.expert_parallel_degree = ep
        set_spmd_backend(parallelism.spmd_backend)
        config.compile.enable, config.compile.backend = compiled, "aot_eager"
        dims = parallel_dims.ParallelDims.from_config(parallelism, dist.get_world_size())
        spec.model.update_from_config(config=config)
        if fused:
            config.override.imports = ["fused_moe.torchtitan.fused_moe", "fused_moe.torchtitan.selective_ac"]
            assert len(apply_overrides(config.override, config)) == 2
        with torch.device("meta"):
            model = spec.model.build()
        model.verify_module_protocol()
        accounting = spec.model.get_nparams_and_flops(model, TOKENS)
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=training,
            parallelism=parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        model.to_empty(device="cpu")
        torch.manual_seed(
            dist.get_rank()
        )  # every rank initialises its own shard; one seed would give equal experts
        with torch.no_grad():
            model.init_states()
        optimizers = config.optimizer.build(model_parts=[model])
        spec.post_optimizer_build_fn(optimizers, [model], dims)
        return model, optimizers, accounting, get_spmd_context(parallel_dims=dims)

else:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.deepseek_v3 import get_train_spec
    from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
    from torchtitan.models.gpt_oss.infra.parallelize import apply_moe_ep_tp
    from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
    from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, GptOssMoE, ScaleBiasForward
    from torchtitan.models.gpt_oss.model.moe import swiglu as clamped_swiglu
    from torchtitan.models.moe import MoE, MoEArgs, kernels, utils
    from torchtitan.models.moe.moe import GroupedExperts
    from torchtitan.protocols.model_converter import build_model_converters

    FUSIONS = ("fused_moe",)
    FP8_FUSIONS = ("fused_moe_fp8",)
    MODELS = dict.fromkeys(("deepseek_v3", "gpt_oss", "llama4"), "debugmodel")
    MODELS["qwen3"] = "debugmodel_moe"
    IS_FLAT = False
    PRECISIONS = ("loop", "float32", "autocast", "bfloat16")
    FLAVORS["llama4"] = {"top_k": 1, "score_func": "sigmoid", "score_before_experts": True, "shared": 1}
    FLAVORS["before"] = {"top_k": 3, "score_func": "softmax", "score_before_experts": True}

    # Unchanged, both run only on a GPU.
    histc = torch.histc
    utils.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)

    def histc_of_integers(t, bins, min, max):
        return histc(t, bins, min, max) if t.is_floating_point() else t.bincount(minlength=bins)

    torch.histc = histc_of_integers

    IMPORT = "--experimental.custom_import=fused_moe.torchtitan"
    FLAGS = (IMPORT, "--model.converters=fused_moe")

    def job_config(*flags):
        config = ConfigManager().parse_args(list(flags))
        if config.experimental.custom_import:
            import_module(config.experimental.custom_import)
        return config

    def fuse(model, converter="fused_moe"):
        """As torchtitan's Trainer does."""
        build_model_converters(job_config(IMPORT, f"--model.converters={converter}"), None).convert(model)
        return model

    def stock_layer(
        loop=False, shared=0, score_before_experts=False, swiglu_limit=None, hidden_dim=F, **flavor
    ):
        args = MoEArgs(
            num_experts=E,
            num_shared_experts=shared,
            score_before_experts=score_before_experts,
            use_grouped_mm=not loop,
            gate_bias=swiglu_limit is not None,
            **flavor,
        )
        if swiglu_limit is None:
            return MoE(args, D, hidden_dim)
        return GptOssMoE(GptOssModelArgs(moe_args=args, swiglu_limit=swiglu_limit), D, hidden_dim)

    def build(fusion=None, **flavor):
        model = Model(stock_layer(**flavor))
        if fusion:
            fuse(model, fusion)
        torch.manual_seed(0)
        with torch.no_grad():
            model.moe.init_weights(0.2, torch.device("cpu"))
            if "swiglu_limit" in flavor:
                model.moe.router.gate.bias.normal_()
            else:
                model.moe.experts.w1.mul_(10)  # its default, 0.02, is too small to separate gates
        return model

    def debug_model(name, fused):
        spec = import_module(f"torchtitan.models.{name}").get_train_spec()
        args = copy.deepcopy(spec.model_args[MODELS[name]])
        args.update_from_config(job_config())
        model = spec.model_cls(args)
        return fuse(model) if fused else model

    def experts_of(model):
        return model.moe.experts

    def build_experts(fused, is_gpt_oss):
        if is_gpt_oss:
            experts = GptOssGroupedExperts(D, F, E, 7.0, use_grouped_mm=True)
        else:
            experts = GroupedExperts(D, F, E, use_grouped_mm=True)
        return fuse(nn.ModuleList([experts]))[0] if fused else experts

    def buffers_of(model):
        return model.moe.tokens_per_expert, model.moe.expert_bias

    def checkpointed(model, mode):
        config = job_config(
            f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.selective_ac_option=op"
        )
        apply_ac(model, config.activation_checkpoint, op_sac_save_list=deepseek_v3._op_sac_save_list)
        return model

    def deepseek(fused, ep, compiled):
        """The debug model of two layers as torchtitan's Trainer makes it, its optimizers and its FLOPs."""
        config = job_config(
            *(FLAGS if fused else ()),
            *(("--compile.enable", "--compile.backend=aot_eager") if compiled else ()),
            "--model.name=deepseek_v3",
            "--model.flavor=debugmodel",
            f"--training.seq_len={TOKENS}",
            f"--parallelism.expert_parallel_degree={ep}",
        )
        world = dist.get_world_size()
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=ep, etp=1, world_size=world
        )
        spec = get_train_spec()
        args = copy.deepcopy(spec.model_args["debugmodel"])
        args.n_layers = 2
        args.update_from_config(config)
        args.moe_args.use_grouped_mm = True  # torchtitan enables it on Hopper only, though CPUs support it
        with torch.device("meta"):
            model = spec.model_cls(args)
        build_model_converters(config, dims).convert(model)
        accounting = args.get_nparams_and_flops(model, TOKENS)
        model = spec.parallelize_fn(model, dims, config)
        model.to_empty(device="cpu")
        torch.manual_seed(
            dist.get_rank()
        )  # every rank initialises its own shard; one seed would give equal experts
        with torch.no_grad():
            model.init_weights()
        return model, spec.build_optimizers_fn([model], config.optimizer, dims), accounting, nullcontext


# --- running ------------------------------------------------------------------------------------------


def make_input(dtype=F32):
    return torch.randn(*((40,) if IS_FLAT else (2, 20)), D).to(dtype)


def half(model):
    """The parameters in bfloat16; the buffers stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)
    return model


def run(model, x, dout, autocast=False):
    """Output, tokens per expert and gradients, by name."""
    model.zero_grad()
    buffers_of(model)[0].zero_()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        out = model(x)
    out.backward(dout)
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, "tokens": buffers_of(model)[0].clone(), **grads}


def run_both(stock, ours, precision):
    """Both results on the same inputs, and the operators that ours called."""
    dtype = BF16 if precision == "bfloat16" else F32
    if dtype == BF16:
        half(stock), half(ours)
    x, dout = make_input(dtype), make_input(dtype)
    expected = run(stock, x, dout, precision == "autocast")
    with Calls() as calls:
        found = run(ours, x, dout, precision == "autocast")
    return expected, found, calls


def check_compiled(model, tolerance):
    """The block in one graph, as torchtitan compiles it, forward and backward."""
    x, dout = make_input(BF16), make_input(BF16)
    expected = run(half(model), x, dout)
    model.layers["0"].compile(backend="aot_eager", fullgraph=True)
    assert_close(run(model, x, dout), expected, tolerance)


def check_checkpointed(model, mode):
    """torchtitan's own policies give the same bits. Returns the operators that were called."""
    x, dout = make_input(), make_input()
    expected = run(model, x, dout)
    checkpointed(model, mode)
    with Calls() as calls:
        found = run(model, x, dout)
    # torchtitan's hook corrects for the second count of a recomputed forward.
    expected["tokens"] *= 2
    assert_close(found, expected, 0)
    return calls


def assert_close(found, expected, tolerance):
    """Every tensor, by the norm of the difference; tokens per expert exactly."""
    assert found.keys() == expected.keys()
    assert torch.equal(found["tokens"], expected["tokens"])
    for name, truth in expected.items():
        value = found[name]
        assert value.dtype == truth.dtype and value.shape == truth.shape, name
        error = (value.double() - truth.double()).norm()
        assert error <= tolerance * truth.double().norm(), f"{name}: {error / truth.double().norm():.2e}"


def pair(flavor, fusion, **options):
    """The stock model and ours."""
    return build(**FLAVORS[flavor], **options), build(fusion, **FLAVORS[flavor], **options)


# --- the layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_the_gates_product(dtype):
    """Our operator computes an unaltered gate's logits, not rounded; hooks are called."""
    model, x = build("fused_moe", top_k=2, score_func="sigmoid"), make_input(dtype)
    if dtype == BF16:
        half(model)
    with Calls() as calls:
        model(x)
    [(_, logits)] = calls.of("router_logits")
    weight = model.moe.router.gate.weight.detach()
    torch.testing.assert_close(logits, functional.linear(x.flatten(0, -2).float(), weight.float()))
    if dtype == BF16 and HAS_OVERRIDES:  # which compute a float32 gate in float32
        model.moe.router.gate.float()
        nn.init.normal_(model.moe.router.gate.weight)
        weight = model.moe.router.gate.weight.detach()
        with Calls() as calls:
            model(x)
        [(operands, logits)] = calls.of("router_logits")
        assert operands[0].dtype == BF16
        torch.testing.assert_close(logits, functional.linear(x.flatten(0, -2).float(), weight))
        model.moe.router.gate.to(BF16)
    seen = []
    model.moe.router.gate.register_forward_hook(lambda *call: seen.append(call))
    with Calls() as calls:
        model(x)
    assert seen and not calls.of("router_logits")


def test_import_is_lazy():
    code = "import fused_moe, sys; assert not any(m.startswith('torchtitan') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("flavor", FLAVORS)
def test_layer(flavor, fusion, precision):
    """Output, gradients and counts of the stock layer, with an expert bias."""
    if HAS_OVERRIDES and flavor == "gpt_oss" and precision != "bfloat16":
        pytest.skip("torchtitan's own gpt-oss layer takes bfloat16 only")
    stock, ours = pair(flavor, fusion, **({"loop": True} if precision == "loop" else {}))
    for model in (stock, ours):
        bias = buffers_of(model)[1]
        if bias is not None:
            bias.copy_(torch.linspace(-0.1, 0.1, E))
    expected, found, calls = run_both(stock, ours, precision)
    # A gate that rounds past the limit has another gradient.
    tolerance = 3e-2 if flavor == "gpt_oss" else 1e-2
    assert_close(found, expected, 1e-5 if precision == "loop" else tolerance)
    routes = fusion == "fused_moe" and flavor != "balanced"
    assert len(calls.of("route")) == routes
    gathers = len(calls.of("experts_up")[0][0][6]) > 2  # the plan has row maps
    assert gathers == (fusion != "fused_experts" and (routes or HAS_OVERRIDES))


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("flavor", FLAVORS)
def test_state_dict(flavor, fusion):
    """Same names, initial values and bits, from stock to ours and back."""
    stock, ours = pair(flavor, fusion)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in stock.named_parameters()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in stock.named_buffers()]
    for source, target in ((stock, ours), (ours, stock)):
        before = copy.deepcopy(source.state_dict())
        assert before.keys() == target.state_dict().keys()
        for name, value in target.state_dict().items():
            assert torch.equal(value, before[name]), name  # both were initialised with the same seed
        for parameter in source.parameters():
            nn.init.normal_(parameter)
        target.load_state_dict(source.state_dict(), strict=True)
        for name, value in source.state_dict().items():
            assert torch.equal(value, target.state_dict()[name]), name


class OtherExperts(GroupedExperts):
    """As quantised experts derive from torchtitan's."""


def test_other_experts():
    """Experts of a derived class are not replaced, and a converter without anything to convert raises."""
    if not HAS_OVERRIDES:
        with pytest.raises(ValueError, match="GroupedExperts"):
            fuse(nn.ModuleList([OtherExperts(D, F, E, use_grouped_mm=True)]))
        return

    class Other(OtherExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    config = layer_config(**FLAVORS["qwen3"])
    config.routed_experts.inner_experts = derive(config.routed_experts.inner_experts, Other.Config)
    with pytest.warns(
        UserWarning, match="torchtitan computes the experts, since Other is a class of its own"
    ):
        layer = overridden(config, "fused_moe").build()
    assert type(layer) is type(config.build())
    assert type(layer.routed_experts.inner_experts) is Other


def is_ours(module):
    return type(module).__module__.startswith("fused_moe")


@pytest.mark.skipif(HAS_OVERRIDES, reason="for 0.2.x, whose layers are converted")
def test_other_layers():
    """A layer of 0.2.x that changes torchtitan's, or with such a router, has our experts alone."""

    class OtherLayer(MoE):
        def forward(self, x):
            return -super().forward(x)

    def with_weights_of_another_class():
        class Quantised(nn.Parameter):
            pass

        layer = stock_layer(top_k=2)
        layer.experts.w1 = Quantised(layer.experts.w1.detach())
        return layer

    def with_another_router():
        layer = stock_layer(top_k=2)
        layer.router.__class__ = type("OtherRouter", (type(layer.router),), {})
        return layer

    for layer, why, ours in (
        (
            OtherLayer(MoEArgs(num_experts=E), D, F),
            "the router, since OtherLayer is a class of its own",
            True,
        ),
        (with_another_router(), "the router, since OtherRouter is a class of its own", True),
        (with_weights_of_another_class(), "the experts, since its weights are Quantised", False),
    ):
        with pytest.warns(UserWarning, match=why):
            fuse(nn.ModuleList([layer, stock_layer(top_k=2)]))
        assert not is_ours(layer) and is_ours(layer.experts) == ours


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, whose parts have configs")
def test_what_ours_does_not_know(monkeypatch):
    """Settings, parameters and arguments of later releases: the part stays torchtitan's, and a warning says
    why."""
    from fused_moe.torchtitan import overrides

    config, others = layer_config(**FLAVORS["groups"]), overrides.ROUTER - {"route_scale", "score_func"}
    with monkeypatch.context() as patch:
        patch.setattr(overrides, "ROUTER", others | {"score_func"})
        with pytest.warns(UserWarning, match="the router, since TokenChoiceTopKRouter has route_scale"):
            layer = overridden(config, "fused_moe").build()
        assert not is_ours(layer) and is_ours(layer.routed_experts)
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "forward", lambda self, x, padding_mask: x)
        with pytest.warns(UserWarning, match="MoE.forward takes more than x"):
            layer = overridden(config, "fused_moe").build()
        assert not is_ours(layer) and is_ours(layer.routed_experts)
    config.router.score_func = "tanh"
    with pytest.warns(UserWarning, match="score_func is tanh"):
        layer = overridden(config, "fused_moe").build()
    assert not is_ours(layer) and is_ours(layer.routed_experts)
    ours, _, settings = overrides.EXPERTS[GroupedExperts.Config]
    for parameters, known, why in (
        ({"w13"}, settings, "GroupedExperts has the parameters w1_EFD, w2_EDF, w3_EFD"),
        (set(WEIGHTS), settings - {"hidden_dim"}, "GroupedExperts has hidden_dim"),
    ):
        monkeypatch.setitem(overrides.EXPERTS, GroupedExperts.Config, (ours, parameters, known))
        for fusion in FUSIONS:
            with pytest.warns(UserWarning, match=f"the experts, since {why}"):
                layer = overridden(config, fusion).build()
            assert not any(map(is_ours, layer.modules()))


def test_every_model():
    """The models of this release: a new one must be added to this list or to that of dense models."""
    packages = {module.name for module in iter_modules(torchtitan.models.__path__) if module.ispkg}
    assert packages - DENSE == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    """Every MoE layer of torchtitan's debug models is ours, with the same state dict."""
    with torch.device("meta"):
        stock, ours = (debug_model(name, fused) for fused in (False, True))
    layers = [module for module in ours.modules() if isinstance(module, MoE)]
    assert len(layers) == sum(isinstance(module, MoE) for module in stock.modules()) > 0
    for layer in layers:
        model = nn.Module()
        model.moe = layer
        assert is_ours(layer) and is_ours(experts_of(model))
    assert list(ours.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize("is_gpt_oss", (False, True))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_garbage_tail(dtype, is_gpt_oss):
    """Rows past the counts, as from dispatchers with static capacity, affect no result and no gradient."""
    ours = build_experts(True, is_gpt_oss)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2)
    counts = torch.tensor([3, 0, 5, 1, 0, 0, 7, 2], dtype=dtype)
    rows = torch.randn(24, D)
    rows[18:] = torch.nan
    results = []
    for given in (rows, rows[:18]):
        ours.zero_grad()
        given = given.detach().requires_grad_()
        out = ours(given, counts)
        out.backward(torch.where(given.isnan(), torch.nan, torch.ones(())))
        results.append((out[:18].detach(), given.grad[:18], *(p.grad for p in ours.parameters())))
        assert torch.equal(out[18:], torch.zeros_like(out[18:]))
    for with_tail, without in zip(*results, strict=True):
        assert torch.equal(with_tail, without)


@pytest.mark.skipif(
    not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, whose dispatchers have configs"
)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_other_dispatchers(fusion):
    """A dispatcher of its own class gets what torchtitan's router gives, and hands received rows and counts,
    with garbage behind them, to our experts."""
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    seen = []

    class Other(LocalTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(LocalTokenDispatcher.Config):
            pass

        def dispatch(self, *routed):
            seen.append([(t.dtype, t.shape) for t in routed])
            rows, counts, metadata = super().dispatch(*routed)
            return torch.cat((rows, torch.full_like(rows, torch.nan))), counts, metadata

        def combine(self, rows, metadata, x):
            return super().combine(rows.chunk(2)[0], metadata, x)

    config = layer_config(**FLAVORS["groups"])
    stock = Model(config.build())
    dispatcher = config.routed_experts.token_dispatcher
    config.routed_experts.token_dispatcher = derive(dispatcher, Other.Config)
    theirs, ours = Model(config.build()), Model(overridden(config, fusion).build())
    for model in (stock, theirs, ours):
        torch.manual_seed(0)
        model.moe.init_states(buffer_device=torch.device("cpu"))
    expected, found, calls = run_both(stock, ours, "float32")
    assert_close(found, expected, 1e-2)
    assert len(calls.of("route")) == (fusion == "fused_moe") and len(calls.of("experts_up")) == 1
    theirs(make_input())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("fusion", FUSIONS)
def test_compile(fusion):
    check_compiled(build(fusion, **FLAVORS["deepseek_v3"]), 1e-2)


@pytest.mark.parametrize("mode", ("selective", "full"))
@pytest.mark.parametrize("fusion", FUSIONS)
def test_activation_checkpointing(fusion, mode):
    """Only full checkpointing recomputes experts_down."""
    calls = check_checkpointed(build(fusion, **FLAVORS["deepseek_v3"]), mode)
    assert len(calls.of("experts_up")) == 2
    assert len(calls.of("experts_down")) == (1 if mode == "selective" else 2)


# --- FP8 training -------------------------------------------------------------------------------------

FP8_D, FP8_F = 128, 768
FP8_FLAVOR = {"top_k": 2, "score_func": "softmax", "hidden_dim": FP8_F}
KEEPS_16_BITS = "fused_moe: experts are not trained in FP8, since "


@pytest.fixture
def wide(monkeypatch):
    """Tokens and layers of a width that FP8 takes."""
    monkeypatch.setitem(globals(), "D", FP8_D)


def without_fp8(fusion):
    return fusion.removesuffix("_fp8")


def assert_near_16_bits(found, expected):
    """Apart by e4m3's rounding: not by more, and not by so little that nothing was rounded."""
    assert_close(found, expected, 0.1)
    experts = ("out", "dx", *(name for name in expected if "experts" in name and "shared" not in name))
    assert len(experts) == 5
    for name in experts:
        assert (found[name] - expected[name]).norm() > 0.01 * expected[name].norm(), name


@pytest.mark.parametrize("precision", ("float32", "autocast", "bfloat16"))
@pytest.mark.parametrize("fusion", FP8_FUSIONS)
@pytest.mark.usefixtures("wide")
def test_fp8(fusion, precision):
    """The layer in 16 bits, up to the rounding of e4m3."""
    usual, ours = (build(f, **FP8_FLAVOR) for f in (without_fp8(fusion), fusion))
    expected, found, calls = run_both(usual, ours, precision)
    assert_near_16_bits(found, expected)
    assert not calls.of("experts_up")
    assert all(len(calls.of(name)) == 1 for name in ("fp8_up", "fp8_down_backward", "fp8_up_backward"))


@pytest.mark.parametrize("fusion", FP8_FUSIONS)
@pytest.mark.usefixtures("wide")
def test_fp8_is_for_layers_that_gain(fusion):
    """Others have the bits of the layer in 16 bits, and a warning says why."""
    cases = [
        ({"hidden_dim": 512}, "FP8 pays with F >= 768 and E <= 16 * K, found D=128, F=512, E=8, K=2"),
        ({"hidden_dim": 832}, "FP8 expected D and F that are multiples of 128, found D=128, F=832, E=8, K=2"),
        ({"swiglu_limit": 7.0}, "they have biases"),
    ]
    if not HAS_OVERRIDES:
        cases.append(({"score_before_experts": True}, "their input is multiplied by the scores"))
    x, dout = make_input(BF16), make_input(BF16)
    for changed, reason in cases:
        flavor = FP8_FLAVOR | changed
        with pytest.warns(UserWarning) as caught:
            ours = build(fusion, **flavor)
        assert [str(w.message) for w in caught] == [KEEPS_16_BITS + reason]
        usual = build(without_fp8(fusion), **flavor)
        assert_close(run(half(ours), x, dout), run(half(usual), x, dout), 0)


@pytest.mark.usefixtures("wide")
def test_fp8_experts_per_token(monkeypatch):
    """K is the layer's: with 8 experts for each of a token's FP8 would pay, with 64 it does not."""
    monkeypatch.setitem(globals(), "E", 32)
    build("fused_moe_fp8", **FP8_FLAVOR)
    with pytest.warns(UserWarning, match="found D=128, F=768, E=32, K=1"):
        build("fused_moe_fp8", **FP8_FLAVOR | {"top_k": 1})


def test_fp8_of_a_rank():
    """A rank's part of F must gain, too, where tensor parallelism divides it."""
    from fused_moe.fp8_training import Fp8Training
    from fused_moe.torchtitan.layer import run_experts, swiglu

    torch.manual_seed(0)
    counts, x = torch.tensor([5, 7]), torch.randn(12, FP8_D).to(BF16)
    for width, is_fp8 in ((768, True), (832, False), (384, False)):
        shapes = ((2, width, FP8_D), (2, FP8_D, width), (2, width, FP8_D))
        experts = swiglu(*(torch.randn(shape, requires_grad=True) for shape in shapes))
        text = f"{KEEPS_16_BITS}FP8 needs F >= 768 .* leaves F={width}"
        with nullcontext() if is_fp8 else pytest.warns(UserWarning, match=text), Calls() as calls:
            run_experts(x, experts, counts, None, dtype=BF16, fp8=Fp8Training()).sum().backward()
        assert (len(calls.of("fp8_up")), len(calls.of("experts_up"))) == (is_fp8, not is_fp8)


@pytest.mark.parametrize("fusion", FP8_FUSIONS)
@pytest.mark.usefixtures("wide")
def test_fp8_under_selective_checkpointing(fusion):
    """The product with w2 is saved, and not computed again."""
    calls = check_checkpointed(build(fusion, **FP8_FLAVOR), "selective")
    assert (len(calls.of("fp8_up")), len(calls.of("fp8_down"))) == (2, 1)


@pytest.mark.parametrize("fusion", FP8_FUSIONS)
@pytest.mark.usefixtures("wide")
def test_fp8_compiles(fusion):
    """With the bits of eager mode."""
    check_compiled(build(fusion, **FP8_FLAVOR), 0)


@pytest.mark.usefixtures("wide")
def test_fp8_of_rows():
    """Rows from a dispatcher, behind which there is garbage."""
    experts = experts_of(build("fused_moe_fp8", **FP8_FLAVOR))
    counts = torch.tensor([3, 0, 5, 1, 0, 0, 7, 2])
    rows = torch.randn(24, D).to(BF16)
    rows[18:] = torch.nan
    results = []
    for given in (rows, rows[:18]):
        experts.zero_grad()
        given = given.detach().requires_grad_()
        with Calls() as calls:
            out = experts(given, counts)
            out.backward(torch.where(given.isnan(), torch.nan, torch.ones(())).to(BF16))
        assert calls.of("fp8_up")
        results.append((out[:18].detach(), given.grad[:18], *(p.grad for p in experts.parameters())))
        assert not out[18:].count_nonzero()
    for with_tail, without in zip(*results, strict=True):
        assert torch.equal(with_tail, without)


# --- replay -------------------------------------------------------------------------------------------


def gradients(model, x):
    model.zero_grad()
    x.grad = None
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mode", ["plain", "full", "selective", "compiled"])
@pytest.mark.parametrize("flavor", ["deepseek_v3", "groups", "gpt_oss"])
def test_replay(flavor, mode):
    """A choice that is recorded gives another model, whose gate would choose otherwise, the same experts; the
    model that chose so itself has the same bits."""
    model, x = build("fused_moe", **FLAVORS[flavor]), make_input().requires_grad_()
    with record_routing(model) as routes:
        expected = gradients(model, x)
    assert routes.num_experts == [E] and routes.top_k == [FLAVORS[flavor]["top_k"]]
    model = checkpointed(model, mode) if mode in ("full", "selective") else model
    call = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    with replay_routing(model, routes):
        found = gradients(call, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    shift = Routes([(routes[0].long() + 1) % E], E)  # experts that the gate does not choose
    with replay_routing(model, shift), record_routing(model) as again:
        found = gradients(call, x)
    assert torch.equal(again[0], shift[0]) and not torch.equal(found[0], expected[0])

    partly = routes[0].clone().to(torch.int16)
    partly[::2] = -1  # the router chooses for these tokens
    with replay_routing(model, Routes([partly], E)), record_routing(model) as again:
        call(x)
    assert torch.equal(again[0], routes[0])


def test_replay_scores():
    """The scores of replayed experts are those of the model's own gate, with its gradients."""
    model, x = build("fused_moe", **FLAVORS["qwen3"]), make_input().requires_grad_()
    ids = torch.rand(x.numel() // D, E).argsort(1)[:, :2]
    with replay_routing(model, Routes([ids], E)):
        found = gradients(model, x)
    logits = x.reshape(-1, D) @ model.moe.router.gate.weight.T
    scores = logits.softmax(1).gather(1, ids)
    scores = scores / scores.sum(1, keepdim=True)
    w1, w2, w3 = (w[ids] for _, w in sorted(experts_of(model).named_parameters()))  # (T, K, ...)
    rows = x.reshape(-1, 1, D, 1)
    rows = w2 @ (functional.silu(w1 @ rows) * (w3 @ rows))
    out = (scores[..., None] * rows.squeeze(-1)).sum(1).view_as(x)
    gate = model.moe.router.gate.weight
    expected = out, *torch.autograd.grad(out.square().sum(), (x, gate))
    for value, truth in zip((*found[:2], gate.grad), expected, strict=True):
        assert (value - truth).norm() <= 2e-2 * truth.norm()  # the experts compute in bfloat16


def test_replay_needs_our_router():
    stock = build("fused_moe", **FLAVORS["balanced"])
    with pytest.raises(RuntimeError, match="fused_moe's, found a call that torchtitan's own routes"):
        with record_routing(stock):
            stock(make_input())
    stock = build(None, **FLAVORS["qwen3"])
    with pytest.raises(RuntimeError, match="fused_moe's, found a MoE that is torchtitan's own"):
        with record_routing(stock):
            pass
    model = build("fused_moe", **FLAVORS["qwen3"])
    with pytest.raises(ValueError, match="K = 2, found K = 3"):
        with replay_routing(model, Routes([torch.zeros(4, 3, dtype=torch.int64)], E)):
            pass


@pytest.mark.parametrize("assign", (False, True))
def test_the_bias_stays_float32(assign):
    """Neither .to nor a checkpoint of 16 bits casts it; forward refuses one that was set."""
    model = build("fused_moe", **FLAVORS["groups"]).to(BF16)
    assert buffers_of(model)[1].dtype == F32
    model.load_state_dict({name: t.to(BF16) for name, t in model.state_dict().items()}, assign=assign)
    assert buffers_of(model)[1].dtype == F32
    model(make_input(BF16))
    (name,) = (name for name, _ in model.moe.named_buffers() if name.startswith("expert_bias"))
    setattr(model.moe, name, buffers_of(model)[1].to(BF16))
    with pytest.raises(TypeError, match="expected expert_bias of dtype float32, found torch.bfloat16"):
        model(make_input(BF16))


# --- two processes --------------------------------------------------------------------------------------


def full(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


TRAININGS = ((1, False), (2, False), (2, True))  # degree of expert parallelism, compiled


def train(fused, ep, compiled):
    """Two steps of the whole model: initial state and shards, losses, first gradients, expert bias."""
    model, optimizers, accounting, context = deepseek(fused, ep, compiled)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    state = model.state_dict()
    result = {
        "accounting": accounting,
        "initial": {name: full(value) for name, value in state.items()},
        "shards": {
            n: (str(t.placements), t.to_local().shape) for n, t in state.items() if isinstance(t, DTensor)
        },
        "losses": [],
    }
    ids = torch.randint(2048, (2, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    with nullcontext() if compiled else Calls() as calls:  # which does not compile
        for _ in range(2):
            optimizers.zero_grad()
            with context():
                logits = model(ids.flatten() if IS_FLAT else ids).float()
                loss = functional.cross_entropy(logits.flatten(0, -2), ids.flatten())
                loss.backward()
            if not result["losses"]:
                result["grads"] = {n: full(p.grad) for n, p in model.named_parameters() if "moe" in n}
            optimizers.step()
            if not result["losses"]:  # in later steps a rounded weight may change the routing
                result["bias"] = [full(b) for n, b in model.named_buffers() if "expert_bias" in n]
            result["losses"].append(loss.item())
    if not compiled:
        result["counts"] = {name: len(calls.of(name)) for name in OURS}
        result["exchanges"] = sum(name.endswith("::all_to_all_single") for name, *_ in calls.calls)
    return result


def sharded_layer(dim, fusion="fused_moe", flavor=FLAVORS["deepseek_v3"]):
    """The fused layer alone in bf16, and with its experts sharded by FSDP2 along this dimension; whether
    experts that train in FP8 noticed."""
    block = build(fusion, **flavor).layers["0"]
    experts = set(experts_of(block).parameters())
    torch.manual_seed(1)  # the same input everywhere: the mean of the gradients is that of each rank
    x, dout = make_input(BF16), make_input(BF16)
    alone_block = half(copy.deepcopy(block))
    alone = run(alone_block, x, dout)
    fully_shard(
        block,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32),
        shard_placement_fn=lambda p: Shard(dim) if p in experts else None,
    )
    sharded = run(block, x, dout)
    assert {p.placements for p in experts_of(block).parameters()} == {(Shard(dim),)}
    fp8 = experts_of(block).fp8
    assert fp8 is None or not experts_of(alone_block).fp8.is_gathered
    found = [{n: full(t).float() for n, t in result.items()} for result in (sharded, alone)]
    return [*found, fp8 and fp8.is_gathered]


TENSOR_PARALLEL = ((1, False), (2, False), (2, True))  # degree of expert parallelism, compiled
CHECKS = (True, "checked") if HAS_OVERRIDES else (True,)  # ours without and with type checking
GPT_OSS_PARALLEL = ((2, 1), (2, 2), (1, 2))  # degrees of tensor and expert parallelism


def tensor_parallel_layer(fused, ep, compiled):
    """A layer of 0.2.x over two ranks of tensor parallelism: a rank's output and gradient of the gate, and
    the calls of our operators."""
    from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp

    model = Model(stock_layer(top_k=2, hidden_dim=SHARDED_F))
    initialise(model, fused)
    tp, ep_mesh, etp = (meshes_of(2, ep).get_optional_mesh(name) for name in ("tp", "ep", "etp"))
    apply_moe_ep_tp(model, tp_mesh=tp, ep_mesh=ep_mesh, etp_mesh=etp if ep_mesh else None, ep_etp_mesh=None)
    moe = model.moe
    if compiled:  # as torchtitan parallelises it, part by part
        moe.router = torch.compile(moe.router, backend="eager")
        moe.reorderer = torch.compile(moe.reorderer, backend="eager")
    counts = fused and not compiled  # torchtitan compiles its experts here, which Calls does not
    with Calls() if counts else nullcontext() as calls:
        found = run_part(model, (moe.router.gate.weight,))
    return found, {name: len(calls.of(name)) for name in OURS} if counts else None


def initialise(model, fused):
    """The same weights on each rank, of the stock layer and of ours; `fused` may name the converter."""
    if fused:
        fuse(model, "fused_moe" if fused is True else fused)
    torch.manual_seed(0)
    with torch.no_grad():
        model.moe.init_weights(0.2, torch.device("cpu"))


def meshes_of(tp, ep, **options):
    """torchtitan's meshes, of its default backend without the option."""
    if HAS_OVERRIDES:
        degrees = {"tensor_parallel_degree": tp, "expert_parallel_degree": ep}
        return parallel_dims.ParallelDims.from_config(
            ParallelismConfig(**degrees, **options), dist.get_world_size()
        )
    degrees = {"dp_replicate": 1, "dp_shard": 2 // tp, "cp": 1, "tp": tp, "pp": 1, "ep": ep, "world_size": 2}
    return parallel_dims.ParallelDims(**degrees, etp=1 if ep > 1 else tp)


def run_part(model, parameters, context=nullcontext, share=None, is_split=True):
    """This rank's part of the output, and of the gradients of the input and of these parameters."""
    dtype = next(model.parameters()).dtype
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if is_split else (1, 0)
    x, dout = (make_input(dtype).chunk(ranks, dim=-2)[rank].contiguous() for _ in range(2))
    x.requires_grad_()
    with context():
        out = model(share(x) if share else x)
        if isinstance(out, DTensor):
            dout = DTensor.from_local(dout, out.device_mesh, out.placements)
        with spmd.no_typecheck() if HAS_OVERRIDES else nullcontext():  # as torchtitan's Trainer
            out.backward(dout)
    grads = (x.grad, *(parameter.grad for parameter in parameters))
    results = (t.to_local() if isinstance(t, DTensor) else t for t in (out.detach(), *grads))
    return [t.clone() for t in results]  # a clone waits for the collective that writes it


def shared(x, dims, sp=True):
    """A rank's input as the blocks of a model hand it on under this backend of 0.3.0."""
    if dims.spmd_backend == "full_dtensor":
        mesh = dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
        parts = {"dp_shard": Shard(0) if dims.dp_shard > 1 else Replicate(), "tp": Shard(1)}
        return DTensor.from_local(x, mesh, [parts[name] for name in mesh.mesh_dim_names])
    if spmd.is_type_checking():
        spmd.assert_type(x, {"dp": spmd.S(0), "cp": spmd.R, "tp": spmd.S(1) if sp else spmd.I})
    return x


def parallel_model(config, fusion, layout, tp, ep, sp=True, checked=False, **backend):
    """A layer of 0.3.0 as torchtitan parallelises it, its own one without a fusion; its meshes, and the
    context of its steps."""
    set_moe_sharding_config(config, enable_ep=ep > 1, enable_sp=sp, expert_param_layout=layout)
    dims = meshes_of(tp, ep, **backend)
    set_spmd_backend(dims.spmd_backend)
    model = Model((overridden(config, fusion) if fusion else config).build())
    torch.manual_seed(0)
    model.moe.init_states(buffer_device=torch.device("cpu"))
    model = half(model)
    model.moe.parallelize(dims)
    return model, dims, get_spmd_context(parallel_dims=dims, spmd_typechecking=checked)


BACKENDS = {
    "default": {},
    "checked": {"checked": True},
    "partial_dtensor": {"spmd_backend": "partial_dtensor"},
    "full_dtensor": {"spmd_backend": "full_dtensor"},
    "without sequence parallelism": {"sp": False},
}
DEGREES = ((1, 1), (1, 2), (2, 1), (2, 2))  # of tensor and expert parallelism on two ranks
LAYERS = [(backend, *degrees) for backend in BACKENDS for degrees in DEGREES]
LAYERS = [layer for layer in LAYERS if layer[0] != "without sequence parallelism" or layer[1] == 2]
# 0.3.0's own layers of DTensors fail where a process had layers of another K before.
SAME_K = {"top_k": FLAVORS["gpt_oss"]["top_k"]}
OURS = ("route", "permute", "unpermute", "experts_down")  # the operators that the tests count


def parallel_layer(fusion, backend, tp, ep, mode=None):
    """A rank's results of a layer of 0.3.0, how often it called our operators, and how often torchtitan's
    sort and sum; with a mode of activation checkpointing, or one of KEPT."""
    how = BACKENDS[backend]
    config = layer_config(**FLAVORS["deepseek_v3"] | SAME_K, hidden_dim=SHARDED_F)
    if mode == "other dispatcher":
        dispatcher = config.routed_experts.token_dispatcher
        config.routed_experts.token_dispatcher = derive(dispatcher, OtherDispatcher.Config)
    model, dims, context = parallel_model(config, fusion, EXPERTS_LAYOUT, tp, ep, **how)
    sp = how.get("sp", True)
    if mode in ("full", "selective"):
        checkpointed(model, mode)
    elif mode == "wrapped experts":
        model.moe.routed_experts.inner_experts = checkpoint_wrapper(experts_of(model))
    with Calls() as calls:
        found = run_part(model, list(model.parameters()), context, partial(shared, dims=dims, sp=sp), sp)
    theirs = ("aten::argsort.stable", "aten::sort.stable", "torchtitan::deterministic_scatter_add")
    counts = {name: len(calls.of(name)) for name in OURS}
    return found, counts | {"theirs": sum(name in theirs for name, *_ in calls.calls)}


def replayed_layer():
    """A rank's routes under expert parallelism of 0.3.0; its results as they are recorded and replayed."""
    config = layer_config(**FLAVORS["deepseek_v3"] | SAME_K, hidden_dim=SHARDED_F)
    model, _, context = parallel_model(config, "fused_moe", EXPERTS_LAYOUT, 1, 2)

    def results():
        torch.manual_seed(1)
        model.zero_grad()
        return run_part(model, list(model.parameters()), context)

    with record_routing(model) as routes:
        recorded = results()
    with replay_routing(model, routes):
        return routes[0], recorded, results()


def layer_without_tokens(fusion):
    """A rank's results of a layer of 0.3.0 under expert parallelism, whose second rank has no tokens."""
    config = layer_config(**FLAVORS["deepseek_v3"] | SAME_K, hidden_dim=SHARDED_F)
    model, _, context = parallel_model(config, fusion, EXPERTS_LAYOUT, 1, 2)
    x = make_input(BF16)
    x = x.narrow(-2, 0, 0 if dist.get_rank() else x.size(-2)).requires_grad_()
    with context():
        out = model(x)
        out.square().sum().backward()
    return [t.detach().clone() for t in (out, x.grad, *(p.grad for p in model.parameters()))]


KEPT = ("other dispatcher", "wrapped experts")  # whose exchange is torchtitan's
RECOMPUTED = [(ep, mode) for ep in (1, 2) for mode in ("full", "selective")]
OF_FOUR = ("default", 2, 4)  # the experts over all ranks, the tokens over pairs


def every_rank(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def parallel_gpt_oss(fused, tp, ep):
    """A layer of gpt-oss over two ranks, as torchtitan parallelises it. Its own is of a backend that adds the
    second bias once."""
    context, share = nullcontext, None
    if HAS_OVERRIDES:
        config = layer_config(**FLAVORS["gpt_oss"], hidden_dim=SHARDED_F)
        backend = {"checked": fused == "checked"} if fused else {"spmd_backend": "partial_dtensor"}
        fusion = "fused_moe" if fused else None
        model, dims, context = parallel_model(config, fusion, GPT_OSS_LAYOUT, tp, ep, **backend)
        share = partial(shared, dims=dims)
    else:
        model = Model(stock_layer(**FLAVORS["gpt_oss"], hidden_dim=SHARDED_F))
        initialise(model, fused)
        nn.init.normal_(model.moe.router.gate.bias)
        model, dims = half(model), meshes_of(tp, ep)
        tp_mesh, ep_mesh = (dims.get_optional_mesh(name) for name in ("tp", "ep"))
        apply_moe_ep_tp(model, tp_mesh, ep_mesh, dims.get_optional_mesh(["ep", "etp"]), dims.etp_enabled)
    return run_part(model, experts_of(model).parameters(), context, share)


FP8_PARALLEL = ((1, 2), (2, 1))  # degrees of tensor and expert parallelism


def parallel_fp8(fusion, tp, ep):
    """A layer over two ranks, as torchtitan parallelises it."""
    flavor = FP8_FLAVOR | SAME_K | {"hidden_dim": FP8_F * tp}
    context = nullcontext
    if HAS_OVERRIDES:
        model, _, context = parallel_model(layer_config(**flavor), fusion, EXPERTS_LAYOUT, tp, ep)
    else:
        from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp

        model = Model(stock_layer(**flavor))
        initialise(model, fusion)
        model, dims = half(model), meshes_of(tp, ep)
        tp_mesh, ep_mesh = (dims.get_optional_mesh(name) for name in ("tp", "ep"))
        apply_moe_ep_tp(model, tp_mesh=tp_mesh, ep_mesh=ep_mesh, etp_mesh=None, ep_etp_mesh=None)
    with Calls() as calls:
        found = run_part(model, experts_of(model).parameters(), context)
    widths = {args[0].size(-1) for name, args, _ in calls.calls if name.endswith("all_to_all_single")}
    return found, len(calls.of("fp8_up")), widths


def fp8_runs():
    """Layers in FP8 and in 16 bits over two ranks; a layer sharded by FSDP2, alone, and what it noticed."""
    globals()["D"] = FP8_D
    try:
        runs = {
            (fusion, *sizes): parallel_fp8(fusion, *sizes)
            for sizes in FP8_PARALLEL
            for fusion in ("fused_moe", "fused_moe_fp8")
        }
        return runs | {"fsdp": sharded_layer(0, "fused_moe_fp8", FP8_FLAVOR)}
    finally:
        globals()["D"] = 32


def worker(rank, rendezvous, results):
    torch.set_num_threads(1)
    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    if HAS_OVERRIDES:
        spmd.set_dist(UnequalParts())
        runs = [(fusion, *layer) for layer in LAYERS for fusion in (None, *FUSIONS)]
        runs += [("fused_moe", "checked", 1, ep, mode) for ep, mode in RECOMPUTED]
        runs += [("fused_moe", "default", 1, 2, mode) for mode in KEPT]
        found["layers"] = every_rank({run: parallel_layer(*run) for run in runs})
        found["replayed"] = every_rank(replayed_layer())
        found["no tokens"] = [every_rank(layer_without_tokens(fusion)) for fusion in (None, "fused_moe")]
    found |= {(fused, *run): train(fused, *run) for run in TRAININGS for fused in (False, True)}
    found["shard"] = {dim: sharded_layer(dim)[:2] for dim in (0, 1)}
    found["fp8"] = fp8_runs()
    if not HAS_OVERRIDES:
        runs = [(fused, *run) for run in TENSOR_PARALLEL for fused in (False, True)]
        found["tensor"] = {run: tensor_parallel_layer(*run) for run in runs}
    runs = [(fused, *run) for run in GPT_OSS_PARALLEL for fused in (False, *CHECKS)]
    found["gpt_oss"] = {run: parallel_gpt_oss(*run) for run in runs}
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def worker_of_four(rank, rendezvous, results):
    """Expert parallelism of two ranks, FSDP2 over pairs of them; a layer with tensor parallelism, too."""
    torch.set_num_threads(1)
    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4)
    spmd.set_dist(UnequalParts())
    runs = {(fusion, *OF_FOUR): parallel_layer(fusion, *OF_FOUR) for fusion in (None, "fused_moe")}
    found = {"layers": every_rank(runs)}
    found["training"] = [train(fused, 2, False) for fused in (False, True)]
    if rank == 0:
        torch.save(found, results)
    dist.destroy_process_group()


def run_processes(function, count, folder):
    torch.multiprocessing.spawn(function, (folder / "rendezvous", folder / "results"), nprocs=count)
    return torch.load(folder / "results", weights_only=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of two gloo processes, stock and ours, from one start, which takes seconds."""
    return run_processes(worker, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("ep, compiled", TRAININGS)
def test_training(trained, ep, compiled):
    """The debug model under FSDP2 and expert parallelism, with selective checkpointing and load balancing."""
    check_training(*(trained[fused, ep, compiled] for fused in (False, True)), ep, compiled)


def check_training(stock, ours, ep, compiled=False):
    assert ours["accounting"] == stock["accounting"]
    assert ours["shards"] == stock["shards"]
    assert ours["initial"].keys() == stock["initial"].keys()
    for name, value in stock["initial"].items():
        assert torch.equal(ours["initial"][name], value), name
    assert ours["losses"] == pytest.approx(stock["losses"], rel=2e-3)
    for name, value in stock["grads"].items():
        assert (ours["grads"][name] - value).norm() <= 3e-2 * value.norm(), name
    for value, other in zip(ours["bias"], stock["bias"], strict=True):
        assert other.any()
        assert torch.equal(value, other)
    if compiled:
        return
    counts = ours["counts"]
    # Once a step where selective checkpointing saved it; that of 0.2.x is full for every second layer.
    assert counts["route"] == counts["experts_down"] == (2 if HAS_OVERRIDES else 4)
    for name in ("permute", "unpermute"):
        assert (counts[name] > 0) == (ep == 2)  # on a single rank they are parts of the experts' GEMMs
    if HAS_OVERRIDES:
        # A step exchanges sizes, scores with ids, x and y, and three gradients. None is repeated.
        assert ours["exchanges"] == (2 * 7 if ep == 2 else 0)
    assert not any(stock["counts"].values())


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, which have backends")
@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("backend, tp, ep", LAYERS)
def test_backends(trained, fusion, backend, tp, ep):
    """Every backend and both kinds of parallelism: torchtitan's output and gradients on each rank, by the
    operators that docs/torchtitan.md names."""
    assert ParallelismConfig().spmd_backend == "spmd_types"  # of the backends "default" and "checked"
    check_layers(trained["layers"], fusion, backend, tp, ep)


def check_layers(layers, fusion, backend, tp, ep):
    for rank, runs in enumerate(layers):
        (found, counts), (expected, theirs) = runs[fusion, backend, tp, ep], runs[None, backend, tp, ep]
        for value, other in zip(found, expected, strict=True):
            assert value.dtype == other.dtype and value.shape == other.shape
            assert (value - other).norm() <= 3e-2 * other.norm(), rank
        assert theirs["theirs"] > 0 and not any(theirs[name] for name in OURS)
        is_dtensor = backend == "full_dtensor" or (backend == "partial_dtensor" and tp == 2)
        sorts, routes = fusion != "fused_experts", fusion == "fused_moe" and not is_dtensor
        # Our exchange moves x and scores with ids, there and back; torchtitan's moves x.
        moves = (3, 3) if routes and tp == 1 else (1, 2) if sorts else (0, 0)
        assert counts == {
            "route": routes,
            "permute": moves[0] if ep > 1 else 0,
            "unpermute": moves[1] if ep > 1 else 0,
            "experts_down": 1,
            "theirs": 0 if sorts else theirs["theirs"],
        }


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, which check types")
@pytest.mark.parametrize("ep, mode", RECOMPUTED)
def test_checked_recomputation(trained, ep, mode):
    """Types are not checked in recomputation, which gives the same bits."""
    run = ("fused_moe", "checked", 1, ep)
    for runs in trained["layers"]:
        (found, counts), (expected, _) = runs[(*run, mode)], runs[run]
        assert counts["route"] == counts["experts_down"] == (2 if mode == "full" else 1)
        for value, other in zip(found, expected, strict=True):
            assert torch.equal(value, other)


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, which has dispatchers")
@pytest.mark.parametrize("mode", KEPT)
def test_torchtitans_exchange(trained, mode):
    """A dispatcher of its own class, and experts in a checkpoint's wrapper, keep it."""
    for runs in trained["layers"]:
        (found, counts), (expected, _) = runs["fused_moe", "default", 1, 2, mode], runs[None, "default", 1, 2]
        assert counts["permute"] == (mode == "wrapped experts")  # ours takes three
        for value, other in zip(found, expected, strict=True):
            assert (value - other).norm() <= 3e-2 * other.norm()


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later, which has parallelize()")
def test_a_rank_without_tokens(trained):
    for expected, found in zip(*trained["no tokens"], strict=True):
        for value, other in zip(found, expected, strict=True):
            assert value.shape == other.shape
            assert (value - other).norm() <= 3e-2 * other.norm()


@pytest.mark.skipif(not HAS_OVERRIDES, reason="for torchtitan 0.3.0 and later; 0.2.x routes as on one rank")
def test_replay_under_expert_parallelism(trained):
    """Each rank has the choices of its own tokens."""
    for ids, recorded, replayed in trained["replayed"]:
        assert ids.shape == (make_input().numel() // D // 2, SAME_K["top_k"])
        for value, other in zip(replayed, recorded, strict=True):
            assert torch.equal(value, other)


@pytest.mark.skipif(not HAS_OVERRIDES, reason="two ranks of 0.2.x are tested, whose exchange has no backends")
def test_four_ranks(tmp_path):
    """The debug model under expert parallelism and FSDP2, and a layer under tensor parallelism, too."""
    found = run_processes(worker_of_four, 4, tmp_path)
    check_layers(found["layers"], "fused_moe", *OF_FOUR)
    check_training(*found["training"], ep=2)


@pytest.mark.parametrize("score_on", ("output", "input"))
def test_rows_for_a_dispatcher(score_on):
    """Identity experts between routed_rows and combine: every token times the sum of its scores."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, D, requires_grad=True)
    scores = torch.rand(TOKENS, 3, requires_grad=True)
    ids = torch.rand(TOKENS, E).argsort(dim=1)[:, :3].int()
    routing = Routing(scores, ids, route_plan(ids, E), score_on)
    rows = routed_rows(x, routing)
    starts = routing.plan.offsets.tolist()
    for e in range(E):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        factor = scores[tokens, slots, None] if score_on == "input" else 1
        torch.testing.assert_close(rows[starts[e] : starts[e + 1]], x[tokens] * factor)
    out, dout = combine(rows, routing), torch.randn(TOKENS, D)
    exact = scores.sum(dim=1, keepdim=True) * x
    torch.testing.assert_close(out, exact)
    found, expected = (torch.autograd.grad(result, (x, scores), dout) for result in (out, exact))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tp", (1, 2))
def test_gpt_oss(tp):
    """Its formula in float32, where many gates are past the limit; a rank's part of the second bias."""
    from fused_moe.torchtitan.layer import gpt_oss, run_experts

    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 7])
    x = torch.randn(12, D, requires_grad=True)
    shapes = ((3, 2 * F, D), (3, 2 * F), (3, D, F), (3, D))
    parameters = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    found = run_experts(x, gpt_oss(*parameters, 1.0, tp), counts, None, dtype=None)
    w1, b1, w2, b2 = parameters
    rows = []
    for e, part in enumerate(x.split(counts.tolist())):
        hidden = clamped_swiglu(part @ w1[e].T + b1[e], limit=1.0)
        rows.append(hidden @ w2[e].T + ScaleBiasForward.apply(b2[e], tp, *(F32,) * HAS_OVERRIDES))
    exact, dout = torch.cat(rows), torch.randn(12, D)
    torch.testing.assert_close(found, exact)
    grads = [torch.autograd.grad(out, (x, *parameters), dout) for out in (found, exact)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dim", (0, 1))
def test_shards(trained, dim):
    """Experts sharded by FSDP2 along either dimension: the gradients of the unsharded layer."""
    sharded, alone = trained["shard"][dim]
    assert_close(sharded, alone, 1e-6)


@pytest.mark.skipif(HAS_OVERRIDES, reason="for 0.2.x, which hooks the modules inside the layer")
@pytest.mark.parametrize("ep, compiled", TENSOR_PARALLEL)
def test_tensor_parallelism(trained, ep, compiled):
    """Under tensor parallelism the layer is torchtitan's, and its experts are ours."""
    (stock, _), (ours, counts) = (trained["tensor"][fused, ep, compiled] for fused in (False, True))
    for value, other in zip(ours, stock, strict=True):
        assert (value - other).norm() <= 3e-2 * other.norm()
    assert compiled == (counts is None)
    assert compiled or counts == {"route": 0, "permute": 0, "unpermute": 0, "experts_down": 1}


@pytest.mark.parametrize("fused", CHECKS)
@pytest.mark.parametrize("tp, ep", GPT_OSS_PARALLEL)
def test_parallel_gpt_oss(trained, fused, tp, ep):
    """Each rank adds its part of the second bias. Experts of other ranks have theirs."""
    stock, ours = (trained["gpt_oss"][which, tp, ep] for which in (False, fused))
    for value, other in zip(ours, stock, strict=True):
        assert value.shape == other.shape
        assert (value - other).norm() <= 3e-2 * other.norm()


def test_fp8_under_fsdp(trained):
    """The layer's gradients alone, and no codes are kept while weights are not gathered."""
    sharded, alone, is_gathered = trained["fp8"]["fsdp"]
    assert is_gathered
    assert_close(sharded, alone, 1e-6)


@pytest.mark.parametrize("tp, ep", FP8_PARALLEL)
def test_parallel_fp8(trained, tp, ep):
    """Rows that a dispatcher sends are quantised, and so are parts of experts."""
    runs = trained["fp8"]
    (usual, calls, widths), (ours, fp8_calls, _) = (
        runs[fusion, tp, ep] for fusion in ("fused_moe", "fused_moe_fp8")
    )
    assert (calls, fp8_calls) == (0, 1)
    # Ids and scores go along where a token is sent once for each rank: in the exchange that is ours.
    assert (2 * SAME_K["top_k"] in widths) == (ep > 1)
    for value, other in zip(ours, usual, strict=True):
        assert 0.01 * other.norm() < (value - other).norm() < 0.1 * other.norm()
