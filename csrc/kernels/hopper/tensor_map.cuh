/* Tensor maps: how the copy engine finds a box of a matrix in memory.
 *
 * Built where:
 *   operands (A without a gather, weights)  on the host, static for a call: a map of the aligned matrix or of
 *   and wgrad's results                     (experts, lines, k). It goes to the kernel in its parameters.
 *   results and wgrad's operands            on the device, since they depend on the routing: one map for
 *                                           every expert, whose rows end where the expert's do, so that
 *                                           the copy engine itself clips what a tile has past them. The
 *                                           planning kernel (plan.cu) edits a template's address and row
 *                                           count into the workspace and releases it to the maps' proxy;
 *                                           the warp that draws queue acquires it for the warps that store,
 *                                           and wgrad's copying warp for itself.
 *
 * The driver's encoder is looked up at run time: the library does not link libcuda. */
#pragma once

#include <cudaTypedefs.h>

#include "../launch.cuh"
#include "../numeric.cuh"
#include "wgmma.cuh"

namespace fused_moe {

constexpr size_t MAP_BYTES = sizeof(CUtensorMap);

inline CUtensorMapDataType map_dtype(__nv_bfloat16) {
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
inline CUtensorMapDataType map_dtype(__half) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

inline CUtensorMapDataType map_dtype(float) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

/* A map of a tensor whose dimension 0 is dense; strides in bytes for the dimensions after it. Boxes are
 * 128 bytes wide and swizzled by 128 bytes; reading outside gives zeros. */
int encode_tensor_map(CUtensorMap *map, CUtensorMapDataType dtype, int rank, const void *data,
                      const uint64_t *sizes, const uint64_t *strides, const uint32_t *box);

/* Matrix (rows, width), rows `pitch` numbers apart, in boxes of box_rows x 64. */
template <typename T>
int matrix_map(CUtensorMap *map, const T *data, int64_t rows, int64_t width, int64_t pitch,
               int box_rows) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)(rows > 0 ? rows : 1)};
    const uint64_t strides[] = {pitch * sizeof(T)};
    const uint32_t box[] = {SUBTILE, (uint32_t)box_rows};
    return encode_tensor_map(map, map_dtype(T()), 2, data, sizes, strides, box);
}

/* Rows of two halves of `width` numbers, in boxes of box_rows x 64 of both halves: coordinates
 * (column, row, half). Rows are dimension 1, as in matrix_map, since plan.cu sets its size. Strides need not grow
 * with the dimension (seen with driver 580). */
template <typename T>
int halves_map(CUtensorMap *map, const T *data, int64_t rows, int64_t width, int box_rows) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)(rows > 0 ? rows : 1), 2};
    const uint64_t strides[] = {2 * width * sizeof(T), width * sizeof(T)};
    const uint32_t box[] = {SUBTILE, (uint32_t)box_rows, 2};
    return encode_tensor_map(map, map_dtype(T()), 3, data, sizes, strides, box);
}

/* Weight (E, lines, k). MAJOR_K: boxes of 128 lines x 64 numbers of k, coordinates (k, line, expert).
 * MAJOR_MN: boxes of 64 lines x 64 numbers of k, coordinates (line, k, expert). */
template <typename T>
int weight_map(CUtensorMap *map, const FusedMoeWeight &w, Major major, int64_t stride_line,
               int64_t stride_k, int32_t E, int64_t lines, int64_t k) {
    bool along_k = major == MAJOR_K;
    const uint64_t sizes[] = {(uint64_t)(along_k ? k : lines), (uint64_t)(along_k ? lines : k),
                              (uint64_t)E};
    const uint64_t strides[] = {(along_k ? stride_line : stride_k) * sizeof(T),
                                (E > 1 ? w.stride_expert : CHUNK) * sizeof(T)};
    const uint32_t box[] = {SUBTILE, (uint32_t)(along_k ? 2 * SUBTILE : SUBTILE), 1};
    return encode_tensor_map(map, map_dtype(T()), 3, w.data, sizes, strides, box);
}

} // namespace fused_moe
