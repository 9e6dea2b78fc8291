/* The way of a tile's sums out of the registers: as T through a warp's own piece of shared memory, so that no warp
 * waits for another. Whole tiles leave by the copy engine, which clips what lies past the expert's rows and the
 * result's columns; the few rows of a swapped product by ordinary stores. wgmma.cuh says which sums a thread has. */
#pragma once

#include "tensor_map.cuh"

namespace fused_moe {

/* Two sums as one word of T. */
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    uint32_t word;
    from_reals<T>(reinterpret_cast<T *>(&word), low, high);
    return word;
}

/* A consumer warp's stores: 16 rows by 64 columns at a time, through two buffers, by the copy engine. */
class BoxWriter {
    static constexpr int BUFFERS = 2, BUFFER_BYTES = 16 * 128;
    uint32_t buffers;
    int turn = 0;

  public:
    static constexpr int BYTES = BUFFERS * BUFFER_BYTES; /* of shared memory, on 1024 */

    __device__ explicit BoxWriter(uint32_t buffers) : buffers(buffers) {}

    /* words[2j], words[2j + 1]: columns 8 j + 2 (lane % 4) of rows lane / 4 and lane / 4 + 8. */
    __device__ void store(const uint32_t (&words)[16], const CUtensorMap *map, int column,
                          int row) {
        if (threadIdx.x % 32 == 0) cp_async_bulk_wait_group_read<BUFFERS - 1>();
        __syncwarp();
        uint32_t buffer = buffers + turn * BUFFER_BYTES;
        int lane = threadIdx.x % 32, row_of_lane = lane % 16, chunk = lane / 16;
#pragma unroll
        for (int j = 0; j < 4; j++) /* rows 0 to 15 of chunks 2 j and 2 j + 1, swizzled */
            stmatrix_x4(buffer + 128 * row_of_lane + 16 * ((2 * j + chunk) ^ row_of_lane % 8),
                        words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            cp_async_bulk_tensor_store(map, buffer, column, row);
            cp_async_bulk_commit_group();
        }
        turn = (turn + 1) % BUFFERS;
    }

    /* 16 lines of swapped sums, d[4j], d[4j+1]: line lane / 4 of rows 8 j + 2 (lane % 4) and one more, d[4j+2],
     * d[4j+3]: line lane / 4 + 8. To out[row][0 .. lines), row < rows; lines come in eights. */
    template <int tokens, typename T>
    __device__ void store_few(const float *d, T *out, int64_t pitch, int rows, int lines) {
        int lane = threadIdx.x % 32;
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < tokens / 8; j += 2) {
            uint32_t words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) /* matrix i: rows 8 (j + i / 2), lines 8 (i % 2) */
                if (j + i / 2 < tokens / 8)
                    words[i] =
                        pack<T>(d[4 * (j + i / 2) + i % 2 * 2], d[4 * (j + i / 2) + i % 2 * 2 + 1]);
            int row = 8 * (j + lane / 16) + lane % 8, half = lane / 8 % 2;
            stmatrix_x4_trans(buffers + 32 * row + 16 * half, words[0], words[1], words[2],
                              words[3]);
        }
        copy_out<T>(out, pitch, rows, lines, 2);
    }

    /* The same where only every second line counts, which the lanes of even lines hold: 8 columns. */
    template <int tokens, typename T>
    __device__ void store_few_pairs(const float *d, T *out, int64_t pitch, int rows, int columns) {
        int lane = threadIdx.x % 32, row = 2 * (lane % 4);
        if (lane == 0) cp_async_bulk_wait_group_read<0>();
        __syncwarp();
        T *at = (T *)__cvta_shared_to_generic(buffers) + CHUNK * row + lane / 8;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) /* row i % 2 of two, line i / 2 * 8 of sixteen */
                if (lane / 4 % 2 == 0)
                    at[CHUNK * (8 * j + i % 2) + i / 2 * 4] = from_real<T>(d[4 * j + i]);
        copy_out<T>(out, pitch, rows, columns, 1);
    }

    /* Rows of `chunks` 16-byte chunks, one after the other in the first buffer, to global memory. */
    template <typename T>
    __device__ void copy_out(T *out, int64_t pitch, int rows, int columns, int chunks) {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
            int row = i / chunks, column = i % chunks * CHUNK;
            if (column < columns)
                st_global_v4(out + row * pitch + column, ld_shared_v4(buffers + 16 * i));
        }
        __syncwarp();
    }

    __device__ void finish() {
        if (threadIdx.x % 32 == 0) cp_async_bulk_wait_group_read<0>();
    }
};

/* Adds bias[column] to 64 columns of sums, for columns before `end`. Columns come in eights, so the two of a
 * thread are both there or not. */
template <typename T>
__device__ inline void add_bias(float *d, const T *bias, int first, int end) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int n = first + 8 * j + 2 * (threadIdx.x % 4);
        if (n >= end) return;
        float low, high;
        to_reals(low, high, bias + n);
        d[4 * j] += low, d[4 * j + 1] += high, d[4 * j + 2] += low, d[4 * j + 3] += high;
    }
}

/* The same for 16 lines of swapped sums, which come in eights, too. */
template <int tokens, typename T>
__device__ inline void add_bias_few(float *d, const T *bias, int first, int end) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int n = first + 8 * half + threadIdx.x % 32 / 4;
        if (n >= end) return;
        float b = to_real(bias[n]);
#pragma unroll
        for (int j = 0; j < tokens / 8; j++) d[4 * j + 2 * half] += b, d[4 * j + 2 * half + 1] += b;
    }
}

/* 64 columns of sums as BoxWriter takes them. */
template <typename T>
__device__ inline void pack_box(uint32_t (&words)[16], const float *d) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack<T>(d[2 * j], d[2 * j + 1]);
}

} // namespace fused_moe
