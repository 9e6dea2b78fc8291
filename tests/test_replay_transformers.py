"""record_routing and replay_routing on transformers' models: the scores of each router's own rule."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from test_transformers import in_fused_moe, registered, tiny_model, token_ids  # noqa: E402, F401
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from fused_moe import Routes, record_routing, replay_routing  # noqa: E402
from fused_moe.transformers.replay import _rule_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")


def make_model(family):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "shared_expert_intermediate_size": 24,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[family](**sizes)
    model = AutoModelForCausalLM.from_config(
        config, experts_implementation="fused_moe", attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def gradients(model, tokens, call=None):
    model.zero_grad()
    out = (model if call is None else call)(tokens).logits
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def routers_of(model):
    return [m for m in model.modules() if _rule_of(m) is not None]


@pytest.mark.parametrize(
    "family, mode",
    [(family, mode) for family in FAMILIES for mode in ("plain", "checkpointing")]
    + [("qwen3_moe", "compiled")],
)
def test_replay(family, mode):
    """The bits of the model that chose so itself; other experts are taken, too."""
    model, tokens = make_model(family), token_ids("cpu")
    call = None
    if mode == "compiled":
        call = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            call(tokens)  # before there is a context
    if mode == "checkpointing":  # expected, too: on some CPUs PyTorch's own GEMMs have other bits under it
        model.gradient_checkpointing_enable()
        model.train()
    expected = gradients(model, tokens)
    with record_routing(model) as routes:
        model(tokens)
    assert len(routes) == 2 and routes.num_tokens == [tokens.numel()] * 2
    with replay_routing(model, routes):
        found = gradients(model, tokens, call)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **({} if mode == "compiled" else {"rtol": 0, "atol": 0}))
    other = Routes([(ids.long() + 1) % 8 for ids in routes], 8)
    with replay_routing(model, other), record_routing(model) as again:
        found = gradients(model, tokens, call)
    for a, b in zip(again, other, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_before(grad):
    """Code that was compiled before the first context, in the same grad mode, records and replays."""
    model, tokens = make_model("qwen3_moe"), token_ids("cpu")
    compiled = torch.compile(model, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        compiled(tokens)
        with record_routing(model) as routes:
            compiled(tokens)
        assert routes.num_tokens == [tokens.numel()] * 2
        other = Routes([(ids.long() + 1) % 8 for ids in routes], 8)
        with replay_routing(model, other):
            found = compiled(tokens).logits
        with replay_routing(model, other):
            expected = model(tokens).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores(family):
    """A router that is made to choose other experts by its weights' scores gives these scores; a router that
    replays them has the same, and tokens of -1 are the router's."""
    model = make_model(family)
    router = routers_of(model)[0]
    x = torch.randn(1, 40, 32) if family == "deepseek_v3" else torch.randn(40, 32)
    logits, scores, ids = router(x)
    shuffled = ids.flip(1)
    layers = [ids.clone().flip(1) for _ in routers_of(model)]
    layers[0][::2] = -1
    others = routers_of(model)[1:]
    with replay_routing(model, Routes(layers, 8)):
        _, found, taken = router(x)
        for other in others:
            other(x)
    assert torch.equal(taken[1::2], shuffled[1::2]) and torch.equal(taken[::2], ids[::2])
    order = torch.where(torch.arange(40)[:, None] % 2 == 0, scores, scores.flip(1))
    torch.testing.assert_close(found, order)
    (grad,) = torch.autograd.grad(found.square().sum(), router.weight)
    _, scores, _ = router(x)
    (expected,) = torch.autograd.grad(scores.square().sum(), router.weight)
    torch.testing.assert_close(grad, expected)


def test_remote_slots():
    """A slot of -1 has no score, and the others share its part where a rule normalises."""
    for family in FAMILIES:
        model = make_model(family)
        routers, x = routers_of(model), torch.randn(5, 32)
        ids = torch.tensor([[3, -1]]).expand(5, 2)
        with replay_routing(model, Routes([ids] * 2, 8)):
            found = [router(x)[1] for router in routers]
        for scores in found:
            assert not scores[:, 1].any() and scores[:, 0].gt(0).all()


def test_a_copy_has_no_tape():
    model, tokens = make_model("mixtral"), token_ids("cpu")
    with record_routing(model) as routes:
        copy.deepcopy(model)(tokens)
    assert routes.num_tokens == [0, 0]


def test_other_routers():
    """A class without a rule is named."""
    model = in_fused_moe(tiny_model("mixtral", "cpu"))
    block = next(m for m in model.modules() if hasattr(m, "experts"))
    router = next(m for m in block.children() if _rule_of(m) is not None)

    class Other(type(router)):
        def forward(self, x):
            return super().forward(x)

    router.__class__ = Other
    with pytest.raises(RuntimeError, match="expected a router of one of the classes .* found a Mixtral"):
        with record_routing(model):
            pass


def test_routes_of_another_model():
    model = make_model("mixtral")
    with pytest.raises(ValueError, match="K = 2, found K = 3"):
        with replay_routing(model, Routes([torch.zeros(4, 3, dtype=torch.int64)] * 2, 8)):
            pass
