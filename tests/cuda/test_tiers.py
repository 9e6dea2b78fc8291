"""Which tier is dispatched to, why, and by FUSED_MOE_TIER."""

import os
import re
import subprocess
import sys
from pathlib import Path

import exact
import pytest
import torch
from cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LAYOUTS,
    Case,
    assert_near,
    assert_same_bits,
    check_experts,
    forward_backward,
    misaligned,
    to_double,
)
from gpu_cases import HALF_DTYPES, calls_during, check_gemm, draw_rows, draw_weights, ops

import fused_moe
from fused_moe import fused_experts, reference, router_logits, widths

pytestmark = pytest.mark.gpu

LAYER_STEP = """
import torch, fused_moe
layer = fused_moe.FusedMoE(64, 32, 4, 2, device="cuda", dtype=torch.bfloat16)
x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
layer(x).float().square().sum().backward()
assert x.grad.isfinite().all()
print("a step was made")
"""


def run_with_tier(name: str) -> subprocess.CompletedProcess:
    folder = str(Path(fused_moe.__file__).parents[1])
    env = os.environ | {"FUSED_MOE_TIER": name, "PYTHONPATH": folder}
    return subprocess.run([sys.executable, "-c", LAYER_STEP], capture_output=True, text=True, env=env)


def test_info_tells_that_cuda_is_on(device):
    """The report names the tier, and the GPU."""
    info = fused_moe.info()
    assert info["tiers"]["cuda"].startswith("on")
    assert torch.cuda.get_device_name(device) in str(info)


@pytest.mark.parametrize("name", ("portable", "auto"))
def test_a_tier_by_name(device, name):
    """FUSED_MOE_TIER takes these on every GPU."""
    run = run_with_tier(name)
    assert run.returncode == 0 and "a step was made" in run.stdout, run.stderr


def test_the_hopper_tier_by_name(device):
    """FUSED_MOE_TIER=hopper is for compute capability 9.0, and a RuntimeError elsewhere."""
    run = run_with_tier("hopper")
    if torch.cuda.get_device_capability(device) == (9, 0):
        assert run.returncode == 0 and "a step was made" in run.stdout, run.stderr
    else:
        assert run.returncode != 0 and "RuntimeError" in run.stderr, run.stderr


def test_an_unknown_tier_is_named(device):
    """A RuntimeError that says what it is and what it may be on this GPU."""
    run = run_with_tier("nonsense")
    assert run.returncode != 0 and "RuntimeError" in run.stderr, run.stderr
    message = run.stderr[run.stderr.rindex("RuntimeError") :]
    assert "FUSED_MOE_TIER is nonsense, expected " in message, message
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    for name, runs in (("portable", True), ("hopper", is_hopper), ("auto", True)):
        assert bool(re.search(rf"\b{name}\b", message)) == runs, message


@HALF_DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
def test_every_activation_of_the_sm80_tier(device, tier, layout, activation, dtype):
    """Forward and gradients, on columns that fill a tile and a part of the next."""
    tier("portable")
    case = Case(200, 136, 200, 4, 2, dtype, layout=layout, activation=activation, bias=True)
    check_experts(case, device)


@HALF_DTYPES
@pytest.mark.parametrize("name", (None, "auto", "hopper"))
def test_sm90_runs_every_call_of_a_layer(device, sm90, tier, name, dtype):
    """Forward and backward, all layouts: up_gate once, grouped_mm down and for the gradient of the rows,
    down_dgrad once, wgrad for either side."""
    tier(name)
    for layout in LAYOUTS:
        case = Case(100, 72, 136, 4, 2, dtype, layout=layout, bias=True)
        inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)

        def run(case=case, inputs=inputs, dout=dout, ids=ids):
            forward_backward(fused_experts, inputs, dout, ids=ids, **case.options)

        for op, calls in {"up_gate": 1, "grouped_mm": 2, "down_dgrad": 1, "wgrad": 2}.items():
            assert calls_during(op, run)[:2] == (calls, 0), f"{layout}: {op}"
    assert re.match(r"[1-9]\d* on hopper", fused_moe.info()["calls"]["up_gate"])
    assert fused_moe.info()["tiers"]["hopper"].startswith("on")


SM80_GEMMS = {  # (k, n, dtype, form of a, form of b) -> why
    "float32": (72, 136, F32, "contiguous", "contiguous", "dtype"),
    "float64": (72, 136, F64, "contiguous", "contiguous", "dtype"),
    "depth": (68, 136, BF16, "contiguous", "contiguous", "multiple of 8"),
    "columns": (72, 132, F16, "contiguous", "contiguous", "multiple of 8"),
    "weights off 16 bytes": (72, 136, F16, "contiguous", "misaligned", "strides"),
    "weights nowhere dense": (72, 136, BF16, "contiguous", "strided", "strides"),
}


@pytest.mark.parametrize("name", SM80_GEMMS)
def test_why_sm80_runs_a_gemm(device, sm90, name):
    """What TMA cannot read goes to the sm80 tier, which says why; the result is right."""
    k, n, dtype, a_form, b_form, why = SM80_GEMMS[name]
    a, offsets = draw_rows((5, 0, 130), k, dtype, device)
    a, b = FORMS[a_form](a), FORMS[b_form](draw_weights(3, n, k, dtype, device))
    *calls, reason = calls_during("grouped_mm", lambda: ops.grouped_mm(a=a, b=b, offsets=offsets))
    assert calls == [0, 1] and why in reason
    assert_near(ops.grouped_mm(a=a, b=b, offsets=offsets), exact.grouped_mm(a, b, offsets))
    assert reason in fused_moe.info()["calls"]["grouped_mm"]


SM80_UP_GATES = {  # (D, F, dtype, form of x, form of w1, layout) -> why
    "float32": (72, 136, F32, "contiguous", "contiguous", "separate", "dtype"),
    "depth": (68, 136, BF16, "contiguous", "contiguous", "separate", "multiple of 8"),
    "columns": (72, 132, F16, "contiguous", "contiguous", "halves", "multiple of 8"),
    "weights off 16 bytes": (72, 136, F16, "contiguous", "misaligned", "ungated", "strides"),
    "weights nowhere dense": (72, 136, BF16, "contiguous", "strided", "separate", "strides"),
    "w1 and w3 differ": (72, 136, BF16, "contiguous", "swapped", "separate", "strides"),
}


@pytest.mark.parametrize("name", SM80_UP_GATES)
def test_why_sm80_runs_an_up_gate(device, sm90, name, monkeypatch):
    """As for grouped_mm, of what operators are given."""
    monkeypatch.setattr(widths, "are_padded", lambda *_: False)
    dim, hidden, dtype, x_form, w_form, layout, why = SM80_UP_GATES[name]
    case = Case(100, dim, hidden, 4, 2, dtype, layout=layout)
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["x"], inputs["w1"] = FORMS[x_form](inputs["x"]), FORMS[w_form](inputs["w1"])
    fixed = {"ids": ids, **case.options}
    with torch.no_grad():
        *calls, reason = calls_during("up_gate", lambda: fused_experts(**inputs, **fixed))
        out = fused_experts(**inputs, **fixed)
        expected = reference.fused_experts(**to_double(inputs), **fixed)
    assert calls == [0, 1] and why in reason
    assert_near(out, expected, 8)


@pytest.mark.parametrize("dim, num_experts", ((37, 5), (2047, 64), (2050, 60), (2048, 60)))
def test_sm90_runs_padded_routers(device, sm90, dim, num_experts):
    """Operators copy such operands: the portable tier would take ten times as long or more."""
    x, weight = (torch.randn(n, dim).to(device, BF16).requires_grad_() for n in (300, num_experts))

    def run():
        router_logits(x, weight).square().sum().backward()

    for op in ("router_logits", "router_dgrad"):
        assert calls_during(op, run)[:2] == (1, 0), op


@pytest.mark.parametrize("name", ("depth", "columns", "weights off 16 bytes"))
def test_sm90_runs_padded_experts(device, sm90, name):
    """Functions copy such weights: every GEMM is the sm90 tier's, and results are right."""
    dim, hidden, dtype, x_form, w_form, layout, _ = SM80_UP_GATES[name]
    case = Case(100, dim, hidden, 4, 2, dtype, layout=layout, bias=True)
    inputs, dout, fixed = case.inputs(device), case.dout(device), {"ids": case.ids(device), **case.options}
    inputs["x"], inputs["w1"] = FORMS[x_form](inputs["x"]), FORMS[w_form](inputs["w1"])
    check_experts(case, device, form=FORMS[w_form])

    def run():
        forward_backward(fused_experts, inputs, dout, **fixed)

    for op, calls in {"up_gate": 1, "grouped_mm": 2, "down_dgrad": 1, "wgrad": 2}.items():
        assert calls_during(op, run)[:2] == (calls, 0), op


def test_rows_off_16_bytes_are_copied(device, sm90):
    """The tier, and with it the bits, do not depend on where in its storage a view begins."""
    case = Case(100, 72, 136, 4, 2, BF16, bias=True)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    expected = forward_backward(fused_experts, inputs, dout, ids=ids)
    inputs |= {name: misaligned(inputs[name]) for name in ("x", "b1", "b2", "b3")}

    def run():
        found = forward_backward(fused_experts, inputs, misaligned(dout), ids=ids)
        assert_same_bits(found, expected)

    for op, calls in {"up_gate": 1, "grouped_mm": 2, "down_dgrad": 1, "wgrad": 2}.items():
        assert calls_during(op, run)[:2] == (calls, 0), op


def test_sm80_runs_scored_inputs_and_no_rows(device, sm90):
    """score_on="input" multiplies x before the GEMM; without rows there is nothing to launch for."""
    case = Case(100, 72, 136, 4, 2, BF16)
    inputs, ids = case.inputs(device), case.ids(device)
    with torch.no_grad():
        *calls, reason = calls_during("up_gate", lambda: fused_experts(**inputs, ids=ids, score_on="input"))
    assert calls == [0, 1] and "scores" in reason
    a, b = torch.empty(0, 72, device=device, dtype=BF16), draw_weights(3, 136, 72, BF16, device)
    offsets = torch.zeros(3, device=device, dtype=torch.int32)
    *calls, reason = calls_during("grouped_mm", lambda: ops.grouped_mm(a=a, b=b, offsets=offsets))
    assert calls == [0, 1] and "no row" in reason


def test_sm80_instead_of_sm90(device, sm90, tier):
    """FUSED_MOE_TIER=portable where Hopper would run, and back: results as good."""
    a, offsets = draw_rows((5, 0, 130), 72, BF16, device)
    b = draw_weights(3, 136, 72, BF16, device)

    def run():
        return ops.grouped_mm(a=a, b=b, offsets=offsets)

    ours = check_gemm(a, b, offsets)
    tier("portable")
    *calls, reason = calls_during("grouped_mm", run)
    assert calls == [0, 1] and "FUSED_MOE_TIER" in reason
    assert_near(check_gemm(a, b, offsets), ours.double())
    assert fused_moe.info()["tiers"]["hopper"].startswith("off: ")
    assert "FUSED_MOE_TIER" in fused_moe.info()["tiers"]["hopper"]
    tier("hopper")
    assert calls_during("grouped_mm", run)[:2] == (1, 0)


def test_the_environment_is_read_once(device, sm90, tier, monkeypatch):
    """What is set after the first call has to wait for a reset."""
    tier(None)
    a, offsets = draw_rows((5, 0, 130), 72, BF16, device)
    b = draw_weights(3, 136, 72, BF16, device)
    run = lambda: ops.grouped_mm(a=a, b=b, offsets=offsets)  # noqa: E731
    run()
    monkeypatch.setenv("FUSED_MOE_TIER", "portable")
    assert calls_during("grouped_mm", run)[:2] == (1, 0)
    ops.cuda_reset()
    assert calls_during("grouped_mm", run)[:2] == (0, 1)
