"""fused_moe inside torchtitan: our kernels compute its MoE layers, everything else is unchanged.

Parameters, names, buffers, initialisation, sharding, load balancing and FLOP accounting stay torchtitan's.
So checkpoints of the stock layer load here, and the other way round. Releases 0.2.x use a model converter::

    --experimental.custom_import=fused_moe.torchtitan --model.converters=fused_moe

or --model.converters=fused_moe_fp8, which trains in FP8 the experts that gain from it (docs/fp8.md).
Later releases use overrides. All but the last exclude each other::

    --override.imports fused_moe.torchtitan.fused_moe             router, experts and combine
    --override.imports fused_moe.torchtitan.fused_routed_experts  experts and combine
    --override.imports fused_moe.torchtitan.fused_experts         the grouped GEMMs and activation only
    --override.imports fused_moe.torchtitan.fused_moe_fp8         fused_moe with FP8 training
    --override.imports fused_moe.torchtitan.fused_routed_experts_fp8
    --override.imports fused_moe.torchtitan.selective_ac          selective checkpointing saves our operators

torchtitan moves names between versions, so this package looks for features and never compares versions.
"""

from importlib.util import find_spec


def _has(name: str) -> bool:
    """Whether a module exists. find_spec imports its parent packages, which may be missing too."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


if _has("torchtitan.config.override"):
    try:
        from .overrides import (
            fused_experts,
            fused_moe,
            fused_moe_fp8,
            fused_routed_experts,
            fused_routed_experts_fp8,
            selective_ac,
        )
    except ImportError as error:
        raise ImportError(f"fused_moe.torchtitan knows torchtitan 0.3.0's names, and here {error}") from error

    __all__ = [
        "fused_experts",
        "fused_moe",
        "fused_moe_fp8",
        "fused_routed_experts",
        "fused_routed_experts_fp8",
        "selective_ac",
    ]
elif _has("torchtitan.models.moe"):
    from .converter import FusedMoEConverter, FusedMoEFp8Converter

    __all__ = ["FusedMoEConverter", "FusedMoEFp8Converter"]
else:
    raise ImportError(
        "fused_moe.torchtitan needs torchtitan with overrides (torchtitan.config.override, as in 0.3.0) "
        "or with the MoE layer of its releases 0.2.x (torchtitan.models.moe), and finds neither"
    )
