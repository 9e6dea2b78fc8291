"""Every public name and operator is documented, and the examples of the API reference run.

Examples are doctests that begin with `import torch, fused_moe`, and run on the CPU. One that needs a process
group, a GPU or a package that is not there has `# doctest: +SKIP`, and says in words what it needs.
"""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from test_interface import public_methods

import fused_moe
from fused_moe.operators import OPERATORS, SETUP

PACKAGE = Path(fused_moe.__file__).parent
# {module: its public names}
PUBLIC = {
    "fused_moe": [name for name in fused_moe.__all__ if name != "reference"],
    "fused_moe.checkpoint": [
        "Block", "Source", "blocks", "convert", "from_hf", "load", "load_layer", "open_folder", "to_hf",
    ],
    "fused_moe.checkpoint.distributed": ["CheckedReader"],
    "fused_moe.distributed": ["ExpertParallel", "ParallelExperts"],
    "fused_moe.quantized": import_module("fused_moe.quantized").__all__,
    "fused_moe.reference": fused_moe.reference.__all__,
    "fused_moe.sglang": ["register"],
    "fused_moe.tensor_parallel": ["ExpertTensorParallel"],
    "fused_moe.vllm": ["register"],
}  # fmt: skip
# {file, which imports a package that may not be there: its public names}
UNIMPORTED = {
    "axolotl.py": ["FusedMoEPlugin"],
    "torchtitan/converter.py": ["FusedMoEConverter", "FusedMoEFp8Converter"],
    "torchtitan/overrides.py": [
        "fused_experts", "fused_moe", "fused_moe_fp8", "fused_routed_experts", "fused_routed_experts_fp8",
        "selective_ac",
    ],
    "transformers/__init__.py": ["register"],
    "transformers/experts.py": ["experts_forward"],
    "transformers/quantizing.py": ["quantize_experts", "requantized_merges"],
}  # fmt: skip
CHECKED = ("fused_moe", "fused_moe.checkpoint", "fused_moe.quantized")  # the others refer to these
EXAMPLE = re.compile(r"^ *Example:$", re.MULTILINE)
HOW = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def check_docstring(name: str, doc: str | None, has_example: bool = True) -> None:
    assert doc, f"{name} has no docstring"
    summary = inspect.cleandoc(doc).split("\n\n")[0]
    assert summary.endswith((".", ":", "::")), f"{name}: expected a sentence, found {summary}"
    if has_example:
        assert EXAMPLE.search(doc), f"{name} has no section Example"
    if "+SKIP" in doc:
        assert "Needs " in doc, f"{name} does not say why its example is skipped"


def doctests(name: str, value) -> list[doctest.DocTest]:
    """The examples of a function, or of a class and its public methods."""
    members = {name: value}
    if inspect.isclass(value):
        members |= {f"{name}.{method}": member for method, member in public_methods(value).items()}
    names = {"torch": torch, "fused_moe": fused_moe}
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=True)
    return [test for n, m in members.items() for test in finder.find(m, n, module=False, globs=names)]


# --- public names -------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_documented(cpu, module):
    """A sentence and an example each; of a class's public methods a sentence."""
    for name in PUBLIC[module]:
        value = getattr(import_module(module), name)
        check_docstring(name, value.__doc__)
        for method, member in public_methods(value).items() if inspect.isclass(value) else ():
            check_docstring(f"{name}.{method}", member.__doc__, has_example=False)


@pytest.mark.quick
@pytest.mark.parametrize("module", CHECKED)
def test_every_argument_is_documented(cpu, module):
    for name in PUBLIC[module]:
        value = getattr(import_module(module), name)
        methods = public_methods(value).items() if inspect.isclass(value) else ()
        functions = {name: value} | {f"{name}.{n}": m for n, m in methods if "Args:" in (m.__doc__ or "")}
        for function_name, function in functions.items():
            if hasattr(function, "_fields") or "not listed are those" in function.__doc__:
                continue
            for argument in set(inspect.signature(function).parameters) - {"self"}:
                found = re.search(rf"\b{argument}\b", function.__doc__)
                assert found, f"{function_name}: {argument} is not in the docstring"


@pytest.mark.quick
@pytest.mark.parametrize("file", UNIMPORTED)
def test_names_of_adapters_are_documented(cpu, file):
    tree = ast.parse((PACKAGE / file).read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name in UNIMPORTED[file]:
        check_docstring(name, ast.get_docstring(found[name], clean=False))


@pytest.mark.parametrize("module", PUBLIC)
def test_examples_run(cpu, module):
    if module == "fused_moe.checkpoint":
        pytest.importorskip("safetensors")
    runner = doctest.DocTestRunner(verbose=False, optionflags=HOW)
    output = []
    for name in PUBLIC[module]:
        for test in doctests(name, getattr(import_module(module), name)):
            torch.manual_seed(0)
            runner.run(test, out=output.append)
    assert not runner.failures, "".join(output)
    assert runner.tries or module in ("fused_moe.sglang", "fused_moe.vllm")


# A call that does not fit a signature, or a result that does not fit its variable. Other errors only say that
# a module's attribute may be any module, or that a result may be None.
REFUSED = re.compile(r'\[(assignment|call-arg|call-overload)\]$|Argument .* to "(?!equal").*\[arg-type\]$')


def test_examples_fit_the_annotations(cpu, tmp_path):
    """mypy accepts each call of our functions in the examples that run, and reports a wrong one."""
    pytest.importorskip("mypy")
    lines = ["import torch, fused_moe"]
    for module in PUBLIC:
        for name in PUBLIC[module]:
            for test in doctests(name, getattr(import_module(module), name)):
                sources = [e.source for e in test.examples if doctest.SKIP not in e.options]
                lines += [f"def example_{len(lines)}() -> None:  # {test.name}", "    pass"]
                lines += ["    " + line for source in sources for line in source.splitlines()]
    wrong = 'fused_moe.quantize(1, "int4")'
    (tmp_path / "examples.py").write_text("\n".join([*lines, wrong]) + "\n")
    command = [sys.executable, "-m", "mypy", str(tmp_path / "examples.py")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    errors = re.findall(r"examples\.py:(\d+): error: (.*)", run.stdout)
    refused = {int(line): error for line, error in errors if REFUSED.search(error)}
    assert refused.pop(len(lines) + 1, None), run.stdout + run.stderr
    assert not [f"{lines[line - 1].strip()}: {error}" for line, error in refused.items()]


def test_a_wrong_example_is_found(cpu):
    def wrong():
        """Adds.

        Example:
            >>> torch.ones(2).sum()
            tensor(3.)
        """

    check_docstring("wrong", wrong.__doc__)
    runner = doctest.DocTestRunner(verbose=False, optionflags=HOW)
    (test,) = doctests("wrong", wrong)
    runner.run(test, out=lambda text: None)
    assert runner.failures == 1
    for doc in (None, "Adds", "Adds.", "Adds.\n\nExample:\n    >>> x  # doctest: +SKIP"):
        with pytest.raises(AssertionError):
            check_docstring("wrong", doc)


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
