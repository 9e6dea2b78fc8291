/* The way of a tile's sums out of the registers: as T through shared memory. Whole tiles leave by the copy engine,
 * which clips what lies past the expert's rows and the result's columns; the few rows of a swapped gemm by
 * ordinary stores. wgmma.cuh says which sums a thread has.
 *
 * The copy engine is slow to take an order while loads queue up before it. Of the two writers that follow from
 * that, a kernel has one: orders as large as can be where nothing but storing is left, and no warp waiting for
 * another where an epilogue computes in between. */
#pragma once

#include "tensor_map.cuh"

namespace fused_moe {

/* Two sums as one word of T. */
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    uint32_t word;
    from_accums<T>(reinterpret_cast<T *>(&word), low, high);
    return word;
}

/* A warp's 16 rows of a box of 64 columns, into the box at `box`, of which they are the rows from `row` on.
 * words[2j], words[2j + 1]: columns 8 j + 2 (lane % 4) of the warp's rows lane / 4 and lane / 4 + 8. */
__device__ inline void fill_subtile(uint32_t box, int row, const uint32_t (&words)[16]) {
    int lane = threadIdx.x % 32, chunk = lane / 16;
    row += lane % 16;
#pragma unroll
    for (int j = 0; j < 4; j++) /* 16 rows of chunks 2 j and 2 j + 1, swizzled */
        stmatrix_x4(box + 128 * row + 16 * ((2 * j + chunk) ^ row % 8), words[4 * j],
                    words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
}

/* What both writers have: a warp's slice of its warpgroup's shared memory, and the way of few rows. */
class Writer {
  protected:
    uint32_t warpgroup_buffer;
    int warp; /* of the warpgroup's four */

    __device__ Writer(uint32_t warpgroup_buffer, int warp)
        : warpgroup_buffer(warpgroup_buffer), warp(warp) {}

    __device__ uint32_t own() const { return warpgroup_buffer + warp * (BYTES / 4); }

  public:
    static constexpr int BYTES = 2 * SUBTILE_BYTES; /* of shared memory, a warpgroup, on 1024 */

    /* 16 lines of swapped sums, d[4j], d[4j+1]: line lane / 4 of rows 8 j + 2 (lane % 4) and one more, d[4j+2],
     * d[4j+3]: line lane / 4 + 8. To out[row][0 .. lines), row < rows; lines come in eights. After drain(). */
    template <int tokens, typename T>
    __device__ void store_swapped(const float *d, T *out, int64_t pitch, int rows, int lines) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < tokens / 8; j += 2) {
            uint32_t words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) /* matrix i: rows 8 (j + i / 2), lines 8 (i % 2) */
                if (j + i / 2 < tokens / 8)
                    words[i] =
                        pack<T>(d[4 * (j + i / 2) + i % 2 * 2], d[4 * (j + i / 2) + i % 2 * 2 + 1]);
            int row = 8 * (j + lane / 16) + lane % 8, half = lane / 8 % 2;
            stmatrix_x4_trans(own() + 32 * row + 16 * half, words[0], words[1], words[2], words[3]);
        }
        copy_out<T>(out, pitch, rows, lines, 2);
    }

    /* The same where only every second line counts, which the lanes of even lines hold: 8 columns. */
    template <int tokens, typename T>
    __device__ void store_swapped_pairs(const float *d, T *out, int64_t pitch, int rows,
                                        int columns) {
        int lane = threadIdx.x % 32, row = 2 * (lane % 4);
        T *at = (T *)__cvta_shared_to_generic(own()) + CHUNK * row + lane / 8;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) /* row i % 2 of two, line i / 2 * 8 of sixteen */
                if (lane / 4 % 2 == 0)
                    at[CHUNK * (8 * j + i % 2) + i / 2 * 4] = from_accum<T>(d[4 * j + i]);
        copy_out<T>(out, pitch, rows, columns, 1);
    }

    /* Rows of `chunks` 16-byte chunks, one after the other in the warp's slice, to global memory. */
    template <typename T>
    __device__ void copy_out(T *out, int64_t pitch, int rows, int columns, int chunks) {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
            int row = i / chunks, column = i % chunks * CHUNK;
            if (column < columns)
                st_global_v4(out + row * pitch + column, ld_shared_v4(own() + 16 * i));
        }
        __syncwarp();
    }

    /* The engine has read all that this thread has ordered. */
    __device__ void drain_all() const { cp_async_bulk_wait_group_read<0>(); }
};

/* Boxes of 16 rows, two buffers a warp, by each warp for itself. A kernel uses store() or store_two(), since
 * store() leaves one order unread, and one of store_two() has both buffers. */
class WarpWriter : public Writer {
    int turn = 0;

    __device__ uint32_t buffer(int i) const { return own() + i * ROWS * 128; }

  public:
    static constexpr int ROWS = 16;

    __device__ WarpWriter(uint32_t warpgroup_buffer, int, int warp)
        : Writer(warpgroup_buffer, warp) {}

    __device__ void drain() const {
        cp_async_bulk_wait_group_read<0>();
        __syncwarp();
    }

    /* One box; row is the warpgroup's first in the expert. */
    __device__ void store(const uint32_t (&words)[16], const CUtensorMap *map, int column,
                          int row) {
        cp_async_bulk_wait_group_read<1>();
        __syncwarp();
        fill_subtile(buffer(turn), 0, words);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            cp_async_bulk_tensor_store(map, buffer(turn), column, row + ROWS * warp);
            cp_async_bulk_commit_group();
        }
        turn ^= 1;
    }

    /* Two boxes with half the fences and waits: order(first box, second box, row) stores them. The second lies
     * right behind the first, so that one order of two halves may take both. */
    template <typename Order>
    __device__ void store_two(const uint32_t (&first)[16], const uint32_t (&second)[16], int row,
                              Order order) const {
        drain();
        fill_subtile(buffer(0), 0, first);
        fill_subtile(buffer(1), 0, second);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            order(buffer(0), buffer(1), row + ROWS * warp);
            cp_async_bulk_commit_group();
        }
    }
};

/* Boxes of 64 rows, two buffers a warpgroup, whose warps take turns to give the orders. */
class WarpgroupWriter : public Writer {
    int barrier, turn = 0;
    bool ordered = false; /* since drain() */

    __device__ void sync() const { barrier_sync(barrier, 128); }

  public:
    static constexpr int ROWS = 64;

    __device__ WarpgroupWriter(uint32_t warpgroup_buffer, int wg, int warp)
        : Writer(warpgroup_buffer, warp), barrier(1 + wg) {}

    __device__ void drain() {
        if (!ordered) return;
        cp_async_bulk_wait_group_read<0>();
        sync();
        ordered = false;
    }

    /* One box: fill(box, warp) writes a warp's part of it, order(box) gives the order. */
    template <typename Fill, typename Order>
    __device__ void store_filled(Fill fill, Order order) {
        uint32_t buffer = warpgroup_buffer + turn % 2 * SUBTILE_BYTES;
        if (warp % 2 == turn % 2) cp_async_bulk_wait_group_read<0>(); /* one of them sent it */
        sync();
        fill(buffer, warp);
        fence_proxy_async();
        sync();
        if (warp == turn && threadIdx.x % 32 == 0) {
            order(buffer);
            cp_async_bulk_commit_group();
        }
        turn = (turn + 1) % 4;
        ordered = true;
    }

    /* The same of words as fill_subtile takes them; row is the box's first in the expert. */
    __device__ void store(const uint32_t (&words)[16], const CUtensorMap *map, int column,
                          int row) {
        store_filled([&](uint32_t box, int warp) { fill_subtile(box, 16 * warp, words); },
                     [&](uint32_t box) { cp_async_bulk_tensor_store(map, box, column, row); });
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
        to_accums(low, high, bias + n);
        d[4 * j] += low, d[4 * j + 1] += high, d[4 * j + 2] += low, d[4 * j + 3] += high;
    }
}

/* The same for 16 lines of swapped sums, which come in eights, too. */
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

/* 64 columns of sums as a writer takes them. */
template <typename T>
__device__ inline void pack_subtile(uint32_t (&words)[16], const float *d) {
#pragma unroll
    for (int j = 0; j < 16; j++) words[j] = pack<T>(d[2 * j], d[2 * j + 1]);
}

} // namespace fused_moe
