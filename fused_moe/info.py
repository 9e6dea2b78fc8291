"""What runs here: versions, tiers and why a tier is off. `python -m fused_moe` prints it."""

from __future__ import annotations

import os
import platform

import torch

from .ops import FACTS, HAS_CUDA_KERNELS, HOW_TO_BUILD_CUDA, LIBRARY, ops, unknown_tier

# The calls that are dispatched to a tier where it runs; all others go to the last tier.
LIMITS = {"hopper": "bf16 and fp16, widths that are multiples of 8, rows that are 16-byte aligned"}


class Info(dict):
    """A nested dict that prints as an aligned report."""

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(entries: dict, indent: str = ""):
    for name, value in entries.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name:<{24 - len(indent)}}{value}"


def info() -> Info:
    """Versions, devices, the tiers with the reason why one is off, and how the library was built."""
    from . import __version__

    return Info(
        {
            "fused_moe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "library": str(LIBRARY),
            "FUSED_MOE_TIER": unknown_tier() or os.environ.get("FUSED_MOE_TIER") or "auto",
            "tiers": _tiers(),
            "calls": _calls(),
            "cpu": {
                "capability": torch.backends.cpu.get_cpu_capability(),
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
        limits = f": {LIMITS[name]}" if name in LIMITS else ""
        tiers[name] = f"off: {reason}" if reason else f"on{limits}"
    return tiers


def _calls() -> dict[str, str]:
    """The calls of this process so far, by the tier that they were dispatched to."""
    if not HAS_CUDA_KERNELS:
        return {"none": "this build has no CUDA kernels"}
    return {name: _calls_in_words(ops.cuda_calls(op)) for op, name in enumerate(FACTS["operators"])}


def _calls_in_words(calls: torch.Tensor) -> str:
    *of_tier, reason = calls.tolist()
    words = ", ".join(f"{n} on {name}" for n, name in zip(of_tier, FACTS["tiers"], strict=True))
    return f"{words}, last because {FACTS['reasons'][reason]}" if any(of_tier[1:]) and reason else words


def _cuda_device() -> tuple[int, int, int, int]:
    """status, driver version, runtime version, compute capability"""
    return ops.cuda_device(torch.cuda.current_device())


def _capability(oldest: int, newest: int) -> str:
    return f"{oldest / 10}" if oldest == newest else f"{oldest / 10} or newer"


def _why_cuda_is_off() -> str:
    if not HAS_CUDA_KERNELS:
        return HOW_TO_BUILD_CUDA
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    status, driver, runtime, capability = _cuda_device()
    if status == 0:
        return ""
    driver, runtime = (f"{v // 1000}.{v % 1000 // 10}" for v in (driver, runtime))
    oldest = min(FACTS["capabilities"])
    tiers = zip(FACTS["tiers"], FACTS["capabilities"], strict=True)
    possible = [*reversed([name for name, (low, high) in tiers if low <= capability <= high]), "auto"]
    constants = FACTS["constants"]
    return {
        constants["DRIVER_TOO_OLD"]: f"the driver supports CUDA {driver}, this build's runtime is {runtime}",
        constants["GPU_TOO_OLD"]: (
            f"expected compute capability {_capability(*oldest)}, found {capability / 10}"
        ),
        constants["NO_SUCH_TIER"]: (
            f"FUSED_MOE_TIER is {os.environ.get('FUSED_MOE_TIER')}, expected {' or '.join(possible)}"
        ),
    }.get(status, f"status {status} of fused_moe.h")


def _why_tier_is_off(tier: int, capability: int) -> str:
    """Assumes that CUDA is on. Tiers are numbered best first, and FUSED_MOE_TIER turns off
    those before the one that it names."""
    low, high = FACTS["capabilities"][tier]
    if not low <= capability <= high:
        return f"expected compute capability {_capability(low, high)}, found {capability / 10}"
    asked = os.environ.get("FUSED_MOE_TIER")
    return f"FUSED_MOE_TIER={asked}" if asked in FACTS["tiers"][tier + 1 :] else ""


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"none": "PyTorch sees no CUDA device"}
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {f"cuda:{i}": f"{d.name}, sm_{d.major}{d.minor}" for i, d in enumerate(devices)}
