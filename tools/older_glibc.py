"""Lets a library that is linked on a machine of today load under glibc 2.28, the oldest that PyTorch runs on.

    python tools/older_glibc.py FOLDER [COMPILER...]

Linked as usual, a library asks for the newest version of each function that the machine's glibc has.
Stand-in libraries take glibc's place for the linker: they have what glibc 2.28 has, in its versions, and
nothing newer, so that the linker reports a function that came later. The stand-ins are written into FOLDER;
the arguments that name them to the linker, before other libraries, are printed.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

GLIBC = (2, 28)
# Where glibc 2.28 has what is in libc.so.6 today.
FORMER = {"libpthread.so.0": "_*pthread_|sem_", "libdl.so.2": "dl", "librt.so.1": "shm_|timer_|mq_|aio_|lio_"}


class Symbol(NamedTuple):
    version: str  # that of glibc 2.28
    type: str  # for the assembler
    moved: bool  # a newer version exists, as it does for everything that has moved into libc.so.6 since


def older_versions(library: str, compiler: list[str]) -> dict[str, Symbol]:
    """{name: symbol} for all that `library` has and glibc 2.28 has, too."""
    path = subprocess.check_output([*compiler, f"-print-file-name={library}"], text=True).strip()
    symbols = subprocess.check_output(["readelf", "-W", "--dyn-syms", path], text=True)
    defaults, older, types = {}, {}, {}
    for kind, name, default, version in re.findall(
        r" (FUNC|IFUNC|OBJECT) .* (\w+)(@@?)GLIBC_([\d.]+)$", symbols, re.MULTILINE
    ):
        number = tuple(map(int, version.split(".")))
        if default == "@@":
            defaults[name] = number
        if number <= GLIBC:
            older[name] = max(older.get(name, ()), number)
        types[name] = "object" if kind == "OBJECT" else "function"
    found = {}
    for name in sorted(defaults.keys() & older.keys()):
        moved = defaults[name] > GLIBC
        version = older[name] if moved else defaults[name]
        found[name] = Symbol("GLIBC_" + ".".join(map(str, version)), types[name], moved)
    return found


def write_stand_ins(folder: Path, compiler: list[str]) -> list[str]:
    """Writes the stand-ins into `folder`; returns the linker's arguments, to come before other libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    offered = {
        "libm.so.6": older_versions("libm.so.6", compiler),
        "libc.so.6": older_versions("libc.so.6", compiler),
    }
    for soname, names in FORMER.items():
        moved = [
            name for name, symbol in offered["libc.so.6"].items() if symbol.moved and re.match(names, name)
        ]
        offered[soname] = {name: offered["libc.so.6"].pop(name) for name in moved}
    # Kept although only an archive that comes later, libcudart_static, needs some of them.
    arguments = ["-Wl,--no-as-needed"]
    for soname, symbols in offered.items():
        code, path = folder / f"{soname}.s", folder / soname
        lines = [
            f".globl {name}\n.type {name}, @{symbol.type}\n.size {name}, 1\n{name}: .byte 0\n"
            for name, symbol in symbols.items()
        ]
        code.write_text(".text\n" + "".join(lines) + '.section .note.GNU-stack,"",@progbits\n')
        script = folder / f"{soname}.map"
        versions = sorted({symbol.version for symbol in symbols.values()})
        names = {v: "; ".join(n for n, symbol in symbols.items() if symbol.version == v) for v in versions}
        script.write_text("".join(f"{version} {{ {names[version]}; }};\n" for version in versions))
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-Xlinker", f"--version-script={script}"]
        subprocess.check_call([*compiler, *link, str(code), "-o", str(path)])
        arguments.append(str(path))
    return arguments


if __name__ == "__main__":
    print(shlex.join(write_stand_ins(Path(sys.argv[1]), sys.argv[2:] or ["cc"])))
