"""What the library holds for GPUs, looked at without one: kernels, targets, local memory, instructions."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from fused_moe.ops import FACTS, HAS_CUDA_KERNELS, LIBRARY

# In nvcc's PTX targets compute_80 is called sm_80, too.
MACHINE_CODE, PTX = {"sm_80", "sm_90a"}, {"sm_80"}
# Mangled names that may keep something in local memory: float64 serves gradcheck, not speed;
# quantised weights' tiles of 64 rows have a tile's address and numbers there: four consumers have few;
# the down GEMM of 8 bits by rows has the thread's number there, which it reads a few times in a tile.
MAY_SPILL = re.compile(
    r"I(NS_8SimtTileI)?d[EL]|15QuantizedConfig.*6HeightE1E|14EightBitConfig.*8ScalesOfE1ELNS\d_4SideE1E"
)
SM80, SM90 = "4sm80", "4sm90"  # namespaces, mangled
# GEMM -> warpgroups of its sm_90 kernel, whose threads' registers setmaxnreg deals out anew.
GEMMS = {"grouped_mm_kernel": 3, "up_gate_kernel": 3, "down_dgrad_kernel": 4, "wgrad_kernel": 3}
# Those of quantised weights: dequantizers by dtype; those of a second packing are by column. For each Height:
# registers at launch, wgmma's N, and for each N the wgmmas that go on and those that are waited for.
QUANTIZED_GEMMS = ("quantized_mm_kernel", "quantized_up_gate_kernel")
DEQUANTIZERS, COLUMN_DEQUANTIZERS = {"__nv_bfloat16": 5, "__half": 2}, {"__nv_bfloat16": 4, "__half": 1}
TOGETHER_REGISTERS = 80  # at launch, of both sides in one launch
HEIGHTS = {
    "6HeightE0E": (80, (), None),
    "6HeightE1E": (96, (32, 48, 64), (16, 2)),
    "6HeightE2E": (168, (64, 128), (16, 4)),
    "6HeightE3E": (168, (64, 128, 256), (16, 4)),
}
# up_gate's kernels by Height: with h and the addend, and without them. fp16's few rows have the former alone.
UP_KINDS = {"6HeightE0E": 2, "6HeightE1E": 1, "6HeightE2E": 2, "6HeightE3E": 1}
# int4 in bf16 with scales of another dtype has no tall tiles, and of up_gate one kernel for each Height.
OTHER_SCALES = re.compile(r"4CodeE\dELb1ELb0ELb1E")
BY_COLUMN, COLUMN_HEIGHT = re.compile(r"4CodeE\dELb\dELb1E"), "6HeightE2E"
# The same of the sm80 tier, which reads published codes: by rows of a tile, registers at most, for the CTAs
# of an SM.
SM80_QUANTIZED = ("quantized_mm_kernel", "quantized_up_gate_kernel")
SM80_DEQUANTIZERS, SM80_REGISTERS = 5, {"16": 65536 // (5 * 128), "64": 65536 // (3 * 128)}
DTYPES = ("__nv_bfloat16", "__half")
CONTIGUOUS_WGRAD = re.compile(r"WgradConfigI[^L]*Lb0E")  # without GATHER
LIBRARY_FACTS = ("cuda_calls", "cuda_device", "cuda_problem", "cuda_reset", "facts")
PLANNERS = (
    "default_order",
    "next_tile",
    "private_plan",
    "share_tiles",
    "tile_schedule",
    "wgrad_tiles",
    "work_tiles",
)
HAVE_NO_CUDA_KERNEL = {f"fused_moe::{name}" for name in LIBRARY_FACTS + PLANNERS}
TOOLS = Path(__file__).parents[1] / "tools" / "sass.py"


@pytest.fixture(scope="module")
def sass():
    """tools/sass.py, if its tools are installed."""
    if not TOOLS.exists():
        pytest.skip("not in a checkout")
    spec = importlib.util.spec_from_file_location("sass", TOOLS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.find_cuobjdump() is None:
        pytest.skip(module.MISSING)
    return module


def is_of(kernel: str, mangled: str) -> bool:
    return f"{len(kernel)}{kernel}" in mangled


def is_looked_at(mangled: str) -> bool:
    """Whether a test below asks for the kernel's instructions."""
    of_sm90 = (*GEMMS, *QUANTIZED_GEMMS, *EIGHT_BIT_GEMMS, *FP8_TRAINING, *ROUTER_GEMMS)
    if SM90 in mangled and any(is_of(kernel, mangled) for kernel in of_sm90):
        return True
    if is_of("experts_kernel", mangled) and "11Dequantizer" in mangled:
        return True
    of_sm80 = any(is_of(kernel, mangled) for kernel in (*GEMMS, *SM80_QUANTIZED))
    return SM80 in mangled and of_sm80 and any(dtype in mangled for dtype in DTYPES)


@pytest.fixture(scope="module")
def instructions(sass, tmp_path_factory):
    """instructions(arch) -> {kernel: counts}, as of sass.instructions. It takes 20 s: one process of
    pytest-xdist does it for all, in the folder that they share."""

    @cache
    def read(arch):
        folder = tmp_path_factory.getbasetemp()
        folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        with (folder / f"{arch}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (text := file.read()):
                names = [name for a, name in sass.resources(LIBRARY) if a == arch and is_looked_at(name)]
                text = json.dumps(sass.instructions(LIBRARY, arch, names))
                file.write(text)
        return json.loads(text)

    return read


@pytest.fixture(autouse=True)
def cuda_kernels(cpu, request):
    if not HAS_CUDA_KERNELS and request.node.originalname != "test_the_checks_above_see_what_they_look_for":
        pytest.skip("this build has no CUDA kernels")
    if FACTS["build"]["gpu_targets"] not in ("none", "sm_80 compute_80 sm_90a"):
        pytest.skip("FUSED_MOE_ARCHS left GPU targets out of this build")
    if FACTS["build"]["debug"] == "yes":
        pytest.skip("a debug build: its waits print, for which kernels spill and wgmma is serialised")


@pytest.mark.quick
def test_every_operator_has_a_cuda_kernel():
    """Every operator of the schema list, but the library's facts and the planners of pictures."""
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fused_moe::")}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert {n for n in names if not has_kernel(n, "CUDA")} == HAVE_NO_CUDA_KERNEL
    assert {n for n in names if not has_kernel(n, "CPU")} == HAVE_NO_CUDA_KERNEL


@pytest.mark.quick
def test_targets(sass):
    """Machine code of both tiers, and PTX for the GPUs that come after them."""
    assert sass.targets(LIBRARY) == (MACHINE_CODE, PTX)


def test_no_kernel_spills(sass):
    """No kernel keeps registers or arrays in local memory, which is device memory."""
    ours = {key: used for key, used in sass.resources(LIBRARY).items() if "fused_moe" in key[1]}
    assert {arch for arch, _ in ours} == MACHINE_CODE
    spilling = {key: used for key, used in ours.items() if used["STACK"] or used["LOCAL"]}
    assert {key: used for key, used in spilling.items() if not MAY_SPILL.search(key[1])} == {}


def test_static_shared_memory_beside_dynamic(sass):
    """A launch asks for permission to use more than 48 KiB in all where its dynamic part is above 16
    (launch.cuh). scatter_kernel is the one with both; it refused 303 to 384 experts once."""
    sizes = [used["SHARED"] for (_, n), used in sass.resources(LIBRARY).items() if "14scatter_kernel" in n]
    assert len(sizes) == len(MACHINE_CODE)
    assert 0 < min(sizes) <= max(sizes) <= 32 * 1024


@pytest.mark.parametrize("arch", sorted(MACHINE_CODE))
def test_sm80_gemms_run_on_the_tensor_cores(instructions, arch):
    """Both half-precision dtypes of every GEMM: mma fed by cp.async and ldmatrix, and results stored 16
    bytes at a time, which nvcc has been seen to take apart."""
    kernels = instructions(arch)
    for gemm in GEMMS:
        for dtype in DTYPES:
            mine = [used for n, used in kernels.items() if SM80 in n and is_of(gemm, n) and dtype in n]
            tensor_cores = [used for used in mine if "HMMA" in used]
            assert tensor_cores and all("LDSM" in used for used in tensor_cores), f"{gemm}, {dtype}"
            taken_apart = [used for used in tensor_cores if "STG.E.128" not in used]
            assert not taken_apart, f"{gemm}, {dtype}: stores taken apart"
            assert any("LDGSTS" in used for used in tensor_cores), f"{gemm}, {dtype}: no cp.async"


@pytest.mark.parametrize("arch", sorted(MACHINE_CODE))
def test_sm80_gemms_of_quantized_weights(sass, instructions, arch):
    """For every format and dtype, in tiles of 16 and of 64 rows: mma on codes that cp.async loads and that
    warps dequantise in registers; no parameter loaded again, no array in memory."""
    kernels = instructions(arch)
    registers = {n: used["REG"] for (a, n), used in sass.resources(LIBRARY).items() if a == arch}
    for gemm, dtype, rows in product(SM80_QUANTIZED, DTYPES, SM80_REGISTERS):
        height = f"ELi{rows}EEE"
        mine = [n for n in kernels if SM80 in n and is_of(gemm, n) and dtype in n and height in n]
        assert len(mine) == SM80_DEQUANTIZERS, f"{gemm}, {dtype}, {rows}"
        for name in mine:
            missing = {"HMMA", "LDSM", "LDS", "LDGSTS", "STG.E.128"} - kernels[name].keys()
            assert not missing, f"{name}: no {missing}"
            assert not {"LD", "ST", "LDL", "STL"} & kernels[name].keys(), name
            assert registers[name] <= SM80_REGISTERS[rows], name


# Tiles of few rows: rows, subtiles
FEW_ROWS = re.compile(r"13FewRowsConfigI.*?Lb\dELi(?P<rows>\d+)ELi(?P<subtiles>\d+)E")
FEW_ROWS_GEMMS = ("grouped_mm_kernel", "up_gate_kernel")


@pytest.mark.quick
def test_sm90_gemms_exist(sass):
    """For sm_90a alone, in both half-precision dtypes and with weights dense either way, with all registers
    that a launch of its threads may have."""
    ours = {key: used for key, used in sass.resources(LIBRARY).items() if SM90 in key[1]}
    assert {arch for arch, _ in ours} == {"sm_90a"}
    for gemm, warpgroups in GEMMS.items():
        for dtype in DTYPES:
            mine = {n: used for (_, n), used in ours.items() if is_of(gemm, n) and dtype in n}
            if gemm == "wgrad_kernel":  # gathering or not, float32 or its own dtype, transposed or not
                assert len(mine) == 8, dtype
            else:
                majors = {int(re.search(r"5MajorE(\d)E", n)[1]) for n in mine}
                assert majors == {0, 1}, f"{gemm}, {dtype}"
            registers = 65536 // (warpgroups * 128) // 8 * 8
            found = {used["REG"] for name, used in mine.items() if not FEW_ROWS.search(name)}
            assert found == {registers}, f"{gemm}, {dtype}"
            few = [used["REG"] for name, used in mine.items() if FEW_ROWS.search(name)]
            assert bool(few) == (gemm in FEW_ROWS_GEMMS) and max(few, default=0) <= 128, f"{gemm}, {dtype}"


def sm90_gemms(instructions, gemms=GEMMS) -> dict:
    kernels = instructions("sm_90a")
    mine = {n: used for n, used in kernels.items() if SM90 in n and any(is_of(gemm, n) for gemm in gemms)}
    assert mine
    return mine


def test_gemms_of_quantised_weights(sass, instructions):
    """For every format, dtype and number of rows: warps' own MMAs for up to 16 rows, and where more may come
    wgmma, fed by TMA; no parameter loaded again, and no wgmma waited for but a subtile's last of a stage."""
    kernels = sm90_gemms(instructions, QUANTIZED_GEMMS)
    registers = {n: used["REG"] for (_, n), used in sass.resources(LIBRARY).items()}
    for gemm, (dtype, dequantizers), height in product(QUANTIZED_GEMMS, DEQUANTIZERS.items(), HEIGHTS):
        mine = [n for n in kernels if is_of(gemm, n) and dtype in n and height in n]
        others = [n for n in mine if OTHER_SCALES.search(n)]
        assert len(others) == (dtype == "__nv_bfloat16" and height != "6HeightE3E"), f"{gemm}, {height}"
        by_column = [n for n in mine if BY_COLUMN.search(n)]
        has_columns = gemm == "quantized_mm_kernel" and height == COLUMN_HEIGHT
        expected = COLUMN_DEQUANTIZERS[dtype] if has_columns else 0
        found = len(by_column), len(mine) - len(by_column) - len(others)
        kinds = UP_KINDS[height] if gemm == "quantized_up_gate_kernel" else 1
        kinds = 1 if dtype == "__half" and height == "6HeightE0E" else kinds
        assert found == (expected, kinds * dequantizers), f"{gemm}, {dtype}, {height}"
        launched, widths, expected = HEIGHTS[height]
        assert {registers[n] for n in mine} == {launched}  # with fewer, setmaxnreg would wait forever
        for name in mine:
            used = kernels[name]
            missing = {"HMMA", "UTMALDG", "SYNCS", "USETMAXREG"} - used.keys()
            assert not missing, f"{name}: no {missing}"
            assert ("HGMMA" in used) == bool(widths), name
            assert not {"LD", "ST"} & used.keys(), name
            assert ("LDGSTS" in used) == ("up_gate" in name), name
            for width in widths:
                wgmmas = {i: count for i, count in used.items() if i.startswith(f"HGMMA.64x{width}x16")}
                waited = sum(count for i, count in wgmmas.items() if i.endswith(" gsb0"))
                # the first stage and the others; gsb0's are counted by both names
                assert (sum(wgmmas.values()) - waited, waited) == expected, f"{name}, {width} wide"


def test_both_sides_in_one_launch(sass, instructions):
    """With quantised weights, for every dequantizer but other scales': warps' own MMAs, fed by TMA and by
    gathers, without a spill, in the registers that setmaxnreg deals out."""
    kernels = sm90_gemms(instructions, ("experts_kernel",))
    resources = {n: used for (_, n), used in sass.resources(LIBRARY).items()}
    for dtype, dequantizers in DEQUANTIZERS.items():
        mine = [n for n in kernels if "11Dequantizer" in n and dtype in n]
        assert len(mine) == dequantizers, dtype
        for name in mine:
            assert resources[name]["REG"] == TOGETHER_REGISTERS and not resources[name]["STACK"], name
            missing = {"HMMA", "UTMALDG", "LDGSTS", "SYNCS", "USETMAXREG"} - kernels[name].keys()
            assert not missing and not {"LD", "ST", "HGMMA"} & kernels[name].keys(), f"{name}: no {missing}"


# GEMMs of 8 bits on both operands: (scales of blocks or of rows, whether rows are few) -> wgmma's N.
EIGHT_BIT_GEMMS = {"eight_bit_up_gate_kernel": 2, "eight_bit_mm_kernel": 1}  # gated or not
EIGHT_BIT = re.compile(
    r"EightBit(?:TrainingConfig|(?P<few>Few)?ConfigI(?P<code>13__nv_fp8_e4m3|a)L.*?ScalesOfE(?P<by_rows>\d))"
)
EIGHT_BIT_WIDTHS = {
    ("0", False): (128,),
    ("1", False): (256,),
    ("0", True): (8, 16),
    ("1", True): (8, 16, 32, 64),
}


def test_gemms_of_eight_bits(instructions):
    """For e4m3 in blocks, and e4m3 and int8 by rows, in full tiles and in those of few rows: wgmma of 8-bit
    operands fed by TMA, as the other GEMMs; no parameter loaded again, and no wgmma waited for but the
    last of a k-tile. FP8 training has one more of each, in blocks: an up_gate that keeps h, and the GEMM of
    dout, whose rows have one scale."""
    kernels = sm90_gemms(instructions, EIGHT_BIT_GEMMS)
    for gemm, kinds in EIGHT_BIT_GEMMS.items():
        mine = {n: used for n, used in kernels.items() if is_of(gemm, n)}
        few_of_blocks = 2 if gemm == "eight_bit_up_gate_kernel" else 1  # tiles of 16 rows and of 64
        assert len(mine) == kinds * (1 + few_of_blocks + 2 * 2 + 1), gemm
        for name, used in mine.items():
            found = EIGHT_BIT.search(name)
            few, mma = bool(found["few"]), "IGMMA" if found["code"] == "a" else "QGMMA"
            missing = {mma, "UTMALDG", "SYNCS"} - used.keys()
            assert not missing, f"{name}: no {missing}"
            assert not {"LD", "ST", "HMMA"} & used.keys(), name
            assert ("USETMAXREG" in used) == ("UTMASTG" in used) == (not few), name
            for width in EIGHT_BIT_WIDTHS[found["by_rows"] or "0", few]:
                wgmmas = {i: count for i, count in used.items() if i.startswith(f"{mma}.64x{width}x32")}
                waited = sum(count for i, count in wgmmas.items() if i.endswith(" gsb0"))
                free = sum(wgmmas.values()) - 2 * waited
                assert free >= 2 * waited > 0, f"{name}, {width} wide: {free} go on, {waited} are waited for"


TO_E4M3 = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
# Kernels of FP8 training alone: how many, the most registers for the CTAs of an SM, what they have.
FP8_TRAINING = {
    "eight_bit_wgrad_kernel": (2, 168, {"QGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "LDGSTS"}),
    "quantize_dh_kernel": (2, 112, {"UTMALDG", "SYNCS", "LDS.128", "STS.128", "STG.E.128", TO_E4M3}),
    "quantize_weight_kernel": (4, 128, {"LDS.128", "STG.E.128", TO_E4M3}),
    "transpose_codes_kernel": (1, 40, {"LDG.E.128", "LDS.128", "STG.E.128"}),
}


def test_fp8_training(sass, instructions):
    """Weight gradients: wgmma of e4m3 as the other GEMMs, both operands and dw by TMA, and additions to f32
    alone. What makes codes reads and writes 16 bytes at a time, and loads no parameter again."""
    kernels = sm90_gemms(instructions, FP8_TRAINING)
    registers = {n: used["REG"] for (_, n), used in sass.resources(LIBRARY).items()}
    for kernel, (count, most, expected) in FP8_TRAINING.items():
        mine = {n: used for n, used in kernels.items() if is_of(kernel, n)}
        assert len(mine) == count, kernel
        for name, used in mine.items():
            assert not expected - used.keys(), f"{name}: no {expected - used.keys()}"
            assert not {"LD", "ST", "LDL", "STL"} & used.keys(), name
            assert registers[name] <= most, name
    weights = [used for n, used in kernels.items() if is_of("quantize_weight_kernel", n)]
    assert sum("LDG.E.128" in used for used in weights) == 2  # the others take weights of any strides
    gradients = {n: used for n, used in kernels.items() if is_of("eight_bit_wgrad_kernel", n)}
    assert sum("UTMAREDG" in used for used in gradients.values()) == 1
    for name, used in gradients.items():
        assert registers[name] == 65536 // (3 * 128) // 8 * 8, name
        wgmmas = {i: count for i, count in used.items() if i.startswith("QGMMA.64x128x32")}
        waited = sum(count for i, count in wgmmas.items() if i.endswith(" gsb0"))
        free = sum(wgmmas.values()) - 2 * waited
        assert free >= 2 * waited > 0, f"{name}: {free} go on, {waited} are waited for"


ROUTER_GEMMS = {"router_logits_kernel": 5, "router_dgrad_kernel": 1}  # and how many of each dtype


def test_the_router_runs_on_wgmma_and_tma(instructions):
    """Its GEMM, with and without clusters, and its gradient, in both half-precision dtypes."""
    kernels = instructions("sm_90a")
    for (kernel, variants), dtype in product(ROUTER_GEMMS.items(), DTYPES):
        mine = [used for n, used in kernels.items() if SM90 in n and is_of(kernel, n) and dtype in n]
        assert len(mine) == variants, f"{kernel}, {dtype}"
        for used in mine:
            assert {"HGMMA", "UTMALDG", "SYNCS"} <= used.keys(), f"{kernel}, {dtype}"


def test_sm90_gemms_run_on_wgmma_and_tma(instructions):
    """wgmma fed by TMA through mbarriers, results stored by TMA, but down_dgrad's by its epilogue warps;
    all but grouped_mm and the wgrad of contiguous rows gather rows by cp.async. Tiles of few rows have
    ordinary stores, and with two CTAs on an SM registers are enough."""
    for name, used in sm90_gemms(instructions).items():
        few = bool(FEW_ROWS.search(name))
        missing = {"HGMMA", "UTMALDG", "SYNCS"} - used.keys()
        assert not missing, f"{name}: no {missing}"
        assert ("USETMAXREG" in used) == (not few), name
        assert "HMMA" not in used, name
        assert ("UTMASTG" in used) == ("down_dgrad_kernel" not in name and not few), name
        contiguous = "grouped_mm_kernel" in name or CONTIGUOUS_WGRAD.search(name)
        assert ("LDGSTS" in used) == (not contiguous), name


def test_sm90_gemms_load_no_parameter_again(instructions):
    """No generic load or store. A parameter captured by reference is loaded by one whenever it is used, which
    took 3 to 29% of down_dgrad's time."""
    for name, used in sm90_gemms(instructions).items():
        assert not {"LD", "ST"} & used.keys(), name


def test_wgmma_is_not_serialised(instructions):
    """Where registers run short, ptxas waits for each wgmma (its warnings C7510 to C7512): all have gsb0,
    which belongs to the last one of a k-tile alone."""
    for name, used in sm90_gemms(instructions).items():
        few = FEW_ROWS.search(name)
        if "down_dgrad" in name:
            widths = (128,)
        elif "wgrad" in name:
            widths = (256,)
        elif few:
            widths = (8, 16) if few["rows"] == "16" else (16, 32, 64)
        else:
            widths = (256, *((128,) if "grouped_mm" in name else ()), 64, 32, 8)
        for width in widths:
            wgmmas = {i: count for i, count in used.items() if i.startswith(f"HGMMA.64x{width}x16")}
            waited = sum(count for i, count in wgmmas.items() if i.endswith(" gsb0"))
            free = sum(wgmmas.values()) - 2 * waited  # those waited for are counted by both names
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
struct Params { float *x; int n[8]; };
__global__ void loads_a_parameter_again(const __grid_constant__ Params p) {
    const int *n = p.n + threadIdx.x % 2;
    auto *generic = (const int *volatile *)&n;
    p.x[threadIdx.x] = **generic;
}
__global__ void keeps_an_array(float *x, int n) {
    float v[64];
    for (int i = 0; i < 64; i++) v[(i * n) & 63] = x[i];
    for (int i = 0; i < 64; i++) x[i] = v[(i + n) & 63];
}
}
"""


def test_the_checks_above_see_what_they_look_for(sass, tmp_path):
    """A library of three kernels: its targets, the one with local memory, the one with an asynchronous copy,
    the one with a generic load."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    (tmp_path / "two.cu").write_text(SOURCE)
    library = tmp_path / "two.so"
    code = ["arch=compute_80,code=sm_80", "arch=compute_80,code=compute_80", "arch=compute_90a,code=sm_90a"]
    flags = ["-O3", "-shared", "-Xcompiler=-fPIC", *(f"-gencode={c}" for c in code)]
    subprocess.run([nvcc, *flags, "-o", library, tmp_path / "two.cu"], check=True)
    assert sass.targets(library) == (MACHINE_CODE, PTX)
    used = sass.resources(library)
    assert {arch for arch, _ in used} == MACHINE_CODE
    for (_, name), amounts in used.items():
        assert bool(amounts["STACK"]) == ("keeps_an_array" in name)
    for arch in MACHINE_CODE:
        found = sass.instructions(library, arch, [name for a, name in used if a == arch])
        assert {n for n, used in found.items() if "LDGSTS" in used} == {n for n in found if "copies" in n}
        assert {n for n, used in found.items() if "LD" in used} == {n for n in found if "parameter" in n}
