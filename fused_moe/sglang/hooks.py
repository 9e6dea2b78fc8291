"""What SGLang calls: the backend's name, its runner core, and hooks where SGLang does not ask the flag.

SGLang 0.5.23 gives unquantised layers its Triton runner under any name that it does not know. A hook gives
them the runner that was asked for, and another looks at each layer that was built: layers of some quantised
methods never ask for a runner.
"""

from __future__ import annotations

import inspect
from dataclasses import fields

from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES, add_moe_runner_backend_choices
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig, register_moe_runner_core
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .core import NAME, FusedMoERunnerCore, refuse

# SGLang's function -> the names of its parameters
PARAMETERS = {
    DispatchMoeRunnerCore.run_from_dispatch: [
        *inspect.signature(FusedMoERunnerCore.run_from_dispatch).parameters
    ],
    MoeRunner.__init__: ["self", "runner_backend", "config", "lora_enabled"],
    UnquantizedFusedMoEMethod.create_moe_runner: ["self", "layer", "moe_runner_config"],
}
# SGLang's dataclass -> fields that are read here
FIELDS = {
    MoeRunnerConfig: {
        "activation", "apply_router_weight_on_input", "gate_up_interleaved", "gemm1_alpha", "gemm1_beta",
        "gemm1_clamp_limit", "hidden_size", "intermediate_size_per_partition", "is_gated", "layer",
        "no_combine", "params_dtype", "routed_scaling_factor", "swiglu_limit",
    },
    TritonMoeQuantInfo: {"w13_weight", "w2_weight", "b13", "b2"},
}  # fmt: skip


def choose_runner(result, method, layer, moe_runner_config) -> None:
    """After UnquantizedFusedMoEMethod.create_moe_runner."""
    backend = get_moe_runner_backend()
    if backend.value == NAME:
        method.runner = MoeRunner(backend, moe_runner_config)


def check_layer(result, layer, *args, **kwargs) -> None:
    """After FusedMoE.__init__: NotImplementedError where another runner than the one asked for would run."""
    if get_moe_runner_backend().value != NAME:
        return
    if not isinstance(getattr(layer.runner, "runner_core", None), FusedMoERunnerCore):
        refuse("unquantised experts", type(layer.quant_method).__name__)


def check_interface() -> None:
    """TypeError where SGLang's functions or dataclasses differ from those of 0.5.23."""
    for function, expected in PARAMETERS.items():
        found = [*inspect.signature(function).parameters]
        if found != expected:
            name = function.__qualname__
            raise TypeError(f"{name} expected to take {', '.join(expected)}, found {', '.join(found)}")
    for cls, needed in FIELDS.items():
        if missing := needed - {field.name for field in fields(cls)}:
            raise TypeError(f"{cls.__name__} expected fields {', '.join(sorted(missing))}, found none")


def register() -> None:
    """Offers the backend. Its name comes last, so that a failure leaves the flag refused."""
    if NAME in MOE_RUNNER_BACKEND_CHOICES:
        return
    check_interface()
    register_moe_runner_core(NAME, FusedMoERunnerCore)
    for function, hook in (
        (UnquantizedFusedMoEMethod.create_moe_runner, choose_runner),
        (FusedMoE.__init__, check_layer),
    ):
        HookRegistry.register(f"{function.__module__}.{function.__qualname__}", hook, HookType.AFTER)
    add_moe_runner_backend_choices([NAME])
