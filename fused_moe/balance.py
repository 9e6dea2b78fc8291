"""Balancing and reporting on every FusedMoE of a model at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from .checks import check_group, fail
from .expert_bias import joined, update_biases
from .finding import layers_in
from .load_text import MOST_LINES, NOTHING_COUNTED, columns_of, titles
from .module import LoadReport, report_of

NAME_WIDTH = 24


def balance(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
) -> RemovableHandle:
    """Balances the load without auxiliary loss: updates the bias of every layer after each optimizer step.

    Call it once, before training, for one of the model's optimizers. Each of its steps then ends with what
    `update_expert_bias` does, for every FusedMoE in the model that has a load_balance_coeff, with one
    all-reduce for all of them. The layers are those that the model has now, also inside DDP, FSDP and
    torch.compile. A layer that is in several places is updated once. A step that GradScaler skips after an
    overflow updates nothing: its tokens count in the next one. Read `load_report` before optimizer.step(),
    which zeroes the counts.
    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (arXiv
    2408.15664), algorithm 1; centred as in torchtitan.

    Args:
        model: a module with at least one FusedMoE that has a load_balance_coeff.
        optimizer: any torch.optim.Optimizer.
        group: ranks that have the same layers. None: all ranks, if torch.distributed is initialised.

    Returns:
        A handle. Its remove() ends the balancing.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    fn = "balance"
    layers = [layer for layer in layers_in(fn, model, "model").values() if layer.expert_bias is not None]
    if not layers:
        fail(ValueError, fn, "a model with a FusedMoE that has a load_balance_coeff", "none that has")
    if not isinstance(optimizer, torch.optim.Optimizer):
        fail(TypeError, fn, "optimizer to be a torch.optim.Optimizer", type(optimizer).__name__)
    check_group(fn, group)
    return optimizer.register_step_post_hook(lambda *_: update_biases(layers, group))


class ModelLoadReport(NamedTuple):
    """The load of each expert of each layer; `print` shows a line per layer."""

    layers: dict[str, LoadReport]  # by the layer's name in the model

    @property
    def max_over_mean(self) -> float:
        """That of the least balanced layer."""
        return max(report.max_over_mean for report in self.layers.values())

    @property
    def idle(self) -> int:
        """Experts without tokens, of all layers together."""
        return sum(report.idle for report in self.layers.values())

    def __str__(self) -> str:
        if not self.max_over_mean:
            return NOTHING_COUNTED
        rows = list(self.layers.items())
        folded = -(-len(rows) // (MOST_LINES - 2))  # two lines are titles
        rows = [max(rows[i : i + folded], key=_imbalance) for i in range(0, len(rows), folded)]
        which = f", the worst of each {folded}" if folded > 1 else ""
        first = f"load of {len(self.layers)} layers{which}; experts by their load over the mean"
        second = f"{'layer':{NAME_WIDTH}}{'tokens':>10}{'max/mean':>10}{titles()}"
        return "\n".join([first, second, *(_line(name, report) for name, report in rows)])


def load_report(model: nn.Module) -> ModelLoadReport:
    """The load of every FusedMoE in a model on this rank since the last update of its bias.

    `print` shows at most 38 lines of 80 columns: each layer's slots, its busiest expert's load over the mean,
    and how many experts have which multiple of the mean. With more than 36 layers a line is the least
    balanced of two or more neighbours. Counts are read from a GPU in one transfer.

    Args:
        model: a module with at least one FusedMoE.

    Returns:
        ModelLoadReport: `layers` has each layer's LoadReport by its name.

    Raises:
        TypeError, ValueError: the message says what was expected and what was found.
    """
    layers = layers_in("load_report", model, "model")
    counts = [layer.tokens_per_expert for layer in layers.values()]
    counts = [torch.zeros_like(c, device="cpu") if c.is_meta else c for c in counts]
    parts = joined(counts).cpu().split([len(c) for c in counts])
    return ModelLoadReport({name: report_of(part) for name, part in zip(layers, parts, strict=True)})


def _imbalance(row: tuple[str, LoadReport]) -> float:
    return row[1].max_over_mean


def _line(name: str, report: LoadReport) -> str:
    if len(name) >= NAME_WIDTH:
        name = ".." + name[3 - NAME_WIDTH :]
    total = int(report.tokens.sum())
    tokens = f"{total:,}" if total < 10**7 else f"{total:.2e}"
    return f"{name:{NAME_WIDTH}}{tokens:>10}{report.max_over_mean:10.2f}{columns_of(report.tokens)}"
