"""Makes the committed records of those that programs wrote: one a line, with the fields that something reads.

    python benchmarks/records.py FOLDER -o benchmarks/results

FOLDER is that of measure.sh. Left out are None, usual values, which common.read gives back, the host of a
GPU, and curves, samples and details of which no page has a figure.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import common

UNREAD = """
    attention bytes compilation cuda data_seconds errors error_to_float gpu_kernels_us grad_norms
    kernels losses loss_over_grouped_mm lr mean_seconds new_tokens output_dtype peer_errors peer_host_us
    peer_launches peer_tflops plugin profile read_gb_per_s samples start_s timed_steps vocabulary
    """.split()
USUAL = {"routing": "random", "schedule": common.DEFAULT_SCHEDULE}
DIGITS = 6  # of a loss or an error


def kept(r: dict) -> dict:
    out = {}
    for name, value in r.items():
        on_host = name in ("cpu", "threads") and r.get("gpu", "none") != "none"
        layers = name == "model" and isinstance(value, dict)  # torchtitan's settings
        timed = name == "bits_per_weight" and "weight_error" not in r  # read beside errors alone
        if value is None or name in UNREAD or value == USUAL.get(name) or on_host or layers or timed:
            continue
        if isinstance(value, float) and ("error" in name or "loss" in name):
            value = float(f"{value:.{2 if name == 'max_rel_error' else DIGITS}g}")
        out[name] = value
    return out


def text(records: list[dict]) -> str:
    lines = (json.dumps(kept(r), ensure_ascii=False, separators=(",", ":")) for r in records)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main(argv: list[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("folder", type=Path, help="with the programs' *.json")
    flags.add_argument("-o", "--output", type=Path, required=True, help="the folder of the committed ones")
    options = flags.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(options.folder.glob("*.json")):
        made = text(json.loads(path.read_text()))
        (options.output / path.name).write_text(made)
        print(f"{path.name}: {len(made):,} bytes")


if __name__ == "__main__":
    main()
