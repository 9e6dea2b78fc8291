/* The activations of activation.h in device code, and the chunks of h that they take. */
#pragma once

#include "../../fused_moe.h"
#include "numeric.cuh"

namespace fused_moe {

/* An activation's constants in an accumulation type. */
template <typename Acc>
struct ActConstants {
    Acc alpha, limit, alpha_inverse, limit_inverse;
};

template <typename Acc>
__host__ __device__ inline ActConstants<Acc> act_constants(const FusedMoeActivation &f) {
    return {(Acc)f.alpha, (Acc)f.limit, (Acc)f.alpha_inverse, (Acc)f.limit_inverse};
}

#define accum_t float
#define constants_t const ActConstants<float> &
#define ACT_NAME(x) x##_f32
#define ACT_FN __device__ inline
#define ACT_EXP expf
#define ACT_CDF normcdff
#define ACT_SIGMOID(x) (1 / (1 + expf(-(x))))
#define ACT_TANH(x, r) tanhf(x)
#include "../../activation.h"

/* 16-bit dtypes use approximate instructions: their error of a few float ulps is far below the rounding of
 * the result. */
__device__ inline float exp_half(float x) {
    return ex2_approx_ftz(1.44269504f * x);
}

/* The value is 1 - 2 r with the sign of x, where r is 1 / (1 + exp(2 |x|)). Near 0, where the subtraction
 * cancels, it is two terms of the series. Relative error: 6e-6. */
__device__ inline float tanh_half(float x, float r) {
    return fabsf(x) < 0.06f ? x - x * x * (x * 0.33333333f) : copysignf(fmaf(-2, r, 1), x);
}

#define accum_t float
#define constants_t const ActConstants<float> &
#define ACT_NAME(x) x##_half
#define ACT_FN __device__ inline
#define ACT_EXP exp_half
#define ACT_CDF(x) (0.5f + 0.5f * erff((x) * 0.70710678f))
#define ACT_SIGMOID(x) rcp_approx_ftz(1.0f + exp_half(-(x)))
#define ACT_TANH(x, r) tanh_half(x, r)
#include "../../activation.h"

#define accum_t double
#define constants_t const ActConstants<double> &
#define ACT_NAME(x) x##_f64
#define ACT_FN __device__ inline
#define ACT_EXP exp
#define ACT_CDF normcdf
#define ACT_SIGMOID(x) (1 / (1 + exp(-(x))))
#define ACT_TANH(x, r) tanh(x)
#include "../../activation.h"

/* The gate and up functions of an activation, and their chain rule, for dtype T. */
template <int kind, typename T>
struct Act;
#define ACT(T, suffix, gate_fn, up_fn)                                                                       \
    template <>                                                                                              \
    struct Act<FUSED_MOE_ACT_##gate_fn, T> {                                                                 \
        using Acc = Accum<T>;                                                                                \
        static __device__ auto gate(Acc x, const ActConstants<Acc> &c) { return gate_fn##suffix(x, c); }     \
        static __device__ auto up(Acc x, const ActConstants<Acc> &c) { return up_fn##suffix(x, c); }         \
        static __device__ Acc chain(Acc d, Point##suffix p) { return chain##suffix(d, p); }                  \
    };
#define X(gate_fn, up_fn)                                                                                    \
    ACT(float, _f32, gate_fn, up_fn)                                                                         \
    ACT(double, _f64, gate_fn, up_fn)                                                                        \
    ACT(__half, _half, gate_fn, up_fn)                                                                       \
    ACT(__nv_bfloat16, _half, gate_fn, up_fn)
FUSED_MOE_ACTIVATIONS(X)
#undef X
#undef ACT

/* Calls fn(Act<kind, T>()): the switch is outside the loop over a chunk. */
template <typename T, typename Fn>
__device__ inline void with_activation(int kind, Fn fn) {
    switch (kind) {
#define X(gate_fn, up_fn)                                                                                    \
    case FUSED_MOE_ACT_##gate_fn: fn(Act<FUSED_MOE_ACT_##gate_fn, T>()); break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

/* Gate and up of one chunk. A row of h has them as gate | up, or interleaved: gate0, up0, ... */
template <typename Acc>
struct Pair {
    Acc gate[CHUNK], up[CHUNK];
};

/* The chunk at hidden column j of a row, in h's dtype: it takes few registers, so it can be prefetched. gates
 * is the row's first gate, or its first interleaved pair, and ups its first up, in a row of h F columns
 * later. low and high are the gates and the ups, or elements 0-7 and 8-15 of the interleaved pairs. n hidden
 * columns exist. */
template <typename T>
struct PackedPair {
    Pack<T> low, high;

    __device__ void load(FusedMoeLayout layout, const T *gates, const T *ups, int j, int n, bool aligned) {
        bool interleaved = layout == FUSED_MOE_INTERLEAVED;
        const T *first = gates + (interleaved ? 2 * j : j);
        load_pack(low, first, interleaved ? 2 * n : n, aligned);
        if (interleaved)
            load_pack(high, first + CHUNK, 2 * n - CHUNK, aligned);
        else if (layout != FUSED_MOE_UNGATED)
            load_pack(high, ups + j, n, aligned);
    }

    __device__ void unpack(Pair<Accum<T>> &q, FusedMoeLayout layout) const {
        if (layout == FUSED_MOE_INTERLEAVED) {
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                to_accums(q.gate[i], q.up[i], (i < CHUNK / 2 ? low : high).v + 2 * i % CHUNK);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; i += 2) {
                to_accums(q.gate[i], q.gate[i + 1], low.v + i);
                to_accums(q.up[i], q.up[i + 1], high.v + i);
            }
        }
    }
};

template <typename T>
__device__ inline void load_pair(Pair<Accum<T>> &q, FusedMoeLayout layout, const T *gates, const T *ups,
                                 int j, int n, bool aligned) {
    PackedPair<T> packed;
    packed.load(layout, gates, ups, j, n, aligned);
    packed.unpack(q, layout);
}

template <typename T>
__device__ inline void store_pair(T *gates, T *ups, const Pair<Accum<T>> &q, FusedMoeLayout layout, int j,
                                  int n, bool aligned) {
    if (layout == FUSED_MOE_INTERLEAVED) {
        Accum<T> low[CHUNK], high[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            low[2 * i] = q.gate[i], low[2 * i + 1] = q.up[i];
            high[2 * i] = q.gate[i + CHUNK / 2], high[2 * i + 1] = q.up[i + CHUNK / 2];
        }
        store_chunk<T>(gates + 2 * j, low, 2 * n, aligned);
        store_chunk<T>(gates + 2 * j + CHUNK, high, 2 * n - CHUNK, aligned);
    } else {
        store_chunk<T>(gates + j, q.gate, n, aligned);
        if (layout != FUSED_MOE_UNGATED) store_chunk<T>(ups + j, q.up, n, aligned);
    }
}

/* a = f(gate) m(up), or f(gate) where ungated. */
template <typename T, typename Acc = Accum<T>>
__device__ inline void activate(Acc (&a)[CHUNK], const Pair<Acc> &q, const FusedMoeActivation &f,
                                bool gated) {
    ActConstants<Acc> c = act_constants<Acc>(f);
    with_activation<T>(f.kind, [&](auto act) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            a[i] = act.gate(q.gate[i], c).value;
            if (gated) a[i] *= act.up(q.up[i], c).value;
        }
    });
}

/* a again, and d: the gradients of gate and up, given da. */
template <typename T, typename Act, typename Acc = Accum<T>>
__device__ inline void activate_backward(Act act, Acc (&a)[CHUNK], Pair<Acc> &d, const Acc (&da)[CHUNK],
                                         const Pair<Acc> &q, const ActConstants<Acc> &c, bool gated) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        auto g = act.gate(q.gate[i], c);
        if (gated) {
            auto u = act.up(q.up[i], c);
            a[i] = g.value * u.value;
            d.gate[i] = act.chain(da[i] * u.value, g);
            d.up[i] = act.chain(da[i] * g.value, u);
        } else {
            a[i] = g.value;
            d.gate[i] = act.chain(da[i], g);
        }
    }
}

template <typename T, typename Acc = Accum<T>>
__device__ inline void activate_backward(Acc (&a)[CHUNK], Pair<Acc> &d, const Acc (&da)[CHUNK],
                                         const Pair<Acc> &q, const FusedMoeActivation &f, bool gated) {
    ActConstants<Acc> c = act_constants<Acc>(f);
    with_activation<T>(f.kind, [&](auto act) { activate_backward<T>(act, a, d, da, q, c, gated); });
}

} // namespace fused_moe
