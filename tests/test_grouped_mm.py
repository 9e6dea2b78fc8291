"""grouped_mm and its two gradients against the reference; also twice differentiated."""

import pytest
import torch
from cases import (
    BF16,
    F16,
    F32,
    F64,
    FORMS,
    ODD,
    STRICT,
    assert_near,
    assert_same_bits,
    check_against_reference,
    forward_backward,
)
from hypothesis import given
from hypothesis import strategies as st

from fused_moe import grouped_mm

pytestmark = pytest.mark.usefixtures("poison")

ALL_DTYPES = pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=("f32", "bf16", "f16"))


def setup(device, dtype=F32, counts=(5, 0, 31, 1, 260), spare=0, width_in=37, width_out=29):
    """a (R, in), b (E, out, in), dout (R, out) and offs."""
    num_rows = sum(counts) + spare
    ends = torch.tensor(counts, device=device).cumsum(0).int()

    def draw(*shape):
        return torch.randn(shape, device=device).to(dtype)

    b = (torch.randn(len(counts), width_out, width_in) / width_in**0.5).to(device, dtype)
    return {"a": draw(num_rows, width_in), "b": b}, draw(num_rows, width_out), ends


@pytest.mark.quick
@ALL_DTYPES
@pytest.mark.parametrize("spare", (0, 9))
def test_grouped_mm(device, dtype, spare):
    """out, da and db; zero past the last row and for an empty expert."""
    inputs, dout, ends = setup(device, dtype, spare=spare)
    ours = check_against_reference("grouped_mm", inputs, dout, offsets=ends)
    num_rows = int(ends[-1])
    for name in ("out", "da"):
        assert not ours[name][num_rows:].count_nonzero()
    assert not ours["db"][1].count_nonzero()


@ALL_DTYPES
def test_accuracy(device, dtype):
    """No tensor's error exceeds 1.1 times that of the eager loop in the same dtype."""
    inputs, dout, ends = setup(device, dtype, (200, 60, 0, 140), 0, 128, 96)
    check_against_reference("grouped_mm", inputs, dout, STRICT, offsets=ends)


@given(
    counts=st.lists(st.sampled_from((0, 1, 2, 7, 40, 257)), min_size=1, max_size=6),
    spare=st.sampled_from((0, 1, 5)),
    widths=st.tuples(st.sampled_from(ODD), st.sampled_from(ODD)),
    dtype=st.sampled_from((F32, BF16, F64)),
    form=st.sampled_from(sorted(FORMS)),
    seed=st.integers(0, 999),
)
def test_any_sizes(device, counts, spare, widths, dtype, form, seed):
    """Any counts, widths, dtype and storage."""
    torch.manual_seed(seed)
    inputs, dout, ends = setup(device, dtype, counts, spare, *widths)
    inputs = {n: FORMS[form](t) for n, t in inputs.items()}
    check_against_reference("grouped_mm", inputs, FORMS[form](dout), offsets=ends)


@ALL_DTYPES
@pytest.mark.parametrize("form", ("contiguous", "swapped", "strided"))
def test_more_than_a_block_of_all_sizes(device, dtype, form):
    """Rows, width and outputs past the blocks that the CPU's own GEMM walks in, in any strides."""
    inputs, dout, ends = setup(device, dtype, (245, 6), 0, 301, 75)
    inputs = {name: FORMS[form](value) for name, value in inputs.items()}
    check_against_reference("grouped_mm", inputs, FORMS[form](dout), STRICT, offsets=ends)


@ALL_DTYPES
@pytest.mark.parametrize("form", ("contiguous", "swapped", "strided"))
def test_infinity_at_an_odd_depth(device, dtype, form):
    """What pads an odd depth is zero on both sides: infinity times it would be NaN."""
    inputs, _, ends = setup(device, dtype, (5, 31), 0, 37, 29)
    inputs["a"].abs_().add_(1)
    inputs["b"][..., -1] = float("inf")
    assert grouped_mm(inputs["a"], FORMS[form](inputs["b"]), offsets=ends).isposinf().all()


def test_many_experts(device):
    """1024 experts, most of them empty."""
    counts = [3 if e % 100 == 7 else 0 for e in range(1024)]
    inputs, dout, ends = setup(device, F32, counts, 2, 8, 8)
    check_against_reference("grouped_mm", inputs, dout, offsets=ends)


def test_rows_past_the_last_are_not_read(device):
    """NaN past the last row affects neither the result nor a gradient."""
    inputs, dout, ends = setup(device, spare=9)
    expected = forward_backward(grouped_mm, inputs, dout, offsets=ends)
    inputs["a"][-9:] = float("nan")
    dout[-9:] = float("inf")
    assert_same_bits(forward_backward(grouped_mm, inputs, dout, offsets=ends), expected)


@pytest.mark.parametrize("form", ("contiguous", "swapped"))
def test_either_major_order_needs_no_copy(device, form):
    """MN-major weights (E, in, out) give the same result as K-major ones (E, out, in)."""
    inputs, dout, ends = setup(device)
    expected = forward_backward(grouped_mm, inputs, dout, offsets=ends)
    inputs["b"] = FORMS[form](inputs["b"])
    found = forward_backward(grouped_mm, inputs, dout, offsets=ends)
    for name, value in expected.items():
        assert_near(found[name], value.double())


def test_offsets_are_those_of_torch_grouped_mm(device):
    """torch._grouped_mm gives the same with the same offsets."""
    inputs, _, ends = setup(device, BF16, (16, 0, 32, 8), 0, 32, 16)
    try:
        expected = torch._grouped_mm(inputs["a"], inputs["b"].mT, offs=ends)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch has no torch._grouped_mm on {device}: {error}")
    assert_near(grouped_mm(**inputs, offsets=ends), expected)


def test_each_gradient_alone(device):
    """da alone and db alone are the same as both together."""
    inputs, dout, ends = setup(device)
    both = forward_backward(grouped_mm, inputs, dout, offsets=ends)
    for name, other in (("a", "b"), ("b", "a")):
        fixed = {other: inputs[other], "offsets": ends}
        alone = forward_backward(grouped_mm, {name: inputs[name]}, dout, **fixed)
        assert torch.equal(alone[f"d{name}"], both[f"d{name}"])


@ALL_DTYPES
def test_same_bits_on_any_number_of_threads(cpu, threads, dtype):
    """1, 2 and 3 threads give the same bits; so does a second run."""
    inputs, dout, ends = setup(cpu, dtype, (200, 0, 60, 1, 300), 0, 96, 64)
    threads(1)
    first = forward_backward(grouped_mm, inputs, dout, offsets=ends)
    for n in (1, 2, 3):
        threads(n)
        assert_same_bits(forward_backward(grouped_mm, inputs, dout, offsets=ends), first)
