"""GEMMs that read quantised weights give the bits of the same call with dequantised weights."""

import copy
import re

import pytest
import torch
from cases import ACTIVATIONS, BF16, F16, poisoned, quantize_options
from gpu_cases import HALF_DTYPES, capture, draw_ids, launches, with_scales
from test_quantized import random_weight

from fused_moe import FusedMoE, QuantizedWeight, fused_experts, quantize
from fused_moe.quantized import tiles
from fused_moe.quantized.formats import FORMATS

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F, routing: every N of the MMAs; tails of rows, of k, of columns; several tiles of an
# expert; widths that tiles fit and others.
SHAPES = {
    "one slot": (1, 1, 3, 128, 64, "random"),
    "two rows each": (16, 2, 16, 320, 192, "random"),
    "eight rows": (8, 2, 2, 256, 192, "random"),
    "33 rows": (33, 1, 1, 384, 136, "random"),
    "45 rows": (45, 1, 1, 192, 448, "random"),
    "90 rows": (90, 1, 1, 320, 256, "random"),
    "64 rows and 1": (65, 1, 2, 160, 64, "one"),
    "129 rows": (129, 1, 1, 640, 320, "random"),
    "many experts": (100, 4, 40, 512, 384, "random"),
    "few rows, but one expert has all": (70, 2, 10, 256, 96, "one"),
    "two rows on average, one expert has all": (40, 1, 20, 192, 128, "one"),
    "few rows, a long k": (30, 2, 6, 2624, 192, "random"),
    "few rows, three tiles of 20 stages": (40, 1, 20, 128, 2560, "one"),  # of the down GEMM, one CTA's
    "one expert has all": (200, 2, 5, 256, 96, "one"),
    "tall tiles": (700, 2, 2, 320, 192, "random"),
    "tall tiles, one of 225 rows": (737, 1, 1, 448, 64, "random"),
    "tall tiles, half a line": (700, 2, 2, 256, 96, "random"),
    "384 rows": (384, 1, 1, 128, 64, "random"),
    "385 rows": (385, 1, 1, 128, 64, "random"),
    "many rows": (2000, 2, 3, 256, 128, "random"),
    "most rows": (3100, 1, 1, 128, 64, "random"),
}
LAYOUTS = ("separate", "halves", "interleaved", "ungated")
# Formats with another block, scale dtype or zero points.
VARIANTS = [(name, scale_of) for name in FORMATS for scale_of in range(4)]


def draw(shape, layout, format, scale_of, scale_dtype, dtype, device):
    tokens, top_k, E, D, F, routing = SHAPES[shape]
    if FORMATS[format].per_byte == 2:
        D, F = -(-D // 64) * 64, -(-F // 64) * 64  # whole groups
    rows = F if layout in ("separate", "ungated") else 2 * F

    def weight(out, width):
        return with_scales(random_weight(format, E, out, width, "cpu", scale_of), scale_dtype).to(device)

    w1, w2, w3 = weight(rows, D), weight(D, F), weight(F, D) if layout == "separate" else None
    x = torch.randn(tokens, D).to(device, dtype)
    scores = torch.rand(tokens, top_k).to(device)
    biases = {"b1": torch.randn(E, rows), "b2": torch.randn(E, D), "b3": torch.randn(E, F)}
    if w3 is None:
        biases["b3"] = None
    biases = {n: b if b is None else b.to(device, dtype) for n, b in biases.items()}
    ids = draw_ids(routing, tokens, top_k, E, device)
    options = {"layout": layout} if layout != "ungated" else {"activation": "gelu"}
    return (x, w1, w2, w3, scores, ids), options, biases


def dense(args, dtype):
    x, *weights, scores, ids = args
    return x, *(w if w is None else w.dequantize(dtype) for w in weights), scores, ids


def check(args, options, dtype) -> None:
    with poisoned():
        found = fused_experts(*args, **options)
    expected = fused_experts(*dense(args, dtype), **options)
    assert found.isfinite().all() and torch.equal(found, expected)


def check_layouts(shape, format, scale_of, dtype, device) -> None:
    """Each layout with scales of x's dtype or another one, every second with biases."""
    other = F16 if dtype == BF16 else BF16
    for i, layout in enumerate(LAYOUTS):
        scale_dtype = (dtype, torch.float32, other, dtype)[i]
        args, options, biases = draw(shape, layout, format, scale_of, scale_dtype, dtype, device)
        check(args, options | (biases if i % 2 else {}), dtype)


@HALF_DTYPES
@pytest.mark.parametrize("format, scale_of", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_bits_of_dequantised_weights(device, shape, format, scale_of, dtype):
    check_layouts(shape, format, scale_of, dtype, device)


# Scales with which one multiplication makes a pair of 4-bit codes, to both ends of the range, and others.
QUICK_SCALES = {
    "int4": ((2.0**-126, -(2.0**-126), 0.01, -0.498046875), (0.0, 2.0**-130, 0.5, -3.0, 2.0**20)),
    "mxfp4": ((0, 1, 120, 127), (128, 129, 147)),
}


@pytest.mark.parametrize("share", (0, 0.002, 0.5))
@pytest.mark.parametrize("format", QUICK_SCALES)
@pytest.mark.parametrize("shape", ("one slot", "eight rows", "few rows, a long k", "many experts"))
@torch.no_grad()
def test_sizes_of_scales(device, shape, format, share):
    """All scales are quick, or some or half of them are not."""
    tokens, top_k, E, D, F, routing = SHAPES[shape]
    D, F = -(-D // 128) * 128, -(-F // 128) * 128

    def weight(out, width):
        w = random_weight(format, E, out, width, "cpu", 2)  # int4 in groups of 128
        quick, others = (
            torch.tensor(sizes)[torch.randint(len(sizes), w.scale.shape)] for sizes in QUICK_SCALES[format]
        )
        scale = torch.where(torch.rand(w.scale.shape) < share, others, quick).to(w.scale.dtype)
        return QuantizedWeight(w.data, scale, format=format, shape=w.shape, dtype=BF16).to(device)

    x, scores = torch.randn(tokens, D).to(device, BF16), torch.rand(tokens, top_k).to(device)
    ids = draw_ids(routing, tokens, top_k, E, device)
    check((x, weight(F, D), weight(D, F), weight(F, D), scores, ids), {}, BF16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", ("one slot", "eight rows", "64 rows and 1", "many experts", "tall tiles"))
@torch.no_grad()
def test_every_activation(device, tier, shape, activation):
    """Both tiers; on Hopper rows that go through shared memory, and rows in registers."""
    for name in (None, "portable"):
        tier(name)
        for layout in LAYOUTS:
            args, options, biases = draw(shape, layout, "int8", 0, BF16, BF16, device)
            constants = {"activation": activation, "alpha": 1.3, "limit": 0.9}
            check(args, options | biases | constants, BF16)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", ("one slot", "eight rows", "64 rows and 1", "many experts", "many rows"))
@torch.no_grad()
def test_tiled_or_not(device, monkeypatch, shape, format):
    """Weights give the same bits whether all, some or none are tiled."""
    (x, *weights, scores, ids), options, _ = draw(shape, "separate", format, 1, BF16, BF16, device)
    expected = fused_experts(x, *weights, scores, ids, **options)
    monkeypatch.setattr(tiles, "are_read_on", lambda device: False)
    published = [copy.deepcopy(w) for w in weights]  # made anew, so they are not tiled
    assert not any(w.is_tiled for w in published)
    for chosen in ((True,) * 3, (True, False, False), (False, True, False), (False, False, True)):
        mixed = [p if c else w for w, p, c in zip(weights, published, chosen, strict=True)]
        assert torch.equal(fused_experts(x, *mixed, scores, ids, **options), expected), chosen


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_which_kernel_runs(sm90, device, format):
    """A kernel for few, some or many rows of an expert, or one that has tall tiles, reads the weight; it is
    dequantised for more rows. Few rows are one launch."""
    cases = {
        "one slot": "",
        "45 rows": "1",
        "129 rows": "2",
        "384 rows": "2",
        "385 rows": "3",
        "tall tiles": "3",
        "many rows": "3",
        "most rows": None,
    }
    for shape, rows in cases.items():
        args, options, _ = draw(shape, "separate", format, 0, BF16, BF16, device)
        kernels = launches(lambda: fused_experts(*args, **options))  # noqa: B023
        if shape == "one slot":
            assert sum("experts_kernel" in name for name in kernels) == 1, kernels
        for gemm in ("quantized_up_gate", "quantized_mm"):
            found = {
                match[1] for name in kernels if gemm in name and (match := re.search(r"Height\)(\d)", name))
            }
            assert found == ({rows} if rows else set()), kernels
        assert any("dequantize_" in name for name in kernels) == (rows is None), kernels


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_tokens_of_any_batch(device, format):
    args, options, _ = draw("many experts", "separate", format, 1, BF16, BF16, device)
    x, w1, w2, w3, scores, ids = args
    whole = fused_experts(*args, **options)
    for first, num in ((0, 1), (3, 7), (11, 33), (20, 80)):
        part = slice(first, first + num)
        out = fused_experts(x[part], w1, w2, w3, scores[part], ids[part], **options)
        assert torch.equal(out, whole[part])
    # enough tokens for tall tiles, and enough for weights to be dequantised
    for times in (60, 320):
        many = [t.repeat(times, 1) for t in (x, scores, ids)]
        out = fused_experts(many[0], w1, w2, w3, *many[1:], **options)
        assert torch.equal(out, whole.repeat(times, 1))


@pytest.mark.parametrize("shape", ("one slot", "eight rows", "many experts"))
@torch.no_grad()
def test_formats_of_gate_and_up(device, shape):
    """No kernel reads two formats, so weights are dequantised, after the plan of few slots."""
    (x, w1, w2, _, scores, ids), options, biases = draw(shape, "separate", "int4", 1, BF16, BF16, device)
    (_, _, _, w3, *_), *_ = draw(shape, "separate", "fp8", 1, BF16, BF16, device)
    check((x, w1, w2, w3, scores, ids), options | biases, BF16)
    kernels = launches(lambda: fused_experts(x, w1, w2, w3, scores, ids, **options))
    assert any("dequantize" in name for name in kernels), kernels


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_memory_of_a_served_layer(device, format):
    """The published bytes and 2%, when it is made and when it has run: a call dequantises nothing."""

    def requested() -> int:  # not allocated, which has what the allocator does not split off
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    layer = FusedMoE(512, 768, 8, 2, device=device, dtype=BF16)
    parameters = sum(layer.experts.get_parameter(name).nbytes for name in ("w1", "w2", "w3"))
    before = requested()
    quantize(layer, format, **quantize_options(format))
    taken = parameters + requested() - before
    published = sum(t.nbytes for t in layer.experts.state_dict().values())
    assert published <= taken <= 1.02 * published
    x = torch.randn(64, 512).to(device, BF16)
    layer(x)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    layer(x)
    assert torch.cuda.max_memory_allocated(device) - before < parameters / 8


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_no_tokens(device, format):
    """Nothing is read, so nothing is dequantised."""
    (x, *weights, scores, ids), options, _ = draw("many experts", "separate", format, 1, BF16, BF16, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.max_memory_allocated(device)
    out = fused_experts(x[:0], *weights, scores[:0], ids[:0], **options)
    assert out.shape == (0, 512)
    assert torch.cuda.max_memory_allocated(device) - before < 2**20


@pytest.mark.parametrize("format", ("int4", "fp8_block"))
@torch.no_grad()
def test_graph(device, format):
    """Captured once, replayed with other tokens and another routing."""
    args, options, _ = draw("many experts", "separate", format, 1, BF16, BF16, device)
    x, w1, w2, w3, scores, ids = args
    graph, out = capture(lambda: fused_experts(*args, **options))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        ids.copy_(ids.roll(7, 0))
        graph.replay()
        assert torch.equal(out, fused_experts(*args, **options))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", (torch.float32, F16))
@torch.no_grad()
def test_sm80(tier, device, format, dtype):
    tier("portable")
    args, options, biases = draw("129 rows", "separate", format, 1, F16, dtype, device)
    check(args, options | biases, dtype)


@pytest.mark.sanitizer
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_under_the_sanitizer(device, format):
    for shape in ("one slot", "64 rows and 1", "33 rows", "129 rows", "tall tiles"):
        args, options, biases = draw(shape, "separate", format, 1, BF16, BF16, device)
        check(args, options | biases, BF16)
