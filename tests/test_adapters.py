"""Adapters by name: adding, choosing, saving, merging and removing them, against weights with sums added."""

import copy
import io
from functools import partial
from itertools import product

import pytest
import torch
from cases import BF16, F16, F32, F64, quantize_options
from test_distributed import takes_integers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from fused_moe import (
    FusedMoE,
    LoRA,
    QuantizedWeight,
    add_lora,
    enable_fp8,
    load_lora_state_dict,
    lora_state_dict,
    merge_lora,
    path,
    quantize,
    remove_lora,
    set_lora,
    smooth_from,
)
from fused_moe.lora import joined

pytestmark = pytest.mark.usefixtures("poison")

T, D, F, E, K = 40, 64, 64, 4, 2
FORMATS = (None, "fp8_block", "fp8", "int8", "int4", "mxfp4")
WEIGHTS = ("w1", "w2", "w3")
# Adapters of other ranks, targets and scales: what joins them has to tell them apart.
ADDED = {
    "default": {"rank": 4, "alpha": 8},
    "math": {"rank": 8, "alpha": 6, "targets": ("w1", "w2")},
    "code": {"rank": 2, "targets": ("w3",)},
}


def new_layer(device, dtype=None, format=None, **options):
    moe = FusedMoE(D, F, E, K, num_shared_experts=1, **options, device=device, dtype=dtype)
    return moe if format is None else quantize(moe, format, **quantize_options(format))


def adapted(device, names=tuple(ADDED), **options):
    """A layer with adapters of these names, the last of which computes; none is zero."""
    moe = new_layer(device, **options)
    for name in names:
        add_lora(moe, name=name, **ADDED[name])
    for adapters in moe.experts.loras.values():
        fill(adapters)
    return moe


def fill(adapters):
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, 0, parameter.size(2) ** -0.5)


def batch(device, dtype=F32):
    return torch.randn(T, D, device=device, dtype=dtype)


def sums(moe, names):
    """{"experts.w1": the weight with the adapters of these names added, ...}, with their gradients."""
    found = {}
    for i, name in enumerate(WEIGHTS):
        w = getattr(moe.experts, name)
        w = w.dequantize() if isinstance(w, QuantizedWeight) else w
        for lora in (moe.experts.loras[n]() for n in names):
            a, b = lora.pairs[i]
            w = w if a is None else w + lora.scale * b @ a
        found[f"experts.{name}"] = w
    return found


def plain(moe, names, x):
    """What the layer computes with these adapters, by a layer that has none."""
    base = new_layer(x.device, x.dtype, latent_dim=moe.experts.dim if moe.latent_up is not None else None)
    others = {n: p for n, p in moe.named_parameters() if not n.startswith("experts.")}
    return functional_call(base, {**others, **sums(moe, names)}, x)


def state_of(moe):
    """What a failed call must leave as it is."""
    flags = {n: p.requires_grad for n, p in moe.named_parameters()}
    active = {n: m.is_active for n, m in moe.experts.loras.items()}
    return {n: t.clone() for n, t in moe.state_dict().items()}, flags, active


def assert_same_state(found, expected):
    assert found[1:] == expected[1:] and found[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert torch.equal(found[0][name], tensor), name


# --- names ------------------------------------------------------------------------------------------------


SUBSETS = (("default",), ("code",), ("default", "math"), ("math", "code"), tuple(ADDED))


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("names", SUBSETS, ids=" ".join)
@pytest.mark.parametrize("latent", (False, True))
def test_chosen_adapters_add_up(device, format, names, latent):
    """Output and gradients are those of weights with the sums added; the others have no gradient."""
    moe = adapted(device, format=format, latent_dim=D if latent else None)
    x, dout = batch(device).requires_grad_(), batch(device)
    set_lora(moe, names)
    chosen = [p for n in names for p in moe.experts.loras[n].parameters()]
    out = moe(x)
    expected = plain(moe, names, x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    by_sums = torch.autograd.grad(expected, (x, *chosen), dout)
    out.backward(dout)
    for found, right in zip((x, *chosen), by_sums, strict=True):
        torch.testing.assert_close(found.grad, right, rtol=1e-4, atol=1e-4)
    others = [p for n, m in moe.experts.loras.items() if n not in names for p in m.parameters()]
    assert all(p.grad is None and p.requires_grad for p in others)
    with torch.no_grad():
        torch.testing.assert_close(moe(x), out)


def test_no_delta_of_a_weights_size_is_made(device):
    """Ranks are joined: a's one after the other, b's beside each other with their scales."""
    loras = [LoRA(torch.randn(3, r, 8), torch.randn(3, 6, r), scale=s) for r, s in ((2, 0.5), (4, 3.0))]
    found = joined([*loras, LoRA(a2=torch.randn(3, 1, 5), b2=torch.randn(3, 4, 1), scale=2.0)])
    assert found.a1.shape == (3, 6, 8) and found.b1.shape == (3, 6, 6) and found.a2.shape == (3, 1, 5)
    assert found.a3 is None and found.b3 is None and found.scale == 1.0
    torch.testing.assert_close(found.b1 @ found.a1, sum(lora.scale * lora.b1 @ lora.a1 for lora in loras))
    assert joined(loras[:1]) is loras[0]


def test_names_are_attributes(device):
    """ "default" is `lora`, as in files of versions without names."""
    moe = new_layer(device)
    add_lora(moe, 2, name="math")
    assert moe.experts.lora is None and list(moe.experts.loras) == ["math"]
    assert {n for n in moe.state_dict() if "lora" in n} == {
        f"experts.lora_math.{n}" for n in ("a1", "b1", "a2", "b2", "a3", "b3", "scaling")
    }
    assert add_lora(moe, 2) is moe and moe.experts.lora.is_active and not moe.experts.lora_math.is_active
    assert {f"experts.lora.{n}" for n in ("a1", "b3", "scaling")} < moe.state_dict().keys()
    for again in ("math", "default"):
        with pytest.raises(ValueError, match=f"experts without adapters '{again}', found some that have"):
            add_lora(moe, 2, name=again)


@pytest.mark.parametrize("format", (None, "int4"))
def test_none_is_the_base_model(device, format):
    """Its bits and its path, gradients or not; a context sets back what computed before, errors or not."""
    moe = adapted(device, format=format)
    base = copy.deepcopy(moe)
    remove_lora(base)
    x = batch(device)
    set_lora(moe, ("math", "code"))
    before = moe(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), set_lora(moe, None):
            assert torch.equal(moe(x), base(x)) and not torch.equal(moe(x), before)
            assert path(moe, x) == path(base, x)
            with set_lora(moe, "default"):
                assert "the experts have adapters" in str(path(moe, x))
                torch.testing.assert_close(moe(x), plain(moe, ["default"], x), rtol=1e-4, atol=1e-4)
            assert torch.equal(moe(x), base(x))
    with pytest.raises(KeyError), set_lora(moe, None):
        raise KeyError
    assert torch.equal(moe(x), before)


def test_layers_of_a_model(device):
    """A name is that of all layers that have it; the others compute without."""
    model = torch.nn.Sequential(new_layer(device), new_layer(device))
    add_lora(model, 2)
    add_lora(model[1], 2, name="math")
    for moe in model:
        for adapters in moe.experts.loras.values():
            fill(adapters)
    x = batch(device)
    set_lora(model, "math")
    assert torch.equal(model(x), model[1](remove_lora(copy.deepcopy(model[0]))(x)))
    remove_lora(model, "math")
    assert [list(moe.experts.loras) for moe in model] == [["default"], ["default"]]


def test_distributed_data_parallel(one_rank, device):
    """It finds adapters that do not compute; what computes may change between steps."""
    moe, x = adapted(device), batch(device)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(moe), find_unused_parameters=True)
    for names in ("default", ("math", "code"), "default"):
        for layer in (moe, model.module):
            set_lora(layer, names)
            layer.zero_grad()
        moe(x).square().sum().backward()
        model(x).square().sum().backward()
        for name in (names,) if isinstance(names, str) else names:
            found, right = (m.experts.loras[name].parameters() for m in (model.module, moe))
            for p, q in zip(found, right, strict=True):
                torch.testing.assert_close(p.grad, q.grad)


def test_a_main_grad_is_used_where_no_adapter_computes(device):
    moe = remove_lora(adapted(device), ("math", "code"))
    moe.experts.w1.requires_grad_().main_grad = torch.zeros_like(moe.experts.w1)
    set_lora(moe, None)
    moe(batch(device)).sum().backward()
    assert moe.experts.w1.main_grad.any()


# --- freezing and removing --------------------------------------------------------------------------------


def trains(moe):
    return {n for n, p in moe.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("freeze_router", (False, True))
@pytest.mark.parametrize("format", (None, "int8"))
def test_what_was_frozen_trains_again(device, format, freeze_router):
    """With the last adapter gone, what trained before trains, and nothing else; the layer is as it was."""
    moe = new_layer(device, format=format, bias=True, gate_bias=True, expert_scale=True)
    moe.experts.b2.requires_grad_(False)
    moe.router.gate.bias.requires_grad_(False)
    before, x = trains(moe), batch(device)
    out = moe(x)
    add_lora(moe, 2, freeze_router=freeze_router)
    add_lora(moe, 2, name="math")
    rest = {n for n in before if not n.startswith("experts.") and not (freeze_router and "router" in n)}
    assert trains(moe) == rest | {n for n, _ in moe.named_parameters() if "lora" in n}
    assert remove_lora(moe, "default") is moe and moe.experts.lora is None
    assert trains(moe) == rest | {n for n, _ in moe.named_parameters() if "lora" in n}
    remove_lora(moe, ("math",))
    assert trains(moe) == before and not moe.experts.loras and torch.equal(moe(x), out)
    assert not [n for n in moe.state_dict() if "lora" in n]
    add_lora(moe, 2, freeze_router=True)
    assert trains(remove_lora(moe)) == before


def test_a_router_that_is_frozen_later(device):
    """By the second adapters. Removing those of the experts alone leaves it, as the call sees no router."""
    moe = new_layer(device)
    before = trains(moe)
    add_lora(moe, 2)
    assert "router.gate.weight" in trains(moe)
    add_lora(moe, 2, name="math", freeze_router=True)
    x = batch(device).requires_grad_()
    moe(x).sum().backward()
    assert moe.router.gate.weight.grad is None and moe.experts.lora_math.b1.grad is not None
    assert "router.gate.weight" not in trains(remove_lora(copy.deepcopy(moe).experts))
    assert trains(remove_lora(moe)) == before


def test_fp8_and_smoothing_see_adapters_that_do_not_compute(device):
    moe = adapted(device, ("math",))
    set_lora(moe, None)
    with pytest.raises(ValueError, match="experts without adapters, found"):
        enable_fp8(add_lora(FusedMoE(128, 768, 2, 1, device=device), 2, name="math"))
    with pytest.raises(ValueError, match="experts without adapters, found"):
        smooth_from(moe, [batch(device)])
    with pytest.raises(ValueError, match="experts without adapters with compute 'int8'"):
        quantize(moe, "int8", compute="int8")


# --- merging ----------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("dtype", (F32, BF16, F16, F64), ids=str)
@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("names", (None, "math", ("default", "code")), ids=str)
def test_merging(device, dtype, wide, names):
    """Weights are the exact sums, rounded once, in their memory; the layer computes as before."""
    moe = adapted(device, (), dtype=dtype)
    for name, settings in ADDED.items():
        add_lora(moe, name=name, **settings, dtype=F32 if wide and dtype != F64 else None)
        fill(moe.experts.loras[name])
    merged = ("code",) if names is None else (names,) if isinstance(names, str) else names
    memory = [getattr(moe.experts, name).data_ptr() for name in WEIGHTS]
    x = batch(device, dtype)
    with torch.no_grad(), set_lora(moe, merged):
        adapted_out = moe(x)
        exact = sums(copy.deepcopy(moe).double(), merged)
    assert merge_lora(moe, names) is moe
    for name, ptr in zip(WEIGHTS, memory, strict=True):
        w, right = getattr(moe.experts, name), exact[f"experts.{name}"]
        assert w.dtype == dtype and w.data_ptr() == ptr
        if dtype == F64:
            torch.testing.assert_close(w, right)
        else:
            assert (w != right.to(dtype)).sum() <= 1  # ties of sums in another order
    assert list(moe.experts.loras) == [n for n in ADDED if n not in merged]
    with torch.no_grad(), set_lora(moe, None):
        error = (moe(x) - adapted_out).double().norm() / adapted_out.double().norm()
        assert error < {F64: 1e-12, F32: 1e-5}.get(dtype, 2e-2)


def test_merging_all_leaves_a_plain_layer(device):
    """Whose weights train and whose path is a plain layer's; autocast has no part in the sums."""
    moe, x = adapted(device, ("default",)), batch(device)
    exact = sums(copy.deepcopy(moe).double(), ("default",))
    with torch.autocast(device.type, BF16):
        merge_lora(moe)
    assert moe.experts.lora is None and trains(moe) == {n for n, _ in moe.named_parameters()}
    assert path(moe, x) == path(new_layer(device), x)
    torch.testing.assert_close(moe.experts.w1.double(), exact["experts.w1"], rtol=1e-5, atol=1e-6)
    moe(x).sum().backward()
    assert moe.experts.w1.grad is not None


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("tiled", (False, True))
def test_merging_into_quantised_weights(device, request, format, dtype, tiled):
    """Refused; by requantize=True they are the sums, quantised alike. Weights without adapters stay."""
    moe = adapted(device, ("math",), dtype=dtype, format=format)
    if tiled and device.type == "cpu":
        request.getfixturevalue("tiling")
        moe = copy.deepcopy(moe)  # arranged again
        assert moe.experts.w1.is_tiled
    before, own = state_of(moe), moe.experts.w1
    with pytest.raises(ValueError, match=rf"w1 of float values, or requantize=True .*{format} .*{format}$"):
        merge_lora(moe)
    assert_same_state(state_of(moe), before)
    exact = {
        name: getattr(moe.experts, name).dequantize(F32)
        + (
            0
            if (pair := moe.experts.lora_math().pairs[i])[0] is None
            else 0.75 * pair[1].float() @ pair[0].float()
        )
        for i, name in enumerate(WEIGHTS)
    }
    merge_lora(moe, requantize=True)
    assert moe.experts.w1 is own and not moe.experts.loras
    for name in ("w1", "w2"):
        w = getattr(moe.experts, name)
        expected = quantize(exact[name], format, **quantize_options(format))
        assert w.dtype == dtype and w.scale.dtype == before[0][f"experts.{name}.{scale_name(w)}"].dtype
        error = (w.dequantize(F32) - exact[name]).norm()
        assert error <= 1.05 * (expected.dequantize(F32) - exact[name]).norm() + 1e-6
    after = moe.state_dict()
    for name, tensor in before[0].items():
        if name.startswith("experts.w3"):
            assert torch.equal(after[name], tensor)


def scale_name(w):
    return {"fp8_block": "weight_scale_inv", "mxfp4": "scales"}.get(w.format, "weight_scale")


@pytest.mark.parametrize(
    ("format", "options"),
    (
        ("int4", {"group_size": 32, "symmetric": False}),
        ("int4", {"group_size": 64, "symmetric": True}),
        ("int8", {"per_tensor": True}),
        ("fp8", {"per_tensor": True}),
    ),
)
def test_requantised_weights_keep_their_options(device, format, options):
    moe = FusedMoE(128, 128, 2, 1, device=device)
    quantize(moe, format, **options)
    fill(add_lora(moe, 4, targets=("w1",)).experts.lora)
    expected = quantize(sums(moe, ("default",))["experts.w1"].detach(), format, **options)
    merge_lora(moe, requantize=True)
    for found, right in zip(moe.experts.w1.parameters(), expected.parameters(), strict=True):
        assert found.shape == right.shape and found.dtype == right.dtype
    torch.testing.assert_close(moe.experts.w1.dequantize(), expected.dequantize())


def test_merges_that_are_refused(device):
    """They change nothing, not even the first of two layers."""

    def pruned():
        moe = adapted(device, ("default",))
        prune.random_unstructured(moe.experts, "w2", 0.5)
        return moe

    eight_bits = adapted(device, (), format=None)
    quantize(eight_bits, "int8", compute="int8")
    fill(add_lora(eight_bits, 2).experts.lora)
    asleep = adapted(device, ("default",))
    set_lora(asleep, None)
    for second, options, error, message in (
        (
            pruned(),
            {},
            TypeError,
            "merge_lora: expected 1.experts.w2 to be a parameter, found one that is pruned",
        ),
        (
            adapted(device, ("default",), format="int4"),
            {},
            ValueError,
            "1.experts.w1 of float values, .* int4$",
        ),
        (eight_bits, {"requantize": True}, ValueError, "1.experts.w1 of compute 'codes', found 'int8'"),
        (
            adapted("meta", ("default",)),
            {},
            ValueError,
            "1.experts.w1 and its adapters to have values, found some on",
        ),
    ):
        model = torch.nn.Sequential(adapted(device, ("default",)), second)
        before = state_of(model[0])
        with pytest.raises(error, match=message):
            merge_lora(model, **options)
        assert_same_state(state_of(model[0]), before)
    for call, error, message in (
        (partial(merge_lora, asleep), ValueError, "adapters that compute, or names, found none that compute"),
        (partial(merge_lora, asleep, requantize=1), TypeError, "requantize to be True or False"),
    ):
        with pytest.raises(error, match=message):
            call()
    merge_lora(asleep, "default")


def test_parametrised_adapters_merge_as_they_compute(device):
    class Doubled(torch.nn.Module):
        def forward(self, a):
            return 2 * a

    moe, x = adapted(device, ("default",)), batch(device)
    parametrize.register_parametrization(moe.experts.lora, "a1", Doubled())
    with torch.no_grad():
        expected = moe(x)
        torch.testing.assert_close(merge_lora(moe)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", (None, "int4"))
@pytest.mark.parametrize("names", ((), ("default",)), ids=("adding", "merging"))
def test_partitioned_weights(device, format, names):
    """As ZeRO-3 leaves them, empty: nothing is changed, not even layers before. Quantised ones know their
    shape, so that adapters can be added."""
    model = torch.nn.Sequential(*(adapted(device, names, format=format) for _ in range(2)))
    w1 = model[1].experts.w1
    for p in w1.parameters() if format else (w1,):
        p.data = p.data.new_empty(0)
    before = state_of(model[0])
    if names:
        with pytest.raises(ValueError, match=r"merge_lora: expected 1.experts.w1.* found \(0,\)"):
            merge_lora(model, requantize=True)
    elif format is None:
        with pytest.raises(ValueError, match=r"add_lora: expected w1 of shape \(E, out, in\), found \(0,\)"):
            add_lora(model, 2)
    assert_same_state(state_of(model[0]), before)


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", (None, "mxfp4"))
def test_adapters_alone_in_a_file(device, tmp_path, format):
    """Saved under one name, loaded under any; the rest of the model has no part in it."""
    model = torch.nn.Sequential(adapted(device, format=format), adapted(device, format=format))
    state = lora_state_dict(model, "math")
    names = {f"{i}.experts.lora.{n}" for i in (0, 1) for n in ("a1", "b1", "a2", "b2", "scaling")}
    assert state.keys() == names
    own = model[1].experts.lora_math.b2
    assert (
        state["1.experts.lora.b2"].data_ptr() == own.data_ptr()
        and not state["1.experts.lora.b2"].requires_grad
    )
    torch.save(state, tmp_path / "math.pt")
    state = torch.load(tmp_path / "math.pt", weights_only=True)
    x = batch(device)
    for name in ("math", "default", "a-third"):
        other = copy.deepcopy(model)
        remove_lora(other)
        add_lora(other, name=name, **ADDED["math"])
        assert load_lora_state_dict(other, state, name) is other
        assert torch.equal(other(x), (set_lora(model, "math"), model(x))[1])
        if name == "default":
            again = remove_lora(copy.deepcopy(model))
            add_lora(again, **ADDED["math"])
            missing, unexpected = again.load_state_dict(state, strict=False)
            assert not unexpected and not [n for n in missing if "lora" in n]
            assert torch.equal(again(x), other(x))
            again.load_state_dict(other.state_dict())
    alone = adapted(device).experts
    assert set(lora_state_dict(alone)) == {
        f"lora.{n}" for n in ("a1", "b1", "a2", "b2", "a3", "b3", "scaling")
    }
    load_lora_state_dict(adapted(device).experts, lora_state_dict(alone))


def test_keys_under_checkpoint_wrapper(device):
    """Are those of state_dict."""
    model = torch.nn.Sequential(checkpoint_wrapper(adapted(device)))
    wrapped = checkpoint_wrapper(adapted(device).experts)
    for module in (model, wrapped):
        found = lora_state_dict(module)
        assert len(found) == 7 and found.keys() <= module.state_dict().keys()
        load_lora_state_dict(module, found)


def test_a_file_of_a_version_without_scales(device):
    model, other = (torch.nn.Sequential(*(adapted(device) for _ in range(2))) for _ in range(2))
    state = {n: t for n, t in lora_state_dict(other).items() if not n.endswith("scaling")}
    with pytest.warns(
        UserWarning, match="0.experts.lora.scaling.*found none, as in .* 0.2.0.*stays, 2$"
    ) as warned:
        load_lora_state_dict(model, state)
    assert len(warned) == 1 and torch.equal(model[1].experts.lora.b3, other[1].experts.lora.b3)


def test_wrong_files_of_adapters(device):
    """They change nothing."""
    moe = adapted(device)
    state = lora_state_dict(adapted(device))
    before, key = state_of(moe), "experts.lora.a1"
    load = partial(load_lora_state_dict, moe)
    less = {n: t for n, t in state.items() if n != key}
    for call, error, message in (
        (lambda: load(None), TypeError, "state_dict to be a dict of tensors, found NoneType"),
        (lambda: load(list(state.items())), TypeError, "state_dict to be a dict of tensors, found list"),
        (lambda: load(less), ValueError, r"missing \['experts.lora.a1'\], unexpected \[\]"),
        (lambda: load({**state, "w": state[key]}), ValueError, r"missing \[\], unexpected \['w'\]"),
        (
            lambda: load({n.replace("lora.", "lora_x."): t for n, t in state.items()}),
            ValueError,
            "missing .*lora_x",
        ),
        (
            lambda: load({**state, key: state[key][:, :2]}),
            ValueError,
            r"a1 of shape \(4, 4, 64\), found \(4, 2, 64\)",
        ),
        (lambda: load({**state, key: 1.0}), TypeError, "a1 to be a tensor, found float"),
        (
            lambda: load({**state, key: state[key].int()}),
            TypeError,
            "a1 of a floating dtype, found torch.int32",
        ),
        (lambda: load({**state, key: state[key].to_sparse()}), TypeError, "a1 to be a dense tensor"),
        (
            lambda: load({**state, key: state[key].to("meta")}),
            ValueError,
            "a1 to have values, found one on meta",
        ),
        (
            lambda: load({**state, "experts.lora.scaling": torch.tensor(3.0)}),
            ValueError,
            r"scaling of alpha = 8 \(scale 2 at rank 4\), found alpha = 12 \(scale 3 at rank 4\)",
        ),
        (lambda: load(state, "math"), ValueError, r"missing \[\], unexpected \['experts.lora.a3'"),
        (
            lambda: load(state, "other"),
            ValueError,
            "names of adapters, code or default or math, found 'other'",
        ),
        (lambda: load(state, None), TypeError, "name to be a str, found NoneType"),
        (lambda: lora_state_dict(moe, "other"), ValueError, "names of adapters, code or default or math"),
        (lambda: lora_state_dict(moe, full=1), TypeError, "full to be True or False"),
        (lambda: lora_state_dict(adapted("meta")), ValueError, "adapters to have values, found some on meta"),
    ):
        with pytest.raises(error, match=f"lora_state_dict: expected .*{message}"):
            call()
    assert_same_state(state_of(moe), before)
    with pytest.raises(ValueError, match="a1 to have values, found one on meta"):
        load_lora_state_dict(adapted("meta"), state)


def test_wrong_names(device):
    moe, bare = adapted(device), new_layer(device)
    before = state_of(moe)
    for fn in (set_lora, merge_lora, remove_lora):
        for module, names, error, message in (
            (moe, "other", ValueError, "names of adapters, code or default or math, found 'other'"),
            (moe, ("math", "other"), ValueError, "names of adapters, .* found ..math., .other.."),
            (moe, (), ValueError, r"names of adapters, .* found \(\)"),
            (moe, 1, TypeError, "names to be a str or a tuple of str, found int"),
            (moe, ("math", 1), TypeError, "names to be a str or a tuple of str, found tuple"),
            (bare, "default", ValueError, "experts with adapters, as of add_lora, found none"),
            (bare, None, ValueError, "experts with adapters, as of add_lora, found none"),
            (torch.nn.Linear(2, 2), None, ValueError, "a module with a FusedMoE in it, found Linear"),
            (None, None, TypeError, "a module with a FusedMoE in it, found NoneType"),
        ):
            with pytest.raises(error, match=f"{fn.__name__}: expected {message}"):
                fn(module, names)
    assert_same_state(state_of(moe), before)


# --- what else acts on modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", (None, "int4"))
def test_copies_keep_what_computes(device, format):
    """Copied, pickled and cast, a layer has its adapters and computes with the same."""
    moe, x = adapted(device, format=format), batch(device)
    set_lora(moe, ("default", "code"))
    expected = moe(x)
    pickled = io.BytesIO()
    torch.save(moe, pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(moe), torch.load(pickled, weights_only=False)):
        assert torch.equal(other(x), expected)
        set_lora(other, None)
        assert torch.equal(moe(x), expected)  # flags are a layer's own
        assert trains(remove_lora(other)) == trains(new_layer(device, format=format))
    half = copy.deepcopy(moe).to(BF16)
    assert {p.dtype for m in half.experts.loras.values() for p in m.parameters()} == {BF16}
    torch.testing.assert_close(half(x.to(BF16)).float(), expected, rtol=0.1, atol=0.1)
    empty = adapted("meta")
    set_lora(empty, ("default", "code"))
    empty.to_empty(device=device).load_state_dict((moe if format is None else adapted(device)).state_dict())
    if format is None:
        assert torch.equal(empty(x), expected)
    empty.reset_parameters()
    assert not any(m.b1.any() for n, m in empty.experts.loras.items() if n != "code")
    assert {n: m.scale for n, m in empty.experts.loras.items()} == {"default": 2.0, "math": 0.75, "code": 1.0}


def test_a_layer_of_a_version_without_names(cpu):
    """Its adapters compute; they are "default", and what they froze stays frozen when they go."""
    moe, x = adapted(cpu, ("default",)), batch(cpu)
    expected = moe(x)
    del moe.experts.__dict__["_frozen_for_lora"]
    assert "is_active" not in vars(moe.experts.lora)
    older = copy.deepcopy(moe)
    assert torch.equal(older(x), expected) and list(older.experts.loras) == ["default"]
    assert not older.experts.w1.requires_grad and not remove_lora(older).experts.w1.requires_grad


@pytest.mark.parametrize("format", (None, "int4"))
def test_compiled_layers_follow_the_choice(device, format):
    moe, x = adapted(device, format=format), batch(device)
    torch._dynamo.reset()  # its limit of recompilations is one for all layers
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for names in ("default", ("default", "math"), None, tuple(ADDED), "default"):
        set_lora(moe, names)
        moe.zero_grad()
        compiled(x).square().sum().backward()
        found = {n: p.grad for n, p in moe.named_parameters()}
        moe.zero_grad()
        moe(x).square().sum().backward()
        for name, parameter in moe.named_parameters():
            assert (found[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_layers(device, reentrant):
    moe, x = adapted(device, format="int8"), batch(device).requires_grad_()
    set_lora(moe, ("default", "math"))
    moe(x).square().sum().backward()
    expected = {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}
    moe.zero_grad()
    checkpoint(moe, x, use_reentrant=reentrant).square().sum().backward()
    found = {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


def gathered(mesh, alone, names=("default",)):
    """Two layers in one `fully_shard`, whose parameters a forward pass has left gathered, those of experts
    unless they are sharded alone; a copy before; its x."""
    model = torch.nn.Sequential(*(new_layer(mesh.device_type) for _ in range(2)))
    for name in names:
        add_lora(model, 2, name=name, freeze_router=True)
        for moe in model:
            fill(moe.experts.loras[name])
    plain, x = copy.deepcopy(model), batch(mesh.device_type)
    for moe in model if alone else ():
        fully_shard(moe.experts, mesh=mesh)
    with torch.no_grad():
        fully_shard(model, mesh=mesh)(x)
    return model, plain, x


@pytest.mark.parametrize("alone", (False, True))
def test_a_gathered_model_layer_by_layer(one_rank, alone):
    """What is changed are its shards, though no call sees the root, which has gathered them."""
    model, plain, x = gathered(one_rank, alone)
    for moe in model:
        merge_lora(moe)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    model, _, _ = gathered(one_rank, alone)
    for moe in model:
        remove_lora(moe)
    model.reshard()
    assert all(p.requires_grad for p in model.parameters())
    model, plain, _ = gathered(one_rank, alone)
    model[1].experts.lora.load(LoRA(*map(torch.ones_like, plain[1].experts.lora().tensors)))
    model.reshard()
    assert all((p.full_tensor() == 1).all() for p in model[1].experts.lora.parameters())
    model, _, _ = gathered(one_rank, alone, names=())
    with pytest.raises(TypeError, match="w1 to be a plain parameter, .*found DTensor"):
        add_lora(model, 2)


# --- float32 adapters beside 16 bits ----------------------------------------------------------------------


SHARDED = ("fully_shard", "fully_shard, policy", "fully_shard, experts alone")


@pytest.mark.parametrize(
    "format, how",
    [
        *product((None, "int4"), ("plain", "autocast")),
        *product((None,), SHARDED),
        *(pytest.param("int4", how, marks=takes_integers) for how in SHARDED),
    ],
)
def test_float32_adapters_take_small_steps(one_rank, device, format, how):
    """Steps that bf16 would round away move them, joined with others, in every path."""
    moe = new_layer(device, dtype=BF16, format=format)
    alone = "alone" in how  # beside a router of 16 bits that trains
    add_lora(moe, 8, dtype=F32, freeze_router=not alone)
    add_lora(moe, 8, dtype=F32, name="math")
    for adapters in moe.experts.loras.values():
        fill(adapters)
    set_lora(moe, ("default", "math"))
    moe.shared_experts.requires_grad_(alone)
    expected = moe(x := batch(device, BF16)).detach()
    if how.startswith("fully_shard"):
        policy = MixedPrecisionPolicy(BF16, F32) if "policy" in how else MixedPrecisionPolicy()
        if alone:
            fully_shard(moe.experts, mesh=one_rank, mp_policy=policy)
        fully_shard(moe, mesh=one_rank, mp_policy=policy)
    trained = [p for m in moe.experts.loras.values() for p in m.parameters()]
    assert len(trained) == 12 and all(p.dtype == F32 and p.requires_grad for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    before = [p.detach().clone() for p in trained]
    with torch.autocast(device.type, BF16, enabled=how == "autocast"):
        out = moe(x)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.float().square().mean().backward()
    assert all(p.grad.dtype == F32 for p in trained)
    assert (moe.router.gate.weight.grad is not None) == alone
    optimizer.step()
    for old, new in zip(before, trained, strict=True):
        old, new = (t.full_tensor() if how.startswith("fully") else t for t in (old, new))
        assert (old != new).float().mean() > 0.5 and (old - new).abs().max() < 1e-4
