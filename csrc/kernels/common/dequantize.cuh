/* A quantised weight as a dense one: for many rows, and where no kernel reads the codes. */
#pragma once

#include <stddef.h>

#include "../../fused_moe.h"

namespace fused_moe {

/* Bytes of the dense weight. */
size_t dequantized_bytes(const FusedMoeQuantizedWeight &codes, int32_t E, FusedMoeDtype dtype);

/* out [E,out,in]; offs [E]: of experts with rows alone, NULL: of all. */
int dequantize(void *out, const FusedMoeQuantizedWeight &codes, const int32_t *offs, int32_t E,
               FusedMoeDtype dtype, void *stream);

} // namespace fused_moe
