"""Which path a call takes: the table of paths and reasons, and patches, which every path honours."""

from functools import partial

import pytest
import torch
from cases import BF16, F32, Calls
from test_routed import PassFunctions, is_joined, nodes
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fused_moe
from fused_moe import FusedMoE, add_lora, enable_fp8, fused_experts, quantize, set_lora
from fused_moe.gate import Gate
from fused_moe.module import Experts, Router, SharedExperts
from fused_moe.paths import Path, path


def make(device, dtype=F32, **settings):
    """A layer, and x that requires a gradient."""
    layer = FusedMoE(128, 128, 4, 2, **settings, device=device, dtype=dtype)
    return layer, torch.randn(5, 128, device=device, dtype=dtype, requires_grad=True)


def dtype_for(mode):
    """On a GPU, 8-bit GEMMs are for layers of 16 bits."""
    return BF16 if mode.startswith(("FP8", "8 bits")) else F32


# --- the table --------------------------------------------------------------------------------------------

# The operators that are called on each path, and of experts what it computes (Calls.kinds); any number of
# others may be beside them.
OPERATORS = {
    Path.ROUTED: {"routed"},
    Path.ROUTED_NODE: {"routed"},
    Path.ROUTED_UP: {"route", "route_plan", "experts_up", "experts_down"},
    Path.EXPERTS: {"route", "floats"},
    Path.UP_DOWN: {"route", "route_plan", "experts_up", "experts_down"},
    Path.FP8: {"route", "route_plan", "fp8_weight", "fp8_up", "fp8_down"},
    Path.EIGHT_BIT: {"route", "8 bits"},
    Path.QUANTIZED: {"route", "values"},
    Path.COMPOSED: {"route", "route_plan", "unpermute"},
}
LIKE_OTHERS = (Path.ROUTED, Path.ROUTED_NODE, Path.ROUTED_UP, Path.UP_DOWN)  # in pairs the same operators
IN_GRAD_MODE = {"fp8_up_weights"}  # beside an FP8 call's, only where gradients are recorded


def hooked(part):
    return lambda layer: layer.get_submodule(part).register_forward_hook(lambda *_: None)


def patched(part):
    def change(layer):
        module = layer.get_submodule(part)
        module.forward = module.forward

    return change


def replaced_linear(layer):
    layer.router.gate = nn.Linear(128, 4, device=layer.experts.w1.device)


def parametrized(part, name):
    def change(layer):
        parametrize.register_parametrization(layer.get_submodule(part), name, nn.Identity())

    return change


def some_quantised(layer):
    layer.experts.w2 = quantize(layer.experts.w2.detach(), "int8")


def plain(layer):
    pass


APART, SEVERAL, AFTER = (
    f"{what}, since "
    for what in (
        "router and experts are apart",
        "the experts are several operators",
        "shared experts are added after the combine",
    )
)
GRADIENT = SEVERAL + "a gradient may be needed"
SUBCLASS = "x or a parameter is quantised, or of a subclass of Tensor"
LATENT = "the experts have a width of their own"
AUTOCAST = partial(torch.autocast, dtype=torch.bfloat16)
# name: settings of the layer, its change, whether gradients are recorded, path, reasons
TABLE = {
    "training": ({}, plain, True, Path.ROUTED_NODE, ()),
    "decode": ({}, plain, False, Path.ROUTED, ()),
    "shared, training": ({"num_shared_experts": 1}, plain, True, Path.ROUTED_NODE, ()),
    "shared, decode": ({"num_shared_experts": 1, "shared_expert_gate": True}, plain, False, Path.ROUTED, ()),
    "float32 router": ({"router_dtype": F32}, plain, False, Path.ROUTED, ()),
    "hooked router, decode": ({}, hooked("router"), False, Path.EXPERTS, (APART + "layer.router has hooks",)),
    "hooked gate": (
        {}, hooked("router.gate"), True, Path.UP_DOWN, (APART + "layer.router.gate has hooks", GRADIENT),
    ),
    "hooked experts": (
        {"num_shared_experts": 1}, hooked("experts"), False, Path.EXPERTS,
        (APART + "layer.experts has hooks", AFTER + "layer.experts has hooks"),
    ),
    "hooked shared experts": (
        {"num_shared_experts": 1}, hooked("shared_experts"), False, Path.ROUTED,
        (AFTER + "layer.shared_experts has hooks",),
    ),
    "hooked linear layer": (
        {"num_shared_experts": 1}, hooked("shared_experts.w2"), True, Path.ROUTED_NODE,
        (AFTER + "a linear layer has hooks",),
    ),
    "compiled router": (
        {}, lambda layer: layer.router.compile(backend="eager"), False, Path.EXPERTS,
        (APART + "layer.router is compiled by itself",),
    ),
    "another forward": (
        {}, patched("router"), False, Path.EXPERTS, (APART + "layer.router has a forward of its own",),
    ),
    "another gate": ({}, replaced_linear, False, Path.EXPERTS, (APART + "layer.router.gate is a Linear",)),
    "parametrised experts": (
        {}, parametrized("experts", "w1"), False, Path.EXPERTS,
        (APART + "layer.experts is a ParametrizedExperts",),
    ),
    "latent": (
        {"latent_dim": 64}, plain, False, Path.EXPERTS, (APART + LATENT,),
    ),
    "latent, shared": (
        {"latent_dim": 64, "num_shared_experts": 1}, plain, True, Path.UP_DOWN,
        (APART + LATENT, GRADIENT, AFTER + LATENT),
    ),
    "FP8": ({"fp8": False}, lambda layer: enable_fp8(layer, force=True), True, Path.FP8,
        (APART + "the experts train in FP8",),
    ),
    "FP8, decode": ({}, lambda layer: enable_fp8(layer, force=True), False, Path.FP8,
        (APART + "the experts train in FP8",),
    ),
    "LoRA": (
        {}, lambda layer: add_lora(layer, 8), False, Path.COMPOSED,
        (APART + "the experts have adapters", SEVERAL + "the experts have adapters"),
    ),
    "LoRA that does not compute": (
        {}, lambda layer: set_lora(add_lora(layer, 8), None), True, Path.ROUTED_NODE, (),
    ),
    "LoRA that does not compute, decode": (
        {}, lambda layer: set_lora(add_lora(layer, 8), None), False, Path.ROUTED, (),
    ),
    "quantised, decode": (
        {}, lambda layer: quantize(layer, "int8"), False, Path.QUANTIZED,
        (APART + SUBCLASS,),
    ),
    "quantised, LoRA that does not compute": (
        {}, lambda layer: set_lora(add_lora(quantize(layer, "int8"), 8), None), False, Path.QUANTIZED,
        (APART + SUBCLASS,),
    ),
    "quantised, training": (
        {}, lambda layer: quantize(layer, "int8"), True, Path.COMPOSED,
        (APART + SUBCLASS, GRADIENT),
    ),
    "some quantised": (
        {}, some_quantised, False, Path.COMPOSED,
        (APART + SUBCLASS, SEVERAL + "some weights are not quantised"),
    ),
    "8 bits": (
        {}, lambda layer: quantize(layer, "int8", compute="int8"), False, Path.EIGHT_BIT,
        (APART + SUBCLASS,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_table(device, case):
    """`path` says what a call then does."""
    settings, change, records, expected, reasons = TABLE[case]
    layer, x = make(device, dtype_for(case), **settings)
    change(layer)
    with torch.set_grad_enabled(records):
        assert path(layer, x) == (expected, reasons)
        with Calls() as calls:
            out = layer(x)
    assert_taken(expected, calls, out)


def assert_taken(expected: Path, calls: Calls, out) -> None:
    called = {name.removeprefix("fused_moe::") for name, *_ in calls.calls if name.startswith("fused_moe::")}
    called |= set(calls.kinds())
    for other, operators in OPERATORS.items():
        if other not in (expected, *LIKE_OTHERS) and operators - OPERATORS[expected]:
            assert not operators <= called, other
    assert OPERATORS[expected] <= called
    assert is_joined(out) == (expected is Path.ROUTED_NODE)
    assert ("_RoutedUpBackward" in nodes(out)) == (expected is Path.ROUTED_UP)


CONTEXTS = {
    "autocast": (lambda x: AUTOCAST(x.device.type), "autocast is on"),
    "functions": (lambda x: PassFunctions(), "a TorchFunctionMode is on"),
    "forward-mode AD": (lambda x: torch.autograd.forward_ad.dual_level(), "forward-mode AD is on"),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts(device, context):
    """What acts on operators before autograd does."""
    enter, reason = CONTEXTS[context]
    layer, x = make(device)
    with enter(x), torch.no_grad():
        found = path(layer, x)
        several = (SEVERAL + reason,) if context == "autocast" else ()
        assert found.reasons == (APART + reason, *several)
        with Calls() as calls:
            layer(x)
    assert_taken(found.path, calls, x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_transforms_and_traces(device):
    layer, x = make(device)
    layer.requires_grad_(False)  # a trace takes no constants that require gradients
    found = []

    def call(x):
        found.append(path(layer, x))
        return layer(x)

    with torch.no_grad():
        torch.func.vmap(call, randomness="error")(x.detach()[None])
        torch.jit.trace(call, x.detach(), check_trace=False)
    assert [choice.reasons[0] for choice in found] == [
        APART + "torch.func transforms the call", APART + "torch.jit traces the call",
    ]  # fmt: skip


def test_hooks_of_all_modules(device):
    layer, x = make(device, num_shared_experts=1)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        reasons = path(layer, x).reasons
    finally:
        handle.remove()
    reason = "all modules have hooks"
    assert reasons == (APART + reason, GRADIENT, AFTER + reason)
    assert path(layer, x) == (Path.ROUTED_NODE, ())


@pytest.mark.parametrize("is_selective", (True, False), ids=("selective", "plain"))
def test_checkpoints(device, is_selective):
    """A plain checkpoint inside of a selective one looks the same, so both have the same path and reason."""
    layer, x = make(device)
    found = []

    def run(x):
        found.append(path(layer, x))
        with Calls() as calls:
            out = layer(x)
        assert_taken(found[0].path, calls, out)
        return out

    policy = partial(create_selective_checkpoint_contexts, [torch.ops.fused_moe.experts_up.default])
    options = {"context_fn": policy} if is_selective else {}
    checkpoint(run, x, use_reentrant=False, **options).sum().backward()
    reason = SEVERAL + "torch.utils.checkpoint runs without reentrancy, and its policy may name operators"
    assert found == [(Path.ROUTED_UP, (reason,))] * 2
    with torch.no_grad(), policy()[0]:
        assert path(layer, x) == (Path.ROUTED, ())


def test_reentrant_checkpoints(device):
    layer, x = make(device)
    found = []

    def run(x):
        found.append(path(layer, x))
        return layer(x)

    checkpoint(run, x, use_reentrant=True).sum().backward()
    assert found == [(Path.ROUTED, ()), (Path.ROUTED_NODE, ())]


def test_an_input_without_gradient(device):
    layer, x = make(device)
    joined = "x requires no gradient, so fusing them saves no addition of two gradients"
    assert path(layer, x.detach()) == (Path.UP_DOWN, (APART + joined, GRADIENT))
    layer.requires_grad_(False)
    assert path(layer, x.detach()) == (Path.EXPERTS, (APART + joined,))
    with Calls() as calls:
        out = layer(x.detach())
    assert_taken(Path.EXPERTS, calls, out)


def test_operands_of_other_types(device):
    layer, x = make(device)
    with torch.no_grad():
        assert path(layer, x.half()).reasons == (
            APART + "layer.router.gate is torch.float32, and x torch.float16",
        )
        other = x.as_subclass(type("Other", (torch.Tensor,), {}))
        assert path(layer, other).reasons == (APART + SUBCLASS,)
        assert path(layer, x.to("meta")).reasons == (
            APART + f"layer.router.gate is on {layer.router.gate.weight.device}, and x on meta",
        )


def test_it_prints(device):
    layer, x = make(device, num_shared_experts=1)
    layer.experts.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        lines = str(fused_moe.path(layer, x)).splitlines()
    assert lines == [
        "experts: up and down projections in one operator, without gradients",
        f"  {APART}layer.experts has hooks",
        f"  {AFTER}layer.experts has hooks",
    ]


def test_nothing_is_computed(device):
    layer, x = make(device, num_shared_experts=1)
    with Calls() as calls:
        path(layer, x)
    assert not calls.calls
    assert not layer.tokens_per_expert.any()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda layer, x: (layer.experts, x), TypeError, "layer to be a FusedMoE, found Experts"),
        (
            lambda layer, x: (layer, [1]),
            TypeError,
            r"x to be a tensor of shape \(..., D\) with D = 128, found list",
        ),
        (lambda layer, x: (layer, x.long()), TypeError, "x of dtype float32 or .*, found torch.int64"),
        (lambda layer, x: (layer, x[:, :7]), ValueError, r"D = 128, found \(5, 7\)"),
        (lambda layer, x: (layer, x[0, 0]), ValueError, r"D = 128, found \(\)"),
    ],
)
def test_wrong_calls(device, change, error, match):
    with pytest.raises(error, match=f"path: expected .*{match}"):
        path(*change(*make(device)))


def test_given_plans(device):
    """fused_experts with a plan, which is made before one operator would make it."""
    layer, x = make(device)
    scores, ids, _ = layer.router(x, None)
    call = partial(fused_experts, x, *layer.experts.weights, scores, ids)
    with torch.no_grad():
        for plan, expected in (
            (None, {"experts"}),
            (fused_moe.route_plan(ids, 4), {"experts_up", "experts_down"}),
        ):
            with Calls() as calls:
                call(plan=plan)
            assert {n.removeprefix("fused_moe::") for n, *_ in calls.calls if "fused_moe" in n} == expected


# --- patches ----------------------------------------------------------------------------------------------


def in_turn(layer, x):
    """The layer's modules, called as its class says."""
    scores, ids, _ = layer.router(x, layer.expert_bias)
    out, _ = layer.experts(x, scores, ids)
    return out + layer.shared_expert_gate(x).sigmoid() * layer.shared_experts(x)


def itself(layer):
    return layer


def padded(layer):
    return partial(layer, num_tokens=torch.tensor(5, device=layer.experts.w1.device))


def compiled(layer):
    torch._dynamo.reset()
    return torch.compile(layer, backend="eager", fullgraph=True)


def fp8(layer):
    enable_fp8(layer, force=True)


def lora(layer):
    add_lora(layer, 8)


def idle_lora(layer):
    set_lora(add_lora(layer, 8), None)


def quantised(layer):
    quantize(layer, "int8")


def eight_bits(layer):
    quantize(layer, "int8", compute="int8")


# mode: what is done to the layer, how it is called, whether gradients are recorded
MODES = {
    "training": (plain, itself, True),
    "decode": (plain, itself, False),
    "padded": (plain, padded, False),
    "FP8": (fp8, itself, True),
    "FP8, decode": (fp8, itself, False),
    "LoRA": (lora, itself, True),
    "LoRA, decode": (lora, itself, False),
    "LoRA that does not compute": (idle_lora, itself, True),
    "LoRA that does not compute, decode": (idle_lora, itself, False),
    "quantised": (quantised, itself, True),
    "quantised, decode": (quantised, itself, False),
    "8 bits": (eight_bits, itself, False),
    "compiled": (plain, compiled, True),
    "compiled, decode": (plain, compiled, False),
    "compiled, quantised": (quantised, compiled, False),
}
EAGER = [mode for mode in MODES if "compiled" not in mode]
PARTS = {
    "router": Router,
    "router.gate": Gate,
    "experts": Experts,
    "shared_experts": SharedExperts,
    "shared_experts.w1": nn.Linear,
    "shared_expert_gate": nn.Linear,
}


def changed(results):
    """Results of a forward, the first of which is what the layer's output depends on."""
    return (-2 * results[0], *results[1:]) if isinstance(results, tuple) else 1 - results


def on_the_class(monkeypatch, layer, part):
    """The forward that a user may write: without the arguments of fused calls."""
    cls = PARTS[part]
    forward = cls.forward

    def mine(self, x, *args, **padding):
        return changed(forward(self, x, *args, **padding))

    monkeypatch.setattr(cls, "forward", mine)


def on_the_call(monkeypatch, layer, part):
    call = nn.Module.__call__
    monkeypatch.setattr(
        PARTS[part], "__call__", lambda self, *args, **padding: changed(call(self, *args, **padding))
    )


def on_the_instance(monkeypatch, layer, part):
    module = layer.get_submodule(part)
    forward = module.forward
    module.forward = lambda x, *args, **padding: changed(forward(x, *args, **padding))


def hook(monkeypatch, layer, part):
    layer.get_submodule(part).register_forward_hook(lambda module, args, results: changed(results))


def pre_hook(monkeypatch, layer, part):
    layer.get_submodule(part).register_forward_pre_hook(lambda module, args: (1 - args[0], *args[1:]))


def subclass(monkeypatch, layer, part):
    cls, module = PARTS[part], layer.get_submodule(part)

    class Mine(cls):
        def forward(self, x, *args, **padding):
            return changed(super().forward(x, *args, **padding))

    module.__class__ = Mine


@pytest.mark.parametrize("part", ("router", "router.gate", "experts", "shared_experts"))
def test_padding_that_users_see(device, part):
    """Modules with hooks find zeros in padded rows, whatever these held."""
    layer, x = make(device, num_shared_experts=int(part == "shared_experts"))
    seen = []
    layer.get_submodule(part).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    padded = torch.cat((x.detach(), torch.full_like(x, torch.nan)))
    with torch.no_grad():
        out = layer(padded, num_tokens=torch.tensor(5, device=device))
        assert seen[0].shape == padded.shape and not seen[0][5:].any()
        torch.testing.assert_close(out[:5], layer(x))


PATCHES = (on_the_class, on_the_instance, hook, pre_hook, subclass)


def check(device, monkeypatch, mode, part, patch):
    """The mode calls what a user has changed, as calling the modules in turn does."""
    prepare, called, records = MODES[mode]
    dtype = dtype_for(mode)
    layer, x = make(device, dtype, num_shared_experts=1, shared_expert_gate=True)
    prepare(layer)
    with torch.set_grad_enabled(records):
        before = layer(x)
        patch(monkeypatch, layer, part)
        expected = in_turn(layer, x)
        found = called(layer)(x)
    bound = (
        1e-2 if dtype == BF16 else 1e-5
    ) * expected.norm()  # roundings of the sum of both experts' outputs
    assert (found - expected).norm() <= bound
    assert (before - expected).norm() > 10 * bound


@pytest.mark.parametrize("patch", (*PATCHES, on_the_call), ids=lambda patch: patch.__name__)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", EAGER)
def test_patches(device, monkeypatch, mode, part, patch):
    check(device, monkeypatch, mode, part, patch)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in EAGER])
def test_patches_of_compiled_experts(device, monkeypatch, mode, patch):
    """torch.compile calls forward, whatever a class's __call__ is."""
    check(device, monkeypatch, mode, "experts", patch)


@pytest.mark.parametrize("part", [part for part in PARTS if part != "experts"])
def test_patches_of_compiled_layers(device, monkeypatch, part):
    check(device, monkeypatch, "compiled, decode", part, on_the_class)


def test_a_checkpoint_inside_a_selective_one(device):
    """The inner one runs forward again without the outer one's mode, and finds the same saved tensors."""
    layer, x = FusedMoE(16, 8, 4, 2, device=device), torch.randn(6, 16, device=device, requires_grad=True)
    save = torch.ops.fused_moe.experts_down.default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is save else CheckpointPolicy.PREFER_RECOMPUTE

    def inner(x):
        return checkpoint(layer, x, use_reentrant=False)

    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = checkpoint(inner, x, use_reentrant=False, context_fn=contexts)
    found.sum().backward()
    dx = x.grad
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(dx, expected)
