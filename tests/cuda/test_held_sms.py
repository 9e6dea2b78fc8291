"""Fewer SMs than a launch plans for: every schedule ends, with the same bits. Persistent grids have a CTA for
each SM of the device, and none of their CTAs may wait for one that has not started."""

import pytest
import torch
from cases import BF16, F16, F32, assert_same_bits
from gpu_cases import capture, copies, every_gemm, training_step
from trust import held_sms

from fused_moe import FusedMoE

pytestmark = pytest.mark.gpu


@pytest.fixture(params=("one", "half", "all but one"))
def held(request, device):
    """How many SMs are held."""
    try:
        held_sms.library()
    except held_sms.NotAvailable as reason:
        pytest.skip(str(reason))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {"one": 1, "half": num_sms // 2, "all but one": num_sms - 1}[request.param]


def check(run, held: int, expected: dict) -> None:
    for _ in range(2):  # the second call finds its memory in PyTorch's cache
        run()
    found, ended = held_sms.ends_while_held(run, held)
    assert ended, f"did not end while {held} SMs were held"
    assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "dtype, name", ((BF16, None), (BF16, "portable"), (F32, None)), ids=("bf16", "bf16-portable", "f32")
)
def test_every_gemm(device, tier, held, dtype, name):
    tier(name)
    run, _ = every_gemm(dtype, device)
    check(run, held, run())


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_training_step(device, held, dtype):
    """The layer with its router, plan and shared experts; its graph, too."""
    # PyTorch's bf16 GEMMs may be clusters of CTAs, which start on several SMs of one GPC or not at all.
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    held = min(held, num_sms // 2 if dtype == BF16 else num_sms - 1)
    module = FusedMoE(256, 128, 16, 4, num_shared_experts=1, bias=True, device=device, dtype=dtype)
    x, dout = (torch.randn(2000, 256, device=device).to(dtype) for _ in range(2))
    step = training_step(module, x, dout)
    expected = step()
    check(step, held, expected)
    graph, recorded = capture(step)

    def replay() -> dict:
        graph.replay()
        return copies(recorded)

    check(replay, held, expected)


def test_two_streams(device, held):
    """Two persistent grids share the SMs that are left."""
    runs = [every_gemm(dtype, device, tokens=1024)[0] for dtype in (BF16, F16)]
    alone = [run() for run in runs]
    streams = [torch.cuda.Stream(device) for _ in runs]

    def both() -> dict:
        results = {}
        current = torch.cuda.current_stream()
        for i, (stream, run) in enumerate(zip(streams, runs, strict=True)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results |= {f"{i} {name}": value for name, value in run().items()}
        for stream in streams:
            current.wait_stream(stream)
        return results

    check(both, held, {f"{i} {name}": value for i, run in enumerate(alone) for name, value in run.items()})


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_green_context(device, dtype):
    """A stream of a green context, with fewer SMs than the device has."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        stream, granted = held_sms.green_stream(num_sms // 4)
    except held_sms.NotAvailable as reason:
        pytest.skip(str(reason))
    assert granted < num_sms
    run, _ = every_gemm(dtype, device)
    expected = run()
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(stream):
            found = run()
        torch.cuda.synchronize()
        assert_same_bits(found, expected)
