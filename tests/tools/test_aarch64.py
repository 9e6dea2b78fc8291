"""tools/aarch64.py: the variables that it sets. With the cross compiler installed, the CPU kernels compile
without warnings, and a library asks for aarch64's oldest glibc. No test downloads, or runs aarch64 code."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "aarch64.py"
if not SCRIPT.exists():
    pytest.skip("not in a checkout", allow_module_level=True)


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


aarch64 = load(SCRIPT)
CC = aarch64.COMPILERS["CC"]
needs_compiler = pytest.mark.skipif(
    not shutil.which(CC), reason=f"{CC} is missing (Debian package: g++-aarch64-linux-gnu)"
)


@pytest.fixture
def build(monkeypatch):
    pytest.importorskip("setuptools", "77")
    monkeypatch.chdir(ROOT)
    return load(ROOT / "setup.py")


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Records the wheels that are asked for. Each has the runtime's library."""
    requirements = []

    def unpacked(requirement: str) -> Path:
        requirements.append(requirement)
        library = tmp_path / requirement / "nvidia/cu13/lib/libcudart_static.a"
        library.parent.mkdir(parents=True)
        library.touch()
        return tmp_path / requirement

    monkeypatch.setattr(aarch64, "unpacked", unpacked)
    monkeypatch.setattr(aarch64.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    return requirements


def test_without_nvcc(cpu, asked, tmp_path):
    found = aarch64.environment({"find_nvcc": lambda: (None, "nvcc not found")})
    assert found == aarch64.COMPILERS | {
        "PYTHONPATH": str(tmp_path / "torch==2.13.0"),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    assert asked == ["torch==2.13.0"]


def test_with_nvcc(cpu, build, asked, monkeypatch, tmp_path):
    """The runtime has nvcc's release. Flags come after those that the user has set."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho '#$ TOP=/toolkit/bin/..' >&2\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    monkeypatch.setenv("LDFLAGS", "-s")
    found = aarch64.environment({"find_nvcc": lambda: (str(nvcc), "release 13.0"), "release": build.release})
    assert asked == ["torch==2.13.0", "nvidia-cuda-runtime==13.0.*"]
    assert found["NVCC_CCBIN"] == "aarch64-linux-gnu-g++"
    include = "/toolkit/bin/../include"
    assert found["NVCC_APPEND_FLAGS"] == f"-lineinfo -I{include} -isystem {include}/cccl"
    assert found["LDFLAGS"] == f"-s -L{tmp_path}/nvidia-cuda-runtime==13.0.*/nvidia/cu13/lib"


@needs_compiler
@pytest.mark.parametrize("source", sorted((ROOT / "csrc/cpu").glob("*.c")), ids=lambda path: path.name)
def test_the_cpu_kernels_compile(cpu, build, source, tmp_path):
    flags = ["-std=gnu11", *build.COMMON, *build.C_MATH, "-Werror"]
    subprocess.check_call([CC, *flags, "-c", source, "-o", tmp_path / "object.o"])


@needs_compiler
def test_a_library_is_linked_for_the_oldest_glibc(cpu, tmp_path):
    """pthread_key_create has moved into libc.so.6, where it has a newer version."""
    code = "#include <pthread.h>\nint made(pthread_key_t *key) { return pthread_key_create(key, 0); }\n"
    (tmp_path / "made.c").write_text(code)
    program = [sys.executable, ROOT / "tools" / "older_glibc.py", tmp_path / "stand_ins", CC]
    stand_ins = subprocess.check_output(program, text=True).split()
    library = tmp_path / "made.so"
    command = [CC, "-shared", "-fPIC", tmp_path / "made.c", *stand_ins, "-Wl,-z,defs", "-o", library]
    subprocess.check_call(command)
    versions = subprocess.check_output(["readelf", "-W", "-V", library], text=True)
    assert {*re.findall(r"Name: GLIBC_([\d.]+)", versions)} == {"2.17"}
