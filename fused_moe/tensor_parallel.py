"""Tensor parallelism of experts: each of N ranks holds F/N of every expert's hidden width.

All ranks compute on the same tokens. A rank's part of F gives a part of every token's output:

    x        input_layouts -> all tokens        all-gather where tokens are sharded
    scores   = router(x)                        on every rank, the same bits
    out      = w2[:, part] act(w1[part] x) ..   routed and shared experts: a partial sum over the ranks
    out      partial -> output_layouts          all-reduce, or reduce-scatter where tokens are sharded

Backward. The gradient of out is the same on all ranks. What a rank computes from its part of F is a partial
sum: dx, dscores, the shared gate's dlogits, and gradients of adapters that every rank has whole. dscores and
dlogits are (T, K) and (T, 1); they are summed over the ranks before they go on, so that the gradients of the
router and of the gate are whole, and the same on all ranks. Of the dx that comes from those, each rank keeps
the rows of its T/N tokens, so that dx is one partial sum: it is summed once, as input_layouts say. Weights
have each element on one rank. b2 is added by the first rank alone, and has its whole gradient on all.

The split of F is Megatron-LM's of an MLP (arXiv 1909.08053, 3).
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from . import checks, function
from .activation import activation_of
from .distributed import _check_same, _check_sharded_alone, _described_adapters, _local, _local_weight
from .lora import Adapters, LoRA
from .module import Experts, FusedMoE, SharedExperts
from .ops import BLOCK, reshaped
from .paths import PLAIN, why_altered
from .quantized.weight import QuantizedWeight

__all__ = ["ExpertTensorParallel", "SplitExperts", "SplitSharedExperts"]

FN = "ExpertTensorParallel"
WIDTH = 8  # F of a rank is a multiple of it, as Hopper's kernels need; of BLOCK with FP8 training
# The dimension of F in the experts' parameters and in their adapters'; the others are whole on every rank.
DIM_OF_F = {"w1": 1, "w3": 1, "b1": 1, "b3": 1, "w2": 2, "a2": 2}


class ExpertTensorParallel(ParallelStyle):
    """Splits the hidden width F of a `FusedMoE`'s experts over the ranks of a one-dimensional DeviceMesh.

    Every rank has all E experts: w1 and w3 become DTensors Shard(1), w2 Shard(2), the biases of w1 and w3
    Shard(1), b2 Replicate; adapters, which `add_lora` may also add afterwards, likewise. Shared experts are
    split in the same way. Names do not change, and full state dicts keep names and shapes. Router and
    `shared_expert_gate` stay plain parameters, the same on all ranks with the same gradients. Apply the
    style before `fully_shard`, over another dimension of the same mesh.

    The layer sees all tokens of the mesh's ranks: `ids`, `num_tokens`, `loss_mask`, the ids that are returned
    and `tokens_per_expert` are those of all tokens. Auxiliary losses are, too: each rank adds the same, and
    it counts once.

    Args:
        input_layouts: of x, if it is no DTensor. Replicate(), the default: all ranks have the same tokens, in
            equal bits. Shard(i): each has an equal part along dimension i, and they are all-gathered. x of
            other shapes on other ranks raises ValueError on CPUs; GPUs and compiled code do not notice.
        output_layouts: of the output. Replicate(), the default: all-reduce. Shard(i): reduce-scatter.
            Partial(): nothing, each rank returns its partial sum.
        use_local_output: return a plain tensor, this rank's, in place of a DTensor.

    Raises:
        TypeError: where the style is applied, on all ranks if on one: for a module that is no FusedMoE, or
            whose experts have another type.
        ValueError: there, for parameters that are DTensors already or have a main_grad, quantised weights, a
            layer with latent_dim, linear layers of shared experts with hooks, a mesh of several dimensions, F
            of routed or shared experts that is not a multiple of 8 * N (128 * N with FP8 training), or ranks
            with different layers or layouts.

    Source: Megatron-LM's split of an MLP (arXiv 1909.08053, 3).

    Example:
        Needs a process group, under torchrun.

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from fused_moe.tensor_parallel import ExpertTensorParallel
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> parallelize_module(model, mesh["tp"], {"blocks.*.moe": ExpertTensorParallel()})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, Placement):
                checks.fail(TypeError, FN, f"{name} to be a Placement", type(layout).__name__)
        checks.check_bool(FN, "use_local_output", use_local_output)
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            checks.fail(ValueError, FN, "a mesh of one dimension", f"shape {tuple(device_mesh.shape)}")
        self._check_all(module, device_mesh)
        layer = cast(FusedMoE, module)
        experts, shared = layer.experts, layer.shared_experts
        for part in (experts, *experts.loras.values()):
            _split(part, device_mesh, DIM_OF_F, self.src_data_rank)
        # In place, as fully_shard: optimizers, hooks and the parent module keep their references.
        experts.__class__ = SplitExperts
        cast(SplitExperts, experts).mesh = device_mesh
        layer.router.register_forward_pre_hook(partial(_keep_own_rows, device_mesh))
        if shared is not None:
            for name, linear in shared.named_children():
                dims = {"weight": 1} if name == "w2" else {"weight": 0, "bias": 0}
                _split(linear, device_mesh, dims, self.src_data_rank)
            shared.__class__ = SplitSharedExperts
            cast(SplitSharedExperts, shared).mesh = device_mesh
        if layer.shared_expert_gate is not None:
            layer.shared_expert_gate.register_forward_pre_hook(partial(_keep_own_rows, device_mesh))
            layer.shared_expert_gate.register_forward_hook(partial(_sum_gradient, device_mesh))
        module.register_forward_pre_hook(partial(self._take_input, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(self._give_output, device_mesh))
        return module

    def _check_all(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Checks the layer, and that all ranks have the same: they meet here, whatever they find."""
        error, own = None, None
        try:
            _check(module, mesh.size())
            parameters = [(n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()]
            own = (repr(self), repr(module), repr(parameters))
        except Exception as found:
            error = found
        of_ranks = [None] * mesh.size()
        dist.all_gather_object(of_ranks, own, group=mesh.get_group())
        if error is not None:
            raise error
        for rank, other in enumerate(of_ranks):
            if other != own:
                expected = "the same layer and layouts on all ranks"
                checks.fail(ValueError, FN, expected, f"{'others' if other else 'an error'} on rank {rank}")

    def _take_input(self, mesh: DeviceMesh, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        x = args[0] if args else kwargs.get("x")
        _check_shape(x, mesh)
        if not isinstance(x, Tensor):
            return args, kwargs  # for forward's own error
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
        elif x.device_mesh != mesh:
            checks.fail(ValueError, FN, f"x on {mesh}", f"x on {x.device_mesh}")
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"x": x})

    def _give_output(self, mesh: DeviceMesh, module: nn.Module, args: tuple, given):
        out = given[0] if isinstance(given, tuple) else given
        checks.check_one_gradient(FN, out)
        out = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        out = out.redistribute(placements=self.output_layouts)
        if self.use_local_output:
            local = out.to_local()
            out = reshaped(local, local.shape)  # to_local's is a view, which fully_shard minds
        return (out, *given[1:]) if isinstance(given, tuple) else out

    def __repr__(self) -> str:
        names = ("input_layouts", "output_layouts", "use_local_output")
        return f"{FN}({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


class SplitExperts(Experts):
    """The experts of a layer after `ExpertTensorParallel`: this rank has F/N of each, as DTensors."""

    mesh: DeviceMesh

    def check_takes_lora(self, fn: str) -> None:
        _check_sharded_alone(fn, self, self.mesh, FN)

    def take_lora(self, name: str, adapters: Adapters) -> None:
        _check_same(_described_adapters(name, adapters), self.mesh.get_group(), FN)
        _split(adapters, self.mesh, DIM_OF_F)
        super().take_lora(name, adapters)

    def forward(  # type: ignore[override]  # shared experts are added after it
        self, x: Tensor, scores: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x (T, D), the same on all ranks -> this rank's part of the sum (T, D), counts (E,)."""
        lora, main_grads = self.adapters, self.main_grads
        if lora is not None:  # beside adapters the weights are frozen
            tensors = zip(LoRA._fields, lora.tensors, strict=False)
            a1, b1, a2, b2, a3, b3 = (self._adapter(name, t) for name, t in tensors)
            lora = LoRA(a1, b1, a2, b2, a3, b3, lora.scale)
            main_grads = (None, None, None)
        biases = (_local(self.b1), _added_once(self.b2, self.mesh), _local(self.b3))
        return function.experts_and_counts(
            x,
            tuple(map(_local_weight, self.weights, main_grads)),
            _with_summed_gradient(scores, self.mesh),
            ids,
            biases,
            self.activation,
            (self.alpha, self.limit),
            main_grads=tuple(map(_local, main_grads)),
            lora=lora,
            **self.fp8_settings,
        )

    def _adapter(self, name: str, value: Tensor | None) -> Tensor | None:
        """The operand of an adapter. b1 and b3 make a part of h, and a2 reads one."""
        local = _local(value)
        return local if local is None or name in DIM_OF_F else _with_summed_gradient(local, self.mesh)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, F over {self.mesh.size()} ranks"


class SplitSharedExperts(SharedExperts):
    """The shared experts of a layer after `ExpertTensorParallel`: this rank has a part of their width."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the layer is called, not it alone
        """x (T, D), the same on all ranks -> this rank's part of the sum (T, D)."""
        w1, w2 = _local(self.w1.weight)[None], _local(self.w2.weight)[None]
        w3 = None if self.w3 is None else _local(self.w3.weight)[None]
        b1, b3 = (None if m is None or m.bias is None else _local(m.bias)[None] for m in (self.w1, self.w3))
        b2 = _added_once(self.w2.bias, self.mesh)
        biases: dict[str, Any] = {"b1": b1, "b2": None if b2 is None else b2[None], "b3": b3}
        counts = torch.full((1,), x.size(0), dtype=torch.int32, device=x.device)
        return function.grouped_mlp(x, w1, w2, w3, counts, **biases, **activation_of(self))


class _OwnRows(torch.autograd.Function):
    """x (T, ...). Backward keeps the gradient of this rank's T/N rows: what was whole on all ranks is then a
    partial sum over them."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, num_ranks: int) -> Tensor:
        ctx.rows = slice(x.size(0) * rank // num_ranks, x.size(0) * (rank + 1) // num_ranks)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx: Tensor):
        own = torch.zeros_like(dx)
        own[ctx.rows] = dx[ctx.rows]
        return own, None, None


class _Once(torch.autograd.Function):
    """A bias on one rank, zeros on the others; the gradient is whole on all."""

    @staticmethod
    def forward(ctx, bias: Tensor, is_first: bool) -> Tensor:
        return bias.view_as(bias) if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx, dbias: Tensor):
        return dbias, None


def _check_shape(x: object, mesh: DeviceMesh) -> None:
    """Checks that all ranks have x of one shape, unless the host would wait for a device or a graph would
    break. A rank whose x is no tensor takes part, too: the others would wait for it."""
    is_other = isinstance(x, Tensor) and type(x) not in (*PLAIN, DTensor)
    if is_other or mesh.device_type != "cpu" or torch.compiler.is_compiling():
        return
    what: object = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if isinstance(x, DTensor):
        what = what, x.placements, str(x.device_mesh)
    own = torch.tensor([zlib.crc32(repr(what).encode())])
    found = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(found, own, group=mesh.get_group())
    if not all(torch.equal(other, own) for other in found):
        checks.fail(ValueError, FN, "x of the same shape on all ranks", f"{what} on this one")


def _added_once(bias: Tensor | None, mesh: DeviceMesh) -> Tensor | None:
    return None if bias is None else _Once.apply(_local(bias), mesh.get_local_rank() == 0)


def _with_summed_gradient(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """t, the same on all ranks; in backward the ranks' partial gradients are summed."""
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _keep_own_rows(mesh: DeviceMesh, module: nn.Module, args: tuple) -> tuple:
    """A hook before the router and the shared experts' gate."""
    return _OwnRows.apply(args[0], mesh.get_local_rank(), mesh.size()), *args[1:]


def _sum_gradient(mesh: DeviceMesh, module: nn.Module, args: tuple, logits: Tensor) -> Tensor:
    """A hook after the shared experts' gate, whose logits multiply partial sums."""
    return _with_summed_gradient(logits, mesh)


def _check(module: nn.Module, num_ranks: int) -> None:
    """Checks a layer that is to be split."""
    if not isinstance(module, FusedMoE):
        checks.fail(TypeError, FN, "a FusedMoE", type(module).__name__)
    experts, shared = module.experts, module.shared_experts
    if any(isinstance(p, DTensor) for p in module.parameters()):
        checks.fail(ValueError, FN, "plain parameters, as before fully_shard", "DTensors")
    if type(experts) is not Experts:  # replacing the class would lose a subclass's forward
        checks.fail(TypeError, FN, "the experts of a FusedMoE", type(experts).__name__)
    if any(isinstance(w, QuantizedWeight) for w in experts.weights):
        checks.fail(ValueError, FN, "experts of plain parameters", "quantised weights")
    if any(getattr(p, "main_grad", None) is not None for p in module.parameters()):
        checks.fail(ValueError, FN, "main_grad to be set afterwards, on the DTensors", "one")
    if module.latent_down is not None:
        checks.fail(ValueError, FN, "a layer without latent_dim", "one with it")
    widths = {"hidden_dim": experts.hidden_dim}
    if shared is not None:
        linears = [m for m in (shared.w1, shared.w2, shared.w3) if m is not None]
        if type(shared) is not SharedExperts or any(type(m) is not nn.Linear for m in linears):
            kinds = sorted({type(m).__name__ for m in (shared, *linears)})
            checks.fail(TypeError, FN, "shared experts of a FusedMoE, of nn.Linear", ", ".join(kinds))
        for reason in filter(None, map(why_altered, linears)):  # weights are read, forward is not called
            expected = "linear layers of shared experts as they were made"
            checks.fail(ValueError, FN, expected, f"one that {reason}")
        widths["the shared experts' hidden width"] = shared.w1.out_features
    for name, width in widths.items():
        each = BLOCK if experts.fp8 is not None and name == "hidden_dim" else WIDTH
        if width % (each * num_ranks):
            why = f"{num_ranks} ranks with a multiple of {each} each, as kernels need"
            checks.fail(ValueError, FN, f"{name} that is a multiple of {each * num_ranks}: {why}", width)


def _split(module: nn.Module, mesh: DeviceMesh, dims: dict, src_data_rank: int | None = 0) -> None:
    """Makes a module's own parameters shards of F, or replicas."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = Replicate() if dims.get(name) is None else Shard(dims[name])
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src_data_rank)
        setattr(module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
