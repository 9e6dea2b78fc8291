"""bench_eight_bits.py and its peers, on the CPU."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fused_moe

SMALL = "24,8,2,128,128"
E4M3 = torch.float8_e4m3fn
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="not in a checkout")


# --- peers --------------------------------------------------------------------------------------------


@pytest.fixture
def experts(load):
    """x, scores, ids, float weights, and the output."""
    torch.manual_seed(0)
    load("common")
    x = torch.randn(24, 128, dtype=torch.bfloat16)
    weights = [torch.randn(8, 128, 128, dtype=torch.bfloat16) / 128**0.5 for _ in range(3)]
    scores, ids = fused_moe.route(torch.randn(24, 8), 2, route_norm=True)
    ids[ids == 5] = 6  # an expert without rows
    return x, scores, ids, weights, fused_moe.fused_experts(x, *weights, scores, ids)


def by_groups(codes, scales, weight, weight_scales, experts):
    """(R, N) in float32, of the rows' experts; -1 leaves NaN."""
    out = torch.full((codes.size(0), weight.size(1)), torch.nan)
    for e in range(weight.size(0)):
        rows = (experts == e).nonzero().squeeze(1)
        w = weight[e].float() * weight_scales[e]
        out[rows] = (codes[rows].float() * scales[rows]) @ w.T
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


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("name, format", (("torch-gemms", "fp8"), ("deepgemm-gemms", "fp8_block")))
def test_what_grouped_gemms_are_given(load, experts, monkeypatch, name, format, gated):
    peers, bench = load("eight_bit_peers"), load("bench_eight_bits")
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm, raising=False)
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm_module(16))
    x, scores, ids, weights, right = experts
    if not gated:
        weights[2] = None
        right = fused_moe.fused_experts(x, *weights, scores, ids)
    layer = tuple(None if w is None else fused_moe.quantize(w, format) for w in weights)
    run_gemms, out = peers.prepared(peers.EIGHT_BIT_PEERS[name], layer, x, scores, ids, "silu")
    assert 1e-3 < bench.beside(right, out, name, 0.1) < 0.1
    h, y = run_gemms()
    assert h.size(1) == 128 * (1 + gated) and y.size(1) == 128
    with pytest.raises(SystemExit, match="wrong before it is fast"):
        bench.beside(right, 1.2 * out, name, 0.1)


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


def test_grouped_gemms_that_cannot_run(load, experts, monkeypatch):
    peers = load("eight_bit_peers")
    x, scores, ids, weights, _ = experts
    for name in peers.DEEP_GEMM:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(torch, "_scaled_grouped_mm", raising=False)
    for name, format, found in (
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
    ):
        layer = tuple(fused_moe.quantize(w, format) for w in weights)
        with pytest.raises(load("peers").Unavailable, match=found):
            peers.prepared(peers.EIGHT_BIT_PEERS[name], layer, x, scores, ids, "silu")


# --- prefill ------------------------------------------------------------------------------------------

USUAL = ["fp8_block", "fp8_block, compute fp8", "fp8, compute fp8", "int8, compute int8"]
USUAL += ["int8, compute int8_smooth"]


@pytest.mark.parametrize("shape, gated", ((SMALL, True), ("nemotron3-nano", False)))
def test_prefill_in_8_bits(load, run, monkeypatch, tmp_path, capsys, shape, gated):
    """A record of float weights and of each way, all of one run, with the shape's activation."""
    common = load("common")
    sizes = common.Sizes(24, 8, 2, 128, 128)
    monkeypatch.setattr(common, "layer_sizes", lambda name: sizes)
    records = run("bench_eight_bits", "--shape", shape, "--dtype", "bf16", "--peers", "vllm,torch-gemms")
    assert [r["what"] for r in records] == ["experts", *USUAL]
    for r in records:
        assert set(r) >= {*common.FIELDS} and (r["bench"], r["tokens"], r["mode"]) == (
            "eight_bits",
            24,
            "eager",
        )
        assert r["time_us"] > 0 and r["published_tflops"] is None
        flops = 2 * (2 + gated) * 24 * 2 * 128 * 128
        assert r["tflops"] == pytest.approx(flops / r["time_us"] / 1e6, rel=0.05, abs=1e-4)
        assert (r["input_dtype"], r["output_dtype"]) == ("bf16", "bf16")
    for r in records[1:]:
        assert r["ratio_to_bf16"] == pytest.approx(records[0]["time_us"] / r["time_us"], rel=0.05)
        assert ("ratio_to_codes" in r) == (r["what"] == "fp8_block, compute fp8")
        assert r["scale_dtype"] == "fp32" and r["peer_errors"] == {} and 8 <= r["bits_per_weight"] < 9
        assert r["max_rel_error"] == r["error_to_float"]
        assert (3e-3 if r["weight_format"] == "int8" else 2e-2) < r["error_to_float"] < 0.1
    printed = capsys.readouterr().out
    for name in ("vllm", "torch-gemms"):
        assert f"{name} is left out: {name}: expected a GPU" in printed
    load("table").main([str(tmp_path / "bench_eight_bits.json")])
    assert "against bf16" in capsys.readouterr().out


def test_ways_that_flags_name(run):
    flags = ("--weight-format", "fp8_block", "--compute", "fp8", "--compute", "codes", "--tokens", "3,5")
    records = run("bench_eight_bits", "--shape", SMALL, "--input-dtype", "fp16", *flags)
    names = ["experts", "fp8_block, compute fp8", "fp8_block"]
    assert [(r["tokens"], r["what"]) for r in records] == [(T, name) for T in (3, 5) for name in names]
    assert {r["dtype"] for r in records} == {"fp16"}
    assert "ratio_to_fp16" in records[1] and "ratio_to_codes" in records[1]
    flags = ("--scale-dtype", "e8m0", "--weight-format", "fp8_block", "--output-dtype", "bf16")
    _, r = run("bench_eight_bits", "--shape", SMALL, "--dtype", "bf16", *flags)
    assert (r["what"], r["scale_dtype"]) == ("fp8_block, compute fp8, powers of two", "e8m0")


@pytest.mark.parametrize(
    "flags, found",
    (
        (
            "--weight-format int8 --compute fp8",
            "fp8_block fp8 e8m0; fp8 fp8 fp32.*int8 int8_smooth fp32, found int8 fp8 any",
        ),
        ("--scale-dtype e8m0 --compute codes", "found any codes e8m0"),
        ("--dtype bf16 --output-dtype fp32", "fp32 fp32; bf16 bf16; fp16 fp16, found bf16 fp32"),
        ("--compute int4", "invalid choice: 'int4'"),
        ("--peers marlin", "expected some of vllm, torch-gemms, deepgemm-gemms, found marlin"),
    ),
)
def test_wrong_flags_of_eight_bits(run, capsys, flags, found):
    with pytest.raises(SystemExit) as stop:
        run("bench_eight_bits", "--shape", SMALL, *flags.split())
    assert re.search(found, f"{stop.value} {capsys.readouterr().err}")


def test_widths_that_8_bits_do_not_take(run, capsys):
    names = ["experts", "fp8_block"]
    assert [r["what"] for r in run("bench_eight_bits", "--shape", "3,4,2,40,32", "--dtype", "bf16")] == names
    said = "int8, compute int8 is left out: expected widths that are multiples of 16, found D = 40, F = 32"
    assert said in capsys.readouterr().out


def test_a_published_rate_stands_beside_ours(load):
    bench, common = load("bench_eight_bits"), load("common")
    for shape, rate in (("8192,32,6,4096,2048", 757), ("dsv4-pro-8ranks", 818), ("olmoe", None)):
        sizes = common.layer_sizes(shape)
        assert bench.PUBLISHED.get((sizes.num_tokens, *sizes[2:])) == rate


def test_the_floor_of_8_bits(load):
    """Half of 16 bits' time at twice the rate; half of the bytes but for x and y."""
    floors, common = load("floors"), load("common")
    sizes, counts = common.Sizes(512, 4, 2, 256, 128), [256] * 4
    rest = (common.USUAL, counts, 1 << 62)
    moved = floors.bytes_moved(sizes, 2, backward=False)
    combine = moved["unpermute"] + moved["schedule"]
    # 2 TKD(2F) and 2 TKFD: tiles are whole
    flops = 6 * 1024 * 256 * 128
    assert floors.experts_us(sizes, *rest, (2, 2), 1.0, 1e30) == pytest.approx(flops)
    assert floors.experts_us(sizes, *rest, (1, 2), 2.0, 1e30) == pytest.approx(flops / 2)
    x, w, a, y = 512 * 256, 4 * 3 * 256 * 128, 1024 * 128, 1024 * 256
    assert floors.experts_us(sizes, *rest, (2, 2), 1e30, 1.0) == 2 * (x + w + 2 * a + y) + combine
    assert floors.experts_us(sizes, *rest, (1, 2), 1e30, 1.0) == (x + w + 2 * a + 2 * y) + 3 * x + combine


def test_a_wrong_way_is_not_timed(load, run, monkeypatch):
    bench = load("bench_quantised")
    right = bench.Variant.layer

    def wrong(self, weights, x=None):
        layer = right(self, weights, x)
        if self.compute == "int8":
            layer[1].weight_scale.mul_(1.1)
        return layer

    monkeypatch.setattr(bench.Variant, "layer", wrong)
    with pytest.raises(SystemExit, match="int8, compute int8: wrong before it is fast: 1.0e-01"):
        run(
            "bench_eight_bits",
            "--shape",
            SMALL,
            "--dtype",
            "bf16",
            "--weight-format",
            "int8",
            "--compute",
            "int8",
        )
