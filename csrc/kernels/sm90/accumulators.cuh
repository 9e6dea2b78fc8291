/* What an epilogue does to accumulators before a writer stores them: biases and rows are added, pairs are
 * rounded. wgmma.cuh says which accumulators a thread has. */
#pragma once

#include "wgmma.cuh"

namespace fused_moe {
namespace sm90 {

/* Two accumulators as one word of T. */
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    uint32_t word;
    from_accums<T>(reinterpret_cast<T *>(&word), low, high);
    return word;
}

/* 64 columns of accumulators as a writer takes them. */
template <typename T>
__device__ inline void pack_subtile(uint32_t (&words)[16], const float *d) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack<T>(d[2 * j], d[2 * j + 1]);
}

/* Adds bias[column] to 64 columns of accumulators, for columns before `end`. Columns come in eights, so a
 * thread's two both exist or neither does. */
template <typename T>
__device__ inline void add_bias(float *d, const T *bias, int first, int end) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int n = first + 8 * j + 2 * (threadIdx.x % 4);
        if (n >= end) return;
        float low, high;
        to_accums(low, high, bias + n);
        d[4 * j] += low, d[4 * j + 1] += high, d[4 * j + 2] += low, d[4 * j + 3] += high;
    }
}

/* The same for 16 columns of swapped accumulators. */
template <int tokens, typename T>
__device__ inline void add_bias_swapped(float *d, const T *bias, int first, int end) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int n = first + 8 * half + threadIdx.x % 32 / 4;
        if (n >= end) return;
        float b = to_accum(bias[n]);
#pragma unroll
        for (int j = 0; j < tokens / 8; j++) d[4 * j + 2 * half] += b, d[4 * j + 2 * half + 1] += b;
    }
}

/* Adds rows of `pitch` elements to 64 columns of a warp's 16 rows, of which `rows` exist. addend is at the
 * first row and column; `columns` exist, in eights. */
template <typename T>
__device__ inline void add_rows(float *d, const T *addend, int64_t pitch, int rows, int columns) {
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    addend += row * pitch + column;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (8 * j >= columns) return;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half >= rows) continue;
            float low, high;
            to_accums(low, high, addend + 8 * half * pitch + 8 * j);
            d[4 * j + 2 * half] += low, d[4 * j + 2 * half + 1] += high;
        }
    }
}

/* The same for 16 columns of swapped accumulators. */
template <int tokens, typename T>
__device__ inline void add_rows_swapped(float *d, const T *addend, int64_t pitch, int rows, int columns) {
    int column = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
    addend += row * pitch + column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (8 * half >= columns) return;
#pragma unroll
        for (int j = 0; j < tokens / 4; j++) /* rows 8 (j / 2) + row + j % 2 */
            if (row + j / 2 * 8 + j % 2 < rows)
                d[j / 2 * 4 + 2 * half + j % 2] += to_accum(addend[(j / 2 * 8 + j % 2) * pitch + 8 * half]);
    }
}

} // namespace sm90
} // namespace fused_moe
