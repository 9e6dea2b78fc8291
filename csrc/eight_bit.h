/* How values become codes of 8 bits, in every tier.
 *
 *   scale = peak / largest, where peak is the largest magnitude of the values that share it
 *   code  = value (1 / scale), rounded to the nearest even: e4m3, or int8 from -127 to 127
 *   value = x, or with smoothing x (1 / factor)
 *
 * Both reciprocals and both products are rounded to float32. A lane of a GPU keeps the reciprocals of an
 * expert's factors for all of its rows; a division for each element would take longer than the memory.
 * A NaN makes the scale NaN, and with it all that is computed from its row. A row of zeros has scale 1.
 * Sources: DeepSeek-V3 (arXiv 2412.19437, 3.3), LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438).
 *
 * Plain C, like schedule.h. */
#ifndef FUSED_MOE_EIGHT_BIT_H
#define FUSED_MOE_EIGHT_BIT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"
#include "schedule.h"

enum {
    FUSED_MOE_BLOCK = 128
}; /* columns of a, rows and columns of a weight, that share a scale: fp8_block */

FUSED_MOE_FN float fused_moe_largest_code(FusedMoeCode code) {
    return code == FUSED_MOE_CODE_E4M3 ? 448.0f : 127.0f;
}

FUSED_MOE_FN uint32_t fused_moe_float_bits(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

FUSED_MOE_FN float fused_moe_bits_float(uint32_t bits) {
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A magnitude as an integer of the same order, in which NaN is above all: the largest of them is the peak. */
FUSED_MOE_FN uint32_t fused_moe_magnitude(float v) {
    return fused_moe_float_bits(v) & 0x7fffffff;
}

/* From the largest magnitude. Below 2^-120 the inverse would be infinite, so no scale is smaller. */
FUSED_MOE_FN float fused_moe_scale_of(uint32_t peak, float largest, bool power_of_two) {
    const float smallest = 7.52316385e-37f; /* 2^-120 */
    float scale = fused_moe_bits_float(peak) / largest;
    if (peak == 0) return 1;
    if (scale < smallest) return smallest;
    if (!power_of_two || !(scale <= 1e38f)) return scale;
    return fused_moe_bits_float((fused_moe_float_bits(scale) + 0x7fffff) & 0x7f800000);
}

/* --- training ------------------------------------------------------------------------------------------- */

/* Weight gradients sum along rows, so their operands are stored by columns, in row blocks: [row blocks,
 * columns, 128] codes. A row block has 128 rows of one expert; the last one of an expert is filled up with
 * zeros. Where an expert's blocks start is known from its first row alone, so some blocks are never written,
 * and never read. */
FUSED_MOE_FN int64_t fused_moe_num_row_blocks(int64_t R, int64_t E) {
    return R / FUSED_MOE_BLOCK + E;
}

FUSED_MOE_FN int32_t fused_moe_first_row_block(int32_t first_row, int32_t expert) {
    return first_row / FUSED_MOE_BLOCK + expert;
}

#endif
