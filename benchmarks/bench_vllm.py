"""Times a vLLM engine with dummy weights on one GPU: its own experts against fused_moe's.

    python benchmarks/bench_vllm.py --json out.json
    python benchmarks/bench_vllm.py --shape mixtral-8x7b --json out.json --append
    python benchmarks/bench_vllm.py --quantization fp8_block --prompt 128,2048 --json out.json --append
    python benchmarks/bench_vllm.py --quantization fp8_block --prompt 2048,8192 --batch 1,8 --new-tokens 16 \
        --variants stock,fused_moe,fused_moe_codes,fused_moe_float
    python benchmarks/table.py out.json
    python benchmarks/plot.py out.json -o pictures        # serving.png

The model has the architecture and sizes of --shape, and --layers of its layers. Each variant is an engine in
a process of its own, since vLLM reads its environment once: stock, fused_moe, and both with
VLLM_BATCH_INVARIANT=1. They differ in nothing else: stock sets FUSED_MOE_VLLM=0. --variants knows three more,
for a --quantization of 8 bits, which fused_moe multiplies by 8-bit activations: fused_moe_codes multiplies
16-bit ones (FUSED_MOE_VLLM_COMPUTE=codes); the models of fused_moe_float and stock_float are not quantised.
Where fused_moe is not installed, and so no entry point of vLLM's, the process registers it by itself.
--at-once engines share the GPU and are timed in turns, so they have the same clocks and a host as busy.

A record is one variant's figures for --batch requests of --prompt tokens that come at once. first_token_ms is
the time until all of them have one token; tokens_per_s counts the tokens after that. Both are medians of
--repeats, whose values `samples` keeps. gpu_first_token_ms and gpu_step_us are the GPU's time until the
first token and in a decode step, from a profile of another run: kernels, and gaps between them of at most 5
microseconds. Where that is far below the time, the host is the limit. same_bits tells whether the tokens and
log-probabilities of a request are the same alone and among the largest batch. Ratios compare with the stock
engine of the same call, in the same mode; above 1, ours is faster. first_token_ratio_to_VARIANT and its like
compare with other engines of the call: stock, which is not invariant, and the three more.

What vLLM's log says is in the record: `backends` that it chose for the experts, the file of its tuned `tiles`
or none, its attention, and what our plugin says of the layers it runs, in `plugin`. A variant that fails has
records with `failed` and no time; the end of its log is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import bench_transformers
import common
import profiling
import torch

VARIANTS = ("stock", "fused_moe", "stock_invariant", "fused_moe_invariant")
MORE_VARIANTS = ("fused_moe_codes", "fused_moe_float", "stock_float")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SETTINGS = "BENCH_VLLM"  # the environment variable of an engine's process
# Cut like the layers: twelve are a quarter of Qwen3's, and so is this of its vocabulary.
VOCABULARY = 32768
NEW_TOKENS_OF_BITS = 64
PROFILED = 16  # decode steps
GAP = 5  # microseconds between two kernels that count as the GPU's; in a graph they are 1 or 2
KERNELS, KERNEL_NAME = 6, 60  # those that take most of a step, and what is kept of their names
PAGE = 32  # tokens of the cache that a request may have in an unfinished page, and more
COMPILATION = {
    "none": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
QUANTIZATION = ("none", "fp8_block", "fp8", "int8", "int4")


# --- the model ----------------------------------------------------------------------------------------


def model_config(shape: str, layers: int, quantization: str, dtype: str) -> dict:
    """config.json of a checkpoint, with the sizes of shapes.json."""
    sizes = common.layer_sizes(shape)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.dim,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_experts_per_tok": sizes.top_k,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": DTYPES[dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape == "mixtral-8x7b":
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_key_value_heads": 8,
            "num_local_experts": sizes.num_experts,
            "intermediate_size": sizes.hidden_dim,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        }
    else:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "num_experts": sizes.num_experts,
            "intermediate_size": 3 * sizes.dim,
            "moe_intermediate_size": sizes.hidden_dim,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "rms_norm_eps": 1e-6,
        }
    if quantization != "none":
        moe = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
        parts = (f"{moe}.gate", *(f"self_attn.{name}_proj" for name in "qkvo"))
        dense = ["lm_head", *(f"model.layers.{i}.{part}" for i in range(layers) for part in parts)]
        config["quantization_config"] = quantization_config(quantization, dense)
    return config


def quantization_config(name: str, dense: list[str]) -> dict:
    """As published checkpoints have it. dense: the modules that are not quantised, all but the experts."""
    if name == "fp8_block":
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {"quant_method": "fp8", **blocks, "modules_to_not_convert": dense}
    if name == "int4":
        format, weights = "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True}
        group = {"weights": weights | {"strategy": "group", "group_size": 128}}
    else:  # by rows, and activations when they are known
        kind = {"fp8": "float", "int8": "int"}[name]
        format, values = f"{kind}-quantized", {"num_bits": 8, "type": kind, "symmetric": True}
        group = {"weights": values | {"strategy": "channel", "dynamic": False}}
        group["input_activations"] = values | {"strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": dense,
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }


# --- an engine, in its own process --------------------------------------------------------------------


def run_engine(settings: dict) -> None:
    """Starts an engine, then answers requests until there are no more. Both are lines of JSON; all other
    output goes to the log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    began = time.perf_counter()
    import vllm

    if settings["variant"].startswith("fused_moe"):
        from fused_moe.vllm import register

        register()
    engine = Engine(settings)
    started = {"start_s": round(time.perf_counter() - began, 1), "vllm": vllm.__version__}
    print(json.dumps(started), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(engine, request.pop("ask"))(**request)), file=answers, flush=True)


class Engine:
    """The methods without an underscore answer requests."""

    def __init__(self, settings: dict):
        from vllm import LLM

        self._settings, batch, length = settings, max(settings["batch"]), max(settings["prompt"])
        self._new_tokens = settings["new_tokens"]
        most = length + max(self._new_tokens, NEW_TOKENS_OF_BITS)
        self._llm = LLM(
            model=settings["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            max_model_len=most,
            max_num_seqs=batch,
            # Other engines are on the GPU: vLLM is not to look at what is free.
            gpu_memory_utilization=0.02,
            kv_cache_memory_bytes=batch * (most + PAGE) * settings["bytes_per_token"],
            attention_backend=settings["attention"],
            enable_prefix_caching=False,
            seed=0,
            **COMPILATION[settings["compilation"]],
        )
        generator = torch.Generator().manual_seed(0)
        # The first tokens have a meaning: end of a sequence, say.
        self._tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator).tolist()

    def _generate(self, batch: int, length: int, new: int, logprobs: int | None = None) -> list:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": row[:length]} for row in self._tokens[:batch]]
        sampling = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        return [out.outputs[0] for out in self._llm.generate(prompts, sampling, use_tqdm=False)]

    def _seconds(self, *sizes: int) -> float:
        start = time.perf_counter()
        self._generate(*sizes)
        return time.perf_counter() - start

    def _kernels(self, *sizes: int) -> Counter:
        """{name: microseconds} of what the GPU runs, with the gaps between kernels."""
        ran = profiling.kernels(lambda: self._generate(*sizes), steps=1)
        found = Counter({"gaps": profiling.short_gaps(ran, GAP)})
        for launch in profiling.without_overlap(ran):
            found[launch.name] += launch.us
        return found

    def warm_up(self, batch: int, length: int) -> None:
        self._generate(batch, length, 8)  # compiles

    def time(self, batch: int, length: int) -> dict:
        first, whole = self._seconds(batch, length, 1), self._seconds(batch, length, self._new_tokens)
        rate = batch * (self._new_tokens - 1) / (whole - first)
        return {"first_token_ms": round(first * 1e3, 3), "tokens_per_s": round(rate, 1)}

    def profile(self, batch: int, length: int) -> dict:
        """GPU time, and the kernels that take most of a decode step's."""
        if not torch.cuda.is_available():
            return {"gpu_first_token_ms": None, "gpu_step_us": None, "gpu_kernels_us": None}
        first, steps = self._kernels(batch, length, 1), self._kernels(batch, length, PROFILED + 1)
        steps.subtract(first)
        of_a_step = {name[:KERNEL_NAME]: round(us / PROFILED, 1) for name, us in steps.most_common(KERNELS)}
        return {
            "gpu_first_token_ms": round(first.total() / 1e3, 3),
            "gpu_step_us": round(steps.total() / PROFILED, 1),
            "gpu_kernels_us": of_a_step,
        }

    def outputs(self) -> dict:
        """Tokens of the first requests, and whether the first has the same bits alone and among the most."""

        def bits(out) -> tuple:
            return list(out.token_ids), [next(iter(each.values())).logprob for each in out.logprobs]

        length, batch = self._settings["prompt"][0], max(self._settings["batch"])
        among = self._generate(batch, length, NEW_TOKENS_OF_BITS, 0)
        alone = self._generate(1, length, NEW_TOKENS_OF_BITS, 0)
        tokens = [list(out.token_ids) for out in among[:8]]
        return {"same_bits": bits(alone[0]) == bits(among[0]), "tokens": tokens}


def environment(settings: dict) -> dict[str, str]:
    """The variables of an engine's process."""
    own = {
        SETTINGS: json.dumps(settings),
        "NO_COLOR": "1",  # in the log
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the plugin had to be installed
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # another package
        "FUSED_MOE_VLLM": "1" if settings["variant"].startswith("fused_moe") else "0",
        "FUSED_MOE_VLLM_COMPUTE": "codes" if settings["variant"].endswith("codes") else "fp8,int8",
        "VLLM_BATCH_INVARIANT": "1" if settings["variant"].endswith("invariant") else "0",
    }
    paths = [str(common.HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


# --- records ------------------------------------------------------------------------------------------


def said(log: str) -> dict:
    """What vLLM's log says of the experts and the attention."""

    def every(pattern: str) -> list[str]:
        return list(dict.fromkeys(re.findall(pattern, log)))

    backends = [backend.replace("'", "") for backend in every(r"Using (.*?MoE backend)")]
    tiles = [Path(path).name for path in every(r"Using configuration from (\S+) for MoE layer")]
    return {
        "backends": backends,
        "tiles": tiles or None,
        "attention": every(r"Using (\S+) (?:attention )?backend"),
        "plugin": every(r"(?m)(?:^|\] )(fused_moe .*)$"),
    }


class Variant:
    """An engine's process and its log. After it has ended, since it failed or was over the limit, its answers
    are None."""

    def __init__(self, name: str, settings: dict, folder: Path, limit: float):
        self.name, self.log = name, folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__],
                env=environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.timer = threading.Timer(limit, self.process.kill)
        self.timer.start()

    def answer(self) -> dict | None:
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def ask(self, ask: str, **request) -> dict | None:
        try:
            self.process.stdin.write(json.dumps({"ask": ask, **request}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def end(self) -> int:
        """The exit status of the process."""
        try:
            self.process.stdin.close()
        except BrokenPipeError:  # of what was not read
            pass
        code = self.process.wait()
        self.timer.cancel()
        return code


def run_variants(names: list[str], shape: str, dtype: str, options: argparse.Namespace, work: Path) -> dict:
    """{variant: its figures, or {"failed": ...}}. All engines start at once, and are timed in turns."""
    configs = {v: model_config(shape, options.layers, quantization_of(v, options), dtype) for v in names}
    config = configs[names[0]]
    asked = ("batch", "prompt", "new_tokens", "attention", "compilation")
    shared = {name: getattr(options, name) for name in asked} | {
        "dtype": DTYPES[dtype],
        # of keys and values, 16 bits each
        "bytes_per_token": options.layers * config["num_key_value_heads"] * config["head_dim"] * 4,
    }
    variants = []
    for name in names:
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(configs[name]))
        settings = shared | {"variant": name, "model": str(folder)}
        variants.append(Variant(name, settings, folder, options.limit))

    found: dict[str, dict] = {v.name: {"runs": []} | (v.answer() or {}) for v in variants}
    for prompt, batch in product(options.prompt, options.batch):
        sizes = {"batch": batch, "length": prompt}
        for v in variants:
            v.ask("warm_up", **sizes)
        answers = defaultdict(list)
        for repeat in range(options.repeats):
            first = repeat % len(variants)
            for v in variants[first:] + variants[:first]:
                answers[v.name].append(v.ask("time", **sizes))
        for v in variants:
            gpu = v.ask("profile", **sizes)
            if gpu and all(answers[v.name]):
                samples = {key: [each[key] for each in answers[v.name]] for key in answers[v.name][0]}
                found[v.name]["runs"].append({"batch": batch, "prompt": prompt, "samples": samples} | gpu)
    for v in variants:
        found[v.name] |= v.ask("outputs") or {}
        code, text = v.end(), v.log.read_text()
        found[v.name] |= said(text)
        if code:
            print(f"{v.name} failed ({code}):", *text.splitlines()[-40:], sep="\n", flush=True)
            found[v.name] = {"failed": str(code)} | said(text)
    return found


def peer_of(variant: str) -> str:
    """The stock engine in the same mode, on the same weights."""
    return variant.replace("fused_moe", "stock").removesuffix("_codes")


def quantization_of(variant: str, options: argparse.Namespace) -> str:
    return "none" if variant.endswith("float") else options.quantization


def compared(variant: str, run: dict, found: dict[str, dict]) -> dict:
    """Our ratios to other engines, for one batch and prompt; above 1, ours is faster."""
    if not ("samples" in run and variant.startswith("fused_moe")):
        return {}
    peer = peer_of(variant)
    ratios: dict = {}
    for name in dict.fromkeys((peer, "stock", *(name for name in MORE_VARIANTS if name != variant))):
        sizes = run["batch"], run["prompt"]
        theirs = [r for r in found.get(name, {}).get("runs", []) if (r["batch"], r["prompt"]) == sizes]
        if not theirs:
            continue
        faster = {
            "ratio": medians_of(run)["tokens_per_s"] / medians_of(theirs[0])["tokens_per_s"],
            "first_token_ratio": medians_of(theirs[0])["first_token_ms"] / medians_of(run)["first_token_ms"],
        }
        if run["gpu_step_us"]:
            faster["gpu_step_ratio"] = theirs[0]["gpu_step_us"] / run["gpu_step_us"]
            faster["gpu_first_token_ratio"] = theirs[0]["gpu_first_token_ms"] / run["gpu_first_token_ms"]
        faster = {key: round(value, 3) for key, value in faster.items()}
        ratios |= {f"{key}_to_{name}": value for key, value in faster.items()}
        if name == peer:
            ratios |= {"peer": peer, "peer_ratio": faster.pop("ratio")} | faster
    return ratios


def medians_of(run: dict) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in run["samples"].items()}


def records(
    variant: str, shape: str, dtype: str, options: argparse.Namespace, found: dict[str, dict]
) -> Iterator[dict]:
    """One for each batch and prompt of a variant."""
    engine = found[variant]
    every = {name: engine.get(name) for name in ("backends", "tiles", "attention", "plugin", "failed")}
    every |= {name: engine.get(name) for name in ("same_bits", "start_s", "vllm")}
    tokens = [found.get(name, {}).get("tokens") for name in (variant, peer_of(variant))]
    quantization = quantization_of(variant, options)
    if all(tokens) and variant.startswith("fused_moe") and quantization != "int4":
        same = torch.tensor(tokens[0]) == torch.tensor(tokens[1])
        every["same_tokens"] = round(same.double().mean().item(), 4)
    sizes = [(batch, prompt) for prompt in options.prompt for batch in options.batch]
    runs = engine.get("runs") or [{"batch": batch, "prompt": prompt} for batch, prompt in sizes]
    for run in runs:
        medians = medians_of(run) if "samples" in run else {}
        rate = medians.get("tokens_per_s")
        kind = dtype if quantization == "none" else quantization
        yield common.record(
            options,
            bench="vllm",
            shape=f"{shape}, {options.layers} layers, {kind}, prompt {run['prompt']}",
            routing="random",
            mode="compiled" if options.compilation == "default" else common.DEFAULT_MODE,
            dtype=dtype,
            what=variant,
            tokens=run["batch"],
            time_us=round(run["batch"] / rate * 1e6, 1) if rate else None,
            model=shape,
            layers=options.layers,
            vocabulary=VOCABULARY,
            quantization=quantization,
            compilation=options.compilation,
            new_tokens=options.new_tokens,
            **run,
            **medians,
            **compared(variant, run, found),
            **every,
        )


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(options.variants), options.at_once):
            names = options.variants[first : first + options.at_once]
            found |= run_variants(names, shape, dtype, options, options.work or Path(folder))
            for variant in names:
                yield from records(variant, shape, dtype, options, found)


def main(argv: list[str] | None = None) -> None:
    if SETTINGS in os.environ:
        run_engine(json.loads(os.environ[SETTINGS]))
        return
    flags = common.parser(__doc__)
    add, numbers = flags.add_argument, bench_transformers.counts
    more = f"default: %(default)s; or of {','.join(MORE_VARIANTS)}"
    add("--variants", default=",".join(VARIANTS), metavar="A,B,..", help=more)
    weights = f"of the weights: {', '.join(QUANTIZATION)}"
    add("--quantization", choices=QUANTIZATION, default="none", metavar="FORMAT", help=weights)
    add("--layers", type=int, default=12, metavar="N", help="of the model; default: 12")
    batches = [1, 8, 32, 128]
    add("--batch", type=numbers, default=batches, metavar="A,B,..", help="requests; default: 1,8,32,128")
    add("--prompt", type=numbers, default=[128], metavar="A,B,..", help="tokens of each; default: 128")
    add("--new-tokens", type=int, default=128, metavar="N", help="of each request; default: 128")
    graphs = "default, or none: graphs of decode steps alone, as without the flag"
    add("--compilation", choices=COMPILATION, default="none", metavar="NAME", help=graphs)
    add("--attention", default="FLASH_ATTN", metavar="NAME", help="vLLM's backend; default: FLASH_ATTN")
    add("--at-once", type=int, default=len(VARIANTS), metavar="N", help="engines on the GPU; default: 4")
    add("--limit", type=float, default=400, metavar="SECONDS", help="for all engines at once; default: 400")
    add("--work", type=Path, metavar="FOLDER", help="keeps the logs there")
    options = flags.parse_args(argv)
    options.variants = options.variants.split(",")
    if not set(options.variants) <= {*VARIANTS, *MORE_VARIANTS}:
        flags.error(f"--variants: expected some of {','.join((*VARIANTS, *MORE_VARIANTS))}")
    options.dtype = options.dtype or ["bf16"]
    if not set(options.dtype) <= set(DTYPES):
        flags.error(f"--dtype: expected one of {','.join(DTYPES)}")
    options.shape = options.shape or ["qwen3-30b"]
    options.repeats = options.repeats or 3
    common.start(options)
    if any(r["failed"] for r in common.report(options, measure)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
