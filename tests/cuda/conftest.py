"""Fixtures of the CUDA tests: which tier runs, and memory given back."""

import os

import pytest
import torch

from fused_moe.quantized import computing


@pytest.fixture
def sm90(device):
    """Where the sm90 tier runs."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {major}.{minor}")
    if os.environ.get("FUSED_MOE_TIER") == "portable":
        pytest.skip("FUSED_MOE_TIER=portable")


@pytest.fixture
def choose(monkeypatch):
    """choose(FUSED_MOE_TIER=..., FUSED_MOE_SCHEDULE=...), which are read once per process; None: not set."""

    def choose(**variables) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        forget()

    yield choose
    monkeypatch.undo()
    forget()


def forget() -> None:
    """What the process has read of the environment."""
    torch.ops.fused_moe.cuda_reset()
    computing._runs_fp8.clear()


@pytest.fixture
def tier(choose):
    """tier(name): the calls that follow ask for this tier; None: FUSED_MOE_TIER is not set."""
    return lambda name: choose(FUSED_MOE_TIER=name)


@pytest.fixture
def returned():
    """Gives the memory back to the device afterwards."""
    yield
    torch.cuda.empty_cache()
