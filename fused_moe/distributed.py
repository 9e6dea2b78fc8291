"""Expert parallelism: weights are DTensors, tokens are exchanged by all-to-all.

Each of N ranks holds E/N experts of a `FusedMoE` and its own tokens. A token is sent once to each rank that
has any of its experts. With combine="slot" a forward pass of the experts is

    ranks                                       (T, N): the distinct ones of a token's experts
    sizes   -> all-to-all                       rows and slots for each rank
    scores and ids of permute(x, ranks) -> all-to-all    K of each, for each row
    rows    = permute(x, ranks) -> all-to-all   and a row there for each slot
    y       = fused_experts(rows, one id each)  on the E/N experts there
    out     = unpermute(y -> all-to-all, scores)    back; the weighted sum, in float32

With combine="rank" it is

    rows    = permute(x, ranks)                 one for each token and rank
    sizes, rows, scores and ids -> all-to-all
    partial = fused_experts(rows, scores, ids)  other ranks' ids have no expert here
    partial -> all-to-all                       back
    out     = unpermute(partial)                the sum in the order of ranks, in float32

and backward takes the same ways in reverse. `fused_moe/exact.py` has the nodes of autograd for exact sizes,
`fused_moe/slots.py` those for equal ones and combine="slot". Source of the method: GShard (arXiv 2006.16668,
3.2), with exact sizes instead of its padding, as in torchtitan's AllToAllTokenDispatcher. Ids outside [0, E)
have no expert: their slots are not sent and add zero. `fused_moe/exchange.py` has the all-to-alls, and
`fused_moe/symmetric.py` the same ways through memory that ranks share.

Letters: T tokens of this rank, D model width, E experts in all, K experts per token, N ranks, C capacity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.checkpoint import _StopRecomputationError

from . import checks, function
from .counting import Counting
from .exact import exchanged_experts
from .exchange import (
    FN,
    Even,
    Ranks,
    Static,
    buffer_of_row,
    check_static,
    cut,
    facts_of,
    refuse,
    row_groups,
    row_of_buffer,
    summed,
)
from .lora import Adapters, LoRA
from .main_grad import WithMainGrad
from .module import Experts, FusedMoE
from .ops import ops, run, score_dtype
from .plan import Plan
from .quantized import sharding
from .quantized.weight import QuantizedWeight, read
from .slots import Combine, Dispatch, tokens_there
from .symmetric import Exchange, Peers, SharedMemory, outside_of_modes

__all__ = ["ExpertParallel", "ParallelExperts"]


class ExpertParallel(ParallelStyle):
    """Shards the experts of a `FusedMoE` over the ranks of a one-dimensional DeviceMesh.

    It is a ParallelStyle, so one `parallelize_module` call can combine it with PyTorch's styles for the rest
    of a model. The experts' weights, biases and adapters become DTensors, Shard(0) on the mesh. Their names
    do not change, so full state dicts keep names and shapes. Router and shared experts are replicated. On
    CPUs initialise the parameters first: CPU ranks share no DTensor generator, so a later `reset_parameters`
    under one seed gives every rank the same experts. Adapters may also be added afterwards: `add_lora` sends
    each rank its shards of those of the first.

    In backward, the gradients of a rank's experts are sums over ALL ranks' losses. So are those of router,
    shared experts and whatever else the FusedMoE has: a hook on each of these parameters sums every gradient
    that comes in, before it is accumulated. If the style is applied to `moe.experts` alone, it cannot see
    them, and their gradients come from the rank's own tokens. `fully_shard` puts DTensors, which have no
    hooks, in the place of parameters: it averages over its mesh, which must then have all ranks. To make all
    gradients means over all ranks, apply this style first, then
    `fully_shard(moe.experts, mesh=mesh["dp"])` and `moe.experts.set_gradient_divide_factor(world_size)`,
    then `fully_shard(moe)`. gloo cannot divide: there, if mesh["dp"] has several ranks, also call
    `set_force_sum_reduction_for_comms(True)`. A MixedPrecisionPolicy of that inner call rounds the scores,
    unless it has cast_forward_inputs=False. Full state dicts of this style and `fully_shard` together can be
    loaded if the number of ranks of mesh["dp"] divides E/N, or by
    StateDictOptions(broadcast_from_rank0=True).

    Args:
        static: exchange C rows between every two ranks, whatever the routing. Then shapes do not depend on
            data, and the host never synchronises. By default the sizes are exact and no row is dropped; the
            host synchronises once per forward pass, to read 6 * N integers.
        capacity: C, only with static. None: enough for any routing, T with combine="rank", else
            T * min(K, E/N) if a token's experts are distinct; T must then be equal on all ranks.
        overflow: what happens to rows above C. "error": RuntimeError on the CPU, a device-side assertion on a
            GPU, on every rank. "drop": they add zero, their scores get zero gradient, and they are counted in
            `experts.dropped_rows`, a tensor on the device, which the user zeroes.
        combine: what comes back of a token, which is sent once to each rank that has any of its experts.
            "slot": the output of each expert, and the token has the same bits on any number of ranks. C is of
            outputs, and those above it are of the highest expert ids. There each rank sends min(T, C) rows to
            each, which must be equal on all ranks. "rank": the weighted sum of a rank's experts. These
            partial sums are added in the order of ranks: the same bits in every run, others with another
            number of ranks. Rows above C are the last tokens; such a token's experts on that rank add zero.
        symmetric: exchange rows through memory that the ranks share, not by all-to-all. GPUs have to reach
            each other's memory, as those of one host do by NVLink; CPUs have to be of one host. A token is
            read once by each rank that has any of its experts. Without `static` the host waits once per
            forward pass, for one integer, the number of slots that are here. With it the host never waits,
            the experts' step can be one CUDA graph, and C bounds the slots of a rank's experts, N*C in all;
            those above are the last ones of its highest expert ids. The layers of one style share the memory,
            so they run one after the other. A model that is compiled has a graph break here.
        max_tokens: the largest T of any call on any rank, only with symmetric, which needs it. T may differ
            between ranks.

    Raises:
        TypeError: where the style is applied, on all ranks: for a module that is neither FusedMoE nor its
            experts, or has experts of another type.
        ValueError: there, for parameters that are DTensors already or have a main_grad, a mesh of several
            dimensions, E not a multiple of N, or ranks whose layers or styles differ. In a forward pass, on
            all ranks (with static it fails as for overflow), if D, K or dtype of the experts' inputs differ
            between ranks, or C does; and on the other ranks if one rank's layer raises before the exchange.
        RuntimeError: where the style is applied, with symmetric, if one rank cannot have the memory.

    Source: GShard (arXiv 2006.16668, 3.2), with exact sizes instead of its padding.

    Example:
        Needs a process group, under torchrun.

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from fused_moe.distributed import ExpertParallel
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))  # doctest: +SKIP
        >>> parallelize_module(model, mesh["ep"], {"blocks.*.moe": ExpertParallel()})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        static: bool = False,
        capacity: int | None = None,
        overflow: str = "error",
        combine: str = "slot",
        symmetric: bool = False,
        max_tokens: int | None = None,
    ):
        super().__init__()
        checks.check_bool(FN, "static", static)
        if capacity is not None:
            checks.check_int(FN, "capacity", capacity)
            if not static:
                checks.fail(ValueError, FN, "capacity only with static=True", capacity)
            if capacity < 1:
                checks.fail(ValueError, FN, "capacity >= 1", capacity)
        if not isinstance(overflow, str) or overflow not in ("error", "drop"):
            checks.fail(ValueError, FN, "overflow to be 'error' or 'drop'", overflow)
        if not isinstance(combine, str) or combine not in ("slot", "rank"):
            checks.fail(ValueError, FN, "combine to be 'slot' or 'rank'", combine)
        checks.check_bool(FN, "symmetric", symmetric)
        if (max_tokens is not None) != symmetric:
            checks.fail(ValueError, FN, "max_tokens with symmetric=True, and only with it", max_tokens)
        if symmetric:
            checks.check_int(FN, "max_tokens", max_tokens)
            assert max_tokens is not None
            if max_tokens < 1:
                checks.fail(ValueError, FN, "max_tokens >= 1", max_tokens)
        self.static, self.capacity, self.overflow, self.combine = static, capacity, overflow, combine
        self.symmetric, self.max_tokens = symmetric, max_tokens
        self._memory = SharedMemory()

    @property
    def _settings(self) -> dict:
        names = "static", "capacity", "overflow", "combine", "symmetric", "max_tokens"
        return {name: getattr(self, name) for name in names}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            checks.fail(ValueError, FN, "a mesh of one dimension", f"shape {tuple(device_mesh.shape)}")
        experts = module.experts if isinstance(module, FusedMoE) else module
        described = self._settings | _described(module, experts)
        _check_same(described | {"src_data_rank": self.src_data_rank}, device_mesh.get_group())
        # From here on all ranks raise the same errors.
        if type(experts) is not Experts:  # replacing the class would lose a subclass's forward
            checks.fail(TypeError, FN, "a FusedMoE, or its experts", type(experts).__name__)
        if any(isinstance(p, DTensor) for p in experts.parameters()):
            checks.fail(ValueError, FN, "plain parameters, as before fully_shard", "DTensors")
        if any(getattr(p, "main_grad", None) is not None for p in experts.parameters()):
            checks.fail(ValueError, FN, "main_grad to be set afterwards, on the DTensors", "one")
        if experts.num_experts % device_mesh.size():
            found = f"{experts.num_experts} experts"
            checks.fail(ValueError, FN, f"a number of experts that {device_mesh.size()} divides", found)
        quantised = (w for w in experts.weights if isinstance(w, QuantizedWeight))
        for part in (experts, *quantised, *experts.loras.values()):
            _shard(part, device_mesh, self.src_data_rank)
        # In place, as fully_shard: optimizers, hooks and the parent module keep their references.
        experts.__class__ = ParallelExperts
        experts.mesh, experts.memory = device_mesh, self._memory
        vars(experts).update(self._settings)
        experts.peers, experts.has_met = None, False
        parallel = cast(ParallelExperts, experts)
        for part in {module, experts}:
            part.register_forward_pre_hook(partial(_begin, parallel), prepend=True)
            part.register_forward_hook(partial(_end, parallel), always_call=True)
        if self.symmetric and isinstance(module, FusedMoE):  # else the first call tells K
            parallel.open_memory(module.top_k)
        experts.dropped_rows = torch.zeros((), dtype=torch.int64, device=experts.w1.device)
        if isinstance(module, FusedMoE):
            prepare = partial(_sum_gradients, device_mesh)
            prepare(module)
            module._prepare_parameters = prepare
            module.register_load_state_dict_post_hook(prepare)  # assign=True replaces parameters
        return module


class ParallelExperts(Counting, Experts):
    """The experts of a layer after `ExpertParallel`: this rank holds E/N of them, as DTensors.

    Attributes:
        dropped_rows: () int64, rows dropped by this rank since it was last zeroed.

    Example:
        Needs a process group, under torchrun.

        >>> moe = parallelize_module(moe, mesh["ep"], ExpertParallel())  # doctest: +SKIP
        >>> type(moe.experts), moe.experts.dropped_rows  # doctest: +SKIP
    """

    counters = ("dropped_rows",)
    runs_shared = True
    beside: Any = None  # during a layer's call: what runs beside the exchange, if its sizes are exact
    mesh: DeviceMesh
    static: bool
    capacity: int | None
    overflow: str
    combine: str
    symmetric: bool
    max_tokens: int | None
    memory: SharedMemory
    peers: Peers | None  # with symmetric; None before the first call of experts without a router
    has_met: bool  # whether this call has taken part in its first collective
    dropped_rows: Tensor

    def reset_parameters(self) -> None:
        """Initialises this rank's experts again, and zeroes dropped_rows."""
        super().reset_parameters()
        self.dropped_rows.zero_()

    def check_takes_lora(self, fn: str) -> None:
        """Raises where adapters cannot be added, as beside `fully_shard`."""
        _check_sharded_alone(fn, self, self.mesh, FN)

    def take_lora(self, name: str, adapters: Adapters) -> None:
        """Takes adapters, as shards of this rank's experts."""
        _check_same(_described_adapters(name, adapters), self.mesh.get_group())
        _shard(adapters, self.mesh)
        super().take_lora(name, adapters)

    def forward(  # type: ignore[override]
        self, x: Tensor, scores: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Takes this rank's x (T, D), scores and ids (T, K); returns out (T, D), counts (E,) of its slots."""
        if (beside := self.beside) is not None:
            self.beside = None
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before the exchange
        if self.symmetric:
            out, counts = self._forward_symmetric(x, scores, ids)
        else:
            checks.check_input(FN, "x", x, 2)
            checks.check_ids(FN, ids, x)
            checks.check_scores(FN, scores, ids)
            slots, scores = function.route_plan(ids, self.num_experts), scores.to(score_dtype(x))
            counts = slots.counts
            if not self.static:
                call = (x, scores, ids, slots, self._prepare_experts, beside)
                how: dict[str, Any] = {"bounds": not self._is_quantised, "meet": self.meet}
                out = exchanged_experts(self._ranks, *call, **how)
            else:
                forward = self._forward_by_rank if self.combine == "rank" else self._forward_by_slot
                out = forward(x, scores, ids, slots)
        checks.check_one_gradient(FN, out)
        return out, counts

    def _forward_by_slot(self, x: Tensor, scores: Tensor, ids: Tensor, slots: Plan) -> Tensor:
        """A row comes back for each slot, and the token's rank adds them, weighted."""
        (T, K), N, ranks = ids.shape, self.mesh.size(), self._ranks
        capacity = self.capacity or T * min(K, self.num_experts // N)
        num_buffers, num_received = min(T, capacity), N * min(capacity, K * min(T, capacity))
        self._check_static(x, ids, ranks.slots_of(slots.counts), capacity, num_buffers)
        buffer_of_slot = buffer_of_row(slots, N, capacity)
        if self.overflow == "drop":
            ids = torch.where(buffer_of_slot[slots.token_row] < 0, -1, ids)
        sent = ranks.plan_of(ids)
        assert sent.row_token is not None
        token_of_row = F.pad(sent.row_token, (0, 1), value=-1)
        token_of_buffer = token_of_row[row_of_buffer(sent, N, num_buffers)]
        exchange = Even(ranks.group)
        choice = tokens_there(ranks.choice(scores.detach(), ids), exchange, token_of_buffer)
        received_scores, received = ranks.received_slots(choice, ranks.slot_groups(x.device))
        received = cut(received, num_received)
        slot_of_buffer = row_of_buffer(received, N, capacity)
        there = (token_of_buffer, *received.tensors)
        ways = (exchange, *there, slot_of_buffer, buffer_of_slot, *slots.tensors)
        rows = Dispatch.apply(x, *ways)
        ones = torch.ones(num_received, 1, dtype=scores.dtype, device=x.device)
        y = self._local_experts(rows, ones, ranks.local_ids(received, has_room=True))
        return Combine.apply(y, scores, received_scores, *ways)[0]

    def _forward_by_rank(self, x: Tensor, scores: Tensor, ids: Tensor, slots: Plan) -> Tensor:
        """For each token and rank that has some of its experts, their weighted sum comes back."""
        (T, K), N, ranks = ids.shape, self.mesh.size(), self._ranks
        capacity, plan = self.capacity or T, ranks.plan_of(ids)
        self._check_static(x, ids, plan.counts, capacity, capacity)
        plan = cut(plan, T * min(K, N))
        buffers = row_of_buffer(plan, N, capacity), buffer_of_row(plan, N, capacity)
        exchange = Static(ranks.group, *buffers)
        choice, rows = (run(ops.permute.default, t, plan.tensors) for t in (ranks.choice(scores, ids), x))
        scores, ids = ranks.received_ids(exchange.there(choice))
        partial = exchange.back(self._local_experts(exchange.there(rows), scores, ids))
        return function.unpermute(partial, plan)

    def meet(self) -> None:
        """Notes that the call takes part in its first collective."""
        if not torch.compiler.is_compiling():
            self.has_met = True

    def refuse(self) -> None:
        """Takes this rank's part in the first collective of a call that has failed before it."""
        self.meet()
        if not self.symmetric:
            refuse(self.mesh.get_group(), torch.device(self.mesh.device_type))
        elif self.peers is not None:
            self.peers.refuse()

    def open_memory(self, top_k: int) -> None:
        """Takes part in the memory of the layers of one style. A collective."""
        tokens = self.max_tokens
        assert tokens is not None
        rows = tokens
        if self.combine == "slot":
            rows = self.capacity or rows * top_k
        sizes = (tokens, self.dim, top_k, self.mesh.size() * rows)
        with outside_of_modes():
            self.peers = self.memory.peers(self.mesh, self.w1.dtype, sizes)

    @_disable_dynamo
    def _forward_symmetric(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As the other two, for both kinds of rows, through shared memory."""
        if self.peers is None:
            self.open_memory(ids.size(1) if isinstance(ids, Tensor) and ids.dim() == 2 else 0)
        peers, num_experts = self.peers, self.num_experts
        assert peers is not None
        peers.check(x, scores, ids)
        counts = function.route_plan(ids, num_experts).counts
        scores = scores.to(score_dtype(x))
        self.meet()
        exchange = Exchange(peers, x, scores, ids.clamp(-1, num_experts), num_experts)
        num_slots = exchange.check(waits=not self.static)
        max_rows, dropped = None, None
        if not self.static:
            max_rows = max(cast(int, num_slots), 1)
        elif self.capacity is not None:
            max_rows = peers.num_ranks * self.capacity
            if self.overflow == "drop":
                with outside_of_modes():
                    dropped = torch.zeros_like(self.dropped_rows)
            else:
                what = f"more than N * capacity = {max_rows} slots of a rank"
                torch._assert_async((exchange.slots_of_ranks() <= max_rows).all(), f"{FN}: {what}")
        if self.combine == "rank":
            if not self.static and self._is_quantised:
                max_rows = None
            rows, scores = exchange.there(x, scores)
            rows = self._local_experts(rows, scores, exchange.ids, max_rows, dropped)
            out = exchange.back(rows, scores)
        else:
            of_rank = num_experts // peers.num_ranks
            plan = function.route_plan(exchange.ids, of_rank, max_rows=max_rows, dropped_rows=dropped)
            rows, scores = exchange.there(x, scores, plan)
            ones = scores.new_ones(rows.size(0), 1)
            rows = self._local_experts(rows, ones, row_groups(plan).unsqueeze(1))
            out = exchange.back(rows, scores, plan)
        if dropped is not None:
            self._count("dropped_rows", dropped)
        return out, counts

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.mesh.get_group(), self.num_experts, self.combine == "slot")

    @property
    def _is_quantised(self) -> bool:
        """Then they are one operator, which makes its own plan, of all slots."""
        return any(isinstance(w, QuantizedWeight) for w in self.weights)

    def _check_static(self, x: Tensor, ids: Tensor, counts: Tensor, capacity: int, num_buffers: int) -> None:
        drops = self.overflow == "drop"
        group, facts = self.mesh.get_group(), facts_of(x, ids)
        what = "capacity" if self.combine == "rank" else "min(T, capacity)"
        self.meet()
        dropped = check_static(group, facts, counts, capacity, num_buffers, what, drops=drops)
        if drops:
            self._count("dropped_rows", dropped)

    def _local_experts(
        self,
        rows: Tensor,
        scores: Tensor,
        ids: Tensor,
        max_rows: int | None = None,
        dropped_rows: Tensor | None = None,
        *,
        operands: tuple[tuple, dict[str, Any]] | None = None,
    ) -> Tensor:
        """Rows (R, D), scores and local expert ids (R, K) -> (R, D). Ids outside [0, E/N) add zero."""
        weights, settings = operands or self._local_operands()
        (w1, w2, w3), of_rows = weights, (scores, ids)
        settings |= {"max_rows": max_rows, "dropped_rows": dropped_rows}
        return function.fused_experts(rows, w1, w2, w3, *of_rows, **settings)

    def _prepare_experts(self) -> Callable[..., Tensor]:
        return partial(self._local_experts, operands=self._local_operands())

    def _local_operands(self) -> tuple[tuple, dict[str, Any]]:
        """This rank's weights, and the other arguments of `fused_experts`."""
        settings: dict[str, Any] = {name: _local(value) for name, value in self.settings.items()}
        main_grads = self.main_grads
        if settings["lora"] is not None:  # beside adapters the weights are frozen
            settings["lora"] = LoRA(*map(_local, settings["lora"]))
            main_grads = (None, None, None)
        settings["main_grads"] = tuple(map(_local, main_grads))
        return tuple(map(_local_weight, self.weights, main_grads)), settings

    def extra_repr(self) -> str:
        """What `print` shows of the experts."""
        how = f"static={self.static}, combine={self.combine!r}"
        how += f", symmetric={self.symmetric}" if self.symmetric else ""
        return f"{super().extra_repr()}, over {self.mesh.size()} ranks, {how}"


def _begin(experts: ParallelExperts, module: nn.Module, args: tuple) -> None:
    """A hook before a layer and its experts, which a wrapper may have in their place."""
    if not torch.compiler.is_compiling():
        experts.has_met = False


def _end(experts: ParallelExperts, module: nn.Module, args: tuple, out: object) -> None:
    """A hook after them. `out` is None if they raised. Then this rank tells the others, which wait for it in
    the call's first collective."""
    if out is None and not torch.compiler.is_compiling():
        stops = isinstance(sys.exc_info()[1], _StopRecomputationError)
        if not experts.has_met and not stops:  # checkpointing stops where it has recomputed enough
            experts.refuse()


def _described(module: nn.Module, experts: nn.Module) -> dict[str, object]:
    """What the layers of all ranks have to have in common, by name, as what can be pickled."""
    described: dict[str, object] = {"experts": type(experts).__name__}
    for name in ("num_experts", "dim", "hidden_dim", "activation", "alpha", "limit"):
        described[name] = getattr(experts, name, None)
    described["top_k"] = getattr(getattr(module, "router", None), "top_k", None)
    described["dtype"] = getattr(getattr(experts, "w1", None), "dtype", None)
    for name, p in module.named_parameters():
        what = [tuple(p.shape), p.dtype]
        what += [type(p).__name__] if isinstance(p, DTensor) else []
        what += [] if p.requires_grad else ["frozen"]
        what += [] if getattr(p, "main_grad", None) is None else ["with a main_grad"]
        described[f"parameter {name}"] = " ".join(map(str, what))
    return described


def _described_adapters(name: str, adapters: Adapters) -> dict[str, object]:
    parameters = {f"adapter {n}": f"{tuple(p.shape)} {p.dtype}" for n, p in adapters.named_parameters()}
    return {"adapters": name, **parameters}


def _check_same(described: dict[str, object], group, fn: str = FN) -> None:
    """Raises on all ranks if any two differ."""
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, described, group)
    for rank, other in enumerate(ranks):
        for name in described | other:
            own, found = described.get(name), other.get(name)
            if own != found:
                checks.fail(ValueError, fn, f"{name} {own} on all ranks", f"{found} on rank {rank}")


class _SumOverRanks:
    """A hook on a replicated parameter: a backward pass's gradient -> its sum over the ranks of a mesh. What
    has been accumulated before is a sum already."""

    def __init__(self, mesh: DeviceMesh):
        self.group = mesh.get_group()

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # a backward without a gradient for it, on all ranks alike
            return None
        return summed(grad, self.group)


def _sum_gradients(mesh: DeviceMesh, layer: FusedMoE, *_) -> None:
    """Hooks every floating parameter of a layer but the experts', if it has no hook yet; also frozen ones,
    which may train later. DTensors are reduced by what has sharded them, as `fully_shard`."""
    for child in layer.children():
        for p in () if child is layer.experts else child.parameters():
            hooks = (p._backward_hooks or {}).values()  # another layer may have the parameter, too
            is_hooked = any(isinstance(hook, _SumOverRanks) for hook in hooks)
            is_plain = not (isinstance(p, DTensor) or p.is_inference())
            if p.is_floating_point() and is_plain and not is_hooked:
                requires_grad = p.requires_grad
                p.requires_grad_().register_hook(_SumOverRanks(mesh))
                p.requires_grad_(requires_grad)


def _shard(module: nn.Module, mesh: DeviceMesh, src_data_rank: int | None = 0) -> None:
    """Makes a module's own parameters (E, ...) shards of experts."""
    for name, p in list(module.named_parameters(recurse=False)):
        tensor = p.detach()
        if isinstance(module, QuantizedWeight):  # gloo sends bytes, and no float8
            tensor = tensor.view(torch.uint8)
        shards: Tensor = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=src_data_rank)
        if isinstance(module, QuantizedWeight):
            shards = sharding.like(shards, sharding.local_of(shards, p.dtype), p.shape)
        setattr(module, name, nn.Parameter(shards, requires_grad=p.requires_grad))


def _check_sharded_alone(fn: str, experts: Experts, mesh: DeviceMesh, style: str) -> None:
    for name, parameter in experts.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            expected = f"{name} to be sharded by {style} alone, as before fully_shard"
            checks.fail(ValueError, fn, expected, "other shards")


def _local(value):
    """A DTensor's local shard; any other value unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def _local_weight(weight, main_grad):
    """A weight's local shard. With a main_grad it is not to_local's, whose backward turns a missing gradient
    into zeros in PyTorch 2.11."""
    if isinstance(weight, QuantizedWeight):
        return read(weight)._local()
    local = _local(weight)
    return local if main_grad is None else WithMainGrad.apply(weight, [local.detach()])
