"""SGLang's interface (0.5.23) as far as fused_moe.sglang touches it: no SGLang is installed in CI.

`install` puts the modules into sys.modules. Names and signatures are those of SGLang; the bodies do only what
a runner core sees. `build` makes a layer's method, as SGLang's layer does.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

NAMES = (
    "sglang",
    "sglang.version",
    "sglang.srt",
    "sglang.srt.arg_groups",
    "sglang.srt.arg_groups.choices",
    "sglang.srt.layers",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.moe.fused_moe_triton",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.layers.moe.moe_runner",
    "sglang.srt.layers.moe.moe_runner.base",
    "sglang.srt.layers.moe.token_dispatcher",
    "sglang.srt.layers.moe.token_dispatcher.standard",
    "sglang.srt.layers.moe.utils",
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.quantization.unquant",
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
)


@dataclass
class MoeRunnerConfig:
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    inplace: bool = True
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config):
        self.config = config

    @property
    @abstractmethod
    def runner_backend(self): ...

    @abstractmethod
    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None): ...


class TopKOutput(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any


class StandardDispatchOutput(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: TopKOutput
    hidden_states_pre_quant: Any = None


class StandardCombineInput(NamedTuple):
    hidden_states: Any


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Any
    w2_weight: Any
    b13: Any = None
    b2: Any = None


class Backend(NamedTuple):
    value: str

    def is_none(self):
        return self.value == "none"


def install(monkeypatch):
    """Fresh modules. `state` has the flags (backend, exchange), what was registered and the hooks."""
    modules = {name: ModuleType(name) for name in NAMES}
    state = SimpleNamespace(
        backend="auto", exchange="none", choices=["auto", "triton"], cores={}, hooks={}, modules=modules
    )

    def register_moe_runner_core(backend_name, factory):
        if backend_name in state.cores:
            raise ValueError(f"Runner core for {backend_name!r} is already registered")
        state.cores[backend_name] = factory

    class MoeRunner:
        def __init__(self, runner_backend, config, lora_enabled=False):
            self.runner_backend, self.config = runner_backend, config
            factory = state.cores.get(runner_backend.value)
            self.runner_core = factory and factory(config)

        def run(self, dispatch_output, quant_info, lora_info=None):
            assert isinstance(self.runner_core, DispatchMoeRunnerCore)
            return self.runner_core.run_from_dispatch(
                dispatch_output, quant_info, self.config, hooks=lora_info
            )

    class UnquantizedFusedMoEMethod:
        def create_moe_runner(self, layer, moe_runner_config):
            self.runner = MoeRunner(Backend("triton"), moe_runner_config)

    def create_moe_dispatcher(moe_runner_config, quant_method):
        return None

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type="after", *, source=None):
            state.hooks[target] = (hook, hook_type)

    srt, moe = "sglang.srt.", "sglang.srt.layers.moe."
    contents = {
        "sglang.version": {"__version__": "0.5.23"},
        srt + "arg_groups.choices": {
            "MOE_RUNNER_BACKEND_CHOICES": state.choices,
            "add_moe_runner_backend_choices": state.choices.extend,
        },
        moe + "fused_moe_triton.layer": {"create_moe_dispatcher": create_moe_dispatcher},
        moe + "moe_runner": {"MoeRunner": MoeRunner, "register_moe_runner_core": register_moe_runner_core},
        moe + "moe_runner.base": {"DispatchMoeRunnerCore": DispatchMoeRunnerCore},
        moe + "token_dispatcher.standard": {"StandardCombineInput": StandardCombineInput},
        moe + "utils": {
            "get_moe_a2a_backend": lambda: Backend(state.exchange),
            "get_moe_runner_backend": lambda: Backend(state.backend),
            "resolve_moe_runner_backend": Backend,
        },
        srt + "layers.quantization.unquant": {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod},
        srt + "plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AFTER="after", BEFORE="before"),
        },
    }
    for name, attributes in contents.items():
        vars(modules[name]).update(attributes)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fused_moe.sglang.runner", raising=False)
    state.method = UnquantizedFusedMoEMethod
    return state


def build(state, config, method=None):
    """A layer's method with its runner, as SGLang's layer makes them, with the hooks that it applies."""
    method = state.method() if method is None else method
    hooks = {(target.rpartition(".")[2], kind): hook for target, (hook, kind) in state.hooks.items()}
    if isinstance(method, state.method):
        method.create_moe_runner(None, config)
        if type(method).create_moe_runner is state.method.create_moe_runner:
            hooks["create_moe_runner", "after"](None, method, None, config)
    hooks["create_moe_dispatcher", "before"](config, quant_method=method)
    return method
