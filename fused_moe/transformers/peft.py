"""PEFT's LoRA on experts: the adapters of `target_parameters` reach our kernels, on quantised weights too.

    model = get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj", ...]))

PEFT wraps a module of experts once for each of its parameters, and for the duration of a call replaces the
parameter by its sum with the adapters. That costs the gradient of the whole weight, and quantised weights are
no parameters. So the class that PEFT has for LoRA is replaced in its registry by a subclass with a wrapper of
experts, which hands them the adapters in place of the sum. Names, shapes and files remain PEFT's.

This module is imported where PEFT is installed. All that is no part of a call, such as which adapters are
active, their scales, saving, and merging into float weights, is PEFT's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftType
from peft.tuners.lora import layer, model
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from ..checks import fail
from ..lora import LoRA, joined
from ..quantized import QuantizedWeight
from . import quantizing
from .experts import ADAPTERS, settings_of, warn_once
from .quantizing import check_merge, merge_quantized
from .weights import NAME, NAMES, PARTS, experts_of, first_name, is_experts, is_quantized, shape_of

if TYPE_CHECKING:
    from .weights import ExpertsModule

# What we override: a release without one of these would never call ours.
_MODEL = "_check_new_adapter_config _check_target_module_exists _inject_parameters _create_new_module"
_OVERRIDDEN = {
    model.LoraModel: f"{_MODEL} merge_adapter merge_and_unload".split(),
    layer.ParamWrapper: ("_activate_lora", "get_param", "merge"),
}


def plug_in() -> None:
    """Makes PEFT take our class for LoRA, unless another package has put its own there."""
    for owner, names in _OVERRIDDEN.items():
        for name in names:
            getattr(owner, name)
    found = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA]
    if found is model.LoraModel:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA] = LoraModel
    elif not issubclass(found, LoraModel):
        what = "adapters are added to the weights of float experts, and quantised ones get none"
        warn_once("PEFT", f"leaves LoRA to {found.__module__}.{found.__qualname__}: {what}")


class ParamWrapper(layer.ParamWrapper):  # of PEFT's name, by which PEFT knows its wrappers
    """PEFT's wrapper of a parameter, for one of experts."""

    def get_param(self) -> Tensor:
        """The parameter, or what stands for a quantised weight."""
        experts, name = self.get_base_layer(), self.parameter_name
        return _stand_in(experts, name) if _is_packed(experts, name) else super().get_param()

    @contextmanager
    def _activate_lora(self, active_adapters: list[str], *args, **kwargs) -> Iterator[None]:
        """Hands a call's adapters to the experts. PEFT adds them where our kernels do not run."""
        experts, name = self.get_base_layer(), self.parameter_name
        active = [adapter for adapter in active_adapters if adapter in self.lora_A]
        is_ours = _is_packed(experts, name) or (name in _weights(experts) and _is_ours(experts))
        if not active or not is_ours:
            with super()._activate_lora(active_adapters, *args, **kwargs):
                yield
            return
        handed = vars(experts).setdefault(ADAPTERS, {})
        handed[name] = self._joined(active)
        try:
            yield
            if "taken" not in handed:
                expected = f"a forward that calls {NAME!r}, which has its adapters"
                advice = 'by set_experts_implementation("eager") PEFT adds them to float weights'
                fail(RuntimeError, type(experts).__name__, expected, f"another; {advice}")
        finally:
            vars(experts).pop(ADAPTERS, None)  # with those of the other weight, whose call is around this one

    def _joined(self, adapters: list[str]) -> tuple[Tensor | None, Tensor | None, float]:
        """(a, b, scale) of all adapters together, as LoRA has them: their ranks are one after the other."""
        swapped = getattr(self, "_did_swap_in_out_features", False) == self.get_base_layer().is_transposed
        loras = []
        for adapter in adapters:
            weights = self.lora_A[adapter].weight, self.lora_B[adapter].weight
            a, b = LoRA.from_peft(self.num_experts, weights).pairs[0]
            assert a is not None and b is not None
            # Before PEFT 0.20 what is in here could be out there. One copy of b, or each operator makes one.
            a, b = (b.mT, a.mT) if swapped else (a, b.contiguous())
            loras.append(LoRA(a, b, scale=self.scaling[adapter]))
        lora = joined(loras)
        return lora.a1, lora.b1, lora.scale

    def check_merge(self, adapter_names: list[str] | None, rounds: bool) -> None:
        """Raises where adapters would go into a quantised weight that may not be rounded, or cannot."""
        experts, name = self.get_base_layer(), self.parameter_name
        adapters = self.active_adapters if adapter_names is None else adapter_names
        if not _is_packed(experts, name) or not any(adapter in self.lora_A for adapter in adapters):
            return
        if not rounds:
            way = "fused_moe.transformers.requantized_merges(), which rounds the sum"
            advice = f"keep adapters apart, merge into the float model, or merge_and_unload inside of {way}"
            fail(ValueError, "merge", "float weights", f"a quantised {name}; {advice}")
        check_merge(experts, name)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        experts, name = self.get_base_layer(), self.parameter_name
        if not _is_packed(experts, name):
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self.check_merge(adapter_names, quantizing.merges.get())
        adapters = [a for a in check_adapters_to_merge(self, adapter_names) if a in self.lora_A]
        if adapters:
            with torch.no_grad():
                delta = sum(self.get_delta_weight(adapter) for adapter in adapters)
                if safe_merge and not delta.isfinite().all():
                    fail(ValueError, "merge", "finite adapters", f"others among {adapters}")
                merge_quantized(experts, name, delta.mT if experts.is_transposed else delta)
            self.merged_adapters += adapters


class LoraModel(model.LoraModel):
    """PEFT's LoRA, with our wrapper for experts, and with quantised weights among their parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not experts_of(self.model):
            self.__class__ = model.LoraModel  # whose pickles do not need us

    def _check_new_adapter_config(self, config) -> None:
        """Names that match nothing raise, before anything is adapted: attention would train alone."""
        super()._check_new_adapter_config(config)
        ours = [e for e in experts_of(self.model) if e[1].config._experts_implementation in NAMES]
        if not ours:
            return
        with _parameters_for_all(self.model):
            names = {_plain(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        own = {f"{_plain(m)}.{n}": e._modules.get(n) for m, e in ours for n in _weights(e)}
        names -= {name + part for name in own for part in PARTS if part}  # what packed weights are made of
        for target in config.target_parameters or ():
            matched = [name for name in names if name == target or name.endswith(f".{target}")]
            if not matched:
                short = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in own})
                expected = f"target_parameters that name parameters, as the experts' {', '.join(short)}"
                fail(ValueError, "LoraConfig", expected, repr(target))
            if any(getattr(own.get(name), "smooth", None) is not None for name in matched):
                expected = "no weight of compute 'int8_smooth', which takes no adapters"
                fail(ValueError, "LoraConfig", expected, repr(target))

    def _check_target_module_exists(self, config, key: str):
        """`target_modules` name modules of other layers, and never weights of experts that are quantised."""
        is_weight = isinstance(self.model.get_submodule(key), QuantizedWeight)
        return False if is_weight else super()._check_target_module_exists(config, key)

    def _inject_parameters(self, *args, **kwargs) -> list[str]:
        with _parameters_for_all(self.model):
            return super()._inject_parameters(*args, **kwargs)

    @staticmethod
    def _create_new_module(lora_config, adapter_name, target, **kwargs) -> nn.Module:
        new = model.LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)
        if type(new) is layer.ParamWrapper and is_experts(new.get_base_layer()):
            new.__class__ = ParamWrapper  # PEFT's releases differ in what a wrapper is made of
        return new

    def merge_adapter(self, adapter_names: list[str] | None = None, *args, **kwargs) -> None:
        self._check_merge(adapter_names, False)  # a rounded sum cannot be unmerged
        super().merge_adapter(adapter_names, *args, **kwargs)

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> nn.Module:
        self._check_merge(adapter_names, quantizing.merges.get())
        return super().merge_and_unload(progressbar, safe_merge, adapter_names)

    def _check_merge(self, adapter_names: list[str] | None, rounds: bool) -> None:
        """Before the first is merged."""
        for module in self.model.modules():
            if isinstance(module, ParamWrapper):
                module.check_merge(adapter_names, rounds)


def _weights(experts: ExpertsModule) -> tuple[str, str]:
    return first_name(experts), "down_proj"


def _is_ours(experts: ExpertsModule) -> bool:
    """Whether `experts_forward` is called, and will compute these experts."""
    return experts.config._experts_implementation in NAMES and not isinstance(settings_of(experts), str)


def _is_packed(experts: ExpertsModule, name: str) -> bool:
    """Whether a parameter is a quantised weight that we compute. PEFT has its own way with FP8 parameters."""
    return is_quantized(experts, name) and (name not in experts._parameters or _is_ours(experts))


def _plain(name: str) -> str:
    """A parameter's name without what wrappers and parametrisations add, as targets have it."""
    name = name.removesuffix(".original").replace(".parametrizations.", ".")
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _stand_in(experts: ExpertsModule, name: str) -> nn.Parameter:
    """Device and shape of the float parameter in whose place a quantised weight is, without memory. Adapters
    take its dtype: float32, as beside other layers that are quantised."""
    E, rows, cols = shape_of(experts, name)
    shape = (E, cols, rows) if experts.is_transposed else (E, rows, cols)
    one = torch.empty((), dtype=torch.float32, device=next(experts.parameters()).device)
    return nn.Parameter(one.expand(shape), requires_grad=False)


@contextmanager
def _parameters_for_all(module: nn.Module) -> Iterator[None]:
    """Inside, quantised weights of experts are found among their parameters, in the order of float ones."""
    found = [experts for _, experts in experts_of(module)]
    before = [dict(experts._parameters) for experts in found]
    try:
        for experts in found:
            for name in _weights(experts):
                if _is_packed(experts, name):
                    experts._parameters[name] = _stand_in(experts, name)
        yield
    finally:
        for experts, own in zip(found, before, strict=True):
            experts._parameters.clear()
            experts._parameters.update(own)
