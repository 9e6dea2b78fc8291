"""The wrappers of the matrix: what is done to a layer, and how its results are judged."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from cases import BF16, F32, assert_as_good, assert_same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fused_moe import QuantizedWeight
from fused_moe.quantized import tiles

from .kinds import ALL, K, Kind, T, gradients, trained

ops = torch.ops.fused_moe
PARTS = tuple(range(first, first + 4) for first in range(0, T, 4))  # tokens of three samples
FEW = range(T - 4)
ONE_PADDED = range(8, 10)  # two tokens, with num_tokens one


class Case:
    """A layer of one kind on a device, and an input."""

    def __init__(self, kind: Kind, device: torch.device, folder: Path):
        self.kind, self.device, self.folder = kind, device, folder
        self.x, self.dout = (t.to(device) for t in kind.tokens())
        self.given = self.given_of(ALL)

    @cached_property
    def layer(self) -> nn.Module:
        return self.make()

    def make(self, seed: int = 0) -> nn.Module:
        return self.kind.make(seed).to(self.device)

    def given_of(self, rows: range) -> dict:
        return self.kind.given_of(rows, self.device)

    def call(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        return (self.layer if layer is None else layer)(x, **self.given)

    def train(self, run: Callable | None = None, layer: nn.Module | None = None) -> dict:
        """One forward and backward: out, dx and the gradient of every parameter that is trained."""
        layer = self.layer if layer is None else layer
        return gradients(run or partial(self.call, layer=layer), layer, self.x, self.dout)

    def check(self, found: dict, dtype=F32, rows: range = ALL, only: tuple | None = None) -> None:
        """Judges results by float64. Those computed in `dtype` may be in a wider one."""
        eager, exact = self.kind.truth(dtype, rows)
        exact = {name: exact[name] for name in only or exact}
        assert found.keys() == exact.keys()
        assert_as_good({n: t.detach().cpu().to(eager[n].dtype) for n, t in found.items()}, eager, exact)

    def check_bits(self, found: dict, seed: int = 0) -> None:
        """The results are those of a fresh layer without a wrapper. The row "alone" judges those."""
        assert_same_bits(found, self.train(layer=self.make(seed)))

    def check_count(self) -> None:
        """The layer has counted the experts of each token of one forward pass."""
        counted = getattr(self.layer, "tokens_per_expert", None)
        if counted is not None:
            remote = int((self.given.get("ids", counted.new_zeros(0))[2:] < 0).sum())
            assert counted.sum() == int(self.given.get("num_tokens", T)) * K - remote


class Wrapper(NamedTuple):
    group: str  # the table in the docs
    title: str
    attempts: Callable[[Case], list[Callable[[], None]]]  # each is right, or each raises the cell's error
    needs: str | None = None  # a package
    distributed: bool = False  # wants a process group


WRAPPERS: dict[str, Wrapper] = {}
CALLS, STATE = "calls", "weights and state"


def wrapper(name: str, title: str, group: str = CALLS, *, each: bool = False, **settings):
    """Registers a function of a case that asserts; with `each`, one that returns several of no arguments."""

    def register(function):
        attempts = function if each else lambda case: [partial(function, case)]
        WRAPPERS[name] = Wrapper(group, title, attempts, **settings)
        return function

    return register


@wrapper("alone", "alone")
def alone(case):
    case.check(case.train())
    case.check_count()


# --- memory -----------------------------------------------------------------------------------------------


@wrapper("checkpoint", "`checkpoint(use_reentrant=False)`")
def checkpoint_non_reentrant(case):
    case.check_bits(case.train(partial(checkpoint, case.call, use_reentrant=False)))
    case.check_count()


@wrapper("checkpoint, reentrant", "`checkpoint(use_reentrant=True)`")
def checkpoint_reentrant(case):
    case.check_bits(case.train(partial(checkpoint, case.call, use_reentrant=True)))
    case.check_count()


SAVED = {ops.route.default, ops.route_plan.default, ops.experts_up.default, ops.quantized_mm.default}


@wrapper("checkpoint, selective", "selective checkpointing by operators", each=True)
def checkpoint_selective(case):
    def run(inverted):
        def policy(ctx, op, *args, **kwargs):
            keep = (op in SAVED) != inverted
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        case.check_bits(case.train(partial(checkpoint, case.call, use_reentrant=False, context_fn=contexts)))

    return [partial(run, False), partial(run, True)]


@wrapper("save_on_cpu", "`save_on_cpu`")
def save_on_cpu(case):
    with torch.autograd.graph.save_on_cpu(pin_memory=case.device.type == "cuda"):
        case.check_bits(case.train())


# --- transforms of functions ------------------------------------------------------------------------------


def loss_of(layer: nn.Module, parameters: dict, x: Tensor, dout: Tensor, given: dict):
    """A loss with dout as out's gradient, and out."""
    out = functional_call(layer, parameters, (x,), given)
    return (out * dout).sum(), out


def named(out: Tensor, dx: Tensor, parameters: dict) -> dict:
    return {"out": out, "dx": dx, **{f"d{name}": grad for name, grad in parameters.items()}}


def detached(layer: nn.Module) -> dict:
    return {name: p.detach() for name, p in trained(layer).items()}


@wrapper("torch.func.grad", "`torch.func.grad`")
def func_grad(case):
    loss = torch.func.grad(partial(loss_of, case.layer), argnums=(0, 1), has_aux=True)
    (dparameters, dx), out = loss(detached(case.layer), case.x, case.dout, case.given)
    case.check(named(out, dx, dparameters))


@wrapper("torch.func.vmap", "`torch.func.vmap` of `grad`: each sample's")
def func_vmap(case):
    loss = torch.func.grad(partial(loss_of, case.layer), argnums=(0, 1), has_aux=True)
    x, dout = (torch.stack([t[rows.start : rows.stop] for rows in PARTS]) for t in (case.x, case.dout))
    given = pytree.tree_map(lambda *t: torch.stack(t), *(case.given_of(rows) for rows in PARTS))
    batched = torch.func.vmap(loss, in_dims=(None, 0, 0, 0))
    (dparameters, dx), out = batched(detached(case.layer), x, dout, given)
    for i, rows in enumerate(PARTS):
        case.check(named(out[i], dx[i], {name: grad[i] for name, grad in dparameters.items()}), rows=rows)


@wrapper("torch.func.jacrev", "`torch.func.jacrev`")
def func_jacrev(case):
    def run(parameters, x):
        out = functional_call(case.layer, parameters, (x,), case.given_of(ONE_PADDED))
        return out, out

    x, dout = (t[ONE_PADDED.start : ONE_PADDED.stop] for t in (case.x, case.dout))
    jacobians, out = torch.func.jacrev(run, argnums=(0, 1), has_aux=True)(detached(case.layer), x)
    dparameters, dx = pytree.tree_map(lambda j: torch.tensordot(dout, j, 2), jacobians)
    case.check(named(out, dx, dparameters), rows=ONE_PADDED)


@wrapper("is_grads_batched", "`is_grads_batched`, `jacobian(vectorize=True)`", each=True)
def is_grads_batched(case):
    def batched():
        """The gradient of some tokens' output is that of a call with those alone."""
        x, parameters = case.x.detach().requires_grad_(), trained(case.layer)
        douts = torch.zeros(len(PARTS), *case.dout.shape, device=case.device)
        for i, rows in enumerate(PARTS):
            douts[i, rows.start : rows.stop] = case.dout[rows.start : rows.stop]
        out = case.call(x)
        dx, *grads = torch.autograd.grad(out, [x, *parameters.values()], douts, is_grads_batched=True)
        for i, rows in enumerate(PARTS):
            mine = slice(rows.start, rows.stop)
            found = {name: grad[i] for name, grad in zip(parameters, grads, strict=True)}
            case.check(named(out[mine], dx[i, mine], found), rows=rows)
            assert dx[i].count_nonzero() == dx[i, mine].count_nonzero()

    def jacobian():
        run = partial(case.layer, **case.given_of(ONE_PADDED))
        x, dout = (t[ONE_PADDED.start : ONE_PADDED.stop] for t in (case.x, case.dout))
        found = torch.autograd.functional.jacobian(run, x, vectorize=True)
        expected = torch.autograd.functional.jacobian(run, x)
        torch.testing.assert_close(found, expected)
        assert torch.tensordot(dout, found, 2).count_nonzero()

    return [batched, jacobian]


# --- compilers --------------------------------------------------------------------------------------------


def called(case) -> nn.Module:
    """The layer after a call: packed experts of transformers arrange their weights in the first one."""
    with torch.no_grad():
        case.call(case.x, case.layer.eval())
    return case.layer


def compiled(case, backend):
    torch._dynamo.reset()
    run = torch.compile(called(case).train(), fullgraph=True, backend=backend)
    case.check(case.train(partial(case.call, layer=run)))
    case.check_count()
    torch._dynamo.reset()


@wrapper("compile, aot_eager", '`torch.compile(backend="aot_eager")`')
def compile_aot_eager(case):
    compiled(case, "aot_eager")


@wrapper("compile, inductor", "`torch.compile`")
def compile_inductor(case):
    compiled(case, "inductor")


class Positional(nn.Module):
    """Tracing takes no keyword-only arguments."""

    def __init__(self, layer: nn.Module, names: tuple):
        super().__init__()
        self.layer, self.names = layer, names

    def forward(self, x, *given):
        return self.layer(x, **dict(zip(self.names, given, strict=True)))


@wrapper("jit.trace", "`torch.jit.trace`")
def jit_trace(case):
    """Traced, with its check, on fewer tokens than it is called with; saved and loaded."""
    few = case.given_of(FEW)
    layer = Positional(called(case), tuple(few))
    traced = torch.jit.trace(layer, (case.x[: len(FEW)], *few.values()))
    case.check(case.train(lambda x: traced(x, *case.given.values())))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(case.x, *case.given.values()), case.call(case.x))


@wrapper("export", "`torch.export`")
def export(case):
    """Saved, loaded, and run with and without gradients on other numbers of tokens."""
    layer, given = called(case), case.given_of(FEW)
    dynamic = {name: {0: torch.export.Dim.AUTO} if t.dim() else None for name, t in given.items()}
    dynamic = {"x": {0: torch.export.Dim.AUTO}, **dynamic}
    file = io.BytesIO()
    x = case.x[: len(FEW)]
    torch.export.save(torch.export.export(layer, (x,), given, dynamic_shapes=dynamic), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    case.check(case.train(lambda x: loaded(x, **case.given), loaded))
    with torch.no_grad():
        assert torch.equal(loaded(case.x, **case.given), case.call(case.x))


@wrapper("autocast", "`torch.autocast`")
def autocast(case):
    def run(x):
        with torch.autocast(case.device.type, BF16):
            return case.call(x)

    found = case.train(run)
    assert all(t.dtype == F32 for name, t in found.items() if name != "out")
    case.check(found, BF16)


# --- data parallel ----------------------------------------------------------------------------------------


@wrapper("DDP", "`DistributedDataParallel`", distributed=True)
def ddp(case):
    parallel = DistributedDataParallel(case.layer)
    for _ in range(2):
        found = case.train(partial(case.call, layer=parallel))
    case.check_bits(found)


class Parent(nn.Module):
    """Writes into the layer's output, as a residual may."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor, **given) -> Tensor:
        h = self.moe(x, **given)
        h += x
        return h


def full(found: dict) -> dict:
    return {
        n: t.full_tensor() if isinstance(t, torch.distributed.tensor.DTensor) else t for n, t in found.items()
    }


def dtypes(layer: nn.Module) -> dict:
    return {name: t.dtype for name, t in layer.state_dict().items()}


@wrapper("FSDP2", "`fully_shard`", distributed=True)
def fsdp2(case):
    """Shards a layer and its parent, on three dimensions."""
    before, parent = dtypes(case.layer), Parent(case.layer)
    fully_shard(parent.moe)
    fully_shard(parent)
    given = {n: t if t.dim() == 0 else t.unflatten(0, (3, -1)) for n, t in case.given.items()}
    if case.kind.takes_three_dimensions:
        run = lambda x: parent(x.unflatten(0, (3, -1)), **given).flatten(0, 1)  # noqa: E731
    else:
        run = lambda x: parent(x, **case.given)  # noqa: E731
    for _ in range(2):
        found = full(case.train(run, case.layer))
    expected = case.train(layer=case.make())
    assert_same_bits(found, {**expected, "out": expected["out"] + case.x, "dx": expected["dx"] + case.dout})
    assert dtypes(case.layer) == before


@wrapper("FSDP2, policy", "`fully_shard` with a bfloat16 `MixedPrecisionPolicy`", distributed=True)
def fsdp2_policy(case):
    before = dtypes(case.layer)
    fully_shard(case.layer, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32))
    for _ in range(2):
        found = full(case.train())
    assert found["out"].dtype == BF16
    assert all(t.dtype == F32 for name, t in found.items() if name != "out")
    case.check(found, BF16)
    assert dtypes(case.layer) == before


class Partitioned:
    """Parameters that exist only from before a module's forward until after it, and so in backward, as
    DeepSpeed's ZeRO-3 has them: `param.data` is emptied meanwhile."""

    def __init__(self, layer: nn.Module):
        self.stored = {p: p.data for p in layer.parameters()}
        for module in layer.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(partial(self._before, own), with_kwargs=True)
                module.register_forward_hook(partial(self._after, own))
        self._release(self.stored)

    def _gather(self, own):
        for p in own:
            p.data = self.stored[p].clone()

    def _release(self, own):
        for p in own:
            p.data = p.data.new_empty(0)

    def _before(self, own, module, args, kwargs):
        self._gather(own)
        wrap = partial(_OnBackward.apply, partial(self._release, own))
        return pytree.tree_map_only(torch.Tensor, lambda t: wrap(t) if t.requires_grad else t, (args, kwargs))

    def _after(self, own, module, args, result):
        wrap = partial(_OnBackward.apply, partial(self._gather, own))
        result = pytree.tree_map_only(torch.Tensor, lambda t: wrap(t) if t.requires_grad else t, result)
        self._release(own)
        return result


class _OnBackward(torch.autograd.Function):
    """The identity; calls a function in backward."""

    @staticmethod
    def forward(ctx, function, t):
        ctx.function = function
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return None, grad


@wrapper("ZeRO-like hooks", "hooks that gather parameters, as ZeRO-3's", STATE)
def zero_hooks(case):
    Partitioned(case.layer)
    for _ in range(2):
        case.check(case.train())


# --- state ------------------------------------------------------------------------------------------------


@wrapper("meta, assign", "made on `meta`, `load_state_dict(assign=True)`", STATE)
def meta_assign(case):
    layer = case.kind.make(1, device="meta")
    layer.load_state_dict(case.layer.state_dict(), assign=True)
    case.check_bits(case.train(layer=layer))


@wrapper("state_dict", "`load_state_dict`", STATE)
def state_dict(case):
    """Names are strict, every value arrives."""
    layer = case.make(1)
    case.train(layer=layer)
    state = case.layer.state_dict()
    for name in state:
        rest = {n: t for n, t in state.items() if n != name}
        if name.endswith("lora.scaling"):  # older files have none
            with pytest.warns(UserWarning, match="scaling"):
                case.make(1).load_state_dict(rest)
            continue
        if name.endswith("weight_zero_point"):  # symmetric weights have none
            case.make(1).load_state_dict(rest)
            continue
        with pytest.raises(RuntimeError, match=re.escape(name)):
            case.make(1).load_state_dict(rest)
        with pytest.raises(RuntimeError, match=re.escape(f"{name}_of_another")):
            case.make(1).load_state_dict({**state, f"{name}_of_another": state[name]})
    layer.load_state_dict(state)
    case.check_bits(case.train(layer=layer))


@wrapper("state_dict, assign", "`load_state_dict(assign=True)`", STATE)
def state_dict_assign(case):
    layer = case.make(1)
    case.train(layer=layer)
    layer.load_state_dict(case.layer.state_dict(), assign=True)
    case.check_bits(case.train(layer=layer))


@wrapper("deepcopy", "`copy.deepcopy`", STATE)
def deepcopy(case):
    """The copy has separate memory."""
    case.train()
    copied = copy.deepcopy(case.layer)
    case.check_bits(case.train(layer=copied))
    with torch.no_grad():
        for parameter in case.layer.parameters():
            parameter.zero_()
    case.check_bits(case.train(layer=copied))


@wrapper("torch.save", "`torch.save` of the layer", STATE)
def torch_save(case):
    case.train()
    file = io.BytesIO()
    torch.save(case.layer, file)
    file.seek(0)
    case.check_bits(case.train(layer=torch.load(file, weights_only=False)))


@wrapper("pickle", "`pickle`", STATE)
def pickled(case):
    case.train()
    case.check_bits(case.train(layer=pickle.loads(pickle.dumps(case.layer))))


@wrapper("safetensors", "`safetensors`", STATE, needs="safetensors")
def safetensors(case):
    from safetensors.torch import load_file, save_file

    save_file(case.layer.state_dict(), case.folder / "layer.safetensors")
    state = load_file(case.folder / "layer.safetensors", device=str(case.device))
    layer = case.make(1)
    layer.load_state_dict(state)
    case.check_bits(case.train(layer=layer))
    layer = case.kind.make(1, device="meta")
    layer.load_state_dict(state, assign=True)
    case.check(case.train(layer=layer))  # a file's tensors begin anywhere, and MKL's sums depend on that


@wrapper(
    "accelerate offload", "`accelerate.cpu_offload`, `disk_offload`", STATE, each=True, needs="accelerate"
)
def accelerate_offload(case):
    """Offloads a layer on the CPU. Parameters are on meta after each call, and get no gradient there."""
    import accelerate

    def run(offload):
        layer = offload(case.kind.make(), case.device)
        for _ in range(2):
            x = case.x.detach().requires_grad_()
            out = case.call(x, layer)
            out.backward(case.dout)
        assert all(p.is_meta for p in layer.parameters())
        case.check({"out": out.detach(), "dx": x.grad}, only=("out", "dx"))

    return [
        partial(run, accelerate.cpu_offload),
        partial(run, lambda layer, device: accelerate.disk_offload(layer, str(case.folder), device)),
    ]


# --- memory that is not there -----------------------------------------------------------------------------


def with_each_tensor(case, spoil: Callable[[nn.Module, str], None]):
    """A forward pass of a layer with one parameter spoilt, for every parameter of ours."""

    def run(name):
        layer = case.make()
        *path, last = name.split(".")
        spoil(layer.get_submodule(".".join(path)), last)
        case.call(case.x, layer)

    ours = [name for name, _ in case.layer.named_parameters() if name != "gate.weight"]
    return [partial(run, name) for name in ours]


@wrapper("freed storage", "a parameter's storage is freed", STATE, each=True)
def freed_storage(case):
    def spoil(module, name):
        getattr(module, name).untyped_storage().resize_(0)

    return with_each_tensor(case, spoil)


@wrapper("half loaded", "a parameter is left on `meta`", STATE, each=True)
def half_loaded(case):
    def spoil(module, name):
        p = getattr(module, name)
        setattr(module, name, nn.Parameter(p.to("meta"), requires_grad=p.requires_grad))

    return with_each_tensor(case, spoil)


# --- weight sync ------------------------------------------------------------------------------------------


def load(target: nn.Module, trainer: nn.Module) -> None:
    target.load_state_dict(trainer.state_dict())


def tensors_of(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


@torch.no_grad()
def copy_values(target: nn.Module, trainer: nn.Module) -> None:
    for mine, other in zip(tensors_of(target), tensors_of(trainer), strict=True):
        mine.copy_(other)


def copy_data(target: nn.Module, trainer: nn.Module) -> None:
    import fused_moe

    for mine, other in zip(tensors_of(target), tensors_of(trainer), strict=True):
        mine.data.copy_(other.data)
    fused_moe.refresh_weights(target)


def copy_in_inference_mode(target: nn.Module, trainer: nn.Module) -> None:
    import fused_moe

    with torch.inference_mode():
        copy_values(target, trainer)
    fused_moe.refresh_weights(target)


@wrapper("weight sync", "three updates of a trainer's parameters", STATE, each=True)
def weight_sync(case):
    """Bits of a fresh layer after every update, whichever way values come; packed, and in tiles."""

    def trainer_of(step):
        """It has run, so its weights are arranged as the layer's."""
        trainer = case.make(step)
        case.train(layer=trainer)
        return trainer

    def run(write):
        layer = case.make()
        case.train(layer=layer)
        for step in (1, 2, 3):
            write(layer, trainer_of(step))
            case.check_bits(case.train(layer=layer), step)

    def run_tiles(write):
        """On the CPU no operator reads tiles, so those are compared."""
        with mock.patch.object(tiles, "are_read_on", lambda device: device.type != "meta"):
            layer = case.make()
            packed_tensors(layer)
            for step in (1, 2, 3):
                fresh = case.make(step)
                write(layer, fresh)
                for mine, other in zip(packed_tensors(layer), packed_tensors(fresh), strict=True):
                    assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))

    ways = (load, copy_values, copy_data, copy_in_inference_mode)
    has_tiles = (
        any(isinstance(m, QuantizedWeight) for m in case.layer.modules()) and case.device.type == "cpu"
    )
    return [partial(run, way) for way in ways] + [partial(run_tiles, way) for way in ways if has_tiles]


def packed_tensors(layer: nn.Module) -> list[Tensor]:
    weights = [m for m in layer.modules() if isinstance(m, QuantizedWeight)]
    assert all(w.is_tiled for w in weights)
    return [t for w in weights for t in (*w.tensors, *w.transposed_tensors) if t is not None]
