"""torchtitan 0.2.x: a model converter that changes only the classes of the MoE layers.

A converter runs on the meta device, before parallelisation, so modules and parameters must stay the same
objects. The new classes are subclasses of torchtitan's: its compile and FSDP code checks for those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from ..expert_bias import KeepsExpertBias
from ..fp8_layers import why_not
from ..fp8_training import Fp8Training, TrainsFp8
from ..ops import reshaped
from .layer import (
    SAVED_OPS,
    Exchanged,
    Routing,
    changes_nothing,
    check_no_tape,
    choose,
    combine,
    find_layers,
    gpt_oss,
    logits_of,
    mesh_size,
    routed_rows,
    run_experts,
    swiglu,
    warn,
    warn_of_16_bits,
)

try:
    from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
except ImportError:  # before 0.2.2

    class _NoExperts(nn.Module):
        """Stands for torchtitan's. No model has a layer of this class."""

    GptOssGroupedExperts = _NoExperts


class FusedExperts(TrainsFp8):
    """Experts behind any dispatcher. EP and TP hook their forward as before.

    Attributes:
        ep_mesh: of the ranks over which `_shard_experts` has spread the experts.
    """

    ep_mesh: DeviceMesh | None = None

    if TYPE_CHECKING:
        use_grouped_mm: bool
        _experts: Callable[[], dict]

    def forward(
        self, x: Tensor, num_tokens_per_expert: Tensor | Exchanged, routing: Routing | None = None
    ) -> Tensor | tuple[Tensor]:
        """x (R, D) rows grouped by expert, or (T, D) tokens with a routing -> the same shape; with Exchanged
        in a tuple."""
        # The stock layer's for-loop computes in x's dtype, its grouped_mm in bfloat16.
        dtype = torch.bfloat16 if self.use_grouped_mm else None
        out = run_experts(x, self._experts(), num_tokens_per_expert, routing, dtype=dtype, fp8=self.fp8)
        return (out,) if isinstance(num_tokens_per_expert, Exchanged) else out


class FusedGroupedExperts(FusedExperts, GroupedExperts):
    if TYPE_CHECKING:
        w1: Tensor
        w2: Tensor
        w3: Tensor

    def _experts(self) -> dict:
        return swiglu(self.w1, self.w2, self.w3)


class FusedGptOssGroupedExperts(FusedExperts, GptOssGroupedExperts):
    if TYPE_CHECKING:
        mlp1_weight: Tensor
        mlp1_bias: Tensor
        mlp2_weight: Tensor
        mlp2_bias: Tensor
        swiglu_limit: float

    def _experts(self) -> dict:
        parameters = (self.mlp1_weight, self.mlp1_bias, self.mlp2_weight, self.mlp2_bias)
        return gpt_oss(*parameters, self.swiglu_limit, mesh_size(self.mlp1_weight, "tp"))


FUSED_EXPERTS = {GroupedExperts: FusedGroupedExperts, GptOssGroupedExperts: FusedGptOssGroupedExperts}


class FusedMoE(KeepsExpertBias, MoE):
    """Our kernels compute the routed path, except the exchange with other ranks."""

    if TYPE_CHECKING:
        router: Any
        experts: Any
        shared_experts: Any
        expert_bias: Tensor | None
        tokens_per_expert: Tensor
        score_before_experts: bool

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D) -> (B, L, D)."""
        if self.router._debug_force_load_balance or _is_sharded_over(self.router.gate.weight, "tp"):
            check_no_tape(self)
            return super().forward(x)  # tensor parallelism hooks the modules in between
        tokens = x.view(-1, x.size(-1))
        score_on = "input" if self.score_before_experts else "output"
        logits = logits_of(self.router.gate, tokens)
        routing = choose(self, logits, self.expert_bias, score_on)
        plan, _ = routing.rows
        counts = plan.counts
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        is_expert_parallel = any(_is_sharded_over(p, "ep") for p in self.experts.parameters())
        experts = self.experts  # a checkpoint's wrapper would not see what Exchanged has
        is_ours = isinstance(experts, FusedExperts) and experts.ep_mesh is not None
        if is_expert_parallel and is_ours and not torch.compiler.is_compiling():
            shared = None if self.shared_experts is None else partial(self.shared_experts, tokens)
            (out,) = experts(tokens, Exchanged(routing, experts.ep_mesh, shared))
            return reshaped(out, x.shape)
        if is_expert_parallel:
            routed = self.experts(routed_rows(tokens, routing), counts.long())
        else:
            routed = self.experts(tokens, counts, routing=routing)
        # As in the stock layer, they run while the combine's all-to-all is in flight.
        shared = self.shared_experts(tokens) if self.shared_experts is not None else None
        out = combine(routed, routing) if is_expert_parallel else routed
        return reshaped(out if shared is None else shared + out, x.shape)


find_layers(FusedMoE, MoE)


_shard = ExpertParallel._apply


def _shard_experts(style: ExpertParallel, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """torchtitan's ExpertParallel._apply, whose hooks let our experts exchange tokens themselves: each once
    for each rank, not for each expert."""
    if type(style) is not ExpertParallel or not isinstance(module, FusedExperts):
        return _shard(style, module, device_mesh)

    def dispatch(module: Any, inputs: tuple, mesh: DeviceMesh) -> Any:
        return inputs if isinstance(inputs[1], Exchanged) else style._token_dispatch(module, inputs, mesh)

    def gather(module: Any, out: Any, mesh: DeviceMesh) -> Any:
        return out if isinstance(out, tuple) else style._token_combine(module, out, mesh)

    module.ep_mesh = device_mesh
    return distribute_module(module, device_mesh, style._partition_fn, dispatch, gather)


ExpertParallel._apply = _shard_experts  # type: ignore[method-assign]


def _is_sharded_over(weight: Tensor, dim: str) -> bool:
    """Whether a weight is a DTensor on a mesh with a dimension of this name."""
    return isinstance(weight, DTensor) and dim in (weight.device_mesh.mesh_dim_names or ())


class FusedMoEConverter:
    """Converts the MoE layers of a torchtitan model: a ModelConverter, registered as "fused_moe".

    A converter with fp8, "fused_moe_fp8", also trains in FP8 the experts that gain from it, and warns of the
    others. Only the experts are fused under tensor parallelism, and where the layer (DeepEP's) or its router
    is of another class. Experts of another class stay torchtitan's, and so do weights that an earlier
    converter has quantised. A warning names the class. Selective checkpointing of every imported model saves
    our operators, too.

    Example:
        Needs torchtitan 0.2.x, which takes it on its command line::

            --experimental.custom_import=fused_moe.torchtitan --model.converters=fused_moe
    """

    fp8 = False

    def __init__(self, job_config: Any, parallel_dims: Any):
        """The protocol's arguments, which are not used."""

    def convert(self, model: nn.Module) -> None:
        """Converts the model's MoE layers in place.

        Raises:
            ValueError: if no layer can be converted.
        """
        converted, trained, layers = 0, 0, {}
        module: Any  # of torchtitan, then of ours
        for module in model.modules():
            # modules() yields a layer before its experts, which are still torchtitan's here.
            if isinstance(module, MoE):
                layers[module.experts] = module
                if reason := _whose_experts(module.experts):
                    warn("the experts", reason)
                elif reason := _whose_layer(module):
                    warn("the router", reason)
                else:
                    module.__class__ = FusedMoE
            elif _whose_experts(module) is None:
                module.__class__ = FUSED_EXPERTS[type(module)]
                converted += 1
                trained += self.fp8 and _train_in_fp8(module, layers.get(module))
        if not converted:
            raise ValueError("fused_moe: expected a model with torchtitan's GroupedExperts, found none")
        for save_list in _selective_save_lists():
            save_list.update(SAVED_OPS)
        in_fp8 = f", the experts of {trained} train in FP8" if self.fp8 else ""
        logger.info(f"fused_moe: {converted} MoE layers converted{in_fp8}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Does nothing: torchtitan's load balancing hook remains."""


class FusedMoEFp8Converter(FusedMoEConverter):
    """Does what FusedMoEConverter does, with FP8 training; registered as "fused_moe_fp8".

    Example:
        Needs torchtitan 0.2.x, which takes it on its command line::

            --experimental.custom_import=fused_moe.torchtitan --model.converters=fused_moe_fp8
    """

    fp8 = True


def _train_in_fp8(experts: FusedExperts, layer: MoE | None) -> bool:
    """Lets experts of a layer train in FP8, or warns why not."""
    E, D, F = experts._experts()["w2"].shape
    reason: str | None = "no layer says how many a token has"
    if layer is not None:
        has_bias = isinstance(experts, FusedGptOssGroupedExperts)
        score_on = "input" if layer.score_before_experts else "output"
        reason = why_not(D, F, E, layer.router.top_k, has_bias=has_bias, score_on=score_on)
    if reason:
        warn_of_16_bits(reason)
    else:
        experts.fp8 = Fp8Training()
    return reason is None


def _whose_experts(experts: nn.Module) -> str | None:
    """Why these experts stay torchtitan's; None: ours compute the same. Quantising converters change only the
    weights."""
    if type(experts) not in FUSED_EXPERTS:
        return f"{type(experts).__name__} is a class of its own"
    others = {type(p).__name__ for p in experts.parameters() if type(p) is not nn.Parameter}
    return f"its weights are {', '.join(sorted(others))}" if others else None


def _whose_layer(layer: MoE) -> str | None:
    """Why the router and the layer around it stay torchtitan's, whose experts are ours."""
    if not changes_nothing(type(layer), MoE):
        return f"{type(layer).__name__} is a class of its own"
    if type(layer.router) is not TokenChoiceTopKRouter:
        return f"{type(layer.router).__name__} is a class of its own"
    return None


def _selective_save_lists() -> list[set]:
    """The save lists of all models: each parallelize module has one, under this name."""
    modules = list(sys.modules.values())  # None: a blocked import
    lists = (getattr(module, "__dict__", {}).get("_op_sac_save_list") for module in modules)
    return [save_list for save_list in lists if isinstance(save_list, set)]


register_model_converter(FusedMoEConverter, "fused_moe")
register_model_converter(FusedMoEFp8Converter, "fused_moe_fp8")
