"""CUDA graphs: recorded once, replayed on other inputs and other routings."""

from functools import partial

import pytest
import torch
from cases import BF16, F32, Case, assert_same_bits, forward_backward, make_ids
from gpu_cases import (
    FAST_DTYPES,
    HALF_DTYPES,
    ROWS,
    capture,
    check_replays,
    copies,
    every_gemm,
    launches,
    training_step,
)

from fused_moe import FusedMoE, enable_fp8, fused_experts, grouped_mlp, reference, route_plan

pytestmark = pytest.mark.gpu


@FAST_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("backward", (False, True), ids=("forward", "backward"))
def test_graph_of_the_experts(device, backward, score_on, dtype):
    """Plan, experts and their gradients recorded once: replayed on other inputs and on every routing."""
    case = Case(200, 64, 48, 8, 3, dtype, layout="halves", bias=True, score_on=score_on)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    fixed = {"score_on": score_on, **case.options}

    def run():
        if backward:
            return forward_backward(fused_experts, inputs, dout, ids=ids, **fixed)
        with torch.no_grad():
            return {"out": fused_experts(**inputs, ids=ids, **fixed)}

    check_replays(run, case, device, Case.inputs, inputs, dout, ids)


@pytest.mark.parametrize("tokens", (100, 3000), ids=("one span", "spans"))
def test_graph_of_a_bounded_plan(device, tokens):
    """As many launches as of the whole plan. A replay plans the ids of then, and adds what it drops."""
    ids = make_ids("repeats", tokens, 4, 600).to(device)
    dropped = torch.zeros((), dtype=torch.int64, device=device)
    bounded = partial(route_plan, ids, 600, max_rows=tokens + 1, dropped_rows=dropped)
    for rows in ({"max_rows": 4 * tokens, "dropped_rows": dropped}, {}):
        assert launches(bounded) == launches(partial(route_plan, ids, 600, **rows))
    graph, plan = capture(bounded)
    dropped.zero_()
    for seed in range(1, 4):
        ids.copy_(make_ids("repeats", tokens, 4, 600, seed))
        graph.replay()
        assert all(map(torch.equal, plan, reference.route_plan(ids, 600, max_rows=tokens + 1)))
        assert int(dropped) == seed * (3 * tokens - 1)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_graph_of_the_layer(device, dtype):
    """A full training step of FusedMoE, router and load counting included, for any choice of experts."""
    module = FusedMoE(
        64, 48, 8, 2, score_func="sigmoid", route_norm=True, num_shared_experts=1, shared_expert_gate=True,
        load_balance_coeff=1e-3, bias=True, device=device, dtype=dtype,
    )  # fmt: skip
    x, dout = (torch.randn(150, 64, device=device).to(dtype) for _ in range(2))
    step = training_step(module, x, dout)
    graph, recorded = capture(step)
    for favourite in (None, 3, 7):
        x.copy_(torch.randn(150, 64, device=device))
        module.expert_bias.zero_()
        if favourite is not None:  # every token's first choice
            module.expert_bias[favourite] = 100
        module.tokens_per_expert.zero_()
        graph.replay()
        found, counted = copies(recorded), module.tokens_per_expert.clone()
        module.tokens_per_expert.zero_()
        assert_same_bits(found, step())
        assert torch.equal(counted, module.tokens_per_expert)
        assert favourite is None or counted[favourite] == 150


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("keep_codes", (False, True))
def test_graph_of_a_layer_in_fp8(device, keep_codes):
    """Weights are quantised in the graph: a replay follows what an optimizer has made of them since. Codes
    that were kept before are not used in it, nor are its own ones outside of it."""
    layer = FusedMoE(256, 128, 8, 2, device=device, dtype=BF16)
    enable_fp8(layer, force=True, keep_codes=keep_codes)
    x, dout = (torch.randn(150, 256, device=device).to(BF16) for _ in range(2))
    layer(x)
    step = training_step(layer, x, dout)
    graph, recorded = capture(step)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    outs = []
    for _ in range(3):
        graph.replay()
        found = copies(recorded)
        assert_same_bits(found, step())
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        outs.append(found["out"])
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("counter_on", ("cuda", "cpu", "meta"))
def test_training_with_reduced_overhead(device, counter_on):
    """torch.compile's own CUDA graphs, recorded and replayed: every step counts its tokens once, the bias
    moves, and results are those of an eager layer of the same state. A counter that `fully_shard` has left on
    the CPU, or load_state_dict(assign=True) on meta, is moved by the first step."""
    torch._dynamo.reset()
    settings = {"num_shared_experts": 1, "load_balance_coeff": 1e-2, "device": device}
    layer, eager = (FusedMoE(64, 48, 8, 2, **settings) for _ in range(2))
    layer.tokens_per_expert = layer.tokens_per_expert.to(counter_on)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(6):
        eager.load_state_dict(layer.state_dict())
        x = torch.randn(150, 64, device=device)
        grads = []
        for module, fn in ((eager, eager), (layer, compiled)):
            leaf = x.clone().requires_grad_()
            out = fn(leaf)
            out.square().mean().backward()
            grads.append(
                [t.detach().clone() for t in (out, leaf.grad, *(p.grad for p in module.parameters()))]
            )
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
        assert torch.equal(layer.tokens_per_expert, eager.tokens_per_expert)
        assert layer.tokens_per_expert.sum() == 150 * 2
        optimizer.step()
        optimizer.zero_grad()
        eager.zero_grad()
        for module in (layer, eager):
            before = module.expert_bias.clone()
            module.update_expert_bias()
            assert not torch.equal(module.expert_bias, before)
        assert torch.equal(layer.expert_bias, eager.expert_bias)
    torch._dynamo.reset()


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


def rows_in_use(results: dict, num_rows: int) -> dict:
    return {n: t[:num_rows] if n in ROWS else t for n, t in results.items()}


@HALF_DTYPES
def test_graph_of_every_gemm(device, dtype):
    """Recorded once, replayed on other routings: what depends on them is computed on the device."""
    run, ids = every_gemm(dtype, device)
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
        assert_same_bits(rows_in_use(found, num_rows), rows_in_use(run(), num_rows))
        assert not found["out"][num_rows:].count_nonzero()


@HALF_DTYPES
def test_a_graph_replayed_beside_other_work(device, dtype):
    """On a side stream while the same GEMMs run on the current one, again and again: counters are not
    shared."""
    run, _ = every_gemm(dtype, device)
    expected = run()
    graph, recorded = capture(run)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(30):
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            graph.replay()
        for _ in range(2):
            found = run()
        torch.cuda.synchronize()
        assert_same_bits(found, expected)
        assert_same_bits(recorded, expected)


class Abort(Exception):
    pass


@HALF_DTYPES
def test_capture_again_after_an_aborted_one(device, dtype):
    """An exception in a capture leaves nothing that was only recorded: neither the next capture, its
    replays, nor eager calls on the capture's stream find memory that was never zeroed."""
    run, ids = every_gemm(dtype, device)
    expected = run()
    stream = torch.cuda.Stream(device)  # no call has used it
    stream.wait_stream(torch.cuda.current_stream())
    with pytest.raises(Abort), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        run()
        raise Abort
    with torch.cuda.stream(stream):
        assert_same_bits(run(), expected)
    torch.cuda.synchronize()

    with pytest.raises(Abort), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        run()
        raise Abort
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        recorded = run()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(recorded, expected)
        assert_same_bits(run(), expected)
