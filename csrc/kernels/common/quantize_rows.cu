/* quantize_rows: codes of 8 bits and a scale for each row (eight_bit.h). One or more warps have a row, which
 * they read once: a lane keeps what it has loaded until the peak is known. Where rows are copies of tokens, a
 * token is read once, and its codes are written to all of its rows. */
#include "../../eight_bit.h"
#include "launch.cuh"
#include "numeric.cuh"
#include "ptx.cuh"
#include "schedule.cuh"

#include <cuda_fp8.h>

namespace fused_moe {

/* --- kernel --------------------------------------------------------------------------------------------- */

/* A lane keeps 4 or 8 vectors of eight elements, so rows have at most 16,384. */
constexpr int CTA_WARPS = 8, CTAS_OF_SM = 4;

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

/* Four codes as a word. int8: 1.5 2^23 plus the value, rounded, has the code in its lowest byte. */
static __device__ uint32_t word_of(FusedMoeCode code, const float *v, float inverse) {
    if (code == FUSED_MOE_CODE_E4M3) {
        uint32_t low = __nv_cvt_float2_to_fp8x2({v[0] * inverse, v[1] * inverse}, __NV_SATFINITE, __NV_E4M3);
        uint32_t high = __nv_cvt_float2_to_fp8x2({v[2] * inverse, v[3] * inverse}, __NV_SATFINITE, __NV_E4M3);
        return low | high << 16;
    }
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        bits[i] = fused_moe_float_bits(__fadd_rn(__fmul_rn(v[i], inverse), 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

typedef struct {
    FusedMoeQuantizeRows p;
    int32_t warps;    /* of a row: a power of two */
    bool from_tokens; /* a token's codes go to its rows */
} QuantizeRows;

/* A lane's part of a row: vectors lane, lane + lanes, .. of eight elements. */
template <typename T, int VECTORS>
struct RowPart {
    uint4 loaded[VECTORS];
    int32_t row; /* rows and tokens are fewer than 2^31 */
    bool exists;

    __device__ void load(const QuantizeRows &q, int32_t row_, int32_t num_rows, int lane, int lanes) {
        const FusedMoeRowMap &map = q.p.row_map;
        row = row_, exists = row < num_rows;
        if (!exists) return;
        int32_t token = map.row_token && !q.from_tokens ? map.row_token[row] : row;
        if ((uint32_t)token >= (uint64_t)map.T) token = 0; /* a wrong plan */
        const uint4 *x = (const uint4 *)((const T *)q.p.x + (int64_t)token * q.p.D);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if ((lane + i * lanes) * 8 < q.p.D) loaded[i] = __ldg(x + lane + i * lanes);
    }
};

/* While a row's codes are made, the next one is on its way. */
template <typename T, int VECTORS>
__global__ void __launch_bounds__(32 * CTA_WARPS)
    quantize_rows_kernel(const __grid_constant__ QuantizeRows q) {
    __shared__ uint32_t peaks[2][CTA_WARPS]; /* of this row and the next */
    const FusedMoeQuantizeRows &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    griddepcontrol_wait();
    if (p.pdl.lets_next_start) griddepcontrol_launch_dependents();
    int rows_at_once = CTA_WARPS / q.warps, lanes = 32 * q.warps, lane = threadIdx.x % lanes;
    int warp = threadIdx.x / 32, first_warp = warp / q.warps * q.warps;
    int32_t num_rows = (int32_t)(q.from_tokens ? map.T
                                 : map.offs    ? num_rows_of(map.offs, map.E, map.R)
                                               : map.R);
    int32_t base = blockIdx.x * rows_at_once, step = gridDim.x * rows_at_once;
    RowPart<T, VECTORS> part, next;
    part.load(q, base + threadIdx.x / lanes, num_rows, lane, lanes);
    for (int turn = 0; base < num_rows; base += step, turn ^= 1, part = next) {
        next.load(q, base + step + threadIdx.x / lanes, num_rows, lane, lanes);
        bool exists = part.exists;
        const float *smooth = p.smooth && exists ? p.smooth + expert_of(map, part.row) * p.D : nullptr;
        float score = p.scores && exists ? ((const float *)p.scores)[map.row_slot[part.row]] : 1;
        auto values = [&](float (&v)[8], int i) {
            const T *elements = (const T *)&part.loaded[i];
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = to_accum(elements[j]);
            if (p.scores)
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = to_accum(from_accum<T>(v[j] * score));
            if (smooth)
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] /= smooth[(lane + i * lanes) * 8 + j];
        };
        uint32_t peak = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (!exists || (lane + i * lanes) * 8 >= p.D) break;
            float v[8];
            values(v, i);
#pragma unroll
            for (int j = 0; j < 8; j++) peak = max(peak, fused_moe_magnitude(v[j]));
        }
        peak = __reduce_max_sync(~0u, peak);
        if (q.warps > 1) {
            if (threadIdx.x % 32 == 0) peaks[turn][warp] = peak;
            __syncthreads();
            for (int i = first_warp; i < first_warp + q.warps; i++) peak = max(peak, peaks[turn][i]);
        }
        float scale = fused_moe_scale_of(peak, fused_moe_largest_code(p.code), p.power_of_two);
        float inverse = 1 / scale;
        uint2 codes[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (!exists || (lane + i * lanes) * 8 >= p.D) break;
            float v[8];
            values(v, i);
            codes[i] = {word_of(p.code, v, inverse), word_of(p.code, v + 4, inverse)};
        }
        auto store = [&](int64_t to) {
            if (lane == 0) p.scale[to] = scale;
            uint2 *out = (uint2 *)((uint8_t *)p.codes + to * p.D);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if ((lane + i * lanes) * 8 < p.D) out[lane + i * lanes] = codes[i];
        };
        if (exists && !q.from_tokens) store(part.row);
        if (exists && q.from_tokens)
            for (int k = 0; k < map.K; k++) {
                int to = map.token_row[(int64_t)part.row * map.K + k];
                if (to >= 0 && to < map.R) store(to);
            }
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T, int VECTORS>
static int launch_rows(const FusedMoeQuantizeRows &p, void *stream) {
    QuantizeRows q = {p, 1, p.row_map.token_row && !p.scores && !p.smooth};
    while (q.warps * 32 * 8 * VECTORS < p.D) q.warps *= 2;
    int64_t rows = q.from_tokens ? p.row_map.T : p.row_map.R, ctas = ceil_div(rows * q.warps, CTA_WARPS);
    int64_t resident = (int64_t)current_device().num_sms * CTAS_OF_SM;
    Launch how = {ctas < resident ? ctas : resident, 32 * CTA_WARPS, 1, 0, p.pdl};
    return launch_dependent<quantize_rows_kernel<T, VECTORS>>(q, how, stream);
}

template <typename T>
static int launch_rows(const FusedMoeQuantizeRows &p, void *stream) {
    return p.D <= 32 * CTA_WARPS * 8 * 4 ? launch_rows<T, 4>(p, stream) : launch_rows<T, 8>(p, stream);
}

} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_quantize_rows(const FusedMoeQuantizeRows *p, void *stream) {
    if (p->D % 16 || p->D > 32 * CTA_WARPS * 8 * 8) return FUSED_MOE_UNSUPPORTED_EIGHT_BIT;
    switch (p->dtype) {
    case FUSED_MOE_BF16: return launch_rows<__nv_bfloat16>(*p, stream);
    case FUSED_MOE_F16: return launch_rows<__half>(*p, stream);
    default: return FUSED_MOE_UNSUPPORTED_DTYPE;
    }
}
