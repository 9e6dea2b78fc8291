"""Whether tensors share memory, judged by their strides: views of one buffer may be interleaved."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x may lead to one element. Some strides that no view, slice or transpose of a
    dense tensor has are taken for overlapping although they are not."""
    if x.is_contiguous():
        return False
    span = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= span:
            return True
        span += stride * (size - 1)
    return False


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether an element of x and one of y have a byte in common."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() or not x.numel() or not y.numel():
        return False
    if x.is_contiguous() and y.is_contiguous():
        first, other = x.data_ptr(), y.data_ptr()
        return first < other + y.nbytes and other < first + x.nbytes
    # The distance in bytes of x[i] from y[j] is a sum of i and -j times their strides.
    offsets = cast(int, x.storage_offset()), cast(int, y.storage_offset())
    distance = offsets[0] * x.itemsize - offsets[1] * y.itemsize
    terms = [(s * x.itemsize, 0, n - 1) for s, n in zip(x.stride(), x.shape, strict=True)]
    terms += [(s * y.itemsize, 1 - n, 0) for s, n in zip(y.stride(), y.shape, strict=True)]
    return _reaches(_merged(terms), 1 - x.itemsize - distance, y.itemsize - 1 - distance)


def _merged(terms: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Terms (stride, least, most) of equal strides as one, the largest strides first."""
    by_stride: dict[int, tuple[int, int]] = {}
    for stride, least, most in terms:
        low, high = by_stride.get(stride, (0, 0))
        by_stride[stride] = low + least, high + most
    return sorted(((s, low, high) for s, (low, high) in by_stride.items() if s and low < high), reverse=True)


def _reaches(terms: list[tuple[int, int, int]], low: int, high: int) -> bool:
    """Whether factors from least to most give a sum of strides within [low, high]."""
    if not terms:
        return low <= 0 <= high
    (stride, least, most), *rest = terms
    rest_low = sum(s * first for s, first, _ in rest)
    rest_high = sum(s * last for s, _, last in rest)
    first = max(least, -((rest_high - low) // stride))
    last = min(most, (high - rest_low) // stride)
    return any(_reaches(rest, low - stride * i, high - stride * i) for i in range(first, last + 1))
