/* How the CTAs of a persistent grid come to their items: schedule.h on the device.
 *
 * One warp of a CTA draws: its first item has the CTA's own number, every further one is the next that no CTA
 * has drawn, so a CTA with short items computes more of them. The warp finds the expert of a row tile with one
 * comparison a lane and a ballot, and hands the item to the CTA's other warps through a ring in shared memory,
 * with the tokens of its rows where they are gathered. Which CTA computes a tile changes nothing in its result. */
#pragma once

#include "../tile_scheduler.cuh"
#include "plan.cuh"

namespace fused_moe {

constexpr int ITEMS = 2; /* drawn ahead: more would be kept from CTAs that have nothing to do */

struct alignas(16) Item {
    int32_t expert, column;
    int32_t first_row, num_rows; /* num_rows 0: there are no more items */
    int32_t row_in_expert;       /* of first_row */
    int32_t narrow;              /* not more than half of the tile's columns are there          */
    int32_t few;                 /* the expert has few rows: weights and rows change their roles */
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

/* The warp that draws. It acquires the maps of the results, which the item's receivers use. */
template <class Ring>
__device__ inline void draw(const Plan &plan, Ring &ring, const int32_t *row_token, int64_t T) {
    int lane = threadIdx.x % 32, acquired = -1;
    uint32_t num_items = plan.work[2] * plan.num_columns, index = blockIdx.x, next = 0;
    Cursor<ITEMS> to;
    for (bool there = true; there; to.advance()) {
        if (lane == 0) next = gridDim.x + atomicAdd(plan.next, 1);
        there = index < num_items;
        Item item = {};
        if (there) {
            int32_t row_tile;
            fused_moe_work_order(plan.work, &plan.schedule, plan.num_columns, index, &row_tile,
                                 &item.column);
            int b = busy_before(plan.work + 5 + plan.E, plan.work[0], row_tile);
            FusedMoeTile rows = fused_moe_rows_of(plan.work, plan.ends, plan.E,
                                                  plan.schedule.tile_rows, b, row_tile);
            item.expert = rows.expert;
            item.first_row = rows.first_row;
            item.num_rows = rows.num_rows;
            item.few = b >= plan.work[1];
            item.narrow = plan.last_is_narrow && item.column == plan.num_columns - 1;
            item.row_in_expert = rows.first_row - fused_moe_first_row(plan.ends, rows.expert);
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
        index = __shfl_sync(~0u, next, 0);
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
