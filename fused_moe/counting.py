"""Tensors that count what a layer's forward passes did: tokens per expert, dropped rows.

They move with their module as buffers do, but are plain attributes: DistributedDataParallel overwrites all
buffers by those of rank 0 before most forward passes. A forward pass is counted once, also if activation
checkpointing recomputes it, and under torch.compile and the transforms of torch.func.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from .namespace import NAMESPACE


class Counting(nn.Module):
    """A module with counters: attributes named in `counters`, set by the subclass."""

    counters: tuple[str, ...] = ()

    def _count(self, name: str, amount: Tensor) -> bool:
        """Adds amount, of any dtype, to a counter. Returns whether a plain eager call, not recomputed,
        has done so."""
        total = getattr(self, name)
        if amount.is_floating_point():  # from another module in the experts' place; integers are promoted
            amount = amount.to(total.dtype)
        if amount.is_meta and not total.is_meta:  # shapes alone are asked for
            return False
        if total.device != amount.device:
            total = self._move_counter(name, amount.device)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            _op(total, amount)
            return False
        if is_recomputing():
            return False
        total.add_(amount)
        return True

    def _move_counter(self, name: str, device: torch.device) -> Tensor:
        """For those who move parameters and buffers only: `fully_shard`, and load_state_dict(assign=True),
        which leaves the rest on meta."""
        total = getattr(self, name)
        if torch.compiler.is_compiling():
            total = _start_op(None if total.is_meta else total, total.shape, total.dtype, device)
        else:
            with _plain_tensors():
                total = _start(None if total.is_meta else total, total.shape, total.dtype, device)
        setattr(self, name, total)
        return total

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """As nn.Module, but without counters, which a file of another layer may have."""
        for name in self.counters:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn, recurse=True):
        """As nn.Module, but counters keep their dtype: a bfloat16 counter stops at 256."""
        super()._apply(fn, recurse)
        for name in self.counters:
            before = getattr(self, name)
            if before.is_meta and not any(p.is_meta for p in self.parameters()):  # they came by assignment
                before = torch.zeros_like(before, device="cpu")
            after = fn(before)
            setattr(self, name, after if after.dtype == before.dtype else before.to(after.device))
        return self


def _plain_tensors() -> ExitStack:
    """A counter outlives the call that moves it: it is no tensor of inference mode or of a transform."""
    stack = ExitStack()
    stack.enter_context(temporarily_clear_interpreter_stack())
    stack.enter_context(torch.inference_mode(False))
    return stack


def is_recomputing() -> bool:
    """Whether activation checkpointing runs forward again: whether any backward runs."""
    return torch._C._current_graph_task_id() != -1


def _add(total: Tensor, amount: Tensor) -> None:
    if not is_recomputing():
        total.add_(amount)


def _start(total: Tensor | None, shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A counter on a device: a copy of total, or zeros."""
    with torch.inference_mode(False):
        new = torch.zeros(shape, dtype=dtype, device=device)
    return new if total is None else new.copy_(total)


def _add_batched(info, in_dims, total: Tensor, amount: Tensor):
    """Under vmap a counter gets the sum over the batch."""
    total_dim, amount_dim = in_dims
    if total_dim is None:
        amount = amount.sum(amount_dim)
    else:
        total = total.movedim(total_dim, 0)
        amount = amount if amount_dim is None else amount.movedim(amount_dim, 0)
    _op(total, amount)
    return None, None


# In a compiled graph whether forward is recomputed is known at run time only, and torch.func refuses add_ on
# a tensor from outside. Both call an operator. A CUDA graph would replay the answer of its recording, and
# mode="reduce-overhead" takes what a graph writes for an output, which the next step overwrites: operators on
# counters are between two graphs, so that no graph has a counter.
_library = torch.library.Library(f"{NAMESPACE}_counting", "DEF")
_library.define("add(Tensor(a!) total, Tensor amount) -> ()", tags=torch.Tag.cudagraph_unsafe)
_library.impl("add", _add, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}_counting::add", lambda total, amount: None, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}_counting::add", _add_batched, lib=_library)
_op = getattr(torch.ops, _library.ns).add.default
_library.define(
    "start(Tensor? total, SymInt[] shape, ScalarType dtype, Device device) -> Tensor",
    tags=torch.Tag.cudagraph_unsafe,
)
_library.impl("start", _start, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}_counting::start",
    lambda total, shape, dtype, device: torch.empty(shape, dtype=dtype, device=device),
    lib=_library,
)
_start_op = getattr(torch.ops, _library.ns).start.default
