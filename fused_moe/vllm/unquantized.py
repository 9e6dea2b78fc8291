"""vLLM's method for unquantised MoE layers, with our experts where they fit."""

from __future__ import annotations

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from . import report
from .experts import FusedMoEExperts, check_interface, give_biases, why_not

NAME = UnquantizedFusedMoEMethod.__name__


class FusedMoEMethod(UnquantizedFusedMoEMethod):
    """Chooses the class of the experts and gives it biases; the rest is vLLM's."""

    def __init__(self, moe):
        super().__init__(moe)
        reason = why_not(moe)
        report.count(reason)
        if reason is None:
            self.experts_cls = FusedMoEExperts
            # The backend says how loaded weights are rearranged: Triton's are not.
            self.unquantized_backend = UnquantizedMoeBackend.TRITON

    def process_weights_after_loading(self, layer):
        report.write()
        super().process_weights_after_loading(layer)

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        if self.experts_cls is FusedMoEExperts:
            give_biases(self.moe_kernel, layer)
        return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)


def register() -> None:
    """Puts the method in the place of vLLM's. AssertionError where another plugin has done so."""
    check_interface(FusedMoEMethod)
    if op_registry_oot.get(NAME) is not FusedMoEMethod:
        CustomOp.register_oot(name=NAME)(FusedMoEMethod)
