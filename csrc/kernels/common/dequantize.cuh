/* A quantised weight to a dense one: for many rows, and where no GEMM reads the quantised weight. */
#pragma once

#include <stddef.h>

#include "../../fused_moe.h"

namespace fused_moe {

/* Bytes of the dense weight. */
size_t dequantized_bytes(const FusedMoeQuantizedWeight &w, int32_t E, FusedMoeDtype dtype);

/* out [E,out,in]; offs [E]: only experts with rows are written; NULL: all. */
int dequantize(void *out, const FusedMoeQuantizedWeight &w, const int32_t *offs, int32_t E,
               FusedMoeDtype dtype, void *stream);

} // namespace fused_moe
