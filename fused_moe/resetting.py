"""Initialises parameters again, also those that pruning and parametrisations keep under another name."""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from .checks import fail


class Resettable(Protocol):
    """A module that initialises its parameters again."""

    def reset_parameters(self) -> None: ...


@torch.no_grad()
def reset_uniform(module: nn.Module, name: str, bound: float) -> None:
    """Fills a parameter uniformly in +-bound; does nothing if the module has no parameter for the name.

    A pruned one keeps its mask. A parametrised one becomes such values by right_inverse; without that, what
    is parametrised gets them, as if it were the parameter.
    """
    own = module._parameters
    if parametrize.is_parametrized(module, name):
        of_module = cast(nn.ModuleDict, module.parametrizations)
        steps = cast(parametrize.ParametrizationList, of_module[name])
        if all(hasattr(step, "right_inverse") for step in steps):
            setattr(module, name, nn.init.uniform_(torch.empty_like(getattr(module, name)), -bound, bound))
        else:
            nn.init.uniform_(steps.original, -bound, bound)
    elif (parameter := own.get(name, own.get(f"{name}_orig"))) is not None:
        nn.init.uniform_(parameter, -bound, bound)
    elif parts := [part for part in own if part.startswith(f"{name}_")]:  # of torch.nn.utils.weight_norm, say
        kinds = f"{name} to be a parameter, pruned, or parametrised by torch.nn.utils.parametrize"
        fail(TypeError, "reset_parameters", kinds, " and ".join(parts))


def reset(module: nn.Module) -> None:
    """As module.reset_parameters(). That of nn.Linear leaves pruned and parametrised weights as they are."""
    if not isinstance(module, nn.Linear) or {"weight", "bias"} <= module._parameters.keys():
        cast(Resettable, module).reset_parameters()
        return
    for name in ("weight", "bias"):
        reset_uniform(module, name, 1 / math.sqrt(module.in_features))
