"""One line of vLLM's log for each model: the layers that run on fused_moe, and why the others do not."""

from __future__ import annotations

from collections import Counter

from . import logger

_layers: Counter[str | None] = Counter()  # since the last line: why not -> layers


def count(why_not: str | None) -> None:
    """Counts a layer that was built: None where it runs on fused_moe."""
    _layers[why_not] += 1


def write() -> None:
    """Called when weights have been loaded: all layers of the model have been built by then."""
    if not _layers:
        return
    total, taken = _layers.total(), _layers.pop(None, 0)
    reasons = "".join(f"; {n} keep vLLM's own: {why_not}" for why_not, n in _layers.items())
    logger.info("fused_moe runs the experts of %d of %d MoE layers%s", taken, total, reasons)
    _layers.clear()
