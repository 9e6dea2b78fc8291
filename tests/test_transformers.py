"""fused_moe.transformers: tiny models of each family and single experts against eager; the fallback; LoRA.

A model's logits and every gradient are compared. All runs of one test use the routing of the first run:
otherwise rounding could choose between nearly equal experts, and nothing would be comparable.
"""

import copy
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import (
    BF16,
    F32,
    F64,
    FORMS,
    LOOSE,
    STRICT,
    Calls,
    assert_as_good,
    assert_near,
    assert_same_bits,
    forward_backward,
    make_ids,
    to_double,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StaticCache,
)
from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.models.aria.modeling_aria import AriaExperts  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts  # noqa: E402

import fused_moe.transformers  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

BOTH_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))


@pytest.fixture(scope="module")
def registered():
    fused_moe.transformers.register()
    fused_moe.transformers.register()  # again does no harm


@pytest.fixture
def fresh_warnings(monkeypatch):
    """Forgets the warnings of other tests."""
    monkeypatch.setattr(fused_moe.transformers.experts, "_warned", set())


# --- models ---------------------------------------------------------------------------------------

NUM_EXPERTS = 8
DENSE_FIRST = {"first_k_dense_replace": 1, "n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

# model_type -> additions to tiny_config
FAMILIES = {
    "mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": 24},
    "qwen2_moe": {"num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": NUM_EXPERTS, "intermediate_size": 24},
    "deepseek_v3": {**DENSE_FIRST, **LATENT, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    "glm4_moe": {**DENSE_FIRST, "head_dim": 8},
    "gpt_oss": {
        "num_local_experts": NUM_EXPERTS,
        "intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": 8,
    },
}
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)


def tiny_config(family: str, **more):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES.get(family, {}), **more})


def tiny_model(family: str, device, dtype=F32, **more) -> nn.Module:
    """In eager, with weights that keep activations of order one, so the experts matter for the logits."""
    if family == "gpt_oss":
        # as Case.limit: some values exceed it, but none by so little that rounding decides
        more = {"swiglu_limit": 1.0 if dtype == F32 else 7.0, **more}
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **more),
        experts_implementation="eager",
        attn_implementation="eager",  # the same bits every run, on a GPU too
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.to(device, dtype)


def in_fused_moe(model: nn.Module) -> nn.Module:
    """A copy whose experts are ours."""
    model = copy.deepcopy(model)
    model.set_experts_implementation("fused_moe")
    return model


def expert_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.dim() == 3]


def token_ids(device) -> torch.Tensor:
    return torch.randint(1, 96, (4, 40), device=device)


class Routing(TorchFunctionMode):
    """Records the result of every top-k, or replays those of an earlier run."""

    def __init__(self, earlier: "Routing | None" = None):
        super().__init__()
        self.chosen = []
        self.earlier = earlier and iter(earlier.chosen)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        if self.earlier is None:
            self.chosen.append(result.indices)
            return result
        indices = next(self.earlier)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def logits_and_gradients(model: nn.Module, ids, dlogits, routing: Routing) -> dict:
    with routing:
        logits = model(input_ids=ids).logits
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    grads = torch.autograd.grad(logits, parameters, dlogits.to(logits.dtype))
    return {"logits": logits.detach(), **dict(zip(names, grads, strict=True))}


def assert_models_agree(eager: nn.Module, ours: nn.Module, ids) -> None:
    """float32 to 1e-5 of each norm, for another order of summation; bfloat16 as accurate as eager."""
    dlogits = torch.randn(*ids.shape, eager.config.vocab_size, device=ids.device)
    routing = Routing()
    expected = logits_and_gradients(eager, ids, dlogits, routing)
    found = logits_and_gradients(ours, ids, dlogits, Routing(routing))
    if eager.dtype == F32:
        for name, value in expected.items():
            assert_near(found[name], value, slack=64)
        return
    exact = logits_and_gradients(copy.deepcopy(eager).double(), ids, dlogits, Routing(routing))
    assert_as_good(found, expected, exact)
    # Sinks and biases have few elements each, whose rounding errors vary; those of all together do not.
    together = (
        {"all": torch.cat([run[n].flatten() for n in exact])[None]} for run in (found, expected, exact)
    )
    assert_as_good(*together, STRICT)


@ALL_FAMILIES
@BOTH_DTYPES
def test_logits_and_gradients(device, dtype, family):
    """Every family: fused_moe agrees with eager, forward and backward."""
    eager = tiny_model(family, device, dtype)
    assert_models_agree(eager, in_fused_moe(eager), token_ids(device))


@ALL_FAMILIES
def test_every_layer_is_ours_and_weights_stay_where_they_are(device, family):
    """Each layer's experts are one call of our operators, on the parameters' own memory."""
    model = in_fused_moe(tiny_model(family, device))
    ids = token_ids(device)
    with Calls() as calls:
        model(input_ids=ids, labels=ids).loss.backward()
    experts = expert_modules(model)
    assert experts
    for operator, argument, name in (("experts_up", 1, "gate_up_proj"), ("experts_down", 2, "down_proj")):
        used = [args[argument].data_ptr() for args, _ in calls.of(operator)]
        assert used == [getattr(module, name).data_ptr() for module in experts]
        assert len(calls.of(f"{operator}_backward")) == len(experts)


@ALL_FAMILIES
def test_generate(device, family):
    """Greedy decoding with a cache gives eager's tokens."""
    eager = tiny_model(family, device).eval()
    ours, ids = in_fused_moe(eager), token_ids(device)
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = eager.generate(ids, **settings)
    with Calls() as calls:
        found = ours.generate(ids, **settings)
    assert torch.equal(found, expected)
    assert len(calls.of("experts")) == 6 * len(expert_modules(ours))


# transformers' paged cache cannot hold the latent keys of deepseek_v3.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "deepseek_v3"])
def test_continuous_batching(device, monkeypatch, family):
    """generate_batch serves ragged prompts together, with the tokens of eager's generate for each alone."""
    eager = tiny_model(family, device).eval()
    ours, steps, rows = in_fused_moe(eager), 6, []
    prompts = [ids[: 7 * i + 3].tolist() for i, ids in enumerate(token_ids(device))]
    expected = [
        eager.generate(torch.tensor([prompt], device=device), max_new_tokens=steps, do_sample=False)[0]
        for prompt in prompts
    ]

    def experts_forward(experts, hidden_states, *args):
        rows.append(hidden_states.size(0))
        return fused_moe.transformers.experts_forward(experts, hidden_states, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "fused_moe", experts_forward)
    settings = GenerationConfig(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    for graphs in (False, True) if device.type == "cuda" else (False,):
        cache = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, use_cuda_graph=graphs)
        rows.clear()
        found = ours.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=cache
        ).values()
        for prompt, tokens, out in zip(prompts, expected, found, strict=True):
            assert out.error is None and prompt + out.generated_tokens == tokens.tolist()
        assert max(rows) >= sum(map(len, prompts))  # more if padded for a graph


@ALL_FAMILIES
def test_generate_compiled_with_a_static_cache(device, family):
    """The decode step is one graph, compiled once for all positions, and gives eager's tokens."""
    eager = tiny_model(family, device).eval()
    ours, ids, steps = in_fused_moe(eager), token_ids(device), 6
    expected = eager.generate(ids, max_new_tokens=steps + 1, do_sample=False)
    prompt = ids.size(1)
    cache = StaticCache(config=ours.config, max_cache_len=prompt + steps)
    counter = CompileCounterWithBackend("aot_eager")
    decode = torch.compile(ours.forward, backend=counter, fullgraph=True)

    def last_token(forward, tokens, positions):
        logits = forward(tokens, past_key_values=cache, cache_position=positions, use_cache=True).logits
        return logits[:, -1:].argmax(-1)

    positions = torch.arange(prompt + steps, device=device)
    with torch.no_grad():
        found = [ids, last_token(ours.forward, ids, positions[:prompt])]
        for i in range(prompt, prompt + steps):
            found.append(last_token(decode, found[-1], positions[i : i + 1]))
    assert torch.equal(torch.cat(found, 1), expected)
    # The cache of a sliding window counts in Python: its second step makes that number dynamic.
    assert counter.frame_count == 1 + (family == "gpt_oss")


def test_from_pretrained(device, tmp_path):
    """The name is known to from_pretrained, and the checkpoint's names and layout stay transformers'."""
    saved = tiny_model("qwen3_moe", device)
    saved.save_pretrained(tmp_path)
    chosen = {"experts_implementation": "fused_moe", "attn_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **chosen).to(device)
    assert loaded.config._experts_implementation == "fused_moe"
    assert_same_bits(saved.state_dict(), loaded.state_dict())
    ids = token_ids(device)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, in_fused_moe(saved)(ids).logits)


def test_checkpointing_gives_the_same_gradients(device):
    """Gradient checkpointing gives the same bits."""
    ours, ids = in_fused_moe(tiny_model("qwen3_moe", device)).train(), token_ids(device)
    grads = []
    for _ in range(2):
        ours.zero_grad()
        ours(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in ours.named_parameters()})
        # the newer name, if transformers has it
        getattr(ours, "activation_checkpointing_enable", ours.gradient_checkpointing_enable)()
    assert_same_bits(*grads)


# --- experts alone --------------------------------------------------------------------------------

EXPERTS = {
    "halves": MixtralExperts,
    "halves.T": AriaExperts,
    "interleaved.T, biases, clamped": GptOssExperts,
    "ungated": NemotronHExperts,
}
# Newer releases of transformers have more classes with the interface.
EXPERTS = {kind: c for kind, c in EXPERTS.items() if hasattr(c.forward, "__wrapped__")}
ALL_EXPERTS = pytest.mark.parametrize("kind", EXPERTS)
T, D, F, E, K = 33, 37, 29, 5, 2


class ExpertsConfig(SimpleNamespace):
    """As transformers' configurations keep the implementation."""

    @property
    def _experts_implementation(self) -> str:
        return self._experts_implementation_internal

    @_experts_implementation.setter
    def _experts_implementation(self, name: str) -> None:
        self._experts_implementation_internal = name


def experts_config(**more) -> ExpertsConfig:
    """A configuration with every name that a class may use for a size."""
    sizes = {
        "hidden_size": D,
        "moe_hidden_size": D,
        "intermediate_size": F,
        "moe_intermediate_size": F,
        "moe_latent_size": None,
        "num_local_experts": E,
        "moe_num_experts": E,
        "n_routed_experts": E,
        "hidden_act": "silu",
        "mlp_hidden_act": "relu",
        "swiglu_alpha": 1.5,
        "swiglu_limit": 1.0,
        "post_norm_eps": 1e-6,
        "_experts_implementation_internal": "fused_moe",
    }
    return ExpertsConfig(**{**sizes, **more})


class Experts:
    """One module of experts, and the differentiable inputs of a call: x, scores and parameters."""

    def __init__(self, experts_class, device, dtype=F32, *, tokens=T, score_dtype=F32, **config):
        if dtype != F32:  # as Case.limit
            config = {"swiglu_limit": 7.0, **config}
        self.module = experts_class(experts_config(**config)).to(device, dtype)
        width = config.get("hidden_size", D)
        parameters = dict(self.module.named_parameters())
        values = {n: torch.randn(p.shape, dtype=F64) * 0.2 for n, p in parameters.items()}
        values["x"] = torch.randn(tokens, width, dtype=F64)
        self.inputs = {n: v.to(device, dtype) for n, v in values.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.inputs[name])
        self.inputs["scores"] = torch.rand(tokens, K, dtype=F64).add(0.1).to(device, score_dtype)
        self.dout = torch.randn(tokens, width, dtype=F64).to(device, dtype)
        self.ids = make_ids("random", tokens, K, E).to(device)

    def run(self, implementation: str, inputs=None, dout=None, ids=None) -> dict:
        """out and the gradient of every input."""
        self.module.config._experts_implementation = implementation

        def call(x, scores, ids, **parameters):
            return functional_call(self.module, parameters, (x, ids, scores))

        dout = self.dout if dout is None else dout
        ids = self.ids if ids is None else ids
        return forward_backward(call, inputs or self.inputs, dout, ids=ids)

    def exact(self) -> dict:
        return self.run("eager", to_double(self.inputs), to_double(self.dout))

    def check(self, **changed) -> dict:
        """Our result, checked to be as accurate as eager. `changed` is the same call with other storage."""
        ours = self.run("fused_moe", **changed)
        assert_as_good(ours, self.run("eager"), self.exact())
        return ours


@ALL_EXPERTS
@BOTH_DTYPES
@pytest.mark.parametrize("score_dtype", (F32, BF16), ids=("scores f32", "scores bf16"))
def test_experts(device, dtype, score_dtype, kind):
    """Every layout that transformers stores, with scores of either dtype: output and all gradients."""
    ours = Experts(EXPERTS[kind], device, dtype, score_dtype=score_dtype).check()
    assert ours["out"].dtype == dtype and ours["dscores"].dtype == score_dtype


@pytest.mark.parametrize(
    "hidden_act", ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "swish")
)
def test_activations(device, hidden_act):
    """The other supported activations."""
    experts = Experts(MixtralExperts, device, hidden_act=hidden_act)
    with Calls() as calls:
        experts.check()
    assert calls.of("experts_up")


@ALL_EXPERTS
@pytest.mark.parametrize("tokens", (0, 1))
def test_few_tokens(device, tokens, kind):
    """No token or one, as on a rank of a sharded batch, in forward and backward."""
    experts = Experts(EXPERTS[kind], device, tokens=tokens)
    if tokens:
        experts.check()
        return
    for name, value in experts.run("fused_moe").items():
        assert value.shape == (experts.dout if name == "out" else experts.inputs[name[1:]]).shape
        assert not value.count_nonzero(), name


@ALL_EXPERTS
@BOTH_DTYPES
@pytest.mark.usefixtures("poison")
def test_sentinels(device, dtype, kind):
    """Ids below 0, or of E or more, are treated as remote: no contribution, no NaN from unwritten memory, and
    a zero score gradient."""
    experts = Experts(EXPERTS[kind], device, dtype)
    foreign = torch.rand(T, K, device=device) < 0.4
    foreign[3] = True  # a token without a local expert
    experts.inputs["scores"].masked_fill_(foreign, 0)
    beyond = E + torch.randint(4, (T, K), device=device)
    beyond[::2] = -1
    ours = experts.run("fused_moe", ids=experts.ids.where(~foreign, beyond))
    # Eager gives the same slots some expert, with a score of zero.
    eager, exact = experts.run("eager"), experts.exact()
    for result in (eager, exact):
        result["dscores"].masked_fill_(foreign, 0)
    assert_as_good(ours, eager, exact)
    assert not ours["dscores"][foreign].count_nonzero()
    assert not ours["out"][3].count_nonzero() and not ours["dx"][3].count_nonzero()


@ALL_EXPERTS
@BOTH_DTYPES
@pytest.mark.parametrize("form", [f for f in FORMS if f != "contiguous"])
def test_storage(device, dtype, form, kind):
    """Pointers that are not 16-byte aligned, as in memory-mapped checkpoints, and any strides."""
    experts, form = Experts(EXPERTS[kind], device, dtype), FORMS[form]
    inputs = {n: form(t) for n, t in experts.inputs.items()}
    experts.check(inputs=inputs, dout=form(experts.dout), ids=form(experts.ids))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_ids_of_either_dtype(device, dtype):
    """Routers give int64, token dispatchers may give int32."""
    experts = Experts(MixtralExperts, device)
    assert_same_bits(experts.run("fused_moe", ids=experts.ids.to(dtype)), experts.run("fused_moe"))


def test_tokens_of_another_dtype(device):
    """A float32 norm before bfloat16 experts: computed in the weights' dtype, returned in the tokens'."""
    experts = Experts(MixtralExperts, device, BF16)
    wide = experts.inputs | {"x": experts.inputs["x"].float()}
    found = experts.run("fused_moe", wide, experts.dout.float())
    assert found["out"].dtype == found["dx"].dtype == F32
    expected = experts.run("fused_moe")
    assert_same_bits({n: v.to(expected[n].dtype) for n, v in found.items()}, expected)


@ALL_EXPERTS
def test_autocast(device, kind):
    """float32 experts under autocast: GEMMs in bfloat16, results and gradients in float32."""
    experts = Experts(EXPERTS[kind], device, swiglu_limit=7.0)
    with torch.autocast(device.type, BF16):
        ours, eager = experts.run("fused_moe"), experts.run("eager")
    slack = LOOSE * torch.finfo(BF16).eps / torch.finfo(F32).eps
    assert_as_good(ours, eager, experts.exact(), slack)


@ALL_EXPERTS
def test_compile(device, kind):
    """One graph, the checks of the module included: the same bits."""
    experts = Experts(EXPERTS[kind], device)
    x, scores = (experts.inputs[n].detach().requires_grad_() for n in ("x", "scores"))
    try:
        out = torch.compile(experts.module, fullgraph=True, backend="aot_eager")(x, experts.ids, scores)
        out.backward(experts.dout)
    finally:
        torch._dynamo.reset()
    grads = {f"d{n}": p.grad for n, p in experts.module.named_parameters()}
    found = {"out": out.detach(), **grads, "dx": x.grad, "dscores": scores.grad}
    assert_same_bits({n: found[n] for n in experts.run("fused_moe")}, experts.run("fused_moe"))


# --- FP8 training ---------------------------------------------------------------------------------

WIDE = {"hidden_size": 128, "moe_hidden_size": 128, "intermediate_size": 768, "moe_intermediate_size": 768}
FP8_EXPERTS = [kind for kind, c in EXPERTS.items() if c is not GptOssExperts]


def assert_near_16_bits(found: dict, expected: dict, most: float) -> None:
    """Apart by e4m3's rounding: not by more, and not by so little that nothing was rounded."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert 0.01 * value.norm() < (found[name] - value).norm() < most * value.norm(), name


@pytest.mark.parametrize("kind", FP8_EXPERTS)
@pytest.mark.usefixtures("fresh_warnings")
def test_fp8(cpu, kind):
    """Every layout, with and without gradients, and under autocast: float32 weights stay as they are."""
    for dtype, autocast in ((BF16, False), (F32, False), (F32, True)):
        experts = Experts(EXPERTS[kind], "cpu", dtype, **WIDE)
        with torch.autocast("cpu", BF16, enabled=autocast), warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = experts.run("fused_moe")
            with Calls() as calls:
                found = experts.run("fused_moe_fp8")
            with torch.no_grad():
                out = experts.module(experts.inputs["x"], experts.ids, experts.inputs["scores"])
        # The gradient of relu is a step, and rounding moves values over it.
        assert_near_16_bits(found, expected, 0.2 if kind == "ungated" else 0.1)
        assert {args[0].dtype for args, _ in calls.of("fp8_weight")} == {dtype}
        assert calls.of("fp8_up_backward") and not calls.of("experts_up")
        assert torch.equal(out, found["out"])


@pytest.mark.usefixtures("fresh_warnings")
def test_fp8_is_for_experts_that_gain(cpu):
    """Others have the bits of fused_moe, and one warning says why."""
    narrow, odd, many = WIDE | {"intermediate_size": 640}, WIDE | {"intermediate_size": 800}, WIDE
    pays, sizes = "FP8 pays with F >= 768 and E <= 16 * K, found D=128, ", "E=5, K=2"
    cases = (
        (MixtralExperts, BF16, narrow, f"{pays}F=640, {sizes}"),
        (
            MixtralExperts,
            BF16,
            odd,
            f"FP8 expected D and F that are multiples of 128, found D=128, F=800, {sizes}",
        ),
        (MixtralExperts, BF16, many | {"num_local_experts": 33}, f"{pays}F=768, E=33, K=2"),
        (GptOssExperts, BF16, WIDE, "they have biases"),
        (
            MixtralExperts,
            F64,
            WIDE,
            "it takes bfloat16, and they have tokens of torch.float64 and weights of ",
        ),
    )
    for experts_class, dtype, config, reason in cases:
        experts, name = Experts(experts_class, "cpu", dtype, **config), experts_class.__name__
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [experts.run("fused_moe_fp8") for _ in range(2)]
        [text] = [str(w.message) for w in caught]
        assert text.startswith(f"fused_moe does not compute {name} in FP8: {reason}")
        for result in found:
            assert_same_bits(result, experts.run("fused_moe"))


@pytest.mark.usefixtures("fresh_warnings")
def test_fp8_compiles(cpu):
    """In one graph: the same bits; experts that do not gain, too."""
    for config in (WIDE, WIDE | {"intermediate_size": 640}):
        experts = Experts(MixtralExperts, "cpu", BF16, **config)
        expected = experts.run("fused_moe_fp8")
        fused_moe.transformers.experts._warned.clear()  # the graph has the warning
        x = experts.inputs["x"].detach().requires_grad_()
        try:
            compiled = torch.compile(experts.module, fullgraph=True, backend="aot_eager")
            out = compiled(x, experts.ids, experts.inputs["scores"])
            out.backward(experts.dout)
        finally:
            torch._dynamo.reset()
        grads = {f"d{n}": p.grad for n, p in experts.module.named_parameters()}
        found = {"out": out.detach(), "dx": x.grad, **grads}
        assert_same_bits(found, {n: expected[n] for n in found})


def fp8_model() -> nn.Module:
    wide = {"hidden_size": 128, "moe_intermediate_size": 768, "vocab_size": 96}
    return tiny_model("qwen3_moe", "cpu", **wide)


def test_a_model_in_fp8(cpu, tmp_path):
    """from_pretrained knows the name. Loss and gradients are near those in float32."""
    fp8_model().save_pretrained(tmp_path)
    losses, grads, ids = [], [], token_ids("cpu")
    for name in ("fused_moe", "fused_moe_fp8"):
        chosen = {"experts_implementation": name, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **chosen)
        with Calls() as calls:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        assert len(calls.of("fp8_up")) == (2 if name == "fused_moe_fp8" else 0)
        losses.append(loss.item())
        grads.append(torch.cat([p.grad.flatten() for p in model.lm_head.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]
    assert (grads[1] - grads[0]).norm() < 0.2 * grads[0].norm()


def test_quantised_experts_ignore_fp8(cpu):
    """They compute as in fused_moe, and only ours run them."""
    model, ids = fp8_model(), token_ids("cpu")
    model.set_experts_implementation("fused_moe_fp8")
    fused_moe.transformers.quantize_experts(model, "int8")
    with torch.no_grad():
        found = model(ids).logits
        model.set_experts_implementation("fused_moe")
        assert torch.equal(found, model(ids).logits)
        model.set_experts_implementation("eager")
        with pytest.raises(ValueError, match="experts_implementation='fused_moe' for packed experts"):
            model(ids)


def train_fp8_on_rank(rank: int, folder) -> None:
    """One of two processes: a model under FSDP2, and how many transposes of codes forward made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    fused_moe.transformers.register()
    chosen = {"experts_implementation": "fused_moe_fp8", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **chosen)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    ids = torch.load(folder / "ids.pt")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    gathered = fused_moe.transformers.experts._fp8_training().is_gathered
    torch.save(({"loss": loss.detach(), **grads}, gathered), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_fp8_under_fsdp(cpu, tmp_path):
    """Two processes with the same batch compute loss and gradients of one that is not sharded. No codes of
    gathered weights are kept."""
    model, ids = fp8_model(), token_ids("cpu")
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    torch.multiprocessing.spawn(train_fp8_on_rank, (tmp_path,), nprocs=2)
    model.set_experts_implementation("fused_moe_fp8")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    expected = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    for rank in range(2):
        found, gathered = torch.load(tmp_path / f"{rank}.pt")
        assert gathered and found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 1e-3 * value.norm(), name
    assert not fused_moe.transformers.experts._fp8_training().is_gathered


# --- unsupported experts --------------------------------------------------------------------------


# model -> its class of experts, its configuration, and the warning
UNKNOWN = {
    "deepseek_v4": ("DeepseekV4Experts", {"hidden_act": "gelu"}, "the gate .*DeepseekV4Experts._apply_gate"),
    "muse_spark": ("MuseSparkExperts", {}, "the norm after each expert"),
    "mixtral": ("MixtralExperts", {"hidden_act": "quick_gelu"}, "the activation .*QuickGELUActivation"),
    "nemotron_h": ("NemotronHExperts", {"mlp_hidden_act": "relu6"}, "the activation .*ReLU6"),
}


RUNS_GROUPED_MM = "which runs grouped_mm, as transformers would choose"
WHOLE = {"hidden_size": 48, "moe_hidden_size": 48, "intermediate_size": 32, "moe_intermediate_size": 32}


def unknown_experts(model: str, device) -> tuple["Experts", str]:
    """Experts of sizes that grouped_mm takes, and the warning."""
    name, config, reason = UNKNOWN[model]
    module = f"transformers.models.{model}.modeling_{model}"
    module = pytest.importorskip(module, reason=f"this transformers has no {model}", exc_type=ImportError)
    experts = Experts(getattr(module, name), device, **WHOLE, **config)
    return experts, f"{reason} of {name}, {RUNS_GROUPED_MM}"


@pytest.mark.parametrize("model", UNKNOWN)
@pytest.mark.usefixtures("fresh_warnings")
def test_the_unknown_runs_as_without_us(device, model):
    """Unsupported experts run transformers' default, with the same bits. A warning names the reason once."""
    experts, warning = unknown_experts(model, device)
    with pytest.warns(UserWarning, match=warning), Calls() as calls:
        found = experts.run("fused_moe")
    assert not calls.of("experts_up") and not calls.of("experts")
    assert experts.module.config._experts_implementation == "grouped_mm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(found, experts.run("fused_moe"))
    assert_same_bits(found, experts.run("grouped_mm"))
    assert_as_good(found, experts.run("eager"), experts.exact())


@pytest.mark.parametrize("model", UNKNOWN)
@pytest.mark.usefixtures("fresh_warnings")
def test_the_unknown_compiles_as_without_us(device, model):
    """In one graph, which changes no configuration."""
    experts, warning = unknown_experts(model, device)
    call = experts.inputs["x"], experts.ids, experts.inputs["scores"]

    def compiled(name: str) -> torch.Tensor:
        experts.module.config._experts_implementation = name
        try:
            with torch.no_grad():  # with gradients, earlier releases cannot compile theirs in float32
                return torch.compile(experts.module, fullgraph=True, backend="aot_eager")(*call)
        finally:
            torch._dynamo.reset()
            assert experts.module.config._experts_implementation == name

    with pytest.warns(UserWarning, match=warning):
        found = compiled("fused_moe")
    assert torch.equal(found, compiled("grouped_mm"))


@pytest.mark.usefixtures("fresh_warnings")
def test_a_model_warns_once(device):
    """Not once per layer, and not once per step."""
    theirs = tiny_model("mixtral", device, hidden_act="quick_gelu", intermediate_size=32)
    theirs.set_experts_implementation("grouped_mm")
    ours, ids = in_fused_moe(theirs), token_ids(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = [ours(ids).logits for _ in range(2)]
    assert [str(w.message) for w in caught if "fused_moe" in str(w.message)] == [
        "fused_moe does not compute the activation transformers.activations.QuickGELUActivation of "
        f"MixtralExperts, {RUNS_GROUPED_MM}"
    ]
    assert ours.config._experts_implementation == "grouped_mm"
    assert torch.equal(logits[0], theirs(ids).logits) and torch.equal(*logits)


@pytest.mark.usefixtures("fresh_warnings")
def test_unknown_experts_of_a_model_that_wants_eager(device, monkeypatch):
    """Where transformers itself would choose eager, so do we."""
    family = "openai_privacy_filter"
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", exc_type=ImportError)
    unknown = modeling.OpenAIPrivacyFilterExperts._apply_gate
    monkeypatch.setattr(modeling.OpenAIPrivacyFilterExperts, "_apply_gate", lambda *args: unknown(*args) / 2)
    config = tiny_config(family, num_local_experts=NUM_EXPERTS, head_dim=8)
    model = AutoModel.from_config(config, experts_implementation="fused_moe").to(device)
    ids = token_ids(device)
    with pytest.warns(UserWarning, match="which runs eager, as transformers would choose"):
        found = model(ids).last_hidden_state
    assert model.config._experts_implementation == "eager"
    assert AutoModel.from_config(config).config._experts_implementation == "eager"
    assert torch.equal(model(ids).last_hidden_state, found)


@pytest.mark.parametrize("cache", ("dynamic", "static"))
@pytest.mark.usefixtures("fresh_warnings")
def test_the_unknown_decodes_as_without_us(device, monkeypatch, cache):
    """generate() runs the same functions for the prompt and for each token after it, and gives their tokens:
    on GPUs batched_mm for all but the prompt."""
    names = []
    for name in ("grouped_mm", "batched_mm"):

        def record(*args, name=name, forward=ALL_EXPERTS_FUNCTIONS[name]):
            names.append(name)
            return forward(*args)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, record)
    model = tiny_model("mixtral", device, hidden_act="quick_gelu", intermediate_size=32).eval()
    ids = token_ids(device)
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "disable_compile": True,
        "cache_implementation": cache,
    }

    def generated(implementation: str) -> tuple[list, list[str]]:
        copied = copy.deepcopy(model)
        copied.set_experts_implementation(implementation)
        names.clear()
        tokens = [copied.generate(ids, **settings).tolist() for _ in range(2)]
        assert copied.config._experts_implementation == "grouped_mm"
        return tokens, names.copy()

    with pytest.warns(UserWarning, match=RUNS_GROUPED_MM):
        found = generated("fused_moe")
    assert found == generated("grouped_mm")
    num_layers, decode = 2, "grouped_mm" if device.type == "cpu" else "batched_mm"
    assert found[1] == 2 * (["grouped_mm"] * num_layers + [decode] * 3 * num_layers)


# --- LoRA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("qwen3_moe", "gpt_oss"))
@BOTH_DTYPES
def test_lora_on_the_expert_weights(device, dtype, family):
    """PEFT's adapters of the packed weights get eager's gradients, and a few steps fit one batch."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    eager = peft.get_peft_model(tiny_model(family, device, dtype), config)
    ours, ids = copy.deepcopy(eager), token_ids(device)
    ours.get_base_model().set_experts_implementation("fused_moe")
    adapters = [n for n, p in ours.named_parameters() if p.requires_grad]
    assert len(adapters) == 2 * 2 * 2 and all("lora_" in n for n in adapters)
    assert_models_agree(eager, ours, ids)

    optimizer = torch.optim.Adam([p for p in ours.parameters() if p.requires_grad], lr=0.02)
    losses = []
    with Calls() as calls:
        for _ in range(5):
            loss = ours(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert calls.of("wgrad") and not calls.of("experts_up_backward")  # test_peft.py has more of these


# --- the import -----------------------------------------------------------------------------------


def test_transformers_is_imported_by_our_module_alone(cpu):
    """fused_moe does not need it. If it is missing or too old, the message says what to install."""
    program = """
import sys
import fused_moe
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    import fused_moe.transformers
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'transformers" in found.stdout
