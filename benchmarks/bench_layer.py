"""Times a whole layer, router to combine, against dense GEMMs of equal FLOPs, PyTorch's path and peers.

    python benchmarks/bench_layer.py --shape cpu-32-experts --dtype fp32 --json out.json
    python benchmarks/bench_layer.py --shape olmoe --tier hopper --peers scattermoe,sonicmoe

All layers have the same parameters and get the same tokens. Before anything is timed one full step is
checked in float64, on a sample of tokens and experts: all of them would take minutes on the larger shapes.
On a GPU several steps are queued behind a long kernel, so neither side's host time counts; --mode eager
times single calls, and both modes may be given. FLOPs: 6TKDF forward, 18TKDF with backward, two thirds of it
without a gate. On Hopper floor_us is the floor of floors.py, by whole tiles and bytes, and floor_ratio is
floor_us over our time.

--profile adds separate records: the kernels of a step by kind, with floors, and the board's power.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product

import common
import floors
import profiling
import torch
import torch.nn.functional as F
from common import MIB, Error
from torch import Tensor, nn

CHECKED_TOKENS = 256


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    add, modes = flags.add_argument, "may be repeated; default: queued; on the CPU eager"
    add("--peers", metavar="A,B,..", help="of peers.py; default: loop on the CPU")
    add("--mode", choices=common.MODES, action="append", help=modes)
    add("--activation", metavar="NAME", help="default: the shape's")
    add("--profile", action="store_true", help="GPU time by kernel, of ours and of peers")
    return flags.parse_args(argv)


class Case:
    """Our layer of one shape and dtype, its input, and the dense GEMMs that it is compared with."""

    def __init__(
        self,
        sizes: common.Sizes,
        routing: str,
        dtype: str,
        device: str,
        settings: common.Settings = common.USUAL,
    ):
        import fused_moe

        torch.manual_seed(0)
        self.sizes, self.settings, self.device = sizes, settings, device
        T, E, K, D, hidden = sizes
        factory = {"device": device, "dtype": common.DTYPES[dtype]}
        # renormalised scores: the only rule that all peers support
        self.ours = fused_moe.FusedMoE(D, hidden, E, K, route_norm=True, **settings._asdict(), **factory)
        x, gate = common.tokens_and_gate(common.routing_logits(routing, sizes, device), D)
        with torch.no_grad():
            self.ours.router.gate.weight.copy_(gate)
        self.x = x.to(factory["dtype"]).requires_grad_()
        self.dout = torch.randn(T, D, **factory)
        self.dense_gemms = common.dense_gemms(sizes, gated=settings.gated, **factory)

    def flops(self, what: str) -> int:
        T, _, K, D, hidden = self.sizes
        return (2 if what == "forward" else 6) * self.settings.matrices * T * K * D * hidden

    def intensity(self, what: str) -> float:
        """FLOPs per byte that any layer must read and write: tokens, weights, and their gradients."""
        T, E, _, D, hidden = self.sizes
        elements = 2 * T * D + self.settings.matrices * E * D * hidden
        return self.flops(what) / (self.x.element_size() * elements * (1 if what == "forward" else 2))

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        _, ids, _ = self.ours.router(self.x.detach(), None)
        return ids.flatten().long().bincount(minlength=self.sizes.num_experts).tolist()

    def floor_us(self, what: str, dense_seconds: float, seconds_per_byte: float) -> float:
        rates = self.flops(what) / dense_seconds / 1e6, 1e-6 / seconds_per_byte
        layer = (
            self.sizes,
            self.settings,
            self.counts,
            floors.cached_elements(self.x),
            self.x.element_size(),
        )
        return floors.layer_us(*layer, *rates, backward=what != "forward")

    @property
    def settings_that_are_unusual(self) -> dict:
        """What a record says only where it is not the default."""
        usual = common.USUAL._asdict()
        return {name: value for name, value in self.settings._asdict().items() if value != usual[name]}

    def step(self, layer: nn.Module, what: str) -> None:
        if what == "forward":
            with torch.no_grad():
                layer(self.x)
            return
        self.clear_grads(layer)
        layer(self.x).backward(self.dout)

    def dense(self, what: str) -> None:
        for a, b in self.dense_gemms:
            out = a @ b
            if what != "forward":
                out @ b.t()
                a.t() @ out

    def clear_grads(self, layer: nn.Module) -> None:
        self.x.grad = None
        layer.zero_grad(set_to_none=True)

    def memory(self, layer: nn.Module) -> tuple[float | None, float | None]:
        """MiB beyond inputs and weights: those saved for backward, and the peak of a step."""
        if self.device != "cuda":
            return None, None
        self.clear_grads(layer)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = layer(self.x)
        saved = torch.cuda.memory_allocated() - before - out.nbytes  # out is the next layer's input
        out.backward(self.dout)
        peak = torch.cuda.max_memory_allocated() - before
        return round(saved / MIB, 1), round(peak / MIB, 1)

    def exact_rows(self, expert: int, tokens: Tensor, scores: Tensor) -> list[Tensor]:
        """One expert on some tokens in float64: its contribution to out, dx, dscores, dw1, dw2 and, with a
        gate, dw3."""
        from fused_moe.reference import activate

        x, s, dout = (t.detach().double() for t in (self.x[tokens], scores, self.dout[tokens]))
        weights = [w.detach()[expert].double() for w in self.ours.experts.weights if w is not None]
        inputs = [t.requires_grad_() for t in (x, s, *weights)]
        w1, w2, *w3 = weights
        up = F.linear(x, w3[0]) if w3 else None
        a = activate(F.linear(x, w1), up, activation=self.settings.activation)
        out = s[:, None] * F.linear(a, w2)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def error(self) -> Error:
        """The error of one full step, on some tokens and experts, among them the first, last and largest."""
        (T, E, K, D, _), ours, error = self.sizes, self.ours, Error()
        self.clear_grads(ours)
        scores, ids, logits = ours.router(self.x, None)
        scores.retain_grad()
        out, counts = ours.experts(self.x, scores, ids)
        out.backward(self.dout)
        dscores = scores.grad.double()
        self.clear_grads(ours)  # the rest is of what is timed, where router and experts may be one node
        out = ours(self.x)
        out.backward(self.dout)

        tokens = torch.linspace(0, T - 1, min(T, CHECKED_TOKENS), device=self.device).long()
        exact_out, exact_dx = (out.new_zeros(tokens.numel(), D, dtype=torch.float64) for _ in range(2))
        exact_dscores = dscores.new_zeros(tokens.numel(), K)
        for expert in range(E):
            index, slot = (ids[tokens] == expert).nonzero(as_tuple=True)
            some_out, dx, ds, *_ = self.exact_rows(expert, tokens[index], scores[tokens[index], slot])
            exact_out.index_add_(0, index, some_out)
            exact_dx.index_add_(0, index, dx)
            exact_dscores[index, slot] = ds
        with torch.no_grad():  # which calls another operator
            out_alone = ours(self.x)
        error.add("out", out[tokens], exact_out)
        error.add("out without gradients", out_alone[tokens], exact_out)
        error.add("dscores", dscores[tokens], exact_dscores)

        exact_logits = logits.detach().double().requires_grad_()
        exact_scores = exact_logits.softmax(-1).gather(-1, ids.long())
        exact_scores = exact_scores / exact_scores.sum(-1, keepdim=True)
        dscores[tokens] = exact_dscores
        (dlogits,) = torch.autograd.grad(exact_scores, exact_logits, dscores)
        gate, x = ours.router.gate.weight, self.x.detach().double()
        error.add("logits", logits.detach(), x @ gate.detach().double().T)
        error.add("scores", scores.detach(), exact_scores.detach())
        error.add("dx", self.x.grad[tokens], exact_dx + dlogits[tokens] @ gate.detach().double())
        # renormalised scores of K = 1 are constant: dgate is zero
        unscaled = torch.zeros_like(dlogits).scatter_(1, ids.long(), dscores)
        error.add("dgate", gate.grad, dlogits.T @ x, terms=unscaled.T @ x)

        for expert in {0, E // 2, E - 1, int(counts.argmax())}:
            token, slot = (ids == expert).nonzero(as_tuple=True)
            _, _, _, *dw = self.exact_rows(expert, token, scores[token, slot])
            for name, exact in zip(("w1", "w2", "w3"), dw, strict=False):  # w3 is a gated expert's
                error.add(f"d{name}", getattr(ours.experts, name).grad[expert], exact)
        return error

    def check_peer(self, name: str, peer: nn.Module) -> None:
        """Raises unless the peer computes the same layer.

        Errors are medians over the tokens, because a peer may break ties of 16-bit logits otherwise.
        """
        results = []
        for layer in (self.ours, peer):
            self.clear_grads(layer)
            out = layer(self.x)
            out.backward(self.dout)
            results.append((out.detach().float(), self.x.grad.float()))
        for what, ours, theirs in zip(("out", "dx"), *results, strict=True):
            error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).median())
            if not error < 0.03:
                raise ValueError(f"{what} differs from ours by {error:.1e}")


def find_peers(case: Case, options: argparse.Namespace, dtype: str) -> dict[str, nn.Module]:
    """The peers of --peers, and PyTorch's own path if it is fast."""
    default = "loop" if case.device == "cpu" else ""
    names = [name for name in (default if options.peers is None else options.peers).split(",") if name]
    if common.has_grouped_mm(case.device, dtype) and "torch" not in names:
        names.insert(0, "torch")
    return checked_peers(case, names)


def checked_peers(case: Case, names: list[str]) -> dict[str, nn.Module]:
    """Those of peers.py. A peer that fails is skipped."""
    from peers import PEERS

    peers = {}
    for name in names:
        if name not in PEERS:
            raise SystemExit(f"--peers: expected some of {', '.join(PEERS)}, found {name}")
        try:
            peer = PEERS[name](case.ours)
            case.check_peer(name, peer)
        except Exception as error:  # a peer may fail in any way; the others still run
            print(f"{name} is left out: {error}", flush=True)
        else:
            peers[name] = peer
    return peers


def case_of(shape: str, dtype: str, options: argparse.Namespace) -> Case:
    sizes, settings = common.layer_sizes(shape), common.layer_settings(shape)
    if options.activation:
        settings = settings._replace(activation=options.activation)
    return Case(sizes, options.routing, dtype, options.device, settings)


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    case = case_of(shape, dtype, options)
    error = case.error().check(shape, dtype)
    peers = find_peers(case, options, dtype)
    layers = {"ours": case.ours, **peers}
    memory = {name: case.memory(layer) for name, layer in layers.items()}
    for mode, what in product(options.mode, ("forward", "forward_backward")):
        runs = {name: partial(case.step, layer, what) for name, layer in layers.items()}
        runs["dense"] = partial(case.dense, what)
        has_floor = options.tier == "hopper"
        if has_floor:
            runs[floors.COPY], copied = floors.large_copy(case.device)
        clock = common.clock(case.device, **common.MODES[mode])
        seconds = common.times(clock, runs, options.repeats)
        best = min(peers, key=seconds.get, default=None)
        saved, peak = memory["ours"] if what == "forward_backward" else (None, None)
        extra = {f"ratio_to_{name}": common.ratio(seconds, name) for name in peers if name != "torch"}
        extra |= case.settings_that_are_unusual
        if has_floor:
            floor = case.floor_us(what, seconds["dense"], seconds[floors.COPY] / copied)
            extra |= common.of_floor(floor / 1e6, seconds["ours"])
        extra |= {f"about_{name}": peer.about for name, peer in peers.items() if hasattr(peer, "about")}
        if saved is not None:
            extra |= {f"activation_mib_{name}": memory[name][0] for name in peers}
            extra |= {f"peak_mib_{name}": memory[name][1] for name in peers}
        yield common.record(
            options,
            bench="layer",
            shape=shape,
            routing=options.routing,
            mode=mode,
            dtype=dtype,
            what=what,
            time_us=round(seconds["ours"] * 1e6, 1),
            tflops=round(case.flops(what) / seconds["ours"] / 1e12, 4),
            dense_ratio=common.ratio(seconds, "dense"),
            torch_ratio=common.ratio(seconds, "torch"),
            peer=best,
            peer_ratio=best and common.ratio(seconds, best),
            activation_mib=saved,
            peak_mib=peak,
            max_rel_error=error,
            intensity=round(case.intensity(what), 1),
            **extra,
        )
    if options.profile:
        yield from profile(case, layers, shape, dtype, options)


def profile(
    case: Case, layers: dict[str, nn.Module], shape: str, dtype: str, options: argparse.Namespace
) -> Iterator[dict]:
    """A step of each layer: a record for each kind of kernel, and one of the whole step, also of dense."""
    about = {"bench": "profile", "shape": shape, "routing": options.routing, "mode": "queued", "dtype": dtype}
    found = floors.by_kind(case.sizes, case.settings, case.counts, case.dense_gemms, options.repeats)
    steps = {name: partial(case.step, layer, "forward_backward") for name, layer in layers.items()}
    steps["dense"] = partial(case.dense, "forward_backward")
    for name, step in steps.items():
        every = profiling.measured(profiling.launches(step), found, profiling.power(step))
        for measured in every[-1:] if name == "dense" else every:
            yield common.record(options, **about, layer=name, **measured)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    common.start(options)
    if options.device == "cpu":  # which queues nothing
        options.mode = [common.DEFAULT_MODE]
    options.mode = options.mode or ["queued"]
    if options.profile and options.device != "cuda":
        raise SystemExit("--profile: expected a GPU")
    common.report(options, measure)


if __name__ == "__main__":
    main()
