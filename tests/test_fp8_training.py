"""FP8 training: fused_experts(..., fp8=...) against the recipe as a plain loop, and both against float64."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, BF16, F16, F32, F64, LAYOUTS, Calls, Case, assert_same_bits
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import Fp8Weights, fp8_weights, fused_experts, reference
from fused_moe import ops as codes
from fused_moe.quantized import quantize

pytestmark = pytest.mark.usefixtures("fp8")

CASE = Case(70, 256, 128, 4, 2, BF16)
WEIGHTS = ("w1", "w2", "w3")
GRADIENTS = ("x", *WEIGHTS, "scores")


def dtypes(device):
    return (BF16,) if device.type == "cuda" else (BF16, F32)


def inputs_of(case: Case, device) -> dict:
    return {n: t for n, t in case.inputs(device).items() if n in GRADIENTS}


def step(function, inputs: dict, dout, *, wanted=GRADIENTS, **options) -> dict:
    """out, and the gradients that are wanted: {"dx": ...}."""
    leaves = {n: t if t is None else t.detach().requires_grad_(n in wanted) for n, t in inputs.items()}
    out = function(**leaves, **options)
    wanted = [n for n in wanted if leaves[n] is not None]
    grads = torch.autograd.grad(out, [leaves[n] for n in wanted], dout)
    return {"out": out.detach(), **{f"d{n}": g for n, g in zip(wanted, grads, strict=True)}}


def to_double(inputs: dict) -> dict:
    return {n: t if t is None else t.double() for n, t in inputs.items()}


def error(value, truth) -> float:
    return (value.double() - truth.double()).norm().item()


def near(device) -> float:
    """Norm of the difference to the loop, of its norm. A GPU's sums are not exact, which turns some codes to
    their neighbours."""
    return 0.005 if device.type == "cpu" else 0.02


def check(inputs: dict, dout, *, wgrad="fp8", **options) -> dict:
    """Errors against float64 are at most 1.1 of the recipe's. Returns our results."""
    fp8 = {"fp8": True, "fp8_wgrad": wgrad}
    ours = step(fused_experts, inputs, dout, **fp8, **options)
    loop = step(reference.fused_experts, inputs, dout, **fp8, **options)
    exact = step(reference.fused_experts, to_double(inputs), dout.double(), **options)
    for name, truth in exact.items():
        mine, its = ours[name], loop[name]
        assert mine.shape == truth.shape and mine.dtype == its.dtype, name
        assert mine.isfinite().all(), name
        allowed = 1.1 * error(its, truth) + 1e-5 * truth.norm().item()
        assert error(mine, truth) <= allowed, f"{name}: {error(mine, truth):.3e}, allowed {allowed:.3e}"
    for name in GRADIENTS:
        if inputs[name] is not None:
            assert ours[f"d{name}"].stride() == inputs[name].stride(), name
    return ours


# --- the recipe ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, wgrad):
    for dtype in dtypes(device):
        case = replace(CASE, dtype=dtype, layout=layout)
        check(inputs_of(case, device), case.dout(device), wgrad=wgrad, ids=case.ids(device), **case.options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(device, activation):
    case = replace(CASE, activation=activation, layout="ungated" if activation == "relu2" else "separate")
    check(inputs_of(case, device), case.dout(device), ids=case.ids(device), **case.options)


def heavy_tails(t):
    return torch.randn_like(t) * torch.randn(t.shape, device=t.device, dtype=t.dtype).mul(1.5).exp()


def outlier_channels(t):
    factors = torch.ones(t.size(-1), device=t.device, dtype=t.dtype)
    factors[::37] = 200
    return t * factors


def tiny_norms(t):
    return t * torch.logspace(-12, 0, t.size(0), device=t.device, dtype=F32).to(t.dtype).unsqueeze(-1)


def zero_tokens(t):
    return t * (torch.arange(t.size(0), device=t.device) % 3 > 0).unsqueeze(-1)


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("data", (heavy_tails, outlier_channels, tiny_norms, zero_tokens))
def test_data(device, data, wgrad):
    """What x and the output's gradient may be."""
    for dtype in dtypes(device):
        case = replace(CASE, dtype=dtype, tokens=200)
        inputs, dout = inputs_of(case, device), data(case.dout(device))
        inputs["x"] = data(inputs["x"])
        check(inputs, dout, wgrad=wgrad, ids=case.ids(device))


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("routing", ("repeats", "one", "gaps", "sentinels", "none"))
def test_routings(device, routing, wgrad):
    """Experts without rows have zeros as gradients, and remote slots, too."""
    case = replace(CASE, routing=routing)
    ids = case.ids(device)
    ours = check(inputs_of(case, device), case.dout(device), wgrad=wgrad, ids=ids)
    for e in range(case.num_experts):
        if not (ids == e).any():
            assert all(ours[f"d{w}"][e].count_nonzero() == 0 for w in WEIGHTS)
    assert ours["dscores"][(ids < 0) | (ids >= case.num_experts)].count_nonzero() == 0


@pytest.mark.parametrize("wgrad", codes.WGRADS)
def test_row_blocks(device, wgrad):
    """Experts of 0, 1, 127, 128, 129 and 300 rows."""
    counts = (0, 1, 127, 128, 129, 300)
    case = Case(sum(counts), 128, 128, len(counts), 1, BF16)
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = experts[torch.randperm(len(experts))].unsqueeze(1).int().to(device)
    check(inputs_of(case, device), case.dout(device), wgrad=wgrad, ids=ids)


def test_no_tokens(device):
    case = replace(CASE, tokens=0)
    for wgrad in codes.WGRADS:
        inputs, ids = inputs_of(case, device), case.ids(device)
        ours = step(fused_experts, inputs, case.dout(device), ids=ids, fp8=True, fp8_wgrad=wgrad)
        assert ours["out"].shape == ours["dx"].shape == (0, case.dim)
        assert all(ours[f"d{w}"].count_nonzero() == 0 for w in WEIGHTS)


@pytest.mark.parametrize("dim", (1024, 1152))
def test_chunks_of_columns(device, dim):
    """dw1 and dw3 are made in chunks of D: eight of 128 columns, or four of 256 and one of 128."""
    case = replace(CASE, dim=dim, num_experts=2)
    for layout in ("separate", "halves.T", "separate.T"):
        inputs = inputs_of(replace(case, layout=layout), device)
        options = replace(case, layout=layout).options
        check(inputs, case.dout(device), ids=case.ids(device), **options)


# --- bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wgrad", codes.WGRADS)
def test_nan_stays(device, wgrad):
    """A NaN in one token is in that token's output and gradient, and in its experts' weight gradients."""
    case = CASE
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad}
    clean = step(fused_experts, inputs, dout, **options)
    inputs["x"] = inputs["x"].clone()
    inputs["x"][5, 7] = torch.nan
    ours = step(fused_experts, inputs, dout, **options)
    others = torch.arange(case.tokens, device=device) != 5
    for name in ("out", "dx", "dscores"):
        assert ours[name][5].isnan().all(), name
        assert torch.equal(ours[name][others], clean[name][others]), name
    hit = torch.zeros(case.num_experts, dtype=torch.bool, device=device).index_fill(0, ids[5].long(), True)
    for name in ("dw1", "dw2", "dw3"):
        assert ours[name][hit].flatten(1).isnan().any(1).all(), name
        assert torch.equal(ours[name][~hit], clean[name][~hit]), name


def test_nan_in_a_weight_stays(device):
    """In the outputs of its expert."""
    inputs, ids = inputs_of(CASE, device), CASE.ids(device)
    clean = fused_experts(**inputs, ids=ids, fp8=True)
    inputs["w2"] = inputs["w2"].clone()
    inputs["w2"][1, 3, 4] = torch.nan
    out = fused_experts(**inputs, ids=ids, fp8=True)
    hit = (ids == 1).any(1)
    assert out[hit].isnan().any(1).all() and torch.equal(out[~hit], clean[~hit])


def test_batch_sizes(device):
    """A token's output, and its gradient, have the same bits in every batch."""
    case = replace(CASE, tokens=200)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    whole = step(fused_experts, inputs, dout, ids=ids, fp8=True)
    for part in (slice(0, 1), slice(30, 33), slice(0, 130)):
        few = inputs | {"x": inputs["x"][part], "scores": inputs["scores"][part]}
        ours = step(fused_experts, few, dout[part], ids=ids[part], fp8=True)
        for name in ("out", "dx", "dscores"):
            assert torch.equal(ours[name], whole[name][part]), name


def test_without_gradients_the_bits_are_the_same(device):
    for layout in ("separate", "ungated"):
        case = replace(CASE, layout=layout)
        inputs, ids = inputs_of(case, device), case.ids(device)
        options = {"ids": ids, "fp8": True, **case.options}
        ours = step(fused_experts, inputs, case.dout(device), **options)
        with Calls() as calls:
            out = fused_experts(**inputs, **options)
        assert torch.equal(out, ours["out"])
        ((_, made),) = calls.of("fp8_up")
        assert made[2].numel() == 0  # h
        with torch.inference_mode():
            assert torch.equal(fused_experts(**inputs, **options), out)


def test_in_every_run_the_bits_are_the_same(device):
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    runs = [step(fused_experts, inputs, dout, ids=ids, fp8=True) for _ in range(2)]
    assert_same_bits(*runs)


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_one_gradient(device, name, wgrad):
    """Has the bits that it has among all."""
    for layout in ("separate", "separate.T", "interleaved"):
        case = replace(CASE, layout=layout)
        inputs, dout = inputs_of(case, device), case.dout(device)
        if inputs[name] is None:
            continue
        options = {"ids": case.ids(device), "fp8": True, "fp8_wgrad": wgrad, **case.options}
        whole = step(fused_experts, inputs, dout, **options)
        ours = step(fused_experts, inputs, dout, wanted=(name,), **options)
        assert_same_bits(ours, {n: whole[n] for n in ours})


WANTED = (
    ("x",), ("w1",), ("w3",), ("w2",), ("scores",), ("w1", "w3"), ("x", "w2"), ("x", "w1"), ("w3", "scores"),
    ("x", "scores"), ("w2", "w1"), WEIGHTS, GRADIENTS,
)  # fmt: skip


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("wanted", WANTED, ids=", ".join)
def test_what_is_not_needed_is_not_made(device, wanted, wgrad):
    """A form of dh, dx or a weight's gradient; what is has the bits that it has among all."""
    inputs, dout = inputs_of(CASE, device), CASE.dout(device)
    options = {"ids": CASE.ids(device), "fp8": True, "fp8_wgrad": wgrad}
    whole = step(fused_experts, inputs, dout, **options)
    with Calls() as calls:
        ours = step(fused_experts, inputs, dout, wanted=wanted, **options)
    assert_same_bits(ours, {n: whole[n] for n in ours})
    ((_, made),) = calls.of("fp8_down_backward")
    of_weights = bool({"w1", "w3"} & {*wanted})
    expected = ["x" in wanted] * 2 + [of_weights, of_weights and wgrad == "fp8", "w2" in wanted]
    assert [t.numel() > 0 for t in made] == [*expected, "scores" in wanted]
    assert len(calls.of("fp8_up_backward")) == ("x" in wanted)
    assert len(calls.of("fp8_up_weights")) == len(calls.of("fp8_up_weights_backward")) == of_weights
    for _, grads in calls.of("fp8_up_weights_backward"):
        assert [t.numel() > 0 for t in grads] == [n in wanted for n in ("w1", "w3")]


@pytest.mark.parametrize("name", ("x", "w1"))
def test_what_is_not_asked_for_is_not_made(device, name):
    """autograd.grad of x alone makes no gradient of w1 and w3, which require one, and that of w1 no dx."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    out = fused_experts(**leaves, ids=ids, fp8=True)
    with Calls() as calls:
        torch.autograd.grad(out, leaves[name], dout)
    found = calls.ours()
    assert found == ["fp8_down_backward", "fp8_up_backward" if name == "x" else "fp8_up_weights_backward"]


# --- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_made_once(device, layout):
    """They give the bits of those that a call makes itself."""
    case = replace(CASE, layout=layout)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    options, stored = case.options, {n: case.options[n] for n in ("layout", "transposed")}
    made = fp8_weights(*(inputs[n] for n in WEIGHTS), **stored)
    runs = [step(fused_experts, inputs, dout, ids=ids, fp8=fp8, **options) for fp8 in (True, made)]
    assert_same_bits(*runs)
    E, D, F = made.shape
    assert (E, D, F) == (case.num_experts, case.dim, case.hidden)
    H = F if layout.startswith("ungated") else 2 * F
    assert [tuple(t.shape) for t in made.up] == [
        (E, H, D), (E, H // 128, D // 128), (E, D, H), (E, D // 128, H // 128)
    ]  # fmt: skip
    for codes_, scale, codes_t, scale_t in (made.up, made.down):
        assert torch.equal(codes_.mT, codes_t) and torch.equal(scale.mT, scale_t)
    assert made.nbytes == sum(t.nbytes for t in (*made.up, *made.down))


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_quantises_again(device, layout, wgrad):
    """Without codes of the transposes it makes them of the weights, one at a time, with the same bits."""
    case = replace(CASE, layout=layout)
    inputs, dout = inputs_of(case, device), case.dout(device)
    stored = {n: case.options[n] for n in ("layout", "transposed")}
    made = fp8_weights(*(inputs[n] for n in WEIGHTS), **stored)
    few = Fp8Weights(made.up[:2], made.down[:2], made.layout)
    options = {"ids": case.ids(device), "fp8_wgrad": wgrad, **case.options}
    with Calls() as calls:
        ours = step(fused_experts, inputs, dout, fp8=few, **options)
    assert_same_bits(step(fused_experts, inputs, dout, fp8=made, **options), ours)
    assert [args[3] for args, _ in calls.of("fp8_weight")] == [codes.TRANSPOSED] * 2
    for (_, found), expected in zip(calls.of("fp8_weight"), (made.down, made.up), strict=True):
        assert found[0].numel() == found[1].numel() == 0
        assert torch.equal(found[2], expected[2]) and torch.equal(found[3], expected[3])
    assert torch.equal(
        step(fused_experts, inputs, dout, wanted=("w1",), fp8=few, **options)["dw1"], ours["dw1"]
    )


def test_backward_quantises_again_beside_float32_weights_and_main_grads(device):
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    inputs = {n: t.float() for n, t in inputs.items()}
    made = fp8_weights(*(inputs[n] for n in WEIGHTS))
    runs = []
    for fp8 in (made, Fp8Weights(made.up[:2], made.down[:2], made.layout)):
        leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
        sums = tuple(torch.ones_like(inputs[n]) for n in WEIGHTS)

        def experts(fp8=fp8, sums=sums, **arguments):
            with torch.autocast(device.type, BF16):
                return fused_experts(**arguments, ids=ids, fp8=fp8, main_grads=sums)

        checkpoint(experts, **leaves, use_reentrant=False).backward(dout)
        runs.append({"dx": leaves["x"].grad, **dict(zip(WEIGHTS, sums, strict=True))})
    assert_same_bits(*runs)


def test_weights_may_be_freed_between_forward_and_backward(device):
    """As FSDP2 frees what it has gathered: no copy of it is alive, and backward reads what is there then."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    leaves = {n: t.detach().clone().requires_grad_() for n, t in inputs.items()}
    made = fp8_weights(*(leaves[n] for n in WEIGHTS))
    few = Fp8Weights(made.up[:2], made.down[:2], made.layout)
    expected = step(fused_experts, inputs, dout, ids=ids, fp8=made)
    out = fused_experts(**leaves, ids=ids, fp8=few)
    refs = [StorageWeakRef(t.untyped_storage()) for t in (*made.up, *made.down)]
    del made, few
    assert all(ref.expired() for ref in refs)
    for name in WEIGHTS:
        leaves[name].untyped_storage().resize_(0)
    for name in WEIGHTS:
        leaves[name].untyped_storage().resize_(inputs[name].nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(leaves[name]):
            leaves[name].copy_(inputs[name])
    grads = torch.autograd.grad(out, [*leaves.values()], dout)
    assert_same_bits(
        {f"d{n}": g for n, g in zip(leaves, grads, strict=True)},
        {n: expected[n] for n in expected if n != "out"},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_order(device, layout):
    """fp8_weight makes the codes as they are, their transpose or both, with the same bits."""
    _, gated, pairs, transposed = LAYOUTS[layout]
    case = replace(CASE, layout=layout)
    w1, _, w3 = (
        w if w is None or not transposed else w.mT for w in map(inputs_of(case, device).get, WEIGHTS)
    )
    code = codes.LAYOUTS[case.options["layout"]] if gated else codes.UNGATED
    call = (w1.flatten(1, 2) if pairs else w1, w3, code)
    both = torch.ops.fused_moe.fp8_weight(*call)
    for orders, (made, empty) in {1: (slice(0, 2), slice(2, 4)), 2: (slice(2, 4), slice(0, 2))}.items():
        found = torch.ops.fused_moe.fp8_weight(*call, orders)
        assert all(map(torch.equal, found[made], both[made]))
        assert [tuple(t.shape) for t in found[empty]] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", (F32, BF16))
def test_codes(device, dtype):
    """Those of the reference, to the bit; and the gates come first."""
    w = torch.randn(2, 256, 128, dtype=F64).mul(3).to(device, dtype)
    w[0, :128] = 0
    w[1, 3, 5] = 1e4
    w2 = torch.randn(2, 128, 128, device=device, dtype=dtype)
    for made, rows in (
        (fp8_weights(w, w2, layout="halves"), w),
        (fp8_weights(w, w2, layout="interleaved"), torch.cat((w[:, 0::2], w[:, 1::2]), 1)),
        (
            fp8_weights(w.view(2, 128, 2, 128), w2, layout="interleaved"),
            torch.cat((w[:, 0::2], w[:, 1::2]), 1),
        ),
        (fp8_weights(w[:, :128], w2, w[:, 128:]), w),
    ):
        blocks, scale, *_ = made.up
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        found = blocks.view(torch.float8_e4m3fn).double() * wide.double()
        assert torch.equal(found, torch.stack([reference._by_blocks(e) for e in rows]))
    assert fp8_weights(w, w2, layout="halves").up[1][0, 0, 0] == 1  # of zeros


def test_weights_move_and_are_shown(device):
    case = CASE
    made = fp8_weights(*(inputs_of(case, device)[n] for n in WEIGHTS))
    assert made.to(device) is made
    assert made.device.type == device.type and made.to("cpu").device.type == "cpu"
    assert repr(made.to("cpu")) == "Fp8Weights(E=4, D=256, F=128, layout='separate', device='cpu')"
    assert not any(t.requires_grad for t in (*made.up, *made.down))
    copied = copy.deepcopy(made)
    assert all(map(torch.equal, made.up, copied.up)) and isinstance(copied, Fp8Weights)
    file = io.BytesIO()
    torch.save([*made.up], file)
    file.seek(0)
    assert all(map(torch.equal, made.up, torch.load(file, weights_only=True)))


def test_weights_that_require_a_gradient(device):
    """Nothing of it goes through fp8_weights, and the weights get theirs."""
    inputs, ids = inputs_of(CASE, device), CASE.ids(device)
    for name in WEIGHTS:
        inputs[name].requires_grad_()
    made = fp8_weights(*(inputs[n] for n in WEIGHTS))
    assert not any(t.requires_grad for t in (*made.up, *made.down))
    fused_experts(**inputs, ids=ids, fp8=made).sum().backward()
    assert all(inputs[n].grad.count_nonzero() for n in WEIGHTS)
    raw = torch.ops.fused_moe.fp8_weight(inputs["w1"], inputs["w3"], 0)
    assert not any(t.requires_grad for t in raw)


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_grads(device, layout, wgrad):
    """They have float32 sums of what the weights' gradients are before they are rounded."""
    case = replace(CASE, layout=layout)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad, **case.options}
    grads = step(fused_experts, inputs, dout, **options)
    names = [n for n in WEIGHTS if inputs[n] is not None]
    for some in (names, names[:1], names[-1:]):
        leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in inputs.items()}
        sums = {n: torch.randn_like(inputs[n], dtype=F32) for n in some}
        before = {n: t.clone() for n, t in sums.items()}
        given = tuple(sums.get(n) for n in WEIGHTS)
        fused_experts(**leaves, **options, main_grads=given).backward(dout)
        for n in names:
            if n not in some:
                assert torch.equal(leaves[n].grad, grads[f"d{n}"]), n
                continue
            assert leaves[n].grad is None
            added = sums[n].double() - before[n].double()
            assert error(added, grads[f"d{n}"]) <= 4e-3 * grads[f"d{n}"].double().norm(), n
        for name in ("x", "scores"):
            assert torch.equal(leaves[name].grad, grads[f"d{name}"])


def test_main_grads_that_are_not_asked_for(device):
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    sums = tuple(torch.zeros_like(inputs[n], dtype=F32) for n in WEIGHTS)
    out = fused_experts(**leaves, ids=ids, fp8=True, main_grads=sums)
    torch.autograd.grad(out, leaves["x"], dout)
    assert not any(t.count_nonzero() for t in sums)


def test_expert_map_and_plan(device):
    """Half of the experts, as one of two ranks has them."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    local = torch.tensor([-1, 1, -1, 0], dtype=torch.int32, device=device)
    few = inputs | {n: inputs[n][[3, 1]] for n in WEIGHTS}
    ours = check(few, dout, ids=ids, expert_map=local)
    plan = fused_moe.route_plan(ids, 2, local)
    planned = step(fused_experts, few, dout, ids=ids, plan=plan, fp8=True, fp8_wgrad="fp8")
    assert_same_bits(ours, planned)


def test_max_rows(device):
    """All slots but the last ones, for which there are no rows."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    max_rows = ids.numel() - 37
    check(inputs, dout, ids=ids, max_rows=max_rows)
    kept = fused_moe.route_plan(ids, CASE.num_experts, max_rows=max_rows).token_row >= 0
    ours, few = (
        step(fused_experts, inputs, dout, fp8=True, fp8_wgrad="fp8", **options)
        for options in ({"ids": ids, "max_rows": max_rows}, {"ids": ids.masked_fill(~kept, -1)})
    )
    assert_same_bits(ours, few)


def test_num_tokens(device):
    """Padding, as route marks it, changes no bit of the others."""
    inputs, dout, E = inputs_of(CASE, device), CASE.dout(device), CASE.num_experts
    logits = torch.randn(CASE.tokens, E, device=device)
    runs = []
    for num in (50, CASE.tokens):
        options = {"num_tokens": torch.tensor(num, device=device)} if num == 50 else {}
        scores, ids = fused_moe.route(logits[: CASE.tokens if options else 50], 2, **options)
        cut = slice(0, len(ids))
        of_call = inputs | {"scores": scores, "x": inputs["x"][cut]}
        weights = torch.where(torch.arange(len(ids), device=device) < 50, 1, 0).unsqueeze(-1)
        runs.append(step(fused_experts, of_call, dout[cut] * weights, ids=ids, fp8=True, fp8_wgrad="fp8"))
    padded, alone = runs
    assert torch.equal(padded["out"][:50], alone["out"]) and padded["out"][50:].count_nonzero() == 0
    assert torch.equal(padded["dx"][:50], alone["dx"]) and padded["dx"][50:].count_nonzero() == 0
    for w in WEIGHTS:
        assert torch.equal(padded[f"d{w}"], alone[f"d{w}"])


def test_shared_and_out(device):
    case = CASE
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    added = {"shared": torch.randn_like(dout), "shared_gate": torch.randn(case.tokens, device=device)}
    leaves = {n: t.requires_grad_() for n, t in added.items()}
    grads = []
    for function in (fused_experts, reference.fused_experts):
        out = function(**inputs, ids=ids, fp8=True, **leaves)
        grads.append((out.detach(), *torch.autograd.grad(out, [*leaves.values()], dout)))
    for mine, its in zip(*grads, strict=True):
        assert error(mine, its) <= near(device) * its.double().norm()
    with torch.no_grad():
        out = torch.full_like(dout, torch.nan)
        assert fused_experts(**inputs, ids=ids, fp8=True, **leaves, out=out) is out
        assert torch.equal(out, grads[0][0])


@pytest.mark.parametrize("num_rows, expected", ((4 * 256, "fp8"), (4 * 256 - 2, "bf16")))
def test_auto(device, num_rows, expected):
    case = replace(CASE, tokens=num_rows // 2, dim=128)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    runs = [
        step(fused_experts, inputs, dout, ids=ids, fp8=True, fp8_wgrad=w) for w in ("auto", *codes.WGRADS)
    ]
    same = {w: torch.equal(runs[0]["dw1"], run["dw1"]) for w, run in zip(codes.WGRADS, runs[1:], strict=True)}
    assert same == {w: w == expected for w in codes.WGRADS}


@pytest.mark.parametrize("wgrad", codes.WGRADS)
def test_autocast_leaves_weights(device, wgrad):
    """x becomes bfloat16; float32 weights are quantised as they are, and get float32 gradients."""
    case = replace(CASE, dtype=F32)
    inputs, ids = inputs_of(case, device), case.ids(device)
    dout = case.dout(device).to(BF16)

    def under_autocast(**arguments):
        with torch.autocast(device.type, BF16):
            return fused_experts(**arguments)

    options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad}
    ours = step(under_autocast, inputs, dout, **options)
    direct = step(fused_experts, inputs | {n: inputs[n].to(BF16) for n in ("x", *WEIGHTS)}, dout, **options)
    assert ours["out"].dtype == BF16 and ours["dx"].dtype == F32 and ours["dw1"].dtype == F32
    loop = step(reference.fused_experts, inputs | {"x": inputs["x"].to(BF16)}, dout, **options)
    for name, its in loop.items():
        assert error(ours[name], its) <= near(device) * its.double().norm(), name
    for w in WEIGHTS:  # nearer to the loop's than what is rounded to bfloat16
        assert error(ours[f"d{w}"], loop[f"d{w}"]) < error(direct[f"d{w}"], loop[f"d{w}"])


@pytest.mark.parametrize("wgrad", codes.WGRADS)
@pytest.mark.parametrize("main_grads", (False, True))
def test_compile(device, wgrad, main_grads):
    case = replace(CASE, tokens=20)
    inputs, dout, ids = inputs_of(case, device), case.dout(device), case.ids(device)
    made = fp8_weights(*(inputs[n] for n in WEIGHTS))
    for fp8 in (True, made):
        runs = []
        for compiled in (False, True):
            sums = tuple(torch.zeros_like(inputs[n], dtype=F32) for n in WEIGHTS) if main_grads else None

            def experts(fp8=fp8, sums=sums, **arguments):
                return fused_experts(**arguments, ids=ids, fp8=fp8, fp8_wgrad=wgrad, main_grads=sums)

            if compiled:
                experts = torch.compile(experts, backend="aot_eager", fullgraph=not main_grads)
            if main_grads:
                leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
                out = experts(**leaves)
                out.backward(dout)
                runs.append(
                    {"out": out.detach(), "dx": leaves["x"].grad, **dict(zip(WEIGHTS, sums, strict=True))}
                )
            else:
                runs.append(step(experts, inputs, dout))
        assert_same_bits(*runs)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_checkpointing_and_anomaly_mode(device):
    """Checkpointing gives the same bits. Anomaly mode finds no NaN in memory that holds codes."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)

    def again(**arguments):
        return checkpoint(fused_experts, **arguments, use_reentrant=False)

    for wgrad in codes.WGRADS:
        options = {"ids": ids, "fp8": True, "fp8_wgrad": wgrad}
        whole = step(fused_experts, inputs, dout, **options)
        assert_same_bits(whole, step(again, inputs, dout, **options))
        torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                assert_same_bits(whole, step(fused_experts, inputs, dout, **options))
        finally:
            torch.use_deterministic_algorithms(False)


def test_h_is_freed_between_the_nodes(device):
    """Backward's second node finds x, codes and scales alone."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    with Calls() as calls:
        fused_experts(**leaves, ids=ids, fp8=True, fp8_wgrad="fp8").backward(dout)
    ((args, _),) = calls.of("fp8_up_backward")
    ((_, made),) = calls.of("fp8_up")
    h = made[2].data_ptr()
    assert not any(torch.is_tensor(t) and t.data_ptr() == h for t in args)
    assert made[0].untyped_storage().nbytes() == 2 and made[1].untyped_storage().nbytes() == 4
    ((_, links_t),) = calls.of("fp8_up_weights")
    assert [t.untyped_storage().nbytes() for t in links_t] == [2, 4]


class Links(TorchDispatchMode):
    """Which of dh's tensors are alive when one of backward's operators begins: (operator, [bool] * 4)."""

    def __init__(self):
        super().__init__()
        self.alive, self.refs = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("fused_moe::")
        if name.startswith("fp8") and "backward" in name:
            self.alive.append((name, [not ref.expired() for ref in self.refs]))
        result = func(*args, **(kwargs or {}))
        if name.startswith("fp8_down_backward"):
            self.refs = [StorageWeakRef(t.untyped_storage()) for t in result[:4]]
        return result


@pytest.mark.parametrize("autocast", (False, True))
@pytest.mark.parametrize("main_grads", (False, True))
def test_rows_of_dh_are_freed_before_weight_gradients(device, main_grads, autocast):
    """dx is made first, of dh by rows, and dw1 and dw3 of dh by columns."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    leaves = {n: t.float() if autocast else t for n, t in inputs.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
    sums = tuple(torch.zeros_like(inputs[n], dtype=F32) for n in WEIGHTS) if main_grads else None
    with torch.autocast(device.type, BF16, enabled=autocast), Calls() as calls:
        x = leaves["x"] * 1  # as from a layer before
        out = fused_experts(
            x, **{n: t for n, t in leaves.items() if n != "x"}, ids=ids, fp8=True, main_grads=sums
        )
    assert sum(name == "aten::_to_copy" for name, *_ in calls.calls) == autocast  # x is cast once
    with Links() as links:
        out.backward(dout)
    end = "_accumulate" if main_grads else ""
    assert links.alive == [
        (f"fp8_down_backward{end}", []),
        ("fp8_up_backward", [True] * 4),
        (f"fp8_up_weights_backward{end}", [False, False, True, True]),
    ]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_trace(device):
    """A graph of torch.jit has all three operators, each with a plan of its own, and the same bits."""
    inputs, dout, ids = inputs_of(CASE, device), CASE.dout(device), CASE.ids(device)
    x, scores = inputs.pop("x"), inputs.pop("scores")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterDict(inputs)

        def forward(self, x):
            return fused_experts(x, **self.weights, scores=scores, ids=ids, fp8=True)

    layer, runs = Layer(), []
    for function in (torch.jit.trace(layer, x), layer):
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        grads = torch.autograd.grad(out, [leaf, *layer.parameters()], dout)
        runs.append(dict(zip(("out", "dx", *layer.weights), (out.detach(), *grads), strict=True)))
    assert_same_bits(*runs)


def test_double_backward_raises(device):
    inputs, ids = inputs_of(CASE, device), CASE.ids(device)
    x = inputs.pop("x").requires_grad_()
    out = fused_experts(x, **inputs, ids=ids, fp8=True)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()


@pytest.mark.parametrize("name", GRADIENTS)
def test_forward_mode_raises(device, name):
    inputs, ids = inputs_of(CASE, device), CASE.ids(device)
    primal = inputs.pop(name)

    def experts(t):
        return fused_experts(**inputs, **{name: t}, ids=ids, fp8=True)

    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(experts, (primal,), (primal,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        experts(forward_ad.make_dual(primal, primal))


def test_training_step(device):
    """A few steps of SGD lower the loss as those of the 16-bit layer do."""
    case = replace(CASE, tokens=64, dim=128)
    inputs, ids = inputs_of(case, device), case.ids(device)
    target = case.dout(device)
    losses = []
    for fp8 in (None, True):
        weights = {n: inputs[n].detach().clone().requires_grad_() for n in WEIGHTS}
        optimizer = torch.optim.SGD(weights.values(), lr=5.0)
        for _ in range(10):
            out = fused_experts(inputs["x"], **weights, scores=inputs["scores"], ids=ids, fp8=fp8)
            loss = (out.float() - target.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[1] < 1.5


# --- refusals -----------------------------------------------------------------------------------------


def refused(device, **changes):
    case = replace(CASE, tokens=3)
    arguments = inputs_of(case, device) | {"ids": case.ids(device), "fp8": True}
    return arguments | changes


E, D, F = CASE.num_experts, CASE.dim, CASE.hidden


def bf16(*shape):
    return torch.randn(shape, dtype=BF16)


REFUSED = {
    "b1": (lambda: {"b1": bf16(E, F)}, ValueError, "no b1 with fp8, found a b1"),
    "b2": (lambda: {"b2": bf16(E, D)}, ValueError, "no b2 with fp8"),
    "b3": (lambda: {"b3": bf16(E, F)}, ValueError, "no b3 with fp8"),
    "score_on": (lambda: {"score_on": "input"}, ValueError, "score_on 'output' with fp8, found 'input'"),
    "quantised": (lambda: {"w2": quantize(bf16(E, D, F), "int8")}, ValueError, "w2 to be a tensor with fp8"),
    "lora": (lambda: {"lora": fused_moe.LoRA(a1=bf16(E, 2, D), b1=bf16(E, F, 2))}, ValueError, "no lora"),
    "compute": (lambda: {"compute": "codes"}, ValueError, "no compute with fp8"),
    "smooth": (lambda: {"smooth1": torch.ones(E, D)}, ValueError, "no smooth1 with fp8"),
    "fp8": (lambda: {"fp8": "e4m3"}, TypeError, "fp8 to be None, True or .*, found str"),
    "wgrad": (lambda: {"fp8_wgrad": "e5m2"}, ValueError, "fp8_wgrad to be one of"),
    "wgrad alone": (lambda: {"fp8": None, "fp8_wgrad": "fp8"}, ValueError, "fp8_wgrad only beside fp8"),
    "shape": (
        lambda: {"fp8": fp8_weights(bf16(E, 256, D), bf16(E, D, 256), bf16(E, 256, D))},
        ValueError, r"fp8 of shape \(E, D, F\) = \(4, 256, 128\), found \(4, 256, 256\)",
    ),
    "layout": (
        lambda: {"fp8": fp8_weights(bf16(E, F, D), bf16(E, D, F))},
        ValueError, "fp8 of weights of layout 'separate', found 'ungated'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(device, name):
    changes, kind, expected = REFUSED[name]
    moved = {n: t.to(device) if torch.is_tensor(t) else t for n, t in changes().items()}
    if name in ("shape", "layout"):
        moved["fp8"] = moved["fp8"].to(device)
    with Calls() as calls, pytest.raises(kind, match=f"^fused_experts: expected {expected}"):
        fused_experts(**refused(device, **moved))
    assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")]


@pytest.mark.parametrize("dtype", (F16, F64))
def test_other_dtypes_are_refused(device, dtype):
    case = replace(CASE, tokens=3, dtype=dtype)
    inputs = inputs_of(case, device)
    with pytest.raises(TypeError, match=f"x of dtype bfloat16.* with fp8, found {dtype}"):
        fused_experts(**inputs, ids=case.ids(device), fp8=True)
    with pytest.raises(TypeError, match="w1 of dtype float32 or bfloat16, found"):
        fp8_weights(*(inputs[n] for n in WEIGHTS))
    with pytest.raises(TypeError, match="float16 of autocast"), torch.autocast(device.type, F16):
        fused_experts(**inputs_of(CASE, device), ids=CASE.ids(device), fp8=True)
    with pytest.raises(RuntimeError, match="fp8_up: expected bfloat16"):
        x = torch.zeros(3, 128, dtype=dtype, device=device)
        w = torch.zeros(1, 128, 128, dtype=dtype, device=device)
        torch.ops.fused_moe.fp8_up(x, w, w, [], [], 0, 0, [1.0, 1.0], False)


@pytest.mark.parametrize("dim, hidden, name, found", ((192, 128, "D", 192), (128, 64, "F", 64)))
def test_other_widths_are_refused(device, dim, hidden, name, found):
    case = replace(CASE, tokens=3, dim=dim, hidden=hidden)
    inputs = inputs_of(case, device)
    expected = rf"{name} that is a multiple of 128 with FP8 training, found {found}"
    with pytest.raises(ValueError, match=expected):
        fused_experts(**inputs, ids=case.ids(device), fp8=True)
    with pytest.raises(ValueError, match=expected):
        fp8_weights(*(inputs[n] for n in WEIGHTS))
    with pytest.raises(
        RuntimeError, match=f"fp8_weight: expected . that is a multiple of 128, found {found}"
    ):
        torch.ops.fused_moe.fp8_weight(inputs["w2"], None, codes.UNGATED)


def test_wrong_weights_are_named(device):
    w1, w2, w3 = (inputs_of(CASE, device)[n] for n in WEIGHTS)
    for arguments, kind, expected in (
        ((w1, w2, w3[:, :64]), ValueError, "w3 of 4 experts .* found"),
        ((w1.mT, w2, w3), ValueError, "w1 of 4 experts .* found"),
        ((w1, w2, w3.float()), TypeError, "w3 of dtype bfloat16"),
        ((w1[0], w2, w3), ValueError, "w1 of 3 dimensions"),
        ((w1, None, w3), TypeError, "w2 to be a tensor"),
    ):
        with pytest.raises(kind, match=f"^fp8_weights: expected {expected}"):
            fp8_weights(*arguments)
    with pytest.raises(ValueError, match="no w3 with layout 'halves'"):
        fp8_weights(w1, w2, w3, layout="halves")


def test_raw_operators_check_what_memory_safety_needs(device):
    inputs, ids = inputs_of(CASE, device), CASE.ids(device)
    plan, fp8 = fused_moe.route_plan(ids, E).tensors, fp8_weights(*(inputs[n] for n in WEIGHTS))
    ops, x, w1, w3 = torch.ops.fused_moe, inputs["x"], inputs["w1"], inputs["w3"]
    up = [x, w1, w3, plan, [*fp8.up], 0, 0, [1.0, 1.0], True]
    link, link_scale, *_ = ops.fp8_up(*up)
    of_weights = [x, w1, w3, plan, 0, 0]
    links_t, halves = ops.fp8_up_weights(*of_weights), torch.cat((w1, w3), 1)
    of_dx = [link, link_scale, x, plan, [*fp8.up[2:]]]
    codes_, codes_t = fp8.up[0], fp8.up[2]
    of_dw = [*links_t, *of_weights, True, True]
    for name, call, place, value, expected in (
        ("fp8_up", up, 3, plan[:2], "plan of"),
        ("fp8_up", up, 4, [*fp8.up[:3]], r"\[codes, scale\] or \[codes, scale, codes_t, scale_t\], found 3"),
        ("fp8_up", up, 0, x[:, :128], "x's width"),
        ("fp8_up", up, 4, [codes_[:, :128], *fp8.up[1:]], "codes of a weight"),
        ("fp8_up", up, 4, [codes_.view(torch.int8), *fp8.up[1:]], "codes of a weight"),
        ("fp8_up", up, 4, [codes_[:2], *fp8.up[1:]], "codes of a weight"),
        ("fp8_up_weights", of_weights, 0, x[:, :128], "x's width"),
        ("fp8_up_weights", of_weights, 3, plan[:2], "plan of"),
        ("fp8_up_weights", of_weights, 5, 2, "wgrad from 0 to 1"),
        ("fp8_up_backward", of_dx, 0, link[:, :64], "dlink of shape"),
        ("fp8_up_backward", of_dx, 2, x[:3], "rows of the first tensor"),
        ("fp8_up_backward", of_dx, 1, link_scale[:1], "dlink_scale of shape"),
        ("fp8_up_backward", of_dx, 4, [*fp8.up], r"quantized of \[codes_t, scale_t\], found 4"),
        ("fp8_up_backward", of_dx, 4, [codes_t[:2], fp8.up[3]], "codes of a weight"),
        ("fp8_up_backward", of_dx, 4, [codes_t[0], fp8.up[3]], "codes of a weight of 3 dimensions"),
        ("fp8_up_backward", of_dx, 4, [codes_t[..., :64], fp8.up[3]], "H that is a multiple of 128"),
        ("fp8_up_weights_backward", of_dw, 0, links_t[0][:1], "dlink_t of shape"),
        ("fp8_up_weights_backward", of_dw, 1, links_t[1][:1], "dlink_t_scale of shape"),
        ("fp8_up_weights_backward", [*of_dw[:3], halves, None, plan, 1, *of_dw[7:]], 8, True, "need"),
        ("fp8_weight", [w1, w3, 0], 2, 7, "layout"),
        ("fp8_weight", [w1, w3, 0, 1], 3, 4, "orders from 1 to 3"),
    ):
        with pytest.raises(RuntimeError, match=f"fused_moe::{name}: expected .*({expected})"):
            getattr(ops, name)(*call[:place], value, *call[place + 1 :])
