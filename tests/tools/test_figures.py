"""docs/'s figures are those that tools/figures.py draws."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "figures.py"
if not SCRIPT.exists():
    pytest.skip("not in a checkout", allow_module_level=True)
spec = importlib.util.spec_from_file_location("figures", SCRIPT)
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_figure_is_drawn(cpu, name):
    assert (figures.DOCS / f"{name}.svg").read_text() == str(figures.FIGURES[name]()), (
        "python tools/figures.py draws it"
    )
