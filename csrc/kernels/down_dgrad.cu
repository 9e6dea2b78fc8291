/* down_dgrad: the gradient of the down side, and with it everything that h gives. act_dgrad is its last
 * step alone.
 *
 * A grouped product g = dout[row_token] w2 whose epilogue loads h, computes a again, and stores
 *   dh = dact(s g, h),  a_scaled = s a,  and the row's partial sum of <g, a> over a warp's 64 columns,
 * so that neither a nor the down product's output is kept from forward. A second kernel adds the partial
 * sums of a slot in a fixed order: dscore = <g, a> (+ <dout, b2>), zero in slots without a row. */
#include "activation.cuh"
#include "grouped_tile.cuh"
#include "hopper/tier.cuh"

namespace fused_moe {

/* --- kernels ------------------------------------------------------------------------------------------- */

__host__ __device__ inline int64_t partials_of_row(int64_t F) {
    return (F + WARP_COLS - 1) / WARP_COLS;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS)
    down_dgrad_kernel(const __grid_constant__ FusedMoeDownDgrad p) {
    using T = typename Tile::T;
    using R = typename Tile::R;
    static_assert(Tile::HAS_SCALES);
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    const FusedMoeRowMap &row_map = p.row_map;
    bool gated = p.layout != FUSED_MOE_UNGATED;
    int F = (int)p.F, H = gated ? 2 * F : F, num_partials = (int)partials_of_row(F);
    Work w = find_work_tile(row_map.tiles, row_map.ends, row_map.E, row_map.R,
                            (F + Tile::BN - 1) / Tile::BN);
    T *dh = (T *)p.dh, *a_scaled = (T *)p.a_scaled;
    if (!w.rows.num_rows) {
        zero_tail(w, dh, H, row_map.ends, row_map.E, row_map.R);
        zero_tail(w, a_scaled, p.F, row_map.ends, row_map.E, row_map.R);
        return;
    }

    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t row = w.rows.first_row + i, token = row, slot = row;
        bool valid = i < w.rows.num_rows;
        if (valid && row_map.row_token)
            token = row_map.row_token[row], slot = row_map.row_slot[row];
        valid = valid && (uint64_t)token < (uint64_t)row_map.T;
        s.origin_a[i] = valid ? (const T *)p.dout + token * p.D : nullptr;
        valid = valid && (uint64_t)slot < (uint64_t)(row_map.T * row_map.K);
        s.scale_a[i] = !p.scores ? R(1) : valid ? ((const R *)p.scores)[slot] : R(0);
    });
    int64_t first_col = (int64_t)w.column_tile * Tile::BN;
    for_each_origin<Tile::BN, Tile>([&](int i) {
        const T *line = (const T *)p.w2.data + w.rows.expert * p.w2.stride_expert +
                        (first_col + i) * p.w2.stride_in;
        s.origin_b[i] = first_col + i < p.F ? line : nullptr;
    });
    __syncthreads();

    Operand<T> rows = {s.origin_a}, cols = {s.origin_b};
    rows.stride_k = 1;
    cols.stride_k = p.w2.stride_out;
    Tile tile;
    tile.zero();
    tile.multiply(s.ring, rows, cols, (int)p.D);

    bool aligned_h = rows_are_aligned<T>(p.h, p.F), aligned_dh = rows_are_aligned<T>(dh, p.F);
    bool aligned_a = rows_are_aligned<T>(a_scaled, p.F);
    R *partials = (R *)p.workspace;
    int warp_col = (int)first_col + tile.warp_n() * WARP_COLS;
    auto load_h = [&](int row, int chunk) {
        int j = warp_col + chunk * CHUNK, r = w.rows.first_row + row;
        PackedPair<T> h;
        if (row < w.rows.num_rows && j < F)
            h.load(p.layout, (const T *)p.h + (int64_t)r * H, F, j, F - j, aligned_h);
        return h;
    };
    auto epilogue = [&](int row, int chunk, const R *sums, const PackedPair<T> &h) {
        int j = warp_col + chunk * CHUNK, r = w.rows.first_row + row;
        bool mine = row < w.rows.num_rows && j < F;
        R dot = 0;
        if (mine) {
            int n = min(CHUNK, F - j);
            Pair<R> q, d;
            R g[CHUNK], da[CHUNK], a[CHUNK], score = s.scale_a[row];
            load_accumulators(g, sums + chunk * CHUNK);
            h.unpack(q, p.layout);
            /* past F g is 0, or NaN in a row of dout that is not finite */
#pragma unroll
            for (int i = 0; i < CHUNK; i++) da[i] = score * g[i];
            activate_backward<T>(a, d, da, q, p.activation, gated);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) dot += g[i] * a[i], a[i] *= score;
            if (dh) store_pair<T>(dh + (int64_t)r * H, d, p.layout, F, j, n, aligned_dh);
            if (a_scaled) store_chunk<T>(a_scaled + (int64_t)r * F + j, a, n, aligned_a);
        }
        if (!p.dscores) return;
        dot = warp_sum(dot, WARP_COLS / CHUNK);
        if (chunk == 0 && mine) partials[(int64_t)r * num_partials + warp_col / WARP_COLS] = dot;
    };
    for_each_chunk<WARP_COLS / CHUNK, false>(tile, s, epilogue, load_h);
}

typedef struct {
    FusedMoeDownDgrad of;
    const void *partials; /* [R, per_row] */
    int64_t per_row;
} Dscores;

/* A warp a slot. */
template <typename T>
__global__ void dscores_kernel(const __grid_constant__ Dscores q) {
    using R = Accum<T>;
    const FusedMoeDownDgrad &p = q.of;
    const FusedMoeRowMap &row_map = p.row_map;
    int lane = threadIdx.x % 32;
    int64_t warps = (int64_t)gridDim.x * (blockDim.x / 32), slots = row_map.T * row_map.K;
    int64_t end = min((int64_t)row_map.ends[row_map.E - 1], row_map.R);
    for (int64_t slot = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32; slot < slots;
         slot += warps) {
        int64_t r = row_map.token_row ? row_map.token_row[slot] : slot;
        R sum = 0;
        if (r >= 0 && r < end) {
            const R *row = (const R *)q.partials + r * q.per_row;
            for (int64_t i = lane; i < q.per_row; i += 32) sum += row[i];
            if (p.b2) {
                int e = 0; /* the expert of row r: the first whose end is past it */
                for (int size = row_map.E; size > 0;) {
                    int half = size / 2;
                    if (row_map.ends[e + half] <= r)
                        e += half + 1, size -= half + 1;
                    else
                        size = half;
                }
                const T *bias = (const T *)p.b2 + min(e, row_map.E - 1) * p.D;
                const T *dout = (const T *)p.dout + slot / row_map.K * p.D;
                for (int64_t i = lane; i < p.D; i += 32)
                    sum += to_accum(bias[i]) * to_accum(dout[i]);
            }
            sum = warp_sum(sum);
        }
        if (lane == 0) ((R *)p.dscores)[slot] = sum;
    }
}

template <typename T>
__global__ void act_dgrad_kernel(const __grid_constant__ FusedMoeActDgrad p) {
    using R = Accum<T>;
    bool gated = p.layout != FUSED_MOE_UNGATED;
    int64_t H = gated ? 2 * p.F : p.F, chunks = (p.F + CHUNK - 1) / CHUNK;
    bool aligned = rows_are_aligned<T>(p.da, p.F) && rows_are_aligned<T>(p.h, p.F) &&
                   rows_are_aligned<T>(p.dh, p.F);
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < p.R * chunks;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t r = i / chunks, j = i % chunks * CHUNK;
        int n = (int)min((int64_t)CHUNK, p.F - j);
        Pair<R> q, d;
        R da[CHUNK], a[CHUNK];
        load_chunk<T>(da, (const T *)p.da + r * p.F + j, n, aligned);
        load_pair<T>(q, p.layout, (const T *)p.h + r * H, p.F, j, n, aligned);
        activate_backward<T>(a, d, da, q, p.activation, gated);
        store_pair<T>((T *)p.dh + r * H, d, p.layout, p.F, j, n, aligned);
    }
}

/* --- launchers ------------------------------------------------------------------------------------------ */

template <typename T>
static int down_dgrad(const FusedMoeDownDgrad &p, void *stream) {
    bool rows = (uintptr_t)p.dout % 16 == 0 && p.D % CHUNK == 0;
    Access cols = access_of<T>(p.w2, p.w2.stride_in, p.w2.stride_out, p.F, p.D);
    return with_tile<T, 128>(rows, cols, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.row_map.R, p.row_map.E) * ceil_div(p.F, Tile::BN);
        return launch(down_dgrad_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(),
                      stream);
    });
}

static size_t portable_workspace(const FusedMoeDownDgrad &p) {
    size_t real = p.dtype == FUSED_MOE_F64 ? sizeof(double) : sizeof(float);
    return p.dscores ? p.row_map.R * partials_of_row(p.F) * real : 0;
}

} // namespace fused_moe

extern "C" size_t fused_moe_cuda_down_dgrad_workspace(const FusedMoeDownDgrad *p) {
    using namespace fused_moe;
    if (sm90_reason(*p) == FUSED_MOE_ON_SM90) return hopper_down_dgrad_workspace(*p);
    return portable_workspace(*p);
}

extern "C" int fused_moe_cuda_down_dgrad(const FusedMoeDownDgrad *p, void *stream) {
    using namespace fused_moe;
    bool hopper = dispatches_to_sm90(FUSED_MOE_OP_DOWN_DGRAD, sm90_reason(*p), p->workspace_bytes,
                                     hopper_down_dgrad_workspace(*p));
    return with_dtype(p->dtype, [&](auto t) {
        using T = decltype(t);
        int status = hopper ? hopper_down_dgrad(*p, stream) : down_dgrad<T>(*p, stream);
        if (status != FUSED_MOE_OK || !p->dscores) return status;
        Dscores q = {*p, p->workspace, partials_of_row(p->F)};
        if (hopper) q.partials = hopper_partials(*p), q.per_row = hopper_partials_of_row(p->F);
        return launch(dscores_kernel<T>, q, ceil_div(p->row_map.T * p->row_map.K, 8), 256, 0,
                      stream);
    });
}

extern "C" int fused_moe_cuda_act_dgrad(const FusedMoeActDgrad *p, void *stream) {
    using namespace fused_moe;
    int64_t chunks = p->R * ceil_div(p->F, CHUNK);
    return with_dtype(p->dtype, [&](auto t) {
        return launch(act_dgrad_kernel<decltype(t)>, *p, chunks ? grid_for(chunks, 256) : 0, 256, 0,
                      stream);
    });
}
