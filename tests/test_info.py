"""fused_moe.info() and python -m fused_moe: what runs here, and why something does not."""

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_moe
from fused_moe.info import REASONS, TIER_OPS

ROOT = Path(__file__).resolve().parents[1]


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


def with_device(monkeypatch, *found):
    """info() finds a GPU of which cuda_device tells this: status, driver, runtime, capability."""
    module = sys.modules["fused_moe.info"]
    width = [*REASONS].index("WIDTH")
    fake = SimpleNamespace(cuda_device=lambda index: found, cuda_calls=lambda op: (12, 3 * op, width))
    monkeypatch.setattr(module, "ops", fake)
    monkeypatch.setattr(module, "HAS_CUDA_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return module


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tier", "found", "cuda", "hopper"),
    [
        ("auto", (0, 13000, 13000, 90), "on", "on: bf16 and fp16, widths that are multiples of 8"),
        ("hopper", (0, 13000, 13000, 90), "on", "on: bf16 and fp16"),
        ("portable", (0, 13000, 13000, 90), "on", "off: FUSED_MOE_TIER=portable"),
        ("auto", (0, 13000, 13000, 80), "on", "off: expected compute capability 9.0, found 8.0"),
        ("auto", (0, 13000, 13000, 100), "on", "off: expected compute capability 9.0, found 10.0"),
        ("auto", (6, 13000, 13000, 75), "off: expected compute capability 8.0 or newer, found 7.5", None),
        ("auto", (5, 12040, 13000, 90), "off: the driver supports CUDA 12.4", None),
        ("hopper", (7, 13000, 13000, 80), "off: FUSED_MOE_TIER is hopper, expected portable or auto", None),
        ("x", (7, 13000, 13000, 90), "off: FUSED_MOE_TIER is x, expected portable, hopper or auto", None),
    ],
)
def test_tiers_of_a_gpu(cpu, monkeypatch, tier, found, cuda, hopper):
    """Each tier, from what the library finds of the device; what turns CUDA off turns Hopper off."""
    monkeypatch.setenv("FUSED_MOE_TIER", tier)
    tiers = with_device(monkeypatch, *found)._tiers()
    assert tiers["cpu"] == "on"
    assert tiers["cuda"] == tiers["portable"] and tiers["cuda"].startswith(cuda)
    assert tiers["hopper"].startswith(hopper or cuda)


def test_info_tells_who_had_the_calls(cpu, monkeypatch):
    """An entry an operator of the Hopper engine, with the last reason of the portable tier."""
    module = with_device(monkeypatch, 0, 13000, 13000, 90)
    assert module._calls() == {
        "grouped_mm": "12 on hopper, 0 on portable",
        "up_gate": "12 on hopper, 3 on portable, last because a width is not a multiple of 8",
        "down_dgrad": "12 on hopper, 6 on portable, last because a width is not a multiple of 8",
        "wgrad": "12 on hopper, 9 on portable, last because a width is not a multiple of 8",
    }
    monkeypatch.setattr(module, "HAS_CUDA_KERNELS", False)
    assert list(module._calls()) == ["none"]


def test_the_calls_on_the_cpu_are_not_counted(cpu):
    """cuda_calls tells of CUDA tiers alone, and takes the operators that there are."""
    before = [torch.ops.fused_moe.cuda_calls(op) for op in range(len(TIER_OPS))]
    fused_moe.grouped_mm(torch.ones(2, 8), torch.ones(1, 8, 8), torch.tensor([2], dtype=torch.int32))
    assert [torch.ops.fused_moe.cuda_calls(op) for op in range(len(TIER_OPS))] == before
    with pytest.raises(RuntimeError, match="cuda_calls"):
        torch.ops.fused_moe.cuda_calls(len(TIER_OPS))


def names_of_enum(text: str, name: str) -> list[str]:
    """The enumerators of a C enum, less FUSED_MOE_."""
    body = re.search(r"typedef enum \{([^}]*)\} " + name + ";", text)[1]
    return re.findall(r"FUSED_MOE_(\w+)", re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL))


@pytest.mark.quick
def test_the_tables_are_those_of_the_header(cpu):
    """Reasons and operators stand in the order of the C enums, whose numbers cuda_calls returns."""
    header = ROOT / "csrc" / "fused_moe.h"
    if not header.exists():
        pytest.skip("not in a checkout")
    text = header.read_text()
    assert list(REASONS) == names_of_enum(text, "FusedMoeTierReason")
    assert [f"OP_{name.upper()}" for name in TIER_OPS] == names_of_enum(text, "FusedMoeTierOp")[:-1]


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


@pytest.mark.quick
@pytest.mark.parametrize("host", ("torchtitan", "transformers"))
def test_a_missing_host_is_named(host, monkeypatch):
    """The adapter of a package that is not there says what to install."""
    for name in [name for name in sys.modules if name.startswith(f"{host}.")]:
        monkeypatch.delitem(sys.modules, name)  # where another test has loaded it
    monkeypatch.setitem(sys.modules, host, None)
    monkeypatch.delitem(sys.modules, f"fused_moe.{host}", raising=False)
    with pytest.raises(ImportError, match=f"^fused_moe.{host} needs .*{host}"):
        importlib.import_module(f"fused_moe.{host}")
