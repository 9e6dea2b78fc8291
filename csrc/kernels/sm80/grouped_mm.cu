/* Grouped GEMM: out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)].
 *
 * One CTA per work tile: up to 128 rows of one expert times one N tile of the output. Weights are strided, so
 * this kernel computes the forward GEMMs, the gradient of their rows, and dx = dgate w1 + dup w3 (two parts
 * in the same accumulators). A weight is loaded K-major or MN-major, as its strides are. */
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    grouped_mm_kernel(const __grid_constant__ FusedMoeGroupedMM p) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);

    /* Work tile, or zeros past the last row */
    CtaWork w = find_work<Tile::BM>(p.schedule, p.offs, p.E, p.R, (int)((p.M + Tile::BN - 1) / Tile::BN));
    T *out = (T *)p.out;
    if (!w.tile.num_rows) {
        zero_tail(w, out, p.M, p.offs, p.E, p.R);
        return;
    }
    int64_t first_col = (int64_t)w.tile.n_tile * Tile::BN, width = p.N[0] + p.N[1];

    /* Main loop, once per part */
    Tile tile;
    tile.zero();
    for (int part = 0; part < 2 && p.b[part].data; part++) {
        const FusedMoeWeight b = part ? p.b[1] : p.b[0];
        for_each_origin<Tile::BM, Tile>([&](int i) {
            const T *row = (const T *)p.a + (w.tile.first_row + i) * width + (part ? p.N[0] : 0);
            s.origin_a[i] = i < w.tile.num_rows ? row : nullptr;
        });
        for_each_origin<Tile::BN, Tile>([&](int i) {
            int64_t col = first_col + i;
            const T *origin = (const T *)b.data + w.tile.expert * b.stride_expert + col * b.stride_out;
            s.origin_b[i] = col < p.M ? origin : nullptr;
        });
        __syncthreads();
        Operand<T> operand_a = {s.origin_a}, operand_b = {s.origin_b};
        operand_a.stride_k = 1;
        operand_b.stride_k = b.stride_in;
        tile.main_loop(s.stages, operand_a, operand_b, (int)(part ? p.N[1] : p.N[0]));
    }

    /* Epilogue: add the bias, round, store */
    bool aligned = rows_are_aligned<T>(out, p.M);
    const T *bias = p.bias ? (const T *)p.bias + w.tile.expert * p.M : nullptr;
    int M = (int)p.M, warp_col = (int)first_col + tile.warp_n() * WARP_N;
    auto epilogue = [&](int row, int chunk, const Acc *staging, Nothing) {
        int col = warp_col + chunk * CHUNK;
        if (row >= w.tile.num_rows || col >= M) return;
        int n = min(CHUNK, M - col);
        Acc v[CHUNK], bias_v[CHUNK];
        load_accumulators(v, staging + chunk * CHUNK);
        if (bias) {
            load_chunk<T>(bias_v, bias + col, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v[i] += bias_v[i];
        }
        store_chunk<T>(out + (int64_t)(w.tile.first_row + row) * M + col, v, n, aligned);
    };
    for_each_chunk<WARP_N / CHUNK, true>(tile, s, epilogue);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
int launch_grouped_mm(const FusedMoeGroupedMM &p, void *stream) {
    bool a_k_major = (uintptr_t)p.a % 16 == 0 && p.N[0] % CHUNK == 0 && p.N[1] % CHUNK == 0;
    Major b = major_of<T>(p.b[0], p.b[0].stride_out, p.b[0].stride_in, p.M, p.N[0]);
    if (p.b[1].data && major_of<T>(p.b[1], p.b[1].stride_out, p.b[1].stride_in, p.M, p.N[1]) != b)
        b = Major::none;
    return with_tile_of_rows<T>(p.R, p.E, a_k_major, b, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.R, p.E, Tile::BM) * ceil_div(p.M, Tile::BN);
        return launch(grouped_mm_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

int run(const FusedMoeGroupedMM &p, void *stream) {
    return with_dtype(p.dtype, [&](auto t) { return launch_grouped_mm<decltype(t)>(p, stream); });
}

} // namespace

const Kernel<FusedMoeGroupedMM> grouped_mm = {nullptr, nullptr, run};

} // namespace fused_moe::sm80
