"""Widths that are no multiple of 8: experts by padded copies, as on a GPU, against the loop on what is given.

On the CPU the copies are made for the tests alone.
"""

import copy
import weakref
from functools import partial

import pytest
import torch
from cases import Calls
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_moe
from fused_moe import fused_experts, grouped_mlp, lora, paths, widths
from fused_moe.ops import FACTS, LAYOUTS, WRITES_BESIDE_VIEWS

BF16 = torch.bfloat16
T, E, K = 24, 3, 2
WIDTHS = [(16, 13), (13, 16), (11, 5), (16, 12), (8, 4)]  # D, F; with (8, 4) packed rows are readable


@pytest.fixture(autouse=True)
def padded_everywhere(monkeypatch):
    monkeypatch.setattr(widths, "ON_CPU", True)


def draw(D, F, layout, transposed, requires_grad=True):
    torch.manual_seed(D * F)
    H = F if layout == "separate" else 2 * F
    shapes = {"w1": (E, H, D), "w2": (E, D, F), "w3": (E, F, D)}
    if layout != "separate":
        del shapes["w3"]
    t = {"x": torch.randn(T, D)}
    for name, shape in shapes.items():
        w = torch.randn(shape) / shape[-1] ** 0.5
        t[name] = w.mT.contiguous() if transposed else w
    t |= {"b1": torch.randn(E, H), "b2": torch.randn(E, D)}
    if layout == "separate":
        t["b3"] = torch.randn(E, F)
    t = {name: v.to(BF16).requires_grad_(requires_grad) for name, v in t.items()}
    t["scores"] = torch.rand(T, K, requires_grad=requires_grad)
    return t, torch.randint(-1, E, (T, K))


def call(t, ids, **settings):
    t = dict(t)
    x, w1, w2, w3, scores = (t.pop(n, None) for n in ("x", "w1", "w2", "w3", "scores"))
    return fused_experts(x, w1, w2, w3, scores, ids, **t, **settings)


def gradients(t, out):
    """{name: .grad}, as an optimizer finds it."""
    for leaf in t.values():
        leaf.grad = None
    out.backward((torch.ones_like(out) * torch.linspace(-1, 1, out.size(1))).to(out.dtype))
    return {name: leaf.grad for name, leaf in t.items()}


def assert_near(got, exact, name):
    assert got.shape == exact.shape and got.dtype == exact.dtype, name
    error = (got.double() - exact.double()).norm() / exact.double().norm()
    assert error < 1e-2, (name, float(error))


@pytest.mark.parametrize("D, F", WIDTHS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["separate", "halves", "interleaved"])
def test_output_and_gradients_are_those_of_the_given_widths(layout, transposed, D, F, monkeypatch):
    t, ids = draw(D, F, layout, transposed)
    assert (D, F) == (8, 4) or widths.are_padded(t["x"], t["w1"], t["w2"], t.get("w3"))
    out = call(t, ids, layout=layout, transposed=transposed)
    found = gradients(t, out)
    monkeypatch.setattr(widths, "ON_CPU", False)
    exact = {name: v.detach().double().requires_grad_() for name, v in t.items()}
    expected = call(exact, ids, layout=layout, transposed=transposed)
    assert_near(out, expected.to(BF16), "out")
    assert out.is_contiguous() and not out._is_view()
    for name, grad in gradients(exact, expected).items():
        assert_near(found[name], grad.to(found[name].dtype), name)
        assert found[name].stride() == t[name].stride(), name


def test_the_routers_operands_have_the_same_rule():
    """They are padded in C++."""
    constants = FACTS["constants"]
    assert (widths.CHUNK, widths.LINE) == (constants["PAD_CHUNK"], constants["PAD_LINE"])


def test_no_copy_of_readable_weights():
    t, ids = draw(16, 24, "separate", False)
    assert not widths.are_padded(t["x"], t["w1"], t["w2"], t["w3"])
    assert widths.copied(t["w1"], widths.PLAIN) is t["w1"]
    flat = torch.randn(1 + E * 16 * 24).to(BF16)
    off_base = flat[1:].view(E, 24, 16)
    assert widths.are_padded(t["x"], off_base, t["w2"], t["w3"])
    assert widths.copied(off_base, widths.PLAIN).storage_offset() == 0


@pytest.mark.parametrize("D, F", [(16, 13), (13, 16), (16, 16)])
@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_one_weight_of_strides_that_no_tile_reads(name, D, F):
    """It gets the widths of the others, and is no copy where it has them."""
    t, ids = draw(D, F, "separate", False)
    expected = call(t, ids)
    strided = torch.stack([t[name].detach()] * 2, -1)[..., 0].requires_grad_()
    assert (widths.copied(strided, widths.PLAIN) is strided) == (D == F)
    own = t | {name: strided}
    assert torch.equal(call(own, ids), expected)
    found, expected = gradients(own, call(own, ids)), gradients(t, call(t, ids))
    assert all(map(torch.equal, found.values(), expected.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_computed_as_they_are(dtype):
    w = torch.randn(E, 13, 16, dtype=dtype)
    assert not widths.are_padded(w[0], w, w, None)


def test_without_gradients_into_out_with_shared_experts_and_a_bound():
    t, ids = draw(13, 11, "separate", False, requires_grad=False)
    shared, gate = torch.randn(T, 13).to(BF16), torch.randn(T)
    settings = {"shared": shared, "shared_gate": gate, "max_rows": T}
    out = torch.full((T, 13), float("nan"), dtype=BF16)
    dropped = torch.zeros((), dtype=torch.int64)
    assert call(t, ids, out=out, dropped_rows=dropped, **settings) is out
    exact = {name: v.double() for name, v in t.items()}
    settings |= {"shared": shared.double(), "shared_gate": gate.double()}
    again = torch.zeros((), dtype=torch.int64)
    assert_near(out, call(exact, ids, dropped_rows=again, **settings).to(BF16), "out")
    assert dropped == again > 0


def test_grouped_rows():
    t, _ = draw(13, 11, "separate", False)
    del t["scores"]
    counts = torch.tensor([5, 0, 12])
    rows = dict(t)
    w = [rows.pop(name) for name in ("x", "w1", "w2", "w3")]
    y = grouped_mlp(*w, counts, **rows)
    exact = {name: v.detach().double() for name, v in t.items()}
    w = [exact.pop(name) for name in ("x", "w1", "w2", "w3")]
    assert_near(y, grouped_mlp(*w, counts, **exact).to(BF16), "y")
    assert not y[17:].any()


@pytest.mark.parametrize("layout", ["separate", "halves", "interleaved"])
def test_adapters(layout):
    t, ids = draw(13, 11, layout, False, requires_grad=False)
    H = t["w1"].size(1)
    pairs = {"a1": (E, 4, 13), "b1": (E, H, 4), "a2": (E, 4, 11), "b2": (E, 13, 4)}
    if layout == "separate":
        pairs |= {"a3": (E, 4, 13), "b3": (E, 11, 4)}
    adapters = {name: (torch.randn(shape) / 4).to(BF16).requires_grad_() for name, shape in pairs.items()}
    out = call(t, ids, layout=layout, lora=lora.LoRA(**adapters))
    exact = {name: a.detach().double().requires_grad_() for name, a in adapters.items()}
    doubles = {name: v.double() for name, v in t.items()}
    expected = call(doubles, ids, layout=layout, lora=lora.LoRA(**exact))
    assert_near(out, expected.to(BF16), "out")
    grads = gradients(exact, expected)
    for name, grad in gradients(adapters, out).items():
        error = (grad.double() - grads[name]).norm() / grads[name].norm()
        assert error < 2e-2, name


@pytest.mark.parametrize("how", ["fused", "adapters", "layer"])
def test_backward_keeps_the_weights_and_not_their_copies(how, monkeypatch):
    """Also where the up side's node is the router's, and where adapters make it a composition."""
    t, ids = draw(16, 13, "separate", False)
    copies, make = [], widths._zeros_behind

    def made(w, rows):
        copies.append(weakref.ref(copy := make(w, rows)))
        return copy

    def run():
        if how != "layer":
            pair = {"a2": torch.randn(E, 4, 13), "b2": torch.randn(E, 16, 4)}
            pair = {name: a.to(BF16) for name, a in pair.items()}
            return call(t, ids, lora=lora.LoRA(**pair) if how == "adapters" else None)
        layer = fused_moe.FusedMoE(16, 13, E, K).to(BF16)
        layer.experts.w1, layer.experts.w2, layer.experts.w3 = (nn.Parameter(t[f"w{i}"]) for i in (1, 2, 3))
        t["w2"] = layer.experts.w2
        return layer(t["x"])

    monkeypatch.setattr(widths, "_zeros_behind", made)
    out = run()
    assert len(copies) == 3 and not any(copy() is not None for copy in copies)
    out.sum().backward()
    assert len(copies) == 6  # again
    out = run()
    with torch.no_grad():
        t["w2"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_autocast_and_compile():
    t, ids = draw(13, 11, "separate", False)
    plain = gradients(t, call(t, ids))
    out = checkpoint(lambda: call(t, ids), use_reentrant=False)
    for name, grad in gradients(t, out).items():
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=0)
    floats = {name: v.detach().float().requires_grad_() for name, v in t.items()}
    with torch.autocast("cpu", BF16):
        out = call(floats, ids)
    assert out.dtype == BF16
    torch.testing.assert_close(out, call(t, ids), rtol=0, atol=0)
    compiled = torch.compile(lambda: call(t, ids), backend="aot_eager", fullgraph=True)()
    torch.testing.assert_close(compiled, call(t, ids), rtol=0, atol=0)


@pytest.mark.parametrize("D, F", [(13, 11), (16, 13), (13, 16)])
def test_selective_checkpoints_that_keep_all_results(D, F):
    """A result that was kept must not change afterwards."""
    t, ids = draw(D, F, "separate", False)
    keep = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    expected = gradients(t, call(t, ids))
    found = gradients(t, checkpoint(lambda: call(t, ids), use_reentrant=False, context_fn=keep))
    assert all(map(torch.equal, found.values(), expected.values()))


def test_forward_mode_has_the_operators_message():
    t, ids = draw(13, 11, "separate", False, requires_grad=False)
    with pytest.raises(RuntimeError, match="pad has no forward-mode derivative"):
        torch.func.jvp(lambda w: call(t | {"w1": w}, ids), (t["w1"],), (t["w1"],))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("D, joined", [(16, True), (13, False)])
def test_layers(D, joined, grad):
    """Padded F keeps router and experts one call, with the bits of two; padded D does not. `path` says that
    weights are copied."""
    layer = fused_moe.FusedMoE(D, 11, E, K, num_shared_experts=1, bias=True).to(BF16)
    apart = copy.deepcopy(layer)
    apart.router.register_forward_hook(lambda *_: None)
    x = torch.randn(T, D).to(BF16).requires_grad_()
    with torch.set_grad_enabled(grad):
        choice = paths.path(layer, x)
        assert (
            choice.path in (paths.Path.ROUTED, paths.Path.ROUTED_NODE) if joined else "D is no" in str(choice)
        )
        assert "weights are copied in each call" in str(choice)
        with Calls() as calls:
            out = layer(x)
        expected = apart(x)
    assert torch.equal(out, expected)
    w1s = [args[1] for args, _ in calls.of("experts_up")] + [args[1][0] for args, _ in calls.of("experts")]
    routed = [w1.shape for w1 in w1s if w1.size(0) == E]  # others are the shared experts'
    assert routed == [(E, 64, D if joined else 64)]
    if not grad:
        assert calls.kinds() == (["routed"] if joined else ["floats"])
        return
    leaves = {"x": x, **dict(layer.named_parameters())}
    others = {"x": x, **dict(apart.named_parameters())}
    found, expected = gradients(leaves, out), gradients(others, expected)
    del found["x"], expected["x"]  # summed in another order beside shared experts
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("D, F", WIDTHS)
@pytest.mark.parametrize("layout", ["separate", "halves", "interleaved"])
def test_one_operator_without_gradients(layout, D, F):
    """Beside the copies. With shared experts and an expert_map, too, and into memory that is given."""
    t, ids = draw(D, F, layout, False, requires_grad=False)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    settings = {"layout": layout, "expert_map": expert_map, "shared": torch.randn(T, D).to(BF16)}
    ids = torch.randint(-1, 4, ids.shape)
    with Calls() as calls:
        expected = call(t, ids, **settings)
    assert calls.ours() == ["experts"]
    out = torch.full((T, D), float("nan"), dtype=BF16)
    with Calls() as calls:
        assert call(t, ids, out=out, **settings) is out
    assert calls.ours() == ["experts_out"]
    assert torch.equal(out, expected)


def test_path_of_weights_off_16_bytes():
    """FP8 quantises them as they are."""
    layer = fused_moe.FusedMoE(128, 128, E, K).to(BF16)
    weight = layer.experts.w1
    weight.data = torch.randn(1 + weight.numel()).to(BF16)[1:].view_as(weight)
    x = torch.randn(T, 128).to(BF16)
    assert "weights are copied" in str(paths.path(layer, x))
    fused_moe.enable_fp8(layer, force=True)
    assert "weights are copied" not in str(paths.path(layer, x))


WEIGHTS = ("w1", "w2", "w3")


def aligned(t, layout):
    """The tensors of D = 13 and F = 11 with zeros up to 64, behind gates and ups each."""

    def behind(v, dim, parts, times=1):
        v = v.unflatten(dim, (parts, -1)).movedim(dim, -1)
        more = -v.size(-1) % (times * widths.LINE)
        return nn.functional.pad(v, (0, more)).movedim(-1, dim).flatten(dim - 1, dim)

    def wide(name, v):
        if name == "scores":
            return v
        rows = (1, 1)
        if name in ("w1", "b1"):
            rows = {"halves": (2, 1), "interleaved": (1, 2)}.get(layout, rows)
        if name in WEIGHTS:
            return behind(behind(v, -1, 1), -2, *rows)
        return behind(v, -1, *rows)

    return {name: wide(name, v.detach()) for name, v in t.items()}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_end_in_zeros(layout, transposed):
    """Whatever memory held before. Memory layout is the weight's."""
    t, _ = draw(13, 11, layout, transposed, requires_grad=False)
    t = {name: t[name].mT if transposed else t[name] for name in WEIGHTS if name in t}
    rows = {"w1": widths.ROWS[LAYOUTS[layout]]}
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        copies = {name: widths.copied(w, rows.get(name, widths.PLAIN)) for name, w in t.items()}
    finally:
        torch.use_deterministic_algorithms(False)
    for name, expected in aligned(t, layout).items():
        assert torch.equal(copies[name], expected), name
        assert (copies[name].stride(1) == 1) == transposed, name


@pytest.mark.parametrize("fn", [fused_experts, grouped_mlp])
@pytest.mark.parametrize("layout", ["separate", "halves", "interleaved"])
def test_main_grads(layout, fn):
    """Backward adds what it would add to main_grads of padded weights: sums that were never rounded to 16
    bits. Operands are padded as without main_grads, so all else has those bits."""
    t, ids = draw(13, 11, layout, False)
    rows = {"ids": ids} if fn is fused_experts else {"counts": torch.tensor([5, 0, 12])}
    if fn is grouped_mlp:
        del t["scores"]

    def step(t, main_grads):
        t = {name: v.detach().requires_grad_() for name, v in t.items()}
        given = main_grads and tuple(map(main_grads.get, WEIGHTS))
        operands = {"w3": None, **t}
        x = operands.pop("x")
        out = fn(x, **operands, **rows, layout=layout, main_grads=given)
        with Calls() as calls:
            (out[:, :13] * torch.linspace(-1, 1, 13)).sum().backward()
        return out, {name: v.grad for name, v in t.items() if v.grad is not None}, calls

    main_grads = {name: torch.randn(t[name].shape) for name in WEIGHTS if name in t}
    wide = aligned(main_grads, layout)
    out, found, calls = step(t, main_grads)
    [(args, _)] = calls.of("experts_up_backward_accumulate")
    assert args[2].shape == wide["w1"].shape
    plain, expected, _ = step(t, None)
    assert torch.equal(out, plain) and found.keys() == expected.keys() - main_grads.keys()
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    step(aligned(t, layout), wide)
    for name, sums in aligned(main_grads, layout).items():
        assert torch.equal(sums, wide[name]), name
        assert not torch.equal(sums, sums.to(BF16).float())


def test_main_grads_of_joined_layers():
    """The bits of router and experts apart."""
    layer = fused_moe.FusedMoE(16, 11, E, K).to(BF16)
    apart = copy.deepcopy(layer)
    apart.router.register_forward_hook(lambda *_: None)
    x = torch.randn(T, 16).to(BF16)
    grads = []
    for module in (layer, apart):
        torch.manual_seed(0)
        weights = module.experts.weights
        for w in weights:
            w.main_grad = torch.randn(w.shape)
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        assert not any(w.grad is not None for w in weights)
        grads.append((leaf.grad, module.router.gate.weight.grad, *(w.main_grad for w in weights)))
    assert all(map(torch.equal, *grads))


@pytest.mark.skipif(WRITES_BESIDE_VIEWS, reason="before PyTorch 2.13 main_grads are not compiled")
def test_main_grads_compiled():
    t, ids = draw(13, 11, "halves", False)
    shapes = [t[name].shape for name in ("w1", "w2")]
    given, expected = ([torch.ones(shape) for shape in shapes] for _ in range(2))
    call(t, ids, layout="halves", main_grads=(*expected, None)).sum().backward()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(t, ids, layout="halves", main_grads=(*given, None)).sum().backward()
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize("frozen", WEIGHTS)
def test_main_grads_of_some(frozen):
    t, ids = draw(13, 11, "separate", False)
    t[frozen].requires_grad_(False)
    main_grads = tuple(torch.randn(t[name].shape) for name in WEIGHTS)
    before = [m.clone() for m in main_grads]
    call(t, ids, main_grads=main_grads).sum().backward()
    for name, m, b in zip(WEIGHTS, main_grads, before, strict=True):
        assert torch.equal(m, b) == (name == frozen), name


def test_autocast_leaves_float64():
    t, ids = draw(13, 11, "separate", False, requires_grad=False)
    t = {name: v.double() for name, v in t.items()}
    with torch.autocast("cpu", BF16):
        out = call(t, ids)
    assert out.dtype == torch.float64 and torch.equal(out, call(t, ids))


def two_gradients(out, a, b, bias):
    """The first of all, and the second of what has one."""
    first = torch.autograd.grad(out.square().sum(), (a, b, bias), create_graph=True)
    return (*first, *torch.autograd.grad(sum(g.square().sum() for g in first[:2]), (a, b)))


@pytest.mark.parametrize("sizes", [(13, 16), (16, 13), (11, 5)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fn", ["grouped_mm", "linear"])
def test_grouped_gemms(fn, transposed, sizes, monkeypatch):
    """To the second derivative, with what linear gets as one expert."""
    out, width = sizes
    torch.manual_seed(out)
    b = torch.randn(E, width, out).mT if transposed else torch.randn(E, out, width)
    given = [t.to(BF16) for t in (torch.randn(T, width), b, torch.randn(E, out))]
    ends = torch.tensor([5, 5, T - 2], dtype=torch.int32)

    def of(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        a, b, bias = leaves
        if fn == "linear":
            return fused_moe.linear(a.view(2, -1, width), b[1], bias[1]), leaves
        return fused_moe.grouped_mm(a, b, ends, bias=bias), leaves

    with Calls() as calls:
        found, leaves = of(BF16)
    [(args, _)] = calls.of("grouped_mm")
    assert args[1].shape[1:] == tuple(n if n == 16 else 64 for n in sizes)
    assert (args[1].stride(1) == 1) == transposed and found.is_contiguous() and not found._is_view()
    monkeypatch.setattr(widths, "ON_CPU", False)
    expected, exact = of(torch.float64)
    monkeypatch.setattr(widths, "ON_CPU", True)
    assert_near(found, expected.to(BF16), "out")
    pairs = zip(two_gradients(found, *leaves), two_gradients(expected, *exact), strict=True)
    for i, (grad, exact_grad) in enumerate(pairs):
        assert_near(grad, exact_grad.to(BF16), i)


def test_a_frozen_input_costs_no_copy_in_backward(monkeypatch):
    copies, make = [], widths._zeros_behind
    monkeypatch.setattr(widths, "_zeros_behind", lambda *args: copies.append(1) or make(*args))
    weight = torch.randn(13, 16).to(BF16).requires_grad_()
    fused_moe.linear(torch.randn(T, 16).to(BF16), weight).sum().backward()
    assert len(copies) == 1 and weight.grad.shape == weight.shape


@pytest.mark.parametrize("D, F", [(13, 11), (16, 13), (13, 16)])
def test_traced_with_any_number_of_tokens(D, F):
    """Sizes that a graph of torch.jit.trace keeps are no tokens'."""
    t, ids = draw(D, F, "separate", False, requires_grad=False)
    weight, scores = torch.randn(F, D).to(BF16), t["scores"]

    def both(x, scores, ids):
        return call(t | {"x": x, "scores": scores}, ids), fused_moe.linear(x, weight)

    traced = torch.jit.trace(both, (t["x"], scores, ids), check_trace=False)
    for n in (T, 7, T + 6):
        args = [v.repeat(2, 1)[:n] for v in (t["x"], scores, ids)]
        assert all(map(torch.equal, traced(*args), both(*args)))


def test_grouped_gemms_of_infinite_rows():
    """They are not NaN because of padding."""
    a, b = torch.ones(4, 13).to(BF16), torch.ones(1, 11, 13).to(BF16)
    a[1, 2], a[3, 5] = torch.inf, torch.nan
    ends = torch.tensor([4], dtype=torch.int32)
    out = fused_moe.grouped_mm(a, b, ends)
    assert torch.equal(out.isnan().any(1), torch.tensor([False, False, False, True]))
    assert (out[1] == torch.inf).all() and (out[::2] == 13).all()
