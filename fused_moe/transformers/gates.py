"""What experts compute between their two GEMMs, found by calling it: `gate_of`.

A class of experts has its formula in code: `_apply_gate`, which most inherit from transformers, or `act_fn`
alone without a gate. That code is called once on fixed values, and its result and gradient are compared with
those of every activation that kernels have, in both layouts. So a class is known by what it computes.

The code is called on a stand-in for the module. That has the class, the constants that the code names,
an activation without parameters, and nothing else. So the answer depends on these alone, and they are its key
in a cache. Code that reads anything else, such as a learned scale, fails here and is not known. torch.compile
takes the key as constants, which it guards, and never sees the call.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._python_dispatch import _disable_current_modes
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from ..activation import ACTIVATIONS, CONSTANTS, activate
from ..quantized.weight import untraced

if TYPE_CHECKING:
    from .weights import ExpertsModule

# Modules whose class tells what they compute. Others are copied with their constants.
_NAMES = "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"
_PLAIN = {type(module): module for module in map(ACT2FN.__getitem__, _NAMES)}

_SIMPLE = (int, float, bool, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def gate_of(experts: ExpertsModule) -> dict | str:
    """The layout of these experts, their activation and its constants, or the name of what is not known."""
    own, experts_class, constants = vars(experts), None, []
    if "_apply_gate" in own:
        return "a gate that is set on the module"
    if experts.has_gate:
        experts_class = type(experts)
        if "parametrizations" in own["_modules"]:  # PEFT makes such a class for each call
            experts_class = type_before_parametrizations(experts)
        for name in _names(experts_class):
            value = own[name] if name in own else getattr(experts_class, name, ...)
            if type(value) in _SIMPLE:
                constants.append((name, _constant(value)))
    act_fn = own["_modules"].get("act_fn", own.get("act_fn"))
    found = _known(experts_class, tuple(constants), _recipe(act_fn))
    if isinstance(found, str):
        return found
    layout, activation, numbers = found
    # A number that torch.compile was given has no type until it is used.
    return {"layout": layout, "activation": activation, **{name: float(number) for name, number in numbers}}


# --- the key ----------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _names(experts_class: type) -> tuple[str, ...]:
    """What the code of a gate names, and that of its parents, which it may call."""
    return _names_in(tuple(vars(c)["_apply_gate"] for c in experts_class.__mro__ if "_apply_gate" in vars(c)))


@torch.compiler.assume_constant_result
def _names_of_module(module_class: type) -> tuple[str, ...]:
    """What the code of a class and of its parents names, up to nn.Module."""
    classes = module_class.__mro__[: module_class.__mro__.index(nn.Module)]
    return _names_in(tuple(f for c in classes for f in vars(c).values() if isinstance(f, _FUNCTIONS)))


@functools.cache
def _names_in(functions: tuple) -> tuple[str, ...]:
    """By functions, not by their class: they may be replaced in it."""
    return tuple(sorted({name for function in functions for name in _code(function, "co_names")}))


def _code(function, part: str) -> tuple:
    return getattr(getattr(function, "__code__", None), part, ())


def _constant(value):
    """In compiled code a number that has changed would be symbolic."""
    return guard_scalar(value) if type(value) in (int, float) else value


def _recipe(act_fn):
    """A function as it is; of a module its class, values and modules; of anything else its class alone."""
    if isinstance(act_fn, _FUNCTIONS):
        return act_fn
    if type(act_fn) in _PLAIN or not isinstance(act_fn, nn.Module):
        return type(act_fn)
    own, values = vars(act_fn), []
    for name in _names_of_module(type(act_fn)):  # PyTorch 2.11 cannot trace a walk through all that it has
        if name in own and type(own[name]) in _SIMPLE:
            values.append((name, _constant(own[name])))
    parts = [(name, _recipe(part)) for name, part in act_fn._modules.items()]
    return type(act_fn), tuple(values), tuple(parts)


# --- the call ---------------------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def _known(experts_class: Any, constants: tuple, act_fn) -> tuple | str:
    gate = None if experts_class is None else experts_class._apply_gate
    if getattr(act_fn, "__closure__", None):  # it may hold anything, which the cache would keep
        act_fn = type(act_fn)
    return _find(experts_class, gate, constants, act_fn)


@functools.cache
def _find(experts_class: type | None, gate, constants: tuple, act_fn) -> tuple | str:
    with (
        _disable_current_modes(),
        untraced(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        # Or activation checkpointing would count the tensors that are saved here.
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        numbers = sorted(_numbers((constants, act_fn, _code(gate, "co_consts"))))
        x, layouts = _probe(numbers, experts_class is not None)
        try:
            if experts_class is None:
                found = _value_and_gradient(_copy(act_fn), x)
            else:
                stand_in = _module(experts_class, constants, [("act_fn", act_fn)])
                found = _value_and_gradient(functools.partial(gate, stand_in), x)
        except Exception:  # whatever it needs that is not here
            return _name(gate, act_fn)
        for layout, activation, chosen in _candidates(layouts, numbers):
            formula = functools.partial(_activated, layouts[layout], activation, chosen)
            expected = _value_and_gradient(formula, x)
            if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
                return layout, activation, tuple(chosen.items())
    return _name(gate, act_fn)


def _numbers(recipe) -> set[float]:
    """The positive finite numbers in nested tuples."""
    if isinstance(recipe, tuple):
        return set().union(*map(_numbers, recipe))
    return {float(recipe)} if type(recipe) in (int, float) and 0 < recipe < math.inf else set()


def _probe(numbers: list[float], has_gate: bool) -> tuple[Tensor, dict[str, Callable]]:
    """Values on both sides of every number, and up to large ones. At most one of a pair is large."""
    values = [0.1, 0.3, 0.7, 1.2, 2.1, 3.3, 4.7, 6.1, 9.3, 12.0, 33.0, 1e3, 1e4]
    values += [v * factor for v in numbers for factor in (0.513, 0.917, 1.109, 1.513, 2.9)]
    values += [-v for v in values]
    if not has_gate:
        return torch.tensor([values], dtype=torch.float64, device="cpu"), {"separate": lambda x: (x, None)}
    pairs = [*itertools.product(values, (0.7, -1.3)), *itertools.product((0.9, -0.6), values)]
    x = torch.tensor(list(zip(*pairs, strict=True)), dtype=torch.float64, device="cpu").view(1, -1)
    return x, {"halves": lambda x: x.chunk(2, -1), "interleaved": lambda x: (x[..., ::2], x[..., 1::2])}


def _candidates(layouts: dict, numbers: list[float]) -> Iterator[tuple[str, str, dict]]:
    """What kernels compute, with each of the numbers as each of an activation's constants."""
    for layout, activation in itertools.product(layouts, ACTIVATIONS):
        names = CONSTANTS.get(activation, ())
        for chosen in itertools.product(numbers, repeat=len(names)):
            yield layout, activation, dict(zip(names, chosen, strict=True))


def _activated(split: Callable, activation: str, constants: dict, x: Tensor) -> Tensor:
    return activate(*split(x), activation=activation, **constants)


def _value_and_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = f(x)
    (dx,) = torch.autograd.grad(out.sum(), x)
    return torch.cat([out.detach(), dx], -1)


def _copy(recipe):
    """The function or module that a recipe is of, without parameters and buffers."""
    if isinstance(recipe, tuple):
        return _module(*recipe)
    return _PLAIN.get(recipe) if isinstance(recipe, type) else recipe


def _module(kind: type, values: tuple, parts) -> nn.Module:
    module: nn.Module = object.__new__(kind)  # FSDP's classes have a __new__ that makes others
    nn.Module.__init__(module)
    vars(module).update(values)
    for name, recipe in parts:
        setattr(module, name, _copy(recipe))
    return module


def _name(gate, act_fn) -> str:
    what, thing = ("gate", gate) if gate not in (None, _default_apply_gate) else ("activation", act_fn)
    thing = thing[0] if isinstance(thing, tuple) else thing
    name = getattr(thing, "__qualname__", getattr(thing, "__name__", thing))
    return f"the {what} {getattr(thing, '__module__', '')}.{name}"
