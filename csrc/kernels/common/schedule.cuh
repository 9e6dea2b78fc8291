/* Schedules made on the device from offsets or counts that nothing has checked. Defined in route_plan.cu. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../schedule.h"

namespace fused_moe {

/* Bytes of checked offsets (E) and their schedule, a multiple of 128. */
inline size_t checked_offsets_bytes(int64_t E) {
    return ((E + fused_moe_schedule_words(E)) * sizeof(int32_t) + 127) / 128 * 128;
}

/* Replaces *offs by a copy in the workspace that never decreases and is within [0, R], and makes its
 * schedule. */
int check_offsets(const int32_t **offs, const int32_t **schedule, int32_t E, int64_t R, void *workspace,
                  void *stream);

} // namespace fused_moe
