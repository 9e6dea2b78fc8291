"""tests/mutants.py: every mutant's text exists, and the records are of these mutants.

Skipped where there is no checkout, as when the tests run against an installed wheel.
"""

from pathlib import Path

import mutants
import pytest

pytestmark = pytest.mark.skipif(not (mutants.ROOT / "csrc").exists(), reason="not in a checkout")


def test_every_mutants_text_is_there_once(cpu):
    """Else it breaks nothing: a line that changed needs its mutant written anew."""
    for mutant in (*mutants.CPU, *mutants.CUDA):
        before, after = mutants.sole_place(mutant, mutants.ROOT)
        assert before != after, mutant.name
    assert len(mutants.CPU) >= 30 and len(mutants.CUDA) >= 10


def test_the_records_are_of_these_mutants(cpu):
    killers = mutants.read_killers()
    known = {(m.name, mutants.digest(m)) for m in (*mutants.CPU, *mutants.CUDA)}
    assert killers.keys() <= known, "python tests/mutants.py writes tests/mutants.tsv"
    assert all(killers.values()), "a mutant survived"


def test_the_list_has_every_mutant(cpu):
    listed = (*mutants.CPU, *mutants.CUDA)
    lines = mutants.table(listed).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {m.name}" for m in listed]
    untried = sum(line.endswith("| not tried yet |") for line in lines)
    assert untried == len(listed) - len(mutants.read_killers())


def test_a_mutant_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "some.c").write_text("int one  = 1;\nint two = 2;\nint two = 2;\n")
    mutant = mutants.Mutant("some", "some.c", "int one = 1;", "int one = 2;", "tests")
    assert mutants.sole_place(mutant, tmp_path)[1].startswith("int one = 2;\n")
    for wrong in ({"old": "int two = 2;"}, {"old": "int three"}, {"path": "other.c"}):
        with pytest.raises(SystemExit, match="^some: "):
            mutants.sole_place(mutant._replace(**wrong), tmp_path)
    assert Path(tmp_path / "some.c").read_text().startswith("int one  = 1;")
