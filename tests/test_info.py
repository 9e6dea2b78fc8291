"""fused_moe.info() and python -m fused_moe: the tiers that run, and why one is off."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fused_moe
from fused_moe.oldest import OLDEST_TORCH
from fused_moe.ops import FACTS, HAS_CUDA_KERNELS

STATUSES = "DRIVER_TOO_OLD", "UNSUPPORTED_GPU", "NO_SUCH_TIER"
OLD_DRIVER, OTHER_GPU, NO_TIER = (FACTS["constants"][name] for name in STATUSES)


@pytest.mark.quick
def test_info_tells_versions_tiers_and_threads(device):
    """Versions, the library's file, the tiers and the CPU's threads."""
    info = fused_moe.info()
    assert info["fused_moe"] == fused_moe.__version__
    assert info["torch"] == torch.__version__
    assert Path(info["library"]).exists()
    assert info["tiers"]["cpu"] == "on"
    assert info["cpu"]["threads"] == torch.get_num_threads()


def test_info_tells_what_runs_bfloat16_gemms_on_the_cpu(cpu):
    """The CPU's own instructions, if it has them and the compiler knows them."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        pytest.skip("only Linux on x86-64 tells the CPU's instructions in /proc/cpuinfo")
    compiler = FACTS["build"]["c_compiler"]
    if "clang" in compiler or int(re.findall(r"(\d+)\.\d+", compiler)[-1]) < 11:
        pytest.skip(f"the library was compiled by {compiler}, not by gcc 11 or newer")
    flags = set(cpuinfo.read_text().split()) - (set() if torch.backends.mkl.is_available() else {"amx_bf16"})
    expected = {"avx512_bf16": "AVX512_BF16", "amx_bf16": "AMX"}
    found = fused_moe.info()["cpu"]["bfloat16 GEMMs"]
    assert found == next((expected[flag] for flag in ("amx_bf16", "avx512_bf16") if flag in flags), "float32")


def test_info_tells_how_it_was_built(device):
    """The compilers and targets, from the library itself."""
    build = fused_moe.info()["build"]
    compilers = {"c_compiler", "cxx_compiler", "nvcc", "gpu_targets", "debug"}
    assert compilers | {"abi_target", "torch"} <= build.keys()
    assert (build["nvcc"] == "none") == (not HAS_CUDA_KERNELS)


def test_the_installed_version_is_the_packages(device):
    """pip and import agree on the version."""
    try:
        installed = version("fused_moe")
    except PackageNotFoundError:
        pytest.skip("fused_moe is imported from a folder, not installed")
    assert installed == fused_moe.__version__


def test_info_says_why_cuda_is_off(device):
    """A tier that is off has a reason: the first thing missing in build or device."""
    tiers = fused_moe.info()["tiers"]
    assert list(tiers) == ["cpu", "cuda", "portable", "hopper"]
    if not HAS_CUDA_KERNELS:
        expected = (
            "off: this build has no CUDA kernels: put nvcc on PATH or set CUDA_HOME, and build it again"
        )
    elif torch.version.cuda is None:
        expected = "off: this PyTorch was built without CUDA"
    elif not torch.cuda.is_available():
        expected = "off: PyTorch sees no CUDA device"
    else:
        assert tiers["cuda"] == "on" and tiers["portable"].startswith("on")
        return
    assert [tiers[name] for name in ("cuda", "portable", "hopper")] == [expected] * 3


def with_device(monkeypatch, *found):
    """info() finds a GPU for which cuda_device returns this status, driver, runtime and capability."""
    module = sys.modules["fused_moe.info"]
    reasons = ["it runs", "a width is not a multiple of 8"]
    fake = SimpleNamespace(
        cuda_device=lambda index: found,
        cuda_problem=module.ops.cuda_problem,
        cuda_calls=lambda op: torch.tensor([12, 3 * op, int(op > 0)]),
    )
    monkeypatch.setattr(module, "ops", fake)
    monkeypatch.setattr(module, "HAS_CUDA_KERNELS", True)
    monkeypatch.setattr(module, "FACTS", FACTS | {"reasons": reasons})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: divmod(found[-1], 10))
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
        (
            "auto",
            (OTHER_GPU, 13000, 13000, 75),
            "off: expected a GPU of compute capability 8.0 or newer, ",
            None,
        ),
        (
            "auto",
            (OLD_DRIVER, 12040, 13000, 90),
            "off: expected an NVIDIA driver for CUDA 13 (580 or newer), ",
            None,
        ),
        (
            "hopper",
            (NO_TIER, 13000, 13000, 80),
            "off: FUSED_MOE_TIER is hopper, expected auto or portable on",
            None,
        ),
        (
            "x",
            (NO_TIER, 13000, 13000, 90),
            "off: FUSED_MOE_TIER is x, expected auto or hopper or portable",
            None,
        ),
    ],
)
def test_tiers_of_a_gpu(cpu, monkeypatch, tier, found, cuda, hopper):
    """Each tier, from the device's properties. What turns CUDA off turns Hopper off."""
    monkeypatch.setenv("FUSED_MOE_TIER", tier)
    tiers = with_device(monkeypatch, *found)._tiers()
    assert tiers["cpu"] == "on"
    assert tiers["cuda"].startswith(cuda)
    assert tiers["portable"] == (
        "on: every call that hopper does not take" if cuda == "on" else tiers["cuda"]
    )
    assert tiers["hopper"].startswith(hopper or cuda)


def test_a_tier_that_is_not_in_the_build(cpu, monkeypatch):
    """FUSED_MOE_ARCHS=compute_80, say: Hopper's GPUs run the portable tier."""
    module = with_device(monkeypatch, 0, 13000, 13000, 90)
    monkeypatch.setattr(module, "FACTS", FACTS | {"capabilities": [[0, -1], [80, 2**31 - 1]]})
    tiers = module._tiers()
    assert tiers["hopper"] == "off: FUSED_MOE_ARCHS left it out of this build"
    assert tiers["portable"].startswith("on")


def test_a_tier_of_which_no_words_tell(cpu, monkeypatch):
    """A new tier without an entry in TAKES is on all the same."""
    module = with_device(monkeypatch, 0, 13000, 13000, 90)
    monkeypatch.delitem(module.TAKES, "hopper")
    monkeypatch.delenv("FUSED_MOE_TIER", raising=False)
    assert module._tiers()["hopper"] == "on"


def run_python(code: str, **changes) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(Path(fused_moe.__file__).parents[1])} | changes
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_an_unknown_tier_is_told_without_a_gpu(cpu):
    """A warning of the import, which CPU tensors do not mind, and an entry of the report."""
    code = "import fused_moe; print(fused_moe.info()['FUSED_MOE_TIER'])"
    run = run_python(code, FUSED_MOE_TIER="nonsense")
    expected = "expected FUSED_MOE_TIER to be portable or hopper or auto, found nonsense"
    assert run.returncode == 0 and run.stdout.strip() == expected, run.stderr
    assert f"UserWarning: fused_moe: {expected}; calls with CUDA tensors will fail" in run.stderr


def test_a_known_tier_needs_no_gpu(cpu):
    """No warning, and the report names the tier that is asked for. Each has a process that forks with PyTorch
    imported."""
    code = """
import os, warnings, torch
warnings.simplefilter("error", UserWarning)
for tier in ("auto", "hopper", "portable", ""):
    if os.fork() == 0:
        os.environ["FUSED_MOE_TIER"] = tier
        import fused_moe
        found = fused_moe.info()["FUSED_MOE_TIER"]
        assert found == (tier or "auto"), (tier, found)
        os._exit(0)
    assert os.wait()[1] == 0, tier
"""
    run = run_python(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("version", ("1.13.1", "2.9.1+cpu", "2.10.0a0+git", "2.11.0+cu130"))
def test_an_old_pytorch_is_named(cpu, tmp_path, version):
    """One line, before anything else is asked of PyTorch: this one has a version and nothing else."""
    assert FACTS["build"]["abi_target"] == ".".join(map(str, OLDEST_TORCH))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    run = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fused_moe")
    expected = f"ImportError: fused_moe: expected PyTorch 2.10 or newer, found {version} at {tmp_path}/torch"
    assert run.returncode != 0
    old = tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH
    assert (run.stderr.splitlines()[-1] == expected) == old, run.stderr


def test_a_checkout_that_is_not_built_is_named(cpu, tmp_path):
    """Also where fused_moe is installed, but Python was started in a checkout."""
    package = Path(fused_moe.__file__).parent
    shutil.copytree(package, tmp_path / "fused_moe", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    run = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fused_moe")
    expected = f"ImportError: fused_moe is not built: {tmp_path}/fused_moe/_ops.so is missing. Build it in"
    assert run.returncode != 0 and run.stderr.splitlines()[-1].startswith(expected), run.stderr


def test_the_import_is_small(cpu):
    """What `import fused_moe` adds to `import torch`: its own modules, and none of PyTorch or Python. The
    adapters, the picture and what they need (DTensor, inductor, argparse) come when they are asked for."""
    code = """
import sys, torch
before = set(sys.modules)
import fused_moe
print(*sorted(set(sys.modules) - before))
"""
    run = run_python(code)
    own = "activation adapters balance checks clipping composed counting expert_bias finding flops"
    own += " fp8 fp8_shares fp8_training function gate info"
    own += (
        " kept_dtypes load_text lora losses main_grad module namespace oldest ops overlap padding paths plan"
    )
    own += " quantized"
    parts = "computing copies formats loaders quantizing refreshing sharding smoothing state tiles weight"
    own += "".join(f" quantized.{name}" for name in parts.split())
    own += " reference replay resetting routed upcycling version widths"
    assert run.stdout.split() == ["fused_moe", *(f"fused_moe.{name}" for name in own.split())], run.stderr


DRIVER = """
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
"""


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (12040, "one for CUDA 12.4: update it, or build fused_moe with a CUDA 12 toolkit"),
        (11080, "one for CUDA 11.8: update it, or build fused_moe with a CUDA 11 toolkit"),
        (0, "no driver: update it"),
    ],
)
def test_an_old_driver_is_named(cpu, tmp_path, version, found):
    """The CUDA runtime inside the library refuses a driver of an older major version. The driver here is a
    library that reports its version and does nothing else."""
    if not HAS_CUDA_KERNELS:
        pytest.skip("this build has no CUDA kernels")
    if not shutil.which("cc"):
        pytest.skip("cc is missing")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", f"-DVERSION={version}", source, "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(command, check=True)
    code = """
from fused_moe.ops import ops
found = ops.cuda_device(0)
print(found[2], ops.cuda_problem(*found))
"""
    run = run_python(code, LD_LIBRARY_PATH=str(tmp_path))
    runtime, _, problem = run.stdout.strip().partition(" ")
    major = int(runtime) // 1000
    first = {12: " (525 or newer)", 13: " (580 or newer)"}.get(major, "")
    if version // 1000 >= major:
        pytest.skip(f"a driver of CUDA {version // 1000} is no older than the runtime's CUDA {major}")
    assert problem == f"expected an NVIDIA driver for CUDA {major}{first}, found {found}", run.stderr


@pytest.mark.parametrize(
    ("tier", "found", "fp8", "int8"),
    [
        ("auto", (0, 13000, 13000, 90), "on", "on"),
        (
            "auto",
            (0, 13000, 13000, 80),
            "on for CPU tensors, as codes for CUDA tensors: expected compute capability 9.0, found 8.0",
            "on",
        ),
        (
            "portable",
            (0, 13000, 13000, 90),
            "on for CPU tensors, as codes for CUDA tensors: FUSED_MOE_TIER=portable",
            "on",
        ),
        ("auto", (OTHER_GPU, 13000, 13000, 75), *["on for CPU tensors, cuda is off"] * 2),
    ],
)
def test_info_tells_where_each_compute_runs(cpu, monkeypatch, tier, found, fp8, int8):
    """How quantised weights may be multiplied, from the device's properties."""
    monkeypatch.setenv("FUSED_MOE_TIER", tier)
    modes = with_device(monkeypatch, *found)._compute()
    assert modes == {"codes": int8, "fp8": fp8, "int8": int8, "int8_smooth": int8, "auto": int8}


def test_info_tells_the_calls_of_each_tier(cpu, monkeypatch):
    """One entry per operator with several tiers, with the last reason for a tier other than the best."""
    module = with_device(monkeypatch, 0, 13000, 13000, 90)
    assert module._calls() == {
        "grouped_mm": "12 on hopper, 0 on portable",
        "up_gate": "12 on hopper, 3 on portable, last because a width is not a multiple of 8",
        "down_dgrad": "12 on hopper, 6 on portable, last because a width is not a multiple of 8",
        "wgrad": "12 on hopper, 9 on portable, last because a width is not a multiple of 8",
        "router_logits": "12 on hopper, 12 on portable, last because a width is not a multiple of 8",
        "router_dgrad": "12 on hopper, 15 on portable, last because a width is not a multiple of 8",
    }
    monkeypatch.setattr(module.ops, "cuda_calls", lambda op: torch.tensor([0, 0, 0]))
    assert module._calls() == {"none": "this process has run no GEMM on a GPU yet"}
    monkeypatch.setattr(module, "HAS_CUDA_KERNELS", False)
    assert module._calls() == {"none": "this build has no CUDA kernels"}


def test_the_calls_on_the_cpu_are_not_counted(cpu):
    """cuda_calls counts the calls of CUDA tiers only, and checks the operator's index."""
    ops, indices = torch.ops.fused_moe, range(len(FACTS["operators"]))
    before = [ops.cuda_calls(op).tolist() for op in indices]
    assert {len(calls) for calls in before} == {len(FACTS["tiers"]) + 1}
    fused_moe.grouped_mm(torch.ones(2, 8), torch.ones(1, 8, 8), torch.tensor([2], dtype=torch.int32))
    assert [ops.cuda_calls(op).tolist() for op in indices] == before
    with pytest.raises(RuntimeError, match="cuda_calls"):
        ops.cuda_calls(len(indices))


@pytest.mark.quick
def test_the_facts_of_the_library(device):
    """The facts that Python and the tests read from the library."""
    assert FACTS["operators"] == [
        *("grouped_mm", "up_gate", "down_dgrad", "wgrad"),
        *("router_logits", "router_dgrad"),
    ]
    assert FACTS["tiers"] == ["hopper", "portable"] and len(FACTS["capabilities"]) == 2
    assert bool(FACTS["reasons"]) == HAS_CUDA_KERNELS
    assert FACTS["constants"]["TILE_ROWS"] == 128


def test_devices_are_read_again(device):
    """cuda_reset is safe at any time, on any build."""
    before = fused_moe.info()["tiers"]
    torch.ops.fused_moe.cuda_reset()
    assert fused_moe.info()["tiers"] == before


def test_info_follows_the_number_of_threads(cpu, threads):
    """info() caches nothing."""
    threads(1)
    assert fused_moe.info()["cpu"]["threads"] == 1


def test_info_prints_every_entry(device):
    """Each entry begins a line, nested ones indented, and goes on below where it is long."""
    info = fused_moe.info()
    text = " ".join(str(info).split())
    for name, value in info.items():
        assert name in text
        for inner, entry in value.items() if isinstance(value, dict) else ():
            assert " ".join(f"{inner} {entry}".split()) in text, inner


def test_the_report_fits_a_terminal():
    """80 columns, but for what has no space to break at."""
    long = {"tiers": {"cuda": "off: " + "a reason of many words " * 9}, "library": "/a/long-path" * 9}
    tiers, first, *others, library = str(sys.modules["fused_moe.info"].Info(long)).splitlines()
    assert (tiers, library.split()) == ("tiers", ["library", "/a/long-path" * 9])
    assert first.startswith("  cuda" + " " * 18 + "off: a reason") and len(first) <= 80
    assert others and all(line.startswith(" " * 24) and len(line) <= 80 for line in others)


def test_the_public_names(device):
    """Every public name exists, and the reference has the functions and the layer."""
    for name in fused_moe.__all__:
        assert hasattr(fused_moe, name), name
    own = {
        "Fp8Shares",
        "Fp8Weights",
        "LoRA",
        "LoadReport",
        "ModelLoadReport",
        "Plan",
        "QuantizedWeight",
        "RouterLosses",
        "Routes",
        "add_lora",
        "balance",
        "clip_grad_norm_",
        "enable_fp8",
        "fp8_shares",
        "fp8_weights",
        "info",
        "load_lora_state_dict",
        "load_report",
        "lora_state_dict",
        "merge_lora",
        "path",
        "quantize",
        "record_routing",
        "reference",
        "refresh_weights",
        "remove_lora",
        "replay_routing",
        "set_lora",
        "smooth_from",
        "upcycle",
    }
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
    """The adapter of a missing package says what to install."""
    for name in [name for name in sys.modules if name.startswith(f"{host}.")]:
        monkeypatch.delitem(sys.modules, name)  # where another test has loaded it
    monkeypatch.setitem(sys.modules, host, None)
    monkeypatch.delitem(sys.modules, f"fused_moe.{host}", raising=False)
    with pytest.raises(ImportError, match=f"^fused_moe.{host} needs .*{host}"):
        importlib.import_module(f"fused_moe.{host}")
