/* Epilogue writers: accumulators are rounded to T, go through a staging buffer in shared memory, and are
 * stored by TMA, which clips what is past the expert's rows and the output's columns. Swapped accumulators of
 * skinny experts, and of quantised weights, are stored by ordinary stores. wgmma.cuh says which accumulators
 * a thread has.
 *
 * Issuing a TMA store is slow while TMA loads are queued. Hence two writers that use TMA: WarpgroupWriter
 * issues few large stores, for epilogues that only store; WarpWriter never synchronises warps, for epilogues
 * that compute between stores. SkinnyWriter and LineWriter store swapped accumulators, of few and of many
 * rows. */
#pragma once

#include "accumulators.cuh"

namespace fused_moe {
namespace sm90 {

/* Writes a warp's 16 rows of a subtile of 64 columns, from its row `row` on, swizzled as TMA reads them.
 * words[2j], words[2j + 1]: columns 8 j + 2 (lane % 4) of the warp's rows lane / 4 and lane / 4 + 8. */
__device__ inline void fill_subtile(uint32_t subtile, int row, const uint32_t (&words)[16]) {
    int lane = threadIdx.x % 32, chunk = lane / 16;
    row += lane % 16;
#pragma unroll
    for (int j = 0; j < 4; j++) /* 16 rows of chunks 2 j and 2 j + 1, swizzled */
        stmatrix_x4(swizzled(subtile, row, 2 * j + chunk), words[4 * j], words[4 * j + 1], words[4 * j + 2],
                    words[4 * j + 3]);
}

/* The reverse. */
__device__ inline void read_subtile(uint32_t (&words)[16], uint32_t subtile, int row) {
    int lane = threadIdx.x % 32, chunk = lane / 16;
    row += lane % 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t r[4];
        ldmatrix_x4(r, swizzled(subtile, row, 2 * j + chunk));
#pragma unroll
        for (int i = 0; i < 4; i++) words[4 * j + i] = r[i];
    }
}

/* What all writers have: a warp's part of its warpgroup's staging buffer, and stores of swapped
 * accumulators. */
class Writer {
  protected:
    uint32_t warp_buffer; /* the warp's part */

    __device__ explicit Writer(uint32_t warp_buffer) : warp_buffer(warp_buffer) {}

  public:
    static constexpr int BYTES = 2 * SUBTILE_BYTES; /* of shared memory, a warpgroup, on 1024 */

    /* 16 output columns of swapped accumulators to out[row][0 .. columns), row < rows, after drain(). d[4j],
     * d[4j+1]: column lane / 4 of rows 8 j + 2 (lane % 4) and one more; d[4j+2], d[4j+3]: column lane / 4 +
     * 8. Columns come in eights. */
    template <int tokens, typename T>
    __device__ void store_swapped(const float *d, T *out, int64_t pitch, int rows, int columns) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < tokens / 8; j += 2) {
            uint32_t words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) /* matrix i: rows 8 (j + i / 2), columns 8 (i % 2) */
                if (j + i / 2 < tokens / 8)
                    words[i] = pack<T>(d[4 * (j + i / 2) + i % 2 * 2], d[4 * (j + i / 2) + i % 2 * 2 + 1]);
            int row = 8 * (j + lane / 16) + lane % 8, half = lane / 8 % 2;
            stmatrix_x4_trans(warp_buffer + 32 * row + 16 * half, words[0], words[1], words[2], words[3]);
        }
        copy_out<T>(out, pitch, rows, columns, 2);
    }

    /* The same for interleaved gate and up, where only every second column is an output, which the lanes of
     * even columns hold: 8 columns. */
    template <int tokens, typename T>
    __device__ void store_swapped_pairs(const float *d, T *out, int64_t pitch, int rows, int columns) {
        int lane = threadIdx.x % 32, row = 2 * (lane % 4);
        T *staged = (T *)__cvta_shared_to_generic(warp_buffer) + CHUNK * row + lane / 8;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) /* row i % 2 of two, column i / 2 * 8 of sixteen */
                if (lane / 4 % 2 == 0)
                    staged[CHUNK * (8 * j + i % 2) + i / 2 * 4] = from_accum<T>(d[4 * j + i]);
        copy_out<T>(out, pitch, rows, columns, 1);
    }

    /* Rows of `chunks` 16-byte chunks, packed in the warp's part of the buffer, to global memory. */
    template <typename T>
    __device__ void copy_out(T *out, int64_t pitch, int rows, int columns, int chunks) {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < rows * chunks; i += 32) {
            int row = i / chunks, column = i % chunks * CHUNK;
            if (column < columns)
                st_global_v4(out + row * pitch + column, ld_shared_v4(warp_buffer + 16 * i));
        }
        __syncwarp();
    }

    /* TMA has read all that this thread stored. */
    __device__ void drain_all() const { cp_async_bulk_wait_group_read<0>(); }
};

/* For tiles that are all skinny, ROWS rows at most: no TMA. */
template <int ROWS>
class SkinnyWriter : public Writer {
  public:
    static constexpr int BYTES = 4 * ROWS * 32; /* four warps' 16 columns */

    __device__ SkinnyWriter(uint32_t warpgroup_buffer, int, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)) {}

    __device__ void drain() const {}
    __device__ void drain_all() const {}
};

/* Swapped accumulators of tiles of many rows, ROWS at a time: a warpgroup stages lines of 64 columns and
 * stores them whole. A warp for itself would store pieces of 16 or 32 bytes, each a request of its
 * warp_buffer. All 128 threads call copy_out(), or none. */
template <int ROWS_>
class LineWriter {
    uint32_t lines; /* on 1024 */
    int barrier, warp;

    __device__ void sync() const { barrier_sync(barrier, 128); }

  public:
    static constexpr int ROWS = ROWS_, BYTES = ROWS * SWIZZLE_BYTES;

    __device__ LineWriter(uint32_t warpgroup_buffer, int barrier, int warp)
        : lines(warpgroup_buffer), barrier(barrier), warp(warp) {}

    /* Eight columns, a line's chunk `chunk`, of TOKENS rows. words[j]: column lane / 4 of rows 8 j + 2 (lane
     * % 4) and one more. */
    template <int TOKENS>
    __device__ void fill(int chunk, const uint32_t (&words)[TOKENS / 8]) const {
        constexpr int MATRICES = TOKENS / 8; /* 2: each is stored twice */
        static_assert(MATRICES % 4 == 0 || MATRICES == 2);
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < MATRICES; j += 4)
            stmatrix_x4_trans(swizzled(lines, 8 * j + lane % TOKENS, chunk), words[j], words[j + 1],
                              words[(j + 2) % MATRICES], words[(j + 3) % MATRICES]);
    }

    /* The reverse of fill, of 32 rows from `row` on. */
    __device__ void read(int row, int chunk, uint32_t (&words)[4]) const {
        ldmatrix_x4_trans(words, swizzled(lines, row + threadIdx.x % 32, chunk));
    }

    /* Calls fn(address, global) for the chunks that a thread moves: those of a line from first_chunk on, to
     * or from global[row][0 .. columns), row < rows. wait() is between filling and moving. */
    template <int TOKENS, int CHUNKS, typename T, typename Fn>
    __device__ void for_each_chunk(T *global, int64_t pitch, int rows, int columns, int first_chunk,
                                   Fn fn) const {
        constexpr int ROWS_OF_WARP = 32 / CHUNKS, STEP = 4 * ROWS_OF_WARP;
        int lane = threadIdx.x % 32, row = ROWS_OF_WARP * warp + lane / CHUNKS;
        int chunk = first_chunk + lane % CHUNKS;
        if (CHUNK * chunk >= columns) return;
        global += row * pitch + CHUNK * chunk;
#pragma unroll
        for (int i = 0; i < TOKENS; i += STEP, global += STEP * pitch)
            if (row + i < rows) fn(swizzled(lines, row + i, chunk), global);
    }

    __device__ void wait() const {
        cp_async_commit_group();
        cp_async_wait_group<0>();
        sync();
    }

    /* What the four warps have filled, to out[row][0 .. columns), row < rows: of a line CHUNKS chunks from
     * first_chunk on. After it they may fill again. */
    template <int TOKENS, int CHUNKS = 8, typename T>
    __device__ void copy_out(T *out, int64_t pitch, int rows, int columns, int first_chunk = 0) const {
        constexpr int ROWS_OF_WARP = 32 / CHUNKS, STEP = 4 * ROWS_OF_WARP; /* that are stored at once */
        int lane = threadIdx.x % 32, row = ROWS_OF_WARP * warp + lane / CHUNKS;
        int chunk = first_chunk + lane % CHUNKS;
        uint4 v[(TOKENS + STEP - 1) / STEP];
        sync();
#pragma unroll
        for (int i = 0; i < TOKENS; i += STEP) v[i / STEP] = ld_shared_v4(swizzled(lines, row + i, chunk));
        sync();
        out += row * pitch + CHUNK * chunk;
        if (CHUNK * chunk >= columns) return;
#pragma unroll
        for (int i = 0; i < TOKENS; i += STEP, out += STEP * pitch)
            if (row + i < rows) st_global_v4(out, v[i / STEP]);
    }
};

/* Stores of 16 rows, by each warp for itself, through two buffers. A kernel uses store() or store_two():
 * store() leaves one store unread, store_two() needs both buffers. */
class WarpWriter : public Writer {
    int buffer_index = 0;

    __device__ uint32_t buffer(int i) const { return warp_buffer + i * ROWS * SWIZZLE_BYTES; }

  public:
    static constexpr int ROWS = 16;

    __device__ WarpWriter(uint32_t warpgroup_buffer, int, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)) {}

    __device__ void drain() const {
        cp_async_bulk_wait_group_read<0>();
        __syncwarp();
    }

    /* One subtile: issue(subtile) stores it. */
    template <typename Issue>
    __device__ void store(const uint32_t (&words)[16], Issue issue) {
        store_filled([&](uint32_t subtile) { fill_subtile(subtile, 0, words); }, issue);
    }

    /* The same: fill(subtile) writes it. */
    template <typename Fill, typename Issue>
    __device__ void store_filled(Fill fill, Issue issue) {
        cp_async_bulk_wait_group_read<1>();
        __syncwarp();
        fill(buffer(buffer_index));
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            issue(buffer(buffer_index));
            cp_async_bulk_commit_group();
        }
        buffer_index ^= 1;
    }

    /* Two subtiles with half the fences and waits: issue(first, second) stores them. The second follows the
     * first at once, so one store of two halves may take both. */
    template <typename Issue>
    __device__ void store_two(const uint32_t (&first)[16], const uint32_t (&second)[16], Issue issue) const {
        drain();
        fill_subtile(buffer(0), 0, first);
        fill_subtile(buffer(1), 0, second);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            issue(buffer(0), buffer(1));
            cp_async_bulk_commit_group();
        }
    }
};

/* The same through one buffer. */
class SingleWarpWriter : public Writer {
  public:
    static constexpr int ROWS = 16, BYTES = SUBTILE_BYTES;

    __device__ SingleWarpWriter(uint32_t warpgroup_buffer, int, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)) {}

    template <typename Fill, typename Issue>
    __device__ void store_filled(Fill fill, Issue issue) const {
        cp_async_bulk_wait_group_read<0>();
        __syncwarp();
        fill(warp_buffer);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            issue(warp_buffer);
            cp_async_bulk_commit_group();
        }
    }
};

/* Stores of 64 rows, through two buffers of a warpgroup; its warps issue them in rotation. */
class WarpgroupWriter : public Writer {
    uint32_t warpgroup_buffer;
    int barrier, warp;       /* of the warpgroup's four */
    int issuer = 0;          /* the warp that issues the next store */
    bool has_stored = false; /* since drain() */

    __device__ void sync() const { barrier_sync(barrier, 128); }

  public:
    static constexpr int ROWS = 64;

    __device__ WarpgroupWriter(uint32_t warpgroup_buffer, int barrier, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)), warpgroup_buffer(warpgroup_buffer), barrier(barrier),
          warp(warp) {}

    __device__ void drain() {
        if (!has_stored) return;
        cp_async_bulk_wait_group_read<0>();
        sync();
        has_stored = false;
    }

    /* One subtile: fill(subtile, warp) writes a warp's part of it, issue(subtile) stores it. */
    template <typename Fill, typename Issue>
    __device__ void store_filled(Fill fill, Issue issue) {
        uint32_t buffer = warpgroup_buffer + issuer % 2 * SUBTILE_BYTES;
        if (warp % 2 == issuer % 2)
            cp_async_bulk_wait_group_read<0>(); /* one of them issued the store from it */
        sync();
        fill(buffer, warp);
        fence_proxy_async();
        sync();
        if (warp == issuer && threadIdx.x % 32 == 0) {
            issue(buffer);
            cp_async_bulk_commit_group();
        }
        issuer = (issuer + 1) % 4;
        has_stored = true;
    }
};

/* Stores of 64 rows and four subtiles, which are staged whole: fill(i, ..) while TMA may read none of them,
 * then store(), in which warp i issues the store of subtile i. */
class WholeWriter : public Writer {
    uint32_t warpgroup_buffer;
    int barrier, warp;

  public:
    static constexpr int ROWS = 64, SUBTILES = 4, BYTES = SUBTILES * SUBTILE_BYTES;

    __device__ WholeWriter(uint32_t warpgroup_buffer, int barrier, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)), warpgroup_buffer(warpgroup_buffer), barrier(barrier),
          warp(warp) {}

    /* The tile before this one has been read. */
    __device__ void wait() const {
        cp_async_bulk_wait_group_read<0>();
        barrier_sync(barrier, 128);
    }

    __device__ void fill(int i, const uint32_t (&words)[16]) const {
        fill_subtile(warpgroup_buffer + i * SUBTILE_BYTES, 16 * warp, words);
    }

    /* issue(subtile, i) stores subtile i, if it is one of the output's. */
    template <typename Issue>
    __device__ void store(Issue issue) const {
        fence_proxy_async();
        barrier_sync(barrier, 128);
        if (threadIdx.x % 32 == 0) {
            issue(warpgroup_buffer + warp * SUBTILE_BYTES, warp);
            cp_async_bulk_commit_group();
        }
    }
};

/* Stores of 16 rows, by each warp for itself, through four buffers: fill(i, ..) while TMA may read none of
 * them, then store() of those that were filled. */
class WarpWholeWriter : public Writer {
    __device__ uint32_t buffer(int i) const { return warp_buffer + i * ROWS * SWIZZLE_BYTES; }

  public:
    static constexpr int ROWS = 16, SUBTILES = 4, BYTES = SUBTILES * SUBTILE_BYTES;

    __device__ WarpWholeWriter(uint32_t warpgroup_buffer, int, int warp)
        : Writer(warpgroup_buffer + warp * (BYTES / 4)) {}

    /* TMA has read what was stored before. */
    __device__ void wait() const {
        cp_async_bulk_wait_group_read<0>();
        __syncwarp();
    }

    __device__ void fill(int i, const uint32_t (&words)[16]) const { fill_subtile(buffer(i), 0, words); }

    /* issue(buffer, i) stores subtile i, for i from first to end - 1. */
    template <typename Issue>
    __device__ void store(int first, int end, Issue issue) const {
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            for (int i = first; i < end; i++) issue(buffer(i), i);
            cp_async_bulk_commit_group();
        }
    }

    /* After wait(): one buffer, filled by fill(buffer) and stored by issue(buffer). */
    template <typename Fill, typename Issue>
    __device__ void store_filled(Fill fill, Issue issue) const {
        wait();
        fill(buffer(0));
        store(0, 1, [&](uint32_t filled, int) { issue(filled); });
    }
};

/* What run_mainloop_swapped left of consumer wg's subtiles, with a bias [E,M], to out [R,M]: p has bias, out
 * and M. */
template <typename Out, typename Bias, int TOKENS, int SUBTILES, class Params, class Tile, class Writer>
__device__ __forceinline__ void store_swapped_subtiles(const Params &p, float *d, const Tile &tile, int wg,
                                                       int warp, Writer &writer) {
    const Bias *bias = p.bias ? (const Bias *)p.bias + (int64_t)tile.expert * p.M : nullptr;
#pragma unroll
    for (int i = 0; i < SUBTILES; i++) {
        int first = tile.first_column + (SUBTILES * wg + i) * SUBTILE + 16 * warp;
        if (first >= p.M || (tile.half_n && wg)) return; /* these columns were not loaded */
        if (bias) add_bias_swapped<TOKENS>(&d[TOKENS / 2 * i], bias, first, p.M);
        Out *out = (Out *)p.out + (int64_t)tile.first_row * p.M + first;
        writer.template store_swapped<TOKENS>(&d[TOKENS / 2 * i], out, p.M, tile.num_rows, p.M - first);
    }
}

} // namespace sm90
} // namespace fused_moe
