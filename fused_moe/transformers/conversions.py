"""What transformers does to experts' weights between a checkpoint and a model, and undoes as it saves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import use_experts_implementation

from .experts import settings_of
from .weights import first_name

if TYPE_CHECKING:
    from .weights import ExpertsModule

WEIGHTS = {"gate_up_proj", "up_proj", "down_proj"}
_OF_AN_EXPERT = re.compile(r"experts\.\*\.\w+\.weight$")


def why_not_stacked(model: nn.Module, found: list[ExpertsModule]) -> str | None:
    """Why a checkpoint does not have each expert's matrices as rows of the model's weights."""
    for experts in found:
        settings = settings_of(experts)
        if isinstance(settings, str):
            return f"they have {settings}, which no kernel supports"
        if experts.is_transposed or settings["layout"] == "interleaved" or experts.has_bias:
            return f"{type(experts).__name__} are transposed, interleaved or have biases"
    if not _only_merges(model, found):
        return "transformers changes these weights as it loads them"
    return None


def _converters_of_experts(model: nn.Module) -> list:
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in mapping if isinstance(c, WeightConverter) and _targets(c) & WEIGHTS]


def _targets(converter) -> set[str]:
    return {target.rpartition(".")[2] for target in converter.target_patterns}


def _only_merges(model: nn.Module, found: list[ExpertsModule]) -> bool:
    """Whether transformers makes the stacked weights by stacking experts, and gate above up, alone."""
    merged = set()
    for converter in _converters_of_experts(model):
        operations = {(type(op), getattr(op, "dim", None)) for op in converter.operations}
        is_merge = operations <= {(MergeModulelist, 0), (Concatenate, 1)}
        if not is_merge or not all(_OF_AN_EXPERT.search(s) for s in converter.source_patterns):
            return False
        merged |= _targets(converter)
    return all({first_name(experts), "down_proj"} <= merged for experts in found)


def names_of_matrices(model: nn.Module, name: str) -> list[str]:
    """What a checkpoint has for a stacked weight, `*` being the expert's number; renamings are not undone."""
    for converter in _converters_of_experts(model):
        reverse = converter.reverse_transform()
        renamed, pattern = reverse.rename_source_key(name)
        if pattern is not None:
            return [renamed.replace(reverse.target_patterns[0], target) for target in reverse.target_patterns]
    raise AssertionError(name)  # why_not_stacked would have said so


def dense_names(model: PreTrainedModel, outside: list[str]) -> list[str]:
    """The modules that have a matrix and are not inside the named ones, as a checkpoint names them. Linear
    layers have their own names, too: transformers does not rename all as it reads such a list."""
    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:  # as revert_weight_conversion has it
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [c for c in mapping if not isinstance(c, PrefixChange)]
    renamings = [c.reverse_transform() for c in reversed(mapping) if isinstance(c, WeightRenaming)]
    names = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() > 1 and not f"{name}.".startswith(tuple(outside)):
            stored, _ = rename_source_key(f"{name}.weight", renamings, [])
            names.append(stored.removesuffix(".weight"))
            if isinstance(module, nn.Linear) and name != names[-1]:
                names.append(name)
    return names


def as_fp8(experts: ExpertsModule, config) -> FP8Experts | None:
    """The FP8Experts, without memory, that transformers' quantizer would have in the place of experts, if its
    class can be made for them."""
    own = {"has_bias": experts.has_bias, "has_gate": experts.has_gate}
    decorated = use_experts_implementation(
        experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, **own
    )
    own |= {"block_size": config.weight_block_size, "activation_scheme": config.activation_scheme}
    newer = {name: getattr(config, name) for name in ("scale_fmt", "expert_dtype") if hasattr(config, name)}
    try:
        with torch.device("meta"):
            return decorated(config=experts.config, **own, **newer)
    except (AssertionError, AttributeError):  # biases, or a configuration with other names
        return None
