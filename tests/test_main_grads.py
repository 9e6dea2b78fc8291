"""main_grads: weight gradients are accumulated into float32 buffers instead of .grad."""

import copy
import itertools
from functools import partial

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LAYOUTS,
    Calls,
    Case,
    assert_as_good,
    assert_near,
    assert_same_bits,
    forward_backward,
    operator_calls,
    to_double,
    variants,
)
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import fused_moe
from fused_moe import FusedMoE, fused_experts, grouped_mlp, main_grad, reference
from fused_moe import ops as codes
from fused_moe.ops import WRITES_BESIDE_VIEWS

pytestmark = pytest.mark.usefixtures("poison")
compiled_alone = pytest.mark.skipif(
    WRITES_BESIDE_VIEWS, reason="before PyTorch 2.13 main_grads are not compiled"
)

ops = torch.ops.fused_moe
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)
DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
WEIGHTS = ("w1", "w2", "w3")
# Widths with aligned 16-byte stores, and widths without any.
SIZES = {"whole": {"dim": 64, "hidden": 40}, "odd": {"dim": 37, "hidden": 29}}


def draw_main_grads(inputs: dict, form=None) -> tuple:
    """Random float32 tensors of the weights' shapes, in any storage."""

    def draw(w):
        grad = torch.randn(w.shape, device=w.device)
        return grad if form is None else form(grad)

    return tuple(None if inputs[n] is None else draw(inputs[n]) for n in WEIGHTS)


def copies(main_grads, dtype=F32) -> tuple:
    return tuple(None if m is None else m.to(dtype, copy=True) for m in main_grads)


def run(fn, inputs: dict, dout, main_grads, **fixed) -> dict:
    """{"out", "dx", ...}: the result of fn and the .grad of every tensor of `inputs` that has one."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    out = fn(**{**inputs, **leaves}, main_grads=main_grads, **fixed)
    out.backward(dout)
    grads = {f"d{n}": t.grad for n, t in leaves.items() if t.grad is not None}
    return {"out": out.detach(), **grads}


def named(main_grads) -> dict:
    return {n: m for n, m in zip(WEIGHTS, main_grads, strict=True) if m is not None}


def check(fn_name: str, inputs: dict, dout, main_grads, slack=4.0, **fixed) -> None:
    """main_grads against the reference's in float64; all other results against a call without them."""
    fn, loop = getattr(fused_moe, fn_name), getattr(reference, fn_name)
    eager, exact = copies(main_grads), copies(main_grads, F64)
    found = run(fn, inputs, dout, main_grads, **fixed)
    run(loop, inputs, dout, eager, **fixed)
    run(loop, to_double(inputs), to_double(dout), exact, **fixed)
    assert_as_good(named(main_grads), named(eager), named(exact), slack)
    plain = forward_backward(fn, inputs, dout, **fixed)
    assert_same_bits(found, {n: v for n, v in plain.items() if n[1:] not in WEIGHTS})


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.quick(one_in=2)
@ALL_LAYOUTS
@DTYPES
def test_layouts(device, dtype, layout):
    """Every layout, with and without biases, scores on input or output, some experts without rows."""
    for size in SIZES.values():
        for case in variants(Case(layout=layout, dtype=dtype, routing="gaps", **size)):
            inputs, ids = case.inputs(device), case.ids(device)
            main_grads = draw_main_grads(inputs)
            before = copies(main_grads)
            fixed = {"ids": ids, "score_on": case.score_on, **case.options}
            check("fused_experts", inputs, case.dout(device), main_grads, **fixed)
            empty = [e for e in range(case.num_experts) if not (ids == e).any()]
            assert empty
            for name, grad in named(main_grads).items():
                first = named(before)[name]
                assert torch.equal(grad[empty], first[empty]), f"{name} of an empty expert"
                assert not torch.equal(grad, first), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ("separate", "halves.T", "interleaved"))
@DTYPES
def test_storage(device, dtype, layout, form):
    """Main gradients strided, misaligned, and in the other major order than their weights."""
    for size in SIZES.values():
        case = Case(layout=layout, dtype=dtype, routing="sentinels", **size)
        inputs = case.inputs(device)
        main_grads = draw_main_grads(inputs, FORMS[form])
        check("fused_experts", inputs, case.dout(device), main_grads, ids=case.ids(device), **case.options)


def test_parts_of_one_buffer(device):
    """Megatron's main gradients are slices of one flat buffer; elements between them do not change."""
    case = Case(layout="separate")
    inputs = case.inputs(device)
    sizes = [inputs[n].numel() for n in WEIGHTS]
    buffer = torch.full((sum(sizes) + 9,), 5.0, device=device)
    pieces, first = [], 3
    for name, size in zip(WEIGHTS, sizes, strict=True):
        pieces.append(buffer[first : first + size].view(inputs[name].shape))
        first += size + 2
    expected = copies(pieces)
    fixed = {"ids": case.ids(device)}
    dout = case.dout(device)
    run(fused_experts, inputs, dout, tuple(pieces), **fixed)
    run(fused_experts, inputs, dout, expected, **fixed)
    between = torch.ones_like(buffer, dtype=torch.bool)
    first = 3
    for piece, other, size in zip(pieces, expected, sizes, strict=True):
        assert_near(piece, other)
        between[first : first + size] = False
        first += size + 2
    assert (buffer[between] == 5).all() and between.sum() == 9


@pytest.mark.parametrize("layout", ("separate", "ungated", "interleaved.T"))
@DTYPES
def test_tail_rows_do_not_leak(device, dtype, layout):
    """grouped_mlp with NaN in the rows past counts.sum(), and an expert without rows."""
    case = Case(layout=layout, dtype=dtype, bias=True)
    counts = torch.tensor([4, 0, 129, 1, 33], device=device)
    x, dout = (torch.randn(167 + 41, case.dim, device=device).to(dtype) for _ in range(2))
    inputs = {"x_rows": x, "w3": None, **case.weights(device)}
    main_grads = draw_main_grads(inputs)
    clean, before = copies(main_grads), copies(main_grads)
    check("grouped_mlp", inputs, dout, clean, counts=counts, **case.options)
    x[167:] = dout[167:] = float("nan")
    run(grouped_mlp, inputs, dout, main_grads, counts=counts, **case.options)
    assert_same_bits(named(main_grads), named(clean))
    for name, grad in named(main_grads).items():
        assert torch.equal(grad[1], named(before)[name][1]), f"{name} of the empty expert"


@DTYPES
def test_no_tokens(device, dtype):
    """Without a token, and where no slot has an expert, nothing is added."""
    for case in (Case(tokens=0, dtype=dtype), Case(routing="none", dtype=dtype)):
        inputs = case.inputs(device)
        main_grads = draw_main_grads(inputs)
        before = copies(main_grads)
        run(fused_experts, inputs, case.dout(device), main_grads, ids=case.ids(device))
        assert_same_bits(named(main_grads), named(before))


@pytest.mark.parametrize("order", ("one after another", "interleaved"))
@DTYPES
def test_micro_batches_add_up(device, dtype, order):
    """Two batches on one set of main gradients, the second's forward after or before the first's backward."""
    case = Case(dtype=dtype)
    weights = {n: t for n, t in case.weights(device).items() if t is not None}
    leaves = {n: t.requires_grad_() for n, t in weights.items()}
    batches = []
    for seed in range(2):
        batch = Case(dtype=dtype, seed=seed)
        inputs = {n: t for n, t in batch.inputs(device).items() if n in ("x", "scores")}
        batches.append((inputs, batch.ids(device), batch.dout(device)))
    main_grads = draw_main_grads(leaves)
    exact = copies(main_grads, F64)
    eager = copies(main_grads)
    outs = []
    for inputs, ids, dout in batches:
        outs.append((fused_experts(**inputs, **leaves, ids=ids, main_grads=main_grads), dout))
        if order == "one after another":
            outs.pop()[0].backward(dout)
        for grads, values in ((eager, inputs | weights), (exact, to_double(inputs | weights))):
            run(reference.fused_experts, values, dout.to(values["x"].dtype), grads, ids=ids)
    for out, dout in outs:
        out.backward(dout)
    assert all(t.grad is None for t in leaves.values())
    assert_as_good(named(main_grads), named(eager), named(exact))


def wgrad_operands(device, dtype, rows=700, a=40, b=64, experts=5):
    """a, b, the offs of experts with one of them empty, and the counts."""
    counts = torch.full((experts,), rows // (experts - 1))
    counts[1] = 0
    counts[-1] = rows - counts[:-1].sum()
    a, b = (torch.randn(rows, width, device=device).to(dtype) for width in (a, b))
    return a, b, counts.cumsum(0).int().to(device), counts.tolist()


@pytest.mark.quick(one_in=5)
@pytest.mark.parametrize("gathered", ("none", "a", "b"))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", ((40, 64), (7, 37)), ids=("whole", "odd"))
@DTYPES
def test_wgrad_accumulate(device, dtype, widths, form, gathered):
    """The operator, with either operand gathered: rounded to float32 only, not to the operands' dtype."""
    a, b, ends, counts = wgrad_operands(device, dtype, 700, *widths)
    tokens = torch.randperm(700, device=device)
    rows = {"none": (a, b), "a": (a[tokens], b), "b": (a, b[tokens])}[gathered]
    dw = FORMS[form](torch.randn(5, *widths, device=device))
    grads = [x.double().T @ y.double() for x, y in zip(*(t.split(counts) for t in rows), strict=True)]
    exact = dw.double() + torch.stack(grads)
    before = dw.clone()
    maps = (tokens.int() if gathered == n else None for n in "ab")
    assert ops.wgrad_accumulate(a, b, ends, dw, *maps) is None
    assert_near(dw, exact)
    assert torch.equal(dw[1], before[1]), "of the empty expert"


@DTYPES
def test_sums_are_added_once(device, dtype):
    """A sum over many rows is rounded to the size of a large main gradient once, not block by block."""
    a, b, ends, counts = wgrad_operands(device, dtype, 9000, 64, 64, 2)
    dw = 30_000 * torch.randn(2, 64, 64, device=device)
    exact, eager = dw.double(), dw.clone()
    exact[0] += a.double().T @ b.double()
    eager[0] += (a.double().T @ b.double()).float()
    ops.wgrad_accumulate(a, b, ends, dw)
    assert counts == [9000, 0]
    slack = 0.01 if device.type == "cpu" else 0.5  # tensor cores cut what they add up: 1e-3 of 9000 rows
    assert_as_good({"dw": dw}, {"dw": eager}, {"dw": exact}, slack=slack)


def test_same_bits(device):
    """Two runs give the same bits."""
    case = Case(500, 64, 40, 5, 3, BF16, bias=True)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    first = draw_main_grads(inputs)
    second = copies(first)
    for main_grads in (first, second):
        run(fused_experts, inputs, dout, main_grads, ids=ids)
    assert_same_bits(named(first), named(second))


# --- which weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)))
def test_some_weights(device, given):
    """Weights without a main gradient get their .grad, the same bits as without any."""
    case = Case(bias=True)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    everything = forward_backward(fused_experts, inputs, dout, ids=ids)
    drawn = draw_main_grads(inputs)
    whole = copies(drawn)
    run(fused_experts, inputs, dout, whole, ids=ids)
    main_grads = tuple(m if i in given else None for i, m in enumerate(drawn))
    found = run(fused_experts, inputs, dout, main_grads, ids=ids)
    absent = {f"d{WEIGHTS[i]}" for i in given}
    assert_same_bits(found, {n: v for n, v in everything.items() if n not in absent})
    for i in given:
        assert torch.equal(drawn[i], whole[i])


@pytest.mark.parametrize("frozen", WEIGHTS)
def test_frozen_weight(device, frozen):
    """A weight that requires no gradient: its main gradient does not change, and no GEMM runs for it."""
    case = Case()
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    main_grads = draw_main_grads(inputs)
    before, whole = copies(main_grads), copies(main_grads)
    run(fused_experts, inputs, dout, whole, ids=ids)
    for name, t in inputs.items():
        if t is not None and name != frozen:
            t.requires_grad_()
    out = fused_experts(**inputs, ids=ids, main_grads=main_grads)
    with Calls() as calls:
        out.backward(dout)
    side, flag = {
        "w1": ("up", -7), "w3": ("up", -6), "w2": ("down", -4)
    }[frozen]  # fmt: skip
    [(args, _)] = calls.of(f"experts_{side}_backward_accumulate")
    assert args[flag] is False
    for i, name in enumerate(WEIGHTS):
        assert torch.equal(main_grads[i], before[i] if name == frozen else whole[i]), name


def test_empty_main_grads_are_none(device):
    """None, and a tuple of them, run the operators that are functional."""
    case = Case()
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    expected = forward_backward(fused_experts, inputs, dout, ids=ids)
    for main_grads in (None, (None, None, None)):
        with Calls() as calls:
            found = run(fused_experts, inputs, dout, main_grads, ids=ids)
        assert_same_bits(found, expected)
        assert not [n for n, _, _ in calls.calls if n.endswith("accumulate")]


@ALL_LAYOUTS
def test_nothing_of_a_weights_size_is_made(device, layout):
    """No temporary weight gradient is allocated, and no weight or main gradient copied."""
    case = Case(8, 40, 24, 16, 1, BF16, layout=layout)  # far fewer rows than weights
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    main_grads = draw_main_grads(inputs)
    weights = [inputs[n].requires_grad_() for n in WEIGHTS if inputs[n] is not None]
    smallest = min(w.numel() for w in weights)
    known = {t.untyped_storage()._cdata for t in (*weights, *named(main_grads).values())}
    with Calls() as calls:
        fused_experts(**inputs, ids=ids, main_grads=main_grads, **case.options).backward(dout)
    for name, _, result in calls.calls:
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if torch.is_tensor(t) and t.untyped_storage()._cdata not in known:
                assert t.numel() < smallest, name
    assert all(w.grad is None for w in weights)


# --- which backward passes -------------------------------------------------------------------------

FUNCTIONS = pytest.mark.parametrize(
    "experts", (fused_experts, reference.fused_experts), ids=("ours", "reference")
)


def weights_of(leaves: dict) -> dict:
    return {n: leaves[n] for n in WEIGHTS if leaves[n] is not None}


def called(experts, case: Case, device, main_grads=None, dtype=None):
    """(out, its gradient, {name: leaf}, main_grads) of a call."""
    leaves = {n: t if t is None else t.requires_grad_() for n, t in case.inputs(device).items()}
    main_grads = draw_main_grads(leaves) if main_grads is None else main_grads
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        out = experts(**leaves, ids=case.ids(device), main_grads=main_grads, **case.options)
    return out, case.dout(device).to(out.dtype), leaves, main_grads


@FUNCTIONS
@ALL_LAYOUTS
def test_gradients_of_others_alone(device, layout, experts):
    """autograd.grad and backward(inputs=...) of x and scores add nothing, as often as they are called; then
    backward() adds once."""
    case = Case(layout=layout, bias=True)
    out, dout, leaves, main_grads = called(experts, case, device)
    before, expected = copies(main_grads), copies(main_grads)
    plain = forward_backward(experts, leaves, dout, ids=case.ids(device), **case.options)
    others = [leaves["x"], leaves["scores"]]
    dx, dscores = torch.autograd.grad(out, others, dout, retain_graph=True)
    assert_near(dx, plain["dx"])
    assert_near(dscores, plain["dscores"])
    out.backward(dout, inputs=others, retain_graph=True)
    assert_same_bits(named(main_grads), named(before))
    out.backward(dout)
    run(experts, leaves, dout, expected, ids=case.ids(device), **case.options)
    assert_same_bits(named(main_grads), named(expected))
    assert all(w.grad is None for w in weights_of(leaves).values())


@pytest.mark.parametrize("asked", WEIGHTS)
def test_gradients_of_one_weight_alone(device, asked):
    """backward(inputs=[w]) adds to w's main_grad alone, and no GEMM runs for another weight."""
    case = Case()
    out, dout, leaves, main_grads = called(fused_experts, case, device)
    before, expected = copies(main_grads), copies(main_grads)
    run(fused_experts, leaves, dout, expected, ids=case.ids(device))
    with Calls() as calls:
        out.backward(dout, inputs=[leaves[asked]])
    for name, grad in named(main_grads).items():
        assert torch.equal(grad, named(expected if name == asked else before)[name]), name
    needs = [args[-7:-5] for args, _ in calls.of("experts_up_backward_accumulate")]
    needs += [args[-4:-3] for args, _ in calls.of("experts_down_backward_accumulate")]
    assert sum(map(sum, needs)) == 1


@FUNCTIONS
@pytest.mark.parametrize("layout", ("separate", "halves.T", "pairs"))
def test_autograd_grad_of_weights(device, layout, experts):
    """It adds, and returns zeros: None would raise."""
    case = Case(layout=layout)
    out, dout, leaves, main_grads = called(experts, case, device)
    expected = copies(main_grads)
    run(experts, leaves, dout, expected, ids=case.ids(device), **case.options)
    weights = list(weights_of(leaves).values())
    for w, grad in zip(weights, torch.autograd.grad(out, weights, dout), strict=True):
        assert grad.shape == w.shape and grad.dtype == w.dtype and not grad.any()
    assert_same_bits(named(main_grads), named(expected))


split_alone = pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="before PyTorch 2.12 pipelining's split raises for an autograd.Function of several outputs",
)


@pytest.mark.parametrize(
    "how",
    (pytest.param("joined", marks=split_alone), "apart", pytest.param("checkpointed", marks=split_alone)),
)
def test_split_of_a_pipeline(device, how):
    """torch.distributed.pipelining's passes for inputs and for weights, over several micro-batches: the first
    adds nothing, and both give what backward() gives."""
    settings = {"bias": True, "num_shared_experts": 1, "shared_expert_gate": True}
    ours, plain = layers(device, **settings)
    if how == "apart":  # the router's hook keeps it out of the experts' node
        ours.router.register_forward_hook(lambda *_: None)
    stage = nn.Sequential(nn.Linear(24, 24, device=device), ours, nn.Linear(24, 24, device=device))
    whole = nn.Sequential(copy.deepcopy(stage[0]), plain, copy.deepcopy(stage[2]))
    for _ in range(3):
        x, dout = torch.randn(2, 40, 24, device=device)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        whole(leaves[0]).backward(dout)
        out = checkpoint(stage, leaves[1], use_reentrant=False) if how == "checkpointed" else stage(leaves[1])
        before = [w.main_grad.clone() for w in ours.experts.parameters() if hasattr(w, "main_grad")]
        (dx,), groups = stage_backward_input([out], [dout], [leaves[1]], stage.parameters())
        assert_near(dx, leaves[0].grad, slack=16.0)
        after = [w.main_grad for w in ours.experts.parameters() if hasattr(w, "main_grad")]
        assert len(after) == 3 and all(map(torch.equal, after, before))
        stage_backward_weight(stage.parameters(), groups)
    for (name, p), other in zip(stage.named_parameters(), whole.parameters(), strict=True):
        if hasattr(p, "main_grad"):
            assert_near(p.main_grad - 1, other.grad, slack=16.0)
            assert not p.grad.any(), name
        else:
            assert_near(p.grad, other.grad, slack=16.0)


def test_without_the_engines_answer(device, monkeypatch):
    """A PyTorch that does not tell: every backward pass adds, and a warning says so."""
    monkeypatch.setattr(main_grad, "_will_execute", None)
    case = Case()
    out, dout, leaves, main_grads = called(fused_experts, case, device)
    expected = copies(main_grads)
    with pytest.warns(UserWarning, match="does not tell which gradients a backward pass asks for"):
        torch.autograd.grad(out, leaves["x"], dout)
        run(fused_experts, leaves, dout, expected, ids=case.ids(device))
    assert_same_bits(named(main_grads), named(expected))


def test_nothing_is_asked_without_main_grads(device, monkeypatch):
    """Neither forward nor backward then takes longer."""
    for name in ("ops.less_unasked", "function.operands_of", "routed.operands_of", "main_grad._answer"):
        monkeypatch.setattr(f"fused_moe.{name}", None)
    layer = FusedMoE(24, 16, 6, 2, bias=True, device=device)
    layer(torch.randn(4, 24, device=device, requires_grad=True)).sum().backward()
    case = Case()
    run(fused_experts, case.inputs(device), case.dout(device), None, ids=case.ids(device))


# --- Megatron's hooks -------------------------------------------------------------------------------


def hook_as_megatron(weight, main_grad, zero_out_wgrad: bool) -> list:
    """What megatron-core's DistributedDataParallel does for a parameter with overlap_grad_reduce
    (_make_backward_post_hook). Returns the list of the calls of register_grad_ready."""
    weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
    if zero_out_wgrad:
        weight.zero_out_wgrad = True
    ready = []

    def hook(*_):
        assert weight.grad is not None, "param.grad being None is not safe when overlap_grad_reduce is True"
        assert weight.grad.shape == weight.shape and weight.grad.stride() == weight.stride()
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
        ready.append(weight)

    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(hook)
    weight.accumulator = accumulator  # the hook is gone with its node
    return ready


@FUNCTIONS
@pytest.mark.parametrize("dtype", (None, BF16), ids=("", "autocast"))
@pytest.mark.parametrize("zero_out_wgrad", (False, True))
@ALL_LAYOUTS
def test_megatrons_hooks(device, layout, zero_out_wgrad, dtype, experts):
    """They find a gradient of the weight's shape and grad_added_to_main_grad, once per micro-batch."""
    case = Case(layout=layout)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in case.inputs(device).items()}
    main_grads = draw_main_grads(leaves)
    expected = copies(main_grads)
    weights = weights_of(leaves)
    ready = [hook_as_megatron(w, named(main_grads)[n], zero_out_wgrad) for n, w in weights.items()]
    fixed, dout = {"ids": case.ids(device), **case.options}, case.dout(device).to(dtype or F32)
    for micro_batch in range(2):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            out = experts(**leaves, main_grads=main_grads, **fixed)
        torch.autograd.grad(out, leaves["x"], dout, retain_graph=True)
        assert all(len(calls) == micro_batch for calls in ready)
        assert all(w.grad_added_to_main_grad == (micro_batch > 0) for w in weights.values())
        out.backward(dout)
        assert all(len(calls) == micro_batch + 1 for calls in ready)
        assert all(w.grad_added_to_main_grad for w in weights.values())
    for _ in range(2):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            others = {n: t if t is None else t.detach().requires_grad_() for n, t in leaves.items()}
            out = experts(**others, main_grads=expected, **fixed)
        out.backward(dout)
    assert_same_bits(named(main_grads), named(expected))


@pytest.mark.parametrize("how", ("plain", "checkpointed"))
def test_megatrons_hooks_of_a_layer(device, how):
    ours, plain = layers(device, bias=True)
    weights = {n: p for n, p in ours.experts.named_parameters() if hasattr(p, "main_grad")}
    ready = [hook_as_megatron(w, w.main_grad, zero_out_wgrad=n == "w2") for n, w in weights.items()]
    for _ in range(2):
        x = torch.randn(40, 24, device=device, requires_grad=True)
        out = checkpoint(ours, x, use_reentrant=False) if how == "checkpointed" else ours(x)
        out.square().sum().backward()
        plain(x).square().sum().backward()
    assert [len(calls) for calls in ready] == [2, 2, 2]
    for name, w in weights.items():
        assert w.grad is None and w.grad_added_to_main_grad
        assert_near(w.main_grad - 1, getattr(plain.experts, name).grad, slack=16.0)


# --- inside PyTorch -------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpoint(device, use_reentrant):
    """Forward recomputed in backward: accumulated once, the same bits."""
    case = Case(dtype=BF16, bias=True)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    expected, found = (copies(m) for m in (draw_main_grads(inputs),) * 2)
    plain = run(fused_experts, inputs, dout, expected, ids=ids)

    def again(main_grads, **arguments):
        names, tensors = zip(*arguments.items(), strict=True)

        def call(*tensors):
            return fused_experts(**dict(zip(names, tensors, strict=True)), main_grads=main_grads)

        return checkpoint(call, *tensors, use_reentrant=use_reentrant)

    assert_same_bits(run(again, inputs, dout, found, ids=ids), plain)
    assert_same_bits(named(found), named(expected))


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
@pytest.mark.parametrize("layout", ("separate", "pairs", "interleaved.T"))
def test_autocast(device, dtype, layout):
    """Float32 master weights: the gradients go to the main gradients unrounded, .grad stays None."""
    case = Case(layout=layout)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device).to(dtype)
    expected, found = (copies(m) for m in (draw_main_grads(inputs),) * 2)
    halved = {n: t if t is None or n == "scores" else t.to(dtype) for n, t in inputs.items()}
    run(fused_experts, halved, dout, expected, ids=ids, **case.options)

    def under(**arguments):
        with torch.autocast(device.type, dtype):
            return fused_experts(**arguments)

    results = run(under, inputs, dout, found, ids=ids, **case.options)
    assert results.keys() == {"out", "dx", "dscores"}
    assert_same_bits(named(found), named(expected))


def test_double_backward_raises(device):
    """An accumulated gradient cannot be differentiated: refused before it is accumulated."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    main_grads = draw_main_grads(inputs)
    before = copies(main_grads)
    x = inputs.pop("x").requires_grad_()
    inputs["w1"].requires_grad_()
    out = fused_experts(x, **inputs, ids=ids, main_grads=main_grads)
    with pytest.raises(
        RuntimeError, match="cannot be differentiated: expected main_grads in a backward that is not"
    ):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert_same_bits(named(main_grads), named(before))


@pytest.mark.parametrize("layout", ("separate", "ungated", "halves.T"))
def test_opcheck(device, layout):
    """All of opcheck on the forward operators with main gradients."""
    case = Case(9, 6, 4, 3, 2, layout=layout)
    t, ids = case.inputs(device), case.ids(device)
    _, gated, _, transposed = LAYOUTS[layout]
    w1, w2, w3 = (w.mT if transposed and w is not None else w for w in map(t.get, WEIGHTS))
    main1, main2, main3 = draw_main_grads({"w1": w1, "w2": w2, "w3": w3})
    leaves = [v if v is None else v.detach().requires_grad_() for v in (t["x"], w1, w3, w2, t["scores"])]
    x, w1, w3, w2, scores = leaves
    plan = fused_moe.route_plan(ids, case.num_experts)
    code = codes.LAYOUTS[case.options["layout"]] if gated else codes.UNGATED
    settings = (plan.tensors, code, 0, [1.702, 7.0])
    rows = ids.numel()
    h = torch.randn(rows, (2 if gated else 1) * case.hidden, device=device, requires_grad=True)
    a = torch.randn(rows, case.hidden, device=device)
    up = (x, w1, w3, None, None, None, *settings, True, main1, main3)
    torch.library.opcheck(ops.experts_up.default, up)
    torch.library.opcheck(ops.experts_down.default, (a, h, w2, None, scores, *settings, main2))


@pytest.fixture
def fresh():
    """Clears the graphs of other tests. Compiling a function twice is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@compiled_alone
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compile(device, fresh, backend):
    """One dynamic graph; forward and backward of one batch after another add up as they do without."""
    compiled = torch.compile(fused_experts, fullgraph=True, dynamic=True, backend=backend)
    case = Case(layout="halves.T", bias=True)
    weights = case.weights(device)
    expected, found = (copies(m) for m in (draw_main_grads(weights),) * 2)
    for tokens in (17, 40, 130):
        batch = Case(tokens, layout="halves.T", bias=True, routing="sentinels")
        inputs = batch.inputs(device) | weights
        fixed = {"ids": batch.ids(device), **case.options}
        dout = batch.dout(device)
        plain = run(fused_experts, inputs, dout, expected, **fixed)
        results = run(compiled, inputs, dout, found, **fixed)
        assert results.keys() == plain.keys()
        for name, value in plain.items():
            assert_near(results[name], value)
    for name, grad in named(found).items():
        assert_near(grad, named(expected)[name])


@pytest.mark.parametrize("layout", ("separate", "halves.T", "pairs"))
def test_compile_with_views_of_one_buffer(device, fresh, layout):
    """What is accumulated goes to its place, and nothing is written beside it."""
    case = Case(5, 8, 6, 2, 1, layout=layout)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    weights = [inputs[w] for w in ("w1", "w2", "w3")]
    buffers = []
    for function in (fused_experts, torch.compile(fused_experts)):
        buffer = torch.zeros(16 + sum(w.numel() + 16 for w in weights if w is not None), device=device)
        ends = itertools.accumulate([16, *(0 if w is None else w.numel() + 16 for w in weights)])
        main_grads = tuple(
            None if w is None else buffer[first : first + w.numel()].view(w.shape)
            for w, first in zip(weights, ends, strict=False)
        )
        run(function, inputs, dout, main_grads, ids=ids, **case.options)
        buffers.append(buffer)
    assert_near(buffers[1], buffers[0])
    assert buffers[0].count_nonzero()


@compiled_alone
def test_compile_tells_of_interleaved_batches(device, fresh):
    """A backward between another's forward and backward raises; nothing is silently wrong."""
    compiled = torch.compile(fused_experts, fullgraph=True, backend="aot_eager")
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["w1"].requires_grad_()
    main_grads = draw_main_grads(inputs)
    first, second = (compiled(**inputs, ids=ids, main_grads=main_grads) for _ in range(2))
    first.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()


# --- the module -----------------------------------------------------------------------------------


def layers(device, dtype=None, **settings):
    """Two equal layers, main_grads of ones on the first one's expert weights."""
    ours, plain = (FusedMoE(24, 16, 6, 2, **settings, device=device, dtype=dtype) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    for name, p in ours.experts.named_parameters():
        if name[0] == "w":
            p.main_grad = torch.ones(p.shape, device=device)
    return ours, plain


@pytest.mark.quick
@pytest.mark.parametrize("how", ("plain", "checkpointed", "compiled"))
@pytest.mark.parametrize("settings", ({}, {"gated": False}, {"bias": True}), ids=("gated", "ungated", "bias"))
def test_module(device, settings, how):
    """A weight's gradient goes to its attribute main_grad; every other parameter has its .grad."""
    torch._dynamo.reset()
    ours, plain = layers(device, **settings)
    forward = {
        "plain": ours,
        "checkpointed": partial(checkpoint, ours, use_reentrant=False),
        "compiled": torch.compile(ours, fullgraph=not WRITES_BESIDE_VIEWS, backend="aot_eager"),
    }[how]
    for _ in range(2):
        x = torch.randn(40, 24, device=device)
        forward(x).square().sum().backward()
        plain(x).square().sum().backward()
    for (name, p), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if hasattr(p, "main_grad"):
            assert p.grad is None, name
            assert_near(p.main_grad - 1, other.grad, slack=16.0)
        else:
            assert_near(p.grad, other.grad, slack=16.0)
    assert sum(hasattr(p, "main_grad") for p in ours.parameters()) == (2 if "gated" in settings else 3)


def test_module_in_bfloat16_sums_in_float32(device):
    """Many small batches: the sum in a main_grad is far more accurate than the one in bfloat16 .grads."""
    ours, plain = layers(device, BF16)
    exact = {n: torch.zeros_like(getattr(ours.experts, n), dtype=F64) for n in WEIGHTS}
    rounded = {n: torch.zeros_like(t, dtype=BF16) for n, t in exact.items()}
    for _ in range(64):
        x = torch.randn(20, 24, device=device, dtype=BF16)
        plain.zero_grad()
        for layer in (ours, plain):
            layer(x).sum().backward()
        for name in WEIGHTS:
            exact[name] += getattr(plain.experts, name).grad
            rounded[name] += getattr(plain.experts, name).grad
    for name, truth in exact.items():
        error = (getattr(ours.experts, name).main_grad.double() - 1 - truth).norm()
        assert error < 0.5 * (rounded[name].double() - truth).norm(), name


def test_module_attribute_of_another_kind(device):
    """A main_grad that is not float32 is refused, not ignored."""
    ours, _ = layers(device)
    ours.experts.w2.main_grad = ours.experts.w2.main_grad.to(BF16)
    with pytest.raises(TypeError, match=r"main_grads\[1\] of dtype float32, found torch.bfloat16"):
        ours(torch.randn(4, 24, device=device))


# --- wrong calls ----------------------------------------------------------------------------------

W = {"w1": (5, 29, 37), "w2": (5, 37, 29), "w3": (5, 29, 37)}


def given(i: int, value) -> tuple:
    return tuple(value if i == j else None for j in range(3))


WRONG = {
    "no tuple": (torch.zeros(W["w1"]), {}, TypeError, "main_grads to be a tuple, of w1, w2 and w3", "Tensor"),
    "two": ((None, None), {}, ValueError, "main_grads of w1, w2 and w3", "2 of them"),
    "no tensor": (given(0, 1.0), {}, TypeError, r"main_grads\[0\] to be a tensor", "float"),
    "bfloat16": (given(1, torch.zeros(W["w2"], dtype=BF16)), {},
        TypeError, r"main_grads\[1\] of dtype float32", "torch.bfloat16"),
    "float64": (given(1, torch.zeros(W["w2"], dtype=F64)), {},
        TypeError, r"main_grads\[1\] of dtype float32", "torch.float64"),
    "float64 inputs": (given(1, torch.zeros(W["w2"])), {"dtype": F64},
        TypeError, r"x(_rows)? of dtype float32 or bfloat16 or float16 with main_grads", "torch.float64"),
    "dimensions": (given(2, torch.zeros(29, 37)), {},
        ValueError, r"main_grads\[2\] of 3 dimensions", r"shape \(29, 37\)"),
    "shape": (given(0, torch.zeros(W["w2"])), {},
        ValueError, r"main_grads\[0\] of shape \(w1's\) = \(5, 29, 37\)", r"\(5, 37, 29\)"),
    "not transposed": (given(0, torch.zeros(W["w1"])), {"layout": "separate.T"},
        ValueError, r"main_grads\[0\] of shape \(w1's\) = \(5, 37, 29\)", r"\(5, 29, 37\)"),
    "no w3": (given(2, torch.zeros(W["w3"])), {"layout": "ungated"},
        ValueError, r"main_grads\[2\] only beside w3", r"main_grads\[2\] without w3"),
    "requires a gradient": (given(0, torch.zeros(W["w1"], requires_grad=True)), {},
        ValueError, r"main_grads\[0\] that requires no gradient itself", "requires_grad=True"),
    "expanded": (given(0, torch.zeros(1, 29, 37).expand(5, -1, -1)), {},
        ValueError, r"main_grads\[0\] whose elements do not overlap", r"strides \(0, 37, 1\)"),
    "pairs apart": (given(0, torch.zeros(5, 2, 29, 37).transpose(1, 2)), {"layout": "pairs"},
        ValueError, r"main_grads\[0\] that can be viewed as \(E, 2F, D\)", "strides"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(device, name):
    """TypeError or ValueError with expected and found, before anything runs, from both functions."""
    main_grads, changes, error, expected, found = WRONG[name]

    def moved(m):
        if not torch.is_tensor(m):
            return m
        like = torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=device)
        return like.requires_grad_(m.requires_grad)

    if isinstance(main_grads, tuple):
        main_grads = tuple(map(moved, main_grads))
    case = Case(**changes)
    inputs, ids = case.inputs(device), case.ids(device)
    rows = {n: t for n, t in inputs.items() if n not in ("x", "scores")} | {"x_rows": inputs["x"]}
    counts = torch.tensor([33, 0, 0, 0, 0], device=device)
    for fn, arguments in ((fused_experts, inputs | {"ids": ids}), (grouped_mlp, rows | {"counts": counts})):
        message = f"{fn.__name__}: expected {expected}.*, found {found}"
        with Calls() as calls, pytest.raises(error, match=message):
            fn(**arguments, main_grads=main_grads, **case.options)
        assert not [n for n, _, _ in calls.calls if n.startswith("fused_moe::")], "an operator ran"


def test_another_device(device):
    """A main gradient on another device is named."""
    inputs, ids = Case().inputs(device), Case().ids(device)
    main_grads = given(1, torch.zeros(W["w2"], device="meta"))
    with pytest.raises(ValueError, match=rf"main_grads\[1\] on x's device {device.type}.*, found meta"):
        fused_experts(**inputs, ids=ids, main_grads=main_grads)


OPERATOR_ERRORS = {
    "half": (lambda dw: dw.half(), F32, "dw of dtype Float, found Half"),
    "shape": (lambda dw: dw.mT, F32, r"dw of shape \(5, 40, 64\), found \(5, 64, 40\)"),
    "double operands": (lambda dw: dw, F64, "dtype Float, BFloat16 or Half with dw, found Double"),
}


@pytest.mark.parametrize("name", OPERATOR_ERRORS)
def test_operator_called_directly(device, name):
    """RuntimeError of the operator, instead of an access out of range."""
    change, dtype, message = OPERATOR_ERRORS[name]
    a, b, ends, _ = wgrad_operands(device, dtype)
    dw = change(torch.zeros(5, 40, 64, device=device))
    with pytest.raises(RuntimeError, match=f"fused_moe::wgrad_accumulate: expected .*{message}"):
        ops.wgrad_accumulate(a, b, ends, dw)


def test_operators_refuse_to_be_differentiated(device):
    """An operand that requires a gradient is refused: otherwise the graph would be cut silently."""
    a, b, ends, _ = wgrad_operands(device, F32)
    dw = torch.zeros(5, 40, 64, device=device)
    with pytest.raises(RuntimeError, match="wgrad_accumulate cannot be differentiated"):
        ops.wgrad_accumulate(a.requires_grad_(), b, ends, dw)
    with torch.no_grad():
        ops.wgrad_accumulate(a, b, ends, dw)
    assert dw.count_nonzero()


@pytest.mark.parametrize(
    "name", ("wgrad_accumulate", "experts_up_backward_accumulate", "experts_down_backward_accumulate")
)
def test_accumulating_is_a_new_version(device, name):
    """Autograd raises where what was there before was saved, as it does for PyTorch's in-place operators."""
    for args in operator_calls(Case(5, 8, 16, 3, 2), device)[name]:
        arguments = getattr(torch.ops.fused_moe, name).default._schema.arguments
        for written in (x for a, x in zip(arguments, args, strict=True) if a.is_write and x is not None):
            scale = torch.ones((), device=device, requires_grad=True)
            product = written * scale
            version = written._version
            getattr(torch.ops.fused_moe, name).default(*args)
            assert written._version > version
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


def own_and_shared():
    """{case: (w1, w2, w3, main_grads, the complaint)} of weights (2, 3, 4) and (2, 4, 3) in float32."""
    w1, w3 = torch.randn(2, 2, 3, 4)
    w2, new, packed = torch.randn(2, 4, 3), torch.zeros(2, 3, 4), torch.zeros(2, 6, 4)
    rows = torch.zeros(40)
    shifted = rows[:24].view(2, 3, 4), rows[12:36].view(2, 3, 4)
    return {
        "halves of one buffer": (w1, w2, w3, (packed[:, :3], None, packed[:, 3:]), None),
        "rows in turn": (w1, w2, w3, (packed[:, ::2], None, packed[:, 1::2]), None),
        "one for two": (w1, w2, w3, (new, None, new), r"main_grads\[0\] in .* shared with main_grads\[2\]"),
        "shifted": (w1, w2, w3, (shifted[0], None, shifted[1]), r"shared with main_grads\[2\]"),
        "transposed": (w1, w2, w3, (new, new.view(2, 4, 3), None), r"shared with main_grads\[1\]"),
        "its weight": (w1, w2, w3, (w1, None, None), r"main_grads\[0\] in .* shared with w1"),
        "another weight": (w1, w2, w3, (w3, None, None), "shared with w3"),
        "itself": (w1, w2, w3, (rows.as_strided((2, 3, 4), (3, 4, 1)), None, None), "do not overlap"),
    }


@pytest.mark.parametrize("name", own_and_shared())
def test_memory_of_its_own(cpu, name):
    w1, w2, w3, main_grads, complaint = own_and_shared()[name]
    x, scores, ids = torch.randn(5, 4), torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.int32)
    if complaint is None:
        fused_experts(x, w1, w2, w3, scores, ids, main_grads=main_grads)
    else:
        with pytest.raises(ValueError, match=complaint):
            fused_experts(x, w1, w2, w3, scores, ids, main_grads=main_grads)
