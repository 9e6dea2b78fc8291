"""Which FusedMoE a Hugging Face model's layers are: a table by `model_type`, and `blocks`, which reads it.

A row states what the model's own code in transformers fixes, how the tensors are called, and the fields of
config.json that this code reads for its MoE layers, with transformers' defaults, where config.json has none. A
field that could matter and that the row does not know is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..module import FusedMoE
from .block import Block, Source

# --- fields -----------------------------------------------------------------------------------------------

# What a field says of FusedMoE, by the argument's name.
ARGUMENTS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",  # of families whose rows have it; elsewhere it is the dense layers'
    "moe_intermediate_size": "hidden_dim",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "top_k",
    "norm_topk_prob": "route_norm",
    "routed_scaling_factor": "route_scale",
    "n_group": "num_expert_groups",
    "topk_group": "num_limited_groups",
    "n_shared_experts": "num_shared_experts",
    "hidden_act": "activation",
    "swiglu_alpha": "alpha",
    "swiglu_limit": "limit",
}

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

# Which layers have experts, by the field that says so.
LAYERS: dict[str, Callable[[int, Any], bool]] = {
    "first_k_dense_replace": lambda layer, first: layer >= (first or 0),
    "decoder_sparse_step": lambda layer, step: (layer + 1) % step == 0,
    "mlp_only_layers": lambda layer, dense: layer not in (dense or ()),
}

# Names of fields that could say something of a MoE layer ...
COULD_MATTER = re.compile(
    r"moe|expert|rout|top_?k|scor|group|shared|sparse|dense|mlp|ffn|feed|jitter|swiglu|softcap|latent|"
    r"(^|_)(gate|gated|gating|act|activation|limit|alpha|bias|scale|freq|multiplier)(_|$)"
)
# ... and of those that say nothing: the trainer's losses, attention, how a model is split over devices, and
# transformers 4's settings of generate().
SAYS_NOTHING = frozenset(
    """
    router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux output_router_logits ep_size
    attention_bias qkv_bias o_bias chunk_size_feed_forward top_k experts_implementation
    """.split()
)


class Family(NamedTuple):
    """The MoE layers of the models of one model_type."""

    fields: dict[str, Any]  # what is read of config.json, with transformers' defaults
    fixed: dict[str, Any]  # FusedMoE's arguments that the model's code fixes
    layouts: tuple[dict[str, Source], ...]  # names below "model.layers.N.": published, then in memory
    means: dict[str, tuple] = {}  # fields that are not read, and the values that mean what is computed
    aliases: dict[str, str] = {}  # other names of fields


def family(fixed: dict, layouts: tuple, *, means: Mapping = {}, aliases: Mapping = {}, **fields) -> Family:  # noqa: B006
    """A row, with its fields as keywords."""
    return Family(fields, fixed, layouts, dict(means), dict(aliases))


# --- names ------------------------------------------------------------------------------------------------


def under(prefix: str, *parts: Mapping[str, Source | str]) -> dict[str, Source]:
    """FusedMoE's names with their places below the prefix."""
    sources = {name: s if isinstance(s, Source) else Source(s) for part in parts for name, s in part.items()}
    return {name: s._replace(name=f"{prefix}.{s.name}") for name, s in sources.items()}


def listed(gate: str = "gate_proj", down: str = "down_proj", up: str = "up_proj") -> dict[str, str]:
    """Experts one by one."""
    return {f"experts.w{i}": f"experts.*.{name}.weight" for i, name in enumerate((gate, down, up), 1)}


# As transformers 5 has experts in memory: gate above up.
STACKED = {
    "experts.w1": Source("experts.gate_up_proj", rows="upper"),
    "experts.w2": Source("experts.down_proj"),
    "experts.w3": Source("experts.gate_up_proj", rows="lower"),
}
# As gpt-oss has them: transposed, rows of gate and up in turn, with biases.
INTERLEAVED = {
    "experts.w1": Source("experts.gate_up_proj", transposed=True, rows="even"),
    "experts.w2": Source("experts.down_proj", transposed=True),
    "experts.w3": Source("experts.gate_up_proj", transposed=True, rows="odd"),
    "experts.b1": Source("experts.gate_up_proj_bias", rows="even"),
    "experts.b2": Source("experts.down_proj_bias"),
    "experts.b3": Source("experts.gate_up_proj_bias", rows="odd"),
}
ROUTER = {"router.gate.weight": "gate.weight"}
EXPERT_BIAS = {"expert_bias": "gate.e_score_correction_bias"}


def shared(name: str = "shared_experts") -> dict[str, str]:
    """Shared experts, as one MLP of that name."""
    linears = enumerate(("gate_proj", "down_proj", "up_proj"), 1)
    return {f"shared_experts.w{i}.weight": f"{name}.{linear}.weight" for i, linear in linears}


MIXTRAL_NAMES = (under("block_sparse_moe", ROUTER, listed("w1", "w2", "w3")), under("mlp", ROUTER, STACKED))
QWEN_NAMES = (under("mlp", ROUTER, listed()), under("mlp", ROUTER, STACKED))
DEEPSEEK_NAMES = tuple(
    under("mlp", ROUTER, EXPERT_BIAS, shared(), experts) for experts in (listed(), STACKED)
)
GPT_OSS_NAMES = (
    under("mlp", {"router.gate.weight": "router.weight", "router.gate.bias": "router.bias"}, INTERLEAVED),
)

# --- the table --------------------------------------------------------------------------------------------

# Their code divides by the sum alone. FusedMoE's eps of 1e-20 changes no sum of a softmax's largest values.
SOFTMAX = {"score_func": "softmax"}
# DeepSeek-V3's: a bias for the choice, which load_balance_coeff=0.0 holds still.
SIGMOID = {"score_func": "sigmoid", "route_norm_eps": 1e-20, "load_balance_coeff": 0.0}

REFUSED: dict[str, str] = {}

FAMILIES: dict[str, Family] = {
    "mixtral": family(
        SOFTMAX | {"route_norm": True},
        MIXTRAL_NAMES,
        hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2,
        hidden_act="silu", num_hidden_layers=32,
        means={"router_jitter_noise": (0.0,)},
        aliases={"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": family(
        SOFTMAX,
        QWEN_NAMES,
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=False, hidden_act="silu", num_hidden_layers=24, decoder_sparse_step=1,
        mlp_only_layers=None,
        aliases={"num_local_experts": "num_experts"},
    ),
    "olmoe": family(
        SOFTMAX,
        QWEN_NAMES,
        hidden_size=2048, intermediate_size=2048, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, hidden_act="silu", num_hidden_layers=16,
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v3": family(
        SIGMOID,
        DEEPSEEK_NAMES,
        hidden_size=7168, moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8, topk_group=4, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=61, first_k_dense_replace=3,
        means={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "glm4_moe": family(
        SIGMOID,
        DEEPSEEK_NAMES,
        hidden_size=4096, moe_intermediate_size=1408, n_routed_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1, n_shared_experts=1,
        hidden_act="silu", num_hidden_layers=46, first_k_dense_replace=1,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "gpt_oss": family(
        SOFTMAX | {"route_norm": True, "activation": "swiglu_clamped", "bias": True, "gate_bias": True},
        GPT_OSS_NAMES,
        hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4,
        swiglu_alpha=1.702, swiglu_limit=7.0, num_hidden_layers=36,
        means={"hidden_act": ("silu",)},
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    ),
}  # fmt: skip


# --- reading it -------------------------------------------------------------------------------------------


def blocks(config: Any) -> list[Block]:
    """Every MoE layer of a model.

    Args:
        config: a configuration of transformers, a dict as of config.json, or the path of a config.json or of
            its folder. That of a model with several parts has one for its text, text_config.

    Raises:
        ValueError: if model_type is unknown, or a field's value is not what FusedMoE computes, or a field
            that could matter is unknown. The message names it.
    """
    config = read_config(config)
    roots = ("model.layers", "layers")
    model_type = config.get("model_type")
    while model_type not in FAMILIES and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
        model_type = config.get("model_type")
        roots = ("model.language_model.layers", "language_model.model.layers")
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"fused_moe.checkpoint: expected model_type to be one of {known}, found {model_type!r}"
        )
    family = FAMILIES[model_type]
    fields = _fields(model_type, family, config)
    settings = _settings(model_type, family, fields)
    names = FusedMoE(**settings, device="meta").state_dict()
    layers = [
        layer
        for layer in range(fields["num_hidden_layers"])
        if all(has_experts(layer, fields[name]) for name, has_experts in LAYERS.items() if name in fields)
    ]
    return [_block(family, layer, settings, names, roots) for layer in layers]


def read_config(config: Any) -> Mapping[str, Any]:
    """As a dict."""
    if isinstance(config, str | Path):
        path = Path(config)
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    return config if isinstance(config, Mapping) else config.to_dict()


def _fail(model_type: str, name: str, expected: Any, found: Any) -> None:
    raise ValueError(f"fused_moe.checkpoint: {model_type}: expected {name} to be {expected}, found {found!r}")


def _fields(model_type: str, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the family's row, with their values in config.json, after a look at all the others."""
    given = dict(config)
    for alias, name in family.aliases.items():
        if alias in given:
            value = given.pop(alias)
            if given.setdefault(name, value) != value:
                _fail(model_type, alias, f"{name} = {given[name]!r}", value)
    for name, value in given.items():
        if name in family.means:
            if value not in family.means[name]:
                _fail(model_type, name, " or ".join(map(repr, family.means[name])), value)
        elif name not in family.fields.keys() | SAYS_NOTHING and COULD_MATTER.search(name):
            if value is not None and value is not False:
                _fail(model_type, name, "absent, as nothing is known of it", value)
    return {name: given.get(name, default) for name, default in family.fields.items()}


def _settings(model_type: str, family: Family, fields: dict[str, Any]) -> dict[str, Any]:
    """FusedMoE's arguments."""
    settings = family.fixed | {ARGUMENTS[name]: value for name, value in fields.items() if name in ARGUMENTS}
    if "hidden_act" in fields:
        if fields["hidden_act"] not in ACTIVATIONS:
            _fail(model_type, "hidden_act", " or ".join(map(repr, ACTIVATIONS)), fields["hidden_act"])
        settings["activation"] = ACTIVATIONS[fields["hidden_act"]]
    if settings.get("num_expert_groups") in (None, 1):  # one group is all experts
        settings.pop("num_expert_groups", None)
        settings.pop("num_limited_groups", None)
    return settings


def _block(family: Family, layer: int, settings: dict, names, roots: tuple[str, ...]) -> Block:
    places = [(f"{root}.{layer}", layout) for layout in family.layouts for root in roots]
    tensors = {
        name: tuple(
            dict.fromkeys(
                s._replace(name=f"{at}.{s.name}") for at, sources in places for s in [sources[name]]
            )
        )
        for name in names
    }
    firsts = {s.name.partition(".")[0] for layout in family.layouts for s in layout.values()}
    prefixes = tuple(f"{root}.{layer}.{first}." for root in roots for first in sorted(firsts))
    return Block(layer, dict(settings), tensors, prefixes)
