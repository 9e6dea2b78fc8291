"""Reads a library's machine code with cuobjdump, for tools/compare_sass.py and tests/test_cuda_build.py.

Needs cuobjdump and nvdisasm: a CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

MISSING = (
    "needs cuobjdump and nvdisasm: a CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)


@cache
def find_cuobjdump() -> tuple[str, str] | None:
    """The path of cuobjdump, and a PATH with nvdisasm: from the CUDA toolkit, or from PyPI's packages."""
    folders = [
        *map(str, sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))),
        "/usr/local/cuda/bin",
    ]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=path)
    return (tool, path) if tool and shutil.which("nvdisasm", path=path) else None


def cuobjdump(library, *options: str) -> Iterator[str]:
    """The lines that cuobjdump prints about a library, as they come: there are up to a gigabyte of them."""
    found = find_cuobjdump()
    if found is None:
        raise FileNotFoundError(MISSING)
    tool, path = found
    command = [tool, *options, str(library)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PATH": path}
    ) as process:
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def targets(library) -> tuple[set[str], set[str]]:
    """The architectures of a library's machine code and of its PTX."""
    elf = "".join(cuobjdump(library, "--list-elf"))
    ptx = "".join(cuobjdump(library, "--list-ptx"))
    return (set(re.findall(r"\.(sm_\w+)\.cubin", elf)), set(re.findall(r"\.(sm_\w+)\.ptx", ptx)))


@cache
def resources(library) -> dict[tuple[str, str], dict[str, int]]:
    """{(architecture, mangled kernel): {"REG": .., "STACK": .., "SHARED": .., "LOCAL": ..}}"""
    found, arch = {}, ""
    lines = cuobjdump(library, "--dump-resource-usage")
    for line in lines:
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            found[arch, match[1]] = {n: int(v) for n, v in re.findall(r"(\w+):(\d+)", next(lines))}
    return found


def kernels(library, *options: str) -> Iterator[tuple[str, str, list[str]]]:
    """(architecture, mangled kernel, lines of its instructions and their encodings)"""
    arch, name, lines = "", "", []
    for line in cuobjdump(library, "--dump-sass", *options):
        line = line.strip()
        if line.startswith("/*"):
            if name:
                lines.append(line)
            continue
        if match := re.match(r"arch = (\w+)", line):
            new_arch, new_name = match[1], ""
        elif match := re.match(r"Function : (\S+)", line):
            new_arch, new_name = arch, match[1]
        else:
            continue
        if name:
            yield arch, name, lines
        arch, name, lines = new_arch, new_name, []
    if name:
        yield arch, name, lines


def instructions(library, arch: str, names: Iterable[str]) -> dict[str, Counter[str]]:
    """{mangled kernel: counts of its instructions} of these kernels: nvdisasm takes 20 us for an instruction.
    Each counts under its name, such as STG, and under its name with modifiers, such as STG.E.128. One that
    signals gsb0 counts as "HGMMA.. gsb0", too."""
    found = {}
    chosen = [word for name in names for word in ("--function", name)]
    for _, name, lines in kernels(library, "--gpu-architecture", arch, *chosen):
        counts = found.setdefault(name, Counter())
        for line in lines:
            if match := re.match(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(([A-Z][A-Z0-9]*)[\w.]*)", line):
                counts.update({*match.groups()})
                if "gsb0" in line:
                    counts[f"{match[1]} gsb0"] += 1
    return found
