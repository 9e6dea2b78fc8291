"""The page of operators: schemas from the library, meanings and examples from fused_moe/operators.py."""

from __future__ import annotations

import ast
import re

import torch

from fused_moe.operators import OPERATORS, SETUP

MARK = "<!-- operators -->"
# Operators that programs call by name, and the function of each.
CALLED = {
    "router_logits": "router_logits",
    "route": "route",
    "route_plan": "route_plan",
    "count_plan": "plan_from_counts",
    "permute": "permute",
    "unpermute": "unpermute",
    "grouped_mm": "grouped_mm",
    "experts": "fused_experts",
    "experts_out": "fused_experts",
    "experts_up": "fused_experts",
    "experts_down": "fused_experts",
}


def schemas() -> dict[str, str]:
    """Name -> schema of every operator that the library registers."""
    found = (str(schema) for schema in torch._C._jit_get_all_schemas())
    ours = (schema.removeprefix("fused_moe::") for schema in found if schema.startswith("fused_moe::"))
    return {schema.partition("(")[0]: schema for schema in ours}


def markdown() -> str:
    """The page's generated part. KeyError: an operator without a meaning."""
    found = schemas()
    called = {name: OPERATORS[name] for name in CALLED}
    setup = needed_of(SETUP, [operator.example for operator in called.values()])
    lines = ["## Operators to call", "", "The examples begin with", "", "```python", setup, "```", ""]
    for name, operator in called.items():
        function = f"`fused_moe.{CALLED[name]}`"
        link = "" if function in operator.meaning else f" With checked arguments: {function}."
        lines += [f"### {name}", "", operator.meaning + link, ""]
        lines += ["```", _wrapped(found.pop(name)), "```", "", "```python", operator.example, "```", ""]
    lines += ["## All others", "", "They may change in any release.", ""]
    lines += ["| operator | meaning and schema |", "| --- | --- |"]
    for name, schema in sorted(found.items()):
        lines.append(f"| `{name}` | {OPERATORS[name].meaning} <br> `{schema}` |")
    return "\n".join(lines)


def needed_of(setup: str, examples: list[str]) -> str:
    """The statements of `setup` that the examples need."""
    names = {name for example in examples for name in re.findall(r"\w+", example)}
    kept = []
    for statement in reversed(ast.parse(setup).body):
        words = re.findall(r"\w+", ast.unparse(statement))
        named = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        assigned = {node.id for node in named if isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.Import) or assigned & names:
            names.update(words)
            kept.append(ast.get_source_segment(setup, statement))
    return "\n".join(reversed(kept))


def _wrapped(schema: str, width: int = 88) -> str:
    """A schema on lines of one argument group each, broken at commas."""
    if len(schema) <= width:
        return schema
    lines = [""]
    for part in schema.replace(", ", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) + 1 > width:
            lines.append("    " + part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def _read(app, docname, content):
    if MARK in content[0]:
        content[0] = content[0].replace(MARK, markdown())


def setup(app) -> None:
    app.connect("source-read", _read, priority=400)
