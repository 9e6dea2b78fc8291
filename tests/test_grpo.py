"""examples/grpo.py on a CPU: what it learns, packing, continuous batching, its loss and its reports."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "grpo.py"
SMALL = "--tiny --prompts 2 --group 3 --at-once 4 --new 6 --device cpu".split()
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, of log-probabilities of a few units


@pytest.fixture(scope="module")
def grpo():
    """The script as a module. Not imported above: the wheel's tests run without examples/."""
    if not SCRIPT.exists():
        pytest.skip("needs examples/")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("grpo")


@pytest.fixture
def model(grpo):
    torch.manual_seed(1)
    return grpo.Model(grpo.parse(SMALL), device="cpu", dtype=torch.float32)


def test_it_learns(grpo, capsys, tmp_path):
    """The tiny run ends with nearly all letters, and reports what it says that it reports."""
    path = tmp_path / "grpo.json"
    for steps in ("24", "1"):  # the second run adds its record
        grpo.main(["--tiny", "--steps", steps, "--device", "cpu", "--json", str(path)])
    lines = capsys.readouterr().out.splitlines()
    line = re.compile(r" *\d+, [\d.]+; \d\.\de-\d+, \d+ of \d+, -?\d\.\de[+-]\d+; \d+ to \d+; [\d,]+, [\d,]+")
    assert all(line.fullmatch(text) for text in lines[2:26])
    assert re.fullmatch("fused_moe: (the same bits .*|sampler and trainer differ in .* tokens)", lines[26])
    first, second = json.loads(path.read_text())
    rewards = [step["reward"] for step in first["figures"]]
    assert first["variant"] == "fused_moe" and len(rewards) == 24 and rewards[-1] > 0.9 > 0.3 > rewards[0]
    assert [step["reward"] for step in second["figures"]] == pytest.approx(rewards[:1])
    assert all(step["largest_difference"] < 1e-4 and step["kl"] < 1e-8 for step in first["figures"])
    assert all((step["kl"] > 0) == (step["tokens_that_differ"] > 0) for step in first["figures"])
    assert min(step["sequences"][0] for step in first["figures"]) < 5


@pytest.mark.parametrize("flag, name", (("--moe-only", "moe-only"), ("--stock", "stock")))
def test_variants(grpo, capsys, flag, name):
    if flag == "--stock":
        try:
            x = torch.randn(8, 8)
            torch._grouped_mm(x, x[None], offs=torch.tensor([8], dtype=torch.int32))
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            pytest.skip(f"this PyTorch has no torch._grouped_mm of float32 on CPUs: {error}")
    grpo.main([*SMALL, flag, "--steps", "1"])
    assert f"{name}: " in capsys.readouterr().out


def test_packed_sequences_are_those_alone(grpo, model):
    """Also in parts, with a cache."""
    lengths = [9, 1, 14]
    tokens = [torch.randint(grpo.VOCAB, (n,)) for n in lengths]
    packed = model(torch.cat(tokens), grpo.batch_of(range(3), lengths, lengths, "cpu")).split(lengths)
    for one, found in zip(tokens, packed, strict=True):
        alone = model(one, grpo.batch_of([0], [len(one)], [len(one)], "cpu"))
        torch.testing.assert_close(found, alone, **CLOSE)
    shape = 3, 14, 2, 2, grpo.HEAD_DIM
    caches = [torch.full(shape, torch.nan) for _ in model.blocks]
    first, rest = [8, 1, 5], [1, 0, 9]
    parts = torch.cat([t[:n] for t, n in zip(tokens, first, strict=True)])
    model(parts, grpo.batch_of([2, 0, 1], first, first, "cpu"), caches)
    late = torch.cat([tokens[0][8:], tokens[2][5:]])
    found = model(late, grpo.batch_of([2, 1], [9, 14], [rest[0], rest[2]], "cpu"), caches).split([1, 9])
    torch.testing.assert_close(found[0], packed[0][8:], **CLOSE)
    torch.testing.assert_close(found[1], packed[2][5:], **CLOSE)


@pytest.mark.parametrize("at_once", (1, 3, 7))
def test_a_sequence_does_not_depend_on_its_batches(grpo, model, at_once):
    """Whatever else is sampled, at any number of places; bytes past its length stay zeros."""
    torch.manual_seed(2)
    prompts, lengths = torch.randint(grpo.VOCAB, (7, grpo.PROMPT)), [9, 14, 10, 14, 11, 9, 13]
    noise = torch.rand(7, 6, grpo.VOCAB).log().neg().log().neg()
    tokens, logps, sizes = grpo.sample(model, prompts, lengths, noise, at_once)
    assert max(sizes) == at_once and sum(sizes) == sum(lengths) - 7 * grpo.PROMPT
    for i, length in enumerate(lengths):
        alone, logp, _ = grpo.sample(model, prompts[i : i + 1], lengths[i : i + 1], noise[i : i + 1], 1)
        assert torch.equal(tokens[i, :length], alone[0]) and not tokens[i, length:].any()
        torch.testing.assert_close(logps[i, :length], logp[0], **CLOSE)


def test_samples_follow_the_distribution(grpo, model):
    """One byte, sampled 4,000 times: its frequencies are its probabilities."""
    prompts = torch.arange(grpo.PROMPT).expand(4000, -1)
    noise = torch.rand(4000, 1, grpo.VOCAB).clamp_min(1e-30).log().neg().log().neg()
    tokens, _, _ = grpo.sample(model, prompts, [grpo.PROMPT + 1] * 4000, noise, 4000)
    known = [grpo.PROMPT]
    probabilities = model(prompts[0], grpo.batch_of([0], known, known, "cpu"))[-1].exp()
    found = torch.bincount(tokens[:, -1], minlength=grpo.VOCAB) / 4000
    assert (found - probabilities).abs().sum() < 0.25  # about 0.2 is expected of 4,000 samples of 256 bytes


def test_reward_and_loss(grpo):
    tokens = torch.tensor([[*b"abc{"], [*b"zA`z"], [*b"aaaa"]])
    is_new = torch.tensor([[False, True, True, True], [True] * 4, [False, False, False, True]])
    assert grpo.rewards_of(tokens, is_new).tolist() == pytest.approx([2 / 3, 0.5, 1.0])
    new = torch.randn(5, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5, -0.5])
    loss = grpo.loss_of(new, new.detach(), advantages)  # the first update: the ratio is 1
    (gradient,) = torch.autograd.grad(loss, new)
    assert loss == -advantages.mean() and torch.equal(gradient, -advantages / 5)
    clipped = grpo.loss_of(new.detach() + 1, new.detach(), torch.ones(5))
    assert float(clipped) == pytest.approx(-1.2)


@pytest.mark.parametrize(
    "flags, said",
    (
        ("--layers 0", "expected layers above 0, found 0"),
        ("--group 1", "expected group above 1, found 1"),
        ("--steps x", "invalid int value"),
        ("--variant none", "unrecognized arguments"),
    ),
)
def test_wrong_flags(grpo, capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        grpo.parse(flags.split())
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_verdict_counts_tokens(grpo, monkeypatch, capsys):
    """NaN after a step of equal bits is no equality, though max(0.0, nan) is 0.0."""
    rest = {"sequences": [1, 4], "sampler_tokens_per_s": 1.0, "trainer_tokens_per_s": 1.0}
    equal = {"reward": 0.5, "largest_difference": 0.0, "tokens": 9, "tokens_that_differ": 0, "kl": 0.0} | rest
    broken = equal | {"largest_difference": float("nan"), "tokens_that_differ": 9, "kl": float("nan")}
    for second, verdict in ((equal, "the same bits in every"), (broken, "sampler and trainer differ in 9")):
        figures = iter((equal, second))
        monkeypatch.setattr(grpo, "run_step", lambda *_, figures=figures: next(figures))
        grpo.main([*SMALL, "--steps", "2"])
        assert f"fused_moe: {verdict} token" in capsys.readouterr().out
