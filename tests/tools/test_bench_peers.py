"""What benchmarks/ give other libraries: codes, scales, padding, blocks and tiles. Stand-ins compute."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fused_moe

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
E4M3 = torch.float8_e4m3fn
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="not in a checkout")

# --- grouped GEMMs of 8 bits --------------------------------------------------------------------------


def by_groups(codes, scales, weight, weight_scales, experts):
    """(R, N) in float32, of the rows' experts; -1 leaves NaN."""
    out = torch.full((codes.size(0), weight.size(1)), torch.nan)
    for e in range(weight.size(0)):
        rows = (experts == e).nonzero().squeeze(1)
        out[rows] = (codes[rows].float() * scales[rows]) @ (weight[e].float() * weight_scales[e]).T
    return out


def scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """As torch._scaled_grouped_mm of (R, k) by (E, k, N), whose rows end at offs."""
    assert a.dtype == b.dtype == E4M3 and a.is_contiguous() and b.mT.is_contiguous() and use_fast_accum
    assert scale_a.shape == a.shape[:1] and scale_b.shape == (b.size(0), b.size(2))
    assert scale_a.dtype == scale_b.dtype == torch.float32 and offs.dtype == torch.int32
    experts = torch.searchsorted(offs.long(), torch.arange(a.size(0)), right=True)
    return by_groups(a, scale_a[:, None], b.mT, scale_b[:, :, None], experts).to(out_dtype)


def deep_gemm_module(multiple: int) -> ModuleType:
    """As DeepGEMM: 1 x 128 by 128 x 128 scales, rows padded to a multiple."""

    def gemm(a, b, out, experts):
        (codes, scales), (weight, weight_scales) = a, b
        assert codes.dtype == weight.dtype == E4M3 and experts.dtype == torch.int32 and out.is_contiguous()
        assert all(len(set(part.tolist()) - {-1}) <= 1 for part in experts.split(multiple))
        assert scales.shape == (codes.size(0), codes.size(1) // 128) and scales.tag == "aligned"
        wide = weight_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        out.copy_(by_groups(codes, scales.repeat_interleave(128, 1), weight, wide, experts))

    def aligned(scales):
        scales.tag = "aligned"
        return scales

    module = ModuleType("deep_gemm")
    module.get_mk_alignment_for_contiguous_layout = lambda: multiple
    module.get_mn_major_tma_aligned_tensor = aligned
    module.m_grouped_fp8_gemm_nt_contiguous = gemm
    return module


@pytest.fixture
def experts(load):
    """x, scores, ids and float weights."""
    torch.manual_seed(0)
    x = torch.randn(24, 128, dtype=torch.bfloat16)
    weights = [torch.randn(8, 128, 128, dtype=torch.bfloat16) / 128**0.5 for _ in range(3)]
    scores, ids = fused_moe.route(torch.randn(24, 8), 2, route_norm=True)
    ids[ids == 5] = 6  # an expert without rows
    return x, scores, ids, weights


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("name, format", (("torch-gemms", "fp8"), ("deepgemm-gemms", "fp8_block")))
def test_what_grouped_gemms_are_given(load, experts, monkeypatch, name, format, gated):
    peers, bench = load("eight_bit_peers"), load("bench_eight_bits")
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm, raising=False)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_module(16))
    x, scores, ids, weights = experts
    weights[2] = weights[2] if gated else None
    right = fused_moe.fused_experts(x, *weights, scores, ids)
    layer = tuple(None if w is None else fused_moe.quantize(w, format) for w in weights)
    run_gemms, out = peers.prepared(peers.EIGHT_BIT_PEERS[name], layer, x, scores, ids, "silu")
    assert 1e-3 < bench.beside(right, out, name, 0.1) < 0.1
    assert [y.size(1) for y in run_gemms()] == [128 * (1 + gated), 128]
    with pytest.raises(SystemExit, match="wrong before it is fast"):
        bench.beside(right, 1.2 * out, name, 0.1)


@pytest.mark.parametrize(
    "name, format, said",
    (
        ("torch-gemms", "fp8_block", "expected fp8 with a scale per row, found fp8_block"),
        ("torch-gemms", "fp8", "PyTorch .* lacks"),
        (
            "deepgemm-gemms",
            "fp8",
            "expected fp8_block of widths that are multiples of 128, found fp8, D = 128",
        ),
        (
            "deepgemm-gemms",
            "fp8_block",
            "deepgemm is not installed .*deep_gemm: .*vllm.third_party.deep_gemm: ",
        ),
    ),
)
def test_grouped_gemms_that_cannot_run(load, experts, monkeypatch, name, format, said):
    peers, (x, scores, ids, weights) = load("eight_bit_peers"), experts
    for library in peers.DEEP_GEMM:
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delattr(torch, "_scaled_grouped_mm", raising=False)
    layer = tuple(fused_moe.quantize(w, format) for w in weights)
    with pytest.raises(load("peers").Unavailable, match=said):
        peers.prepared(peers.EIGHT_BIT_PEERS[name], layer, x, scores, ids, "silu")


def test_codes_of_rows(load):
    """Each block's largest becomes the largest code, and k may be no multiple of it."""
    rows = torch.randn(5, 200) * torch.logspace(-3, 3, 200)
    rows[2] = 0
    for block in (None, 128):
        codes, scales = load("eight_bit_peers").rows_of_codes(rows, block)
        assert codes.shape == rows.shape and scales.shape == (5, 2 if block else 1)
        wide = scales.repeat_interleave(block or 200, 1)[:, :200]
        assert ((codes.float() * wide - rows).abs() <= rows.abs() / 16 + wide / 512).all()
        assert (codes.float().abs().amax(1)[[0, 1, 3, 4]] == 448).all()


def test_padded_rows(load):
    there, experts = load("eight_bit_peers").padded(torch.tensor([3, 0, 5, 4], dtype=torch.int32), 4)
    assert there.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 12, 13, 14, 15]
    assert experts.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1, 3, 3, 3, 3]


# --- tiles and blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ("0.4.1", "0.6.5"))
def test_sonicmoe_chooses_from_the_tiles_that_are_said(load, monkeypatch, version):
    """With a stand-in for QuACK's tuning lists, which 0.6.5 makes when a GEMM is first called."""
    peers = load("peers")
    fields = ("tile_m", "tile_n", "pingpong", "cluster_m", "cluster_n", "swap_ab")
    every = [
        SimpleNamespace(**dict(zip(fields, values, strict=True)))
        for values in product(*2 * [(128, 192, 256)], (False, True), (1, 2), (1, 2), (False, True))
    ]
    entries = [SimpleNamespace(kwargs={"config": config}) for config in every]
    names = ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned")[: 3 if version == "0.4.1" else 1]
    tuners = {name: SimpleNamespace(configs=list(entries)) for name in names}
    quack = SimpleNamespace(gemm_interface=SimpleNamespace(**tuners))
    autotune = SimpleNamespace(get_all_configs=lambda epilogue=None: list(every))
    monkeypatch.setitem(sys.modules, "quack", quack)
    runtime = None if version == "0.4.1" else SimpleNamespace(autotune=autotune)
    monkeypatch.setitem(sys.modules, "quack.gemm_runtime", runtime)
    for _ in range(2):  # again for the next layer
        peers.restrict_tiles()
    lists = [[entry.kwargs["config"] for entry in tuner.configs] for tuner in tuners.values()]
    if version != "0.4.1":
        lists.append(autotune.get_all_configs(epilogue="gated"))
    tiles = {(128, 256, False), (256, 128, False), (256, 192, False), (128, 192, True), (128, 128, True)}
    for kept in lists:
        assert {tuple(vars(config).values()) for config in kept} == {(*tile, 2, 1, False) for tile in tiles}
        assert len(kept) == 5
    words = (
        "128x256 cooperative, 256x128 cooperative, 256x192 cooperative, 128x192 ping-pong, 128x128 ping-pong"
    )
    assert peers.tiles_in_words() == f"{words}, in clusters of 2x1"


ALIGN = """
import json, sys, torch
from moe_align import align
cases = json.load(sys.stdin)
found = [align(torch.tensor(ids, dtype=torch.int32), E, sizes) for ids, E, sizes in cases]
print(json.dumps([[[t.tolist() for t in blocks] for blocks in both] for both in found]))
"""


def test_blocks_of_one_expert(cpu):
    """Every slot occurs once, in blocks of its expert; padding of a block is past the last slot."""
    pytest.importorskip("triton")
    shapes = ((1, 8, 2), (70, 16, 3), (3, 1, 1), (600, 4, 2))
    cases = [
        (torch.rand(T, E).topk(K).indices.tolist(), E, sizes)
        for (T, E, K), sizes in product(shapes, ((8, 8), (8, 12)))
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", ALIGN]
    run = subprocess.run(command, env=env, input=json.dumps(cases), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for (ids, E, sizes), both in zip(cases, json.loads(run.stdout), strict=True):
        expert_of = torch.tensor(ids).flatten()
        for (rows, experts, num_rows), size in zip(both, sizes, strict=True):
            num_blocks = -(-expert_of.bincount(minlength=E) // size)
            right = torch.arange(E).repeat_interleave(num_blocks).tolist()
            assert num_rows == [size * len(right)] and experts[: len(right)] == right
            found, slots = rows[: num_rows[0]], len(expert_of)
            padding = num_rows[0] - slots
            assert sorted(found) == [*range(slots), *padding * [slots]]
            for row, slot in enumerate(found):
                assert slot == slots or expert_of[slot] == right[row // size]
