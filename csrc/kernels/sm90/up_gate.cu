/* up_gate on Hopper: h = x[row_token] w1^T | w3^T + b and a = act(gate) up, in one GEMM.
 *
 * Roles and pipelines are gemm.cuh's, with A gathered; up_gate.cuh has the epilogue. It is not overlapped
 * with the next tile: with h and a to hold there are too few registers beside the accumulators
 * (docs/lab.md has what was tried). */
#include "up_gate.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <class Config, Columns columns, bool HAS_ADDEND>
__global__ void __launch_bounds__(Config::THREADS, Config::CTAS_PER_SM)
    up_gate_kernel(const __grid_constant__ UpGate p) {
    using Out = typename Config::Out;
    persistent_gemm<Config>(p.gemm, UpGateEpilogue<Out, typename Config::Bias, columns, HAS_ADDEND>{p});
    if (p.h) zero_rows_past(p.gemm.tiles, (Out *)p.h, p.H);
    zero_rows_past(p.gemm.tiles, (Out *)p.a, p.F);
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <class Config, Columns columns, bool HAS_ADDEND>
int launch(const FusedMoeUpGate &p, void *stream) {
    using Out = typename Config::Out;
    const FusedMoeRowMap &rows = p.row_map;
    UpGate q = {};
    int status = set_up_gate<Config, columns>(&q, p);
    DenseGemm &gemm = q.gemm;
    gemm.tiles.pdl = p.pdl;
    const Out *a = (const Out *)p.a, *h = (const Out *)p.h;
    if (status == FUSED_MOE_OK) status = ragged_map(&q.a_map, a, rows.R, q.F, q.F, WarpWriter::ROWS);
    if (status == FUSED_MOE_OK && h)
        status = columns == GATE_UP ? ragged_halves_map(&q.h_map, h, rows.R, q.F, WarpWriter::ROWS)
                                    : ragged_map(&q.h_map, h, rows.R, q.H, q.H, WarpWriter::ROWS);
    if (status != FUSED_MOE_OK) return status;
    return launch_persistent<Config, PlanningShared<Config>, up_gate_kernel<Config, columns, HAS_ADDEND>>(
        q, stream);
}

int run(const FusedMoeUpGate &p, void *stream) {
    return with_half(p.dtype, [&](auto t) {
        using T = decltype(t);
        auto with_layout = [&](auto config, auto has_addend) {
            using Config = decltype(config);
            return with_columns(p.layout, [&](auto columns) {
                constexpr Columns COLUMNS = columns.value;
                using Full = GemmConfig<T, Config::B_MAJOR, true>;
                using Chosen = std::conditional_t<has_kernel<Config, COLUMNS>(), Config, Full>;
                return launch<Chosen, COLUMNS, has_addend.value>(p, stream);
            });
        };
        /* Adapters of quantised weights: dequantised ones are K-major, and had too many rows for codes. */
        if (p.addend) return with_layout(GemmConfig<T, Major::K, true>(), std::true_type());
        return with_config<T, true>(p.w1.stride_in == 1, p.row_map.R, p.row_map.E, 2 * p.F, p.D,
                                    [&](auto config) { return with_layout(config, std::false_type()); });
    });
}

FusedMoeReason reason(const FusedMoeUpGate &p) {
    const FusedMoeWeight &w1 = p.w1, &w3 = p.w3;
    const FusedMoeRowMap &rows = p.row_map;
    if (!is_16_bit(p.dtype)) return FUSED_MOE_OTHER_DTYPE;
    if (rows.R == 0 || rows.T == 0) return FUSED_MOE_NO_ROWS;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if (p.D % CHUNK || p.F % CHUNK) return FUSED_MOE_WIDTH;
    for (const void *data : {p.x, p.addend, (const void *)p.h, (const void *)p.a, p.b1, p.b3})
        if (!is_aligned(data)) return FUSED_MOE_UNALIGNED;
    if (!is_readable(w1, w1.stride_out, w1.stride_in, rows.E)) return FUSED_MOE_STRIDES;
    if (p.addend && w1.stride_in != 1)
        return FUSED_MOE_STRIDES; /* no kernel adds it beside N-major weights */
    if (w3.data &&
        (!is_readable(w3, w3.stride_out, w3.stride_in, rows.E) || (w1.stride_in == 1) != (w3.stride_in == 1)))
        return FUSED_MOE_STRIDES;
    return is_countable(rows.R, rows.E, 2 * p.F) ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace

const Kernel<FusedMoeUpGate> up_gate = {reason, nullptr, run};

} // namespace sm90
} // namespace fused_moe
