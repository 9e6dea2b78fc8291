"""examples/grpo.py on a GPU: sampler and trainer have the same bits with ours, and not without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.mark.parametrize("variant", ("", "--stock", "--moe-only"))
def test_bits(device, tmp_path, variant):
    """Qwen3-30B-A3B's widths, from one sequence at once to 128. cuBLAS was seen to change its sums with 4096
    inputs and up to 64 tokens, which is attention's last product."""
    path = tmp_path / "grpo.json"
    flags = f"{variant} --steps 2 --layers 1 --new 40 --json {path}".split()
    run = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (record,) = json.loads(path.read_text())
    for step in record["figures"]:
        assert step["sequences"][0] <= 4 and step["sequences"][1] == 128 and step["tokens"] > 1000
        if variant:
            assert step["tokens_that_differ"] > 0 and step["largest_difference"] > 0
        else:
            assert step["tokens_that_differ"] == 0 and step["largest_difference"] == 0 and step["kl"] == 0
