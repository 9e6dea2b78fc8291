/* down_dgrad: the gradient through the down projection and the activation, as one grouped GEMM.
 *
 * g = dout[row_token] w2. The epilogue loads h, recomputes a, and stores
 *   dh = dact(s g, h),  a_scaled = s a,  and per row the partial sum of <g, a> over each warp's 64 columns,
 * so forward need not keep a, nor the output of the down projection. A second kernel (common/dscores.cu) adds
 * a slot's partial sums in a fixed order: dscore = <g, a> (+ <dout, b2>), zero in slots without a row. */
#include "../common/activation.cuh"
#include "../common/dscores.cuh"
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

__host__ __device__ inline int64_t partials_per_row(int64_t F) {
    return (F + WARP_N - 1) / WARP_N;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    down_dgrad_kernel(const __grid_constant__ FusedMoeDownDgrad p) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    static_assert(Tile::HAS_SCALES);
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    const FusedMoeRowMap &row_map = p.row_map;
    bool gated = p.layout != FUSED_MOE_UNGATED;
    int F = (int)p.F, H = gated ? 2 * F : F, num_partials = (int)partials_per_row(F);

    /* Work tile, or zeros past the last row */
    CtaWork w =
        find_work(row_map.schedule, row_map.offs, row_map.E, row_map.R, (F + Tile::BN - 1) / Tile::BN);
    T *dh = (T *)p.dh, *a_scaled = (T *)p.a_scaled;
    if (!w.tile.num_rows) {
        zero_tail(w, dh, H, row_map.offs, row_map.E, row_map.R);
        zero_tail(w, a_scaled, p.F, row_map.offs, row_map.E, row_map.R);
        return;
    }

    /* Operands */
    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t row = w.tile.first_row + i, token = row, slot = row;
        bool valid = i < w.tile.num_rows;
        if (valid && row_map.row_token) token = row_map.row_token[row], slot = row_map.row_slot[row];
        valid = valid && (uint64_t)token < (uint64_t)row_map.T;
        s.origin_a[i] = valid ? (const T *)p.dout + token * p.D : nullptr;
        valid = valid && (uint64_t)slot < (uint64_t)(row_map.T * row_map.K);
        s.scale_a[i] = !p.scores ? Acc(1) : valid ? ((const Acc *)p.scores)[slot] : Acc(0);
    });
    int64_t first_col = (int64_t)w.tile.n_tile * Tile::BN;
    for_each_origin<Tile::BN, Tile>([&](int i) {
        const T *origin =
            (const T *)p.w2.data + w.tile.expert * p.w2.stride_expert + (first_col + i) * p.w2.stride_in;
        s.origin_b[i] = first_col + i < p.F ? origin : nullptr;
    });
    __syncthreads();

    /* Main loop */
    Operand<T> operand_a = {s.origin_a}, operand_b = {s.origin_b};
    operand_a.stride_k = 1;
    operand_b.stride_k = p.w2.stride_out;
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, operand_a, operand_b, (int)p.D);

    /* Epilogue, with h prefetched one chunk ahead */
    bool aligned_h = rows_are_aligned<T>(p.h, p.F), aligned_dh = rows_are_aligned<T>(dh, p.F);
    bool aligned_a = rows_are_aligned<T>(a_scaled, p.F);
    Acc *partials = (Acc *)p.workspace.data;
    int warp_col = (int)first_col + tile.warp_n() * WARP_N;
    auto load_h = [&](int row, int chunk) {
        int j = warp_col + chunk * CHUNK, r = w.tile.first_row + row;
        const T *h_row = (const T *)p.h + (int64_t)r * H;
        PackedPair<T> h;
        if (row < w.tile.num_rows && j < F) h.load(p.layout, h_row, h_row + F, j, F - j, aligned_h);
        return h;
    };
    auto epilogue = [&](int row, int chunk, const Acc *staging, const PackedPair<T> &h) {
        int j = warp_col + chunk * CHUNK, r = w.tile.first_row + row;
        bool valid = row < w.tile.num_rows && j < F;
        Acc dot = 0;
        if (valid) {
            int n = min(CHUNK, F - j);
            Pair<Acc> q, d;
            Acc g[CHUNK], da[CHUNK], a[CHUNK], score = s.scale_a[row];
            load_accumulators(g, staging + chunk * CHUNK);
            h.unpack(q, p.layout);
            /* past F, g is 0, or NaN in rows where dout is not finite */
#pragma unroll
            for (int i = 0; i < CHUNK; i++) da[i] = score * g[i];
            activate_backward<T>(a, d, da, q, p.activation, gated);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) dot += g[i] * a[i], a[i] *= score;
            if (dh) {
                T *dh_row = dh + (int64_t)r * H;
                store_pair<T>(dh_row, dh_row + F, d, p.layout, j, n, aligned_dh);
            }
            if (a_scaled) store_chunk<T>(a_scaled + (int64_t)r * F + j, a, n, aligned_a);
        }
        if (!p.dscores) return;
        dot = warp_sum(dot, WARP_N / CHUNK);
        if (chunk == 0 && valid) partials[(int64_t)r * num_partials + warp_col / WARP_N] = dot;
    };
    for_each_chunk<WARP_N / CHUNK, false>(tile, s, epilogue, load_h);
}

/* --- launchers ------------------------------------------------------------------------------------------ */

template <typename T>
int launch_down_dgrad(const FusedMoeDownDgrad &p, void *stream) {
    bool a_k_major = (uintptr_t)p.dout % 16 == 0 && p.D % CHUNK == 0;
    Major b = major_of<T>(p.w2, p.w2.stride_in, p.w2.stride_out, p.F, p.D);
    return with_tile<T, 128>(a_k_major, b, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.row_map.R, p.row_map.E) * ceil_div(p.F, Tile::BN);
        return launch(down_dgrad_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

size_t workspace(const FusedMoeDownDgrad &p) {
    size_t element = p.dtype == FUSED_MOE_F64 ? sizeof(double) : sizeof(float);
    return p.dscores ? p.row_map.R * partials_per_row(p.F) * element : 0;
}

int run(const FusedMoeDownDgrad &p, void *stream) {
    int status = with_dtype(p.dtype, [&](auto t) { return launch_down_dgrad<decltype(t)>(p, stream); });
    if (status != FUSED_MOE_OK || !p.dscores) return status;
    return run_dscores(p, p.workspace.data, partials_per_row(p.F), stream);
}

} // namespace

const Kernel<FusedMoeDownDgrad> down_dgrad = {nullptr, workspace, run};

} // namespace fused_moe::sm80
