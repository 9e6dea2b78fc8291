/* The four dtypes, and chunks of eight elements that are loaded and stored together.
 *
 * Accum<T> is the type of accumulators and scores: float, and double for double. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../../fused_moe.h"
#include "ptx.cuh"

namespace fused_moe {

template <typename T>
struct AccumOf {
    using type = float;
};
template <>
struct AccumOf<double> {
    using type = double;
};
template <typename T>
using Accum = typename AccumOf<T>::type;

template <typename T>
constexpr bool is_half = sizeof(T) == 2;

__device__ inline float to_accum(float x) {
    return x;
}
__device__ inline double to_accum(double x) {
    return x;
}
__device__ inline float to_accum(__half x) {
    return __half2float(x);
}
__device__ inline float to_accum(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

template <typename T>
__device__ inline T from_accum(Accum<T> x);
template <>
__device__ inline float from_accum<float>(float x) {
    return x;
}
template <>
__device__ inline double from_accum<double>(double x) {
    return x;
}
template <>
__device__ inline __half from_accum<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_accum<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

/* --- chunks: eight consecutive elements; 16-byte accesses where `aligned` ------------------------------- */

constexpr int CHUNK = 8;

/* A chunk. It is copied word by word: otherwise nvcc stores 16-bit elements one at a time. */
template <typename T>
union alignas(16) Pack {
    uint4 words[CHUNK * sizeof(T) / sizeof(uint4)];
    T v[CHUNK];
};

/* Whether rows of `width` elements consist of full chunks, each 16-byte aligned. */
template <typename T>
__host__ __device__ inline bool rows_are_aligned(const void *data, int64_t width) {
    return (uintptr_t)data % 16 == 0 && width % CHUNK == 0;
}

/* Elements 0 and 1 in the accumulation type. 16-bit elements are read as one word. */
template <typename T>
__device__ inline void to_accums(Accum<T> &low, Accum<T> &high, const T *p) {
    low = to_accum(p[0]), high = to_accum(p[1]);
}
template <>
__device__ inline void to_accums(float &low, float &high, const __half *p) {
    float2 v = __half22float2(*reinterpret_cast<const __half2 *>(p));
    low = v.x, high = v.y;
}
template <>
__device__ inline void to_accums(float &low, float &high, const __nv_bfloat16 *p) {
    float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(p));
    low = v.x, high = v.y;
}

/* The reverse: one instruction converts both. */
template <typename T>
__device__ inline void from_accums(T *p, Accum<T> low, Accum<T> high) {
    p[0] = from_accum<T>(low), p[1] = from_accum<T>(high);
}
template <>
__device__ inline void from_accums(__half *p, float low, float high) {
    *reinterpret_cast<__half2 *>(p) = __floats2half2_rn(low, high);
}
template <>
__device__ inline void from_accums(__nv_bfloat16 *p, float low, float high) {
    *reinterpret_cast<__nv_bfloat162 *>(p) = __floats2bfloat162_rn(low, high);
}

/* Loads a chunk. n of its elements exist; the others are 0. */
template <typename T>
__device__ inline void load_pack(Pack<T> &pack, const T *p, int n, bool aligned) {
    if (aligned) {
        pack = *reinterpret_cast<const Pack<T> *>(p);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) pack.v[i] = i < n ? p[i] : from_accum<T>(0);
    }
}

template <typename T>
__device__ inline void load_chunk(Accum<T> (&v)[CHUNK], const T *p, int n, bool aligned) {
    Pack<T> pack;
    load_pack(pack, p, n, aligned);
#pragma unroll
    for (int i = 0; i < CHUNK; i += 2) to_accums(v[i], v[i + 1], pack.v + i);
}

template <typename T>
__device__ inline void store_chunk(T *p, const Accum<T> (&v)[CHUNK], int n, bool aligned) {
    if (aligned) {
        Pack<T> pack;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2) from_accums(pack.v + i, v[i], v[i + 1]);
#pragma unroll
        for (int i = 0; i < (int)(sizeof(pack) / sizeof(uint4)); i++)
            st_global_v4((uint4 *)p + i, pack.words[i]);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < n) p[i] = from_accum<T>(v[i]);
    }
}

/* Eight accumulators from 16-byte aligned shared memory. */
template <typename Acc>
__device__ inline void load_accumulators(Acc (&v)[CHUNK], const Acc *staging) {
    Pack<Acc> pack = *reinterpret_cast<const Pack<Acc> *>(staging);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) v[i] = pack.v[i];
}

/* --- warps ---------------------------------------------------------------------------------------------- */

/* The sum over each group of `width` lanes, a power of two. All lanes of the group get it. */
template <typename T>
__device__ inline T warp_sum(T x, int width = 32) {
    for (int mask = width / 2; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

/* --- host ----------------------------------------------------------------------------------------------- */

/* Calls fn with an element of the dtype. */
template <typename Fn>
int with_dtype(FusedMoeDtype dtype, Fn fn) {
    switch (dtype) {
    case FUSED_MOE_F32: return fn(float());
    case FUSED_MOE_F64: return fn(double());
    case FUSED_MOE_F16: return fn(__half());
    case FUSED_MOE_BF16: return fn(__nv_bfloat16());
    default: return FUSED_MOE_UNSUPPORTED_DTYPE;
    }
}

} // namespace fused_moe
