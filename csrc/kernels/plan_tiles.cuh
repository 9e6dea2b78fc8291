/* The tile plan made on the device, from ends that nobody has checked. Launchers are in route_plan.cu. */
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace fused_moe {

/* Numbers of a plan made for one call: ends and tiles. */
inline size_t checked_plan_ints(int64_t E) {
    return E + 2 + 2 * E;
}

/* Copies ends, made to never decrease and to stay within R, and plans their tiles. */
int make_checked_plan(const int32_t *ends, int32_t E, int64_t R, int32_t *workspace,
                      const int32_t **checked_ends, const int32_t **tiles, void *stream);

} // namespace fused_moe
