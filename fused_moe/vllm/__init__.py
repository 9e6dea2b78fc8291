"""fused_moe in vLLM: its Mixture-of-Experts layers on these kernels.

vLLM finds `register` by the entry point group `vllm.general_plugins`: where both packages are installed
nothing else has to be done. FUSED_MOE_VLLM=0 switches it off; FUSED_MOE_VLLM=unquantized,int4 leaves it on
for the named ones of PARTS alone. FUSED_MOE_VLLM_COMPUTE names the MODES in which activations are quantised
where the checkpoint asks for it, by default both; with "codes" they stay in 16 bits. vLLM keeps its router,
its shared experts, its exchange of tokens between ranks and its weights; only the routed experts of a rank
are computed here. Layers that are not supported keep vLLM's experts. One line of vLLM's log says for each
model how many layers run here, and why the others do not.
"""

from __future__ import annotations

import importlib
import logging
import os

__all__ = ["register"]

# Modules with a `register`, each of which may fail on its own. FUSED_MOE_VLLM may name some.
PARTS = ("unquantized", "fp8", "int8", "int4", "mxfp4")
# `compute` of weights of 8 bits, whose checkpoints ask for it. FUSED_MOE_VLLM_COMPUTE may name some.
MODES = ("fp8", "int8")

logger = logging.getLogger("vllm.fused_moe")  # vLLM shows only loggers below "vllm"


def register() -> None:
    """Makes vLLM take these kernels for the MoE layers that it builds from now on.

    Calling it again does no harm. A vLLM whose interface differs is left as it is, and a warning says why.
    Source: vLLM's plugin system, 0.33.0.

    Raises:
        ImportError: there is no vLLM.

    Example:
        Needs vLLM, which calls it: an engine that starts takes these kernels.

        >>> import vllm  # doctest: +SKIP
        >>> llm = vllm.LLM("Qwen/Qwen3-30B-A3B")  # doctest: +SKIP
    """
    try:
        parts = _named("FUSED_MOE_VLLM", "1", {"0": (), "1": PARTS}, PARTS)
        modes_named()
    except ValueError as error:
        logger.warning("vLLM's own experts are used: %s", error)
        return
    try:
        from vllm import __version__
    except ImportError as error:
        raise ImportError(f"fused_moe.vllm needs vLLM: pip install vllm ({error})") from error
    failed: dict[str, list[str]] = {}
    for part in parts:
        try:
            importlib.import_module(f".{part}", __name__).register()
        except Exception as error:  # an engine without us is better than none
            failed.setdefault(f"{type(error).__name__}: {error}", []).append(part)
    for message, names in failed.items():
        logger.warning(
            "fused_moe does not fit vLLM %s, whose own experts are used (%s layers): %s",
            __version__, ", ".join(names), message,
        )  # fmt: skip


def modes_named() -> tuple[str, ...]:
    """The MODES that FUSED_MOE_VLLM_COMPUTE names. ValueError where it names others."""
    return _named("FUSED_MOE_VLLM_COMPUTE", ",".join(MODES), {"codes": ()}, MODES)


def _named(
    variable: str, default: str, words: dict[str, tuple[str, ...]], names: tuple[str, ...]
) -> tuple[str, ...]:
    """What an environment variable says: one of `words`, or some of `names` with commas between."""
    value = os.environ.get(variable, default)
    found = words.get(value, tuple(value.split(",")))
    if unknown := set(found) - {*names}:
        expected, found_words = ", ".join((*words, *names)), ", ".join(map(repr, sorted(unknown)))
        raise ValueError(f"{variable} expected {expected}, found {found_words}")
    return found
