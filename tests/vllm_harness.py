"""vLLM's MoE layers, as its CUDA platform builds and runs them.

Without a GPU they run on the CPU. Then vLLM is told of one NVIDIA H200. Its libraries, which need CUDA's, are
empty modules, so that what calls one of its kernels fails. All else is vLLM's: the factory, the loading of
weights, the operator vllm::moe_forward, the runner. Nothing outside vLLM sees the pretence. With a GPU
nothing is pretended: cuda/test_vllm_layers.py.
"""

import os
import sys
from types import ModuleType

import pytest
import torch

PACKAGES = os.environ.get("FUSED_MOE_TEST_PACKAGES") == "1"  # then a missing vLLM is a failure
if not PACKAGES:
    pytest.importorskip("vllm")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C")
NVML = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": "NVIDIA H200",
}


def pretend_cuda():
    """To be called before vLLM is imported."""
    for name in LIBRARIES:
        sys.modules.setdefault(f"vllm.{name}", ModuleType(name))
    for name in ("fp8", "block_fp8"):  # asked for while vLLM is imported
        operator = f"_C::cutlass_scaled_mm_supports_{name}"
        torch.library.define(operator, "(int capability) -> bool")
        torch.library.impl(operator, "default", lambda capability: False)
    import vllm.third_party.pynvml as nvml

    for name, answer in NVML.items():
        setattr(nvml, name, lambda *_, answer=answer: answer)
    from vllm.platforms import current_platform

    type(current_platform).dispatch_key = "CPU"  # of the operators that vLLM registers


if DEVICE.type == "cpu":
    pretend_cuda()

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.distributed.parallel_state import (  # noqa: E402
    destroy_distributed_environment,
    destroy_model_parallel,
)
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

import fused_moe.vllm  # noqa: E402
from fused_moe.vllm import experts  # noqa: E402


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    """vLLM's configuration, set, in a world of this process alone; our plugin is registered."""
    patch = pytest.MonkeyPatch()
    if DEVICE.type == "cpu":
        patch.setattr(experts, "why_no_kernels", lambda: None)  # the CPU's are used
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # raises where there is no accelerator
    fused_moe.vllm.register()
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('world')}/store", 0, "gloo")
        initialize_model_parallel()
        init_workspace_manager(DEVICE)
        yield config
    destroy_model_parallel()
    destroy_distributed_environment()
    patch.undo()


@pytest.fixture
def pretended():
    """For tests whose layers are on the CPU."""
    if DEVICE.type != "cpu":
        pytest.skip("for machines without a GPU; tests/cuda/test_vllm_layers.py is for those with one")


def route(hidden_states, gating_output, topk, renormalize):
    """Scores and ids in plain PyTorch: vLLM's router is a CUDA kernel."""
    scores, ids = gating_output.float().softmax(-1).topk(topk)
    return scores, ids.int()


def make_layer(config, num_experts=8, top_k=2, dim=32, hidden_dim=16, dtype=torch.bfloat16, **settings):
    """A layer of vLLM's factory with random weights, as it is after loading."""
    layer = build_layer(config, num_experts, top_k, dim, hidden_dim, dtype, **settings)
    for name, parameter in layer.routed_experts.named_parameters():
        parameter.data.normal_(std=1 if "bias" in name else parameter.size(-1) ** -0.5)
    load(layer)
    return layer


def build_layer(config, num_experts=8, top_k=2, dim=32, hidden_dim=16, dtype=torch.bfloat16, **settings):
    """A layer of vLLM's factory, without weights."""
    name = f"layers.{len(config.compilation_config.static_forward_context)}.experts"
    settings = {"params_dtype": dtype, "custom_routing_function": route, "prefix": name, **settings}
    return FusedMoEFactory(num_experts, top_k, dim, hidden_dim, **settings)


def load(layer):
    """What vLLM does when it has read the weights."""
    layer.routed_experts.quant_method.process_weights_after_loading(layer.routed_experts)


def ours(layer):
    """Our object in the layer's modular kernel, or vLLM's."""
    return layer.routed_experts.quant_method.moe_kernel.fused_experts


def run(config, layer, x, logits):
    """The layer as a model calls it: by vllm::moe_forward, which finds the layer in the forward context."""
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=x.size(0)):
        return layer(x, logits)


def sleep(layer) -> dict:
    """The weights' memory is freed, as vLLM's allocator does; what it kept on the host."""
    kept = {name: p.detach().clone() for name, p in layer.routed_experts.named_parameters()}
    for parameter in layer.routed_experts.parameters():
        parameter.untyped_storage().resize_(0)
    return kept


def wake(layer, kept):
    for name, parameter in layer.routed_experts.named_parameters():
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
        parameter.data.copy_(kept[name]) if kept else parameter.data.fill_(torch.nan)
