"""A model of a layer's training step on N GPUs: expert parallelism over P of them, FSDP2 over the other N/P.

Each GPU has T tokens, in bf16. Bytes are counted, rates are those of Links, and GEMM times are those that
bench_layer.py recorded on a single GPU, scaled by floors.py to other numbers of experts and rows. P = 1 is
FSDP2 alone, P = N expert parallelism alone. The rank with most rows sets the time, since all wait for it.

The model leaves out the SMs that an exchange takes, latencies that grow with the number of ranks, networks
that are shared or oversubscribed, and the random spread of a rank's rows.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import common
import floors
import torch
from common import Sizes
from torch import Tensor

ELEMENT = 2  # bytes of bf16
REDUCED = 4  # bytes of a gradient that FSDP2 reduces, as torchtitan sets it
STATE = 12  # bytes of a parameter's float32 shards: weight and AdamW's moments. Gradients replace activations
UNSHARDED = 6  # bytes of a parameter in bf16: the weights of two layers, gathered ahead, and a gradient
LOG_STEP = 0.3  # of the quadrature
CACHED = 25 * 2**20  # bf16 elements that the L2 cache of an H200 holds
FORWARD, BOTH = "forward", "forward_backward"

# How tokens go to their experts and come back
SLOT = "a row per expert"
RANK = "once per rank"
HOST = "once per host"  # over InfiniBand; then over NVLink to each rank, as DeepEP forwards


class Links(NamedTuple):
    """Rates in GB/s per GPU and direction, times in µs."""

    nvlink: float = 320  # fitted to exchanges on four H200s of one host, of 450 nominal
    infiniband: float = 45  # DeepEP's published figures without traffic of the own host, of 50 nominal
    copy: float = 4200  # read + write, the records of bench_kernels.py on an H200
    exchange_us: float = 35  # an all-to-all's time beside its bytes, fitted together with nvlink
    host_us: float = 65  # counts to the host, where sizes are exact: measured, 62 to 67
    launch_us: float = 900  # the host's, from there to the experts: measured, 760 to 1,240
    gpus_per_host: int = 8


LINKS = Links()


class Layer(NamedTuple):
    """E experts of all ranks and T tokens per rank, with the rest of a recorded shape."""

    shape: str
    num_experts: int
    num_tokens: int

    @property
    def sizes(self) -> Sizes:
        found = common.layer_sizes(self.shape)
        return found._replace(num_experts=self.num_experts, num_tokens=self.num_tokens)

    @property
    def parameters(self) -> int:
        return 3 * self.num_experts * self.sizes.dim * self.sizes.hidden_dim


class Reach(NamedTuple):
    """Expected over a token's K experts. Means, and those of the rank or host with the most."""

    ranks: float  # distinct ranks per token
    hosts: float
    rank_most: float  # P times the share of tokens that reach the fullest rank; `ranks` if all are equal
    host_most: float
    load: float  # rows of the fullest rank over the mean


class Step(NamedTuple):
    """µs of forward and backward on the slowest rank."""

    time: float
    compute: float
    copies: float  # packing rows that are sent, summing those that come back
    exchange: float  # four, hidden or not
    shards: float  # FSDP2's all-gathers and reduce-scatter, hidden or not


class Memory(NamedTuple):
    """Bytes per GPU of one layer."""

    state: int  # shards, as long as the model lives
    unsharded: int  # once for a model, not per layer
    kept: int  # from forward to backward
    working: int  # once for a model


# --- rows ---------------------------------------------------------------------------------------------


def popularity(routing: str, num_experts: int) -> Tensor:
    """Weights (E,) with which common.routing_logits draws K experts without replacement."""
    exponent = 0.0 if routing == "random" else float(routing.removeprefix("zipf:"))
    return torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent


def reached(weights: Tensor, group: Tensor, top_k: int) -> Tensor:
    """(G,) the chance that any of K distinct experts is in a group. group (E,): the group of each expert.

    Exact up to the quadrature. Experts come at the times of exponential clocks with these rates, and the
    first K are chosen. A group is missed if K others come before its first. The number of others that came by
    time t is a sum of independent trials, whose distribution is built expert by expert.
    """
    rate = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, weights)
    t = torch.exp(torch.arange(-14, 10, LOG_STEP, dtype=torch.float64)) / weights.sum() * top_k
    came = -torch.expm1(-t[:, None] * weights)  # (times, E)
    others = torch.zeros(len(t), len(rate), top_k, dtype=torch.float64)  # chance that 0 .. K-1 others came
    others[..., 0] = 1
    outside = group[None] != torch.arange(len(rate))[:, None]  # (G, E)
    for i in range(len(weights)):
        chance = (came[:, i, None] * outside[:, i])[..., None]
        later = others * chance
        others = others - later
        others[..., 1:] += later[..., :-1]
    density = rate * t[:, None] * torch.exp(-rate * t[:, None]) * LOG_STEP  # dt = t d log t
    return (density * others.sum(-1)).sum(0).clamp_max(1)


def reached_uniform(num_experts: int, groups: int, top_k: int) -> float:
    """The same for equal experts in groups of equal size, in closed form."""
    return 1 - math.comb(num_experts - num_experts // groups, top_k) / math.comb(num_experts, top_k)


@lru_cache
def chosen(routing: str, num_experts: int, top_k: int) -> Tensor:
    """(E,) the chance that an expert is one of a token's K."""
    return reached(popularity(routing, num_experts), torch.arange(num_experts), top_k)


@lru_cache
def reach(layer: Layer, ranks: int, hosts: int, routing: str = "random", spread: bool = False) -> Reach:
    """spread: expert i is on rank i mod P, so that the most popular ones are apart. Else each rank has E/P
    experts in a row, as ExpertParallel places them."""
    E, K = layer.num_experts, layer.sizes.top_k
    if routing == "random":
        of_rank, of_host = ranks * reached_uniform(E, ranks, K), hosts * reached_uniform(E, hosts, K)
        return Reach(of_rank, of_host, of_rank, of_host, 1.0)
    weights, expert = popularity(routing, E), torch.arange(E)
    rank = expert % ranks if spread else expert // (E // ranks)
    by_rank, by_host = (reached(weights, rank // (ranks // n), K) for n in (ranks, hosts))
    rows = torch.zeros(ranks, dtype=torch.float64).index_add_(0, rank, chosen(routing, E, K))
    most = [n * float(chance.max()) for n, chance in ((ranks, by_rank), (hosts, by_host))]
    return Reach(float(by_rank.sum()), float(by_host.sum()), *most, float(rows.max()) * ranks / K)


def fullest_rank(num_experts: int, ranks: int, top_k: int) -> float:
    """The expected number of one token's K experts on the rank that has most of them, by counting."""

    def ways(most: int) -> int:
        """Choices of K experts with at most `most` on a rank."""
        of_rank = [math.comb(num_experts // ranks, n) for n in range(most + 1)]
        total = [1]
        for _ in range(ranks):
            product = [0] * (len(total) + most)
            for i, a in enumerate(total):
                for j, b in enumerate(of_rank):
                    product[i + j] += a * b
            total = product[: top_k + 1]
        return total[top_k] if len(total) > top_k else 0

    every = math.comb(num_experts, top_k)
    return sum(1 - ways(most) / every for most in range(top_k))


# --- time and memory ----------------------------------------------------------------------------------


@lru_cache
def recorded(shape: str) -> dict[str, dict]:
    """The record of each pass on an H200, timed as in a step of many layers."""
    records = common.read(common.HERE / "results" / "layer_h200.json")
    found = [r for r in records if r["shape"] == shape and common.mode_of(r) == "queued"]
    if not found:
        raise SystemExit(f"--shape: expected a shape of results/layer_h200.json, found {shape}")
    return {r["what"]: r for r in found}


def floor_us(sizes: Sizes, rows: float, what: str, tflops: float, links: Links) -> float:
    """floors.layer_us of random routing: counts are spread as independent draws would be."""
    mean, E = rows / sizes.num_experts, sizes.num_experts
    deviations = [NormalDist().inv_cdf((i + 0.5) / E) for i in range(E)]
    counts = [max(0, round(mean + math.sqrt(mean) * d)) for d in deviations]
    rates = tflops * 1e6, links.copy * 1e3
    return floors.layer_us(sizes, common.USUAL, counts, CACHED, ELEMENT, *rates, backward=what == BOTH)


@lru_cache
def experts_us(layer: Layer, experts: int, rows: float, what: str, links: Links) -> float:
    """A layer with `experts` local experts and `rows` rows: the record's time, times the ratio of floors."""
    r, sizes = recorded(layer.shape)[what], common.layer_sizes(layer.shape)
    dense = r["tflops"] / r["dense_ratio"]
    own = floor_us(sizes, sizes.num_tokens * sizes.top_k, what, dense, links)
    local = layer.sizes._replace(num_experts=experts)
    return r["time_us"] * floor_us(local, rows, what, dense, links) / own


def arriving(layer: Layer, ranks: int, way: str, at: Reach, capacity: float | None = None) -> float:
    """Rows that reach a rank, its own among them, over T. Sizes are exact by default: those of the fullest
    rank. capacity: static buffers of so much of the mean; inf: of the default capacity."""
    E, K = layer.num_experts, layer.sizes.top_k
    if capacity is None:
        return K * at.load if way == SLOT else at.rank_most
    if math.isinf(capacity):
        return ranks * (min(K, E // ranks) if way == SLOT else 1)
    return capacity * (K if way == SLOT else at.ranks)


def exchange_us(
    layer: Layer, ranks: int, way: str, at: Reach, links: Links, capacity: float | None = None
) -> float:
    """One dispatch or combine: its bytes over the two kinds of links at once, from or to the fullest rank."""
    if ranks == 1:
        return 0.0
    local = min(ranks, links.gpus_per_host)
    hosts = ranks // local
    rows = arriving(layer, ranks, way, at, capacity)
    nvlink, infiniband = rows * (local - 1) / ranks, rows * (ranks - local) / ranks
    if way == HOST:
        nvlink, infiniband = rows * (local - 1) / local, at.host_most * (hosts - 1) / hosts
    row_us = layer.num_tokens * layer.sizes.dim * ELEMENT / 1e3
    return links.exchange_us + row_us * max(nvlink / links.nvlink, infiniband / links.infiniband)


def copies_us(layer: Layer, way: str, at: Reach, links: Links) -> float:
    """Rows are packed for dispatch and for dout, and summed after combine and for dx. torchtitan's exchange
    of a row per expert also sorts them where they arrive, and back. DeepEP's kernels do all of it."""
    T, _, K, D, _ = layer.sizes
    rows = {SLOT: 8 * 2 * K, RANK: 2 * 2 * at.ranks + 2 * (at.ranks + 1), HOST: 0}[way]
    return rows * T * D * ELEMENT / links.copy / 1e3


def shards_us(layer: Layer, gpus: int, ranks: int, size: int, links: Links) -> float:
    """An all-gather or a reduce-scatter of a rank's experts over the N/P ranks that have the same ones. size:
    bytes of an element. Each host takes every shard once, through all of its network cards."""
    copies = gpus // ranks
    if copies == 1:
        return 0.0
    moved = layer.parameters / ranks * size
    near = max(1, min(gpus, links.gpus_per_host) // ranks)  # ranks of a host with the same experts
    nvlink = moved * (near - 1) / near / links.nvlink
    infiniband = moved / near * (1 - near / copies) / links.infiniband
    return links.exchange_us + max(nvlink, infiniband) / 1e3


def step(
    layer: Layer,
    gpus: int,
    ranks: int,
    way: str = RANK,
    *,
    hidden: float = 0.0,
    routing: str = "random",
    spread: bool = False,
    waits: bool = True,
    rest: float = 0.0,
    links: Links = LINKS,
) -> Step:
    """hidden: the share of an exchange that runs under the experts, as far as they last. FSDP2's traffic is
    prefetched, so only what outlasts a pass counts. waits: for counts, once, as exact sizes need. Then the
    first exchange alone hides what the host launches before the experts. rest: µs of the model's other work
    per layer, a third of it in forward. It counts, and hides FSDP2's traffic, too."""
    T, _, K, *_ = layer.sizes
    at = reach(layer, ranks, max(1, ranks // links.gpus_per_host), routing, spread)
    rows = T * K * at.load
    forward = experts_us(layer, layer.num_experts // ranks, rows, FORWARD, links)
    both = experts_us(layer, layer.num_experts // ranks, rows, BOTH, links)
    dispatch = exchange_us(layer, ranks, way, at, links)
    exchange = 2 * dispatch  # of a pass
    copies = copies_us(layer, way, at, links) / 2 if ranks > 1 else 0.0
    gather, reduce = (shards_us(layer, gpus, ranks, size, links) for size in (ELEMENT, REDUCED))
    time = 0.0
    for compute, other, shards in (
        (forward, rest / 3, gather),
        (both - forward, 2 * rest / 3, gather + reduce),
    ):
        exposed = max((1 - hidden) * exchange, exchange - compute)
        time += max(compute + copies + exposed + other, shards)
    if waits and ranks > 1:
        time += links.host_us + max(0.0, links.launch_us - dispatch)
    return Step(time, both, 2 * copies, 2 * exchange, 2 * gather + reduce)


def memory(layer: Layer, gpus: int, ranks: int, way: str = RANK, *, capacity: float | None = None) -> Memory:
    """With random routing. capacity: as in `arriving`. h, a and y have the real rows with exact sizes, else
    one for each buffer row, or K with RANK. Only real rows are computed in all cases."""
    T, _, K, D, F = layer.sizes
    received = T * arriving(layer, ranks, way, reach(layer, ranks, 1), capacity) if ranks > 1 else 0
    rows = T * K if capacity is None else received * (K if way == RANK else 1)
    kept = (rows * 2 * F + received * D) * ELEMENT  # h, and x that arrived
    working = rows * (F + D) * ELEMENT  # a and y
    unsharded = 0 if gpus == 1 else UNSHARDED * layer.parameters // ranks
    return Memory(STATE * layer.parameters // gpus, unsharded, int(kept), int(working))
