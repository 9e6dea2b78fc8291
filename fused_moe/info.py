"""What runs here: versions, tiers and why a tier is off. `python -m fused_moe` prints it."""

from __future__ import annotations

import os
import platform

import torch

from .ops import HAS_CUDA_KERNELS, LIBRARY


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
    if not HAS_CUDA_KERNELS:
        cuda = "off: this build has no CUDA kernels"
    elif not torch.cuda.is_available():
        cuda = "off: PyTorch sees no CUDA device"
    else:
        cuda = "on"
    return {"cpu": "on", "cuda": cuda}


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"none": "PyTorch sees no CUDA device"}
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {f"cuda:{i}": f"{d.name}, sm_{d.major}{d.minor}" for i, d in enumerate(devices)}
