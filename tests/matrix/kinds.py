"""The kinds of layers in the matrix: how each is made and called, and its twin in plain PyTorch.

A twin has the same parameters, those of quantised weights as their values, and none of our operators. In
float64 it says what is right, in the layer's own dtype how much plain PyTorch errs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from cases import F32, F64
from torch import Tensor, nn

import fused_moe
from fused_moe import FusedMoE, QuantizedWeight, quantize, reference

T, D, F, E, K = 12, 64, 64, 8, 2  # multiples of 64, so that quantised weights are tiles on Hopper
TOKENS = 9  # the real ones where there is padding
ALL = range(T)
GROUPS = {"num_expert_groups": 4, "num_limited_groups": 2, "score_func": "sigmoid", "route_norm": True}
ASYMMETRIC = {"group_size": 32, "symmetric": False}  # with zero points
FORMATS = {"fp8_block": {}, "fp8": {}, "int8": {}, "int4": ASYMMETRIC, "mxfp4": {}}


@dataclass(frozen=True)
class Kind:
    """A FusedMoE with these options; quantised, with adapters, or called with ids or num_tokens."""

    title: str  # in the docs
    options: dict = field(default_factory=dict, hash=False)
    format: str | None = None
    lora: bool = False
    given: str | None = None
    needs: str | None = None  # a package
    takes_three_dimensions = True

    def make(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        """The layer in training mode, its parameters drawn from their own seed."""
        return self._finished(FusedMoE, seed, device, self._quantized)

    def twin(self, dtype: torch.dtype) -> nn.Module:
        """The same in plain PyTorch on the CPU, its parameters rounded as a layer in `dtype` computes."""

        def rounded(layer: nn.Module) -> nn.Module:
            """Each weight as its values in dtype."""
            for name in ("w1", "w2", "w3") if self.format else ():
                w = getattr(layer.experts, name)
                w.data = self._quantize(w).dequantize(dtype).to(w.dtype)
                w.requires_grad_(False)
            return layer

        twin = self._finished(reference.FusedMoE, 0, "cpu", rounded)
        if twin.shared_experts is not None:
            for linear in twin.shared_experts.children():  # their hooks keep our operators away
                linear.register_forward_hook(lambda *_: None)
        return twin.to(dtype)

    def _finished(self, layer_type, seed: int, device: str, quantized: Callable) -> nn.Module:
        """What draws random numbers is done on the layer in float32, the same for layer and twin."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            layer = layer_type(D, F, E, K, device=device, **self.options)
            for parameter in layer.parameters():
                parameter.mul_(3)  # results are of order one, as judging.py expects
            if layer.expert_bias is not None:
                layer.expert_bias.normal_(0, 0.1)
            layer = quantized(layer)
            if self.lora:
                fused_moe.add_lora(layer, 8, alpha=4.0)
                for parameter in layer.experts.lora.parameters():
                    nn.init.normal_(parameter, 0, 0.2)
        return layer

    def _quantize(self, weight: Tensor) -> QuantizedWeight:
        return quantize(weight, self.format, trainable=True, **FORMATS[self.format])

    def _quantized(self, layer: nn.Module) -> nn.Module:
        for name in ("w1", "w2", "w3") if self.format else ():
            setattr(layer.experts, name, self._quantize(getattr(layer.experts, name)))
        return layer

    def given_of(self, rows: range, device) -> dict:
        """The keyword arguments of a call on these of the T tokens."""
        if self.given == "num_tokens":
            return {"num_tokens": torch.tensor(len(rows[: max(TOKENS - rows.start, 0)]), device=device)}
        if self.given == "ids":
            ids = torch.rand(T, E, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :K].int()
            ids[1], ids[2, 0] = -1, -1  # the router chooses; a remote slot
            return {"ids": ids[rows.start : rows.stop].to(device)}
        return {}

    def choice(self, twin: nn.Module, x: Tensor) -> Tensor:
        return twin.router(x, twin.expert_bias)[1]

    @cache  # noqa: B019 - kinds are constants
    def tokens(self) -> tuple[Tensor, Tensor]:
        """x and dout (T, D). Rounding of x to 16 bits changes no token's choice of experts."""
        draw = torch.Generator().manual_seed(2)
        x, dout = (torch.randn(8 * T, D, generator=draw) for _ in range(2))
        twin = self.twin(F64)
        with torch.no_grad():
            chosen = self.choice(twin, x.double())
            stable = torch.ones(len(x), dtype=torch.bool)
            for _ in range(8):
                near = x.double() * (1 + 0.02 * torch.randn(x.shape, dtype=F64, generator=draw))
                stable &= (self.choice(twin, near) == chosen).all(-1)
        x = x[stable][:T]
        assert len(x) == T
        return x, dout[:T]

    @cache  # noqa: B019
    def truth(self, dtype: torch.dtype = F32, rows: range = ALL) -> tuple[dict, dict]:
        """(eager, exact): out and every gradient, by plain PyTorch in `dtype` and in float64."""
        twin, given = self.twin(dtype), self.given_of(rows, "cpu")
        x, dout = (t[rows.start : rows.stop].to(dtype) for t in self.tokens())
        eager = gradients(lambda x: twin(x, **given), twin, x, dout)
        twin = twin.double()
        return eager, gradients(lambda x: twin(x, **given), twin, x.double(), dout.double())


def gradients(run: Callable, layer: nn.Module, x: Tensor, dout: Tensor) -> dict:
    """{"out", "dx", "d" + name of every parameter that is trained}: one forward and backward of `run`."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = run(x)
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), "dx": x.grad, **parameter_gradients(layer)}


def trained(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


def parameter_gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {f"d{name}": p.grad for name, p in trained(layer).items()}


# --- transformers -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A router in plain PyTorch, and experts of transformers."""

    expert_bias = None

    def __init__(self, experts: nn.Module, device):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False, device=device)
        self.experts = experts

    def router(self, x: Tensor, _=None) -> tuple[Tensor, Tensor]:
        scores, ids = self.gate(x).softmax(-1).topk(K)
        return scores / scores.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x)
        return self.experts(x, ids, scores)


@dataclass(frozen=True)
class TransformersKind(Kind):
    """Mixtral's experts with experts_implementation="fused_moe"; quantised by `quantize_experts`."""

    needs: str = "transformers"
    takes_three_dimensions = False

    def make(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        from fused_moe.transformers import quantize_experts

        layer = self._block(seed, device, "fused_moe")
        return quantize_experts(layer, self.format, **FORMATS[self.format]) if self.format else layer

    def twin(self, dtype: torch.dtype) -> nn.Module:
        layer = self._block(0, "cpu", "eager")
        for w in layer.experts.parameters() if self.format else ():
            w.data = self._quantize(w).dequantize(dtype).to(w.dtype)
            w.requires_grad_(False)
        return layer.to(dtype)

    def _block(self, seed: int, device: str, implementation: str) -> nn.Module:
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        import fused_moe.transformers

        fused_moe.transformers.register()
        config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E)
        config._experts_implementation = implementation
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            layer = Block(MixtralExperts(config), device)
            for w in layer.experts.parameters():
                nn.init.normal_(w, 0, 2 * w.size(-1) ** -0.5)
        return layer.train()


@dataclass(frozen=True)
class PackedKind(TransformersKind):
    """The same with the parameters of a packed checkpoint of compressed-tensors."""

    def make(self, seed: int = 0, device: str = "cpu") -> nn.Module:
        from fused_moe.quantized import formats
        from fused_moe.transformers.weights import add_hook

        layer = self._block(seed, device, "fused_moe")
        experts = layer.experts
        for name in ("gate_up_proj", "down_proj"):
            w = self._quantize(getattr(experts, name))
            delattr(experts, name)
            zero = formats.pack_rows((w.zero + formats.INT4_OFFSET).to(torch.uint8))
            parts = {"_packed": w.data.view(torch.int32), "_scale": w.scale, "_zero_point": zero}
            for part, tensor in parts.items():
                experts.register_parameter(name + part, nn.Parameter(tensor.detach(), requires_grad=False))
        add_hook(experts)
        return layer


KINDS = {
    "float": Kind("float"),
    "biases": Kind("biases, gate bias", {"bias": True, "gate_bias": True}),
    "shared": Kind("shared experts, gate", {"num_shared_experts": 1, "shared_expert_gate": True}),
    "groups": Kind("groups, expert_bias", {**GROUPS, "load_balance_coeff": 1e-3}),
    **{format: Kind(format, format=format) for format in FORMATS},
    "LoRA": Kind("LoRA", lora=True),
    "fp8 + LoRA": Kind("fp8 and LoRA", format="fp8", lora=True),
    "ids": Kind("`ids`", given="ids"),
    "num_tokens": Kind("`num_tokens`", given="num_tokens"),
    "transformers": TransformersKind("transformers"),
    "transformers, int4": TransformersKind("transformers, int4", format="int4"),
    "transformers, packed": PackedKind("transformers, packed int4", format="int4"),
}
