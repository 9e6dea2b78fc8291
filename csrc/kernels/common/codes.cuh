/* Chunks of 16-bit elements as floats, and floats as words of e4m3 codes. */
#pragma once

#include <cuda_fp8.h>
#include <type_traits>

#include "numeric.cuh"

namespace fused_moe {

template <typename T>
__device__ inline void widen(float (&v)[CHUNK], const uint4 &vector) {
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) {
        if constexpr (std::is_same_v<T, __nv_bfloat16>) { /* the intrinsic takes three instructions */
            v[j] = __uint_as_float(words[j / 2] << 16);
            v[j + 1] = __uint_as_float(words[j / 2] & 0xffff0000);
        } else {
            to_accums<T>(v[j], v[j + 1], (const T *)&words[j / 2]);
        }
    }
}

__device__ inline uint32_t word_of_e4m3(float v0, float v1, float v2, float v3) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2({v0, v1}, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({v2, v3}, __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

/* The words of a chunk times a factor. */
__device__ inline uint2 chunk_of_e4m3(const float (&v)[CHUNK], float factor) {
    return {word_of_e4m3(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor),
            word_of_e4m3(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor)};
}

} // namespace fused_moe
