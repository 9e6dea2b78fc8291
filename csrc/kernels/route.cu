/* route: scores of every expert, fused with the choice of the K best; and its gradient.
 *
 * A warp a token, experts lane + 32 i in registers. Scores are computed in float (double for double
 * logits). Without bias and groups the choice is made on the logits: it cannot depend on how exp rounds.
 * NaN is the greatest, as in torch.topk, and ties go to the lowest id, so every choice is K distinct ids
 * whatever the logits. */
#include "launch.cuh"
#include "numeric.cuh"

#include <math_constants.h>
#include <type_traits>

namespace fused_moe {

/* Shared tables of 1024 experts are to fit 32 KiB. */
template <typename R>
constexpr int WARPS = 16 / sizeof(R);
constexpr unsigned ALL = ~0u;

__device__ inline float exp_accum(float x) {
    return expf(x);
}
__device__ inline double exp_accum(double x) {
    return exp(x);
}
__device__ inline float lowest(float) {
    return -CUDART_INF_F;
}
__device__ inline double lowest(double) {
    return -CUDART_INF;
}
template <typename R>
__device__ inline R norm_epsilon() {
    return R(1e-20); /* torchtitan's */
}

/* --- choosing: values as unsigned keys in the same order ----------------------------------------------- */

/* 0 is no value; NaN is the greatest; -0 equals 0. */
__device__ inline uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x + 0.0f);
    return x != x ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ inline uint64_t key_of(double x) {
    uint64_t bits = __double_as_longlong(x + 0.0);
    return x != x ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
}
template <typename R>
using Key = decltype(key_of(R()));

__device__ inline uint32_t warp_max(uint32_t key) {
    return __reduce_max_sync(ALL, key);
}
__device__ inline uint64_t warp_max(uint64_t key) {
    uint32_t high = __reduce_max_sync(ALL, (uint32_t)(key >> 32));
    return (uint64_t)high << 32 | __reduce_max_sync(ALL, key >> 32 == high ? (uint32_t)key : 0);
}

/* The index of the greatest key of the warp, the lowest one among equals; the key is cleared. */
template <typename K, int V>
__device__ inline int take_best(K (&key)[V]) {
    K mine = 0;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < V; i++) mine = max(mine, key[i]);
    K best = warp_max(mine);
    uint32_t index = ~0u;
#pragma unroll
    for (int i = V - 1; i >= 0; i--)
        if (key[i] == best) index = lane + 32 * i;
    index = __reduce_min_sync(ALL, index);
#pragma unroll
    for (int i = 0; i < V; i++)
        if (index == lane + 32 * i) key[i] = 0;
    return (int)index;
}

template <int V>
__device__ inline uint32_t in_range(int n) {
    uint32_t open = 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        if ((int)(threadIdx.x % 32) + 32 * i < n) open |= 1u << i;
    return open;
}

template <typename R, int V>
__device__ inline void all_scores(FusedMoeScoreFunc f, R (&score)[V], const R (&logit)[V], int E) {
    uint32_t valid = in_range<V>(E);
    if (f == FUSED_MOE_SIGMOID) {
#pragma unroll
        for (int i = 0; i < V; i++) score[i] = 1 / (1 + exp_accum(-logit[i]));
        return;
    }
    R max = lowest(R()), sum = 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        if ((valid >> i & 1) && !(logit[i] <= max)) max = logit[i];
    for (int d = 16; d; d /= 2) {
        R other = __shfl_xor_sync(ALL, max, d);
        if (!(other <= max) || other != other) max = max != max ? max : other;
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        score[i] = valid >> i & 1 ? exp_accum(logit[i] - max) : R(0);
        sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < V; i++) score[i] /= sum;
}

/* The dtype is a run-time matter here: one kernel an arithmetic, not one a dtype. */
__device__ inline void load(float &x, const void *data, FusedMoeDtype dtype, int64_t i) {
    x = dtype == FUSED_MOE_BF16  ? to_accum(((const __nv_bfloat16 *)data)[i])
        : dtype == FUSED_MOE_F16 ? to_accum(((const __half *)data)[i])
                                 : ((const float *)data)[i];
}
__device__ inline void load(double &x, const void *data, FusedMoeDtype, int64_t i) {
    x = ((const double *)data)[i];
}
__device__ inline void store(void *data, FusedMoeDtype dtype, int64_t i, float x) {
    if (dtype == FUSED_MOE_BF16)
        ((__nv_bfloat16 *)data)[i] = from_accum<__nv_bfloat16>(x);
    else if (dtype == FUSED_MOE_F16)
        ((__half *)data)[i] = from_accum<__half>(x);
    else
        ((float *)data)[i] = x;
}
__device__ inline void store(void *data, FusedMoeDtype, int64_t i, double x) {
    ((double *)data)[i] = x;
}

template <typename R, int V>
__device__ inline void load_logits(R (&logit)[V], const void *logits, FusedMoeDtype dtype,
                                   int64_t t, int E) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < V; i++) {
        logit[i] = 0;
        if (lane + 32 * i < E) load(logit[i], logits, dtype, t * E + lane + 32 * i);
    }
}

/* --- kernels -------------------------------------------------------------------------------------------- */

/* Clears the keys of experts outside the best groups; a group is worth its two best experts. */
template <typename R, int V>
__device__ inline void keep_groups(const FusedMoeRoute &p, Key<R> (&key)[V], const R *choice) {
    int lane = threadIdx.x % 32, size = p.E / p.num_groups;
    Key<R> worth[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int group = lane + 32 * i, end = group < p.num_groups ? (group + 1) * size : 0;
        Key<R> first = 0, second = 0;
        R sum[2] = {0, 0};
        for (int e = group * size; e < end; e++) {
            Key<R> k = key_of(choice[e]);
            if (k > first)
                second = first, sum[1] = sum[0], first = k, sum[0] = choice[e];
            else if (k > second)
                second = k, sum[1] = choice[e];
        }
        worth[i] = end ? key_of(sum[0] + sum[1]) : 0;
    }
    uint32_t kept = 0;
    for (int n = 0; n < p.num_limited_groups; n++) {
        int group = take_best(worth);
#pragma unroll
        for (int i = 0; i < V; i++)
            if ((lane + 32 * i) / size == group) kept |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (!(kept >> i & 1)) key[i] = 0;
}

template <typename R, int V>
__global__ void __launch_bounds__(32 * WARPS<R>)
    route_kernel(const __grid_constant__ FusedMoeRoute p) {
    __shared__ R scores[WARPS<R>][32 * V], choices[WARPS<R>][32 * V];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    R *score = scores[warp], *choice = choices[warp];
    for (int64_t t = blockIdx.x * (int64_t)WARPS<R> + warp; t < p.T;
         t += (int64_t)gridDim.x * WARPS<R>) {
        R logit[V], value[V];
        Key<R> key[V];
        load_logits(logit, p.logits, p.dtype, t, p.E);
        all_scores(p.score_func, value, logit, p.E);
#pragma unroll
        for (int i = 0; i < V; i++) {
            int e = lane + 32 * i;
            score[e] = value[i];
            R by = p.bias || p.num_groups ? value[i] : logit[i];
            if (p.bias && e < p.E) by += p.bias[e];
            if (p.num_groups) choice[e] = by;
            key[i] = e < p.E ? key_of(by) : 0;
        }
        __syncwarp();
        if (p.num_groups) keep_groups(p, key, choice);

        int id = 0; /* lane k has the k-th best */
        for (int k = 0; k < p.K; k++) {
            int best = take_best(key);
            if (k == lane) id = best;
        }
        R mine = lane < p.K ? score[id] : R(0);
        R sum = p.route_norm ? warp_sum(mine) + norm_epsilon<R>() : R(1);
        if (lane < p.K) {
            ((R *)p.scores)[t * p.K + lane] = mine * ((R)p.route_scale / sum);
            p.ids[t * p.K + lane] = id;
        }
        __syncwarp();
    }
}

template <typename R, int V>
__global__ void __launch_bounds__(32 * WARPS<R>)
    route_backward_kernel(const __grid_constant__ FusedMoeRouteBackward p) {
    __shared__ R scores[WARPS<R>][32 * V], dscores[WARPS<R>][32 * V];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    R *score = scores[warp], *dscore = dscores[warp];
    for (int64_t t = blockIdx.x * (int64_t)WARPS<R> + warp; t < p.T;
         t += (int64_t)gridDim.x * WARPS<R>) {
        R value[V], logit[V];
        load_logits(logit, p.logits, p.dtype, t, p.E);
        all_scores(p.score_func, value, logit, p.E);
#pragma unroll
        for (int i = 0; i < V; i++) score[lane + 32 * i] = value[i], dscore[lane + 32 * i] = 0;
        __syncwarp();

        /* lane k has slot k: its id, its score and its gradient */
        int id = lane < p.K ? p.ids[t * p.K + lane] : -1;
        bool valid = (unsigned)id < (unsigned)p.E;
        R d = valid ? ((const R *)p.dscores)[t * p.K + lane] : R(0);
        R chosen = valid ? score[id] : R(0);
        /* through scale and norm: q_k = score_k / sum, dscore_k = (dq_k - sum_j dq_j q_j) / sum */
        R sum = 1, shift = 0;
        if (p.route_norm) {
            sum = warp_sum(chosen) + norm_epsilon<R>();
            shift = warp_sum(d * chosen / sum);
        }
        for (int k = 0; k < p.K; k++) { /* one after another: ids may repeat */
            if (k == lane && valid) dscore[id] += (d - shift) * ((R)p.route_scale / sum);
            __syncwarp();
        }
        R mean = 0;
        if (p.score_func == FUSED_MOE_SOFTMAX) {
#pragma unroll
            for (int i = 0; i < V; i++) mean += dscore[lane + 32 * i] * value[i];
            mean = warp_sum(mean);
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            int e = lane + 32 * i;
            R derivative = p.score_func == FUSED_MOE_SOFTMAX ? value[i] : value[i] * (1 - value[i]);
            if (e < p.E) store(p.dlogits, p.dtype, t * p.E + e, (dscore[e] - mean) * derivative);
        }
        __syncwarp();
    }
}

/* --- launchers ------------------------------------------------------------------------------------------ */

/* Calls fn(R(), integral constant V) with the arithmetic of the dtype and 32 V >= E. */
template <typename Fn>
static int with_kernel(FusedMoeDtype dtype, int E, Fn fn) {
    using std::integral_constant;
    if (dtype > FUSED_MOE_BF16) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (dtype == FUSED_MOE_F64) return fn(double(), integral_constant<int, 32>());
    if (E <= 64) return fn(float(), integral_constant<int, 2>());
    if (E <= 128) return fn(float(), integral_constant<int, 4>());
    if (E <= 256) return fn(float(), integral_constant<int, 8>());
    return fn(float(), integral_constant<int, 32>());
}

} // namespace fused_moe

extern "C" int fused_moe_cuda_route(const FusedMoeRoute *p, void *stream) {
    using namespace fused_moe;
    return with_kernel(p->dtype, p->E, [&](auto r, auto v) {
        return launch(route_kernel<decltype(r), decltype(v)::value>, *p,
                      ceil_div(p->T, WARPS<decltype(r)>), 32 * WARPS<decltype(r)>, 0, stream);
    });
}

extern "C" int fused_moe_cuda_route_backward(const FusedMoeRouteBackward *p, void *stream) {
    using namespace fused_moe;
    return with_kernel(p->dtype, p->E, [&](auto r, auto v) {
        return launch(route_backward_kernel<decltype(r), decltype(v)::value>, *p,
                      ceil_div(p->T, WARPS<decltype(r)>), 32 * WARPS<decltype(r)>, 0, stream);
    });
}
