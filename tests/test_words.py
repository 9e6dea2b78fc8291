"""Comments begin with their subject, and lines of C have 110 columns at most."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("csrc", "fused_moe", "tests", "benchmarks", "examples", "tools")
if not (ROOT / "csrc").exists():
    pytest.skip("needs csrc/ beside tests/", allow_module_level=True)

COLUMNS = 110  # .clang-format, which leaves comments as they are
IN_C = {
    "a comment opens with Of": re.compile(r"(?:/\*|//|^\s*\*)\s*Of\b"),
    "a sentence opens with Of": re.compile(r"[.:!?] Of\b"),
    "as many, so many": re.compile(r"\b(?:as|so) many\b", re.IGNORECASE),
    f"more than {COLUMNS} columns": re.compile(rf"^.{{{COLUMNS + 1}}}"),
}
IN_PYTHON = {"a comment opens with Of": re.compile(r'(?:#|""")\s*Of\b')}


def findings(file: Path, rules: dict[str, re.Pattern]) -> list[str]:
    """file:line and rule of every line that breaks one."""
    lines = enumerate(file.read_text().splitlines(), 1)
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    return [f"{name}:{i}: {rule}" for i, line in lines for rule in rules if rules[rule].search(line)]


def files(*suffixes: str) -> list[Path]:
    return sorted(f for folder in SOURCES for f in (ROOT / folder).rglob("*") if f.suffix in suffixes)


@pytest.mark.quick
def test_comments_begin_with_their_subject(cpu):
    found = [x for file in files(".c", ".h", ".cpp", ".cu", ".cuh") for x in findings(file, IN_C)]
    found += [x for file in files(".py") for x in findings(file, IN_PYTHON)]
    assert not found, "\n".join(found)


def test_a_wrong_line_is_found(cpu, tmp_path):
    file = tmp_path / "a.cuh"
    for line, is_wrong in (
        ("/* Rows of a tile. */", False),
        ("/* " + "Of a tile. */", True),
        ("int n; // Of a tile", True),
        (" * of a tile. Often.", False),
        (" * Of " + "a tile", True),
        ("/* Rows. " + "Of a tile. */", True),
        ("/* Twice as" + " many. */", True),
        ("x" * COLUMNS, False),
        ("x" * (COLUMNS + 1), True),
    ):
        file.write_text(f"\n{line}\n")
        assert [x.startswith("a.cuh:2: ") for x in findings(file, IN_C)] == [True] * is_wrong, line
    assert findings(file, IN_PYTHON) == []
    file.write_text("x = 1  # " + 'Of a tile\n"""' + 'Of a tile."""\n')
    assert len(findings(file, IN_PYTHON)) == 2
