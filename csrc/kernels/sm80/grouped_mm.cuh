/* What the kernels of grouped_mm share, whatever b is: one CTA's work tile, up to 128 rows of one expert
 * times one N tile of the output. */
#pragma once

#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {

/* What a kernel does. `weights` tells where a row of a part's b begins, and how an operand reads it. */
template <class Tile, class Weights>
__device__ inline void grouped_mm_tile(const FusedMoeGroupedMM &p, const Weights &weights) {
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
        for_each_origin<Tile::BM, Tile>([&](int i) {
            const T *row = (const T *)p.a + (w.tile.first_row + i) * width + (part ? p.N[0] : 0);
            s.origin_a[i] = i < w.tile.num_rows ? row : nullptr;
        });
        for_each_origin<Tile::BN, Tile>([&](int i) {
            int64_t col = first_col + i;
            auto origin = weights.origin(part, w.tile.expert, col);
            s.origin_b[i] = col < p.M ? origin : typename Tile::OriginB{};
        });
        __syncthreads();
        Operand<T> operand_a = {s.origin_a};
        operand_a.stride_k = 1;
        auto operand_b = weights.operand(part, s.origin_b);
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

} // namespace fused_moe::sm80
