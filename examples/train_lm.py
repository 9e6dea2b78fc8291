"""Trains a small byte-level Mixture-of-Experts language model with fused_moe.

    .venv/bin/python examples/train_lm.py                         on the sources of Python's standard library
    .venv/bin/python examples/train_lm.py --data FOLDER           on the text files in a folder
    .venv/bin/python examples/train_lm.py --compare               FusedMoE and the for-loop, taking turns
    .venv/bin/python examples/train_lm.py --resume                continues the newest run, as after Ctrl-C
    .venv/bin/python examples/train_lm.py --resume --steps 1000   prolongs it to 1000 steps

    .venv/bin/python -m torch.distributed.run --nproc-per-node 2 examples/train_lm.py --fsdp
    ... --fsdp --expert-parallel 2                                half of the experts on each process

The model is a decoder-only transformer with `fused_moe.FusedMoE` as the feed-forward layer of every block. It
runs on a GPU if there is one, else on the CPU. Every run writes loss.png, log.jsonl and checkpoint.pt into a
folder of its own, and prints a text that the model writes before and after training.

The batch and the learning rate of a step depend only on the flags and the step's number, not on --steps. So
no state of a data loader, a scheduler or a random generator has to be saved, and on a CPU a resumed or
prolonged run gives bit for bit the losses of an uninterrupted one (the for-loop up to rounding).

Several processes split each batch and shard the parameters. The loss curve is the same up to the order of
summation. Checkpoints are the same, too, and any other number of processes can resume from them. Only the
first process reports.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from datetime import datetime
from pathlib import Path

# Waiting OpenMP threads spin. On a busy machine that takes cores from threads with work, so limit it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads libgomp

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from tqdm import tqdm

import fused_moe
from fused_moe.distributed import ExpertParallel

EXPERTS = {"fused": fused_moe.FusedMoE, "loop": fused_moe.reference.FusedMoE}
HEAD_DIM = 32
FP8_BLOCK = 128  # of a weight, which has one scale
WARMUP_STEPS = 50
REPORT_EVERY = 10  # steps
VALIDATE_EVERY = 100  # steps; a multiple of REPORT_EVERY
VALIDATION_WINDOWS = 64
GENERATED_BYTES = 240
TEMPERATURE = 0.6  # of the generated text
PROMPT = "class Reader:\n    def read(self, size=-1):\n        "
COMPARED_STEPS = 50  # over which --compare compares the two loss curves
FULL_STATE = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)  # as one process saves it

# ---- Processes -------------------------------------------------------------------------------------


def num_processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def process():
    return dist.get_rank() if dist.is_initialized() else 0


def sum_over_processes(tensor):
    """In place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


@contextlib.contextmanager
def joined_processes(args):
    """With --fsdp, the process group of torchrun's processes. Only the first process prints."""
    if not args.fsdp:
        yield
        return
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    try:
        with open(os.devnull, "w") as devnull:
            with contextlib.redirect_stdout(devnull) if process() else contextlib.nullcontext():
                yield
    finally:
        dist.destroy_process_group()


def shard(model, args):
    """Shards parameters, and with them gradients and the optimizer's state, over the processes.

    With --expert-parallel N the processes form a grid with rows of N. Each row has all experts, E/N per
    process, and exchanges only its own tokens. The processes of a column have the same experts and shard
    them. The gradient of every parameter is the mean over all processes.
    """
    processes, ranks = num_processes(), args.expert_parallel
    line = init_device_mesh(args.device.type, (processes,))
    grid = init_device_mesh(args.device.type, (processes // ranks, ranks), mesh_dim_names=("data", "experts"))
    for block in model.blocks:
        if ranks > 1:
            parallelize_module(block.moe, grid["experts"], {"experts": ExpertParallel()})
            fully_shard(block.moe.experts, mesh=grid["data"])
            block.moe.experts.set_gradient_divide_factor(processes)
            if processes > ranks:  # gloo cannot divide in a reduction, which this factor would ask for
                block.moe.experts.set_force_sum_reduction_for_comms(True)
        fully_shard(block, mesh=line)
    fully_shard(model, mesh=line)


# ---- Data ------------------------------------------------------------------------------------------

# Modules and packages of every CPython from 3.10 to 3.14. Left out: tables (encodings, pydoc_data), and
# modules that Linux distributions put into separate packages.
STDLIB = """
    _collections_abc _pydecimal _pyio _strptime abc argparse ast asyncio base64 bdb bisect bz2 cProfile
    calendar cmd code codecs codeop collections compileall concurrent configparser contextlib copy copyreg
    csv ctypes curses dataclasses dbm difflib dis doctest email enum filecmp fileinput fnmatch fractions
    ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq hmac http imaplib
    importlib inspect ipaddress json linecache locale logging lzma mailbox mimetypes modulefinder
    multiprocessing netrc ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil platform
    plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue random re reprlib
    rlcompleter runpy sched selectors shelve shlex shutil site smtplib socket socketserver sqlite3 ssl stat
    statistics string subprocess symtable tabnanny tarfile tempfile textwrap threading timeit tokenize trace
    traceback tracemalloc types typing unittest urllib uuid warnings wave weakref webbrowser wsgiref xml
    xmlrpc zipapp zipfile zipimport zoneinfo
""".split()


def stdlib_files(root):
    """The files of the modules above, without test suites."""
    files = [root / f"{name}.py" for name in STDLIB]
    files += [file for name in STDLIB for file in (root / name).rglob("*.py")]
    return [file for file in files if file.is_file() and "test" not in file.parts]


def folder_files(root):
    """Every file in root, except hidden files and hidden folders such as .git."""
    files = [file for file in root.rglob("*") if file.is_file()]
    return [file for file in files if not any(p.startswith(".") for p in file.relative_to(root).parts)]


def is_text(data):
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def load_text(folder, seq_len):
    """(training text, validation text) as bytes, uint8. About a tenth of the files is for validation."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    files = folder_files(root) if folder else stdlib_files(root)
    texts = {file.relative_to(root).as_posix(): file.read_bytes() for file in files}
    # Sorted by a hash of the name: unlike a shuffle, it gives the same split everywhere; unlike alphabetical
    # order, it puts files of every package on both sides.
    names = sorted((n for n in texts if is_text(texts[n])), key=lambda n: hashlib.sha256(n.encode()).digest())
    cut = math.ceil(len(names) / 10)
    parts = [b"\0".join(texts[n] for n in part) for part in (names[cut:], names[:cut])]
    if min(map(len, parts)) <= seq_len:
        raise SystemExit(
            f"train_lm: too little text in {root}: {len(names)} files, split into {len(parts[0])} bytes "
            f"for training and {len(parts[1])} for validation; each needs more than --seq-len {seq_len}"
        )
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def windows(text, starts, length):
    """`length` bytes from each start, and as targets the byte after each: two tensors (N, length)."""
    index = starts[:, None] + torch.arange(length + 1)
    data = text[index.to(text.device)].long()
    return data[:, :-1], data[:, 1:]


def training_batch(text, step, args):
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.seq_len, (args.batch_size,), generator=generator)
    starts = starts.chunk(num_processes())[process()]
    return windows(text, starts, args.seq_len)


# ---- Model -----------------------------------------------------------------------------------------


def rotary_table(positions):
    """cos and sin of every position (L,) times every frequency: (L, HEAD_DIM / 2) each."""
    frequency = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=positions.device)
    angle = positions[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attend = causal_attention  # generate.py sets one that has a key-value cache
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        # (B, L, 3 * D) -> three (B, heads, L, HEAD_DIM)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, args, experts):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim)
        self.attention = Attention(args.dim)
        self.moe_norm = nn.RMSNorm(args.dim)
        self.moe = EXPERTS[experts](
            args.dim,
            args.hidden_dim,
            args.num_experts,
            args.top_k,
            score_func="sigmoid",
            route_norm=True,
            load_balance_coeff=0.01,  # ten times the usual: runs are short
        )

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x))


class LanguageModel(nn.Module):
    """Bytes (B, L) and their positions (L,), by default from 0 -> logits of the next byte (B, L, 256)."""

    def __init__(self, args, experts):
        super().__init__()
        self.embedding = nn.Embedding(256, args.dim)
        self.blocks = nn.ModuleList(Block(args, experts) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, 256, bias=False)
        # With PyTorch's default, std 1, the first blocks would contribute little to the residual stream.
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, inputs, positions=None):
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        cos, sin = rotary_table(positions)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


# ---- Training --------------------------------------------------------------------------------------


def learning_rate(step, args):
    """A linear warm-up, then 1 / sqrt(step): unlike a cosine, it does not depend on the last step."""
    return args.lr * min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def bits_per_byte(logits, text, args):
    """Over evenly spaced windows of the text, the same ones every time. logits: a function of bytes (B, L).

    Each process computes all windows, so all processes enter the same collectives equally often.
    """
    nats, last = 0.0, len(text) - args.seq_len - 1
    starts = torch.arange(VALIDATION_WINDOWS) * last // (VALIDATION_WINDOWS - 1)
    for part in starts.split(args.batch_size):
        inputs, targets = windows(text, part, args.seq_len)
        nats += cross_entropy(logits(inputs), targets).item() * len(part)
    return nats / len(starts) / math.log(2)


class Run:
    """A model, its optimizer and its log, a list of reports."""

    def __init__(self, args, experts, texts):
        self.args, self.experts, self.log = args, experts, []
        self.training_text, self.validation_text = (text.to(args.device) for text in texts)
        torch.manual_seed(args.seed)
        model = LanguageModel(args, experts)  # initialised on the CPU: the same everywhere
        self.model = model.to(args.device)
        self.moes = [block.moe for block in model.blocks]
        if args.fp8:
            # By force: experts of this size do not get faster, but their losses show what FP8 does.
            fused_moe.enable_fp8(model, force=True)
        if args.fsdp:
            shard(model, args)
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
        fused_moe.balance(model, self.optimizer)
        if args.compile and experts == "fused":  # the loop's shapes depend on data: it would recompile
            model.compile()

    @property
    def steps(self):
        """Steps done."""
        return self.log[-1]["step"] if self.log else 0

    def logits(self, inputs):
        # bfloat16 by autocast: weights and optimizer stay in float32, because late updates are below
        # bfloat16's 8 bits of precision and would be rounded away.
        bfloat16 = self.args.dtype == "bfloat16"
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            return self.model(inputs).float()

    def loss(self, inputs, targets):
        return cross_entropy(self.logits(inputs), targets)

    def step(self, number):
        """One optimizer step. Returns its loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.args)
        loss = self.loss(*training_batch(self.training_text, number, self.args))
        self.optimizer.zero_grad()
        loss.backward()
        fused_moe.clip_grad_norm_(self.model.parameters(), 1.0)
        self.tokens_per_expert = sum_over_processes(torch.stack([moe.tokens_per_expert for moe in self.moes]))
        self.optimizer.step()  # then balances, and zeroes tokens_per_expert
        return sum_over_processes(loss.detach()) / num_processes()

    def advance(self, bar, interrupt):
        """Steps up to the next report, or fewer after an interrupt. Returns the report."""
        first, losses, start = self.steps, [], time.perf_counter()
        for number in range(first, min(first - first % REPORT_EVERY + REPORT_EVERY, self.args.steps)):
            losses.append(self.step(number))
            bar.update()
            if interrupt.requested:
                break
        # Reading a value synchronises with the device, so not every step does it.
        losses = torch.stack(losses).tolist()
        steps = first + len(losses)
        seconds = self.log[-1]["seconds"] + time.perf_counter() - start
        tokens = self.tokens_per_expert.double()
        load = tokens.amax(dim=1) / tokens.mean(dim=1)
        self.log.append(
            {
                "experts": self.experts,
                "step": steps,
                "seconds": seconds,  # of all training steps, without validation
                "tokens_per_second": steps * self.args.batch_size * self.args.seq_len / seconds,
                "loss": losses,  # nats per byte, of every step since the last report
                "expert_load": load.tolist(),  # tokens of the largest expert over the mean, per layer
            }
        )
        if steps % VALIDATE_EVERY == 0 or steps == self.args.steps:
            self.log[-1]["bits_per_byte"] = self.validate()
        return self.log[-1]

    def validate(self):
        self.model.eval()
        bits = bits_per_byte(self.logits, self.validation_text, self.args)
        self.model.train()
        return bits

    @torch.no_grad()
    def generate(self):
        """The prompt, continued byte by byte. Simple, but slow: generate.py caches keys and values."""
        self.model.eval()
        generator = torch.Generator().manual_seed(self.args.seed)
        text = list(self.args.prompt.encode())
        for _ in range(GENERATED_BYTES):
            inputs = torch.tensor([text[-self.args.seq_len :]], device=self.args.device)
            probabilities = (self.logits(inputs)[0, -1].cpu() / TEMPERATURE).softmax(0)
            text.append(torch.multinomial(probabilities, 1, generator=generator).item())
        self.model.train()
        return printable(text)


def printable(text):
    """Bytes as a string. What is not printable ASCII becomes a dot."""
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else "." for byte in text)


# They may change on --resume, and so may --steps. The losses depend on all others.
OTHER_FLAGS = "device threads compile out resume prompt fsdp expert_parallel".split()


def config(args):
    flags = {name: value for name, value in vars(args).items() if name not in OTHER_FLAGS}
    return {**flags, "data": str(args.data) if args.data else None}


def save(runs, args):
    """Writes a temporary file first: a crash while writing does not damage the last checkpoint."""
    state = {"config": config(args)}
    for run in runs:
        model, optimizer = checkpoint.get_state_dict(run.model, run.optimizer, options=FULL_STATE)
        state[run.experts] = {"model": model, "optimizer": optimizer, "log": run.log}
    if process() == 0:
        torch.save(state, args.out / "checkpoint.tmp")
        (args.out / "checkpoint.tmp").replace(args.out / "checkpoint.pt")


def load(runs, args):
    saved = torch.load(args.out / "checkpoint.pt", map_location="cpu", weights_only=True)
    for run in runs:
        state = saved[run.experts]
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        run.log = state["log"]
        if run.steps:  # PyTorch saves an optimizer that did no step as if it had done one
            checkpoint.set_state_dict(run.model, run.optimizer, **parts, options=FULL_STATE)
    if all(run.steps >= args.steps for run in runs):
        raise SystemExit(f"train_lm: {args.out} has its {runs[0].steps} steps; a larger --steps prolongs it")


class Interrupt:
    """The first Ctrl-C requests a stop after the current step; the second acts as usual."""

    requested = False

    def __enter__(self):
        self.usual = signal.signal(signal.SIGINT, self.request)
        return self

    def request(self, *_):
        self.requested = True
        signal.signal(signal.SIGINT, self.usual)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.usual)


def train(runs, args, interrupt):
    """Trains up to the last step or an interrupt. Runs take turns, so other load slows down both alike."""
    with open_log(runs, args) as log, progress_bar(runs, args) as bar:
        while not interrupt.requested:
            run = min(runs, key=lambda run: run.steps)
            if run.steps >= args.steps:
                break
            report = run.advance(bar, interrupt)
            print(json.dumps(report), file=log, flush=True)
            bar.set_postfix_str(summary(run))
            if "bits_per_byte" in report:
                bar.write(f"{run.experts} {run.steps}/{args.steps}  {summary(run)}")
                if run is runs[-1]:
                    save(runs, args)
    save(runs, args)


# ---- Reports ---------------------------------------------------------------------------------------


def command(program, *flags):
    """The line that runs a program of this folder, for a shell in the working directory."""
    python = "python" if shutil.which("python") == sys.executable else short(sys.executable)
    return shlex.join(map(str, (python, short(Path(__file__).with_name(program)), *flags)))


def short(path):
    """Relative, below the working directory."""
    path = Path(path).absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def open_log(runs, args):
    """JSON lines: the flags, then one line per report. Only the first process writes."""
    log = open(os.devnull if process() else args.out / "log.jsonl", "w")
    reports = sorted((report for run in runs for report in run.log), key=lambda report: report["step"])
    for record in ({"config": config(args), "device": device_name(args), "versions": versions()}, *reports):
        print(json.dumps(record), file=log, flush=True)
    return log


def versions():
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return found | {"fused_moe": fused_moe.__version__}


def progress_bar(runs, args):
    return tqdm(
        desc=" and ".join(run.experts for run in runs),
        initial=sum(run.steps for run in runs),
        total=len(runs) * args.steps,
        bar_format="{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}",
        disable=process() > 0,
    )


def summary(run):
    report = run.log[-1]
    bits = [report["bits_per_byte"] for report in run.log if "bits_per_byte" in report][-1]
    loss, speed, load = report["loss"][-1], report["tokens_per_second"], max(report["expert_load"])
    return f"loss {loss:.3f}, val {bits:.3f} bits/byte, {speed:,.0f} tokens/s, load {load:.2f}"


def device_name(args):
    if args.device.type == "cuda":
        return torch.cuda.get_device_name(args.device)
    return f"CPU, {torch.get_num_threads()} threads"


def describe(run):
    """Two lines: the model; the data and the machine."""
    args = run.args
    total = sum(p.numel() for p in run.model.parameters())
    routed = sum(p.numel() for moe in run.moes for p in moe.experts.parameters())
    active = total - routed + routed * args.top_k // args.num_experts
    fp8 = ", experts in FP8" if args.fp8 else ""
    processes = f", {num_processes()} processes" if args.fsdp else ""
    return (
        f"{total:,} parameters, {active:,} active per byte ({args.top_k} of {args.num_experts} experts)\n"
        f"{args.data or 'Python standard library'}, {len(run.training_text) / 1e6:.1f} MB; "
        f"{device_name(args)}, {args.dtype}{fp8}{processes}"
    )


def speeds(runs):
    """Tokens per second of every run, and the ratio of two."""
    values = [run.log[-1]["tokens_per_second"] for run in runs]
    text = ", ".join(f"{run.experts} {v:,.0f} tokens/s" for run, v in zip(runs, values, strict=True))
    return f"{text}: {values[0] / values[1]:.2f}x" if len(runs) == 2 and values[1] else text


def draw(runs, path):
    """Training and validation curves over the steps; of two runs, which have equal curves, also over time."""
    figure = Figure(figsize=(5.5 * len(runs) + 2, 5), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, unit in zip(panels, ("step", "seconds"), strict=False):
        for run, color, width in zip(runs, ("tab:blue", "tab:orange"), (4, 1.5), strict=False):
            # The first run's curves are wider, to show under the second's.
            means = [(r[unit], sum(r["loss"]) / len(r["loss"]) / math.log(2)) for r in run.log if r["loss"]]
            axes.plot(*zip(*means, strict=True), color=color, lw=width, alpha=0.4)
            points = [(r[unit], r["bits_per_byte"]) for r in run.log if r["loss"] and "bits_per_byte" in r]
            style = {"color": color, "lw": width, "ms": width + 3, "label": run.experts}
            axes.plot([x for x, _ in points], [y for _, y in points], "o-", **style)
        axes.set(xlabel="step" if unit == "step" else "seconds of training", ylim=(0, 8.5), xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(title="validation; pale: training")
    panels[0].set_ylabel("bits per byte")
    figure.suptitle(f"Byte-level MoE language model, {describe(runs[0])}\n{speeds(runs)}", fontsize=10)
    figure.savefig(path, dpi=100)


def report_comparison(fused, loop):
    """Prints and logs how FusedMoE's curves differ from the for-loop's, relative to the latter."""
    losses = ([loss for report in run.log for loss in report["loss"]] for run in (fused, loop))
    pairs = list(zip(*losses, strict=True))[:COMPARED_STEPS]
    ours, theirs = fused.log[-1], loop.log[-1]
    loss = max(abs(a - b) / b for a, b in pairs)
    bits = abs(ours["bits_per_byte"] / theirs["bits_per_byte"] - 1)
    print(
        f"fused against loop: over the first {COMPARED_STEPS} steps the losses differ by {loss:.1e} at most, "
        f"the final validation by {bits:.2%}"
    )
    speedup = ours["tokens_per_second"] / theirs["tokens_per_second"]
    found = {"loss_difference": loss, "validation_difference": bits, "speedup": speedup}
    if process() == 0:
        with open(fused.args.out / "log.jsonl", "a") as log:
            print(json.dumps(found), file=log)


# ---- Command line ----------------------------------------------------------------------------------


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description="Trains a small byte-level Mixture-of-Experts language model with fused_moe.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--experts", choices=EXPERTS, default="fused", help="FusedMoE or the for-loop")
    which.add_argument("--compare", action="store_true", help="train both in turns, and compare the curves")
    add("--data", type=Path, metavar="FOLDER", help="text files to train on; None: Python's standard library")
    add("--out", type=Path, metavar="FOLDER", help="for plot, log and checkpoint; None: runs/TIME")
    add(
        "--resume", action="store_true", help="go on with the run in OUT, or else the newest; keeps its flags"
    )
    add("--steps", type=positive, default=800, help="in all; on --resume, more steps prolong the run")
    add("--batch-size", type=positive, default=4, help="windows of text per step")
    add("--seq-len", type=positive, default=256, help="bytes per window")
    add("--layers", type=positive, default=2)
    add("--dim", type=positive, default=128, help=f"model width, a multiple of {HEAD_DIM}")
    add("--hidden-dim", type=positive, default=64, help="width of one expert")
    add("--num-experts", type=positive, default=64)
    add("--top-k", type=positive, default=8, help="experts per byte")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=0)
    add("--prompt", default=PROMPT, help="of the text that the model writes before and after training")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of GEMMs; bfloat16: autocast")
    add("--fp8", action="store_true", help="train the experts in FP8; widths are multiples of 128")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it is supported")
    add("--threads", type=positive, help="of the CPU; None: PyTorch's choice")
    add("--compile", action="store_true", help="torch.compile the model, unless its experts are the loop")
    add("--fsdp", action="store_true", help="under torchrun: fully_shard the model over its processes")
    add(
        "--expert-parallel",
        type=positive,
        metavar="N",
        default=1,
        help="with --fsdp: shard the experts over N processes, with all-to-all for the tokens",
    )
    args = parser.parse_args(argv)

    if args.resume:
        args = with_saved_flags(args, argv, parser)
    args.out = args.out or Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    if args.dim % HEAD_DIM:
        parser.error(f"--dim {args.dim} is not a multiple of {HEAD_DIM}")
    if args.top_k > args.num_experts:
        parser.error(f"--top-k {args.top_k} is more than --num-experts {args.num_experts}")
    if args.data and not args.data.is_dir():
        parser.error(f"--data {args.data}: no such folder")
    if not args.prompt:
        parser.error("--prompt is empty")
    check_processes(args, parser)
    args.device = chosen_device(args.device, parser)
    if args.fp8:
        check_fp8(args, parser)
    return args


def check_fp8(args, parser):
    if args.compare or args.experts != "fused":
        parser.error("--fp8 needs --experts fused")
    for flag, width in (("--dim", args.dim), ("--hidden-dim", args.hidden_dim)):
        if width % FP8_BLOCK:
            parser.error(
                f"--fp8 needs a multiple of {FP8_BLOCK}, such as {flag} {FP8_BLOCK}, not {flag} {width}"
            )
    if args.device.type == "cuda" and args.dtype != "bfloat16":
        parser.error("--fp8 on a GPU needs --dtype bfloat16")


def chosen_device(name, parser):
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    if name == "auto":
        name = "cuda" if fused_moe.info()["tiers"]["cuda"].startswith("on") else "cpu"
    return torch.device(name)


def find_checkpoint(folder, flag, parser):
    """The one in the folder, or else the newest run's."""
    files = [folder / "checkpoint.pt"] if folder else Path("runs").glob("*/checkpoint.pt")
    files = sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime)
    if not files:
        parser.error(f"{flag}: no checkpoint.pt in {folder or 'runs/*'}")
    return files[-1]


def with_saved_flags(args, argv, parser):
    """The arguments of --resume: what is not on the command line is as the run was started."""
    file = find_checkpoint(args.out, "--resume", parser)
    saved = torch.load(file, mmap=True, map_location="cpu", weights_only=True)["config"]
    saved = {"fp8": False, **saved}  # a run of a version without this flag
    parser.set_defaults(**saved, out=file.parent)
    args = parser.parse_args(argv)
    for name, value in config(args).items():
        if name != "steps" and value != saved[name]:
            flag = "--" + name.replace("_", "-")
            parser.error(f"--resume: {args.out} was made with {flag} {saved[name]}, not {value}")
    return args


def check_processes(args, parser):
    under_torchrun = dist.is_torchelastic_launched()
    if args.fsdp != under_torchrun:
        parser.error("--fsdp needs torchrun, and torchrun needs --fsdp")
    processes, ranks = int(os.environ["WORLD_SIZE"]) if under_torchrun else 1, args.expert_parallel
    if args.batch_size % processes:
        parser.error(f"--batch-size {args.batch_size} is not a multiple of the {processes} processes")
    if args.fsdp and args.compile:
        parser.error("--compile needs a single process")
    if ranks == 1:
        return
    if processes % ranks or args.num_experts % processes:
        parser.error(
            f"--expert-parallel {ranks} must divide the number of processes, {processes}, which must "
            f"divide --num-experts {args.num_experts}"
        )
    if args.compare or args.experts != "fused":
        parser.error("--expert-parallel needs --experts fused")


def main(argv=None):
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = load_text(args.data, args.seq_len)
    with joined_processes(args):
        train_all(args, texts)


def train_all(args, texts):
    if process() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    runs = [Run(args, experts, texts) for experts in (EXPERTS if args.compare else [args.experts])]
    print(describe(runs[0]))
    if args.resume:
        load(runs, args)
    else:
        for run in runs:
            start = {"experts": run.experts, "step": 0, "seconds": 0.0, "tokens_per_second": 0.0, "loss": []}
            run.log.append({**start, "bits_per_byte": run.validate()})
        print(f"\nBefore training:\n{runs[0].generate()}\n")

    # Several processes could stop at different steps and deadlock; there Ctrl-C acts as usual.
    interrupt = Interrupt()
    with contextlib.nullcontext() if args.fsdp else interrupt:
        train(runs, args, interrupt)
    if process() == 0:
        draw(runs, args.out / "loss.png")
    if interrupt.requested:
        print(f"\nsaved at step {runs[0].steps}; to go on from there:")
        print(f"  {command('train_lm.py', '--resume', '--out', args.out)}")
    else:
        print(f"\nAfter {args.steps} steps:\n{runs[0].generate()}\n\n{speeds(runs)}")
        if args.compare:
            report_comparison(*runs)
        print("\nto train it for longer, and to let it write more:")
        print(f"  {command('train_lm.py', '--resume', '--out', args.out, '--steps', 2 * args.steps)}")
        print(f"  {command('generate.py', '--run', args.out, '--experts', runs[0].experts)}")
    for name in ("loss.png", "log.jsonl", "checkpoint.pt"):
        print(f"wrote {args.out / name}")


if __name__ == "__main__":
    main()
