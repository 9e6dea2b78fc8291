"""What only a large or a busy device shows: synchronisation, memory kept, tensors of more than 2**31
elements."""

import os

import pytest
import torch
from cases import BF16, Case, assert_near, forward_backward, make_ids
from gpu_cases import needs_memory, ops, settings_of

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, grouped_mm, reference

pytestmark = pytest.mark.gpu


# --- the host does not wait, and allocates no memory ----------------------------------------------


def everything(device):
    """A function that runs the layer, its losses and every public function once, forward and backward."""
    module = FusedMoE(
        64, 48, 8, 2, score_func="sigmoid", route_norm=True, num_shared_experts=1, shared_expert_gate=True,
        load_balance_coeff=1e-3, bias=True, device=device, dtype=BF16,
    )  # fmt: skip
    x, dout = (torch.randn(300, 64).to(device, BF16) for _ in range(2))
    counts = torch.tensor([100, 0, 150, 20], device=device)
    case = Case(300, 64, 48, 4, 2, BF16)
    inputs, ids = case.inputs(device), case.ids(device)
    rows = {n: inputs[n] for n in ("w1", "w2", "w3")} | {"x_rows": x}
    offsets = counts.cumsum(0).int()

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
        forward_backward(grouped_mm, {"a": x, "b": inputs["w2"].mT}, dout[:, :48], offsets=offsets)
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


# --- more than 2**31 elements ---------------------------------------------------------------------


def test_large_products(device, returned):
    """grouped_mm and wgrad of rows x width beyond 2**31, as input and as output."""
    needs_memory(device, 24)
    width, counts = 32768, [30_000, 0, 40_001]
    offsets = torch.tensor(counts, device=device).cumsum(0).int()
    total = sum(counts)
    assert total * width > 2**31
    a = torch.randn(total, 64, device=device, dtype=BF16)
    b = torch.randn(3, width, 64, device=device, dtype=BF16) / 8
    dout = torch.randn(total, width, device=device, dtype=BF16) / 16
    found = forward_backward(grouped_mm, {"a": a, "b": b}, dout, offsets=offsets)
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
    """h of more than 2**31 elements: outputs and gradients of some tokens, and of the outermost columns."""
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
    """Weights, and gradients, of more than 2**31 elements: the first and the last experts."""
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
    outer = torch.tensor([0, experts - 1], device=device)
    few = {"x": x.double(), "w1": w1[outer].double(), "w2": w2[outer].double(), "scores": scores.double()}
    few_ids = torch.where(ids == 0, 0, torch.where(ids == experts - 1, 1, -1))
    exact = forward_backward(reference.fused_experts, few, dout.double(), w3=None, ids=few_ids)
    assert_near(found["out"][:40], exact["out"][:40])
    assert_near(found["dx"][:40], exact["dx"][:40])
    assert_near(found["dw1"][outer], exact["dw1"])
    assert_near(found["dw2"][outer], exact["dw2"])


def test_large_gather(device, returned):
    """x of more than 2**31 elements, read through row_token. test_large_products and _hidden have the
    rest."""
    needs_memory(device, 12)
    tokens, dim = 70_001, 32768
    assert tokens * dim > 2**31
    x = torch.randn(tokens, dim, device=device, dtype=BF16)
    w1, w3 = (torch.randn(2, 8, dim, device=device, dtype=BF16) / dim**0.5 for _ in range(2))
    ids = (torch.arange(tokens, device=device, dtype=torch.int32) % 2)[:, None]
    plan = fused_moe.route_plan(ids, 2)
    settings = settings_of(Case(dtype=BF16))
    h, _ = ops.up_gate(x=x, w1=w1, w3=w3, b1=None, b3=None, plan=plan.tensors, **settings)
    for token in (0, 1, 65_535, 65_536, tokens - 2, tokens - 1):
        expert = token % 2
        exact = torch.cat([w1[expert], w3[expert]]).double() @ x[token].double()
        assert_near(h[plan.token_row[token, 0]], exact)
