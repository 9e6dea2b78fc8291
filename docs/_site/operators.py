"""The page of operators: schemas from the library, meanings and examples from fused_moe/operators.py."""

from __future__ import annotations

import torch

import fused_moe  # noqa: F401 - registers the operators

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
    from fused_moe.operators import OPERATORS, SETUP

    found = schemas()
    lines = ["## Operators to call", "", "The examples begin with", "", "```python", SETUP, "```", ""]
    for name, function in CALLED.items():
        lines += [f"### {name}", "", OPERATORS[name].meaning, f"Checked and documented: `fused_moe.{function}`.", ""]
        lines += ["```", _wrapped(found.pop(name)), "```", "", "```python", OPERATORS[name].example, "```", ""]
    lines += ["## All others", "", "They may change in any release.", "", "| operator | meaning and schema |", "| --- | --- |"]
    for name, schema in sorted(found.items()):
        lines.append(f"| `{name}` | {OPERATORS[name].meaning} <br> `{schema}` |")
    return "\n".join(lines)


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
