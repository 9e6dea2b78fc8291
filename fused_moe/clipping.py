"""clip_grad_norm_: PyTorch's, for models whose gradients lie on several meshes.

`torch.nn.utils.clip_grad_norm_` computes with DTensors, which cannot be of different meshes, nor be beside
plain tensors. Here each rank takes the norm of its own shards, and the ranks between which gradients are
sharded exchange these norms, one number per mesh. Numbers are gathered and added by every rank in the same
order, so all ranks get the same bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from types import GeneratorType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import check_bool, check_real, fail
from .quantized.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FN = "clip_grad_norm_"


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place, so that the norm of all of them is at most `max_norm`.

    It does what `torch.nn.utils.clip_grad_norm_` does, also where gradients are plain tensors and DTensors of
    several meshes: `ExpertParallel` beside `fully_shard`, HSDP, tensor parallelism. The norm is that of all
    elements, each counted once however many ranks hold it. A plain tensor is taken to be the same on all
    ranks; stages of a pipeline know nothing of each other. A DTensor's gradient that is a partial sum is
    reduced first, and stays so. A parameter's `main_grad` is clipped if there is no .grad, or Megatron's
    `grad_added_to_main_grad`. Without DTensors and main_grads this calls PyTorch's function.

    Args:
        parameters: one tensor or several, in the same order on all ranks. All ranks call the function, those
            without gradients too.
        max_norm: as PyTorch's.
        norm_type: as PyTorch's. With DTensors it is > 0; inf is allowed.
        error_if_nonfinite: as PyTorch's. The host waits for the device with it alone.
        foreach: as PyTorch's.

    Returns:
        The norm before clipping, a plain tensor, the same on all ranks. With DTensors or main_grads it is
        float32, or float64 if a parameter is; norms of 16-bit gradients are not rounded to 16 bits.

    Raises:
        TypeError: for parameters that are no tensors, and settings that are no numbers.
        ValueError: for norm_type <= 0 with DTensors or main_grads; on every rank, if their parameters differ
            (on GPUs a device-side assertion).
        RuntimeError: on every rank, for a norm that is not finite, with error_if_nonfinite. After the process
            group's timeout, if a rank's parameters have no mesh in common with those of the ranks that wait
            for it.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2))
        >>> p.grad = torch.tensor([3.0, 4.0])
        >>> fused_moe.clip_grad_norm_([p], max_norm=1.0)
        tensor(5.)
        >>> p.grad.norm() <= 1.0
        tensor(True)
    """
    held = _checked(parameters)
    check_real(FN, "max_norm", max_norm, finite=False)
    norm_type = math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type  # as PyTorch
    check_real(FN, "norm_type", norm_type, finite=False)
    check_bool(FN, "error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_bool(FN, "foreach", foreach)
    names = [_name_of_gradient(p) for p in held]
    if all(
        n == "grad" and not is_sharded(p) and not is_sharded(p.grad) for p, n in zip(held, names, strict=True)
    ):
        given = parameters if isinstance(parameters, GeneratorType) and not held else held  # to warn of that
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    if not norm_type > 0:
        fail(ValueError, FN, "norm_type > 0", norm_type)
    grads = [_reduced(p, name) for p, name in zip(held, names, strict=True)]
    shards = [None if g is None else _local(g) for g in grads]
    total = _total_norm(held, grads, shards, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"{FN}: expected a finite norm with error_if_nonfinite=True, found {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (device, _), alike in _alike(shards).items():
        if foreach is False:
            for shard in alike:
                shard.mul_(scale.to(device))
        else:
            torch._foreach_mul_(alike, scale.to(device))
    return total


def _checked(parameters) -> list[Tensor]:
    held = [parameters]
    if not isinstance(parameters, Tensor):
        if not isinstance(parameters, Iterable):
            fail(TypeError, FN, "parameters to be a tensor or tensors", type(parameters).__name__)
        held = list(parameters)
    for p in held:
        if not isinstance(p, Tensor):
            fail(TypeError, FN, "parameters to be tensors", type(p).__name__)
    return held


def _name_of_gradient(p: Tensor) -> str:
    """The attribute that an optimizer reads."""
    has_main_grad = getattr(p, "main_grad", None) is not None
    is_main = has_main_grad and (p.grad is None or hasattr(p, "grad_added_to_main_grad"))
    return "main_grad" if is_main else "grad"


def _reduced(p: Tensor, name: str) -> Tensor | None:
    """The gradient of this name, which is then no partial sum."""
    grad = getattr(p, name)
    if grad is not None and is_sharded(grad) and any(x.is_partial() for x in grad.placements):
        grad = grad.redistribute(placements=_without_partial(p, grad))
        setattr(p, name, grad)
    return grad


def _without_partial(p: Tensor, grad: DTensor) -> list:
    """The placements of the gradient, reduced to those of its parameter where it is a partial sum."""
    from torch.distributed.tensor import Replicate

    of_parameter = p.placements if is_sharded(p) else [Replicate()] * len(grad.placements)
    pairs = zip(grad.placements, of_parameter, strict=True)
    return [own if x.is_partial() else x for x, own in pairs]


def _local(grad: Tensor) -> Tensor:
    """The gradient's elements on this rank, in its own memory."""
    if not is_sharded(grad):
        return grad
    local = grad.to_local()
    return local.wait() if hasattr(local, "wait") else local  # an AsyncCollectiveTensor


def _alike(tensors: list[Tensor | None]) -> dict[tuple, list[Tensor]]:
    """The tensors that have elements, by device and dtype."""
    found: dict[tuple, list[Tensor]] = {}
    for t in tensors:
        if t is not None and t.numel():
            found.setdefault((t.device, t.dtype), []).append(t)
    return found


def _total_norm(held: list, grads: list, shards: list, norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of the whole model on this rank's device."""
    # {the mesh's dimensions over which gradients are shards: this rank's shards}. They depend on parameters
    # alone, not on which have gradients here, so all ranks enter the same collectives.
    kinds: dict[tuple, list[Tensor | None]] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    ranks: dict[tuple, list] = {(): []}  # of a kind, in the shape of the mesh's dimensions
    device = next((s.device for s in shards if s is not None), held[0].device)
    wire = device
    for p, grad, shard in zip(held, grads, shards, strict=True):
        owner = p if grad is None or not is_sharded(grad) else grad
        names: tuple[str, ...] = ()
        if is_sharded(owner) and (own := owner.device_mesh.get_coordinate()) is not None:
            mesh = owner.device_mesh
            dims = [i for i, x in enumerate(owner.placements) if not x.is_replicate()]
            found = [mesh.get_group(i) for i in dims]
            groups |= {group.group_name: group for group in found}
            names = tuple(group.group_name for group in found)
            if names not in ranks:
                index = (slice(None) if i in dims else n for i, n in enumerate(own))
                ranks[names] = mesh.mesh[tuple(index)].tolist()
            wire = torch.device(mesh.device_type)
        kinds.setdefault(names, []).append(shard)
    # The largest first: ranks with other parameters meet in its collective, and find out by the check. Equal
    # sizes are ordered by their ranks, since ranks may have their parameters in another order. Names break
    # ties of single groups alone: the names of several groups differ between ranks, which would then wait for
    # one another in different collectives.

    def place(names: tuple[str, ...]) -> tuple:
        size = math.prod(groups[name].size() for name in names)
        return -size, len(names), str(ranks[names]), names if len(names) == 1 else ()

    order = sorted(kinds, key=place)
    check = zlib.crc32(repr([_described(p) for p in held]).encode())
    norms = []
    for names in order:
        norm = _norm_of(kinds[names], norm_type, foreach, wire)
        norms.append(_norm_over([groups[name] for name in names], norm, (check, len(held)), norm_type))
    is_double = any(p.dtype == torch.float64 for p in held)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total.to(device, torch.float64 if is_double else torch.float32)


def _described(p: Tensor) -> tuple:
    """What is the same on all ranks."""
    return tuple(p.shape), str(p.dtype), str(p.placements) if is_sharded(p) else ""


def _norm_of(shards: list, norm_type: float, foreach: bool | None, device: torch.device) -> Tensor:
    """The norm of this rank's shards, in float64, in which numbers are exchanged."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for (_, dtype), alike in _alike(shards).items():
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        if foreach is False:
            found = [torch.linalg.vector_norm(shard, norm_type, dtype=wide) for shard in alike]
        else:
            found = [*torch._foreach_norm(alike, norm_type, wide)]
        norms.append(torch.linalg.vector_norm(torch.stack(found).to(device, torch.float64), norm_type))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _norm_over(
    groups: list[dist.ProcessGroup], norm: Tensor, parameters: tuple[int, int], norm_type: float
) -> Tensor:
    """The norm over all ranks of the groups. `parameters` is a checksum of this rank's, and their number.
    Ranks exchange both, and raise if the checksums differ."""
    check, count = parameters
    expected = f"the same {count} parameters in the same order on all ranks"
    own = torch.stack([norm, *(torch.full_like(norm, value) for value in parameters)])
    differs = None
    for group in groups:
        found = own.new_empty(group.size(), 3)
        try:
            dist.all_gather(list(found), own, group=group)
        except RuntimeError as error:  # on a CPU
            raise RuntimeError(f"{FN}: expected {expected}, found {error}") from error
        if not found.is_cuda and differs is None:
            for rank, (_, other, number) in zip(
                dist.get_process_group_ranks(group), found.tolist(), strict=True
            ):
                if other != check:
                    differs = f"{int(number)} of rank {rank}" if other >= 0 else f"others, says rank {rank}"
        # A rank that found a difference still joins the next groups, which would wait for it, and tells
        # them by -1.
        same = (found[:, 1] == own[1]).all()
        total = torch.linalg.vector_norm(found[:, 0], norm_type)
        own = torch.stack((total, own[1].where(same, -1.0), own[2]))
    if differs is not None:
        fail(ValueError, FN, expected, differs)
    torch._assert_async(own[1] == check, f"{FN}: expected {expected}")
    return own[0]
