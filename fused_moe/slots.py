"""The exchange of combine="slot": a token goes once to each rank that has any of its experts, and a row comes
back for each of its slots.

The experts' rank makes rows of slots from the received tokens, in the order (source rank, expert, token).
`Dispatch` and `Combine` are adjoint. Autograd would add gradients of slots at the experts' rank and round the
sums. Here they go back one by one, and the token's rank adds them in the order of k, so that a token has the
same bits on any number of ranks. dout goes there once for each rank, too, and is weighted there.

                forward                                         backward
    Dispatch    x there, rows of slots made                     drows back, summed: dx
    Combine     y back, the weighted sum: out                   dout there, weighted: dy

Plans are lists of tensors, as operators take them: `sent` of this rank's tokens by rank, `slots` of its slots
by expert, `received` of the received tokens' slots by source rank and expert. These nodes are for buffers of
the same size for every two ranks, and can be compiled. `fused_moe/exact.py` has those for exact sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import Even, gather
from .ops import ops, run, undifferentiable

NUM_THERE, NUM_BACK = 6, 7


def tokens_there(x: Tensor, exchange: Even, token_of_buffer: Tensor) -> Tensor:
    """This rank's tokens (T, any width) -> received ones."""
    return exchange(gather(x, token_of_buffer))


def _slots_back(rows: Tensor, exchange: Even, slot_of_buffer: Tensor, buffer_of_slot: Tensor) -> Tensor:
    """Rows of received slots -> rows of this rank's slots."""
    return gather(exchange(gather(rows, slot_of_buffer)), buffer_of_slot)


class Dispatch(torch.autograd.Function):
    """x (T, D) -> rows (R, D) of received slots.

    The last arguments are NUM_THERE of the way there, token_of_buffer and *received, and NUM_BACK of the way
    back, slot_of_buffer, buffer_of_slot and *slots.
    """

    @staticmethod
    def forward(ctx, x: Tensor, exchange: Even, *maps) -> Tensor:
        ctx.exchange = exchange
        ctx.save_for_backward(*maps[NUM_THERE:])
        token_of_buffer, *received = maps[:NUM_THERE]
        return run(ops.permute.default, tokens_there(x, exchange, token_of_buffer), received)

    @staticmethod
    def backward(ctx, drows: Tensor):
        slot_of_buffer, buffer_of_slot, *plan = ctx.saved_tensors
        drows = _slots_back(drows, ctx.exchange, slot_of_buffer, buffer_of_slot)
        return run(ops.unpermute.default, drows, None, plan), None, *[None] * (NUM_THERE + NUM_BACK)


class Combine(torch.autograd.Function):
    """y (R, D) of received slots, scores (T, K) of this rank's tokens and those of the received ones -> out
    (T, D), and an empty tensor, through which a recorded backward reaches this node's inputs. The last
    arguments are those of `Dispatch`."""

    @staticmethod
    def forward(
        ctx, y: Tensor, scores: Tensor, received_scores: Tensor, exchange: Even, *maps
    ) -> tuple[Tensor, Tensor]:
        slot_of_buffer, buffer_of_slot, *plan = maps[NUM_THERE:]
        rows = _slots_back(y, exchange, slot_of_buffer, buffer_of_slot)
        of_scores = (rows, scores, *plan) if ctx.needs_input_grad[1] else ()
        ctx.exchange = exchange
        node = y.new_empty(0)
        ctx.save_for_backward(node, received_scores, *maps[:NUM_THERE], *of_scores)
        return run(ops.unpermute.default, rows, scores, plan), node

    @staticmethod
    def backward(ctx, dout: Tensor, _):
        node, received_scores, token_of_buffer, *saved = ctx.saved_tensors
        received, of_scores = saved[: NUM_THERE - 1], saved[NUM_THERE - 1 :]
        dy = dscores = None
        if ctx.needs_input_grad[0]:
            rows = tokens_there(dout, ctx.exchange, token_of_buffer)
            args = (rows, None, received_scores, received, True, False)
            dy = run(ops.unpermute_backward.default, *args)[0]
        if of_scores:
            rows, scores, *plan = of_scores
            dscores = run(ops.unpermute_backward.default, dout, rows, scores, plan, False, True)[1]
        dy, dscores = undifferentiable("combine='slot'", (dy, dscores), dout, node)
        return dy, dscores, None, None, *[None] * (NUM_THERE + NUM_BACK)
