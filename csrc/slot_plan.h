/* The plan of few slots, made by every CTA of a GEMM.
 *
 * In a decode step of one token a kernel for the plan, and the loads of what it wrote, took 4 of 46 us
 * (docs/lab.md). So up_gate and the down GEMM, in one launch or in two, make the plan from the ids:
 * the fetching warp of each CTA sorts the slots in shared memory.
 *
 * Rows are in route_plan's order: by expert, stable in t*K + k. Every active expert is skinny and has one row
 * tile. A key is 64 expert + slot, so sorted keys are the rows in order.
 *
 * Plain C, like schedule.h: all lanes of a warp call it together, and tests call it on the CPU. */
#ifndef FUSED_MOE_SLOT_PLAN_H
#define FUSED_MOE_SLOT_PLAN_H

#include "rules.h"

#define FUSED_MOE_NO_KEY UINT32_MAX /* the key of a slot without a row */

typedef struct {
    uint32_t key[FUSED_MOE_FEW_SLOTS];          /* of each slot, then NO_KEY; set by the caller  */
    uint32_t row_key[FUSED_MOE_FEW_SLOTS];      /* of each row: the keys in order                */
    int8_t slot_row[FUSED_MOE_FEW_SLOTS];       /* of each slot: its row, or -1                  */
    int32_t first_row[FUSED_MOE_FEW_SLOTS + 1]; /* of each active expert, and one past the last */
    int32_t num_experts;                        /* active ones */
} FusedMoeSlotPlan;

FUSED_MOE_FN uint32_t fused_moe_slot_key(int64_t expert, int32_t slot, int32_t E) {
    return 0 <= expert && expert < E ? (uint32_t)expert * FUSED_MOE_FEW_SLOTS + (uint32_t)slot
                                     : FUSED_MOE_NO_KEY;
}

FUSED_MOE_FN int32_t fused_moe_slot_of_row(const FusedMoeSlotPlan *plan, int32_t row) {
    return (int32_t)(plan->row_key[row] % FUSED_MOE_FEW_SLOTS);
}

/* Active expert b of the plan. */
FUSED_MOE_FN int32_t fused_moe_slot_expert(const FusedMoeSlotPlan *plan, int32_t b) {
    return (int32_t)(plan->row_key[plan->first_row[b]] / FUSED_MOE_FEW_SLOTS);
}

/* The plan of num_slots keys, which differ, except for NO_KEY. A key's row is the number of smaller keys. */
FUSED_MOE_FN void fused_moe_plan_slots(FusedMoeSlotPlan *plan, int32_t num_slots) {
    int32_t num_rows = 0, num_experts = 0;
    FUSED_MOE_SYNC();
    for (int32_t first = 0; first < num_slots; first += FUSED_MOE_LANES) {
        int32_t slot = first + FUSED_MOE_LANE, row = 0;
        uint32_t key = slot < num_slots ? plan->key[slot] : FUSED_MOE_NO_KEY;
        for (int32_t i = 0; i < FUSED_MOE_FEW_SLOTS; i++) row += plan->key[i] < key; /* unrolled */
        if (key == FUSED_MOE_NO_KEY) row = -1;
        if (row >= 0) plan->row_key[row] = key;
        if (slot < num_slots) plan->slot_row[slot] = (int8_t)row;
        num_rows += FUSED_MOE_COUNT(key != FUSED_MOE_NO_KEY);
    }
    FUSED_MOE_SYNC();
    for (int32_t first = 0; first < num_rows; first += FUSED_MOE_LANES) {
        int32_t row = first + FUSED_MOE_LANE;
        int32_t begins = row < num_rows && (row == 0 || plan->row_key[row] / FUSED_MOE_FEW_SLOTS !=
                                                            plan->row_key[row - 1] / FUSED_MOE_FEW_SLOTS);
        int32_t b = num_experts + FUSED_MOE_COUNT_BELOW(begins);
        if (begins) plan->first_row[b] = row;
        num_experts += FUSED_MOE_COUNT(begins);
    }
    if (!FUSED_MOE_LANE) plan->num_experts = num_experts, plan->first_row[num_experts] = num_rows;
    FUSED_MOE_SYNC();
}

/* Work tiles of a GEMM, as fused_moe_num_work_tiles counts them. */
FUSED_MOE_FN uint32_t fused_moe_num_slot_tiles(const FusedMoeSlotPlan *plan, const FusedMoeTileOrder *order) {
    uint32_t tiles = (uint32_t)plan->num_experts * (uint32_t)order->num_n_tiles;
    return tiles + fused_moe_num_split_tiles(order, 1, tiles);
}

/* Work tile `index` of fused_moe_num_slot_tiles: expert by expert, each along N. */
FUSED_MOE_FN FusedMoeWorkTile fused_moe_slot_tile(const FusedMoeSlotPlan *plan,
                                                  const FusedMoeTileOrder *order, uint32_t index) {
    uint32_t n_tiles = (uint32_t)order->num_n_tiles, num_tiles = (uint32_t)plan->num_experts * n_tiles;
    FusedMoeWorkTile tile;
    tile.n_half = fused_moe_half_of(&index, num_tiles - fused_moe_num_split_tiles(order, 1, num_tiles));
    int32_t b = (int32_t)(index / n_tiles);
    tile.expert = fused_moe_slot_expert(plan, b);
    tile.first_row = plan->first_row[b];
    tile.num_rows = plan->first_row[b + 1] - tile.first_row;
    tile.n_tile = (int32_t)(index % n_tiles);
    tile.skinny = 1;
    return tile;
}

#endif
