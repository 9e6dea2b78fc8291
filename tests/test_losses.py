"""load_balancing_loss and router_z_loss against their formulas."""

import pytest
import torch
from cases import BF16, F64, assert_near

from fused_moe import load_balancing_loss, reference, route, router_z_loss


@pytest.mark.quick
def test_balance_loss_is_its_formula(device):
    """E * sum over e of (share of slots) * (mean probability)."""
    logits = torch.randn(50, 7, device=device)
    ids = route(logits, 3)[1]
    probs = logits.double().softmax(-1)
    expected = 0.0
    for e in range(7):
        expected += 7 * float((ids == e).sum()) / ids.numel() * probs[:, e].mean()
    assert_near(load_balancing_loss(logits, ids, 7), expected)


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


def test_gradients(device):
    """Both agree with numerical gradients, the z-loss also for large logits."""
    ids = torch.randint(5, (6, 2), device=device)
    logits = torch.randn(6, 5, dtype=F64, device=device, requires_grad=True)
    eps, tolerance = 1e-3, 1e-3  # computed in float32
    for loss in (lambda z: load_balancing_loss(z, ids, 5), router_z_loss):
        (grad,) = torch.autograd.grad(loss(logits), logits)
        direction = torch.randn_like(logits)
        ahead, behind = loss(logits + eps * direction), loss(logits - eps * direction)
        slope = (ahead - behind).double() / (2 * eps)
        torch.testing.assert_close((grad * direction).sum(), slope, rtol=0, atol=tolerance)


def test_reference_has_the_same_losses(device):
    """They are plain PyTorch already, so the reference's are the same functions."""
    assert reference.load_balancing_loss is load_balancing_loss
    assert reference.router_z_loss is router_z_loss
