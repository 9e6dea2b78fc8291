"""ExpertTensorParallel on gloo ranks: outputs, gradients and steps of one process, in float64."""

import warnings

import pytest
import torch
from ranks import started
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import FusedMoE, add_lora, clip_grad_norm_, quantize
from fused_moe.tensor_parallel import ExpertTensorParallel

RANKS = 4


@pytest.fixture(scope="module")
def workers(cpu, tmp_path_factory):
    yield from started(RANKS, cpu, tmp_path_factory)


N = 2
B, S, D, F, E, K = 3, 4, 8, 16, 4, 2
TOLERANCE = 1e-12
EVERYTHING = {
    "num_shared_experts": 2,
    "shared_expert_gate": True,
    "bias": True,
    "gate_bias": True,
    "expert_scale": True,
    "load_balance_coeff": 1e-3,
}
LAYERS = {
    "plain": {},
    "everything": EVERYTHING,
    "ungated": {"gated": False, "activation": "relu2", "num_shared_experts": 1},
    "clamped": {"activation": "swiglu_clamped", "bias": True, "score_func": "sigmoid", "route_norm": True},
}


def new_layer(name="everything", lora=0, dtype=torch.float64):
    """The same in every process."""
    torch.manual_seed(1)
    layer = FusedMoE(D, F, E, K, **LAYERS[name]).to(dtype)
    for i in range(lora):
        add_lora(layer, 2 + i, alpha=3, name=f"a{i}", targets=("w1", "w2", "w3")[i:])
    fused_moe.set_lora(layer, [f"a{i}" for i in range(lora)]) if lora else None
    return filled(layer)


def filled(layer):
    """With adapters that change something, which may be DTensors."""
    generator = torch.Generator().manual_seed(5)
    for name in layer.experts.loras:
        state = fused_moe.lora_state_dict(layer, name)
        values = {
            k: t if k.endswith("scaling") else torch.randn(t.shape, generator=generator, dtype=t.dtype)
            for k, t in state.items()
        }
        fused_moe.load_lora_state_dict(layer, values, name)
    return layer


def signals(seed=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, S, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def step(layer, x, dout, losses=False, call=None, **options):
    """out, dx and every parameter's gradient."""
    x = x.clone().requires_grad_()
    if losses:
        out, added = layer(x, return_losses=True, **options)
        loss = 0.1 * added.load_balancing + 0.01 * added.z
        torch.autograd.backward([out, loss], [dout, torch.ones_like(loss)])
    else:
        out = (call or layer)(x)
        out.backward(dout)
    found = {"out": out.detach(), "dx": x.grad}
    return found | {f"d{n}": whole(p.grad) for n, p in layer.named_parameters() if p.grad is not None}


def assert_close(found, expected, tolerance=TOLERANCE):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp_min(1e-30)
        assert error <= tolerance, (name, float(error))


def of(rank, t, layout):
    """A rank's part of a tensor that all ranks have."""
    return t.chunk(N, layout.dim)[rank].contiguous() if isinstance(layout, Shard) else t.clone()


def many_gradients(rank, device):
    layer, (x, dout) = new_layer("plain"), signals()
    mesh = init_device_mesh("cpu", (2, N), mesh_dim_names=("dp", "tp"))["tp"]
    parallelize_module(layer, mesh, ExpertTensorParallel())
    out = layer(x.requires_grad_())
    with pytest.raises(RuntimeError, match="expected one gradient .* found many, by is_grads_batched"):
        torch.autograd.grad(out, x, torch.stack((dout, 2 * dout)), is_grads_batched=True, retain_graph=True)
    return [torch.autograd.grad(out, x, dout, retain_graph=True)[0], torch.autograd.grad(out, x, dout)[0]]


def test_many_gradients_at_once(workers):
    """They raise on all ranks, and the next backward pass works."""
    for first, again in workers(many_gradients):
        assert first.any() and torch.equal(first, again)


def joined(found, name, layout):
    """What ranks have of a tensor, as one process has it; replicas have the same bits."""
    parts = [result[name] for result in found]
    if isinstance(layout, Shard):
        return torch.cat(parts, layout.dim)
    if isinstance(layout, Partial):
        return sum(parts)
    assert all(torch.equal(part, parts[0]) for part in parts[1:]), name
    return parts[0]


def merged(found, input_layout, output_layout):
    layouts = {"out": output_layout, "dx": input_layout}
    return {name: joined(found, name, layouts.get(name, Replicate())) for name in found[0]}


def on_two(workers, fn, *args):
    return [result for result in workers(on_mesh, fn, *args) if result is not None]


def on_mesh(rank, device, fn, *args):
    mesh = DeviceMesh("cpu", list(range(N)), mesh_dim_names=("tp",))  # making it takes all ranks
    return fn(rank, mesh, *args) if rank < N else None


# --- the layer ----------------------------------------------------------------------------------------


def split_step(rank, mesh, name, lora, layouts, losses):
    layer = new_layer(name, lora)
    style = ExpertTensorParallel(input_layouts=layouts[0], output_layouts=layouts[1])
    parallelize_module(layer, mesh, style)
    assert layer.experts.w1.to_local().shape == (E, F // N, D)
    assert layer.experts.w2.to_local().shape == (E, D, F // N)
    x, dout = (of(rank, t, layout) for t, layout in zip(signals(), layouts, strict=True))
    return step(layer, x, dout, losses)


R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.mark.parametrize("layouts", ((R, R), (S1, S1), (R, S1), (S1, R), (R, P)), ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(workers, name, layouts):
    losses = name == "everything"
    found = on_two(workers, split_step, name, 0, layouts, losses)
    assert_close(merged(found, *layouts), step(new_layer(name), *signals(), losses))


@pytest.mark.parametrize("layouts", ((R, R), (S1, S1)), ids=str)
@pytest.mark.parametrize("count", (1, 2))
def test_adapters(workers, count, layouts):
    """Added before the style: one or two at once, which are joined."""
    found = on_two(workers, split_step, "plain", count, layouts, False)
    assert_close(merged(found, *layouts), step(new_layer("plain", count), *signals()))


def adapters_added_afterwards(rank, mesh):
    """Ranks get the first one's, and the same ones as a whole layer's."""
    layer = new_layer("plain")
    parallelize_module(layer, mesh, ExpertTensorParallel())
    torch.manual_seed(rank)
    add_lora(layer, 2, alpha=3, name="a0")
    first = {n: whole(p.detach()) for n, p in layer.experts.lora_a0.named_parameters()}
    fused_moe.set_lora(layer, "a0")
    with pytest.raises(ValueError, match=r"to be shards of experts, Shard\(0\), found"):
        fused_moe.merge_lora(layer)
    return first, step(filled(layer), *signals())


def other_adapters(rank, mesh):
    layer = parallelize_module(new_layer(), mesh, ExpertTensorParallel())
    with pytest.raises(ValueError, match="ExpertTensorParallel: expected adapter a1 .* on all ranks, found "):
        add_lora(layer, 2 + 2 * rank)
    return filled(add_lora(layer, 2)).experts.lora.scale


def test_adapters_of_other_ranks_are_an_error(workers):
    on_two(workers, other_adapters)


def test_adapters_added_afterwards(workers):
    (first, found), (second, other) = on_two(workers, adapters_added_afterwards)
    assert all(torch.equal(first[name], second[name]) for name in first) and first["a1"].any()
    assert_close(merged([found, other], R, R), step(new_layer("plain", 1), *signals()))


def dtensors(rank, mesh):
    """A DTensor comes and goes, by name; kept for tokens of no length, too."""
    layer = new_layer()
    parallelize_module(layer, mesh, ExpertTensorParallel(output_layouts=S1, use_local_output=False))
    x, _ = signals()
    with torch.no_grad():
        out = layer(x=DTensor.from_local(of(rank, x, S1), mesh, [S1]))
        none = layer(x[:, :0])
    assert out.placements == (S1,) and out.shape == x.shape and none.shape == (B, 0, D)
    return out.full_tensor()


def test_dtensors(workers):
    for found in on_two(workers, dtensors):
        torch.testing.assert_close(found, new_layer()(signals()[0]).detach(), rtol=1e-12, atol=1e-12)


def after_a_norm(rank, mesh):
    """PyTorch's SequenceParallel before, which gives a DTensor; checkpointed."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(D).double(), new_layer())
    style = ExpertTensorParallel(input_layouts=S1, output_layouts=S1)
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": style})
    x, dout = (of(rank, t, S1) for t in signals())
    return step(model, x, dout, call=lambda x: checkpoint(model, x, use_reentrant=False))


def test_after_sequence_parallel(workers):
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(D).double(), new_layer())
    assert_close(merged(on_two(workers, after_a_norm), S1, S1), step(model, *signals()))


def with_ids(rank, mesh):
    """ids, num_tokens and what is counted are those of all tokens."""
    layer = new_layer()
    parallelize_module(layer, mesh, ExpertTensorParallel(input_layouts=S1))
    x, _ = signals()
    _, ids = layer(of(rank, x, S1), return_ids=True)
    out = layer(of(rank, x, S1), ids=ids.flip(-1), num_tokens=torch.tensor(B * S - 3))
    return {"out": out.detach(), "ids": ids, "counts": layer.tokens_per_expert}


def test_given_ids_and_padding(workers):
    layer, (x, _) = new_layer(), signals()
    _, ids = layer(x, return_ids=True)
    expected = layer(x, ids=ids.flip(-1), num_tokens=torch.tensor(B * S - 3)).detach()
    found = merged(on_two(workers, with_ids), R, R)
    assert torch.equal(found["ids"], ids) and torch.equal(found["counts"], layer.tokens_per_expert)
    torch.testing.assert_close(found["out"], expected, rtol=1e-12, atol=1e-12)


def padded(rank, mesh, layouts):
    """Two passes whose padded rows hold NaN, and the gradients of losses."""
    layer = new_layer()
    if mesh is not None:
        style = ExpertTensorParallel(input_layouts=layouts[0], output_layouts=layouts[1])
        parallelize_module(layer, mesh, style)
    for i in range(2):
        x, dout = signals(i)
        x.view(-1, D)[B * S - 3 :] = torch.nan
        if mesh is not None:
            x, dout = (of(rank, t, layout) for t, layout in zip((x, dout), layouts, strict=True))
        found = step(layer, x, dout, losses=True, num_tokens=torch.tensor(B * S - 3))
    return found | {"counts": layer.tokens_per_expert.double()}


@pytest.mark.parametrize("layouts", ((R, R), (S1, S1), (R, P)), ids=str)
def test_padding_with_losses(workers, layouts):
    """Gradients add up, and all ranks count each real token once."""
    assert_close(merged(on_two(workers, padded, layouts), *layouts), padded(0, None, layouts))


def compiled(rank, mesh, layouts):
    layer = new_layer()
    style = ExpertTensorParallel(input_layouts=layouts[0], output_layouts=layouts[1])
    parallelize_module(layer, mesh, style)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dout = (of(rank, t, layout) for t, layout in zip(signals(), layouts, strict=True))
    return step(layer, x, dout, call=lambda x: call(x))


def test_compiled(workers):
    """One graph, with the collectives in it."""
    assert_close(merged(on_two(workers, compiled, (S1, R)), S1, R), step(new_layer(), *signals()))


# --- training -----------------------------------------------------------------------------------------


def trained(layer, share, steps=3, divide=1):
    """Parameters and clipped norms of three steps."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    fused_moe.balance(layer, optimizer)
    norms = []
    for i in range(steps):
        x, dout = map(share, signals(10 + i))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*returned a view")  # of fully_shard
            out = layer(x)
        out.mul_(1)  # whose hook has to survive a write
        out.backward(dout / divide)
        norms.append(clip_grad_norm_(layer.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    found = {n: whole(p.detach()) for n, p in layer.named_parameters()}
    return found | {"norms": torch.stack(norms), "bias": layer.expert_bias.clone()}


def split_training(rank, mesh, layout):
    layer = new_layer()
    layer.load_balance_coeff = 0.0  # its hook would sum over ranks that do not train
    parallelize_module(layer, mesh, ExpertTensorParallel(input_layouts=layout, output_layouts=layout))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for i in range(3):
        x, dout = (of(rank, t, layout) for t in signals(10 + i))
        layer(x).backward(dout)
        clip_grad_norm_(layer.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {n: whole(p.detach()) for n, p in layer.named_parameters()}


@pytest.mark.parametrize("layout", (R, S1), ids=str)
def test_three_steps(workers, layout):
    """Replicas stay bit-equal, router and gate among them, and all is near one process."""
    found = merged(on_two(workers, split_training, layout), R, R)
    expected = trained(new_layer(), torch.clone)
    assert_close(found, {name: expected[name] for name in found}, 1e-11)


def grid_training(rank, device, layout):
    grid = init_device_mesh("cpu", (2, N), mesh_dim_names=("dp", "tp"))
    layer = new_layer()
    parallelize_module(layer, grid["tp"], ExpertTensorParallel(input_layouts=layout, output_layouts=layout))
    fully_shard(layer.experts, mesh=grid["dp"])
    fully_shard(layer, mesh=grid["dp"])
    assert layer.experts.w1.placements == (Shard(0), Shard(1))
    column, row = grid.get_coordinate()
    tokens = [slice(0, 1), slice(1, B)][column]  # uneven shares of the batch
    return trained(layer, lambda t: of(row, t[tokens], layout), divide=0.5)  # FSDP2 takes the mean


@pytest.mark.parametrize("layout", (R, S1), ids=str)
def test_three_steps_beside_fully_shard(workers, layout):
    """On four ranks, with the balance of one process, whose tokens each count once."""
    found = workers(grid_training, layout)
    assert_close(merged(found, R, R), trained(new_layer(), torch.clone), 1e-11)


def accumulated(rank, mesh):
    """main_grads, set on the DTensors afterwards: .grad stays None."""
    layer = new_layer("plain", dtype=torch.float32)
    if mesh is not None:
        parallelize_module(layer, mesh, ExpertTensorParallel())
    for w in layer.experts.weights:
        w.main_grad = torch.zeros_like(w, dtype=torch.float32)
    x, dout = signals(dtype=torch.float32)
    for _ in range(2):
        layer(x).backward(dout)
    assert all(w.grad is None for w in layer.experts.weights)
    return {n: whole(p.main_grad) for n, p in layer.experts.named_parameters()}


def test_main_grads(workers):
    assert_close(merged(on_two(workers, accumulated), R, R), accumulated(0, None), 1e-5)


def in_fp8(rank, mesh, splits):
    torch.manual_seed(1)
    layer = FusedMoE(128, 256, 2, 1).bfloat16()
    fused_moe.enable_fp8(layer, force=True)
    if splits:
        parallelize_module(layer, mesh, ExpertTensorParallel())
    torch.manual_seed(2)
    x, dout = torch.randn(2, 32, 128, dtype=torch.bfloat16)
    return {name: t.float() for name, t in step(layer, x, dout).items()}


def test_fp8(workers):
    """Each rank's part of F is a multiple of 128, whose blocks are those of the whole weight."""
    assert_close(merged(on_two(workers, in_fp8, True), R, R), in_fp8(0, None, False), 2e-2)


def under_autocast(rank, mesh):
    layer = new_layer(dtype=torch.float32)
    if mesh is not None:
        parallelize_module(layer, mesh, ExpertTensorParallel())
    with torch.autocast("cpu", torch.bfloat16):
        found = step(layer, *(t.float() for t in signals()), call=lambda x: layer(x).float())
    return {name: t.float() for name, t in found.items()}


def test_autocast(workers):
    assert_close(merged(on_two(workers, under_autocast), R, R), under_autocast(0, None), 3e-2)


# --- state dicts --------------------------------------------------------------------------------------


def states(rank, mesh):
    """Full tensors have the names, shapes and bits of one process, and load into another layer."""
    layer, other = new_layer(lora=1), new_layer(lora=1)
    expected = {name: t.clone() for name, t in layer.state_dict().items()}
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    for module in (layer, other):
        parallelize_module(module, mesh, ExpertTensorParallel())
    options = StateDictOptions(full_state_dict=True)
    for module in (layer, other):
        found = get_model_state_dict(module, options=options)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], t) for name, t in expected.items())
        set_model_state_dict(other, found, options=options)
    return {}


def test_state_dicts(workers):
    on_two(workers, states)


# --- wrong calls --------------------------------------------------------------------------------------


def refusals(rank, mesh):
    accumulating, latent, fp8 = new_layer(), FusedMoE(D, F, E, K, latent_dim=4), FusedMoE(128, 128, 2, 1)
    accumulating.experts.w2.main_grad = torch.zeros_like(accumulating.experts.w2)
    quantised = FusedMoE(64, 64, E, K)
    quantize(quantised, "int8")
    hooked = new_layer()
    hooked.shared_experts.w2.register_forward_hook(lambda *_: None)
    split = parallelize_module(new_layer(), mesh, ExpertTensorParallel())
    wrong = (
        new_layer().experts,
        split,
        accumulating,
        quantised,
        latent,
        hooked,
        FusedMoE(D, 24, E, K),
        fused_moe.enable_fp8(fp8, force=True),
        FusedMoE(D, F if rank == 0 else 2 * F, E, K),
        FusedMoE(D, F if rank == 0 else 24, E, K),
        nn.Linear(2, 2) if rank == 0 else new_layer(),
    )
    found = []
    for module in wrong:
        with pytest.raises((TypeError, ValueError)) as raised:
            ExpertTensorParallel()._apply(module, mesh)
        found.append(f"{raised.type.__name__} {raised.value}".replace("ExpertTensorParallel: expected ", ""))
    with pytest.raises(ValueError, match="the same layer and layouts on all ranks, found others on rank"):
        ExpertTensorParallel(output_layouts=(R, S1)[rank])._apply(new_layer(), mesh)
    return found


def test_wrong_modules(workers):
    """An error on both ranks, also where only one has a wrong layer."""
    first, second = on_two(workers, refusals)
    why = "as kernels need"
    assert first[:8] == second[:8]
    assert first == [
        "TypeError a FusedMoE, found Experts",
        "ValueError plain parameters, as before fully_shard, found DTensors",
        "ValueError main_grad to be set afterwards, on the DTensors, found one",
        "ValueError experts of plain parameters, found quantised weights",
        "ValueError a layer without latent_dim, found one with it",
        "ValueError linear layers of shared experts as they were made, found one that has hooks",
        f"ValueError hidden_dim that is a multiple of 16: 2 ranks with a multiple of 8 each, {why}, found 24",
        f"ValueError hidden_dim that is a multiple of 256: 2 ranks with a multiple of 128 each, {why}, "
        "found 128",
        "ValueError the same layer and layouts on all ranks, found others on rank 1",
        "ValueError the same layer and layouts on all ranks, found an error on rank 1",
        "TypeError a FusedMoE, found Linear",
    ]
    assert second[8] == "ValueError the same layer and layouts on all ranks, found others on rank 0"
    assert "multiple of 8 each" in second[9]
    assert second[10] == "ValueError the same layer and layouts on all ranks, found an error on rank 0"


def other_shapes(rank, mesh, layout):
    """Tokens that ranks do not share evenly, or no tokens: an error on both, and the next call works."""
    layer = parallelize_module(new_layer(), mesh, ExpertTensorParallel(input_layouts=layout))
    lists = [0.0] if rank else torch.zeros(4, D)
    split = DTensor.from_local(torch.zeros(2, D), mesh, [S0]) if rank else torch.zeros(4, D)
    for x in (torch.zeros(3 + rank, D), torch.zeros((2,) * (1 + rank) + (D,)), lists, split):
        with pytest.raises(ValueError, match="expected x of the same shape on all ranks, found .* on this"):
            layer(x.double() if isinstance(x, torch.Tensor) else x)
    return layer(signals()[0]).detach()


@pytest.mark.parametrize("layout", (R, S0), ids=str)
def test_other_shapes_are_an_error_on_all_ranks(workers, layout):
    first, second = on_two(workers, other_shapes, layout)
    assert torch.equal(first, second)


def wrong_meshes(rank, device):
    grid = init_device_mesh("cpu", (2, N), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"a mesh of one dimension, found shape \(2, 2\)"):
        ExpertTensorParallel()._apply(new_layer(), grid)
    layer = parallelize_module(new_layer(), grid["tp"], ExpertTensorParallel())
    x = DTensor.from_local(signals()[0], grid["dp"], [R])
    with pytest.raises(ValueError, match="ExpertTensorParallel: expected x on .*tp.*, found x on .*dp"):
        layer(x)
    with pytest.raises(TypeError, match="FusedMoE: expected x to be a tensor of .*, found list"):
        layer([1.0])
    add_lora(layer, 2)
    fully_shard(layer, mesh=grid["dp"])
    with pytest.raises(ValueError, match="to be sharded by ExpertTensorParallel alone, as before fully"):
        add_lora(layer, 2, name="more")


def test_wrong_meshes(workers):
    workers(wrong_meshes)
    assert RANKS == 2 * N


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_layouts": "shard"}, TypeError, "input_layouts to be a Placement, found str"),
        ({"output_layouts": 1}, TypeError, "output_layouts to be a Placement, found int"),
        ({"use_local_output": None}, TypeError, "use_local_output to be True or False, found NoneType"),
    ],
)
def test_wrong_options(cpu, options, error, message):
    with pytest.raises(error, match=f"ExpertTensorParallel: expected {message}"):
        ExpertTensorParallel(**options)


def test_it_says_what_it_does(cpu):
    assert "input_layouts=(Shard(dim=1),)" in repr(ExpertTensorParallel(input_layouts=S1))
