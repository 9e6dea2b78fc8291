"""Runs a command that compiles for aarch64 on a machine of another architecture.

    python tools/aarch64.py COMMAND...

The compilers are Debian's g++-aarch64-linux-gnu, and nvcc with it as the host compiler. The library is linked
against PyTorch and CUDA's runtime from PyPI's wheels for aarch64, unpacked into build/aarch64 once.
"""

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = {"CC": "aarch64-linux-gnu-gcc", "CXX": "aarch64-linux-gnu-g++"}
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")
FOLDER = Path("build/aarch64").absolute()


def unpacked(requirement: str) -> Path:
    """The folder with a package's wheel for aarch64, without its dependencies."""
    folder = FOLDER / re.sub(r"[=.*]+", "-", requirement).strip("-")
    if not folder.exists():
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        options = ["--quiet", "--no-deps", "--no-compile", "--only-binary=:all:", *platforms]
        subprocess.check_call(
            [sys.executable, "-m", "pip", "install", *options, f"--target={folder}", requirement]
        )
    return folder


def environment(setup: dict) -> dict[str, str]:
    """The variables that setup.py and nvcc read. `setup` has setup.py's functions."""
    torch = unpacked("torch==" + importlib.metadata.version("torch").partition("+")[0])
    found = COMPILERS | {"PYTHONPATH": str(torch), "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    nvcc, release = setup["find_nvcc"]()
    if nvcc:
        # For another machine nvcc looks for headers in a folder that PyPI's toolkit lacks. x86-64's are the
        # same.
        dryrun = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
        output = subprocess.check_output(dryrun, stderr=subprocess.STDOUT, text=True)
        include = f"{re.search(r'TOP=(.*)', output)[1]}/include"
        flags = [os.environ.get("NVCC_APPEND_FLAGS", ""), f"-I{include} -isystem {include}/cccl"]
        cudart = unpacked("nvidia-cuda-runtime=={}.{}.*".format(*setup["release"](release)))
        (library,) = cudart.glob("nvidia/*/lib/libcudart_static.a")
        found["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} -L{library.parent}"
        found |= {"NVCC_CCBIN": COMPILERS["CXX"], "NVCC_APPEND_FLAGS": " ".join(flags)}
    return found


if __name__ == "__main__":
    if not all(map(shutil.which, COMPILERS.values())):
        raise SystemExit(
            "found no compiler for aarch64. On Debian and Ubuntu: apt install g++-aarch64-linux-gnu"
        )
    command = sys.argv[1:]
    os.execvpe(command[0], command, os.environ | environment(runpy.run_path("setup.py")))
