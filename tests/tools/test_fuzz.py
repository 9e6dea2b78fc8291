"""tests/trust/fuzz.py: finds nothing in a few cases, and finds what is planted."""

import math
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fused_moe

sys.path.insert(0, str(Path(__file__).parents[1] / "trust"))
import fuzz  # noqa: E402
import fuzz_cases  # noqa: E402
from fuzz_cases import FUNCTIONS, FuzzCase, Shares, draw, is_legal  # noqa: E402
from fuzz_checks import check  # noqa: E402

EAGER = Shares(0, 0)


def run(indices) -> fuzz.Report:
    total = fuzz.Report()

    def report(part):
        total.counts.update(part.counts)
        total.findings.extend(part.findings)

    fuzz.run_cases(0, indices, "cpu", EAGER, lambda index: None, report)
    return total


def test_nothing_is_found(cpu):
    total = run(range(100))
    assert not total.findings, "\n".join(total.findings)
    assert total.counts["cases"] == total.counts["eager"] == 100
    assert all(total.counts[name] for name in FUNCTIONS)


def test_a_case_is_its_seed_and_index(cpu):
    """Drawn twice it is the same, and what is printed is the case."""
    cases = [draw(3, i) for i in range(300)]
    assert [repr(draw(3, i)) for i in range(300)] == [*map(repr, cases)]
    assert len(set(map(repr, cases))) == 300
    for case in cases:
        assert is_legal(case)
        assert repr(eval(repr(case))) == repr(case)
    assert {case.mode for case in cases} >= {"eager", "aot_eager"}


@pytest.mark.parametrize("beside", [False, True])
def test_compiled_cases_are_legal(monkeypatch, beside):
    """Whether this PyTorch compiles main_grads or not."""
    monkeypatch.setattr(fuzz_cases, "WRITES_BESIDE_VIEWS", beside)
    cases = [draw(4, i, Shares(9000, 1000)) for i in range(500)]
    assert all(is_legal(case) for case in cases)
    compiled = [case for case in cases if case.mode != "eager"]
    assert len(compiled) > 400
    assert any(case.main_grads for case in compiled) != beside


# --- faults: each is a wrong fused_experts --------------------------------------------------------

RIGHT = fused_moe.fused_experts


def one_row_too_large(x, *args, **options):
    out = RIGHT(x, *args, **options)
    return torch.cat([out[:-1], 1.1 * out[-1:]])


def one_gradient_too_large(x, w1, *args, **options):
    return RIGHT(x, 1.1 * w1 - 0.1 * w1.detach(), *args, **options)


def writes_x(x, *args, **options):
    out = RIGHT(x, *args, **options)
    x.data.abs_()  # .data: past autograd's own check
    return out


def writes_behind_x(x, *args, **options):
    past = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    x.detach().as_strided((1,), (1,), past).zero_()
    return RIGHT(x, *args, **options)


def differs_between_runs(x, *args, calls=[], **options):  # noqa: B006 - counts its calls
    calls.append(None)
    out = RIGHT(x, *args, **options)
    return out.nextafter(out.new_tensor(math.inf)) if len(calls) % 2 else out


def mixes_tokens(x, *args, **options):
    out = RIGHT(x, *args, **options)
    return out + 0 * out.sum().detach()


def raises_at_one_token(x, *args, **options):
    if len(x) == 1:
        raise RuntimeError("one token")
    return RIGHT(x, *args, **options)


FAULTS = {
    one_row_too_large: "AssertionError: out: error",
    one_gradient_too_large: "AssertionError: dw1: error",
    writes_x: "AssertionError: x: memory was written",
    writes_behind_x: "AssertionError: x: memory was written",
    differs_between_runs: "AssertionError: a second run: out differs",
    mixes_tokens: "AssertionError: out: (nan|inf|-inf) of another token's row",
    raises_at_one_token: "RuntimeError: one token",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_made_small(cpu, monkeypatch, fault):
    """The finding is a test that fails, of a small case."""
    monkeypatch.setattr(fused_moe, "fused_experts", fault)
    indices = (i for i in range(1000) if is_plain(draw(0, i, EAGER), fault))
    total = run([next(indices)])
    [finding] = total.findings
    title, _, test = finding.partition("\n\n")
    assert re.fullmatch(rf"0:\d+: {FAULTS[fault]}.*", title), title
    names = {}
    exec(test, names)
    [test] = (value for name, value in names.items() if name.startswith("test_fuzz_0_"))
    with pytest.raises((AssertionError, RuntimeError)):
        test("cpu")
    [case] = re.findall(r"check\((FuzzCase\(.*\)), device\)", finding)
    case = eval(case)
    assert case.tokens <= 2 and max(case.dim, case.hidden, case.num_experts, case.top_k) <= 2, case
    assert case.forms == () and case.layout == "separate" and case.routing == "random", case
    monkeypatch.undo()
    test("cpu")


def is_plain(case: FuzzCase, fault) -> bool:
    """A case that the fault shows in."""
    return (
        case.function == "fused_experts"
        and case.dtype == torch.float32
        and case.grad == "grad"
        and not {"x", "w1"} & {*case.frozen, *case.main_grads}
        and (case.tokens == 1 if fault is raises_at_one_token else case.tokens > 1)
        and case.routing not in ("none", "sentinels")
        and case.form("x") == "contiguous"
        and (fault is not mixes_tokens or case.planted is not None and case.planted[0] == "x")
    )


def test_guards_around_main_grads(cpu, monkeypatch):
    """A wrong main_grad is found, and so is a wrong element after it."""
    case = FuzzCase(tokens=5, main_grads=("w2",))
    check(case)

    def writes_behind(*args, main_grads, **options):
        grad = main_grads[1]
        grad.as_strided((1,), (1,), grad.storage_offset() + grad.numel()).fill_(1)
        return RIGHT(*args, main_grads=main_grads, **options)

    def adds_more(*args, main_grads, **options):
        main_grads[1].add_(0.5)
        return RIGHT(*args, main_grads=main_grads, **options)

    for fault, message in ((writes_behind, "memory was written"), (adds_more, "main_grad of w2: error")):
        monkeypatch.setattr(fused_moe, "fused_experts", fault)
        with pytest.raises(AssertionError, match=message):
            check(case)


def aborts_at_three(connection, now, seed, indices, *_):
    """A worker."""

    def started(index):
        now[0] = index
        if index == 3:
            os.abort()

    fuzz.run_cases(seed, [i for i in indices if i < 6], "cpu", EAGER, started, connection.send)


def test_a_crash_is_found(cpu, capfd):
    """The case that ran is named, the rest of them run in another process."""
    options = fuzz.parse(["--cases", "6"])
    total = fuzz.run_workers(options, aborts_at_three)
    [finding] = total.findings
    assert finding.startswith("0:3: exit code -6\n") and "def test_fuzz_0_3(device)" in finding
    assert total.counts["cases"] >= 3  # 3, 4 and 5; what ran before 3 may not have been reported yet
