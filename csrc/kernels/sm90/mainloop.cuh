/* Main loops: a consumer warpgroup's MMAs over the k-tiles of a work tile.
 *
 *   run_mainloop            64 rows of a full tile, by descriptors: wgmma's A has rows, its B the weight; in
 *                           wgrad A has 64 columns of one operand, B those of the other
 *   run_last_k_tile         one more k-tile of a full tile, of which few rows of k are not zeros
 *   run_mainloop_swapped    a skinny tile by swap-AB: wgmma's A is the weight, its B the tile's rows
 *   run_mainloop_fragments  the same of a weight whose values are made in registers, by mma.sync for
 *                           up to 16 rows
 *   run_mainloop_ahead      likewise, of int4 and for up to 16 rows
 *   run_mainloop_tall       likewise, for tiles of twice the rows
 *
 * In a full tile a consumer waits for a k-tile's MMAs before it releases the stage, not one k-tile later.
 * Meanwhile the other consumer's MMAs keep the tensor cores busy, and holding a stage longer costs more. */
#pragma once

#include "config.cuh"

namespace fused_moe {
namespace sm90 {

/* This warp is done with a stage. */
template <class Config>
__device__ inline void release(Shared<Config> &s, int stage) {
    s.empty[stage].template arrive_once<Config::CONSUMER_WARPS>();
}

/* Calls fn(first), .., fn(end - 1) with constants. */
template <int first, int end, typename Fn>
__device__ inline void for_each_constant(Fn fn) {
    if constexpr (first < end) {
        fn(std::integral_constant<int, first>());
        for_each_constant<first + 1, end>(fn);
    }
}

/* For every k-tile: issue(stage, whether it is the first) issues its MMAs, and for the first SUBTILES k-tiles
 * meanwhile(i) runs while they are in flight. */
template <class Config, int SUBTILES, typename Issue, typename Meanwhile>
__device__ inline void for_each_k_tile(Shared<Config> &s, typename Config::Pipeline &pipe, int num_k_tiles,
                                       Issue issue, Meanwhile meanwhile) {
    auto k_tile = [&](auto first, auto i) {
        s.full[pipe.index].wait(pipe.phase);
        if constexpr (Config::GATHER) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        wgmma_fence();
        issue(s.stage[pipe.index], first);
        wgmma_commit_group();
        if constexpr (i.value < SUBTILES) meanwhile(i);
        if constexpr (Config::ALL_SWAPPED) { /* the MMAs of one k-tile take longer to end than to issue */
            wgmma_wait_group<1>();
            if (!first.value) release<Config>(s, (pipe.index + Config::STAGES - 1) % Config::STAGES);
        } else {
            wgmma_wait_group<0>();
            release<Config>(s, pipe.index);
        }
        pipe.advance();
    };
    k_tile(std::true_type(), std::integral_constant<int, 0>());
    for_each_constant<1, SUBTILES>([&](auto i) {
        if (i.value < num_k_tiles) k_tile(std::false_type(), i);
    });
    for (int i = SUBTILES > 1 ? SUBTILES : 1; i < num_k_tiles; i++)
        k_tile(std::false_type(), std::integral_constant<int, SUBTILES>());
    if constexpr (Config::ALL_SWAPPED) {
        wgmma_wait_group<0>();
        release<Config>(s, (pipe.index + Config::STAGES - 1) % Config::STAGES);
    }
}

/* d = the 64 rows of consumer `wg` times the tile's first COLUMNS columns. */
template <class Config, int COLUMNS, int SUBTILES, typename Meanwhile>
__device__ inline void run_mainloop(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                    int num_k_tiles, int wg, Meanwhile meanwhile) {
    using Operand = typename Config::Operand;
    constexpr Major A_MAJOR = Config::A_MAJOR, B_MAJOR = Config::B_MAJOR;
    auto issue = [&](auto &stage, auto first) {
        constexpr int N = COLUMNS < Config::WGMMA_N ? COLUMNS : Config::WGMMA_N;
        constexpr int a_step = K_STEP<A_MAJOR, Operand>, b_step = K_STEP<B_MAJOR, Operand>;
        constexpr int next_n =
            (SUBTILE_BYTES >> 4) * N / SUBTILE; /* what N more columns add to B's descriptor */
        uint64_t a = matrix_descriptor<A_MAJOR>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
#pragma unroll
        for (int i = 0; i < COLUMNS / N; i++, b += next_n) {
            float *accumulators = d + N / 2 * i;
            wgmma<N, !first.value, A_MAJOR, B_MAJOR>(accumulators, a, b, Operand());
#pragma unroll
            for (int k = 1; k < NUM_K_STEPS; k++)
                wgmma<N, 1, A_MAJOR, B_MAJOR>(accumulators, a + k * a_step, b + k * b_step, Operand());
        }
    };
    for_each_k_tile<Config, SUBTILES>(s, pipe, num_k_tiles, issue, meanwhile);
}

/* d += one more k-tile, whose rows of k past `rows` are zeros and get no wgmma. meanwhile() runs while the
 * others are in flight. */
template <class Config, int COLUMNS, typename Meanwhile>
__device__ inline void run_last_k_tile(float *d, Shared<Config> &s, typename Config::Pipeline &pipe, int rows,
                                       int wg, Meanwhile meanwhile) {
    using Operand = typename Config::Operand;
    constexpr Major A_MAJOR = Config::A_MAJOR, B_MAJOR = Config::B_MAJOR;
    constexpr int WGMMA_K = WGMMA_K_BYTES / (int)sizeof(Operand);
    auto &stage = s.stage[pipe.index];
    s.full[pipe.index].wait(pipe.phase);
    if constexpr (Config::GATHER) fence_proxy_async();
    uint64_t a = matrix_descriptor<A_MAJOR>(shared_address(stage.a) + wg * SUBTILE_BYTES);
    uint64_t b = Config::Weight::descriptor(shared_address(stage.b), 0);
#pragma unroll 1 /* branches around wgmmas would have ptxas serialise those of the main loop */
    for (; rows > 0; rows -= WGMMA_K, a += K_STEP<A_MAJOR, Operand>, b += K_STEP<B_MAJOR, Operand>) {
        wgmma_fence();
        wgmma<COLUMNS, 1, A_MAJOR, B_MAJOR>(d, a, b, Operand());
        wgmma_commit_group();
    }
    meanwhile();
    wgmma_wait_group<0>();
    release<Config>(s, pipe.index);
    pipe.advance();
}

/* A skinny expert by swap-AB: 64 output columns are wgmma's M, and the expert's rows are its N, padded to
 * TOKENS = 8, 16, 32 or 64 instead of to 128. A consumer has one or two subtiles of output columns: the
 * accumulators of the first are d[0 .. TOKENS / 2), of the second those after it. */
template <class Config, int TOKENS, int SUBTILES = Config::SUBTILES>
__device__ inline void run_mainloop_swapped(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                            int num_k_tiles, int first_subtile, int second_subtile) {
    using Operand = typename Config::Operand;
    constexpr Major W_MAJOR = Config::B_MAJOR;
    constexpr bool HAS_SECOND = SUBTILES > 1;
    auto issue = [&](auto &stage, auto first) {
        constexpr int x_step = K_STEP<Major::K, Operand>, w_step = K_STEP<W_MAJOR, Operand>;
        uint64_t x = matrix_descriptor<Major::K>(shared_address(stage.a));
        uint64_t w0 = Config::Weight::descriptor(shared_address(stage.b), first_subtile);
        uint64_t w1 = Config::Weight::descriptor(shared_address(stage.b), second_subtile);
        wgmma<TOKENS, !first.value, W_MAJOR, Major::K>(d, w0, x, Operand());
        if constexpr (HAS_SECOND)
            wgmma<TOKENS, !first.value, W_MAJOR, Major::K>(d + TOKENS / 2, w1, x, Operand());
#pragma unroll
        for (int k = 1; k < NUM_K_STEPS; k++) {
            wgmma<TOKENS, 1, W_MAJOR, Major::K>(d, w0 + k * w_step, x + k * x_step, Operand());
            if constexpr (HAS_SECOND)
                wgmma<TOKENS, 1, W_MAJOR, Major::K>(d + TOKENS / 2, w1 + k * w_step, x + k * x_step,
                                                    Operand());
        }
    };
    for_each_k_tile<Config, 0>(s, pipe, num_k_tiles, issue, [](auto) {});
    if constexpr (Config::ALL_SWAPPED)
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) pin(d[i]); /* not read before the last MMA's end */
}

/* --- fragments: a weight whose values are made in registers --------------------------------------------- */

/* d += A (a subtile's rows of a stage) times the rows of x at `rows`, by the warpgroup. */
template <class Config, int TOKENS, bool accumulate>
__device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint32_t rows) {
    using Operand = typename Config::Operand;
#pragma unroll
    for (int i = 0; i < Config::K_TILES * NUM_K_STEPS; i++) {
        uint64_t x = matrix_descriptor<Major::K>(rows + i / NUM_K_STEPS * Config::K_TILE_BYTES) +
                     i % NUM_K_STEPS * K_STEP<Major::K, Operand>;
        if (accumulate || i)
            wgmma<TOKENS, 1, Major::K>(d, a + 4 * i, x, Operand());
        else
            wgmma<TOKENS, 0, Major::K>(d, a + 4 * i, x, Operand());
    }
}

/* Where a lane has its part of eight rows of x, in a k-tile: of the first 32 columns, and of the others.
 * IN_REGISTERS, once for all stages: where one multiplication makes a pair, registers are left for them. */
template <bool IN_REGISTERS>
struct LaneRows {
    uint32_t offset[2];

    __device__ void init() {
        if constexpr (IN_REGISTERS)
            for (int i = 0; i < 2; i++) {
                offset[i] = swizzled(0, threadIdx.x % 8, 4 * i + threadIdx.x % 32 / 8);
                pin(offset[i]);
            }
    }

    /* Rows 8 n to 8 n + 7, k steps 2 i and 2 i + 1. */
    __device__ uint32_t at(uint32_t k_tile, int n, int i) const {
        if constexpr (IN_REGISTERS) return k_tile + 8 * SWIZZLE_BYTES * n + offset[i];
        int lane = threadIdx.x % 32;
        return swizzled(k_tile, 8 * n + lane % 8, 4 * i + lane / 8);
    }
};

/* The same by each warp for its sixteen rows, which has the same bits. */
template <class Config, int TOKENS, bool IN_REGISTERS>
__device__ __forceinline__ void multiply_by_warp(float *d, const uint32_t *a, uint32_t rows,
                                                 const LaneRows<IN_REGISTERS> &lane_rows) {
    using Operand = typename Config::Operand;
#pragma unroll
    for (int i = 0; i < Config::K_TILES * NUM_K_STEPS; i += 2)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            uint32_t x[4]; /* eight rows of 32 columns */
            ldmatrix_x4(x,
                        lane_rows.at(rows + i / NUM_K_STEPS * Config::K_TILE_BYTES, n, i % NUM_K_STEPS / 2));
#pragma unroll
            for (int j = 0; j < 2; j++)
                mma_m16n8k16(*(float (*)[4])(d + 4 * n), *(const uint32_t (*)[4])(a + 4 * (i + j)), x[2 * j],
                             x[2 * j + 1], Operand());
        }
}

/* Tiles of at most 16 rows use mma.sync per warp: a warpgroup's MMAs of 8 rows take as long as those of 32,
 * and the next values are not made before they have ended. */
constexpr int WARP_TOKENS = 16;

/* Waits for a tile's stages and releases them: other warps compute the tile. */
template <class Config>
__device__ inline void skip_stages(const GemmOf<Config> &p, Shared<Config> &s,
                                   typename Config::Pipeline &pipe) {
#pragma unroll 1
    for (int i = 0; i < p.num_k_tiles[0]; i++, pipe.advance()) {
        s.full[pipe.index].wait(pipe.phase);
        __syncwarp();
        release<Config>(s, pipe.index);
    }
}

/* Rows of x in STEPS k steps of a stage, as a warp's MMAs read them: eight rows of 32 columns at a time. The
 * product with the warp's sixteen rows of the weight has the bits of multiply(). */
template <class Config, int TOKENS, int STEPS>
struct RowFragments {
    uint32_t x[STEPS / 2][TOKENS / 8][4];

    template <bool IN_REGISTERS>
    __device__ void load(uint32_t rows, int first, const LaneRows<IN_REGISTERS> &lane_rows) {
#pragma unroll
        for (int i = 0; i < STEPS / 2; i++)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) {
                int step = first + 2 * i;
                ldmatrix_x4(x[i][n], lane_rows.at(rows + step / NUM_K_STEPS * Config::K_TILE_BYTES, n,
                                                  step % NUM_K_STEPS / 2));
            }
    }

    __device__ void multiply(float *d, const uint32_t *a) const {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) {
                const uint32_t *b = x[i / 2][n] + i % 2 * 2;
                mma_m16n8k16(*(float (*)[4])(d + 4 * n), *(const uint32_t (*)[4])(a + 4 * i), b[0], b[1],
                             typename Config::Operand());
            }
    }
};

/* Whether tiles of at most 16 rows are run_mainloop_ahead's. Other codes were not faster with it
 * (docs/lab.md). */
template <class Config>
constexpr bool LOADS_AHEAD = Config::SUBTILES == 1 && Config::Weight::Dequantizer::CODE == Code::INT4;

/* A swapped tile of at most 16 rows, by warps: under the second half of a stage's MMAs a warp loads the next
 * stage's codes and scales.
 *
 *   |make A |4 MMAs |release; wait: next stage |its codes, scales |4 MMAs |make A |.. */
template <class Config, int TOKENS, bool IS_UP_GATE>
__device__ __forceinline__ void run_mainloop_ahead(float *d, const GemmOf<Config> &p, Shared<Config> &s,
                                                   typename Config::Pipeline &pipe, int wg) {
    using Weight = typename Config::Weight;
    using Dequantizer = typename Weight::Dequantizer;
    constexpr int K_TILES = Config::K_TILES, HALF = K_TILES * NUM_K_STEPS / 2;
    constexpr bool HAS_QUICK = Dequantizer::HAS_QUICK;
    static_assert(K_TILES == 2);
    const Scales &scales = p.weight.scales;
    const auto dequantizer = Dequantizer::make();
    LaneRows<HAS_QUICK && !(Config::FEW_ROWS && Config::GATHER)> lane_rows; /* a gather needs its registers */
    lane_rows.init();
    const LaneOffsets offsets = Weight::template offsets_of<IS_UP_GATE>(p, Weight::TILES, wg);
    StageCodes<Dequantizer, K_TILES> codes;
    QuickFactors<Dequantizer, K_TILES> quick;
    auto load = [&] {
        s.full[pipe.index].wait(pipe.phase);
        uint32_t b = shared_address(s.stage[pipe.index].b);
        codes.load(b, offsets);
        if constexpr (HAS_QUICK)
            quick.load(b, offsets, scales);
        else if constexpr (!Dequantizer::GROUPED)
            codes.factors.load(b, offsets, 0, scales);
    };
    uint32_t a[16 * K_TILES];
    RowFragments<Config, TOKENS, HALF> x;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0;
    bool is_quick = false;
    auto make_quick = [&] {
        if constexpr (HAS_QUICK) is_quick = quick.make(scales);
    };
    load();
    make_quick();
#pragma unroll 1
    for (int i = 1;; i++) {
        auto &stage = s.stage[pipe.index];
        uint32_t rows = shared_address(stage.a), b = shared_address(stage.b);
        x.load(rows, 0, lane_rows);
        auto make = [&] {
#pragma unroll
            for (int k_tile = 0; k_tile < K_TILES; k_tile++) {
                if (Dequantizer::GROUPED || (HAS_QUICK && !k_tile))
                    codes.factors.load(b, offsets, k_tile, scales);
                codes.make_fragments(a, k_tile, dequantizer);
            }
            x.multiply(d, a);
        };
        if constexpr (HAS_QUICK) { /* the MMAs are in both branches, so unpacking runs beside them */
            if (is_quick) {
                codes.make_quick_fragments(a, quick);
                x.multiply(d, a);
            } else {
                make();
            }
        } else {
            make();
        }
        x.load(rows, HALF, lane_rows);
        __syncwarp();
        release<Config>(s, pipe.index);
        pipe.advance();
        if (i == p.num_k_tiles[0]) break;
        load();
        x.multiply(d, a + 4 * HALF);
        make_quick();
    }
    x.multiply(d, a + 4 * HALF);
}

/* A swapped tile by fragments. Few rows have many warps, each with one subtile: some unpack while loads, or
 * the MMAs of others, run. With many rows a consumer has two subtiles and unpacks one while the MMAs of the
 * other run, so a stage's rows are read for twice the columns.
 *
 *   one subtile, two k-tiles
 *     |wait: stage |codes, scales |wait: MMAs of the stage before; release it |make A |8 MMAs |..
 *   two subtiles, one k-tile
 *     |wait: stage |codes, scales |wait: this subtile's MMAs before |make A |4 MMAs |the other subtile .. */
template <class Config, int TOKENS, bool IS_UP_GATE>
__device__ __forceinline__ void run_mainloop_fragments(float *d, const GemmOf<Config> &p, Shared<Config> &s,
                                                       typename Config::Pipeline &pipe, int wg) {
    using Weight = typename Config::Weight;
    using Dequantizer = typename Weight::Dequantizer;
    constexpr int SUBTILES = Config::SUBTILES;
    constexpr bool BY_WARP = TOKENS <= WARP_TOKENS;
    constexpr bool HAS_QUICK = BY_WARP && Dequantizer::HAS_QUICK && Config::K_TILES == 2;
    const auto dequantizer = Dequantizer::make();
    LaneRows<HAS_QUICK && !(Config::FEW_ROWS && Config::GATHER)> lane_rows; /* a gather needs its registers */
    lane_rows.init();
    LaneOffsets offsets[SUBTILES];
#pragma unroll
    for (int i = 0; i < SUBTILES; i++)
        offsets[i] = Weight::template offsets_of<IS_UP_GATE>(p, Weight::TILES, SUBTILES * wg + i);
    uint32_t a[SUBTILES][Weight::Tile::COLUMNS / 4];
    int previous = 0;
    auto run_stage = [&](auto first) {
        auto &stage = s.stage[pipe.index];
        s.full[pipe.index].wait(pipe.phase);
        if (Config::GATHER && !BY_WARP) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        uint32_t rows = shared_address(stage.a), b = shared_address(stage.b);
#pragma unroll
        for (int i = 0; i < SUBTILES; i++) {
            StageCodes<Dequantizer, Config::K_TILES> codes;
            codes.load(b, offsets[i]);
            if constexpr (HAS_QUICK) { /* the MMAs are in both branches, so unpacking runs beside them */
                QuickFactors<Dequantizer, Config::K_TILES> quick;
                if (quick.load_and_make(b, offsets[i], p.weight.scales)) {
                    codes.make_quick_fragments(a[i], quick);
                    multiply_by_warp<Config, TOKENS>(d + TOKENS / 2 * i, a[i], rows, lane_rows);
                    continue;
                }
            }
            codes.factors.load(b, offsets[i], 0, p.weight.scales);
            if constexpr (!BY_WARP) {
                wgmma_wait_group<SUBTILES - 1>(); /* for those that read a[i] */
                if (i == SUBTILES - 1 && !first.value) release<Config>(s, previous);
            }
            codes.make_fragments(a[i], 0, dequantizer);
            if constexpr (Config::K_TILES == 2) {
                if (Dequantizer::GROUPED) codes.factors.load(b, offsets[i], 1, p.weight.scales);
                codes.make_fragments(a[i], 1, dequantizer);
            }
            float *accumulators = d + TOKENS / 2 * i;
            if constexpr (BY_WARP) {
                multiply_by_warp<Config, TOKENS>(accumulators, a[i], rows, lane_rows);
            } else {
                for (uint32_t &word : a[i]) pin(word); /* all are made before the first wgmma */
                wgmma_fence();
                multiply<Config, TOKENS, !first.value>(accumulators, a[i], rows);
                wgmma_commit_group();
            }
        }
        if constexpr (BY_WARP) {
            __syncwarp();
            release<Config>(s, pipe.index);
        }
        previous = pipe.index;
        pipe.advance();
    };
    if constexpr (BY_WARP) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) d[i] = 0;
    } else {
        run_stage(std::true_type());
    }
#pragma unroll 1
    for (int i = BY_WARP ? 0 : 1; i < p.num_k_tiles[0]; i++) run_stage(std::false_type());
    if constexpr (!BY_WARP) {
        wgmma_wait_group<0>();
        release<Config>(s, previous);
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) pin(d[i]); /* not read before the last MMA's end */
    }
}

/* A tall tile: a consumer has one subtile, and registers for the values of two stages. Stages are even in
 * number (num_stages), so that no branch is between MMAs: ptxas would have each wait for the one before.
 *
 *   |wait: stage |codes, scales |make A, one of two |wait: MMAs before; release it |4 MMAs |.. */
template <class Config, bool IS_UP_GATE>
__device__ __forceinline__ void run_mainloop_tall(float *d, const GemmOf<Config> &p, Shared<Config> &s,
                                                  typename Config::Pipeline &pipe, int wg) {
    using Weight = typename Config::Weight;
    using Dequantizer = typename Weight::Dequantizer;
    constexpr int TOKENS = Config::BM;
    const auto dequantizer = Dequantizer::make();
    const LaneOffsets offsets = Weight::template offsets_of<IS_UP_GATE>(p, Weight::TILES / 2, wg);
    uint32_t even[Weight::Tile::COLUMNS / 4], odd[Weight::Tile::COLUMNS / 4];
    int previous = 0;
    auto run_stage = [&](auto first, auto &a) {
        auto &stage = s.stage[pipe.index];
        s.full[pipe.index].wait(pipe.phase);
        if (Config::GATHER) fence_proxy_async();
        StageCodes<Dequantizer, 1> codes;
        codes.load(shared_address(stage.b), offsets);
        codes.factors.load(shared_address(stage.b), offsets, 0, p.weight.scales);
        codes.make_fragments(a, 0, dequantizer);
        for (uint32_t &word : a) pin(word);
        if constexpr (!first.value) {
            wgmma_wait_group<0>(); /* meanwhile the other consumer's MMAs run */
            release<Config>(s, previous);
        }
        wgmma_fence();
        multiply<Config, TOKENS, !first.value>(d, a, shared_address(stage.a));
        wgmma_commit_group();
        previous = pipe.index;
        pipe.advance();
    };
    run_stage(std::true_type(), even);
    run_stage(std::false_type(), odd);
#pragma unroll 1
    for (int i = 2; i < p.num_k_tiles[0]; i += 2) {
        run_stage(std::false_type(), even);
        run_stage(std::false_type(), odd);
    }
    wgmma_wait_group<0>();
    release<Config>(s, previous);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) pin(d[i]);
}

} // namespace sm90
} // namespace fused_moe
