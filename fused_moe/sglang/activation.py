"""SGLang's names of activations, as `fused_experts` takes them.

| MoeRunnerConfig | `activation` | `layout` |
| --- | --- | --- |
| silu, gelu, gelu_tanh | the same | halves |
| silu with a swiglu_limit | swiglu_limited | halves |
| silu with gemm1_alpha and gemm1_clamp_limit | swiglu_clamped | as gate_up_interleaved says |
| situ with a gemm1_clamp_limit | situ | halves |
| silu, gelu, relu2, not gated | the same | separate |

silu with a gemm1_clamp_limit alone, which clamps after silu, silu_rounded, and situ without a limit have no
kernel. Source: SGLang's Triton runner, sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.
"""

from __future__ import annotations

SITU_ALPHA = 4.0  # SGLang's, where a situ layer gives none


def activation_arguments(config) -> dict:
    """activation, alpha, limit and layout for a MoeRunnerConfig.

    Raises:
        NotImplementedError: nothing here computes it.
    """
    alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
    match config.activation:
        case "silu" | "gelu" | "relu2" as name if not config.is_gated:
            return {"activation": name, "layout": "separate"}
        case "silu" if config.is_gated and None not in (alpha, limit) and config.gemm1_beta in (None, 1):
            layout = "interleaved" if config.gate_up_interleaved else "halves"
            return {"activation": "swiglu_clamped", "alpha": alpha, "limit": limit, "layout": layout}
        case "situ" if config.is_gated and limit is not None:
            alpha = SITU_ALPHA if alpha is None else alpha
            return {"activation": "situ", "alpha": alpha, "limit": limit, "layout": "halves"}
        case "silu" if config.is_gated and (alpha, limit) == (None, None) and config.swiglu_limit is not None:
            return {"activation": "swiglu_limited", "limit": config.swiglu_limit, "layout": "halves"}
        case "silu" | "gelu" | "gelu_tanh" as name if config.is_gated and (alpha, limit) == (None, None):
            return {"activation": name, "layout": "halves"}
    settings = ("is_gated", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
    found = ", ".join(f"{name}={getattr(config, name)}" for name in settings)
    raise NotImplementedError(
        "--moe-runner-backend fused_moe expected an activation of fused_moe.sglang.activation, "
        f"found {config.activation} with {found}"
    )
