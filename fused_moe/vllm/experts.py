"""The routed experts of a rank, as a part of vLLM's modular kernel.

vLLM's modular kernel is prepare, experts, finalize. Prepare and finalize exchange tokens between ranks;
this is the middle. vLLM's packed w13 is `layout="halves"` here, and its expert_map, its ids of remote
experts and its output buffer are those of `fused_experts`, so that no weight is copied.
"""

from __future__ import annotations

import functools
import inspect

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

import fused_moe

STANDARD = mk.FusedMoEActivationFormat.Standard


class FusedMoEExperts(mk.FusedMoEExpertsModular):
    """w13 (E, 2F, D) or (E, F, D), w2 (E, D, F) of the activations' dtype: bfloat16, float16 or float32."""

    # --- what vLLM asks before it takes the class ---

    @staticmethod
    def is_supported_config(cls, moe_config, weight_key, activation_key, activation_format):
        """vLLM's answer (supported, why not), with the questions that it does not ask."""
        ok, why_not = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        why_not = why_not or _why_not(moe_config)
        return why_not is None, why_not

    @staticmethod
    def activation_format():
        return STANDARD

    @staticmethod
    def _supports_current_device():
        return current_platform.is_cuda() and not _why_no_kernels()

    @staticmethod
    def _supports_no_act_and_mul():
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation):
        return True  # `_why_not` looks at it together with its constants

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        return not (
            moe_parallel_config.use_fi_nvl_two_sided_kernels
            or moe_parallel_config.use_fi_nvl_one_sided_kernels
        )

    @staticmethod
    def _supports_batch_invariance():
        return True

    # --- what vLLM asks before it calls `apply` ---

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        return (0,), (0,), (M, K)

    # --- the computation ---

    def operands(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple:
        """w1 and w2 as `fused_experts` takes them; vLLM gives its layer's parameters."""
        return w1, w2

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
        expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta,
        apply_router_weight_on_input,
    ):  # fmt: skip
        if apply_router_weight_on_input:  # prepare has multiplied the input
            topk_weights = torch.ones_like(topk_weights)
        w1, w2 = self.operands(w1, w2)
        fused_moe.fused_experts(
            hidden_states, w1, w2, None, topk_weights, topk_ids,
            b1=self.w1_bias, b2=self.w2_bias, expert_map=expert_map, out=output,
            **activation_arguments(activation, self.moe_config, self.quant_config),
        )  # fmt: skip


def activation_arguments(activation, moe_config: FusedMoEConfig, quant_config=None) -> dict:
    """The arguments of `fused_experts` for a MoEActivation and its constants; ValueError where none fit.

    Source: vllm.model_executor.layers.fused_moe.activation.apply_moe_activation.
    """

    def constant(name: str, default: float | None) -> float | None:
        values = getattr(quant_config, f"gemm1_{name}", None), getattr(moe_config, f"swiglu_{name}", None)
        return next((float(v) for v in values if v is not None), default)

    name = activation.value
    limit = getattr(quant_config, "gemm1_clamp_limit", None)
    limit = constant("limit", None) if limit is None else float(limit)
    if name in ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"):
        return {"activation": name.removesuffix("_no_mul"), "layout": "separate"}
    if name == "silu" and limit is not None:
        return {"activation": "swiglu_limited", "limit": limit, "layout": "halves"}
    if name in ("silu", "gelu", "gelu_tanh"):
        return {"activation": name, "layout": "halves"}
    if name == "swigluoai":  # gpt-oss's constants, whatever its configuration says
        return {"activation": "swiglu_clamped", "alpha": 1.702, "limit": 7.0, "layout": "interleaved"}
    if name == "swigluoai_uninterleave" and limit is not None:
        alpha, beta = constant("alpha", 1.0), constant("beta", 0.0)
        if (alpha, beta) == (1.0, 0.0):
            return {"activation": "swiglu_limited", "limit": limit, "layout": "halves"}
        if beta == 1.0:
            return {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit, "layout": "halves"}
        raise ValueError(f"activation {name} with alpha {alpha} and beta {beta}")
    if name == "situ" and moe_config.activation_situ_beta and moe_config.activation_situ_linear_beta:
        alpha, limit = moe_config.activation_situ_beta, moe_config.activation_situ_linear_beta
        return {"activation": "situ", "alpha": alpha, "limit": limit, "layout": "halves"}
    raise ValueError(f"activation {name}")


def _why_not(moe_config: FusedMoEConfig) -> str | None:
    """Why a layer cannot run here; None if it can. vLLM's own questions come before."""
    try:
        activation_arguments(moe_config.activation, moe_config)
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def _why_no_kernels() -> str:
    """Why fused_moe's CUDA kernels do not run here, or ""."""
    state = fused_moe.info()["tiers"]["cuda"]
    return "" if state == "on" else state


def check_interface() -> None:
    """TypeError where a method that vLLM calls takes other arguments than ours: another vLLM's."""
    for name in ("is_supported_config", "workspace_shapes", "apply"):
        theirs, ours = (
            [*inspect.signature(getattr(cls, name)).parameters]
            for cls in (mk.FusedMoEExpertsModular, FusedMoEExperts)
        )
        if theirs != ours:
            raise TypeError(f"{name} expected to take {', '.join(ours)}, found {', '.join(theirs)}")
