"""The router's linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_on_meta, is_autocast_enabled
from .function import router_logits
from .kept_dtypes import KeepsDtypes
from .ops import reshaped
from .paths import stock, why_unfit


@stock("router.gate")
class Gate(KeepsDtypes, nn.Linear):
    """A linear layer by `router_logits`: its logits are float32, or float64 of float64 operands.

    With router_dtype=torch.float32 its parameters are and stay float32, beside a 16-bit x and under autocast,
    too. What `router_logits` does not take is F.linear's, with its results and errors: DTensors and other
    subclasses of Tensor (quantised weights, say), operands of several dtypes or devices, and devices without
    kernels.
    """

    router_dtype: torch.dtype | None = None

    def __init__(self, dim, num_logits, *, bias, device=None, dtype=None, router_dtype=None):
        super().__init__(dim, num_logits, bias=bias, device=device, dtype=router_dtype or dtype)
        self.router_dtype = router_dtype

    def _kept_dtypes(self) -> dict[str, torch.dtype]:
        return {} if self.router_dtype is None else dict.fromkeys(self._parameters, self.router_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> logits (..., E)."""
        weight, bias = self.weight, self.bias
        if why_unfit(x, self):
            logits = F.linear(x, weight, bias)
            check_on_meta("FusedMoE", x, weight, bias)
            return logits
        if x.dim() == 2:
            return linear_logits(x, self)
        logits = linear_logits(x.reshape(-1, x.size(-1)), self)
        return reshaped(logits, (*x.shape[:-1], logits.size(1)))


def linear_logits(x: Tensor, linear: nn.Linear) -> Tensor:
    """`router_logits` of a linear layer. Autocast casts nothing beside parameters that keep their dtype."""
    if getattr(linear, "router_dtype", None) is None or not is_autocast_enabled(x):
        return router_logits(x, linear.weight, linear.bias)
    with torch.autocast(x.device.type, enabled=False):
        return router_logits(x, linear.weight, linear.bias)
