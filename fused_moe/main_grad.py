"""Which backward passes add to a weight's main_grad, and what autograd gets as the weight's gradient then.

The node that has the weight among its inputs adds to the main_grad, in a GEMM's epilogue. That the weight
requires a gradient is not enough: autograd.grad(loss, x) may add nothing. So the node asks PyTorch whether
the backward pass that is running wants the weight's gradient.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

# Private. torch.autograd.graph.register_multi_grad_hook asks it, too.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)


def less_unasked(ctx, need, **places: int):
    """`need`, less the weights whose gradients the running backward pass does not ask for. `places` are the
    weights' among the tensors that the node was applied to."""
    if torch.compiler.is_compiling():
        edges_asked = getattr(ctx, "edges_asked", None)  # by compiled autograd alone
        if edges_asked is None:
            return need
        asked = {name: getattr(need, name) and edges_asked[i] for name, i in places.items()}
    else:
        edges = ctx.next_functions
        asked = {name: getattr(need, name) and is_asked(edges[i][0]) for name, i in places.items()}
    return need._replace(**asked)


def compiled_autograd_key(ctx) -> tuple:
    """A node's `_compiled_autograd_key`. Compiled autograd asks for it before each backward pass, while the
    engine still tells what that pass asks for."""
    ctx.edges_asked = tuple(node is not None and is_asked(node) for node, _ in ctx.next_functions)
    return ctx._autograd_function_id, *ctx.edges_asked


def is_asked(node) -> bool:
    """Whether the running backward pass asks for the gradient that goes to `node`."""
    return _answer(node) is not False


def gradient_of(weight: Tensor, node) -> Tensor | None:
    """What autograd gets as the gradient of a weight whose main_grad was added to. `node` is the weight's.

    None, so that .grad stays None. Two callers need a tensor, whose values mean nothing. autograd.grad
    raises for None. Megatron's hooks, which exist if the weight has grad_added_to_main_grad, assert that
    there is one with overlap_grad_reduce, and with zero_out_wgrad they add it to the main_grad.
    """
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
        is_added = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if is_added else torch.empty_like(weight)
    return torch.zeros_like(weight) if _answer(node) is None else None


def _answer(node) -> bool | None:
    """Whether the running backward pass asks for the gradient that goes to `node`; None for a leaf whose
    gradient autograd.grad returns, where PyTorch refuses to tell.

    While PyTorch compiles, and in a version that does not tell, every pass is taken to ask for it.
    """
    if torch.compiler.is_compiling():
        return True
    if _will_execute is None:
        warnings.warn(
            "fused_moe: this PyTorch does not tell which gradients a backward pass asks for, so that "
            "autograd.grad(loss, x) and backward(inputs=...) add to the main_grads of all weights",
            stacklevel=2,
        )
        return True
    try:
        return _will_execute(node)
    except RuntimeError:
        return None


class WithMainGrad(torch.autograd.Function):
    """A weight -> the operand that operators get, a view of the weight that is given in a list. The weight's
    gradient is `gradient_of` it."""

    @staticmethod
    def forward(ctx, weight: Tensor, operand: list[Tensor]) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return operand[0].detach()

    @staticmethod
    def backward(ctx, _):
        return gradient_of(ctx.weight, ctx.next_functions[0][0]), None


def operands_of(weights, operands, main_grads) -> tuple[Any, Any, Any]:
    """The operands of w1, w2 and w3: those of leaves with a main_grad by WithMainGrad. All stay as they are
    while PyTorch compiles, traces or transforms."""
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
    ):
        return operands
    return tuple(
        WithMainGrad.apply(w, [operand])
        if main_grad is not None and type(w) in (Tensor, nn.Parameter) and w.is_leaf and w.requires_grad
        else operand
        for w, operand, main_grad in zip(weights, operands, main_grads, strict=True)
    )
