/* quantize_rows: codes of 8 bits and a scale for each row (eight_bit.h). A CTA has a row, which it reads once:
 * its threads keep what they have loaded until the peak is known. */
#include "../../eight_bit.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

#include <cuda_fp8.h>

namespace fused_moe {

/* --- kernel --------------------------------------------------------------------------------------------- */

constexpr int MOST_VECTORS = 8; /* of eight elements, that a thread keeps */

/* The expert of a row: the first whose rows end after it. */
static __device__ int expert_of(const FusedMoeRowMap &map, int row) {
    int low = 0, high = map.E - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (map.offs[middle] > row)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Four codes as a word. */
static __device__ uint32_t word_of(FusedMoeCode code, const float *v, float inverse) {
    if (code == FUSED_MOE_CODE_E4M3) {
        uint32_t low = __nv_cvt_float2_to_fp8x2({v[0] * inverse, v[1] * inverse}, __NV_SATFINITE, __NV_E4M3);
        uint32_t high = __nv_cvt_float2_to_fp8x2({v[2] * inverse, v[3] * inverse}, __NV_SATFINITE, __NV_E4M3);
        return low | high << 16;
    }
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int q = min(max(__float2int_rn(v[i] * inverse), -127), 127);
        word |= (uint32_t)(q & 255) << 8 * i;
    }
    return word;
}

template <typename T>
__global__ void quantize_rows_kernel(const __grid_constant__ FusedMoeQuantizeRows p) {
    __shared__ uint32_t peaks[32];
    __shared__ int expert;
    const FusedMoeRowMap &map = p.row_map;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    griddepcontrol_wait();
    if (p.pdl.lets_next_start) griddepcontrol_launch_dependents();
    int64_t num_rows = map.offs ? num_rows_of(map.offs, map.E, map.R) : map.R;
    for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        int token = map.row_token ? map.row_token[row] : (int)row;
        if ((uint32_t)token >= (uint64_t)map.T) token = 0; /* a wrong plan */
        const uint4 *x = (const uint4 *)((const T *)p.x + token * p.D);
        float v[MOST_VECTORS][8];
        uint32_t peak = 0;
        if (p.smooth && threadIdx.x == 0) expert = expert_of(map, (int)row);
        if (p.smooth) __syncthreads();
        float score = p.scores ? ((const float *)p.scores)[map.row_slot[row]] : 1;
#pragma unroll
        for (int i = 0; i < MOST_VECTORS; i++) {
            int at = threadIdx.x + i * blockDim.x;
            if (at * 8 >= p.D) break;
            uint4 loaded = __ldg(x + at);
            const T *elements = (const T *)&loaded;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[i][j] = to_accum(elements[j]);
                if (p.scores) v[i][j] = to_accum(from_accum<T>(v[i][j] * score));
                if (p.smooth) v[i][j] /= p.smooth[expert * p.D + at * 8 + j];
                peak = max(peak, fused_moe_magnitude(v[i][j]));
            }
        }
#pragma unroll
        for (int other = 16; other; other /= 2) peak = max(peak, __shfl_xor_sync(~0u, peak, other));
        if (blockDim.x > 32) {
            if (lane == 0) peaks[warp] = peak;
            __syncthreads();
            peak = lane < blockDim.x / 32 ? peaks[lane] : 0;
#pragma unroll
            for (int other = 16; other; other /= 2) peak = max(peak, __shfl_xor_sync(~0u, peak, other));
            __syncthreads(); /* before the next row's peaks */
        }
        float scale = fused_moe_scale_of(peak, fused_moe_largest_code(p.code), p.power_of_two);
        float inverse = 1 / scale;
        if (threadIdx.x == 0) p.scale[row] = scale;
        uint2 *codes = (uint2 *)((uint8_t *)p.codes + row * p.D);
#pragma unroll
        for (int i = 0; i < MOST_VECTORS; i++) {
            int at = threadIdx.x + i * blockDim.x;
            if (at * 8 >= p.D) break;
            codes[at] = {word_of(p.code, v[i], inverse), word_of(p.code, v[i] + 4, inverse)};
        }
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

/* Threads that have two vectors each, or in wide rows up to MOST_VECTORS. */
static int threads_of(int64_t D) {
    int64_t vectors = ceil_div(D, 8), threads = ceil_div(vectors, 2);
    if (threads > 256) threads = 256;
    while (threads * MOST_VECTORS < vectors) threads *= 2;
    return (int)ceil_div(threads, 32) * 32;
}

template <typename T>
static int launch_rows(const FusedMoeQuantizeRows &p, void *stream) {
    int threads = threads_of(p.D);
    int64_t ctas = (int64_t)current_device().num_sms * (2048 / threads);
    Launch how = {p.row_map.R < ctas ? p.row_map.R : ctas, threads, 1, 0, p.pdl};
    return launch_dependent<quantize_rows_kernel<T>>(p, how, stream);
}

} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_quantize_rows(const FusedMoeQuantizeRows *p, void *stream) {
    if (p->D % 16 || p->D > 1024 * 8 * MOST_VECTORS) return FUSED_MOE_UNSUPPORTED_EIGHT_BIT;
    switch (p->dtype) {
    case FUSED_MOE_BF16: return launch_rows<__nv_bfloat16>(*p, stream);
    case FUSED_MOE_F16: return launch_rows<__half>(*p, stream);
    default: return FUSED_MOE_UNSUPPORTED_DTYPE;
    }
}
