"""Times a training step of Qwen3's MoE layer in transformers: fused_moe against grouped_mm, its default.

    python benchmarks/bench_transformers.py --json out.json
    python benchmarks/bench_transformers.py --device cpu --dtype fp32 --shape 256,8,2,64,32

The layer is transformers' own module, router included, with random weights. Without --shape its sizes are
those of Qwen3-30B-A3B. Both runs use the same layer and differ only in `experts_implementation`. Before
anything is timed, one step of the experts is checked against eager in float64. FLOPs: 18TKDF.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import common
import torch
from common import MIB, Error
from torch import Tensor, nn

IMPLEMENTATIONS = {"ours": "fused_moe", "grouped_mm": "grouped_mm"}


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
        """Of one step of the experts: the output and every gradient."""
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


def main(argv: list[str] | None = None) -> None:
    options = common.parser(__doc__).parse_args(argv)
    options.shape = options.shape or ["qwen3-30b"]
    common.start(options)
    common.report(options, measure)


if __name__ == "__main__":
    main()
