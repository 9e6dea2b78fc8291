/* bias_grad: db[e] = sum over the rows of e of s rows[r].
 *
 * One CTA per expert and 32 columns; warp i adds rows i, i + WARPS, ... Sums are double, since an expert may
 * have many rows. Their order is fixed, so the result is deterministic. */
#include "launch.cuh"
#include "numeric.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 8, COLUMNS = 32;

template <typename T>
__global__ void __launch_bounds__(32 * WARPS) bias_grad_kernel(const __grid_constant__ FusedMoeBiasGrad p) {
    using Acc = Accum<T>;
    __shared__ double sums[WARPS][COLUMNS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t column_blocks = (p.N + COLUMNS - 1) / COLUMNS, col = blockIdx.x % column_blocks * COLUMNS + lane;
    int e = (int)(blockIdx.x / column_blocks);
    int64_t first = max(0, e ? p.offs[e - 1] : 0), end = min((int64_t)p.offs[e], p.R);
    double sum = 0;
    for (int64_t r = first + warp; r < end && col < p.N; r += WARPS) {
        int64_t row = p.row_token ? p.row_token[r] : r, slot = p.scores ? p.row_slot[r] : 0;
        if ((uint64_t)row >= (uint64_t)p.T || (uint64_t)slot >= (uint64_t)(p.T * p.K)) continue;
        Acc score = p.scores ? ((const Acc *)p.scores)[slot] : Acc(1);
        sum += (double)score * to_accum(((const T *)p.rows)[row * p.N + col]);
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || col >= p.N) return;
    for (int i = 1; i < WARPS; i++) sum += sums[i][lane];
    ((T *)p.db)[e * p.N + col] = from_accum<T>((Acc)sum);
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_bias_grad(const FusedMoeBiasGrad *p, void *stream) {
    int64_t grid = p->E * ceil_div(p->N, COLUMNS);
    return with_dtype(p->dtype, [&](auto t) {
        return launch(bias_grad_kernel<decltype(t)>, *p, grid, 32 * WARPS, 0, stream);
    });
}
