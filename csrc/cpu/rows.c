/* Rows of one dtype: conversion to and from the accumulation type, and the row arithmetic of the kernels.
 *
 * rows_accum.h has the arithmetic and is included for float and for double; here are the conversions and the
 * tables. */
#include "../activation.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

FM_INLINE uint32_t bits_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* exp for float, to 1 ulp or so, without a branch or a call so that loops over it vectorise:
 * x = n ln2 + r, |r| <= ln2/2, exp(r) by the Taylor polynomial of degree 7. NaN stays NaN. */
FM_INLINE float exp_float(float x) {
    float clamped = x > 88.72f ? 88.72f : x < -87.33f ? -87.33f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f;          /* 1.5 * 2^23: rounds to an integer */
    int32_t n = (int32_t)(bits_from_float(shifted) - 0x4b400000); /* 12582912.0f */
    float rounded = shifted - 12582912.0f;
    float r = clamped - rounded * 0.693359375f;
    r -= rounded * -2.12194440e-4f;
    float y = 1.98412698e-4f;
    y = y * r + 1.38888889e-3f;
    y = y * r + 8.33333333e-3f;
    y = y * r + 4.16666667e-2f;
    y = y * r + 1.66666667e-1f;
    y = y * r + 0.5f;
    y = y * r * r + r + 1.0f;
    /* 2^n as two factors, because 2^128 has no float */
    int32_t half = n >> 1, rest = n - half;
    y *= fm_float_from_bits((uint32_t)(half + 127) << 23);
    y *= fm_float_from_bits((uint32_t)(rest + 127) << 23);
    return x < -87.33f ? 0.0f : x > 88.72f ? INFINITY : y;
}

/* tanh for float, to 2 ulps, also so that loops over it vectorise: below 0.55, where 1 - 2 / (1 + exp(2x))
 * cancels, x plus an odd polynomial (a minimax fit, relative error 1e-9). */
FM_INLINE float tanh_float(float x) {
    float z = x * x;
    float y = -6.28247e-3f;
    y = y * z + 2.107776e-2f;
    y = y * z - 5.385386e-2f;
    y = y * z + 1.3332602e-1f;
    y = y * z - 3.3333318e-1f;
    float large = 1 - 2 / (1 + exp_float(2 * x));
    return z < 0.3025f ? x + x * z * y : large;
}

/* --- float16 and bfloat16 bits -------------------------------------------------------------------------- */

FM_INLINE float bf16_to_float(uint16_t b) {
    return fm_float_from_bits((uint32_t)b << 16);
}

FM_INLINE uint16_t bf16_from_float(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits = bits_from_float(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? (bits >> 16) | 0x40 : rounded);
}

FM_INLINE float f16_to_float(uint16_t b) {
    uint32_t magnitude = (uint32_t)(b & 0x7fff) << 13, sign = (uint32_t)(b & 0x8000) << 16;
    /* the exponent's bias differs by 112; the multiplication also makes subnormals right */
    float x = fm_float_from_bits(magnitude) * 0x1p112f;
    uint32_t bits = bits_from_float(x) | (magnitude >= 0x0f800000 ? 0x7f800000u : 0);
    return fm_float_from_bits(bits | sign);
}

FM_INLINE uint16_t f16_from_float(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits = bits_from_float(x), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    uint32_t normal = (bits - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
    /* below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded by the adder */
    uint32_t subnormal = bits_from_float(fm_float_from_bits(bits) + 0.5f) - 0x3f000000;
    uint32_t half = bits < 0x38800000 ? subnormal : normal;
    half = bits >= 0x477ff000 ? 0x7c00 : half;
    half = bits > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(half | sign);
}

/* --- load, store and round ------------------------------------------------------------------------------ */

#define CONVERSIONS(name, elem_t, to_accum, from_accum)                                                      \
    FM_ROW_FN void load_##name(void *accum_, const void *elem_, int64_t n) {                                 \
        float *restrict r = accum_;                                                                          \
        const elem_t *restrict e = elem_;                                                                    \
        for (int64_t i = 0; i < n; i++) r[i] = to_accum(e[i]);                                               \
    }                                                                                                        \
    FM_ROW_FN void store_##name(void *elem_, const void *accum_, int64_t n) {                                \
        elem_t *restrict e = elem_;                                                                          \
        const float *restrict r = accum_;                                                                    \
        for (int64_t i = 0; i < n; i++) e[i] = from_accum(r[i]);                                             \
    }                                                                                                        \
    FM_ROW_FN void round_##name(void *accum_, int64_t n) {                                                   \
        float *r = accum_;                                                                                   \
        for (int64_t i = 0; i < n; i++) r[i] = to_accum(from_accum(r[i]));                                   \
    }

CONVERSIONS(bf16, uint16_t, bf16_to_float, bf16_from_float)
CONVERSIONS(f16, uint16_t, f16_to_float, f16_from_float)

static void leave(void *accum, int64_t n) {
    (void)accum, (void)n;
}

static void copy_float(void *dst, const void *src, int64_t n) {
    fm_copy(dst, src, n * (int64_t)sizeof(float));
}

static void copy_double(void *dst, const void *src, int64_t n) {
    fm_copy(dst, src, n * (int64_t)sizeof(double));
}

/* --- arithmetic ----------------------------------------------------------------------------------------- */

#define ACCUM float
#define ACCUM_NAME(x) x##_float
#define ACCUM_EXP(x) exp_float(x)
#define ACCUM_ERF(x) erff(x)
#define ACCUM_TANH(x) tanh_float(x)
#include "rows_accum.h"

#define ACCUM double
#define ACCUM_NAME(x) x##_double
#define ACCUM_EXP(x) exp(x)
#define ACCUM_ERF(x) erf(x)
#define ACCUM_TANH(x) tanh(x)
#include "rows_accum.h"

/* --- tables --------------------------------------------------------------------------------------------- */

#define ROWS(accum, bytes, operand, accum_elements, load_fn, store_fn, round_fn)                             \
    {.elem_bytes = bytes,                                                                                    \
     .accum_bytes = sizeof(accum),                                                                           \
     .operand_bytes = operand,                                                                               \
     .is_accum = accum_elements,                                                                             \
     .load = load_fn,                                                                                        \
     .store = store_fn,                                                                                      \
     .round = round_fn,                                                                                      \
     .add = add_##accum,                                                                                     \
     .axpy = axpy_##accum,                                                                                   \
     .sum = sum_##accum,                                                                                     \
     .scale = scale_##accum,                                                                                 \
     .dot = dot_##accum,                                                                                     \
     .split = split_##accum,                                                                                 \
     .merge = merge_##accum,                                                                                 \
     .act = act_##accum,                                                                                     \
     .dact = dact_##accum,                                                                                   \
     .get = get_##accum,                                                                                     \
     .set = set_##accum}

const FmRows *fm_rows(FusedMoeDtype dtype) {
    static const FmRows table[] = {
        [FUSED_MOE_F32] = ROWS(float, 4, 4, true, copy_float, copy_float, leave),
        [FUSED_MOE_F64] = ROWS(double, 8, 8, true, copy_double, copy_double, leave),
        [FUSED_MOE_F16] = ROWS(float, 2, 4, false, load_f16, store_f16, round_f16),
        [FUSED_MOE_BF16] = ROWS(float, 2, 4, false, load_bf16, store_bf16, round_bf16),
    };
    static const FmRows bf16_operands = ROWS(float, 2, 2, false, load_bf16, store_bf16, round_bf16);
    if (dtype == FUSED_MOE_BF16 && fm_has_bf16_gemm()) return &bf16_operands;
    return dtype <= FUSED_MOE_BF16 ? &table[dtype] : NULL;
}

const FmRows *fm_accum_rows(const FmRows *v) {
    return fm_rows(v->accum_bytes == sizeof(double) ? FUSED_MOE_F64 : FUSED_MOE_F32);
}
