"""The experts of a batch whose first N of T tokens are a rank's own: bench_decode.py --local-tokens.

N is in a buffer on the GPU, and one CUDA graph of T tokens is replayed for every N: `route` reads the buffer
and gives padding no experts, so its rows are not computed. The host knows T alone. The router's top-k is in
the graph, since that is what reads N; the logits are not.

ratio_to_own is the time of a graph of N tokens, without padding, over ours: what the padding costs. Both
write the buffer before their calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import common
import torch
from bench_quantised import Variant
from decode_case import CHECKED_TOKENS, Case, ValuesByExpert, Weights, clock_of, exact_experts
from torch import Tensor


class Batch:
    """The calls of a case, each on T tokens of which some are own."""

    def __init__(self, case: Case, experts: Callable, layers: list[Weights]):
        self.case, self.experts, self.layers = case, experts, layers
        setup = case.setup
        self.logits = [common.routing_logits(setup.routing, case.sizes, setup.device) for _ in case.routings]
        self.own = torch.zeros((), dtype=torch.int32, device=setup.device)

    def call(self, number: int, tokens: int) -> Tensor:
        """The output of one call, for the first `tokens` of the batch."""
        import fused_moe

        routed = fused_moe.route(
            self.logits[number][:tokens], self.case.sizes.top_k, route_norm=True, num_tokens=self.own
        )
        return self.experts(self.case.x[:tokens], self.layers[number % len(self.layers)], *routed)

    def calls(self, tokens: int) -> None:
        with torch.no_grad():
            for number in range(len(self.logits)):
                self.call(number, tokens)

    def error(self, own: int) -> common.Error:
        """Own tokens have the output of a batch of their own, and padding has zeros."""
        self.own.fill_(own)
        with torch.no_grad():
            padded, alone = self.call(0, self.case.sizes.num_tokens), self.call(0, own)
        error = common.Error()
        error.add("own tokens", padded[:own], alone)
        error.add_equal("padding", padded[own:], torch.zeros_like(padded[own:]))
        return error

    def exact_error(self, own: int, values: Weights) -> common.Error:
        """Own tokens' output against float64, router included. values: what the first layer stands for."""
        from fused_moe import reference

        case, checked = self.case, min(own, CHECKED_TOKENS)
        self.own.fill_(own)
        with torch.no_grad():
            found = self.call(0, case.sizes.num_tokens)[:checked]
        logits = self.logits[0][:checked].double()
        scores, ids = reference.route(logits, case.sizes.top_k, route_norm=True)
        error = common.Error()
        activation = case.setup.activation
        error.add("out", found, exact_experts(case.x[:checked], values, scores, ids, activation=activation))
        return error


def measure(
    case: Case, experts: Callable, variant: Variant | None, options: argparse.Namespace
) -> Iterator[dict]:
    """What a record has of each number of own tokens. variant: None, the float weights."""
    T = case.sizes.num_tokens
    if max(options.local_tokens) > T:
        raise SystemExit(f"--local-tokens: expected at most T = {T}, found {max(options.local_tokens)}")
    name = "experts" if variant is None else variant.name
    layers = case.weights if variant is None else [w.quantised(variant) for w in case.weights]
    values, bound = (layers[0], None) if variant is None else (layers[0].map(ValuesByExpert), variant.bound)
    batch = Batch(case, experts, layers)
    eager = options.eager or options.device != "cuda"

    def replayed(tokens: int) -> Callable:
        run = partial(batch.calls, tokens)
        return run if eager else common.as_graph(run)

    batch.own.fill_(T)  # what the calls before a capture read
    every = replayed(T)
    runs = {}
    for own in options.local_tokens:
        title, dtype = f"{name}, {own} of {T} tokens", case.setup.dtype
        batch.error(own).check(title, dtype)
        batch.exact_error(own, values).check(title, dtype, bound)
        runs |= {("ours", own): after_writing(batch.own, own, every)}
        runs |= {("own", own): after_writing(batch.own, own, replayed(own))}
    seconds = common.times(clock_of(options), runs, options.repeats)
    for own in options.local_tokens:
        ours = seconds["ours", own]
        yield {
            "mode": common.DEFAULT_MODE if eager else "graph",
            "what": name,
            "layer": f"{own} own tokens",
            "local_tokens": own,
            "time_us": round(ours / len(case.routings) * 1e6, 1),
            "ratio_to_own": round(seconds["own", own] / ours, 3),
        }


def after_writing(buffer: Tensor, value: int, run: Callable) -> Callable[[], None]:
    def written() -> None:
        buffer.fill_(value)
        run()

    return written
