"""examples/train_lm.py: it learns, agrees with the for-loop, gives the same in two processes, and resumes."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import cases
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
    module.GENERATED_BYTES = 40
    return module


def read_log(folder):
    """The log as one dict: the first line, then, for each kind of experts, the reports' values joined."""
    first, *reports = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    log = {**first, "reports": reports}
    for report in reports:
        if "experts" not in report:  # the comparison, last
            return {**log, **report}
        run = log.setdefault(report["experts"], {"loss": [], "validation": {}})
        run["loss"] += report["loss"]
        if "bits_per_byte" in report:
            run["validation"][report["step"]] = report["bits_per_byte"]
    return log


def commands(printed):
    """The flags of every command that is printed, by its program's name. Its Python and program exist."""
    found = {}
    for line in printed.splitlines():
        if line.startswith("  ") and ".py --" in line:
            python, program, *flags = shlex.split(line)
            assert shutil.which(python) and (SCRIPT.parent / Path(program).name).samefile(program)
            found[Path(program).name] = flags
    return found


@pytest.fixture
def train(train_lm, device, tmp_path):
    """train(*flags, out=NAME) -> the log of a tiny run."""

    def run(*flags, out="run"):
        folder = tmp_path / out
        train_lm.main([*TINY, "--device", device.type, "--out", str(folder), *map(str, flags)])
        return read_log(folder)

    return run


@pytest.fixture(scope="module")
def whole(train_lm, device, tmp_path_factory):
    """whole(*flags) -> the folder of an uninterrupted tiny run, one for all tests."""

    @cache
    def run(*flags):
        folder = tmp_path_factory.mktemp("whole")
        train_lm.main([*TINY, "--device", device.type, "--out", str(folder), *map(str, flags)])
        return folder

    return run


FIXED = ("--steps", 8, "--lr", 0.1)
FP8 = ("--fp8", "--dim", 128, "--hidden-dim", 128, "--dtype", "bfloat16")
FP8_FIXED = ("--steps", 8, *FP8)
# name -> the flags of a run in two processes
PARTS = {
    "FSDP": (*FIXED, "--fsdp"),
    "expert parallelism": (*FIXED, "--fsdp", "--expert-parallel", 2),
    "FSDP in FP8": (*FP8_FIXED, "--fsdp"),
    "expert parallelism in FP8": (*FP8_FIXED, "--fsdp", "--expert-parallel", 2),
    "resumed": (*FIXED, "--fsdp", "--expert-parallel", 2, "--resume"),
}
# Each byte of text is a forward pass with all of FSDP's collectives. Each run's keys in torchrun's store have
# a prefix: those of the run before would tell of processes that are gone.
IN_TWO_PROCESSES = """
import contextlib, functools, json, os, sys
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import train_lm
train_lm.GENERATED_BYTES = 5
join = dist.init_process_group
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
rank = int(os.environ["RANK"])
for i, command in enumerate(json.loads(sys.argv[2])):
    own = dist.PrefixStore(str(i), store)
    dist.init_process_group = functools.partial(join, store=own, rank=rank, world_size=2)
    with open(f"{i}.{rank}", "w") as file, contextlib.redirect_stdout(file):
        train_lm.main(command)
"""


@pytest.fixture(scope="module")
def parts(train_lm, device, tmp_path_factory):
    """{name: (folder, what the processes printed)} of the runs of PARTS. One launch makes all: to start takes
    longer than to train. The last goes on from a run of one process that was interrupted."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("parts")
    outs = {name: str(folder / name) for name in PARTS}
    common = [*TINY, "--device", device.type, "--out"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at(3, train_lm, monkeypatch)
        train_lm.main([*common, outs["resumed"], *map(str, FIXED)])
    assert len(read_log(Path(outs["resumed"]))["fused"]["loss"]) == 4
    script = folder / "script.py"
    script.write_text(IN_TWO_PROCESSES)
    commands = [[*common, outs[name], *map(str, flags)] for name, flags in PARTS.items()]
    command = [*cases.torchrun(2), script, SCRIPT.parent, json.dumps(commands)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    printed = {
        name: "".join((folder / f"{i}.{rank}").read_text() for rank in range(2))
        for i, name in enumerate(PARTS)
    }
    return {name: (Path(outs[name]), printed[name]) for name in PARTS}


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
def test_it_learns(train, tmp_path, capsys, dtype):
    log = train("--steps", 60, "--lr", 0.01, "--dtype", dtype)
    losses, validation = log["fused"]["loss"], log["fused"]["validation"]
    assert len(losses) == 60
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert validation.keys() == {0, 60}
    assert 0 < validation[60] < 6 < validation[0]
    assert [report["step"] for report in log["reports"]] == [0, 10, 20, 30, 40, 50, 60]
    assert log["reports"][-1]["tokens_per_second"] > 0
    assert len(log["reports"][-1]["expert_load"]) == 2  # one for each layer
    assert log["versions"].keys() == {"python", "torch", "fused_moe"}
    assert max(map(len, (tmp_path / "run" / "log.jsonl").read_text().splitlines())) < 1000
    printed = capsys.readouterr().out
    for name in ("loss.png", "log.jsonl", "checkpoint.pt"):
        assert (tmp_path / "run" / name).stat().st_size > 0
        assert f"wrote {tmp_path / 'run' / name}" in printed


def test_it_writes_before_and_after_training(train, capsys):
    train("--steps", 60, "--lr", 0.01, "--prompt", "import ")
    printed = capsys.readouterr().out
    before, after = (
        printed.split(title)[1].lstrip()[:47] for title in ("Before training:", "After 60 steps:")
    )
    assert before.startswith("import ") and after.startswith("import ")
    # Text has many spaces. Half of noise is not ASCII.
    assert before.count(".") > 10 > after.count(".")
    assert all(c == "\n" or " " <= c <= "~" for c in before + after)


def test_fused_and_loop_agree(train, tmp_path, capsys):
    log = train("--compare", "--steps", 50)
    assert log["loss_difference"] < 1e-4
    assert log["validation_difference"] < 0.01
    assert log["fused"]["loss"][0] == pytest.approx(log["loop"]["loss"][0], rel=1e-5)
    turns = [report["experts"] for report in log["reports"][:-1]]
    assert turns == ["fused", "loop"] * 6
    assert "fused against loop" in capsys.readouterr().out
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0


def test_fp8(train, train_lm, device, monkeypatch, capsys):
    """The losses are near those in bfloat16, and a run that was interrupted goes on in FP8."""
    plain = train("--steps", 25, *FP8[1:], out="plain")["fused"]["loss"]
    assert ", experts in FP8" not in capsys.readouterr().out
    whole = train("--steps", 25, *FP8, out="whole")
    losses = whole["fused"]["loss"]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.02)
    assert whole["config"]["fp8"]
    assert ", experts in FP8" in capsys.readouterr().out
    interrupt_at(13, train_lm, monkeypatch)
    train("--steps", 25, *FP8)
    assert_same_losses(train("--resume", *FP8[1:]), whole, device)


def test_a_checkpoint_without_the_flag_resumes(train, tmp_path, capsys):
    """As versions before --fp8 wrote it."""
    train("--steps", 2, *FP8[1:])
    file = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    del state["config"]["fp8"]
    torch.save(state, file)
    with pytest.raises(SystemExit, match="2"):
        train("--steps", 3, "--resume", "--fp8", *FP8[1:])
    assert "was made with --fp8 False, not True" in capsys.readouterr().err
    assert len(train("--steps", 3, "--resume", *FP8[1:])["fused"]["loss"]) == 3


def assert_same_losses(log, expected, device, experts="fused"):
    if device.type == "cpu" and experts == "fused":
        assert log[experts]["loss"] == expected[experts]["loss"]
    else:  # PyTorch's CUDA backwards sum in a varying order, and so may its CPU GEMMs on slices
        assert log[experts]["loss"] == pytest.approx(expected[experts]["loss"], rel=1e-3)


def test_a_resumed_run_repeats_the_uninterrupted_one(
    train, train_lm, whole, device, tmp_path, monkeypatch, capsys
):
    whole = read_log(whole("--steps", 25))
    interrupt_at(13, train_lm, monkeypatch)
    stopped = train("--steps", 25)
    assert len(stopped["fused"]["loss"]) == 14  # the current step was finished
    printed = capsys.readouterr().out
    assert "saved at step 14" in printed
    train_lm.main([*commands(printed)["train_lm.py"], "--device", device.type])
    resumed = read_log(tmp_path / "run")
    assert_same_losses(resumed, whole, device)
    if device.type == "cpu":
        assert resumed["fused"]["validation"] == whole["fused"]["validation"]


def test_a_prolonged_run_repeats_the_longer_one(train, whole, device, tmp_path, capsys):
    whole = read_log(whole("--steps", 25))
    train("--steps", 12)
    printed = commands(capsys.readouterr().out)
    assert printed["train_lm.py"][-2:] == ["--steps", "24"]
    assert printed["generate.py"] == ["--run", str(tmp_path / "run"), "--experts", "fused"]
    prolonged = train("--resume", "--steps", 25)
    assert_same_losses(prolonged, whole, device)
    assert prolonged["config"] == whole["config"]
    with pytest.raises(SystemExit, match="has its 25 steps; a larger --steps prolongs it"):
        train("--resume")


def test_resume_takes_the_newest_run_with_its_flags(train_lm, device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_lm, "GENERATED_BYTES", 1)
    older = tmp_path / "runs" / "older"
    train_lm.main([*TINY, "--device", device.type, "--steps", "1", "--out", str(older)])
    os.utime(older / "checkpoint.pt", (0, 0))
    train_lm.main([*TINY, "--device", device.type, "--steps", "2", "--lr", "0.01"])
    train_lm.main(["--device", device.type, "--resume", "--steps", "3"])
    (newest,) = set((tmp_path / "runs").iterdir()) - {older}
    log = read_log(newest)
    assert len(log["fused"]["loss"]) == 3
    assert log["config"]["lr"] == 0.01 and log["config"]["dim"] == 32


def test_an_interrupted_comparison_goes_on(train, train_lm, device, monkeypatch):
    whole = train("--compare", "--steps", 16, out="whole")
    interrupt_at(3, train_lm, monkeypatch)
    stopped = train("--compare", "--steps", 16)
    assert "loss_difference" not in stopped
    assert len(stopped["fused"]["loss"]) == 4 and not stopped["loop"]["loss"]  # in the first turn
    log = train("--resume")
    assert log["loss_difference"] < 1e-4
    for experts in ("fused", "loop"):
        assert_same_losses(log, whole, device, experts)


def flattened(state, name=""):
    """{path: leaf} of nested dicts and lists."""
    if isinstance(state, (dict, list)):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {n: v for key, value in items for n, v in flattened(value, f"{name}/{key}").items()}
    return {name: state}


@pytest.mark.parametrize("name", ["FSDP", "expert parallelism"])
def test_two_processes_repeat_the_single_one(parts, whole, name):
    """The same loss curve and checkpoint, up to the order of summation. The learning rate is high."""
    (folder, printed), alone = parts[name], whole(*FIXED)
    log, expected = read_log(folder), read_log(alone)
    losses = expected["fused"]["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert log["fused"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert log["fused"]["validation"] == pytest.approx(expected["fused"]["validation"], rel=1e-5)
    loads = [torch.tensor(run["reports"][-1]["expert_load"]) for run in (log, expected)]
    torch.testing.assert_close(*loads, rtol=0.02, atol=0)  # ties of scores may be broken differently
    assert printed.count("2 processes") == printed.count("Before training") == 1
    files = (out / "checkpoint.pt" for out in (alone, folder))
    expected, found = (flattened(torch.load(file, weights_only=True)) for file in files)
    tensors = {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert {name for name, value in found.items() if isinstance(value, torch.Tensor)} == tensors
    for name in tensors:
        error = (found[name].double() - expected[name].double()).norm()
        assert error <= 1e-3 * expected[name].double().norm() + 1e-7, name


@pytest.mark.parametrize("name", ["FSDP in FP8", "expert parallelism in FP8"])
def test_two_processes_in_fp8(parts, whole, name):
    """Rows from the other process are quantised, too. Another order of sums turns codes to others."""
    folder, printed = parts[name]
    losses = read_log(whole(*FP8_FIXED))["fused"]["loss"]
    assert read_log(folder)["fused"]["loss"] == pytest.approx(losses, rel=5e-3)
    assert ", experts in FP8, 2 processes" in printed


def test_two_processes_go_on_from_one(parts, whole):
    losses = read_log(whole(*FIXED))["fused"]["loss"]
    assert read_log(parts["resumed"][0])["fused"]["loss"] == pytest.approx(losses, rel=1e-5)


def test_ctrl_c_ends_the_process_cleanly(train_lm, device, tmp_path):
    flags = [*TINY, "--device", device.type, "--out", tmp_path, "--steps", "1000000"]
    command = list(map(str, [sys.executable, SCRIPT, *flags]))
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
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "log.jsonl", "loss.png"}


def test_bits_per_byte(train_lm):
    """Equal logits give 8. Logits that know each byte but the last of a window give the last's share of 8."""
    text = torch.arange(256).repeat(40).to(torch.uint8)  # each byte is one more than the byte before
    args = SimpleNamespace(seq_len=32, batch_size=8)
    equal = train_lm.bits_per_byte(lambda inputs: torch.zeros(*inputs.shape, 256), text, args)
    assert equal == pytest.approx(8)

    def nearly_all(inputs):
        logits = 100 * torch.nn.functional.one_hot((inputs + 1) % 256, 256).float()
        return torch.cat((logits[:, :-1], torch.zeros_like(logits[:, :1])), dim=1)

    assert train_lm.bits_per_byte(nearly_all, text, args) == pytest.approx(8 / 32)


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
    assert log["fused"]["loss"][-1] < 0.8 * log["fused"]["loss"][0]


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
        ("--prompt=", "--prompt is empty"),
        ("--resume", "--resume: no checkpoint.pt in"),
        ("--fp8 --dim 128", "--fp8 needs a multiple of 128, such as --hidden-dim 128, not --hidden-dim 16"),
        ("--fp8 --hidden-dim 128", "--fp8 needs a multiple of 128, such as --dim 128, not --dim 32"),
        ("--fp8 --dim 128 --hidden-dim 128 --compare", "--fp8 needs --experts fused"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lr", 0.01), "was made with --lr 0.003, not 0.01"),
        (("--experts", "loop"), "was made with --experts fused, not loop"),
    ],
)
def test_resume_with_other_flags_is_refused(train, flags, message, capsys):
    train("--steps", 2)
    with pytest.raises(SystemExit, match="2"):
        train("--steps", 3, "--resume", *flags)
    assert message in capsys.readouterr().err
