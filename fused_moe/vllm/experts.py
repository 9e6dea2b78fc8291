"""The routed experts of a rank, as a part of vLLM's modular kernel.

vLLM's modular kernel is prepare, experts, finalize. Prepare and finalize exchange tokens between ranks;
this is the middle. vLLM's w13, expert_map, ids of remote experts and output buffer are those of
`fused_experts`. No weight is copied or kept: each call gets the layer's parameters, so it follows whatever
vLLM does to them.
"""

from __future__ import annotations

import functools
import inspect

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

import fused_moe

from .activation import activation_arguments

Formats = mk.FusedMoEActivationFormat


class FusedMoEExperts(mk.FusedMoEExpertsModular):
    """w13 (E, 2F, D), or (E, F, D) without a gate, and w2 (E, D, F): Tensors or QuantizedWeights."""

    def __init__(self, moe_config, quant_config, max_num_tokens=None, num_dispatchers=None):
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.arguments = activation_arguments(moe_config.activation, moe_config, quant_config)
        self.biases = self.w1_bias, self.w2_bias  # `give_biases` replaces them

    # --- what vLLM asks before it takes the class ---

    @staticmethod
    def activation_format():
        return Formats.Standard

    @staticmethod
    def _supports_current_device():
        return current_platform.is_cuda() and why_no_kernels() is None

    @staticmethod
    def _supports_no_act_and_mul():
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation):
        return True  # `why_not` asks, which knows the activation's constants

    @staticmethod
    def _supports_parallel_config(config):
        """Exchanges that hand over rows of tokens with their ids and scores, and take a sum for each row."""
        if config.use_passthrough_all2all:
            return False
        deepep = config.use_deepep_ht_kernels or config.use_deepep_v2_kernels
        return not config.use_all2all_kernels or config.use_ag_rs_all2all_kernels or deepep

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

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
        expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta,
        apply_router_weight_on_input,
    ):  # fmt: skip
        if apply_router_weight_on_input:  # vLLM's prepare has multiplied the input
            topk_weights = torch.ones_like(topk_weights)
        b1, b2 = self.biases
        fused_moe.fused_experts(
            hidden_states, w1, w2, None, topk_weights, topk_ids,
            b1=b1, b2=b2, expert_map=expert_map, out=output, **self.arguments,
        )  # fmt: skip


def biases_of(layer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return layer._parameters.get("w13_bias"), layer._parameters.get("w2_bias")


def give_biases(kernel: mk.FusedMoEKernel, layer) -> None:
    """Makes the next call of our experts add the layer's biases of this moment.

    vLLM hands over weights in each call, but biases once. A reload or an offloader may have put other
    parameters in their place.
    """
    kernel.fused_experts.biases = biases_of(layer)


def why_not(moe_config) -> str | None:
    """Why the experts of a layer cannot run here, however its weights are stored; None if they can. It never
    raises."""
    try:
        if moe_config.moe_backend != "auto":
            return f"--moe-backend {moe_config.moe_backend}"
        if (reason := why_no_kernels()) is not None:
            return reason
        if moe_config.in_dtype not in (torch.bfloat16, torch.float16):
            return f"dtype {moe_config.in_dtype}"
        widths = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
        if any(width % 8 for width in widths):
            return f"widths {widths}, not multiples of 8"
        activation_arguments(moe_config.activation, moe_config)
        batched = moe_config.moe_parallel_config.use_batched_activation_format
        activation_format = Formats.BatchedExperts if batched else Formats.Standard
        cls = FusedMoEExperts
        return cls.is_supported_config(cls, moe_config, None, None, activation_format)[1]
    except NotImplementedError as error:
        return str(error)
    except Exception as error:  # an engine without us is better than none
        return f"{type(error).__name__}: {error}"


@functools.cache
def why_no_kernels() -> str | None:
    """Why Hopper's kernels do not run here; vLLM's own are better than the portable ones."""
    tier = fused_moe.info()["tiers"].get("hopper", "off: this build has no CUDA kernels")
    return None if tier.startswith("on") else f"Hopper's kernels are {tier}"


def check_interface(method: type[FusedMoEMethodBase]) -> None:
    """TypeError where vLLM's interface is another than ours and that of `method`, our class of methods."""
    for name in ("__init__", "workspace_shapes", "apply"):
        check_arguments(name, getattr(FusedMoEExperts, name), getattr(mk.FusedMoEExpertsModular, name))
    check_arguments("apply", method.apply, FusedMoEMethodBase.apply)
    asked = {mk.FusedMoEKernel: ("fused_experts",), mk.FusedMoEExpertsModular: ("w1_bias", "w2_bias")}
    for cls, names in asked.items():
        for name in names:
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__name__} expected to have {name}, found none")


def check_arguments(name: str, ours, theirs) -> None:
    """TypeError where vLLM's function of this name takes other arguments than ours."""
    expected, found = ([*inspect.signature(function).parameters] for function in (ours, theirs))
    if found != expected:
        raise TypeError(f"{name} expected to take {', '.join(expected)}, found {', '.join(found)}")
