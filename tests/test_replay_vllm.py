"""Routes.from_vllm: what vLLM 0.33.0 returns as routed_experts."""

import pytest
import torch

from fused_moe import FusedMoE, Routes, record_routing, replay_routing

L, E, K = 3, 8, 2


def make(rows, dtype=torch.uint8):
    """A request's array: layer 0 is dense, and vLLM leaves zeros there."""
    ids = torch.rand(rows, L, E).argsort(-1)[..., :K]
    ids[:, 0] = 0
    return ids.to(dtype)


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_one_request(dtype, is_numpy):
    rows = make(5, dtype)
    if is_numpy:
        pytest.importorskip("numpy")
    routes = Routes.from_vllm(rows.numpy() if is_numpy else rows, 9, start=2, layers=[1, 2], num_experts=E)
    assert len(routes) == 2 and routes.num_tokens == [9, 9] and routes.num_experts == [E, E]
    for i, ids in enumerate(routes):
        assert torch.equal(ids[2:7].int(), rows[:, 1 + i].int())
        assert (ids[:2] == -1).all() and (ids[7:] == -1).all()
    assert Routes.from_vllm(rows).num_tokens == [5] * L


def test_requests_in_a_row():
    """Packed; the router chooses for the last token of each."""
    a, b = make(4), make(6)
    routes = Routes.from_vllm([a, b], [5, 7], layers=[1], num_experts=E)
    layer, x = FusedMoE(16, 8, E, K), torch.randn(12, 16)
    _, own = layer(x, return_ids=True)
    with replay_routing(layer, routes), record_routing(layer) as found:
        layer(x)
    expected = own.clone()
    expected[:4], expected[5:11] = a[:, 1], b[:, 1]
    assert torch.equal(found[0].int(), expected.int())


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        ((None,), {}, TypeError, "arrays .R, L, K., found NoneType"),
        (([],), {}, ValueError, "at least one request"),
        ((torch.zeros(3, L, K),), {}, TypeError, "integer dtype, found torch.float32"),
        ((make(3)[0],), {}, ValueError, "shape"),
        ((make(3), 2), {}, ValueError, "num_tokens >= 3"),
        ((make(3),), {"start": -1}, ValueError, "start"),
        (([make(3), make(3)], [4]), {}, ValueError, "num_tokens of 2 requests, found 1"),
        (([make(3), make(3)[:, 1:]],), {}, ValueError, "one L and K"),
        ((make(3),), {"layers": [L]}, ValueError, "layers from 0 to 2, found 3"),
        ((make(3),), {"num_experts": 1}, ValueError, "ids of layer"),
    ],
)
def test_bad_input(args, options, error, message):
    with pytest.raises(error, match=message):
        Routes.from_vllm(*args, **options)
