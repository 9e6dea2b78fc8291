"""Which layers of other projects train in FP8: what the adapters of torchtitan and transformers share."""

from __future__ import annotations

from .fp8 import GAINS, layer_pays
from .ops import BLOCK


def why_not(
    D: int, F: int, E: int, top_k: int, *, has_bias: bool = False, score_on: str = "output"
) -> str | None:
    """Why experts of these sizes keep 16 bits where their model asks for FP8; None: they train in FP8. Only a
    layer's settings decide, never the number of tokens."""
    if has_bias:
        return "they have biases"
    if score_on != "output":
        return "their input is multiplied by the scores"
    sizes = f"found D={D}, F={F}, E={E}, K={top_k}"
    if D % BLOCK or F % BLOCK:
        return f"FP8 expected D and F that are multiples of {BLOCK}, {sizes}"
    if not layer_pays(D, F, E, top_k):
        return f"FP8 pays with {GAINS}, {sizes}"
    return None
