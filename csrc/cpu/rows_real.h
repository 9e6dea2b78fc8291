/* Row arithmetic in one real type; rows.c includes this for float and for double. */

ROW_FN void REAL_NAME(add)(void *y_, const void *x_, int64_t n) {
    REAL *restrict y = y_;
    const REAL *restrict x = x_;
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

ROW_FN void REAL_NAME(axpy)(void *y_, double s_, const void *x_, int64_t n) {
    REAL *restrict y = y_;
    const REAL *restrict x = x_;
    REAL s = (REAL)s_;
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

/* For sums as long as an expert's rows, whose rounding would grow with their number. */
ROW_FN void REAL_NAME(sum)(double *restrict y, double s, const void *x_, int64_t n) {
    const REAL *restrict x = x_;
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

ROW_FN void REAL_NAME(scale)(void *y_, double s_, const void *x_, int64_t n) {
    REAL *y = y_;
    const REAL *x = x_;
    REAL s = (REAL)s_;
    for (int64_t i = 0; i < n; i++) y[i] = s * x[i];
}

/* In double, because a score's gradient is one such sum; sixteen of them, so that the loop vectorises. */
ROW_FN double REAL_NAME(dot)(const void *x_, const void *y_, int64_t n) {
    const REAL *x = x_, *y = y_;
    double lane[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) lane[l] += (double)x[i + l] * y[i + l];
    for (int l = 0; i < n; i++, l++) lane[l] += (double)x[i] * y[i];
    for (int l = 0; l < 16; l++) sum += lane[l];
    return sum;
}

ROW_FN void REAL_NAME(split)(void *even_, void *odd_, const void *pairs_, int64_t n) {
    REAL *restrict even = even_, *restrict odd = odd_;
    const REAL *restrict pairs = pairs_;
    for (int64_t i = 0; i < n; i++) even[i] = pairs[2 * i], odd[i] = pairs[2 * i + 1];
}

ROW_FN void REAL_NAME(merge)(void *pairs_, const void *even_, const void *odd_, int64_t n) {
    REAL *restrict pairs = pairs_;
    const REAL *restrict even = even_, *restrict odd = odd_;
    for (int64_t i = 0; i < n; i++) pairs[2 * i] = even[i], pairs[2 * i + 1] = odd[i];
}

#define accum_t REAL
#define ACT_NAME(x) REAL_NAME(x)
#define ACT_FN INLINE
#define ACT_EXP REAL_EXP
#define ACT_CDF(x) ((REAL)0.5 * (1 + REAL_ERF((x) * (REAL)0.70710678118654752440)))
#define ACT_SIGMOID(x) (1 / (1 + REAL_EXP(-(x))))
#include "../activation.h"

/* One pair of loops an activation, so that each vectorises. */
#define X(gate_fn, up_fn)                                                                          \
    ROW_FN void REAL_NAME(act_##gate_fn)(REAL alpha, REAL limit, REAL *restrict a,                 \
                                         const REAL *restrict gate, const REAL *restrict up,       \
                                         int64_t n) {                                              \
        if (!up)                                                                                   \
            for (int64_t i = 0; i < n; i++)                                                        \
                a[i] = REAL_NAME(gate_fn)(gate[i], alpha, limit).value;                            \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++)                                                        \
                a[i] = REAL_NAME(gate_fn)(gate[i], alpha, limit).value *                           \
                       REAL_NAME(up_fn)(up[i], limit).value;                                       \
    }                                                                                              \
    ROW_FN void REAL_NAME(dact_##gate_fn)(                                                         \
        REAL alpha, REAL limit, REAL *restrict dgate, REAL *restrict dup, REAL *restrict a,        \
        const REAL *restrict da, const REAL *restrict gate, const REAL *restrict up, int64_t n) {  \
        if (!up)                                                                                   \
            for (int64_t i = 0; i < n; i++) {                                                      \
                REAL_NAME(Point) f = REAL_NAME(gate_fn)(gate[i], alpha, limit);                    \
                dgate[i] = da[i] * f.derivative;                                                   \
                a[i] = f.value;                                                                    \
            }                                                                                      \
        else                                                                                       \
            for (int64_t i = 0; i < n; i++) {                                                      \
                REAL_NAME(Point) f = REAL_NAME(gate_fn)(gate[i], alpha, limit);                    \
                REAL_NAME(Point) m = REAL_NAME(up_fn)(up[i], limit);                               \
                dgate[i] = da[i] * m.value * f.derivative;                                         \
                dup[i] = da[i] * f.value * m.derivative;                                           \
                a[i] = f.value * m.value;                                                          \
            }                                                                                      \
    }
FUSED_MOE_ACTIVATIONS(X)
#undef X

static void REAL_NAME(act)(const FusedMoeActivation *f, void *a, const void *gate, const void *up,
                           int64_t n) {
    switch (f->kind) {
#define X(gate_fn, up_fn)                                                                          \
    case FUSED_MOE_ACT_##gate_fn:                                                                  \
        REAL_NAME(act_##gate_fn)((REAL)f->alpha, (REAL)f->limit, a, gate, up, n);                  \
        break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

static void REAL_NAME(dact)(const FusedMoeActivation *f, void *dgate, void *dup, void *a,
                            const void *da, const void *gate, const void *up, int64_t n) {
    switch (f->kind) {
#define X(gate_fn, up_fn)                                                                          \
    case FUSED_MOE_ACT_##gate_fn:                                                                  \
        REAL_NAME(dact_##gate_fn)((REAL)f->alpha, (REAL)f->limit, dgate, dup, a, da, gate, up, n); \
        break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

static double REAL_NAME(get)(const void *real_, int64_t i) {
    return ((const REAL *)real_)[i];
}

static void REAL_NAME(set)(void *real_, int64_t i, double value) {
    ((REAL *)real_)[i] = (REAL)value;
}

#undef REAL
#undef REAL_NAME
#undef REAL_EXP
#undef REAL_ERF
