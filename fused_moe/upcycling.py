"""A dense MLP into a FusedMoE that computes the same at the start."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .activation import activate, activation_of
from .checks import (
    FLOATING,
    check_bool,
    check_int,
    check_like,
    check_plain,
    check_real,
    check_shape,
    check_stored,
    fail,
)
from .module import FusedMoE

FN = "upcycle"
# Where modules have the dense MLP: transformers' and torchtitan's names, then those without a gate.
LAYOUTS = (
    ("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3"), ("up_proj", "down_proj"), ("w1", "w2"),
    ("fc1", "fc2"), ("c_fc", "c_proj"),
)  # fmt: skip
# What the dense MLP decides, and what would compute something beside it.
DECIDED = {"gated", "bias", "route_scale", "device", "dtype"}
DECIDED |= {"num_shared_experts", "shared_expert_gate", "latent_dim", "latent_norm"}
SETTINGS = {p.name for p in inspect.signature(FusedMoE).parameters.values() if p.kind is p.KEYWORD_ONLY}


@torch.no_grad()
def upcycle(
    mlp: nn.Module | tuple,
    num_experts: int,
    top_k: int,
    *,
    granularity: int = 1,
    route_norm: bool = True,
    noise: float = 0.0,
    noise_fraction: float = 1.0,
    router_std: float = 0.02,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> FusedMoE:
    """Makes a FusedMoE whose experts are copies of a dense MLP, to train a dense model on (sparse upcycling).

    With route_norm, and without noise, its output and the gradient of x are the dense MLP's, and the
    gradients of the experts' w1, w2 and w3 sum to those of the dense weights. The dense MLP stays as it is.

    With a granularity of G an expert has 1/G of the hidden units: expert c * G + s is shard s of copy c. The
    router starts with equal rows for the shards of a copy, so a token gets top_k / G whole copies (virtual
    groups), until training tells the shards apart. FLOPs per token are top_k / G times the dense MLP's.

    Source: Sparse Upcycling (Komatsuzaki et al., arXiv 2212.05055): copies, a fresh router, and
    normalised scores, which keep the function. Upcycling LLMs into MoE (He et al., arXiv 2410.07524):
    granularity, virtual groups, the factor on the output; it prefers scores that are not normalised. Noise as
    in Qwen1.5-MoE (random differences between the copies) and, on a fraction, Drop-Upcycling (Nakamura
    et al., arXiv 2502.19261), which draws a part of the weights anew.

    Args:
        mlp: a module with gate_proj, up_proj, down_proj (transformers), with w1 gate, w2 down, w3 up, or
            without a gate with up_proj and down_proj, w1 and w2, fc1 and fc2, or c_fc and c_proj, all
            nn.Linear; or a tuple (w1, w2, w3) or (w1, w2) of nn.Linear or of weights (out, in).
        num_experts: E, a multiple of granularity.
        top_k: K, a multiple of granularity.
        granularity: G. It divides the hidden width.
        route_norm: scores of a token sum to 1, and FusedMoE's route_scale is G. Without it they do not, and
            route_scale is such that the output is the dense one where all logits are 0.
        noise: the standard deviation of normal noise on the experts' weights, as a part of each weight's own;
            0.01 to 0.1, say.
        noise_fraction: the part of the elements that get some.
        router_std: standard deviation of the router's weight.
        generator: draws router and noise; None: PyTorch's default.
        settings: others of FusedMoE: activation (default "silu"), score_func, load_balance_coeff, ...

    Returns:
        The layer, with the weights' dtype and device.

    Raises:
        TypeError: for parts of a wrong type or dtype, and for settings that the dense MLP decides.
        ValueError: for parts that are not those of such an MLP, and for a module that computes something
            else with them: its output on a few tokens is compared.

    Example:
        >>> w1, w2, w3 = (torch.nn.Linear(i, o, bias=False) for i, o in ((8, 16), (16, 8), (8, 16)))
        >>> moe = fused_moe.upcycle((w1, w2, w3), num_experts=4, top_k=2)
        >>> x = torch.randn(5, 8)
        >>> dense = w2(torch.nn.functional.silu(w1(x)) * w3(x))
        >>> torch.allclose(moe(x), dense, atol=1e-5)
        True
    """
    _check_numbers(num_experts, top_k, granularity, noise, noise_fraction, router_std)
    check_bool(FN, "route_norm", route_norm)
    if generator is not None and not isinstance(generator, torch.Generator):
        fail(TypeError, FN, "generator to be a torch.Generator or None", type(generator).__name__)
    for name in settings:
        if name in DECIDED or name not in SETTINGS:
            names = ", ".join(sorted(SETTINGS - DECIDED))
            fail(TypeError, FN, f"other settings to be among {names}", name)
    weights, biases = _read(mlp)
    w1, w2 = weights[:2]
    hidden_dim, dim = w1.shape
    if hidden_dim % granularity:
        fail(ValueError, FN, f"a hidden width that granularity = {granularity} divides", hidden_dim)
    groups = settings.get("num_expert_groups")
    if isinstance(groups, int) and groups > 0 and num_experts // groups % granularity:
        expected = f"expert groups of whole copies, of a multiple of granularity = {granularity} experts"
        fail(ValueError, FN, expected, num_experts // groups)
    moe = FusedMoE(
        dim,
        hidden_dim // granularity,
        num_experts,
        top_k,
        route_norm=route_norm,
        route_scale=_scale(
            num_experts, top_k, granularity, route_norm, settings.get("score_func", "softmax")
        ),
        gated=len(weights) == 3,
        bias=any(b is not None for b in biases),
        **settings,
        device="meta",  # draws nothing
        dtype=w1.dtype,
    )
    _check_output(mlp, moe.experts, weights, biases)
    moe.to_empty(device=w1.device)
    _fill(moe, weights, biases, granularity, noise, noise_fraction, router_std, generator)
    return moe


def _check_numbers(num_experts, top_k, granularity, noise, noise_fraction, router_std) -> None:
    for name, size in (("granularity", granularity), ("num_experts", num_experts), ("top_k", top_k)):
        check_int(FN, name, size)
        if size < 1:
            fail(ValueError, FN, f"{name} >= 1", size)
        if size % granularity:
            fail(ValueError, FN, f"{name} to be a multiple of granularity = {granularity}", size)
    for name, value in (("noise", noise), ("noise_fraction", noise_fraction), ("router_std", router_std)):
        check_real(FN, name, value)
        if value < 0 or (name == "noise_fraction" and value > 1):
            fail(ValueError, FN, f"{name} >= 0" + " and <= 1" * (name == "noise_fraction"), value)


def _read(mlp: object) -> tuple[list[Any], list[Any]]:
    """Weights and biases of gate, down and up, or of up and down."""
    if isinstance(mlp, nn.Module):
        layouts = [names for names in LAYOUTS if all(getattr(mlp, n, None) is not None for n in names)]
        if not layouts:
            children = ", ".join(name for name, _ in mlp.named_children()) or "no parts"
            known = " or ".join("/".join(names) for names in LAYOUTS)
            fail(TypeError, FN, f"a module with {known}", f"{type(mlp).__name__} with {children}")
        names: tuple[str, ...] = layouts[0]
        parts = [getattr(mlp, name) for name in names]
    elif isinstance(mlp, tuple) and len(mlp) in (2, 3):
        parts, names = list(mlp), ("w1", "w2", "w3")[: len(mlp)]
    else:
        found = f"{len(mlp)} parts" if isinstance(mlp, tuple) else type(mlp).__name__
        fail(TypeError, FN, "mlp to be a module, or a tuple (w1, w2, w3) or (w1, w2)", found)
    weights = [part.weight if isinstance(part, nn.Linear) else part for part in parts]
    biases = [part.bias if isinstance(part, nn.Linear) else None for part in parts]
    for name, weight, bias in zip(names, weights, biases, strict=True):
        if not isinstance(weight, Tensor):
            fail(TypeError, FN, f"{name} to be an nn.Linear or a tensor", type(weight).__name__)
        for t, dim in ((weight, 2), (bias, 1)):
            if t is not None:
                check_plain(FN, name, t)
                check_stored(FN, name, t, dim, FLOATING)
                check_like(FN, name, t, names[0], weights[0])
    if isinstance(mlp, nn.Module):
        read = {id(t) for t in (*weights, *biases)}
        others = [name for name, p in mlp.named_parameters() if id(p) not in read]
        if others:
            fail(ValueError, FN, f"no parameters beside {', '.join(names)}", ", ".join(others))
    hidden_dim, dim = weights[0].shape
    check_shape(FN, names[1], weights[1], "D, F", (dim, hidden_dim))
    if len(weights) == 3:
        check_shape(FN, names[2], weights[2], "F, D", (hidden_dim, dim))
    return weights, biases


def _check_output(mlp, experts: nn.Module, weights, biases) -> None:
    """Runs a module on a few tokens, small to large, and compares with what its parts compute: its class may
    have another activation, a limit, factors, or other roles for the same names."""
    first, (F, D) = weights[0], weights[0].shape
    if not isinstance(mlp, nn.Module) or first.is_meta:
        return
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(0))
    x = x * 2.0 ** torch.arange(-1, 5).view(6, 1)  # deviations of the hidden units, unless weights are 0
    x = (x.to(first.device) * (math.sqrt(F) / first.float().norm()).clamp(max=64)).to(first.dtype)
    own = copy.deepcopy(mlp).eval()(x)  # without dropout
    hidden = [linear(x, w, b) for w, b in zip(weights[::2], biases[::2], strict=True)]  # gate and up
    expected = linear(activate(*hidden, **activation_of(experts)), weights[1], biases[1])
    error = ((own - expected).double().norm(dim=1) / expected.double().norm(dim=1).clamp(min=1e-30)).max()
    if not error <= torch.finfo(first.dtype).eps ** 0.6:  # nor NaN
        formula = "down(act(gate(x)) * up(x))" if len(hidden) == 2 else "down(act(up(x)))"
        output = f"{type(mlp).__name__}'s output to be {formula} with activation={experts.activation!r}"
        fail(ValueError, FN, output, f"a relative difference of {error:.1e}")


def _scale(E: int, K: int, G: int, route_norm: bool, score_func) -> float:
    """The factor by which the scores of K / G whole copies, each counted by one shard, sum to 1."""
    if route_norm:
        return float(G)
    of_zero = {"softmax": 1 / E, "sigmoid": 0.5, "sqrtsoftplus": math.sqrt(math.log(2))}
    return G / (K * of_zero.get(str(score_func), 1.0))  # FusedMoE raises for others


def _fill(moe: FusedMoE, weights, biases, G: int, noise, fraction, router_std, generator) -> None:
    """Writes every parameter and buffer."""
    experts, device = moe.experts, weights[0].device
    E, F, source = moe.num_experts, experts.hidden_dim, device if generator is None else generator.device

    def draw(function, shape, dtype):
        return function(shape, generator=generator, device=source, dtype=dtype).to(device)

    gate = moe.router.gate.weight
    copies = draw(torch.randn, (E // G, gate.size(1)), gate.dtype) * router_std
    gate.copy_(copies.repeat_interleave(G, 0))
    for constant, value in ((moe.router.gate.bias, 0), (moe.router.expert_scale, 1), (moe.expert_bias, 0)):
        if constant is not None:
            constant.fill_(value)
    moe.tokens_per_expert.zero_()

    for name, weight, bias in zip(("w1", "w2", "w3"), weights, biases, strict=False):
        along = 1 if name == "w2" else 0  # hidden units
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        std = wide.std() if noise else None
        own_bias = getattr(experts, f"b{name[1]}")
        for e in range(E):
            shard = wide.narrow(along, e % G * F, F)
            if noise:
                added = draw(torch.randn, shard.shape, shard.dtype) * (noise * std)
                shard = shard + added * (draw(torch.rand, shard.shape, shard.dtype) < fraction)
            getattr(experts, name)[e].copy_(shard)
            if own_bias is None:
                continue
            if bias is None:
                own_bias[e].zero_()
            else:  # each of G shards adds to the output
                own_bias[e].copy_(bias / G if name == "w2" else bias.narrow(0, e % G * F, F))
