"""record_routing and replay_routing on a GPU: no wait for the host's sake, CUDA graphs, reduce-overhead."""

import pytest
import torch
from test_replay import assert_equal, gradients, make_input, make_model, make_routes, with_ids

from fused_moe import FusedMoE, record_routing, replay_routing

pytestmark = pytest.mark.gpu

T, K = 64, 2


def make_layer(device):
    return FusedMoE(256, 128, 6, K, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("where", ("cpu", "cuda"))
@pytest.mark.parametrize("use_reentrant", (None, False, True))
def test_the_host_never_waits(device, use_reentrant, where):
    """Neither forward, recording as well, nor backward, which recomputes."""
    model, x, routes = make_model(device, use_reentrant), make_input(device), make_routes(device)
    expected = gradients(model, x, lambda x: with_ids(model, x, routes))
    routes = routes.to(where)
    torch.cuda.synchronize()
    with record_routing(model) as recorded, replay_routing(model, routes):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = gradients(model, x, model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_equal(found, expected)
    assert recorded.num_tokens == [x.size(0)] * 2


@torch.no_grad()
def test_graph(device):
    """A graph reads the memory of the routes that it was captured with."""
    layer = make_layer(device)
    x = torch.randn(T, layer.dim, device=device, dtype=torch.bfloat16)
    routes = make_routes(device, tokens=T, layers=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), replay_routing(layer, routes):
        layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with replay_routing(layer, routes), torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        routes[0].copy_(make_routes(device, tokens=T, layers=1)[0])
        graph.replay()
        assert torch.equal(out, layer(x, ids=routes[0]))


@pytest.mark.parametrize(
    "context, message",
    (
        (record_routing, "record_routing: expected no capture of a CUDA graph"),
        (
            lambda layer: replay_routing(layer, make_routes("cpu", tokens=T, layers=1)),
            "replay_routing: expected routes on cuda:0 in a capture of a CUDA graph, found them on cpu",
        ),
    ),
    ids=("record", "replay"),
)
@torch.no_grad()
def test_refused_captures(device, context, message):
    layer = make_layer(device)
    x = torch.randn(T, layer.dim, device=device, dtype=torch.bfloat16)
    layer(x)
    with pytest.raises(RuntimeError, match=message), context(layer):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x)


@torch.no_grad()
def test_reduce_overhead(device):
    """The operators are between two CUDA graphs: other routes are followed, and each call is recorded."""
    layer = make_layer(device)
    x = torch.randn(T, layer.dim, device=device, dtype=torch.bfloat16)
    run = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        routes = make_routes(device, tokens=T, layers=1)
        with record_routing(layer) as recorded, replay_routing(layer, routes):
            out = run(x).clone()
        expected, ids = layer(x, ids=routes[0], return_ids=True)
        assert torch.equal(out, expected)
        assert torch.equal(recorded[0].int(), ids)
