"""Expert parallelism: weights are DTensors, tokens are exchanged by all-to-all.

Each of N ranks holds E/N experts of a `FusedMoE` and its own tokens. A forward pass of the experts is

    rows    = permute(x, ids)                   sorted by expert, hence by the rank of the expert
    counts  -> all-to-all                       rows that each rank sends to each expert
    rows    -> all-to-all                       to the ranks of their experts
    y       = fused_experts(rows, one id each)  on this rank's E/N experts; rows are not sorted again
    y       -> all-to-all                       back
    out     = unpermute(y, scores)              the weighted sum, in float32

Backward is the same in reverse, by autograd. Source of the method: GShard (arXiv 2006.16668, 3.2), with exact
sizes instead of its padding, as in torchtitan's AllToAllTokenDispatcher. Ids outside [0, E) have no expert:
their slots are not sent and add zero.

Letters: T tokens of this rank, D model width, E experts in all, K experts per token, N ranks, C capacity.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from . import checks, function
from .counting import Counting
from .lora import Adapters, LoRA
from .main_grad import WithMainGrad
from .module import Experts, FusedMoE
from .ops import score_dtype
from .plan import Plan
from .quantized.weight import QuantizedWeight

__all__ = ["ExpertParallel", "ParallelExperts"]


class ExpertParallel(ParallelStyle):
    """Shards the experts of a `FusedMoE` over the ranks of a one-dimensional DeviceMesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh["ep"], {"blocks.*.moe": ExpertParallel()})

    It is a ParallelStyle, so one `parallelize_module` call can combine it with PyTorch's styles for the rest
    of a model. The experts' weights, biases and adapters become DTensors, Shard(0) on the mesh. Their names
    do not change, so full state dicts keep names and shapes. Router and shared experts are replicated. On
    CPUs initialise the parameters first: CPU ranks share no DTensor generator, so a later `reset_parameters`
    under one seed gives every rank the same experts. Adapters may also be added afterwards: `add_lora` sends
    each rank its shards of those of the first.

    In backward, the gradients of a rank's experts are sums over ALL ranks' losses; those of the other
    parameters come from the rank's own tokens only. `fully_shard` averages over its mesh. To make both means
    over all ranks, apply this style first, then `fully_shard(moe.experts, mesh=mesh["dp"])` and
    `moe.experts.set_gradient_divide_factor(world_size)`. gloo cannot divide: there, if mesh["dp"] has several
    ranks, also call `set_force_sum_reduction_for_comms(True)`. A MixedPrecisionPolicy of that inner call
    rounds the scores, unless it has cast_forward_inputs=False. Full state dicts of this style and
    `fully_shard` together can be loaded if the number of ranks of mesh["dp"] divides E/N, or by
    StateDictOptions(broadcast_from_rank0=True).

    Args:
        static: exchange C rows between every two ranks, whatever the routing. Then shapes do not depend on
            data, and the host never synchronises. By default the sizes are exact and no row is dropped; the
            host synchronises once per forward pass, to read 2 * N integers.
        capacity: C, only with static. None: T * min(K, E/N), enough for any routing of distinct experts;
            T must then be equal on all ranks.
        overflow: what happens to rows above C, the last ones of the highest expert ids. "error":
            RuntimeError on the CPU, a device-side assertion on a GPU. "drop": they add zero, their scores
            get zero gradient, and they are counted in `experts.dropped_rows`, a tensor on the device, which
            the user zeroes.

    Raises (where the style is applied):
        TypeError: for a module that is neither FusedMoE nor its experts, or has experts of another type.
        ValueError: for parameters that are DTensors already or have a main_grad, quantised weights, a mesh of
            several dimensions, or E not a multiple of N.
    """

    def __init__(self, *, static: bool = False, capacity: int | None = None, overflow: str = "error"):
        super().__init__()
        fn = "ExpertParallel"
        checks.check_bool(fn, "static", static)
        if capacity is not None:
            checks.check_int(fn, "capacity", capacity)
            if not static:
                checks.fail(ValueError, fn, "capacity only with static=True", capacity)
            if capacity < 1:
                checks.fail(ValueError, fn, "capacity >= 1", capacity)
        if not isinstance(overflow, str) or overflow not in ("error", "drop"):
            checks.fail(ValueError, fn, "overflow to be 'error' or 'drop'", overflow)
        self.static, self.capacity, self.overflow = static, capacity, overflow

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fn = "ExpertParallel"
        experts = module.experts if isinstance(module, FusedMoE) else module
        if type(experts) is not Experts:  # replacing the class would lose a subclass's forward
            checks.fail(TypeError, fn, "a FusedMoE, or its experts", type(experts).__name__)
        if isinstance(experts.w1, DTensor):
            checks.fail(ValueError, fn, "plain parameters, as before fully_shard", "DTensors")
        if any(isinstance(w, QuantizedWeight) for w in experts.weights):
            checks.fail(ValueError, fn, "experts of plain parameters", "quantised weights")
        if any(getattr(p, "main_grad", None) is not None for p in experts.parameters()):
            checks.fail(ValueError, fn, "main_grad to be set afterwards, on the DTensors", "one")
        if device_mesh.ndim != 1:
            checks.fail(ValueError, fn, "a mesh of one dimension", f"shape {tuple(device_mesh.shape)}")
        if experts.num_experts % device_mesh.size():
            found = f"{experts.num_experts} experts"
            checks.fail(ValueError, fn, f"a number of experts that {device_mesh.size()} divides", found)
        for part in (experts, *experts.loras.values()):
            _shard(part, device_mesh, self.src_data_rank)
        # In place, as fully_shard: optimizers, hooks and the parent module keep their references.
        experts.__class__ = ParallelExperts
        experts.mesh = device_mesh
        experts.static, experts.capacity, experts.overflow = self.static, self.capacity, self.overflow
        experts.dropped_rows = torch.zeros((), dtype=torch.int64, device=experts.w1.device)
        return module


class ParallelExperts(Counting, Experts):
    """The experts of a layer after `ExpertParallel`: this rank holds E/N of them, as DTensors."""

    counters = ("dropped_rows",)
    mesh: DeviceMesh
    static: bool
    capacity: int | None
    overflow: str
    dropped_rows: Tensor  # () int64, rows dropped by this rank since it was last zeroed

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.dropped_rows.zero_()

    def check_takes_lora(self, fn: str) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor) or parameter.device_mesh != self.mesh:
                expected = f"{name} to be sharded by ExpertParallel alone, as before fully_shard"
                checks.fail(ValueError, fn, expected, "other shards")

    def take_lora(self, name: str, adapters: Adapters) -> None:
        _shard(adapters, self.mesh)
        super().take_lora(name, adapters)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's x (T, D), scores and ids (T, K) -> out (T, D), counts (E,) of this rank's slots."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before the exchange
        rows, plan = function.permute(x, ids, self.num_experts)
        exchange = self._exchange_static if self.static else self._exchange_exact
        return function.unpermute(exchange(rows, plan), plan, scores), plan.counts

    def _exchange_exact(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rows (T*K, D) -> the outputs of their experts, in the same order."""
        num_ranks, group = self.mesh.size(), self.mesh.get_group()
        sent = plan.counts.view(num_ranks, -1)  # (N, E/N)
        received = _exchange_counts(sent, group)
        send_splits, receive_splits = torch.stack((sent, received)).sum(-1).tolist()
        num_sent, num_received = sum(send_splits), sum(receive_splits)
        local_experts = torch.arange(received.size(1), device=rows.device).repeat(num_ranks)
        ids = local_experts.repeat_interleave(received.flatten(), output_size=num_received)
        received_rows = collectives.all_to_all_single_autograd(
            _with_length(rows, num_sent), receive_splits, send_splits, group
        )
        y = collectives.all_to_all_single_autograd(
            self._local_experts(received_rows, ids), send_splits, receive_splits, group
        )
        return _with_length(y, rows.size(0))

    def _exchange_static(self, rows: Tensor, plan: Plan) -> Tensor:
        """As _exchange_exact, through buffers of (N * C, D) on both sides; unused buffer rows are zero."""
        num_ranks, group = self.mesh.size(), self.mesh.get_group()
        sent = plan.counts.view(num_ranks, -1)  # (N, E/N)
        num_tokens, top_k = plan.token_row.shape
        capacity = self.capacity
        if capacity is None:
            capacity = num_tokens * min(top_k, sent.size(1))
        dropped = (sent.sum(1) - capacity).clamp_min(0).sum()
        if self.overflow == "error":
            torch._assert_async(
                dropped == 0, f"ExpertParallel: more than capacity = {capacity} rows for a rank"
            )
        else:
            self._count("dropped_rows", dropped)
        # all-to-all does not check that all ranks send buffers of the same size.
        received = _exchange_counts(F.pad(sent, (0, 1), value=capacity), group)
        same = (received[:, -1] == capacity).all()
        torch._assert_async(same, "ExpertParallel: static exchange needs one capacity on all ranks")

        # (N+1,): the first row for each rank, then the number of rows
        first = plan.offsets[:: sent.size(1)].long()
        index = torch.arange(capacity, device=rows.device)
        row_of_buffer = first[:-1, None] + index
        row_of_buffer = torch.where(row_of_buffer < first[1:, None], row_of_buffer, -1).flatten()
        row = torch.arange(rows.size(0), device=rows.device)
        rank = torch.bucketize(row, first[1:], right=True)  # N past the last row
        row_index = row - first[rank]  # among the rows for the same rank
        has_buffer = (rank < num_ranks) & (row_index < capacity)
        buffer_of_row = torch.where(has_buffer, rank * capacity + row_index, -1)
        # The local expert of a received row: the number of experts that end at or before it. Past the last
        # expert's rows that is E/N, which is no expert's id.
        ends = received[:, :-1].cumsum(1)
        ids = torch.searchsorted(ends, index.repeat(num_ranks, 1), right=True).flatten()

        received_rows = collectives.all_to_all_single_autograd(
            _Gather.apply(rows, row_of_buffer, buffer_of_row), None, None, group
        )
        y = collectives.all_to_all_single_autograd(self._local_experts(received_rows, ids), None, None, group)
        return _Gather.apply(y, buffer_of_row, row_of_buffer)

    def _local_experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows (R, D) and the local expert id of each (R,) -> (R, D), zero where the id is E/N."""
        scores = torch.ones(rows.size(0), 1, dtype=score_dtype(rows), device=rows.device)
        settings = {name: _local(value) for name, value in self.settings.items()}
        main_grads = self.main_grads
        if settings["lora"] is not None:  # beside adapters the weights are frozen
            settings["lora"] = LoRA(*map(_local, settings["lora"]))
            main_grads = (None, None, None)
        return function.fused_experts(
            rows,
            *map(_local_weight, self.weights, main_grads),
            scores,
            ids.unsqueeze(1),
            **settings,
            main_grads=tuple(map(_local, main_grads)),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, over {self.mesh.size()} ranks, static={self.static}"


class _Gather(torch.autograd.Function):
    """out[i] = rows[source[i]], zero where source[i] is -1. Backward gathers by the inverse map; the backward
    of indexing would use atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return F.pad(rows, (0, 0, 0, 1))[source]  # -1 is the row of zeros

    @staticmethod
    def backward(ctx, dout: Tensor):
        source, inverse = ctx.saved_tensors
        return _Gather.apply(dout, inverse, source), None, None


def _exchange_counts(sent: Tensor, group) -> Tensor:
    """(N, E/N), row n for rank n -> (N, E/N), row n from rank n."""
    return collectives.wait_tensor(collectives.all_to_all_single(sent, None, None, group))


def _with_length(rows: Tensor, length: int) -> Tensor:
    """Appends zero rows or drops the last rows. Without ids outside [0, E) it copies nothing."""
    return rows if rows.size(0) == length else F.pad(rows, (0, 0, 0, length - rows.size(0)))


def _shard(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Makes a module's own parameters (E, ...) shards of experts."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _local(value):
    """A DTensor's local shard; any other value unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def _local_weight(weight, main_grad):
    """A weight's local shard. With a main_grad it is not to_local's, whose backward turns a missing gradient
    into zeros in PyTorch 2.11."""
    local = _local(weight)
    return local if main_grad is None else WithMainGrad.apply(weight, [local.detach()])
