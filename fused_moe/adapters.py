"""The adapters of a model's experts, by name: add, choose, save, merge and remove them.

`lora` has what one layer computes. The adapters of one name are those of all layers of a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .checks import FLOATING, check_bool, check_int, check_real, fail
from .finding import Module, MoELayer, experts_in
from .lora import DEFAULT, Adapters, LoRA, TakesLoRA, child_of, joined, warn_of_no_scale
from .quantized.quantizing import requantize
from .quantized.sharding import is_sharded, sharded_like
from .quantized.weight import QuantizedWeight, check_weight

if TYPE_CHECKING:
    from .module import Experts

WEIGHTS = ("w1", "w2", "w3")
F64 = torch.float64
CHECKPOINTED = "_checkpoint_wrapped_module."  # which PyTorch's checkpoint_wrapper takes out of keys


def add_lora(
    module: Module,
    rank: int,
    *,
    alpha: float | None = None,
    targets: tuple[str, ...] = WEIGHTS,
    dtype: torch.dtype | None = None,
    name: str = DEFAULT,
    freeze_router: bool = False,
) -> Module:
    """Gives the experts of every FusedMoE in a module trainable adapters, and freezes their own parameters.

    The adapters are the parameters `experts.lora.a1`, `experts.lora.b1`, ..., and those of another name than
    "default" `experts.lora_NAME.a1`, ... The new ones are active from now on and earlier ones are not,
    until `set_lora` chooses. Everything else in the module is left as it is. main_grads of the frozen
    parameters have no effect while adapters are active. Quantised experts are the usual case.
    `experts.lora.load(LoRA.from_peft(...))` takes adapters made elsewhere.

    Apply it before `fully_shard`, and before or after `ExpertParallel`, whose ranks then have the adapters of
    their experts.

    Args:
        module: whose FusedMoE layers have no adapters of this name yet.
        rank: of each expert's matrices, >= 1.
        alpha: the scale is alpha / rank; by default 1.
        targets: the weights that get some; w3 only where experts are gated.
        dtype: of the adapters: that of x, or float32, whose optimizer takes steps that 16 bits would lose;
            default: the weights'.
        name: not empty, and without a dot.
        freeze_router: the layers' routers, too.

    Returns:
        The module.

    Raises:
        TypeError: for a wrong type or dtype, before anything is changed.
        ValueError: for a wrong shape or value, before anything is changed.

    Example:
        >>> moe = fused_moe.add_lora(fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2), rank=2, alpha=4)
        >>> [name for name, p in moe.named_parameters() if p.requires_grad and "lora" in name][:2]
        ['experts.lora.a1', 'experts.lora.b1']
        >>> moe.experts.w1.requires_grad
        False
    """
    fn = "add_lora"
    layers = list(experts_in(fn, module).values())
    check_int(fn, "rank", rank)
    if rank < 1:
        fail(ValueError, fn, "rank >= 1", rank)
    if alpha is not None:
        check_real(fn, "alpha", alpha)
    if dtype is not None and dtype not in FLOATING:
        fail(TypeError, fn, "a floating dtype", dtype)
    if not isinstance(targets, (tuple, list, set, frozenset)):
        fail(TypeError, fn, "targets to be a tuple of w1, w2 and w3", targets)
    if not targets or not all(target in WEIGHTS for target in targets):
        fail(ValueError, fn, "targets of w1, w2 and w3", targets)
    if not isinstance(name, str):
        fail(TypeError, fn, "name to be a str", type(name).__name__)
    if not name or "." in name:
        fail(ValueError, fn, "a name that is not empty and has no dot", repr(name))
    check_bool(fn, "freeze_router", freeze_router)
    routers = [m.router for m in module.modules() if isinstance(m, MoELayer)] if freeze_router else []
    if freeze_router and not routers:
        fail(ValueError, fn, "freeze_router only with a FusedMoE", type(module).__name__)
    if any(name in layer.loras for layer in layers):
        fail(ValueError, fn, f"experts without adapters {name!r}", "some that have them")
    if any(layer.fp8 is not None for layer in layers):
        fail(ValueError, fn, "experts that do not train in FP8", "some of enable_fp8")
    _reshard(*layers, *routers)
    for layer in layers:
        layer.check_takes_lora(fn)
    targeted = [{name: getattr(layer, name) for name in sorted(set(targets))} for layer in layers]
    targeted = [{name: w for name, w in weights.items() if w is not None} for weights in targeted]
    if not all(targeted):
        fail(ValueError, fn, f"experts with {' or '.join(sorted(set(targets)))}", "ungated ones")
    for target, w in (pair for weights in targeted for pair in weights.items()):
        if len(w.shape) != 3:  # ZeRO-3 leaves (0,)
            fail(ValueError, fn, f"{target} of shape (E, out, in)", tuple(w.shape))
        if dtype is not None and isinstance(w, Tensor) and (dtype == F64) != (w.dtype == F64):
            fail(TypeError, fn, "weights and adapters of float64, or neither", f"{w.dtype} and {dtype}")
    for layer, weights in zip(layers, targeted, strict=True):
        if not layer.loras:
            _freeze(layer)
        for adapters in layer.loras.values():
            adapters.is_active = False
        layer.take_lora(name, Adapters(weights, rank, 1.0 if alpha is None else alpha / rank, dtype))
    for router in routers:
        _freeze(router)
    return module


def set_lora(module: nn.Module, names: str | tuple[str, ...] | None) -> ExitStack:
    """Chooses which adapters of a module's experts are active: one, several, whose outputs add up, or none.

    It holds from the call on, for all threads. Used as a context it holds until the end of the context, in
    which no adapters should be added. Several adapters compute as one of all their ranks; no weight is
    merged. With None the layer takes the path of one without adapters. Adapters that are not active get no
    gradient, and requires_grad stays as it is. So DistributedDataParallel needs `find_unused_parameters`, or
    `requires_grad_(False)` of those before it wraps the module. Backward of a checkpointed forward pass runs
    it again: choose the same for both, or gradients are wrong, often without an error.

    Args:
        module: with adapters.
        names: one, or several, or None. A layer without adapters of these names computes without.

    Returns:
        A context, which sets back at its end what computed before.

    Raises:
        TypeError: for names that are no strings.
        ValueError: for names that no experts have. Nothing is changed.

    Example:
        >>> moe = fused_moe.add_lora(fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2), rank=2)
        >>> with torch.no_grad(), fused_moe.set_lora(moe, None):  # the base model, a reference policy
        ...     reference = moe(torch.randn(5, 8))
    """
    layers = _adapted("set_lora", module)
    names = () if names is None else _checked_names("set_lora", names, layers.values())
    context = ExitStack()
    for layer in layers.values():
        for name, adapters in layer.loras.items():
            context.callback(setattr, adapters, "is_active", adapters.is_active)
            adapters.is_active = name in names
    return context


@torch.no_grad()
def merge_lora(
    module: Module, names: str | tuple[str, ...] | None = None, *, requantize: bool = False
) -> Module:
    """Adds adapters to the experts' weights, w[e] += scale * b[e] @ a[e], and removes them.

    The sum is computed in float64 and rounded once to the weight's dtype, in the weight's memory. So the
    layer computes what it did with these adapters active, up to rounding. There is no way back; to compute
    without adapters for a while, use `set_lora`. Other adapters stay, and what `add_lora` froze trains again
    once none is left, as `remove_lora` says.

    DTensors are merged where weights and adapters are shards of experts, Shard(0), as of `fully_shard` and
    `ExpertParallel`.

    Args:
        module: with adapters.
        names: one, or several; by default the active ones.
        requantize: quantised weights that have such adapters become sums that are quantised again, in the
            weight's own format: with a new rounding error, which is often larger than the adapters. Needs
            weights that are not sharded, and memory for one in float32.

    Returns:
        The module.

    Raises:
        TypeError: for names that are no strings.
        ValueError: before anything is changed: for names that no experts have, and for quantised weights
            without `requantize`.

    Source: LoRA (arXiv 2106.09685, 4.1), "no additional inference latency".

    Example:
        >>> moe = fused_moe.add_lora(fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2), rank=2)
        >>> x = torch.randn(5, 8)
        >>> before = moe(x)
        >>> torch.allclose(fused_moe.merge_lora(moe)(x), before, atol=1e-6)
        True
    """
    fn = "merge_lora"
    layers = _adapted(fn, module)
    check_bool(fn, "requantize", requantize)
    if names is not None:
        names = _checked_names(fn, names, layers.values())
    elif not any(layer.active_loras for layer in layers.values()):
        fail(ValueError, fn, "adapters that compute, or names", "none that compute")
    _reshard(*layers.values())
    loras = {
        place: {n: m() for n, m in layer.loras.items() if (m.is_active if names is None else n in names)}
        for place, layer in layers.items()
    }
    for place, layer in layers.items():
        for lora in loras[place].values():
            _check_merge(fn, place, layer, lora, requantize)
    for place, layer in layers.items():
        if chosen := loras[place]:
            lora = joined([_wide(lora) for lora in chosen.values()])
            for name, (a, b) in zip(WEIGHTS, lora.pairs, strict=True):
                if a is not None and b is not None:
                    _merge(getattr(layer, name), _local(a), _local(b), lora.scale)
            _remove(layer, chosen)
    _thaw_routers(module)
    return module


def remove_lora(module: Module, names: str | tuple[str, ...] | None = None) -> Module:
    """Removes adapters. Where none is left, parameters that `add_lora` froze require gradients again.

    Those that required none before `add_lora` stay so; what was frozen after it is not known. A router that
    it froze is found if `module` has its layer. An optimizer still has the removed parameters. Under
    `fully_shard` their memory is freed with the model.

    Args:
        module: with adapters.
        names: one, or several; by default all.

    Returns:
        The module.

    Raises:
        TypeError: for names that are no strings.
        ValueError: for names that no experts have. Nothing is changed.

    Example:
        >>> moe = fused_moe.add_lora(fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2), rank=2)
        >>> fused_moe.remove_lora(moe).experts.w1.requires_grad
        True
    """
    fn = "remove_lora"
    layers = _adapted(fn, module)
    names = None if names is None else _checked_names(fn, names, layers.values())
    _reshard(*layers.values())
    for layer in layers.values():
        _remove(layer, [name for name in layer.loras if names is None or name in names])
    _thaw_routers(module)
    return module


# --- files ------------------------------------------------------------------------------------------------


def lora_state_dict(module: nn.Module, name: str = DEFAULT, *, full: bool = False) -> dict[str, Tensor]:
    """Returns the adapters of one name alone, with their scales, without copying.

    Keys are those of `module.state_dict()` for the name "default", whatever the name: `load_lora_state_dict`
    loads them under any name, and `load_state_dict(strict=False)` as "default".

    Args:
        module: with adapters.
        name: of the adapters.
        full: gather DTensors, of `fully_shard` and `ExpertParallel`, into whole tensors. All ranks call it.

    Returns:
        {key: tensor}: a1, b1, ... (E, rank, in) and (E, out, rank), and `scaling` () float32.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> moe = fused_moe.add_lora(moe, rank=2, targets=("w1",))
        >>> list(fused_moe.lora_state_dict(moe))
        ['experts.lora.a1', 'experts.lora.b1', 'experts.lora.scaling']
    """
    fn = "lora_state_dict"
    check_bool(fn, "full", full)
    found: dict[str, Tensor] = {}
    for adapters, prefix in _named(fn, module, name):
        found |= adapters.state_dict(prefix=prefix)
    if any(t.is_meta for t in found.values()):
        fail(ValueError, fn, "adapters to have values", "some on meta")
    return {key: t.full_tensor() if full and is_sharded(t) else t for key, t in found.items()}


def load_lora_state_dict(module: Module, state_dict: Mapping[str, Tensor], name: str = DEFAULT) -> Module:
    """Copies adapters that `lora_state_dict` has returned into those of a name.

    `add_lora` has made these with the same rank, targets and alpha. A file of version 0.2.0 or before has no
    scales: the adapters' own stay, with a warning.

    Args:
        module: with adapters.
        state_dict: whole tensors, the same on all ranks, or DTensors. Values are cast to the adapters' dtype.
        name: of the adapters that take them, whatever their name was.

    Returns:
        The module.

    Raises:
        TypeError: for values that are no dense floating tensors, before anything is changed.
        ValueError: for missing and unexpected keys, other shapes or scales, and tensors without values,
            before anything is changed.

    Example:
        >>> first, second = (fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2) for _ in range(2))
        >>> saved = fused_moe.lora_state_dict(fused_moe.add_lora(first, rank=2))
        >>> second = fused_moe.load_lora_state_dict(fused_moe.add_lora(second, rank=2), saved)
        >>> torch.equal(second.experts.lora.a1, first.experts.lora.a1)
        True
    """
    fn = "load_lora_state_dict"
    places = _named(fn, module, name)
    if not isinstance(state_dict, Mapping):
        fail(TypeError, fn, "state_dict to be a dict of tensors", type(state_dict).__name__)
    own = {key: t for adapters, prefix in places for key, t in adapters.state_dict(prefix=prefix).items()}
    scales = {f"{prefix}scaling": adapters.scale for adapters, prefix in places}
    unscaled = [(key, scale) for key, scale in scales.items() if key not in state_dict]
    state_dict = {**state_dict, **{key: own[key] for key, _ in unscaled}}
    if own.keys() != state_dict.keys():
        missing = sorted(own.keys() - state_dict.keys())
        unexpected = sorted(map(str, state_dict.keys() - own.keys()))
        fail(ValueError, fn, "the keys of lora_state_dict", f"missing {missing}, unexpected {unexpected}")
    for key, tensor in own.items():
        given = state_dict[key]
        if not isinstance(given, Tensor):
            fail(TypeError, fn, f"{key} to be a tensor", type(given).__name__)
        if not given.is_floating_point():
            fail(TypeError, fn, f"{key} of a floating dtype", given.dtype)
        if given.layout != torch.strided:
            fail(TypeError, fn, f"{key} to be a dense tensor", f"layout {given.layout}")
        if given.shape != tensor.shape:
            fail(ValueError, fn, f"{key} of shape {tuple(tensor.shape)}", tuple(given.shape))
        if given.is_meta or tensor.is_meta:
            fail(ValueError, fn, f"{key} to have values", "one on meta")
        if is_sharded(given) and not is_sharded(tensor):
            fail(ValueError, fn, f"{key} to be whole, as of lora_state_dict(full=True)", "a DTensor")
    for adapters, prefix in places:
        if alphas := adapters.other_alphas(state_dict[f"{prefix}scaling"]):
            fail(ValueError, fn, f"{prefix}scaling of {alphas[0]}", alphas[1])
    if unscaled:
        warn_of_no_scale(fn, *unscaled[0])
    for adapters, prefix in places:
        named = {key.removeprefix(prefix): t for key, t in state_dict.items() if key.startswith(prefix)}
        adapters.load_state_dict({key: sharded_like(own[prefix + key], t) for key, t in named.items()})
    return module


# --- parts ------------------------------------------------------------------------------------------------


def _adapted(fn: str, module: nn.Module) -> dict[str, Experts]:
    """The experts of a module, some of which have to have adapters."""
    layers = experts_in(fn, module)
    if not any(layer.loras for layer in layers.values()):
        fail(ValueError, fn, "experts with adapters, as of add_lora", "none")
    return layers


def _checked_names(fn: str, names, layers) -> tuple[str, ...]:
    """Names of adapters that some layer has, at least one."""
    given = (names,) if isinstance(names, str) else names
    if not isinstance(given, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in given):
        fail(TypeError, fn, "names to be a str or a tuple of str", type(names).__name__)
    known = sorted({name for layer in layers for name in layer.loras})
    if not given or not set(given) <= set(known):
        fail(ValueError, fn, f"names of adapters, {' or '.join(known)}", repr(names))
    return tuple(given)


def _named(fn: str, module: nn.Module, name: str) -> list[tuple[Adapters, str]]:
    """(adapters, their prefix in a state_dict as if the name was "default")."""
    layers = _adapted(fn, module)
    if not isinstance(name, str):
        fail(TypeError, fn, "name to be a str", type(name).__name__)
    _checked_names(fn, name, layers.values())
    return [
        (layer.loras[name], f"{place}.{child_of(DEFAULT)}.".replace(CHECKPOINTED, "").removeprefix("."))
        for place, layer in layers.items()
        if name in layer.loras
    ]


def _freeze(module: nn.Module) -> None:
    """Freezes all parameters, and notes for `_thaw` those that were not, once."""
    trained = tuple(name for name, p in module.named_parameters() if p.requires_grad)
    module.__dict__.setdefault("_frozen_for_lora", trained)
    module.requires_grad_(False)


def _thaw(module: nn.Module) -> None:
    trained = module.__dict__.pop("_frozen_for_lora", ())
    for name, parameter in module.named_parameters():
        if name in trained:
            parameter.requires_grad_()


def _thaw_routers(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, MoELayer) and not layer.experts.loras:
            _reshard(layer.router)
            _thaw(layer.router)


def _remove(layer: TakesLoRA, names: Iterable[str]) -> None:
    for name in names:
        delattr(layer, child_of(name))
        if name == DEFAULT:
            layer.lora = None
    if names and not layer.loras:
        _thaw(layer)


def _reshard(*modules: nn.Module) -> None:
    """Frees what FSDP2 has gathered, by its hooks for state dicts, which every module has. After a forward
    pass the parameters of its root are copies, and what is written into them is lost."""
    for m in (m for module in modules for m in module.modules()):
        for hook in m._state_dict_pre_hooks.values():
            hook(m, "", True)


def _check_merge(fn: str, place: str, layer: TakesLoRA, lora: LoRA, requantize: bool) -> None:
    for name, (a, b) in zip(WEIGHTS, lora.pairs, strict=True):
        if a is None or b is None:
            continue
        w, name_of = getattr(layer, name), f"{place}.{name}" if place else name
        tensors: tuple[Tensor, ...] = (w, a, b)
        if isinstance(w, QuantizedWeight):
            tensors = (*w.parameters(), a, b)
            if not requantize:
                advice = f"requantize=True (adapters compute beside {w.format} without merging)"
                fail(ValueError, fn, f"{name_of} of float values, or {advice}", w.format)
            if w.compute != "codes":
                fail(ValueError, fn, f"{name_of} of compute 'codes'", repr(w.compute))
        elif name not in layer._parameters:
            fail(TypeError, fn, f"{name_of} to be a parameter", "one that is pruned or parametrised")
        if any(t.is_meta for t in tensors):
            fail(ValueError, fn, f"{name_of} and its adapters to have values", "some on meta")
        if len(w.shape) != 3 or tuple(w.shape) != (*b.shape[:2], *a.shape[2:]):  # ZeRO-3 leaves (0,)
            shapes = " and ".join(str(tuple(t.shape)) for t in (w, a, b))
            expected = f"{name_of} (E, out, in), and adapters (E, rank, in) and (E, out, rank)"
            fail(ValueError, fn, expected, shapes)
        if any(map(is_sharded, tensors)) and (isinstance(w, QuantizedWeight) or not _are_of_experts(tensors)):
            expected = f"{name_of} of float values, and adapters, to be shards of experts, Shard(0)"
            found = {str(t.placements) if is_sharded(t) else "whole" for t in tensors}
            fail(ValueError, fn, expected, " and ".join(sorted(found)))
        if isinstance(w, QuantizedWeight):
            check_weight(fn, name_of, w)


def _are_of_experts(tensors: tuple[Tensor, ...]) -> bool:
    """Whether tensors are DTensors of which each rank has the same experts."""
    shards = {(t.device_mesh, t.placements) if is_sharded(t) else None for t in tensors}
    placements = getattr(tensors[0], "placements", ())
    return len(shards) == 1 and all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in placements)


def _wide(lora: LoRA) -> LoRA:
    """float64, which is rounded once, after all sums, and never multiplied as TF32 or by autocast."""
    a1, b1, a2, b2, a3, b3 = (None if t is None else t.double() for t in lora.tensors)
    return LoRA(a1, b1, a2, b2, a3, b3, lora.scale)


def _local(t: Tensor) -> Tensor:
    return t.to_local() if is_sharded(t) else t


def _merge(w: Tensor | QuantizedWeight, a: Tensor, b: Tensor, scale: float) -> None:
    """w[e] + scale * b[e] @ a[e] in w's memory, one expert at a time, as a delta of all would be large."""
    values = w.dequantize(torch.float32) if isinstance(w, QuantizedWeight) else _local(w)
    for e in range(values.size(0)):
        values[e] = torch.addmm(values[e].double(), b[e], a[e], alpha=scale)
    if isinstance(w, QuantizedWeight):
        requantize(w, values)
