"""SGLang's MoE layers, as an engine started with --moe-runner-backend fused_moe builds and runs them.

They run on the CPU, by the method that SGLang calls on a GPU. All is SGLang's: its arguments, the plugin, the
layer, its dispatcher, the loading of weights, the runner. Pretended are the GPU that `fused_moe.sglang` asks
for, and torchvision's operators where its library does not fit this PyTorch: SGLang imports torchvision, but
no MoE layer calls it.
"""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch

PACKAGES = os.environ.get("FUSED_MOE_TEST_PACKAGES") == "1"  # then a missing SGLang is a failure
if not PACKAGES and importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)


def pretend_torchvision():
    package = Path(importlib.util.find_spec("torchvision").origin).parent
    try:
        torch.ops.load_library(next(package.glob("_C*.so")))
    except OSError:
        code = (package / "_meta_registrations.py").read_text()  # it asks for the operators
        for name in re.findall(r'register_(?:meta|fake)\("(?:torchvision::)?(\w+)"\)', code):
            torch.library.define(f"torchvision::{name}", "(Tensor a) -> Tensor")


pretend_torchvision()

import sglang.srt.layers.moe.fused_moe_triton.layer as sglang_layer  # noqa: E402
import sglang.srt.layers.moe.token_dispatcher.standard as standard_dispatcher  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.test.parallel_groups import publish  # noqa: E402

import fused_moe.sglang  # noqa: E402
from fused_moe.sglang import core  # noqa: E402

D, F, E, K = 32, 16, 8, 2
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": D,
    "intermediate_size": F,
    "moe_intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": D // 2,
    "num_experts": E,
    "num_experts_per_tok": K,
    "vocab_size": 64,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """The process of an engine, up to the building of its model."""
    fused_moe.sglang.register()
    HookRegistry.apply_hooks()
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    args = ServerArgs(
        model_path=str(model), device="cpu", moe_runner_backend="fused_moe", skip_tokenizer_init=True
    )
    publish(args, role="scheduler")
    initialize_moe_config()


@pytest.fixture
def pretended(engine, monkeypatch):
    monkeypatch.setattr(core, "why_no_kernels", lambda: None)
    monkeypatch.setattr(standard_dispatcher, "get_device", lambda: "cpu")


def build_layer(**settings):
    """SGLang's layer, with memory not yet written to."""
    sizes = {"num_experts": E, "hidden_size": D, "intermediate_size": F, "top_k": K, "layer_id": 0}
    return sglang_layer.FusedMoE(**{**sizes, "params_dtype": torch.bfloat16, **settings})


def make_layer(**settings):
    """A layer with random weights, which keep signals of order one."""
    layer = build_layer(**settings)
    for parameter in layer.parameters():
        parameter.data.normal_(std=1 if parameter.dim() == 2 else parameter.size(-1) ** -0.5)
    return layer


def run(layer, x, scores, ids):
    layer.quant_method._forward_method = layer.quant_method.forward_cuda  # not the CPU's
    with torch.inference_mode():
        return layer(x.clone(), StandardTopKOutput(scores, ids, None))
