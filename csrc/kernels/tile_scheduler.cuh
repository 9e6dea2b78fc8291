/* Which tile of a grouped product a CTA computes, from the tile plan of plan.h.
 *
 * The number of tiles is known on the device alone, so the grid has room for the most there can be
 * (every expert may end with a short tile) and one more row of tiles: the CTAs left over are idle, and
 * zero the rows past the last one instead.
 *
 * Order: GROUP row tiles side by side, column by column, so that the CTAs that run at one time share
 * both rows of A and columns of B in L2. */
#pragma once

#include "../plan.h"
#include "launch.cuh"

namespace fused_moe {

constexpr int GROUP = 8;

/* Row tiles to make room for. */
inline int64_t max_row_tiles(int64_t R, int64_t E) {
    return R / FUSED_MOE_TILE_ROWS + (E < R ? E : R) + 1;
}

/* Tile `index` of rows x columns in that order. */
__device__ inline void grouped_order(unsigned index, unsigned num_rows, unsigned num_columns,
                                     int &row, int &column) {
    unsigned first = index / (GROUP * num_columns) * GROUP, within = index - first * num_columns;
    unsigned size = min((unsigned)GROUP, num_rows - first);
    column = (int)(within / size);
    row = (int)(first + within - column * size);
}

struct Work {
    FusedMoeTile rows; /* num_rows 0: nothing to compute */
    int column_tile;
    int64_t idle, num_idle; /* this idle CTA's number, and how many there are */
};

/* tile_end[b] <= tile for how many active experts: one comparison a lane and a ballot. */
__device__ inline int find_owner(const int32_t *tile_end, int num_active, int tile) {
    int lane = threadIdx.x % 32, before = 0;
#pragma unroll 4
    for (int base = 0; base < num_active; base += 32) {
        int b = base + lane;
        before += __popc(__ballot_sync(~0u, b < num_active && tile_end[b] <= tile));
    }
    return before;
}

/* Called by aligned warps, all with the same result. Plans that lead outside R rows or E experts, which
 * only a caller of torch.ops can make, give no work. */
__device__ inline Work find_work_tile(const int32_t *tiles, const int32_t *ends, int E, int64_t R,
                                      int num_columns) {
    int64_t index = blockIdx.x;
    const int32_t *active = tiles + 2, *tile_end = active + E;
    int num_active = min(max(tiles[0], 0), E);
    int64_t num_tiles = max(tiles[1], 0), num_work = num_tiles * num_columns;
    Work w = {{0, 0, 0}, 0, index - num_work, gridDim.x - num_work};
    if (index >= num_work) return w;

    int tile;
    grouped_order(blockIdx.x, (unsigned)num_tiles, num_columns, tile, w.column_tile);
    int b = find_owner(tile_end, num_active, tile);
    if (b >= num_active) return w;
    int e = active[b];
    if ((unsigned)e >= (unsigned)E) return w;
    int64_t tile_in_expert = tile - (b ? tile_end[b - 1] : 0);
    int64_t row = (e ? ends[e - 1] : 0) + tile_in_expert * FUSED_MOE_TILE_ROWS;
    int64_t end = min((int64_t)ends[e], R);
    if (tile_in_expert < 0 || row < 0 || row >= end) return w;
    w.rows = {e, (int32_t)row, (int32_t)min(end - row, (int64_t)FUSED_MOE_TILE_ROWS)};
    return w;
}

/* An idle CTA's share of zeroing rows [ends[E-1], R) of a matrix. */
template <typename T>
__device__ inline void zero_tail(const Work &w, T *out, int64_t width, const int32_t *ends, int E,
                                 int64_t R) {
    if (w.idle < 0 || !out) return;
    int64_t first = max((int64_t)0, min((int64_t)ends[E - 1], R));
    for (int64_t row = first + w.idle; row < R; row += w.num_idle)
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x) out[row * width + j] = T(0.0f);
}

} // namespace fused_moe
