"""fused_moe.checkpoint without transformers: what a configuration says, and layers from and to plain dicts.

tests/test_transformers_checkpoint.py compares every family with transformers' own code.
"""

import json
import weakref
from collections.abc import Mapping

import pytest
import torch
from cases import BF16, F32, assert_same_bits

from fused_moe import FusedMoE
from fused_moe.checkpoint import FAMILIES, REFUSED, blocks, from_hf, load_layer, to_hf

# The fields of config.json as published that say something of the MoE layers, or look like it.
PUBLISHED = {
    "Mixtral-8x7B": {
        "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.02, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "seq_aux": True, "topk_group": 4, "topk_method": "noaux_tc",
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "num_hidden_layers": 92, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5,
        "topk_group": 1, "use_qk_norm": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "hidden_act": "silu",
        "hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_local_experts": 32, "output_router_logits": False, "router_aux_loss_coef": 0.9,
        "swiglu_limit": 7.0,
    },
    "OLMoE-1B-7B": {
        "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 1024, "norm_topk_prob": False, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
    },
}  # fmt: skip
# What FusedMoE gets of them, and which layers have experts.
EXPECTED = {
    "Mixtral-8x7B": (
        {"dim": 4096, "hidden_dim": 14336, "num_experts": 8, "top_k": 2, "route_norm": True}, range(32)
    ),
    "Qwen3-30B-A3B": (
        {"dim": 2048, "hidden_dim": 768, "num_experts": 128, "top_k": 8, "route_norm": True}, range(48)
    ),
    "DeepSeek-V3": (
        {
            "dim": 7168, "hidden_dim": 2048, "num_experts": 256, "top_k": 8, "score_func": "sigmoid",
            "route_norm": True, "route_scale": 2.5, "route_norm_eps": 1e-20, "num_expert_groups": 8,
            "num_limited_groups": 4, "num_shared_experts": 1, "load_balance_coeff": 0.0,
        },
        range(3, 61),
    ),
    "GLM-4.5": (
        {
            "dim": 5120, "hidden_dim": 1536, "num_experts": 160, "top_k": 8, "score_func": "sigmoid",
            "route_norm": True, "route_scale": 2.5, "route_norm_eps": 1e-20, "num_shared_experts": 1,
            "load_balance_coeff": 0.0,
        },
        range(3, 92),
    ),
    "gpt-oss-20b": (
        {
            "dim": 2880, "hidden_dim": 2880, "num_experts": 32, "top_k": 4, "route_norm": True,
            "activation": "swiglu_clamped", "alpha": 1.702, "limit": 7.0, "bias": True, "gate_bias": True,
        },
        range(24),
    ),
    "OLMoE-1B-7B": (
        {"dim": 2048, "hidden_dim": 1024, "num_experts": 64, "top_k": 8, "route_norm": False}, range(16)
    ),
}  # fmt: skip

# A small DeepSeek-V3, whose layer has everything but biases.
SMALL = PUBLISHED["DeepSeek-V3"] | {
    "hidden_size": 16, "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "num_hidden_layers": 5,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 16, "intermediate_size": 8, "num_local_experts": 4,
           "num_hidden_layers": 2}  # fmt: skip
# What shapes do not show of it, and its shared expert.
ROUTING = {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5, "num_expert_groups": 4,
           "num_limited_groups": 2, "num_shared_experts": 1}  # fmt: skip
UP = "model.layers.4.mlp.experts.3.up_proj.weight"
BIAS = "model.layers.4.mlp.gate.e_score_correction_bias"


class Lazy(Mapping):
    """Tensors that are made when they are asked for, and how many of them are alive."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors, self.made, self.most = tensors, [], 0

    def __getitem__(self, key):
        tensor = self.tensors[key].clone()
        self.made.append(weakref.ref(tensor))
        self.most = max(self.most, sum(made() is not None for made in self.made))
        return tensor

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)


def random_layer(config=SMALL, layer=4, **more) -> FusedMoE:
    moe = FusedMoE.from_hf(config, layer, **more)
    if moe.expert_bias is not None:
        moe.expert_bias.normal_()
    return moe


def saved_layer(config=SMALL, layer=4, **more) -> dict[str, torch.Tensor]:
    """By published keys."""
    (block,) = (b for b in blocks(config) if b.layer == layer)
    return dict(to_hf(block, random_layer(config, layer, **more).state_dict()))


# --- configurations ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(cpu, name):
    expected, layers = EXPECTED[name]
    found = blocks(PUBLISHED[name])
    assert [b.layer for b in found] == list(layers)
    defaults = {"score_func": "softmax", "activation": "silu", "route_scale": 1.0}
    for block in found:
        settings = {k: v for k, v in block.settings.items() if v != defaults.get(k)}
        assert settings == expected


def test_a_configuration_is_a_dict_a_path_or_transformers_own(cpu, tmp_path):
    expected = blocks(SMALL)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))

    class Config:
        def to_dict(self):
            return SMALL

    for config in (Config(), tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert blocks(config) == expected
    part = blocks({"model_type": "other_vl", "vision_config": {"num_experts": 7}, "text_config": SMALL})
    assert [b.settings for b in part] == [b.settings for b in expected]
    assert part[0].prefixes == ("model.language_model.layers.3.mlp.", "language_model.model.layers.3.mlp.",
                                "language_model.layers.3.mlp.")  # fmt: skip


def test_qwen3_omnis_thinker_and_talker(cpu):
    """The model's layers are its thinker's; its talker has a configuration of its own."""
    text = {"model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text}
    (first, *_) = blocks({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
    assert first.tensors["experts.w1"][0].name == "thinker.model.layers.0.mlp.experts.*.gate_proj.weight"
    assert first.settings == blocks(text)[0].settings
    text = {"model_type": "qwen3_omni_moe_talker_text", "shared_expert_intermediate_size": 768}
    (first, *_) = blocks({"model_type": "qwen3_omni_moe_talker", "text_config": text})
    assert first.tensors["experts.w2"][0].name == "talker.model.layers.0.mlp.experts.*.down_proj.weight"
    assert first.settings["num_shared_experts"] == 2


def test_a_file_that_is_no_json(cpu, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON in .*config.json, found "):
        blocks(tmp_path)


def test_unknown_families_are_refused(cpu):
    with pytest.raises(TypeError, match="expected a configuration, a dict or a path, found int"):
        blocks(3)
    with pytest.raises(ValueError, match="model_type to be one of .*mixtral.*, found 'llama'"):
        blocks({"model_type": "llama"})
    with pytest.raises(ValueError, match="found None"):
        blocks({})
    for model_type, reason in REFUSED.items():
        for config in (
            {"model_type": model_type},
            {"model_type": "x", "text_config": {"model_type": model_type}},
        ):
            with pytest.raises(ValueError, match=f"{model_type} is no FusedMoE: {reason}"):
                blocks(config)


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"moe_router_temperature": 2.0}, "moe_router_temperature to be absent.*, found 2.0"),
        ({"router_bias_scale": 0.5}, "router_bias_scale to be absent"),
        ({"use_expert_gating": True}, "use_expert_gating to be absent"),
        ({"topk_method": "greedy"}, "topk_method to be 'noaux_tc', found 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func to be 'sigmoid', found 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq to be 1, found 2"),
        ({"hidden_act": "mish"}, "hidden_act to be 'silu' or .*, found 'mish'"),
        ({"num_experts": 4}, "num_experts to be n_routed_experts = 8, found 4"),
        ({"num_local_experts": 4}, "num_local_experts to be n_routed_experts = 8, found 4"),
        ({"swiglu_limit": 5.0}, "swiglu_limit to be 7.0, found 5.0"),
        ({"n_shared_experts": None}, "n_shared_experts to be a number, found None"),
        ({"num_experts_per_tok": [2, 2]}, "num_experts_per_tok to be of 5 layers"),
    ),
)
def test_what_could_matter_is_known_or_refused(cpu, fields, message):
    with pytest.raises(ValueError, match=f"deepseek_v3: expected {message}"):
        blocks(SMALL | fields)


@pytest.mark.parametrize(
    "fields",
    (
        {"moe_router_temperature": None},
        {"use_expert_gating": False},
        {"num_local_experts": 8},
        {"router_aux_loss_coef": 0.1},
        {"rope_scaling": {"type": "yarn"}, "attention_gate": "full", "max_position_embeddings": 7},
        {"quantization_config": {"quant_method": "fp8"}},
    ),
)
def test_what_says_nothing_is_accepted(cpu, fields):
    assert blocks(SMALL | fields) == blocks(SMALL)


# Fields that published config.json files have, and that transformers' code does not read.
UNREAD = (
    ("aria_text", {"moe_aux_loss_coeff": 1e-5, "moe_z_loss_coeff": 1e-5}),
    ("bailing_hybrid", {
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_enable_routed_scaling": True, "moe_router_enable_shared_expert": True,
        "router_dtype": "fp32", "moe_shared_expert_intermediate_size": 768, "group_norm_size": 1,
    }),
    ("dots1", {"scoring_func": "noaux_tc"}),
    ("ernie4_5_moe", {"moe_capacity": [32, 32, 32], "moe_gate": "topk", "moe_use_aux_free": True}),
    ("kimi_k2", {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "seq_aux": True}),
    ("minimax", {"shared_moe_mode": "sigmoid", "shared_intermediate_size": 0, "layernorm_mlp_beta": 1.0}),
    ("minimax_m2", {
        "attn_type_list": [1] * 62, "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1, "num_mtp_modules": 3, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_grouped_topk": True,
        "use_mtp": True, "use_routing_bias": True,
    }),
    ("sarvam_moe", {"score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
)  # fmt: skip


@pytest.mark.parametrize("model_type, fields", UNREAD, ids=[name for name, _ in UNREAD])
def test_published_fields_that_change_nothing(cpu, model_type, fields):
    needed = {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2}
    config = {"model_type": model_type} | (needed if model_type == "dots1" else {})
    assert blocks(config | fields) == blocks(config) != []


@pytest.mark.parametrize(
    "model_type, fields, message",
    (
        ("bailing_hybrid", {"score_function": "softmax"}, "score_function to be 'sigmoid', found 'softmax'"),
        ("bailing_hybrid", {"moe_shared_expert_intermediate_size": 512}, "absent.*, found 512"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"},
         "topk_method to be 'greedy' or 'group_limited_greedy', found 'noaux_tc'"),
        ("ernie4_5_moe", {"moe_layer_end_index": None}, "moe_layer_end_index to be what says .*, found None"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit to be a number, found None"),
        ("inkling2_text", {"scoring_func": "softmax"}, "scoring_func to be 'sigmoid', found 'softmax'"),
        ("minimax_m2", {"shared_intermediate_size": 1536}, "absent.*, found 1536"),
        ("minimax_m2", {"num_expert_group": 8}, "num_expert_group to be None, found 8"),
        ("qwen2_moe", {"shared_expert_intermediate_size": "5632"}, "size to be a number, found '5632'"),
        ("qwen3_moe", {"num_hidden_layers": None}, "num_hidden_layers to be an int, found None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step to be what says .*, found 0"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 768}, "absent.*, found 768"),
    ),
)  # fmt: skip
def test_what_a_family_does_not_compute(cpu, model_type, fields, message):
    with pytest.raises(ValueError, match=f"{model_type}: expected .*{message}"):
        blocks({"model_type": model_type} | fields)


def test_a_width_of_zero(cpu):
    with pytest.raises(ValueError, match="expected hidden_dim >= 1, found 0"):
        blocks({"model_type": "qwen2_moe", "moe_intermediate_size": 0})


def test_a_fixed_norm_cannot_be_denied(cpu):
    assert blocks(MIXTRAL | {"norm_topk_prob": True}) == blocks(MIXTRAL)
    with pytest.raises(ValueError, match="mixtral: expected norm_topk_prob to be True, found False"):
        blocks(MIXTRAL | {"norm_topk_prob": False})
    with pytest.raises(ValueError, match="mixtral: expected router_jitter_noise to be 0.0, found 0.1"):
        blocks(MIXTRAL | {"router_jitter_noise": 0.1})


@pytest.mark.parametrize(
    "config, layers",
    (
        ({"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2}, [1, 3, 5]),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": [0, 2]}, [1, 3]),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 0}, []),
        ({"model_type": "flint", "num_hidden_layers": 4}, [2, 3]),
        ({"model_type": "jamba", "num_hidden_layers": 6}, [1, 3, 5]),
        ({"model_type": "afmoe", "num_hidden_layers": 4, "num_dense_layers": 2}, [2, 3]),
        ({"model_type": "ernie4_5_moe", "num_hidden_layers": 6, "moe_layer_interval": 2,
          "moe_layer_end_index": 4}, [1, 3]),
        ({"model_type": "axk2", "num_hidden_layers": 6, "moe_layer_freq": 2}, [2, 4]),
        ({"model_type": "mimo_v2_flash", "num_hidden_layers": 4, "moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"model_type": "beam", "num_hidden_layers": 5}, [3, 4]),
        ({"model_type": "beam", "num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]}, [0]),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*EE"}, [1, 4, 5]),
        ({"model_type": "nemotron_h", "layers_block_type": ["mlp", "moe"]}, [1]),
    ),
)  # fmt: skip
def test_which_layers_have_experts(cpu, config, layers):
    assert [b.layer for b in blocks(config)] == layers


def test_unknown_kinds_of_layers_are_refused(cpu):
    with pytest.raises(ValueError, match=r"mlp_layer_types\[1\] to be 'sparse' or 'dense', found 'hash_moe'"):
        blocks({"model_type": "beam", "num_hidden_layers": 2, "mlp_layer_types": ["dense", "hash_moe"]})
    with pytest.raises(ValueError, match="mlp_layer_types to be of 3 layers"):
        blocks({"model_type": "beam", "num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse"]})


def test_shared_experts_are_multiples(cpu):
    config = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 2816}
    assert blocks(config)[0].settings["num_shared_experts"] == 2
    with pytest.raises(ValueError, match="a multiple of the experts' width 1408, found 2000"):
        blocks(config | {"shared_expert_intermediate_size": 2000})
    config = {"model_type": "cohere2_moe", "num_shared_experts": 1}
    with pytest.raises(
        ValueError, match="combination_strategy to be 'sum' with shared experts, found 'average'"
    ):
        blocks(config)


# --- FusedMoE.from_hf -------------------------------------------------------------------------------------


def test_from_hf_makes_the_layer(cpu):
    moe = FusedMoE.from_hf(SMALL, dtype=BF16, load_balance_coeff=1e-3, router_dtype=F32)
    assert moe.experts.w1.shape == (8, 8, 16) and moe.experts.w1.dtype == BF16
    assert moe.router.gate.weight.dtype == F32 and moe.load_balance_coeff == 1e-3
    assert moe.router.routing["route_scale"] == 2.5 and moe.shared_experts is not None
    assert FusedMoE.from_hf(SMALL, 4, dim=16, activation="silu").load_balance_coeff == 0.0

    class Mine(FusedMoE):
        pass

    assert type(Mine.from_hf(MIXTRAL, device="meta")) is Mine


@pytest.mark.parametrize(
    "layer, more, error, message",
    (
        (0, {}, ValueError, r"layer= one of the MoE layers \[3, 4\], found 0"),
        (5, {}, ValueError, "found 5"),
        (3, {"dim": 8}, ValueError, "dim=16, as the configuration has it, found 8"),
        (3, {"route_norm": False}, ValueError, "route_norm=True, as the configuration has it, found False"),
        (3, {"gated": False}, ValueError, "gated=True, as the configuration has it, found False"),
        (3, {"load_balance_coeff": None}, ValueError, "load_balance_coeff >= 0.* found None"),
        (3, {"hidden_act": "silu"}, TypeError, "an argument of FusedMoE, found 'hidden_act'"),
    ),
)
def test_from_hf_refuses(cpu, layer, more, error, message):
    with pytest.raises(error, match=f"expected .*{message}"):
        FusedMoE.from_hf(SMALL, layer, **more)


def test_layers_that_differ_need_a_number(cpu):
    config = {"model_type": "hunyuan_v1_moe", "hidden_size": 16, "intermediate_size": 8, "num_experts": 4,
              "num_hidden_layers": 2, "moe_topk": [1, 2]}  # fmt: skip
    assert [FusedMoE.from_hf(config, layer).top_k for layer in (0, 1)] == [1, 2]
    with pytest.raises(
        ValueError, match=r"layer= one of \[0, 1\].* found layer=None: top_k of layers 0 and 1"
    ):
        FusedMoE.from_hf(config)
    with pytest.raises(ValueError, match="expected a MoE layer"):
        FusedMoE.from_hf(SMALL | {"first_k_dense_replace": 5})


# --- layers -----------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_goes_back_bit_equal(cpu, model_type):
    """From every layout that is read, into the first."""
    config = {
        "model_type": model_type, "hidden_size": 32, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "mlp_layer_types": ["sparse"] * 4, "num_hidden_layers": 4,
    }  # fmt: skip
    fields = FAMILIES[model_type].fields
    config |= {name: 16 for name in fields if "shared" in name and name.endswith("size")}
    config |= {name: 2 for name in fields if name in ("n_shared_experts", "num_expert_group", "topk_group")}
    config |= {"n_group": 2} if "n_group" in fields else {}
    if "moe_intermediate_size" not in fields:
        config["intermediate_size"] = config.pop("moe_intermediate_size")
    if "mlp_layer_types" not in fields:
        config.pop("mlp_layer_types")
    block = blocks(config)[-1]
    moe = random_layer(config, block.layer)
    state, saved = moe.state_dict(), None
    for i in range(max(map(len, block.tensors.values()))):
        tensors = {name: (places[i % len(places)],) for name, places in block.tensors.items()}
        stored = dict(to_hf(block._replace(tensors=tensors), state))
        assert_same_bits(dict(from_hf(block, stored)), dict(state))
        saved = saved or stored
        assert_same_bits(dict(to_hf(block, dict(from_hf(block, stored)))), saved)


def test_results_share_no_memory(cpu):
    """Tied tensors of a source are separate afterwards, and so is what is written."""
    tied = saved_layer()
    ups = [name for name in tied if "experts." in name and "up_proj" in name and "shared" not in name]
    tied |= dict.fromkeys(ups, tied[ups[0]])
    read = dict(from_hf(blocks(SMALL)[-1], tied))
    assert torch.equal(read["experts.w3"][0], read["experts.w3"][7])
    written = dict(to_hf(blocks(SMALL)[-1], read))
    places = [t.untyped_storage().data_ptr() for t in (*tied.values(), *read.values(), *written.values())]
    assert len(set(places)) == len(places) - 7
    assert all(t.is_contiguous() for t in (*read.values(), *written.values()))


def test_one_tensor_is_held_at_a_time(cpu):
    for config in (SMALL, GPT_OSS):  # gpt-oss has gate and up in one
        block = blocks(config)[-1]
        source = Lazy(saved_layer(config, block.layer))
        tensors = from_hf(block, source)
        assert len(source.made) == len(source)  # for their shapes
        source.made.clear()
        assert len(list(tensors)) == len(block.tensors)
        assert source.most == 1 and len(source.made) == len(source)  # each is read once


def test_dtypes_on_the_way(cpu):
    saved, block = saved_layer(), blocks(SMALL)[-1]
    read = dict(from_hf(block, saved, dtype=BF16))
    assert {name for name, t in read.items() if t.dtype != BF16} == {"expert_bias"}
    assert torch.equal(read["experts.w1"][5], saved["model.layers.4.mlp.experts.5.gate_proj.weight"].to(BF16))
    read = dict(from_hf(block, saved, dtype=BF16, router_dtype=F32))
    assert {name for name, t in read.items() if t.dtype == F32} == {"expert_bias", "router.gate.weight"}
    saved[BIAS] = saved[BIAS].to(BF16)
    assert dict(from_hf(block, saved))["expert_bias"].dtype == F32


@pytest.mark.parametrize("place", ("cpu", "meta"))
def test_load_layer(cpu, place):
    expected = random_layer()
    saved = dict(to_hf(blocks(SMALL)[-1], expected.state_dict()))
    saved["model.layers.3.mlp.gate.weight"] = torch.zeros(1)  # another layer's
    moe = FusedMoE.from_hf(SMALL, device=place, dtype=BF16, router_dtype=F32)
    load_layer(moe, saved, SMALL, 4)
    for name, tensor in moe.state_dict().items():
        keeps = name in ("router.gate.weight", "expert_bias")
        assert tensor.dtype == (F32 if keeps else BF16)
        assert torch.equal(tensor, expected.state_dict()[name].to(tensor.dtype)), name
    assert isinstance(moe.experts.w1, torch.nn.Parameter) and moe.experts.w1.requires_grad


def test_other_layers_are_refused(cpu):
    with pytest.raises(TypeError, match="expected a FusedMoE, found Linear"):
        load_layer(torch.nn.Linear(16, 8), saved_layer(), SMALL, 4)


def test_a_layer_half_on_the_meta_device(cpu):
    """Nothing is written, rather than half of it."""
    moe = FusedMoE.from_hf(SMALL, device="meta")
    for name, p in moe.shared_experts.named_parameters():
        owner, _, own = name.rpartition(".")
        setattr(moe.shared_experts.get_submodule(owner), own, torch.nn.Parameter(torch.randn(p.shape)))
    before = {name: t.clone() for name, t in moe.shared_experts.state_dict().items()}
    with pytest.raises(ValueError, match="expected .* off the meta device, as after to_empty"):
        load_layer(moe, saved_layer(), SMALL, 4)
    assert_same_bits(dict(moe.shared_experts.state_dict()), before)


def test_frozen_parameters_stay_frozen(cpu):
    for place in ("cpu", "meta"):
        moe = FusedMoE.from_hf(SMALL, device=place).requires_grad_(False)
        moe.router.requires_grad_(True)
        load_layer(moe, saved_layer(), SMALL, 4)
        trained = {name for name, p in moe.named_parameters() if p.requires_grad}
        assert trained == {"router.gate.weight"}


@pytest.mark.parametrize("place", ("cpu", "meta"))
def test_a_bias_of_the_users_own_becomes_zero(cpu, place):
    saved = saved_layer(MIXTRAL, 1)
    moe = FusedMoE.from_hf(MIXTRAL, load_balance_coeff=1e-3, device=place)
    moe.expert_bias.fill_(1.0)
    load_layer(moe, saved, MIXTRAL, 1)
    assert torch.equal(moe.expert_bias, torch.zeros(8))
    assert_same_bits(dict(to_hf(blocks(MIXTRAL)[1], moe.state_dict())), saved)
    moe.expert_bias[0] = 0.1
    with pytest.raises(ValueError, match="has a place for in layer 1, found expert_bias"):
        to_hf(blocks(MIXTRAL)[1], moe.state_dict())


LAYER = "model.layers.4.mlp."
# Changes of a layer's tensors; None takes one away. The message begins with what is expected.
BAD = {
    "missing": ({UP: None}, f"{UP}, for experts.w3 of layer 4, found no such key"),
    "no router": ({f"{LAYER}gate.weight": None}, f"{LAYER}gate.weight, for router.gate.weight of"),
    "no bias": ({BIAS: None}, f"{BIAS}, for expert_bias of layer 4, found no such key"),
    "one expert too many": (
        {UP.replace("s.3", "s.8"): torch.ones(8, 16)},
        "none but the tensors of layer 4, found .*experts.8.up_proj.weight, which has no place",
    ),
    "another key": ({f"{LAYER}norm.weight": torch.ones(16)}, "none but .*norm.weight, which"),
    "twice": ({f"{LAYER}experts.down_proj": torch.ones(8, 16, 8)}, "none but .*experts.down_proj, which"),
    "shape": ({UP: torch.ones(16, 8)}, rf"{UP} of shape \(8, 16\), found \(16, 8\)"),
    "no floats": (
        {UP: torch.ones(8, 16, dtype=torch.int32)},
        f"{UP} of a floating dtype.* found torch.int32",
    ),
    "e4m3": ({UP: torch.ones(8, 16).to(torch.float8_e4m3fn)}, f"{UP} of a floating dtype of 16 bits or more"),
    "two dtypes": ({UP: torch.ones(8, 16, dtype=BF16)}, f"{UP} of the dtype of .*, found torch.bfloat16"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_source_that_does_not_fit(cpu, name):
    """The key is named, and nothing is written."""
    changes, message = BAD[name]
    moe = random_layer()
    saved = {key: tensor for key, tensor in (saved_layer() | changes).items() if tensor is not None}
    before = {n: t.clone() for n, t in moe.state_dict().items()}
    with pytest.raises(ValueError, match=f"expected {message}"):
        from_hf(blocks(SMALL)[-1], saved)
    with pytest.raises(ValueError, match=f"expected {message}"):
        load_layer(moe, saved, SMALL, 4)
    assert_same_bits(dict(moe.state_dict()), before)


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"norm_topk_prob": False}, "a layer with route_norm=True, .* found False"),
        ({"routed_scaling_factor": 1.0}, "a layer with route_scale=2.5, .* found 1.0"),
        ({"num_experts_per_tok": 1}, "a layer with top_k=2, .* found 1"),
        ({"n_group": 1, "topk_group": 1}, "a layer with num_expert_groups=4, .* found None"),
        ({"hidden_act": "gelu"}, "a layer with activation='silu', .* found 'gelu'"),
        ({"hidden_size": 8}, r"a layer whose experts.w1 is \(8, 8, 16\), .* found \(8, 8, 8\)"),
        ({"n_shared_experts": 0}, "a layer whose shared_experts.w1.weight is .* found none"),
    ),
)
def test_a_layer_that_is_not_the_configurations(cpu, fields, message):
    with pytest.raises(ValueError, match=f"expected {message}"):
        load_layer(FusedMoE.from_hf(SMALL | fields), saved_layer(), SMALL, 4)
    with pytest.raises(ValueError, match=r"expected a layer whose expert_bias is \(8,\), .* found none"):
        load_layer(FusedMoE(16, 8, 8, 2, **ROUTING), saved_layer(), SMALL, 4)


@pytest.mark.parametrize(
    "change, message",
    (
        (lambda s: s.pop("experts.w2"), "expected experts.w2 in the state of layer 4, found no such name"),
        (lambda s: s.update(extra=torch.ones(1)), "has a place for in layer 4, found extra"),
        (
            lambda s: s.update({"experts.w2": s["experts.w1"][:2]}),
            r"experts.w2 of shape \(8, 16, 8\), found \(2, 8",
        ),
    ),
)
def test_a_state_that_does_not_fit(cpu, change, message):
    state = dict(random_layer().state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        to_hf(blocks(SMALL)[-1], state)
