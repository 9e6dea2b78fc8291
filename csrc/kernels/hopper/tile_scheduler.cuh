/* How the CTAs of a persistent grid come to their items: schedule.h on the device.
 *
 * One warp of a CTA draws: every CTA has a counter of the turns that were taken of its own, by itself or by others.
 * The warp finds the expert of a row tile with one comparison a lane and a ballot, and hands the item to the CTA's
 * other warps through a ring in shared memory, with the tokens of its rows where they are gathered. Which CTA computes
 * a tile changes nothing in its result. */
#pragma once

#include "../tile_scheduler.cuh"
#include "plan.cuh"

namespace fused_moe {

constexpr int ITEMS = 2; /* drawn ahead: more would be kept from CTAs that have nothing to do */

struct alignas(16) Item {
    int32_t expert; /* -1: there are no more items */
    int32_t first_row, num_rows;
    int32_t row_in_expert; /* of first_row */
    int32_t place;         /* of the tile, as in schedule.h */
    int32_t first_column;  /* of the result, or of the gates and the ups alike */
    int32_t narrow;        /* half of a tile's columns, or fewer                           */
    int32_t few;           /* the expert has few rows: weights and rows change their roles */
    int32_t first_box, first_line; /* wgrad: of a's lines; of b's */
};

template <int readers, int tokens>
struct ItemRing {
    Item item[ITEMS];
    int32_t token[ITEMS][tokens ? tokens : 1]; /* of the item's rows */
    uint64_t full[ITEMS], empty[ITEMS];
    static constexpr int TOKENS = tokens;

    __device__ void init() {
        for (int i = 0; i < ITEMS; i++) {
            mbarrier_init(shared_address(&full[i]), 32);
            mbarrier_init(shared_address(&empty[i]), readers);
        }
    }
};

/* A position that goes round a ring, and the parity of its barriers there. */
template <int size>
struct Cursor {
    int at = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++at == size) at = 0, parity ^= 1;
    }
};

/* Tiles of columns lie side by side. */
__device__ inline void place_columns(const Plan &plan, Item &item, int column, int half) {
    item.first_column = column * plan.tile_columns;
    if (half == 2) item.first_column += plan.tile_columns / 2;
    item.narrow = half || (plan.last_is_narrow && column == plan.num_columns - 1);
}

/* The warp that draws. It acquires the maps of the results, which the item's receivers use. place_tile(plan, item, tile
 * of columns, half) says what the tile is. */
template <class Ring, typename PlaceTile = decltype(place_columns)>
__device__ inline void draw(const Plan &plan, Ring &ring, const int32_t *row_token, int64_t T,
                            PlaceTile &&place_tile = place_columns) {
    int lane = threadIdx.x % 32, acquired = -1;
    uint32_t num_tiles = plan.work[2] * plan.num_columns;
    uint32_t cut = fused_moe_cut_tiles(plan.schedule.halving, num_tiles),
             num_items = num_tiles + cut;
    FusedMoeDraw turns = fused_moe_begin_draw(plan.taken, num_items, blockIdx.x, gridDim.x);
    Cursor<ITEMS> to;
    for (bool there = true; there; to.advance()) {
        uint32_t index = fused_moe_draw(&turns);
        there = index < num_items;
        Item item = {-1};
        if (there) {
            int32_t half;
            uint32_t tile = fused_moe_tile_of_item(index, num_tiles, cut, &half);
            uint32_t place =
                fused_moe_work_place(plan.work, &plan.schedule, plan.num_columns, tile);
            int b = busy_before(plan.work + 5 + plan.E, plan.work[0], place / plan.num_columns);
            FusedMoeWork work = fused_moe_work_at(plan.work, plan.ends, plan.E, &plan.schedule,
                                                  plan.num_columns, b, place);
            item.expert = work.rows.expert;
            item.first_row = work.rows.first_row;
            item.num_rows = work.rows.num_rows;
            item.row_in_expert = item.first_row - fused_moe_first_row(plan.ends, item.expert);
            item.place = place;
            place_tile(plan, item, work.column, half);
            item.few = work.few;
            if (item.expert != acquired && lane < plan.num_results)
                fence_proxy_tensormap_acquire(plan.maps + lane * plan.E + item.expert);
            acquired = item.expert;
        }
        mbarrier_wait(shared_address(&ring.empty[to.at]), to.parity ^ 1);
        for (int i = lane; i < Ring::TOKENS; i += 32) {
            int token = 0;
            if (i < item.num_rows)
                token = row_token ? row_token[item.first_row + i] : item.first_row + i;
            ring.token[to.at][i] = (uint32_t)token < (uint64_t)T ? token : 0;
        }
        if (lane == 0) ring.item[to.at] = item;
        mbarrier_arrive(shared_address(&ring.full[to.at]));
    }
}

/* Any warp that needs to know the items. */
template <class Ring>
class Receiver {
    Ring &ring;
    Cursor<ITEMS> from;

  public:
    __device__ explicit Receiver(Ring &ring) : ring(ring) {}

    __device__ void wait() { mbarrier_wait(shared_address(&ring.full[from.at]), from.parity); }

    /* The tokens of the next item's rows; they are there until next() has returned it. */
    __device__ const int32_t *wait_for_tokens() {
        wait();
        return ring.token[from.at];
    }

    __device__ Item next() {
        wait();
        Item item = ring.item[from.at];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&ring.empty[from.at]));
        from.advance();
        return item;
    }
};

} // namespace fused_moe
