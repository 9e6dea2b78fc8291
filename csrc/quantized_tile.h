/* The order of codes in a tile of a quantised weight. fused_moe/quantized/tiles.py writes tiles, and says
 * why.
 *
 * A lane of a warp has columns 16 s + 8 u + 2 t + i of a row of the tile, t = lane % 4: four words of 8-bit
 * codes, or two of 4-bit codes.
 *
 * Plain C, like schedule.h: the dequantising kernel calls it, and a CPU in the tests. */
#ifndef FUSED_MOE_QUANTIZED_TILE_H
#define FUSED_MOE_QUANTIZED_TILE_H

#include "formats.h"
#include "schedule.h"

/* The bits of a halfword's four codes of e2m1. Digit n, from the right, is code n's: the first bit of its
 * magnitude, and its sign. In bf16 code 0 needs no shift, and code 2 one for both; codes 1 and 3 need two. */
#define FUSED_MOE_E2M1_MAGNITUDES 0x0396
#define FUSED_MOE_E2M1_SIGNS 0xecdf

/* Words of a row in a lane. */
FUSED_MOE_FN int32_t fused_moe_lane_words(FusedMoeCode code) {
    return fused_moe_code_bits(code) / 2;
}

/* The index of the first of them in the tile; rows are 0 to 63. */
FUSED_MOE_FN int32_t fused_moe_first_word(FusedMoeCode code, int32_t row, int32_t t) {
    int32_t lane = row % 8 * 4 + t, warp = row / 16;
    return (row / 8 % 2 * 128 + warp * 32 + lane) * fused_moe_lane_words(code);
}

/* The code of column 16 s + 8 u + 2 t + i. */
FUSED_MOE_FN uint32_t fused_moe_code_of_lane(FusedMoeCode code, const uint32_t *words, int32_t s, int32_t u,
                                             int32_t i) {
    if (fused_moe_code_bits(code) == 8) return words[s] >> (16 * u + 8 * i) & 255;
    uint32_t half = words[s / 2] >> 16 * i;
    int32_t digit = 4 * (2 * (s % 2) + u);
    if (code != FUSED_MOE_CODE_E2M1) return half >> digit & 15;
    uint32_t magnitude = half >> (FUSED_MOE_E2M1_MAGNITUDES >> digit & 15) & 7;
    uint32_t sign = half >> (FUSED_MOE_E2M1_SIGNS >> digit & 15) & 1;
    return magnitude | sign << 3;
}

#endif
