"""How many codes of FP8 training are zero or at the format's limit: `fp8_shares`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .fp8 import peak_scale
from .ops import WGRADS

if TYPE_CHECKING:
    from .fp8 import Fp8Weights
    from .plan import Plan

LARGEST, NAN = 0x7E, 0x7F  # codes of e4m3 without their sign

_current: Fp8Shares | None = None


class Fp8Shares:
    """The shares of codes that are zero or saturated, in the calls within `fp8_shares`; `print` shows a
    table.

    Attributes:
        counts: {name: (4,) int64 on the calls' device: codes, and of them those that are zero, at the limit
            and NaN}. Names are x, w1 (with w3's rows), w2, a, and after backward dout, dh and, where weight
            gradients are FP8, dh by columns.

    Example:
        >>> shares = fused_moe.Fp8Shares()
        >>> shares.add("x", torch.tensor([0, 1, 2, 0x7E], dtype=torch.uint8))
        >>> shares.zero("x"), shares.saturated("x")
        (0.25, 0.25)
    """

    def __init__(self):
        self.counts: dict[str, Tensor] = {}

    def zero(self, name: str) -> float:
        """Returns the share of codes that are zero, those of values that are zero among them."""
        return self._share(name, 1)

    def saturated(self, name: str) -> float:
        """Returns the share of codes at 448: at least one per scale, since a scale is the largest / 448."""
        return self._share(name, 2)

    def _share(self, name: str, which: int) -> float:
        codes, *found = self.counts[name].tolist()
        return found[which - 1] / max(codes, 1)

    def __str__(self) -> str:
        if not self.counts:
            return "fp8_shares: no call of FP8 training"
        lines = [f"{'':>14} {'codes':>12} {'zero':>8} {'at 448':>8} {'NaN':>8}"]
        for name, counts in self.counts.items():
            codes, *found = counts.tolist()
            shares = " ".join(f"{n / max(codes, 1):8.3%}" for n in found)
            lines.append(f"{name:>14} {codes:12d} {shares}")
        return "\n".join(lines)

    @torch.no_grad()
    def add(self, name: str, codes: Tensor, num_rows: Tensor | None = None) -> None:
        """Counts codes, uint8; of a matrix with num_rows () its first rows, since others hold anything."""
        magnitude = codes & 0x7F
        found = torch.stack([magnitude == code for code in (0, LARGEST, NAN)])
        counted = torch.ones_like(magnitude, dtype=torch.bool)
        if num_rows is not None:
            counted &= (torch.arange(codes.size(0), device=codes.device) < num_rows)[:, None]
        total = torch.cat([counted.sum().reshape(1), (found & counted).flatten(1).sum(1)])
        self.counts[name] = self.counts[name] + total if name in self.counts else total

    def add_call(
        self,
        x: Tensor,
        fp8: Fp8Weights,
        made: tuple,
        link_t: Tensor | None,
        plan: Plan,
        y: Tensor,
        wgrad: int,
    ) -> None:
        """Counts those of a call's forward pass, and has its backward pass count its own.

        `made` and link_t are results of fp8_up and fp8_up_weights, whose gradients are dh's codes.
        """
        link, _, _, a, *_ = made
        num_rows = plan.offsets[-1]
        self.add("x", codes_of_rows(x.detach()))
        for name, codes in (("w1", fp8.up[0]), ("w2", fp8.down[0])):
            self.add(name, codes)
        self.add("a", a, num_rows)
        if y.requires_grad:
            y.register_hook(lambda dout: self.add("dout", codes_of_rows(dout)))
        if link.requires_grad:
            link.register_hook(lambda dh: self.add("dh", dh.view(torch.uint8), num_rows))
        if link_t is not None and link_t.requires_grad and wgrad == WGRADS["fp8"]:
            link_t.register_hook(lambda dh_t: self.add("dh by columns", dh_t.view(torch.uint8)))


@torch.no_grad()
def codes_of_rows(x: Tensor) -> Tensor:
    """The codes (T, D) of values (T, D) with one scale for a row (csrc/eight_bit.h)."""
    values = x.float()
    scale = peak_scale(values.abs().amax(1, keepdim=True))
    return (values * (1 / scale)).to(torch.float8_e4m3fn).view(torch.uint8)


@contextmanager
def fp8_shares() -> Iterator[Fp8Shares]:
    """Counts zero and saturated codes in the calls within it that train in FP8, and in their backward passes.

    Backward passes are counted whenever they run. Counting takes about as long as the calls themselves;
    nothing waits for the GPU until a share is read. A forward pass that checkpointing runs again counts
    twice, compiled calls not at all.

    Yields:
        Fp8Shares, which grow with each call.

    Example:
        >>> moe = fused_moe.FusedMoE(128, 768, num_experts=2, top_k=1, fp8=True)
        >>> with fused_moe.fp8_shares() as shares:
        ...     moe(torch.randn(4, 128, requires_grad=True)).sum().backward()
        >>> sorted(shares.counts)
        ['a', 'dh', 'dout', 'w1', 'w2', 'x']
    """
    global _current
    before, _current = _current, Fp8Shares()
    try:
        yield _current
    finally:
        _current = before


def current() -> Fp8Shares | None:
    """What counts the call that is running."""
    return None if torch.compiler.is_compiling() else _current
