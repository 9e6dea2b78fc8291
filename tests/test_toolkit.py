"""NVCC_OLDEST of setup.py is old enough for nothing that the CUDA sources or nvcc's command lines use.

By tables of first versions: of PTX instructions (the PTX ISA's notes on each), of the toolkit that has a PTX
ISA (its release history), of nvcc's options (its manuals). Whatever is not in a table fails. Only CUDA 13.0
has compiled the library: PyPI has no older nvcc. Skipped without a checkout.
"""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout")

# CUDA release -> its PTX ISA. None came with 12.6.
PTX_ISA = {
    (12, 3): (8, 3),
    (12, 4): (8, 4),
    (12, 5): (8, 5),
    (12, 8): (8, 7),
    (12, 9): (8, 8),
    (13, 0): (9, 0),
}

# The first PTX ISA with an instruction, or with a qualifier of it that is newer. The longest entry that an
# instruction starts with counts.
FIRST_PTX_ISA = {
    "atom.acq_rel": (6, 0),
    "bar.sync": (2, 0),  # with a number of threads
    "barrier.cluster.arrive": (7, 8),
    "barrier.cluster.wait": (7, 8),
    "barrier.red": (6, 0),
    "bra": (1, 0),
    "cp.async.bulk": (8, 0),
    "cp.async.ca": (7, 0),
    "cp.async.cg": (7, 0),
    "cp.async.commit_group": (7, 0),
    "cp.async.mbarrier.arrive": (7, 0),
    "cp.async.wait_group": (7, 0),
    "cp.reduce.async.bulk": (8, 0),
    "createpolicy": (7, 4),
    "cvt.rn.f16x2.e4m3x2": (7, 8),
    "cvt.rn.satfinite.e4m3x2": (7, 8),
    "elect.sync": (8, 0),
    "ex2.approx": (1, 4),
    "fence.acq_rel": (6, 0),
    "fence.mbarrier_init": (8, 0),
    "fence.proxy.async": (8, 0),
    "fence.proxy.tensormap": (8, 3),
    "griddepcontrol": (7, 8),
    "ld.acquire": (6, 0),
    "ld.global": (1, 0),
    "ld.global.nc": (3, 1),
    "ld.relaxed": (6, 0),
    "ld.shared": (1, 0),
    "ldmatrix": (6, 5),
    "lop3": (4, 3),
    "mapa": (7, 8),
    "max.NaN": (7, 0),
    "mbarrier.arrive": (7, 1),  # with _ for its result
    "mbarrier.arrive.expect_tx": (8, 0),
    "mbarrier.init": (7, 0),
    "mbarrier.try_wait": (7, 8),
    "mma.sync.aligned.m16n8k16": (7, 0),
    "mma.sync.aligned.m16n8k32": (7, 0),
    "mov": (1, 0),
    "movmatrix": (7, 8),
    "prmt": (2, 0),
    "rcp.approx": (1, 4),
    "red.release": (6, 0),
    "selp": (1, 0),
    "setmaxnreg": (8, 0),
    "setp": (1, 0),
    "st.global": (1, 0),
    "st.release": (6, 0),
    "st.shared": (1, 0),
    "stmatrix": (7, 8),
    "tensormap.cp_fenceproxy": (8, 3),
    "tensormap.replace": (8, 3),
    "wgmma.commit_group": (8, 0),
    "wgmma.fence": (8, 0),
    "wgmma.mma_async": (8, 0),
    "wgmma.wait_group": (8, 0),
}
# Part of an instruction -> the first PTX ISA that has it, whatever the instruction.
FIRST_PTX_ISA_OF_QUALIFIER = {"::cta": (7, 8), "::cluster": (7, 8)}

# nvcc's option -> the first CUDA release with it; 11.0 stands for all before it.
FIRST_NVCC = {
    "--compress-mode=size": (12, 8),
    "-DFUSED_MOE_DEBUG": (11, 0),
    "-Icsrc": (11, 0),
    "-O3": (11, 0),
    "-Werror=all-warnings": (11, 0),
    "-Xcompiler=-fPIC,-fvisibility=hidden": (11, 0),
    "-gencode=arch=compute_80,code=compute_80": (11, 0),
    "-gencode=arch=compute_80,code=sm_80": (11, 0),
    "-gencode=arch=compute_90a,code=sm_90a": (12, 0),
    "-std=c++17": (11, 0),
}


@pytest.fixture
def build(monkeypatch):
    pytest.importorskip("setuptools", "77")
    monkeypatch.setenv("FUSED_MOE_WERROR", "1")
    monkeypatch.setenv("FUSED_MOE_DEBUG", "1")
    monkeypatch.chdir(ROOT)
    return SimpleNamespace(**runpy.run_path("setup.py"))


def instructions_in(source: str) -> set[str]:
    """The mnemonics of a file's asm statements, with their qualifiers."""
    found = set()
    # From asm's bracket to the colon of its operands, or the statement's end. Its strings are one text.
    for statement in re.findall(r'\basm\b(?: volatile)?\(\s*((?:[^":;]|"[^"]*")*)', source):
        text = "".join(re.findall(r'"([^"]*)"', statement)).replace("\\n", "\n")
        for line in re.split(r"[;\n{}]", text):
            line = re.sub(r"^\s*(\w+:(?!:))?\s*(@!?\w+)?\s*", "", line)  # a label, a predicate
            if match := re.match(r"[a-z]\w*(?:(?:\.|::)\w+)*", line):
                found.add(match[0])
    return found


def first_ptx_isa(instruction: str) -> tuple[int, int] | None:
    """None where the tables do not know it."""
    known = [name for name in FIRST_PTX_ISA if f"{instruction}.".startswith((f"{name}.", f"{name}::"))]
    if not known:
        return None
    parts = [first for part, first in FIRST_PTX_ISA_OF_QUALIFIER.items() if part in instruction]
    return max(FIRST_PTX_ISA[max(known, key=len)], *parts, (1, 0))


def test_every_instruction_is_in_the_oldest_toolkit(build):
    used = set()
    for source in sorted((ROOT / "csrc").rglob("*.cu*")):
        used |= instructions_in(source.read_text())
    assert {name for name in used if first_ptx_isa(name) is None} == set()
    newest = max(map(first_ptx_isa, used))
    assert newest == PTX_ISA[build.NVCC_OLDEST], "NVCC_OLDEST is too old, or newer than it need be"


def test_instructions_are_found():
    source = """
        asm volatile("{.reg .pred p;\\n"
                     "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n"
                     "@p bra done;\\n"
                     "done:}" ::"r"(a), "r"(b) : "memory");
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        asm volatile("{setp.ne.b32 p, " P ", 0;\\n"
                     "wgmma.mma_async.m64n" #N "k16 {" T "};}" : D)
    """
    assert instructions_in(source) == {
        "mbarrier.try_wait.parity.shared::cta.b64",
        "bra",
        "ex2.approx.ftz.f32",
        "setp.ne.b32",
        "wgmma.mma_async.m64nk16",
    }
    assert first_ptx_isa("cp.async.cg.shared.global") == (7, 0)
    assert first_ptx_isa("mbarrier.init.shared::cta.b64") == (7, 8)
    assert first_ptx_isa("fence.proxy.tensormap::generic.acquire.gpu") == (8, 3)
    assert first_ptx_isa("cp.async.new") is None


@pytest.mark.parametrize("release", [(12, 3), (12, 8), (13, 0)])
def test_every_nvcc_has_the_options_that_it_is_given(build, release):
    options = {*build.nvcc_flags(release), *build.gencode(build.asked_targets(""))}
    assert options - FIRST_NVCC.keys() == set()
    assert {option for option in options if FIRST_NVCC[option] > release} == set()
    assert ("--compress-mode=size" in options) == (release >= build.NVCC_COMPRESSES)


def test_the_docs_name_the_oldest_toolkit(build):
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    named = {v for page in pages for v in re.findall(r"nvcc \(?(\d+\.\d+) or newer", page.read_text())}
    assert named == {".".join(map(str, build.NVCC_OLDEST))}
