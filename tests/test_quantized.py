"""Quantised weights: values, the grouped GEMM, the experts and the layer, against the reference."""

import copy
import io
import itertools
import math
import re

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    LOOSE,
    Calls,
    Case,
    assert_as_good,
    assert_same_bits,
    forward_backward,
    make_ids,
    quantize_options,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import distribute_tensor

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, fused_experts, grouped_mlp, quantize, quantized, reference
from fused_moe.quantized.formats import E8M0, FORMATS, SCALES, pack_rows, scale_shapes, unpack_rows
from fused_moe.quantized.tiles import are_wanted

try:
    from fused_moe import _host
except ImportError:
    _host = None

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
# Every format, with each of its options.
OPTIONS = {
    "fp8_block": ("fp8_block", {}),
    "fp8": ("fp8", {}),
    "fp8, one scale": ("fp8", {"per_tensor": True}),
    "int8": ("int8", {}),
    "int8, one scale": ("int8", {"per_tensor": True}),
    "int4": ("int4", {"group_size": 32}),
    "int4, zero points": ("int4", {"group_size": 32, "symmetric": False}),
    "mxfp4": ("mxfp4", {}),
}
EVERY_OPTION = pytest.mark.parametrize("option", OPTIONS)
# Not transposed, and not four-dimensional.
STORED = [name for name in LAYOUTS if not name.endswith(".T") and name != "pairs"]


def random_weight(format: str, E: int, rows: int, cols: int, device, scale_of=0) -> QuantizedWeight:
    """Any codes, and scales of a few powers of two around 2^-4. int4's are of the weight's dtype."""
    shapes = scale_shapes(format, (E, rows, cols))
    shape = shapes[scale_of % len(shapes)]
    bytes_per_row = cols // FORMATS[format].per_byte
    data = torch.randint(256, (E, rows, bytes_per_row), dtype=torch.uint8).to(device)
    zero = None
    if format == "mxfp4":
        scale = torch.randint(121, 126, shape, dtype=torch.uint8)
    else:
        scale = torch.rand(shape) / 8
    if format.startswith("fp8"):
        data = data.masked_fill(data % 128 == 127, 0).view(torch.float8_e4m3fn)
        scale = scale / 32
    elif format == "int8":
        data, scale = data.view(torch.int8), scale / 16
    elif format == "int4":
        scale = scale.bfloat16()
        zero = torch.randint(-8, 8, shape, dtype=torch.int8).to(device) if scale_of % 2 else None
    return QuantizedWeight(data, scale.to(device), zero, format=format, shape=(E, rows, cols))


def is_wanted_in_tiles(w: QuantizedWeight, device) -> bool:
    return are_wanted(device, w.shape, w.format, w.dtype, w.scale.dtype)


@pytest.mark.quick
@pytest.mark.skipif(_host is None, reason="fused_moe._host was not built for this Python")
def test_both_lists_of_formats_are_the_same(cpu):
    """FORMATS, and FUSED_MOE_FORMATS of csrc/formats.h, which the kernels and the bindings read."""
    scales = {(F32,): "f32", SCALES: "floating", E8M0: "e8m0"}
    expected = [
        (name, f.code, 8 // f.per_byte, "zero" in f.names, scales[f.scale_dtypes], f.block)
        for name, f in FORMATS.items()
    ]
    lower = [tuple(x.lower() if isinstance(x, str) else x for x in facts) for facts in _host.formats()]
    assert lower == expected
    for f in FORMATS.values():
        assert bool(f.groups) == f.block.startswith("group")
        assert f.block != "group_32" or f.groups == (32,)


# --- values -----------------------------------------------------------------------------------------------


def product_with_identity(w: QuantizedWeight, dtype, transposed: bool, tensors=None) -> torch.Tensor:
    """The weight as quantized_mm reads it, every expert's by a GEMM with the identity matrix."""
    E, rows, cols = w.shape
    width = rows if transposed else cols
    a = torch.eye(width, dtype=dtype, device=w.device).repeat(E, 1)
    offsets = torch.arange(1, E + 1, device=w.device, dtype=torch.int32) * width
    out = torch.ops.fused_moe.quantized_mm(a, *(tensors or w.tensors), offsets, w.code, transposed)
    out = out.view(E, width, -1)
    return out if transposed else out.mT


@pytest.mark.quick(one_in=7)
@EVERY_FORMAT
@DTYPES
@pytest.mark.parametrize("scale_of", range(6))
@pytest.mark.parametrize("rows, cols", ((130, 288), (192, 320)), ids=("published", "tiles"))
def test_values_are_the_references(device, format, dtype, scale_of, rows, cols):
    """dequantize(), and both ways in which the kernel reads a weight, give the reference's bits; also of a
    tiled weight's tensors in the published layout."""
    w = random_weight(format, 3, rows, cols if scale_of < 3 else 384, device, scale_of)
    expected = reference.dequantize(w, dtype)
    assert w.is_tiled == is_wanted_in_tiles(w, device)
    assert torch.equal(w.dequantize(dtype), expected)
    for tensors in (w.tensors, (w.data, w.scale, w.zero)):
        for transposed in (False, True):
            assert torch.equal(product_with_identity(w, dtype, transposed, tensors), expected)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
def test_values_are_rounded_before_they_are_added(device, dtype, format):
    """The difference of two columns is that of the rounded values: the identity matrix cannot tell."""
    w = random_weight(format, 1, 40, 64, device)
    a = (torch.eye(64) - torch.eye(64).roll(1, 1)).to(device, dtype)
    offsets = torch.tensor([64], dtype=torch.int32, device=device)
    out = torch.ops.fused_moe.quantized_mm(a, *w.tensors, offsets, w.code)
    values = reference.dequantize(w, dtype)[0].double()
    assert torch.equal(out.mT, (values - values.roll(-1, 1)).to(dtype))


def test_scales_of_blocks_are_float32(device):
    """The operator refuses what the kernels would misread."""
    w = random_weight("fp8_block", 2, 16, 64, device)
    offsets = torch.tensor([1, 2], dtype=torch.int32, device=device)
    a = torch.randn(2, 64, device=device)
    with pytest.raises(RuntimeError, match="expected scale of dtype Float, found BFloat16"):
        torch.ops.fused_moe.quantized_mm(a, w.data, w.scale.bfloat16(), None, offsets, w.code)


def test_every_code(device):
    """All codes of all formats, and all scales of mxfp4, as their specifications have them."""
    codes = torch.arange(256, dtype=torch.uint8)
    one = torch.ones(1, 1, 1)
    fp8 = QuantizedWeight(
        codes.view(1, 1, 256).view(torch.float8_e4m3fn), one, format="fp8", shape=(1, 1, 256)
    )
    int8 = QuantizedWeight(codes.view(1, 1, 256).view(torch.int8), one, format="int8", shape=(1, 1, 256))
    for w in (fp8.to(device), int8.to(device)):
        for value, code in zip(w.dequantize(F32).flatten().tolist(), range(256), strict=True):
            if w.format == "int8":
                assert value == (code if code < 128 else code - 256)
                continue
            sign, exponent, mantissa = (-1 if code > 127 else 1), code // 8 % 16, code % 8
            if exponent == 15 and mantissa == 7:
                assert math.isnan(value)
            elif exponent:
                assert value == sign * 2.0 ** (exponent - 7) * (1 + mantissa / 8)
            else:
                assert value == sign * 2.0**-6 * mantissa / 8
    pairs = torch.arange(16, dtype=torch.uint8) * 17
    data = pairs.view(1, 1, 16).expand(1, 256, 16)
    scales = codes.view(1, 256, 1)
    mxfp4 = QuantizedWeight(data, scales, format="mxfp4", shape=(1, 256, 32)).to(device)
    found = mxfp4.dequantize(F64)[0, :, 0::2]
    e2m1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    magnitudes = torch.tensor([*e2m1, *(-m for m in e2m1)], dtype=F64, device=device)
    expected = (2.0 ** (torch.arange(256, dtype=F64, device=device) - 127))[:, None] * magnitudes
    assert torch.equal(found[:255], expected.float().double()[:255])  # 6 * 2^127 is infinite in float32
    assert found[255].isnan().all()
    finite = QuantizedWeight(data[:, :252], scales[:, :252], format="mxfp4", shape=(1, 252, 32)).to(device)
    for w in (finite, int8):
        assert torch.equal(product_with_identity(w, F64, True), w.dequantize(F64))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@EVERY_FORMAT
def test_nan_scales_propagate(device, dtype, format):
    """A scale of NaN makes its block NaN, and leaves other experts alone."""
    data, scale, zero = random_weight(format, 2, 64, 64, "cpu").tensors
    data.view(torch.uint8).fill_(0x11)  # finite, and of one sign
    scale[1, 0, 0] = 255 if format == "mxfp4" else torch.nan
    w = QuantizedWeight(data, scale, zero, format=format, shape=(2, 64, 64)).to(device)
    assert torch.equal(w.dequantize(dtype).isnan(), reference.dequantize(w, dtype).isnan())
    a, offsets = torch.ones(4, 64, dtype=dtype, device=device), torch.tensor([2, 4], device=device).int()
    out = torch.ops.fused_moe.quantized_mm(a, *w.tensors, offsets, w.code)
    assert out[2:, 0].isnan().all() and not out[:2].isnan().any()


# --- quantising -------------------------------------------------------------------------------------------


@pytest.mark.quick
@EVERY_OPTION
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_every_code_is_the_nearest(device, option, dtype):
    """No other code of the same block is nearer to the weight."""
    format, options = OPTIONS[option]
    weight = (torch.randn(2, 130, 64) * torch.rand(2, 130, 1).exp()).to(device, dtype)
    w = quantize(weight, format, **options)
    error = (w.dequantize(F64) - weight.double()).abs()
    best = torch.full_like(error, math.inf)
    for code in range(256 if format != "int4" and format != "mxfp4" else 16):
        other = copy.deepcopy(w)
        filled = code * 17 if FORMATS[format].per_byte == 2 else code
        other.data.view(torch.uint8).fill_(filled)
        distance = (other.dequantize(F64) - weight.double()).abs().nan_to_num(math.inf)
        best = torch.minimum(best, distance)
    # where weight / scale is rounded in float32, a code next to a tie may win
    assert (error <= best + 1e-6 * weight.double().abs()).all()


def test_ties_go_to_the_even_code(device):
    """As IEEE 754 rounds, and the sum of many errors stays near zero."""
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    w = quantize(torch.tensor([*halves, *(-h for h in halves)] * 2, device=device).view(1, 1, 32), "mxfp4")
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert w.dequantize(F32).flatten().tolist() == [*even, *(-v for v in even)] * 2
    w = quantize(
        torch.tensor([*(i + 0.5 for i in range(7)), 7.0] * 4, device=device).view(1, 1, 32),
        "int4",
        group_size=32,
    )
    assert w.dequantize(F32).flatten().tolist() == [0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 7.0] * 4


@EVERY_OPTION
def test_quantising_again_changes_nothing(device, option):
    """The values of a quantised weight are its format's own."""
    format, options = OPTIONS[option]
    w = quantize(torch.randn(2, 96, 128, device=device), format, **options)
    again = quantize(w.dequantize(F32), format, **options)
    torch.testing.assert_close(again.dequantize(F32), w.dequantize(F32), rtol=1e-6, atol=0)


@EVERY_OPTION
@pytest.mark.parametrize("weight", ("zeros", "tiny", "huge"))
def test_extreme_weights(device, option, weight):
    """Weights of zeros stay zeros, and none overflows or divides by zero."""
    format, options = OPTIONS[option]
    value = {"zeros": 0.0, "tiny": 1e-37, "huge": 3e38}[weight]
    w = quantize(torch.full((1, 32, 32), value, device=device), format, **options)
    found = w.dequantize(F64)
    assert found.isfinite().all()
    if weight == "zeros":
        assert not found.any()
    if weight == "huge":  # e2m1 has 4 and 6, and 6 * 2^126 is the largest that is finite
        torch.testing.assert_close(found, torch.full_like(found, value), rtol=0.15, atol=0)


# --- experts ----------------------------------------------------------------------------------------------


def quantized_inputs(case: Case, device, options: dict) -> tuple[dict, dict]:
    """fused_experts' inputs that are differentiable, and its weights, quantised by {name: option}."""
    inputs = case.inputs(device)
    weights = {n: inputs.pop(n) for n in ("w1", "w2", "w3")}
    for name, option in options.items():
        if weights[name] is not None:
            format, settings = OPTIONS[option]
            weights[name] = quantize(weights[name], format, **settings)
    return inputs, weights


def values(weights: dict, dtype) -> dict:
    """The weights as they are multiplied."""
    return {n: w.dequantize(dtype) if isinstance(w, QuantizedWeight) else w for n, w in weights.items()}


def check_quantized(case: Case, device, options: dict) -> dict:
    """Against eager loops on the dequantised values: nothing errs more than theirs in the same dtype."""
    inputs, weights = quantized_inputs(case, device, options)
    dout, fixed = case.dout(device), {"score_on": case.score_on, **case.options}
    ids = case.ids(device)
    ours = forward_backward(fused_experts, inputs, dout, ids=ids, **weights, **fixed)
    plain = values(weights, case.dtype)
    eager = forward_backward(reference.fused_experts, inputs, dout, ids=ids, **plain, **fixed)
    exact = forward_backward(
        reference.fused_experts, to_double(inputs), dout.double(), ids=ids, **to_double(plain), **fixed
    )
    assert_as_good(ours, eager, exact, LOOSE)
    return ours


@pytest.mark.quick
@EVERY_OPTION
@DTYPES
def test_experts(device, option, dtype):
    """out, dx, dscores and the biases' gradients, of every format and dtype."""
    case = Case(dim=64, hidden=96, dtype=dtype, bias=True)
    check_quantized(case, device, dict.fromkeys(("w1", "w2", "w3"), option))


@EVERY_OPTION
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("hidden", (64, 96, 192))
def test_experts_of_tiles(device, option, dtype, hidden):
    """Sides that tiles fit; with 96 those of gate and up alone."""
    case = Case(
        dim=320, hidden=hidden, dtype=dtype, layout="halves" if hidden == 96 else "separate", bias=True
    )
    check_quantized(case, device, dict.fromkeys(("w1", "w2", "w3"), option))


@pytest.mark.parametrize("layout", STORED)
@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("activation", ("gelu", "swiglu_clamped", "swiglu_limited", "relu2", "situ"))
@pytest.mark.parametrize("hidden", (32, 64), ids=("published", "tiles"))
def test_layouts(device, layout, score_on, activation, hidden):
    """Every layout that is not transposed."""
    case = Case(dim=64, hidden=hidden, layout=layout, score_on=score_on, activation=activation, bias=True)
    check_quantized(case, device, dict.fromkeys(("w1", "w2", "w3"), "int4, zero points"))


@pytest.mark.parametrize("names", (("w1",), ("w2",), ("w3",), ("w1", "w3")))
def test_mixed_weights(device, names):
    """Some weights are quantised, others are tensors; and each in another format."""
    check_quantized(Case(dim=64, hidden=32, dtype=BF16), device, dict.fromkeys(names, "mxfp4"))
    formats = dict(zip(("w1", "w2", "w3"), ("fp8_block", "int4", "int8"), strict=True))
    check_quantized(Case(dim=64, hidden=32, dtype=BF16), device, formats)


@given(
    tokens=st.sampled_from((0, 1, 2, 33)),
    dim=st.sampled_from((32, 160, 288, 320)),
    hidden=st.sampled_from((32, 96, 192, 256)),
    num_experts=st.sampled_from((1, 2, 5)),
    routing=st.sampled_from(("random", "repeats", "one", "gaps", "sentinels", "none")),
    layout=st.sampled_from(STORED),
    options=st.lists(st.sampled_from(sorted(OPTIONS)), min_size=3, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from((F32, BF16, F64)),
    seed=st.integers(0, 999),
)
def test_any_case(device, tokens, dim, hidden, num_experts, routing, layout, options, bias, dtype, seed):
    """Any sizes, routing, layout and formats."""
    torch.manual_seed(seed)
    case = Case(
        tokens, dim, hidden, num_experts, min(2, num_experts), dtype, routing, layout, bias=bias, seed=seed
    )
    check_quantized(case, device, dict(zip(("w1", "w2", "w3"), options, strict=True)))


@pytest.mark.parametrize("cols", (24, 40, 129))
@pytest.mark.parametrize("option", ("fp8_block", "fp8", "int8, one scale"))
def test_odd_widths(device, cols, option):
    """Formats without groups along k take any width, and blocks end with the matrix."""
    check_quantized(
        Case(dim=cols, hidden=cols + 1, dtype=BF16), device, dict.fromkeys(("w1", "w2", "w3"), option)
    )


def test_grouped_mlp(device):
    """Contiguous rows; those past counts.sum() are never read."""
    case = Case(dim=64, hidden=32, num_experts=3, bias=True)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "int4"))
    inputs = {n: v for n, v in inputs.items() if n[0] == "b"}
    inputs["x_rows"] = torch.randn(40, 64, device=device)
    inputs["x_rows"][30:] = torch.nan
    counts, dout = torch.tensor([20, 0, 10], device=device), torch.randn(40, 64, device=device)
    ours = forward_backward(grouped_mlp, inputs, dout, counts=counts, **weights)
    inputs["x_rows"][30:] = 0
    plain = values(weights, F32)
    expected = forward_backward(reference.grouped_mlp, inputs, dout, counts=counts, **plain)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    assert not ours["out"][30:].any() and not ours["dx_rows"][30:].any()


def test_a_tokens_bits_do_not_depend_on_its_batch(device):
    """Within a format, on a GPU: alone, in a batch, shuffled."""
    if device.type != "cuda":
        pytest.skip("on the CPU the bits are the same in every run of the same batch alone")
    for option, hidden in itertools.product(OPTIONS, (96, 192)):
        case = Case(tokens=300, dim=64, hidden=hidden, dtype=BF16)
        inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), option))
        ids = case.ids(device)
        out = fused_experts(**inputs, **weights, ids=ids)
        for size in (1, 2, 9, 64, 130):
            some = torch.randperm(300, device=device)[:size]
            part = {n: v[some] if n in ("x", "scores") else v for n, v in inputs.items()}
            assert torch.equal(fused_experts(**part, **weights, ids=ids[some]), out[some]), option


@EVERY_OPTION
@pytest.mark.parametrize("hidden", (96, 192), ids=("published", "tiles"))
def test_same_bits_in_every_run(device, option, hidden):
    case = Case(dim=64, hidden=hidden, dtype=BF16, bias=True)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), option))
    dout, ids = case.dout(device), case.ids(device)
    runs = [forward_backward(fused_experts, inputs, dout, ids=ids, **weights) for _ in range(2)]
    assert_same_bits(*runs)


def test_no_weight_exists_in_another_dtype(cpu):
    """On the CPU no operator but the GEMM gets a weight, and none returns one."""
    case = Case(dim=64, hidden=96, num_experts=4, dtype=BF16)
    inputs, weights = quantized_inputs(case, cpu, dict.fromkeys(("w1", "w2", "w3"), "int4"))
    inputs["x"].requires_grad_()
    with Calls() as calls:
        fused_experts(**inputs, **weights, ids=case.ids(cpu)).sum().backward()
    results = [
        r for _, _, result in calls.calls for r in (result if isinstance(result, tuple) else (result,))
    ]
    assert len(calls.of("quantized_up")) == 1 and len(calls.of("quantized_mm")) == 4
    sizes = [r.untyped_storage().nbytes() for r in results if torch.is_tensor(r) and r.is_floating_point()]
    assert max(sizes) < 2 * 4 * 64 * 96


def test_what_the_composition_is_made_of(device):
    """Its up side is one operator, which keeps h where gradients are recorded."""
    case = Case(dim=64, hidden=32, dtype=BF16)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "int8"))
    with Calls() as calls:
        forward_backward(fused_experts, inputs, case.dout(device), ids=case.ids(device), **weights)
    names = calls.ours()
    forward = "route_plan quantized_up quantized_mm unpermute"
    backward = "unpermute_backward quantized_mm activate_backward quantized_mm quantized_mm unpermute"
    assert names == [*forward.split(), *backward.split()]


def test_autocast(device):
    """x is cast as for linear; the weight has its own values in that dtype."""
    case = Case(dim=64, hidden=32)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "fp8"))
    with torch.autocast(device.type, BF16):
        out = fused_experts(**inputs, **weights, ids=case.ids(device))
    assert out.dtype == BF16
    inputs["x"] = inputs["x"].to(BF16)
    torch.testing.assert_close(out, fused_experts(**inputs, **weights, ids=case.ids(device)))


def test_out_and_expert_map(device):
    case = Case(dim=64, hidden=32, num_experts=4)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "int8"))
    ids = make_ids("random", 33, 2, 8).to(device)
    expert_map = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1], dtype=torch.int32, device=device)
    out = torch.empty(33, 64, device=device)
    with torch.no_grad():
        assert fused_experts(**inputs, **weights, ids=ids, expert_map=expert_map, out=out) is out
        plain = values(weights, F32)
        expected = reference.fused_experts(**inputs, **plain, ids=ids, expert_map=expert_map)
        torch.testing.assert_close(out, expected)
        few = {"ids": ids, "expert_map": expert_map, "max_rows": 20}
        expected = reference.fused_experts(**inputs, **plain, **few)
        torch.testing.assert_close(fused_experts(**inputs, **weights, **few), expected)
        eight_bits = {**inputs, **weights, "x": inputs["x"].bfloat16(), "compute": "int8"}
        with pytest.raises(ValueError, match=r"max_rows >= T\*K = 66 with compute 'int8', found 20"):
            fused_experts(**eight_bits, **few)
        fused_experts(**eight_bits, ids=ids, max_rows=66)


# --- the layer --------------------------------------------------------------------------------------------


# FusedMoE's D and F; tiles fit the second.
SIZES = pytest.mark.parametrize("sizes", ((64, 32), (320, 192)), ids=("published", "tiles"))


def layer(device, sizes=(64, 32), **options) -> FusedMoE:
    return FusedMoE(*sizes, 6, 2, **options).to(device)


@pytest.mark.quick
@EVERY_OPTION
@SIZES
def test_layer(device, option, sizes):
    """quantize() replaces the experts' weights in place; forward and the gradients of x and the router."""
    format, options = OPTIONS[option]
    moe = layer(device, sizes, num_shared_experts=1, bias=True)
    assert quantize(moe, format, **options) is moe
    plain = layer(device, sizes, num_shared_experts=1, bias=True)
    plain.load_state_dict(moe.state_dict(), strict=False)
    for name in ("w1", "w2", "w3"):
        assert getattr(moe.experts, name).format == format
        getattr(plain.experts, name).data.copy_(getattr(moe.experts, name).dequantize(F32))
    x = torch.randn(3, 7, sizes[0], device=device)
    results = []
    for module in (moe, plain):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.square().mean().backward()
        results.append((out, leaf.grad, module.router.gate.weight.grad, module.experts.b2.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), results[0][0].detach())


@EVERY_OPTION
@SIZES
def test_state_dict(device, option, sizes):
    """Published names and layout; what is saved loads into another quantised layer, and into one on meta."""
    format, options = OPTIONS[option]
    moe = quantize(layer(device, sizes), format, **options)
    file = io.BytesIO()
    torch.save(moe.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    x = torch.randn(5, sizes[0], device=device)
    other = quantize(layer(device, sizes), format, **options)
    other.load_state_dict(saved)
    assert torch.equal(other(x), moe(x))
    with torch.device("meta"):
        meta = quantize(FusedMoE(*sizes, 6, 2), format, **options)
    meta.load_state_dict(saved, assign=True)
    meta.tokens_per_expert = torch.zeros(6, device=device)
    assert torch.equal(meta(x), moe(x))
    assert torch.equal(copy.deepcopy(moe)(x), moe(x))


@EVERY_OPTION
@SIZES
def test_between_devices(device, option, sizes):
    """A layer moved to the device computes what one made there does; back on the CPU, both have the tensors
    of before."""
    format, options = OPTIONS[option]
    made = quantize(layer("cpu", sizes), format, **options)
    saved = copy.deepcopy(made).state_dict()
    x = torch.randn(5, sizes[0], device=device)
    loaded = quantize(layer(device, sizes), format, **options)
    loaded.load_state_dict(saved)  # from the CPU
    moved = made.to(device)
    assert moved.experts.w1.is_tiled == is_wanted_in_tiles(moved.experts.w1, device)
    assert torch.equal(moved(x), loaded(x))
    for back in (moved.cpu(), loaded.to("cpu")):
        assert not back.experts.w1.is_tiled
        assert back.state_dict().keys() == saved.keys()
        for name, tensor in back.state_dict().items():
            assert tensor.dtype == saved[name].dtype and tensor.shape == saved[name].shape, name
            assert torch.equal(tensor.view(torch.uint8), saved[name].view(torch.uint8)), name


@pytest.mark.quick
def test_published_layout(device):
    """int4 as compressed-tensors packs it, mxfp4 as gpt-oss."""
    w = random_weight("int4", 2, 12, 64, device, 1)
    state = w.state_dict()
    assert state.keys() == {"weight_packed", "weight_scale", "weight_zero_point"}
    packed, zeros = state["weight_packed"], state["weight_zero_point"]
    assert packed.shape == (2, 12, 8) and packed.dtype == torch.int32
    assert zeros.shape == w.scale.shape and zeros.dtype == torch.int8 and torch.equal(zeros, w.zero)
    codes = torch.stack((w.data & 15, w.data >> 4), -1).flatten(-2)
    for i in range(8):
        assert torch.equal((packed >> 4 * i) & 15, codes[..., i::8].int())
    w = random_weight("mxfp4", 2, 12, 64, device)
    assert {n: tuple(t.shape) for n, t in w.state_dict().items()} == {
        "blocks": (2, 12, 2, 16), "scales": (2, 12, 2)
    }  # fmt: skip
    for format, scale in (
        ("fp8_block", "weight_scale_inv"),
        ("fp8", "weight_scale"),
        ("int8", "weight_scale"),
    ):
        w = random_weight(format, 1, 8, 8, device)
        assert w.state_dict().keys() == {"weight", scale} and w.weight.dtype == w.data.dtype


@EVERY_OPTION
@SIZES
def test_loaders_read_what_a_layer_saves(device, option, sizes):
    """And the names of a state_dict are parameters, as distributed checkpoints and functional_call want."""
    format, options = OPTIONS[option]
    moe = quantize(layer(device, sizes), format, **options)
    state = get_model_state_dict(moe)
    load = {"fp8_block": quantized.from_fp8_block, "mxfp4": quantized.from_mxfp4}
    w1 = load.get(format, quantized.from_compressed_tensors)(state, "experts.w1")
    assert w1.format == format and torch.equal(w1.dequantize(F32), moe.experts.w1.dequantize(F32))
    x = torch.randn(5, sizes[0], device=device)
    others = quantize(layer(device, sizes), format, **options).state_dict()
    found = torch.func.functional_call(moe, others, x)
    moe.load_state_dict(others)
    torch.testing.assert_close(found, moe(x))


def test_missing_names_are_those_of_the_checkpoint(device):
    w = random_weight("fp8_block", 1, 8, 8, device)
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight_scale_inv"'):
        w.load_state_dict({"weight": w.data})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"zeros"'):
        w.load_state_dict({**w.state_dict(), "zeros": w.scale})
    wrong = {"weight": w.data, "weight_scale_inv": w.scale.to(BF16)}
    with pytest.raises(
        RuntimeError, match="weight_scale_inv: expected dtype torch.float32, found torch.bfloat16"
    ):
        w.load_state_dict(wrong, assign=True)
    symmetric = random_weight("int8", 1, 8, 64, device)
    other = random_weight("int4", 1, 8, 64, device, 3)
    with pytest.raises(RuntimeError, match='Unexpected key.*"weight_zero_point"'):
        symmetric.load_state_dict({**symmetric.state_dict(), "weight_zero_point": other.zero})
    before = other.zero.clone()
    beyond = torch.full(before.shape, 8, dtype=before.dtype)  # on the CPU: other devices are not read
    with pytest.raises(RuntimeError, match=r"weight_zero_point: .*expected zero from -8 to 7, found .* = 8"):
        other.load_state_dict({**other.state_dict(), "weight_zero_point": beyond})
    assert torch.equal(other.zero, before)


# What a format leaves open: scales' dtype, group size, zero points, scales per tensor or row.
OPEN = {
    "fp8": [(dtype, {"per_tensor": one}) for dtype in (F32, BF16, F16) for one in (False, True)],
    "int8": [(dtype, {"per_tensor": one}) for dtype in (F32, BF16) for one in (False, True)],
    "int4": [
        (dtype, {"group_size": group, "symmetric": symmetric})
        for dtype, group in ((F32, 32), (BF16, 32), (BF16, 64), (F16, 128))
        for symmetric in (False, True)
    ],
}
WITHIN = [(format, *pair) for format, kinds in OPEN.items() for pair in itertools.permutations(kinds, 2)]


def open_weight(device, format, kind, shape) -> QuantizedWeight:
    dtype, options = kind
    return quantize(torch.randn(shape, device=device, dtype=dtype), format, **options).to(F32)


@pytest.mark.parametrize("shape", ((2, 40, 128), (2, 64, 128)), ids=("published", "tiles"))
@pytest.mark.parametrize("assign", (False, True), ids=("copied", "assigned"))
@pytest.mark.parametrize("format", OPEN)
def test_state_of_another_kind(device, format, assign, shape):
    """It is taken as it is. What differs is replaced, the rest keeps its memory where it is copied."""
    x, offsets = torch.randn(6, 128, device=device), torch.tensor([2, 6], dtype=torch.int32, device=device)
    for first, second in (pair for name, *pair in WITHIN if name == format):
        w, other = (open_weight(device, format, k, shape) for k in (first, second))
        before, state = w._of("data"), other.state_dict()
        result = w.load_state_dict(state, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys and w.is_tiled == other.is_tiled
        found = w.state_dict()
        assert found.keys() == state.keys()
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert assign or w._of("data") is before
        for transposed, rows in ((False, x), (True, torch.randn(6, shape[1], device=device))):
            run = [
                torch.ops.fused_moe.quantized_mm(rows, *v.tensors, offsets, v.code, transposed)
                for v in (w, other)
            ]
            assert torch.equal(*run)
        assert torch.equal(w.dequantize(F32), other.dequantize(F32))
        assert not any(p.requires_grad for p in w.parameters())


@pytest.mark.quick
def test_a_layer_takes_the_checkpoints_kind(device):
    """A float32 checkpoint into a bf16 layer, on meta and with adapters, among other kinds; strict or not."""
    saved = quantize(layer(device, (128, 128), dtype=F32), "int4", group_size=32, symmetric=False)
    x = torch.randn(5, 128, device=device)
    for strict, place in itertools.product((True, False), (device, "meta")):
        with torch.device(place):
            moe = quantize(FusedMoE(128, 128, 6, 2, dtype=BF16), "int4")
        moe.to(F32) if place != "meta" else None
        moe.load_state_dict(saved.state_dict(), strict=strict, assign=place == "meta")
        assert torch.equal(moe(x), saved(x))
        symmetric = quantize(layer(device, (128, 128)), "int4", group_size=64)
        moe.load_state_dict(symmetric.state_dict(), strict=strict)
        assert torch.equal(moe(x), symmetric(x)) and moe.experts.w1.zero is None


def test_a_state_that_differs_is_refused_by_sharded_weights(one_rank, device):
    """Both are named; one that does not differ loads."""
    kinds = [(F32, {"group_size": group, "symmetric": group == 64}) for group in (32, 64)]
    own, other, zeros = (open_weight(device, "int4", kind, (2, 32, 128)) for kind in (*kinds, kinds[0]))
    for name, parameter in own.named_parameters():
        own.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.data, one_rank), False))
    message = (
        r"expected weight_scale as the parameter is while it is sharded, one of shape \(2, 32, 4\) and dtype "
        r"torch.float32, found one of shape \(2, 32, 2\) and dtype torch.float32"
    )
    for assign in (False, True):
        with pytest.raises(ValueError, match=message):
            own.load_state_dict(other.state_dict(), assign=assign)
    state = {name: distribute_tensor(t, one_rank) for name, t in zeros.state_dict().items()}
    with pytest.raises(ValueError, match="expected weight_zero_point as .*, one of shape .*, found none"):
        own.load_state_dict({name: t for name, t in state.items() if "zero" not in name})
    own.load_state_dict(state)
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor.full_tensor(), zeros.state_dict()[name])


@pytest.mark.quick
@pytest.mark.parametrize("strict", (True, False))
@pytest.mark.parametrize("own, other", list(itertools.permutations(FORMATS, 2)))
def test_state_of_another_format(device, own, other, strict):
    """It raises, and nothing of it is loaded, although some names and shapes are the same."""
    w, given = (random_weight(format, 2, 64, 128, device) for format in (own, other))
    before = {name: tensor.clone() for name, tensor in w.state_dict().items()}
    message = rf"expected (a weight of format {own}, found one of format|dtype torch.\w+, found torch\.)"
    with pytest.raises(RuntimeError, match=message):
        w.load_state_dict(given.state_dict(), strict=strict)
    for name, tensor in w.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.quick
def test_what_is_no_state_of_the_format(device):
    """Values that are no tensors, zero points and scales that do not fit."""
    moe = quantize(layer(device), "int4", group_size=32, symmetric=False)
    state = moe.state_dict()
    key = "experts.w1.weight_"
    for name in ("packed", "scale", "zero_point"):
        for wrong, found in (("text", "str"), ([1], "list"), (1.0, "float")):
            with pytest.raises(TypeError, match=f"expected {key}{name} to be a tensor, found {found}"):
                moe.load_state_dict({**state, key + name: wrong})
    zero = state[key + "zero_point"]
    for wrong, message in (
        (zero[..., :1], r"weight_zero_point: expected shape \(6, 32, 2\), found \(6, 32, 1\)"),
        (zero.int(), "expected dtype torch.int8, found torch.int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            moe.load_state_dict({**state, key + "zero_point": wrong})
    with pytest.raises(
        RuntimeError, match="expected dtype torch.float32 or torch.bfloat16 or .*, found torch.float64"
    ):
        moe.load_state_dict({**state, key + "scale": state[key + "scale"].double()})
    other = quantize(layer(device), "int4", group_size=32).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for experts.w1.weight_scale"):
        moe.load_state_dict({**other, key + "scale": other[key + "scale"][:, :3]})


@EVERY_FORMAT
def test_to(device, format):
    """A dtype changes that of dequantize() alone; codes and scales stay; a device moves all."""
    w = random_weight(format, 2, 32, 64, device, 1)
    before = [None if t is None else t.clone() for t in w.tensors]
    for change in (lambda w: w.to(F16), lambda w: w.half(), lambda w: w.type(F16)):
        change(w.to(BF16))
        assert w.dtype == F16 and w.dequantize().dtype == F16
    for tensor, old in zip(w.tensors, before, strict=True):
        assert (tensor is None and old is None) or (tensor.dtype == old.dtype and torch.equal(tensor, old))
    meta = copy.deepcopy(w).to("meta")
    assert meta.device.type == "meta" and meta.dequantize().shape == w.shape
    moe = quantize(layer(device), format, **quantize_options(format)).to(BF16)
    assert moe.experts.w1.dtype == BF16 and moe.experts.w1.scale.dtype in (F32, torch.uint8)
    assert moe(torch.randn(3, 64, dtype=BF16, device=device)).dtype == BF16


def test_memory(cpu):
    """A layer's experts take codes and scales, no more."""
    moe = quantize(layer(cpu), "int4", group_size=32)
    tensors = [*moe.experts.parameters(), *moe.experts.buffers()]
    assert sum(t.nbytes for t in tensors) == 3 * 6 * 64 * 32 * (4 + 32 / 32) / 8
    assert moe.experts.w1.nbytes == 6 * 64 * 32 * (4 + 32 / 32) / 8


# Weights as published in three formats; in tiles, where there are any, whatever the format. inductor compiles
# every format in test_matrix.py.
@pytest.mark.parametrize(
    "format, sizes, backend",
    [
        *(("fp8_block", s, "aot_eager") for s in SIZES.args[1]),
        ("int4", (64, 32), "inductor"),
        ("mxfp4", (64, 32), "aot_eager"),
    ],
)
def test_compile(device, format, sizes, backend):
    """One graph without breaks, with any number of tokens, forward and backward."""
    torch._dynamo.reset()  # it limits how often it compiles FusedMoE.forward
    moe = quantize(layer(device, sizes), format, **quantize_options(format))
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        x = torch.randn(tokens, sizes[0], device=device, requires_grad=True)
        (expected,) = torch.autograd.grad(moe(x).square().sum(), x)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), moe(x))


def test_weights_take_each_others_place(device):
    """A quantised weight may be assigned to a parameter, and a parameter to it."""
    moe = layer(device)
    w1 = moe.experts.w1
    moe.experts.w1 = quantize(w1, "fp8")
    assert "w1" not in dict(moe.experts.named_parameters())
    assert moe(torch.randn(3, 64, device=device)).isfinite().all()
    moe.experts.w1 = w1
    assert dict(moe.experts.named_parameters())["w1"] is w1


# --- errors -----------------------------------------------------------------------------------------------


def make(format="int4", shape=(2, 8, 64), data=None, scale=None, zero=None, **options):
    E, rows, cols = shape
    found = FORMATS.get(format, FORMATS["int4"])
    if data is None:
        data = torch.zeros(E, rows, cols // found.per_byte).to(found.data_dtype)
    if scale is None:
        shapes = scale_shapes(format, shape) if format in FORMATS else []
        scale = torch.ones(shapes[0] if shapes else (E, rows, 1)).to(found.scale_dtypes[0])
    return QuantizedWeight(data, scale, zero, format=format, shape=shape, **options)


WRONG = {
    "format": (lambda: make("int3"), ValueError, "format to be one of .*, found 'int3'"),
    "dtype": (lambda: make(dtype=torch.int8), TypeError, "a floating dtype, found torch.int8"),
    "shape": (lambda: make(shape=(2, 8, 0)), ValueError, r"shape \(E, out, in\) of sizes >= 1"),
    "group": (lambda: make(shape=(2, 8, 40)), ValueError, "int4 of a width that is a multiple of 32 or 64"),
    "mx group": (lambda: make("mxfp4", (1, 8, 40)), ValueError, "mxfp4 of a width .* of 32, found 40"),
    "data's dtype": (
        lambda: make("fp8", data=torch.zeros(2, 8, 64)), TypeError, "data of dtype float8_e4m3fn, found"
    ),
    "data's shape": (
        lambda: make(data=torch.zeros(2, 8, 64, dtype=torch.uint8)), ValueError,
        r"data of shape \(2, 8, 32\), found \(2, 8, 64\)",
    ),
    "scale's dtype": (
        lambda: make("fp8_block", scale=torch.ones(2, 1, 1, dtype=F16)), TypeError, "scale of dtype float32"
    ),
    "scale's shape": (
        lambda: make(scale=torch.ones(2, 8, 3)), ValueError,
        r"scale of shape \(2, 8, 2\) or \(2, 8, 1\), found \(2, 8, 3\)",
    ),
    "zero": (
        lambda: make("fp8", zero=torch.zeros(2, 8, 1, dtype=torch.int8)), ValueError,
        "no zero points in format fp8",
    ),
    "zero's shape": (
        lambda: make(zero=torch.zeros(2, 8, 1, dtype=torch.int8)), ValueError, r"zero of shape \(2, 8, 2\)"
    ),
    "zero's values": (
        lambda: make(zero=torch.full((2, 8, 2), 8, dtype=torch.int8)), ValueError,
        r"zero from -8 to 7, found zero\[0, 0, 0\] = 8",
    ),
    "device": (
        lambda: make(scale=torch.ones(2, 8, 2, device="meta")), ValueError, "scale on data's device cpu"
    ),
    "no shape": (
        lambda: QuantizedWeight(torch.zeros(1), torch.zeros(1), format="fp8", shape=5), ValueError, "found 5"
    ),
    "another format's option": (
        lambda: quantize(torch.ones(1, 8, 32), "int8", symmetric=False),
        ValueError,
        "no symmetric with format int8, found False",
    ),
    "quantize's format": (lambda: quantize(torch.ones(1, 8, 32), "nf4"), ValueError, "found 'nf4'"),
    "quantize's weight": (lambda: quantize(torch.ones(8, 32), "fp8"), ValueError, "weight of 3 dimensions"),
    "quantize's group_size": (
        lambda: quantize(torch.ones(1, 8, 32), "int4", group_size=48), ValueError, "32 or 64 or 128, found 48"
    ),
    "quantize's width": (
        lambda: quantize(torch.ones(1, 8, 32), "int4"), ValueError,
        r"weight \(E, out, in\) with in a multiple of 128, found \(1, 8, 32\)",
    ),
    **{
        f"quantize's shape {shape} for {format}": (
            lambda shape=shape, format=format: quantize(torch.ones(shape), format), ValueError,
            "weight of sizes >= 1, found ",
        )
        for format in FORMATS
        for shape in ((1, 8, 0), (1, 0, 128), (0, 8, 128), (0, 0, 0))
    },
    "a sparse weight": (
        lambda: quantize(torch.ones(1, 8, 32).to_sparse(), "fp8"), TypeError, "weight to be a dense tensor"
    ),
    "sparse codes": (
        lambda: make(data=torch.zeros(2, 8, 32).byte().to_sparse()), TypeError, "data to be a dense tensor"
    ),
    "a bool in the shape": (
        lambda: QuantizedWeight(torch.zeros(1), torch.zeros(1), format="fp8", shape=(True, 8, 64)),
        ValueError, "sizes >= 1, found .True",
    ),
    "quantize's module": (
        lambda: quantize(torch.nn.Linear(2, 2), "fp8"), ValueError, "a FusedMoE in it, found Linear"
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights(cpu, what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call()


def test_a_layer_that_does_not_fit_is_left_alone(device):
    """F = 40 has no groups of 32, so w2 cannot be quantised: no weight is."""
    moe = FusedMoE(64, 40, 4, 2).to(device)
    with pytest.raises(ValueError, match=r"w2 \(E, out, in\) with in a multiple of 32, found \(4, 64, 40\)"):
        quantize(moe, "mxfp4")
    assert all(isinstance(w, torch.nn.Parameter) for w in moe.experts.weights)


def parts_of(w: QuantizedWeight) -> dict:
    return dict(w.named_parameters())


@pytest.mark.quick
@EVERY_OPTION
@SIZES
def test_a_tensor_that_is_missing(device, option, sizes):
    """Each tensor of each weight, left on meta because a file lacks its name."""
    format, options = OPTIONS[option]
    state = quantize(layer(device, sizes), format, **options).state_dict()
    x = torch.randn(5, sizes[0], device=device)
    for name in [n for n in state if n.startswith("experts.w")]:
        with torch.device("meta"):
            moe = quantize(FusedMoE(*sizes, 6, 2), format, **options)
        moe.load_state_dict({n: t for n, t in state.items() if n != name}, assign=True, strict=False)
        own = name.removeprefix("experts.")
        with pytest.raises(
            ValueError, match=f"fused_experts: expected {own} on x's device {device}.*, found meta"
        ):
            moe(x)
        with torch.no_grad(), pytest.raises(ValueError, match=f"expected {own} on x's device"):
            moe(x)
        weight, part = own.split(".")
        for dequantize in (QuantizedWeight.dequantize, reference.dequantize):
            with pytest.raises(ValueError, match="on weight.*'s device|on blocks's device"):
                dequantize(getattr(moe.experts, weight))
        moe.load_state_dict({name: state[name]}, assign=True, strict=False)
        assert moe(x).isfinite().all()


@EVERY_OPTION
@SIZES
def test_a_tensor_of_a_wrong_shape(device, option, sizes):
    format, options = OPTIONS[option]
    moe = quantize(layer(device, sizes), format, **options)
    x = torch.randn(5, sizes[0], device=device)
    for name, part in parts_of(moe.experts.w2).items():
        values = part.data
        for wrong in (
            values[:-1],
            values.new_empty(0),
            values.unsqueeze(0),
            values.repeat(2, *[1] * (part.dim() - 1)),
        ):
            part.data = wrong
            found = re.escape(str(tuple(wrong.shape)))
            with pytest.raises(
                ValueError, match=rf"fused_experts: expected w2.{name} of shape \(.*, found {found}"
            ):
                moe(x)
            with pytest.raises(
                ValueError, match=rf"QuantizedWeight: expected {name} of shape \(.*, found {found}"
            ):
                moe.experts.w2.dequantize()
        part.data = values
    assert moe(x).isfinite().all()


@pytest.mark.gpu
@EVERY_FORMAT
@SIZES
def test_a_tensor_on_another_device(device, format, sizes):
    moe = quantize(layer(device, sizes), format, **quantize_options(format))
    x = torch.randn(5, sizes[0], device=device)
    for name, part in parts_of(moe.experts.w3).items():
        part.data, values = part.data.cpu(), part.data
        with pytest.raises(ValueError, match=f"expected w3.{name} on x's device cuda.*, found cpu"):
            moe(x)
        part.data = values


@EVERY_FORMAT
def test_whole_weights_without_memory(device, format):
    """On meta, under FakeTensorMode and exported, as before."""
    moe = quantize(layer(device), format, **quantize_options(format))
    meta = copy.deepcopy(moe).to("meta")
    assert meta(torch.empty(5, 64, device="meta")).shape == (5, 64)
    x = torch.randn(5, 64, device=device)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert moe(torch.empty(5, 64, device=device)).shape == (5, 64)
    program = torch.export.export(moe, (x,))
    torch.testing.assert_close(program.module()(x), moe(x))


@pytest.mark.quick
def test_wrong_calls(device):
    case = Case(dim=64, hidden=32)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "int8"))
    call = {**inputs, **weights, "ids": case.ids(device)}
    with pytest.raises(ValueError, match="transposed=False with a quantised w1, found transposed=True"):
        fused_experts(**call, transposed=True)
    main_grads = (torch.zeros(5, 32, 64, device=device), None, None)
    with pytest.raises(ValueError, match="no main_grads beside quantised weights"):
        fused_experts(**call, main_grads=main_grads)
    with pytest.raises(ValueError, match=r"w2 of shape \(E, D, F\) = \(5, 64, 32\), found \(5, 32, 64\)"):
        fused_experts(**{**call, "w2": weights["w1"]})
    with pytest.raises(ValueError, match="w1 on x's device .*, found meta"):
        fused_experts(**{**call, "w1": copy.deepcopy(weights["w1"]).to("meta")})


def test_raw_operator_checks_what_memory_safety_needs(cpu):
    """torch.ops.fused_moe.quantized_mm, without the Python checks."""
    w = random_weight("int4", 2, 8, 64, cpu, 1)
    a, offsets = torch.zeros(4, 64), torch.tensor([2, 4], dtype=torch.int32)
    data, scale, zero = w.tensors
    for args, message in (
        ((a[:, :32], data, scale, zero, offsets, 3), "a's width"),
        ((a, data[:1], scale[:1], zero[:1], offsets, 3), "experts of data"),
        ((a, data, scale[:, :4], zero, offsets, 3), "scale"),
        ((a, data, scale.expand(2, 8, 2)[..., :0], zero, offsets, 3), "equal parts of a row"),
        ((a, data, scale, zero[:, :4], offsets, 3), "zero"),
        ((a, data, scale, zero, offsets, 5), "format"),
        ((a, data, scale.expand(2, 8, 2), None, offsets, 4), "scale of dtype Byte"),
        ((a, data, scale.byte(), None, offsets, 4), "scales of 32 columns for mxfp4"),
        (
            (a[:, :32], data.view(torch.int8), torch.empty(2, 0, 2**62), None, offsets, 2),
            "equal parts of a row",
        ),
        ((a, data, scale.double(), zero, offsets, 3), "at most 32 bits"),
        ((a, data.view(torch.int8), scale, zero, offsets, 3), "data of dtype Byte"),
        ((a, data, scale, zero, torch.tensor([5, 4], dtype=torch.int32), 3), "row counts"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.fused_moe.quantized_mm(*args)


def test_codes_have_no_gradient(cpu):
    """A gradient of a scale is refused, not zero."""
    w = random_weight("fp8", 2, 8, 64, cpu)
    scale = w.scale.clone().requires_grad_()
    a, offsets = torch.ones(4, 64, requires_grad=True), torch.tensor([2, 4], dtype=torch.int32)
    out = torch.ops.fused_moe.quantized_mm(a, w.data, scale, None, offsets, w.code)
    with pytest.raises(RuntimeError, match="quantised weights are frozen"):
        out.sum().backward()


def test_reference_takes_quantised_weights(device):
    """The for-loop baseline takes what the functions take."""
    case = Case(dim=64, hidden=32)
    inputs, weights = quantized_inputs(case, device, dict.fromkeys(("w1", "w2", "w3"), "mxfp4"))
    expected = fused_moe.reference.fused_experts(**inputs, **weights, ids=case.ids(device))
    torch.testing.assert_close(fused_experts(**inputs, **weights, ids=case.ids(device)), expected)


def test_zero_points_of_one_group_are_packed(cpu):
    """A dimension of size 1 has any stride."""
    codes = torch.randint(0, 16, (2, 16, 1), dtype=torch.uint8)
    assert torch.equal(unpack_rows(pack_rows(codes), 16), codes)
