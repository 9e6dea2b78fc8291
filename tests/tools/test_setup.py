"""tools/setup.sh and the Makefile before it: which environment gets which PyTorch by which command lines.

A Python of a few lines of shell notes its command lines and installs versions, which are text files.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = "install --quiet --no-build-isolation --editable .[test,train,bench]"
PYTHON = """#!/bin/sh
home=$(dirname "$(dirname "$0")")
log() { echo "$*" >>"$LOG"; }
case "$*" in
--version) echo Python 3.12.1 ;;
*Python.h* | *version_info*) ;;
*ensurepip,*) [ -z "$NO_ENSUREPIP" ] ;;
*sys.base_prefix*) ! [ -e "$home/pyvenv.cfg" ] ;;
*torch.__version__*) cat "$home/torch" 2>/dev/null || { [ -e "$home/lends" ] && cat "$SYSTEM/torch"; } ;;
"-m pip --version") [ -e "$home/pip" ] ;;
*read_configuration*) echo 'pytest>=7 hypothesis>=6' ;;
"-m ensurepip") log "ensurepip" && touch "$home/pip" ;;
"-m venv"*)
    log "venv $*"
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && touch "$folder/pyvenv.cfg" "$folder/pip"
    case "$*" in *--system-site-packages*) touch "$folder/lends" ;; esac ;;
"-m pip"*torch*)
    shift 3
    log "pip $*"
    case "$*" in *"$INDEX_FAILS"*) exit 1 ;; *--no-index*) [ -n "$HAS_WHEEL" ] || exit 1 ;; esac
    echo 2.15.0 >"$home/torch" ;;
"-m pip"*) shift 3 && log "pip $*" ;;
*) [ -z "$MAKEFLAGS" ] && log "python $*" ;;
esac
"""


@pytest.fixture
def checkout(cpu, tmp_path, monkeypatch):
    """A folder with a space, as make sees it, and its own machine around it: `system`."""
    if not (ROOT / "tools" / "setup.sh").exists():
        pytest.skip("not in a checkout")
    if not shutil.which("make"):
        pytest.skip("make is missing")
    system, checkout = tmp_path / "system", tmp_path / "a checkout"
    (system / "bin").mkdir(parents=True)
    write(system / "bin" / "python3", PYTHON)
    (checkout / "tools").mkdir(parents=True)
    for file in ("Makefile", "pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / file, checkout / file)
    for name in (
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "VENV",
        "TORCH",
        "CPU_INDEX",
        "MAKEFLAGS",
        "MAKELEVEL",
        "PYTHON",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{system / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("SYSTEM", str(system))
    monkeypatch.setenv("INDEX_FAILS", "none")
    monkeypatch.setenv("CC", "true")
    monkeypatch.setenv("CXX", "true")
    return checkout


@pytest.fixture
def no_driver():
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")


def write(path, text):
    path.write_text(text)
    path.chmod(0o755)


def make(checkout, *arguments):
    """Runs `make build`: its output, and the command lines that Python has got."""
    log = Path(os.environ["LOG"])
    log.write_text("")
    run = subprocess.run(["make", "build", *arguments], cwd=checkout, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, log.read_text().splitlines()


def torch_installs(lines):
    return [line for line in lines if line.startswith("pip") and "torch" in line]


def environment(folder, torch=None, pip=True):
    (folder / "bin").mkdir(parents=True)
    write(folder / "bin" / "python", PYTHON)
    (folder / "pyvenv.cfg").touch()
    if torch:
        (folder / "torch").write_text(f"{torch}\n")
    if pip:
        (folder / "pip").touch()
    return folder


def test_without_driver(checkout, no_driver):
    output, lines = make(checkout)
    install = f"install --retries 1 --index-url {INDEX}"
    assert lines[:2] == ["venv -m venv .venv", f"pip {install} torch<=2.15.0"]
    # What is about to happen is said, and as a line for a shell: `<` would be a redirection there.
    size = output.index("about 200 MB to download")
    assert size < output.index(
        f"\n$ .venv/bin/python -m pip --disable-pip-version-check {install} 'torch<=2.15.0'\n"
    )


def test_index_that_fails(checkout, no_driver, monkeypatch):
    monkeypatch.setenv("INDEX_FAILS", INDEX)
    output, lines = make(checkout, "TORCH=torch==2.13.0")
    install = f"pip install --retries 1 --index-url {INDEX} torch==2.13.0"
    local = "pip install --quiet --no-index --no-deps torch==2.13.0"
    assert torch_installs(lines) == [install, local, "pip install torch==2.13.0"]
    assert f"{INDEX} cannot be used" in output
    assert (
        output.index("cannot be used")
        < output.index("about 2.7 GB")
        < output.index("install torch==2.13.0\n")
    )


def test_index_that_fails_beside_a_folder_of_wheels(checkout, no_driver, monkeypatch):
    monkeypatch.setenv("INDEX_FAILS", INDEX)
    monkeypatch.setenv("HAS_WHEEL", "1")
    output, lines = make(checkout)
    local, dependencies = torch_installs(lines)[1:]
    assert local == "pip install --quiet --no-index --no-deps torch<=2.15.0"
    assert dependencies == "pip install torch<=2.15.0"
    assert "the PyTorch of a folder" in output and "2.7 GB" not in output


def test_no_network(checkout, monkeypatch):
    monkeypatch.setenv("INDEX_FAILS", "install")
    run = subprocess.run(["make", "build"], cwd=checkout, capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.startswith("fused_moe: PyTorch was not installed (see above).")


@pytest.mark.parametrize("index", ["", "https://mirror/cpu"])
def test_index_of_the_user(checkout, no_driver, index):
    _, lines = make(checkout, f"CPU_INDEX={index}", "TORCH=torch==2.13.0 --pre")
    option = f"--retries 1 --index-url {index} " if index else ""
    assert torch_installs(lines) == [f"pip install {option}torch==2.13.0 --pre"]


def test_with_driver(checkout):
    write(Path(os.environ["SYSTEM"]) / "bin" / "nvidia-smi", "#!/bin/sh\n")
    output, lines = make(checkout)
    assert torch_installs(lines) == ["pip install torch<=2.15.0"]
    assert "about 2.7 GB" in output


def test_compiles_before_pip_does(checkout):
    """After the packages that need no compiling, and not under make's jobserver, which ninja cannot use."""
    _, lines = make(checkout, "-j2")
    compile = "python setup.py --quiet build_ext --inplace"
    packages = "pip install --quiet pytest>=7 hypothesis>=6"
    assert lines[-4:] == [packages, compile, f"pip {EXTRAS}", compile]


@pytest.mark.parametrize("extras", ["test,train,bench", "dev"])
def test_packages_of_extras(extras):
    """The lines of setup.sh that read pyproject.toml."""
    pytest.importorskip("setuptools", "77")
    script = re.search(r"needed=\$\(\S+ -c '(.*?)'", (ROOT / "tools/setup.sh").read_text(), re.S)[1]
    packages = subprocess.check_output([sys.executable, "-c", script, extras], cwd=ROOT, text=True).split()
    names = {re.match(r"[\w-]+", package)[0] for package in packages}
    assert ({"pytest", "tqdm", "tabulate"} if "test" in extras else {"ruff", "build"}) <= names


def test_second_run(checkout):
    make(checkout)
    output, lines = make(checkout)
    assert lines == ["python setup.py --quiet build_ext --inplace"]
    assert output == "MAKEFLAGS= .venv/bin/python setup.py --quiet build_ext --inplace\n"


def test_what_makes_set_up_run_again(checkout, tmp_path):
    make(checkout)
    (checkout / "tools" / "setup.sh").touch()
    assert f"pip {EXTRAS}" in make(checkout)[1]
    moved = checkout.rename(tmp_path / "moved")
    assert f"pip {EXTRAS}" in make(moved)[1]
    shutil.rmtree(moved / ".venv")
    assert "venv -m venv .venv" in make(moved)[1]


def test_torch_of_the_system(checkout):
    """Also of a conda environment, whose Python is $PYTHON."""
    (Path(os.environ["SYSTEM"]) / "torch").write_text("2.12.0\n")
    output, lines = make(checkout)
    assert "venv -m venv --system-site-packages .venv" in lines
    assert torch_installs(lines) == []
    assert "using PyTorch 2.12.0 of .venv" in output


def test_activated_environment(checkout, tmp_path, monkeypatch):
    venv = environment(tmp_path / "an environment", torch="2.10.0+cpu")
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    output, lines = make(checkout)
    assert torch_installs(lines) == []
    assert f"pip {EXTRAS}" in lines
    assert f"using PyTorch 2.10.0+cpu of {venv}" in output
    assert not (checkout / ".venv").exists()
    # VENV comes first.
    _, lines = make(checkout, "VENV=other")
    assert "venv -m venv other" in lines


def test_environment_shared_by_checkouts(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", str(environment(tmp_path / "shared", torch="2.13.0")))
    other = shutil.copytree(checkout, tmp_path / "other")
    for folder in (checkout, other, checkout):
        assert f"pip {EXTRAS}" in make(folder)[1]
    assert f"pip {EXTRAS}" not in make(checkout)[1]


@pytest.mark.parametrize("torch", ["1.13.1", "2.9.1+cu128"])
def test_old_torch_is_not_replaced(checkout, tmp_path, monkeypatch, torch):
    venv = environment(tmp_path / "env", torch=torch)
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    Path(os.environ["LOG"]).write_text("")
    run = subprocess.run(["make", "build"], cwd=checkout, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"fused_moe: expected PyTorch >= 2.10 in {venv}, found {torch}." in run.stderr
    assert Path(os.environ["LOG"]).read_text() == ""


def test_environment_without_pip(checkout, tmp_path, monkeypatch):
    """As `uv venv` makes them."""
    monkeypatch.setenv("VIRTUAL_ENV", str(environment(tmp_path / "env", torch="2.13.0", pip=False)))
    assert make(checkout)[1][0] == "ensurepip"


def test_everything_missing_is_named_at_once(checkout, monkeypatch):
    monkeypatch.setenv("NO_ENSUREPIP", "1")
    monkeypatch.setenv("CXX", "false")
    run = subprocess.run(["make", "build"], cwd=checkout, capture_output=True, text=True)
    assert run.returncode != 0
    assert "fused_moe: on Debian and Ubuntu: sudo apt install python3-venv g++\n" in run.stderr
    assert not (checkout / ".venv").exists()


def test_python_that_is_gone(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/nonexistent/python3")
    run = subprocess.run(["make", "build"], cwd=checkout, capture_output=True, text=True)
    assert run.returncode != 0
    assert "fused_moe: the Python of .venv is gone: remove that folder" in run.stderr
