"""Both sides of the experts in one launch, where rows are few and nothing needs gradients: the bits are
those of the operators one by one, on every kind of tile, with every layout."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BF16, Case
from gpu_cases import HALF_DTYPES, capture, check_own_plan, draw, launches

import fused_moe
from fused_moe import fused_experts

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F. Rows of a tile, and whether it is narrow, follow from them (sm90/experts.cu).
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
}
SHAPES = {name: Case(T, D, F, E, K, BF16) for name, (T, K, E, D, F) in SIZES.items()}
SHAPE = pytest.mark.parametrize("name", SHAPES)
LAYOUTS = ("separate", "halves", "interleaved", "ungated")


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@SHAPE
@torch.no_grad()
def test_layouts(device, name, layout, dtype):
    activation = "gelu" if layout == "ungated" else "silu"
    for bias, stored in itertools.product((False, True), ("", ".T")):
        options = {"dtype": dtype, "layout": layout + stored, "activation": activation, "bias": bias}
        check_own_plan(*draw(replace(SHAPES[name], **options), device))


@SHAPE
@torch.no_grad()
def test_launches(device, sm90, name):
    """One up to 64 slots; behind the plan's, and before the combine's, with more."""
    (x, *weights, scores, ids), options = draw(SHAPES[name], device)
    names = launches(lambda: fused_experts(x, *weights, scores, ids, **options))
    assert len(names) == (1 if ids.numel() <= 64 else 3), names
    assert sum("experts_kernel" in kernel for kernel in names) == 1, names


@SHAPE
@torch.no_grad()
def test_up_before_gate_in_memory(device, name):
    """Narrow tiles read both weights by one map, from the lower address on."""
    (x, w1, w2, w3, scores, ids), options = draw(SHAPES[name], device)
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
    (x, *weights, scores, ids), options = draw(SHAPES[name], device)
    num_experts = weights[0].size(0)
    one = torch.full_like(ids, num_experts - 1)
    some = one.where(torch.rand(ids.shape, device=device) < 0.7, -1)
    for chosen in (one, some, torch.full_like(ids, -1)):
        check_own_plan((x, *weights, scores, chosen), options)


@pytest.mark.parametrize("gate", (False, True), ids=("", "gate"))
@SHAPE
@torch.no_grad()
def test_shared_experts(device, name, gate):
    arguments, options = draw(SHAPES[name], device)
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
    (x, *weights, scores, ids), options = draw(SHAPES[name], device)
    num_experts = weights[0].size(0)
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


@torch.no_grad()
def test_two_streams(device):
    """Concurrent launches have separate counters."""
    (x, *weights, scores, ids), options = draw(SHAPES["narrow, one token"], device)
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
    for name in ("narrow", "16 rows, plan given", "64 rows"):
        check_own_plan(*draw(SHAPES[name], device))
