"""fused_moe.distributed and fully_shard in two processes: the outputs, gradients and state dicts of one.

The tests share two worker processes, because starting one takes longer than any test. A test sends both a
function of this file and checks their results here.
"""

import copy
import itertools
import math
import warnings
from contextlib import nullcontext
from functools import partial
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.checkpoint as dcp
from ranks import started
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, add_lora, exchange, quantize, reference
from fused_moe.checkpoint import blocks, load_layer, to_hf
from fused_moe.distributed import ExpertParallel
from fused_moe.quantized import sharding, tiles
from fused_moe.quantized.formats import FORMATS

RANKS = 2
T, D, F, E, K = 22, 20, 12, 6, 2
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # of the norm; bf16 rounds dy once more for the exchange


# --- two workers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(device, tmp_path_factory):
    yield from started(RANKS, device, tmp_path_factory)


@pytest.fixture(scope="module")
def four_workers(device, tmp_path_factory):
    yield from started(4, device, tmp_path_factory)


# --- what is compared ---------------------------------------------------------------------------------


def new_layer(device, dtype=torch.float32):
    """A layer with every kind of parameter and buffer, the same in every process."""
    torch.manual_seed(1)
    layer = FusedMoE(
        D,
        F,
        E,
        K,
        score_func="sigmoid",
        num_shared_experts=1,
        load_balance_coeff=0.01,
        bias=True,
        gate_bias=True,
    )
    return layer.to(device, dtype)


def new_signals(device, dtype=torch.float32):
    """x and dout of all ranks, concatenated."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(T, D, generator=generator).to(device, dtype) for _ in range(2)]


UNEVEN, EVEN = T // 3, T // 2  # tokens of the first rank


def share(rank, tokens, cut=UNEVEN):
    """This rank's tokens."""
    return tokens[:cut] if rank == 0 else tokens[cut:]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def step(layer, x, dout, **options):
    """{"out", "dx", "d" + parameter}, and the buffers after the step's update of the bias."""
    x = x.requires_grad_()
    out = layer(x, **options)
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    found |= {f"d{name}": whole(p.grad) for name, p in layer.named_parameters()}
    layer.update_expert_bias()
    return {**found, "expert_bias": layer.expert_bias}


def merged(results, added):
    """The ranks' tensors as those of one process: tokens concatenated, `added` gradients summed."""
    first, second = results
    assert first.keys() == second.keys()
    merge = {}
    for name, value in first.items():
        if name in ("out", "dx", "dscores"):
            merge[name] = torch.cat([value, second[name]])
        elif name in added:
            merge[name] = value + second[name]
        else:
            assert torch.equal(value, second[name]), f"{name} differs between the ranks"
            merge[name] = value
    return merge


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        value = value.cpu()
        assert found[name].shape == value.shape and found[name].dtype == value.dtype, name
        error = (found[name].double() - value.double()).norm().item()
        allowed = tolerance * max(value.double().norm().item(), math.sqrt(value.numel()) * 1e-2)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


EXCHANGES = {  # by all-to-all
    "exact": {},
    "static": {"static": True},
    "rank": {"combine": "rank"},
    "rank, static": {"combine": "rank", "static": True},
}
shared_memory = {"symmetric": True, "max_tokens": 700}  # of any test's call
SYMMETRIC = {
    "symmetric": shared_memory,
    "rank, symmetric, static": {**shared_memory, "combine": "rank", "static": True},
}
every_all_to_all = pytest.mark.parametrize("options", EXCHANGES.values(), ids=EXCHANGES)
every_exchange = pytest.mark.parametrize(
    "options", (EXCHANGES | SYMMETRIC).values(), ids=EXCHANGES | SYMMETRIC
)
static_alone = pytest.mark.parametrize("options", (EXCHANGES["static"], EXCHANGES["rank, static"]), ids=str)


def cut_of(options):
    """With a static capacity all ranks need the same number of tokens."""
    return EVEN if "static" in options else UNEVEN


# --- the experts alone, any routing -------------------------------------------------------------------


CONTEXTS = {  # of selective checkpoints
    "selective": [torch.ops._c10d_functional.all_to_all_single.default],
    "everything": lambda *_, **__: CheckpointPolicy.MUST_SAVE,
}


def experts_step(experts, x, scores, ids, dout, recompute="once"):
    x, scores = x.requires_grad_(), scores.requires_grad_()
    run = experts
    if recompute == "compiled":
        run = torch.compile(experts, backend="aot_eager", fullgraph=True)
    if recompute != "once":
        kept = {}
        if recompute in CONTEXTS:
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, CONTEXTS[recompute])
        run = partial(checkpoint, run, use_reentrant=False, **kept)
    out, counts = run(x, scores, ids)
    out.backward(dout)
    grads = {f"d{name}": whole(p.grad) for name, p in experts.named_parameters()}
    return {"out": out.detach(), "counts": counts, "dx": x.grad, "dscores": scores.grad, **grads}


def experts_signals(device, ids):
    x, dout = new_signals(device)
    scores = torch.rand(T, K, generator=torch.Generator().manual_seed(3)).add(0.1)
    return x, scores.to(device), ids.to(device), dout


def parallel_experts(rank, device, ids, options, cut, recompute="once"):
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    own = [share(rank, signal, cut).clone() for signal in experts_signals(device, ids)]
    found = experts_step(layer.experts, *own, recompute)
    return {**found, "dropped": layer.experts.dropped_rows}


@every_exchange
@pytest.mark.parametrize("routing", cases.ROUTINGS)
def test_any_routing(workers, device, routing, options):
    """Experts without rows, all rows for one rank's expert, remote ids, no rows at all."""
    ids = cases.make_ids(routing, T, K, E)
    results = workers(parallel_experts, ids, options, cut_of(options))
    found = merged(results, added=("counts", "dropped"))
    assert found.pop("dropped") == 0
    expected = experts_step(new_layer(device).experts, *experts_signals(device, ids))
    assert_close(found, expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("combine", ("slot", "rank"))
def test_a_rank_without_tokens(workers, device, combine):
    ids = cases.make_ids("random", T, K, E)
    found = merged(workers(parallel_experts, ids, {"combine": combine}, 0), added=("counts", "dropped"))
    assert found.pop("dropped") == 0
    expected = experts_step(new_layer(device).experts, *experts_signals(device, ids))
    assert_close(found, expected, TOLERANCE[torch.float32])


def kept_ids(ids, capacity, combine):
    """ids of one rank, -1 where a slot exceeds a peer's capacity, in expert order, or a token does; and how
    many rows that are."""
    if combine == "rank":
        is_peers = torch.stack([ids // (E // RANKS) == peer for peer in range(RANKS)])
        rows = is_peers.any(2).cumsum(1)
        is_kept = (is_peers & (rows <= capacity).unsqueeze(2)).any(0)
        return torch.where(is_kept, ids, -1), int((rows[:, -1] - capacity).clamp_min(0).sum())
    order = ids.flatten().argsort(stable=True)
    kept = torch.full_like(ids.flatten(), -1)
    for peer in range(RANKS):
        of_peer = order[ids.flatten()[order] // (E // RANKS) == peer][:capacity]
        kept[of_peer] = ids.flatten()[of_peer]
    return kept.view_as(ids), int((kept < 0).sum())


@pytest.mark.parametrize("combine, capacity", (("slot", 9), ("rank", 6)))
@pytest.mark.parametrize("recompute", ("once", "checkpointed", "compiled"))
def test_overflow_is_counted(workers, device, recompute, combine, capacity):
    """Dropped rows add nothing and are counted, once even if recomputed. A row is a slot, or all slots that a
    token has on a rank."""
    ids = cases.make_ids("random", T, K, E)
    options = {"static": True, "capacity": capacity, "overflow": "drop", "combine": combine}
    found = merged(workers(parallel_experts, ids, options, EVEN, recompute), added=("counts", "dropped"))
    kept, dropped = zip(
        *(kept_ids(share(r, ids, EVEN), capacity, combine) for r in range(RANKS)), strict=True
    )
    kept = torch.cat(kept)
    assert found.pop("dropped") == sum(dropped) > 0
    assert not found["dscores"][kept < 0].any()
    expected = experts_step(new_layer(device).experts, *experts_signals(device, kept))
    expected["counts"] = ids.flatten().bincount(minlength=E).int()  # as the router chose them
    assert_close(found, expected, TOLERANCE[torch.float32])


@static_alone
def test_overflow_is_an_error(workers, cpu, options):
    """On every rank, also if the rows of one alone are too many. On a GPU this terminates the process, as any
    device-side assertion."""
    ids = torch.cat((cases.make_ids("one", EVEN, K, E), cases.make_ids("none", T - EVEN, K, E)))
    error = "RuntimeError: ExpertParallel: more than capacity = 9 rows for a rank"
    assert workers(failed_call, ids, {**options, "capacity": 9}, EVEN) == [error] * RANKS


def failed_call(rank, device, *args):
    try:
        parallel_experts(rank, device, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def capacity_of(options):
    """The name of the number of rows that go there between two ranks."""
    return "capacity" if "combine" in options else "min(T, capacity)"


@static_alone
def test_unequal_capacities_are_an_error(workers, cpu, options):
    """The default capacity is that of a rank's tokens."""
    errors = workers(failed_call, cases.make_ids("random", T, K, E), options, UNEVEN)
    needs = "static exchange needs x (T, 20) of torch.float32 and ids (T, 2) and one"
    needs = f"{needs} {capacity_of(options)} on all ranks"
    assert errors == [f"RuntimeError: ExpertParallel: {needs}"] * RANKS


# --- the layer ----------------------------------------------------------------------------------------

REPLICATED = ("router", "shared_experts")


def parallel_layer(rank, device, dtype, options):
    layer = new_layer(device, dtype)
    before = layer.state_dict()
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), {"experts": ExpertParallel(**options)})
    for name, p in layer.experts.named_parameters():
        assert p.placements == (Shard(0),) and p.to_local().size(0) == E // RANKS, name
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(whole(after[name]), value) for name, value in before.items())
    x, dout = new_signals(device, dtype)
    cut = cut_of(options)
    return step(layer, share(rank, x, cut).clone(), share(rank, dout, cut))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@every_exchange
def test_layer(workers, device, dtype, options):
    """Output, every gradient, expert_bias and the state dict of the layer on one process."""
    expected = step(new_layer(device, dtype), *new_signals(device, dtype))
    added = [name for name in expected if name[1:].startswith(REPLICATED)]
    found = merged(workers(parallel_layer, dtype, options), added)
    assert_close(found, expected, TOLERANCE[dtype])


def padded(tokens, count):
    return torch.cat([tokens, tokens.new_full((count, tokens.size(1)), torch.nan)])


def padded_layer(rank, device, options):
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), {"experts": ExpertParallel(**options)})
    cut = cut_of(options)
    x, dout = (padded(share(rank, t, cut), 3) for t in new_signals(device))
    num_tokens = torch.tensor(len(x) - 3, device=device)
    found = step(layer, x, dout, num_tokens=num_tokens)
    for name in ("out", "dx"):
        assert not found[name][-3:].count_nonzero(), name
        found[name] = found[name][:-3]
    return found


@every_exchange
def test_padding(workers, device, options):
    """Padded tokens are not sent; each rank has its own number of real ones."""
    expected = step(new_layer(device), *new_signals(device))
    added = [name for name in expected if name[1:].startswith(REPLICATED)]
    found = merged(workers(padded_layer, options), added)
    assert_close(found, expected, TOLERANCE[torch.float32])


def autocast_layer(rank, device, combine):
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(combine=combine))
    sent = []
    with torch.autocast(device.type, dtype=torch.bfloat16), cases.Calls() as calls:
        out = layer(share(rank, new_signals(device)[0]))
        sent += [args[0].dtype for name, args, _ in calls.calls if name.endswith("all_to_all_single")]
    return out.detach(), sent


@pytest.mark.parametrize("combine", ("slot", "rank"))
def test_autocast(workers, device, combine):
    """Rows are exchanged in the dtype of the GEMMs, scores in float32."""
    results = workers(autocast_layer, combine)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        expected = new_layer(device)(new_signals(device)[0])
    found = torch.cat([out for out, _ in results])
    assert_close({"out": found}, {"out": expected.detach()}, TOLERANCE[torch.bfloat16])
    for _, sent in results:
        assert sent == [torch.int32, torch.float32, torch.bfloat16, torch.bfloat16]


def main_grad_layer(rank, device, split, combine):
    """The experts' gradients, accumulated into main_grads of ones."""
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(combine=combine))
    weights = {n: p for n, p in layer.experts.named_parameters() if n.startswith("w")}
    for p in weights.values():
        p.main_grad = torch.ones_like(p)
    x, dout = new_signals(device)
    x, dout = share(rank, x).requires_grad_(), share(rank, dout)
    weights["w2"].grad_added_to_main_grad = False
    out = layer(x)
    torch.autograd.grad(out, x, dout, retain_graph=True)
    assert all((p.main_grad.to_local() == 1).all() for p in weights.values())
    if split:
        (_,), groups = stage_backward_input([out], [dout], [x], layer.parameters())
        assert all((p.main_grad.to_local() == 1).all() for p in weights.values())
        stage_backward_weight(layer.parameters(), groups)
        assert all(not p.grad.to_local().any() for n, p in weights.items() if n != "w2")
    else:
        out.backward(dout)
        assert all(p.grad is None for n, p in weights.items() if n != "w2")
    assert weights["w2"].grad.shape == weights["w2"].shape and weights["w2"].grad_added_to_main_grad
    return {f"dexperts.{n}": whole(p.main_grad) - 1 for n, p in weights.items()}


split_alone = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="before PyTorch 2.12 pipelining's split loses the node of an autograd.Function",
)


@pytest.mark.parametrize("combine", ("slot", "rank"))
@pytest.mark.parametrize("split", (False, pytest.param(True, marks=split_alone)))
def test_main_grads(workers, device, split, combine):
    """Added to where a weight's gradient is asked for, by torch.distributed.pipelining's split, too."""
    found = merged(workers(main_grad_layer, split, combine), added=())
    expected = step(new_layer(device), *new_signals(device))
    assert_close(found, {name: expected[name] for name in found}, TOLERANCE[torch.float32])


# --- the same bits on one rank and on two -------------------------------------------------------------

COUNTS = (6, 22, 700)  # tokens of all ranks: few slots have separate kernels
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)


def wide_layer(device, dtype, options, ranks):
    """A layer whose widths every tier takes, its experts over one rank or two."""
    torch.manual_seed(6)
    layer = FusedMoE(128, 72, 8, 3, bias=True, num_shared_experts=1).to(device, dtype)
    mesh = init_device_mesh(device.type, (RANKS // ranks, ranks), mesh_dim_names=("dp", "ep"))
    return parallelize_module(layer, mesh["ep"], ExpertParallel(**options))


def wide_signals(count, routing, device, dtype):
    """x, scores, ids and dout of all ranks."""
    generator = torch.Generator().manual_seed(count)
    x, dout = (torch.randn(count, 128, generator=generator).to(device, dtype) for _ in range(2))
    scores = torch.rand(count, 3, generator=generator).add(0.1).to(device)
    return x, scores, cases.make_ids(routing, count, 3, 8).to(device), dout


def rank_tokens(rank, ranks, options, *signals):
    """The tokens of a rank: with one rank of experts all tokens, with two the rank's share."""
    cut = len(signals[0]) // (2 if "static" in options else 3)
    return [(s if ranks == 1 else share(rank, s, cut)).clone() for s in signals]


def wide_experts(rank, device, dtype, options, ranks):
    layer, found = wide_layer(device, dtype, options, ranks), {}
    # The CPU tier has one kernel for any number of slots.
    counts = COUNTS if device.type == "cuda" or "combine" not in options else COUNTS[:2]
    for routing, count in itertools.product(cases.ROUTINGS, counts):
        signals = wide_signals(count, routing, device, dtype)
        layer.zero_grad()
        step = experts_step(layer.experts, *rank_tokens(rank, ranks, options, *signals))
        found[routing, count] = {name: step[name] for name in ("out", "dx", "dscores")}
    return found


def whole_layers(rank, device, dtype, options, ranks):
    layer, found = wide_layer(device, dtype, options, ranks), {}
    for count in COUNTS:
        x, _, _, dout = wide_signals(count, "random", device, dtype)
        x, dout = rank_tokens(rank, ranks, options, x, dout)
        out = layer(x.requires_grad_())
        out.backward(dout)
        found["chosen", count] = {"out": out.detach(), "dx": x.grad}
    return found


def check_ranks(workers, fn, dtype, options, same):
    """Calls same(found, expected) for experts on one rank: the other rank's, then those on both."""
    first, second = workers(fn, dtype, options, 1)
    halves = workers(fn, dtype, options, 2)
    for key, expected in first.items():
        same(second[key], expected)
        same(merged([half[key] for half in halves], added=()), expected)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        differ = found[name] != value  # NaN, too
        assert not differ.any(), f"{name}: {differ.sum()} of {value.numel()} differ"


def tolerance_of(dtype):
    return TOLERANCE[torch.float32 if dtype == torch.float32 else torch.bfloat16]


@DTYPES
@every_exchange
def test_experts_over_one_rank_and_two(workers, device, dtype, options):
    """A token's output and gradients do not depend on how many ranks have the experts, nor on which tokens a
    rank sends: bit for bit on GPUs (docs/inference.md), unless partial sums come back. The CPU tier keeps
    bits for the same batch only."""
    has_bits = device.type == "cuda" and "combine" not in options
    same = assert_same_bits if has_bits else partial(assert_close, tolerance=tolerance_of(dtype))
    check_ranks(workers, wide_experts, dtype, options, same)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("options", ({}, {"static": True}), ids=("exact", "static"))
def test_layer_over_one_rank_and_two(workers, dtype, options):
    """The same of a whole layer, which chooses the experts: router and shared experts are on every rank."""
    check_ranks(workers, whole_layers, dtype, options, assert_same_bits)


# --- many shapes, four ranks --------------------------------------------------------------------------

MANY = (  # experts, experts per token, ranks that have the experts, a layer's other settings
    (4, 1, 4, {"dtype": torch.float64}),
    (4, 4, 4, {"dtype": torch.float64, "bias": True}),  # every token is sent to every rank
    (8, 5, 4, {"dtype": torch.float64}),  # more experts per token than on a rank, and than ranks
    (8, 5, 2, {"dtype": torch.float64}),
    (8, 3, 1, {"dtype": torch.float64}),
    *((8, 3, 4, {"activation": name, "gated": i % 2 == 0}) for i, name in enumerate(cases.ACTIVATIONS)),
    (8, 3, 4, {"dtype": torch.bfloat16}),
)


def many_layer(num_experts, top_k, settings):
    torch.manual_seed(3)
    return FusedMoE(D, F, num_experts, top_k, **settings)


def many_signals(num_experts, top_k, routing, dtype=torch.float32, **_):
    x, dout = new_signals("cpu", dtype)
    scores = torch.rand(T, top_k, generator=torch.Generator().manual_seed(3)).add(0.1)
    return x, scores.to(cases.score_dtype(dtype)), cases.make_ids(routing, T, top_k, num_experts), dout


def many_shapes(rank, device, options):
    """The last of three ranks that send has one token more than the others; the fourth has none."""
    found = []
    for num_experts, top_k, ranks, settings in MANY:
        mesh = init_device_mesh(device.type, (4 // ranks, ranks), mesh_dim_names=("dp", "ep"))
        layer = many_layer(num_experts, top_k, settings).to(device)
        experts = parallelize_module(layer, mesh["ep"], ExpertParallel(**options)).experts
        for routing in ("repeats", "sentinels"):
            experts.zero_grad()
            signals = many_signals(num_experts, top_k, routing, **settings)
            own = [signal.tensor_split((7, 14, T))[rank].to(device) for signal in signals]
            step = experts_step(experts, *(t.clone() for t in own))
            found.append({name: step[name] for name in ("out", "dx", "dscores", "counts")})
    return found


@pytest.mark.parametrize(
    "options", (EXCHANGES["rank"], {**EXCHANGES["rank, static"], "capacity": T}), ids=str
)
def test_partial_sums_of_many_shapes(four_workers, device, options):
    """On one, two and four ranks: experts per token against experts per rank, activations, dtypes."""
    results = four_workers(many_shapes, options)
    shapes = itertools.product(MANY, ("repeats", "sentinels"))
    for (shape, routing), *parts in zip(shapes, *results, strict=True):
        num_experts, top_k, _, settings = shape
        layer = many_layer(num_experts, top_k, settings)
        expected = experts_step(layer.experts, *many_signals(num_experts, top_k, routing, **settings))
        found = {name: torch.cat([part[name] for part in parts]) for name in ("out", "dx", "dscores")}
        found["counts"] = sum(part["counts"] for part in parts)
        dtype = settings.get("dtype", torch.float32)
        tolerance = 1e-12 if dtype == torch.float64 else TOLERANCE[dtype]
        assert_close(found, {name: expected[name] for name in found}, tolerance)


# --- slots: tokens go there once for each rank, and the bits are those of an exchange of slots ----------


def exchange_of_slots(experts, x, scores, ids):
    """combine="slot" by T * K rows both ways, which autograd takes back in backward."""
    group, num_ranks = experts.mesh.get_group(), experts.mesh.size()
    rows, plan = fused_moe.permute(x, ids, experts.num_experts)
    sent = plan.counts.view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    splits = sent.sum(1).tolist(), received.sum(1).tolist()
    num_rows = sum(splits[0])
    rows = collectives.all_to_all_single_autograd(rows[:num_rows], *reversed(splits), group)
    local_ids = torch.arange(sent.size(1), device=x.device).repeat(num_ranks)
    local_ids = local_ids.repeat_interleave(received.flatten()).unsqueeze(1)
    ones = torch.ones(len(rows), 1, dtype=scores.dtype, device=x.device)
    y = experts._local_experts(rows, ones, local_ids)
    y = collectives.all_to_all_single_autograd(y, *splits, group)
    y = torch.nn.functional.pad(y, (0, 0, 0, len(plan.row_token) - num_rows))
    return fused_moe.unpermute(y, plan, scores), plan.counts


def both_exchanges(rank, device, num_ranks, options):
    """(found, expected) of each shape: a step of experts and of the same ones by exchange_of_slots."""
    cuts = range(0, 21, 20 // num_ranks) if "static" in options else (0, 0, 9, T, T)[-num_ranks - 1 :]
    found = []
    for num_experts, top_k, ranks, settings in MANY:
        if num_experts % num_ranks or ranks == 1:
            continue
        mesh = init_device_mesh(device.type, (num_ranks,))
        layer = many_layer(num_experts, top_k, settings).to(device)
        experts = parallelize_module(layer, mesh, ExpertParallel(**options)).experts
        for routing in cases.ROUTINGS:
            signals = many_signals(num_experts, top_k, routing, **settings)
            own = [signal[cuts[rank] : cuts[rank + 1]].to(device) for signal in signals]
            steps = []
            for forward in (type(experts).forward, exchange_of_slots):
                experts.zero_grad()
                with mock.patch.object(type(experts), "forward", forward):
                    steps.append(experts_step(experts, *(t.clone() for t in own)))
            found.append(steps)
    return found


def check_bits_of_slots(workers, num_ranks, options):
    for steps in workers(both_exchanges, num_ranks, options):
        assert len(steps) >= 3 * len(cases.ROUTINGS)
        for found, expected in steps:
            given = {name: value for name, value in expected.items() if value is not None}
            assert {"out", "dx", "dscores", "dw1", "dw2"} <= given.keys()
            assert_same_bits({name: found[name] for name in given}, given)


slot_alone = pytest.mark.parametrize("options", ({}, {"static": True, "capacity": T * 4}), ids=str)


@slot_alone
def test_bits_of_an_exchange_of_slots(workers, device, options):
    """Outputs and all gradients, the weights' too, whatever the routing; also where a rank has no tokens."""
    check_bits_of_slots(workers, RANKS, options)


@slot_alone
def test_bits_of_an_exchange_of_slots_on_four_ranks(four_workers, device, options):
    check_bits_of_slots(four_workers, 4, options)


def rows_of_exchanges(rank, device, num_ranks, options):
    """The shapes that a rank sends, forward and backward, and its ids."""
    ids = torch.rand(16, 8, generator=torch.Generator().manual_seed(rank)).argsort(1)[:, :5]
    torch.manual_seed(1)
    experts = FusedMoE(D, F, 8, 5, device=device).experts
    parallelize_module(experts, init_device_mesh(device.type, (num_ranks,)), ExpertParallel(**options))
    x, dout = (torch.randn(16, D, device=device, requires_grad=True) for _ in range(2))
    scores = torch.rand(16, 5, device=device, requires_grad=True)
    shapes = []
    with cases.Calls() as calls:
        out, _ = experts(x, scores, ids.to(device))
        shapes.append([tuple(a[0].shape) for n, a, _ in calls.calls if n.endswith("all_to_all_single")])
        calls.calls.clear()
        out.backward(dout)
        shapes.append([tuple(a[0].shape) for n, a, _ in calls.calls if n.endswith("all_to_all_single")])
    return ids, shapes


@pytest.mark.parametrize("options", ({}, {"static": True}, {"static": True, "capacity": 12}), ids=str)
def test_a_token_is_sent_once_to_a_rank(four_workers, cpu, options):
    """A row for each token and rank there, in forward and in backward; one for each slot back."""
    options = {**options, "overflow": "drop"}
    results = four_workers(rows_of_exchanges, 4, options)
    ids = [ids for ids, _ in results]
    for rank, (own, (forward, backward)) in enumerate(results):
        tokens = sum(len(set(token)) for token in (own // 2).tolist())
        returned = sum(int((other // 2 == rank).sum()) for other in ids)
        capacity = options.get("capacity", 32)
        if "static" in options:
            tokens, returned = 4 * min(16, capacity), 4 * capacity
        assert tokens < 16 * 5
        assert forward == [(4, 3), (tokens, 10), (tokens, D), (returned, D)]
        assert backward == [(tokens, D), (returned, D)]


def order_of_a_step(rank, device, options):
    """The names of a step's operators, forward and backward."""
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    with cases.Calls() as forward:
        out = layer(torch.randn(T, D, device=device, requires_grad=True))
    with cases.Calls() as backward:
        out.square().sum().backward()
    return [[name.split("::")[1] for name, *_ in of_pass.calls] for of_pass in (forward, backward)]


exact_alone = pytest.mark.parametrize("options", ({}, {"combine": "rank"}), ids=str)


@exact_alone
def test_exact_exchanges_run_beside_other_work(workers, cpu, options):
    """Shared experts are computed while rows come back, or their gradients go there, and the weights'
    gradients while those of rows go back. Rows start one after the other once their sizes are known, and what
    does not need them is made before they are waited for."""
    views = {"slice.Tensor", "view", "unsqueeze", "detach", "alias"}
    for forward, backward in workers(order_of_a_step, options):

        def places(names, name):
            return [i for i, other in enumerate(names) if other == name]

        *_, sent = places(forward, "all_to_all_single")
        routed, shared = places(forward, "experts_up")
        assert routed < sent < shared < forward.index("wait_tensor", sent)
        _, chosen, rows, _ = places(forward, "all_to_all_single")
        assert forward[chosen + 1 : rows] == ["slice.Tensor"]
        arrived = max(i for i in places(forward, "wait_tensor") if i < routed)
        assert set(forward[arrived + 1 : routed]) - views <= {"permute", "route_plan"}
        dout, drows, *_ = places(backward, "all_to_all_single")
        shared, dx, dw = places(backward, "experts_up_backward")
        assert dout < shared < backward.index("wait_tensor") < dx < drows < dw
        assert dw < backward.index("wait_tensor", drows)


HOOKS = {
    "before": lambda experts, note: experts.register_forward_pre_hook(lambda _, args: note(args)),
    "after": lambda experts, note: experts.register_forward_hook(lambda _, args, out: note((*args, *out))),
    "of all modules": lambda experts, note: register_module_forward_hook(
        lambda module, args, out: note((*args, *out)) if module is experts else None
    ),
    "of backward": lambda experts, note: experts.register_full_backward_hook(
        lambda _, dx, dout: note((*dx, *dout))
    ),
}


def step_with(register, device, options, *, has_shared: bool = True):
    """A layer's `step` while `register` has registered a hook on its experts."""
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    if not has_shared:
        layer.shared_experts = None
    with register(layer.experts):
        return step(layer, *new_signals(device))


def steps_with_hooks(rank, device, options):
    """A layer's step without a hook; for each kind of hook the step with one, what that sees, and what it
    sees if there are no shared experts."""
    expected, found = step_with(nullcontext, device, options), {}
    for kind, register in HOOKS.items():
        seen = []
        with_hook = partial(register, note=seen.append)
        found[kind] = step_with(with_hook, device, options), seen
        step_with(with_hook, device, options, has_shared=False)
    return expected, found


@exact_alone
def test_hooks_on_experts_see_no_shared_experts(workers, device, options):
    for expected, found in workers(steps_with_hooks, options):
        for kind, (result, (seen, alone)) in found.items():
            torch.testing.assert_close(result, expected, msg=kind)
            assert len(seen) == len(alone), kind
            for a, b in zip(seen, alone, strict=True):
                assert a is b is None or torch.equal(a, b), kind


def steps_with_a_hook_on_one_rank(rank, device, options):
    """A layer's step without a hook, and with one on rank 0 alone."""
    register = nullcontext if rank else partial(HOOKS["after"], note=lambda tensors: None)
    return [step_with(each, device, options) for each in (nullcontext, register)]


@exact_alone
def test_a_hook_on_one_rank(workers, device, options):
    """Ranks run the same collectives in the same order: backward sums gradients of shared experts, too."""
    for expected, found in workers(steps_with_a_hook_on_one_rank, options):
        torch.testing.assert_close(found, expected)


def exchanges_for_scores(rank, device, options):
    """How many exchanges the gradients of scores alone take, and then those of all."""
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    x, scores, ids = (t.clone() for t in experts_signals(device, cases.make_ids("random", T, K, E))[:3])
    scores.requires_grad_()
    out, _ = layer.experts(x.requires_grad_(), scores, ids)
    found = []
    for inputs in ([scores], [x, scores]):
        with cases.Calls() as calls:
            grads = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        names = [name.split("::")[1] for name, *_ in calls.calls]
        found.append((names.count("all_to_all_single"), names.count("wait_tensor"), grads[-1]))
    return found


@pytest.mark.parametrize("combine, expected", (("slot", (0, 2)), ("rank", (2, 3))))
def test_each_exchange_of_backward_is_waited_for(workers, cpu, combine, expected):
    """Gradients of scores alone want none of rows that weights are added to at home."""
    for found in workers(exchanges_for_scores, {"combine": combine}):
        (sent, waited, alone), (all_sent, all_waited, beside) = found
        assert (sent, all_sent) == (waited, all_waited) == expected
        assert torch.equal(alone, beside)


def steps_of_wrapped_experts(rank, device, options):
    """Outputs and gradients of experts as they are, and of recomputed ones."""
    wrappers = {"none": lambda experts: experts}
    for name, how in (
        ("not reentrant", CheckpointImpl.NO_REENTRANT),
        ("reentrant", CheckpointImpl.REENTRANT),
    ):
        wrappers[name] = partial(checkpoint_wrapper, checkpoint_impl=how)
    found = {}
    for name, wrapper in wrappers.items():
        layer = new_layer(device)
        parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
        layer.experts = wrapper(layer.experts)
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(rank)).to(device).requires_grad_()
        out = layer(x.sin())
        out.square().sum().backward()
        grads = [whole(p.grad) for p in layer.parameters() if p.grad is not None]
        found[name] = [out.detach(), x.grad, *grads]
    return found


@exact_alone
def test_shared_experts_beside_recomputed_ones(workers, device, options):
    for found in workers(steps_of_wrapped_experts, options):
        expected = found.pop("none")
        assert len(expected) > 10
        for name, tensors in found.items():
            for a, b in zip(tensors, expected, strict=True):
                torch.testing.assert_close(a, b, msg=name)


def counted_exchanges(rank, device, ids, options, recompute):
    with cases.Calls() as calls:
        found = parallel_experts(rank, device, ids, options, EVEN, recompute)
    return found, sum(name.endswith("all_to_all_single") for name, *_ in calls.calls)


@every_all_to_all
def test_selective_checkpointing_keeps_received_rows(workers, cpu, options):
    """A policy that keeps the results of all-to-alls repeats none of them, and changes no bit."""
    ids = cases.make_ids("random", T, K, E)
    once, kept, all_again = (
        workers(counted_exchanges, ids, options, how) for how in ("once", "selective", "checkpointed")
    )
    for (expected, count), (found, kept_count), (_, again) in zip(once, kept, all_again, strict=True):
        assert_same_bits(found, expected)
        assert kept_count == count < again


DROPS = {"static": True, "capacity": 700, "overflow": "drop"}


@pytest.mark.parametrize(
    "options",
    (*(EXCHANGES | SYMMETRIC).values(), DROPS, {**shared_memory, **DROPS}),
    ids=(*(EXCHANGES | SYMMETRIC), "static, drop", "symmetric, static, drop"),
)
def test_selective_checkpointing_that_keeps_everything(workers, cpu, options):
    """So no later call may write to an operator's result, and writes to shared memory must be made again."""
    ids = cases.make_ids("random", T, K, E)
    once, kept = (workers(parallel_experts, ids, options, EVEN, how) for how in ("once", "everything"))
    for expected, found in zip(once, kept, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("num_ranks", (1, 3, 8))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_distinct_ranks(num_ranks, dtype):
    """Each rank of a token once, ascending, by few calls and without a sort."""
    ranks = torch.randint(-2, num_ranks + 2, (40, 4), dtype=dtype)
    with cases.Calls() as calls:
        found = exchange.distinct(ranks, num_ranks)
    for row, token in zip(found.tolist(), ranks.tolist(), strict=True):
        assert [r for r in row if r >= 0] == sorted({r for r in token if 0 <= r < num_ranks})
    names = [name.removeprefix("aten::") for name, *_ in calls.calls if "slice" not in name]
    assert [n for n in names if n != "_to_copy"] == ["clamp", "remainder.Scalar", "new_full", "scatter.src"]


# --- fully_shard --------------------------------------------------------------------------------------


def shard_second(parameter):
    return Shard(1) if parameter.dim() > 1 else Shard(0)


PLACEMENTS = {"Shard(0)": None, "Shard(1)": shard_second}


def full_state(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def check_round_trip(layer, other):
    """A full state dict has a plain layer's names, and another layer that loads it has the same state."""
    state = full_state(layer)
    assert list(state) == list(new_layer("cpu").state_dict())
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    # On a copy, because it puts DTensors into its argument.
    set_model_state_dict(other, dict(state), options=StateDictOptions(full_state_dict=True))
    again = full_state(other)
    assert all(torch.equal(again[name], value) for name, value in state.items())


def fsdp_layer(rank, device, placement, half):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (RANKS,))
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, shard_placement_fn=PLACEMENTS[placement])
    layer = shard(new_layer(device))
    check_round_trip(layer, shard(new_layer(device)))
    x, dout = new_signals(device)
    own = share(rank, x, cut=EVEN).clone()
    return step(layer, own, share(rank, dout, cut=EVEN).to(torch.bfloat16 if half else dout.dtype))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("half", (False, True), ids=("float32", "bfloat16"))
def test_fully_shard(workers, device, placement, half):
    """A plain FusedMoE: gradients are the mean over the ranks, so half of one process's."""
    found = merged(workers(fsdp_layer, placement, half), added=())
    expected = step(new_layer(device), *new_signals(device))
    for name, value in expected.items():
        if name.startswith("d") and name != "dx":
            value /= RANKS
    if half:
        assert found["out"].dtype == torch.bfloat16
        found["out"] = found["out"].float()
    assert_close(found, expected, TOLERANCE[torch.bfloat16 if half else torch.float32])


def latent_layer(device):
    torch.manual_seed(1)
    options = {"latent_dim": 8, "latent_norm": True, "num_shared_experts": 1, "load_balance_coeff": 0.01}
    return FusedMoE(D, F, E, K, **options).to(device)


def parallel_latent_layer(rank, device, how):
    layer, mesh = latent_layer(device), init_device_mesh(device.type, (RANKS,))
    if how == "fully_shard":
        fully_shard(layer, mesh=mesh)
    else:
        parallelize_module(layer, mesh, ExpertParallel())
    return step(layer, *(share(rank, t).clone() for t in new_signals(device)))


@pytest.mark.parametrize("how", ("fully_shard", "ExpertParallel"))
def test_latent_experts(workers, device, how):
    """The layer on one process: gradients are means over the ranks, or sums."""
    expected = step(latent_layer(device), *new_signals(device))
    parameters = [name for name in expected if name.startswith("d") and name != "dx"]
    if how == "fully_shard":
        for name in parameters:
            expected[name] /= RANKS
    found = merged(workers(parallel_latent_layer, how), added=())
    assert_close(found, expected, TOLERANCE[torch.float32])


ROUTERS_OWN = ("router", "shared_expert_gate")


def float32_router_layer(device):
    torch.manual_seed(1)
    options = {"num_shared_experts": 1, "shared_expert_gate": True, "gate_bias": True, "expert_scale": True}
    return FusedMoE(D, F, E, K, **options, router_dtype=torch.float32).to(device)


def fsdp_float32_router(rank, device):
    """A step's results, and what each gate computes with: its dtype, x's, and the weight."""
    mesh, layer = init_device_mesh(device.type, (RANKS,)), float32_router_layer(device)
    keep = MixedPrecisionPolicy(torch.float32, cast_forward_inputs=False)
    for name in ROUTERS_OWN:
        fully_shard(layer.get_submodule(name), mesh=mesh, mp_policy=keep)
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    used = {}
    for name, module in layer.named_modules():
        if name.endswith("gate"):
            module.register_forward_pre_hook(
                lambda m, args, name=name: used.update(
                    {name: (m.weight.dtype, args[0].dtype, m.weight.detach().clone())}
                )
            )
    x, dout = new_signals(device)
    own, dout = share(rank, x, cut=EVEN).clone().requires_grad_(), share(rank, dout, cut=EVEN)
    out = layer(own)
    out.backward(dout.to(torch.bfloat16))
    found = {"out": out.detach().float(), "dx": own.grad}
    return found | {f"d{name}": whole(p.grad) for name, p in layer.named_parameters()}, used


def test_fully_shard_leaves_a_router_float32(workers, device):
    """With a policy of its own its parameters reach forward in all bits, beside bfloat16 experts."""
    ranks = workers(fsdp_float32_router)
    layer = float32_router_layer(device)
    x, dout = new_signals(device)
    x.requires_grad_()
    out = layer(x)
    out.backward(dout)
    expected = {"out": out.detach(), "dx": x.grad}
    expected |= {f"d{n}": p.grad / RANKS for n, p in layer.named_parameters()}
    assert_close(merged([found for found, _ in ranks], added=()), expected, TOLERANCE[torch.bfloat16])
    for _, used in ranks:
        assert used.keys() == {"router.gate", "shared_expert_gate"}
        for name, (*dtypes, weight) in used.items():
            assert dtypes == [torch.float32, torch.bfloat16], name
            assert torch.equal(weight, layer.get_submodule(name).weight.cpu()), name


@pytest.mark.parametrize("combine", ("slot", "rank"))
def test_memory_is_that_of_the_slots(one_rank, device, combine):
    """What is saved for backward has a row for each slot that has an expert, not K for each token; also where
    no slot has one."""
    experts = FusedMoE(D, F, E, 4, device=device).experts
    parallelize_module(experts, one_rank, ExpertParallel(combine=combine))
    x, scores = torch.randn(T, D, device=device, requires_grad=True), torch.rand(T, 4, device=device)
    distinct = torch.rand(T, E, device=device).argsort(1)[:, :4]
    for share in (0.3, 0.0):
        ids, saved = distinct.where(torch.rand(T, 4, device=device) < share, -1), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=saved: to.append(t.shape) or t, lambda t: t
        ):
            out, _ = experts(x, scores, ids)
        num_slots = int((ids >= 0).sum())
        assert (num_slots, 2 * F) in saved
        (dx,) = torch.autograd.grad(out.square().sum(), x)
        assert num_slots or not (out.count_nonzero() or dx.count_nonzero())


class Residual(torch.nn.Module):
    """Adds x to the layer's result in place."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        h = self.moe(x)
        h += x
        return h


@pytest.mark.parametrize("module", (FusedMoE, reference.FusedMoE), ids=("ours", "reference"))
@pytest.mark.parametrize("shape", ((T, D), (2, T // 2, D), (D,)), ids=str)
def test_fully_shard_of_a_layer_whose_result_is_written(one_rank, device, module, shape):
    """The layer is a separate group of parameters, so its weights are freed after forward. A hook on the
    result fetches them for backward: it has to survive the write."""
    model = Residual(module(D, F, E, K, num_shared_experts=1, device=device))
    x, found = torch.randn(shape, device=device), []
    for sharded in (False, True):
        if sharded:
            fully_shard(model.moe, mesh=one_rank)
            fully_shard(model, mesh=one_rank)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*returned a view")  # as newer PyTorch says
            out = model(leaf)
        out.square().sum().backward()
        grads = (p.grad.full_tensor() if sharded else p.grad.clone() for p in model.parameters())
        found.append([out.detach(), leaf.grad, *grads])
    for plain, value in zip(*found, strict=True):
        torch.testing.assert_close(value, plain)  # dx is added up in another order


def fsdp_and_expert_parallel_layer(rank, device, shape, over):
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    meshes = {
        "all": lambda: init_device_mesh(device.type, (RANKS,)),
        "hybrid": lambda: init_device_mesh(device.type, (RANKS, 1), mesh_dim_names=("replicate", "shard")),
        "dp": lambda: mesh["dp"],
    }

    def shard():
        layer = new_layer(device)
        parallelize_module(layer, mesh["ep"], ExpertParallel())
        fully_shard(layer.experts, mesh=mesh["dp"])
        layer.experts.set_gradient_divide_factor(RANKS)
        return fully_shard(layer, mesh=meshes[over]())

    layer = shard()
    check_round_trip(layer, shard())
    x, dout = new_signals(device)
    return step(layer, share(rank, x).clone(), share(rank, dout))


@pytest.mark.parametrize(
    "shape, over", (((1, 2), "all"), ((2, 1), "all"), ((1, 2), "hybrid"), ((1, 2), "dp")), ids=str
)
def test_fully_shard_beside_expert_parallel(workers, device, shape, over):
    """As in ExpertParallel's docstring: all gradients are means over all ranks, the experts' too. What
    fully_shard reduces is not summed before; over too few ranks it reduces too little."""
    expected = step(new_layer(device), *new_signals(device))
    added = [name for name in expected if over == "dp" and name[1:].startswith(REPLICATED)]
    found = merged(workers(fsdp_and_expert_parallel_layer, shape, over), added)
    for name, value in expected.items():
        if name.startswith("d") and name != "dx" and name not in added:
            value /= RANKS
    assert_close(found, expected, TOLERANCE[torch.float32])


# --- training without fully_shard ---------------------------------------------------------------------


def accumulating(layer):
    """Float32 main_grads in the place of the experts' gradients, as Megatron's optimizer has them."""
    for weight in layer.experts.weights:
        weight.main_grad = torch.zeros_like(weight)


def trained(layer, batches, how):
    """The parameters after three steps of AdamW, each of two micro-batches. DTensors have a group of their
    own, without which foreach=True, PyTorch's default on GPUs, raises."""
    groups = [
        [p for p in layer.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2, foreach=True)
    for step, batch in enumerate(batches):
        if how == "frozen":  # in the first step alone
            layer.router.requires_grad_(step > 0)
        for x in batch:
            x = x.clone().requires_grad_()
            out = checkpoint(layer, x, use_reentrant=False) if how == "checkpoint" else layer(x)
            out.square().sum().backward()
        if how == "main_grad":
            for weight in layer.experts.weights:
                weight.grad, weight.main_grad = weight.main_grad, torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in layer.named_parameters()}


def training_layer(device, how):
    torch.manual_seed(1)
    options = {"shared_expert_gate": True, "gate_bias": True, "bias": how != "frozen"}
    layer = FusedMoE(D, F, E, K, num_shared_experts=1, **options).to(device)
    if how == "frozen":
        layer.router.requires_grad_(False)
    return layer


def training_batches(device):
    generator = torch.Generator().manual_seed(8)
    return torch.randn(3, 2, T, D, generator=generator).to(device)


def trained_in_parallel(rank, device, how, combine):
    layer = training_layer(device, how)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(combine=combine))
    if how == "main_grad":
        accumulating(layer)
    cut = 0 if how == "no tokens on a rank" else UNEVEN
    return trained(layer, [[share(rank, x, cut) for x in batch] for batch in training_batches(device)], how)


@pytest.mark.parametrize("combine", ("slot", "rank"))
@pytest.mark.parametrize("how", ("plain", "checkpoint", "frozen", "main_grad", "no tokens on a rank"))
def test_training_without_fully_shard(workers, device, how, combine):
    """Router, shared experts and their gate get sums over the ranks, once for each micro-batch: the training
    of one process, and the same bits on both ranks. A router that is frozen at first has them later, too."""
    found = merged(workers(trained_in_parallel, how, combine), added=())
    layer = training_layer(device, how)
    if how == "main_grad":
        accumulating(layer)
    expected = trained(layer, training_batches(device), how)
    for name, value in expected.items():
        # AdamW divides by a gradient's size: small gradients' last bits are steps.
        torch.testing.assert_close(found[name], value.cpu(), rtol=1e-4, atol=1e-4, msg=name)
    start = training_layer(device, how).state_dict()
    assert all((value - start[name]).abs().max() > 5e-3 for name, value in expected.items())


def many_gradients(rank, device, options):
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options))
    x, dout = (share(rank, t, EVEN) for t in new_signals(device))
    x.requires_grad_()
    out = layer(x)
    douts = torch.stack((dout, 2 * dout))
    with pytest.raises(RuntimeError, match="expected one gradient .* found many, by is_grads_batched"):
        torch.autograd.grad(out, x, douts, is_grads_batched=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="expected one gradient .* found many, .* or vmap"):
        torch.vmap(lambda dout: torch.autograd.grad(out, x, dout, retain_graph=True))(douts)
    return [torch.autograd.grad(out, x, dout, retain_graph=True)[0], torch.autograd.grad(out, x, dout)[0]]


@every_exchange
def test_many_gradients_at_once(workers, device, options):
    """They raise on all ranks, and the next backward pass works."""
    for first, again in workers(many_gradients, options):
        assert first.any() and torch.equal(first, again)


def replaced_parameters(rank, device, how):
    """The gradients of a layer that got the style's hooks before it got its parameters."""
    mesh = init_device_mesh(device.type, (RANKS,))
    source = parallelize_module(new_layer(device), mesh, ExpertParallel())
    if how == "deepcopy":
        layer = copy.deepcopy(source)
    else:
        layer = parallelize_module(new_layer("meta"), mesh, ExpertParallel())
        if how == "to_empty":
            layer.to_empty(device=device)
        layer.load_state_dict(source.state_dict(), assign=how == "assign")
    return step(layer, *(share(rank, t).clone() for t in new_signals(device)))


@pytest.mark.parametrize("how", ("deepcopy", "to_empty", "assign"))
def test_replaced_parameters(workers, device, how):
    """They are hooked again: their gradients are sums over the ranks."""
    expected = step(new_layer(device), *new_signals(device))
    found = merged(workers(replaced_parameters, how), added=())
    assert_close(found, expected, TOLERANCE[torch.float32])


def tied_routers(rank, device):
    first, second = layers = new_layer(device), new_layer(device)
    second.router = first.router
    for layer in layers:
        parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel())
    x, dout = (share(rank, t) for t in new_signals(device))
    second(first(x)).backward(dout)
    return {"dgate": first.router.gate.weight.grad}


def test_a_router_of_two_layers(workers, device):
    """Its gradients are summed once."""
    first, second = new_layer(device), new_layer(device)
    second.router = first.router
    x, dout = new_signals(device)
    second(first(x)).backward(dout)
    expected = {"dgate": first.router.gate.weight.grad}
    assert_close(merged(workers(tied_routers), added=()), expected, TOLERANCE[torch.float32])


def ddp_beside_expert_parallel(rank, device, whole_layer):
    """Gradients, and the error of a DDP that was not told which parameters are DTensors."""
    layer = new_layer(device)
    parallelize_module(
        layer,
        init_device_mesh(device.type, (RANKS,)),
        ExpertParallel() if whole_layer else {"experts": ExpertParallel()},
    )
    model = torch.nn.Sequential(layer)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        torch.nn.parallel.DistributedDataParallel(model)
    names = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model = torch.nn.parallel.DistributedDataParallel(model)
    x, dout = (share(rank, t) for t in new_signals(device))
    for _ in range(2):
        model(x).backward(dout)
    return {f"d{name}": whole(p.grad) for name, p in layer.named_parameters()}


@pytest.mark.parametrize("whole_layer", (False, True))
def test_ddp_beside_expert_parallel(workers, device, whole_layer):
    """DDP's means of sums over the ranks are those sums; the style on the experts alone leaves the rest to
    DDP."""
    found = merged(workers(ddp_beside_expert_parallel, whole_layer), added=())
    expected = step(new_layer(device), *new_signals(device))
    for name in found:
        is_mean = not whole_layer and name[1:].startswith(REPLICATED)
        expected[name] *= 2 / RANKS if is_mean else 2
    assert_close(found, {name: expected[name] for name in found}, TOLERANCE[torch.float32])


# --- FP8 training ---------------------------------------------------------------------------------------


def fp8_layer(device, sizes=(128, 128, 4, 2), **options):
    torch.manual_seed(1)
    layer = FusedMoE(*sizes, num_shared_experts=1, load_balance_coeff=0.01).to(device, torch.bfloat16)
    return fused_moe.enable_fp8(layer, force=True, **options)


def fp8_signals(device, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, 128, generator=generator).to(device, torch.bfloat16) for _ in range(2)]


class Bytes:
    """Shapes of the bytes that autograd saves: codes."""

    def __init__(self):
        self.shapes = []

    def pack(self, tensor):
        if tensor.dtype == torch.uint8:
            self.shapes.append(tuple(tensor.shape))
        return tensor

    def saving(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


def fsdp_fp8(rank, device, reshards, keep_codes, recompute):
    """Three steps of two layers: whether each output is that of the weights as they are, and each gradient;
    and the shapes of codes that were alive between forward and backward."""
    mesh = init_device_mesh(device.type, (RANKS,))
    layers = torch.nn.Sequential(*(fp8_layer(device, keep_codes=keep_codes) for _ in range(2)))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(layers, mesh=mesh)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2, fused=True)
    outs, saved = [], Bytes()
    for _ in range(3):
        plain = torch.nn.Sequential(*(fp8_layer(device) for _ in range(2)))
        plain.load_state_dict({name: value.to(device) for name, value in full_state(layers).items()})
        for other in range(RANKS):
            x, dout = (share(other, t) for t in fp8_signals(device))
            expected = plain(x)
            expected.backward(dout)
            if other == rank:
                own, down = x, dout
                right = expected.detach()
        if recompute:  # what is saved then, checkpointing's own hooks see
            out = checkpoint(layers, own, use_reentrant=False)
        else:
            with saved.saving():
                out = layers(own)
        out.backward(down)
        assert torch.equal(out, right)
        for (name, p), q in zip(layers.named_parameters(), plain.parameters(), strict=True):
            error = (whole(p.grad) - q.grad / RANKS).norm() / q.grad.norm()
            assert error < 1e-2, f"{name}: {error}"
        optimizer.step()
        optimizer.zero_grad()
        outs.append(out.detach())
    assert all(layer.experts.fp8.is_gathered and layer.experts.fp8._kept is None for layer in layers)
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    return saved.shapes


@pytest.mark.parametrize("reshards", (False, True))
@pytest.mark.parametrize("keep_codes", (False, True))
@pytest.mark.parametrize("recompute", (False, True))
def test_fully_shard_in_fp8(workers, device, reshards, keep_codes, recompute):
    """Gathered weights are quantised where they are used, forward and backward: nothing of their size
    outlives the call that gathered them."""
    for shapes in workers(fsdp_fp8, reshards, keep_codes, recompute):
        assert all(len(shape) < 3 for shape in shapes), shapes


def parallel_fp8_that_changes(rank, device):
    """Outputs of a layer that keeps codes, before and after writes that move no version of its local tensors,
    and those of the same weights without kept codes."""
    layer = fp8_layer(device, keep_codes=True)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), {"experts": ExpertParallel()})
    x, _ = fp8_signals(device)
    found, changes = (
        [layer(x)],
        (
            lambda: [p.mul_(1.5) for p in layer.experts.parameters()],
            lambda: layer.load_state_dict({name: value / 2 for name, value in layer.state_dict().items()}),
        ),
    )
    for change in changes:
        with torch.no_grad():
            change()
        kept = layer(x)
        fused_moe.enable_fp8(layer, force=True)
        found += [kept, layer(x)]
        fused_moe.enable_fp8(layer, force=True, keep_codes=True)
        layer(x)
    return [out.detach() for out in found]


def test_expert_parallel_keeps_no_codes(workers, device):
    """A write to a DTensor moves its own version, and not its local tensor's."""
    for first, second, expected, third, expected_then in workers(parallel_fp8_that_changes):
        assert torch.equal(second, expected) and torch.equal(third, expected_then)
        assert not torch.equal(first, second) and not torch.equal(second, third)


def parallel_fp8(rank, device, options, shards):
    layer = fp8_layer(device, wgrad="bf16")
    mesh = init_device_mesh(device.type, (1, RANKS), mesh_dim_names=("dp", "ep"))
    parallelize_module(layer, mesh["ep"], ExpertParallel(**options))
    if shards:
        fully_shard(layer.experts, mesh=mesh["dp"])
        layer.experts.set_gradient_divide_factor(1)
    x, dout = (share(rank, t, EVEN) for t in fp8_signals(device))
    return step(layer, x.clone(), dout)


@pytest.mark.parametrize("options, shards", (*((o, False) for o in EXCHANGES.values()), ({}, True)), ids=str)
def test_expert_parallel_in_fp8(workers, device, options, shards):
    """Rows are exchanged in x's dtype and quantised by the rank that has the expert: a row has the codes that
    its token would have."""
    expected = step(fp8_layer(device, wgrad="bf16"), *fp8_signals(device))
    found = merged(workers(parallel_fp8, options, shards), added=())
    assert_close(found, expected, 0.05)  # dy is rounded for the exchange, which turns some of its codes
    plain = step(fused_moe.enable_fp8(fp8_layer(device), enabled=False), *fp8_signals(device))
    assert (plain["out"] - expected["out"]).norm() > 0.02 * expected["out"].norm()


# --- recording and replaying ----------------------------------------------------------------------------


class Checkpointed(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def wrapped(layer, how, device):
    mesh = init_device_mesh(device.type, (RANKS,))
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer))
    if how == "fully_shard":
        return fully_shard(Checkpointed(fully_shard(layer, mesh=mesh)), mesh=mesh)
    parallelize_module(layer, mesh, ExpertParallel(**EXCHANGES[how]))
    return Checkpointed(layer)


def replayed_layer(rank, device, how, ids):
    """Its own tokens' ids, taken and recorded; backward runs after the contexts."""
    layer = new_layer(device)
    model = wrapped(layer, how, device)
    x, dout, ids = (share(rank, t, cut=EVEN).clone() for t in (*new_signals(device), ids))
    routes = fused_moe.Routes([ids], E)  # on the CPU
    x.requires_grad_()
    with fused_moe.record_routing(model) as recorded, fused_moe.replay_routing(model, routes):
        out = model(x)
    assert recorded.num_tokens == [len(ids)] and torch.equal(recorded[0].cpu(), ids.byte())
    out.backward(dout)
    assert layer.__dict__.get("_tape") is None
    grads = {f"d{name}": whole(p.grad) for name, p in layer.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, **grads}


@pytest.mark.parametrize("how", ("ddp", "fully_shard", *EXCHANGES))
def test_replay(workers, device, how):
    """Each rank replays its own tokens' experts, DDP's layer in the forward pass, the others checkpointed:
    what one process computes with ids=."""
    ids = cases.make_ids("random", T, K, E)
    expected = step(new_layer(device), *new_signals(device), ids=ids.to(device))
    del expected["expert_bias"]
    is_mean = how in ("ddp", "fully_shard")
    for name, value in expected.items():
        if is_mean and name.startswith("d") and name != "dx":
            value /= RANKS
    found = merged(workers(replayed_layer, how, ids), added=())
    assert_close(found, expected, TOLERANCE[torch.float32])


# --- fully_shard of quantised weights -------------------------------------------------------------------

EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
takes_integers = pytest.mark.skipif(
    not sharding.TAKES_INTEGERS, reason="needs PyTorch 2.13, whose fully_shard takes integer parameters"
)


def quantised_layer(format, device, seed=1, num_experts=5, rank=0, hidden_dim=64):
    """Ranks have 3 and 2 of its experts."""
    torch.manual_seed(seed)
    layer = FusedMoE(128, hidden_dim, num_experts, 1, bias=bool(rank))
    options = {"group_size": 32, "symmetric": False} if format == "int4" else {}
    quantize(layer, format, **options, trainable=True)
    if rank:
        add_lora(layer, rank)
        for parameter in layer.experts.lora.parameters():
            torch.nn.init.normal_(parameter, 0, 0.1)
    return layer.to(device)


def quantised_step(layer, dtype, device):
    """Outputs and gradients of two steps without an update, the second after FSDP2 has freed and gathered the
    parameters again, and an output without gradients."""
    found = {}
    for i in range(2):
        x = torch.randn(T, 128, generator=torch.Generator().manual_seed(i)).to(device, dtype).requires_grad_()
        out = layer(x)
        out.float().square().mean().backward()
        found[f"out {i}"], found[f"dx {i}"] = out.detach(), x.grad
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[f"d{name}"] = whole(parameter.grad).float()
    with torch.no_grad():
        found["without gradients"] = layer(x)
    return found


def fsdp_quantised(rank, device, format, ranks, half, lora, num_experts):
    layer = quantised_layer(format, device, num_experts=num_experts, rank=lora)
    mesh = init_device_mesh(device.type, (RANKS // ranks, ranks), mesh_dim_names=("other", "dp"))
    fully_shard(layer, mesh=mesh["dp"], mp_policy=HALF if half else MixedPrecisionPolicy())
    assert all(isinstance(p, DTensor) for p in layer.parameters())
    return quantised_step(layer, torch.float32, device)


@takes_integers
@EVERY_FORMAT
@pytest.mark.parametrize("half", (False, True), ids=("float32", "bfloat16"))
@pytest.mark.parametrize("ranks, lora, num_experts", ((1, 0, 5), (1, 4, 5), (2, 0, 5), (2, 4, 5), (2, 4, 1)))
def test_fully_shard_quantised(workers, device, format, ranks, half, lora, num_experts):
    """A policy casts the layer's other parameters, and neither codes nor scales: outputs and gradients of x
    have the bits of a layer in one process. Ranks have unequal numbers of experts, or none."""
    dtype = torch.bfloat16 if half else torch.float32
    layer = quantised_layer(format, device, num_experts=num_experts, rank=lora).to(dtype)
    expected = quantised_step(layer, dtype, device)
    for found in workers(fsdp_quantised, format, ranks, half, lora, num_experts):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name.startswith("d") and not name.startswith("dx"):  # summed over steps in float32
                torch.testing.assert_close(found[name], value.cpu(), rtol=2e-2 if half else 1e-6, atol=1e-6)
            else:
                assert torch.equal(found[name].to(dtype), value.cpu()), name


def stored_bytes(state):
    """{name: (dtype, shape, bytes of this rank)}."""
    return {
        name: (t.dtype, tuple(t.shape), (t.to_local() if isinstance(t, DTensor) else t).view(torch.uint8))
        for name, t in state.items()
    }


def gathered(layer):
    """What the operators read of each weight."""
    layer.unshard()
    weights = [w for w in layer.experts.weights if isinstance(w, QuantizedWeight)]
    assert all(w.transposed_tensors == (None, None, None) for w in weights)
    assert all(
        w.nbytes == sum(p.nbytes for p in w.parameters()) for w in weights
    )  # no second packing is kept
    found = [t.detach().clone() for w in weights for t in w.tensors if t is not None]
    layer.reshard()
    return found


def state_of_shards(rank, device, format, tiled, num_experts):
    """[what differs] of sharded layers that load another one's state."""
    wrong = []

    def check(what, layer, is_arranged=True):
        found, wanted = stored_bytes(layer.state_dict()), stored_bytes(source.state_dict())
        for name, (dtype, shape, data) in wanted.items():
            if found[name][:2] != (dtype, shape) or not torch.equal(found[name][2], data):
                wrong.append(f"{what}: {name} of {found[name][:2]}, expected {(dtype, shape)}")
        if is_arranged:
            pairs = zip(gathered(layer), tensors, strict=True)
            if not all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in pairs):
                wrong.append(f"{what}: other tensors")

    def bits(tensor):
        return tensor.contiguous().view(torch.uint8)

    def new(device, seed):
        return quantised_layer(format, device, seed, num_experts)

    with mock.patch.object(tiles, "are_read_on", lambda device: tiled and device.type == "cpu"):
        mesh = init_device_mesh(device.type, (RANKS,))
        shard = partial(fully_shard, mesh=mesh, mp_policy=HALF)
        plain = new(device, 1)
        assert plain.experts.w1.is_tiled == tiled == (plain.experts.w1.data_t is not None)
        expected = {name: (t.dtype, tuple(t.shape)) for name, t in plain.state_dict().items()}
        tensors = [t for w in plain.experts.weights for t in w.tensors if t is not None]
        source = shard(new(device, 1))
        state = source.state_dict()
        assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items()} == expected
        for name, value in state.items():
            part = plain.state_dict()[name].chunk(RANKS)[rank:][:1]
            assert torch.equal(bits(value.to_local()), bits(part[0]) if part else bits(value.to_local())[:0])
        for assign in (False, True):
            other = shard(new(device, 2))
            for when in ("before", "after"):
                other.load_state_dict(source.state_dict(), assign=assign)
                check(f"assign={assign}, {when} it was gathered", other)
            other = shard(new("meta", 2))
            if not assign:
                other.to_empty(device=device)
            other.load_state_dict(source.state_dict(), assign=assign)
            check(f"from meta, assign={assign}", other, is_arranged=not tiled)
        source.experts.half().to(torch.float64).float()
        check("half", shard(new(device, 1)))
        offloaded = shard(new(device, 1), offload_policy=CPUOffloadPolicy(pin_memory=False))
        check("offloaded", offloaded)
    return wrong


@takes_integers
@EVERY_FORMAT
@pytest.mark.parametrize("tiled", (False, True), ids=("published", "tiles"))
@pytest.mark.parametrize("num_experts", (5, 1))
def test_state_of_quantised_shards(workers, cpu, format, tiled, num_experts):
    """A state_dict has the published names, shapes and dtypes, and loads into the layout that was sharded."""
    assert workers(state_of_shards, format, tiled, num_experts) == [[], []]


def full_state_of_shards(rank, device, format):
    shard = partial(fully_shard, mesh=init_device_mesh(device.type, (RANKS,)), mp_policy=HALF)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(shard(quantised_layer(format, device)), options=options)
    other = shard(quantised_layer(format, device, 2))
    set_model_state_dict(other, dict(state), options=options)
    return state, get_model_state_dict(other, options=options)


@takes_integers
@EVERY_FORMAT
def test_full_state_of_quantised_shards(workers, device, format):
    if device.type == "cpu" and format.startswith("fp8"):
        with pytest.raises(RuntimeError, match="Invalid scalar type"):  # gloo sends no such dtype
            workers(full_state_of_shards, format)
        return
    expected = quantised_layer(format, device).state_dict()
    for states in workers(full_state_of_shards, format):
        for state in states:
            for name, value in expected.items():
                assert state[name].dtype == value.dtype and torch.equal(state[name], value.cpu()), name


def refused_shards(rank, device):
    """Messages for what cannot be sharded."""
    mesh = init_device_mesh(device.type, (RANKS,))
    found = []
    for make_tiles, module, placement in (
        (False, lambda layer: layer.experts.w1, None),
        (False, lambda layer: [layer.experts.w1, layer.experts.w2], None),
        (True, lambda layer: layer, "Shard(1)"),
    ):
        with mock.patch.object(tiles, "are_read_on", lambda _, found=make_tiles: found):
            layer = quantised_layer("fp8", device, num_experts=4, hidden_dim=128)
            try:
                fully_shard(module(layer), mesh=mesh, shard_placement_fn=PLACEMENTS.get(placement))
            except ValueError as error:
                found.append(str(error))
    return found


def test_refused_shards(workers, cpu):
    """A single weight has no own call that the experts wait for."""
    alone = (
        "QuantizedWeight: expected fully_shard of the experts or the layer, as fully_shard(layer.experts), "
        "found fully_shard of one weight"
    )
    turned = (
        "QuantizedWeight: expected shards of experts, Shard(0), of a weight in tiles, found (Shard(dim=1),)"
    )
    assert workers(refused_shards) == [[alone, alone, turned]] * RANKS


# --- ExpertParallel of quantised weights ----------------------------------------------------------------

EIGHT_BITS = {"fp8_block": "fp8", "fp8": "fp8", "int8": "int8"}


def quantised_signals(device):
    generator = torch.Generator().manual_seed(4)
    x, dout = (torch.randn(T, 128, generator=generator).to(dtype_on(device)) for _ in range(2))
    ids = cases.make_ids("random", T, 2, 4)
    return [t.to(device) for t in (x, torch.rand(T, 2, generator=generator), ids, dout)]


def dtype_on(device):
    """8 bits by 8 bits take no float32 on GPUs."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def quantised_experts(format, device, lora, compute, seed=1):
    layer = quantised_layer(format, device, seed, 4, lora).to(dtype_on(device))
    for w in layer.experts.weights:  # before they are sharded: tiles have no 8 bits by 8 bits
        w.set_compute(compute)
    return layer


def quantised_experts_step(layer, signals):
    """A step; by 8 bits on both operands an output alone."""
    if layer.experts.w1.compute != "codes":
        with torch.no_grad():
            return dict(zip(("out", "counts"), layer.experts(*signals[:3]), strict=True))
    found = experts_step(layer.experts, *(t.clone() for t in signals))
    return {name: value for name, value in found.items() if value is not None}


def parallel_quantised(rank, device, *given):
    """{name of an exchange: a step} of layers whose state is that of one process, made or loaded."""
    mesh, steps = init_device_mesh(device.type, (RANKS,)), {}
    format, lora, compute = given
    plain = quantised_experts(format, device, lora, compute)
    for name, options in EXCHANGES.items():
        layer, other = (quantised_experts(format, device, lora, compute, seed) for seed in (1, 2))
        for sharded in (layer, other):
            parallelize_module(sharded, mesh, ExpertParallel(**options))
            assert all(isinstance(p, DTensor) for p in sharded.experts.parameters())
        assert list(layer.state_dict()) == list(plain.state_dict())
        for w, local in zip(plain.experts.weights, layer.experts.weights, strict=True):
            own = stored_bytes(local.state_dict())
            for key, (dtype, shape, data) in stored_bytes(w.state_dict()).items():
                assert own[key][:2] == (dtype, shape) and torch.equal(own[key][2], data.chunk(RANKS)[rank])
        signals = [share(rank, t, cut_of(options)) for t in quantised_signals(device)]
        steps[name] = quantised_experts_step(layer, signals)
        other.load_state_dict(layer.state_dict())
        cases.assert_same_bits(quantised_experts_step(other, signals), steps[name])
    return steps


@pytest.mark.parametrize(
    "format, lora, compute",
    [
        *((format, lora, "codes") for format in FORMATS for lora in (0, 4)),
        *((format, 0, compute) for format, compute in EIGHT_BITS.items()),
    ],
)
def test_expert_parallel_of_quantised_weights(workers, device, format, lora, compute):
    """Ranks have the codes of their experts: outputs and gradients of one process, published state dicts."""
    expected = quantised_experts_step(
        quantised_experts(format, device, lora, compute), quantised_signals(device)
    )
    results = workers(parallel_quantised, format, lora, compute)
    of_tokens = expected.keys() & {"out", "dx", "dscores"}
    for name in EXCHANGES:
        found = merged([result[name] for result in results], added=("counts",))
        assert_close(found, expected, tolerance_of(dtype_on(device)))
        if "rank" not in name and not lora:
            assert_same_bits({n: found[n] for n in of_tokens}, {n: expected[n].cpu() for n in of_tokens})


# --- DistributedDataParallel ----------------------------------------------------------------------------

STEPS, MICRO_BATCHES = 3, 3


def micro_batches(device, rank=None):
    """x of every micro-batch of every step, of one rank or of all; not the same from one to the next."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        all_ranks = torch.randn(MICRO_BATCHES, RANKS, T, D, generator=generator).to(device)
        yield [x.flatten(0, 1) if rank is None else x[rank] for x in all_ranks]


def balanced(device, batches, model, layer, waits):
    """The tokens counted in each step, and the bias after it. With `waits` gradients are exchanged in the
    last backward pass of a step only."""
    found = {}
    for step, xs in enumerate(batches):
        for i, x in enumerate(xs):
            with model.no_sync() if waits and i + 1 < len(xs) else nullcontext():
                model(x).sum().backward()
        found[f"tokens {step}"] = layer.tokens_per_expert.clone()
        layer.update_expert_bias()
        found[f"bias {step}"] = layer.expert_bias.clone()
    return found


def ddp_layer(rank, device, waits):
    layer = new_layer(device)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer))
    return balanced(device, micro_batches(device, rank), model, layer, waits)


def updated_bias(rank, device, loads):
    layer = FusedMoE(8, 4, 4, 1, load_balance_coeff=0.5, device=device)
    layer.tokens_per_expert.copy_(loads[rank])
    layer.update_expert_bias()
    return layer.expert_bias


def other_bias(rank, device):
    """Rank 1's has another dtype, and raises; rank 0 does not wait for it."""
    layer = new_layer(device)
    if rank:
        layer._buffers["expert_bias"] = layer.expert_bias.bfloat16()
    with pytest.raises(TypeError, match="expert_bias of dtype") if rank else nullcontext():
        layer.update_expert_bias()


def test_a_bias_of_another_dtype_on_one_rank(workers, device):
    workers(other_bias)


def test_update_under_a_process_group(workers):
    """Two processes sum their loads and move to the same bias."""
    loads = torch.tensor([[9.0, 0.0, 4.0, 3.0], [1.0, 2.0, 4.0, 9.0]])
    delta = 0.5 * torch.sign(8 - loads.sum(0))
    for bias in workers(updated_bias, loads):
        torch.testing.assert_close(bias, delta - delta.mean())


@pytest.mark.quick
@pytest.mark.parametrize("waits", (False, True), ids=("sync", "no_sync"))
def test_ddp_balances_by_all_tokens(workers, device, waits):
    """Wrapped with its defaults, in steps of several micro-batches: counts and bias of one process."""
    first, second = workers(ddp_layer, waits)
    layer = new_layer(device)
    expected = balanced(device, micro_batches(device), layer, layer, waits=False)
    for name, value in expected.items():
        if name.startswith("bias"):
            assert torch.equal(first[name], value.cpu()) and torch.equal(second[name], value.cpu()), name
        else:
            assert torch.equal(first[name] + second[name], value.cpu()), name


# --- balance of a model -----------------------------------------------------------------------------------

COUNTS_OF_RANKS = torch.tensor(
    [[[9, 0, 4, 3, 1, 1], [5, 5, 0, 0, 2, 0]], [[1, 2, 4, 9, 1, 1], [0, 1, 9, 8, 0, 0]]]
)


def balanced_model(rank, device, how):
    """The biases of two layers after a step, and the number of all-reduces of integers."""
    layers = torch.nn.Sequential(new_layer(device), new_layer(device))
    layers[1].load_balance_coeff = 0.5
    model, group = layers, None
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(layers)
    elif how == "fsdp":
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh(device.type, (RANKS,)))
        model = fully_shard(layers, mesh=init_device_mesh(device.type, (RANKS,)))
    elif how == "alone":
        groups = [dist.new_group([r]) for r in range(RANKS)]
        group = groups[rank]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    fused_moe.balance(model, optimizer, group=group)
    model(new_signals(device)[0]).sum().backward()
    for layer, counts in zip(layers, COUNTS_OF_RANKS[rank], strict=True):
        layer.tokens_per_expert.copy_(counts)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        optimizer.step()
    assert all_reduce.call_count == 1
    assert not any(layer.tokens_per_expert.any() for layer in layers)
    return [layer.expert_bias for layer in layers]


@pytest.mark.parametrize("how", ("plain", "ddp", "fsdp", "alone"))
def test_balance_of_a_model(workers, device, how):
    """One all-reduce for all layers: the bits of one layer's update by the counts of the group's ranks."""
    counts = COUNTS_OF_RANKS if how == "alone" else COUNTS_OF_RANKS.sum(0).expand(RANKS, -1, -1)
    for found, loads in zip(workers(balanced_model, how), counts, strict=True):
        for bias, load, coefficient in zip(found, loads, (0.01, 0.5), strict=True):
            layer = new_layer(device)  # a GPU adds up in another order than a CPU
            layer.load_balance_coeff = coefficient
            layer.tokens_per_expert.copy_(load)
            layer.update_expert_bias()
            assert layer.expert_bias.any() and torch.equal(bias.cpu(), layer.expert_bias.cpu())


# --- the balance loss of a global batch -----------------------------------------------------------------


def balance_losses(layer, batches, compiled=False, **options):
    """The balance loss of each micro-batch and the sum of their gradients, counts running over all."""
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    losses = []
    for x, mask in batches:
        given = {"loss_mask": mask, "load": layer.tokens_per_expert, **options}
        loss = run(x, return_losses=True, **given)[1].load_balancing
        loss.backward()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses), "dgate": layer.router.gate.weight.grad}


def masked_batches(device, masked):
    x, mask = torch.cat(new_signals(device)), torch.arange(2 * T, device=device) % 5 > 1
    return [(x[i * T : i * T + T], mask[i * T : i * T + T] if masked else None) for i in range(2)]


def group_losses(rank, device, cut, masked, compiled):
    batches = [
        [None if t is None else share(rank, t, cut) for t in batch]
        for batch in masked_batches(device, masked)
    ]
    torch._dynamo.reset()
    with cases.Calls() if not compiled else nullcontext() as calls:
        found = balance_losses(new_layer(device), batches, compiled, group=dist.group.WORLD)
    if not compiled:
        assert sum(name.endswith("all_reduce") for name, *_ in calls.calls) == len(batches)
    return found


@pytest.mark.parametrize(
    "cut, masked, compiled",
    [*((cut, masked, False) for cut in (EVEN, UNEVEN, 0) for masked in (False, True)), (UNEVEN, False, True)],
)
def test_balance_loss_of_a_group(workers, device, cut, masked, compiled):
    """The mean over the ranks is one process's loss of all tokens, in value and gradient, also of ranks with
    fewer tokens or none. Counts of earlier micro-batches are each rank's own."""
    first, second = workers(group_losses, cut, masked, compiled)
    found = {name: (value + second[name]) / RANKS for name, value in first.items()}
    expected = balance_losses(new_layer(device), masked_batches(device, masked))
    assert_close(found, expected, TOLERANCE[torch.float32])
    assert not torch.equal(first["dgate"], second["dgate"])


# --- adapters -----------------------------------------------------------------------------------------


def adapted_layer(device, before=(), fresh=False):
    """new_layer with two adapters, both of which compute; `before` is called in between."""
    layer = new_layer(device)
    add_lora(layer, 4, alpha=6, freeze_router=True)
    for change in before:
        change(layer)
    add_lora(layer, 2, targets=("w1", "w2"), name="math")
    fused_moe.set_lora(layer, ("default", "math"))
    return layer if fresh else fill_adapters(layer)


def fill_adapters(layer):
    """The same values in every process, sharded or not."""
    generator = torch.Generator().manual_seed(5)
    for name in ("default", "math"):
        state = fused_moe.lora_state_dict(layer, name)
        values = {
            key: t if key.endswith("scaling") else torch.randn(t.shape, generator=generator) / 4
            for key, t in state.items()
        }
        fused_moe.load_lora_state_dict(layer, values, name)
    return layer


def adapted_step(layer, x, dout):
    """As step, of what has a gradient, after a step without one."""
    x = x.requires_grad_()
    out = layer(x)
    out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    return found | {f"d{n}": whole(p.grad) for n, p in layer.named_parameters() if p.grad is not None}


def parallel_adapters(rank, device, how, options):
    """Results of a step, whole adapters, and the output of the merged layer."""
    mesh = init_device_mesh(device.type, (RANKS,))

    def shard(layer):
        parallelize_module(layer, mesh, ExpertParallel(**options))

    if how == "between":
        layer = adapted_layer(device, [shard])
    else:
        layer = adapted_layer(device)
        shard(layer)
    assert all(isinstance(p, DTensor) for p in layer.experts.parameters())
    assert layer.experts.lora_math.a1.to_local().size(0) == E // RANKS
    own = layer.experts.lora()
    given = fused_moe.LoRA(*(whole(t.detach()) for t in own.tensors), own.scale)
    for p in layer.experts.lora.parameters():
        torch.nn.init.zeros_(p)
    layer.experts.lora.load(given)
    x, dout = (share(rank, t, EVEN).clone() for t in new_signals(device))
    found = adapted_step(layer, x, dout)
    files = {n: fused_moe.lora_state_dict(layer, n, full=True) for n in ("default", "math")}
    assert all(torch.equal(full_state(layer)[key], t) for key, t in files["default"].items())
    with torch.no_grad():
        with fused_moe.set_lora(layer, None):
            base = layer(x)
        fused_moe.merge_lora(layer)
        merged_out = layer(x)
    trained = [n for n, p in layer.named_parameters() if p.requires_grad]
    return found, files, base, merged_out, trained


@every_exchange
@pytest.mark.parametrize("how", ("between", "before"))
def test_expert_parallel_takes_adapters(workers, device, how, options):
    """Added before the style, after it, or both: gradients, files and merged weights are one process's."""
    layer = adapted_layer(device)
    x, dout = new_signals(device)
    expected = adapted_step(layer, x, dout)
    results = workers(parallel_adapters, how, options)
    assert_close(merged([r[0] for r in results], added=()), expected, TOLERANCE[torch.float32])
    for _, files, _, _, trained in results:
        for name, state in files.items():
            own = fused_moe.lora_state_dict(layer, name)
            assert own.keys() == state.keys()
            assert all(torch.equal(state[key], t.cpu()) for key, t in own.items())
        assert set(trained) == {n for n, _ in new_layer(device).named_parameters()}
    with torch.no_grad():
        expected_merged = layer(x)
        with fused_moe.set_lora(layer, None):
            expected_base = layer(x)
    for index, right in ((2, expected_base), (3, expected_merged)):
        found = torch.cat([result[index] for result in results])
        torch.testing.assert_close(found, right.cpu(), rtol=1e-4, atol=1e-4)


def other_adapters(rank, device):
    layer = parallelize_module(new_layer(device), init_device_mesh(device.type, (RANKS,)), ExpertParallel())
    with pytest.raises(ValueError, match=r"ExpertParallel: expected adapter a1 .* on all ranks, found \("):
        add_lora(layer, 2 + 2 * rank)
    add_lora(layer, 2)


def test_other_adapters_are_an_error_on_all_ranks(workers, device):
    workers(other_adapters)


def sent_adapters(rank, device):
    """Each rank draws its own; the first one's are sent."""
    layer = new_layer(device)
    parallelize_module(layer, init_device_mesh(device.type, (RANKS,)), ExpertParallel())
    torch.manual_seed(7 + rank)
    add_lora(layer, 4)
    return fused_moe.lora_state_dict(layer, full=True)


def test_new_adapters_of_parallel_experts(workers, device):
    """They are initialised as on one process, from the first rank's generator."""
    layer = new_layer(device)
    torch.manual_seed(7)
    add_lora(layer, 4)
    if device.type == "cpu":
        for found in workers(sent_adapters):
            for key, t in fused_moe.lora_state_dict(layer).items():
                assert torch.equal(found[key], t), key


def sharded_adapters(rank, device, shape, folder):
    """Steps and files of a layer under ExpertParallel and fully_shard, or fully_shard alone."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    world = init_device_mesh(device.type, (RANKS,))

    def shard(fresh):
        layer = adapted_layer(device, fresh=fresh)
        if shape[1] > 1:
            parallelize_module(layer, mesh["ep"], ExpertParallel())
            fully_shard(layer.experts, mesh=mesh["dp"])
            layer.experts.set_gradient_divide_factor(RANKS)
        return fully_shard(layer, mesh=world)

    layer, x, dout = shard(False), *new_signals(device)
    x, dout = share(rank, x, EVEN).clone(), share(rank, dout, EVEN)
    found = adapted_step(layer, x, dout)
    with torch.no_grad():
        out = layer(x)
    # The root's parameters are gathered now. Files have shards nevertheless, and so has what merges.
    state = fused_moe.lora_state_dict(layer, "math")
    assert all(isinstance(t, DTensor) for key, t in state.items() if "scaling" not in key)
    dcp.save(state, checkpoint_id=folder)
    again = shard(True)
    state = fused_moe.lora_state_dict(again, "math")
    dcp.load(state, checkpoint_id=folder)
    fused_moe.load_lora_state_dict(again, state, "math")
    fused_moe.load_lora_state_dict(again, fused_moe.lora_state_dict(layer, full=True))
    with torch.no_grad():
        assert torch.equal(again(x), out)
        fused_moe.merge_lora(again, "math")
        fused_moe.set_lora(again, "default")
        torch.testing.assert_close(again(x), out, rtol=1e-4, atol=1e-4)
    weights = {n: t for n, t in full_state(again).items() if n.startswith("experts.w")}
    again(x.detach())
    fused_moe.remove_lora(again)
    names = {n for n, _ in new_layer(device).named_parameters()}
    for _ in range(2):  # the second gathers shards anew
        again(x.detach()).sum().backward()
        assert {n for n, p in again.named_parameters() if p.requires_grad and p.grad is not None} == names
        again.zero_grad()
    return found, weights


@pytest.mark.parametrize("shape", ((1, 2), (2, 1)), ids=("both", "fully_shard"))
def test_fully_shard_of_adapters(workers, device, tmp_path, shape):
    """Gradients are means over all ranks. torch.distributed.checkpoint saves and loads adapters alone. Merged
    and removed, the layer computes and trains as it should."""
    results = workers(sharded_adapters, shape, str(tmp_path))
    layer = fused_moe.merge_lora(adapted_layer(device), "math")
    for _, weights in results:
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, layer.get_parameter(name).detach().cpu())
    found = merged([found for found, _ in results], added=())
    expected = adapted_step(adapted_layer(device), *new_signals(device))
    for name, value in expected.items():
        if name.startswith("d") and name != "dx":
            value /= RANKS
    assert_close(found, expected, TOLERANCE[torch.float32])


def refused_adapters(rank, device):
    """Messages of calls that shards rule out."""
    world = init_device_mesh(device.type, (RANKS,))
    found = []
    sharded = fully_shard(adapted_layer(device), mesh=world)
    second = fully_shard(adapted_layer(device), mesh=world, shard_placement_fn=shard_second)
    both = new_layer(device)
    mesh = init_device_mesh(device.type, (1, RANKS), mesh_dim_names=("dp", "ep"))
    parallelize_module(both, mesh["ep"], ExpertParallel())
    fully_shard(both.experts, mesh=mesh["dp"])
    quantised = quantised_layer("int8", device, rank=2)
    fully_shard(quantised, mesh=world)
    for call in (
        lambda: add_lora(sharded, 2, name="other"),
        lambda: add_lora(both, 2),
        lambda: fused_moe.merge_lora(second),
        lambda: fused_moe.merge_lora(quantised, requantize=True),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__} {error}")
    return found


@takes_integers
def test_adapters_that_shards_rule_out(workers, cpu):
    for found in workers(refused_adapters):
        expected = "of float values, and adapters, to be shards of experts, Shard(0), found"
        assert found == [
            "TypeError add_lora: expected w1 to be a plain parameter, as before ExpertParallel and "
            + "fully_shard, found DTensor",
            "ValueError add_lora: expected w1 to be sharded by ExpertParallel alone, as before fully_shard, "
            + "found other shards",
            f"ValueError merge_lora: expected experts.w1 {expected} (Shard(dim=1),)",
            f"ValueError merge_lora: expected experts.w1 {expected} (Shard(dim=0),)",
        ]


# --- published checkpoints ----------------------------------------------------------------------------


def loaded_layers(rank, device, source, config):
    """[state of a sharded layer into which a checkpoint's was read]"""
    mesh = init_device_mesh(device.type, (RANKS,))
    states = []
    for shard in ("fully_shard", "ExpertParallel", "both"):
        layer = FusedMoE.from_hf(config, device="meta" if shard == "fully_shard" else device)
        if shard != "fully_shard":
            parallelize_module(layer, mesh, {"experts": ExpertParallel()})
        if shard != "ExpertParallel":
            ignored = set(layer.experts.parameters()) if shard == "both" else None
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        layer = layer.to_empty(device=device) if shard == "fully_shard" else layer
        load_layer(layer, source, config, 3)
        kinds = {name: isinstance(value, DTensor) for name, value in layer.state_dict().items()}
        assert kinds["experts.w1"] and kinds["router.gate.weight"] == (shard != "ExpertParallel")
        with pytest.raises(ValueError, match="to be whole, as of .*, found a DTensor"):
            to_hf(blocks(config)[0], layer.state_dict())
        states.append({name: whole(value) for name, value in layer.state_dict().items()})
    with pytest.raises(ValueError, match="off the meta device, as after to_empty"):
        load_layer(fully_shard(FusedMoE.from_hf(config, device="meta"), mesh=mesh), source, config, 3)
    return states


def test_published_layers_into_shards(workers, cpu):
    config = {
        "model_type": "deepseek_v3", "hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "num_hidden_layers": 4,
    }  # fmt: skip
    (block,) = blocks(config)
    expected = FusedMoE.from_hf(config).state_dict()
    expected["expert_bias"].normal_()
    for states in workers(loaded_layers, dict(to_hf(block, expected)), config):
        for state in states:
            cases.assert_same_bits(state, dict(expected))


# --- wrong calls --------------------------------------------------------------------------------------


# What differs on the second rank: FusedMoE's arguments, the style's
UNEQUAL_LAYERS = {
    "D": ({"dim": 24}, {}, "dim 20", "24"),
    "F": ({"hidden_dim": 16}, {}, "hidden_dim 12", "16"),
    "E": ({"num_experts": 8}, {}, "num_experts 6", "8"),
    "E that N does not divide": ({"num_experts": 5}, {}, "num_experts 6", "5"),
    "K": ({"top_k": 3}, {}, "top_k 2", "3"),
    "dtype": ({"dtype": torch.bfloat16}, {}, "dtype torch.float32", "torch.bfloat16"),
    "activation": ({"activation": "relu"}, {}, "activation silu", "relu"),
    "biases": ({"bias": True}, {}, "parameter experts.b1 None", "(6, 12) torch.float32"),
    "router": ({"gate_bias": True}, {}, "parameter router.gate.bias None", "(6,) torch.float32"),
    "combine": ({}, {"combine": "rank"}, "combine slot", "rank"),
    "static": ({}, {"static": True}, "static False", "True"),
    "capacity": ({}, {"static": True, "capacity": 8}, "static False", "True"),
}
# and of the experts, called with these
UNEQUAL_CALLS = {
    "D": {"dim": D + 1},
    "K": {"top_k": K + 1},
    "dtype": {"dtype": torch.float64},
}


def unequal_layers(rank, device):
    found = {}
    mesh = init_device_mesh(device.type, (RANKS,))
    for kind, (sizes, options, *_) in UNEQUAL_LAYERS.items():
        given = {"dim": D, "hidden_dim": F, "num_experts": E, "top_k": K} | (sizes if rank else {})
        layer = FusedMoE(**given, device=device)
        before = dict(layer.named_parameters())
        try:
            parallelize_module(layer, mesh, ExpertParallel(**(options if rank else {})))
        except ValueError as error:
            found[kind] = str(error)
        assert all(layer.get_parameter(name) is p for name, p in before.items())  # nothing was replaced
    with pytest.raises(
        ValueError, match="expected src_data_rank (0|None) on all ranks, found (0|None) on rank"
    ):
        parallelize_module(new_layer(device), mesh, ExpertParallel(), src_data_rank=None if rank else 0)
    return found


def test_unequal_layers_are_an_error(workers):
    """On all ranks, before a collective that would wait for ever, or take wrong memory."""
    first, second = workers(unequal_layers)
    for kind, (*_, own, other) in UNEQUAL_LAYERS.items():
        name = own[: own.rindex(" ")] if own.startswith("parameter") else own.split()[0]
        value = own.removeprefix(f"{name} ")
        message = "ExpertParallel: expected {} {} on all ranks, found {} on rank {}"
        assert first[kind] == message.format(name, value, other, 1), kind
        assert second[kind] == message.format(name, other, value, 0), kind


def unequal_calls(rank, device, options):
    experts = parallelize_module(
        new_layer(device), init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options)
    ).experts
    found = {}
    for kind, differs in UNEQUAL_CALLS.items():
        given = {"dim": D, "top_k": K, "dtype": torch.float32} | (differs if rank else {})
        x = torch.zeros(T, given["dim"], dtype=given["dtype"], device=device)
        ids = torch.arange(given["top_k"], device=device).repeat(T, 1)
        try:
            experts(x, torch.ones_like(ids, dtype=torch.float32), ids)
        except (ValueError, RuntimeError) as error:
            found[kind] = f"{type(error).__name__}: {error}"
    out, _ = experts(torch.zeros(T, D, device=device), torch.ones(T, K, device=device), ids[:, :K])
    assert out.shape == (T, D)  # the ranks are at one again
    return found


@every_all_to_all
def test_unequal_calls_are_an_error(workers, cpu, options):
    """On all ranks, though only their calls differ. On a GPU a static exchange terminates the processes."""
    ranks = workers(unequal_calls, options)
    one = "x (T, 20) of torch.float32 and ids (T, 2)"
    others = {
        "D": "x (T, 21) of torch.float32 and ids (T, 2)",
        "K": "x (T, 20) of torch.float32 and ids (T, 3)",
        "dtype": "x (T, 20) of torch.float64 and ids (T, 2)",
    }
    for rank, found in enumerate(ranks):
        for kind, other in others.items():
            own, theirs = (other, one) if rank else (one, other)
            if "static" in options:
                needs = f"static exchange needs {own} and one {capacity_of(options)} on all ranks"
                assert found[kind] == f"RuntimeError: ExpertParallel: {needs}"
            else:
                says = f"expected {own} on all ranks, found {theirs} on rank {1 - rank}"
                assert found[kind] == f"ValueError: ExpertParallel: {says}"


class Broken(Exception):
    """A user's own."""


def breaks(*_):
    raise Broken


def broken_calls(rank, device, options):
    """Calls that fail on rank 1: before its experts meet those of rank 0, or after it."""
    layer = parallelize_module(
        new_layer(device), init_device_mesh(device.type, (RANKS,)), ExpertParallel(**options)
    )
    x, found = torch.ones(T, D, device=device), {}
    layer(x)  # whatever an earlier call has left behind
    router, shared = layer.router, layer.shared_experts
    for kind in ("layer", "router", "experts", "x", "checkpoint"):
        hooks = []
        if rank and kind in ("layer", "router", "experts"):
            hooks = [router if kind == "router" else layer if kind == "layer" else layer.experts]
            hooks = [hooks[0].register_forward_pre_hook(breaks)]
        call = partial(checkpoint, layer, use_reentrant=False) if kind == "checkpoint" else layer
        given = x[:, :-1] if rank and kind in ("x", "checkpoint") else x
        try:
            call(given)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
        for hook in hooks:
            hook.remove()
        assert layer(x).shape == (T, D)
    hook = shared.register_forward_hook(breaks) if rank else nullcontext()
    with hook, pytest.raises(Broken) if rank else nullcontext():
        layer(x)
    assert layer(x).shape == (T, D)  # rank 0 has not been told anything
    return found


@every_exchange
def test_a_call_that_fails_on_one_rank_raises_on_all(workers, cpu, options):
    """Otherwise rank 0 would wait for a rank that does not come."""
    first, second = workers(broken_calls, options)
    for kind, error in second.items():
        own = "ValueError: FusedMoE: expected x" if kind in ("x", "checkpoint") else "Broken: "
        assert error.startswith(own), error
    one = "x (T, 20) of torch.float32 and ids (T, 2)"
    assert first.keys() == second.keys() and len(first) == 5
    for error in first.values():
        if "static" in options:
            assert error.startswith("RuntimeError: ExpertParallel: ") and f"exchange needs {one}" in error
        else:
            says = f"expected {one} on all ranks, found a call that failed on rank 1"
            assert error == f"ValueError: ExpertParallel: {says}"


def broken_wrapped_calls(rank, device):
    """Rank 1 fails before and after its experts, which a wrapper has in their place, meet those of rank 0."""
    mesh = init_device_mesh(device.type, (RANKS,))
    layer = parallelize_module(new_layer(device), mesh, ExpertParallel())
    experts, layer.experts = layer.experts, checkpoint_wrapper(layer.experts)
    x = torch.ones(T, D, device=device)
    hook = experts.register_forward_pre_hook(breaks) if rank else nullcontext()
    with hook, pytest.raises(Broken if rank else ValueError):
        layer(x)
    hook = layer.shared_experts.register_forward_hook(breaks) if rank else nullcontext()
    with hook, pytest.raises(Broken) if rank else nullcontext():
        layer(x)
    assert layer(x).shape == (T, D)


def test_a_call_of_wrapped_experts_that_fails_on_one_rank(workers, cpu):
    """The other rank is told once, or not at all."""
    workers(broken_wrapped_calls)


def refusals(rank, device):
    line = init_device_mesh(device.type, (RANKS,))
    square = init_device_mesh(device.type, (1, RANKS))
    accumulating = new_layer(device)
    accumulating.experts.w2.main_grad = torch.zeros_like(accumulating.experts.w2)
    wrong = (
        (torch.nn.Linear(2, 2), line),
        (reference.FusedMoE(4, 4, 4, 1), line),
        (fully_shard(new_layer(device), mesh=line), line),
        (accumulating, line),
        (new_layer(device), square),
        (FusedMoE(4, 4, 3, 1), line),
    )
    found = []
    for module, mesh in wrong:
        try:
            # Not through parallelize_module, which has its own message for the square mesh.
            ExpertParallel()._apply(module, mesh)
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_wrong_modules_and_meshes(workers):
    for found in workers(refusals):
        assert found == [
            "TypeError ExpertParallel: expected a FusedMoE, or its experts, found Linear",
            "TypeError ExpertParallel: expected a FusedMoE, or its experts, found _Experts",
            "ValueError ExpertParallel: expected plain parameters, as before fully_shard, found DTensors",
            "ValueError ExpertParallel: expected main_grad to be set afterwards, on the DTensors, found one",
            "ValueError ExpertParallel: expected a mesh of one dimension, found shape (1, 2)",
            "ValueError ExpertParallel: expected a number of experts that 2 divides, found 3 experts",
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 8}, "capacity only with static=True"),
        ({"static": True, "capacity": 0}, "capacity >= 1"),
        ({"overflow": "ignore"}, "overflow to be 'error' or 'drop'"),
        ({"combine": "token"}, "combine to be 'slot' or 'rank'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        ExpertParallel(**options)
