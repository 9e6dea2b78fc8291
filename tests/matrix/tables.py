"""The matrix in docs/testing.md: its kinds, its wrappers, and the cells that raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
    """The kinds, the wrappers of each group, and the cells that raise: all others give right results."""
    lines = [f"- layers: {'; '.join(kind.title for kind in KINDS.values())}"]
    for group in dict.fromkeys(w.group for w in WRAPPERS.values()):
        titles = [w.title for w in WRAPPERS.values() if w.group == group]
        lines.append(f"- {group}: {'; '.join(titles)}")
    lines += ["", "Cells that raise:", ""]
    places = {}  # of equal errors in equal kinds
    for (kinds, wrapper), error in errors.items():
        titles = "all" if set(kinds) == set(KINDS) else "; ".join(KINDS[kind].title for kind in kinds)
        places.setdefault((titles, error.type.__name__, error.reason), []).append(WRAPPERS[wrapper].title)
    for (titles, name, reason), wrappers in places.items():
        lines.append(f"- {' and '.join(wrappers)} ({titles}): {name}. {reason}")
    return "\n".join(lines) + "\n"


def in_page(page: str) -> str:
    """What is between the page's markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def write(errors: dict) -> None:
    page = PAGE.read_text()
    PAGE.write_text(page.replace(BEGIN + in_page(page) + END, BEGIN + text(errors) + END))
