/* route: the scores of all experts, and the top K of them; and route_backward, its gradient.
 *
 * One warp per token; lane l holds experts l, l + 32, ... in registers. Scores are computed in float, in
 * double for double logits. Without bias and groups, top-k compares logits, so the choice does not depend on
 * the rounding of exp. NaN compares greatest, as in torch.topk, and ties go to the lowest id: whatever the
 * logits are, the K ids differ. */
#include "launch.cuh"
#include "numeric.cuh"

#include <math_constants.h>
#include <type_traits>

namespace fused_moe {
namespace {

/* Warps per CTA: their shared tables, two of up to 1024 experts each, fit 32 KiB. */
template <typename Acc>
constexpr int WARPS = 16 / sizeof(Acc);
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
template <typename Acc>
__device__ inline Acc norm_epsilon() {
    return Acc(1e-20); /* torchtitan's */
}

/* --- top-k: values as unsigned keys of the same order --------------------------------------------------- */

/* 0 is below the key of every value. NaN is the greatest, and -0 equals 0. */
__device__ inline uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x + 0.0f);
    return x != x ? ~0u : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ inline uint64_t key_of(double x) {
    uint64_t bits = __double_as_longlong(x + 0.0);
    return x != x ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
}
template <typename Acc>
using Key = decltype(key_of(Acc()));

__device__ inline uint32_t warp_max(uint32_t key) {
    return __reduce_max_sync(ALL, key);
}
__device__ inline uint64_t warp_max(uint64_t key) {
    uint32_t high = __reduce_max_sync(ALL, (uint32_t)(key >> 32));
    return (uint64_t)high << 32 | __reduce_max_sync(ALL, key >> 32 == high ? (uint32_t)key : 0);
}

/* Removes the warp's greatest key, on a tie that of the lowest index, and returns its index. */
template <typename K, int V>
__device__ inline int take_best(K (&key)[V]) {
    K lane_best = 0;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < V; i++) lane_best = max(lane_best, key[i]);
    K best = warp_max(lane_best);
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

/* --- scores --------------------------------------------------------------------------------------------- */

/* Bit i: element lane + 32 i is below n. */
template <int V>
__device__ inline uint32_t in_range(int n) {
    uint32_t valid = 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        if ((int)(threadIdx.x % 32) + 32 * i < n) valid |= 1u << i;
    return valid;
}

template <typename Acc, int V>
__device__ inline void all_scores(FusedMoeScoreFunc f, Acc (&score)[V], const Acc (&logit)[V], int E) {
    uint32_t valid = in_range<V>(E);
    if (f == FUSED_MOE_SIGMOID) {
#pragma unroll
        for (int i = 0; i < V; i++) score[i] = 1 / (1 + exp_accum(-logit[i]));
        return;
    }
    Acc max = lowest(Acc()), sum = 0;
#pragma unroll
    for (int i = 0; i < V; i++)
        if ((valid >> i & 1) && !(logit[i] <= max)) max = logit[i];
    for (int d = 16; d; d /= 2) {
        Acc other = __shfl_xor_sync(ALL, max, d);
        if (!(other <= max) || other != other) max = max != max ? max : other;
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        score[i] = valid >> i & 1 ? exp_accum(logit[i] - max) : Acc(0);
        sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < V; i++) score[i] /= sum;
}

/* The dtype is a run-time argument: one kernel per accumulation type, not per dtype. */
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

template <typename Acc, int V>
__device__ inline void load_logits(Acc (&logit)[V], const void *logits, FusedMoeDtype dtype, int64_t t,
                                   int E) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < V; i++) {
        logit[i] = 0;
        if (lane + 32 * i < E) load(logit[i], logits, dtype, t * E + lane + 32 * i);
    }
}

/* --- kernels -------------------------------------------------------------------------------------------- */

/* Clears the keys of experts outside the best groups. A group's score is the sum of its two best experts'. */
template <typename Acc, int V>
__device__ inline void keep_groups(const FusedMoeRoute &p, Key<Acc> (&key)[V], const Acc *choice) {
    int lane = threadIdx.x % 32, size = p.E / p.num_groups;
    Key<Acc> group_key[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int group = lane + 32 * i, end = group < p.num_groups ? (group + 1) * size : 0;
        Key<Acc> first = 0, second = 0;
        Acc sum[2] = {0, 0};
        for (int e = group * size; e < end; e++) {
            Key<Acc> k = key_of(choice[e]);
            if (k > first)
                second = first, sum[1] = sum[0], first = k, sum[0] = choice[e];
            else if (k > second)
                second = k, sum[1] = choice[e];
        }
        group_key[i] = end ? key_of(sum[0] + sum[1]) : 0;
    }
    uint32_t kept = 0;
    for (int n = 0; n < p.num_limited_groups; n++) {
        int group = take_best(group_key);
#pragma unroll
        for (int i = 0; i < V; i++)
            if ((lane + 32 * i) / size == group) kept |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (!(kept >> i & 1)) key[i] = 0;
}

template <typename Acc, int V>
__global__ void __launch_bounds__(32 * WARPS<Acc>) route_kernel(const __grid_constant__ FusedMoeRoute p) {
    __shared__ Acc scores[WARPS<Acc>][32 * V], choices[WARPS<Acc>][32 * V];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Acc *score = scores[warp], *choice = choices[warp];
    for (int64_t t = blockIdx.x * (int64_t)WARPS<Acc> + warp; t < p.T; t += (int64_t)gridDim.x * WARPS<Acc>) {
        Acc logit[V], value[V];
        Key<Acc> key[V];
        load_logits(logit, p.logits, p.dtype, t, p.E);
        all_scores(p.score_func, value, logit, p.E);
#pragma unroll
        for (int i = 0; i < V; i++) {
            int e = lane + 32 * i;
            score[e] = value[i];
            Acc ranked = p.bias || p.num_groups ? value[i] : logit[i];
            if (p.bias && e < p.E) ranked += p.bias[e];
            if (p.num_groups) choice[e] = ranked;
            key[i] = e < p.E ? key_of(ranked) : 0;
        }
        __syncwarp();
        if (p.num_groups) keep_groups(p, key, choice);

        int id = 0; /* lane k gets the k-th best */
        for (int k = 0; k < p.K; k++) {
            int best = take_best(key);
            if (k == lane) id = best;
        }
        Acc chosen = lane < p.K ? score[id] : Acc(0);
        Acc sum = p.route_norm ? warp_sum(chosen) + norm_epsilon<Acc>() : Acc(1);
        if (lane < p.K) {
            ((Acc *)p.scores)[t * p.K + lane] = chosen * ((Acc)p.route_scale / sum);
            p.ids[t * p.K + lane] = id;
        }
        __syncwarp();
    }
}

template <typename Acc, int V>
__global__ void __launch_bounds__(32 * WARPS<Acc>)
    route_backward_kernel(const __grid_constant__ FusedMoeRouteBackward p) {
    __shared__ Acc scores[WARPS<Acc>][32 * V], dscores[WARPS<Acc>][32 * V];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Acc *score = scores[warp], *dscore = dscores[warp];
    for (int64_t t = blockIdx.x * (int64_t)WARPS<Acc> + warp; t < p.T; t += (int64_t)gridDim.x * WARPS<Acc>) {
        Acc value[V], logit[V];
        load_logits(logit, p.logits, p.dtype, t, p.E);
        all_scores(p.score_func, value, logit, p.E);
#pragma unroll
        for (int i = 0; i < V; i++) score[lane + 32 * i] = value[i], dscore[lane + 32 * i] = 0;
        __syncwarp();

        /* lane k holds the id, score and gradient of slot k */
        int id = lane < p.K ? p.ids[t * p.K + lane] : -1;
        bool valid = (unsigned)id < (unsigned)p.E;
        Acc d = valid ? ((const Acc *)p.dscores)[t * p.K + lane] : Acc(0);
        Acc chosen = valid ? score[id] : Acc(0);
        /* back through scale and norm: q_k = score_k / sum, dscore_k = (dq_k - sum_j dq_j q_j) / sum */
        Acc sum = 1, shift = 0;
        if (p.route_norm) {
            sum = warp_sum(chosen) + norm_epsilon<Acc>();
            shift = warp_sum(d * chosen / sum);
        }
        for (int k = 0; k < p.K; k++) { /* one slot at a time: ids may repeat */
            if (k == lane && valid) dscore[id] += (d - shift) * ((Acc)p.route_scale / sum);
            __syncwarp();
        }
        Acc mean = 0;
        if (p.score_func == FUSED_MOE_SOFTMAX) {
#pragma unroll
            for (int i = 0; i < V; i++) mean += dscore[lane + 32 * i] * value[i];
            mean = warp_sum(mean);
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            int e = lane + 32 * i;
            Acc derivative = p.score_func == FUSED_MOE_SOFTMAX ? value[i] : value[i] * (1 - value[i]);
            if (e < p.E) store(p.dlogits, p.dtype, t * p.E + e, (dscore[e] - mean) * derivative);
        }
        __syncwarp();
    }
}

/* --- launchers ------------------------------------------------------------------------------------------ */

/* Calls fn(Acc(), integral_constant<int, V>()) with the dtype's accumulation type Acc and 32 V >= E. */
template <typename Fn>
int with_kernel(FusedMoeDtype dtype, int E, Fn fn) {
    using std::integral_constant;
    if (dtype > FUSED_MOE_BF16) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (dtype == FUSED_MOE_F64) return fn(double(), integral_constant<int, 32>());
    if (E <= 64) return fn(float(), integral_constant<int, 2>());
    if (E <= 128) return fn(float(), integral_constant<int, 4>());
    if (E <= 256) return fn(float(), integral_constant<int, 8>());
    return fn(float(), integral_constant<int, 32>());
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_route(const FusedMoeRoute *p, void *stream) {
    return with_kernel(p->dtype, p->E, [&](auto r, auto v) {
        return launch(route_kernel<decltype(r), decltype(v)::value>, *p, ceil_div(p->T, WARPS<decltype(r)>),
                      32 * WARPS<decltype(r)>, 0, stream);
    });
}

extern "C" int fused_moe_cuda_route_backward(const FusedMoeRouteBackward *p, void *stream) {
    return with_kernel(p->dtype, p->E, [&](auto r, auto v) {
        return launch(route_backward_kernel<decltype(r), decltype(v)::value>, *p,
                      ceil_div(p->T, WARPS<decltype(r)>), 32 * WARPS<decltype(r)>, 0, stream);
    });
}
