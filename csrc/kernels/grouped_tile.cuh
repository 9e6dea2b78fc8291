/* What the kernels over tiles share: their shared memory, the epilogue's walk over a tile, and the
 * choice of a tile for a call.
 *
 * A kernel fills the origins of its operands, multiplies, and hands every chunk of eight columns to its
 * epilogue, which reads the sums from shared memory: a warp stages its own columns slice by slice, over
 * the ring that the product no longer needs. A warp has 64 columns of the tile. */
#pragma once

#include "simt_tile.cuh"
#include "tensor_tile.cuh"
#include "tile_scheduler.cuh"

namespace fused_moe {

constexpr int WARP_COLS = 64, SLICE_PITCH = WARP_COLS + 8;

template <class Tile>
struct TileShared {
    union {
        typename Tile::Shared ring;
        struct {
            typename Tile::R slice[Tile::THREADS / 32][Tile::SLICE_ROWS * SLICE_PITCH];
            typename Tile::T pairs[is_half<typename Tile::T> ? Tile::THREADS / 32 : 1][2]
                                  [Tile::SLICE_ROWS * 2 * WARP_COLS];
        };
    };
    const typename Tile::T *origin_a[Tile::BM], *origin_b[Tile::BN];
    typename Tile::R scale_a[Tile::BM];
    int64_t stride_b[Tile::BN];

    /* What the epilogue fetched beside slice q of this warp: rows of up to two values a column. */
    __device__ typename Tile::T *aside(int q) { return pairs[threadIdx.x / 32][q % 2]; }
};

struct FetchNothing {
    __device__ void operator()(int) const {}
};

/* Calls fn(row, chunk, sums, q, i) for every chunk of this thread: row of the tile, which is row i of the
 * warp's slice q; chunk of `chunks` a row; sums of the row's 64 columns. All lanes call it the same number
 * of times, lanes of a row side by side. fetch(q) may issue cp_async for slice q, a slice ahead. */
template <class Tile, typename Fn, typename Fetch = FetchNothing>
__device__ inline void for_each_chunk(const Tile &tile, TileShared<Tile> &s, int chunks, Fn fn,
                                      Fetch fetch = Fetch()) {
    typename Tile::R *slice = s.slice[threadIdx.x / 32];
    int lane = threadIdx.x % 32, shift = __ffs(chunks) - 1; /* chunks: a power of two */
    fetch(0);
    cp_async_commit_group();
    for (int q = 0; q < Tile::SLICES; q++) {
        if (q + 1 < Tile::SLICES) fetch(q + 1);
        cp_async_commit_group();
        tile.store_slice(q, slice, SLICE_PITCH);
        cp_async_wait_group<1>();
        __syncwarp();
        for (int i = lane; i - lane < Tile::SLICE_ROWS * chunks; i += 32) {
            int at = min(i >> shift, Tile::SLICE_ROWS - 1);
            bool mine = i < Tile::SLICE_ROWS * chunks;
            fn(mine ? Tile::slice_row(q, at) : Tile::BM, i & (chunks - 1), slice + at * SLICE_PITCH,
               q, at);
        }
        __syncwarp();
    }
}

/* --- host: which tile serves a call ------------------------------------------------------------------ */

/* How a matrix of lines can be copied: 16 bytes at a time along k, along the lines, or not at all. */
enum Access { ALONG_K, ALONG_LINES, ONE_BY_ONE };

/* Weight (E, lines, k) or (E, k, lines), by its strides. */
template <typename T>
inline Access access_of(const FusedMoeWeight &w, int64_t stride_line, int64_t stride_k,
                        int64_t lines, int64_t k) {
    bool base = (uintptr_t)w.data % 16 == 0 && w.stride_expert % CHUNK == 0;
    if (base && stride_k == 1 && stride_line % CHUNK == 0 && k % CHUNK == 0) return ALONG_K;
    if (base && stride_line == 1 && stride_k % CHUNK == 0 && stride_k < INT32_MAX &&
        lines % CHUNK == 0)
        return ALONG_LINES;
    return ONE_BY_ONE;
}

/* Calls fn(Tile()) with the tile for A along k, or not, and B as it is. A is multiplied where scaled. */
template <typename T, bool may_scale = false, typename Fn>
int with_tile(bool a_along_k, Access b, Fn fn, bool scaled = false) {
    if constexpr (!is_half<T>)
        return fn(SimtTile<T>());
    else {
        if (!a_along_k || b == ONE_BY_ONE) return fn(TensorTile<T, true, true, false>());
        if constexpr (may_scale)
            if (scaled)
                return b == ALONG_K ? fn(TensorTile<T, true, true, true, true>())
                                    : fn(TensorTile<T, true, false, true, true>());
        return b == ALONG_K ? fn(TensorTile<T, true, true, true>())
                            : fn(TensorTile<T, true, false, true>());
    }
}

} // namespace fused_moe
