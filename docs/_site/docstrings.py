"""Docstrings as reStructuredText. They are plain text: paragraphs, lists, `code`, `>>>` examples, indented
code, and the sections Args, Returns, Raises, each of `name: text` or of a paragraph."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"([A-Z]\w+)( \(.*\))?:$")
TITLES = {"Args": "Arguments"}
ITEM = re.compile(r"(\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*): ?(.*)")
LISTED = ("Args", "Raises", "Attributes")
BULLET = re.compile(r"([-*]|\d+\.) ")
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def escaped(text: str) -> str:
    """Text with `code` as literals, and nothing else that RST would read as markup."""
    parts = re.split(r"(`+)(.+?)\1", text, flags=re.DOTALL)
    plain = [re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::3]]
    plain = [PAGE.sub(r":doc:`\g<0> </\1>`", part) for part in plain]
    code = [f"``{part.strip()}``" for part in parts[2::3]]
    out = plain[0]
    for literal, after in zip(code, plain[1:], strict=True):
        # RST ends a literal only before a space or punctuation.
        out += literal + ("\\ " if re.match(r"\w", after) else "") + after
    return out[:-1] if out.endswith("::") else out  # what is indented becomes code anyway


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def blocks_of(lines: list[str]) -> list[list[str]]:
    """Sections, list items, indented code and paragraphs, each with the indented lines that belong to it."""
    blocks: list[list[str]] = []
    after_blank = True
    for line in lines:
        if not line.strip():
            if blocks:
                blocks[-1].append("")
            after_blank = True
            continue
        last = blocks[-1] if blocks else [""]
        is_text = not (is_section(last[0]) or indent_of(last[0]))
        if indent_of(line):
            continues = not is_text or BULLET.match(last[0]) or not (after_blank or last[-1].endswith(":"))
        else:
            continues = is_text and not (after_blank or is_section(line) or BULLET.match(line))
        if continues and blocks:
            last.append(line)
        else:
            blocks.append([line])
        after_blank = False
    return blocks


def is_section(line: str) -> bool:
    return SECTION.match(line) is not None


def body(lines: list[str]) -> list[str]:
    return dedent("\n".join(lines)).strip("\n").splitlines()


def indented(lines: list[str], by: int = 4) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


def to_rst(lines: list[str]) -> list[str]:
    out: list[str] = []
    for block in blocks_of(lines):
        block = "\n".join(block).rstrip().splitlines()
        first = block[0]
        if section := SECTION.match(first):
            out += section_to_rst(section[1], section[2] or "", body(block[1:]))
        elif first.startswith(">>>"):
            out += block
        elif indent_of(first):
            code = body(block)
            language = "pycon" if code[0].startswith(">>>") else "python"
            language = language if is_python(code) else "none"
            out += [f".. code-block:: {language}", "", *indented(code)]
        elif bullet := BULLET.match(first):
            width = len(bullet[0])
            inner = to_rst([first[width:], *body(block[1:])])
            out += [bullet[0] + inner[0], *indented(inner[1:], width)]
        else:
            out += escaped("\n".join(line.strip() for line in block)).splitlines()
        if out and out[-1]:
            out.append("")
    return out


def section_to_rst(name: str, condition: str, lines: list[str]) -> list[str]:
    title = f":{TITLES.get(name, name)}{escaped(condition)}:"
    if name not in LISTED:
        return [title, *indented(to_rst(lines))]
    items: list[tuple[str, list[str]]] = []
    for line in lines:
        if match := ITEM.match(line):
            items.append((match[1], [match[2]]))
        elif items:
            items[-1][1].append(line)
        else:
            items.append(("", [line]))
    inner: list[str] = []
    for names, text in items:
        rendered = to_rst([text[0], *body(text[1:])])
        if not names:
            inner += rendered
            continue
        bold = ", ".join(f"**{escaped(n)}**" for n in names.split(", "))
        inner += [f"- {bold} – {rendered[0] if rendered else ''}", *indented(rendered[1:], 2)]
    return [title, *indented(inner)]


def is_python(lines: list[str]) -> bool:
    if lines[0].startswith(">>>"):
        return True
    try:
        compile("\n".join(lines), "docstring", "exec")
    except SyntaxError:
        return False
    return True


# --- Sphinx -------------------------------------------------------------------------------------------


def object_of(module: str, name: str):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def source_of(module: str, name: str) -> str | None:
    """FILE#LFIRST-LLAST of a function or class of ours."""
    try:
        value = object_of(module, name)
        value = inspect.unwrap(value.fget if isinstance(value, property) else value)
        path = Path(inspect.getsourcefile(value)).relative_to(ROOT)
        lines, first = inspect.getsourcelines(value)
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return None
    return f"{path}#L{first}-L{first + len(lines) - 1}"


def _process(app, what, name, value, options, lines):
    text = "\n".join(lines).strip("\n").splitlines()
    lines[:] = to_rst(text)


def _skip(app, what, name, value, skip, options):
    """Fields and constants of a class, which its docstring has."""
    is_code = inspect.isroutine(value) or isinstance(value, property | classmethod | staticmethod)
    return True if what == "class" and not is_code else None


def setup(app) -> None:
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _process)
