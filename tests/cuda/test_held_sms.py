"""Fewer SMs than a launch plans for: every schedule ends, with the same bits. Persistent grids have a CTA for
each SM of the device, and none of their CTAs may wait for one that has not started."""

import pytest
import torch
from cases import BF16, F16, F32, assert_same_bits
from gpu_cases import capture, copies, every_gemm, training_step
from trust import held_sms

from fused_moe import FusedMoE, fused_experts

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
    tokens = 1024 if dtype == F32 else 4096  # on one SM, beside other processes' tests, in time
    run, _ = every_gemm(dtype, device, tokens=tokens)
    check(run, held, run())


@pytest.mark.parametrize("tokens", (150, 1200), ids=("16 rows", "64 rows"))
def test_few_rows(device, held, tokens):
    """Tiles of so many rows at most, more than there are CTAs, two of which share an SM."""
    run, _ = every_gemm(BF16, device, dim=136, hidden=264, experts=300, tokens=tokens)
    check(run, held, run())


@pytest.mark.parametrize("tokens", (1, 16))
@torch.no_grad()
def test_few_slots(device, held, tokens):
    """Experts without gradients, up to 64 slots: no cluster, which would need eight SMs at a time, makes the
    plan, and a kernel starts before the one whose result it takes has ended."""
    w1, w3 = (torch.randn(32, 768, 1536, device=device).div(39).to(BF16) for _ in range(2))
    w2 = torch.randn(32, 1536, 768, device=device).div(28).to(BF16)
    x = torch.randn(tokens, 1536, device=device).to(BF16)
    scores = torch.rand(tokens, 4, device=device)
    ids = torch.rand(tokens, 32, device=device).topk(4).indices

    def run() -> dict:
        return {"out": fused_experts(x, w1, w2, w3, scores, ids)}

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
