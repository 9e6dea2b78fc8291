"""The core of SGLang's MoE runner: from the dispatcher's tokens to the sum over a rank's experts.

SGLang's runner takes w13 (E, 2F, D), or (E, F, D) without a gate, w2 (E, D, F), their biases and the ids of
the rank's experts; -1 is a remote expert or a padded row. These are the arguments of `fused_experts`. No
weight is copied or kept: each call gets the layer's parameters, so it follows updates of weights.

| activation | gated | constants | `activation` | `layout` |
| --- | --- | --- | --- | --- |
| silu, gelu, gelu_tanh | yes | none | the same | halves |
| silu | yes | gemm1_alpha, gemm1_clamp_limit | swiglu_clamped | interleaved, or halves (*) |
| silu | yes | swiglu_limit | swiglu_limited | halves |
| situ | yes | gemm1_alpha (4 by default), gemm1_clamp_limit | situ | halves |
| silu, gelu, relu2 | no | none | the same | separate |

(*) as gate_up_interleaved says. Two have no kernel: silu with gemm1_clamp_limit alone, which clamps after
silu, and situ without gemm1_clamp_limit.
Source: sglang.srt.layers.moe.moe_runner.triton and its triton_utils.fused_moe, 0.5.23.
"""

from __future__ import annotations

import inspect

from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES, add_moe_runner_backend_choices
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
from sglang.srt.layers.moe.moe_runner import MoeRunner, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import (
    get_moe_a2a_backend,
    get_moe_runner_backend,
    resolve_moe_runner_backend,
)
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import fused_moe

from . import NAME


class FusedMoERunnerCore(DispatchMoeRunnerCore):
    """The experts of one layer. ValueError where nothing here computes its configuration."""

    def __init__(self, config):
        super().__init__(config)
        self.arguments = activation_arguments(config)
        exchange = get_moe_a2a_backend()
        if not exchange.is_none():
            raise ValueError(unsupported("--moe-a2a-backend none", exchange.value))
        if config.no_combine:
            raise ValueError(unsupported("a sum over the experts of a token", "no_combine"))
        self.scale = 1.0 if config.routed_scaling_factor is None else config.routed_scaling_factor
        if config.apply_router_weight_on_input:
            if self.scale != 1:
                expected = "routed_scaling_factor 1 beside apply_router_weight_on_input"
                raise ValueError(unsupported(expected, str(self.scale)))
            self.arguments["score_on"] = "input"

    @property
    def runner_backend(self):
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
        if hooks is not None:
            raise ValueError(unsupported("no LoRA on experts", "LoRA"))
        if runner_config.apply_router_weight_on_input and quant_info.b13 is not None:
            # SGLang's kernels weigh the biases, too.
            raise ValueError(unsupported("no biases beside apply_router_weight_on_input", "biases"))
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        scores = topk.topk_weights if self.scale == 1 else topk.topk_weights * self.scale
        out = fused_moe.fused_experts(
            x, quant_info.w13_weight, quant_info.w2_weight, None, scores, topk.topk_ids,
            b1=quant_info.b13, b2=quant_info.b2, **self.arguments,
        )  # fmt: skip
        return StandardCombineInput(hidden_states=out)


def activation_arguments(config) -> dict:
    """activation, alpha, limit and layout of `fused_experts` for a MoeRunnerConfig.

    Raises:
        ValueError: nothing here computes it.
    """
    alpha, clamp, limit = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    match config.activation, config.is_gated, (alpha is None, clamp is None, limit is None):
        case ("silu" | "gelu" | "gelu_tanh") as name, True, (True, True, True):
            return {"activation": name, "layout": "halves"}
        case "silu", True, (False, False, _) if config.gemm1_beta in (None, 1):
            layout = "interleaved" if config.gate_up_interleaved else "halves"
            return {"activation": "swiglu_clamped", "alpha": alpha, "limit": clamp, "layout": layout}
        case "silu", True, (True, True, False):
            return {"activation": "swiglu_limited", "limit": limit, "layout": "halves"}
        case "situ", True, (_, False, _):
            alpha = 4.0 if alpha is None else alpha
            return {"activation": "situ", "alpha": alpha, "limit": clamp, "layout": "halves"}
        case ("silu" | "gelu" | "relu2") as name, False, (True, True, True):
            return {"activation": name, "layout": "separate"}
    names = ("is_gated", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
    constants = ", ".join(f"{name} {getattr(config, name)}" for name in names)
    raise ValueError(
        unsupported(f"an activation in the table of {__name__}", f"{config.activation} with {constants}")
    )


def unsupported(expected: str, found: str) -> str:
    return f"--moe-runner-backend {NAME} expected {expected}, found {found}"


def choose_runner(_, method, layer, moe_runner_config) -> None:
    """After UnquantizedFusedMoEMethod.create_moe_runner, which takes Triton's runner for names that it does
    not know."""
    backend = get_moe_runner_backend()
    if backend.value == NAME:
        method.runner = MoeRunner(backend, moe_runner_config)


def check_method(moe_runner_config, quant_method) -> None:
    """Before create_moe_dispatcher, which each layer calls when it has a method."""
    if get_moe_runner_backend().value != NAME:
        return
    core = getattr(getattr(quant_method, "runner", None), "runner_core", None)
    if not isinstance(quant_method, UnquantizedFusedMoEMethod) or not isinstance(core, FusedMoERunnerCore):
        raise ValueError(unsupported("unquantised experts", type(quant_method).__name__))


def check_interface() -> None:
    """TypeError where SGLang calls us, or what we hook, with other arguments: it is another SGLang's."""
    for theirs, ours in (
        (DispatchMoeRunnerCore.run_from_dispatch, FusedMoERunnerCore.run_from_dispatch),
        (create_moe_dispatcher, check_method),
        (UnquantizedFusedMoEMethod.create_moe_runner, choose_runner),
    ):
        expected, found = ([*inspect.signature(f).parameters] for f in (ours, theirs))
        if ours is choose_runner:  # the hook gets the result first, and calls self method
            expected = ["self", *expected[2:]]
        if found != expected:
            raise TypeError(
                f"{theirs.__qualname__} expected to take {', '.join(expected)}, found {', '.join(found)}"
            )


def register() -> None:
    if NAME in MOE_RUNNER_BACKEND_CHOICES:
        return
    check_interface()
    register_moe_runner_core(NAME, FusedMoERunnerCore)
    HookRegistry.register(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.create_moe_runner",
        choose_runner, HookType.AFTER,
    )  # fmt: skip
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher", check_method, HookType.BEFORE
    )
    add_moe_runner_backend_choices([NAME])
