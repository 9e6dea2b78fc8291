"""torchtitan 0.3.0 and later: overrides that replace Config nodes before the model is built.

Each class derives from the one that it replaces and has the same parameters, so it inherits initialisation,
sharding and state dicts. torchtitan's sharding relies on the names of forward's arguments, which differ
between versions: functools.wraps gives each forward torchtitan's signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from ..expert_bias import KeepsExpertBias
from ..ops import reshaped, route_plan
from .layer import SAVED_OPS, Routing, choose, combine, logits_of, routed_rows, run_experts

# --- modules ------------------------------------------------------------------------------------------


class FusedGroupedExperts(GroupedExperts):
    """The experts behind any dispatcher; with a routing, on tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    @wraps(GroupedExperts.forward)
    def forward(self, x: Tensor, counts: Tensor, routing: Routing | None = None) -> Tensor:
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        return run_experts(x, weights, counts, routing, dtype=torch.bfloat16)  # the stock layer's dtype


class FusedTokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's exchange between ranks, with our permute before it and our weighted sum after it.

    On a single rank, or where SPMD types are checked, it is torchtitan's dispatcher unchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _local_reorder(self, x: Tensor, scores: Tensor, ids: Tensor):
        if self.ep_mesh is None or get_spmd_backend() == "spmd_types":
            return super()._local_reorder(x, scores, ids)
        routing = Routing(scores, ids, route_plan(ids, self.num_experts))
        return routed_rows(x, routing), routing, scores  # dispatch passes the last two on to combine

    def combine(self, rows: Tensor, metadata, x: Tensor) -> Tensor:
        routing = metadata.token_indices_experts_sorted_N
        if not isinstance(routing, Routing):
            return super().combine(rows, metadata, x)
        rows = self._unpermute(rows, metadata.input_shape, metadata.permuted_indices)
        group, splits = self.ep_mesh.get_group(), (metadata.input_splits, metadata.output_splits)
        return combine(self._combine_token_exchange(rows, group, *splits), routing)


# The methods that FusedTokenDispatcher relies on. In a release without them the dispatcher is not replaced.
DISPATCHER_PARTS = ("_local_reorder", "_unpermute", "_combine_token_exchange")
HAS_DISPATCHER_PARTS = all(hasattr(AllToAllTokenDispatcher, name) for name in DISPATCHER_PARTS)


class FusedRoutedExperts(RoutedExperts):
    """Our kernels compute everything from scores and ids to combined tokens, if all experts are local."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    @wraps(RoutedExperts.forward)
    def forward(
        self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor, routing: Routing | None = None
    ) -> Tensor:
        if not self.is_local:
            return super().forward(x, scores, ids, counts)
        if routing is None:
            routing = Routing(scores.flatten(0, -2), ids.flatten(0, -2))
        return reshaped(self.inner_experts(x.flatten(0, -2), counts, routing=routing), x.shape)

    @property
    def is_local(self) -> bool:
        """Whether dispatch would only reorder this rank's tokens."""
        dispatcher = self.token_dispatcher
        known = (LocalTokenDispatcher, AllToAllTokenDispatcher, FusedTokenDispatcher)
        only_reorders = type(dispatcher) in known
        return only_reorders and getattr(dispatcher, "ep_mesh", None) is None


class FusedMoE(KeepsExpertBias, MoE):
    """Our kernels compute the whole routed path, if all experts are local."""

    bias_name = "expert_bias_E"

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    @wraps(MoE.forward)
    def forward(self, x: Tensor) -> Tensor:
        if not self._routes_here(x):
            return super().forward(x)
        with torch.autocast(x.device.type, dtype=torch.float32):  # as in the stock router
            logits = logits_of(self.router.gate, x)
        routing = choose(self.router, logits.flatten(0, -2), self.expert_bias_E)
        counts = routing.plan.counts
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(counts)
        per_token = (*x.shape[:-1], -1)
        scores, ids = routing.scores.view(per_token), routing.ids.view(per_token)
        out = self.routed_experts(x, scores, ids, counts, routing=routing)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def _routes_here(self, x: Tensor) -> bool:
        """Whether all experts are local, and our router supports x.

        It does not support DTensors, nor SPMD type checking, for which its operator has no rule.
        """
        return (
            self.routed_experts.is_local
            and not self.router._debug_force_load_balance
            and not isinstance(x, DTensor)
            and not spmd.is_type_checking()
        )


class FusedSelectiveAC(SelectiveAC):
    """Selective checkpointing that also saves our operators that are expensive to recompute."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | SAVED_OPS


# --- overrides ----------------------------------------------------------------------------------------


def _override(target: type, description: str):
    """torchtitan's override of exactly this Config, not of its subclasses (quantised, or other models')."""

    def register(factory):
        # torchtitan names an override by its factory's module. Users write the package's name.
        factory.__module__ = __package__
        return override(target=target, exact=True, description=description)(factory)

    return register


@_override(GroupedExperts.Config, "fused_moe: grouped SwiGLU of the routed experts")
def fused_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """Only the experts, behind torchtitan's dispatch and combine."""
    return derive(cfg, FusedGroupedExperts.Config)


@_override(RoutedExperts.Config, "fused_moe: dispatch, experts and combine")
def fused_routed_experts(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """Experts, dispatch and combine, except the exchange between ranks. Other experts are not replaced."""
    if type(cfg.inner_experts) is not GroupedExperts.Config:
        return cfg
    dispatcher = cfg.token_dispatcher
    if HAS_DISPATCHER_PARTS and type(dispatcher) is AllToAllTokenDispatcher.Config:
        dispatcher = derive(dispatcher, FusedTokenDispatcher.Config)
    experts = fused_experts(cfg.inner_experts)
    return derive(cfg, FusedRoutedExperts.Config, inner_experts=experts, token_dispatcher=dispatcher)


@_override(MoE.Config, "fused_moe: router, dispatch, experts and combine")
def fused_moe(cfg: MoE.Config) -> MoE.Config:
    """The routed part of the layer, router included. A router of another class is not replaced."""
    if type(cfg.routed_experts) is not RoutedExperts.Config:
        return cfg
    routed_experts = fused_routed_experts(cfg.routed_experts)
    is_stock = type(cfg.router) is TokenChoiceTopKRouter.Config and routed_experts is not cfg.routed_experts
    return derive(cfg, FusedMoE.Config if is_stock else type(cfg), routed_experts=routed_experts)


@_override(SelectiveAC.Config, "fused_moe: operators that selective checkpointing saves")
def selective_ac(cfg: SelectiveAC.Config) -> SelectiveAC.Config:
    """torchtitan's save list with our operators added."""
    return derive(cfg, FusedSelectiveAC.Config)
