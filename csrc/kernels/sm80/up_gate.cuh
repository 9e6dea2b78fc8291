/* What the kernels of up_gate share, whatever the weights are.
 *
 * One CTA per work tile: up to 128 rows of one expert, gathered through row_token, times one N tile. For a
 * gated expert half of an N tile's columns are gates and half are their ups: each warp's 64 columns are 32
 * gates and the 32 ups that belong to them (interleaved pairs where the weight is interleaved). So gate and
 * up of a hidden column are in the same warp's accumulators, and the activation needs no global memory. */
#pragma once

#include "../common/activation.cuh"
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {

/* What an N tile has as its column i: a row of w1 or w3, and its hidden column j, which may be F or more. */
struct WeightRow {
    bool is_w3;
    int64_t row, j;
};

__device__ inline WeightRow weight_row(const FusedMoeUpGate &p, int n_tile, int warp_hidden, int tile_hidden,
                                       int i) {
    int64_t warp_first = (int64_t)n_tile * tile_hidden + i / WARP_N * warp_hidden;
    int col = i % WARP_N, half = col / warp_hidden;
    int64_t j = warp_first + col % warp_hidden, row = j;
    bool is_w3 = false;
    if (p.layout == FUSED_MOE_INTERLEAVED) {
        row = 2 * warp_first + col;
        j = row / 2;
    } else if (half && p.layout == FUSED_MOE_HALVES) {
        row += p.F;
    } else if (half) {
        is_w3 = true;
    }
    return {is_w3, row, j};
}

/* What a kernel does. `weights` tells where a row of w1 or w3 begins, and how an operand reads it. */
template <class Tile, class Weights>
__device__ inline void up_gate_tile(const FusedMoeUpGate &p, const Weights &weights) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    const FusedMoeRowMap &row_map = p.row_map;
    bool gated = p.layout != FUSED_MOE_UNGATED, packed = gated && !p.w3.data;
    int warp_hidden = gated ? WARP_N / 2 : WARP_N; /* hidden columns of a warp */
    int tile_hidden = warp_hidden * Tile::WARPS_N;
    int F = (int)p.F, H = gated ? 2 * F : F;

    /* Work tile, or zeros past the last row */
    CtaWork w = find_work<Tile::BM>(row_map.schedule, row_map.offs, row_map.E, row_map.R,
                                    (F + tile_hidden - 1) / tile_hidden);
    T *h = (T *)p.h, *a = (T *)p.a;
    if (!w.tile.num_rows) {
        zero_tail(w, h, H, row_map.offs, row_map.E, row_map.R);
        zero_tail(w, a, p.F, row_map.offs, row_map.E, row_map.R);
        return;
    }

    /* Operands: gathered rows, columns of gates and ups */
    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t row = w.tile.first_row + i, token = row;
        bool valid = i < w.tile.num_rows;
        if (valid && row_map.row_token) token = row_map.row_token[row];
        valid = valid && (uint64_t)token < (uint64_t)row_map.T;
        s.origin_a[i] = valid ? (const T *)p.x + token * p.D : nullptr;
        if (!Tile::HAS_SCALES || !p.scores) return;
        int64_t slot = valid ? row_map.row_slot[row] : -1;
        s.scale_a[i] = (uint64_t)slot < (uint64_t)(row_map.T * row_map.K) ? ((const Acc *)p.scores)[slot] : 0;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        WeightRow b = weight_row(p, w.tile.n_tile, warp_hidden, tile_hidden, i);
        auto origin = weights.origin(b.is_w3, w.tile.expert, b.row);
        s.origin_b[i] = b.j < p.F ? origin : typename Tile::OriginB{};
        if constexpr (Tile::HAS_STRIDES) s.strides_b[i] = b.is_w3 ? p.w3.stride_in : p.w1.stride_in;
    });
    __syncthreads();

    /* Main loop */
    Operand<T> operand_a = {s.origin_a};
    operand_a.stride_k = 1;
    operand_a.scale_mn = p.scores ? s.scale_a : nullptr;
    auto operand_b = weights.operand(s.origin_b, s.strides_b);
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, operand_a, operand_b, (int)p.D);

    /* Epilogue: add the biases and the addend, store h, activate, store a */
    const T *addend = (const T *)p.addend;
    bool aligned = rows_are_aligned<T>(h, p.F) && rows_are_aligned<T>(a, p.F);
    const T *b1 = p.b1 ? (const T *)p.b1 + w.tile.expert * (packed ? H : p.F) : nullptr;
    const T *b3 = p.b3 ? (const T *)p.b3 + w.tile.expert * p.F : nullptr;
    int warp_first = w.tile.n_tile * tile_hidden + tile.warp_n() * warp_hidden;
    auto epilogue = [&](int row, int chunk, const Acc *staging, Nothing) {
        int j = warp_first + chunk * CHUNK;
        if (row >= w.tile.num_rows || j >= F) return;
        int n = min(CHUNK, F - j);
        Pair<Acc> q, bias;
        if (p.layout == FUSED_MOE_INTERLEAVED) {
            load_pair<Acc>(q, p.layout, staging, nullptr, chunk * CHUNK, CHUNK, true);
        } else {
            load_accumulators(q.gate, staging + chunk * CHUNK);
            load_accumulators(q.up, staging + (chunk * CHUNK + warp_hidden) % WARP_N);
        }
        if (b1 && p.w3.data) {
            load_chunk<T>(bias.gate, b1 + j, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) q.gate[i] += bias.gate[i];
        } else if (b1) {
            load_pair<T>(bias, p.layout, b1, b1 + p.F, j, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                q.gate[i] += bias.gate[i];
                if (gated) q.up[i] += bias.up[i];
            }
        }
        if (b3) {
            load_chunk<T>(bias.up, b3 + j, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) q.up[i] += bias.up[i];
        }
        int r = w.tile.first_row + row;
        if (addend) {
            const T *added = addend + (int64_t)r * H;
            load_pair<T>(bias, p.layout, added, added + F, j, n, rows_are_aligned<T>(addend, p.F));
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                q.gate[i] += bias.gate[i];
                if (gated) q.up[i] += bias.up[i];
            }
        }
        if (h) {
            T *h_row = h + (int64_t)r * H;
            store_pair<T>(h_row, h_row + F, q, p.layout, j, n, aligned);
        }
        Acc act[CHUNK];
        activate<T>(act, q, p.activation, gated);
        store_chunk<T>(a + (int64_t)r * F + j, act, n, aligned);
    };
    if (gated)
        for_each_chunk<WARP_N / 2 / CHUNK, false>(tile, s, epilogue);
    else
        for_each_chunk<WARP_N / CHUNK, false>(tile, s, epilogue);
}

} // namespace fused_moe::sm80
