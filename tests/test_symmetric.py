"""ExpertParallel(symmetric=True): rows through memory that ranks share, beside one process and all-to-all.

On a GPU all ranks have the same one.
"""

import copy
import errno
import gc
import math
import os
import pickle
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from ranks import started
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from fused_moe import FusedMoE, add_lora, enable_fp8, quantize
from fused_moe.distributed import ExpertParallel
from fused_moe.ops import ops
from fused_moe.symmetric import Exchange, Memory

RANKS = 4
D, F, E, K = 40, 24, 8, 3
TOKENS = (7, 0, 13, 5)  # of each rank
MAX_TOKENS = 16
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def workers(device, tmp_path_factory):
    yield from started(RANKS, device, tmp_path_factory, share_gpu=True)


def new_layer(device, dtype=torch.float32, num_shared_experts=1):
    torch.manual_seed(1)
    return FusedMoE(D, F, E, K, num_shared_experts=num_shared_experts, bias=True).to(device, dtype)


def parallel(layer, device, *, max_tokens=MAX_TOKENS, poison=True, **options):
    """The layer after ExpertParallel, whose memory holds NaN."""
    style = ExpertParallel(symmetric=True, max_tokens=max_tokens, **options)
    style.src_data_rank = None  # gloo scatters no tensors of GPUs; all ranks have the same
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), style)
    if poison:
        layer.experts.peers._memory.barrier()
        layer.experts.peers._memory.ranks[layer.experts.peers.rank].fill_(0xFF)
        layer.experts.peers._memory.barrier()
    return layer


def signals(dtype, tokens=TOKENS):
    """x and dout of all ranks, as lists of one for each rank."""
    generator = torch.Generator().manual_seed(2)
    signals = (torch.randn(sum(tokens), D, generator=generator, dtype=torch.float64) for _ in range(2))
    return [signal.to(dtype).split(tokens) for signal in signals]


def step(layer, x, dout, **options):
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    out.backward(dout)
    grads = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    grads = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return {"out": out.detach(), "dx": x.grad, **grads}


def one_step(rank, device, dtype, options, tokens=TOKENS):
    x, dout = (signal[rank].to(device) for signal in signals(dtype, tokens))
    layer = parallel(new_layer(device, dtype), device, **options)
    return step(layer, x, dout) | {"dropped": layer.experts.dropped_rows}


def all_to_all_step(rank, device, dtype, options):
    x, dout = (signal[rank].to(device) for signal in signals(dtype))
    layer = new_layer(device, dtype)
    return step(
        parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options)), x, dout
    )


def joined(results):
    """The ranks' tensors as those of one process. Gradients of what is replicated are sums already."""
    found = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name in ("out", "dx") or name.startswith("dexperts."):
            found[name] = torch.cat(parts)
        elif name == "dropped":
            found[name] = sum(parts)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
            found[name] = parts[0]
    return found


def expected_step(device, dtype, tokens=TOKENS):
    x, dout = (torch.cat(signal).to(device) for signal in signals(dtype, tokens))
    found = step(new_layer(device, dtype), x, dout)
    return {name: value.cpu() for name, value in found.items()}


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm().item()
        allowed = tolerance * max(value.double().norm().item(), math.sqrt(value.numel()) * 1e-2)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
every_way = pytest.mark.parametrize("combine", ("slot", "rank"))
every_size = pytest.mark.parametrize("static", (False, True), ids=("exact", "static"))


@every_way
@every_size
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(workers, device, combine, static, dtype):
    """Ranks of different numbers of tokens, one without any, and memory that held NaN. Without a capacity
    nothing is dropped."""
    how = {"combine": combine, "static": static, "overflow": "drop"}
    found = joined(workers(one_step, dtype, how))
    assert found.pop("dropped") == 0
    assert_close(found, expected_step(device, dtype), TOLERANCE[dtype])


@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_all_to_all(workers, device, combine, dtype):
    if device.type == "cuda":
        pytest.skip("gloo has no all-to-all of tensors of GPUs")
    found = workers(one_step, dtype, {"combine": combine})
    for own, other in zip(found, workers(all_to_all_step, dtype, {"combine": combine}), strict=True):
        for name, value in other.items():
            assert torch.equal(own[name], value), name


@every_way
def test_all_tokens_on_one_rank(workers, device, combine):
    tokens = (0, MAX_TOKENS, 0, 0)
    found = joined(workers(one_step, torch.float32, {"combine": combine}, tokens))
    assert found.pop("dropped") == 0
    assert_close(found, expected_step(device, torch.float32, tokens), TOLERANCE[torch.float32])


# --- more than one call -------------------------------------------------------------------------------


def two_steps(layers, rank, device, recompute):
    """{"0 out", ...}: of two steps, whose gradients are added."""
    found = {}
    for i in range(2):
        x, dout = (torch.cat(s) if rank is None else s[rank] for s in signals(torch.float32))
        run = layers
        if recompute:
            run = nn.Sequential(*(Checkpointed(layer) for layer in layers))
        results = step(run, x.to(device) + i, dout.to(device))
        found |= {f"{i} {name.replace('layer.', '')}": value.clone() for name, value in results.items()}
    return found


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def layers_without_shared(device):
    """Two, whose backward begins with the exchange; computed again, the forward pass's comes right after."""
    return [new_layer(device, num_shared_experts=0) for _ in range(2)]


def two_layers(rank, device, combine, recompute):
    """Two layers of one style share its memory."""
    style = ExpertParallel(symmetric=True, max_tokens=MAX_TOKENS, combine=combine)
    style.src_data_rank = None
    mesh, layers = init_device_mesh(device.type, (RANKS,)), layers_without_shared(device)
    for layer in layers:
        parallelize_module(layer, mesh, style)
    assert layers[0].experts.peers is layers[1].experts.peers
    assert copy.deepcopy(layers[0]).experts.peers is layers[0].experts.peers
    return two_steps(nn.Sequential(*layers), rank, device, recompute)


@every_way
@pytest.mark.parametrize("recompute", (False, True), ids=("once", "checkpointed"))
def test_layers_share_memory(workers, device, combine, recompute):
    results = workers(two_layers, combine, recompute)
    found = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        is_split = name[2:] in ("out", "dx") or ".experts." in name
        found[name] = torch.cat(parts) if is_split else parts[0]
    layers = nn.Sequential(*layers_without_shared(device))
    expected = {name: value.cpu() for name, value in two_steps(layers, None, device, False).items()}
    assert_close(found, expected, TOLERANCE[torch.float32])


def uneven_steps(rank, device, combine, is_late):
    """Steps of two layers; after each barrier the second rank writes and reads later than the others."""

    def barrier(memory):
        on_time(memory)
        torch.cuda._sleep(10**7) if device.type == "cuda" else time.sleep(0.02)

    on_time = Memory.barrier
    with mock.patch.object(Memory, "barrier", barrier if is_late and rank == 1 else on_time):
        return two_layers(rank, device, combine, True)


@every_way
def test_ranks_wait_for_each_other(workers, device, combine):
    expected = workers(uneven_steps, combine, False)
    for found, of_rank in zip(workers(uneven_steps, combine, True), expected, strict=True):
        assert all(torch.equal(found[name], value) for name, value in of_rank.items())


def without_gradients(rank, device, dtype, options):
    x = signals(dtype)[0][rank].to(device)
    layer = parallel(new_layer(device, dtype), device, **options)
    with torch.no_grad():
        quiet = layer(x)
    return torch.equal(quiet, layer(x))


@every_way
def test_bits_do_not_depend_on_gradients(workers, device, combine):
    """In bf16 on a GPU, whose kernels without gradients are others."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    assert all(workers(without_gradients, dtype, {"combine": combine}))


def graphed(rank, device, combine):
    """Whether a step that a CUDA graph replays has the bits of an eager one. It is the experts' alone: the
    gradients of the rest are summed by gloo, which needs the host."""
    layer = parallel(new_layer(device, torch.bfloat16), device, static=True, combine=combine)
    experts, (x, dout) = layer.experts, (signal[rank].to(device) for signal in signals(torch.bfloat16))
    scores, ids = layer.router(x, None)[:2]
    inputs = [x.clone().requires_grad_(), scores.detach().requires_grad_()]

    def grads():
        return torch.autograd.grad(experts(*inputs, ids)[0], [*inputs, *experts.parameters()], dout)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            grads()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = grads()
    same = []
    for factor in (1, 2):
        with torch.no_grad():
            inputs[0].copy_(factor * x)
        graph.replay()
        same += map(torch.equal, found, grads())
    return same, found[2].norm().item()


@every_way
def test_cuda_graph_of_a_step(workers, device, combine):
    if device.type != "cuda":
        pytest.skip("CPUs have no CUDA graphs")
    for same, norm in workers(graphed, combine):
        assert all(same) and norm > 0


# --- capacity -----------------------------------------------------------------------------------------


def to_experts_0_1_and_2(layer):
    """Every token chooses them: equal scores go to the lowest ids."""
    with torch.no_grad():
        layer.router.gate.weight.zero_()
    return layer


def dropping_step(rank, device, combine, capacity, compute_twice):
    x, dout = (signal[rank].to(device) for signal in signals(torch.float32))
    layer = to_experts_0_1_and_2(new_layer(device))
    how = {"static": True, "capacity": capacity, "overflow": "drop", "combine": combine}
    layer = parallel(layer, device, **how)
    found = step(Checkpointed(layer) if compute_twice else layer, x, dout)
    return {"out": found["out"], "dx": found["dx"], "dropped": layer.experts.dropped_rows}


@every_way
@pytest.mark.parametrize("compute_twice", (False, True), ids=("once", "checkpointed"))
def test_slots_above_the_capacity_are_dropped(workers, device, combine, compute_twice):
    """Experts 0 and 1 are rank 0's, and 2 is rank 1's. Rank 0 has room for expert 0's slots and for the first
    tokens of expert 1; rank 1 for all."""
    num_tokens = sum(TOKENS)
    capacity = 10
    room = RANKS * capacity
    results = workers(dropping_step, combine, capacity, compute_twice)
    assert sum(result["dropped"] for result in results) == 2 * num_tokens - room

    layer = to_experts_0_1_and_2(new_layer(device))
    tokens = torch.arange(num_tokens, device=device)
    ids = torch.arange(K, device=device).repeat(num_tokens, 1)
    ids[tokens >= room - num_tokens, 1] = -1
    x, dout = (torch.cat(signal).to(device) for signal in signals(torch.float32))
    x.requires_grad_()
    scores = layer.router(x, None)[0]
    out = layer.experts(x, scores, ids)[0] + layer.shared_experts(x)
    out.backward(dout)
    found = {name: torch.cat([result[name] for result in results]) for name in ("out", "dx")}
    assert_close(found, {"out": out.detach().cpu(), "dx": x.grad.cpu()}, TOLERANCE[torch.float32])


def overflowing(rank, device, combine):
    x = signals(torch.float32)[0][rank].to(device)
    layer = parallel(
        to_experts_0_1_and_2(new_layer(device)), device, static=True, capacity=10, combine=combine
    )
    with pytest.raises(RuntimeError, match="more than N \\* capacity = 40 slots of a rank"):
        layer(x)
    return True


@every_way
def test_overflow_is_an_error_on_all_ranks(workers, device, combine):
    if device.type == "cuda":
        pytest.skip("a device-side assertion ends the process")
    assert all(workers(overflowing, combine))


# --- what experts can be ------------------------------------------------------------------------------


def other_experts(rank, device, kind, combine):
    """A layer whose experts have adapters or are quantised, and the same in one process."""
    layer = new_layer(device)
    plain = copy.deepcopy(layer)
    if kind == "lora":
        for each in (layer, plain):
            torch.manual_seed(3)
            add_lora(each, rank=4)
            for name, p in each.named_parameters():
                if "lora" in name:
                    nn.init.normal_(p)
    else:
        for each in (layer, plain):
            quantize(each, kind)
    layer = parallel(layer, device, combine=combine)
    x, dout = signals(torch.float32)
    found = step(layer, x[rank].to(device), dout[rank].to(device))
    expected = step(plain, torch.cat(x).to(device), torch.cat(dout).to(device))
    return [{name: values[name] for name in ("out", "dx")} for values in (found, expected)]


@every_way
@pytest.mark.parametrize("kind", ("lora", "int8"))
def test_other_experts(workers, device, kind, combine):
    results = workers(other_experts, kind, combine)
    found = {name: torch.cat([own[name] for own, _ in results]) for name in ("out", "dx")}
    assert_close(found, results[0][1], TOLERANCE[torch.float32])


def two_ways(rank, device, combine):
    """{kind of call: its results by (symmetric exchange, all-to-all)}"""
    mesh = init_device_mesh(device.type, (RANKS,))
    generator = torch.Generator().manual_seed(rank)
    x, dout = (torch.randn(5 + rank, 128, generator=generator) for _ in range(2))
    ids = torch.randint(-1, E, (5 + rank, K), generator=generator)
    ids[0], ids[1, 0] = -1, ids[1, 1]
    hostile = torch.cat((ids[:-1], torch.tensor([[E, 2**32 + 1, -(2**40)]])))

    def routed_to_hostile(layer):
        layer.router.register_forward_hook(lambda router, args, out: (out[0], hostile, out[2]))
        return layer

    def both(change=lambda layer: layer, autocast=False, **options):
        results = []
        for style in (
            ExpertParallel(combine=combine, symmetric=True, max_tokens=8),
            ExpertParallel(combine=combine),
        ):
            torch.manual_seed(1)
            layer = parallelize_module(change(FusedMoE(128, 128, E, K)), mesh, style)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                results.append(list(step(layer, x, dout, **options).values()))
        return results

    return {
        "ids": both(ids=ids),
        "hostile ids": both(routed_to_hostile),
        "num_tokens": both(num_tokens=torch.tensor(rank, dtype=torch.int32)),
        "autocast": both(autocast=True),
        "fp8": both(lambda layer: enable_fp8(layer, force=True)),
    }


@every_way
def test_same_bits_of_hostile_calls(workers, device, combine):
    """Ids without an expert and repeated ones, FP8, autocast, padding, replayed ids."""
    if device.type == "cuda":
        pytest.skip("gloo has no all-to-all of tensors of GPUs")
    for found in workers(two_ways, combine):
        for kind, (own, other) in found.items():
            assert all(map(torch.equal, own, other)), kind


def compiled(rank, device):
    layer, x = parallel(new_layer(device), device), signals(torch.float32)[0][rank].to(device)
    same = torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    return same


def test_a_compiled_layer_has_a_graph_break(workers, device):
    assert all(workers(compiled))


def other_modes(rank, device):
    layer = parallel(new_layer(device), device)
    x = signals(torch.float32)[0][rank].to(device).requires_grad_()
    with torch.inference_mode():  # which makes no tensor that later calls write into
        layer(x)
    scores, ids = layer.router(x, None)[:2]
    out = layer.experts(x, scores.detach(), ids)[0]
    kept = [type(o).__name__ for o in gc.get_objects() if type(o) is Exchange]
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        dx.sum().backward()
    areas = layer.experts.peers.areas(x.dtype)
    layer(x).sum().backward()
    return kept, [area[rank].requires_grad for area in areas]


def test_memory_stays_outside_of_graphs(workers, device):
    """After inference mode and a backward with a graph; and the ids of all ranks go with the forward pass."""
    for kept, in_graph in workers(other_modes):
        assert not kept and not any(in_graph)


# --- bad input ----------------------------------------------------------------------------------------


def one_rank_fails(rank, device, static):
    """In bfloat16, whose memory ends before float32's would."""
    layer = parallel(new_layer(device, torch.bfloat16), device, static=static)
    num_tokens = MAX_TOKENS + 1 if rank == 2 else 3
    x = torch.ones(num_tokens, D, device=device, dtype=torch.bfloat16)
    expected = "at most max_tokens = 16 tokens, found 17"
    if rank != 2:
        expected = "found a call that failed on rank 2" if not static else "symmetric exchange needs"
    with pytest.raises(RuntimeError if static and rank != 2 else ValueError, match=expected):
        layer(x)
    if not static:
        x, ids = x[:3], torch.zeros(3, K, dtype=torch.int32, device=device)
        with pytest.raises((TypeError, ValueError), match="found torch.int32" if rank == 1 else "on rank 1"):
            layer.experts(x.int() if rank == 1 else x, ids.float(), ids)
        assert layer(x).shape == (3, D)  # and the next call works
    return True


@every_size
def test_a_call_that_fails_on_one_rank_raises_on_all(workers, device, static):
    if device.type == "cuda" and static:
        pytest.skip("a device-side assertion ends the process")
    assert all(workers(one_rank_fails, static))


def lonely_barrier(rank, device):
    """Rank 0 waits for ranks that have gone on."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    memory = Memory(64, group, torch.device("cpu"))
    if rank == 0:
        expected = "expected all 4 ranks in the symmetric exchange, found on rank 0: .*[Tt]ime"
        with pytest.raises(RuntimeError, match=expected):
            memory.barrier()
    dist.barrier()
    return True


def test_a_barrier_ends_after_the_timeout_of_the_group(workers, cpu):
    assert all(workers(lonely_barrier))


def barrier_of_gpus(rank, device):
    """PyTorch's barrier gets the group's timeout."""
    handle = mock.Mock()
    handle.get_buffer.return_value = torch.empty(64, dtype=torch.uint8)
    group = dist.new_group(timeout=timedelta(seconds=90))
    with (
        mock.patch.object(symmetric_memory, "empty", lambda *_, **__: torch.empty(64, dtype=torch.uint8)),
        mock.patch.object(symmetric_memory, "rendezvous", lambda *_: handle),
    ):
        Memory(64, group, torch.device("cuda")).barrier()
    handle.barrier.assert_called_once_with(timeout_ms=90_000)
    return True


def test_a_barrier_of_gpus_has_the_timeout_of_the_group(workers, cpu):
    assert all(workers(barrier_of_gpus))


def no_memory(rank, device):
    full = OSError(errno.ENOSPC, "No space left on device")
    expected = "bytes in .* on all ranks, found OSError: .* No space left on device on rank 1"
    with mock.patch.object(os, "posix_fallocate", side_effect=full if rank == 1 else None):
        with pytest.raises(RuntimeError, match=expected):
            parallel(new_layer(device), device)
    layer = parallel(new_layer(device), device)
    with pytest.raises(TypeError, match="expected to save a state dict"):
        pickle.dumps(layer.experts.peers)
    return True


def test_memory_that_one_rank_cannot_have(workers, device):
    if device.type == "cuda":
        pytest.skip("memory of a GPU is not of files")
    assert all(workers(no_memory))


def other_dtype(rank, device):
    layer = parallel(new_layer(device), device)
    x = torch.ones(3, D, device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=rank == 1)
    with autocast, pytest.raises(ValueError, match="on all ranks, found x"):
        layer(x)
    return True


def test_ranks_of_other_dtypes(workers, device):
    assert all(workers(other_dtype))


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({"symmetric": True}, "expected max_tokens with symmetric=True"),
        ({"max_tokens": 4}, "expected max_tokens with symmetric=True"),
        ({"symmetric": True, "max_tokens": 0}, "expected max_tokens >= 1, found 0"),
    ),
    ids=str,
)
def test_arguments(options, expected):
    with pytest.raises(ValueError, match=expected):
        ExpertParallel(**options)


# --- the operator -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", (1, 40, 2056))
@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
def test_sum_peers(device, dtype, weighted, width):
    generator = torch.Generator().manual_seed(4)
    num_ranks, num_rows, num_tokens, top_k = 3, 5, 33, 4
    rows = torch.randn(num_ranks, num_rows, width, generator=generator).to(device, dtype)
    index = torch.randint(-2, num_ranks * num_rows + 2, (num_tokens, top_k), generator=generator)
    scores = torch.rand(num_tokens, top_k, generator=generator).to(device) if weighted else None
    if weighted and dtype == torch.float64:
        scores = scores.double()
    found = ops.sum_peers(list(rows), index.int().to(device), scores)
    exact = torch.cat((rows.flatten(0, 1), rows.new_zeros(1, width))).double()
    is_row = (index >= 0) & (index < num_ranks * num_rows)
    gathered = exact[torch.where(is_row, index, -1).to(device)]
    if weighted:
        gathered *= scores.double().unsqueeze(-1)
    assert found.dtype == dtype
    error = (found.double() - gathered.sum(1)).norm() / gathered.sum(1).norm()
    assert (
        error < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    )


def test_sum_peers_of_nothing(device):
    rows = [torch.zeros(0, 8, device=device)] * 2
    index = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    assert torch.equal(ops.sum_peers(rows, index), torch.zeros(3, 8, device=device))
    assert ops.sum_peers(rows, index[:0]).shape == (0, 8)
    assert torch.equal(ops.sum_peers(rows, index[:, :0]), torch.zeros(3, 8, device=device))
