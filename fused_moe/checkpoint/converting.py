"""Whole folders: `convert` writes another one, `load` reads every MoE layer of a model."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..checks import FLOATING, check_bool, check_choice, fail
from ..finding import MoELayer, layers_in
from ..quantized import QuantizedWeight
from . import layers, quantized
from .block import Block, Source
from .families import blocks, read_config
from .files import (
    MAX_SHARD_SIZE,
    Folder,
    check_new,
    naming_files,
    new_folder,
    open_folder,
    size_of,
    write_json,
    write_shards,
)

if TYPE_CHECKING:
    from ..module import FusedMoE

logger = logging.getLogger("fused_moe")

FN = "fused_moe.checkpoint.convert"
VERSION = 1  # of what config.json has as "fused_moe"
LAYOUTS = ("fused_moe", "hf", "torchtitan")
# Files that are not copied: of weights, which would differ from the new ones; and what says how these are
# quantised, where they are not any more.
METHODS = ("quantize_config.json", "quant_config.json")
WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx",
    ".onnx_data", ".distcp",
)  # fmt: skip


def convert(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    to: str,
    config: Any = None,
    dtype: torch.dtype | None = None,
    dequantize: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: bool = True,
    flavor: str | None = None,
) -> None:
    """Writes a checkpoint's folder in another layout. One layer and one shard are in memory.

    `python -m fused_moe.convert` is its program.

    Args:
        source: the folder of a Hugging Face checkpoint; one that this function has made with to="fused_moe";
            or one of torchtitan's.
        out: the new folder. It appears when it is complete; nothing is written over.
        to: "hf": the published names. "fused_moe": FusedMoE's names for the MoE layers' tensors, behind what
            their names begin with in the checkpoint; everything else, and all other files, as they are.
            "torchtitan": torchtitan's own names, by its adapters.
        config: as `blocks` takes it; by default the folder's. torchtitan's have none: from the folder of a
            Hugging Face checkpoint all files but those of weights are copied.
        dtype: of float tensors, by default each one's own. The bias for the choice of experts and the scales
            of quantised weights keep theirs.
        dequantize: whether quantised weights, also those outside of MoE layers, become float ones, in `dtype`
            or else in the configuration's. Otherwise they stay as they are, in both layouts; but the int4 of
            GPTQ and AWQ becomes compressed-tensors' on its way to "hf".
        max_shard_size: bytes, or "5GB".
        progress: whether to show a bar, if tqdm is installed, or else to log a line now and then, at level
            INFO of the logger "fused_moe".
        flavor: of torchtitan's model, from and to its layout.

    Raises:
        TypeError: for a wrong argument or dtype.
        ValueError: for a wrong name, shape or setting, with file and key, what was expected and what was
            found. Names, dtypes and shapes of all layers are compared before anything is written. Nothing is
            left behind.

    Example:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from fused_moe import checkpoint
        >>> from safetensors.torch import save_file
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}
        >>> block, moe = checkpoint.blocks(config)[0], fused_moe.FusedMoE.from_hf(config)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     source = Path(folder) / "hf"
        ...     source.mkdir()
        ...     _ = (source / "config.json").write_text(json.dumps(config))
        ...     save_file(dict(checkpoint.to_hf(block, moe.state_dict())), source / "model.safetensors")
        ...     checkpoint.convert(source, f"{folder}/ours", to="fused_moe", progress=False)
        ...     sorted(checkpoint.open_folder(f"{folder}/ours"))[0]
        'model.layers.0.mlp.experts.w1'
    """
    check_choice(FN, "to", to, LAYOUTS)
    check_bool(FN, "dequantize", dequantize)
    if dtype is not None and dtype not in FLOATING:
        fail(TypeError, FN, "dtype to be None or a floating one", dtype)
    size_of(max_shard_size)
    source, is_titan = Path(source), (Path(source) / ".metadata").is_file()
    if (flavor is None) == (to == "torchtitan" or is_titan):
        fail(ValueError, FN, "flavor from or to torchtitan, and with no other", repr(flavor))
    check_new(out)
    if is_titan:
        assert flavor is not None
        _from_torchtitan(source, config, Path(out), to, dtype, max_shard_size, progress, flavor)
        return
    tensors, fields = open_folder(source), _config_of(source if config is None else config)
    if to == "torchtitan":
        assert flavor is not None
        _to_torchtitan(tensors, fields, Path(out), dtype, dequantize, progress, flavor)
        return
    with naming_files(tensors), new_folder(out) as folder:
        job = _Job(tensors, fields, to, dtype, dequantize)
        _copy(source, folder, job.left_out())  # before the tensors, which take long
        write_shards(folder, _shown(job, progress), max_shard_size)
        write_json(folder / "config.json", job.config())


def _from_torchtitan(
    source: Path,
    config: Any,
    out: Path,
    to: str,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    progress: bool,
    flavor: str,
) -> None:
    """By way of a folder of published tensors, if `out` is to be another."""
    if config is None or to == "torchtitan":
        expected = "config and to other than torchtitan from torchtitan's folder"
        fail(ValueError, FN, expected, f"config={config!r}, to={to!r}")
    from .torchtitan import read

    if to != "hf" or dtype is not None:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as beside:
            published = Path(beside) / "hf"
            options: dict[str, Any] = {"progress": progress, "max_shard_size": max_shard_size}
            convert(source, published, to="hf", config=config, flavor=flavor, **options)
            convert(published, out, to=to, dtype=dtype, **options)
        return
    # Its weights are float, under published names.
    fields = _changed(_config_of(config), quantization_config=None, compression_config=None, fused_moe=None)
    with new_folder(out) as folder, _bar(None, progress) as bar:
        if isinstance(config, str | os.PathLike) and Path(config).is_dir():
            _copy(Path(config), folder, WEIGHTS + METHODS)
        write_shards(folder, _counted(read(source, fields, flavor=flavor), bar), max_shard_size)
        write_json(folder / "config.json", fields)


def _counted(tensors: Iterable[tuple[str, Tensor]], bar) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        bar.update(tensor.nbytes)


def _to_torchtitan(
    tensors: Folder,
    config: dict,
    out: Path,
    dtype: torch.dtype | None,
    dequantize: bool,
    progress: bool,
    flavor: str,
) -> None:
    """By way of a folder of published float tensors, if this is none."""
    from .torchtitan import check_flavor, write

    if quantized.method_of(config) and not dequantize:
        fail(ValueError, FN, 'dequantize=True with to="torchtitan", whose weights are float', "False")
    if "fused_moe" in config or dequantize or dtype is not None:
        check_flavor(config, flavor)  # before the other folder, which takes long
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as beside:
            published = Path(beside) / "hf"
            options: dict[str, Any]
            options = {"config": config, "dtype": dtype, "dequantize": dequantize, "progress": progress}
            convert(tensors.path, published, to="hf", **options)
            convert(published, out, to="torchtitan", progress=progress, flavor=flavor)
        return
    with naming_files(tensors), _bar(tensors.nbytes(), progress) as bar:
        write(tensors, config, out, flavor=flavor, progress=bar.update)


def _config_of(config: Any) -> dict[str, Any]:
    """As a dict, of a layout that is known."""
    fields = dict(read_config(config))
    marker = fields.get("fused_moe", {"version": VERSION})
    if not isinstance(marker, dict) or marker.get("version") != VERSION:
        found = marker.get("version") if isinstance(marker, dict) else repr(marker)
        fail(ValueError, FN, f"version {VERSION} of the layout in {config}", found)
    return fields


def _copy(source: Path, folder: Path, left_out: tuple[str, ...]) -> None:
    """All other files, also those of folders, but hidden ones."""
    for file in sorted(source.iterdir()):
        if file.name.startswith(".") or file.name.endswith(left_out):
            continue
        if file.is_dir():
            (folder / file.name).mkdir()
            _copy(file, folder / file.name, left_out)
        else:
            shutil.copyfile(file, folder / file.name)


# --- one folder -------------------------------------------------------------------------------------------


class _Job:
    """The tensors of the new folder, in the order of the old one's files, and its configuration."""

    def __init__(self, tensors: Folder, config: dict, to: str, dtype: torch.dtype | None, dequantize: bool):
        self._tensors, self._config, self._to, self._dtype = tensors, config, to, dtype
        self._is_ours = "fused_moe" in config
        self._method = quantized.method_of(config)
        self._drops = dequantize and bool(self._method)
        self._dense_dtype = (dtype or dtype_of(config)) if self._drops else None
        # There is no writer of GPTQ's and AWQ's packing.
        self._repacks = to == "hf" and not self._drops and self._method.get("quant_method") in ("gptq", "awq")
        found = blocks(config)
        # How names of biases for the choice end. They keep their dtype, also in layers that predict tokens.
        self._biases = tuple(
            place.name.partition(f".{block.layer}.")[2]
            for block in found
            for place in block.tensors.get(layers.FLOAT32, ())
        )
        # For the way back: where tensors were, if not in the first published place, and in what form.
        marker = config.get("fused_moe", {})
        self._places: dict[str, list] = dict(marker.get("places", {}))
        self._forms: dict[str, quantized.Published] = dict(marker.get("quantized", {}))
        self._on_meta = quantized.OnMeta(tensors)
        self._plain: set[str] = set()  # linear layers that are float
        self._blocks = {prefix: block for block in found for prefix in block.prefixes}
        self._prefixes = sorted(self._blocks)
        # The keys of each MoE layer, and of each quantised linear layer outside.
        self._keys: dict[int, list[str]] = {block.layer: [] for block in found}
        self._linears: dict[str, quantized.Codes] = {}
        for key in tensors:
            block = self._block_of(key)
            if block is not None:
                self._keys[block.layer].append(key)
            elif self._method and (
                mark := next((m for m in quantized.LINEAR_MARKS if key.endswith(m)), None)
            ):
                stem = key.removesuffix(mark)
                kind = cast(str, quantized.kind_of(tensors, stem, self._method))
                codes = quantized.Codes(Source(stem), kind)
                self._linears |= dict.fromkeys(quantized.keys_of(tensors, codes), codes)
        for block in found:
            if not self._keys[block.layer]:
                expected = f"tensors {block.prefixes[0]}<...>, as layer {block.layer} has experts"
                fail(ValueError, FN, expected, f"none in {tensors.path}")
        # All are compared before the first tensor is written.
        self._layers = {block.layer: self._looked_at(block) for block in found}
        read = dict.fromkeys(self._linears.values()) if self._drops or self._repacks else ()
        linears = {codes.stem: quantized.matrix(self._on_meta, codes, self._method) for codes in read}
        self._group_size = self._one_group_size(found, linears) if self._repacks else None

    def _one_group_size(self, found: list[Block], linears: dict[str, QuantizedWeight]) -> int | None:
        """The columns per scale of all quantised weights; None if there are none."""
        weights = dict(linears)
        for block in found:
            on_meta = self._layers[block.layer][1]
            for name, w in quantized.read(on_meta, layers.shapes_of(block), self._method, torch.bfloat16):
                weights[on_meta.experts[name].stem] = w
            for codes in on_meta.dense.values():
                weights[codes.stem] = quantized.matrix(on_meta.stored, codes, self._method)
        sizes = {name: w.shape[2] // w.scale.size(2) for name, w in weights.items()}
        return quantized.one_group_size(self._method, sizes)

    def _looked_at(self, block: Block) -> tuple[quantized.Layer, quantized.Layer, dict[str, layers.Place]]:
        stored = quantized.View(self._tensors, self._keys[block.layer])
        known = layers.with_own_names(block) if self._is_ours else block
        return layers.look(known, stored, self._method, self._dense_dtype)

    def _block_of(self, key: str) -> Block | None:
        before = self._prefixes[: bisect_right(self._prefixes, key)][-1:]
        return self._blocks[before[0]] if before and key.startswith(before[0]) else None

    def left_out(self) -> tuple[str, ...]:
        """How the names of files end that are not copied."""
        return WEIGHTS + METHODS if self._drops or self._repacks else WEIGHTS

    def config(self) -> dict[str, Any]:
        """The configuration, when all tensors have been made."""
        config = {key: value for key, value in self._config.items() if key != "fused_moe"}
        if self._drops or self._group_size:
            config = _changed(config, quantization_config=None, compression_config=None)
        if self._group_size:
            made = quantized.as_compressed(self._method, self._group_size, self._plain)
            config["quantization_config"] = made
        if self._dtype is not None:
            name = str(self._dtype).removeprefix("torch.")
            config = _changed(config, dtype=name, torch_dtype=name)
        if self._to == "fused_moe":
            found = {"places": self._places, "quantized": self._forms}
            config["fused_moe"] = {"version": VERSION} | {key: value for key, value in found.items() if value}
        return config

    def parts(self) -> Iterator[tuple[int, Iterator[tuple[str, Tensor]]]]:
        """What is made of each layer, quantised linear layer and other tensor, and the bytes that it had."""
        done = set()
        for key in self._tensors:
            block, linear = self._block_of(key), self._linears.get(key)
            part = linear if block is None else block.layer
            if part is None:
                tensor = self._tensors[key]
                yield tensor.nbytes, self._other(key, tensor)
            elif part not in done:
                done.add(part)
                shapes: Mapping[str, Tensor]
                if block is None:
                    assert linear is not None
                    keys, made = quantized.keys_of(self._tensors, linear), self._linear(self._tensors, linear)
                    shapes = self._on_meta
                else:
                    keys, made = self._keys[block.layer], self._layer(block)
                    shapes = self._layers[block.layer][1].stored
                yield sum(shapes[key].nbytes for key in keys), made

    def _float(self, key: str, tensor: Tensor) -> tuple[str, Tensor]:
        if key.endswith(".weight") and tensor.dim() == 2 and tensor.dtype in FLOATING:
            self._plain.add(key.removesuffix(".weight"))
        return key, tensor

    def _other(self, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor outside of MoE layers."""
        if self._method and key.endswith(quantized.UNREAD):
            if not self._drops:
                yield key, tensor
        elif tensor.dtype in FLOATING:
            keeps = self._dtype is None or (self._biases and key.endswith(self._biases))
            yield self._float(key, tensor if keeps else tensor.to(self._dtype))
        else:
            yield key, tensor

    def _linear(self, source: Mapping[str, Tensor], codes: quantized.Codes) -> Iterator[tuple[str, Tensor]]:
        """A quantised linear layer."""
        if not self._drops and not self._repacks:
            for key in quantized.keys_of(source, codes):
                yield key, source[key]
            return
        w = quantized.matrix(source, codes, self._method)
        if self._drops:
            yield f"{codes.stem}.weight", w.dequantize(self._dense_dtype)[0]
            return
        packed = quantized.tensors_of(self._repacked(codes, w), None, self._method, codes.place)
        yield from ((codes.stem + part, tensor[0]) for part, tensor in packed.items())

    def _repacked(self, codes: quantized.Codes, w: QuantizedWeight) -> dict[str, Tensor]:
        if w.zero is not None and quantized.is_symmetric(self._method):
            fail(ValueError, FN, f"no zero points of {codes.stem}, as quantization_config says", "some")
        return w.state_dict()

    def _layer(self, block: Block) -> Iterator[tuple[str, Tensor]]:
        """A MoE layer. All of it is in memory: act-order, and gate and up in one, need several tensors."""
        layer, on_meta, floats = self._layers.pop(block.layer)
        places = {name: codes.place for name, codes in (layer.experts | layer.dense).items()}
        places |= {name: place.source for name, place in floats.items()}
        prefix = next(p for p in block.prefixes if places["router.gate.weight"].name.startswith(p))
        usual = layers.published_under(block, prefix)
        if self._is_ours:
            places = {name: Source(*self._places.get(prefix + name, place)) for name, place in usual.items()}
        else:
            self._places |= {prefix + name: list(p) for name, p in places.items() if p != usual[name]}
        state: dict[str, Tensor] = {}
        forms: dict[str, quantized.Published] = {}
        for name, w in quantized.read(layer, layers.shapes_of(block), self._method, torch.bfloat16):
            if self._drops:
                state[name] = w.dequantize(self._dense_dtype)
                continue
            own = self._repacked(layer.experts[name], w) if self._repacks else w.state_dict()
            state |= {f"{name}.{part}": tensor for part, tensor in own.items()}
            if self._is_ours:
                form = self._forms.get(prefix + name)
            else:
                form = quantized.form_of(on_meta, name, own, self._method)
            if form is not None:
                forms[name] = form
        dtypes = dict.fromkeys(floats, self._dtype) | {layers.FLOAT32: None}  # which keeps the file's own
        state |= layers.read(layer.block, floats, layer.source, dtypes)
        if not self._drops:
            yield from ((key, layer.stored[key]) for key in layer.unread)
            for codes in layer.dense.values():
                yield from self._linear(layer.stored, codes)
        if self._to == "fused_moe":
            self._forms |= {prefix + name: form for name, form in forms.items()}
            yield from ((prefix + name, tensor) for name, tensor in state.items())
            return
        if not self._drops:
            places = {name: place for name, place in places.items() if name not in layer.dense}
        target = block._replace(tensors={name: (place,) for name, place in places.items()})
        for key, tensor in layers.write_hf(target, state, self._method, forms):
            yield self._float(key, tensor)


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """A configuration's, or else bfloat16."""
    found = config.get("dtype") or config.get("torch_dtype")
    if found is None and isinstance(config.get("text_config"), Mapping):
        return dtype_of(config["text_config"])
    return getattr(torch, str(found).removeprefix("torch."), None) or torch.bfloat16


def _changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """With other values of keys that it has, in its text_config, too, and without those that become None."""
    config = {key: values.get(key, value) for key, value in config.items() if values.get(key, "") is not None}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = _changed(config["text_config"], **values)
    return config


def _shown(job: _Job, progress: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the new folder, beside a bar of the bytes that have been read."""
    parts = [*job.parts()]
    with _bar(sum(nbytes for nbytes, _ in parts), progress) as bar:
        for nbytes, made in parts:
            yield from made
            bar.update(nbytes)


def _bar(total: int | None, is_shown: bool):
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines(total, is_shown)
    return tqdm(total=total, unit="B", unit_scale=True, disable=not is_shown)


class _Lines:
    """Lines of the log in place of a bar, one for every tenth, or every 10 GB."""

    def __init__(self, total: int | None, is_shown: bool):
        self._total, self._done, self._is_shown = total, 0, is_shown

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_) -> None:
        pass

    def update(self, nbytes: int) -> None:
        before, self._done = self._done, self._done + nbytes
        step = self._total / 10 if self._total else 10**10
        if self._is_shown and before // step != self._done // step:
            share = f"{self._done / self._total:.0%} of " if self._total else ""
            logger.info("%s%.1f GB", share, (self._total or self._done) / 1e9)


# --- a model's layers -------------------------------------------------------------------------------------


def load(
    model: nn.Module | Mapping[int, MoELayer],
    source: Mapping[str, Tensor] | str | os.PathLike,
    config: Any = None,
    *,
    dequantize: bool = False,
) -> None:
    """Reads a checkpoint's weights into every MoE layer of a model, one after the other.

    Args:
        model: a module, whose FusedMoE layers are those of the checkpoint in their order; or a mapping of the
            layers' numbers in the checkpoint to them, which may leave some out.
        source: as that of `load_layer`.
        config: as that of `load_layer`.
        dequantize: as that of `load_layer`.

    Raises:
        TypeError: model has another type.
        ValueError: a name, dtype, shape or setting is wrong, with file and key, what was expected and what
            was found. All layers are compared before anything is written.
        OSError: the source could not be read; also TypeError, ValueError or RuntimeError, by what reading it
            raised. The text names the layer, which is as it was, and the layers that are written.

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1}
        >>> block, moe = checkpoint.blocks(config)[0], fused_moe.FusedMoE.from_hf(config)
        >>> tensors = dict(checkpoint.to_hf(block, moe.state_dict()))
        >>> model = torch.nn.Sequential(fused_moe.FusedMoE.from_hf(config))
        >>> checkpoint.load(model, tensors, config)
        >>> torch.equal(model[0].experts.w1, moe.experts.w1)
        True
    """
    tensors, config = layers.opened(source, config)
    found = {block.layer: block for block in blocks(config)}
    if isinstance(model, Mapping):
        todo = cast("dict[int, FusedMoE]", dict(model))
        if unknown := todo.keys() - found.keys():
            fail(ValueError, "load", f"numbers of MoE layers, {_listed(found)}", _listed(unknown))
    else:
        modules = layers_in("load", model)
        if len(modules) != len(found):
            fail(ValueError, "load", f"a FusedMoE for each of {len(found)} MoE layers", f"{len(modules)}")
        todo = dict(zip(found, modules.values(), strict=True))
    with naming_files(tensors):
        pairs = [(moe, found[number]) for number, moe in todo.items()]
        layers.load_blocks(pairs, tensors, quantized.method_of(config), dequantize)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
