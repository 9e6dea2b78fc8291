/* up_gate: h = x[row_token] w1^T | w3^T + b and a = act(gate) up, as one grouped GEMM (up_gate.cuh). */
#include "up_gate.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <typename T>
struct Weights {
    const FusedMoeUpGate &p;

    __device__ const T *origin(bool is_w3, int32_t expert, int64_t row) const {
        const FusedMoeWeight *w = is_w3 ? &p.w3 : &p.w1;
        return (const T *)w->data + expert * w->stride_expert + row * w->stride_out;
    }

    __device__ Operand<T> operand(const T *const *rows, const int64_t *strides) const {
        Operand<T> operand = {rows};
        operand.stride_k = p.w1.stride_in;
        if (p.w3.data && p.w3.stride_in != p.w1.stride_in) operand.strides_k = strides;
        return operand;
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    up_gate_kernel(const __grid_constant__ FusedMoeUpGate p) {
    up_gate_tile<Tile>(p, Weights<typename Tile::T>{p});
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
int launch_up_gate(const FusedMoeUpGate &p, void *stream) {
    bool gated = p.layout != FUSED_MOE_UNGATED;
    bool packed = p.layout == FUSED_MOE_HALVES || p.layout == FUSED_MOE_INTERLEAVED;
    bool a_k_major = (uintptr_t)p.x % 16 == 0 && p.D % CHUNK == 0;
    int64_t w1_rows = packed ? 2 * p.F : p.F;
    Major b = major_of<T>(p.w1, p.w1.stride_out, p.w1.stride_in, w1_rows, p.D);
    if (p.w3.data && (major_of<T>(p.w3, p.w3.stride_out, p.w3.stride_in, p.F, p.D) != b ||
                      p.w3.stride_in != p.w1.stride_in))
        b = Major::none;
    if (b == Major::MN && p.F % CHUNK) b = Major::none; /* ups start at F */
    auto launch_tile = [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid =
            max_row_tiles(p.row_map.R, p.row_map.E, Tile::BM) * ceil_div(p.F, Tile::BN / (gated ? 2 : 1));
        return launch(up_gate_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    };
    return with_tile_of_rows<T, true>(p.row_map.R, p.row_map.E, a_k_major, b, launch_tile,
                                      p.scores != nullptr);
}

int run(const FusedMoeUpGate &p, void *stream) {
    return with_dtype(p.dtype, [&](auto t) { return launch_up_gate<decltype(t)>(p, stream); });
}

} // namespace

const Kernel<FusedMoeUpGate> up_gate = {nullptr, nullptr, run};

} // namespace fused_moe::sm80
