"""The experts: fused_experts and its operators, fine-grained and coarse, against the reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    LAYOUTS,
    LOOSE,
    ROUTINGS,
    STRICT,
    Calls,
    Case,
    assert_as_good,
    assert_near,
    assert_same_bits,
    check_against_reference,
    check_experts,
    experts_cases,
    forward_backward,
    operator_calls,
    to_double,
    variants,
)
from hypothesis import given
from hypothesis import strategies as st

import fused_moe
from fused_moe import ops as codes
from fused_moe.activation import activate

pytestmark = pytest.mark.usefixtures("poison")

ops = torch.ops.fused_moe
BOTH_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
ALL_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)


def test_the_reference_is_the_plain_sum(cpu):
    """The reference is compared with a loop over single tokens and slots, in float64."""
    for layout in LAYOUTS:
        case = Case(7, 5, 3, 4, 2, F64, "sentinels", layout, bias=True)
        p = Parts(case, cpu)
        expected = torch.zeros(case.tokens, case.dim, dtype=F64)
        for t, k in torch.cartesian_prod(torch.arange(case.tokens), torch.arange(case.top_k)):
            e = int(p.ids[t, k])
            if not 0 <= e < case.num_experts:
                continue
            h = p.w1[e] @ p.inputs["x"][t] + p.b1[e]
            if layout.startswith("separate"):
                h = torch.cat([h, p.w3[e] @ p.inputs["x"][t] + p.b3[e]])
            gate, up = p.split(h.unsqueeze(0))
            a = gate * torch.sigmoid(gate) * (1 if up is None else up)
            expected[t] += p.scores[t, k] * (p.w2[e] @ a[0] + p.b2[e])
        found = fused_moe.reference.fused_experts(**p.inputs, ids=p.ids, **case.options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- fused_experts --------------------------------------------------------------------------------


@pytest.mark.quick(one_in=2)
@ALL_LAYOUTS
@BOTH_DTYPES
def test_layouts(device, dtype, layout):
    """Every layout and activation, with and without biases, scores on input or output: all gradients."""
    for activation in ACTIVATIONS:
        for case in variants(Case(layout=layout, activation=activation, dtype=dtype)):
            check_experts(case, device)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
@pytest.mark.parametrize("layout", ("separate", "ungated", "interleaved.T"))
def test_accuracy(device, dtype, layout):
    """No tensor's error exceeds 1.1 times that of the eager loop in the same dtype."""
    case = Case(384, 128, 96, 8, 4, dtype=dtype, layout=layout)
    for activation, bias, score_on in (
        ("silu", False, "output"),
        ("silu", True, "output"),
        ("gelu", True, "input"),
        ("gelu_tanh", False, "input"),
        ("relu", True, "output"),
        ("swiglu_clamped", True, "output"),
        ("swiglu_limited", True, "output"),
        ("relu2", False, "output"),
        ("situ", True, "input"),
    ):
        variant = replace(case, activation=activation, bias=bias, score_on=score_on)
        check_experts(variant, device, slack=STRICT)


@given(case=experts_cases(), seed=st.integers(0, 999))
def test_any_case(device, case, seed):
    """Any sizes, routing, layout, activation and dtype. With one to three tokens or hidden columns many
    elements have the same error, and eager may have been lucky."""
    torch.manual_seed(seed)
    check_experts(case, device, 4 * LOOSE if min(case.tokens, case.hidden) < 4 else LOOSE)


@pytest.mark.parametrize("routing", ROUTINGS)
@BOTH_DTYPES
def test_routings(device, dtype, routing):
    """Repeated ids, one active expert, empty experts, sentinels: exact zeros where nothing is computed."""
    for case in variants(Case(130, 24, 16, 6, 3, dtype=dtype, routing=routing)):
        inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
        ours = forward_backward(
            fused_moe.fused_experts, inputs, dout, ids=ids, score_on=case.score_on, **case.options
        )
        is_local = (ids >= 0) & (ids < case.num_experts)
        active = ids[is_local].unique().tolist()
        for name, value in ours.items():
            if name[1] in "wb":
                empty = [e for e in range(case.num_experts) if e not in active]
                assert not value[empty].count_nonzero(), f"{name} of an empty expert"
        assert not ours["dscores"][~is_local].count_nonzero()
        assert not ours["out"][~is_local.any(1)].count_nonzero()
        assert not ours["dx"][~is_local.any(1)].count_nonzero()
        check_experts(case, device)


SHAPES = {
    "one of everything": Case(1, 1, 1, 1, 1),
    "no tokens": Case(0, 8, 16, 4, 2),
    "one token": Case(1, 129, 37, 8, 8),
    "dim 1": Case(50, 1, 64, 4, 2),
    "hidden 1": Case(50, 64, 1, 4, 2),
    "one expert": Case(200, 33, 17, 1, 1),
    "1024 experts": Case(40, 8, 8, 1024, 4),
    "32 slots": Case(40, 16, 8, 64, 32),
    "every expert": Case(40, 16, 8, 9, 9),
    "more rows than a tile": Case(700, 16, 8, 3, 2),
    "many rows of one expert": Case(1300, 8, 8, 1, 1),
    "wide": Case(40, 530, 300, 2, 1),
    "wider": Case(20, 300, 530, 2, 2, layout="interleaved"),
}


@pytest.mark.parametrize("shape", SHAPES)
@BOTH_DTYPES
def test_shapes(device, dtype, shape):
    """The ends of the ranges of T, D, F, E and K."""
    for case in variants(replace(SHAPES[shape], dtype=dtype)):
        check_experts(case, device)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "contiguous"])
@pytest.mark.parametrize("layout", ("separate", "halves.T", "pairs"))
@BOTH_DTYPES
def test_storage(device, dtype, layout, form):
    """Strided, misaligned and swapped storage of x, weights, biases, scores, ids and dout."""
    for case in variants(Case(layout=layout, dtype=dtype)):
        check_experts(case, device, form=FORMS[form])


def test_expanded_gradient(device):
    """The gradient of sum() is one element, expanded."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    one = torch.ones((), device=device).expand(case.tokens, case.dim)
    found = forward_backward(fused_moe.fused_experts, inputs, one, ids=ids)
    expected = forward_backward(fused_moe.fused_experts, inputs, one.contiguous(), ids=ids)
    assert_same_bits(found, expected)


@ALL_LAYOUTS
def test_gradient_keeps_the_weights_layout(device, layout):
    """A packed weight has one gradient, with the weight's own shape and strides."""
    case = Case(layout=layout, bias=True)
    inputs = case.inputs(device)
    ours = forward_backward(
        fused_moe.fused_experts, inputs, case.dout(device), ids=case.ids(device), **case.options
    )
    for name, value in inputs.items():
        if value is not None:
            assert ours[f"d{name}"].shape == value.shape
            assert ours[f"d{name}"].stride() == value.stride(), name


def test_gradient_of_swapped_weights(device):
    """Weights held as views of (E, in, out) storage get gradients with the views' strides."""
    case = Case()
    inputs = case.inputs(device)
    inputs |= {n: FORMS["swapped"](inputs[n]) for n in ("w1", "w2", "w3")}
    ours = forward_backward(fused_moe.fused_experts, inputs, case.dout(device), ids=case.ids(device))
    for name in ("w1", "w2", "w3"):
        assert ours[f"d{name}"].stride() == inputs[name].stride() != case.weights(device)[name].stride()


@pytest.mark.parametrize("layout", ("separate", "halves", "halves.T", "ungated"))
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_frozen_inputs_get_no_gradient_computed(device, layout, score_on):
    """Each input alone: its gradient is the same as with all others, and no other is computed."""
    case = Case(layout=layout, bias=True, score_on=score_on)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    fixed = {"ids": ids, "score_on": score_on, **case.options}
    everything = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    for name in [n for n, t in inputs.items() if t is not None]:
        leaf = inputs[name].detach().requires_grad_()
        out = fused_moe.fused_experts(**{**inputs, name: leaf}, **fixed)
        with Calls() as calls:
            out.backward(dout)
        assert torch.equal(leaf.grad, everything[f"d{name}"]), name
        down_side = name in ("w2", "b2") or (name == "scores" and score_on == "output")
        [(args, result)] = calls.of("experts_down_backward")
        dh, dw2, db2, dscores = args[-4:]
        assert (dh, dw2, db2) == (not down_side, name == "w2", name == "b2")
        assert dscores == (name == "scores" and score_on == "output")
        assert [bool(r.numel()) for r in result] == list(args[-4:]), "computed a gradient that is not needed"
        if down_side:
            assert not calls.of("experts_up_backward")
            continue
        [(args, result)] = calls.of("experts_up_backward")
        wanted = [name == n for n in ("x", "w1", "w3", "b1", "b3", "scores")]
        assert list(args[-6:]) == wanted
        assert [bool(r.numel()) for r in result] == wanted, "computed a gradient that is not needed"


def test_nothing_needs_a_gradient(device):
    """Without requires_grad the result is the same and has no history."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    out = fused_moe.fused_experts(**inputs, ids=ids)
    assert not out.requires_grad
    expected = forward_backward(fused_moe.fused_experts, inputs, case.dout(device), ids=ids)["out"]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_a_plan_made_before_is_used(device, dtype):
    """A precomputed plan of the same ids, int32 or int64, gives the same bits."""
    case = Case(routing="sentinels")
    inputs, ids, dout = case.inputs(device), case.ids(device, dtype), case.dout(device)
    plan = fused_moe.route_plan(ids, case.num_experts)
    ours = forward_backward(fused_moe.fused_experts, inputs, dout, ids=ids)
    assert_same_bits(ours, forward_backward(fused_moe.fused_experts, inputs, dout, ids=ids, plan=plan))


@pytest.mark.parametrize("score", (1e30, -1e30, 0.0))
@pytest.mark.parametrize("score_on", ("output", "input"))
@BOTH_DTYPES
def test_scores_of_sentinels_do_not_matter(device, dtype, score_on, score):
    """Finite scores in slots without an expert change nothing."""
    case = Case(routing="sentinels", dtype=dtype, bias=True, score_on=score_on)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    fixed = {"ids": ids, "score_on": score_on}
    expected = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    is_local = (ids >= 0) & (ids < case.num_experts)
    assert is_local.any() and not is_local.all()
    inputs["scores"] = inputs["scores"].where(is_local, score)
    found = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    assert_same_bits(found, expected)
    assert not found["dscores"][~is_local].count_nonzero()


@pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
def test_scores_of_any_dtype(device, dtype):
    """Half-precision scores are computed in float32; their gradient has their dtype."""
    case = Case(dtype=dtype)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    half = inputs | {"scores": inputs["scores"].to(dtype)}
    single = inputs | {"scores": half["scores"].float()}
    found = forward_backward(fused_moe.fused_experts, half, dout, ids=ids)
    expected = forward_backward(fused_moe.fused_experts, single, dout, ids=ids)
    expected["dscores"] = expected["dscores"].to(dtype)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", (F32, F64, BF16), ids=("f32", "f64", "bf16"))
@pytest.mark.parametrize("layout", ("separate", "halves", "interleaved", "ungated"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_number_in_h(device, activation, layout, dtype):
    """A gate or an up that is NaN: results and gradients are NaN where the formula's are in PyTorch, whose
    clamp passes no gradient there, while its relu does."""
    case = Case(9, 16, 24, 3, 1, dtype, layout=layout, activation=activation, bias=True)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    gates, ups = inputs["b1"], inputs["b3"]
    if layout in ("halves", "interleaved"):
        gates, ups = gates.chunk(2, 1) if layout == "halves" else (gates[:, 0::2], gates[:, 1::2])
    gates[0, 5] = float("nan")
    if ups is not None:
        ups[1, 7] = float("nan")
    fixed = {"ids": ids, **case.options}
    found = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    expected = forward_backward(fused_moe.reference.fused_experts, to_double(inputs), dout.double(), **fixed)
    for name, value in expected.items():
        assert torch.equal(found[name].isnan(), value.isnan()), name
    assert 0 < found["out"].isnan().sum() < found["out"].numel()


@pytest.mark.parametrize("nan_in", ("dout", "scores"))
@pytest.mark.parametrize("layout", ("separate", "ungated"))
@pytest.mark.parametrize("activation", ("relu", "swiglu_clamped"))
def test_flat_sides_of_kinks_pass_no_nan(device, activation, layout, nan_in):
    """A unit on the flat side gets a gradient of zero whatever flows in, as PyTorch's relu and clamp give."""
    case = Case(9, 16, 24, 3, 2, activation=activation, layout=layout)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    (inputs["scores"] if nan_in == "scores" else dout)[4] = float("nan")
    options = {"activation": activation, "limit": 0.1, "ids": ids}
    found = forward_backward(fused_moe.fused_experts, inputs, dout, **options)
    expected = forward_backward(fused_moe.reference.fused_experts, inputs, dout, **options)
    for name in ("dw1", "dw3"):
        if name in expected:
            assert torch.equal(found[name].isnan(), expected[name].isnan())
    assert 0 < expected["dw1"].isnan().sum() < expected["dw1"].numel()


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_poisoned_token_stays_alone(device, value):
    """NaN or infinity in one token affects no other token's output or input gradient."""
    case = Case(64, 24, 16, 4, 2)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    expected = forward_backward(fused_moe.fused_experts, inputs, dout, ids=ids)
    poisoned = inputs | {"x": inputs["x"].clone().index_fill_(0, torch.tensor([7], device=device), value)}
    found = forward_backward(fused_moe.fused_experts, poisoned, dout, ids=ids)
    others = torch.arange(case.tokens, device=device) != 7
    for name in ("out", "dx", "dscores"):
        assert_near(found[name][others], expected[name][others])
    assert not found["out"][7].isfinite().any()


def test_double_backward_raises(device):
    """A second derivative raises a clear message."""
    case = Case()
    inputs, ids = case.inputs(device), case.ids(device)
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    out = fused_moe.fused_experts(**leaves, ids=ids)
    (dx,) = torch.autograd.grad(out.sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dx.square().sum().backward()


@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
def test_expert_map(device, dtype, score_on):
    """Ids of 12 experts; 5 of them have weights. Results are the reference's; the one operator without
    gradients has the same bits. Remote slots, whose scores are NaN, add nothing and get a zero gradient."""
    case = Case(dtype=dtype, bias=True, score_on=score_on)
    inputs, dout = case.inputs(device), case.dout(device)
    ids = torch.randint(-2, 14, (case.tokens, case.top_k), device=device)
    expert_map = torch.full((12,), -1, dtype=torch.int32, device=device)
    expert_map[[2, 3, 5, 8, 11]] = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32, device=device)
    fixed = {"ids": ids, "score_on": score_on, "expert_map": expert_map, **case.options}
    found = check_against_reference("fused_experts", inputs, dout, **fixed)
    is_remote = (ids < 0) | (ids >= 12) | (expert_map[ids.clamp(0, 11)] < 0)
    assert 0 < is_remote.sum() < ids.numel()
    assert not found["dscores"][is_remote].count_nonzero()
    inputs["scores"][is_remote] = torch.nan
    assert_same_bits(forward_backward(fused_moe.fused_experts, inputs, dout, **fixed), found)
    with torch.no_grad():
        assert torch.equal(fused_moe.fused_experts(**inputs, **fixed), found["out"])
    del fixed["expert_map"]
    plan = fused_moe.route_plan(ids, case.num_experts, expert_map)
    assert_same_bits(forward_backward(fused_moe.fused_experts, inputs, dout, plan=plan, **fixed), found)


@pytest.mark.parametrize("score_on", ("output", "input"))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("max_rows", (1, 40, 4096))
def test_max_rows(device, dtype, score_on, max_rows):
    """Slots past max_rows are as remote ones, whatever their scores, and counted. h, which is saved, has
    max_rows rows. Without gradients the bits are the same."""
    case = Case(60, 40, 24, 5, 3, dtype, "sentinels", bias=True, score_on=score_on)
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    dropped = torch.tensor(100, device=device)
    fixed = {"ids": ids, "score_on": score_on, "max_rows": max_rows, **case.options}
    check_against_reference("fused_experts", inputs, dout, **fixed)
    plan = fused_moe.route_plan(ids, 5, max_rows=max_rows)
    is_remote = plan.token_row < 0
    num_slots = int(((ids >= 0) & (ids < 5)).sum())
    assert 89 < num_slots < ids.numel() and int((~is_remote).sum()) == min(num_slots, max_rows)
    inputs["scores"][is_remote] = torch.nan
    leaves = {n: t if t is None else t.detach().requires_grad_() for n, t in inputs.items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        fused_moe.fused_experts(**leaves, **fixed, dropped_rows=dropped)
    assert int(dropped) == 100 + max(num_slots - max_rows, 0)
    assert (min(max_rows, ids.numel()), 2 * 24) in saved
    found = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    assert not found["dscores"][is_remote].count_nonzero()
    del fixed["max_rows"]
    assert_same_bits(forward_backward(fused_moe.fused_experts, inputs, dout, plan=plan, **fixed), found)
    fixed["ids"] = ids.masked_fill(is_remote, -1)
    few = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    for name in ("out", "dx", "dscores"):
        assert torch.equal(few[name], found[name])
    with torch.no_grad():
        out = torch.empty_like(found["out"])
        fixed |= {"ids": ids, "max_rows": max_rows, "out": out}
        assert torch.equal(fused_moe.fused_experts(**inputs, **fixed), found["out"])


@pytest.mark.parametrize("beside", (False, True), ids=("written", "added"))
def test_max_rows_compiles(device, beside, monkeypatch):
    """In one graph, with a count of dropped rows that is the eager one: part of a wider tensor, which not
    every PyTorch lets an operator write."""
    monkeypatch.setattr(fused_moe.ops, "WRITES_BESIDE_VIEWS", beside)
    case = Case(60, 40, 24, 5, 3, routing="one")
    inputs, dout, ids = case.inputs(device), case.dout(device), case.ids(device)
    tables = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2)]
    call = torch.compile(fused_moe.fused_experts, fullgraph=True, backend="aot_eager")
    found, expected = (
        forward_backward(fn, inputs, dout, ids=ids, max_rows=100, dropped_rows=table[1])
        for fn, table in zip((call, fused_moe.fused_experts), tables, strict=True)
    )
    assert_same_bits(found, expected)
    assert [table.tolist() for table in tables] == [[0, 80, 0]] * 2


def test_parts_of_a_layer_add_up(device):
    """Each part of the experts has its own map: the sum of their outputs is that of all experts."""
    case = Case(tokens=50, num_experts=8, top_k=3, dtype=F64)
    inputs, ids = case.inputs(device), case.ids(device)
    expected = fused_moe.fused_experts(**inputs, ids=ids)
    total = torch.zeros_like(expected)
    for part in torch.randperm(8, device=device).split((3, 0, 1, 4)):
        if len(part):
            expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
            expert_map[part] = torch.arange(len(part), dtype=torch.int32, device=device)
            weights = {n: t if n in ("x", "scores") or t is None else t[part] for n, t in inputs.items()}
            total += fused_moe.fused_experts(**weights, ids=ids, expert_map=expert_map)
    torch.testing.assert_close(total, expected)


# --- determinism and threads ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_same_bits_every_run(device, dtype, score_on):
    """The same inputs give the same bits, forward and backward."""
    case = Case(500, 96, 64, 16, 4, dtype=dtype, bias=True, score_on=score_on)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    fixed = {"ids": ids, "score_on": score_on}
    first = forward_backward(fused_moe.fused_experts, inputs, dout, **fixed)
    for _ in range(3):
        assert_same_bits(first, forward_backward(fused_moe.fused_experts, inputs, dout, **fixed))


THREADED = {
    "many experts": Case(500, 96, 64, 16, 4),
    "few experts": Case(300, 33, 65, 3, 2),
    "one expert": Case(200, 96, 512, 1, 1),
    "long sums": Case(30, 2048, 64, 2, 1),  # a BLAS would split these between threads
}


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
@pytest.mark.parametrize("case", THREADED.values(), ids=THREADED)
def test_same_bits_on_any_number_of_threads(cpu, threads, dtype, case):
    """Threads split rows and columns, never a sum: 1, 2 and 3 threads give the same bits."""
    case = replace(case, dtype=dtype, bias=True)
    inputs, ids, dout = case.inputs(cpu), case.ids(cpu), case.dout(cpu)
    threads(1)
    first = forward_backward(fused_moe.fused_experts, inputs, dout, ids=ids)
    for n in (2, 3):
        threads(n)
        assert_same_bits(first, forward_backward(fused_moe.fused_experts, inputs, dout, ids=ids))


# --- the operators --------------------------------------------------------------------------------


class Parts:
    """The parts of one case: weights as (E, out, in) views, the plan, and h and a in float64."""

    def __init__(self, case: Case, device):
        self.case = case
        self.inputs, self.ids, self.dout = case.inputs(device), case.ids(device), case.dout(device)
        self.plan = fused_moe.reference.route_plan(self.ids, case.num_experts)
        self.num_rows = int(self.plan.offsets[-1])
        layout, gated, pairs, transposed = LAYOUTS[case.layout]
        self.layout = codes.LAYOUTS[layout] if gated else codes.UNGATED
        self.w1, self.w2, self.w3 = (
            w if w is None or not transposed else w.mT for w in map(self.inputs.get, ("w1", "w2", "w3"))
        )
        if pairs:
            self.w1 = self.w1.flatten(1, 2)
        self.b1, self.b2, self.b3 = map(self.inputs.get, ("b1", "b2", "b3"))
        self.scores = self.inputs["scores"]
        self.maps = self.plan.tensors
        activation = codes.ACTIVATION_CODES[case.activation]
        self.act = {"layout": self.layout, "activation": activation, "constants": [1.702, case.limit]}
        self.up = {"w1": self.w1, "w3": self.w3, "b1": self.b1, "b3": self.b3}
        self.down = {"w2": self.w2, "b2": self.b2}
        self.ends = self.plan.offsets[1:].contiguous()
        self.row_expert = torch.repeat_interleave(self.plan.counts.long())
        self.row_token = self.plan.row_token[: self.num_rows].long()
        self.row_slot = self.plan.row_slot[: self.num_rows].long()
        self.row_scores = self.scores.flatten()[self.row_slot].double().unsqueeze(1)
        self.x_rows = self.inputs["x"].double()[self.row_token]
        self.h = self.grouped_gemm(self.x_rows, self.w1, self.b1)
        if self.w3 is not None:
            self.h = torch.cat([self.h, self.grouped_gemm(self.x_rows, self.w3, self.b3)], 1)
        self.a = self.activate(self.h)

    def grouped_gemm(self, rows, w, b=None):
        """rows[r] @ w[e(r)].T + b[e(r)] in float64."""
        out = torch.einsum("ri,roi->ro", rows.double(), w.double()[self.row_expert])
        return out if b is None else out + b.double()[self.row_expert]

    def split(self, h):
        if self.layout == codes.UNGATED:
            return h, None
        return (h[:, 0::2], h[:, 1::2]) if self.layout == codes.LAYOUTS["interleaved"] else h.chunk(2, 1)

    def activate(self, h):
        return activate(*self.split(h), activation=self.case.activation, limit=self.case.limit)

    def dact(self, da, h):
        h = h.double().requires_grad_()
        return torch.autograd.grad(self.activate(h), h, da.double())[0]

    def near(self, found, exact):
        """The first rows agree with `exact`; rows past the last one are undefined."""
        assert_near(found[: exact.size(0)], exact)


OPERATOR_CASES = pytest.mark.parametrize(
    "case",
    [
        Case(61, 37, 29, 5, 2, layout=layout, activation=activation, bias=bias, routing=routing, dtype=dtype)
        for layout, activation, bias, routing, dtype in (
            ("separate", "silu", False, "random", F32),
            ("separate.T", "gelu", True, "sentinels", BF16),
            ("ungated", "relu", True, "gaps", F32),
            ("ungated.T", "gelu_tanh", False, "one", BF16),
            ("halves", "silu", True, "sentinels", F32),
            ("halves.T", "swiglu_clamped", True, "repeats", F32),
            ("interleaved", "swiglu_clamped", True, "random", BF16),
            ("interleaved.T", "silu", False, "none", F32),
            ("pairs", "gelu", True, "sentinels", F16),
        )
    ],
    ids=lambda case: f"{case.layout}-{case.activation}",
)


@pytest.mark.quick
@OPERATOR_CASES
def test_up_gate(device, case):
    """h = x w1^T | w3^T + b through row_token, a = act(gate) up."""
    p = Parts(case, device)
    h, a = ops.up_gate(p.inputs["x"], **p.up, plan=p.maps, **p.act)
    p.near(h, p.h)
    p.near(a, p.a)


@OPERATOR_CASES
def test_up_gate_without_maps(device, case):
    """Contiguous rows need no row_token: row r is token r."""
    p = Parts(case, device)
    rows = p.x_rows.to(case.dtype)
    h, a = ops.up_gate(rows, **p.up, plan=p.maps[:2], **p.act)
    p.near(h, p.h)
    p.near(a, p.a)


@OPERATOR_CASES
def test_down_dgrad(device, case):
    """g = dout w2, dh = dact(s g, h), a' = s a, dscores = <g, a> + <dout, b2>."""
    p = Parts(case, device)
    h = torch.zeros(p.ids.numel(), p.h.size(1), dtype=case.dtype, device=device)
    h[: p.num_rows] = p.h
    dh, a_scaled, dscores = ops.down_dgrad(p.dout, **p.down, h=h, scores=p.scores, plan=p.maps, **p.act)
    h = h[: p.num_rows].double()
    dout_rows = p.dout.double()[p.row_token]
    g = p.grouped_gemm(dout_rows, p.w2.mT)
    p.near(dh, p.dact(p.row_scores * g, h))
    p.near(a_scaled, p.row_scores * p.activate(h))
    row_dscores = (g * p.activate(h)).sum(1)
    if p.b2 is not None:
        row_dscores += (dout_rows * p.b2.double()[p.row_expert]).sum(1)
    expected = torch.zeros(p.ids.numel(), dtype=F64, device=device)
    expected[p.row_slot] = row_dscores
    # a sum over F of elements that were rounded to x's dtype
    slack = 4 * case.hidden**0.5 * torch.finfo(case.dtype).eps / torch.finfo(dscores.dtype).eps
    assert_near(dscores, expected.view(p.ids.shape), slack)


@OPERATOR_CASES
def test_up_dgrad(device, case):
    """dx_rows = dgate w1 + dup w3, summed in one accumulator."""
    p = Parts(case, device)
    dh = torch.randn(p.num_rows, p.h.size(1), device=device).to(case.dtype)
    found = ops.up_dgrad(dh, p.w1, p.w3, p.maps[:2], p.layout)
    if p.w3 is None:
        expected = p.grouped_gemm(dh, p.w1.mT)
    else:
        dgate, dup = dh.chunk(2, 1)
        expected = p.grouped_gemm(dgate, p.w1.mT) + p.grouped_gemm(dup, p.w3.mT)
    p.near(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
def test_activation_at_its_edges(device, dtype, activation):
    """Value and derivative at zero, at and near the clamps, and far out, as PyTorch's."""
    edges = [0.0, 1.0, 1.0625, 0.9375, 3.0, 7.0, 10.0, 30.0, 100.0, 1000.0, 60000.0]
    points = torch.tensor([s * v for v in edges for s in (1, -1)], device=device, dtype=dtype)
    gate, up = (t.flatten() for t in torch.meshgrid(points, points, indexing="ij"))
    h = torch.stack([gate, up], 1)  # F = 1: a row is one gate and one up
    da = torch.randn(len(h), 1, device=device).to(dtype)
    act = {"activation": codes.ACTIVATION_CODES[activation], "constants": [1.702, 1.0]}
    exact = h.double().requires_grad_()
    a = activate(*exact.chunk(2, 1), activation=activation, limit=1.0)
    expected = torch.autograd.grad(a, exact, da.double())[0]
    # through weights of one: dout is da, and h is gate and up themselves
    one = torch.ones(1, 1, 1, device=device, dtype=dtype)
    plan = fused_moe.plan_from_counts(torch.tensor([len(h)], device=device), len(h)).tensors
    layout = codes.LAYOUTS["separate"]
    found, _, _ = ops.down_dgrad(da, one, None, h, None, plan=plan, layout=layout, **act)
    rtol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected.to(dtype), rtol=rtol, atol=rtol)
    # likewise x is gate
    plan = fused_moe.plan_from_counts(torch.tensor([len(points)], device=device), len(points)).tensors
    x = points.unsqueeze(1)
    _, a = ops.up_gate(x, one, None, None, None, plan=plan, layout=codes.UNGATED, **act)
    expected = activate(x.double(), activation=activation, limit=1.0)
    torch.testing.assert_close(a, expected.to(dtype), rtol=rtol, atol=rtol)


@pytest.mark.quick
@pytest.mark.parametrize("gathered", ("none", "a", "b"))
@OPERATOR_CASES
def test_wgrad(device, case, gathered):
    """dw[e] = a^T b over the rows of e, one of them read through row_token; zero for an empty expert."""
    p = Parts(case, device)

    def operand(width, gathered):
        t = torch.randn(case.tokens if gathered else p.num_rows, width, device=device).to(case.dtype)
        return t, t.double()[p.row_token] if gathered else t.double()

    (a, a_rows), (b, b_rows) = operand(7, gathered == "a"), operand(case.dim, gathered == "b")
    row_token = p.plan.row_token[: p.num_rows].contiguous()
    found = ops.wgrad(a, b, p.ends, *(row_token if gathered == n else None for n in "ab"))
    starts, ends = p.plan.offsets[:-1].tolist(), p.ends.tolist()
    slices = list(map(slice, starts, ends))
    assert_near(found, torch.stack([a_rows[s].T @ b_rows[s] for s in slices]))
    assert not found[p.plan.counts == 0].count_nonzero()


@OPERATOR_CASES
def test_bias_grad(device, case):
    """db[e] = sum over the rows of e, zero for an empty expert."""
    p = Parts(case, device)
    rows = torch.randn(p.num_rows, 33, device=device).to(case.dtype)
    found = ops.bias_grad(rows, p.ends)
    expected = torch.zeros(case.num_experts, 33, dtype=F64, device=device)
    assert_near(found, expected.index_add_(0, p.row_expert, rows.double()))
    assert not found[p.plan.counts == 0].count_nonzero()


@pytest.mark.quick
@ALL_LAYOUTS
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_without_gradients(device, layout, score_on):
    """One operator, which gives the bits of a training step's forward, and the counts."""
    case = Case(layout=layout, routing="sentinels", bias=True, dtype=BF16, score_on=score_on)
    inputs, ids = case.inputs(device), case.ids(device)
    options = {"score_on": score_on, **case.options}
    leaves = {n: t if t is None else t.requires_grad_() for n, t in inputs.items()}
    expected = fused_moe.fused_experts(**leaves, ids=ids, **options)
    with torch.no_grad(), Calls() as calls:
        found = fused_moe.fused_experts(**leaves, ids=ids, **options)
    assert torch.equal(found, expected.detach()) and not found.requires_grad
    assert calls.ours() == ["experts"]
    [(_, (_, counts, _))] = calls.of("experts")
    assert torch.equal(counts, fused_moe.route_plan(ids, case.num_experts).counts)


@pytest.mark.quick
@ALL_LAYOUTS
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_out(device, layout, score_on):
    """out= is the tensor that was given, with the bits of the result, whatever was there: by one operator,
    with a plan, under autocast, and where it does not begin at 16 bytes."""
    case = Case(layout=layout, routing="sentinels", bias=True, dtype=BF16, score_on=score_on)
    inputs, ids = case.inputs(device), case.ids(device)
    call = partial(fused_moe.fused_experts, **inputs, ids=ids, score_on=score_on, **case.options)
    expected = call()
    buffer = torch.full((2, expected.numel() + 1), torch.nan, dtype=BF16, device=device)
    out = buffer[1, 1:].view_as(expected)
    version = out._version
    with Calls() as calls:
        assert call(out=out) is out
    assert calls.ours() == ["experts_out"]
    assert torch.equal(out, expected) and out._version > version
    assert buffer[0].isnan().all() and buffer[1, 0].isnan(), "beside out"
    plan = fused_moe.route_plan(ids, case.num_experts)
    assert torch.equal(call(out=out.fill_(torch.nan), plan=plan), expected)
    with torch.autocast(torch.device(device).type, BF16):
        assert torch.equal(call(out=out.fill_(torch.nan)), expected)


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("name", ("experts", "experts_out"))
def test_operators_without_gradients_refuse(device, name, compiled):
    """In grad mode they raise for each tensor that requires a gradient alone, one of a list, too, with float
    weights, quantised ones and a router."""
    op = getattr(torch.ops.fused_moe, name).default
    names = [a.name for a in op._schema.arguments]
    message = f"fused_moe: {name} has no gradient: .*fused_moe.fused_experts and FusedMoE take gradients"

    def call(*args):
        torch._dynamo.reset()
        return (torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op)(*args)

    for args in operator_calls(Case(tokens=5, bias=True), device)[name]:
        call(*args)
        lists = [value if isinstance(value, list) else [value] for value in args]
        places = [
            (i, place)
            for i, value in enumerate(lists)
            for place, t in enumerate(value)
            if torch.is_tensor(t)
            and t.is_floating_point()
            and (not compiled or names[i] in ("x", "w1", "w2"))
        ]
        assert {"x", "w1", "w2"} <= {names[i] for i, _ in places}
        for i, place in places:
            leaf = lists[i][place].detach().clone().requires_grad_()
            given = leaf
            if isinstance(args[i], list):
                given = [*args[i][:place], leaf, *args[i][place + 1 :]]
            wrong = (*args[:i], given, *args[i + 1 :])
            with pytest.raises(Exception, match=message):
                call(*wrong)
            with torch.no_grad():
                op(*wrong)


def test_out_compiled(device):
    """Without a graph break; tensors that require gradients are taken where none is recorded."""
    case = Case(dtype=F32)
    inputs, ids = case.inputs(device), case.ids(device)
    inputs["w1"].requires_grad_()
    step = torch.compile(lambda out: fused_moe.fused_experts(**inputs, ids=ids, out=out) + 1, fullgraph=True)
    with torch.no_grad():
        expected = fused_moe.fused_experts(**inputs, ids=ids)
        out = torch.full_like(expected, torch.nan)
        assert torch.equal(step(out), expected + 1) and torch.equal(out, expected)


@OPERATOR_CASES
@pytest.mark.parametrize("save_h", (False, True))
def test_experts_up(device, case, save_h):
    """experts_up is up_gate; h has no rows if it is not saved."""
    p = Parts(case, device)
    h, a = ops.experts_up(p.inputs["x"], **p.up, scores=None, plan=p.maps, **p.act, save_h=save_h)
    assert h.size(0) == (p.ids.numel() if save_h else 0)
    p.near(a, p.a)
    if save_h:
        p.near(h, p.h)


@OPERATOR_CASES
def test_experts_down(device, case):
    """out[t] = sum of s (a w2^T + b2), with and without h."""
    p = Parts(case, device)
    a = torch.full((p.ids.numel(), case.hidden), float("nan"), dtype=case.dtype, device=device)
    a[: p.num_rows] = p.a
    out = ops.experts_down(a, h=None, **p.down, scores=p.scores, plan=p.maps, **p.act)
    expected = torch.zeros(case.tokens, case.dim, dtype=F64, device=device)
    y = p.row_scores * p.grouped_gemm(a[: p.num_rows], p.w2, p.b2)
    assert_near(out, expected.index_add_(0, p.row_token, y))


@OPERATOR_CASES
def test_coarse_backwards_are_the_fine_operators(device, case):
    """experts_*_backward is the composition of the fine-grained operators, with garbage in tail rows."""
    p = Parts(case, device)
    R = p.num_rows
    garbage = torch.full((p.ids.numel(), p.h.size(1)), float("nan"), dtype=case.dtype, device=device)
    h, dh = garbage.clone(), garbage.clone()
    h[:R] = p.h
    needs = {"need_dh": True, "need_dw2": True, "need_db2": p.b2 is not None, "need_dscores": True}
    dh_found, dw2, db2, dscores = ops.experts_down_backward(
        p.dout, h, **p.down, scores=p.scores, plan=p.maps, **p.act, **needs
    )
    clean = h.nan_to_num()
    dh_fine, a_scaled, dscores_fine = ops.down_dgrad(
        p.dout, **p.down, h=clean, scores=p.scores, plan=p.maps, **p.act
    )
    p.near(dh_found, dh_fine[:R])
    assert_near(dscores, dscores_fine)
    row_token = p.plan.row_token[:R].contiguous()
    assert_near(dw2, ops.wgrad(p.dout, a_scaled[:R].contiguous(), p.ends, row_token, None))
    if p.b2 is not None:
        expected = torch.zeros_like(p.b2, dtype=F64)
        expected.index_add_(0, p.row_expert, p.row_scores * p.dout.double()[p.row_token])
        assert_near(db2, expected)

    dh[:R] = torch.randn(R, p.h.size(1), device=device)
    needs = {f"need_d{n}": t is not None for n, t in {"x": p.inputs["x"], **p.up}.items()}
    dx, dw1, dw3, db1, db3, _ = ops.experts_up_backward(
        dh, p.inputs["x"], p.w1, p.w3, scores=None, plan=p.maps, layout=p.layout, **needs, need_dscores=False
    )
    clean = dh[:R].contiguous()
    dx_rows = dh.nan_to_num()
    dx_rows = ops.up_dgrad(dx_rows, p.w1, p.w3, p.maps, p.layout)
    assert_near(dx, ops.unpermute(dx_rows, None, p.maps))
    dgate, dup = (clean, None) if p.w3 is None else clean.chunk(2, 1)
    assert_near(dw1, ops.wgrad(dgate, p.inputs["x"], p.ends, None, row_token))
    if p.w3 is not None:
        assert_near(dw3, ops.wgrad(dup, p.inputs["x"], p.ends, None, row_token))
    if p.b1 is not None:
        assert_near(db1, ops.bias_grad(dgate, p.ends))
    if p.b3 is not None:
        assert_near(db3, ops.bias_grad(dup, p.ends))


@pytest.mark.parametrize("size", ((64, 40), (37, 29)), ids=("whole", "odd"))
@pytest.mark.parametrize("scored", (True, False), ids=("scored", "plain"))
@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))
def test_gradient_of_the_router(device, dtype, scored, size):
    """dlogits @ gate is added to dx, with row maps and without; slots without a row add nothing."""
    p = Parts(Case(61, *size, 5, 3, dtype, "sentinels"), device)
    scores = p.scores if scored else None
    flags = {"need_dx": True} | dict.fromkeys(
        ("need_dw1", "need_dw3", "need_db1", "need_db3", "need_dscores"), False
    )
    gate = torch.randn(9, size[0]).to(device, dtype)
    dh = torch.randn(p.ids.numel(), 2 * size[1]).to(device, dtype)
    rows = torch.randn(p.ids.numel(), size[0]).to(device, dtype)
    for x, maps in ((p.inputs["x"], p.maps), (rows, p.maps[:2]))[: 1 if scored else 2]:
        of_router = {"dlogits": torch.randn(x.size(0), 9).to(device, dtype), "gate": gate}
        args = (dh, x, p.w1, p.w3, scores, maps, p.layout)
        without, *_ = ops.experts_up_backward(*args, **flags)
        dx, *_ = ops.experts_up_backward(*args, **flags, **of_router)
        assert_near(dx, without.double() + of_router["dlogits"].double() @ gate.double())
        again, *_ = ops.experts_up_backward_accumulate(
            *args, **flags, main_grad1=None, main_grad3=None, **of_router
        )
        assert torch.equal(again, dx)
        none, *_ = ops.experts_up_backward(*args, **flags | {"need_dx": False}, **of_router)
        assert not none.numel()


@pytest.mark.parametrize("layout", ("separate", "halves", "ungated", "interleaved.T"))
@BOTH_DTYPES
def test_fine_operators_compose(device, dtype, layout):
    """up_gate, an activation, grouped_mm and unpermute, each differentiable, compose to fused_experts."""
    case = Case(layout=layout, bias=layout == "separate", routing="sentinels", dtype=dtype)
    p = Parts(case, device)

    def composed(x, w1, w2, w3, b1, b2, b3, scores):
        w1, w2, w3 = (w if w is None or not case.options["transposed"] else w.mT for w in (w1, w2, w3))
        h, _ = ops.up_gate(x, w1, w3, b1, b3, plan=p.maps, **p.act)
        y = ops.grouped_mm(p.activate(h), w2, p.ends)
        if b2 is not None:
            y = y + torch.cat([b2[p.row_expert], y.new_zeros(y.size(0) - p.num_rows, y.size(1))])
        return fused_moe.unpermute(y, p.plan, scores)

    found = forward_backward(composed, p.inputs, p.dout)
    reference, options = fused_moe.reference.fused_experts, {"ids": p.ids, **case.options}
    eager = forward_backward(reference, p.inputs, p.dout, **options)
    exact = forward_backward(reference, to_double(p.inputs), p.dout.double(), **options)
    assert_as_good(found, eager, exact)
