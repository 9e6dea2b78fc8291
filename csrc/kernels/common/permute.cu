/* permute, unpermute, and its gradients unpermute_backward and shared_backward: move rows between token order
 * and expert order.
 *
 * All are memory-bound. A lane accesses 16 bytes at a time if rows are aligned, else one element.
 *   permute              one warp per token reads its row once and writes K copies from registers
 *   unpermute            one warp per token, or several if rows are 16-bit and aligned. It adds in slot
 *                        order, and the shared experts' row last, so its result is deterministic
 *   unpermute_backward   one warp per slot
 *   shared_backward      one warp per token */
#include "combine.cuh"
#include "launch.cuh"
#include "schedule.cuh"

#include <type_traits>

namespace fused_moe {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;

/* Whether the matrix can be copied in 16-byte units. */
inline bool is_aligned(const void *data, int64_t row_bytes) {
    return (uintptr_t)data % 16 == 0 && row_bytes % 16 == 0;
}

__device__ inline int64_t first_warp() {
    return (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / 32;
}
__device__ inline int64_t num_warps() {
    return (int64_t)gridDim.x * WARPS;
}

/* --- permute -------------------------------------------------------------------------------------------- */

template <typename Unit>
__global__ void __launch_bounds__(THREADS) permute_kernel(const __grid_constant__ FusedMoePermute p) {
    constexpr int UNITS = 4; /* per lane, all loaded before the first is stored */
    const FusedMoeRowMap &row_map = p.row_map;
    int lane = threadIdx.x % 32;
    for (int64_t t = first_warp(); t < row_map.T; t += num_warps()) {
        const Unit *src = (const Unit *)p.x + t * p.D;
        for (int64_t first = lane; first < p.D; first += 32 * UNITS) {
            Unit v[UNITS];
#pragma unroll
            for (int i = 0; i < UNITS; i++)
                if (first + 32 * i < p.D) v[i] = src[first + 32 * i];
            for (int64_t k = 0; k < row_map.K; k++) {
                int64_t r = row_map.token_row[t * row_map.K + k];
                if ((uint64_t)r >= (uint64_t)row_map.R) continue;
                Unit *dst = (Unit *)p.rows + r * p.D;
#pragma unroll
                for (int i = 0; i < UNITS; i++)
                    if (first + 32 * i < p.D) dst[first + 32 * i] = v[i];
            }
        }
    }
    /* zero the rows past the last one */
    int64_t num_rows = num_rows_of(row_map.offs, row_map.E, row_map.R);
    for (int64_t r = num_rows + first_warp(); r < row_map.R; r += num_warps())
        for (int64_t j = lane; j < p.D; j += 32) ((Unit *)p.rows)[r * p.D + j] = Unit{};
}

/* --- unpermute ------------------------------------------------------------------------------------------ */

/* unpermute of aligned 16-bit rows and up to 32 slots, with 32-bit indices. Few registers and small CTAs let
 * many warps keep the memory busy. A warp has 512 to 1023 columns of one token, or all if there are fewer.
 * Lane k holds slot k's score and the start of its row. Shared experts put one more row in flight per lane
 * and take a few more registers, so an SM has the same bytes in flight. With few tokens, the latency of
 * consecutive loads is the time: a warp then has half of the columns, and a lane twice the rows in flight. */
constexpr int HALF_WARPS = 2;

template <bool few_tokens>
__host__ __device__ inline uint32_t warps_of_token(int64_t D) {
    constexpr int COLUMNS_OF_WARP = few_tokens ? 256 : 512;
    return D < COLUMNS_OF_WARP ? 1 : (uint32_t)(D / COLUMNS_OF_WARP);
}

template <typename T, bool has_shared, bool few_tokens>
__global__ void __launch_bounds__(32 * HALF_WARPS, few_tokens   ? 1
                                                   : has_shared ? 18
                                                                : 20)
    unpermute_half_kernel(const __grid_constant__ FusedMoeUnpermute p) {
    constexpr uint32_t ROWS = few_tokens ? 8 : 4 /* in flight */, ABSENT = ~0u;
    uint32_t lane = threadIdx.x % 32, K = (uint32_t)p.row_map.K, chunks = (uint32_t)p.D / CHUNK;
    uint32_t warps = warps_of_token<few_tokens>(p.D), warp = blockIdx.x * HALF_WARPS + threadIdx.x / 32;
    uint32_t t = warp / warps, part = warp % warps, steps = (chunks + 31) / 32;
    uint32_t first = part * steps / warps * 32, end = min((part + 1) * steps / warps * 32, chunks);
    if (!p.pdl.reads_before_wait) griddepcontrol_wait();
    if (t >= p.row_map.T) return;
    uint32_t lane_start = ABSENT;
    float lane_score = 0;
    if (lane < K) {
        int64_t slot = t * (int64_t)K + lane;
        uint32_t r = p.row_map.token_row[slot];
        if (r < p.row_map.R)
            lane_start = r * chunks, lane_score = p.scores ? ((const float *)p.scores)[slot] : 1;
    }
    if (p.pdl.reads_before_wait) griddepcontrol_wait();
    float score_of_shared = has_shared ? shared_score<float>(p.shared_gate, t) : 0;
    for (; first < end; first += 32) {
        uint32_t chunk = first + lane;
        float sum[CHUNK] = {};
        Pack<T> shared; /* loaded with the first rows, added last */
        if constexpr (has_shared)
            shared.words[0] =
                ld_global_v4((const uint4 *)p.shared + (t * (int64_t)chunks + chunk), chunk < end);
        for (uint32_t k = 0; k < K; k += ROWS) {
            Pack<T> pack[ROWS];
            float score[ROWS];
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                uint32_t start = __shfl_sync(~0u, lane_start, k + i);
                score[i] = __shfl_sync(~0u, lane_score, k + i);
                bool valid = k + i < K && start != ABSENT && chunk < end;
                pack[i].words[0] = ld_global_v4((const uint4 *)p.rows + (start + chunk), valid);
            }
#pragma unroll
            for (uint32_t i = 0; i < ROWS; i++) {
                if (k + i >= K) break;
                add_row(sum, score[i], pack[i]);
            }
        }
        if constexpr (has_shared) add_row(sum, score_of_shared, shared);
        if (chunk < end) store_chunk<T>((T *)p.out + t * p.D + chunk * CHUNK, sum, CHUNK, true);
    }
}

/* One warp per token. Each lane has chunks of two rows in flight: 256 bytes in all, or one chunk per row. */
template <typename T, bool aligned>
__global__ void __launch_bounds__(THREADS) unpermute_kernel(const __grid_constant__ FusedMoeUnpermute p) {
    using Acc = Accum<T>;
    constexpr int rows = 2, in_flight = 256 / sizeof(Pack<T>); /* chunks */
    constexpr int chunks = aligned ? in_flight / rows : 1;     /* per row */
    const FusedMoeRowMap &row_map = p.row_map;
    int lane = threadIdx.x % 32;
    for (int64_t t = first_warp(); t < row_map.T; t += num_warps()) {
        const int32_t *token_row = row_map.token_row + t * row_map.K;
        const Acc *scores = p.scores ? (const Acc *)p.scores + t * row_map.K : nullptr;
        for (int64_t first = lane * CHUNK; first < p.D; first += chunks * 32 * CHUNK) {
            Acc sum[chunks][CHUNK] = {};
            for (int64_t k0 = 0; k0 < row_map.K; k0 += rows) {
                Pack<T> pack[rows][chunks];
                Acc s[rows];
#pragma unroll
                for (int k = 0; k < rows; k++) {
                    int64_t r = k0 + k < row_map.K ? token_row[k0 + k] : -1;
                    bool has_row = (uint64_t)r < (uint64_t)row_map.R;
                    s[k] = has_row && scores ? scores[k0 + k] : Acc(has_row);
#pragma unroll
                    for (int i = 0; i < chunks; i++) {
                        int64_t j = first + i * 32 * CHUNK;
                        const T *src = (const T *)p.rows + r * p.D + j;
                        bool valid = has_row && j < p.D;
                        if constexpr (aligned) {
#pragma unroll
                            for (int c = 0; c < (int)(sizeof(Pack<T>) / sizeof(uint4)); c++)
                                pack[k][i].words[c] = ld_global_v4((const uint4 *)src + c, valid);
                        } else {
#pragma unroll
                            for (int c = 0; c < CHUNK; c++)
                                pack[k][i].v[c] = valid && j + c < p.D ? src[c] : from_accum<T>(0);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < rows; k++)
#pragma unroll
                    for (int i = 0; i < chunks; i++) add_row(sum[i], s[k], pack[k][i]);
            }
            const Acc score_of_shared = p.shared ? shared_score<Acc>(p.shared_gate, t) : 0;
#pragma unroll
            for (int i = 0; i < chunks; i++) {
                int64_t j = first + i * 32 * CHUNK;
                int n = (int)min((int64_t)CHUNK, p.D - j);
                if (n <= 0) break;
                if (p.shared) {
                    Pack<T> shared;
                    load_pack(shared, (const T *)p.shared + t * p.D + j, n, aligned);
                    add_row(sum[i], score_of_shared, shared);
                }
                store_chunk<T>((T *)p.out + t * p.D + j, sum[i], n, aligned);
            }
        }
    }
}

/* --- unpermute_backward --------------------------------------------------------------------------------- */

/* One warp per slot computes drows of its row, and the dot product of the row and dout. */
template <typename T>
__global__ void unpermute_backward_kernel(const __grid_constant__ FusedMoeUnpermuteBackward p, bool aligned) {
    using Acc = Accum<T>;
    const FusedMoeRowMap &row_map = p.row_map;
    int lane = threadIdx.x % 32;
    T *drows = (T *)p.drows;
    for (int64_t slot = first_warp(); slot < row_map.T * row_map.K; slot += num_warps()) {
        int64_t r = row_map.token_row ? row_map.token_row[slot] : slot, t = slot / row_map.K;
        bool has_row = (uint64_t)r < (uint64_t)row_map.R;
        Acc score = p.scores && has_row ? ((const Acc *)p.scores)[slot] : Acc(1), dot = 0;
        for (int64_t j = lane * CHUNK; has_row && j < p.D; j += 32 * CHUNK) {
            int n = (int)min((int64_t)CHUNK, p.D - j);
            Acc dout[CHUNK], row[CHUNK];
            load_chunk<T>(dout, (const T *)p.dout + t * p.D + j, n, aligned);
            if (p.dscores) {
                load_chunk<T>(row, (const T *)p.rows + r * p.D + j, n, aligned);
#pragma unroll
                for (int c = 0; c < CHUNK; c++) dot += row[c] * dout[c];
            }
            if (!drows) continue;
#pragma unroll
            for (int c = 0; c < CHUNK; c++) dout[c] *= score;
            store_chunk<T>(drows + r * p.D + j, dout, n, aligned);
        }
        if (!p.dscores) continue;
        dot = warp_sum(dot);
        if (lane == 0) ((Acc *)p.dscores)[slot] = dot;
    }
    if (!drows) return;
    /* zero the rows past the last one */
    int64_t num_rows = num_rows_of(row_map.offs, row_map.E, row_map.R);
    for (int64_t r = num_rows + first_warp(); r < row_map.R; r += num_warps())
        for (int64_t j = lane; j < p.D; j += 32) drows[r * p.D + j] = T(0.0f);
}

/* --- shared_backward ------------------------------------------------------------------------------------ */

/* One warp per token computes dshared, and the dot product of shared and dout. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    shared_backward_kernel(const __grid_constant__ FusedMoeSharedBackward p, bool aligned) {
    using Acc = Accum<T>;
    int lane = threadIdx.x % 32;
    for (int64_t t = first_warp(); t < p.T; t += num_warps()) {
        Acc gate = ((const Acc *)p.shared_gate)[t], s = sigmoid(gate), dot = 0;
        for (int64_t j = lane * CHUNK; j < p.D; j += 32 * CHUNK) {
            int n = (int)min((int64_t)CHUNK, p.D - j);
            Acc dout[CHUNK], shared[CHUNK];
            load_chunk<T>(dout, (const T *)p.dout + t * p.D + j, n, aligned);
            if (p.dshared_gate) {
                load_chunk<T>(shared, (const T *)p.shared + t * p.D + j, n, aligned);
#pragma unroll
                for (int c = 0; c < CHUNK; c++) dot += shared[c] * dout[c];
            }
            if (!p.dshared) continue;
#pragma unroll
            for (int c = 0; c < CHUNK; c++) dout[c] *= s;
            store_chunk<T>((T *)p.dshared + t * p.D + j, dout, n, aligned);
        }
        if (!p.dshared_gate) continue;
        dot = warp_sum(dot);
        /* not s (1 - s), which cancels if s is near 1 */
        if (lane == 0) ((Acc *)p.dshared_gate)[t] = dot * s * sigmoid(-gate);
    }
}

/* --- launchers ------------------------------------------------------------------------------------------ */

template <typename T>
int permute(FusedMoePermute p, void *stream) {
    int64_t row_bytes = p.D * sizeof(T), warps = p.row_map.T > p.row_map.R ? p.row_map.T : p.row_map.R;
    if (is_aligned(p.x, row_bytes) && is_aligned(p.rows, row_bytes)) {
        p.D = row_bytes / sizeof(int4);
        return launch(permute_kernel<int4>, p, ceil_div(warps, WARPS), THREADS, 0, stream);
    }
    using Unit =
        std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    return launch(permute_kernel<Unit>, p, ceil_div(warps, WARPS), THREADS, 0, stream);
}

template <typename T, bool few_tokens>
int unpermute_half(const FusedMoeUnpermute &p, void *stream) {
    int64_t warps = p.row_map.T * warps_of_token<few_tokens>(p.D);
    const Launch how = {ceil_div(warps, HALF_WARPS), 32 * HALF_WARPS, 1, 0, p.pdl};
    return p.shared ? launch_dependent<unpermute_half_kernel<T, true, few_tokens>>(p, how, stream)
                    : launch_dependent<unpermute_half_kernel<T, false, few_tokens>>(p, how, stream);
}

template <typename T>
int unpermute(const FusedMoeUnpermute &p, void *stream) {
    int64_t grid = ceil_div(p.row_map.T, WARPS);
    bool aligned = rows_are_aligned<T>(p.rows, p.D) && rows_are_aligned<T>(p.shared, p.D) &&
                   rows_are_aligned<T>(p.out, p.D);
    if constexpr (is_half<T>) {
        int64_t warps = p.row_map.T * warps_of_token<true>(p.D), chunks = p.row_map.R * p.D / CHUNK;
        if (aligned && p.row_map.K <= 32 && p.D < 1 << 24 && warps < INT32_MAX && chunks < UINT32_MAX) {
            if (fused_moe_has_few_tokens(p.row_map.T)) return unpermute_half<T, true>(p, stream);
            return unpermute_half<T, false>(p, stream);
        }
    }
    if constexpr (std::is_same_v<T, float>)
        if (aligned) return launch(unpermute_kernel<T, true>, p, grid, THREADS, 0, stream);
    return launch(unpermute_kernel<T, false>, p, grid, THREADS, 0, stream);
}

template <typename T>
int unpermute_backward(const FusedMoeUnpermuteBackward &p, void *stream) {
    int64_t slots = p.row_map.T * p.row_map.K;
    if (!slots && !p.row_map.R) return FUSED_MOE_OK;
    bool aligned = rows_are_aligned<T>(p.dout, p.D) && rows_are_aligned<T>(p.rows, p.D) &&
                   rows_are_aligned<T>(p.drows, p.D);
    unsigned grid = grid_for(slots > p.row_map.R ? slots : p.row_map.R, WARPS);
    unpermute_backward_kernel<T><<<grid, THREADS, 0, (cudaStream_t)stream>>>(p, aligned);
    return launch_status();
}

template <typename T>
int shared_backward(const FusedMoeSharedBackward &p, void *stream) {
    if (!p.T) return FUSED_MOE_OK;
    bool aligned = rows_are_aligned<T>(p.dout, p.D) && rows_are_aligned<T>(p.shared, p.D) &&
                   rows_are_aligned<T>(p.dshared, p.D);
    shared_backward_kernel<T><<<grid_for(p.T, WARPS), THREADS, 0, (cudaStream_t)stream>>>(p, aligned);
    return launch_status();
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_permute(const FusedMoePermute *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return permute<decltype(t)>(*p, stream); });
}

extern "C" int fused_moe_cuda_unpermute(const FusedMoeUnpermute *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return unpermute<decltype(t)>(*p, stream); });
}

extern "C" int fused_moe_cuda_unpermute_backward(const FusedMoeUnpermuteBackward *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return unpermute_backward<decltype(t)>(*p, stream); });
}

extern "C" int fused_moe_cuda_shared_backward(const FusedMoeSharedBackward *p, void *stream) {
    return with_dtype(p->dtype, [&](auto t) { return shared_backward<decltype(t)>(*p, stream); });
}
