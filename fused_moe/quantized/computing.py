"""How experts multiply a quantised weight: `compute`.

| compute       | formats             | GEMMs multiply                                                       |
| ------------- | ------------------- | -------------------------------------------------------------------- |
| `codes`       | all                 | 16-bit (or wider) rows by the weight's values                        |
| `fp8`         | fp8_block, fp8      | e4m3 rows by the weight's codes                                      |
| `int8`        | int8                | int8 rows by the weight's codes                                      |
| `int8_smooth` | int8                | the same; the rows are divided by `smooth` first, which codes have   |
|               |                     | been multiplied by (SmoothQuant, arXiv 2211.10438)                   |
| `auto`        | fp8_block, fp8,     | as `codes` where experts have few rows, else as `fp8` or `int8`      |
|               | int8                |                                                                      |

csrc/eight_bit.h has the arithmetic of 8 bits, and `reference.fused_experts` is all of it in plain PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import (
    check_bool,
    check_choice,
    check_device,
    check_shape,
    check_stored,
    check_tensor,
    fail,
    has_memory,
    is_autocast_enabled,
)
from ..info import why_no_fp8
from .formats import FORMATS

if TYPE_CHECKING:
    from .weight import QuantizedWeight

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
EIGHT_BITS = ("fp8_block", "fp8", "int8")
FORMATS_OF = {
    "codes": tuple(FORMATS),
    "fp8": ("fp8_block", "fp8"),
    "int8": ("int8",),
    "int8_smooth": ("int8",),
    "auto": EIGHT_BITS,
}
# The numbers of csrc/rules.h, FUSED_MOE_EIGHT_BIT_*
WIDTH = 16  # what D and F are multiples of on a GPU
MOST_WIDTH = 16384  # of a row that a GPU quantises
AUTO_ROWS = 16  # of an expert, on average, up to which `auto` takes codes
HALF_BLOCK = 64  # what F is a multiple of on a GPU where fp8_block has gate and up in one weight
_runs_fp8: dict[int, bool] = {}  # by the GPU's index: a call asks, and PyTorch takes microseconds to answer


def auto_takes_codes(num_rows: int, num_experts: int) -> bool:
    """fused_moe_auto_takes_codes of csrc/rules.h."""
    return num_rows <= AUTO_ROWS * num_experts


def runs_on(format: str, device: torch.device) -> bool:
    """Whether GEMMs of 8 bits by 8 bits of this format run there. FP8 needs Hopper's tensor cores."""
    if format == "int8" or device.type != "cuda":
        return True
    if device.index not in _runs_fp8:
        _runs_fp8[device.index] = not why_no_fp8(device.index)
    return _runs_fp8[device.index]


# --- checks -----------------------------------------------------------------------------------------------


def check_compute(fn: str, compute, format: str, smooth=None, power_of_two=False) -> None:
    """Checks the mode of a weight against its format, and whether it may have the others."""
    check_choice(fn, "compute", compute, FORMATS_OF)
    if format not in FORMATS_OF[compute]:
        fail(ValueError, fn, f"compute {_words(modes_of(format))} with format {format}", repr(compute))
    if smooth is not None and compute != "int8_smooth":
        fail(ValueError, fn, "no smooth without compute 'int8_smooth'", f"compute {compute!r} with one")
    check_bool(fn, "power_of_two", power_of_two)
    if power_of_two and (compute == "codes" or format == "int8"):
        expected = "power_of_two with compute 'fp8' or 'auto' of format fp8_block or fp8 alone"
        fail(ValueError, fn, expected, f"compute {compute!r} of format {format}")


def modes_of(format: str) -> list[str]:
    return [mode for mode, formats in FORMATS_OF.items() if format in formats]


def check_codes(fn: str, weights: tuple) -> None:
    """Checks w1, w2 and w3 of a function that multiplies by the values of codes alone."""
    for name, w in _named(weights):
        if not isinstance(w, Tensor) and w.compute != "codes":
            fail(
                ValueError,
                fn,
                f"{name} with compute 'codes'; fused_experts takes the others",
                repr(w.compute),
            )


def check_call(
    fn: str, compute: str | None, smooth: tuple, x: Tensor, weights: tuple, lora, plan
) -> tuple[str, tuple]:
    """The mode of a call of w1, w2 and w3, that given or else the weights'; and what x (E, D) and a (E, F)
    are divided by, `smooth` as given or else the weights'. Checks the call for the mode."""
    mode = mode_of(fn, compute, weights)
    if mode != "int8_smooth" and not (smooth[0] is smooth[1] is None):
        name = "smooth2" if smooth[0] is None else "smooth1"
        fail(ValueError, fn, f"no {name} without compute 'int8_smooth'", f"compute {mode!r} with one")
    if mode == "codes":
        return mode, smooth
    if lora is not None or plan is not None:
        name = "plan" if lora is None else "lora"
        fail(ValueError, fn, f"no {name} with compute {mode!r}", f"a {name}")
    if x.dtype not in SIXTEEN_BITS:
        takes_float = not x.is_cuda or is_autocast_enabled(x)
        if x.dtype != torch.float32 or not takes_float:
            names = "float32 or bfloat16 or float16" if takes_float else "bfloat16 or float16"
            fail(TypeError, fn, f"x of dtype {names} with compute {mode!r}", x.dtype)
    w1, w2, w3 = weights
    if w3 is not None and w1._of("scale").shape != w3._of("scale").shape:
        fail(ValueError, fn, "w1 and w3 with scales of the same shape", "two that differ")
    if w1.power_of_two != w2.power_of_two or (w3 is not None and w3.power_of_two != w2.power_of_two):
        fail(ValueError, fn, "weights of one power_of_two", "some with and some without")
    return mode, _smooth_of(fn, smooth, x, weights) if mode == "int8_smooth" else smooth


def eight_bit_tensors(
    fn: str, mode: str, x: Tensor, ids: Tensor, weights: tuple, layout: str
) -> list[list[Tensor]] | None:
    """[data, scale] of w1, w2 and w3, or [] for one that is None, as GEMMs of 8 bits by 8 bits take them;
    None if a checked call of a mode other than `codes` computes what `codes` does."""
    E, D, F = weights[1].shape
    if not runs_on(weights[1].format, x.device) or (mode == "auto" and auto_takes_codes(ids.numel(), E)):
        return None
    # 64 rows of an up's weight may not straddle two blocks of rows that share scales.
    straddles = layout == "halves" and weights[1].format == "fp8_block" and F % HALF_BLOCK
    is_wide = max(D, 0 if weights[1].format == "fp8_block" else F) > MOST_WIDTH
    fits = not x.is_cuda or not (D % WIDTH or F % WIDTH or straddles or is_wide)
    tensors = [() if w is None else w.eight_bit_tensors for w in weights]
    if fits and None not in tensors:
        return [*map(list, tensors)]
    if mode == "auto":
        return None
    if not fits and straddles:
        fail(ValueError, fn, f"F that is a multiple of {HALF_BLOCK} with compute {mode!r} and halves", F)
    if not fits and is_wide:
        what = "D" if weights[1].format == "fp8_block" else "D and F"
        fail(ValueError, fn, f"{what} of at most {MOST_WIDTH} with compute {mode!r}", (D, F))
    if not fits:
        fail(ValueError, fn, f"D and F that are multiples of {WIDTH} with compute {mode!r}", (D, F))
    expected = f"weights as published with compute {mode!r}; set_compute keeps them so"
    fail(ValueError, fn, expected, "weights in tiles")


def _named(weights: tuple) -> list[tuple[str, QuantizedWeight | Tensor]]:
    return [(f"w{i}", w) for i, w in enumerate(weights, 1) if w is not None]


def mode_of(fn: str, compute: str | None, weights: tuple) -> str:
    """The mode of a call of w1, w2 and w3: that given, or else the weights', which have to suit it."""
    w1, w2, w3 = weights
    if compute is None and not (isinstance(w1, Tensor) or isinstance(w2, Tensor) or isinstance(w3, Tensor)):
        mode, format = w1.compute, w1.format
        if w2.compute == mode and w2.format == format:
            if w3 is None or (w3.compute == mode and w3.format == format):
                return mode
    named = _named(weights)
    if compute is None:
        own = {name: "codes" if isinstance(w, Tensor) else w.compute for name, w in named}
        if len(set(own.values())) > 1:
            found = ", ".join(f"{name} with {mode!r}" for name, mode in own.items())
            fail(ValueError, fn, "weights of one compute", found)
        mode = own["w1"]
    else:
        check_choice(fn, "compute", compute, FORMATS_OF)
        mode = compute
    for name, w in named:
        if isinstance(w, Tensor):
            if mode != "codes":
                expected = f"{name} to be a QuantizedWeight with compute {mode!r}"
                fail(TypeError, fn, expected, type(w).__name__)
            continue
        if w.format not in FORMATS_OF[mode]:
            expected = f"{name} of format {' or '.join(FORMATS_OF[mode])} with compute {mode!r}"
            fail(ValueError, fn, expected, w.format)
        if mode != "int8_smooth" and w._smooth() is not None:
            expected = f"compute 'int8_smooth' with {name}, whose codes were multiplied by its smooth"
            fail(ValueError, fn, expected, repr(mode))
    if mode == "codes":
        return mode
    formats = {name: w.format for name, w in named if not isinstance(w, Tensor)}
    if len(set(formats.values())) > 1:
        found = ", ".join(f"{name} of {format}" for name, format in formats.items())
        fail(ValueError, fn, f"weights of one format with compute {mode!r}", found)
    return mode


def _smooth_of(fn: str, given: tuple, x: Tensor, weights: tuple) -> tuple:
    w1, w2, w3 = weights
    if given[0] is None and w3 is not None:
        _check_same(fn, w1._smooth(), w3._smooth())
    found = []
    for i, (smooth, w) in enumerate(zip(given, (w1, w2), strict=True), 1):
        smooth = w._smooth() if smooth is None else smooth
        if smooth is not None:
            check_tensor(fn, f"smooth{i}", smooth, 2, (torch.float32,))
            check_shape(fn, f"smooth{i}", smooth, f"E, {'DF'[i - 1]}", (w.size(0), w.size(2)))
            check_device(fn, f"smooth{i}", smooth, "x", x)
        found.append(smooth)
    return tuple(found)


def _check_same(fn: str, smooth1: Tensor | None, smooth3: Tensor | None) -> None:
    """w1 and w3 have the same input. Their values are compared where that takes no synchronisation."""
    if smooth1 is smooth3:
        return
    if smooth1 is None or smooth3 is None:
        fail(ValueError, fn, "w1 and w3 with the same smooth", "one without")
    can_read = (
        smooth1.device.type == smooth3.device.type == "cpu" and has_memory(smooth1) and has_memory(smooth3)
    )
    if can_read and not torch.equal(smooth1, smooth3):
        fail(ValueError, fn, "w1 and w3 with the same smooth", "two that differ")


def check_smooth(fn: str, name: str, smooth, E: int, width: int, device: torch.device) -> None:
    """Checks the factors (E, in) of a weight; their values where that takes no synchronisation."""
    check_stored(fn, name, smooth, 2, (torch.float32,))
    check_shape(fn, name, smooth, "E, in", (E, width))
    if smooth.device != device:
        fail(ValueError, fn, f"{name} on the weight's device {device}", smooth.device)
    if smooth.device.type != "cpu" or not has_memory(smooth):
        return
    if not (smooth.isfinite() & (smooth > 0) & (1 / smooth).isfinite()).all():
        fail(ValueError, fn, f"{name} of finite numbers > 0, and so their reciprocals", "others")


def _words(modes: list[str]) -> str:
    return " or ".join(map(repr, modes))
