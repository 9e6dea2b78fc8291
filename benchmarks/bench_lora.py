"""Times a step of a transformers model with PEFT's LoRA, and its memory: fused_moe against grouped_mm.

    python benchmarks/bench_lora.py --json out.json
    python benchmarks/bench_lora.py --model gpt-oss --json out.json --append
    python benchmarks/bench_lora.py --device cpu --dtype fp32 --shape 1,8,2,128,128 --tokens 256 --layers 1

Models are of Qwen3-MoE's architecture, or of gpt-oss's, with some layers, random weights and no language
head, whose logits would be the peak. PEFT's adapters (rank 16) are on the experts' two weights and nothing
else trains. All have the same weights: "lora" in float weights, "lora_4bit" in int4 (gpt-oss: mxfp4) codes,
"full" trains all weights; those that end in "_grouped_mm" are the same script with transformers'
experts_implementation="grouped_mm". A step is forward, backward and AdamW. Before anything is timed, output
and gradients of one layer's experts are checked against PEFT's own sum of weights and adapters in float64.

peak_mib is of weights, optimizer and step together, as if the variant were alone. Launches are queued ahead.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import common
import torch
from common import MIB, Error
from torch import Tensor, nn

RANK, ALPHA = 16, 32
VOCABULARY = 1024  # the embedding does not train
FORMATS = {"qwen3_moe": "int4", "gpt_oss": "mxfp4"}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHAPES = {"qwen3": "qwen3-30b", "gpt-oss": "gpt-oss-20b"}
GROUPED, PACKED = "_grouped_mm", "_4bit"
VARIANTS = ("lora", "lora" + GROUPED, "lora" + PACKED, "full", "full" + GROUPED)


def base_model(sizes: common.Sizes, dtype: torch.dtype, options) -> nn.Module:
    from transformers import AutoModel, GptOssConfig, Qwen3MoeConfig

    _, E, K, D, hidden = sizes
    shared = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": options.layers,
        "hidden_size": D,
        "num_experts_per_tok": K,
    }
    if options.model == "gpt-oss":
        config = GptOssConfig(**shared, intermediate_size=hidden, num_local_experts=E)
    else:
        heads = {"num_attention_heads": max(1, D // 64), "num_key_value_heads": max(1, D // 512)}
        config = Qwen3MoeConfig(
            **shared, **heads, head_dim=128, moe_intermediate_size=hidden, num_experts=E, norm_topk_prob=True
        )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModel.from_config(config, dtype=dtype)
    with torch.no_grad():
        for layer in model.layers:
            for weight in layer.mlp.experts.parameters():
                weight.normal_(0, (weight.size(1) if options.model == "gpt-oss" else weight.size(-1)) ** -0.5)
    return model


class Variant:
    """A model that trains, its optimizer and its step."""

    def __init__(self, name: str, base: nn.Module, ids: Tensor):
        from peft import LoraConfig, get_peft_model

        import fused_moe.transformers

        self.ids = ids
        model = copy.deepcopy(base)
        model.set_experts_implementation("grouped_mm" if name.endswith(GROUPED) else "fused_moe")
        if PACKED in name:
            fused_moe.transformers.quantize_experts(model, FORMATS[model.config.model_type])
        if name.startswith("lora"):
            config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=TARGETS)
            torch.manual_seed(1)
            model = get_peft_model(model, config)
            with torch.no_grad():
                for key, weight in model.named_parameters():
                    if "lora_B" in key:  # PEFT's are zero
                        weight.normal_(0, RANK**-0.5)
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-5)

    def step(self) -> None:
        self.model(input_ids=self.ids).last_hidden_state.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def experts(self) -> nn.Module:
        """The first layer's, in PEFT's wrapper."""
        model = self.model.base_model.model if hasattr(self.model, "peft_config") else self.model
        return model.layers[0].mlp.experts

    def kept(self) -> int:
        """Bytes of weights and optimizer."""
        states = (t for state in self.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        tensors = [*self.model.parameters(), *self.model.buffers(), *states]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def peak(self) -> float | None:
        if not self.ids.is_cuda:
            return None
        self.step()  # makes the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return round((self.kept() + torch.cuda.max_memory_allocated() - before) / MIB, 1)


# --- errors -------------------------------------------------------------------------------------------


def exact_experts(variant: Variant, peer: Variant) -> nn.Module:
    """A variant's experts in float64 and eager, by PEFT: a copy of `peer`'s, whose weights are float."""
    from fused_moe import QuantizedWeight

    exact, ours = copy.deepcopy(peer.experts()).double(), variant.experts()
    base, stored = base_of(exact), base_of(ours)
    base.config._experts_implementation = "eager"
    with torch.no_grad():
        for name in [name for name, m in stored.named_children() if isinstance(m, QuantizedWeight)]:
            values = stored.get_submodule(name).dequantize()
            base.get_parameter(name).copy_(values.mT if stored.is_transposed else values)
        for name, weight in trained(exact).items():
            weight.copy_(trained(ours)[name])
    return exact


def base_of(experts: nn.Module) -> nn.Module:
    """The module in PEFT's wrapper, if it has one."""
    return experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def experts_step(experts: nn.Module, x: Tensor, scores: Tensor, ids: Tensor, dout: Tensor) -> dict:
    inputs = {"x": x.requires_grad_(), "scores": scores.requires_grad_(), **trained(experts)}
    out = experts(x, ids, scores)
    grads = torch.autograd.grad(out, list(inputs.values()), dout)
    return {"out": out, **{f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}}


def error_of(variant: Variant, peer: Variant, sizes: common.Sizes, dtype: torch.dtype) -> Error:
    _, E, K, D, _ = sizes
    x, dout = torch.randn(2, 256, D, device=variant.ids.device).to(dtype)
    scores, ids = torch.randn(256, E, device=x.device).softmax(-1).topk(K)
    scores, exact = scores.to(dtype), exact_experts(variant, peer)
    values = experts_step(exact, x.double(), scores.double(), ids, dout.double())
    found, error = experts_step(variant.experts(), x, scores, ids, dout), Error()
    for name, value in values.items():
        error.add(name, found[name], value)
    return error


# --- measuring ----------------------------------------------------------------------------------------


def measure(shape: str, dtype: str, options: argparse.Namespace) -> Iterator[dict]:
    import peft
    import transformers

    import fused_moe.transformers

    fused_moe.transformers.register()
    sizes = common.layer_sizes(shape)._replace(num_tokens=options.tokens)
    base = base_model(sizes, common.DTYPES[dtype], options)
    ids = torch.randint(VOCABULARY, (sizes.num_tokens // options.sequence, options.sequence))
    variants = {name: Variant(name, base, ids.to(options.device)) for name in VARIANTS}
    peers = {name: name.removesuffix(PACKED).removesuffix(GROUPED) + GROUPED for name in variants}
    errors = {}
    for name, variant in variants.items():
        error = error_of(variant, variants[peers[name]], sizes, common.DTYPES[dtype])
        errors[name] = error.check(f"{shape}, {name}", dtype)
    peaks = {name: variant.peak() for name, variant in variants.items()}
    runs = {name: variant.step for name, variant in variants.items()}
    seconds = common.times(common.clock(options.device, lead=40_000_000), runs, options.repeats)
    for name in variants:
        peer = peers[name]
        yield common.record(
            options,
            bench="lora",
            model=options.model,
            shape=shape,
            routing="random",
            dtype=dtype,
            what=name,
            tokens=ids.numel(),
            time_us=round(seconds[name] * 1e6, 1),
            peer=peer,
            peer_ratio=round(seconds[peer] / seconds[name], 3),
            peak_mib=peaks[name],
            max_rel_error=errors[name],
            tokens_per_s=round(ids.numel() / seconds[name]),
            peak_mib_peer=peaks[peer],
            layers=options.layers,
            sequence=options.sequence,
            rank=RANK,
            peft=peft.__version__,
            transformers=transformers.__version__,
        )


def main(argv: list[str] | None = None) -> None:
    flags = common.parser(__doc__)
    add = flags.add_argument
    add("--layers", type=int, default=4, metavar="N", help="of the model; default: 4")
    add("--sequence", type=int, default=512, metavar="N", help="tokens of a sequence; default: 512")
    add("--model", choices=SHAPES, default="qwen3", metavar="NAME", help=f"of {', '.join(SHAPES)}")
    add("--tokens", type=int, default=8192, metavar="N", help="of a step, in place of a shape's T")
    options = flags.parse_args(argv)
    options.shape = options.shape or [SHAPES[options.model]]
    common.start(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
