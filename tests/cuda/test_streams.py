"""Several streams at once, and the same bits in every run."""

import pytest
import torch
from cases import BF16, F16, F32, Case, assert_same_bits, forward_backward
from gpu_cases import ALL_DTYPES, FAST_DTYPES, HALF_DTYPES, beside_other_work, check_at_once, every_gemm

import fused_moe
from fused_moe import fused_experts

pytestmark = pytest.mark.gpu


@ALL_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_same_bits_beside_other_work(device, score_on, dtype):
    """Five runs of a skewed routing, other kernels on another stream beside them: the same bits."""
    case = Case(2000, 136, 72, 16, 4, dtype, layout="halves", bias=True, score_on=score_on)
    inputs, dout = case.inputs(device), case.dout(device)
    ids = (torch.rand(2000, 4) ** 3 * 16).int().to(device)
    fixed = {"ids": ids, "score_on": score_on, **case.options}
    first = forward_backward(fused_experts, inputs, dout, **fixed)
    for _ in beside_other_work(device):
        assert_same_bits(first, forward_backward(fused_experts, inputs, dout, **fixed))


@FAST_DTYPES
def test_two_streams(device, dtype):
    """Two calls at once, on two streams, give the bits of each alone."""
    runs = []
    for layout, tokens in (("separate", 700), ("interleaved", 500)):
        case = Case(tokens, 136, 72, 12, 4, dtype, layout=layout, bias=True)
        inputs, dout = case.inputs(device), case.dout(device)
        fixed = {"ids": case.ids(device), **case.options}
        runs.append(lambda i=inputs, d=dout, f=fixed: forward_backward(fused_experts, i, d, **f))
    check_at_once(device, runs, 10, 2_000_000)


@FAST_DTYPES
def test_two_streams_on_one_plan(device, dtype):
    """A plan is read, never written: two layers may use it at once."""
    case = Case(4096, 136, 264, 32, 4, dtype, bias=True)
    ids = case.ids(device)
    plan = fused_moe.route_plan(ids, 32)
    runs = []
    for _ in range(2):
        inputs, dout = case.inputs(device), case.dout(device)
        runs.append(lambda i=inputs, d=dout: forward_backward(fused_experts, i, d, ids=ids, plan=plan))
    check_at_once(device, runs, 50, 1_000_000)


def test_two_streams_of_every_gemm(device):
    """Two calls at once, each with more tiles than there are SMs, have separate workspaces. A CTA that
    waits for an SM starts when others have stolen its tiles: in 3 of 100 runs a tile was once lost then."""
    runs = [every_gemm(dtype, device)[0] for dtype in (BF16, F16)]
    check_at_once(device, runs, 300, 300_000)


@HALF_DTYPES
def test_same_bits_in_every_run(device, dtype):
    """Twenty runs: whichever SM computes a tile, its elements are the same."""
    run, _ = every_gemm(dtype, device)
    first = run()
    for _ in range(20):
        assert_same_bits(first, run())


def test_same_bits_after_other_calls(device):
    """Counters are zero again after every call: GEMMs of other shapes, dtypes and routings between two
    runs of each change no bit."""
    torch.cuda.synchronize()
    shapes = (
        {"dim": 400, "hidden": 520},
        {"dim": 72, "hidden": 136, "experts": 256, "tokens": 300},
        {"dim": 264, "hidden": 64, "experts": 3, "tokens": 9000, "top_k": 1},
        {"dim": 1024, "hidden": 512, "experts": 2, "tokens": 5},
    )
    runs = [every_gemm(dtype, device, **shape)[0] for shape in shapes for dtype in (BF16, F16, F32)]
    first = [run() for run in runs]
    for _ in range(3):
        for i in torch.randperm(len(runs)).tolist():
            assert_same_bits(runs[i](), first[i])
