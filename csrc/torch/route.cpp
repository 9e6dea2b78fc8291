/* Routing: logits, scores and ids, and their gradients. */
#include "operators.h"

/* What the kernels of route keep of a token: its logits in shared memory, its slots in a warp's lanes. */
static constexpr int64_t MAX_ROUTED_EXPERTS = 1024, MAX_TOP_K = 32;

/* weight: (E, D). */
static void check_router(const char *op, const Tensor &weight, int64_t num_tokens) {
    check_dim(op, "weight", weight, 2);
    check_size(op, "experts", weight.size(0), 1, MAX_ROUTED_EXPERTS);
    check_size(op, "weight's width", weight.size(1), 1, MAX_WIDTH);
    check_size(op, "tokens", num_tokens, 0, MAX_ROWS);
}

PreparedLogits prepare_logits(const Tensor &x_, const Tensor &weight_, const OptTensor &bias_) {
    const char *op = "router_logits";
    check_dim(op, "x", x_, 2);
    check_router(op, weight_, x_.size(0));
    int64_t T = x_.size(0), E = weight_.size(0), D = weight_.size(1);
    const bool is_mixed = is_16_bit(x_) && weight_.scalar_type() == ScalarType::Float;
    check_device(op, "weight", weight_, x_);
    FusedMoeRouterLogits p = {};
    p.dtype = float_dtype(op, x_);
    p.weight_dtype = float_dtype(op, weight_);
    Tensor x = operand(op, "x", x_, x_, {T, D});
    Tensor weight = operand(op, "weight", weight_, is_mixed ? weight_ : x, {E, D});
    OptTensor bias = operand(op, "bias", bias_, weight, {E});
    Tensor logits = new_tensor(x, {T, E}, score_dtype(x));
    p.bias = data(bias);
    p.logits = logits.mutable_data_ptr();
    p.T = T;
    p.D = D;
    p.E = (int32_t)E;
    return {p, x, weight, logits, bias};
}

void run_logits(const Call &call, const PreparedLogits &logits) {
    FusedMoeRouterLogits p = logits.p;
    const int64_t right = zeros_behind(logits.x, p.D);
    const Tensor x = with_zeros(call, logits.x, 0, right), weight = with_zeros(call, logits.weight, 0, right);
    p.x = data(x);
    p.weight = data(weight);
    p.D += right;
    run_tiered(call, p, x, fused_moe_cpu_router_logits, CUDA(fused_moe_cuda_select_router_logits),
               CUDA(fused_moe_cuda_router_logits));
}

Tensor router_logits(const Tensor &x, const Tensor &weight, const OptTensor &bias) {
    const PreparedLogits own = prepare_logits(x, weight, bias);
    run_logits(begin_call("router_logits", own.x), own);
    return own.logits;
}

void run_router_dgrad(const Call &call, const Tensor &dlogits_, const Tensor &weight_, const Tensor &dx,
                      bool accumulate) {
    const int64_t T = dx.size(0), D = dx.size(1);
    const int64_t below = zeros_behind(dx, weight_.size(0)), right = accumulate ? 0 : zeros_behind(dx, D);
    Tensor dlogits = with_zeros(call, dlogits_, 0, below), weight = with_zeros(call, weight_, below, right);
    Tensor wide = right ? new_tensor(dx, {T, D + right}) : dx;
    FusedMoeRouterDgrad p = {};
    p.dlogits = data(dlogits);
    p.weight = data(weight);
    p.dx = wide.mutable_data_ptr();
    p.accumulate = accumulate;
    p.T = T;
    p.D = D + right;
    p.E = (int32_t)weight.size(0);
    p.dtype = float_dtype(call.op, dx);
    run_tiered(call, p, dx, fused_moe_cpu_router_dgrad, CUDA(fused_moe_cuda_select_router_dgrad),
               CUDA(fused_moe_cuda_router_dgrad));
    if (right) pad_into(call, wide, dx);
}

Tensor router_dgrad(const Tensor &dlogits_, const Tensor &weight_) {
    const char *op = "router_dgrad";
    check_dim(op, "dlogits", dlogits_, 2);
    check_router(op, weight_, dlogits_.size(0));
    int64_t T = dlogits_.size(0), E = weight_.size(0), D = weight_.size(1);
    Tensor weight = operand(op, "weight", weight_, weight_, {E, D});
    Tensor dlogits = operand(op, "dlogits", dlogits_, weight, {T, E});
    (void)float_dtype(op, dlogits);
    Call call = begin_call(op, dlogits);
    Tensor dx = new_tensor(dlogits, {T, D});
    run_router_dgrad(call, dlogits, weight, dx, false);
    return dx;
}

/* The factors on the scores of logits' experts. */
static OptTensor scale_of(const char *op, const OptTensor &expert_scale, const Tensor &logits) {
    if (!expert_scale) return {};
    check_shape(op, "expert_scale", *expert_scale, {logits.size(1)});
    check_dtype(op, "expert_scale", *expert_scale, score_dtype(logits));
    check_device(op, "expert_scale", *expert_scale, logits);
    return dense(*expert_scale);
}

Routing routing_of(const char *op, const std::optional<Ints> &ints, double route_scale,
                   double route_norm_eps) {
    check(ints && ints->size() == 6, op, "routing of six integers", "another number");
    const Ints &i = *ints;
    return {i[0], i[1], i[2] != 0, route_scale, route_norm_eps, i[3], i[4], i[5]};
}

PreparedRoute prepare_route(const Tensor &logits, const OptTensor &bias, const Routing &routing,
                            const OptTensor &given_ids, const OptTensor &num_tokens,
                            const OptTensor &expert_scale) {
    const char *op = "route";
    check_dim(op, "logits", logits, 2);
    const auto &[top_k, score_func, route_norm, route_scale, route_norm_eps, num_groups, num_limited_groups,
                 group_score] = routing;
    int64_t T = logits.size(0), E = logits.size(1);
    check_size(op, "experts", E, 1, MAX_ROUTED_EXPERTS);
    check_size(op, "top_k", top_k, 1, E < MAX_TOP_K ? E : MAX_TOP_K);
    check_size(op, "score_func", score_func, FUSED_MOE_SOFTMAX, FUSED_MOE_SQRTSOFTPLUS);
    check_size(op, "group_score", group_score, FUSED_MOE_TOP2, FUSED_MOE_MAX);
    if (num_groups) {
        check_size(op, "num_expert_groups", num_groups, 1, E);
        if (E % num_groups)
            fail(op, "expected num_expert_groups to divide ", E, " experts, found ", num_groups);
        check_size(op, "num_limited_groups", num_limited_groups, 1, num_groups);
        check_size(op, "top_k", top_k, 1, num_limited_groups * (E / num_groups));
    }
    PreparedRoute route = {{}, dense(logits), {}, {}, {}, {}, {}};
    FusedMoeRoute &p = route.p;
    if (bias) {
        check_shape(op, "bias", *bias, {E});
        check_dtype(op, "bias", *bias, ScalarType::Float);
        check_device(op, "bias", *bias, logits);
        route.bias = dense(*bias);
    }
    if (given_ids) {
        check_shape(op, "given_ids", *given_ids, {T, top_k});
        check_device(op, "given_ids", *given_ids, logits);
        p.given_dtype = dtype_of(op, "given_ids", *given_ids, false);
        route.given_ids = dense(*given_ids);
    }
    if (num_tokens) {
        check_size(op, "elements in num_tokens", num_tokens->numel(), 1, 1);
        check_device(op, "num_tokens", *num_tokens, logits);
        p.num_tokens_dtype = dtype_of(op, "num_tokens", *num_tokens, false);
    }
    p.dtype = float_dtype(op, logits);
    route.expert_scale = scale_of(op, expert_scale, logits);
    route.scores = new_tensor(logits, {T, top_k}, score_dtype(logits));
    route.ids = new_tensor(logits, {T, top_k}, ScalarType::Int);
    p.logits = data(route.logits);
    p.bias = (const float *)data(route.bias);
    p.given_ids = data(route.given_ids);
    p.num_tokens = data(num_tokens);
    p.expert_scale = data(route.expert_scale);
    p.scores = route.scores.mutable_data_ptr();
    p.ids = mutable_ints(route.ids);
    p.score_func = (FusedMoeScoreFunc)score_func;
    p.route_norm = route_norm;
    p.route_scale = route_scale;
    p.norm_eps = route_norm_eps;
    p.num_groups = (int32_t)num_groups;
    p.num_limited_groups = (int32_t)num_limited_groups;
    p.group_score = (FusedMoeGroupScore)group_score;
    p.T = T;
    p.E = (int32_t)E;
    p.K = (int32_t)top_k;
    return route;
}

void run_route(const Call &call, const FusedMoeRoute &p) {
    run(call, p, fused_moe_cpu_route, CUDA(fused_moe_cuda_route));
}

std::tuple<Tensor, Tensor> route(const Tensor &logits, const OptTensor &bias, int64_t top_k,
                                 int64_t score_func, bool route_norm, double route_scale,
                                 double route_norm_eps, int64_t num_groups, int64_t num_limited_groups,
                                 int64_t group_score, const OptTensor &given_ids, const OptTensor &num_tokens,
                                 const OptTensor &expert_scale) {
    PreparedRoute own = prepare_route(logits, bias,
                                      {top_k, score_func, route_norm, route_scale, route_norm_eps, num_groups,
                                       num_limited_groups, group_score},
                                      given_ids, num_tokens, expert_scale);
    run_route(begin_call("route", own.logits), own.p);
    return {own.scores, own.ids};
}

PreparedRouteBackward prepare_route_backward(const char *op, const Tensor &logits_, const Tensor &ids_,
                                             int64_t score_func, bool route_norm, double route_scale,
                                             double route_norm_eps, const OptTensor &expert_scale) {
    check_dim(op, "logits", logits_, 2);
    check_size(op, "score_func", score_func, FUSED_MOE_SOFTMAX, FUSED_MOE_SQRTSOFTPLUS);
    Tensor logits = dense(logits_), ids = index_tensor(op, "ids", ids_, logits, 2);
    int64_t T = logits.size(0), E = logits.size(1), K = ids.size(1);
    check_size(op, "experts", E, 1, MAX_ROUTED_EXPERTS);
    check_size(op, "top_k", K, 1, MAX_TOP_K);
    check_shape(op, "ids", ids, {T, K});
    OptTensor scale = scale_of(op, expert_scale, logits);
    FusedMoeRouteBackward p = {};
    p.dtype = float_dtype(op, logits);
    p.logits = data(logits);
    p.ids = ints(ids);
    p.expert_scale = data(scale);
    p.score_func = (FusedMoeScoreFunc)score_func;
    p.route_norm = route_norm;
    p.route_scale = route_scale;
    p.norm_eps = route_norm_eps;
    p.T = T;
    p.E = (int32_t)E;
    p.K = (int32_t)K;
    return {p, logits, ids, scale};
}

RouteGrads run_route_backward(const Call &call, const PreparedRouteBackward &route, const Tensor &dscores,
                              ScalarType rounded_dtype) {
    FusedMoeRouteBackward p = route.p;
    Tensor dlogits = new_tensor(route.logits, {p.T, p.E}), rounded = dlogits;
    if (rounded_dtype != dlogits.scalar_type()) {
        rounded = new_tensor(route.logits, {p.T, p.E}, rounded_dtype);
        p.rounded = rounded.mutable_data_ptr();
        p.rounded_dtype = float_dtype(call.op, rounded);
    }
    p.dscores = data(dscores);
    p.dlogits = dlogits.mutable_data_ptr();
    run(call, p, fused_moe_cpu_route_backward, CUDA(fused_moe_cuda_route_backward));
    return {dlogits, rounded};
}

Tensor route_backward(const Tensor &dscores_, const Tensor &logits, const Tensor &ids, int64_t score_func,
                      bool route_norm, double route_scale, double route_norm_eps,
                      const OptTensor &expert_scale) {
    const char *op = "route_backward";
    const PreparedRouteBackward own = prepare_route_backward(op, logits, ids, score_func, route_norm,
                                                             route_scale, route_norm_eps, expert_scale);
    const Tensor dscores = *scores_of(op, dscores_, own.logits, {own.p.T, own.p.K});
    return run_route_backward(begin_call(op, own.logits), own, dscores, own.logits.scalar_type()).dlogits;
}
