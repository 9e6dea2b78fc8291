"""Reads a library's machine code, for tools/compare_sass.py and tests/test_cuda_build.py.

Needs cuobjdump and nvdisasm: a CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

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


def lines_of(tool: str, *arguments, folder=None) -> Iterator[str]:
    """The lines that cuobjdump or nvdisasm prints, as they come: there are up to a gigabyte of them."""
    found = find_cuobjdump()
    if found is None:
        raise FileNotFoundError(MISSING)
    path = found[1]
    command = [shutil.which(tool, path=path), *map(str, arguments)]
    environ = os.environ | {"PATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=folder) as process:
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def targets(library) -> tuple[set[str], set[str]]:
    """The architectures of a library's machine code and of its PTX."""
    elf = "".join(lines_of("cuobjdump", "--list-elf", library))
    ptx = "".join(lines_of("cuobjdump", "--list-ptx", library))
    return (set(re.findall(r"\.(sm_\w+)\.cubin", elf)), set(re.findall(r"\.(sm_\w+)\.ptx", ptx)))


@cache
def resources(library) -> dict[tuple[str, str], dict[str, int]]:
    """{(architecture, mangled kernel): {"REG": .., "STACK": .., "SHARED": .., "LOCAL": ..}}"""
    found, arch = {}, ""
    lines = lines_of("cuobjdump", "--dump-resource-usage", library)
    for line in lines:
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            found[arch, match[1]] = {n: int(v) for n, v in re.findall(r"(\w+):(\d+)", next(lines))}
    return found


def kernels(library) -> Iterator[tuple[str, str, list[str]]]:
    """(architecture, mangled kernel, lines of its instructions and their encodings)"""
    arch, name, lines = "", "", []
    for line in lines_of("cuobjdump", "--dump-sass", library):
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


def machine_code(library, arch: str) -> Iterator[tuple[str, bytes]]:
    """(mangled kernel, its code): the sections .text.KERNEL of the library's cubins, which are 64-bit ELF."""
    with TemporaryDirectory() as folder:
        for _ in lines_of("cuobjdump", "--extract-elf", f".{arch}.", Path(library).resolve(), folder=folder):
            pass
        for elf in map(Path.read_bytes, Path(folder).iterdir()):
            (table,) = struct.unpack_from("<Q", elf, 40)
            size, count, names = struct.unpack_from("<3H", elf, 58)
            sections = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
            for name, _, _, _, code, length in sections:
                name += sections[names][4]
                name = elf[name : elf.index(b"\0", name)].decode()
                if name.startswith(".text."):
                    yield name.removeprefix(".text."), elf[code : code + length]


def instructions(library, arch: str, names: Iterable[str]) -> dict[str, Counter[str]]:
    """{mangled kernel: counts of its instructions} of these kernels. Each counts under its name, such as STG,
    and under its name with modifiers, such as STG.E.128. One that signals gsb0 counts as "HGMMA.. gsb0", too.
    nvdisasm takes 20 us for an instruction: it gets each encoding of 16 bytes once, a third of them all."""
    encodings, names = defaultdict(Counter), set(names)
    for kernel, code in machine_code(library, arch):
        if kernel in names:
            encodings[kernel].update(struct.iter_unpack("16s", code))
    decoded = {encoding: "" for counts in encodings.values() for encoding in counts}
    pattern = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
    with TemporaryDirectory() as folder:
        binary = Path(folder, "code")
        binary.write_bytes(b"".join(code for (code,) in decoded))
        lines = lines_of("nvdisasm", "--binary", "SM" + arch.removeprefix("sm_"), binary)
        lines = ((line, match) for line in lines if (match := pattern.match(line)))
        for encoding, (line, match) in zip(decoded, lines, strict=True):
            decoded[encoding] = f"{match[1]} gsb0" if "gsb0" in line else match[1]
    found = {}
    for kernel, counts in encodings.items():
        whole, found[kernel] = Counter(), Counter()
        for encoding, times in counts.items():
            whole[decoded[encoding]] += times
        for instruction, times in whole.items():
            for name in {re.match("[A-Z0-9]+", instruction)[0], instruction.partition(" ")[0], instruction}:
                found[kernel][name] += times
    return found
