/* Split-K: a tile with a long k is computed as slices along k, and the last arriver reduces them.
 *
 * Each slice stores its accumulators in memory and increments the tile's semaphore. The last arriver,
 * whichever slice it is, adds all slices in their order, so the bits are the same in every run. Each
 * warpgroup's 64 rows are reduced independently, with their own semaphore and memory.
 *
 * The last warpgroup of the grid zeroes the semaphores for the next call. A tile's last arriver could not: in
 * a wrong plan, a tile may have slices that never arrive, or too many. */
#pragma once

#include "ptx.cuh"

namespace fused_moe {
namespace sm90 {

constexpr int ACCUMULATOR_VECTORS = 32 * 128; /* float4s of a warpgroup's 64x256 accumulators */
constexpr int64_t ACCUMULATOR_BYTES = ACCUMULATOR_VECTORS * (int64_t)sizeof(float4);

/* A warpgroup calls it with the accumulators d of slice `slice` of num_slices. vectors_of(i) is slice i's
 * memory. Returns true to the last arriver, with the sum of all slices in d. */
template <typename VectorsOf>
__device__ inline bool reduce_slices(float (&d)[128], int slice, int num_slices, VectorsOf vectors_of,
                                     uint32_t *semaphore, int barrier) {
    int thread = threadIdx.x % 128;
    float4 *slice_vectors = vectors_of(slice) + thread;
#pragma unroll
    for (int i = 0; i < 32; i++)
        __stcg(slice_vectors + 128 * i, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
    __threadfence();
    barrier_sync(barrier, 128);
    bool is_last = thread == 0 && (int)atomicAdd(semaphore, 1u) == num_slices - 1;
    if (!barrier_or(barrier, 128, is_last)) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    for (int other = 0; other < num_slices; other++) {
        const float4 *vectors = vectors_of(other) + thread;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            float4 v = __ldcg(vectors + 128 * i);
            d[4 * i] += v.x, d[4 * i + 1] += v.y, d[4 * i + 2] += v.z, d[4 * i + 3] += v.w;
        }
    }
    return true;
}

/* Each of the grid's `warpgroups` calls it after its last tile. */
__device__ inline void reset_semaphores(uint32_t *finished, uint32_t warpgroups, uint32_t *semaphores,
                                        int num_semaphores) {
    /* Thread 0 did its warpgroup's atomicAdds, and its atomicInc comes after them: no barrier is needed. */
    if (threadIdx.x % 128 >= 32) return;
    int lane = threadIdx.x % 32;
    uint32_t before = 0;
    __threadfence();
    if (lane == 0) before = atomicInc(finished, warpgroups - 1); /* wraps to zero by itself */
    if (__shfl_sync(~0u, before, 0) != warpgroups - 1) return;
    __threadfence();
    for (int i = lane; i < num_semaphores; i += 32) semaphores[i] = 0;
}

} // namespace sm90
} // namespace fused_moe
