"""pad: copies in other sizes, against torch.nn.functional.pad, which cuts where a number is negative."""

import pytest
import torch
from cases import BF16, F16, F32, F64
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import pad as torch_pad

ops = torch.ops.fused_moe
SIZES = [  # of x (E, a, b, c), and of the copy
    ((3, 2, 5, 7), (2, 5, 7)),
    ((3, 2, 5, 13), (3, 6, 64)),
    ((2, 1, 40, 1410), (1, 64, 1472)),
    ((2, 2, 64, 1472), (2, 33, 1409)),  # cut, as gradients are
    ((1, 1, 9, 2050), (1, 11, 2049)),
    ((4, 3, 7, 5), (2, 9, 3)),
    ((5, 1, 1, 1), (1, 1, 9)),
    ((2, 3, 4, 5), (0, 4, 5)),
    ((0, 2, 3, 4), (2, 3, 8)),
    ((2, 3, 4, 0), (3, 4, 20)),
    ((2, 0, 4, 3), (1, 4, 8)),
]
FORMS = {
    "contiguous": lambda x: x,
    "odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "rows apart": lambda x: torch_pad(x, (0, 3))[..., : x.size(3)],
    "inner transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand(x.shape) if x.size(0) else x,
}


def expected(x, sizes):
    behind = [size - old for size, old in zip(sizes, x.shape[1:], strict=True)]
    return torch_pad(x, [n for more in reversed(behind) for n in (0, more)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_copies(device, sizes, dtype, form, poison):
    shape, sizes = sizes
    x = FORMS[form](torch.randn(shape, device=device).to(dtype))
    found = ops.pad(x, *sizes)
    assert found.is_contiguous() and found.dtype == dtype
    assert torch.equal(found, expected(x, sizes))


@pytest.mark.parametrize("width", range(1, 40))
@pytest.mark.parametrize("new", [1, 7, 16, 40, 64])
def test_every_alignment(device, width, new):
    """Rows begin at each even address, in x and in the copy. NaN in x stays where it is."""
    flat = torch.randn(8 + 23 * width, device=device).to(BF16)
    flat[::5] = torch.nan
    for first in range(8):
        x = flat[first : first + 23 * width].view(1, 1, 23, width)
        torch.testing.assert_close(
            ops.pad(x, 1, 25, new), expected(x, (1, 25, new)), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("sizes", [(3, 5, 9), (1, 2, 3), (2, 3, 4)])
def test_gradients(device, sizes):
    """The gradient is the adjoint: what was added is cut, and what was cut is zero."""
    x = torch.randn(2, 2, 3, 4, dtype=F64, device=device, requires_grad=True)
    assert gradcheck(lambda x: ops.pad(x, *sizes), x)
    assert gradgradcheck(lambda x: ops.pad(x, *sizes), x)
