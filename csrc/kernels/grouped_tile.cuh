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
        typename Tile::R slice[Tile::THREADS / 32][Tile::SLICE_ROWS * SLICE_PITCH];
    };
    const typename Tile::T *origin_a[Tile::BM], *origin_b[Tile::BN];
    typename Tile::R scale_a[Tile::HAS_SCALES * Tile::BM];
    int64_t stride_b[Tile::HAS_STRIDES * Tile::BN];
};

/* Calls fn(i) for this thread's share of i < lines. */
template <int lines, class Tile, typename Fn>
__device__ inline void for_each_origin(Fn fn) {
#pragma unroll
    for (int first = 0; first < lines; first += Tile::THREADS) {
        int i = first + threadIdx.x;
        if (first + Tile::THREADS <= lines || i < lines) fn(i);
    }
}

struct Nothing {};

struct LoadNothing {
    __device__ Nothing operator()(int, int) const { return {}; }
};

/* Calls fn(row, chunk, sums, loaded) for every chunk of this thread: row of the tile, BM where there is
 * none; chunk of `chunks` a row; sums of the row's 64 columns; loaded = load(row, chunk), called for the
 * chunk after this one. All lanes call it the same number of times, lanes of a row side by side.
 * unrolled: for a small fn; the code of a large one is not to be there 16 times. */
template <int chunks, bool unrolled, class Tile, typename Fn, typename Load = LoadNothing>
__device__ inline void for_each_chunk(const Tile &tile, TileShared<Tile> &s, Fn fn,
                                      Load load = Load()) {
    constexpr int ROWS = 32 / chunks, TIMES = (Tile::SLICE_ROWS + ROWS - 1) / ROWS;
    typename Tile::R *slice = s.slice[threadIdx.x / 32];
    int chunk = threadIdx.x % chunks, lane_row = threadIdx.x % 32 / chunks;
    auto row_of = [&](int time) {
        int at = time % TIMES * ROWS + lane_row;
        bool there = at < Tile::SLICE_ROWS && time < TIMES * Tile::SLICES;
        return there ? Tile::slice_row(time / TIMES, at) : Tile::BM;
    };
    auto next = load(row_of(0), chunk);
#pragma unroll(unrolled ? Tile::SLICES : 1)
    for (int q = 0; q < Tile::SLICES; q++) {
        tile.store_slice(q, slice, SLICE_PITCH);
        __syncwarp();
#pragma unroll(unrolled ? TIMES : 1)
        for (int i = 0; i < TIMES; i++) {
            int time = q * TIMES + i, at = min(i * ROWS + lane_row, Tile::SLICE_ROWS - 1);
            auto loaded = next;
            next = load(row_of(time + 1), chunk);
            fn(row_of(time), chunk, slice + at * SLICE_PITCH, loaded);
        }
        __syncwarp();
    }
}

/* --- host: which tile dispatches_to_sm90 a call ------------------------------------------------------------------ */

/* How a matrix of lines can be copied: 16 bytes at a time along k, along the lines, or not at all. */
enum Access { MAJOR_K, MAJOR_MN, MAJOR_NONE };

/* Weight (E, lines, k) or (E, k, lines), by its strides. */
template <typename T>
inline Access access_of(const FusedMoeWeight &w, int64_t stride_line, int64_t stride_k,
                        int64_t lines, int64_t k) {
    bool base = (uintptr_t)w.data % 16 == 0 && w.stride_expert % CHUNK == 0;
    if (base && stride_k == 1 && stride_line % CHUNK == 0 && k % CHUNK == 0) return MAJOR_K;
    if (base && stride_line == 1 && stride_k % CHUNK == 0 && stride_k < INT32_MAX &&
        lines % CHUNK == 0)
        return MAJOR_MN;
    return MAJOR_NONE;
}

template <class Tile>
constexpr size_t shared_bytes() {
    static_assert(sizeof(TileShared<Tile>) <= 99 * 1024, "what sm_86 and sm_89 have for a CTA");
    return sizeof(TileShared<Tile>);
}

/* Calls fn(Tile()) with the tile for A along k, or not, and B as it is. A is multiplied where scaled. Two
 * CTAs of 128 columns an SM hide a long epilogue; one of 256 reads a quarter less from L2. */
template <typename T, int columns = 256, bool may_scale = false, typename Fn>
int with_tile(bool a_along_k, Access b, Fn fn, bool scaled = false) {
    if constexpr (!is_half<T>)
        return fn(SimtTile<T>());
    else {
        if (!a_along_k || b == MAJOR_NONE)
            return fn(TensorTile<T, true, true, false, false, columns>());
        if constexpr (may_scale)
            if (scaled)
                return b == MAJOR_K ? fn(TensorTile<T, true, true, true, true, columns>())
                                    : fn(TensorTile<T, true, false, true, true, columns>());
        return b == MAJOR_K ? fn(TensorTile<T, true, true, true, false, columns>())
                            : fn(TensorTile<T, true, false, true, false, columns>());
    }
}

} // namespace fused_moe
