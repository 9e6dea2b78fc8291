"""tests/trust/soak.py on the CPU: it trains without a finding, and finds what is planted."""

import json

import pytest
import torch
from trust import soak


@pytest.fixture
def make(cpu, tmp_path):
    """A soak of tiny steps."""

    def make(minutes="0.001") -> soak.Soak:
        args = [
            "--minutes",
            minutes,
            "--seed",
            "3",
            "--device",
            "cpu",
            "--record",
            str(tmp_path / "soak.json"),
        ]
        made = soak.Soak(soak.parse(args))
        made.max_tokens = 8
        return made

    return make


def test_steps_are_recorded(make, tmp_path):
    run = make()
    run.train()
    run.run_again()
    run.check()
    assert run.run() == 0
    (record,) = json.loads((tmp_path / "soak.json").read_text())
    assert record["what"] == "soak" and record["seed"] == 3 and record["findings"] == 0
    assert record["counts"]["steps"] >= 6 and record["counts"]["replays compared"] >= 1


def test_a_seed_determines_the_steps(make):
    losses = []
    for _ in range(2):
        run = make()
        run.train()
        run.run_again()
        losses.append(torch.stack(run.losses))
    assert torch.equal(*losses)


def test_other_bits_are_found(make, monkeypatch):
    run, forward = make(), soak.FusedMoE.forward
    run.train()
    monkeypatch.setattr(
        soak.FusedMoE, "forward", lambda self, x: forward(self, x) + torch.rand(()).to(x.dtype)
    )
    run.run_again()
    assert len(run.findings) == 1 and "has other bits" in run.findings[0][1]


def test_calls_at_once_are_counted_and_compared(make):
    run = make()
    run.call_at_once()
    assert run.counts["calls at once"] == 80 and not run.findings
    run.calls.expected[0][0].add_(1)
    for _ in range(3):
        run.call_at_once()
    (finding,) = run.findings
    assert "other bits" in finding[1]


def test_an_exception_in_a_thread_is_found(make, monkeypatch):
    run = make()
    monkeypatch.setattr(run.calls, "run", lambda index: 1 / 0)
    run.call_at_once()
    assert "ZeroDivisionError" in run.findings[0][1]


def test_a_loss_that_is_not_finite_is_found(make):
    run = make()
    with torch.no_grad():
        run.trainees[1].model.layers[0].router.gate.weight.fill_(torch.nan)
    run.train()
    run.check()
    assert run.findings == [(run.counts["steps"], "a loss is not finite")]


def test_an_exception_is_a_finding(make, monkeypatch, tmp_path):
    run = make()
    monkeypatch.setattr(run.trainees[0], "step", lambda *_, **__: 1 / 0)
    assert run.run() == 1
    (record,) = json.loads((tmp_path / "soak.json").read_text())
    assert record["findings"] == 1


def test_out_of_memory_of_another_type_is_found(make):
    """PyTorch's own is survived; another exception with the same text, too, but it is a finding."""
    run = make()
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA out of memory")):
        assert not run.findings
        with run.survived_out_of_memory(run.trainees[0]):
            raise error
    assert run.counts["ooms survived"] == 2 and "RuntimeError" in run.findings[0][1]
    with pytest.raises(RuntimeError, match="misaligned"), run.survived_out_of_memory(run.trainees[0]):
        raise RuntimeError("misaligned address")
