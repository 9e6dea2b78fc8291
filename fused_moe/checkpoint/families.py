"""Which FusedMoE a Hugging Face model's layers are: a table by `model_type`, and `blocks`, which reads it.

A row states what the model's own code in transformers fixes, how the tensors are called, and the fields of
config.json that this code reads for its MoE layers, with transformers' defaults where config.json has none. A
field that could matter and that the row does not know is refused.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ..module import FusedMoE
from .block import Block, Source

# --- fields -----------------------------------------------------------------------------------------------

# What a field says of FusedMoE, by the argument's name. Names of one argument stand for each other.
ARGUMENTS = {
    "hidden_size": "dim",
    "moe_intermediate_size": "hidden_dim",
    "intermediate_size": "hidden_dim",  # in rows that have it; elsewhere it is the width of the dense layers
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "num_experts_per_token": "top_k",
    "experts_per_token": "top_k",
    "moe_topk": "top_k",
    "moe_k": "top_k",
    "scoring_func": "score_func",
    "score_func": "score_func",
    "score_function": "score_func",
    "norm_topk_prob": "route_norm",
    "moe_renormalize": "route_norm",
    "route_norm": "route_norm",
    "routed_scaling_factor": "route_scale",
    "moe_routed_scaling_factor": "route_scale",
    "router_scaling_factor": "route_scale",
    "route_scale": "route_scale",
    "n_group": "num_expert_groups",
    "num_expert_group": "num_expert_groups",
    "num_expert_groups": "num_expert_groups",
    "topk_group": "num_limited_groups",
    "num_limited_groups": "num_limited_groups",
    "n_shared_experts": "num_shared_experts",
    "num_shared_experts": "num_shared_experts",
    "num_shared_expert": "num_shared_experts",
    "moe_num_shared_experts": "num_shared_experts",
    "moe_latent_size": "latent_dim",
    "hidden_act": "activation",
    "mlp_hidden_act": "activation",
    "swiglu_alpha": "alpha",
    "mlp_gate_softcap": "alpha",
    "swiglu_limit": "limit",
    "mlp_up_softcap": "limit",
}
# Widths of the shared experts, which FusedMoE has as multiples of hidden_dim.
SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)

# Arguments for which null says nothing.
NUMBERS = ("dim", "hidden_dim", "num_experts", "top_k", "num_shared_experts", "alpha", "limit")

# hidden_act -> activation
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# Whether a layer has experts, by the field that says so. mlp_layer_types, if there is one, says it alone.
LAYERS: dict[str, Callable[[int, dict], bool]] = {
    "first_k_dense_replace": lambda i, f: i >= (f["first_k_dense_replace"] or 0),
    "num_dense_layers": lambda i, f: i >= (f["num_dense_layers"] or 0),
    "moe_layer_freq": lambda i, f: bool(at(f["moe_layer_freq"], i)) and i % at(f["moe_layer_freq"], i) == 0,
    "decoder_sparse_step": lambda i, f: (i + 1) % f["decoder_sparse_step"] == 0,
    "mlp_only_layers": lambda i, f: i not in (f["mlp_only_layers"] or ()),
    "moe_layer_interval": lambda i, f: (i + 1) % f["moe_layer_interval"] == 0,
    "moe_layer_start_index": lambda i, f: i >= f["moe_layer_start_index"],
    "moe_layer_end_index": lambda i, f: f["moe_layer_end_index"] == -1 or i <= f["moe_layer_end_index"],
    "expert_layer_period": lambda i, f: i % f["expert_layer_period"] == f["expert_layer_offset"],
    "layers_block_type": lambda i, f: block_types(f)[i] in ("moe", "E"),
}

# Names of fields that could say something of a MoE layer ...
COULD_MATTER = re.compile(
    r"moe|expert|rout|top_?k|scor|group|shared|sparse|dense|mlp|ffn|feed|jitter|swiglu|softcap|latent|"
    r"(^|_)(gate|gated|gating|act|activation|limit|alpha|bias|scale|freq|multiplier)(_|$)"
)
# ... and of those that say nothing: the trainer's, those of other parts of the model, how it is split over
# devices or rounds, and transformers 4's settings of generate().
SAYS_NOTHING = re.compile(
    r"(router|aux|mtp|moe_aux|moe_z|z)_loss_\w+|router_(aux|z)_loss_coef|aux_loss_alpha|seq_aux|"
    r"output_router_logits|\w*(attention|attn)\w*|(audio|conv|group_norm|index|indexer|kda|layernorm)_\w+|"
    r"(linear|mamba|mtp|qk|qkv|rope|time_step|vision|o)_\w+|"
    r"(full_attn|linear_attn|mlp)_(alpha|beta)_factor|(embedding|residual)_multiplier|(final_)?logit_\w+|"
    r"(layer_group|prefix_dense|log_scaling|lm_head|loop_gate|gated_norm|output_gate|embedding|use_conv)_\w+|"
    r"dense_intermediate_size|ep_size|moe_capacity|n_groups|use_grouped_mm|enable_moe_fp32_combine|"
    r"moe_shared_expert_overlap|chunk_size_feed_forward|experts_implementation|top_k|fused_moe"
)


def at(value: Any, layer: int) -> Any:
    """A value of every layer, or of this one."""
    return value[layer] if isinstance(value, list | tuple) else value


def block_types(fields: Mapping[str, Any]) -> Any:
    """Nemotron's kinds of layers, under one of three names."""
    return fields["layers_block_type"] or fields["layer_types"] or fields["hybrid_override_pattern"]


class Family(NamedTuple):
    """The MoE layers of the models of one model_type."""

    fields: dict[str, Any]  # what is read of config.json, with transformers' defaults
    fixed: dict[str, Any]  # FusedMoE's arguments that the model's code fixes
    # Names below "model.layers.N.": as transformers 5.24 saves them, then as it has them in memory.
    layouts: tuple[dict[str, Source], ...]
    means: dict[str, tuple]  # fields that are not read, and the values that mean what is computed
    more: Callable[[dict], dict]  # what else the fields say
    dense: int  # how many layers at the beginning have no experts


def family(
    fixed: dict, layouts: tuple, *, means: Mapping | None = None, more=lambda f: {}, dense: int = 0, **fields
) -> Family:
    """A row, with its fields as keywords."""
    return Family(fields, fixed, layouts, dict(means or {}), more, dense)


# --- names ------------------------------------------------------------------------------------------------


def listed(gate: str = "gate_proj", down: str = "down_proj", up: str = "up_proj") -> dict[str, str]:
    """Experts one by one."""
    return {f"experts.w{i}": f"experts.*.{name}.weight" for i, name in enumerate((gate, down, up), 1)}


def stacked(
    first: str, second: str, *, transposed: bool = False, gate_up: str = "gate_up_proj", down="down_proj"
):
    """Experts in one tensor, gate and up together, with their biases."""
    return {
        "experts.w1": Source(f"experts.{gate_up}", transposed, first),
        "experts.w2": Source(f"experts.{down}", transposed),
        "experts.w3": Source(f"experts.{gate_up}", transposed, second),
        "experts.b1": Source(f"experts.{gate_up}_bias", rows=first),
        "experts.b2": Source(f"experts.{down}_bias"),
        "experts.b3": Source(f"experts.{gate_up}_bias", rows=second),
    }


def mlp(name: str, gate: str = "gate_proj", down: str = "down_proj", up: str = "up_proj") -> dict[str, str]:
    """Shared experts, as one MLP of that name."""
    return {f"shared_experts.w{i}.weight": f"{name}.{x}.weight" for i, x in enumerate((gate, down, up), 1)}


def fused_mlp(name: str, gate_up: str, down: str) -> dict[str, Source]:
    """Shared experts, gate and up together."""
    return {
        "shared_experts.w1.weight": Source(f"{name}.{gate_up}.weight", rows="upper"),
        "shared_experts.w2.weight": Source(f"{name}.{down}.weight"),
        "shared_experts.w3.weight": Source(f"{name}.{gate_up}.weight", rows="lower"),
    }


def layout(
    place: str,
    experts: Mapping[str, Source | str],
    *,
    router: str = "gate",
    bias: Source | str = "gate.e_score_correction_bias",
    shared: str | Mapping[str, Source | str] = "shared_experts",
) -> dict[str, Source]:
    """Every name that FusedMoE may have, with its place below `place`."""
    sources = {
        "router.gate.weight": f"{router}.weight",
        "router.gate.bias": f"{router}.bias",
        "expert_bias": bias,
        "shared_expert_gate.weight": "shared_expert_gate.weight",
        "latent_down.weight": "fc1_latent_proj.weight",
        "latent_up.weight": "fc2_latent_proj.weight",
        **(mlp(shared) if isinstance(shared, str) else shared),
        **experts,
    }
    named = {name: s if isinstance(s, Source) else Source(s) for name, s in sources.items()}
    return {name: s._replace(name=f"{place}{s.name}") for name, s in named.items()}


def both(place: str, experts: Mapping[str, Source | str], **names) -> tuple[dict, dict]:
    """As published, and as transformers 5 has it in memory: gate above up."""
    return layout(place, experts, **names), layout(place, HALVES, **names)


HALVES = stacked("upper", "lower")
MIXTRAL_EXPERTS = listed("w1", "w2", "w3")

QWEN2 = both("mlp.", listed(), shared="shared_expert")
DEEPSEEK = both("mlp.", listed())
DEEPSEEK_STACKED = (DEEPSEEK[1],)
MIXTRAL = (
    layout("block_sparse_moe.", MIXTRAL_EXPERTS, bias="e_score_correction_bias"),
    layout("mlp.", HALVES, bias="e_score_correction_bias"),
)
GRANITE = tuple(
    layout(
        "",
        {name: s._replace(name=f"block_sparse_moe.{s.name}") for name, s in experts.items()},
        router=f"block_sparse_moe.{router}",
        shared=fused_mlp("shared_mlp", "input_linear", "output_linear"),
    )
    for router, experts in (
        ("router.layer", {
            "experts.w1": Source("input_linear.weight", rows="upper"),
            "experts.w2": Source("output_linear.weight"),
            "experts.w3": Source("input_linear.weight", rows="lower"),
        }),
        ("router", HALVES),
    )
)  # fmt: skip
INKLING2 = (
    layout("mlp.", stacked("even", "odd", gate_up="w13_weight", down="w2_weight"), bias="gate.bias"),
    DEEPSEEK[1],
)
LING = (layout("mlp.", listed(), bias="gate.expert_bias"), DEEPSEEK[1])
# Qwen has published the experts transposed; transformers saves them as they are in memory, and reads both.
QWEN3_VL = (DEEPSEEK[1], layout("mlp.", stacked("upper", "lower", transposed=True)))

# Where the layers are in files, by the model_type of the model or of its text, before PLACES.
ROOTS = {
    "aria": ("language_model.model.layers",),
    "deepseek_ocr2": ("model.layers",),
    "dots3_note": ("model.layers",),
    "inkling2": ("model.llm.layers",),
    "inkling2_loop": ("model.llm.layers",),
    "inkling2_loop_text": ("model.llm.layers",),
    "inkling2_text": ("model.llm.layers",),
    "kimi_k25": ("language_model.model.layers",),
    "minimax_m3_vl": ("language_model.model.layers",),
    "mistral3": ("language_model.model.layers",),
    "mistral_large4": ("layers",),
    "nemotron_h": ("backbone.layers",),
    "qwen3_5_moe_text": ("model.language_model.layers",),
    "qwen3_omni_moe": ("thinker.model.layers",),
    "qwen3_omni_moe_talker": ("talker.model.layers", "model.layers"),
    "qwen3_omni_moe_talker_text": ("talker.model.layers",),
    "qwen3_omni_moe_thinker": ("model.layers", "thinker.model.layers"),
    "qwen4_exp_text": ("model.language_model.layers",),
    "unlimited_ocr": ("model.layers",),
}
# Where they are elsewhere: of a model of text, and of the text in a model of several parts.
PLACES = ("model.layers", "layers")
PLACES_OF_PART = ("model.language_model.layers", "language_model.model.layers", "language_model.layers")

# --- the table --------------------------------------------------------------------------------------------

# Code without an eps. In a sum of a softmax's largest values FusedMoE's 1e-20 changes nothing.
SOFTMAX = {"score_func": "softmax"}
SOFTMAX_NORM = SOFTMAX | {"route_norm": True}
# A bias for the choice, which load_balance_coeff=0.0 holds still.
SIGMOID = {"score_func": "sigmoid", "route_norm_eps": 1e-20, "load_balance_coeff": 0.0}
# Sums of sigmoids can be as small as 1e-20.
NO_EPS = {"route_norm": True, "route_norm_eps": 0.0}
FIXED_SILU = {"activation": "silu"}

V3_MEANS = {"topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
LING_MEANS = V3_MEANS | {
    "moe_router_enable_expert_bias": (True,),
    "moe_router_enable_routed_scaling": (True,),
    "moe_router_enable_shared_expert": (True,),
    "router_dtype": ("fp32",),
}
MINIMAX_MEANS = {"router_jitter_noise": (0.0,), "shared_moe_mode": ("sigmoid",)}
NO_JITTER = {"router_jitter_noise": (0.0,)}


def v2_groups(fields: dict) -> dict:
    """DeepSeek-V2's, which count if topk_method says so."""
    known = ("greedy", "group_limited_greedy")
    if fields["topk_method"] not in known:
        _fail("deepseek_v2", "topk_method", " or ".join(map(repr, known)), fields["topk_method"])
    if fields["topk_method"] == "greedy":
        return {"num_expert_groups": None, "num_limited_groups": None}
    return {"group_score": "max"}


def cohere2(fields: dict) -> dict:
    score_func = fields["expert_selection_fn"]  # the softmax is that of the chosen logits alone
    if fields["num_shared_experts"] and fields["shared_expert_combination_strategy"] != "sum":
        name = "shared_expert_combination_strategy"
        _fail("cohere2_moe", name, "'sum' with shared experts", fields[name])
    return {"score_func": score_func, "route_norm": score_func == "softmax" or fields["norm_topk_prob"]}


#: {model_type: how its MoE layers are read}: the models that `blocks` and `FusedMoE.from_hf` know.
FAMILIES: dict[str, Family] = {
    "afmoe": family(
        SIGMOID | {"route_norm": True},
        both("mlp.", listed(), router="router.gate", bias="expert_bias"),
        hidden_size=2048, moe_intermediate_size=1408, num_experts=64, num_experts_per_tok=6, route_scale=1.0,
        num_shared_experts=2, hidden_act="silu", num_hidden_layers=32, num_dense_layers=1,
    ),
    "aria_text": family(
        SOFTMAX_NORM | FIXED_SILU,
        tuple(
            layout("mlp.", stacked("upper", "lower", transposed=True, **names), router="router")
            for names in ({"gate_up": "fc1.weight", "down": "fc2.weight"}, {})
        ),
        hidden_size=4096, intermediate_size=4096, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=2,
        num_hidden_layers=32,
        means={"hidden_act": ("silu",)},  # which only the shared experts read
    ),
    "axk2": family(  # its code fills masked groups with zeros, so a negative bias would choose them
        SIGMOID,
        DEEPSEEK,
        hidden_size=2048, moe_intermediate_size=512, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1, hidden_act="silu",
        num_hidden_layers=48, mlp_layer_types=None, first_k_dense_replace=1, moe_layer_freq=1,
        means={"topk_method": ("noaux_tc",)},
    ),
    "bailing_hybrid": family(
        SIGMOID,
        LING,
        hidden_size=2560, moe_intermediate_size=768, num_experts=512, num_experts_per_token=8,
        moe_renormalize=True, routed_scaling_factor=2.5, num_expert_group=8, topk_group=4,
        num_shared_experts=1, hidden_act="silu", num_hidden_layers=42, mlp_layer_types=None,
        first_k_dense_replace=2,
        means=LING_MEANS,
    ),
    "beam": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=5120, moe_intermediate_size=2560, num_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8, topk_group=4, hidden_act="silu",
        num_hidden_layers=52, mlp_layer_types=None,
        means=V3_MEANS, dense=3,
    ),
    "cohere2_moe": family(
        {"route_norm_eps": 0.0},
        DEEPSEEK,
        hidden_size=8192, intermediate_size=22528, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
        expert_selection_fn="softmax", num_shared_experts=0, hidden_act="silu", num_hidden_layers=40,
        mlp_layer_types=None, first_k_dense_replace=0, shared_expert_combination_strategy="average",
        more=cohere2,
    ),
    "deepseek_ocr2_text": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=1407, n_routed_experts=64, num_experts_per_tok=None,
        routed_scaling_factor=1.0, n_group=None, topk_group=None, topk_method="greedy", n_shared_experts=2,
        hidden_act="silu", num_hidden_layers=32, mlp_layer_types=None, first_k_dense_replace=0,
        means={"moe_layer_freq": (1,)}, more=v2_groups,
    ),
    "deepseek_v2": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=1407, n_routed_experts=64, num_experts_per_tok=None,
        routed_scaling_factor=1.0, n_group=None, topk_group=None, topk_method="greedy", n_shared_experts=2,
        hidden_act="silu", num_hidden_layers=32, first_k_dense_replace=0,
        means={"moe_layer_freq": (1,)}, more=v2_groups,
    ),
    "deepseek_v3": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8, topk_group=4, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=61, first_k_dense_replace=3,
        means=V3_MEANS,
    ),
    "deepseek_v32": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8, topk_group=4, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=61, mlp_layer_types=None, first_k_dense_replace=3,
        means=V3_MEANS,
    ),
    "dots1": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4608, moe_intermediate_size=1408, n_routed_experts=None, num_experts_per_tok=None,
        norm_topk_prob=False, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=None,
        hidden_act="silu", num_hidden_layers=62, first_k_dense_replace=0,
        means=V3_MEANS | {"scoring_func": ("sigmoid", "noaux_tc")},  # which is topk_method's name
    ),
    "dots3_note_text": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=5120, moe_intermediate_size=1536, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        shared_experts_intermediate_size=1536, hidden_act="silu", num_hidden_layers=46, mlp_layer_types=None,
        first_k_dense_replace=1, moe_layer_freq=1,
        means={"topk_method": ("noaux_tc",)},
    ),
    "ernie4_5_moe": family(  # its code divides by the sum, or by moe_norm_min where the sum is smaller
        SOFTMAX | NO_EPS | {"load_balance_coeff": 0.0},
        tuple(
            layout("mlp.", experts, bias=Source(f"{statics}.e_score_correction_bias", rows="first"))
            for statics, experts in (("moe_statics", listed()), ("gate.moe_statics", HALVES))
        ),
        hidden_size=2560, moe_intermediate_size=1536, moe_num_experts=64, moe_k=6, moe_num_shared_experts=2,
        hidden_act="silu", num_hidden_layers=28, moe_layer_interval=1, moe_layer_start_index=1,
        moe_layer_end_index=-1,
        means={"moe_norm_min": (1e-12,), "moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    ),
    "exaone_moe": family(
        SIGMOID,
        (layout("mlp.", listed(), bias="e_score_correction_bias"), DEEPSEEK[1]),
        hidden_size=4096, moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1, num_shared_experts=1,
        hidden_act="silu", num_hidden_layers=32, mlp_layer_types=None, first_k_dense_replace=1,
        means=V3_MEANS,
    ),
    "flex_olmo": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=4096, intermediate_size=11008, num_experts=7, num_experts_per_tok=5, norm_topk_prob=False,
        hidden_act="silu", num_hidden_layers=32,
    ),
    "flint": family(
        {"score_func": "sigmoid", "route_norm_eps": 0.0},
        QWEN2,
        hidden_size=2048, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=6,
        norm_topk_prob=True, shared_expert_intermediate_size=1024, hidden_act="silu", num_hidden_layers=49,
        decoder_sparse_step=1, mlp_only_layers=[0, 1],
    ),
    "glm4_moe": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=46, first_k_dense_replace=1,
        means=V3_MEANS,
    ),
    "glm4_moe_lite": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=2048, moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4,
        norm_topk_prob=True, routed_scaling_factor=1.8, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=47, mlp_layer_types=None,
        means=V3_MEANS | {"first_k_dense_replace": (1,)}, dense=1,
    ),
    "glm4v_moe_text": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=46, first_k_dense_replace=1,
        means=V3_MEANS,
    ),
    "glm5_next_text": family(
        SIGMOID | {"activation": "swiglu_limited"},
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=288, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1, n_shared_experts=1,
        swiglu_limit=10.0, num_hidden_layers=45, mlp_layer_types=None,
        means=V3_MEANS | {"first_k_dense_replace": (3,), "hidden_act": ("silu",)}, dense=3,
    ),
    "glm_moe_dsa": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=6144, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=78, mlp_layer_types=None, first_k_dense_replace=3,
        means=V3_MEANS,
    ),
    "gpt_oss": family(
        SOFTMAX_NORM | {"activation": "swiglu_clamped", "bias": True, "gate_bias": True},
        (layout("mlp.", stacked("even", "odd", transposed=True), router="router"),),
        hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4,
        swiglu_alpha=1.702, swiglu_limit=7.0, num_hidden_layers=36,
        means={"hidden_act": ("silu",)},
    ),
    **{
        name: family(
            SOFTMAX_NORM,
            layouts,
            hidden_size=4096, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2,
            hidden_act="silu", num_hidden_layers=32, **cast("dict[str, Any]", shared),
        )
        for name, layouts, shared in (
            ("granitemoe", GRANITE, {}),
            ("granitemoe_swa", GRANITE[1:], {"shared_intermediate_size": 0}),
            ("granitemoehybrid", GRANITE, {"shared_intermediate_size": 1024}),
            ("granitemoeshared", GRANITE, {"shared_intermediate_size": 0}),
        )
    },
    "hunyuan_v1_moe": family(
        SOFTMAX_NORM | {"num_shared_experts": 1},
        both("mlp.", listed(), router="gate.wg", shared="shared_mlp"),
        hidden_size=4096, intermediate_size=11008, num_experts=1, moe_topk=1, hidden_act="silu",
        num_hidden_layers=32,
        means={"use_mixed_mlp_moe": (True,), "moe_layer_num_skipped": (0,)},
    ),
    "hy_v3": family(
        SIGMOID | {"route_norm": True},
        (
            layout("mlp.", listed(), router="router.gate", bias="expert_bias", shared="shared_mlp"),
            layout("mlp.", HALVES, bias="e_score_correction_bias"),
        ),
        hidden_size=4096, moe_intermediate_size=1536, num_experts=192, num_experts_per_tok=8,
        router_scaling_factor=2.826, num_shared_experts=1, hidden_act="silu", num_hidden_layers=80,
        mlp_layer_types=None,
        means={"first_k_dense_replace": (1,), "moe_router_use_sigmoid": (True,),
               "moe_router_enable_expert_bias": (True,)},
        dense=1,
    ),
    **{
        name: family(
            SIGMOID | {"route_norm": True, "activation": "situ"},
            INKLING2,
            hidden_size=width, moe_intermediate_size=width // 2, n_routed_experts=experts,
            num_experts_per_tok=8, route_scale=8.0, mlp_gate_softcap=4.0, mlp_up_softcap=25.0,
            num_hidden_layers=layers,
            means={"hidden_act": ("silu",)},
        )
        for name, width, experts, layers in (
            ("inkling2_text", 4608, 384, 48), ("inkling2_loop_text", 2304, 128, 24),
        )
    },
    "jamba": family(
        SOFTMAX,
        both("feed_forward.", listed(), router="router"),
        hidden_size=4096, intermediate_size=14336, num_experts=16, num_experts_per_tok=2, hidden_act="silu",
        num_hidden_layers=32, expert_layer_period=2, expert_layer_offset=1,
    ),
    "kimi_linear": family(
        SIGMOID,
        (layout("block_sparse_moe.", MIXTRAL_EXPERTS), DEEPSEEK[1]),
        hidden_size=2304, moe_intermediate_size=1024, num_experts=256, num_experts_per_token=8,
        moe_renormalize=True, routed_scaling_factor=2.446, num_expert_group=1, topk_group=1,
        num_shared_experts=1, hidden_act="silu", num_hidden_layers=27, mlp_layer_types=None,
        first_k_dense_replace=1,
        means=V3_MEANS | {"moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,)},
    ),
    "laguna": family(
        SIGMOID | NO_EPS,
        (
            layout("mlp.", listed(), bias="experts.e_score_correction_bias", shared="shared_expert"),
            DEEPSEEK[1],
        ),
        hidden_size=2048, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
        moe_routed_scaling_factor=1.0, shared_expert_intermediate_size=512, hidden_act="silu",
        num_hidden_layers=40, mlp_layer_types=None,
        means={"gating": (True, "per-head", "per-element")}, dense=1,
    ),
    "lara_mini": family(
        SOFTMAX,
        QWEN2[1:],
        hidden_size=1024, moe_intermediate_size=512, num_experts=128, num_experts_per_tok=4,
        norm_topk_prob=True, shared_expert_intermediate_size=512, hidden_act="silu", num_hidden_layers=34,
    ),
    "lfm2_moe": family(
        {"score_func": "sigmoid", "route_norm_eps": 1e-6} | FIXED_SILU,
        both("feed_forward.", MIXTRAL_EXPERTS, bias="expert_bias"),
        hidden_size=2048, moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, routed_scaling_factor=1.0, use_expert_bias=True, num_hidden_layers=32,
        num_dense_layers=2,
        more=lambda f: {"load_balance_coeff": 0.0 if f["use_expert_bias"] else None},
    ),
    "mellum": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=2304, moe_intermediate_size=896, num_local_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, hidden_act="silu", num_hidden_layers=28, mlp_layer_types=None,
    ),
    "mimo_v2_flash": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, hidden_act="silu",
        num_hidden_layers=48, mlp_layer_types=None, moe_layer_freq=1,
        means={"topk_method": ("noaux_tc",)}, dense=1,
    ),
    "minimax": family(
        SOFTMAX_NORM,
        MIXTRAL,
        hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
        hidden_act="silu", num_hidden_layers=32,
        means=MINIMAX_MEANS,
    ),
    "minimax_m2": family(
        SIGMOID | NO_EPS,
        MIXTRAL,
        hidden_size=3072, intermediate_size=1536, num_local_experts=256, num_experts_per_tok=8,
        hidden_act="silu", num_hidden_layers=62,
        means=MINIMAX_MEANS | {"use_routing_bias": (True,), "mlp_intermediate_size": (8192,),
                               "use_grouped_topk": (True,)},  # of one group
    ),
    "minimax_m3_vl_text": family(
        SIGMOID | NO_EPS | {"activation": "swiglu_clamped"},
        (
            layout("block_sparse_moe.", MIXTRAL_EXPERTS, bias="e_score_correction_bias"),
            layout("mlp.", HALVES, shared=fused_mlp("shared_experts", "gate_up_proj", "down_proj")),
        ),
        hidden_size=6144, intermediate_size=3072, num_local_experts=128, num_experts_per_tok=4,
        routed_scaling_factor=2.0, shared_intermediate_size=3072, swiglu_alpha=1.702, swiglu_limit=7.0,
        num_hidden_layers=60, mlp_layer_types=None, moe_layer_freq=1,
        means=NO_JITTER | {"hidden_act": ("silu", "swigluoai"), "use_routing_bias": (True,)},
    ),
    "mistral4": family(
        SOFTMAX | {"route_norm_eps": 1e-20},
        DEEPSEEK_STACKED,
        hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=128, num_experts_per_tok=4,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=36, first_k_dense_replace=0,
    ),
    "mistral_large4_text": family(
        SOFTMAX_NORM | {"route_norm_eps": 1e-20},
        (
            layout("", MIXTRAL_EXPERTS, shared=mlp("shared_experts", "w1", "w2", "w3")),
            DEEPSEEK[1],
        ),
        hidden_size=6144, moe_intermediate_size=6144, n_routed_experts=128, num_experts_per_tok=4,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1, hidden_act="silu",
        num_hidden_layers=72, mlp_layer_types=None, first_k_dense_replace=1,
    ),
    "mixtral": family(
        SOFTMAX_NORM,
        MIXTRAL,
        hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
        hidden_act="silu", num_hidden_layers=32,
        means=NO_JITTER,
    ),
    "nemotron_h": family(
        SIGMOID | {"gated": False},
        tuple(
            layout("mixer.", {"experts.w1": up, "experts.w2": down},
                   shared=mlp("shared_experts", "up_proj", "down_proj"))
            for up, down in (
                ("experts.*.up_proj.weight", "experts.*.down_proj.weight"),
                ("experts.up_proj", "experts.down_proj"),
            )
        ),
        hidden_size=4096, moe_intermediate_size=7688, n_routed_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, mlp_hidden_act="relu2",
        moe_shared_expert_intermediate_size=7688, moe_latent_size=None, layers_block_type=None,
        layer_types=None, hybrid_override_pattern="ME*-",
        means=V3_MEANS | {"n_shared_experts": (1,)},
    ),
    "olmoe": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=2048, intermediate_size=2048, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        hidden_act="silu", num_hidden_layers=16,
    ),
    "openai_privacy_filter": family(
        SOFTMAX_NORM | {"activation": "swiglu_clamped", "bias": True, "gate_bias": True},
        (layout("mlp.", stacked("upper", "lower", transposed=True), router="router"),),
        hidden_size=640, intermediate_size=640, num_local_experts=128, num_experts_per_tok=4,
        swiglu_alpha=1.702, swiglu_limit=7.0, num_hidden_layers=8,
        means={"hidden_act": ("silu",)},
    ),
    "qwen2_moe": family(
        SOFTMAX | {"shared_expert_gate": True},
        QWEN2,
        hidden_size=2048, moe_intermediate_size=1408, num_experts=60, num_experts_per_tok=4,
        norm_topk_prob=False, shared_expert_intermediate_size=5632, hidden_act="silu", num_hidden_layers=24,
        decoder_sparse_step=1, mlp_only_layers=None,
    ),
    "qwen3_5_moe_text": family(
        SOFTMAX_NORM | {"shared_expert_gate": True},
        QWEN2,
        hidden_size=2048, moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
        shared_expert_intermediate_size=512, hidden_act="silu", num_hidden_layers=40,
    ),
    "qwen3_moe": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=False, hidden_act="silu", num_hidden_layers=24, decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "qwen3_next": family(
        SOFTMAX | {"shared_expert_gate": True},
        QWEN2,
        hidden_size=2048, moe_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
        norm_topk_prob=True, shared_expert_intermediate_size=512, hidden_act="silu", num_hidden_layers=48,
        decoder_sparse_step=1, mlp_only_layers=None,
    ),
    "qwen3_omni_moe_talker_text": family(
        SOFTMAX | {"shared_expert_gate": True},
        QWEN2,
        hidden_size=1024, moe_intermediate_size=384, num_local_experts=128, num_experts_per_tok=8,
        norm_topk_prob=False, shared_expert_intermediate_size=None, hidden_act="silu", num_hidden_layers=20,
        means={"decoder_sparse_step": (1,), "mlp_only_layers": ()},
    ),
    "qwen3_omni_moe_text": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, hidden_act="silu", num_hidden_layers=28, decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "qwen3_vl_moe_text": family(
        SOFTMAX_NORM,
        QWEN3_VL,
        hidden_size=2048, moe_intermediate_size=1408, num_local_experts=60, num_experts_per_tok=4,
        hidden_act="silu", num_hidden_layers=24, decoder_sparse_step=1, mlp_only_layers=None,
    ),
    "qwen4_exp_text": family(
        SOFTMAX | {"shared_expert_gate": True},
        QWEN2,
        hidden_size=2048, moe_intermediate_size=512, num_experts=512, num_experts_per_tok=10,
        norm_topk_prob=True, shared_expert_intermediate_size=512, hidden_act="silu", num_hidden_layers=40,
    ),
    "sarvam_mla": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=2048, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=32, first_k_dense_replace=1,
        means=LING_MEANS,
    ),
    "sarvam_moe": family(
        SIGMOID,
        LING,
        hidden_size=4096, moe_intermediate_size=1024, n_routed_experts=128, num_experts_per_tok=6,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=19, first_k_dense_replace=1,
        means=LING_MEANS,
    ),
    "solar_open": family(
        SIGMOID,
        DEEPSEEK,
        hidden_size=4096, moe_intermediate_size=1280, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=48,
        means=V3_MEANS,
    ),
    "unlimited_ocr_text": family(
        SOFTMAX,
        DEEPSEEK,
        hidden_size=1280, moe_intermediate_size=896, n_routed_experts=64, num_experts_per_tok=6,
        routed_scaling_factor=1.0, n_group=1, topk_group=1, topk_method="greedy", n_shared_experts=2,
        hidden_act="silu", num_hidden_layers=12, mlp_layer_types=None, first_k_dense_replace=1,
        means={"moe_layer_freq": (1,)}, more=v2_groups,
    ),
}  # fmt: skip
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]  # its own code is a copy

#: {model_type: why not}: families whose layers are no FusedMoE, or not stored as any row has them.
REFUSED = {
    "axk1": "the layer's output has a norm",
    "dbrx": "the experts' weights are rows of one matrix, and any norm may divide the scores",
    "deepseek_v4": "its first layers choose experts by a table from token to expert",
    "diffusion_gemma_text": "router and experts get two different norms of the input",
    "doge": "the experts are single rows, which a router of two halves chooses",
    "ernie4_5_vl_moe_text": "text and pictures have different experts in one layer",
    "gemma4_text": "router and experts get two different norms of the input",
    "hy_v4": "the shared experts have no limit in their activation, which the routed experts have",
    "hy_v4_vl_text": "the shared experts have no limit in their activation, which the routed experts have",
    "inkling_text": "the router weighs the shared experts, too",
    "jetmoe": "the layer adds a bias to its output, and attention has experts, too",
    "kolibri1": "the bias for the choice is added to the logits, not to the scores",
    "llama4_text": "the scores are factors on the experts' inputs, not on their outputs",
    "longcat_flash": "some experts have no weights and return their input",
    "muse_spark_text": "every expert's output has a norm",
    "nllb-moe": "an expert takes a limited number of tokens",
    "phimoe": "the router is SparseMixer",
    "step3p5": "the limit of a layer clamps the gate after its activation",
    "switch_transformers": "an expert takes a limited number of tokens",
    "zaya": "the router is an MLP with a state from layer to layer, and may choose no expert",
}


# --- reading it -------------------------------------------------------------------------------------------


def blocks(config: Any) -> list[Block]:
    """Returns what every MoE layer of a model is: FusedMoE's arguments, and where its tensors are.

    Args:
        config: a configuration of transformers, a dict as of config.json, or the path of a config.json or of
            its folder. If the model has several parts, its text_config is read.

    Returns:
        A list of `Block`, in the order of the layers.

    Raises:
        ValueError: if model_type is unknown, or a field's value is not what FusedMoE computes, or a field
            that could matter is unknown. The message names it.

    Example:
        >>> from fused_moe import checkpoint
        >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
        >>> config |= {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
        >>> [block.layer for block in checkpoint.blocks(config)]
        [0, 1]
    """
    model_type, config, roots = _find_text(read_config(config))
    family = FAMILIES[model_type]
    fields = _fields(model_type, family, config)
    number = len(block_types(fields)) if "layers_block_type" in fields else fields["num_hidden_layers"]
    if not isinstance(number, int):
        _fail(model_type, "num_hidden_layers", "an int", number)
    for name, value in fields.items():
        of_layers = name in ARGUMENTS or name in ("mlp_layer_types", "moe_layer_freq")
        if of_layers and isinstance(value, list | tuple) and len(value) < number:
            _fail(model_type, name, f"of {number} layers", value)
    found = []
    for layer in range(number):
        if _has_experts(model_type, family, fields, layer) and (
            s := _settings(model_type, family, fields, layer)
        ):
            found.append(_block(family, layer, s, tuple(shapes_of(tuple(s.items()))), roots))
    return found


@cache
def shapes_of(settings: tuple[tuple[str, Any], ...]) -> dict[str, torch.Size]:
    """The state_dict of a FusedMoE with these arguments. A model has few kinds of layers."""
    return {name: t.shape for name, t in FusedMoE(**dict(settings), device="meta").state_dict().items()}


def read_config(config: Any) -> Mapping[str, Any]:
    """As a dict."""
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"fused_moe.checkpoint: expected JSON in {path}, found {error}") from None
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        found = type(config).__name__
        raise TypeError(f"fused_moe.checkpoint: expected a configuration, a dict or a path, found {found}")
    return config if isinstance(config, Mapping) else config.to_dict()


def _find_text(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], tuple[str, ...]]:
    """The model_type and the configuration that a row is for, and where its layers are."""
    model_type = cast(str, config.get("model_type"))
    roots: tuple[str, ...] = ROOTS.get(model_type, ())
    places: tuple[str, ...] = PLACES
    while model_type not in FAMILIES:
        part = next(
            (config[p] for p in ("text_config", "thinker_config") if isinstance(config.get(p), Mapping)), None
        )
        if model_type in REFUSED:
            raise ValueError(f"fused_moe.checkpoint: {model_type} is no FusedMoE: {REFUSED[model_type]}")
        if part is None:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(
                f"fused_moe.checkpoint: expected model_type to be one of {known}, found {model_type!r}"
            )
        config, model_type, places = part, cast(str, part.get("model_type")), PLACES_OF_PART
        roots += ROOTS.get(model_type, ())
    return model_type, config, tuple(dict.fromkeys(roots + places))


def _fail(model_type: str, name: str, expected: Any, found: Any) -> None:
    raise ValueError(f"fused_moe.checkpoint: {model_type}: expected {name} to be {expected}, found {found!r}")


def _fields(model_type: str, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the family's row, with their values in config.json, after a look at all the others."""
    config = dict(config)
    fields = {name: config.get(name, default) for name, default in family.fields.items()}
    owners = {ARGUMENTS[name]: name for name in fields if name in ARGUMENTS}
    defaults = {name: p.default for name, p in inspect.signature(FusedMoE.__init__).parameters.items()}
    for name, value in list(config.items()):
        values = list(value) if isinstance(value, list | tuple) else [value]
        argument = ARGUMENTS.get(name)
        if name in fields or value is None:
            continue
        if name in family.means:
            if any(v not in family.means[name] for v in values):
                _fail(model_type, name, " or ".join(map(repr, family.means[name])), value)
        elif argument in owners and name != "intermediate_size":
            owner = owners[argument]
            if owner not in config:
                fields[owner] = config[owner] = value
            elif any(v != fields[owner] for v in values) and value != fields[owner]:
                _fail(model_type, name, f"{owner} = {fields[owner]!r}", value)
        elif argument is not None and name != "intermediate_size":
            computed = family.fixed.get(argument, defaults[argument])
            if any(v != computed and not (v == 1 and computed is None) for v in values):
                _fail(model_type, name, repr(computed), value)
        elif (
            name in SHARED_WIDTHS and "num_shared_experts" in owners and value == fields[owners["hidden_dim"]]
        ):
            continue  # each is as wide as a routed expert, as in every row without this field
        elif value and COULD_MATTER.search(name) and not SAYS_NOTHING.fullmatch(name):
            _fail(model_type, name, "absent, null, false or 0, as nothing more is known of it", value)
    return fields


def _has_experts(model_type: str, family: Family, fields: dict[str, Any], layer: int) -> bool:
    types = fields.get("mlp_layer_types")
    if types is not None:
        if types[layer] not in ("sparse", "dense"):
            _fail(model_type, f"mlp_layer_types[{layer}]", "'sparse' or 'dense'", types[layer])
        return types[layer] == "sparse"
    for name, rule in LAYERS.items():
        try:
            if name in fields and not rule(layer, fields):
                return False
        except (TypeError, ZeroDivisionError):
            _fail(model_type, name, "what says which layers have experts", fields[name])
    return layer >= family.dense


def _settings(model_type: str, family: Family, fields: dict[str, Any], layer: int) -> dict[str, Any]:
    """FusedMoE's arguments; none for a model without experts."""
    fields = {name: at(value, layer) if name in ARGUMENTS else value for name, value in fields.items()}
    for name in fields:
        is_null = fields[name] is None and ARGUMENTS.get(name) in NUMBERS
        if is_null or (name in SHARED_WIDTHS and not isinstance(fields[name], int)):
            _fail(model_type, name, "a number", fields[name])
    settings = family.fixed | {ARGUMENTS[name]: value for name, value in fields.items() if name in ARGUMENTS}
    settings |= family.more(fields)
    if settings["num_experts"] == 0:
        return {}
    for name in ("hidden_act", "mlp_hidden_act"):
        if name in fields:
            if fields[name] not in ACTIVATIONS:
                _fail(model_type, name, " or ".join(map(repr, ACTIVATIONS)), fields[name])
            settings["activation"] = ACTIVATIONS[fields[name]]
    if settings.get("num_expert_groups") in (None, 1):  # one group is all experts
        for name in ("num_expert_groups", "num_limited_groups", "group_score"):
            settings.pop(name, None)
    for name in SHARED_WIDTHS:
        if name in fields:
            width, of_one = fields[name] * settings.get("num_shared_experts", 1), settings["hidden_dim"] or 1
            if width % of_one:
                _fail(model_type, name, f"a multiple of the experts' width {of_one}", fields[name])
            settings["num_shared_experts"] = width // of_one
    return {name: value for name, value in settings.items() if value is not None}


def _block(family: Family, layer: int, settings: dict, names: tuple, roots: tuple[str, ...]) -> Block:
    tensors = {
        name: tuple(
            dict.fromkeys(  # layouts may agree on it
                sources[name]._replace(name=f"{root}.{layer}.{sources[name].name}")
                for sources in family.layouts
                for root in roots
            )
        )
        for name in names
    }
    firsts = {s.name.partition(".")[0] for sources in family.layouts for s in sources.values()}
    prefixes = tuple(f"{root}.{layer}.{first}." for root in roots for first in sorted(firsts))
    return Block(layer, settings, tensors, prefixes)
