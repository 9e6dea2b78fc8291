"""Draws records: roofline.png, ratios.png, speedups.png; losses.png for records of bench_torchtitan.py,
profile.png for those of bench_layer.py --profile, decode.png for those of bench_decode.py, and serving.png
for those of bench_vllm.py and bench_continuous_batching.py.

python benchmarks/plot.py benchmarks/results/*.json -o pictures

The first shows the rate over arithmetic intensity, the second bars for every shape, the third how much faster
a layer is than PyTorch's own kernels, then loss curves, the kernels of a step, latency over tokens beside its
floor, and how much faster an engine is than with its own experts. Each machine gets a panel.
The roofline's ceilings are measured, too: the fastest dense GEMM of the records, and the large copy of
bench_kernels.py if there is one.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib
from common import PEERS, eager_beside_queued, layer_sizes, read
from profiling import ORDER

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RATIOS = {"dense_ratio": "to dense", "torch_ratio": "to PyTorch", "peer_ratio": "to the best peer"}
COLOURS = dict(zip(RATIOS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
MARKERS = "osD^v<>Ph*"
LINES = ("-", "--", ":")
SMOOTH = 5
NO_BARS = ("decode", "vllm", "continuous_batching")  # which have pictures of their own


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("files", nargs="+", type=Path, help="records that the programs wrote with --json")
    flags.add_argument("-o", "--output", type=Path, default=Path(), help="folder of the pictures")
    return flags.parse_args(argv)


def split(records: list[dict], *names: str) -> dict[tuple, list[dict]]:
    found: dict[tuple, list[dict]] = {}
    for r in records:
        found.setdefault(tuple(r[name] for name in names), []).append(r)
    return found


def machine(r: dict) -> str:
    return r["cpu"] if r["gpu"] == "none" else r["gpu"]


def roofline(records: list[dict], path: Path) -> None:
    machines = {key: rs for key, rs in split(records, "gpu", "cpu").items() if any(map(has_point, rs))}
    if not machines:
        print(f"{path} is not drawn: no record has an intensity")
        return
    figure, panels = plt.subplots(1, len(machines), figsize=(8.5 * len(machines), 5), squeeze=False)
    for axes, group in zip(panels[0], machines.values(), strict=True):
        points = [r for r in group if has_point(r)]
        dense = max(r["tflops"] / (r["dense_ratio"] or 1) for r in points)
        copies = [r["copy_gb_per_s"] / 1e3 for r in group if r.get("copy_gb_per_s")]
        ridge = dense / max(copies) if copies else 0
        low = min([r["intensity"] for r in points] + [ridge or 1e9]) / 2
        high = 2 * max([r["intensity"] for r in points] + [ridge])
        axes.plot([max(low, ridge), high], [dense, dense], "k-", linewidth=1)
        axes.annotate(f"dense: {dense:.3g} TFLOP/s", (high, dense), ha="right", va="bottom", fontsize=8)
        if copies:
            slope = [low * (ridge / low) ** (i / 50) for i in range(51)]
            axes.plot(slope, [x * max(copies) for x in slope], "k--", linewidth=1)
            spot = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right", "fontsize": 8}
            axes.annotate(f"copy: {max(copies):.3g} TB/s", (slope[40], slope[40] * max(copies)), **spot)
        for i, ((bench, what, dtype), rs) in enumerate(split(points, "bench", "what", "dtype").items()):
            xs, ys = [r["intensity"] for r in rs], [r["tflops"] for r in rs]
            marker = MARKERS[i % len(MARKERS)]
            axes.plot(xs, ys, marker, markersize=5, alpha=0.8, label=f"{bench} {what} {dtype}")
        axes.set(xscale="log", title=machine(group[0]), ylabel="TFLOP/s")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("FLOPs per byte of inputs, weights and outputs")
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def has_point(r: dict) -> bool:
    return bool(r.get("intensity") and r["tflops"])


def ratios(records: list[dict], path: Path) -> None:
    compared = [r for r in records if r["bench"] not in NO_BARS and any(r[name] for name in RATIOS)]
    panels = list(split(compared, "gpu", "cpu", "bench", "dtype", "what").values())
    if not panels:
        print(f"{path} is not drawn: no record has a ratio")
        return
    figure, grid = grid_of(len(panels), columns=2, width=7.5, height=3.8)
    for axes, group in zip(grid, panels, strict=True):
        names = [name for name in RATIOS if any(r[name] for r in group)]
        if "torch_ratio" in names and all(r["peer"] in (None, "torch") for r in group):
            names = [name for name in names if name != "peer_ratio"]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            xs = [x + (i - (len(names) - 1) / 2) * width for x in range(len(group))]
            heights = [r[name] or 0 for r in group]
            bars = axes.bar(xs, heights, width, label=RATIOS[name], color=COLOURS[name])
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            axes.bar_label(
                bars, [f"{h:.2f}" if h else "" for h in heights], fontsize=6, padding=1, bbox=paper
            )
        axes.axhline(1, color="black", linewidth=0.8, zorder=0)
        axes.set_xticks(range(len(group)), [label(r) for r in group], fontsize=7)
        plt.setp(axes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
        axes.margins(y=0.3)  # room for the legend
        first = group[0]
        title = f"{first['bench']} {first['what']} {first['dtype']}, {machine(first)}"
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("higher is better", fontsize=8)
        axes.legend(fontsize=7, ncols=3, loc="upper right")
    save(figure, path)


def speedups(records: list[dict], path: Path) -> None:
    """Bars of layers, the largest speed-up first: forward and backward over torch._grouped_mm."""
    compared = [r for r in records if r["bench"] == "layer" and r["torch_ratio"]]
    groups = split([r for r in compared if r["what"] == "forward_backward"], "gpu", "tier").values()
    if not groups:
        print(f"{path} is not drawn: no layer was compared with PyTorch")
        return
    figure, panels = plt.subplots(len(groups), 1, figsize=(8, 3.4 * len(groups)), squeeze=False)
    for axes, group in zip(panels[:, 0], groups, strict=True):
        group = sorted(group, key=lambda r: r["torch_ratio"])
        names = [f"{r['shape']} ({sizes_in_words(r['shape'])})" for r in group]
        bars = axes.barh(names, [r["torch_ratio"] for r in group], color="tab:blue")
        axes.bar_label(bars, [f"{r['torch_ratio']:.2f}x" for r in group], padding=3, fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.1)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        first = group[0]
        axes.set_title(f"A layer's forward and backward on {machine(first)}, {first['dtype']}", fontsize=11)
        axes.set_xlabel("speed relative to the same layer on torch._grouped_mm (1 = as fast)")
    save(figure, path)


def sizes_in_words(shape: str) -> str:
    sizes = layer_sizes(shape)
    return f"{sizes.num_experts} experts, top-{sizes.top_k}"


def losses(records: list[dict], path: Path) -> None:
    """One panel per setting: every step's loss, pale, and its mean over SMOOTH steps to either side."""
    panels = split([r for r in records if r.get("losses")], "gpu", "shape")
    figure, grid = grid_of(len(panels), columns=min(2, len(panels)), width=7.5, height=4.5)
    for axes, group in zip(grid, panels.values(), strict=True):
        for i, r in enumerate(group):
            values = r["losses"]
            reach = [min(SMOOTH, s, len(values) - 1 - s) for s in range(len(values))]
            smooth = [statistics.fmean(values[s - n : s + n + 1]) for s, n in enumerate(reach)]
            steps, colour = range(1, len(values) + 1), f"C{i}"
            text = (
                f"{r['what']}: {r['final_loss']:.4f} at the end, {r['tokens_per_second']:,} tokens/s per GPU"
            )
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
            axes.plot(steps, smooth, color=colour, linewidth=1.2, label=text, linestyle=LINES[i % len(LINES)])
        first = group[0]
        axes.set_title(
            f"torchtitan {first['torchtitan']}, deepseek_v3 {first['shape']}, {machine(first)}", fontsize=9
        )
        axes.set(xlabel="step", ylabel="loss")
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8)
    save(figure, path)


def profile(records: list[dict], path: Path) -> None:
    """Stacked bars: the kernels of one step, of ours and of each peer. A kernel's floor is solid."""
    machines = split([r for r in records if r["bench"] == "profile"], "gpu").values()
    palette = [*plt.get_cmap("tab20").colors, *plt.get_cmap("tab20b").colors]
    colours = dict(zip(ORDER, palette, strict=False))
    longest = max(len(split(group, "shape", "dtype", "layer")) for group in machines)
    figure, panels = plt.subplots(
        len(machines), 1, figsize=(4 + 0.55 * longest, 6 * len(machines)), squeeze=False
    )
    for axes, group in zip(panels[:, 0], machines, strict=True):
        x, ticks, drawn = 0, {}, {}
        for (shape, *_), of_shape in split(group, "shape", "routing", "dtype").items():
            layers = split(of_shape, "layer")
            whole = {
                name: next(r["time_us"] for r in rs if r["what"] == "step") for (name,), rs in layers.items()
            }
            dense = whole.pop("dense")
            for name, us in whole.items():
                bottom = 0
                parts = {r["what"]: r for r in layers[name,]}
                for kind in filter(parts.get, ORDER):
                    r = parts[kind]
                    solid = min(r["time_us"], r.get("floor_us", r["time_us"])) / dense
                    style = {"color": colours[kind], "edgecolor": "white", "linewidth": 0.3}
                    drawn[kind] = axes.bar(x, solid, 0.85, bottom, **style)
                    axes.bar(
                        x, r["time_us"] / dense - solid, 0.85, bottom + solid, hatch="///", alpha=0.6, **style
                    )
                    bottom += r["time_us"] / dense
                axes.text(x, bottom, f"{us:.0f} µs", ha="center", va="bottom", fontsize=6)
                ticks[x] = f"{shape}\n{PEERS.get(name, name)}"
                x += 1
            x += 0.5
        axes.axhline(1, color="black", linewidth=0.8, label="dense")
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
        plt.setp(axes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
        first = group[0]
        axes.set_title(f"one step, forward and backward, {first['dtype']}, {machine(first)}", fontsize=9)
        axes.margins(x=0.01)
        axes.set_ylim(top=1.05 * axes.get_ylim()[1])  # room for the times
        axes.set_ylabel("time, dense products of equal FLOPs = 1", fontsize=8)
        shown = [kind for kind in reversed(ORDER) if kind in drawn]
        handles = [drawn[kind] for kind in shown]
        title = "hatched: over the floor"
        axes.legend(handles, shown, fontsize=7, title=title, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def decode(records: list[dict], path: Path) -> None:
    """One panel per shape and routing: microseconds over tokens, of ours, the peers and the floor."""
    timed = [r for r in records if r["bench"] == "decode"]
    panels = split(timed, "gpu", "shape", "routing", "mode", "dtype", "schedule")
    ratios = {"torch": "torch_ratio"} | {
        name: f"ratio_to_{name}" for name in ("loop", "vllm", "vllm_invariant")
    }
    figure, grid = grid_of(len(panels), columns=min(3, len(panels)), width=6, height=4.2)
    for axes, group in zip(grid, panels.values(), strict=True):
        group = sorted(group, key=lambda r: r["tokens"])
        tokens = [r["tokens"] for r in group]
        for name, ratio in ratios.items():
            timed = [r for r in group if r.get(ratio)]
            if timed:
                us = [r["time_us"] * r[ratio] for r in timed]
                axes.plot([r["tokens"] for r in timed], us, "s--", markersize=4, label=PEERS[name])
        axes.plot(tokens, [r["time_us"] for r in group], "o-", label="fused_moe")
        axes.plot(tokens, [r["floor_us"] for r in group], "k:", label="floor")
        axes.set(yscale="log", xlabel="tokens", ylabel="µs per call")
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, tokens)
        axes.set_title(f"{label(group[0])} {group[0]['dtype']}, {machine(group[0])}", fontsize=9)
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize=8)
    save(figure, path)


def serving(records: list[dict], path: Path) -> None:
    """One panel per model: the engine with our experts over the engine with its own, over the requests."""
    compared = [r for r in records if is_served(r)]
    panels = split(compared, "gpu", "bench", "shape")
    figure, grid = grid_of(len(panels), columns=min(2, len(panels)), width=6, height=4)
    names = {"first_token_ratio": "time to first token", "peer_ratio": "tokens/s"}
    for axes, group in zip(grid, panels.values(), strict=True):
        for (what, mode), rs in split(group, "what", "mode").items():
            rs = sorted(rs, key=lambda r: r["tokens"])
            style = {"linestyle": "--" if what.endswith("invariant") or mode == "graphs" else "-"}
            suffix = {"fused_moe_invariant": ", batch-invariant"}.get(what, "")
            suffix += ", CUDA graphs" if mode == "graphs" else ""
            for i, (name, words) in enumerate(names.items()):
                text = f"{words}{suffix}"
                axes.plot(
                    [r["tokens"] for r in rs], [r[name] for r in rs], "o", color=f"C{i}", label=text, **style
                )
        ticks = sorted({r["tokens"] for r in group})
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, ticks)
        axes.set(xlabel="requests", ylabel="speed relative to the engine's own experts")
        first = group[0]
        engine = (
            f"vLLM {first['vllm']}" if first["bench"] == "vllm" else f"transformers {first['transformers']}"
        )
        axes.set_title(f"{engine}, {first['shape']}, {machine(first)}", fontsize=9)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=7)
    save(figure, path)


def is_served(r: dict) -> bool:
    return r["bench"] in ("vllm", "continuous_batching") and bool(r.get("first_token_ratio"))


def scaling(
    gpus: tuple[int, ...], panels: dict[str, dict[str, list[float]]], path: Path, digest: str
) -> None:
    """The curves of scaling.py, whose digest the file names. The same curves give the same file."""
    with plt.rc_context({"svg.hashsalt": digest, "svg.fonttype": "none"}):
        figure, grid = grid_of(len(panels), columns=2, width=6, height=3.2)
        for axes, (title, lines) in zip(grid, panels.items(), strict=True):
            for i, (name, values) in enumerate(lines.items()):
                style = "k:" if "alone" in name else f"{MARKERS[i]}-"
                axes.plot(gpus, values, style, markersize=4, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_xticks(gpus, gpus)
            axes.set_xlabel("GPUs, 8 per host")
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.2)
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        save(figure, path, metadata={"Description": digest, "Creator": None, "Date": None})


def grid_of(panels: int, columns: int, width: float, height: float):
    """A figure and its panels, row by row; width and height are of one."""
    rows = -(-panels // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axes in grid.flat[panels:]:
        axes.remove()
    return figure, grid.flat[:panels]


def label(r: dict) -> str:
    routing = "" if r["routing"] == "random" else f" {r['routing']}"
    tier = "" if r["tier"] in ("cpu", "hopper") else f" {r['tier']}"
    schedule = "" if r.get("schedule") in (None, "default") else f"\n{r['schedule']}"
    return r["shape"] + routing + tier + schedule


def save(figure, path: Path, **options) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, **options)
    plt.close(figure)
    print(path)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    records = eager_beside_queued(read(*options.files))
    roofline(records, options.output / "roofline.png")
    ratios(records, options.output / "ratios.png")
    speedups(records, options.output / "speedups.png")
    if any(r.get("losses") for r in records):
        losses(records, options.output / "losses.png")
    if any(r["bench"] == "profile" for r in records):
        profile(records, options.output / "profile.png")
    if any(r["bench"] == "decode" for r in records):
        decode(records, options.output / "decode.png")
    if any(map(is_served, records)):
        serving(records, options.output / "serving.png")


if __name__ == "__main__":
    main()
