"""What is saved for backward and when it is freed, no weight-sized copy, more than 2**31 elements."""

import pytest
import torch
from cases import BF16, F32, LAYOUTS, Calls, Case
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fused_moe import FusedMoE, fused_experts, grouped_mlp, permute, route, route_plan, unpermute
from fused_moe import ops as codes
from fused_moe.ops import schedule_words


def saved_storages(run, parameters) -> dict:
    """{storage: (bytes, dtype)} of the tensors that autograd saves in `run`, without parameters."""
    kept = {}
    known = {p.untyped_storage()._cdata for p in parameters}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = (storage.nbytes(), t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    assert out.requires_grad
    return kept


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_saved_bytes(device, layout, score_on):
    """The experts save 2TD + 4TKF + 4TK bytes in bf16, and the int32 row maps."""
    case = Case(256, 64, 48, 8, 4, dtype=BF16, layout=layout, bias=True, score_on=score_on)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    parameters = [t for n, t in leaves.items() if t is not None and n[0] in "wb"]
    kept = saved_storages(
        lambda: fused_experts(**leaves, ids=ids, score_on=score_on, **case.options), parameters
    )
    T, D, F, K, E = case.tokens, case.dim, case.hidden, case.top_k, case.num_experts
    maps = [n for n, dtype in kept.values() if dtype == torch.int32]
    values = [n for n, dtype in kept.values() if dtype != torch.int32]
    h_values = F if layout.startswith("ungated") else 2 * F
    assert sum(values) == 2 * T * D + 2 * T * K * h_values + 4 * T * K
    assert sum(values) <= 2 * T * D + 4 * T * K * F + 4 * T * K
    assert sum(maps) <= 4 * (3 * T * K + (E + 1) + schedule_words(E))


def test_saved_bytes_of_grouped_mlp(device):
    """Contiguous rows: x, h and the offsets, nothing for scores."""
    case = Case(dim=64, hidden=48, num_experts=4, dtype=BF16)
    x = torch.randn(300, 64, device=device).to(BF16).requires_grad_()
    weights = {n: t if t is None else t.requires_grad_() for n, t in case.weights(device).items()}
    counts = torch.tensor([100, 0, 150, 50], device=device)
    parameters = [t for t in weights.values() if t is not None]
    kept = saved_storages(lambda: grouped_mlp(x, **weights, counts=counts), parameters)
    values = [n for n, dtype in kept.values() if dtype != torch.int32]
    maps = [n for n, dtype in kept.values() if dtype == torch.int32]
    assert sum(values) == 2 * 300 * 64 + 4 * 300 * 48
    assert sum(maps) <= 4 * (5 + schedule_words(4))


def test_saved_bytes_of_route(device):
    """The router saves its logits and the chosen ids, not the scores of every expert."""
    logits = torch.randn(100, 64, device=device, dtype=BF16, requires_grad=True)
    kept = saved_storages(lambda: route(logits, 4)[0], [])
    assert sum(n for n, _ in kept.values()) == 2 * 100 * 64 + 4 * 100 * 4


class WatchH(TorchDispatchMode):
    """Watches the storages of h and a without holding them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "fused_moe::experts_up_backward":
            self.h_alive_in_up_backward = not self.h.expired()
        result = func(*args, **(kwargs or {}))
        if func.name() == "fused_moe::experts_up":
            self.h, self.a = (StorageWeakRef(t.untyped_storage()) for t in result)
        if func.name() == "fused_moe::experts_down_backward":
            self.h_alive_in_down_backward = not self.h.expired()
        return result


class Allocations(TorchDispatchMode):
    """(operator, number of elements) of every new tensor except views, without holding any."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        seen = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in seen:
                self.made.append((func.name(), t.numel()))
        return result


def test_h_is_freed_between_the_backward_nodes(device):
    """The backward of experts_down frees h before that of experts_up begins; a is freed at once."""
    case = Case(64, 32, 16, 4, 2)
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    with WatchH() as watch:
        out = fused_experts(**leaves, ids=ids)
        assert watch.a.expired() and not watch.h.expired()
        out.sum().backward()
    assert watch.h_alive_in_down_backward
    assert not watch.h_alive_in_up_backward


@pytest.mark.parametrize("why", ("no_grad", "inference_mode", "frozen"))
def test_inference_keeps_no_h(device, why):
    """Without gradients, beside a plan, experts_up is told to save no h, and allocates none."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    if why != "frozen":
        inputs["w1"].requires_grad_()
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "frozen": torch.enable_grad,
    }[why]
    with Calls() as calls, context():
        fused_experts(**inputs, ids=ids, plan=route_plan(ids, case.num_experts))
    [(args, (h, a))] = calls.of("experts_up")
    assert args[-1] is False and h.numel() == 0 and a.numel()


def test_the_operator_without_gradients_allocates_no_h(cpu):
    """h, 2TKF elements, would be larger than all of the plan, a and y, which are one allocation, its largest.
    Its parts begin at multiples of 256 bytes."""
    case = Case(tokens=64, dim=32, hidden=96, num_experts=4, top_k=4)
    inputs, ids = case.inputs(cpu), case.ids(cpu)
    with torch.profiler.profile(profile_memory=True) as profiled:
        fused_experts(**inputs, ids=ids)
    sizes = [e.self_cpu_memory_usage for e in profiled.events() if e.name == "aten::empty"]
    num_slots, num_experts = ids.numel(), case.num_experts
    plan_words = num_experts + 1 + codes.schedule_words(num_experts) + 3 * num_slots
    parts = (plan_words, num_slots * case.hidden, num_slots * case.dim)
    assert max(sizes) == sum(-(-4 * words // 256) * 256 for words in parts)
    assert max(sizes) < 4 * num_slots * 2 * case.hidden


def test_training_keeps_h(device):
    """If a gradient is needed, all of h is saved."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["w2"].requires_grad_()
    with Calls() as calls:
        fused_experts(**inputs, ids=ids)
    [(args, (h, _))] = calls.of("experts_up")
    assert args[-1] is True and h.shape == (ids.numel(), 2 * case.hidden)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_no_copy_of_a_weight_or_its_gradient(device, dtype, layout):
    """Forward and backward allocate nothing of a weight's size but the gradient that becomes .grad."""
    case = Case(8, 40, 24, 16, 1, dtype=dtype, layout=layout)  # far fewer rows than weights
    inputs, ids = case.inputs(device), case.ids(device)
    weights = [inputs[n].requires_grad_() for n in ("w1", "w2", "w3") if inputs[n] is not None]
    smallest = min(w.numel() for w in weights)
    dout = case.dout(device)
    with Allocations() as allocations:
        out = fused_experts(**inputs, ids=ids, **case.options)
        out.backward(dout)
    large = sorted(name for name, numel in allocations.made if numel >= smallest)
    up_side = len(weights) - 1
    down, up = "fused_moe::experts_down_backward", "fused_moe::experts_up_backward"
    assert large == [down] + [up] * up_side
    for w in weights:
        assert w.grad.stride() == w.stride()


def test_the_ids_plan_is_made_once(device):
    """A layer computes one plan, however many operators read it."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["x"].requires_grad_()
    with Calls() as calls:
        fused_experts(**inputs, ids=ids).sum().backward()
    assert len(calls.of("route_plan")) == 1
    ours = [n for n, _, _ in calls.calls if n.startswith("fused_moe::")]
    assert ours == [
        f"fused_moe::{n}"
        for n in (
            "route_plan",
            "experts_up",
            "experts_down",
            "experts_down_backward",
            "experts_up_backward",
        )
    ]
    assert codes.ops.route_plan is torch.ops.fused_moe.route_plan


def test_backward_makes_no_zeros(device):
    """Autograd gives zeros to a node for each output without a gradient, such as ids, unless told not to."""
    layer = FusedMoE(16, 8, 4, 2, device=device)
    x = torch.randn(5, 16, device=device, requires_grad=True)
    out = layer(x)
    dout = torch.ones_like(out)
    with Calls() as calls:
        out.backward(dout)
    names = [name for name, _, _ in calls.calls]
    assert "fused_moe::experts_backward" in names
    assert not [name for name in names if "zero" in name or "fill" in name or "full" in name]


def available_bytes() -> int:
    """Memory that Linux reports as available."""
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def test_more_than_2_to_the_31_numbers(device):
    """rows x width beyond 2**31: the last rows are complete, and every token gets its own bits back."""
    available = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if available < 12 << 30:
        pytest.skip(f"needs 12 GiB of free memory, found {available / 2**30:.1f} GiB")
    tokens, top_k, dim = 64, 32, 1_050_000
    assert tokens * top_k * dim > 2**31
    x = torch.arange(tokens, device=device, dtype=BF16).unsqueeze(1).expand(-1, dim).contiguous()
    x[:, -3:] += 0.5  # so the end of a row differs from its middle
    ids = (torch.arange(tokens)[:, None] + torch.arange(top_k)).remainder(40).to(device)
    rows, plan = permute(x, ids, 40)
    for r in (0, 1023, 1024, 2045, 2046, 2047):
        assert torch.equal(rows[r], x[plan.row_token[r].long()]), r
    scores = torch.full((tokens, top_k), 1 / top_k, device=device)
    assert torch.equal(unpermute(rows, plan, scores), x)
