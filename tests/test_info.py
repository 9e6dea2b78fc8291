"""fused_moe.info() and python -m fused_moe: what runs here, and why something does not."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

import fused_moe


@pytest.mark.quick
def test_info_tells_versions_tiers_and_threads(device):
    """Versions, the library's file, the tiers and the CPU's threads."""
    info = fused_moe.info()
    assert info["fused_moe"] == fused_moe.__version__
    assert info["torch"] == torch.__version__
    assert Path(info["library"]).exists()
    assert info["tiers"]["cpu"] == "on"
    assert info["cpu"]["threads"] == torch.get_num_threads()


def test_info_tells_how_it_was_built(device):
    """The compilers and targets, from _host."""
    pytest.importorskip("fused_moe._host", reason="fused_moe._host was not built for this Python")
    assert {"c_compiler", "cxx_compiler", "gpu_targets", "abi_target"} <= set(fused_moe.info()["build"])


def test_the_installed_version_is_the_packages(device):
    """pip and import agree on the version."""
    try:
        installed = version("fused_moe")
    except PackageNotFoundError:
        pytest.skip("fused_moe is imported from a folder, not installed")
    assert installed == fused_moe.__version__


def test_info_says_why_cuda_is_off(device):
    """A tier that is off comes with its reason."""
    cuda = fused_moe.info()["tiers"]["cuda"]
    if device.type == "cuda":
        assert cuda.startswith("on")
    else:
        assert cuda.startswith(("on", "off: "))


def test_info_follows_the_number_of_threads(cpu, threads):
    """info() reads, it does not remember."""
    threads(1)
    assert fused_moe.info()["cpu"]["threads"] == 1


def test_info_prints_every_entry(device):
    """The report has one line an entry, nested ones indented."""
    info = fused_moe.info()
    text = str(info)
    for name, value in info.items():
        assert name in text
        for inner, entry in value.items() if isinstance(value, dict) else ():
            assert any(inner in line and str(entry) in line for line in text.splitlines()), inner


def test_info_works_without_the_host_module(device, monkeypatch):
    """Nothing but the build's facts is missing when _host cannot be imported."""
    monkeypatch.setitem(sys.modules, "fused_moe._host", None)
    build = fused_moe.info()["build"]
    assert "_host" in build["unknown"]


def test_the_public_names(device):
    """Every public name is there, and the reference has the functions' and the layer's."""
    for name in fused_moe.__all__:
        assert hasattr(fused_moe, name), name
    own = {"LoadReport", "Plan", "RouterLosses", "info", "reference"}
    assert set(fused_moe.__all__) - own <= set(fused_moe.reference.__all__)


@pytest.mark.quick
def test_python_m_prints_info(device, tmp_path):
    """python -m fused_moe prints the report and exits with 0, from any folder."""
    env = os.environ | {"PYTHONPATH": str(Path(fused_moe.__file__).parents[1])}  # where it is not installed
    command = [sys.executable, "-m", "fused_moe"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 0, run.stderr
    assert fused_moe.__version__ in run.stdout and "tiers" in run.stdout
