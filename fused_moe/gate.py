"""The router's linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .checks import DEVICES, is_autocast_enabled
from .function import router_logits

# Tensors that the operator takes: plain ones, and what stands for them while shapes or graphs are traced.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)


class Gate(nn.Linear):
    """A linear layer by `router_logits`: its logits are float32, or float64 of float64 operands.

    What that does not take is F.linear's, with its results and errors: DTensors and other subclasses of
    Tensor (quantised weights, say), operands of several dtypes or devices, and devices without kernels.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> logits (..., E)."""
        if not fit(x, self.weight, self.bias):
            return F.linear(x, self.weight, self.bias)
        logits = router_logits(x.reshape(-1, x.size(-1)), self.weight, self.bias)
        return logits.view(*x.shape[:-1], logits.size(1))


def fit(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether our operators take x and these parameters of a linear layer."""
    if type(x) not in PLAIN or x.device.type not in DEVICES:
        return False
    casts = x.dtype != torch.float64 and is_autocast_enabled(x)
    return all(
        p is None
        or type(p) in PLAIN
        and p.device == x.device
        and (p.dtype == x.dtype or (casts and p.dtype != torch.float64))
        for p in parameters
    )
