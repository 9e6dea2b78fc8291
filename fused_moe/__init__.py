"""fused_moe: Mixture-of-Experts layers for PyTorch as a few fused kernels, forward and backward.

`FusedMoE` is the module, the functions below are its parts, `reference` is the same in plain PyTorch,
and `info()` tells which tiers run.
"""

from . import oldest as oldest  # isort: skip
from . import flops as flops  # for FlopCounterMode
from . import reference
from .adapters import add_lora, load_lora_state_dict, lora_state_dict, merge_lora, remove_lora, set_lora
from .balance import ModelLoadReport, balance, load_report
from .clipping import clip_grad_norm_
from .fp8 import Fp8Weights, fp8_weights
from .fp8_shares import Fp8Shares, fp8_shares
from .fp8_training import enable_fp8
from .function import (
    fused_experts,
    grouped_mlp,
    grouped_mm,
    linear,
    permute,
    plan_from_counts,
    route,
    route_plan,
    router_logits,
    unpermute,
)
from .info import info
from .lora import LoRA
from .losses import load_balancing_loss, router_z_loss
from .module import FusedMoE, LoadReport, RouterLosses
from .paths import path
from .plan import Plan
from .quantized import QuantizedWeight, quantize, refresh_weights, smooth_from
from .replay import Routes, record_routing, replay_routing
from .upcycling import upcycle
from .version import __version__ as __version__

__all__ = [
    "Fp8Shares",
    "Fp8Weights",
    "FusedMoE",
    "LoRA",
    "LoadReport",
    "ModelLoadReport",
    "Plan",
    "QuantizedWeight",
    "RouterLosses",
    "Routes",
    "add_lora",
    "balance",
    "clip_grad_norm_",
    "enable_fp8",
    "fp8_shares",
    "fp8_weights",
    "fused_experts",
    "grouped_mlp",
    "grouped_mm",
    "info",
    "linear",
    "load_balancing_loss",
    "load_lora_state_dict",
    "load_report",
    "lora_state_dict",
    "merge_lora",
    "path",
    "permute",
    "plan_from_counts",
    "quantize",
    "record_routing",
    "reference",
    "refresh_weights",
    "remove_lora",
    "replay_routing",
    "route",
    "route_plan",
    "router_logits",
    "router_z_loss",
    "set_lora",
    "smooth_from",
    "unpermute",
    "upcycle",
]
