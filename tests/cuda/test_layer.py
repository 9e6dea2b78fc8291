"""fused_experts and FusedMoE on a GPU, whatever the tier: sizes, layouts, storage, torch.compile."""

from dataclasses import replace

import pytest
import torch
from cases import (
    BF16,
    F32,
    FORMS,
    LAYOUTS,
    Case,
    assert_near,
    assert_same_bits,
    call_operator,
    check_experts,
    forward_backward,
    operator_calls,
    variants,
)
from gpu_cases import ALL_DTYPES, FAST_DTYPES

import fused_moe
from fused_moe import FusedMoE, fused_experts

pytestmark = pytest.mark.gpu

TILED = {
    "aligned": Case(300, 256, 192, 6, 3),
    "depth of 8": Case(300, 200, 136, 6, 3),  # aligned to 16 bytes, not to a k-tile
    "one tile": Case(128, 128, 128, 1, 1),
    "smallest": Case(50, 8, 8, 3, 2),
    "odd": Case(300, 133, 67, 6, 3),
    "aligned in, odd out": Case(200, 256, 65, 4, 2),
    "odd in, aligned out": Case(200, 65, 256, 4, 2),
    "every row to one": Case(3000, 136, 136, 5, 1, routing="one"),
    "gaps": Case(500, 256, 192, 33, 4, routing="gaps"),
    "sentinels": Case(500, 256, 192, 8, 4, routing="sentinels"),
    "1024 experts": Case(1000, 64, 32, 1024, 2),
    "32 slots": Case(100, 64, 32, 64, 32),
    "one token": Case(1, 256, 192, 8, 8),
    "no tokens": Case(0, 256, 192, 8, 8),
}


@ALL_DTYPES
@pytest.mark.parametrize("size", TILED)
def test_sizes(device, size, dtype):
    """Sizes that take full tiles, parts of tiles, or no aligned access at all: everything, all gradients."""
    if size == "1024 experts":  # the loop's time
        check_experts(replace(TILED[size], dtype=dtype, bias=True), device)
        return
    for case in variants(replace(TILED[size], dtype=dtype)):
        check_experts(case, device)


@ALL_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", ("aligned", "depth of 8", "odd"))
def test_layouts(device, size, layout, dtype):
    """Every layout of the weights, stored either way round."""
    check_experts(replace(TILED[size], dtype=dtype, layout=layout, bias=True), device)


@FAST_DTYPES
@pytest.mark.parametrize("form", [f for f in FORMS if f != "contiguous"])
@pytest.mark.parametrize("layout", ("separate", "interleaved.T"))
@pytest.mark.parametrize("size", ("aligned", "depth of 8"))
def test_storage(device, size, layout, form, dtype):
    """Base pointers and strides that no 16-byte access may touch, beside sizes that would allow one."""
    check_experts(replace(TILED[size], dtype=dtype, layout=layout, bias=True), device, form=FORMS[form])


@FAST_DTYPES
@pytest.mark.parametrize("name", ("w1", "w2", "w3", "x"))
@pytest.mark.parametrize("form", ("misaligned", "swapped"))
def test_one_operand_otherwise(device, form, name, dtype):
    """One tensor misaligned or swapped beside aligned ones: the results stay."""
    case = replace(TILED["aligned"], dtype=dtype)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    expected = forward_backward(fused_experts, inputs, dout, ids=ids)
    inputs[name] = FORMS[form](inputs[name])
    found = forward_backward(fused_experts, inputs, dout, ids=ids)
    for result, value in expected.items():
        slack = 8 * max(1, torch.finfo(dtype).eps / torch.finfo(value.dtype).eps)
        assert_near(found[result], value, slack)


@pytest.mark.parametrize("name", sorted(operator_calls(Case(), "cpu")))
def test_on_the_second_device(device, name):
    """Tensors of cuda:1 while cuda:0 is current: the same bits there, and the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    if torch.cuda.get_device_capability(0) != torch.cuda.get_device_capability(1):
        pytest.skip("needs two CUDA devices of one kind")

    def moved(value):
        if isinstance(value, (list, tuple)):
            return [moved(v) for v in value]
        return value.to("cuda:1") if torch.is_tensor(value) else value

    torch.cuda.set_device(0)
    for dtype in (F32, BF16):
        case = Case(61, 64, 40, 5, 3, dtype, "sentinels", bias=True)
        ids = case.ids("cpu")
        num_rows = int(((ids >= 0) & (ids < 5)).sum())
        for call in operator_calls(case, "cuda:0")[name]:
            arguments = {n: moved(v) for n, v in call.items()} if isinstance(call, dict) else moved(call)
            torch.cuda.synchronize(1)
            remote = call_operator(name, arguments)
            assert torch.cuda.current_device() == 0
            for i, (mine, other) in enumerate(zip(call_operator(name, call), remote, strict=True)):
                assert other.device == torch.device("cuda:1")
                other = other.to("cuda:0")
                if mine.dim() and mine.size(0) == ids.numel():  # h and a are undefined past the last row
                    mine, other = mine[:num_rows], other[:num_rows]
                assert torch.equal(mine, other), f"result {i} differs"


# --- one plan, several calls ----------------------------------------------------------------------


@FAST_DTYPES
def test_one_plan_twice(device, dtype):
    """Two forward passes of different inputs on one plan, then their backward passes, the first one last:
    the bits of calls with separate plans."""
    case = Case(500, 136, 72, 12, 4, dtype, "sentinels", bias=True)
    ids = case.ids(device)
    plan = fused_moe.route_plan(ids, 12)
    before = [None if t is None else t.clone() for t in plan]
    runs = [(case.inputs(device), case.dout(device)) for _ in range(2)]
    expected = [forward_backward(fused_experts, inputs, dout, ids=ids) for inputs, dout in runs]
    leaves = [{n: t.detach().requires_grad_() for n, t in i.items() if t is not None} for i, _ in runs]
    outs = [
        fused_experts(**{**i, **own}, ids=ids, plan=plan) for (i, _), own in zip(runs, leaves, strict=True)
    ]
    for run in (1, 0):
        own = leaves[run]
        grads = torch.autograd.grad(outs[run], list(own.values()), runs[run][1])
        found = {"out": outs[run].detach(), **{f"d{n}": g for n, g in zip(own, grads, strict=True)}}
        assert_same_bits(found, expected[run])
    for name, old, new in zip(plan._fields, before, plan, strict=True):
        assert torch.equal(old, new), f"{name} of the plan was written"


@FAST_DTYPES
@pytest.mark.parametrize("score_on", ("output", "input"))
def test_backward_twice(device, score_on, dtype):
    """With retain_graph: the same bits again."""
    case = Case(500, 136, 72, 12, 4, dtype, bias=True, score_on=score_on)
    inputs, ids, dout = case.inputs(device), case.ids(device), case.dout(device)
    leaves = {n: t.requires_grad_() for n, t in inputs.items() if t is not None}
    out = fused_experts(**inputs, ids=ids, score_on=score_on)
    runs = []
    for retain in (True, False):
        grads = torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=retain)
        runs.append({n: g.clone() for n, g in zip(leaves, grads, strict=True)})
    assert_same_bits(*runs)


# --- numbers that are none ------------------------------------------------------------------------


@FAST_DTYPES
def test_nan_stays_where_it_is(device, dtype):
    """A token's NaN reaches that token, an expert's NaN its own tokens, and no other output a bit."""
    case = Case(500, 136, 200, 6, 2, dtype, bias=True)
    inputs, ids = case.inputs(device), case.ids(device)
    with torch.no_grad():
        expected = fused_experts(**inputs, ids=ids)
        for name, index, reached in (
            ("x", 77, torch.arange(500, device=device) == 77),
            ("w1", 3, (ids == 3).any(1)),
            ("w2", 4, (ids == 4).any(1)),
            ("b3", 0, (ids == 0).any(1)),
        ):
            wrong = inputs | {name: inputs[name].clone()}
            wrong[name][index] = torch.nan
            out = fused_experts(**wrong, ids=ids)
            assert torch.equal(out[~reached], expected[~reached]), name
            assert out[reached].isnan().all(), name


# --- compiled, mixed ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_under_autocast(device, mode):
    """torch.compile(fullgraph=True) of an autocast training step, with its CUDA graphs, too."""
    torch._dynamo.reset()
    module = FusedMoE(
        64, 48, 8, 2, score_func="sigmoid", route_norm=True, num_shared_experts=1, shared_expert_gate=True,
        load_balance_coeff=1e-3, bias=True, device=device,
    ).eval()  # no counting: a graph that changes a buffer is not recorded  # fmt: skip

    def run(x):
        with torch.autocast("cuda", BF16):
            return module(x)

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for _ in range(4):
        x, dout = torch.randn(130, 64, device=device), torch.randn(130, 64, device=device).to(BF16)
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for fn in (run, compiled):
            leaf = x.clone().requires_grad_()
            out = fn(leaf)
            grads = torch.autograd.grad(out, [leaf, *module.parameters()], dout)
            results.append([t.double().clone() for t in (out.detach(), *grads)])
        for mine, other in zip(*results, strict=True):
            assert (mine - other).norm() <= 0.02 * other.norm()
    torch._dynamo.reset()


# --- for compute-sanitizer ------------------------------------------------------------------------


@pytest.mark.sanitizer
@FAST_DTYPES
@pytest.mark.parametrize("layout", ("separate", "interleaved.T", "ungated"))
@pytest.mark.parametrize("size", ((40, 24, 16), (61, 37, 29), (150, 64, 72)), ids=("small", "odd", "tiles"))
def test_every_operator_once(device, size, layout, dtype):
    """Every kernel on tiny shapes, sentinels among the ids. tests/gpu/run.sh runs it under the sanitizer."""
    tokens, dim, hidden = size
    case = Case(tokens, dim, hidden, 3, 2, dtype, "sentinels", layout, bias=True)
    for name, calls in operator_calls(case, device).items():
        for call in calls:
            for result in call_operator(name, call):
                assert result.device.type == "cuda", name
    torch.cuda.synchronize()
