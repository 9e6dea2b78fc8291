"""Times transformers' continuous batching, `generate_batch`: fused_moe against its default experts.

    python benchmarks/bench_continuous_batching.py --json out.json
    python benchmarks/bench_continuous_batching.py --cuda-graphs --requests 64 --json out.json --append
    python benchmarks/bench_continuous_batching.py --device cpu --shape 256,8,2,64,32 --layers 2

The models are those of bench_transformers.py --generate: Qwen3's architecture with fewer layers and random
weights, which both share. All requests come at once. Prompts have random tokens and lengths, from a sixteenth
of --prompt to all of it; new tokens are chosen greedily. Experts are checked before anything is timed.

transformers' default experts are named in the record: grouped_mm on a GPU, for prompts and new tokens alike,
since `generate_batch` does not change to batched_mm. Attention is paged sdpa, which needs no other package.
With it transformers captures no CUDA graphs unless asked to: --cuda-graphs asks.

transformers notes when each token reaches the host. A request's first token is late by the wait for its
prompt: first_token_ms is the median over requests. tokens_per_s counts the new tokens of all requests, from
the arrival of the first request to the last token. Starting the engine counts for neither. Both are medians
of the repeats, three by default, in which both models take turns; every value is kept in `samples`.
same_tokens is the share of new tokens that both models chose.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import bench_transformers
import common
import torch
from torch import nn

ATTENTION = "paged|sdpa"
BLOCK = 256  # tokens of a block of the paged cache, by default


class Served(NamedTuple):
    """What one call of generate_batch gave."""

    tokens: list[list[int]]
    first_token_ms: float
    tokens_per_s: float


def random_prompts(requests: int, longest: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(longest // 16, 1), longest + 1, (requests,), generator=generator).tolist()
    vocabulary = bench_transformers.VOCABULARY
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def serve(model: nn.Module, prompts: list[list[int]], new_tokens: int, options: argparse.Namespace) -> Served:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sizes = {"max_memory_percent": 0.5}
    if options.device == "cpu":  # whose memory transformers does not measure
        blocks = len(prompts) * (-(-(options.prompt + new_tokens) // BLOCK) + 1)
        sizes = {"num_blocks": blocks, "max_batch_tokens": 8192}
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            use_cuda_graph=options.cuda_graphs or None, **sizes
        ),
        record_timestamps=True,
    )
    outputs = list(found.values())
    lengths = [len(out.generated_tokens) for out in outputs]
    if lengths != [new_tokens] * len(prompts):
        errors = {out.error for out in outputs if out.error}
        raise SystemExit(
            f"generate_batch: expected {new_tokens} tokens of each request, found {lengths}; {errors}"
        )
    begin, end = min(out.created_time for out in outputs), max(out.timestamps[-1] for out in outputs)
    first = statistics.median(out.timestamps[0] - out.created_time for out in outputs)
    tokens = [out.generated_tokens for out in outputs]
    return Served(tokens, round(first * 1e3, 3), round(sum(lengths) / (end - begin), 1))


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    import transformers

    models = bench_transformers.two_models(common.layer_sizes(shape), common.DTYPES[dtype], options)
    error = bench_transformers.error_of_experts(models["ours"], 32).check(shape, dtype)
    for model in models.values():
        model.set_attn_implementation(ATTENTION)
    for requests in options.requests:
        prompts = random_prompts(requests, options.prompt)
        for model in models.values():
            serve(model, prompts, 4, options)
        runs: dict[str, list[Served]] = {name: [] for name in models}
        for _ in range(options.repeats):
            for name, model in models.items():
                runs[name].append(serve(model, prompts, options.new_tokens, options))
        first, rate = (
            {name: statistics.median(getattr(run, value) for run in found) for name, found in runs.items()}
            for value in ("first_token_ms", "tokens_per_s")
        )
        same = torch.tensor(runs["ours"][0].tokens) == torch.tensor(runs["default"][0].tokens)
        ratio = round(rate["ours"] / rate["default"], 3)
        yield common.record(
            options,
            bench="continuous_batching",
            shape=shape,
            routing="random",
            mode="graphs" if options.cuda_graphs else common.DEFAULT_MODE,
            dtype=dtype,
            what="generate_batch",
            tokens=requests,
            time_us=round(requests / rate["ours"] * 1e6, 1),
            peer="default",
            peer_ratio=ratio,
            max_rel_error=error,
            requests=requests,
            prompt=options.prompt,
            new_tokens=options.new_tokens,
            layers=options.layers,
            hidden_act=options.hidden_act,
            attention=ATTENTION,
            default_experts=models["default"].config._experts_implementation,
            tokens_per_s=rate["ours"],
            tokens_per_s_default=rate["default"],
            ratio_to_default=ratio,
            first_token_ms=first["ours"],
            first_token_ms_default=first["default"],
            first_token_ratio=round(first["default"] / first["ours"], 3),
            same_tokens=round(same.double().mean().item(), 4),
            samples={
                name: {field: [getattr(run, field) for run in found] for field in Served._fields[1:]}
                for name, found in runs.items()
            },
            transformers=transformers.__version__,
        )


def main(argv: list[str] | None = None) -> None:
    flags = common.parser(__doc__)
    add = flags.add_argument
    numbers, at_once = bench_transformers.counts, "at once; default: 1,8,64"
    add("--requests", type=numbers, default=[1, 8, 64], metavar="A,B,..", help=at_once)
    add("--layers", type=int, default=12, metavar="N", help="of the model; default: 12")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of the longest prompt; default: 512")
    add("--new-tokens", type=int, default=128, metavar="N", help="of each request; default: 128")
    add("--cuda-graphs", action="store_true", help="which transformers does not take by itself with sdpa")
    options = flags.parse_args(argv)
    options.shape = options.shape or ["qwen3-30b"]
    options.repeats = options.repeats or 3
    options.hidden_act = "silu"
    common.start(options)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    common.report(options, measure)


if __name__ == "__main__":
    main()
