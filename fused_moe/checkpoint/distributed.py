"""torch.distributed.checkpoint that checks a whole checkpoint before it writes over a parameter."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from ..checks import fail

__all__ = ["CheckedReader"]

CAST = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # into each other


def check_files(fn: str, folder: str | os.PathLike, parts: Iterable[tuple[str, Any]]) -> None:
    """Raises for a file that is missing or too short. `parts` has the name of each tensor that is to be read
    and where it is in a file, as storage_data says."""
    ends: dict[str, int] = {}
    names: dict[str, str] = {}  # of what is read from each file
    for name, info in parts:
        end = info.offset + info.length
        if end > ends.get(info.relative_path, -1):
            ends[info.relative_path], names[info.relative_path] = end, name
    for path, end in ends.items():
        file = Path(folder) / path
        if not file.exists():
            fail(ValueError, fn, f"the file {file} with {names[path]}", "none")
        if (size := file.stat().st_size) < end:
            fail(ValueError, fn, f"{end} bytes or more in {file}, which has {names[path]}", size)


class CheckedReader(FileSystemReader):
    """Reads a folder of torch.distributed.checkpoint, and raises before any tensor is written over.

    By itself torch.distributed.checkpoint finds missing keys and other shapes in time. But it finds a file
    that is missing or cut off when it has filled tensors of others, and keys too many or codes of another
    dtype not at all. This reader raises on all ranks for such files, for dtypes that differ, unless both are
    of 16 bits or more and floating, and for keys that are left over beside those that are read: in "model"
    of {"model": ..., "optimizer": ...} if anything of "model" is read, and beside tensors at the top.

    Args:
        path: the folder.

    Raises:
        ValueError: in `dcp.load`, as above. PyTorch wraps it in a CheckpointException.

    Example:
        >>> import tempfile
        >>> import torch.distributed.checkpoint as dcp
        >>> from fused_moe.checkpoint.distributed import CheckedReader
        >>> state = {"a": torch.ones(2)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save(state, checkpoint_id=folder, no_dist=True)
        ...     dcp.load(state, storage_reader=CheckedReader(folder), no_dist=True)
    """

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Takes the metadata of the folder."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self.saved, self.paths = metadata.state_dict_metadata, metadata.planner_data or {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks that the files of this rank's tensors are whole."""
        indices = [item.storage_index for item in plan.items]
        parts = [(index.fqn, self.storage_data[index]) for index in indices]
        check_files("CheckedReader", self.path, parts)
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that no key is left over."""
        read = {item.dest_index.fqn for plan in plans for item in plan.items}
        parts = {self._part(name) for name in read}
        left = [name for name in self.saved if self._part(name) in parts and name not in read]
        left = [name for name in left if math.prod(getattr(self.saved[name], "size", ()))]  # no bytes to read
        if left:
            raise ValueError(f"CheckedReader: expected no other keys in {self.path}, found {', '.join(left)}")
        return super().prepare_global_plan(plans)

    def _part(self, name: str) -> str | None:
        """The key of the saved dict that has the tensor; None for the outermost dict."""
        path = self.paths.get(name, (name,))
        return path[0] if len(path) > 1 else None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the tensors, whose dtypes are checked first."""
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                name = item.storage_index.fqn
                saved = cast(TensorStorageMetadata, self.saved[name])
                found, own = saved.properties.dtype, planner.resolve_tensor(item).dtype
                if found != own and not {found, own} <= CAST:
                    expected = f"{name} of dtype {own} in {self.path}"
                    raise ValueError(f"CheckedReader: expected {expected}, found {found}")
        return super().read_data(plan, planner)
