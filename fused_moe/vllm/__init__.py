"""fused_moe in vLLM: its Mixture-of-Experts layers on these kernels.

vLLM finds `register` by the entry point group `vllm.general_plugins`: where both packages are installed
nothing else has to be done, and FUSED_MOE_VLLM=0 switches it off. vLLM keeps its router, its shared
experts, its exchange of tokens between ranks and its weights; only the routed experts of a rank are
computed here. Layers that are not supported keep vLLM's experts. One line of vLLM's log says for each model
how many layers run here, and why the others do not.
"""

from __future__ import annotations

import importlib
import os

__all__ = ["register"]

PARTS = ("unquantized",)  # modules with a `register`, each of which may fail on its own


def register() -> None:
    """Makes vLLM take these kernels for the MoE layers that it builds from now on.

    Calling it again does no harm. It never raises: a vLLM whose interface differs is left as it is, and a
    warning says why. Source: vLLM's plugin system, 0.33.0.
    """
    if os.environ.get("FUSED_MOE_VLLM") == "0":
        return
    from vllm import __version__
    from vllm.logger import init_logger

    for part in PARTS:
        try:
            importlib.import_module(f".{part}", __name__).register()
        except Exception as error:  # an engine without us is better than none
            init_logger("vllm.fused_moe").warning(
                "fused_moe does not fit vLLM %s, whose own experts are used (%s layers): %s: %s",
                __version__, part, type(error).__name__, error,
            )  # fmt: skip
