"""The sm80 tier's kernels that read published codes give the bits of dequantised weights."""

import pytest
import torch
from cases import BF16, F16, poisoned
from gpu_cases import HALF_DTYPES, draw_rows, launches, ops, with_scales
from test_quantized import random_weight
from test_quantized_weights import SHAPES, VARIANTS, check, check_layouts, draw

from fused_moe import QuantizedWeight, fused_experts
from fused_moe.quantized.formats import FORMATS

pytestmark = pytest.mark.gpu

# Height of a tile, and what is special -> counts for which it is chosen, also with 5 spare rows: experts
# without rows, tiles of one group of 16 rows and of more, experts whose rows are cut into several tiles.
COUNTS = {
    "16 rows": (1, 0, 2, 5, 0, 16, 3, *(0,) * 11),
    "16 rows, cut": (33, 0, 1, *(0,) * 20),
    "16 rows, one expert": (*(0,) * 5, 7, *(0,) * 3),
    "64 rows": (33, 0, 1, 64, 7, 17, 8, 0, 31, 16, *(0,) * 4),
    "64 rows, cut": (64, 0, 65, 3, 16, 70, *(0,) * 10),
}
EVERY_COUNTS = pytest.mark.parametrize("name", COUNTS)
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
# Fewer stages than the pipeline has and more, a last one that is partial.
WIDTHS = {1: (64, 192, 320, 2624), 2: (32, 96, 160, 256, 320, 2624)}
FEW_ROWS = [name for name, (tokens, top_k, E, *_) in SHAPES.items() if tokens * top_k <= 16 * E]  # of SHAPES


@pytest.fixture(autouse=True)
def sm80(tier):
    """Weights that are made under it are not tiled."""
    tier("portable")


def quantized_mm(a, w: QuantizedWeight, offsets) -> torch.Tensor:
    assert not w.is_tiled
    with poisoned():
        return ops.quantized_mm(a, *w.tensors, offsets, w.code)


def check_codes(a, w: QuantizedWeight, offsets) -> None:
    """Bits, with NaN and infinity in the same places."""
    expected = ops.grouped_mm(a=a, b=w.dequantize(a.dtype), offsets=offsets)
    torch.testing.assert_close(quantized_mm(a, w, offsets), expected, rtol=0, atol=0, equal_nan=True)


@HALF_DTYPES
@EVERY_COUNTS
@pytest.mark.parametrize("format, scale_of", VARIANTS)
def test_products(device, format, scale_of, name, dtype):
    """Tails of k and of N, every scale dtype, NaN in spare rows."""
    counts = COUNTS[name]
    for i, k in enumerate(WIDTHS[FORMATS[format].per_byte]):
        a, offsets = draw_rows(counts, k, dtype, device, spare=5)
        w = random_weight(format, len(counts), (8, 37, 136, 328)[i % 4], k, device, scale_of)
        for scale_dtype in (BF16, F16, torch.float32):
            other = with_scales(w, scale_dtype)
            check_codes(a, other, offsets)
            assert quantized_mm(a, other, offsets).isfinite().all()


@HALF_DTYPES
@EVERY_FORMAT
def test_every_code_and_scale(device, format, dtype):
    """NaN codes, and scales from the smallest on to those of infinite values."""
    counts = COUNTS["64 rows"]
    E, n, k = len(counts), 264, 320
    a, offsets = draw_rows(counts, k, dtype, device)
    shape = random_weight(format, E, n, k, "cpu").scale.shape
    data = torch.randint(256, (E, n, k // FORMATS[format].per_byte), dtype=torch.uint8, device=device)
    for scale_dtype in (BF16, F16, torch.float32):
        if format == "mxfp4":
            scale = torch.randint(256, shape, dtype=torch.uint8, device=device)
        else:
            scale = torch.exp2(torch.rand(shape, device=device) * 280 - 150)
            scale = scale if format == "fp8_block" else scale.to(scale_dtype)
        codes = data.view({"int8": torch.int8}.get(format, torch.uint8))
        codes = codes.view(torch.float8_e4m3fn) if format.startswith("fp8") else codes
        check_codes(a, QuantizedWeight(codes, scale, None, format=format, shape=(E, n, k)), offsets)


@HALF_DTYPES
@EVERY_FORMAT
def test_nan_scales(device, format, dtype):
    counts = COUNTS["16 rows"]
    a, offsets = draw_rows(counts, 320, dtype, device)
    w = random_weight(format, len(counts), 136, 320, "cpu", 1)
    scale = w.scale.clone()
    scale[2, 0, -1] = 255 if format == "mxfp4" else torch.nan
    w = QuantizedWeight(w.data, scale, w.zero, format=format, shape=w.shape).to(device)
    check_codes(a, w, offsets)
    isnan = quantized_mm(a, w, offsets).isnan()
    assert isnan[1:3, 0].all() and not isnan[:1].any() and not isnan[3:].any()


@HALF_DTYPES
@pytest.mark.parametrize("format, scale_of", VARIANTS)
@pytest.mark.parametrize("shape", FEW_ROWS)
@torch.no_grad()
def test_experts(device, shape, format, scale_of, dtype):
    check_layouts(shape, format, scale_of, dtype, device)


@EVERY_FORMAT
@torch.no_grad()
def test_which_kernel_runs(device, choose, format):
    """Codes are read by tiles of 16 or 64 rows, and dequantised for more rows, another dtype, an odd width,
    or where FUSED_MOE_SCHEDULE asks for it."""

    def kernels(shape: str, dtype=BF16) -> list[str]:
        args, options, _ = draw(shape, "separate", format, 0, BF16, dtype, device)
        return launches(lambda: fused_experts(*args, **options))

    for shape, rows in {"one slot": 16, "two rows each": 16, "eight rows": 64, "many rows": None}.items():
        found = kernels(shape)
        for gemm in ("quantized_up_gate", "quantized_mm"):
            mine = [name for name in found if gemm in name]
            assert len(mine) == (rows is not None), found
            assert all(f">, {rows}>" in name or f">,{rows}>" in name for name in mine), mine
        assert any("dequantize" in name for name in found) == (rows is None), found
    assert any("dequantize" in name for name in kernels("eight rows", torch.float32))
    if FORMATS[format].per_byte == 1:
        w = random_weight(format, 9, 24, 96, device, 1)
        a, offsets = draw_rows(COUNTS["16 rows, one expert"], 96, BF16, device)
        assert any("dequantize" in name for name in launches(lambda: quantized_mm(a, w, offsets)))
    choose(FUSED_MOE_TIER="portable", FUSED_MOE_SCHEDULE="codes=0")
    assert any("dequantize" in name for name in kernels("eight rows"))


@EVERY_FORMAT
def test_rows_of_any_batch(device, format):
    """A row has the same bits in tiles of 16 and of 64 rows, and where the weight is dequantised."""
    w = random_weight(format, 4, 264, 320, device, 1)
    a, _ = draw_rows((640,), 320, BF16, device)

    def rows(num: int) -> torch.Tensor:
        offsets = torch.tensor((0, num, num, num), dtype=torch.int32, device=device)
        return quantized_mm(a[:num], w, offsets)

    whole = rows(640)
    for num in (1, 8, 9, 40, 64, 65):
        assert torch.equal(rows(num), whole[:num])


@pytest.mark.sanitizer
@EVERY_FORMAT
@torch.no_grad()
def test_under_the_sanitizer(device, format):
    for shape in ("one slot", "two rows each", "eight rows"):
        args, options, biases = draw(shape, "separate", format, 1, BF16, BF16, device)
        check(args, options | biases, BF16)
