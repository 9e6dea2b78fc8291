"""setup.py: what is compiled again and when, what an sdist holds, what the library may lean on.

Compilers run on tiny sources in a temporary folder; the real library is looked at, not built. Skipped
where there is no checkout, as when the tests run against an installed wheel.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout")


@pytest.fixture(scope="module")
def build():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("fused_moe_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not shutil.which(module.CC[0]):
        pytest.skip(f"needs a C compiler, found no {module.CC[0]}")
    return module


@pytest.fixture
def project(build, tmp_path):
    """Two sources and a header that one of them includes, written long before any compiler runs."""
    (tmp_path / "a header.h").write_text("enum { ANSWER = 42 };\n")
    (tmp_path / "one.c").write_text('#include "a header.h"\nint one(void) { return ANSWER; }\n')
    (tmp_path / "two.c").write_text("int two(void) { return 2; }\n")
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() - 60,) * 2)
    return {tmp_path / f"{name}.o": [*build.CC, "-c", str(tmp_path / f"{name}.c")] for name in ("one", "two")}


def test_only_what_changed_is_compiled_again(build, project, tmp_path):
    one, two = project
    assert build.compile_objects(project) == [one, two]
    assert build.compile_objects(project) == []

    (tmp_path / "two.c").touch()
    assert build.compile_objects(project) == [two]
    (tmp_path / "a header.h").touch()
    assert build.compile_objects(project) == [one]

    project[two].insert(-2, "-O1")
    assert build.compile_objects(project) == [two]
    two.unlink()
    assert build.compile_objects(project) == [two]
    assert build.compile_objects(project, versions="another compiler") == [one, two]


def test_a_header_that_went_is_noticed(build, project, tmp_path):
    one, _ = project
    build.compile_objects(project)
    (tmp_path / "a header.h").rename(tmp_path / "b.h")
    (tmp_path / "one.c").write_text('#include "b.h"\nint one(void) { return ANSWER; }\n')
    assert build.compile_objects(project) == [one]


def test_a_failed_compilation_is_tried_again(build, project, tmp_path):
    one, two = project
    build.compile_objects(project)
    (tmp_path / "two.c").write_text("int two(void) { return }\n")
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"failed: .*two\.c"):
            build.compile_objects(project)
    (tmp_path / "two.c").write_text("int two(void) { return 3; }\n")
    assert build.compile_objects(project) == [two]
    assert one.exists()


def test_a_build_without_torch_says_what_to_do(build, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--no-build-isolation"):
        build.find_torch()


def test_an_old_torch_is_refused(build, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    with pytest.raises(SystemExit, match=re.escape("needs PyTorch >= 2.10, found 2.9.1+cpu")):
        build.find_torch()


def test_nvcc_is_looked_for_in_cuda_home(build, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert build.find_nvcc() == str(nvcc)


@pytest.mark.parametrize(
    ("release", "usable"), [("11.8", False), ("12.2", False), ("12.3", True), ("13.0", True)]
)
def test_an_old_nvcc_is_named(build, monkeypatch, tmp_path, release, usable):
    """The CPU tier is built without it, and the build says why."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\necho Build\n")
    nvcc.chmod(0o755)
    why = f"{nvcc} is release {release}, expected 12.3 or newer"
    assert build.usable_nvcc() == ((str(nvcc), "") if usable else (None, why))


def test_an_sdist_holds_all_that_a_build_reads(tmp_path):
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip(f"needs setuptools >= 77, found {setuptools.__version__}")
    tracked = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("fused_moe/**/*.py"), *ROOT.glob("tests/**/*.*")]
    tracked = [path for path in tracked if path.suffix != ".pyc"]
    names = {str(path.relative_to(ROOT)) for path in tracked}
    names |= {"fused_moe/py.typed", "setup.py", "pyproject.toml", "Makefile", "tools/setup.sh", "LICENSE"}
    # From a copy, so that no egg-info of the checkout is written or read.
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "runs", "*.so", "*.egg-info")
    )
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=copy, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert names - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc", ".o"))] == []


def test_the_library_leans_on_the_stable_abi_only():
    if not (shutil.which("nm") and shutil.which("readelf")):
        pytest.skip("needs binutils")
    from fused_moe.ops import LIBRARY

    symbols = subprocess.check_output(["nm", "-DC", "--undefined-only", LIBRARY], text=True)
    assert re.findall(r".*\b(?:at|c10|torch)::.*", symbols) == []
    needed = subprocess.check_output(["readelf", "-d", LIBRARY], text=True)
    libraries = set(re.findall(r"NEEDED.*\[(.*?)\.so", needed))
    assert {"libtorch", "libtorch_cpu"} <= libraries
    system = {"libstdc++", "libgcc_s", "libm", "libc", "libdl", "libpthread", "librt", "ld-linux-x86-64"}
    assert libraries - system == {"libtorch", "libtorch_cpu"}
