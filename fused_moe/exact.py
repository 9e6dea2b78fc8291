"""The way of one call's rows there and back, where the host knows how many there are.

An all-to-all has a stream of its own. It starts in one node of autograd and ends in another, and other work
comes between them: shared experts, and in backward the weights' gradients. A `Way` holds what is in flight,
because autograd may read any tensor that it passes on.

             forward                                  backward
    There    x has come; a row for each slot          drows back, summed: dx
    Send     y starts back                            dout has come: dy
    Receive  y has come; summed, weighted: out        dout starts there

drows starts back before the gradients of weights: their operator calls `on_gradient`, an attribute of the
received rows, as soon as it has drows.

`returning` is the plan of this rank's rows that come back: with combine="slot" of its slots by expert, and
with "rank" of its tokens by rank, which is the plan `sent`, too. Only "slot" has `received`, the plan of the
received tokens' slots by source rank and expert, and weights what comes back: `fused_moe/slots.py` says why.
Plans are lists of tensors, as operators take them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .exchange import Exact, Opening, Ranks, cut, facts_of, wait
from .main_grad import is_asked
from .ops import ops, run, undifferentiable
from .plan import Plan

WHAT = "ExpertParallel"
LENGTH = 5  # of a plan
ROOM = 8000  # cycles: NCCL's kernel starts 2 to 3 us after what it waits for, a GEMM of ours 0.2


class Way:
    """One call's exchanges: `tokens` of its tokens and `back` of what returns; and what is in flight. With
    `beside` other work comes between `put` and `take`."""

    def __init__(self, tokens: Exact, back: Exact, beside: bool = False):
        self.tokens, self.back, self.beside = tokens, back, beside
        self._arriving: Tensor | None = None
        self._gradient: tuple[int, Tensor] | None = None  # where drows is in memory, and what arrives of it

    def put(self, arriving: Tensor) -> None:
        """Rows that have started, for the next node."""
        self._arriving = arriving
        if self.beside:
            _make_room(arriving)

    def take(self) -> Tensor:
        """These rows, when they have come."""
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        return wait(arriving)

    def start_gradient(self, drows: Tensor) -> None:
        """Starts drows back before `There` gets it."""
        self._gradient = drows.data_ptr(), self.back.start_back(drows)
        _make_room(drows)

    def gradient(self, drows: Tensor) -> Tensor:
        """drows when it has come back."""
        started, self._gradient = self._gradient, None
        if started is None:
            return wait(self.back.start_back(drows))
        assert started[0] == drows.data_ptr()
        return wait(started[1])


def _make_room(rows: Tensor) -> None:
    """Lets an exchange that has been launched take its SMs. A GEMM takes all that are free, and keeps them
    until it ends."""
    if rows.is_cuda:
        torch.cuda._sleep(ROOM)


class There(torch.autograd.Function):
    """x (T, D), and its rows, which have started -> received rows (R, D), or rows of their slots. What has
    started may have more columns. The last arguments are *returning and *received."""

    @staticmethod
    def forward(ctx, x: Tensor, arriving: Tensor, way: Way, *plans: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*plans[:LENGTH])
        rows = wait(arriving)
        received = plans[LENGTH:]
        return run(ops.permute.default, rows, [*received]) if received else rows[:, : x.size(1)]

    @staticmethod
    def backward(ctx, drows: Tensor):
        plan = [*ctx.saved_tensors]
        dx = run(ops.unpermute.default, ctx.way.gradient(drows), None, plan)
        nones = [None] * (len(ctx.needs_input_grad) - 1)
        return *undifferentiable(WHAT, (dx,), drows), *nones


class Send(torch.autograd.Function):
    """y of the received rows, or of their slots, and with `received` the received tokens' scores -> an empty
    tensor, through which backward comes here from `Receive`."""

    @staticmethod
    def forward(ctx, y: Tensor, scores: Tensor | None, way: Way, *received: Tensor) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(scores, *received)
        way.put(way.back.start_back(y))
        return y.new_empty(0)

    @staticmethod
    def backward(ctx, dlink: Tensor):
        scores, *received = ctx.saved_tensors
        dy = ctx.way.take()
        if received:
            dy = run(ops.unpermute_backward.default, dy, None, scores, received, True, False)[0]
        return *undifferentiable(WHAT, (dy,), dlink), None, None, *[None] * len(received)


class Receive(torch.autograd.Function):
    """What `Send` returned, and this rank's scores (T, K), or None to add unweighted -> out (T, D), and an
    empty tensor, through which a recorded backward reaches this node's inputs. The last arguments are *sent
    and *returning."""

    @staticmethod
    def forward(ctx, link: Tensor, scores: Tensor | None, way: Way, *plans: Tensor) -> tuple[Tensor, Tensor]:
        rows, plan = way.take(), [*plans[LENGTH:]]
        ctx.way, node = way, rows.new_empty(0)
        of_scores = (rows, scores, *plan) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(node, *plans[:LENGTH], *of_scores)
        return run(ops.unpermute.default, rows, scores, plan), node

    @staticmethod
    def backward(ctx, dout: Tensor, _):
        node, *saved = ctx.saved_tensors
        sent, of_scores = saved[:LENGTH], saved[LENGTH:]
        dlink = dscores = None
        if ctx.needs_input_grad[0] and is_asked(ctx.next_functions[0][0]):  # else nothing would wait for it
            ctx.way.put(ctx.way.tokens.start_there(run(ops.permute.default, dout, sent)))
            dlink = node
        if of_scores:
            rows, scores, *plan = of_scores
            dscores = run(ops.unpermute_backward.default, dout, rows, scores, plan, False, True)[1]
        return *undifferentiable(WHAT, (dlink, dscores), dout, node), None, *[None] * (2 * LENGTH)


@_disable_dynamo
def exchanged_experts(
    ranks: Ranks,
    x: Tensor,
    scores: Tensor,
    ids: Tensor,
    slots: Plan,
    prepare: Callable[[], Callable[..., Tensor]],
    shared: Callable[[], Tensor | None] | None = None,
    *,
    bounds: bool = True,
    meet: Callable[[], None] | None = None,
) -> Tensor:
    """The experts of all ranks on this rank's x (T, D), with scores (T, K) of `score_dtype` and ids (T, K),
    whose plan is `slots`: out (T, D). `shared` runs beside the exchange, and what it returns, if it does, is
    added.

    `prepare` returns this rank's experts, a function of received rows (R, D), scores and ids (R, K) among
    them, others outside [0, E/N), and max_rows. At most max_rows slots have an expert here; it is None
    without `bounds`, and by slots, where each row is one. `meet` is called before the first collective. All
    that is made without the sizes is made before the host waits for them, and all that is made without the
    received rows before the device waits for these."""
    num_ranks = ranks.group.size()
    sent = ranks.plan_of(ids)
    if meet is not None:
        meet()
    opening = Opening(ranks.group, facts_of(x, ids), sent.counts, ranks.slots_of(slots.counts))
    sent = cut(sent, x.size(0) * min(ids.size(1), num_ranks))
    choice = ranks.choice(scores.detach(), ids)
    chosen, rows = (run(ops.permute.default, t.detach(), sent.tensors) for t in (choice, x))
    groups = ranks.slot_groups(x.device) if ranks.by_slot else None
    experts = prepare()
    tokens, of_slots = opening.exchanges()
    num_sent, num_slots = sum(tokens.send_splits), sum(of_slots.receive_splits)
    chosen = tokens.start_there(chosen[:num_sent])
    rows = tokens.start_there(rows[:num_sent])  # what is sent is freed before slots get rows
    sent = cut(sent, num_sent)
    way, returning = Way(tokens, tokens, shared is not None), sent
    received: list[Tensor] = []
    received_scores: Tensor | None = None
    max_rows = None
    if groups is not None:
        way.back, returning = of_slots, cut(slots, sum(of_slots.send_splits))
        received_scores, plan = ranks.received_slots(wait(chosen), groups)
        plan = cut(plan, num_slots)
        received = plan.tensors
        of_rows = torch.ones(num_slots, 1, dtype=scores.dtype, device=x.device)
        local_ids = ranks.local_ids(plan, has_room=False)
    else:
        of_rows = There.apply(scores, chosen, Way(tokens, tokens), *sent.tensors)
        _, local_ids = ranks.received_ids(chosen)
        max_rows = max(num_slots, 1) if bounds else None
    rows = There.apply(x, rows, way, *returning.tensors, *received)
    rows.on_gradient = way.start_gradient
    y = experts(rows, of_rows, local_ids, max_rows)
    link = Send.apply(y, received_scores, way, *received)
    added = None if shared is None else shared()
    plans = *sent.tensors, *returning.tensors
    out, _ = Receive.apply(link, scores if ranks.by_slot else None, way, *plans)
    return out if added is None else out + added
