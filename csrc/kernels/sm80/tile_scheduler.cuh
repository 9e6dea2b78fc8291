/* Which work tile a CTA computes: CTA i has work tile i of the tile schedule (schedule.h).
 *
 * The host does not know the number of work tiles, so the grid is as large as the most there can be, plus one
 * row tile. The CTAs past the last work tile zero the rows past the last one instead. */
#pragma once

#include "../common/launch.cuh"
#include "../common/schedule.cuh"

namespace fused_moe::sm80 {

constexpr int GROUP = 8; /* row tiles of a group in the grouped order */

/* As many as there can be, plus one. */
inline int64_t max_row_tiles(int64_t R, int32_t E) {
    return (int64_t)fused_moe_max_row_tiles((int32_t)R, E, FUSED_MOE_TILE_ROWS) + 1;
}

struct CtaWork {
    FusedMoeWorkTile tile;  /* num_rows 0: none */
    int64_t idle, num_idle; /* this CTA's index among the idle ones, negative: not one; their number, >= 1 */
};

/* Called by converged warps; all lanes get the same result. */
__device__ inline CtaWork find_work(const int32_t *schedule, const int32_t *offs, int32_t E, int64_t R,
                                    int num_n_tiles) {
    const FusedMoeTileOrder order = {FUSED_MOE_TILE_ROWS, num_n_tiles, GROUP, 0, 0, 0};
    int64_t num_tiles = fused_moe_num_work_tiles(schedule, E, (int32_t)R, &order), cta = blockIdx.x;
    CtaWork w = {{}, cta - num_tiles, gridDim.x - num_tiles};
    if (cta < num_tiles) w.tile = fused_moe_work_tile(schedule, offs, E, (int32_t)R, &order, blockIdx.x);
    return w;
}

/* An idle CTA's share of zeroing rows [offs[E-1], R) of a matrix, which may be NULL. */
template <typename T>
__device__ inline void zero_tail(const CtaWork &w, T *out, int64_t width, const int32_t *offs, int32_t E,
                                 int64_t R) {
    if (!out || w.idle < 0) return;
    for (int64_t row = num_rows_of(offs, E, R) + w.idle; row < R; row += w.num_idle)
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x) out[row * width + j] = T(0.0f);
}

} // namespace fused_moe::sm80
