/* What the GEMM kernels share: a CTA's shared memory, the epilogue's loop over the accumulators, and the
 * selection of a tile type for a call.
 *
 * A kernel fills the origins of its operands, runs the tile's main loop, and passes each chunk of eight
 * columns to its epilogue. Each warp has 64 columns of the tile. It stores its accumulators subtile by
 * subtile to its own staging buffer, which reuses the memory of the pipeline stages, and reads them back row
 * by row. */
#pragma once

#include "few_rows_tile.cuh"
#include "simt_tile.cuh"
#include "tensor_tile.cuh"
#include "tile_scheduler.cuh"

namespace fused_moe::sm80 {

constexpr int STAGING_PITCH = WARP_N + 8;

template <class Tile>
struct TileShared {
    union {
        typename Tile::Stages stages;
        typename Tile::Acc staging[Tile::THREADS / 32][Tile::SUBTILE_ROWS * STAGING_PITCH];
    };
    const typename Tile::T *origin_a[Tile::BM];
    typename Tile::OriginB origin_b[Tile::BN];
    typename Tile::Acc scale_a[Tile::HAS_SCALES * Tile::BM];
    int64_t strides_b[Tile::HAS_STRIDES * Tile::BN];
};

/* Calls fn(i) for this thread's share of i < extent. */
template <int extent, class Tile, typename Fn>
__device__ inline void for_each_origin(Fn fn) {
#pragma unroll
    for (int first = 0; first < extent; first += Tile::THREADS) {
        int i = first + threadIdx.x;
        if (first + Tile::THREADS <= extent || i < extent) fn(i);
    }
}

struct Nothing {};

struct LoadNothing {
    __device__ Nothing operator()(int, int) const { return {}; }
};

/* Calls fn(row, chunk, staging, loaded) for every chunk of this thread.
 *   row       of the tile; BM: there is none
 *   chunk     of `chunks` per row; neighbouring lanes have neighbouring chunks of one row
 *   staging   the row's 64 accumulators
 *   loaded    load(row, chunk), issued one chunk ahead
 * All lanes call fn the same number of times. unrolled: for a small fn; a large one would be repeated 16
 * times. */
template <int chunks, bool unrolled, class Tile, typename Fn, typename Load = LoadNothing>
__device__ inline void for_each_chunk(const Tile &tile, TileShared<Tile> &s, Fn fn, Load load = Load()) {
    constexpr int ROWS = 32 / chunks; /* per iteration of a warp */
    constexpr int ITERATIONS = (Tile::SUBTILE_ROWS + ROWS - 1) / ROWS;
    typename Tile::Acc *staging = s.staging[threadIdx.x / 32];
    int chunk = threadIdx.x % chunks, lane_row = threadIdx.x % 32 / chunks;
    auto row_of = [&](int iteration) {
        int row = iteration % ITERATIONS * ROWS + lane_row;
        bool exists = row < Tile::SUBTILE_ROWS && iteration < ITERATIONS * Tile::SUBTILES;
        return exists ? Tile::subtile_row(iteration / ITERATIONS, row) : Tile::BM;
    };
    auto next = load(row_of(0), chunk);
#pragma unroll(unrolled ? Tile::SUBTILES : 1)
    for (int q = 0; q < Tile::SUBTILES; q++) {
        tile.store_subtile(q, staging, STAGING_PITCH);
        __syncwarp();
#pragma unroll(unrolled ? ITERATIONS : 1)
        for (int i = 0; i < ITERATIONS; i++) {
            int iteration = q * ITERATIONS + i, row = min(i * ROWS + lane_row, Tile::SUBTILE_ROWS - 1);
            auto loaded = next;
            next = load(row_of(iteration + 1), chunk);
            fn(row_of(iteration), chunk, staging + row * STAGING_PITCH, loaded);
        }
        __syncwarp();
    }
}

/* --- host: the tile type of a call ---------------------------------------------------------------------- */

/* Along which dimension a matrix can be loaded in 16-byte chunks. */
enum class Major { K, MN, none };

/* By the strides of a weight (E, extent, k). */
template <typename T>
inline Major major_of(const FusedMoeWeight &w, int64_t stride_mn, int64_t stride_k, int64_t extent,
                      int64_t k) {
    bool base = (uintptr_t)w.data % 16 == 0 && w.stride_expert % CHUNK == 0;
    if (base && stride_k == 1 && stride_mn % CHUNK == 0 && k % CHUNK == 0) return Major::K;
    if (base && stride_mn == 1 && stride_k % CHUNK == 0 && stride_k < INT32_MAX && extent % CHUNK == 0)
        return Major::MN;
    return Major::none;
}

template <class Tile>
constexpr size_t shared_bytes() {
    static_assert(sizeof(TileShared<Tile>) <= 99 * 1024, "the limit of sm_86 and sm_89 for one CTA");
    return sizeof(TileShared<Tile>);
}

/* Calls fn(Tile()). a_k_major: A is vectorisable along k. scaled: A is multiplied by its scores. columns:
 * with 128, two CTAs per SM overlap long epilogues; 256 reads a quarter less from L2. */
template <typename T, int columns = 256, bool may_scale = false, typename Fn>
int with_tile(bool a_k_major, Major b, Fn fn, bool scaled = false) {
    if constexpr (!is_half<T>)
        return fn(SimtTile<T>());
    else {
        if (!a_k_major || b == Major::none) return fn(TensorTile<T, true, true, false, false, columns>());
        if constexpr (may_scale)
            if (scaled)
                return b == Major::K ? fn(TensorTile<T, true, true, true, true, columns>())
                                     : fn(TensorTile<T, true, false, true, true, columns>());
        return b == Major::K ? fn(TensorTile<T, true, true, true, false, columns>())
                             : fn(TensorTile<T, true, false, true, false, columns>());
    }
}

/* with_tile() for a GEMM of R rows of E experts. Tiles of few rows are chosen here and not on the device:
 * they are kernels of their own, with the registers and the shared memory that suit them. Scaled inputs, and
 * those that are not vectorisable, have no tile of few rows. */
template <typename T, bool may_scale = false, typename Fn>
int with_tile_of_rows(int64_t R, int32_t E, bool a_k_major, Major b, Fn fn, bool scaled = false) {
    int rows = schedule_override().no_tails ? 0 : fused_moe_few_rows(R, E);
    if constexpr (is_half<T>)
        if (a_k_major && b != Major::none && !scaled) {
            auto with_rows = [&](auto r) {
                return b == Major::K ? fn(FewRowsTile<DenseColumns<T, true, decltype(r)::value>>())
                                     : fn(FewRowsTile<DenseColumns<T, false, decltype(r)::value>>());
            };
            if (rows == 16) return with_rows(std::integral_constant<int, 16>());
            if (rows == 64) return with_rows(std::integral_constant<int, 64>());
        }
    return with_tile<T, 256, may_scale>(a_k_major, b, fn, scaled);
}

} // namespace fused_moe::sm80
