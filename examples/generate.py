"""Continues a text with a model that train_lm.py trained.

    .venv/bin/python examples/generate.py                                240 bytes, by the newest run
    .venv/bin/python examples/generate.py --prompt "def main("           another prompt
    .venv/bin/python examples/generate.py --temperature 0                always the most likely byte
    .venv/bin/python examples/generate.py --batch 4 --seed 1             four continuations at once
    .venv/bin/python examples/generate.py --quantize int4                with the experts' weights in 4 bits
    .venv/bin/python examples/generate.py --evaluate                     what each format does to the loss

The prompt runs once and fills a cache with its keys and values. Then each step runs one byte per sequence.
On a GPU the step is a CUDA graph, sampling included: nothing in it waits for the host.
"""

import argparse
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import train_lm
from train_lm import HEAD_DIM, positive, printable

import fused_moe
from fused_moe.quantized.formats import FORMATS, GROUPS, width_multiple

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Ways to multiply a format by 8-bit activations, beside 16-bit ones
COMPUTE = {"fp8_block": ("fp8",), "fp8": ("fp8",), "int8": ("int8", "int8_smooth")}
EIGHT_BIT_WIDTHS = 16  # of which they take multiples on a GPU


class Decoder:
    """Continues sequences byte by byte. It takes over the model: attention now has a key-value cache.

    In training the model saw distances below seq_len alone. So the cache is a ring: position p has slot
    p % seq_len, and each byte attends to the last seq_len. Keys are stored rotated, by positions that go on
    counting, since attention depends on differences of positions alone.
    """

    def __init__(self, model, seq_len, batch, temperature):
        self.model, self.seq_len, self.temperature, self.graph = model.eval(), seq_len, temperature, None
        weight = model.head.weight
        # All that lasts from step to step is on the device, and changes in place: a graph has its addresses.
        self.position = torch.zeros((), dtype=torch.long, device=weight.device)
        self.bytes = torch.zeros(batch, 1, dtype=torch.long, device=weight.device)
        self.logits = torch.zeros(batch, 256, device=weight.device)
        shape = (batch, weight.shape[1] // HEAD_DIM, seq_len, HEAD_DIM)
        for block in model.blocks:
            # Zeros, because a masked value is still multiplied, by 0.
            keys, values = weight.new_zeros(shape), weight.new_zeros(shape)
            block.attention.attend = partial(self.attend, keys, values)

    def attend(self, keys, values, q, k, v):
        keys.index_copy_(2, self.slots, k)
        values.index_copy_(2, self.slots, v)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)

    @torch.inference_mode()
    def feed(self, inputs):
        """Runs the next bytes of every sequence, (B, L), and samples those that follow.

        L is 1 except at the start: several bytes at once must not overwrite what one of them attends to.
        """
        device = inputs.device
        positions = self.position + torch.arange(inputs.shape[1], device=device)
        self.slots = positions % self.seq_len
        # What is not written yet is masked. In a full ring that is nothing.
        masked = torch.arange(self.seq_len, device=device) > positions[:, None]
        self.mask = self.model.head.weight.new_zeros(masked.shape).masked_fill_(masked, -math.inf)
        self.logits.copy_(self.model(inputs, positions)[:, -1])
        # The largest logit plus Gumbel noise is a sample. torch.multinomial would wait for the GPU.
        noise = -torch.empty_like(self.logits).exponential_().log()
        self.bytes.copy_((self.logits + self.temperature * noise).argmax(-1, keepdim=True))
        self.position += inputs.shape[1]

    def start(self, prompt, seed):
        """Runs the prompt, the same for every sequence, and samples the first byte into self.bytes."""
        torch.manual_seed(seed)
        self.position.zero_()
        # The model never saw longer texts: of a long prompt only the last seq_len bytes count.
        prompt = torch.tensor(list(prompt[-self.seq_len :]), device=self.bytes.device)
        self.feed(prompt.expand(len(self.bytes), -1))

    def step(self):
        """Runs self.bytes, and replaces them by the next."""
        if self.graph:
            self.graph.replay()
        else:
            self.feed(self.bytes)

    def run(self, prompt, count, seed):
        """Yields the bytes after the prompt: (B, 1), count times."""
        self.start(prompt, seed)
        yield self.bytes.clone()
        for _ in range(count - 1):
            self.step()
            yield self.bytes.clone()

    def capture(self, prompt):
        """Makes the step a CUDA graph: launching kernels one by one takes longer than they run. The sequences
        have to be started afterwards."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warms up the prompt's kernels, too
            self.start(prompt, seed=0)
            for _ in range(3):
                self.feed(self.bytes)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.feed(self.bytes)
        self.graph = graph


def load_model(saved, args):
    """The model of a checkpoint, its weights cast once."""
    model = train_lm.LanguageModel(argparse.Namespace(**saved["config"]), args.experts)
    model.load_state_dict(saved[args.experts]["model"])
    return model.to(args.device, DTYPES[args.dtype])


# ---- Quantised experts -----------------------------------------------------------------------------


def expert_bytes(model):
    """Bytes of the experts' parameters, codes and scales among them."""
    return sum(p.nbytes for block in model.blocks for p in block.moe.experts.parameters())


def misfit(config, format, group_size, multiple=1):
    """Why the model's widths do not take the format, or None if they do. multiple: what they have to be
    multiples of in any case."""
    multiple = max(multiple, width_multiple(format, group_size) if format else 1)
    said = f"--group-size {multiple}" if format == "int4" else multiple
    for name in ("dim", "hidden_dim"):
        if config[name] % multiple:
            return f"the run's --{name.replace('_', '-')} {config[name]} is not a multiple of {said}"
    return None


def variants(config, args):
    """(format, options) of all formats, each computed in every way. Those that cannot run are named."""
    found, on_gpu = [], args.device.type == "cuda"
    for format in FORMATS:
        for compute in (None, *COMPUTE.get(format, ())):
            options = {"compute": compute} if compute else {}
            reason = misfit(config, format, args.group_size, EIGHT_BIT_WIDTHS if compute and on_gpu else 1)
            if compute and on_gpu and args.dtype == "float32":
                reason = "on a GPU it takes --dtype bfloat16"
            if reason:
                print(f"{format_name({'format': format} | options)} is left out: {reason}")
            elif format == "int4":
                groups = {"group_size": args.group_size}
                found += [(format, groups | {"symmetric": flag}) for flag in (True, False)]
            else:
                found.append((format, options))
    return found


def evaluate(saved, args):
    """Yields a record of the trained model, then one for each format of its experts. The loss is in bits per
    byte of the validation text, as train_lm.py reports it."""
    config = argparse.Namespace(**saved["config"])
    _, text = train_lm.load_text(config.data and Path(config.data), config.seq_len)
    text, trained = text.to(args.device), None
    for format, options in ((args.dtype, {}), *variants(saved["config"], args)):
        model = load_model(saved, args).eval()
        if format in FORMATS:
            fused_moe.quantize(model, format, **options)
        loss = train_lm.bits_per_byte(lambda inputs, model=model: model(inputs).float(), text, config)
        trained = loss if trained is None else trained
        record = {"format": format, **options, "loss": loss, "loss_change": loss - trained}
        yield record | {"bytes": expert_bytes(model)}


def format_name(record):
    """A record's format and options in words."""
    name = record["format"]
    if "compute" in record:
        name += f", compute {record['compute']}"
    if "group_size" in record:
        name += f" of {record['group_size']}{'' if record['symmetric'] else ', zero points'}"
    return name


def report_formats(saved, args):
    """Prints a row for each record of `evaluate`, and writes all records into the run's folder."""
    about = {"experts": args.experts, "step": saved[args.experts]["log"][-1]["step"], "dtype": args.dtype}
    about |= {"device": train_lm.device_name(args), "versions": train_lm.versions()}
    records = []
    for record in evaluate(saved, args):
        if not records:
            print(f"{'experts':27}{'bits per byte':>15}{'change':>10}{'bytes':>14}")
        loss, change, size = record["loss"], record["loss_change"], record["bytes"]
        print(f"{format_name(record):27}{loss:15.4f}{change:+10.4f}{size:14,}", flush=True)
        records.append(about | record)
    file = args.run / "formats.json"
    file.write_text(json.dumps(records, indent=1) + "\n")
    print(f"\nwrote {file}")


# ---- Text ------------------------------------------------------------------------------------------


def write(decoder, args):
    """Prints the texts, a single one as it is made, and how long they took."""
    prompt, single, start = args.prompt.encode(), args.batch == 1, time.perf_counter()
    steps = decoder.run(prompt, args.bytes, args.seed)
    made = [next(steps)]
    text = printable(prompt + bytes(made[0][0].tolist()))  # waits for the device
    first = time.perf_counter()
    print(text if single else "", end="", flush=True)
    for step in steps:
        made.append(step)
        if single:
            print(printable(step[0].tolist()), end="", flush=True)
    texts = torch.cat(made, dim=1).tolist()  # waits for the device
    last = time.perf_counter()
    if single:
        print("\n")
    else:
        for number, text in enumerate(texts, 1):
            print(f"---- {number} of {args.batch} ----\n{printable(prompt + bytes(text))}\n")
    length, seconds = min(len(prompt), decoder.seq_len), first - start
    print(f"prefill: {length} bytes, first byte after {1e3 * seconds:.1f} ms")
    if len(made) > 1:
        number, seconds = args.batch * (len(made) - 1), last - first
        step = 1e3 * seconds / (len(made) - 1)
        print(f"decode: {number} bytes, {number / seconds:,.0f} bytes/s, {step:.2f} ms per step")


def temperature(text):
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and at least 0, not {value}")
    return value


def parse_args(argv):
    """The flags and the checkpoint, which has the default of --dtype."""
    parser = argparse.ArgumentParser(
        description="Continues a text with a model that train_lm.py trained.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="FOLDER", help="of train_lm.py, with a checkpoint.pt; None: the newest")
    add("--experts", choices=train_lm.EXPERTS, default="fused", help="of a run of --compare: which model")
    add("--prompt", default=train_lm.PROMPT, help="the text to continue")
    add("--bytes", type=positive, default=train_lm.GENERATED_BYTES, help="how many to write")
    add("--batch", type=positive, default=1, help="number of continuations at once")
    add("--temperature", type=temperature, default=train_lm.TEMPERATURE, help="0: the most likely byte")
    add("--seed", type=int, default=0)
    add("--dtype", choices=DTYPES, help="of weights and activations; None: what the run's GEMMs had")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if it is supported")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--quantize", choices=FORMATS, metavar="FORMAT", help=f"of experts: {', '.join(FORMATS)}"
    )
    which.add_argument(
        "--evaluate",
        action="store_true",
        help="instead of a text: a table of the validation loss with the experts in each format",
    )
    add("--group-size", type=int, choices=GROUPS, default=GROUPS[0], help="of int4: columns per scale")
    args = parser.parse_args(argv)

    file = train_lm.find_checkpoint(args.run, "--run", parser)
    saved = torch.load(file, mmap=True, map_location="cpu", weights_only=True)
    args.run = file.parent
    if args.experts not in saved:
        found = " and ".join(name for name in train_lm.EXPERTS if name in saved)
        parser.error(f"--experts {args.experts}: {file} has only {found}")
    if not args.prompt:
        parser.error("--prompt is empty")
    data = saved["config"]["data"]
    if args.evaluate and data and not Path(data).is_dir():
        parser.error(f"--evaluate: the run's text, {data}, is no folder")
    reason = misfit(saved["config"], args.quantize, args.group_size)
    if reason:
        parser.error(f"--quantize {args.quantize}: {reason}")
    args.dtype = args.dtype or saved["config"]["dtype"]
    args.device = train_lm.chosen_device(args.device, parser)
    return args, saved


def main(argv=None):
    args, saved = parse_args(argv)
    steps = saved[args.experts]["log"][-1]["step"]
    print(f"{args.run}, {args.experts}, step {steps}; {train_lm.device_name(args)}, {args.dtype}")
    if args.evaluate:
        print()
        report_formats(saved, args)
        return
    model = load_model(saved, args)
    if args.quantize:
        before = expert_bytes(model)
        options = {"group_size": args.group_size} if args.quantize == "int4" else {}
        fused_moe.quantize(model, args.quantize, **options)
        print(f"experts: {before:,} bytes, {expert_bytes(model):,} as {args.quantize}")
    print()
    decoder = Decoder(model, saved["config"]["seq_len"], args.batch, args.temperature)
    # The loop reads on the host how many rows each expert has, which a graph cannot.
    if args.device.type == "cuda" and args.experts == "fused":
        decoder.capture(args.prompt.encode())
    write(decoder, args)


if __name__ == "__main__":
    main()
