"""The suite's summary gives every reason for a skip once, with the number of tests that have it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("flags", [(), ("-n", "2"), ("-q",)], ids=["alone", "xdist", "quiet"])
def test_reasons_are_grouped(cpu, flags):
    if "-n" in flags:
        pytest.importorskip("xdist")
    command = [sys.executable, "-m", "pytest", *flags, "-p", "no:cacheprovider", "cuda/test_streams.py"]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    (skipped,) = re.findall(r"(\d+) skipped", run.stdout)
    reasons = re.findall(r"^ +(\d+)  (.*)$", run.stdout, re.M)
    assert reasons == [(skipped, "needs a CUDA device, runs on --device cpu")]
    assert int(skipped) > 1
