"""fused_moe.vllm on a GPU: layers of vLLM's factory through vLLM's runner, by Hopper's kernels.

Needs vLLM, on PYTHONPATH for example: python -m pytest --device cuda tests/cuda/test_vllm_layers.py
"""

from vllm_harness import build_layer, load, make_layer, ours, route, run, vllm_config  # noqa: F401

# isort: split
import pytest
import test_vllm_eight_bit as eight_bit
import test_vllm_quantized as quantized
import torch
import vllm.model_executor.layers.fused_moe.config as moe_config
from cases import BF16, F64
from gpu_cases import capture
from judging import LOOSE, assert_as_good
from test_vllm import ACTIVATIONS, plain
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from fused_moe.vllm.experts import FusedMoEExperts

pytestmark = pytest.mark.gpu

D, F, E, K = 256, 128, 16, 4
SIZES = {"num_experts": E, "top_k": K, "dim": D, "hidden_dim": F}
TOKENS = (1, 64, 777)
UNQUANTISED = "unquantised"
FORMATS = ("fp8_block", "compressed int8", "compressed int4", "gptq", "mxfp4")
# Formats that are computed with activations of 8 bits.
EIGHT_BITS = {f"{name}, 8 bits": name for name in ("fp8_block", "compressed fp8", "compressed int8")}
EVERY_FORMAT = pytest.mark.parametrize("name", (UNQUANTISED, *FORMATS, *EIGHT_BITS))


@pytest.fixture
def config(sm90, device, vllm_config):  # noqa: F811
    """With the device as torch's default, as vLLM has it while it builds a model."""
    with device:
        yield vllm_config


def inputs(T, num_experts=E):
    """Logits in float32: no ties, which routers break in different ways."""
    return torch.randn(T, D, dtype=BF16), torch.randn(T, num_experts)


# --- layers without quantisation ----------------------------------------------------------------------


def check(config, layer, name="silu", expert_map=None):
    """A layer is as near to its experts in float64 as plain PyTorch in bfloat16."""
    assert isinstance(ours(layer), FusedMoEExperts)
    for T in TOKENS:
        x, logits = inputs(T)
        scores, ids = route(x, logits, K, True)
        out = run(config, layer, x, logits)
        eager, exact = (
            {"out": plain(layer, x, scores, ids, ACTIVATIONS[name][1], dtype, expert_map)}
            for dtype in (BF16, F64)
        )
        assert_as_good({"out": out}, eager, exact, LOOSE)


@pytest.mark.parametrize("name, bias", (("silu", False), ("relu2_no_mul", False), ("swigluoai", True)))
def test_activations(config, name, bias):
    settings = ACTIVATIONS[name][0]
    check(config, make_layer(config, **SIZES, activation=name, has_bias=bias, **settings), name)


def test_router(config):
    """vLLM's own router, a CUDA kernel, which does not renormalise here, as `route`."""
    check(config, make_layer(config, **SIZES, custom_routing_function=None, renormalize=False))


@pytest.mark.parametrize("rank", (0, 1))
def test_expert_map(config, monkeypatch, rank):
    """Half of the experts are another rank's."""
    monkeypatch.setattr(config.parallel_config, "enable_expert_parallel", True)
    monkeypatch.setattr(moe_config, "get_tensor_model_parallel_rank", lambda: rank)
    layer = make_layer(config, **SIZES, tp_size=2)
    assert layer.routed_experts.w2_weight.size(0) == E // 2
    check(config, layer, expert_map=layer.routed_experts.expert_map)


# --- every format -------------------------------------------------------------------------------------


def checkpoint(name):
    """(name, tensor) for each on the host, and the projections' values on the device."""
    with torch.device("cpu"):
        if name != UNQUANTISED:
            tensors, values = quantized.checkpoint(EIGHT_BITS.get(name, name))
        else:
            values = {n: torch.randn(quantized.E, *s) / s[1] ** 0.5 for n, s in quantized.SHAPES.items()}
            tensors = [(f"{e}.{n}.weight", v[e].to(BF16)) for n, v in values.items() for e in range(len(v))]
    return tensors, {n: v.cuda() for n, v in values.items()}


def layer_of(config, name, tensors):
    """A layer that has loaded a checkpoint. Quantised weights are in tiles if activations have 16 bits."""
    if name != UNQUANTISED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FUSED_MOE_VLLM_COMPUTE", "fp8,int8" if name in EIGHT_BITS else "codes")
            layer = quantized.layer_of(config, EIGHT_BITS.get(name, name), tensors)
        for packed in layer.routed_experts.quant_method._packed:
            assert packed.of(layer.routed_experts).is_tiled == (name not in EIGHT_BITS)
    else:
        layer = build_layer(config, quantized.E, quantized.K, D, F)
        record_metadata_for_reloading(layer)
        list(layer.load_weights(tensors))
        load(layer)
    assert isinstance(ours(layer), FusedMoEExperts)
    return layer


def check_values(out, x, logits, values, name):
    if name not in EIGHT_BITS:
        quantized.check(out, x, logits, values)
    else:
        assert eight_bit.error(out, x, logits, values) < 0.1


class Graph:
    """The call of a layer as a CUDA graph; other inputs are written over the first."""

    def __init__(self, config, layer, T):
        self.x, self.logits = inputs(T, quantized.E)
        self.graph, self.out = capture(lambda: run(config, layer, self.x, self.logits))

    def replay(self):
        self.graph.replay()
        return self.out.clone()

    def other_inputs(self):
        for old, new in zip((self.x, self.logits), inputs(len(self.x), quantized.E), strict=True):
            old.copy_(new)


@EVERY_FORMAT
def test_a_token_in_every_batch(config, name):
    """A token alone and among 777: the same bits, near to the dequantised weights' result."""
    tensors, values = checkpoint(name)
    layer, (x, logits) = layer_of(config, name, tensors), inputs(777, quantized.E)
    out = run(config, layer, x, logits)
    check_values(out, x, logits, values, name)
    if name in EIGHT_BITS:
        eight_bit.check(out, x, logits, EIGHT_BITS[name], [(n, t.to(x.device)) for n, t in tensors])
    for t in (0, 1, 400, 776):
        alone = run(config, layer, x[t : t + 1], logits[t : t + 1])
        assert torch.equal(alone, out[t : t + 1])


@pytest.mark.parametrize("T", (1, 64))
@EVERY_FORMAT
def test_a_graph_follows_updates(config, name, T):
    """Replayed with other inputs, and after each of three reloads: the bits of a layer that has loaded the
    same weights, called without a graph."""
    tensors, _ = checkpoint(name)
    layer = layer_of(config, name, tensors)
    graph = Graph(config, layer, T)
    for _ in range(2):
        graph.other_inputs()
        assert torch.equal(graph.replay(), run(config, layer, graph.x, graph.logits))
    for _ in range(3):
        before = graph.replay()
        tensors, values = checkpoint(name)
        quantized.reload(layer, tensors)
        after = graph.replay()
        fresh = layer_of(config, name, tensors)
        assert torch.equal(after, run(config, fresh, graph.x, graph.logits))
        check_values(after, graph.x, graph.logits, values, name)
        assert not torch.equal(after, before)


@pytest.fixture
def allocator():
    """vLLM's, which frees the weights' memory and keeps their addresses."""
    cumem = pytest.importorskip("vllm.device_allocator.cumem", exc_type=ImportError)
    if not cumem.cumem_available:
        pytest.skip("needs vllm.cumem_allocator, which vLLM has not found")
    return cumem.CuMemAllocator.get_instance()


@pytest.mark.parametrize("level", (1, 2), ids=("sleep 1", "sleep 2"))
@EVERY_FORMAT
def test_sleep_and_wake(config, allocator, name, level):
    """The same bits afterwards, also of a graph; the second level discards the weights: they are reloaded."""
    tensors, _ = checkpoint(name)
    with allocator.use_memory_pool(tag="weights"):
        layer = layer_of(config, name, tensors)
    graph = Graph(config, layer, 64)
    before = graph.replay()
    torch.cuda.synchronize()
    allocator.sleep("weights" if level == 1 else ())
    allocator.wake_up()
    if level == 2:
        for parameter in layer.routed_experts.parameters():
            parameter.data.view(torch.uint8).fill_(255)
        quantized.reload(layer, tensors)
    assert torch.equal(graph.replay(), before)
    assert torch.equal(run(config, layer, graph.x, graph.logits), before)
