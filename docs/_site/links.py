"""Links of Markdown pages, which are written for GitHub, on the site.

A link to another page stays. A link to any other file of the repository becomes its URL. Inline code that is
a documented name links to it. A link to a file that does not exist stays as well: MyST warns about it, which
fails a strict build.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from docutils import nodes
from sphinx.util.nodes import make_refnode

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
# Files of the root that a page includes.
PAGES = {ROOT / "CONTRIBUTING.md": DOCS / "contributing.md", ROOT / "CHANGELOG.md": DOCS / "changelog.md"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")


def rewritten(text: str, folder: Path, docname: str, repository: str) -> str:
    """The text of a file in `folder` as the page `docname` has it."""

    def target_of(match: re.Match) -> str:
        target = match[1]
        if re.match(r"[a-z]+:", target):
            return target
        path = Path(os.path.normpath(folder / target))
        if not path.exists():
            return target  # which MyST warns about
        path = PAGES.get(path, path)
        if path.is_relative_to(DOCS) and path.is_file():
            return os.path.relpath(path, (DOCS / docname).parent)
        return f"{repository}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT)}"

    parts = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(target_of, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(target_of, text[end:])])


def _read_page(app, docname, content, *, repository):
    content[0] = rewritten(content[0], (DOCS / docname).parent, docname, repository)


def _read_included(app, relative_path, parent_docname, content, *, repository):
    content[0] = rewritten(content[0], (DOCS / relative_path).parent, parent_docname, repository)


def _link_names(app, doctree, docname):
    """`fused_moe.route` and `fused_moe.route(x, 2)` link to the reference; on its pages `route` does, too."""
    objects = app.env.domains["py"].objects
    # On a page of the reference: its methods, unless two have one name; then what is directly in fused_moe.
    methods = [
        n for n, entry in objects.items() if entry.docname == docname and entry.objtype.endswith("method")
    ]
    last = [n.rpartition(".")[2] for n in methods]
    short = {end: n for n, end in zip(methods, last, strict=True) if last.count(end) == 1}
    short.update((n.removeprefix("fused_moe."), n) for n in objects if n.startswith("fused_moe."))
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference) or literal.next_node(nodes.reference):
            continue
        name = literal.astext().partition("(")[0]
        if docname.startswith("api/"):
            name = short.get(name, name)
        if name.startswith("fused_moe.") and name in objects:
            entry = objects[name]
            reference = make_refnode(
                app.builder, docname, entry.docname, entry.node_id, literal.deepcopy(), name
            )
            literal.replace_self(reference)


def setup(app, repository: str) -> None:
    app.connect("source-read", partial(_read_page, repository=repository))
    app.connect("include-read", partial(_read_included, repository=repository))
    app.connect("doctree-resolved", _link_names)
