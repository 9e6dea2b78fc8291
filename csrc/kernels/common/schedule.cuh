/* What kernels share of a plan: the last row, and schedules made on the device from offsets or counts that
 * nothing has checked, which route_plan.cu defines. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../schedule.h"

namespace fused_moe {

/* Rows that are an expert's, of R in all; the others are zeros in every result. */
__device__ inline int32_t num_rows_of(const int32_t *offs, int32_t E, int64_t R) {
    return fused_moe_clamp(offs[E - 1], (int32_t)R);
}

/* Bytes of checked offsets (E) and their schedule, a multiple of 128. */
inline size_t checked_offsets_bytes(int64_t E) {
    return ((E + fused_moe_schedule_words(E)) * sizeof(int32_t) + 127) / 128 * 128;
}

/* Replaces *offs by a copy in the workspace that never decreases and is within [0, R], and makes its
 * schedule. */
int check_offsets(const int32_t **offs, const int32_t **schedule, int32_t E, int64_t R, void *workspace,
                  void *stream);

} // namespace fused_moe
