"""FP8 training of modules: enable_fp8, FusedMoE(fp8=True), which codes a call uses, and shares of codes."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from cases import BF16, assert_same_bits
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import (
    Fp8Shares,
    FusedMoE,
    add_lora,
    enable_fp8,
    fp8_shares,
    fp8_training,
    fused_experts,
    grouped_mlp,
)
from fused_moe.fp8 import layer_pays, quantized
from fused_moe.quantized import quantize

pytestmark = pytest.mark.usefixtures("fp8")

T, D, F, E, K = 40, 256, 128, 4, 2
WEIGHTS = ("w1", "w2", "w3")
SHAPES = Path(__file__).parents[1] / "benchmarks" / "shapes.json"


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    assert_same_bits({"": first.detach()}, {"": second.detach()})


def layer(device, *, seed=0, **options) -> FusedMoE:
    torch.manual_seed(seed)
    return FusedMoE(D, F, E, K, device=device, dtype=BF16, **options)


def tokens(device, *, seed=1, dtype=BF16) -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def trained(device, **options) -> FusedMoE:
    return enable_fp8(layer(device), force=True, **options)


def fresh(moe: FusedMoE) -> FusedMoE:
    """A layer of the same values that has never made codes."""
    other = FusedMoE(D, F, E, K, device=moe.experts.w1.device, dtype=BF16)
    other.load_state_dict(moe.state_dict())
    return enable_fp8(other, force=True)


def num_quantised(run, monkeypatch) -> int:
    """How often a layer's weights are quantised."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        return quantized(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fp8_training, "quantized", counted)
        run()
    return len(calls)


# --- the layer ----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("wgrad", ("auto", "fp8", "bf16"))
def test_a_layer_is_fused_experts(device, wgrad):
    moe, x = trained(device, wgrad=wgrad), tokens(device).requires_grad_()
    out = moe(x)
    scores, ids, _ = moe.router(x, None)
    experts = moe.experts
    expected = fused_experts(x, *experts.weights, scores, ids, fp8=True, fp8_wgrad=wgrad)
    same(out, expected)
    parameters = [x, *experts.weights, moe.router.gate.weight]
    dout = tokens(device, seed=2)
    grads = torch.autograd.grad(out, parameters, dout)
    for grad, other in zip(grads, torch.autograd.grad(expected, parameters, dout), strict=True):
        same(grad, other)
    plain = enable_fp8(moe, enabled=False)(x)
    assert 0.01 < ((out - plain).norm() / plain.norm()).item() < 0.15


@pytest.mark.parametrize(
    "options", ({"gated": False}, {"num_shared_experts": 1}, {"latent_dim": 128}, {"activation": "gelu"})
)
def test_layers_of_other_kinds(device, options):
    moe = layer(device, **options)
    x = tokens(device)
    plain, out = moe(x), enable_fp8(moe, force=True)(x)
    assert 0.003 < ((out - plain).norm() / plain.norm()).item() < 0.15
    out.square().mean().backward()
    for name, p in moe.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


@pytest.mark.parametrize("wgrad", ("fp8", "bf16"))
def test_the_reference_trains_in_fp8(device, wgrad):
    moe, x, dout = trained(device, wgrad=wgrad), tokens(device), tokens(device, seed=2)
    loop = fused_moe.reference.FusedMoE(D, F, E, K, device=device, dtype=BF16)
    loop.load_state_dict(moe.state_dict())
    enable_fp8(loop, force=True, wgrad=wgrad)
    out, expected = moe(x), loop(x)
    assert (out - expected).norm() < 0.02 * expected.norm()
    out.backward(dout)
    expected.backward(dout)
    for (name, p), q in zip(moe.named_parameters(), loop.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.03 * q.grad.norm(), name


def test_main_grads_of_a_layer(device):
    moe, other = trained(device), trained(device)
    for p in moe.experts.parameters():
        p.main_grad = torch.ones_like(p, dtype=torch.float32)
    x, dout = tokens(device), tokens(device, seed=2)
    for m in (moe, other):
        m(x).backward(dout)
    for name in WEIGHTS:
        p, q = getattr(moe.experts, name), getattr(other.experts, name)
        assert p.grad is None
        torch.testing.assert_close(p.main_grad - 1, q.grad.float(), rtol=1e-2, atol=1e-5)


def test_autocast(device):
    moe = enable_fp8(layer(device).float(), force=True)
    x = tokens(device, dtype=torch.float32)
    with torch.autocast(device.type, dtype=BF16):
        out = moe(x)
    assert out.dtype == BF16
    out.float().square().mean().backward()
    assert moe.experts.w1.grad.dtype == torch.float32 and moe.experts.w1.grad.any()


@pytest.mark.parametrize("keep_codes", (False, True))
def test_compile(device, keep_codes):
    moe, x = trained(device, keep_codes=keep_codes), tokens(device)
    expected = moe(x)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    same(compiled(x), expected)
    with torch.no_grad():
        moe.experts.w2.mul_(2)
    same(compiled(x), fresh(moe)(x))


# --- weights that change ------------------------------------------------------------------------------


def optimizer_of(kind):
    def step(moe):
        if not hasattr(moe, "optimizer"):
            moe.optimizer = kind(moe.parameters())
        moe.optimizer.step()
        moe.optimizer.zero_grad()

    return step


@torch.no_grad()
def copied(moe):
    for p in moe.experts.parameters():
        p.copy_(p - p.grad)


def data_copied(moe):
    for p in moe.experts.parameters():
        p.data.copy_(p.data - p.grad)


def data_replaced(moe):
    for p in moe.experts.parameters():
        p.data = p.data - p.grad


def loaded(moe, **options):
    state = {n: t - 0.1 * torch.randn_like(t) for n, t in moe.state_dict().items()}
    moe.load_state_dict(state, **options)


UPDATES = {
    "SGD": optimizer_of(lambda p: torch.optim.SGD(p, 0.1, foreach=False)),
    "SGD, foreach": optimizer_of(lambda p: torch.optim.SGD(p, 0.1, foreach=True)),
    # The kernels of fused optimizers move no version.
    "AdamW, fused": optimizer_of(lambda p: torch.optim.AdamW(p, 0.01, fused=True)),
    "copy_": copied,
    "data.copy_": data_copied,
    "data =": data_replaced,
    "load_state_dict": loaded,
    "load_state_dict, assign": lambda moe: loaded(moe, assign=True),
}


SEEN = [update for update in UPDATES if update != "data.copy_"]  # by PyTorch


@pytest.mark.parametrize(
    "update, keep_codes", [*((name, False) for name in UPDATES), *((name, True) for name in SEEN)]
)
def test_two_steps(device, update, keep_codes):
    """Each output is that of the weights as they are, and so are gradients."""
    moe, x, dout = trained(device, keep_codes=keep_codes), tokens(device), tokens(device, seed=2)
    outs = []
    for _ in range(3):
        out = moe(x)
        out.backward(dout)
        other = fresh(moe)
        expected = other(x)
        expected.backward(dout)
        same(out, expected)
        for name in WEIGHTS:
            same(getattr(moe.experts, name).grad, getattr(other.experts, name).grad)
        outs.append(out.detach())
        UPDATES[update](moe)
        moe.zero_grad()
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


def test_codes_are_made_once_for_an_optimizer_step(device, monkeypatch):
    moe, x = trained(device, keep_codes=True), tokens(device)
    optimizer = torch.optim.AdamW(moe.parameters(), fused=True)

    def micro_batches():
        for _ in range(3):
            moe(x).sum().backward()

    for _ in range(2):
        assert num_quantised(micro_batches, monkeypatch) == 1
        optimizer.step()
    enable_fp8(moe, force=True)
    assert num_quantised(micro_batches, monkeypatch) == 3


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", ("jit", "make_fx"))
def test_traces_have_no_codes(device, trace):
    """A traced layer follows its weights, although there are codes when it is traced."""
    moe, x = trained(device, keep_codes=True), tokens(device)
    moe(x)
    if trace == "jit":
        traced = torch.jit.trace(moe, x, check_trace=False)
    else:
        traced = make_fx(lambda x, w2: functional_call(moe, {"experts.w2": w2}, (x,)))(x, moe.experts.w2)
    with torch.no_grad():
        moe.experts.w2.mul_(2)
    out = traced(x) if trace == "jit" else traced(x, moe.experts.w2)
    same(out, fresh(moe)(x))


def test_kept_codes_do_not_outlive_memory(device):
    """Memory that is freed and taken again has the same address, and perhaps the same version."""
    moe, x = trained(device, keep_codes=True), tokens(device)
    for _ in range(4):
        for p in 2 * [*moe.experts.parameters()]:
            p.data = torch.randn_like(p) / 16
        same(moe(x), fresh(moe)(x))


def test_swapped_for_evaluation(device):
    """An average of the weights that `.data` writes, evaluated, and written back."""
    moe, x = trained(device, keep_codes=True), tokens(device)
    before = moe(x).detach()
    saved = {n: p.detach().clone() for n, p in moe.named_parameters()}
    for p in moe.experts.parameters():
        p.data.copy_(p.data / 2)
    with torch.no_grad():
        swapped = moe(x)
        same(swapped, fresh(moe)(x))
    for n, p in moe.named_parameters():
        p.data.copy_(saved[n])
    same(moe(x), before)
    assert not torch.equal(swapped, before)


@pytest.mark.parametrize("keep_codes", (False, True))
def test_average(device, keep_codes):
    moe, x = trained(device, keep_codes=keep_codes), tokens(device)
    average = AveragedModel(moe, multi_avg_fn=None)
    optimizer = torch.optim.SGD(moe.parameters(), 0.5)
    outs = []
    for _ in range(3):
        moe(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(moe)
        out = average(x)
        same(out, fresh(average.module)(x))
        outs.append(out)
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("keep_codes", (False, True))
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing(device, use_reentrant, keep_codes):
    moe, other = trained(device, keep_codes=keep_codes), trained(device)
    dout = tokens(device, seed=2)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (moe, other)]
    for _ in range(2):
        x = tokens(device).requires_grad_()
        out = checkpoint(moe, x, use_reentrant=use_reentrant)
        expected = other(x)
        same(out, expected)
        out.backward(dout)
        dx, x.grad = x.grad, None
        expected.backward(dout)
        same(dx, x.grad)
        for name in WEIGHTS:
            same(getattr(moe.experts, name).grad, getattr(other.experts, name).grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_copies_and_pickles_have_no_codes(device):
    moe, x = trained(device, keep_codes=True), tokens(device)
    expected = moe(x)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert other.experts.fp8 is not moe.experts.fp8 and other.experts.fp8._kept is None
        assert other.experts.fp8.keep_codes
        with torch.no_grad():
            other.experts.w2.mul_(2)
        same(other(x), fresh(other)(x))
    same(moe(x), expected)


def test_nothing_else_changes(device):
    moe = layer(device)
    names, state = [n for n, _ in moe.named_modules()], set(moe.state_dict())
    enable_fp8(moe, force=True, keep_codes=True)
    moe(tokens(device)).sum().backward()
    assert [n for n, _ in moe.named_modules()] == names and set(moe.state_dict()) == state
    assert "fp8=Fp8Training(wgrad='auto', keep_codes=True)" in repr(moe)
    assert "fp8" not in repr(enable_fp8(moe, enabled=False))


# --- which layers -------------------------------------------------------------------------------------

GAIN = {"mixtral-8x7b", "dsv2-lite", "qwen3-30b", "olmoe", "dsv3-8ranks", "sonic-120b"}
LOSE = {"qwen3.6-35b", "qwen4-exp", "sonic-1.4b", "sonic-7b", "hunyuan-v4", "deepseek-v4-flash"}


@pytest.mark.skipif(not SHAPES.exists(), reason="not in a checkout")
def test_the_rule(device):
    """Layers gain or lose as they were measured, quantised in every step."""
    shapes = json.loads(SHAPES.read_text())["layers"]
    for name in sorted(LOSE | GAIN):
        s = shapes[name]
        pays = layer_pays(s["dim"], s["hidden_dim"], s["num_experts"], s["top_k"])
        assert pays == (name in GAIN), name


def test_layers_that_do_not_gain_stay(device):
    narrow, wide = FusedMoE(128, 640, 4, 2, device=device), FusedMoE(128, 768, 4, 2, device=device)
    with pytest.warns(UserWarning, match=r"D=128, F=640, E=4, K=2. 1 of 2 layers keep their dtype"):
        enable_fp8(torch.nn.Sequential(narrow, wide))
    assert narrow.experts.fp8 is None and wide.experts.fp8 is not None
    enable_fp8(torch.nn.Sequential(narrow), force=True)
    assert narrow.experts.fp8 is not None
    with pytest.warns(UserWarning, match="1 of 1 layers keep their dtype"):
        enable_fp8(narrow)
    assert narrow.experts.fp8 is None


def test_of_the_constructor(device):
    assert FusedMoE(128, 768, 4, 2, device=device, fp8=True).experts.fp8.wgrad == "auto"
    with pytest.warns(UserWarning, match="expected F >= 768 and E <= 16 \\* K, .* found D=128, F=768, E=64"):
        assert FusedMoE(128, 768, 64, 2, device=device, fp8=True).experts.fp8 is None
    with pytest.raises(ValueError, match="expected experts whose F is a multiple of 128, found 800"):
        FusedMoE(128, 800, 4, 2, device=device, fp8=True)
    with pytest.raises(TypeError, match="expected fp8 to be True or False"):
        FusedMoE(128, 768, 4, 2, device=device, fp8="yes")


def quantised(device):
    moe = layer(device)
    for name in WEIGHTS:
        setattr(moe.experts, name, quantize(getattr(moe.experts, name), "int8"))
    return moe


REFUSED = {
    "bias": (lambda d: layer(d, bias=True), ValueError, "without biases, found biases"),
    "D": (lambda d: FusedMoE(192, 128, 4, 2), ValueError, "D is a multiple of 128, found 192"),
    "lora": (lambda d: add_lora(layer(d), 8), ValueError, "without adapters, found those of add_lora"),
    "quantised": (quantised, ValueError, "of float weights, found quantised ones"),
    "no layer": (lambda d: torch.nn.Linear(2, 2), ValueError, "a module with a FusedMoE in it, found Linear"),
    "no module": (lambda d: "moe", TypeError, "a module with a FusedMoE in it, found str"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(device, name):
    make, error, message = REFUSED[name]
    module, good = make(device), layer(device)
    with pytest.raises(error, match=f"enable_fp8: expected .*{message}"):
        enable_fp8(module if name.startswith("no ") else torch.nn.Sequential(good, module), force=True)
    assert good.experts.fp8 is None


def test_refused_arguments(device):
    moe = layer(device)
    for name, value, message in (
        ("wgrad", "int8", "wgrad"),
        ("keep_codes", 1, "keep_codes to be True or False"),
        ("force", None, "force to be True or False"),
        ("enabled", "no", "enabled to be True or False"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            enable_fp8(moe, **{name: value})
    assert moe.experts.fp8 is None
    with pytest.raises(ValueError, match="add_lora: expected experts that do not train in FP8"):
        add_lora(enable_fp8(moe, force=True), 8)


# --- rows of a dispatcher -----------------------------------------------------------------------------


@pytest.mark.parametrize("wgrad", ("fp8", "bf16"))
@pytest.mark.parametrize("counts", ((10, 0, 7, 23), (0, 0, 40, 0), (5, 5, 5, 5), (0, 0, 0, 0)))
def test_grouped_mlp(device, counts, wgrad):
    """Rows past the last expert's may be NaN: they are as good as absent."""
    moe, used = layer(device), sum(counts)
    rows = tokens(device)
    rows[used:] = torch.nan
    rows.requires_grad_()
    dout = tokens(device, seed=2)
    options = {"fp8": True, "fp8_wgrad": wgrad}
    weights = moe.experts.weights
    out = grouped_mlp(rows, *weights, torch.tensor(counts, device=device), **options)
    grads = torch.autograd.grad(out, (rows, *weights), dout)
    assert not out[used:].any() and not grads[0][used:].any()
    some = rows.detach()[:used].requires_grad_()
    ids = torch.repeat_interleave(torch.arange(E), torch.tensor(counts)).to(device)[:, None]
    expected = fused_experts(some, *weights, torch.ones(used, 1, device=device), ids, **options)
    same(out[:used], expected)
    others = torch.autograd.grad(expected, (some, *weights), dout[:used])
    same(grads[0][:used], others[0])
    for grad, other in zip(grads[1:], others[1:], strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-2, atol=1e-3)


def test_grouped_mlp_refuses(device):
    moe = layer(device)
    call = (tokens(device), *moe.experts.weights, torch.tensor([10] * E, device=device))
    with pytest.raises(ValueError, match="grouped_mlp: expected no b1 with fp8"):
        grouped_mlp(*call, b1=torch.zeros(E, F, device=device, dtype=BF16), fp8=True)
    with pytest.raises(TypeError, match="grouped_mlp: expected x of dtype bfloat16"):
        grouped_mlp(call[0].half(), *(w.half() for w in moe.experts.weights), call[-1], fp8=True)


# --- shares of codes ----------------------------------------------------------------------------------


def test_shares(device):
    moe, x = trained(device, wgrad="fp8"), tokens(device)
    x[3] = 0
    x[4, 1:] = x[4, :1] / 2**20  # far below the smallest code
    x.requires_grad_()
    with fp8_shares() as shares:
        out = moe(x)
        out.backward(tokens(device, seed=2))
    outside = moe(x)
    assert list(shares.counts) == ["x", "w1", "w2", "a", "dout", "dh", "dh by columns"]
    assert shares.counts["x"][0] == T * D and shares.counts["a"][0] == T * K * F
    assert shares.counts["w1"][0] == 2 * E * F * D and shares.counts["dh"][0] == T * K * 2 * F
    values = x.float()
    scale = values.abs().amax(1, keepdim=True) / 448
    is_zero = values.abs() <= scale / 2**10  # half of the smallest code, ties to even
    assert shares.zero("x") == pytest.approx(is_zero.float().mean().item(), abs=1e-4)
    is_largest = (values.abs() >= scale * 432) & (scale > 0)
    assert shares.saturated("x") == pytest.approx(is_largest.float().mean().item(), abs=1e-4)
    lines = str(shares).splitlines()
    assert len(lines) == 8 and lines[1].split()[0] == "x" and str(T * D) in lines[1]
    assert str(Fp8Shares()) == "fp8_shares: no call of FP8 training"
    same(out, outside)


def test_shares_of_several_calls_and_nan(device):
    moe, x = trained(device), tokens(device)
    x[0, 0] = torch.nan
    with fp8_shares() as shares, torch.no_grad():
        moe(x), moe(x)
    assert list(shares.counts) == ["x", "w1", "w2", "a"]
    assert shares.counts["x"][0] == 2 * T * D and shares.counts["x"][3] == 2 * D
    with fp8_shares() as nothing:
        layer(device)(tokens(device))
    assert not nothing.counts
