"""benchmarks/results: what is kept, what it says of itself, and who reads it."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MOST_BYTES = 500_000
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="not in a checkout")


def committed():
    return sorted(path for path in RESULTS.iterdir() if path.name != "README.md")


def test_every_record_is_listed_and_read():
    """README.md has each file once. A page or a program reads it, and the commits are its records'."""
    table = re.findall(
        r"^\| (\S+\.\w+) \| .*? \| (.*?) \|", (RESULTS / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in table) == [path.name for path in committed()]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests" / "trust").glob("*.py")]
    texts = [path.read_text() for path in (*pages, *programs)]
    unread = [name for name, _ in table if not any(name in text for text in texts)]
    assert not unread
    for name, commits in table:
        if commits != "several" and name.endswith(".json"):
            found = {r["commit"] for r in json.loads((RESULTS / name).read_text())}
            assert found == set(commits.split(", ")), name


def test_records_are_small():
    assert sum(path.stat().st_size for path in committed()) < MOST_BYTES


@pytest.mark.parametrize(
    "path", [path for path in committed() if path.suffix == ".json"], ids=lambda p: p.name
)
def test_every_record_says_what_it_is_of(path):
    """A commit, a day, and the card or the CPU."""
    for r in json.loads(path.read_text()):
        assert re.fullmatch(r"[0-9a-f]{7}", r["commit"]), r
        assert re.match(r"20\d\d-\d\d-\d\d", r["date"]), r
        machine = r.get("gpu") or r.get("where")
        assert machine and (machine != "none" or r["cpu"]), r


def test_what_is_kept_of_a_record(load, tmp_path):
    """All that is not None, usual or unread; what is usual comes back."""
    records, common = load("records"), load("common")
    r = dict.fromkeys(common.FIELDS) | {"bench": "layer", "routing": "random", "schedule": "default"}
    r |= {"gpu": "NVIDIA H200", "cpu": "a", "threads": 2, "time_us": 1.23456789, "max_rel_error": 0.0012345}
    r |= {"losses": [1, 2], "final_loss": 2.345678912, "model": {"layers": 2}, "mode": "eager"}
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a_h200.json").write_text(json.dumps([r, r | {"routing": "one", "gpu": "none"}]))
    records.main([str(tmp_path / "from"), "-o", str(tmp_path / "to")])
    text = (tmp_path / "to" / "a_h200.json").read_text()
    first, second = json.loads(text)
    assert text.count("\n") == 4 and first == {
        "bench": "layer",
        "time_us": 1.23456789,
        "max_rel_error": 0.0012,
        "mode": "eager",
        "gpu": "NVIDIA H200",
        "final_loss": 2.34568,
    }
    assert (second["routing"], second["cpu"], second["threads"]) == ("one", "a", 2)
    back = common.read(tmp_path / "to" / "a_h200.json")[0]
    assert (back["routing"], back["schedule"], back["dense_ratio"]) == ("random", "default", None)


@pytest.mark.parametrize(
    "path", [path for path in committed() if path.suffix == ".json"], ids=lambda p: p.name
)
def test_committed_records_are_what_is_kept(load, path):
    if path.name != "trust.json":  # tests/trust/record.py's
        assert load("records").text(json.loads(path.read_text())) == path.read_text()
