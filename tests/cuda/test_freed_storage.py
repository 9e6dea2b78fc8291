"""A weight without memory, as FSDP2 leaves them after forward: every call raises before a kernel runs.

In a separate process: if a kernel does read freed memory, its CUDA context is lost.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, fused_moe

def free(w):
    w.untyped_storage().resize_(0)

def call(victim, in_backward):
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=in_backward)
    shapes = {"w1": (8, 128, 256), "w3": (8, 128, 256), "w2": (8, 256, 128)}
    weights = {n: torch.randn(s, device="cuda").div_(16).to(x.dtype) for n, s in shapes.items()}
    scores, ids = fused_moe.route(torch.randn(256, 8, device="cuda"), 2)
    arguments = {n: w.requires_grad_(in_backward) for n, w in weights.items()}
    if not in_backward:
        free(weights[victim])
    out = fused_moe.fused_experts(x, **arguments, scores=scores, ids=ids)
    if in_backward:
        free(weights[victim])
        out.float().sum().backward()

for in_backward in (False, True):
    for victim in ("w1", "w3", "w2"):
        try:
            call(victim, in_backward)
        except RuntimeError as error:
            assert "storage" in str(error) and "CUDA error" not in str(error), error
        else:
            raise AssertionError(f"{victim}: no error")
        torch.cuda.synchronize()
print("all raised")
"""


def test_every_call_raises():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["all raised"], run.stdout + run.stderr
