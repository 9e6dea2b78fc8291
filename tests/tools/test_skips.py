"""The suite's summary gives every reason for a skip once, with the number of tests that have it. Tests that
need a CUDA device are one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SKIPS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_skipped(i):
    pytest.skip("for a reason")

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(4))
def test_on_gpus(i):
    pass
"""


@pytest.mark.parametrize("flags", [("-n", "2"), ("-q",)], ids=["xdist", "quiet"])
def test_reasons_are_grouped(cpu, tmp_path, flags):
    if "-n" in flags:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/test_not_collected.py").write_text("raise AssertionError")
    command = [sys.executable, "-m", "pytest", *flags, "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert re.findall(r"^ +(\d+)  (.*)$", run.stdout, re.M) == [("3", "for a reason")]
    (line,) = re.findall(r"^.* need a CUDA device.*$", run.stdout, re.M)
    assert line == "4 tests, and tests/cuda, need a CUDA device: run with --device cuda"
    assert "3 skipped" in run.stdout
