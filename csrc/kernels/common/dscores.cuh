/* The last step of down_dgrad, for every CUDA tier. */
#pragma once

#include <stdint.h>

#include "../../fused_moe.h"

namespace fused_moe {

/* Computes p.dscores from a GEMM's partial sums of <g, a>: [R, partials_per_row], float, or double for
 * double. */
int run_dscores(const FusedMoeDownDgrad &p, const void *partials, int64_t partials_per_row, void *stream);

} // namespace fused_moe
