"""transformers' expert parallelism with each token sent once per rank: `ep_implementation="fused_moe"`.

transformers' own exchange sends a row per slot, T*K both ways, and the sender sums them. Here a token goes
once to every rank that has one of its experts, with its ids and scores. That rank sums its part; the parts
come back and are added in the order of the ranks. For N ranks that is at most min(K, N) rows per token. As
there, the host waits once, for the sizes. Source of the method: DeepSeek-V3 (arXiv 2412.19437, 3.2.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP

from ..checks import fail
from ..exchange import distinct
from ..function import unpermute
from ..ops import ops, route_plan, run
from ..plan import tensors_again
from .experts import settings_of
from .weights import NAME, NAMES, is_experts

if TYPE_CHECKING:
    from .weights import ExpertsModule


class FusedEP(AutoEP):
    """transformers' default, which for inference on a batch that all ranks share moves no token, with this
    exchange in place of its own."""

    def __init__(self, experts: ExpertsModule, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        if reason := _why_not_ours(experts):
            fail(ValueError, f"ep_implementation={NAME!r}", "experts that fused_moe computes", reason)
        super().__init__(experts, ep_mesh, tp_mesh)
        self.all_to_all = self._forward

    def _forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """x (T, D), ids and scores (T, K) -> (T, D)."""
        mesh, shape = self.tp_mesh, x.shape
        if mesh.size() == 1:
            return self._exchange(x, ids, scores)
        whole = (DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in (x, ids, scores))
        out = self._exchange(*(t.redistribute(mesh, [Shard(0)]).to_local() for t in whole))  # a part each
        return DTensor.from_local(out, mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    def _exchange(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        N, E, group = self.ep_mesh.size(), self.num_local_experts, self.ep_mesh.get_group()
        slot_ranks = torch.where((ids >= 0) & (ids < N * E), ids // E, -1)
        plan = route_plan(distinct(slot_ranks, N), N)
        counts = torch.stack((plan.counts, route_plan(slot_ranks, N).counts), 1)  # a rank's rows and slots
        arriving = collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, group))
        (sent, _), (received, slots) = torch.stack((counts, arriving)).transpose(1, 2).tolist()
        assert plan.row_token is not None and plan.row_slot is not None
        row_token, row_slot = (rows[: sum(sent)] for rows in (plan.row_token, plan.row_slot))
        plan = plan._replace(row_token=row_token, row_slot=row_slot)  # with no row past the last

        def send(rows: Tensor) -> Tensor:
            return collectives.all_to_all_single_autograd(rows, received, sent, group)

        x_rows = send(run(ops.permute.default, x, plan.tensors))
        row_scores = send(run(ops.permute.default, scores, tensors_again(plan)))
        row_ids = collectives.all_to_all_single(ids[plan.row_token], received, sent, group)
        row_ids = collectives.wait_tensor(row_ids) - self.ep_mesh.get_local_rank() * E
        partial = self.experts_forward(x_rows, row_ids, row_scores, max_rows=max(1, sum(slots)))
        partial = collectives.all_to_all_single_autograd(partial, sent, received, group)
        return unpermute(partial, plan)


def _why_not_ours(experts: ExpertsModule) -> str | None:
    """What computes these experts in our place. It takes no ids of no expert."""
    if not (is_experts(experts) and hasattr(type(experts).forward, "__wrapped__")):
        return f"{type(experts).__name__}, with a forward of its own"
    name, settings = experts.config._experts_implementation, settings_of(experts)
    if isinstance(settings, str):
        return settings
    return None if name in NAMES else f"experts_implementation={name!r}"
