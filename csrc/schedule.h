/* The tile schedule: which CTA computes which tile of a grouped GEMM, and when.
 *
 * Rows are grouped by expert; expert e owns rows [offs[e-1], offs[e]), which row tiles of tile_rows rows
 * cover. A work tile is one row tile times one N tile of the output. The part that depends on the routing
 * alone is made once, by route_plan, as one int32 tensor:
 *
 *   head           FusedMoeScheduleHead, 8 words
 *   active[E]      the experts that have rows: full ones, then skinny ones
 *   tile_end[E]    inclusive prefix of their row tiles
 *   sliced[E]      all experts: those of several split-K slices, then the others         (wgrad)
 *   slice_end[E]   inclusive prefix of their slices
 *
 * Words past the last active expert are zeros. An empty expert has no row tile, and so no work tile. It has
 * one slice of no rows, since its weight gradient is zeros. The part that depends on the GEMM is a few
 * integers that its launch computes: FusedMoeTileOrder, and FusedMoeWgradOrder for a weight gradient.
 *
 * Full and skinny experts. An expert of at most FUSED_MOE_SKINNY_ROWS rows is bound by reading its weight,
 * the others by arithmetic. So some CTAs should read memory while most multiply. Where full tiles take most
 * of the time and CTAs keep lockstep, the grid's last CTAs have the skinny ones: fused_moe_share_tiles. Each
 * kind's CTAs are then the grid of what follows. Else skinny tiles are spread evenly: interleaved.
 *
 * Order within each kind: expert by expert. An expert's row tiles form groups of at most `group`, and a
 * group's tiles go N tile by N tile. Groups of 1 walk along N first, a group of all row tiles reads each
 * column of the weight once; in between, tiles in flight together share both rows of A and columns of B in
 * L2.
 *
 * Static round-robin with work stealing: CTA i gets tiles i, i + grid, ..., so neighbouring CTAs run in
 * lockstep and share operands in L2. A CTA that runs out steals the next tile of the CTA with the most left.
 * If no CTA has more than one tile, none steals: a thief would take tiles from CTAs that are about to start.
 * Without counters (slot_plan.h), none steals either.
 *
 * Rotated. A wave is `grid` consecutive tiles, one for each CTA. An expert's last row tile has fewer rows
 * than the others, and is done sooner where the epilogue takes the time. If the number of an expert's tiles
 * divides `grid`, a CTA gets such tiles in every wave, and runs ahead until L2 no longer has the operands
 * that it shares with the others. So in each wave it takes the place that its neighbour had in the wave
 * before, and all CTAs get short tiles alike.
 *
 * In turn. Where tiles take unequal times, or longer for their memory than for their MMAs, lockstep is lost
 * and CTAs drift apart by whole tiles, until L2 no longer has what they share. Then a CTA takes the next tile
 * of all, so that the tiles in flight stay neighbours (rules.h: fused_moe_takes_turns,
 * fused_moe_wgrad_takes_turns, fused_moe_wgrad_is_write_bound). Both GEMMs of few rows in one launch have a
 * counter of their own for it (kernels/sm90/experts.cuh).
 *
 * Wave quantisation: if the last wave would leave half of the CTAs idle, or more, its tiles can be split
 * along N (split_last_wave).
 *
 * Split-K. The schedule cuts an expert's rows into slices of slice_rows rows. A weight gradient's tile sums
 * slices_per_tile consecutive slices, which together are the tile's slice. Slices are made for the device's
 * number of SMs. In a plan from a device with another number, slices may have other rows than the weight
 * gradient expects; then no expert is split.
 *
 * A plan comes from the caller, and a GPU cannot refuse it. So whatever words offs and a schedule have, tiles
 * are within the R rows and the weight, their number is at most that of a right plan of R rows and E experts,
 * and no read leaves offs and the schedule. Clamping costs a few integer instructions per tile and changes no
 * tile of a right plan.
 *
 * Tiles are counted in 32 bits. This is plain C without a dependency: kernels, the CPU tier, tests and the
 * picture of tools/schedule.py call the same functions. On a GPU a warp calls them, with the same arguments
 * in all lanes.
 *
 * Sources: the prefix over active experts, found by a vote, is static batching's (Li et al., 2025); the
 * persistent grid and the grouped order are those of PyTorch's persistent cache-aware grouped GEMM (2025). */
#ifndef FUSED_MOE_SCHEDULE_H
#define FUSED_MOE_SCHEDULE_H

#include <stdint.h>

#ifdef __CUDACC__
#define FUSED_MOE_FN static inline __host__ __device__
#else
#define FUSED_MOE_FN static inline
#endif

enum {
    FUSED_MOE_TILE_ROWS = 128,  /* rows of a schedule's row tiles, but for sm90/experts.cuh */
    FUSED_MOE_SKINNY_ROWS = 64, /* a skinny expert has at most this number of rows */
    FUSED_MOE_SKINNY_TIME = 45, /* of a skinny expert's tile, in percent of a full one's */
    FUSED_MOE_MIN_SLICE = 512,  /* the schedule's split-K slices have at least this number of rows */
    FUSED_MOE_SLICE_SMS = 132,  /* a CPU's plans have slices for this number of SMs: H100, H200 */
    FUSED_MOE_MAX_CTAS = 512,   /* of a persistent grid; sm_90 has 144 SMs at most, with two CTAs each */
};

/* --- warps: the lanes of a GPU's warp, or the one lane of a CPU ----------------------------------------- */

#ifdef __CUDA_ARCH__
#define FUSED_MOE_LANES 32
#define FUSED_MOE_LANE ((int32_t)(threadIdx.x % 32))
#define FUSED_MOE_COUNT(flag) __popc(__ballot_sync(~0u, flag))
#define FUSED_MOE_COUNT_BELOW(flag) __popc(__ballot_sync(~0u, flag) & ((1u << FUSED_MOE_LANE) - 1))
#define FUSED_MOE_BROADCAST(value, lane) __shfl_sync(~0u, value, lane)
#define FUSED_MOE_REDUCE_MAX(value) __reduce_max_sync(~0u, value)
#define FUSED_MOE_CLAIM(counter) (FUSED_MOE_LANE ? 0u : atomicAdd(counter, 1u))
#define FUSED_MOE_PEEK(counter) __ldcg(counter)
#define FUSED_MOE_SYNC() __syncwarp()
#else
#define FUSED_MOE_LANES 1
#define FUSED_MOE_LANE 0
#define FUSED_MOE_COUNT(flag) (flag)
#define FUSED_MOE_COUNT_BELOW(flag) 0
#define FUSED_MOE_BROADCAST(value, lane) (value)
#define FUSED_MOE_REDUCE_MAX(value) (value)
#define FUSED_MOE_CLAIM(counter) ((*(counter))++)
#define FUSED_MOE_PEEK(counter) (*(counter))
#define FUSED_MOE_SYNC() ((void)0)
#endif

/* value within [0, high] */
FUSED_MOE_FN int32_t fused_moe_clamp(int32_t value, int32_t high) {
    return value < 0 ? 0 : value < high ? value : high;
}

FUSED_MOE_FN int32_t fused_moe_inclusive_sum(int32_t value) {
#ifdef __CUDA_ARCH__
    for (int distance = 1; distance < 32; distance *= 2) {
        int32_t other = __shfl_up_sync(~0u, value, distance);
        if (FUSED_MOE_LANE >= distance) value += other;
    }
#endif
    return value;
}

/* --- the schedule of a routing -------------------------------------------------------------------------- */

typedef struct {
    int32_t num_active, num_full;              /* experts                                              */
    int32_t num_row_tiles, num_full_row_tiles; /* of all active experts, of the full ones              */
    uint32_t skinny_share;                     /* of skinny row tiles in all, times 2^32 and rounded up */
    int32_t num_slices;                        /* split-K slices of all experts                        */
    int32_t slice_rows;                        /* of one slice, at most                                */
    int32_t tile_rows;                         /* of one row tile, at most                             */
} FusedMoeScheduleHead;

enum { FUSED_MOE_HEAD_WORDS = sizeof(FusedMoeScheduleHead) / sizeof(int32_t) };

/* A list of experts and the inclusive prefix of their row tiles, or of their slices. */
typedef struct {
    int32_t *expert, *end; /* [num] */
    int32_t num;
} FusedMoeExpertList;

FUSED_MOE_FN int64_t fused_moe_schedule_words(int64_t E) {
    return FUSED_MOE_HEAD_WORDS + 4 * E;
}

FUSED_MOE_FN FusedMoeScheduleHead *fused_moe_schedule_head(const int32_t *schedule) {
    return (FusedMoeScheduleHead *)schedule;
}

FUSED_MOE_FN FusedMoeExpertList fused_moe_active_experts(const int32_t *schedule, int32_t E) {
    int32_t *words = (int32_t *)schedule + FUSED_MOE_HEAD_WORDS;
    FusedMoeExpertList list = {words, words + E,
                               fused_moe_clamp(fused_moe_schedule_head(schedule)->num_active, E)};
    return list;
}

FUSED_MOE_FN FusedMoeExpertList fused_moe_sliced_experts(const int32_t *schedule, int32_t E) {
    int32_t *words = (int32_t *)schedule + FUSED_MOE_HEAD_WORDS + 2 * (int64_t)E;
    FusedMoeExpertList list = {words, words + E, E};
    return list;
}

FUSED_MOE_FN int32_t fused_moe_expert_start(const int32_t *offs, int32_t expert) {
    return expert ? offs[expert - 1] : 0;
}

typedef struct {
    int32_t first, num;
} FusedMoeRows;

/* An expert's rows, within [0, R); none if its end is not past its start. */
FUSED_MOE_FN FusedMoeRows fused_moe_expert_rows(const int32_t *offs, int32_t expert, int32_t R) {
    int32_t first = fused_moe_clamp(fused_moe_expert_start(offs, expert), R);
    int32_t end = fused_moe_clamp(offs[expert], R);
    FusedMoeRows rows = {first, end > first ? end - first : 0};
    return rows;
}

/* Rows of the schedule's split-K slices, a multiple of 64: 2 R / E, twice an expert's mean, so that even
 * routing splits no expert. With fewer than num_sms / 2 experts it is 4 R / num_sms. */
FUSED_MOE_FN int32_t fused_moe_slice_rows(int64_t R, int32_t E, int32_t num_sms) {
    int64_t num_parts = E > num_sms / 2 ? E : num_sms / 2;
    int64_t rows = num_parts ? 2 * R / num_parts : R;
    if (rows < FUSED_MOE_MIN_SLICE) rows = FUSED_MOE_MIN_SLICE;
    if (rows > R) rows = R > 0 ? R : 1;
    return (int32_t)((rows + 63) / 64 * 64);
}

/* Appends the experts of low to high rows, in order, with tiles of tile_rows rows; an expert without rows has
 * one tile. end: the list's last prefix before. Returns the last prefix after. */
FUSED_MOE_FN int32_t fused_moe_append_experts(FusedMoeExpertList *list, int32_t end, const int32_t *offs,
                                              int32_t E, int32_t low, int32_t high, int32_t tile_rows) {
    for (int32_t first = 0; first < E; first += FUSED_MOE_LANES) {
        int32_t e = first + FUSED_MOE_LANE, rows = e < E ? offs[e] - fused_moe_expert_start(offs, e) : -1;
        int32_t listed = e < E && low <= rows && rows <= high;
        int32_t tiles = !listed ? 0 : rows ? (rows - 1) / tile_rows + 1 : 1;
        int32_t index = list->num + FUSED_MOE_COUNT_BELOW(listed), sum = end + fused_moe_inclusive_sum(tiles);
        if (listed) list->expert[index] = e, list->end[index] = sum;
        list->num += FUSED_MOE_COUNT(listed);
        end = FUSED_MOE_BROADCAST(sum, FUSED_MOE_LANES - 1);
    }
    return end;
}

/* Writes zeros after the last expert of a list, so that equal routings have equal schedules. */
FUSED_MOE_FN void fused_moe_clear_past(const FusedMoeExpertList *list, int32_t E) {
    for (int32_t i = list->num + FUSED_MOE_LANE; i < E; i += FUSED_MOE_LANES)
        list->expert[i] = list->end[i] = 0;
}

/* Writes the head, except the words on slices. full, all: row tiles. */
FUSED_MOE_FN void fused_moe_set_row_tiles(FusedMoeScheduleHead *head, int32_t num_full, int32_t num_active,
                                          int32_t full, int32_t all, int32_t tile_rows) {
    head->num_full = num_full, head->num_full_row_tiles = full;
    head->num_active = num_active, head->num_row_tiles = all;
    head->skinny_share = full ? (uint32_t)((((uint64_t)(all - full) << 32) + all - 1) / all) : 0;
    head->tile_rows = tile_rows;
}

/* Schedules the row tiles of offs[E], which never decrease. Writes the head, except the words on slices. */
FUSED_MOE_FN void fused_moe_schedule_row_tiles(int32_t *schedule, const int32_t *offs, int32_t E,
                                               int32_t tile_rows) {
    FusedMoeScheduleHead *head = fused_moe_schedule_head(schedule);
    FusedMoeExpertList list = {schedule + FUSED_MOE_HEAD_WORDS, schedule + FUSED_MOE_HEAD_WORDS + E, 0};
    int32_t full =
        fused_moe_append_experts(&list, 0, offs, E, FUSED_MOE_SKINNY_ROWS + 1, INT32_MAX, tile_rows);
    int32_t num_full = list.num;
    int32_t all = fused_moe_append_experts(&list, full, offs, E, 1, FUSED_MOE_SKINNY_ROWS, tile_rows);
    fused_moe_clear_past(&list, E);
    if (FUSED_MOE_LANE == 0) fused_moe_set_row_tiles(head, num_full, list.num, full, all, tile_rows);
}

/* Schedules the slices of offs[E]. Experts of several slices come first: they take the longest. */
FUSED_MOE_FN void fused_moe_schedule_slices(int32_t *schedule, const int32_t *offs, int32_t E,
                                            int32_t slice_rows) {
    FusedMoeScheduleHead *head = fused_moe_schedule_head(schedule);
    FusedMoeExpertList list = fused_moe_sliced_experts(schedule, E);
    list.num = 0;
    int32_t end = fused_moe_append_experts(&list, 0, offs, E, slice_rows + 1, INT32_MAX, slice_rows);
    end = fused_moe_append_experts(&list, end, offs, E, 0, slice_rows, slice_rows);
    if (FUSED_MOE_LANE) return;
    head->num_slices = end, head->slice_rows = slice_rows;
}

/* --- work tiles of a GEMM ------------------------------------------------------------------------------- */

typedef struct {       /* the part of a schedule that depends on the GEMM */
    int32_t tile_rows; /* of the schedule's row tiles, at most */
    int32_t num_n_tiles;
    int32_t group;           /* row tiles of a group, at most                         */
    int32_t interleave;      /* skinny tiles are spread over the full ones            */
    int32_t split_last_wave; /* not a flag: CTAs of the grid; 0: it is not split      */
    int32_t splits_skinny;   /* the last wave is split even if all experts are skinny */
} FusedMoeTileOrder;

/* The order of the sm90 tier's GEMMs. split_last_wave: CTAs of the grid, or 0. */
FUSED_MOE_FN FusedMoeTileOrder fused_moe_default_order(int32_t num_n_tiles, int32_t split_last_wave) {
    FusedMoeTileOrder order = {FUSED_MOE_TILE_ROWS, num_n_tiles, 16, 1, split_last_wave, 1};
    return order;
}

typedef struct {
    int32_t expert;
    int32_t first_row, num_rows; /* 1 .. tile_rows rows, a tall tile up to 2 tile_rows; 0: a wrong plan */
    int32_t n_tile;
    int32_t n_half; /* 0: the full N tile; 1, 2: its left, right half */
    int32_t skinny; /* the expert is skinny                           */
} FusedMoeWorkTile;

/* The first expert of a list with index < end, or the list's last one. A GPU compares one expert per lane and
 * counts votes. */
FUSED_MOE_FN int32_t fused_moe_find_owner(const FusedMoeExpertList *list, int32_t index) {
    int32_t owner = 0;
    for (int32_t first = 0; first < list->num; first += FUSED_MOE_LANES) {
        int32_t b = first + FUSED_MOE_LANE;
        int32_t before = FUSED_MOE_COUNT(b < list->num && list->end[b] <= index);
        owner += before;
        if (before < FUSED_MOE_LANES) break;
    }
    return owner && owner == list->num ? owner - 1 : owner;
}

/* The number of tiles of the last wave that are split along N into two each: the last ones of num_tiles. */
FUSED_MOE_FN uint32_t fused_moe_num_split_tiles(const FusedMoeTileOrder *order, int32_t all_skinny,
                                                uint32_t num_tiles) {
    uint32_t ctas = all_skinny && !order->splits_skinny ? 0 : (uint32_t)order->split_last_wave;
    uint32_t last = ctas ? num_tiles % ctas : 0;
    return 2 * last <= ctas ? last : 0;
}

/* Maps the index of a work tile to that of its tile before the split, and returns its n_half. The first
 * `unsplit` tiles are not split. */
FUSED_MOE_FN int32_t fused_moe_half_of(uint32_t *index, uint32_t unsplit) {
    if (*index < unsplit) return 0;
    uint32_t half = *index - unsplit;
    *index = unsplit + half / 2;
    return 1 + (int32_t)(half % 2);
}

/* The largest number of row tiles of R rows of E experts: each expert may have one that is not full. */
FUSED_MOE_FN uint32_t fused_moe_max_row_tiles(int32_t R, int32_t E, int32_t tile_rows) {
    return (uint32_t)(R / tile_rows) + (uint32_t)(E < R ? E : R);
}

FUSED_MOE_FN uint32_t fused_moe_num_row_tiles(const int32_t *schedule, int32_t E, int32_t R,
                                              const FusedMoeTileOrder *order) {
    uint32_t tiles = (uint32_t)fused_moe_schedule_head(schedule)->num_row_tiles;
    uint32_t max_tiles = fused_moe_max_row_tiles(R, E, order->tile_rows);
    return tiles < max_tiles ? tiles : max_tiles;
}

/* The number of a GEMM's work tiles: fewer than 2^31. */
FUSED_MOE_FN uint32_t fused_moe_num_work_tiles(const int32_t *schedule, int32_t E, int32_t R,
                                               const FusedMoeTileOrder *order) {
    uint32_t tiles = fused_moe_num_row_tiles(schedule, E, R, order) * (uint32_t)order->num_n_tiles;
    return tiles + fused_moe_num_split_tiles(order, !fused_moe_schedule_head(schedule)->num_full, tiles);
}

/* The CTAs of a grid share tiles: the last skinny_ctas have tiles from num_full on, the first the others. */
typedef struct {
    uint32_t num, num_full, skinny_ctas;
} FusedMoeTileShares;

FUSED_MOE_FN FusedMoeTileShares fused_moe_equal_shares(uint32_t num_tiles) {
    FusedMoeTileShares shares = {num_tiles, num_tiles, 0};
    return shares;
}

/* Gives skinny tiles CTAs of their own, in a number that lets both kinds end together, if the order
 * interleaves them, and full tiles are two waves or more and take at least four fifths of the time. Then the
 * order has skinny tiles last and splits no wave. */
FUSED_MOE_FN FusedMoeTileShares fused_moe_share_tiles(const int32_t *schedule, int32_t E, int32_t R,
                                                      FusedMoeTileOrder *order, uint32_t ctas) {
    uint32_t n_tiles = (uint32_t)order->num_n_tiles;
    uint32_t num = fused_moe_num_row_tiles(schedule, E, R, order) * n_tiles;
    uint32_t full = (uint32_t)fused_moe_schedule_head(schedule)->num_full_row_tiles * n_tiles;
    uint64_t skinny_time = (uint64_t)(num - full) * FUSED_MOE_SKINNY_TIME, time = skinny_time + 100ull * full;
    uint32_t skinny_ctas = 0;
    if (order->interleave && full >= 2 * ctas && full < num)
        skinny_ctas = (uint32_t)((skinny_time * ctas + time / 2) / time);
    if (!skinny_ctas || skinny_ctas > ctas / 5)
        return fused_moe_equal_shares(fused_moe_num_work_tiles(schedule, E, R, order));
    order->interleave = order->split_last_wave = 0;
    FusedMoeTileShares shares = {num, full, skinny_ctas};
    return shares;
}

/* Row and column of tile `index` of rows x columns tiles. Groups have at most `group` rows, all of equal size
 * but for the last. */
FUSED_MOE_FN void fused_moe_grouped_order(uint32_t index, uint32_t rows, uint32_t columns, uint32_t group,
                                          int32_t *row, int32_t *column) {
    uint32_t groups = (rows - 1) / group + 1, size = (rows - 1) / groups + 1;
    uint32_t first = index / (size * columns) * size;
    if (size > rows - first) size = rows - first; /* the last group */
    index -= first * columns;
    *row = (int32_t)(first + index % size);
    *column = (int32_t)(index / size);
}

/* Work tile `index` of fused_moe_num_work_tiles. */
FUSED_MOE_FN FusedMoeWorkTile fused_moe_work_tile(const int32_t *schedule, const int32_t *offs, int32_t E,
                                                  int32_t R, const FusedMoeTileOrder *order, uint32_t index) {
    const FusedMoeScheduleHead *head = fused_moe_schedule_head(schedule);
    FusedMoeExpertList active = fused_moe_active_experts(schedule, E);
    uint32_t n_tiles = (uint32_t)order->num_n_tiles;
    uint32_t row_tiles = fused_moe_num_row_tiles(schedule, E, R, order), num_tiles = row_tiles * n_tiles;
    FusedMoeWorkTile tile;

    /* the tile, and the half of it */
    uint32_t unsplit = num_tiles - fused_moe_num_split_tiles(order, !head->num_full, num_tiles);
    tile.n_half = fused_moe_half_of(&index, unsplit);

    /* undo the interleaving: floor(index * share / 2^32) of the first `index` tiles are skinny */
    uint32_t full = (uint32_t)head->num_full_row_tiles * n_tiles;
    if (order->interleave && full) {
        uint64_t share = head->skinny_share;
        uint32_t before = (uint32_t)(index * share >> 32),
                 is_skinny = (uint32_t)((index + 1) * share >> 32) > before;
        index = is_skinny ? full + before : index - before;
    }

    int32_t b = fused_moe_find_owner(&active, (int32_t)(index / n_tiles));
    uint32_t before = b ? (uint32_t)active.end[b - 1] : 0, expert_tiles = (uint32_t)active.end[b] - before;
    int32_t row_tile;
    index -= before * n_tiles;
    if (expert_tiles - 1 >= row_tiles) expert_tiles = 1; /* if it is 0, too */
    if (index >= expert_tiles * n_tiles) index = 0;
    fused_moe_grouped_order(index, expert_tiles, n_tiles, (uint32_t)order->group, &row_tile, &tile.n_tile);
    tile.expert = fused_moe_clamp(active.expert[b], E - 1);
    tile.skinny = b >= head->num_full;
    FusedMoeRows rows = fused_moe_expert_rows(offs, tile.expert, R);
    uint32_t above = (uint32_t)row_tile * (uint32_t)order->tile_rows;
    int32_t done = above < (uint32_t)rows.num ? (int32_t)above : rows.num;
    tile.first_row = rows.first + done;
    tile.num_rows = rows.num - done < order->tile_rows ? rows.num - done : order->tile_rows;
    return tile;
}

/* Makes two tall tiles of row tiles 2 i and 2 i + 1 of an expert, times a full N tile: each has the rows of
 * both, times half of the columns. If the second row tile is at most half full, both stay as they are. The
 * order must not split the last wave, which might split half of a pair. */
FUSED_MOE_FN FusedMoeWorkTile fused_moe_tall_tile(FusedMoeWorkTile tile, const int32_t *offs, int32_t R,
                                                  const FusedMoeTileOrder *order) {
    FusedMoeRows rows = fused_moe_expert_rows(offs, tile.expert, R);
    int32_t row_tile = (tile.first_row - rows.first) / order->tile_rows, tall = 2 * order->tile_rows;
    int32_t done = row_tile / 2 * tall;
    if (tile.n_half || rows.num - done <= tall * 3 / 4) return tile;
    tile.first_row = rows.first + done;
    tile.num_rows = rows.num - done < tall ? rows.num - done : tall;
    tile.n_half = 1 + row_tile % 2;
    return tile;
}

/* --- work tiles of a weight gradient, which sums along an expert's rows --------------------------------- */

/* The number of the schedule's slices in a tile's slice, such that no tile takes longer than half of a CTA's
 * work: fewer than 2 * ctas weight tiles are split. 0: there are enough tiles, and each sums all rows of its
 * expert. A tile's slice has a multiple of k_tile rows, 64 or 128; the schedule's have multiples of 64. */
FUSED_MOE_FN int32_t fused_moe_slices_per_tile(int64_t R, int32_t slice_rows, int64_t weight_tiles,
                                               int32_t ctas, int32_t k_tile) {
    if (weight_tiles >= 2 * (int64_t)ctas || R <= slice_rows) return 0;
    int64_t rows = R * weight_tiles / (2 * ctas);
    int64_t slices = (rows + slice_rows - 1) / slice_rows;
    if (slices < 1) slices = 1;
    if (slices * slice_rows % k_tile) slices++;
    return slices * slice_rows >= R ? 0 : (int32_t)slices;
}

/* Finds tile slice `index`; a tile slice is slices_per_tile of the schedule's slices. Returns the index of
 * its expert in the list, or the list's length if there are fewer tile slices. *slice becomes its number
 * within the expert. Split experts, which have several of the schedule's slices, come first in the list. Only
 * their tile slices are summed up, since each expert after them is one. max_slices: a bound on the slices of
 * all experts. */
FUSED_MOE_FN int32_t fused_moe_find_slice(const FusedMoeExpertList *sliced, int32_t slices_per_tile,
                                          int32_t max_slices, int32_t index, int32_t *slice) {
    int32_t first = 0, sum = 0, num_split = FUSED_MOE_LANES;
    *slice = 0;
    while (first < sliced->num && num_split == FUSED_MOE_LANES) {
        int32_t b = first + FUSED_MOE_LANE, slices = 1;
        if (b < sliced->num)
            slices = (int32_t)((uint32_t)sliced->end[b] - (uint32_t)(b ? sliced->end[b - 1] : 0));
        slices = slices > 1 ? (fused_moe_clamp(slices, max_slices) - 1) / slices_per_tile + 1 : 0;
        int32_t end = sum + fused_moe_inclusive_sum(slices);
        int32_t before = FUSED_MOE_COUNT(slices && end <= index);
        num_split = FUSED_MOE_COUNT(slices > 0);
        if (before < num_split) {
            *slice = index - FUSED_MOE_BROADCAST(end - slices, before);
            return first + before;
        }
        sum = fused_moe_clamp(FUSED_MOE_BROADCAST(end, FUSED_MOE_LANES - 1), max_slices);
        first += num_split;
    }
    index -= sum;
    return 0 <= index && index < sliced->num - first ? first + index : sliced->num;
}

typedef struct {             /* the part of a schedule that depends on the weight gradient */
    int32_t weight_tiles;    /* of an expert                                                           */
    int32_t slice_rows;      /* of the schedule's slices, at most                                      */
    int32_t slices_per_tile; /* the schedule's in a tile's slice; 0: a tile has all rows of its expert */
} FusedMoeWgradOrder;

typedef struct {
    int32_t expert, first_row, num_rows; /* num_rows 0: an empty expert                             */
    int32_t weight_tile;                 /* of the expert's weight                                  */
    int32_t slice, num_slices;           /* tile slice of the expert's; num_slices 0: an empty tile */
} FusedMoeWgradTile;

/* Whether tiles sum slices of the schedule. If these have other rows, a tile sums all rows of its expert. */
FUSED_MOE_FN int32_t fused_moe_has_slices(const int32_t *schedule, const FusedMoeWgradOrder *order) {
    return order->slices_per_tile && fused_moe_schedule_head(schedule)->slice_rows == order->slice_rows;
}

/* The largest number of slices of a schedule: each expert may have one that is not full. */
FUSED_MOE_FN uint32_t fused_moe_max_slices(int32_t R, int32_t E, int32_t slice_rows) {
    return (uint32_t)(R / slice_rows) + (uint32_t)E;
}

/* The number of a weight gradient's tiles. If a tile sums several of the schedule's slices, the last tiles
 * may be empty (num_slices 0). */
FUSED_MOE_FN uint32_t fused_moe_num_wgrad_tiles(const int32_t *schedule, int32_t E, int32_t R,
                                                const FusedMoeWgradOrder *order) {
    uint32_t slices = (uint32_t)E;
    if (fused_moe_has_slices(schedule, order)) {
        uint32_t max_slices = fused_moe_max_slices(R, E, order->slice_rows);
        slices = (uint32_t)fused_moe_schedule_head(schedule)->num_slices;
        if (slices > max_slices) slices = max_slices;
    }
    return slices * (uint32_t)order->weight_tiles;
}

/* Tile `index` of fused_moe_num_wgrad_tiles. */
FUSED_MOE_FN FusedMoeWgradTile fused_moe_wgrad_tile(const int32_t *schedule, const int32_t *offs, int32_t E,
                                                    int32_t R, const FusedMoeWgradOrder *order,
                                                    uint32_t index) {
    FusedMoeWgradTile tile;
    uint32_t weight_tiles = (uint32_t)order->weight_tiles;
    int32_t slice_rows = INT32_MAX;
    int32_t is_tile = 1;
    int32_t slice = (int32_t)(index / weight_tiles);
    tile.weight_tile = (int32_t)(index % weight_tiles);
    tile.expert = slice; /* if each expert is one slice */
    tile.slice = 0;
    if (fused_moe_has_slices(schedule, order)) {
        FusedMoeExpertList sliced = fused_moe_sliced_experts(schedule, E);
        int32_t max_slices = (int32_t)fused_moe_max_slices(R, E, order->slice_rows);
        int32_t b = fused_moe_find_slice(&sliced, order->slices_per_tile, max_slices, slice, &tile.slice);
        is_tile = b < E;
        tile.expert = fused_moe_clamp(sliced.expert[is_tile ? b : 0], E - 1);
        slice_rows = order->slices_per_tile * order->slice_rows;
    }
    FusedMoeRows rows = fused_moe_expert_rows(offs, tile.expert, R);
    tile.num_slices = rows.num ? (rows.num - 1) / slice_rows + 1 : 1;
    if (!is_tile || (uint32_t)tile.slice >= (uint32_t)tile.num_slices) tile.num_slices = tile.slice = 0;
    int32_t done = tile.slice ? tile.slice * slice_rows : 0;
    tile.first_row = rows.first + done;
    tile.num_rows = rows.num - done < slice_rows ? rows.num - done : slice_rows;
    return tile;
}

/* The number of slots for the accumulators of split experts' slices. slice_rows: rows of a tile's slice. Cut
 * the R rows into blocks of slice_rows rows, and let n = (R - 1) / slice_rows. A slice that begins in block b
 * has slot b if it is its expert's first, else slot n + b - 1. A split expert has more than slice_rows rows.
 * So no two first slices begin in the same block, and none begins in the last one, block n. No two later
 * slices begin in the same block, and none begins in block 0. Hence 2 n slots are enough, whatever offs
 * holds. */
FUSED_MOE_FN int64_t fused_moe_num_split_slots(int64_t R, int64_t slice_rows) {
    return R > slice_rows ? 2 * ((R - 1) / slice_rows) : 0;
}

/* The position of the accumulators of slice `slice` of a weight tile, in units of one tile's: a slot holds
 * `stride` of them, one per weight tile. first: the position for slice 0. later: (n - 1) * stride. */
FUSED_MOE_FN int64_t fused_moe_split_slot(int64_t first, int64_t later, int64_t stride, int32_t slice) {
    return first + (slice ? later + slice * stride : 0);
}

/* --- which CTA computes which tile ---------------------------------------------------------------------- */

typedef enum {
    FUSED_MOE_STATIC,  /* its own of every wave, and then those of others */
    FUSED_MOE_ROTATED, /* likewise, in the next wave its neighbour's      */
    FUSED_MOE_IN_TURN, /* the next one of all                             */
} FusedMoeAssignment;

typedef struct {
    uint32_t *claimed; /* [ctas] from 0: each CTA's tiles claimed by itself and by thieves; or NULL   */
    FusedMoeTileShares tiles;      /* in turn: equal                                                  */
    uint32_t cta, ctas;            /* this CTA, of FUSED_MOE_MAX_CTAS at most                         */
    uint32_t next;                 /* the number of its next tile, claimed already if it claims       */
    int32_t has_assigned;          /* it may have assigned tiles left                                 */
    int32_t claims;                /* tiles are claimed; 0: a CTA computes its assigned ones alone    */
    FusedMoeAssignment assignment; /* in turn: claimed[0] counts the tiles of all CTAs                */
} FusedMoeTileScheduler;

/* The tile that a CTA has in a wave; tiles.num or more: it has none in this one, the last. */
FUSED_MOE_FN uint32_t fused_moe_assigned_tile(const FusedMoeTileScheduler *s, uint32_t cta, uint32_t wave) {
    uint32_t skinny_ctas = s->tiles.skinny_ctas, ctas = s->ctas - skinny_ctas;
    if (cta >= ctas) return s->tiles.num_full + skinny_ctas * wave + (cta - ctas);
    uint32_t place = s->assignment == FUSED_MOE_ROTATED ? (cta + wave) % ctas : cta;
    uint32_t index = ctas * wave + place;
    return index < s->tiles.num_full ? index : s->tiles.num;
}

/* The number of tiles that a CTA has. */
FUSED_MOE_FN uint32_t fused_moe_num_assigned(const FusedMoeTileScheduler *s, uint32_t cta) {
    uint32_t skinny_ctas = s->tiles.skinny_ctas, ctas = s->ctas - skinny_ctas;
    uint32_t waves = cta < ctas ? s->tiles.num_full / ctas : (s->tiles.num - s->tiles.num_full) / skinny_ctas;
    return waves + (fused_moe_assigned_tile(s, cta, waves) < s->tiles.num);
}

/* The CTA with the most tiles left, or `ctas` if none has any. */
FUSED_MOE_FN uint32_t fused_moe_most_remaining(const FusedMoeTileScheduler *s) {
    const uint32_t limit = UINT32_MAX / FUSED_MOE_MAX_CTAS; /* left shares a word with the CTA */
    uint32_t most = 0;
    for (uint32_t cta = (uint32_t)FUSED_MOE_LANE; cta < s->ctas; cta += FUSED_MOE_LANES) {
        uint32_t assigned = fused_moe_num_assigned(s, cta);
        uint32_t claimed = FUSED_MOE_PEEK(s->claimed + cta);
        uint32_t left = claimed < assigned ? assigned - claimed : 0;
        if (left > limit) left = limit;
        left = left * FUSED_MOE_MAX_CTAS + cta;
        if (left > most) most = left;
    }
    most = FUSED_MOE_REDUCE_MAX(most);
    return most >= FUSED_MOE_MAX_CTAS ? most % FUSED_MOE_MAX_CTAS : s->ctas;
}

FUSED_MOE_FN FusedMoeTileScheduler fused_moe_tile_scheduler(uint32_t *claimed, FusedMoeTileShares tiles,
                                                            uint32_t cta, uint32_t ctas,
                                                            FusedMoeAssignment assignment) {
    int32_t claims = claimed && tiles.num > ctas;
    FusedMoeTileScheduler s = {claimed, tiles, cta, ctas, 0, 1, claims, assignment};
    if (s.claims) s.next = FUSED_MOE_CLAIM(claimed + (assignment == FUSED_MOE_IN_TURN ? 0 : cta));
    return s;
}

FUSED_MOE_FN uint32_t fused_moe_next_in_turn(FusedMoeTileScheduler *s) {
    uint32_t index = FUSED_MOE_BROADCAST(s->next, 0);
    if (index < s->tiles.num) s->next = FUSED_MOE_CLAIM(s->claimed); /* ahead of its use */
    return index;
}

/* The next tile; tiles.num or more if there are none. Thieves may have claimed all tiles of a CTA before it
 * claims its first. */
FUSED_MOE_FN uint32_t fused_moe_next_tile(FusedMoeTileScheduler *s) {
    if (s->claims && s->assignment == FUSED_MOE_IN_TURN) return fused_moe_next_in_turn(s);
    uint32_t index = s->tiles.num;
    if (s->has_assigned) {
        uint32_t wave = FUSED_MOE_BROADCAST(s->next, 0);
        index = fused_moe_assigned_tile(s, s->cta, wave);
        s->has_assigned = index < s->tiles.num;
    }
    if (s->has_assigned) /* ahead of its use: an atomic takes a while */
        s->next = s->claims ? FUSED_MOE_CLAIM(s->claimed + s->cta) : s->next + 1;
    for (uint32_t victim = 0; s->claims && index >= s->tiles.num && victim < s->ctas;) {
        victim = fused_moe_most_remaining(s);
        if (victim < s->ctas) {
            uint32_t stolen = FUSED_MOE_CLAIM(s->claimed + victim);
            uint32_t wave = FUSED_MOE_BROADCAST(stolen, 0);
            index = fused_moe_assigned_tile(s, victim, wave);
        }
    }
    return index;
}

#endif
