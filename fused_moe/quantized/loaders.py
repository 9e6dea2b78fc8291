"""Loaders of published quantised checkpoints: their tensors as a `QuantizedWeight` of shape (E, out, in).

Each takes a state_dict (any mapping of names to tensors, also one that reads them from a file) and a name, in
which `*` stands for the number of the expert; without it the experts are stacked, E being the first dimension
of each tensor. Codes are copied where their layout is another than ours; no value changes. Stacked tensors
that have ours are not copied: the result shares their memory, unless it `is_tiled`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import NamedTuple, overload

import torch
from torch import Tensor

from ..checks import check_device, check_int, check_range, check_stored, fail
from . import formats
from .formats import BLOCK, E4M3, GROUPS, INT4_OFFSET, MX_GROUP, SCALES
from .weight import QuantizedWeight

# --- public -----------------------------------------------------------------------------------------------


def from_fp8_block(
    state_dict: Mapping[str, Tensor], name: str, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Loads fp8 with a scale per block of 128 x 128, as DeepSeek-V3 and the FP8 models of Qwen3 publish it.

    Args:
        state_dict: `<name>.weight` float8_e4m3fn (out, in), and `<name>.weight_scale_inv` float32, bfloat16,
            float16 or float8_e8m0fnu (ceil(out / 128), ceil(in / 128)), by which codes are multiplied.
        name: e.g. "model.layers.3.mlp.experts.*.up_proj". Stacked experts: `<name>` and `<name>_scale_inv`,
            as transformers 5 keeps them, or `<name>.weight` and `<name>.weight_scale_inv`.
        dtype: the result's.

    Returns:
        A QuantizedWeight of format fp8_block.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor is missing, or has another shape.

    Source: README_WEIGHTS.md of DeepSeek-V3; transformers.integrations.finegrained_fp8.

    Example:
        >>> from fused_moe.quantized import from_fp8_block
        >>> state_dict = {
        ...     "experts.0.up.weight": torch.ones(128, 256).to(torch.float8_e4m3fn),
        ...     "experts.0.up.weight_scale_inv": torch.ones(1, 2),
        ... }
        >>> from_fp8_block(state_dict, "experts.*.up")
        QuantizedWeight(format='fp8_block', shape=(1, 128, 256), dtype=torch.bfloat16)
    """
    tensors = _Tensors("from_fp8_block", state_dict, name)
    stem = "" if tensors.stacked and ".weight" not in tensors else ".weight"
    data = tensors.get(stem, (E4M3,), ("out", "in"))
    _, rows, cols = data.shape
    scale_dtypes = (*SCALES, torch.float8_e8m0fnu)
    scale = tensors.get(stem + "_scale_inv", scale_dtypes, (-(-rows // BLOCK), -(-cols // BLOCK)))
    return QuantizedWeight(data, scale.float(), format="fp8_block", shape=data.shape, dtype=dtype)


def from_compressed_tensors(
    state_dict: Mapping[str, Tensor], name: str, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Loads what llm-compressor publishes. The tensors tell which of its formats it is.

    - pack-quantized: `weight_packed` int32 (out, in / 8), eight codes of 4 bits per word, the first in the
      lowest bits; `weight_scale` floating (out, in / g), g 32, 64 or 128; and possibly `weight_zero_point`,
      int32 (ceil(out / 8), in / g), packed alike along out, or from older versions int8 (out, in / g) from -8
      to 7.
    - mxfp4-pack-quantized: `weight_packed` uint8 (out, in / 2), `weight_scale` uint8 (out, in / 32).
    - float-quantized: `weight` float8_e4m3fn (out, in), `weight_scale` floating, per matrix () or (1,), per
      row (out, 1), or per block (ceil(out / 128), ceil(in / 128)).
    - int-quantized: `weight` int8 (out, in), `weight_scale` floating, per matrix or row.

    Args:
        state_dict: these tensors after `<name>.`. Codes and zero points of 4 bits are stored plus 8.
            `weight_shape` is checked if given. `weight_g_idx` may only state the default.
            Scales of activations are ignored: activations are not quantised here.
        name: e.g. "model.layers.3.mlp.experts.*.up_proj".
        dtype: the result's.

    Returns:
        A QuantizedWeight of format int4, mxfp4, fp8, fp8_block or int8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor is missing, or has another shape or group size; columns are in act-order; or
            codes of 8 bits have zero points other than 0.

    Source: compressed_tensors.compressors, version 0.20.

    Example:
        >>> from fused_moe.quantized import from_compressed_tensors
        >>> state_dict = {"up.weight": torch.ones(4, 8, 64, dtype=torch.int8)}  # E = 4 experts are stacked
        >>> state_dict["up.weight_scale"] = torch.ones(4, 8, 1)
        >>> from_compressed_tensors(state_dict, "up")
        QuantizedWeight(format='int8', shape=(4, 8, 64), dtype=torch.bfloat16)
    """
    tensors = _Tensors("from_compressed_tensors", state_dict, name)
    if ".weight_packed" not in tensors:
        return _plain_codes(tensors, dtype)
    packed = tensors.get(".weight_packed", (torch.int32, torch.uint8), ("out", "in / 8 or in / 2"))
    E, rows, words = packed.shape
    if packed.dtype == torch.uint8:
        scale = tensors.get(".weight_scale", (torch.uint8,), (rows, 2 * words // MX_GROUP))
        return QuantizedWeight(packed, scale, format="mxfp4", shape=(E, rows, 2 * words), dtype=dtype)
    shape = E, rows, 8 * words
    _check_weight_shape(tensors, shape)
    scale = tensors.get(".weight_scale", SCALES, (rows, "in / g"))
    group = _group_size(tensors, ".weight_scale", shape[2], scale.size(2))
    g_idx = _g_idx(tensors, ".weight_g_idx", shape[2])
    if g_idx is not None and not g_idx.is_meta and (g_idx == -1).all():
        g_idx = None  # what older versions initialise it with
    advice = '; quantise it anew with actorder="weight", which keeps the order of columns'
    _check_order(tensors, ".weight_g_idx", g_idx, group, advice)
    zero = _signed_zeros(tensors, rows, scale.size(2)) if ".weight_zero_point" in tensors else None
    return QuantizedWeight(_as_bytes(packed), scale, zero, format="int4", shape=shape, dtype=dtype)


def from_gptq(
    state_dict: Mapping[str, Tensor], name: str, *, zero_offset: int = 1, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Loads GPTQ of 4 bits, as AutoGPTQ and GPTQModel write it.

    Args:
        state_dict: `<name>.qweight` int32 (in / 8, out), eight codes per word, the first in the lowest bits;
            `<name>.qzeros` int32 (in / g, ceil(out / 8)), packed alike along out; `<name>.scales` floating
            (in / g, out); and possibly `<name>.g_idx` integers (in,), which may only say what is so without
            it, k // g. g is 32, 64 or 128.
        name: e.g. "model.layers.3.mlp.experts.*.up_proj".
        zero_offset: what is added to stored zero points: 1 if checkpoint_format of the checkpoint's
            quantize_config is gptq or is not there, 0 if it is gptq_v2.
        dtype: the result's.

    With zero_offset = 1 a word of zero points w is read as w + 0x11111111, all eight at once and modulo 2^32,
    because GPTQModel writes it as w - 0x11111111: a zero point of 0 borrows from its neighbour.

    Returns:
        A QuantizedWeight of format int4, without zero points if all of them are 8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor is missing, or has another shape or group size, or columns are in act-order.
            `from_gptq_experts` reads experts whose `down` has that.

    Source: pack_original of gptqmodel.nn_modules.qlinear and gptqmodel.utils.model, version 7.7.

    Example:
        >>> from fused_moe.quantized import from_gptq
        >>> state_dict = {
        ...     "experts.0.up.qweight": torch.zeros(8, 16, dtype=torch.int32),  # in / 8 = 8, out = 16
        ...     "experts.0.up.qzeros": torch.zeros(1, 2, dtype=torch.int32),
        ...     "experts.0.up.scales": torch.ones(1, 16),
        ... }
        >>> from_gptq(state_dict, "experts.*.up")
        QuantizedWeight(format='int4', shape=(1, 16, 64), dtype=torch.bfloat16)
    """
    tensors = _Tensors("from_gptq", state_dict, name)
    weight = _gptq(tensors, zero_offset)
    advice = "; from_gptq_experts reads gate, up and down together, and act-order of down"
    _check_order(tensors, ".g_idx", weight.g_idx, weight.group, advice)
    return _int4(weight.data, weight.scale, weight.zero, dtype)


def from_gptq_experts(
    state_dict: Mapping[str, Tensor],
    gate: str,
    up: str,
    down: str,
    *,
    zero_offset: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]:
    """Loads the three weights of GPTQ experts. `down` may be in act-order.

    Act-order scatters the columns of a group. The columns of `down` are hidden units, whose order is free:
    they are sorted by group, for each expert, and the rows of `gate` and `up` alike, so that the experts
    compute the same function. The columns of `gate` and `up` are x's, so act-order of those is refused.

    Args:
        state_dict: as that of `from_gptq`, except for `<down>.g_idx`, which may be any assignment of in / g
            groups to g columns each.
        gate: a name, e.g. "model.layers.3.mlp.experts.*.gate_proj".
        up: likewise.
        down: likewise.
        zero_offset: as that of `from_gptq`.
        dtype: the results'.

    Returns:
        w1, w2, w3: the weights of gate, down and up, of format int4.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as `from_gptq`; the three do not fit each other; gate or up is in act-order; or
            one of them has a bias (not zero), whose order would be another one than that of w1 and w3.

    Example:
        >>> from fused_moe.quantized import from_gptq_experts
        >>> state_dict = {}
        >>> for name in ("gate", "up", "down"):  # in = out = 64
        ...     state_dict[f"experts.0.{name}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
        ...     state_dict[f"experts.0.{name}.qzeros"] = torch.zeros(1, 8, dtype=torch.int32)
        ...     state_dict[f"experts.0.{name}.scales"] = torch.ones(1, 64)
        >>> w1, w2, w3 = from_gptq_experts(state_dict, *(f"experts.*.{n}" for n in ("gate", "up", "down")))
        >>> w2.shape
        torch.Size([1, 64, 64])
    """
    fn = "from_gptq_experts"
    sources = [_Tensors(fn, state_dict, name) for name in (gate, up, down)]
    w1, w3, w2 = (_gptq(tensors, zero_offset) for tensors in sources)
    E, out, hidden = w2.shape
    for tensors, w in zip(sources[:2], (w1, w3), strict=True):
        if w.shape != (E, hidden, w1.shape[2]):
            expected = f"{tensors.name} (E, out, in) = {(E, hidden, w1.shape[2])}, to fit {down} {w2.shape}"
            fail(ValueError, fn, expected, w.shape)
        advice = "; the order of gate's and up's columns is x's, so only down may have act-order"
        _check_order(tensors, ".g_idx", w.g_idx, w.group, advice)
    if _first_out_of_order(w2.g_idx, w2.group) is not None:
        for tensors in sources[:2]:
            _check_no_bias(tensors)
        assert w2.g_idx is not None
        groups, order = torch.sort(w2.g_idx, stable=True)
        if _first_out_of_order(groups, w2.group) is not None:
            expected = f"{down}.g_idx with {w2.group} columns in each group"
            fail(ValueError, fn, expected, "other numbers of them")
        w2 = w2._replace(data=_columns(w2.data, order))
        w1, w3 = (
            w._replace(data=_rows(w.data, order), scale=_rows(w.scale, order), zero=_rows(w.zero, order))
            for w in (w1, w3)
        )
    first, second, third = (_int4(w.data, w.scale, w.zero, dtype) for w in (w1, w2, w3))
    return first, second, third


def from_awq(
    state_dict: Mapping[str, Tensor], name: str, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Loads AWQ of 4 bits, as version "gemm" of AutoAWQ writes it.

    Args:
        state_dict: `<name>.qweight` int32 (in, out / 8), whose word holds rows 0, 2, 4, 6, 1, 3, 5, 7 of the
            weight, the first in the lowest bits; `<name>.qzeros` int32 (in / g, out / 8), packed alike; and
            `<name>.scales` floating (in / g, out). g is 32, 64 or 128.
        name: e.g. "model.layers.3.mlp.experts.*.up_proj".
        dtype: the result's.

    Returns:
        A QuantizedWeight of format int4, without zero points if all of them are 8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor is missing, or has another shape or group size.

    Source: awq.modules.linear.gemm and awq.utils.packing_utils of AutoAWQ 0.2.9.

    Example:
        >>> from fused_moe.quantized import from_awq
        >>> state_dict = {
        ...     "experts.0.up.qweight": torch.zeros(64, 2, dtype=torch.int32),  # in = 64, out / 8 = 2
        ...     "experts.0.up.qzeros": torch.zeros(1, 2, dtype=torch.int32),
        ...     "experts.0.up.scales": torch.ones(1, 16),
        ... }
        >>> from_awq(state_dict, "experts.*.up")
        QuantizedWeight(format='int4', shape=(1, 16, 64), dtype=torch.bfloat16)
    """
    tensors = _Tensors("from_awq", state_dict, name)
    data = tensors.get(".qweight", (torch.int32,), ("in", "out / 8"), _awq_data, multiple=GROUPS[0])
    rows, cols = data.size(1), 2 * data.size(2)
    scale = tensors.get(".scales", SCALES, ("in / g", rows), _transposed)
    _group_size(tensors, ".scales", cols, scale.size(2))
    zero = tensors.get(".qzeros", (torch.int32,), (scale.size(2), rows // 8), _awq_codes)
    return _int4(data, scale, _signed(zero), dtype)


def from_mxfp4(
    state_dict: Mapping[str, Tensor], name: str, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeight:
    """Loads MXFP4 as gpt-oss publishes it, whose experts are stacked.

    The rows of its `gate_up_proj` alternate between gate and up: give `fused_experts` layout="interleaved".
    MXFP4 of compressed-tensors is read by `from_compressed_tensors`.

    Args:
        state_dict: `<name>_blocks` uint8 (E, out, in / 32, 16), two codes per byte, the even column in the
            lower half; `<name>_scales` uint8 (E, out, in / 32), which mean 2^(scale - 127). Or
            `<name>.blocks` and `<name>.scales`, as of a QuantizedWeight's state_dict.
        name: e.g. "model.layers.3.mlp.experts.gate_up_proj".
        dtype: the result's.

    Returns:
        A QuantizedWeight of format mxfp4.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor is missing, or has another shape; or `*` is in the name.

    Source: gpt_oss/torch/weights.py of openai/gpt-oss; transformers.integrations.mxfp4.

    Example:
        >>> from fused_moe.quantized import from_mxfp4
        >>> state_dict = {
        ...     "gate_up_proj_blocks": torch.zeros(4, 8, 2, 16, dtype=torch.uint8),  # in / 32 = 2
        ...     "gate_up_proj_scales": torch.full((4, 8, 2), 127, dtype=torch.uint8),
        ... }
        >>> from_mxfp4(state_dict, "gate_up_proj")
        QuantizedWeight(format='mxfp4', shape=(4, 8, 64), dtype=torch.bfloat16)
    """
    fn = "from_mxfp4"
    if isinstance(name, str) and "*" in name:
        fail(ValueError, fn, "a name without *, since gpt-oss stacks its experts", repr(name))
    tensors = _Tensors(fn, state_dict, name)
    joint = "." if ".blocks" in tensors else "_"
    blocks = tensors.get(joint + "blocks", (torch.uint8,), ("out", "in / 32", MX_GROUP // 2))
    E, rows, groups, _ = blocks.shape
    scale = tensors.get(joint + "scales", (torch.uint8,), (rows, groups))
    shape = E, rows, groups * MX_GROUP
    return QuantizedWeight(blocks.flatten(-2), scale, format="mxfp4", shape=shape, dtype=dtype)


# --- tensors of a checkpoint ------------------------------------------------------------------------------


class _Tensors:
    """The tensors whose names begin with `name`, each for all experts."""

    def __init__(self, fn: str, state_dict: Mapping[str, Tensor], name: str):
        if not isinstance(state_dict, Mapping):
            fail(TypeError, fn, "state_dict to be a mapping of names to tensors", type(state_dict).__name__)
        if not isinstance(name, str):
            fail(TypeError, fn, "name to be a str", type(name).__name__)
        if name.count("*") > 1:
            fail(ValueError, fn, "a name with one *, for the number of the expert", repr(name))
        self.fn, self.state_dict, self.name = fn, state_dict, name
        self.stacked = "*" not in name
        self.experts = [name] if self.stacked else self._numbered()
        self.num_experts = None if self.stacked else len(self.experts)

    def _numbered(self) -> list[str]:
        before, after = map(re.escape, self.name.split("*"))
        matches = (re.match(rf"{before}(\d+){after}\.", key) for key in self.state_dict)
        found = {int(match[1]) for match in matches if match}
        if not found:
            fail(ValueError, self.fn, f"tensors {self.name}.<...>, * being a number", "none")
        if len(found) <= max(found):
            missing = (self.name.replace("*", str(e)) for e in range(max(found)) if e not in found)
            fail(ValueError, self.fn, f"experts 0 to {max(found)} of {self.name}", f"no {_listed(missing)}")
        return [self.name.replace("*", str(e)) for e in range(len(found))]

    def __contains__(self, suffix: str) -> bool:
        return any(expert + suffix in self.state_dict for expert in self.experts)

    def get(
        self,
        suffix: str,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | str, ...] | None,
        convert: Callable[[Tensor], Tensor] = lambda t: t,
        multiple: int = 1,
    ) -> Tensor:
        """The experts' tensors, each after `convert`, stacked. They must agree. shape is that of one expert:
        the sizes that are known, and names of those that the tensor tells; or None if any shape will do. Its
        first size is a multiple of `multiple`."""
        fn, keys = self.fn, [expert + suffix for expert in self.experts]
        missing = [key for key in keys if key not in self.state_dict]
        if missing:
            fail(ValueError, fn, f"tensors {self.name}{suffix}", f"no {_listed(missing)}")
        tensors = [self.state_dict[key] for key in keys]
        if shape is not None and self.stacked:
            shape = ("E" if self.num_experts is None else self.num_experts, *shape)
        for key, tensor in zip(keys, tensors, strict=True):
            dim = len(shape) if shape is not None else getattr(tensor, "ndim", 0)
            check_stored(fn, key, tensor, dim, dtypes)
            check_device(fn, key, tensor, keys[0], tensors[0])
            for size, expected in zip(tensor.shape, shape or (), strict=False):
                if isinstance(expected, int) and size != expected:
                    sizes = ", ".join(map(str, shape or ()))
                    fail(ValueError, fn, f"{key} of shape ({sizes})", tuple(tensor.shape))
            first = int(self.stacked)
            if multiple > 1 and tensor.size(first) % multiple:
                expected = f"{key} with size({first}), in, a multiple of {multiple}"
                fail(ValueError, fn, expected, tuple(tensor.shape))
            dtypes, shape = (tensor.dtype,), tuple(tensor.shape)
        if not self.stacked:
            return torch.stack([convert(tensor.detach()) for tensor in tensors])
        if self.num_experts is None:
            self.num_experts = tensors[0].size(0)
        return convert(tensors[0].detach())


def _listed(names: Iterable[str], most: int = 8) -> str:
    """The first few names, and whether there are more."""
    names = list(islice(names, most + 1))
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT


def _group_size(tensors: _Tensors, suffix: str, cols: int, groups: int) -> int:
    for group in GROUPS:
        if groups * group == cols:
            return group
    expected = f"{tensors.name}{suffix} of groups of {' or '.join(map(str, GROUPS))} columns"
    fail(ValueError, tensors.fn, expected, f"{groups} of them for {cols} columns")


def _g_idx(tensors: _Tensors, suffix: str, cols: int) -> Tensor | None:
    """The groups of columns (E, in), if they are stored."""
    return tensors.get(suffix, (torch.int32, torch.int64), (cols,)) if suffix in tensors else None


def _first_out_of_order(g_idx: Tensor | None, group: int) -> int | None:
    """The first expert with a column k that is not in group k // group. Meta tensors tell none."""
    if g_idx is None or g_idx.is_meta:
        return None
    in_order = torch.arange(g_idx.size(1), device=g_idx.device) // group
    experts = (g_idx != in_order).any(1).nonzero()
    return int(experts[0]) if len(experts) else None


def _check_order(tensors: _Tensors, suffix: str, g_idx: Tensor | None, group: int, advice: str) -> None:
    e = _first_out_of_order(g_idx, group)
    if e is not None:
        key = tensors.name.replace("*", str(e)) + suffix
        found = "act-order" + (f" in expert {e}" if tensors.stacked else "")
        fail(ValueError, tensors.fn, f"{key} = k // {group} for column k", found + advice)


def _check_no_bias(tensors: _Tensors) -> None:
    if ".bias" in tensors and tensors.get(".bias", SCALES, ("out",)).any():
        found = "one, which would have to be sorted as the columns of down are"
        fail(ValueError, tensors.fn, f"no bias {tensors.name}.bias beside act-order", found)


# --- compressed-tensors -----------------------------------------------------------------------------------


def _plain_codes(tensors: _Tensors, dtype: torch.dtype) -> QuantizedWeight:
    """A weight of 8 bits, one code per element."""
    data = tensors.get(".weight", (E4M3, torch.int8), ("out", "in"))
    E, rows, cols = data.shape
    format = "fp8" if data.dtype == E4M3 else "int8"
    scale = tensors.get(".weight_scale", SCALES, None)
    if scale.shape[:1] == (E,) and scale.numel() == E:
        scale = scale.reshape(E, 1, 1)
    shapes = [(E, 1, 1), (E, rows, 1)]
    if format == "fp8":
        shapes.append((E, -(-rows // BLOCK), -(-cols // BLOCK)))
    if scale.shape not in shapes:
        own = slice(0 if tensors.stacked else 1, None)
        expected = f"{tensors.name}.weight_scale of shape {' or '.join(str(shape[own]) for shape in shapes)}"
        fail(ValueError, tensors.fn, expected, tuple(scale.shape[own]))
    if scale.shape not in shapes[:2]:
        format, scale = "fp8_block", scale.float()
    if ".weight_zero_point" in tensors:
        zero = tensors.get(".weight_zero_point", (torch.int8, E4M3, *SCALES), None)
        if not zero.is_meta and zero.float().any():
            fail(ValueError, tensors.fn, f"{tensors.name}.weight_zero_point of zeros for 8 bits", "others")
    return QuantizedWeight(data, scale, format=format, shape=data.shape, dtype=dtype)


def _check_weight_shape(tensors: _Tensors, shape: tuple[int, ...]) -> None:
    if ".weight_shape" not in tensors:
        return
    stored = tensors.get(".weight_shape", (torch.int64, torch.int32), None)
    if stored.dim() < 1 or stored.size(-1) < 2:
        expected = f"{tensors.name}.weight_shape of two elements for each expert"
        fail(ValueError, tensors.fn, expected, f"shape {tuple(stored.shape)}")
    if not stored.is_meta and (stored[..., -2:].cpu() != torch.tensor(shape[1:])).any():
        expected = f"{tensors.name}.weight_shape = {shape[1:]}, of codes of 4 bits"
        fail(ValueError, tensors.fn, expected, stored.tolist())


def _signed_zeros(tensors: _Tensors, rows: int, groups: int) -> Tensor | None:
    name = tensors.name + ".weight_zero_point"
    stored = tensors.get(".weight_zero_point", (torch.int32, torch.int8), ("out", groups))
    packed = stored.dtype == torch.int32
    expected = -(-rows // 8) if packed else rows
    if stored.size(1) != expected:
        fail(ValueError, tensors.fn, f"{name} {stored.dtype} of {expected} rows", stored.size(1))
    if packed:
        return _unless_zero(formats.unpack_zeros(stored, rows))
    check_range(tensors.fn, name, stored, -8, 7)
    return _unless_zero(stored)


# --- codes of 4 bits --------------------------------------------------------------------------------------


def _int4(data: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> QuantizedWeight:
    E, rows, width = data.shape
    return QuantizedWeight(data, scale, zero, format="int4", shape=(E, rows, 2 * width), dtype=dtype)


def _as_bytes(words: Tensor) -> Tensor:
    """Words that hold eight codes of a row each, the first in the lowest bits, as bytes of two codes."""
    return words.contiguous().view(torch.uint8)


def _signed(zero: Tensor) -> Tensor | None:
    """Zero points from 0 to 15 as those of codes from -8 to 7."""
    return _unless_zero(zero.to(torch.int8) - INT4_OFFSET)


def _unless_zero(zero: Tensor) -> Tensor | None:
    """Zero points, or None if all are 0, so that no kernel reads them."""
    return None if not zero.is_meta and not zero.any() else zero


class _Gptq(NamedTuple):
    data: Tensor
    scale: Tensor
    zero: Tensor | None
    g_idx: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        E, rows, width = self.data.shape
        return E, rows, 2 * width


def _gptq(tensors: _Tensors, zero_offset: int) -> _Gptq:
    check_int(tensors.fn, "zero_offset", zero_offset)
    if zero_offset not in (0, 1):
        fail(ValueError, tensors.fn, "zero_offset 0 or 1", repr(zero_offset))
    data = tensors.get(".qweight", (torch.int32,), ("in / 8", "out"), _transposed)
    rows, cols = data.size(1), 8 * data.size(2)
    scale = tensors.get(".scales", SCALES, ("in / g", rows), _transposed)
    group = _group_size(tensors, ".scales", cols, scale.size(2))
    words = tensors.get(".qzeros", (torch.int32,), (scale.size(2), -(-rows // 8)), _transposed)
    zero = formats.unpack_rows(words + zero_offset * 0x11111111, rows)
    return _Gptq(_as_bytes(data), scale, _signed(zero), _g_idx(tensors, ".g_idx", cols), group)


def _columns(data: Tensor, order: Tensor) -> Tensor:
    """Packed codes with their columns in the order of each expert; one at a time, since they are unpacked."""
    return torch.stack(
        [formats.pack_nibbles(formats.nibbles(d)[:, o]) for d, o in zip(data, order, strict=True)]
    )


@overload
def _rows(tensor: Tensor, order: Tensor) -> Tensor: ...
@overload
def _rows(tensor: Tensor | None, order: Tensor) -> Tensor | None: ...
def _rows(tensor: Tensor | None, order: Tensor) -> Tensor | None:
    """A tensor (E, out, n) with its rows in the order of each expert."""
    if tensor is None:
        return None
    return torch.stack([t[o] for t, o in zip(tensor, order, strict=True)])


def _awq_codes(words: Tensor) -> Tensor:
    """AWQ's codes (..., n, out / 8) as uint8 (..., out, n)."""
    # The first four of a word's eight codes are the even rows.
    halves = formats.nibbles(_as_bytes(words)).unflatten(-1, (-1, 2, 4))
    return halves.mT.flatten(-3).mT


def _awq_data(words: Tensor) -> Tensor:
    return formats.pack_nibbles(_awq_codes(words))
