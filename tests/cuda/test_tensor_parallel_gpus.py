"""ExpertTensorParallel on two GPUs, with the kernels of GPUs and NCCL, against the layer of one."""

import pytest
import torch
from ranks import started
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fused_moe import FusedMoE
from fused_moe.tensor_parallel import ExpertTensorParallel

pytestmark = pytest.mark.gpu

RANKS = 2
D, F, E, K = 256, 512, 16, 4
BOUND = 2e-2  # of sums of two bf16 parts against one
LAYERS = {
    "plain": {},
    "shared": {"num_shared_experts": 1, "shared_expert_gate": True},
    "ungated, biases": {"gated": False, "activation": "relu2", "bias": True},
}


@pytest.fixture(scope="module")
def workers(device, tmp_path_factory):
    yield from started(RANKS, device, tmp_path_factory)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def step(layer, x, dout):
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(dout)
    return {"out": out.detach(), "dx": x.grad} | {n: whole(p.grad) for n, p in layer.named_parameters()}


def errors_of_a_step(rank, device, name, dim):
    """{tensor: its error, relative to its norm}, of the split layer against the whole one."""
    torch.manual_seed(1)
    layer = FusedMoE(D, F, E, K, **LAYERS[name]).to(device, torch.bfloat16)
    x, dout = (torch.randn(4, 192, D).to(device, torch.bfloat16) for _ in range(2))
    expected = step(layer, x, dout)
    layer.zero_grad(set_to_none=True)
    mesh = init_device_mesh(device.type, (RANKS,), mesh_dim_names=("tp",))
    layout = Replicate() if dim is None else Shard(dim)
    parallelize_module(layer, mesh, ExpertTensorParallel(input_layouts=layout, output_layouts=layout))

    def part(t):
        return t if dim is None else t.chunk(RANKS, dim)[rank].contiguous()

    found = step(layer, part(x), part(dout))
    expected |= {n: part(expected[n]) for n in ("out", "dx")}
    assert found.keys() == expected.keys()
    return {n: float((found[n].float() - t.float()).norm() / t.float().norm()) for n, t in expected.items()}


@pytest.mark.parametrize("dim", (None, 0, 1), ids=("replicated", "batch", "sequence"))
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_two_gpus(workers, name, dim):
    for errors in workers(errors_of_a_step, name, dim):
        assert max(errors.values()) < BOUND, errors
