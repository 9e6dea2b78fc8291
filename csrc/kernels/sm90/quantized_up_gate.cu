/* up_gate of quantised weights on Hopper: h = x w1^T | x w3^T + b + addend and a = act(gate) up. Kernels that
 * keep h or add the addend are apart (HAS_H): decoding has neither, and fetching code takes its time.
 *
 * Roles and pipelines are gemm.cuh's, the weight weight_quantized.cuh's, the epilogue
 * quantized_up_gate.cuh's. */
#include "quantized_up_gate.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Config, bool HAS_H>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    quantized_up_gate_kernel(const __grid_constant__ QuantizedUpGate p) {
    persistent_gemm<Config>(p.gemm, QuantizedUpGateEpilogue<Config, HAS_H>{p});
    if (HAS_H && p.h) zero_rows_past(p.gemm.tiles, (typename Config::Out *)p.h, p.H);
    zero_rows_past(p.gemm.tiles, (typename Config::Out *)p.a, p.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config, bool HAS_H>
int launch(const FusedMoeUpGate &p, void *stream) {
    QuantizedUpGate q = {};
    int status = set_up_gate<Config>(&q, p);
    if (status != FUSED_MOE_OK) return status;
    q.gemm.tiles.pdl = p.pdl;
    return launch_persistent<Config, PlanningShared<Config>, quantized_up_gate_kernel<Config, HAS_H>>(q,
                                                                                                      stream);
}

int run(const FusedMoeUpGate &p, void *stream) {
    return with_dequantizer(p.dtype, *p.w1.quantized, [&](auto dequantizer) {
        using Dequantizer = decltype(dequantizer);
        /* fp16, and other scales, have fewer kernels: those with h do without it, too. */
        constexpr bool IS_USUAL =
            std::is_same_v<typename Dequantizer::T, __nv_bfloat16> && !Dequantizer::OTHER_SCALES;
        int32_t tile_rows = quantized_tile_rows(p.row_map.R, p.row_map.E);
        bool has_h = p.h || p.addend;
        if (tile_rows == 16) {
            if constexpr (IS_USUAL)
                if (!has_h) return launch<QuantizedConfig<Dequantizer, true, Height::FEW>, false>(p, stream);
            return launch<QuantizedConfig<Dequantizer, true, Height::FEW>, true>(p, stream);
        }
        /* Tall tiles have no registers left for h, and those of 64 rows few. */
        if (has_h || (Dequantizer::OTHER_SCALES && tile_rows > 64))
            return launch<QuantizedConfig<Dequantizer, true, Height::MANY>, true>(p, stream);
        if constexpr (Dequantizer::OTHER_SCALES)
            return launch<QuantizedConfig<Dequantizer, true, Height::SOME>, false>(p, stream);
        else
            return with_quantized_config<Dequantizer, true>(
                tile_rows, [&](auto config) { return launch<decltype(config), false>(p, stream); });
    });
}

FusedMoeReason reason(const FusedMoeUpGate &p) {
    const FusedMoeRowMap &rows = p.row_map;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (rows.R == 0 || rows.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if (has_many_rows(rows.R, rows.E, false)) return FUSED_MOE_MANY_ROWS;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.x, p.addend, (const void *)p.h, (const void *)p.a, p.b1, p.b3})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    if (!is_readable_quantized(p.dtype, p.w1)) return FUSED_MOE_STRIDES;
    if (p.w3.data && (!is_readable_quantized(p.dtype, p.w3) || !are_alike(*p.w1.quantized, *p.w3.quantized)))
        return FUSED_MOE_STRIDES;
    if (p.layout == FUSED_MOE_HALVES && p.F % SUBTILE) return FUSED_MOE_STRIDES; /* ups begin within a tile */
    return is_countable(rows.R, rows.E, 2 * p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeUpGate> quantized_up_gate = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
