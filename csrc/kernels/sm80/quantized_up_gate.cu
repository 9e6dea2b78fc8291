/* up_gate of quantised weights as published, where experts have few rows. The kernel is up_gate.cuh's;
 * quantized_columns.cuh makes its B. */
#include "quantized_columns.cuh"
#include "up_gate.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeUpGate up;  /* without weights */
    QuantizedWeights w; /* w1 and w3 */
} QuantizedUpGate;

struct Weights {
    const QuantizedWeights &w;

    __device__ QuantizedRow origin(bool is_w3, int32_t expert, int64_t row) const {
        return quantized_row(w, is_w3, expert, row);
    }

    __device__ QuantizedOperand operand(const QuantizedRow *rows, const int64_t *) const {
        QuantizedOperand operand = w.operand;
        operand.row = rows;
        return operand;
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    quantized_up_gate_kernel(const __grid_constant__ QuantizedUpGate p) {
    up_gate_tile<Tile>(p.up, Weights{p.w});
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int run(const FusedMoeUpGate &p, void *stream) {
    QuantizedUpGate q = {};
    q.up = p;
    set_weight(q.w, 0, *p.w1.quantized);
    if (p.w3.data) set_weight(q.w, 1, *p.w3.quantized);
    int64_t R = p.row_map.R;
    int32_t E = p.row_map.E;
    return with_quantized_tile(R, E, *p.w1.quantized, p.dtype, [&](auto tile) {
        using Tile = decltype(tile);
        int columns = Tile::BN / (p.layout == FUSED_MOE_UNGATED ? 1 : 2);
        int64_t grid = max_row_tiles(R, E, Tile::BM) * ceil_div(p.F, columns);
        return launch(quantized_up_gate_kernel<Tile>, q, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

FusedMoeReason reason(const FusedMoeUpGate &p) {
    int64_t R = p.row_map.R;
    int32_t E = p.row_map.E;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if ((uintptr_t)p.x % 16) return FUSED_MOE_UNALIGNED;
    FusedMoeReason why = quantized_reason(p.w1, R, E, p.dtype);
    if (why != FUSED_MOE_RUNS || !p.w3.data) return why;
    why = quantized_reason(p.w3, R, E, p.dtype);
    if (why == FUSED_MOE_RUNS && !are_alike(*p.w1.quantized, *p.w3.quantized)) why = FUSED_MOE_STRIDES;
    return why;
}

} // namespace

const Kernel<FusedMoeUpGate> quantized_up_gate = {reason, nullptr, run};

} // namespace fused_moe::sm80
