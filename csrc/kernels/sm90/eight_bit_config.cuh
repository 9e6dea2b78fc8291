/* GEMMs of 8 bits on both operands: the weight with its scales, the configurations, and which of them serves
 * a call. eight_bit.cuh has the kernel. */
#pragma once

#include "../../eight_bit.h"
#include "config.cuh"

namespace fused_moe {
namespace sm90 {

enum class ScalesOf { BLOCKS, ROWS };
/* UP is up_gate. DOWN is a GEMM whose A has the scales of an epilogue or of quantize_dh, in blocks one for
 * 128 columns of a row: the down GEMM and up_dgrad. DOWN_DGRAD is one of dout, whose rows have one scale. */
enum class Side { UP, DOWN, DOWN_DGRAD };

template <typename Operand>
using EightBitAccum = std::conditional_t<std::is_same_v<Operand, int8_t>, int32_t, float>;

/* --- the weight in blocks ------------------------------------------------------------------------------- */

/* Where a weight's scales are. With gate_up parts 0 and 1 are gate's and up's; a column of the output is row
 * first[part] + step * column of the tensor. */
typedef struct {
    const float *data[2];
    int32_t first[2], step; /* 2 where gate and up are interleaved */
    int32_t row_blocks, k_blocks;
} WeightScales;

struct BlockParams : DenseParams {
    WeightScales scales;
    const float *a_scale; /* [k_blocks, R] of A's rows, on the down side */
};

/* A dense weight, and behind it in the stage its scales, one for every subtile, and those of A's rows. */
template <typename Operand, int BN, Side SIDE>
struct BlockWeight : DenseWeight<Operand, Major::K, BN> {
    using Dense = DenseWeight<Operand, Major::K, BN>;
    using Params = BlockParams;
    static constexpr bool HAS_SCALES = true;
    static constexpr int PARTS = 1;
    /* Bytes before the scales, and from these to the scales of A's rows. */
    static constexpr int SCALES = Dense::STAGE_BYTES, ROW_SCALES = 512, STAGE_BYTES = SCALES + 1024;

    /* up_gate has no half-N tiles. */
    template <class Gemm, class Tile>
    __device__ static int bytes(const Gemm &, const Tile &tile) {
        return SIDE != Side::UP && tile.half_n ? SCALES / 2 : SCALES;
    }

    template <class Gemm, class Tile>
    __device__ static void load(const Gemm &p, uint32_t dst, uint32_t full, int part, int k_tile, Tile tile) {
        if (SIDE == Side::UP) tile.half_n = 0;
        Dense::load(p, dst, full, part, k_tile, tile);
    }

    /* A warp calls it. */
    template <class Gemm, class Tile>
    __device__ static void copy_scales(const Gemm &p, uint32_t b, int k_tile, const Tile &tile) {
        const WeightScales &s = p.weight.scales;
        int lane = threadIdx.x % 32;
        if (lane < BN / SUBTILE) {
            int part = p.gate_up && lane >= BN / SUBTILE / 2;
            int subtile = part ? lane - BN / SUBTILE / 2 : lane;
            int row = s.first[part] + s.step * (tile.first_column + SUBTILE * subtile);
            uint32_t block = tile.expert * s.row_blocks + min(row / FUSED_MOE_BLOCK, s.row_blocks - 1);
            cp_async_word(b + SCALES + 4 * lane, s.data[part] + (block * s.k_blocks + k_tile));
        }
        if constexpr (SIDE != Side::DOWN) return;
        const float *a_scale = p.weight.a_scale + k_tile * p.tiles.R;
        for (int row = lane; row < tile.num_rows; row += 32)
            cp_async_word(b + SCALES + ROW_SCALES + 4 * row, a_scale + tile.first_row + row);
    }
};

/* --- configurations ------------------------------------------------------------------------------------- */

/* Scales of a tile's columns that a consumer copies to shared memory, behind its staging buffer. */
constexpr int COLUMN_SCALES_BYTES = 256 * sizeof(float);

/* Full tiles of 128x256, one CTA per SM. up_gate's rows are contiguous, too: gathers draw power, and a pass
 * has to quantise x anyway. */
template <typename Operand_, ScalesOf SCALES_, Side SIDE_>
struct EightBitConfig : GemmConfig<Operand_, Major::K, false> {
    using Base = GemmConfig<Operand_, Major::K, false>;
    static constexpr ScalesOf SCALES = SCALES_;
    static constexpr Side SIDE = SIDE_;
    static constexpr bool FEW_ROWS = false, IN_BLOCKS = SCALES == ScalesOf::BLOCKS;
    static constexpr bool HAS_HALF_N = SIDE != Side::UP;
    static constexpr bool KEEPS_H = false; /* up_gate stores h, too */
    using Weight = std::conditional_t<IN_BLOCKS, BlockWeight<Operand_, Base::BN, SIDE>,
                                      DenseWeight<Operand_, Major::K, Base::BN>>;
    /* Subtiles of an output that are stored under the next tile's k-tiles. Sums in blocks leave no registers
     * to hold them: the down GEMM's rows are staged whole instead. */
    static constexpr int HELD = IN_BLOCKS || SIDE == Side::UP ? 0 : 4;
    static constexpr bool STAGES_WHOLE = IN_BLOCKS && SIDE != Side::UP;
    static constexpr int STAGES = STAGES_WHOLE ? 3 : 4;
    static constexpr int STAGING_BYTES = STAGES_WHOLE ? WholeWriter::BYTES
                                         : IN_BLOCKS  ? SingleWarpWriter::BYTES
                                                      : Writer::BYTES + COLUMN_SCALES_BYTES;
    using Pipeline = PipelineState<STAGES>;
};

/* Full tiles of an up_gate that keeps h for backward: 64 rows of it and of a are staged at once. */
struct EightBitTrainingConfig : EightBitConfig<__nv_fp8_e4m3, ScalesOf::BLOCKS, Side::UP> {
    static constexpr bool KEEPS_H = true;
    static constexpr int STAGES = 3, STAGING_BYTES = WarpWholeWriter::BYTES;
    using Pipeline = PipelineState<STAGES>;
};

/* Experts of few rows: swap-AB. up_gate gathers, since a GEMM may make the plan. In blocks it has 128
 * output columns in a tile, which share a scale, and two consumers. Such tiles are large: two CTAs share an
 * SM where rows are few enough for their registers, so one loads while the other stores. */
template <typename Operand_, ScalesOf SCALES_, Side SIDE_, int ROWS>
struct EightBitFewConfig : GemmConfig<Operand_, Major::K, SIDE_ == Side::UP> {
    static constexpr ScalesOf SCALES = SCALES_;
    static constexpr Side SIDE = SIDE_;
    static constexpr bool FEW_ROWS = true, IN_BLOCKS = SCALES == ScalesOf::BLOCKS, ALL_SWAPPED = true;
    static constexpr bool KEEPS_H = false;
    static constexpr int HELD = 0;
    static constexpr bool GATHERS_EARLY = SIDE == Side::UP;
    static constexpr int CONSUMERS = IN_BLOCKS && SIDE == Side::UP ? 2 : 1;
    static constexpr int CTAS_PER_SM = CONSUMERS == 1 || ROWS == 16 ? 2 : 1;
    static constexpr int BM = ROWS, SUBTILES = 2, BN = SUBTILE * SUBTILES * CONSUMERS, CUT_ROWS = BM;
    using Tokens = std::conditional_t<ROWS == 16, std::integer_sequence<int, 8, 16>,
                                      std::integer_sequence<int, 8, 16, 32, 64>>;
    using Weight =
        std::conditional_t<IN_BLOCKS, BlockWeight<Operand_, BN, SIDE>, DenseWeight<Operand_, Major::K, BN>>;
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILE_BYTES;
    static constexpr int STAGES = (CTAS_PER_SM == 2 ? 106 : 208) * 1024 / (A_BYTES + Weight::STAGE_BYTES);
    static constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int CONSUMER_REGISTERS = 0; /* threads keep those that they were launched with */
    static constexpr int STAGING_BYTES = SkinnyWriter<BM>::BYTES;
    using Queue =
        TileQueue<WorkTile, CONSUMER_WARPS + EightBitFewConfig::LOAD_WARPS, SIDE == Side::UP ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* --- host ----------------------------------------------------------------------------------------------- */

/* Whether all tiles are computed by swap-AB, and up_gate gathers. */
inline bool swaps_eight_bit_tiles(int64_t R, int32_t E) {
    return quantized_tile_rows(R, E) <= FUSED_MOE_SKINNY_ROWS;
}

/* Calls fn with a configuration for a format and R rows of E experts. */
template <Side SIDE, typename Fn>
int with_eight_bit_config(FusedMoeFormat format, int64_t R, int32_t E, Fn fn) {
    auto with_scales = [&](auto operand, auto scales) {
        using Operand = decltype(operand);
        if constexpr (SIDE == Side::UP && scales.value == ScalesOf::BLOCKS)
            if (quantized_tile_rows(R, E) == 16)
                return fn(EightBitFewConfig<Operand, scales.value, SIDE, 16>());
        if (swaps_eight_bit_tiles(R, E)) return fn(EightBitFewConfig<Operand, scales.value, SIDE, 64>());
        return fn(EightBitConfig<Operand, scales.value, SIDE>());
    };
    std::integral_constant<ScalesOf, ScalesOf::ROWS> rows;
    if (format == FUSED_MOE_FORMAT_fp8_block)
        return with_scales(__nv_fp8_e4m3(), std::integral_constant<ScalesOf, ScalesOf::BLOCKS>());
    return format == FUSED_MOE_FORMAT_fp8 ? with_scales(__nv_fp8_e4m3(), rows) : with_scales(int8_t(), rows);
}

} // namespace sm90
} // namespace fused_moe
