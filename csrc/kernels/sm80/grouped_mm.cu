/* Grouped GEMM: out[r] = sum_i a[r, part i] b[i][e(r)]^T + bias[e(r)].
 *
 * One CTA per work tile (grouped_mm.cuh). Weights are strided, so this kernel computes the forward GEMMs, the
 * gradient of their rows, and dx = dgate w1 + dup w3 (two parts in the same accumulators). A weight's strides
 * decide whether it is loaded K-major or MN-major. */
#include "grouped_mm.cuh"

namespace fused_moe::sm80 {
namespace {

/* --- kernel --------------------------------------------------------------------------------------------- */

template <typename T>
struct Weights {
    const FusedMoeGroupedMM &p;

    __device__ const T *origin(int part, int32_t expert, int64_t row) const {
        const FusedMoeWeight b = part ? p.b[1] : p.b[0];
        return (const T *)b.data + expert * b.stride_expert + row * b.stride_out;
    }

    __device__ Operand<T> operand(int part, const T *const *rows) const {
        Operand<T> operand = {rows};
        operand.stride_k = part ? p.b[1].stride_in : p.b[0].stride_in;
        return operand;
    }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::CTAS_PER_SM)
    grouped_mm_kernel(const __grid_constant__ FusedMoeGroupedMM p) {
    grouped_mm_tile<Tile>(p, Weights<typename Tile::T>{p});
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T>
int launch_grouped_mm(const FusedMoeGroupedMM &p, void *stream) {
    bool a_k_major = (uintptr_t)p.a % 16 == 0 && p.N[0] % CHUNK == 0 && p.N[1] % CHUNK == 0;
    Major b = major_of<T>(p.b[0], p.b[0].stride_out, p.b[0].stride_in, p.M, p.N[0]);
    if (p.b[1].data && major_of<T>(p.b[1], p.b[1].stride_out, p.b[1].stride_in, p.M, p.N[1]) != b)
        b = Major::none;
    return with_tile_of_rows<T>(p.R, p.E, a_k_major, b, [&](auto tile) {
        using Tile = decltype(tile);
        int64_t grid = max_row_tiles(p.R, p.E, Tile::BM) * ceil_div(p.M, Tile::BN);
        return launch(grouped_mm_kernel<Tile>, p, grid, Tile::THREADS, shared_bytes<Tile>(), stream);
    });
}

int run(const FusedMoeGroupedMM &p, void *stream) {
    return with_dtype(p.dtype, [&](auto t) { return launch_grouped_mm<decltype(t)>(p, stream); });
}

} // namespace

const Kernel<FusedMoeGroupedMM> grouped_mm = {nullptr, nullptr, run};

} // namespace fused_moe::sm80
