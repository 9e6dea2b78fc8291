"""torchtitan 0.3.0 and later: overrides that replace Config nodes before the model is built.

Each class derives from the one that it replaces and has the same parameters, so it inherits initialisation,
sharding and state dicts. torchtitan's sharding relies on the names of forward's arguments, which differ
between versions: `_like` gives each forward torchtitan's signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.config import Configurable, derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.spmd_types import current_spmd_mesh, maybe_set_sparse_mesh, spmd_mesh_size
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module

from ..expert_bias import KeepsExpertBias
from ..fp8_layers import why_not
from ..fp8_training import Fp8Training, TrainsFp8
from ..ops import SCORE_FUNCS, reshaped, route_plan
from .layer import (
    SAVED_OPS,
    Exchanged,
    Routing,
    changes_nothing,
    check_no_tape,
    choose,
    combine,
    find_layers,
    float32_logits,
    gpt_oss,
    mesh_size,
    routed_rows,
    run_experts,
    swiglu,
    warn,
    warn_of_16_bits,
)

# --- modules ------------------------------------------------------------------------------------------


def _like(forward: Callable) -> Any:
    """functools.wraps as Any: type checkers do not take its result for a method."""
    return wraps(forward)


def _of_this_rank(counts: Tensor | Exchanged) -> Tensor | Exchanged:
    """To the type checker a rank's counts are parts of a sum, which no operation may read, unless an exchange
    came before the experts."""
    if isinstance(counts, Tensor) and spmd.is_type_checking() and spmd_mesh_size("ep") == 1:
        counts = counts.clone()
        for axis in ("dp", "cp"):
            spmd.mutate_type(counts, axis, src=spmd.P, dst=spmd.V)
    return counts


class FusedGroupedExperts(TrainsFp8, GroupedExperts):
    """The experts behind any dispatcher; with a routing or Exchanged, on tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        fp8: bool = False

    if TYPE_CHECKING:
        w1_EFD: Tensor
        w2_EDF: Tensor
        w3_EFD: Tensor

    def __init__(self, config: Config):
        super().__init__(config)
        if config.fp8:
            self.fp8 = Fp8Training()

    @_like(GroupedExperts.forward)
    def forward(self, x: Tensor, counts: Tensor | Exchanged, routing: Routing | None = None) -> Tensor:
        experts = swiglu(self.w1_EFD, self.w2_EDF, self.w3_EFD)
        dtype = torch.bfloat16  # the stock layer's
        return run_experts(x, experts, _of_this_rank(counts), routing, dtype=dtype, fp8=self.fp8)


class FusedGptOssGroupedExperts(GptOssGroupedExperts):
    """gpt-oss's likewise."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    @_like(GptOssGroupedExperts.forward)
    def forward(self, x: Tensor, counts: Tensor | Exchanged, routing: Routing | None = None) -> Tensor:
        parameters = (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        # Under SPMD types parameters are no DTensors, and the mesh is that of the region.
        tp = max(mesh_size(self.mlp1_weight_EGD, "tp"), spmd_mesh_size("tp"))
        experts = gpt_oss(*parameters, self.swiglu_limit, tp)
        return run_experts(x, experts, _of_this_rank(counts), routing, dtype=torch.bfloat16)


class FusedTokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's exchange between ranks, with our permute before it and our weighted sum after it.

    On a single rank it is torchtitan's dispatcher unchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _local_reorder(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple:
        if self.ep_mesh is None:
            return super()._local_reorder(x, scores, ids)
        routing = Routing(scores, ids, route_plan(ids, self.num_experts))
        return routed_rows(x, routing), routing, scores  # dispatch passes the last two on to combine

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        routing = metadata.token_indices_experts_sorted_N
        if not isinstance(routing, Routing):
            return super().combine(rows, metadata, x)
        splits = metadata.input_splits, metadata.output_splits
        with maybe_set_sparse_mesh():
            mesh = current_spmd_mesh()  # None: another backend than spmd_types
            group = self.ep_mesh.get_group() if mesh is None else mesh.get_group("ep")
            rows = self._unpermute(rows, metadata.input_shape, metadata.permuted_indices)
            rows = self._combine_token_exchange(rows, group, *splits)
        if mesh is not None and spmd.is_type_checking():
            rows = spmd.reinterpret_mesh(rows, spmd.current_mesh())
        return combine(rows, routing)


# The methods that FusedTokenDispatcher relies on. In a release without them the dispatcher is not replaced.
DISPATCHER_PARTS = ("_local_reorder", "_unpermute", "_combine_token_exchange")
HAS_DISPATCHER_PARTS = all(hasattr(AllToAllTokenDispatcher, name) for name in DISPATCHER_PARTS)


class FusedRoutedExperts(RoutedExperts):
    """Our kernels compute everything from scores and ids to combined tokens, if all experts are local or the
    tokens are Exchanged."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    @_like(RoutedExperts.forward)
    def forward(
        self,
        x: Tensor,
        scores: Tensor,
        ids: Tensor,
        counts: Tensor,
        routing: Routing | Exchanged | None = None,
    ) -> Tensor:
        if isinstance(routing, Exchanged):
            with spmd.no_typecheck():  # which has no rule for our exchange
                return reshaped(self.inner_experts(x.flatten(0, -2), routing), x.shape)
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


def _exchange_mesh(experts: Any) -> DeviceMesh | None:
    """The mesh of the ranks with which a layer exchanges tokens itself; None: with none, or torchtitan's
    dispatcher exchanges rows. A checkpoint's wrapper around experts would not see what Exchanged has."""
    if torch.compiler.is_compiling() or torch.compiler._is_non_strict_tracing():
        return None
    if not isinstance(experts, FusedRoutedExperts) or spmd_mesh_size("tp") > 1:
        return None
    is_ours = isinstance(experts.inner_experts, (FusedGroupedExperts, FusedGptOssGroupedExperts))
    dispatcher = experts.token_dispatcher
    return dispatcher.ep_mesh if is_ours and type(dispatcher) is FusedTokenDispatcher else None


class FusedMoE(KeepsExpertBias, MoE):
    """Our kernels compute the whole routed path, and exchange tokens with the ranks of `_exchange_mesh`."""

    bias_name = "expert_bias_E"

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    if TYPE_CHECKING:
        router: Any
        routed_experts: Any
        shared_experts: Any
        expert_bias_E: Tensor | None
        tokens_per_expert_E: Tensor

    @_like(MoE.forward)
    def forward(self, x: Tensor) -> Tensor:
        if self.router._debug_force_load_balance or isinstance(x, DTensor):
            check_no_tape(self)
            return super().forward(x)
        logits = float32_logits(self.router.gate, x)
        # The gate's sharding may leave a part of x.
        per_token = (*logits.shape[:-1], self.router.top_k)
        with spmd.no_typecheck():  # which has no rule for our operator
            routing = choose(self, logits.flatten(0, -2), self.expert_bias_E)
            scores, ids = routing.scores.view(per_token), routing.ids.view(per_token)
            plan, _ = routing.rows
            counts = plan.counts
            if self.training:
                with torch.no_grad():
                    self.tokens_per_expert_E.add_(counts)
            mesh = _exchange_mesh(self.routed_experts)
            if mesh is None and not self.routed_experts.is_local:
                ids, counts = ids.long(), counts.long()  # as dispatchers have them from torchtitan's router
        has_types = spmd.is_type_checking()
        if has_types:
            for value, like in ((scores, logits), (ids, logits), (counts, self.tokens_per_expert_E)):
                spmd.assert_type_like(value, like)
        if mesh is not None:
            shared = None if self.shared_experts is None else lambda: self.shared_experts(x).flatten(0, -2)
            return self.routed_experts(x, scores, ids, counts, routing=Exchanged(routing, mesh, shared))
        # A plan has no types.
        out = self.routed_experts(x, scores, ids, counts, routing=None if has_types else routing)
        return out if self.shared_experts is None else out + self.shared_experts(x)


find_layers(FusedMoE, MoE)


class FusedSelectiveAC(SelectiveAC):
    """Selective checkpointing that also saves our operators that are expensive to recompute."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | SAVED_OPS


# --- what is replaced -----------------------------------------------------------------------------------

# torchtitan's classes of experts, with the parameters and the settings that ours know.
SWIGLU = ({"w1_EFD", "w2_EDF", "w3_EFD"}, {"dim", "hidden_dim", "num_experts"})
GPT_OSS = (
    {"mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"},
    {"dim", "hidden_dim", "num_experts", "swiglu_limit"},
)
EXPERTS = {
    GroupedExperts.Config: (FusedGroupedExperts.Config, *SWIGLU),
    GptOssGroupedExperts.Config: (FusedGptOssGroupedExperts.Config, *GPT_OSS),
}
# The settings of torchtitan's other parts that ours know.
ROUTED_EXPERTS = {"inner_experts", "token_dispatcher"}
MOE = {"num_experts", "routed_experts", "router", "load_balance_coeff", "shared_experts"}
ROUTER = {"num_experts", "gate", "top_k", "score_func", "route_norm", "route_scale"}
ROUTER |= {"num_expert_groups", "num_limited_groups", "_debug_force_load_balance"}


def _unknown_settings(cfg: Configurable.Config, known: set[str]) -> str | None:
    """Why a part of torchtitan with settings that ours does not know, and that are not off, stays its own."""
    known = known | {field.name for field in fields(Module.Config)}
    unknown = [
        f.name for f in fields(cfg) if f.name not in known and getattr(cfg, f.name) not in (None, False)
    ]
    return f"{_name(cfg)} has {', '.join(unknown)}" if unknown else None


def _name(cfg: Configurable.Config) -> str:
    """The name of the class that is built from it."""
    return type(cfg)._owner.__name__


def _whose_experts(cfg: GroupedExperts.Config) -> str | None:
    """Why these experts stay torchtitan's; None: ours compute the same."""
    if type(cfg) not in EXPERTS:
        return f"{_name(cfg)} is a class of its own"
    _, parameters, settings = EXPERTS[type(cfg)]
    with torch.device("meta"):
        found = {name for name, _ in cfg.build().named_parameters()}
    if found != parameters:
        return f"{_name(cfg)} has the parameters {', '.join(sorted(found))}"
    return _unknown_settings(cfg, settings)


def _whose_routed_experts(cfg: RoutedExperts.Config) -> str | None:
    if not changes_nothing(type(cfg)._owner, RoutedExperts):
        return f"{_name(cfg)} is a class of its own"
    return _whose_experts(cfg.inner_experts) or _unknown_settings(cfg, ROUTED_EXPERTS)


def _whose_layer(cfg: MoE.Config) -> str | None:
    """Why the router and the layer around it stay torchtitan's, whose experts may be ours."""
    router = cfg.router
    if not changes_nothing(type(cfg)._owner, MoE):
        return f"{_name(cfg)} is a class of its own"
    if len(signature(MoE.forward).parameters) != 2:
        return "MoE.forward takes more than x"
    if type(router) is not TokenChoiceTopKRouter.Config:
        return f"{_name(router)} is a class of its own"
    if router.score_func not in tuple(SCORE_FUNCS):
        return f"the router's score_func is {router.score_func}"
    return _unknown_settings(router, ROUTER) or _unknown_settings(cfg, MOE)


# --- overrides ----------------------------------------------------------------------------------------


def _override(target: type, description: str) -> Callable[[Callable], Any]:
    """torchtitan's override of this Config and its subclasses."""

    def register(factory: Callable) -> Any:
        # torchtitan names an override by its factory's module. Users write the package's name.
        factory.__module__ = __package__
        return override(target=target, description=description)(factory)

    return register


@_override(GroupedExperts.Config, "fused_moe: grouped GEMMs and activation of the routed experts")
def fused_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    """Replaces only the experts, behind torchtitan's dispatch and combine.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.fused_experts
    """
    if reason := _whose_experts(cfg):
        warn("the experts", reason)
        return cfg
    return derive(cfg, EXPERTS[type(cfg)][0])


@_override(RoutedExperts.Config, "fused_moe: dispatch, experts and combine")
def fused_routed_experts(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """Replaces experts, dispatch and combine, except the exchange between ranks.

    Other experts are not replaced.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.fused_routed_experts
    """
    if reason := _whose_routed_experts(cfg):
        warn("the experts", reason)
        return cfg
    dispatcher = cfg.token_dispatcher
    if HAS_DISPATCHER_PARTS and type(dispatcher) is AllToAllTokenDispatcher.Config:
        dispatcher = derive(dispatcher, FusedTokenDispatcher.Config)
    experts = fused_experts(cfg.inner_experts)
    return derive(cfg, FusedRoutedExperts.Config, inner_experts=experts, token_dispatcher=dispatcher)


@_override(MoE.Config, "fused_moe: router, dispatch, experts and combine")
def fused_moe(cfg: MoE.Config) -> MoE.Config:
    """Replaces the routed part of the layer, router included.

    A router or layer of another kind is not replaced.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.fused_moe
    """
    routed_experts = fused_routed_experts(cfg.routed_experts)
    if routed_experts is cfg.routed_experts:
        return cfg
    if reason := _whose_layer(cfg):
        warn("the router", reason)
        return derive(cfg, type(cfg), routed_experts=routed_experts)
    return derive(cfg, FusedMoE.Config, routed_experts=routed_experts)


def _in_fp8(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """The same with experts that train in FP8. Those that are not ours or do not gain stay, the latter with a
    warning."""
    experts, ours = cfg.inner_experts, tuple(config for config, *_ in EXPERTS.values())
    if not isinstance(experts, ours):
        return cfg
    sizes = (experts.dim, experts.hidden_dim, experts.num_experts, cfg.token_dispatcher.top_k)
    if reason := why_not(*sizes, has_bias=isinstance(experts, FusedGptOssGroupedExperts.Config)):
        warn_of_16_bits(reason)
        return cfg
    return derive(cfg, type(cfg), inner_experts=derive(experts, type(experts), fp8=True))


@_override(RoutedExperts.Config, "fused_moe: dispatch, experts that train in FP8, and combine")
def fused_routed_experts_fp8(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    """Does what fused_routed_experts does, with FP8 training of the experts that gain from it.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.fused_routed_experts_fp8
    """
    return _in_fp8(fused_routed_experts(cfg))


@_override(MoE.Config, "fused_moe: router, dispatch, experts that train in FP8, and combine")
def fused_moe_fp8(cfg: MoE.Config) -> MoE.Config:
    """Does what fused_moe does, with FP8 training of the experts that gain from it.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.fused_moe_fp8
    """
    layer = fused_moe(cfg)
    return layer if layer is cfg else derive(layer, type(layer), routed_experts=_in_fp8(layer.routed_experts))


@_override(SelectiveAC.Config, "fused_moe: operators that selective checkpointing saves")
def selective_ac(cfg: SelectiveAC.Config) -> SelectiveAC.Config:
    """Adds our operators to torchtitan's save list of selective checkpointing.

    Example:
        Needs torchtitan 0.3.0 or later, which takes it on its command line::

            --override.imports fused_moe.torchtitan.selective_ac
    """
    return derive(cfg, FusedSelectiveAC.Config)
