/* quantize_weight: a weight's codes in blocks of 128 x 128, and those of its transpose, in one pass.
 *
 * A CTA has a block (columns.cuh). What a row is depends on the weight's strides: where M's is the smaller
 * one, the weight is read as its transpose, and the two results change places. */
#include "columns.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {
namespace {

constexpr int THREADS = 32 * TILE_WARPS;

/* Matrices (rows, columns) of an expert. */
typedef struct {
    const void *data[2]; /* part 1 follows part 0 along the rows, or along the columns */
    int64_t stride_expert[2], stride_row[2], stride_column[2]; /* of columns mostly 1 */
    int32_t blocks;                                            /* of part 0 in that direction */
    bool along_rows;
    int64_t rows, columns;    /* of both weights together */
    uint8_t *codes, *codes_t; /* each may be NULL, with its scales */
    float *scale, *scale_t;
} QuantizeWeight;

/* Eight columns of a row. VECTORS: they are contiguous, and begin at a multiple of 16 bytes. */
template <typename T, bool VECTORS>
__device__ inline void load_columns(float (&v)[CHUNK], const T *src, int64_t stride_column) {
    if constexpr (!VECTORS) {
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[j] = to_accum(src[j * stride_column]);
    } else if constexpr (sizeof(T) == 2) {
        widen<__nv_bfloat16>(v, ld_global_v4(src, true));
    } else {
        const uint4 low = ld_global_v4(src, true), high = ld_global_v4(src + 4, true);
        const uint32_t bits[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[j] = __uint_as_float(bits[j]);
    }
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(THREADS, 2)
    quantize_weight_kernel(const __grid_constant__ QuantizeWeight q) {
    __shared__ alignas(128) uint8_t columns[COLUMNS_BYTES];
    __shared__ uint32_t peaks[TILE_WARPS];
    const int64_t expert = blockIdx.z, row_blocks = gridDim.y, column_blocks = gridDim.x;
    int row_block = blockIdx.y, column_block = blockIdx.x;
    const int first = lane_row(), chunk = lane_chunk(), warp = threadIdx.x / 32;
    int &of_parts = q.along_rows ? row_block : column_block;
    const int part = of_parts >= q.blocks;
    if (part) of_parts -= q.blocks;
    const T *src = (const T *)q.data[part] + expert * q.stride_expert[part] +
                   (row_block * TILE_ROWS + first) * q.stride_row[part] +
                   (column_block * TILE_COLUMNS + CHUNK * chunk) * q.stride_column[part];
    float v[2][LANE_ROWS][CHUNK];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++)
            load_columns<T, VECTORS>(v[half][i],
                                     src + i * q.stride_row[part] + half * SUBTILE * q.stride_column[part],
                                     q.stride_column[part]);
    uint32_t peak = 0;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) peak = max(peak, fused_moe_magnitude(v[half][i][j]));
    peak = __reduce_max_sync(~0u, peak);
    if (threadIdx.x % 32 == 0) peaks[warp] = peak;
    __syncthreads();
    peak = __reduce_max_sync(~0u, peaks[threadIdx.x % TILE_WARPS]);
    const float scale = fused_moe_scale_of(peak, fused_moe_largest_code(FUSED_MOE_CODE_E4M3), false);
    const float inverse = 1 / scale;
    if (threadIdx.x == 0) {
        if (q.codes) q.scale[(expert * row_blocks + blockIdx.y) * column_blocks + blockIdx.x] = scale;
        if (q.codes_t) q.scale_t[(expert * column_blocks + blockIdx.x) * row_blocks + blockIdx.y] = scale;
    }
    const float factor[LANE_ROWS] = {inverse, inverse, inverse, inverse};
    uint8_t *codes = q.codes + (expert * q.rows + (int64_t)blockIdx.y * TILE_ROWS + first) * q.columns +
                     (int64_t)blockIdx.x * TILE_COLUMNS + CHUNK * chunk;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[CHUNK];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            if (!q.codes) break;
            *(uint2 *)(codes + i * q.columns + half * SUBTILE) = chunk_of_e4m3(v[half][i], inverse);
        }
        make_column_words(words, v[half], factor);
        store_column_words(shared_address(columns), half, first, words);
    }
    if (!q.codes_t) return;
    __syncthreads();
    uint8_t *codes_t = q.codes_t + (expert * q.columns + (int64_t)blockIdx.x * TILE_COLUMNS) * q.rows +
                       (int64_t)blockIdx.y * TILE_ROWS;
    for (int i = threadIdx.x; i < TILE_COLUMNS * TILE_ROWS / 16; i += THREADS) {
        const int column = i / 8, sixteen = i % 8;
        const uint32_t from = shared_address(columns) + column / CHUNK * GROUP_PITCH +
                              column % CHUNK * TILE_ROWS + 16 * sixteen;
        st_global_v4(codes_t + column * q.rows + 16 * sixteen, ld_shared_v4(from));
    }
}

template <typename T>
int launch(const QuantizeWeight &q, int32_t E, void *stream) {
    bool has_vectors = true;
    for (int i = 0; i < 2; i++) {
        const auto fits = [](int64_t stride) { return stride % (16 / (int64_t)sizeof(T)) == 0; };
        has_vectors &= !q.data[i] || (q.stride_column[i] == 1 && fits(q.stride_row[i]) &&
                                      fits(q.stride_expert[i]) && (uintptr_t)q.data[i] % 16 == 0);
    }
    const dim3 grid((unsigned)(q.columns / TILE_COLUMNS), (unsigned)(q.rows / TILE_ROWS), (unsigned)E);
    auto kernel = has_vectors ? quantize_weight_kernel<T, true> : quantize_weight_kernel<T, false>;
    kernel<<<grid, THREADS, 0, (cudaStream_t)stream>>>(q);
    return launch_status();
}

} // namespace

int quantize_weight(const FusedMoeQuantizeWeight &p, void *stream) {
    const bool is_transposed = p.part[0].stride_in > p.part[0].stride_out;
    QuantizeWeight q = {};
    for (int i = 0; i < 2; i++) {
        const FusedMoeWeight &w = p.part[i];
        q.data[i] = w.data;
        q.stride_expert[i] = w.stride_expert;
        q.stride_row[i] = is_transposed ? w.stride_in : w.stride_out;
        q.stride_column[i] = is_transposed ? w.stride_out : w.stride_in;
    }
    const int64_t M = p.M[0] + p.M[1];
    q.blocks = (int32_t)(p.M[0] / FUSED_MOE_BLOCK);
    q.along_rows = !is_transposed;
    q.rows = is_transposed ? p.N : M;
    q.columns = is_transposed ? M : p.N;
    q.codes = (uint8_t *)(is_transposed ? p.codes_t : p.codes);
    q.codes_t = (uint8_t *)(is_transposed ? p.codes : p.codes_t);
    q.scale = is_transposed ? p.scale_t : p.scale;
    q.scale_t = is_transposed ? p.scale : p.scale_t;
    return p.dtype == FUSED_MOE_F32 ? launch<float>(q, p.E, stream) : launch<__nv_bfloat16>(q, p.E, stream);
}

} // namespace sm90
} // namespace fused_moe
