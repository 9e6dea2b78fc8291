"""fused_moe.vllm: layers of vLLM's factory through vLLM's runner, against the reference."""

import torch
from cases import BF16
from vllm_harness import make_layer, route, run, vllm_config  # noqa: F401

from fused_moe import reference
from fused_moe.vllm.experts import FusedMoEExperts


def test_a_layer(vllm_config):  # noqa: F811
    layer = make_layer(vllm_config)
    experts = layer.routed_experts
    assert isinstance(experts.quant_method.moe_kernel.fused_experts, FusedMoEExperts)
    x, logits = torch.randn(5, 32, dtype=BF16), torch.randn(5, 8, dtype=BF16)
    out = run(vllm_config, layer, x, logits)
    w1, w3 = experts.w13_weight.float().chunk(2, dim=1)
    scores, ids = route(x, logits, 2, True)
    expected = reference.fused_experts(x.float(), w1, experts.w2_weight.float(), w3, scores, ids)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
