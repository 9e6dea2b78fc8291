"""fused_moe in SGLang: `--moe-runner-backend fused_moe` runs its unquantised MoE layers on these kernels.

SGLang finds `register` by the entry point group `sglang.srt.plugins`: where both packages are installed
nothing else has to be done. Without the flag nothing changes. With it, a layer that cannot run here raises
while the model is built: its experts were asked for, so SGLang's own never take their place unsaid. SGLang
keeps its router, its sums over ranks and its weights; only the routed experts of a rank are computed here.

The tests run SGLang's own layers, methods and runners on the CPU. No SGLang engine has been run with it.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes SGLang offer these kernels as a runner of MoE layers.

    Calling it again does no harm. A SGLang whose interface differs is left as it is, and a warning says why;
    it then refuses the flag. Source: SGLang's plugin system, 0.5.23, which applies the hooks afterwards.

    Raises:
        ImportError: there is no SGLang.

    Example:
        Needs SGLang, which calls it, and takes the kernels by its flag::

            sglang serve --model-path Qwen/Qwen3-30B-A3B --moe-runner-backend fused_moe
    """
    try:
        from sglang import __version__
    except ImportError as error:
        raise ImportError(f"fused_moe.sglang needs SGLang: pip install sglang ({error})") from error
    try:
        from . import hooks

        hooks.register()
    except Exception as error:  # an engine without us is better than none
        logger.warning(
            "fused_moe does not fit SGLang %s, which has no --moe-runner-backend fused_moe: %s: %s",
            __version__, type(error).__name__, error,
        )  # fmt: skip
