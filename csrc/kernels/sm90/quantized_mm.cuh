/* What a tile of grouped_mm of a quantised weight becomes, and its parameters: of quantized_mm.cu, and of
 * quantized_experts.cu. */
#pragma once

#include "quantized_launch.cuh"

namespace fused_moe {
namespace sm90 {

typedef struct {
    Gemm<QuantizedParams> gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M]         */
    int32_t M;
} QuantizedMM;

template <class Config>
struct QuantizedMMEpilogue {
    const QuantizedMM &p;

    template <int TOKENS>
    __device__ void store_swapped(float *d, const WorkTile &tile, int subtile, int warp,
                                  uint32_t staging) const {
        using T = typename Config::Out;
        int first = tile.first_column + SUBTILE * subtile + 16 * warp;
        if (first >= p.M) return;
        if (p.bias) add_bias_swapped<TOKENS>(d, (const T *)p.bias + (int64_t)tile.expert * p.M, first, p.M);
        T *out = (T *)p.out + (int64_t)tile.first_row * p.M + first;
        /* A warp keeps to its quarter, as in up_gate: in one launch others may be in up_gate's epilogue. */
        constexpr int UNUSED = (Config::STAGING_BYTES - SkinnyWriter<Config::BM>::BYTES) / 4;
        static_assert(UNUSED >= 0);
        SkinnyWriter<Config::BM> writer(staging + UNUSED * warp, 0, warp);
        writer.template store_swapped<TOKENS>(d, out, p.M, tile.num_rows, p.M - first);
    }

    template <int TOKENS, bool>
    __device__ void store_lines(float *d, const WorkTile &tile, int subtile, int row, int warp,
                                const typename Config::Lines &lines) const {
        using T = typename Config::Out;
        int first = tile.first_column + SUBTILE * subtile;
        if (first >= p.M || row >= tile.num_rows) return;
        if (p.bias)
            add_bias_swapped<TOKENS>(d, (const T *)p.bias + (int64_t)tile.expert * p.M, first + 16 * warp,
                                     p.M);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t words[TOKENS / 8];
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++)
                words[j] = pack<T>(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            lines.template fill<TOKENS>(2 * warp + half, words);
        }
        T *out = (T *)p.out + (int64_t)(tile.first_row + row) * p.M + first;
        lines.template copy_out<TOKENS>(out, p.M, tile.num_rows - row, p.M - first);
    }
};

/* --- host ----------------------------------------------------------------------------------------------- */

/* All but A's rows and the tiles. */
template <class Config>
int set_grouped_mm(QuantizedMM *q, const FusedMoeGroupedMM &p) {
    q->bias = p.bias;
    q->out = p.out;
    q->M = (int32_t)p.M;
    q->gemm.num_k_tiles[0] = (int32_t)ceil_div(p.N[0], Config::COLUMNS);
    return set_weight<Config>(q->gemm.weight, 0, packing_of(*p.b[0].quantized), p.E, 0, p.M);
}

} // namespace sm90
} // namespace fused_moe
