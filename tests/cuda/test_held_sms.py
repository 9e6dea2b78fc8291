"""Fewer SMs than a launch plans for: every schedule ends, with the same bits. Persistent grids have a CTA for
each SM of the device, and none of their CTAs may wait for one that has not started."""

import pytest
import torch
from cases import BF16, F16, F32, Case, assert_same_bits
from gpu_cases import capture, copies, draw, every_gemm, training_step
from trust import held_sms

import fused_moe
from fused_moe import FusedMoE, fused_experts
from fused_moe.quantized.formats import FORMATS

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
    """Tiles of at most 16 or 64 rows, more than there are CTAs. Two CTAs share an SM."""
    run, _ = every_gemm(BF16, device, dim=136, hidden=264, experts=300, tokens=tokens)
    check(run, held, run())


@pytest.mark.parametrize("tokens", (1, 16))
@torch.no_grad()
def test_few_slots(device, held, tokens):
    """Experts without gradients, up to 64 slots: no cluster, which would need eight SMs at a time, makes the
    plan, and a kernel starts before the one whose result it takes has ended."""
    arguments, _ = draw(Case(tokens, 1536, 768, 32, 4, BF16), device)

    def run() -> dict:
        return {"out": fused_experts(*arguments)}

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


# --- green contexts: a part of the SMs, as MPS and MIG give ---------------------------------------------


@pytest.fixture(params=(8, 16, 64))
def few_sms(request, device):
    """A stream of a green context. Eight SMs are the fewest on Hopper: one cluster that makes a plan."""
    try:
        stream, granted = held_sms.green_stream(request.param)
    except held_sms.NotAvailable as reason:
        pytest.skip(str(reason))
    assert granted < torch.cuda.get_device_properties(device).multi_processor_count
    return stream


def check_on(stream: torch.cuda.Stream, run) -> None:
    """run() gives the same bits on a stream of few SMs."""
    expected = run()
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(stream):
            found = run()
        torch.cuda.synchronize()
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_few_sms(device, few_sms, dtype):
    run, _ = every_gemm(dtype, device)
    check_on(few_sms, run)


@pytest.mark.parametrize("format", (None, *FORMATS))
@torch.no_grad()
def test_few_sms_without_gradients(device, few_sms, format):
    """One launch or several, plans made by the GEMMs, by a cluster of eight CTAs and by kernels."""
    layers = [FusedMoE(512, 256, 64, 8, device=device, dtype=BF16)]
    if format is None:
        layers.append(FusedMoE(4096, 512, 256, 8, device=device, dtype=BF16))
    else:
        fused_moe.quantize(layers[0], format)
    for layer in layers:
        xs = [torch.randn(T, layer.dim, device=device).to(BF16) for T in (1, 8, 9, 64, 300, 512, 1000, 2000)]
        check_on(few_sms, lambda: {str(len(x)): layer(x) for x in xs})  # noqa: B023 - called at once


@pytest.mark.parametrize("format", (None, "fp8_block", "int4"))
def test_few_sms_training_step(device, few_sms, format):
    """With adapters, where the experts are quantised."""
    module = FusedMoE(256, 128, 16, 4, num_shared_experts=1, device=device, dtype=BF16)
    if format is not None:
        fused_moe.quantize(module, format, trainable=True)
        fused_moe.add_lora(module, 8)
    x, dout = (torch.randn(2000, 256, device=device).to(BF16) for _ in range(2))
    check_on(few_sms, training_step(module, x, dout))
