"""Times fused_moe.linear, whose rows have the same bits in every batch, against cuBLAS (F.linear).

    python benchmarks/bench_linear.py --json out.json
    python benchmarks/bench_linear.py --shape lm-head --shape 1024,3072 --tokens 1,32,1024

Both run in turns, each as a CUDA graph behind a cold L2 cache, so no time of the host counts. A graph has one
call for each of several weights that together exceed the L2 cache: as in a deep model, each is read from
memory. dense_ratio is cuBLAS' time over ours. what: forward is x @ weight.T, forward_backward adds dx and
dweight.

cublas_bits: whether the rows of out, and in backward of dx, that cuBLAS computes for this number of tokens
are those of the largest batch (same or other). On a GPU ours must be the same, or the program ends.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import common
import torch
import torch.nn.functional as F
from bench_decode import counts
from common import MIB, Error
from torch import Tensor

# in, out of dense layers. qkv, o and lm-head are Qwen3-30B-A3B's.
SHAPES = {"qkv": (2048, 5120), "o": (4096, 2048), "square": (4096, 4096), "lm-head": (2048, 151936)}
TOKENS = ",".join(str(2**i) for i in range(15))
MOST_OUTPUTS = 2**30  # elements of out; more tokens are left out
REUSE = 128 * MIB  # of weights, read before the same weight is read again
CHECKED_ROWS = 16
Product = Callable[[Tensor, Tensor], Tensor]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__, shape=f"of {', '.join(SHAPES)}, or IN,OUT; may be repeated")
    flags.add_argument("--tokens", type=counts, metavar="A,B,..", help=f"default: {TOKENS}")
    options = flags.parse_args(argv)
    options.shape = options.shape or list(SHAPES)
    options.dtype = options.dtype or ["bf16"]
    options.tokens = options.tokens or counts(TOKENS)
    return options


def widths(shape: str) -> tuple[int, int]:
    if shape in SHAPES:
        return SHAPES[shape]
    try:
        width_in, width_out = map(int, shape.split(","))
        return width_in, width_out
    except ValueError:
        raise SystemExit(f"--shape: expected IN,OUT or one of {', '.join(SHAPES)}, found {shape}") from None


class Operands:
    """x, the gradient of out, and weights that take turns."""

    def __init__(self, sizes: tuple[int, int], tokens: int, dtype: str, device: str):
        torch.manual_seed(0)
        factory = {"dtype": common.DTYPES[dtype], "device": device}
        width_in, width_out = sizes
        self.x = torch.randn(tokens, width_in, **factory)
        self.dout = torch.randn(tokens, width_out, **factory)
        num_weights = math.ceil(REUSE / (width_in * width_out * self.x.itemsize)) if device == "cuda" else 1
        self.weights = [torch.randn(width_out, width_in, **factory) for _ in range(num_weights)]
        for weight in self.weights:
            weight.mul_(width_in**-0.5).requires_grad_()

    def step(self, product: Product, what: str, tokens: int, weight: Tensor) -> tuple[Tensor, ...]:
        """out, and in backward dx and dweight, of the first tokens."""
        x = self.x[:tokens]
        if what == "forward":
            with torch.no_grad():
                return (product(x, weight),)
        x = x.detach().requires_grad_()
        out = product(x, weight)
        return out, *torch.autograd.grad(out, (x, weight), self.dout[:tokens])

    def rows(self, product: Product, what: str, tokens: int) -> tuple[Tensor, ...]:
        """out, and in backward dx: what has a row for each token."""
        return tuple(t.detach() for t in self.step(product, what, tokens, self.weights[0])[:2])

    def error(self, product: Product, what: str) -> Error:
        """In float64, of the first rows of each result for the largest batch."""
        error, weight = Error(), self.weights[0].detach().double()
        x, dout = (t[:CHECKED_ROWS].double() for t in (self.x, self.dout))
        dweight = self.dout[:, :CHECKED_ROWS].double().T @ self.x.double()
        found = self.step(product, what, self.x.size(0), self.weights[0])
        exact = {"out": x @ weight.T, "dx": dout @ weight, "dweight": dweight}
        for (name, rows), result in zip(exact.items(), found, strict=False):
            error.add(name, result[:CHECKED_ROWS], rows)
        return error

    def run(self, product: Product, what: str, tokens: int) -> Callable[[], object]:
        """A call for each weight."""

        def run():
            for weight in self.weights:
                self.step(product, what, tokens, weight)

        return common.as_graph(run) if self.x.is_cuda else run


def same_bits(rows: tuple[Tensor, ...], of_largest: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(few, all_of_them[: few.size(0)])
        for few, all_of_them in zip(rows, of_largest, strict=True)
    )


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    import fused_moe

    products = {"ours": fused_moe.linear, "dense": F.linear}
    width_in, width_out = sizes = widths(shape)
    tokens = [T for T in options.tokens if T * width_out <= MOST_OUTPUTS]
    operands = Operands(sizes, max(tokens), dtype, options.device)
    for what, num_products in (("forward", 1), ("forward_backward", 3)):
        error = operands.error(products["ours"], what).check(f"{shape} {what}", dtype)
        largest = {name: operands.rows(product, what, max(tokens)) for name, product in products.items()}
        for T in tokens:
            bits = {name: same_bits(operands.rows(p, what, T), largest[name]) for name, p in products.items()}
            if options.device == "cuda" and not bits["ours"]:
                raise SystemExit(f"{shape} {what} {T} tokens: other bits than in a batch of {max(tokens)}")
            runs = {name: operands.run(product, what, T) for name, product in products.items()}
            found = common.times(common.clock(options.device), runs, options.repeats)
            seconds = {name: s / len(operands.weights) for name, s in found.items()}
            yield common.record(
                options,
                bench="linear",
                shape=shape,
                routing="none",
                dtype=dtype,
                what=what,
                tokens=T,
                time_us=round(seconds["ours"] * 1e6, 2),
                tflops=round(num_products * 2 * T * width_in * width_out / seconds["ours"] / 1e12, 4),
                dense_ratio=common.ratio(seconds, "dense"),
                cublas_us=round(seconds["dense"] * 1e6, 2),
                cublas_bits="same" if bits["dense"] else "other",
                max_rel_error=error,
            )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    common.start(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
