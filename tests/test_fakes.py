"""An operator's fake kernel gives what the operator gives: shapes, dtypes, strides; no shared memory."""

import itertools

import pytest
import torch
from cases import ACTIVATIONS, BF16, F32, F64, FORMS, LAYOUTS, Case, call_operator, operator_calls
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from fused_moe import FusedMoE, fused_experts, ops


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, all dimensions swapped in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def expanded(t: torch.Tensor) -> torch.Tensor:
    """The first expert's, token's or row's values for all of them, in one place."""
    return t[:1].expand(t.shape) if t.size(0) else t


STORED = st.sampled_from([FORMS["contiguous"], FORMS["strided"], FORMS["misaligned"], transposed, expanded])
NAMES = sorted(operator_calls(Case(3, 4, 5, 2, 1), torch.device("cpu")))


def facts(results):
    """Strides where they lead anywhere: PyTorch's own empty_like and its fake differ elsewhere."""
    return [(tuple(r.shape), r.dtype, strides_of(r), r.device) for r in results]


def strides_of(x: torch.Tensor) -> list:
    return [s if n > 1 and x.numel() else None for n, s in zip(x.shape, x.stride(), strict=True)]


def call_fake(name: str, args):
    with FakeTensorMode() as mode:
        return call_operator(name, pytree.tree_map_only(torch.Tensor, mode.from_tensor, args))


@st.composite
def cases(draw) -> Case:
    num_experts = draw(st.sampled_from((1, 3)))
    return Case(
        tokens=draw(st.sampled_from((0, 1, 5, 33))),
        dim=draw(st.sampled_from((1, 8, 37))),
        hidden=draw(st.sampled_from((1, 16, 29))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        dtype=draw(st.sampled_from((F32, F64, BF16))),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        routing=draw(st.sampled_from(("random", "sentinels"))),
    )


@given(case=cases(), forms=st.lists(STORED, min_size=9, max_size=9))
def test_a_fake_is_what_the_operator_gives(device, case, forms):
    """A case's calls are drawn once, for every operator."""
    for name, calls in operator_calls(case, device).items():
        arguments = getattr(torch.ops.fused_moe, name).default._schema.arguments
        for args in calls:
            is_input = [
                isinstance(arg, torch.Tensor) and arg.is_floating_point() and not a.is_write
                for a, arg in zip(arguments, args, strict=True)
            ]
            args = [
                form(arg) if changes else arg
                for arg, changes, form in zip(args, is_input, itertools.cycle(forms), strict=False)
            ]
            real = call_operator(name, args)
            assert facts(real) == facts(call_fake(name, args)), name
            pointers = [r.untyped_storage().data_ptr() for r in real if r.numel()]
            assert len(set(pointers)) == len(pointers), f"{name}: two results share memory"


def replaced_one(args: list, i: int, new: torch.Tensor) -> list:
    leaves, spec = pytree.tree_flatten(args)
    return pytree.tree_unflatten([*leaves[:i], new, *leaves[i + 1 :]], spec)


def on_meta(args):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), args)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_meta_beside_others(device, name):
    """One tensor on meta, or one that is not: an error. All on meta: shapes."""
    for args in operator_calls(Case(5, 8, 16, 3, 2, bias=True), device)[name]:
        args, bare = list(args), on_meta(list(args))
        leaves, bare_leaves = pytree.tree_leaves(args), pytree.tree_leaves(bare)
        indices = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        for mixed in (
            [replaced_one(args, i, bare_leaves[i]) for i in indices],
            [replaced_one(bare, i, leaves[i]) for i in indices],
        ):
            for call in mixed if len(indices) > 1 else ():
                with pytest.raises(ValueError, match=f"{name} expected all tensors or none on meta"):
                    call_operator(name, call)
        shapes = [(r.shape, r.dtype) for r in call_operator(name, args)]
        found = call_operator(name, bare)
        assert [(r.shape, r.dtype) for r in found] == shapes and all(r.is_meta for r in found)


@pytest.mark.quick
def test_a_layer_with_fake_tensors(device):
    """Forward and backward of a layer of each kind of fake tensors; on meta, too."""
    with FakeTensorMode():
        for where in (device, "meta"):
            layer = FusedMoE(16, 12, 6, 2, num_shared_experts=1, load_balance_coeff=1e-3, device=where)
            x = torch.randn(2, 5, 16, device=where, requires_grad=True)
            layer(x).sum().backward()
            assert x.grad.shape == x.shape and x.grad.device == x.device


@pytest.mark.parametrize("name", ["experts_down_backward", "experts_down_backward_accumulate"])
def test_down_backward_without_scores(device, name):
    """One gradient of scores is asked for where there are none."""
    for args in operator_calls(Case(5, 8, 16, 3, 2), device)[name]:
        by_name = ops.Schema(name).named(*args)._replace(scores=None, need_dscores=True)
        assert facts(call_operator(name, by_name)) == facts(call_fake(name, tuple(by_name)))


@pytest.mark.quick
def test_bias_gradients_of_one_expert_have_memory_of_their_own(device):
    for args in operator_calls(Case(5, 8, 16, 1, 1, bias=True), device)["experts_up_backward"]:
        _, _, _, db1, db3, _ = call_operator("experts_up_backward", args)
        before = db3.clone()
        db1.zero_()
        assert torch.equal(db3, before)


@pytest.mark.parametrize("grad_of", ("scores", "x", "w"))
def test_compiled_backward_of_transposed_inputs(device, grad_of):
    """inductor checks the strides that it was told."""
    case = Case(9, 8, 16, 3, 2)
    inputs, ids = case.inputs(device), case.ids(device)
    leaf = {"scores": inputs["scores"].t(), "x": inputs["x"].t(), "w": inputs["w1"].mT}[grad_of]
    leaf = leaf.contiguous().requires_grad_()

    def run(t):
        t = t.mT
        x, w1 = (t if grad_of == n else inputs[k] for n, k in (("x", "x"), ("w", "w1")))
        scores = t if grad_of == "scores" else inputs["scores"]
        return fused_experts(x, w1, inputs["w2"], inputs["w3"], scores, ids)

    found = []
    for function in (run, torch.compile(run, fullgraph=True)):
        (grad,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
        found.append(grad)
    torch.testing.assert_close(*found)
