"""Both sides of the experts in one launch, where rows are few and nothing needs gradients: the bits are
those of the operators one by one, on every kind of tile, with every layout."""

import itertools

import pytest
import torch
from cases import BF16, poisoned
from gpu_cases import HALF_DTYPES, capture, launches

import fused_moe
from fused_moe import fused_experts

pytestmark = pytest.mark.gpu

# tokens, K, E, D, F. Rows of a tile, and whether it is narrow, follow from them (sm90/experts.cu).
SHAPES = {
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
SHAPE = pytest.mark.parametrize("name", SHAPES)
LAYOUTS = ("separate", "halves", "interleaved", "ungated")


def draw(name, dtype, device, layout="separate", *, bias=False, transposed=False):
    tokens, top_k, num_experts, dim, hidden = SHAPES[name]

    def weight(out, width):
        w = torch.randn(num_experts, out, width, device=device, dtype=torch.float32) / width**0.5
        return w.to(dtype).mT.contiguous() if transposed else w.to(dtype)

    packed = layout in ("halves", "interleaved")
    x = torch.randn(tokens, dim, device=device).to(dtype)
    w3 = weight(hidden, dim) if layout == "separate" else None
    weights = (weight(2 * hidden if packed else hidden, dim), weight(dim, hidden), w3)
    scores = torch.rand(tokens, top_k, device=device)
    ids = torch.rand(tokens, num_experts, device=device).topk(top_k).indices
    options = {"layout": "separate" if layout == "ungated" else layout, "transposed": transposed}
    options["activation"] = "gelu" if layout == "ungated" else "silu"
    if bias:
        rows = 2 * hidden if packed else hidden
        options["b1"], options["b2"] = (
            torch.randn(num_experts, n, device=device).to(dtype) for n in (rows, dim)
        )
        if w3 is not None:
            options["b3"] = torch.randn(num_experts, hidden, device=device).to(dtype)
    return (x, *weights, scores, ids), options


def check(arguments, options):
    """The bits of a call whose plan is given, which has a launch for each GEMM."""
    *_, ids = arguments
    plan = fused_moe.route_plan(ids, arguments[1].size(0))
    expected = fused_experts(*arguments, plan=plan, **options)
    with poisoned():
        found = fused_experts(*arguments, **options)
    assert torch.equal(found, expected)


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@SHAPE
@torch.no_grad()
def test_layouts(device, name, layout, dtype):
    for bias, transposed in itertools.product((False, True), repeat=2):
        check(*draw(name, dtype, device, layout, bias=bias, transposed=transposed))


@SHAPE
@torch.no_grad()
def test_launches(device, sm90, name):
    """One up to 64 slots; behind the plan's, and before the combine's, with more."""
    (x, *weights, scores, ids), options = draw(name, BF16, device)
    names = launches(lambda: fused_experts(x, *weights, scores, ids, **options))
    assert len(names) == (1 if ids.numel() <= 64 else 3), names
    assert sum("experts_kernel" in kernel for kernel in names) == 1, names


@SHAPE
@torch.no_grad()
def test_up_before_gate_in_memory(device, name):
    """Narrow tiles read both weights by one map, from the lower address on."""
    (x, w1, w2, w3, scores, ids), options = draw(name, BF16, device)
    both = torch.stack([w3, w1])
    check((x, both[1], w2, both[0], scores, ids), options)
    together = torch.stack([w1, w3], dim=1)  # an expert's gate and up side by side
    check((x, together[:, 0], w2, together[:, 1], scores, ids), options)
    wide = torch.cat([w3, w3], dim=-1)[..., : w3.size(-1)]  # strides that differ
    check((x, w1, w2, wide, scores, ids), options)
    check((x, w1, w2, w1, scores, ids), options)


@SHAPE
@torch.no_grad()
def test_skewed_choices(device, name):
    """All rows to one expert, which are more than a tile's; some of them; no rows at all."""
    (x, *weights, scores, ids), options = draw(name, BF16, device)
    num_experts = weights[0].size(0)
    one = torch.full_like(ids, num_experts - 1)
    some = one.where(torch.rand(ids.shape, device=device) < 0.7, -1)
    for chosen in (one, some, torch.full_like(ids, -1)):
        check((x, *weights, scores, chosen), options)


@pytest.mark.parametrize("gate", (False, True), ids=("", "gate"))
@SHAPE
@torch.no_grad()
def test_shared_experts(device, name, gate):
    arguments, options = draw(name, BF16, device)
    options["shared"] = torch.randn_like(arguments[0])
    if gate:
        options["shared_gate"] = torch.randn(len(arguments[0]), device=device)
    check(arguments, options)
    *rest, ids = arguments
    check((*rest, torch.full_like(ids, -1)), options)  # shared experts alone


@SHAPE
@torch.no_grad()
def test_replays(device, name):
    """Nothing is zeroed between two replays, and what ran meanwhile leaves anything in memory."""
    (x, *weights, scores, ids), options = draw(name, BF16, device)
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
    (x, *weights, scores, ids), options = draw("narrow, one token", BF16, device)
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
        check(*draw(name, BF16, device))
