"""fused_moe.checkpoint against transformers' own code: every family of the table, and whole models.

A model is made on the meta device, so that only its MoE layer has values. That layer's tensors are taken as
transformers has them in memory, and as it would save them. FusedMoE computes what the layer does, with every
gradient, and its tensors go back bit-equal.
"""

import json
import math
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from cases import F32
from torch import nn

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402
from transformers.models.auto.configuration_auto import (  # noqa: E402
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

from fused_moe import FusedMoE  # noqa: E402
from fused_moe.checkpoint import FAMILIES, REFUSED, blocks, from_hf, load_layer, to_hf  # noqa: E402
from fused_moe.checkpoint.families import ARGUMENTS, SHARED_WIDTHS  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
D, F, LAYERS = 32, 24, 4
SIZES = {
    "dim": D, "hidden_dim": F, "num_experts": 8, "top_k": 2, "num_expert_groups": 4, "num_limited_groups": 2,
    "num_shared_experts": 1, "route_norm": True, "route_scale": 1.5, "alpha": 1.5, "limit": 1.0,
}  # fmt: skip
# Fields that are no sizes, by model_type. Without them some configurations are invalid at these sizes.
MORE = {
    "cohere2_moe": {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"},
    "deepseek_ocr2_text": {"topk_method": "group_limited_greedy"},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "dots3_note_text": {"shared_experts_intermediate_size": 2 * F},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["full_attention"] * LAYERS},
    "lfm2_moe": {"layer_types": ["full_attention"] * LAYERS},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"], "moe_latent_size": 16},
    "qwen4_exp_text": {"layer_types": ["linear_attention"] * LAYERS},
}
# The same with other values of what changes the result.
OTHERS = {
    "cohere2_moe": {"expert_selection_fn": "softmax", "num_shared_experts": 0},
    "deepseek_v2": {"topk_method": "greedy"},
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
    "flint": {"norm_topk_prob": False},
    "granitemoeshared": {"shared_intermediate_size": 0},
    "lfm2_moe": {"use_expert_bias": False, "norm_topk_prob": False},
    "nemotron_h": {"moe_latent_size": None, "mlp_hidden_act": "relu"},
    "qwen2_moe": {"norm_topk_prob": False, "hidden_act": "gelu_pytorch_tanh"},
    "qwen3_moe": {"norm_topk_prob": False, "hidden_act": "gelu"},
}
TYPES = [name for name in FAMILIES if name in CONFIG_MAPPING]
CASES = [(name, {}) for name in TYPES] + list(OTHERS.items())
# Models of several parts, by the model_type of their text. Their own classes say how it is saved.
COMPOSITES = {
    "aria_text": "aria",
    "deepseek_ocr2_text": "deepseek_ocr2",
    "dots3_note_text": "dots3_note",
    "glm4v_moe_text": "glm4v_moe",
    "glm5_next_text": "glm5_next",
    "inkling2_loop_text": "inkling2_loop",
    "inkling2_text": "inkling2",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "mistral4": "mistral3",
    "mistral_large4_text": "mistral_large4",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen4_exp_text": "qwen4_exp",
    "unlimited_ocr_text": "unlimited_ocr",
}
# Fields of the other parts that have to fit to the text's width.
PARTS = {
    "dots3_note": {"vision_config": {"adapter_out_dim": D}, "audio_config": {"adapter_out_dim": D}},
    "inkling2": {"vision_config": {"text_hidden_size": D}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": D}},
}


def fields_of(config_class: type[PreTrainedConfig]) -> set[str]:
    return {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}


def tiny(model_type: str, **more) -> PreTrainedConfig:
    """A small configuration of this type, or of the model that has it for its text."""
    config_class = CONFIG_MAPPING[model_type]
    fields = FAMILIES[model_type].fields
    values = {name: SIZES[ARGUMENTS[name]] for name in fields if ARGUMENTS.get(name) in SIZES}
    values |= {name: 2 * F for name in SHARED_WIDTHS if name in fields}
    values |= {"num_hidden_layers": LAYERS} if "num_hidden_layers" in fields else {}
    values |= {"mlp_layer_types": ["dense", "sparse"] * (LAYERS // 2)} if "mlp_layer_types" in fields else {}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    values |= {name: value for name, value in heads.items() if name in fields_of(config_class)}
    config = config_class(**values | MORE.get(model_type, {}) | more)
    if model_type not in COMPOSITES:
        return config
    name = COMPOSITES[model_type]
    return CONFIG_MAPPING[name](text_config=config.to_dict(), **PARTS.get(name, {}))


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of models that this configuration is for, with a head for generation if there is one."""
    try:
        module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:  # another family's code
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type)
        and issubclass(thing, PreTrainedModel)
        and thing.config_class is type(config)
        and re.search(
            r"(ForCausalLM|ForConditionalGeneration|ForTokenClassification|[^d]Model)$", thing.__name__
        )
    ]
    return min(found, key=lambda c: (c.__name__.endswith("Model"), c.__name__))


class Layer:
    """The last MoE layer of a model, with random values, and its tensors by name."""

    def __init__(self, config: PreTrainedConfig):
        with torch.device("meta"):
            self.model = model = model_class(config)(config)
        model.set_experts_implementation("eager")
        self.config = config
        self.block = blocks(config)[-1]
        places = dict(model.named_modules())
        (path,) = (
            n for n in places if n.endswith(f"layers.{self.block.layer}") and not re.search("vis|audio", n)
        )
        places = (
            f"{path}.{name}" for name in ("mlp", "block_sparse_moe", "feed_forward", "mixer", "shared_mlp")
        )
        self.modules = {}
        for place in places:
            parent, _, name = place.rpartition(".")
            module = getattr(model.get_submodule(parent), name, None)
            if module is not None:
                self.modules[place] = module.to_empty(device="cpu").train().requires_grad_()
        self.fill()

    def fill(self) -> None:
        """Gives all tensors new values."""
        for name, tensor in self.tensors().items():
            fan_in = tensor.size(-1) if tensor.dim() > 1 and "correction" not in name else 4
            nn.init.normal_(tensor, std=fan_in**-0.5)
        is_talker = (
            self.config.model_type == "qwen3_omni_moe_talker_text"
        )  # a part of Qwen3-Omni, saved with it
        if is_talker:
            self.model._weight_conversions = get_checkpoint_conversion_mapping("qwen3_omni_moe")
        saved = revert_weight_conversion(self.model, self.tensors())
        self.saved = {f"talker.model.{name}" if is_talker else name: tensor for name, tensor in saved.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{place}.{name}": tensor
            for place, module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """By the names of the tensors; zeros for those without."""
        grads = {name: torch.zeros_like(tensor) for name, tensor in self.tensors().items()}
        for place, module in self.modules.items():
            for name, p in module.named_parameters():
                if p.grad is not None:
                    grads[f"{place}.{name}"] = p.grad
        return grads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outs = [module(x) for module in self.modules.values()]
        return sum(out[0] if isinstance(out, tuple) else out for out in outs)


@cache
def usual(model_type: str) -> Layer:
    """That of `tiny(model_type)`, for tests that fill it: a model takes long to make, also on meta."""
    return Layer(tiny(model_type))


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    scale = expected.abs().max().clamp_min(1e-3)
    error = ((found - expected).abs().max() / scale).item()
    assert error < 2e-5, f"{name}: {error:.1e} of the largest value"


def assert_same(found: dict, expected: dict) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:8]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model_type, more", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_layer_equals_transformers(cpu, model_type, more):
    layer = Layer(tiny(model_type, **more)) if more else usual(model_type)
    layer.fill()
    config, block, x = layer.config, layer.block, torch.randn(1, 30, D)
    x.requires_grad_()
    expected, dout = layer(x), torch.randn(1, 30, D)
    expected.backward(dout)  # once for each layer
    dx, x.grad = x.grad, None
    for source in (layer.saved, layer.tensors()):
        moe = FusedMoE.from_hf(config, block.layer, dtype=F32)
        load_layer(moe, source, config, block.layer)
        out = moe(x)
        out.backward(dout)
        assert_close(out, expected, "out")
        assert_close(x.grad, dx, "dx")
        grads = dict(from_hf(block, layer.gradients()))
        for name, p in moe.named_parameters():
            assert_close(p.grad, grads[name], name)
        x.grad = None
        assert_same(dict(to_hf(block, moe.state_dict())), layer.saved)


WITH_SUMS = [name for name in TYPES if FAMILIES[name].fixed.get("score_func", "softmax") != "softmax"]


@pytest.mark.parametrize("model_type", WITH_SUMS)
@pytest.mark.parametrize("size", (1e-6, 1e-20))
def test_the_eps_of_a_small_sum(cpu, model_type, size):
    """Every score is about as small as some family's eps."""
    layer = usual(model_type)
    layer.fill()
    config, x, source = layer.config, torch.randn(1, 1, D), layer.tensors()
    logits = math.log(size) + torch.linspace(-0.5, 0.5, SIZES["num_experts"])
    for place in layer.block.tensors["router.gate.weight"]:
        if place.name in source:
            source[place.name].copy_(logits[:, None] * x[0] / x.square().sum())
    for place in layer.block.tensors["expert_bias"] if "expert_bias" in layer.block.tensors else ():
        if place.name in source:
            source[place.name].zero_()
    moe = FusedMoE.from_hf(config, layer.block.layer)
    load_layer(moe, source, config, layer.block.layer)
    assert_close(moe(x), layer(x), "out")


# --- whole models -----------------------------------------------------------------------------------------

CORE = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
ATTENTION = {
    "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
    # DeepSeek's
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
}  # fmt: skip


class First(nn.Module):
    """A FusedMoE in the place of a block that returns its router's scores, too."""

    def __init__(self, moe: FusedMoE):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return self.moe(x), None


@pytest.fixture(scope="module", params=CORE)
def saved_model(request, tmp_path_factory):
    """A small model and its folder, in shards."""
    known = fields_of(CONFIG_MAPPING[request.param])
    config = tiny(request.param, **{name: value for name, value in ATTENTION.items() if name in known})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=F32, experts_implementation="eager").train()
    for name, tensor in model.state_dict().items():
        if re.search(r"gate\.|router|bias|experts", name):
            nn.init.normal_(tensor, std=D**-0.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 4
    return {name: t for file in files for name, t in safetensors.load_file(folder / file).items()}


def test_a_model_equals_transformers(cpu, saved_model):
    """Logits, and the gradients of every parameter that both models have, of FusedMoE layers in its place."""
    model, folder = saved_model
    source, tokens = read(folder), torch.randint(64, (2, 16))
    expected = model(tokens, labels=tokens)
    expected.loss.backward()
    ours = AutoModelForCausalLM.from_config(model.config, dtype=F32)
    ours.load_state_dict(model.state_dict())
    for block in blocks(folder):
        moe = FusedMoE.from_hf(folder, block.layer)
        load_layer(moe, source, folder, block.layer)
        layer = ours.model.layers[block.layer]
        layer.mlp = First(moe) if model.config.model_type == "gpt_oss" else moe
        written = dict(to_hf(block, moe.state_dict()))
        assert_same(written, {name: t for name, t in source.items() if name.startswith(block.prefixes)})
    out = ours(tokens, labels=tokens)
    out.loss.backward()
    assert_close(out.logits, expected.logits, "logits")
    grads = {name: p.grad for name, p in ours.named_parameters()}
    compared = 0
    for name, p in model.named_parameters():
        if name in grads:
            assert_close(grads[name], p.grad, name)
            compared += 1
    assert compared > 10


# --- the table --------------------------------------------------------------------------------------------

# Fields without a default that makes a layer.
NEEDED = {
    "deepseek_ocr2_text": {"num_experts_per_tok": 6, "mlp_layer_types": ["sparse"] * 32},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2},
    "granitemoehybrid": {"shared_intermediate_size": 11008},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_defaults_are_those_of_the_class(cpu, model_type):
    """What config.json omits is as in a configuration of transformers, which has every field."""
    config_class, needed = CONFIG_MAPPING[model_type], NEEDED.get(model_type, {})
    found, expected = blocks({"model_type": model_type, **needed}), blocks(config_class(**needed))
    assert [(b.layer, b.settings) for b in found] == [(b.layer, b.settings) for b in expected]
    for name, default in FAMILIES[model_type].fields.items():
        if hasattr(config_class, name) and not isinstance(getattr(config_class, name), property):
            assert default in (getattr(config_class, name), getattr(config_class(), name)), name


@pytest.mark.parametrize("model_type", TYPES)
def test_other_names_of_fields(cpu, model_type):
    """transformers' own aliases say the same, and must agree."""
    family, config_class = FAMILIES[model_type], CONFIG_MAPPING[model_type]
    config = config_class(**NEEDED.get(model_type, {})).to_dict()
    for alias, name in config_class.attribute_map.items():
        if ARGUMENTS.get(alias) in ("num_experts", "top_k") and name in family.fields:
            value = config[name]
            expected = [b.settings for b in blocks(config)]
            config.pop(name)
            assert [b.settings for b in blocks(config | {alias: value})] == expected, alias
            with pytest.raises(ValueError, match=f"expected {alias} to be"):
                blocks(config | {alias: value, name: value + 1})
            config[name] = value


def families_of_transformers() -> dict[str, set[str]]:
    """The folders with experts that our kernels can run, and the model types of their configurations."""
    with_experts = {
        path.parent.name
        for path in MODELS.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }
    types: dict[str, set[str]] = {name: set() for name in with_experts}
    for model_type in CONFIG_MAPPING_NAMES:
        types.get(model_type_to_module_name(model_type), set()).add(model_type)
    return types


def test_every_family_is_in_the_table_or_refused(cpu):
    types = families_of_transformers()
    assert len(types) > 60
    missing = {name for name, known in types.items() if not known & (FAMILIES.keys() | REFUSED.keys())}
    assert not missing, f"add these to FAMILIES or REFUSED: {sorted(missing)}"
    assert not FAMILIES.keys() & REFUSED.keys()


def test_remote_codes_copies(cpu):
    """Families that transformers has under another name only."""
    assert [name for name in FAMILIES if name not in TYPES] == ["kimi_k2"]
    text = {"model_type": "kimi_k2", "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
    config = {"model_type": "kimi_k25", "text_config": text}
    theirs = CONFIG_MAPPING["kimi_k25"](text_config=dict(text))
    assert theirs.text_config.model_type == "deepseek_v3"
    assert [b.settings for b in blocks(config)] == [b.settings for b in blocks(theirs)]
    assert blocks(config)[0].tensors == blocks(theirs)[0].tensors


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_families_say_why(cpu, model_type):
    with pytest.raises(ValueError, match=f"{model_type} is no FusedMoE: {re.escape(REFUSED[model_type])}"):
        FusedMoE.from_hf(CONFIG_MAPPING[model_type]())


def test_a_wrong_norm_is_found(cpu):
    """These tests would see it, and load_layer refuses the layer."""
    config = tiny("qwen3_moe", norm_topk_prob=True)
    layer = Layer(config)
    wrong = config.to_dict() | {"norm_topk_prob": False}
    moe, x = FusedMoE.from_hf(wrong), torch.randn(1, 30, D)
    moe.load_state_dict(dict(from_hf(layer.block, layer.saved)))
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close(moe(x), layer(x), "out")
    with pytest.raises(ValueError, match="a layer with route_norm=True, .* found False"):
        load_layer(moe, layer.saved, config, layer.block.layer)


def test_transposed_experts_are_read_by_their_shape(cpu):
    """As Qwen has published Qwen3-VL's."""
    layer = Layer(tiny("qwen3_vl_moe_text"))
    published = {name: t.mT.contiguous() if ".experts." in name else t for name, t in layer.saved.items()}
    assert_same(dict(from_hf(layer.block, published)), dict(from_hf(layer.block, layer.saved)))
