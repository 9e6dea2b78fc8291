"""Public functions and methods are annotated, as py.typed claims; `make types` checks what they say."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
from test_docstrings import PACKAGE, PUBLIC
from test_interface import public_methods

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# Files that import a package that may be missing.
ADAPTERS = ["axolotl.py", "checkpoint/torchtitan.py"]
ADAPTERS += [
    str(path.relative_to(PACKAGE))
    for folder in ("torchtitan", "transformers")
    for path in sorted((PACKAGE / folder).glob("*.py"))
]


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


def without_return_type(source: str) -> list[str]:
    """The public functions and methods that do not say what they return."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if function.name[0] != "_" and function.returns is None]


@pytest.mark.quick
@pytest.mark.parametrize("file", ADAPTERS)
def test_public_functions_of_adapters_have_return_types(file):
    assert not without_return_type((PACKAGE / file).read_text())


def test_mypy_checks_every_module():
    assert "ignore_errors" not in PYPROJECT.read_text()


def test_what_is_not_annotated_is_found():
    def function(x: int, y, *others): ...

    assert unannotated("f", function) == ["f: y", "f: others", "f: return"]
    source = "class C:\n def f(self): ...\n def g(self) -> int: ...\ndef _h(): ..."
    assert without_return_type(source) == ["f"]
