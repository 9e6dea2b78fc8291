"""Shared memory of strided views, against the set of all their bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_moe.overlap import overlaps_itself, share_memory

pytestmark = pytest.mark.quick

BUFFER = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def views(draw, dtype=None):
    dtype = dtype or draw(st.sampled_from((torch.uint8, torch.bfloat16, torch.float32)))
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    return BUFFER.view(dtype).as_strided(shape, strides, draw(st.integers(0, 40)))


def elements(x: torch.Tensor) -> list[int]:
    """Where each element begins, in bytes."""
    indices = torch.cartesian_prod(*[torch.arange(n) for n in x.shape]).view(x.numel(), x.dim())
    return [
        (x.storage_offset() + sum(map(int.__mul__, i, x.stride()))) * x.itemsize for i in indices.tolist()
    ]


def bytes_of(x: torch.Tensor) -> set[int]:
    return {first + i for first in elements(x) for i in range(x.itemsize)}


@given(x=views(), y=views())
def test_share_memory(x, y):
    assert share_memory(x, y) == bool(bytes_of(x) & bytes_of(y))


@given(x=views())
def test_overlaps_itself(x):
    """No overlap is missed."""
    assert overlaps_itself(x) or len(set(elements(x))) == x.numel()


def test_what_weights_look_like():
    """Halves, interleaved and transposed views of one buffer do not overlap; a shifted one does."""
    packed = torch.zeros(4, 2 * 6, 5)
    for x, y in ((packed[:, :6], packed[:, 6:]), (packed[:, ::2], packed[:, 1::2]), (packed[:2], packed[2:])):
        assert not share_memory(x, y) and not share_memory(x.mT, y) and share_memory(x, packed.mT)
        assert not overlaps_itself(x) and not overlaps_itself(x.mT)
    assert share_memory(packed[:, :6], packed[:, 5:11])
    assert not share_memory(packed, packed.clone())
    assert overlaps_itself(packed[:1].expand(4, -1, -1)) and overlaps_itself(
        packed.as_strided((4, 4), (1, 1))
    )
