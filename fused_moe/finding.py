"""Finds the FusedMoE layers in a module, and their experts, for what changes or reads a model's layers.

Their classes derive from those of this file, so that it imports neither, and they may import what finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from .checks import fail

if TYPE_CHECKING:
    from torch import Tensor

    from .module import Experts, FusedMoE, Router, SharedExperts

Module = TypeVar("Module", bound=nn.Module)  # what a function changes and returns


class MoELayer(nn.Module):
    """A FusedMoE."""

    if TYPE_CHECKING:
        dim: int
        num_experts: int
        top_k: int
        router: Router
        experts: Experts
        shared_experts: SharedExperts | None
        shared_expert_gate: nn.Linear | None
        latent_down: nn.Linear | None
        latent_up: nn.Linear | None
        expert_bias: Tensor | None
        tokens_per_expert: Tensor


class RoutedExperts(nn.Module):
    """The experts of a FusedMoE."""


def layers_in(fn: str, module: nn.Module, name: str | None = None) -> dict[str, FusedMoE]:
    """Every FusedMoE in a module, which has to have some, by their names in it, a layer in several places
    once. `name` is the module's in messages."""
    return _named(fn, module, MoELayer, "" if name is None else f"{name} to be ")


def experts_in(fn: str, module: nn.Module) -> dict[str, Experts]:
    """The experts of every FusedMoE in a module, which has to have some, by their names in it."""
    return _named(fn, module, RoutedExperts)


def _named(fn: str, module: nn.Module, kind: type, what: str = "") -> dict:
    expected = f"{what}a module with a FusedMoE in it"
    if not isinstance(module, nn.Module):
        fail(TypeError, fn, expected, type(module).__name__)
    found = {name: m for name, m in module.named_modules() if isinstance(m, kind)}
    if not found:
        fail(ValueError, fn, expected, type(module).__name__)
    return found
