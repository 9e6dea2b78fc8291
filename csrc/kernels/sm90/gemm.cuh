/* Grouped GEMM for Hopper: D[r,:] = A[r,:] B[e(r)]^T. Persistent, warp-specialised, one CTA per SM, tiles of
 * 128x256x64; where experts have few rows, two smaller CTAs per SM (FewRowsConfig).
 *
 * Roles (384 threads; down_dgrad adds an epilogue warpgroup)
 *   warpgroup 0     producer: warp 3 fetches work tiles; warp 0 loads A and B by TMA, or warps 0-2 gather A
 *                   by cp.async and warp 0 loads B
 *   warpgroups 1-2  consumers: wgmma m64n256k16 on 64 rows each, then the epilogue
 * Pipelines                                    full: arrivals                     empty: arrivals
 *   k-tile stage x4  (producer -> consumers)   1 + TMA bytes, +96 with a gather   8: one per consumer warp
 *   work tile    x2  (warp 3 -> all)           32                                 one per reading warp
 *
 *   stage      0      1      2      3      0      1 ...              one k-tile each
 *   producer   |A B   |A B   |A B   |A B   |A B (waits until both consumers have released stage 0)
 *   consumer 1        |k 0   |k 1   |k 2   |...        |hold |k 0 of the next tile |k 1 ..
 *   consumer 2        |k 0   |k 1   |k 2   |...        |hold |k 0                  |k 1 ..
 *   stores                                                   |subtile 0            |subtile 1 ..
 *
 * Overlapped epilogue (grouped_mm, and wgrad where dw has a's dtype): hold() rounds the accumulators into
 * registers, and each of the first k-tiles of the NEXT work tile stores one 64-column subtile while its MMAs
 * run. Only the rounding stands between two tiles, even where a tile has few k-tiles, so one schedule serves
 * every shape, and there is no choice of ping-pong or cooperative. up_gate, and wgrad in f32, store at once:
 * there are no registers to hold h and a, or unrounded accumulators.
 *
 * A consumer waits for a k-tile's MMAs before it releases the stage, not one k-tile later. Meanwhile the
 * other consumer's MMAs keep the tensor cores busy, and holding a stage longer costs more.
 *
 * Which CTA computes which tile matters more than anything in the main loop: neighbouring CTAs in lockstep
 * read shared rows and columns once from L2 (schedule.h). So all full tiles last equally long: both consumers
 * compute, even where the second's rows are past the expert's end. Tiles that cost much less are computed as
 * such: half-N tiles, and skinny experts with swapped operands (the weight is wgmma's A, the tokens its B).
 *
 * A gathered by cp.async is written by 96 threads, which apply the swizzle. Their copies arrive at the
 * stage's full barrier on completion. They are ordinary writes, so a consumer fences them for wgmma after its
 * wait.
 *
 * What was tried and dropped is in docs/lab/forward.md: clusters that share B by multicast, prefetches into
 * L2, stores from registers, three stages with a larger staging buffer. */
#pragma once

#include <type_traits>

#include "../dispatch.cuh"
#include "slot_plan.cuh"
#include "tile_queue.cuh"
#include "writers.cuh"

namespace fused_moe {
namespace sm90 {

/* What every GEMM has; a kernel's parameters begin with it. */
typedef struct {
    CUtensorMap a[2];         /* (R, k of part i); not with a gather                          */
    CUtensorMap tail[2];      /* the same in boxes of TAIL_ROWS                               */
    CUtensorMap b[2];         /* (E, N, k of part i), or (E, F, k) of gate and of up          */
    const void *x;            /* [T, k] A before the gather                                   */
    const int32_t *row_token; /* [R]; NULL: row r is token r                                  */
    int64_t T;
    int32_t k;              /* of x                                                         */
    int32_t num_k_tiles[2]; /* of part i                                                    */
    bool gate_up;           /* b is gate and up, which share a tile's columns               */
    TileSource tiles;
    FusedMoeRoutePlan slots; /* of which the kernel makes the plan, where tiles has no offs */
} Gemm;

/* The launch's kernel makes the plan of these slots itself. */
inline void plan_in_kernel(Gemm &p, const FusedMoeRoutePlan &slots) {
    p.slots = slots;
    p.tiles.offs = p.tiles.schedule = nullptr;
    p.tiles.counters = nullptr;
}

/* Rows of a box of A in a tile that is skinny or lacks rows: load_a. */
constexpr int TAIL_ROWS = 16;

/* Registers of a thread at launch: an SM has 64 Ki, a thread gets a multiple of eight. */
template <int threads>
constexpr int LAUNCH_REGISTERS = 64 * 1024 / threads / 8 * 8;

/* Named barriers beside barrier 0, which is __syncthreads'. */
enum NamedBarrier { WARPGROUP_BARRIER = 1 }; /* + the consumer warpgroup's number */

template <typename T_, Major B_MAJOR_, bool GATHER_>
struct GemmConfig {
    using T = T_;
    static constexpr Major A_MAJOR = Major::K, B_MAJOR = B_MAJOR_;
    static constexpr bool GATHER = GATHER_;

    static constexpr bool FEW_ROWS = false;
    static constexpr int CTAS_PER_SM = 1, CONSUMERS = 2; /* warpgroups */
    static constexpr int BM = SUBTILE * CONSUMERS, BN = 256, STAGES = 4, WGMMA_N = BN;
    static constexpr int CUT_ROWS = 0; /* of a tile, at most: a plan's tile of more is cut; 0: none is */
    static constexpr int A_BYTES = BM * SWIZZLE_BYTES; /* in a stage */
    static constexpr int SKINNY_SUBTILES = 2;          /* of B, which a consumer computes of a skinny tile */
    static constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int LOAD_WARPS = GATHER ? 3 : 1;
    /* Of a thread after setmaxnreg, which takes registers from the producer for the consumers. */
    static constexpr int PRODUCER_REGISTERS = GATHER ? 72 : 40;
    static constexpr int CONSUMER_REGISTERS = GATHER ? 216 : 232;
    static constexpr int EPILOGUE_REGISTERS = 0;                 /* there is no epilogue warpgroup */
    static constexpr int STAGING_BYTES = Writer::BYTES;          /* of a warpgroup */
    static constexpr int B_BYTES = BN / SUBTILE * SUBTILE_BYTES; /* in a stage */
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + LOAD_WARPS, GATHER ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

/* Of experts that have few rows on average, where a GEMM takes as long as reading its weights. All tiles are
 * computed as skinny ones are, of ROWS rows at most and SUBTILES subtiles of columns. Two CTAs of 256 threads,
 * with one consumer each, share an SM: so many loads are in flight, from so many places, that even one token's
 * tiles keep the memory busy. */
template <typename T_, Major B_MAJOR_, bool GATHER_, int ROWS, int SUBTILES>
struct FewRowsConfig : GemmConfig<T_, B_MAJOR_, GATHER_> {
    static constexpr bool FEW_ROWS = true;
    static constexpr int CTAS_PER_SM = 2, CONSUMERS = 1;
    static constexpr int SKINNY_SUBTILES = SUBTILES;
    static constexpr int BM = ROWS, BN = SUBTILE * SUBTILES, CUT_ROWS = ROWS;
    static constexpr int MIN_N =
        ROWS / (ROWS > 16 ? 4 : 2); /* of wgmma; the others are its doubles, to ROWS */
    static constexpr int A_BYTES = BM * SWIZZLE_BYTES, B_BYTES = BN / SUBTILE * SUBTILE_BYTES;
    static constexpr int STAGES = 108 * 1024 / (A_BYTES + B_BYTES);
    static constexpr int THREADS = 256, CONSUMER_WARPS = 4;
    static constexpr int STAGING_BYTES = SkinnyWriter<ROWS>::BYTES;
    using Queue = TileQueue<WorkTile, CONSUMER_WARPS + FewRowsConfig::LOAD_WARPS, GATHER_ ? BM : 0>;
    using Pipeline = PipelineState<STAGES>;
};

template <class Config>
struct alignas(1024) Shared {
    struct Stage {
        uint8_t a[Config::A_BYTES];
        uint8_t b[Config::B_BYTES];
    } stage[Config::STAGES];
    uint8_t staging[Config::CONSUMERS][Config::STAGING_BYTES];
    uint64_t full[Config::STAGES], empty[Config::STAGES];
    typename Config::Queue queue;
};

/* Of a GEMM that may make its plan itself. */
template <class Config>
struct PlanningShared : Shared<Config> {
    FusedMoeSlotPlan plan;
};

/* wgmma's N for the rows of a skinny tile. */
__device__ inline int num_tokens_of(const WorkTile &tile) {
    return tile.num_rows <= 8 ? 8 : tile.num_rows <= 32 ? 32 : 64;
}

/* --- the kernel: roles ---------------------------------------------------------------------------------- */

template <class Config>
__device__ inline Shared<Config> &prologue();
template <class Config>
__device__ inline void load_tma(const Gemm &p, Shared<Config> &s);
template <class Config>
__device__ inline void load_gather(const Gemm &p, Shared<Config> &s);
template <class Config, int COLUMNS, int SUBTILES, typename Meanwhile>
__device__ inline void run_mainloop(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                    int num_k_tiles, int wg, Meanwhile meanwhile);
template <class Config, int TOKENS, int SUBTILES = Config::SKINNY_SUBTILES>
__device__ inline void run_mainloop_swapped(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                            int num_k_tiles, int first_subtile, int second_subtile);

/* The token of row i of a tile. One out of range, which no plan of ours has, is token 0. */
__device__ inline int token_of_row(const Gemm &p, const WorkTile &tile, int i) {
    if (tile.expert < 0 || i >= tile.num_rows) return 0; /* nothing is read */
    int row = tile.first_row + i, token = p.row_token ? p.row_token[row] : row;
    return (uint32_t)token < (uint64_t)p.T ? token : 0;
}

/* The fetching warp of a GEMM whose rows may be gathered. */
template <int CUT_ROWS, class Queue>
__device__ inline void fetch_gemm_tiles(const Gemm &p, Queue &queue) {
    auto decode = [&](uint32_t index, WorkTile &tile) {
        const TileSource &source = p.tiles;
        int32_t R = (int32_t)source.R;
        FusedMoeWorkTile work =
            fused_moe_work_tile(source.schedule, source.offs, source.E, R, &source.order, index);
        set_tile(source, work, tile);
        if (source.has_tall && !tile.half_n)
            set_tile(source, fused_moe_tall_tile(work, source.offs, R, &source.order), tile);
        return true;
    };
    auto token_of = [&](const WorkTile &tile, int i) { return token_of_row(p, tile, i); };
    uint32_t num_tiles =
        fused_moe_num_work_tiles(p.tiles.schedule, p.tiles.E, (int32_t)p.tiles.R, &p.tiles.order);
    auto prepare = [](WorkTile &) {};
    auto is_long = [](const WorkTile &) { return false; }; /* all take about as long */
    fetch_tiles<CUT_ROWS>(p.tiles, queue, num_tiles, decode, token_of, prepare, is_long);
}

/* The producer's warps. */
template <class Config>
__device__ inline void produce(const Gemm &p, PlanningShared<Config> &s, int warp) {
    if (!p.tiles.starts_early) griddepcontrol_wait();
    if (warp == 3 && !p.tiles.offs)
        fetch_slot_tiles<Config::CUT_ROWS>(p.tiles, p.slots, s.plan, s.queue);
    else if (warp == 3)
        fetch_gemm_tiles<Config::CUT_ROWS>(p, s.queue);
    else if constexpr (Config::GATHER)
        load_gather<Config>(p, s);
    else if (warp == 0)
        load_tma<Config>(p, s);
}

/* What run_mainloop_swapped left of consumer wg's subtiles, with a bias [E,M], to out [R,M]: p has bias, out
 * and M. */
template <typename T, int TOKENS, int SUBTILES, class Params, class Writer>
__device__ __forceinline__ void store_swapped_subtiles(const Params &p, float *d, const WorkTile &tile,
                                                       int wg, int warp, Writer &writer) {
    const T *bias = p.bias ? (const T *)p.bias + (int64_t)tile.expert * p.M : nullptr;
#pragma unroll
    for (int i = 0; i < SUBTILES; i++) {
        int first = tile.first_column + (SUBTILES * wg + i) * SUBTILE + 16 * warp;
        if (first >= p.M || (tile.half_n && wg)) return; /* these columns were not loaded */
        if (bias) add_bias_swapped<TOKENS>(&d[TOKENS / 2 * i], bias, first, p.M);
        T *out = (T *)p.out + (int64_t)tile.first_row * p.M + first;
        writer.template store_swapped<TOKENS>(&d[TOKENS / 2 * i], out, p.M, tile.num_rows, p.M - first);
    }
}

/* Calls fn with wgmma's N for the rows of a tile of few rows. */
template <int N, int ROWS, typename Fn>
__device__ __forceinline__ void with_few_tokens(const WorkTile &tile, Fn fn) {
    if constexpr (N < ROWS) {
        if (tile.num_rows > N) return with_few_tokens<2 * N, ROWS>(tile, fn);
    }
    fn(std::integral_constant<int, N>());
}

/* A consumer's part of any tile: run_swapped(a constant, wgmma's N) computes a skinny one. */
template <class Config, typename Epilogue, typename RunSwapped>
__device__ __forceinline__ void run_tile(Shared<Config> &s, typename Config::Pipeline &pipe, int num_k_tiles,
                                         int wg, const WorkTile &tile, Epilogue &epilogue,
                                         typename Epilogue::Writer &writer, RunSwapped run_swapped) {
    /* the previous tile's subtiles that this tile's k-tiles have no room for */
    if (tile.skinny || num_k_tiles < Epilogue::SUBTILES) epilogue.flush(writer);
    if (tile.skinny) {
        switch (num_tokens_of(tile)) {
        case 8: run_swapped(std::integral_constant<int, 8>()); break;
        case 32: run_swapped(std::integral_constant<int, 32>()); break;
        default: run_swapped(std::integral_constant<int, 64>());
        }
        return;
    }
    auto store_subtile = [&](auto i) { epilogue.template store_subtile<i.value>(writer); };
    float d[128];
    if (Epilogue::HALF_N && tile.half_n)
        run_mainloop<Config, Config::BN / 2, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg, store_subtile);
    else
        run_mainloop<Config, Config::BN, Epilogue::SUBTILES>(d, s, pipe, num_k_tiles, wg, store_subtile);
    epilogue.hold(d, tile, wg, writer);
}

/* epilogue.hold(d, tile, wg, writer) takes the 64 rows of accumulators of consumer wg. It holds them for the
 * next tile's main loop, or stores them at once, where SUBTILES is 0.
 * epilogue.store_subtile<i>(writer), for i < SUBTILES, and flush(writer) store what it holds.
 * epilogue.store_swapped(d, tile, wg, warp, writer) stores what run_mainloop_swapped left: warp w of 4 has
 * output columns 16 w to 16 w + 15 of each of its warpgroup's subtiles. HALF_N: there are half-N tiles. */
template <class Config, typename Epilogue>
__device__ inline void persistent_gemm(const Gemm &p, Epilogue epilogue) {
    auto &s = static_cast<PlanningShared<Config> &>(prologue<Config>());
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        if constexpr (!Config::FEW_ROWS) setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce<Config>(p, s, warp);
    } else {
        if constexpr (!Config::FEW_ROWS) setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (p.tiles.lets_next_start) griddepcontrol_launch_dependents();
        int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
        TileReader<typename Config::Queue> reader(s.queue);
        typename Config::Pipeline pipe;
        using Writer =
            std::conditional_t<Config::FEW_ROWS, SkinnyWriter<Config::BM>, typename Epilogue::Writer>;
        Writer writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp % 4);
        for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
            /* One or two of B's subtiles. With gate_up gates come before their ups: a consumer computes
             * act(gate) up, so it has a gate and its up. */
            int first = p.gate_up ? wg : Config::SKINNY_SUBTILES * wg;
            int second = p.gate_up ? wg + Config::CONSUMERS : first + 1;
            auto run_swapped = [&](auto tokens) {
                float d[tokens.value / 2 * Config::SKINNY_SUBTILES];
                run_mainloop_swapped<Config, tokens.value>(d, s, pipe, num_k_tiles, first, second);
                writer.drain();
                epilogue.template store_swapped<tokens.value, Config::SKINNY_SUBTILES>(d, tile, wg, warp % 4,
                                                                                       writer);
            };
            if constexpr (Config::FEW_ROWS)
                with_few_tokens<Config::MIN_N, Config::BM>(tile, run_swapped);
            else
                run_tile<Config>(s, pipe, num_k_tiles, wg, tile, epilogue, writer, run_swapped);
        }
        if constexpr (!Config::FEW_ROWS) epilogue.flush(writer);
        writer.drain_all();
    }
    if (p.tiles.starts_early) griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

template <class Config>
__device__ inline Shared<Config> &prologue() {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<Shared<Config> *>(memory);
    static_assert(Config::FEW_ROWS || Config::PRODUCER_REGISTERS +
                                              Config::CONSUMERS * Config::CONSUMER_REGISTERS +
                                              Config::EPILOGUE_REGISTERS <=
                                          Config::THREADS / 128 * LAUNCH_REGISTERS<Config::THREADS>,
                  "setmaxnreg would wait forever");
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; i++) {
            /* TMA's bytes with the thread that expects them, and every gathering thread */
            mbarrier_init(shared_address(&s.full[i]), 1 + Config::GATHER * 32 * Config::LOAD_WARPS);
            mbarrier_init(shared_address(&s.empty[i]), Config::CONSUMER_WARPS);
        }
        s.queue.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    return s;
}

/* --- host: the configuration of a call ------------------------------------------------------------------- */

/* Calls fn with a configuration for R rows of E experts, a number of output columns, and k. */
template <typename T, bool GATHER, typename Fn>
int with_config(bool is_k_major, int64_t R, int32_t E, int64_t columns, int64_t k, Fn fn) {
    auto with_major = [&](auto major) {
        constexpr Major B_MAJOR = decltype(major)::value;
        bool is_countable = fused_moe_max_row_tiles((int32_t)R, E, 16) * ((columns + 63) / 64) < INT32_MAX;
        int rows = is_countable && !schedule_override().no_tails ? fused_moe_few_rows(R, E) : 0;
        if constexpr (!GATHER)
            if (fused_moe_few_rows_subtiles(rows, k) == 1)
                return fn(FewRowsConfig<T, B_MAJOR, GATHER, 16, 1>());
        if (rows == 16) return fn(FewRowsConfig<T, B_MAJOR, GATHER, 16, 2>());
        if (rows == 64) return fn(FewRowsConfig<T, B_MAJOR, GATHER, 64, 2>());
        return fn(GemmConfig<T, B_MAJOR, GATHER>());
    };
    return is_k_major ? with_major(std::integral_constant<Major, Major::K>())
                      : with_major(std::integral_constant<Major, Major::MN>());
}

/* --- producer: loads ------------------------------------------------------------------------------------ */

/* Bytes of B in a stage. */
template <class Config>
__device__ inline int bytes_of_b(const WorkTile &tile) {
    return tile.half_n ? Config::B_BYTES / 2 : Config::B_BYTES;
}

/* B of one k-tile: a box or two, or one of each subtile where N is contiguous. One thread calls it. */
template <class Config>
__device__ inline void load_b(const Gemm &p, uint32_t dst, uint32_t full, int part, int k_tile,
                              const WorkTile &tile) {
    constexpr int BOX = Config::BN / (Config::BN > SUBTILE ? 2 : 1);
    int k = K_TILE<typename Config::T> * k_tile, boxes = tile.half_n ? 1 : Config::BN / BOX;
    for (int box = 0; box < boxes; box++, dst += BOX * Config::B_BYTES / Config::BN) {
        const CUtensorMap *map = &p.b[p.gate_up ? box : part];
        int n = tile.first_column + (p.gate_up ? 0 : BOX * box);
        if constexpr (Config::B_MAJOR == Major::K) {
            cp_async_bulk_tensor_load(dst, map, full, k, n, tile.expert);
        } else {
            cp_async_bulk_tensor_load(dst, map, full, n, k, tile.expert);
            if (BOX > SUBTILE)
                cp_async_bulk_tensor_load(dst + SUBTILE_BYTES, map, full, n + SUBTILE, k, tile.expert);
        }
    }
}

/* Rows of A in a stage: all, or in boxes of TAIL_ROWS those that a skinny tile's wgmma reads. */
template <class Config>
__device__ inline int rows_of_a(const WorkTile &tile) {
    if (Config::FEW_ROWS) return (tile.num_rows + TAIL_ROWS - 1) / TAIL_ROWS * TAIL_ROWS;
    return tile.skinny ? max(num_tokens_of(tile), TAIL_ROWS) : FUSED_MOE_TILE_ROWS;
}

/* `rows` rows of A of one k-tile. A tile that is skinny or lacks rows loads them in boxes of TAIL_ROWS. Boxes
 * past its last row are zeros, from outside the matrix: arithmetic on zeros takes less power than on another
 * expert's rows. The box of its last row has up to 15 rows of the next expert, and the stores drop what comes
 * of them. One thread calls it. */
template <bool few_rows>
__device__ inline void load_a(const Gemm &p, uint32_t dst, uint32_t full, int part, int k, int rows,
                              const WorkTile &tile) {
    if (!few_rows && tile.num_rows >= rows && !tile.skinny) {
        for (int row = 0; row < rows; row += SUBTILE)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.a[part], full, k, tile.first_row + row);
    } else {
        for (int row = 0; row < rows; row += TAIL_ROWS)
            cp_async_bulk_tensor_load(dst + SWIZZLE_BYTES * row, &p.tail[part], full, k,
                                      row < tile.num_rows ? tile.first_row + row : (int)p.tiles.R);
    }
}

/* One warp issues the TMA loads of A and B. If the kernel starts early (only one of a single part may), B of
 * the first stages is in flight while the kernel before this one still writes A. */
template <class Config>
__device__ inline void load_tma(const Gemm &p, Shared<Config> &s) {
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
    bool starts_early = p.tiles.starts_early;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        int rows = rows_of_a<Config>(tile), bytes = rows * SWIZZLE_BYTES + bytes_of_b<Config>(tile), i = 0;
        if (starts_early) {
            int ahead = min(Config::STAGES, num_k_tiles);
            if (elect_sync()) {
                for (int k_tile = 0; k_tile < ahead; k_tile++) {
                    mbarrier_arrive_expect_tx(shared_address(&s.full[k_tile]), bytes);
                    load_b<Config>(p, shared_address(s.stage[k_tile].b), shared_address(&s.full[k_tile]), 0,
                                   k_tile, tile);
                }
                griddepcontrol_wait();
                for (int k_tile = 0; k_tile < ahead; k_tile++)
                    load_a<Config::FEW_ROWS>(p, shared_address(s.stage[k_tile].a),
                                             shared_address(&s.full[k_tile]), 0,
                                             K_TILE<typename Config::T> * k_tile, rows, tile);
            }
            __syncwarp();
            for (; i < ahead; i++) pipe.advance();
            starts_early = false;
        }
        for (; i < num_k_tiles; i++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            int part = i >= p.num_k_tiles[0], k_tile = part ? i - p.num_k_tiles[0] : i;
            uint32_t full = shared_address(&s.full[pipe.index]);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (elect_sync()) {
                mbarrier_arrive_expect_tx(full, bytes);
                load_a<Config::FEW_ROWS>(p, shared_address(stage.a), full, part,
                                         K_TILE<typename Config::T> * k_tile, rows, tile);
                load_b<Config>(p, shared_address(stage.b), full, part, k_tile, tile);
            }
            __syncwarp();
        }
    }
}

/* Three warps gather A: thread i copies chunk i % 8 of rows i / 8, i / 8 + 12, ...; warp 0 loads B by TMA.
 * All rows that the tile lacks are zeros, for load_a's reason; with few rows nothing reads them. */
template <class Config>
__device__ inline void load_gather(const Gemm &p, Shared<Config> &s) {
    using T = typename Config::T;
    constexpr int CHUNK_BYTES = CHUNK * sizeof(T);
    constexpr int ROW_STEP = 4 * Config::LOAD_WARPS, ROWS = (Config::BM + ROW_STEP - 1) / ROW_STEP;
    int chunk = threadIdx.x % 8, first = threadIdx.x / 8;
    bool loads_b = __shfl_sync(~0u, threadIdx.x / 32, 0) == 0;
    int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
    uint32_t offset[2]; /* rows 12 apart alternate between two swizzles */
    for (int i = 0; i < 2; i++) offset[i] = swizzled(0, first + ROW_STEP * i, chunk);
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    for (;;) {
        const char *source[ROWS];
        const int32_t *token = reader.wait_for_tokens();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = min(first + ROW_STEP * i, Config::BM - 1);
            source[i] = (const char *)p.x + token[row] * (int64_t)p.k * (int)sizeof(T) + chunk * CHUNK_BYTES;
        }
        WorkTile tile = reader.next();
        if (tile.expert < 0) break;
        int rows = (tile.num_rows - first + ROW_STEP - 1) / ROW_STEP; /* of this thread */
#pragma unroll 1
        for (int k_tile = 0; k_tile < num_k_tiles; k_tile++, pipe.advance()) {
            auto &stage = s.stage[pipe.index];
            uint32_t full = shared_address(&s.full[pipe.index]), a = shared_address(stage.a);
            mbarrier_wait(shared_address(&s.empty[pipe.index]), pipe.phase ^ 1);
            if (loads_b && elect_sync()) {
                mbarrier_arrive_expect_tx(full, bytes_of_b<Config>(tile));
                load_b<Config>(p, shared_address(stage.b), full, 0, k_tile, tile);
            }
            bool inside = k_tile * K_TILE<T> + chunk * CHUNK < p.k;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (Config::FEW_ROWS ? i < rows
                                     : (i + 1) * ROW_STEP <= Config::BM || first + ROW_STEP * i < Config::BM)
                    cp_async(a + offset[i % 2] + i / 2 * 2 * ROW_STEP * SWIZZLE_BYTES, source[i],
                             inside && i < rows);
                source[i] += SWIZZLE_BYTES;
            }
            cp_async_mbarrier_arrive_noinc(full);
        }
    }
}

/* --- consumers: main loops ------------------------------------------------------------------------------ */

/* This warp is done with a stage. */
template <class Config>
__device__ inline void release(Shared<Config> &s, int stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&s.empty[stage]));
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
        mbarrier_wait(shared_address(&s.full[pipe.index]), pipe.phase);
        if constexpr (Config::GATHER) fence_proxy_async(); /* cp.async's copies are ordinary writes */
        wgmma_fence();
        issue(s.stage[pipe.index], first);
        wgmma_commit_group();
        if constexpr (i.value < SUBTILES) meanwhile(i);
        if constexpr (Config::FEW_ROWS) { /* the MMAs of one k-tile take longer to end than to issue */
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
    if constexpr (Config::FEW_ROWS) {
        wgmma_wait_group<0>();
        release<Config>(s, (pipe.index + Config::STAGES - 1) % Config::STAGES);
    }
}

/* d = the 64 rows of consumer `wg` times the tile's first COLUMNS columns. */
template <class Config, int COLUMNS, int SUBTILES, typename Meanwhile>
__device__ inline void run_mainloop(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                    int num_k_tiles, int wg, Meanwhile meanwhile) {
    using T = typename Config::T;
    constexpr Major A_MAJOR = Config::A_MAJOR, B_MAJOR = Config::B_MAJOR;
    auto issue = [&](auto &stage, auto first) {
        constexpr int N = COLUMNS < Config::WGMMA_N ? COLUMNS : Config::WGMMA_N;
        constexpr int a_step = K16_STEP<A_MAJOR, T>, b_step = K16_STEP<B_MAJOR, T>;
        constexpr int next_n =
            (SUBTILE_BYTES >> 4) * N / SUBTILE; /* what N more columns add to B's descriptor */
        uint64_t a = matrix_descriptor<A_MAJOR>(shared_address(stage.a) + wg * SUBTILE_BYTES);
        uint64_t b = matrix_descriptor<B_MAJOR>(shared_address(stage.b));
#pragma unroll
        for (int i = 0; i < COLUMNS / N; i++, b += next_n) {
            float *accumulators = d + N / 2 * i;
            wgmma<N, !first.value, A_MAJOR, B_MAJOR>(accumulators, a, b, T());
#pragma unroll
            for (int k = 1; k < K_TILE<T> / 16; k++)
                wgmma<N, 1, A_MAJOR, B_MAJOR>(accumulators, a + k * a_step, b + k * b_step, T());
        }
    };
    for_each_k_tile<Config, SUBTILES>(s, pipe, num_k_tiles, issue, meanwhile);
}

/* A skinny expert by swap-AB: 64 output columns are wgmma's M, and the expert's rows are its N, padded to
 * TOKENS = 8, 16, 32 or 64 instead of to 128. A consumer has one or two subtiles of output columns: the
 * accumulators of the first are d[0 .. TOKENS / 2), of the second those after it. */
template <class Config, int TOKENS, int SUBTILES>
__device__ inline void run_mainloop_swapped(float *d, Shared<Config> &s, typename Config::Pipeline &pipe,
                                            int num_k_tiles, int first_subtile, int second_subtile) {
    using T = typename Config::T;
    constexpr Major W_MAJOR = Config::B_MAJOR;
    constexpr bool HAS_SECOND = SUBTILES > 1;
    auto issue = [&](auto &stage, auto first) {
        constexpr int x_step = K16_STEP<Major::K, T>, w_step = K16_STEP<W_MAJOR, T>;
        uint64_t x = matrix_descriptor<Major::K>(shared_address(stage.a));
        uint64_t w0 = matrix_descriptor<W_MAJOR>(shared_address(stage.b) + first_subtile * SUBTILE_BYTES);
        uint64_t w1 = matrix_descriptor<W_MAJOR>(shared_address(stage.b) + second_subtile * SUBTILE_BYTES);
        wgmma<TOKENS, !first.value, W_MAJOR, Major::K>(d, w0, x, T());
        if constexpr (HAS_SECOND) wgmma<TOKENS, !first.value, W_MAJOR, Major::K>(d + TOKENS / 2, w1, x, T());
#pragma unroll
        for (int k = 1; k < K_TILE<T> / 16; k++) {
            wgmma<TOKENS, 1, W_MAJOR, Major::K>(d, w0 + k * w_step, x + k * x_step, T());
            if constexpr (HAS_SECOND)
                wgmma<TOKENS, 1, W_MAJOR, Major::K>(d + TOKENS / 2, w1 + k * w_step, x + k * x_step, T());
        }
    };
    for_each_k_tile<Config, 0>(s, pipe, num_k_tiles, issue, [](auto) {});
    if constexpr (Config::FEW_ROWS)
#pragma unroll
        for (int i = 0; i < TOKENS / 2 * SUBTILES; i++) pin(d[i]); /* not read before the last MMA's end */
}

} // namespace sm90
} // namespace fused_moe
