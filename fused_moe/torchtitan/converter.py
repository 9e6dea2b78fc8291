"""torchtitan 0.2.x: a model converter that changes the classes of the MoE layers and nothing else.

A converter runs on the meta device, before parallelisation, so the modules and their parameters have to
stay the same objects. The layers remain subclasses of torchtitan's: its compile and FSDP code asks for them.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from .layer import SAVED_OPS, Routing, choose, combine, routed_rows, run_experts


class FusedGroupedExperts(GroupedExperts):
    """The experts behind any dispatcher: the hooks of EP and TP stay around forward."""

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor, routing: Routing | None = None) -> Tensor:
        """x (R, D) rows grouped by expert, or (T, D) tokens with a routing -> the same shape."""
        # Where the stock layer multiplies one expert after another it does so in x's dtype.
        dtype = torch.bfloat16 if self.use_grouped_mm else None
        weights = (self.w1, self.w2, self.w3)
        return run_experts(x, weights, num_tokens_per_expert, routing, dtype=dtype)


class FusedMoE(MoE):
    """The routed path in our kernels, all but the way to experts on other ranks and back."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> (B, L, D)."""
        if self.router._debug_force_load_balance or _is_spread_over(self.router.gate.weight, "tp"):
            return super().forward(x)  # hooks of tensor parallelism take part in what lies between
        tokens = x.view(-1, x.size(-1))
        score_on = "input" if self.score_before_experts else "output"
        routing = choose(self.router, self.router.gate(tokens), self.expert_bias, score_on)
        counts = routing.plan.counts
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        is_expert_parallel = _is_spread_over(self.experts.w1, "ep")
        if is_expert_parallel:
            routed = self.experts(routed_rows(tokens, routing), counts.long())
        else:
            routed = self.experts(tokens, counts, routing=routing)
        # As in the stock layer, while rows are on their way back.
        shared = self.shared_experts(tokens) if self.shared_experts is not None else None
        out = combine(routed, routing) if is_expert_parallel else routed
        return (out if shared is None else shared + out).view(x.shape)


def _is_spread_over(weight: Tensor, dim: str) -> bool:
    """Whether a weight is spread over a dimension of this name."""
    return isinstance(weight, DTensor) and dim in (weight.device_mesh.mesh_dim_names or ())


class FusedMoEConverter:
    """torchtitan's ModelConverter, registered as "fused_moe".

    Layers of classes derived from torchtitan's keep what they compute, and so do weights that a converter
    named before this one has quantised. Of a DeepEP layer, and under tensor parallelism, the experts are
    fused. Selective checkpointing of every model that is imported learns our operators.
    """

    def __init__(self, job_config, parallel_dims):
        """Takes what the protocol gives; nothing here depends on it."""

    def convert(self, model: nn.Module) -> None:
        """Changes the model's MoE layers in place.

        Raises:
            ValueError: if it has none that can be fused.
        """
        converted = 0
        for module in model.modules():
            # A layer comes before its parts, so its experts are still torchtitan's here.
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
        """Nothing: the load balancing hook is torchtitan's own."""


def _is_stock(layer: MoE) -> bool:
    return _has_stock_experts(layer.experts) and type(layer.router) is TokenChoiceTopKRouter


def _has_stock_experts(module: nn.Module) -> bool:
    """Of torchtitan's class and with plain weights: a converter that quantises changes these alone."""
    return type(module) is GroupedExperts and all(type(p) is nn.Parameter for p in module.parameters())


def _selective_save_lists() -> list[set]:
    """Each model's parallelize module has a list of its own, by this name."""
    modules = list(sys.modules.values())  # some are None: imports that somebody has blocked
    lists = (getattr(module, "__dict__", {}).get("_op_sac_save_list") for module in modules)
    return [found for found in lists if isinstance(found, set)]


register_model_converter(FusedMoEConverter, "fused_moe")
