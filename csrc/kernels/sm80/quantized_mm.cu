/* grouped_mm of a quantised weight as published, where experts have few rows: out[r] = a[r] b[e(r)]^T +
 * bias[e(r)]. The kernel is grouped_mm.cuh's; quantized_columns.cuh makes its B. */
#include "grouped_mm.cuh"
#include "quantized_columns.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeGroupedMM mm; /* without weights */
    QuantizedWeights b;
} QuantizedMM;

struct Weights {
    const QuantizedWeights &b;

    __device__ QuantizedRow origin(int, int32_t expert, int64_t row) const {
        return quantized_row(b, 0, expert, row);
    }

    __device__ QuantizedOperand operand(int, const QuantizedRow *rows) const {
        QuantizedOperand operand = b.operand;
        operand.row = rows;
        return operand;
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    quantized_mm_kernel(const __grid_constant__ QuantizedMM p) {
    grouped_mm_tile<Tile>(p.mm, Weights{p.b});
}

/* --- launcher ------------------------------------------------------------------------------------------- */

int run(const FusedMoeGroupedMM &p, void *stream) {
    QuantizedMM q = {};
    q.mm = p;
    set_weight(q.b, 0, *p.b[0].quantized);
    return with_quantized_tile(p.R, p.E, *p.b[0].quantized, p.dtype, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.R, p.E, Tile::BM) * ceil_div(p.M, Tile::BN);
        return launch(quantized_mm_kernel<Tile>, q, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

FusedMoeReason reason(const FusedMoeGroupedMM &p) {
    if (p.b[1].data) return FUSED_MOE_STRIDES;
    if ((uintptr_t)p.a % 16) return FUSED_MOE_UNALIGNED;
    return quantized_reason(p.b[0], p.R, p.E, p.dtype);
}

} // namespace

const Kernel<FusedMoeGroupedMM> quantized_mm = {reason, nullptr, run};

} // namespace fused_moe::sm80
