/* sum_peers: unpermute, whose rows are in the memory of several ranks' GPUs.
 *
 * One warp per token. A lane has 64 bytes of a row in flight, so an SM's warps have more than NVLink takes
 * in the time that a load waits for it. Rows are added in the order of k: the result is deterministic. */
#include "combine.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_peers_kernel(const __grid_constant__ FusedMoeSumPeers p, bool aligned) {
    using Acc = Accum<T>;
    constexpr int CHUNKS = is_half<T> ? 4 : 2;
    int lane = threadIdx.x % 32;
    int64_t t = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    if (t >= p.T) return;
    for (int64_t first = lane * CHUNK; first < p.D; first += CHUNKS * 32 * CHUNK) {
        Acc sum[CHUNKS][CHUNK] = {};
        for (int64_t slot = t * p.K; slot < (t + 1) * p.K; slot++) {
            uint32_t i = p.index[slot];
            if (i >= (uint32_t)p.N * (uint32_t)p.C) continue;
            Acc score = p.scores ? ((const Acc *)p.scores)[slot] : Acc(1);
            const T *row = (const T *)p.rows[i / (uint32_t)p.C] + i % (uint32_t)p.C * p.D;
            Pack<T> pack[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                int64_t j = first + c * 32 * CHUNK;
                if (j < p.D) load_pack(pack[c], row + j, (int)min((int64_t)CHUNK, p.D - j), aligned);
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                if (first + c * 32 * CHUNK < p.D) add_row(sum[c], score, pack[c]);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            int64_t j = first + c * 32 * CHUNK;
            if (j < p.D)
                store_chunk<T>((T *)p.out + t * p.D + j, sum[c], (int)min((int64_t)CHUNK, p.D - j), aligned);
        }
    }
}

template <typename T>
int sum_peers(const FusedMoeSumPeers &p, void *stream) {
    bool aligned = rows_are_aligned<T>(p.out, p.D);
    for (int n = 0; n < p.N; n++) aligned = aligned && rows_are_aligned<T>(p.rows[n], p.D);
    int64_t grid = ceil_div(p.T, WARPS);
    if (!grid) return FUSED_MOE_OK;
    sum_peers_kernel<T><<<(unsigned)grid, THREADS, 0, (cudaStream_t)stream>>>(p, aligned);
    return launch_status();
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_sum_peers(const FusedMoeSumPeers *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return sum_peers<decltype(t)>(*p, stream); });
}
