"""vLLM's names of activations, as `fused_experts` takes them.

| MoEActivation | `activation` | `layout` |
| --- | --- | --- |
| silu, gelu, gelu_tanh | the same | halves |
| silu with a limit | swiglu_limited | halves |
| swigluoai, by the layer's constants | swiglu_clamped | interleaved |
| swigluoai_uninterleave, beta 1 | swiglu_clamped | halves |
| swigluoai_uninterleave, alpha 1, beta 0 | swiglu_limited | halves |
| situ with constants > 0 | situ | halves |
| silu_no_mul, gelu_no_mul, gelu_tanh_no_mul, relu2_no_mul | silu, gelu, gelu_tanh, relu2 | separate |

swiglustep, which clamps after silu, situ without such constants and gated relu2 have no kernel. vLLM's
own operator for swigluoai has gpt-oss's constants, alpha 1.702 and limit 7, whatever is configured for the
layer; here they are defaults.
Source: `apply_moe_activation` in vllm.model_executor.layers.fused_moe.activation.
"""

from __future__ import annotations

from fused_moe.function import ALPHA, LIMIT


def activation_arguments(activation, moe_config, quant_config=None) -> dict:
    """activation, alpha, limit and layout for a MoEActivation with the constants of vLLM's configurations.

    Raises:
        NotImplementedError: nothing here computes it.
    """

    def constant(of_quantization: str, of_layer: str, default: float | None = None) -> float | None:
        values = getattr(quant_config, of_quantization, None), getattr(moe_config, of_layer), default
        return next((value for value in values if value is not None), None)

    limit = constant("gemm1_clamp_limit", "swiglu_limit")
    match activation.value:
        case "silu_no_mul" | "gelu_no_mul" | "gelu_tanh_no_mul" | "relu2_no_mul" as name:
            return {"activation": name.removesuffix("_no_mul"), "layout": "separate"}
        case "silu" if limit is not None:
            return {"activation": "swiglu_limited", "limit": limit, "layout": "halves"}
        case "silu" | "gelu" | "gelu_tanh" as name:
            return {"activation": name, "layout": "halves"}
        case "swigluoai":
            alpha, limit = constant("gemm1_alpha", "swiglu_alpha", ALPHA), LIMIT if limit is None else limit
            return {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit, "layout": "interleaved"}
        case "swigluoai_uninterleave" if limit is not None:
            alpha = constant("gemm1_alpha", "swiglu_alpha", 1.0)
            beta = constant("gemm1_beta", "swiglu_beta", 0.0)
            if beta == 1:
                return {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit, "layout": "halves"}
            if (alpha, beta) == (1, 0):
                return {"activation": "swiglu_limited", "limit": limit, "layout": "halves"}
            raise NotImplementedError(f"activation {activation.value} with alpha {alpha} and beta {beta}")
        case "situ":
            alpha, limit = moe_config.activation_situ_beta, moe_config.activation_situ_linear_beta
            if alpha is not None and limit is not None and alpha > 0 and limit > 0:  # or it is unset
                return {"activation": "situ", "alpha": alpha, "limit": limit, "layout": "halves"}
    raise NotImplementedError(f"activation {activation.value}")
