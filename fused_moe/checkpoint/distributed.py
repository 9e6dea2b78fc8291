"""torch.distributed.checkpoint that checks a whole checkpoint before it writes over a parameter."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

__all__ = ["CheckedReader"]

CAST = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # into each other


class CheckedReader(FileSystemReader):
    """PyTorch's reader of a folder, which raises before any tensor is written over.

        dcp.load(state, storage_reader=CheckedReader(folder))

    By itself torch.distributed.checkpoint finds missing keys and other shapes in time. But it finds a file
    that is missing or cut off when it has filled tensors of others, and keys too many or codes of another
    dtype not at all. This reader raises on all ranks for such files, for dtypes that differ, unless both are
    of 16 bits or more and floating, and for keys that are left over beside those that are read: in "model"
    of {"model": ..., "optimizer": ...} if anything of "model" is read, and beside tensors at the top.
    """

    def set_up_storage_reader(self, metadata, *args, **kwargs) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self.saved, self.paths = metadata.state_dict_metadata, metadata.planner_data or {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        ends, names = {}, {}  # of what is read from each file
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            end = info.offset + info.length
            if end > ends.get(info.relative_path, -1):
                ends[info.relative_path], names[info.relative_path] = end, item.storage_index.fqn
        for path, end in ends.items():
            file = Path(self.path) / path
            if not file.exists():
                raise ValueError(f"CheckedReader: expected the file {file} with {names[path]}, found none")
            if (size := file.stat().st_size) < end:
                expected = f"{end} bytes or more in {file}, which has {names[path]}"
                raise ValueError(f"CheckedReader: expected {expected}, found {size}")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
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
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                name = item.storage_index.fqn
                found, own = self.saved[name].properties.dtype, planner.resolve_tensor(item).dtype
                if found != own and not {found, own} <= CAST:
                    expected = f"{name} of dtype {own} in {self.path}"
                    raise ValueError(f"CheckedReader: expected {expected}, found {found}")
        return super().read_data(plan, planner)
