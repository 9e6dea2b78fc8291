/* What weight gradients of 16 and of 8 bits share: how experts are split along k, and stores of dw. */
#pragma once

#include "launch.cuh"
#include "wgmma.cuh"

namespace fused_moe {
namespace sm90 {

/* Fills half of a subtile in f32: 64 rows of 32 of d's 64 columns. */
template <bool TRANSPOSED>
__device__ inline void fill_subtile_f32(uint32_t subtile, int warp, int half, const float *d) {
    int lane = threadIdx.x % 32;
    if (TRANSPOSED && warp / 2 != half) return;
#pragma unroll
    for (int i = 0; i < (TRANSPOSED ? 32 : 16); i++) {
        int n = TRANSPOSED ? i : i + 16 * half; /* d[n] is at this row and column of the accumulators: */
        int row = 16 * warp + lane / 4 + n / 2 % 2 * 8, column = n / 4 * 8 + lane % 4 * 2 + n % 2;
        if (TRANSPOSED) {
            int a_column = column;
            column = row % 32, row = a_column;
        } else {
            column %= 32;
        }
        st_shared(swizzled(subtile, row, column / 4) + column % 4 * 4, d[n]);
    }
}

/* --- host ----------------------------------------------------------------------------------------------- */

typedef struct {
    FusedMoeWgradOrder order;
    int64_t rows;      /* of a tile's slice, at most; R if no expert is split */
    int64_t num_slots; /* for the slices' accumulators */
} Slices;

inline Slices slices_of(int64_t R, int32_t E, int64_t weight_tiles, int k_tile) {
    int32_t rows = slice_rows_of(R, E);
    int32_t per_tile = fused_moe_slices_per_tile(R, rows, weight_tiles, num_ctas(), k_tile);
    Slices s = {{(int32_t)weight_tiles, rows, per_tile}, R > 0 ? R : 1, 0};
    if (per_tile) s.rows = (int64_t)per_tile * rows;
    if (per_tile) s.num_slots = fused_moe_num_split_slots(R, s.rows);
    return s;
}

/* The map of a gradient in its own strides: coordinates (contiguous dimension, other dimension, expert). */
template <typename Out>
int gradient_map(CUtensorMap *map, const FusedMoeWeight &dw, bool transposed, int64_t M, int64_t N,
                 int32_t E) {
    const uint64_t sizes[] = {(uint64_t)(transposed ? N : M), (uint64_t)(transposed ? M : N), (uint64_t)E};
    const uint64_t strides[] = {(transposed ? dw.stride_out : dw.stride_in) * sizeof(Out),
                                (E > 1 ? dw.stride_expert : CHUNK) * sizeof(Out)};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<Out>, SUBTILE, 1};
    return encode_tensor_map(map, map_dtype(Out()), 3, dw.data, sizes, strides, box);
}

} // namespace sm90
} // namespace fused_moe
