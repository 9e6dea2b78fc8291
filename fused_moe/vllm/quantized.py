"""Quantised MoE layers of vLLM: its methods load them, `QuantizedWeight` packs them, our experts compute.

vLLM's quantised methods are no CustomOps, and the backends that its oracles choose from are closed lists. So
the one function of vLLM that is replaced is the one in which a layer gets its method: a method whose layer
is supported becomes one of METHODS, subclasses of vLLM's. It makes parameters and loads them as vLLM's does.

`process_weights_after_loading` is the last hook at which parameters are as the checkpoint has them. There
they become what `QuantizedWeight` keeps, experts first: tiles on Hopper, but the published tensors where
activations are quantised. They stay the layer's parameters, and each call reads them from the layer. So
whatever vLLM does to parameters reaches the kernels:

- EPLB moves experts along the first dimension of all of them.
- Sleep and wake keep their addresses.
- A reload (`reload_weights`, the updates of reinforcement learning) gives the layer published parameters,
  loads them, calls the hook again and copies the result into the memory that CUDA graphs read.
- A write by a `weight_loader` into parameters that are packed raises, since it would be lost.

vLLM hands over activations of 16 bits, whatever the checkpoint's configuration says about them. In the modes
of eight_bit.py `fused_experts` quantises them; elsewhere they stay as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import replace_parameter

from ..ops import TILE
from ..quantized import QuantizedWeight, tiles
from ..quantized.formats import FORMATS
from . import report
from .experts import FusedMoEExperts, biases_of, check_arguments, check_interface, give_biases, why_not

THEIRS = RoutedExperts._get_quant_method
METHODS: dict[type, type] = {}  # vLLM's method: our subclass of it


class Packed(NamedTuple):
    """A weight without parameters, and which ones of the layer are its own."""

    weight: QuantizedWeight
    names: dict[str, str]

    def of(self, layer: RoutedExperts) -> QuantizedWeight:
        """The weight of the layer's parameters of this moment, for one call: those of a reload or of an
        offloader must not outlive it."""
        found = {own: layer._parameters[theirs] for own, theirs in self.names.items()}
        weight = object.__new__(QuantizedWeight)
        vars(weight).update(vars(self.weight), _parameters=self.weight._parameters | found)
        return weight


class QuantizedMethod:
    """What our subclasses of vLLM's methods have in common. They come before vLLM's class.

    NAMES says which of the layer's parameters, after "w13_" or "w2_", are a weight's data, scale and zero.
    """

    NAMES: dict[str, str] = {}
    moe: Any  # this and the next are those of vLLM's class
    quant_config: Any
    is_monolithic = False
    supports_eplb = True
    supports_pre_processed_weights = False  # of another process, in the layout of vLLM's kernels
    skip_forward_padding = False
    has_unpadded_output = False

    # --- what a format says ---

    def why_not(self, layer: RoutedExperts) -> str | None:
        """Why a layer of this method is not supported; None if it is."""
        raise NotImplementedError

    def read(self, published: dict[str, torch.Tensor]) -> QuantizedWeight:
        """The weight of the parameters in NAMES, as the checkpoint has them. Which tensors it has depends on
        the configuration alone, so that a reload can write into those that there are."""
        raise NotImplementedError

    # --- what vLLM calls ---

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        report.write()
        self._packed = [self._pack(layer, stem) for stem in ("w13_", "w2_")]
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_finalize = maybe_make_prepare_finalize(
            self.moe, self.moe_quant_config, layer._expert_routing_tables(), allow_new_interface=True
        )
        self.moe_kernel = mk.FusedMoEKernel(
            prepare_finalize, FusedMoEExperts(self.moe, self.moe_quant_config)
        )

    def get_fused_moe_quant_config(self, layer: RoutedExperts):
        """vLLM quantises no activations; there are only biases and the activation's constants."""
        return biased_moe_quant_config(
            *biases_of(layer),
            gemm1_alpha=layer.swiglu_alpha,
            gemm1_beta=layer.swiglu_beta,
            gemm1_clamp_limit=layer.swiglu_limit,
        )

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        w13, w2 = (packed.of(layer) for packed in self._packed)
        give_biases(self.moe_kernel, layer)
        return self.moe_kernel.apply(
            x, w13, w2, topk_weights, topk_ids, activation=layer.activation,
            global_num_experts=layer.global_num_experts, expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts, shared_experts_input=shared_experts_input,
        )  # fmt: skip

    # --- the layer's parameters ---

    def _pack(self, layer: RoutedExperts, stem: str) -> Packed:
        """Puts what a QuantizedWeight keeps in the place of the published parameters."""
        names = {part: stem + name for part, name in self.NAMES.items()}
        published = {part: layer._parameters.get(name) for part, name in names.items()}
        weight = self.read({part: p.data for part, p in published.items() if p is not None})
        kept = {part: tensor for part in names if (tensor := weight._of(part)) is not None}
        for part, name in names.items():
            if part not in kept:
                layer.register_parameter(name, None)
                continue
            is_published = _is_same(kept[part], published[part])
            replace_parameter(layer, name, kept[part].data)
            if not is_published:
                layer._parameters[name].weight_loader = _loader_that_raises(name)
        weight._parameters.update(dict.fromkeys(weight._parameters))
        own = FORMATS[weight.format].names
        return Packed(weight, {own[part]: names[part] for part in kept})


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _loader_that_raises(name: str):
    def weight_loader(*_, **__):
        raise RuntimeError(
            f"{name} is packed by fused_moe: update weights by vLLM's reload_weights, which loads published "
            "ones and packs them again, not by load_weights alone"
        )

    return weight_loader


def method_of(theirs, layer: RoutedExperts) -> tuple[object, str | None]:
    """Our method for a layer, with the state of vLLM's; or vLLM's, and why. It never raises."""
    cls = METHODS.get(type(theirs))
    if cls is None:
        return theirs, f"method {type(theirs).__name__}"
    if (reason := why_not(layer.moe_config)) is not None:
        return theirs, reason
    try:
        ours: QuantizedMethod = object.__new__(cls)
        vars(ours).update(vars(theirs), experts_cls=FusedMoEExperts)
        reason = _why_not_engine() or ours.why_not(layer)
    except Exception as error:  # an engine without us is better than none
        reason = f"{type(error).__name__}: {error}"
    return (ours, None) if reason is None else (theirs, reason)


def _why_not_engine() -> str | None:
    """What the user has asked the engine for; that a checkpoint asks for activations of fewer bits is not
    enough. Elastic experts get other methods, which hand over parameters as kernels of vLLM's read them."""
    config = get_current_vllm_config()
    if config.parallel_config.enable_elastic_ep:
        return "elastic expert parallelism of quantised weights"
    moe = getattr(getattr(config.model_config, "quantization_config", None), "moe", None)
    activation = getattr(moe, "activation", None)
    return None if activation is None else f"--quantization-config asks for activations of {activation}"


def why_not_tiles(layer: RoutedExperts, format: str) -> str | None:
    """Why a layer's weights are not kept in tiles. vLLM gives scales of integers the activations' dtype."""
    widths, dtype = widths_of(layer), layer.moe_config.in_dtype
    if any(width % TILE for width in widths):
        return f"widths {widths}, not multiples of {TILE}"
    if not tiles.have_kernels(format, dtype, dtype):
        return f"{format} weights beside activations of {dtype}"
    return None


def widths_of(layer: RoutedExperts) -> tuple[int, int]:
    """D, and this rank's F."""
    return layer.moe_config.hidden_dim, layer.moe_config.intermediate_size_per_partition


def get_quant_method(self, prefix, quant_config, moe_config):
    """In the place of RoutedExperts._get_quant_method."""
    method = THEIRS(self, prefix, quant_config, moe_config)
    if not isinstance(method, UnquantizedFusedMoEMethod):
        method, reason = method_of(method, self)
        report.count(reason)
    return method


def register(*methods: type) -> None:
    """Takes layers whose method is the second base of one of these. TypeError where vLLM's interface is
    another."""
    check_interface(QuantizedMethod)
    check_arguments("_get_quant_method", get_quant_method, THEIRS)
    METHODS.update((ours.__bases__[1], ours) for ours in methods)
    if RoutedExperts._get_quant_method is THEIRS:
        RoutedExperts._get_quant_method = get_quant_method
