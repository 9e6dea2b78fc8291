"""FP8 training of modules: `enable_fp8`, and which codes of the weights a call uses."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from .checks import check_bool, check_choice, fail
from .finding import Module, layers_in
from .fp8 import GAINS, WGRADS, Fp8Weights, layer_pays, quantized
from .ops import BLOCK
from .paths import PLAIN
from .quantized.sharding import is_sharded
from .quantized.weight import QuantizedWeight

if TYPE_CHECKING:
    from .module import Experts

_optimizer_steps: int | None = None  # taken by all torch.optim optimizers; None: not counted yet


def _watch_optimizers() -> None:
    global _optimizer_steps
    if _optimizer_steps is None:
        _optimizer_steps = 0
        register_optimizer_step_post_hook(_count_step)


def _count_step(*_) -> None:
    global _optimizer_steps
    _optimizer_steps = (_optimizer_steps or 0) + 1


class Fp8Training:
    """How the experts of one layer train in FP8.

    By default a call quantises the weights that it gets, so no write to them can be missed. `keep_codes`
    shares codes between calls that record gradients, until PyTorch sees that the weights may have changed: by
    their versions and memory, and by the steps of its optimizers, whose fused kernels move no version.

    Under FSDP2 the weights of a call are gone after it. `is_gathered` says that they are, and then codes are
    not kept either: backward makes those it needs from the weights that are gathered for it.
    """

    def __init__(self, wgrad: str = "auto", *, keep_codes: bool = False):
        self.wgrad, self.keep_codes, self.is_gathered = wgrad, keep_codes, False
        self._kept: tuple | None = None  # what codes were made of, and the codes
        if keep_codes:
            _watch_optimizers()

    def weights(self, w1: Tensor, w2: Tensor, w3: Tensor | None, layout: int, needs_grad: bool) -> Fp8Weights:
        """The codes of checked weights (E, out, in) for one call."""
        if not needs_grad:
            return quantized(w1, w2, w3, layout, for_backward=False)
        given = [w for w in (w1, w2, w3) if w is not None]
        if not self.keep_codes or self.is_gathered or not _may_keep(given):
            return quantized(w1, w2, w3, layout, for_backward=not self.is_gathered)
        made_of = [_Seen(w) for w in given]
        kept = self._kept
        if kept is None or kept[0] != made_of:
            self._kept = kept = (made_of, quantized(w1, w2, w3, layout))
        return kept[1]

    def without_codes(self) -> Fp8Training:
        """The same, but for keep_codes."""
        other = Fp8Training(self.wgrad)
        other.is_gathered = self.is_gathered
        return other

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_kept": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.keep_codes:
            _watch_optimizers()

    def __repr__(self) -> str:
        return f"Fp8Training(wgrad={self.wgrad!r}, keep_codes={self.keep_codes})"


class _Seen:
    """What PyTorch tells of a weight's values. The weak reference keeps its storage's address from being that
    of another one."""

    def __init__(self, w: Tensor):
        self.storage = StorageWeakRef(w.untyped_storage())
        stream = torch.cuda.current_stream(w.device).cuda_stream if w.is_cuda else None
        self.about = (w._version, w.data_ptr(), w.shape, w.stride(), w.dtype, _optimizer_steps, stream)

    def __eq__(self, other) -> bool:
        return self.storage == other.storage and self.about == other.about


def _may_keep(weights: list[Tensor]) -> bool:
    """Whether codes may serve another call. A CUDA graph has its own, made in the graph, whose memory is the
    graph's. A graph that is traced sees no versions; dispatch modes may trace."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if not all(type(w) in PLAIN and not w.is_inference() for w in weights):
        return False
    return not (weights[0].is_cuda and torch.cuda.is_current_stream_capturing())


class TrainsFp8(nn.Module):
    """A module with experts' weights that can train in FP8."""

    fp8: Fp8Training | None = None

    @property
    def fp8_settings(self) -> dict:
        """What functions take as fp8 and fp8_wgrad."""
        fp8 = self.fp8
        if fp8 is None:
            return {}
        if fp8.keep_codes and any(p is not None and is_sharded(p) for p in self._parameters.values()):
            fp8 = fp8.without_codes()  # a write moves a DTensor's version, and not its local tensor's
        return {"fp8": fp8, "fp8_wgrad": fp8.wgrad}

    def __setattr__(self, name: str, value) -> None:
        # fully_shard sets a parameter when it gathers it, and when it frees it.
        fp8 = self.__dict__.get("fp8")
        if fp8 is not None and isinstance(value, nn.Parameter):
            old = self._parameters.get(name)
            fp8.is_gathered |= old is not None and old is not value and is_sharded(old)
        super().__setattr__(name, value)


def enable_fp8(
    module: Module,
    *,
    enabled: bool = True,
    wgrad: str = "auto",
    keep_codes: bool = False,
    force: bool = False,
) -> Module:
    """Trains the experts of every FusedMoE in a module in FP8.

    All their GEMMs, forward and backward, multiply e4m3 by e4m3, as `fused_experts(..., fp8=True)` does.
    Parameters stay as they are, so optimizers, state_dicts, DistributedDataParallel and FSDP2 see nothing
    new. Router, shared experts and the combine stay as they are, too. Source: DeepSeek-V3 (arXiv 2412.19437,
    3.3).

    Layers whose experts are too narrow or too many to gain (F < 768, or E > 16 * K) keep their dtype, with a
    warning. Only a layer's sizes decide about that, never the number of tokens.

    Args:
        module: with FusedMoE layers whose experts have D and F that are multiples of 128, and neither biases,
            adapters nor quantised weights.
        enabled: False takes it back.
        wgrad: of the weights' gradients, as `fp8_wgrad` of `fused_experts`: "auto", "fp8" or "bf16".
        keep_codes: quantise once for all forward passes between two steps of an optimizer, in place of once
            for each. The codes, 2 bytes for each element of a weight, stay in memory. They are made again
            where the weights' storages or versions change, and after a step of any torch.optim.Optimizer. A
            write that PyTorch does not see is missed until then: by `p.data.copy_`, by another package's
            kernel, by the replay of a CUDA graph that has an optimizer's step in it, or by
            FullyShardedDataParallel where it gathers. Has no effect in forward passes without gradients,
            where parameters are DTensors (FSDP2, ExpertParallel), in CUDA graphs, traces and compiled code:
            those quantise each time.
        force: layers that do not gain, too.

    Returns:
        The module.

    Raises:
        TypeError: for a wrong type or dtype, before anything is changed.
        ValueError: for a wrong shape or value, before anything is changed.
        RuntimeError: in a call, on a GPU that does not multiply FP8 by FP8 (`info()["compute"]["fp8"]`).

    Example:
        >>> moe = fused_moe.FusedMoE(128, 768, num_experts=4, top_k=2)
        >>> moe = fused_moe.enable_fp8(moe)
        >>> moe.experts.fp8
        Fp8Training(wgrad='auto', keep_codes=False)
    """
    fn = "enable_fp8"
    for name, flag in (("enabled", enabled), ("keep_codes", keep_codes), ("force", force)):
        check_bool(fn, name, flag)
    check_choice(fn, "wgrad", wgrad, WGRADS)
    layers = [(layer.experts, layer.top_k) for layer in layers_in(fn, module).values()]
    if enabled:
        train_in_fp8(fn, layers, Fp8Training(wgrad, keep_codes=keep_codes), force=force)
    else:
        for experts, _ in layers:
            experts.fp8 = None
    return module


def train_in_fp8(fn: str, layers: list, how: Fp8Training, *, force: bool = False) -> None:
    """Sets fp8 of experts like `how`; `layers` are pairs of a FusedMoE's experts and K."""
    for experts, _ in layers:
        _check_trainable(fn, experts)
    left_out = []
    for experts, top_k in layers:
        sizes = (experts.dim, experts.hidden_dim, experts.num_experts, top_k)
        if force or layer_pays(*sizes):
            experts.fp8 = Fp8Training(how.wgrad, keep_codes=how.keep_codes)
        else:
            experts.fp8 = None
            left_out.append(sizes)
    if left_out:
        first = ", ".join(f"{letter}={n}" for letter, n in zip("DFEK", left_out[0], strict=True))
        warnings.warn(
            f"{fn}: expected {GAINS}, as FP8 pays, found {first}. "
            f"{len(left_out)} of {len(layers)} layers keep their dtype",
            stacklevel=3,
        )


def _check_trainable(fn: str, experts: Experts) -> None:
    if not isinstance(experts, TrainsFp8):
        fail(TypeError, fn, "the experts of a FusedMoE", type(experts).__name__)
    for name, width in (("D", experts.dim), ("F", experts.hidden_dim)):
        if width % BLOCK:
            fail(ValueError, fn, f"experts whose {name} is a multiple of {BLOCK}", width)
    if experts.b1 is not None or experts.b2 is not None:
        fail(ValueError, fn, "experts without biases", "biases")
    if experts.loras:
        fail(ValueError, fn, "experts without adapters", "those of add_lora")
    if any(isinstance(w, QuantizedWeight) for w in experts.weights):
        fail(ValueError, fn, "experts of float weights", "quantised ones")
