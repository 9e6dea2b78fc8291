"""Recording and replaying what the routers of transformers choose.

A forward hook on the router gives it other ids, and the scores that its own rule has for them. The rules are
those of the classes in `RULES`, whose forward returns logits, scores and ids. Any other router raises.

Letters: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..checks import fail
from ..replay import FINDERS, tape_of
from .weights import NAMES

if TYPE_CHECKING:

    class RouterModule(nn.Module):
        """A router of a class in `RULES`."""

        num_experts: int
        top_k: int
        norm_topk_prob: bool
        routed_scaling_factor: float


def _softmax(router: RouterModule, logits: Tensor, ids: Tensor, is_there: Tensor) -> Tensor:
    scores = _at(logits.softmax(-1, dtype=torch.float32), ids, is_there)
    return (_normed(scores) if router.norm_topk_prob else scores).to(logits.dtype)


def _mixtral(router: RouterModule, logits: Tensor, ids: Tensor, is_there: Tensor) -> Tensor:
    return _normed(_at(logits.float().softmax(-1), ids, is_there))


def _sigmoid(router: RouterModule, logits: Tensor, ids: Tensor, is_there: Tensor) -> Tensor:
    scores = _at(logits.sigmoid(), ids, is_there)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


def _softmax_of_chosen(router: RouterModule, logits: Tensor, ids: Tensor, is_there: Tensor) -> Tensor:
    chosen = logits.gather(1, ids).masked_fill(~is_there, torch.finfo(logits.dtype).min)
    return chosen.softmax(1, dtype=logits.dtype).masked_fill(~is_there, 0)


def _at(scores: Tensor, ids: Tensor, is_there: Tensor) -> Tensor:
    return scores.gather(1, ids).masked_fill(~is_there, 0)


def _normed(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


# The scores (T, K) of ids (T, K) among logits (T, E), by the class that has the router's forward.
RULES: dict[str, Callable] = {
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
    "GptOssTopKRouter": _softmax_of_chosen,
    "MixtralTopKRouter": _mixtral,
    "OlmoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
}


def _rule_of(module: nn.Module) -> Callable | None:
    """By its forward, which the classes that FSDP makes inherit, and a class with another rule has not."""
    forward = type(module).forward
    if not getattr(forward, "__module__", "").startswith("transformers.models."):
        return None
    return RULES.get(forward.__qualname__.removesuffix(".forward"))


def _replay(router: RouterModule, args: tuple, output):
    """A forward hook: what the router returns, with the ids of its tape."""
    tape = tape_of(router)
    if tape is None:
        return None
    if not isinstance(output, tuple) or len(output) != 3:
        expected = "a router that returns logits, scores and ids"
        fail(RuntimeError, "record_routing, replay_routing", expected, type(router).__name__)
    logits, scores, own = output
    ids = tape.take(logits, router.top_k)
    if ids is not None:
        ids = ids.to(own.dtype)
        ids = torch.where((ids < 0).all(1, keepdim=True), own, ids)
        is_there = ids >= 0
        rule = _rule_of(router)
        assert rule is not None
        scores = rule(router, logits, ids.clamp(min=0), is_there)
    else:
        ids = own
    tape.note(ids)
    return logits, scores, ids


def _sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """E and K of a router with a rule. A block whose experts are ours and whose router has none raises."""
    if _rule_of(module) is not None:
        if _replay not in module._forward_hooks.values():
            module.register_forward_hook(_replay)
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # compiled code has no guard on hooks, so it would go without this one
        router = cast("RouterModule", module)
        return router.num_experts, router.top_k
    experts = module._modules.get("experts")
    if getattr(getattr(experts, "config", None), "_experts_implementation", None) in NAMES:
        if all(_rule_of(child) is None for child in module.children()):
            expected = f"a router of one of the classes {', '.join(RULES)} beside the experts"
            fail(RuntimeError, "record_routing, replay_routing", expected, f"a {type(module).__name__}")
    return None


FINDERS.append(_sizes_of)
