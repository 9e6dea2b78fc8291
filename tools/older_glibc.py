"""Lets a library that is linked on a machine of today load under glibc 2.28, the oldest that PyTorch runs on.

    python tools/older_glibc.py FOLDER [COMPILER...]

Linked as usual, a library asks for the newest version of each function that the machine's glibc has. Where
glibc keeps the version of 2.28, too, a stand-in library offers that one to the linker. The stand-ins are
written into FOLDER; the arguments that name them to the linker, before other libraries, are printed.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

GLIBC = (2, 28)
# Where glibc 2.28 has what is in libc.so.6 today.
FORMER = {"libpthread.so.0": "_*pthread_|sem_", "libdl.so.2": "dl", "librt.so.1": "shm_|timer_|mq_|aio_|lio_"}


def older_versions(library: str, compiler: list[str]) -> dict[str, str]:
    """{function: the version that glibc 2.28 has} for each function that `library` has a newer version of."""
    path = subprocess.check_output([*compiler, f"-print-file-name={library}"], text=True).strip()
    symbols = subprocess.check_output(["readelf", "-W", "--dyn-syms", path], text=True)
    newest, older = set(), {}
    for name, default, version in re.findall(r"(\w+)(@@?)GLIBC_([\d.]+)$", symbols, re.MULTILINE):
        number = tuple(map(int, version.split(".")))
        if number <= GLIBC:
            older[name] = max(older.get(name, ()), number)
        elif default == "@@":
            newest.add(name)
    return {name: "GLIBC_" + ".".join(map(str, older[name])) for name in sorted(newest & older.keys())}


def write_stand_ins(folder: Path, compiler: list[str]) -> list[str]:
    """Writes the stand-ins into `folder`; returns the linker's arguments, to come before other libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    offered = {
        "libm.so.6": older_versions("libm.so.6", compiler),
        "libc.so.6": older_versions("libc.so.6", compiler),
    }
    for soname, names in FORMER.items():
        moved = [name for name in offered["libc.so.6"] if re.match(names, name)]
        offered[soname] = {name: offered["libc.so.6"].pop(name) for name in moved}
    arguments = []
    for soname, versions in offered.items():
        code, path = folder / f"{soname}.s", folder / soname
        lines = [f".globl {name}\n.type {name}, @function\n{name}: .byte 0\n" for name in versions]
        code.write_text(".text\n" + "".join(lines) + '.section .note.GNU-stack,"",@progbits\n')
        script = folder / f"{soname}.map"
        script.write_text(
            "".join(
                f"{version} {{ {'; '.join(n for n, v in versions.items() if v == version)}; }};\n"
                for version in sorted(set(versions.values()))
            )
        )
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
        subprocess.check_call([*compiler, *link, str(code), "-o", str(path)])
        arguments.append(str(path))
    return arguments


if __name__ == "__main__":
    print(shlex.join(write_stand_ins(Path(sys.argv[1]), sys.argv[2:] or ["cc"])))
