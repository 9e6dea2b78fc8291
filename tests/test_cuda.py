"""What only a GPU shows: graphs, streams, synchronisation, a second device, 2**31 numbers, wrong maps."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LAYOUTS,
    ROUTINGS,
    Case,
    assert_near,
    assert_same_bits,
    call_operator,
    check_experts,
    forward_backward,
    make_ids,
    operator_calls,
    variants,
)

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, reference

pytestmark = pytest.mark.gpu

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
FAST_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
OPERATORS = sorted(operator_calls(Case(), "cpu"))


def layer(device, dtype=None, **changes) -> FusedMoE:
    settings = {
        "score_func": "sigmoid", "route_norm": True, "num_shared_experts": 1, "shared_expert_gate": True,
        "load_balance_coeff": 1e-3, "bias": True,
    }  # fmt: skip
    return FusedMoE(64, 48, 8, 2, **settings | changes, device=device, dtype=dtype)


def step(module, x, dout) -> dict:
    """{"out", "dx", and every parameter's gradient} of one training step, without .grad."""
    x = x.detach().requires_grad_()
    parameters = dict(module.named_parameters())
    out = module(x)
    grads = torch.autograd.grad(out, [x, *parameters.values()], dout)
    return {"out": out.detach(), **dict(zip(["dx", *parameters], grads, strict=True))}


def copies(results: dict) -> dict:
    return {n: t.clone() for n, t in results.items()}


# --- sizes of the fast paths ----------------------------------------------------------------------

TILED = {
    "aligned": Case(300, 256, 192, 6, 3),
    "depth of 8": Case(300, 200, 136, 6, 3),  # whole 16 bytes, no whole 32
    "one tile": Case(128, 128, 128, 1, 1),
    "smallest": Case(50, 8, 8, 3, 2),
    "odd": Case(300, 133, 67, 6, 3),
    "aligned in, odd out": Case(200, 256, 65, 4, 2),
    "odd in, aligned out": Case(200, 65, 256, 4, 2),
    "every row to one": Case(3000, 136, 136, 5, 1, routing="one"),
    "gaps": Case(500, 256, 192, 33, 4, routing="gaps"),
    "sentinels": Case(500, 256, 192, 8, 4, routing="sentinels"),
    "1024 experts": Case(1000, 64, 32, 1024, 2),
    "32 slots": Case(100, 64, 32, 64, 32),
    "one token": Case(1, 256, 192, 8, 8),
    "no tokens": Case(0, 256, 192, 8, 8),
}


@ALL_DTYPES
@pytest.mark.parametrize("size", TILED)
def test_sizes(device, size, dtype):
    """Sizes that take whole tiles, parts of tiles, or no aligned access at all: everything, all gradients."""
    if size == "1024 experts":  # the loop's time
        check_experts(replace(TILED[size], dtype=dtype, bias=True), device)
        return
    for case in variants(replace(TILED[size], dtype=dtype)):
        check_experts(case, device)


@ALL_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ("aligned", "depth of 8", "odd"))
def test_layouts(device, size, layout, dtype):
    """Every layout of the weights, stored either way round."""
    check_experts(replace(TILED[size], dtype=dtype, layout=layout, bias=True), device)


@FAST_DTYPES
@pytest.mark.parametrize("form", [f for f in FORMS if f != "contiguous"])
@pytest.mark.parametrize("layout", ("separate", "interleaved.T"))
@pytest.mark.parametrize("size", ("aligned", "depth of 8"))
def test_storage(device, size, layout, form, dtype):
    """Base pointers and strides that no 16-byte access may touch, beside sizes that would allow one."""
    check_experts(replace(TILED[size], dtype=dtype, layout=layout, bias=True), device, form=FORMS[form])


@FAST_DTYPES
@pytest.mark.parametrize("name", ("w1", "w2", "w3", "x"))
@pytest.mark.parametrize("form", ("misaligned", "swapped"))
def test_one_operand_otherwise(device, form, name, dtype):
    """One tensor misaligned or swapped beside aligned ones: the numbers stay."""
    case = replace(TILED["aligned"], dtype=dtype)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    expected = forward_backward(fused_experts, inputs, dout, ids=ids)
    inputs[name] = FORMS[form](inputs[name])
    found = forward_backward(fused_experts, inputs, dout, ids=ids)
    for result, value in expected.items():
        slack = 8 * max(1, torch.finfo(dtype).eps / torch.finfo(value.dtype).eps)
        assert_near(found[result], value, slack)


# --- the same bits --------------------------------------------------------------------------------


@ALL_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_same_bits_beside_other_work(device, score_on, dtype):
    """Five runs of a skewed routing, other kernels on another stream beside them: the same bits."""
    case = Case(2000, 136, 72, 16, 4, dtype, layout="halves", bias=True, score_on=score_on)
    inputs, dout = case.inputs(device), case.dout(device)
    ids = (torch.rand(2000, 4) ** 3 * 16).int().to(device)
    fixed = {"ids": ids, "score_on": score_on, **case.options}
    first = forward_backward(fused_experts, inputs, dout, **fixed)
    noise, other = torch.randn(1024, 1024, device=device), torch.cuda.Stream(device)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(other):
            for _ in range(20):
                noise = noise @ noise / 32
        assert_same_bits(first, forward_backward(fused_experts, inputs, dout, **fixed))
    torch.cuda.synchronize()


@FAST_DTYPES
def test_two_streams(device, dtype):
    """Two calls at once, on streams of their own, give the bits of each alone."""
    runs = []
    for layout, tokens in (("separate", 700), ("interleaved", 500)):
        case = Case(tokens, 136, 72, 12, 4, dtype, layout=layout, bias=True)
        inputs, dout = case.inputs(device), case.dout(device)
        runs.append((inputs, dout, {"ids": case.ids(device), **case.options}))
    alone = [forward_backward(fused_experts, i, d, **fixed) for i, d, fixed in runs]
    streams = [torch.cuda.Stream(device) for _ in runs]
    torch.cuda.synchronize()
    for _ in range(10):
        together = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # both queues fill before either runs
        for stream, (inputs, dout, fixed) in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                together.append(forward_backward(fused_experts, inputs, dout, **fixed))
        torch.cuda.synchronize()
        for found, expected in zip(together, alone, strict=True):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_on_the_second_device(device, name):
    """Tensors of cuda:1 while cuda:0 is current: the same bits there, and the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    if torch.cuda.get_device_capability(0) != torch.cuda.get_device_capability(1):
        pytest.skip("needs two CUDA devices of one kind")
    torch.cuda.set_device(0)
    for dtype in (F32, BF16):
        for args in operator_calls(Case(61, 64, 40, 5, 3, dtype, "sentinels", bias=True), "cuda:0")[name]:
            other = [a.to("cuda:1") if torch.is_tensor(a) else a for a in args]
            torch.cuda.synchronize(1)
            found = call_operator(name, other)
            assert torch.cuda.current_device() == 0
            for i, (mine, there) in enumerate(zip(call_operator(name, args), found, strict=True)):
                assert there.device == torch.device("cuda:1")
                there = there.to("cuda:0")
                if mine.size(0) == 183:  # h and a past the last row are nobody's
                    rows = int((Case(61, 64, 40, 5, 3, routing="sentinels").ids("cpu") // 5 == 0).sum())
                    mine, there = mine[:rows], there[:rows]
                assert torch.equal(mine, there), f"result {i} differs"


# --- graphs ---------------------------------------------------------------------------------------


def capture(fn):
    """fn() recorded as a CUDA graph, after a warm-up on a side stream. Returns the graph and fn's result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()
    return graph, result


@FAST_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
def test_graph_of_the_experts(device, backward, score_on, dtype):
    """Plan, experts and their gradients recorded once: replayed on other numbers and on every routing."""
    case = Case(200, 64, 48, 8, 3, dtype, layout="halves", bias=True, score_on=score_on)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    fixed = {"score_on": score_on, **case.options}

    def run():
        if backward:
            return forward_backward(fused_experts, inputs, dout, ids=ids, **fixed)
        with torch.no_grad():
            return {"out": fused_experts(**inputs, ids=ids, **fixed)}

    graph, recorded = capture(run)
    for seed, routing in enumerate((*ROUTINGS, "random")):
        other = replace(case, routing=routing, seed=seed)
        for name, value in other.inputs(device).items():
            if value is not None:
                inputs[name].copy_(value)
        dout.copy_(other.dout(device))
        ids.copy_(other.ids(device))
        graph.replay()
        found = copies(recorded)
        assert_same_bits(found, run())


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_graph_of_the_layer(device, dtype):
    """A whole training step of FusedMoE, router and load counting included, for any choice of experts."""
    module = layer(device, dtype)
    x, dout = (torch.randn(150, 64, device=device).to(dtype) for _ in range(2))
    graph, recorded = capture(lambda: step(module, x, dout))
    for favourite in (None, 3, 7):
        x.copy_(torch.randn(150, 64, device=device))
        module.expert_bias.zero_()
        if favourite is not None:  # everybody's first choice
            module.expert_bias[favourite] = 100
        module.tokens_per_expert.zero_()
        graph.replay()
        found, counted = copies(recorded), module.tokens_per_expert.clone()
        module.tokens_per_expert.zero_()
        assert_same_bits(found, step(module, x, dout))
        assert torch.equal(counted, module.tokens_per_expert)
        assert favourite is None or counted[favourite] == 150


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))
def test_graph_of_grouped_mlp(device, dtype):
    """Counts of every integer dtype are read by the device alone: a graph follows them."""
    case = Case(dim=64, hidden=48, num_experts=4, dtype=BF16)
    inputs = {"x_rows": torch.randn(200, 64).to(device, BF16), **case.weights(device)}
    dout = torch.randn(200, 64).to(device, BF16)
    counts = torch.tensor([50, 0, 100, 50], dtype=dtype, device=device)
    graph, recorded = capture(lambda: forward_backward(grouped_mlp, inputs, dout, counts=counts))
    for other in ([50, 0, 100, 50], [0, 0, 0, 0], [0, 120, 0, 0], [1, 2, 3, 4], [100, 25, 50, 25]):
        counts.copy_(torch.tensor(other))
        graph.replay()
        found = copies(recorded)
        assert_same_bits(found, forward_backward(grouped_mlp, inputs, dout, counts=counts))
        assert not found["out"][sum(other) :].count_nonzero()


# --- the host does not wait, and takes no memory of its own ---------------------------------------


def everything(device):
    """A function that runs the layer, its losses and every public function once, forward and backward."""
    module = layer(device, BF16)
    x, dout = (torch.randn(300, 64).to(device, BF16) for _ in range(2))
    counts = torch.tensor([100, 0, 150, 20], device=device)
    case = Case(300, 64, 48, 4, 2, BF16)
    inputs, ids = case.inputs(device), case.ids(device)
    rows = {n: inputs[n] for n in ("w1", "w2", "w3")} | {"x_rows": x}
    ends = counts.cumsum(0).int()

    def moved(x, scores):
        rows, plan = fused_moe.permute(x, ids, 4)
        return fused_moe.unpermute(rows, plan, scores)

    def run() -> None:
        out, losses = module(x.requires_grad_(), return_losses=True)
        torch.autograd.grad((out * dout).sum() + sum(losses), [x, *module.parameters()])
        module.update_expert_bias()
        x.requires_grad_(False)
        forward_backward(fused_experts, inputs, dout, ids=ids)
        forward_backward(grouped_mlp, rows, dout, counts=counts)
        forward_backward(grouped_mm, {"a": x, "b": inputs["w2"].mT}, dout[:, :48], offsets=ends)
        forward_backward(moved, {"x": x, "scores": inputs["scores"]}, dout)

    return run


def test_nothing_synchronises(device):
    """PyTorch reports no synchronising call, and the host is through before the device has begun."""
    run = everything(device)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    started = torch.cuda.Event()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        started.record()
        run()
        waited = started.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert not waited, "the host waited for the device"


def test_all_memory_is_pytorchs(device):
    """What the device has free changes only as PyTorch's own reserve does, and no step keeps anything."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("other workers take memory of the same device")
    run = everything(device)
    for _ in range(3):
        run()
    torch.cuda.synchronize()

    def taken() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)

    before = taken()
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    assert taken() == before


# --- more than 2**31 numbers ----------------------------------------------------------------------


def needs_memory(device, gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free device memory, found {free / 2**30:.1f} GiB")


@pytest.fixture
def returned():
    """Gives the memory back to the device afterwards."""
    yield
    torch.cuda.empty_cache()


def test_large_products(device, returned):
    """grouped_mm and wgrad of rows x width beyond 2**31, as input and as output."""
    needs_memory(device, 24)
    width, counts = 32768, [30_000, 0, 40_001]
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    total = sum(counts)
    assert total * width > 2**31
    a = torch.randn(total, 64, device=device, dtype=BF16)
    b = torch.randn(3, width, 64, device=device, dtype=BF16) / 8
    dout = torch.randn(total, width, device=device, dtype=BF16) / 16
    found = forward_backward(grouped_mm, {"a": a, "b": b}, dout, offsets=ends)
    for row in (0, 29_999, 30_000, 65_535, 65_536, total - 1):
        weight = b[0 if row < 30_000 else 2].double()
        assert_near(found["out"][row], weight @ a[row].double())
        assert_near(found["da"][row], dout[row].double() @ weight)
    for column in (0, 4095, width - 1):
        for expert, rows in ((0, slice(0, 30_000)), (2, slice(30_000, total))):
            exact = dout[rows, column].double() @ a[rows].double()
            assert_near(found["db"][expert, column], exact)
    assert not found["db"][1].count_nonzero()


def test_large_hidden(device, returned):
    """h of more than 2**31 numbers: outputs and gradients of some tokens, and of the outermost columns."""
    needs_memory(device, 32)
    case = Case(20_001, 64, 16384, 4, 4, BF16)
    assert case.tokens * case.top_k * 2 * case.hidden > 2**31

    def draw(*shape):
        return torch.randn(shape, device=device, dtype=BF16)

    weights = {"w1": draw(4, 16384, 64) / 8, "w2": draw(4, 64, 16384) / 128, "w3": draw(4, 16384, 64) / 8}
    scores = torch.rand(20_001, 4, device=device)
    inputs = {"x": draw(20_001, 64), **weights, "scores": scores}
    ids, dout = case.ids(device), draw(20_001, 64)
    found = forward_backward(fused_experts, inputs, dout, ids=ids)
    some = torch.tensor([0, 1, 9_999, 16_384, 20_000], device=device)
    few = {n: (inputs[n][some] if n in ("x", "scores") else inputs[n]).double() for n in inputs}
    exact = forward_backward(reference.fused_experts, few, dout[some].double(), ids=ids[some])
    assert_near(found["out"][some], exact["out"])
    assert_near(found["dx"][some], exact["dx"])
    # a weight's row or column of the hidden width has the gradient that it has among few of them
    outer = torch.tensor([0, 1, 8191, 16_382, 16_383], device=device)
    narrow = {n: inputs[n].double() for n in ("x", "scores")}
    narrow |= {"w1": weights["w1"][:, outer].double(), "w3": weights["w3"][:, outer].double()}
    narrow |= {"w2": weights["w2"][:, :, outer].double()}
    exact = forward_backward(reference.fused_experts, narrow, dout.double(), ids=ids)
    assert_near(found["dw1"][:, outer], exact["dw1"])
    assert_near(found["dw3"][:, outer], exact["dw3"])
    assert_near(found["dw2"][:, :, outer], exact["dw2"])


def test_large_weights(device, returned):
    """Weights, and gradients, of more than 2**31 numbers: the first and the last experts."""
    needs_memory(device, 40)
    experts, dim, hidden = 128, 4224, 4096
    assert experts * dim * hidden > 2**31

    def draw(*shape):
        return torch.randn(shape, device=device, dtype=BF16)

    w1, w2 = draw(experts, hidden, dim), draw(experts, dim, hidden)
    w1.mul_(dim**-0.5)
    w2.mul_(hidden**-0.5)
    x, dout, scores = draw(300, dim), draw(300, dim), torch.rand(300, 2, device=device)
    ids = make_ids("random", 300, 2, experts).to(device)
    ids[:40] = torch.tensor([0, experts - 1], device=device)
    ids[40:] = torch.where(ids[40:] == 64, -1, ids[40:])  # an empty expert
    inputs = {"x": x, "w1": w1, "w2": w2, "scores": scores}
    found = forward_backward(fused_experts, inputs, dout, w3=None, ids=ids)
    assert not found["dw1"][64].count_nonzero() and not found["dw2"][64].count_nonzero()
    ends = torch.tensor([0, experts - 1], device=device)
    few = {"x": x.double(), "w1": w1[ends].double(), "w2": w2[ends].double(), "scores": scores.double()}
    few_ids = torch.where(ids == 0, 0, torch.where(ids == experts - 1, 1, -1))
    exact = forward_backward(reference.fused_experts, few, dout.double(), w3=None, ids=few_ids)
    assert_near(found["out"][:40], exact["out"][:40])
    assert_near(found["dx"][:40], exact["dx"][:40])
    assert_near(found["dw1"][ends], exact["dw1"])
    assert_near(found["dw2"][ends], exact["dw2"])


# --- what the caller may get wrong ----------------------------------------------------------------


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", OPERATORS)
def test_garbage_in_the_maps(device, name):
    """Any numbers in ids, counts, offsets, maps and tiles: no access leaves the tensors, the device lives."""
    case = Case(61, 24, 16, 5, 3, BF16, bias=True)
    for args in operator_calls(case, device)[name]:
        expected = [r.clone() for r in call_operator(name, args)]
        for low, high in ((-(2**31), 2**31), (-3, 400), (0, 61)):
            wrong = list(args)
            for i, value in enumerate(args):
                if torch.is_tensor(value) and value.dtype == torch.int32:
                    wrong[i] = torch.randint(low, high, value.shape, dtype=torch.int32).to(device)
            call_operator(name, wrong)
            torch.cuda.synchronize()
        for mine, other in zip(call_operator(name, args), expected, strict=True):
            assert torch.equal(mine, other), "a call after it gives other numbers"


@pytest.mark.parametrize("counts", ([5, -1, 3], [2**31 - 1, 1, 1], [2**40, -(2**40), 3], [70, 0, 1]))
def test_wrong_counts_stay_inside(device, counts):
    """Counts that are negative or beyond the rows, unread by the host: no access leaves the rows."""
    case = Case(dim=64, hidden=48, num_experts=3, dtype=BF16)
    inputs = {"x_rows": torch.randn(70, 64).to(device, BF16), **case.weights(device)}
    dout = torch.randn(70, 64).to(device, BF16)
    found = forward_backward(grouped_mlp, inputs, dout, counts=torch.tensor(counts, device=device))
    torch.cuda.synchronize()
    assert all(value.isfinite().all() for value in found.values())


def test_maps_on_the_cpu_are_refused(device):
    """The dispatcher takes tensors of two devices; the operator does not."""
    x = torch.randn(6, 8, device=device)
    plan = fused_moe.route_plan(torch.zeros(6, 2, dtype=torch.int32), 3)
    with pytest.raises(RuntimeError, match="fused_moe::permute: expected .* on the device"):
        torch.ops.fused_moe.permute(x, *plan[1:5])


# --- tiers ----------------------------------------------------------------------------------------

LAYER_STEP = """
import torch, fused_moe
layer = fused_moe.FusedMoE(64, 32, 4, 2, device="cuda", dtype=torch.bfloat16)
x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
layer(x).float().square().sum().backward()
assert x.grad.isfinite().all()
print("a step was made")
"""


def run_with_tier(tier: str) -> subprocess.CompletedProcess:
    folder = str(Path(fused_moe.__file__).parents[1])
    env = os.environ | {"FUSED_MOE_TIER": tier, "PYTHONPATH": folder}
    return subprocess.run([sys.executable, "-c", LAYER_STEP], capture_output=True, text=True, env=env)


def test_info_tells_that_cuda_is_on(device):
    """The report names the tier, and the GPU."""
    info = fused_moe.info()
    assert info["tiers"]["cuda"].startswith("on")
    assert torch.cuda.get_device_name(device) in str(info)


@pytest.mark.parametrize("tier", ("portable", "auto"))
def test_a_tier_by_name(device, tier):
    """FUSED_MOE_TIER takes these on every GPU."""
    run = run_with_tier(tier)
    assert run.returncode == 0 and "a step was made" in run.stdout, run.stderr


def test_an_unknown_tier_is_named(device):
    """A RuntimeError that tells what may stand there."""
    run = run_with_tier("nonsense")
    assert run.returncode != 0 and "RuntimeError" in run.stderr, run.stderr
    message = run.stderr[run.stderr.rindex("RuntimeError") :]
    for tier in ("portable", "hopper", "auto"):
        assert re.search(rf"\b{tier}\b", message), message


# --- compiled, mixed ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_under_autocast(device, mode):
    """torch.compile(fullgraph=True) of an autocast training step, with CUDA graphs of its own too."""
    torch._dynamo.reset()
    module = layer(device).eval()  # no counting: a graph that changes a buffer is not recorded

    def run(x):
        with torch.autocast("cuda", BF16):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for _ in range(4):
        x, dout = torch.randn(130, 64, device=device), torch.randn(130, 64, device=device).to(BF16)
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for fn in (run, compiled):
            leaf = x.clone().requires_grad_()
            out = fn(leaf)
            grads = torch.autograd.grad(out, [leaf, *module.parameters()], dout)
            results.append([t.double().clone() for t in (out.detach(), *grads)])
        for mine, other in zip(*results, strict=True):
            assert (mine - other).norm() <= 0.02 * other.norm()
    torch._dynamo.reset()


# --- for compute-sanitizer ------------------------------------------------------------------------


@pytest.mark.sanitizer
@FAST_DTYPES
@pytest.mark.parametrize("layout", ("separate", "interleaved.T", "ungated"))
@pytest.mark.parametrize("size", ((40, 24, 16), (61, 37, 29), (150, 64, 72)), ids=("small", "odd", "tiles"))
def test_every_operator_once(device, size, layout, dtype):
    """Every kernel on tiny shapes, sentinels among the ids. tests/gpu/run.sh runs it under the sanitizer."""
    tokens, dim, hidden = size
    case = Case(tokens, dim, hidden, 3, 2, dtype, "sentinels", layout, bias=True)
    for name, calls in operator_calls(case, device).items():
        for args in calls:
            for result in call_operator(name, args):
                assert result.device.type == "cuda", name
    torch.cuda.synchronize()
