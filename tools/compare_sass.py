"""Compares the machine code of every kernel in two libraries, for changes that must not touch it.

    python tools/compare_sass.py OLD.so NEW.so

Names, line tables and the order of functions do not count, so a change that only renames passes. Needs cuobjdump
and nvdisasm: a CUDA toolkit, or pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm.
"""

import argparse
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from hashlib import sha256
from pathlib import Path


def find_cuobjdump() -> tuple[str, dict[str, str]]:
    """The tool, and an environment in which it finds nvdisasm."""
    folders = [*map(str, Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")), "/usr/local/cuda/bin"]
    path = os.pathsep.join([*folders, os.environ.get("PATH", "")])
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        raise SystemExit(
            "compare_sass: cuobjdump not found; pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return tool, {**os.environ, "PATH": path}


def kernels(library: Path) -> dict[str, str]:
    """{architecture and mangled name: the instructions and their encodings}"""
    tool, environment = find_cuobjdump()
    command = [tool, "--dump-sass", str(library)]
    dump = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    bodies: dict[str, list[str]] = {}
    arch, body = "", []
    for line in dump.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            body = bodies.setdefault(f"{arch} {match[1]}", [])
        elif re.match(r"\s*/\*", line):
            body.append(re.sub(r"`\([^)]*\)", "`(label)", line.strip()))
    return {name: "\n".join(lines) for name, lines in bodies.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    found = [kernels(options.old), kernels(options.new)]
    old, new = (Counter((n.split()[0], sha256(b.encode()).hexdigest()) for n, b in k.items()) for k in found)
    changed = (new - old).keys()
    for name, body in found[1].items():
        if (name.split()[0], sha256(body.encode()).hexdigest()) in changed:
            print(f"not in {options.old}: {name}")
    print(
        f"{old.total()} kernels before, {new.total()} after, {(old & new).total()} with the same machine code"
    )
    raise SystemExit(old != new)


if __name__ == "__main__":
    main()
