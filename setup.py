"""Builds the extensions; what is only metadata is in pyproject.toml.

  fused_moe/_ops.so      the operators of every tier. On PyTorch's stable ABI and without libpython:
                         one binary for every Python, and every PyTorch from ABI_TARGET on
  fused_moe/_host.*.so   the host-side planners for tests (pybind11, one per Python). Never in a wheel:
                         only built in place with FUSED_MOE_HOST=1, as `make build` does

The graph of compilations is written here and run by ninja: torch.utils.cpp_extension refuses CUDA sources
under a CPU build of PyTorch. Graph and objects are in build/objects; compile_commands.json is for clangd.

Environment: CC, CXX, CFLAGS, CXXFLAGS, LDFLAGS as usual; CUDA_HOME, the one place to look for nvcc in;
MAX_JOBS, how many compilers run at a time; FUSED_MOE_ARCHS, the GPU targets to compile for instead of all;
FUSED_MOE_WERROR=1 makes warnings errors; FUSED_MOE_DEBUG=1 bounds the waits of kernels; FUSED_MOE_OBJECTS,
another folder than build/objects; FUSED_MOE_MANYLINUX=1 links for older glibcs, as `make wheel` does;
FUSED_MOE_NAMESPACE, of the operators in a library for tools/hub.py; FUSED_MOE_TERMINAL, a file that gets the
progress, too.
"""

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import setuptools

# A new environment of Python 3.11 has 65.5, which cannot read pyproject.toml and says so in twenty lines.
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"fused_moe is built by setuptools >= 77, found {setuptools.__version__}: pip install without "
        "--no-build-isolation, or first pip install 'setuptools>=77' 'ninja>=1.11'"
    )

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ABI_TARGET = (2, 10)  # the oldest PyTorch that the library runs under
NVCC_OLDEST = (12, 3)  # the first with PTX ISA 8.3, which edits tensor maps on the device
# nvcc can compress fatbins to a tenth from 12.8 on. Only drivers from 550 on read them, so that it is left
# to CUDA 13, which wants a driver from 580 on anyway.
NVCC_COMPRESSES = (13, 0)
OBJECTS = Path(os.environ.get("FUSED_MOE_OBJECTS", "build/objects"))
NAMESPACE = os.environ.get("FUSED_MOE_NAMESPACE", "fused_moe")  # fused_moe/namespace.py has to have the same
REGISTERING = ("csrc/torch/library.cpp", "csrc/torch/planners.cpp")  # files that name it
C_SOURCES, CPP_SOURCES, CUDA_SOURCES = (
    sorted(map(str, Path("csrc").glob(files))) for files in ("cpu/*.c", "torch/*.cpp", "kernels/**/*.cu")
)
SLOWEST = ("up_gate.cu", "experts.cu", "quantized_mm.cu")  # names' ends, of two to five minutes each
OPS = Extension("fused_moe._ops", C_SOURCES + CPP_SOURCES + CUDA_SOURCES)
HOST = Extension("fused_moe._host", ["csrc/host_module.cpp"])

CC = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
CFLAGS, CXXFLAGS, LDFLAGS = (shlex.split(os.environ.get(f"{x}FLAGS", "")) for x in ("C", "CXX", "LD"))
WERROR, DEBUG = (os.environ.get(f"FUSED_MOE_{x}") == "1" for x in ("WERROR", "DEBUG"))
COMMON = ["-O3", "-fPIC", "-fvisibility=hidden", "-Icsrc", "-Wall", "-Wextra", *["-Werror"] * WERROR]
# The part of -ffast-math that leaves NaN, infinity and the order of sums alone.
C_MATH = ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
# libtorch.so is kept although nothing in it is called: in a CUDA build of PyTorch it brings
# libtorch_cuda.so into the scope where our weak symbol is looked up. No rpath: torch is imported
# first, and its libraries are then found by name.
LINK = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed", "-lm", "-Wl,-z,defs"]
# Machine code for the two CUDA tiers, and PTX for the GPUs that come after them, each with the oldest and the
# newest compute capability that runs it. The short form -arch=sm_90a would not do: wgmma fails to assemble.
INT32_MAX = 2**31 - 1
GPU_TARGETS = {"sm_80": (80, 89), "compute_80": (80, INT32_MAX), "sm_90a": (90, 90)}
# Tiers' folders, and the only targets that each is compiled for. A folder without targets is left out: the
# file of its name in csrc/kernels/absent takes its place.
TIER_TARGETS = {"sm80": [*GPU_TARGETS], "sm90": ["sm_90a"]}


def release(text: str) -> tuple[int, ...]:
    """The first X.Y in a text, as numbers; () where there is none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def asked_targets(archs: str) -> list[str]:
    """The GPU targets that FUSED_MOE_ARCHS names; all of them where it is empty."""
    names = archs.replace(";", " ").split()
    if unknown := [name for name in names if name not in GPU_TARGETS]:
        raise SystemExit(
            f"fused_moe: expected FUSED_MOE_ARCHS to name one or more of {', '.join(GPU_TARGETS)}, "
            f"separated by semicolons or spaces, found {', '.join(unknown)}"
        )
    return [name for name in GPU_TARGETS if name in names or not names]


def targets_of(source: str, asked: list[str]) -> list[str]:
    """The targets that a CUDA file is compiled for, of those asked for; none: it is left out."""
    folder, tier = Path(source).parent.name, Path(source).stem
    if folder == "absent":
        return [] if set(TIER_TARGETS[tier]) & {*asked} else asked
    return [name for name in asked if name in TIER_TARGETS.get(folder, asked)]


def gencode(targets: list[str]) -> list[str]:
    """nvcc's flags for targets."""
    return [f"-gencode=arch={name.replace('sm', 'compute')},code={name}" for name in targets]


def tier_macros(asked: list[str]) -> list[str]:
    """For csrc/fused_moe.h: the oldest and the newest compute capability that each tier runs on."""
    macros = []
    for tier, targets in TIER_TARGETS.items():
        ends = [GPU_TARGETS[name] for name in targets if name in asked]
        oldest, newest = min((o for o, _ in ends), default=0), max((n for _, n in ends), default=-1)
        name = f"-DFUSED_MOE_{tier.upper()}"
        macros += [f"{name}_OLDEST={oldest}", f"{name}_NEWEST={newest}"]
    return macros


def nvcc_flags(of_release: tuple[int, ...]) -> list[str]:
    """nvcc's flags for every CUDA file. tests/test_toolkit.py knows the first release that has each."""
    compress = ["--compress-mode=size"] * (of_release >= NVCC_COMPRESSES)
    werror = ["-Werror=all-warnings"] * WERROR
    debug = ["-DFUSED_MOE_DEBUG"] * DEBUG
    host = ["-Xcompiler=-fPIC,-fvisibility=hidden"]
    return ["-std=c++17", "-O3", "-Icsrc", *compress, *werror, *debug, *host]


def require_compilers() -> None:
    """Raises, and names the package, where CC or CXX is no program."""
    if missing := [compiler[0] for compiler in (CC, CXX) if not shutil.which(compiler[0])]:
        raise SystemExit(
            f"fused_moe is compiled by a C and a C++20 compiler, found no {' and no '.join(missing)}. "
            "On Debian and Ubuntu: apt install g++; or set CC and CXX."
        )


def find_torch() -> tuple[Path, str]:
    """The folder and version of a PyTorch to compile against, without importing it.

    The one that can be imported comes first. In an isolated build there is none; then it is that of the
    interpreter's own site-packages, which pip hides, of the Python below the build's virtual environment, or
    of the activated one. Any that is new enough does, since the library is on PyTorch's stable ABI.
    """
    prefixes = [sys.prefix, sys.base_prefix, os.environ.get("VIRTUAL_ENV", sys.prefix)]
    hidden = [*site.getsitepackages(prefixes), site.getusersitepackages()]
    specs = importlib.util.find_spec("torch"), importlib.machinery.PathFinder.find_spec("torch", hidden)
    too_old = "none"
    for spec, folders in zip(specs, (sys.path, hidden), strict=True):
        if spec is None or spec.origin is None:
            continue
        for distribution in importlib.metadata.distributions(name="torch", path=folders):
            if release(distribution.version) >= ABI_TARGET:
                return Path(spec.origin).parent, distribution.version
            too_old = f"{distribution.version} at {spec.origin}"
    raise SystemExit(
        f"fused_moe is compiled against PyTorch >= {'.'.join(map(str, ABI_TARGET))}, found {too_old}. "
        "Install one, or pip install without --no-build-isolation, which fetches one for the compilation."
    )


def find_nvcc() -> tuple[str | None, str]:
    """nvcc and its release, or None and why there are no GPU tiers."""
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/bin"] if home else [*os.get_exec_path(), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        return None, "nvcc not found"
    line = re.search(r".*release [\d.]+.*", subprocess.check_output([nvcc, "--version"], text=True))
    if line is None:
        return None, f"{nvcc} --version tells no release"
    if release(line[0]) < NVCC_OLDEST:
        found, oldest = (".".join(map(str, numbers)) for numbers in (release(line[0]), NVCC_OLDEST))
        return None, f"{nvcc} is release {found}, expected {oldest} or newer"
    return nvcc, line[0]


def objects_in_graph() -> Path:
    """The folder of objects, as the graph names it.

    ninja compiles again what has another path or command. So both are relative, and the same in every
    checkout: one that is copied with its times (cp -a) compiles nothing, and an unpacked sdist shares the
    objects of the checkout that it was made in, by a link. Another folder, beside objects of the checkout's
    own, has its absolute path.
    """
    folder = Path("build/objects")
    if folder.is_symlink() and not folder.exists():  # the other folder has been removed
        folder.unlink()
    OBJECTS.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() and folder.resolve() != OBJECTS.resolve():
        folder.unlink()
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(OBJECTS.absolute())
    return folder if folder.samefile(OBJECTS) else OBJECTS.absolute()


def torch_in_graph(torch: Path) -> Path:
    """A link to PyTorch's folder in that of the objects: an environment in the checkout moves with it."""
    link = objects_in_graph() / "torch"
    if not (link.is_symlink() and link.readlink() == torch):
        link.unlink(missing_ok=True)
        link.symlink_to(torch, target_is_directory=True)
    return link


def show_progress(ninja: list[str]) -> int:
    """Runs ninja and returns its exit status. pip hides what a build prints; a line every few seconds goes to
    the file FUSED_MOE_TERMINAL, which tools/build_backend.py sets."""
    try:
        terminal = open(os.environ.get("FUSED_MOE_TERMINAL", ""), "wb", buffering=0)  # noqa: SIM115
    except OSError:
        return subprocess.run(ninja).returncode

    def show(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed meanwhile
            terminal.write(text.encode())

    with terminal, subprocess.Popen(ninja, stdout=subprocess.PIPE, text=True) as process:
        shown = 0.0
        for line in process.stdout:
            sys.stdout.write(line)
            if line.startswith("[") and time.monotonic() - shown > 5:
                shown = time.monotonic()
                show(f"\nfused_moe: {line.rstrip()}")
        if shown:
            show("\n")
    return process.returncode


def run_ninja(libraries: dict[str, tuple[dict, list[str]]], facts: str) -> None:
    """Compiles and links what is out of date.

    `libraries` is {library: ({source: its compiler and flags}, linker flags)}. `facts` is what command lines
    do not show, such as compiler releases: when it changes, everything is recompiled.
    """
    try:
        from ninja.ninja_syntax import Writer, escape
    except ImportError:
        raise SystemExit("fused_moe is compiled by ninja, which is missing: pip install ninja") from None
    objects_folder = objects_in_graph()
    facts_file, ninja_file = objects_folder / "facts.txt", objects_folder / "build.ninja"
    if not facts_file.exists() or facts_file.read_text() != facts:
        facts_file.write_text(facts)
    with ninja_file.open("w") as file:
        graph = Writer(file, width=sys.maxsize)  # wrapping can drop a space inside a quoted word
        graph.variable("builddir", escape(str(objects_folder)))
        graph.rule("compile", "$compiler -MD -MF $out.d -c $in -o $out", "compile $in", "$out.d", deps="gcc")
        graph.rule("link", f"{escape(shlex.join(CXX))} -shared $in $flags -o $out", "link $out")
        for library, (compilers, flags) in libraries.items():
            objects = []
            for source, compiler in compilers.items():
                variables = {"compiler": escape(shlex.join(compiler))}
                path = f"{objects_folder}/{source}.o"
                objects += graph.build(path, "compile", source, str(facts_file), variables=variables)
            variables = {"flags": escape(shlex.join([*flags, *LDFLAGS]))}
            graph.build(library, "link", objects, variables=variables)

    ninja = [sys.executable, "-m", "ninja", "-f", str(ninja_file)]
    with open("compile_commands.json", "w") as database:
        subprocess.run([*ninja, "-t", "compdb", "compile"], stdout=database, check=True)
    if jobs := os.environ.get("MAX_JOBS"):
        ninja += ["-j", jobs]
    if show_progress(ninja):
        raise SystemExit("fused_moe: the build failed; the command and its messages are above")


class Build(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        # The default is a folder whose whole contents go into a wheel, or an editable build's temporary one.
        if self.inplace:
            self.build_lib = str(OBJECTS)
        # _host fits one Python only, a wheel has to fit all of them.
        if not (self.inplace and os.environ.get("FUSED_MOE_HOST") == "1"):
            self.extensions = [OPS]

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_ops"):  # no Python in it, no Python version in its name
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)

    def get_ext_fullpath(self, ext_name: str) -> str:
        path = super().get_ext_fullpath(ext_name)
        return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path

    def build_extensions(self) -> None:
        require_compilers()
        found, torch_version = find_torch()
        torch = torch_in_graph(found)
        nvcc, release_or_reason = find_nvcc()
        asked = asked_targets(os.environ.get("FUSED_MOE_ARCHS", ""))
        facts = {
            "c_compiler": subprocess.check_output([*CC, "--version"], text=True).splitlines()[0],
            "cxx_compiler": subprocess.check_output([*CXX, "--version"], text=True).splitlines()[0],
            "nvcc": release_or_reason if nvcc else "none",
            "abi_target": ".".join(map(str, ABI_TARGET)),
            "torch": torch_version,
        }
        # And what command lines show: when it changes, what has other command lines is recompiled.
        shown = facts | {"gpu_targets": " ".join(asked) if nvcc else "none"}
        shown["debug"] = "yes" if nvcc and DEBUG else "no"
        info = ",".join(f"{{{json.dumps(name)},{json.dumps(fact)}}}" for name, fact in shown.items())
        tiers = f"fused_moe: CPU tier; GPU targets: {shown['gpu_targets']} ({release_or_reason})"
        print(tiers, flush=True)  # before what ninja prints

        abi = "0x{:02x}{:02x}000000000000ULL".format(*ABI_TARGET)
        cpp = [*CXX, "-std=c++20", *COMMON, *CXXFLAGS]
        torch_cpp = [*cpp, f"-isystem{torch}/include", f"-DTORCH_TARGET_VERSION={abi}", "-DTORCH_STABLE_ONLY"]
        link = [f"-L{torch}/lib", *LINK]
        compilers = dict.fromkeys(C_SOURCES, [*CC, "-std=gnu11", *COMMON, *C_MATH, *CFLAGS])
        if nvcc:
            torch_cpp += ["-DFUSED_MOE_WITH_CUDA", *tier_macros(asked)]
            cuda = [nvcc, *nvcc_flags(release(release_or_reason))]
            for source in CUDA_SOURCES:
                if targets := targets_of(source, asked):
                    compilers[source] = [*cuda, *gencode(targets)]
            compilers["csrc/kernels/device.cu"] += tier_macros(asked)
            # nvcc knows its libraries' folders. It may come from a toolkit, conda or pip, or be a wrapper.
            dryrun = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
            output = subprocess.check_output(dryrun, stderr=subprocess.STDOUT, text=True)
            link += shlex.split(re.search(r"LIBRARIES=(.*)", output)[1])
            link += ["-lcudart_static", "-lpthread", "-ldl", "-lrt"]
        if os.environ.get("FUSED_MOE_MANYLINUX") == "1":
            program = [sys.executable, "tools/older_glibc.py", str(objects_in_graph() / "older_glibc"), *CXX]
            link = [*shlex.split(subprocess.check_output(program, text=True)), *link]
        compilers |= dict.fromkeys(CPP_SOURCES, torch_cpp)
        if NAMESPACE != "fused_moe":
            compilers |= dict.fromkeys(REGISTERING, [*torch_cpp, f"-DFUSED_MOE_NAMESPACE={NAMESPACE}"])
        compilers["csrc/torch/facts.cpp"] = [*torch_cpp, f"-DBUILD_INFO={info}"]  # for fused_moe.info()
        # ninja begins in this order: the slowest first, or one core compiles them when the others are done
        compilers = dict(sorted(compilers.items(), key=lambda pair: not pair[0].endswith(SLOWEST)))
        libraries = {self.get_ext_fullpath(OPS.name): (compilers, link)}
        if HOST in self.extensions:
            import pybind11

            includes = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
            libraries[self.get_ext_fullpath(HOST.name)] = dict.fromkeys(HOST.sources, [*cpp, *includes]), []
        run_ninja(libraries, json.dumps(facts))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":  # the tests import the functions above
    setup(ext_modules=[OPS, HOST], cmdclass={"build_ext": Build, "bdist_wheel": Wheel})
