"""Times a vLLM engine with dummy weights on one GPU: its own experts against fused_moe's.

    python benchmarks/bench_vllm.py --json out.json
    python benchmarks/bench_vllm.py --shape mixtral-8x7b --json out.json --append
    python benchmarks/bench_vllm.py --quantization fp8_block --prompt 128,2048 --json out.json --append
    python benchmarks/table.py out.json
    python benchmarks/plot.py out.json -o pictures        # serving.png

The model has the architecture and sizes of --shape, and --layers of its layers. Each variant is an engine in
a process of its own, since vLLM reads its environment once: stock, fused_moe, and both with
VLLM_BATCH_INVARIANT=1. They differ in nothing else: stock sets FUSED_MOE_VLLM=0. Where fused_moe is not
installed, and so no entry point of vLLM's, the process registers it by itself.

A record is one variant's figures for --batch requests of --prompt tokens that come at once. first_token_ms is
the time until all of them have one token; tokens_per_s counts the tokens after that. Both are medians of
--repeats, whose values `samples` keeps. same_bits tells whether the tokens and log-probabilities of a request
are the same alone and among the largest batch. Ratios compare with the stock engine of the same call, in the
same mode; ratio_to_stock of fused_moe_invariant is to the engine that is not invariant.

What vLLM's log says is in the record: `backends` that it chose for the experts, the file of its tuned `tiles`
or none, its attention, and what our plugin says of the layers it runs, in `plugin`. A variant that fails has
a record with `failed` and no time; the end of its log is printed.
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
import time
from collections.abc import Iterator
from pathlib import Path

import bench_transformers
import common
import torch

VARIANTS = ("stock", "fused_moe", "stock_invariant", "fused_moe_invariant")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
SETTINGS = "BENCH_VLLM"  # the environment variable of an engine's process
# Cut like the layers: twelve are a quarter of Qwen3's, and so is this of its vocabulary.
VOCABULARY = 32768
NEW_TOKENS_OF_BITS = 64
COMPILATION = {
    "none": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
QUANTIZATION = ("none", "fp8_block", "int4")


# --- the model ----------------------------------------------------------------------------------------


def model_config(shape: str, layers: int, quantization: str, dtype: str) -> dict:
    """config.json of a checkpoint, with the sizes of fused_moe/shapes.json."""
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
        dense = ["lm_head", *(f"model.layers.{i}.{moe}.gate" for i in range(layers))]
        config["quantization_config"] = quantization_config(quantization, dense)
    return config


def quantization_config(name: str, dense: list[str]) -> dict:
    """As published checkpoints have it. dense: modules that are not quantised."""
    if name == "fp8_block":
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {"quant_method": "fp8", **blocks, "modules_to_not_convert": dense}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": dense,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# --- an engine, in its own process --------------------------------------------------------------------


def run_engine(settings: dict) -> None:
    """Times every batch and prompt, and writes what it found to settings["record"]."""
    began = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    if settings["variant"].startswith("fused_moe"):
        from fused_moe.vllm import register

        register()

    batches, lengths, new_tokens = settings["batch"], settings["prompt"], settings["new_tokens"]
    llm = LLM(
        model=settings["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=max(lengths) + max(new_tokens, NEW_TOKENS_OF_BITS),
        max_num_seqs=max(batches),
        gpu_memory_utilization=0.8,
        attention_backend=settings["attention"],
        enable_prefix_caching=False,
        seed=0,
        **COMPILATION[settings["compilation"]],
    )
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    # The first tokens have a meaning: end of a sequence, say.
    tokens = torch.randint(3, VOCABULARY, (max(batches), max(lengths)), generator=generator).tolist()

    def generate(batch: int, length: int, new: int, logprobs: int | None = None) -> list:
        prompts = [{"prompt_token_ids": row[:length]} for row in tokens[:batch]]
        sampling = SamplingParams(
            temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        return [out.outputs[0] for out in llm.generate(prompts, sampling, use_tqdm=False)]

    def seconds(*sizes: int) -> float:
        start = time.perf_counter()
        generate(*sizes)
        return time.perf_counter() - start

    runs = []
    for length in lengths:
        for batch in batches:
            seconds(batch, length, 8)  # compiles and warms up
            samples = {"first_token_ms": [], "tokens_per_s": []}
            for _ in range(settings["repeats"]):
                first, whole = seconds(batch, length, 1), seconds(batch, length, new_tokens)
                samples["first_token_ms"].append(round(first * 1e3, 3))
                samples["tokens_per_s"].append(round(batch * (new_tokens - 1) / (whole - first), 1))
            runs.append({"batch": batch, "prompt": length, "samples": samples})

    def bits(out) -> tuple:
        return list(out.token_ids), [next(iter(each.values())).logprob for each in out.logprobs]

    among = generate(max(batches), lengths[0], NEW_TOKENS_OF_BITS, 0)
    alone = generate(1, lengths[0], NEW_TOKENS_OF_BITS, 0)
    found = {
        "runs": runs,
        "same_bits": bits(alone[0]) == bits(among[0]),
        "tokens": [list(out.token_ids) for out in among[:8]],
        "start_s": round(started - began, 1),
        "whole_s": round(time.perf_counter() - began, 1),
        "vllm": vllm.__version__,
    }
    Path(settings["record"]).write_text(json.dumps(found))


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


def run_variant(variant: str, shape: str, dtype: str, options: argparse.Namespace, folder: Path) -> dict:
    """The figures of an engine, or {"failed": ...}."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(shape, options.layers, options.quantization, dtype)
    (folder / "config.json").write_text(json.dumps(config))
    asked = ("batch", "prompt", "new_tokens", "repeats", "attention", "compilation")
    settings = {name: getattr(options, name) for name in asked} | {
        "variant": variant,
        "model": str(folder),
        "dtype": DTYPES[dtype],
        "record": str(folder / "found.json"),
    }
    with (folder / "log").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, __file__],
                env=environment(settings),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=options.limit,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"over {options.limit:g} s"
    text = (folder / "log").read_text()
    if code == 0:
        return json.loads((folder / "found.json").read_text()) | said(text)
    print(f"{variant} failed ({code}):", *text.splitlines()[-40:], sep="\n", flush=True)
    return {"failed": str(code)} | said(text)


def compared(variant: str, run: dict, found: dict[str, dict], medians: dict[str, float]) -> dict:
    """Our ratios to the stock engines, for one batch and prompt; above 1, ours is faster."""
    if not (medians and variant.startswith("fused_moe")):
        return {}
    peer = variant.replace("fused_moe", "stock")
    ratios: dict = {}
    for name in dict.fromkeys((peer, "stock")):
        theirs = [r for r in found.get(name, {}).get("runs", []) if r["batch"] == run["batch"]]
        theirs = [medians_of(r) for r in theirs if r["prompt"] == run["prompt"]]
        if not theirs:
            continue
        speed = round(medians["tokens_per_s"] / theirs[0]["tokens_per_s"], 3)
        first = round(theirs[0]["first_token_ms"] / medians["first_token_ms"], 3)
        ratios |= {f"ratio_to_{name}": speed, f"first_token_ratio_to_{name}": first}
        if name == peer:
            ratios |= {"peer": peer, "peer_ratio": speed, "first_token_ratio": first}
    return ratios


def medians_of(run: dict) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in run["samples"].items()}


def records(shape: str, dtype: str, options: argparse.Namespace, found: dict[str, dict]) -> Iterator[dict]:
    """One for each batch and prompt of the variant that ran last."""
    variant, engine = list(found.items())[-1]
    every = {name: engine.get(name) for name in ("backends", "tiles", "attention", "plugin", "failed")}
    every |= {name: engine.get(name) for name in ("same_bits", "start_s", "whole_s", "vllm")}
    tokens = [found.get(name, {}).get("tokens") for name in (variant, variant.replace("fused_moe", "stock"))]
    if all(tokens) and variant.startswith("fused_moe") and options.quantization != "int4":
        same = torch.tensor(tokens[0]) == torch.tensor(tokens[1])
        every["same_tokens"] = round(same.double().mean().item(), 4)
    sizes = [(batch, prompt) for prompt in options.prompt for batch in options.batch]
    runs = engine.get("runs") or [{"batch": batch, "prompt": prompt} for batch, prompt in sizes]
    for run in runs:
        medians = medians_of(run) if "samples" in run else {}
        rate = medians.get("tokens_per_s")
        kind = dtype if options.quantization == "none" else options.quantization
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
            quantization=options.quantization,
            compilation=options.compilation,
            new_tokens=options.new_tokens,
            **run,
            **medians,
            **compared(variant, run, found, medians),
            **every,
        )


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        for variant in options.variants:
            found[variant] = run_variant(variant, shape, dtype, options, work / variant)
            yield from records(shape, dtype, options, found)


def main(argv: list[str] | None = None) -> None:
    if SETTINGS in os.environ:
        run_engine(json.loads(os.environ[SETTINGS]))
        return
    flags = common.parser(__doc__)
    add, numbers = flags.add_argument, bench_transformers.counts
    add("--variants", default=",".join(VARIANTS), help="comma-separated")
    add("--quantization", choices=QUANTIZATION, default="none", help="of the weights")
    add("--layers", type=int, default=12, help="of the model; default: 12")
    add("--batch", type=numbers, default=[1, 8, 32, 128], help="requests; default: 1,8,32,128")
    add("--prompt", type=numbers, default=[128], help="tokens of each; default: 128")
    add("--new-tokens", type=int, default=128, help="of each request; default: 128")
    add("--compilation", choices=COMPILATION, default="none", help="none: graphs of decode steps alone")
    add("--attention", default="FLASH_ATTN", help="vLLM's attention backend; default: FLASH_ATTN")
    add("--limit", type=float, default=180, help="seconds for one variant; default: 180")
    add("--work", type=Path, help="keeps the logs in this folder")
    options = flags.parse_args(argv)
    options.variants = options.variants.split(",")
    if not set(options.variants) <= set(VARIANTS):
        flags.error(f"--variants: expected some of {','.join(VARIANTS)}")
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
