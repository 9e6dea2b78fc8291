"""Hugging Face checkpoints from and to torchtitan's, by torchtitan's own state-dict adapters.

A model of a flavor is built on meta: it says which tensors a checkpoint has. The adapter's `to_hf` of each
says from which published tensors it is made, and `from_hf` makes it. So two tensors at most are in memory
while torch.distributed.checkpoint writes, each into a file. torchtitan 0.2.2 and 0.3.0 have other names for
what is used here.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
)

from ..checks import fail
from .distributed import check_files
from .families import ARGUMENTS, blocks, read_config

__all__ = ["check_flavor", "read", "write"]

FN = "fused_moe.checkpoint.torchtitan"
# model_type -> torchtitan's module. Its deepseek_v3 has DeepSeek-V2's flavors, too.
MODELS = {
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "qwen3_moe": "qwen3",
}
# gpt-oss's adapter has the names of its mxfp4 files. They are float here, as transformers saves them: with
# the last two dimensions swapped.
TURNED = re.compile(r"(\.experts\.(?:gate_up|down)_proj)_blocks$")
BIAS = re.compile(r"\.expert_bias(_E)?$")  # torchtitan has one in every layer that balances its load
UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")


def write(
    state: Mapping[str, Tensor],
    config: Any,
    out: str | os.PathLike,
    *,
    flavor: str,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a folder that torchtitan's `checkpoint.initial_load_path` loads.

    Args:
        state: published names and float tensors, which are read one by one: a dict, or files.
        config: as that of `blocks`.
        out: a new folder. It appears when it is complete.
        flavor: of torchtitan's model: "16B".
        progress: called with the bytes of each tensor that has been written.

    Raises:
        ImportError: without torchtitan.
        ValueError: for a model that torchtitan does not have, a flavor of other sizes or another routing,
            missing keys, keys too many, and other shapes and dtypes. All are compared before the first tensor
            is written.
    """
    out = Path(os.path.abspath(out))
    if out.exists() or not out.parent.is_dir():
        fail(
            ValueError,
            FN,
            f"a new folder in one that exists as out, {out}",
            "one" if out.exists() else "none",
        )
    model = _Model(config, flavor)
    model.check(state)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        folder = Path(beside) / out.name
        planner, dtypes = _Planner(), {}

        def make(key: str) -> Tensor:
            tensor = model.make(key, state)
            dtypes[key] = tensor.dtype
            if progress is not None:
                progress(tensor.nbytes)
            return tensor

        planner.make = make
        try:
            dcp.save(model.state, storage_writer=_Writer(folder, dtypes), planner=planner, no_dist=True)
        except dcp.CheckpointException as error:  # whose text is a traceback
            raise next(iter(error.failures.values()))[0] from error
        folder.rename(out)


def read(folder: str | os.PathLike, config: Any, *, flavor: str) -> Iterator[tuple[str, Tensor]]:
    """The published names and tensors of a checkpoint of torchtitan's, one after the other.

    `folder` is of its model alone, as `write` and `last_save_model_only` make it, or of a step of training;
    the others are as those of `write`.

    Raises:
        ImportError, ValueError: as those of `write`, and for files that are missing or too short, before the
            first tensor is read.
    """
    model, reader = _Model(config, flavor), _Reader(folder)
    metadata = reader.read_metadata()
    saved: dict[str, Any] = metadata.state_dict_metadata
    missing = [key for key in model.state if key not in saved]
    if missing:
        fail(ValueError, FN, f"{missing[0]} in {folder}", f"none, nor {len(missing) - 1} others")
    for key, expected in model.state.items():
        if saved[key].size != expected.shape:
            sizes = f"{key} of shape {tuple(expected.shape)}, as flavor {flavor!r} has"
            fail(ValueError, FN, sizes, f"{tuple(saved[key].size)} in {folder}")
        if not (dtype := saved[key].properties.dtype).is_floating_point:
            fail(ValueError, FN, f"{key} in {folder} to be floating", dtype)
    parts = [(index.fqn, info) for index, info in metadata.storage_data.items() if index.fqn in model.state]
    check_files(FN, folder, parts)
    for key, expected in model.state.items():
        part = {key: torch.empty(expected.shape, dtype=saved[key].properties.dtype)}
        dcp.load(part, storage_reader=reader, no_dist=True)
        if key in model.zeros:
            if part[key].any():
                text = f"{FN}: {key} has values that {model.fields['model_type']} has no published name for"
                warnings.warn(text, stacklevel=2)
            continue
        for name, tensor in model.adapter.to_hf(part).items():
            # A copy: experts that the adapter has split off share their memory.
            tensor = tensor.mT if TURNED.search(name) else tensor
            yield _published(name), tensor.clone(memory_format=torch.contiguous_format)


def check_flavor(config: Any, flavor: str) -> None:
    """Raises what `write` would without the tensors."""
    _Model(config, flavor)


class _Planner(DefaultSavePlanner):
    """Makes each tensor when it is written."""

    make: Callable[[str], Tensor]

    def lookup_object(self, index) -> Tensor:
        return self.make(index.fqn)


class _Reader(FileSystemReader):
    """Reads the metadata of all tensors once, not for each of them."""

    metadata: Metadata | None = None

    def read_metadata(self, *args, **kwargs) -> Metadata:
        self.metadata = self.metadata or super().read_metadata(*args, **kwargs)
        return self.metadata


class _Writer(FileSystemWriter):
    """Notes the dtypes of what was written. The plan has the dtypes of the model."""

    def __init__(self, folder: Path, dtypes: dict[str, torch.dtype]):
        super().__init__(folder, single_file_per_rank=False)  # it keeps the tensors of a file until its end
        self.dtypes = dtypes

    def finish(self, metadata, results) -> None:
        for key, dtype in self.dtypes.items():
            metadata.state_dict_metadata[key].properties.dtype = dtype
        super().finish(metadata, results)


# --- torchtitan's model and adapter -------------------------------------------------------------------


class _Model:
    """A flavor: its tensors on meta, and what published tensors each is made of."""

    def __init__(self, config: Any, flavor: str):
        self.fields = read_config(config)
        model, self.adapter, theta = _build(self.fields.get("model_type"), flavor)
        found = blocks(config)
        _check_sizes(self.fields, model, flavor)
        _warn_of_constants(self.fields, {"rms_norm_eps": model.norm.eps, "rope_theta": theta})
        _check_routing(self.fields, found, model, flavor)
        self.state = model.state_dict()
        _name_all(self.adapter, self.state)
        # {torchtitan's name: {published name in its adapter: shape}}
        self.sources = {key: self._sources(key, value) for key, value in self.state.items()}
        has_bias = any(block.settings.get("load_balance_coeff") is not None for block in found)
        self.zeros = {k for k, names in self.sources.items() if BIAS.search(k) and not (names and has_bias)}
        lost = [key for key, names in self.sources.items() if not names and key not in self.zeros]
        if lost:
            expected = f"a published name for {lost[0]} in torchtitan's {type(self.adapter).__name__}"
            fail(ValueError, FN, expected, f"none, nor for {len(lost) - 1} others")

    def _sources(self, key: str, value: Tensor) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.adapter.to_hf({key: value}).items()}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raises for what is wrong with the published tensors, by names, shapes and dtypes alone."""
        needed = {_published(n) for k, names in self.sources.items() if k not in self.zeros for n in names}
        if self.fields.get("tie_word_embeddings") and "lm_head.weight" not in state:
            needed.discard("lm_head.weight")
        missing = sorted(needed - set(state))
        if missing:
            fail(ValueError, FN, f"the key {missing[0]}", f"none, nor {len(missing) - 1} others")
        others = [key for key in state if key not in needed and not UNUSED.search(key)]
        layers = self.fields["num_hidden_layers"]
        ahead = [
            key for key in others if (n := re.match(r"model\.layers\.(\d+)\.", key)) and int(n[1]) >= layers
        ]
        if ahead:
            warnings.warn(
                f"{FN}: layers that predict further tokens are left out: {ahead[0]}, ...", stacklevel=3
            )
        if left := sorted(set(others) - set(ahead)):
            advice = ""
            if any(key.endswith(("_scale_inv", "_scales", "_blocks", "_scale", "_packed")) for key in left):
                advice = "; quantised weights have to be made float before"
            found = f"{left[0]} and {len(left) - 1} others{advice}"
            fail(ValueError, FN, "no keys that torchtitan's adapter does not know", found)
        for key in self.sources.keys() - self.zeros:
            for name, shape in self.sources[key].items():
                published = _stored(name, state)
                tensor = state[published].to("meta")  # frees what had to be read for it
                if not tensor.is_floating_point():
                    fail(ValueError, FN, f"{published} to be floating", tensor.dtype)
                shape = (*shape[:-2], shape[-1], shape[-2]) if TURNED.search(name) else tuple(shape)
                if tensor.shape != shape:
                    expected = f"{published} of shape {shape}, as torchtitan's flavor has"
                    fail(ValueError, FN, expected, tuple(tensor.shape))

    def make(self, key: str, state: Mapping[str, Tensor]) -> Tensor:
        """A tensor of torchtitan's from those of `state`."""
        if key in self.zeros:
            return torch.zeros(self.state[key].shape, dtype=self.state[key].dtype)
        given = {}
        for name in self.sources[key]:
            tensor = state[_stored(name, state)]
            given[name] = tensor.mT if TURNED.search(name) else tensor
        # Where an adapter ties the embeddings it wants to see them, whatever it converts.
        embedding = {"model.embed_tokens.weight": torch.empty(0, device="meta")}
        return self.adapter.from_hf(embedding | given)[key].contiguous()


class _Spec(NamedTuple):
    """What the two releases have under other names."""

    config: Any
    adapter: type
    build: Callable[[], Any]


def _spec(name: str, flavor: str) -> _Spec:
    module = import_module(f"torchtitan.models.{name}")
    if hasattr(module, "model_registry"):  # 0.3.0
        flavors = next(value for key, value in vars(module).items() if key.endswith("_configs"))
        _check_flavor(name, flavor, flavors)
        spec = module.model_registry(flavor)
        return _Spec(spec.model, spec.state_dict_adapter, spec.model.build)
    from torchtitan.config import JobConfig

    spec = module.get_train_spec()
    _check_flavor(name, flavor, spec.model_args)
    args = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(JobConfig())  # sets what the model reads
    return _Spec(args, spec.state_dict_adapter, lambda: spec.model_cls(args))


def _check_flavor(name: str, flavor: str, flavors) -> None:
    if flavor not in flavors:
        fail(ValueError, FN, f"flavor to be one of torchtitan's {name}: {', '.join(flavors)}", repr(flavor))


def _build(model_type: Any, flavor: str) -> tuple[Any, Any, float]:
    """The model on meta, its adapter, and the base of its rotary embedding."""
    if model_type not in MODELS:
        fail(ValueError, FN, f"a model_type that torchtitan has: {', '.join(MODELS)}", repr(model_type))
    try:
        spec = _spec(MODELS[model_type], flavor)
    except ImportError as error:
        raise ImportError(f"{FN} needs torchtitan (pip install torchtitan): {error}") from error
    with torch.device("meta"):
        model = spec.build()
    theta = (
        spec.config.layers[0].attention.rope.theta
        if hasattr(spec.config, "layers")
        else spec.config.rope_theta
    )
    return model, spec.adapter(spec.config, None), theta


def _name_all(adapter: Any, state: Mapping[str, Tensor]) -> None:
    """Mends names in an adapter's table: those of 0.3.0's gpt-oss lack the letters of the dimensions, and it
    leaves out what it does not know."""
    names = {re.sub(r"\d+", "{}", key, count=1) for key in state}
    for published, name in adapter.from_hf_map.items():
        if name is not None and name not in names:
            found = [other for other in names if re.fullmatch(re.escape(name) + "_[A-Z]+", other)]
            if len(found) == 1:
                adapter.from_hf_map[published] = found[0]


def _published(name: str) -> str:
    return TURNED.sub(r"\1", name)


def _stored(name: str, state: Mapping[str, Tensor]) -> str:
    """The key of a published tensor, which may be tied to another."""
    published = _published(name)
    return published if published in state else "model.embed_tokens.weight"


# --- the flavor and the configuration -----------------------------------------------------------------


def _same(field: str, own: Any, found: Any, flavor: str) -> None:
    if own != found:
        fail(ValueError, FN, f"{field} = {own!r}, as torchtitan's flavor {flavor!r} has", repr(found))


def _check_sizes(fields: Mapping, model: Any, flavor: str) -> None:
    """Compares what the dense parts have; widths beyond that are those of the tensors."""
    attention = next(iter(model.layers.values())).attention
    vocab_size, dim = model.tok_embeddings.weight.shape
    sizes = {"num_hidden_layers": len(model.layers), "vocab_size": vocab_size, "hidden_size": dim}
    names = {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "head_dim": "head_dim"}
    names |= {
        n: n for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    sizes |= {name: getattr(attention, own) for name, own in names.items() if hasattr(attention, own)}
    for name, own in sizes.items():
        if name in fields:
            _same(name, own, fields[name] or 0, flavor)


def _warn_of_constants(fields: Mapping, constants: Mapping[str, float | None]) -> None:
    """Constants of the dense parts, which a training script may change: torchtitan computes with its own."""
    rope = fields.get("rope_parameters") or {}
    for name, own in constants.items():
        found = fields.get(name, rope.get(name))
        if own is not None and found is not None and float(own) != float(found):
            warnings.warn(
                f"{FN}: {name} is {found} in the configuration, {own} in torchtitan's", stacklevel=4
            )


def _check_routing(fields: Mapping, found: list, model: Any, flavor: str) -> None:
    """Compares every MoE layer with what the configuration says of it."""
    moes = {int(n): moe for n, x in model.layers.items() if (moe := getattr(x, "moe", None)) is not None}
    _same("layers with experts", sorted(moes), [block.layer for block in found], flavor)
    for block in found:
        wanted, own = block.settings, _settings(moes[block.layer])
        for name, value in own.items():
            field = next((f for f, argument in ARGUMENTS.items() if argument == name and f in fields), name)
            _same(f"{field} of layer {block.layer}", value, _plain(name, wanted), flavor)


def _settings(moe: Any) -> dict[str, Any]:
    """A layer of torchtitan's as FusedMoE's arguments."""
    router = moe.router
    experts = getattr(moe, "experts", None) or moe.routed_experts.inner_experts
    width = next(p for n, p in experts.named_parameters() if n.startswith(("w2", "mlp2_weight"))).shape[-1]
    limit, shared = getattr(experts, "swiglu_limit", None), moe.shared_experts
    groups = router.num_expert_groups or 1
    return {
        "num_experts": router.num_experts,
        "hidden_dim": width,
        "top_k": router.top_k,
        "score_func": router.score_func,
        "route_norm": router.route_norm,
        "route_scale": router.route_scale,
        "num_expert_groups": groups,
        "num_limited_groups": router.num_limited_groups if groups > 1 else 1,
        "group_score": "top2",
        "num_shared_experts": 0 if shared is None else shared.w1.weight.shape[0] // width,
        "activation": "silu" if limit is None else "swiglu_clamped",
        "limit": limit,
        "score_on": "input" if getattr(moe, "score_before_experts", False) else "output",
    }


def _plain(name: str, settings: Mapping[str, Any]) -> Any:
    """A setting of FusedMoE, where others mean the same."""
    groups = settings.get("num_expert_groups") or 1
    same = {
        "num_expert_groups": groups,
        "num_limited_groups": settings.get("num_limited_groups") if groups > 1 else 1,
        "group_score": settings.get("group_score", "top2") if groups > 1 else "top2",
        "limit": settings.get("limit") if settings.get("activation") == "swiglu_clamped" else None,
        "score_on": "output",
    }
    defaults = {"score_func": "softmax", "route_norm": False, "route_scale": 1.0, "activation": "silu"}
    return same[name] if name in same else settings.get(name, defaults.get(name, 0))
