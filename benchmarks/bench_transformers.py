"""Times a training step of Qwen3's MoE layer in transformers, or generate(): fused_moe against its default.

    python benchmarks/bench_transformers.py --json out.json
    python benchmarks/bench_transformers.py --device cpu --dtype fp32 --shape 256,8,2,64,32
    python benchmarks/bench_transformers.py --generate --batch 1,32 --json out.json

The layer is transformers' own module, router included, with random weights. Without --shape its sizes are
those of Qwen3-30B-A3B. Both runs use the same layer and differ only in `experts_implementation`. Before
anything is timed, one step of the experts is checked against eager in float64. FLOPs: 18TKDF.

--generate (bench generate) has a whole model of that architecture, with fewer layers and random weights, and
times `model.generate`: greedy, from random prompts, with a static cache. On a GPU transformers then compiles
each step after the first, in mode reduce-overhead, that is as a CUDA graph. Its default experts are
grouped_mm; while it decodes on a GPU it changes that to batched_mm by itself. Both models share the weights.
With --hidden-act quick_gelu, whose kernel fused_moe does not have, "ours" is a model that fell back.
tokens_per_s counts the new tokens of all sequences over the whole call, prompt included; time_us is that of
one new token per sequence; same_tokens is the share of new tokens that both models chose.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from functools import partial

import common
import torch
from common import MIB, Error
from torch import Tensor, nn

IMPLEMENTATIONS = {"ours": "fused_moe", "grouped_mm": "grouped_mm"}
VOCABULARY = 151936  # Qwen3's


# --- a training step ----------------------------------------------------------------------------------


class Case:
    """The layer of one shape and dtype, and its input."""

    def __init__(self, sizes: common.Sizes, routing: str, dtype: str, device: str):
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        import fused_moe.transformers

        fused_moe.transformers.register()
        torch.manual_seed(0)
        self.sizes, self.device = sizes, device
        T, E, K, D, hidden = sizes
        factory = {"device": device, "dtype": common.DTYPES[dtype]}
        config = Qwen3MoeConfig(
            hidden_size=D,
            moe_intermediate_size=hidden,
            num_experts=E,
            num_experts_per_tok=K,
            norm_topk_prob=True,
        )
        with torch.device(device):
            self.layer = Qwen3MoeSparseMoeBlock(config).to(factory["dtype"])
        x, gate = common.tokens_and_gate(common.routing_logits(routing, sizes, device), D)
        with torch.no_grad():
            self.layer.gate.weight.copy_(gate)
            for weight in self.layer.experts.parameters():
                weight.normal_(0, weight.size(-1) ** -0.5)
        self.x = x.to(factory["dtype"]).requires_grad_()
        self.dout = torch.randn(T, D, **factory)

    def flops(self) -> int:
        T, _, K, D, hidden = self.sizes
        return 18 * T * K * D * hidden

    def step(self, implementation: str) -> None:
        self.clear_grads()
        self.layer.experts.config._experts_implementation = implementation
        self.layer(self.x[None])[0].backward(self.dout)

    def clear_grads(self) -> None:
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def peak(self, implementation: str) -> float | None:
        """The peak of a step in MiB, beyond inputs and weights."""
        if self.device != "cuda":
            return None
        self.clear_grads()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(implementation)
        return round((torch.cuda.max_memory_allocated() - before) / MIB, 1)

    def error(self) -> Error:
        """The error of one step of the experts, in the output and every gradient."""
        experts = copy.deepcopy(self.layer.experts)
        with torch.no_grad():
            _, scores, ids = self.layer.gate(self.x)
        found = self.experts_step(experts, "fused_moe", scores, ids)
        exact = self.experts_step(experts.double(), "eager", scores.double(), ids)
        error = Error()
        for name, value in exact.items():
            error.add(name, found[name], value)
        return error

    def experts_step(self, experts: nn.Module, implementation: str, scores: Tensor, ids: Tensor) -> dict:
        experts.config._experts_implementation = implementation
        x, scores = (t.detach().to(scores.dtype).requires_grad_() for t in (self.x, scores))
        inputs = {"x": x, "scores": scores, **dict(experts.named_parameters())}
        out = experts(x, ids, scores)
        grads = torch.autograd.grad(out, list(inputs.values()), self.dout.to(out.dtype))
        return {"out": out.detach(), **{f"d{n}": g for n, g in zip(inputs, grads, strict=True)}}


def measure(shape: str, dtype: str, options) -> Iterator[dict]:
    import transformers

    case = Case(common.layer_sizes(shape), options.routing, dtype, options.device)
    error = case.error().check(shape, dtype)
    peaks = {name: case.peak(implementation) for name, implementation in IMPLEMENTATIONS.items()}
    runs = {name: partial(case.step, implementation) for name, implementation in IMPLEMENTATIONS.items()}
    seconds = common.times(common.clock(case.device), runs, options.repeats)
    yield common.record(
        options,
        bench="transformers",
        shape=shape,
        routing=options.routing,
        dtype=dtype,
        what="forward_backward",
        time_us=round(seconds["ours"] * 1e6, 1),
        tflops=round(case.flops() / seconds["ours"] / 1e12, 4),
        peer="grouped_mm",
        peer_ratio=common.ratio(seconds, "grouped_mm"),
        peak_mib=peaks["ours"],
        max_rel_error=error,
        ratio_to_grouped_mm=common.ratio(seconds, "grouped_mm"),
        peak_mib_grouped_mm=peaks["grouped_mm"],
        transformers=transformers.__version__,
    )


# --- generate -----------------------------------------------------------------------------------------


def two_models(sizes: common.Sizes, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, nn.Module]:
    """A model of Qwen3's architecture with random weights, with our experts and with those that transformers
    chooses. Both share their weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    import fused_moe.transformers

    fused_moe.transformers.register()
    torch.manual_seed(0)
    _, E, K, D, hidden = sizes
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=options.layers,
        hidden_size=D,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=hidden,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        hidden_act=options.hidden_act,
    )
    with torch.device(options.device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    shared = {id(p): p for p in theirs.parameters()}
    ours = copy.deepcopy(theirs, shared)
    ours.set_experts_implementation("fused_moe")
    return {"ours": ours, "default": theirs}


@torch.no_grad()
def error_of_experts(model: nn.Module, tokens: int) -> Error:
    """The error of the first layer's experts on random tokens, against eager in float64."""
    layer = model.model.layers[0].mlp
    x = torch.randn(tokens, layer.experts.hidden_dim, device=model.device).to(model.dtype)
    _, scores, ids = layer.gate(x)
    experts = copy.deepcopy(layer.experts).double()
    experts.config._experts_implementation = "eager"
    error = Error()
    error.add("out", layer.experts(x, ids, scores), experts(x.double(), ids, scores.double()))
    return error


class Generation:
    """A model with each implementation, and the prompts of a batch of sequences."""

    def __init__(self, sizes: common.Sizes, dtype: str, batch: int, options: argparse.Namespace):
        from transformers import StaticCache

        self.models = two_models(sizes, common.DTYPES[dtype], options)
        self.batch, self.new_tokens = batch, options.new_tokens
        self.prompts = torch.randint(VOCABULARY, (batch, options.prompt), device=options.device)
        # One for each, as graphs read it where it was when they were captured.
        length = options.prompt + self.new_tokens
        self.caches = {
            name: StaticCache(config=model.config, max_cache_len=length)
            for name, model in self.models.items()
        }

    def generate(self, name: str) -> Tensor:
        """The new tokens (batch, new_tokens)."""
        cache = self.caches[name]
        cache.reset()
        settings = {"do_sample": False, "max_new_tokens": self.new_tokens, "pad_token_id": 0}
        tokens = self.models[name].generate(self.prompts, past_key_values=cache, **settings)
        return tokens[:, self.prompts.size(1) :]


def measure_generate(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    import transformers

    for batch in options.batch:
        torch.compiler.reset()  # or the second batch size would be compiled for any
        case = Generation(common.layer_sizes(shape), dtype, batch, options)
        error = error_of_experts(case.models["ours"], batch).check(f"{shape}, batch {batch}", dtype)
        same = case.generate("ours") == case.generate("default")
        runs = {name: partial(case.generate, name) for name in case.models}
        # Alone, as generate() runs: the host's time counts.
        seconds = common.times(common.clock(options.device, lead=0), runs, options.repeats)
        rates = {name: round(same.numel() / each, 1) for name, each in seconds.items()}
        yield common.record(
            options,
            bench="generate",
            shape=shape,
            routing="random",
            mode="compiled" if options.device == "cuda" else common.DEFAULT_MODE,
            dtype=dtype,
            what="generate",
            tokens=batch,
            time_us=round(seconds["ours"] / case.new_tokens * 1e6, 1),
            peer="default",
            peer_ratio=common.ratio(seconds, "default"),
            max_rel_error=error,
            batch=batch,
            prompt=options.prompt,
            new_tokens=case.new_tokens,
            layers=options.layers,
            hidden_act=options.hidden_act,
            tokens_per_s=rates["ours"],
            tokens_per_s_default=rates["default"],
            ratio_to_default=common.ratio(seconds, "default"),
            same_tokens=round(same.double().mean().item(), 4),
            transformers=transformers.__version__,
        )
        del case, runs  # before the next one's weights


def main(argv: list[str] | None = None) -> None:
    flags = common.parser(__doc__)
    add = flags.add_argument
    add("--generate", action="store_true", help="time generate() of a model, not a training step of a layer")
    add("--batch", type=counts, default=[1, 32], metavar="A,B,..", help="sequences; default: 1,32")
    add("--layers", type=int, default=12, metavar="N", help="of the model; default: 12")
    add("--hidden-act", default="silu", metavar="NAME", help="the activation, as transformers names it")
    add("--prompt", type=int, default=128, metavar="N", help="tokens of each prompt; default: 128")
    add("--new-tokens", type=int, default=128, metavar="N", help="of each sequence; default: 128")
    options = flags.parse_args(argv)
    options.shape = options.shape or ["qwen3-30b"]
    common.start(options)
    common.report(options, measure_generate if options.generate else measure)


def counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of sequences, found {text}")
    return numbers


if __name__ == "__main__":
    main()
