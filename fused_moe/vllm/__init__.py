"""fused_moe in vLLM: its Mixture-of-Experts layers on these kernels.

vLLM finds `register` by the entry point group `vllm.general_plugins`: where both packages are installed
nothing else has to be done. FUSED_MOE_VLLM=0 switches it off; FUSED_MOE_VLLM=unquantized,int4 leaves it on
for the named ones of PARTS alone. vLLM keeps its router, its shared experts, its exchange of tokens between
ranks and its weights; only the routed experts of a rank are computed here. Layers that are not supported
keep vLLM's experts. One line of vLLM's log says for each model how many layers run here, and why the others
do not.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["register"]

# Modules with a `register`, each of which may fail on its own. FUSED_MOE_VLLM may name some.
PARTS = ("unquantized", "fp8_block", "int4", "mxfp4")


def register() -> None:
    """Makes vLLM take these kernels for the MoE layers that it builds from now on.

    Calling it again does no harm. It never raises: a vLLM whose interface differs is left as it is, and a
    warning says why. Source: vLLM's plugin system, 0.33.0.
    """
    chosen = os.environ.get("FUSED_MOE_VLLM", "1")
    if chosen == "0":
        return
    from vllm import __version__
    from vllm.logger import init_logger

    failed: dict[str, list[str]] = {}
    for part in PARTS if chosen == "1" else chosen.split(","):
        try:
            if part not in PARTS:
                raise ValueError(f"FUSED_MOE_VLLM expected to name {', '.join(PARTS)}, found {part!r}")
            importlib.import_module(f".{part}", __name__).register()
        except Exception as error:  # an engine without us is better than none
            failed.setdefault(f"{type(error).__name__}: {error}", []).append(part)
    for error, parts in failed.items():
        init_logger("vllm.fused_moe").warning(
            "fused_moe does not fit vLLM %s, whose own experts are used (%s layers): %s",
            __version__, ", ".join(parts), error,
        )  # fmt: skip
