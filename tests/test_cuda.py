"""What only a GPU shows: graphs, streams, synchronisation, a second device, 2**31 numbers, wrong maps."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import (
    ACTIVATIONS,
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
    swapped,
    variants,
)

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, reference
from fused_moe import ops as codes
from fused_moe.info import REASONS, TIER_OPS

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


def test_the_hopper_tier_by_name(device):
    """FUSED_MOE_TIER=hopper is for compute capability 9.0, and a RuntimeError elsewhere."""
    run = run_with_tier("hopper")
    if torch.cuda.get_device_capability(device) == (9, 0):
        assert run.returncode == 0 and "a step was made" in run.stdout, run.stderr
    else:
        assert run.returncode != 0 and "RuntimeError" in run.stderr, run.stderr


def test_an_unknown_tier_is_named(device):
    """A RuntimeError that tells what may stand there."""
    run = run_with_tier("nonsense")
    assert run.returncode != 0 and "RuntimeError" in run.stderr, run.stderr
    message = run.stderr[run.stderr.rindex("RuntimeError") :]
    for tier in ("portable", "hopper", "auto"):
        assert re.search(rf"\b{tier}\b", message), message


# --- the Hopper engine ----------------------------------------------------------------------------

ops = torch.ops.fused_moe
HALF_DTYPES = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
# Rows of an expert about every height that a tile, a warpgroup's part of it or a switch of kinds may have.
BOUNDARIES = (
    193, 0, 1, 64, 7, 257, 8, 63, 0, 65, 127, 16, 128,
    255, 9, 129, 191, 192, 17, 256, 0, 383, 32, 385, 15, 384,
)  # fmt: skip
COUNTS = {
    "boundaries": BOUNDARIES,
    "one row each": (1,) * 300,
    "all rows to one": (0,) * 5 + (1500,) + (0,) * 3,
    "1024 experts": tuple(i * 7919 % 11 for i in range(1024)),
    "one busy among 1024": (0,) * 700 + (200,) + (0,) * 323,
    "no rows": (0,) * 16,
}
SCHEDULES = [
    f"order={order},experts={experts},tails={tails}"
    for order in ("linear", "grouped", "column")
    for experts in ("interleaved", "in-turn")
    for tails in ("on", "off")
]


@pytest.fixture
def hopper(device):
    """Where the Hopper engine has the calls."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {major}.{minor}")
    if os.environ.get("FUSED_MOE_TIER") == "portable":
        pytest.skip("FUSED_MOE_TIER=portable")


@contextmanager
def poisoned():
    """Fresh memory, outputs and workspaces, holds NaN or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw_rows(counts, width, dtype, device, spare=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for all experts, NaN in `spare` more, and the ends."""
    rows = torch.randn(sum(counts) + spare, width).to(device, dtype)
    rows[sum(counts) :] = torch.nan
    return rows, torch.tensor(counts).cumsum(0).int().to(device)


def draw_weights(num_experts, width_out, width_in, dtype, device) -> torch.Tensor:
    return (torch.randn(num_experts, width_out, width_in) / width_in**0.5).to(device, dtype)


def ids_of(counts, device) -> torch.Tensor:
    """Two experts a token, in any order, that add up to these counts; -1 where one is left over."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, ids.new_full((2 + len(ids) % 2,), -1)])
    return ids[torch.randperm(len(ids))].view(-1, 2).int().to(device)


def check_everywhere(found: torch.Tensor, exact: torch.Tensor) -> None:
    """In norm, and number by number, so that one wrong number among thousands of rows shows."""
    assert_near(found, exact)
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=eps, atol=1e-4)


def check_product(a, b, ends) -> torch.Tensor:
    """grouped_mm of operands as they are stored, on poisoned memory."""
    with poisoned():
        out = ops.grouped_mm(a, b, ends)
    num_rows = int(ends[-1])
    check_everywhere(out[:num_rows], reference.grouped_mm(a[:num_rows].double(), b.double(), offsets=ends))
    assert not out[num_rows:].count_nonzero()
    return out


def up_arguments(case: Case, device) -> tuple[tuple, tuple]:
    """(w1, w3, b1, b3) as the operator takes them, and (layout, activation, alpha, limit)."""
    layout, gated, pairs, transposed = LAYOUTS[case.layout]
    w = case.weights(device)
    w1, w3 = (t if t is None or not transposed else t.mT for t in (w["w1"], w["w3"]))
    w1 = w1.flatten(1, 2) if pairs else w1
    code = codes.LAYOUTS[layout] if gated else codes.UNGATED
    return (w1, w3, w["b1"], w["b3"]), (code, codes.ACTIVATION_CODES[case.activation], 1.702, case.limit)


def both_parts(first, second, dim: int = 1):
    """w1 and w3, or their biases, in one tensor of float64."""
    parts = [t.double() for t in (first, second) if t is not None]
    return torch.cat(parts, dim) if parts else None


def activated(case: Case, h: torch.Tensor) -> torch.Tensor:
    """a of h, whose columns lie as the layout says."""
    name, gated, *_ = LAYOUTS[case.layout]
    if not gated:
        gate, other = h, None
    elif name == "interleaved":
        gate, other = h[:, 0::2], h[:, 1::2]
    else:
        gate, other = h.chunk(2, 1)
    return reference.activate(gate, other, activation=case.activation, alpha=1.702, limit=case.limit)


def exact_up_gate(case: Case, rows, up, ends) -> tuple[torch.Tensor, torch.Tensor]:
    """h and a of gathered rows, in float64."""
    w1, w3, b1, b3 = up
    h = reference.grouped_mm(rows.double(), both_parts(w1, w3), offsets=ends)
    if case.bias:
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        h = h + both_parts(b1, b3).repeat_interleave(counts, 0)
    return h, activated(case, h)


def check_up_gate(case: Case, counts, device) -> None:
    """up_gate of tokens gathered from any place, and of rows as they lie with NaN behind them."""
    up, settings = up_arguments(case, device)
    ids = ids_of(counts, device)
    plan = fused_moe.route_plan(ids, len(counts))
    num_rows, ends = sum(counts), plan.offsets[1:]
    x = torch.randn(ids.size(0), case.dim).to(device, case.dtype)
    rows, _ = draw_rows(counts, case.dim, case.dtype, device, spare=200)
    token = plan.row_token[:num_rows].long()
    no_maps = (plan.offsets, None, None, None, ops.count_plan(plan.counts, rows.size(0))[2])
    for source, maps, gathered in ((x, plan[1:], x[token]), (rows, no_maps, rows[:num_rows])):
        with poisoned():
            h, a = ops.up_gate(source, *up, *maps, *settings)
        exact_h, exact_a = exact_up_gate(case, gathered, up, ends)
        check_everywhere(h[:num_rows], exact_h)
        check_everywhere(a[:num_rows], exact_a)
        with poisoned():  # in inference h is not kept
            _, alone = ops.experts_up(source, *up, None, *maps, *settings, False)
        assert torch.equal(alone[:num_rows], a[:num_rows])


def calls_during(name: str, run) -> tuple[int, int, str]:
    """How many calls of an operator the Hopper engine and the portable tier had, and the last reason."""
    before = ops.cuda_calls(TIER_OPS.index(name))
    run()
    after = ops.cuda_calls(TIER_OPS.index(name))
    return after[0] - before[0], after[1] - before[1], [*REASONS][after[2]]


@HALF_DTYPES
@pytest.mark.parametrize("tier", (None, "auto", "hopper"))
def test_the_engine_has_every_call_of_a_layer(device, hopper, monkeypatch, tier, dtype):
    """Forward and backward, all layouts: up_gate once, grouped_mm down and for the gradient of the rows,
    down_dgrad once, wgrad for either side."""
    if tier is None:
        monkeypatch.delenv("FUSED_MOE_TIER", raising=False)
    else:
        monkeypatch.setenv("FUSED_MOE_TIER", tier)
    for layout in LAYOUTS:
        case = Case(100, 72, 136, 4, 2, dtype, layout=layout, bias=True)
        inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)

        def run(case=case, inputs=inputs, dout=dout, ids=ids):
            forward_backward(fused_experts, inputs, dout, ids=ids, **case.options)

        for name, calls in {"up_gate": 1, "grouped_mm": 2, "down_dgrad": 1, "wgrad": 2}.items():
            assert calls_during(name, run)[:2] == (calls, 0), f"{layout}: {name}"
    assert re.match(r"[1-9]\d* on hopper", fused_moe.info()["calls"]["up_gate"])
    assert fused_moe.info()["tiers"]["hopper"].startswith("on")


PORTABLE_PRODUCTS = {  # (k, n, dtype, form of a, form of b) -> why
    "float32": (72, 136, F32, "contiguous", "contiguous", "OTHER_DTYPE"),
    "float64": (72, 136, F64, "contiguous", "contiguous", "OTHER_DTYPE"),
    "depth": (68, 136, BF16, "contiguous", "contiguous", "WIDTH"),
    "columns": (72, 132, F16, "contiguous", "contiguous", "WIDTH"),
    "rows off 16 bytes": (72, 136, BF16, "misaligned", "contiguous", "UNALIGNED"),
    "weights off 16 bytes": (72, 136, F16, "contiguous", "misaligned", "STRIDES"),
    "weights nowhere dense": (72, 136, BF16, "contiguous", "strided", "STRIDES"),
}


@pytest.mark.parametrize("name", PORTABLE_PRODUCTS)
def test_why_the_portable_tier_has_a_product(device, hopper, name):
    """What the engine cannot read goes to the portable tier, which says why; the result is right."""
    k, n, dtype, a_form, b_form, why = PORTABLE_PRODUCTS[name]
    a, ends = draw_rows((5, 0, 130), k, dtype, device)
    a, b = FORMS[a_form](a), FORMS[b_form](draw_weights(3, n, k, dtype, device))
    assert calls_during("grouped_mm", lambda: ops.grouped_mm(a, b, ends)) == (0, 1, why)
    assert_near(ops.grouped_mm(a, b, ends), reference.grouped_mm(a.double(), b.double(), offsets=ends))
    assert REASONS[why] in fused_moe.info()["calls"]["grouped_mm"]


@pytest.mark.parametrize("width", (72, 76))
def test_weights_in_wider_ones(device, hopper, width):
    """Views of 64 columns: the pitch and the first number's address decide who has them."""
    a, ends = draw_rows((5, 0, 130), 64, BF16, device)
    b = draw_weights(3, 136, width, BF16, device)
    for first in (0, 4, 8):
        some = b[..., first : first + 64]
        served = (1, 0) if width % 8 == first % 8 == 0 else (0, 1)
        assert calls_during("grouped_mm", lambda some=some: ops.grouped_mm(a, some, ends))[:2] == served
        check_product(a, some, ends)


def test_weights_with_experts_innermost(device, hopper):
    """Rows of all experts lie side by side: an expert's stride is smaller than that of its lines."""
    a, ends = draw_rows((5, 0, 130, 70), 72, BF16, device)
    for shape, order in (((136, 4, 72), (1, 0, 2)), ((72, 4, 136), (1, 2, 0))):
        b = torch.randn(shape).to(device, BF16).permute(order)
        assert b.shape == (4, 136, 72) and b.stride(0) < max(b.stride())
        assert calls_during("grouped_mm", lambda b=b: ops.grouped_mm(a, b, ends))[:2] == (1, 0)
        check_product(a, b, ends)


PORTABLE_UP_GATES = {  # (D, F, dtype, form of x, form of w1, layout) -> why
    "float32": (72, 136, F32, "contiguous", "contiguous", "separate", "OTHER_DTYPE"),
    "depth": (68, 136, BF16, "contiguous", "contiguous", "separate", "WIDTH"),
    "columns": (72, 132, F16, "contiguous", "contiguous", "halves", "WIDTH"),
    "rows off 16 bytes": (72, 136, BF16, "misaligned", "contiguous", "interleaved", "UNALIGNED"),
    "weights off 16 bytes": (72, 136, F16, "contiguous", "misaligned", "ungated", "STRIDES"),
    "weights nowhere dense": (72, 136, BF16, "contiguous", "strided", "separate", "STRIDES"),
    "w1 and w3 differ": (72, 136, BF16, "contiguous", "swapped", "separate", "STRIDES"),
}


@pytest.mark.parametrize("name", PORTABLE_UP_GATES)
def test_why_the_portable_tier_has_an_up_gate(device, hopper, name):
    """As for grouped_mm."""
    dim, hidden, dtype, x_form, w_form, layout, why = PORTABLE_UP_GATES[name]
    case = Case(100, dim, hidden, 4, 2, dtype, layout=layout)
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["x"], inputs["w1"] = FORMS[x_form](inputs["x"]), FORMS[w_form](inputs["w1"])
    with torch.no_grad():
        found = calls_during("up_gate", lambda: fused_experts(**inputs, ids=ids, **case.options))
        out = fused_experts(**inputs, ids=ids, **case.options)
        exact = reference.fused_experts(
            **{n: t if t is None else t.double() for n, t in inputs.items()}, ids=ids, **case.options
        )
    assert found == (0, 1, why)
    assert_near(out, exact, 8)


def test_scored_inputs_and_no_rows_are_the_portable_tiers(device, hopper):
    """score_on="input" multiplies x before the product; without rows there is nothing to launch for."""
    case = Case(100, 72, 136, 4, 2, BF16)
    inputs, ids = case.inputs(device), case.ids(device)
    with torch.no_grad():
        scored = calls_during("up_gate", lambda: fused_experts(**inputs, ids=ids, score_on="input"))
    assert scored == (0, 1, "SCORED_INPUT")
    a, b = torch.empty(0, 72, device=device, dtype=BF16), draw_weights(3, 136, 72, BF16, device)
    ends = torch.zeros(3, device=device, dtype=torch.int32)
    assert calls_during("grouped_mm", lambda: ops.grouped_mm(a, b, ends)) == (0, 1, "NO_ROWS")


def test_the_portable_tier_by_name(device, hopper, monkeypatch):
    """FUSED_MOE_TIER=portable is read at every call, and gives results as good."""
    a, ends = draw_rows((5, 0, 130), 72, BF16, device)
    b = draw_weights(3, 136, 72, BF16, device)
    ours = check_product(a, b, ends)
    monkeypatch.setenv("FUSED_MOE_TIER", "portable")
    assert calls_during("grouped_mm", lambda: ops.grouped_mm(a, b, ends)) == (0, 1, "PORTABLE_ASKED")
    assert_near(check_product(a, b, ends), ours.double())
    assert fused_moe.info()["tiers"]["hopper"] == "off: FUSED_MOE_TIER=portable"
    monkeypatch.setenv("FUSED_MOE_TIER", "hopper")
    assert calls_during("grouped_mm", lambda: ops.grouped_mm(a, b, ends))[:2] == (1, 0)


@HALF_DTYPES
@pytest.mark.parametrize("n", (8, 136, 264, 520))
@pytest.mark.parametrize("k", (8, 72, 200, 328))
def test_products_at_every_boundary(device, hopper, k, n, dtype):
    """Row counts about all tile heights, tails of k and of columns, weights dense either way."""
    a, ends = draw_rows(BOUNDARIES, k, dtype, device, spare=200)
    b = draw_weights(len(BOUNDARIES), n, k, dtype, device)
    for weights in (b, swapped(b)):
        check_product(a, weights, ends)


@HALF_DTYPES
@pytest.mark.parametrize("n", (512, 640))
@pytest.mark.parametrize("k", (8, 136, 256, 328))
def test_products_of_many_turns(device, hopper, k, n, dtype):
    """A CTA's tiles, each stored under the next if that has steps enough; few rows and halves, too."""
    counts = (49_000, 3, 0, 64, 129, 3000)
    a, ends = draw_rows(counts, k, dtype, device, spare=70)
    b = draw_weights(len(counts), n, k, dtype, device)
    for weights in (b, swapped(b)):
        check_product(a, weights, ends)
    two = [draw_weights(len(counts), k, n, dtype, device) for _ in range(2)]  # up_dgrad's w1 and w3
    dh = torch.cat((a, a.flip(1)), 1) / 2**0.5
    with poisoned():
        dx = ops.up_dgrad(dh, *two, F.pad(ends, (1, 0)), codes.LAYOUTS["separate"])
    num_rows = sum(counts)
    exact = reference.grouped_mm(dh[:num_rows].double(), torch.cat(two, 1).double().mT, offsets=ends)
    check_everywhere(dx[:num_rows], exact)


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ((8, 520), (72, 136), (200, 8), (328, 264)))
def test_up_gate_at_every_boundary(device, hopper, size, layout, dtype):
    """Both ways to read rows, every layout stored either way round, with biases."""
    case = Case(
        dim=size[0], hidden=size[1], num_experts=len(BOUNDARIES), dtype=dtype, layout=layout, bias=True
    )
    check_up_gate(case, BOUNDARIES, device)


@HALF_DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_up_gate_of_every_activation(device, hopper, bias, layout, activation, dtype):
    """Each with and without biases, on columns that fill a tile and a part of the next."""
    case = Case(
        dim=136, hidden=200, num_experts=5, dtype=dtype, layout=layout, activation=activation, bias=bias
    )
    check_up_gate(case, (130, 0, 64, 1, 257), device)


@HALF_DTYPES
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pairs"])
@pytest.mark.parametrize("size", ((72, 136), (264, 200)))
def test_two_parts_at_every_boundary(device, hopper, size, layout, dtype):
    """up_dgrad: dgate w1 + dup w3 in one accumulator, where a part's depth ends inside a step."""
    dim, hidden = size
    case = Case(dim=dim, hidden=hidden, num_experts=len(BOUNDARIES), dtype=dtype, layout=layout)
    (w1, w3, _, _), (code, *_) = up_arguments(case, device)
    w13 = both_parts(w1, w3)
    dh, ends = draw_rows(BOUNDARIES, w13.size(1), dtype, device, spare=70)
    dh = dh / (w13.size(1) / dim) ** 0.5  # so that dx is of order one
    num_rows = sum(BOUNDARIES)
    with poisoned():
        dx = ops.up_dgrad(dh, w1, w3, F.pad(ends, (1, 0)), code)
    check_everywhere(dx[:num_rows], reference.grouped_mm(dh[:num_rows].double(), w13.mT, offsets=ends))
    assert not dx[num_rows:].count_nonzero()


@HALF_DTYPES
@pytest.mark.parametrize("name", [name for name in COUNTS if name != "boundaries"])
def test_any_number_of_experts(device, hopper, name, dtype):
    """One row each, all rows to one, 1024 experts, all but one of them empty, no rows at all."""
    counts = COUNTS[name]
    a, ends = draw_rows(counts, 72, dtype, device, spare=50)
    b = draw_weights(len(counts), 136, 72, dtype, device)
    for weights in (b, swapped(b)):
        check_product(a, weights, ends)
    check_up_gate(Case(dim=72, hidden=136, num_experts=len(counts), dtype=dtype, bias=True), counts, device)


@HALF_DTYPES
@pytest.mark.parametrize("layout", ("separate", "halves", "interleaved.T", "ungated"))
def test_garbage_past_the_last_row(device, hopper, layout, dtype):
    """grouped_mlp with NaN in rows that are no expert's: the same bits, exact zeros there."""
    counts, spare = (5, 0, 193, 64, 1), 321
    case = Case(dim=72, hidden=136, num_experts=5, dtype=dtype, layout=layout, bias=True)
    x, _ = draw_rows(counts, 72, dtype, device, spare)
    dout, _ = draw_rows(counts, 72, dtype, device, spare)
    weights, on_device = case.weights(device), torch.tensor(counts, device=device)
    runs = []
    for x_rows, d in ((x.nan_to_num(), dout.nan_to_num()), (x, dout)):
        inputs = {"x_rows": x_rows, **weights}
        with poisoned():
            runs.append(forward_backward(grouped_mlp, inputs, d, counts=on_device, **case.options))
    assert_same_bits(*runs)
    for name in ("out", "dx_rows"):
        assert runs[1][name].isfinite().all()
        assert not runs[1][name][sum(counts) :].count_nonzero()


@HALF_DTYPES
def test_nan_stays_where_it_is(device, hopper, dtype):
    """A token's NaN reaches that token, an expert's NaN its own tokens, and nobody else a bit."""
    case = Case(500, 136, 200, 6, 2, dtype, bias=True)
    inputs, ids = case.inputs(device), case.ids(device)
    with torch.no_grad():
        expected = fused_experts(**inputs, ids=ids)
        for name, index, reached in (
            ("x", 77, torch.arange(500, device=device) == 77),
            ("w1", 3, (ids == 3).any(1)),
            ("w2", 4, (ids == 4).any(1)),
            ("b3", 0, (ids == 0).any(1)),
        ):
            wrong = inputs | {name: inputs[name].clone()}
            wrong[name][index] = torch.nan
            out = fused_experts(**wrong, ids=ids)
            assert torch.equal(out[~reached], expected[~reached]), name
            assert out[reached].isnan().all(), name


@HALF_DTYPES
@pytest.mark.parametrize("size", ((72, 136), (200, 8), (8, 264)))
def test_garbage_around_the_weights(device, hopper, size, dtype):
    """Weights cut out of wider ones that hold NaN: neither a tail of k nor one of columns reads it."""
    k, n = size
    a, ends = draw_rows((5, 0, 193, 64, 1), k, dtype, device, spare=70)
    b = draw_weights(5, n, k, dtype, device)
    for along_k in (True, False):
        lines = b if along_k else b.mT
        wide = lines.new_full((5, lines.size(1) + 16, lines.size(2) + 24), torch.nan)
        inner = wide[:, 8:-8, 8:-16]
        inner.copy_(lines)
        weights = inner if along_k else inner.mT
        assert calls_during("grouped_mm", lambda w=weights: ops.grouped_mm(a, w, ends))[:2] == (1, 0)
        check_product(a, weights, ends)


def busy_calls(dtype, device):
    """A function that calls every product on a skewed routing, with more tiles than the GPU has SMs."""
    tokens, top_k, experts, dim, hidden = 4096, 4, 32, 400, 520
    case = Case(dim=dim, hidden=hidden, num_experts=experts, dtype=dtype, bias=True)
    up, settings = up_arguments(case, device)
    w2 = draw_weights(experts, dim, hidden, dtype, device)
    x = torch.randn(tokens, dim).to(device, dtype)
    scores = torch.rand(tokens, top_k, device=device)
    ids = (torch.rand(tokens, top_k) ** 3 * experts).int().to(device)

    def run() -> dict:
        plan = fused_moe.route_plan(ids, experts)
        ends = plan.offsets[1:].contiguous()
        h, a = ops.up_gate(x, *up, *plan[1:], *settings)
        dh, a_scaled, dscores = ops.down_dgrad(x, w2, None, h, scores, *plan[1:], *settings)
        return {
            "h": h,
            "a": a,
            "out": ops.grouped_mm(a, w2, ends),
            "dh": dh,
            "a_scaled": a_scaled,
            "dscores": dscores,
            "dw1": ops.wgrad(dh, x, ends, None, plan.row_token),
            "dw2": ops.wgrad(x, a_scaled, ends, plan.row_token, None),
        }

    return run, ids


@HALF_DTYPES
def test_same_bits_in_every_run(device, hopper, dtype):
    """Twenty runs: whichever SM draws a tile, it has the same numbers."""
    run, _ = busy_calls(dtype, device)
    first = run()
    for _ in range(20):
        assert_same_bits(first, run())


@HALF_DTYPES
def test_same_bits_in_every_schedule(device, hopper, monkeypatch, dtype):
    """An order says when a tile is computed, not what is in it."""
    run, ids = busy_calls(dtype, device)
    ids[:, 0] = torch.arange(len(ids), device=device) % 32  # experts with few rows beside busy ones
    ids[64:, :][ids[64:, :] > 24] = 0
    monkeypatch.delenv("FUSED_MOE_SCHEDULE", raising=False)
    first = run()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FUSED_MOE_SCHEDULE", schedule)
        assert_same_bits(first, run())


@HALF_DTYPES
def test_graph_of_the_engine(device, hopper, dtype):
    """Recorded once, replayed on other routings: what depends on them is made on the device."""
    run, ids = busy_calls(dtype, device)
    graph, recorded = capture(run)
    num_experts = 32
    for other in (
        torch.randint(num_experts, ids.shape),
        torch.full(ids.shape, 31),
        torch.where(torch.rand(ids.shape) < 0.01, 7, -1),
        torch.full(ids.shape, -1),
        torch.arange(ids.numel()).view(ids.shape) % num_experts,
    ):
        ids.copy_(other)
        graph.replay()
        found = copies(recorded)
        num_rows = int((other >= 0).sum())
        expected = run()
        rows = {"h", "a", "out", "dh", "a_scaled"}
        assert_same_bits(
            *({n: t[:num_rows] if n in rows else t for n, t in r.items()} for r in (found, expected))
        )
        assert not found["out"][num_rows:].count_nonzero()


def test_two_streams_of_the_engine(device, hopper):
    """Two calls at once, each with more tiles than there are SMs, have workspaces of their own. A CTA that
    waits for an SM comes when others have taken its turns: in 3 of 100 runs an item was once lost then."""
    runs = [busy_calls(dtype, device)[0] for dtype in (BF16, F16)]
    alone = [run() for run in runs]
    streams = [torch.cuda.Stream(device) for _ in runs]
    torch.cuda.synchronize()
    for _ in range(300):
        together = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(300_000)
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                together.append(run())
        torch.cuda.synchronize()
        for found, expected in zip(together, alone, strict=True):
            assert_same_bits(found, expected)


def test_large_gather(device, hopper, returned):
    """x of more than 2**31 numbers, read through row_token. test_large_products and _hidden have the rest."""
    needs_memory(device, 12)
    tokens, dim = 70_001, 32768
    assert tokens * dim > 2**31
    x = torch.randn(tokens, dim, device=device, dtype=BF16)
    w1, w3 = (torch.randn(2, 8, dim, device=device, dtype=BF16) / dim**0.5 for _ in range(2))
    ids = (torch.arange(tokens, device=device, dtype=torch.int32) % 2)[:, None]
    plan = fused_moe.route_plan(ids, 2)
    h, _ = ops.up_gate(x, w1, w3, None, None, *plan[1:], 0, 0, 0.0, 0.0)
    for token in (0, 1, 65_535, 65_536, tokens - 2, tokens - 1):
        expert = token % 2
        exact = torch.cat([w1[expert], w3[expert]]).double() @ x[token].double()
        assert_near(h[plan.token_row[token, 0]], exact)


@pytest.mark.sanitizer
@HALF_DTYPES
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
def test_the_engine_on_few_tiles(device, hopper, layout, dtype):
    """Part tiles, part steps and every way to read a weight, for the sanitizer."""
    counts = (0, 1, 64, 65, 0, 129, 193)
    case = Case(dim=72, hidden=264, num_experts=len(counts), dtype=dtype, layout=layout, bias=True)
    up, settings = up_arguments(case, device)
    plan = fused_moe.route_plan(ids_of(counts, device), len(counts))
    ends = plan.offsets[1:].contiguous()
    x = torch.randn(plan.token_row.size(0), 72).to(device, dtype)
    w2 = draw_weights(len(counts), 72, 264, dtype, device)
    h, a = ops.up_gate(x, *up, *plan[1:], *settings)
    rows = ops.grouped_mm(a, w2, ends)
    da = ops.grouped_mm(rows, w2.mT, ends)
    dx = ops.up_dgrad(h, up[0], up[1], plan.offsets, settings[0])
    scores = torch.rand(plan.token_row.shape, device=device)
    dh, a_scaled, dscores = ops.down_dgrad(x, w2, None, h, scores, *plan[1:], *settings)
    dw1 = ops.wgrad(dh, x, ends, None, plan.row_token)
    dw2 = ops.wgrad(x, a_scaled, ends, plan.row_token, None)
    for sum_of in (torch.zeros_like(dw1, dtype=F32), swapped(torch.zeros_like(dw1, dtype=F32))):
        ops.wgrad_accumulate(dh, x, ends, sum_of, None, plan.row_token)
        assert_near(sum_of.to(dtype), dw1.double())
    torch.cuda.synchronize()
    num_rows = sum(counts)
    for value in (h, a, rows, da, dx, dh, a_scaled):
        assert value[:num_rows].isfinite().all()
    for value in (dscores, dw1, dw2):
        assert value.isfinite().all()


@pytest.mark.sanitizer
def test_cut_sums_under_the_sanitizer(device, hopper):
    """An expert whose sums are cut, in both kinds of results."""
    for arguments, ready in wgrad_cases((1100, 0, 3), (264, 136), BF16, device):
        check_everywhere(ops.wgrad(*arguments), exact_wgrad(*ready, arguments[2]))
        dw = torch.zeros(3, 264, 136, device=device)
        ops.wgrad_accumulate(*arguments[:3], dw, *arguments[3:])
        check_everywhere(dw.to(BF16), exact_wgrad(*ready, arguments[2]))


# --- the Hopper engine, backward -------------------------------------------------------------------


def exact_wgrad(a, b, ends) -> torch.Tensor:
    """(E, M, N) of rows that lie ready, in float64."""
    first = [0, *ends[:-1].tolist()]
    return torch.stack(
        [a[i:j].double().T @ b[i:j].double() for i, j in zip(first, ends.tolist(), strict=True)]
    )


def wgrad_cases(counts, widths, dtype, device):
    """(arguments of ops.wgrad, the same rows ready): either side gathered, or none, NaN past the last row."""
    num_rows, tokens = sum(counts), 500
    (a, ends), (b, _) = (draw_rows(counts, width, dtype, device, spare=70) for width in widths)
    row_token = torch.randint(tokens, (num_rows + 70,), dtype=torch.int32).to(device)
    row_token[num_rows:] = -1
    x = [torch.randn(tokens, width).to(device, dtype) for width in widths]
    ready = [t[row_token[:num_rows].long()] for t in x]
    yield (a, b, ends, None, None), (a[:num_rows], b[:num_rows])
    yield (a, x[1], ends, None, row_token), (a[:num_rows], ready[1])
    yield (x[0], b, ends, row_token, None), (ready[0], b[:num_rows])


@HALF_DTYPES
@pytest.mark.parametrize("hidden", (64, 72, 192, 200, 320))
def test_tiles_of_the_gradients_of_gate_and_up(device, hopper, hidden, dtype):
    """Their lines are counted in one row: a tile may have some of both. Or one of the two is not wanted."""
    dim, experts = 136, len(BOUNDARIES)
    ids = ids_of(BOUNDARIES, device)
    gathered = fused_moe.route_plan(ids, experts)
    counts = torch.tensor(BOUNDARIES, device=device)
    tokens = torch.randn(ids.size(0), dim).to(device, dtype)
    rows, ends = draw_rows(BOUNDARIES, dim, dtype, device, spare=70)
    ready = fused_moe.plan_from_counts(counts, rows.size(0))
    num_rows = sum(BOUNDARIES)
    weights = [draw_weights(experts, hidden, dim, dtype, device) for _ in range(2)]
    for x, plan, in_order in (
        (tokens, gathered, tokens[gathered.row_token[:num_rows].long()]),
        (rows, ready, rows[:num_rows]),
    ):
        spare = (plan.row_slot.size(0) if plan.row_slot is not None else rows.size(0)) - num_rows
        dh, _ = draw_rows(BOUNDARIES, 2 * hidden, dtype, device, spare=spare)
        exact = [exact_wgrad(part, in_order, ends) for part in dh[:num_rows].chunk(2, dim=1)]
        for need in ((True, True), (True, False), (False, True)):
            flags = (False, *need, False, False, False)
            with poisoned():
                _, *found = ops.experts_up_backward(dh, x, *weights, None, *plan[1:], 0, *flags)[:3]
            for dw, expected, wanted in zip(found, exact, need, strict=True):
                if wanted:
                    check_everywhere(dw, expected)
                    assert not dw[counts == 0].count_nonzero()


LONG_SUMS = (9001, 0, 1, 700, 64, 1500)  # the first and the last are cut into pieces


@HALF_DTYPES
@pytest.mark.parametrize("widths", ((8, 520), (72, 136), (264, 200), (520, 8)))
def test_weight_gradients_at_every_boundary(device, hopper, widths, dtype):
    """Sums of any number of rows, part tiles of both sides; exact zeros for experts without rows."""
    for arguments, ready in wgrad_cases(BOUNDARIES, widths, dtype, device):
        with poisoned():
            dw = ops.wgrad(*arguments)
        check_everywhere(dw, exact_wgrad(*ready, arguments[2]))
        assert not dw[torch.tensor(BOUNDARIES) == 0].count_nonzero()


@HALF_DTYPES
@pytest.mark.parametrize("name", [name for name in COUNTS if name != "boundaries"])
def test_weight_gradients_of_any_number_of_experts(device, hopper, name, dtype):
    for arguments, ready in wgrad_cases(COUNTS[name], (72, 136), dtype, device):
        with poisoned():
            dw = ops.wgrad(*arguments)
        check_everywhere(dw, exact_wgrad(*ready, arguments[2]))


@HALF_DTYPES
def test_long_sums_are_cut(device, hopper, dtype):
    """An expert with most of the rows: pieces of its sums are added in their order: the same bits."""
    for arguments, ready in wgrad_cases(LONG_SUMS, (520, 264), dtype, device):
        with poisoned():
            dw = ops.wgrad(*arguments)
        check_everywhere(dw, exact_wgrad(*ready, arguments[2]))
        for _ in range(10):
            assert torch.equal(dw, ops.wgrad(*arguments))


@HALF_DTYPES
@pytest.mark.parametrize("counts", (BOUNDARIES, LONG_SUMS), ids=("boundaries", "long"))
def test_weight_gradients_added_to_float(device, hopper, counts, dtype):
    """In float32 the products are added to what is there; experts without rows keep theirs."""
    for arguments, ready in wgrad_cases(counts, (72, 136), dtype, device):
        a, b, ends, *maps = arguments
        before = torch.randn(len(counts), 72, 136, device=device)
        for form in ("contiguous", "swapped"):
            dw = FORMS[form](before.clone())
            run = partial(ops.wgrad_accumulate, a, b, ends, dw, *maps)
            assert calls_during("wgrad", run)[:2] == (1, 0)
            exact = before.double() + exact_wgrad(*ready, ends)
            torch.testing.assert_close(dw.double(), exact, rtol=1e-5, atol=1e-3)
            empty = torch.tensor(counts) == 0
            assert torch.equal(dw[empty], before[empty])


def check_down_dgrad(case: Case, counts, device) -> None:
    """dh, a_scaled and dscores of tokens gathered from any place, and of rows as they lie."""
    _, settings = up_arguments(case, device)
    w2 = case.weights(device)["w2"]
    w2, b2 = w2.mT if LAYOUTS[case.layout][3] else w2, case.weights(device)["b2"]
    gated = LAYOUTS[case.layout][1]
    plan = fused_moe.route_plan(ids_of(counts, device), len(counts))
    num_rows, ends, slots = sum(counts), plan.offsets[1:], plan.row_slot[: sum(counts)].long()
    dout = torch.randn(plan.token_row.size(0), case.dim).to(device, case.dtype)
    scores = torch.rand(plan.token_row.shape, device=device)
    h = torch.randn(plan.row_slot.numel(), case.hidden * (2 if gated else 1)).to(device, case.dtype)
    h[num_rows:] = torch.nan
    with poisoned():
        found = ops.down_dgrad(dout, w2, b2, h, scores, *plan[1:], *settings)
    dh, a_scaled, dscores = found

    exact_h = h[:num_rows].double().requires_grad_()
    a = activated(case, exact_h)
    rows = dout[plan.row_token[:num_rows].long()].double()
    g, s = reference.grouped_mm(rows, w2.double().mT, offsets=ends), scores.flatten()[slots].double()
    (exact_dh,) = torch.autograd.grad(a, exact_h, s[:, None] * g)
    a = a.detach()
    exact_dscores = (g * a).sum(1)
    if b2 is not None:
        bias = b2.double().repeat_interleave(torch.tensor(counts, device=device), 0)
        exact_dscores += (rows * bias).sum(1)
    eps = torch.finfo(case.dtype).eps
    for ours, exact in ((dh, exact_dh), (a_scaled, s[:, None] * a)):
        assert_near(ours[:num_rows], exact)
        torch.testing.assert_close(ours[:num_rows].double(), exact, rtol=2 * eps, atol=1e-3)
        assert not ours[num_rows:].count_nonzero()
    assert_near(dscores.flatten()[slots].to(case.dtype), exact_dscores)
    assert not dscores[plan.token_row < 0].count_nonzero()
    for _ in range(3):
        again = ops.down_dgrad(dout, w2, b2, h, scores, *plan[1:], *settings)
        assert all(torch.equal(t[:num_rows], u[:num_rows]) for t, u in zip(found, again, strict=True))

    no_maps = (plan.offsets, None, None, None, ops.count_plan(plan.counts, h.size(0))[2])
    ready = torch.full((h.size(0), case.dim), torch.nan, dtype=case.dtype, device=device)
    ready[:num_rows] = rows.to(case.dtype)
    with poisoned():
        dh, _, _ = ops.down_dgrad(ready, w2, None, h, None, *no_maps, *settings)
    exact_h = exact_h.detach().requires_grad_()
    (exact_dh,) = torch.autograd.grad(activated(case, exact_h), exact_h, g)
    assert_near(dh[:num_rows], exact_dh)
    assert not dh[num_rows:].count_nonzero()


@HALF_DTYPES
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "pairs"])
@pytest.mark.parametrize("size", ((8, 520), (72, 136), (200, 8), (328, 264)))
def test_down_dgrad_at_every_boundary(device, hopper, size, layout, dtype):
    dim, hidden = size
    case = Case(dim=dim, hidden=hidden, num_experts=len(BOUNDARIES), dtype=dtype, layout=layout)
    check_down_dgrad(case, BOUNDARIES, device)


@HALF_DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved", "ungated"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_down_dgrad_of_every_activation(device, hopper, bias, layout, activation, dtype):
    counts = (70, 0, 129, 300)
    case = Case(
        dim=136, hidden=200, num_experts=4, dtype=dtype, layout=layout, bias=bias, activation=activation
    )
    check_down_dgrad(case, counts, device)


@HALF_DTYPES
@pytest.mark.parametrize("name", [name for name in COUNTS if name != "boundaries"])
def test_down_dgrad_of_any_number_of_experts(device, hopper, name, dtype):
    case = Case(dim=72, hidden=136, num_experts=len(COUNTS[name]), dtype=dtype)
    check_down_dgrad(case, COUNTS[name], device)


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
