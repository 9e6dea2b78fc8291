"""Experts of quantised checkpoints: as QuantizedWeights, dequantised, and back.

A checkpoint's quantization_config names the method, and the tensors that are there say what is quantised:

| quant_method         | tensors of a weight                                          | back as             |
| -------------------- | ------------------------------------------------------------ | ------------------- |
| `fp8`                | `.weight`, `.weight_scale_inv`: blocks of 128 x 128          | the same            |
| `compressed-tensors` | `.weight_packed` or `.weight`, `.weight_scale`, zero points  | the same            |
| `mxfp4`              | `_blocks`, `_scales` of gpt-oss, gate and up row by row      | the same            |
| `gptq`, `awq`        | `.qweight`, `.qzeros`, `.scales`, `.g_idx`                   | compressed-tensors  |

`fused_moe.quantized`'s loaders read them. FusedMoE's routers, shared experts and latent layers are float:
where a checkpoint has them quantised, they are dequantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from ..checks import fail
from ..quantized import (
    QuantizedWeight,
    formats,
    from_awq,
    from_compressed_tensors,
    from_fp8_block,
    from_gptq,
    from_gptq_experts,
    from_mxfp4,
)
from .block import Block, Source, rows_of

COMPRESSED = "compressed-tensors"
# What follows the name of a quantised weight, by how it is read.
PARTS = {
    "fp8": (".weight", ".weight_scale_inv", "", "_scale_inv"),
    COMPRESSED: (
        ".weight_packed", ".weight", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
    ),
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "awq": (".qweight", ".qzeros", ".scales"),
    "mxfp4": ("_blocks", "_scales", ".blocks", ".scales"),
}  # fmt: skip
# Those that only a quantised weight has, and how it is then read; None: as the method says.
MARKS = {
    ".weight_scale_inv": "fp8",
    "_scale_inv": "fp8",
    ".weight_packed": COMPRESSED,
    ".weight_scale": COMPRESSED,
    ".qweight": None,
    "_blocks": "mxfp4",
    ".blocks": "mxfp4",
}
LINEAR_MARKS = (".weight_scale_inv", ".weight_packed", ".weight_scale", ".qweight")  # outside of MoE layers
# What is about activations and caches, which are not quantised here; and the order of columns, which is
# refused where it is another than usual.
UNREAD = (".weight_g_idx",) + tuple(
    f".{of}_{what}"
    for of in ("input", "output", "activation", "k", "v", "q")
    for what in ("scale", "zero_point", "global_scale")
)
EXPERTS = ("experts.w1", "experts.w2", "experts.w3")


def _fail(expected: str, found: object) -> NoReturn:
    fail(ValueError, "fused_moe.checkpoint", expected, found)


# --- the configuration ------------------------------------------------------------------------------------


def method_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration's quantization_config, {} if there is none. Raises ValueError if no loader reads it."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        inner = config.get("text_config")
        return method_of(inner) if isinstance(inner, Mapping) else {}
    if not isinstance(found, Mapping):
        _fail("quantization_config to be a dict", repr(found))
    method = found.get("quant_method")
    if method not in PARTS:
        _fail(f"a quant_method of {', '.join(PARTS)}", repr(method))
    checked: dict[str, dict[str, tuple]] = {
        "gptq": {"bits": (4,), "checkpoint_format": ("gptq", "gptq_v2")},
        "awq": {"bits": (4,), "version": ("gemm", "GEMM")},
        "fp8": {"weight_block_size": ([128, 128], (128, 128))},
    }
    for name, known in checked.get(method, {}).items():
        if name in found and found[name] not in known:
            _fail(f"{name} of quant_method {method} to be {' or '.join(map(repr, known))}", repr(found[name]))
    return found


def one_group_size(method: Mapping[str, Any], sizes: Mapping[str, int]) -> int | None:
    """The columns per scale, of which compressed-tensors stores one number for all modules; None without
    modules. `sizes` has each module's. Raises if they differ."""
    if not sizes:
        return None
    counts = Counter(sizes.values())
    said = method.get("group_size")
    expected = said if said in counts else max(counts, key=counts.__getitem__)
    others = [f"{size} in {name}" for name, size in sizes.items() if size != expected]
    if others:
        more = ", ..." if len(others) > 8 else ""
        _fail(f"{expected} columns per scale in all int4 weights", ", ".join(others[:8]) + more)
    return expected


def as_compressed(method: Mapping[str, Any], group_size: int, ignore: Iterable[str]) -> dict[str, Any]:
    """The quantization_config of compressed-tensors for int4 weights that were GPTQ's or AWQ's."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group_size, "dynamic": False}
    weights["symmetric"] = is_symmetric(method)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": COMPRESSED,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(ignore),
    }


def is_symmetric(method: Mapping[str, Any]) -> bool:
    """Whether GPTQ's or AWQ's weights have no zero points but the middle of their codes."""
    return not method.get("zero_point", True) if method["quant_method"] == "awq" else method.get("sym", True)


# --- reading ----------------------------------------------------------------------------------------------


class Codes(NamedTuple):
    """Where one quantised weight is."""

    place: Source
    kind: str  # a key of PARTS

    @property
    def stem(self) -> str:
        """Its name without what follows; * is the number of the expert."""
        return self.place.name.removesuffix(".weight")


class Layer(NamedTuple):
    """One layer of a checkpoint, of which some may be quantised."""

    stored: Mapping[str, Tensor]  # its tensors, as they are
    experts: dict[str, Codes]  # FusedMoE's experts.w1, ... that are quantised
    dense: dict[str, Codes]  # FusedMoE's other tensors that are
    unread: list[str]  # keys that nothing reads
    block: Block  # of what is float, or dequantised
    source: Mapping[str, Tensor]  # the tensors of that block


class View(Mapping[str, Tensor]):
    """Some of the tensors of another Mapping, and others that are made when they are asked for."""

    def __init__(self, source: Mapping, keys: Iterable[str], made: Mapping[str, Callable] | None = None):
        self._source, self._made = source, made or {}
        self._keys = dict.fromkeys([*keys, *self._made])

    def __getitem__(self, key: str) -> Tensor:
        if key in self._made:
            return self._made[key]()
        if key not in self._keys:
            raise KeyError(key)
        return self._source[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _Changed(Mapping[str, Tensor]):
    """The tensors of another Mapping, each in another form."""

    def __init__(self, source: Mapping[str, Tensor]):
        self._source = source

    def __contains__(self, key: object) -> bool:
        return key in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class OnMeta(_Changed):
    """Their dtypes and shapes. Each tensor is asked for once, and what had to be read for it is freed."""

    def __init__(self, source: Mapping[str, Tensor]):
        super().__init__(source)
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._found:
            self._found[key] = self._source[key].to("meta")
        return self._found[key]


class _One(_Changed):
    """Those of one matrix, as of a single stacked expert."""

    def __getitem__(self, key: str) -> Tensor:
        return self._source[key].unsqueeze(0)


def look(
    block: Block,
    source: Mapping[str, Tensor],
    method: Mapping[str, Any],
    dtype: torch.dtype | None = torch.float32,
) -> Layer:
    """What is quantised of a layer. Nothing is read.

    Args:
        block: of `blocks(config)`.
        source: the checkpoint's tensors by key.
        method: of `method_of(config)`.
        dtype: of tensors that are dequantised; None: none is, and the result's block is of float tensors
            alone.
    """
    stored = View(source, (key for key in source if key.startswith(block.prefixes)))
    experts: dict[str, Codes] = {}
    dense: dict[str, Codes] = {}
    parts: dict[str, Codes] = {}
    for name, place in ((name, place) for name, places in block.tensors.items() for place in places):
        found = experts if name in EXPERTS else dense
        kind = kind_of(stored, place.name.removesuffix(".weight").replace("*", "0"), method)
        if kind is None or name in found:
            continue
        codes = Codes(place, kind)
        if place.transposed and codes.kind != "mxfp4":
            _fail(f"{place.name} not to be transposed", f"one that is quantised by {codes.kind}")
        parts |= dict.fromkeys(keys_of(stored, codes, block.settings["num_experts"]), codes)
        found[name] = codes
    unread = [key for key in stored if key.endswith(UNREAD) and parts.get(key) not in dense.values()]
    without = experts.keys() if dtype is not None else experts.keys() | dense.keys()
    tensors = {name: places for name, places in block.tensors.items() if name not in without}
    made = {
        codes.place.name: partial(_dequantized, stored, codes, method, cast(torch.dtype, dtype))
        for name, codes in dense.items()
        if name not in without
    }
    hidden = {*parts, *unread}
    rest = View(stored, (key for key in stored if key not in hidden), made)
    return Layer(stored, experts, dense, unread, block._replace(tensors=tensors), rest)


def kind_of(source: Mapping[str, Tensor], stem: str, method: Mapping[str, Any]) -> str | None:
    """How a weight is quantised; None if it is not."""
    for mark, kind in MARKS.items():
        if stem + mark in source:
            named = method.get("quant_method")
            if kind is None and named not in ("gptq", "awq"):
                _fail(f"a quantization_config of gptq or awq, as there is {stem}{mark}", named or "none")
            return kind or named
    return None


def keys_of(source: Mapping[str, Tensor], codes: Codes, num_experts: int = 1) -> list[str]:
    """The keys of a weight, of all experts."""
    stem = codes.stem
    stems = [stem.replace("*", str(e)) for e in range(num_experts)] if "*" in stem else [stem]
    return [s + part for s in stems for part in PARTS[codes.kind] if s + part in source]


def read(
    layer: Layer, shapes: Mapping[str, tuple[int, ...]], method: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, QuantizedWeight]]:
    """The quantised experts of a layer, in FusedMoE's names. `shapes` are theirs by the configuration."""
    if len(layer.experts) == 3 and {codes.kind for codes in layer.experts.values()} == {"gptq"}:
        names = [layer.experts[name].stem for name in ("experts.w1", "experts.w3", "experts.w2")]
        options: dict[str, Any] = {"zero_offset": _zero_offset(method), "dtype": dtype}
        made = dict(zip(EXPERTS, from_gptq_experts(layer.stored, *names, **options), strict=True))
        for name in EXPERTS:
            _check(layer.experts[name], made[name], shapes[name])
            yield name, made.pop(name)
        return
    stem: str | None = None
    both: QuantizedWeight | None = None
    for name, codes in sorted(layer.experts.items(), key=lambda item: item[1].stem):
        if codes.stem != stem:  # gate and up may be in one
            both = None
            stem, both = codes.stem, _load(layer.stored, codes, method, dtype)
        assert both is not None
        found = _rows(codes, both)
        _check(codes, found, shapes[name])
        yield name, found
        del found


def matrix(source: Mapping[str, Tensor], codes: Codes, method: Mapping[str, Any]) -> QuantizedWeight:
    """A matrix that is quantised, as the weight of a single expert."""
    return _load(_One(source), codes, method, torch.bfloat16)


def _dequantized(source, codes: Codes, method, dtype: torch.dtype) -> Tensor:
    return matrix(source, codes, method).dequantize(dtype)[0]


def _load(
    source: Mapping[str, Tensor], codes: Codes, method: Mapping[str, Any], dtype: torch.dtype
) -> QuantizedWeight:
    if codes.kind == "gptq":
        return from_gptq(source, codes.stem, zero_offset=_zero_offset(method), dtype=dtype)
    loaders = {
        "fp8": from_fp8_block,
        COMPRESSED: from_compressed_tensors,
        "awq": from_awq,
        "mxfp4": from_mxfp4,
    }
    return loaders[codes.kind](source, codes.stem, dtype=dtype)


def _zero_offset(method: Mapping[str, Any]) -> int:
    return int(method.get("checkpoint_format", "gptq") == "gptq")


def _check(codes: Codes, w: QuantizedWeight, shape: tuple[int, ...]) -> None:
    if tuple(w.shape) != tuple(shape):
        _fail(f"{codes.stem} of shape {tuple(shape)} in all, as the configuration says", tuple(w.shape))


def _rows(codes: Codes, w: QuantizedWeight) -> QuantizedWeight:
    """Gate or up of a weight that is both."""
    if codes.place.rows == "all":
        return w
    E, rows, cols = w.shape
    if codes.kind not in ("fp8", "mxfp4"):
        _fail(f"gate and up of {codes.stem} apart, quantised by {codes.kind}", "one weight")
    if codes.kind == "fp8" and (codes.place.rows not in ("upper", "lower") or rows % (2 * formats.BLOCK)):
        _fail(f"{codes.stem}, gate above up, with a multiple of {2 * formats.BLOCK} rows", rows)
    data, scale = (rows_of(tensor, codes.place.rows, 1) for tensor in (w.data, w.scale))
    return QuantizedWeight(data, scale, format=w.format, shape=(E, rows // 2, cols), dtype=w.dtype)


# --- writing ----------------------------------------------------------------------------------------------

# How a weight's tensors are published: what follows its name -> dtype, and shape for each expert.
# QuantizedWeight has one form for several: scales of fp8_block in float32, zero points in int8, none where
# all are in the middle.
Published = dict[str, tuple[str, list[int]]]


def form_of(
    layer: Layer, name: str, own: Mapping[str, Tensor], method: Mapping[str, Any]
) -> Published | None:
    """How the weight is in this checkpoint, if there is a way back and `to_hf` has to be told."""
    codes = layer.experts[name]
    if codes.kind in ("gptq", "awq"):
        return None
    first = codes.stem.replace("*", "0")
    found = {
        part: _described(
            layer.stored[first + part], is_one="*" in codes.stem, halves=codes.place.rows != "all"
        )
        for part in PARTS[codes.kind]
        if first + part in layer.stored and part not in UNREAD
    }
    usual = {
        part: _described(tensor, is_one=False, halves=False)
        for part, tensor in tensors_of(own, None, method, codes.place).items()
    }
    return None if found == usual else found


def _described(tensor: Tensor, is_one: bool, halves: bool) -> tuple[str, list[int]]:
    shape = list(tensor.shape if is_one else tensor.shape[1:])
    if halves:
        shape[0] //= 2
    return str(tensor.dtype).removeprefix("torch."), shape


def own_tensors(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of a quantised weight in FusedMoE's state_dict, by the names that the weight has."""
    return {key.removeprefix(f"{name}."): state[key] for key in state if key.startswith(f"{name}.")}


def format_of(own: Mapping[str, Tensor]) -> str:
    if "smooth" in own:
        _fail("weights without smooth, which no checkpoint has a place for", "one with")
    for format, rules in formats.FORMATS.items():
        data, scale = (own.get(rules.names[key]) for key in ("data", "scale"))
        is_words = rules.layout == "words"
        if data is not None and scale is not None and (is_words or data.dtype == rules.data_dtype):
            return format
    _fail("the tensors of a QuantizedWeight", ", ".join(own))


def shape_of(own: Mapping[str, Tensor]) -> tuple[int, int, int]:
    """(E, out, in)"""
    format = format_of(own)
    data = own[formats.FORMATS[format].names["data"]]
    per_element = {"words": 8, "blocks": 2, "data": 1}[formats.FORMATS[format].layout]
    return data.size(0), data.size(1), data[0, 0].numel() * per_element


def to_hf(
    block: Block,
    codes: Mapping[str, Mapping[str, Tensor]],
    method: Mapping[str, Any],
    forms: Mapping[str, Published],
) -> Iterator[tuple[str, Tensor]]:
    """Quantised experts under their published keys.

    Args:
        block: of `blocks(config)`.
        codes: {experts.w1, ...: the tensors of its QuantizedWeight}
        method: the quantization_config; {}: what suits the formats.
        forms: how each was published, where that is not the usual form.
    """
    together: dict[str, list[tuple[Source, dict[str, Tensor]]]] = {}  # gate and up may be in one
    for name, own in codes.items():
        place = block.tensors[name][0]
        _check_place(place, own)
        together.setdefault(place.name, []).append((place, tensors_of(own, forms.get(name), method, place)))
    for name, members in together.items():
        stem = name.removesuffix(".weight")
        for part, tensor in members[0][1].items():
            if "*" in stem:
                for e, one in enumerate(tensor):
                    yield stem.replace("*", str(e)) + part, one
            elif len(members) == 1:
                yield stem + part, tensor
            else:
                E, rows, *others = tensor.shape
                both = tensor.new_empty(E, 2 * rows, *others)
                for place, tensors in members:
                    rows_of(both, place.rows, 1).copy_(tensors[part])
                yield stem + part, both


def _check_place(place: Source, own: Mapping[str, Tensor]) -> None:
    """Experts that are stored together have a layout for some formats alone, which `look` and `read` know."""
    format, (_, rows, _) = format_of(own), shape_of(own)
    in_blocks = format == "fp8_block" and not place.transposed
    in_blocks &= place.rows == "all" or (place.rows in ("upper", "lower") and rows % formats.BLOCK == 0)
    if "*" not in place.name and format != "mxfp4" and not in_blocks:
        _fail(f"{place.name} of format mxfp4, as all experts are in one tensor", format)


def tensors_of(
    own: Mapping[str, Tensor], form: Published | None, method: Mapping[str, Any], place: Source
) -> dict[str, Tensor]:
    """The tensors (E, ...) of a weight as they are published, by what follows its name."""
    format = format_of(own)
    names = formats.FORMATS[format].names
    data, scale, zero = (own.get(names[key]) if key in names else None for key in ("data", "scale", "zero"))
    assert data is not None and scale is not None  # `format_of` has found them
    if form is None:
        form = _usual_parts(format, zero is not None, method, place)
    made: dict[str, Tensor] = {}
    for part, (dtype, shape) in form.items():
        wanted = None if dtype is None else getattr(torch, dtype)
        if part in ("", ".weight", ".weight_packed", "_blocks", ".blocks"):
            tensor = data.flatten(-2) if format == "mxfp4" and part == ".weight_packed" else data
        elif part == ".weight_shape":
            tensor = torch.tensor([shape_of(own)[1:]] * data.size(0), dtype=wanted)
        elif part == ".weight_zero_point":
            tensor = _zero_points(format, scale, zero, wanted)
        else:
            tensor = scale if wanted is None else scale.to(wanted)
        made[part] = tensor if shape is None else tensor.reshape(-1, *shape)
    return made


def _usual_parts(format: str, has_zero: bool, method: Mapping[str, Any], place: Source) -> dict[str, tuple]:
    """{what follows the name: (None or dtype, None)}"""
    as_is = (None, None)
    if format == "fp8_block" and method.get("quant_method", "fp8") == "fp8":
        joint = "" if "*" not in place.name else ".weight"
        return {joint: as_is, f"{joint}_scale_inv": as_is}
    if format == "mxfp4" and "*" not in place.name:
        return {"_blocks": as_is, "_scales": as_is}
    if format in ("int4", "mxfp4"):
        parts: dict[str, tuple] = {".weight_packed": as_is, ".weight_scale": as_is}
        if format == "int4":
            parts[".weight_shape"] = ("int64", None)
            named = method.get("quant_method")
            if has_zero or (named in ("gptq", "awq") and not is_symmetric(method)):
                parts[".weight_zero_point"] = ("int32", None)
        return parts
    return {".weight": as_is, ".weight_scale": as_is}


def _zero_points(format: str, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(E, rows, n); packed eight to a word along the rows, the last one filled up with 0."""
    zero = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero
    if dtype != torch.int32 or format != "int4":
        return zero.to(dtype)
    return formats.pack_zeros(zero)
