"""LoRA of the experts: low-rank additions to w1, w2 and w3, for weights that stay frozen."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .checks import (
    FLOATING,
    check_device,
    check_like,
    check_num_experts,
    check_plain,
    check_real,
    check_storage,
    check_tensor,
    fail,
)
from .paths import why_altered
from .quantized.sharding import sharded_like
from .resetting import reset_uniform


class LoRA(NamedTuple):
    """Adapters of w1, w2 and w3: expert e multiplies by w[e] + scale * b[e] @ a[e], which is never formed.

    Each a is (E, rank, in) and each b (E, out, rank), for the weight (E, out, in) as `fused_experts` computes
    with it: not transposed, and with layout "halves" or "interleaved" in the rows of w1. A weight without an
    adapter has None for both. Ranks may differ; multiples of 8 run on Hopper's kernels.

    Their dtype is x's, or float32 beside x of 16 bits: GEMMs then multiply them rounded to x's dtype, and
    their gradients are float32. Under autocast, which casts both, it is any but float64.

    Source: LoRA (arXiv 2106.09685), one pair of matrices per expert.

    Attributes:
        a1: (E, rank, in) of w1, or None. So are a2 and a3, of w2 and w3.
        b1: (E, out, rank) of w1, or None. So are b2 and b3.
        scale: a float, alpha / rank.

    Example:
        >>> lora = fused_moe.LoRA(a1=torch.randn(4, 2, 8), b1=torch.zeros(4, 16, 2), scale=2.0)
        >>> x, w1, w2 = torch.randn(5, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 16)
        >>> scores, ids = fused_moe.route(torch.randn(5, 4), top_k=2)
        >>> fused_moe.fused_experts(x, w1, w2, None, scores, ids, lora=lora).shape
        torch.Size([5, 8])
    """

    a1: Tensor | None = None
    b1: Tensor | None = None
    a2: Tensor | None = None
    b2: Tensor | None = None
    a3: Tensor | None = None
    b3: Tensor | None = None
    scale: float = 1.0

    @property
    def pairs(self) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """(a, b) of w1, w2 and w3."""
        return pairs_of(self)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """a1, b1, a2, b2, a3 and b3."""
        return self[:6]

    @classmethod
    def from_peft(
        cls,
        num_experts: int,
        w1: tuple[Tensor, Tensor] | None = None,
        w2: tuple[Tensor, Tensor] | None = None,
        w3: tuple[Tensor, Tensor] | None = None,
        *,
        scale: float = 1.0,
    ) -> LoRA:
        """Takes the adapters of PEFT's `target_parameters`, as views.

        Args:
            num_experts: E.
            w1: (lora_A.weight (E * rank, in), lora_B.weight (out, rank * E)): rows of lora_A are grouped by
                expert, columns of lora_B by rank. Older releases swapped in and out for parameters
                (E, out, in); such adapters are not read. None: no adapters of w1.
            w2: likewise.
            w3: likewise.
            scale: lora_alpha / rank, or lora_alpha / sqrt(rank) with use_rslora.

        Raises:
            TypeError: something else than pairs of floating tensors.
            ValueError: a width is not a multiple of E, the ranks of a pair differ, or there is no pair.

        Source: ParamWrapper of peft.tuners.lora.layer, version 0.21.

        Example:
            >>> pair = torch.randn(4 * 2, 8), torch.randn(16, 2 * 4)  # E = 4, rank 2
            >>> lora = fused_moe.LoRA.from_peft(4, w1=pair)
            >>> lora.a1.shape, lora.b1.shape
            (torch.Size([4, 2, 8]), torch.Size([4, 16, 2]))
        """
        fn = "from_peft"
        check_num_experts(fn, num_experts)
        check_real(fn, "scale", scale)
        if w1 is None and w2 is None and w3 is None:
            fail(ValueError, fn, "adapters of w1, w2 or w3", "none")
        tensors: list[Tensor | None] = []
        for i, pair in enumerate((w1, w2, w3), 1):
            if pair is None:
                tensors += [None, None]
                continue
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                fail(TypeError, fn, f"w{i} to be a pair (lora_A.weight, lora_B.weight)", type(pair).__name__)
            A, B = pair
            check_tensor(fn, f"w{i}'s lora_A", A, 2, FLOATING)
            check_tensor(fn, f"w{i}'s lora_B", B, 2, FLOATING)
            if A.size(0) < 1:
                fail(ValueError, fn, f"w{i} of rank >= 1", f"lora_A of shape {tuple(A.shape)}")
            if A.size(0) % num_experts or B.size(1) != A.size(0):
                expected = f"w{i} of lora_A ({num_experts} * rank, in), lora_B (out, rank * {num_experts})"
                fail(ValueError, fn, expected, f"{tuple(A.shape)} and {tuple(B.shape)}")
            tensors += [A.unflatten(0, (num_experts, -1)), B.unflatten(1, (-1, num_experts)).permute(2, 0, 1)]
        a1, b1, a2, b2, a3, b3 = tensors
        return cls(a1, b1, a2, b2, a3, b3, scale)

    def to_peft(self) -> list[tuple[Tensor, Tensor] | None]:
        """Returns (lora_A.weight, lora_B.weight) of w1, w2 and w3: the inverse of `from_peft`."""
        for i, (a, b) in enumerate(self.pairs, 1):
            _check_pair("to_peft", i, a, b)
        return [
            None if a is None or b is None else (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
            for a, b in self.pairs
        ]


def pairs_of(lora: LoRA) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
    """lora.pairs, which torch.compile of PyTorch 2.10 does not look into."""
    return (lora.a1, lora.b1), (lora.a2, lora.b2), (lora.a3, lora.b3)


def joined(loras: list[LoRA]) -> LoRA:
    """One LoRA that adds what all of them add: their ranks one after the other, each scale in its b."""
    if len(loras) == 1:
        return loras[0]
    tensors: list[Tensor | None] = []
    for pairs in zip(*map(pairs_of, loras), strict=True):
        found = [
            (a, b, lora.scale)
            for (a, b), lora in zip(pairs, loras, strict=True)
            if a is not None and b is not None
        ]
        if found:
            tensors += (
                torch.cat([a for a, _, _ in found], 1),
                torch.cat([scale * b for _, b, scale in found], 2),
            )
        else:
            tensors += None, None
    a1, b1, a2, b2, a3, b3 = tensors
    return LoRA(a1, b1, a2, b2, a3, b3)


class Adapters(nn.Module):
    """LoRA's parameters a1, b1, .. for the weights `targets` of a FusedMoE's experts; see `add_lora`.

    `is_active` says whether they compute; `set_lora` sets it.

    `scale` is a Python float, which forward uses without asking a device. The buffer `scaling` is its copy in
    the state_dict: adapters of one alpha would else load into a layer of another.
    """

    is_active = True
    _warned: list | None = None  # missing_keys of the last load_state_dict that warned: one warning for each

    def __init__(self, weights: dict, rank: int, scale: float, dtype: torch.dtype | None):
        super().__init__()
        for name, w in weights.items():
            E, rows, cols = w.shape
            factory = {"dtype": w.dtype if dtype is None else dtype, "device": w.device}
            self.register_parameter(f"a{name[1]}", nn.Parameter(torch.empty(E, rank, cols, **factory)))
            self.register_parameter(f"b{name[1]}", nn.Parameter(torch.empty(E, rows, rank, **factory)))
        self.scale = scale
        self.reset_parameters()

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        check_real("Adapters", "scale", value)
        self._scale = float(value)
        self._store_scale()

    def _store_scale(self) -> None:
        self.register_buffer("scaling", _stored(self._scale, next(self.parameters()).device))

    def reset_parameters(self) -> None:
        """As PEFT: a as nn.Linear, b zero, so that nothing changes at first."""
        for name, value in self._adapters().items():
            reset_uniform(self, name, 1 / math.sqrt(value.size(2)) if name[0] == "a" else 0.0)

    def _adapters(self) -> dict[str, Tensor]:
        """The adapters by name. Pruned and parametrised ones are attributes, not parameters."""
        own = self._parameters
        found = {name: own[name] if name in own else getattr(self, name, None) for name in LoRA._fields[:-1]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @torch.no_grad()
    def load(self, lora: LoRA) -> None:
        """Copies adapters, those of another framework say, into the parameters; takes their scale.

        Raises:
            TypeError: for a wrong type or dtype, before anything is changed.
            ValueError: for a wrong shape or value, before anything is changed.
        """
        fn = "load"
        _check_type(fn, lora)
        check_real(fn, "lora.scale", lora.scale)
        for i, (a, b) in enumerate(lora.pairs, 1):
            _check_pair(fn, i, a, b)
        self.state_dict()  # FSDP2 frees what it has gathered, into which values would be written in vain
        own = dict(self.named_parameters())
        given = {name: t for name, t in zip(LoRA._fields, lora.tensors, strict=False) if t is not None}
        if {n: p.shape for n, p in own.items()} != {n: t.shape for n, t in given.items()}:
            expected, found = ({n: tuple(t.shape) for n, t in ts.items()} for ts in (own, given))
            fail(ValueError, fn, f"adapters of shapes {expected}", found)
        for whose, tensors in (("lora's", given), ("the layer's", own)):
            if any(t.is_meta for t in tensors.values()):  # which copy_ would pass over, without a word
                fail(ValueError, fn, f"{whose} adapters to have values", "some on meta")
        for name, parameter in own.items():
            parameter.copy_(sharded_like(parameter, given[name]))
        self.scale = lora.scale

    def _apply(self, fn, recurse=True):
        """As nn.Module, but the scale stays float32, and `to_empty` keeps its value."""
        super()._apply(fn, recurse)
        self._store_scale()
        return self

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        if "scale" in self.__dict__:  # pickled by a version that kept it nowhere else
            self.scale = self.__dict__.pop("scale")

    def other_alphas(self, stored: Tensor) -> tuple[str, ...] | None:
        """The alphas of the adapters and of a file's scale, as words, if they are not the same."""
        own = _stored(self.scale, torch.device("cpu")).to(stored.dtype)  # a file may be cast to 16 bits
        if stored.is_meta or isinstance(stored, FakeTensor) or own.item() == stored.item():
            return None
        rank = next(t.size(1) for name, t in self._adapters().items() if name[0] == "a")
        scales = self.scale, stored.item()
        return tuple(f"alpha = {scale * rank:.6g} (scale {scale:.6g} at rank {rank})" for scale in scales)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        """As nn.Module, but refuses another scale, and does without one in files of older versions."""
        key, stored = prefix + "scaling", state_dict.get(prefix + "scaling")
        adapters = [t for n in LoRA._fields if isinstance(t := state_dict.get(prefix + n), Tensor)]
        if isinstance(stored, Tensor) and stored.numel() == 1:
            if alphas := self.other_alphas(stored):
                error_msgs.append(f"{key}: expected {alphas[0]}, found {alphas[1]}")
            state_dict[key] = _stored(self.scale, stored.device)
        elif stored is None and adapters:
            if Adapters._warned is not missing_keys:
                Adapters._warned = missing_keys
                warn_of_no_scale("load_state_dict", key, self.scale)
            state_dict[key] = _stored(self.scale, adapters[0].device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(self) -> LoRA:
        own = self._adapters()
        if why_altered(self):  # a hook after this call may take the adapters' memory away
            own = {name: tensor.view_as(tensor) for name, tensor in own.items()}
        return LoRA(**own, scale=self.scale)

    def extra_repr(self) -> str:
        return ", ".join(
            [f"{n}={tuple(p.shape)}" for n, p in self.named_parameters()] + [f"scale={self.scale}"]
        )


def warn_of_no_scale(fn: str, key: str, scale: float) -> None:
    warnings.warn(
        f"{fn}: expected LoRA's scale beside the adapters ({key}), found none, as in files of "
        f"fused_moe 0.2.0 and before: add_lora's stays, {scale:.6g}",
        stacklevel=3,
    )


def _stored(scale: float, device: torch.device) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32, device=device)


DEFAULT = "default"


def child_of(name: str) -> str:
    """The attribute that has the adapters of a name: `lora` of "default", `lora_math` of "math"."""
    return "lora" if name == DEFAULT else f"lora_{name}"


class TakesLoRA(nn.Module):
    """A module with experts' weights that can have adapters, by name: its children `lora` and `lora_NAME`."""

    if TYPE_CHECKING:
        lora: Adapters | None

    @property
    def loras(self) -> dict[str, Adapters]:
        """{name: adapters}, active or not."""
        children = self._modules.items()
        return {
            DEFAULT if child == "lora" else child.removeprefix("lora_"): adapters  # type: ignore[misc]
            for child, adapters in children
            if adapters is not None and (child == "lora" or child.startswith("lora_"))
        }

    @property
    def active_loras(self) -> list[Adapters]:
        """The active adapters."""
        if not self._modules:  # most experts, and every call asks
            return []
        return [adapters for adapters in self.loras.values() if adapters.is_active]

    @property
    def adapters(self) -> LoRA | None:
        """What is active, as functions take it."""
        active = self.active_loras
        return joined([adapters() for adapters in active]) if active else None

    def check_takes_lora(self, fn: str) -> None:
        """Checks that adapters can be made beside the parameters."""
        for name, parameter in self.named_parameters():
            check_plain(fn, name, parameter)

    def take_lora(self, name: str, adapters: Adapters) -> None:
        """Makes adapters a child of a name."""
        setattr(self, child_of(name), adapters)

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        if "lora" not in self.__dict__ and "lora" not in self._modules:  # pickled by an older version
            self.lora = None


def _check_type(fn: str, lora) -> None:
    if not isinstance(lora, LoRA):
        fail(TypeError, fn, "lora to be a fused_moe.LoRA", type(lora).__name__)


def _check_pair(fn: str, i: int, a, b) -> None:
    """Checks for two matrices per expert, or None for both."""
    if (a is None) != (b is None):
        fail(ValueError, fn, f"lora.a{i} and lora.b{i} together", "one of them")
    if a is not None:
        check_tensor(fn, f"lora.a{i}", a, 3, FLOATING)
        check_tensor(fn, f"lora.b{i}", b, 3, FLOATING)


def check_lora(fn: str, lora, x_name: str, x: Tensor, weights: tuple) -> None:
    """Checks adapters against w1, w2 and w3 (E, out, in)."""
    _check_type(fn, lora)
    check_real(fn, "lora.scale", lora.scale)
    for i, ((a, b), w) in enumerate(zip(pairs_of(lora), weights, strict=True), 1):
        _check_pair(fn, i, a, b)
        if a is None or b is None:
            continue
        if w is None:
            fail(ValueError, fn, f"lora.a{i} only beside w{i}", f"lora.a{i} without w{i}")
        E, rows, cols = w.shape
        for name, value in ((f"lora.a{i}", a), (f"lora.b{i}", b)):
            if value.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
                check_device(fn, name, value, x_name, x)
            else:
                check_like(fn, name, value, x_name, x)
            check_storage(fn, name, value)
        rank = a.size(1)
        if tuple(a.shape) != (E, rank, cols) or rank < 1:
            fail(ValueError, fn, f"lora.a{i} of shape (E, rank, in) = ({E}, rank, {cols})", tuple(a.shape))
        if tuple(b.shape) != (E, rows, rank):
            fail(ValueError, fn, f"lora.b{i} of shape (E, out, rank) = {(E, rows, rank)}", tuple(b.shape))
