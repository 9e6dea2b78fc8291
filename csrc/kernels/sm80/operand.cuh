/* One operand of a tile's GEMM: A (M x k) or B (N x k). mn is the index along M or N, k the reduction's.
 *
 * Element (mn, k) is origin[mn][row(k) * stride_k], times a scale where there is one, rounded to the dtype.
 * Elements are zero where the origin is NULL, where k is past the depth, and where `row` is out of range. Two
 * layouts are vectorisable, that is, can be loaded in 16-byte chunks: K-major (stride_k = 1) and MN-major
 * (consecutive mn). */
#pragma once

#include <type_traits>

#include "../common/numeric.cuh"

namespace fused_moe::sm80 {

constexpr int WARP_N = 64; /* columns of every tile that one warp computes */

template <typename T>
struct Operand {
    const T *const *origin;   /* shared [extent]; NULL entries: zeros                         */
    const Accum<T> *scale_mn; /* shared [extent], or NULL                                     */
    int64_t stride_k;         /* for every mn                                                 */
    const int64_t *strides_k; /* shared [extent]: one for each mn instead; or NULL            */
    const int32_t *row;       /* row(k) = row[k] < num_rows; NULL: row(k) = k                 */
    const Accum<T> *scores;   /* scale of k: scores[slot[k]], where slot[k] < num_slots; or NULL */
    const int32_t *slot;
    int64_t num_rows, num_slots;

    /* row(k), or -1 where the elements of k are zero */
    __device__ int row_of(int k, int depth) const {
        if (k >= depth) return -1;
        return !row ? k : (uint64_t)(int64_t)row[k] < (uint64_t)num_rows ? row[k] : -1;
    }

    __device__ Accum<T> scale(int mn, int k) const {
        Accum<T> s = scale_mn ? scale_mn[mn] : Accum<T>(1);
        if (scores) {
            int64_t i = slot[k];
            s *= (uint64_t)i < (uint64_t)num_slots ? scores[i] : Accum<T>(0);
        }
        return s;
    }

    __device__ T element(int mn, int k, int depth) const {
        const T *p = origin[mn];
        int64_t r = row_of(k, depth);
        if (!p || r < 0) return from_accum<T>(0);
        T x = p[r * (strides_k ? strides_k[mn] : stride_k)];
        return scale_mn || scores ? from_accum<T>(to_accum(x) * scale(mn, k)) : x;
    }
};

/* Two int8 codes, neighbours along k: an operand's element of 16 bits. MMAs take the bytes of their operands
 * from the same lanes in both dtypes, so a tile stores and loads it like any other. */
struct CodePair {
    int8_t codes[2];
};

/* Tensor cores add CodePairs in int32, which is exact, and 16-bit floats in float. */
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, CodePair>, int32_t, float>;

/* d (16x8) += a (16x16) b (16x8) of elements T. */
template <typename T>
__device__ inline void multiply_add(Sum<T> (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, CodePair>)
        mma_m16n8k32(d, a, b0, b1);
    else
        mma_m16n8k16(d, a, b0, b1, T());
}

} // namespace fused_moe::sm80
