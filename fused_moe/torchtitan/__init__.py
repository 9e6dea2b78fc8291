"""fused_moe inside torchtitan: its MoE layers computed by our kernels, everything else as it was.

Parameters, names, buffers, initialisation, sharding, load balancing and FLOP accounting stay the host's,
so a checkpoint written with the stock layer loads here and the other way round. Releases 0.2.x are
reached through their model converters:

    --experimental.custom_import=fused_moe.torchtitan --model.converters=fused_moe

and later ones through their overrides, of which the first three exclude each other:

    --override.imports fused_moe.torchtitan.fused_moe             router, experts and combine
    --override.imports fused_moe.torchtitan.fused_routed_experts  experts and combine
    --override.imports fused_moe.torchtitan.fused_experts         the grouped products alone
    --override.imports fused_moe.torchtitan.selective_ac          our operators in selective checkpointing

Names in torchtitan move between versions, so features are looked for and versions never compared.
"""

from importlib.util import find_spec


def _has(name: str) -> bool:
    """Whether a module is there. find_spec imports what is above it, which may be missing itself."""
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


if _has("torchtitan.config.override"):
    from .overrides import fused_experts, fused_moe, fused_routed_experts, selective_ac

    __all__ = ["fused_experts", "fused_moe", "fused_routed_experts", "selective_ac"]
elif _has("torchtitan.models.moe"):
    from .converter import FusedMoEConverter

    __all__ = ["FusedMoEConverter"]
else:
    raise ImportError(
        "fused_moe.torchtitan needs torchtitan with overrides (torchtitan.config.override, as in 0.3.0) "
        "or with the MoE layer of its releases 0.2.x (torchtitan.models.moe), and finds neither"
    )
