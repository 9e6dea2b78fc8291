"""judging.py: what it must let pass, and what it must not."""

from dataclasses import replace

import pytest
import torch
from cases import BF16, F16, F32, LAYOUTS, Case, assert_as_good, assert_near, forward_backward, to_double

import fused_moe

pytestmark = pytest.mark.usefixtures("cpu")

HALF_DTYPES = pytest.mark.parametrize("dtype", (BF16, F16), ids=("bf16", "f16"))
SIZES = {
    "small": Case(bias=True),
    "usual": Case(300, 96, 64, 6, 3, bias=True),
    "sentinels": Case(130, 24, 16, 6, 3, routing="sentinels", bias=True),
}


def results(case: Case) -> tuple[dict, dict, dict]:
    """Ours, eager's and the exact ones, of fused_experts."""
    inputs, ids, dout = case.inputs("cpu"), case.ids("cpu"), case.dout("cpu")
    fixed = {"ids": ids, "score_on": case.score_on, **case.options}
    eager, exact = fused_moe.reference.fused_experts, (to_double(inputs), to_double(dout))
    return (
        forward_backward(fused_moe.fused_experts, inputs, dout, **fixed),
        forward_backward(eager, inputs, dout, **fixed),
        forward_backward(eager, *exact, **fixed),
    )


def fails(ours: dict, name: str, wrong: torch.Tensor, eager: dict, exact: dict) -> bool:
    try:
        assert_as_good(ours | {name: wrong}, eager, exact)
    except AssertionError as error:
        return str(error).startswith(f"{name}: ")
    return False


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_an_error_of_two_percent_fails(size, layout, dtype):
    """In every tensor, in either direction."""
    ours, eager, exact = results(replace(SIZES[size], layout=layout, dtype=dtype))
    assert_as_good(ours, eager, exact)
    for name, value in ours.items():
        for scale in (0.98, 1.02):
            assert fails(ours, name, (value.double() * scale).to(value.dtype), eager, exact), (name, scale)


@HALF_DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_one_lost_row_fails(size, layout, dtype):
    """Any row of any tensor, any dscore: unless it is less than a tenth of what is usual."""
    ours, eager, exact = results(replace(SIZES[size], layout=layout, dtype=dtype))
    for name, value in ours.items():
        width = 1 if name == "dscores" else value.size(-1)
        norm = exact[name].reshape(-1, width).norm(dim=1)
        large = (norm > 0.1 * norm[norm > 0].square().mean().sqrt()).nonzero().flatten()
        assert len(large) > 0.8 * norm.count_nonzero()
        for row in large[torch.randperm(len(large))[:10]]:
            wrong = value.clone(memory_format=torch.contiguous_format)
            wrong.view(-1, width)[row] = 0
            assert fails(ours, name, wrong, eager, exact), f"{name}: row {int(row)}"


@HALF_DTYPES
def test_a_row_from_nowhere_fails(dtype):
    """Where the exact row is zero, as of a token without an expert, not even a small number passes."""
    ours, eager, exact = results(replace(SIZES["sentinels"], dtype=dtype))
    empty = (exact["out"] == 0).all(1).nonzero().flatten()
    assert len(empty)
    wrong = ours["out"].clone()
    wrong[empty[0], 3] = 1e-6
    assert fails(ours, "out", wrong, eager, exact)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=("f32", "bf16"))
def test_what_is_no_number_fails(dtype):
    ours, eager, exact = results(Case(dtype=dtype))
    for name, value in ours.items():
        wrong = value.clone()
        wrong.view(-1)[0] = torch.nan
        assert fails(ours, name, wrong, eager, exact), name


@HALF_DTYPES
def test_near_is_one_rounding(dtype):
    """A single operator's result: two roundings pass, an error of one percent does not."""
    exact = torch.randn(200, 40, dtype=torch.float64)
    assert_near(exact.to(dtype), exact)
    assert_near((exact * (1 + torch.finfo(dtype).eps / 4)).to(dtype), exact)
    with pytest.raises(AssertionError):
        assert_near((exact * 1.01).to(dtype), exact)
