"""Both sides of the experts in one launch, where rows are few and nothing needs gradients: the bits are
those of the operators one by one, on every kind of tile, with every layout."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BF16, Case
from gpu_cases import HALF_DTYPES, capture, check_own_plan, launches
from gpu_cases import draw as draw_plain

import fused_moe
from fused_moe import fused_experts, quantize

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F, the weights' format and its options. Rows of a tile, and whether it is narrow, follow
# from them (sm90/experts.cuh). Quantised weights have tiles of 16 rows alone.
SIZES = {
    "narrow": (3, 2, 8, 200, 136),
    "narrow, one token": (1, 8, 128, 2048, 768),
    "narrow, a long k": (2, 2, 8, 72, 2824),
    "16 rows": (8, 8, 128, 256, 1544),
    "16 rows, a long k": (8, 2, 8, 136, 8200),
    "16 rows, plan given": (40, 3, 70, 264, 200),
    "64 rows": (20, 3, 7, 136, 264),
    "64 rows, plan given": (130, 4, 37, 200, 136),
    "64 rows of one expert": (16, 1, 1, 64, 72),
    "64 rows, 32 an expert": (296, 4, 37, 200, 136),
    "int4": (3, 2, 8, 384, 128, "int4"),
    "int4, zero points, groups of 32": (8, 8, 128, 256, 1536, "int4", {"group_size": 32, "symmetric": False}),
    "int4, plan given": (40, 3, 70, 320, 192, "int4", {"group_size": 64}),
    "mxfp4": (1, 8, 128, 2048, 768, "mxfp4"),
    "mxfp4, plan given": (40, 3, 70, 320, 192, "mxfp4"),
    "fp8_block": (8, 2, 8, 192, 2496, "fp8_block"),
    "fp8, plan given": (40, 3, 70, 320, 192, "fp8"),
    "int8": (5, 4, 16, 256, 448, "int8"),
}
SHAPES = {name: Case(T, D, F, E, K, BF16) for name, (T, K, E, D, F, *_) in SIZES.items()}
SHAPE = pytest.mark.parametrize("name", SHAPES)
LAYOUTS = ("separate", "halves", "interleaved", "ungated")


def draw(name: str, device, **changes) -> tuple[tuple, dict]:
    """The arguments of fused_experts; a plan is not among them."""
    (x, *weights, scores, ids), options = draw_plain(replace(SHAPES[name], **changes), device)
    if format := SIZES[name][5:6]:
        weights = [w if w is None else quantize(w, *format, **dict(*SIZES[name][6:])) for w in weights]
    return (x, *weights, scores, ids), options


def num_experts_of(name: str) -> int:
    return SHAPES[name].num_experts


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@SHAPE
@torch.no_grad()
def test_layouts(device, name, layout, dtype):
    activation = "gelu" if layout == "ungated" else "silu"
    is_quantised = len(SIZES[name]) > 5
    for bias, stored in itertools.product((False, True), ("",) if is_quantised else ("", ".T")):
        options = {"dtype": dtype, "layout": layout + stored, "activation": activation, "bias": bias}
        check_own_plan(*draw(name, device, **options))


@SHAPE
@torch.no_grad()
def test_launches(device, sm90, name):
    """One up to 64 slots; behind the plan's, and before the combine's, with more."""
    (x, *weights, scores, ids), options = draw(name, device)
    names = launches(lambda: fused_experts(x, *weights, scores, ids, **options))
    assert len(names) == (1 if ids.numel() <= 64 else 3), names
    assert sum("experts_kernel" in kernel for kernel in names) == 1, names


TWO_LAUNCHES = {
    "a long k": (Case(4, 192, 2560, 8, 2, BF16), ("int8", "int8")),
    "other codes": (Case(4, 192, 1408, 8, 2, BF16), ("mxfp4", "fp8")),
    "other codes, more tiles than SMs": (Case(40, 320, 704, 70, 3, BF16), ("mxfp4", "fp8")),
}


@pytest.mark.parametrize("case, formats", TWO_LAUNCHES.values(), ids=TWO_LAUNCHES)
@torch.no_grad()
def test_quantised_weights_in_two_launches(device, sm90, case, formats):
    """Where a long k would leave SMs without a tile, and where the two sides' codes differ. The down GEMM has
    more stages than buffers, and loads the first ones while up_gate runs unless k is long."""
    (x, *weights, scores, ids), options = draw_plain(case, device)
    up, down = formats
    weights = [quantize(w, f) for w, f in zip(weights, (up, down, up), strict=True)]
    check_own_plan((x, *weights, scores, ids), options)
    dense = [w.dequantize(BF16) for w in weights]
    expected = fused_experts(x, *dense, scores, ids, **options)
    assert torch.equal(fused_experts(x, *weights, scores, ids, **options), expected)
    names = launches(lambda: fused_experts(x, *weights, scores, ids, **options))
    assert not any("experts_kernel" in name or "dequantize" in name for name in names), names
    assert sum("quantized_" in name for name in names) == 2, names


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if len(size) == 5])
@torch.no_grad()
def test_up_before_gate_in_memory(device, name):
    """Narrow tiles read both weights by one map, from the lower address on."""
    (x, w1, w2, w3, scores, ids), options = draw(name, device)
    both = torch.stack([w3, w1])
    check_own_plan((x, both[1], w2, both[0], scores, ids), options)
    together = torch.stack([w1, w3], dim=1)  # an expert's gate and up side by side
    check_own_plan((x, together[:, 0], w2, together[:, 1], scores, ids), options)
    wide = torch.cat([w3, w3], dim=-1)[..., : w3.size(-1)]  # strides that differ
    check_own_plan((x, w1, w2, wide, scores, ids), options)
    check_own_plan((x, w1, w2, w1, scores, ids), options)


@SHAPE
@torch.no_grad()
def test_skewed_choices(device, name):
    """All rows to one expert, which are more than a tile's; some of them; no rows at all."""
    (x, *weights, scores, ids), options = draw(name, device)
    one = torch.full_like(ids, num_experts_of(name) - 1)
    some = one.where(torch.rand(ids.shape, device=device) < 0.7, -1)
    for chosen in (one, some, torch.full_like(ids, -1)):
        check_own_plan((x, *weights, scores, chosen), options)


@pytest.mark.parametrize("gate", (False, True), ids=("", "gate"))
@SHAPE
@torch.no_grad()
def test_shared_experts(device, name, gate):
    arguments, options = draw(name, device)
    options["shared"] = torch.randn_like(arguments[0])
    if gate:
        options["shared_gate"] = torch.randn(len(arguments[0]), device=device)
    check_own_plan(arguments, options)
    *rest, ids = arguments
    check_own_plan((*rest, torch.full_like(ids, -1)), options)  # shared experts alone


@SHAPE
@torch.no_grad()
def test_replays(device, name):
    """Nothing is zeroed between two replays, and what ran meanwhile leaves anything in memory."""
    (x, *weights, scores, ids), options = draw(name, device)
    num_experts = num_experts_of(name)
    graph, out = capture(lambda: fused_experts(x, *weights, scores, ids, **options))
    for _ in range(10):
        ids.copy_(torch.rand(len(ids), num_experts, device=device).topk(ids.size(1)).indices)
        expected = fused_experts(
            x, *weights, scores, ids, plan=fused_moe.route_plan(ids, num_experts), **options
        )
        out.fill_(torch.nan)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ("narrow, one token", "mxfp4"))
@torch.no_grad()
def test_two_streams(device, name):
    """Concurrent launches have separate counters."""
    (x, *weights, scores, ids), options = draw(name, device)
    expected = fused_experts(x, *weights, scores, ids, **options)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(fused_experts(x, *weights, scores, ids, **options))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.sanitizer
@torch.no_grad()
def test_under_the_sanitizer(device):
    for name in ("narrow", "16 rows, plan given", "64 rows", "int4", "mxfp4, plan given", "int8"):
        check_own_plan(*draw(name, device))
