/* The tile plan: which tile of rows belongs to which expert.
 *
 * Rows are grouped by expert; expert e owns rows [ends[e-1], ends[e]). A grouped product cuts each
 * expert's rows into tiles of `tile_rows`, the last one shorter. Only the inclusive prefix of tile
 * counts over the BUSY experts is stored, so that no tile of an empty expert exists and a cta finds
 * its expert by one search of a short sorted array: a binary search here, on a GPU one comparison a
 * lane and a ballot.
 *
 *   tiles[0]               B = number of active experts
 *   tiles[1]               number of tiles
 *   tiles[2 .. 2+E)        active[b]: expert of the b-th active one            (b < B)
 *   tiles[2+E .. 2+2E)     tile_end[b]: tiles of active[0..b], inclusive     (b < B)
 *
 * Entries past B are zero. Plain C without a dependency: usable from C, C++ and CUDA. */
#ifndef FUSED_MOE_PLAN_H
#define FUSED_MOE_PLAN_H

#include <stdint.h>

#ifdef __CUDACC__
#define FUSED_MOE_PLAN_FN static inline __host__ __device__
#else
#define FUSED_MOE_PLAN_FN static inline
#endif

/* Rows of a tile in the plan that travels with the routing (route_plan's output `tiles`). */
enum { FUSED_MOE_TILE_ROWS = 128 };

typedef struct {
    int32_t expert;
    int32_t first_row;
    int32_t num_rows; /* 1 .. tile_rows */
} FusedMoeTile;

FUSED_MOE_PLAN_FN int64_t fused_moe_tiles_length(int64_t num_experts) {
    return 2 + 2 * num_experts;
}

FUSED_MOE_PLAN_FN int32_t fused_moe_first_row(const int32_t *ends, int32_t expert) {
    return expert ? ends[expert - 1] : 0;
}

/* Fills tiles[2 + 2E] from ends[E]. */
FUSED_MOE_PLAN_FN void fused_moe_plan_tiles(const int32_t *ends, int32_t num_experts,
                                            int32_t tile_rows, int32_t *tiles) {
    int32_t *active = tiles + 2, *tile_end = active + num_experts;
    int32_t num_active = 0, num_tiles = 0;
    for (int32_t e = 0; e < num_experts; e++) {
        int32_t rows = ends[e] - fused_moe_first_row(ends, e);
        if (rows <= 0) continue;
        num_tiles += rows / tile_rows + (rows % tile_rows != 0);
        active[num_active] = e;
        tile_end[num_active++] = num_tiles;
    }
    for (int32_t b = num_active; b < num_experts; b++) active[b] = tile_end[b] = 0;
    tiles[0] = num_active;
    tiles[1] = num_tiles;
}

/* The first of num_active experts with tile < tile_end[b]; one has to be there. */
FUSED_MOE_PLAN_FN int32_t fused_moe_find_owner(const int32_t *tile_end, int32_t num_active,
                                               int32_t tile) {
    int32_t low = 0, high = num_active - 1;
    while (low < high) {
        int32_t mid = (low + high) / 2;
        if (tile < tile_end[mid])
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

/* The rows of tile number `tile`, 0 <= tile < tiles[1]. */
FUSED_MOE_PLAN_FN FusedMoeTile fused_moe_find_tile(const int32_t *tiles, const int32_t *ends,
                                                   int32_t num_experts, int32_t tile_rows,
                                                   int32_t tile) {
    const int32_t *active = tiles + 2, *tile_end = active + num_experts;
    int32_t b = fused_moe_find_owner(tile_end, tiles[0], tile);
    FusedMoeTile found;
    found.expert = active[b];
    int32_t tile_in_expert = tile - (b ? tile_end[b - 1] : 0);
    found.first_row = fused_moe_first_row(ends, found.expert) + tile_in_expert * tile_rows;
    int32_t rows_left = ends[found.expert] - found.first_row;
    found.num_rows = rows_left < tile_rows ? rows_left : tile_rows;
    return found;
}

#endif
