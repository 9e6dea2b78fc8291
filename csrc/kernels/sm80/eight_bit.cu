/* up_gate and grouped_mm of int8 codes, by mma.sync on tensor cores:
 *
 *   h = (codes of x . codes of w) (x_scale w_scale) + b,  a = act(gate) up     in float32, a is rounded
 *   out = (codes of a . codes of w2) (a_scale w2_scale) + b2                   in float32, rounded
 *
 * The tiles are those of 16-bit elements, which are here pairs of codes (CodePair). Sums are int32 and so
 * exact: a row has the same bits in every tile. The dtype of biases and results is known at run time.
 *
 * A thread has the same columns in all of its rows, so it loads their scales and biases once. A row's scale
 * is prefetched one chunk ahead. */
#include "grouped_mm.cuh"
#include "up_gate.cuh"

namespace fused_moe::sm80 {
namespace {

typedef struct {
    const CodePair *codes; /* [E,out,pairs] */
    const float *scale;    /* [E,out], or [E] */
    int64_t out, pairs;
    bool has_row_scales;

    __device__ const CodePair *origin(int32_t expert, int64_t row) const {
        return codes + (expert * out + row) * pairs;
    }
    __device__ float scale_of(int32_t expert, int64_t row) const {
        return scale[has_row_scales ? expert * out + row : expert];
    }
} Weight;

/* --- 16-bit values whose dtype is known at run time ----------------------------------------------------- */

__device__ inline float load_half(const void *values, FusedMoeDtype dtype, int64_t i) {
    if (!values) return 0;
    return dtype == FUSED_MOE_F16 ? to_accum(((const __half *)values)[i])
                                  : to_accum(((const __nv_bfloat16 *)values)[i]);
}

__device__ inline void store_halves(void *values, FusedMoeDtype dtype, int64_t i, const float (&v)[CHUNK]) {
    if (dtype == FUSED_MOE_F16)
        store_chunk<__half>((__half *)values + i, v, CHUNK, true);
    else
        store_chunk<__nv_bfloat16>((__nv_bfloat16 *)values + i, v, CHUNK, true);
}

__device__ inline void zero_half_tail(const CtaWork &w, void *out, int64_t width, const int32_t *offs,
                                      int32_t E, int64_t R) {
    zero_tail(w, (uint16_t *)out, width, offs, E, R); /* zero bits are zero in both dtypes */
}

/* --- kernels -------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeUpGate up; /* without weights */
    const float *x_scale;
    Weight w1, w3;
} UpGate;

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    eight_bit_up_gate_kernel(const __grid_constant__ UpGate p) {
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    const FusedMoeRowMap &row_map = p.up.row_map;
    FusedMoeLayout layout = p.up.layout;
    bool gated = layout != FUSED_MOE_UNGATED;
    int warp_hidden = gated ? WARP_N / 2 : WARP_N, tile_hidden = warp_hidden * Tile::WARPS_N;
    int F = (int)p.up.F;

    /* Work tile, or zeros past the last row */
    CtaWork w = find_work<Tile::BM>(row_map.schedule, row_map.offs, row_map.E, row_map.R,
                                    (F + tile_hidden - 1) / tile_hidden);
    if (!w.tile.num_rows) {
        zero_half_tail(w, p.up.a, F, row_map.offs, row_map.E, row_map.R);
        return;
    }

    /* Operands: gathered rows, columns of gates and ups */
    auto token_of = [&](int i) -> int64_t { /* of row i of the tile, or -1 */
                                            int64_t row = w.tile.first_row + i, token = row;
                                            if (i >= w.tile.num_rows) return -1;
                                            if (row_map.row_token) token = row_map.row_token[row];
                                            return (uint64_t)token < (uint64_t)row_map.T ? token : -1;
    };
    int64_t pairs = p.w1.pairs;
    for_each_origin<Tile::BM, Tile>([&](int i) {
        int64_t token = token_of(i);
        s.origin_a[i] = token >= 0 ? (const CodePair *)p.up.x + token * pairs : nullptr;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        WeightRow b = weight_row(p.up, w.tile.n_tile, warp_hidden, tile_hidden, i);
        s.origin_b[i] = b.j < F ? (b.is_w3 ? p.w3 : p.w1).origin(w.tile.expert, b.row) : nullptr;
    });
    __syncthreads();

    /* Main loop */
    Operand<CodePair> operand_a = {s.origin_a}, operand_b = {s.origin_b};
    operand_a.stride_k = operand_b.stride_k = 1;
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, operand_a, operand_b, (int)pairs);

    /* Epilogue: scale, add the biases, activate, round, store */
    auto finish = [&](auto num_chunks) {
        constexpr int CHUNKS = decltype(num_chunks)::value;
        int j = w.tile.n_tile * tile_hidden + tile.warp_n() * warp_hidden + threadIdx.x % CHUNKS * CHUNK;
        Pair<float> scale = {}, bias = {};
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            int64_t row = layout == FUSED_MOE_INTERLEAVED ? 2 * (j + i) : j + i;
            int64_t up_row = layout == FUSED_MOE_INTERLEAVED ? row + 1
                             : layout == FUSED_MOE_HALVES    ? F + row
                                                             : row;
            const bool separate = layout == FUSED_MOE_SEPARATE;
            const Weight &ups = separate ? p.w3 : p.w1;
            const void *up_bias = separate ? p.up.b3 : p.up.b1;
            if (j >= F) continue;
            scale.gate[i] = p.w1.scale_of(w.tile.expert, row);
            bias.gate[i] = load_half(p.up.b1, p.up.dtype, w.tile.expert * p.w1.out + row);
            if (!gated) continue;
            scale.up[i] = ups.scale_of(w.tile.expert, up_row);
            bias.up[i] = load_half(up_bias, p.up.dtype, w.tile.expert * ups.out + up_row);
        }
        auto load_scale = [&](int row, int) {
            int64_t token = token_of(row);
            return token >= 0 ? p.x_scale[token] : 0.0f;
        };
        auto epilogue = [&](int row, int chunk, const float *staging, float row_scale) {
            if (row >= w.tile.num_rows || j >= F) return;
            Pair<float> q;
            if (layout == FUSED_MOE_INTERLEAVED) {
                load_pair<float>(q, layout, staging, nullptr, chunk * CHUNK, CHUNK, true);
            } else {
                load_accumulators(q.gate, staging + chunk * CHUNK);
                load_accumulators(q.up, staging + (chunk * CHUNK + warp_hidden) % WARP_N);
            }
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                q.gate[i] = fmaf(q.gate[i], row_scale * scale.gate[i], bias.gate[i]);
                q.up[i] = fmaf(q.up[i], row_scale * scale.up[i], bias.up[i]);
            }
            float a[CHUNK];
            activate<__half>(a, q, p.up.activation, gated); /* in float32: all 16-bit dtypes have the same */
            store_halves(p.up.a, p.up.dtype, (int64_t)(w.tile.first_row + row) * F + j, a);
        };
        for_each_chunk<CHUNKS, false>(tile, s, epilogue, load_scale);
    };
    if (gated)
        finish(std::integral_constant<int, WARP_N / 2 / CHUNK>());
    else
        finish(std::integral_constant<int, WARP_N / CHUNK>());
}

typedef struct {
    FusedMoeGroupedMM mm; /* without weights */
    const float *a_scale;
    Weight b;
} GroupedMM;

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    eight_bit_mm_kernel(const __grid_constant__ GroupedMM p) {
    extern __shared__ __align__(128) char memory[];
    auto &s = *reinterpret_cast<TileShared<Tile> *>(memory);
    int M = (int)p.mm.M;

    /* Work tile, or zeros past the last row */
    CtaWork w = find_work<Tile::BM>(p.mm.schedule, p.mm.offs, p.mm.E, p.mm.R, (M + Tile::BN - 1) / Tile::BN);
    if (!w.tile.num_rows) {
        zero_half_tail(w, p.mm.out, M, p.mm.offs, p.mm.E, p.mm.R);
        return;
    }

    /* Operands */
    int64_t first_col = (int64_t)w.tile.n_tile * Tile::BN, pairs = p.b.pairs;
    for_each_origin<Tile::BM, Tile>([&](int i) {
        const CodePair *row = (const CodePair *)p.mm.a + (w.tile.first_row + i) * pairs;
        s.origin_a[i] = i < w.tile.num_rows ? row : nullptr;
    });
    for_each_origin<Tile::BN, Tile>([&](int i) {
        s.origin_b[i] = first_col + i < M ? p.b.origin(w.tile.expert, first_col + i) : nullptr;
    });
    __syncthreads();

    /* Main loop */
    Operand<CodePair> operand_a = {s.origin_a}, operand_b = {s.origin_b};
    operand_a.stride_k = operand_b.stride_k = 1;
    Tile tile;
    tile.zero();
    tile.main_loop(s.stages, operand_a, operand_b, (int)pairs);

    /* Epilogue: scale, add the bias, round, store */
    constexpr int CHUNKS = WARP_N / CHUNK;
    int col = (int)first_col + tile.warp_n() * WARP_N + threadIdx.x % CHUNKS * CHUNK;
    float scale[CHUNK] = {}, bias[CHUNK] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (col >= M) continue;
        scale[i] = p.b.scale_of(w.tile.expert, col + i);
        bias[i] = load_half(p.mm.bias, p.mm.dtype, w.tile.expert * p.mm.M + col + i);
    }
    auto load_scale = [&](int row, int) {
        return row < w.tile.num_rows ? p.a_scale[w.tile.first_row + row] : 0.0f;
    };
    auto epilogue = [&](int row, int chunk, const float *staging, float row_scale) {
        if (row >= w.tile.num_rows || col >= M) return;
        float v[CHUNK];
        load_accumulators(v, staging + chunk * CHUNK);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) v[i] = fmaf(v[i], row_scale * scale[i], bias[i]);
        store_halves(p.mm.out, p.mm.dtype, (int64_t)(w.tile.first_row + row) * M + col, v);
    };
    for_each_chunk<CHUNKS, true>(tile, s, epilogue, load_scale);
}

/* --- launchers ------------------------------------------------------------------------------------------ */

Weight weight_of(const FusedMoeWeight &w) {
    const FusedMoeQuantizedWeight &q = *w.quantized;
    return {(const CodePair *)q.data, (const float *)q.scale, q.out, q.in / 2, q.block_out == 1};
}

/* Calls fn with the tile of a call: of few rows, in which many CTAs load weights, or with 128 columns, where
 * two CTAs per SM overlap epilogues. */
template <typename Fn>
int with_code_tile(int64_t R, int32_t E, Fn fn) {
    if (!schedule_override().no_tails && fused_moe_few_rows(R, E))
        return fn(FewRowsTile<DenseColumns<CodePair, true, 64>>());
    return fn(TensorTile<CodePair, true, true, true, false, 128>());
}

int run_up_gate(const FusedMoeEightBitUpGate &call, void *stream) {
    bool separate = call.up.layout == FUSED_MOE_SEPARATE, gated = call.up.layout != FUSED_MOE_UNGATED;
    int64_t R = call.up.row_map.R;
    int32_t E = call.up.row_map.E;
    UpGate p = {call.up, call.x_scale, weight_of(call.up.w1), {}};
    if (separate) p.w3 = weight_of(call.up.w3);
    return with_code_tile(R, E, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(R, E, Tile::BM) * ceil_div(call.up.F, Tile::BN / (gated ? 2 : 1));
        return launch(eight_bit_up_gate_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

int run_mm(const FusedMoeEightBitMM &call, void *stream) {
    int64_t R = call.down.R;
    int32_t E = call.down.E;
    GroupedMM p = {call.down, call.a_scale, weight_of(call.down.b[0])};
    return with_code_tile(R, E, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(R, E, Tile::BM) * ceil_div(call.down.M, Tile::BN);
        return launch(eight_bit_mm_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

/* Why a weight's GEMM with these operands does not run here. */
FusedMoeReason reason_of(const FusedMoeWeight &w, const void *rows, const void *out, FusedMoeDtype dtype) {
    const int64_t exact = 1 << 17; /* codes whose products' sum is below 2^31 */
    const FusedMoeQuantizedWeight &q = *w.quantized;
    bool half = dtype == FUSED_MOE_BF16 || dtype == FUSED_MOE_F16;
    if (!half || q.format != FUSED_MOE_FORMAT_int8 || q.scale_dtype != FUSED_MOE_F32)
        return FUSED_MOE_OTHER_DTYPE;
    if (q.transposed || q.tile_scales) return FUSED_MOE_STRIDES;
    if (q.in % FUSED_MOE_EIGHT_BIT_WIDTH || q.out % CHUNK) return FUSED_MOE_WIDTH;
    if ((uintptr_t)q.data % 16 || (uintptr_t)rows % 16 || (uintptr_t)out % 16) return FUSED_MOE_UNALIGNED;
    return q.in > exact ? FUSED_MOE_TOO_LARGE : FUSED_MOE_RUNS;
}

FusedMoeReason up_gate_reason(const FusedMoeEightBitUpGate &p) {
    FusedMoeReason reason = reason_of(p.up.w1, p.up.x, p.up.a, p.up.dtype);
    if (reason == FUSED_MOE_RUNS && p.up.layout == FUSED_MOE_SEPARATE)
        reason = reason_of(p.up.w3, p.up.x, p.up.a, p.up.dtype);
    return reason == FUSED_MOE_RUNS && p.up.F % CHUNK ? FUSED_MOE_WIDTH : reason;
}

FusedMoeReason mm_reason(const FusedMoeEightBitMM &p) {
    return reason_of(p.down.b[0], p.down.a, p.down.out, p.down.dtype);
}

} // namespace

const Kernel<FusedMoeEightBitUpGate> eight_bit_up_gate = {up_gate_reason, nullptr, run_up_gate};
const Kernel<FusedMoeEightBitMM> eight_bit_mm = {mm_reason, nullptr, run_mm};

} // namespace fused_moe::sm80
