"""Prints records as Markdown tables, one per machine, benchmark and dtype, or renews a page's.

python benchmarks/table.py benchmarks/results/*.json
python benchmarks/table.py --page docs/performance.md [--check]
python benchmarks/table.py --gains RECORDS...
python benchmarks/table.py --profile RECORDS...

A layer that one run timed in both modes has one row: queued, with its single calls in a separate column.
Records of bench_torchtitan.py have a row for each model, local batch and variant. Those of bench_vllm.py and
bench_continuous_batching.py have a row for each number of requests: fused_moe against the engine's experts.
The page's tables are those of PAGE, of the committed records.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import common
from common import (
    DEFAULT_MODE,
    DEFAULT_SCHEDULE,
    PEERS,
    SHAPES,
    eager_beside_queued,
    layer_sizes,
    mode_of,
    schedule_of,
)
from profiling import ORDER
from tabulate import tabulate

# What the caption says if all records of a table share it, and a column otherwise
SAID_ONCE = {"tier": lambda r: r["tier"], "mode": mode_of, "dtype": lambda r: r["dtype"]}
UNSAID = ("cpu", DEFAULT_MODE)
RESULTS = common.HERE / "results"
PLACE = re.compile(r"(<!-- performance: (\w+) -->\n).*?(<!-- performance: end -->)", re.DOTALL)
NAMES = {"fused_moe": "fused_moe", "grouped_mm": "`_grouped_mm`"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", nargs="*", type=Path, help="records that the programs wrote with --json")
    flags.add_argument("--gains", action="store_true", help="compare schedules with the default one")
    flags.add_argument("--profile", action="store_true", help="GPU time by kernel, and power")
    flags.add_argument("--page", type=Path, help="renew the tables of PAGE in it")
    flags.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = flags.parse_args(argv)
    if options.check and not options.page:
        flags.error("--check needs --page")
    if bool(options.files) == bool(options.page):
        flags.error("expected either records or --page")
    return options


def machine(r: dict) -> tuple:
    """What the caption says of a machine. The host of a GPU is left out."""
    names = ("cpu", "threads", "torch") if r["gpu"] == "none" else ("gpu", "torch")
    return tuple(r[name] for name in names)


def groups(records: list[dict]) -> list[list[dict]]:
    """Records by benchmark, machine and, of layers on a GPU, dtype, in order of first appearance."""
    found: dict[tuple, list[dict]] = {}
    for r in records:
        dtype = r["dtype"] if r["bench"] == "layer" and r["gpu"] != "none" else None
        found.setdefault((r["bench"], *machine(r), dtype), []).append(r)
    return list(found.values())


def caption(records: list[dict]) -> str:
    first = records[0]
    if first["gpu"] == "none":
        cpu = first["cpu"].replace("(R)", "").replace("(TM)", "")
        text = f"{first['threads']} threads on {cpu}, PyTorch {first['torch']}"
    else:
        text = f"{first['gpu']}, PyTorch {first['torch']}"
    text = ", ".join([text, *(value for value in shared(records).values() if value not in UNSAID)])
    days = sorted({r["date"] for r in records})
    about = dict.fromkeys(r[name] for r in records for name in r if name.startswith("about_"))
    return " ".join(
        [f"{text}, {' to '.join(dict.fromkeys((days[0], days[-1])))}.", *(f"{a}." for a in about)]
    )


def shared(records: list[dict]) -> dict[str, str]:
    """The entries of SAID_ONCE that have a single value."""
    found = {name: {value_of(r) for r in records} for name, value_of in SAID_ONCE.items()}
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def sizes(r: dict) -> str:
    if r["bench"] == "linear":
        return str(r["tokens"])
    gemm = SHAPES["gemms"].get(r["shape"])
    values = [gemm[name] for name in ("num_rows", "num_experts", "k", "n")] if gemm else None
    if not values and r["shape"].count(",") != 3:
        values = layer_sizes(r["shape"])
        values = (r.get("tokens") or values[0], *values[1:])
    return ", ".join(map(str, values)) if values else r["shape"].replace(",", ", ")


def number(name: str, text: str = "{:.2f}") -> Callable[[dict], str | None]:
    return lambda r: None if r.get(name) is None else text.format(r[name])


def versus(peer: str) -> Callable[[dict], str | None]:
    """A peer's ratio. Older records have it only for the fastest peer."""

    def cell(r: dict) -> str | None:
        best = r["peer_ratio"] if r["peer"] == peer else None
        value = r.get(f"ratio_to_{peer}", best)
        return None if value is None else f"{value:.2f}x"

    return cell


def eager(r: dict) -> str | None:
    """Our single call, and the peers' over it."""
    single = r.get("eager")
    if not single:
        return None
    ratios = {PEERS[name]: single.get(f"ratio_to_{name}") for name in ("sonicmoe", "scattermoe")}
    ratios["PyTorch"] = single["torch_ratio"]
    parts = [f"{value:.2f}x {name}" for name, value in ratios.items() if value is not None]
    return ", ".join([f"{single['time_us']:.0f} µs", *parts])


def columns(records: list[dict]) -> dict[str, Callable[[dict], str | None]]:
    """Headers and cells. Empty columns are left out."""
    on_gpu = records[0]["gpu"] != "none"
    others = {r["peer"] for r in records} | {name.removeprefix("ratio_to_") for r in records for name in r}
    peers = [name for name in PEERS if name in others and name != "torch"]  # torch has its own column
    usual_routing = all(r["routing"] == "random" for r in records)
    usual_schedule = all(schedule_of(r) == DEFAULT_SCHEDULE for r in records)
    said = shared(records)
    unlike = {name: (lambda r: None) if name in said else value_of for name, value_of in SAID_ONCE.items()}
    known: dict[str, Callable[[dict], str | None]] = {
        "shape": lambda r: None if "," in r["shape"] else r["shape"],
        {"gemm": "T, E, K, D, F or R, E, k, n", "linear": "tokens"}.get(
            records[0]["bench"], "T, E, K, D, F"
        ): sizes,
        "routing": lambda r: None if usual_routing else r["routing"],
        "tier": unlike["tier"],
        "mode": unlike["mode"],
        "schedule": lambda r: None if usual_schedule else schedule_of(r).replace(",", ", "),
        "dtype": unlike["dtype"],
        "what": lambda r: {"forward_backward": "forward + backward"}.get(r["what"], r["what"]),
        "µs": number("time_us", "{:.0f}") if on_gpu else lambda r: None,
        "TFLOP/s": number("tflops", "{:.0f}") if on_gpu else lambda r: None,
        "of the floor": number("floor_ratio"),
        "launches": number("launches", "{:g}"),
        "µs of the host": number("host_us", "{:.0f}"),
        "GB/s": number("gb_per_s", "{:.0f}"),
        "µs over a later call": number("over_later_us", "{:.0f}"),
        "MiB kept": number("activation_mib", "{:.0f}"),
        "MiB at the peak": number("peak_mib", "{:.0f}"),
        "MiB at SonicMoE's peak": number("peak_mib_sonicmoe", "{:.0f}"),
        "MiB of copies": number("copies_mib", "{:.0f}"),
        "J per step": number("joules"),
        **{f"against {PEERS[name]}": versus(name) for name in peers},
        "against PyTorch": number("torch_ratio", "{:.2f}x"),
        "against bf16": number("ratio_to_bf16", "{:.2f}x"),
        "against dense": number("dense_ratio"),
        "against a copy": number("copy_ratio"),
        "eager, one layer": eager,
    }
    return {header: cell for header, cell in known.items() if any(cell(r) for r in records)}


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def training(records: list[dict]) -> str:
    """torchtitan's runs, with fused_moe's speed and final loss over those of the same run."""

    def run(r: dict) -> tuple:
        return tuple(r[name] for name in ("shape", "local_batch_size", "commit", "date"))

    ours = {run(r): r for r in records if r["what"] == "fused_moe" and "failed" not in r}

    def over(r: dict, name: str, text: str) -> str | None:
        mine = ours.get(run(r), r)
        return None if mine is r or "failed" in r else text.format(mine[name] / r[name])

    def loss_over(r: dict) -> str | None:  # the learning rate follows the number of steps
        return over(r, "final_loss", "{:.4f}") if r["steps"] == ours.get(run(r), r)["steps"] else None

    cells: dict[str, Callable[[dict], str | None]] = {
        "model": lambda r: r["shape"].removesuffix(f", batch {r['local_batch_size']}"),
        "local batch": lambda r: str(r["local_batch_size"]),
        "layer": lambda r: r["what"],
        "steps": lambda r: str(r["steps"]),
        "tokens/s per GPU": lambda r: r.get("failed") or f"{r['tokens_per_second']:,}",
        "fused_moe's over it": lambda r: over(r, "tokens_per_second", "{:.2f}x"),
        "MiB at the peak": number("peak_mib", "{:,}"),
        "final loss": number("final_loss", "{:.4f}"),
        "fused_moe's loss over it": loss_over,
    }
    in_order = sorted(records, key=lambda r: r["local_batch_size"])
    models = dict.fromkeys(cells["model"](r) for r in records)
    rows = [
        [cell(r) or "" for cell in cells.values()] for m in models for r in in_order if cells["model"](r) == m
    ]
    return markdown(list(cells), rows)


def serving(records: list[dict]) -> str:
    """Engines with our experts against those with their own, of the same run."""
    rows = []
    for r in records:
        if r["bench"] == "continuous_batching":
            graphs = ", CUDA graphs" if r["mode"] == "graphs" else ""
            theirs = {name: r[f"{name}_default"] for name in ("first_token_ms", "tokens_per_s")}
            model = f"{r['shape']}, {r['layers']} layers, {r['dtype']}, prompts up to {r['prompt']}{graphs}"
            rows.append([model, r["default_experts"], *against(r, theirs), None, None, None])
        elif r.get("peer"):
            same = ("shape", "batch", "commit", "date")
            theirs = next(p for p in records if p["what"] == r["peer"] and all(p[n] == r[n] for n in same))
            modes = {"invariant": ", batch-invariant", "codes": ", 16-bit activations"}
            mode = modes.get(r["what"].split("_")[-1], "")
            tuned = ", tuned tiles" if theirs.get("tiles") else ""
            experts = ", ".join(name.removesuffix(" MoE backend") for name in theirs["backends"]) + tuned
            bits = " against ".join("yes" if each["same_bits"] else "no" for each in (r, theirs))
            gpu = [f"{r[n]:.2f}x" if r.get(n) else None for n in ("gpu_first_token_ratio", "gpu_step_ratio")]
            rows.append([r["shape"] + mode, experts, *against(r, theirs), *gpu, bits])
        elif r.get("failed"):
            rows.append([f"{r['shape']}, {r['what']}", None, str(r["batch"]), *["failed"] * 2, *[None] * 5])
    headers = ["model", "its own experts", "requests", "first token, ms", "faster by", "tokens/s", "more by"]
    headers += ["first token on the GPU", "decode step on the GPU"]
    headers.append("same bits alone and among others")
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    return markdown([headers[i] for i in used], [[row[i] or "" for i in used] for row in rows])


def against(ours: dict, theirs: dict) -> list[str]:
    """Cells: requests, first token and its ratio, tokens/s and their ratio."""
    cells = [str(ours["tokens"])]
    for name, text, ratio in (
        ("first_token_ms", "{:.1f}", "first_token_ratio"),
        ("tokens_per_s", "{:,.0f}", "peer_ratio"),
    ):
        cells += [f"{text} against {text}".format(ours[name], theirs[name]), f"{ours[ratio]:.2f}x"]
    return cells


def tables(records: list[dict]) -> str:
    parts = []
    timed = [
        r for r in records if r["bench"] != "profile" and r["shape"]
    ]  # not runs of examples or of fuzzing
    for group in groups(eager_beside_queued(timed)):
        parts.append(caption(group))
        if group[0]["bench"] == "torchtitan":
            parts.append(training(group))
            continue
        if group[0]["bench"] in ("vllm", "continuous_batching"):
            parts.append(serving(group))
            continue
        cells = columns(group)
        parts.append(markdown(list(cells), [[cell(r) or "" for cell in cells.values()] for r in group]))
    return "\n\n".join(parts)


def gains(records: list[dict]) -> str:
    """The speed of each schedule over the default one: one line per GEMM, one column per schedule.

    Schedules are measured one after the other, so their times are not comparable. Each one's ratio to the
    dense GEMM that was timed in the same run is.
    """
    parts = []
    for group in groups(records):
        found: dict[tuple, dict[str, float]] = {}
        for r in group:
            if r["dense_ratio"]:
                key = (r["shape"], r["routing"], r["dtype"], r["what"], r["tier"], r["cpu"], r["threads"])
                line = found.setdefault(key, {})
                line[schedule_of(r)] = r["dense_ratio"]
        lines = {key: line for key, line in found.items() if DEFAULT_SCHEDULE in line and len(line) > 1}
        if not lines:
            continue
        names = list(dict.fromkeys(name for line in lines.values() for name in line))
        names.remove(DEFAULT_SCHEDULE)
        rows = []
        for (shape, routing, dtype, what, *_), line in lines.items():
            usual = line[DEFAULT_SCHEDULE]
            cells = [f"{line[name] / usual:.2f}x" if name in line else "" for name in names]
            rows.append([shape.replace(",", ", "), routing, dtype, what, f"{usual:.2f}", *cells])
        first = ["shape", "routing", "dtype", "what", "default against dense"]
        headers = first + [name.replace(",", ", ") for name in names]
        parts += [caption(group), markdown(headers, rows)]
    return "\n\n".join(parts) or "no GEMM was measured on the default schedule and on another"


def profile(records: list[dict]) -> str:
    """Two tables per machine: the kernels of a step beside floors and peers, and each layer's power."""
    parts = []
    for group in groups([r for r in records if r["bench"] == "profile"]):
        steps = [r for r in group if r["what"] == "step"]
        names = dict.fromkeys(r["layer"] for r in group)
        peers = [name for name in names if name not in ("ours", "dense")]
        own, rows = ("shape", "routing", "dtype"), []
        for key in dict.fromkeys(tuple(r[name] for name in own) for r in group):
            found = {(r["layer"], r["what"]): r for r in group if tuple(r[name] for name in own) == key}
            for what in (*ORDER, "step"):
                every = [found.get((name, what), {}) for name in ("ours", *peers)]
                if not any(every):
                    continue
                us, floor = (
                    every[0].get("time_us"),
                    next((r["floor_us"] for r in every if "floor_us" in r), None),
                )
                reached = [f"{us - floor:.0f}", f"{floor / us:.2f}"] if us and floor else ["", ""]
                times = [f"{r['time_us']:.0f}" if r else "" for r in every]
                launches = f"{every[0]['launches']:g}" if us else ""
                floor_us = "" if floor is None else f"{floor:.0f}"
                rows.append([key[0], what, launches, times[0], floor_us, *reached, *times[1:]])
        headers = ["shape", "kernel", "launches", "µs", "floor", "gap", "floor / µs"]
        parts += [caption(group), markdown(headers + [f"{PEERS[name]}, µs" for name in peers], rows)]
        cells = {
            "shape": lambda r: r["shape"],
            "layer": lambda r: PEERS.get(r["layer"], r["layer"]),
            "µs of kernels": number("time_us", "{:.0f}"),
            "W": number("watts", "{:.0f}"),
            "SM MHz": number("sm_mhz", "{:.0f}"),
            "J per step": number("joules"),
        }
        parts.append(markdown(list(cells), [[cell(r) or "" for cell in cells.values()] for r in steps]))
    return "\n\n".join(parts) or "no step was profiled"


# --- docs/performance.md ------------------------------------------------------------------------------


def source(records: list[dict], name: str) -> str:
    """The card, the commits and the days of a table, linked to the file."""
    r = records[0]
    cards = {"none": f"{r['threads']} threads, {r['cpu']}"}
    commits = " and ".join(dict.fromkeys(f"{r['commit']} of {r['date']}" for r in records))
    return (
        f"[{cards.get(r['gpu'], r['gpu'])}](../benchmarks/results/{name}), {commits}, PyTorch {r['torch']}."
    )


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(records: list[dict], name: str, headers: str, rows: list[list[str]]) -> str:
    titles = headers.split(" | ")
    return "\n".join([source(records, name), "", row(titles), row(["---"] * len(titles)), *map(row, rows)])


def ratio(r: dict, name: str) -> str:
    return "" if r.get(name) is None else f"{r[name]:.2f}x"


def by_shape(records: list[dict]) -> dict[tuple, dict[str, dict]]:
    """Records of a layer or of experts, by shape and dtype, then by what was timed."""
    found: dict[tuple, dict[str, dict]] = {}
    for r in records:
        found.setdefault((r["shape"], r["dtype"]), {})[r["what"]] = r
    return found


def page_layers() -> str:
    """Where SonicMoE was timed in several runs of its own, the column has the lowest of its ratios there."""
    name, several = "layer_h200.json", "sonicmoe_h200.json"
    records = [r for r in common.read(RESULTS / name) if mode_of(r) == "queued"]
    lowest, beside = {}, records
    if (RESULTS / several).exists():
        beside = sorted(common.read(RESULTS / several), key=lambda r: -r["ratio_to_sonicmoe"])
    for r in beside:
        lowest[r["shape"], r["what"]] = ratio(r, "ratio_to_sonicmoe")
    about = f"{beside[0]['about_sonicmoe']}."
    if beside is not records:
        about += f" The lowest of its ratios in each shape's runs: {source(beside, several)}"
    rows = []
    for (shape, _), whats in by_shape(records).items():
        forward, both = whats["forward"], whats["forward_backward"]
        rows.append([shape, sizes(both), f"{forward['time_us'] / 1e3:.2f}, {both['time_us'] / 1e3:.2f}"])
        rows[-1].append(f"{ratio(forward, 'torch_ratio')}, {ratio(both, 'torch_ratio')}")
        rows[-1].append(", ".join(lowest[shape, what] for what in whats if (shape, what) in lowest))
        rows[-1].append(f"{forward['dense_ratio']:.2f}, {both['dense_ratio']:.2f}")
        for memory in ("activation_mib", "peak_mib"):
            rows[-1].append(", ".join(f"{both[memory + peer]:,.0f}" for peer in ("", "_torch", "_sonicmoe")))
    headers = "layer | T, E, K, D, F | ms | over `_grouped_mm` | over SonicMoE | of dense"
    text = plain(records, name, f"{headers} | MiB kept | MiB at the peak", rows)
    return text.replace("\n\n", f" {about}\n\n", 1)


def page_models() -> str:
    name = "models_h100.json"
    records = [r for r in common.read(RESULTS / name) if r["bench"] == "layer"]
    rows = []
    for (shape, _), whats in by_shape(records).items():
        forward, both = whats["forward"], whats["forward_backward"]
        rows.append([shape, sizes(both), f"{forward['time_us'] / 1e3:.2f}, {both['time_us'] / 1e3:.2f}"])
        rows[-1] += [f"{ratio(forward, 'torch_ratio')}, {ratio(both, 'torch_ratio')}"]
        rows[-1] += [f"{forward[n]:.2f}, {both[n]:.2f}" for n in ("dense_ratio", "floor_ratio")]
    headers = "layer | T, E, K, D, F | ms | over `_grouped_mm` | of dense | of the floor"
    return plain(records, name, headers, rows)


def page_decode() -> str:
    name, tokens = "decode_h200.json", (1, 8, 32, 128, 512, 2048)
    records = common.read(RESULTS / name)
    parts = {
        "µs": lambda r: f"{r['time_us']:.0f}",
        "of the floor": lambda r: f"{r['floor_ratio']:.2f}",
        "over vLLM's tuned kernel": lambda r: ratio(r, "ratio_to_vllm"),
        "over its batch-invariant one": lambda r: ratio(r, "ratio_to_vllm_invariant"),
        "over `_grouped_mm`": lambda r: ratio(r, "torch_ratio"),
    }
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        own, fp16 = (
            {r["tokens"]: r for r in records if (r["shape"], r["dtype"]) == (shape, dtype)}
            for dtype in ("bf16", "fp16")
        )
        rows += [[f"{shape}: {part}", *(cell(own[t]) for t in tokens)] for part, cell in parts.items()]
        rows.append([f"{shape}: of the floor in fp16", *(parts["of the floor"](fp16[t]) for t in tokens)])
    return plain(records, name, f"experts, tokens | {' | '.join(map(str, tokens))}", rows)


def page_engine() -> str:
    name, requests = "vllm_h200.json", (1, 8, 32, 128)
    records = [r for r in common.read(RESULTS / name) if r["bench"] == "vllm" and r["commit"] == "c34cc48"]
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        found = {(r["what"], r["tokens"]): r for r in records if r["shape"] == shape and r.get("peer")}
        usual = [found["fused_moe", n] for n in requests]
        rows.append([shape, *(ratio(found["fused_moe_invariant", n], "peer_ratio") for n in requests)])
        for part in ("gpu_first_token_ratio", "gpu_step_ratio", "peer_ratio"):
            values = [r[part] for r in usual]
            rows[-1].append(f"{min(values):.2f}x to {max(values):.2f}x")
    counts = " | ".join(map(str, requests))
    headers = f"engine; batch-invariant, requests | {counts} | usual: first token | decode step | tokens/s"
    return plain(records, name, headers, rows)


def page_quantised() -> str:
    return "\n\n".join(quantised(f"quantised_{card}.json") for card in ("h200", "h100"))


def quantised(name: str) -> str:
    tokens = (1, 8, 32, 128, 512, 2048)
    peers = {"Marlin": "ratio_to_marlin", "Humming": "ratio_to_humming"}
    records = [r for r in common.read(RESULTS / name) if r["bench"] == "decode_quantised"]
    peers = {peer: field for peer, field in peers.items() if any(r.get(field) for r in records)}
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        for what in dict.fromkeys(r["what"] for r in records):
            every = [r for r in records if (r["shape"], r["what"]) == (shape, what)]
            own = {r["tokens"]: r for r in every if r["commit"] == records[0]["commit"]}
            cells = [ratio(own.get(t, {}), "ratio_to_bf16") for t in tokens]
            for field in peers.values():
                found = [r[field] for r in every if r.get(field) and r["tokens"] <= 128]
                span = f"{min(found):.2f}x to {max(found):.2f}x" if found else ""
                cells.append(f"{statistics.geometric_mean(found):.2f}x ({span})" if found else "")
            rows.append([f"{shape}, {what}", *cells])
    headers = f"experts, tokens | {' | '.join(map(str, tokens))} | "
    return plain(records, name, headers + " | ".join(f"over {peer}" for peer in peers), rows)


def page_eight_bits() -> str:
    name = "eight_bits_h200.json"
    every = [r for r in common.read(RESULTS / name) if r["bench"] == "eight_bits"]
    records = [r for r in every if "," not in r["shape"]]
    whats = ("fp8_block", "fp8_block, compute fp8", "fp8, compute fp8", "int8, compute int8")
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        own: dict[str, dict] = {}
        for r in records:
            if r["shape"] == shape:
                own[r["what"]] = own.get(r["what"], r)  # the first of two runs
        cells = [ratio(own[what], "ratio_to_bf16") for what in (*whats, "int8, compute int8_smooth")]
        rows.append([shape, f"{own['experts']['tokens']:,}", *cells])
    headers = "experts | tokens | fp8_block weights | fp8_block both | fp8 both | int8 both | int8, smooth"
    return plain(records, name, headers, rows)


def page_fp8() -> str:
    name = "fp8_training_h200.json"
    records = common.read(RESULTS / name)
    rows = []
    for shape in dict.fromkeys(r["shape"] for r in records):
        own = [r for r in records if r["shape"] == shape]
        first = {r["what"]: r for r in own if r["commit"] == records[0]["commit"]}
        sonic = next((r for r in own if r["what"] == "fp8" and r.get("ratio_to_sonicmoe")), {})
        rows.append([shape, f"{first['experts']['time_us'] / 1e3:.2f}, {first['fp8']['time_us'] / 1e3:.2f}"])
        rows[-1] += [ratio(first[what], "ratio_to_bf16") for what in ("fp8", "fp8, every 8th")]
        rows[-1] += [ratio(sonic, "ratio_to_sonicmoe")]
        for memory in ("activation_mib", "peak_mib"):
            rows[-1].append(", ".join(f"{first[what][memory]:,.0f}" for what in ("experts", "fp8")))
    headers = (
        "experts | ms, bf16 and FP8 | FP8 over bf16 | quantised every 8th step | FP8 over SonicMoE in bf16"
    )
    return plain(records, name, f"{headers} | MiB kept, bf16 and FP8 | MiB at the peak", rows)


def page_linear() -> str:
    name, tokens = "linear_h200.json", (1, 8, 64, 512, 2048, 4096, 8192, 16384)
    records = common.read(RESULTS / name)
    rows = []
    for what in ("forward", "forward_backward"):
        for shape in dict.fromkeys(r["shape"] for r in records):
            own = {r["tokens"]: r for r in records if (r["shape"], r["what"]) == (shape, what)}
            cells = [ratio(own.get(t, {}), "dense_ratio") for t in tokens]
            rows.append([f"{shape}, {what.replace('_', ' + ')}", *cells])
    return plain(records, name, f"weight, tokens | {' | '.join(map(str, tokens))}", rows)


def page_gpus() -> str:
    name = "torchtitan_h200.json"
    every = common.read(RESULTS / name)
    records = [r for r in every if r["what"] in NAMES and r["shape"].startswith("16B6") and r["steps"] < 200]
    runs: dict[tuple, dict[str, dict]] = {}
    for r in records:
        runs.setdefault((r["shape"], r["local_batch_size"], r["commit"]), {})[r["what"]] = r
    rows = []
    for (shape, batch, _), found in sorted(runs.items(), key=lambda item: (item[0][0], item[0][1])):
        ours, theirs = (found[what] for what in ("fused_moe", "grouped_mm"))
        rows.append([shape.removesuffix(f", batch {batch}"), str(batch)])
        rows[-1] += [f"{ours['tokens_per_second']:,}, {theirs['tokens_per_second']:,}"]
        rows[-1] += [f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"]
        rows[-1] += [f"{ours['peak_mib']:,}, {theirs['peak_mib']:,}"]
        rows[-1] += [f"{ours['final_loss'] / theirs['final_loss']:.4f}"]
    headers = "model | local batch | tokens/s per GPU | faster by | MiB at the peak | final loss over its"
    return plain(records, name, headers, rows)


def page_cpu() -> str:
    """A table for each CPU."""
    name = "layer_cpu.json"
    records = common.read(RESULTS / name)
    cpus = dict.fromkeys(r["cpu"] for r in records)
    return "\n\n".join(cpu_table([r for r in records if r["cpu"] == cpu], name) for cpu in cpus)


def cpu_table(records: list[dict], name: str) -> str:
    rows = []
    for (shape, dtype), whats in by_shape(records).items():
        own = whats["forward"], whats["forward_backward"]
        rows.append([f"{shape}, {dtype}", sizes(own[0])])
        rows[-1] += [", ".join(ratio(r, "peer_ratio") for r in own)]
        rows[-1] += [", ".join(f"{r['dense_ratio']:.2f}" for r in own)]
    gemms = records[0].get("bf16_gemms", "float32")
    return plain(
        records, name, f"layer (bf16 GEMMs: {gemms}) | T, E, K, D, F | over the loop | of dense", rows
    )


PAGE = {
    "layers": page_layers,
    "models": page_models,
    "decode": page_decode,
    "engine": page_engine,
    "quantised": page_quantised,
    "eight_bits": page_eight_bits,
    "fp8": page_fp8,
    "linear": page_linear,
    "gpus": page_gpus,
    "cpu": page_cpu,
}


def renewed(page: str) -> str:
    """The page with each of its tables made again."""
    names = [name for _, name, _ in PLACE.findall(page)]
    if not names or set(names) - set(PAGE):
        raise SystemExit(
            f"--page: expected places <!-- performance: NAME --> with names of {', '.join(PAGE)},"
            f" found {', '.join(names) or 'none'}"
        )
    return PLACE.sub(lambda place: f"{place[1]}\n{PAGE[place[2]]()}\n\n{place[3]}", page)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if not options.page:
        made = gains if options.gains else profile if options.profile else tables
        print(made(common.read(*options.files)))
        return
    old = options.page.read_text()
    new = renewed(old)
    if options.check and old != new:
        sys.exit(f"{options.page} is out of date: python benchmarks/table.py --page {options.page}")
    if not options.check:
        options.page.write_text(new)


if __name__ == "__main__":
    main()
