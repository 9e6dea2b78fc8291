/* Configurations of the sm90 GEMMs: tiles, stages, warps and registers, and which of them serves a call.
 *
 * An operand's element, an output's and a bias's are types of their own. A k-tile is one swizzle span of the
 * operand, 128 bytes of k: 64 elements of 16 bits, 128 of 8. */
#pragma once

#include <utility>

#include "launch.cuh"
#include "weight.cuh"
#include "weight_quantized.cuh"
#include "writers.cuh"

namespace fused_moe {
namespace sm90 {

/* Registers of a thread at launch: an SM has 64 Ki, a thread gets a multiple of eight. */
template <int threads>
constexpr int LAUNCH_REGISTERS = 64 * 1024 / threads / 8 * 8;

/* Full tiles of 128x256, one CTA per SM. */
template <typename Operand_, Major B_MAJOR_, bool GATHER_, typename Out_ = Operand_, typename Bias_ = Out_>
struct GemmConfig {
    using Operand = Operand_;
    using Out = Out_;
    using Bias = Bias_;
    static constexpr Major A_MAJOR = Major::K, B_MAJOR = B_MAJOR_;
    static constexpr bool GATHER = GATHER_;

    static constexpr bool ALL_SWAPPED = false; /* every tile is computed by swap-AB */
    /* With reads_before_wait a gather loads weights before it waits for the rows. */
    static constexpr bool GATHERS_EARLY = false;
    static constexpr int CTAS_PER_SM = 1, CONSUMERS = 2; /* warpgroups */
    static constexpr int BM = SUBTILE * CONSUMERS, BN = 256, STAGES = 4, WGMMA_N = BN;
    static constexpr int CUT_ROWS = 0; /* a plan's tile of more rows is cut; 0: none is */
    static constexpr int K_TILES = 1;  /* in a stage */
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILES * K_TILE_BYTES;
    /* Swapped tiles: wgmma's N, the first that holds their rows, and a consumer's subtiles of the weight. */
    using Tokens = std::integer_sequence<int, 8, 32, 64>;
    static constexpr int SUBTILES = 2;
    static constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int LOAD_WARPS = GATHER ? 3 : 1;
    static constexpr int STAGES_AT_ONCE = 1; /* that a gather loads before its pointers move on */
    /* A thread's after setmaxnreg, which takes registers from the producer for the consumers. */
    static constexpr int PRODUCER_REGISTERS = GATHER ? 72 : 40;
    static constexpr int CONSUMER_REGISTERS = GATHER ? 216 : 232;
    static constexpr int EPILOGUE_REGISTERS = 0;        /* there is no epilogue warpgroup */
    static constexpr int STAGING_BYTES = Writer::BYTES; /* of a warpgroup */
    using Weight = DenseWeight<Operand, B_MAJOR, BN>;
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + LOAD_WARPS, GATHER ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* Tiles of experts that have few rows on average, where a GEMM takes as long as reading its weights. All are
 * computed by swap-AB: ROWS rows at most and COLUMN_SUBTILES subtiles of columns. Two CTAs of 256 threads,
 * with one consumer each, share an SM. Their loads in flight keep the memory busy even with one token's
 * tiles. */
template <typename Operand_, Major B_MAJOR_, bool GATHER_, int ROWS, int COLUMN_SUBTILES>
struct FewRowsConfig : GemmConfig<Operand_, B_MAJOR_, GATHER_> {
    static constexpr bool ALL_SWAPPED = true;
    static constexpr int CTAS_PER_SM = 2, CONSUMERS = 1, SUBTILES = COLUMN_SUBTILES;
    static constexpr int BM = ROWS, BN = SUBTILE * SUBTILES, CUT_ROWS = ROWS;
    using Tokens = std::conditional_t<ROWS == 16, std::integer_sequence<int, 8, 16>,
                                      std::integer_sequence<int, 16, 32, 64>>;
    static_assert(ROWS == 16 || ROWS == 64);
    static constexpr int K_TILE_BYTES = BM * SWIZZLE_BYTES, A_BYTES = K_TILE_BYTES;
    using Weight = DenseWeight<Operand_, B_MAJOR_, BN>;
    static constexpr int STAGES = 108 * 1024 / (A_BYTES + Weight::STAGE_BYTES);
    static constexpr int THREADS = 256, CONSUMER_WARPS = 4;
    static constexpr int CONSUMER_REGISTERS = 0; /* threads keep those that they were launched with */
    static constexpr int STAGING_BYTES = SkinnyWriter<ROWS>::BYTES;
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + FewRowsConfig::LOAD_WARPS, GATHER_ ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* Quantised weights. Unpacking is hidden behind loads where rows are few, behind MMAs where they are many.
 * The instructions that a warp issues for it take the time (docs/lab.md). */
template <class Dequantizer, bool GATHER_, Height HEIGHT>
struct QuantizedConfig : QuantizedTile<HEIGHT> {
    using Tile = QuantizedTile<HEIGHT>;
    using Operand = typename Dequantizer::T;
    using Out = Operand;
    using Bias = Operand;
    using Weight = QuantizedWeight<Dequantizer, HEIGHT>;
    static constexpr Major A_MAJOR = Major::K, B_MAJOR = Major::K;
    static constexpr bool GATHER = GATHER_, ALL_SWAPPED = true, GATHERS_EARLY = false;
    static constexpr int CTAS_PER_SM = Tile::FEW_ROWS ? 2 : 1, CUT_ROWS = Tile::BM;
    using Tokens = std::conditional_t<
        Tile::HAS_TALL, std::integer_sequence<int, 16, 64, Tile::WIDE_ROWS, Tile::BM>,
        std::conditional_t<Tile::MANY_ROWS, std::integer_sequence<int, 16, 64, Tile::WIDE_ROWS>,
                           std::conditional_t<Tile::FEW_ROWS, std::integer_sequence<int, 8, 16>,
                                              std::integer_sequence<int, 8, 16, 32, 48, 64>>>>;
    using Lines = LineWriter<Tile::HAS_TALL ? 64 : Tile::WIDE_ROWS>; /* of many rows */
    static constexpr int STAGING_BYTES = Tile::FEW_ROWS    ? 4 * 1024
                                         : Tile::MANY_ROWS ? Lines::BYTES
                                                           : SkinnyWriter<Tile::BM>::BYTES;
    static constexpr int MEMORY = (Tile::FEW_ROWS ? 108 : Tile::HAS_TALL ? 222 : 220) * 1024;
    static constexpr int STAGES =
        (MEMORY - Tile::CONSUMERS * STAGING_BYTES) / (Tile::A_BYTES + Weight::STAGE_BYTES);
    static constexpr int THREADS = 128 * (1 + Tile::CONSUMERS), CONSUMER_WARPS = 4 * Tile::CONSUMERS;
    static constexpr int LOAD_WARPS = GATHER || Tile::FEW_ROWS ? 3 : 1;
    static constexpr int STAGES_AT_ONCE = Tile::MANY_ROWS ? 4 : 1;
    static constexpr int PRODUCER_REGISTERS = Tile::FEW_ROWS    ? 48
                                              : Tile::HAS_TALL  ? 88
                                              : Tile::MANY_ROWS ? 72
                                                                : 64;
    static constexpr int CONSUMER_REGISTERS = Tile::FEW_ROWS    ? 96
                                              : Tile::HAS_TALL  ? 208
                                              : Tile::MANY_ROWS ? 216
                                                                : 104;
    static constexpr int EPILOGUE_REGISTERS = 0;
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + LOAD_WARPS, GATHER ? Tile::BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* --- wgmma's N for the rows of a swapped tile: the first of Config::Tokens that holds them -------------- */

template <int N, int... MORE>
__device__ inline int first_of(std::integer_sequence<int, N, MORE...>, int rows) {
    if constexpr (sizeof...(MORE) > 0)
        return rows <= N ? N : first_of(std::integer_sequence<int, MORE...>(), rows);
    return N;
}

template <int N, int... MORE, typename Fn>
__device__ __forceinline__ void with_first_of(std::integer_sequence<int, N, MORE...>, int rows, Fn fn) {
    if constexpr (sizeof...(MORE) > 0) {
        if (rows > N) return with_first_of(std::integer_sequence<int, MORE...>(), rows, fn);
    }
    fn(std::integral_constant<int, N>());
}

/* Calls fn with that N, a constant. */
template <class Config, typename Fn>
__device__ __forceinline__ void with_tokens(int rows, Fn fn) {
    with_first_of(typename Config::Tokens(), rows, fn);
}

/* --- what a launch gives its kernel, and shared memory -------------------------------------------------- */

/* What every GEMM has; a kernel's parameters begin with it. up_dgrad has two parts: its k is that of two
 * weights, one after the other. */
template <class WeightParams>
struct Gemm {
    CUtensorMap a[2];         /* (R, k of part i); not with a gather      */
    CUtensorMap tail[2];      /* the same in boxes of TAIL_ROWS           */
    WeightParams weight;      /* B                                        */
    const void *x;            /* [T, k] A before the gather               */
    const int32_t *row_token; /* [R]; NULL: row r is token r              */
    int64_t T;
    int32_t k;              /* of x                                                 */
    int32_t num_k_tiles[2]; /* of part i; with a quantised weight stages            */
    bool gate_up;           /* B is gate and up, which share a tile's columns       */
    TileSource tiles;
    FusedMoeRoutePlan unplanned; /* the kernel makes this plan, where tiles has no offs */
};
using DenseGemm = Gemm<DenseParams>;
template <class Config>
using GemmOf = Gemm<typename Config::Weight::Params>;

template <class Config>
struct alignas(1024) Shared {
    using FullBarrier =
        std::conditional_t<Config::GATHER || Config::Weight::HAS_SCALES,
                           Barrier<TmaThread, CopyingWarps<Config::LOAD_WARPS>>, Barrier<TmaThread>>;
    struct Stage {
        uint8_t a[Config::A_BYTES];
        uint8_t b[Config::Weight::STAGE_BYTES];
    } stage[Config::STAGES];
    uint8_t staging[Config::CONSUMERS][Config::STAGING_BYTES];
    FullBarrier full[Config::STAGES];
    Barrier<Warps<Config::CONSUMER_WARPS>> empty[Config::STAGES];
    typename Config::Queue queue;
};

/* The shared memory of a GEMM that may make its plan itself. */
template <class Config>
struct PlanningShared : Shared<Config> {
    FusedMoeSlotPlan plan;
};

/* --- host: the rows and tiles of a call ----------------------------------------------------------------- */

/* The kernel makes this plan itself. */
template <class WeightParams>
void plan_in_kernel(Gemm<WeightParams> &p, const FusedMoeRoutePlan &unplanned) {
    p.unplanned = unplanned;
    p.tiles.offs = p.tiles.schedule = nullptr;
    p.tiles.counters = nullptr;
}

/* Sets up_gate's rows, which may be gathered, its k-tiles of k_tile columns, and its tiles of bn rows of B. A
 * map of B has b_rows. */
template <class WeightParams>
void set_rows(Gemm<WeightParams> &gemm, const FusedMoeUpGate &p, int k_tile, bool gate_up, int64_t b_rows,
              int bn) {
    const FusedMoeRowMap &rows = p.row_map;
    gemm.x = p.x;
    gemm.row_token = rows.row_token;
    gemm.T = rows.T;
    gemm.k = (int32_t)p.D;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.D, k_tile);
    gemm.gate_up = gate_up;
    gemm.tiles = tile_source(rows.offs, rows.schedule, rows.R, rows.E, b_rows, gate_up ? bn / 2 : bn,
                             p.workspace.counters);
    if (p.unplanned) plan_in_kernel(gemm, *p.unplanned);
}

/* Sets the down GEMM's tiles of bn columns. The GEMM may begin while up_gate runs. */
template <class WeightParams>
void set_tiles(Gemm<WeightParams> &gemm, const FusedMoeGroupedMM &p, int bn) {
    gemm.tiles = tile_source(p.offs, p.schedule, p.R, p.E, p.M, bn, p.workspace.counters);
    gemm.tiles.pdl = p.pdl;
    if (p.pdl.reads_before_wait)
        gemm.tiles.counters += FUSED_MOE_NUM_COUNTERS / 2; /* up_gate uses the first half */
    if (p.unplanned) {
        plan_in_kernel(gemm, *p.unplanned);
        gemm.unplanned.counts = gemm.unplanned.token_row = nullptr; /* up_gate wrote them */
    }
}

/* --- host: the configuration of a call ------------------------------------------------------------------ */

/* Rows of a tile of R rows of E experts whose weights are quantised. */
inline int32_t quantized_tile_rows(int64_t R, int32_t E) {
    return schedule_override().no_tails ? FUSED_MOE_TILE_ROWS : fused_moe_quantized_tile_rows(R, E);
}

/* Whether there are tiles for few rows. Weights that are (E, k, N) in memory have them in bf16 alone, in
 * grouped_mm, whose gradients read any weight so, and in one launch (experts.cu), which is how such models
 * decode. */
template <typename Operand, Major B_MAJOR, bool GATHER>
constexpr bool has_few_rows_tiles() {
    return B_MAJOR == Major::K || (!GATHER && std::is_same_v<Operand, __nv_bfloat16>);
}

/* Calls fn with a configuration for R rows of E experts, a number of output columns, and k. */
template <typename Operand, bool GATHER, typename Fn>
int with_config(bool is_k_major, int64_t R, int32_t E, int64_t columns, int64_t k, Fn fn) {
    auto with_major = [&](auto major) {
        constexpr Major B_MAJOR = decltype(major)::value;
        bool is_countable = fused_moe_max_row_tiles((int32_t)R, E, 16) * ((columns + 63) / 64) < INT32_MAX;
        int rows = is_countable && !schedule_override().no_tails ? fused_moe_few_rows(R, E) : 0;
        if constexpr (has_few_rows_tiles<Operand, B_MAJOR, GATHER>()) {
            if constexpr (!GATHER)
                if (fused_moe_few_rows_subtiles(rows, k) == 1)
                    return fn(FewRowsConfig<Operand, B_MAJOR, GATHER, 16, 1>());
            if (rows == 16) return fn(FewRowsConfig<Operand, B_MAJOR, GATHER, 16, 2>());
            if (rows == 64) return fn(FewRowsConfig<Operand, B_MAJOR, GATHER, 64, 2>());
        }
        return fn(GemmConfig<Operand, B_MAJOR, GATHER>());
    };
    return is_k_major ? with_major(std::integral_constant<Major, Major::K>())
                      : with_major(std::integral_constant<Major, Major::MN>());
}

} // namespace sm90
} // namespace fused_moe
