/* How the CTAs of a persistent grid get their work tiles: schedule.h on the device.
 *
 * One warp of a CTA fetches tiles, two ahead of the warps that work on them: it claims an index (static
 * round-robin, then work stealing; or in turn; experts.cuh has its own way), decodes it with a vote over the
 * experts' prefix, and publishes the tile through a queue in shared memory. Which CTA computes a tile changes
 * nothing in its result.
 *
 * Tensor maps on the device (wgrad). A load past the expert's last row must give zeros, so its map's row
 * extent is the expert's. The fetching warp edits a template's address and row count in shared memory when
 * the expert changes, copies it to the CTA's next slot in global memory with release to the tensormap proxy,
 * and acquires it there; the warps that use the slot synchronise with it through the queue. Stores past the
 * last row are dropped by ragged maps instead (tensor_map.cuh): device-built ones cost up to 3% there. */
#pragma once

#include "../../integer.h"
#include "../../slot_plan.h"
#include "../common/schedule.cuh"
#include "../common/tensor_map.cuh"
#include "pipeline.cuh"

namespace fused_moe {
namespace sm90 {

constexpr int QUEUE_DEPTH = 2; /* tiles fetched ahead: more would be kept from idle CTAs */
constexpr int MAX_MAPS = 2;    /* per-expert tensor maps of a GEMM */
/* Slots of a CTA's per-expert maps. When the map of tile n is written, tile n - 1 is in the queue, so all
 * readers have read tile n - QUEUE_DEPTH - 1. Consumers read it after the main loop of the tile before it, so
 * TMA is done with tile n - QUEUE_DEPTH - 2: with QUEUE_DEPTH + 2 slots its slot may be written again. */
constexpr int MAP_SLOTS = 8;
static_assert(MAP_SLOTS >= QUEUE_DEPTH + 2, "a map would be edited under TMA");

/* --- what a GEMM's launch computes ---------------------------------------------------------------------- */

typedef struct { /* rows grouped by expert, loaded through per-expert maps */
    CUtensorMap all_rows;
    const void *data;
    int64_t pitch_bytes;
} GroupedRows;

typedef struct {
    const int32_t *offs;     /* [E]; NULL, as schedule: the kernel makes the plan (slot_plan.h)   */
    const int32_t *schedule; /* [8+4E] */
    int64_t R;
    int32_t E;
    int32_t tile_n;          /* output columns of an N tile                            */
    bool last_is_half_n;     /* the last N tile has at most half of them               */
    bool all_are_half_n;     /* few rows of quantized_mm: tile_n is half of Config::BN */
    bool swaps_skinny;       /* skinny experts are computed with swapped operands      */
    bool has_tall;           /* pairs of row tiles become tall tiles                   */
    FusedMoePdl pdl;         /* plan or ids and B are what it may read before the wait */
    FusedMoeTileOrder order; /* not wgrad's, which has its own                         */
    FusedMoeAssignment assignment;
    int32_t num_maps;
    GroupedRows rows[MAX_MAPS];
    CUtensorMap *maps; /* [CTAs, MAP_SLOTS, num_maps] */
    /* zeros, left as zeros: FUSED_MOE_NUM_COUNTERS, or half with pdl.reads_before_wait; NULL without offs */
    uint32_t *counters;
} TileSource;

/* Where counters are. */
enum {
    CLAIMED = 0,
    EXITED = FUSED_MOE_MAX_CTAS,        /* fetching warps                          */
    FINISHED = FUSED_MOE_MAX_CTAS + 16, /* warpgroups, of a kernel with semaphores */
    SEMAPHORES = FUSED_MOE_MAX_CTAS + 32
};
/* Split tiles are at most 2 * CTAs (fused_moe_slices_per_tile), with a semaphore for each of two consumer
 * warpgroups. */
static_assert(SEMAPHORES + 4 * FUSED_MOE_MAX_CTAS <= FUSED_MOE_NUM_COUNTERS, "counters overlap");
static_assert(EXITED < FUSED_MOE_NUM_COUNTERS / 2,
              "up_gate and a down GEMM that starts early have half each");

/* --- the queue ------------------------------------------------------------------------------------------ */

struct alignas(16) WorkTile {
    int32_t expert; /* -1: there are no more tiles */
    int32_t first_row, num_rows;
    int32_t first_column; /* of the output, or of gate and of up alike      */
    int32_t half_n;       /* half of an N tile's columns, or fewer          */
    int32_t skinny;       /* computed with swapped operands                 */
};

/* Tiles (WorkTile, or a kernel's own) on their way from the fetching warp to the reading warps. token: the
 * tokens of the tile's rows. */
template <class Tile_, int READING_WARPS_, int TOKENS_>
struct TileQueue {
    using Tile = Tile_;
    static constexpr int READING_WARPS = READING_WARPS_;
    static constexpr int TOKENS = TOKENS_;
    Tile tile[QUEUE_DEPTH];
    int32_t token[QUEUE_DEPTH][TOKENS ? TOKENS : 1];
    Barrier<FetchingWarp> full[QUEUE_DEPTH];
    Barrier<Warps<READING_WARPS>> empty[QUEUE_DEPTH];
    alignas(128) CUtensorMap scratch; /* the fetching warp's, for the map that it edits */

    __device__ void init() {
        for (int i = 0; i < QUEUE_DEPTH; i++) {
            full[i].init();
            empty[i].init();
        }
    }
};

/* Any warp that needs to know the tiles. */
template <class Queue>
class TileReader {
    Queue &queue;
    PipelineState<QUEUE_DEPTH> stage;

  public:
    __device__ explicit TileReader(Queue &queue) : queue(queue) {}

    /* The tokens of the next tile's rows; they stay until next() has returned the tile. */
    __device__ const int32_t *wait_for_tokens() {
        queue.full[stage.index].wait(stage.phase);
        return tokens();
    }

    /* The same after look(). */
    __device__ const int32_t *tokens() { return queue.token[stage.index]; }

    __device__ typename Queue::Tile next() {
        auto tile = look();
        move_on();
        return tile;
    }

    /* The next tile, which stays in the queue until move_on(): registers need not hold it meanwhile. */
    __device__ typename Queue::Tile look() {
        queue.full[stage.index].wait(stage.phase);
        return queue.tile[stage.index];
    }

    __device__ void move_on() {
        __syncwarp();
        queue.empty[stage.index].template arrive_once<Queue::READING_WARPS>();
        stage.advance();
    }
};

/* --- the fetching warp ---------------------------------------------------------------------------------- */

/* Tensor map i of one of this CTA's slots. */
__device__ inline const CUtensorMap *map_of_slot(const TileSource &source, int i, int slot) {
    return source.maps + ((int64_t)blockIdx.x * MAP_SLOTS + slot) * source.num_maps + i;
}

/* Builds and acquires an expert's tensor maps. An expert without rows has none: nothing is loaded. */
__device__ inline void build_maps(const TileSource &source, CUtensorMap &scratch, int32_t expert, int slot) {
    int lane = threadIdx.x % 32;
    FusedMoeRows rows = fused_moe_expert_rows(source.offs, expert, (int32_t)source.R);
    if (rows.num == 0) return;
    for (int i = 0; i < source.num_maps; i++) {
        const GroupedRows &r = source.rows[i];
        ((uint32_t *)&scratch)[lane] = ((const uint32_t *)&r.all_rows)[lane];
        __syncwarp();
        if (elect_sync()) {
            uint32_t map = shared_address(&scratch);
            tensormap_replace_global_address(map, (const char *)r.data + rows.first * r.pitch_bytes);
            tensormap_replace_global_dim<1>(map, rows.num);
        }
        __syncwarp();
        const CUtensorMap *map = map_of_slot(source, i, slot);
        tensormap_cp_fenceproxy((void *)map, shared_address(&scratch));
        fence_proxy_tensormap_acquire(map);
        __syncwarp();
    }
}

/* After the CTA's last claim. The last CTA leaves the counters as it found them. */
__device__ inline void reset_claims(const TileSource &source) {
    int lane = threadIdx.x % 32;
    uint32_t exited = 0;
    __threadfence();
    if (lane == 0) exited = atomicInc(source.counters + EXITED, gridDim.x - 1); /* wraps to zero by itself */
    if (__shfl_sync(~0u, exited, 0) != gridDim.x - 1) return;
    __threadfence();
    for (uint32_t cta = lane; cta < gridDim.x; cta += 32) source.counters[CLAIMED + cta] = 0;
}

/* What the fetching warp writes to the queue. */
template <class Queue>
class TileWriter {
    Queue &queue;
    PipelineState<QUEUE_DEPTH> stage;

  public:
    __device__ explicit TileWriter(Queue &queue) : queue(queue) {}

    __device__ void wait_for_room() { queue.empty[stage.index].wait(stage.phase ^ 1); }

    /* token_of(tile, i) is the token of its row i. */
    template <typename TokenOf>
    __device__ void publish(const typename Queue::Tile &tile, TokenOf token_of) {
        int lane = threadIdx.x % 32;
        wait_for_room();
        for (int i = lane; i < Queue::TOKENS; i += 32) queue.token[stage.index][i] = token_of(tile, i);
        if (lane == 0) queue.tile[stage.index] = tile;
        queue.full[stage.index].arrive_fetched();
        stage.advance();
    }
};

/* Calls fn with a tile. A tile of more than CUT_ROWS rows is cut into parts of about the same height. 0: none
 * is cut. */
template <int CUT_ROWS, class Tile, typename Fn>
__device__ inline void for_each_part(Tile tile, Fn fn) {
    if constexpr (CUT_ROWS > 0) {
        int rows = tile.num_rows, eighths = 8 * ((rows - 1) / CUT_ROWS + 1);
        int part = (rows + eighths - 1) / eighths * 8;
        for (; rows > part; rows -= part, tile.first_row += part) {
            tile.num_rows = part;
            fn(tile);
        }
        tile.num_rows = rows;
    }
    fn(tile);
}

/* Fetches tiles until there are none. A claim is of one tile or of several: publish_tiles(claim, publish)
 * calls publish(tile) with each, or with its parts, and for a claim past the last with {-1}. After a long
 * tile the next one is fetched when the queue has room for it, not earlier: next_tile() claims ahead, and
 * until then an idle CTA may steal that claim. */
template <class Queue, typename PublishTiles, typename TokenOf, typename IsLong>
__device__ inline void fetch_tiles(const TileSource &source, Queue &queue, FusedMoeTileShares claims,
                                   PublishTiles publish_tiles, TokenOf token_of, IsLong is_long) {
    uint32_t cta = blockIdx.x, ctas = gridDim.x;
    FusedMoeTileScheduler scheduler =
        fused_moe_tile_scheduler(source.counters + CLAIMED, claims, cta, ctas, source.assignment);
    /* A CTA that starts early takes its own first claim, and others not before all CTAs can start. */
    bool may_take = !source.pdl.reads_before_wait || cta < claims.num;
    TileWriter<Queue> writer(queue);
    for (bool has_tiles = true; has_tiles; may_take = !source.pdl.reads_before_wait) {
        if (!may_take) griddepcontrol_wait();
        uint32_t claim = fused_moe_next_tile(&scheduler);
        has_tiles = claim < claims.num;
        publish_tiles(claim, [&](const typename Queue::Tile &tile) {
            writer.publish(tile, token_of);
            if (is_long(tile)) writer.wait_for_room();
        });
    }
    if (scheduler.claims) reset_claims(source);
}

/* A grouped GEMM's tile. A plan that is wrong may call an expert skinny whose rows are more. */
__device__ inline void set_tile(const TileSource &source, const FusedMoeWorkTile &work, WorkTile &tile) {
    tile.expert = work.expert;
    tile.skinny = work.skinny && source.swaps_skinny;
    tile.first_row = work.first_row;
    tile.num_rows = tile.skinny ? min(work.num_rows, FUSED_MOE_SKINNY_ROWS) : work.num_rows;
    tile.first_column = work.n_tile * source.tile_n + (work.n_half == 2) * source.tile_n / 2;
    tile.half_n = work.n_half || (source.last_is_half_n && work.n_tile == source.order.num_n_tiles - 1);
}

/* --- the fetching warp of a GEMM that makes the plan itself: ../../slot_plan.h on the device ------------ */

/* Every CTA sorts the same slots, so none waits for another. One CTA of up_gate, or of experts.cuh, also
 * writes what the combine and the caller read, counts and token_row; nothing else of a plan exists. up_gate
 * and grouped_mm steal no tiles here: in a captured graph no kernel before them zeroes counters, and other
 * calls take the same path. */
__device__ inline void make_slot_plan(const FusedMoeRoutePlan &p, FusedMoeSlotPlan &plan) {
    int num_slots = (int)p.T * p.K;
    for (int slot = threadIdx.x % 32; slot < FUSED_MOE_FEW_SLOTS; slot += 32)
        plan.key[slot] = fused_moe_slot_key(slot < num_slots ? slot_expert(&p, slot) : -1, slot, p.E);
    fused_moe_plan_slots(&plan, num_slots);
}

/* By one warp: counts [E], and token_row [T,K]. */
__device__ inline void write_slot_plan(const FusedMoeRoutePlan &p, const FusedMoeSlotPlan &plan) {
    int lane = threadIdx.x % 32;
    for (int e = lane; e < p.E; e += 32) p.counts[e] = 0;
    for (int slot = lane; slot < (int)p.T * p.K; slot += 32) p.token_row[slot] = plan.slot_row[slot];
    __syncwarp(); /* counts are zeros */
    for (int b = lane; b < plan.num_experts; b += 32)
        p.counts[fused_moe_slot_expert(&plan, b)] = plan.first_row[b + 1] - plan.first_row[b];
}

template <int CUT_ROWS, class Queue>
__device__ inline void fetch_slot_tiles(const TileSource &source, const FusedMoeRoutePlan &unplanned,
                                        FusedMoeSlotPlan &plan, Queue &queue) {
    make_slot_plan(unplanned, plan);
    if (unplanned.counts && blockIdx.x == gridDim.x - 1) write_slot_plan(unplanned, plan);
    uint32_t num_tiles = fused_moe_num_slot_tiles(&plan, &source.order);
    auto publish_tiles = [&](uint32_t index, auto publish) {
        WorkTile tile = {-1};
        if (index < num_tiles) set_tile(source, fused_moe_slot_tile(&plan, &source.order, index), tile);
        for_each_part<CUT_ROWS>(tile, publish);
    };
    auto token_of = [&](const WorkTile &tile, int i) {
        if (tile.expert < 0 || i >= tile.num_rows) return 0; /* nothing is read */
        return fused_moe_slot_of_row(&plan, tile.first_row + i) / unplanned.K;
    };
    auto is_long = [](const WorkTile &) { return false; };
    fetch_tiles(source, queue, fused_moe_equal_shares(num_tiles), publish_tiles, token_of, is_long);
}

/* --- rows that no tile covers --------------------------------------------------------------------------- */

/* Zeroes rows [offs[E-1], R) of an output, which no tile covers. Called by all threads. Without offs the
 * kernel made its plan of few slots, and nothing reads those rows. */
template <typename T>
__device__ inline void zero_rows_past(const TileSource &source, T *out, int64_t width) {
    if (!source.offs) return;
    int64_t first = num_rows_of(source.offs, source.E, source.R) * width, end = source.R * width;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first / CHUNK + thread; i < end / CHUNK; i += threads)
        st_global_v4((uint4 *)out + i, make_uint4(0, 0, 0, 0));
}

} // namespace sm90
} // namespace fused_moe
