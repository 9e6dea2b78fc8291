"""Every class of experts in transformers: what docs/transformers.md says of its model, and what it computes.

The list is made from the installed transformers, so a release with a new class fails until the page has it.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import BF16, F32, Calls
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from packaging.version import Version  # noqa: E402
from test_transformers import (  # noqa: E402, F401 - with the fixture
    Experts,
    assert_models_agree,
    in_fused_moe,
    registered,
    tiny_model,
    token_ids,
)
from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402

from fused_moe.transformers import gates  # noqa: E402
from fused_moe.transformers.experts import settings_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

PAGE = Path(__file__).parent.parent / "docs" / "transformers.md"
MODELS = Path(transformers.__file__).parent / "models"
SIZES = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), 37),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 29),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 5),
}
# Values of order one lie on both sides of these.
SMALL = {"swiglu_limit": 1.0, "swiglu_alpha": 1.5, "mlp_gate_softcap": 1.5, "mlp_up_softcap": 0.8}


# --- the list ---------------------------------------------------------------------------------------------


def classes() -> dict[str, type]:
    """Those of the installed transformers, by model and name."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if "@use_experts_implementation" in path.read_text():
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            for thing in vars(importlib.import_module(name)).values():
                if isinstance(thing, type) and thing.__module__ == name and hasattr(thing, "_apply_gate"):
                    found[f"{path.parent.name}.{thing.__name__}"] = thing
    return found


def page() -> tuple[tuple[int, ...], str, dict[str, set[str]]]:
    """How many classes run on our kernels, and of how many; the version; and what it says of each model."""
    text = PAGE.read_text()
    sentence = r"(\d+) of the (\d+) classes of experts in transformers (\S+) "
    ours, total, version = re.search(sentence, text).groups()
    table = text.partition("\n## Model types\n")[2].partition("\n## ")[0]
    models = {}
    for activation, storage, names in re.findall(
        r"^\| (\w[^|]+) \| ([^|]+) \| (\w+(?:, \w+)*) \|$", table, re.MULTILINE
    ):
        for name in names.split(", "):
            models.setdefault(name, set()).add(f"{activation}: {storage}")
    return (int(ours), int(total)), version, models


NOT_OURS = "not on our kernels"


def model_of(name: str) -> str:
    return name.split(".")[0]


def is_ours(name: str) -> bool:
    return any(not runs.startswith(NOT_OURS) for runs in MODELS_OF_PAGE.get(model_of(name), ()))


CLASSES = classes()
COUNTS, VERSION, MODELS_OF_PAGE = page() if PAGE.exists() else (None, None, {})
needs_page = pytest.mark.skipif(not MODELS_OF_PAGE, reason="needs docs/ beside tests/")
OURS = [name for name in CLASSES if is_ours(name)]
ALL_CLASSES = pytest.mark.parametrize("name", CLASSES)


class Small:
    """A configuration with other values for some of its attributes. None is set, which it might refuse."""

    def __init__(self, config: PreTrainedConfig, values: dict):
        self._config, self._values = config, values

    def __getattr__(self, name: str):
        value = getattr(self._config, name)
        return self._values.get(name, value)


def build(experts_class: type, **more) -> nn.Module:
    """A small module, of the first of its model's configurations that makes one."""
    package = experts_class.__module__.rpartition(".")[0]
    module = importlib.import_module(f"{package}.configuration_{package.rpartition('.')[2]}")
    errors = []
    for config_class in vars(module).values():
        if isinstance(config_class, type) and issubclass(config_class, PreTrainedConfig):
            try:
                return experts_class(Small(config_class(), SIZES | more))
            except Exception as error:  # it is of another part of the model
                errors.append(f"{config_class.__name__}: {error}")
    raise AssertionError(f"no configuration makes {experts_class.__name__}: {errors}")


def described(experts: nn.Module) -> str:
    """As the page says it: activation and weights, or why not."""
    settings = settings_of(experts)
    if isinstance(settings, str):
        return f"{NOT_OURS}: {settings}"
    if settings["layout"] == "separate":
        storage = ["ungated"]
    else:
        storage = [settings["layout"]]
    storage += ["transposed"] * experts.is_transposed + ["biases"] * experts.has_bias
    return f"{settings['activation']}: {', '.join(storage)}"


def skip_older() -> None:
    if Version(transformers.__version__) < Version(VERSION):
        pytest.skip(f"the page is of transformers {VERSION}; earlier releases have other names")


@needs_page
def test_the_page_has_every_model(cpu):
    """And no other."""
    skip_older()
    models = {model_of(name) for name in CLASSES}
    assert models - MODELS_OF_PAGE.keys() == set(), f"add these to {PAGE.name}"
    assert MODELS_OF_PAGE.keys() - models == set(), (
        f"take these, which transformers has lost, from {PAGE.name}"
    )
    assert (len(OURS), len(CLASSES)) == COUNTS


@needs_page
@ALL_CLASSES
def test_the_page_says_what_runs(cpu, name):
    """The model's own configuration decides, with its activation and constants."""
    if model_of(name) not in MODELS_OF_PAGE:
        skip_older()
    assert described(build(CLASSES[name])) in MODELS_OF_PAGE[model_of(name)]


# --- results ----------------------------------------------------------------------------------------------


def experts_of(name: str, device, dtype=F32) -> Experts:
    # As Case.limit: in half precision rounding would decide which values exceed it.
    values = SMALL if dtype == F32 else SMALL | {"swiglu_limit": 7.0}
    return Experts(lambda _: build(CLASSES[name], **values), device, dtype)


# One class of each activation.
ONE_OF_EACH = sorted({min(MODELS_OF_PAGE[model_of(n)]).split(":")[0]: n for n in reversed(OURS)}.values())


@pytest.mark.parametrize("name", OURS)
def test_results(device, name):
    """Output and gradients of x, scores and parameters, in float32: as accurate as the class itself."""
    experts = experts_of(name, device)
    with Calls() as calls:
        experts.check()
    assert len(calls.of("experts_up")) == 1


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_results_in_bfloat16(device, name):
    """Each activation in half precision."""
    experts_of(name, device, BF16).check()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_results_compiled(device, name):
    """In one graph: the same bits."""
    experts = experts_of(name, device)
    experts.module.config._experts_implementation = "fused_moe"
    call = experts.inputs["x"], experts.ids, experts.inputs["scores"]
    expected = experts.module(*call)
    gates._find.cache_clear()  # the first call may be traced
    try:
        assert torch.equal(
            torch.compile(experts.module, fullgraph=True, backend="aot_eager")(*call), expected
        )
    finally:
        torch._dynamo.reset()


# model_type -> its configuration. The latest models, each with another activation, router or block around it.
NEW_MODELS = {
    "beam": {"num_experts": 8, "mlp_layer_types": ["sparse"] * 2, "n_group": 2, "topk_group": 2},
    "deepseek_v4": {
        **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 16),
        **dict.fromkeys(("head_dim", "index_head_dim", "sliding_window"), 8),
        **dict.fromkeys(("o_groups", "index_n_heads"), 2),
        **dict.fromkeys(("index_topk", "qk_rope_head_dim"), 4),
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "swiglu_limit": 1.0,
    },
    "gemma4_text": {
        **dict.fromkeys(("num_experts", "head_dim", "global_head_dim"), 8),
        "top_k_experts": 2,
        "enable_moe_block": True,
    },
    "inkling2_text": {
        "n_routed_experts": 8,
        "unpadded_vocab_size": 96,
        "mlp_gate_softcap": 1.5,
        "mlp_up_softcap": 0.8,
    },
    "minimax_m3_vl_text": {"num_local_experts": 8},
    "nemotron_h": {
        **dict.fromkeys(("n_routed_experts", "head_dim", "mamba_head_dim", "ssm_state_size"), 8),
        **dict.fromkeys(("n_group", "topk_group"), 1),
        "moe_shared_expert_intermediate_size": 20,
        "mamba_num_heads": 4,
        "n_groups": 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
    },
}


@pytest.mark.parametrize("family", NEW_MODELS)
def test_new_models(device, family):
    """Logits and gradients of tiny models, and the tokens that they generate, are eager's."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = tiny_model(family, device, **NEW_MODELS[family])
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(buffer.size(0), 8).argsort()[:, : buffer.size(1)])
    ids = token_ids(device)
    model(input_ids=ids).logits.sum().backward()
    for parameter in model.parameters():  # an indexer chooses, and gets none
        parameter.requires_grad_(parameter.grad is not None).grad = None
    ours = in_fused_moe(model)
    with Calls() as calls:
        ours(input_ids=ids)
    assert len(calls.of("experts_up")) == sum(hasattr(m, "has_gate") for m in model.modules()) > 0
    assert_models_agree(model, ours, ids)
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.eval().generate(ids, **settings)
    assert torch.equal(ours.eval().generate(ids, **settings), expected)


def block_and_input(model: str, device) -> tuple[nn.Module, tuple]:
    """A router beside experts, with random weights."""
    module = f"transformers.models.{model}.modeling_{model}"
    module = pytest.importorskip(module, reason=f"this transformers has no {model}", exc_type=ImportError)
    if model == "gemma4":
        config = Small(transformers.Gemma4TextConfig(), {**SIZES, "top_k_experts": 2})

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.router, self.experts = module.Gemma4TextRouter(config), module.Gemma4TextExperts(config)

            def forward(self, x):
                _, weights, ids = self.router(x)
                return self.experts(x, ids, weights)

        block, call = Block(), (torch.randn(33, 37, device=device),)
    else:
        config = Small(
            transformers.DeepseekV4Config(mlp_layer_types=["hash_moe", "moe"], num_hidden_layers=2),
            {**SIZES, **SMALL, "num_experts_per_tok": 2, "vocab_size": 96},
        )
        blocks = [module.DeepseekV4SparseMoeBlock(config, layer) for layer in range(2)]
        blocks[0].gate.tid2eid.copy_(torch.rand(96, 5).argsort()[:, :2])
        blocks[1].gate.e_score_correction_bias.normal_()
        x, tokens = torch.randn(3, 11, 37, device=device), torch.randint(96, (3, 11), device=device)

        class Blocks(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList(blocks)

            def forward(self, x):
                return self.blocks[0](x, tokens) + self.blocks[1](x)

        block, call = Blocks(), (x,)
    block.config = config
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.2)
    return block.to(device), call


@pytest.mark.parametrize("model", ("deepseek_v4", "gemma4"))
def test_routers_stay_transformers(device, model):
    """The ids and scores of a model's router are used as they are, and its parameters get their gradients:
    DeepSeek-V4's roots of softplus, and its table from tokens to experts; Gemma 4's scale per expert."""
    block, (x,) = block_and_input(model, device)
    results = {}
    for implementation in ("eager", "fused_moe"):
        block.config._experts_implementation = implementation
        x = x.detach().requires_grad_()
        with Calls() as calls:
            out = block(x)
        grads = torch.autograd.grad(out, [x, *block.parameters()], torch.ones_like(out))
        results[implementation] = [out.detach(), *grads]
    assert calls.of("experts_up")
    for found, expected in zip(results["fused_moe"], results["eager"], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# --- gates ------------------------------------------------------------------------------------------------


def limited(gate, up, limit):
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Gated(MixtralExperts):
    """Attributes of names that transformers does not use."""

    bound: float | None = 3.0
    power = 0.5

    def __init__(self, config=None, **more):
        super().__init__(Small(transformers.MixtralConfig(), SIZES))
        self.scale = nn.Parameter(torch.ones(()))
        self.factor = nn.Buffer(torch.ones(()))
        self.tensor = torch.ones(())
        for name, value in more.items():
            setattr(self, name, value)


def subclass(gate, **more) -> nn.Module:
    return type("Subclass", (Gated,), {"_apply_gate": gate})(**more)


def halves(self, x):
    gate, up = x.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def interleaved(self, x):
    return F.silu(x[..., ::2]) * x[..., 1::2]


def in_float32(self, x):
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def bounded(self, x):
    return limited(*x.chunk(2, dim=-1), self.bound)


def with_a_literal(self, x):
    return limited(*x.chunk(2, dim=-1), 2.5)


def by_another_way(self, x):
    gate, up = x.unflatten(-1, (2, -1)).unbind(-2)
    gate = torch.where(gate > self.bound, self.bound, gate)
    return (
        torch.sigmoid(gate)
        * gate
        * torch.maximum(torch.minimum(up, up * 0 + self.bound), up * 0 - self.bound)
    )


def of_the_parent(self, x):
    return super(type(self), self)._apply_gate(x) * 1.0


def clamped(self, x):
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=self.bound), up.clamp(-self.bound, self.bound)
    return (up + 1) * gate * torch.sigmoid(self.power * gate)


def capped(self, x):
    gate, up = x.chunk(2, dim=-1)
    gate = torch.tanh(gate / self.bound) * self.bound * torch.sigmoid(gate)
    return gate * torch.tanh(up / self.power) * self.power


SILU = {"layout": "halves", "activation": "silu"}
LIMITED = {"layout": "halves", "activation": "swiglu_limited", "limit": 3.0}
TAKEN = {
    halves: SILU,
    interleaved: SILU | {"layout": "interleaved"},
    in_float32: SILU,
    bounded: LIMITED,
    with_a_literal: LIMITED | {"limit": 2.5},
    by_another_way: LIMITED,
    of_the_parent: SILU,
    clamped: {"layout": "halves", "activation": "swiglu_clamped", "alpha": 0.5, "limit": 3.0},
    capped: {"layout": "halves", "activation": "situ", "alpha": 3.0, "limit": 0.5},
}


@pytest.mark.parametrize("gate", TAKEN, ids=lambda gate: gate.__name__)
def test_a_gate_is_known_by_what_it_computes(cpu, gate):
    """Whatever its name, its attributes' names and the way it is written."""
    assert settings_of(subclass(gate)) == TAKEN[gate]


def test_a_gate_that_is_replaced_in_its_class(cpu, monkeypatch):
    """Another one, and then the first again: nothing is remembered of the class alone."""
    kind = next(kind for kind, settings in TAKEN.items() if "limit" in settings)
    experts = subclass(kind)
    gate = type(experts)._apply_gate
    with monkeypatch.context() as patched:
        patched.setattr(type(experts), "_apply_gate", lambda *args: gate(*args) / 2)
        assert isinstance(settings_of(experts), str)
    assert settings_of(experts) == TAKEN[kind]


# What differs from a kernel's formula in one place each.
REFUSED = {
    "another constant for up": lambda self, x: (
        F.silu(x.chunk(2, -1)[0].clamp(max=self.bound)) * x.chunk(2, -1)[1].clamp(-self.power, self.power)
    ),
    "up not limited below": lambda self, x: (
        F.silu(x.chunk(2, -1)[0].clamp(max=self.bound)) * x.chunk(2, -1)[1].clamp(max=self.bound)
    ),
    "limited after silu, as Step-3.7": lambda self, x: (
        F.silu(x.chunk(2, -1)[0]).clamp(max=self.bound) * x.chunk(2, -1)[1].clamp(-self.bound, self.bound)
    ),
    "a far limit in the code": lambda self, x: (
        F.silu(x.chunk(2, -1)[0].clamp(max=float("900"))) * x.chunk(2, -1)[1]
    ),
    "up before gate": lambda self, x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    "no gradient": lambda self, x: F.silu(x.chunk(2, -1)[0].detach()) * x.chunk(2, -1)[1],
    "a limit with a straight gradient": lambda self, x: limited(
        *((x.clamp(-self.bound, self.bound) - x).detach() + x).chunk(2, -1), self.bound
    ),
    "a parameter": lambda self, x: halves(self, x) * self.scale,
    "a buffer": lambda self, x: halves(self, x) * self.factor,
    "a tensor": lambda self, x: halves(self, x) * self.tensor,
    "a weight": lambda self, x: halves(self, x) + self.down_proj.sum() * 0,
    "a norm": lambda self, x: F.normalize(halves(self, x), dim=-1),
    "another shape": lambda self, x: halves(self, x)[..., :1],
    "an error": lambda self, x: 1 / 0,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_gate_is_refused(cpu, kind):
    """Its name is in the reason."""
    gate = REFUSED[kind]
    assert settings_of(subclass(gate)) == f"the gate {__name__}.{gate.__qualname__}"


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return F.silu(x) * self.slope


ACT_FNS = {
    "silu": (F.silu, "silu"),
    "nn.SiLU": (nn.SiLU(), "silu"),
    "gelu": (ACT2FN["gelu"], "gelu"),
    "gelu_fast": (ACT2FN["gelu_fast"], "gelu_tanh"),
    "gelu_accurate": (ACT2FN["gelu_accurate"], "gelu_tanh"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "nn.GELU, tanh": (nn.GELU(approximate="tanh"), "gelu_tanh"),
    "in two modules": (nn.Sequential(nn.ReLU(), nn.Identity()), "relu"),
    "relu2": (ACT2FN["relu2"], "relu2"),
    "relu6": (ACT2FN["relu6"], None),
    "gelu_10": (ACT2FN["gelu_10"], None),
    "quick_gelu": (ACT2FN["quick_gelu"], None),
    "mish": (ACT2FN["mish"], None),
    "learned": (Learned(), None),
    "learned in a module": (nn.Sequential(Learned()), None),
    "a closure": ((lambda slope: lambda x: F.silu(x) * slope)(torch.ones(())), None),
    "a bound method": (Learned().forward, None),
    "none": (None, None),
}


@pytest.mark.parametrize("kind", ACT_FNS)
@pytest.mark.parametrize("gated", (True, False))
def test_an_activation_is_known_by_what_it_computes(cpu, kind, gated):
    """With transformers' own gate or without a gate. The reason has its name."""
    act_fn, expected = ACT_FNS[kind]
    experts = build(MixtralExperts if gated else NemotronHExperts)
    del experts.act_fn
    experts.act_fn = act_fn
    found = settings_of(experts)
    if expected is None:
        assert isinstance(found, str) and found.startswith("the activation ")
    else:
        assert found == {"layout": "halves" if gated else "separate", "activation": expected}


def test_what_changes_after_the_first_call(cpu):
    """Attributes of the module and of its activation, the activation, a gate that is set on the module."""
    experts = subclass(bounded, bound=7)
    assert settings_of(experts) == LIMITED | {"limit": 7.0}
    experts.bound = 2.0
    assert settings_of(experts) == LIMITED | {"limit": 2.0}
    experts.bound = None
    assert isinstance(settings_of(experts), str)
    experts = subclass(halves)
    for act_fn, name in ((nn.GELU(), "gelu"), (ACT2FN["silu"], "silu")):
        experts.act_fn = act_fn
        assert settings_of(experts)["activation"] == name
    experts.act_fn = nn.GELU()
    experts.act_fn.approximate = "tanh"
    assert settings_of(experts)["activation"] == "gelu_tanh"
    experts._apply_gate = lambda x: x
    assert settings_of(experts) == "a gate that is set on the module"


def test_a_limit_that_is_infinite_is_none(cpu):
    """Step-3.7 says so where it has no limit."""
    assert settings_of(subclass(bounded, bound=float("inf"))) == SILU


def test_parametrised_experts(cpu, monkeypatch):
    """PEFT's own wrapper makes another class of each module for each call: nothing is looked for again."""
    monkeypatch.setitem(peft.PEFT_TYPE_TO_TUNER_MAPPING, peft.PeftType.LORA, peft.LoraModel)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_local_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation="fused_moe")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=names))
    ids = torch.randint(96, (2, 5))
    model(input_ids=ids)
    known = gates._find.cache_info().currsize
    for _ in range(2):
        model(input_ids=ids)
    assert gates._find.cache_info().currsize == known


@pytest.mark.parametrize("modes", ("inference", "no grad", "meta", "checkpoint", "autocast", "float16"))
def test_the_first_call_may_be_anywhere(cpu, modes):
    """What is found does not depend on the modes of the first call, and does not disturb them."""
    gates._find.cache_clear()
    experts = build(CLASSES["gpt_oss.GptOssExperts"])
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    experts.config._experts_implementation = "fused_moe"
    x, ids, scores = torch.randn(7, 37, requires_grad=True), torch.randint(5, (7, 2)), torch.rand(7, 2)
    if modes == "checkpoint":
        checkpoint(experts, x, ids, scores, use_reentrant=False).sum().backward()
        assert x.grad is not None
    elif modes == "inference":
        with torch.inference_mode():
            experts(x, ids, scores)
    elif modes == "no grad":
        with torch.no_grad():
            experts(x, ids, scores)
    elif modes == "autocast":
        with torch.autocast("cpu", BF16):
            experts(x, ids, scores)
    elif modes == "meta":
        experts = experts.to("meta")
        with torch.device("meta"):
            assert isinstance(settings_of(experts), dict)
    else:
        torch.set_default_dtype(torch.float16)
        try:
            assert isinstance(settings_of(experts), dict)
        finally:
            torch.set_default_dtype(F32)
    found = settings_of(experts)
    gates._find.cache_clear()
    expected = {"layout": "interleaved", "activation": "swiglu_clamped", "alpha": 1.702, "limit": 7.0}
    assert found == settings_of(experts) == expected


def test_compiled_layers_share_a_graph(cpu):
    """One graph for each limit, not for each module, and another one when a limit changes."""
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.randn(7, 37), torch.randint(5, (7, 2)), torch.rand(7, 2)
    experts_class = type(subclass(bounded))
    layers = [experts_class(bound=bound) for bound in (2.0, 2.0, 2.0, 0.5, 0.5, 2.0)]
    for layer in layers:
        layer.config._experts_implementation = "fused_moe"

    @torch.no_grad()
    def num_graphs(layer: nn.Module) -> int:
        for parameter in layer.parameters():
            parameter.normal_()
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        assert torch.equal(compiled(*call), layer(*call))
        return counter.frame_count

    try:
        counts = [num_graphs(layer) for layer in layers]
        assert counts[:3] == [1] * 3 and counts[3:] == counts[3:4] * 3
        layers[0].bound = 1.5
        assert num_graphs(layers[0]) > counts[-1]
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("strict", (False, True))
def test_exported(cpu, strict):
    """In a first call under torch.export, which has modes of its own."""
    gates._find.cache_clear()
    experts = subclass(bounded, bound=1.0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    experts.config._experts_implementation = "fused_moe"
    call = torch.randn(7, 37), torch.randint(5, (7, 2)), torch.rand(7, 2)
    program = torch.export.export(experts, call, strict=strict)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("fused_moe" in name for name in names) and not any("silu" in name for name in names)
    with torch.no_grad():
        assert torch.equal(program.module()(*call), experts(*call))
