/* Parts of a plan that kernels share: the number of rows, and schedules made on the device. Schedules of
 * unchecked offsets or counts are in route_plan.cu. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "launch.cuh"

namespace fused_moe {

/* The number of rows that belong to an expert, out of R. Every result has zeros in the others. */
__device__ inline int32_t num_rows_of(const int32_t *offs, int32_t E, int64_t R) {
    return fused_moe_clamp(offs[E - 1], (int32_t)R);
}

/* Rows of a slice in plans that the current device makes, and that its weight gradients expect. */
inline int32_t slice_rows_of(int64_t R, int32_t E) {
    return fused_moe_slice_rows(R, E, current_device().num_sms);
}

/* The whole CTA calls it, with offs that all its threads see; two warps do the work. */
__device__ inline void make_schedule(int32_t *schedule, const int32_t *offs, int32_t E, int32_t slice_rows,
                                     int32_t tile_rows = FUSED_MOE_TILE_ROWS) {
    int warp = threadIdx.x / 32;
    if (warp == 0) fused_moe_schedule_row_tiles(schedule, offs, E, tile_rows);
    if (warp == 1) fused_moe_schedule_slices(schedule, offs, E, slice_rows);
}

/* Bytes of checked offsets (E) and their schedule, a multiple of 128. */
inline size_t checked_offsets_bytes(int64_t E) {
    return ((E + fused_moe_schedule_words(E)) * sizeof(int32_t) + 127) / 128 * 128;
}

/* Replaces *offs by a copy in the workspace that never decreases and is within [0, R], and computes the
 * copy's schedule. */
int check_offsets(const int32_t **offs, const int32_t **schedule, int32_t E, int64_t R, void *workspace,
                  void *stream);

} // namespace fused_moe
