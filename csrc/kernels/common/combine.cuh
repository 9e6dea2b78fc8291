/* A token's sum over its slots, and the shared experts' row. permute.cu and both sides in one launch
 * (sm90/experts.cuh) share it, so both give the same bits. */
#pragma once

#include "numeric.cuh"

namespace fused_moe {

__device__ inline float sigmoid(float x) {
    return 1 / (1 + expf(-x));
}
__device__ inline double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

/* The score of a token's row of the shared experts. */
template <typename Acc>
__device__ inline Acc shared_score(const void *shared_gate, int64_t t) {
    return shared_gate ? sigmoid(((const Acc *)shared_gate)[t]) : Acc(1);
}

/* sum += score * row */
template <typename T>
__device__ inline void add_row(Accum<T> (&sum)[CHUNK], Accum<T> score, const Pack<T> &row) {
#pragma unroll
    for (int c = 0; c < CHUNK; c++) sum[c] += score * to_accum(row.v[c]);
}

} // namespace fused_moe
