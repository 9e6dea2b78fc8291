/* up_gate of quantised weights as they are published, where experts have few rows, by coded_columns.cuh. */
#include "coded_columns.cuh"
#include "up_gate.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeUpGate up; /* but for its weights */
    CodedWeights w;    /* w1 and w3 */
} CodesUpGate;

struct Weights {
    const CodedWeights &w;

    __device__ CodeRow origin(bool is_w3, int32_t expert, int64_t row) const {
        return code_row(w, is_w3, expert, row);
    }

    __device__ CodedOperand operand(const CodeRow *rows, const int64_t *) const {
        CodedOperand operand = w.operand;
        operand.row = rows;
        return operand;
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    codes_up_gate_kernel(const __grid_constant__ CodesUpGate p) {
    up_gate_tile<Tile>(p.up, Weights{p.w});
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int run(const FusedMoeUpGate &p, void *stream) {
    CodesUpGate q = {};
    q.up = p;
    set_codes(q.w, 0, *p.w1.quantized);
    if (p.w3.data) set_codes(q.w, 1, *p.w3.quantized);
    int64_t R = p.row_map.R;
    int32_t E = p.row_map.E;
    return with_coded_tile(R, E, *p.w1.quantized, p.dtype, [&](auto tile) {
        using Tile = decltype(tile);
        int columns = Tile::BN / (p.layout == FUSED_MOE_UNGATED ? 1 : 2);
        int64_t grid = max_row_tiles(R, E, Tile::BM) * ceil_div(p.F, columns);
        return launch(codes_up_gate_kernel<Tile>, q, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

FusedMoeReason reason(const FusedMoeUpGate &p) {
    int64_t R = p.row_map.R;
    int32_t E = p.row_map.E;
    if (p.scores) return FUSED_MOE_SCORED_INPUT;
    if ((uintptr_t)p.x % 16) return FUSED_MOE_UNALIGNED;
    FusedMoeReason why = codes_reason(p.w1, R, E, p.dtype);
    if (why != FUSED_MOE_RUNS || !p.w3.data) return why;
    why = codes_reason(p.w3, R, E, p.dtype);
    if (why == FUSED_MOE_RUNS && !are_alike(*p.w1.quantized, *p.w3.quantized)) why = FUSED_MOE_STRIDES;
    return why;
}

} // namespace

const Kernel<FusedMoeUpGate> quantized_up_gate = {reason, nullptr, run};

} // namespace fused_moe::sm80
