/* Which work tile a CTA computes: CTA i has work tile i of the tile schedule (schedule.h). Where experts have
 * few rows, the schedule's row tiles are cut into lower ones.
 *
 * The host does not know the number of work tiles, so the grid is as large as the most there can be, plus one
 * row tile. The CTAs past the last work tile zero the rows past the last one instead. */
#pragma once

#include "../common/launch.cuh"
#include "../common/schedule.cuh"

namespace fused_moe::sm80 {

constexpr int GROUP = 8; /* row tiles of a group in the grouped order */

/* The most row tiles that there can be, plus one. */
inline int64_t max_row_tiles(int64_t R, int32_t E, int rows = FUSED_MOE_TILE_ROWS) {
    return (int64_t)fused_moe_max_row_tiles((int32_t)R, E, rows) + 1;
}

struct CtaWork {
    FusedMoeWorkTile tile;  /* num_rows 0: none */
    int64_t idle, num_idle; /* this CTA's index among the idle ones, negative: not one; their number, >= 1 */
};

/* The work tile of a CTA where row tiles have `rows` rows, fewer than the schedule's. Experts are in the
 * schedule's order, and within an expert the order is N tile by N tile: the CTAs of all its rows read the
 * same columns of the weight at the same time, so L2 has them. A wrong plan's tiles are within the R rows,
 * too; n_tile is below num_n_tiles. */
__device__ inline CtaWork find_cut_work(const int32_t *schedule, const int32_t *offs, int32_t E, int32_t R,
                                        uint32_t num_n_tiles, int rows) {
    FusedMoeExpertList active = fused_moe_active_experts(schedule, E);
    uint32_t cta = blockIdx.x, row_tile = cta / num_n_tiles, end = 0;
    for (int32_t first = 0; first < active.num; first += FUSED_MOE_LANES) {
        int32_t b = first + FUSED_MOE_LANE, expert = 0;
        FusedMoeRows expert_rows = {};
        if (b < active.num) {
            expert = fused_moe_clamp(active.expert[b], E - 1);
            expert_rows = fused_moe_expert_rows(offs, expert, R);
        }
        uint32_t tiles = (uint32_t)((expert_rows.num + rows - 1) / rows);
        uint32_t sum = end + (uint32_t)fused_moe_inclusive_sum((int32_t)tiles);
        int32_t owner = FUSED_MOE_COUNT(sum <= row_tile);
        end = FUSED_MOE_BROADCAST(sum, FUSED_MOE_LANES - 1);
        if (owner == FUSED_MOE_LANES) continue;
        tiles = FUSED_MOE_BROADCAST(tiles, owner);
        uint32_t index = cta - (FUSED_MOE_BROADCAST(sum, owner) - tiles) * num_n_tiles;
        if (index >= tiles * num_n_tiles) index = 0, tiles = 1;
        int32_t done = (int32_t)(index % tiles) * rows;
        CtaWork w = {{}, -1, 1};
        w.tile.expert = FUSED_MOE_BROADCAST(expert, owner);
        w.tile.first_row = FUSED_MOE_BROADCAST(expert_rows.first, owner) + done;
        w.tile.num_rows = min(FUSED_MOE_BROADCAST(expert_rows.num, owner) - done, rows);
        w.tile.n_tile = (int32_t)(index / tiles);
        return w;
    }
    int64_t num_tiles = (int64_t)end * num_n_tiles;
    return {{}, cta - num_tiles, gridDim.x - num_tiles};
}

/* The work tile of a CTA, at most `rows` rows. Called by converged warps; all lanes get the same result. */
template <int rows = FUSED_MOE_TILE_ROWS>
__device__ inline CtaWork find_work(const int32_t *schedule, const int32_t *offs, int32_t E, int64_t R,
                                    int num_n_tiles) {
    if constexpr (rows < FUSED_MOE_TILE_ROWS)
        return find_cut_work(schedule, offs, E, (int32_t)R, (uint32_t)num_n_tiles, rows);
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
