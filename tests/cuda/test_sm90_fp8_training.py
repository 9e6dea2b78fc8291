"""The sm90 tier's FP8 training: every tensor against the recipe's loop in float64, weights' codes against the
CPU's, and the same bits in every batch, run, stream and replay.

tests/test_fp8_training.py and test_fp8_bits.py run on a GPU, too."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, BF16, F16, F32, F64, LAYOUTS, Case, assert_same_bits, poisoned
from gpu_cases import beside_other_work, check_at_once, check_replays
from test_fp8_bits import assert_same_values
from test_fp8_training import WEIGHTS, check, error, inputs_of, step

from fused_moe import fp8_weights, fused_experts, reference
from fused_moe import ops as codes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]

EVERY_WGRAD = pytest.mark.parametrize("wgrad", codes.WGRADS)
# Norm of the difference to the loop. Sums in other orders, and the tensor cores' own, turn a few codes to
# their neighbours: 0.0114 at most on an H200. One row of 300 that is lost would be 0.06, a block with its
# neighbour's scale 0.1 and more.
NEAR = 0.02

# D and F are odd multiples of 128 where tiles are half as wide, in the GEMM whose columns they are.
CASES = {
    "half of N": Case(300, 384, 384, 4, 2, BF16),
    "half of N, ungated": Case(301, 640, 128, 4, 2, BF16, layout="ungated"),
    "whole N, chunks of D": Case(260, 1024, 256, 3, 2, BF16),
    "long F": Case(130, 128, 1152, 2, 1, BF16),
    "many tiles": Case(1400, 1152, 640, 6, 3, BF16),
    "empty experts": Case(150, 256, 384, 17, 3, BF16, "gaps"),
    "remote ids": Case(333, 384, 256, 5, 3, BF16, "sentinels"),
    "no expert's ids": Case(40, 256, 128, 3, 2, BF16, "none"),
    "one expert has all": Case(1900, 384, 128, 3, 1, BF16, "one"),  # wgrad is split
    "one expert": Case(3000, 128, 256, 1, 1, BF16),
    "one token": Case(1, 384, 256, 4, 2, BF16),
    "one token, one expert": Case(1, 128, 128, 1, 1, BF16, layout="ungated"),
    "an expert's row": Case(60, 256, 128, 40, 1, BF16),
}


def compare(case: Case, device, wgrad: str = "fp8") -> tuple[dict, torch.Tensor, dict]:
    """Near the loop, and as near to float64 as it is. Returns inputs, the output's gradient, and results."""
    inputs, dout = inputs_of(case, device), case.dout(device)
    options = {"ids": case.ids(device), **case.options}
    ours = check(inputs, dout, wgrad=wgrad, **options)
    loop = step(reference.fused_experts, inputs, dout, fp8=True, fp8_wgrad=wgrad, **options)
    for name, its in loop.items():
        found, norm = error(ours[name], its), its.double().norm().item()
        assert found <= NEAR * norm, f"{name}: {found / norm:.2e} of the norm"
    return inputs, dout, ours


def with_float_weights(inputs: dict) -> dict:
    return inputs | {n: inputs[n].float() for n in WEIGHTS if inputs[n] is not None}


def under_autocast(**arguments) -> torch.Tensor:
    """fused_experts, which then takes float32 weights beside x of bfloat16."""
    with torch.autocast("cuda", BF16):
        return fused_experts(**arguments, fp8=True)


def skewed(case: Case, device) -> torch.Tensor:
    """ids that most tokens share."""
    return (torch.rand(case.tokens, case.top_k) ** 3 * case.num_experts).int().to(device)


# --- the recipe ---------------------------------------------------------------------------------------


@EVERY_WGRAD
@pytest.mark.parametrize("name", CASES)
def test_shapes(device, name, wgrad):
    compare(CASES[name], device, wgrad)


@EVERY_WGRAD
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, wgrad):
    """Weights of bfloat16 and of float32, whose gradients are the same sums, rounded or not."""
    case = Case(300, 384, 128, 4, 2, BF16, layout=layout)
    inputs, dout, ours = compare(case, device, wgrad)
    options = {"ids": case.ids(device), "fp8_wgrad": wgrad, **case.options}
    wide = step(under_autocast, with_float_weights(inputs), dout, **options)
    assert all(wide[f"d{n}"].dtype == F32 for n in WEIGHTS if inputs[n] is not None)
    assert_same_bits(ours, {n: t.to(BF16) if n[1:] in WEIGHTS else t for n, t in wide.items()})


def test_activations(device):
    for activation in ACTIVATIONS:
        for layout in ("separate", "ungated"):
            compare(Case(140, 128, 384, 2, 1, BF16, layout=layout, activation=activation), device)


@EVERY_WGRAD
@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grads(device, layout, wgrad):
    """What is added is the gradient of float32 weights, also where an expert's rows are split."""
    for case in (Case(300, 384, 128, 4, 2, BF16), Case(1900, 256, 128, 2, 1, BF16, "one")):
        case = replace(case, layout=layout)
        inputs, dout = with_float_weights(inputs_of(case, device)), case.dout(device)
        options = {"ids": case.ids(device), "fp8_wgrad": wgrad, **case.options}
        grads = step(under_autocast, inputs, dout, **options)
        sums = {n: torch.randn_like(inputs[n]) for n in WEIGHTS if inputs[n] is not None}
        expected = {n: t + grads[f"d{n}"] for n, t in sums.items()}
        leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in inputs.items()}
        under_autocast(**leaves, **options, main_grads=tuple(map(sums.get, WEIGHTS))).backward(dout)
        assert_same_bits(sums, expected)


# --- codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (BF16, F32), ids=("bf16", "f32"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_of_weights(device, layout, dtype):
    """Those of the CPU: blocks of any size, of zeros, with NaN and infinity."""
    case = replace(Case(1, 384, 256, 3, 1, layout=layout), dtype=dtype)
    weights = {n: inputs_of(case, "cpu")[n] for n in WEIGHTS}
    for w in weights.values():
        if w is not None:
            w *= torch.logspace(-38, 4, w.numel()).view(w.shape).to(dtype)
            w[0].zero_()
            w[1].view(-1)[77], w[2].view(-1)[-1] = torch.nan, torch.inf
    stored = {n: case.options[n] for n in ("layout", "transposed")}
    expected = fp8_weights(*weights.values(), **stored)
    with poisoned():
        found = fp8_weights(*(w if w is None else w.to(device) for w in weights.values()), **stored)
    for mine, its in zip((*found.up, *found.down), (*expected.up, *expected.down), strict=True):
        assert_same_values(mine, its)


# --- bits ---------------------------------------------------------------------------------------------


@EVERY_WGRAD
@pytest.mark.parametrize("layout", ("separate", "ungated"))
@pytest.mark.parametrize("num_experts", (8, 64))
def test_batch_sizes(device, num_experts, layout, wgrad):
    """A token's output and gradients have the same bits in every batch, and without gradients, where few rows
    have tiles of their own."""
    case = Case(3000, 384, 256, num_experts, 2, BF16, layout=layout)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    weights = fp8_weights(*(inputs[n] for n in WEIGHTS))
    options = {"fp8": weights, "fp8_wgrad": wgrad, **case.options}
    whole = step(fused_experts, inputs, dout, ids=ids, **options)
    for size in (1, 2, 7, 33, 129, 300, 1500, 3000):
        for part in (slice(0, size), slice(3000 - size, 3000)):
            few = inputs | {n: inputs[n][part] for n in ("x", "scores")}
            ours = step(fused_experts, few, dout[part], ids=ids[part], **options)
            for name in ("out", "dx", "dscores"):
                assert torch.equal(ours[name], whole[name][part]), f"{name} of {part}"
            with torch.no_grad():
                out = fused_experts(**few, ids=ids[part], **options)
            assert torch.equal(out, whole["out"][part]), f"without gradients, {part}"


BUSY = Case(2000, 640, 384, 16, 4, BF16)


@EVERY_WGRAD
def test_same_bits_beside_other_work(device, wgrad):
    """Five runs of a skewed routing, other kernels on another stream beside them, in fresh memory of NaNs."""
    inputs, dout, ids = inputs_of(BUSY, device), BUSY.dout(device), skewed(BUSY, device)
    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad}
    first = step(fused_experts, inputs, dout, **options)
    for _ in beside_other_work(device):
        with poisoned():
            assert_same_bits(first, step(fused_experts, inputs, dout, **options))


@EVERY_WGRAD
def test_two_streams(device, wgrad):
    """Two calls at once give the bits of each alone."""
    runs = []
    for case in (BUSY, Case(1300, 384, 256, 2, 1, BF16, layout="halves.T")):
        inputs, dout = inputs_of(case, device), case.dout(device)
        fixed = {"ids": skewed(case, device), "fp8": True, "fp8_wgrad": wgrad, **case.options}
        runs.append(lambda i=inputs, d=dout, f=fixed: step(fused_experts, i, d, **f))
    check_at_once(device, runs, 10, 2_000_000)


@EVERY_WGRAD
def test_graph(device, wgrad):
    """A step recorded once: replayed on other tokens, routings and weights, which the graph quantises."""
    case = Case(700, 384, 256, 6, 2, BF16, layout="halves")
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad, **case.options}

    def run():
        return step(fused_experts, inputs, dout, **options)

    check_replays(run, case, device, inputs_of, inputs, dout, ids)


@EVERY_WGRAD
def test_nan_stays(device, wgrad):
    """A NaN in one of 1000 tokens: in its results and in the weight gradients of its experts alone."""
    case = Case(1000, 384, 256, 8, 2, BF16)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad}
    clean = step(fused_experts, inputs, dout, **options)
    for name, tensor in (("x", inputs["x"]), ("dout", dout)):
        before = tensor[501, 7].clone()
        tensor[501, 7] = torch.nan
        ours = step(fused_experts, inputs, dout, **options)
        tensor[501, 7] = before
        others = torch.arange(case.tokens, device=device) != 501
        for result in ("out", "dx", "dscores"):
            assert torch.equal(ours[result][others], clean[result][others]), result
            assert ours[result][501].isnan().all() == (name == "x" or result != "out"), result
        hit = torch.zeros(8, dtype=torch.bool, device=device).index_fill(0, ids[501].long(), True)
        for result in ("dw1", "dw2", "dw3"):
            assert ours[result][hit].flatten(1).isnan().any(1).all(), result
            assert torch.equal(ours[result][~hit], clean[result][~hit]), result


@pytest.mark.sanitizer
@EVERY_WGRAD
def test_under_the_sanitizer(device, wgrad):
    for layout in ("separate", "ungated.T"):
        for routing in ("sentinels", "one"):
            case = Case(140, 384, 128, 3, 2, BF16, routing, layout)
            options = {"ids": case.ids(device), "fp8": True, "fp8_wgrad": wgrad, **case.options}
            ours = step(fused_experts, inputs_of(case, device), case.dout(device), **options)
            assert all(t.isfinite().all() for t in ours.values())


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F16, F32, F64), ids=("f16", "f32", "f64"))
def test_other_dtypes_are_refused(device, dtype):
    case = Case(3, 128, 128, 2, 1, dtype)
    with pytest.raises(TypeError, match=f"x of dtype bfloat16 with fp8, found {dtype}"):
        fused_experts(**inputs_of(case, device), ids=case.ids(device), fp8=True)


def test_the_portable_tier_refuses(device, tier):
    """Whether it is to quantise weights or has them."""
    case = Case(3, 128, 128, 2, 1, BF16)
    inputs, ids = inputs_of(case, device), case.ids(device)
    made = fp8_weights(*(inputs[n] for n in WEIGHTS))
    expected = fused_experts(**inputs, ids=ids, fp8=made)
    tier("portable")
    for fp8, op in ((True, "fp8_weight"), (made, "fp8_up")):
        message = (
            f"{op}: expected the tier hopper, .* compute capability 9.0, found .* FUSED_MOE_TIER portable"
        )
        with pytest.raises(RuntimeError, match=message):
            fused_experts(**inputs, ids=ids, fp8=fp8)
    tier(None)
    assert torch.equal(fused_experts(**inputs, ids=ids, fp8=made), expected)
