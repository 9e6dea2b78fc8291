/* The formulas of activation.h on the device, in float and in double, for chunks of hidden columns. */
#pragma once

#include "../fused_moe.h"
#include "numeric.cuh"

namespace fused_moe {

#define accum_t float
#define ACT_NAME(x) x##_f32
#define ACT_FN __device__ inline
#define ACT_EXP expf
#define ACT_CDF normcdff
#define ACT_SIGMOID(x) (1 / (1 + expf(-(x))))
#include "../activation.h"

/* For 16-bit dtypes: fast exponentials and quotients err by some units of float, which rounding hides. */
__device__ inline float exp_half(float x) {
    return ex2_approx_ftz(1.44269504f * x);
}

#define accum_t float
#define ACT_NAME(x) x##_half
#define ACT_FN __device__ inline
#define ACT_EXP exp_half
#define ACT_CDF(x) (0.5f + 0.5f * erff((x) * 0.70710678f))
#define ACT_SIGMOID(x) rcp_approx_ftz(1.0f + exp_half(-(x)))
#include "../activation.h"

#define accum_t double
#define ACT_NAME(x) x##_f64
#define ACT_FN __device__ inline
#define ACT_EXP exp
#define ACT_CDF normcdf
#define ACT_SIGMOID(x) (1 / (1 + exp(-(x))))
#include "../activation.h"

/* Both functions of an activation, in the arithmetic of dtype T. */
template <int kind, typename T>
struct Act;
#define ACT(T, suffix, gate_fn, up_fn)                                                             \
    template <>                                                                                    \
    struct Act<FUSED_MOE_ACT_##gate_fn, T> {                                                       \
        using R = Accum<T>;                                                                        \
        static __device__ auto gate(R x, R alpha, R limit) {                                       \
            return gate_fn##suffix(x, alpha, limit);                                               \
        }                                                                                          \
        static __device__ auto up(R x, R limit) { return up_fn##suffix(x, limit); }                \
    };
#define X(gate_fn, up_fn)                                                                          \
    ACT(float, _f32, gate_fn, up_fn)                                                               \
    ACT(double, _f64, gate_fn, up_fn)                                                              \
    ACT(__half, _half, gate_fn, up_fn)                                                             \
    ACT(__nv_bfloat16, _half, gate_fn, up_fn)
FUSED_MOE_ACTIVATIONS(X)
#undef X
#undef ACT

/* Calls fn(Act<kind, T>()), so that the choice stands outside the loop over a chunk. */
template <typename T, typename Fn>
__device__ inline void with_activation(int kind, Fn fn) {
    switch (kind) {
#define X(gate_fn, up_fn)                                                                          \
    case FUSED_MOE_ACT_##gate_fn: fn(Act<FUSED_MOE_ACT_##gate_fn, T>()); break;
        FUSED_MOE_ACTIVATIONS(X)
#undef X
    }
}

/* A chunk's gate and up, and where they lie in a row of h: gate | up, or gate0, up0, ... */
template <typename R>
struct Pair {
    R gate[CHUNK], up[CHUNK];
};

/* The chunk at hidden column j of a row of h as it lies there, so that it can be loaded early in few
 * registers: the gates and the ups, or the first and the second eight of interleaved pairs. n columns exist. */
template <typename T>
struct PackedPair {
    Pack<T> low, high;

    __device__ void load(FusedMoeLayout layout, const T *h, int F, int j, int n, bool aligned) {
        bool interleaved = layout == FUSED_MOE_INTERLEAVED;
        const T *first = h + (interleaved ? 2 * j : j);
        load_pack(low, first, interleaved ? 2 * n : n, aligned);
        if (interleaved)
            load_pack(high, first + CHUNK, 2 * n - CHUNK, aligned);
        else if (layout != FUSED_MOE_UNGATED)
            load_pack(high, first + F, n, aligned);
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
__device__ inline void load_pair(Pair<Accum<T>> &q, FusedMoeLayout layout, const T *h, int F, int j,
                                 int n, bool aligned) {
    PackedPair<T> packed;
    packed.load(layout, h, F, j, n, aligned);
    packed.unpack(q, layout);
}

template <typename T>
__device__ inline void store_pair(T *h, const Pair<Accum<T>> &q, FusedMoeLayout layout, int F,
                                  int j, int n, bool aligned) {
    if (layout == FUSED_MOE_INTERLEAVED) {
        Accum<T> low[CHUNK], high[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            low[2 * i] = q.gate[i], low[2 * i + 1] = q.up[i];
            high[2 * i] = q.gate[i + CHUNK / 2], high[2 * i + 1] = q.up[i + CHUNK / 2];
        }
        store_chunk<T>(h + 2 * j, low, 2 * n, aligned);
        store_chunk<T>(h + 2 * j + CHUNK, high, 2 * n - CHUNK, aligned);
    } else {
        store_chunk<T>(h + j, q.gate, n, aligned);
        if (layout != FUSED_MOE_UNGATED) store_chunk<T>(h + F + j, q.up, n, aligned);
    }
}

/* a = f(gate) m(up), or f(gate) */
template <typename T, typename R = Accum<T>>
__device__ inline void activate(R (&a)[CHUNK], const Pair<R> &q, const FusedMoeActivation &f,
                                bool gated) {
    with_activation<T>(f.kind, [&](auto act) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            a[i] = act.gate(q.gate[i], (R)f.alpha, (R)f.limit).value;
            if (gated) a[i] *= act.up(q.up[i], (R)f.limit).value;
        }
    });
}

/* a as above, and the gradients of gate and up from da. */
template <typename T, typename Act, typename R = Accum<T>>
__device__ inline void activate_backward(Act act, R (&a)[CHUNK], Pair<R> &d, const R (&da)[CHUNK],
                                         const Pair<R> &q, R alpha, R limit, bool gated) {
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        auto g = act.gate(q.gate[i], alpha, limit);
        if (gated) {
            auto u = act.up(q.up[i], limit);
            a[i] = g.value * u.value;
            d.gate[i] = da[i] * u.value * g.derivative;
            d.up[i] = da[i] * g.value * u.derivative;
        } else {
            a[i] = g.value;
            d.gate[i] = da[i] * g.derivative;
        }
    }
}

template <typename T, typename R = Accum<T>>
__device__ inline void activate_backward(R (&a)[CHUNK], Pair<R> &d, const R (&da)[CHUNK],
                                         const Pair<R> &q, const FusedMoeActivation &f,
                                         bool gated) {
    with_activation<T>(f.kind, [&](auto act) {
        activate_backward<T>(act, a, d, da, q, (R)f.alpha, (R)f.limit, gated);
    });
}

} // namespace fused_moe
