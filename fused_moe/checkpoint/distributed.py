"""torch.distributed.checkpoint that checks a whole checkpoint before it writes over a parameter."""

from __future__ import annotations

import math

from torch.distributed.checkpoint import FileSystemReader, LoadPlan

__all__ = ["CheckedReader"]


class CheckedReader(FileSystemReader):
    """PyTorch's reader of a folder, which raises before any tensor is written over.

        dcp.load(state, storage_reader=CheckedReader(folder))

    By itself torch.distributed.checkpoint finds missing keys and other shapes in time. But it finds a file
    that is missing or cut off when it has filled tensors of others, and keys too many not at all. This
    reader raises on all ranks for such files, and for keys that are left over beside those that are read:
    under "model" of {"model": ..., "optimizer": ...} if anything of "model" is read.
    """

    def set_up_storage_reader(self, metadata, *args, **kwargs) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self.saved = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        ends, names = {}, {}  # of what is read from each file
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            end = info.offset + info.length
            if end > ends.get(info.relative_path, -1):
                ends[info.relative_path], names[info.relative_path] = end, item.storage_index.fqn
        for path, end in ends.items():
            file = self.fs.concat_path(self.path, path)
            if not self.fs.exists(file):
                raise ValueError(f"CheckedReader: expected the file {file} with {names[path]}, found none")
            with self.fs.create_stream(file, "rb") as stream:
                size = stream.seek(0, 2)
            if size < end:
                expected = f"{end} bytes or more in {file}, which has {names[path]}"
                raise ValueError(f"CheckedReader: expected {expected}, found {size}")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        read = {item.dest_index.fqn for plan in plans for item in plan.items}
        parts = {name.partition(".")[0] for name in read}
        left = [name for name in self.saved if name.partition(".")[0] in parts and name not in read]
        left = [name for name in left if math.prod(getattr(self.saved[name], "size", ()))]  # no bytes to read
        if left:
            raise ValueError(f"CheckedReader: expected no other keys in {self.path}, found {', '.join(left)}")
        return super().prepare_global_plan(plans)
