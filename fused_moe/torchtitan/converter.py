"""torchtitan 0.2.x: a model converter that changes only the classes of the MoE layers.

A converter runs on the meta device, before parallelisation, so modules and parameters must stay the same
objects. The new classes are subclasses of torchtitan's: its compile and FSDP code checks for those.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from ..expert_bias import KeepsExpertBias
from ..ops import reshaped
from .layer import SAVED_OPS, Routing, choose, combine, logits_of, routed_rows, run_experts


class FusedGroupedExperts(GroupedExperts):
    """The experts behind any dispatcher. EP and TP hook their forward as before."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, routing: Routing | None = None) -> Tensor:
        """x (R, D) rows grouped by expert, or (T, D) tokens with a routing -> the same shape."""
        # The stock layer's for-loop computes in x's dtype, its grouped_mm in bfloat16.
        dtype = torch.bfloat16 if self.use_grouped_mm else None
        weights = (self.w1, self.w2, self.w3)
        return run_experts(x, weights, num_tokens_per_expert, routing, dtype=dtype)


class FusedMoE(KeepsExpertBias, MoE):
    """Our kernels compute the routed path, except the exchange with other ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> (B, L, D)."""
        if self.router._debug_force_load_balance or _is_sharded_over(self.router.gate.weight, "tp"):
            return super().forward(x)  # tensor parallelism hooks the modules in between
        tokens = x.view(-1, x.size(-1))
        score_on = "input" if self.score_before_experts else "output"
        logits = logits_of(self.router.gate, tokens)
        routing = choose(self.router, logits, self.expert_bias, score_on)
        counts = routing.plan.counts
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        is_expert_parallel = _is_sharded_over(self.experts.w1, "ep")
        if is_expert_parallel:
            routed = self.experts(routed_rows(tokens, routing), counts.long())
        else:
            routed = self.experts(tokens, counts, routing=routing)
        # As in the stock layer, they run while the combine's all-to-all is in flight.
        shared = self.shared_experts(tokens) if self.shared_experts is not None else None
        out = combine(routed, routing) if is_expert_parallel else routed
        return reshaped(out if shared is None else shared + out, x.shape)


def _is_sharded_over(weight: Tensor, dim: str) -> bool:
    """Whether a weight is a DTensor on a mesh with a dimension of this name."""
    return isinstance(weight, DTensor) and dim in (weight.device_mesh.mesh_dim_names or ())


class FusedMoEConverter:
    """torchtitan's ModelConverter, registered as "fused_moe".

    Layers of classes derived from torchtitan's are not converted, nor are weights that an earlier converter
    has quantised. In a DeepEP layer, and under tensor parallelism, only the experts are fused. Selective
    checkpointing of every imported model saves our operators, too.
    """

    def __init__(self, job_config, parallel_dims):
        """The protocol's arguments, which are not used."""

    def convert(self, model: nn.Module) -> None:
        """Converts the model's MoE layers in place.

        Raises:
            ValueError: if no layer can be converted.
        """
        converted = 0
        for module in model.modules():
            # modules() yields a layer before its experts, which are still torchtitan's here.
            if type(module) is MoE and _is_stock(module):
                module.__class__ = FusedMoE
            elif _has_stock_experts(module):
                module.__class__ = FusedGroupedExperts
                converted += 1
        if not converted:
            raise ValueError("fused_moe: expected a model with torchtitan's GroupedExperts, found none")
        for save_list in _selective_save_lists():
            save_list.update(SAVED_OPS)
        logger.info(f"fused_moe: {converted} MoE layers converted")

    def post_optimizer_hook(self, model) -> None:
        """Does nothing: torchtitan's load balancing hook remains."""


def _is_stock(layer: MoE) -> bool:
    return _has_stock_experts(layer.experts) and type(layer.router) is TokenChoiceTopKRouter


def _has_stock_experts(module: nn.Module) -> bool:
    """Whether it is torchtitan's class, with plain weights: quantising converters change only the weights."""
    return type(module) is GroupedExperts and all(type(p) is nn.Parameter for p in module.parameters())


def _selective_save_lists() -> list[set]:
    """The save lists of all models: each parallelize module has one, under this name."""
    modules = list(sys.modules.values())  # None: a blocked import
    lists = (getattr(module, "__dict__", {}).get("_op_sac_save_list") for module in modules)
    return [save_list for save_list in lists if isinstance(save_list, set)]


register_model_converter(FusedMoEConverter, "fused_moe")
