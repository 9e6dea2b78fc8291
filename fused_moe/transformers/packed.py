"""Quantizers that load experts as a checkpoint stores them, where transformers would unpack them.

They subclass transformers' own, and act on models that ask for experts_implementation="fused_moe" alone.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ..checks import fail
from ..quantized import formats
from ..quantized.sharding import is_sharded
from .conversions import as_fp8, why_not_stacked
from .experts import settings_of
from .weights import NAMES, PARTS, add_hook, experts_of, first_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .weights import ExpertsModule

_Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # {suffix: (shape, dtype)} of a weight's parameters


def _pack(experts: ExpertsModule, name: str, parts: _Parts) -> None:
    """Replaces a weight, before it is loaded, by the parameters that the checkpoint has in its place."""
    device = getattr(experts, name).device
    delattr(experts, name)
    for part, (shape, dtype) in parts.items():
        stored = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        experts.register_parameter(name + part, stored)
    add_hook(experts)
    experts._is_hf_initialized = True  # or transformers would draw values for the weight that has gone


def _sizes(experts: ExpertsModule, name: str) -> tuple[int, int, int]:
    """E, out and in of a weight."""
    E, rows, cols = getattr(experts, name).shape
    return (E, cols, rows) if experts.is_transposed else (E, rows, cols)


def _num_matrices(name: str) -> int:
    """The number of each expert's matrices whose rows a weight has: gate and up, or one."""
    return 2 if name == "gate_up_proj" else 1


# --- what a checkpoint stores -----------------------------------------------------------------------------


class _FileTensor(NamedTuple):
    """A tensor of experts in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": formats.E4M3,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def _stored_experts(checkpoint_files: list[str] | None) -> dict[str, _FileTensor]:
    """What safetensors have of experts' weights. Only headers are read."""
    from safetensors import safe_open

    stored = {}
    for file in checkpoint_files or []:
        if not str(file).endswith(".safetensors"):
            return {}
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                if re.search(r"\.experts\.(\d+\.|\w+_proj)", key):
                    part = tensors.get_slice(key)
                    dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
                    stored[key] = _FileTensor(str(file), dtype, tuple(part.get_shape()))
    return stored


class _Packed(HfQuantizer):
    """What the quantizers have in common."""

    is_packed = False

    def _ours(self, model: nn.Module, use_kernels: bool) -> list[tuple[str, ExpertsModule]]:
        """The experts that may stay packed, and their names. Kernels of the hub replace layers as a whole."""
        if use_kernels or self.quantization_config.dequantize or not self.pre_quantized:
            return []
        return [found for found in experts_of(model) if found[1].config._experts_implementation in NAMES]

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name, experts in experts_of(model):
            if experts.config._experts_implementation in NAMES:
                _check_split(name, experts)
                for _, parameter in _packed_parameters(experts):
                    parameter.requires_grad_(False)  # loading makes what is floating require a gradient
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _check_stored(self, model: nn.Module, stored: dict[str, _FileTensor]) -> None:
        """Checks what safetensors have for packed parameters, before any of it is loaded."""
        if not stored:
            return
        fn, mapping = "from_pretrained", get_model_conversion_mapping(model, hf_quantizer=self)
        renamings = [c for c in mapping if isinstance(c, WeightRenaming)]
        converters = [c for c in mapping if isinstance(c, WeightConverter)]
        per_expert = {pattern: len(c.source_patterns) for c in converters for pattern in c.source_patterns}
        own = model.state_dict()
        found: dict[str, Counter[int | None]] = defaultdict(
            Counter
        )  # of a parameter the tensors of each expert
        needed = {}
        for key, tensor in stored.items():
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
            parameter = own.get(name)
            if parameter is None:
                continue  # a scale of activations, perhaps
            shape, expert = tuple(parameter.shape), re.search(r"\.experts\.(\d+)\.", key)
            if pattern is not None:
                shape = shape[1] // per_expert[pattern], *shape[2:]
            found[name][int(expert[1]) if expert else None] += 1
            needed[name] = per_expert.get(pattern, 1)
            where = f"{key} in {tensor.file}"
            if expert and int(expert[1]) >= len(parameter):
                fail(ValueError, fn, f"{name} of {len(parameter)} experts", where)
            if tensor.shape != shape:
                fail(ValueError, fn, f"{where} of shape {shape}", tensor.shape)
            are_scales = {tensor.dtype, parameter.dtype} <= set(formats.SCALES)
            if self.is_packed and tensor.dtype != parameter.dtype and not are_scales:
                fail(ValueError, fn, f"{where} of dtype {parameter.dtype}", tensor.dtype)
        folder = Path(next(iter(stored.values())).file).parent
        for module_name, experts in experts_of(model):
            for name, parameter in _packed_parameters(experts):
                name = f"{module_name}.{name}"
                counts = found[name]
                missing = [e for e in range(len(parameter)) if counts[e] < needed.get(name, 1)]
                if missing and not counts[None]:
                    fail(
                        ValueError, fn, f"{name} of every expert in {folder}", f"none or a part of {missing}"
                    )


def _packed_parameters(experts: ExpertsModule) -> list[tuple[str, nn.Parameter]]:
    """Those that are codes, or belong to codes."""
    own = experts.named_parameters(recurse=False)
    return [(n, p) for n, p in own if p.element_size() == 1 or n.endswith((*PARTS[1:], "_shape"))]


def _check_split(module_name: str, experts: ExpertsModule) -> None:
    """Checks that tensor parallelism has split codes where their scales are split. It goes by whole shapes,
    so that all ranks raise: one alone would leave the others in the sum of their outputs."""
    own = experts._parameters
    for name in (first_name(experts), "down_proj"):
        parts = {part: own[name + part] for part in PARTS if own.get(name + part) is not None}
        codes = next(iter(parts.values()), None)
        if len(parts) < 2 or not is_sharded(codes):
            continue
        rows, bytes_per_row = codes.shape[1], math.prod(codes.shape[2:]) * codes.element_size()
        for dim, num_ranks in _splits(codes):
            size = rows if dim == 1 else bytes_per_row
            num_parts = num_ranks * (_num_matrices(name) if dim == 1 else 1)
            for part, tensor in parts.items():
                count = tensor.shape[dim] if tensor.dim() > dim else 1
                if count % num_parts or size % count or formats.BLOCK % (size // count):
                    what = f"{module_name}.{name} to have scales that tp_size={num_ranks} can split"
                    found = f"{name}{part} {tuple(tensor.shape)}; use ep_size={num_ranks} or fsdp_size"
                    fail(ValueError, "from_pretrained", what, found)


def _splits(tensor: DTensor) -> list[tuple[int, int]]:
    """(dimension, number of ranks) of what is split within experts."""
    placements: Any = tensor.placements
    sizes = zip(placements, tensor.device_mesh.shape, strict=True)
    return [(x.dim, n) for x, n in sizes if not x.is_replicate() and x.dim > 0]


class _ValidatedLate(_Packed):
    """Asks for what transformers' kernels need only if they are to run."""

    _environment: tuple[tuple, dict] | None = None

    def validate_environment(self, *args, **kwargs) -> None:
        self._environment = args, kwargs

    def _validate(self) -> None:
        if self._environment is not None:
            args, kwargs = self._environment
            super().validate_environment(*args, **kwargs)


class PackedMxfp4(_ValidatedLate, Mxfp4HfQuantizer):
    """Loads gpt-oss' experts as they are stored, in models whose experts are fused_moe's.

    transformers has kernels for MXFP4 on some machines, which want the codes in their own order, and
    dequantises on others. In other models, and with dequantize=True, this is transformers' quantizer.
    """

    def _process_model_before_weight_loading(self, model, use_kernels=False, checkpoint_files=None, **kwargs):
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
            self._validate()
            super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)
        else:
            self._check_stored(model, _stored_experts(checkpoint_files))

    def get_weight_conversions(self) -> list:
        """None for packed experts, whose parameters have the checkpoint's names."""
        return [] if self.is_packed else super().get_weight_conversions()

    @property
    def is_trainable(self) -> bool:
        return self.is_packed or super().is_trainable


class PackedFp8(_ValidatedLate, FineGrainedFP8HfQuantizer):
    """Keeps FP8 experts packed on every device, in models whose experts are fused_moe's and alone in FP8.

    transformers has kernels for some GPUs, and dequantises elsewhere.
    """

    def _process_model_before_weight_loading(self, model, use_kernels=False, checkpoint_files=None, **kwargs):
        if not self._has_ours_alone(model, use_kernels):
            self._validate()
        super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)
        if self._ours(model, use_kernels):
            self._check_stored(model, _stored_experts(checkpoint_files))

    def _process_model_after_weight_loading(self, model, **kwargs):
        if any(experts.config._experts_implementation in NAMES for _, experts in experts_of(model)):
            for name, parameter in model.named_parameters():  # those of dense layers, too
                if parameter.dtype == formats.E4M3 or name.endswith("_scale_inv"):
                    parameter.requires_grad_(False)  # FSDP2 wants one dtype of a layer's trainable parameters
        return super()._process_model_after_weight_loading(model, **kwargs)

    def _has_ours_alone(self, model: nn.Module, use_kernels: bool) -> bool:
        """Whether all that is in FP8 is experts that we compute."""
        config = self.quantization_config
        found, unquantized = dict(self._ours(model, use_kernels)), config.modules_to_not_convert
        self._normalize_modules_to_not_convert(model)
        skipped, config.modules_to_not_convert = config.modules_to_not_convert, unquantized
        for name, module in model.named_modules():
            is_experts = name.endswith(".experts")
            if not (is_experts or isinstance(module, nn.Linear)) or not should_convert_module(name, skipped):
                continue
            theirs = as_fp8(module, config) if name in found else None
            if theirs is None or isinstance(settings_of(theirs), str):
                return False
        return bool(found) and not config.modules_to_convert


class PackedCompressedTensors(_Packed, CompressedTensorsHfQuantizer):
    """Loads experts as they are stored, in models whose experts are fused_moe's.

    The checkpoint has each expert's codes, `weight` or `weight_packed`, weight_scale and, if asymmetric,
    weight_zero_point. Where a module has parameters of these names, transformers stacks them as it does plain
    weights; otherwise it unpacks them before. Dense layers, and everything with dequantize=True, are left to
    transformers.
    """

    def _process_model_before_weight_loading(self, model, use_kernels=False, checkpoint_files=None, **kwargs):
        super()._process_model_before_weight_loading(
            model, use_kernels=use_kernels, checkpoint_files=checkpoint_files, **kwargs
        )
        self.is_alone = not any(hasattr(module, "quantization_scheme") for module in model.modules())
        if self.is_alone:
            self.compressor.remove_decompression_hook(model)  # it would unpack nothing, and cannot be pickled
        found = [experts for _, experts in self._ours(model, use_kernels)]
        scheme = _scheme_of_experts(self.compressor.quantization_config)
        if scheme is None or not found:
            return
        stored = _stored_experts(checkpoint_files)
        reason = _not_packed(model, found, scheme, stored)
        if reason is not None:
            warnings.warn(f"fused_moe does not keep the experts packed: {reason}", stacklevel=2)
            return
        self.is_packed = True
        for experts in found:
            for weight in (first_name(experts), "down_proj"):
                parts = _parts(scheme, stored, _sizes(experts, weight), _num_matrices(weight))
                _pack(experts, weight, parts)
            if scheme.is_dynamic:
                experts.activation_scheme = "dynamic"  # as FP8Experts have it
        self._check_stored(model, stored)

    def get_load_operations(self) -> dict:
        """None where packed experts alone are quantised: it would take other merged weights for quantised."""
        return {} if self.is_packed and self.is_alone else super().get_load_operations()


class _Scheme(NamedTuple):
    """How experts' weights are quantised."""

    weights: Any  # compressed-tensors' QuantizationArgs
    inputs: Any  # likewise of activations
    codes: torch.dtype
    is_packed: bool  # in `weight_packed`, several codes per element

    @property
    def is_dynamic(self) -> bool:
        """Whether it is for 8 bits on both operands."""
        return self.inputs is not None and not self.is_packed


# format, num_bits and type -> codes, and whether they are packed
_SCHEMES = {
    ("pack-quantized", 4, "int"): (torch.int32, True),
    ("mxfp4-pack-quantized", 4, "float"): (torch.uint8, True),
    ("int-quantized", 8, "int"): (torch.int8, False),
    ("float-quantized", 8, "float"): (formats.E4M3, False),
}


def _scheme_of_experts(config) -> _Scheme | None:
    """How the experts' weights are quantised, or None if no format here has it."""
    from transformers.integrations.compressed_tensors import get_experts_scheme

    if config is None or not config.config_groups:
        return None
    scheme = get_experts_scheme(config)
    weights = scheme.weights
    if weights is None:
        return None
    found = _SCHEMES.get((scheme.format or config.format, weights.num_bits, weights.type))
    return None if found is None else _Scheme(weights, scheme.input_activations, *found)


def _parts(
    scheme: _Scheme, stored: dict[str, _FileTensor], sizes: tuple[int, int, int], matrices: int
) -> _Parts:
    """A weight's parameters. Scales have the checkpoint's dtype."""
    (E, rows, cols), args = sizes, scheme.weights
    scales = {tensor.dtype for key, tensor in stored.items() if key.endswith(".weight_scale")}
    scale = {
        "group": (rows, cols // args.group_size if args.group_size else 0),
        "channel": (rows, 1),
        "tensor": (matrices,),
        "block": (matrices * -(-(rows // matrices) // formats.BLOCK), -(-cols // formats.BLOCK)),
    }[args.strategy]
    per_element = 8 * scheme.codes.itemsize // args.num_bits
    parts: _Parts = {"_packed" if scheme.is_packed else "": ((E, rows, cols // per_element), scheme.codes)}
    parts["_scale"] = (E, *scale), reduce(torch.promote_types, scales)
    if any(key.endswith(".weight_shape") for key in stored):  # so that a saved checkpoint has them
        parts["_shape"] = (E, 2 * matrices), torch.int64
    if not args.symmetric:
        parts["_zero_point"] = (E, rows // 8, scale[1]), torch.int32
    return parts


def _not_packed(model: nn.Module, found: list[ExpertsModule], scheme: _Scheme, stored: dict) -> str | None:
    """Why experts cannot be used as they are stored."""
    args, inputs = scheme.weights, scheme.inputs
    is_int4 = scheme.codes == torch.int32
    has_scales = f"their scales are per {args.strategy} with group_size {args.group_size}"
    if scheme.is_packed:
        groups = formats.GROUPS if is_int4 else (formats.MX_GROUP,)
        if args.strategy != "group" or args.group_size not in groups:
            return f"{has_scales}, not per group of {' or '.join(map(str, groups))}"
        if args.actorder == "group":
            return "their columns are in act-order"
    elif args.strategy == "block":
        blocks = [formats.BLOCK, formats.BLOCK]
        if args.block_structure != blocks or scheme.codes != formats.E4M3:
            return f"their scales are per block of {args.block_structure}, not of {blocks} of float8_e4m3fn"
    elif args.strategy not in ("channel", "tensor"):
        return f"{has_scales}, not per channel, tensor or block"
    if not args.symmetric and not is_int4:
        return "their codes have zero points"
    if inputs is not None and not inputs.dynamic:
        return "their activations have static scales"
    if reason := why_not_stacked(model, found):
        return reason
    for experts in found:
        for weight in (first_name(experts), "down_proj"):
            # A multiple is one of 8, too, by which codes and zero points are packed.
            _, rows, cols = _sizes(experts, weight)
            if scheme.is_packed and cols % args.group_size:
                return f"{weight} has {cols} columns, which are not whole groups of {args.group_size}"
            if args.strategy == "block" and _num_matrices(weight) == 2 and rows // 2 % formats.BLOCK:
                return f"gate and up have {rows // 2} rows each, which are not whole blocks"
    kinds = {(key.rpartition(".")[2], tensor.dtype) for key, tensor in stored.items()}
    codes = {kind for kind in kinds if kind[0] in ("weight", "weight_packed")}
    if codes != {("weight_packed" if scheme.is_packed else "weight", scheme.codes)}:
        return "some of them are not packed in the checkpoint, or it has no safetensors"
    scales = {dtype for name, dtype in kinds if name == "weight_scale"}
    allowed = formats.E8M0 if scheme.codes == torch.uint8 else formats.SCALES
    return None if scales and scales <= set(allowed) else f"their scales are {sorted(map(str, scales))}"
