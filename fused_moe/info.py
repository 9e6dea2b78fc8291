"""What runs here: versions, tiers and why a tier is off. `python -m fused_moe` prints it."""

from __future__ import annotations

import os
import platform
import textwrap

import torch

from .ops import FACTS, HAS_CUDA_KERNELS, HOW_TO_BUILD_CUDA, LIBRARY, ops, unknown_tier
from .version import __version__

# What each CUDA tier takes where it runs; a call that the first does not take goes to the last.
TAKES = {
    "hopper": "bf16 and fp16, widths that are multiples of 8",
    "portable": "every call that hopper does not take",
}
WIDTH, INDENT = 80, 24  # of the printed report, and of its column of names


class Info(dict):
    """What `info` returns: a nested dict that prints as an aligned report of at most 80 columns, but for
    paths."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(entries: dict, indent: str = ""):
    for name, value in entries.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            lines = textwrap.wrap(
                str(value), WIDTH - INDENT, break_long_words=False, break_on_hyphens=False
            ) or [""]
            yield f"{indent}{name:<{INDENT - len(indent)}}{lines[0]}"
            yield from (" " * INDENT + more for more in lines[1:])


def info() -> Info:
    """Reports versions, devices, the tiers with the reason why one is off, and how the library was built.

    Returns:
        A nested dict, which `print` shows as lines: "fused_moe", "torch", "python", "platform", "library",
        "FUSED_MOE_TIER", "tiers", "compute", "calls", "cpu", "gpus" and "build".

    Example:
        >>> fused_moe.info()["tiers"]["cpu"]
        'on'
    """
    return Info(
        {
            "fused_moe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "library": str(LIBRARY),
            "FUSED_MOE_TIER": unknown_tier() or os.environ.get("FUSED_MOE_TIER") or "auto",
            "tiers": _tiers(),
            "compute": _compute(),
            "calls": _calls(),
            "cpu": {
                "capability": torch.backends.cpu.get_cpu_capability(),
                "bfloat16 GEMMs": FACTS["cpu_bf16"],
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
            },
            "gpus": _gpus(),
            "build": FACTS["build"],
        }
    )


def _tiers() -> dict[str, str]:
    why_not = _why_cuda_is_off()
    tiers = {"cpu": "on", "cuda": f"off: {why_not}" if why_not else "on"}
    capability = 0 if why_not else _cuda_device()[-1]
    for tier in reversed(range(len(FACTS["tiers"]))):
        name = FACTS["tiers"][tier]
        reason = why_not or _why_tier_is_off(tier, capability)
        takes = f": {TAKES[name]}" if name in TAKES else ""
        tiers[name] = f"off: {reason}" if reason else f"on{takes}"
    return tiers


def _calls() -> dict[str, str]:
    """The GEMMs of this process so far, by the CUDA tier that they were dispatched to."""
    if not HAS_CUDA_KERNELS:
        return {"none": "this build has no CUDA kernels"}
    calls = [ops.cuda_calls(op) for op in range(len(FACTS["operators"]))]
    if not any(of_op[:-1].any() for of_op in calls):
        return {"none": "this process has run no GEMM on a GPU yet"}
    return dict(zip(FACTS["operators"], map(_calls_in_words, calls), strict=True))


def _calls_in_words(calls: torch.Tensor) -> str:
    *of_tier, reason = calls.tolist()
    words = ", ".join(f"{n} on {name}" for n, name in zip(of_tier, FACTS["tiers"], strict=True))
    return f"{words}, last because {FACTS['reasons'][reason]}" if any(of_tier[1:]) and reason else words


def _compute() -> dict[str, str]:
    """Where each `compute` of quantised weights runs."""
    why_not = _why_cuda_is_off()
    on = "on for CPU tensors, cuda is off" if why_not else "on"
    modes = dict.fromkeys(("codes", "fp8", "int8", "int8_smooth", "auto"), on)
    if not why_not and (reason := why_no_fp8()):
        modes["fp8"] = f"on for CPU tensors, as codes for CUDA tensors: {reason}"
    return modes


def _cuda_device() -> tuple[int, int, int, int]:
    """status, driver version, runtime version, compute capability"""
    return ops.cuda_device(torch.cuda.current_device())


def _why_cuda_is_off() -> str:
    if not HAS_CUDA_KERNELS:
        return HOW_TO_BUILD_CUDA
    return _why_no_gpu() or ops.cuda_problem(*_cuda_device())


def why_no_fp8(index: int | None = None) -> str:
    """Why a GPU, the current one by default, does not multiply FP8 by FP8; empty if it does. It calls no
    operator, since weights are also made under dispatch modes."""
    if reason := ("" if HAS_CUDA_KERNELS else HOW_TO_BUILD_CUDA) or _why_no_gpu():
        return reason
    major, minor = torch.cuda.get_device_capability(index)
    return _why_tier_is_off(FACTS["tiers"].index("hopper"), 10 * major + minor)


def _why_no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    return "PyTorch sees no CUDA device" if torch.version.cuda else "this PyTorch was built without CUDA"


def _why_tier_is_off(tier: int, capability: int) -> str:
    """Assumes that CUDA is on. Tiers are numbered best first, and FUSED_MOE_TIER turns off
    those before the one that it names."""
    low, high = FACTS["capabilities"][tier]
    if low > high:
        return "FUSED_MOE_ARCHS left it out of this build"
    if not low <= capability <= high:
        least = f"{low / 10}" if low == high else f"{low / 10} or newer"
        return f"expected compute capability {least}, found {capability / 10}"
    asked = os.environ.get("FUSED_MOE_TIER")
    return f"FUSED_MOE_TIER={asked}" if asked in FACTS["tiers"][tier + 1 :] else ""


def _gpus() -> dict[str, str]:
    if reason := _why_no_gpu():
        return {"none": reason}
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {f"cuda:{i}": f"{d.name}, sm_{d.major}{d.minor}" for i, d in enumerate(devices)}
