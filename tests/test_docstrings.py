"""Every public name and operator is documented, and the examples of the API reference run."""

import doctest
import importlib
import inspect

import pytest
import torch
from test_interface import public_methods

import fused_moe
from fused_moe.operators import OPERATORS, SETUP


# --- operators ----------------------------------------------------------------------------------------


def described(value) -> str:
    """A tensor's shape, a list's elements, or the type of anything else."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    return "None" if value is None else type(value).__name__


@pytest.mark.quick
def test_every_operator_has_a_meaning(cpu):
    schemas = (s.name for s in torch._C._jit_get_all_schemas())
    registered = {name.removeprefix("fused_moe::") for name in schemas if name.startswith("fused_moe::")}
    assert set(OPERATORS) == registered
    for name, operator in OPERATORS.items():
        assert operator.meaning.endswith(".") and len(operator.meaning) <= 120, name
        assert operator.example.startswith(f"ops.{name}("), name


def test_the_examples_of_operators_run(cpu):
    """Each gives results of the shapes that it states."""
    names = {}
    exec(SETUP, names)
    for name, operator in OPERATORS.items():
        call, _, expected = operator.example.partition("  # ")
        result = eval(call, names)
        found = ", ".join(map(described, result)) if isinstance(result, tuple) else described(result)
        assert found == expected, f"{name}: {found}"
