"""torch.library.opcheck on every operator: schema, fake kernel, autograd registration, AOT dispatch."""

from itertools import chain

import pytest
import torch
from cases import BF16, F32, LAYOUTS, Case, distinct, operator_calls
from planting import CODES

ops = torch.ops.fused_moe


def all_operators() -> set[str]:
    """Names of all operators of the library that a layer may call, as the dispatcher knows them."""
    names = torch._C._dispatch_get_all_op_names()
    names = {n.removeprefix("fused_moe::") for n in names if n.startswith("fused_moe::")}
    names -= {
        "tile_schedule",
        "work_tiles",
        "wgrad_tiles",
        "share_tiles",
        "next_tile",
        "private_plan",
    }  # planners, for tests and schedule pictures
    arguments = {n: getattr(ops, n).default._schema.arguments for n in names}
    return {n for n in names if any("Tensor" in str(a.type) for a in arguments[n])}


def tiny(layout: str, dtype, bias: bool) -> Case:
    return Case(9, 6, 4, 3, 2, dtype, layout=layout, bias=bias)


DIFFERENTIABLE = {
    "router_logits", "router_dgrad", "route", "permute", "unpermute", "grouped_mm", "wgrad", "up_gate",
    "experts_up", "experts_down", "quantized_mm", "activate", "fp8_up", "fp8_up_weights", "pad",
}  # fmt: skip
INTEGERS = ("route_plan", "route_plan_dropped", "count_plan")  # no input can require a gradient
OPERATORS = sorted(operator_calls(tiny("separate", F32, True), torch.device("cpu")))


def test_every_operator_is_here(device):
    """An operator without a call above fails this test, and so does a call without an operator."""
    assert set(OPERATORS) == all_operators()


FIRST, *OTHERS = LAYOUTS


@pytest.mark.parametrize(
    "layouts", (pytest.param([FIRST], marks=pytest.mark.quick), OTHERS), ids=(FIRST, "others")
)
@pytest.mark.parametrize("name", OPERATORS)
def test_schema_and_fake_kernel(drawn_calls, name, layouts):
    """Inputs change only as the schema says, and the fake kernel has the right shapes, strides and dtypes."""
    both = (F32, False), (BF16, True)
    every = [drawn_calls(tiny(layout, *kind))[name] for layout in layouts for kind in both]
    for args in distinct(chain(*every)):
        utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=utils)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(drawn_calls, name):
    """All of opcheck on the first call, with inputs that require a gradient where it is differentiable.
    What other calls change, shapes and what is None, the fake kernel has, which the test above calls."""
    args = drawn_calls(tiny("separate", F32, True))[name][0]
    if name in DIFFERENTIABLE:
        names = [a.name for a in getattr(ops, name).default._schema.arguments]
        args = [
            a.detach().requires_grad_()
            if torch.is_tensor(a) and a.is_floating_point() and n not in CODES
            else a
            for n, a in zip(names, args, strict=True)
        ]
    torch.library.opcheck(getattr(ops, name).default, tuple(args))


def test_every_operator_has_its_kernels(device):
    """Each has a CPU kernel, a fake kernel, and an autograd rule if an input can require a gradient."""
    for name in OPERATORS:
        for key in ("CPU",) if name in INTEGERS else ("CPU", "Autograd"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fused_moe::{name}", key), name
        fake = torch._library.simple_registry.singleton.find(f"fused_moe::{name}").fake_impl
        assert fake.kernel is not None, name


WRITTEN = {
    "route_plan_dropped": ["dropped_rows"],
    "wgrad_accumulate": ["dw"],
    "experts_up_backward_accumulate": ["main_grad1", "main_grad3"],
    "experts_down_backward_accumulate": ["main_grad2"],
    "experts_out": ["out"],
    "fp8_up_weights_backward_accumulate": ["main_grad1", "main_grad3"],
    "fp8_down_backward_accumulate": ["main_grad2"],
}


def test_schemas_name_what_they_return(device):
    """Operators are functional: none writes an argument but these, no result aliases one."""
    for name in OPERATORS:
        schema = getattr(ops, name).default._schema
        assert [a.name for a in schema.arguments if a.alias_info is not None] == WRITTEN.get(name, [])
        assert all(a.alias_info is None for a in schema.returns)
