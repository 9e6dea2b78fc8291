/* GEMMs whose operands both have 8 bits: e4m3 or int8. Roles, pipelines and gathers are gemm.cuh's; a k-tile is
 * 128 elements, so a stage has the bytes of a 16-bit one.
 *
 *   BLOCKS  fp8_block. A weight's scale is for 128 x 128 elements, and a's for 128 columns. 128 columns of k are
 *           summed by the MMAs, and promoted: multiplied by their scales and added to float32 sums. A consumer
 *           computes 128 columns at a time, into 64 registers beside the 128 of its sums.
 *   ROWS    fp8 and int8: a scale for each row of the weight, and of A. The MMAs sum over all of k, and the
 *           epilogue multiplies by both scales.
 *
 * Experts of few rows are computed by swap-AB, in tiles of 64 rows. Each sum is the same sequence of
 * operations in both kinds of tiles, so a token has the same bits in any batch. The weight is as published:
 * 8-bit wgmma takes K-major operands alone. */
#pragma once

#include "../../eight_bit.h"
#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

enum class ScalesOf { BLOCKS, ROWS };

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
    const float *a_scale; /* [k_blocks, R] of A's rows; NULL with a gather, whose rows have one scale */
};

/* A dense weight, and behind it in the stage its scales, one for every subtile, and those of A's rows. */
template <typename Operand, int BN>
struct BlockWeight : DenseWeight<Operand, Major::K, BN> {
    using Dense = DenseWeight<Operand, Major::K, BN>;
    using Params = BlockParams;
    static constexpr bool HAS_SCALES = true;
    static constexpr int PARTS = 1;
    static constexpr int SCALES = Dense::STAGE_BYTES, ROW_SCALES = SCALES + 512, STAGE_BYTES = SCALES + 1024;

    template <class Gemm, class Tile>
    __device__ static int bytes(const Gemm &, const Tile &tile) {
        return tile.half_n ? SCALES / 2 : SCALES;
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
        if (!p.weight.a_scale) return;
        const float *a_scale = p.weight.a_scale + k_tile * p.tiles.R;
        for (int row = lane; row < tile.num_rows; row += 32)
            cp_async_word(b + ROW_SCALES + 4 * row, a_scale + tile.first_row + row);
    }
};

/* --- configurations ------------------------------------------------------------------------------------- */

/* Full tiles of 128x256, one CTA per SM. */
template <typename Operand_, ScalesOf SCALES_, bool GATHER_>
struct EightBitConfig : GemmConfig<Operand_, Major::K, GATHER_> {
    using Base = GemmConfig<Operand_, Major::K, GATHER_>;
    static constexpr ScalesOf SCALES = SCALES_;
    static constexpr bool FEW_ROWS = false, IN_BLOCKS = SCALES == ScalesOf::BLOCKS;
    using Weight = std::conditional_t<IN_BLOCKS, BlockWeight<Operand_, Base::BN>,
                                      DenseWeight<Operand_, Major::K, Base::BN>>;
    /* Sums in blocks leave no registers to hold a tile until it is stored, so its rows are staged whole. */
    static constexpr bool STAGES_WHOLE = IN_BLOCKS && !GATHER_;
    /* Subtiles of an output that are stored under the next tile's k-tiles. */
    static constexpr int HELD = IN_BLOCKS || GATHER_ ? 0 : 4;
    static constexpr bool HAS_HALF_N = !GATHER_;
    static constexpr int PRODUCER_REGISTERS = GATHER_ ? 56 : 40, CONSUMER_REGISTERS = GATHER_ ? 224 : 232;
    static constexpr int STAGES = STAGES_WHOLE ? 3 : 4;
    static constexpr int STAGING_BYTES = STAGES_WHOLE ? WholeWriter::BYTES
                                         : IN_BLOCKS  ? SingleWarpWriter::BYTES
                                                      : Writer::BYTES;
    using Pipeline = PipelineState<STAGES>;
};

/* Experts of few rows: swap-AB. up_gate in blocks has 128 output columns in a tile, which share a scale, and
 * two consumers; others have one, and two CTAs on an SM. */
template <typename Operand_, ScalesOf SCALES_, bool GATHER_>
struct EightBitFewConfig : GemmConfig<Operand_, Major::K, GATHER_> {
    static constexpr ScalesOf SCALES = SCALES_;
    static constexpr bool FEW_ROWS = true, IN_BLOCKS = SCALES == ScalesOf::BLOCKS, ALL_SWAPPED = true;
    static constexpr int HELD = 0;
    static constexpr int CONSUMERS = IN_BLOCKS && GATHER_ ? 2 : 1, CTAS_PER_SM = 3 - CONSUMERS;
    static constexpr int BM = 64, SUBTILES = 2, BN = SUBTILE * SUBTILES * CONSUMERS, CUT_ROWS = BM;
    using Tokens = std::integer_sequence<int, 8, 16, 32, 64>;
    using Weight =
        std::conditional_t<IN_BLOCKS, BlockWeight<Operand_, BN>, DenseWeight<Operand_, Major::K, BN>>;
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILE_BYTES;
    static constexpr int STAGES = (CTAS_PER_SM == 2 ? 104 : 208) * 1024 / (A_BYTES + Weight::STAGE_BYTES);
    static constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int CONSUMER_REGISTERS = 0; /* threads keep those that they were launched with */
    static constexpr int STAGING_BYTES = SkinnyWriter<BM>::BYTES;
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + EightBitFewConfig::LOAD_WARPS, GATHER_ ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* --- main loops ----------------------------------------------------------------------------------------- */

/* The scales that a stage has. */
template <class Config>
__device__ inline float subtile_scale(uint32_t b, int subtile) {
    return ld_shared_f32(b + Config::Weight::SCALES + 4 * subtile);
}

/* ROWS: d = the 64 rows of consumer `wg` times the tile's first COLUMNS columns. */
template <class Config, int COLUMNS, int HELD, typename Acc, typename Meanwhile>
__device__ inline void run_eight_bit(Acc *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                     int num_k_tiles, int wg, Meanwhile meanwhile) {
    using Operand = typename Config::Operand;
    constexpr int STEP = K_STEP<Major::K, Operand>;
    auto issue = [&](auto &stage, auto first) {
        uint64_t a = matrix_descriptor<Major::K>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
        wgmma_8<COLUMNS, !first.value>(d, a, b, Operand());
#pragma unroll
        for (int k = 1; k < NUM_K_STEPS; k++) wgmma_8<COLUMNS, 1>(d, a + k * STEP, b + k * STEP, Operand());
    };
    for_each_k_tile<Config, HELD>(s, pipe, num_k_tiles, issue, meanwhile);
}

/* BLOCKS: the same. Without a gather A's rows have scales in the stage. */
template <class Config, int COLUMNS>
__device__ inline void run_blocks(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                  int num_k_tiles, int wg) {
    using Operand = typename Config::Operand;
    constexpr int N = 2 * SUBTILE, STEP = K_STEP<Major::K, Operand>, NEXT_N = 2 * (SUBTILE_BYTES >> 4);
    int row = SUBTILE * wg + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float block[N / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) d[i] = 0;
#pragma unroll 1
    for (int k_tile = 0; k_tile < num_k_tiles; k_tile++) {
        auto &stage = s.stage[pipe.index];
        s.full[pipe.index].wait(pipe.phase);
        if constexpr (Config::GATHER) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        uint64_t a = matrix_descriptor<Major::K>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
        uint32_t scales = shared_address(stage.b) + Config::Weight::SCALES;
#pragma unroll
        for (int n = 0; n < COLUMNS / N; n++, b += NEXT_N) {
            wgmma_fence();
            wgmma_8<N, 0>(block, a, b, Operand());
#pragma unroll
            for (int k = 1; k < NUM_K_STEPS; k++) wgmma_8<N, 1>(block, a + k * STEP, b + k * STEP, Operand());
            wgmma_commit_group();
            float2 of_columns = ld_shared_f32x2(scales + 8 * n);
            float scale[2][2] = {{of_columns.x, of_columns.x}, {of_columns.y, of_columns.y}};
            if constexpr (!Config::GATHER) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float of_row = ld_shared_f32(scales + 512 + 4 * (row + 8 * i));
                    scale[0][i] *= of_row, scale[1][i] *= of_row;
                }
            }
            wgmma_wait_group<0>(); /* meanwhile the other consumer's MMAs run */
            if (n == COLUMNS / N - 1) release<Config>(s, pipe.index);
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                d[N / 2 * n + i] = fmaf(scale[i / 32][i / 2 % 2], block[i], d[N / 2 * n + i]);
        }
        pipe.advance();
    }
}

/* By swap-AB: TOKENS rows of the tile times two subtiles of the weight, whose accumulators are d[0 ..
 * TOKENS / 2) and those after it. */
template <class Config, int TOKENS, typename Acc>
__device__ inline void run_eight_bit_swapped(Acc *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                             int num_k_tiles, const int (&subtile)[2]) {
    using Operand = typename Config::Operand;
    constexpr int STEP = K_STEP<Major::K, Operand>, SUMS = TOKENS / 2; /* of a subtile */
    auto multiply = [&](Acc *sums, auto &stage, int of_subtile, auto first) {
        uint64_t x = matrix_descriptor<Major::K>(shared_address(stage.a));
        uint64_t w = Config::Weight::descriptor(shared_address(stage.b), of_subtile);
        wgmma_8<TOKENS, !first.value>(sums, w, x, Operand());
#pragma unroll
        for (int k = 1; k < NUM_K_STEPS; k++) wgmma_8<TOKENS, 1>(sums, w + k * STEP, x + k * STEP, Operand());
    };
    if constexpr (Config::IN_BLOCKS) {
        constexpr int AT_ONCE = TOKENS > 32 ? 1 : 2; /* subtiles: registers are few */
        float block[AT_ONCE * SUMS];
#pragma unroll
        for (int i = 0; i < TOKENS; i++) d[i] = 0;
#pragma unroll 1
        for (int k_tile = 0; k_tile < num_k_tiles; k_tile++) {
            auto &stage = s.stage[pipe.index];
            s.full[pipe.index].wait(pipe.phase);
            if constexpr (Config::GATHER) fence_proxy_async();
            uint32_t scales = shared_address(stage.b) + Config::Weight::SCALES;
#pragma unroll
            for (int first = 0; first < 2; first += AT_ONCE) {
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    multiply(block + SUMS * i, stage, subtile[first + i], std::true_type());
                wgmma_commit_group();
                wgmma_wait_group<0>();
#pragma unroll
                for (int j = 0; j < TOKENS / 8; j++) { /* eight rows, of which a thread has two */
                    float2 of_rows = {1, 1};
                    if constexpr (!Config::GATHER)
                        of_rows = ld_shared_f32x2(scales + 512 + 4 * (8 * j + threadIdx.x % 4 * 2));
#pragma unroll
                    for (int i = 0; i < AT_ONCE; i++) {
                        float of_column = ld_shared_f32(scales + 4 * subtile[first + i]);
#pragma unroll
                        for (int n = 4 * j; n < 4 * j + 4; n++) {
                            float &sum = d[SUMS * (first + i) + n];
                            sum = fmaf(of_column * (n % 2 ? of_rows.y : of_rows.x), block[SUMS * i + n], sum);
                        }
                    }
                }
            }
            release<Config>(s, pipe.index);
            pipe.advance();
        }
    } else {
        auto issue = [&](auto &stage, auto first) {
#pragma unroll
            for (int i = 0; i < 2; i++) multiply(d + SUMS * i, stage, subtile[i], first);
        };
        for_each_k_tile<Config, 0>(s, pipe, num_k_tiles, issue, [](auto) {});
#pragma unroll
        for (int i = 0; i < TOKENS; i++) pin(d[i]); /* not read before the last MMA's end */
    }
}

/* --- epilogues' operands -------------------------------------------------------------------------------- */

/* What the output's columns are multiplied by, or what is added to them: of gate and of up. */
typedef struct {
    const void *data[2]; /* NULL: none */
    int64_t per_expert[2];
    int32_t step; /* from one column to the next: 1; 2 where gate and up are interleaved; 0: all share one */
} OfColumns;

/* Columns n and n + 1 of float scales. */
__device__ inline float2 scales_at(const OfColumns &scales, int part, int expert, int n) {
    const float *data = (const float *)scales.data[part] + expert * scales.per_expert[part];
    if (scales.step == 1) return *(const float2 *)(data + n);
    return {data[scales.step * n], data[scales.step * (n + 1)]};
}

__device__ inline float scale_at(const OfColumns &scales, int part, int expert, int n) {
    return ((const float *)scales.data[part])[expert * scales.per_expert[part] + scales.step * n];
}

/* An element of 16 bits. */
__device__ inline float half_at(const void *data, int64_t i, bool is_f16) {
    return is_f16 ? to_accum(((const __half *)data)[i]) : to_accum(((const __nv_bfloat16 *)data)[i]);
}

__device__ inline float bias_at(const OfColumns &bias, int part, int expert, int n, bool is_f16) {
    return half_at(bias.data[part], expert * bias.per_expert[part] + bias.step * n, is_f16);
}

/* Two accumulators as one word. */
__device__ inline uint32_t pack_half(float low, float high, bool is_f16) {
    return is_f16 ? pack<__half>(low, high) : pack<__nv_bfloat16>(low, high);
}

__device__ inline float float_of(float v) {
    return v;
}
__device__ inline float float_of(int32_t v) {
    return (float)v;
}

/* The scales of the rows of A that a thread has results of: two in a full tile, two of every eight in a swapped
 * one. In blocks without a gather they are in the stages, and this is empty. */
template <class Config>
struct RowScales {
    static constexpr bool HAS_ANY = Config::GATHER || !Config::IN_BLOCKS;
    static constexpr int MOST = Config::FEW_ROWS ? Config::BM / 4 : 2;
    int32_t row[MOST]; /* of the scales */
    float scale[MOST];

    /* The tile's row that is the thread's row i. */
    __device__ static int tile_row(int wg, int i) {
        int lane = threadIdx.x % 32;
        if (Config::FEW_ROWS) return i / 2 * 8 + lane % 4 * 2 + i % 2;
        return SUBTILE * wg + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * i;
    }

    /* token: of the tile's rows, in the queue. */
    template <int COUNT>
    __device__ void find(const int32_t *token, int wg) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) row[i] = token[tile_row(wg, i)];
    }

    /* Begins to load them. */
    template <int COUNT>
    __device__ void load(const float *scales, const WorkTile &tile, int wg) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int tile_row_i = min(tile_row(wg, i), tile.num_rows - 1);
            scale[i] = __ldg(scales + (Config::GATHER ? row[i] : tile.first_row + tile_row_i));
        }
    }
};

/* --- a consumer warpgroup ------------------------------------------------------------------------------- */

/* epilogue.row_scales are those of A's rows. epilogue.hold(d, tile, wg, scales, writer), store_subtile and flush
 * are gemm.cuh's; epilogue.store_swapped<TOKENS>(d, tile, wg, warp, scales, writer, staging) stores a swapped tile;
 * staging is all consumers'. */
template <class Config, typename Epilogue>
__device__ __forceinline__ void consume_eight_bit(const GemmOf<Config> &p, Shared<Config> &s, int wg,
                                                  int warp, Epilogue &epilogue) {
    using Acc = EightBitAccum<typename Config::Operand>;
    using Writer = std::conditional_t<Config::FEW_ROWS, SkinnyWriter<Config::BM>, typename Epilogue::Writer>;
    int num_k_tiles = p.num_k_tiles[0];
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    Writer writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp);
    for (;;) {
        RowScales<Config> scales;
        WorkTile tile = reader.look();
        if (tile.expert < 0) break;
        if constexpr (Config::FEW_ROWS) {
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                Acc d[tokens.value];
                const int subtile[2] = {wg, wg + Config::CONSUMERS};
                run_eight_bit_swapped<Config, tokens.value>(d, s, pipe, num_k_tiles, subtile);
                /* not before the main loop: there are too many to keep */
                if constexpr (scales.HAS_ANY) {
                    if constexpr (Config::GATHER) scales.template find<tokens.value / 4>(reader.tokens(), wg);
                    scales.template load<tokens.value / 4>(epilogue.row_scales(), tile, wg);
                }
                reader.move_on();
                epilogue.template store_swapped<tokens.value>(d, tile, wg, warp, scales, writer,
                                                              s.staging[0]);
            });
        } else {
            if constexpr (Config::GATHER) scales.template find<2>(reader.tokens(), wg);
            if constexpr (scales.HAS_ANY) scales.template load<2>(epilogue.row_scales(), tile, wg);
            if (num_k_tiles < Config::HELD) epilogue.flush(writer);
            auto run = [&](auto columns) {
                Acc d[128];
                if constexpr (Config::IN_BLOCKS) {
                    run_blocks<Config, columns.value>(d, s, pipe, num_k_tiles, wg);
                } else {
                    auto store_subtile = [&](auto i) { epilogue.template store_subtile<i.value>(writer); };
                    run_eight_bit<Config, columns.value, Config::HELD>(d, s, pipe, num_k_tiles, wg,
                                                                       store_subtile);
                }
                tile = reader.look();
                reader.move_on();
                epilogue.hold(d, tile, wg, scales.scale, writer);
            };
            if (Config::HAS_HALF_N && tile.half_n)
                run(std::integral_constant<int, Config::BN / 2>());
            else
                run(std::integral_constant<int, Config::BN>());
        }
    }
    if constexpr (Config::HELD > 0) epilogue.flush(writer);
    writer.drain_all();
}

template <class Config, typename Epilogue>
__device__ __forceinline__ void persistent_eight_bit(const GemmOf<Config> &p, Epilogue epilogue) {
    auto &s = static_cast<PlanningShared<Config> &>(prologue<Config>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce<Config>(p, s, warp);
    } else {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (p.tiles.pdl.lets_next_start) griddepcontrol_launch_dependents();
        consume_eight_bit<Config>(p, s, wg, warp % 4, epilogue);
    }
    if (p.tiles.pdl.reads_before_wait)
        griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

/* --- host ----------------------------------------------------------------------------------------------- */

/* TMA reads rows of 8-bit elements whose width is a multiple of this. */
constexpr int64_t EIGHT_BIT_CHUNK = 16;

/* Calls fn with a configuration for a format and R rows of E experts. */
template <bool GATHER, typename Fn>
int with_eight_bit_config(FusedMoeFormat format, int64_t R, int32_t E, Fn fn) {
    auto with_scales = [&](auto operand, auto scales) {
        using Operand = decltype(operand);
        if (fused_moe_has_skinny_average(R, E) && !schedule_override().no_tails)
            return fn(EightBitFewConfig<Operand, scales.value, GATHER>());
        return fn(EightBitConfig<Operand, scales.value, GATHER>());
    };
    std::integral_constant<ScalesOf, ScalesOf::ROWS> rows;
    if (format == FUSED_MOE_FORMAT_fp8_block)
        return with_scales(__nv_fp8_e4m3(), std::integral_constant<ScalesOf, ScalesOf::BLOCKS>());
    return format == FUSED_MOE_FORMAT_fp8 ? with_scales(__nv_fp8_e4m3(), rows) : with_scales(int8_t(), rows);
}

} // namespace sm90
} // namespace fused_moe
