"""Prints records as Markdown tables, one per machine, benchmark and dtype, or updates a page with them.

python benchmarks/table.py benchmarks/results/*.json
python benchmarks/table.py benchmarks/results/layer_*.json --page docs/performance.md [--check]
python benchmarks/table.py --gains benchmarks/results/gemm_h200.json
python benchmarks/table.py --profile benchmarks/results/layer_h200.json

A layer that one run timed in both modes has one row: queued, with its single calls in a separate column.
Records of bench_torchtitan.py have a row for each model, local batch and variant. Those of bench_vllm.py and
bench_continuous_batching.py have a row for each number of requests: fused_moe against the engine's experts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

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
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", nargs="+", type=Path, help="records that the programs wrote with --json")
    flags.add_argument("--gains", action="store_true", help="compare schedules with the default one")
    flags.add_argument("--profile", action="store_true", help="GPU time by kernel, and power")
    flags.add_argument("--page", type=Path, help="replace the text between its two markers")
    flags.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = flags.parse_args(argv)
    if options.check and not options.page:
        flags.error("--check needs --page")
    return options


def machine(r: dict) -> tuple:
    """What the caption says of a machine. The host of a GPU is left out."""
    names = ("cpu", "threads", "torch") if r["gpu"] == "none" else ("gpu", "torch", "cuda")
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
        text = f"{first['gpu']}, PyTorch {first['torch']}, CUDA {first['cuda']}"
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
        {"gemm": "T, E, K, D, F or R, E, k, n"}.get(records[0]["bench"], "T, E, K, D, F"): sizes,
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
            tuned = ", tuned tiles" if theirs["tiles"] else ""
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
    for group in groups(eager_beside_queued([r for r in records if r["bench"] != "profile"])):
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


def between_markers(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"expected the lines {BEGIN} and {END}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    records = [r for path in options.files for r in json.loads(path.read_text())]
    made = gains if options.gains else profile if options.profile else tables
    text = made(records)
    if not options.page:
        print(text)
        return
    old = options.page.read_text()
    new = between_markers(old, text)
    if options.check and old != new:
        sys.exit(f"{options.page} is out of date: run this again without --check")
    if not options.check:
        options.page.write_text(new)


if __name__ == "__main__":
    main()
