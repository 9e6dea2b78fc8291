"""LoRA of the experts: against the reference, which adds scale * b @ a to the weights."""

import contextlib
import copy
import io
import math
import warnings

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    LAYOUTS,
    LOOSE,
    Calls,
    Case,
    assert_as_good,
    forward_backward,
    quantize_options,
    to_double,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrize, prune

from fused_moe import (
    FusedMoE,
    LoRA,
    QuantizedWeight,
    add_lora,
    fused_experts,
    grouped_mlp,
    quantize,
    reference,
)

pytestmark = pytest.mark.usefixtures("poison")

NAMES = ("a1", "b1", "a2", "b2", "a3", "b3")


def adapters(case: Case, device, rank=8, names="123") -> dict:
    """{name: tensor} of the weights that exist, among those of `names`."""
    layout, gated, _, _ = LAYOUTS[case.layout]
    E, D, F = case.num_experts, case.dim, case.hidden
    rows = {"1": F if layout == "separate" else 2 * F, "2": D, "3": F}
    cols = {"1": D, "2": F, "3": D}
    if layout != "separate" or not gated:
        names = names.replace("3", "")
    made = {}
    for i in names:
        made[f"lora_a{i}"] = torch.randn(E, rank, cols[i], dtype=F64) / cols[i] ** 0.5
        made[f"lora_b{i}"] = torch.randn(E, rows[i], rank, dtype=F64) / rank**0.5
    return {n: t.to(device, case.dtype) for n, t in made.items()}


def with_lora(function):
    """The function with the adapters as separate arguments, so that each has a gradient."""

    def call(scale=1.0, **arguments):
        lora = LoRA(**{n: arguments.pop(f"lora_{n}", None) for n in NAMES}, scale=scale)
        return function(**arguments, lora=lora)

    return call


def check_lora(
    case: Case, device, *, quantized: str | None = None, scale=0.7, rank=8, names="123", frozen=True
):
    """out and the gradients of x, scores, biases and adapters, and of weights that are not frozen."""
    inputs = case.inputs(device) | adapters(case, device, rank, names)
    weights = {}
    if frozen:
        weights = {n: inputs.pop(n) for n in ("w1", "w2", "w3")}
    plain = weights
    if quantized:
        weights = {
            n: w if w is None else quantize(w, quantized, **quantize_options(quantized))
            for n, w in weights.items()
        }
        plain = {n: w if w is None else w.dequantize(case.dtype) for n, w in weights.items()}
    fixed = {"ids": case.ids(device), "score_on": case.score_on, "scale": scale, **case.options}
    dout = case.dout(device)
    ours = forward_backward(with_lora(fused_experts), inputs, dout, **weights, **fixed)
    eager = forward_backward(with_lora(reference.fused_experts), inputs, dout, **plain, **fixed)
    exact = forward_backward(
        with_lora(reference.fused_experts), to_double(inputs), dout.double(), **to_double(plain), **fixed
    )
    assert_as_good(ours, eager, exact, LOOSE)


@pytest.mark.quick
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_layouts(device, layout, dtype):
    """Every layout of float weights, transposed ones, too."""
    check_lora(Case(layout=layout, dtype=dtype, bias=True), device)


@pytest.mark.quick
@pytest.mark.parametrize("format", ("fp8_block", "fp8", "int8", "int4", "mxfp4"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("hidden", (32, 64), ids=("published", "tiles"))
def test_quantised_weights(device, format, dtype, hidden):
    case = Case(dim=64, hidden=hidden, dtype=dtype, score_on="input", activation="gelu")
    check_lora(case, device, quantized=format)


@pytest.mark.parametrize("activation", ("swiglu_limited", "relu2", "situ"))
@pytest.mark.parametrize("layout", ("halves", "ungated"))
def test_activations(device, layout, activation):
    """On float and on quantised weights."""
    case = Case(dim=64, hidden=64, layout=layout, activation=activation, bias=True)
    check_lora(case, device, names="12")
    check_lora(case, device, names="12", quantized="int8")


@pytest.mark.parametrize("names", ("1", "2", "3", "13", ""))
def test_some_weights_have_none(device, names):
    check_lora(Case(), device, names=names)


def test_weights_that_train_beside_their_adapters(device):
    check_lora(Case(bias=True), device, frozen=False)


@given(
    tokens=st.sampled_from((0, 1, 5, 33)),
    dim=st.sampled_from((7, 33, 64)),
    hidden=st.sampled_from((8, 16, 37)),
    rank=st.sampled_from((1, 3, 8, 16)),
    routing=st.sampled_from(("random", "one", "gaps", "sentinels", "none")),
    layout=st.sampled_from(sorted(LAYOUTS)),
    scale=st.sampled_from((0.0, 1.0, 2.0)),
    dtype=st.sampled_from((F32, BF16, F64)),
    seed=st.integers(0, 999),
)
def test_any_case(device, tokens, dim, hidden, rank, routing, layout, scale, dtype, seed):
    torch.manual_seed(seed)
    case = Case(tokens, dim, hidden, 4, 2, dtype, routing, layout, seed=seed)
    check_lora(case, device, rank=rank, scale=scale)


def test_grouped_mlp(device):
    case = Case(num_experts=3, bias=True)
    inputs = {n: v for n, v in case.inputs(device).items() if n not in ("x", "scores")}
    inputs |= {"x_rows": torch.randn(40, case.dim, device=device), **adapters(case, device)}
    counts, dout = torch.tensor([20, 0, 13], device=device), torch.randn(40, case.dim, device=device)
    ours = forward_backward(with_lora(grouped_mlp), inputs, dout, counts=counts)
    expected = forward_backward(with_lora(reference.grouped_mlp), inputs, dout, counts=counts)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_no_product_of_adapters_is_formed(device):
    """No tensor of a weight's size is made, forward or backward, with weights of 16 bits."""
    case = Case(tokens=5, dim=64, hidden=96, num_experts=8, dtype=BF16)
    inputs, lora = case.inputs(device), adapters(case, device)
    leaves = [inputs["x"].requires_grad_(), *(t.requires_grad_() for t in lora.values())]
    with Calls() as calls:
        out = with_lora(fused_experts)(**inputs, **lora, ids=case.ids(device))
        torch.autograd.grad(out.sum(), leaves)
    results = [
        r for _, _, result in calls.calls for r in (result if isinstance(result, tuple) else (result,))
    ]
    own = [r for r in results if torch.is_tensor(r) and r.untyped_storage().data_ptr() not in
           {w.untyped_storage().data_ptr() for w in (inputs["w1"], inputs["w2"], inputs["w3"])}]  # fmt: skip
    assert max(r.untyped_storage().nbytes() for r in own) < 2 * 8 * 64 * 96


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("format", (None, "int4"))
def test_float32_adapters_beside_16_bits(device, dtype, format):
    """The bits of rounded adapters; gradients are float32. The reference rounds them, too."""
    case = Case(dim=64, hidden=32, dtype=dtype)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    weights = {n: inputs.pop(n) for n in ("w1", "w2", "w3")}
    plain = weights
    if format:
        weights = {n: quantize(w, format, **quantize_options(format)) for n, w in weights.items()}
        plain = {n: w.dequantize(dtype) for n, w in weights.items()}
    wide = {n: t.float() + 1e-3 * torch.randn_like(t.float()) for n, t in adapters(case, device).items()}
    rounded = {n: t.to(dtype) for n, t in wide.items()}
    fixed = {"ids": ids, "scale": 0.7}
    ours = forward_backward(with_lora(fused_experts), inputs | wide, dout, **weights, **fixed)
    expected = forward_backward(with_lora(fused_experts), inputs | rounded, dout, **weights, **fixed)
    eager = forward_backward(with_lora(reference.fused_experts), inputs | wide, dout, **plain, **fixed)
    for name, value in expected.items():
        assert torch.equal(ours[name], value.to(ours[name].dtype)), name
        assert ours[name].dtype == (F32 if "lora" in name else value.dtype) == eager[name].dtype, name
    exact = forward_backward(
        with_lora(reference.fused_experts),
        to_double(inputs | rounded),
        dout.double(),
        **to_double(plain),
        **fixed,
    )
    assert_as_good(ours, eager, exact, LOOSE)
    rows = weights | {"x_rows": inputs["x"], "counts": torch.tensor([9, 0, 20, 0, 4], device=device)}
    assert torch.equal(with_lora(grouped_mlp)(**rows, **wide), with_lora(grouped_mlp)(**rows, **rounded))
    with torch.no_grad():
        call = with_lora(fused_experts)
        assert torch.equal(call(**inputs, **weights, **wide, **fixed), ours["out"])
        with torch.autocast(device.type, dtype):
            assert torch.equal(call(**inputs, **weights, **wide, **fixed), ours["out"])


@pytest.mark.parametrize("format", (None, "int4"))
def test_a_layer_of_16_bits_with_float32_adapters(device, format):
    """add_lora(dtype=torch.float32): optimizer steps that bf16 would round away, eager and compiled."""
    moe = FusedMoE(64, 32, 4, 2, num_shared_experts=1, device=device, dtype=BF16)
    if format:
        quantize(moe, format, **quantize_options(format))
    add_lora(moe, 8, dtype=F32).router.requires_grad_(False)
    x = torch.randn(20, 64, device=device, dtype=BF16)
    trained = [p for p in moe.parameters() if p.requires_grad and p.dtype == F32]
    assert len(trained) == 6
    optimizer = torch.optim.SGD(trained, lr=1e-6)
    for forward in (moe, torch.compile(moe, fullgraph=True, backend="aot_eager")):
        before = moe.experts.lora.b1.detach().clone()
        out = forward(x)
        out.square().mean().backward()
        assert out.dtype == BF16 and all(p.grad.dtype == F32 for p in trained)
        optimizer.step()
        assert (moe.experts.lora.b1 != before).any()
        optimizer.zero_grad()


@pytest.mark.parametrize("format, backend", ((None, "aot_eager"), ("int4", "inductor")))
def test_compile(device, format, backend):
    """One graph, forward and backward. inductor compiles float layers with adapters in test_matrix.py."""
    case = Case(dim=64, hidden=32)
    inputs, lora, ids = case.inputs(device), adapters(case, device), case.ids(device)
    if format:
        inputs |= {n: quantize(inputs[n], format, **quantize_options(format)) for n in ("w1", "w2", "w3")}

    def step(x, a1):
        return with_lora(fused_experts)(**{**inputs, "x": x}, **{**lora, "lora_a1": a1}, ids=ids)

    leaves = inputs["x"].requires_grad_(), lora["lora_a1"].requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    expected = torch.autograd.grad(step(*leaves).square().sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# --- PEFT -------------------------------------------------------------------------------------------------


def test_peft_layout(cpu):
    """delta[e, o, i] = sum over r of B[o, r, e] A[e, r, i], and back."""
    E, rank, D, F = 3, 4, 24, 16
    A, B = torch.randn(E * rank, D), torch.randn(F, rank * E)
    lora = LoRA.from_peft(E, w1=(A, B), scale=0.5)
    delta = torch.einsum("ore,eri->eoi", B.view(F, rank, E), A.view(E, rank, D))
    torch.testing.assert_close(lora.b1 @ lora.a1, delta)
    assert lora.a2 is None and lora.scale == 0.5
    back, *others = lora.to_peft()
    assert torch.equal(back[0], A) and torch.equal(back[1], B) and others == [None, None]
    with pytest.raises(
        ValueError, match=r"w1 of lora_A \(5 \* rank, in\), lora_B \(out, rank \* 5\), found \(12, 24\)"
    ):
        LoRA.from_peft(5, w1=(A, B))
    with pytest.raises(ValueError, match="w2 of lora_A"):
        LoRA.from_peft(E, w2=(A, B[:, :9]))
    with pytest.raises(ValueError, match="num_experts >= 1, found 0"):
        LoRA.from_peft(0, w1=(A, B))


def test_wrong_peft_adapters(cpu):
    """Wrong arguments of from_peft and to_peft."""
    A, B = torch.randn(12, 24), torch.randn(16, 12)
    pair = r"w1 to be a pair \(lora_A.weight, lora_B.weight\), found"
    for arguments, error, message in (
        ({"num_experts": None}, TypeError, "num_experts to be an int, found NoneType"),
        ({"w1": None}, ValueError, "adapters of w1, w2 or w3, found none"),
        ({"w1": {"lora_A": A, "lora_B": B}}, TypeError, f"{pair} dict"),
        ({"w1": A}, TypeError, f"{pair} Tensor"),
        ({"w1": (A,)}, TypeError, f"{pair} tuple"),
        ({"w1": (A, None)}, TypeError, "w1's lora_B to be a tensor, found NoneType"),
        ({"w1": ("A", B)}, TypeError, "w1's lora_A to be a tensor, found str"),
        ({"w1": (A.int(), B)}, TypeError, "w1's lora_A of dtype float32 .*, found torch.int32"),
        ({"w1": (A[0], B)}, ValueError, "w1's lora_A of 2 dimensions, found shape"),
        ({"w1": (A[:0], B[:, :0])}, ValueError, r"w1 of rank >= 1, found lora_A of shape \(0, 24\)"),
        ({"scale": math.nan}, ValueError, "scale to be a finite number, found nan"),
        ({"scale": "1"}, TypeError, "scale to be a number, found str '1'"),
        ({"scale": None}, TypeError, "scale to be a number, found NoneType"),
    ):
        with pytest.raises(error, match=f"from_peft: expected .*{message}"):
            LoRA.from_peft(**{"num_experts": 3, "w1": (A, B)} | arguments)
    a, b = LoRA.from_peft(3, w1=(A, B)).pairs[0]
    for lora, error, message in (
        (LoRA(a1=a), ValueError, "lora.a1 and lora.b1 together, found one of them"),
        (LoRA(a2=a, b2=b[0]), ValueError, "lora.b2 of 3 dimensions"),
        (LoRA(a2=a, b2="b"), TypeError, "lora.b2 to be a tensor, found str"),
    ):
        with pytest.raises(error, match=f"to_peft: expected .*{message}"):
            lora.to_peft()


def test_wrong_adapters_to_load(device):
    """They change nothing."""
    moe = trained_layer(device)
    own = moe.experts.lora()
    before = {n: t.clone() for n, t in moe.state_dict().items()}
    for wrong, error, message in (
        (None, TypeError, "lora to be a fused_moe.LoRA, found NoneType"),
        ({"a1": own.a1}, TypeError, "lora to be a fused_moe.LoRA, found dict"),
        (tuple(own), TypeError, "lora to be a fused_moe.LoRA, found tuple"),
        (own._replace(scale="x"), TypeError, "lora.scale to be a number, found str 'x'"),
        (own._replace(scale=math.nan), ValueError, "lora.scale to be a finite number, found nan"),
        (own._replace(scale=torch.tensor(2.0)), TypeError, "lora.scale to be a number, found Tensor"),
        (own._replace(a3="a"), TypeError, "lora.a3 to be a tensor, found str"),
        (own._replace(a3=own.a3.int()), TypeError, "lora.a3 of dtype .*, found torch.int32"),
        (own._replace(b3=None), ValueError, "lora.a3 and lora.b3 together, found one of them"),
        (own._replace(a3=None, b3=None), ValueError, "adapters of shapes .*'b3'.*, found {'a1'"),
        (
            own._replace(b3=own.b3.to("meta")),
            ValueError,
            "lora's adapters to have values, found some on meta",
        ),
    ):
        with pytest.raises(error, match=f"load: expected {message}"):
            moe.experts.lora.load(wrong)
    with pytest.raises(ValueError, match="the layer's adapters to have values, found some on meta"):
        trained_layer("meta").experts.lora.load(own)
    assert all(torch.equal(moe.state_dict()[n], t) for n, t in before.items())
    check_scale(moe, 4.0)


def test_adapters_of_another_framework(cpu):
    """A layer's adapters take given ones, with their scale; others of other shapes raise."""
    E, rank, D, F = 3, 4, 24, 16
    moe = add_lora(FusedMoE(D, F, E, 2), rank, targets=("w1", "w2"))
    w1, w2 = ((torch.randn(E * rank, i), torch.randn(o, rank * E)) for o, i in ((F, D), (D, F)))
    moe.experts.lora.load(LoRA.from_peft(E, w1, w2, scale=0.5))
    x = torch.randn(5, D)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), reference_layer(moe)(x), rtol=1e-4, atol=1e-4)
        assert moe.experts.lora.scale == 0.5
    for wrong in (LoRA.from_peft(E, w1), LoRA.from_peft(E, w2, w1)):
        with pytest.raises(ValueError, match="load: expected adapters of shapes {'a1': .3, 4, 24."):
            moe.experts.lora.load(wrong)


@pytest.mark.parametrize("transposed", (False, True))
def test_peft_adapters(cpu, transposed):
    """An adapter that PEFT has made for expert parameters, with its own sum of the weights."""
    peft = pytest.importorskip("peft", reason="needs peft")
    E, D, F = 3, 24, 16

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.is_transposed = transposed
            shape = (E, D, F) if transposed else (E, F, D)
            self.gate_up_proj = torch.nn.Parameter(torch.randn(shape))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=["experts.gate_up_proj"])
    model = peft.get_peft_model(Model(), config)
    wrapper = model.base_model.model.experts
    A, B = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    torch.nn.init.normal_(B)
    lora = LoRA.from_peft(E, w1=(A, B), scale=wrapper.scaling["default"])
    delta = wrapper.get_delta_weight("default")
    torch.testing.assert_close(lora.scale * (lora.b1 @ lora.a1), delta.mT if transposed else delta)


# --- the layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", (None, "int4"))
def test_layer(device, format):
    """Adapters start at zero, train alone, and reduce the loss; the layer's own experts stay."""
    moe = FusedMoE(64, 32, 6, 2, bias=True).to(device)
    if format:
        quantize(moe, format, **quantize_options(format))
    x, target = torch.randn(2, 50, 64, device=device)
    before, state = moe(x).detach(), {n: t.clone() for n, t in moe.state_dict().items()}
    assert add_lora(moe, 8, alpha=16) is moe
    torch.testing.assert_close(moe(x), before)
    moe.router.requires_grad_(False)
    trained = {n: p for n, p in moe.named_parameters() if p.requires_grad}
    assert trained.keys() == {f"experts.lora.{n}" for n in NAMES}
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (moe(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    for name, tensor in state.items():
        assert torch.equal(moe.state_dict()[name], tensor), name
    with torch.no_grad():
        expected = reference_layer(moe)(x)
        torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-4)
    again = add_lora(FusedMoE(64, 32, 6, 2, bias=True).to(device), 8, alpha=16)
    if format:
        quantize(again, format, **quantize_options(format))
    again.load_state_dict(moe.state_dict())
    assert torch.equal(again(x), moe(x))


def reference_layer(moe):
    """The layer with the adapters added to its weights."""
    merged = copy.deepcopy(moe)
    lora, merged.experts.lora = merged.experts.lora(), None
    for name, (a, b) in zip(("w1", "w2", "w3"), lora.pairs, strict=True):
        w = getattr(merged.experts, name)
        w = w.dequantize(F32) if isinstance(w, QuantizedWeight) else w
        delattr(merged.experts, name)
        setattr(merged.experts, name, torch.nn.Parameter(w if a is None else w + lora.scale * b @ a))
    return merged


def test_some_targets(device):
    moe = add_lora(FusedMoE(24, 16, 4, 2, gated=False).to(device, BF16), 2, targets=("w2", "w3"))
    assert dict(moe.experts.lora.named_parameters()).keys() == {"a2", "b2"}
    assert moe.experts.lora.a2.dtype == BF16 and moe.experts.lora.scale == 1.0
    assert moe(torch.randn(3, 24, device=device, dtype=BF16)).isfinite().all()


def test_parameters_are_initialised_again(device):
    """reset_parameters initialises adapters, too: b is zero, and a is not."""
    moe = add_lora(FusedMoE(24, 16, 4, 2).to(device), 2)
    for parameter in moe.experts.lora.parameters():
        torch.nn.init.constant_(parameter, 7)
    moe.reset_parameters()
    assert not moe.experts.lora.b1.any() and 0 < moe.experts.lora.a1.abs().max() < 1


class Doubled(torch.nn.Module):
    def forward(self, a):
        return 2 * a


@pytest.mark.parametrize("alter", ("pruned", "parametrised"))
def test_altered_adapters(device, alter):
    """Pruned or parametrised, a layer computes with what the attribute is, and gradients reach its source."""
    moe, x = trained_layer(device), batch(device)
    expected, lora = copy.deepcopy(moe), moe.experts.lora
    if alter == "pruned":
        prune.random_unstructured(lora, "a1", 0.5)
        factor, source = lora.a1_mask, lora.a1_orig
    else:
        parametrize.register_parametrization(lora, "a1", Doubled())
        factor, source = 2, lora.parametrizations.a1.original
    with torch.no_grad():
        expected.experts.lora.a1 *= factor
    out, same = moe(x), expected(x)
    assert torch.equal(out, same)
    dout = torch.randn_like(out)
    out.backward(dout)
    same.backward(dout)
    assert source.grad.any() and torch.equal(source.grad, factor * expected.experts.lora.a1.grad)
    with pytest.raises(RuntimeError, match=r"expected alpha = 16 \(.* rank 4\), found alpha = 6 "):
        moe.load_state_dict(trained_layer(device, alpha=6).state_dict(), strict=False)


def test_a_main_grad_of_frozen_weights_is_left_alone(device):
    moe = FusedMoE(24, 16, 4, 2).to(device)
    moe.experts.w1.main_grad = torch.ones_like(moe.experts.w1)
    add_lora(moe, 2)(torch.randn(3, 24, device=device)).sum().backward()
    assert (moe.experts.w1.main_grad == 1).all() and moe.experts.lora.b1.grad is not None


def test_a_layer_of_an_older_version(cpu):
    """One that was pickled as a whole has no adapters."""
    moe = FusedMoE(24, 16, 4, 2)
    state = dict(moe.experts.__dict__)
    del state["lora"]
    experts = object.__new__(type(moe.experts))
    experts.__setstate__(state)
    assert experts.lora is None


# --- the scale in a state_dict ----------------------------------------------------------------------------


SCALING = "experts.lora.scaling"


def trained_layer(device=None, alpha=16, dtype=None):
    """Rank 4, scale alpha / 4, b not zero; and a batch."""
    moe = add_lora(FusedMoE(24, 16, 4, 2, device=device, dtype=dtype), 4, alpha=alpha)
    for name, parameter in moe.experts.lora.named_parameters():
        if name[0] == "b":
            torch.nn.init.normal_(parameter)
    return moe


def batch(device, dtype=F32):
    return torch.randn(9, 24, device=device, dtype=dtype)


def check_scale(moe, scale):
    """Both places have it, the buffer in float32 where the adapters are."""
    lora = moe.experts.lora
    assert lora.scale == scale and type(lora.scale) is float
    assert lora.scaling.shape == () and lora.scaling.dtype == F32 and lora.scaling.device == lora.b1.device
    assert lora.scaling.is_meta or lora.scaling == torch.tensor(scale, dtype=F32)
    assert moe.state_dict()[SCALING] is not None


@pytest.mark.quick
@pytest.mark.parametrize("assign", (False, True))
def test_a_state_dict_has_the_scale(device, tmp_path, assign):
    """A layer of another alpha refuses it and names both; one of the same takes it."""
    moe, x = trained_layer(device, alpha=1 / 3), batch(device)
    torch.save(moe.state_dict(), tmp_path / "moe.pt")
    state = torch.load(tmp_path / "moe.pt", weights_only=True)
    check_scale(moe, 1 / 12)
    again = trained_layer(device, alpha=1 / 3)
    again.load_state_dict(state, assign=assign)
    assert torch.equal(again(x), moe(x))
    check_scale(again, 1 / 12)
    other = trained_layer(device, alpha=8)
    expected, found = r"alpha = 8 \(scale 2 at rank 4\)", r"alpha = 0.333333 \(scale 0.0833333 at rank 4\)"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"{SCALING}: expected {expected}, found {found}"):
            other.load_state_dict(state, assign=assign, strict=strict)
    check_scale(other, 2.0)
    again.load_state_dict({name: t.bfloat16() for name, t in state.items()}, assign=assign)
    check_scale(again, 1 / 12)


def test_safetensors_take_the_scale(device, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    moe, x = trained_layer(device), batch(device)
    safetensors.save_model(moe, tmp_path / "moe.safetensors")
    again = trained_layer(device)
    assert safetensors.load_model(again, tmp_path / "moe.safetensors") == (set(), [])
    assert torch.equal(again(x), moe(x))
    with pytest.raises(RuntimeError, match=r"expected alpha = 4 .*, found alpha = 16 "):
        safetensors.load_model(trained_layer(device, alpha=4), tmp_path / "moe.safetensors")


@pytest.mark.quick
@pytest.mark.parametrize("assign", (False, True))
def test_files_without_the_scale_load_with_one_warning(device, assign):
    """One for each load_state_dict, not for each layer; none where no adapters are loaded."""
    model, x = torch.nn.Sequential(trained_layer(device), trained_layer(device)), batch(device)
    older = {n: t for n, t in model.state_dict().items() if "scaling" not in n}
    for _ in range(2):
        again = torch.nn.Sequential(trained_layer(device), trained_layer(device))
        with pytest.warns(UserWarning, match=rf"LoRA's scale beside the adapters \(0.{SCALING}\)") as warned:
            again.load_state_dict(older, assign=assign)
        assert len(warned) == 1
        assert torch.equal(again(x), model(x))
        for moe in again:
            check_scale(moe, 4.0)
    base = {n: t for n, t in older.items() if "lora" not in n}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        missing = again.load_state_dict(base, strict=False, assign=assign).missing_keys
    assert f"1.{SCALING}" in missing and "1.experts.lora.a1" in missing


@pytest.mark.parametrize("with_scale", (False, True))
def test_a_layer_made_on_meta_takes_the_scale_by_assignment(device, with_scale):
    moe, x = trained_layer(device), batch(device)
    state = {n: t for n, t in moe.state_dict().items() if with_scale or n != SCALING}
    found = trained_layer("meta")
    with contextlib.nullcontext() if with_scale else pytest.warns(UserWarning, match="LoRA's scale"):
        found.load_state_dict(state, assign=True)
    assert torch.equal(found(x), moe(x))
    check_scale(found, 4.0)
    with pytest.raises(RuntimeError, match="expected alpha = 8 .*, found alpha = 16 "):
        trained_layer("meta", alpha=8).load_state_dict(moe.state_dict(), assign=True)


def test_the_scale_stays_float32(device):
    """Moved, cast, copied, pickled, emptied: neither the float nor the buffer changes."""
    moe = trained_layer(device, alpha=1.3)
    empty = trained_layer("meta", alpha=1.3).to_empty(device=device)
    pickled = io.BytesIO()
    torch.save(moe, pickled)
    pickled.seek(0)
    cast = [copy.deepcopy(moe).to(dtype) for dtype in (BF16, F16, F64, "meta")]
    for changed in (moe, copy.deepcopy(moe), torch.load(pickled, weights_only=False), empty, *cast):
        check_scale(changed, 1.3 / 4)
        assert changed.experts.lora.a1.device == changed.experts.lora.scaling.device


def test_forward_reads_no_scale_from_the_device(device):
    moe, x = trained_layer(device), batch(device)
    expected = moe(x)
    moe.experts.lora.scaling.fill_(torch.nan)
    assert torch.equal(moe(x), expected)


def test_a_scale_that_is_set_is_stored(device):
    """By the attribute, and by load; a wrong one changes neither."""
    moe, x = trained_layer(device), batch(device)
    before = moe(x)
    moe.experts.lora.scale = 2
    check_scale(moe, 2.0)
    assert not torch.equal(moe(x), before)
    for wrong, error in (("2", TypeError), (None, TypeError), (math.nan, ValueError)):
        with pytest.raises(error, match="expected scale to be a (finite )?number, found"):
            moe.experts.lora.scale = wrong
    check_scale(moe, 2.0)
    lora = moe.experts.lora()._replace(scale=0.5)
    moe.experts.lora.load(lora)
    check_scale(moe, 0.5)
    trained_layer(device, alpha=2).load_state_dict(moe.state_dict())


def test_adapters_of_an_older_version(cpu):
    """Pickled as a whole they have a float alone."""
    moe, x = trained_layer(), batch(cpu)
    lora = moe.experts.lora
    state = {n: v for n, v in lora.__dict__.items() if n != "_scale"} | {"scale": 4.0}
    state["_buffers"] = {}
    older = object.__new__(type(lora))
    older.__setstate__(state)
    again = copy.deepcopy(moe)
    again.experts.lora = older
    check_scale(again, 4.0)
    assert torch.equal(again(x), moe(x))


def test_ddp_and_fully_shard_keep_the_scale(one_rank, device):
    """DistributedDataParallel broadcasts buffers, fully_shard moves them; policies cast parameters alone."""
    moe, x = trained_layer(device, alpha=1.3), batch(device)
    expected = moe(x)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(moe))
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    check_scale(model.module, 1.3 / 4)
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=True)
    for settings in ({}, {"mp_policy": policy}):
        sharded = copy.deepcopy(moe)
        fully_shard(sharded, mesh=one_rank, **settings)
        out = sharded(x.to(BF16) if settings else x)
        torch.testing.assert_close(out.float(), expected, **({"rtol": 0.1, "atol": 0.1} if settings else {}))
        check_scale(sharded, 1.3 / 4)
        state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        assert state[SCALING].dtype == F32
        set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))
        state[SCALING] = state[SCALING] * 2
        with pytest.raises(RuntimeError, match=r"expected alpha = 1.3 .*, found alpha = 2.6 "):
            set_model_state_dict(sharded, state, options=StateDictOptions(full_state_dict=True))


def test_wrong_layers(device):
    moe, plain = FusedMoE(24, 16, 4, 2).to(device), FusedMoE(24, 16, 4, 2, gated=False).to(device)
    for call, error, message in (
        (lambda: add_lora(moe, 0), ValueError, "rank >= 1, found 0"),
        (lambda: add_lora(moe, 2.0), TypeError, "rank to be an int"),
        (lambda: add_lora(moe, 2, alpha="1"), TypeError, "alpha to be a number"),
        (lambda: add_lora(moe, 2, targets=("w4",)), ValueError, "targets of w1, w2 and w3, found"),
        (lambda: add_lora(moe, 2, targets=(["w1"],)), ValueError, "targets of w1, w2 and w3, found"),
        (lambda: add_lora(moe, 2, targets="w1"), TypeError, "targets to be a tuple of .*, found w1"),
        (lambda: add_lora(moe, 2, targets=None), TypeError, "targets to be a tuple of .*, found None"),
        (lambda: add_lora(None, 2), TypeError, "a module with a FusedMoE in it, found NoneType"),
        (lambda: add_lora(moe, 2, dtype=torch.int8), TypeError, "a floating dtype, found torch.int8"),
        (
            lambda: add_lora(moe, 2, dtype=F64),
            TypeError,
            "weights and adapters of float64, or neither, found torch.float32 and torch.float64",
        ),
        (lambda: add_lora(moe, 2, name=None), TypeError, "name to be a str, found NoneType"),
        (lambda: add_lora(moe, 2, name=""), ValueError, "a name that is not empty and has no dot, found ''"),
        (lambda: add_lora(moe, 2, name="a.b"), ValueError, "has no dot, found 'a.b'"),
        (
            lambda: add_lora(moe, 2, freeze_router=1),
            TypeError,
            "freeze_router to be True or False, found int",
        ),
        (
            lambda: add_lora(moe.experts, 2, freeze_router=True),
            ValueError,
            "freeze_router only with a FusedMoE, found Experts",
        ),
        (lambda: add_lora(plain, 2, targets=("w3",)), ValueError, "experts with w3, found ungated ones"),
        (lambda: add_lora(torch.nn.Linear(2, 2), 2), ValueError, "a FusedMoE in it, found Linear"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert moe.experts.lora is None and moe.experts.w1.requires_grad
    add_lora(moe, 2)
    with pytest.raises(ValueError, match="experts without adapters 'default', found some that have them"):
        add_lora(moe, 2)


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_wrong_adapters(device):
    case = Case(dim=24, hidden=16)
    inputs, lora = case.inputs(device), adapters(case, device)
    call = {**inputs, "ids": case.ids(device)}
    lora = {n.removeprefix("lora_"): t for n, t in lora.items()}
    for wrong, error, message in (
        ({"b1": None}, ValueError, "lora.a1 and lora.b1 together, found one of them"),
        (
            {"a1": lora["a2"]},
            ValueError,
            r"lora.a1 of shape \(E, rank, in\) = \(5, rank, 24\), found \(5, 8, 16\)",
        ),
        (
            {"b2": lora["b1"]},
            ValueError,
            r"lora.b2 of shape \(E, out, rank\) = \(5, 24, 8\), found \(5, 16, 8\)",
        ),
        ({"a3": lora["a3"].double()}, TypeError, "lora.a3 of x's dtype torch.float32, found torch.float64"),
        ({"a1": lora["a1"][0]}, ValueError, "lora.a1 of 3 dimensions"),
        ({"a1": lora["a1"].long()}, TypeError, "lora.a1 of dtype"),
        ({"scale": "1"}, TypeError, "lora.scale to be a number, found str '1'"),
        ({"b3": lora["b3"].to("meta")}, ValueError, "lora.b3 on x's device"),
    ):
        with pytest.raises(error, match=message):
            fused_experts(**call, lora=LoRA(**{**lora, **wrong}))
    half = {n: t.to(BF16) if t is not None and t.is_floating_point() else t for n, t in call.items()}
    for x_call, a1, message in (
        (half, lora["a1"].double(), "lora.a1 of x's dtype torch.bfloat16, found torch.float64"),
        (half, lora["a1"].half(), "lora.a1 of x's dtype torch.bfloat16, found torch.float16"),
        (call, lora["a1"].bfloat16(), "lora.a1 of x's dtype torch.float32, found torch.bfloat16"),
        (half, lora["a1"].to("meta"), "lora.a1 on x's device .*, found meta"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            fused_experts(**x_call, lora=LoRA(**{**lora, "a1": a1}))
    with pytest.raises(ValueError, match="lora.a3 only beside w3, found lora.a3 without w3"):
        fused_experts(**{**call, "w3": None}, lora=LoRA(**lora))
    with pytest.raises(TypeError, match="lora to be a fused_moe.LoRA, found tuple"):
        fused_experts(**call, lora=(lora["a1"],))
    main_grads = (torch.zeros_like(inputs["w1"]), None, None)
    with pytest.raises(ValueError, match="no main_grads beside lora"):
        fused_experts(**call, lora=LoRA(**lora), main_grads=main_grads)
