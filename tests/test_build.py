"""setup.py: incremental builds, the contents of a wheel and an sdist, and the library's dependencies.

Compilers run on tiny sources in a temporary folder; the real library is inspected, not built. Skipped
without a checkout, as when the tests run against an installed wheel.
"""

import ctypes
import importlib.util
import io
import json
import math
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout")


def load(path: str):
    """A module of the checkout that no package has."""
    spec = importlib.util.spec_from_file_location("loaded", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build():
    pytest.importorskip("setuptools", "77")
    return load("setup.py")


@pytest.fixture
def project(build, capfd, monkeypatch, tmp_path):
    """A folder with two sources and a header that one.c includes. Building it returns what was built."""
    pytest.importorskip("ninja")
    if not (shutil.which(build.CC[0]) and shutil.which(build.CXX[0])):
        pytest.skip("needs a C and a C++ compiler")
    monkeypatch.chdir(tmp_path)
    Path("a header.h").write_text("enum { ANSWER = 42 };\n")
    Path("one.c").write_text('#include "a header.h"\nint one(void) { return ANSWER; }\n')
    Path("two.c").write_text("int two(void) { return 2; }\n")

    def build_project(*flags_of_two: str, facts: str = "a compiler") -> list[str]:
        capfd.readouterr()
        compilers = {"one.c": [*build.CC, "-fPIC"], "two.c": [*build.CC, "-fPIC", *flags_of_two]}
        build.run_ninja({"both.so": (compilers, [])}, facts)
        return sorted(re.findall(r"(?:compile|link) (.*)", capfd.readouterr().out))

    return build_project


def test_only_what_changed_is_made_again(project, capfd):
    assert project() == ["both.so", "one.c", "two.c"]
    assert project() == []
    Path("a header.h").touch()
    assert project() == ["both.so", "one.c"]
    assert project("-O1") == ["both.so", "two.c"]
    assert project("-O1", facts="another compiler") == ["both.so", "one.c", "two.c"]
    Path("two.c").write_text("int two(void) { return }\n")
    with pytest.raises(SystemExit, match="the build failed"):
        project()
    assert "two.c:1:" in capfd.readouterr().out


def test_a_copy_of_the_sources_shares_objects(build, project, monkeypatch, tmp_path):
    """As .ci/run builds the unpacked sdist: nothing is compiled again, and a missing file is noticed."""
    assert project() == ["both.so", "one.c", "two.c"]
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "build/objects")
    copy = tmp_path / "a copy"
    copy.mkdir()
    for name in ("a header.h", "one.c", "two.c"):
        shutil.copy2(name, copy)
    monkeypatch.chdir(copy)
    assert project() == ["both.so"]
    Path("a header.h").unlink()
    with pytest.raises(SystemExit, match="the build failed"):
        project()


def test_a_copied_checkout_compiles_nothing(project, monkeypatch, tmp_path):
    """With its build folder, by cp -a: copies made later than their objects would be compiled again."""
    assert project() == ["both.so", "one.c", "two.c"]
    copy = tmp_path.with_name(f"{tmp_path.name} copied")
    shutil.copytree(tmp_path, copy, symlinks=True)  # keeps times
    shutil.rmtree(tmp_path / "build")
    monkeypatch.chdir(copy)
    assert project() == []
    Path("a header.h").touch()
    assert project() == ["both.so", "one.c"]


def test_a_checkout_with_objects_of_its_own_keeps_them(build, project, monkeypatch, tmp_path):
    assert project() == ["both.so", "one.c", "two.c"]
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "others")
    assert project() == ["both.so", "one.c", "two.c"]
    assert (tmp_path / "others/one.c.o").exists() and not Path("build/objects").is_symlink()
    monkeypatch.setattr(build, "OBJECTS", Path("build/objects"))
    assert "one.c" not in project()


def test_a_link_to_objects_that_are_gone_is_replaced(build, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "OBJECTS", tmp_path / "others")
    assert build.objects_in_graph().is_symlink()
    (tmp_path / "others").rmdir()
    monkeypatch.setattr(build, "OBJECTS", Path("build/objects"))
    assert build.objects_in_graph() == Path("build/objects")
    assert Path("build/objects").is_dir() and not Path("build/objects").is_symlink()


def test_a_library_of_the_checkout_has_a_relative_path(build, monkeypatch, tmp_path):
    """And PyTorch's folder is a link, so an environment in the checkout can move with it."""
    from setuptools import Distribution

    (tmp_path / "fused_moe").mkdir()
    monkeypatch.chdir(tmp_path)
    command = build.Build(Distribution({"ext_modules": [build.OPS], "packages": ["fused_moe"]}))
    command.inplace = True
    command.ensure_finalized()
    assert not Path(command.get_ext_fullpath("fused_moe._ops")).is_absolute()
    for torch in ("one", "two"):
        link = build.torch_in_graph(tmp_path / torch)
        assert not link.is_absolute() and link.readlink() == tmp_path / torch


def test_progress_reaches_the_terminal(project, monkeypatch, tmp_path, capfd):
    """pip shows nothing of what a build prints."""
    monkeypatch.setenv("FUSED_MOE_TERMINAL", str(tmp_path / "terminal"))
    assert project() == ["both.so", "one.c", "two.c"]
    assert (tmp_path / "terminal").read_text().startswith("\nfused_moe: [1/3] compile ")
    assert project() == []
    assert (tmp_path / "terminal").read_text() == ""
    Path("a header.h").touch()
    monkeypatch.setenv("FUSED_MOE_TERMINAL", "/dev/full")  # whose writes fail, as those to a closed terminal
    assert project() == ["both.so", "one.c"]
    Path("one.c").write_text("int one(void) { return }\n")
    with pytest.raises(SystemExit, match="the build failed"):
        project()


def test_words_reach_the_compiler_unchanged(project):
    """Through ninja's quotes and the shell's, and into compile_commands.json."""
    text = "a  $in 'b' $$ `c`: \\d" + 99 * " " + "."  # ninja drops what is blank where a line is wrapped
    Path("two.c").write_text("const char *two(void) { return TEXT; }\n")
    project(f"-DTEXT={json.dumps(text)}")
    two = ctypes.CDLL("./both.so").two
    two.restype = ctypes.c_char_p
    assert two() == text.encode()
    database = json.loads(Path("compile_commands.json").read_text())
    assert [entry["file"] for entry in database] == ["one.c", "two.c"]


def test_a_build_without_ninja_says_what_to_do(build, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ninja.ninja_syntax", None)
    with pytest.raises(SystemExit, match="pip install ninja"):
        build.run_ninja({}, "")


ALL_TARGETS = ["sm_80", "compute_80", "sm_90a"]


@pytest.mark.parametrize(
    ("archs", "asked"),
    [
        ("", ALL_TARGETS),
        ("sm_90a", ["sm_90a"]),
        ("sm_90a;sm_80", ["sm_80", "sm_90a"]),
        (" sm_80  compute_80;", ["sm_80", "compute_80"]),
    ],
)
def test_the_folder_decides_the_gpu_targets(build, archs, asked):
    """FUSED_MOE_ARCHS names some: sm90 is compiled for sm_90a alone, and every other file for all of them.
    Where sm90 is left out, another file takes its place."""
    assert build.asked_targets(archs) == asked
    targets = {source: build.targets_of(source, asked) for source in build.CUDA_SOURCES}
    for source, found in targets.items():
        if "/sm90/" in source:
            assert found == [name for name in asked if name == "sm_90a"], source
        elif source == "csrc/kernels/absent/sm90.cu":
            assert found == ([] if "sm_90a" in asked else asked)
        else:
            assert found == asked, source
    assert {"csrc/kernels/absent/sm90.cu", "csrc/kernels/sm90/wgrad.cu"} <= targets.keys()


def test_the_command_line_of_targets(build):
    """sm_80 is machine code, compute_80 is PTX."""
    assert build.gencode(ALL_TARGETS) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]


@pytest.mark.parametrize("archs", ["90", "sm_90", "sm_90a;sm_100", "9.0a"])
def test_an_unknown_target_is_named(build, archs):
    expected = "expected FUSED_MOE_ARCHS to name one or more of sm_80, compute_80, sm_90a, separated by"
    found = archs.removeprefix("sm_90a;")
    with pytest.raises(SystemExit, match=f"{re.escape(expected)} semicolons or spaces, found {found}$"):
        build.asked_targets(archs)


@pytest.mark.parametrize(
    ("archs", "hopper", "portable"),
    [
        ("", [90], [80, 86, 89, 90, 100, 120]),
        ("sm_90a", [90], [90]),
        ("sm_80", [], [80, 86, 89]),
        ("sm_80 sm_90a", [90], [80, 86, 89, 90]),
        ("compute_80", [], [80, 86, 89, 90, 100, 120]),
        ("compute_80 sm_90a", [90], [80, 86, 89, 90, 100, 120]),
    ],
)
def test_a_tier_runs_where_its_targets_do(build, tmp_path, archs, hopper, portable):
    """By csrc/fused_moe.h, which dispatch and info() ask. All targets are what it says by itself, too."""
    if not shutil.which(build.CC[0]):
        pytest.skip("needs a C compiler")
    program = """
    #include <stdio.h>
    #include "fused_moe.h"
    int main(void) {
        for (int tier = 0; tier < FUSED_MOE_NUM_TIERS; tier++) {
            for (int capability = 0; capability < 150; capability++)
                if (fused_moe_tier_runs_on(tier, capability)) printf("%d ", capability);
            puts("");
        }
    }"""
    (tmp_path / "a.c").write_text(program)
    of_archs = build.tier_macros(build.asked_targets(archs))
    for macros in [of_archs] if archs else [of_archs, []]:
        command = [*build.CC, "-std=gnu11", f"-I{ROOT}/csrc", *macros, "-o", tmp_path / "a", tmp_path / "a.c"]
        subprocess.run(command, check=True)
        lines = subprocess.check_output([tmp_path / "a"], text=True).splitlines()
        for line, runs_on in zip(lines, (hopper, portable), strict=True):
            found = {int(word) for word in line.split()}
            assert found & {0, 70, 75, 80, 86, 89, 90, 100, 120} == {*runs_on}


def test_a_tier_that_is_left_out_has_a_stand_in(build, tmp_path):
    """Whatever dispatch.cu asks of sm90 is in absent/sm90.cu, else a library without sm90 does not link."""
    nvcc, _ = build.find_nvcc()
    if nvcc is None or not shutil.which("nm"):
        pytest.skip("needs nvcc and binutils")
    symbols = {}
    for source, which in (("dispatch.cu", "--undefined-only"), ("absent/sm90.cu", "--defined-only")):
        flags = ["-std=c++17", f"-I{ROOT}/csrc", *build.gencode(["sm_80"]), *build.tier_macros(["sm_80"])]
        subprocess.run(
            [nvcc, *flags, "-c", "-o", tmp_path / "a.o", ROOT / "csrc/kernels" / source], check=True
        )
        names = subprocess.check_output(["nm", which, tmp_path / "a.o"], text=True)
        symbols[which] = {name for name in re.findall(r"\b_ZN\w+", names) if "4sm90" in name}
    expected, found = symbols.values()
    assert expected == found and len(expected) > 8


def test_a_debug_build_bounds_waits(build, tmp_path):
    """With FUSED_MOE_DEBUG a kernel can print and trap; without it none does."""
    nvcc, _ = build.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    flags = ["-std=c++17", "-ptx", "-arch=compute_90a", f"-I{ROOT}/csrc", "-o", tmp_path / "a.ptx"]
    for debug in (True, False):
        macros = ["-DFUSED_MOE_DEBUG"] * debug
        source = ROOT / "csrc/kernels/sm90/router_dgrad.cu"
        subprocess.run([nvcc, *flags, *macros, source], check=True)
        ptx = (tmp_path / "a.ptx").read_text()
        assert ".entry" in ptx and "mbarrier.try_wait" in ptx
        assert [bool(re.search(word, ptx)) for word in (r"\btrap;", r"\bvprintf\b")] == [debug, debug]


def test_every_wait_has_a_bound():
    """What polls memory or a barrier is a function of waits.cuh or ptx_sm90.cuh."""
    polls = re.compile(r"try_wait|__nanosleep|(?:while|for) \([^{}]*?\bld_(?:acquire|relaxed)_gpu.*")
    found = {
        (source.name, poll)
        for source in (ROOT / "csrc/kernels").rglob("*.cu*")
        if source.name not in ("waits.cuh", "ptx_sm90.cuh")
        for poll in polls.findall(source.read_text())
    }
    bounded = (
        "for (int i = 0; is_second && i < 4 && ld_acquire_gpu(&progress.claimed) < gridDim.x / 2; i++) {"
    )
    assert found == {("experts.cuh", bounded)}


def test_a_wheel_fits_every_python(build, monkeypatch):
    """By its tag; _host, which depends on the Python version, is built only in place."""
    from setuptools import Distribution

    monkeypatch.setenv("FUSED_MOE_HOST", "1")
    distribution = Distribution({"ext_modules": [build.OPS, build.HOST]})
    wheel = build.Wheel(distribution)
    wheel.ensure_finalized()
    assert wheel.get_tag()[:2] == ("py3", "none")
    assert wheel.get_tag()[2] != "any"
    for inplace, extensions in ((False, [build.OPS]), (True, [build.OPS, build.HOST])):
        command = build.Build(distribution)
        command.inplace = inplace
        command.ensure_finalized()
        assert command.extensions == extensions


@pytest.fixture
def torches(monkeypatch, tmp_path):
    """A function that installs a PyTorch of some version in a folder of site-packages, and returns where: in
    "shown", which can be imported, or in one that an isolated build hides."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "shown")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "activated"))
    monkeypatch.setattr(site, "getsitepackages", lambda prefixes: prefixes)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "user"))

    def install(folder: str, version: str) -> Path:
        importlib.invalidate_caches()
        torch, metadata = tmp_path / folder / "torch", tmp_path / folder / f"torch-{version}.dist-info"
        torch.mkdir(parents=True)
        (torch / "__init__.py").touch()
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        return torch

    return install


@pytest.mark.parametrize("folder", ["prefix", "base", "activated", "user"])
def test_an_isolated_build_finds_a_torch_that_is_hidden_from_it(build, torches, folder):
    with pytest.raises(SystemExit, match=r"PyTorch >= 2\.10, found none.*without --no-build-isolation"):
        build.find_torch()
    hidden = torches(folder, "2.11.0+cu130")
    assert build.find_torch() == (hidden, "2.11.0+cu130")
    shown = torches("shown", "2.10.0")
    assert build.find_torch() == (shown, "2.10.0")


def test_a_torch_that_is_too_old_is_passed_over(build, torches):
    shown = torches("shown", "2.9.1+cpu")
    with pytest.raises(SystemExit, match=re.escape(f"found 2.9.1+cpu at {shown}")):
        build.find_torch()
    hidden = torches("base", "2.13.0")
    assert build.find_torch() == (hidden, "2.13.0")


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_the_backend_asks_for_torch_where_there_is_none(build, capsys, hook, monkeypatch, tmp_path):
    backend = load("tools/build_backend.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend.build_meta, hook, lambda config_settings: ["another"])
    monkeypatch.setattr(backend, "TERMINAL", str(tmp_path / "terminal"))
    compilers = "def require_compilers(): pass\n"
    Path("setup.py").write_text(compilers + "def find_torch(): return 'torch', '2.13'")
    assert getattr(backend, hook)() == ["another"]
    Path("setup.py").write_text(compilers + "def find_torch(): raise SystemExit('no torch')")
    torch = "torch>=" + ".".join(map(str, build.ABI_TARGET))
    assert getattr(backend, hook)() == ["another", torch]
    assert "2.7 GB" in Path("terminal").read_text() and "--no-build-isolation" in Path("terminal").read_text()
    # Without a terminal, into pip's log.
    monkeypatch.setattr(backend, "TERMINAL", str(tmp_path / "no such folder" / "terminal"))
    assert getattr(backend, hook)() == ["another", torch]
    assert "2.7 GB" in capsys.readouterr().err


def test_a_machine_without_compilers_is_told_before_torch_is_fetched(build, monkeypatch):
    backend = load("tools/build_backend.py")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CC", "no-such-cc -m64")
    with pytest.raises(SystemExit, match=r"found no no-such-cc\. .*apt install g\+\+"):
        backend.torch_to_ask_for()
    monkeypatch.setattr(build, "CC", ["no-such-cc"])
    monkeypatch.setattr(build, "CXX", ["no-such-c++"])
    with pytest.raises(SystemExit, match="found no no-such-cc and no no-such-c"):
        build.require_compilers()


def test_the_backend_is_setuptools_otherwise():
    pytest.importorskip("setuptools", "77")
    from setuptools import build_meta

    backend = load("tools/build_backend.py")
    changed = {name for name in build_meta.__all__ if getattr(backend, name) is not getattr(build_meta, name)}
    hooks = (
        "get_requires_for_build_wheel",
        "get_requires_for_build_editable",
        "build_wheel",
        "build_editable",
    )
    assert changed == {*hooks}


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_the_backend_says_how_long_compiling_takes(build, hook, monkeypatch, tmp_path):
    backend = load("tools/build_backend.py")
    monkeypatch.setenv("FUSED_MOE_TERMINAL", "")  # and restored after the test
    monkeypatch.delenv("FUSED_MOE_TERMINAL")
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # no terminal, as under pip
    monkeypatch.setattr(backend, "TERMINAL", str(tmp_path / "terminal"))
    monkeypatch.setattr(backend.build_meta, hook, lambda *arguments: os.environ["FUSED_MOE_TERMINAL"])
    assert getattr(backend, hook)("a folder") == str(tmp_path / "terminal")
    assert "about a minute" in (tmp_path / "terminal").read_text()


@pytest.mark.parametrize("path", ["setup.py", "tools/build_backend.py"])
def test_a_build_without_setuptools_that_fits_says_what_to_do(monkeypatch, path):
    """65.5, as in a new environment of Python 3.11, and none, as in one of 3.12."""
    setuptools = pytest.importorskip("setuptools", "77")
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    if path != "setup.py":
        monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(SystemExit, match="pip install without --no-build-isolation") as error:
        load(path)
    assert "\n" not in str(error.value) and "setuptools>=77" in str(error.value)


@pytest.mark.parametrize(
    ("release", "usable"), [("11.8", False), ("12.2", False), ("12.3", True), ("13.0", True)]
)
def test_nvcc_is_looked_for_in_cuda_home(build, monkeypatch, tmp_path, release, usable):
    """Without one, or with an old one, the CPU tier is built, and the build says why."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() == (None, "nvcc not found")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    version = f"Cuda compilation tools, release {release}, V{release}.1"
    nvcc.write_text(f"#!/bin/sh\necho nvcc: NVIDIA\necho {version}\necho Build\n")
    nvcc.chmod(0o755)
    why = f"{nvcc} is release {release}, expected 12.3 or newer"
    assert build.find_nvcc() == ((str(nvcc), version) if usable else (None, why))
    nvcc.write_text("#!/bin/sh\necho a wrapper\n")
    assert build.find_nvcc() == (None, f"{nvcc} --version tells no release")


def test_an_sdist_holds_all_that_a_build_reads(tmp_path):
    pytest.importorskip("setuptools", "77")
    names = {"fused_moe/py.typed", "setup.py", "pyproject.toml", "Makefile", "LICENSE"}
    names |= {"tools/build_backend.py", "tools/setup.sh"}
    for pattern in ("csrc/**/*.*", "fused_moe/**/*.py", "tests/**/*.*"):
        names |= {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern) if path.suffix != ".pyc"}
    # From a copy, so that no egg-info of the checkout is written or read.
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.so", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path], cwd=copy, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert names - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc", ".o"))] == []


def test_the_library_leans_on_the_stable_abi_only():
    if not (shutil.which("nm") and shutil.which("readelf")):
        pytest.skip("needs binutils")
    from fused_moe.ops import LIBRARY

    symbols = subprocess.check_output(["nm", "-DC", "--undefined-only", LIBRARY], text=True)
    assert re.findall(r".*\b(?:at|c10|torch)::.*", symbols) == []
    needed = subprocess.check_output(["readelf", "-d", LIBRARY], text=True)
    libraries = set(re.findall(r"NEEDED.*\[(.*?)\.so", needed))
    system = {"libstdc++", "libgcc_s", "libm", "libc", "libdl", "libpthread", "librt", "ld-linux-x86-64"}
    assert libraries - system == {"libtorch", "libtorch_cpu"}


def test_a_failed_call_writes_no_number_to_a_stream():
    """PyTorch's macro for it does, which ended the process when memory ran out, if g++ 13 of Ubuntu 24.04 had
    linked the library (csrc/torch/shim.h)."""
    from fused_moe.ops import LIBRARY

    assert b"_ZNSo9_M_insertIlEERSoT_" not in Path(LIBRARY).read_bytes()


def test_a_library_is_linked_for_the_oldest_glibc(build, tmp_path):
    """No function of a version after 2.28, and the library's calls reach the machine's own glibc."""
    if not all(map(shutil.which, (build.CC[0], "readelf"))):
        pytest.skip("needs a C compiler and binutils")
    code = (
        "#include <dlfcn.h>\n#include <math.h>\n#include <pthread.h>\n"
        "static pthread_key_t key;\n"
        "double both(double x) {\n"
        "    pthread_key_create(&key, 0);\n"
        '    return dlsym(dlopen(0, 1), "malloc") ? exp(x) * erf(x) : -1; /* erf has one version */\n'
        "}\n"
    )
    (tmp_path / "both.c").write_text(code)
    program = [sys.executable, str(ROOT / "tools" / "older_glibc.py"), str(tmp_path / "stand_ins"), *build.CC]
    stand_ins = subprocess.check_output(program, text=True).split()
    library = tmp_path / "both.so"
    compiler = [*build.CC, "-shared", "-fPIC", "-O1", str(tmp_path / "both.c"), "-o", str(library)]
    subprocess.check_call([*compiler, *stand_ins, "-lm", "-lpthread", "-ldl"])
    versions = subprocess.check_output(["readelf", "-W", "-V", library], text=True)
    found = [tuple(map(int, v.split("."))) for v in re.findall(r"Name: GLIBC_([\d.]+)", versions)]
    assert found and max(found) <= (2, 28)
    both = ctypes.CDLL(str(library)).both
    both.argtypes, both.restype = [ctypes.c_double], ctypes.c_double
    assert both(1.0) == pytest.approx(math.e * math.erf(1.0))
