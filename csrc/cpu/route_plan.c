/* route_plan: a counting sort of the slots by expert, stable in t*K + k; and the plan of given counts. */
#include "../integer.h"
#include "cpu.h"

#include <string.h>

/* offsets and schedule from counts */
static void finish_plan(const int32_t *counts, int64_t R, int32_t E, int32_t *offsets, int32_t *schedule,
                        int32_t tile_rows) {
    offsets[0] = 0;
    for (int32_t e = 0; e < E; e++) offsets[e + 1] = offsets[e] + counts[e];
    memset(schedule, 0,
           (size_t)fused_moe_schedule_words(E) * sizeof *schedule); /* no list fills all of its words */
    fused_moe_schedule_row_tiles(schedule, offsets + 1, E, tile_rows);
    fused_moe_schedule_slices(schedule, offsets + 1, E, fused_moe_slice_rows(R, E, FUSED_MOE_SLICE_SMS));
}

int fused_moe_cpu_route_plan(const FusedMoeBoundedPlan *bounded) {
    const FusedMoeRoutePlan *p = &bounded->plan;
    int64_t slots = p->T * p->K, R = bounded->R, left = R, dropped = 0; /* rows */
    for (int32_t e = 0; e < p->E; e++) p->counts[e] = 0;
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t e = slot_expert(p, slot);
        if (e >= 0 && e < p->E) p->counts[e]++;
    }
    for (int32_t e = 0; e < p->E; e++) {
        int32_t count = p->counts[e] < left ? p->counts[e] : (int32_t)left;
        dropped += p->counts[e] - count;
        left -= count;
        p->counts[e] = count;
    }
    if (bounded->dropped) *bounded->dropped += dropped;
    finish_plan(p->counts, R, p->E, p->offsets, p->schedule, p->tile_rows);

    /* offsets[e] walks through the rows of e, and ends where those of e + 1 begin, or at R */
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t e = slot_expert(p, slot);
        p->token_row[slot] = -1;
        if (e < 0 || e >= p->E || p->offsets[e] == R) continue;
        int32_t row = p->offsets[e]++;
        p->token_row[slot] = row;
        p->row_slot[row] = (int32_t)slot;
        p->row_token[row] = (int32_t)(slot / p->K);
    }
    for (int32_t e = p->E; e > 0; e--) p->offsets[e] = p->offsets[e - 1];
    p->offsets[0] = 0;
    for (int64_t row = p->offsets[p->E]; row < R; row++) p->row_slot[row] = p->row_token[row] = -1;
    return FUSED_MOE_OK;
}

int fused_moe_cpu_count_plan(const FusedMoeCountPlan *p) {
    int64_t sum = 0;
    for (int32_t e = 0; e < p->E; e++) {
        int64_t count = integer(p->counts_in, p->counts_dtype, e);
        if (count < 0 || count > p->R - sum) return FUSED_MOE_INVALID_ROWS;
        sum += count;
        p->counts[e] = (int32_t)count;
    }
    finish_plan(p->counts, p->R, p->E, p->offsets, p->schedule, FUSED_MOE_TILE_ROWS);
    return FUSED_MOE_OK;
}
