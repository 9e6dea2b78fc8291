/* quantize_rows: codes of 8 bits and a scale for each row (eight_bit.h).
 *
 * A group of one or more warps has a row, which it reads once. Where rows are copies of tokens, a token is
 * read once, and its codes are written to all of its rows, and to token_codes. A CTA has consecutive rows, so
 * with `smooth` mostly of one expert: a lane keeps the reciprocals of its columns' factors until its group
 * comes to the rows of another expert.
 *
 * Rows are loaded by cp.async into buffers in shared memory. A lane reads what it has copied itself:
 *
 *   rows r + 1 and r + 2           in flight while row r is quantised
 *   token and slot of row r + 3    loaded meanwhile: the addresses of its columns need them
 *
 * A row of more than CTA_WARPS warps has one buffer, so only row r + 1 is in flight. Each group has a barrier
 * for the peaks of its warps, so groups do not wait for one another. */
#include "../../eight_bit.h"
#include "codes.cuh"
#include "launch.cuh"
#include "schedule.cuh"

namespace fused_moe {

/* A warp has consecutive columns of a row, a lane every 32nd vector of eight of them. */
constexpr int VECTORS = 4, WARP_COLUMNS = 32 * VECTORS * CHUNK;
constexpr int CTA_WARPS = 8; /* where a row has no more */
constexpr int MOST_WARPS = FUSED_MOE_EIGHT_BIT_MOST_WIDTH / WARP_COLUMNS;

/* Resident warps per SM, with 64 registers per thread, or 128 with smooth. So 128 or 64 KiB of rows are in
 * flight per SM; 4 TB/s need 64. */
template <bool SMOOTH>
constexpr int WARPS_OF_SM = SMOOTH ? 16 : 32;

typedef struct {
    FusedMoeQuantizeRows p;
    int32_t warps;         /* per row */
    int32_t warp_vectors;  /* per warp: vectors of eight elements */
    bool from_tokens;      /* a token's codes go to its rows */
    const uint32_t *words; /* one per row beside x: scores; with from_tokens token_row; else NULL */
} QuantizeRows;

/* --- loads ---------------------------------------------------------------------------------------------- */

constexpr int PLACES = 32 * MOST_WARPS; /* buffers: one per thread, two in a CTA of CTA_WARPS at most */
typedef struct {
    uint4 vectors[VECTORS][PLACES];
    uint32_t word[PLACES];
} Ring;
static_assert(PLACES == 2 * 32 * CTA_WARPS, "two places of a thread");

/* Which vectors a lane has: first, first + 32, .. */
typedef struct {
    int32_t first, count;
} Columns;

/* Where a lane finds a row. */
typedef struct {
    int32_t token, word;
} RowSource;

template <bool SMOOTH>
static __device__ RowSource source_of(const QuantizeRows &q, int32_t row) {
    const FusedMoeRowMap &map = q.p.row_map;
    const int32_t lane = threadIdx.x % 32, K = (int32_t)map.K;
    if (!SMOOTH && q.from_tokens) return {row, lane < K ? row * K + lane : -1};
    RowSource source = {map.row_token ? map.row_token[row] : row, -1};
    if (q.p.scores) source.word = map.row_slot[row];
    if ((uint32_t)source.token >= (uint32_t)map.T) source.token = 0; /* a wrong plan */
    return source;
}

template <typename T>
static __device__ void load_row(const QuantizeRows &q, RowSource source, Columns columns, uint32_t vectors,
                                uint32_t word) {
    const int64_t first = (int64_t)source.token * (int32_t)q.p.D + columns.first * CHUNK;
    const T *x = (const T *)q.p.x + first;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (i >= columns.count) break;
        cp_async(vectors + i * (uint32_t)sizeof(uint4[PLACES]), x + 32 * CHUNK * i, true);
    }
    if (q.words && source.word >= 0) cp_async_word(word, q.words + source.word);
}

/* --- values --------------------------------------------------------------------------------------------- */

/* Elements times the score, rounded. */
template <typename T>
static __device__ uint4 scored(const uint4 &vector, float score) {
    float v[CHUNK];
    Pack<T> pack;
    widen<T>(v, vector);
#pragma unroll
    for (int j = 0; j < CHUNK; j += 2) from_accums<T>(pack.v + j, v[j] * score, v[j + 1] * score);
    return pack.words[0];
}

/* The largest magnitude, as an integer of the same order (fused_moe_magnitude). */
static __device__ uint32_t peak_of(const float (&v)[CHUNK]) {
    float peak[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; j++) peak[j] = fabsf(v[j]);
#pragma unroll
    for (int width = CHUNK / 2; width; width /= 2)
#pragma unroll
        for (int j = 0; j < width; j++) peak[j] = max_nan_f32(peak[j], peak[j + width]);
    return fused_moe_float_bits(peak[0]);
}

/* The largest magnitudes of 16-bit elements in lower halves, and in upper ones. Their bits have the order of
 * integers, in bf16 and in fp16, with NaN above all. */
static __device__ uint32_t half_peaks_of(const uint4 &vector) {
    const uint32_t magnitude = 0x7fff7fff;
    return __vmaxu2(__vmaxu2(vector.x & magnitude, vector.y & magnitude),
                    __vmaxu2(vector.z & magnitude, vector.w & magnitude));
}

/* The larger one's fused_moe_magnitude. */
template <typename T>
static __device__ uint32_t widened_peak(uint32_t half_peaks) {
    const uint16_t largest = (uint16_t)max(half_peaks & 0xffff, half_peaks >> 16);
    return fused_moe_magnitude(to_accum(*(const T *)&largest));
}

/* Four codes as a word, of values times the inverse of their scale. int8: 1.5 2^23 plus the value, rounded,
 * has the code in its lowest byte. */
static __device__ uint32_t word_of(FusedMoeCode code, const float *v, float inverse) {
    if (code == FUSED_MOE_CODE_E4M3)
        return word_of_e4m3(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        bits[i] = fused_moe_float_bits(__fadd_rn(__fmul_rn(v[i], inverse), 12582912.0f));
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

/* --- smooth --------------------------------------------------------------------------------------------- */

/* The expert of a row: the number of those whose rows end before it. The whole warp calls it. */
static __device__ int32_t expert_of(const FusedMoeRowMap &map, int32_t row) {
    int32_t before = 0;
    for (int32_t e = threadIdx.x % 32; e < map.E; e += 32) before += map.offs[e] <= row;
    return min(__reduce_add_sync(~0u, before), map.E - 1);
}

/* The factors of an expert, in a lane's columns. */
typedef struct {
    float reciprocals[VECTORS][CHUNK];
    int32_t end; /* one past the expert's last row */

    __device__ void load(const QuantizeRows &q, int32_t row, Columns columns) {
        const int32_t expert = expert_of(q.p.row_map, row);
        end = q.p.row_map.offs[expert];
        const float4 *smooth = (const float4 *)(q.p.smooth + expert * q.p.D + columns.first * CHUNK);
#pragma unroll
        for (int i = 0; i < 2 * VECTORS; i++) {
            if (i / 2 >= columns.count) break;
            float4 factors = __ldg(smooth + i / 2 * 64 + i % 2);
            float *v = reciprocals[i / 2] + i % 2 * 4;
            v[0] = factors.x, v[1] = factors.y, v[2] = factors.z, v[3] = factors.w;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (i >= columns.count) break;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) reciprocals[i][j] = __frcp_rn(reciprocals[i][j]);
        }
    }
} Factors;

/* --- kernel --------------------------------------------------------------------------------------------- */

template <typename T, bool SMOOTH>
__global__ void __launch_bounds__(32 * MOST_WARPS, WARPS_OF_SM<SMOOTH> / MOST_WARPS)
    quantize_rows_kernel(const __grid_constant__ QuantizeRows q) {
    __shared__ Ring ring;
    __shared__ uint32_t peaks[2][MOST_WARPS]; /* double buffer: one row's and the next one's */
    const FusedMoeQuantizeRows &p = q.p;
    const FusedMoeRowMap &map = p.row_map;
    griddepcontrol_wait();
    if (p.pdl.lets_next_start) griddepcontrol_launch_dependents();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int groups = blockDim.x / 32 / q.warps, group = warp / q.warps, first_warp = group * q.warps;
    const int first = (warp - first_warp) * q.warp_vectors; /* the warp's first vector, and its last */
    const int last = min((int)p.D / CHUNK, first + q.warp_vectors);
    const Columns columns = {first + lane, max(last - first - lane + 31, 0) / 32};

    /* Rows of this CTA: an equal part, or one more. Its groups take them in turn. */
    const int32_t num_rows = (int32_t)(!SMOOTH && q.from_tokens ? map.T
                                       : map.offs               ? num_rows_of(map.offs, map.E, map.R)
                                                                : map.R);
    const int32_t cta = blockIdx.x, each = num_rows / gridDim.x, longer = num_rows % gridDim.x;
    const int32_t first_row = cta * each + min(cta, longer), end = first_row + each + (cta < longer);
    int32_t row = first_row + group;

    const bool has_two = blockDim.x <= 32 * CTA_WARPS; /* places */
    const int32_t ahead = has_two ? 2 * groups : groups;
    const uint32_t vectors_of_0 = shared_address(&ring.vectors[0][threadIdx.x]);
    const uint32_t word_of_0 = shared_address(&ring.word[threadIdx.x]);
    RowSource source;
    auto find = [&](int32_t of_row) {
        if (of_row < end) source = source_of<SMOOTH>(q, of_row);
    };
    auto load = [&](int32_t of_row, int place) {
        const uint32_t offset = place * (PLACES / 2);
        if (of_row < end)
            load_row<T>(q, source, columns, vectors_of_0 + offset * (uint32_t)sizeof(uint4),
                        word_of_0 + offset * (uint32_t)sizeof(uint32_t));
        cp_async_commit_group();
    };
    find(row), load(row, 0);
    if (has_two) find(row + groups), load(row + groups, 1);
    find(row + ahead);

    Factors factors;
    factors.end = 0;
    const int peak_of_lane = first_warp + lane % q.warps;
    for (int turn = 0; row < end; row += groups, turn ^= 1) {
        if (SMOOTH && row >= factors.end) factors.load(q, row, columns);
        if (has_two)
            cp_async_wait_group<1>();
        else
            cp_async_wait_group<0>();

        /* What has come, in registers; then its place is loaded again */
        const int place = has_two ? turn : 0, number = threadIdx.x + place * (PLACES / 2);
        const uint32_t word = ring.word[number];
        uint4 vectors[VECTORS];
        float values[VECTORS][CHUNK];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (i >= columns.count) break;
            vectors[i] = ring.vectors[i][number];
            if (p.scores) vectors[i] = scored<T>(vectors[i], fused_moe_bits_float(word));
            if (!SMOOTH) continue;
            widen<T>(values[i], vectors[i]);
#pragma unroll
            for (int j = 0; j < CHUNK; j++) values[i][j] = __fmul_rn(values[i][j], factors.reciprocals[i][j]);
        }
        load(row + ahead, place);
        find(row + ahead + groups);

        /* The row's peak, and its scale */
        uint32_t peak = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (i >= columns.count) break;
            peak = SMOOTH ? max(peak, peak_of(values[i])) : __vmaxu2(peak, half_peaks_of(vectors[i]));
        }
        peak = __reduce_max_sync(~0u, SMOOTH ? peak : widened_peak<T>(peak));
        if (q.warps > 1) {
            if (lane == 0) peaks[turn][warp] = peak;
            barrier_sync(1 + group, 32 * q.warps);
            peak = __reduce_max_sync(~0u, peaks[turn][peak_of_lane]);
        }
        const float scale = fused_moe_scale_of(peak, fused_moe_largest_code(p.code), p.power_of_two);
        const float inverse = 1 / scale;

        /* Codes */
        uint2 codes[VECTORS];
        auto encode = [&](FusedMoeCode code) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (i >= columns.count) break;
                if (!SMOOTH) widen<T>(values[i], vectors[i]);
                codes[i] = {word_of(code, values[i], inverse), word_of(code, values[i] + 4, inverse)};
            }
        };
        if (p.code == FUSED_MOE_CODE_E4M3)
            encode(FUSED_MOE_CODE_E4M3);
        else
            encode(FUSED_MOE_CODE_INT8);
        auto store_codes = [&](void *matrix, int32_t to) {
            uint2 *out = (uint2 *)((uint8_t *)matrix + (int64_t)to * (int32_t)p.D) + columns.first;
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                if (i >= columns.count) break;
                out[32 * i] = codes[i];
            }
        };
        auto store = [&](int32_t to) {
            if (columns.first == 0) p.scale[to] = scale;
            store_codes(p.codes, to);
        };
        if (SMOOTH || !q.from_tokens) store(row);
        for (int k = 0; !SMOOTH && q.from_tokens && k < (int)map.K; k++) {
            const int32_t to =
                k < 32 ? __shfl_sync(~0u, (int32_t)word, k) : map.token_row[(int64_t)row * map.K + k];
            if ((uint32_t)to < (uint32_t)map.R) store(to);
        }
        if (!SMOOTH && p.token_codes) store_codes(p.token_codes, row);
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

template <typename T, bool SMOOTH>
static int launch_rows(const FusedMoeQuantizeRows &p, void *stream) {
    const FusedMoeRowMap &map = p.row_map;
    QuantizeRows q = {p, (int32_t)ceil_div(p.D, WARP_COLUMNS)};
    q.warp_vectors = (int32_t)ceil_div(p.D / CHUNK, 32 * q.warps) * 32;
    q.from_tokens = map.row_token && !p.scores && !p.smooth;
    q.words = (const uint32_t *)(p.scores ? p.scores : q.from_tokens ? map.token_row : nullptr);
    const int groups = q.warps < CTA_WARPS ? CTA_WARPS / q.warps : 1, warps = groups * q.warps;
    const int64_t ctas = ceil_div(q.from_tokens ? map.T : map.R, groups);
    const int64_t resident = (int64_t)current_device().num_sms * (WARPS_OF_SM<SMOOTH> / warps);
    Launch how = {ctas < resident ? ctas : resident, 32 * warps, 1, 0, p.pdl};
    return launch_dependent<quantize_rows_kernel<T, SMOOTH>>(q, how, stream);
}

template <typename T>
static int launch_rows(const FusedMoeQuantizeRows &p, void *stream) {
    return p.smooth ? launch_rows<T, true>(p, stream) : launch_rows<T, false>(p, stream);
}

} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_quantize_rows(const FusedMoeQuantizeRows *p, void *stream) {
    if (p->D % FUSED_MOE_EIGHT_BIT_WIDTH || p->D > FUSED_MOE_EIGHT_BIT_MOST_WIDTH)
        return FUSED_MOE_UNSUPPORTED_EIGHT_BIT;
    switch (p->dtype) {
    case FUSED_MOE_BF16: return launch_rows<__nv_bfloat16>(*p, stream);
    case FUSED_MOE_F16: return launch_rows<__half>(*p, stream);
    default: return FUSED_MOE_UNSUPPORTED_DTYPE;
    }
}
