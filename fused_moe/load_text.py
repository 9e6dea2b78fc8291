"""The load of experts as text that fits a screen: at most 24 lines of 80 columns."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_LINES = 24
EDGES = (0.5, 1.0, 2.0, 4.0)  # between the columns of experts, as multiples of the mean load
TITLES = ("idle", "<1/2", "<1", "<2", "<4", "4+")
MOST_EXPERTS = 20  # a line each; of more, the busiest and the least busy
BUSIEST, LEAST = 12, 6
BAR = 40  # columns of the busiest expert's
NOTHING_COUNTED = (
    "load: nothing counted since the last update of the bias; read it before optimizer.step()\n"
    "only training passes count"
)


def of_layer(tokens: Tensor, max_over_mean: float, idle: int) -> str:
    """A layer's report: a bar for each expert, or for the busiest and the least busy ones."""
    if not tokens.any():
        return NOTHING_COUNTED
    E, peak, total = len(tokens), int(tokens.max()), int(tokens.sum())

    def line(e: int) -> str:
        n = int(tokens[e])
        return f"  {e:6d}  {n:10d}  {n / total:7.2%}  {'#' * round(BAR * n / peak)}".rstrip()

    first = f"load: the busiest expert has {max_over_mean:.2f}x the mean, {idle} of {E} experts are idle"
    title = "  expert      tokens    share"
    if E <= MOST_EXPERTS:
        return "\n".join([first, title, *map(line, range(E))])
    order = tokens.argsort(descending=True, stable=True).tolist()
    columns = [
        f"  {'over the mean':18}{titles()}",
        f"  {'experts':18}{columns_of(tokens)}",
    ]
    between = f"     ...  {E - BUSIEST - LEAST} others"
    busiest, least = map(line, order[:BUSIEST]), map(line, order[-LEAST:])
    return "\n".join([first, *columns, title, *busiest, between, *least])


def titles() -> str:
    """The titles of `columns_of`."""
    return "".join(f"{title:>6}" for title in TITLES)


def columns_of(tokens: Tensor) -> str:
    """How many experts have no token, less than half the mean load, and so on."""
    busy = tokens[tokens > 0].double()
    columns = torch.bucketize(busy * len(tokens) / busy.sum(), torch.tensor(EDGES).double(), right=True)
    numbers = [len(tokens) - len(busy), *columns.bincount(minlength=len(EDGES) + 1).tolist()]
    return "".join(f"{n:6d}" for n in numbers)
