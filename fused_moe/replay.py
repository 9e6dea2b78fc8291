"""Recording and replaying which experts the layers of a model choose.

A sampler's choice is recorded (`record_routing`), travels as a `Routes`, and a trainer takes it
(`replay_routing`). A layer has a `Tape` meanwhile: it asks the tape for ids before it routes (`Tape.take`)
and tells it the ids that were used (`Tape.note`). In compiled code both are operators that find the tape at
run time by its key, a tensor, so one graph serves every layer, recording or not, and all routes.

Activation checkpointing runs a layer again in backward, perhaps after the contexts have ended, and calls of
several micro-batches may be outstanding. So the ids of a call are kept by the object that will run it again:
PyTorch's checkpoint frame, or the ctx of the autograd.Function around the call. Both are found on the Python
stack (`_regions`), in forward and in backward alike, and they are freed with the graph.

Letters: N tokens of a recording, L layers, T tokens of one call, E experts, K experts per token.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from .checks import GIVEN_IDS, check_int, fail
from .counting import is_recomputing
from .module import FusedMoE
from .namespace import NAMESPACE

__all__ = ["Routes", "record_routing", "replay_routing"]

MOST = torch.iinfo(torch.int16).max  # the largest id that is stored


class Routes:
    """The experts that each layer of a model chose for each token.

    Args:
        layers: L tensors (N, K) of integer ids, -1 in slots without an expert; where all ids of a token are
            -1, the router chooses for it in a replay. K and N may differ between layers. Ids are stored as
            uint8 if none is -1 or above 255, else as int16.
        num_experts: E of every layer, or a list of each layer's; ids from E on raise. None: not known; then a
            replay checks the largest id.

    `len(routes)` is L, and `routes[i]` the ids of layer i (N, K), in the order of `model.modules()`. Ids on a
    GPU are read by the host once, here, and where those of a recording are first asked for.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> routes = fused_moe.Routes([torch.tensor([[0, 1], [3, 2]])], num_experts=4)
        >>> routes
        Routes(layers=1, num_tokens=[2], top_k=[2])
        >>> routes[0]
        tensor([[0, 1],
                [3, 2]], dtype=torch.uint8)
    """

    def __init__(self, layers: Sequence[Tensor], num_experts: int | Sequence[int] | None = None):
        fn = "Routes"
        if isinstance(layers, Tensor) or not isinstance(layers, Sequence):
            fail(TypeError, fn, "layers to be a list of tensors (N, K)", type(layers).__name__)
        if not layers:
            fail(ValueError, fn, "at least one layer", 0)
        for i, ids in enumerate(layers):
            _check_ids(fn, f"layers[{i}]", ids, 2)
        bounds = _bounds(layers)
        if num_experts is None:
            self.num_experts: list[int | None] = [None] * len(layers)
        elif isinstance(num_experts, Sequence):
            self.num_experts = list(num_experts)
        else:
            self.num_experts = [num_experts] * len(layers)
        if len(self.num_experts) != len(layers):
            fail(ValueError, fn, f"num_experts of {len(layers)} layers", len(self.num_experts))
        for i, ((low, high), E) in enumerate(zip(bounds, self.num_experts, strict=True)):
            if E is not None:
                check_int(fn, "num_experts", E)
            most = MOST if E is None else E - 1
            if low < -1 or high > most:
                fail(ValueError, fn, f"ids of layer {i} from -1 to {most}", low if low < -1 else high)
        self.top_k = [ids.size(1) for ids in layers]
        self._largest = [high for _, high in bounds]
        self._ids = [_compact(ids, *pair) for ids, pair in zip(layers, bounds, strict=True)]
        self._calls = [[ids.size(0)] for ids in layers]  # tokens of each call
        self._added: list[list[Tensor]] = [[] for _ in layers]  # recorded, and not in _ids yet

    @classmethod
    def from_tensor(cls, ids: Tensor, num_experts: int | None = None) -> Routes:
        """Takes ids (..., L, K), as samplers ship them.

        They are (N, L, K) for packed sequences, and (B, S, L, K) for padded ones, with -1 at padded
        positions. Tokens are those of `ids.flatten(0, -3)`.

        Args:
            ids: (..., L, K) of an integer dtype.
            num_experts: E.

        Returns:
            Routes of L layers.

        Raises:
            TypeError: for a wrong type or dtype.
            ValueError: for a wrong shape, or an id outside [-1, E).

        Example:
            >>> fused_moe.Routes.from_tensor(torch.zeros(2, 5, 3, 1, dtype=torch.int32))
            Routes(layers=3, num_tokens=[10, 10, 10], top_k=[1, 1, 1])
        """
        fn = "Routes.from_tensor"
        if not isinstance(ids, Tensor):
            fail(TypeError, fn, "ids to be a tensor of shape (..., L, K)", type(ids).__name__)
        if ids.dim() < 3:
            fail(ValueError, fn, "ids of shape (..., L, K)", tuple(ids.shape))
        _check_ids(fn, "ids", ids, ids.dim())
        layers = ids.reshape(-1, *ids.shape[-2:]).transpose(0, 1).contiguous()
        return cls(list(layers), num_experts)

    @classmethod
    def from_vllm(
        cls,
        routed_experts: Any,
        num_tokens: int | Sequence[int] | None = None,
        *,
        start: int | Sequence[int] = 0,
        layers: Sequence[int] | None = None,
        num_experts: int | None = None,
    ) -> Routes:
        """Takes what vLLM returns as `routed_experts` (enable_return_routed_experts).

        vLLM has no record of a request's last token, which it has not run, and none of the first
        `routed_experts_prompt_start` tokens. In a replay the router chooses for tokens without a record.

        Args:
            routed_experts: a request's array (R, L, K) of an integer dtype, NumPy's or a tensor, with
                uint8 or uint16 from vLLM; or a list of them, whose tokens follow each other in the routes.
            num_tokens: tokens of each request as the trainer runs it, such as prompt and answer; tokens after
                its record are -1. None: start + R, so the last token is not among them.
            start: the requests' routed_experts_prompt_start.
            layers: the indices of the model's MoE layers. vLLM has dense layers too, where ids mean nothing.
                None: all L.
            num_experts: E.

        Returns:
            Routes of L layers.

        Raises:
            TypeError: for a wrong type or dtype.
            ValueError: for a wrong shape, device or value. The message says what was expected and what was
                found.

        Source: vLLM 0.33.0, vllm/distributed/aux_output_connector.

        Example:
            >>> routed_experts = torch.zeros(4, 3, 2, dtype=torch.uint8)  # R = 4, L = 3, K = 2
            >>> fused_moe.Routes.from_vllm(routed_experts, num_tokens=5, num_experts=8).num_tokens
            [5, 5, 5]
        """
        fn = "Routes.from_vllm"
        requests = list(routed_experts) if isinstance(routed_experts, (list, tuple)) else [routed_experts]
        if not requests:
            fail(ValueError, fn, "at least one request", 0)
        starts = list(start) if isinstance(start, Sequence) else [start] * len(requests)
        counts = list(num_tokens) if isinstance(num_tokens, Sequence) else [num_tokens] * len(requests)
        for name, values in (("start", starts), ("num_tokens", counts)):
            if len(values) != len(requests):
                fail(ValueError, fn, f"{name} of {len(requests)} requests", len(values))
        parts = []
        for rows, first, total in zip(requests, starts, counts, strict=True):
            check_int(fn, "start", first)
            if not isinstance(rows, Tensor):
                if not hasattr(rows, "__array__"):
                    fail(TypeError, fn, "routed_experts to be arrays (R, L, K)", type(rows).__name__)
                rows = torch.tensor(rows)  # a copy: vLLM's array may be read-only
            _check_ids(fn, "routed_experts", rows, 3)
            end = first + rows.size(0)
            if total is None:
                total = end
            check_int(fn, "num_tokens", total)
            if first < 0 or total < end:
                fail(ValueError, fn, f"start >= 0 and num_tokens >= {end}", f"{first} and {total}")
            part = torch.full((total, *rows.shape[1:]), -1, dtype=torch.int32, device=rows.device)
            part[first:end] = rows.int()
            parts.append(part)
        if len({part.shape[1:] for part in parts}) > 1:
            fail(ValueError, fn, "requests of one L and K", [tuple(part.shape[1:]) for part in parts])
        ids = torch.cat(parts)
        if layers is not None:
            for layer in layers:
                check_int(fn, "layers", layer)
                if not 0 <= layer < ids.size(1):
                    fail(ValueError, fn, f"layers from 0 to {ids.size(1) - 1}", layer)
            ids = ids[:, list(layers)]
        return cls.from_tensor(ids, num_experts)

    def to_tensor(self, batch_size: int | None = None) -> Tensor:
        """Returns ids (N, L, K), of layers that have one K and the same tokens.

        With batch_size = B of a recording whose calls had x (B, S_i, D), the prefill and the decode steps of
        B sequences, say, it returns (B, S, L, K) with S = sum of S_i, each sequence's tokens in a row.

        Raises:
            ValueError: layers differ in K or tokens, or batch_size does not divide the tokens of a call.
        """
        fn = "Routes.to_tensor"
        if len(set(self.top_k)) > 1:
            fail(ValueError, fn, "layers of one K", self.top_k)
        self._check_same_tokens(fn)
        ids = torch.stack([self[i] for i in range(len(self))], 1)
        if batch_size is None:
            return ids
        check_int(fn, "batch_size", batch_size)
        if any(calls != self._calls[0] for calls in self._calls):
            fail(ValueError, fn, "layers with the same tokens in each call", self._calls)
        if batch_size < 1 or any(tokens % batch_size for tokens in self._calls[0]):
            expected = f"a batch_size that divides the tokens of each call, {self._calls[0]}"
            fail(ValueError, fn, expected, batch_size)
        return torch.cat([part.unflatten(0, (batch_size, -1)) for part in ids.split(self._calls[0])], 1)

    def select(self, tokens: slice | Tensor) -> Routes:
        """Returns the routes of some tokens, in the order given: a slice, or a tensor of indices or bool
        (N,)."""
        fn = "Routes.select"
        if not isinstance(tokens, (slice, Tensor)):
            fail(TypeError, fn, "tokens to be a slice or a tensor", type(tokens).__name__)
        if isinstance(tokens, Tensor) and tokens.dim() != 1:
            fail(ValueError, fn, "tokens of one dimension", tuple(tokens.shape))
        self._check_same_tokens(fn)
        return self._of([self[i][tokens] for i in range(len(self))])

    def to(self, device: torch.device | str | int) -> Routes:
        """Returns the same routes on a device."""
        return self._of([self[i].to(device) for i in range(len(self))])

    @property
    def num_tokens(self) -> list[int]:
        """N of each layer."""
        return [sum(calls) for calls in self._calls]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, layer: int) -> Tensor:
        added = self._added[layer]
        if added:
            ids = torch.cat([self._ids[layer].to(added[0].device), *added])
            self._ids[layer] = ids if ids.is_meta else _compact(ids, *_bounds([ids])[0])
            added.clear()
        return self._ids[layer]

    def __repr__(self) -> str:
        return f"Routes(layers={len(self)}, num_tokens={self.num_tokens}, top_k={self.top_k})"

    def _add(self, layer: int, ids: Tensor) -> None:
        """Appends a call's ids."""
        self._added[layer].append(ids)
        self._calls[layer].append(ids.size(0))

    def _of(self, layers: list[Tensor]) -> Routes:
        """Routes of other tokens of the same layers."""
        routes = copy.copy(self)
        routes._ids, routes._calls = layers, [[ids.size(0)] for ids in layers]
        routes._added = [[] for _ in layers]
        return routes

    def _check_same_tokens(self, fn: str) -> None:
        if len(set(self.num_tokens)) > 1:
            fail(ValueError, fn, "layers with the same tokens", f"{self.num_tokens} tokens")


def _check_ids(fn: str, name: str, ids, dims: int) -> None:
    if not isinstance(ids, Tensor):
        fail(TypeError, fn, f"{name} to be a tensor", type(ids).__name__)
    if ids.dtype not in GIVEN_IDS:
        fail(TypeError, fn, f"{name} of an integer dtype", ids.dtype)
    if ids.dim() != dims or ids.size(-1) < 1:
        fail(ValueError, fn, f"{name} of shape (N, K) with K >= 1", tuple(ids.shape))


def _bounds(layers: Sequence[Tensor]) -> list[list[int]]:
    """The least and the largest id of each layer, read from a GPU at once."""
    empty = torch.tensor([0, -1])
    read = (ids.int() if ids.dtype == torch.uint16 else ids for ids in layers)  # it has no aminmax
    pairs = [torch.stack(ids.aminmax()).long() if ids.numel() else empty for ids in read]
    return torch.stack([pair.to(pairs[0].device) for pair in pairs]).tolist()


def _compact(ids: Tensor, low: int, high: int) -> Tensor:
    return ids.to(torch.uint8 if low >= 0 and high < 256 else torch.int16)


# --- the contexts -----------------------------------------------------------------------------------------

# Functions of a module: (E, K) if it is a layer that asks a tape, else None. Adapters append theirs.
FINDERS: list[Callable[[nn.Module], tuple[int, int] | None]] = [
    lambda module: (module.num_experts, module.top_k) if isinstance(module, FusedMoE) else None
]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routes]:
    """Records which experts each layer of a model chooses, for `replay_routing`.

    Every call of a layer appends its tokens. Layers are those that the model has now, also inside DDP, FSDP
    and torch.compile, in the order of `model.modules()`; a layer that is in several places is one. Every rank
    records its own tokens, also under `ExpertParallel`. A forward pass that checkpointing runs again is
    recorded once. Padding of `num_tokens` is recorded as -1. Contexts nest: each records all of its own.
    Compiled layers are compiled once more in the first context, and not again.

    A captured CUDA graph runs no Python, so a capture inside raises: capture with return_ids=True.

    Args:
        model: a module with at least one layer of ours in it.

    Yields:
        Routes, which grow with each call.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> with fused_moe.record_routing(moe) as routes:
        ...     _ = moe(torch.randn(5, 8))
        >>> routes
        Routes(layers=1, num_tokens=[5], top_k=[2])
    """
    layers = _layers_in("record_routing", model)
    routes = Routes([torch.empty(0, K, dtype=torch.uint8) for *_, K in layers], [E for _, _, E, _ in layers])
    routes._largest = [E - 1 for E in routes.num_experts if E is not None]
    tapes = [_attach(layer) for _, layer, _, _ in layers]
    for i, tape in enumerate(tapes):
        tape.recorders.append((routes, i))
    try:
        yield routes
    finally:
        for i, tape in enumerate(tapes):
            tape.recorders.remove((routes, i))
            tape.detach_if_unused()


@contextmanager
def replay_routing(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Makes each layer of a model take the experts of `routes`, as its forward's `ids` do.

    Scores and gradients are the model's own at these experts. Each call of a layer takes as many tokens as it
    has, in order, so micro-batches may share one context, or have a context each with `routes.select`. A call
    that is given ids itself takes those, and none of the routes. Activation checkpointing by
    torch.utils.checkpoint or by an autograd.Function that runs the layers again takes the ids of the call
    that it repeats, also after the context has ended; another way of running them in backward raises
    RuntimeError. Inside another replay of the same layer, the inner one is taken until it ends.

    Compiled layers are compiled once more in the first context, and not again for other routes. Under
    torch.compile a layer that is called more than once in a compiled region with checkpointing inside raises.
    A CUDA graph reads the memory of the ids that it was captured with, so a capture needs routes on the GPU:
    write others into `routes[i]`.

    Args:
        model: a module with at least one layer of ours in it.
        routes: of a model with the same layers, in the order of `model.modules()`. Moved to the layers'
            device as they are taken, without waiting for it.

    Raises:
        TypeError: routes are no Routes, or model is no nn.Module.
        ValueError: for routes of other layers, K or E; where a layer has more tokens than its routes, or, at
            the end, fewer. The message says what was expected and what was found.

    Example:
        >>> moe, x = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2), torch.randn(5, 8)
        >>> with fused_moe.record_routing(moe) as routes:
        ...     _ = moe(x)
        >>> with fused_moe.replay_routing(moe, routes):
        ...     _, ids = moe(x, return_ids=True)
        >>> torch.equal(ids, routes[0].int())
        True
    """
    fn = "replay_routing"
    layers = _layers_in(fn, model)
    if not isinstance(routes, Routes):
        fail(TypeError, fn, "routes to be a fused_moe.Routes", type(routes).__name__)
    if len(routes) != len(layers):
        fail(ValueError, fn, f"routes of the model's {len(layers)} layers", f"routes of {len(routes)}")
    for i, (name, _, num_experts, top_k) in enumerate(layers):
        if routes.top_k[i] != top_k:
            fail(ValueError, fn, f"routes of layer {name!r} with K = {top_k}", f"K = {routes.top_k[i]}")
        E = routes.num_experts[i]
        if E is not None and num_experts != E:
            fail(ValueError, fn, f"routes of layer {name!r} with E = {num_experts}", f"E = {E}")
        if routes._largest[i] >= num_experts:
            expected = f"ids of layer {name!r} below E = {num_experts}"
            fail(ValueError, fn, expected, routes._largest[i])
    replays = [_Replay(name, routes[i]) for i, (name, *_) in enumerate(layers)]
    tapes = [_attach(layer) for _, layer, _, _ in layers]
    for tape, replay in zip(tapes, replays, strict=True):
        tape.replays.append(replay)
    try:
        yield
        for replay in replays:
            replay.check_end()
    finally:
        for tape, replay in zip(tapes, replays, strict=True):
            tape.replays.remove(replay)
            tape.detach_if_unused()


def _layers_in(fn: str, model) -> list[tuple[str, nn.Module, int, int]]:
    """Name, layer, E and K of each layer of a model."""
    if not isinstance(model, nn.Module):
        fail(TypeError, fn, "model to be a module with a FusedMoE in it", type(model).__name__)
    layers = []
    for name, module in model.named_modules():
        sizes = next((sizes for find in FINDERS if (sizes := find(module)) is not None), None)
        if sizes is not None:
            layers.append((name, module, *sizes))
    if not layers:
        fail(ValueError, fn, "model to be a module with a FusedMoE in it", type(model).__name__)
    return layers


class _Replay:
    """A layer's ids in one `replay_routing`, and how many of them were taken."""

    def __init__(self, name: str, ids: Tensor):
        self.name, self.num_taken = name, 0
        self.ids = {ids.device: ids}  # by device
        self.num_tokens = ids.size(0)

    def take(self, num_tokens: int, device: torch.device) -> Tensor:
        """The next ids (T, K)."""
        left = self.num_tokens - self.num_taken
        if num_tokens > left:
            expected = f"at most {left} more of the routes' {self.num_tokens} tokens in layer {self.name!r}"
            fail(ValueError, "replay_routing", expected, num_tokens)
        if device not in self.ids:
            ids = next(iter(self.ids.values()))
            if _is_capturing(device):
                raise RuntimeError(
                    f"replay_routing: expected routes on {device} in a capture of a CUDA graph, found them "
                    f"on {ids.device}"
                )
            with torch.inference_mode(False):
                self.ids[device] = ids.to(device, non_blocking=True)
        ids = self.ids[device].narrow(0, self.num_taken, num_tokens)
        self.num_taken += num_tokens
        return ids

    def check_end(self) -> None:
        # A context inside of a checkpoint is entered again in backward, where memories are taken.
        if self.num_taken != self.num_tokens and not is_recomputing():
            expected = f"a replay of all {self.num_tokens} tokens of the routes in layer {self.name!r}"
            fail(ValueError, "replay_routing", expected, self.num_taken)


# --- what a layer asks ------------------------------------------------------------------------------------


class Tape:
    """What one layer records and replays. It is the layer's attribute `_tape` while a context is open or a
    checkpoint that has replayed may run the layer again; otherwise that is None, or missing."""

    def __init__(self, layer: nn.Module):
        self.layer = weakref.ref(layer)
        self.key = torch.tensor(next(_keys))  # () int64, on the CPU: compiled code reads it at run time
        self.recorders: list[tuple[Routes, int]] = []  # routes, and the layer's index in them
        self.replays: list[_Replay] = []  # the last one is taken
        self.num_memories = 0
        _tapes[int(self.key)] = self

    def __reduce__(self):
        return type(None), ()  # a copy of the layer has no part in its contexts

    def take(self, x: Tensor, top_k: int) -> Tensor | None:
        """The ids (T, K) that the router has to take for x (T, ...); None, or a token's all -1, where it
        chooses. Ask once per call of the layer."""
        if torch.compiler.is_compiling():
            return _take_op(self.key, x.size(0), top_k, x.device)
        return _take(self, x.size(0), x.device)

    def note(self, ids: Tensor) -> None:
        """Records the ids (T, K) that the router has returned."""
        if torch.compiler.is_compiling():
            _note_op(self.key, ids)
        else:
            _note(self, ids)

    def detach_if_unused(self) -> None:
        layer = self.layer()
        if layer is not None and not (self.recorders or self.replays or self.num_memories):
            layer.__dict__.pop("_tape", None)


_keys = count()
_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()


def tape_of(layer: nn.Module) -> Tape | None:
    """The tape to ask and to tell in a call of the layer, if there is one."""
    return getattr(layer, "_tape", None)


def _attach(layer: nn.Module) -> Tape:
    tape = tape_of(layer)
    if tape is None:
        tape = layer.__dict__["_tape"] = Tape(layer)
    return tape


def _take(tape: Tape, num_tokens: int, device: torch.device) -> Tensor | None:
    if not tape.replays and not tape.num_memories:
        return None
    _check_no_transform("replay_routing")
    regions, repeated = _regions()
    if repeated is not None:
        ids = _memory(repeated).again(tape)
    elif is_recomputing():
        raise RuntimeError(
            "replay_routing: expected a recomputation by torch.utils.checkpoint or by an autograd.Function, "
            "found a layer that is called in backward otherwise"
        )
    else:
        ids = tape.replays[-1].take(num_tokens, device) if tape.replays else None
    for region in regions:
        _memory(region).keep(tape, ids)
    return ids


def _note(tape: Tape, ids: Tensor) -> None:
    if not tape.recorders or is_recomputing():
        return
    _check_no_transform("record_routing")
    if _is_capturing(ids.device):
        raise RuntimeError(
            "record_routing: expected no capture of a CUDA graph, whose replays record nothing, found one; "
            "capture with return_ids=True"
        )
    with torch.inference_mode(False):
        ids = ids.to(torch.int16)
    for routes, i in tape.recorders:
        routes._add(i, ids)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _check_no_transform(fn: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{fn}: expected no transform of torch.func around the layer, found one")


# --- recomputation ----------------------------------------------------------------------------------------


class _Memory:
    """The ids that each layer took in a region that may run again."""

    def __init__(self):
        self.calls: dict[Tape, list[Tensor | None]] = {}
        self.num_repeated: dict[Tape, int] = {}  # calls, in a backward pass
        self.graph_task = None
        self.is_compiled = False

    def keep(self, tape: Tape, ids: Tensor | None) -> None:
        if tape not in self.calls:
            self.calls[tape] = []
            tape.num_memories += 1
        self.calls[tape].append(ids)

    def again(self, tape: Tape) -> Tensor | None:
        """The ids of the next call in the region; None if it has begun before the layer had a tape."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self.graph_task:
            self.graph_task, self.num_repeated = graph_task, {}
        calls = self.calls.get(tape)
        if not calls:
            return None
        if self.is_compiled and len(calls) > 1:  # compiled backward repeats calls in another order
            raise RuntimeError(
                "replay_routing: expected one call of a layer in a compiled region that has checkpointing "
                f"inside, found {len(calls)}"
            )
        n = self.num_repeated.get(tape, 0)
        self.num_repeated[tape] = n + 1
        return calls[n % len(calls)]

    def __del__(self):
        for tape in self.calls:
            tape.num_memories -= 1
            tape.detach_if_unused()


def _memory(region) -> _Memory:
    memory = getattr(region, "_fused_moe_memory", None)
    if memory is None:
        memory = region._fused_moe_memory = _Memory()
        memory.is_compiled = type(region).__name__ == "CompiledFunctionBackward"
    return memory


def _regions() -> tuple[list, object | None]:
    """The calls in progress whose forward may run again in backward, from the innermost out: PyTorch's
    checkpoint frames, and the ctx of autograd.Functions (reentrant checkpointing, compiled graphs). The
    list ends at the first one that runs again now, which is returned beside it."""
    regions = _frame_of_hooks()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__:
            if code.co_name == "unpack_hook":
                return regions, frame.f_locals["frame"]
            regions += (region for region in _frames_of_call(frame) if region not in regions)
        if code.co_varnames[:1] == ("ctx",) and code.co_name in ("forward", "backward"):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, FunctionCtx):
                if code.co_name == "backward":
                    return regions, ctx
                regions.append(ctx)
        frame = frame.f_back
    return regions, None


def _frame_of_hooks() -> list:
    """The innermost checkpoint frame in a forward pass, which the hooks on saved tensors hold; they alone
    where a module was made to checkpoint itself (torch.distributed._composable)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    cells = getattr(hooks[0], "__closure__", None) if hooks else None
    return [cell.cell_contents for cell in cells or () if _is_checkpoint_frame(cell.cell_contents)]


def _frames_of_call(frame: FrameType) -> list:
    """The checkpoint frame of a call without reentry, which has it in a generator."""
    generators = (value for value in frame.f_locals.values() if isinstance(value, GeneratorType))
    values = (value for g in generators if g.gi_frame is not None for value in g.gi_frame.f_locals.values())
    return [value for value in values if _is_checkpoint_frame(value)]


def _is_checkpoint_frame(value) -> bool:
    return isinstance(value, checkpoint._CheckpointFrame)


# --- operators for compiled code --------------------------------------------------------------------------


def _take_at_run_time(key: Tensor, num_tokens: int, top_k: int, device: torch.device) -> Tensor:
    tape = _tapes.get(int(key))
    ids = None if tape is None else _take(tape, num_tokens, device)
    if ids is None:
        return torch.full((num_tokens, top_k), -1, dtype=torch.int16, device=device)
    return ids.to(torch.int16, copy=True)


def _note_at_run_time(key: Tensor, ids: Tensor) -> None:
    tape = _tapes.get(int(key))
    if tape is not None:
        _note(tape, ids)


# Both are declared to write the key, which keeps them in order and from being merged or removed. They run
# between two CUDA graphs of mode="reduce-overhead", not in one.
_library = torch.library.Library(f"{NAMESPACE}_replay", "DEF")
for _schema, _run, _fake in (
    (
        "take(Tensor(a!) key, SymInt num_tokens, int top_k, Device device) -> Tensor",
        _take_at_run_time,
        lambda key, num_tokens, top_k, device: torch.empty(
            (num_tokens, top_k), dtype=torch.int16, device=device
        ),
    ),
    ("note(Tensor(a!) key, Tensor ids) -> ()", _note_at_run_time, lambda key, ids: None),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=torch.Tag.cudagraph_unsafe)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}_replay::{_name}", _fake, lib=_library)
_take_op = getattr(torch.ops, _library.ns).take.default
_note_op = getattr(torch.ops, _library.ns).note.default
