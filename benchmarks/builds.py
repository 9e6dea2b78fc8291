"""Builds of this library side by side: a process for each, which answer in turns.

Builds are checkouts with their libraries. Their processes run this folder's programs, whatever the checkouts
have there. Requests and answers are one line of JSON each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import common

WORKER = "--worker"


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    flags = common.new_parser(doc)
    add, trees = flags.add_argument, "the older one first; required"
    add("--build", action="append", required=True, metavar="COMMIT=TREE", help=trees)
    add("--rounds", type=int, default=rounds, metavar="N", help="how many turns every process has")
    add("--json", type=Path, metavar="FILE", help="where the records go")
    return flags


class Process:
    """Imports one tree's library and runs `script`, which calls `serve`."""

    def __init__(self, commit: str, tree: str, script: str):
        self.commit = commit
        path = f"{Path(tree).resolve()}:{Path(__file__).parent}"
        command, pipe = [sys.executable, script, WORKER], subprocess.PIPE
        environment = os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.commit}: its process ended at {request}")
        return json.loads(line)


def start(builds: list[str], script: str, *, twice: bool = False) -> list[Process]:
    """The processes. `twice`: two for each build, in the order A B B A."""
    pairs = [build.split("=", 1) for build in builds]
    return [Process(commit, tree, script) for commit, tree in pairs + pairs[::-1] * twice]


def rotated(processes: list[Process]) -> list[Process]:
    """A B becomes B A, and A B B A becomes B A A B: in turns, neither build has the better place."""
    half = len(processes) // 2
    return processes[half:] + processes[:half]


def in_turns(processes: list[Process], rounds: int, **request) -> dict[str, list]:
    """{commit: its answers}. Each round begins half the processes later."""
    answers = defaultdict(list)
    for _ in range(rounds):
        for process in processes:
            answers[process.commit].append(process.ask(**request))
        processes = rotated(processes)
    return answers


def serve(answer: Callable) -> None:
    """Answers requests until there are no more."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def run(main: Callable[[], None], answer: Callable) -> None:
    """What a script does: it serves in a worker's process, and is a program otherwise."""
    serve(answer) if sys.argv[1:] == [WORKER] else main()
