"""What has to see a call before autograd does: vmap, tracing, __torch_function__. `ops.run` lets it."""

import pytest
import torch
from cases import Calls
from torch.overrides import TorchFunctionMode

from fused_moe import FusedMoE, grouped_mm, ops, route

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


@pytest.fixture
def rows(device):
    """a (3, 5, 4), three batches of 5 rows; b (2, 3, 4); offsets of two experts."""
    a, b = torch.randn(3, 5, 4, device=device), torch.randn(2, 3, 4, device=device)
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=device)
    return a.requires_grad_(), b.requires_grad_(), offsets


def test_vmap_inside_autograd(device, rows):
    """The batched tensors require no gradient, what they wrap does."""
    a, b, offsets = rows
    out = torch.func.vmap(lambda x: grouped_mm(x, b, offsets))(a)
    expected = torch.stack([grouped_mm(x, b, offsets) for x in a])
    assert torch.equal(out, expected)
    for mine, other in zip(
        torch.autograd.grad(out.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b)), strict=True
    ):
        torch.testing.assert_close(mine, other)
    assert torch.func.vmap(lambda x: route(x, 2)[0])(a).requires_grad


def test_batched_gradients_of_gradients(device, rows):
    a, b, offsets = rows
    x = a[0].detach().requires_grad_()
    out = grouped_mm(x, b, offsets)
    douts = torch.randn(3, *out.shape, device=device)
    (batched,) = torch.autograd.grad(out, x, douts, is_grads_batched=True, create_graph=True)
    (second,) = torch.autograd.grad(batched.sum(), b)
    (single,) = torch.autograd.grad(out, x, douts.sum(0), create_graph=True)
    (expected,) = torch.autograd.grad(single.sum(), b)
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("grad", (True, False))
def test_trace(device, rows, grad, tmp_path):
    """A traced layer holds operators, so that it can be saved and loaded. It is traced once: its check would
    compare with a trace without gradients, which keeps no h."""
    layer = FusedMoE(16, 8, 4, 2, device=device).eval()
    x = torch.randn(5, 16, device=device)
    with torch.set_grad_enabled(grad):
        torch.jit.trace(layer, x, check_trace=False).save(tmp_path / "layer.pt")
        assert torch.equal(torch.jit.load(tmp_path / "layer.pt")(x), layer(x))


def test_torch_function_mode(device, rows):
    """It gets the operator's call, and what it does with the result is differentiated."""
    a, b, offsets = rows
    scale = torch.tensor(2.0, device=device, requires_grad=True)

    class Scale(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * scale if function is ops.ops.grouped_mm.default else result

    with Scale():
        out = grouped_mm(a[0], b, offsets)
    out.sum().backward()
    torch.testing.assert_close(scale.grad, grouped_mm(a[0], b, offsets).sum())


def test_dispatch_mode(device, rows):
    """Each operator is seen once."""
    a, b, offsets = rows
    with Calls() as calls:
        grouped_mm(a[0], b, offsets)
    assert [name for name, *_ in calls.calls if "fused_moe" in name] == ["fused_moe::grouped_mm"]


def test_a_plain_call_goes_past_the_dispatcher(device, rows):
    """The sets of dispatch keys that `run` compares are PyTorch's; if these change, calls become slower."""
    a, b, offsets = rows
    assert ops._is_plain((a, b, offsets))
    with torch.autocast(device.type, torch.bfloat16):
        assert not ops._is_plain((a, b, offsets))
    with Calls():
        assert not ops._is_plain((a, b, offsets))
