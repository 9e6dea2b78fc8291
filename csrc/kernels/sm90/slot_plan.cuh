/* The fetching warp of a GEMM that makes the plan itself: ../../slot_plan.h on the device.
 *
 * Every CTA sorts the same slots, so none waits for another. One CTA of up_gate, or of experts.cu, also writes what
 * the combine and the caller read, counts and token_row; nothing else of a plan exists. up_gate and grouped_mm steal
 * no tiles here: in a captured graph no kernel before them zeroes counters, and other calls take the same path. */
#pragma once

#include "../../integer.h"
#include "../../slot_plan.h"
#include "tile_queue.cuh"

namespace fused_moe {
namespace sm90 {

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
__device__ inline void fetch_slot_tiles(const TileSource &source, const FusedMoeRoutePlan &slots,
                                        FusedMoeSlotPlan &plan, Queue &queue) {
    make_slot_plan(slots, plan);
    if (slots.counts && blockIdx.x == gridDim.x - 1) write_slot_plan(slots, plan);
    auto decode = [&](uint32_t index, WorkTile &tile) {
        set_tile(source, fused_moe_slot_tile(&plan, &source.order, index), tile);
        return true;
    };
    auto token_of = [&](const WorkTile &tile, int i) {
        if (tile.expert < 0 || i >= tile.num_rows) return 0; /* nothing is read */
        return fused_moe_slot_of_row(&plan, tile.first_row + i) / slots.K;
    };
    auto prepare = [](WorkTile &) {};
    auto is_long = [](const WorkTile &) { return false; };
    fetch_tiles<CUT_ROWS>(source, queue, fused_moe_num_slot_tiles(&plan, &source.order), decode, token_of,
                          prepare, is_long);
}

} // namespace sm90
} // namespace fused_moe
