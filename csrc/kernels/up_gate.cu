/* up_gate: h = x[row_token] w1^T | w3^T + b and a = act(gate) up, as one grouped product.
 *
 * A CTA is a tile of an expert's rows, read through row_token, and for a gated expert of half as many hidden
 * columns as the tile has: a warp's 64 columns are 32 gates and the 32 ups that belong to them (pairs side by
 * side where the weight is interleaved), so that a pair meets in the epilogue and not through memory. */
#include "activation.cuh"
#include "grouped_tile.cuh"
#include "hopper/tier.cuh"

namespace fused_moe {

/* --- kernel -------------------------------------------------------------------------------------------- */

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS)
    up_gate_kernel(const __grid_constant__ FusedMoeUpGate p) {
    using T = typename Tile::T;
    using R = typename Tile::R;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    const FusedMoeRowMap &row_map = p.row_map;
    bool gated = p.layout != FUSED_MOE_UNGATED, packed = gated && !p.w3.data;
    int warp_hidden = gated ? WARP_COLS / 2 : WARP_COLS; /* hidden columns of a warp */
    int tile_hidden = warp_hidden * Tile::WARPS_N;
    int F = (int)p.F, H = gated ? 2 * F : F;
    Work w = find_work_tile(row_map.tiles, row_map.ends, row_map.E, row_map.R,
                            (F + tile_hidden - 1) / tile_hidden);
    T *h = (T *)p.h, *a = (T *)p.a;
    if (!w.rows.num_rows) {
        zero_tail(w, h, H, row_map.ends, row_map.E, row_map.R);
        zero_tail(w, a, p.F, row_map.ends, row_map.E, row_map.R);
        return;
    }

    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t row = w.rows.first_row + i, token = row;
        bool valid = i < w.rows.num_rows;
        if (valid && row_map.row_token) token = row_map.row_token[row];
        valid = valid && (uint64_t)token < (uint64_t)row_map.T;
        s.origin_a[i] = valid ? (const T *)p.x + token * p.D : nullptr;
        if (!Tile::HAS_SCALES || !p.scores) return;
        int64_t slot = valid ? row_map.row_slot[row] : -1;
        s.scale_a[i] =
            (uint64_t)slot < (uint64_t)(row_map.T * row_map.K) ? ((const R *)p.scores)[slot] : 0;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        int64_t warp_first = (int64_t)w.column_tile * tile_hidden + i / WARP_COLS * warp_hidden;
        int col = i % WARP_COLS, half = gated ? col / warp_hidden : 0;
        int64_t j = warp_first + col % warp_hidden, row = j;
        const FusedMoeWeight *weight = &p.w1;
        if (p.layout == FUSED_MOE_INTERLEAVED) {
            row = 2 * warp_first + col;
            j = row / 2;
        } else if (half && p.layout == FUSED_MOE_HALVES) {
            row += p.F;
        } else if (half) {
            weight = &p.w3;
        }
        const T *line = (const T *)weight->data + w.rows.expert * weight->stride_expert +
                        row * weight->stride_out;
        s.origin_b[i] = j < p.F ? line : nullptr;
        if constexpr (Tile::HAS_STRIDES) s.stride_b[i] = weight->stride_in;
    });
    __syncthreads();

    Operand<T> rows = {s.origin_a}, cols = {s.origin_b};
    rows.stride_k = 1;
    rows.line_scale = p.scores ? s.scale_a : nullptr;
    cols.stride_k = p.w1.stride_in;
    if (p.w3.data && p.w3.stride_in != p.w1.stride_in) cols.line_stride = s.stride_b;
    Tile tile;
    tile.zero();
    tile.multiply(s.ring, rows, cols, (int)p.D);

    bool aligned = rows_are_aligned<T>(h, p.F) && rows_are_aligned<T>(a, p.F);
    const T *b1 = p.b1 ? (const T *)p.b1 + w.rows.expert * (packed ? H : p.F) : nullptr;
    const T *b3 = p.b3 ? (const T *)p.b3 + w.rows.expert * p.F : nullptr;
    int warp_first = w.column_tile * tile_hidden + tile.warp_n() * warp_hidden;
    auto epilogue = [&](int row, int chunk, const R *sums, Nothing) {
        int j = warp_first + chunk * CHUNK;
        if (row >= w.rows.num_rows || j >= F) return;
        int n = min(CHUNK, F - j);
        Pair<R> q, bias;
        if (p.layout == FUSED_MOE_INTERLEAVED) {
            load_pair<R>(q, p.layout, sums, 0, chunk * CHUNK, CHUNK, true);
        } else {
            load_accumulators(q.gate, sums + chunk * CHUNK);
            load_accumulators(q.up, sums + (chunk * CHUNK + warp_hidden) % WARP_COLS);
        }
        if (b1 && p.w3.data) {
            load_chunk<T>(bias.gate, b1 + j, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) q.gate[i] += bias.gate[i];
        } else if (b1) {
            load_pair<T>(bias, p.layout, b1, p.F, j, n, false);
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
        int r = w.rows.first_row + row;
        if (h) store_pair<T>(h + (int64_t)r * H, q, p.layout, F, j, n, aligned);
        R act[CHUNK];
        activate<T>(act, q, p.activation, gated);
        store_chunk<T>(a + (int64_t)r * F + j, act, n, aligned);
    };
    if (gated)
        for_each_chunk<WARP_COLS / 2 / CHUNK, false>(tile, s, epilogue);
    else
        for_each_chunk<WARP_COLS / CHUNK, false>(tile, s, epilogue);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
static int up_gate(const FusedMoeUpGate &p, void *stream) {
    bool gated = p.layout != FUSED_MOE_UNGATED;
    bool packed = p.layout == FUSED_MOE_HALVES || p.layout == FUSED_MOE_INTERLEAVED;
    bool rows = (uintptr_t)p.x % 16 == 0 && p.D % CHUNK == 0;
    int64_t w1_rows = packed ? 2 * p.F : p.F;
    Access cols = access_of<T>(p.w1, p.w1.stride_out, p.w1.stride_in, w1_rows, p.D);
    if (p.w3.data && (access_of<T>(p.w3, p.w3.stride_out, p.w3.stride_in, p.F, p.D) != cols ||
                      p.w3.stride_in != p.w1.stride_in))
        cols = MAJOR_NONE;
    if (cols == MAJOR_MN && p.F % CHUNK) cols = MAJOR_NONE; /* ups start at F */
    auto run = [&](auto tile) {
        using Tile = decltype(tile);
        int64_t columns = ceil_div(p.F, Tile::BN / (gated ? 2 : 1));
        return launch(up_gate_kernel<Tile>, p, max_row_tiles(p.row_map.R, p.row_map.E) * columns,
                      Tile::THREADS, shared_bytes<Tile>(), stream);
    };
    return with_tile<T, 256, true>(rows, cols, run, p.scores != nullptr);
}

} // namespace fused_moe

extern "C" size_t fused_moe_cuda_up_gate_workspace(const FusedMoeUpGate *p) {
    using namespace fused_moe;
    return sm90_reason(*p) == FUSED_MOE_ON_SM90 ? hopper_workspace(p->row_map.E) : 0;
}

extern "C" int fused_moe_cuda_up_gate(const FusedMoeUpGate *p, void *stream) {
    using namespace fused_moe;
    if (dispatches_to_sm90(FUSED_MOE_OP_UP_GATE, sm90_reason(*p), p->workspace_bytes,
                           hopper_workspace(p->row_map.E)))
        return hopper_up_gate(*p, stream);
    return with_dtype(p->dtype, [&](auto t) { return up_gate<decltype(t)>(*p, stream); });
}
