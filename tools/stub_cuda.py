"""Lets a CUDA build of PyTorch be imported where CUDA's libraries are not installed.

    python tools/stub_cuda.py SITE_PACKAGES/torch/lib

writes one stub into that folder for each shared library that PyTorch needs and the machine lacks. A stub has
the SONAME and every symbol that PyTorch asks for, with its version. All its functions return
cudaErrorNoDevice, so PyTorch sees a machine without a GPU. For tests of the CPU tier alone: tools/matrix.sh.
"""

import argparse
import ctypes
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice


def output_of(*command) -> str:
    return subprocess.check_output(command, text=True)


def is_missing(soname: str) -> bool:
    try:
        ctypes.CDLL(soname)
    except OSError:
        return True
    return False


def missing_libraries(libraries: list[Path]) -> dict[str, dict[str, set[str]]]:
    """SONAME -> version ("" without one) -> the symbols that PyTorch wants of it."""
    own = {path.name for path in libraries}
    needed = {name for path in libraries for name in needed_by(path)} - own
    wanted = {soname: defaultdict(set) for soname in sorted(needed) if is_missing(soname)}
    if not wanted:
        return {}
    owner = {}  # of a version
    undefined, defined = set(), set()
    for path in libraries:
        for soname, versions in re.findall(r"File: (\S+)(.*?)(?=File:|\Z)", versions_of(path), re.S):
            owner |= dict.fromkeys(re.findall(r"Name: (\S+)", versions), soname)
        undefined |= set(re.findall(r"^ +U (\S+)$", output_of("nm", "-D", "--undefined-only", path), re.M))
        defined |= set(re.findall(r"^\S+ \w ([^\s@]+)", output_of("nm", "-D", "--defined-only", path), re.M))
    # Finds the symbols of libstdc++ and libc, too. On aarch64 PyTorch wants some of them without a version.
    system = ctypes.CDLL("libstdc++.so.6")
    anywhere = next(iter(wanted))  # where symbols without a version are: the loader does not mind
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        soname = owner.get(version.lstrip("@"), anywhere if not version else None)
        known = name in defined or hasattr(system, name) or re.match("_?Py", name)
        if soname in wanted and not known:
            wanted[soname][version.lstrip("@")].add(name)
    return wanted


def needed_by(library: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-Wd", library))


def versions_of(library: Path) -> str:
    return output_of("readelf", "-WV", library).partition("Version needs section")[2]


def write_stub(folder: Path, soname: str, versions: dict[str, set[str]]) -> None:
    functions = sorted(set().union(*versions.values()))
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "stub.c"), Path(work, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions))
        nodes = (
            f"{v} {{ {''.join(f'{n}; ' for n in sorted(names))}}};\n" for v, names in versions.items() if v
        )
        script.write_text("".join(nodes))
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}"]
        if any(versions):
            options.append(f"-Wl,--version-script={script}")
        subprocess.run(["cc", *options, source, "-o", folder / soname], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="torch/lib")
    folder = parser.parse_args().folder
    stubs = missing_libraries(sorted(folder.glob("*.so*")))
    for soname, versions in stubs.items():
        write_stub(folder, soname, versions)
    print("stubs:", *stubs or ["none"])
