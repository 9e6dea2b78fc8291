"""The routed experts of a rank, as one of SGLang's runner cores.

SGLang's dispatcher hands over tokens, scores and local ids, -1 for the experts of other ranks; its w13 and w2
are those of `fused_experts`. No weight is copied or kept: each call gets the layer's parameters, so it
follows updates in place. The host waits for nothing, so calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, resolve_moe_runner_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.utils import is_cuda

import fused_moe

from .activation import activation_arguments

NAME = "fused_moe"


class FusedMoERunnerCore(DispatchMoeRunnerCore):
    """w13 (E, 2F, D), or (E, F, D) without a gate, w2 (E, D, F), biases of any floating dtype.

    Raises:
        NotImplementedError: the layer cannot run here; the message says what was expected and found.
    """

    def __init__(self, config):
        super().__init__(config)
        check(config)
        self.arguments = activation_arguments(config)

    @property
    def runner_backend(self):
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
        if hooks is not None:
            refuse("no LoRA of experts", "LoRA's hooks")
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        scores, factor = topk.topk_weights, runner_config.routed_scaling_factor
        on_input = runner_config.apply_router_weight_on_input
        if factor is not None and not on_input:
            scores = scores * factor
        b13, b2 = (None if bias is None else bias.to(x.dtype) for bias in (quant_info.b13, quant_info.b2))
        out = fused_moe.fused_experts(
            x, quant_info.w13_weight, quant_info.w2_weight, None, scores, topk.topk_ids,
            b1=b13, b2=b2, score_on="input" if on_input else "output", **self.arguments,
        )  # fmt: skip
        if factor is not None and on_input:
            out.mul_(factor)
        return StandardCombineInput(hidden_states=out)


def refuse(expected: str, found: object) -> None:
    raise NotImplementedError(f"--moe-runner-backend {NAME} expected {expected}, found {found}")


def why_no_kernels() -> str | None:
    """Why Hopper's kernels do not run here; SGLang's own are better than the portable ones."""
    tier = fused_moe.info()["tiers"].get("hopper", "off: this build has no CUDA kernels")
    return None if is_cuda() and tier.startswith("on") else f"them {tier}"


def check(config) -> None:
    """NotImplementedError where the experts of a MoeRunnerConfig cannot run here, by all but activation."""
    if (reason := why_no_kernels()) is not None:
        refuse("Hopper's kernels to be on", reason)
    if not (exchange := get_moe_a2a_backend()).is_none():
        refuse("--moe-a2a-backend none", exchange.value)
    method = getattr(config.layer, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedFusedMoEMethod):
        refuse("unquantised experts", type(method).__name__)
    if config.params_dtype not in (torch.bfloat16, torch.float16):
        refuse("bfloat16 or float16 weights", config.params_dtype)
    widths = config.hidden_size, config.intermediate_size_per_partition
    if any(width % 8 for width in widths):
        refuse("widths that are multiples of 8", widths)
    if config.no_combine:
        refuse("a sum over a token's experts", "no_combine=True")
    if config.apply_router_weight_on_input and getattr(config.layer, "with_bias", False):
        # SGLang multiplies after the bias is added.
        refuse("no biases beside apply_router_weight_on_input", "with_bias=True")
