"""No file of the package imports, directly or through others, a file that imports it."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fused_moe

ROOT = Path(fused_moe.__file__).parent
NAMES = {
    ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
# Adapters import their files where the other project is there, in functions of the package's own file.
ADAPTERS = {f"{ROOT.name}.{name}" for name in ("sglang", "torchtitan", "transformers", "vllm")}


def imports_of(name: str, source: str) -> set[str]:
    """The package's files that a file imports, at its top or in a function. Importing a file of another
    folder imports that folder's first. What is for type checkers alone is not imported."""
    package = name if NAMES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            found |= members if members <= NAMES.keys() else members | {base}
    folders = {file.rpartition(".")[0] for file in found & NAMES.keys()} - {ROOT.name, package}
    return (found | {f for f in folders if not f"{name}.".startswith(f"{f}.")}) & NAMES.keys()


def executed(tree: ast.AST):
    """All nodes, but for those of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from executed(node)


def graph(changes: dict[str, str]) -> dict[str, set[str]]:
    """{file: files that it imports}, with more source in some."""
    return {
        name: imports_of(name, path.read_text() + changes.get(name, ""))
        for name, path in NAMES.items()
        if name not in ADAPTERS
    }


def test_no_circle(cpu):
    found = graph({})
    assert {"fused_moe.function", "fused_moe.quantized.weight"} <= found["fused_moe.module"]
    TopologicalSorter(found).prepare()  # raises CycleError, with the files of a circle


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("lora", "from .module import Experts"),
        ("lora", "def late():\n    from .module import Experts"),
        ("ops", "from . import function"),
        ("function", "import fused_moe.module"),
        ("info", "from . import __version__"),
        ("quantized.smoothing", "from ..function import permute"),  # whose files import quantized
    ],
)
def test_a_circle_is_found(cpu, name, added):
    with pytest.raises(CycleError):
        TopologicalSorter(graph({f"{ROOT.name}.{name}": "\n" + added})).prepare()
