/* route: the scores of all experts, and the top K or given ones of them; and its gradient, route_backward.
 * Both have a sub-warp per token, as in choose.cuh. */
#include "choose.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace {

constexpr int WARPS = 4; /* per CTA */

/* The token of this lane's sub-warp. */
template <int G>
__device__ inline int64_t subwarp_token() {
    return (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / G;
}

template <typename Acc, int G, int V>
__global__ void __launch_bounds__(32 * WARPS) route_kernel(const __grid_constant__ FusedMoeRoute p) {
    __shared__ Acc choices[32 * WARPS / G][G * V];
    int slot = subwarp_lane<G>();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    int64_t num_tokens = num_real_tokens(p.num_tokens, p.num_tokens_dtype, p.T), token = subwarp_token<G>();
    Choice<Acc> chosen = choose<G, V>(p, token, num_tokens, choices[threadIdx.x / G]);
    if (slot < p.K && token < p.T) {
        ((Acc *)p.scores)[token * p.K + slot] = chosen.score;
        p.ids[token * p.K + slot] = chosen.id;
    }
}

template <int G, typename Acc, int V>
__device__ inline void store_row(void *data, const Acc (&x)[V], FusedMoeDtype dtype, int64_t t, int E) {
    with_row<Acc, 32 / G>(data, dtype, t, E, [&](auto *row, auto width) {
        constexpr int W = decltype(width)::value;
        using T = std::remove_pointer_t<decltype(row)>;
#pragma unroll
        for (int i = 0; i < V; i += W) {
            int e = expert<G>(i);
            Part<T, W> part;
#pragma unroll
            for (int w = 0; w < W; w++) part.v[w] = from_accum<T>(x[i + w]);
            if (e < E) *(Part<T, W> *)(row + e) = part;
        }
    });
}

template <typename Acc, int G, int V>
__global__ void __launch_bounds__(32 * WARPS)
    route_backward_kernel(const __grid_constant__ FusedMoeRouteBackward p) {
    constexpr int C = 32 / G;
    __shared__ Part<Acc, C> dscores[32 * WARPS / G][G * V / C];
    int slot = subwarp_lane<G>(); /* the lane holds this slot's id, score and gradient */
    int64_t token = subwarp_token<G>(), t = min(token, p.T - 1);
    if (!p.pdl.reads_before_wait) griddepcontrol_wait();
    int id = slot < p.K ? p.ids[t * p.K + slot] : -1;
    bool valid = (unsigned)id < (unsigned)p.E;
    Acc logit[V], value[V];
    load_logits<G>(logit, p.logits, p.dtype, t, p.E);
    Scores<Acc> scores = scores_of<G>(p.score_func, logit);
    all_scores(value, scores, logit);

    /* back through scales and norm: q_k = score_k / sum, dscore_k = (dq_k - sum_j dq_j q_j) / sum */
    Acc chosen = 0, sum = 1, shift = 0;
    if (p.route_norm) {
        if (valid) chosen = scores(load_one<Acc>(p.logits, p.dtype, t * p.E + id));
        sum = subwarp_sum<G>(chosen) + (Acc)p.norm_eps;
    }
    if (p.pdl.reads_before_wait) griddepcontrol_wait();
    Acc d = valid ? ((const Acc *)p.dscores)[t * p.K + slot] : Acc(0);
    if (p.expert_scale && valid) d *= ((const Acc *)p.expert_scale)[id];
    if (p.route_norm) shift = subwarp_sum<G>(d * chosen / sum);
    Acc factor = (Acc)p.route_scale / sum;

    Part<Acc, C> *row = dscores[threadIdx.x / G];
    Acc *dscore = (Acc *)row;
#pragma unroll
    for (int i = 0; i < V; i += C) row[expert<G>(i) / C] = {};
    __syncwarp();
    int lane = threadIdx.x % 32, key = valid ? lane / G * p.E + id : ~lane; /* of this token's expert */
    if (!__any_sync(ALL, __popc(__match_any_sync(ALL, key)) > 1)) {
        if (valid) dscore[id] = fma(d - shift, factor, Acc(0));
    } else { /* an id repeats: one slot at a time */
        for (int k = 0; k < p.K; k++) {
            __syncwarp();
            if (k == slot && valid) dscore[id] = fma(d - shift, factor, dscore[id]);
        }
    }
    __syncwarp();
    Acc x[V];
#pragma unroll
    for (int i = 0; i < V; i += C) {
        Part<Acc, C> part = row[expert<G>(i) / C];
#pragma unroll
        for (int c = 0; c < C; c++) x[i + c] = part.v[c];
    }
    bool softmax = p.score_func == FUSED_MOE_SOFTMAX, sigmoid = p.score_func == FUSED_MOE_SIGMOID;
    bool has_expert = subwarp_max<G>((uint32_t)valid);
    if (p.score_func == FUSED_MOE_SQRTSOFTPLUS) {
#pragma unroll
        for (int i = 0; i < V; i++) value[i] = sqrtsoftplus_derivative(value[i]);
    }
    Acc mean = 0;
    if (softmax) mean = sum_elements<G, Acc, V>([&](Acc sum, int i) { return fma(x[i], value[i], sum); });
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = (x[i] - mean) * (sigmoid ? value[i] * (1 - value[i]) : value[i]);
    if (!has_expert) { /* padding, for instance, whose logits may be NaN */
#pragma unroll
        for (int i = 0; i < V; i++) x[i] = 0;
    }
    if (token >= p.T) return;
    store_row<G>(p.dlogits, x, p.dtype, t, p.E);
    if (p.rounded) store_row<G>(p.rounded, x, p.rounded_dtype, t, p.E);
}

} // namespace
} // namespace fused_moe

using namespace fused_moe;

extern "C" int fused_moe_cuda_route(const FusedMoeRoute *p, void *stream) {
    int K = fused_moe_chooses_by_warp(p->T, p->E, false) ? WHOLE_WARP : p->K;
    return with_kernel(p->dtype, p->E, K, [&](auto acc, auto lanes, auto elements) {
        constexpr int G = decltype(lanes)::value, V = decltype(elements)::value;
        return launch_dependent<route_kernel<decltype(acc), G, V>>(
            *p, {ceil_div(p->T, 32 * WARPS / G), 32 * WARPS, 1, 0}, stream);
    });
}

extern "C" int fused_moe_cuda_route_backward(const FusedMoeRouteBackward *p, void *stream) {
    return with_kernel(p->dtype, p->E, p->K, [&](auto acc, auto lanes, auto elements) {
        constexpr int G = decltype(lanes)::value, V = decltype(elements)::value;
        return launch_dependent<route_backward_kernel<decltype(acc), G, V>>(
            *p, {ceil_div(p->T, 32 * WARPS / G), 32 * WARPS, 1, 0}, stream);
    });
}
