/* One operand of a tile's product, as lines along the reduction k.
 *
 * A line is a row of A or a column of B. Its number at k is origin[line][map(k) * stride_k], times the
 * scale where there is one, rounded as the dtype rounds. Lines without an origin, k past depth and rows
 * that a map leads astray are zero. Two orders in memory can be copied 16 bytes at a time: numbers
 * consecutive along k (stride_k = 1), or along the lines. */
#pragma once

#include "numeric.cuh"

namespace fused_moe {

template <typename T>
struct Operand {
    const T *const *origin;     /* shared [lines]; NULL entries: zero lines */
    const Accum<T> *line_scale; /* shared [lines], or NULL */
    int64_t stride_k;
    const int64_t *line_stride; /* shared [lines] instead of stride_k, one by one only; or NULL */
    const int32_t *row;         /* map(k) = row[k] < num_rows; NULL: map(k) = k */
    int64_t num_rows;
    const Accum<T> *scores; /* scale of k: scores[slot[k]], slot[k] < num_slots; or NULL */
    const int32_t *slot;
    int64_t num_slots;

    /* map(k), or -1 where there is nothing */
    __device__ int row_of(int k, int depth) const {
        if (k >= depth) return -1;
        return !row ? k : (uint64_t)(int64_t)row[k] < (uint64_t)num_rows ? row[k] : -1;
    }

    __device__ Accum<T> scale(int line, int k) const {
        Accum<T> s = line_scale ? line_scale[line] : Accum<T>(1);
        if (scores) {
            int64_t i = slot[k];
            s *= (uint64_t)i < (uint64_t)num_slots ? scores[i] : Accum<T>(0);
        }
        return s;
    }

    __device__ T at(int line, int k, int depth) const {
        const T *p = origin[line];
        int64_t at = row_of(k, depth);
        if (!p || at < 0) return from_accum<T>(0);
        T x = p[at * (line_stride ? line_stride[line] : stride_k)];
        return line_scale || scores ? from_accum<T>(to_accum(x) * scale(line, k)) : x;
    }
};

} // namespace fused_moe
