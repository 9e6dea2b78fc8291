"""examples/generate.py: text and logits are those of forward passes without a cache; quantised experts;
flags and reports."""

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

SCRIPT = Path(__file__).parent.parent / "examples" / "generate.py"
SEQ_LEN = 32
SIZES = f"--layers 2 --dim 64 --hidden-dim 32 --num-experts 8 --top-k 2 --seq-len {SEQ_LEN} --batch-size 8"
PROMPT = b"the quick "
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32, of logits up to about 10


@pytest.fixture(scope="module")
def generate():
    """The script as a module. Not imported above: the wheel's tests run without examples/."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("generate")


@pytest.fixture(scope="module")
def run(generate, device, tmp_path_factory):
    """The folder of a tiny run of --compare, which has both kinds of experts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    for i in range(4):
        lines = (f"{i * n}: the quick brown fox jumps over {n} lazy dogs.\n" for n in range(200))
        (folder / "text" / f"{i}.txt").write_text("".join(lines))
    flags = f"{SIZES} --compare --steps 40 --lr 0.01 --device {device.type}".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.train_lm, "GENERATED_BYTES", 1)
        generate.train_lm.main([*flags, "--data", str(folder / "text"), "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def saved(run):
    return torch.load(run / "checkpoint.pt", weights_only=True)


@pytest.fixture
def model(generate, saved, device):
    """model(experts, dtype) -> the trained model, as it is loaded."""

    def load(experts="fused", dtype="float32"):
        args = argparse.Namespace(experts=experts, dtype=dtype, device=device)
        return generate.load_model(saved, args)

    return load


@pytest.fixture
def decoder(generate, model, device):
    """decoder(...) -> a Decoder of the trained model, on a GPU with its graph."""

    def new(batch=1, temperature=0.0, experts="fused"):
        found = generate.Decoder(model(experts), SEQ_LEN, batch, temperature)
        if device.type == "cuda" and experts == "fused":
            found.capture(PROMPT)
        return found

    return new


def texts(decoder, count, prompt=PROMPT, seed=0):
    """`count` bytes of every sequence."""
    return [bytes(row) for row in torch.cat(list(decoder.run(prompt, count, seed)), dim=1).tolist()]


def tensor(text, device):
    return torch.tensor([list(text)], device=device)


@pytest.mark.parametrize("experts", ("fused", "loop"))
def test_greedy_text_is_that_of_full_forward_passes(decoder, model, device, experts):
    reference, cached, text = model(experts), decoder(experts=experts), PROMPT
    for made in cached.run(PROMPT, SEQ_LEN - len(PROMPT) + 1, seed=0):
        with torch.no_grad():
            logits = reference(tensor(text, device))[:, -1]
        torch.testing.assert_close(cached.logits, logits, **CLOSE)
        assert made.item() == logits.argmax()
        text += bytes([made.item()])
    assert text.startswith(b"the quick brown fox")


def test_a_full_ring_holds_the_last_positions(decoder, model, device):
    """Against one forward pass over the whole text without a cache, where each byte attends to the last
    SEQ_LEN: the logits of every byte, and what the ring holds in the end."""
    cached, text, found = decoder(temperature=1.0), PROMPT, []
    for made in cached.run(PROMPT, 3 * SEQ_LEN, seed=0):
        found.append(cached.logits.clone())
        text += bytes([made.item()])
    text = text[:-1]  # the last has not run
    reference, projected = model(), []
    distance = torch.arange(len(text))[:, None] - torch.arange(len(text))
    window = ((distance >= 0) & (distance < SEQ_LEN)).to(device)

    def attend(q, k, v):
        projected.append((k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=window)

    for block in reference.blocks:
        block.attention.attend = attend
    with torch.no_grad():
        expected = reference(tensor(text, device))[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.cat(found), expected, **CLOSE)
    last = torch.arange(len(text) - SEQ_LEN, len(text), device=device)
    for block, tensors in zip(cached.model.blocks, projected, strict=True):
        for ring, whole in zip(block.attention.attend.args, tensors, strict=True):
            assert ring.shape[2] == SEQ_LEN
            torch.testing.assert_close(ring[:, :, last % SEQ_LEN], whole[:, :, last], **CLOSE)


def test_each_of_a_batch_is_the_single_one(decoder):
    (single,) = texts(decoder(), 50)
    assert len(set(single)) > 10
    assert texts(decoder(batch=3), 50) == [single] * 3


def test_seeds(decoder):
    sampling = decoder(batch=2, temperature=1.0)
    first, second = texts(sampling, 50, seed=1)
    assert first != second
    assert texts(sampling, 50, seed=1) == [first, second]
    assert not {first, second} & set(texts(sampling, 50, seed=2))


@pytest.mark.parametrize("temperature", (0.5, 1.5))
def test_samples_follow_the_softmax(decoder, temperature):
    """The first byte of many sequences, and not the softmax of another temperature."""
    many = decoder(batch=2048, temperature=temperature)
    first = torch.cat([made for seed in range(8) for made in many.run(b"\n", 1, seed)]).flatten()
    frequencies = torch.bincount(first, minlength=256) / len(first)
    for other in (0.5, 1.0, 1.5):
        difference = (frequencies - (many.logits[0] / other).softmax(0)).abs().sum()
        assert difference < 0.1 if other == temperature else difference > 0.2


def test_a_long_prompt_is_cut(decoder):
    text = b"0: the quick brown fox jumps over 8 lazy dogs, again and again"
    logits = []
    for prompt in (text, text[-SEQ_LEN:], text[1 - SEQ_LEN :]):
        cached = decoder()
        cached.start(prompt, seed=0)
        assert cached.position == min(len(prompt), SEQ_LEN)
        logits.append(cached.logits)
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_the_model_stays_as_it_is(decoder):
    cached = decoder(batch=2)
    moes = [block.moe for block in cached.model.blocks]
    before = {name: value.clone() for name, value in cached.model.state_dict().items()}
    texts(cached, 10)
    after = cached.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(moe.tokens_per_expert.any() for moe in moes)


# Bits per weight of the float32 model: of the codes, and of a scale's part. A row has 64, 32 or 64 values.
BY_ROW = 8 + (32 / 64 + 32 / 32 + 32 / 64) / 3
BITS = {"fp8_block": 8 + 32 / (64 * 32), "fp8": BY_ROW, "int8": BY_ROW, "int4": 4 + 32 / 32, "mxfp4": 4.25}
SMOOTH = (32 / 32 + 32 / 64 + 32 / 32) / 3  # float32 for each column
WEIGHTS = 2 * 3 * 8 * 64 * 32  # layers, matrices, experts, widths


@pytest.mark.parametrize("format", BITS)
def test_quantised_experts(generate, run, device, capsys, format):
    flags = f"--quantize {format} --prompt the --bytes 16 --temperature 0 --device {device.type}".split()
    generate.main(["--run", str(run), *flags])
    title, text, _ = capsys.readouterr().out.split("\n\n")
    assert title.endswith(f"\nexperts: {4 * WEIGHTS:,} bytes, {BITS[format] * WEIGHTS / 8:,.0f} as {format}")
    assert text.startswith("the quick brown fox")


@pytest.mark.parametrize("experts", ("fused", "loop"))
def test_the_loss_of_every_format(generate, run, saved, device, capsys, experts):
    """A row and a record each; that of the trained model has the loss that training reported."""
    generate.main(["--run", str(run), "--evaluate", "--experts", experts, "--device", device.type])
    records = json.loads((run / "formats.json").read_text())
    eight_bits = [("fp8_block", None), ("fp8", None), ("int8", None)]
    if device.type == "cpu":  # float32 beside 8-bit activations
        ways = [("fp8_block", "fp8"), ("fp8", "fp8"), ("int8", "int8"), ("int8", "int8_smooth")]
        eight_bits = sorted(eight_bits + ways, key=lambda way: ("fp8_block", "fp8", "int8").index(way[0]))
    rest = [(name, None) for name in ("int4", "int4", "mxfp4")]
    assert [(r["format"], r.get("compute")) for r in records] == [("float32", None), *eight_bits, *rest]
    assert [(r["group_size"], r["symmetric"]) for r in records[-3:-1]] == [(32, True), (32, False)]
    trained = saved[experts]["log"][-1]["bits_per_byte"]
    assert records[0]["loss"] == pytest.approx(trained, rel=1e-5) and records[0]["loss_change"] == 0
    for r in records[1:]:
        bits = BITS[r["format"]] + (0.25 if r.get("symmetric") is False else 0)
        bits += SMOOTH if r.get("compute") == "int8_smooth" else 0
        assert r["bytes"] == bits * WEIGHTS / 8
        assert r["loss_change"] == r["loss"] - records[0]["loss"]
        assert 0 < abs(r["loss_change"]) < 0.1 * trained
    for r in records:
        assert (r["experts"], r["step"], r["dtype"]) == (experts, 40, "float32")
        assert r["versions"].keys() == {"python", "torch", "fused_moe"}
    printed = capsys.readouterr().out
    lines = [line for line in printed.split("\n\n")[1].splitlines() if "is left out" not in line]
    rows = [line.rsplit(maxsplit=3) for line in lines]
    assert rows[0] == ["experts                      bits per", "byte", "change", "bytes"]
    names = [format + (f", compute {compute}" if compute else "") for format, compute in eight_bits]
    names += ["int4 of 32", "int4 of 32, zero points", "mxfp4"]
    assert [row[0] for row in rows[1:]] == ["float32", *names]
    assert [row[1:] for row in rows[1:]] == [
        [f"{r['loss']:.4f}", f"{r['loss_change']:+.4f}", f"{r['bytes']:,}"] for r in records
    ]
    assert printed.endswith(f"wrote {run / 'formats.json'}\n")


def test_formats_that_the_widths_do_not_take(generate, run, device, capsys):
    flags = f"--evaluate --group-size 64 --dtype bfloat16 --device {device.type}".split()
    generate.main(["--run", str(run), *flags])
    message = "int4 is left out: the run's --hidden-dim 32 is not a multiple of --group-size 64"
    assert capsys.readouterr().out.count(message) == 1
    records = json.loads((run / "formats.json").read_text())
    formats = list(dict.fromkeys(r["format"] for r in records))
    assert formats == ["bfloat16", "fp8_block", "fp8", "int8", "mxfp4"]
    ways = {(r["format"], r.get("compute")) for r in records}
    assert {("fp8_block", "fp8"), ("int8", "int8"), ("int8", "int8_smooth")} <= ways
    reason = generate.misfit({"dim": 48, "hidden_dim": 64}, "mxfp4", 64)
    assert reason == "the run's --dim 48 is not a multiple of 32"
    reason = generate.misfit({"dim": 24, "hidden_dim": 64}, "int8", 64, generate.EIGHT_BIT_WIDTHS)
    assert reason == "the run's --dim 24 is not a multiple of 16"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("batch", (1, 5))
def test_the_graph_is_the_eager_step(generate, model, dtype, batch):
    """The same samples and bits, through a ring that overflows, and again after another start."""

    def results(decoder, prompt, seed):
        return [(made, decoder.logits.clone()) for made in decoder.run(prompt, 3 * SEQ_LEN, seed)]

    eager, graph = (generate.Decoder(model(dtype=dtype), SEQ_LEN, batch, 1.0) for _ in range(2))
    graph.capture(PROMPT)
    for seed, prompt in enumerate((PROMPT, b"0: the")):
        pairs = zip(results(eager, prompt, seed), results(graph, prompt, seed), strict=True)
        for number, (expected, found) in enumerate(pairs):
            assert all(map(torch.equal, expected, found)), f"step {number} of seed {seed}"


def test_a_single_text_is_printed_as_it_is_made(generate, run, device, monkeypatch, capsys):
    step, printed = generate.Decoder.step, []

    def watched(decoder):
        printed.append(capsys.readouterr().out)
        step(decoder)

    monkeypatch.setattr(generate.Decoder, "step", watched)
    flags = "--prompt fox --bytes 5 --temperature 0".split()
    generate.main(["--run", str(run), "--device", device.type, *flags])
    assert re.search(r"\n\nfox.$", printed[0], re.DOTALL)
    assert [len(part) for part in printed[1:]] == [1, 1, 1]


def test_several_texts_are_printed_in_the_end(generate, run, device, capsys):
    flags = "--prompt fox --bytes 5 --temperature 0 --batch 3".split()
    generate.main(["--run", str(run), "--device", device.type, *flags])
    parts = capsys.readouterr().out.split("----")
    assert [part.strip() for part in parts[1::2]] == ["1 of 3", "2 of 3", "3 of 3"]
    assert parts[2].strip().startswith("fox") and parts[2] == parts[4]
    assert "decode: 12 bytes, " in parts[-1]


def test_the_command(run, device, tmp_path):
    """The newest run below the current folder, in the dtype that it was trained in."""
    for name, dtype in (("older", "float32"), ("newer", "bfloat16")):
        state = torch.load(run / "checkpoint.pt", weights_only=True)
        state["config"]["dtype"] = dtype
        (tmp_path / "runs" / name).mkdir(parents=True)
        torch.save(state, tmp_path / "runs" / name / "checkpoint.pt")
    flags = ["--prompt", "the quick é ", "--bytes", "20", "--device", device.type]
    command = [sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    title, text, report = done.stdout.split("\n\n")
    assert re.fullmatch(r"runs/newer, fused, step 40; .*, bfloat16", title)
    assert text.startswith("the quick .. ")
    pattern = (
        r"prefill: 13 bytes, first byte after [\d.]+ ms\n"
        r"decode: 19 bytes, [\d,]+ bytes/s, [\d.]+ ms per step\n"
    )
    assert re.fullmatch(pattern, report)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bytes 0", "--bytes: must be at least 1, not 0"),
        ("--batch 0", "--batch: must be at least 1, not 0"),
        ("--temperature -1", "--temperature: must be finite and at least 0, not -1.0"),
        ("--temperature nan", "--temperature: must be finite and at least 0, not nan"),
        ("--dtype float16", "--dtype: invalid choice: 'float16'"),
        ("--experts slow", "--experts: invalid choice: 'slow'"),
        ("--prompt=", "--prompt is empty"),
        ("--device cuda", "--device cuda: PyTorch sees no GPU"),
        ("--run nowhere", "--run: no checkpoint.pt in nowhere"),
        ("--quantize int5", "--quantize: invalid choice: 'int5'"),
        ("--quantize int8 --evaluate", "--evaluate: not allowed with argument --quantize"),
        ("--quantize int4 --group-size 48", "--group-size: invalid choice: 48"),
        (
            "--quantize int4 --group-size 64",
            "--quantize int4: the run's --hidden-dim 32 is not a multiple of --group-size 64",
        ),
    ],
)
def test_bad_flags_are_named(generate, run, flags, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--run", str(run), *flags.split()])
    assert message in capsys.readouterr().err


def test_a_missing_checkpoint_or_model_is_named(generate, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        generate.main([])
    assert "--run: no checkpoint.pt in runs/*" in capsys.readouterr().err
    file = tmp_path / "checkpoint.pt"
    torch.save({"config": saved["config"], "loop": saved["loop"]}, file)
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--run", str(tmp_path)])
    assert f"--experts fused: {file} has only loop" in capsys.readouterr().err


def test_evaluating_without_the_text_is_refused(generate, saved, tmp_path, capsys):
    config = saved["config"] | {"data": str(tmp_path / "moved")}
    torch.save(saved | {"config": config}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--run", str(tmp_path), "--evaluate"])
    assert f"--evaluate: the run's text, {tmp_path / 'moved'}, is no folder" in capsys.readouterr().err
