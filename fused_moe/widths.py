"""Widths that are no multiple of 8, and weights that TMA cannot read, on a GPU.

TMA reads rows whose pitch and address are multiples of 16 bytes, and the tensor-core tiles of older GPUs load
16 bytes at a time. A call of other 16-bit weights is computed with copies of them, with zeros behind D and F
up to a multiple of 64: rows then begin where a line of L2 does, without which a GEMM takes up to 1.5 times
as long. `grouped_mm` and `linear` do the same. An activation of 0 is 0, so what is added adds zeros to every
sum, of finite x. In experts an infinite x times the zeros in w1 is NaN, so the token's row is NaN, even where
it would be finite or infinite without padding. No other value in w1 would help, and clearing the columns
before w2 would take another kernel.
Whether a call is such a one depends on dtypes, widths and strides, never on the number of tokens, so a token
keeps its bits in every batch.

An autograd node saves the weight in place of its copy (`saved`) and copies it again in backward (`restored`):
between the passes no second copy of the weights is in memory, and FSDP can free those that it gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from .namespace import NAMESPACE

if TYPE_CHECKING:
    from .lora import LoRA

ON_CPU = False  # set by tests: padded on the CPU, too
HALF = (torch.bfloat16, torch.float16)
CHUNK = 8  # elements of 16 bits in 16 bytes
LINE = 64  # in a line of L2


class Rows(NamedTuple):
    """What a weight's rows are: `parts` equal parts, each of `times` the width that is padded."""

    parts: int = 1
    times: int = 1


PLAIN = Rows()
ROWS = (PLAIN, Rows(parts=2), Rows(times=2), PLAIN)  # of w1, by the code of a layout in ops.py


def _zeros_of(size: int, times: int = 1) -> int:
    """The number of zeros behind a size, which is `times` a width."""
    return -size % (LINE * times) if size % (CHUNK * times) else 0


def are_padded(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None = None) -> bool:
    """Whether GEMMs by these checked weights (E, out, in) are computed with padded copies."""
    if not (x.is_cuda or (ON_CPU and x.device.type == "cpu")) or _are_plain(w1, w2, w3):
        return False
    if _gemm_dtype(x) not in HALF:
        return False
    return not (_is_readable(w1) and _is_readable(w2) and (w3 is None or _is_readable(w3)))


def _gemm_dtype(x: Tensor) -> torch.dtype:
    """The dtype that x is multiplied in. Autocast does not cast float64."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _are_plain(w1: Tensor, w2: Tensor, w3: Tensor | None) -> bool:
    """Whether all can be read, in what most calls have: this costs the host a microsecond."""
    _, D, width = w2.shape
    if D % CHUNK or width % CHUNK or not (w1.is_contiguous() and w2.is_contiguous()):
        return False
    if w3 is not None and not w3.is_contiguous():
        return False
    return torch.compiler.is_compiling() or not (
        w1.storage_offset() % CHUNK
        or w2.storage_offset() % CHUNK
        or (w3 is not None and w3.storage_offset() % CHUNK)
    )


def _is_readable(w: Tensor, rows: Rows = PLAIN) -> bool:
    E, out, width = w.shape
    of_expert, of_row, of_column = w.stride()
    fits = not (_zeros_of(out // rows.parts, rows.times) or _zeros_of(width))
    if not fits or (of_row != 1 and of_column != 1):
        return fits  # no kernel but the portable ones reads such strides
    pitch = of_row if of_column == 1 else of_column
    # Dynamo traces no offset. A compiled call leaves such a weight to the portable tier.
    offset = 0 if torch.compiler.is_compiling() else w.storage_offset()
    return not any(n % CHUNK for n in (pitch, offset, of_expert if E > 1 else 0))


# --- operands -----------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """What a call with padded widths gets in place of its arguments."""

    x: Tensor
    weights: tuple[Any, Any, Any]  # w1, w2, w3
    biases: tuple[Any, Any, Any]
    lora: LoRA | None
    shared: Tensor | None


def padded(x: Tensor, weights: tuple, biases: tuple, lora, shared: Tensor | None, layout: int) -> Operands:
    dtype = _gemm_dtype(x)
    x, *operands = (t if t is None or t.dtype == dtype else t.to(dtype) for t in (x, *weights))
    if lora is not None:
        lora = lora._replace(**_adapters(lora, ROWS[layout], dtype))
    of_weights = (ROWS[layout], PLAIN, PLAIN)
    w1, w2, w3 = (w if w is None else copied(w, rows) for w, rows in zip(operands, of_weights, strict=True))
    b1, b2, b3 = biases
    biases = (_widened(b1, ROWS[layout]), _widened(b2), _widened(b3))
    return Operands(_widened(x), (w1, w2, w3), biases, lora, _widened(shared))


def padded_mm(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of a grouped GEMM by b (E, out, in), or padded copies of them. Only zeros are multiplied
    by zeros, so padding adds no NaN to the columns that are kept."""
    if not are_padded(a, b, b):
        return a, b, bias
    dtype = _gemm_dtype(a)
    return _widened(a.to(dtype)), copied(b.to(dtype), PLAIN), _widened(bias)


@overload
def _widened(t: Tensor, rows: Rows = PLAIN) -> Tensor: ...
@overload
def _widened(t: Tensor | None, rows: Rows = PLAIN) -> Tensor | None: ...
def _widened(t: Tensor | None, rows: Rows = PLAIN) -> Tensor | None:
    """Zeros in the last dimension, behind each part of `rows`."""
    if t is None:
        return None
    *outer, last = t.shape
    width = last // rows.parts
    more = _zeros_of(width, rows.times)
    if not more:
        return t
    t = _pad(t.reshape(-1, 1, rows.parts, width), 1, rows.parts, width + more)
    return t.view(*outer, last + rows.parts * more)


def _adapters(lora, rows: Rows, dtype: torch.dtype) -> dict[str, Tensor | None]:
    def out(b: Tensor | None, rows: Rows = PLAIN) -> Tensor | None:
        return b if b is None else with_shape(_widened(b.to(dtype).mT, rows).mT, b.shape)

    def width(a: Tensor | None) -> Tensor | None:
        return a if a is None else with_shape(_widened(a.to(dtype)), a.shape)

    a = {name: width(getattr(lora, name)) for name in ("a1", "a2", "a3")}
    return a | {"b1": out(lora.b1, rows), "b2": out(lora.b2), "b3": out(lora.b3)}


def with_shape(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """t, with its shape without padding as an attribute, by which FLOPs are counted."""
    if not torch.compiler.is_compiling() and t.shape != shape:
        t.fused_moe_shape = shape  # type: ignore[attr-defined]
    return t


def shape_of(t: Tensor) -> tuple[int, ...]:
    """The shape of t without padding, where it is known."""
    return getattr(t, "fused_moe_shape", t.shape)


# --- weights ------------------------------------------------------------------------------------------


def copied(w: Tensor, rows: Rows) -> Tensor:
    """A copy (E, out, in) that can be read; a weight that can be read is itself."""
    if _is_readable(w, rows):
        return w
    copy = _zeros_behind(w, rows)
    if not torch.compiler.is_compiling():  # which decides itself what to save
        copy.fused_moe_copy_of = w, rows  # type: ignore[attr-defined]
    return with_shape(copy, w.shape)


def _zeros_behind(w: Tensor, rows: Rows) -> Tensor:
    """A copy in the weight's layout, with zeros behind the rows and behind in."""
    E, out, width = w.shape
    height = out // rows.parts
    high, wide = height + _zeros_of(height, rows.times), width + _zeros_of(width)
    if w.stride(1) == 1 and w.stride(2) != 1:
        return _pad(w.mT.unflatten(2, (rows.parts, height)), wide, rows.parts, high).flatten(2).mT
    return _pad(w.unflatten(1, (rows.parts, height)), rows.parts, high, wide).flatten(1, 2)


def _pad(t: Tensor, *sizes: int) -> Tensor:
    """A copy of t (E, a, b, c) in sizes (E, A, B, C), zero behind t. Tokens are in the first dimension, since
    torch.jit.trace takes the sizes for constants."""
    return getattr(torch.ops, NAMESPACE).pad.default(t, *sizes)


def saved(ctx, *operands: Tensor | None) -> Sequence[Tensor | None]:
    """What a node saves of weights: of a copy the weight. Functorch wraps a copy, which is saved as it is."""
    copies = [getattr(w, "fused_moe_copy_of", None) for w in operands]
    if not any(copies):
        ctx.copied_rows = None
        return operands
    ctx.copied_rows = [None if copy is None else copy[1] for copy in copies]
    return [w if copy is None else copy[0] for w, copy in zip(operands, copies, strict=True)]


def restored(ctx, *weights: Tensor | None, first: int = 0) -> Sequence[Tensor | None]:
    """The operands of `saved`, from the first on."""
    if ctx.copied_rows is None:
        return weights
    pairs = zip(weights, ctx.copied_rows[first : first + len(weights)], strict=True)
    return [
        w if w is None or rows is None else with_shape(_zeros_behind(w, rows), w.shape) for w, rows in pairs
    ]


# --- main_grads ---------------------------------------------------------------------------------------


def widened_main_grad(main_grad: Tensor | None, operand: Tensor | None, layout: int) -> Tensor | None:
    """What the gradient of an operand is added to: the main_grad, or a padded copy of it. `layout` is w1's;
    other weights have their rows padded as in UNGATED."""
    if main_grad is None or operand is None or main_grad.shape == operand.shape:
        return main_grad
    return _zeros_behind(main_grad, ROWS[layout])


def return_main_grad(main_grad: Tensor | None, wide: Tensor | None, layout: int) -> None:
    """The main_grad gets the sums of its padded copy."""
    if wide is main_grad or main_grad is None or wide is None:
        return
    own, copy = (t.unflatten(1, (ROWS[layout].parts, -1)) for t in (main_grad, wide))
    own.copy_(copy[:, :, : own.size(2), : own.size(3)])
