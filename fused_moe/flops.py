"""FLOPs of the operators, for torch.utils.flop_counter.FlopCounterMode.

A gated layer takes 6 TKDF forward and 12 TKDF backward; a gradient that is not needed takes none. Every slot
counts as a row: how many ids are sentinels is known on the device alone. Only GEMMs count, as in PyTorch. A
GEMM of the router takes 2 TDE; that of its weight's gradient is PyTorch's. A formula gets shapes where the
operator gets tensors; of what is padded, the shapes without padding (widths.py), which second derivatives
and torch.func do not know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from math import prod

from torch import Tensor
from torch.utils._pytree import tree_map_only

from .ops import Schema, ops
from .quantized.formats import FORMATS
from .widths import shape_of

CODES_PER_BYTE = [format.per_byte for format in FORMATS.values()]  # in tiles as in the published layout
FORMULAS: dict[str, Callable[..., int]] = {}  # operator -> function of its arguments, a named tuple


def _register(*names: str):
    def register(formula):
        FORMULAS.update(dict.fromkeys(names, formula))
        return formula

    return register


def _num_rows(x, plan) -> int:
    """R: of row_slot, or of the ids beside a packed plan, or without row maps of x."""
    if len(plan) > 2:
        return plan[3][0]
    return prod(plan[1]) if len(plan[1]) == 2 else x[0]


def _up(args) -> int:
    """FLOPs per row of h, or of its gradient: a dot product with every row of w1 and w3."""
    width = args.w1[1] + (args.w3[1] if args.w3 else 0)
    return 2 * width * args.w1[2]


@_register("router_logits")
def _router_logits(args) -> int:
    return 2 * args.x[0] * prod(args.weight)


@_register("router_dgrad")
def _router_dgrad(args) -> int:
    return 2 * args.dlogits[0] * prod(args.weight)


@_register("grouped_mm")
def _grouped_mm(args) -> int:
    return 2 * args.a[0] * prod(args.b[1:])


@_register("quantized_mm")
def _quantized_mm(args) -> int:
    return 2 * args.a[0] * CODES_PER_BYTE[args.format] * prod(args.data[1:])


@_register("quantized_up")
def _quantized_up(args) -> int:
    weights = ((args.w1, args.format1), (args.w3, args.format3))
    rows = _num_rows(args.x, args.plan)
    return 2 * rows * sum(CODES_PER_BYTE[format] * prod(w[0][1:]) for w, format in weights if w)


@_register("wgrad", "wgrad_accumulate")
def _wgrad(args) -> int:
    rows = args.b if args.a_row_token else args.a
    return 2 * rows[0] * args.a[1] * args.b[1]


@_register("up_gate", "experts_up")
def _experts_up(args) -> int:
    return _num_rows(args.x, args.plan) * _up(args)


@_register("up_dgrad")
def _up_dgrad(args) -> int:
    return args.dh[0] * _up(args)


@_register("experts_up_backward", "experts_up_backward_accumulate")
def _experts_up_backward(args) -> int:
    flops = _up(args) if args.need_dx or args.need_dscores else 0
    flops += 2 * prod(args.w1[1:]) if args.need_dw1 else 0
    flops += 2 * prod(args.w3[1:]) if args.need_dw3 else 0
    return args.dh[0] * flops


@_register("experts_down")
def _experts_down(args) -> int:
    return 2 * args.a[0] * prod(args.w2[1:])


@_register("experts", "experts_out")
def _experts(args) -> int:
    per_byte = [CODES_PER_BYTE[format] for format in args.formats] or [1, 1, 1]
    weights = zip(per_byte, (args.w1, args.w3, args.w2), strict=True)
    of_slot = sum(codes * prod(w[0][1:]) for codes, w in weights if w)
    if not args.gate:
        return 2 * prod(args.ids) * of_slot
    return 2 * args.x[0] * (prod(args.gate) + args.routing[0] * of_slot)


@_register("down_dgrad")
def _down_dgrad(args) -> int:
    return 2 * args.h[0] * prod(args.w2[1:])


@_register("experts_down_backward", "experts_down_backward_accumulate")
def _experts_down_backward(args) -> int:
    gemms = (args.need_dh or args.need_dscores or args.need_dw2) + args.need_dw2
    return 2 * gemms * args.h[0] * prod(args.w2[1:])


@_register("experts_backward")
def _experts_backward(args) -> int:
    need_dw1, need_dw3, need_dw2, *_ = args.needs
    gemms = [(args.w1, 1 + need_dw1), (args.w2, 1 + need_dw2)]
    if args.w3:
        gemms.append((args.w3, 1 + need_dw3))
    of_row = sum(times * prod(w[1:]) for w, times in gemms)
    return 2 * (args.h[0] * of_row + args.x[0] * prod(args.gate))


@_register("fp8_up")
def _fp8_up(args) -> int:
    return _num_rows(args.x, args.plan) * _up(args)


@_register("fp8_up_backward")
def _fp8_up_backward(args) -> int:
    return 2 * args.dlink[0] * prod(args.quantized[0][1:])


@_register("fp8_up_weights_backward", "fp8_up_weights_backward_accumulate")
def _fp8_up_weights_backward(args) -> int:
    flops = 2 * prod(args.w1[1:]) if args.need_dw1 else 0
    flops += 2 * prod(args.w3[1:]) if args.need_dw3 else 0
    return _num_rows(args.x, args.plan) * flops


@_register("fp8_down")
def _fp8_down(args) -> int:
    return 2 * args.a_codes[0] * prod(args.w2[1:])


@_register("fp8_down_backward", "fp8_down_backward_accumulate")
def _fp8_down_backward(args) -> int:
    needs_g = args.need_dlink or args.need_dlink_t or args.need_dscores or args.need_dw2
    return 2 * (needs_g + args.need_dw2) * args.h[0] * prod(args.w2[1:])


# --- registration -----------------------------------------------------------------------------------------


def _install(module) -> None:
    for name, formula in FORMULAS.items():
        schema = Schema(name)
        module.flop_registry.pop(getattr(ops, name), None)  # of this file before a reload

        def by_name(*args, out_val=None, schema=schema, formula=formula, **kwargs):
            args, kwargs = tree_map_only(Tensor, shape_of, (args, kwargs))
            return formula(schema.named(*args, **kwargs))

        module.register_flop_formula(getattr(ops, name), get_raw=True)(by_name)


class _AtImport(MetaPathFinder):
    """Installs the formulas when the counter is imported. Importing it here would import Triton: 0.3 s."""

    NAME = "torch.utils.flop_counter"

    def find_spec(self, name, path, target=None):
        if name != self.NAME:
            return None
        # The finders behind this one: another copy of fused_moe has one, too.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            _install(module)

        spec.loader.exec_module = execute_and_install
        return spec


if _AtImport.NAME in sys.modules:
    _install(import_module(_AtImport.NAME))  # waits for a thread that is importing it
sys.meta_path.insert(0, _AtImport())
