"""Quantised weights under FSDP2, PyTorch's `fully_shard`, which makes each parameter a DTensor.

When FSDP2 gathers parameters, it casts those of a floating dtype to its MixedPrecisionPolicy's: scales, and
codes of e4m3. It casts no integers. So a QuantizedWeight keeps a sharded parameter of a floating dtype as
integers of the same bits. What is gathered, and what a state_dict has, are of the parameter's own dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn

from ..checks import fail

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# FSDP2 takes integers from this version on. Before, it casts them and wants them to require gradients.
TAKES_INTEGERS = torch.__version__ >= (2, 13)  # type: ignore[operator]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor  # takes long to import

    return isinstance(tensor, DTensor)


def sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """A tensor, the same on all ranks, as shards like those of `own`; unchanged where own is not sharded."""
    if not is_sharded(own) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def check_class(cls: type) -> None:
    """Checks a class that a weight's is replaced by. FSDP2 makes that of each module that it is applied to an
    FSDPModule, whose parameters are gathered for the time of its own call."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        if issubclass(cls, FSDPModule):
            expected = "fully_shard of the experts or the layer, as fully_shard(layer.experts)"
            fail(ValueError, "QuantizedWeight", expected, "fully_shard of one weight")


@torch.no_grad()
def viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of a DTensor as another dtype of the same size, in the same memory."""
    return like(tensor, local_of(tensor, dtype), tensor.shape)


@torch.no_grad()
def local_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of this rank's shard."""
    return cast("DTensor", tensor).to_local().view(dtype)


@torch.no_grad()
def like(tensor: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A DTensor of this shape, of local tensors that are sharded as `tensor` is."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    own = cast("DTensor", tensor)
    mesh, placements = own.device_mesh, own.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
