"""README and docs: their code runs; their links, commands and versions are those of this checkout; they are
short; and the API reference is complete.

Every ```python block of a page runs. The words after `python` in the fence say how:

    ```python                       the page's blocks in order, in one process
    ```python needs=MODULE          where MODULE is installed
    ```python nproc=2               under torchrun
    ```python cuda                  on --device cuda
    ```python notest: REASON        not at all

Blocks of one page with the same words share a process. Each choice of words starts a new one.
"""

import inspect
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import torch
from cases import torchrun

import fused_moe
from fused_moe import checkpoint, quantized

ROOT = Path(__file__).parent.parent
if not (ROOT / "README.md").exists():
    pytest.skip("needs README.md and docs/ beside tests/", allow_module_level=True)

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
API = sorted((DOCS / "api").glob("*.md"))
TEXTS = [*PAGES, *API, *(ROOT / f for f in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
# Written for those who change the code. All other pages are the user's; the API reference is neither.
NOT_USERS = {"lab.md", "testing.md", "hopper_gemm.md", "decode_path.md"}
# Their tables are of figures that programs write: not counted.
GENERATED_ROWS = {"performance.md", "evaluations.md", "scaling.md"}
USERS = [page for page in PAGES if page.name not in NOT_USERS]
# Words at most, code and tables included.
WORDS = {"README.md": 800, "docs/lab.md": 4_000}
WORDS_OF_USERS = 20_000
README_LINES = 100
MAY_NAME_COMMITS = {"performance.md", "evaluations.md"}


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str):
    """(how, first line, lines) of every fenced block of a language."""
    lines = page.read_text().splitlines()
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, "a fence is not closed"
    for begin, end in zip(fences[::2], fences[1::2], strict=True):
        name, _, how = lines[begin].removeprefix("```").partition(" ")
        if name == language:
            yield how, begin + 1, lines[begin + 1 : end]


def scripts():
    """One per page and way to run: its blocks, on the lines that they have in the page."""
    for page in PAGES:
        found = sorted(blocks(page, "python"), key=lambda block: block[0])
        for how, group in groupby(found, key=lambda block: block[0]):
            lines = []
            for _, first, code in group:
                lines += [""] * (first - len(lines)) + code
            name = f"{page.relative_to(ROOT)} {how}".strip()
            marks = pytest.mark.gpu if how == "cuda" else ()
            yield pytest.param(page.stem, how, "\n".join(lines), id=name, marks=marks)


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package that it is part of
        return False


@pytest.mark.parametrize(("name", "how", "code"), list(scripts()))
def test_code(request, device, tmp_path, name, how, code):
    """On the suite's device, if the code asks for one. A failure has the page's line in its traceback."""
    command = [sys.executable]
    if how.startswith("notest"):
        reason = how.partition(": ")[2]
        assert reason, "expected notest: REASON"
        pytest.skip(f"notest: {reason}")
    elif how.startswith("needs="):
        request.getfixturevalue("cpu")
        if not is_installed(how.removeprefix("needs=")):
            pytest.skip(f"{how.removeprefix('needs=')} is not installed")
    elif how.startswith("nproc="):
        command = torchrun(int(how.removeprefix("nproc=")))
    else:
        assert how in ("", "cuda"), f"expected one of this file's words after python, found {how}"
    script = tmp_path / f"{name}.page.py"  # no name of a package
    script.write_text(code)
    folder = str(Path(fused_moe.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    run = subprocess.run(
        [*command, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, **hidden},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have on GitHub."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each(TEXTS)
def test_links(cpu, page):
    """Files and headings that a page links to exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def joined(lines: list[str]) -> list[str]:
    """The lines, with those that end in a backslash continued by the next."""
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def wrong_words(command: str, targets: set[str]) -> list[str]:
    """The make targets, programs and modules of a command that do not exist here."""
    words = [word for word in shlex.split(command, comments=True) if "=" not in word]
    if not words:
        return []
    program, *rest = words
    if program == "make":
        return [word for word in rest if word not in targets]
    if re.fullmatch(r"(.*/)?python3?", program):
        if rest[:1] == ["-m"]:
            return [] if is_installed(rest[1]) else [rest[1]]
        files = rest[:1]
    elif "/" in program and "/bin/" not in program:
        files = [program]
    else:  # a program of others, which may run one of ours: a bare name is the reader's file
        files = [word for word in rest if re.fullmatch(r"\w+/[\w/]+\.(py|sh)", word)]
    return [file for file in files if not (ROOT / file).exists()]


@each(TEXTS)
def test_commands(cpu, page):
    """Targets of make, programs and modules in ```sh blocks exist."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for names in re.findall(r"^([\w ]+):", makefile, re.MULTILINE) for name in names.split()}
    commands = [line for _, _, lines in blocks(page, "sh") for line in joined(lines)]
    assert not [word for command in commands for word in wrong_words(command, targets)]


def test_a_wrong_command_is_found(cpu):
    for command, wrong in (
        ("make test PYTEST_ARGS='-m quick'  # the suite", []),
        ("make tests", ["tests"]),
        ("python examples/train_lm.py --steps 5", []),
        (".venv/bin/python examples/train.py", ["examples/train.py"]),
        ("torchrun --nproc-per-node 2 examples/train.py", ["examples/train.py"]),
        ("tests/gpu/run.py", ["tests/gpu/run.py"]),
        ("python -m fused_moe.schedules", ["fused_moe.schedules"]),
    ):
        assert wrong_words(command, {"test"}) == wrong, command


# --- length -------------------------------------------------------------------------------------------


def words(page: Path) -> int:
    lines = page.read_text().splitlines()
    if page.name in GENERATED_ROWS:
        lines = [line for line in lines if not line.startswith("|")]
    return len(" ".join(lines).split())


@pytest.mark.parametrize(("page", "limit"), WORDS.items())
def test_a_page_is_short(cpu, page, limit):
    assert words(ROOT / page) <= limit


def test_the_readme_has_few_lines(cpu):
    assert (ROOT / "README.md").read_text().count("\n") <= README_LINES


def test_the_users_pages_are_short(cpu):
    counts = {page.name: words(page) for page in USERS}
    assert sum(counts.values()) <= WORDS_OF_USERS, counts


@each([page for page in USERS if page.name not in MAY_NAME_COMMITS])
def test_a_page_names_no_commit(cpu, page):
    assert not re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", page.read_text())


# --- the site -----------------------------------------------------------------------------------------


def documented() -> set[str]:
    """The names of the directives of the API pages."""
    directive = re.compile(r"^\.\. auto(?:function|class|module|data):: (\S+)$", re.MULTILINE)
    return {name for page in API for name in directive.findall(page.read_text())}


def public_names() -> set[str]:
    """Names of fused_moe and of the modules that interface.txt pins."""
    lines = (ROOT / "tests" / "interface.txt").read_text().split("# public names\n")[1].split("\n\n")[0]
    return {re.match(r"[\w.]+", line)[0] for line in lines.splitlines()}


def test_the_api_pages_have_every_public_name(cpu):
    found = documented()
    names = {f"fused_moe.{name}" for name in fused_moe.__all__}
    names |= {
        name for name in public_names() if name.startswith(("fused_moe.distributed", "fused_moe.tensor"))
    }
    assert not sorted(names - found)
    for module in (checkpoint, quantized):
        for name, value in vars(module).items():
            if name[0] != "_" and (inspect.isfunction(value) or inspect.isclass(value)):
                assert {f"{module.__name__}.{name}", f"fused_moe.{name}"} & found, name


def test_the_page_of_operators_has_every_operator(cpu, monkeypatch):
    """With its schema and a meaning. The page is made of what the library registers."""
    monkeypatch.syspath_prepend(DOCS)
    from _site import operators

    text = operators.markdown()
    schemas = (s.name for s in torch._C._jit_get_all_schemas())
    for name in (name.removeprefix("fused_moe::") for name in schemas if name.startswith("fused_moe::")):
        assert re.search(rf"^(### {name}|\| `{name}` \| .*`{name}\(.*)$", text, re.MULTILINE), name


def site_is_missing() -> str:
    """Why the site cannot be built here; empty if it can."""
    modules = ("sphinx", "myst_parser", "furo", "sphinx_copybutton")
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        return f"{', '.join(missing)} not installed: pip install .[docs], or make docs"
    return "" if (ROOT / "CONTRIBUTING.md").exists() else "not in a checkout"


@pytest.mark.skipif(bool(site_is_missing()), reason=site_is_missing())
def test_the_site(cpu, tmp_path):
    """It is built without a warning, and its inventory has every public name."""
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-q", DOCS, tmp_path / "site"]
    run = subprocess.run(
        [*command, "-d", tmp_path / "doctrees"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert run.returncode == 0, run.stdout
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((tmp_path / "site" / "objects.inv").read_bytes(), uri="").data
    found = {name for kind in inventory if kind.startswith("py:") for name in inventory[kind]}
    # A class of fused_moe.reference shows the methods that it has itself.
    names = {name for name in public_names() if not re.fullmatch(r"fused_moe\.reference\.FusedMoE\..+", name)}
    assert not sorted(names - found)


# --- versions -----------------------------------------------------------------------------------------


def test_versions_agree(cpu):
    """Package, changelog and citation."""
    changelog = re.search(r"^## (\d\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = dict(re.findall(r"^([\w-]+): \"?([^\"\n]+)\"?$", (ROOT / "CITATION.cff").read_text(), re.M))
    assert changelog.groups() == (citation["version"], citation["date-released"])
    assert changelog[1] == fused_moe.__version__
