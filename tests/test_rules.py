"""csrc/rules.h as a table: every rule on shapes, at both sides of each bound."""

import pytest

from fused_moe import fp8
from fused_moe.quantized import computing

try:
    from fused_moe import _host
except ImportError:
    _host = None

pytestmark = pytest.mark.skipif(_host is None, reason="fused_moe._host was not built for this Python")
T_OF_128X64, T_OF_64X128, T_OF_128X128, T_OF_128X256 = range(4)  # FusedMoeRouterTile
IN_GEMM, WITH_CHOICE, BY_CLUSTER, BY_KERNELS = range(4)  # FusedMoePlanner

# Rule: {arguments: decision}. The bounds are measured: docs/lab.md.
TABLE = {
    "has_skinny_average": {(64, 1): True, (65, 1): False, (8192, 128): True, (8193, 128): False},
    "few_rows": {  # R, E: rows of a tile
        **{(1, 1): 16, (2, 1): 16, (3, 1): 64, (16, 1): 64, (17, 1): 0, (2**31, 2**27): 64},
        **{(256, 128): 16, (257, 128): 64, (2048, 128): 64, (2049, 128): 0},
    },
    "few_rows_together": {
        **{(1, 1): 16, (2, 1): 16, (3, 1): 64, (17, 1): 64, (32, 1): 64, (33, 1): 0},
        **{(256, 128): 16, (257, 128): 64, (2049, 128): 64, (4096, 128): 64, (4097, 128): 0},
    },
    "few_rows_subtiles": {(16, 2559): 2, (16, 2560): 1, (64, 2559): 2, (64, 2560): 2, (0, 2560): 2},
    "experts_up_subtiles": {  # R, E, F, SMs: fewer tiles of 64 hidden columns than two on each SM
        **{(8, 128, 64 * 33, 132): 2, (8, 128, 64 * 32, 132): 1, (8, 128, 64 * 32 + 1, 132): 2},
        **{(8, 128, 64 * 33, 133): 1, (16, 8, 64 * 32, 132): 1, (17, 8, 64, 132): 2},
        **{(8, 128, 768, 78): 1, (16, 128, 768, 78): 2, (16, 128, 768, 114): 1, (24, 128, 768, 114): 2},
    },
    "down_reads_before_wait": {  # R, E, F, whether weights are quantised
        **{(2048, 128, 14336, False): True, (2049, 128, 14336, False): False},
        **{(2049, 128, 2559, False): True, (2049, 128, 2560, False): False},
        **{(8192, 128, 2559, False): True, (8193, 128, 2559, False): False},
        **{(1, 128, 2559, True): True, (1, 128, 2560, True): False},
        **{(8192, 128, 2559, True): True, (8193, 128, 2559, True): False},
    },
    "most_quantized_rows": {  # tiles, transposed
        **{(True, False): 3072, (True, True): 768, (False, False): 16},
    },
    "quantized_together": {  # R, E, M, F, SMs: 2 rows on average, or 1 and a tile of 64 columns for each SM
        **{(256, 128, 64, 2559, 132): True, (257, 128, 64, 2559, 132): False, (1, 8, 64, 2560, 132): False},
        **{(2, 8, 64 * 66, 2560, 132): True, (2, 8, 64 * 65, 2560, 132): False},
        **{(8, 8, 64 * 17, 2560, 132): True, (9, 8, 64 * 17, 2560, 132): False},
    },
    "quantized_down_columns": {  # R, E, M, SMs: 64 where tiles of 128 columns are fewer than SMs
        **{(8, 128, 128 * 16, 132): 64, (8, 128, 128 * 17, 132): 128, (8, 128, 128 * 16 + 1, 132): 128},
        **{(9, 8, 128 * 16, 129): 64, (9, 8, 128 * 16, 128): 128},
        **{(8, 128, 1536, 78): 128, (8, 128, 1536, 114): 64, (8, 128, 2048, 144): 64},
    },
    "quantized_down_spreads": {  # R, E, M, SMs: tiles of 64 columns are no more than SMs
        **{(2, 8, 64 * 66, 132): True, (2, 8, 64 * 66 + 1, 132): False, (2, 8, 64 * 66, 131): False},
        **{(1, 1, 64, 132): True, (2, 1, 64 * 132, 132): True, (3, 1, 64, 132): False},
    },
    "quantized_tile_rows": {
        **{(2, 1): 16, (3, 1): 64, (64, 1): 64, (65, 1): 128, (384, 1): 128, (385, 1): 256},
        **{(256, 128): 16, (257, 128): 64, (8192, 128): 64, (8193, 128): 128, (49153, 128): 256},
    },
    "auto_takes_codes": {
        **{(0, 1): True, (16, 1): True, (17, 1): False, (2048, 128): True, (2049, 128): False},
    },
    "fp8_wgrad_pays": {
        **{(255, 1): False, (256, 1): True, (256 * 128 - 1, 128): False, (256 * 128, 128): True},
    },
    "fp8_column_chunk": {  # T, R, E, D, F, H, whether of dw2
        **{(8192, 16384, 8, 4096, 14336, 28672, of_dw2): 4096 for of_dw2 in (True, False)},  # mixtral-8x7b
        **{(8192, 65536, 32, 7168, 2048, 4096, of_dw2): n for of_dw2, n in ((True, 7168), (False, 2560))},
        **{(32768, 262144, 128, 4096, 1024, 2048, of_dw2): n for of_dw2, n in ((True, 2048), (False, 1024))},
        **{(16384, 131072, 64, 2048, 1024, 2048, of_dw2): n for of_dw2, n in ((True, 384), (False, 2048))},
        **{(16384, 98304, 64, 2048, 1408, 2816, of_dw2): n for of_dw2, n in ((True, 512), (False, 2048))},
        **{(16384, 131072, 128, 2048, 768, 1536, of_dw2): n for of_dw2, n in ((True, 1024), (False, 768))},
        (1024, 8192, 128, 2048, 768, 1536, False): 2048,  # little beside the weights' gradients
        # nothing fits
        **{(9, 9, 9, D, 128, 256, False): 128 for D in (128, 256, 384, 512, 640, 1024)},
        **{(9, 9, 9, D, 128, 256, False): n for D, n in ((1152, 256), (7168, 896), (16384, 2048))},
    },
    "takes_turns": {(1025, 1024): True, (1024, 1024): False, (1025, 1032): False, (2688, 64): True},
    "wgrad_takes_turns": {  # R, E, tiles of a weight, CTAs
        **{(640, 1, 265, 132): True, (641, 1, 265, 132): False, (640, 1, 264, 132): False},
        **{(640 * 256, 256, 512, 132): True, (640 * 256 + 1, 256, 512, 132): False},
    },
    "wgrad_is_write_bound": {  # R, E, tiles of a weight, CTAs
        **{(128 * 128, 128, 48, 132): True, (128 * 128 + 1, 128, 48, 132): False},
        **{(1, 44, 48, 132): True, (1, 43, 48, 132): False},
    },
    "wgrad_tiles_at_once": {
        **{(128 * 128, 128, 264, 132): 2, (128 * 128 + 1, 128, 264, 132): 1, (128 * 128, 128, 265, 132): 1},
        **{(1, 44, 48, 132): 2, (1, 43, 48, 132): 1},
    },
    "gathers_first": {(8192, 256): True, (8191, 256): False, (8192, 128): False, (8192, 4096): True},
    "router_slice": {  # D: eight slices at most, of 64 columns each
        **{(64,): 512, (2048,): 512, (4096,): 512, (4097,): 576, (5120,): 640, (7168,): 896, (14336,): 1792},
    },
    "router_cta_slices": {  # T, E, D, CTAs: clusters fill three quarters of the SMs
        **{(64, 128, 512, 132): 1, (64 * 66, 128, 512, 132): 1, (64 * 66 + 1, 128, 512, 132): 0},
        **{(1, 64 * 24, 2048, 132): 1, (1, 64 * 25, 2048, 132): 2, (1, 64 * 50, 2048, 132): 4},
        **{(1, 64 * 49, 2048, 132): 2, (1, 64 * 132, 2048, 132): 4, (1, 64 * 133, 2048, 132): 0},
        **{(1, 64 * 49, 4096, 132): 4, (1, 64 * 50, 4096, 132): 0},
    },
    "router_tile": {  # T, E, CTAs
        **{(10**6, 64, 132): T_OF_128X64, (1, 1, 132): T_OF_128X64},
        **{(64 * 132, 128, 132): T_OF_64X128, (64 * 132 + 1, 128, 132): T_OF_128X128},
        **{(64 * 66, 256, 132): T_OF_64X128, (64 * 66 + 1, 256, 132): T_OF_128X128},
        **{(64 * 132, 256, 132): T_OF_128X128, (64 * 132 + 1, 256, 132): T_OF_128X256},
        **{(64 * 132 + 1, 129, 132): T_OF_128X256},
    },
    "chooses_by_warp": {  # T, E, whether in a cluster
        **{(1024, 256, False): True, (1025, 256, False): False, (1024, 257, False): False},
        **{(128, 256, True): True, (129, 256, True): False, (128, 257, True): False},
    },
    "has_few_slots": {  # slots, E
        **{(0, 8): False, (1, 8): True, (64, 8): True, (65, 8): False},
        **{(64, 2**25): True, (64, 2**25 + 1): False},
    },
    "has_cluster_plan": {  # T, K, E, whether it chooses
        **{(0, 1, 8, True): False, (64, 1, 8, True): False, (65, 1, 8, True): True},
        **{(4096, 1, 8, True): True, (4097, 1, 8, True): False, (1, 4096, 8, True): False},
        **{(512, 8, 1024, True): True, (512, 8, 1025, True): False},
        **{(0, 1, 8, False): False, (64, 1, 8, False): False, (65, 1, 8, False): True},
        **{(8192, 1, 8, False): True, (8193, 1, 8, False): False},
        **{(1, 8192, 8, False): True, (1, 8193, 8, False): False},
        **{(1024, 8, 1024, False): True, (1024, 8, 1025, False): False},
    },
    "planner": {  # T, K, E, whether the GEMMs can, whether there are clusters, whether one may choose the ids
        **{(8, 8, 128, True, True, True): IN_GEMM, (8, 8, 128, True, False, False): IN_GEMM},
        **{(8, 8, 128, False, True, True): BY_KERNELS, (0, 8, 128, True, True, True): BY_KERNELS},
        **{(8, 8, 2**25 + 1, True, True, False): BY_KERNELS},
        **{(9, 8, 128, True, True, True): WITH_CHOICE, (512, 8, 128, True, True, True): WITH_CHOICE},
        **{(513, 8, 128, True, True, True): BY_CLUSTER, (1024, 8, 128, True, True, True): BY_CLUSTER},
        **{(9, 8, 128, True, True, False): BY_CLUSTER, (1025, 8, 128, True, True, False): BY_KERNELS},
        **{(9, 8, 128, True, False, True): BY_KERNELS, (9, 8, 128, True, False, False): BY_KERNELS},
        **{(9, 8, 1025, True, True, True): BY_KERNELS, (1, 4096, 8, True, True, True): BY_CLUSTER},
    },
    "counts_every_slot": {  # slots, E
        **{(0, 1): True, (8192, 1): True, (8192, 1024): True, (8193, 1): False},
        **{(4096, 1025): True, (4097, 1025): False, (1, 2**25): False},
    },
    "num_spans": {  # slots, E, SMs
        **{(0, 8, 132): 0, (1, 8, 132): 1, (256, 8, 132): 1, (257, 8, 132): 2, (8192, 512, 132): 32},
        **{(8193, 8, 132): 17, (131 * 512, 8, 132): 131, (2**20, 8, 132): 131, (2**20, 512, 132): 131},
        **{(2**20, 513, 132): 65, (2**20, 1100, 132): 43, (2048, 1100, 132): 8},
        **{(2**20, 8, 78): 77, (2**20, 8, 144): 143, (9000, 131 * 512, 132): 1, (9000, 2**20, 132): 1},
    },
    "has_few_tokens": {(512,): True, (513,): False},
}


@pytest.mark.quick
@pytest.mark.parametrize("rule", TABLE)
def test_rule(rule):
    assert {shape: getattr(_host, rule)(*shape) for shape in TABLE[rule]} == TABLE[rule]


def test_auto_is_the_same_in_python():
    for R, E in TABLE["auto_takes_codes"]:
        assert computing.auto_takes_codes(R, E) == _host.auto_takes_codes(R, E)


def test_auto_weight_gradients_are_the_same_in_python():
    for R, E in TABLE["fp8_wgrad_pays"]:
        assert fp8.wgrad_pays(R, E) == _host.fp8_wgrad_pays(R, E)


def test_widths_are_the_same_in_python():
    found = _host.eight_bit_width, _host.eight_bit_most_width, _host.eight_bit_auto_rows
    assert found == (computing.WIDTH, computing.MOST_WIDTH, computing.AUTO_ROWS)


def test_spans_of_a_cluster():
    """The eight CTAs' spans cover all slots, those of a choice by whole tokens; each fits a CTA's memory. No
    K that route takes is refused."""
    for K in range(1, 33):
        for T in range(-(-65 // K), 4096 // K + 1):
            assert _host.has_cluster_plan(T, K, 1024, True)
            for chooses in (False, True):
                span = _host.span_slots(T, K, chooses)
                assert T * K <= 8 * span and span <= (544 if chooses else 512)
                assert span % K == 0 or not chooses
