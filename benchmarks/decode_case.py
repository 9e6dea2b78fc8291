"""A case of decoding: calls of the experts on few tokens, with the weights of several layers.

bench_decode.py times them, and local_tokens.py those of padded batches.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import common
import torch
from bench_quantised import Variant
from common import MIB, Error
from torch import Tensor

CALLS = 8  # at least, on a GPU; 2 on the CPU
REUSE = 1024 * MIB  # read before the same weight is read again
MEMORY = 48 * 1024 * MIB  # of all layers' weights; there are at least two layers
CHECKED_TOKENS = 16


class Setup(NamedTuple):
    """What a case is beside its sizes."""

    routing: str = "random"
    dtype: str = "bf16"
    device: str = "cpu"
    activation: str = "silu"
    gated: bool = True
    init: str = "normal"
    seed: int = 0
    stride: int | None = None  # of x

    @property
    def unusual(self) -> dict:
        """What a record says only where it is not the default."""
        usual = Setup()
        names = ("activation", "gated", "init", "seed", "stride")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}


class Weights(NamedTuple):
    """One layer's weights. w13 (E, 2F, D) is gate rows, then up rows, as vLLM reads them; w1 and w3 are
    views.

    Quantised, they are QuantizedWeights, without w13.
    """

    w1: Tensor  # (E, F, D)
    w2: Tensor  # (E, D, F)
    w3: Tensor | None
    w13: Tensor | None = None

    def map(self, fn: Callable) -> Weights:
        """fn of w1, w2 and w3."""
        return Weights(*(None if w is None else fn(w) for w in self[:3]))

    def quantised(self, variant: Variant) -> Weights:
        return Weights(*variant.layer(self[:3]))


class Case:
    """Some calls of the experts, the weights of several layers, and the dense GEMM of a call's FLOPs."""

    def __init__(self, sizes: common.Sizes, setup: Setup):
        torch.manual_seed(setup.seed)
        self.sizes, self.setup = sizes, setup
        T, E, _, D, hidden = sizes
        factory = {"dtype": common.DTYPES[setup.dtype], "device": setup.device}
        if (setup.stride or D) < D:
            raise SystemExit(f"--stride: expected at least D = {D}, found {setup.stride}")
        self.x = torch.randn(T, setup.stride or D, **factory)[:, :D]
        self.matrices = 3 if setup.gated else 2
        self.expert_bytes = self.matrices * D * hidden * self.x.element_size()
        first = self.route()
        touched = self.touched_bytes(first[1])
        calls = max(CALLS, math.ceil(REUSE / touched)) if setup.device == "cuda" else 2
        between = math.ceil(REUSE / touched) + 1
        layers = max(2, min(calls, between, MEMORY // (E * self.expert_bytes)))
        self.routings = [first, *(self.route() for _ in range(calls - 1))]

        def weight(rows: int, columns: int) -> Tensor:
            w = torch.empty(E, rows, columns, **factory)
            if setup.init == "zeros":
                return w.zero_()
            if setup.init == "uniform":
                return w.uniform_(-math.sqrt(3 / columns), math.sqrt(3 / columns))
            return w.normal_(std=1 / math.sqrt(columns))

        def layer() -> Weights:
            w13, w2 = weight((self.matrices - 1) * hidden, D), weight(D, hidden)
            return Weights(w13[:, :hidden], w2, w13[:, hidden:] if setup.gated else None, w13)

        self.weights = [layer() for _ in range(layers)]
        self.dense_gemms = common.dense_gemms(sizes, gated=setup.gated, **factory)

    def route(self) -> tuple[Tensor, Tensor]:
        import fused_moe

        logits = common.routing_logits(self.setup.routing, self.sizes, self.setup.device)
        return fused_moe.route(logits, self.sizes.top_k, route_norm=True)

    def touched_bytes(self, ids: Tensor) -> int:
        return ids.unique().numel() * self.expert_bytes

    @cached_property
    def bytes_of_a_call(self) -> float:
        return sum(self.touched_bytes(ids) for _, ids in self.routings) / len(self.routings)

    @property
    def flops_of_a_call(self) -> int:
        T, _, K, D, hidden = self.sizes
        return 2 * self.matrices * T * K * D * hidden

    def calls(self, layers: list[Weights] | None = None) -> Iterator[tuple[Weights, Tensor, Tensor]]:
        """The weights, scores and ids of each. The weights are of these layers, by default its own."""
        layers = layers or self.weights
        for i, (scores, ids) in enumerate(self.routings):
            yield layers[i % len(layers)], scores, ids

    def run(self, experts: Callable, layers: list[Weights] | None = None) -> None:
        """Every call once."""
        with torch.no_grad():
            for weights, scores, ids in self.calls(layers):
                experts(self.x, weights, scores, ids)

    def dense(self) -> None:
        for a, b in self.dense_gemms:
            a @ b

    @cached_property
    def exact(self) -> Tensor:
        """The first call's output for some tokens, in float64."""
        return self.exact_of(self.weights[0])

    def exact_of(self, w: Weights) -> Tensor:
        scores, ids = self.routings[0]
        x, scores, ids = (t[:CHECKED_TOKENS] for t in (self.x, scores, ids))
        return exact_experts(x, w, scores, ids, activation=self.setup.activation)

    def error(self, experts: Callable, quantised: Weights | None = None) -> Error:
        """Quantised weights stand for the values that they have."""
        with torch.no_grad():
            found = experts(self.x, quantised or self.weights[0], *self.routings[0])[:CHECKED_TOKENS]
        error = Error()
        exact = self.exact_of(quantised.map(ValuesByExpert)) if quantised else self.exact
        error.add("out", found, exact)
        return error


def exact_experts(x: Tensor, w: Weights, scores: Tensor, ids: Tensor, *, activation: str) -> Tensor:
    """The experts' output in float64, an expert after the other: memory may not take all weights."""
    from fused_moe import reference

    x, scores = x.double(), scores.double()
    out = torch.zeros_like(x)
    for e in ids.unique():
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate = x[token] @ w.w1[e].double().mT
        up = None if w.w3 is None else x[token] @ w.w3[e].double().mT
        a = reference.activate(gate, up, activation=activation)
        out.index_add_(0, token, scores[token, slot, None] * (a @ w.w2[e].double().mT))
    return out


class ValuesByExpert:
    """What a QuantizedWeight stands for; [e] makes the values of expert e, since memory may not take all."""

    def __init__(self, w):
        self.format, self.dtype, self.tensors = w.format, w.dtype, (w.data, w.scale, w.zero)
        self.smooth = w.smooth

    def __getitem__(self, e: Tensor) -> Tensor:
        from fused_moe.quantized.formats import dequantize

        data, scale, zero = (None if t is None else t[e].unsqueeze(0) for t in self.tensors)
        values = dequantize(self.format, data, scale, zero, self.dtype)[0]
        return values if self.smooth is None else values / self.smooth[e]


def clock_of(options: argparse.Namespace) -> common.CpuClock | common.CudaClock:
    clock = common.clock(options.device, lead=0 if options.eager else 500_000)
    clock.warm_up = clock.warm_up if options.warmup is None else options.warmup
    return clock
