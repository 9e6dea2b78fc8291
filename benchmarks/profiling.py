"""GPU time by kernel, and power.

`launches` profiles a few steps queued behind a long kernel, and `by_kind` sorts their kernels by the part
that they play in a layer. Those parts have the same names for ours and for peers, as far as kernels' names
tell, so they stand beside each other and beside the same floor. `power` runs steps for a while and samples
the board; `joules` reads its energy counter.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

import torch
from floors import Floor

LEAD = 40_000_000  # cycles for the host to queue some steps
STEPS = 2
# Kind of kernel -> parts of its names; the first match counts. Peers: QuACK's, Triton's, PyTorch's.
KINDS = {
    "schedule": ("plan_kernel", "schedule_kernel", "count_kernel", "scan_kernel", "scatter_kernel")
    + ("finish_kernel", "_bitmatrix_metadata", "_col_partial_sum"),
    "unpermute": ("unpermute", "token_gather_sum"),
    "permute": ("permute_kernel", "gather_rows", "copy_rows"),
    "pad": ("pad_kernel",),
    "dscores": ("dscores",),
    "route_backward": ("route_backward", "softmax_bwd"),
    "route": ("route_kernel", "Over_TopK"),
    "up_gate": ("up_gate", "GemmGated"),
    "down_dgrad": ("down_dgrad", "GemmDGated"),
    "wgrad": ("wgrad",),
    "grouped_mm": ("grouped_mm",),
    "quack": ("GemmDefault",),
    "grouped GEMMs": ("GroupProblemShape", "grouped_gemm", "scatter2scatter", "groupXtY"),
    "router GEMMs": ("router_logits", "router_dgrad", "nvjet", "gemm", "xmma", "splitK"),
    "memset": ("memset", "Memset"),
    "add": ("CUDAFunctor_add", "AddFunctor"),
}
REST = "rest"
# Kinds of several kernels per step, in their order.
IN_ORDER = {
    "unpermute": ("unpermute", "unpermute_dx"),
    "wgrad": ("wgrad_down", "wgrad_up"),
    "grouped_mm": ("down", "up_dgrad"),
    "quack": ("down", "wgrad_down", "up_dgrad", "wgrad_up"),
}
# The order of tables and pictures.
ORDER = (
    *("up_gate", "down", "down_dgrad", "wgrad_down", "up_dgrad", "wgrad_up"),
    *("grouped_mm", "wgrad", "quack", "grouped GEMMs"),
    *("unpermute", "unpermute_dx", "permute", "router GEMMs", "add", "route", "route_backward", "schedule"),
    *("dscores", "memset", REST),
)


class Launch(NamedTuple):
    name: str
    us: float


# --- kernels ------------------------------------------------------------------------------------------


def kernels(step: Callable[[], None], steps: int = STEPS) -> list[tuple[str, float, float]]:
    """(name, start, end) of what the GPU runs in some steps, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch.cuda._sleep(LEAD)
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(e.name, e.time_range.start, e.time_range.end) for e in events]


def launches(step: Callable[[], None], steps: int = STEPS) -> list[Launch]:
    """What the GPU runs in some steps, in order. A kernel that starts before another one ends, as a dependent
    launch does, counts from that end on, so the sum is the time during which any kernel runs."""
    return without_overlap(kernels(step, steps))


def without_overlap(kernels: Iterable[tuple[str, float, float]]) -> list[Launch]:
    """Kernels (name, start, end) in the order of their starts. Time that two share is the earlier one's."""
    found, busy_until = [], float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if "spin_kernel" not in name:
            found.append(Launch(name, max(0.0, end - max(start, busy_until))))
        busy_until = max(busy_until, end)
    return found


def short_gaps(kernels: Iterable[tuple[str, float, float]], longest: float) -> float:
    """The time between kernels (name, start, end) in which none runs, for gaps of `longest` at most: those of
    launches, as in a graph, not those in which the GPU waits for the host."""
    gaps, busy_until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if 0 < start - busy_until <= longest:
            gaps += start - busy_until
        busy_until = max(busy_until, end)
    return gaps


def kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), REST)


def by_kind(found: list[Launch], steps: int = STEPS) -> dict[str, list[Launch]]:
    """The launches of each kind. Those of IN_ORDER are shared out evenly, in their order: a wide wgrad is two
    launches. They keep one kind if they cannot be."""
    kinds = defaultdict(list)
    for launch in found:
        kinds[kind_of(launch.name)].append(launch)
    for kind, names in IN_ORDER.items():
        each, rest = divmod(len(kinds.get(kind, ())), steps * len(names))
        if each and not rest:
            own = kinds.pop(kind)
            for i, launch in enumerate(own):
                kinds[names[i // each % len(names)]].append(launch)
    return dict(kinds)


def us_by_kind(found: list[Launch], steps: int = STEPS) -> dict[str, float]:
    """Microseconds per step."""
    return {kind: sum(launch.us for launch in own) / steps for kind, own in by_kind(found, steps).items()}


def measured(found: list[Launch], floors: dict[str, Floor], power: dict, steps: int = STEPS) -> list[dict]:
    """What the records of one layer hold: each kind's, then the step's, without gaps between kernels."""
    records = []
    kinds = by_kind(found, steps)
    for kind in sorted(kinds, key=ORDER.index):
        us, floor = sum(launch.us for launch in kinds[kind]) / steps, floors.get(kind)
        longest = max(kinds[kind], key=lambda launch: launch.us).name
        entry = {"what": kind, "time_us": round(us, 1), "launches": len(kinds[kind]) / steps}
        if floor:
            gap = {"floor_us": round(floor.us, 1), "gap_us": round(us - floor.us, 1), "bound": floor.bound}
            entry |= gap
        records.append(entry | {"kernel": longest[:120]})
    total = {"what": "step", "time_us": round(sum(launch.us for launch in found) / steps, 1)}
    return [*records, total | {"launches": len(found) / steps} | power]


# --- power --------------------------------------------------------------------------------------------


def board() -> tuple[float, float] | None:
    """Watts and the SMs' MHz now. None without NVML, or where the machine hides it."""
    try:
        return torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()
    except Exception:  # of the optional pynvml: not installed, or one of its many errors
        return None


def power(step: Callable[[], None], seconds: float = 3, period: float = 0.02) -> dict[str, float | None]:
    """Queues steps for some seconds, a few ahead of the GPU. Samples of the last third count: the board
    averages its power over a second. `joules` is of one step."""
    samples, over = [], threading.Event()

    def sample() -> None:
        while not over.wait(period):
            samples.append((time.perf_counter(), board()))

    sampler = threading.Thread(target=sample)
    sampler.start()
    start, steps, ends = time.perf_counter(), 0, []
    try:
        while time.perf_counter() < start + seconds:
            for _ in range(STEPS):
                step()
            steps += STEPS
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) > 2:
                ends.pop(0).synchronize()
        torch.cuda.synchronize()
        each = (time.perf_counter() - start) / steps
    finally:
        over.set()
        sampler.join()
    late = [found for moment, found in samples if found and moment > start + 2 * seconds / 3]
    if not late:
        return {"watts": None, "sm_mhz": None, "joules": None}
    watts, mhz = (fmean(values) for values in zip(*late, strict=True))
    return {"watts": round(watts, 1), "sm_mhz": round(mhz), "joules": round(watts * each, 4)}


# --- energy -------------------------------------------------------------------------------------------

IN_FLIGHT = 4  # steps, so that the GPU is never idle


def energy_counter() -> Callable[[], float] | None:
    """Joules of the current GPU since its driver was loaded. None without NVML, or if it hides the GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        name = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    except (OSError, AttributeError):
        return None
    device, mj = ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)):
        return None
    read = nvml.nvmlDeviceGetTotalEnergyConsumption
    if read(device, ctypes.byref(mj)):
        return None

    def joules() -> float:
        read(device, ctypes.byref(mj))
        return mj.value / 1e3

    return joules


def joules(step: Callable[[], object], seconds: float = 0.5, settling: float = 0.1) -> float | None:
    """Joules of one step, of many that are queued a few ahead of the GPU. The counter moves some times a
    second, so watts are those between two of its moves, at least `seconds` apart."""
    counter = energy_counter()
    if counter is None:
        return None
    torch.cuda.synchronize()
    moves: list[tuple[float, float]] = []
    ends: deque[torch.cuda.Event] = deque()
    start, steps, last = time.perf_counter(), 0, counter()
    while not moves or moves[-1][0] - moves[0][0] < seconds:
        if time.perf_counter() - start > 4 * (seconds + settling):
            return None  # it stands still
        step()
        steps += 1
        ends.append(torch.cuda.Event())
        ends[-1].record()
        while len(ends) >= IN_FLIGHT:
            now, read = time.perf_counter(), counter()
            if read != last and now - start > settling:
                moves.append((now, read))
            last = read
            if ends[0].query():
                ends.popleft()
    torch.cuda.synchronize()
    each = (time.perf_counter() - start) / steps
    return (moves[-1][1] - moves[0][1]) / (moves[-1][0] - moves[0][0]) * each
