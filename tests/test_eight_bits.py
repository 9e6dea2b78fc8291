"""8 bits on both operands: a weight's mode and layouts, smoothing, and the experts against the reference."""

import copy
import io
import re

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    ROUTINGS,
    Calls,
    Case,
    assert_as_good,
    make_ids,
    quantize_options,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, fused_experts, grouped_mlp, quantize, reference, smooth_from
from fused_moe.quantized import computing, smoothing, tiles
from fused_moe.quantized.formats import FORMATS

pytestmark = pytest.mark.usefixtures("poison")

# name: format, options of quantize, mode
MODES = {
    "fp8_block": ("fp8_block", {}, "fp8"),
    "fp8": ("fp8", {}, "fp8"),
    "fp8, one scale": ("fp8", {"per_tensor": True}, "fp8"),
    "int8": ("int8", {}, "int8"),
    "int8, one scale": ("int8", {"per_tensor": True}, "int8"),
    "int8_smooth": ("int8", {}, "int8_smooth"),
}
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
EIGHT_BITS = ("fp8_block", "fp8", "int8")
UNTILED = ("fp8", "int8", "int8_smooth")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def smooth_factors(E: int, width: int, device="cpu") -> torch.Tensor:
    return torch.rand(E, width, device=device) + 0.5


# --- a weight's mode --------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_which_modes_a_format_has(device, format):
    """quantize, the constructor and set_compute take the same ones, and say which."""
    right = {
        "fp8_block": ("codes", "fp8", "auto"),
        "fp8": ("codes", "fp8", "auto"),
        "int8": ("codes", "int8", "int8_smooth", "auto"),
    }.get(format, ("codes",))
    weight, options = torch.randn(2, 32, 64, device=device), quantize_options(format)
    for compute in ("codes", "fp8", "int8", "int8_smooth", "auto"):
        w = quantize(weight, format, **options)
        assert w.compute == "codes" and "compute" not in repr(w)
        make = {"format": format, "shape": w.shape, "compute": compute}
        calls = (
            lambda compute=compute: quantize(weight, format, compute=compute, **options),
            lambda w=w, make=make: QuantizedWeight(w.data, w.scale, w.zero, **make),
            lambda w=w, compute=compute: w.set_compute(compute),
        )
        for call in calls:
            if compute in right:
                found = call()
                assert found.compute == compute and (f"compute={compute!r}" in repr(found)) == (
                    compute != "codes"
                )
            else:
                modes = " or ".join(map(repr, right))
                with pytest.raises(ValueError, match=f"expected compute {modes} with format {format}, found"):
                    call()
                assert w.compute == "codes"
    with pytest.raises(ValueError, match="expected compute to be one of"):
        quantize(weight, format, compute="fp16", **options)


def test_smooth_and_power_of_two_belong_to_modes(device):
    int8, fp8 = (quantize(torch.randn(2, 32, 64, device=device), format) for format in ("int8", "fp8"))
    smooth = smooth_factors(2, 64, device)
    own = {"format": "int8", "shape": (2, 32, 64)}

    def make(**changes):
        return QuantizedWeight(
            int8.data, int8.scale, **own | {"compute": "int8_smooth", "smooth": smooth} | changes
        )

    w = make()
    assert torch.equal(w.smooth, smooth) and not w.smooth.requires_grad and "smooth=True" in repr(w)
    assert int8.smooth is None and fp8.set_compute("fp8", power_of_two=True).power_of_two
    assert "power_of_two=True" in repr(fp8) and not fp8.set_compute("auto").power_of_two
    for call, error, message in (
        (
            lambda: make(compute="int8"),
            ValueError,
            "no smooth without compute 'int8_smooth', found compute 'int8'",
        ),
        (lambda: w.set_compute("int8"), ValueError, "no smooth without compute 'int8_smooth', found"),
        (
            lambda: make(smooth=smooth[:1]),
            ValueError,
            r"smooth of shape \(E, in\) = \(2, 64\), found \(1, 64\)",
        ),
        (lambda: make(smooth=smooth.double()), TypeError, "smooth of dtype float32, found torch.float64"),
        (lambda: make(smooth=smooth.to("meta")), ValueError, "smooth on the weight's device .*, found meta"),
        (lambda: make(smooth=[1]), TypeError, "smooth to be a tensor, found list"),
        (lambda: int8.set_compute("int8", power_of_two=True), ValueError, "power_of_two with compute 'fp8'"),
        (lambda: fp8.set_compute("codes", power_of_two=True), ValueError, "power_of_two with compute 'fp8'"),
        (
            lambda: fp8.set_compute("fp8", power_of_two=1),
            TypeError,
            "power_of_two to be True or False, found int 1",
        ),
    ):
        with pytest.raises(error, match=f"expected {message}"):
            call()
    if device.type == "cpu":
        for wrong in (0.0, -1.0, torch.inf, torch.nan, 1e-39):
            with pytest.raises(ValueError, match="smooth of finite numbers > 0"):
                make(smooth=smooth.index_fill(1, torch.tensor([3]), wrong))


def test_what_keeps_mode_and_smooth(device):
    """state_dict and load_state_dict, copies, pickles, other devices, hooks."""
    moe = quantize(FusedMoE(64, 96, 4, 2, device=device), "int8", compute="int8_smooth")
    state = moe.state_dict()
    names = {name for name in state if name.startswith("experts.")}
    assert names == {
        f"experts.{w}.{n}" for w in ("w1", "w2", "w3") for n in ("weight", "weight_scale", "smooth")
    }
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    other = quantize(FusedMoE(64, 96, 4, 2, device=device), "int8", compute="int8_smooth")
    other.load_state_dict(state)
    with torch.device("meta"):
        meta = quantize(FusedMoE(64, 96, 4, 2), "int8", compute="int8_smooth")
    meta.load_state_dict(state, assign=True)
    moved = copy.deepcopy(moe).to(BF16).to("cpu").to(device)
    hooked = copy.deepcopy(moe)
    hooked.experts.w1.register_forward_pre_hook(lambda w, args: None)
    for same in (pickled, other, meta, copy.deepcopy(moe), moved, hooked):
        for name in ("w1", "w2", "w3"):
            w, expected = getattr(same.experts, name), getattr(moe.experts, name)
            assert w.compute == "int8_smooth" and w.smooth.dtype == F32
            assert torch.equal(w.smooth, expected.smooth) and torch.equal(w.data, expected.data)
    plain = quantize(FusedMoE(64, 96, 4, 2, device=device), "int8", compute="int8")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts.w1.smooth"):
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*experts.w1.smooth"):
        other.load_state_dict({name: t for name, t in state.items() if not name.endswith("smooth")})


def test_a_weight_that_an_older_version_pickled(device):
    w = quantize(torch.randn(2, 64, 64, device=device), "int8")
    old = copy.deepcopy(w)
    del old._parameters["smooth"]
    for name in ("_compute", "_power_of_two", "_kept", "_kept_of"):
        vars(old).pop(name, None)
    file = io.BytesIO()
    torch.save(old, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.compute == "codes" and loaded.smooth is None
    assert torch.equal(loaded.dequantize(), w.dequantize())


# --- layouts ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_fp8(monkeypatch):
    """GPUs, here the CPU, multiply no FP8."""
    monkeypatch.setattr(computing, "runs_on", lambda format, device: format == "int8")


def assert_published(w: QuantizedWeight, plain: QuantizedWeight) -> None:
    """Its 8-bit tensors are the codes and scales of an untiled weight."""
    data, scale = w.eight_bit_tensors
    assert torch.equal(bits(data), bits(plain.data)) and scale.dtype == F32
    assert torch.equal(scale, plain.scale.float())


@pytest.mark.quick
@pytest.mark.parametrize("format", EIGHT_BITS)
def test_who_keeps_the_published_layout(cpu, request, format):
    """Where tiles are read: codes have tiles, 8 bits do not, auto has both."""
    weight = torch.randn(2, 64, 192, dtype=BF16)
    plain = quantize(weight, format)
    request.getfixturevalue("tiling")
    codes = quantize(weight, format)
    assert codes.is_tiled and codes.eight_bit_tensors is None and codes.data_p is None
    for compute in UNTILED:
        if format in computing.FORMATS_OF[compute]:
            w = copy.deepcopy(codes).set_compute(compute)
            assert not w.is_tiled and w.nbytes <= plain.nbytes + plain.scale.numel() * 4
            assert_published(w, plain)
            assert w.data.data_ptr() == w.eight_bit_tensors[0].data_ptr()  # no copy
            assert w.set_compute("codes").is_tiled and w.scale_p is None
            assert torch.equal(bits(w.tensors[0]), bits(codes.tensors[0]))
    both = copy.deepcopy(codes).set_compute("auto")
    assert both.is_tiled and torch.equal(bits(both.tensors[0]), bits(codes.tensors[0]))
    assert_published(both, plain)
    assert 1.9 * codes.nbytes <= both.nbytes <= 2.1 * codes.nbytes
    assert not list(both.buffers()) and both.state_dict().keys() == codes.state_dict().keys()
    assert both.set_compute("codes").data_p is None and both.nbytes == codes.nbytes


def test_which_devices_multiply_fp8(cpu, monkeypatch):
    """A GPU is asked once; CPUs do, and int8 is multiplied everywhere."""
    asked = []
    monkeypatch.setattr(computing, "_runs_fp8", {})
    monkeypatch.setattr(computing, "why_no_fp8", lambda index: asked.append(index) or "why" * index)
    for _ in range(2):
        found = [computing.runs_on("fp8_block", torch.device("cuda", index)) for index in (0, 1)]
        assert found == [True, False] and asked == [0, 1]
    assert computing.runs_on("int8", torch.device("cuda", 1)) and computing.runs_on("fp8", cpu)
    assert asked == [0, 1]


@pytest.mark.usefixtures("tiling", "no_fp8")
def test_where_no_fp8_is_multiplied(cpu):
    """fp8 keeps tiles alone there, as codes do; int8 is multiplied."""
    for compute in ("fp8", "auto"):
        w = quantize(torch.randn(2, 64, 64), "fp8_block", compute=compute)
        assert w.is_tiled and w.eight_bit_tensors is None
    assert not quantize(torch.randn(2, 64, 64), "int8", compute="int8").is_tiled


@pytest.mark.usefixtures("tiling")
@pytest.mark.parametrize("format", EIGHT_BITS)
def test_what_is_kept_follows_the_weight(cpu, format):
    """Loads, in place; writes; moves; copies; refresh_weights."""
    first, second = (
        quantize(torch.randn(2, 64, 128), format, compute="auto", trainable=True) for _ in range(2)
    )
    first_published = first.data.clone()
    places = [t.data_ptr() for t in (*first.eight_bit_tensors, first.data_t)]
    first.load_state_dict(second.state_dict())
    assert [t.data_ptr() for t in (*first.eight_bit_tensors, first.data_t)] == places
    assert torch.equal(bits(first.data_p), bits(second.data_p)) and torch.equal(first.scale_p, second.scale_p)
    assert torch.equal(bits(first.data_t), bits(second.data_t))
    other = quantize(torch.randn(2, 64, 128), format, compute="auto")
    for own, written in zip(first._stored(), other._stored(), strict=True):
        own.copy_(written)  # as DistributedDataParallel's first broadcast
    assert torch.equal(bits(first.eight_bit_tensors[0]), bits(other.data))
    for own, written in zip(first._stored(), second._stored(), strict=True):
        own.data.copy_(written)
    fused_moe.refresh_weights(first)
    assert torch.equal(bits(first.eight_bit_tensors[0]), bits(second.data))
    copied = copy.deepcopy(first)
    assert_published(copied, first)
    assert copied.eight_bit_tensors[0].data_ptr() != first.eight_bit_tensors[0].data_ptr()
    assert_published(first.to(F16), second)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(tiles, "are_read_on", lambda device: False)
        moved = copied.to(cpu)
        assert not moved.is_tiled and moved.data_p is None and moved.data_t is None
        assert_published(moved, second)
    assert not torch.equal(bits(first_published), bits(second.data))


def test_scales_of_16_bits_are_kept_in_float32(device):
    """Beside the published ones, which a state_dict has; written again where those are loaded."""
    made = quantize(torch.randn(2, 64, 64, device=device, dtype=BF16), "int8")
    w = QuantizedWeight(made.data, made.scale, format="int8", shape=made.shape, compute="int8")
    assert w.weight_scale.dtype == w.state_dict()["weight_scale"].dtype == BF16
    _, scale = w.eight_bit_tensors
    assert scale.data_ptr() == w.eight_bit_tensors[1].data_ptr() == w.scale_p.data_ptr()
    assert torch.equal(scale, made.scale.float())
    other = quantize(torch.randn(2, 64, 64, device=device, dtype=BF16), "int8")
    w.load_state_dict(other.state_dict())
    assert w.scale_p.data_ptr() == scale.data_ptr() and torch.equal(scale, other.scale.float())
    w.load_state_dict(quantize(torch.randn(2, 64, 64, device=device), "int8").state_dict())
    assert w.scale_p is None and w.eight_bit_tensors[1].data_ptr() == w.weight_scale.data_ptr()


# --- quantize and smoothing -------------------------------------------------------------------------------


@EVERY_MODE
def test_quantize_for_a_mode(device, mode):
    """Scales are float32 and codes the nearest of them, times the factors."""
    format, options, compute = MODES[mode]
    weight = torch.randn(3, 40, 48, device=device, dtype=BF16)
    w = quantize(weight, format, compute=compute, **options)
    wide = weight.float() if w.smooth is None else weight.float() * w.smooth.unsqueeze(1)
    expected = quantize(wide, format, **options)
    assert w.scale.dtype == F32 and w.dtype == BF16
    assert torch.equal(w.scale, expected.scale) and torch.equal(bits(w.data), bits(expected.data))


def test_factors_from_weights_alone(device):
    """The inverse square root of column peaks, over its geometric mean; of w1 and w3 together."""
    moe = FusedMoE(16, 24, 3, 2, device=device)
    with torch.no_grad():
        moe.experts.w1[:, :, 5] = moe.experts.w3[:, :, 5] = 0
        moe.experts.w2[1, 3, 7] = torch.nan
    w1, w2, w3 = (w.detach().clone() for w in moe.experts.weights)
    quantize(moe, "int8", compute="int8_smooth")
    found = [w.smooth for w in moe.experts.weights]
    assert torch.equal(found[0], found[2]) and found[0].data_ptr() != found[2].data_ptr()
    for smooth, weights, is_odd in (
        (found[0], (w1, w3), lambda e, i: i == 5),
        (found[1], (w2,), lambda e, i: (e, i) == (1, 7)),
    ):
        for e in range(3):
            channels = range(smooth.size(1))
            peaks = [max(w[e, :, i].abs().max().item() for w in weights) for i in channels]
            right = [i for i in channels if not is_odd(e, i)]
            values = torch.tensor([peaks[i] ** -0.5 for i in right], dtype=F64)
            expected = values / values.log().mean().exp()
            torch.testing.assert_close(smooth[e, right].cpu().double(), expected, rtol=1e-5, atol=0)
            assert all(smooth[e, i] == 1 for i in channels if is_odd(e, i))


def calibrated(device, dtype=F32, **options):
    """A layer some of whose channels of x are outliers, and x."""
    moe = FusedMoE(32, 48, 4, 2, device=device, dtype=dtype, **options)
    x = torch.randn(200, 32, device=device, dtype=dtype)
    x[:, 3] *= 60
    x[:, 17] *= 30
    return moe, x


@pytest.mark.parametrize(
    "options", ({}, {"gated": False, "activation": "relu2"}, {"bias": True, "activation": "situ"})
)
@pytest.mark.parametrize("alpha", (0.0, 0.5, 0.8, 1.0))
def test_smooth_from_is_its_formula(device, options, alpha):
    """peak_x^alpha / peak_w^(1 - alpha) of each expert's own tokens, over its geometric mean."""
    moe, x = calibrated(device, **options)
    found = smooth_from(moe, [x[:50], (x[50:120],), {"x": x[120:]}], alpha)
    assert list(found) == ["experts"]
    w1, w2, w3 = (None if w is None else w.detach().double() for w in moe.experts.weights)
    with torch.no_grad():
        _, ids, _ = moe.router(x, None)
    for e in range(4):
        rows = x[(ids == e).any(1)].double()
        b1, b3 = (None if b is None else b[e].double() for b in (moe.experts.b1, moe.experts.b3))
        gate = torch.nn.functional.linear(rows, w1[e], b1)
        up = None if w3 is None else torch.nn.functional.linear(rows, w3[e], b3)
        a = reference.activate(gate, up, **fused_moe.module.activation_of(moe.experts))
        of_x = w1[e].abs() if w3 is None else torch.maximum(w1[e].abs(), w3[e].abs())
        for smooth, peaks, columns in zip(
            found["experts"], (rows, a), (of_x.amax(0), w2[e].abs().amax(0)), strict=True
        ):
            peaks = peaks.abs().amax(0)
            expected = peaks**alpha / columns ** (1 - alpha)
            expected = expected / expected[expected > 0].log().mean().exp()
            expected = torch.where(expected > 0, expected, 1)
            torch.testing.assert_close(smooth[e].double(), expected, rtol=1e-4, atol=0)


def test_experts_without_tokens_have_factors_of_their_weights(device):
    moe, x = calibrated(device)
    ids = make_ids("gaps", 200, 2, 4).to(device)
    found = smooth_from(moe, [{"x": x, "ids": ids}])["experts"]
    alone = smoothing.from_experts(moe.experts)
    for measured, of_weights in zip(found, alone, strict=True):
        assert torch.equal(measured[1], of_weights[1]) and not torch.equal(measured[0], of_weights[0])


def test_smooth_from_leaves_the_module_as_it_was(device):
    """Training flags, counters, hooks, gradients."""
    moe, x = calibrated(device, load_balance_coeff=1e-3)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), moe)
    moe.router.eval()
    flags = [m.training for m in model.modules()]
    first, second = (smooth_from(model, [x]) for _ in range(2))
    assert list(first) == ["1.experts"]
    for one, other in zip(first["1.experts"], second["1.experts"], strict=True):
        assert torch.equal(one, other) and not one.requires_grad and one.dtype == F32  # no dropout
    assert [m.training for m in model.modules()] == flags and not moe.tokens_per_expert.any()
    assert not moe.experts._forward_pre_hooks and all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="FusedMoE: expected x of shape"):
        smooth_from(model, [x[:, :3]])
    assert [m.training for m in model.modules()] == flags and not moe.experts._forward_pre_hooks


def test_smoothing_takes_outliers_from_x(device):
    """With factors of calibration int8 errs less where channels of x are outliers."""
    moe, x = calibrated(device)
    with torch.no_grad():
        expected = moe(x)
    found = smooth_from(moe, [x])
    errors = {}
    for name, options in (
        ("int8", {"compute": "int8"}),
        ("calibrated", {"compute": "int8_smooth", "smooth": found}),
    ):
        loop = reference.FusedMoE(32, 48, 4, 2, device=device)
        loop.load_state_dict(moe.state_dict())
        quantize(loop, "int8", **options)
        errors[name] = ((loop(x) - expected).norm() / expected.norm()).item()
    assert errors["calibrated"] < 0.7 * errors["int8"], errors


def test_wrong_smoothing(device):
    moe, x = calibrated(device)
    right = smooth_from(moe, [x])
    smooth1, smooth2 = right["experts"]
    lora = fused_moe.add_lora(copy.deepcopy(moe), 2)
    some = copy.deepcopy(moe)
    some.experts.w1 = quantize(some.experts.w1, "int8")
    for call, error, message in (
        (lambda: smooth_from(moe, x), TypeError, "batches to be an iterable of inputs, found Tensor"),
        (lambda: smooth_from(moe, 3), TypeError, "batches to be an iterable of inputs, found int"),
        (lambda: smooth_from(moe, []), ValueError, "batches that reach the experts 'experts', found none"),
        (lambda: smooth_from(moe, [x], 1.5), ValueError, "alpha from 0 to 1, found 1.5"),
        (lambda: smooth_from(torch.nn.Linear(2, 2), [x]), ValueError, "a module with a FusedMoE in it"),
        (lambda: smooth_from(lora, [x]), ValueError, "experts without adapters, found experts with them"),
        (lambda: smooth_from(some, [x]), ValueError, "w1 of experts that are not quantised yet, found Quant"),
        (
            lambda: q(moe, smooth=3),
            TypeError,
            "smooth to be what smooth_from returns of the module, found int",
        ),
        (
            lambda: q(moe, smooth={"x": right["experts"]}),
            ValueError,
            r"smooth of \['experts'\], .*found \['x'\]",
        ),
        (
            lambda: q(moe, smooth={"experts": smooth1}),
            TypeError,
            r"smooth\['experts'\] to be \(smooth1, smooth2\)",
        ),
        (
            lambda: q(moe, smooth={"experts": (smooth2, smooth1)}),
            ValueError,
            r"smooth\['experts'\]\[0\] of shape",
        ),
        (lambda: q(moe, compute="int8", smooth=right), ValueError, "no smooth without compute 'int8_smooth'"),
        (lambda: q(moe.experts.w1, smooth=right), TypeError, "smooth to be a tensor, found dict"),
        (lambda: q(moe.experts.w1, smooth=smooth2), ValueError, r"smooth of shape \(E, in\)"),
        (lambda: q(lora), ValueError, "experts without adapters with compute 'int8_smooth'"),
        (
            lambda: q(some),
            ValueError,
            "experts none of whose weights is quantised yet .*, found w2 and w3 alone",
        ),
    ):
        with pytest.raises(error, match=f"expected {message}"):
            call()
    assert all(isinstance(w, torch.nn.Parameter) for w in moe.experts.weights)


def q(what, **options):
    return quantize(what, "int8", **{"compute": "int8_smooth"} | options)


# --- the reference's rows ---------------------------------------------------------------------------------


def rows_one_by_one(rows: torch.Tensor, format: str, power_of_two: bool) -> torch.Tensor:
    """quantize_rows by eight_bit.h's words, each code by a search of the nearest."""
    if format == "int8":
        codes = torch.arange(-127.0, 128)
    else:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = every[every.isfinite()].unique()
    out = torch.empty_like(rows, dtype=F32)
    for i, row in enumerate(rows.float()):
        peak = row.abs().max()
        scale = peak / codes.max() if peak > 0 else torch.tensor(1.0)
        scale = scale.clamp_min(2.0**-120)
        if power_of_two:
            scale = torch.tensor(next(2.0**n for n in range(-120, 128) if 2.0**n >= scale))
        value = row * (1 / scale)
        distance = (value.double().unsqueeze(1) - codes.double()).abs()
        nearest = codes[distance.argmin(1)]
        out[i] = nearest * scale
    return out


@pytest.mark.quick
@pytest.mark.parametrize("format", ("fp8_block", "int8"))
@pytest.mark.parametrize("power_of_two", (False, True))
def test_rows_of_the_reference(cpu, format, power_of_two):
    """Every code is the nearest, whatever a row's size; zeros, NaN, and what no scale reaches."""
    rows = torch.randn(40, 33) * torch.logspace(-30, 30, 40).unsqueeze(1)
    found = reference.quantize_rows(rows, format, power_of_two=power_of_two)
    assert torch.equal(found, rows_one_by_one(rows, format, power_of_two))
    found = reference.quantize_rows(rows.double(), format, power_of_two=power_of_two)
    assert found.dtype == F64
    rows = torch.zeros(4, 8)
    rows[1, 3], rows[2, 0], rows[3, 1] = torch.nan, 1e-40, -2.0
    found = reference.quantize_rows(rows, format, power_of_two=power_of_two)
    assert not found[0].any() and found[1].isnan().all() and found[3, 1] == -2
    assert found[2].abs().max() <= 2.0**-119 and not found[2, 1:].any()


def test_ties_go_to_even(cpu):
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert reference.quantize_rows(rows, "int8").tolist() == [[127, 0, 2, 2, 0, -2]]
    rows = torch.tensor([[448.0, 17.0, 19.0, 21.0, -17.0]])
    assert reference.quantize_rows(rows, "fp8").tolist() == [[448, 16, 20, 20, -16]]


# --- experts ----------------------------------------------------------------------------------------------


def inputs_of(case: Case, device, mode: str) -> tuple[dict, dict]:
    """fused_experts' inputs, and its weights quantised for a mode; w1 and w3 share their factors."""
    inputs = case.inputs(device)
    weights = {name: inputs.pop(name) for name in ("w1", "w2", "w3")}
    format, options, compute = MODES[mode]
    smooth = dict.fromkeys(weights)
    if compute == "int8_smooth":
        of_x = [w for name, w in weights.items() if name != "w2" and w is not None]
        smooth = {"w1": smoothing.from_weights(*of_x), "w2": smoothing.from_weights(weights["w2"])}
        smooth["w3"] = smooth["w1"]
    for name, w in weights.items():
        if w is not None:
            weights[name] = quantize(w, format, compute=compute, smooth=smooth[name], **options)
    return inputs, weights


def truth_of(inputs: dict, weights: dict, **fixed) -> torch.Tensor:
    """The experts in float64, of the weights' values and of rows that are not rounded."""
    values = {}
    for name, w in weights.items():
        values[name] = None if w is None else w.dequantize(F64)
        if w is not None and w.smooth is not None:
            values[name] = values[name] / w.smooth.unsqueeze(1)
    return reference.fused_experts(**to_double(inputs), **values, **to_double(fixed))


def assert_as_good_as_the_loop(case: Case, device, mode: str, **options) -> torch.Tensor:
    """The error is that of the loop that rounds rows the same way. Results are the loop's, but for what sums
    in another order move to the next code. A GPU sums e4m3 with fewer bits, which moves more."""
    inputs, weights = inputs_of(case, device, mode)
    if device.type == "cuda" and mode == "fp8_block" and case.layout == "halves" and case.hidden % 64:
        with pytest.raises(ValueError, match="multiple of 64 with compute 'fp8' and halves, found"):
            fused_experts(**inputs, **weights, ids=case.ids(device), layout="halves")
        return None
    layout = {name: value for name, value in case.options.items() if name != "transposed"}
    fixed = {"ids": case.ids(device), "score_on": case.score_on, **layout, **options}
    out, eager = (f(**inputs, **weights, **fixed) for f in (fused_experts, reference.fused_experts))
    assert_as_good({"out": out}, {"out": eager}, {"out": truth_of(inputs, weights, **fixed)})
    near = 2e-3 if device.type == "cpu" else 3e-2
    assert (out.double() - eager.double()).norm() <= near * eager.double().norm()
    return out


@pytest.mark.quick(one_in=5)
@EVERY_MODE
@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
@pytest.mark.parametrize("dim, hidden", ((64, 96), (144, 272)))
def test_experts(device, mode, dtype, dim, hidden):
    """Also with widths that no block of 128 divides."""
    if dtype == F32 and device.type == "cuda":
        pytest.skip("on a GPU x has 16 bits")
    case = Case(tokens=70, dim=dim, hidden=hidden, dtype=dtype, bias=True)
    assert_as_good_as_the_loop(case, device, mode)


@EVERY_MODE
@pytest.mark.parametrize("layout", ("separate", "ungated", "halves", "interleaved"))
@pytest.mark.parametrize(
    "score_on, activation", (("output", "silu"), ("input", "swiglu_clamped"), ("output", "relu2"))
)
def test_layouts_and_activations(device, mode, layout, score_on, activation):
    """Packed gate and up have the scale blocks of the published tensor."""
    case = Case(
        tokens=40, dim=64, hidden=144, dtype=BF16, layout=layout, activation=activation, bias=True,
        score_on=score_on,
    )  # fmt: skip
    assert_as_good_as_the_loop(case, device, mode)


@given(
    tokens=st.sampled_from((0, 1, 2, 33, 130)),
    dim=st.sampled_from((16, 48, 128, 272)),
    hidden=st.sampled_from((16, 80, 128, 144)),
    num_experts=st.sampled_from((1, 2, 5)),
    routing=st.sampled_from(ROUTINGS),
    layout=st.sampled_from(("separate", "ungated", "halves", "interleaved")),
    mode=st.sampled_from(sorted(MODES)),
    bias=st.booleans(),
    score_on=st.sampled_from(("output", "input")),
    dtype=st.sampled_from((BF16, F16)),
    seed=st.integers(0, 999),
)
def test_any_case(
    device, tokens, dim, hidden, num_experts, routing, layout, mode, bias, score_on, dtype, seed
):
    """Any sizes, routing, layout and mode."""
    torch.manual_seed(seed)
    top_k = min(2, num_experts)
    case = Case(
        tokens,
        dim,
        hidden,
        num_experts,
        top_k,
        dtype,
        routing,
        layout,
        bias=bias,
        score_on=score_on,
        seed=seed,
    )
    assert_as_good_as_the_loop(case, device, mode)


@pytest.mark.parametrize("mode", ("fp8_block", "int8_smooth"))
def test_options(device, mode):
    """expert_map, ids of 64 bits, shared experts and their gate, out, autocast."""
    case = Case(tokens=40, dim=64, hidden=96, num_experts=4, dtype=BF16)
    expert_map = torch.tensor([2, -1, 0, 3, 1, -1], dtype=torch.int32, device=device)
    shared = {"shared": torch.randn(40, 64, device=device, dtype=BF16)}
    gate = {"shared_gate": torch.randn(40, device=device)}
    for options in ({"expert_map": expert_map}, shared, shared | gate):
        assert_as_good_as_the_loop(case, device, mode, **options)
    inputs, weights = inputs_of(case, device, mode)
    ids = case.ids(device)
    expected = fused_experts(**inputs, **weights, ids=ids)
    assert torch.equal(fused_experts(**inputs, **weights, ids=ids.long()), expected)
    out = torch.empty_like(expected)
    with torch.no_grad():
        assert fused_experts(**inputs, **weights, ids=ids, out=out) is out
    assert torch.equal(out, expected)
    wide = {name: None if t is None else t.float() for name, t in inputs.items()}
    with torch.autocast(device.type, BF16):
        found = fused_experts(**wide, **weights, ids=ids)
    assert found.dtype == BF16 and torch.equal(found, expected)
    with pytest.raises(ValueError, match="out that shares no memory with another argument"), torch.no_grad():
        fused_experts(**inputs, **weights, ids=ids, out=inputs["x"])


@EVERY_MODE
def test_tokens_have_scales_of_their_own(device, mode):
    """A token has the same bits alone and in any batch; NaN stays in its token; tiny ones are as exact."""
    case = Case(tokens=60, dim=64, hidden=144, dtype=BF16)
    inputs, weights = inputs_of(case, device, mode)
    inputs["x"] *= torch.logspace(-3, 3, 60, device=device, dtype=BF16).unsqueeze(1)
    ids = case.ids(device)
    out = fused_experts(**inputs, **weights, ids=ids)
    for some in ([7], [59, 0], list(range(30)), torch.randperm(60).tolist()):
        part = {n: t[some] if n in ("x", "scores") else t for n, t in inputs.items()}
        assert torch.equal(fused_experts(**part, **weights, ids=ids[some]), out[some])
    truth = truth_of(inputs, weights, ids=ids)
    error = (out - truth).norm(dim=1) / truth.norm(dim=1)
    assert error.max() < 3 * error.median(), error
    inputs["x"][5, 9], inputs["x"][6] = torch.nan, 0
    odd = fused_experts(**inputs, **weights, ids=ids)
    others = [t for t in range(60) if t not in (5, 6)]
    assert odd[5].isnan().all() and torch.equal(odd[others], out[others]) and not odd[6].any()


@pytest.mark.parametrize("mode", ("fp8_block", "fp8"))
def test_scales_that_are_powers_of_two(device, mode):
    case = Case(tokens=40, dim=64, hidden=144, dtype=BF16)
    inputs, weights = inputs_of(case, device, mode)
    ids = case.ids(device)
    usual = fused_experts(**inputs, **weights, ids=ids)
    for w in weights.values():
        w.set_compute("fp8", power_of_two=True)
    out, eager = (f(**inputs, **weights, ids=ids) for f in (fused_experts, reference.fused_experts))
    assert_as_good({"out": out}, {"out": eager}, {"out": truth_of(inputs, weights, ids=ids)})
    near = 2e-3 if device.type == "cpu" else 1.5e-2
    assert (out - eager).norm() <= near * eager.norm() < (out - usual).norm()


@EVERY_MODE
def test_a_given_mode_overrides(device, mode):
    """The weights' mode, and their smooth."""
    case = Case(tokens=60, dim=64, hidden=96, dtype=BF16)
    inputs, weights = inputs_of(case, device, mode)
    ids, (_, _, compute) = case.ids(device), MODES[mode]
    expected = fused_experts(**inputs, **weights, ids=ids)
    given = {"compute": compute}
    if compute == "int8_smooth":
        given |= {"smooth1": weights["w1"].smooth, "smooth2": weights["w2"].smooth}
    own = {"format": weights["w1"].format, "compute": "int8" if compute.startswith("int8") else "fp8"}
    plain = {n: QuantizedWeight(w.data, w.scale, shape=w.shape, **own) for n, w in weights.items()}
    assert torch.equal(fused_experts(**inputs, **plain, ids=ids, **given), expected)
    loop = reference.fused_experts(**inputs, **plain, ids=ids, **given)
    assert torch.equal(loop, reference.fused_experts(**inputs, **weights, ids=ids))
    values = {n: w.dequantize(BF16) for n, w in plain.items()}
    codes = fused_experts(**inputs, **plain, ids=ids, compute="codes")
    torch.testing.assert_close(codes, fused_experts(**inputs, **values, ids=ids))
    assert not torch.equal(codes, expected)


@pytest.mark.parametrize("format", EIGHT_BITS)
def test_auto(device, format):
    """Codes up to 16 rows of an expert on average, 8 bits beyond; each with that mode's bits."""
    case = Case(tokens=41, dim=64, hidden=128, num_experts=5, dtype=BF16)
    inputs = case.inputs(device)
    weights = {n: quantize(inputs.pop(n), format, compute="auto") for n in ("w1", "w2", "w3")}
    ids, eight_bits = case.ids(device), "int8" if format == "int8" else "fp8"
    of = {"codes": copy.deepcopy(weights), eight_bits: copy.deepcopy(weights)}
    for compute, own in of.items():
        for w in own.values():
            w.set_compute(compute)
    for tokens, compute in ((40, "codes"), (41, eight_bits)):
        part = {n: t[:tokens] if n in ("x", "scores") else t for n, t in inputs.items()}
        part["ids"] = ids[:tokens]
        found = fused_experts(**part, **weights)
        assert torch.equal(found, fused_experts(**part, **of[compute]))
        loop = reference.fused_experts(**part, **weights)
        assert torch.equal(loop, reference.fused_experts(**part, **weights, compute=compute))


def test_which_operator_runs(device):
    """One, in grad mode, too: that of 8 bits, with float32 scales; that of codes for few rows of auto."""
    case = Case(tokens=60, dim=64, hidden=128, num_experts=4, dtype=BF16)
    inputs = case.inputs(device)
    made = {n: quantize(inputs.pop(n), "int8") for n in ("w1", "w2", "w3")}
    for compute, tokens, kind in (
        ("int8", 1, "8 bits"),
        ("auto", 60, "8 bits"),
        ("auto", 2, "values"),
        ("codes", 2, "values"),
    ):
        weights = {
            n: QuantizedWeight(w.data, w.scale, format="int8", shape=w.shape, compute=compute)
            for n, w in made.items()
        }
        part = {n: t[:tokens] if n in ("x", "scores") else t for n, t in inputs.items()}
        with Calls() as calls:
            fused_experts(**part, **weights, ids=case.ids(device)[:tokens])
        ours = [(n, a) for n, a, _ in calls.calls if n.startswith("fused_moe::")]
        assert [n for n, _ in ours] == ["fused_moe::experts"] and calls.kinds() == [kind]
        if kind == "8 bits":
            assert [scale.dtype for _, scale in ours[0][1][1:4]] == [F32] * 3
            assert weights["w1"].is_tiled or weights["w1"].weight_scale.dtype == BF16


@EVERY_MODE
@pytest.mark.parametrize("leaf", ("x", "scores", "b1"))
def test_no_gradient(device, mode, leaf):
    """Forward runs in grad mode, with the same bits; backward raises."""
    case = Case(tokens=20, dim=64, hidden=96, dtype=BF16, bias=True)
    inputs, weights = inputs_of(case, device, mode)
    with torch.no_grad():
        expected = fused_experts(**inputs, **weights, ids=case.ids(device))
    inputs[leaf].requires_grad_()
    out = fused_experts(**inputs, **weights, ids=case.ids(device))
    assert torch.equal(out, expected)
    out += 1  # it is no view
    with pytest.raises(RuntimeError, match="another compute than 'codes' has no gradient"):
        out.sum().backward()


@pytest.mark.usefixtures("no_fp8")
@pytest.mark.parametrize("compute", ("fp8", "auto"))
def test_fp8_where_it_is_not_multiplied(cpu, compute):
    """The bits of codes, and no gradient either."""
    case = Case(tokens=60, dim=64, hidden=96, num_experts=3, dtype=BF16)
    inputs = case.inputs(cpu)
    weights = {n: quantize(inputs.pop(n), "fp8_block", compute=compute) for n in ("w1", "w2", "w3")}
    expected = fused_experts(**inputs, **weights, ids=case.ids(cpu), compute="codes")
    inputs["x"].requires_grad_()
    out = fused_experts(**inputs, **weights, ids=case.ids(cpu))
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="another compute than 'codes' has no gradient"):
        out.sum().backward()


@pytest.mark.usefixtures("tiling")
def test_weights_in_tiles_alone(cpu):
    """fp8 cannot be asked of them; auto takes codes."""
    case = Case(tokens=60, dim=64, hidden=128, num_experts=3, dtype=BF16)
    inputs = case.inputs(cpu)
    weights = {n: quantize(inputs.pop(n), "fp8_block") for n in ("w1", "w2", "w3")}
    message = "weights as published with compute 'fp8'; set_compute keeps them so, found weights in tiles"
    with pytest.raises(ValueError, match=message):
        fused_experts(**inputs, **weights, ids=case.ids(cpu), compute="fp8")
    x, ids = torch.empty(60, 64, dtype=BF16), case.ids(cpu)
    both = {n: copy.deepcopy(w).set_compute("auto") for n, w in weights.items()}
    for own, are_there in ((weights, False), (both, True)):
        tensors = computing.eight_bit_tensors("", "auto", x, ids, tuple(own.values()), "separate")
        assert (tensors is not None) == are_there


def wrong_calls(device):
    """(what is wrong, changes of a right call, error, message)"""
    E, D, F = 3, 32, 48

    def weights(format="int8", compute="int8", **options):
        shapes = {"w1": (E, F, D), "w2": (E, D, F), "w3": (E, F, D)}
        made = {n: torch.randn(s, device=device) for n, s in shapes.items()}
        return {n: quantize(w, format, compute=compute, **options) for n, w in made.items()}

    smooth1, smooth2 = smooth_factors(E, D, device), smooth_factors(E, F, device)
    x, floats = (
        torch.randn(6, D, device=device, dtype=BF16),
        {n: w.dequantize(BF16) for n, w in weights().items()},
    )
    int8, fp8, block = weights(), weights("fp8", "fp8"), weights("fp8_block", "fp8")
    smooth = weights(compute="int8_smooth", smooth=None)
    w3 = torch.randn(E, F, D, device=device)
    smooth["w3"] = quantize(w3, "int8", compute="int8_smooth", smooth=smooth["w1"].smooth)
    power = copy.deepcopy(fp8)
    power["w2"].set_compute("fp8", power_of_two=True)
    low = {"a1": torch.zeros(E, 2, D, dtype=BF16), "b1": torch.zeros(E, F, 2, dtype=BF16)}
    lora = fused_moe.LoRA(**{name: t.to(device) for name, t in low.items()})
    plan = fused_moe.route_plan(make_ids("random", 6, 2, E).int().to(device), E)
    right = {"compute": "int8_smooth", "smooth1": smooth1, "smooth2": smooth2}
    main = (torch.zeros(E, F, D, device=device), None, None)
    turned = {n: floats[n].mT.contiguous() for n in floats}
    yield from (
        ("no mode", {"compute": "fp16"}, ValueError, "compute to be one of"),
        ("no word", {"compute": 8}, ValueError, "compute to be one of"),
        ("floats", {**floats, "compute": "fp8"}, TypeError, "w1 to be a QuantizedWeight with compute 'fp8'"),
        ("one float", {"w2": floats["w2"], "compute": "int8"}, TypeError, "w2 to be a QuantizedWeight"),
        (
            "codes beside",
            {"w2": floats["w2"]},
            ValueError,
            "weights of one compute, found w1 with 'int8', w2 with",
        ),
        (
            "two modes",
            {"w2": fp8["w2"]},
            ValueError,
            "weights of one compute, found w1 with 'int8', w2 with 'fp8'",
        ),
        (
            "format",
            {"compute": "fp8"},
            ValueError,
            "w1 of format fp8_block or fp8 with compute 'fp8', found int8",
        ),
        (
            "two formats",
            {**fp8, "w2": block["w2"]},
            ValueError,
            "weights of one format with compute 'fp8', found",
        ),
        (
            "two scales",
            {"w3": weights(per_tensor=True)["w3"]},
            ValueError,
            "w1 and w3 with scales of the same shape",
        ),
        ("powers", power, ValueError, "weights of one power_of_two, found some with and some without"),
        (
            "smooth1",
            {"smooth1": smooth1},
            ValueError,
            "no smooth1 without compute 'int8_smooth', found compute",
        ),
        (
            "smooth2",
            {**floats, "smooth2": smooth2},
            ValueError,
            "no smooth2 without compute 'int8_smooth', found",
        ),
        (
            "as int8",
            {**smooth, "compute": "int8"},
            ValueError,
            "compute 'int8_smooth' with w1, whose codes were",
        ),
        (
            "as codes",
            {**smooth, "compute": "codes"},
            ValueError,
            "compute 'int8_smooth' with w1, whose codes were",
        ),
        (
            "shape",
            right | {"smooth1": smooth2},
            ValueError,
            r"smooth1 of shape \(E, D\) = \(3, 32\), found \(3, 48",
        ),
        (
            "shape",
            right | {"smooth2": smooth1},
            ValueError,
            r"smooth2 of shape \(E, F\) = \(3, 48\), found \(3, 32",
        ),
        (
            "dtype",
            right | {"smooth1": smooth1.double()},
            TypeError,
            "smooth1 of dtype float32, found torch.float64",
        ),
        ("device", right | {"smooth2": smooth2.to("meta")}, ValueError, "smooth2 on x's device"),
        ("list", right | {"smooth2": [1.0]}, TypeError, "smooth2 to be a tensor, found list"),
        ("lora", {"lora": lora}, ValueError, "no lora with compute 'int8', found a lora"),
        ("plan", {"plan": plan}, ValueError, "no plan with compute 'int8', found a plan"),
        (
            "main_grads",
            {"main_grads": main},
            ValueError,
            "no main_grads beside quantised weights, found some",
        ),
        ("transposed", {"transposed": True}, ValueError, "transposed=False with a quantised w1, found"),
        (
            "turned",
            {**turned, "transposed": True, "compute": "int8"},
            TypeError,
            "w1 to be a QuantizedWeight",
        ),
        ("float64", {"x": x.double()}, TypeError, "x of dtype .* with compute 'int8', found torch.float64"),
    )
    if device.type == "cpu":
        other = {**smooth, "w3": weights(compute="int8_smooth")["w3"]}
        yield "two smooths", other, ValueError, "w1 and w3 with the same smooth, found two that differ"
    one = {**smooth, "w3": int8["w3"].set_compute("int8_smooth")}
    yield "one smooth", one, ValueError, "w1 and w3 with the same smooth, found one without"


def test_wrong_calls(device):
    """TypeError or ValueError, with what was expected and found, before an operator runs."""
    ids, scores = make_ids("random", 6, 2, 3).int().to(device), torch.rand(6, 2, device=device)
    shapes = {"w1": (3, 48, 32), "w2": (3, 32, 48), "w3": (3, 48, 32)}
    weights = {n: torch.randn(s, device=device) for n, s in shapes.items()}
    right = {n: quantize(w, "int8", compute="int8") for n, w in weights.items()}
    right |= {"x": torch.randn(6, 32, device=device, dtype=BF16), "ids": ids, "scores": scores}
    fused_experts(**right)
    for what, changes, error, message in wrong_calls(device):
        with Calls() as calls, pytest.raises(error) as found:
            fused_experts(**right | changes)
        assert re.match(f"fused_experts: expected {message}", str(found.value)), (what, str(found.value))
        assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")], what


@pytest.mark.gpu
def test_what_a_gpu_refuses(device):
    """float32 x, and widths that are no multiples of 16; auto takes codes for these."""
    for D, F, dtype, error, message in (
        (32, 48, F32, TypeError, "x of dtype bfloat16 or float16 with compute 'int8', found torch.float32"),
        (40, 48, BF16, ValueError, r"D and F that are multiples of 16 with compute 'int8', found \(40, 48\)"),
    ):
        case = Case(tokens=100, dim=D, hidden=F, num_experts=3, dtype=dtype)
        inputs = case.inputs(device)
        weights = {n: quantize(inputs.pop(n), "int8", compute="int8") for n in ("w1", "w2", "w3")}
        with pytest.raises(error, match=message):
            fused_experts(**inputs, **weights, ids=case.ids(device))
    for w in weights.values():
        w.set_compute("auto")
    codes = fused_experts(**inputs, **weights, ids=case.ids(device), compute="codes")
    assert torch.equal(fused_experts(**inputs, **weights, ids=case.ids(device)), codes)


@pytest.mark.parametrize("compute", ("int8", "auto", "int8_smooth"))
def test_grouped_mlp_takes_codes_alone(device, compute):
    weights = {n: torch.randn(2, 32, 32, device=device) for n in ("w1", "w2", "w3")}
    weights = {n: quantize(w, "int8", compute=compute) for n, w in weights.items()}
    message = (
        f"grouped_mlp: expected w1 with compute 'codes'; fused_experts takes the others, found '{compute}'"
    )
    with pytest.raises(ValueError, match=message):
        grouped_mlp(torch.randn(4, 32, device=device), **weights, counts=torch.tensor([2, 2], device=device))


# --- the layer --------------------------------------------------------------------------------------------


def layers(device, mode: str, **options) -> tuple[FusedMoE, reference.FusedMoE]:
    """A layer of a mode, and the loop with the same weights."""
    format, settings, compute = MODES[mode]
    both = []
    for cls in (FusedMoE, reference.FusedMoE):
        layer = cls(64, 96, 4, 2, device=device, dtype=BF16, **options)
        both.append(quantize(layer, format, compute=compute, **settings))
    both[1].load_state_dict(both[0].state_dict())
    return both


@EVERY_MODE
@pytest.mark.parametrize(
    "options",
    ({}, {"num_shared_experts": 1, "shared_expert_gate": True, "bias": True}, {"latent_dim": 32}),
    ids=("plain", "shared", "latent"),
)
def test_layer(device, mode, options):
    """With padding and without, as the loop has it."""
    moe, loop = layers(device, mode, **options)
    x = torch.randn(50, 64, device=device, dtype=BF16)
    found, expected = moe(x), loop(x)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    padded = x.clone()
    padded[30:] = torch.nan
    found = moe(padded, num_tokens=torch.tensor(30, device=device))
    assert not found[30:].any() and (found[:30] - expected[:30]).norm() <= 0.02 * expected.norm()


@EVERY_MODE
def test_compiled(device, mode):
    """One graph for every number of tokens, with the bits of eager calls."""
    moe, _ = layers(device, mode, num_shared_experts=1)
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (8, 21, 130):
            x = torch.randn(tokens, 64, device=device, dtype=BF16)
            assert torch.equal(compiled(x), moe(x))
    torch._dynamo.reset()


def test_auto_compiled(device):
    """A graph on each side of the rule."""
    moe = quantize(FusedMoE(64, 96, 4, 2, device=device, dtype=BF16), "int8", compute="auto")
    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (8, 32, 33, 130, 20):
            x = torch.randn(tokens, 64, device=device, dtype=BF16)
            assert torch.equal(compiled(x), moe(x))
    torch._dynamo.reset()


def test_weights_that_hooks_provide(device):
    """Codes, scales and factors may be there for the time of a weight's call alone, as accelerate does."""
    moe, _ = layers(device, "int8_smooth")
    x = torch.randn(20, 64, device=device, dtype=BF16)
    with torch.no_grad():
        expected = moe(x)
    for w in moe.experts.weights:
        stored = {name: p.detach().clone() for name, p in w._parameters.items()}

        def provide(w, args, kwargs, stored=stored):
            for name, tensor in stored.items():
                w._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)

        def release(w, args, output):
            for name, tensor in list(w._parameters.items()):
                w._parameters[name] = torch.nn.Parameter(tensor.detach().to("meta"), requires_grad=False)

        w.register_forward_pre_hook(provide, with_kwargs=True)
        w.register_forward_hook(release)
    with torch.no_grad():
        assert torch.equal(moe(x), expected)
        assert moe.experts.w1.smooth.is_meta


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_in_a_cuda_graph(device, mode):
    """Any number of tokens by one graph. It sees weights that are loaded afterwards. Scales have 16 bits."""
    format, settings, compute = MODES.get(mode, ("fp8_block", {}, "auto"))
    first, second = (FusedMoE(128, 192, 4, 2, device=device, dtype=BF16) for _ in range(2))
    for moe in (first, second):
        moe.eval()
        quantize(moe, format, compute=compute, **settings)
        if format != "fp8_block":
            for name in ("w1", "w2", "w3"):
                w = getattr(moe.experts, name)
                own = {"format": format, "shape": w.shape, "compute": compute, "smooth": w.smooth}
                setattr(moe.experts, name, QuantizedWeight(w.data, w.scale.bfloat16(), **own))
    x = torch.randn(200, 128, device=device, dtype=BF16)
    num_tokens = torch.tensor(200, device=device)
    with torch.no_grad():
        first(x, num_tokens=num_tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = first(x, num_tokens=num_tokens)
        for moe in (first, second):
            first.load_state_dict(moe.state_dict())
            for n in (200, 7, 0):
                num_tokens.fill_(n)
                graph.replay()
                expected = moe(x, num_tokens=num_tokens)
                assert torch.equal(out, expected) and not out[n:].any()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="FSDP2 takes integers from PyTorch 2.13 on")
@pytest.mark.parametrize("mode", ("fp8_block", "int8_smooth"))
def test_sharded(device, mode, one_rank):
    """FSDP2 gathers factors with codes and scales; a policy casts none of them."""
    if mode == "fp8_block" and device.type == "cpu":
        mode = "int8"  # gloo sends no e4m3
    moe, loop = layers(device, mode)
    x = torch.randn(20, 64, device=device, dtype=BF16)
    with torch.no_grad():
        expected = moe(x)
        saved = {name: t.clone() for name, t in moe.state_dict().items()}
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        fully_shard(moe, mesh=one_rank, mp_policy=policy)
        assert torch.equal(moe(x), expected)
        for name, tensor in moe.state_dict().items():
            local = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert local.dtype == saved[name].dtype and torch.equal(local, saved[name]), name
