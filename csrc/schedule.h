/* The Hopper engine's schedule: which tile of a grouped product is computed when, and by whom.
 *
 * Rows are grouped by expert; expert e owns rows [ends[e-1], ends[e]), cut into row tiles of `tile_rows`.
 * A work item is one row tile times one tile of the output's columns. Workers (CTAs) take items by turns, cta
 * i those of numbers i, i + num_ctas, .., so that neighbours stay neighbours: they load the same rows or the same
 * columns at the same time, which the L2 cache answers once. Who is through takes from who is behind.
 *
 * Two kinds of experts. TALL ones have tiles that keep the tensor cores active. An expert of at most `skinny_rows`
 * rows (skinny_rows <= tile_rows) has one row tile, and its time is that of reading its weight: memory, not
 * arithmetic.
 *
 *   work[0]             experts with rows: the full ones, then those with few rows
 *   work[1]             full ones
 *   work[2]             row tiles of all
 *   work[3]             row tiles of the full ones
 *   work[4]             2^32 times the share of few-row tiles in all, rounded up (as uint32_t)
 *   work[5 .. 5+E)      active[b]: expert of the b-th active one, full ones first          (b < work[0])
 *   work[5+E .. 5+2E)   tile_end[b]: row tiles of active[0..b], inclusive                (b < work[0])
 *
 * Entries past work[0] are not defined. Empty experts are not there, so no item of theirs exists, unless they are kept.
 *
 * Interleaved, the items of experts with few rows are spread evenly over the others, so that at any
 * moment some num_ctas read memory while most multiply; otherwise they come last, together.
 *
 * Order, within each kind: expert by expert. Of an expert's row tiles at most `group` make a group (where there are
 * several the last may be smaller), and a group's items go column by column. Groups of 1 are a row tile's columns,
 * then the next row tile; a group of all is each column of the weight once. In between, the items of one time share
 * both rows of A and columns of B. Groups that two experts shared would share the columns of neither.
 *
 * Halves: where the last turn would leave half of the num_ctas idle, or more, its tiles are cut into a left and a
 * right half, two items.
 *
 * Items are counted in 32 bits. Plain C without a dependency: usable from C, C++ and CUDA; the kernels, the
 * tests and the picture of `python -m fused_moe.schedule` go through the same functions. */
#ifndef FUSED_MOE_SCHEDULE_H
#define FUSED_MOE_SCHEDULE_H

#include "plan.h"

typedef struct {
    int32_t tile_rows;
    int32_t skinny_rows; /* 0 .. tile_rows; 0: every expert counts as full */
    int32_t group;       /* row tiles of a group, at most */
    int32_t interleave;
    int32_t split_last_wave; /* num_ctas; 0: no tile is cut in two */
    int32_t keep_empty;      /* an expert without rows has one tile, of no rows */
} FusedMoeSchedule;

typedef struct {
    FusedMoeTile rows; /* num_rows 1 .. tile_rows, or 0 */
    int32_t column;    /* tile of columns */
    int32_t half;      /* 0: all of it; 1, 2: left, right */
    int32_t skinny;    /* the expert has few rows */
} FusedMoeWorkTile;

FUSED_MOE_PLAN_FN int64_t fused_moe_work_length(int64_t num_experts) {
    return 5 + 2 * num_experts;
}

/* Row tiles of an expert of so many rows; none: it is not there. */
FUSED_MOE_PLAN_FN int32_t fused_moe_row_tiles(int32_t rows, const FusedMoeSchedule *s) {
    if (rows <= 0) return s->keep_empty;
    return rows / s->tile_rows + (rows % s->tile_rows != 0);
}

/* work[4]: index * share / 2^32 then counts the few-row items before an index, and all of them at the end. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_skinny_share(int32_t tall_tiles, int32_t all_tiles) {
    uint64_t few = (uint64_t)(all_tiles - tall_tiles) << 32;
    return tall_tiles ? (uint32_t)((few + all_tiles - 1) / all_tiles) : 0;
}

/* Fills work[5 + 2E] from ends[E], which never decrease. */
FUSED_MOE_PLAN_FN void fused_moe_plan_work(const int32_t *ends, int32_t num_experts,
                                           const FusedMoeSchedule *s, int32_t *work) {
    int32_t *active = work + 5, *tile_end = active + num_experts;
    int32_t num_active = 0, num_tiles = 0;
    for (int few = 0; few < 2; few++) {
        for (int32_t e = 0; e < num_experts; e++) {
            int32_t rows = ends[e] - fused_moe_first_row(ends, e);
            int32_t tiles = fused_moe_row_tiles(rows, s);
            if (!tiles || (rows <= s->skinny_rows) != few) continue;
            num_tiles += tiles;
            active[num_active] = e;
            tile_end[num_active++] = num_tiles;
        }
        work[few ? 0 : 1] = num_active;
        work[few ? 2 : 3] = num_tiles;
    }
    work[4] = (int32_t)fused_moe_skinny_share(work[3], work[2]);
}

/* The tiles that are cut in two, of so many in all; they are the last. split_last_wave: as in FusedMoeSchedule. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_num_split_tiles(uint32_t split_last_wave, uint32_t num_tiles) {
    uint32_t last = split_last_wave ? num_tiles % split_last_wave : 0;
    return 2 * last <= split_last_wave ? last : 0;
}

/* The schedule of weight gradients, whose sums run along an expert's rows: a row tile is a slice of such a sum, and
 * an expert has its weight's tiles, of each as many slices. Most have one. Who has more rows than half of what a
 * cta computes in all is cut, so that it leaves nobody waiting, and comes first; slices of its sums are added in
 * their order. R rows in all; a slice is a multiple of 64 rows. */
FUSED_MOE_PLAN_FN FusedMoeSchedule fused_moe_split_k_schedule(int64_t R, int64_t tiles,
                                                              int num_ctas) {
    int64_t rows = R * tiles / (2 * num_ctas);
    if (rows < 512) rows = 512;
    if (rows > R) rows = R > 0 ? R : 1;
    FusedMoeSchedule s;
    s.tile_rows = s.skinny_rows = (int32_t)((rows + 63) / 64 * 64);
    s.group = s.keep_empty = 1;
    s.interleave = s.split_last_wave = 0;
    return s;
}

/* Pieces of experts that are cut, at most: such an expert has more than tile_rows, and so 2 rows / tile_rows. Their
 * sums' memory follows from it: of a slice's 128 x 256 tiles, 128 KiB each, 69 MB in all with 132 num_ctas. */
FUSED_MOE_PLAN_FN int64_t fused_moe_max_slices(int64_t R, const FusedMoeSchedule *s) {
    return R > s->tile_rows ? 2 * (R / s->tile_rows) : 0;
}

/* The place that tile `index`, 0 <= index < work[2] * num_columns < 2^31, would have if the full ones came first. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_linear_index(const int32_t *work, const FusedMoeSchedule *s,
                                                  uint32_t num_columns, uint32_t index) {
    uint32_t full = (uint32_t)work[3] * num_columns;
    if (!s->interleave || !full) return index;
    uint64_t share = (uint32_t)work[4];
    uint32_t skinny_before = (uint32_t)(index * share >> 32);
    int is_skinny = (uint32_t)((index + 1) * share >> 32) > skinny_before;
    return is_skinny ? full + skinny_before : index - skinny_before;
}

/* The tile at `place`: of the b-th active expert, which has row tile place / num_columns. */
FUSED_MOE_PLAN_FN FusedMoeWorkTile fused_moe_work_tile_at(const int32_t *work, const int32_t *ends,
                                                          int32_t num_experts,
                                                          const FusedMoeSchedule *s,
                                                          uint32_t num_columns, int32_t b,
                                                          uint32_t place) {
    const int32_t *active = work + 5, *tile_end = active + num_experts;
    uint32_t before = b ? (uint32_t)tile_end[b - 1] : 0, tiles = (uint32_t)tile_end[b] - before;
    uint32_t groups = (tiles - 1) / (uint32_t)s->group + 1, size = (tiles - 1) / groups + 1;
    uint32_t index = place - before * num_columns, first = index / (size * num_columns) * size;
    if (size > tiles - first) size = tiles - first; /* the last group */
    index -= first * num_columns;
    FusedMoeWorkTile found;
    found.column = (int32_t)(index / size);
    found.half = 0;
    found.skinny = b >= work[1];
    int32_t row_tile = (int32_t)(first + index % size), expert = active[b];
    found.rows.expert = expert;
    found.rows.first_row = fused_moe_first_row(ends, expert) + row_tile * s->tile_rows;
    int32_t rows_left = ends[expert] - found.rows.first_row;
    found.rows.num_rows = rows_left < s->tile_rows ? rows_left : s->tile_rows;
    return found;
}

/* The tile of item `index`, and which half of it. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_tile_of_index(uint32_t index, uint32_t num_tiles, uint32_t cut,
                                                   int32_t *half) {
    uint32_t aligned = num_tiles - cut, past = index < aligned ? 0 : index - aligned;
    *half = index < aligned ? 0 : 1 + (int32_t)(past % 2);
    return index < aligned ? index : aligned + past / 2;
}

/* Item `index`; a GPU finds b by a warp's vote (kernels/hopper/tile_scheduler.cuh) and else does the same. */
FUSED_MOE_PLAN_FN FusedMoeWorkTile fused_moe_find_work_tile(const int32_t *work,
                                                            const int32_t *ends,
                                                            int32_t num_experts,
                                                            const FusedMoeSchedule *s,
                                                            uint32_t num_columns, uint32_t index) {
    uint32_t num_tiles = (uint32_t)work[2] * num_columns;
    int32_t half;
    index = fused_moe_tile_of_index(
        index, num_tiles, fused_moe_num_split_tiles((uint32_t)s->split_last_wave, num_tiles),
        &half);
    uint32_t place = fused_moe_linear_index(work, s, num_columns, index);
    const int32_t *tile_end = work + 5 + num_experts;
    int32_t b = fused_moe_find_owner(tile_end, work[0], (int32_t)(place / num_columns));
    FusedMoeWorkTile found =
        fused_moe_work_tile_at(work, ends, num_experts, s, num_columns, b, place);
    found.half = half;
    return found;
}

/* --- who takes which item --------------------------------------------------------------------------------------- */

/* A cta has its turns; one that is through takes the next one of the cta that has most left. So a cta that
 * began late, since another kernel had its place, or that had the longer items, keeps nobody waiting; and num_ctas in
 * step take nothing from each other, since they come to their last items at the same time. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_num_assigned(uint32_t num_items, uint32_t cta,
                                                  uint32_t num_ctas) {
    return cta < num_items ? (num_items - cta - 1) / num_ctas + 1 : 0;
}

enum { FUSED_MOE_MAX_CTAS = 256 };

typedef struct {
    uint32_t *claimed; /* [num_ctas] turns of a cta's that were asked for, by itself or by others */
    uint32_t num_items, cta, num_ctas; /* this cta of so many, FUSED_MOE_MAX_CTAS at most */
    uint32_t turn;                     /* its next one */
    int own;                           /* it may have turns left */
} FusedMoeTileScheduler;

/* On a GPU a aligned warp draws; its first lane asks, and all lanes look who is behind. */
#ifdef __CUDA_ARCH__
#define FUSED_MOE_LANE (threadIdx.x % 32)
#define FUSED_MOE_LANES 32
#define FUSED_MOE_CLAIM(claimed) (FUSED_MOE_LANE ? 0u : atomicAdd(claimed, 1u))
#define FUSED_MOE_BROADCAST(turn) __shfl_sync(~0u, turn, 0)
#define FUSED_MOE_PEEK(claimed) __ldcg(claimed)
#define FUSED_MOE_REDUCE_MAX(of_lane) __reduce_max_sync(~0u, of_lane)
#else
#define FUSED_MOE_LANE 0
#define FUSED_MOE_LANES 1
#define FUSED_MOE_CLAIM(claimed) ((*(claimed))++)
#define FUSED_MOE_BROADCAST(turn) (turn)
#define FUSED_MOE_PEEK(claimed) (*(claimed))
#define FUSED_MOE_REDUCE_MAX(of_lane) (of_lane)
#endif

/* The cta that has most turns left, or `num_ctas` if nobody has one. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_most_remaining(const FusedMoeTileScheduler *d) {
    const uint32_t most = UINT32_MAX / FUSED_MOE_MAX_CTAS; /* counted of what is left */
    uint32_t found = 0;
    for (uint32_t cta = FUSED_MOE_LANE; cta < d->num_ctas; cta += FUSED_MOE_LANES) {
        uint32_t turns = fused_moe_num_assigned(d->num_items, cta, d->num_ctas);
        uint32_t claimed = FUSED_MOE_PEEK(d->claimed + cta);
        uint32_t left = claimed < turns ? turns - claimed : 0;
        if (left > most) left = most;
        left = left * FUSED_MOE_MAX_CTAS + cta;
        if (left > found) found = left;
    }
    found = FUSED_MOE_REDUCE_MAX(found);
    return found >= FUSED_MOE_MAX_CTAS ? found % FUSED_MOE_MAX_CTAS : d->num_ctas;
}

FUSED_MOE_PLAN_FN FusedMoeTileScheduler fused_moe_tile_scheduler(uint32_t *claimed,
                                                                 uint32_t num_items, uint32_t cta,
                                                                 uint32_t num_ctas) {
    FusedMoeTileScheduler d = {claimed, num_items, cta, num_ctas, FUSED_MOE_CLAIM(claimed + cta),
                               1};
    return d;
}

/* The next item, or one past the last: there are no more. Others may have all turns of a cta before its first. */
FUSED_MOE_PLAN_FN uint32_t fused_moe_next_tile(FusedMoeTileScheduler *d) {
    uint32_t index = d->num_items;
    if (d->own) {
        index = d->cta + d->num_ctas * FUSED_MOE_BROADCAST(d->turn);
        d->own = index < d->num_items;
    }
    if (d->own) d->turn = FUSED_MOE_CLAIM(d->claimed + d->cta); /* early: it takes a while */
    for (uint32_t behind = 0; index >= d->num_items && behind < d->num_ctas;) {
        behind = fused_moe_most_remaining(d);
        if (behind < d->num_ctas)
            index =
                behind + d->num_ctas * FUSED_MOE_BROADCAST(FUSED_MOE_CLAIM(d->claimed + behind));
    }
    return index;
}

#endif
