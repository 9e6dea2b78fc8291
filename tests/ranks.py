"""Four gloo processes for tests of several ranks, started once for a module and forked from one that has
imported everything.

    workers = pytest.fixture(scope="module")(ranks.started)
    workers(fn, *args)              [fn(rank, *args) of each rank]
"""

import io
import multiprocessing
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

RANKS = 4
SECONDS = 60  # which no collective and no test may take


def serve(rank, store, pipe):
    """A worker process: runs the functions that it is sent until the pipe closes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory holds NaN
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": RANKS}
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS), **where)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            break
        try:
            reply = to_bytes(fn(rank, *args))
        except Exception:
            reply = traceback.format_exc()
        pipe.send(reply)
    dist.destroy_process_group()


def to_bytes(value):
    """Bytes for a pipe, which would put tensors into shared memory."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Workers:
    def __init__(self, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "fused_moe.distributed"])
        ends = [context.Pipe() for _ in range(RANKS)]
        self.pipes = [ours for ours, _ in ends]
        self.processes = [
            context.Process(target=serve, args=(rank, folder / "store", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process, (_, theirs) in zip(self.processes, ends, strict=True):
            process.start()
            theirs.close()

    def __call__(self, fn, *args):
        for pipe in self.pipes:
            pipe.send((fn, args))
        replies = [pipe.recv() if pipe.poll(2 * SECONDS) else "hangs" for pipe in self.pipes]
        if "hangs" in replies:
            self.close()
        errors = [f"rank {rank}: {r}" for rank, r in enumerate(replies) if isinstance(r, str)]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [torch.load(io.BytesIO(reply), weights_only=False) for reply in replies]

    def close(self, seconds=0):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=seconds)
            process.kill()


def started(cpu, tmp_path_factory):
    """A fixture: the workers, which end with the module."""
    workers = Workers(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close(SECONDS)
