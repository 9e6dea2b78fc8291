/* grouped_mm: every expert's weight on its own rows, out[r] = sum_i a[r, part i] b[i][e]^T + bias[e].
 *
 * A CTA is a tile of rows of one expert and of columns of the output. Weights carry strides, so forward,
 * the gradient of the rows, and up_dgrad = dgate w1 + dup w3 (two parts in one accumulator) are this one
 * kernel: a weight is read along k or along its columns, as it lies. */
#include "grouped_tile.cuh"
#include "hopper/tier.cuh"
#include "plan_tiles.cuh"

namespace fused_moe {

/* --- kernel -------------------------------------------------------------------------------------------- */

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS)
    grouped_mm_kernel(const __grid_constant__ FusedMoeGroupedMM p) {
    using T = typename Tile::T;
    using R = typename Tile::R;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    int num_columns = (int)((p.M + Tile::BN - 1) / Tile::BN);
    Work w = find_work_tile(p.tiles, p.ends, p.E, p.R, num_columns);
    T *out = (T *)p.out;
    if (!w.rows.num_rows) {
        zero_tail(w, out, p.M, p.ends, p.E, p.R);
        return;
    }
    int64_t first_col = (int64_t)w.column_tile * Tile::BN, width = p.N[0] + p.N[1];

    Tile tile;
    tile.zero();
    for (int part = 0; part < 2 && p.b[part].data; part++) {
        const FusedMoeWeight b = part ? p.b[1] : p.b[0];
        for_each_origin<Tile::BM, Tile>([&](int i) {
            const T *row = (const T *)p.a + (w.rows.first_row + i) * width + (part ? p.N[0] : 0);
            s.origin_a[i] = i < w.rows.num_rows ? row : nullptr;
        });
        for_each_origin<Tile::BN, Tile>([&](int i) {
            int64_t col = first_col + i;
            const T *line =
                (const T *)b.data + w.rows.expert * b.stride_expert + col * b.stride_out;
            s.origin_b[i] = col < p.M ? line : nullptr;
        });
        __syncthreads();
        Operand<T> rows = {s.origin_a}, cols = {s.origin_b};
        rows.stride_k = 1;
        cols.stride_k = b.stride_in;
        tile.multiply(s.ring, rows, cols, (int)(part ? p.N[1] : p.N[0]));
    }

    bool aligned = rows_are_aligned<T>(out, p.M);
    const T *bias = p.bias ? (const T *)p.bias + w.rows.expert * p.M : nullptr;
    int M = (int)p.M, warp_col = (int)first_col + tile.warp_n() * WARP_COLS;
    auto epilogue = [&](int row, int chunk, const R *sums, Nothing) {
        int col = warp_col + chunk * CHUNK;
        if (row >= w.rows.num_rows || col >= M) return;
        int n = min(CHUNK, M - col);
        R v[CHUNK], more[CHUNK];
        load_accumulators(v, sums + chunk * CHUNK);
        if (bias) {
            load_chunk<T>(more, bias + col, n, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v[i] += more[i];
        }
        store_chunk<T>(out + (int64_t)(w.rows.first_row + row) * M + col, v, n, aligned);
    };
    for_each_chunk<WARP_COLS / CHUNK, true>(tile, s, epilogue);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
static int grouped_mm(const FusedMoeGroupedMM &p, void *stream) {
    bool rows = (uintptr_t)p.a % 16 == 0 && p.N[0] % CHUNK == 0 && p.N[1] % CHUNK == 0;
    Access cols = access_of<T>(p.b[0], p.b[0].stride_out, p.b[0].stride_in, p.M, p.N[0]);
    if (p.b[1].data &&
        access_of<T>(p.b[1], p.b[1].stride_out, p.b[1].stride_in, p.M, p.N[1]) != cols)
        cols = MAJOR_NONE;
    return with_tile<T>(rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.R, p.E) * ceil_div(p.M, Tile::BN);
        return launch(grouped_mm_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(),
                      stream);
    });
}

} // namespace fused_moe

extern "C" size_t fused_moe_cuda_grouped_mm_workspace(const FusedMoeGroupedMM *p) {
    using namespace fused_moe;
    if (sm90_reason(*p) == FUSED_MOE_ON_SM90) return hopper_workspace(p->E);
    return p->tiles ? 0 : checked_plan_ints(p->E) * sizeof(int32_t);
}

extern "C" int fused_moe_cuda_grouped_mm(const FusedMoeGroupedMM *p, void *stream) {
    using namespace fused_moe;
    if (dispatches_to_sm90(FUSED_MOE_OP_GROUPED_MM, sm90_reason(*p), p->workspace_bytes,
                           hopper_workspace(p->E)))
        return hopper_grouped_mm(*p, stream);
    FusedMoeGroupedMM q = *p;
    if (!q.tiles) {
        int status =
            make_checked_plan(q.ends, q.E, q.R, (int32_t *)q.workspace, &q.ends, &q.tiles, stream);
        if (status != FUSED_MOE_OK) return status;
    }
    return with_dtype(q.dtype, [&](auto t) { return grouped_mm<decltype(t)>(q, stream); });
}
