"""load_balancing_loss and router_z_loss against their formulas."""

from functools import partial

import pytest
import torch
from cases import BF16, F64, assert_near

from fused_moe import load_balancing_loss, reference, route, router_z_loss

BOTH_FUNCS = pytest.mark.parametrize("score_func", ("softmax", "sigmoid"))


@pytest.mark.quick
@BOTH_FUNCS
def test_balance_loss_is_its_formula(device, score_func):
    """E * sum over e of (share of slots) * (mean probability); sigmoids are divided by their sum."""
    logits = torch.randn(50, 7, device=device)
    ids = route(logits, 3, score_func=score_func)[1]
    probs = logits.double().softmax(-1)
    if score_func == "sigmoid":
        probs = logits.double().sigmoid() / logits.double().sigmoid().sum(-1, keepdim=True)
    expected = 0.0
    for e in range(7):
        expected += 7 * float((ids == e).sum()) / ids.numel() * probs[:, e].mean()
    assert_near(load_balancing_loss(logits, ids, 7, score_func=score_func), expected)


def test_sigmoids_that_underflow(device):
    """A token whose sigmoids are all 0 in float32 still has probabilities that sum to 1, and a gradient."""
    logits = torch.tensor([[-200.0, -200.0], [300.0, -300.0]], device=device, requires_grad=True)
    ids = torch.tensor([[0], [0]], device=device)
    loss = load_balancing_loss(logits, ids, 2, score_func="sigmoid")
    torch.testing.assert_close(loss.item(), 2 * (0.5 + 1) / 2)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad.tolist(), [[0.25, -0.25], [0.0, 0.0]])


def test_balance_loss_of_perfect_balance_is_one(device):
    """Every expert chosen as often as any other."""
    logits = torch.zeros(16, 8, device=device)
    ids = torch.arange(32, device=device).remainder(8).view(16, 2)
    torch.testing.assert_close(load_balancing_loss(logits, ids, 8).item(), 1.0)


def test_balance_loss_of_collapse_is_the_number_of_experts(device):
    """All tokens choose one expert with probability 1: the largest loss, E."""
    logits = torch.zeros(16, 8, device=device)
    logits[:, 3] = 50.0
    ids = torch.full((16, 1), 3, dtype=torch.int32, device=device)
    torch.testing.assert_close(load_balancing_loss(logits, ids, 8).item(), 8.0)


def test_balance_loss_pushes_against_the_load(device):
    """Its gradient lowers the logit of the most loaded expert."""
    logits = torch.randn(64, 4, device=device)
    logits[:, 2] += 2.0
    logits.requires_grad_()
    load_balancing_loss(logits, route(logits, 1)[1], 4).backward()
    assert logits.grad.sum(0).argmax() == 2


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_ids_of_no_expert_count_for_none(device, dtype):
    """Ids outside [0, E) add to no expert's share, and access no memory."""
    logits = torch.zeros(4, 2, device=device)
    ids = torch.tensor([[0], [1], [-1], [9]], dtype=dtype, device=device)
    torch.testing.assert_close(load_balancing_loss(logits, ids, 2).item(), 0.5)


@pytest.mark.quick
def test_z_loss_is_its_formula(device):
    """The mean of logsumexp squared, over any leading shape, in float32."""
    logits = torch.randn(3, 5, 7, device=device)
    assert_near(router_z_loss(logits), logits.double().exp().sum(-1).log().square().mean())
    half = logits.to(BF16)
    assert router_z_loss(half).dtype == torch.float32
    assert torch.equal(router_z_loss(half), router_z_loss(half.float()))


def test_any_leading_shape(device):
    """(B, S, E) logits and (B, S, K) ids give what their flattened forms give."""
    logits = torch.randn(3, 5, 7, device=device)
    ids = route(logits.flatten(0, 1), 2)[1]
    expected = load_balancing_loss(logits.flatten(0, 1), ids, 7)
    assert torch.equal(load_balancing_loss(logits, ids.view(3, 5, 2), 7), expected)


@BOTH_FUNCS
def test_gradients(device, score_func):
    """Both agree with numerical gradients, in float64."""
    ids = torch.randint(5, (6, 2), device=device)
    logits = torch.randn(6, 5, dtype=F64, device=device, requires_grad=True)
    balance = partial(load_balancing_loss, ids=ids, num_experts=5, score_func=score_func)
    for loss in (balance, router_z_loss):
        assert loss(logits).dtype == F64
        assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("shape", ((0,), (3, 0)), ids=str)
def test_no_tokens(device, shape):
    """Both are 0, and so is the gradient of the router's weight."""
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    ids = torch.zeros(*shape, 2, dtype=torch.int32, device=device)
    for loss in (lambda z: load_balancing_loss(z, ids, 5), router_z_loss):
        value = loss(torch.nn.functional.linear(torch.randn(*shape, 4, device=device), weight))
        assert value.item() == 0
        (grad,) = torch.autograd.grad(value, weight)
        assert torch.equal(grad, torch.zeros_like(weight))


@pytest.mark.parametrize("default", (BF16, F64), ids=str)
def test_default_dtype(device, default):
    """The dtype of the result is that of the logits, whatever PyTorch's default is."""
    logits, ids = torch.randn(20, 5, device=device), torch.randint(5, (20, 2), device=device)
    expected = load_balancing_loss(logits, ids, 5), router_z_loss(logits)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = load_balancing_loss(logits, ids, 5), router_z_loss(logits)
    finally:
        torch.set_default_dtype(before)
    for value, other in zip(found, expected, strict=True):
        assert value.dtype == torch.float32 and torch.equal(value, other)


def test_compile(device):
    """One graph for all numbers of tokens from two on; PyTorch gives smaller sizes separate graphs."""

    def losses(logits, ids):
        return load_balancing_loss(logits, ids, 5), router_z_loss(logits)

    torch._dynamo.reset()
    compiled = torch.compile(losses, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 9, 40):
            logits = torch.randn(tokens, 5, device=device)
            ids = torch.randint(5, (tokens, 2), device=device)
            torch.testing.assert_close(compiled(logits, ids), losses(logits, ids))


def test_vmap(device):
    """Batched, both give what they give one by one."""
    logits, ids = torch.randn(3, 8, 5, device=device), torch.randint(5, (3, 8, 2), device=device)
    balance = torch.func.vmap(lambda z, i: load_balancing_loss(z, i, 5))(logits, ids)
    one_by_one = [load_balancing_loss(z, i, 5) for z, i in zip(logits, ids, strict=True)]
    torch.testing.assert_close(balance, torch.stack(one_by_one))
    torch.testing.assert_close(
        torch.func.vmap(router_z_loss)(logits), torch.stack([*map(router_z_loss, logits)])
    )


LOGITS, IDS = torch.zeros(6, 5), torch.zeros(6, 2, dtype=torch.int32)
WRONG_CALLS = [
    (([1.0], IDS, 5), TypeError, "logits to be a tensor, found list"),
    ((LOGITS.int(), IDS, 5), TypeError, "logits of a floating dtype, found torch.int32"),
    ((LOGITS.cfloat(), IDS, 5), TypeError, "logits of a floating dtype, found torch.complex64"),
    ((torch.zeros(()), IDS, 5), ValueError, "logits of shape (..., E) with E >= 1, found ()"),
    ((LOGITS, [0], 5), TypeError, "ids to be a tensor, found list"),
    ((LOGITS, IDS.float(), 5), TypeError, "ids of an integer dtype, found torch.float32"),
    ((LOGITS, IDS.bool(), 5), TypeError, "ids of an integer dtype, found torch.bool"),
    (
        (LOGITS, IDS[:5], 5),
        ValueError,
        "ids (..., K) of the same tokens as logits (6, 5), found (5, 2)",
    ),
    (
        (LOGITS, IDS.view(2, 3, 2), 5),
        ValueError,
        "ids (..., K) of the same tokens as logits (6, 5), found (2, 3, 2)",
    ),
    ((LOGITS, IDS.to("meta"), 5), ValueError, "ids on the logits' device cpu, found meta"),
    ((LOGITS, IDS, 4), ValueError, "num_experts of the logits, 5, found 4"),
    ((LOGITS, IDS, 5.0), TypeError, "num_experts to be an int, found float"),
    ((LOGITS, IDS, 5, "tanh"), ValueError, "score_func to be one of ['sigmoid', 'softmax'], found 'tanh'"),
]


@pytest.mark.parametrize("arguments, error, message", WRONG_CALLS, ids=[call[2] for call in WRONG_CALLS])
def test_wrong_calls(arguments, error, message):
    """A wrong argument is named, and so is what was found in its place."""
    with pytest.raises(error) as raised:
        load_balancing_loss(*arguments[:3], **dict(zip(("score_func",), arguments[3:], strict=False)))
    assert str(raised.value) == f"load_balancing_loss: expected {message}"
    if message.startswith("logits"):
        with pytest.raises(error) as raised:
            router_z_loss(arguments[0])
        assert str(raised.value) == f"router_z_loss: expected {message}"


def test_reference_has_the_same_losses(device):
    """They are plain PyTorch already, so the reference's are the same functions."""
    assert reference.load_balancing_loss is load_balancing_loss
    assert reference.router_z_loss is router_z_loss
