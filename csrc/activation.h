/* Activations and their derivatives, for every tier.
 *
 * A gated expert computes a = f(gate) * m(up), an ungated one a = f(gate). The list names f and m, in the
 * order of ACTIVATIONS in fused_moe/activation.py, which has the same formulas in PyTorch.
 *
 * Included without these macros, the header gives the list alone. Each further inclusion with
 *   accum_t           the accumulation type
 *   constants_t       a struct of that type: alpha, limit, alpha_inverse, limit_inverse
 *   ACT_NAME(x)       x with a suffix for that type
 *   ACT_FN            function qualifiers
 *   ACT_EXP, ACT_CDF  exp, and the standard normal distribution's cumulative function
 *   ACT_SIGMOID       1 / (1 + exp(-x))
 *   ACT_TANH(x, r)    tanh, to a small relative error near 0, too; r is 1 / (1 + exp(2 |x|))
 * defined gives the functions for one accumulation type, and undefines the macros. */
#ifndef FUSED_MOE_ACTIVATION_H
#define FUSED_MOE_ACTIVATION_H

#define FUSED_MOE_ACTIVATIONS(X)                                                                             \
    X(silu, linear)                                                                                          \
    X(gelu, linear)                                                                                          \
    X(gelu_tanh, linear)                                                                                     \
    X(relu, linear)                                                                                          \
    X(swiglu_clamped, clamped_plus_one) /* gpt-oss */                                                        \
    X(swiglu_limited, clamped)          /* DeepSeek-V4 */                                                    \
    X(relu2, linear)                    /* Nemotron */                                                       \
    X(situ, soft_clamped)               /* Kimi K3 */

enum {
#define X(gate, up) FUSED_MOE_ACT_##gate,
    FUSED_MOE_ACTIVATIONS(X)
#undef X
        FUSED_MOE_NUM_ACTIVATIONS
};

#endif

#ifdef accum_t

typedef struct {
    accum_t value, derivative;
    bool flat; /* constant on this side of a kink; clamp is so for NaN, too */
} ACT_NAME(Point);

#define POINT(value, derivative) ((ACT_NAME(Point)){value, derivative, false})
#define KINKED(value, derivative, flat) ((ACT_NAME(Point)){value, derivative, flat})

/* d * derivative, but 0 if flat, even for a NaN d: as PyTorch's relu and clamp. */
ACT_FN accum_t ACT_NAME(chain)(accum_t d, ACT_NAME(Point) p) {
    return p.flat ? 0 : d * p.derivative;
}

ACT_FN ACT_NAME(Point) ACT_NAME(silu)(accum_t x, constants_t c) {
    (void)c;
    accum_t s = ACT_SIGMOID(x);
    return POINT(x * s, s + x * s * (1 - s));
}

ACT_FN ACT_NAME(Point) ACT_NAME(gelu)(accum_t x, constants_t c) {
    (void)c;
    accum_t cdf = ACT_CDF(x);
    accum_t pdf = (accum_t)0.39894228040143267794 * ACT_EXP((accum_t)-0.5 * x * x);
    return POINT(x * cdf, cdf + x * pdf);
}

/* 0.5 (1 + tanh(u)) is sigmoid(2u). rest is 1 - s without cancellation: the derivative multiplies its error
 * by up to 5. */
ACT_FN ACT_NAME(Point) ACT_NAME(gelu_tanh)(accum_t x, constants_t c) {
    (void)c;
    const accum_t two_root = (accum_t)1.59576912160573071176, cubic = (accum_t)0.044715;
    accum_t u = two_root * (x + cubic * x * x * x);
    accum_t s = ACT_SIGMOID(u), rest = ACT_SIGMOID(-u);
    return POINT(x * s, s + x * s * rest * two_root * (1 + 3 * cubic * x * x));
}

ACT_FN ACT_NAME(Point) ACT_NAME(relu)(accum_t x, constants_t c) {
    (void)c;
    return KINKED(x < 0 ? 0 : x, 1, x <= 0);
}

ACT_FN ACT_NAME(Point) ACT_NAME(swiglu_clamped)(accum_t x, constants_t c) {
    accum_t g = x > c.limit ? c.limit : x;
    accum_t s = ACT_SIGMOID(c.alpha * g);
    return KINKED(g * s, s + c.alpha * g * s * (1 - s), !(x <= c.limit));
}

ACT_FN ACT_NAME(Point) ACT_NAME(swiglu_limited)(accum_t x, constants_t c) {
    ACT_NAME(Point) p = ACT_NAME(silu)(x > c.limit ? c.limit : x, c);
    return KINKED(p.value, p.derivative, !(x <= c.limit));
}

ACT_FN ACT_NAME(Point) ACT_NAME(relu2)(accum_t x, constants_t c) {
    (void)c;
    accum_t r = x < 0 ? 0 : x;
    return KINKED(r * r, 2 * r, x <= 0);
}

/* The derivative is 1 - tanh^2 without cancellation. */
ACT_FN ACT_NAME(Point) ACT_NAME(tanh_point)(accum_t x) {
    accum_t r = ACT_SIGMOID(x < 0 ? 2 * x : -2 * x);
    return POINT(ACT_TANH(x, r), 4 * r * (1 - r));
}

/* alpha tanh(x / alpha) sigmoid(x) */
ACT_FN ACT_NAME(Point) ACT_NAME(situ)(accum_t x, constants_t c) {
    ACT_NAME(Point) t = ACT_NAME(tanh_point)(x * c.alpha_inverse);
    accum_t s = ACT_SIGMOID(x), v = c.alpha * t.value;
    return POINT(v * s, s * (t.derivative + v * (1 - s)));
}

ACT_FN ACT_NAME(Point) ACT_NAME(linear)(accum_t x, constants_t c) {
    (void)c;
    return POINT(x, 1);
}

/* Two selections in a row: nested ones become a branch per element on a GPU. */
ACT_FN ACT_NAME(Point) ACT_NAME(clamped)(accum_t x, constants_t c) {
    accum_t u = x > c.limit ? c.limit : x;
    u = u < -c.limit ? -c.limit : u;
    return KINKED(u, 1, !(x <= c.limit && x >= -c.limit));
}

ACT_FN ACT_NAME(Point) ACT_NAME(clamped_plus_one)(accum_t x, constants_t c) {
    ACT_NAME(Point) p = ACT_NAME(clamped)(x, c);
    return KINKED(p.value + 1, 1, p.flat);
}

/* limit tanh(x / limit) */
ACT_FN ACT_NAME(Point) ACT_NAME(soft_clamped)(accum_t x, constants_t c) {
    ACT_NAME(Point) t = ACT_NAME(tanh_point)(x * c.limit_inverse);
    return POINT(c.limit * t.value, t.derivative);
}

#undef POINT
#undef KINKED
#undef accum_t
#undef constants_t
#undef ACT_NAME
#undef ACT_FN
#undef ACT_EXP
#undef ACT_CDF
#undef ACT_SIGMOID
#undef ACT_TANH

#endif
