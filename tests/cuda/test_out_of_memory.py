"""Out of memory, wherever in forward and backward: PyTorch's own exception, and the next call is the same."""

from contextlib import contextmanager

import pytest
import torch
from cases import BF16, F32, Case, assert_same_bits, forward_backward

from fused_moe import fused_experts

pytestmark = pytest.mark.gpu


@contextmanager
def allowed(device, more: int):
    """PyTorch may allocate `more` bytes beyond those in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def needs_empty_cache() -> None:
    """PyTorch keeps segments in which a tensor of another test lives, and takes memory from them."""
    torch.cuda.empty_cache()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >> 20
    if unused > 48:
        pytest.skip(
            f"needs a process without memory of other tests, found {unused} MiB unused in their segments"
        )


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_out_of_memory(device, returned, dtype):
    """With more and more memory the call fails later and later, until it does not."""
    case = Case(20_000, 256, 128, 16, 4, dtype, bias=True)
    inputs, dout, fixed = case.inputs(device), case.dout(device), {"ids": case.ids(device), **case.options}

    def run() -> dict:
        return forward_backward(fused_experts, inputs, dout, **fixed)

    expected, num_failed, found = run(), 0, None
    needs_empty_cache()
    while found is None:
        try:
            with allowed(device, num_failed * 24 << 20):
                found = run()
        except torch.OutOfMemoryError:
            num_failed += 1
            assert_same_bits(run(), expected)
    assert_same_bits(found, expected)
    assert num_failed >= 5
