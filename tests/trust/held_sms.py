"""Fewer SMs than a launch plans for: held by a resident kernel, or left out of a stream's green context."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

SECONDS = 20.0  # the kernel ends by itself then


class NotAvailable(RuntimeError):
    """Why SMs cannot be held here."""


@functools.cache
def library() -> ctypes.CDLL:
    """hold_sms.cu, compiled for the current device."""
    folders = [
        os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"),
        os.environ.get("PATH", ""),
    ]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        raise NotAvailable("nvcc not found")
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hold_sms.so"
        options = ["-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
        subprocess.run([nvcc, *options, "-o", path, Path(__file__).with_name("hold_sms.cu")], check=True)
        lib = ctypes.CDLL(str(path))
    error, handle = ctypes.POINTER(ctypes.c_char_p), ctypes.c_void_p
    lib.hold.restype, lib.hold.argtypes = handle, (ctypes.c_int, ctypes.c_double, error)
    lib.num_held.argtypes = lib.is_holding.argtypes = lib.release.argtypes = (handle,)
    lib.green_stream.restype = handle
    lib.green_stream.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_int), error)
    return lib


@contextmanager
def held_sms(num: int):
    """Holds `num` SMs of the current device. Yields a function that says whether they still are held: the
    kernel ends by itself after SECONDS."""
    lib, error = library(), ctypes.c_char_p()
    torch.cuda.synchronize()  # its blocks need SMs without other blocks
    holder = lib.hold(num, SECONDS, ctypes.byref(error))
    if not holder:
        raise NotAvailable(f"hold_sms.cu: {error.value.decode()}")
    try:
        deadline = time.monotonic() + SECONDS / 2
        while lib.num_held(holder) < num:
            if time.monotonic() > deadline:
                raise NotAvailable(f"{lib.num_held(holder)} of {num} SMs are held")
            time.sleep(1e-3)
        yield lambda: bool(lib.is_holding(holder))
    finally:
        lib.release(holder)


def ends_while_held(run, num: int):
    """(run(), whether the current stream's work ended before the SMs were free again). run() has to have run
    before: what is loaded or allocated for the first time may wait for the kernel that holds the SMs."""
    with held_sms(num) as is_holding:
        start = time.monotonic()
        result = run()
        end = torch.cuda.Event()
        end.record()
        launched, ended = time.monotonic() - start, False
        while is_holding() and not ended:
            ended = end.query()
            time.sleep(1e-3)
        waited = time.monotonic() - start
    # pytest shows it where a test fails
    how = "ended" if ended else "not ended"
    print(f"{num} SMs held: launched in {launched:.2f} s, {how} after {waited:.2f} s")
    return result, ended


@functools.cache
def green_stream(num: int) -> tuple[torch.cuda.Stream, int]:
    """A stream with a part of the current device's SMs, at least `num`, and how many it has. It stays until
    the process ends, so there is one for each `num`."""
    granted, error = ctypes.c_int(), ctypes.c_char_p()
    stream = library().green_stream(num, ctypes.byref(granted), ctypes.byref(error))
    if not stream:
        raise NotAvailable(error.value.decode())
    return torch.cuda.ExternalStream(stream), granted.value
