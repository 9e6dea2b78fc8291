"""torchtitan's own checkpoints and state-dict adapters with layers that are ours, and Hugging Face's
checkpoints from and to torchtitan's."""

import copy
import re
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402
from cases import BF16  # noqa: E402
from test_checkpoint_files import config_of, contents, convert  # noqa: E402
from test_checkpoint_files import write as write_folder  # noqa: E402
from test_torchtitan import HAS_OVERRIDES, MODELS, debug_model  # noqa: E402
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from fused_moe.checkpoint.torchtitan import BIAS, read, write  # noqa: E402

if HAS_OVERRIDES:
    from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
    from torchtitan.components.checkpointer.dcp import CheckpointManager
else:
    from torchtitan.components.checkpoint import MODEL, CheckpointManager, ModelWrapper


LAYERS = {"deepseek_v3": 2, "gpt_oss": 1, "llama4": 2, "qwen3": 1}  # of a flavor "tiny", else as "debugmodel"


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A flavor in torchtitan's registries that debug_model builds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, layers in LAYERS.items():
            if name not in MODELS:
                continue
            module = import_module(f"torchtitan.models.{name}")
            if HAS_OVERRIDES:
                configs = next(v for k, v in vars(module).items() if k.endswith("_configs"))

                def make(layers=layers, make=configs[MODELS[name]], **options):
                    config = make(**options)
                    config.layers = config.layers[:layers]
                    return config

                patch.setitem(configs, "tiny", make)
            else:
                flavors = module.get_train_spec().model_args
                sizes = {"n_layers": layers, "vocab_size": 2048}
                patch.setitem(flavors, "tiny", replace(flavors[MODELS[name]], **sizes))
            patch.setitem(MODELS, name, "tiny")
        add_sigmoid_flavor(patch)
        yield


SIGMOID = {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5}


def add_sigmoid_flavor(patch):
    """deepseek_v3's "tiny" with a router as the 671B's, as flavor "sigmoid"."""
    module = import_module("torchtitan.models.deepseek_v3")
    if HAS_OVERRIDES:

        def make(tiny=module.deepseekv3_configs["tiny"], **options):
            config = tiny(**options)
            for name, value in SIGMOID.items():
                setattr(config.layers[1].moe.router, name, value)
            return config

        patch.setitem(module.deepseekv3_configs, "sigmoid", make)
    else:
        flavors = module.get_train_spec().model_args
        args = flavors["tiny"]
        patch.setitem(flavors, "sigmoid", replace(args, moe_args=replace(args.moe_args, **SIGMOID)))


def adapter_of(name):
    """As torchtitan's Trainer makes it, of the flavor that debug_model builds."""
    module = import_module(f"torchtitan.models.{name}")
    if HAS_OVERRIDES:
        spec = module.model_registry(MODELS[name])
        return spec.state_dict_adapter(spec.model, None)
    spec = module.get_train_spec()
    return spec.state_dict_adapter(spec.model_args[MODELS[name]], None)


@pytest.fixture(scope="module", params=list(MODELS))
def models(request, cpu, tiny):
    """Name, a fused model and a stock one, of other random weights."""
    torch.manual_seed(0)
    return request.param, *(filled(debug_model(request.param, fused)) for fused in (True, False))


@torch.no_grad()
def filled(model):
    """The model, with random weights."""
    for t in model.state_dict().values():
        t.copy_(torch.randn(t.shape) if t.is_floating_point() else torch.zeros_like(t))
    return model


def differing(model, state):
    own = model.state_dict()
    return [name for name, t in own.items() if not torch.equal(whole(t), whole(state[name]))]


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def left_out(name, adapter, state):
    """What torchtitan's own adapters have no names for: biases of models that are published without them, and
    0.3.0's gpt-oss and 0.2.2's llama4 more."""
    found = set(state) - adapter.from_hf(adapter.to_hf(dict(state))).keys()
    if (name, HAS_OVERRIDES) in (("gpt_oss", True), ("llama4", False)):
        parts = ("inner_experts.mlp", "feed_forward.w")
        return {key for key in found if not any(part in key for part in parts)}, found
    return found, found


def test_adapters(models):
    """to_hf gives the stock model's names and from_hf gives the bits back."""
    name, fused, stock = models
    adapter, state = adapter_of(name), fused.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
        k: (v.shape, v.dtype) for k, v in stock.state_dict().items()
    }
    published = adapter.to_hf(dict(state))
    assert {k: v.shape for k, v in published.items()} == {
        k: v.shape for k, v in adapter.to_hf(dict(stock.state_dict())).items()
    }
    again = adapter.from_hf(dict(published))
    usual, lost = left_out(name, adapter, state)
    assert set(again) == set(state) - lost and all(BIAS.search(key) for key in usual)
    assert [key for key, value in again.items() if not torch.equal(value, state[key])] == []


def load(model, folder, adapter, *, from_hf):
    """As CheckpointManager does for initial_load_path, with initial_load_in_hf or without."""
    wrapper = ModelWrapper(model)
    manager = SimpleNamespace(sd_adapter=adapter, states={MODEL: wrapper}, ft_manager=None)
    CheckpointManager.dcp_load(manager, wrapper.state_dict(), folder, from_hf, False)


def test_loads_each_others_checkpoints(models, tmp_path):
    """torch.distributed.checkpoint's folder of either model loads into the other."""
    name, fused, stock = models
    for i, (first, second) in enumerate(((fused, stock), (stock, fused))):
        folder = str(tmp_path / str(i))
        dcp.save(ModelWrapper(first).state_dict(), checkpoint_id=folder, no_dist=True)
        filled(second)
        load(second, folder, None, from_hf=False)
        assert differing(second, first.state_dict()) == []


def save_published(adapter, state, folder):
    published = adapter.to_hf(dict(state))
    copies = {k: v.clone(memory_format=torch.contiguous_format) for k, v in published.items()}
    safetensors.save_file(copies, folder / "model.safetensors")


def test_loads_published_checkpoints(models, tmp_path):
    """initial_load_in_hf: safetensors with published names."""
    name, fused, stock = models
    adapter = adapter_of(name)
    save_published(adapter, stock.state_dict(), tmp_path)
    filled(fused)
    load(fused, str(tmp_path), adapter, from_hf=True)
    _, lost = left_out(name, adapter, stock.state_dict())
    assert set(differing(fused, stock.state_dict())) <= lost


def test_adapters_of_shards(models, one_rank, tmp_path):
    """The adapters split sharded experts by their placements: fully_shard of a model with our layers."""
    name, fused, stock = models
    sharded = fully_shard(copy.deepcopy(fused), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    adapter = adapter_of(name)
    save_published(adapter, stock.state_dict(), tmp_path)
    load(sharded, str(tmp_path), adapter, from_hf=True)
    _, lost = left_out(name, adapter_of(name), stock.state_dict())
    assert set(differing(sharded, stock.state_dict())) <= lost


# --- from and to Hugging Face -------------------------------------------------------------------------

SMALL = {"vocab_size": 2048, "hidden_size": 256, "hidden_act": "silu", "num_attention_heads": 16}
# torchtitan's model -> its flavor "tiny" as config.json
CONFIGS = {
    "deepseek_v3": SMALL | {
        "model_type": "deepseek_v2", "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "qwen3": SMALL | {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "moe_intermediate_size": 768, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_key_value_heads": 8, "head_dim": 128,
    },
    "gpt_oss": SMALL | {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "intermediate_size": 2880, "num_local_experts": 8,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "swiglu_limit": 7.0,
    },
}  # fmt: skip


def published(name, fused):
    """A checkpoint as transformers writes it, of the sizes of a model: made of the adapter's own names, but
    for gpt-oss's experts, which it knows as mxfp4 files have them."""
    found = published_state(name, fused.state_dict())
    return {k: torch.randn(v.shape).to(BF16) for k, v in found.items() if "e_score" not in k}


def published_state(name, state):
    if name == "gpt_oss":  # 0.3.0's adapter has no letters in the names of experts
        state = state | {re.sub("_[A-Z]+$", "", k): v for k, v in state.items() if ".mlp" in k}
    found = adapter_of(name).to_hf(dict(state))
    return {k.removesuffix("_blocks"): v.mT if k.endswith("_blocks") else v for k, v in found.items()}


@pytest.fixture(scope="module", params=CONFIGS)
def converted(cpu, tiny, request, tmp_path_factory):
    """Model, its checkpoint as published, and the folder that write has made of it."""
    name = request.param
    torch.manual_seed(3)
    state, folder = published(name, debug_model(name, True)), tmp_path_factory.mktemp(name) / "out"
    sizes = []
    write(state, CONFIGS[name], folder, flavor="tiny", progress=sizes.append)
    assert sum(sizes) > sum(t.nbytes for t in state.values())  # and biases
    return name, state, folder


def test_torchtitan_loads_what_was_written(converted):
    """By its initial_load_path, into a model with our layers: every tensor is the published one."""
    name, state, folder = converted
    model = filled(debug_model(name, True))
    load(model, str(folder), None, from_hf=False)
    own = model.state_dict()
    again = {k: v for k, v in published_state(name, own).items() if "e_score" not in k}
    assert again.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(again[key], value.float())] == []
    assert not any(own[key].any() for key in own if BIAS.search(key))


def test_back(converted):
    """read gives the published names, bits and dtypes, of what write and torchtitan have saved."""
    name, state, folder = converted
    found = dict(read(folder, CONFIGS[name], flavor="tiny"))
    assert found.keys() == state.keys()
    for key, value in found.items():
        assert value.dtype == BF16 and value.is_contiguous() and torch.equal(value, state[key]), key
        assert value.untyped_storage().nbytes() == value.nbytes


class Read(dict):
    """Tensors that are read when they are asked for."""

    def __getitem__(self, key):
        return super().__getitem__(key).clone()


@pytest.mark.parametrize("layout", ("hf", "fused_moe"))
def test_command(converted, tmp_path, layout):
    """convert goes there and back, from and to published names and ours, with the same bytes."""
    name, state, _ = converted
    published = source = write_folder(tmp_path / "in", state, CONFIGS[name], "500KB")
    if layout == "fused_moe":
        source = convert(published, tmp_path / "ours", to=layout)
    titan = convert(source, tmp_path / "titan", to="torchtitan", flavor="tiny")
    back = convert(titan, tmp_path / "back", to=layout, config=published, flavor="tiny")
    assert contents(back) == contents(source) and config_of(back) == config_of(source)
    with pytest.raises(ValueError, match="nope"):
        convert(source, tmp_path / "out", to="torchtitan", flavor="nope")
    assert not (tmp_path / "out").exists()


def test_two_tensors_are_in_memory(converted, tmp_path, monkeypatch):
    """The one that is made and the one before it, whatever the number of layers."""
    name, state, _ = converted
    made, counts, make = [], [], DefaultSavePlanner.resolve_data

    def watched(planner, item):
        tensor = make(planner, item)
        made.append(StorageWeakRef(tensor.untyped_storage()))
        counts.append(sum(not ref.expired() for ref in made))
        return tensor

    monkeypatch.setattr(DefaultSavePlanner, "resolve_data", watched)
    write(Read(state), CONFIGS[name], tmp_path / "out", flavor="tiny")
    assert len(made) > 12 and max(counts) <= 2


def test_wrong_calls(converted, tmp_path, monkeypatch):
    """Before anything is written; the message names the field or the key."""
    name, state, folder = converted
    monkeypatch.setattr(dcp, "save", lambda *args, **_: pytest.fail("written"))
    config = CONFIGS[name]
    key = next(key for key in state if ".experts." in key)
    layer = config["num_hidden_layers"] - 1
    experts = next(f for f in ("num_experts", "n_routed_experts", "num_local_experts") if f in config)
    for changes, tensors, options, message in (
        ({"model_type": "llama"}, {}, {}, "a model_type that torchtitan has: deepseek_v2, .*, found 'llama'"),
        ({}, {}, {"flavor": "9B"}, "flavor to be one of torchtitan's .*: debugmodel, .*, found '9B'"),
        ({"hidden_size": 64}, {}, {}, "hidden_size = 256, as torchtitan's flavor 'tiny' has, found 64"),
        ({"num_hidden_layers": 4}, {}, {}, f"num_hidden_layers = {layer + 1}, .*, found 4"),
        ({experts: 16}, {}, {}, f"{experts} of layer {layer} = {config[experts]}, .*, found 16"),
        ({"num_experts_per_tok": 1}, {}, {}, f"num_experts_per_tok of layer {layer} = ., .*, found 1"),
        ({}, {key: None}, {}, f"the key {key}, found none, nor 0 others"),
        ({}, {"model.more": state[key]}, {}, "does not know, found model.more and 0 others"),
        ({}, {key + "_scale_inv": state[key]}, {}, f"{key}_scale_inv and 0 others; quantised weights have"),
        ({}, {key: state[key][:-1]}, {}, f"{key} of shape .*, as torchtitan's flavor has, found"),
        ({}, {key: state[key].char()}, {}, f"{key} to be floating, found torch.int8"),
        ({}, {}, {"out": folder}, "a new folder in one that exists as out, .*/out, found one"),
        ({}, {}, {"out": tmp_path / "a" / "b"}, "a new folder in one that exists as out, .*, found none"),
    ):
        wrong = {k: v for k, v in (state | tensors).items() if v is not None}
        arguments = {"out": tmp_path / "out", "flavor": "tiny"} | options
        with pytest.raises(ValueError, match=f"^fused_moe.checkpoint.torchtitan: expected .*{message}"):
            write(wrong, config | changes, **arguments)
        assert not [*tmp_path.iterdir()]
    if name == "qwen3":
        with pytest.raises(ValueError, match="norm_topk_prob of layer 0 = True, .* found False"):
            write(state, config | {"norm_topk_prob": False}, tmp_path / "out", flavor="tiny")


def test_without_torchtitan(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchtitan.models.qwen3", None)
    with pytest.raises(ImportError, match=r"needs torchtitan \(pip install torchtitan\): import of"):
        write({}, CONFIGS["qwen3"], tmp_path / "out", flavor="tiny")


def test_wrong_folders(converted, tmp_path):
    name, state, folder = converted
    for part, message in (
        ({"norm.weight": torch.ones(256)}, "expected .* in .*, found none, nor"),
        (None, "expected norm.weight of shape \\(256,\\), as flavor 'tiny' has, found \\(7,\\) in"),
    ):
        if part is None:
            part = {k: torch.empty(v.shape) for k, v in debug_model(name, True).state_dict().items()}
            part["norm.weight"] = torch.ones(7)
        dcp.save(part, checkpoint_id=str(tmp_path / "part"), no_dist=True)
        with pytest.raises(ValueError, match=message):
            dict(read(tmp_path / "part", CONFIGS[name], flavor="tiny"))


def test_wrong_files(converted, tmp_path, monkeypatch):
    """They are found before the first tensor is read; .metadata is read once for all."""
    name, state, folder = converted
    own = {k: torch.empty(v.shape) for k, v in debug_model(name, True).state_dict().items()}
    last = next(reversed(own))
    dcp.save(own | {last: own[last].int()}, checkpoint_id=str(tmp_path / "int"), no_dist=True)
    with pytest.raises(ValueError, match=f"{re.escape(last)} in .*/int to be floating, found torch.int32"):
        next(read(tmp_path / "int", CONFIGS[name], flavor="tiny"))
    copy, calls, once = tmp_path / "copy", [], FileSystemReader.read_metadata
    shutil.copytree(folder, copy)
    monkeypatch.setattr(FileSystemReader, "read_metadata", lambda *args: calls.append(1) or once(*args))
    assert len(dict(read(copy, CONFIGS[name], flavor="tiny"))) == len(state) and len(calls) == 1
    file = max(copy.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with file.open("r+b") as stream:
        stream.truncate(10)
    with pytest.raises(ValueError, match=f"bytes or more in .*{file.name}, which has .*, found 10"):
        next(read(copy, CONFIGS[name], flavor="tiny"))
    file.unlink()
    with pytest.raises(ValueError, match=f"expected the file .*{file.name} with .*, found none"):
        next(read(copy, CONFIGS[name], flavor="tiny"))


def test_layers_that_predict_further_tokens_are_left_out(converted, tmp_path):
    name, state, _ = converted
    more = state | {f"model.layers.{CONFIGS[name]['num_hidden_layers']}.eh_proj.weight": torch.ones(3)}
    with pytest.warns(UserWarning, match="further tokens are left out: model.layers"):
        write(more, CONFIGS[name], tmp_path / "out", flavor="tiny")


def test_other_constants_are_warned_of(converted, tmp_path):
    """torchtitan's flavors of DeepSeek-V3 have another eps than its config.json."""
    name, state, folder = converted
    with pytest.warns(UserWarning, match="rope_theta is 7.0 in the configuration, [0-9.]+ in torchtitan's"):
        dict(read(folder, CONFIGS[name] | {"rope_parameters": {"rope_theta": 7.0}}, flavor="tiny"))


def test_a_bias_without_a_published_name(converted, tmp_path):
    """Training moves it, and no file of this family has it."""
    name, state, _ = converted
    model = filled(debug_model(name, True))
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path), no_dist=True)
    with pytest.warns(UserWarning, match=r"moe.expert_bias\w* has values that \w+ has no published name for"):
        found = dict(read(tmp_path, CONFIGS[name], flavor="tiny"))
    assert found.keys() == state.keys()


def test_a_bias_with_a_published_name(cpu, tiny, tmp_path):
    """DeepSeek-V3 has e_score_correction_bias, which is needed then."""
    config = {k: v for k, v in CONFIGS["deepseek_v3"].items() if k != "topk_method"}
    config |= {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    model = filled(debug_model("deepseek_v3", True))
    state = published_state("deepseek_v3", model.state_dict())
    write(state, config, tmp_path / "out", flavor="sigmoid")
    other = filled(debug_model("deepseek_v3", True))
    load(other, str(tmp_path / "out"), None, from_hf=False)
    assert differing(other, model.state_dict()) == []
    back = dict(read(tmp_path / "out", config, flavor="sigmoid"))
    assert back.keys() == state.keys()
    del state["model.layers.1.mlp.gate.e_score_correction_bias"]
    with pytest.raises(
        ValueError, match="the key model.layers.1.mlp.gate.e_score_correction_bias, found none"
    ):
        write(state, config, tmp_path / "again", flavor="sigmoid")
    with pytest.raises(ValueError, match="scoring_func of layer 1|score_func of layer 1"):
        write(state, config, tmp_path / "again", flavor="tiny")


# --- transformers ---------------------------------------------------------------------------------------

MORE = {
    "deepseek_v3": {"rms_norm_eps": 1e-5, "num_key_value_heads": 16, "rope_theta": 1e4},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "layer_types": ["full_attention"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_transformers(cpu, tiny, tmp_path, name):
    """Its files, which transformers writes, become torchtitan's and come back bit-equal. On 0.2.2, whose
    attention runs on CPUs, the logits agree."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields = CONFIGS[name] | MORE[name]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}}
    config = transformers.AutoConfig.for_model(**fields, **rope)
    source = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    source.save_pretrained(tmp_path / "source")
    state = safetensors.load_file(tmp_path / "source" / "model.safetensors")
    write(state, tmp_path / "source", tmp_path / "out", flavor="tiny")
    back = dict(read(tmp_path / "out", tmp_path / "source", flavor="tiny"))
    assert back.keys() == state.keys()
    assert [key for key, value in state.items() if not torch.equal(back[key], value)] == []
    if HAS_OVERRIDES or name == "gpt_oss":
        return
    model = debug_model(name, True)
    with torch.no_grad():
        model.init_weights()
        load(model, str(tmp_path / "out"), None, from_hf=False)
        tokens = torch.randint(2048, (2, 16))
        found, expected = model(tokens), source(tokens).logits
    assert (found - expected).norm() < 1e-3 * expected.norm()
