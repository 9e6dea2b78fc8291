"""Refuses a PyTorch that is too old, before anything asks it for what it has not. Imported first."""

from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)  # the stable ABI that setup.py builds for

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise ImportError(
        f"fused_moe: expected PyTorch {'.'.join(map(str, OLDEST_TORCH))} or newer, found "
        f"{torch.__version__} at {Path(torch.__file__).parent}"
    )
