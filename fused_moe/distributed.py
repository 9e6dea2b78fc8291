"""Expert parallelism on PyTorch's own parts: DTensor weights, and all-to-all for the tokens.

Each of N ranks holds E/N experts of a `FusedMoE` and tokens of its own. A forward pass of the experts is

    rows    = permute(x, ids)                   sorted by expert, and thereby by the rank that owns it
    counts  -> all-to-all                       which of whose rows are coming
    rows    -> all-to-all                       to their experts
    y       = fused_experts(rows, one id each)  on this rank's E/N experts; no second sort moves the rows
    y       -> all-to-all                       back
    out     = unpermute(y, scores)              the weighted sum, in float32

and backward is the same in reverse, by autograd. Source of the method: GShard (arXiv 2006.16668, 3.2), with
exact sizes in place of its padding, as in torchtitan's AllToAllTokenDispatcher. An id outside [0, E) is
nobody's: its slot is not sent and adds zero.

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

from . import function
from .module import Experts, FusedMoE, _is_recomputing
from .ops import score_dtype
from .plan import Plan

__all__ = ["ExpertParallel", "ParallelExperts"]


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a `FusedMoE` over the ranks of a one-dimensional DeviceMesh.

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
        parallelize_module(model, mesh["ep"], {"blocks.*.moe": ExpertParallel()})

    It is a ParallelStyle, because that is what `parallelize_module` takes beside the styles of PyTorch's own
    for the rest of a model. The experts' weights and biases become DTensors, Shard(0) on the mesh, under the
    names they had, so full state dicts keep names and shapes; router and shared experts stay whole on every
    rank. On CPUs draw the parameters before: DTensor gives CPU ranks no common generator, so that
    `reset_parameters` afterwards, under one seed, gives every rank the same experts.

    Every rank's backward adds up the gradients that ALL ranks' losses give its experts, while those of the
    other parameters follow from the rank's own tokens. Under `fully_shard`, which averages over the mesh it
    is given, apply this style first, then `fully_shard(moe.experts, mesh=mesh["dp"])` and
    `moe.experts.set_gradient_divide_factor(world_size)`, so that both are means over all ranks (gloo, which
    cannot divide, needs `set_force_sum_reduction_for_comms(True)` where mesh["dp"] has several ranks). A
    MixedPrecisionPolicy of that inner call rounds the scores, unless it has cast_forward_inputs=False. Full
    state dicts of both together can be loaded where the ranks of mesh["dp"] divide E/N.

    Args:
        static: exchange C rows between every two ranks, whatever the routing. Nothing then waits for the
            host, and shapes do not depend on data. By default the sizes are exact, nothing is ever dropped,
            and each forward pass waits once for the host to read 2 * N numbers.
        capacity: C, only with static. None: T * min(K, E/N), enough for any routing of distinct experts;
            T must then be equal on all ranks.
        overflow: of rows above C, the last ones of the highest expert ids. "error": RuntimeError on the CPU,
            a device-side assertion on a GPU. "drop": they add zero, their scores get zero gradient, and
            their number is added to `experts.dropped_rows`, a tensor on the device, which the user zeroes.

    Raises (where the style is applied):
        TypeError: for a module that is neither FusedMoE nor its experts, or has experts of another type.
        ValueError: for parameters that are DTensors already or have a main_grad, a mesh of several
            dimensions, or E not a multiple of N.
    """

    def __init__(self, *, static: bool = False, capacity: int | None = None, overflow: str = "error"):
        super().__init__()
        fn = "ExpertParallel"
        if capacity is not None and not static:
            function.fail(ValueError, fn, "capacity only with static=True", capacity)
        if capacity is not None and capacity < 1:
            function.fail(ValueError, fn, "capacity >= 1", capacity)
        if overflow not in ("error", "drop"):
            function.fail(ValueError, fn, "overflow to be 'error' or 'drop'", repr(overflow))
        self.static, self.capacity, self.overflow = static, capacity, overflow

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fn = "ExpertParallel"
        experts = module.experts if isinstance(module, FusedMoE) else module
        if type(experts) is not Experts:  # a subclass's own forward would be lost
            function.fail(TypeError, fn, "a FusedMoE, or its experts", type(experts).__name__)
        if isinstance(experts.w1, DTensor):
            function.fail(ValueError, fn, "plain parameters, as before fully_shard", "DTensors")
        if any(getattr(p, "main_grad", None) is not None for p in experts.parameters()):
            function.fail(ValueError, fn, "main_grad to be set afterwards, on the DTensors", "one")
        if device_mesh.ndim != 1:
            function.fail(ValueError, fn, "a mesh of one dimension", f"shape {tuple(device_mesh.shape)}")
        if experts.num_experts % device_mesh.size():
            found = f"{experts.num_experts} experts"
            function.fail(ValueError, fn, f"a number of experts that {device_mesh.size()} divides", found)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(
                parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        # In place, as fully_shard does it: optimizers, hooks and the parent keep the module they know.
        experts.__class__ = ParallelExperts
        experts.mesh = device_mesh
        experts.static, experts.capacity, experts.overflow = self.static, self.capacity, self.overflow
        dropped = torch.zeros((), dtype=torch.int64, device=experts.w1.device)
        experts.register_buffer("dropped_rows", dropped, persistent=False)
        return module


class ParallelExperts(Experts):
    """The experts of a layer that `ExpertParallel` was applied to: E/N of them are here, as DTensors."""

    mesh: DeviceMesh
    static: bool
    capacity: int | None
    overflow: str
    dropped_rows: Tensor  # () int64, by this rank since it was last zeroed

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.dropped_rows.zero_()

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, D), scores and ids (T, K), of this rank -> out (T, D), counts (E,) of this rank's slots."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before the rows travel, not after
        rows, plan = function.permute(x, ids, self.num_experts)
        exchange = self._exchange_static if self.static else self._exchange_exact
        return function.unpermute(exchange(rows, plan), plan, scores), plan.counts

    def _exchange_exact(self, rows: Tensor, plan: Plan) -> Tensor:
        """Rows (T*K, D) -> what their experts make of them, in the same places."""
        num_ranks, group = self.mesh.size(), self.mesh.get_group()
        sent = plan.counts.view(num_ranks, -1)  # (N, E/N)
        received = _exchange_counts(sent, group)
        send_splits, receive_splits = torch.stack((sent, received)).sum(-1).tolist()
        num_sent, num_received = sum(send_splits), sum(receive_splits)
        mine = torch.arange(received.size(1), device=rows.device).repeat(num_ranks)
        ids = mine.repeat_interleave(received.flatten(), output_size=num_received)
        arrived = collectives.all_to_all_single_autograd(
            _with_length(rows, num_sent), receive_splits, send_splits, group
        )
        y = collectives.all_to_all_single_autograd(
            self._local_experts(arrived, ids), send_splits, receive_splits, group
        )
        return _with_length(y, rows.size(0))

    def _exchange_static(self, rows: Tensor, plan: Plan) -> Tensor:
        """As _exchange_exact, by way of (N * C, D) on either side; places without a row are zero."""
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
        elif not _is_recomputing():
            self.dropped_rows.add_(dropped)
        # A peer of another capacity would send rows of sizes that nobody checks.
        received = _exchange_counts(F.pad(sent, (0, 1), value=capacity), group)
        same = (received[:, -1] == capacity).all()
        torch._assert_async(same, "ExpertParallel: static exchange needs one capacity on all ranks")

        first = plan.offsets[:: sent.size(1)].long()  # (N+1,) first row for each rank, then their number
        place = torch.arange(capacity, device=rows.device)
        place_row = first[:-1, None] + place
        place_row = torch.where(place_row < first[1:, None], place_row, -1).flatten()
        row = torch.arange(rows.size(0), device=rows.device)
        rank = torch.bucketize(row, first[1:], right=True)  # N past the last row
        nth = row - first[rank]
        row_place = torch.where((rank < num_ranks) & (nth < capacity), rank * capacity + nth, -1)
        # The expert of a place: as many as end at or before it; E/N, nobody, past the last.
        ends = received[:, :-1].cumsum(1)
        ids = torch.searchsorted(ends, place.repeat(num_ranks, 1), right=True).flatten()

        arrived = collectives.all_to_all_single_autograd(
            _Move.apply(rows, place_row, row_place), None, None, group
        )
        y = collectives.all_to_all_single_autograd(self._local_experts(arrived, ids), None, None, group)
        return _Move.apply(y, row_place, place_row)

    def _local_experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Rows (R, D), each for one of this rank's experts (R,), or for nobody -> (R, D)."""
        scores = torch.ones(rows.size(0), 1, dtype=score_dtype(rows), device=rows.device)
        return function.fused_experts(
            rows,
            *map(_local_weight, self.weights, self.main_grads),
            scores,
            ids.unsqueeze(1),
            **{name: _local(value) for name, value in self.settings.items()},
            main_grads=tuple(map(_local, self.main_grads)),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, over {self.mesh.size()} ranks, static={self.static}"


class _Move(torch.autograd.Function):
    """out[i] = rows[source[i]], zero where that is -1. `target` is the inverse map: backward gathers by it,
    where indexing's own backward would add with atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(source, target)
        return F.pad(rows, (0, 0, 0, 1))[source]  # -1 is the row of zeros

    @staticmethod
    def backward(ctx, dout: Tensor):
        source, target = ctx.saved_tensors
        return _Move.apply(dout, target, source), None, None


def _exchange_counts(sent: Tensor, group) -> Tensor:
    """(N, E/N), row n for rank n -> (N, E/N), row n from rank n."""
    return collectives.wait_tensor(collectives.all_to_all_single(sent, None, None, group))


def _with_length(rows: Tensor, length: int) -> Tensor:
    """Zeros appended, or the last rows left out; nothing is copied where every slot has a row."""
    return rows if rows.size(0) == length else F.pad(rows, (0, 0, 0, length - rows.size(0)))


def _local(value):
    """A DTensor's part on this rank; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _local_weight(weight, main_grad):
    """A weight's part. With a main_grad it is a leaf: where no gradient comes, to_local of PyTorch 2.11 makes
    zeros of it."""
    local = _local(weight)
    return local if main_grad is None else local.detach().requires_grad_(weight.requires_grad)
