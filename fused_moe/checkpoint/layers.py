"""One layer's tensors, from and to a Hugging Face checkpoint."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..activation import CONSTANTS
from ..checks import fail
from ..module import FusedMoE
from ..quantized.sharding import is_sharded, sharded_like
from . import families, quantized
from .block import Block, Source, rows_of
from .families import blocks, read_config
from .files import naming_files, open_folder

# FusedMoE's arguments that no configuration fixes.
FREE = ("load_balance_coeff", "router_dtype", "fp8")
FLOAT32 = "expert_bias"  # the tensor that is float32 beside others of any dtype
ROUTER = ("router.", "shared_expert_gate.")  # whose tensors have router_dtype, if there is one


def _fail(expected: str, found: object) -> NoReturn:
    fail(ValueError, "fused_moe.checkpoint", expected, found)


# --- settings ---------------------------------------------------------------------------------------------


def block_of(config: Any, layer: int | None) -> Block:
    """The MoE layer of this number, or any one where all are alike. Raises ValueError."""
    found = blocks(config)
    numbers = [b.layer for b in found]
    if layer is None:
        if not found:
            _fail("a MoE layer", "none in the configuration")
        other = next((b for b in found if b.settings != found[0].settings), None)
        if other is not None:
            differ = [k for k in other.settings if other.settings[k] != found[0].settings.get(k)]
            _fail(
                f"layer= one of {numbers}, whose settings differ",
                f"layer=None: {', '.join(differ)} of layers {found[0].layer} and {other.layer}",
            )
        return found[0]
    if layer not in numbers:
        _fail(f"layer= one of the MoE layers {numbers}", layer)
    return found[numbers.index(layer)]


def settings_of(config: Any, layer: int | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """FusedMoE's arguments, of the configuration and of the user, who may not contradict it."""
    settings = block_of(config, layer).settings
    parameters = inspect.signature(FusedMoE.__init__).parameters
    for name, value in overrides.items():
        if name not in parameters:
            raise TypeError(f"FusedMoE.from_hf: expected an argument of FusedMoE, found {name!r}")
        fixed = settings.get(name, parameters[name].default)
        if name not in FREE and value != fixed:
            _fail(f"{name}={fixed!r}, as the configuration has it", value)
    if "load_balance_coeff" in settings and overrides.get("load_balance_coeff", 0.0) is None:
        _fail("load_balance_coeff >= 0, as the checkpoint has a bias for the choice of experts", None)
    return settings | dict(overrides)


# --- tensors ----------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where one tensor of FusedMoE is: keys of a Mapping, one of each expert if the source has a star."""

    source: Source
    keys: list[str]


def _keys(source: Source, num_experts: int) -> list[str]:
    if "*" not in source.name:
        return [source.name]
    return [source.name.replace("*", str(e)) for e in range(num_experts)]


def _part(tensor: Tensor, name: str, source: Source) -> Tensor:
    """A view of a checkpoint's tensor, or of one expert's: that of FusedMoE's tensor `name` in it."""
    if source.transposed:
        tensor = tensor.mT
    return rows_of(tensor, source.rows, _dim(name, source))


def _dim(name: str, source: Source) -> int:
    """The dimension that `Source.rows` is about."""
    return 1 if name.startswith("experts.") and "*" not in source.name else 0


def _stored_shape(shape: torch.Size, name: str, source: Source) -> tuple[int, ...]:
    """The shape in a checkpoint of what is `shape` in FusedMoE."""
    stored = list(shape[1:] if "*" in source.name else shape)
    if source.rows == "first":
        stored.insert(0, 1)
    elif source.rows != "all":
        stored[_dim(name, source)] *= 2
    if source.transposed:
        stored[-2:] = stored[:-3:-1]
    return tuple(stored)


def shapes_of(block: Block) -> dict[str, torch.Size]:
    shapes = families.shapes_of(tuple(block.settings.items()))
    return {name: shape for name, shape in shapes.items() if name in block.tensors}


def find(block: Block, source: Mapping[str, Tensor]) -> dict[str, Place]:
    """Where each of the block's tensors is, by names, dtypes and shapes alone. Raises ValueError."""
    found: dict[str, Place] = {}
    there = set(source)  # a Mapping without a method for `in` reads the tensor to answer
    source = quantized.OnMeta(source)
    for name, shape in shapes_of(block).items():
        places = [Place(s, _keys(s, shape[0])) for s in block.tensors[name]]
        here = [p for p in places if all(key in there for key in p.keys)]
        if not here:
            begun = next((p for p in places if any(key in there for key in p.keys)), places[0])
            missing = next(key for key in begun.keys if key not in there)
            _fail(f"{missing}, for {name} of layer {block.layer}", "no such key")
        wrong = [next(_wrong(source, shape, name, p), None) for p in here]
        if None not in wrong:
            first = wrong[0]
            assert first is not None
            _fail(*first)
        found[name] = here[wrong.index(None)]
    used = {key for place in found.values() for key in place.keys}
    for key in there:
        if key.startswith(block.prefixes) and key not in used:
            _fail(f"none but the tensors of layer {block.layer}", f"{key}, which has no place in FusedMoE")
    return found


def _wrong(
    source: Mapping[str, Tensor], shape: torch.Size, name: str, place: Place
) -> Iterator[tuple[str, object]]:
    """What is expected and found of each tensor that does not fit."""
    stored, dtype = _stored_shape(shape, name, place.source), None
    for key in place.keys:
        tensor = source[key]
        if tuple(tensor.shape) != stored:
            yield f"{key} of shape {stored}", tuple(tensor.shape)
        if not tensor.is_floating_point() or tensor.element_size() == 1:  # e4m3 has scales elsewhere
            yield f"{key} of a floating dtype of 16 bits or more", tensor.dtype
        if tensor.dtype != (dtype := dtype or tensor.dtype):
            yield f"{key} of the dtype of {place.keys[0]}, {dtype}", tensor.dtype


def from_hf(
    block: Block,
    source: Mapping[str, Tensor],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    router_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Reads FusedMoE's tensors out of a checkpoint's: one layer, one tensor at a time.

    Args:
        block: of `blocks(config)`.
        source: the checkpoint's tensors by key, published or as transformers has them in memory. It may read
            each when asked for it: before all others for its shape, and then for its values. No more than one
            of them is held.
        device: of the results, by default each tensor's own.
        dtype: of the results, by default each tensor's own. expert_bias is float32 whatever dtype is.
        router_dtype: of the tensors that FusedMoE's router_dtype governs, if not dtype.

    Returns:
        Pairs of a name in FusedMoE's state_dict and a new tensor, contiguous, that shares no memory.

    Raises:
        ValueError: before anything is copied, with the key, what was expected and what was found: a key is
            missing, another begins with the layer's prefixes and has no place, a shape contradicts the
            configuration, or a dtype is not a floating one.

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        >>> block = checkpoint.blocks(config)[0]
        >>> moe = fused_moe.FusedMoE.from_hf(config)
        >>> tensors = dict(checkpoint.to_hf(block, moe.state_dict()))
        >>> state = dict(checkpoint.from_hf(block, tensors))
        >>> torch.equal(state["experts.w1"], moe.experts.w1)
        True
    """
    places = find(block, source)
    dtypes = dict.fromkeys(places, dtype)
    if router_dtype is not None:
        dtypes |= {name: router_dtype for name in places if name.startswith(ROUTER)}
    if FLOAT32 in places:
        dtypes[FLOAT32] = torch.float32
    return read(block, places, source, dtypes, device)


def read(
    block: Block,
    places: Mapping[str, Place],
    source: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype | None],
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """FusedMoE's tensors from the places that `find` has found, in new memory."""
    shapes = shapes_of(block)
    key, tensor = None, None  # gate and up may be in one tensor, so it is read once for both
    for name, place in sorted(places.items(), key=lambda item: item[1].keys[0]):
        for e, wanted in enumerate(place.keys):
            if key != wanted:
                tensor = None  # frees it before the next one is read
                key, tensor = wanted, source[wanted]
            assert tensor is not None
            if e == 0:
                out = torch.empty(
                    shapes[name], dtype=dtypes[name] or tensor.dtype, device=device or tensor.device
                )
            target = out[e] if "*" in place.source.name else out
            target.copy_(_part(tensor.detach(), name, place.source))
        yield name, out
        del out, target


def to_hf(block: Block, state: Mapping[str, Tensor], config: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Makes a checkpoint's tensors, by their published keys, out of FusedMoE's: `from_hf` back, bit by bit.

    Args:
        block: of `blocks(config)`.
        state: FusedMoE's state_dict. What other layers and models have in it is their own: give the layer's.
        config: of which quantised experts take the layout, if it has a quantization_config; else fp8_block's
            is DeepSeek-V3's, mxfp4's gpt-oss's where experts are stacked, and all others'
            compressed-tensors'.

    Returns:
        Pairs of a key and a tensor, of state's device and, if float, dtype. Float ones share no memory.

    Raises:
        ValueError: before anything is copied: a name is missing or unknown, a shape contradicts the
            configuration, or a tensor is a DTensor.

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        >>> block = checkpoint.blocks(config)[0]
        >>> moe = fused_moe.FusedMoE.from_hf(config)
        >>> tensors = dict(checkpoint.to_hf(block, moe.state_dict()))
        >>> tensors["model.layers.0.mlp.experts.7.up_proj.weight"].shape
        torch.Size([32, 64])
    """
    return write_hf(block, state, {} if config is None else quantized.method_of(read_config(config)))


def write_hf(
    block: Block,
    state: Mapping[str, Tensor],
    method: Mapping[str, Any],
    forms: Mapping[str, quantized.Published] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`to_hf` with the method of a quantization_config, and how each quantised weight was published."""
    shapes = shapes_of(block)
    codes = {name: quantized.own_tensors(state, name) for name in quantized.EXPERTS if name in shapes}
    codes = {name: own for name, own in codes.items() if own}
    for name, own in codes.items():
        if quantized.shape_of(own) != (shape := tuple(shapes.pop(name))):
            _fail(f"{name} of shape {shape}", quantized.shape_of(own))
    state = {
        name: t for name, t in state.items() if not name.startswith(tuple(f"{weight}." for weight in codes))
    }
    for name, shape in shapes.items():
        if name not in state:
            _fail(f"{name} in the state of layer {block.layer}", "no such name")
        if state[name].shape != shape:
            _fail(f"{name} of shape {tuple(shape)}", tuple(state[name].shape))
        if is_sharded(state[name]):
            _fail(f"{name} to be whole, as of StateDictOptions(full_state_dict=True)", "a DTensor")
    for name, tensor in state.items():
        # A bias that a user has added, and that has not moved, changes nothing.
        if name not in shapes and not (name == FLOAT32 and not tensor.any()):
            _fail(f"only tensors that the checkpoint has a place for in layer {block.layer}", name)
    return chain(quantized.to_hf(block, codes, method, forms or {}), _write(block, shapes, state))


def _write(block: Block, shapes, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    together: dict[str, list[tuple[str, Source]]] = {}  # gate and up may be in one tensor
    for name in shapes:
        source = block.tensors[name][0]
        together.setdefault(source.name, []).append((name, source))
    for members in together.values():
        name, source = members[0]
        stored = _stored_shape(shapes[name], name, source)
        for e, key in enumerate(_keys(source, shapes[name][0])):
            out = torch.empty(stored, dtype=state[name].dtype, device=state[name].device)
            for name, source in members:
                tensor = state[name].detach()
                _part(out, name, source).copy_(tensor[e] if "*" in source.name else tensor)
            yield key, out


def load_layer(
    moe: FusedMoE,
    source: Mapping[str, Tensor] | str | os.PathLike,
    config: Any = None,
    layer: int | None = None,
    *,
    dequantize: bool = False,
) -> None:
    """Reads one layer of a checkpoint into a FusedMoE, in its dtypes and on its device.

    Args:
        moe: as `FusedMoE.from_hf(config, layer)` makes it. On the meta device it gets new parameters, on the
            device of the source's tensors. Of DTensors, as `fully_shard` and `ExpertParallel` make them, each
            rank gets its own shards: all ranks read the same source.
        source: the checkpoint's tensors by key, as `from_hf` takes them, or its folder. They may also have
            FusedMoE's names, as `convert(to="fused_moe")` writes them.
        config: as `blocks` takes it; by default the folder's.
        layer: its number in the model.
        dequantize: whether quantised experts become float ones. Otherwise moe.experts has QuantizedWeights in
            place of parameters. Router, shared experts and latent layers are always float.

    An expert_bias that the checkpoint has none of becomes zero.

    Raises:
        TypeError: moe is no FusedMoE.
        ValueError: before anything is written: as `from_hf`, or if moe is not what the configuration says.
        OSError: the source could not be read; moe is as it was. Also TypeError, ValueError or RuntimeError,
            by what reading it raised.

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        >>> block = checkpoint.blocks(config)[0]
        >>> moe = fused_moe.FusedMoE.from_hf(config)
        >>> tensors = dict(checkpoint.to_hf(block, moe.state_dict()))
        >>> other = fused_moe.FusedMoE.from_hf(config)
        >>> checkpoint.load_layer(other, tensors, config, layer=0)
        >>> torch.equal(other.experts.w2, moe.experts.w2)
        True
    """
    tensors, config = opened(source, config)
    with naming_files(tensors):
        load_blocks([(moe, block_of(config, layer))], tensors, quantized.method_of(config), dequantize)


def opened(
    source: Mapping[str, Tensor] | str | os.PathLike, config: Any
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """The tensors by key, and the configuration."""
    if isinstance(source, Mapping):
        if config is None:
            raise TypeError("fused_moe.checkpoint: expected config beside a mapping of tensors, found None")
        return source, read_config(config)
    return open_folder(source), read_config(source if config is None else config)


def load_blocks(
    todo: list[tuple[FusedMoE, Block]],
    source: Mapping[str, Tensor],
    method: Mapping[str, Any],
    dequantize: bool,
) -> None:
    """Reads layers one after the other, when names, dtypes, shapes and settings of all of them are right."""
    found = [_checked(moe, block, source, method, dequantize) for moe, block in todo]
    written: list[str] = []
    for (moe, block), (layer, places) in zip(todo, found, strict=True):
        try:
            tensors = _tensors(moe, block, layer, places, method, dequantize)
        except Exception as error:
            kinds = (TypeError, ValueError, OSError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            before = ", ".join(written) or "none"
            state = f"(layer {block.layer} is as it was; layers that were written before it: {before})"
            raise kind(f"{error} {state}") from error
        _write_into(moe, tensors)
        written.append(str(block.layer))
        del tensors  # before the next layer's


def look(
    block: Block,
    source: Mapping[str, Tensor],
    method: Mapping[str, Any],
    dtype: torch.dtype | None = torch.float32,
) -> tuple[quantized.Layer, quantized.Layer, dict[str, Place]]:
    """`quantized.look`, with the same layer on meta and the places of what `dtype` leaves float. Raises
    ValueError if names, dtypes or shapes are wrong, of what stays quantised, too. Nothing is read."""
    layer = quantized.look(block, source, method, dtype)
    on_meta = quantized.look(block, quantized.OnMeta(layer.stored), method)
    for _ in quantized.read(on_meta, shapes_of(block), method, torch.bfloat16):
        pass
    places = find(on_meta.block, on_meta.source)
    return layer, on_meta, {name: place for name, place in places.items() if name in layer.block.tensors}


def _checked(
    moe: FusedMoE, block: Block, source: Mapping[str, Tensor], method: Mapping[str, Any], dequantize: bool
) -> tuple[quantized.Layer, dict[str, Place]]:
    if not isinstance(moe, FusedMoE):
        raise TypeError(f"fused_moe.checkpoint: expected a FusedMoE, found {type(moe).__name__}")
    layer, _, places = look(with_own_names(block), source, method)
    state = moe.state_dict(keep_vars=True)
    _check_is(moe, block, state)
    if not dequantize and any(is_sharded(state[name]) for name in layer.experts):
        _fail("dequantize=True, as the experts are DTensors and the checkpoint's are quantised", False)
    return layer, places


def _tensors(
    moe: FusedMoE,
    block: Block,
    layer: quantized.Layer,
    places: dict[str, Place],
    method: Mapping[str, Any],
    dequantize: bool,
) -> dict[str, Tensor | quantized.QuantizedWeight]:
    """A whole layer by the names of its state_dict, read before the first tensor is written."""
    state = moe.state_dict(keep_vars=True)
    found = {}
    for name, w in quantized.read(layer, shapes_of(block), method, state["experts.w1"].dtype):
        found[name] = w.dequantize() if dequantize else w if state[name].is_meta else w.to(state[name].device)
    found |= read(layer.block, places, layer.source, {name: tensor.dtype for name, tensor in state.items()})
    if FLOAT32 in state and FLOAT32 not in places:
        device = found["router.gate.weight"].device
        found[FLOAT32] = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
    return found


def _write_into(moe: FusedMoE, tensors: Mapping[str, Tensor | quantized.QuantizedWeight]) -> None:
    state = moe.state_dict(keep_vars=True)
    given: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, quantized.QuantizedWeight):
            setattr(moe.experts, name.removeprefix("experts."), tensor)
            given |= {f"{name}.{part}": value for part, value in tensor.state_dict().items()}
        elif state[name].is_meta:
            given[name] = tensor
        else:
            with torch.no_grad():
                state[name].copy_(sharded_like(state[name], tensor))
    if state["router.gate.weight"].is_meta:
        moe.load_state_dict(given, assign=True)


def with_own_names(block: Block) -> Block:
    """A block whose tensors may also have FusedMoE's names, behind what the names begin with."""
    own = {name: tuple(Source(prefix + name) for prefix in block.prefixes) for name in block.tensors}
    return block._replace(
        tensors={name: tuple(dict.fromkeys(block.tensors[name] + own[name])) for name in block.tensors}
    )


def published_under(block: Block, prefix: str) -> dict[str, Source]:
    """The published place of each tensor, in a model whose names of this layer begin with `prefix`."""
    root = prefix.partition(f".{block.layer}.")[0]
    found = {}
    for name, places in block.tensors.items():
        near = [p for p in places if p.name.startswith(prefix)]
        near += [p for p in places if p.name.startswith(f"{root}.{block.layer}.")]
        found[name] = near[0]
    return found


def _check_is(moe: FusedMoE, block: Block, state: Mapping[str, Tensor]) -> None:
    """Raises if the layer is not what the configuration says. It may have an expert_bias of its own."""
    with torch.device("meta"):
        expected = FusedMoE(**block.settings)
    found = _computed(moe)
    for name, value in _computed(expected).items():
        if found[name] != value:
            _fail(f"a layer with {name}={value!r}, as the configuration has it", repr(found[name]))
    for name, tensor in state.items():
        if tensor.is_meta and (is_sharded(tensor) or not all(t.is_meta for t in state.values())):
            _fail(f"{name} off the meta device, as after to_empty(device=..)", "it there")
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
    for name in sorted(shapes.keys() | state.keys() - {FLOAT32}):
        if name not in state or name not in shapes or tuple(state[name].shape) != shapes[name]:
            shape = tuple(state[name].shape) if name in state else "none"
            _fail(f"a layer whose {name} is {shapes.get(name, 'none')}, as the configuration has it", shape)


def _computed(moe: FusedMoE) -> dict[str, Any]:
    """What shapes do not show of a layer."""
    activation = moe.experts.activation
    constants = {name: getattr(moe.experts, name) for name in CONSTANTS.get(activation, ())}
    return {"activation": activation, **constants, "top_k": moe.router.top_k, **moe.router.routing}
