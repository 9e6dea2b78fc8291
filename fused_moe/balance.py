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
    """Balances the load without auxiliary loss: each optimizer step then updates the bias of every layer.

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
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2, load_balance_coeff=1e-3)
        >>> optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
        >>> handle = fused_moe.balance(moe, optimizer)
        >>> moe(torch.randn(5, 8)).sum().backward()
        >>> optimizer.step()  # moves moe.expert_bias
        >>> moe.tokens_per_expert.sum()
        tensor(0)
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
    """The load of each expert of each layer of a model; `print` shows a line per layer, at most 24 in all.

    Attributes:
        layers: {the layer's name in the model: its LoadReport}.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> _ = moe(torch.randn(5, 8))
        >>> report = fused_moe.load_report(torch.nn.ModuleDict({"moe": moe}))
        >>> list(report.layers), report.max_over_mean == report.layers["moe"].max_over_mean
        (['moe'], True)
    """

    layers: dict[str, LoadReport]

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's load over the mean, of the least balanced layer."""
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
    """Returns the load of every FusedMoE in a model on this rank since the last update of its bias.

    `print` shows at most 24 lines of 80 columns: each layer's slots, its busiest expert's load over the mean,
    and how many experts have which multiple of the mean. With more than 22 layers a line is the least
    balanced of two or more neighbours. Counts are read from a GPU in one transfer. Call it before
    optimizer.step(), which zeroes the counts if `balance` was called.

    Args:
        model: a module with at least one FusedMoE.

    Returns:
        ModelLoadReport: `layers` has each layer's LoadReport by its name.

    Raises:
        TypeError: model is no nn.Module.
        ValueError: model has no FusedMoE.

    Example:
        >>> model = torch.nn.Sequential(fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2))
        >>> _ = model(torch.zeros(5, 8))
        >>> print(fused_moe.load_report(model))
        load of 1 layers; experts by their load over the mean
        layer                       tokens  max/mean  idle  <1/2    <1    <2    <4    4+
        0                               10      2.00     2     0     0     0     2     0
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
