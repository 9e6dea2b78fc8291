"""Quantizers that load experts as a checkpoint stores them, where transformers would unpack them.

They subclass transformers' own, and act on models that ask for experts_implementation="fused_moe" alone.
"""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..quantized import formats
from .experts import settings_of
from .quantizing import experts_of
from .weights import NAMES, PARTS, add_hook, first_name


def _pack(experts: nn.Module, name: str, parts: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Replaces a weight, before it is loaded, by the parameters that the checkpoint has in its place."""
    device = getattr(experts, name).device
    delattr(experts, name)
    for part, (shape, dtype) in parts.items():
        stored = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        experts.register_parameter(name + part, stored)
    add_hook(experts)
    experts._is_hf_initialized = True  # or transformers would draw values for the weight that has gone


def _sizes(experts: nn.Module, name: str) -> tuple[int, int, int]:
    """E, out and in of a weight."""
    E, rows, cols = getattr(experts, name).shape
    return (E, cols, rows) if experts.is_transposed else (E, rows, cols)


class _Packed:
    """What the quantizers have in common."""

    is_packed = False

    def _ours(self, model: nn.Module, use_kernels: bool) -> list[tuple[str, nn.Module]]:
        """The experts that may stay packed, and their names. Kernels of the hub replace layers as a whole."""
        if use_kernels or self.quantization_config.dequantize or not self.pre_quantized:
            return []
        return [found for found in experts_of(model) if found[1].config._experts_implementation in NAMES]

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.is_packed:
            for _, experts in experts_of(model):
                for name, parameter in experts.named_parameters(recurse=False):
                    if name.endswith(PARTS[1:]):  # loading makes scales require a gradient
                        parameter.requires_grad_(False)
        return super()._process_model_after_weight_loading(model, **kwargs)


class PackedMxfp4(_Packed, Mxfp4HfQuantizer):
    """Loads gpt-oss' experts as they are stored, in models whose experts are fused_moe's.

    transformers has kernels for MXFP4 on some machines, which want the codes in their own order, and
    dequantises on others. In other models, and with dequantize=True, this is transformers' quantizer.
    """

    _environment = None

    def validate_environment(self, *args, **kwargs):
        self._environment = args, kwargs  # of transformers' kernels, which may not be needed

    def _process_model_before_weight_loading(self, model, use_kernels=False, **kwargs):
        unquantized = self.quantization_config.modules_to_not_convert
        for name, experts in self._ours(model, use_kernels):
            if isinstance(experts, GptOssExperts) and should_convert_module(name, unquantized):
                self.is_packed = True
                for weight in ("gate_up_proj", "down_proj"):
                    E, rows, cols = _sizes(experts, weight)
                    groups = E, rows, cols // formats.MX_GROUP
                    shapes = {"_blocks": (*groups, formats.MX_GROUP // 2), "_scales": groups}
                    _pack(experts, weight, {part: (shape, torch.uint8) for part, shape in shapes.items()})
        if not self.is_packed:
            if self._environment is not None:
                args, environment = self._environment
                super().validate_environment(*args, **environment)
            super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)

    def get_weight_conversions(self):
        """None for packed experts, whose parameters have the checkpoint's names."""
        return [] if self.is_packed else super().get_weight_conversions()

    @property
    def is_trainable(self) -> bool:
        return self.is_packed or super().is_trainable


class PackedCompressedTensors(_Packed, CompressedTensorsHfQuantizer):
    """Loads int4 experts as they are stored, in models whose experts are fused_moe's.

    The checkpoint has each expert's weight_packed, weight_scale and, if asymmetric, weight_zero_point. Where
    a module has parameters of these names, transformers stacks them as it does plain weights; otherwise it
    unpacks them before. Dense layers, and everything with dequantize=True, are left to transformers.
    """

    def _process_model_before_weight_loading(self, model, use_kernels=False, checkpoint_files=None, **kwargs):
        super()._process_model_before_weight_loading(
            model, use_kernels=use_kernels, checkpoint_files=checkpoint_files, **kwargs
        )
        found = [experts for _, experts in self._ours(model, use_kernels)]
        args = _int4_of_experts(self.compressor.quantization_config)
        if args is None or not found:
            return
        reason = _not_packed(model, found, args, checkpoint_files)
        if reason is not None:
            warnings.warn(f"fused_moe does not keep the experts packed: {reason}", stacklevel=2)
            return
        self.is_packed = True
        for experts in found:
            for weight in (first_name(experts), "down_proj"):
                E, rows, cols = _sizes(experts, weight)
                groups = cols // args.group_size
                num_sizes = 4 if weight == "gate_up_proj" else 2  # out and in of each matrix
                parts = {
                    "_packed": ((E, rows, cols // 8), torch.int32),
                    "_scale": ((E, rows, groups), getattr(experts, weight).dtype),
                    "_shape": ((E, num_sizes), torch.int64),  # so that a saved checkpoint has them
                }
                if not args.symmetric:
                    parts["_zero_point"] = (E, rows // 8, groups), torch.int32
                _pack(experts, weight, parts)


def _int4_of_experts(config):
    """How the experts' weights are quantised, or None if that is not pack-quantized int4."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    if config is None or not config.config_groups:
        return None
    scheme = get_experts_scheme(config)
    args = scheme.weights
    is_int4 = (
        args is not None
        and (scheme.format or config.format) == "pack-quantized"
        and (args.num_bits, args.type) == (4, "int")
    )
    return args if is_int4 else None


def _not_packed(model: nn.Module, found: list[nn.Module], args, checkpoint_files) -> str | None:
    """Why int4 experts cannot be used as they are stored."""
    if args.strategy != "group" or args.group_size not in formats.GROUPS:
        found_scales = f"per {args.strategy} with group_size {args.group_size}"
        return f"their scales are {found_scales}, not per group of {' or '.join(map(str, formats.GROUPS))}"
    if args.actorder == "group":
        return "their columns are in act-order"
    for experts in found:
        settings = settings_of(experts)
        if isinstance(settings, str):
            return f"they have {settings}, which no kernel supports"
        if experts.is_transposed or settings["layout"] == "interleaved" or experts.has_bias:
            return f"{type(experts).__name__} are transposed, interleaved or have biases"
        for weight in (first_name(experts), "down_proj"):
            # A multiple is one of 8, too, by which codes and zero points are packed.
            cols = _sizes(experts, weight)[2]
            if cols % args.group_size:
                return f"{weight} has {cols} columns, which are not whole groups of {args.group_size}"
    if not _only_merges(model, found):
        return "transformers changes these weights as it loads them"
    if not _all_packed(checkpoint_files):
        return "some of them are not packed in the checkpoint, or it has no safetensors"
    return None


def _only_merges(model: nn.Module, found: list[nn.Module]) -> bool:
    """Whether transformers makes the stacked weights by stacking experts, and gate above up, alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    merged = set()
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        names = {target.rpartition(".")[2] for target in converter.target_patterns}
        names &= {"gate_up_proj", "up_proj", "down_proj"}
        operations = {(type(op), getattr(op, "dim", None)) for op in converter.operations}
        is_merge = operations <= {(MergeModulelist, 0), (Concatenate, 1)}
        if names and not (is_merge and all(s.endswith(".weight") for s in converter.source_patterns)):
            return False
        merged |= names
    return all({first_name(experts), "down_proj"} <= merged for experts in found)


def _all_packed(checkpoint_files: list[str] | None) -> bool:
    """Whether the checkpoint has its experts' weights packed alone."""
    from safetensors import safe_open

    files = checkpoint_files or []
    names = set()
    for file in files:
        if not str(file).endswith(".safetensors"):
            return False
        with safe_open(file, framework="pt") as tensors:
            names |= {key.rpartition(".")[2] for key in tensors.keys() if re.search(r"\.experts\.\d+\.", key)}
    return "weight_packed" in names and "weight" not in names
