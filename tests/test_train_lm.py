"""examples/train_lm.py: it learns, agrees with the for-loop, gives the same in two processes, and resumes."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "train_lm.py"
# Small, but with every part of the default run except its three blocks.
TINY = "--layers 2 --dim 32 --hidden-dim 16 --num-experts 8 --top-k 2 --seq-len 32 --batch-size 8".split()


@pytest.fixture(scope="module")
def train_lm():
    """The script as a module. Not imported above: the wheel's tests run without examples/."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(train_lm, device, tmp_path):
    """train(*flags, out=NAME) -> the log of a tiny run."""

    def run(*flags, out="run"):
        folder = tmp_path / out
        train_lm.main([*TINY, "--device", device.type, "--out", str(folder), *map(str, flags)])
        return json.loads((folder / "log.json").read_text())

    return run


@pytest.fixture
def torchrun(train_lm, device, tmp_path):
    """torchrun(*flags, out=NAME) -> the log of a tiny run in two processes, and what they printed."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")

    def run(*flags, out):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, SCRIPT, *TINY, "--device", device.type, "--out", tmp_path / out, *flags]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / out / "log.json").read_text()), done.stdout

    return run


def interrupt_at(step, train_lm, monkeypatch):
    """Ctrl-C in the middle of that step, once."""
    learning_rate = train_lm.learning_rate

    def interrupting(number, args):
        if number == step:
            monkeypatch.setattr(train_lm, "learning_rate", learning_rate)
            signal.raise_signal(signal.SIGINT)
        return learning_rate(number, args)

    monkeypatch.setattr(train_lm, "learning_rate", interrupting)


def text_folder(folder, files=12):
    """Text files, a binary file and a hidden one."""
    (folder / "sub").mkdir(parents=True)
    for i in range(files):
        (folder / "sub" / f"{i}.txt").write_text(f"file {i}: the quick brown fox, naïve as ever.\n" * 30)
    (folder / "image.bin").write_bytes(b"\x89\xff\x00\x01" * 500)
    (folder / ".hidden").write_text("secret " * 500)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns(train, tmp_path, dtype):
    log = train("--steps", 60, "--lr", 0.01, "--dtype", dtype)
    assert len(log["loss"]) == 60
    assert sum(log["loss"][-10:]) < 0.8 * sum(log["loss"][:10])
    assert [point["step"] for point in log["validation"]] == [60]
    assert 0 < log["validation"][0]["bits_per_byte"] < 6  # 8 before training
    assert log["tokens_per_second"] > 0
    assert {len(point["max_over_mean"]) for point in log["expert_load"]} == {2}  # one for each layer
    assert log["versions"].keys() == {"python", "torch", "fused_moe"}
    for name in ("loss.png", "checkpoint.pt"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_fused_and_loop_agree(train, tmp_path, capsys):
    log = train("--compare", "--steps", 50)
    assert log["loss_difference"] < 1e-4
    assert log["validation_difference"] < 0.01
    assert log["fused"]["config"]["experts"] == "fused" and log["loop"]["config"]["experts"] == "loop"
    assert "fused against loop" in capsys.readouterr().out
    for name in ("loss.png", "fused/checkpoint.pt", "loop/checkpoint.pt"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_a_resumed_run_repeats_the_uninterrupted_one(train, train_lm, device, monkeypatch, capsys):
    whole = train("--steps", 25, out="whole")
    interrupt_at(13, train_lm, monkeypatch)
    stopped = train("--steps", 25)
    assert len(stopped["loss"]) == 14  # the current step was finished
    assert "saved at step 14; the same command with --resume continues" in capsys.readouterr().out
    resumed = train("--steps", 25, "--resume")
    if device.type == "cpu":
        assert resumed["loss"] == whole["loss"]
        assert resumed["validation"] == whole["validation"]
    else:  # PyTorch's CUDA backwards sum in a varying order
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)


def test_an_interrupted_comparison_goes_on(train, train_lm, tmp_path, monkeypatch):
    interrupt_at(3, train_lm, monkeypatch)
    with pytest.raises(FileNotFoundError):  # no comparison yet
        train("--compare", "--steps", 6)
    assert not (tmp_path / "run" / "loop").exists()
    log = train("--compare", "--steps", 6, "--resume")
    assert len(log["fused"]["loss"]) == len(log["loop"]["loss"]) == 6
    assert log["loss_difference"] < 1e-4


def flattened(state, name=""):
    """{path: leaf} of nested dicts and lists."""
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {n: v for key, value in items for n, v in flattened(value, f"{name}/{key}").items()}
    return {name: state}


@pytest.mark.parametrize("flags", ["--fsdp", "--fsdp --expert-parallel 2"])
def test_two_processes_repeat_the_single_one(train, torchrun, tmp_path, flags):
    """The same loss curve and checkpoint, up to the order of summation. The learning rate is high."""
    fixed = ("--steps", 8, "--lr", 0.1)
    whole = train(*fixed, out="whole")
    log, printed = torchrun(*fixed, *flags.split(), out="parts")
    assert whole["loss"][-1] < 0.9 * whole["loss"][0]
    assert log["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert log["validation"][0]["bits_per_byte"] == pytest.approx(
        whole["validation"][0]["bits_per_byte"], rel=1e-5
    )
    loads = [torch.tensor(run["expert_load"][-1]["max_over_mean"]) for run in (log, whole)]
    torch.testing.assert_close(*loads, rtol=0.02, atol=0)  # ties of scores may be broken differently
    assert printed.count("2 processes") == printed.count("wrote ") == 1
    files = (tmp_path / name / "checkpoint.pt" for name in ("whole", "parts"))
    expected, found = (flattened(torch.load(file, weights_only=True)) for file in files)
    tensors = {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert {name for name, value in found.items() if isinstance(value, torch.Tensor)} == tensors
    for name in tensors:
        error = (found[name].double() - expected[name].double()).norm()
        assert error <= 1e-3 * expected[name].double().norm() + 1e-7, name


def test_two_processes_go_on_from_one(train, train_lm, torchrun, monkeypatch):
    fixed = ("--steps", 8, "--lr", 0.1)
    whole = train(*fixed, out="whole")
    interrupt_at(3, train_lm, monkeypatch)
    assert len(train(*fixed)["loss"]) == 4
    log, _ = torchrun(*fixed, "--fsdp", "--expert-parallel", 2, "--resume", out="run")
    assert log["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_ctrl_c_ends_the_process_cleanly(train_lm, device, tmp_path):
    command = [
        sys.executable,
        SCRIPT,
        *TINY,
        "--device",
        device.type,
        "--out",
        tmp_path,
        "--steps",
        "1000000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        seen = b""
        while b"loss" not in seen:  # the bar's first report
            byte = process.stderr.read(1)
            assert byte, seen.decode()
            seen += byte
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--resume" in out.decode()
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "log.json", "loss.png"}


def test_a_folder_of_text(train, train_lm, tmp_path):
    folder = text_folder(tmp_path / "text")
    training, validation = (bytes(text.tolist()).decode() for text in train_lm.load_text(folder, 32))
    seen = [
        {line for line in text.replace("\0", "\n").splitlines() if line} for text in (training, validation)
    ]
    assert len(seen[0]) == 10 and len(seen[1]) == 2  # whole files, each on one side
    assert not seen[0] & seen[1]
    log = train("--data", folder, "--steps", 30, "--lr", 0.01)
    assert log["config"]["data"] == str(folder)
    assert log["loss"][-1] < 0.8 * log["loss"][0]


def test_the_standard_library(train_lm):
    root = Path(train_lm.sysconfig.get_path("stdlib"))
    files = [file.relative_to(root) for file in train_lm.stdlib_files(root)]
    assert {file.parts[0].removesuffix(".py") for file in files} == set(train_lm.STDLIB)
    assert not any("test" in file.parts for file in files)
    training, validation = train_lm.load_text(None, 256)
    assert len(training) > 4e6 and 0.02 < len(validation) / len(training) < 0.2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps: must be at least 1, not 0"),
        ("--experts slow", "--experts: invalid choice: 'slow'"),
        ("--experts loop --compare", "not allowed with"),
        ("--dim 33", "--dim 33 is not a multiple of 32"),
        ("--top-k 9", "--top-k 9 is more than --num-experts 8"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--resume", "--resume: no checkpoint.pt in"),
        ("--fsdp", "--fsdp needs torchrun"),
        ("--expert-parallel 2", "--expert-parallel 2 must divide the number of processes, 1"),
    ],
)
def test_bad_flags_are_named(train, flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        train(*flags.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--fsdp needs torchrun, and torchrun needs --fsdp"),
        ("--fsdp --batch-size 9", "--batch-size 9 is not a multiple of the 2 processes"),
        ("--fsdp --compile", "--compile needs a single process"),
        ("--fsdp --expert-parallel 3", "--expert-parallel 3 must divide the number of processes, 2"),
        ("--fsdp --expert-parallel 2 --num-experts 7", "divide --num-experts 7"),
        ("--fsdp --expert-parallel 2 --experts loop", "--expert-parallel needs --experts fused"),
    ],
)
def test_bad_flags_under_torchrun_are_named(train, flags, message, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        train(*flags.split())
    assert message in capsys.readouterr().err


def test_an_empty_folder_is_refused(train, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="too little text in .*: 0 files"):
        train("--data", tmp_path / "empty")


def test_resume_with_other_flags_is_refused(train):
    train("--steps", 2)
    with pytest.raises(SystemExit, match="was made with --lr 0.003, not 0.01"):
        train("--steps", 2, "--resume", "--lr", 0.01)
