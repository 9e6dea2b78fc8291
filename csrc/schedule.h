/* The Hopper engine's schedule: which tile of a grouped product is computed when.
 *
 * Rows are grouped by expert; expert e owns rows [ends[e-1], ends[e]), cut into row tiles of `tile_rows`.
 * A work item is one row tile times one tile of the output's columns. Workers (CTAs) draw items in order,
 * each the next one that nobody has: so a worker whose items are short draws more of them.
 *
 * Two kinds of experts. TALL ones have tiles that keep the tensor cores busy. An expert of at most `few_rows`
 * rows (few_rows <= tile_rows) has one row tile, and its time is that of reading its weight: memory, not
 * arithmetic.
 *
 *   work[0]             experts with rows: the tall ones, then those with few rows
 *   work[1]             tall ones
 *   work[2]             row tiles of all
 *   work[3]             row tiles of the tall ones
 *   work[4]             2^32 times the share of few-row tiles in all, rounded up (as uint32_t)
 *   work[5 .. 5+E)      busy[b]: expert of the b-th busy one, tall ones first          (b < work[0])
 *   work[5+E .. 5+2E)   tile_end[b]: row tiles of busy[0..b], inclusive                (b < work[0])
 *
 * Entries past work[0] are not defined. Empty experts are not there, so no item of theirs exists.
 *
 * Interleaved, the items of experts with few rows are spread evenly over the others, so that at any
 * moment some workers read memory while most multiply; otherwise they come last, together.
 *
 * Orders, within each kind:
 *   linear    a row tile's columns, then the next row tile
 *   column    a column's row tiles, then the next column
 *   grouped   as column, but in groups of `group` row tiles: the workers that run at one time then share
 *             both rows of A and columns of B in L2
 *
 * Items are counted in 32 bits. Plain C without a dependency: usable from C, C++ and CUDA; the kernels, the
 * tests and the picture of `python -m fused_moe.schedule` go through the same functions. */
#ifndef FUSED_MOE_SCHEDULE_H
#define FUSED_MOE_SCHEDULE_H

#include "plan.h"

typedef enum {
    FUSED_MOE_ORDER_LINEAR,
    FUSED_MOE_ORDER_GROUPED,
    FUSED_MOE_ORDER_COLUMN
} FusedMoeOrder;

typedef struct {
    int32_t tile_rows;
    int32_t few_rows; /* 0 .. tile_rows; 0: every expert counts as tall */
    int32_t order;    /* FusedMoeOrder */
    int32_t group;    /* row tiles of a group */
    int32_t interleave;
} FusedMoeSchedule;

typedef struct {
    FusedMoeTile rows; /* num_rows 1 .. tile_rows */
    int32_t column;    /* tile of columns */
    int32_t few;       /* the expert has few rows */
} FusedMoeWork;

FUSED_MOE_PLAN_FN int64_t fused_moe_work_length(int64_t num_experts) {
    return 5 + 2 * num_experts;
}

FUSED_MOE_PLAN_FN int32_t fused_moe_row_tiles(int32_t rows, int32_t tile_rows) {
    return rows / tile_rows + (rows % tile_rows != 0);
}

/* work[4]: index * share / 2^32 then counts the few-row items before an index, and all of them at the end. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_few_share(int32_t tall_tiles, int32_t all_tiles) {
    uint64_t few = (uint64_t)(all_tiles - tall_tiles) << 32;
    return tall_tiles ? (uint32_t)((few + all_tiles - 1) / all_tiles) : 0;
}

/* Fills work[5 + 2E] from ends[E], which never decrease. */
FUSED_MOE_PLAN_FN void fused_moe_plan_work(const int32_t *ends, int32_t num_experts,
                                           const FusedMoeSchedule *s, int32_t *work) {
    int32_t *busy = work + 5, *tile_end = busy + num_experts;
    int32_t num_busy = 0, num_tiles = 0;
    for (int few = 0; few < 2; few++) {
        for (int32_t e = 0; e < num_experts; e++) {
            int32_t rows = ends[e] - fused_moe_first_row(ends, e);
            if (rows <= 0 || (rows <= s->few_rows) != few) continue;
            num_tiles += fused_moe_row_tiles(rows, s->tile_rows);
            busy[num_busy] = e;
            tile_end[num_busy++] = num_tiles;
        }
        work[few ? 0 : 1] = num_busy;
        work[few ? 2 : 3] = num_tiles;
    }
    work[4] = (int32_t)fused_moe_few_share(work[3], work[2]);
}

/* Row tile and column of item `index`, 0 <= index < work[2] * num_columns < 2^31. */
FUSED_MOE_PLAN_FN void fused_moe_work_order(const int32_t *work, const FusedMoeSchedule *s,
                                            uint32_t num_columns, uint32_t index, int32_t *row_tile,
                                            int32_t *column) {
    uint32_t tall_tiles = (uint32_t)work[3], tall = tall_tiles * num_columns;
    uint32_t few_before = index < tall ? 0 : index - tall;
    int is_few = index >= tall;
    if (s->interleave && tall) {
        uint64_t share = (uint32_t)work[4];
        few_before = (uint32_t)(index * share >> 32);
        is_few = (uint32_t)((index + 1) * share >> 32) > few_before;
    }
    uint32_t first = is_few ? tall_tiles : 0, num_rows = is_few ? work[2] - tall_tiles : tall_tiles;
    index = is_few ? few_before : index - few_before;
    if (s->order == FUSED_MOE_ORDER_LINEAR) {
        uint32_t row = index / num_columns;
        *row_tile = (int32_t)(first + row);
        *column = (int32_t)(index - row * num_columns);
        return;
    }
    uint32_t group = s->order == FUSED_MOE_ORDER_COLUMN ? num_rows : (uint32_t)s->group;
    uint32_t before = index / (group * num_columns) * group;
    uint32_t size = num_rows - before < group ? num_rows - before : group;
    index -= before * num_columns;
    *column = (int32_t)(index / size);
    *row_tile = (int32_t)(first + before + (index - *column * size));
}

/* The rows of row tile `row_tile` of the b-th busy expert. */
FUSED_MOE_PLAN_FN FusedMoeTile fused_moe_rows_of(const int32_t *work, const int32_t *ends,
                                                 int32_t num_experts, int32_t tile_rows, int32_t b,
                                                 int32_t row_tile) {
    const int32_t *busy = work + 5, *tile_end = busy + num_experts;
    FusedMoeTile rows;
    rows.expert = busy[b];
    int32_t tile_in_expert = row_tile - (b ? tile_end[b - 1] : 0);
    rows.first_row = fused_moe_first_row(ends, rows.expert) + tile_in_expert * tile_rows;
    int32_t rows_left = ends[rows.expert] - rows.first_row;
    rows.num_rows = rows_left < tile_rows ? rows_left : tile_rows;
    return rows;
}

/* Item `index`; a GPU finds b by a warp's vote (kernels/hopper/tile_scheduler.cuh) and goes on as here. */
FUSED_MOE_PLAN_FN FusedMoeWork fused_moe_find_work(const int32_t *work, const int32_t *ends,
                                                   int32_t num_experts, const FusedMoeSchedule *s,
                                                   int32_t num_columns, uint32_t index) {
    const int32_t *tile_end = work + 5 + num_experts;
    FusedMoeWork found;
    int32_t row_tile;
    fused_moe_work_order(work, s, num_columns, index, &row_tile, &found.column);
    int32_t b = fused_moe_owner(tile_end, work[0], row_tile);
    found.rows = fused_moe_rows_of(work, ends, num_experts, s->tile_rows, b, row_tile);
    found.few = b >= work[1];
    return found;
}

#endif
