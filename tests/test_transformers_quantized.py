"""fused_moe.transformers on quantised experts: checkpoints that stay packed, FP8Experts, quantize_experts.

What a model computes is compared with the same model in eager, its experts' weights replaced by the values
that they are quantised to. Checkpoints are written here, as those that are published have their tensors.
"""

import copy
import gc
import json
import re
import sys
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import (
    BF16,
    F32,
    LOOSE,
    Calls,
    assert_as_good,
    assert_near,
    assert_same_bits,
    make_ids,
    quantize_options,
)
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import parametrize, prune

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from packaging.version import Version  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from test_transformers import (  # noqa: E402, F401 - with the fixtures
    EXPERTS,
    Routing,
    experts_config,
    fresh_warnings,
    registered,
    tiny_model,
    token_ids,
)
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.integrations.peft import MIN_PEFT_VERSION  # noqa: E402
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING  # noqa: E402
from transformers.quantizers.base import HfQuantizer  # noqa: E402

import fused_moe.transformers  # noqa: E402
from fused_moe import QuantizedWeight, quantize  # noqa: E402
from fused_moe.quantized import tiles  # noqa: E402
from fused_moe.quantized.formats import FORMATS  # noqa: E402
from fused_moe.transformers import quantize_experts  # noqa: E402
from fused_moe.transformers.experts import settings_of  # noqa: E402
from fused_moe.transformers.weights import first_name, weight_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("codes")

BOTH_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))


def needs_recent_transformers() -> None:
    if not hasattr(HfQuantizer, "serialized_names"):
        pytest.skip(
            "this transformers unpacks checkpoints as it loads them, and its FP8Experts know fewer gates"
        )


def int4_config(**changed) -> dict:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["re:.*experts.*"], "weights": {**weights, **changed}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


# The layers that these models do not quantise.
DENSE = ["lm_head", "model.embed_tokens", "model.layers.*.self_attn"]

# kind -> family, its sizes, format, options of quantize, and the checkpoint's quantization_config
CHECKPOINTS = {
    "fp8_block": (
        "qwen3_moe",
        {"hidden_size": 256, "moe_intermediate_size": 128},
        "fp8_block",
        {},
        {"quant_method": "fp8", "modules_to_not_convert": [*DENSE, "model.layers.*.mlp.gate"]},
    ),
    "mxfp4": (
        "gpt_oss",
        {"hidden_size": 64, "intermediate_size": 96},
        "mxfp4",
        {},
        {"quant_method": "mxfp4", "modules_to_not_convert": [*DENSE, "model.layers.*.mlp.router"]},
    ),
    "int4": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 96},
        "int4",
        {"group_size": 32},
        int4_config(),
    ),
    "int4, Mixtral": (
        "mixtral",
        {"hidden_size": 64, "intermediate_size": 96},
        "int4",
        {"group_size": 32},
        int4_config(),
    ),
    "int4, zero points": (
        "qwen3_moe",
        {"hidden_size": 64, "moe_intermediate_size": 96},
        "int4",
        {"group_size": 32, "symmetric": False},
        int4_config(symmetric=False),
    ),
}
ALL_CHECKPOINTS = pytest.mark.parametrize("kind", CHECKPOINTS)
OWN_STORAGE = pytest.mark.parametrize("kind", [k for k in CHECKPOINTS if k != "fp8_block"])


@pytest.fixture(scope="module")
def codes(registered):  # noqa: F811
    """Activations stay as they are; test_transformers_eight_bit.py is for those that are quantised."""
    fused_moe.transformers.register(compute="codes")
    yield
    fused_moe.transformers.register()


@pytest.fixture(autouse=True)
def fp8_without_a_gpu(monkeypatch):
    """transformers dequantises FP8 where it has no kernel for it. Here only experts are in FP8."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(AUTO_QUANTIZER_MAPPING["fp8"], "validate_environment", lambda *a, **k: None)


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, m) for name, m in model.named_modules() if name.endswith(".experts")]


def write_checkpoint(kind: str, folder, dtype=F32, **config) -> nn.Module:
    """Writes a packed checkpoint to a folder, and to folder / "plain" one with the values of its weights.
    Returns the latter's model in eager."""
    needs_recent_transformers()
    if kind.startswith("int4"):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    family, sizes, format, options, quantization = CHECKPOINTS[kind]
    model = tiny_model(family, "cpu", dtype, **{**sizes, **config})
    for target in (folder, folder / "plain"):
        model.save_pretrained(target)
    plain = load_file(folder / "model.safetensors")
    packed = dict(plain)
    for name, weight in plain.items():
        if ".experts." not in name or name.endswith("bias"):
            continue
        stacked = weight.mT.contiguous() if weight.dim() == 3 else weight[None]  # gpt-oss', or one expert's
        w = quantize(stacked, format, **options)
        values = w.dequantize()
        plain[name] = values.mT.contiguous() if weight.dim() == 3 else values[0]
        del packed[name]
        if format == "mxfp4":
            packed.update({f"{name}_{part}": stored for part, stored in w.state_dict().items()})
            continue
        stem = name.removesuffix("weight")
        packed.update({stem + part: stored[0] for part, stored in w.state_dict().items()})
        if format == "int4":
            packed[stem + "weight_shape"] = torch.tensor(weight.shape)
        if w.zero is not None:
            packed[stem + "weight_zero_point"] = pack_to_int32(w.zero[0], 4, packed_dim=0).contiguous()
    write(plain, folder / "plain")
    write(packed, folder)
    with_quantization(folder, quantization)
    return load(folder / "plain", "eager", dtype)


def write(tensors: dict[str, torch.Tensor], folder) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_quantization(folder, quantization: dict) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def load(folder, implementation="fused_moe", dtype=F32, **settings) -> nn.Module:
    chosen = {"experts_implementation": implementation, "attn_implementation": "eager", "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(folder, **chosen, **settings)


def logits_and_embedding_gradient(model: nn.Module, ids, routing: Routing) -> dict:
    embedding = model.get_input_embeddings().weight
    with routing:
        logits = model(input_ids=ids).logits
    (gradient,) = torch.autograd.grad(logits.float().square().mean(), embedding)
    return {"logits": logits.detach(), "gradient": gradient}


def assert_models_agree(ours: nn.Module, eager: nn.Module, ids) -> None:
    """Logits, and the gradient that has come through all experts. Both route as eager does."""
    routing = Routing()
    expected = logits_and_embedding_gradient(eager, ids, routing)
    found = logits_and_embedding_gradient(ours, ids, Routing(routing))
    if eager.dtype == F32:
        for name, value in expected.items():
            assert_near(found[name], value, slack=64)
        return
    exact = logits_and_embedding_gradient(copy.deepcopy(eager).double(), ids, Routing(routing))
    assert_as_good(found, expected, exact, LOOSE)


def views(experts: nn.Module) -> list[QuantizedWeight]:
    """What is kept beside the parameters."""
    kept = getattr(experts, "_fused_moe_weights", None)
    return [] if kept is None else list(kept.weights.values())


LARGER_TILES = 1.03  # with zero points of int4, which checkpoints pack: two per byte


def kept_in_tiles(experts: nn.Module) -> dict[str, QuantizedWeight]:
    return {n: m for n, m in experts.named_children() if isinstance(m, QuantizedWeight)}


# --- checkpoints ------------------------------------------------------------------------------------------


@ALL_CHECKPOINTS
@BOTH_DTYPES
def test_logits_and_gradients(device, tmp_path, kind, dtype):
    """A packed checkpoint computes what its values do, and the embedding gets its gradient."""
    eager = write_checkpoint(kind, tmp_path, dtype).to(device)
    ours = load(tmp_path, dtype=dtype).to(device)
    assert_models_agree(ours, eager, token_ids(device))


@ALL_CHECKPOINTS
def test_transformers_reads_the_same_values(cpu, tmp_path, kind):
    """Any other implementation, or dequantize=True, unpacks as transformers does, to the same logits."""
    if kind == "int4, zero points":
        pytest.skip("transformers 5.23 does not unpack zero points")
    eager, ids = write_checkpoint(kind, tmp_path), token_ids("cpu")
    settings = {"implementation": "eager"}
    if not kind.startswith("int4"):
        chosen = {"fp8_block": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[kind]
        settings = {"quantization_config": chosen(dequantize=True)}
    theirs = load(tmp_path, **settings)
    for _, experts in experts_of(theirs):
        assert experts.gate_up_proj.dtype == experts.down_proj.dtype == F32
    torch.testing.assert_close(theirs(ids).logits, eager(ids).logits, atol=1e-4, rtol=1e-4)


@ALL_CHECKPOINTS
def test_weights_stay_packed(device, tmp_path, kind):
    """Parameters are codes and scales, of the bytes that they have in the checkpoint; nothing is copied, but
    where tiles take the parameters' place."""
    write_checkpoint(kind, tmp_path)
    model = load(tmp_path).to(device)
    names = set(model.state_dict())
    with Calls() as calls, torch.no_grad():
        model(token_ids(device))
    assert calls.kinds() == ["values"] * len(experts_of(model))
    stored = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if ".experts." in n}
    loaded = {n: p for n, p in model.named_parameters() if ".experts." in n}
    packed_bytes = sum(t.nbytes for t in stored.values())
    tiled = [w for _, experts in experts_of(model) for w in kept_in_tiles(experts).values()]
    most = LARGER_TILES * packed_bytes if tiled else packed_bytes
    assert packed_bytes <= sum(t.nbytes for t in loaded.values()) <= most
    assert names == set(model.state_dict())
    for _, experts in experts_of(model):
        codes = {"fp8_block": "", "mxfp4": "_blocks"}.get(kind, "_packed")
        for name in ("gate_up_proj", "down_proj"):
            if name in kept_in_tiles(experts):
                assert not views(experts)
                continue
            w = experts._fused_moe_weights.weights[name]
            parameter = getattr(experts, name + codes)
            assert w.data.data_ptr() == parameter.data_ptr() and w.data.nbytes == parameter.nbytes
        if kind != "fp8_block":
            assert not [n for n, p in experts.named_parameters() if p.requires_grad and "bias" not in n]


def test_codes_of_fp8_are_frozen(cpu, tmp_path):
    """In experts and in dense layers: FSDP2 wants one dtype for all trainable parameters of a layer."""
    write_checkpoint("fp8_block", tmp_path)
    unquantized = ["lm_head", "model.embed_tokens", "model.layers.*.mlp.gate"]
    with_quantization(tmp_path, {"quant_method": "fp8", "modules_to_not_convert": unquantized})
    parameters = dict(load(tmp_path).named_parameters())
    frozen = {name for name, p in parameters.items() if not p.requires_grad}
    assert frozen == {n for n, p in parameters.items() if p.element_size() == 1 or n.endswith("_scale_inv")}
    assert any("self_attn.q_proj" in name for name in frozen)


@ALL_CHECKPOINTS
def test_generate(device, tmp_path, kind):
    """Greedy decoding gives eager's tokens."""
    eager = write_checkpoint(kind, tmp_path).to(device)
    ours, ids = load(tmp_path).to(device), token_ids(device)
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **settings), eager.generate(ids, **settings))


def packed_call(kind: str, folder, device) -> tuple[nn.Module, tuple]:
    """The first experts of a packed checkpoint, and arguments for them."""
    write_checkpoint(kind, folder)
    experts = experts_of(load(folder).to(device))[0][1]
    x = torch.randn(7, experts.config.hidden_size, device=device)
    return experts, (x, make_ids("random", 7, 2, 8).to(device), torch.rand(7, 2, device=device))


@ALL_CHECKPOINTS
def test_compile(device, tmp_path, kind):
    """One graph after a first call; before it a graph breaks."""
    experts, call = packed_call(kind, tmp_path, device)
    try:
        first = torch.compile(copy.deepcopy(experts), backend="aot_eager")(*call)
        expected = experts(*call)
        found = torch.compile(experts, fullgraph=True, backend="aot_eager")(*call)
    finally:
        torch._dynamo.reset()
    assert torch.equal(first, expected) and torch.equal(found, expected)


@OWN_STORAGE
def test_saved_again(cpu, tmp_path, kind):
    """save_pretrained writes the checkpoint's own tensors and config, which any transformers loads."""
    write_checkpoint(kind, tmp_path)
    model, ids = load(tmp_path), token_ids("cpu")
    copied = tmp_path / "again"
    model.save_pretrained(copied)
    assert_same_bits(load_file(copied / "model.safetensors"), load_file(tmp_path / "model.safetensors"))
    assert torch.equal(load(copied)(ids).logits, model(ids).logits)


@OWN_STORAGE
def test_no_other_implementation_reads_packed_experts(cpu, tmp_path, kind):
    write_checkpoint(kind, tmp_path)
    model, ids = load(tmp_path), token_ids("cpu")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="experts_implementation='fused_moe' for packed .* found 'eager'"):
        model(ids)
    model.set_experts_implementation("fused_moe")
    model(ids)


@ALL_CHECKPOINTS
def test_replaced_parameters(device, tmp_path, kind):
    """The weights that are kept follow their parameters: a new one, new memory, and a copy of the module."""
    experts, call = packed_call(kind, tmp_path, device)
    with torch.inference_mode():
        expected = experts(*call)
    if kept_in_tiles(experts):
        pytest.skip("tiles have taken the parameters' place")
    with torch.no_grad():
        kept = views(experts)
        assert not (experts(*call) - expected).count_nonzero() and views(experts)[0] is kept[0]
        copied = copy.deepcopy(experts)
        assert not views(copied)
        assert torch.equal(copied(*call), expected)
        name = next(
            n
            for n, p in experts.named_parameters()
            if p.dtype in (torch.uint8, torch.int32, torch.float8_e4m3fn)
        )
        parameter = getattr(experts, name)
        flipped = (parameter.data.view(torch.uint8) ^ 128).view(parameter.dtype)  # of FP8 the signs
        setattr(experts, name, nn.Parameter(flipped, requires_grad=False))
        changed = experts(*call)
        assert not torch.equal(changed, expected)
        getattr(copied, name).data = flipped
        assert torch.equal(copied(*call), changed)
    x = call[0].requires_grad_()
    experts(*call).sum().backward()  # the weights made in inference mode can be saved for backward
    assert x.grad.count_nonzero()


def hold_tiles(model: nn.Module) -> None:
    """Makes the weights of all experts as their first call does, which CPUs cannot finish with tiles."""
    for _, experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            w = weight_of(experts, name, "codes")
            assert w.is_tiled and w is getattr(experts, name)


def whole_tiles(kind: str, folder) -> nn.Module:
    """A packed checkpoint of experts whose sides are all multiples of 64."""
    sizes = {} if kind == "fp8_block" else {"moe_intermediate_size": 128, "intermediate_size": 128}
    write_checkpoint(kind, folder, **sizes)
    return load(folder)


@ALL_CHECKPOINTS
def test_tiles_take_the_parameters_place(cpu, tmp_path, kind):
    """They alone remain, whatever was kept before, and compute the same when they are published again."""
    model, ids = whole_tiles(kind, tmp_path), token_ids("cpu")
    expected = model(ids).logits
    packed_bytes = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    assert all(len(views(experts)) == 2 for _, experts in experts_of(model))
    model.to("cpu")  # as from another device
    assert not any(views(experts) for _, experts in experts_of(model))
    with pytest.MonkeyPatch.context() as gpu:
        gpu.setattr(tiles, "are_read_on", lambda device: True)
        hold_tiles(model)
        for _, experts in experts_of(model):
            assert not views(experts) and len(kept_in_tiles(experts)) == 2
            own = [n for n, _ in experts.named_parameters(recurse=False)]
            assert all(n.endswith(("bias", "_shape")) for n in own), own
        tiled_bytes = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
        assert packed_bytes <= tiled_bytes <= LARGER_TILES * packed_bytes
        copied = copy.deepcopy(model)
    for again in (model.to("cpu"), copied.to("cpu")):
        assert not any(w.is_tiled for _, e in experts_of(again) for w in kept_in_tiles(e).values())
        assert torch.equal(again(ids).logits, expected)
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="experts_implementation='fused_moe' for packed .* found 'eager'"):
        model(ids)


@ALL_CHECKPOINTS
def test_the_state_dict_of_tiles(cpu, tmp_path, kind, request):
    """It is the checkpoint's, as it was before, and loads; save_pretrained writes the checkpoint."""
    model, other = whole_tiles(kind, tmp_path), load(tmp_path)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    request.getfixturevalue("tiling")
    for m in (model, other):
        hold_tiles(m)
        assert_same_bits(m.state_dict(), expected)
    changed = {n: t.roll(1, 0) if ".experts." in n else t for n, t in expected.items()}
    other.load_state_dict(changed)
    assert_same_bits(other.state_dict(), changed)
    scale = next(n for n in changed if "down_proj_scale" in n)
    other.load_state_dict({scale: expected[scale]}, strict=False)  # a part, which leaves the rest as it was
    assert_same_bits(other.state_dict(), {**changed, scale: expected[scale]})
    del changed[scale]
    with pytest.raises(RuntimeError, match=rf"Missing key.*{re.escape(scale)}"):
        other.load_state_dict(changed)
    if kind != "fp8_block":
        model.save_pretrained(tmp_path / "again")
        files = (folder / "model.safetensors" for folder in (tmp_path / "again", tmp_path))
        assert_same_bits(*map(load_file, files))


def test_offloaded_experts(cpu, tmp_path):
    """A layer that accelerate loads from disk for each call computes the same, and is not held afterwards."""
    pytest.importorskip("accelerate")
    eager, ids = write_checkpoint("mxfp4", tmp_path), token_ids("cpu")
    parts = ("lm_head", "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    places = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    model = load(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(ids).logits, eager(ids).logits, atol=1e-4, rtol=1e-4)
    (_, here), (_, offloaded) = experts_of(model)
    assert views(here) and not views(offloaded)
    assert offloaded.down_proj_blocks.is_meta


@ALL_CHECKPOINTS
def test_tokens_of_another_dtype(device, tmp_path, kind):
    """Tokens in float32 beside biases in bfloat16 are computed in float32, and under autocast in bfloat16."""
    write_checkpoint(kind, tmp_path, BF16)
    experts = experts_of(load(tmp_path, dtype=BF16).to(device))[0][1]
    x = torch.randn(7, experts.config.hidden_size, device=device)
    ids, scores = make_ids("random", 7, 2, 8).to(device), torch.rand(7, 2, device=device)
    wide = experts(x, ids, scores)
    narrow = experts(x.bfloat16(), ids, scores)
    with torch.autocast(device.type, BF16):
        cast = experts(x, ids, scores)
    assert (wide.dtype, narrow.dtype, cast.dtype) == (F32, BF16, F32)
    assert torch.equal(cast, narrow.float())
    assert not torch.equal(wide, cast)
    torch.testing.assert_close(wide, cast, atol=0.02 * wide.abs().max().item(), rtol=0)


def test_part_of_the_experts_in_mxfp4(cpu, tmp_path):
    """Layers that the checkpoint has in 16 bits are loaded so."""
    eager, ids = write_checkpoint("mxfp4", tmp_path), token_ids("cpu")
    name = experts_of(eager)[0][0]
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    for weight in ("gate_up_proj", "down_proj"):
        del tensors[f"{name}.{weight}_blocks"], tensors[f"{name}.{weight}_scales"]
        tensors[f"{name}.{weight}"] = plain[f"{name}.{weight}"]
    write(tensors, tmp_path)
    with_quantization(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": [*DENSE, name]})
    ours = load(tmp_path)
    first, second = (experts for _, experts in experts_of(ours))
    assert first.gate_up_proj.dtype == F32 and second.gate_up_proj_blocks.dtype == torch.uint8
    assert_models_agree(ours, eager, ids)


# What is not packed, and the reason in the warning.
UNPACKED = {
    "per channel": ({"strategy": "channel", "group_size": None}, {}, "scales are per channel"),
    "no kernel": ({}, {"hidden_act": "quick_gelu"}, "the activation .*QuickGELUActivation"),
    "one is plain": ({}, {}, "not packed in the checkpoint"),
}


@pytest.mark.parametrize("case", UNPACKED)
@pytest.mark.usefixtures("fresh_warnings")
def test_unpacked_as_by_transformers(cpu, tmp_path, case):
    """int4 experts that we cannot use as they are: transformers unpacks them, and a warning says why."""
    changed, config, reason = UNPACKED[case]
    eager = write_checkpoint("int4", tmp_path, **config)
    tensors = load_file(tmp_path / "model.safetensors")
    if changed:
        with_quantization(tmp_path, int4_config(**changed))
        scales = {n: t[:, :1].contiguous() for n, t in tensors.items() if n.endswith("weight_scale")}
        write({**tensors, **scales}, tmp_path)
    if case == "one is plain":
        one = f"{experts_of(eager)[0][0]}.0.down_proj."
        tensors = {n: t for n, t in tensors.items() if not n.startswith(one)}
        plain = load_file(tmp_path / "plain" / "model.safetensors")
        write({**tensors, one + "weight": plain[one + "weight"]}, tmp_path)
        with pytest.warns(UserWarning, match=reason), pytest.raises(RuntimeError, match="report"):
            load(tmp_path)  # nor does transformers load such a checkpoint
        return
    with pytest.warns(UserWarning, match=f"does not keep the experts packed: .*{reason}"):
        model = load(tmp_path)
    assert all(experts.down_proj.dtype == F32 for _, experts in experts_of(model))
    if not changed:
        ids = token_ids("cpu")
        with pytest.warns(UserWarning, match=f"{reason} of Qwen3MoeExperts, which runs grouped_mm"):
            logits = model(ids).logits
        torch.testing.assert_close(logits, eager(ids).logits, atol=1e-4, rtol=1e-4)


def test_quantizers_of_others_stay(cpu, monkeypatch):
    class Theirs(AUTO_QUANTIZER_MAPPING["mxfp4"]):
        pass

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "mxfp4", Theirs)
    fused_moe.transformers.register(compute="codes")
    assert AUTO_QUANTIZER_MAPPING["mxfp4"] is Theirs


# --- FP8Experts alone -------------------------------------------------------------------------------------

D, F, E, K, T = 256, 128, 5, 2, 33


def fp8_experts(device, config=None, has_gate=True, **settings) -> nn.Module:
    """FP8Experts with weights of order one."""
    needs_recent_transformers()
    sizes = {"hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "num_local_experts": E}
    config = experts_config(**{**sizes, "swiglu_alpha": None, "swiglu_limit": None, **(config or {})})
    decorated = use_experts_implementation(
        FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS, has_gate=has_gate
    )
    settings = {"block_size": [128, 128], "has_gate": has_gate, **settings}
    experts = decorated(config, **settings).requires_grad_(False)
    for name, parameter in experts.named_parameters():
        codes = torch.randint(256, parameter.shape, dtype=torch.uint8)
        if parameter.dtype == torch.float8_e4m3fn:
            parameter.copy_(codes.masked_fill(codes % 128 == 127, 0).view(torch.float8_e4m3fn))
        elif parameter.dtype == torch.int8:
            parameter.copy_(codes.view(torch.int8))
        elif parameter.dtype == torch.float8_e8m0fnu:
            parameter.copy_(2.0 ** torch.randint(-11, -8, parameter.shape))
        elif name.endswith("scale_inv"):
            parameter.copy_(torch.rand(parameter.shape) / 1024)
    return experts.to(device)


def fp8_call(device, routing="random", dtype=F32) -> tuple:
    x = torch.randn(T, D).to(device, dtype)
    return x, make_ids(routing, T, K, E).to(device), torch.rand(T, K, device=device)


@pytest.fixture
def eager_fp8(monkeypatch):
    """Lets FP8Experts' eager forward run without its kernels: weights are dequantised, activations stay."""

    def linear(self, x, weight, scale, activation_scale=None):
        if weight.dtype == torch.int8:
            one = QuantizedWeight(
                weight[None].view(torch.uint8),
                scale[None].view(torch.uint8),
                format="mxfp4",
                shape=(1, weight.size(0), 2 * weight.size(1)),
            )
            return nn.functional.linear(x, one.dequantize(x.dtype)[0])
        return nn.functional.linear(
            x, finegrained_fp8._dequantize_fp8_weight(weight, scale.float(), self.block_size, x.dtype)
        )

    monkeypatch.setattr(FP8Experts, "linear", linear)


SUPPORTED = {
    "gated": {},
    "ungated": {"has_gate": False},
    "scales of e8m0": {"scale_fmt": "ue8m0"},
    "codes of e2m1": {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    "clamped": {"config": {"swiglu_alpha": 1.5, "swiglu_limit": 1.0}},
    "limited": {"config": {"swiglu_limit": 1.0}},
    "limited, codes of e2m1": {
        "config": {"swiglu_limit": 1},
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "capped": {"config": {"mlp_gate_softcap": 1.0, "mlp_up_softcap": 2.0}},
    "relu2": {"config": {"hidden_act": "relu2"}},
}


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("routing", ("random", "none"))
@pytest.mark.usefixtures("eager_fp8")
def test_fp8_experts(device, kind, routing):
    """Against FP8Experts' own loop. Ids of no expert add nothing."""
    experts, (x, ids, scores) = fp8_experts(device, **SUPPORTED[kind]), fp8_call(device)
    experts.config._experts_implementation = "eager"
    expected = experts(x, ids, scores)
    experts.config._experts_implementation = "fused_moe"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if routing == "none":
            assert not experts(x, torch.full_like(ids, E), scores).count_nonzero()
        else:
            assert_near(experts(x, ids, scores), expected, slack=64)


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.usefixtures("tiling")
def test_the_state_dict_of_fp8_experts_in_tiles(cpu, kind):
    """Scales of e8m0 and codes of e2m1 are published as they were."""
    experts = fp8_experts(cpu, **SUPPORTED[kind])
    expected = {n: t.clone() for n, t in experts.state_dict().items()}
    for name in (first_name(experts), "down_proj"):
        assert weight_of(experts, name, "codes").is_tiled
    assert isinstance(settings_of(experts), dict)
    for changed in (expected, {n: t.flip(0) for n, t in expected.items()}):
        experts.load_state_dict(changed)
        found = experts.state_dict()
        assert found.keys() == changed.keys()
        for name, tensor in changed.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


# kind -> how FP8Experts are made, and the warning
UNSUPPORTED = {
    "static": ({"activation_scheme": "static"}, "static scales of activations"),
    "blocks": ({"block_size": [64, 64]}, r"blocks of \[64, 64\]"),
    "tensor": ({"block_size": None}, "blocks of None"),
    "gate and up in one block": (
        {"config": {"moe_intermediate_size": 64, "intermediate_size": 64}},
        r"scales \(5, 2, 2\) of a weight \(5, 128, 256\)",
    ),
    "gate and up in one block, with the right number of scales": (
        {"config": {"moe_intermediate_size": 224, "intermediate_size": 224}},
        r"scales \(5, 4, 2\) of a weight \(5, 448, 256\)",
    ),
    "float32 scales of e2m1": ({"expert_dtype": "fp4"}, "FP4 with scales of dtype torch.float32"),
    "gelu with a limit": (
        {"config": {"swiglu_limit": 1.0, "hidden_act": "gelu"}},
        "the gate .*FP8Experts._apply_gate",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.usefixtures("fresh_warnings")
def test_other_fp8_experts_run_as_without_us(device, monkeypatch, kind):
    """What is not supported goes to the function that transformers has for FP8Experts by default, but static
    scales, which it refuses, to their own forward. A warning says so once."""
    settings, reason = UNSUPPORTED[kind]
    experts, call = fp8_experts(device, **settings), fp8_call(device)
    inputs = []

    def linear(self, x, weight, scale, activation_scale=None):
        inputs.append("eager")
        return x.new_ones(x.size(0), weight.size(0))

    def grouped_mm(experts, x, ids, scores):
        inputs.append("grouped_mm")
        return x.clone()

    monkeypatch.setattr(FP8Experts, "linear", linear)
    monkeypatch.setitem(ALL_FP8_EXPERTS_FUNCTIONS, "grouped_mm", grouped_mm)
    name = "eager" if kind == "static" else "grouped_mm"
    warning = f"{reason} of FP8Experts, which runs {name}, as transformers would choose"
    with pytest.warns(UserWarning, match=warning), Calls() as calls:
        found = experts(*call)
    assert set(inputs) == {name} == {experts.config._experts_implementation}
    assert "values" not in calls.kinds() and not calls.of("quantized_mm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(experts(*call), found)


def test_fp8_experts_that_hold_16_bits(device):
    """Such weights have no scales that count, in transformers neither."""
    experts, call = fp8_experts(device), fp8_call(device)
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(experts, name).shape
        setattr(experts, name, nn.Parameter(torch.randn(shape, device=device) / 16))
    found = experts(*call)
    experts.config._experts_implementation = "eager"
    assert_near(found, experts(*call), slack=64)


# --- writes into parameters -------------------------------------------------------------------------------


def written_by_copy(experts: nn.Module, state: dict) -> None:
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            parameter.copy_(state[name])


def written_in_inference_mode(experts: nn.Module, state: dict) -> None:
    with torch.inference_mode():
        for name, parameter in experts.named_parameters():
            parameter.copy_(state[name])


def written_through_data(experts: nn.Module, state: dict) -> None:
    for name, parameter in experts.named_parameters():
        parameter.data.copy_(state[name])


def given_new_memory(experts: nn.Module, state: dict) -> None:
    for name, parameter in experts.named_parameters():
        parameter.data = state[name].clone()


WRITES = {
    "loaded": lambda experts, state: experts.load_state_dict(state),
    "assigned": lambda experts, state: experts.load_state_dict(copy.deepcopy(state), assign=True),
    "copy_": written_by_copy,
    "copy_ in inference mode": written_in_inference_mode,
    ".data.copy_": written_through_data,
    ".data =": given_new_memory,
}
ALL_WRITES = pytest.mark.parametrize("write", WRITES)
STORED = (*CHECKPOINTS, "scales of bf16", "scales of e8m0", "codes of e2m1")
ALL_STORED = pytest.mark.parametrize("kind", STORED)


def stored_experts(kind: str, folder, device) -> tuple[nn.Module, tuple]:
    """Experts whose parameters a checkpoint stores, of every dtype of scales, and arguments for them."""
    if kind in CHECKPOINTS:
        return packed_call(kind, folder, device)
    experts = fp8_experts(device, **SUPPORTED.get(kind, {}))
    if kind == "scales of bf16":
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            scale = nn.Parameter(getattr(experts, name).bfloat16(), requires_grad=False)
            setattr(experts, name, scale)
    return experts, fp8_call(device)


def other_state(experts: nn.Module) -> dict:
    """Another state_dict: each expert has the weights of its neighbour, whose scales differ, too."""
    return {name: tensor.roll(1, 0) for name, tensor in experts.state_dict().items()}


def skip_tiles(experts: nn.Module, write: str) -> None:
    if kept_in_tiles(experts) and write not in ("loaded", "assigned"):
        pytest.skip("tiles have taken the parameters' place; load_state_dict alone writes them")


@ALL_STORED
@ALL_WRITES
@torch.no_grad()
def test_writes_are_seen(device, tmp_path, kind, write):
    """Three updates of a running model, by every way to write: the bits of a fresh load."""
    experts, call = stored_experts(kind, tmp_path, device)
    before, fresh = experts(*call), copy.deepcopy(experts)
    skip_tiles(experts, write)
    for _ in range(3):
        state = other_state(fresh)
        fresh = copy.deepcopy(fresh)  # which keeps nothing beside its parameters
        fresh.load_state_dict(state)
        WRITES[write](experts, state)
        if write == ".data.copy_" and kind == "int4, zero points":
            fused_moe.refresh_weights(experts)
        found = experts(*call)
        assert torch.equal(found, fresh(*call)) and not torch.equal(found, before)
        assert_same_bits(bits(experts.state_dict()), bits(state))


def bits(state: dict) -> dict:
    return {name: tensor.view(torch.uint8) for name, tensor in state.items()}


@ALL_STORED
@torch.no_grad()
def test_compiled_experts_see_writes(device, tmp_path, kind):
    """Those that move no version, too."""
    experts, call = stored_experts(kind, tmp_path, device)
    before, fresh = experts(*call), copy.deepcopy(experts)
    skip_tiles(experts, ".data.copy_")
    state = other_state(experts)
    fresh.load_state_dict(state)
    try:
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call), before)
        written_through_data(experts, state)
        assert torch.equal(compiled(*call), fresh(*call))
    finally:
        torch._dynamo.reset()


@torch.no_grad()
def test_refresh_weights_of_checkpoints(device, tmp_path):
    """It unpacks zero points into the memory that they have, of parameters without versions, too."""
    experts, call = packed_call("int4, zero points", tmp_path, device)
    with torch.inference_mode():  # parameters without versions
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.clone(), requires_grad=False))
        experts(*call)
    fresh, state = copy.deepcopy(experts), other_state(experts)
    fresh.load_state_dict(state)
    written_in_inference_mode(experts, state)
    zeros = [w.zero for w in views(experts)]
    addresses = [zero.data_ptr() for zero in zeros]
    fused_moe.refresh_weights(nn.Sequential(experts))
    assert torch.equal(experts(*call), fresh(*call))
    assert [w.zero.data_ptr() for w in views(experts)] == addresses


@ALL_STORED
def test_backward_after_a_write(device, tmp_path, kind):
    """Weights that were written are refused by the backward of an earlier forward, as those of nn.Linear."""
    experts, (x, ids, scores) = stored_experts(kind, tmp_path, device)
    x.requires_grad_()
    experts(x, ids, scores)
    skip_tiles(experts, "copy_")
    out = experts(x, ids, scores)
    written_by_copy(experts, other_state(experts))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    experts(x, ids, scores).sum().backward()
    assert x.grad.count_nonzero()


@ALL_STORED
@torch.no_grad()
def test_moving_a_model_frees_what_is_kept(device, tmp_path, kind):
    """Nothing of the experts stays on the device that they leave, nor is anything kept twice there."""
    experts, call = stored_experts(kind, tmp_path, "cpu")
    call = [t.to(device) for t in call]
    for move in (lambda: experts.to(device), lambda: written_to(experts, device)):
        experts.cpu()
        used = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        move()
        expected = experts(*call)
        seen = [weakref.ref(w) for w in views(experts)]
        assert torch.equal(experts(*call), expected)
        del expected
        experts.to("cpu")
        assert not any(w() is not None for w in seen)
        if device.type == "cuda":
            assert torch.cuda.memory_allocated() <= used


def written_to(experts: nn.Module, device) -> None:
    """Moves the parameters as accelerate does, without the module's knowledge."""
    for parameter in experts.parameters():
        parameter.data = parameter.data.to(device)


# --- quantize_experts -------------------------------------------------------------------------------------


def ready(family: str, device, dtype=F32, **more) -> nn.Module:
    model = tiny_model(family, device, dtype, hidden_size=64, moe_intermediate_size=32, **more).eval()
    model.set_experts_implementation("fused_moe")
    return model


FAMILIES = {"qwen3_moe": {}, "mixtral": {"intermediate_size": 96}, "gpt_oss": {"intermediate_size": 96}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
@BOTH_DTYPES
def test_quantize_experts(device, family, format, dtype):
    """A quantised model computes what the values of its weights do; no weight of 16 bits remains."""
    options = quantize_options(format)
    ours = ready(family, device, dtype, **FAMILIES[family])
    eager = copy.deepcopy(ours)
    assert quantize_experts(ours, format, **options) is ours
    eager.set_experts_implementation("eager")
    for (_, quantized), (_, plain) in zip(experts_of(ours), experts_of(eager), strict=True):
        assert not [n for n, _ in quantized.named_parameters(recurse=False) if not n.endswith("bias")]
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(quantized, name)
            assert w.format == format and w.nbytes < 0.7 * getattr(plain, name).numel() * 2
            values = w.dequantize().mT if plain.is_transposed else w.dequantize()
            getattr(plain, name).data.copy_(values)
    assert_models_agree(ours, eager, token_ids(device))
    assert quantize_experts(ours, format, **options) is ours  # which changes nothing


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_layout_is_quantised(device, kind):
    """Single experts: halves, transposed, interleaved with biases, and ungated."""
    config = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "moe_hidden_size": 64}
    model = nn.Sequential(EXPERTS[kind](experts_config(**config, num_local_experts=E)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.to(device)
    (plain,) = model
    (experts,) = quantize_experts(copy.deepcopy(model), "int8")
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        w = getattr(experts, name, None)
        if w is not None:
            getattr(plain, name).data.copy_(w.dequantize().mT if plain.is_transposed else w.dequantize())
    x, ids, scores = torch.randn(T, 64), make_ids("random", T, K, E), torch.rand(T, K)
    call = x.to(device), ids.to(device), scores.to(device)
    found = experts(*call)
    plain.config._experts_implementation = "eager"
    assert_near(found, plain(*call), slack=64)


def test_quantised_models_generate_and_compile(device):
    ours, ids = ready("gpt_oss", device, intermediate_size=96), token_ids(device)
    quantize_experts(ours, "mxfp4")
    assert ours.generate(ids, max_new_tokens=4, do_sample=False).shape == (4, 44)
    with torch.no_grad():
        expected = ours(ids).logits
        try:
            found = torch.compile(ours, fullgraph=True, backend="aot_eager")(ids).logits
        finally:
            torch._dynamo.reset()
    assert_near(found, expected, slack=64)


def test_the_state_dict_of_quantised_experts(device):
    """It has the names of QuantizedWeight, and loads into a model that was quantised alike."""
    ours, other = (quantize_experts(ready("qwen3_moe", device), "int4", group_size=32) for _ in range(2))
    state, ids = ours.state_dict(), token_ids(device)
    prefix = "model.layers.0.mlp.experts.down_proj."
    found = {n.removeprefix(prefix) for n in state if n.startswith(prefix)}
    assert found == {"weight_packed", "weight_scale"}
    other.load_state_dict(state)
    assert torch.equal(other(ids).logits, ours(ids).logits)


def test_quantised_experts_want_fused_moe(device):
    ours, ids = ready("qwen3_moe", device), token_ids(device)
    quantize_experts(ours, "fp8")
    ours.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="experts_implementation='fused_moe' for packed .* found 'eager'"):
        ours(ids)


@pytest.mark.parametrize(
    ("family", "more", "call", "match"),
    (
        ("qwen3_moe", {}, {"format": "int3"}, "format to be one of .* found 'int3'"),
        ("qwen3_moe", {}, {"format": "int4", "group_size": 16}, "group_size of 32 or 64 or 128, found 16"),
        (
            "qwen3_moe",
            {},
            {"format": "int4", "group_size": 64},
            "layers.0.mlp.experts.down_proj .* multiple of 64, found 32",
        ),
        ("mixtral", {"intermediate_size": 40}, {"format": "mxfp4"}, "a multiple of 32, found 40"),
        (
            "qwen3_moe",
            {"hidden_act": "quick_gelu"},
            {"format": "fp8"},
            "experts that fused_moe computes, found the activation",
        ),
        ("llama", {}, {"format": "fp8"}, "a transformers model with experts .* found LlamaForCausalLM"),
    ),
)
def test_bad_calls_of_quantize_experts(cpu, family, more, call, match):
    """They raise before anything is changed."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, **more}
    model = tiny_model(family, "cpu", **sizes)
    if family != "llama":
        model.set_experts_implementation("fused_moe")
    before = dict(model.named_parameters())
    with pytest.raises((TypeError, ValueError), match=match):
        quantize_experts(model, **call)
    assert all(p is before[n] for n, p in model.named_parameters())


def test_quantize_experts_wants_the_implementation_first(cpu):
    model = tiny_model("qwen3_moe", "cpu", hidden_size=64, moe_intermediate_size=32)
    with pytest.raises(
        ValueError, match="experts_implementation='fused_moe', found 'eager'; call set_experts"
    ):
        quantize_experts(model, "int8")
    with pytest.raises(ValueError, match="a transformers model with experts .* found dict"):
        quantize_experts({}, "int8")


# --- saving quantised models ------------------------------------------------------------------------------


REFUSAL = r"found experts that quantize_experts quantised: .*; .* torch\.save\(model\.state_dict\(\), FILE\)"


def quantised(family="gpt_oss") -> nn.Module:
    """gpt-oss' experts in int8 have no published layout; test_transformers_saved.py has those that do."""
    return quantize_experts(ready(family, "cpu", **FAMILIES[family]), "int8")


@pytest.mark.parametrize("made", ("quantised", "copied", "pickled", "the base model", "unpacked"))
def test_save_pretrained_refuses_quantised_experts(cpu, tmp_path, made):
    """What it would write has no experts that from_pretrained finds. Nothing is written."""
    model = quantised()
    if made == "copied":
        model = copy.deepcopy(model)
    elif made == "pickled":
        torch.save(model, tmp_path / "model.pt")
        model = torch.load(tmp_path / "model.pt", weights_only=False)
    elif made == "the base model":
        model = model.model
    elif made == "unpacked":  # by transformers' quantizer, which could save them
        write_checkpoint("int4", tmp_path)
        model = load(tmp_path, "eager")
        model.set_experts_implementation("fused_moe")
        assert model.hf_quantizer is not None
        quantize_experts(model, "int8")
    with pytest.raises(ValueError, match=REFUSAL):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())  # which is how they are saved
    del model
    with pytest.raises(ValueError, match=REFUSAL):  # a copy does not ask the model that it was made of
        other.save_pretrained(tmp_path / "saved")


def test_push_to_hub_and_trainer_refuse_quantised_experts(cpu, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")  # of Trainer
    model = quantised()
    hub = SimpleNamespace(create_repo=lambda *args, **kwargs: SimpleNamespace(repo_id="model"))
    module = sys.modules["transformers.utils.hub"]
    if hasattr(module, "hf_api"):
        monkeypatch.setattr(module, "hf_api", lambda: hub)
    else:
        monkeypatch.setattr(module, "create_repo", hub.create_repo)
    monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: None)
    with pytest.raises(ValueError, match=REFUSAL):
        model.push_to_hub("model")
    trainer = transformers.Trainer(
        model=model, args=transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    )
    with pytest.raises(ValueError, match=REFUSAL):
        trainer.save_model()


def test_what_is_not_quantised_is_saved(cpu, tmp_path):
    """A call of quantize_experts that raised, or that found packed experts, leaves saving as it was."""
    model = ready("qwen3_moe", "cpu")
    with pytest.raises(ValueError, match="multiple of 64, found 32"):
        quantize_experts(model, "int4", group_size=64)
    model.save_pretrained(tmp_path / "plain")
    write_checkpoint("int4", tmp_path / "packed")
    packed = quantize_experts(load(tmp_path / "packed"), "int8")
    packed.save_pretrained(tmp_path / "again")
    assert_same_bits(*(load_file(tmp_path / f / "model.safetensors") for f in ("packed", "again")))


def test_quantised_models_are_freed(cpu):
    """At once: nothing waits for the garbage collector."""
    model = quantised()
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("by", ("peft", "transformers"))
def test_adapters_of_quantised_models_are_saved(cpu, tmp_path, by):
    """Those of attention, beside quantised experts: saved, and loaded into a model quantised alike."""
    if by == "transformers" and Version(peft.__version__) < Version(MIN_PEFT_VERSION):
        pytest.skip(f"this transformers loads adapters with PEFT {MIN_PEFT_VERSION} or newer")
    ids, config = token_ids("cpu"), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    plain = ready("qwen3_moe", "cpu")
    model, other = (quantize_experts(copy.deepcopy(plain), "int8") for _ in range(2))
    if by == "peft":
        model = peft.get_peft_model(model, config)
        model.save_pretrained(tmp_path)
        other = peft.PeftModel.from_pretrained(other, tmp_path)
    else:
        model.add_adapter(config)
        model.save_pretrained(tmp_path)
        other.load_adapter(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "model.safetensors").exists()
    found, expected = other(ids).logits, model(ids).logits
    assert torch.equal(found, expected) and not torch.equal(found, plain(ids).logits)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adapt_experts(model: nn.Module, experts: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    return peft.get_peft_model(model, config)


def parametrise(model: nn.Module, experts: nn.Module) -> nn.Module:
    parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    return model


def prune_experts(model: nn.Module, experts: nn.Module) -> nn.Module:
    prune.l1_unstructured(experts, "down_proj", amount=0.5)
    return model


def shard(model: nn.Module, experts: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
    return model


def offload(model: nn.Module, experts: nn.Module) -> nn.Module:
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))


NOT_PLAIN = {
    adapt_experts: "one that a PEFT adapter is for",
    parametrise: "a tensor made by a parametrisation",
    prune_experts: "a tensor made by a hook, as in pruning",
    shard: "a DTensor",
    offload: "one that accelerate offloads",
}


@pytest.mark.parametrize("change", NOT_PLAIN, ids=lambda change: change.__name__)
def test_quantize_experts_refuses_what_is_no_plain_parameter(cpu, one_rank, change):
    """Before anything is changed, though the first layer's weights are plain. The model works as before."""
    model = ready("qwen3_moe", "cpu")
    model = change(model, experts_of(model)[1][1])
    ids = token_ids("cpu")
    expected = None if change is shard else model(ids).logits  # DTensors are for whole sharded models
    before = dict(model.named_parameters())
    match = rf"experts\.?\S*\.\w+_proj to be a plain parameter of its experts, found {NOT_PLAIN[change]}"
    with pytest.raises(ValueError, match=match):
        quantize_experts(model, "int8")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(p is before[n] for n, p in after.items())
    if expected is not None:
        assert torch.equal(model(ids).logits, expected)
