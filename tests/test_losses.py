"""load_balancing_loss and router_z_loss against their formulas."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F64, assert_near

from fused_moe import load_balancing_loss, reference, route, router_z_loss

SCORES = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda z: F.softplus(z).sqrt(),
}
ALL_FUNCS = pytest.mark.parametrize("score_func", SCORES)


def loop(logits, ids, score_func="softmax", mask=None):
    """The balance loss of one batch of tokens (T, E), token by token in float64."""
    num_experts = logits.size(1)
    load, probs, tokens = torch.zeros(num_experts, dtype=F64), torch.zeros(num_experts, dtype=F64), 0
    for t in range(len(logits)):
        if mask is None or mask[t]:
            tokens += 1
            scores = SCORES[score_func](logits[t].double().cpu())
            probs += scores / scores.sum()
            for e in ids[t].tolist():
                if 0 <= e < num_experts:
                    load[e] += 1
    return num_experts * (load / max(tokens * ids.size(1), 1) * probs / max(tokens, 1)).sum()


@pytest.mark.quick
@ALL_FUNCS
def test_balance_loss_is_its_formula(device, score_func):
    """E * sum over e of (share of slots) * (mean probability); scores are divided by their sum."""
    logits = torch.randn(50, 7, device=device)
    ids = route(logits, 3)[1]
    found = load_balancing_loss(logits, ids, 7, score_func=score_func)
    assert_near(found, loop(logits, ids, score_func).to(device))


@pytest.mark.parametrize("score_func, share", (("sigmoid", 1.0), ("sqrtsoftplus", 0.5)))
@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_scores_that_underflow(device, dtype, score_func, share):
    """A token whose scores are all 0 in its dtype still has probabilities that sum to 1, and a gradient."""
    logits = torch.tensor(
        [[-2000.0, -2000.0], [300.0, -2000.0]], device=device, dtype=dtype, requires_grad=True
    )
    ids = torch.tensor([[0], [0]], device=device)
    loss = load_balancing_loss(logits, ids, 2, score_func=score_func)
    torch.testing.assert_close(loss.item(), 2 * (0.5 + 1) / 2)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad.tolist(), [[share / 4, -share / 4], [0.0, 0.0]])


@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_sqrtsoftplus_at_all_sizes(device, dtype):
    """The log of its scores is that of softplus in float64, from where exp underflows to where it overflows,
    and its slope lies between 0 and 1/2."""
    x = torch.linspace(-120, 120, 961, device=device, dtype=dtype, requires_grad=True)
    pairs = torch.stack([x, torch.zeros_like(x)], -1)
    ids = torch.zeros(len(x), 1, dtype=torch.int32, device=device)
    loss = load_balancing_loss(pairs, ids, 2, score_func="sqrtsoftplus")
    exact = torch.linspace(-120, 120, 961, dtype=F64, device=device, requires_grad=True)
    scores = torch.logaddexp(exact, exact.new_zeros(())).sqrt()
    expected = 2 * (scores / (scores + exact.new_tensor(2.0).log().sqrt())).mean()
    for found, other in zip(
        (loss, *torch.autograd.grad(loss, x)), (expected, *torch.autograd.grad(expected, exact)), strict=True
    ):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(found.double(), other, rtol=tolerance, atol=0)


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


# --- which tokens count -------------------------------------------------------------------------------


@ALL_FUNCS
def test_masked_tokens(device, score_func):
    """Tokens that are False, anywhere, leave the losses and gradients of the others; what they hold reaches
    nothing. Beside num_tokens both must hold."""
    logits, ids = torch.randn(4, 15, 7, device=device), torch.randint(7, (4, 15, 3), device=device)
    mask = torch.rand(4, 15, device=device) < 0.6
    dirty = torch.where(mask.unsqueeze(-1), logits, torch.nan).requires_grad_()
    clean = logits[mask].requires_grad_()
    options = {"score_func": score_func}
    found = load_balancing_loss(dirty, ids, 7, mask=mask, **options), router_z_loss(dirty, mask=mask)
    assert_near(
        found[0], loop(logits.flatten(0, 1), ids.flatten(0, 1), score_func, mask.flatten()).to(device)
    )
    expected = load_balancing_loss(clean, ids[mask], 7, **options), router_z_loss(clean)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
        (da,), (db,) = torch.autograd.grad(a, dirty), torch.autograd.grad(b, clean)
        torch.testing.assert_close(da[mask], db)
        assert not da[~mask].any()
    num_tokens = torch.tensor(37, device=device)
    both = mask & (torch.arange(60, device=device) < 37).view(4, 15)
    for loss in (partial(load_balancing_loss, ids=ids, num_experts=7, **options), router_z_loss):
        assert torch.equal(loss(dirty, mask=mask, num_tokens=num_tokens), loss(dirty, mask=both))
        assert loss(dirty, mask=torch.zeros_like(mask)) == 0


@ALL_FUNCS
@pytest.mark.parametrize("shape", ((12,), (5, 12), (2, 3, 12)), ids=str)
def test_per_sequence(device, score_func, shape):
    """The mean of the sequences' own losses; those without tokens that count are left out."""
    logits, ids = torch.randn(*shape, 7, device=device), torch.randint(-1, 7, (*shape, 3), device=device)
    mask = torch.rand(shape, device=device) < 0.6
    mask.view(-1, 12)[1:2] = False
    options = {"score_func": score_func, "per_sequence": True}
    for given in (None, mask):
        found = load_balancing_loss(logits, ids, 7, mask=given, **options)
        masks = torch.ones_like(mask) if given is None else given
        sequences = (t.reshape(-1, *t.shape[len(shape) - 1 :]) for t in (logits, ids, masks))
        losses = [loop(z, i, score_func, m) for z, i, m in zip(*sequences, strict=True) if m.any()]
        assert len(losses) == masks.view(-1, 12).any(1).sum()
        assert_near(found, torch.stack(losses).mean().to(device))
    assert load_balancing_loss(logits, ids, 7, mask=torch.zeros_like(mask), **options) == 0


def test_per_sequence_is_not_that_of_the_batch(device):
    """Two sequences that each use one expert are balanced as a batch alone."""
    logits = torch.zeros(2, 8, 2, device=device)
    logits[0, :, 0] = logits[1, :, 1] = 50.0
    ids = logits.argmax(-1, keepdim=True)
    torch.testing.assert_close(load_balancing_loss(logits, ids, 2).item(), 1.0)
    torch.testing.assert_close(load_balancing_loss(logits, ids, 2, per_sequence=True).item(), 2.0)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_load_of_earlier_micro_batches(device, dtype):
    """f_e is that of all micro-batches so far, p_e of the last; the counts are not changed. The last one's
    gradient is that of the whole step times its share of the tokens."""
    logits, ids = torch.randn(3, 20, 7, device=device), torch.randint(7, (3, 20, 2), device=device)
    load = ids[:2].flatten().bincount(minlength=7).to(dtype)
    before = load.clone()
    last = logits[2].clone().requires_grad_()
    found = load_balancing_loss(last, ids[2], 7, load=load)
    assert torch.equal(load, before)
    share = ids.flatten().bincount(minlength=7).double() / ids.numel()
    assert_near(found, 7 * (share * logits[2].double().softmax(-1).mean(0)).sum())
    (grad,) = torch.autograd.grad(found, last)
    whole = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(load_balancing_loss(whole, ids, 7), whole)
    torch.testing.assert_close(grad, 3 * expected[2])
    none = torch.zeros_like(load)
    assert torch.equal(load_balancing_loss(last, ids[2], 7, load=none), load_balancing_loss(last, ids[2], 7))


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


@ALL_FUNCS
def test_gradients(device, score_func):
    """Both agree with numerical gradients, in float64."""
    ids = torch.randint(5, (6, 2), device=device)
    logits = torch.randn(6, 5, dtype=F64, device=device, requires_grad=True)
    balance = partial(load_balancing_loss, ids=ids, num_experts=5, score_func=score_func)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    in_two = partial(balance, ids=ids.view(2, 3, 2), per_sequence=True)
    for loss in (
        balance,
        router_z_loss,
        partial(balance, mask=mask),
        partial(router_z_loss, mask=mask),
        partial(balance, load=torch.arange(5, device=device)),
        lambda z: in_two(z.view(2, 3, 5), mask=mask.view(2, 3)),
    ):
        assert loss(logits).dtype == F64
        assert torch.autograd.gradcheck(loss, (logits,))


@pytest.mark.parametrize("shape", ((0,), (3, 0)), ids=str)
def test_no_tokens(device, shape):
    """Both are 0, and so is the gradient of the router's weight."""
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    ids = torch.zeros(*shape, 2, dtype=torch.int32, device=device)
    per_sequence = partial(load_balancing_loss, ids=ids, num_experts=5, per_sequence=True)
    for loss in (lambda z: load_balancing_loss(z, ids, 5), router_z_loss, per_sequence):
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

    load = torch.arange(5, device=device)

    def losses(logits, ids):
        mask = ids[..., 0] > 1
        sequences = logits.unflatten(0, (1, -1)), ids.unflatten(0, (1, -1))
        return (
            load_balancing_loss(logits, ids, 5),
            router_z_loss(logits),
            load_balancing_loss(logits, ids, 5, mask=mask, load=load, score_func="sqrtsoftplus"),
            load_balancing_loss(*sequences, 5, per_sequence=True),
            router_z_loss(logits, mask=mask),
        )

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
    per_sequence = load_balancing_loss(logits, ids, 5, per_sequence=True)
    torch.testing.assert_close(per_sequence, balance.mean())
    torch.testing.assert_close(
        torch.func.vmap(router_z_loss)(logits), torch.stack([*map(router_z_loss, logits)])
    )


LOGITS, IDS = torch.zeros(6, 5), torch.zeros(6, 2, dtype=torch.int32)
MASK, LOAD = torch.ones(6, dtype=torch.bool), torch.ones(5, dtype=torch.int64)
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
    (
        (LOGITS, IDS, 5, {"score_func": "tanh"}),
        ValueError,
        "score_func to be one of ['sigmoid', 'softmax', 'sqrtsoftplus'], found 'tanh'",
    ),
    ((LOGITS, IDS, 5, {"mask": [True]}), TypeError, "mask to be a tensor, found list"),
    ((LOGITS, IDS, 5, {"mask": torch.ones(6)}), TypeError, "mask of dtype bool, found torch.float32"),
    ((LOGITS, IDS, 5, {"mask": MASK[:5]}), ValueError, "mask of shape (...) = (6,), found (5,)"),
    ((LOGITS, IDS, 5, {"mask": MASK[:, None]}), ValueError, "mask of shape (...) = (6,), found (6, 1)"),
    ((LOGITS, IDS, 5, {"mask": MASK.to("meta")}), ValueError, "mask on logits's device cpu, found meta"),
    ((LOGITS, IDS, 5, {"per_sequence": 1}), TypeError, "per_sequence to be True or False, found int 1"),
    (
        (LOGITS[0], IDS[0], 5, {"per_sequence": True}),
        ValueError,
        "logits of shape (..., S, E) with per_sequence, found (5,)",
    ),
    (
        (LOGITS, IDS, 5, {"group": "world"}),
        TypeError,
        "group to be a ProcessGroup that this rank is in, found str",
    ),
    ((LOGITS, IDS, 5, {"load": [1] * 5}), TypeError, "load to be a tensor, found list"),
    ((LOGITS, IDS, 5, {"load": torch.ones(5)}), TypeError, "load of an integer dtype, found torch.float32"),
    ((LOGITS, IDS, 5, {"load": LOAD[:4]}), ValueError, "load of shape (E) = (5,), found (4,)"),
    ((LOGITS, IDS, 5, {"load": LOAD.to("meta")}), ValueError, "load on logits's device cpu, found meta"),
    (
        (LOGITS, IDS, 5, {"load": LOAD, "per_sequence": True}),
        ValueError,
        "neither group nor load with per_sequence, found one of them",
    ),
]


@pytest.mark.parametrize("arguments, error, message", WRONG_CALLS, ids=[call[2] for call in WRONG_CALLS])
def test_wrong_calls(arguments, error, message):
    """A wrong argument is named, and so is what was found in its place."""
    options = arguments[3] if len(arguments) > 3 else {}
    with pytest.raises(error) as raised:
        load_balancing_loss(*arguments[:3], **options)
    assert str(raised.value) == f"load_balancing_loss: expected {message}"
    if message.startswith(("logits", "mask")) and "per_sequence" not in message:
        with pytest.raises(error) as raised:
            router_z_loss(arguments[0], **options)
        assert str(raised.value) == f"router_z_loss: expected {message}"


def test_reference_has_the_same_losses(device):
    """They are plain PyTorch already, so the reference's are the same functions."""
    assert reference.load_balancing_loss is load_balancing_loss
    assert reference.router_z_loss is router_z_loss
