"""fused_moe.transformers where activations are quantised: FP8Experts, and what quantize_experts makes."""

import copy

import pytest
import torch
from cases import BF16, F32, Calls, make_ids
from test_transformers_quantized import (  # noqa: F401 - with the fixtures
    SUPPORTED,
    K,
    T,
    experts_of,
    fp8_call,
    fp8_experts,
    fp8_without_a_gpu,
    load,
    ready,
    registered,
    token_ids,
    write_checkpoint,
)
from torch import nn
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

import fused_moe.transformers
from fused_moe import QuantizedWeight, reference
from fused_moe.quantized import computing
from fused_moe.transformers import quantize_experts
from fused_moe.transformers.experts import settings_of
from fused_moe.transformers.weights import first_name

pytestmark = pytest.mark.usefixtures("registered")

E4M3_KINDS = [kind for kind in SUPPORTED if "e2m1" not in kind]
NO_GRADIENT = "no gradient"


@pytest.fixture
def fp8(device):
    """The device, if it multiplies FP8 by FP8."""
    if not computing.runs_on("fp8_block", device):
        pytest.skip("this GPU multiplies no FP8: there compute 'fp8' is 'codes'")
    return device


@pytest.fixture
def in_codes(registered):  # noqa: F811
    fused_moe.transformers.register(compute="codes")
    yield
    fused_moe.transformers.register()


def serving(device, **settings) -> nn.Module:
    return fp8_experts(device, **settings).eval()


def expected_of(experts: nn.Module, x, ids, scores):
    """The reference's result with the experts' parameters."""
    weights = []
    for name in (first_name(experts), "down_proj"):
        data, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        settings = {"compute": "fp8", "power_of_two": scale.dtype == torch.float8_e8m0fnu}
        shape = tuple(data.shape)
        weights.append(QuantizedWeight(data, scale.float(), format="fp8_block", shape=shape, **settings))
    return reference.fused_experts(x, *weights, None, scores, ids, **settings_of(experts))


def relative(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


# --- FP8Experts alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", E4M3_KINDS)
def test_fp8_experts(fp8, kind):
    """The reference's result, which quantises tokens; scales of e8m0 make theirs powers of two."""
    experts, call = serving(fp8, **SUPPORTED[kind]), fp8_call(fp8, dtype=BF16)
    expected = expected_of(experts, *call)
    pointers = {name: p.data_ptr() for name, p in experts.named_parameters()}
    with Calls() as calls, torch.no_grad():
        found = experts(*call)
    assert calls.kinds() == ["8 bits"]
    assert relative(found, expected) < 0.01  # a hidden value's code may be the other neighbour
    assert pointers == {name: p.data_ptr() for name, p in experts.named_parameters()}


@pytest.mark.usefixtures("tiling")
def test_parameters_stay(cpu):
    """On Hopper, too, weights are read as they were loaded."""
    experts, call = serving(cpu), fp8_call(cpu)
    experts(*call)
    assert {name for name, _ in experts.named_parameters()} == set(fp8_experts(cpu).state_dict())
    for name, w in experts._fused_moe_weights.weights.items():
        assert not w.is_tiled and w.compute == "fp8"
        assert w.eight_bit_tensors[0].data_ptr() == getattr(experts, name).data_ptr()


def test_a_token_in_every_batch(fp8):
    experts, (x, ids, scores) = serving(fp8), fp8_call(fp8, dtype=BF16)
    with torch.no_grad():
        found = experts(x, ids, scores)
        for t in (0, T // 2, T - 1):
            one = slice(t, t + 1)
            assert torch.equal(experts(x[one], ids[one], scores[one]), found[one])


def test_training_has_gradients(device):
    """In training tokens are not quantised, whatever was registered. Else backward raises."""
    experts, (x, ids, scores) = fp8_experts(device), fp8_call(device, dtype=BF16)
    x.requires_grad_(), scores.requires_grad_()
    with Calls() as calls:
        found = experts(x, ids, scores)
    assert "8 bits" not in calls.kinds()
    expected = fused_moe.fused_experts(
        x,
        *(w for w in experts._fused_moe_weights.weights.values()),
        None,
        scores,
        ids,
        compute="codes",
        **settings_of(experts),
    )
    assert torch.equal(found, expected)
    found.square().mean().backward()
    assert x.grad.isfinite().all() and scores.grad.isfinite().all() and x.grad.any()


def test_serving_has_no_gradients(fp8):
    experts, (x, ids, scores) = serving(fp8), fp8_call(fp8, dtype=BF16)
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        experts(x.requires_grad_(), ids, scores).sum().backward()


@pytest.mark.usefixtures("in_codes")
def test_register_in_codes(device):
    experts, (x, ids, scores) = serving(device), fp8_call(device, dtype=BF16)
    with Calls() as calls:
        found = experts(x.requires_grad_(), ids, scores)
    assert "8 bits" not in calls.kinds() and calls.calls
    found.sum().backward()
    assert x.grad.any()


def test_register_in_codes_after_a_call(cpu, request):
    """The next call keeps tokens as they are; weights that were kept for FP8 serve that, too."""
    experts, call = serving(cpu), fp8_call(cpu)
    before = experts(*call)
    request.getfixturevalue("in_codes")
    after = experts(*call)
    assert 0.005 < relative(before, after) < 0.1
    assert torch.equal(experts.train()(*call), after)


def test_float32_on_a_gpu(device):
    """8-bit kernels of GPUs take tokens of 16 bits; others are not quantised."""
    experts, call = serving(device), fp8_call(device, dtype=F32)
    with Calls() as calls, torch.no_grad():
        experts(*call)
    assert ("8 bits" in calls.kinds()) == (device.type == "cpu")


def test_widths_without_kernels(device):
    """Both weights are in codes, or a layer would have two modes."""
    sizes = {"moe_intermediate_size": 136, "intermediate_size": 136}
    experts, call = serving(device, has_gate=False, config=sizes), fp8_call(device, dtype=BF16)
    with Calls() as calls, torch.no_grad():
        assert experts(*call).isfinite().all()
    assert "values" in calls.kinds() and "8 bits" not in calls.kinds()


def test_compile(fp8):
    """One graph after a first call."""
    experts, call = serving(fp8), fp8_call(fp8, dtype=BF16)
    with torch.no_grad():
        expected = experts(*call)
        try:
            found = torch.compile(experts, fullgraph=True, backend="aot_eager")(*call)
        finally:
            torch._dynamo.reset()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("compute", ("int8", "auto", None, True))
def test_bad_calls_of_register(cpu, compute):
    before = ALL_FP8_EXPERTS_FUNCTIONS["fused_moe"]
    with pytest.raises((TypeError, ValueError), match=f"compute to be .*found {compute!r}"):
        fused_moe.transformers.register(compute=compute)
    assert ALL_FP8_EXPERTS_FUNCTIONS["fused_moe"] is before


# --- models -----------------------------------------------------------------------------------------------


def test_a_checkpoint(fp8, tmp_path):
    """A loaded model is not in training: it quantises tokens. In training it computes what codes do."""
    eager = write_checkpoint("fp8_block", tmp_path, BF16).to(fp8)
    ours, ids = load(tmp_path, dtype=BF16).to(fp8), token_ids(fp8)
    with Calls() as calls, torch.no_grad():
        found = ours(ids).logits
    assert calls.kinds() == ["8 bits"] * len(experts_of(ours))
    with torch.no_grad():
        expected = eager(ids).logits
        assert 0 < relative(found, expected) < 0.2
        with Calls() as calls:
            trained = ours.train()(ids).logits
    assert "8 bits" not in calls.kinds()
    assert relative(trained, expected) < relative(found, expected)
    ours.eval().generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))


COMPUTES = {
    "fp8_block": ("fp8_block", "fp8"),
    "fp8": ("fp8", "fp8"),
    "int8": ("int8", "int8"),
    "int8_smooth": ("int8", "int8_smooth"),
}


@pytest.mark.parametrize("kind", COMPUTES)
def test_quantize_experts(device, kind):
    """A model in memory: near to what it was, and in training with gradients, but of smooth weights."""
    format, compute = COMPUTES[kind]
    if not computing.runs_on(format, device):
        pytest.skip("this GPU multiplies no FP8: there compute 'fp8' is 'codes'")
    if kind == "fp8_block" and device.type == "cuda":
        pytest.skip("GPUs take gate and up in one weight of fp8_block by 64 hidden columns, and these are 32")
    eager, ids = ready("qwen3_moe", device, BF16).eval(), token_ids(device)
    ours = quantize_experts(copy.deepcopy(eager), format, compute=compute)
    for _, experts in experts_of(ours):
        assert experts.gate_up_proj.compute == experts.down_proj.compute == compute
        assert (experts.down_proj.smooth is not None) == (compute == "int8_smooth")
    with Calls() as calls, torch.no_grad():
        assert relative(ours(ids).logits, eager(ids).logits) < 0.2
    assert calls.kinds().count("8 bits") == len(experts_of(ours))
    loss = ours.train()(input_ids=ids, labels=ids).loss
    if compute == "int8_smooth":
        with pytest.raises(RuntimeError, match=NO_GRADIENT):
            loss.backward()
    else:
        loss.backward()
        assert ours.get_input_embeddings().weight.grad.any()


@pytest.mark.parametrize(
    ("call", "match"),
    (
        ({"format": "int4", "compute": "fp8"}, "compute 'codes' with format int4, found 'fp8'"),
        ({"format": "int8", "compute": "fp8"}, "with format int8, found 'fp8'"),
        ({"format": "int8", "compute": "smooth"}, "compute to be one of .*found 'smooth'"),
    ),
)
def test_bad_calls_of_quantize_experts(cpu, call, match):
    """They raise before anything is changed."""
    model = ready("qwen3_moe", cpu)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=match):
        quantize_experts(model, **call)
    assert all(p is before[n] for n, p in model.named_parameters())


def test_no_experts(device):
    """Ids of no expert add nothing in 8 bits, too."""
    experts, (x, ids, scores) = serving(device), fp8_call(device, dtype=BF16)
    with torch.no_grad():
        assert not experts(x, torch.full_like(ids, experts.num_experts), scores).any()
        assert experts(x, make_ids("random", T, K, experts.num_experts).to(device), scores).any()


@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("records", (False, True))
def test_max_rows(cpu, trains, records):
    """Experts in 8 bits leave it, as do those that read codes without gradients. In training they have rows
    for it. The values are the same."""
    experts, (x, ids, scores) = serving(cpu).train(trains), fp8_call(cpu)
    x.requires_grad_(trains)
    ids = torch.where(torch.rand(ids.shape) < 0.5, ids, -1)
    num_slots = int((ids >= 0).sum())
    with torch.set_grad_enabled(records):
        expected = experts(x, ids, scores)
        with Calls() as calls:
            found = experts(x, ids, scores, max_rows=num_slots)
    assert torch.equal(found, expected)
    rows = [result.size(0) for _, result in calls.of("quantized_mm")]
    assert rows == ([num_slots] if trains and records else [])
