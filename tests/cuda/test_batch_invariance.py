"""The contract of docs/inference.md: a token's output and gradients have the same bits in any batch."""

import pytest
import torch
from cases import BF16, F16, F32, Case, assert_near
from gpu_cases import FAST_DTYPES, HALF_DTYPES, assert_equal, capture, draw

from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, linear, router_logits
from fused_moe.ops import FACTS

pytestmark = pytest.mark.gpu

TOKENS = 4096
# About every threshold: tile heights, skinny experts, where the router's and the plan's kernels change.
BATCHES = (1, 2, 3, 7, 8, 9, 16, 31, 33, 63, 64, 65, 66, 127, 128, 129, 130, 256, 1000, 1025, 2049)
LAYERS = {
    "softmax": {"dim": 256, "hidden_dim": 192, "num_experts": 16, "top_k": 4},
    "sigmoid, groups, biases": {
        "dim": 128, "hidden_dim": 64, "num_experts": 16, "top_k": 2, "score_func": "sigmoid",
        "route_norm": True, "num_expert_groups": 4, "num_limited_groups": 2, "load_balance_coeff": 1e-3,
        "bias": True, "gate_bias": True,
    },
    "shared experts and their gate": {
        "dim": 256, "hidden_dim": 128, "num_experts": 8, "top_k": 2, "num_shared_experts": 2,
        "shared_expert_gate": True,
    },
    "latent experts": {
        "dim": 256, "latent_dim": 128, "latent_norm": True, "hidden_dim": 192, "num_experts": 16, "top_k": 4,
        "score_func": "sigmoid", "load_balance_coeff": 1e-3,
    },
    "float32 router": {
        "dim": 1088, "hidden_dim": 64, "num_experts": 200, "top_k": 6, "score_func": "sqrtsoftplus",
        "route_norm": True, "load_balance_coeff": 1e-3, "gate_bias": True, "expert_scale": True,
        "router_dtype": F32, "num_shared_experts": 1, "shared_expert_gate": True,
    },
    "one expert": {"dim": 64, "hidden_dim": 64, "num_experts": 1, "top_k": 1, "num_shared_experts": 1},
    "slices of D": {"dim": 2048, "hidden_dim": 128, "num_experts": 128, "top_k": 8},
    "many experts": {"dim": 1088, "hidden_dim": 64, "num_experts": 520, "top_k": 10},
    "widths of a tile's part": {
        "dim": 200, "hidden_dim": 72, "num_experts": 8, "top_k": 3, "activation": "gelu"
    },
    "F of no chunk": {"dim": 256, "hidden_dim": 91, "num_experts": 8, "top_k": 2, "num_shared_experts": 1},
    "widths of no chunk": {
        "dim": 131, "hidden_dim": 37, "num_experts": 6, "top_k": 2, "gated": False, "activation": "relu"
    },
}  # fmt: skip
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def draw_layer(name, dtype, device) -> tuple[FusedMoE, torch.Tensor]:
    layer = FusedMoE(**LAYERS[name], device=device, dtype=dtype).eval()
    return layer, torch.randn(TOKENS, layer.dim, device=device).to(dtype)


def batches(count=TOKENS):
    """Slices of every size, at the start and elsewhere."""
    for size in BATCHES:
        yield slice(0, size)
        yield slice(count - size - 7, count - 7)


def calls_by_tier(run) -> list:
    """How many calls each operator had during run(), by tier."""

    def calls():
        ops = range(len(FACTS["operators"]))
        return torch.stack([torch.ops.fused_moe.cuda_calls(op)[:-1] for op in ops])

    before = calls()
    run()
    return (calls() - before).tolist()


@FAST_DTYPES
@EVERY_LAYER
@torch.no_grad()
def test_layer(device, name, dtype):
    layer, x = draw_layer(name, dtype, device)
    out = layer(x)
    assert out.isfinite().all()
    for part in batches():
        assert_equal(layer(x[part]), out[part], part)
    order = torch.randperm(TOKENS, device=device)
    assert_equal(layer(x[order]), out[order], "shuffled")
    assert_equal(layer(torch.cat([x[:77], torch.full_like(x, torch.nan)]))[:77], out[:77], "beside NaN")


@FAST_DTYPES
@pytest.mark.parametrize("name", ("softmax", "slices of D"))
@torch.no_grad()
def test_same_experts(device, name, dtype):
    """Every token chooses the same experts, so that their rows cross every threshold."""
    layer, x = draw_layer(name, dtype, device)
    layer.expert_bias = torch.zeros(layer.num_experts, device=device)
    layer.expert_bias[: layer.top_k] = 100
    out = layer(x)
    for part in batches():
        assert_equal(layer(x[part]), out[part], part)


@FAST_DTYPES
@EVERY_LAYER
def test_gradient_of_tokens(device, name, dtype):
    layer, x = draw_layer(name, dtype, device)
    layer.train()
    dout = torch.randn_like(x)

    def step(part):
        leaf = x[part].clone().requires_grad_()
        out = layer(leaf)
        return out.detach(), torch.autograd.grad(out, leaf, dout[part])[0]

    out, dx = step(slice(None))
    with torch.no_grad():
        assert_equal(layer.eval()(x), out, "without gradients")
    layer.train()
    for size in (1, 2, 8, 33, 65, 129, 1000):
        part = slice(size, 2 * size)
        found = step(part)
        assert_equal(found[0], out[part], f"out of {part}")
        assert_equal(found[1], dx[part], f"dx of {part}")


@HALF_DTYPES
@pytest.mark.parametrize(
    "shape",
    ((66, 2, 80, 200, 2568), (40, 2, 8, 256, 2816), (130, 2, 8, 256, 2560)),
    ids=("16 rows", "64 rows", "not early"),
)
def test_down_of_a_long_k(device, shape, dtype):
    """Where experts have few rows, the down GEMM starts while up_gate still runs. Batches take turns, so that
    what it would read too early is another one's."""
    T, K, E, D, F = shape
    drawn = [draw(Case(T, D, F, E, K, dtype), device)[0] for _ in range(4)]
    weights = drawn[0][1:4]
    batches = [(x, *weights, scores, ids) for x, *_, scores, ids in drawn]
    expected = [fused_experts(x.clone().requires_grad_(), *rest) for x, *rest in batches]
    with torch.no_grad():
        found = [fused_experts(*batch) for batch in 5 * batches]
    for out, with_gradients in zip(found, 5 * expected, strict=True):
        assert_equal(out, with_gradients.detach(), "without gradients")


@FAST_DTYPES
def test_gradient_of_scores(device, dtype):
    (x, *weights, scores, ids), _ = draw(Case(1500, 256, 128, 16, 4, dtype), device)
    dout = torch.randn_like(x)

    def dscores(part):
        leaf = scores[part].clone().requires_grad_()
        out = fused_experts(x[part], *weights, leaf, ids[part])
        return torch.autograd.grad(out, leaf, dout[part])[0]

    whole = dscores(slice(None))
    for size in (1, 3, 8, 64, 129, 700):
        assert_equal(dscores(slice(5, 5 + size)), whole[5 : 5 + size], size)


@FAST_DTYPES
@pytest.mark.parametrize("name", ("softmax", "widths of a tile's part"))
@torch.no_grad()
def test_place_in_memory(device, name, dtype):
    """Neither the address of x nor its strides matter."""
    layer, x = draw_layer(name, dtype, device)
    out = layer(x[:300])
    shifted = torch.empty(300 * layer.dim + 3, device=device, dtype=dtype)[3:].view(300, layer.dim)
    assert_equal(layer(shifted.copy_(x[:300])), out, "an address that TMA does not read")
    assert_equal(layer(x[:300].mT.contiguous().mT), out, "strides")
    found, used = (calls_by_tier(lambda x=x: layer(x)) for x in (shifted, x[:300]))
    assert found == used


@pytest.mark.parametrize("name", ("softmax", "shared experts and their gate", "one expert"))
@torch.no_grad()
def test_compiled_and_replayed(device, name):
    layer, x = draw_layer(name, BF16, device)
    out = layer(x)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    for size in (5, 64, 1000):
        assert_equal(compiled(x[:size]), out[:size], f"compiled, {size}")
    for size in (1, 9, 200):
        fixed = x[:size].clone()
        graph, recorded = capture(lambda fixed=fixed: layer(fixed))
        fixed.copy_(x[size : 2 * size])
        graph.replay()
        assert_equal(recorded, out[size : 2 * size], f"replayed, {size}")


@pytest.mark.parametrize("name", [name for name in LAYERS if "num_shared_experts" not in LAYERS[name]])
def test_ways_of_running(device, name):
    """Gradients of x with the router in the experts' node, in its own under hooks, and compiled."""
    layer, x = draw_layer(name, BF16, device)
    x, dout = x[:70], torch.randn_like(x[:70])

    def step(run):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf, dout)[0]

    joined = step(layer)
    handle = layer.router.register_forward_hook(lambda *_: None)
    assert_equal(step(layer), joined, "hooked")
    handle.remove()
    if name == "softmax":
        assert_equal(step(torch.compile(layer, fullgraph=True)), joined, "compiled")


@pytest.mark.parametrize("dtype", (BF16, F32), ids=("bf16", "f32"))
@pytest.mark.parametrize("name", [name for name in LAYERS if "num_shared_experts" in LAYERS[name]])
def test_shared_experts(device, name, dtype):
    """Eager and compiled, with gradients of x, of the parameters, and without: the same bits, which the
    combine rounds once. A replay has them in the test above."""
    layer, x = draw_layer(name, dtype, device)
    with torch.no_grad():
        out = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    for size in (5, 70, TOKENS):
        part = x[:size]
        leaf = part.clone().requires_grad_()
        runs = {"eager": layer, "compiled": compiled}
        for how, run in runs.items():
            assert_equal(run(leaf).detach(), out[:size], f"{how}, {size}, gradients of x")
            assert_equal(run(part).detach(), out[:size], f"{how}, {size}, gradients of parameters")
            with torch.no_grad():
                assert_equal(run(part), out[:size], f"{how}, {size}, no gradients")
        dirty = torch.cat([part, torch.full_like(x[:9], torch.nan)])
        num_tokens = torch.tensor(size, device=device)
        for how, run in runs.items():
            padded = run(dirty.requires_grad_(), num_tokens=num_tokens).detach()
            assert_equal(padded[:size], out[:size], f"{how}, {size}, padded")
            assert not padded[size:].count_nonzero()


@pytest.mark.parametrize("num_experts", (1, 3, 8, 60, 64, 128, 130, 256, 384, 1000))
@pytest.mark.parametrize("dim", (8, 72, 512, 520, 2880, 7168))
def test_router(device, dim, num_experts):
    """Against float64, and in every batch, whichever way tokens share CTAs, clusters and slices of D."""
    for dtype in (BF16, F16):
        x = torch.randn(TOKENS, dim, device=device).to(dtype)
        weight = torch.randn(num_experts, dim, device=device).div(dim**0.5).to(dtype)
        bias = torch.randn(num_experts, device=device).to(dtype)
        logits = router_logits(x, weight, bias)
        expected = x.double() @ weight.double().mT + bias.double()
        assert logits.dtype == torch.float32
        assert (logits - expected).norm() < 2e-6 * expected.norm()
        for part in batches():
            assert_equal(router_logits(x[part], weight, bias), logits[part], part)
        big = router_logits(x.repeat(5, 1), weight, bias)
        assert_equal(big, logits.repeat(5, 1), "five times as many tokens")


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "tokens, dim, num_experts",
    ((5, 1200, 70), (70, 4100, 9), (8500, 64, 60), (4500, 72, 128), (8600, 64, 127), (8600, 64, 260)),
    ids=("cluster", "portable", "64 experts", "64 tokens", "128 experts", "256 experts"),
)
def test_every_kernel_of_the_router(device, tokens, dim, num_experts):
    x, weight, dlogits = (
        torch.randn(*shape, device=device).to(BF16)
        for shape in ((tokens, dim), (num_experts, dim), (tokens, num_experts))
    )
    logits, dx = router_logits(x, weight), torch.ops.fused_moe.router_dgrad(dlogits, weight)
    assert_near(logits, x.double() @ weight.double().mT, slack=4 + dim / 64)  # as in test_router_logits.py
    assert_near(dx, dlogits.double() @ weight.double())


@HALF_DTYPES
@torch.no_grad()
def test_rows_of_experts(device, dtype):
    """grouped_mlp: a row's result does not depend on how many rows its expert has, nor on which one it is."""
    R = 600
    (rows, *weights, _, _), _ = draw(Case(R, 256, 320, 4, 1, dtype), device)

    def of_expert(e, rows):
        counts = torch.zeros(4, dtype=torch.int32, device=device)
        counts[e] = len(rows)
        return grouped_mlp(rows, *weights, counts)

    whole = of_expert(2, rows)
    for part in batches(R):
        if part.start >= 0 and part.stop <= R:
            assert_equal(of_expert(2, rows[part]), whole[part], part)
    assert not torch.equal(of_expert(1, rows), whole)


@FAST_DTYPES
@pytest.mark.parametrize("widths", ((2048, 512), (64, 64), (200, 72), (131, 37), (768, 4096)), ids=str)
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_linear(device, widths, dtype, bias):
    """Output and gradient of x of a dense layer, where cuBLAS chooses by the number of tokens."""
    width_in, width_out = widths
    x = torch.randn(TOKENS, width_in, device=device).to(dtype)
    weight = (torch.randn(width_out, width_in, device=device) / width_in**0.5).to(dtype)
    added = torch.randn(width_out, device=device).to(dtype) if bias else None
    dout = torch.randn(TOKENS, width_out, device=device).to(dtype)

    def step(part):
        leaf = x[part].clone().requires_grad_()
        out = linear(leaf, weight, added)
        return out.detach(), torch.autograd.grad(out, leaf, dout[part])[0]

    out, dx = step(slice(None))
    for part in (*batches(), torch.randperm(TOKENS, device=device)):
        found = step(part)
        assert_equal(found[0], out[part], part)
        assert_equal(found[1], dx[part], part)


@FAST_DTYPES
@pytest.mark.parametrize("counts", ((4096,), (1, 4095), (0, 3, 60, 70, 300, 3663), (512,) * 8), ids=str)
def test_grouped_mm(device, counts, dtype):
    """A row's output and gradient are those that it has alone with its expert's weight."""
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    a = torch.randn(TOKENS, 320, device=device).to(dtype)
    b = (torch.randn(len(counts), 192, 320, device=device) / 18).to(dtype)
    dout = torch.randn(TOKENS, 192, device=device).to(dtype)
    leaf = a.clone().requires_grad_()
    out = grouped_mm(leaf, b, ends)
    (da,) = torch.autograd.grad(out, leaf, dout)
    for expert, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        for size in {1, 2, 17, 65, 129, count} & set(range(1, count + 1)):
            rows = slice(end - size, end)
            leaf = a[rows].clone().requires_grad_()
            alone = linear(leaf, b[expert])
            assert_equal(alone.detach(), out[rows].detach(), (expert, size))
            assert_equal(torch.autograd.grad(alone, leaf, dout[rows])[0], da[rows], (expert, size))
