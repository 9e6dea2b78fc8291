/* How the CTAs of a persistent grid come to their queue: schedule.h on the device.
 *
 * One warp of a CTA draws: every CTA has a counter of the scheduler that were claimed of its own, by itself or by others.
 * The warp finds the expert of a row tile with one comparison a lane and a ballot, and hands the tile to the CTA's
 * other warps through a ring in shared memory, with the tokens of its rows where they are gathered. Which CTA computes
 * a tile changes nothing in its result. */
#pragma once

#include "../tile_scheduler.cuh"
#include "plan.cuh"

namespace fused_moe {

constexpr int QUEUE_DEPTH =
    2; /* drawn ahead: more would be kept from CTAs that have nothing to do */

struct alignas(16) WorkTile {
    int32_t expert; /* -1: there are no more queue */
    int32_t first_row, num_rows;
    int32_t row_in_expert; /* of first_row */
    int32_t linear_index;  /* of the tile, as in schedule.h */
    int32_t first_column;  /* of the result, or of the gates and the ups alike */
    int32_t half_n;        /* half of a tile's columns, or fewer                           */
    int32_t skinny;        /* the expert has few rows: weights and rows change their roles */
    int32_t first_box, first_line; /* wgrad: of a's lines; of b's */
};

template <int readers, int tokens>
struct TileQueue {
    WorkTile tile[QUEUE_DEPTH];
    int32_t token[QUEUE_DEPTH][tokens ? tokens : 1]; /* of the tile's rows */
    uint64_t full[QUEUE_DEPTH], empty[QUEUE_DEPTH];
    static constexpr int TOKENS = tokens;

    __device__ void init() {
        for (int i = 0; i < QUEUE_DEPTH; i++) {
            mbarrier_init(shared_address(&full[i]), 32);
            mbarrier_init(shared_address(&empty[i]), readers);
        }
    }
};

/* A position that goes round a ring, and the parity of its barriers there. */
template <int size>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++index == size) index = 0, phase ^= 1;
    }
};

/* Tiles of columns lie side by side. */
__device__ inline void set_columns(const TileSchedule &plan, WorkTile &tile, int column, int half) {
    tile.first_column = column * plan.tile_columns;
    if (half == 2) tile.first_column += plan.tile_columns / 2;
    tile.half_n = half || (plan.last_is_half_n && column == plan.num_columns - 1);
}

/* The warp that draws. It acquires the maps of the results, which the tile's receivers use. set_tile(plan, tile, tile
 * of columns, half) says what the tile is. */
template <class Ring, typename SetTile = decltype(set_columns)>
__device__ inline void fetch_tiles(const TileSchedule &plan, Ring &ring, const int32_t *row_token,
                                   int64_t T, SetTile &&set_tile = set_columns) {
    int lane = threadIdx.x % 32, acquired = -1;
    uint32_t num_tiles = plan.work[2] * plan.num_columns;
    uint32_t num_split = fused_moe_num_split_tiles(plan.order.split_last_wave, num_tiles),
             num_tiles_in_all = num_tiles + num_split;
    FusedMoeTileScheduler scheduler =
        fused_moe_tile_scheduler(plan.claimed, num_tiles_in_all, blockIdx.x, gridDim.x);
    PipelineState<QUEUE_DEPTH> pipe;
    for (bool has_tile = true; has_tile; pipe.advance()) {
        uint32_t index = fused_moe_next_tile(&scheduler);
        has_tile = index < num_tiles_in_all;
        WorkTile tile = {-1};
        if (has_tile) {
            int32_t half;
            uint32_t index_of_tile = fused_moe_tile_of_index(index, num_tiles, num_split, &half);
            uint32_t linear_index =
                fused_moe_linear_index(plan.work, &plan.order, plan.num_columns, index_of_tile);
            int b =
                find_owner(plan.work + 5 + plan.E, plan.work[0], linear_index / plan.num_columns);
            FusedMoeWorkTile work = fused_moe_work_tile_at(
                plan.work, plan.ends, plan.E, &plan.order, plan.num_columns, b, linear_index);
            tile.expert = work.rows.expert;
            tile.first_row = work.rows.first_row;
            tile.num_rows = work.rows.num_rows;
            tile.row_in_expert = tile.first_row - fused_moe_first_row(plan.ends, tile.expert);
            tile.linear_index = linear_index;
            set_tile(plan, tile, work.column, half);
            tile.skinny = work.skinny;
            if (tile.expert != acquired && lane < plan.num_results)
                fence_proxy_tensormap_acquire(plan.maps + lane * plan.E + tile.expert);
            acquired = tile.expert;
        }
        mbarrier_wait(shared_address(&ring.empty[pipe.index]), pipe.phase ^ 1);
        for (int i = lane; i < Ring::TOKENS; i += 32) {
            int token = 0;
            if (i < tile.num_rows)
                token = row_token ? row_token[tile.first_row + i] : tile.first_row + i;
            ring.token[pipe.index][i] = (uint32_t)token < (uint64_t)T ? token : 0;
        }
        if (lane == 0) ring.tile[pipe.index] = tile;
        mbarrier_arrive(shared_address(&ring.full[pipe.index]));
    }
}

/* Any warp that needs to know the queue. */
template <class Ring>
class TileReader {
    Ring &ring;
    PipelineState<QUEUE_DEPTH> pipe;

  public:
    __device__ explicit TileReader(Ring &ring) : ring(ring) {}

    __device__ void wait() { mbarrier_wait(shared_address(&ring.full[pipe.index]), pipe.phase); }

    /* The tokens of the next tile's rows; they are there until next() has returned it. */
    __device__ const int32_t *wait_for_tokens() {
        wait();
        return ring.token[pipe.index];
    }

    __device__ WorkTile next() {
        wait();
        WorkTile tile = ring.tile[pipe.index];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&ring.empty[pipe.index]));
        pipe.advance();
        return tile;
    }
};

} // namespace fused_moe
