"""Padded tokens: those from `num_tokens` on, a number that only the device knows."""

from __future__ import annotations

import torch
from torch import Tensor


def is_real(num_tokens: Tensor, x: Tensor) -> Tensor:
    """(T,) bool: whether a row of x (T, ...) is a token's."""
    return torch.arange(x.size(0), device=x.device) < num_tokens.reshape(())


def zero_padding(x: Tensor, num_tokens: Tensor | None) -> Tensor:
    """x (T, ...) with zeros in padded rows, whose values reach neither the result nor a gradient."""
    if num_tokens is None:
        return x
    return torch.where(is_real(num_tokens, x).view(-1, *[1] * (x.dim() - 1)), x, 0)
