"""FusedMoE: the layer as an nn.Module, with torchtitan's parameter names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks, function, load_text
from .activation import CONSTANTS, activate, activation_of
from .counting import Counting
from .expert_bias import KeepsExpertBias, check_expert_bias, update_biases
from .finding import MoELayer, RoutedExperts
from .fp8_training import Fp8Training, TrainsFp8, train_in_fp8
from .gate import Gate, linear_logits
from .kept_dtypes import KeepsDtypes
from .lora import Adapters, TakesLoRA
from .losses import check_mask, check_scope, load_balancing_loss, router_z_loss
from .ops import reshaped
from .padding import zero_padding
from .paths import (
    FN,
    Operands,
    keeps_padding,
    operands_to_join,
    runs_shared,
    stock,
    why_added_after,
    why_called,
    why_changed,
)
from .quantized.weight import QuantizedWeight
from .resetting import reset, reset_uniform
from .routed import routed_experts

if TYPE_CHECKING:
    from .checks import Device

# Training forward passes without an update after which FusedMoE warns. A step may have many micro-batches.
PATIENCE = 256


class RouterLosses(NamedTuple):
    """The auxiliary losses of a router: scalars that a trainer adds to its loss, each with its own
    coefficient.

    Attributes:
        load_balancing: () `load_balancing_loss` of the call.
        z: () `router_z_loss` of the call.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> out, losses = moe(torch.randn(5, 8), return_losses=True)
        >>> loss = out.square().mean() + 0.01 * losses.load_balancing + 0.001 * losses.z
    """

    load_balancing: Tensor
    z: Tensor


class LoadReport(NamedTuple):
    """How many tokens each expert of a layer got since the last update of the bias.

    `print` shows at most 24 lines of 80 columns: a bar for each expert; of more than 20 experts how many have
    which multiple of the mean load, the 12 busiest and the 6 least busy.

    Attributes:
        tokens: (E,) int64 on the CPU, slots of each expert.
        share: (E,) float32, the same over their sum.
        max_over_mean: a float, the busiest expert's load over the mean; 1.0 is a perfect balance.
        idle: an int, experts without tokens.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2)
        >>> _ = moe(torch.randn(5, 8))
        >>> moe.load_report().tokens.sum()
        tensor(10)
    """

    tokens: Tensor
    share: Tensor
    max_over_mean: float
    idle: int

    def __str__(self) -> str:
        return load_text.of_layer(self.tokens, self.max_over_mean, self.idle)


def report_of(tokens: Tensor) -> LoadReport:
    """The report of a counter (E,), as it is now."""
    tokens = (
        torch.zeros_like(tokens, device="cpu")
        if tokens.is_meta
        else tokens.detach().to("cpu", torch.int64, copy=True)
    )
    total = tokens.sum().clamp_min(1)
    max_over_mean = int(tokens.max()) * len(tokens) / int(total)
    return LoadReport(tokens, tokens.float() / total, max_over_mean, int((tokens == 0).sum()))


@stock("router")
class Router(KeepsDtypes):
    """Scores every expert for every token and selects the K best."""

    def __init__(
        self, dim, num_experts, top_k, *, bias, routing, expert_scale=False, device=None, dtype=None,
        router_dtype=None,
    ):  # fmt: skip
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.gate = Gate(dim, num_experts, bias=bias, **factory, router_dtype=router_dtype)
        ones = torch.ones(num_experts, device=device, dtype=router_dtype or dtype) if expert_scale else None
        self.expert_scale = None if ones is None else nn.Parameter(ones)
        self.top_k = top_k
        self.routing = routing

    def _kept_dtypes(self) -> dict[str, torch.dtype]:
        dtype = self.gate.router_dtype
        return {} if dtype is None else {"expert_scale": dtype}

    def reset_parameters(self) -> None:
        reset(self.gate)
        if self.expert_scale is not None:
            nn.init.ones_(self.expert_scale)

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        if "expert_scale" not in self.__dict__:  # or pickled by an older version
            self._parameters.setdefault("expert_scale", None)
        for name, value in (("route_norm_eps", 1e-20), ("group_score", "top2")):
            self.routing.setdefault(name, value)

    def forward(
        self,
        x: Tensor,
        expert_bias: Tensor | None,
        *,
        ids: Tensor | None = None,
        num_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, D) -> scores (T, K), ids (T, K), logits (T, E) in float32 or float64."""
        logits = self.gate(x)
        given = {"expert_scale": self.expert_scale, "ids": ids, "num_tokens": num_tokens}
        scores, ids = function.route(logits, self.top_k, bias=expert_bias, **self.routing, **given)
        return scores, ids, logits

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in {"top_k": self.top_k, **self.routing}.items())


@stock("experts")
class Experts(RoutedExperts, TakesLoRA, TrainsFp8):
    """The routed experts: w1 (E, F, D) gate, w2 (E, D, F) down, w3 (E, F, D) up, and biases.

    A QuantizedWeight may be assigned to each of w1, w2 and w3; its dtype becomes that of the parameter whose
    place it takes. `lora` and `lora_NAME` are the adapters of `add_lora`, `fp8` what `enable_fp8` sets.
    """

    alpha, limit = function.ALPHA, function.LIMIT  # of layers that were pickled by an older version

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        activation: str,
        alpha: float,
        limit: float,
        gated: bool,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.activation, self.alpha, self.limit = activation, alpha, limit

        def new(*shape):
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        self.w1 = new(hidden_dim, dim)
        self.w2 = new(dim, hidden_dim)
        self.w3 = new(hidden_dim, dim) if gated else None
        self.b1 = new(hidden_dim) if bias else None
        self.b2 = new(dim) if bias else None
        self.b3 = new(hidden_dim) if bias and gated else None
        self.lora: Adapters | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises every parameter again, uniform in +-1/sqrt(fan_in), as nn.Linear."""
        fan_in = {"1": self.dim, "2": self.hidden_dim, "3": self.dim}
        for name in ("w1", "w2", "w3", "b1", "b2", "b3"):
            reset_uniform(self, name, 1 / math.sqrt(fan_in[name[1]]))
        for adapters in self.loras.values():
            adapters.reset_parameters()

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, QuantizedWeight) and name in self._parameters:
            parameter = cast(nn.Parameter, self._parameters.pop(name))
            value.dtype = parameter.dtype  # nn.Module lets no module take a parameter's name
        super().__setattr__(name, value)

    def forward(
        self,
        x: Tensor,
        scores: Tensor,
        ids: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x (T, D) -> out (T, D), counts (E,) int32. The others are as those of `fused_experts`."""
        biases = (self.b1, self.b2, self.b3)
        lora = self.adapters
        main_grads = self.main_grads if lora is None else None  # beside adapters the weights are frozen
        added = {"shared": shared, "shared_gate": shared_gate}
        settings = {"main_grads": main_grads, "lora": lora, **self.fp8_settings, **added}
        act = (self.activation, (self.alpha, self.limit))
        return function.experts_and_counts(x, self.weights, scores, ids, biases, *act, **settings)

    @property
    def weights(self) -> tuple:
        """w1, w2 and w3."""
        return self.w1, self.w2, self.w3

    @property
    def main_grads(self) -> tuple:
        """The `main_grad` of w1, w2 and w3; None where a weight has none."""
        return tuple(getattr(w, "main_grad", None) for w in self.weights)

    @property
    def settings(self) -> dict:
        """The arguments of `fused_experts` beside x, weights, scores and ids."""
        biases = {"b1": self.b1, "b2": self.b2, "b3": self.b3}
        return {**biases, **activation_of(self), "lora": self.adapters, **self.fp8_settings}

    def extra_repr(self) -> str:
        """What `print` shows of the experts."""
        gated, bias = self.w3 is not None, self.b1 is not None
        constants = "".join(f"{c}={getattr(self, c)}, " for c in CONSTANTS.get(self.activation, ()))
        return (
            f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}, "
            f"activation={self.activation!r}, {constants}gated={gated}, bias={bias}"
            + (f", fp8={self.fp8!r}" if self.fp8 is not None else "")
        )


@stock("shared_experts")
class SharedExperts(nn.Module):
    """The dense MLP that is applied to every token: w2(act(w1 x) * w3 x)."""

    alpha, limit = function.ALPHA, function.LIMIT  # of layers that were pickled by an older version

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str,
        alpha: float,
        limit: float,
        gated: bool,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.w1 = nn.Linear(dim, hidden_dim, **factory)
        self.w2 = nn.Linear(hidden_dim, dim, **factory)
        self.w3 = nn.Linear(dim, hidden_dim, **factory) if gated else None
        self.activation, self.alpha, self.limit = activation, alpha, limit

    def reset_parameters(self) -> None:
        for linear in self.children():
            reset(linear)

    def forward(self, x: Tensor, gate: nn.Linear | None = None, num_tokens: Tensor | None = None) -> Tensor:
        """x (T, D) -> (T, D), each token's times sigmoid(gate(x)) if there is a gate; zero in padded rows.

        Linear layers that do more than that are called, in place of our operators.
        """
        if why_called(x, self.w1, self.w2, self.w3, gate):
            up = None if self.w3 is None else self.w3(x)
            shared = self.w2(activate(self.w1(x), up, **activation_of(self)))
            return zero_padding(shared if gate is None else _gated(gate(x), shared), num_tokens)
        shared, logits = self.operands(x, gate, num_tokens)
        if logits is None:
            return shared
        scores, _ = function.route(logits, 1, score_func="sigmoid", num_tokens=num_tokens)
        return (scores * shared).to(shared.dtype)

    def operands(
        self, x: Tensor, gate: nn.Linear | None, num_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """x (T, D) -> (T, D) without the gate, zero in padded rows; the gate's logits (T, 1).

        By the operators of the routed experts and of the router, as one expert that has every token: a
        token's results do not depend on the others. Only where nothing is against it (`why_called`).
        """
        (w1, b1), (w2, b2), (w3, b3) = _as_expert(self.w1), _as_expert(self.w2), _as_expert(self.w3)
        settings = {"b1": b1, "b2": b2, "b3": b3, **activation_of(self)}
        if num_tokens is None:
            counts = torch.full((1,), x.size(0), dtype=torch.int32, device=x.device)
        else:
            counts = num_tokens.reshape(1).clamp(0, x.size(0))
        shared = function.grouped_mlp(x, w1, w2, w3, counts, **settings)
        return shared, None if gate is None else linear_logits(x, gate)


class Beside:
    """Shared experts that run beside the exchange; `out` is None until they have run.

    Experts have it as an attribute, so that hooks see only their arguments and their own output. Hooks do not
    change when it runs, because one rank alone may have some: backward sums gradients of shared experts over
    ranks between exchanges, and collectives need the same order on all ranks."""

    def __init__(self, compute: Callable[[], Tensor]):
        self.compute = compute
        self.out: Tensor | None = None

    def __call__(self) -> None:
        self.out = self.compute()


def _gated(logits: Tensor, shared: Tensor) -> Tensor:
    """Shared experts' output times the sigmoid of their gate's logits, which may be wider."""
    return (logits.sigmoid() * shared).to(shared.dtype)


def _linear(linear: nn.Linear | None, x: Tensor) -> Tensor:
    """linear(x) of x (T, ...), by our operator where that computes the same, for its batch-invariant bits."""
    assert linear is not None
    if why_called(x, linear) or linear.bias is not None:
        return linear(x)
    return function.linear(x, linear.weight)


@overload
def _as_expert(linear: nn.Linear) -> tuple[Tensor, Tensor | None]: ...
@overload
def _as_expert(linear: nn.Linear | None) -> tuple[Tensor | None, Tensor | None]: ...
def _as_expert(linear: nn.Linear | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight (1, out, in) and bias (1, out)."""
    if linear is None:
        return None, None
    return linear.weight[None], None if linear.bias is None else linear.bias[None]


class FusedMoE(MoELayer, KeepsExpertBias, Counting):
    """A Mixture-of-Experts feed-forward layer: router, routed experts and shared experts.

    out = sum over k of scores[k] * w2[e](act(w1[e] x) * w3[e] x), e the k-th best expert of x, plus the
    shared experts. The sum is rounded once. Every tier has kernels for forward and backward;
    `fused_moe.info()` tells which tiers run.

    Args:
        dim: D, model width.
        hidden_dim: F, width of one expert.
        num_experts: E, 1 to 1024.
        top_k: K, experts per token, 1 to min(E, 32).
        score_func: as that of `route`, and so are route_norm, route_scale, route_norm_eps,
            num_expert_groups, num_limited_groups and group_score.
        expert_scale: whether a parameter router.expert_scale (E,) is a factor on the scores of each expert,
            as Gemma 4's per_expert_scale. It starts at ones.
        num_shared_experts: dense experts next to the routed ones, as one MLP of width F * num_shared_experts.
        shared_expert_gate: multiply their output by sigmoid(gate(x)), as Qwen2-MoE does.
        latent_dim: L, width of the routed experts' input and output, if not D: they get latent_down(x), and
            latent_up takes their sum back to D, two linear layers without bias (LatentMoE of Nemotron 3
            Super, Kimi K3). Router and shared experts get x.
        latent_norm: an RMSNorm before latent_up, as in Kimi K3; its eps is 1e-5 and may be set.
        load_balance_coeff: balance without auxiliary loss (DeepSeek-V3): an `expert_bias` is added for the
            top-k, and after each optimizer step `fused_moe.balance`, or a call of `update_expert_bias()`,
            moves it by this much up or down, less the mean over the experts. Without either nothing is
            balanced: after 256 training forward passes without an update the layer warns, except under
            torch.compile.
        activation: of routed and shared experts, as that of `fused_experts`; and so are alpha and limit.
        gated: whether w3 exists.
        bias: biases in the experts.
        gate_bias: a bias in the router's linear layer.
        router_dtype: torch.float32 makes the router's parameters and shared_expert_gate float32 beside
            bfloat16 or float16 experts. They stay so under `.to(dtype)`, under autocast, and when
            `load_state_dict(assign=True)` reads a 16-bit checkpoint. x stays 16-bit.
        fp8: train the routed experts in FP8, as `enable_fp8` with its defaults does.
        device: of the parameters.
        dtype: of the parameters. expert_bias stays float32, and tokens_per_expert int64.

    `tokens_per_expert` (E,) counts the slots of this rank's training forward passes. It moves with the layer,
    but is no buffer: DistributedDataParallel would overwrite it by rank 0's.

    Weight gradients can be accumulated straight into Megatron-style float32 `main_grad` buffers: where an
    expert weight has an attribute `main_grad`, backward adds to it and the weight's .grad stays None. Where
    it has Megatron's `grad_added_to_main_grad`, too, that is set to True and .grad has values to be
    discarded. Under `fully_shard` this has no effect: forward gets other tensors, without the attributes.

    In float16 an expert's act(gate) * up becomes inf beyond 65504, without a warning: prefer bfloat16.

    A call takes x (..., D) and returns out (..., D). With return_losses=True it returns (out, RouterLosses),
    with return_ids=True (out, ids (..., K) int32), with both (out, RouterLosses, ids).

    Raises:
        TypeError: for a wrong type or dtype.
        ValueError: for a wrong size, value or combination. The message says what was expected and what was
            found.

    Example:
        >>> moe = fused_moe.FusedMoE(8, 16, num_experts=4, top_k=2, load_balance_coeff=1e-3)
        >>> x = torch.randn(2, 5, 8, requires_grad=True)
        >>> out = moe(x)
        >>> out.sum().backward()
        >>> out.shape, x.grad.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5, 8]))
    """

    router_type = Router
    experts_type = Experts
    counters = ("tokens_per_expert",)
    _tape = None  # a `replay.Tape` inside of record_routing and replay_routing
    if TYPE_CHECKING:
        _prepare_parameters: Callable[[FusedMoE], None] | None
    _prepare_parameters = None  # `ExpertParallel`'s function of a layer whose parameters were replaced

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_func: str = "softmax",
        route_norm: bool = False,
        route_scale: float = 1.0,
        route_norm_eps: float = 1e-20,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        group_score: str = "top2",
        expert_scale: bool = False,
        num_shared_experts: int = 0,
        shared_expert_gate: bool = False,
        latent_dim: int | None = None,
        latent_norm: bool = False,
        load_balance_coeff: float | None = None,
        activation: str = "silu",
        alpha: float = function.ALPHA,
        limit: float = function.LIMIT,
        gated: bool = True,
        bias: bool = False,
        gate_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        fp8: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size, least in (
            ("dim", dim, 1), ("hidden_dim", hidden_dim, 1), ("num_shared_experts", num_shared_experts, 0),
            ("latent_dim", dim if latent_dim is None else latent_dim, 1),
        ):  # fmt: skip
            checks.check_int(FN, name, size)
            if size < least:
                checks.fail(ValueError, FN, f"{name} >= {least}", size)
        for name, flag in (
            ("route_norm", route_norm), ("shared_expert_gate", shared_expert_gate), ("gated", gated),
            ("bias", bias), ("gate_bias", gate_bias), ("latent_norm", latent_norm),
            ("expert_scale", expert_scale), ("fp8", fp8),
        ):  # fmt: skip
            checks.check_bool(FN, name, flag)
        if load_balance_coeff is not None:
            checks.check_real(FN, "load_balance_coeff", load_balance_coeff)
            if load_balance_coeff < 0:
                checks.fail(ValueError, FN, "load_balance_coeff >= 0", load_balance_coeff)
        checks.check_factory(FN, device, dtype)
        if router_dtype not in (None, torch.float32):
            checks.fail(TypeError, FN, "router_dtype to be None or torch.float32", router_dtype)
        if router_dtype is not None and (dtype or torch.get_default_dtype()) == torch.float64:
            checks.fail(TypeError, FN, "router_dtype=None with parameters of float64", router_dtype)
        groups = (num_expert_groups, num_limited_groups, group_score)
        norm = (route_norm, route_scale, route_norm_eps)
        checks.check_routing(FN, num_experts, top_k, score_func, *groups, *norm)
        checks.check_activation(FN, activation, alpha, limit)
        if shared_expert_gate and not num_shared_experts:
            checks.fail(ValueError, FN, "shared_expert_gate only with shared experts", "num_shared_experts=0")
        if latent_norm and latent_dim is None:
            checks.fail(ValueError, FN, "latent_norm only with latent_dim", "latent_dim=None")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        act = {"activation": activation, "alpha": alpha, "limit": limit}
        mlp: dict[str, Any] = {**act, "gated": gated, "bias": bias, **factory}
        routing = {
            "score_func": score_func,
            "route_norm": route_norm,
            "route_scale": route_scale,
            "route_norm_eps": route_norm_eps,
            "num_expert_groups": num_expert_groups,
            "num_limited_groups": num_limited_groups,
            "group_score": group_score,
        }
        of_router: dict[str, Any] = {"bias": gate_bias, "routing": routing, "expert_scale": expert_scale}
        of_router["router_dtype"] = router_dtype
        self.dim, self.num_experts, self.top_k = dim, num_experts, top_k
        self.load_balance_coeff = load_balance_coeff
        self.router = self.router_type(dim, num_experts, top_k, **of_router, **factory)
        self.experts = self.experts_type(latent_dim or dim, hidden_dim, num_experts, **mlp)
        if fp8:
            train_in_fp8(FN, [(self.experts, top_k)], Fp8Training())
        self.latent_down = self.latent_norm = self.latent_up = None
        if latent_dim is not None:
            self.latent_down = nn.Linear(dim, latent_dim, bias=False, **factory)
            self.latent_up = nn.Linear(latent_dim, dim, bias=False, **factory)
        if latent_norm:
            self.latent_norm = nn.RMSNorm(latent_dim, 1e-5, **factory)
        self.shared_experts = self.shared_expert_gate = None
        if num_shared_experts:
            self.shared_experts = SharedExperts(dim, hidden_dim * num_shared_experts, **mlp)
        if shared_expert_gate:
            self.shared_expert_gate = (
                nn.Linear(dim, 1, bias=False, **factory)
                if router_dtype is None
                else Gate(dim, 1, bias=False, **factory, router_dtype=router_dtype)
            )
        zeros = torch.zeros(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("expert_bias", None if load_balance_coeff is None else zeros)
        self.tokens_per_expert = torch.zeros(num_experts, device=device, dtype=torch.int64)
        self._watched = [0, 0]  # forward passes without an update, tokens_per_expert's version after the last

    @classmethod
    def from_hf(
        cls,
        config: Any,
        layer: int | None = None,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> FusedMoE:
        """Makes the layer of a Hugging Face model, with new weights.

        `fused_moe.checkpoint.load_layer` reads a checkpoint's.

        Args:
            config: a configuration of transformers, a dict as of config.json, or the path of a config.json or
                of its folder. Score function, norm, scale, groups, biases, shared experts and activation are
                the model's; a field that config.json omits is what transformers' configuration class has. The
                model types: `fused_moe.checkpoint.FAMILIES`.
            layer: its number in the model; None where all MoE layers are alike.
            device: of the parameters.
            dtype: of the parameters.
            overrides: load_balance_coeff, router_dtype and fp8 as above. A router with a bias for the choice,
                as DeepSeek-V3's, has load_balance_coeff=0.0, which holds the bias still.

        Returns:
            The layer.

        Raises:
            TypeError: an override that is no argument of FusedMoE.
            ValueError: an unknown model_type, a field or a value that FusedMoE does not compute, a dense
                layer, layers that differ with layer=None, or an override that contradicts the configuration.

        Example:
            >>> config = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32}
            >>> config |= {"num_experts": 8, "num_experts_per_tok": 2}
            >>> fused_moe.FusedMoE.from_hf(config, load_balance_coeff=1e-3).experts.w1.shape
            torch.Size([8, 32, 64])
        """
        layers = import_module(".checkpoint.layers", __package__)  # which imports this file
        return cls(**layers.settings_of(config, layer, overrides), device=device, dtype=dtype)

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        for name in ("latent_down", "latent_norm", "latent_up"):
            if name not in self._modules:  # pickled by an older version
                self.__dict__.setdefault(name, None)
        if self._prepare_parameters is not None:
            self._prepare_parameters(self)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self._prepare_parameters is not None:  # to_empty replaces those of the meta device
            self._prepare_parameters(self)
        return self

    def reset_parameters(self) -> None:
        """Initialises every parameter again, as is needed after `to_empty`.

        They are uniform in +-1/sqrt(fan_in), as those of nn.Linear, also those that are pruned or
        parametrised. expert_bias and the counts become zero.
        """
        for child in self.children():
            reset(child)
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.tokens_per_expert.zero_()

    def forward(
        self,
        x: Tensor,
        *,
        return_losses: bool = False,
        ids: Tensor | None = None,
        return_ids: bool = False,
        num_tokens: Tensor | None = None,
        loss_mask: Tensor | None = None,
        per_sequence: bool = False,
        group: dist.ProcessGroup | None = None,
        load: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | RouterLosses, ...]:
        """Applies the layer to every token.

        Args:
            x: (..., D), of the parameters' dtype (any but float64 under autocast) and on their device.
            return_losses: whether to return RouterLosses, for the trainer's loss, beside the output.
            ids: (..., K) uint8, int8, int16, uint16, int32 or int64, the experts of each token, as return_ids
                has returned them: replays a choice. Where all ids of a token are -1, the router chooses. See
                `fused_moe.route`.
            return_ids: whether to return the experts that were used, -1 where a slot has none.
            num_tokens: one int32 or int64 on x's device, in a tensor of any shape; clamped to [0, T]. x has
                T rows after reshape(-1, D); the first num_tokens are real tokens. The others are padding: no
                expert computes them, neither counters nor losses see them, their output and gradient are
                zero, and whatever they hold, NaN say, reaches nothing. The host never reads it, so one CUDA
                graph serves any number.
            loss_mask: (...) bool: tokens that are False do not count in the losses. The layer computes them,
                and tokens_per_expert counts them.
            per_sequence: as that of `load_balancing_loss`; x (..., S, D) are sequences.
            group: as that of `load_balancing_loss`.
            load: as that of `load_balancing_loss`. With load=moe.tokens_per_expert the balance loss is that
                of all training passes since the last update of the bias, this one included once, also where
                checkpointing runs it twice.

        Returns:
            out (..., D), or a tuple (out[, RouterLosses][, ids]) of what was asked for.

        Raises:
            TypeError: for a wrong type or dtype, before the routed experts run.
            ValueError: for a wrong shape, device or value, before the routed experts run.
        """
        checks.check_tokens(FN, x, self.dim)
        if return_losses is not False:
            checks.check_bool(FN, "return_losses", return_losses)
        if return_ids is not False:
            checks.check_bool(FN, "return_ids", return_ids)
        scope = {"per_sequence": per_sequence, "group": group, "load": load}
        is_running = load is self.tokens_per_expert
        if per_sequence is not False or not (loss_mask is group is load is None):
            self._check_losses(
                x, return_losses, loss_mask, scope, self.tokens_per_expert if is_running else x
            )
        tokens = x if x.dim() == 2 else x.reshape(-1, x.size(-1))
        given, joined = {}, operands_to_join(self, tokens)
        combines = self.shared_experts is not None and not why_added_after(self, tokens)
        if num_tokens is not None:
            checks.check_num_tokens(FN, num_tokens, "x", x)
            given["num_tokens"] = num_tokens
            if not keeps_padding(self, tokens, joined, combines):
                tokens = zero_padding(tokens, num_tokens)
        if ids is not None:
            checks.check_tensor(FN, "ids", ids, x.dim(), checks.GIVEN_IDS)
            checks.check_shape(FN, "ids", ids, "..., K", (*x.shape[:-1], self.top_k))
            checks.check_device(FN, "ids", ids, "x", x)
            given["ids"] = ids.reshape(-1, self.top_k)
        tape = self._tape
        if tape is not None and ids is None and (ids := tape.take(tokens, self.top_k)) is not None:
            given["ids"] = ids
        shared: tuple = (None, None)
        beside: Beside | None = None
        if combines:
            shared = self._shared_operands(tokens, num_tokens)
        elif self.shared_experts is not None and self.latent_down is None and runs_shared(self.experts):
            beside = Beside(partial(self._shared, tokens, num_tokens))
            cast(Any, self.experts).beside = beside
        out, counts, ids, logits = self._routed(tokens, joined, given, shared)
        if tape is not None:
            tape.note(ids)
        if self.training and self._count("tokens_per_expert", counts) and self.load_balance_coeff is not None:
            self._watch_balance()
        if self.shared_experts is not None and shared[0] is None:
            added = None if beside is None else beside.out
            out = out + (self._shared(tokens, num_tokens) if added is None else added)
        if x.dim() != 2:
            out = reshaped(out, x.shape)
        results: list[Tensor | RouterLosses] = [out]
        if return_losses:
            if is_running:  # without this pass, which is counted by now
                load = self.tokens_per_expert.to(counts.device)
                scope["load"] = load - counts if self.training else load
            results.append(self._losses(logits, ids, x.shape[:-1], scope, num_tokens, loss_mask))
        if return_ids:
            results.append(ids.reshape(*x.shape[:-1], self.top_k))
        return out if len(results) == 1 else tuple(results)

    def _check_losses(self, x: Tensor, return_losses: bool, mask, scope: dict, like: Tensor) -> None:
        """Checks what the losses are taken over, before anything runs."""
        if not return_losses:
            names = "loss_mask, per_sequence, group and load only with return_losses=True"
            checks.fail(ValueError, FN, names, "return_losses=False")
        if mask is not None:
            check_mask(FN, "loss_mask", mask, "x", x)
        check_scope(FN, **scope, num_experts=self.num_experts, like_name="x", like=like)
        if scope["per_sequence"] and x.dim() < 2:
            checks.fail(ValueError, FN, "x of shape (..., S, D) with per_sequence", tuple(x.shape))

    def _losses(self, logits: Tensor, ids: Tensor, tokens, scope: dict, num_tokens, mask) -> RouterLosses:
        """The losses of logits (T, E) and ids (T, K) of x (*tokens, D)."""
        # another module in the router's place may have no such settings
        score_func = getattr(self.router, "routing", {}).get("score_func", "softmax")
        logits, ids = logits.reshape(*tokens, logits.size(-1)), ids.reshape(*tokens, ids.size(-1))
        real = {"num_tokens": num_tokens, "mask": mask}
        balance = load_balancing_loss(logits, ids, self.num_experts, score_func=score_func, **real, **scope)
        return RouterLosses(balance, router_z_loss(logits, **real))

    def _shared_operands(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the combine takes as shared and shared_gate; of padded rows zeros, whatever they hold."""
        experts = self.shared_experts
        assert experts is not None
        shared, logits = experts.operands(x, self.shared_expert_gate, num_tokens)
        return shared, None if logits is None else zero_padding(logits, num_tokens)

    def _shared(self, x: Tensor, num_tokens: Tensor | None) -> Tensor:
        """The shared experts' output, times sigmoid(gate(x)) if there is a gate; zero in padded rows."""
        experts, gate = self.shared_experts, self.shared_expert_gate
        assert experts is not None
        if gate is None and num_tokens is None:
            return experts(x)
        if not why_changed("shared_experts", experts):
            return experts(x, gate, num_tokens)
        shared = experts(x) if gate is None else _gated(gate(x), experts(x))
        return zero_padding(shared, num_tokens)

    def _routed(
        self, x: Tensor, joined: Operands | str, given: dict, shared: tuple
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The routed experts' out (T, D) and counts (E,), the router's ids (T, K) and logits (T, E). `given`
        are the router's ids and num_tokens, `shared` the combine's shared and shared_gate."""
        modules: dict[str, Any] = self._modules
        buffers = self._buffers  # an attribute takes ten times as long
        bias = buffers["expert_bias"] if "expert_bias" in buffers else self.expert_bias
        check_expert_bias(FN, bias)
        if type(joined) is Operands:
            return routed_experts(x, joined, modules["router"], modules["experts"], bias, shared, **given)
        if self.latent_down is not None:
            return self._routed_latent(x, bias, given)
        scores, ids, logits = self._route(x, bias, given)
        added = (
            () if shared[0] is None else shared
        )  # other modules in the experts' place take three arguments
        return *self.experts(x, scores, ids, *added), ids, logits

    def _routed_latent(
        self, x: Tensor, bias: Tensor | None, given: dict
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """_routed with experts of width latent_dim. Other modules in latent_up's place may have a bias, which
        padded rows do not get."""
        scores, ids, logits = self._route(x, bias, given)
        out, counts = self.experts(_linear(self.latent_down, x), scores, ids)
        if self.latent_norm is not None:
            out = self.latent_norm(out)
        out = zero_padding(_linear(self.latent_up, out), given.get("num_tokens"))
        return out, counts, ids, logits

    def _route(self, x: Tensor, bias: Tensor | None, given: dict) -> tuple[Tensor, Tensor, Tensor]:
        """The router's results. If its linear layer fails, the error says what is wrong with x. It cannot be
        checked before: hooks, adapters and quantised weights may cast x. A graph break inside `try` keeps
        torch.compile from compiling forward, so compiled code has no `try`."""
        if torch.compiler.is_compiling():
            return self.router(x, bias, **given)
        try:
            return self.router(x, bias, **given)
        except RuntimeError:
            gate = self.router.gate
            weight = getattr(gate, "weight", None)
            if isinstance(weight, Tensor) and weight.is_floating_point():
                for p in (weight, getattr(gate, "bias", None)):
                    if p is not None and p.device != x.device:
                        checks.fail(ValueError, FN, f"x on the parameters' device {p.device}", x.device)
                autocasts = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
                if x.dtype != weight.dtype and not autocasts:
                    checks.fail(TypeError, FN, f"x of the parameters' dtype {weight.dtype}", x.dtype)
            raise

    def _watch_balance(self) -> None:
        """Warns if nothing updates expert_bias. Whatever does so zeroes tokens_per_expert, too, whose version
        is then no longer the one after the last count."""
        if self.tokens_per_expert.is_inference():  # has no version
            return
        watched = self.__dict__.setdefault("_watched", [0, 0])  # a layer pickled by an older version has none
        version = self.tokens_per_expert._version
        watched[0] = watched[0] + 1 if version == watched[1] + 1 else 1
        watched[1] = version
        if watched[0] == PATIENCE:
            warnings.warn(
                "FusedMoE: expected fused_moe.balance(model, optimizer), or update_expert_bias() after each "
                f"optimizer step, as load_balance_coeff is set, found {PATIENCE} training forward passes "
                "without an update: the load is not balanced",
                stacklevel=2,
            )

    def update_expert_bias(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Moves expert_bias by load_balance_coeff against the load, and zeroes the token counts.

        Call it once after each optimizer step, or `fused_moe.balance` once before the first. Under
        torch.distributed the counts are first summed over `process_group` (default: all ranks), so every rank
        keeps the same bias. Without load_balance_coeff it only zeroes them.

        Args:
            process_group: ranks that have the same layer. None: all ranks, if torch.distributed is
                initialised.
        """
        if self.expert_bias is None:
            self.tokens_per_expert.zero_()
        else:
            update_biases([self], process_group)

    def load_report(self) -> LoadReport:
        """Returns the load of each expert on this rank since the last update of the bias.

        `print` shows it as at most 24 lines: see `LoadReport`.
        """
        return report_of(self.tokens_per_expert)

    def extra_repr(self) -> str:
        """What `print` shows of the layer beside its modules."""
        return f"load_balance_coeff={self.load_balance_coeff}" if self.load_balance_coeff else ""
