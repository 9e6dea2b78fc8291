/* grouped_mm of a quantised weight on Hopper: out[r] = a[r] b[e(r)]^T + bias[e(r)]. In backward the weight is
 * transposed, and its second packing is read.
 *
 * Roles and pipelines are gemm.cuh's, the weight weight_quantized.cuh's, the epilogue quantized_mm.cuh's. */
#include "quantized_mm.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    quantized_mm_kernel(const __grid_constant__ QuantizedMM p) {
    persistent_gemm<Config>(p.gemm, QuantizedMMEpilogue<Config>{p});
    zero_rows_past(p.gemm.tiles, (typename Config::Out *)p.out, p.M);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config>
int launch(const FusedMoeGroupedMM &p, void *stream) {
    using T = typename Config::Out;
    QuantizedMM q = {};
    auto &gemm = q.gemm;
    int status = set_rows_of_a<T>(gemm, 0, p.a, p.R, 0, p.N[0], p.N[0]);
    if (status == FUSED_MOE_OK) status = set_grouped_mm<Config>(&q, p);
    if (status != FUSED_MOE_OK) return status;
    bool spreads =
        Config::FEW_ROWS && fused_moe_quantized_down_spreads(p.R, p.E, p.M, current_device().num_sms);
    set_tiles(gemm, p, spreads ? Config::BN / 2 : Config::BN);
    TileSource &tiles = gemm.tiles;
    tiles.has_tall = Config::HAS_TALL;
    tiles.all_are_half_n = spreads;
    tiles.last_is_half_n = !spreads && (p.M - 1) % Config::BN < Config::BN / 2;
    using Memory = PlanningShared<Config>;
    constexpr auto kernel = quantized_mm_kernel<Config>;
    if constexpr (Config::FEW_ROWS) { /* with more than half of an SM's memory no two CTAs share one */
        constexpr size_t HALF = SM_SHARED_BYTES / 2;
        static_assert(Config::CTAS_PER_SM * (sizeof(Memory) + CTA_SHARED_BYTES) <= SM_SHARED_BYTES);
        Launch how = {num_ctas(spreads ? 1 : Config::CTAS_PER_SM),
                      Config::THREADS,
                      1,
                      spreads ? HALF : sizeof(Memory),
                      p.pdl,
                      HALF};
        return launch_dependent<kernel>(q, how, stream);
    } else {
        return launch_persistent<Config, Memory, kernel>(q, stream, p.pdl);
    }
}

int run(const FusedMoeGroupedMM &p, void *stream) {
    FusedMoeQuantizedWeight codes = packing_of(*p.b[0].quantized);
    if (is_by_column(codes)) /* in backward: one configuration, whatever the rows */
        return with_dequantizer<true>(p.dtype, codes, [&](auto dequantizer) {
            return launch<QuantizedConfig<decltype(dequantizer), false, Height::MANY>>(p, stream);
        });
    return with_dequantizer(p.dtype, codes, [&](auto dequantizer) {
        using Dequantizer = decltype(dequantizer);
        int32_t tile_rows = quantized_tile_rows(p.R, p.E);
        if (tile_rows == 16) return launch<QuantizedConfig<Dequantizer, false, Height::FEW>>(p, stream);
        return with_quantized_config<Dequantizer, false>(
            tile_rows, [&](auto config) { return launch<decltype(config)>(p, stream); });
    });
}

FusedMoeReason reason(const FusedMoeGroupedMM &p) {
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (p.R == 0) return FUSED_MOE_NO_ROWS;
    if (has_many_rows(p.R, p.E, p.b[0].quantized && p.b[0].quantized->transposed)) return FUSED_MOE_MANY_ROWS;
    if (p.M % CHUNK || p.N[0] % CHUNK) return FUSED_MOE_WIDTH;
    if (!is_aligned(p.a) || !is_aligned(p.out) || !is_aligned(p.bias)) return FUSED_MOE_UNALIGNED;
    if (p.b[1].data || !is_readable_quantized(p.dtype, p.b[0])) return FUSED_MOE_STRIDES;
    return is_countable(p.R, p.E, p.M) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeGroupedMM> quantized_mm = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
