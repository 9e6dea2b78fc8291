"""examples/dispatchers/: fused_experts behind other libraries' exchanges gives one process's layer.

Four ranks are threads of this process, which meet at a barrier. The libraries need GPUs, so each has a
stand-in here: its interface's names, order, dtypes and shapes, its asserts, and rows that really move. What
the libraries leave unwritten is NaN, or an id that would be computed.
"""

import importlib.util
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from cases import BF16, F32, assert_near, forward_backward

import fused_moe

FOLDER = Path(__file__).parents[1] / "examples" / "dispatchers"
if not FOLDER.exists():
    pytest.skip("needs examples/", allow_module_level=True)

RANKS, T, D, F, E, K = 4, 12, 16, 8, 8, 3
LOCAL = E // RANKS
NAN = float("nan")


def adapter(name: str):
    """The example as a module: none needs its library to be imported."""
    spec = importlib.util.spec_from_file_location(f"dispatcher_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_adapters_are_short(cpu):
    files = [*FOLDER.glob("*.py")]
    assert len(files) == 6
    for file in files:
        code = "".join(file.read_text().split('"""')[::2])  # without what is written about it
        lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert len(lines) <= 40, f"{file.name} has {len(lines)} lines"


# --- ranks ----------------------------------------------------------------------------------------------


class World:
    """Threads that play the ranks of a group."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=20)
        self.slots = [None] * RANKS
        self.own = threading.local()

    @property
    def rank(self) -> int:
        return self.own.rank

    def exchange(self, value) -> list:
        """The values of all ranks."""
        self.slots[self.rank] = value
        self.barrier.wait()
        values = [*self.slots]
        self.barrier.wait()
        return values

    def run(self, fn, *per_rank) -> list:
        """fn(values of the rank...) on every rank. One rank's error ends the others' wait."""

        def run_rank(rank: int):
            self.own.rank = rank
            try:
                return fn(*(values[rank] for values in per_rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(RANKS) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(RANKS)]
        errors = [e for e in (f.exception() for f in futures) if e is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]


def check(t: torch.Tensor, dtype: torch.dtype, *shape) -> None:
    """As the libraries assert; None: any size."""
    assert t.dtype == dtype, f"expected {dtype}, found {t.dtype}"
    assert t.is_contiguous(), "expected a contiguous tensor"
    assert t.dim() == len(shape) and all(s in (None, n) for s, n in zip(shape, t.shape, strict=True)), t.shape


def padded(rows: torch.Tensor, size: int, value=NAN) -> torch.Tensor:
    assert rows.size(0) <= size, "expected a larger capacity"
    return torch.cat([rows, rows.new_full((size - rows.size(0), *rows.shape[1:]), value)])


def shuffled(n: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))


# --- DeepEP: a token once per rank ------------------------------------------------------------------------


class OncePerRank:
    """What both of DeepEP's buffers do. Received rows are in an order of their own."""

    def __init__(self, world: World, dtype: torch.dtype):
        self.world, self.dtype = world, dtype

    def _send(self, x, ids, scores, num_rows: int):
        """recv_x, recv_ids, recv_scores, and (rank, token) of each row."""
        everyone = self.world.exchange((x, ids, scores))
        first = self.world.rank * LOCAL
        parts = []
        for rank, (x, ids, scores) in enumerate(everyone):
            is_local = (ids >= first) & (ids < first + LOCAL)
            token = is_local.any(1).nonzero().flatten()
            ids = torch.where(is_local, ids - first, -1)
            scores = torch.where(is_local, scores, 0)
            parts.append((x[token], ids[token], scores[token], torch.full_like(token, rank), token))
        x, ids, scores, rank, token = map(torch.cat, zip(*parts, strict=True))
        order = shuffled(len(token))
        size = num_rows or len(token)
        rows = (padded(x[order], size), padded(ids[order], size, -1), padded(scores[order], size))
        return *rows, torch.stack([rank[order], token[order]])

    def _send_again(self, x, source, size: int):
        everyone = self.world.exchange(x)
        rows = [everyone[rank][token] for rank, token in source.T.tolist()]
        return padded(torch.stack(rows) if rows else x[:0], size)

    def _reduce(self, x, scores, source, num_tokens: int):
        """Sums in float32 or wider, of what the ranks send of each of this rank's tokens."""
        wide = torch.promote_types(x.dtype, F32)
        out = [x.new_zeros(num_tokens, x.size(1), dtype=wide), x.new_zeros(num_tokens, K, dtype=F32)]
        for sent, sent_scores, (rank, token) in self.world.exchange((x, scores, source)):
            rows = (rank == self.world.rank).nonzero().flatten()
            out[0].index_add_(0, token[rows], sent[rows].to(wide))
            if scores is not None:
                out[1].index_add_(0, token[rows], sent_scores[rows])
        return out[0].to(x.dtype), None if scores is None else out[1]


class Buffer(OncePerRank):
    """deep_ep.Buffer, the normal kernels."""

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        check(topk_idx, torch.int64, None, None)
        assert num_experts == E
        count = topk_idx.flatten()[topk_idx.flatten() >= 0].bincount(minlength=E).int()
        in_rank = torch.stack([(topk_idx // LOCAL == r).any(1) for r in range(RANKS)], 1)
        return in_rank.sum(0).int(), None, count, in_rank, SimpleNamespace()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        check(x, self.dtype, None, D)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            source, size, _ = handle
            return self._send_again(x, source, size), None, None, None, None, SimpleNamespace()
        check(num_tokens_per_rank, torch.int32, RANKS)
        check(num_tokens_per_expert, torch.int32, E)
        check(is_token_in_rank, torch.bool, x.size(0), RANKS)
        check(topk_idx, torch.int64, x.size(0), K)
        check(topk_weights, F32, x.size(0), K)
        recv_x, recv_ids, recv_scores, source = self._send(x, topk_idx, topk_weights, num_worst_tokens)
        counts = [] if num_worst_tokens else [(recv_ids == e).sum().item() for e in range(LOCAL)]
        handle = (source, recv_x.size(0), x.size(0))
        return recv_x, recv_ids, recv_scores, counts, handle, SimpleNamespace()

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        source, size, num_tokens = handle
        check(x, self.dtype, size, D)
        if topk_weights is not None:
            check(topk_weights, F32, size, K)
        return *self._reduce(x, topk_weights, source, num_tokens), SimpleNamespace()


class ElasticBuffer(OncePerRank):
    """deep_ep.ElasticBuffer without do_expand."""

    def __init__(self, world, dtype, num_max_tokens_per_rank):
        super().__init__(world, dtype)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
        handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        check(x, self.dtype, None, D)
        assert x.size(0) <= self.num_max_tokens_per_rank and not do_expand
        if handle is not None:
            assert topk_idx is None and topk_weights is None and not do_cpu_sync
            rows = self._send_again(x, handle.source, handle.size)
            return rows, torch.zeros(handle.size, K, dtype=torch.int64), None, handle, SimpleNamespace()
        assert num_experts == E
        check(topk_idx, torch.int64, x.size(0), K)
        check(topk_weights, F32, x.size(0), K)
        waits = True if do_cpu_sync is None else do_cpu_sync
        size = 0 if waits else RANKS * self.num_max_tokens_per_rank
        recv_x, recv_ids, recv_scores, source = self._send(x, topk_idx, topk_weights, size)
        recv_ids[source.size(1) :] = 0  # unwritten: it could be any expert
        ends = source[0].bincount(minlength=RANKS).cumsum(0).int()
        handle = SimpleNamespace(
            psum_num_recv_tokens_per_scaleup_rank=ends, topk_idx=topk_idx, source=source, size=recv_x.size(0)
        )
        return recv_x, recv_ids, recv_scores, handle, SimpleNamespace()

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        check(x, self.dtype, handle.size, D)
        if topk_weights is not None:
            check(topk_weights, F32, handle.size, K)
        num_tokens = handle.topk_idx.size(0)
        return *self._reduce(x, topk_weights, handle.source, num_tokens), SimpleNamespace()


# --- rows per expert --------------------------------------------------------------------------------------


def rows_of_experts(world: World, rows, ids):
    """For each local expert the rows of all ranks' slots, and the (rank, slot) of each."""
    everyone = world.exchange((rows, ids))
    for e in range(world.rank * LOCAL, (world.rank + 1) * LOCAL):
        slots = [(ids.flatten() == e).nonzero().flatten() for _, ids in everyone]
        found = torch.cat([rows[slot] for (rows, _), slot in zip(everyone, slots, strict=True)])
        yield found, [(rank, s) for rank, slot in enumerate(slots) for s in slot.tolist()]


class LowLatencyBuffer:
    """deep_ep.Buffer, the low-latency kernels."""

    def __init__(self, world: World, dtype: torch.dtype):
        self.world, self.dtype = world, dtype

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
        cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True,
        round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=False,
    ):  # fmt: skip
        check(x, self.dtype, None, None)
        assert x.size(1) % 128 == 0 and x.size(0) <= num_max_dispatch_tokens_per_rank and not use_fp8
        check(topk_idx, torch.int64, x.size(0), K)
        slot_rows = x.repeat_interleave(K, 0)
        rows, sources = zip(*rows_of_experts(self.world, slot_rows, topk_idx), strict=True)
        size = RANKS * num_max_dispatch_tokens_per_rank
        counts = torch.tensor([len(s) for s in sources], dtype=torch.int32)
        handle = (sources, size, num_experts)
        return torch.stack([padded(r, size) for r in rows]), counts, handle, SimpleNamespace(), lambda: None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False,
        return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None,
    ):  # fmt: skip
        sources, size, num_experts = handle
        check(x, self.dtype, num_experts // RANKS, size, None)
        check(topk_idx, torch.int64, None, K)
        check(topk_weights, F32, topk_idx.size(0), K)
        out = x.new_zeros(topk_idx.size(0), x.size(2), dtype=torch.promote_types(x.dtype, F32))
        for sent in self.world.exchange(list(zip(x, sources, strict=True))):
            for rows, source in sent:
                for row, (rank, slot) in zip(rows, source, strict=False):
                    if rank == self.world.rank:
                        out[slot // K] += topk_weights.flatten()[slot] * row
        return out.to(x.dtype), SimpleNamespace(), lambda: None


class HybridEPBuffer:
    """deep_ep.HybridEPBuffer, with the permutation."""

    def __init__(self, world: World, dtype: torch.dtype):
        self.world, self.dtype = world, dtype

    def dispatch_with_permute(
        self, *, hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, num_of_experts=None,
        use_fp8=None, routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None,
        pad_multiple=None, handle=None, non_blocking=False, fuse_permute_dispatch=False,
        num_dispatched_tokens=None, use_host_meta=None,
    ):  # fmt: skip
        num_tokens = hidden.size(0)
        check(hidden, self.dtype, num_tokens, D)
        assert {num_tokens} == set(self.world.exchange(num_tokens)), "expected as many tokens on all ranks"
        assert num_permuted_tokens is not None or (handle is None and not non_blocking)
        if handle is None:
            check(routing_map, torch.bool, num_tokens, E)
            check(probs, F32, num_tokens, E)
            assert num_of_experts_per_rank == LOCAL
        else:
            routing_map = handle[4]
        ids = torch.where(routing_map, torch.arange(E), -1)
        rows, sources = zip(*rows_of_experts(self.world, hidden.repeat_interleave(E, 0), ids), strict=True)
        counts, rows = torch.tensor([len(s) for s in sources]), torch.cat(rows)
        source = torch.tensor(sum(sources, []), dtype=torch.int64).view(-1, 2).T
        size = len(rows) if num_permuted_tokens is None else num_permuted_tokens
        rows, source = padded(rows[:size], size), source[:, :size]
        row_scores = None
        everyone = self.world.exchange(probs)
        if probs is not None:
            row_scores = [everyone[rank].flatten()[slot] for rank, slot in source.T.tolist()]
            row_scores = padded(torch.tensor(row_scores, dtype=F32), size)
        handle = (None, None, None, source, routing_map, None, None, counts.int(), num_tokens, None, None)
        return rows, row_scores, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden, probs=None, handle=None, pad_multiple=None, fuse_unpermute_combine=False,
        num_dispatched_tokens=None,
    ):  # fmt: skip
        check(hidden, self.dtype, None, D)
        source, num_tokens = handle[3], handle[8]
        out = hidden.new_zeros(num_tokens, D, dtype=torch.promote_types(hidden.dtype, F32))
        combined = torch.zeros(num_tokens * E, dtype=F32)
        if probs is not None:
            check(probs, F32, hidden.size(0))
        for rows, scores, (rank, slot) in self.world.exchange((hidden, probs, source)):
            mine = (rank == self.world.rank).nonzero().flatten()
            out.index_add_(0, slot[mine] // E, rows[mine].to(out.dtype))
            if scores is not None:
                combined.index_add_(0, slot[mine], scores[mine])
        return out.to(hidden.dtype), None if probs is None else combined.view(num_tokens, E)


class SymmetricMemory:
    """torch.ops.symm_mem on CPU tensors: PyTorch's own schemas, NVSHMEM's asserts and layouts."""

    def __init__(self, world: World, monkeypatch):
        self.world, self.met = world, set()
        monkeypatch.setattr(symm_mem, "empty", self.empty)
        monkeypatch.setattr(symm_mem, "rendezvous", self.rendezvous)

    def empty(self, *size, dtype=None, device=None):
        return torch.full(size, NAN if dtype.is_floating_point else -9, dtype=dtype, device=device)

    def rendezvous(self, tensor, group):
        everyone = self.world.exchange((group, tensor.shape))
        assert all(other == everyone[0] for other in everyone), f"expected one size, found {everyone}"
        self.met.add(tensor.data_ptr())

    @contextmanager
    def operators(self):
        library = torch.library.Library("symm_mem", "IMPL")
        try:
            for fn in (self.all_to_all_vdev_2d, self.all_to_all_vdev_2d_offset):
                library.impl(fn.__name__, fn, "CPU")
            yield
        finally:
            library._destroy()

    def _move(self, source, out, in_splits, made, group_name, splits, blocks, align: int) -> None:
        """blocks: per block of the output, (rank, index into its splits, index into ours) of each part."""
        for tensor in (source, out, in_splits, made):
            assert tensor.data_ptr() in self.met and tensor.is_contiguous(), "expected symmetric memory"
        assert group_name == "experts" and source.dtype == out.dtype and source.stride(0) == out.stride(0)
        check(made, torch.int64, 2, E)
        everyone = self.world.exchange((source.clone(), splits.clone()))
        row = 0
        for block in blocks:
            begin = row
            for rank, theirs, ours in block:
                rows, splits = everyone[rank]
                count, first = splits[:, theirs].tolist()
                out[row : row + count] = rows[first : first + count]
                made[:, ours] = torch.tensor([count, row])
                row += count
            if align:  # an empty block takes one unit, too
                row = begin + max(-(-(row - begin) // align) * align, align)

    def all_to_all_vdev_2d(self, input, out, in_splits, out_splits_offsets, group_name, major_align=None):
        check(in_splits, torch.int64, E)
        assert in_splits.sum() <= input.size(0)
        splits = torch.stack([in_splits, in_splits.cumsum(0) - in_splits])
        mine = self.world.rank * LOCAL
        blocks = [[(r, mine + e, e * RANKS + r) for r in range(RANKS)] for e in range(LOCAL)]
        align = 1 if major_align is None else major_align
        self._move(input, out, in_splits, out_splits_offsets, group_name, splits, blocks, align)

    def all_to_all_vdev_2d_offset(self, input, out, in_splits_offsets, out_splits_offsets, group_name):
        check(in_splits_offsets, torch.int64, 2, E)
        mine = self.world.rank
        blocks = [[(r, e * RANKS + mine, r * LOCAL + e) for e in range(LOCAL)] for r in range(RANKS)]
        splits = in_splits_offsets
        self._move(input, out, in_splits_offsets, out_splits_offsets, group_name, splits, blocks, 0)


class TitanDispatcher:
    """torchtitan's dispatchers: differentiable. Rows past the counts are garbage."""

    num_experts = E

    def __init__(self, world: World):
        self.world = world

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        num_slots = topk_expert_ids_TK.numel()
        assert num_local_tokens_per_expert_E.sum() == num_slots and num_slots == topk_scores_TK.numel()
        rows = x_TD.repeat_interleave(K, 0)
        moved = MoveRows.apply(rows, topk_expert_ids_TK, self.world)
        return *moved[:2], SimpleNamespace(source=moved[2], scores=topk_scores_TK)

    def combine(self, routed_output_RD, metadata, x_TD):
        y = MoveBack.apply(routed_output_RD, metadata.source, metadata.scores.numel(), self.world)
        return (y.view(*metadata.scores.shape, D) * metadata.scores.unsqueeze(2)).sum(1)


class MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ids, world):
        found, sources = zip(*rows_of_experts(world, rows, ids), strict=True)
        source = torch.tensor(sum(sources, []), dtype=torch.int64).view(-1, 2).T
        ctx.call = (source, rows.size(0), world)
        counts = torch.tensor([len(s) for s in sources])
        ctx.mark_non_differentiable(counts, source)
        return padded(torch.cat(found), source.size(1) + 5), counts, source

    @staticmethod
    def backward(ctx, drows, *_):
        return MoveBack.forward(SimpleNamespace(), drows, *ctx.call), None, None


class MoveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, source, num_slots, world):
        ctx.source, ctx.size, ctx.world = source, rows.size(0), world
        out = rows.new_full((num_slots, rows.size(1)), NAN)
        for sent, (rank, slot) in world.exchange((rows, source)):
            mine = (rank == world.rank).nonzero().flatten()
            out[slot[mine]] = sent[mine]
        return out

    @staticmethod
    def backward(ctx, dout):
        everyone = ctx.world.exchange(dout)
        rows = [everyone[rank][slot] for rank, slot in ctx.source.T.tolist()]
        return padded(torch.stack(rows) if rows else dout[:0], ctx.size), None, None, None


# --- the layer --------------------------------------------------------------------------------------------

ROUTINGS = ("random", "dropped slots", "one rank", "none")
UNEVEN = (T, 0, 5, 7)  # tokens of each rank


def distinct_ids(routing: str, tokens: int) -> torch.Tensor:
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).int()
    if routing == "dropped slots":
        ids[torch.rand(tokens, K) < 0.4] = -1
        ids[3] = -1
    elif routing == "one rank":  # which has fewer than K experts
        ids[:] = torch.tensor([LOCAL, -1, LOCAL + 1])
    elif routing == "none":
        ids[:] = -1
    return ids


class Layer:
    """A layer's inputs, and what it gives in one process in float64."""

    def __init__(self, tokens, ids, dtype=F32, dim=D, depth=1):
        total = sum(tokens)
        self.tokens, self.ids, self.depth = tokens, ids, depth
        sizes = {"x": (total, dim), "w1": (E, F, dim), "w2": (E, dim, F), "w3": (E, F, dim)}
        self.inputs = {name: torch.randn(size).to(dtype) / 2 for name, size in sizes.items()}
        self.inputs["scores"] = torch.rand(total, K)
        self.dout = torch.randn(total, dim).to(dtype)
        exact = {name: t.double() for name, t in self.inputs.items()}
        self.exact = forward_backward(
            self.repeated(fused_moe.reference.fused_experts), exact, self.dout.double(), ids=ids
        )

    def repeated(self, experts):
        """As layers behind each other, with the same weights and other routings."""

        def layers(x, w1, w2, w3, scores, ids, **options):
            for _ in range(self.depth):
                x = experts(x, w1, w2, w3, scores, ids, **options)
                ids = torch.where(ids < 0, ids, E - 1 - ids)
            return x

        return layers

    def per_rank(self, name: str):
        value = {"ids": self.ids, "dout": self.dout, **self.inputs}[name]
        return value.chunk(RANKS) if name in ("w1", "w2", "w3") else value.split(self.tokens)

    def on_ranks(self, world: World, experts, options=lambda: {}) -> dict:
        """Forward and backward on all ranks; `options()` is called on each."""
        names = (*self.inputs, "ids", "dout")

        def run(*values):
            inputs = dict(zip(names, values, strict=True))
            ids, dout = inputs.pop("ids"), inputs.pop("dout")
            return forward_backward(self.repeated(experts), inputs, dout, ids=ids, **options())

        found = world.run(run, *map(self.per_rank, names))
        return {name: torch.cat([rank[name] for rank in found]) for name in found[0]}

    def check(self, found: dict) -> None:
        dtype = self.inputs["x"].dtype
        for name, value in found.items():
            assert value.dtype == (F32 if name == "dscores" else dtype)
            if dtype == F32:
                assert_near(value, self.exact[name], slack=64)
            else:
                error, norm = (value.double() - self.exact[name]).norm(), self.exact[name].norm()
                assert error <= 0.02 * norm, f"{name}: error {error:.3e}, norm {norm:.3e}"


each_routing = pytest.mark.parametrize("routing", ROUTINGS)


@each_routing
@pytest.mark.parametrize("worst", (0, RANKS * T), ids=("exact", "num_worst_tokens"))
def test_deepep(cpu, routing, worst):
    world, layer = World(), Layer(UNEVEN, distinct_ids(routing, sum(UNEVEN)))
    options = {"buffer": Buffer(world, F32), "num_experts": E, "num_worst_tokens": worst}
    if worst:
        options["max_rows"] = sum(UNEVEN) * K  # memory for all ranks' slots, and not for all received rows'
    layer.check(layer.on_ranks(world, adapter("deepep").experts, lambda: options))


@each_routing
@pytest.mark.parametrize("waits", (True, False), ids=("exact", "no host"))
def test_deepep_elastic(cpu, routing, waits):
    world, layer = World(), Layer(UNEVEN, distinct_ids(routing, sum(UNEVEN)))
    options = {"buffer": ElasticBuffer(world, F32, T), "num_experts": E, "waits": waits}
    layer.check(layer.on_ranks(world, adapter("deepep_elastic").experts, lambda: options))


@pytest.mark.parametrize("name", ("deepep", "deepep_elastic", "hybrid_ep"))
def test_in_bfloat16_as_the_libraries_want_it(cpu, name):
    world, layer = World(), Layer((T,) * RANKS, distinct_ids("random", RANKS * T), BF16)
    buffers = {"deepep": Buffer, "hybrid_ep": HybridEPBuffer}
    make = buffers.get(name, lambda world, dtype: ElasticBuffer(world, dtype, T))
    options = {"buffer": make(world, BF16), "num_experts": E}
    layer.check(layer.on_ranks(world, adapter(name).experts, lambda: options))


@each_routing
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_deepep_low_latency(cpu, routing, dtype):
    world, layer = World(), Layer(UNEVEN, distinct_ids(routing, sum(UNEVEN)), dtype, dim=128)
    experts = adapter("deepep_low_latency").experts
    buffer = LowLatencyBuffer(world, dtype)

    def decode(x, w1, w2, w3, scores, ids):
        with torch.no_grad():
            return experts(x, w1, w2, w3, scores, ids, buffer, E, num_max_tokens=T)

    names = ("x", "w1", "w2", "w3", "scores", "ids")
    out = torch.cat(world.run(decode, *map(layer.per_rank, names)))
    layer.check({"out": out})
    with pytest.raises(RuntimeError, match="no backward"):
        experts(*(layer.per_rank(name)[0] for name in names), buffer, E, num_max_tokens=T)


@each_routing
@pytest.mark.parametrize("num_rows", (None, RANKS * T * LOCAL), ids=("exact", "capacity"))
def test_hybrid_ep(cpu, routing, num_rows):
    world, layer = World(), Layer((T,) * RANKS, distinct_ids(routing, RANKS * T))
    options = {"buffer": HybridEPBuffer(world, F32), "num_experts": E, "num_rows": num_rows}
    layer.check(layer.on_ranks(world, adapter("hybrid_ep").experts, lambda: options))


def test_hybrid_ep_drops_rows_past_the_capacity(cpu):
    ids, num_rows = distinct_ids("random", RANKS * T), RANKS * T // 2
    kept = torch.full_like(ids, -1)
    for experts in torch.arange(E).chunk(RANKS):
        slots = torch.cat([(ids.flatten() == e).nonzero().flatten() for e in experts])[:num_rows]
        kept.flatten()[slots] = ids.flatten()[slots]
    assert (kept != ids).any()
    world, layer = World(), Layer((T,) * RANKS, kept)
    layer.ids = ids
    options = {"buffer": HybridEPBuffer(world, F32), "num_experts": E, "num_rows": num_rows}
    layer.check(layer.on_ranks(world, adapter("hybrid_ep").experts, lambda: options))


@each_routing
@pytest.mark.parametrize("depth", (1, 2))
def test_vdev_2d(cpu, monkeypatch, routing, depth):
    """Buffers are used again before backward, in the second layer."""
    world, layer = World(), Layer(UNEVEN, distinct_ids(routing, sum(UNEVEN)), depth=depth)
    memory = SymmetricMemory(world, monkeypatch)
    module = adapter("vdev_2d")

    def options():
        sizes = (E, T * K, sum(UNEVEN) * LOCAL + LOCAL, D)
        return {"exchange": module.Exchange("experts", *sizes, F32, "cpu"), "num_experts": E}

    with memory.operators():
        layer.check(layer.on_ranks(world, module.experts, options))


@pytest.mark.parametrize("tokens", (UNEVEN, (0, 0, T, 0)), ids=("uneven", "one rank"))
def test_titan(cpu, tokens):
    world, layer = World(), Layer(tokens, distinct_ids("random", sum(tokens)))
    options = {"dispatcher": TitanDispatcher(world)}
    layer.check(layer.on_ranks(world, adapter("titan").experts, lambda: options))


def test_titan_itself(cpu):
    """torchtitan's own dispatcher of one rank, and the arguments of all of them."""
    module = pytest.importorskip("torchtitan.models.common.token_dispatcher")
    dispatcher = module.LocalTokenDispatcher(module.LocalTokenDispatcher.Config(num_experts=E, top_k=K))
    for name in ("dispatch", "combine"):
        ours, theirs = (inspect.signature(getattr(d, name)) for d in (TitanDispatcher(None), dispatcher))
        assert [*ours.parameters] == [*theirs.parameters]
    layer = Layer((T,), distinct_ids("random", T))
    layer.check(
        forward_backward(
            adapter("titan").experts, layer.inputs, layer.dout, ids=layer.ids, dispatcher=dispatcher
        )
    )


def test_stand_ins_are_strict(cpu):
    """A wrong dtype raises on every rank, and no rank waits for another."""
    world, layer = World(), Layer(UNEVEN, distinct_ids("random", sum(UNEVEN)))
    with pytest.raises(AssertionError, match="expected torch.int64, found torch.int32"):
        Buffer(world, F32).get_dispatch_layout(layer.ids, E)
    options = {"buffer": Buffer(world, BF16), "num_experts": E}
    with pytest.raises(AssertionError, match="expected torch.bfloat16, found torch.float32"):
        layer.on_ranks(world, adapter("deepep").experts, lambda: options)
