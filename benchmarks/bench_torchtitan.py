"""Trains deepseek_v3 with the trainer of torchtitan 0.2.x: stock for-loop, stock grouped_mm, fused_moe.

    python benchmarks/bench_torchtitan.py --torchtitan CHECKOUT --profile 3 --json out.json
    python benchmarks/bench_torchtitan.py --torchtitan CHECKOUT --expert-parallel 2 --ac selective --compile
    python benchmarks/bench_torchtitan.py --torchtitan CHECKOUT --flavor 16B --local-batch 1,2,4,8
    python benchmarks/bench_torchtitan.py --torchtitan CHECKOUT --variants fused_moe,fused_moe_fp8 --seeds 0,1
    python benchmarks/table.py out.json
    python benchmarks/plot.py out.json -o pictures        # the loss curves: losses.png

Each variant is a run of `torchrun -m torchtitan.train`, one after another, with the same seed and data. They
differ only in `use_grouped_mm` and `--model.converters`, fused_moe or fused_moe_fp8. With several --seeds the
runs of fused_moe beside each other say how far losses differ anyway; other variants run with the first seed
alone. The data are the same with every seed. torchtitan_spec.py, a custom import of
torchtitan, writes every step's loss, seconds and memory. Its flavour 16B is torchtitan's with a vocabulary of
2048 and SDPA, and 16B6 has six of its 27 layers, five of them MoE. CHECKOUT has torchtitan's sources with
tests/assets/tokenizer and assets/version.txt. If it has no tests/assets/c4_test, the text is the sources of
Python's standard library. Nothing is downloaded.

A record has the median time of the steps after a warm-up (a tenth of the steps and two, at most 20), tokens
per second per GPU, all losses, the first GPU's peak memory, and the source of the text. final_loss is the
mean over the last tenth, last_50_loss that over the last 50 steps. If the GPU's memory is too small for a
run, its record has `failed` instead. --profile N runs the last N steps under torch.profiler and excludes them
from the times; moe_profile.py tells which kernels belong to the MoE. While one run trains, the next one
imports and waits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import common
import moe_profile
import torch

VARIANTS = ("loop", "grouped_mm", "fused_moe", "fused_moe_fp8")
CONFIG = "torchtitan/models/deepseek_v3/train_configs/debug_model.toml"
TEXT = "tests/assets/c4_test"
OUT_OF_MEMORY = "CUDA out of memory"  # as PyTorch says it
FLAVORS = {  # per GPU; learning rates as in torchtitan's configurations
    "debugmodel": {"local_batch_size": 8, "seq_len": 2048, "lr": 8e-4},
    **dict.fromkeys(("16B6", "16B"), {"local_batch_size": 4, "seq_len": 4096, "lr": 2.2e-4}),
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = common.new_parser(__doc__)
    add = flags.add_argument
    add("--torchtitan", type=Path, required=True, metavar="FOLDER", help="the checkout; required")
    add("--flavor", choices=FLAVORS, default="16B6", metavar="NAME", help=f"of {', '.join(FLAVORS)}")
    add("--layers", type=int, metavar="N", help="of the model; default: the flavour's")
    add("--local-batch", metavar="A,B,..", help="sequences per GPU, a run each; default: the flavour's")
    add("--variants", default=",".join(VARIANTS[:3]), metavar="A,B,..", help=f"of {','.join(VARIANTS)}")
    add("--steps", type=int, default=200, metavar="N", help="default: 200")
    gpus = max(torch.cuda.device_count(), 1)
    add("--nproc", type=int, default=gpus, metavar="N", help="GPUs; default: all")
    add("--expert-parallel", type=int, default=1, metavar="N", help="degree")
    checkpointing = ("none", "selective", "full")
    add("--ac", choices=checkpointing, default="none", metavar="KIND", help="activations: selective or full")
    add("--compile", action="store_true")
    add("--seeds", default="0", metavar="A,B,..", help="all but the first for fused_moe alone")
    add("--profile", type=int, default=0, metavar="N", help="the last N steps")
    add("--workers", type=int, default=1, metavar="N", help="data loader processes")
    add("--limit", type=float, default=1800, metavar="SECONDS", help="for one variant")
    add("--work", type=Path, metavar="FOLDER", help="keeps logs, steps and traces there")
    add("--json", type=Path, metavar="FILE", help="where the records go")
    add("--append", action="store_true", help="keep the other records of that file")
    options = flags.parse_args(argv)
    options.variants = options.variants.split(",")
    if not set(options.variants) <= set(VARIANTS):
        flags.error(f"--variants: expected some of {','.join(VARIANTS)}")
    try:
        sizes = (options.local_batch or str(FLAVORS[options.flavor]["local_batch_size"])).split(",")
        options.local_batch = list(dict.fromkeys(map(int, sizes)))
    except ValueError:
        options.local_batch = [0]
    if min(options.local_batch) < 1:
        flags.error("--local-batch: expected positive integers")
    try:
        options.seeds = list(dict.fromkeys(map(int, options.seeds.split(","))))
    except ValueError:
        flags.error("--seeds: expected integers")
    if len(options.seeds) > 1 and "fused_moe" not in options.variants:
        flags.error("--seeds: expected fused_moe in --variants with several seeds")
    if options.profile >= options.steps:
        flags.error("--profile: expected fewer than --steps")
    options.torchtitan = options.torchtitan.resolve()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


# --- one run ------------------------------------------------------------------------------------------


def trainer_flags(
    options: argparse.Namespace, variant: str, batch: int, seed: int, text: Path, folder: Path
) -> list[str]:
    sizes = FLAVORS[options.flavor]
    flags = {
        "job.config_file": CONFIG,
        "job.dump_folder": folder,
        "experimental.custom_import": "torchtitan_spec",
        "model.flavor": options.flavor,
        "training.steps": options.steps,
        "training.local_batch_size": batch,
        "training.seq_len": sizes["seq_len"],
        "training.dataset_path": text,
        "training.dataloader.num_workers": options.workers,
        "optimizer.lr": sizes["lr"],
        "lr_scheduler.warmup_steps": max(2, min(20, options.steps // 10)),
        "parallelism.expert_parallel_degree": options.expert_parallel,
        "activation_checkpoint.mode": options.ac,
        "debug.seed": seed,
    }
    if variant.startswith("fused_moe"):
        flags["model.converters"] = variant
    switches = ["metrics.disable_color_printing", *(["compile.enable"] if options.compile else [])]
    return [f"--{name}={value}" for name, value in flags.items()] + [f"--{name}" for name in switches]


def start(
    options: argparse.Namespace, variant: str, batch: int, seed: int, text: Path, work: Path
) -> tuple[subprocess.Popen, Path]:
    """Starts a run's processes, which wait for `finish` after their imports. Also returns its folder."""
    folder = work / (f"{variant}_{batch}" + (f"_seed{seed}" if seed != options.seeds[0] else ""))
    folder.mkdir(parents=True)
    settings = {
        "variant": variant,
        "layers": options.layers,
        "record": str(folder / "steps.jsonl"),
        "profile": options.profile,
        "start_file": str(folder / "start"),
    }
    paths = [str(common.HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "BENCH_TORCHTITAN": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.nproc}"]
    command = [sys.executable, *torchrun, "-m", "torchtitan.train"]
    command += trainer_flags(options, variant, batch, seed, text, folder)
    (folder / "command").write_text(" ".join(command) + "\n")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=options.torchtitan, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    return process, folder


def finish(options: argparse.Namespace, process: subprocess.Popen, folder: Path) -> dict:
    """Lets the run begin, and waits for its end. Returns its figures, or nothing if it failed."""
    (folder / "start").touch()
    try:
        code = process.wait(options.limit)
    except subprocess.TimeoutExpired:
        code = f"over {options.limit:g} s"
        stop(process)
    steps = folder / "steps.jsonl"
    entries = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    if code == 0 and any("model" in entry for entry in entries):
        return summary(entries)
    log = (folder / "log").read_text()
    if OUT_OF_MEMORY in log:
        return {"failed": OUT_OF_MEMORY}
    last = log.splitlines()[-60:]
    print(f"{folder.name} failed ({code}) after {len(entries)} steps:", *last, sep="\n", flush=True)
    return {}


def stop(process: subprocess.Popen) -> None:
    """Terminates torchrun, which terminates its processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def write_text(path: Path, characters: int = 4000) -> None:
    """Writes lines {"text": ...} of the sources of Python's standard library, without its tests. The order is
    that of a hash of each part's text, so any stretch of it has something of every module."""
    root = Path(sysconfig.get_path("stdlib"))
    parts = []
    for file in root.rglob("*.py"):
        if {"site-packages", "dist-packages", "test", "tests"}.isdisjoint(file.relative_to(root).parts):
            text = file.read_text(errors="ignore")
            parts += [text[i : i + characters] for i in range(0, len(text), characters)]
    parts.sort(key=lambda part: hashlib.sha256(part.encode()).digest())
    with path.open("w") as file:
        file.writelines(json.dumps({"text": part}) + "\n" for part in parts)


def source_of(options: argparse.Namespace) -> str:
    """What the text is, in records."""
    if (options.torchtitan / TEXT / "data.json").exists():
        return "the checkout's"
    return f"Python {platform.python_version()}'s standard library"


# --- records ------------------------------------------------------------------------------------------


def setting(options: argparse.Namespace) -> str:
    parts = [options.flavor, *([f"{options.layers} layers"] if options.layers else [])]
    parts.append(f"{options.nproc} GPUs" if options.nproc > 1 else "1 GPU")
    if options.expert_parallel > 1:
        parts.append(f"EP {options.expert_parallel}")
    if options.ac != "none":
        parts.append(f"{options.ac} AC")
    return ", ".join(parts + ["compiled"] * options.compile)


def summary(entries: list[dict]) -> dict:
    """The figures of one run, from the entries that torchtitan_spec.py wrote."""
    steps = [entry for entry in entries if "step" in entry]
    other = {name: value for entry in entries if "step" not in entry for name, value in entry.items()}
    warm_up, tail = min(20, len(steps) // 10 + 2), max(1, len(steps) // 10)
    timed = [s for s in steps[warm_up:] if not s["profiled"]] or steps[-1:]
    seconds = statistics.median(s["seconds"] for s in timed)
    return {
        "time_us": round(seconds * 1e6, 1),
        "mean_seconds": statistics.fmean(s["seconds"] for s in timed),
        "data_seconds": statistics.median(s["data_seconds"] for s in timed),
        "timed_steps": len(timed),
        "tokens_per_second": round(timed[0]["tokens"] / seconds),
        "peak_mib": round(max(s["peak_gib"] for s in steps) * 1024) or None,  # None: not measured
        "final_loss": statistics.fmean(s["loss"] for s in steps[-tail:]),
        "last_50_loss": statistics.fmean(s["loss"] for s in steps[-50:]),
        "losses": [s["loss"] for s in steps],
        "grad_norms": [round(s["grad_norm"], 6) for s in steps],
        "model": other["model"],
        "profile": other.get("profile"),
        "moe_share": round(moe_profile.share(other["profile"]), 4) if "profile" in other else None,
    }


def records(options: argparse.Namespace, batch: int, runs: dict[tuple[str, int], dict]) -> list[dict]:
    """One record per variant and seed. fused_moe's has the ratios to the stock layers, fused_moe_fp8's and
    those of other seeds the ratios to fused_moe's."""
    options.tier = "none"
    first = options.seeds[0]
    finished = {
        variant: run for (variant, seed), run in runs.items() if seed == first and "failed" not in run
    }

    def ratios(variant: str, seed: int, run: dict) -> dict:
        if "failed" in run:
            return {}
        if seed != first or variant == "fused_moe_fp8":
            return over_fused_moe(run, finished.get("fused_moe"))
        return comparisons(finished) if variant == "fused_moe" else {}

    return [
        common.record(
            options,
            bench="torchtitan",
            shape=f"{setting(options)}, batch {batch}",
            routing="trained",
            dtype="bf16",
            what=variant if seed == first else f"{variant}, seed {seed}",
            **ratios(variant, seed, run),
            **run,
            steps=options.steps,
            nproc=options.nproc,
            seed=seed,
            **FLAVORS[options.flavor] | {"local_batch_size": batch},
            text=source_of(options),
            torchtitan=(options.torchtitan / "assets" / "version.txt").read_text().strip(),
        )
        for (variant, seed), run in runs.items()
    ]


def over_fused_moe(run: dict, usual: dict | None) -> dict:
    """A run over fused_moe's with the first seed: a ratio of speeds, and quantities' ratios."""
    tiers = run["model"].get("tiers")
    found = {"tier": common.tier_in_use("auto", tiers)} if tiers else {}
    if usual:
        found["ratio_to_fused_moe"] = round(usual["time_us"] / run["time_us"], 3)
        for name in ("peak_mib", "final_loss", "last_50_loss"):
            if usual[name] and run[name]:
                found[f"{name}_over_fused_moe"] = round(run[name] / usual[name], 5)
    return found


def comparisons(runs: dict[str, dict]) -> dict:
    """fused_moe over the stock layers: ratio_* are ratios of speeds, *_over_* ratios of quantities."""
    ours, stock = runs["fused_moe"], runs.get("grouped_mm")
    found = {
        f"ratio_to_{peer}": round(runs[peer]["time_us"] / ours["time_us"], 3)
        for peer in ("loop", "grouped_mm")
        if peer in runs
    }
    if ours["model"].get("tiers"):
        found["tier"] = common.tier_in_use("auto", ours["model"]["tiers"])
    if stock:
        found |= {"peer": "grouped_mm", "peer_ratio": found["ratio_to_grouped_mm"]}
        found["loss_over_grouped_mm"] = round(ours["final_loss"] / stock["final_loss"], 5)
    if stock and ours["profile"] and stock["profile"]:
        times = [moe_profile.moe_us(run["profile"]) for run in (ours, stock)]
        found["moe_time_over_grouped_mm"] = round(times[0] / times[1], 3)
        found["moe_share_over_grouped_mm"] = round(ours["moe_share"] / stock["moe_share"], 3)
    return found


def line(r: dict) -> str:
    """A record as one line."""
    start = f"{r['what']:10} batch {r['local_batch_size']:2}"
    if "failed" in r:
        return f"{start}  {r['failed']}"
    parts = [f"{start} {r['time_us'] / 1e3:8.1f} ms  {r['tokens_per_second']:7,} tokens/s per GPU"]
    parts.append(f"loss {r['final_loss']:.4f}  peak {r['peak_mib'] or 0:,} MiB")
    parts += [f"{r[f'ratio_to_{peer}']:.2f}x {peer}" for peer in VARIANTS if f"ratio_to_{peer}" in r]
    if "last_50_loss_over_fused_moe" in r:
        parts.append(f"loss of the last 50 steps {r['last_50_loss_over_fused_moe'] - 1:+.3%}")
    if r["moe_share"] is not None:
        parts.append(f"MoE {moe_profile.moe_us(r['profile']) / 1e3:.1f} ms")
        parts.append(f"{r['moe_share']:.1%} of the step")
    return "  ".join(parts)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are terminated, too
    path, found = options.json, []
    old = json.loads(path.read_text()) if path and options.append and path.exists() else []
    others = [("fused_moe", seed) for seed in options.seeds[1:]]
    of_batch = [*((variant, options.seeds[0]) for variant in options.variants), *others]
    plan = [(batch, *run) for batch in options.local_batch for run in of_batch]
    runs: dict[int, dict[tuple[str, int], dict]] = {batch: {} for batch in options.local_batch}
    with ExitStack() as stack:
        work = (options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        text = options.torchtitan / TEXT
        if not (text / "data.json").exists():
            text = work / "text"
            text.mkdir(parents=True, exist_ok=True)
            write_text(text / "data.json")

        def begin(batch: int, variant: str, seed: int) -> tuple[subprocess.Popen, Path]:
            process, folder = start(options, variant, batch, seed, text, work)
            stack.callback(stop, process)
            return process, folder

        print(setting(options), flush=True)
        following = begin(*plan[0])
        for i, (batch, variant, seed) in enumerate(plan):
            current, following = following, begin(*plan[i + 1]) if i + 1 < len(plan) else None
            began = time.perf_counter()
            run = finish(options, *current)
            if not run:
                continue
            runs[batch][variant, seed] = run
            new = records(options, batch, runs[batch])
            print(line(new[-1]), f" ({time.perf_counter() - began:.0f} s in all)", flush=True)
            found = common.merge(found, new)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(common.merge(old, found), indent=1) + "\n")
    if options.variants[-1] != "fused_moe":  # its ratios to the variants that ran after it
        for r in found:
            if r["what"] == "fused_moe":
                print(line(r))
    if len(found) < len(plan):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
