"""Processes for tests of several ranks, started once for a module. They fork one that has imported PyTorch.

@pytest.fixture(scope="module")
def workers(device, tmp_path_factory):
    yield from started(2, device, tmp_path_factory)

workers(fn, *args)              [fn(rank, device, *args) of each rank], tensors on the CPU

With `share_gpu` all ranks have the same GPU, which NCCL refuses: their collectives are gloo's.
"""

import io
import multiprocessing
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

SECONDS = 300  # which no collective may take, and no test twice, also on busy cores
PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "fused_moe",
]


def serve(rank, ranks, device_type, store, share_gpu, pipe):
    """A worker process: runs the functions that it is sent until the pipe closes."""
    own_gpu = 0 if share_gpu else rank
    device = torch.device(device_type, own_gpu if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory holds NaN
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    backend = "nccl" if device_type == "cuda" and not share_gpu else "gloo"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1" if share_gpu else "0"
    dist.init_process_group(backend, timeout=timedelta(seconds=SECONDS), **where)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            break
        try:
            reply = to_bytes(fn(rank, device, *from_bytes(args)))
        except Exception:
            reply = traceback.format_exc()
        pipe.send(reply)
    dist.destroy_process_group()


def to_bytes(value):
    """Bytes for a pipe, which would put tensors into shared memory; that may be read-only."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


class Workers:
    def __init__(self, ranks, device_type, folder, share_gpu=False):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ends = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in ends]
        where = (ranks, device_type, folder / "store", share_gpu)
        self.processes = [
            context.Process(target=serve, args=(rank, *where, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()

    def __call__(self, fn, *args):
        for pipe in self.pipes:
            pipe.send((fn, to_bytes(args)))
        replies = [pipe.recv() if pipe.poll(2 * SECONDS) else "hangs" for pipe in self.pipes]
        if "hangs" in replies:
            self.close()
        errors = [f"rank {rank}: {r}" for rank, r in enumerate(replies) if isinstance(r, str)]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [from_bytes(reply) for reply in replies]

    def close(self, seconds=0):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=seconds)
            process.kill()


def started(ranks, device, tmp_path_factory, share_gpu=False):
    """For a fixture: the workers, which end with the module."""
    if device.type == "cuda" and not share_gpu and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    workers = Workers(ranks, device.type, tmp_path_factory.mktemp("workers"), share_gpu)
    yield workers
    workers.close(SECONDS)
