"""What runs here: versions, tiers and why a tier is off. `python -m fused_moe` prints it."""

from __future__ import annotations

import os
import platform

import torch

from .ops import HAS_CUDA_KERNELS, LIBRARY, ops

DRIVER_TOO_OLD, GPU_TOO_OLD, NO_SUCH_TIER = 5, 6, 7  # FusedMoeStatus of csrc/fused_moe.h
HOPPER = 90  # compute capability 9.0

# FusedMoeTierReason of csrc/fused_moe.h, in its order: why the portable tier had a call.
REASONS = {
    "ON_HOPPER": "the Hopper tier has it",
    "OTHER_GPU": "the GPU is not of compute capability 9.0",
    "PORTABLE_ASKED": "FUSED_MOE_TIER=portable",
    "OTHER_DTYPE": "the dtype is neither bf16 nor fp16",
    "NO_ROWS": "there is no row",
    "SCORED_INPUT": "the input is multiplied by its scores",
    "WIDTH": "a width is not a multiple of 8",
    "UNALIGNED": "rows or a bias do not lie on 16 bytes",
    "STRIDES": "a weight's strides or address are not what the copy engine reads",
    "TOO_LARGE": "there are more than 2^31 tiles",
}
TIER_OPS = ("grouped_mm", "up_gate", "down_dgrad", "wgrad")


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

    try:
        from ._host import build_info
    except ImportError as error:  # nothing but this report, tests and pictures needs _host
        build = {"unknown": str(error)}
    else:
        build = dict(build_info())
    return Info(
        {
            "fused_moe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "library": str(LIBRARY),
            "tiers": _tiers(),
            "calls": _calls(),
            "cpu": {
                "capability": torch.backends.cpu.get_cpu_capability(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
            },
            "gpus": _gpus(),
            "build": build,
        }
    )


def _tiers() -> dict[str, str]:
    why = _why_cuda_is_off()
    cuda = f"off: {why}" if why else "on"
    why = why or _why_hopper_is_off()
    hopper = f"off: {why}" if why else "on: bf16 and fp16, widths that are multiples of 8, rows on 16 bytes"
    return {"cpu": "on", "cuda": cuda, "portable": cuda, "hopper": hopper}


def _calls() -> dict[str, str]:
    """Of this process so far, by the tier that had them."""
    if not HAS_CUDA_KERNELS:
        return {"none": "this build has no CUDA kernels"}
    return {name: _calls_in_words(*ops.cuda_calls(op)) for op, name in enumerate(TIER_OPS)}


def _calls_in_words(hopper: int, portable: int, reason: int) -> str:
    words = f"{hopper} on hopper, {portable} on portable"
    return f"{words}, last because {[*REASONS.values()][reason]}" if portable else words


def _why_cuda_is_off() -> str:
    if not HAS_CUDA_KERNELS:
        return "this build has no CUDA kernels"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    status, driver, runtime, capability = ops.cuda_device(torch.cuda.current_device())
    if status == 0:
        return ""
    driver, runtime = (f"{v // 1000}.{v % 1000 // 10}" for v in (driver, runtime))
    tiers = "portable, hopper or auto" if capability == HOPPER else "portable or auto"
    return {
        DRIVER_TOO_OLD: f"the driver supports CUDA {driver}, this build's runtime is {runtime}",
        GPU_TOO_OLD: f"expected compute capability 8.0 or newer, found {capability / 10}",
        NO_SUCH_TIER: f"FUSED_MOE_TIER is {os.environ.get('FUSED_MOE_TIER')}, expected {tiers}",
    }.get(status, f"status {status} of fused_moe.h")


def _why_hopper_is_off() -> str:
    """Where a CUDA tier is on."""
    *_, capability = ops.cuda_device(torch.cuda.current_device())
    if capability != HOPPER:
        return f"expected compute capability 9.0, found {capability / 10}"
    return REASONS["PORTABLE_ASKED"] if os.environ.get("FUSED_MOE_TIER") == "portable" else ""


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"none": "PyTorch sees no CUDA device"}
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {f"cuda:{i}": f"{d.name}, sm_{d.major}{d.minor}" for i, d in enumerate(devices)}
