"""The site: `make docs` builds build/docs from these pages and from the docstrings of the package.

Pages are Markdown that reads the same on GitHub. `_site/` has what differs here: links to files outside docs/
(links.py), docstrings (docstrings.py) and the page of operators (operators.py).
"""

import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))  # for _site
sys.path.insert(0, str(ROOT))

from _site import docstrings, links, operators  # noqa: E402

import fused_moe  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Homepage"]

project = PROJECT["name"]
author = PROJECT["authors"][0]["name"]
copyright = author
version = release = fused_moe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "sphinx_copybutton"]
exclude_patterns = ["_site", "_static"]
smartquotes = False  # "softmax" is an argument
highlight_language = "none"  # of blocks that name no language

myst_heading_anchors = 4  # with GitHub's names
myst_enable_extensions = ["html_image"]

# Packages that fused_moe's modules for other projects import. They are not needed to read docstrings.
autodoc_mock_imports = [
    "axolotl",
    "compressed_tensors",
    "peft",
    "pydantic",
    "sglang",
    "spmd_types",
    "torchtitan",
    "transformers",
    "vllm",
]
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"fused_moe {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": f"{REPOSITORY}/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The source of a documented name, on the main branch."""
    place = docstrings.source_of(info["module"], info["fullname"])
    return place and f"{REPOSITORY}/blob/main/{place}"


def setup(app):
    links.setup(app, REPOSITORY)
    docstrings.setup(app)
    operators.setup(app)
