"""fused_moe in SGLang: the routed experts of unquantised layers, by `--moe-runner-backend fused_moe`.

SGLang finds `register` by the entry point group `sglang.srt.plugins`: where both packages are installed
nothing else has to be done. Without the flag SGLang is as it was. SGLang keeps its router, its exchange of
tokens between ranks and its weights. Layers that cannot run here raise while the model is built: the flag
asked for these kernels. Written against the source of SGLang 0.5.23 and tested with stubs of its interface;
no SGLang engine was run.
"""

from __future__ import annotations

import importlib
import logging

__all__ = ["NAME", "register"]

NAME = "fused_moe"

logger = logging.getLogger("sglang.srt.fused_moe")


def register() -> None:
    """Adds "fused_moe" to the choices of `--moe-runner-backend`.

    Calling it again does no harm. An SGLang whose interface differs is left as it is, and a warning says why.
    Source: SGLang's plugin system, 0.5.23.

    Raises:
        ImportError: there is no SGLang.
    """
    try:
        from sglang.version import __version__
    except ImportError as error:
        raise ImportError(f"fused_moe.sglang needs SGLang: pip install sglang ({error})") from error
    try:
        importlib.import_module(".runner", __name__).register()
    except Exception as error:  # an engine without us is better than none
        logger.warning(
            "fused_moe does not fit SGLang %s, so --moe-runner-backend %s is not offered: %s: %s",
            __version__, NAME, type(error).__name__, error,
        )  # fmt: skip
