/* The scores of all experts of a token, and the top K or given ones of them. route and the plan of a cluster
 * (sm90/cluster_plan.cu) share it, so both have the same bits.
 *
 * A token has a sub-warp of G lanes; a warp has 32 / G tokens. A lane holds V experts: C = 32 / G consecutive
 * ones of every 32. Sums have the order of a warp per token whose lane l holds experts l, l + 32, ..., so a
 * score has the same bits whatever G is. Scores are computed in float, in double for double logits. Without
 * bias and expert groups, top-k compares logits, so the choice does not depend on the rounding of exp. NaN
 * compares greatest, as in torch.topk, and ties go to the lowest id: whatever the logits are, the K ids
 * differ. A bias of -infinity bars an expert. */
#pragma once

#include "../../integer.h"
#include "numeric.cuh"

#include <limits>
#include <type_traits>

namespace fused_moe {

constexpr unsigned ALL = ~0u;

__device__ inline float exp_accum(float x) {
    return expf(x);
}
__device__ inline double exp_accum(double x) {
    return exp(x);
}
__device__ inline float add(float a, float b) { /* never contracted to an FMA */
    return __fadd_rn(a, b);
}
__device__ inline double add(double a, double b) {
    return __dadd_rn(a, b);
}
template <typename Acc>
constexpr Acc LOWEST = -std::numeric_limits<Acc>::infinity();

/* --- a token's sub-warp --------------------------------------------------------------------------------- */

template <int G>
__device__ inline int subwarp_lane() {
    return threadIdx.x % G;
}

/* The expert of element i. */
template <int G>
__device__ inline int expert(int i) {
    constexpr int C = 32 / G;
    return i / C * 32 + subwarp_lane<G>() * C + i % C;
}

template <int G, typename T, typename Fn>
__device__ inline T subwarp_reduce(T x, Fn fn) {
#pragma unroll
    for (int d = G / 2; d; d /= 2) x = fn(x, __shfl_xor_sync(ALL, x, d));
    return x;
}
template <int G, typename T>
__device__ inline T subwarp_max(T x) {
    if constexpr (G == 32 && std::is_same_v<T, uint32_t>) return __reduce_max_sync(ALL, x);
    return subwarp_reduce<G>(x, [](T a, T b) { return max(a, b); });
}
template <int G, typename Acc>
__device__ inline Acc subwarp_sum(Acc x) {
    return subwarp_reduce<G>(x + Acc(0), [](Acc a, Acc b) { return add(a, b); });
}

/* The sum of all elements, in the order of a warp whose lane l adds elements l, l + 32, ... */
template <int G, typename Acc, int V, typename Fn>
__device__ inline Acc sum_elements(Fn add_element) {
    constexpr int C = 32 / G;
    Acc sum[C] = {};
#pragma unroll
    for (int i = 0; i < V; i++) sum[i % C] = add_element(sum[i % C], i);
#pragma unroll
    for (int c = 0; c < C; c++) sum[c] = subwarp_reduce<G>(sum[c], [](Acc a, Acc b) { return add(a, b); });
#pragma unroll
    for (int n = C / 2; n; n /= 2)
#pragma unroll
        for (int c = 0; c < n; c++) sum[c] = add(sum[c], sum[c + n]);
    return sum[0];
}

/* --- rows of experts ------------------------------------------------------------------------------------ */

/* Calls fn with an element of the dtype. The dtype is a run-time argument, so kernels differ in Acc alone. */
template <typename Acc, typename Fn>
__device__ inline void with_element(FusedMoeDtype dtype, Fn fn) {
    if constexpr (std::is_same_v<Acc, double>)
        fn(double());
    else if (dtype == FUSED_MOE_BF16)
        fn(__nv_bfloat16());
    else if (dtype == FUSED_MOE_F16)
        fn(__half());
    else
        fn(float());
}

/* Consecutive experts, accessed at once. */
template <typename T, int W>
struct alignas(W * sizeof(T)) Part {
    T v[W];
};

/* Calls fn(T *row, width). Parts of that width, C experts or one, are aligned in every row. */
template <typename Acc, int C, typename Fn>
__device__ inline void with_row(const void *data, FusedMoeDtype dtype, int64_t t, int E, Fn fn) {
    with_element<Acc>(dtype, [&](auto element) {
        using T = decltype(element);
        T *row = (T *)data + t * E;
        if ((uintptr_t)data % sizeof(Part<T, C>) == 0 && E % C == 0)
            fn(row, std::integral_constant<int, C>());
        else
            fn(row, std::integral_constant<int, 1>());
    });
}

/* Elements past the row are -infinity: their score is 0, and any expert is chosen before them. */
template <int G, typename Acc, int V>
__device__ inline void load_logits(Acc (&x)[V], const void *data, FusedMoeDtype dtype, int64_t t, int E) {
    with_row<Acc, 32 / G>(data, dtype, t, E, [&](auto *row, auto width) {
        constexpr int W = decltype(width)::value;
        using P = Part<std::remove_pointer_t<decltype(row)>, W>;
#pragma unroll
        for (int i = 0; i < V; i += W) {
            int e = expert<G>(i);
            P part = {};
            if (e < E) part = *(const P *)(row + e);
#pragma unroll
            for (int w = 0; w < W; w++) x[i + w] = e < E ? to_accum(part.v[w]) : LOWEST<Acc>;
        }
    });
}

template <typename Acc>
__device__ inline Acc load_one(const void *data, FusedMoeDtype dtype, int64_t i) {
    Acc x;
    with_element<Acc>(dtype, [&](auto element) { x = to_accum(((const decltype(element) *)data)[i]); });
    return x;
}

/* --- scores --------------------------------------------------------------------------------------------- */

/* The square root of softplus. Far below zero that is exp(x / 2), which does not underflow as exp(x) does. */
template <typename Acc>
__device__ inline Acc sqrtsoftplus(Acc x) {
    return x < -37 ? exp_accum(x / 2) : sqrt(fmax(x, Acc(0)) + log1p(exp_accum(-fabs(x))));
}

/* Its derivative, sigmoid(x) / (2 s), from s = sqrtsoftplus(x): sigmoid(x) = 1 - exp(-s^2). */
template <typename Acc>
__device__ inline Acc sqrtsoftplus_derivative(Acc s) {
    return s < Acc(1e-8) ? s / 2 : -expm1(-s * s) / (2 * s);
}

/* The softmax's shift and sum, which all scores of a token share. */
template <typename Acc>
struct Scores {
    FusedMoeScoreFunc function;
    Acc max, sum;

    __device__ Acc operator()(Acc logit) const {
        return function == FUSED_MOE_SQRTSOFTPLUS ? sqrtsoftplus(logit) : quotient(logit);
    }

    /* The score of softmax or sigmoid. */
    __device__ Acc quotient(Acc logit) const {
        bool sigmoid = function == FUSED_MOE_SIGMOID;
        Acc power = exp_accum(sigmoid ? -logit : logit - max);
        return (sigmoid ? 1 : power) / (sigmoid ? add(1, power) : sum);
    }
};

/* A NaN logit makes the sum NaN, and with it every score. */
template <int G, typename Acc, int V>
__device__ inline Scores<Acc> scores_of(FusedMoeScoreFunc f, const Acc (&logit)[V]) {
    Scores<Acc> scores = {f, LOWEST<Acc>, 1};
    if (f != FUSED_MOE_SOFTMAX) return scores;
    auto greater = [](Acc a, Acc b) { return fmax(a, b); };
#pragma unroll
    for (int i = 0; i < V; i++) scores.max = greater(scores.max, logit[i]);
    scores.max = subwarp_reduce<G>(scores.max, greater);
    scores.sum =
        sum_elements<G, Acc, V>([&](Acc sum, int i) { return add(sum, exp_accum(logit[i] - scores.max)); });
    return scores;
}

template <typename Acc, int V>
__device__ inline void all_scores(Acc (&score)[V], const Scores<Acc> &scores, const Acc (&logit)[V]) {
    if (scores.function == FUSED_MOE_SQRTSOFTPLUS) {
#pragma unroll
        for (int i = 0; i < V; i++) score[i] = sqrtsoftplus(logit[i]);
        return;
    }
    if constexpr (std::is_same_v<Acc, float>) {
        if (scores.function == FUSED_MOE_SOFTMAX) {
            /* nvcc's division, with the part that depends on the sum alone done once. It is right unless a
             * remainder is subnormal. */
            float power[V], inverse = __frcp_rn(scores.sum);
            uint32_t least = ~0u; /* the bits of the least power that is not 0, minus one */
#pragma unroll
            for (int i = 0; i < V; i++) {
                power[i] = exp_accum(logit[i] - scores.max);
                least = min(least, __float_as_uint(power[i]) - 1);
            }
            if (least >= __float_as_uint(0x1p-100f)) {
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float quotient = power[i] * inverse;
                    score[i] = fmaf(fmaf(-scores.sum, quotient, power[i]), inverse, quotient);
                }
                return;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < V; i++) score[i] = scores.quotient(logit[i]);
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

/* Removes the sub-warp's greatest key, the one of the lowest index on a tie, and returns its index; -1 if all
 * keys are 0. */
template <int G, typename K, int V>
__device__ inline int take_best(K (&key)[V]) {
    K best = 0;
#pragma unroll
    for (int i = 0; i < V; i++) best = max(best, key[i]);
    best = subwarp_max<G>(best);
    uint32_t last = 0; /* ~index */
#pragma unroll
    for (int i = V - 1; i >= 0; i--)
        if (key[i] == best) last = ~expert<G>(i);
    int index = best ? (int)~subwarp_max<G>(last) : -1;
#pragma unroll
    for (int i = 0; i < V; i++)
        if (index == expert<G>(i)) key[i] = 0;
    return index;
}

/* The same for keys that all differ: returns the greatest key below `taken`, the one returned before. No key
 * is changed. */
template <int G, int V>
__device__ inline uint32_t next_best(const uint32_t (&key)[V], uint32_t taken) {
    uint32_t best[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < V; i++) best[i % 2] = max(key[i] - taken, best[i % 2]); /* wraps below `taken` */
    return taken + subwarp_max<G>(max(best[0], best[1]));
}

/* --- the choice ----------------------------------------------------------------------------------------- */

/* Clears the keys of experts outside the best expert groups. A group's score is the sum of its two best
 * experts', or its best one's. */
template <int G, typename Acc, int V>
__device__ inline void keep_groups(const FusedMoeRoute &p, Key<Acc> (&key)[V], const Acc *choice) {
    int size = p.E / p.num_groups;
    Key<Acc> group_key[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int group = expert<G>(i), end = group < p.num_groups ? (group + 1) * size : 0;
        Key<Acc> first = 0, second = 0;
        Acc sum[2] = {0, 0};
        for (int e = group * size; e < end; e++) {
            Key<Acc> k = key_of(choice[e]);
            if (k > first)
                second = first, sum[1] = sum[0], first = k, sum[0] = choice[e];
            else if (k > second)
                second = k, sum[1] = choice[e];
        }
        group_key[i] = end ? key_of(p.group_score == FUSED_MOE_MAX ? sum[0] : sum[0] + sum[1]) : 0;
    }
    uint32_t kept = 0;
    for (int n = 0; n < p.num_limited_groups; n++) {
        int group = take_best<G>(group_key);
#pragma unroll
        for (int i = 0; i < V; i++)
            if ((unsigned)(expert<G>(i) - group * size) < (unsigned)size) kept |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < V; i++)
        if (!(kept >> i & 1)) key[i] = 0;
}

template <typename Acc>
struct Choice {
    Acc score;
    int id; /* -1: no expert */
};

/* The choice for slot k of a token, returned to lane k of its sub-warp. A warp calls it, with shared memory
 * for G V elements per sub-warp. A sub-warp without a real token computes another token's and returns no
 * expert. */
template <int G, int V, typename Acc>
__device__ inline Choice<Acc> choose(const FusedMoeRoute &p, int64_t token, int64_t num_tokens, Acc *choice) {
    int slot = subwarp_lane<G>();
    int64_t t = max(min(token, num_tokens - 1), (int64_t)0);
    Acc logit[V];
    load_logits<G>(logit, p.logits, p.dtype, t, p.E);
    Scores<Acc> scores = scores_of<G>(p.score_func, logit);

    int id = 0, rank = slot; /* this lane gets the expert of its rank */
    bool is_chosen = false;
    if (p.given_ids) {
        int64_t given = slot < p.K ? integer(p.given_ids, p.given_dtype, t * p.K + slot) : -1;
        id = given >= 0 && given < p.E ? (int)given : -1;
        if (subwarp_max<G>((uint32_t)(given != -1))) rank = -1;
        is_chosen = __all_sync(ALL, rank < 0);
    }
    if (!is_chosen && !p.bias && !p.num_groups && sizeof(Acc) == 4) {
        /* The low bits of a key are replaced by 1023 - expert, so no two keys are equal. For 16-bit logits
         * they carry no information: all are 0, or all 1 if the logit is negative or NaN. float32 logits may
         * differ in them alone. If that may have changed the choice, the warp chooses again. */
        constexpr uint32_t EXPERT_MASK = 1023;
        bool is_float = p.dtype == FUSED_MOE_F32, differ_in_low_bits = false;
        uint32_t key[V], taken = 0;
#pragma unroll
        for (int i = 0; i < V; i++)
            key[i] = (key_of((float)logit[i]) & ~EXPERT_MASK) | (EXPERT_MASK - expert<G>(i));
        for (int k = 0; k < p.K + is_float; k++) {
            uint32_t before = taken;
            taken = next_best<G>(key, taken);
            if (k == rank) id = EXPERT_MASK - (taken & EXPERT_MASK);
            differ_in_low_bits |= k > 0 && (before ^ taken) <= EXPERT_MASK;
        }
        is_chosen = !is_float || !__any_sync(ALL, differ_in_low_bits);
    }
    if (!is_chosen) {
        if (p.bias || p.num_groups) all_scores(logit, scores, logit);
        Key<Acc> key[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            int e = expert<G>(i);
            bool is_allowed = e < p.E;
            if (p.bias && is_allowed) {
                float bias = p.bias[e];
                is_allowed = bias != LOWEST<float>;
                logit[i] = is_allowed ? logit[i] + bias : LOWEST<Acc>;
            }
            if (p.num_groups) choice[e] = logit[i];
            key[i] = is_allowed ? key_of(logit[i]) : 0;
        }
        __syncwarp();
        if (p.num_groups) keep_groups<G>(p, key, choice);
        for (int k = 0; k < p.K; k++) {
            int best = take_best<G>(key);
            if (k == rank) id = best;
        }
    }
    bool has_expert = slot < p.K && id >= 0;
    Acc chosen = has_expert ? scores(load_one<Acc>(p.logits, p.dtype, t * p.E + id)) : Acc(0);
    Acc sum = p.route_norm ? subwarp_sum<G>(chosen) + (Acc)p.norm_eps : Acc(1);
    if (p.expert_scale && has_expert) chosen *= ((const Acc *)p.expert_scale)[id];
    has_expert &= token < num_tokens;
    return {has_expert ? chosen * ((Acc)p.route_scale / sum) : Acc(0), has_expert ? id : -1};
}

/* --- lanes and elements --------------------------------------------------------------------------------- */

constexpr int WHOLE_WARP = 32; /* lanes; as K, it asks for 32 of them */

/* Calls fn(Acc(), G, V) with the dtype's accumulation type Acc, G >= K lanes and G V >= E elements. */
template <typename Fn>
int with_kernel(FusedMoeDtype dtype, int E, int K, Fn fn) {
    using std::integral_constant;
    integral_constant<int, 8> _8;
    integral_constant<int, 16> _16;
    integral_constant<int, 32> _32;
    if (dtype > FUSED_MOE_BF16) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (dtype == FUSED_MOE_F64) return fn(double(), _32, _32);
    if (E <= 64 && K <= 8) return fn(float(), _8, _8);
    if (E <= 128 && K <= 8) return fn(float(), _8, _16);
    if (E <= 256 && K <= 16) return fn(float(), _16, _16);
    if (E <= 256) return fn(float(), _32, _8);
    if (E <= 512) return fn(float(), _32, _16);
    return fn(float(), _32, _32);
}

} // namespace fused_moe
