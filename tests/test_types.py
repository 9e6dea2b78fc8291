"""Public functions and methods are annotated, as py.typed claims; `make types` checks what they say."""

import inspect
from importlib import import_module

import pytest
from test_docstrings import PUBLIC
from test_interface import public_methods


def functions(name, value):
    """(name, function) of a public function, or of a class's constructor and public methods."""
    if not inspect.isclass(value):
        yield name, value
        return
    if not hasattr(value, "_fields"):  # not a named tuple, whose fields are annotated
        yield f"{name}.__init__", value.__init__
    for method, member in public_methods(value).items():
        yield f"{name}.{method}", member.fget if isinstance(member, property) else member


def unannotated(name, function) -> list[str]:
    found = inspect.signature(function)
    missing = [p.name for p in found.parameters.values() if p.annotation is p.empty]
    missing = [parameter for parameter in missing if parameter not in ("self", "cls")]
    if found.return_annotation is found.empty and not name.endswith("__init__"):
        missing.append("return")
    return [f"{name}: {part}" for part in missing]


@pytest.mark.quick
@pytest.mark.parametrize("module", PUBLIC)
def test_public_signatures_are_annotated(module):
    names = {name: getattr(import_module(module), name) for name in PUBLIC[module]}
    members = [pair for name, value in names.items() for pair in functions(f"{module}.{name}", value)]
    assert not [part for name, function in members for part in unannotated(name, function)]


def test_what_is_not_annotated_is_found():
    def function(x: int, y, *others): ...

    assert unannotated("f", function) == ["f: y", "f: others", "f: return"]
