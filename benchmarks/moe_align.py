"""Slots by expert, in the arrays that vLLM's moe_align_block_size makes, for a peer that is run without vLLM.

One Triton launch, with a CTA for each block size. vLLM's own takes one launch for few slots, else two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST, MOST = 32, 1024  # slots at a time
WARPS = 8


class Blocks(NamedTuple):
    """Rows grouped by expert, each expert's padded to whole blocks. Past num_rows, all is uninitialised."""

    rows: Tensor  # the slot t * K + k of each row; in a padding row, the number of slots
    experts: Tensor  # of each block
    num_rows: Tensor  # (1,), with those that pad


@triton.jit
def align_kernel(
    ids, rows, experts, num_rows, next_row, num_slots, num_experts, size_0, size_1, max_rows, max_blocks,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    size = tl.where(which == 0, size_0, size_1)
    rows += which * max_rows
    experts += which * max_blocks
    next_row += which * EXPERTS

    e = tl.arange(0, EXPERTS)  # one more at least than experts: slots past the last count as of the last
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        counts += tl.histogram(tl.load(ids + slot, slot < num_slots, EXPERTS - 1).to(tl.int32), EXPERTS)
    counts = tl.where(e < num_experts, counts, 0)
    blocks = (counts + size - 1) // size
    first_block = tl.cumsum(blocks, 0) - blocks
    tl.store(num_rows + which, tl.sum(blocks, 0) * size)
    tl.store(next_row + e, first_block * size)
    for i in range(0, tl.max(blocks, 0)):
        tl.store(experts + first_block + i, e, i < blocks)
    for i in range(0, tl.max(blocks * size - counts, 0)):
        row = counts + i
        tl.store(rows + first_block * size + row, num_slots, row < blocks * size)

    tl.debug_barrier()  # next_row is written
    for start in range(0, num_slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        expert = tl.load(ids + slot, slot < num_slots, 0)
        row = tl.atomic_add(next_row + expert, 1, slot < num_slots, sem="relaxed")
        tl.store(rows + row, slot, slot < num_slots)


def align(ids: Tensor, num_experts: int, sizes: tuple[int, int]) -> tuple[Blocks, Blocks]:
    """The blocks of both sizes, which are multiples of 4. The order of an expert's rows may vary.

    ids: (T, K) int32 or int64, contiguous, all of them in [0, E).
    """
    slots, distinct = ids.numel(), len(set(sizes))
    max_blocks = [slots // size + min(slots, num_experts) for size in sizes]
    max_rows = max(blocks * size for blocks, size in zip(max_blocks, sizes, strict=True))

    def empty(columns: int) -> Tensor:
        return torch.empty(distinct, columns, dtype=torch.int32, device=ids.device)

    rows, experts, num_rows = empty(max_rows), empty(max(max_blocks)), empty(1)
    width = triton.next_power_of_2(num_experts + 1)
    chunk = min(MOST, max(LEAST, triton.next_power_of_2(slots)))
    align_kernel[(distinct,)](
        ids, rows, experts, num_rows, empty(width), slots, num_experts, *sizes, rows.size(1), experts.size(1),
        EXPERTS=width, CHUNK=chunk, num_warps=WARPS,
    )  # fmt: skip
    blocks = [Blocks(*parts) for parts in zip(rows, experts, num_rows, strict=True)]
    return blocks[0], blocks[-1]
