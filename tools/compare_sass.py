"""Compares the machine code of every kernel in two libraries, for changes that must not affect it.

    python tools/compare_sass.py OLD.so NEW.so

Names, line tables and the order of functions are ignored, so a change that only renames passes.
"""

import argparse
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

from sass import MISSING, find_cuobjdump, kernels


def digests(library: Path) -> dict[str, tuple[str, str]]:
    """{architecture and mangled name: (architecture, digest of the instructions and their encodings)}"""
    found = {}
    for arch, name, lines in kernels(library):
        body = "\n".join(re.sub(r"`\([^)]*\)", "`(label)", line) for line in lines)
        found[f"{arch} {name}"] = (arch, sha256(body.encode()).hexdigest())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    if find_cuobjdump() is None:
        raise SystemExit(f"compare_sass: {MISSING}")
    before, after = digests(options.old), digests(options.new)
    old, new = Counter(before.values()), Counter(after.values())
    for name, digest in after.items():
        if digest in (new - old):
            print(f"not in {options.old}: {name}")
    same = (old & new).total()
    print(f"{old.total()} kernels before, {new.total()} after, {same} with the same machine code")
    raise SystemExit(old != new)


if __name__ == "__main__":
    main()
