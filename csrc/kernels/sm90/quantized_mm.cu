/* grouped_mm of a quantised weight on Hopper: out[r] = a[r] b[e(r)]^T + bias[e(r)]. In backward the weight is
 * transposed, and its second packing is read.
 *
 * Roles and pipelines are gemm.cuh's, the weight weight_quantized.cuh's; here are the epilogue and the
 * launcher. */
#include "quantized_launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    Gemm<QuantizedParams> gemm;
    const void *bias; /* [E,M] or NULL */
    void *out;        /* [R,M]         */
    int32_t M;
} GroupedMM;

template <class Config>
struct Epilogue {
    const GroupedMM &p;

    template <int TOKENS>
    __device__ void store_swapped(float *d, const WorkTile &tile, int subtile, int warp,
                                  uint32_t staging) const {
        using T = typename Config::Out;
        int first = tile.first_column + SUBTILE * subtile + 16 * warp;
        if (first >= p.M) return;
        if (p.bias) add_bias_swapped<TOKENS>(d, (const T *)p.bias + (int64_t)tile.expert * p.M, first, p.M);
        T *out = (T *)p.out + (int64_t)tile.first_row * p.M + first;
        SkinnyWriter<Config::BM> writer(staging, 0, warp);
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

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    quantized_mm_kernel(const __grid_constant__ GroupedMM p) {
    persistent_gemm<Config>(p.gemm, Epilogue<Config>{p});
    zero_rows_past(p.gemm.tiles, (typename Config::Out *)p.out, p.M);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeGroupedMM &p, void *stream) {
    using T = typename Config::Out;
    GroupedMM q = {};
    q.bias = p.bias;
    q.out = p.out;
    q.M = (int32_t)p.M;
    auto &gemm = q.gemm;
    int status = set_rows_of_a<T>(gemm, 0, p.a, p.R, 0, p.N[0], p.N[0]);
    if (status == FUSED_MOE_OK)
        status = set_weight<Config>(gemm.weight, 0, packing_of(*p.b[0].quantized), p.E, 0, p.M);
    if (status != FUSED_MOE_OK) return status;
    gemm.num_k_tiles[0] = (int32_t)ceil_div(p.N[0], Config::COLUMNS);
    set_tiles(gemm, p, Config::BN);
    TileSource &tiles = gemm.tiles;
    tiles.has_tall = Config::HAS_TALL;
    tiles.last_is_half_n = (p.M - 1) % Config::BN < Config::BN / 2;
    return launch_persistent<Config, PlanningShared<Config>, quantized_mm_kernel<Config>>(q, stream, p.pdl);
}

int run(const FusedMoeGroupedMM &p, void *stream) {
    FusedMoeQuantizedWeight codes = packing_of(*p.b[0].quantized);
    if (is_by_column(codes)) /* in backward: one configuration, whatever the rows */
        return with_dequantizer<true>(p.dtype, codes, [&](auto dequantizer) {
            return launch<QuantizedConfig<decltype(dequantizer), false, Height::MANY>>(p, stream);
        });
    return with_dequantizer(p.dtype, codes, [&](auto dequantizer) {
        return with_quantized_config<decltype(dequantizer), false>(
            p.R, p.E, [&](auto config) { return launch<decltype(config)>(p, stream); });
    });
}

FusedMoeReason reason(const FusedMoeGroupedMM &p) {
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.R == 0) return FUSED_MOE_NO_ROWS;
    if (has_many_rows(p.R, p.E, p.b[0].quantized && p.b[0].quantized->transposed)) return FUSED_MOE_MANY_ROWS;
    if (p.M % CHUNK || p.N[0] % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.a) || !is_aligned(p.out) || !is_aligned(p.bias)) return FUSED_MOE_UNALIGNED;
    if (p.b[1].data || !is_readable_quantized(p.b[0])) return FUSED_MOE_STRIDES;
    return is_countable(p.R, p.E, p.M) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeGroupedMM> quantized_mm = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
