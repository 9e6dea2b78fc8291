/* The formats of quantised weights, for every tier and the bindings. fused_moe/quantized/formats.py has the
 * same list in the same order; tests/test_quantized.py compares the two.
 *
 * An element's value is (code - zero) scale. A block of elements shares a scale, and a zero point if the
 * format has them. */
#ifndef FUSED_MOE_FORMATS_H
#define FUSED_MOE_FORMATS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FUSED_MOE_FACT constexpr __host__ __device__
#elif defined(__cplusplus)
#define FUSED_MOE_FACT constexpr
#else
#define FUSED_MOE_FACT static inline
#endif

/* kind of a code, its bits; codes of 4 bits are stored two per byte */
#define FUSED_MOE_CODES(X)                                                                                   \
    X(E4M3, 8)                                                                                               \
    X(INT8, 8)                                                                                               \
    X(INT4, 4) /* stored plus 8 */                                                                           \
    X(E2M1, 4)

/* name, kind of a code, whether it may have zero points (int8, -8 to 7), scales, block */
#define FUSED_MOE_FORMATS(X)                                                                                 \
    X(fp8_block, E4M3, false, F32, SQUARE_128)                                                               \
    X(fp8, E4M3, false, FLOATING, ROW)                                                                       \
    X(int8, INT8, false, FLOATING, ROW)                                                                      \
    X(int4, INT4, true, FLOATING, GROUP)                                                                     \
    X(mxfp4, E2M1, false, E8M0, GROUP_32)

typedef enum {
#define X(code, bits) FUSED_MOE_CODE_##code,
    FUSED_MOE_CODES(X)
#undef X
} FusedMoeCode;

typedef enum {
#define X(name, code, zeros, scales, block) FUSED_MOE_FORMAT_##name,
    FUSED_MOE_FORMATS(X)
#undef X
        FUSED_MOE_NUM_FORMATS
} FusedMoeFormat;

typedef enum {
    FUSED_MOE_SCALES_F32,
    FUSED_MOE_SCALES_FLOATING, /* f32, bf16 or f16 */
    FUSED_MOE_SCALES_E8M0      /* u8 */
} FusedMoeScales;

typedef enum {
    FUSED_MOE_BLOCK_SQUARE_128, /* 128 rows and 128 columns     */
    FUSED_MOE_BLOCK_ROW,        /* a row, or the whole matrix   */
    FUSED_MOE_BLOCK_GROUP,      /* one of a row's equal parts   */
    FUSED_MOE_BLOCK_GROUP_32    /* 32 neighbouring columns of a row */
} FusedMoeBlock;

typedef struct {
    const char *name;
    FusedMoeCode code;
    int32_t bits; /* of a code */
    bool has_zeros;
    FusedMoeScales scales;
    FusedMoeBlock block;
    bool is_grouped; /* a row has a scale for each group of its columns */
} FusedMoeFormatFacts;

FUSED_MOE_FACT int32_t fused_moe_code_bits(FusedMoeCode code) {
    const int32_t bits[] = {
#define X(code, bits) bits,
        FUSED_MOE_CODES(X)
#undef X
    };
    return bits[code];
}

FUSED_MOE_FACT FusedMoeFormatFacts fused_moe_format(FusedMoeFormat format) {
    const FusedMoeFormatFacts formats[] = {
#define X(name, code, zeros, scales, block)                                                                  \
    {#name,                                                                                                  \
     FUSED_MOE_CODE_##code,                                                                                  \
     fused_moe_code_bits(FUSED_MOE_CODE_##code),                                                             \
     zeros,                                                                                                  \
     FUSED_MOE_SCALES_##scales,                                                                              \
     FUSED_MOE_BLOCK_##block,                                                                                \
     FUSED_MOE_BLOCK_##block >= FUSED_MOE_BLOCK_GROUP},
        FUSED_MOE_FORMATS(X)
#undef X
    };
    return formats[format];
}

#endif
