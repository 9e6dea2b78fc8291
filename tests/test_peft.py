"""PEFT's LoRA of experts: its adapters in our kernels are what PEFT's own sum of the weights computes.

"Theirs" is a model with PEFT's adapters in eager, where PEFT adds them to the weights; "ours" is a copy of it
that computes with fused_moe. Both have the same parameters of the same names.
"""

import copy
import importlib.util
import itertools
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from cases import BF16, F32, F64, LOOSE, Calls, assert_as_good, assert_near, assert_same_bits
from test_distributed import RANKS, workers  # noqa: F401 - the fixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft.tuners.lora import layer as peft_layer  # noqa: E402
from peft.tuners.lora import model as peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_transformers import (  # noqa: E402, F401 - with the fixtures
    ALL_FAMILIES,
    Routing,
    fresh_warnings,
    in_fused_moe,
    logits_and_gradients,
    registered,
    tiny_model,
    token_ids,
)
from test_transformers_quantized import (  # noqa: E402, F401
    ALL_CHECKPOINTS,
    codes,
    experts_of,
    fp8_without_a_gpu,
    load,
    write_checkpoint,
)

import fused_moe.transformers  # noqa: E402
from fused_moe import QuantizedWeight, quantize  # noqa: E402
from fused_moe.transformers import quantize_experts, requantized_merges  # noqa: E402
from fused_moe.transformers.weights import replace_parameters, weight_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("codes")

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
BOTH = [GATE_UP, DOWN]
DTYPES = pytest.mark.parametrize("dtype", (F32, F64, BF16), ids=("f32", "f64", "bf16"))
FORMATS = pytest.mark.parametrize("format", ("fp8_block", "int8", "int4", "mxfp4"))
KINDS = pytest.mark.parametrize("quantised", (False, True), ids=("float", "int8"))


def lora_config(**settings) -> "peft.LoraConfig":
    chosen = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": BOTH}
    return peft.LoraConfig(**{**chosen, "init_lora_weights": False, **settings})


def adapted(model: nn.Module, **settings) -> nn.Module:
    return peft.get_peft_model(model, lora_config(**settings))


def ours_of(theirs: nn.Module) -> nn.Module:
    ours = copy.deepcopy(theirs)
    ours.get_base_model().set_experts_implementation("fused_moe")
    return ours


def with_more_gradients(model: nn.Module) -> nn.Module:
    """Routers and the embedding train, too; so the gradients of scores and x are compared."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("embed_tokens", ".gate.", ".router.")):
            parameter.requires_grad_(True)
    return model


def assert_same(theirs: nn.Module, ours: nn.Module, ids) -> None:
    """Logits and all gradients, with the routing of theirs."""
    dlogits, routing = torch.randn(*ids.shape, 96, device=ids.device), Routing()
    expected = logits_and_gradients(theirs, ids, dlogits, routing)
    found = logits_and_gradients(ours, ids, dlogits, Routing(routing))
    assert {n for n in found if "experts" in n}
    if theirs.dtype == BF16:
        exact = logits_and_gradients(copy.deepcopy(theirs).double(), ids, dlogits, Routing(routing))
        assert_as_good(found, expected, exact, 2 * LOOSE)
        return
    for name, value in expected.items():
        assert_near(found[name], value, slack=64)


def assert_same_logits(theirs: nn.Module, ours: nn.Module, ids) -> None:
    routing = Routing()
    with torch.no_grad():
        with routing:
            expected = theirs(input_ids=ids).logits
        with Routing(routing):
            assert_near(ours(input_ids=ids).logits, expected, slack=64)


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, peft_layer.ParamWrapper)]


def shapes_of(calls: Calls) -> set[tuple]:
    """The shapes of all tensors that operators made."""
    made = itertools.chain.from_iterable(
        r if isinstance(r, (list, tuple)) else [r] for _, _, r in calls.calls
    )
    return {tuple(t.shape) for t in made if isinstance(t, torch.Tensor)}


def trained(model: nn.Module, ids) -> Calls:
    with Calls() as calls:
        model(input_ids=ids, labels=ids).loss.backward()
    return calls


def values_of(model: nn.Module) -> nn.Module:
    """A copy in eager, with the values of its quantised weights."""
    model = copy.deepcopy(model)
    for _, experts in experts_of(model):
        for name in ("gate_up_proj", "down_proj"):
            values = getattr(experts, name).dequantize()
            delattr(experts, name)
            values = values.mT.contiguous() if experts.is_transposed else values
            setattr(experts, name, nn.Parameter(values))
        experts._forward_pre_hooks.clear()  # which says that no other implementation will do
    model.set_experts_implementation("eager")
    return model


WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def quantised(format: str, family="qwen3_moe", dtype=F32) -> nn.Module:
    return quantize_experts(in_fused_moe(tiny_model(family, "cpu", dtype, **WIDE)), format)


def with_state_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Takes another model's adapters by their names."""
    state = peft.get_peft_model_state_dict(other)
    assert state.keys() == peft.get_peft_model_state_dict(model).keys()
    peft.set_peft_model_state_dict(model, state)
    return model


# --- float experts ----------------------------------------------------------------------------------------


@ALL_FAMILIES
@DTYPES
def test_families(device, family, dtype):
    """Logits, and the gradients of adapters, x and routers."""
    theirs = with_more_gradients(adapted(tiny_model(family, device, dtype)))
    assert_same(theirs, ours_of(theirs), token_ids(device))


CONFIGS = {
    "attention too": {"target_modules": ["q_proj", "o_proj"]},
    "down alone": {"target_parameters": [DOWN]},
    "gate and up alone": {"target_parameters": [GATE_UP]},
    "full names": {"target_parameters": [f"model.layers.{i}.{name}" for i in (0, 1) for name in BOTH]},
    "one layer": {"target_parameters": [f"layers.1.{name}" for name in BOTH]},
    "rank pattern": {"rank_pattern": {DOWN: 7}},
    "alpha pattern": {"alpha_pattern": {DOWN: 12, "layers.0.mlp.experts.gate_up_proj": 2}},
    "no scale": {"alpha_pattern": {DOWN: 0}},
    "rslora": {"use_rslora": True},
    "router saved": {"modules_to_save": ["router"]},
    "biases": {"target_parameters": [*BOTH, "mlp.experts.down_proj_bias"]},
    "router's weight": {"target_parameters": [*BOTH, "mlp.router.weight"]},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_configs(device, settings):
    """In float64, where rounding decides nothing at gpt-oss' limit."""
    with warnings.catch_warnings():
        # PEFT looks for modules of a pattern's name, and there are parameters.
        warnings.simplefilter("ignore")
        theirs = adapted(tiny_model("gpt_oss", device, F64), **settings)
    assert_same(theirs, ours_of(theirs), token_ids(device))


@pytest.mark.parametrize("active", (["default", "second"], ["second", "third", "default"]))
def test_no_weight_has_a_gradient_or_a_sum(device, active):
    """Neither the gradient nor the sum of a weight is computed, however many adapters are active. PEFT's own
    path computes both, which shows that they would be seen."""
    theirs, ids = adapted(tiny_model("qwen3_moe", device)), token_ids(device)
    theirs.add_adapter("second", lora_config(r=2))
    theirs.add_adapter("third", lora_config(r=3, use_rslora=True))
    theirs.base_model.set_adapter(active)
    ours, weights = ours_of(theirs), {(8, 48, 32), (8, 32, 24)}
    assert weights <= shapes_of(trained(theirs, ids))
    calls = trained(ours, ids)
    assert not weights & shapes_of(calls)
    assert not calls.of("experts_up") and len(calls.of("wgrad")) == 2 * 4  # two layers' a1, b1, a2, b2
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            assert_near(ours.get_parameter(name).grad, parameter.grad, slack=64)


@KINDS
def test_several_adapters(device, quantised):
    """Added, chosen, active together, weighted, and deleted."""
    theirs, ids = tiny_model("gpt_oss", device, F64), token_ids(device)
    ours = in_fused_moe(theirs)
    if quantised:
        ours = quantize_experts(ours, "int8")
        theirs = values_of(ours)
    theirs, ours = adapted(theirs), adapted(ours)
    for name, settings in (("second", {"r": 2, "lora_alpha": 9}), ("third", {"r": 3, "use_rslora": True})):
        theirs.add_adapter(name, lora_config(**settings))
        ours.add_adapter(name, lora_config(**settings))
    ours.double()  # adapters are float32 beside quantised weights
    for name in ("default", "second", "third"):
        peft.set_peft_model_state_dict(ours, peft.get_peft_model_state_dict(theirs, adapter_name=name), name)
    for active in ("second", "default", "third"):
        for model in (theirs, ours):
            model.set_adapter(active)
        assert_same(theirs, ours, ids)
    for active in (["default", "second"], ["third", "default", "second"]):
        for model in (theirs, ours):
            model.base_model.set_adapter(active)
        assert_same(theirs, ours, ids)
    for model in (theirs, ours):
        for module in wrappers_of(model):
            module.set_scale("second", 3)
    assert_same(theirs, ours, ids)
    for model in (theirs, ours):
        model.delete_adapter("default")
    assert_same(theirs, ours, ids)


def test_disable_and_unload(device):
    plain, ids = tiny_model("qwen3_moe", device), token_ids(device)
    theirs = adapted(copy.deepcopy(plain), target_modules=["q_proj"])
    ours, alone = ours_of(theirs), in_fused_moe(plain)(input_ids=ids).logits
    with ours.disable_adapter():
        assert torch.equal(ours(input_ids=ids).logits, alone)
    assert not torch.equal(ours(input_ids=ids).logits, alone)
    assert_same_logits(theirs, ours, ids)
    back = ours.unload()
    assert back.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(back(input_ids=ids).logits, alone)


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_merge_and_unmerge(device, family):
    """PEFT's own code merges float weights; ours computes on with them."""
    theirs, ids = adapted(tiny_model(family, device, F64)), token_ids(device)
    ours = ours_of(theirs)
    ours.merge_adapter()
    with Calls() as calls:
        assert_same_logits(theirs, ours, ids)
    assert not calls.of("grouped_mm")  # one operator per layer, without adapters
    with ours.disable_adapter():  # PEFT unmerges for it
        assert_same_logits(theirs.unload(), ours, ids)
    ours.unmerge_adapter()
    theirs = adapted(theirs.get_base_model() if hasattr(theirs, "get_base_model") else theirs)
    with_state_of(theirs, ours)
    assert_same(theirs, ours, ids)
    merged = ours.merge_and_unload(safe_merge=True)
    assert not any("lora" in name for name in merged.state_dict())
    assert_same_logits(theirs, merged, ids)


@KINDS
def test_files(cpu, tmp_path, quantised):
    """The keys and shapes that PEFT's own classes write, with adapters alone. Both read each other's."""
    base = quantize_experts(in_fused_moe(tiny_model("gpt_oss", cpu)), "int8")
    plain, ids = values_of(base), token_ids(cpu)
    base = base if quantised else in_fused_moe(plain)
    with mock.patch.dict(peft.PEFT_TYPE_TO_TUNER_MAPPING, {peft.PeftType.LORA: peft_model.LoraModel}):
        theirs = adapted(copy.deepcopy(plain), target_modules=["q_proj"])
    assert type(theirs.base_model) is peft_model.LoraModel
    ours = adapted(copy.deepcopy(base), target_modules=["q_proj"])
    theirs.save_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    files = {n: load_file(tmp_path / n / "adapter_model.safetensors") for n in ("theirs", "ours")}
    shapes = {n: {key: (t.shape, t.dtype) for key, t in file.items()} for n, file in files.items()}
    assert shapes["theirs"] == shapes["ours"] and all("lora_" in key for key in shapes["ours"])
    assert {f.name for f in (tmp_path / "ours").iterdir()} == {
        f.name for f in (tmp_path / "theirs").iterdir()
    }
    for name in ("theirs", "ours"):
        settings = {"is_trainable": True, "low_cpu_mem_usage": name == "ours"}
        reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / name, **settings)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / name, **settings)
        assert_same(again, reloaded, ids)
        if name == "ours":
            assert torch.equal(reloaded(input_ids=ids).logits, ours(input_ids=ids).logits)
        else:
            assert torch.equal(again(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.parametrize("reentrant", (True, False))
@KINDS
def test_gradient_checkpointing(device, reentrant, quantised):
    """The bits of a step that keeps everything."""
    model, ids = in_fused_moe(tiny_model("qwen3_moe", device)), token_ids(device)
    model = adapted(quantize_experts(model, "int8") if quantised else model).train()
    grads = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        calls = trained(model, ids)
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        model.zero_grad()
        assert len(calls.of("route_plan")) == (4 if recomputes else 2)
    assert_same_bits(*grads)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="PyTorch 2.11 does not trace PEFT's calls at once")
@KINDS
def test_compile(device, quantised):
    """One graph, which PEFT's own parametrisation breaks."""
    model, ids = in_fused_moe(tiny_model("gpt_oss", device)), token_ids(device)
    model = adapted(quantize_experts(model, "int8") if quantised else model)
    compiled, grads = torch.compile(model, fullgraph=True, backend="aot_eager"), []
    try:
        for call in (model, compiled):
            model.zero_grad()
            call(input_ids=ids, labels=ids).loss.backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    finally:
        torch._dynamo.reset()
    for name, value in grads[0].items():
        assert_near(grads[1][name], value, slack=64)


def test_autocast(device):
    """float32 weights under autocast, as Trainer's bf16=True has them: no less exact than eager."""
    theirs, ids = adapted(tiny_model("qwen3_moe", device)), token_ids(device)
    ours, dlogits, routing = ours_of(theirs), torch.randn(*ids.shape, 96, device=device), Routing()
    with torch.autocast(ids.device.type, BF16):
        expected = logits_and_gradients(theirs, ids, dlogits, routing)
        found = logits_and_gradients(ours, ids, dlogits, Routing(routing))
    exact = logits_and_gradients(copy.deepcopy(theirs).double(), ids, dlogits, Routing(routing))
    for name, value in exact.items():
        error, other = ((t[name].double() - value).norm() for t in (found, expected))
        assert error <= 1.3 * other + 1e-6 and found[name].dtype == expected[name].dtype, name


def test_the_layout_of_earlier_releases(device):
    """Before PEFT 0.20 a wrapper did not swap in and out where the weight is (E, out, in), or swapped them
    where it is not. Its own sum says what such adapters mean."""
    for family, flag in (("qwen3_moe", False), ("gpt_oss", True)):
        theirs = adapted(tiny_model(family, device))
        for module in wrappers_of(theirs):
            A, B = module.lora_A["default"], module.lora_B["default"]
            assert module._did_swap_in_out_features is not flag
            module._did_swap_in_out_features = flag
            rank, E = 4, module.num_experts
            A.weight = nn.Parameter(torch.randn(rank * E, B.weight.size(0), device=device) / 4)
            B.weight = nn.Parameter(torch.randn(module.in_features, rank * E, device=device) / 4)
        assert_same(theirs, ours_of(theirs), token_ids(device))


# --- quantised experts ------------------------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
def test_quantised_in_memory(cpu, family, format):
    """The adapters' gradients are those of the weights' values, which training does not change."""
    model, ids = quantised(format, family), token_ids(cpu)
    theirs = with_more_gradients(adapted(values_of(model), target_modules=["q_proj"]))
    ours = with_state_of(with_more_gradients(adapted(model, target_modules=["q_proj"])), theirs)
    before = {n: t.clone() for n, t in model.state_dict().items() if "lora" not in n}
    assert_same(theirs, ours, ids)
    losses, optimizer = [], torch.optim.Adam([p for n, p in ours.named_parameters() if "lora" in n], lr=0.02)
    for _ in range(4):
        loss = ours(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_bits(before, {n: t for n, t in model.state_dict().items() if "lora" not in n})


@ALL_CHECKPOINTS
def test_loaded_checkpoints(cpu, tmp_path, kind):
    """Packed experts, as the checkpoint stores them: adapters attach, train and are saved."""
    plain = write_checkpoint(kind, tmp_path)
    theirs = with_more_gradients(adapted(plain, target_modules=["q_proj"]))
    ours = with_more_gradients(adapted(load(tmp_path), target_modules=["q_proj"]))
    with_state_of(ours, theirs)
    names = set(ours.state_dict())
    ids = token_ids(cpu)
    assert_same(theirs, ours.train(), ids)
    assert_same_logits(theirs, ours.eval(), ids)
    ours.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapters")
    assert torch.equal(again.eval()(input_ids=ids).logits, ours(input_ids=ids).logits)
    assert names == set(ours.state_dict())  # attaching left the parameters as they were loaded


@ALL_CHECKPOINTS
def test_prepared_for_training(cpu, tmp_path, kind):
    """PEFT makes all 16-bit parameters float32, the scales of codes among them, of a model that was called
    before: the bits of one that was loaded in float32."""
    write_checkpoint(kind, tmp_path, BF16)
    expected, ours, ids = load(tmp_path), load(tmp_path, dtype=BF16), token_ids(cpu)
    ours(input_ids=ids)
    expected, ours = adapted(expected), adapted(peft.prepare_model_for_kbit_training(ours))
    with_state_of(ours, expected)
    grads = []
    for model in (expected, ours):
        model.train()(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if "lora" in n})
    assert_same_bits(*grads)


def test_fp8_parameters_of_another_implementation(cpu, tmp_path):
    """They are PEFT's, which adds adapters to FP8 by itself; packed weights run in fused_moe alone."""
    write_checkpoint("fp8_block", tmp_path)
    model = adapted(load(tmp_path))
    experts = experts_of(model.get_base_model())
    wrapper = wrappers_of(model)[0]
    assert wrapper.get_param().dtype == F32 and wrapper.get_param().untyped_storage().nbytes() == 4
    assert wrapper.get_base_layer().down_proj.dtype == torch.float8_e4m3fn and experts
    model.get_base_model().set_experts_implementation("eager")
    assert wrapper.get_param() is wrapper.get_base_layer().down_proj
    model = adapted(quantised("int8"))
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(ValueError, match="expected experts_implementation='fused_moe' for packed experts"):
        model(input_ids=token_ids(cpu))


def test_experts_that_quantise_activations(cpu, tmp_path):
    """FP8 with 8-bit products has none for adapters: with some it computes by values, without as before."""
    fused_moe.transformers.register()
    try:
        write_checkpoint("fp8_block", tmp_path)
        model, ids = load(tmp_path).eval(), token_ids(cpu)
        with torch.no_grad():
            alone = model(input_ids=ids).logits
            with Calls() as calls:
                model = adapted(model)
                model(input_ids=ids)
            assert calls.of("quantized_up") and not calls.of("experts")
            with model.disable_adapter(), Calls() as calls:
                assert torch.equal(model(input_ids=ids).logits, alone)
            assert calls.kinds() == ["8 bits"] * 2
    finally:
        fused_moe.transformers.register(compute="codes")


@pytest.mark.parametrize("merge", ("merge_and_unload", "merge_adapter"))
def test_merging_into_quantised_weights_is_refused(cpu, merge):
    """Before anything is merged, attention's adapters among it."""
    model, ids = adapted(quantised("int8"), target_modules=["q_proj"]), token_ids(cpu)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"merge: expected float weights, found a quantised .*requantized_merges"
    ):
        getattr(model, merge)()
    assert_same_bits(before, model.state_dict())
    model(input_ids=ids)
    wrapper = wrappers_of(model)[0]
    with pytest.raises(ValueError, match="merge: expected float weights, found a quantised down_proj"):
        wrapper.merge()


@FORMATS
def test_merging_that_requantises(cpu, format):
    """The merged weight is the sum, quantised with the options that it had. It could not be unmerged, so
    merge_adapter is refused."""
    model, ids = adapted(quantised(format, "gpt_oss")), token_ids(cpu)
    wrappers = wrappers_of(model)
    expected = []
    for wrapper in wrappers:
        w = getattr(wrapper.get_base_layer(), wrapper.parameter_name)
        values = w.dequantize() + wrapper.get_delta_weight("default").mT
        expected.append(quantize(values.detach(), format).state_dict())
    assert len(expected) == 4
    with requantized_merges():
        with pytest.raises(
            ValueError, match="merge: expected float weights, found a quantised .*or merge_and_unload"
        ):
            model.merge_adapter()
        assert not any(wrapper.merged for wrapper in wrappers)
        merged = model.merge_and_unload()
    for wrapper, state in zip(wrappers, expected, strict=True):
        w = getattr(wrapper.get_base_layer(), wrapper.parameter_name)
        assert isinstance(w, QuantizedWeight)
        assert_same_bits(w.state_dict(), state)
    merged(input_ids=ids)


def test_merging_attention_alone(cpu):
    """What has no adapters of experts merges and unmerges beside quantised ones."""
    model, ids = adapted(quantised("int8"), target_modules=["q_proj"]), token_ids(cpu)
    model.add_adapter("attention", peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("attention")
    before = model(input_ids=ids).logits
    model.merge_adapter(["attention"])
    assert_near(model(input_ids=ids).logits, before, slack=64)
    model.unmerge_adapter()
    assert_near(model.merge_and_unload()(input_ids=ids).logits, before, slack=64)


@ALL_CHECKPOINTS
def test_merging_into_loaded_checkpoints(cpu, tmp_path, kind):
    """The merged model is saved with the checkpoint's own tensors, which load again."""
    write_checkpoint(kind, tmp_path)
    model, ids = adapted(load(tmp_path)), token_ids(cpu)
    stored = {n: (t.shape, t.dtype) for n, t in load(tmp_path).state_dict().items()}
    before = model(input_ids=ids).logits
    with requantized_merges():
        merged = model.merge_and_unload()
    assert {n: (t.shape, t.dtype) for n, t in merged.state_dict().items()} == stored
    logits = merged(input_ids=ids).logits
    assert (logits - before).norm() < 0.5 * before.norm()
    merged.save_pretrained(tmp_path / "merged")
    if kind != "fp8_block":  # whose dense layers transformers quantises where there is a GPU
        assert torch.equal(load(tmp_path / "merged")(input_ids=ids).logits, logits)


@pytest.mark.parametrize("tiled", (False, True))
def test_what_cannot_be_requantised(cpu, tmp_path, tiled):
    """Scales that the checkpoint stores in 16 bits; nothing is merged, and attention's adapters are not."""
    write_checkpoint("fp8_block", tmp_path, BF16)
    model = load(tmp_path)
    for (_, experts), name in itertools.product(experts_of(model), ("gate_up_proj", "down_proj")):
        scale = experts._parameters[f"{name}_scale_inv"].to(BF16)
        experts._parameters[f"{name}_scale_inv"] = nn.Parameter(scale, requires_grad=False)
        if tiled:  # as on a GPU: the weight is in its parameters' place
            w = weight_of(experts, name, "codes")
            made = QuantizedWeight(w.data.clone(), w.scale.float(), format="fp8_block", shape=w.shape)
            replace_parameters(experts, name, made)
    model = adapted(model, target_modules=["q_proj"])
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with (
        requantized_merges(),
        pytest.raises(ValueError, match="merge: expected a weight .* any float32, found"),
    ):
        model.merge_and_unload()
    assert_same_bits(before, model.state_dict())


def test_weights_that_take_no_adapters(cpu):
    """They are refused before anything is adapted; attention beside them is not."""
    model = in_fused_moe(tiny_model("qwen3_moe", "cpu", **WIDE))
    quantize_experts(model, "int8", compute="int8_smooth")
    modules = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="LoraConfig: expected no weight of compute 'int8_smooth', .*found"):
        adapted(model, target_modules=["q_proj"])
    assert modules == [type(m) for m in model.modules()]
    adapted(model, target_modules=["q_proj"], target_parameters=None)(input_ids=token_ids(cpu))


def test_target_modules_never_are_quantised_weights(cpu):
    """A list of names for any model means what it does for float experts, which are no modules."""
    models = [in_fused_moe(tiny_model("gpt_oss", "cpu")), in_fused_moe(tiny_model("gpt_oss", "cpu"))]
    quantize_experts(models[1], "int8")
    settings = {"target_modules": ["q_proj", "down_proj"], "target_parameters": None}
    keys = [peft.get_peft_model_state_dict(adapted(model, **settings)).keys() for model in models]
    assert keys[0] == keys[1] and all("q_proj" in key for key in keys[0])


@KINDS
def test_target_modules_of_earlier_models(device, quantised):
    """PEFT takes each expert's gate_proj, up_proj and down_proj for the parameters that hold them all."""
    settings = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "target_parameters": None}
    ours, ids = in_fused_moe(tiny_model("qwen3_moe", device)), token_ids(device)
    if quantised:
        quantize_experts(ours, "int8")
    theirs = values_of(ours) if quantised else tiny_model("qwen3_moe", device)
    theirs, ours = (adapted(model, **settings) for model in (theirs, ours))
    if not quantised:
        ours = ours_of(theirs)
    assert len([n for n in peft.get_peft_model_state_dict(ours) if "experts" in n]) == 2 * 4
    assert_same(theirs, with_state_of(ours, theirs), ids)


# --- trainers and wrappers --------------------------------------------------------------------------------


@KINDS
def test_trainer(cpu, tmp_path, quantised):
    """A run that is resumed from PEFT's files ends with the bits of one that was not stopped."""
    pytest.importorskip("accelerate")
    base = in_fused_moe(tiny_model("qwen3_moe", "cpu"))
    base = quantize_experts(base, "int8") if quantised else base
    initial = adapted(base, target_modules=["q_proj"])
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 96, (16, 12))]

    def run(folder, resume=None):
        args = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], logging_steps=1, learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        model = copy.deepcopy(initial)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return peft.get_peft_model_state_dict(model)

    whole = run(tmp_path)
    assert not torch.equal(*(s[next(iter(whole))] for s in (whole, peft.get_peft_model_state_dict(initial))))
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert not list(tmp_path.glob("*/model*.safetensors"))
    assert_same_bits(whole, run(tmp_path / "resumed", str(tmp_path / "checkpoint-2")))


def train_on_rank(rank, device, wrapper, model_bytes, ids):
    """One of two processes: the gradients of adapters, of its half of a batch."""
    fused_moe.transformers.register(compute="codes")
    model = torch.load(model_bytes, weights_only=False).to(device)
    if wrapper == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
    batch = ids.to(device).chunk(RANKS)[rank]
    for _ in range(2):  # gradients of two calls are added
        model(input_ids=batch, labels=batch).loss.backward()
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


@KINDS
@pytest.mark.parametrize("wrapper", ("DDP", "FSDP2"))
def test_data_parallel(workers, cpu, tmp_path, wrapper, quantised):  # noqa: F811
    """Two processes have the gradients of one."""
    model, ids = in_fused_moe(tiny_model("qwen3_moe", "cpu")), token_ids("cpu")
    model = adapted(quantize_experts(model, "int8") if quantised else model, target_modules=["q_proj"])
    torch.save(model, tmp_path / "model.pt")
    found = workers(train_on_rank, wrapper, str(tmp_path / "model.pt"), ids)
    for _ in range(2):
        sum(model(input_ids=half, labels=half).loss for half in ids.chunk(RANKS)).div(RANKS).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for grads in found:
        assert grads.keys() == expected.keys()
        for name, value in expected.items():
            assert_near(grads[name], value, slack=64)


# --- what is refused, and what PEFT does alone ------------------------------------------------------------


LISTED = "as the experts' mlp.experts.down_proj, mlp.experts.gate_up_proj, found "


@KINDS
@pytest.mark.parametrize(
    "names",
    (["mlp.experts.w1"], [GATE_UP, "experts.down"], ["gate_up"]),
    ids=("none", "one of two", "a part"),
)
def test_names_that_match_nothing(cpu, names, quantised):
    """They raise before anything is adapted, where PEFT would train attention alone."""
    model = in_fused_moe(tiny_model("qwen3_moe", "cpu"))
    model = quantize_experts(model, "int8") if quantised else model
    modules = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=f"LoraConfig: expected target_parameters .*{LISTED}'{names[-1]}'"):
        adapted(model, target_modules=["q_proj"], target_parameters=names)
    assert modules == [type(m) for m in model.modules()]
    adapted(model, target_modules=["q_proj"], target_parameters=None)


def test_names_of_loaded_experts_are_listed(cpu, tmp_path):
    """Also for the name of a part of one, which no adapter is for."""
    write_checkpoint("mxfp4", tmp_path)
    with pytest.raises(ValueError, match=LISTED):
        adapted(load(tmp_path), target_parameters=["mlp.experts.gate_up_proj_blocks"])


def test_tied_weights(cpu):
    """A parameter is found by each of its names."""
    model = in_fused_moe(tiny_model("qwen3_moe", cpu))
    model.lm_head.weight = model.model.embed_tokens.weight
    model = adapted(model, target_parameters=[*BOTH, "lm_head.weight"])
    assert any("lm_head" in name for name in peft.get_peft_model_state_dict(model))


@pytest.mark.parametrize(
    "settings",
    ({"lora_dropout": 0.1}, {"lora_bias": True}, {"use_dora": True}, {"fan_in_fan_out": True}),
    ids=str,
)
@KINDS
def test_what_peft_refuses(cpu, settings, quantised):
    """Its errors stay, and no stand-in of a quantised weight does."""
    model = in_fused_moe(tiny_model("qwen3_moe", "cpu"))
    model = quantize_experts(model, "int8") if quantised else model
    names = [n for n, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="lora.ParamWrapper does not work with"):
        adapted(model, **settings)
    assert [n for n, _ in model.named_parameters()] == names


def test_experts_that_are_not_ours(device, fresh_warnings):  # noqa: F811
    """A gate without a kernel, and models in eager or grouped_mm: PEFT's own path."""
    theirs = adapted(tiny_model("mixtral", device, hidden_act="quick_gelu", intermediate_size=32))
    ours, ids = ours_of(theirs), token_ids(device)
    with pytest.warns(UserWarning, match="does not compute the activation"):
        assert_same(theirs, ours, ids)
    theirs = adapted(tiny_model("mixtral", device))
    grouped = copy.deepcopy(theirs)
    grouped.get_base_model().set_experts_implementation("grouped_mm")
    assert_same(theirs, grouped, ids)
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        adapted(tiny_model("mixtral", device), target_modules=["q_proj"], target_parameters=["nothing"])


@KINDS
def test_experts_whose_forward_is_another(device, quantised):
    """As other packages set one: adapters that it does not add raise, and the model is as before."""
    model, ids = in_fused_moe(tiny_model("qwen3_moe", device)), token_ids(device)
    model = adapted(quantize_experts(model, "int8") if quantised else model)
    before = model(input_ids=ids).logits
    experts = wrappers_of(model)[0].get_base_layer()
    experts.forward = lambda x, *routed: x
    with pytest.raises(RuntimeError, match="Experts: expected a forward that calls 'fused_moe', which has"):
        model(input_ids=ids)
    del experts.forward
    assert torch.equal(model(input_ids=ids).logits, before)


def test_calls_leave_nothing(device):
    """Nor does one that fails: copies of a module, as DataParallel makes them, would share it."""
    model, ids = adapted(in_fused_moe(tiny_model("qwen3_moe", device))), token_ids(device)
    experts = wrappers_of(model)[0].get_base_layer()
    before = vars(experts).keys() | set()
    with experts.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    assert vars(experts).keys() == before
    model(input_ids=ids)
    assert vars(experts).keys() == before


def test_pickles_of_other_models(cpu):
    """Models without experts have PEFT's own class, in pickles, too."""
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
    assert type(model.base_model) is peft_model.LoraModel
    assert type(adapted(in_fused_moe(tiny_model("qwen3_moe", cpu))).base_model) is not peft_model.LoraModel


def test_adapters_that_were_attached_before(device, fresh_warnings):  # noqa: F811
    """By PEFT's own class for LoRA: its path, which is right, and one warning."""
    with mock.patch.dict(peft.PEFT_TYPE_TO_TUNER_MAPPING, {peft.PeftType.LORA: peft_model.LoraModel}):
        theirs = adapted(tiny_model("qwen3_moe", device))
    with pytest.warns(UserWarning, match=r"register\(\) before get_peft_model") as warned:
        assert_same(theirs, ours_of(theirs), token_ids(device))
    assert len([w for w in warned if "register()" in str(w.message)]) == 1


@pytest.mark.parametrize(
    "missing",
    ("_inject_parameters", "_create_new_module", "_check_target_module_exists", "_activate_lora"),
)
def test_a_release_with_other_classes(device, monkeypatch, fresh_warnings, missing):  # noqa: F811
    """register() warns once, and PEFT's path remains."""
    monkeypatch.setitem(peft.PEFT_TYPE_TO_TUNER_MAPPING, peft.PeftType.LORA, peft_model.LoraModel)
    for owner in (*peft_model.LoraModel.__mro__, peft_layer.ParamWrapper):
        if missing in vars(owner):
            monkeypatch.delattr(owner, missing)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fused_moe.transformers.register(compute="codes")
        fused_moe.transformers.register(compute="codes")
    assert [missing in str(w.message) for w in found if "release of PEFT" in str(w.message)] == [True]
    assert peft.PEFT_TYPE_TO_TUNER_MAPPING[peft.PeftType.LORA] is peft_model.LoraModel


@pytest.mark.parametrize("error", (RuntimeError, ValueError))
def test_a_release_that_does_not_load(monkeypatch, fresh_warnings, error):  # noqa: F811
    """Whatever it raises: register() does without, and says what was raised."""
    monkeypatch.setattr(importlib.util, "find_spec", mock.Mock(side_effect=error("broken")))
    with pytest.warns(UserWarning, match=f"this release of PEFT .{error.__name__}.'broken'"):
        fused_moe.transformers.register(compute="codes")


def test_another_signature(device, monkeypatch):
    """Arguments that a release adds to a call are passed on."""
    theirs = adapted(tiny_model("qwen3_moe", device))
    own, seen = peft_layer.ParamWrapper._activate_lora, []

    @contextmanager
    def activate(self, active, *, extra):
        seen.append(extra)
        with own(self, active):
            yield

    def forward(self, x, *args):
        with self._activate_lora(self.active_adapters, extra=1):
            return self.base_layer(x, *args)

    monkeypatch.setattr(peft_layer.ParamWrapper, "_activate_lora", activate)
    monkeypatch.setattr(peft_layer.ParamWrapper, "forward", forward)
    assert_same_logits(theirs, ours_of(theirs), token_ids(device))
    assert seen == [1] * 4  # of theirs


def test_another_package_s_class_stays(cpu, monkeypatch, fresh_warnings):  # noqa: F811
    """With a warning: quantised experts would get no adapters."""

    class Other(peft_model.LoraModel):
        pass

    monkeypatch.setitem(peft.PEFT_TYPE_TO_TUNER_MAPPING, peft.PeftType.LORA, Other)
    with pytest.warns(UserWarning, match=r"leaves LoRA to .*Other: .* quantised ones get none"):
        fused_moe.transformers.register(compute="codes")
    assert peft.PEFT_TYPE_TO_TUNER_MAPPING[peft.PeftType.LORA] is Other


def test_fp8_training_has_no_adapters(device, fresh_warnings):  # noqa: F811
    """Experts with adapters compute in their own dtype, and a warning says so."""
    theirs = adapted(tiny_model("qwen3_moe", device))
    ours = ours_of(theirs)
    ours.get_base_model().set_experts_implementation("fused_moe_fp8")
    with pytest.warns(UserWarning, match="in FP8: they have adapters"):
        assert_same(theirs, ours, token_ids(device))
