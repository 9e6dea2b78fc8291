"""Other libraries' grouped GEMMs of e4m3 by e4m3, on the codes of our quantised weights.

What is timed of them is their two GEMMs alone, gate and up as one: their operands are gathered, padded and
quantised before, and they activate and combine nothing. So the time is less than that of a layer made of
them, and ours, of whole experts, does more. Once, the layer is computed around them, and its error checked.
A peer that cannot run raises Unavailable with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from peers import BLOCK, Unavailable, stacked
from torch import Tensor

from fused_moe import Plan, permute, reference, unpermute

LARGEST = 448  # of e4m3
E4M3 = torch.float8_e4m3fn
# Packages that have DeepGEMM: its own, and the copy in vLLM's wheel
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")


def rows_of_codes(rows: Tensor, block: int | None = None) -> tuple[Tensor, Tensor]:
    """e4m3 codes of rows (R, k) and their float32 scales (R, blocks): one for each `block` columns or row."""
    rows, k = rows.float(), rows.size(1)
    block = block or k
    blocks = F.pad(rows, (0, -k % block)).unflatten(1, (-1, block))
    scales = (blocks.abs().amax(-1) / LARGEST).clamp(min=1e-30)
    codes = (blocks / scales[:, :, None]).flatten(1)[:, :k].contiguous().to(E4M3)
    return codes, scales


def torch_gemms(weights: tuple, plan: Plan, rows: Tensor, activation: str) -> tuple[Callable, Tensor]:
    """torch._scaled_grouped_mm with one scale per row of activations and of weights (format fp8), and fast
    accumulation. Returns the two GEMMs as a call, and what the second one makes of `rows`, (R, D)."""
    w1, w2, w3 = weights
    if w1.format != "fp8" or w1.scale.size(1) != w1.size(1):
        raise Unavailable(f"torch: expected fp8 with a scale per row, found {w1.format}")
    if not hasattr(torch, "_scaled_grouped_mm"):
        raise Unavailable(
            f"torch: expected torch._scaled_grouped_mm, which PyTorch {torch.__version__} lacks"
        )

    def gemm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_grouped_mm(
            a[0], b[0].mT, a[1], b[1], offs=plan.offsets[1:], out_dtype=rows.dtype, use_fast_accum=True
        )

    def of_row(rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = rows_of_codes(rows)
        return codes, scales.squeeze(1)

    up = stacked_codes(w1, w3), stacked(w1, w3, lambda w: w.scale.float().squeeze(2))
    down = w2.data, w2.scale.float().squeeze(2)
    return two_gemms(gemm, of_row, rows, up, down, activation)


def deep_gemm(weights: tuple, plan: Plan, rows: Tensor, activation: str) -> tuple[Callable, Tensor]:
    """m_grouped_fp8_gemm_nt_contiguous of github.com/deepseek-ai/DeepGEMM, which compiles in its first call:
    scales of 1 x 128 by 128 x 128 (format fp8_block). Returns what torch_gemms does. Each expert's rows are
    padded to a multiple that the library names."""
    w1, w2, w3 = weights
    if w1.format != "fp8_block" or w1.size(1) % BLOCK or w1.size(2) % BLOCK:
        found = f"{w1.format}, D = {w1.size(2)}, F = {w1.size(1)}"
        raise Unavailable(
            f"deepgemm: expected fp8_block of widths that are multiples of {BLOCK}, found {found}"
        )
    library = find_deep_gemm()
    multiple = library.get_mk_alignment_for_contiguous_layout()
    padded_row, experts = padded(plan.counts, multiple)

    def gemm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        out = torch.empty(a[0].size(0), b[0].size(1), dtype=rows.dtype, device=rows.device)
        library.m_grouped_fp8_gemm_nt_contiguous(a, b, out, experts)
        return out

    def of_block(rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = rows_of_codes(rows, BLOCK)
        return codes, library.get_mn_major_tma_aligned_tensor(scales)

    spread = rows.new_zeros(experts.size(0), rows.size(1)).index_copy_(0, padded_row, rows)
    up, down = (stacked_codes(w1, w3), stacked(w1, w3, lambda w: w.scale)), (w2.data, w2.scale)
    run, y = two_gemms(gemm, of_block, spread, up, down, activation)
    return run, y[padded_row]


def find_deep_gemm():
    reasons = []
    for name in DEEP_GEMM:
        try:
            return importlib.import_module(name)
        except Exception as error:  # its import compiles and looks for CUDA: it fails in several ways
            reasons.append(f"{name}: {error}")
    raise Unavailable(f"deepgemm is not installed ({'; '.join(reasons)})")


def padded(counts: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Where each row goes if every expert's rows are padded to a multiple, and the expert of each row there,
    -1 of padding: int32."""
    room = (counts + multiple - 1) // multiple * multiple
    first, first_there = counts.cumsum(0) - counts, room.cumsum(0) - room
    rows = int(counts.sum())
    of_expert = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts.long())
    there = torch.arange(rows, device=counts.device) + (first_there - first).long()[of_expert]
    experts = torch.full((int(room.sum()),), -1, dtype=torch.int32, device=counts.device)
    return there, experts.index_copy_(0, there, of_expert.int())


def stacked_codes(w1, w3) -> Tensor:
    return stacked(w1, w3, lambda w: w.data.view(torch.uint8)).view(E4M3)


def two_gemms(
    gemm: Callable, quantise: Callable, rows: Tensor, up: tuple, down: tuple, activation: str
) -> tuple[Callable, Tensor]:
    """Both GEMMs as a call, on operands that are made here; and the second one's output."""
    x, hidden = quantise(rows), down[0].size(2)
    h = gemm(x, up).float()
    gate, other = h[:, :hidden], h[:, hidden:] if h.size(1) > hidden else None
    a = quantise(reference.activate(gate, other, activation=activation))
    return lambda: (gemm(x, up), gemm(a, down)), gemm(a, down)


def prepared(peer: Callable, weights: tuple, x: Tensor, scores: Tensor, ids: Tensor, activation: str):
    """The peer's GEMMs as a call, and the experts' output (T, D) with them."""
    rows, plan = permute(x, ids, weights[1].size(0))
    run, y = peer(weights, plan, rows, activation)
    return run, unpermute(y, plan, scores)


EIGHT_BIT_PEERS = {"torch-gemms": torch_gemms, "deepgemm-gemms": deep_gemm}
