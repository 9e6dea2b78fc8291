"""Prints the tables of docs/evaluations.md, or renews the page: published figures beside our records.

    python benchmarks/evaluations.py
    python benchmarks/evaluations.py --page docs/evaluations.md [--check]

The records are those of bench_evaluations.py in results/evaluations_h200.json; those of torchtitan and of
serving are in files of their own. A figure without a record is "not measured yet". A published figure is from
another card and another baseline, so it is beside ours and in no ratio.
"""

from __future__ import annotations

from pathlib import Path

import common
from bench_evaluations import FEW_ORDERS, LAYER_TOKENS, LOCAL_TOKENS, MODES, ORDERS, SHARED_TOKENS
from scaling import filled, table

RESULTS = common.HERE / "results"
MEASURED = "evaluations_h200.json"
PEAK = 989  # TFLOP/s of an H100, an H200 and an H800: dense, 16 bits
MISSING = "not measured yet"

# What the systems published: the GPU is in the page's text.
LAYER_MS = {1: (1.02, 9.1), 32: (2.13, 4.9), 128: (2.27, 5.8), 512: (3.99, 6.5), 2048: (16.48, 4.0)}
LAYER_MS |= {4096: (32.31, 3.8)}  # of Mixtral by tokens, and over a loop
FUSED = {1: 1.40, 32: 1.18, 128: 1.16, 512: 1.27}  # of DeepSeek-V3, over unfused
STATIC = {"balanced": "84.8%, 94.7%", "best": "90.7%, 94.9% (larger sizes)", "one-each": "59.4%, 90.1%"}
TITAN_BATCHES = (1, 2, 4, 8)
SHOWN_TOKENS = (1, 8, 32, 128, 512)
STAGES = ("router_logits", "route_and_plan", "permute", "up_gate", "apart", "down", "combine")


def records(name: str) -> list[dict]:
    path = RESULTS / name
    return common.read(path) if path.exists() else []


def pick(found: list[dict], **fields) -> dict:
    """The first record with these fields, or an empty one."""
    return next((r for r in found if all(r.get(name) == value for name, value in fields.items())), {})


def number(r: dict, name: str, text: str = "{:.2f}") -> str:
    return MISSING if r.get(name) is None else text.format(r[name])


def times(r: dict, name: str) -> str:
    return number(r, name, "{:.2f}x")


def joined(found: list[dict], name: str, text: str = "{:.2f}") -> str:
    """The values of several records in one cell."""
    return ", ".join(text.format(r[name]) for r in found) if all(found) else MISSING


def counters(r: dict, text: str) -> str:
    """ncu's figures, or why there are none."""
    found = r.get("counters")
    if not isinstance(found, dict):
        return found or MISSING
    return text.format(**found, l2_million=found["l2_read_sectors"] / 1e6)


def gb_from_memory(r: dict) -> str:
    found = r.get("counters")
    return f"{found['dram_read_bytes'] / 1e9:.2f}" if isinstance(found, dict) else ""


# --- tables -------------------------------------------------------------------------------------------


def orders_table(found: list[dict]) -> str:
    own = [r for r in found if r["system"] == 1 and r["layer"] == "GEMM"]
    linear = pick(own, schedule="linear").get("time_us")
    rows = []
    named = {name: pick(own, schedule=name, tier="hopper") for name in ORDERS}
    named["default, a CTA per tile (sm80 tier)"] = pick(own, tier="portable")
    for name, r in named.items():
        over = f"{linear / r['time_us']:.2f}x" if linear and r else MISSING
        rows.append(
            [
                {"default": "default, groups of 16"}.get(name, name),
                number(r, "time_us", "{:.0f}"),
                over,
                number(r, "dense_ratio"),
                times(r, "torch_ratio"),
                times(r, "ratio_to_loop"),
                counters(r, "{l2_hits:.0f}%"),
                gb_from_memory(r),
            ]
        )
    header = "order | µs | over linear | of dense | over `_grouped_mm` | over a loop"
    return table(f"{header} | L2 hits | GB from memory", rows)


def training_table(found: list[dict]) -> str:
    gemm = pick(found, system=1, layer="GEMM", schedule="default", tier="hopper")
    whats = [pick(found, system=1, layer="layer", what=what) for what in ("forward", "forward_backward")]
    rows = [
        ["one grouped GEMM", "1.42x to 2.62x", times(gemm, "ratio_to_loop"), times(gemm, "torch_ratio"), ""],
        [
            "dsv2-lite's layer: forward, and with backward",
            "",
            joined(whats, "ratio_to_loop", "{:.2f}x"),
            joined(whats, "torch_ratio", "{:.2f}x"),
            "",
        ],
    ]
    titan = [r for r in records("torchtitan_h200.json") if ", batch" in r["shape"] and r["text"] == "made up"]
    runs = [{r["what"]: r for r in titan if r["local_batch_size"] == batch} for batch in TITAN_BATCHES]

    def over(peer: str, name: str, text: str) -> str:
        return ", ".join(text.format(r["fused_moe"][name] / r[peer][name]) for r in runs)

    rates = [over(peer, "tokens_per_second", "{:.2f}x") for peer in ("loop", "grouped_mm")]
    batches = ", ".join(map(str, TITAN_BATCHES))
    titles = f"torchtitan's tokens/s, batch {batches}", "more, and the loop's losses"
    rows.append([*titles, *rates, over("grouped_mm", "final_loss", "{:.4f}")])
    return table(
        "what | published, over a loop | ours, over a loop | over `_grouped_mm` | final loss over its", rows
    )


def few_table(found: list[dict]) -> str:
    own = [r for r in found if r["system"] == 2]
    rows = []
    for what in ("w1", "w2"):
        cells = []
        for tokens in SHOWN_TOKENS:
            every = [pick(own, dtype="fp16", what=what, tokens=tokens, schedule=o) for o in FEW_ORDERS]
            cells.append(joined(every, "floor_ratio"))
        rows.append([what, *cells])
    return table(f"GEMM, M | {' | '.join(map(str, SHOWN_TOKENS))}", rows)


def layer_table(found: list[dict]) -> str:
    rows = []
    for tokens in LAYER_TOKENS:
        mixtral, dsv3 = (
            pick(found, system=3, layer="layer", shape=model, tokens=tokens)
            for model in ("mixtral-8x7b", "deepseek-v3")
        )
        cells = [str(tokens), "{} ms, {}x".format(*LAYER_MS[tokens])]
        for model, r in enumerate((mixtral, dsv3)):
            if model:
                cells.append(f"{FUSED[tokens]:.2f}x" if tokens in FUSED else "")
            ms = f"{r['time_us'] / 1e3:.3g} ms, {r['ratio_to_loop']:.1f}x" if r else MISSING
            fused = f"{r['ratio_to_apart']:.2f}x, {r['ratio_to_halves']:.2f}x" if r else MISSING
            cells += [ms, number(r, "floor_ratio"), fused]
        rows.append([*cells, number(mixtral, "launches", "{:g}")])
    ours = "ours, over the loop | of the floor | over all apart, gate and up fused"
    header = f"T | Mixtral, published, over a loop | {ours} | DeepSeek-V3, published: fused over not"
    return table(f"{header} | {ours} | launches", rows)


def stage_table(found: list[dict]) -> str:
    rows = []
    for what in STAGES:
        cells = []
        for model in ("mixtral-8x7b", "deepseek-v3"):
            own = [r for r in found if r["system"] == 3 and r["layer"] == "stages" and r["what"] == what]
            r = next((r for r in own if model in (r["shape"], r.get("model"))), None)
            if r is None:
                cells += [MISSING] * 3
                continue
            gemm = r["bench"] == "decode_kernels"
            us = r["time_us"] if gemm else r["graph_us"] or r["time_us"]
            rate = r["gb_per_s"] if gemm else r["gb_per_s"] * r["time_us"] / us
            roof = r["floor_ratio"] if gemm else rate / r["copy_gb_per_s"]
            cells += [f"{us:.0f}", f"{rate:,.0f}", f"{roof:.2f}"]
        rows.append([what, *cells])
    header = "stage, T = 512 | mixtral: µs | GB/s | of its roof | deepseek-v3: µs | GB/s | of its roof"
    return table(header, rows)


def first_token_table() -> str:
    found: dict[str, list[dict]] = {}
    for r in records("vllm_h200.json"):
        if r["bench"] == "continuous_batching":
            found.setdefault(f"transformers, {r['shape']}, {r['layers']} layers", []).append(r)
        elif (r["what"], r.get("peer")) == ("fused_moe", "stock") and ", bf16, prompt 128" in r["shape"]:
            found.setdefault(f"vLLM, {r['model']}, {r['layers']} layers", []).append(r)
    rows = [
        [
            engine,
            ", ".join(str(r["tokens"]) for r in own),
            joined(own, "first_token_ms", "{:.1f}"),
            joined(own, "first_token_ratio", "{:.2f}x"),
        ]
        for engine, own in found.items()
    ]
    return table("engine and model | requests | ms to the first token | sooner than its own experts", rows)


def static_table(found: list[dict]) -> str:
    rows = []
    for case, published in STATIC.items():
        cells = []
        for layer in ("GEMM", "gather"):
            r = pick(found, system=4, layer=layer, routing=case)
            text = MISSING
            if r:
                text = f"{r['tflops'] / PEAK:.1%}, {r['dense_ratio']:.2f}, {r['torch_ratio']:.2f}x"
            cells.append(text)
        routing = {"best": "worst"}.get(case, case)
        for what in ("forward", "forward_backward"):
            r = pick(found, system=4, layer="layer", routing=routing, what=what)
            cells.append(f"{r['tflops'] / PEAK:.1%}, {r['dense_ratio']:.2f}" if r else MISSING)
        rows.append([{"one-each": "worst"}.get(case, case), published, *cells])
    header = "case | published: H800, H20 | GEMM: of 989, of dense, over `_grouped_mm` | with the gather"
    return table(f"{header} | layer, forward: of 989, of dense | forward + backward", rows)


def expert_order_table(found: list[dict]) -> str:
    own = [r for r in found if r["system"] == 4 and r["layer"] == "order of experts"]
    made = own[0]["models_us"] if own else {}
    ours = "apart" if "apart" in made else "interleaved"  # in records of earlier kernels
    measured = {ours: pick(own, schedule="default"), "in turn": pick(own, schedule="experts=in-turn")}
    texts = {
        "apart": "ours: idle experts have SMs of their own",
        "interleaved": "ours: idle experts' tiles spread evenly over busy ones'",
        "in turn": "busy experts, then idle ones",
        "alternating": "alternating: the busiest, the idlest, the next busiest",
        "half intervals": "at half intervals",
    }
    rows = []
    for name in (ours, "in turn", "alternating", "half intervals"):
        r = measured.get(name)
        cells = (
            ["no such kernel"] * 2
            if r is None
            else [number(r, "time_us", "{:.0f}"), number(r, "dense_ratio")]
        )
        rows.append([texts[name], *cells, f"{made[name]:.0f}" if name in made else MISSING])
    return table("order of experts, worst case | µs | of dense | µs by the model", rows)


def shared_table(found: list[dict]) -> str:
    rows = []
    for tokens in SHARED_TOKENS:
        r = pick(found, system=4, layer="shared expert", tokens=tokens)
        apart = f"{r['time_us'] * r['ratio_to_apart'] / 1e3:.3g}" if r else MISSING
        joined = f"{r['time_us'] / 1e3:.3g}" if r else MISSING
        ratio = number(r, "ratio_to_apart", "{:.3f}x")
        rows.append(
            [str(tokens), apart, joined, ratio, number(r, "dense_ratio"), r.get("apart_bits", MISSING)]
        )
    return table("T | apart: ms | joined: ms | over apart | joined, of dense | bits of both", rows)


def mode_table(found: list[dict]) -> str:
    own = [r for r in found if r["system"] == 5]
    formats = ("int8", "int8, compute int8", "int8, compute int8_smooth", "fp8", "fp8, compute fp8")
    rows = []
    for mode, flags in MODES:
        of_mode = [r for r in own if r["layer"] == mode]
        r, cells = pick(of_mode, what="experts"), []
        for what in formats:
            cells.append(times(pick(of_mode, what=what), "ratio_to_bf16") if "int8" in flags else "")
        times_us = number(r, "time_us", "{:.0f}")
        rows.append([mode, times_us, number(r, "floor_ratio"), times(r, "torch_ratio"), *cells])
    for tokens in map(int, LOCAL_TOKENS.split(",")):
        r = pick(own, local_tokens=tokens)
        text = f"{tokens} own tokens of 128 (alone: {number(r, 'ratio_to_own')} of the time)"
        rows.append([text, number(r, "time_us", "{:.0f}"), *[""] * (2 + len(formats))])
    header = "mode | bf16: µs | of the floor | over `_grouped_mm` | int8 weights, over bf16 | int8"
    return table(f"{header} | int8, smooth | fp8 weights | fp8", rows)


def tables() -> dict[str, str]:
    found = records(MEASURED)
    return {
        "orders": orders_table(found),
        "training": training_table(found),
        "few": few_table(found),
        "layers": layer_table(found),
        "stages": stage_table(found),
        "first": first_token_table(),
        "static": static_table(found),
        "experts": expert_order_table(found),
        "shared": shared_table(found),
        "modes": mode_table(found),
    }


def main(argv: list[str] | None = None) -> None:
    flags = common.new_parser(__doc__)
    flags.add_argument("--page", type=Path, metavar="FILE", help="replace the tables below its marks")
    flags.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = flags.parse_args(argv)
    texts = tables()
    if not options.page:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in texts.items()))
        return
    old = options.page.read_text()
    new = filled(old, texts, "evaluations")
    if options.check and new != old:
        raise SystemExit(
            f"{options.page} is out of date: python benchmarks/evaluations.py --page {options.page}"
        )
    if not options.check:
        options.page.write_text(new)


if __name__ == "__main__":
    main()
