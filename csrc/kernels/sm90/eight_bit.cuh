/* GEMMs whose operands both have 8 bits: e4m3 or int8. Roles, pipelines and gathers are gemm.cuh's; a
 * k-tile is 128 elements, so a stage has the bytes of a 16-bit one.
 *
 *   BLOCKS  fp8_block. A weight's scale is for 128 x 128 elements, and a's for 128 columns. 128 columns of
 *           k are summed by the MMAs, and promoted: multiplied by their scales and added to float32 sums.
 *           A consumer computes 128 columns at a time, into 64 registers beside the 128 of its sums.
 *   ROWS    fp8 and int8: a scale for each row of the weight, and of A. The MMAs sum over all of k, and
 *           the epilogue multiplies by both scales.
 *
 * Experts of few rows are computed by swap-AB, in tiles of 64 rows. Each sum is the same sequence of
 * operations in both kinds of tiles, so a token has the same bits in any batch. The weight is as published:
 * 8-bit wgmma takes K-major operands alone. */
#pragma once

#include "eight_bit_config.cuh"
#include "gemm.cuh"

namespace fused_moe {
namespace sm90 {

/* --- main loops ----------------------------------------------------------------------------------------- */

/* ROWS: d = the 64 rows of consumer `wg` times the tile's first COLUMNS columns. */
template <class Config, int COLUMNS, int HELD, typename Acc, typename Meanwhile>
__device__ inline void run_eight_bit(Acc *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                     int num_k_tiles, int wg, Meanwhile meanwhile) {
    using Operand = typename Config::Operand;
    constexpr int STEP = K_STEP<Major::K, Operand>;
    auto issue = [&](auto &stage, auto first) {
        uint64_t a = matrix_descriptor<Major::K>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
        wgmma_8<COLUMNS, first.value ? SET : ADD>(d, a, b, Operand());
#pragma unroll
        for (int k = 1; k < NUM_K_STEPS; k++) wgmma_8<COLUMNS, ADD>(d, a + k * STEP, b + k * STEP, Operand());
    };
    for_each_k_tile<Config, HELD>(s, pipe, num_k_tiles, issue, meanwhile);
}

/* BLOCKS: the same. On the down side A's rows have scales in the stage. */
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
        uint64_t a = matrix_descriptor<Major::K>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
        uint32_t scales = shared_address(stage.b) + Config::Weight::SCALES;
#pragma unroll
        for (int n = 0; n < COLUMNS / N; n++, b += NEXT_N) {
            wgmma_fence();
            wgmma_8<N, OVERWRITE>(block, a, b, Operand());
#pragma unroll
            for (int k = 1; k < NUM_K_STEPS; k++)
                wgmma_8<N, ADD>(block, a + k * STEP, b + k * STEP, Operand());
            wgmma_commit_group();
            float2 of_columns = ld_shared_f32x2(scales + 8 * n);
            float scale[2][2] = {{of_columns.x, of_columns.x}, {of_columns.y, of_columns.y}};
            if constexpr (Config::SIDE == Side::DOWN) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float of_row = ld_shared_f32(scales + Config::Weight::ROW_SCALES + 4 * (row + 8 * i));
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
        wgmma_8<TOKENS, first.value ? SET : ADD>(sums, w, x, Operand());
#pragma unroll
        for (int k = 1; k < NUM_K_STEPS; k++)
            wgmma_8<TOKENS, ADD>(sums, w + k * STEP, x + k * STEP, Operand());
    };
    if constexpr (Config::IN_BLOCKS) {
        constexpr int AT_ONCE = TOKENS > 32 ? 1 : 2; /* subtiles: registers are few */
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
                float block[AT_ONCE * SUMS];
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    multiply(block + SUMS * i, stage, subtile[first + i], std::true_type());
                wgmma_commit_group();
                wgmma_wait_group<0>();
#pragma unroll
                for (int j = 0; j < TOKENS / 8; j++) { /* eight rows, of which a thread has two */
                    float2 of_rows = {1, 1};
                    if constexpr (Config::SIDE == Side::DOWN)
                        of_rows = ld_shared_f32x2(scales + Config::Weight::ROW_SCALES +
                                                  4 * (8 * j + threadIdx.x % 4 * 2));
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

__device__ inline float scale_at(const OfColumns &scales, int part, int expert, int n) {
    return __ldg((const float *)scales.data[part] + expert * scales.per_expert[part] + scales.step * n);
}

/* An element of 16 bits. */
__device__ inline float half_at(const void *data, int64_t i, bool is_f16) {
    return is_f16 ? to_accum(((const __half *)data)[i]) : to_accum(((const __nv_bfloat16 *)data)[i]);
}

__device__ inline float bias_at(const OfColumns &bias, int part, int expert, int n, bool is_f16) {
    return half_at(bias.data[part], expert * bias.per_expert[part] + bias.step * n, is_f16);
}

/* Starts to copy those of a tile's columns, with gate_up 128 gates before 128 ups. 128 threads call it. */
__device__ inline void copy_column_scales(uint32_t buffer, int barrier, const OfColumns &scales, bool gate_up,
                                          int expert, int first, int end) {
    int thread = threadIdx.x % 128, part = gate_up && thread >= 64;
    barrier_sync(barrier, 128); /* all have read the tile before */
    const float *data = (const float *)scales.data[part] + expert * scales.per_expert[part];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int n = min(first + 2 * thread - 128 * part + i, end - 1);
        cp_async_word(buffer + 4 * (2 * thread + i), data + scales.step * n);
    }
    cp_async_commit_group();
}

__device__ inline void wait_for_column_scales(int barrier) {
    cp_async_wait_group<0>();
    barrier_sync(barrier, 128);
}

/* h = sums times the scales of their rows, and by rows of their columns, plus a bias: columns first + 8 j +
 * 2 (lane % 4) and one more of a full tile, for 8 j < 64. of_columns: where shared memory has the columns'
 * scales. Columns from `end` on get a bias of others. */
template <ScalesOf SCALES, typename Acc>
__device__ __forceinline__ void finish_subtile(float *h, const Acc *sums, const float (&of_row)[2],
                                               uint32_t of_columns, const OfColumns &biases, int part,
                                               int expert, int first, int end, bool is_f16) {
    int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 of_column = {1, 1};
        if constexpr (SCALES == ScalesOf::ROWS) of_column = ld_shared_f32x2(of_columns + 4 * (8 * j + pair));
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++)
            h[i] = __fmul_rn((float)sums[i], of_row[i / 2 % 2] * (i % 2 ? of_column.y : of_column.x));
    }
    if (!biases.data[part]) return;
    auto add = [&](auto t) {
        using T = decltype(t);
        const T *bias = (const T *)biases.data[part] + expert * biases.per_expert[part];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int n = min(first + 8 * j + pair, end - 2);
            float b[2] = {to_accum(bias[biases.step * n]), to_accum(bias[biases.step * (n + 1)])};
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i++) h[i] = __fadd_rn(h[i], b[i % 2]);
        }
    };
    is_f16 ? add(__half()) : add(__nv_bfloat16());
}

/* The scales of the rows of A that a thread has results of: two in a full tile, two of every eight in a
 * swapped one. On the down side in blocks they are in the stages, and this is empty. */
template <class Config>
struct RowScales {
    static constexpr bool HAS_ANY = Config::SIDE != Side::DOWN || !Config::IN_BLOCKS;
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

    /* Begins to load them. A tile of a wrong plan may have no rows. Gathers read those of token 0 then: a
     * test for each row would spill. */
    template <int COUNT>
    __device__ void load(const float *scales, const WorkTile &tile, int wg) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            int in_tile = tile_row(wg, i);
            if constexpr (Config::GATHER)
                scale[i] = __ldg(scales + row[i]);
            else
                scale[i] = in_tile < tile.num_rows ? __ldg(scales + tile.first_row + in_tile) : 0;
        }
    }
};

/* --- a consumer warpgroup ------------------------------------------------------------------------------- */

/* epilogue.row_scales are those of A's rows. epilogue.hold(d, tile, wg, scales, of_columns, writer),
 * store_subtile and flush are gemm.cuh's; epilogue.store_swapped<TOKENS>(d, tile, wg, warp, scales, writer,
 * staging) stores a swapped tile; staging is all consumers'. */
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
            uint32_t of_columns = shared_address(s.staging[wg]) + Config::STAGING_BYTES - COLUMN_SCALES_BYTES;
            if constexpr (!Config::IN_BLOCKS)
                copy_column_scales(of_columns, WARPGROUP_BARRIER + wg, epilogue.p.scale, p.gate_up,
                                   tile.expert, tile.first_column, epilogue.num_columns());
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
                if constexpr (!Config::IN_BLOCKS) wait_for_column_scales(WARPGROUP_BARRIER + wg);
                epilogue.hold(d, tile, wg, scales.scale, of_columns, writer);
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

/* Shared memory: only the GEMMs of few rows make plans. */
template <class Config>
using EightBitMemory = std::conditional_t<Config::FEW_ROWS, PlanningShared<Config>, Shared<Config>>;

template <class Config>
__device__ inline void produce_eight_bit(const GemmOf<Config> &p, EightBitMemory<Config> &s, int warp) {
    if constexpr (Config::FEW_ROWS) {
        produce<Config>(p, s, warp);
    } else {
        if (!p.tiles.pdl.reads_before_wait) griddepcontrol_wait();
        if (warp == 3)
            fetch_gemm_tiles<Config::CUT_ROWS>(p, s.queue);
        else if (warp == 0)
            load_tma<Config>(p, s);
    }
}

template <class Config, typename Epilogue>
__device__ __forceinline__ void persistent_eight_bit(const GemmOf<Config> &p, Epilogue epilogue) {
    auto &s = static_cast<EightBitMemory<Config> &>(prologue<Config>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce_eight_bit<Config>(p, s, warp);
    } else {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (p.tiles.pdl.lets_next_start) griddepcontrol_launch_dependents();
        consume_eight_bit<Config>(p, s, wg, warp % 4, epilogue);
    }
    if (p.tiles.pdl.reads_before_wait)
        griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

} // namespace sm90
} // namespace fused_moe
