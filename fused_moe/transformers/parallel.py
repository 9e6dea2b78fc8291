"""transformers' expert parallelism with each token sent once per rank: `ep_implementation="fused_moe"`.

transformers' own exchange sends a row per slot, T*K both ways, and the sender sums them. Here a token goes
once to every rank that has one of its experts, with its ids and scores. That rank sums its part; the parts
come back and are added in the order of the ranks. For N ranks that is at most min(K, N) rows per token. As
there, the host waits once, for the sizes. Source of the method: DeepSeek-V3 (arXiv 2412.19437, 3.2.2).
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP

from ..checks import fail
from ..function import unpermute
from ..ops import ops, route_plan, run
from ..plan import tensors_again
from .experts import settings_of
from .weights import FP8_NAME, NAME


class FusedEP(AutoEP):
    """transformers' default, which for inference on a batch that all ranks share moves no token, with this
    exchange in place of its own."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        name, unknown = experts.config._experts_implementation, settings_of(experts)
        if name not in (NAME, FP8_NAME) or isinstance(unknown, str):  # others take no ids of no expert
            found = unknown if isinstance(unknown, str) else f"experts_implementation={name!r}"
            fail(ValueError, f"ep_implementation={NAME!r}", "experts that fused_moe computes", found)
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
        ranks = torch.where((ids >= 0) & (ids < N * E), ids // E, N).sort(1).values
        ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1], N)  # a rank once; N is none
        plan = route_plan(ranks.sort(1).values[:, :N].contiguous(), N)
        counts = collectives.wait_tensor(collectives.all_to_all_single(plan.counts, None, None, group))
        sent, received = torch.stack((plan.counts, counts)).tolist()
        num_sent = sum(sent)

        def send(rows: Tensor) -> Tensor:
            return collectives.all_to_all_single_autograd(rows[:num_sent], received, sent, group)

        x_rows = send(run(ops.permute.default, x, plan.tensors))
        row_scores = send(run(ops.permute.default, scores, tensors_again(plan)))
        row_ids = collectives.all_to_all_single(ids[plan.row_token[:num_sent]], received, sent, group)
        local_ids = collectives.wait_tensor(row_ids) - self.ep_mesh.get_local_rank() * E
        partial = self.experts_forward(x_rows, local_ids, row_scores)
        partial = collectives.all_to_all_single_autograd(partial, sent, received, group)
        return unpermute(F.pad(partial, (0, 0, 0, plan.token_row.numel() - num_sent)), plan)
