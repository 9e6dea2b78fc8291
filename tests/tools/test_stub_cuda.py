"""tools/stub_cuda.py: a library whose dependency is gone loads again, and stub functions return an error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "stub_cuda.py"


def link(folder, name, code, *options):
    source = folder / f"{name.split('.')[0]}.c"
    source.write_text(code)
    command = ["cc", "-shared", "-fPIC", "-w", source, "-o", folder / name, f"-Wl,-soname,{name}", *options]
    subprocess.run(command, check=True)
    return folder / name


def call(library):
    """In a separate process: a loader keeps what it has once loaded."""
    load = f"import ctypes; print(ctypes.CDLL({str(library)!r}).both())"
    return subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)


def test_a_library_without_its_dependency(cpu, tmp_path):
    if not SCRIPT.exists():
        pytest.skip("not in a checkout")
    for tool in ("cc", "nm", "readelf"):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is missing")
    versions = tmp_path / "versions"
    versions.write_text("GONE_1 { versioned; };\n")
    code = "int versioned(void) { return 0; }\nint plain(void) { return 0; }\n"
    gone = link(tmp_path, "libgone.so.1", code, f"-Wl,--version-script={versions}")
    code = "int versioned(void);\nint plain(void);\nint both(void) { return versioned() + plain(); }\n"
    user = link(tmp_path, "libuser.so", code, gone, "-Wl,-rpath,$ORIGIN", "-Wl,-z,now")
    assert call(user).stdout == "0\n"
    gone.unlink()
    assert "libgone.so.1: cannot open shared object file" in call(user).stderr

    for expected in ("stubs: libgone.so.1\n", "stubs: none\n"):
        command = [sys.executable, SCRIPT, tmp_path]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout == expected
    run = call(user)
    assert (run.stdout, run.stderr) == ("200\n", "")  # no word of a missing version
