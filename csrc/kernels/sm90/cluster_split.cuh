/* Split-K over a cluster, for measurements alone: FUSED_MOE_SCHEDULE=split_k=2, or 4.
 *
 * The CTAs of a cluster compute one tile of few rows, each a slice of k. The others send their accumulators to
 * the first CTA's shared memory, which adds the slices in order and stores. The bits are those of no other tile,
 * so that a call's results would depend on its number of rows: nothing but the environment turns it on
 * (docs/lab/decode.md has what it gains). */
#pragma once

#include "ptx.cuh"

namespace fused_moe {
namespace sm90 {

/* k-tiles [first, first + num) of n are slice `slice` of `slices`. */
struct KSlice {
    int first, num;
};

template <int slices>
__device__ inline KSlice k_slice_of(int slice, int n) {
    if constexpr (slices == 1) return {0, n};
    int first = slice * n / slices;
    return {first, (slice + 1) * n / slices - first};
}

/* Of a CTA with one consumer warpgroup and up to ROWS accumulators a thread. */
template <int SLICES, int ROWS>
struct ClusterSplit {
    float sums[SLICES - 1][ROWS][128]; /* [the other CTAs, accumulators, threads]: the first CTA's */
    uint64_t full;                     /* the first CTA's: all sums are there                       */
    uint64_t empty;                    /* another CTA's: its sums have been read                    */

    __device__ void init() {
        mbarrier_init(shared_address(&full), 128 * (SLICES - 1));
        mbarrier_init(shared_address(&empty), 128);
    }

    /* The consumer warpgroup calls it for its n-th tile. True for the first CTA, which then has the sum in d. */
    template <int count>
    __device__ bool add(float (&d)[count], int slice, uint32_t n) {
        static_assert(count <= ROWS, "accumulators of a thread");
        int thread = threadIdx.x % 128;
        if (slice > 0) {
            mbarrier_wait_cluster(shared_address(&empty), (n & 1) ^ 1);
            uint32_t there = mapa(shared_address(&sums[slice - 1][0][thread]), 0);
#pragma unroll
            for (int i = 0; i < count; i++) st_shared_cluster(there + i * (int)sizeof(sums[0][0]), d[i]);
            mbarrier_arrive_cluster(mapa(shared_address(&full), 0));
            return false;
        }
        mbarrier_wait_cluster(shared_address(&full), n & 1);
        for (int other = 0; other < SLICES - 1; other++) {
#pragma unroll
            for (int i = 0; i < count; i++) d[i] += sums[other][i][thread];
            mbarrier_arrive_cluster(mapa(shared_address(&empty), other + 1));
        }
        return true;
    }
};

template <int ROWS>
struct ClusterSplit<1, ROWS> {};

} // namespace sm90
} // namespace fused_moe
