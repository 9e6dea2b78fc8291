"""One graph for any batch: captured at the full number of tokens, replayed on fewer, with other routings."""

import pytest
import torch
from cases import Case, assert_same_bits, forward_backward
from gpu_cases import FAST_DTYPES, assert_equal, capture, copies, launches, poisoned
from test_batch_invariance import LAYERS

from fused_moe import FusedMoE, fused_experts, route

pytestmark = pytest.mark.gpu

FULL = 256
REPLAYS = 320
# About every threshold, and what is clamped; the others are drawn.
EDGES = (
    FULL, 0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255,
    -1, -(2**31), FULL + 1, 2**31 - 1,
)  # fmt: skip
GARBAGE = (torch.nan, torch.inf, -torch.inf)


def batches(x: torch.Tensor):
    """(num_tokens, how many are real, x with garbage from there on): every batch another routing, every fifth
    with all of its tokens alike."""
    drawn = torch.randint(FULL + 1, (REPLAYS - len(EDGES),)).tolist()
    for i, count in enumerate((*EDGES, *drawn)):
        n = max(0, min(count, FULL))
        fresh = torch.randn(x.shape, device=x.device).to(x.dtype)
        if i % 5 == 4:
            fresh[:] = fresh[0].clone()
        fresh[n:] = GARBAGE[i % 3]
        yield count, n, fresh


def new_bias(layer) -> None:
    if layer.expert_bias is not None:
        layer.expert_bias.normal_()


@FAST_DTYPES
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_forward(device, name, dtype):
    """Each replay has the bits of an eager call with the real tokens alone, and zeros after them, where
    memory and x held garbage."""
    layer = FusedMoE(**LAYERS[name], device=device, dtype=dtype).eval()
    x = torch.randn(FULL, layer.dim, device=device).to(dtype)
    num_tokens = torch.tensor(FULL, dtype=torch.int32, device=device)
    with poisoned():
        graph, (out, ids) = capture(lambda: layer(x, num_tokens=num_tokens, return_ids=True))
    for count, n, fresh in batches(x):
        new_bias(layer)
        x.copy_(fresh)
        num_tokens.fill_(count)
        out.fill_(torch.nan)
        ids.fill_(77)
        graph.replay()
        expected, expected_ids = layer(fresh[:n], return_ids=True)
        assert_equal(out[:n], expected, f"{n} tokens")
        assert torch.equal(ids[:n], expected_ids), f"{n} tokens"
        assert not out[n:].count_nonzero() and (ids[n:] == -1).all(), f"padding after {n} tokens"


def step_of(layer, x, dout, **options) -> dict:
    """{"out", "dx", every parameter's gradient, the losses}, and the counter."""
    leaf = x.detach().requires_grad_()
    out, losses = layer(leaf, return_losses=True, **options)
    leaves = {"dx": leaf, **dict(layer.named_parameters())}
    one = torch.ones_like(losses.z)
    grads = torch.autograd.grad((out, *losses), [*leaves.values()], (dout, one, one))
    found = {"out": out.detach(), "balance": losses.load_balancing.detach(), "z": losses.z.detach()}
    return found | dict(zip(leaves, grads, strict=True))


def assert_close(found: dict, expected: dict, what: str) -> None:
    """In norm: the largest number of tokens decides how sums over tokens are split. Equal tokens cancel."""
    for name, value in expected.items():
        tolerance = 1e-4 if value.dtype == torch.float32 else 2e-2
        error = (found[name].double() - value.double()).norm()
        assert error <= tolerance * value.double().norm(), f"{name}, {what}"


@FAST_DTYPES
@pytest.mark.parametrize("name", ("softmax", "sigmoid, groups, biases", "shared experts and their gate"))
def test_training(device, name, dtype):
    """A training step with both losses: the bits of the eager step on the same padded batch, and the results
    and counts of the real tokens alone. dout is garbage after them, too."""
    layer = FusedMoE(**LAYERS[name], device=device, dtype=dtype)
    x, dout = (torch.randn(FULL, layer.dim, device=device).to(dtype) for _ in range(2))
    num_tokens = torch.tensor([FULL], device=device)
    with poisoned():
        graph, recorded = capture(lambda: step_of(layer, x, dout, num_tokens=num_tokens))
    for count, n, fresh in batches(x):
        new_bias(layer)
        x.copy_(fresh)
        dout.normal_()
        dout[n:] = torch.nan
        num_tokens.fill_(count)
        for value in recorded.values():
            value.fill_(torch.nan)
        layer.tokens_per_expert.zero_()
        graph.replay()
        found, counted = copies(recorded), layer.tokens_per_expert.clone()
        assert_same_bits(found, step_of(layer, x, dout, num_tokens=num_tokens))
        layer.tokens_per_expert.zero_()
        expected = step_of(layer, fresh[:n], dout[:n])
        assert torch.equal(counted, layer.tokens_per_expert), f"counts of {n} tokens"
        for name in ("out", "dx"):
            assert not found[name][n:].count_nonzero(), f"{name} of padding after {n} tokens"
            found[name] = found[name][:n]
        assert_equal(found["out"], expected["out"], f"{n} tokens")
        assert_close(found, expected, f"{n} tokens")


@FAST_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_replayed_choices_of_some_experts(device, score_on, dtype):
    """Given ids, a map of the experts that are here, and a number of tokens, all of them data: forward and
    backward have the bits of an eager call, and out those of one that never saw padding or remote ids. Ids
    and maps out of range are remote; some tokens have not been chosen for."""
    num_ids, num_experts, top_k = 16, 6, 3
    case = Case(FULL, 64, 48, num_experts, top_k, dtype, bias=True, score_on=score_on)
    inputs, dout = case.inputs(device), case.dout(device)
    del inputs["scores"]
    inputs["logits"] = torch.randn(FULL, num_ids, device=device)
    given = torch.zeros(FULL, top_k, dtype=torch.int64, device=device)
    expert_map = torch.zeros(num_ids, dtype=torch.int32, device=device)
    num_tokens = torch.tensor(FULL, device=device)

    def run(logits, x, **weights):
        scores, ids = route(logits, top_k, route_norm=True, ids=given, num_tokens=num_tokens)
        fixed = {"score_on": score_on, **case.options}
        return fused_experts(x, **weights, scores=scores, ids=ids, expert_map=expert_map, **fixed)

    with poisoned():
        graph, recorded = capture(lambda: forward_backward(run, inputs, dout))
    for count, n, fresh in batches(inputs["x"]):
        inputs["x"].copy_(fresh)
        inputs["logits"].normal_()
        inputs["logits"][n:] = torch.nan
        dout.normal_()
        dout[n:] = torch.nan
        given.random_(-2, num_ids + 2)
        given[n // 2] = 2**32  # not expert 0
        given[1::7] = -1  # the router's choice
        expert_map.random_(-2, num_experts + 2)
        num_tokens.fill_(count)
        for value in recorded.values():
            value.fill_(torch.nan)
        graph.replay()
        found = copies(recorded)
        assert_same_bits(found, forward_backward(run, inputs, dout))
        for name in ("out", "dx", "dlogits"):
            assert not found[name][n:].count_nonzero(), f"{name} of padding after {n} tokens"
        scores, ids = route(inputs["logits"][:n], top_k, route_norm=True, ids=given[:n])
        used = torch.where((given[:n] == -1).all(-1, True), ids, given[:n])
        is_id = (used >= 0) & (used < num_ids)
        local = torch.where(is_id, expert_map[torch.where(is_id, used, 0)], -1)
        weights = {name: t for name, t in inputs.items() if name not in ("x", "logits")}
        with torch.no_grad():
            expected = fused_experts(
                fresh[:n], **weights, scores=scores, ids=local, score_on=score_on, **case.options
            )
        assert_equal(found["out"][:n], expected, f"{n} tokens")


@FAST_DTYPES
@torch.no_grad()
def test_no_launch_more(device, dtype):
    """Without gradients padding and a replay cost no launch, but four with a gate of shared experts; nor does
    a map."""
    for more, settings in (
        (0, {"num_shared_experts": 1}),
        (4, {"num_shared_experts": 1, "shared_expert_gate": True}),
    ):
        layer = FusedMoE(256, 192, 16, 4, device=device, dtype=dtype, **settings).eval()
        x, num_tokens = torch.randn(FULL, 256, device=device).to(dtype), torch.tensor(9, device=device)
        plain = len(launches(lambda: layer(x)))  # noqa: B023
        assert len(launches(lambda: layer(x, num_tokens=num_tokens))) == plain + more  # noqa: B023
    layer = FusedMoE(256, 192, 16, 4, device=device, dtype=dtype).eval()
    x = torch.randn(FULL, 256, device=device).to(dtype)
    _, ids = layer(x, return_ids=True)
    options = {"num_tokens": torch.tensor(9, device=device), "ids": ids}
    scores, experts = torch.rand(FULL, 4, device=device), layer.experts
    expert_map = torch.arange(16, dtype=torch.int32, device=device)

    def mapped(**options):
        return fused_experts(x, *experts.weights, scores, ids, **options)

    assert len(launches(lambda: layer(x, **options))) == len(launches(lambda: layer(x))) > 0
    assert len(launches(lambda: mapped(expert_map=expert_map))) == len(launches(mapped)) > 0


@pytest.mark.sanitizer
def test_every_form_once(device):
    """Small, for compute-sanitizer: padding, given ids and a map, forward and backward, all tokens masked,
    none at all."""
    layer = FusedMoE(24, 16, 5, 3, num_shared_experts=1, shared_expert_gate=True, device=device)
    for tokens, count in ((9, 4), (9, 0), (9, 99), (0, 3)):
        x = torch.randn(tokens, 24, device=device)
        ids = torch.randint(-1, 6, (tokens, 3), device=device)
        num_tokens = torch.tensor(count, device=device)
        step_of(layer, x, torch.ones_like(x), ids=ids, num_tokens=num_tokens)
        step_of(layer, x, torch.ones_like(x), num_tokens=num_tokens)
        with torch.no_grad():
            expert_map = torch.tensor([4, -1, 9, 0], dtype=torch.int32, device=device)
            scores = torch.rand(tokens, 3, device=device)
            fused_experts(x, *layer.experts.weights, scores, ids, expert_map=expert_map)
    torch.cuda.synchronize()
