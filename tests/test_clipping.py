"""fused_moe.clip_grad_norm_ on 1, 2 and 4 gloo ranks: PyTorch's norm and clipped gradients of one process."""

from math import inf, nan
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import started
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fused_moe
from fused_moe import FusedMoE, clip_grad_norm_
from fused_moe.distributed import ExpertParallel

RANKS = 4


@pytest.fixture(scope="module")
def workers(cpu, tmp_path_factory):
    yield from started(RANKS, cpu, tmp_path_factory)


MAX_NORM = 0.5
NORM_TYPES = (2.0, 1, inf, 0.5, 3.0)
SHAPES = ((6, 5, 3), (8, 4), (7,), (), (3, 2))  # 7 and 6 are no multiples of 4, 3 leaves a rank without any


def new_layer(dtype=torch.float64):
    torch.manual_seed(1)
    return FusedMoE(8, 12, 8, 2, num_shared_experts=1, bias=True, gate_bias=True).to(dtype)


def fill(parameters, seed=2):
    """Gradients, the same values on every rank and in every layout."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    return parameters


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def clipped(parameters, norm_type=2.0, clip=clip_grad_norm_, **options):
    norm = clip(parameters, MAX_NORM, norm_type, **options)
    return norm, [whole(p.grad) for p in parameters]


def on_ranks(workers, count, fn, *args):
    """The results of the first `count` ranks, all of the same bits, one of them."""
    found = [result for result in workers(among, count, fn, *args) if result is not None]
    assert len(found) == count
    for norm, grads in found[1:]:
        assert torch.equal(norm, found[0][0])
        assert all(map(torch.equal, grads, found[0][1]))
    return found[0]


def among(rank, device, count, fn, *args):
    """fn on a mesh of the first ranks; making one takes all ranks."""
    mesh = DeviceMesh("cpu", list(range(count)), mesh_dim_names=("all",))
    return fn(mesh, *args) if rank < count else None


def assert_close(found, expected, rtol=1e-13):
    """Norm and gradients, by norms."""
    (norm, grads), (expected_norm, expected_grads) = found, expected
    assert not isinstance(norm, DTensor) and norm.dim() == 0
    torch.testing.assert_close(norm.double(), expected_norm.double(), rtol=rtol, atol=0)
    for grad, value in zip(grads, expected_grads, strict=True):
        assert grad.dtype == value.dtype
        assert (grad - value).norm().double() <= rtol * value.norm().double()


# --- layouts ------------------------------------------------------------------------------------------


def expert_parallel(mesh, norm_type):
    """Router and shared experts are plain."""
    layer = parallelize_module(new_layer(), mesh, ExpertParallel())
    return clipped(fill(list(layer.parameters())), norm_type)


def sharded(mesh, norm_type):
    """FSDP2 alone."""
    layer = new_layer()
    fully_shard(layer.experts, mesh=mesh)
    return clipped(fill(list(fully_shard(layer, mesh=mesh).parameters())), norm_type)


def one_process(norm_type):
    return clipped(fill(list(new_layer().parameters())), norm_type, nn.utils.clip_grad_norm_)


@pytest.mark.parametrize("count", (1, 2, 4))
@pytest.mark.parametrize("shard", (expert_parallel, sharded))
def test_one_mesh(workers, shard, count):
    for norm_type in NORM_TYPES:
        assert_close(on_ranks(workers, count, shard, norm_type), one_process(norm_type))


def beside_fully_shard(rank, device, shape, norm_type):
    grid = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    layer = parallelize_module(new_layer(), grid["ep"], ExpertParallel())
    fully_shard(layer.experts, mesh=grid["dp"])
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    parameters = fill(list(layer.parameters()))
    assert len({p.device_mesh for p in parameters}) == 2
    with pytest.raises(Exception, match=r"mesh|DTensor"):  # why there is ours
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    return clipped(fill(parameters), norm_type)


@pytest.mark.parametrize("shape", ((2, 2), (1, 4), (4, 1)), ids=str)
def test_expert_parallel_beside_fully_shard(workers, shape):
    for norm_type in (2.0, inf):
        found = workers(beside_fully_shard, shape, norm_type)
        assert all(torch.equal(norm, found[0][0]) for norm, _ in found)
        assert_close(found[0], one_process(norm_type))


def tensor_parallel(rank, device, norm_type):
    """Shards of both kinds, _StridedShard among them, replicas and partial sums, on meshes of 1 and 2
    dimensions, beside a plain parameter."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)).double()
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, grid["tp"], plan)
    fully_shard(model[1], mesh=grid["dp"])
    fully_shard(model[2], mesh=grid["dp"])
    kinds = {type(x).__name__ for p in model.parameters() if isinstance(p, DTensor) for x in p.placements}
    assert kinds == {"Shard", "_StridedShard", "Replicate"}
    parameters = fill(list(model.parameters()))
    part = parameters[0].grad.to_local().clone() / 2
    parameters[0].grad = DTensor.from_local(part, grid["tp"], [Partial()])
    norm, grads = clipped(parameters, norm_type)
    assert parameters[0].grad.placements == (Replicate(),)
    return norm, grads


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_tensor_parallel_beside_fully_shard(workers, norm_type):
    torch.manual_seed(1)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)).double()
    expected = clipped(fill(list(model.parameters())), norm_type, nn.utils.clip_grad_norm_)
    for found in workers(tensor_parallel, norm_type):
        assert_close(found, expected)


def hybrid(rank, device, norm_type):
    """HSDP: replicas of shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layer = fully_shard(new_layer(), mesh=mesh)
    return clipped(fill(list(layer.parameters())), norm_type)


def test_replicas_of_shards(workers):
    for norm_type in (2.0, inf):
        for found in workers(hybrid, norm_type):
            assert_close(found, one_process(norm_type))


# --- gradients ----------------------------------------------------------------------------------------


def new_parameters(dtypes, mesh=None):
    """Tensors of SHAPES; with a mesh every other one is a DTensor, some shards of rank 3 are empty."""
    found = []
    for i, shape in enumerate(SHAPES):
        values = torch.zeros(shape, dtype=dtypes[i % len(dtypes)])
        if mesh is not None and shape and i % 2 == 0:
            values = distribute_tensor(values, mesh, [Shard(0)])
        found.append(nn.Parameter(values))
    return found


def of_dtypes(mesh, dtypes, foreach):
    return clipped(fill(new_parameters(dtypes, mesh)), foreach=foreach)


@pytest.mark.parametrize("foreach", (None, False, True))
@pytest.mark.parametrize("names", (["float32"], ["bfloat16"], ["float32", "bfloat16", "float64"]), ids=str)
def test_dtypes(workers, names, foreach):
    """Norms of 16-bit gradients are taken in float32: nearer to those of float64 than PyTorch's."""
    dtypes = [getattr(torch, name) for name in names]
    norm, grads = on_ranks(workers, 4, of_dtypes, dtypes, foreach)
    assert norm.dtype == (torch.float64 if torch.float64 in dtypes else torch.float32)
    parameters = fill(new_parameters(dtypes))
    values = [p.grad.double() for p in parameters]
    expected = nn.utils.get_total_norm(values)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    for grad, value in zip(grads, values, strict=True):
        torch.testing.assert_close(grad, (value * (MAX_NORM / (expected + 1e-6))).to(grad.dtype))


def without_gradients(mesh, missing):
    """Rank 1 has fewer gradients than the others, or none; its collectives are those of the others."""
    parameters = fill(new_parameters([torch.float32], mesh))
    for p in parameters[:missing] if mesh.get_rank() == 1 else ():
        p.grad = None
    norm = clip_grad_norm_(parameters, MAX_NORM)
    return norm, []


@pytest.mark.parametrize("missing", (1, len(SHAPES)))
def test_a_rank_without_some_gradients(workers, missing):
    found = [norm for norm, _ in filter(None, workers(among, 2, without_gradients, missing))]
    assert len(found) == 2 and all(norm > 0 for norm in found)


def no_gradients(mesh):
    return clip_grad_norm_(new_parameters([torch.float32], mesh), MAX_NORM), []


def test_no_gradients(workers):
    assert on_ranks(workers, 2, no_gradients)[0] == 0


def small(mesh):
    """A norm that is small enough."""
    parameters = fill(new_parameters([torch.float32], mesh))
    for p in parameters:
        p.grad.mul_(1e-4)
    before = [whole(p.grad) for p in parameters]
    norm, grads = clipped(parameters)
    assert norm < MAX_NORM and all(map(torch.equal, grads, before))
    assert clip_grad_norm_(parameters[0], MAX_NORM) < norm  # a single DTensor
    return norm, grads


def clipped_main_grads(mesh):
    """main_grads of ExpertParallel's DTensors: as DTensors, and as a rank's own buffer."""
    layer = new_layer(torch.float32)
    if mesh is not None:
        parallelize_module(layer, mesh, ExpertParallel())
    parameters = fill(list(layer.parameters()))
    for weight in layer.experts.weights:
        weight.main_grad, weight.grad = weight.grad, None
    w1 = layer.experts.w1
    w1.grad, w1.grad_added_to_main_grad = torch.full_like(w1, nan), True  # as Megatron's, which means nothing
    if mesh is not None:
        layer.experts.w2.main_grad = layer.experts.w2.main_grad.to_local()
    norm = clip_grad_norm_(parameters, MAX_NORM)
    assert layer.experts.w3.grad is None
    return norm, [layer.router.gate.weight.grad, *(whole(layer.experts.w3.main_grad),)]


def test_main_grads(workers):
    """Beside gradients of other parameters; alone, without DTensors, too."""
    parameters = fill(list(new_layer(torch.float32).parameters()))
    expected = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    for found in (on_ranks(workers, 2, clipped_main_grads), clipped_main_grads(None)):
        torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0)
        names = [name for name, _ in new_layer().named_parameters()]
        for grad, name in zip(found[1], ("router.gate.weight", "experts.w3"), strict=True):
            torch.testing.assert_close(grad, parameters[names.index(name)].grad)


def test_small_gradients_keep_their_bits(workers):
    on_ranks(workers, 4, small)


def ruined(mesh, value):
    """One element of one rank's shard is not finite."""
    parameters = fill(new_parameters([torch.float32], mesh))
    if mesh.get_rank() == 1:
        parameters[0].grad.to_local().flatten()[3] = value
    before = [whole(p.grad) for p in parameters]
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected a finite norm .*, found (nan|inf)"):
        clip_grad_norm_(parameters, MAX_NORM, error_if_nonfinite=True)
    after = [whole(p.grad) for p in parameters]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    return clip_grad_norm_(parameters, MAX_NORM).nan_to_num(7.0, posinf=8.0), []


@pytest.mark.parametrize("value", (nan, inf, -inf))
def test_what_is_not_finite_is_so_on_all_ranks(workers, value):
    """An error on every rank, with gradients as they were; without error_if_nonfinite the norm."""
    assert on_ranks(workers, 4, ruined, value)[0] == (7.0 if value != value else 8.0)


# --- ranks with other parameters ----------------------------------------------------------------------

OTHERS = r"clip_grad_norm_: expected the same \d+ parameters in the same order on all ranks, found "


def other_lists(mesh, change):
    """Rank 1's list differs: an error on all ranks, and the next call works."""
    parameters = fill(new_parameters([torch.float32], mesh))
    others = {"fewer": parameters[:-1], "reversed": parameters[::-1], "fewer shards": parameters[1:]}[change]
    own, others = (others, parameters) if mesh.get_rank() == 1 else (parameters, others)
    with pytest.raises(ValueError, match=f"{OTHERS}{len(others)} of rank {1 - mesh.get_rank()}"):
        clip_grad_norm_(own, MAX_NORM)
    dist.barrier(mesh.get_group())
    return clipped(parameters)


@pytest.mark.parametrize("change", ("fewer", "reversed", "fewer shards"))
def test_other_parameters_are_an_error_on_all_ranks(workers, change):
    on_ranks(workers, 2, other_lists, change)


def fewer_meshes(rank, device):
    """Rank 1's list has no experts, which lie on smaller meshes than the rest."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layer = parallelize_module(new_layer(), grid["ep"], ExpertParallel())
    fully_shard(layer.router, mesh=init_device_mesh("cpu", (RANKS,)))
    fill(list(layer.parameters()))
    parameters = list((layer if rank != 1 else layer.router).parameters())
    with pytest.raises(ValueError, match=OTHERS):
        clip_grad_norm_(parameters, MAX_NORM)


def test_a_rank_without_one_mesh(workers):
    """It meets the others in the largest mesh, which is first."""
    workers(fewer_meshes)


def two_meshes(rank, device):
    """Each mesh has all ranks. They enter both collectives in one order, whatever the order of parameters."""
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    shards = [distribute_tensor(torch.zeros(4 + i), mesh, [Shard(0)]) for i, mesh in enumerate(meshes)]
    parameters = fill([nn.Parameter(t) for t in shards])
    with pytest.raises(ValueError, match=f"{OTHERS}2 of rank"):
        clip_grad_norm_(parameters[:: -1 if rank == 1 else 1], MAX_NORM)
    return clip_grad_norm_(parameters, MAX_NORM)


def test_two_meshes_of_the_same_ranks(workers):
    assert len({float(norm) for norm in workers(two_meshes)}) == 1


def two_grids(rank, device):
    """Groups are numbered across a power of ten: by names, ranks would not agree which grid is first."""
    torch.distributed.distributed_c10d._world.group_count = 995
    grids = [DeviceMesh("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])]
    shards = [distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(1)]) for grid in grids]
    return clip_grad_norm_(fill([nn.Parameter(t) for t in shards]), MAX_NORM)


def test_two_grids_of_the_same_ranks(workers):
    expected = nn.utils.clip_grad_norm_(fill([nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]), MAX_NORM)
    for norm in workers(two_grids):
        torch.testing.assert_close(norm, expected)


def late(mesh):
    """Where a rank does not come, the others' collective fails after its group's timeout."""
    parameters = fill(new_parameters([torch.float32], mesh))
    with mock.patch.object(dist, "all_gather", side_effect=RuntimeError("Timed out waiting 1000ms")):
        with pytest.raises(RuntimeError, match=f"{OTHERS}Timed out waiting"):
            clip_grad_norm_(parameters, MAX_NORM)
    return clipped(parameters)


def test_a_timeout_says_what_was_expected(workers):
    on_ranks(workers, 2, late)


def on_a_grid(rank, device):
    """Rank 1's list is shorter. Rank 2, which is in no group with it, hears of it from the others."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shards = [distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(1)]) for _ in range(2)]
    parameters = fill([nn.Parameter(t) for t in shards])
    with pytest.raises(ValueError, match=OTHERS):
        clip_grad_norm_(parameters[: 1 if rank == 1 else 2], MAX_NORM)
    return clip_grad_norm_(parameters, MAX_NORM)


def test_other_parameters_on_a_grid(workers):
    assert len({float(norm) for norm in workers(on_a_grid)}) == 1


# --- without DTensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", (*NORM_TYPES, "inf", 0.0))
def test_without_dtensors_the_bits_are_pytorchs(cpu, norm_type):
    for dtypes in ([torch.float32], [torch.bfloat16, torch.float64]):
        found, expected = (
            clipped(fill(new_parameters(dtypes)), norm_type, clip)
            for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_)
        )
        assert torch.equal(found[0], expected[0]) and found[0].dtype == expected[0].dtype
        assert all(map(torch.equal, found[1], expected[1]))


def test_what_parameters_may_be(cpu):
    """One tensor, a generator, none of them; an empty generator warns, as PyTorch's."""
    one = fill(new_parameters([torch.float32])[:1])[0]
    assert torch.equal(clip_grad_norm_(one, inf), clip_grad_norm_((p for p in [one]), inf))
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in []), 1.0)
    one.grad[0, 0, 0] = nan
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(one, 1.0, error_if_nonfinite=True)
    with pytest.raises(TypeError, match="clip_grad_norm_: expected parameters to be tensors, found str"):
        clip_grad_norm_({"w": one}, 1.0)


def refused(mesh):
    """Before a partial sum is reduced."""
    partial = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ValueError, match="clip_grad_norm_: expected norm_type > 0, found 0"):
        clip_grad_norm_([partial, *fill(new_parameters([torch.float32], mesh))], MAX_NORM, 0)
    assert partial.grad.placements == (Partial(),)
    partial.main_grad, partial.grad = partial.grad, None
    assert clip_grad_norm_(partial, 1.0) == 4 and partial.main_grad.placements == (Replicate(),)
    return torch.zeros(()), []


def test_no_count_of_elements(workers):
    """PyTorch's order 0 counts the tensors with an element that is not zero, on a rank."""
    on_ranks(workers, 2, refused)


def test_it_is_public():
    assert fused_moe.clip_grad_norm_ is clip_grad_norm_
