/* wgrad: weight gradients, a grouped GEMM along the rows of each expert: dw[e] = a[rows of e]^T b[rows of e].
 *
 * One CTA per expert and tile of its weight; k runs over the expert's rows, so the sum has a fixed order and
 * an expert without rows gets zeros. Both operands are MN-major; b may be gathered through row_token. k-tiles
 * past the expert's last row are zero in both operands, since 0 * NaN would be NaN.
 *
 * dw has the operands' dtype, or is float. A float dw can be accumulated into; an expert without rows then
 * keeps its own. */
#include "../dispatch.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {      /* one operand: rows of `extent` elements */
    const void *data; /* [rows, stride], from its first column on */
    int64_t extent, stride;
    const int32_t *row_token; /* [R] or NULL */
    const void *scores;       /* [num_slots] or NULL */
} Side;

typedef struct { /* dw[e] of one part of a: M is a.extent, N is b.extent, or the reverse */
    Side a, b;
    const int32_t *row_slot, *offs;
    void *dw; /* (E, a.extent, b.extent) */
    int64_t stride_expert, stride_a, stride_b;
    int64_t T, num_slots;
    int32_t E, R;
    bool accumulate; /* float dw alone */
} Wgrad;

template <typename T>
__device__ inline Operand<T> make_operand(const Side &side, const Wgrad &p, const T *const *origin,
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
__device__ inline const T *origin_of(const Side &side, int64_t mn, int64_t first_row) {
    int64_t offset = side.row_token ? 0 : first_row * side.stride;
    return mn < side.extent ? (const T *)side.data + offset + mn : nullptr;
}

template <class Tile, typename Out>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    wgrad_kernel(const __grid_constant__ Wgrad p) {
    using T = typename Tile::T;
    using Acc = typename Tile::Acc;
    constexpr bool MAY_ACCUMULATE = std::is_same_v<Out, float>;
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);

    /* Which expert, and which tile of its weight */
    unsigned tiles_a = (unsigned)((p.a.extent + Tile::BM - 1) / Tile::BM);
    unsigned tiles_b = (unsigned)((p.b.extent + Tile::BN - 1) / Tile::BN);
    unsigned num_tiles = tiles_a * tiles_b;
    int e = blockIdx.x / num_tiles, tile_a, tile_b;
    fused_moe_grouped_order(blockIdx.x % num_tiles, tiles_a, tiles_b, GROUP, &tile_a, &tile_b);
    int64_t first_a = (int64_t)tile_a * Tile::BM, first_b = (int64_t)tile_b * Tile::BN;
    const FusedMoeRows rows = fused_moe_expert_rows(p.offs, e, p.R);
    int first_row = rows.first, num_rows = rows.num;
    if (MAY_ACCUMULATE && p.accumulate && !num_rows) return;

    /* Main loop over the expert's rows */
    for_each_origin<Tile::BM, Tile>(
        [&](int i) { s.origin_a[i] = origin_of<T>(p.a, first_a + i, first_row); });
    for_each_origin<Tile::BN, Tile>(
        [&](int i) { s.origin_b[i] = origin_of<T>(p.b, first_b + i, first_row); });
    __syncthreads();
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, make_operand<T>(p.a, p, s.origin_a, first_row),
                   make_operand<T>(p.b, p, s.origin_b, first_row), num_rows);

    /* Epilogue */
    Out *dw = (Out *)p.dw + e * p.stride_expert;
    bool aligned = p.stride_b == 1 && p.stride_a % CHUNK == 0 && p.stride_expert % CHUNK == 0 &&
                   rows_are_aligned<Out>(p.dw, p.b.extent);
    auto epilogue = [&](int row, int chunk, const Acc *staging, const auto &old) {
        int64_t i = first_a + row, j = first_b + tile.warp_n() * WARP_N + chunk * CHUNK;
        if (row >= Tile::BM || i >= p.a.extent || j >= p.b.extent) return;
        Out *out = dw + i * p.stride_a + j * p.stride_b;
        Acc v[CHUNK];
        load_accumulators(v, staging + chunk * CHUNK);
        if constexpr (MAY_ACCUMULATE)
#pragma unroll
            for (int c = 0; c < CHUNK; c++) v[c] += old.v[c];
        if (aligned) {
            store_chunk<Out>(out, v, CHUNK, true);
        } else {
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                if (j + c < p.b.extent) out[c * p.stride_b] = from_accum<Out>(v[c]);
        }
    };
    /* The chunk of dw that is accumulated into, prefetched while the chunk before it is stored. */
    auto load_old = [&](int row, int chunk) {
        Pack<Out> old = {};
        int64_t i = first_a + row, j = first_b + tile.warp_n() * WARP_N + chunk * CHUNK;
        if (!p.accumulate || row >= Tile::BM || i >= p.a.extent || j >= p.b.extent) return old;
        const Out *src = dw + i * p.stride_a + j * p.stride_b;
        if (aligned) {
            old = *reinterpret_cast<const Pack<Out> *>(src);
        } else {
#pragma unroll
            for (int c = 0; c < CHUNK; c++)
                if (j + c < p.b.extent) old.v[c] = src[c * p.stride_b];
        }
        return old;
    };
    if constexpr (MAY_ACCUMULATE)
        for_each_chunk<WARP_N / CHUNK, true>(tile, s, epilogue, load_old);
    else
        for_each_chunk<WARP_N / CHUNK, true>(tile, s, epilogue);
}

/* --- launchers ------------------------------------------------------------------------------------------ */

bool is_vectorisable(const Side &side) {
    return (uintptr_t)side.data % 16 == 0 && side.stride % CHUNK == 0 && side.stride < INT32_MAX &&
           side.extent % CHUNK == 0;
}

template <typename T, typename Out>
int launch_wgrad(const Wgrad &p, void *stream) {
    auto launch_tile = [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = p.E * ceil_div(p.a.extent, Tile::BM) * ceil_div(p.b.extent, Tile::BN);
        return launch(wgrad_kernel<Tile, Out>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    };
    if constexpr (!is_half<T>)
        return launch_tile(SimtTile<T>());
    else if (!is_vectorisable(p.a) || !is_vectorisable(p.b) || p.b.scores)
        return launch_tile(TensorTile<T, false, false, false>());
    else if (p.a.scores)
        return launch_tile(TensorTile<T, false, false, true, true>());
    else
        return launch_tile(TensorTile<T, false, false, true>());
}

/* One launch per part. Side b is the one along which dw is dense, so that stores are vectorised. */
int run(const FusedMoeWgrad &p, void *stream) {
    if (p.accumulate && p.dw_dtype != FUSED_MOE_F32) return FUSED_MOE_UNSUPPORTED_DTYPE;
    size_t element = p.dtype == FUSED_MOE_F64 ? sizeof(double) : p.dtype == FUSED_MOE_F32 ? sizeof(float) : 2;
    for (int part = 0; part < 2; part++) {
        const FusedMoeWeight &dw = p.dw[part];
        if (!dw.data) continue;
        const char *columns = (const char *)p.a + (part ? p.M[0] * element : 0);
        Wgrad w = {};
        w.a = {columns, p.M[part], p.M[0] + p.M[1], nullptr, nullptr};
        w.b = {p.b, p.N, p.N, p.b_row_token, p.b_scores};
        w.row_slot = p.row_slot, w.offs = p.offs;
        w.dw = dw.data, w.stride_expert = dw.stride_expert, w.stride_a = dw.stride_out,
        w.stride_b = dw.stride_in;
        w.T = p.T, w.num_slots = p.T * p.K, w.E = p.E, w.R = (int32_t)p.R, w.accumulate = p.accumulate;
        /* TensorTile scales its first operand alone, even where stores are scalar then */
        if (w.b.scores || (dw.stride_in != 1 && dw.stride_out == 1)) {
            Side a = w.a;
            w.a = w.b, w.b = a;
            w.stride_a = dw.stride_in, w.stride_b = dw.stride_out;
        }
        int status = with_dtype(p.dtype, [&](auto t) {
            using T = decltype(t);
            if (p.dw_dtype == p.dtype) return launch_wgrad<T, T>(w, stream);
            if constexpr (is_half<T>)
                if (p.dw_dtype == FUSED_MOE_F32) return launch_wgrad<T, float>(w, stream);
            return (int)FUSED_MOE_UNSUPPORTED_DTYPE;
        });
        if (status != FUSED_MOE_OK) return status;
    }
    return FUSED_MOE_OK;
}

} // namespace

const Kernel<FusedMoeWgrad> wgrad = {nullptr, nullptr, run};

} // namespace fused_moe::sm80
