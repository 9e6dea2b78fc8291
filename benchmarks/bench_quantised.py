"""Measures quantised expert weights: their errors, their time beside float weights, a trained model's loss.

    python benchmarks/bench_quantised.py --quality --time --json out.json
    python benchmarks/bench_quantised.py --quality --shape 1024,32,4,512,256 --dtype bf16 --format int4,mxfp4
    python benchmarks/bench_quantised.py --time --shape qwen3-30b --tokens 1,8,128
    python benchmarks/bench_quantised.py --backward --shape qwen3-30b --tokens 128,2048 --format int4,mxfp4
    python benchmarks/bench_quantised.py --model runs/NAME --json out.json

Without a flag that says what, --quality and --time are run. Every record has the format, its options, and the
bytes of w1, w2 and w3; the first of each group is that of the float weights.

--quality (bench quantised_quality): weight_error is |quantised - w| / |w| over all three weights, |.| the
Frobenius norm. output_error is that of the experts' output on Gaussian x, against the float weights in
float64. So it includes the rounding of the GEMMs, which is all that the float weights' record has.
The weights are random, in distributions that WEIGHTS describes.

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
from torch import Tensor

FORMATS = ("fp8_block", "fp8", "int8", "int4", "mxfp4")
SHAPE = "1024,32,4,512,256"  # by default
QUALITY_TOKENS = 256
CHECKED_TOKENS = 16

# Random weights, as functions of a shape (E, out, in) and a device. All are scaled to the same norm.
WEIGHTS = {
    "gaussian": lambda shape, device: torch.randn(shape, device=device),
    "student t, 3 degrees": lambda shape, device: student_t(shape, device),
    "outlier columns": lambda shape, device: outlier_columns(shape, device),
}


class Variant(NamedTuple):
    """A format with its options."""

    format: str
    options: dict = {}

    @property
    def name(self) -> str:
        group, zero = self.options.get("group_size"), self.options.get("symmetric") is False
        parts = [self.format, f" of {group}" if group else "", ", zero points" if zero else ""]
        parts.append(" per tensor" if self.options.get("per_tensor") else "")
        return "".join([*parts, ", trainable" if self.options.get("trainable") else ""])

    @property
    def trainable(self) -> Variant:
        return self._replace(options=self.options | {"trainable": True})

    def quantise(self, w: Tensor):
        import fused_moe

        return fused_moe.quantize(w, self.format, **self.options)


VARIANTS = (
    Variant("fp8_block"),
    *(Variant(name, options) for name in ("fp8", "int8") for options in ({}, {"per_tensor": True})),
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
    add("--tokens", type=counts, default=[1, 8, 128, 1024], help="of the two; default: 1,8,128,1024")
    add("--format", type=formats, default=FORMATS, help=f"of {', '.join(FORMATS)}; default: all")
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


def misfit(variant: Variant, sizes: common.Sizes) -> str | None:
    """Why the widths do not take the variant; None if they do."""
    from fused_moe.quantized.formats import width_multiple

    multiple = width_multiple(variant.format, variant.options.get("group_size"))
    if sizes.dim % multiple == 0 and sizes.hidden_dim % multiple == 0:
        return None
    return f"expected widths that are multiples of {multiple}, found D = {sizes.dim}, F = {sizes.hidden_dim}"


def usable(asked: list[str], sizes: common.Sizes) -> list[Variant]:
    """The variants of these formats that the widths take. Others are named."""
    found = []
    for variant in (v for v in VARIANTS if v.format in asked):
        reason = misfit(variant, sizes)
        if reason:
            print(f"{variant.name} is left out: {reason}", flush=True)
        else:
            found.append(variant)
    return found


# --- weights ------------------------------------------------------------------------------------------


def random_weights(kind: str, sizes: common.Sizes, dtype: torch.dtype, device: str) -> list[Tensor]:
    """w1, w2, w3, of the norm that torch's initialisation gives: 1 / sqrt(in) per value."""
    _, E, _, D, hidden = sizes
    shapes = ((E, hidden, D), (E, D, hidden), (E, hidden, D))
    weights = [WEIGHTS[kind](shape, device) for shape in shapes]
    return [(w / w.square().mean().mul(w.size(2)).sqrt()).to(dtype) for w in weights]


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
    variants = usable(options.format, sizes)
    for kind in WEIGHTS:
        torch.manual_seed(0)
        weights = random_weights(kind, sizes, common.DTYPES[dtype], options.device)
        x = torch.randn(sizes.num_tokens, sizes.dim, dtype=weights[0].dtype, device=options.device)
        scores, ids = routed(sizes, options)
        exact_weights = [w.double() for w in weights]
        exact = fused_moe.reference.fused_experts(x.double(), *exact_weights, scores.double(), ids)
        for variant in (None, *variants):
            used = weights if variant is None else [variant.quantise(w) for w in weights]
            values = weights if variant is None else [w.dequantize() for w in used]
            out = fused_moe.fused_experts(x, *used, scores, ids)
            yield record(
                options, dtype, variant, used,
                bench="quantised_quality", shape=shape, what=kind, tokens=sizes.num_tokens,
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
    variants = {v.name: v for v in usable(options.format, sizes)}
    if what == "backward":
        variants |= {v.trainable.name: v.trainable for v in list(variants.values())}
    layers = {None: weights} | {n: [v.quantise(w) for w in weights] for n, v in variants.items()}
    for tokens in options.tokens:
        sizes = sizes._replace(num_tokens=tokens)
        flops = 6 * tokens * sizes.top_k * sizes.dim * sizes.hidden_dim
        x = torch.randn(tokens, sizes.dim, dtype=weights[0].dtype, device=options.device)
        routing = routed(sizes, options)
        dout = torch.randn_like(x) if what == "backward" else None
        runs = {name: run_of(layer, x, *routing, dout) for name, layer in layers.items()}
        errors = {
            name: checked_error(
                run, layers[name], (x, *routing), f"{shape}, {tokens} tokens {name}", dtype, dout
            )
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
    run: Callable, layer: list, routed_x: tuple, title: str, dtype: str, dout: Tensor | None = None
) -> float:
    """Against float64 with the values that the layer's weights stand for: a wrong result is not timed."""
    from fused_moe import reference

    x, scores, ids = (t[:CHECKED_TOKENS] for t in routed_x)
    x = x.double().requires_grad_(dout is not None)
    values = [(w if isinstance(w, Tensor) else w.dequantize()).double() for w in layer]
    with torch.set_grad_enabled(dout is not None):
        exact = reference.fused_experts(x, *values, scores.double(), ids)
    if dout is not None:
        (exact,) = torch.autograd.grad(exact, x, dout[:CHECKED_TOKENS].double())
    error = common.Error()
    error.add("out" if dout is None else "dx", run()[:CHECKED_TOKENS], exact)
    return error.check(title, dtype)


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
        if measured["format"] in (args.dtype, *options.format):
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
