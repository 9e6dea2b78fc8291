"""A debug build's bound on waits (make build DEBUG=1): it prints who waits for what, and the kernel traps."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "trust" / "endless_wait.cu"
LINES = SOURCE.read_text().splitlines()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not in a checkout"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """endless_wait.cu with waits of a second at most."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", os.environ.get("PATH", "")]))
    if nvcc is None:
        pytest.skip("nvcc not found")
    path = tmp_path_factory.mktemp("debug") / "endless_wait"
    flags = ["-std=c++17", "-O3", "-arch=sm_90a", f"-I{ROOT}/csrc"]
    macros = ["-DFUSED_MOE_DEBUG", "-DFUSED_MOE_WAIT_SECONDS=1"]
    subprocess.run([nvcc, *flags, *macros, "-o", path, SOURCE], check=True)
    return path


@pytest.mark.parametrize(
    ("kind", "function", "what", "values"),
    [
        ("barrier", "wait_for_barrier", "the phase of the mbarrier at shared address", (1, 0)),
        ("word", "wait_for_word", "the word at global address", (7, 0)),
        ("counter", "wait_for_counter", "the counter at global address", (8, 0)),
    ],
)
def test_a_wait_without_end_is_reported(sm90, program, kind, function, what, values):
    """By both warps of both blocks, with the line of the call, then the kernel ends by an error."""
    run = subprocess.run([program, kind], capture_output=True, text=True, timeout=120, check=True)
    *reports, error = run.stdout.splitlines()
    assert error != "no error"
    line = 1 + next(n for n, text in enumerate(LINES) if "/* no thread" in text and n > start_of(function))
    pattern = r"fused_moe: block (\d), warp (\d), lane (\d+) waits in (\w+) \((\S+):(\d+)\) "
    pattern += rf"for {what} 0x\w+: expected (\d+), found (\d+)$"
    found = [re.match(pattern, report).groups() for report in reports]
    assert sorted(report[:3] for report in found) == [(b, w, "0") for b in "01" for w in "01"]
    assert {report[3:] for report in found} == {(function, str(SOURCE), str(line), *map(str, values))}


def start_of(function: str) -> int:
    return next(n for n, text in enumerate(LINES) if f"void {function}(" in text)
