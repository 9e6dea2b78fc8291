"""Programs of benchmarks/, imported and run."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch, cpu):
    """Imports a module of benchmarks/, whose names are no packages'."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FUSED_MOE_TIER", os.environ.get("FUSED_MOE_TIER", "auto"))
    monkeypatch.setenv("FUSED_MOE_SCHEDULE", "")  # restored, whatever a program sets
    monkeypatch.delenv("FUSED_MOE_SCHEDULE")
    before = set(sys.modules)

    def load(name: str):
        if name in ("table", "plot"):
            pytest.importorskip({"table": "tabulate", "plot": "matplotlib"}[name])
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def run(load, tmp_path):
    """Runs a program on the CPU and returns its records."""

    def run(name: str, *flags: str) -> list[dict]:
        path = tmp_path / f"{name}.json"
        load(name).main([*flags, "--device", "cpu", "--repeats", "1", "--json", str(path)])
        return json.loads(path.read_text())

    return run
