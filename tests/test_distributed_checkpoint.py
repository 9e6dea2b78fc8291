"""torch.distributed.checkpoint of layers under fully_shard, ExpertParallel and both, over 1, 2 and 4 ranks.

The tests share four worker processes. Each call makes a process group of the first ones, since a layer is
saved by one number of ranks and loaded by another.
"""

import itertools
import multiprocessing
import shutil
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import SECONDS, from_bytes, to_bytes
from test_distributed import quantised_layer, stored_bytes, takes_integers, whole
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fused_moe
from fused_moe import FusedMoE
from fused_moe.checkpoint.distributed import CheckedReader
from fused_moe.distributed import ExpertParallel
from fused_moe.quantized.formats import FORMATS

D, F, E, K = 20, 12, 8, 2
CPU = torch.device("cpu")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

# --- four workers -------------------------------------------------------------------------------------


def serve(rank, pipe):
    """A worker process: runs the functions that it is sent, each in its own process group."""
    torch.set_num_threads(1)
    while True:
        try:
            fn, ranks, store, args = pipe.recv()
        except EOFError:
            break
        group = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
        dist.init_process_group("gloo", **group, timeout=timedelta(seconds=SECONDS))
        try:
            reply = to_bytes(fn(rank, *from_bytes(args)))
            dist.barrier()  # a group that one rank leaves fails in the others
        except Exception:
            reply = traceback.format_exc()
        dist.destroy_process_group()
        pipe.send(reply)


PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "fused_moe",
]


class Workers:
    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver")  # imports PyTorch once
        context.set_forkserver_preload(PRELOADED)
        self.stores = (folder / f"store {n}" for n in itertools.count())
        self.pipes, self.processes = [], []
        for rank in range(4):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=serve, args=(rank, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()

    def __call__(self, ranks, fn, *args):
        """[fn(rank, *args)] of a world of so large a size."""
        store = next(self.stores)
        for pipe in self.pipes[:ranks]:
            pipe.send((fn, ranks, store, to_bytes(args)))
        replies = [pipe.recv() for pipe in self.pipes[:ranks]]
        errors = [reply for reply in replies if isinstance(reply, str)]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [from_bytes(reply) for reply in replies]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def workers(cpu, tmp_path_factory):
    workers = Workers(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close()


# --- layers and optimizers, resharded -----------------------------------------------------------------

# name -> ranks over which fully_shard, then ExpertParallel, divide; None: without fully_shard
LAYOUTS = {
    "one process": (None, 1),
    "FSDP2 over 2": (2, 1),
    "FSDP2 over 4": (4, 1),
    "EP over 2": (None, 2),
    "EP over 4": (None, 4),
    "EP over 2, FSDP2 over the same": (1, 2),
    "EP over 2, FSDP2 over 4": (2, 2),
}


def ranks_of(layout):
    dp, ep = LAYOUTS[layout]
    return (dp or 1) * ep


def shard(layer, layout):
    """As docs/fsdp2.md and docs/expert_parallelism.md do it."""
    dp, ep = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", (dp or 1, ep), mesh_dim_names=("dp", "ep"))
    if ep > 1:
        parallelize_module(layer, mesh["ep"], ExpertParallel())
        if dp:
            fully_shard(layer.experts, mesh=mesh["dp"])
            layer.experts.set_gradient_divide_factor(dp * ep)
            layer.experts.set_force_sum_reduction_for_comms(True)
    if dp:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dp * ep,)))
    return layer


def new_layer(seed, num_experts=E, **options):
    """A layer with every kind of parameter and buffer. Four ranks hold unequal shards of some."""
    torch.manual_seed(seed)
    options = {"num_shared_experts": 1, "shared_expert_gate": True, "bias": True, "gate_bias": True} | options
    layer = FusedMoE(D, F, num_experts, K, score_func="sigmoid", load_balance_coeff=0.01, **options)
    layer.expert_bias.normal_()
    return layer


def as_sharded(whole, other):
    """A tensor that every rank has, as another is sharded."""
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole, other.device_mesh, other.placements, src_data_rank=None)


def take_step(layer, optimizer, seed):
    """A step of given gradients: AdamW computes element by element, so its bits depend on no layout."""
    generator = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.grad = as_sharded(torch.randn(p.shape, generator=generator), p)
    optimizer.step()


def new_run(layout, seed):
    layer = shard(new_layer(seed), layout)
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)


def state_of(layer, optimizer):
    model, optim = get_state_dict(layer, optimizer)
    return {"model": model, "optimizer": optim}


def flat(state):
    """{name: tensor} of a model and its optimizer."""
    found = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    return found


def differing(state, expected):
    """Names of what this rank has other bits of, or has alone."""

    def same(found, value):
        value = as_sharded(value, found)
        return torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in (found, value)))

    found = flat(state)
    names = found.keys() & expected.keys()
    return sorted(found.keys() ^ expected.keys()) + [n for n in names if not same(found[n], expected[n])]


def save(rank, layout, folder, asynchronous):
    layer, optimizer = new_run(layout, 1)
    for seed in (1, 2):
        take_step(layer, optimizer, seed)
    state = state_of(layer, optimizer)
    if asynchronous:
        # The thread that writes would disturb the collectives of training in the same process group.
        writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        take_step(layer, optimizer, 3)  # what is written has been copied
        writing.result()
    else:
        dcp.save(state, checkpoint_id=folder)


def load(rank, layout, folders, expected):
    """[what differs after loading, and after a step more] of each folder."""
    found = []
    for folder in folders:
        layer, optimizer = new_run(layout, 5)
        state = state_of(layer, optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(layer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded = differing(state_of(layer, optimizer), expected[0])
        take_step(layer, optimizer, 3)
        found.append((loaded, differing(state_of(layer, optimizer), expected[1])))
    return found


@pytest.fixture(scope="module")
def folders(workers, tmp_path_factory):
    """{layout, or asynchronous: its checkpoint}"""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {layout: folder / layout for layout in LAYOUTS}
    for layout, path in found.items():
        workers(ranks_of(layout), save, layout, str(path), layout.startswith("EP over 2"))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other(workers, folders, layout):
    """Bit by bit, the optimizer's moments too; the next step is the one of a run without interruption. Those
    of "EP over 2" were written by async_save."""
    expected, layer = [], new_layer(1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for seed in (1, 2, 3):
        take_step(layer, optimizer, seed)
        expected.append({name: t.clone() for name, t in flat(state_of(layer, optimizer)).items()})
    for results in workers(ranks_of(layout), load, layout, [str(f) for f in folders.values()], expected[1:]):
        assert dict(zip(folders, results, strict=True)) == dict.fromkeys(folders, ([], []))


# --- training -----------------------------------------------------------------------------------------


def resumed(rank, layout, folder):
    """Parameters after four steps with balancing, and after two, a checkpoint, and two in another layer."""

    def new(seed):
        layer, optimizer = new_run(layout, seed)
        fused_moe.balance(layer, optimizer)
        return layer, optimizer

    def train(layer, optimizer, steps):
        for step in steps:
            x = torch.randn(16, D, generator=torch.Generator().manual_seed(10 * step + rank))
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = new(1), new(5)
    train(*first, range(2))
    dcp.save(state_of(*first), checkpoint_id=folder)
    train(*first, range(2, 4))
    state = state_of(*second)
    dcp.load(state, storage_reader=CheckedReader(folder))
    set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(*second, range(2, 4))
    return [{n: whole(t) for n, t in flat(state_of(*run)).items()} for run in (first, second)]


@pytest.mark.parametrize(
    "layout", ("FSDP2 over 2", "EP over 2, FSDP2 over the same", "EP over 2, FSDP2 over 4")
)
def test_a_resumed_run_is_the_uninterrupted_one(workers, tmp_path, layout):
    """In all bits, expert_bias included."""
    for first, second in workers(ranks_of(layout), resumed, layout, str(tmp_path)):
        assert first.keys() == second.keys()
        assert [name for name, value in first.items() if not torch.equal(second[name], value)] == []


# --- full state dicts, adapters, quantised weights ----------------------------------------------------


def full_states(rank, layout, num_experts, state, folder):
    """A layer's, then that of one which loads a state that the first rank alone has, then that of one which
    loads the shards of the second."""
    first, second, third = (shard(new_layer(seed, num_experts), layout) for seed in (1, 5, 6))
    given = state if rank == 0 else {}
    set_model_state_dict(second, given, options=BROADCAST)
    dcp.save(get_model_state_dict(second), checkpoint_id=folder)
    shards = get_model_state_dict(third)
    dcp.load(shards, checkpoint_id=folder)
    set_model_state_dict(third, shards)
    return [get_model_state_dict(layer, options=FULL) for layer in (first, second, third)]


FULL_LAYOUTS = [(layout, E) for layout in LAYOUTS if layout != "one process"]
FULL_LAYOUTS += [("FSDP2 over 4", 6), ("EP over 2, FSDP2 over 4", 6)]  # unequal shards of experts


@pytest.mark.parametrize("layout, num_experts", FULL_LAYOUTS)
def test_full_state(workers, tmp_path, layout, num_experts):
    """Gathered on the first rank, and broadcast from it."""
    state = new_layer(1, num_experts).state_dict()
    args = (full_states, layout, num_experts, state, str(tmp_path))
    for found in workers(ranks_of(layout), *args)[0]:
        assert found.keys() == state.keys()
        assert [name for name, value in state.items() if not torch.equal(found[name], value)] == []


def test_safetensors(workers, tmp_path):
    """A gathered state dict is a file of safetensors, and that of a file loads by broadcast."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state, layout, file = new_layer(1).state_dict(), "EP over 2, FSDP2 over 4", tmp_path / "layer.safetensors"
    for folder in ("first", "second"):
        gathered = workers(4, full_states, layout, E, state, str(tmp_path / folder))[0][2]
        safetensors.save_file(gathered, file)
        state = safetensors.load_file(file)
    assert [name for name, t in new_layer(1).state_dict().items() if not torch.equal(state[name], t)] == []


def adapted_layer(seed):
    layer = fused_moe.add_lora(new_layer(seed, bias=False), 4)
    for p in layer.experts.lora.parameters():
        torch.nn.init.normal_(p)
    return layer


def move_adapters(rank, layout, source, target):
    """Loads adapters alone, if there is a source, and saves them; the layer's state before and after."""
    layer = shard(adapted_layer(5 if source else 1), layout)
    before = {name: whole(t).clone() for name, t in layer.state_dict().items()}
    if source:
        state = fused_moe.lora_state_dict(layer)
        dcp.load(state, storage_reader=CheckedReader(source))
        fused_moe.load_lora_state_dict(layer, state)
    dcp.save(fused_moe.lora_state_dict(layer), checkpoint_id=target)
    return before, {name: whole(t).clone() for name, t in layer.state_dict().items()}


def test_adapters_alone(workers, tmp_path):
    """From each layout to the next; weights, router and shared experts stay as they were."""
    expected, source = adapted_layer(1).state_dict(), None
    for layout in ("FSDP2 over 2", "EP over 4", "EP over 2, FSDP2 over 4", "one process", "FSDP2 over 4"):
        target = str(tmp_path / layout)
        for before, after in workers(ranks_of(layout), move_adapters, layout, source, target):
            for name, value in after.items():
                assert torch.equal(value, (expected if "lora" in name else before)[name]), name
        source = target


def move_quantised(rank, format, source, target):
    """As move_adapters, of a whole layer. Shards alone: gloo gathers no e4m3."""
    layer = quantised_layer(format, CPU, 5 if source else 1, rank=2)
    if dist.get_world_size() > 1:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if source:
        state = get_model_state_dict(layer)
        dcp.load(state, storage_reader=CheckedReader(source))
        set_model_state_dict(layer, state)
    dcp.save(get_model_state_dict(layer), checkpoint_id=target)
    return stored(layer)


def stored(layer):
    """stored_bytes, without the adapters' scale, which is a number."""
    return stored_bytes({name: t for name, t in layer.state_dict().items() if t.dim()})


@takes_integers
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_layers(workers, tmp_path, format):
    """Codes and scales of shards, two, four and none, with adapters; five experts, so unequal shards."""
    expected = stored(quantised_layer(format, CPU, rank=2))
    source = None
    for step, ranks in enumerate((2, 4, 1, 2)):
        target = str(tmp_path / str(step))
        results = workers(ranks, move_quantised, format, source, target)
        for name, (dtype, shape, data) in expected.items():
            assert all(found[name][:2] == (dtype, shape) for found in results), name
            assert torch.equal(torch.cat([found[name][2] for found in results]), data), name
        source = target


# --- bad input ----------------------------------------------------------------------------------------


def spoiled(folder, how):
    """A copy of a checkpoint, with one thing wrong."""
    copy = folder.parent / how
    shutil.copytree(folder, copy)
    file = max(copy.glob("*.distcp"))
    if how == "no metadata":
        (copy / ".metadata").unlink()
    elif how == "no file":
        file.unlink()
    elif how == "a short file":
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 4)
    return copy, file.name


def refusal(rank, layout, folder, options):
    """The error, and the names of what has been written over."""
    layer = shard(new_layer(5, **options), layout)
    before = {name: whole(t).clone() for name, t in layer.state_dict().items()}
    state = {"model": get_model_state_dict(layer)}
    try:
        dcp.load(state, storage_reader=CheckedReader(folder))
        error = None
    except CheckpointException as raised:
        error = str(raised)
    after = {name: whole(t) for name, t in layer.state_dict().items()}
    return error, [name for name, value in before.items() if not torch.equal(after[name], value)]


# what is wrong -> options of the layer, and words of the error
WRONG = {
    "no metadata": ({}, "No such file or directory: '{folder}/.metadata'"),
    "no file": ({}, "CheckedReader: expected the file {folder}/{file} with model."),
    "a short file": ({}, "bytes or more in {folder}/{file}, which has model."),
    "another shape": (
        {"num_shared_experts": 2},
        "Size mismatch between saved torch.Size([12, 20]) and current: "
        "torch.Size([24, 20]) for model.shared_experts.w1.weight",
    ),
    "a missing key": ({"expert_scale": True}, "Missing key in checkpoint state_dict: model.router.expert"),
    "keys too many": (
        {"gate_bias": False},
        "expected no other keys in {folder}, found model.router.gate.bias",
    ),
}


@pytest.mark.parametrize("layout", ("one process", "EP over 2, FSDP2 over the same"))
@pytest.mark.parametrize("how", WRONG)
def test_bad_checkpoints(workers, folders, tmp_path, layout, how):
    """Every rank raises an error that names the file or the key, and no parameter is written over."""
    options, words = WRONG[how]
    whole_copy = tmp_path / "whole"
    shutil.copytree(folders["FSDP2 over 2"], whole_copy)
    folder, file = spoiled(whole_copy, how)
    for error, changed in workers(ranks_of(layout), refusal, layout, str(folder), options):
        assert words.format(folder=folder, file=file) in error
        assert changed == []


@pytest.mark.quick
def test_keys_too_many_at_the_top(tmp_path):
    """Shared experts, of which the layer has none at all; entries of other dicts may be left out."""
    dcp.save(new_layer(1).state_dict() | {"run": {"step": 3}}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(new_layer(5).state_dict(), storage_reader=CheckedReader(tmp_path), no_dist=True)
    layer = new_layer(5, num_shared_experts=0, shared_expert_gate=False)
    with pytest.raises(CheckpointException, match="other keys in .*, found shared_experts.w1.weight, "):
        dcp.load(layer.state_dict(), storage_reader=CheckedReader(tmp_path), no_dist=True)


@pytest.mark.parametrize("saved, own", (("fp8", "int8"), ("int8", "fp8")))
def test_codes_of_another_format(tmp_path, saved, own):
    """Both have the same names and shapes."""
    dcp.save(quantised_layer(saved, CPU).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    layer = quantised_layer(own, CPU, 5)
    before = stored_bytes(layer.state_dict())
    message = f"expected experts.w1.weight of dtype torch.{own}.* in .*, found torch.{saved}"
    with pytest.raises(CheckpointException, match=message.replace("fp8", "float8_e4m3fn")):
        dcp.load(layer.state_dict(), storage_reader=CheckedReader(tmp_path), no_dist=True)
    for name, (_, _, data) in stored_bytes(layer.state_dict()).items():
        assert torch.equal(data, before[name][2])


def test_floats_are_cast(tmp_path):
    dcp.save(new_layer(1).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    layer = new_layer(5).bfloat16()
    dcp.load(layer.state_dict(), storage_reader=CheckedReader(tmp_path), no_dist=True)
    assert torch.equal(layer.experts.w1, new_layer(1).experts.w1.bfloat16())
