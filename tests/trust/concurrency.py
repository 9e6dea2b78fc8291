"""Calls of one process at once: from host threads on one stream or on hundreds, and beside replays of graphs.

Launches of different calls interleave then: workspaces, counters, tags and programmatic dependent launches of
one call meet those of another. Every result has to have the bits of the same call alone.
"""

import ctypes
import random
import threading
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

import fused_moe

# (E, K, D, F), the options of FusedMoE, and the format of the experts.
LAYERS = (
    ((64, 8, 512, 256), {}, None),
    ((8, 2, 1024, 512), {}, None),
    ((128, 8, 512, 128), {}, "int4"),
    ((16, 4, 512, 512), {}, "fp8_block"),
    ((32, 4, 512, 256), {"num_shared_experts": 1, "shared_expert_gate": True}, None),
)
TOKENS = (
    1,
    2,
    7,
    8,
    33,
    64,
    200,
    600,
    3000,
)  # one launch or several, with a plan by GEMM, cluster or kernels
QUEUED = 20  # calls that a thread queues before it waits


class Calls:
    """Layers, inputs and the results of each call alone: out, and where it trains the gradient of x."""

    def __init__(self, device: torch.device, layers=LAYERS, tokens=TOKENS, train=(False, True)):
        self.device = device
        self.runs = []
        for (num_experts, top_k, dim, hidden_dim), options, format in layers:
            sizes = (dim, hidden_dim, num_experts, top_k)
            layer = fused_moe.FusedMoE(*sizes, **options, device=device, dtype=torch.bfloat16).eval()
            if format is not None:
                fused_moe.quantize(layer, format)
            for num_tokens in tokens:
                x = torch.randn(num_tokens, dim, device=device).to(torch.bfloat16)
                self.runs += [(layer, x, trains) for trains in train]
        self.expected = [self.run(i) for i in range(len(self.runs))]
        if device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, index: int) -> list[Tensor]:
        layer, x, trains = self.runs[index]
        if not trains:
            with torch.no_grad():
                return [layer(x)]
        leaf = x.detach().requires_grad_()
        out = layer(leaf)
        return [out.detach(), *torch.autograd.grad(out, leaf, x)]

    def is_right(self, index: int, found: list[Tensor]) -> bool:
        return all(map(torch.equal, found, self.expected[index]))

    def name(self, index: int) -> str:
        layer, x, trains = self.runs[index]
        return f"{layer.experts.w1} T={x.size(0)}{' with gradients' if trains else ''}"


def at_once(calls: Calls, streams: list[list], num: int, beside=None) -> list[str]:
    """Makes `num` random calls in each of len(streams) threads, each on a random one of the thread's streams
    (None on a CPU), while this thread runs beside(), if it is given. Returns what went wrong."""
    findings = []
    start = threading.Barrier(len(streams))

    def make_calls(thread: int) -> None:
        draw = random.Random(thread)
        start.wait()
        for _ in range(num // QUEUED):
            queued = []
            for _ in range(QUEUED):
                index, stream = draw.randrange(len(calls.runs)), draw.choice(streams[thread])
                with torch.cuda.stream(stream) if stream else nullcontext():
                    queued.append((index, stream, calls.run(index)))
            for stream in {stream for _, stream, _ in queued if stream}:
                stream.synchronize()
            findings.extend(
                f"{calls.name(i)}: other bits" for i, _, found in queued if not calls.is_right(i, found)
            )

    def make_calls_and_tell(thread: int) -> None:
        try:
            make_calls(thread)
        except Exception as error:  # which a thread would only print
            findings.append(f"{type(error).__name__}: " + str(error).partition("\n")[0])

    threads = [threading.Thread(target=make_calls_and_tell, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    while beside is not None and any(thread.is_alive() for thread in threads):
        findings += beside()
    for thread in threads:
        thread.join()
    return findings


@contextmanager
def many_streams(num: int):
    """CUDA streams beside those of PyTorch, whose pools hand out 32 again and again."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.current_stream().synchronize()  # the driver's calls take the current context
    handles = [ctypes.c_void_p() for _ in range(num)]
    try:
        for handle in handles:
            status = driver.cuStreamCreate(ctypes.byref(handle), 1)  # CU_STREAM_NON_BLOCKING
            if status:
                raise RuntimeError(f"cuStreamCreate failed with {status}")
        yield [torch.cuda.ExternalStream(handle.value) for handle in handles]
    finally:
        torch.cuda.synchronize()
        for handle in handles:
            if handle.value:
                driver.cuStreamDestroy_v2(handle)


class Replays:
    """Graphs of some of the calls without gradients, each on its own stream."""

    def __init__(self, calls: Calls, indices):
        self.calls, self.graphs = calls, []
        for index in indices:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.graph(graph, stream=stream):
                found = calls.run(index)
            self.graphs.append((index, graph, stream, found))

    def __call__(self) -> list[str]:
        """Replays each twice, all at once. Returns what went wrong."""
        for _, graph, stream, _ in self.graphs:
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        for _, _, stream, _ in self.graphs:
            stream.synchronize()
        wrong = [i for i, _, _, found in self.graphs if not self.calls.is_right(i, found)]
        return [f"a replay of {self.calls.name(i)}: other bits" for i in wrong]
