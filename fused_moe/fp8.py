"""FP8 training: experts whose GEMMs multiply e4m3 by e4m3, forward and backward.

`fused_experts(..., fp8=...)` takes it. A weight has one scale for a block of 128x128, and x, the gradient of
the output and what is between the GEMMs one for a row, or for 128 columns of a row: the recipe of DeepSeek-V3
(arXiv 2412.19437, 3.3), but for x and the output's gradient, whose rows have one scale. Sums are float32 or
wider, and no scale is a power of two by rule. csrc/eight_bit.h has the arithmetic of scales and codes, and
`reference.fused_experts` is all of it in plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops as _ops
from .checks import (
    check_bool,
    check_choice,
    check_device,
    check_input,
    check_layout,
    check_shape,
    check_tensor,
    fail,
    is_autocast_enabled,
)
from .ops import ops
from .quantized.weight import QuantizedWeight

DTYPES = (torch.float32, torch.bfloat16)  # of weights
WGRADS = ("auto", *_ops.WGRADS)
LEAST_WIDTH, MOST_EXPERTS = 768, 16  # F, and E / K, of a layer that gains
WIDE = f"F >= {LEAST_WIDTH}"
GAINS = f"{WIDE} and E <= {MOST_EXPERTS} * K"  # for messages, beside widths that are multiples of BLOCK
WGRAD_ROWS = 256  # of an expert, on average, from which "auto" takes FP8 weight gradients


def wgrad_pays(num_rows: int, num_experts: int) -> bool:
    """fused_moe_fp8_wgrad_pays of csrc/rules.h."""
    return num_rows >= WGRAD_ROWS * num_experts


def width_pays(F: int) -> bool:
    """Whether experts of this width gain from FP8 training, in a layer that does: passes over rows cost the
    less of a GEMM the wider it is."""
    return F >= LEAST_WIDTH and F % _ops.BLOCK == 0


def layer_pays(D: int, F: int, E: int, K: int) -> bool:
    """Whether experts of these sizes gain from FP8 training, as measured (docs/fp8.md). A weight is quantised
    for T * K / E rows."""
    return width_pays(F) and D % _ops.BLOCK == 0 and E <= MOST_EXPERTS * K


def peak_scale(peak: Tensor, largest: float = 448.0) -> Tensor:
    """The float32 scale of codes of at most `largest` whose values are at most `peak`. The quotient is
    rounded once: beside a number, not a tensor, PyTorch multiplies by the reciprocal on a GPU."""
    return torch.where(peak == 0, 1, (peak / torch.full_like(peak, largest)).clamp_min(2.0**-120))


class Fp8Weights:
    """The e4m3 codes and scales of the experts' weights, as `fp8_weights` makes them.

    They do not follow the weights: after an optimizer's step make new ones.

    Attributes:
        up: codes (E, H, D) uint8, the bytes of float8_e4m3fn, scales (E, H / 128, D / 128) float32, and both
            of the transpose, (E, D, H) and (E, D / 128, H / 128). Rows are w1's then w3's, H = 2F, of every
            layout; without a gate H = F.
        down: the same of w2, (E, D, F).
        layout: of the weights, or "ungated".

    Example:
        >>> codes = fused_moe.fp8_weights(torch.randn(2, 128, 128), torch.randn(2, 128, 128))
        >>> codes
        Fp8Weights(E=2, D=128, F=128, layout='ungated', device='cpu')
    """

    def __init__(self, up: tuple[Tensor, ...], down: tuple[Tensor, ...], layout: str):
        self.up, self.down, self.layout = tuple(up), tuple(down), layout

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, D, F)."""
        return tuple(self.down[0].shape)

    @property
    def device(self) -> torch.device:
        """The device of codes and scales."""
        return self.down[0].device

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return sum(t.nbytes for t in (*self.up, *self.down))

    def to(self, device: torch.device | str | int) -> Fp8Weights:
        """Returns a copy on another device; itself if it is there."""
        up, down = (tuple(t.to(device) for t in tensors) for tensors in (self.up, self.down))
        return self if down[0] is self.down[0] else Fp8Weights(up, down, self.layout)

    def __repr__(self) -> str:
        E, D, F = self.shape
        return f"Fp8Weights(E={E}, D={D}, F={F}, layout={self.layout!r}, device={str(self.device)!r})"


def fp8_weights(
    w1: Tensor, w2: Tensor, w3: Tensor | None = None, *, layout: str = "separate", transposed: bool = False
) -> Fp8Weights:
    """Quantises the weights of experts for FP8 training, once for several calls.

    The result has e4m3 codes, one float32 scale for each block of 128x128, and the same codes transposed,
    which backward reads. `fused_experts(..., fp8=...)` takes it; with fp8=True it makes them itself, in every
    call. Made once, they serve all micro-batches until the optimizer's step.

    scale = peak / 448, peak being the block's largest magnitude, and 1 where that is 0. code = value *
    (1 / scale), rounded to the nearest, ties to even. A NaN makes its block NaN. Source of the blocks:
    DeepSeek-V3 (arXiv 2412.19437, 3.3).

    Args:
        w1: as that of `fused_experts`, float32 or bfloat16. D and F are multiples of 128.
        w2: as that of `fused_experts`, float32 or bfloat16.
        w3: as that of `fused_experts`, of w1's dtype.
        layout: as that of `fused_experts`.
        transposed: as that of `fused_experts`.

    Returns:
        `Fp8Weights`, through which no gradient goes, on the weights' device, 2 bytes for each element of a
        weight.

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong shape, device or value. The message says what was expected and what was
            found.
        RuntimeError: on a GPU that does not multiply FP8 by FP8 (`info()["compute"]["fp8"]`).

    Example:
        >>> w1, w2, w3 = torch.randn(3, 2, 128, 128)
        >>> fp8 = fused_moe.fp8_weights(w1, w2, w3)
        >>> scores, ids = fused_moe.route(torch.randn(5, 2), top_k=1)
        >>> fused_moe.fused_experts(torch.randn(5, 128), w1, w2, w3, scores, ids, fp8=fp8).shape
        torch.Size([5, 128])
    """
    fn = "fp8_weights"
    check_layout(fn, layout)
    check_bool(fn, "transposed", transposed)
    packed = layout != "separate"
    pairs = layout == "interleaved" and isinstance(w1, Tensor) and w1.dim() == 4 and not transposed
    check_input(fn, "w1", w1, 4 if pairs else 3, DTYPES)
    if pairs:
        if w1.size(2) != 2:
            fail(ValueError, fn, "w1 of shape (E, F, 2, D)", tuple(w1.shape))
        w1 = w1.flatten(1, 2)
    check_input(fn, "w2", w2, 3, DTYPES)
    check_device(fn, "w2", w2, "w1", w1)
    if w3 is not None:
        if packed:
            fail(ValueError, fn, f"no w3 with layout {layout!r}, which packs it in w1", "w3")
        check_tensor(fn, "w3", w3, 3, (w1.dtype,))
        check_device(fn, "w3", w3, "w1", w1)
    if transposed:
        w1, w2, w3 = w1.mT, w2.mT, None if w3 is None else w3.mT
    E, D, F = w2.shape
    check_widths(fn, D, F)
    if E < 1:
        fail(ValueError, fn, "weights of at least one expert", E)
    H = 2 * F if packed else F
    for name, w, sizes in (("w1", w1, (E, H, D)), ("w3", w3, (E, F, D))):
        if w is not None and tuple(w.shape) != sizes:
            stored, found = (tuple(reversed(s)) if transposed else s for s in (sizes[1:], w.shape[1:]))
            expected = f"{name} of {E} experts (out, in) = {stored}, as w2 has"
            fail(ValueError, fn, expected, (w.size(0), *found))
    code = _ops.UNGATED if not packed and w3 is None else _ops.LAYOUTS[layout]
    return quantized(w1, w2, w3, code)


LAYOUT_NAMES = {code: name for name, code in _ops.LAYOUTS.items()} | {_ops.UNGATED: "ungated"}


def quantized(
    w1: Tensor, w2: Tensor, w3: Tensor | None, code: int, *, for_backward: bool = True
) -> Fp8Weights:
    """fp8_weights of checked (E, out, in). Without for_backward they are codes and scales alone, not those of
    transposes."""
    w1, w2, w3 = w1.detach(), w2.detach(), None if w3 is None else w3.detach()
    orders = _ops.BOTH_ORDERS if for_backward else _ops.AS_THEY_ARE
    up = _ops.run(ops.fp8_weight.default, w1, w3, code, orders)
    down = _ops.run(ops.fp8_weight.default, w2, None, _ops.UNGATED, orders)
    if not for_backward:
        up, down = up[:2], down[:2]
    return Fp8Weights(up, down, LAYOUT_NAMES[code])


# --- checks of fused_experts --------------------------------------------------------------------------------


def check_widths(fn: str, D: int, F: int) -> None:
    for name, width in (("D", D), ("F", F)):
        if width < 1 or width % _ops.BLOCK:
            fail(ValueError, fn, f"{name} that is a multiple of {_ops.BLOCK} with FP8 training", width)


def check_options(fn: str, fp8, wgrad, weights, biases, score_on: str, lora, compute, smooth) -> bool:
    """Whether a call trains in FP8. Checks for what it cannot be combined with."""
    if fp8 is None or fp8 is False:
        if wgrad != "auto":
            check_choice(fn, "fp8_wgrad", wgrad, WGRADS)
            fail(ValueError, fn, "fp8_wgrad only beside fp8", f"{wgrad!r} without fp8")
        return False
    if fp8 is not True and not isinstance(fp8, Fp8Weights):
        expected = "fp8 to be None, True or what fp8_weights returns"
        fail(TypeError, fn, expected, type(fp8).__name__)
    check_choice(fn, "fp8_wgrad", wgrad, WGRADS)
    for i, w in enumerate(weights, 1):
        if isinstance(w, QuantizedWeight):
            fail(ValueError, fn, f"w{i} to be a tensor with fp8", "a QuantizedWeight")
    named = [(f"b{i}", b) for i, b in enumerate(biases, 1)]
    named += [("lora", lora), ("compute", compute), *((f"smooth{i}", s) for i, s in enumerate(smooth, 1))]
    for name, value in named:
        if value is not None:
            fail(ValueError, fn, f"no {name} with fp8", f"a {name}")
    if score_on != "output":
        fail(ValueError, fn, "score_on 'output' with fp8", repr(score_on))
    return True


def check_operands(fn: str, fp8, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None, code: int) -> None:
    """Checks dtypes, widths and given codes for checked weights (E, out, in)."""
    dtype, on_gpu = x.dtype, x.device.type == "cuda"
    casts = is_autocast_enabled(x) and dtype != torch.float64
    if casts:
        dtype = torch.get_autocast_dtype(x.device.type)
    if dtype != torch.bfloat16 and (dtype != torch.float32 or on_gpu):
        expected = "x of dtype bfloat16" + ("" if on_gpu else " or float32") + " with fp8"
        fail(TypeError, fn, expected, f"{dtype} of autocast" if casts else dtype)
    for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
        if w is not None and w.dtype not in (dtype, torch.float32):
            fail(TypeError, fn, f"{name} of dtype float32 or {str(dtype)[6:]} with fp8", w.dtype)
    if w3 is not None and w3.dtype != w1.dtype:
        fail(TypeError, fn, f"w3 of w1's dtype {w1.dtype} with fp8", w3.dtype)
    E, D, F = w2.shape
    check_widths(fn, D, F)
    if fp8 is True:
        return
    if fp8.layout != LAYOUT_NAMES[code]:
        fail(ValueError, fn, f"fp8 of weights of layout {LAYOUT_NAMES[code]!r}", repr(fp8.layout))
    check_shape(fn, "fp8", fp8.down[0], "E, D, F", (E, D, F))
    check_device(fn, "fp8", fp8.down[0], "x", x)
