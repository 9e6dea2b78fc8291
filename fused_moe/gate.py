"""The router's linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .checks import DEVICES, check_on_meta, is_autocast_enabled
from .function import router_logits
from .ops import reshaped

# Tensors that the operator takes: plain ones, and what stands for them while shapes or graphs are traced.
PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)


class Gate(nn.Linear):
    """A linear layer by `router_logits`: its logits are float32, or float64 of float64 operands.

    What that does not take is F.linear's, with its results and errors: DTensors and other subclasses of
    Tensor (quantised weights, say), operands of several dtypes or devices, and devices without kernels.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> logits (..., E)."""
        weight, bias = self.weight, self.bias
        if not fit(x, weight, bias):
            logits = F.linear(x, weight, bias)
            check_on_meta("FusedMoE", x, weight, bias)
            return logits
        if x.dim() == 2:
            return router_logits(x, weight, bias)
        logits = router_logits(x.reshape(-1, x.size(-1)), weight, bias)
        return reshaped(logits, (*x.shape[:-1], logits.size(1)))


def fit(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether our operators take x and these parameters of a linear layer."""
    dtype, device = x.dtype, x.device
    if type(x) not in PLAIN or device.type not in DEVICES:
        return False
    for p in parameters:
        if p is None:
            continue
        if type(p) not in PLAIN or p.device != device:
            return False
        if p.dtype != dtype and (torch.float64 in (dtype, p.dtype) or not is_autocast_enabled(x)):
            return False
    return True
