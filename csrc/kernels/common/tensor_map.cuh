/* Tensor maps on the host: how TMA finds a box of a matrix in global memory. For sm_90 and newer.
 *
 * Boxes are one swizzle span wide: 128 bytes of the contiguous dimension, swizzled by 128 bytes. Those of
 * quantised weights have no swizzle (sm90/weight_quantized.cuh). Reads outside the tensor give zeros, writes
 * outside it are dropped. The driver's encoder is looked up at run time, since libcuda is not linked. */
#pragma once

#include <cudaTypedefs.h>
#include <cuda_fp8.h>

#include "launch.cuh"
#include "numeric.cuh"

namespace fused_moe {

/* The contiguous dimension's extent in one row of a swizzled box. */
constexpr int SWIZZLE_BYTES = 128;
template <typename T>
constexpr int SWIZZLE_ELEMENTS = SWIZZLE_BYTES / sizeof(T);

/* Shared address of 16-byte chunk `chunk` of row `row` of the swizzled box at `box`, a multiple of 1024. */
__device__ inline uint32_t swizzled(uint32_t box, int row, int chunk) {
    return box + SWIZZLE_BYTES * row + 16 * (chunk ^ row % 8);
}

/* Elements of k in a k-tile: a K-major one is one box wide. */
template <typename T>
constexpr int K_TILE = SWIZZLE_ELEMENTS<T>;

/* Rows of M or N in a subtile: the unit of swizzled shared memory, loads, stores and descriptors. */
constexpr int SUBTILE = 64, SUBTILE_BYTES = SUBTILE * SWIZZLE_BYTES;

/* The dimension of an operand along which its elements are contiguous: k, or M or N. */
enum class Major { K, MN };

inline CUtensorMapDataType map_dtype(__nv_bfloat16) {
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
inline CUtensorMapDataType map_dtype(__half) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}
inline CUtensorMapDataType map_dtype(float) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

inline CUtensorMapDataType map_dtype(__nv_fp8_e4m3) {
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}
inline CUtensorMapDataType map_dtype(int8_t) {
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

/* A map of a tensor whose dimension 0 is contiguous; strides in bytes for the dimensions after it. */
int encode_tensor_map(CUtensorMap *map, CUtensorMapDataType dtype, int rank, const void *data,
                      const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                      CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B);

/* Matrix (rows, width), rows `pitch` elements apart, in boxes of box_rows rows: coordinates (column, row). */
template <typename T>
int matrix_map(CUtensorMap *map, const T *data, int64_t rows, int64_t width, int64_t pitch, int box_rows) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)(rows > 0 ? rows : 1)};
    const uint64_t strides[] = {pitch * sizeof(T)};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<T>, (uint32_t)box_rows};
    return encode_tensor_map(map, map_dtype(T()), 2, data, sizes, strides, box);
}

/* Ragged maps: static maps for stores that end at any row. Dimension 1 counts box_rows rows, dimension 2
 * shifts them: with coordinates (column, box_rows - n, r + n) a box is stored from row r on, and TMA drops
 * what is past its first n <= box_rows rows. The base is box_rows rows before the matrix, and no store's
 * coordinates select an element before it. For stores only: loads through such maps read illegal addresses
 * (docs/lab.md). */
template <typename T>
int ragged_map(CUtensorMap *map, const T *data, int64_t rows, int64_t width, int64_t pitch, int box_rows) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)box_rows, (uint64_t)rows + 1};
    const uint64_t strides[] = {pitch * sizeof(T), pitch * sizeof(T)};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<T>, (uint32_t)box_rows, 1};
    return encode_tensor_map(map, map_dtype(T()), 3, data - box_rows * pitch, sizes, strides, box);
}

/* The same for rows of two halves of `width` elements, in boxes of both halves: the last coordinate is the
 * half. Strides need not grow with the dimension (seen with driver 580). */
template <typename T>
int ragged_halves_map(CUtensorMap *map, const T *data, int64_t rows, int64_t width, int box_rows) {
    const int64_t pitch = 2 * width;
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)box_rows, (uint64_t)rows + 1, 2};
    const uint64_t strides[] = {pitch * sizeof(T), pitch * sizeof(T), width * sizeof(T)};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<T>, (uint32_t)box_rows, 1, 2};
    return encode_tensor_map(map, map_dtype(T()), 4, data - box_rows * pitch, sizes, strides, box);
}

/* Weight (E, N, k). Major::K: boxes of box_n rows of N, coordinates (k, n, expert). Major::MN: boxes of one
 * subtile, coordinates (n, k, expert). */
template <typename T>
int weight_map(CUtensorMap *map, const FusedMoeWeight &w, Major major, int64_t stride_n, int64_t stride_k,
               int32_t E, int64_t N, int64_t k, int box_n) {
    bool k_major = major == Major::K;
    const uint64_t sizes[] = {(uint64_t)(k_major ? k : N), (uint64_t)(k_major ? N : k), (uint64_t)E};
    const uint64_t strides[] = {(k_major ? stride_n : stride_k) * sizeof(T),
                                E > 1 ? w.stride_expert * sizeof(T) : 16};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<T>, (uint32_t)(k_major ? box_n : K_TILE<T>), 1};
    return encode_tensor_map(map, map_dtype(T()), 3, w.data, sizes, strides, box);
}

/* Two weights of the same K-major strides, in boxes of 8 `eights` rows of N of each, paired: eight rows of
 * `first`, which is before `second` in memory, then the same eight of `second`. Coordinates (k, 0, 0, n / 8,
 * expert). Strides need not grow with the dimension, as in ragged_halves_map. */
template <typename T>
int paired_map(CUtensorMap *map, const FusedMoeWeight &first, const FusedMoeWeight &second, int32_t E,
               int64_t N, int64_t k, int eights) {
    const int64_t apart = (const T *)second.data - (const T *)first.data;
    const uint64_t sizes[] = {(uint64_t)k, CHUNK, 2, (uint64_t)N / CHUNK, (uint64_t)E};
    const uint64_t strides[] = {first.stride_out * sizeof(T), apart * sizeof(T),
                                CHUNK * first.stride_out * sizeof(T),
                                (E > 1 ? first.stride_expert : CHUNK) * sizeof(T)};
    const uint32_t box[] = {SWIZZLE_ELEMENTS<T>, CHUNK, 2, (uint32_t)eights, 1};
    return encode_tensor_map(map, map_dtype(T()), 5, first.data, sizes, strides, box);
}

} // namespace fused_moe
