/* Grouped GEMM for Hopper: D[r,:] = A[r,:] B[e(r)]^T. Persistent, warp-specialised, one CTA per SM, tiles of
 * 128x256x64; where experts have few rows, two smaller CTAs per SM (FewRowsConfig).
 *
 * Three parts   rows of A          rows.cuh: contiguous by TMA, or gathered by cp.async
 *               weight B           weight.cuh: dense; weight_quantized.cuh: values made in registers
 *               epilogue           the kernel's: bias, activation, ..
 * Around them   config.cuh tiles and types, mainloop.cuh MMAs, tile_queue.cuh which tile is next,
 *               pipeline.cuh barriers, writers.cuh stores
 *
 * Roles (384 threads; down_dgrad adds an epilogue warpgroup)
 *   warpgroup 0     producer: warp 3 fetches work tiles; warp 0 loads A and B by TMA, or warps 0-2 gather A
 *                   by cp.async and warp 0 loads B (few rows of a quantised weight: in turn, rows.cuh)
 *   warpgroups 1-2  consumers: wgmma m64n256k16 on 64 rows each, then the epilogue (mma.sync in tiles of at
 *                   most 16 rows of a quantised weight)
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
 * Which CTA computes which tile matters more than anything in the main loop: neighbouring CTAs in lockstep
 * read shared rows and columns once from L2 (schedule.h). So all full tiles last equally long: both consumers
 * compute, even where the second's rows are past the expert's end. Only tiles that cost much less are
 * smaller: half-N tiles, and those of skinny experts (64 rows at most), by swap-AB: the weight is wgmma's A,
 * the tokens its B.
 *
 * docs/hopper_gemm.md explains this with figures. What was tried and dropped is in docs/lab.md: clusters that
 * share B by multicast, prefetches into L2, stores from registers, three stages with more staging. */
#pragma once

#include "mainloop.cuh"
#include "rows.cuh"

namespace fused_moe {
namespace sm90 {

/* Named barriers beside barrier 0, which is __syncthreads'. */
enum NamedBarrier { WARPGROUP_BARRIER = 1 /* + the consumer warpgroup's number */, CONSUMERS_BARRIER = 8 };

/* --- prologue ------------------------------------------------------------------------------------------- */

template <class Config>
__device__ inline Shared<Config> &prologue() {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &s = *reinterpret_cast<Shared<Config> *>(memory);
    static_assert(!Config::CONSUMER_REGISTERS ||
                      Config::PRODUCER_REGISTERS + Config::CONSUMERS * Config::CONSUMER_REGISTERS +
                              Config::EPILOGUE_REGISTERS <=
                          Config::THREADS / 128 * LAUNCH_REGISTERS<Config::CTAS_PER_SM * Config::THREADS>,
                  "setmaxnreg would wait forever");
    if (threadIdx.x == 0) {
        for (int i = 0; i < Config::STAGES; i++) {
            s.full[i].init();
            s.empty[i].init();
        }
        s.queue.init();
        fence_mbarrier_init();
    }
    __syncthreads();
    return s;
}

/* --- the producer warpgroup ----------------------------------------------------------------------------- */

/* The token of row i of a tile. A wrong plan's token out of range reads as token 0. */
template <class Gemm>
__device__ inline int token_of_row(const Gemm &p, const WorkTile &tile, int i) {
    if (tile.expert < 0 || i >= tile.num_rows) return 0; /* nothing is read */
    int row = tile.first_row + i, token = p.row_token ? p.row_token[row] : row;
    return (uint32_t)token < (uint64_t)p.T ? token : 0;
}

/* The fetching warp of a GEMM whose rows may be gathered. */
template <int CUT_ROWS, class Gemm, class Queue>
__device__ inline void fetch_gemm_tiles(const Gemm &p, Queue &queue) {
    const TileSource &source = p.tiles;
    const int32_t E = source.E, R = (int32_t)source.R;
    FusedMoeTileOrder order = source.order;
    /* few rows and tiles in turn keep no lockstep, all tiles take as long without swap-AB or are quantised */
    bool may_share = !CUT_ROWS && source.swaps_skinny && source.assignment != FUSED_MOE_IN_TURN;
    FusedMoeTileShares shares =
        may_share ? fused_moe_share_tiles(source.schedule, E, R, &order, gridDim.x)
                  : fused_moe_equal_shares(fused_moe_num_work_tiles(source.schedule, E, R, &order));
    auto publish_tiles = [&](uint32_t index, auto publish) {
        WorkTile tile = {-1};
        if (index < shares.num) {
            FusedMoeWorkTile work = fused_moe_work_tile(source.schedule, source.offs, E, R, &order, index);
            set_tile(source, work, tile);
            if (source.has_tall && !tile.half_n)
                set_tile(source, fused_moe_tall_tile(work, source.offs, R, &order), tile);
        }
        for_each_part<CUT_ROWS>(tile, publish);
    };
    auto token_of = [&](const WorkTile &tile, int i) { return token_of_row(p, tile, i); };
    auto is_long = [](const WorkTile &) { return false; }; /* all take about as long */
    fetch_tiles(source, queue, shares, publish_tiles, token_of, is_long);
}

template <class Config>
__device__ inline void produce(const GemmOf<Config> &p, PlanningShared<Config> &s, int warp) {
    if (!p.tiles.pdl.reads_before_wait) griddepcontrol_wait();
    if (warp == 3 && !p.tiles.offs)
        fetch_slot_tiles<Config::CUT_ROWS>(p.tiles, p.unplanned, s.plan, s.queue);
    else if (warp == 3)
        fetch_gemm_tiles<Config::CUT_ROWS>(p, s.queue);
    else if constexpr (Config::GATHER)
        load_gather<Config>(p, s);
    else if (warp < Config::LOAD_WARPS)
        load_tma<Config>(p, s);
}

/* --- a consumer warpgroup ------------------------------------------------------------------------------- */

/* A full tile, or a skinny one beside full ones. The latter is run_swapped's, with wgmma's N a constant. */
template <class Config, typename Epilogue, typename RunSwapped>
__device__ __forceinline__ void run_tile(Shared<Config> &s, typename Config::Pipeline &pipe, int num_k_tiles,
                                         int wg, const WorkTile &tile, Epilogue &epilogue,
                                         typename Epilogue::Writer &writer, RunSwapped run_swapped) {
    /* this tile has fewer k-tiles than the previous one has subtiles to store under them */
    if (tile.skinny || num_k_tiles < Epilogue::SUBTILES) epilogue.flush(writer);
    if (tile.skinny) return with_tokens<Config>(tile.num_rows, run_swapped);
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
__device__ __forceinline__ void consume(const GemmOf<Config> &p, Shared<Config> &s, int wg, int warp,
                                        Epilogue &epilogue) {
    int num_k_tiles = p.num_k_tiles[0] + p.num_k_tiles[1];
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    using Writer =
        std::conditional_t<Config::ALL_SWAPPED, SkinnyWriter<Config::BM>, typename Epilogue::Writer>;
    Writer writer(shared_address(s.staging[wg]), WARPGROUP_BARRIER + wg, warp);
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next()) {
        /* This consumer's subtiles of B, one or two. With gate_up B is gates, then ups, and a consumer has a
         * subtile of each, since it computes act(gate) up. */
        int first = p.gate_up ? wg : Config::SUBTILES * wg;
        int second = p.gate_up ? wg + Config::CONSUMERS : first + 1;
        auto run_swapped = [&](auto tokens) {
            float d[tokens.value / 2 * Config::SUBTILES];
            run_mainloop_swapped<Config, tokens.value>(d, s, pipe, num_k_tiles, first, second);
            writer.drain();
            epilogue.template store_swapped<tokens.value, Config::SUBTILES>(d, tile, wg, warp, writer);
        };
        if constexpr (Config::ALL_SWAPPED)
            with_tokens<Config>(tile.num_rows, run_swapped);
        else
            run_tile<Config>(s, pipe, num_k_tiles, wg, tile, epilogue, writer, run_swapped);
    }
    if constexpr (!Config::ALL_SWAPPED) epilogue.flush(writer);
    writer.drain_all();
}

/* --- a consumer warpgroup of a quantised weight --------------------------------------------------------- */

/* All of it is inlined: at a call ptxas waits for the MMAs in flight. IS_UP_GATE: a lane's two rows of the
 * weight are a gate and its up. */
template <class Config, int TOKENS, bool IS_UP_GATE, typename Epilogue>
__device__ __forceinline__ void run_tile_fragments(const GemmOf<Config> &p, Shared<Config> &s,
                                                   typename Config::Pipeline &pipe, const WorkTile &tile,
                                                   int wg, Epilogue &epilogue) {
    constexpr bool TALL = TOKENS > Config::WIDE_ROWS;
    constexpr int SUBTILES = TALL ? 1 : Config::SUBTILES;
    int warp = threadIdx.x / 32 % 4, subtile = SUBTILES * wg;
    uint32_t staging = shared_address(s.staging[wg]);
    float d[TOKENS / 2 * SUBTILES];
    if constexpr (TALL)
        run_mainloop_tall<Config, IS_UP_GATE>(d, p, s, pipe, wg);
    else if constexpr (TOKENS <= WARP_TOKENS && LOADS_AHEAD<Config>)
        run_mainloop_ahead<Config, TOKENS, IS_UP_GATE>(d, p, s, pipe, wg);
    else
        run_mainloop_fragments<Config, TOKENS, IS_UP_GATE>(d, p, s, pipe, wg);
    if (!TALL && tile.half_n && subtile >= Config::TILES / 2) return; /* not loaded */
    if constexpr (Config::MANY_ROWS) {
        typename Config::Lines lines(staging, WARPGROUP_BARRIER + wg, warp);
        constexpr int ROWS =
            TOKENS < Config::Lines::ROWS ? TOKENS : Config::Lines::ROWS; /* stored at a time */
        constexpr int STORES = TOKENS / ROWS * SUBTILES, WORDS = ROWS / 2;
        auto first_word = [](int i) { return TOKENS / 2 * (i % SUBTILES) + WORDS * (i / SUBTILES); };
        /* A loop, since unrolled code would be fetched anew for every tile. Registers have no index, so the
         * next store's accumulators move to the first one's registers. */
#pragma unroll 1
        for (int i = 0; i < STORES; i++) {
            epilogue.template store_lines<ROWS, TALL>(d, tile, subtile + i % SUBTILES, i / SUBTILES * ROWS,
                                                      warp, lines);
#pragma unroll
            for (int j = 1; j < STORES; j++)
#pragma unroll
                for (int k = 0; k < WORDS; k++) d[first_word(j - 1) + k] = d[first_word(j) + k];
        }
    } else {
        epilogue.template store_swapped<TOKENS>(d, tile, subtile, warp, staging);
    }
}

/* Whether a consumer only releases a tile's stages: a half-N tile of few rows, in which it has no columns.
 * With more rows it computes, to keep in step, and stores nothing. up_gate of few rows has no such tiles. */
template <class Config>
__device__ inline bool skips(const GemmOf<Config> &p, const WorkTile &tile, int wg) {
    return Config::FEW_ROWS && !Config::GATHER && (tile.half_n || p.tiles.all_are_half_n) &&
           Config::SUBTILES * wg >= Config::TILES / 2;
}

/* epilogue.store_swapped<TOKENS>(d, tile, subtile, warp, staging) stores a subtile of a tile: warp w of 4 has
 * 16 rows of the weight. d is wgmma's, and may be changed; staging is the warpgroup's buffer. A lane's two
 * rows are those of QuantizedWeight::row_of: rows lane / 4 and lane / 4 + 8 of the warp's sixteen, or a gate
 * and its up. With many rows epilogue.store_lines<TOKENS, TALL>(d, tile, subtile, row, warp, lines) stores
 * the subtile's rows from `row` on. */
template <class Config, typename Epilogue>
__device__ __forceinline__ void consume_fragments(const GemmOf<Config> &p, Shared<Config> &s, int wg,
                                                  Epilogue &epilogue) {
    TileReader<typename Config::Queue> reader(s.queue);
    typename Config::Pipeline pipe;
    for (WorkTile tile = reader.next(); tile.expert >= 0; tile = reader.next())
        if (skips<Config>(p, tile, wg))
            skip_stages<Config>(p, s, pipe);
        else
            with_tokens<Config>(tile.num_rows, [&](auto tokens) {
                run_tile_fragments<Config, tokens.value, Config::GATHER>(p, s, pipe, tile, wg, epilogue);
            });
}

/* --- the kernel ----------------------------------------------------------------------------------------- */

template <class Config, typename Epilogue>
__device__ __forceinline__ void persistent_gemm(const GemmOf<Config> &p, Epilogue epilogue) {
    auto &s = static_cast<PlanningShared<Config> &>(prologue<Config>()); /* launch_persistent's Memory */
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1; /* -1: the producer */
    if (wg < 0) {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
        produce<Config>(p, s, warp);
    } else {
        if constexpr (Config::CONSUMER_REGISTERS > 0) setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        if (p.tiles.pdl.lets_next_start) griddepcontrol_launch_dependents();
        if constexpr (Config::Weight::IN_REGISTERS)
            consume_fragments<Config>(p, s, wg, epilogue);
        else
            consume<Config>(p, s, wg, warp % 4, epilogue);
    }
    if (p.tiles.pdl.reads_before_wait)
        griddepcontrol_wait(); /* every warp, before it zeroes rows past the last one */
}

} // namespace sm90
} // namespace fused_moe
