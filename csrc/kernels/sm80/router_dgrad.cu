/* The gradient of the router's input: dx = dlogits weight, or dx += dlogits weight. One CTA per tile of 128
 * tokens and 128 columns. */
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {
namespace {

constexpr int COLUMNS = 128;

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    router_dgrad_kernel(const __grid_constant__ FusedMoeRouterDgrad p) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    int64_t num_column_tiles = (p.D + Tile::BN - 1) / Tile::BN;
    int64_t first_token = blockIdx.x / num_column_tiles * Tile::BM;
    int64_t first_column = blockIdx.x % num_column_tiles * Tile::BN;

    /* Main loop */
    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t t = first_token + i;
        s.origin_a[i] = t < p.T ? (const T *)p.dlogits + t * p.E : nullptr;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        int64_t column = first_column + i;
        s.origin_b[i] = column < p.D ? (const T *)p.weight + column : nullptr;
    });
    __syncthreads();
    Operand<T> dlogits = {s.origin_a}, weight = {s.origin_b};
    dlogits.stride_k = 1;
    weight.stride_k = p.D;
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, dlogits, weight, p.E);

    /* Epilogue: add what dx has, round, store */
    bool aligned = rows_are_aligned<T>(p.dx, p.D);
    int64_t warp_column = first_column + tile.warp_n() * WARP_N;
    auto epilogue = [&](int row, int chunk, const Acc *staging, Nothing) {
        int64_t t = first_token + row, column = warp_column + chunk * CHUNK;
        if (row >= Tile::BM || t >= p.T || column >= p.D) return;
        int n = (int)min((int64_t)CHUNK, p.D - column);
        T *dx = (T *)p.dx + t * p.D + column;
        Acc v[CHUNK], before[CHUNK];
        load_accumulators(v, staging + chunk * CHUNK);
        if (p.accumulate) {
            load_chunk<T>(before, dx, n, aligned);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v[i] = to_accum(from_accum<T>(v[i])) + before[i];
        }
        store_chunk<T>(dx, v, n, aligned);
    };
    for_each_chunk<WARP_N / CHUNK, true>(tile, s, epilogue);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int run(const FusedMoeRouterDgrad &p, void *stream) {
    return with_dtype(p.dtype, [&](auto t) {
        using T = decltype(t);
        const FusedMoeWeight weight = {(void *)p.weight, 0, 1, p.D};
        bool dlogits_k_major = (uintptr_t)p.dlogits % 16 == 0 && p.E % CHUNK == 0;
        Major major = major_of<T>(weight, 1, p.D, p.D, p.E);
        return with_tile<T, COLUMNS>(dlogits_k_major, major, [&](auto tile) {
            using Tile = decltype(tile);
            int64_t grid = ceil_div(p.T, Tile::BM) * ceil_div(p.D, Tile::BN);
            return launch(router_dgrad_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
        });
    });
}

} // namespace

const Kernel<FusedMoeRouterDgrad> router_dgrad = {nullptr, nullptr, run};

} // namespace fused_moe::sm80
