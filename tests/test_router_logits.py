"""router_logits, its gradients and the gate: against the reference in float64, and what is not rounded."""

import copy

import pytest
import torch
import torch.nn.functional as functional
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    Calls,
    assert_as_good,
    assert_near,
    assert_same_bits,
    forward_backward,
    score_dtype,
    to_double,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from fused_moe import FusedMoE, reference, router_logits
from fused_moe.gate import Gate

pytestmark = pytest.mark.usefixtures("poison")

ops = torch.ops.fused_moe
ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=("f32", "bf16", "f16", "f64"))
BOTH_HALVES = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))

# (T, D, E): about the sizes of tiles, slices of D and blocks of tokens, and far from them
SIZES = (
    (1, 1, 1), (5, 3, 1), (1, 64, 8), (33, 37, 5), (64, 512, 64), (65, 520, 9), (130, 513, 128),
    (300, 64, 16), (7, 1100, 257), (3, 72, 1024), (200, 4160, 60),
)  # fmt: skip


def make(device, dtype, tokens=33, dim=37, num_experts=5, bias=True) -> dict:
    """x, weight and bias, such that logits are of order one."""
    shapes = {"x": (tokens, dim), "weight": (num_experts, dim), "bias": (num_experts,) if bias else None}
    scales = {"x": 1, "weight": dim**-0.5, "bias": 1}
    return {
        name: None if shape is None else (torch.randn(shape, dtype=F64) * scales[name]).to(device, dtype)
        for name, shape in shapes.items()
    }


def check(inputs: dict, slack=4.0) -> dict:
    """Logits and gradients, each judged by itself: logits are float32 where gradients are 16-bit."""
    x, weight = inputs["x"], inputs["weight"]
    if x.is_cuda and x.dtype.itemsize == 2:
        # mma.sync of the sm80 tier truncates each of its D / 16 partial sums, of a float32 weight three times
        slack += x.size(1) / 64 * (1 if weight.dtype == x.dtype else 3)
    wide = score_dtype(x.dtype)
    dout = torch.randn(x.size(0), weight.size(0), dtype=F64).to(x.device, wide)
    ours = forward_backward(router_logits, inputs, dout)
    eager = forward_backward(reference.router_logits, inputs, dout)
    exact = forward_backward(reference.router_logits, to_double(inputs), dout.double())
    assert ours["out"].dtype == wide
    for name in exact:
        assert_as_good(*({name: results[name]} for results in (ours, eager, exact)), slack)
    return ours


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.quick
@ALL_DTYPES
@pytest.mark.parametrize("tokens, dim, num_experts", SIZES)
def test_sizes(device, tokens, dim, num_experts, dtype):
    for bias in (False, True):
        check(make(device, dtype, tokens, dim, num_experts, bias))


@BOTH_HALVES
def test_logits_are_not_rounded(device, dtype):
    """They err as float32 sums do, a hundredth of what rounding to 16 bits would add."""
    inputs = make(device, dtype, 2000, 256, 64)
    logits, exact = router_logits(**inputs), reference.router_logits(**to_double(inputs))
    error = (logits - exact).norm() / exact.norm()
    rounding = (exact.to(dtype) - exact).norm() / exact.norm()
    assert error < 0.01 * rounding


@ALL_DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_forms(device, form, dtype):
    """Strided, misaligned and swapped x, weight, bias and gradient."""
    inputs = make(device, dtype, 65, 64, 16)
    expected = router_logits(**inputs)
    changed = {name: FORMS[form](t) for name, t in inputs.items() if t.dim() > 1 or form != "swapped"}
    found = router_logits(**inputs | changed)
    if device.type == "cuda" or form != "misaligned":  # PyTorch's GEMM for AMD CPUs adds by addresses
        assert torch.equal(found, expected)
    check(inputs | changed)
    dlogits, weight = torch.randn(65, 16).to(device, dtype), inputs["weight"]
    found = ops.router_dgrad(FORMS[form](dlogits), FORMS[form](weight))
    assert_near(found, dlogits.double() @ weight.double())


@ALL_DTYPES
def test_no_tokens(device, dtype):
    inputs = make(device, dtype, 0)
    found = forward_backward(
        router_logits, inputs, torch.empty(0, 5, device=device, dtype=score_dtype(dtype))
    )
    assert found["out"].shape == (0, 5) and found["dx"].shape == (0, 37)
    assert not found["dweight"].count_nonzero() and not found["dbias"].count_nonzero()


def test_same_bits(device):
    inputs = make(device, BF16, 1000, 256, 64)
    dout = torch.randn(1000, 64, device=device)
    assert_same_bits(*(forward_backward(router_logits, inputs, dout) for _ in range(2)))


def test_same_bits_on_any_number_of_threads(cpu, threads):
    inputs, dout = make(cpu, BF16, 1000, 600, 300), torch.randn(1000, 300)
    results = []
    for n in (1, 2, 3):
        threads(n)
        results.append(forward_backward(lambda **t: router_logits(**t), inputs, dout)["out"])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, mixed",
    ((F32, False), (BF16, False), (F16, False), (F64, False), (BF16, True), (F16, True)),
    ids=("f32", "bf16", "f16", "f64", "bf16 and f32", "f16 and f32"),
)
@pytest.mark.parametrize(
    "dim, num_experts", ((64, 8), (2048, 64), (7168, 256), (4104, 60), (520, 1024), (37, 5))
)
def test_a_token_has_the_same_bits_in_every_batch(device, dim, num_experts, dtype, mixed):
    """Alone, among few and among many tokens, and wherever in memory a batch begins."""
    inputs = (make_mixed if mixed else make)(device, dtype, 3000, dim, num_experts)
    x, parameters = inputs.pop("x"), inputs
    expected = router_logits(x, **parameters)
    for first, num in (
        (0, 1),
        (2999, 1),
        (5, 2),
        (7, 17),
        (1, 64),
        (100, 65),
        (3, 128),
        (11, 500),
        (1, 2999),
    ):
        found = router_logits(x[first : first + num], **parameters)
        assert torch.equal(found, expected[first : first + num]), (first, num)
    assert torch.equal(router_logits(FORMS["misaligned"](x), **parameters), expected)


@ALL_DTYPES
def test_special_values(device, dtype):
    """NaN and infinity stay in their token's logits."""
    inputs = make(device, dtype, 9)
    expected = router_logits(**inputs)
    inputs["x"][3, 5], inputs["x"][4, 5] = torch.nan, torch.inf
    found = router_logits(**inputs)
    assert found[3].isnan().all() and found[4].isinf().all()
    others = [0, 1, 2, 5, 6, 7, 8]
    assert torch.equal(found[others], expected[others])


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", (False, True))
def test_gradcheck(device, bias):
    """Any number of derivatives: router_logits and router_dgrad are each other's gradients."""
    values = tuple(t.requires_grad_() for t in make(device, F64, 4, 3, 5, bias).values() if t is not None)
    assert gradcheck(router_logits, values)
    assert gradgradcheck(router_logits, values)


@ALL_DTYPES
@pytest.mark.parametrize("needed", ("x", "weight", "bias"))
def test_only_what_is_needed(device, needed, dtype):
    """The gradient of one operand alone, with its GEMM alone, and x is kept for the weight's only."""
    inputs = make(device, dtype)
    inputs[needed].requires_grad_()
    logits = router_logits(**inputs)
    kept = [t for t in logits.grad_fn.saved_tensors if t is not None]
    assert any(t.shape == inputs["x"].shape for t in kept) == (needed == "weight")
    dlogits = torch.randn_like(logits)
    with Calls() as calls:
        (grad,) = torch.autograd.grad(logits, inputs[needed], dlogits)
    assert grad.dtype == dtype and grad.shape == inputs[needed].shape
    names = [name for name, *_ in calls.calls]
    assert (len(calls.of("router_dgrad")), "aten::mm" in names, "aten::sum.dim_IntList" in names) == (
        needed == "x",
        needed == "weight",
        needed == "bias",
    )


def test_dlogits_are_rounded_once(device):
    """The GEMMs of the gradients take dlogits in the weight's dtype; the bias's is a float32 sum."""
    inputs = {name: t.requires_grad_() for name, t in make(device, BF16).items()}
    logits = router_logits(**inputs)
    dlogits = torch.randn_like(logits)
    dx, dweight, dbias = torch.autograd.grad(logits, inputs.values(), dlogits)
    x, weight, _ = inputs.values()
    assert torch.equal(dx, ops.router_dgrad(dlogits.to(BF16), weight))
    assert torch.equal(dweight, dlogits.to(BF16).mT @ x)
    assert torch.equal(dbias, dlogits.sum(0).to(BF16))


def test_torch_func(device):
    """vmap over batches of tokens, and per-sample gradients of the weight."""
    inputs = make(device, F32, 6)
    x, weight, bias = inputs.values()
    batches = x.view(3, 2, -1)
    found = torch.func.vmap(lambda t: router_logits(t, weight, bias))(batches)
    torch.testing.assert_close(found.flatten(0, 1), router_logits(x, weight, bias))
    loss = lambda w, t: router_logits(t, w, bias).square().sum()  # noqa: E731
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batches)
    for grad, batch in zip(grads, batches, strict=True):
        torch.testing.assert_close(grad, torch.func.grad(loss)(weight, batch))


def test_compile(device):
    """One graph for every number of tokens, with the same gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(router_logits, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (17, 40, 130):
            inputs, dout = make(device, BF16, tokens), torch.randn(tokens, 5, device=device)
            found = forward_backward(lambda **t: compiled(**t), inputs, dout)
            assert_same_bits(found, forward_backward(router_logits, inputs, dout))
    torch._dynamo.reset()


# --- autocast -----------------------------------------------------------------------------------------


@BOTH_HALVES
def test_autocast(device, dtype):
    """Operands cast as for linear, float32 logits, and float32 gradients of float32 leaves."""
    inputs, dout = make(device, F32), torch.randn(33, 5, device=device)

    def under_autocast(**tensors):
        with torch.autocast(device.type, dtype):
            return router_logits(**tensors)

    found = forward_backward(under_autocast, inputs, dout)
    assert found["out"].dtype == F32
    cast = {name: t.to(dtype) for name, t in inputs.items()}
    expected = forward_backward(router_logits, cast, dout)
    assert_same_bits(found, {name: t.float() for name, t in expected.items()})
    with torch.autocast(device.type, dtype):
        assert_near(found["out"], reference.router_logits(**inputs).double())
        mixed = router_logits(**inputs | {"x": inputs["x"].to(BF16)})
        wide = router_logits(**to_double(inputs))
    assert torch.equal(mixed, router_logits(**cast | {"x": inputs["x"].to(BF16).to(dtype)}))
    assert torch.equal(wide, router_logits(**to_double(inputs))), "autocast does not cast float64"


# --- the gate -----------------------------------------------------------------------------------------


def gate_of(device, dtype=BF16, bias=True) -> Gate:
    return Gate(24, 8, bias=bias, device=device, dtype=dtype)


@ALL_DTYPES
@pytest.mark.parametrize("shape", ((24,), (5, 24), (2, 3, 24), (0, 24), (2, 0, 24)), ids=str)
def test_the_gate_of_any_shape(device, shape, dtype):
    gate, x = gate_of(device, dtype), torch.randn(shape).to(device, dtype)
    logits = gate(x)
    assert logits.shape == (*shape[:-1], 8) and logits.dtype == score_dtype(dtype)
    assert torch.equal(logits.view(-1, 8), router_logits(x.view(-1, 24), gate.weight, gate.bias))


class OtherTensor(torch.Tensor):
    """Its operators are torch's."""


def test_the_gate_is_linear_elsewhere(device):
    """Other types of tensors, operands that do not fit, and their errors, are F.linear's."""
    gate, x = gate_of(device), torch.randn(5, 24).to(device, BF16)
    expected = functional.linear(x, gate.weight, gate.bias)
    with Calls() as calls:
        found = gate(x.as_subclass(OtherTensor))
    assert not calls.of("router_logits")
    assert type(found) is OtherTensor and torch.equal(found.as_subclass(torch.Tensor), expected)
    for wrong in (x.float(), x.to("meta"), x[:, :7].float()):
        with pytest.raises(RuntimeError) as ours:
            gate(wrong)
        with pytest.raises(RuntimeError) as theirs:
            functional.linear(wrong, gate.weight, gate.bias)
        assert str(ours.value) == str(theirs.value)


def test_the_gate_without_kernels(device, monkeypatch):
    monkeypatch.setattr("fused_moe.paths.DEVICES", ("meta",))
    gate, x = gate_of(device), torch.randn(5, 24).to(device, BF16)
    assert torch.equal(gate(x), functional.linear(x, gate.weight, gate.bias))


def test_the_gate_of_no_memory(device):
    """On meta and as fake tensors logits have the dtype that they have elsewhere."""
    gate = gate_of(device)
    assert copy.deepcopy(gate).to("meta")(torch.empty(5, 24, device="meta", dtype=BF16)).dtype == F32
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(5, 24).to(device, BF16))
        assert gate(x).dtype == F32 and gate(x).shape == (5, 8)


@pytest.mark.parametrize("strict", (False, True), ids=("traced", "strict"))
def test_exported(device, strict):
    """The operator is in the graph of torch.export."""
    gate, x = gate_of(device).requires_grad_(False), torch.randn(5, 24).to(device, BF16)
    program = torch.export.export(gate, (x,), strict=strict)
    assert any(node.target is ops.router_logits.default for node in program.graph.nodes)
    assert torch.equal(program.module()(x), gate(x))


def test_the_gate_is_a_linear_layer(device):
    """Its names, initial values and copies are nn.Linear's."""
    torch.manual_seed(1)
    gate = gate_of(device)
    torch.manual_seed(1)
    linear = nn.Linear(24, 8, device=device, dtype=BF16)
    assert isinstance(gate, nn.Linear) and str(gate).startswith("Gate(in_features=24, out_features=8")
    assert_same_bits(dict(gate.state_dict()), dict(linear.state_dict()))
    linear.load_state_dict(gate.state_dict())


@BOTH_HALVES
@pytest.mark.parametrize("needs_grad", (False, True))
def test_the_layers_logits(device, needs_grad, dtype):
    """FusedMoE chooses by float32 logits, on both ways through it."""
    layer = FusedMoE(24, 20, 8, 2, gate_bias=True, device=device, dtype=dtype)
    x = torch.randn(40, 24).to(device, dtype).requires_grad_(needs_grad)
    with Calls() as calls:
        _, losses = layer(x, return_losses=True)
    if needs_grad:
        [(_, (_, _, (_, logits, *_)))] = calls.of("experts")
    else:
        [(_, logits)] = calls.of("router_logits")
    assert logits.dtype == losses.z.dtype == F32
    gate = layer.router.gate
    assert_near(logits, reference.router_logits(*(t.detach().double() for t in (x, gate.weight, gate.bias))))


# --- a float32 router beside a 16-bit x ---------------------------------------------------------------


def make_mixed(device, dtype, *sizes, bias=True) -> dict:
    """x of the dtype; a weight and bias of float32 values that no 16-bit ones equal."""
    inputs = make(device, F32, *sizes, bias=bias)
    return inputs | {"x": inputs["x"].to(dtype)}


@pytest.mark.quick
@BOTH_HALVES
@pytest.mark.parametrize("tokens, dim, num_experts", SIZES)
def test_mixed_sizes(device, tokens, dim, num_experts, dtype):
    for bias in (False, True):
        found = check(make_mixed(device, dtype, tokens, dim, num_experts, bias=bias))
        assert found["dx"].dtype == dtype and found["dweight"].dtype == F32
        assert not bias or found["dbias"].dtype == F32


@BOTH_HALVES
def test_a_float32_weight_is_not_rounded(device, dtype):
    """Logits err as float32 sums do, a thousandth of what a rounded weight would add."""
    inputs = make_mixed(device, dtype, 2000, 256, 64)
    logits, exact = router_logits(**inputs), reference.router_logits(**to_double(inputs))
    rounded = reference.router_logits(**to_double(inputs | {"weight": inputs["weight"].to(dtype)}))
    limit = 1e-3 if dtype == BF16 else 1e-2
    assert (logits - exact).norm() < limit * (rounded - exact).norm()


@BOTH_HALVES
@pytest.mark.parametrize("scale", (1e-30, 1e-3, 1e3, 1e30))
def test_float32_weights_of_any_size(device, scale, dtype):
    """A weight that neither bfloat16 nor float16 holds as one number, nor perhaps within its range."""
    inputs = make_mixed(device, dtype, 50, 64, 16, bias=False)
    inputs["weight"] *= scale
    logits, exact = router_logits(**inputs), reference.router_logits(**to_double(inputs))
    assert (logits - exact).norm() < 1e-5 * exact.norm()


@BOTH_HALVES
def test_special_values_beside_a_float32_weight(device, dtype):
    """They stay in their token's logits. A weight that is no number shows in its expert's."""
    inputs = make_mixed(device, dtype, 9, 64, 16)
    expected = router_logits(**inputs)
    inputs["x"][3, 5], inputs["x"][4, 5] = torch.nan, torch.inf
    inputs["weight"][7, 2], inputs["weight"][8, 2] = torch.nan, torch.inf
    found = router_logits(**inputs)
    assert found[3].isnan().all() and not found[4].isfinite().any()
    assert found[:, 7].isnan().all() and not found[:, 8].isfinite().any()
    tokens, experts = torch.arange(9) % 9 < 3, torch.arange(16) < 7
    assert torch.equal(found[tokens][:, experts], expected[tokens][:, experts])


@BOTH_HALVES
def test_mixed_under_autocast(device, dtype):
    """The function casts float32 operands as linear does; the gate of a float32 router does not."""
    inputs = make_mixed(device, dtype)
    expected = router_logits(**inputs)
    with torch.autocast(device.type, BF16):
        assert torch.equal(
            router_logits(**inputs), router_logits(**{n: t.to(BF16) for n, t in inputs.items()})
        )
        gate = Gate(37, 5, bias=True, device=device, dtype=dtype, router_dtype=F32)
        with torch.no_grad():
            gate.weight.copy_(inputs["weight"])
            gate.bias.copy_(inputs["bias"])
        assert torch.equal(gate(inputs["x"]), expected)
        assert gate(inputs["x"].float()).dtype == F32
    assert torch.equal(gate(inputs["x"]), expected)


def test_a_gate_without_router_dtype_is_linear_beside_another_dtype(device):
    gate = gate_of(device, F32)
    with pytest.raises(RuntimeError):
        gate(torch.randn(5, 24, device=device, dtype=BF16))


@BOTH_HALVES
def test_compile_of_a_float32_gate(device, dtype):
    """Gradients of the compiled gate, under autocast and without."""
    torch._dynamo.reset()
    gate = Gate(24, 8, bias=True, device=device, router_dtype=F32)
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    x, dout = torch.randn(40, 24, device=device).to(dtype).requires_grad_(), torch.randn(40, 8, device=device)
    for autocast in (False, True):
        with torch.autocast(device.type, BF16, enabled=autocast):
            found, expected = compiled(x), gate(x)
        assert torch.equal(found, expected)
        leaves = (x, gate.weight, gate.bias)
        for mine, theirs in zip(
            *(torch.autograd.grad(t, leaves, dout) for t in (found, expected)), strict=True
        ):
            assert torch.equal(mine, theirs)
    torch._dynamo.reset()
