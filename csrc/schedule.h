/* The Hopper engine's schedule: which tile of a grouped product is computed when, and by whom.
 *
 * Rows are grouped by expert; expert e owns rows [ends[e-1], ends[e]), cut into row tiles of `tile_rows`.
 * A work item is one row tile times one tile of the output's columns. Workers (CTAs) take items by turns, worker
 * i those of numbers i, i + workers, .., so that neighbours stay neighbours: they load the same rows or the same
 * columns at the same time, which the L2 cache answers once. Who is through takes from who is behind.
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
 * Entries past work[0] are not defined. Empty experts are not there, so no item of theirs exists, unless they are kept.
 *
 * Interleaved, the items of experts with few rows are spread evenly over the others, so that at any
 * moment some workers read memory while most multiply; otherwise they come last, together.
 *
 * Order, within each kind: expert by expert. Of an expert's row tiles at most `group` make a group (where there are
 * several the last may be smaller), and a group's items go column by column. Groups of 1 are a row tile's columns,
 * then the next row tile; a group of all is each column of the weight once. In between, the items of one time share
 * both rows of A and columns of B. Groups that two experts shared would share the columns of neither.
 *
 * Halves: where the last turn would leave half of the workers idle, or more, its tiles are cut into a left and a
 * right half, two items.
 *
 * Items are counted in 32 bits. Plain C without a dependency: usable from C, C++ and CUDA; the kernels, the
 * tests and the picture of `python -m fused_moe.schedule` go through the same functions. */
#ifndef FUSED_MOE_SCHEDULE_H
#define FUSED_MOE_SCHEDULE_H

#include "plan.h"

typedef struct {
    int32_t tile_rows;
    int32_t few_rows; /* 0 .. tile_rows; 0: every expert counts as tall */
    int32_t group;    /* row tiles of a group, at most */
    int32_t interleave;
    int32_t halving;    /* workers; 0: no tile is cut in two */
    int32_t keep_empty; /* an expert without rows has one tile, of no rows */
} FusedMoeSchedule;

typedef struct {
    FusedMoeTile rows; /* num_rows 1 .. tile_rows, or 0 */
    int32_t column;    /* tile of columns */
    int32_t half;      /* 0: all of it; 1, 2: left, right */
    int32_t few;       /* the expert has few rows */
} FusedMoeWork;

FUSED_MOE_PLAN_FN int64_t fused_moe_work_length(int64_t num_experts) {
    return 5 + 2 * num_experts;
}

/* Row tiles of an expert of so many rows; none: it is not there. */
FUSED_MOE_PLAN_FN int32_t fused_moe_row_tiles(int32_t rows, const FusedMoeSchedule *s) {
    if (rows <= 0) return s->keep_empty;
    return rows / s->tile_rows + (rows % s->tile_rows != 0);
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
            int32_t tiles = fused_moe_row_tiles(rows, s);
            if (!tiles || (rows <= s->few_rows) != few) continue;
            num_tiles += tiles;
            busy[num_busy] = e;
            tile_end[num_busy++] = num_tiles;
        }
        work[few ? 0 : 1] = num_busy;
        work[few ? 2 : 3] = num_tiles;
    }
    work[4] = (int32_t)fused_moe_few_share(work[3], work[2]);
}

/* The tiles that are cut in two, of so many in all; they are the last. halving: as in FusedMoeSchedule. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_cut_tiles(uint32_t halving, uint32_t num_tiles) {
    uint32_t last = halving ? num_tiles % halving : 0;
    return 2 * last <= halving ? last : 0;
}

/* The schedule of weight gradients, whose sums run along an expert's rows: a row tile is a piece of such a sum, and
 * an expert has its weight's tiles, of each as many pieces. Most have one. Who has more rows than half of what a
 * worker computes in all is cut, so that it leaves nobody waiting, and comes first; pieces of its sums are added in
 * their order. R rows in all; a piece is a multiple of 64 rows. */
FUSED_MOE_PLAN_FN FusedMoeSchedule fused_moe_sum_schedule(int64_t R, int64_t tiles, int workers) {
    int64_t rows = R * tiles / (2 * workers);
    if (rows < 512) rows = 512;
    if (rows > R) rows = R > 0 ? R : 1;
    FusedMoeSchedule s;
    s.tile_rows = s.few_rows = (int32_t)((rows + 63) / 64 * 64);
    s.group = s.keep_empty = 1;
    s.interleave = s.halving = 0;
    return s;
}

/* Pieces of experts that are cut, at most: such an expert has more than tile_rows, and so 2 rows / tile_rows. Their
 * sums' memory follows from it: of a piece's 128 x 256 tiles, 128 KiB each, 69 MB in all with 132 workers. */
FUSED_MOE_PLAN_FN int64_t fused_moe_max_pieces(int64_t R, const FusedMoeSchedule *s) {
    return R > s->tile_rows ? 2 * (R / s->tile_rows) : 0;
}

/* The place that tile `index`, 0 <= index < work[2] * num_columns < 2^31, would have if the tall ones came first. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_work_place(const int32_t *work, const FusedMoeSchedule *s,
                                                uint32_t num_columns, uint32_t index) {
    uint32_t tall = (uint32_t)work[3] * num_columns;
    if (!s->interleave || !tall) return index;
    uint64_t share = (uint32_t)work[4];
    uint32_t few_before = (uint32_t)(index * share >> 32);
    int is_few = (uint32_t)((index + 1) * share >> 32) > few_before;
    return is_few ? tall + few_before : index - few_before;
}

/* The tile at `place`: of the b-th busy expert, which has row tile place / num_columns. */
FUSED_MOE_PLAN_FN FusedMoeWork fused_moe_work_at(const int32_t *work, const int32_t *ends,
                                                 int32_t num_experts, const FusedMoeSchedule *s,
                                                 uint32_t num_columns, int32_t b, uint32_t place) {
    const int32_t *busy = work + 5, *tile_end = busy + num_experts;
    uint32_t before = b ? (uint32_t)tile_end[b - 1] : 0, tiles = (uint32_t)tile_end[b] - before;
    uint32_t groups = (tiles - 1) / (uint32_t)s->group + 1, size = (tiles - 1) / groups + 1;
    uint32_t index = place - before * num_columns, first = index / (size * num_columns) * size;
    if (size > tiles - first) size = tiles - first; /* the last group */
    index -= first * num_columns;
    FusedMoeWork found;
    found.column = (int32_t)(index / size);
    found.half = 0;
    found.few = b >= work[1];
    int32_t row_tile = (int32_t)(first + index % size), expert = busy[b];
    found.rows.expert = expert;
    found.rows.first_row = fused_moe_first_row(ends, expert) + row_tile * s->tile_rows;
    int32_t rows_left = ends[expert] - found.rows.first_row;
    found.rows.num_rows = rows_left < s->tile_rows ? rows_left : s->tile_rows;
    return found;
}

/* The tile of item `index`, and which half of it. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_tile_of_item(uint32_t index, uint32_t num_tiles, uint32_t cut,
                                                  int32_t *half) {
    uint32_t whole = num_tiles - cut, past = index < whole ? 0 : index - whole;
    *half = index < whole ? 0 : 1 + (int32_t)(past % 2);
    return index < whole ? index : whole + past / 2;
}

/* Item `index`; a GPU finds b by a warp's vote (kernels/hopper/tile_scheduler.cuh) and else does the same. */
FUSED_MOE_PLAN_FN FusedMoeWork fused_moe_find_work(const int32_t *work, const int32_t *ends,
                                                   int32_t num_experts, const FusedMoeSchedule *s,
                                                   uint32_t num_columns, uint32_t index) {
    uint32_t num_tiles = (uint32_t)work[2] * num_columns;
    int32_t half;
    index = fused_moe_tile_of_item(index, num_tiles,
                                   fused_moe_cut_tiles((uint32_t)s->halving, num_tiles), &half);
    uint32_t place = fused_moe_work_place(work, s, num_columns, index);
    const int32_t *tile_end = work + 5 + num_experts;
    int32_t b = fused_moe_owner(tile_end, work[0], (int32_t)(place / num_columns));
    FusedMoeWork found = fused_moe_work_at(work, ends, num_experts, s, num_columns, b, place);
    found.half = half;
    return found;
}

/* --- who takes which item --------------------------------------------------------------------------------------- */

/* A worker has its turns; one that is through takes the next one of the worker that has most left. So a worker that
 * began late, since another kernel had its place, or that had the longer items, keeps nobody waiting; and workers in
 * step take nothing from each other, since they come to their last items at the same time. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_turns(uint32_t num_items, uint32_t worker, uint32_t workers) {
    return worker < num_items ? (num_items - worker - 1) / workers + 1 : 0;
}

enum { FUSED_MOE_MAX_WORKERS = 256 };

typedef struct {
    uint32_t *taken; /* [workers] turns of a worker's that were asked for, by itself or by others */
    uint32_t num_items, worker, workers; /* this worker of so many, FUSED_MOE_MAX_WORKERS at most */
    uint32_t turn;                       /* its next one */
    int own;                             /* it may have turns left */
} FusedMoeDraw;

/* On a GPU a whole warp draws; its first lane asks, and all lanes look who is behind. */
#ifdef __CUDA_ARCH__
#define FUSED_MOE_LANE (threadIdx.x % 32)
#define FUSED_MOE_LANES 32
#define FUSED_MOE_ASK(taken) (FUSED_MOE_LANE ? 0u : atomicAdd(taken, 1u))
#define FUSED_MOE_ANSWER(turn) __shfl_sync(~0u, turn, 0)
#define FUSED_MOE_LOOK(taken) __ldcg(taken)
#define FUSED_MOE_MOST(of_lane) __reduce_max_sync(~0u, of_lane)
#else
#define FUSED_MOE_LANE 0
#define FUSED_MOE_LANES 1
#define FUSED_MOE_ASK(taken) ((*(taken))++)
#define FUSED_MOE_ANSWER(turn) (turn)
#define FUSED_MOE_LOOK(taken) (*(taken))
#define FUSED_MOE_MOST(of_lane) (of_lane)
#endif

/* The worker that has most turns left, or `workers` if nobody has one. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_furthest_behind(const FusedMoeDraw *d) {
    const uint32_t most = UINT32_MAX / FUSED_MOE_MAX_WORKERS; /* counted of what is left */
    uint32_t found = 0;
    for (uint32_t worker = FUSED_MOE_LANE; worker < d->workers; worker += FUSED_MOE_LANES) {
        uint32_t turns = fused_moe_turns(d->num_items, worker, d->workers);
        uint32_t taken = FUSED_MOE_LOOK(d->taken + worker);
        uint32_t left = taken < turns ? turns - taken : 0;
        if (left > most) left = most;
        left = left * FUSED_MOE_MAX_WORKERS + worker;
        if (left > found) found = left;
    }
    found = FUSED_MOE_MOST(found);
    return found >= FUSED_MOE_MAX_WORKERS ? found % FUSED_MOE_MAX_WORKERS : d->workers;
}

FUSED_MOE_PLAN_FN FusedMoeDraw fused_moe_begin_draw(uint32_t *taken, uint32_t num_items,
                                                    uint32_t worker, uint32_t workers) {
    FusedMoeDraw d = {taken, num_items, worker, workers, FUSED_MOE_ASK(taken + worker), 1};
    return d;
}

/* The next item, or one past the last: there are no more. Others may have all turns of a worker before its first. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_draw(FusedMoeDraw *d) {
    uint32_t index = d->num_items;
    if (d->own) {
        index = d->worker + d->workers * FUSED_MOE_ANSWER(d->turn);
        d->own = index < d->num_items;
    }
    if (d->own) d->turn = FUSED_MOE_ASK(d->taken + d->worker); /* early: it takes a while */
    for (uint32_t behind = 0; index >= d->num_items && behind < d->workers;) {
        behind = fused_moe_furthest_behind(d);
        if (behind < d->workers)
            index = behind + d->workers * FUSED_MOE_ANSWER(FUSED_MOE_ASK(d->taken + behind));
    }
    return index;
}

#endif
