"""Measures quantised expert weights: their errors, their time beside float weights, a trained model's loss.

    python benchmarks/bench_quantised.py --quality --time --json out.json
    python benchmarks/bench_quantised.py --quality --shape 1024,32,4,512,256 --dtype bf16 --format int4,mxfp4
    python benchmarks/bench_quantised.py --time --shape qwen3-30b --tokens 1,8,128
    python benchmarks/bench_quantised.py --backward --shape qwen3-30b --tokens 128,2048 --format int4,mxfp4
    python benchmarks/bench_quantised.py --model runs/NAME --json out.json

Without a flag that says what, --quality and --time are run. Every record has the format, its options, and the
bytes of w1, w2 and w3; the first of each group is that of the float weights. --compute says how a format is
multiplied: its values (codes), or its codes by 8-bit codes of x and of the hidden values (fp8, int8), with
factors between them and the weights (int8_smooth).

--quality (bench quantised_quality): weight_error is |quantised - w| / |w| over all three weights, |.| the
Frobenius norm. output_error is that of the experts' output, against the float weights in float64. So it
includes the rounding of the GEMMs, which is all that the float weights' record has. Weights and x are random,
in distributions that DATA describes. Factors of int8_smooth are made of the weights alone, or, calibrated, of
x as well: other tokens of the same distribution.

--time (bench quantised): fused_experts without gradients on one layer's weights. The runs of all formats and
of the float weights alternate. ratio_to_float is the float weights' time over the format's: above 1, the
format is faster. On a GPU calls are queued; the same weights are read by each call, so small layers stay in
the L2 cache. bench_decode.py --format reads weights from memory.

--backward (bench quantised, what backward): likewise, the gradient of x alone. Formats are there with
trainable weights, too, which on Hopper backward reads transposed.

--model (bench quantised_lm): what `examples/generate.py --evaluate` finds of a run of train_lm.py. loss is in
bits per byte of held-out text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn

FORMATS = ("fp8_block", "fp8", "int8", "int4", "mxfp4")
COMPUTE = ("codes", "fp8", "int8", "int8_smooth")
SHAPE = "1024,32,4,512,256"  # by default
QUALITY_TOKENS = 256
CHECKED_TOKENS = 16
CALIBRATED_TOP_K = 4  # experts of a token from which int8_smooth is calibrated
EIGHT_BIT_WIDTHS = 16  # of which GEMMs of 8-bit rows take multiples
ROUNDED_ACTIVATIONS_BOUND = 0.08  # peers.py has the reason

# Random values, as functions of a shape and a device; all are scaled to the same norm
VALUES = {
    "gaussian": lambda shape, device: torch.randn(shape, device=device),
    "student t": lambda shape, device: student_t(shape, device),
    "outliers": lambda shape, device: outlier_columns(shape, device),
}
# Weights and x
DATA = {
    "gaussian": ("gaussian", "gaussian"),
    "student t, 3 degrees": ("student t", "gaussian"),
    "outlier columns": ("outliers", "gaussian"),
    "x of student t": ("gaussian", "student t"),
    "x with outlier channels": ("gaussian", "outliers"),
    "both of student t": ("student t", "student t"),
}


class Variant(NamedTuple):
    """A format with its options, as `quantize` takes them."""

    format: str
    options: dict = {}
    calibrated: bool = False  # int8_smooth's factors, by x
    power_of_two: bool = False  # scales of x and of the hidden values

    @property
    def compute(self) -> str:
        return self.options.get("compute", "codes")

    @property
    def name(self) -> str:
        group, zero = self.options.get("group_size"), self.options.get("symmetric") is False
        parts = [self.format, f" of {group}" if group else "", ", zero points" if zero else ""]
        parts.append(" per tensor" if self.options.get("per_tensor") else "")
        parts.append("" if self.compute == "codes" else f", compute {self.compute}")
        parts.append(", powers of two" if self.power_of_two else "")
        parts.append(", calibrated" if self.calibrated else "")
        return "".join([*parts, ", trainable" if self.options.get("trainable") else ""])

    @property
    def bound(self) -> float | None:
        """The error of a right output; None where only 16-bit GEMMs round."""
        return None if self.compute == "codes" else ROUNDED_ACTIVATIONS_BOUND

    @property
    def trainable(self) -> Variant:
        return self._replace(options=self.options | {"trainable": True})

    def layer(self, weights: list[Tensor | None], x: Tensor | None = None) -> list:
        """w1, w2 and w3 quantised. x: (T, D), what a calibrated variant is calibrated by."""
        import fused_moe

        if self.compute != "int8_smooth":
            return [None if w is None else self.quantise(w) for w in weights]
        moe = layer_of(weights)
        smooth = fused_moe.smooth_from(moe, [x]) if self.calibrated else None
        fused_moe.quantize(moe, self.format, smooth=smooth, **self.options)
        return [moe.experts.w1, moe.experts.w2, moe.experts.w3]

    def quantise(self, w: Tensor):
        import fused_moe

        w = fused_moe.quantize(w, self.format, **self.options)
        return w.set_compute(self.compute, power_of_two=True) if self.power_of_two else w


FP8, INT8, SMOOTH = ({"compute": name} for name in COMPUTE[1:])
VARIANTS = (
    *(Variant("fp8_block", options) for options in ({}, FP8)),
    *(Variant("fp8", options) for options in ({}, {"per_tensor": True}, FP8)),
    *(Variant("int8", options) for options in ({}, {"per_tensor": True}, INT8, SMOOTH)),
    Variant("int8", SMOOTH, calibrated=True),
    *(Variant("int4", {"group_size": g, "symmetric": s}) for g in (128, 32) for s in (True, False)),
    Variant("mxfp4"),
)


def student_t(shape: tuple[int, ...], device: str) -> Tensor:
    """Heavy tails: among a million values some are a hundred times the usual."""
    return torch.distributions.StudentT(torch.tensor(3.0, device=device)).sample(shape)


def outlier_columns(shape: tuple[int, ...], device: str) -> Tensor:
    """Gaussian, with one column in a hundred, the same of every expert, times 20."""
    w, columns = torch.randn(shape, device=device), shape[-1]
    w[..., torch.randperm(columns)[: max(1, round(columns / 100))].to(device)] *= 20
    return w


# --- flags --------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.parser(__doc__)
    add = flags.add_argument
    add("--quality", action="store_true", help="errors of weights and outputs")
    add("--time", action="store_true", help="fused_experts, forward")
    add("--backward", action="store_true", help="the gradient of x through the frozen experts")
    add("--model", type=Path, metavar="FOLDER", help="of a run of examples/train_lm.py: the loss")
    few = [1, 8, 128, 1024]
    add("--tokens", type=counts, default=few, metavar="A,B,..", help="of the two; default: 1,8,128,1024")
    for flag, read, names in (("--format", formats, FORMATS), ("--compute", computes, COMPUTE)):
        add(flag, type=read, default=names, metavar="A,B,..", help=f"of {', '.join(names)}; default: all")
    options = flags.parse_args(argv)
    if not (options.quality or options.time or options.backward or options.model):
        options.quality = options.time = True
    return options


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of tokens, found {text}")
    return numbers


def formats(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(FORMATS)}, found {name}")
    return names


def computes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in COMPUTE:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(COMPUTE)}, found {name}")
    return names


def misfit(variant: Variant, sizes: common.Sizes) -> str | None:
    """Why the widths do not take the variant; None if they do."""
    from fused_moe.quantized.formats import width_multiple

    multiple = width_multiple(variant.format, variant.options.get("group_size"))
    if variant.compute != "codes":
        multiple = max(multiple, EIGHT_BIT_WIDTHS)
    if sizes.dim % multiple == 0 and sizes.hidden_dim % multiple == 0:
        return None
    return f"expected widths that are multiples of {multiple}, found D = {sizes.dim}, F = {sizes.hidden_dim}"


def usable(options: argparse.Namespace, sizes: common.Sizes, dtype: str) -> list[Variant]:
    """The variants of --format and --compute that the widths and the dtype take. Others are named."""
    found, too_wide = [], dtype == "fp32" and options.device == "cuda"
    for variant in (v for v in VARIANTS if v.format in options.format and v.compute in options.compute):
        reason = misfit(variant, sizes)
        if too_wide and variant.compute != "codes":
            reason = "expected 16-bit x on a GPU, found fp32"
        if reason:
            print(f"{variant.name} is left out: {reason}", flush=True)
        else:
            found.append(variant)
    return found


# --- weights ------------------------------------------------------------------------------------------


def random_values(kind: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Values of norm 1 each."""
    values = VALUES[kind](shape, device)
    return values / values.square().mean().sqrt()


def random_weights(kind: str, sizes: common.Sizes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """w1, w2, w3, of the norm that torch's initialisation gives: 1 / sqrt(in) per value."""
    _, E, _, D, hidden = sizes
    shapes = ((E, hidden, D), (E, D, hidden), (E, hidden, D))
    return [(random_values(kind, shape, device) * shape[2] ** -0.5).to(dtype) for shape in shapes]


def layer_of(weights: list[Tensor | None]):
    """A FusedMoE with these experts."""
    import fused_moe

    E, hidden, dim = weights[0].shape
    moe = fused_moe.FusedMoE(
        dim, hidden, E, min(E, CALIBRATED_TOP_K), gated=weights[2] is not None,
        device=weights[0].device, dtype=weights[0].dtype,
    )  # fmt: skip
    for name, w in zip(("w1", "w2", "w3"), weights, strict=True):
        if w is not None:
            setattr(moe.experts, name, nn.Parameter(w, requires_grad=False))
    return moe


def values_of(w: Tensor | None) -> Tensor | None:
    """What a weight stands for: a tensor itself."""
    if w is None or isinstance(w, Tensor):
        return w
    values = w.dequantize()
    return values if w.smooth is None else values / w.smooth.unsqueeze(1).to(values.dtype)


def storage(weights: list) -> dict:
    """Bytes, and bits per value with all scales and zero points."""
    size, values = sum(w.nbytes for w in weights), sum(w.shape.numel() for w in weights)
    return {"bytes": size, "bits_per_weight": round(8 * size / values, 3)}


def norm_error(found: list[Tensor], exact: list[Tensor]) -> float:
    error = sum((f.double() - e.double()).square().sum() for f, e in zip(found, exact, strict=True))
    return float((error / sum(e.double().square().sum() for e in exact)).sqrt())


def routed(sizes: common.Sizes, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    import fused_moe

    logits = common.routing_logits(options.routing, sizes, options.device)
    return fused_moe.route(logits, sizes.top_k, route_norm=True)


# --- measuring ----------------------------------------------------------------------------------------


def measure_quality(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    import fused_moe

    sizes = common.layer_sizes(shape)._replace(num_tokens=QUALITY_TOKENS)
    variants = usable(options, sizes, dtype)
    for what, (of_weights, of_x) in DATA.items():
        torch.manual_seed(0)
        weights = random_weights(of_weights, sizes, common.DTYPES[dtype], options.device)
        tokens = random_values(of_x, (2 * sizes.num_tokens, sizes.dim), options.device).to(weights[0].dtype)
        x, calibrated_by = tokens.chunk(2)
        scores, ids = routed(sizes, options)
        exact_weights = [w.double() for w in weights]
        exact = fused_moe.reference.fused_experts(x.double(), *exact_weights, scores.double(), ids)
        for variant in (None, *variants):
            used = weights if variant is None else variant.layer(weights, calibrated_by)
            values = [values_of(w) for w in used]
            out = fused_moe.fused_experts(x, *used, scores, ids)
            yield record(
                options, dtype, variant, used,
                bench="quantised_quality", shape=shape, what=what, tokens=sizes.num_tokens,
                weight_error=norm_error(values, exact_weights), output_error=norm_error([out], [exact]),
            )  # fmt: skip


def measure_time(
    shape: str, dtype: str, options: argparse.Namespace, what: str = "forward"
) -> Iterator[dict]:
    mode = "queued" if options.device == "cuda" else common.DEFAULT_MODE
    clock = common.clock(options.device, **common.MODES[mode])
    sizes = common.layer_sizes(shape)
    torch.manual_seed(0)
    weights = random_weights("gaussian", sizes, common.DTYPES[dtype], options.device)
    variants = {
        v.name: v for v in usable(options, sizes, dtype) if not v.calibrated
    }  # which takes no other time
    if what == "backward":  # which 8-bit rows do not have
        variants = {name: v for name, v in variants.items() if v.compute == "codes"}
        variants |= {v.trainable.name: v.trainable for v in list(variants.values())}
    layers = {None: weights} | {name: v.layer(weights) for name, v in variants.items()}
    for tokens in options.tokens:
        sizes = sizes._replace(num_tokens=tokens)
        flops = 6 * tokens * sizes.top_k * sizes.dim * sizes.hidden_dim
        x = torch.randn(tokens, sizes.dim, dtype=weights[0].dtype, device=options.device)
        routing = routed(sizes, options)
        dout = torch.randn_like(x) if what == "backward" else None
        runs = {name: run_of(layer, x, *routing, dout) for name, layer in layers.items()}
        errors = {
            name: checked_error(
                run,
                layers[name],
                (x, *routing),
                f"{shape}, {tokens} tokens {name}",
                dtype,
                dout,
                bound=variants[name].bound if name else None,
            )  # fmt: skip
            for name, run in runs.items()
        }
        seconds = common.times(clock, runs, options.repeats)
        for name, layer in layers.items():
            yield record(
                options, dtype, variants.get(name), layer,
                bench="quantised", shape=shape, what=what, tokens=tokens, mode=mode,
                time_us=round(seconds[name] * 1e6, 1),
                tflops=round(flops / seconds[name] / 1e12, 4), max_rel_error=errors[name],
                ratio_to_float=round(seconds[None] / seconds[name], 3),
            )  # fmt: skip


def run_of(layer: list, x: Tensor, scores: Tensor, ids: Tensor, dout: Tensor | None) -> Callable:
    """The experts' output as a call, or, given the output's gradient, that of x."""
    import fused_moe

    if dout is None:
        return partial(fused_moe.fused_experts, x, *layer, scores, ids)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = fused_moe.fused_experts(x, *layer, scores, ids)
    return lambda: torch.autograd.grad(out, x, dout, retain_graph=True)[0]


def checked_error(
    run: Callable, layer: list, routed_x: tuple, title: str, dtype: str, dout: Tensor | None = None,
    bound: float | None = None,
) -> float:  # fmt: skip
    """Against float64 with the values that the layer's weights stand for: a wrong result is not timed."""
    from fused_moe import reference

    x, scores, ids = (t[:CHECKED_TOKENS] for t in routed_x)
    x = x.double().requires_grad_(dout is not None)
    values = [values_of(w).double() for w in layer]
    with torch.set_grad_enabled(dout is not None):
        exact = reference.fused_experts(x, *values, scores.double(), ids)
    if dout is not None:
        (exact,) = torch.autograd.grad(exact, x, dout[:CHECKED_TOKENS].double())
    error = common.Error()
    error.add("out" if dout is None else "dx", run()[:CHECKED_TOKENS], exact)
    return error.check(title, dtype, bound)


def measure_model(options: argparse.Namespace) -> Iterator[dict]:
    """The records of examples/generate.py, with the machine."""
    sys.path.insert(0, str(common.HERE.parent / "examples"))
    import generate

    args, saved = generate.parse_args(["--run", str(options.model), "--evaluate", "--device", options.device])
    config = saved["config"]
    names = ("num_experts", "top_k", "dim", "hidden_dim")
    tokens = config["batch_size"] * config["seq_len"]
    shape = ",".join(str(size) for size in (tokens, *(config[name] for name in names)))
    dtype = {"float32": "fp32", "bfloat16": "bf16"}[args.dtype]
    about = {"bench": "quantised_lm", "shape": shape, "routing": "learned", "dtype": dtype}
    about |= {
        "what": "validation",
        "layers": config["layers"],
        "steps": saved[args.experts]["log"][-1]["step"],
    }
    for measured in generate.evaluate(saved, args):
        is_asked = (
            measured["format"] in options.format and measured.get("compute", "codes") in options.compute
        )
        if is_asked or measured["format"] == args.dtype:
            yield common.record(options, **about, layer=generate.format_name(measured), **measured)


def record(
    options: argparse.Namespace, dtype: str, variant: Variant | None, weights: list, **measured
) -> dict:
    """`layer`, which is part of a record's key, is the format with its options in words."""
    about = {"layer": dtype, "format": dtype} if variant is None else {"layer": variant.name}
    about |= {} if variant is None else {"format": variant.format, **variant.options}
    about |= {"routing": options.routing, "dtype": dtype}
    return common.record(options, **about, **storage(weights), **measured)


# --- tables -------------------------------------------------------------------------------------------


def cells(r: dict) -> dict[str, str]:
    """What a record adds to the row of its layer: headers and cells."""
    if r["bench"] == "quantised_quality":
        errors = f"{r['weight_error']:.2%} {r['output_error']:8.2%}"
        return {"bits": f"{r['bits_per_weight']:.2f}", f"{r['what']}: w, out": errors}
    if r["bench"] == "quantised":
        time = f"{r['time_us']:.0f} us {r['ratio_to_float']:6.2f}x"
        return {"MB": f"{r['bytes'] / 1e6:.1f}", f"{r['tokens']} tokens": time}
    change = f"{r['loss_change']:+.4f}"
    return {"bits per byte": f"{r['loss']:.4f}", "change": change, "bytes": f"{r['bytes']:,}"}


def print_table(records: list[dict]) -> None:
    """A row for each layer, of records that differ in nothing else."""
    rows: dict[str, dict[str, str]] = {}
    for r in records:
        rows.setdefault(r["layer"], {"": r["layer"]}).update(cells(r))
    if not rows:
        return
    first = records[0]
    what = f", {first['what']}" if first["bench"] == "quantised" else ""
    print(f"\n{first['bench']}{what}: {first['shape']}, {first['routing']}, {first['dtype']}")
    headers = list(next(iter(rows.values())))
    widths = [max(len(h), *(len(row[h]) for row in rows.values())) for h in headers]
    for row in (dict(zip(headers, headers, strict=True)), *rows.values()):
        parts = [row[h].rjust(width) for h, width in zip(headers, widths, strict=True)]
        print("  ".join([row[""].ljust(widths[0]), *parts[1:]]), flush=True)


def main(argv: list[str] | None = None) -> list[dict]:
    options = arguments(argv)
    options.shape = options.shape or [SHAPE]
    common.start(options)
    parts = [measure_quality] * options.quality + [measure_time] * options.time
    parts += [partial(measure_time, what="backward")] * options.backward
    every = [partial(part, s, d, options) for part in parts for s in options.shape for d in options.dtype]
    every += [partial(measure_model, options)] * bool(options.model)
    path, found = options.json, []
    old = json.loads(path.read_text()) if path and options.append and path.exists() else []
    for part in every:
        with torch.no_grad():
            new = list(part())
        print_table(new)
        found += new
        if path:  # after each part, so that a stopped run keeps its records
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(common.merge(old, found), indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
