"""Trains a small byte-level Mixture-of-Experts language model with fused_moe.

    python examples/train_lm.py                   on the sources of Python's standard library
    python examples/train_lm.py --data FOLDER     on the text files in a folder
    python examples/train_lm.py --compare         FusedMoE against the for-loop, from the same seed
    python examples/train_lm.py --resume          resumes from OUT/checkpoint.pt

    torchrun --nproc-per-node 2 examples/train_lm.py --fsdp                       in two processes
    torchrun --nproc-per-node 2 examples/train_lm.py --fsdp --expert-parallel 2   half of the experts each

The model is a decoder-only transformer with `fused_moe.FusedMoE` as the feed-forward layer of every block. It
runs on a GPU if there is one, else on the CPU, and writes OUT/loss.png, OUT/log.json and OUT/checkpoint.pt.

The batch and the learning rate of a step depend only on the flags and the step's number. So no state of a
data loader, a scheduler or a random generator has to be saved, and on a CPU a resumed run gives bit for bit
the losses of an uninterrupted one.

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
import signal
import sysconfig
import time
from pathlib import Path

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
WARMUP_STEPS = 50
REPORT_EVERY = 10  # steps
VALIDATE_EVERY = 100  # steps
VALIDATION_WINDOWS = 128
FULL_STATE = checkpoint.StateDictOptions(
    full_state_dict=True, cpu_offload=True
)  # as a single process saves it
COMPARED_STEPS = 50  # over which --compare compares the two loss curves

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


def clip_gradients(parameters, max_norm):
    """nn.utils.clip_grad_norm_, which does not support DTensors of several meshes."""
    if not dist.is_initialized():
        nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    grads = [p.grad.to_local() for p in parameters]
    # Shards do not overlap, so the squares of the local norms add up.
    norm = sum_over_processes(nn.utils.get_total_norm(grads).square()).sqrt()
    for grad in grads:
        grad.mul_((max_norm / norm).clamp_max(1))


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


def rotary_table(length, device):
    """cos and sin of every position times every frequency: (length, HEAD_DIM / 2) each."""
    frequency = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=device)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        # (B, L, 3 * D) -> three (B, heads, L, HEAD_DIM)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


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
    """Bytes (B, L) -> logits of the next byte (B, L, 256)."""

    def __init__(self, args, experts):
        super().__init__()
        self.embedding = nn.Embedding(256, args.dim)
        self.blocks = nn.ModuleList(Block(args, experts) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, 256, bias=False)
        # With PyTorch's default, std 1, the first blocks would contribute little to the residual stream.
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, inputs):
        cos, sin = rotary_table(inputs.shape[1], inputs.device)
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


# ---- Training --------------------------------------------------------------------------------------


def learning_rate(step, args):
    """A linear warm-up, then a cosine that ends at zero."""
    warmup = min(1, (step + 1) / WARMUP_STEPS)
    return args.lr * warmup * (1 + math.cos(math.pi * step / args.steps)) / 2


class Run:
    """Model, optimizer and log: all state of a training run. The number of losses is the step."""

    def __init__(self, args, experts, texts, out):
        self.args, self.experts, self.out = args, experts, out
        self.training_text, self.validation_text = (text.to(args.device) for text in texts)
        torch.manual_seed(args.seed)
        self.model = LanguageModel(args, experts).to(
            args.device
        )  # initialised on the CPU: the same everywhere
        self.moes = [block.moe for block in self.model.blocks]
        if args.fsdp:
            shard(self.model, args)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        # The losses depend on these flags. The others may change when a run is resumed.
        others = "experts compare device threads compile out resume fsdp expert_parallel".split()
        flags = {name: value for name, value in vars(args).items() if name not in others}
        self.log = {
            "config": {**flags, "experts": experts, "data": str(args.data or "the standard library")},
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "fused_moe": fused_moe.__version__,
            },
            "device": str(args.device),
            "seconds": 0.0,  # of training steps
            "tokens_per_second": 0.0,
            "expert_load": [],  # tokens of the largest expert over the mean, per layer
            "validation": [],  # bits per byte
            "loss": [],  # nats per byte, per step
        }
        out.mkdir(parents=True, exist_ok=True)
        if args.resume and self.checkpoint.exists():
            self.load()
        if args.compile and experts == "fused":  # the loop's shapes depend on data: it would recompile
            self.model.compile()

    @property
    def checkpoint(self):
        return self.out / "checkpoint.pt"

    def loss(self, inputs, targets):
        # bfloat16 by autocast: weights and optimizer stay in float32, because late updates are below
        # bfloat16's 8 bits of precision and would be rounded away.
        bfloat16 = self.args.dtype == "bfloat16"
        with torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=bfloat16):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, number):
        """One optimizer step. Returns its loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.args)
        loss = self.loss(*training_batch(self.training_text, number, self.args))
        self.optimizer.zero_grad()
        loss.backward()
        clip_gradients(list(self.model.parameters()), 1.0)
        self.optimizer.step()
        self.tokens_per_expert = sum_over_processes(torch.stack([moe.tokens_per_expert for moe in self.moes]))
        for moe in self.moes:
            moe.update_expert_bias()  # it also zeroes tokens_per_expert
        return sum_over_processes(loss.detach()) / num_processes()

    @torch.no_grad()
    def validate(self):
        """Bits per byte over evenly spaced windows of the text, the same ones every time.

        Each process computes all windows, so all processes enter the same collectives equally often.
        """
        self.model.eval()
        text, args, nats = self.validation_text, self.args, 0.0
        last = len(text) - args.seq_len - 1
        starts = torch.arange(VALIDATION_WINDOWS) * last // (VALIDATION_WINDOWS - 1)
        for part in starts.split(args.batch_size):
            nats += self.loss(*windows(text, part, args.seq_len)).item() * len(part)
        self.model.train()
        return nats / len(starts) / math.log(2)

    def save(self):
        """Writes a temporary file first: a crash while writing does not damage the last checkpoint."""
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizer, options=FULL_STATE)
        if process():
            return
        state = {"model": model, "optimizer": optimizer, "log": self.log}
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.checkpoint)
        write_json(self.out / "log.json", self.log)

    def load(self):
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        for name, value in self.log["config"].items():
            saved = state["log"]["config"].get(name)
            if saved != value:
                flag = "--" + name.replace("_", "-")
                raise SystemExit(f"train_lm: {self.checkpoint} was made with {flag} {saved}, not {value}")
        checkpoint.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=FULL_STATE,
        )
        self.log = state["log"]


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


def train(run, interrupt):
    """Trains up to the last step or an interrupt, and writes all files."""
    args, log = run.args, run.log
    first = len(log["loss"])
    bar_format = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"
    settings = {"initial": first, "total": args.steps, "bar_format": bar_format, "disable": process() > 0}
    with tqdm(desc=run.experts, **settings) as bar:
        losses, start = [], time.perf_counter()
        for done in range(first + 1, args.steps + 1):
            losses.append(run.step(done - 1))
            bar.update()
            stop = interrupt.requested or done == args.steps
            if not stop and done % REPORT_EVERY:
                continue
            # Reading a value synchronises with the device, so not every step does it.
            log["loss"] += torch.stack(losses).tolist()
            log["seconds"] += time.perf_counter() - start
            log["tokens_per_second"] = done * args.batch_size * args.seq_len / log["seconds"]
            load = run.tokens_per_expert.amax(dim=1) / run.tokens_per_expert.mean(dim=1)
            log["expert_load"].append({"step": done, "max_over_mean": load.tolist()})
            if done % VALIDATE_EVERY == 0 or done == args.steps:
                log["validation"].append({"step": done, "bits_per_byte": run.validate()})
                bar.write(f"{run.experts} {done}/{args.steps}  {summary(log)}")
            bar.set_postfix_str(summary(log))
            if stop or done % VALIDATE_EVERY == 0:
                run.save()
            if stop:
                break
            losses, start = [], time.perf_counter()
    if process() == 0:
        draw(run.out / "loss.png", [log])


# ---- Reports ---------------------------------------------------------------------------------------


def describe(run):
    total = sum(p.numel() for p in run.model.parameters())
    routed = sum(p.numel() for moe in run.moes for p in moe.experts.parameters())
    active = total - routed + routed * run.args.top_k // run.args.num_experts
    processes = f", {num_processes()} processes" if run.args.fsdp else ""
    return (
        f"{run.experts}: {total:,} parameters, {active:,} of them active per byte; text of "
        f"{len(run.training_text):,} bytes, {len(run.validation_text):,} more for validation; "
        f"{run.args.device}, {run.args.dtype}{processes}"
    )


def summary(log):
    loss, speed = log["loss"][-1], log["tokens_per_second"]
    bits = f"{log['validation'][-1]['bits_per_byte']:.3f}" if log["validation"] else "-"
    load = max(log["expert_load"][-1]["max_over_mean"])
    return f"loss {loss:.3f}, val {bits} bits/byte, {speed:,.0f} tokens/s, load {load:.2f}"


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def draw(path, logs):
    """Training and validation curves of every log. The first log's are wider, to show under others."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for log, color, width in zip(logs, ("tab:blue", "tab:orange"), (4, 1.5), strict=False):
        name = log["config"]["experts"]
        bits = [loss / math.log(2) for loss in log["loss"]]
        axes.plot(bits, color=color, lw=width / 2, alpha=0.4, label=f"{name}, training")
        steps = [point["step"] for point in log["validation"]]
        bits = [point["bits_per_byte"] for point in log["validation"]]
        axes.plot(steps, bits, "o-", color=color, lw=width, ms=2 * width + 3, label=f"{name}, validation")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 6))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def compare(fused, loop):
    """The differences of FusedMoE's curves from the for-loop's, relative to the latter."""
    pairs = list(zip(fused["loss"], loop["loss"], strict=True))[:COMPARED_STEPS]
    ours, theirs = (log["validation"][-1]["bits_per_byte"] for log in (fused, loop))
    return {
        "loss_difference": max(abs(a - b) / b for a, b in pairs),  # the largest over COMPARED_STEPS
        "validation_difference": abs(ours - theirs) / theirs,  # at the end
    }


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
    which.add_argument("--compare", action="store_true", help="train both, and compare the curves")
    add("--data", type=Path, metavar="FOLDER", help="text files to train on; None: Python's standard library")
    add("--out", type=Path, metavar="FOLDER", default="runs/train_lm", help="for plot, log and checkpoint")
    add("--resume", action="store_true", help="resume from the checkpoint in OUT")
    add("--steps", type=positive, default=600)
    add("--batch-size", type=positive, default=8, help="windows of text per step")
    add("--seq-len", type=positive, default=256, help="bytes per window")
    add("--layers", type=positive, default=3)
    add("--dim", type=positive, default=128, help=f"model width, a multiple of {HEAD_DIM}")
    add("--hidden-dim", type=positive, default=128, help="width of one expert")
    add("--num-experts", type=positive, default=16)
    add("--top-k", type=positive, default=2, help="experts per byte")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of GEMMs; bfloat16: autocast")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if fused_moe supports it",
    )
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

    if args.dim % HEAD_DIM:
        parser.error(f"--dim {args.dim} is not a multiple of {HEAD_DIM}")
    if args.top_k > args.num_experts:
        parser.error(f"--top-k {args.top_k} is more than --num-experts {args.num_experts}")
    if args.data and not args.data.is_dir():
        parser.error(f"--data {args.data}: no such folder")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU")
    check_processes(args, parser)
    first = run_folder(args, "fused" if args.compare else args.experts)
    if args.resume and not (first / "checkpoint.pt").exists():
        parser.error(f"--resume: no checkpoint.pt in {first}")
    if args.device == "auto":
        args.device = "cuda" if fused_moe.info()["tiers"]["cuda"].startswith("on") else "cpu"
    args.device = torch.device(args.device)
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


def run_folder(args, experts):
    return args.out / experts if args.compare else args.out


def main(argv=None):
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = load_text(args.data, args.seq_len)
    with joined_processes(args):
        train_all(args, texts)


def train_all(args, texts):
    logs, interrupt = {}, Interrupt()
    # Several processes could stop at different steps and deadlock; there Ctrl-C acts as usual.
    with contextlib.nullcontext() if args.fsdp else interrupt:
        for experts in EXPERTS if args.compare else [args.experts]:
            run = Run(args, experts, texts, run_folder(args, experts))
            print(describe(run))
            train(run, interrupt)
            logs[experts] = run.log
            done = len(run.log["loss"])
            if done < args.steps:
                print(f"{experts}: saved at step {done}; the same command with --resume continues from there")
                return
    if args.compare:
        comparison = compare(**logs)
        print(
            f"fused against loop: over the first {COMPARED_STEPS} steps the losses differ by "
            f"{comparison['loss_difference']:.1e} at most, the final validation by "
            f"{comparison['validation_difference']:.2%}; {logs['fused']['tokens_per_second']:,.0f} against "
            f"{logs['loop']['tokens_per_second']:,.0f} tokens/s"
        )
        if process() == 0:
            write_json(args.out / "log.json", {**comparison, **logs})
            draw(args.out / "loss.png", logs.values())
    print(f"wrote {args.out}/loss.png and {args.out}/log.json")


if __name__ == "__main__":
    main()
