/* wgrad: a product along the rows of each expert, dw[e] = a[rows of e]^T b[rows of e]; and bias_grad,
 * their plain sum.
 *
 * A CTA is a tile of one expert's weight and walks that expert's rows, so sums have a fixed order and an
 * expert without rows gets zeros. Both operands lie along their lines; either may be read through
 * row_token. Rows past the expert's last are zero on both sides: 0 * NaN would be NaN.
 *
 * dw is of the operands' dtype, or float: then the sums may be added to what it holds, and an expert without
 * rows is left alone. */
#include "grouped_tile.cuh"
#include "hopper/tier.cuh"

namespace fused_moe {

/* --- kernels ------------------------------------------------------------------------------------------- */

typedef struct {      /* one side of the product: rows of `lines` numbers */
    const void *data; /* [rows, stride] from the first line on */
    int64_t lines, stride;
    const int32_t *row_token; /* [R] or NULL */
    const void *scores;       /* [num_slots] or NULL */
} Side;

typedef struct {
    Side a, b;
    const int32_t *row_slot, *ends;
    void *dw; /* (E, a.lines, b.lines) */
    int64_t stride_expert, stride_a, stride_b;
    int64_t R, T, num_slots;
    int32_t E;
    bool accumulate; /* of a float dw alone */
} Wgrad;

template <typename T>
__device__ inline Operand<T> operand_of(const Side &side, const Wgrad &p, const T *const *origin,
                                        int64_t first_row) {
    Operand<T> x = {origin};
    x.stride_k = side.stride;
    x.row = side.row_token ? side.row_token + first_row : nullptr;
    x.num_rows = p.T;
    x.scores = (const Accum<T> *)side.scores;
    x.slot = p.row_slot + first_row;
    x.num_slots = p.num_slots;
    return x;
}

template <typename T>
__device__ inline const T *origin_of(const Side &side, int64_t line, int64_t first_row) {
    int64_t offset = side.row_token ? 0 : first_row * side.stride;
    return line < side.lines ? (const T *)side.data + offset + line : nullptr;
}

template <class Tile, typename Out>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS)
    wgrad_kernel(const __grid_constant__ Wgrad p) {
    using T = typename Tile::T;
    using R = typename Tile::R;
    constexpr bool MAY_ADD = std::is_same_v<Out, float>;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    unsigned tiles_a = (unsigned)((p.a.lines + Tile::BM - 1) / Tile::BM);
    unsigned tiles_b = (unsigned)((p.b.lines + Tile::BN - 1) / Tile::BN);
    unsigned tiles = tiles_a * tiles_b;
    int e = blockIdx.x / tiles, tile_a, tile_b;
    grouped_order(blockIdx.x % tiles, tiles_a, tiles_b, tile_a, tile_b);
    int64_t first_a = (int64_t)tile_a * Tile::BM, first_b = (int64_t)tile_b * Tile::BN;
    int64_t first = max(0, e ? p.ends[e - 1] : 0), end = min((int64_t)p.ends[e], p.R);
    if (MAY_ADD && p.accumulate && first >= end) return;

    for_each_origin<Tile::BM, Tile>(
        [&](int i) { s.origin_a[i] = origin_of<T>(p.a, first_a + i, first); });
    for_each_origin<Tile::BN, Tile>(
        [&](int i) { s.origin_b[i] = origin_of<T>(p.b, first_b + i, first); });
    __syncthreads();
    Tile tile;
    tile.zero();
    tile.multiply(s.ring, operand_of<T>(p.a, p, s.origin_a, first),
                  operand_of<T>(p.b, p, s.origin_b, first), (int)max((int64_t)0, end - first));

    Out *dw = (Out *)p.dw + e * p.stride_expert;
    bool aligned = p.stride_b == 1 && p.stride_a % CHUNK == 0 && p.stride_expert % CHUNK == 0 &&
                   rows_are_aligned<Out>(p.dw, p.b.lines);
    auto epilogue = [&](int row, int chunk, const R *sums, const auto &before) {
        int64_t i = first_a + row, j = first_b + tile.warp_n() * WARP_COLS + chunk * CHUNK;
        if (row >= Tile::BM || i >= p.a.lines || j >= p.b.lines) return;
        Out *out = dw + i * p.stride_a + j * p.stride_b;
        R v[CHUNK];
        load_accumulators(v, sums + chunk * CHUNK);
        if constexpr (MAY_ADD)
#pragma unroll
            for (int c = 0; c < CHUNK; c++) v[c] += before.v[c];
        if (aligned) {
            store_chunk<Out>(out, v, CHUNK, true);
        } else {
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                if (j + c < p.b.lines) out[c * p.stride_b] = from_accum<Out>(v[c]);
        }
    };
    /* What a chunk's sums are added to, on its way while the chunk before it is stored. */
    auto load_before = [&](int row, int chunk) {
        Pack<Out> before = {};
        int64_t i = first_a + row, j = first_b + tile.warp_n() * WARP_COLS + chunk * CHUNK;
        if (!p.accumulate || row >= Tile::BM || i >= p.a.lines || j >= p.b.lines) return before;
        const Out *from = dw + i * p.stride_a + j * p.stride_b;
        if (aligned) {
            before = *reinterpret_cast<const Pack<Out> *>(from);
        } else {
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                if (j + c < p.b.lines) before.v[c] = from[c * p.stride_b];
        }
        return before;
    };
    if constexpr (MAY_ADD)
        for_each_chunk<WARP_COLS / CHUNK, true>(tile, s, epilogue, load_before);
    else
        for_each_chunk<WARP_COLS / CHUNK, true>(tile, s, epilogue);
}

/* A CTA is an expert and 32 columns; its warps share the rows. Sums as long as an expert's rows are double. */
template <typename T>
__global__ void bias_grad_kernel(const __grid_constant__ FusedMoeBiasGrad p) {
    constexpr int WARPS = 8;
    __shared__ double sums[WARPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t blocks = (p.N + 31) / 32, col = blockIdx.x % blocks * 32 + lane;
    int e = (int)(blockIdx.x / blocks);
    int64_t end = min((int64_t)p.ends[e], p.R);
    double sum = 0;
    for (int64_t r = max(0, e ? p.ends[e - 1] : 0) + warp; r < end && col < p.N; r += WARPS) {
        int64_t from = p.row_token ? p.row_token[r] : r, slot = p.scores ? p.row_slot[r] : 0;
        if ((uint64_t)from >= (uint64_t)p.T || (uint64_t)slot >= (uint64_t)(p.T * p.K)) continue;
        Accum<T> score = p.scores ? ((const Accum<T> *)p.scores)[slot] : Accum<T>(1);
        sum += (double)score * to_accum(((const T *)p.rows)[from * p.N + col]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || col >= p.N) return;
    for (int i = 1; i < WARPS; i++) sum += sums[i][lane];
    ((T *)p.db)[e * p.N + col] = from_accum<T>((Accum<T>)sum);
}

/* --- launchers ------------------------------------------------------------------------------------------ */

template <typename T>
static bool is_vectors(const Side &side) {
    return (uintptr_t)side.data % 16 == 0 && side.stride % CHUNK == 0 && side.stride < INT32_MAX &&
           side.lines % CHUNK == 0;
}

template <typename T, typename Out>
static int wgrad(const Wgrad &p, void *stream) {
    auto run = [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = p.E * ceil_div(p.a.lines, Tile::BM) * ceil_div(p.b.lines, Tile::BN);
        return launch(wgrad_kernel<Tile, Out>, p, grid, Tile::THREADS, shared_bytes<Tile>(),
                      stream);
    };
    if constexpr (!is_half<T>)
        return run(SimtTile<T>());
    else if (!is_vectors<T>(p.a) || !is_vectors<T>(p.b) || p.b.scores)
        return run(TensorTile<T, false, false, false>());
    else if (p.a.scores)
        return run(TensorTile<T, false, false, true, true>());
    else
        return run(TensorTile<T, false, false, true>());
}

} // namespace fused_moe

extern "C" size_t fused_moe_cuda_wgrad_workspace(const FusedMoeWgrad *p) {
    using namespace fused_moe;
    return sm90_reason(*p) == FUSED_MOE_ON_SM90 ? hopper_wgrad_workspace(*p) : 0;
}

/* One launch a part. The side whose numbers are consecutive in dw is b, for the sake of the stores. */
extern "C" int fused_moe_cuda_wgrad(const FusedMoeWgrad *p, void *stream) {
    using namespace fused_moe;
    if (p->accumulate && p->dw_dtype != FUSED_MOE_F32) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (dispatches_to_sm90(FUSED_MOE_OP_WGRAD, sm90_reason(*p), p->workspace_bytes,
                           hopper_wgrad_workspace(*p)))
        return hopper_wgrad(*p, stream);
    size_t elem = p->dtype == FUSED_MOE_F64 ? 8 : p->dtype == FUSED_MOE_F32 ? 4 : 2;
    for (int part = 0; part < 2; part++) {
        const FusedMoeWeight &dw = p->dw[part];
        if (!dw.data) continue;
        const char *first = (const char *)p->a + (part ? p->M[0] * elem : 0);
        Side a = {first, p->M[part], p->M[0] + p->M[1], nullptr, nullptr};
        Side b = {p->b, p->N, p->N, p->b_row_token, p->b_scores};
        Wgrad w = {a,
                   b,
                   p->row_slot,
                   p->ends,
                   dw.data,
                   dw.stride_expert,
                   dw.stride_out,
                   dw.stride_in,
                   p->R,
                   p->T,
                   p->T * p->K,
                   p->E,
                   p->accumulate};
        /* scores can be multiplied into a alone, at the price of stores one by one */
        if (b.scores || (dw.stride_in != 1 && dw.stride_out == 1)) {
            w.a = b, w.b = a;
            w.stride_a = dw.stride_in, w.stride_b = dw.stride_out;
        }
        int status = with_dtype(p->dtype, [&](auto t) {
            using T = decltype(t);
            if (p->dw_dtype == p->dtype) return wgrad<T, T>(w, stream);
            if constexpr (is_half<T>)
                if (p->dw_dtype == FUSED_MOE_F32) return wgrad<T, float>(w, stream);
            return (int)FUSED_MOE_UNSUPPORTED_DTYPE;
        });
        if (status != FUSED_MOE_OK) return status;
    }
    return FUSED_MOE_OK;
}

extern "C" int fused_moe_cuda_bias_grad(const FusedMoeBiasGrad *p, void *stream) {
    using namespace fused_moe;
    int64_t grid = p->E * ceil_div(p->N, 32);
    return with_dtype(p->dtype, [&](auto t) {
        return launch(bias_grad_kernel<decltype(t)>, *p, grid, 256, 0, stream);
    });
}
