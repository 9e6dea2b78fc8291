"""Fuzzing: random calls of the public functions, judged against plain PyTorch in float64, until time is up.

python tests/trust/fuzz.py --minutes 5 [--device cuda] [--jobs 12] [--seed 1] [--record FILE]
python tests/trust/fuzz.py --case 0:1234          one case again, with its traceback

A case is known by its seed and index. fuzz_cases.py draws it, fuzz_checks.py runs it and says what is
checked. Worker processes run the cases, so that one that crashes or hangs is a finding, too. A failing case
is made smaller and printed as a test, for a file in tests/trust. Exits with 1 if there was a finding.
"""

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

# As tests/conftest.py has them: before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path[:0] = [str(Path(__file__).parents[i]) for i in (0, 1)]

import record  # noqa: E402
import torch  # noqa: E402
from fuzz_cases import FuzzCase, Shares, as_test, draw, minimise  # noqa: E402
from fuzz_checks import check  # noqa: E402
from tqdm import tqdm  # noqa: E402

from fused_moe.ops import FACTS  # noqa: E402

HANGS = 300  # seconds for one case: far more than a compilation takes on a busy machine
REPORTS = 1.0  # seconds between two of a worker's reports


# --- one worker -----------------------------------------------------------------------------------


@dataclass
class Report:
    """What a worker has done since its last report."""

    counts: Counter = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def error_of(case: FuzzCase, device: str) -> BaseException | None:
    try:
        check(case, device)
    except Exception as error:
        return error
    return None


def found(case: FuzzCase, name: str, error: BaseException, device: str) -> str:
    """A finding: the error, and the smallest case that fails with an error of the same type, as a test."""
    smallest = minimise(case, lambda c: type(error_of(c, device)) is type(error))
    last = error_of(smallest, device) or error  # or: it fails now and then
    lines = traceback.format_exception_only(last)
    return f"{name}: {lines[-1].strip()}\n\n{as_test(smallest, name.replace(':', '_'))}"


def run_cases(seed: int, indices: Iterable[int], device: str, shares: Shares, started, report) -> None:
    """Runs cases, and calls report(Report) every second or so. started(index) before each."""
    done, last = Report(), time.monotonic()
    for index in indices:
        started(index)
        case = draw(seed, index, shares)
        if error := error_of(case, device):
            done.findings.append(found(case, f"{seed}:{index}", error, device))
        dtype = str(case.dtype).removeprefix("torch.")
        done.counts.update(["cases", case.function, dtype, case.mode])
        if device != "cpu":
            done.counts.update(how for how in ("stream", "graph") if getattr(case, how))
        if time.monotonic() - last > REPORTS:
            report(done)
            done, last = Report(), time.monotonic()
    done.counts += tier_calls()
    report(done)


def tier_calls() -> Counter:
    """How many GEMMs each CUDA tier has had in this process."""
    calls = Counter()
    for operator in range(len(FACTS["operators"])):
        numbers = torch.ops.fused_moe.cuda_calls(operator).tolist()
        calls.update({f"GEMMs of {tier}": n for tier, n in zip(FACTS["tiers"], numbers, strict=False)})
    return +calls


def work(connection, now, seed: int, indices: range, device: str, shares: Shares, deadline: float) -> None:
    """A worker process: cases until the deadline. `now` is the index that runs, and since when."""
    configure()

    def until_deadline():
        for index in indices:
            if time.monotonic() > deadline:
                return
            yield index

    def started(index: int) -> None:
        now[0], now[1] = index, time.monotonic()

    run_cases(seed, until_deadline(), device, shares, started, connection.send)


def configure() -> None:
    """One thread where a case does not ask for more, no warnings, and GEMMs as tests/conftest.py has them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


# --- all of them ----------------------------------------------------------------------------------


class Worker:
    """A process that runs every `step`-th index from `first` on."""

    def __init__(self, target: Callable, first: int, options: argparse.Namespace, deadline: float):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe(duplex=False)
        self.now = context.Array("d", [-1, time.monotonic()], lock=False)
        indices = range(first, options.cases or 2**53, options.jobs)
        args = (theirs, self.now, options.seed, indices, options.device, options.shares, deadline)
        self.process = context.Process(target=target, args=args, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def index(self) -> int:
        return int(self.now[0])

    def hangs(self) -> bool:
        return self.index >= 0 and time.monotonic() - self.now[1] > HANGS


def run_workers(options: argparse.Namespace, target: Callable = work) -> Report:
    """Runs the cases of 0, 1, 2, ... in options.jobs processes. A crash costs its worker the case alone."""
    deadline = time.monotonic() + 60 * options.minutes
    total, before = Report(), time.monotonic()
    workers = [Worker(target, i, options, deadline) for i in range(options.jobs)]
    with tqdm(total=options.cases, unit=" cases", smoothing=0.1, disable=None) as progress:
        while workers:
            wait([w.connection for w in workers], timeout=REPORTS)
            for i, worker in reversed([*enumerate(workers)]):
                has_ended, hangs = receive(worker, total, progress), worker.hangs()
                if hangs:
                    worker.process.kill()
                elif not has_ended:
                    continue
                worker.process.join()
                if not worker.process.exitcode:
                    workers.pop(i)
                    continue
                reason = f"exit code {worker.process.exitcode}"
                if worker.index < 0:
                    raise SystemExit(f"a worker did not start: {reason}")
                add(
                    total, progress, crash(options, worker.index, f"hangs for {HANGS} s" if hangs else reason)
                )
                workers[i] = Worker(target, worker.index + options.jobs, options, deadline)
    total.counts["seconds"] = round(time.monotonic() - before)
    return total


def receive(worker: Worker, total: Report, progress) -> bool:
    """Takes what has been reported. Whether that was the last."""
    try:
        while worker.connection.poll():
            add(total, progress, worker.connection.recv())
    except EOFError:
        return True
    return False


def add(total: Report, progress, report: Report) -> None:
    total.counts += report.counts
    total.findings += report.findings
    for finding in report.findings:
        progress.write(f"\n{finding}")
    progress.update(report.counts["cases"])
    progress.set_postfix_str(f"{len(total.findings)} findings")


def crash(options: argparse.Namespace, index: int, reason: str) -> Report:
    name, case = f"{options.seed}:{index}", draw(options.seed, index, options.shares)
    return Report(Counter(cases=1), [f"{name}: {reason}\n\n{as_test(case, name.replace(':', '_'))}"])


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases")
    parser.add_argument("--cases", type=int, help="at most this many; default: until time is up")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; with a GPU they share it")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a record of this run (record.py)")
    parser.add_argument("--case", metavar="SEED:INDEX", help="run one case again, in this process")
    for backend, default in vars(Shares()).items():
        name = f"--{backend.replace('_', '-')}"
        text = f"cases in ten thousand compiled with {backend}; default: {default}"
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)
    options = parser.parse_args(arguments)
    options.shares = Shares(options.aot_eager, options.inductor)
    return options


def main(options: argparse.Namespace) -> int:
    if options.case:
        configure()
        seed, index = map(int, options.case.split(":"))
        case = draw(seed, index, options.shares)
        print(as_test(case, f"{seed}_{index}"))
        check(case, options.device)
        print("nothing found")
        return 0
    total = run_workers(options)
    counts, seconds = total.counts, max(total.counts.pop("seconds"), 1)
    for kind in sorted(counts.keys() - {"cases"}):
        print(f"{kind:20}{counts[kind]:8}")
    rate = counts["cases"] / seconds
    print(f"{counts['cases']} cases in {seconds} s ({rate:.1f} per second), {len(total.findings)} findings")
    if options.record:
        is_cpu = torch.device(options.device).type == "cpu"
        where = "cpu" if is_cpu else torch.cuda.get_device_name(options.device)
        fields = {"seed": options.seed, "minutes": seconds / 60, "findings": len(total.findings)}
        tier = "cpu" if is_cpu else " and ".join(n for n in ("hopper", "portable") if counts[f"GEMMs of {n}"])
        counts = dict(sorted(counts.items()))
        record.append(options.record, [record.make("fuzz", where, tier=tier, counts=counts, **fields)])
    return min(len(total.findings), 1)


if __name__ == "__main__":
    sys.exit(main(parse()))
