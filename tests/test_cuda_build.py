"""What the library holds for GPUs, looked at without one: kernels, targets, local memory, instructions."""

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from fused_moe.ops import HAS_CUDA_KERNELS, LIBRARY

# In nvcc's PTX targets compute_80 is called sm_80, too.
MACHINE_CODE, PTX = {"sm_80", "sm_90a"}, {"sm_80"}
# Mangled names that may keep something in local memory: float64 is there for gradcheck, not for speed.
MAY_SPILL = re.compile(r"I(NS_8SimtTileI)?d[EL]")
PRODUCTS = ("grouped_mm", "wgrad", "up_gate", "down_dgrad")
# Product -> its warpgroups. What each of their threads has of 65536, in eights, setmaxnreg deals out anew.
HOPPER_PRODUCTS = {
    "hopper_grouped_mm_kernel": 3,
    "hopper_up_gate_kernel": 3,
    "hopper_down_dgrad_kernel": 4,
    "hopper_wgrad_kernel": 3,
}


def needs_cuda_kernels() -> None:
    if not HAS_CUDA_KERNELS:
        pytest.skip("this build has no CUDA kernels")


def find_cuobjdump() -> str | None:
    """From the toolkit, or from PyPI's nvidia-cuda-cuobjdump, which puts it beside its nvdisasm."""
    folders = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin"))
    for path in (None, "/usr/local/cuda/bin", *map(str, folders)):
        found = shutil.which("cuobjdump", path=path)
        # --dump-sass runs nvdisasm
        if found and (shutil.which("nvdisasm") or (Path(found).parent / "nvdisasm").exists()):
            return found
    return None


def cuobjdump(library, *options: str) -> str:
    """What cuobjdump prints of a library."""
    tool = find_cuobjdump()
    if tool is None:
        pytest.skip("needs cuobjdump and nvdisasm: a CUDA toolkit, or pip install nvidia-cuda-cuobjdump")
    path = f"{Path(tool).parent}:/usr/bin:/bin"
    command = [tool, *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}).stdout


def targets(library) -> tuple[set[str], set[str]]:
    """The architectures of the machine code and of the PTX inside."""
    elf = cuobjdump(library, "--list-elf")
    ptx = cuobjdump(library, "--list-ptx")
    return (set(re.findall(r"\.(sm_\w+)\.cubin", elf)), set(re.findall(r"\.(sm_\w+)\.ptx", ptx)))


def resources(library) -> dict[tuple[str, str], dict[str, int]]:
    """{(architecture, mangled kernel): {"REG": .., "STACK": .., "SHARED": .., "LOCAL": ..}}"""
    found, arch = {}, ""
    lines = iter(cuobjdump(library, "--dump-resource-usage").splitlines())
    for line in lines:
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            found[arch, match[1]] = {n: int(v) for n, v in re.findall(r"(\w+):(\d+)", next(lines))}
    return found


@cache
def instructions(library, arch: str) -> dict[str, Counter[str]]:
    """How often each mangled kernel has an instruction: by its name, such as STG, by this with what it does,
    such as STG.E.128, and by "HGMMA.. gsb0" where the SM waits for it."""
    found, current = {}, Counter()
    for line in cuobjdump(library, "--dump-sass", "--gpu-architecture", arch).splitlines():
        if match := re.match(r"\s*Function : (\w+)", line):
            current = found.setdefault(match[1], Counter())
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(([A-Z][A-Z0-9]*)[\w.]*)", line):
            current.update({*match.groups()})
            if "gsb0" in line:
                current[f"{match[1]} gsb0"] += 1
    return found


@pytest.mark.quick
def test_every_operator_has_a_cuda_kernel(cpu):
    """What the CPU tier computes, the CUDA tiers compute."""
    needs_cuda_kernels()
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fused_moe::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    on_the_cpu = {n for n in names if has_kernel(n, "CPU")}
    assert len(on_the_cpu) >= 18
    assert {n for n in on_the_cpu if not has_kernel(n, "CUDA")} == set()


@pytest.mark.quick
def test_targets(cpu):
    """Machine code of both tiers, and PTX for the GPUs that come after them."""
    needs_cuda_kernels()
    assert targets(LIBRARY) == (MACHINE_CODE, PTX)


def test_no_kernel_spills(cpu):
    """No kernel keeps registers or arrays in local memory, which is device memory."""
    needs_cuda_kernels()
    ours = {key: used for key, used in resources(LIBRARY).items() if "fused_moe" in key[1]}
    assert {arch for arch, _ in ours} == MACHINE_CODE
    spilling = {key: used for key, used in ours.items() if used["STACK"] or used["LOCAL"]}
    assert {key: used for key, used in spilling.items() if not MAY_SPILL.search(key[1])} == {}


@pytest.mark.parametrize("arch", sorted(MACHINE_CODE))
def test_products_run_on_the_tensor_cores(cpu, arch):
    """Both half-precision dtypes of every product: matrix instructions fed by cp.async and ldmatrix, and
    results stored 16 bytes at a time, which nvcc has been seen to take apart."""
    needs_cuda_kernels()
    kernels = instructions(LIBRARY, arch)
    for product in PRODUCTS:
        for dtype in ("__nv_bfloat16", "__half"):
            mine = [used for n, used in kernels.items() if f"{product}_kernel" in n and dtype in n]
            matrix = [used for used in mine if "HMMA" in used]
            assert matrix and all("LDSM" in used for used in matrix), f"{product}, {dtype}"
            assert all("STG.E.128" in used for used in matrix), f"{product}, {dtype}: stores taken apart"
            assert any("LDGSTS" in used for used in matrix), f"{product}, {dtype}: no asynchronous copy"


@pytest.mark.quick
def test_hopper_kernels_are_there(cpu):
    """For sm_90a alone, in both half-precision dtypes and with weights dense either way, with all registers
    that a launch of its threads may have."""
    needs_cuda_kernels()
    ours = {key: used for key, used in resources(LIBRARY).items() if "hopper_" in key[1]}
    assert {arch for arch, _ in ours} == {"sm_90a"}
    for product, warpgroups in HOPPER_PRODUCTS.items():
        for dtype in ("__nv_bfloat16", "__half"):
            mine = {n: used for (_, n), used in ours.items() if product in n and dtype in n}
            if product == "hopper_wgrad_kernel":  # gathering, as the weight lies, in its dtype: or not
                assert len(mine) == 8, dtype
            else:
                majors = {int(re.search(r"5MajorE(\d)E", n)[1]) for n in mine}
                assert majors == {0, 1}, f"{product}, {dtype}"
            registers = 65536 // (warpgroups * 128) // 8 * 8
            assert {used["REG"] for used in mine.values()} == {registers}, f"{product}, {dtype}"


def test_hopper_kernels_run_on_wgmma_and_the_copy_engine(cpu):
    """wgmma fed by TMA through mbarriers, results stored by TMA, but down_dgrad's by its finisher; all but
    grouped_mm and the wgrad of rows that lie ready gather rows by cp.async."""
    needs_cuda_kernels()
    kernels = instructions(LIBRARY, "sm_90a")
    for product in HOPPER_PRODUCTS:
        mine = {n: used for n, used in kernels.items() if product in n}
        assert mine, product
        for name, used in mine.items():
            missing = {"HGMMA", "UTMALDG", "SYNCS", "USETMAXREG"} - used.keys()
            assert not missing, f"{name}: no {missing}"
            assert "HMMA" not in used, name
            assert ("UTMASTG" in used) == (product != "hopper_down_dgrad_kernel"), name
            gathers = product != "hopper_grouped_mm_kernel" and not re.search(r"WgradTileI[^L]*Lb0E", name)
            assert ("LDGSTS" in used) == gathers, name


def test_products_of_hopper_kernels_are_not_serialised(cpu):
    """Where registers run short, ptxas waits for each product (its warnings C7510 to C7512): all have gsb0,
    which belongs to the last one of a step alone."""
    needs_cuda_kernels()
    kernels = instructions(LIBRARY, "sm_90a")
    mine = {n: used for n, used in kernels.items() if any(product in n for product in HOPPER_PRODUCTS)}
    assert mine
    for name, used in mine.items():
        if "down_dgrad" in name:
            widths = (128,)
        elif "wgrad" in name:
            widths = (256,)
        else:
            widths = (256, *((128,) if "grouped_mm" in name else ()), 64, 32, 8)
        for width in widths:
            products = {i: count for i, count in used.items() if i.startswith(f"HGMMA.64x{width}x16")}
            waited = sum(count for i, count in products.items() if i.endswith(" gsb0"))
            free = sum(products.values()) - 2 * waited  # those waited for are counted by both names
            assert free >= 2 * waited > 0, f"{name}, {width} wide: {free} go on, {waited} are waited for"


SOURCE = """
namespace fused_moe {
__global__ void copies(float *x) {
    __shared__ float4 s[32];
    unsigned to = (unsigned)__cvta_generic_to_shared(s + threadIdx.x);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + 4 * threadIdx.x));
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    x[threadIdx.x] = s[31 - threadIdx.x].x;
}
__global__ void keeps_an_array(float *x, int n) {
    float v[64];
    for (int i = 0; i < 64; i++) v[(i * n) & 63] = x[i];
    for (int i = 0; i < 64; i++) x[i] = v[(i + n) & 63];
}
}
"""


def test_the_checks_above_see_what_they_look_for(cpu, tmp_path):
    """A library of two kernels: its targets, the one with local memory, the one with an asynchronous copy."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    (tmp_path / "two.cu").write_text(SOURCE)
    library = tmp_path / "two.so"
    code = ["arch=compute_80,code=sm_80", "arch=compute_80,code=compute_80", "arch=compute_90a,code=sm_90a"]
    flags = ["-O3", "-shared", "-Xcompiler=-fPIC", *(f"-gencode={c}" for c in code)]
    subprocess.run([nvcc, *flags, "-o", library, tmp_path / "two.cu"], check=True)
    assert targets(library) == (MACHINE_CODE, PTX)
    used = resources(library)
    assert {arch for arch, _ in used} == MACHINE_CODE
    for (_, name), amounts in used.items():
        assert bool(amounts["STACK"]) == ("keeps_an_array" in name)
    for arch in MACHINE_CODE:
        found = instructions(library, arch)
        assert {n for n, used in found.items() if "LDGSTS" in used} == {n for n in found if "copies" in n}
