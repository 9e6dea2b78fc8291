"""The tables of docs/testing.md: what each cell of the matrix gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

import torch

from .kinds import KINDS
from .wrappers import WRAPPERS

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


class Error(NamedTuple):
    """What a cell raises, and why; with `when`, only there."""

    type: type[Exception]
    match: str
    reason: str
    when: Callable[[torch.device], bool] | None = None


def text(errors: dict[tuple[tuple, str], Error]) -> str:
    """One table per group of wrappers, whose rows they are, and the reasons of all errors."""
    letters = dict(
        zip(dict.fromkeys(error.reason for error in errors.values()), ascii_uppercase, strict=False)
    )
    cells = {(kind, wrapper): error for (kinds, wrapper), error in errors.items() for kind in kinds}

    def cell(kind: str, wrapper: str) -> str:
        error = cells.get((kind, wrapper))
        if error is None:
            return "✓"
        return f"{'✓ ' if error.when else ''}{letters[error.reason]}"

    lines = []
    for group in dict.fromkeys(w.group for w in WRAPPERS.values()):
        titles = [group, *(kind.title for kind in KINDS.values())]
        lines += ["", f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
        for name, w in WRAPPERS.items():
            if w.group == group:
                lines.append(f"| {w.title} | {' | '.join(cell(kind, name) for kind in KINDS)} |")
    lines.append("")
    for reason, letter in letters.items():
        types = {error.type.__name__ for error in errors.values() if error.reason == reason}
        lines.append(f"- {letter}: {' or '.join(sorted(types))}. {reason}")
    return "\n".join(lines[1:]) + "\n"


def in_page(page: str) -> str:
    """What is between the page's markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def write(errors: dict) -> None:
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + in_page(page) + END, BEGIN + text(errors) + END))
