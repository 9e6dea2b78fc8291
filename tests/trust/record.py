"""One record per run of the commands in this folder: benchmarks/results/trust.json holds those to publish.

A record has what ran, on what, and what came out:
{"what": "fuzz" or "soak", "where": "cpu" or the GPU's name, "tier", "date", "commit", "torch", "seed",
 "minutes", "counts": {name: number, ...}, "findings"}.
Runs add up: `python tests/trust/record.py benchmarks/results/trust.json` prints the sums, and `--add FILE...`
first adds the records of other files.
"""

import argparse
import json
import os
import subprocess
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import torch


def make(what: str, where: str, *, tier: str, seed: int, minutes: float, counts: dict, findings: int) -> dict:
    """A record of a run that has just ended, of the commit in COMMIT or in git."""
    return {
        "what": what,
        "where": where,
        "tier": tier,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": os.environ.get("COMMIT") or _commit(),
        "torch": torch.__version__,
        "seed": seed,
        "minutes": round(minutes, 2),
        "counts": dict(counts),
        "findings": findings,
    }


def append(path: Path, records: list[dict]) -> None:
    path.write_text(json.dumps(read(path) + records, indent=1) + "\n")


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text()) if path.exists() else []


def sums(records: list[dict]) -> dict[tuple, Counter]:
    """(what, where, tier) -> counts, minutes, findings and runs, added up."""
    result = {}
    for record in records:
        key = record["what"], record["where"], record["tier"]
        numbers = {k: record[k] for k in ("minutes", "findings")} | {"runs": 1}
        result.setdefault(key, Counter()).update({**numbers, **record["counts"]})
    return result


def _commit() -> str:
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE")
    args = parser.parse_args()
    for path in args.add:
        append(args.file, read(path))
    for key, counts in sums(read(args.file)).items():
        print(*key, ", ".join(f"{round(n, 1)} {name}" for name, n in counts.items()), sep="  ")
