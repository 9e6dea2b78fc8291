"""The second packing of quantised weights: backward that reads it has the bits of one that dequantises."""

import copy

import pytest
import torch
from cases import BF16, F16, F32, assert_same_bits, forward_backward, poisoned, quantize_options
from gpu_cases import COUNTS, HALF_DTYPES, capture, copies, draw_ids, draw_rows, launches, with_scales
from test_quantized import EVERY_FORMAT, EVERY_OPTION, OPTIONS, random_weight

from fused_moe import FusedMoE, QuantizedWeight, fused_experts, quantize
from fused_moe.quantized import tiles
from fused_moe.quantized.formats import FORMATS, scale_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90")]
ops = torch.ops.fused_moe

# tokens, K, E, D, F, routing: few rows per expert up to a number at which weights are dequantised; widths
# that are no powers of two; groups of 128 columns on both sides; widths that tiles do not fit.
SHAPES = {
    "one slot": (1, 1, 3, 192, 128, "random"),
    "3 rows each": (9, 2, 6, 128, 192, "random"),
    "60 rows each": (150, 2, 5, 320, 192, "random"),
    "200 rows each": (300, 2, 3, 192, 320, "random"),
    "groups of 128": (40, 2, 4, 384, 256, "random"),
    "experts without rows": (35, 2, 8, 256, 192, "gaps"),
    "one expert has all": (170, 1, 3, 192, 384, "one"),
    "1100 rows each": (1100, 2, 2, 128, 64, "random"),
    "not tiled": (40, 2, 4, 160, 96, "random"),
}
# Formats with another block, group size, or zero points.
VARIANTS = [(name, scale_of) for name in FORMATS for scale_of in range(6 if name == "int4" else 2)]
EVERY_VARIANT = pytest.mark.parametrize("format, scale_of", VARIANTS)
ROWS = {
    "3 each": (3,) * 8,
    "60 each": (60, 61, 0, 59),
    "200 each": (200, 190, 210),
    **{name: COUNTS[name] for name in ("boundaries", "one row each", "all rows to one", "no rows")},
}


def draw_weight(format, scale_of, scale_dtype, E, rows, cols, device, trainable=True) -> QuantizedWeight:
    w = random_weight(format, E, rows, cols, "cpu", scale_of)
    return with_scales(w, scale_dtype, trainable=trainable).to(device)


def have_kernels(w: QuantizedWeight) -> bool:
    return tiles.have_kernels(w.format, w.dtype, w.scale.dtype)


def without_packing(w: QuantizedWeight) -> QuantizedWeight:
    return copy.deepcopy(w).set_trainable(False)


def draw(shape, format, scale_of, scale_dtype, dtype, device) -> tuple[dict, dict, dict]:
    """What gets gradients; trainable weights; and the rest of fused_experts' arguments."""
    tokens, top_k, E, D, F, routing = SHAPES[shape]
    widths = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
    weights = {
        name: draw_weight(format, scale_of, scale_dtype, E, *sides, device) for name, sides in widths.items()
    }
    inputs = {"x": (torch.randn(tokens, D) / 8).to(device, dtype), "scores": torch.rand(tokens, top_k)}
    inputs["scores"] = inputs["scores"].to(device)
    fixed = {"ids": draw_ids(routing, tokens, top_k, E, device)}
    return inputs, weights, fixed


def step(inputs, weights, fixed) -> dict:
    """out, dx and dscores."""
    dout = torch.ones_like(inputs["x"]) / 8
    dout[:, ::3] = -1 / 16
    with poisoned():
        return forward_backward(fused_experts, inputs, dout, **weights, **fixed)


# --- experts ----------------------------------------------------------------------------------------------


@HALF_DTYPES
@EVERY_VARIANT
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_experts(device, shape, format, scale_of, dtype):
    """Scales have x's dtype, and two others."""
    for scale_dtype in (dtype, F32, F16 if dtype == BF16 else BF16):
        inputs, weights, fixed = draw(shape, format, scale_of, scale_dtype, dtype, device)
        has_tiles = shape != "not tiled" and all(have_kernels(w) for w in weights.values())
        assert all((w.data_t is not None) == w.is_tiled == has_tiles for w in weights.values())
        found = step(inputs, weights, fixed)
        expected = step(inputs, {n: without_packing(w) for n, w in weights.items()}, fixed)
        assert found["dx"].isfinite().all() and found["dx"].any()
        assert_same_bits(found, expected)
        if format in ("fp8_block", "mxfp4"):
            break  # whose scales have one dtype


@EVERY_FORMAT
def test_some_weights_have_it(device, format):
    """Each weight for itself, beside others without."""
    inputs, weights, fixed = draw("60 rows each", format, 1, BF16, BF16, device)
    plain = {n: without_packing(w) for n, w in weights.items()}
    expected = step(inputs, plain, fixed)
    for name in weights:
        assert_same_bits(step(inputs, {**plain, name: weights[name]}, fixed), expected)


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", (F32, torch.float64), ids=("f32", "f64"))
def test_other_dtypes(device, format, dtype):
    """Whose GEMMs dequantise."""
    inputs, weights, fixed = draw("60 rows each", format, 1, BF16, dtype, device)
    plain = {n: without_packing(w) for n, w in weights.items()}
    assert_same_bits(step(inputs, weights, fixed), step(inputs, plain, fixed))


@EVERY_FORMAT
def test_sm80(tier, device, format):
    """It reads no tiles, so it dequantises these."""
    inputs, weights, fixed = draw("3 rows each", format, 1, BF16, BF16, device)
    plain = {n: without_packing(w) for n, w in weights.items()}
    tier("portable")
    assert_same_bits(step(inputs, weights, fixed), step(inputs, plain, fixed))


# --- one GEMM ---------------------------------------------------------------------------------------------


def both_gemms(a, w: QuantizedWeight, offsets) -> tuple[torch.Tensor, torch.Tensor]:
    """By the transposed weight, with the second packing, where there is one, and without."""
    args = a, *w.tensors, offsets, w.code, True
    assert (w.data_t is not None) == have_kernels(w)
    with poisoned():
        return ops.quantized_mm(*args, *w.transposed_tensors), ops.quantized_mm(*args)


@HALF_DTYPES
@EVERY_VARIANT
@pytest.mark.parametrize("rows", ROWS)
def test_products(device, rows, format, scale_of, dtype):
    """Tails of rows, k of 64 to 384, NaN in spare rows, every scale dtype."""
    other = F16 if dtype == BF16 else BF16
    for i, (out, width) in enumerate(((64, 128), (128, 192), (192, 384), (320, 64), (384, 320))):
        a, offsets = draw_rows(ROWS[rows], out, dtype, device, spare=5)
        scale_dtype = (dtype, F32, other)[i % 3]
        w = draw_weight(format, scale_of, scale_dtype, len(ROWS[rows]), out, width, device)
        found, expected = both_gemms(a, w, offsets)
        assert found.isfinite().all() and torch.equal(found, expected)


@HALF_DTYPES
@EVERY_FORMAT
def test_every_code_and_scale(device, format, dtype):
    """NaN codes, and scales from the smallest to those of infinite values: NaN is where it was."""
    E, out, width = 3, 192, 256
    for scale_shape in scale_shapes(format, (E, out, width)):
        data = torch.randint(256, (E, out, width // FORMATS[format].per_byte), dtype=torch.uint8)
        if format == "mxfp4":
            scale = torch.randint(256, scale_shape, dtype=torch.uint8)
        else:
            scale = torch.randn(scale_shape) * 2.0 ** torch.randint(-40, 40, scale_shape)
            scale = scale.to(dtype) if format == "int4" else scale  # infinite and subnormal ones, too
        zero = torch.randint(-8, 8, scale_shape, dtype=torch.int8) if format == "int4" else None
        data = data.view(FORMATS[format].data_dtype)
        half = dtype if format == "int4" else BF16
        options = {"format": format, "shape": (E, out, width), "trainable": True, "dtype": half}
        w = QuantizedWeight(data, scale, zero, **options).to(device)
        # One element in each row, so that a NaN stays in its column.
        a = torch.eye(out, dtype=dtype, device=device).repeat(E, 1)
        offsets = torch.arange(1, E + 1, dtype=torch.int32, device=device) * out
        for rows in (a, torch.ones_like(a)):
            found, expected = both_gemms(rows, w, offsets)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@EVERY_VARIANT
def test_which_kernel_runs(device, format, scale_of):
    """Codes are read up to 768 rows for each expert on average."""
    w = draw_weight(format, scale_of, BF16, 2, 256, 384, device)
    for rows, reads in ((1, True), (60, True), (768, True), (769, False)):
        a, offsets = draw_rows((rows, rows), 256, BF16, device)
        args = a, *w.tensors, offsets, w.code, True
        kernels = launches(lambda: ops.quantized_mm(*args, *w.transposed_tensors))  # noqa: B023
        assert any("dequantize" in name for name in kernels) == (not reads), kernels
        kernels = launches(lambda: ops.quantized_mm(*args))  # noqa: B023
        assert any("dequantize" in name for name in kernels), kernels


@EVERY_FORMAT
def test_a_rows_gradient_in_any_batch(device, format):
    """Its bits do not depend on how many rows its expert has, nor on which kernel reads the weight."""
    w = draw_weight(format, 1, BF16, 1, 192, 320, device)
    a, offsets = draw_rows((1100,), 192, BF16, device)
    whole, _ = both_gemms(a, w, offsets)
    for rows in (1, 7, 16, 17, 64, 65, 130, 500):
        found, _ = both_gemms(a[:rows], w, torch.full_like(offsets, rows))
        assert torch.equal(found, whole[:rows]), rows


@EVERY_FORMAT
def test_memory_that_is_not_aligned(device, format):
    """Views that start in the middle of 16 bytes are copied."""
    w = draw_weight(format, 1, BF16, 2, 64, 128, device)
    a, offsets = draw_rows((9, 30), 64, BF16, device)
    moved = []
    for tensor in w.transposed_tensors:
        if tensor is not None:
            place = torch.empty(tensor.nbytes + 4, dtype=torch.uint8, device=device)[4:]
            place.copy_(tensor.flatten().view(torch.uint8))
            tensor = place.view(tensor.dtype).view(tensor.shape)
        moved.append(tensor)
    found = ops.quantized_mm(a, *w.tensors, offsets, w.code, True, *moved)
    assert torch.equal(found, both_gemms(a, w, offsets)[1])


@pytest.mark.sanitizer
@EVERY_VARIANT
def test_under_the_sanitizer(device, format, scale_of):
    for counts in ((3, 0, 5), (70, 1, 130)):
        w = draw_weight(format, scale_of, BF16, 3, 128, 192, device)
        a, offsets = draw_rows(counts, 128, BF16, device)
        found, expected = both_gemms(a, w, offsets)
        assert torch.equal(found, expected)


# --- refused calls ----------------------------------------------------------------------------------------


def test_refused_packings(device):
    """What the kernels would misread, of one scale per group, per block and per matrix."""
    a, offsets = draw_rows((2, 2), 128, BF16, device)
    w = draw_weight("int4", 3, BF16, 2, 128, 192, device)
    data_t, scale_t, zero_t = w.transposed_tensors
    data, scale, zero = w.tensors
    published = w.data, w.scale, w.zero
    block = draw_weight("fp8_block", 0, F32, 2, 128, 192, device)
    matrix = draw_weight("fp8", 1, BF16, 2, 128, 192, device)

    def call(tensors, packing, code=w.code, transposed=True):
        rows = a if transposed else torch.ones(4, 192, dtype=BF16, device=device)
        return ops.quantized_mm(rows, *tensors, offsets, code, transposed, *packing)

    for packing, message in (
        ((data_t, None, zero_t), "expected data_t and scale_t together"),
        ((None, scale_t, zero_t), "expected data_t and scale_t together"),
        ((None, None, zero_t), "expected data_t and scale_t together"),
        ((data_t, scale_t, None), "expected zero_t where there is zero, found zero alone"),
        ((data, scale_t, zero_t), r"expected data_t of shape \(2, 3, 2, 2048\), found \(2, 2, 3, 2048\)"),
        ((data_t[:1], scale_t, zero_t), "expected data_t of shape"),
        ((data_t[..., :1024], scale_t, zero_t), "expected data_t of shape"),
        ((data_t.view(torch.int8), scale_t, zero_t), "expected data_t of dtype Byte, found Char"),
        ((data_t.cpu(), scale_t, zero_t), "data_t"),
        ((data_t, scale, zero_t), "expected scale_t of shape"),
        ((data_t, scale_t[..., :4], zero_t), "expected scale_t of shape"),
        ((data_t, scale_t.float(), zero_t), "expected scale_t of dtype BFloat16, found Float"),
        ((data_t, scale_t.cpu(), zero_t), "scale_t"),
        ((data_t, scale_t, zero), "expected zero_t of shape"),
        ((data_t, scale_t, zero_t.view(torch.uint8)), "expected zero_t of dtype Char, found Byte"),
        ((data_t, scale_t, zero_t.cpu()), "zero_t"),
    ):
        for transposed in (False, True):  # where it is not read, too: backward would
            with pytest.raises(RuntimeError, match=message):
                call((data, scale, zero), packing, transposed=transposed)
    with pytest.raises(RuntimeError, match="zero_t where there is zero, found zero_t alone"):
        call((data, scale, None), (data_t, scale_t, zero_t))
    with pytest.raises(RuntimeError, match="data in tiles.* beside data_t, found 3 dimensions"):
        call(published, (data_t, scale_t, zero_t))
    for other in (block, matrix):
        with pytest.raises(RuntimeError, match=r"expected scale_t of shape \(2, 3, 1, 4\), found"):
            call(other.tensors, (other.data_t, other.tensors[1], None), other.code)


# --- layers -----------------------------------------------------------------------------------------------


def layer(option: str, device, trainable: bool = True) -> FusedMoE:
    format, options = OPTIONS[option]
    moe = FusedMoE(128, 192, 4, 2, dtype=BF16).to(device)
    return quantize(moe, format, trainable=trainable, **options)


def dx_of(moe: FusedMoE, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(moe(leaf).float().square().sum(), leaf)
    return dx


@EVERY_OPTION
def test_moving(device, option):
    """The CPU has no second packing; it is made again where the weight comes back."""
    moe, x = layer(option, device), torch.randn(33, 128, device=device, dtype=BF16)
    w = moe.experts.w1
    plain = without_packing(w)
    assert plain.data_t is None and 1.9 * plain.nbytes <= w.nbytes <= 2.1 * plain.nbytes
    before, packing = dx_of(moe, x), [t if t is None else t.clone() for t in w.transposed_tensors]
    moe.to("cpu")
    assert w.is_trainable and w.transposed_tensors == (None, None, None)
    moe.to(device)
    for found, expected in zip(w.transposed_tensors, packing, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.device == w.device and found.dtype == expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(dx_of(moe, x), before)


@EVERY_OPTION
def test_loading_after_backward(device, option):
    """The next gradient is of the new weights, in a graph as in eager mode."""
    moe, other = layer(option, device).requires_grad_(False), layer(option, device).requires_grad_(False)
    x = torch.randn(33, 128, device=device, dtype=BF16)
    graph, recorded = capture(lambda: {"dx": dx_of(moe, x)})
    graph.replay()
    before = copies(recorded)["dx"]
    assert torch.equal(before, dx_of(moe, x))
    moe.load_state_dict(other.state_dict())
    expected = dx_of(other, x)
    assert not torch.equal(expected, before)
    assert torch.equal(dx_of(moe, x), expected)
    graph.replay()
    assert torch.equal(recorded["dx"], expected)


@pytest.mark.parametrize("format", ("fp8_block", "int4", "mxfp4"))
def test_compile(device, format):
    """One graph without breaks; backward has the second packing there, too."""
    torch._dynamo.reset()
    moe = FusedMoE(128, 192, 4, 2, dtype=BF16).to(device)
    moe = quantize(moe, format, trainable=True, **quantize_options(format))
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    for tokens in (9, 33):
        x = torch.randn(tokens, 128, device=device, dtype=BF16)
        dx = dx_of(moe, x)
        torch.testing.assert_close(dx_of(compiled, x), dx)
        kernels = launches(lambda: dx_of(compiled, x))  # noqa: B023
        assert not any("dequantize" in name for name in kernels), kernels
