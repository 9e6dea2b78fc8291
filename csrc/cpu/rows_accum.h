/* Row arithmetic in one accumulation type; rows.c includes this for float and for double. */

FM_ROW_FN void ACCUM_NAME(add)(void *y_, const void *x_, int64_t n) {
    ACCUM *restrict y = y_;
    const ACCUM *restrict x = x_;
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

FM_ROW_FN void ACCUM_NAME(axpy)(void *y_, double s_, const void *x_, int64_t n) {
    ACCUM *restrict y = y_;
    const ACCUM *restrict x = x_;
    ACCUM s = (ACCUM)s_;
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

/* For sums as long as an expert's rows, whose rounding would grow with their number. */
FM_ROW_FN void ACCUM_NAME(sum)(double *restrict y, double s, const void *x_, int64_t n) {
    const ACCUM *restrict x = x_;
    for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

FM_ROW_FN void ACCUM_NAME(scale)(void *y_, double s_, const void *x_, int64_t n) {
    ACCUM *y = y_;
    const ACCUM *x = x_;
    ACCUM s = (ACCUM)s_;
    for (int64_t i = 0; i < n; i++) y[i] = s * x[i];
}

/* In double, because a score's gradient is one such sum; sixteen of them, so that the loop vectorises. */
FM_ROW_FN double ACCUM_NAME(dot)(const void *x_, const void *y_, int64_t n) {
    const ACCUM *x = x_, *y = y_;
    double lane[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int l = 0; l < 16; l++) lane[l] += (double)x[i + l] * y[i + l];
    for (int l = 0; i < n; i++, l++) lane[l] += (double)x[i] * y[i];
    for (int l = 0; l < 16; l++) sum += lane[l];
    return sum;
}

FM_ROW_FN void ACCUM_NAME(split)(void *even_, void *odd_, const void *pairs_, int64_t n) {
    ACCUM *restrict even = even_, *restrict odd = odd_;
    const ACCUM *restrict pairs = pairs_;
    for (int64_t i = 0; i < n; i++) even[i] = pairs[2 * i], odd[i] = pairs[2 * i + 1];
}

FM_ROW_FN void ACCUM_NAME(merge)(void *pairs_, const void *even_, const void *odd_, int64_t n) {
    ACCUM *restrict pairs = pairs_;
    const ACCUM *restrict even = even_, *restrict odd = odd_;
    for (int64_t i = 0; i < n; i++) pairs[2 * i] = even[i], pairs[2 * i + 1] = odd[i];
}

typedef struct {
    ACCUM alpha, limit, alpha_inverse, limit_inverse;
} ACCUM_NAME(Constants);

static ACCUM_NAME(Constants) ACCUM_NAME(constants_of)(const FusedMoeActivation *f) {
    return (ACCUM_NAME(Constants)){(ACCUM)f->alpha, (ACCUM)f->limit, (ACCUM)f->alpha_inverse,
                                   (ACCUM)f->limit_inverse};
}

#define accum_t ACCUM
#define constants_t ACCUM_NAME(Constants)
#define ACT_NAME(x) ACCUM_NAME(x)
#define ACT_FN FM_INLINE
#define ACT_EXP ACCUM_EXP
#define ACT_CDF(x) ((ACCUM)0.5 * (1 + ACCUM_ERF((x) * (ACCUM)0.70710678118654752440)))
#define ACT_SIGMOID(x) (1 / (1 + ACCUM_EXP(-(x))))
#define ACT_TANH(x, r) ACCUM_TANH(x)
#include "../activation.h"

/* One pair of loops per activation, so that each vectorises. */
#define X(gate_fn, up_fn)                                                                                    \
    FM_ROW_FN void ACCUM_NAME(act_##gate_fn)(ACCUM_NAME(Constants) c, ACCUM *restrict a,                     \
                                             const ACCUM *restrict gate, const ACCUM *restrict up,           \
                                             int64_t n) {                                                    \
        if (!up)                                                                                             \
            for (int64_t i = 0; i < n; i++) a[i] = ACCUM_NAME(gate_fn)(gate[i], c).value;                    \
        else                                                                                                 \
            for (int64_t i = 0; i < n; i++)                                                                  \
                a[i] = ACCUM_NAME(gate_fn)(gate[i], c).value * ACCUM_NAME(up_fn)(up[i], c).value;            \
    }                                                                                                        \
    FM_ROW_FN void ACCUM_NAME(dact_##gate_fn)(                                                               \
        ACCUM_NAME(Constants) c, ACCUM *restrict dgate, ACCUM *restrict dup, ACCUM *restrict a,              \
        const ACCUM *restrict da, const ACCUM *restrict gate, const ACCUM *restrict up, int64_t n) {         \
        if (!up)                                                                                             \
            for (int64_t i = 0; i < n; i++) {                                                                \
                ACCUM_NAME(Point) f = ACCUM_NAME(gate_fn)(gate[i], c);                                       \
                dgate[i] = ACCUM_NAME(chain)(da[i], f);                                                      \
                a[i] = f.value;                                                                              \
            }                                                                                                \
        else                                                                                                 \
            for (int64_t i = 0; i < n; i++) {                                                                \
                ACCUM_NAME(Point) f = ACCUM_NAME(gate_fn)(gate[i], c);                                       \
                ACCUM_NAME(Point) m = ACCUM_NAME(up_fn)(up[i], c);                                           \
                dgate[i] = ACCUM_NAME(chain)(da[i] * m.value, f);                                            \
                dup[i] = ACCUM_NAME(chain)(da[i] * f.value, m);                                              \
                a[i] = f.value * m.value;                                                                    \
            }                                                                                                \
    }
FUSED_MOE_ACTIVATIONS(X)
#undef X

static void ACCUM_NAME(act)(const FusedMoeActivation *f, void *a, const void *gate, const void *up,
                            int64_t n) {
    switch (f->kind) {
#define X(gate_fn, up_fn)                                                                                    \
    case FUSED_MOE_ACT_##gate_fn:                                                                            \
        ACCUM_NAME(act_##gate_fn)(ACCUM_NAME(constants_of)(f), a, gate, up, n);                              \
        break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

static void ACCUM_NAME(dact)(const FusedMoeActivation *f, void *dgate, void *dup, void *a, const void *da,
                             const void *gate, const void *up, int64_t n) {
    switch (f->kind) {
#define X(gate_fn, up_fn)                                                                                    \
    case FUSED_MOE_ACT_##gate_fn:                                                                            \
        ACCUM_NAME(dact_##gate_fn)(ACCUM_NAME(constants_of)(f), dgate, dup, a, da, gate, up, n);             \
        break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

static double ACCUM_NAME(get)(const void *accum_, int64_t i) {
    return ((const ACCUM *)accum_)[i];
}

static void ACCUM_NAME(set)(void *accum_, int64_t i, double value) {
    ((ACCUM *)accum_)[i] = (ACCUM)value;
}

#undef ACCUM
#undef ACCUM_NAME
#undef ACCUM_EXP
#undef ACCUM_ERF
#undef ACCUM_TANH
