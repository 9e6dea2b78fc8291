"""Builds the two extensions; what is only metadata stands in pyproject.toml.

  fused_moe/_ops.so      the operators of every tier. On PyTorch's stable ABI and without libpython:
                         one binary for every Python, and every PyTorch from ABI_TARGET on
  fused_moe/_host.*.so   the host-side planners and the build's facts (pybind11, one per Python)

The compilers are driven from here: torch.utils.cpp_extension refuses CUDA sources under a CPU build
of PyTorch. Objects, and what each was made from, stay in build/objects: an editable build gets a new
temporary folder every time.

Environment: CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS as usual; CUDA_HOME, where nvcc is looked for first;
MAX_JOBS, how many compilers run at a time; FUSED_MOE_WERROR=1 makes warnings errors.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ABI_TARGET = (2, 10)  # the oldest PyTorch that the library runs under
NVCC_OLDEST = (12, 3)  # the first with PTX ISA 8.3, which edits tensor maps on the device
OBJECTS = Path("build/objects")
OPS_SOURCES = ["csrc/torch_ops.cpp", *sorted(map(str, Path("csrc/cpu").glob("*.c")))]
CUDA_SOURCES = sorted(map(str, Path("csrc/kernels").glob("**/*.cu")))
HOST_SOURCES = ["csrc/host_module.cpp"]

CC = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
CFLAGS, CXXFLAGS, LDFLAGS = (shlex.split(os.environ.get(f"{x}FLAGS", "")) for x in ("C", "CXX", "LD"))
WERROR = os.environ.get("FUSED_MOE_WERROR") == "1"
COMMON = ["-O3", "-fPIC", "-fvisibility=hidden", "-Icsrc", "-Wall", "-Wextra", *["-Werror"] * WERROR]
# The part of -ffast-math that leaves NaN, infinity and the order of sums alone.
C_MATH = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
# libtorch.so is kept although nothing in it is called: in a CUDA build of PyTorch it brings
# libtorch_cuda.so into the scope where our weak symbol is looked up. No rpath: torch is imported
# first, and its libraries are then found by name.
LINK = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed", "-lm", "-Wl,-z,defs"]
# Machine code for the two CUDA tiers, and PTX for the GPUs that come after them. The short form
# -arch=sm_90a would not do: wgmma fails to assemble under it.
GENCODE = {
    "sm_80": "arch=compute_80,code=sm_80",
    "compute_80": "arch=compute_80,code=compute_80",
    "sm_90a": "arch=compute_90a,code=sm_90a",
}


# --- what is on this machine ---------------------------------------------------------------------


def find_torch() -> tuple[Path, str]:
    """PyTorch's folder and version, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "fused_moe is built against the PyTorch that it will run with, and none is importable. "
            "Install torch, setuptools and pybind11, then pip install with --no-build-isolation."
        )
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < ABI_TARGET:
        raise SystemExit(f"fused_moe needs PyTorch >= 2.10, found {version} at {spec.origin}")
    return Path(spec.origin).parent, version


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def usable_nvcc() -> tuple[str | None, str]:
    """nvcc, or why there are no GPU tiers."""
    nvcc = find_nvcc()
    if not CUDA_SOURCES:
        return None, "no CUDA sources"
    if nvcc is None:
        return None, "nvcc not found"
    release = re.search(r"release (\d+)\.(\d+)", version_line([nvcc], -2))
    if release and tuple(map(int, release.groups())) < NVCC_OLDEST:
        return None, f"{nvcc} is {release[0]}, expected {'.'.join(map(str, NVCC_OLDEST))} or newer"
    return nvcc, ""


def cuda_library_dirs(nvcc: str) -> list[str]:
    """As -L flags, from nvcc itself: it may come from a toolkit, conda or pip, or be a wrapper."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
    dryrun = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return shlex.split(re.search(r"LIBRARIES=(.*)", dryrun)[1])


def version_line(command: list[str], line: int = 0) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    return version.stdout.splitlines()[line]


def targets_of(source: str) -> list[str]:
    """nvcc's flags for the GPUs that a file is compiled for: kernels/hopper/ is for one."""
    names = ["sm_90a"] if "/hopper/" in source else GENCODE
    return [f"-gencode={GENCODE[name]}" for name in names] if source.endswith(".cu") else []


# --- objects -------------------------------------------------------------------------------------


def run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if subprocess.run(command).returncode:
        raise SystemExit(f"fused_moe: failed: {shlex.join(command)}")


def out_of_date(obj: Path, record: str) -> bool:
    """False when `obj` came from this very command and no file it was made from changed since."""
    made_by = obj.with_suffix(".cmd")
    try:
        if not obj.exists() or made_by.read_text() != record:
            return True
        made_from = obj.with_suffix(".d").read_text().partition(":")[2].replace("\\\n", " ")
        started = made_by.stat().st_mtime_ns
        return any(Path(name).stat().st_mtime_ns >= started for name in shlex.split(made_from))
    except FileNotFoundError:  # never built, or a header is gone
        return True


def compile_objects(commands: dict[Path, list[str]], versions: str = "") -> list[Path]:
    """Runs the compile commands (less -o) whose objects are out of date, and returns those objects.

    `versions` stands for what a command line does not show, such as the compiler's release.
    """

    def compile_object(obj: Path) -> None:
        command = [*commands[obj], "-MMD", "-MF", str(obj.with_suffix(".d")), "-o", str(obj)]
        obj.parent.mkdir(parents=True, exist_ok=True)
        obj.unlink(missing_ok=True)
        # Written before the compiler starts, so that a file edited while it runs counts as changed.
        obj.with_suffix(".cmd").write_text(records[obj])
        run(command)

    records = {obj: f"{shlex.join(command)}\n{versions}" for obj, command in commands.items()}
    stale = [obj for obj in commands if out_of_date(obj, records[obj])]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(compile_object, stale))
    return stale


# --- the extensions ------------------------------------------------------------------------------


class Build(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_ops"):  # no Python in it, no Python version in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        import pybind11

        torch, torch_version = find_torch()
        nvcc, why_not = usable_nvcc()
        facts = {
            "c_compiler": version_line(CC),
            "cxx_compiler": version_line(CXX),
            "nvcc": version_line([nvcc], -2) if nvcc else "none",
            "gpu_targets": " ".join(GENCODE) if nvcc else "none",
            "abi_target": ".".join(map(str, ABI_TARGET)),
            "torch": torch_version,
        }
        print(f"fused_moe: CPU tier; GPU targets: {facts['gpu_targets']}{why_not and f' ({why_not})'}")

        abi = "0x{:02x}{:02x}000000000000ULL".format(*ABI_TARGET)
        info = ",".join(f"{{{json.dumps(name)},{json.dumps(fact)}}}" for name, fact in facts.items())
        python_includes = [pybind11.get_include(), sysconfig.get_path("include")]

        c = [*CC, "-std=gnu11", *COMMON, *C_MATH, *CFLAGS]
        torch_cpp = [*CXX, "-std=c++20", *COMMON, f"-isystem{torch}/include", *CXXFLAGS]
        torch_cpp += [f"-DTORCH_TARGET_VERSION={abi}", "-DTORCH_STABLE_ONLY"]
        host_cpp = [*CXX, "-std=c++17", *COMMON, f"-DBUILD_INFO={info}", *CXXFLAGS]
        host_cpp += [f"-isystem{folder}" for folder in python_includes]
        compilers = {".c": c, ".cpp": torch_cpp}
        link = [f"-L{torch}/lib", *LINK]
        if nvcc:
            cuda = [nvcc, "-std=c++17", "-O3", "-lineinfo", "-Icsrc", *["-Werror=all-warnings"] * WERROR]
            cuda += ["-Xcompiler=-fPIC,-fvisibility=hidden"]
            compilers[".cu"] = cuda
            torch_cpp += ["-DFUSED_MOE_WITH_CUDA"]
            link += [*cuda_library_dirs(nvcc), "-lcudart_static", "-lpthread", "-ldl", "-lrt"]

        sources = OPS_SOURCES + CUDA_SOURCES * bool(nvcc)
        ops = {OBJECTS / f"{s}.o": [*compilers[Path(s).suffix], *targets_of(s), "-c", s] for s in sources}
        host = {OBJECTS / f"{s}.o": [*host_cpp, "-c", s] for s in HOST_SOURCES}
        compile_objects(ops | host, versions=info)
        self.link("fused_moe._ops", ops, link)
        self.link("fused_moe._host", host, [])

    def link(self, name: str, objects: Iterable[Path], flags: list[str]) -> None:
        out = Path(self.get_ext_fullpath(name))
        out.parent.mkdir(parents=True, exist_ok=True)
        run([*CXX, "-shared", "-o", str(out), *map(str, objects), *flags, *LDFLAGS])


if __name__ == "__main__":  # the tests import the functions above
    setup(
        ext_modules=[
            Extension("fused_moe._ops", OPS_SOURCES + CUDA_SOURCES),
            Extension("fused_moe._host", HOST_SOURCES),
        ],
        cmdclass={"build_ext": Build},
    )
