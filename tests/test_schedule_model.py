"""Work stealing, rotated waves, and tiles taken in turn: schedule_model.cpp runs csrc/schedule.h in every
interleaving and in threads.

The C code is the kernels' own. In a copy of it the two macros of atomic steps call the model, and nothing
else differs; `edit` fails where a line that it changes is gone.
"""

import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
CXX = shlex.split(os.environ.get("CXX", "c++"))
STEPS = {
    "#define FUSED_MOE_CLAIM(counter) ((*(counter))++)": "#define FUSED_MOE_CLAIM(counter) claim(counter)",
    "#define FUSED_MOE_PEEK(counter) (*(counter))": "#define FUSED_MOE_PEEK(counter) peek(counter)",
}
ONE_LANE = {"cta += 32": "cta++"}
# Defect -> (what the source has, what it has instead, what the model says). The last two show where a CTA
# never starts or never ends, which no thread does.
DEFECTS = {
    "a claim is a read and a write": (
        "claim(counter)",
        "put(counter, peek(counter) + 1)",
        "a tile is computed twice",
    ),
    "a CTA does not claim its first tile": (
        "s.next = FUSED_MOE_CLAIM(claimed + (assignment == FUSED_MOE_IN_TURN ? 0 : cta));",
        "s.next = 0;",
        "a tile is computed twice",
    ),
    "the first CTA to exit resets the counters": (
        "if (__shfl_sync(~0u, exited, 0) != gridDim.x - 1) return;",
        "",
        "a tile is computed twice|a counter is not zero again",
    ),
    "the last CTA leaves its own counter": (
        "for (uint32_t cta = lane;",
        "for (uint32_t cta = lane + 1;",
        "a counter is not zero again",
    ),
    "no work stealing": ("victim < s->ctas;)", "victim < 0;)", "a CTA exits while a tile is unclaimed"),
    "CTAs of two tiles do not share": (
        "claimed && tiles.num > ctas;",
        "claimed && tiles.num > 2 * ctas;",
        "a tile is computed twice",
    ),
    "tiles taken in turn leave out the last": (
        "if (index < s->tiles.num) s->next",
        "if (index + 1 < s->tiles.num) s->next",
        "a tile is computed twice|a CTA takes steps for ever",
    ),
    "a thief takes a rotated CTA's tiles as if they were not": (
        "index = fused_moe_assigned_tile(s, victim, wave);",
        "index = s->ctas * wave + victim;",
        "a tile is not computed",
    ),
    "CTAs of skinny tiles leave the places of the others free": (
        "s->tiles.num_full + skinny_ctas * wave",
        "s->tiles.num_full + s->ctas * wave",
        "a tile is not computed|a CTA exits while a tile is unclaimed",
    ),
    "a thief sees a tile more than there is": (
        "claimed < assigned ? assigned - claimed : 0",
        "assigned + 1 - (claimed < assigned ? claimed : assigned)",
        "a CTA takes steps for ever",
    ),
}
SEEN_BY_THREADS = list(DEFECTS)[:4]


def edit(text, changes):
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the source"
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def build(cpu, tmp_path_factory):
    """Compiles the model, of code in which `old` is `new`, and returns a function that runs it."""
    if not CSRC.exists():
        pytest.skip("not in a checkout")
    if not shutil.which(CXX[0]):
        pytest.skip(f"no C++ compiler: {CXX[0]}")

    @cache
    def build(old=None, new=""):
        folder = tmp_path_factory.mktemp("model")
        schedule = edit((CSRC / "schedule.h").read_text(), STEPS)
        queue = (CSRC / "kernels/sm90/tile_queue.cuh").read_text()
        (reset,) = re.findall(r"^__device__ inline void reset_claims\(.*?^}\n", queue, re.M | re.S)
        reset = edit(reset, ONE_LANE)
        if old:
            assert (old in schedule) != (old in reset)
            schedule, reset = (edit(text, {old: new}) if old in text else text for text in (schedule, reset))
        (folder / "schedule.h").write_text(schedule)
        (folder / "reset_claims.h").write_text(reset)
        model, source = folder / "model", Path(__file__).with_name("schedule_model.cpp")
        flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-pthread", f"-I{folder}"]
        subprocess.run([*CXX, *flags, source, "-o", model], check=True)
        return lambda *arguments: subprocess.run([model, *arguments], capture_output=True, text=True)

    return build


def test_every_interleaving(build):
    """Up to three CTAs, some of which may never start, and up to six tiles."""
    run = build()("explore")
    assert run.returncode == 0, run.stdout
    (states,) = re.fullmatch(r"(\d+) states\n", run.stdout).groups()
    assert int(states) > 100_000


def test_threads(build):
    """Launches of up to 24 CTAs on eight threads, one after another on the same counters."""
    run = build()("threads", "1000")
    assert run.returncode == 0, run.stdout
    (tiles,) = re.fullmatch(r"(\d+) tiles\n", run.stdout).groups()
    assert int(tiles) > 50_000


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defects_are_found(build, defect):
    old, new, message = DEFECTS[defect]
    model = build(old, new)
    run = model("explore")
    assert run.returncode == 1 and re.match(f"({message}), with ", run.stdout), run.stdout
    if defect in SEEN_BY_THREADS:
        run = model("threads", "1000")
        assert run.returncode == 1, run.stdout
