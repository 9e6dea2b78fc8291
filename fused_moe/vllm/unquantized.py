"""vLLM's method for unquantised MoE layers, with these experts where they fit."""

from __future__ import annotations

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from . import report
from .experts import STANDARD, FusedMoEExperts, check_interface

NAME = UnquantizedFusedMoEMethod.__name__


class FusedMoEMethod(UnquantizedFusedMoEMethod):
    """Chooses the experts' class; everything else is vLLM's."""

    def __init__(self, moe):
        super().__init__(moe)
        if moe.moe_backend != "auto":
            why_not = f"--moe-backend {moe.moe_backend}"
        else:
            _, why_not = FusedMoEExperts.is_supported_config(FusedMoEExperts, moe, None, None, STANDARD)
        report.count(why_not)
        if why_not is None:
            self.experts_cls = FusedMoEExperts
            self.unquantized_backend = UnquantizedMoeBackend.TRITON  # leaves weights as they were loaded

    def process_weights_after_loading(self, layer):
        report.write()
        super().process_weights_after_loading(layer)


def register() -> None:
    """Puts the method in the place of vLLM's, unless another plugin has."""
    check_interface()
    if op_registry_oot.get(NAME) is FusedMoEMethod:
        return
    CustomOp.register_oot(name=NAME)(FusedMoEMethod)
