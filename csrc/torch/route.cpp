/* Routing: logits, scores and ids, their gradients, and the plan of rows and tiles from the ids. */
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

Tensor router_logits(const Tensor &x_, const Tensor &weight_, const OptTensor &bias_) {
    const char *op = "router_logits";
    check_dim(op, "x", x_, 2);
    check_router(op, weight_, x_.size(0));
    int64_t T = x_.size(0), E = weight_.size(0), D = weight_.size(1);
    const bool is_16_bit = x_.scalar_type() == ScalarType::Half || x_.scalar_type() == ScalarType::BFloat16;
    const bool is_mixed = is_16_bit && weight_.scalar_type() == ScalarType::Float;
    check_device(op, "weight", weight_, x_);
    Tensor x = operand(op, "x", x_, x_, {T, D});
    Tensor weight = operand(op, "weight", weight_, is_mixed ? weight_ : x, {E, D});
    OptTensor bias = operand(op, "bias", bias_, weight, {E});
    FusedMoeRouterLogits p = {};
    p.dtype = float_dtype(op, x);
    p.weight_dtype = float_dtype(op, weight);
    Call call = begin_call(op, x);
    Tensor logits = new_tensor(x, {T, E}, score_dtype(x));
    p.x = data(x);
    p.weight = data(weight);
    p.bias = data(bias);
    p.logits = logits.mutable_data_ptr();
    p.T = T;
    p.D = D;
    p.E = (int32_t)E;
    run_tiered(call, p, x, fused_moe_cpu_router_logits, CUDA(fused_moe_cuda_select_router_logits),
               CUDA(fused_moe_cuda_router_logits));
    return logits;
}

void run_router_dgrad(const Call &call, const Tensor &dlogits, const Tensor &weight, const Tensor &dx,
                      bool accumulate) {
    FusedMoeRouterDgrad p = {};
    p.dlogits = data(dlogits);
    p.weight = data(weight);
    p.dx = dx.mutable_data_ptr();
    p.accumulate = accumulate;
    p.T = dx.size(0);
    p.D = dx.size(1);
    p.E = (int32_t)weight.size(0);
    p.dtype = float_dtype(call.op, dx);
    run_tiered(call, p, dx, fused_moe_cpu_router_dgrad, CUDA(fused_moe_cuda_select_router_dgrad),
               CUDA(fused_moe_cuda_router_dgrad));
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

PreparedRoute prepare_route(const Tensor &logits, const OptTensor &bias, int64_t top_k, int64_t score_func,
                            bool route_norm, double route_scale, double route_norm_eps, int64_t num_groups,
                            int64_t num_limited_groups, int64_t group_score, const OptTensor &given_ids,
                            const OptTensor &num_tokens, const OptTensor &expert_scale) {
    const char *op = "route";
    check_dim(op, "logits", logits, 2);
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
    PreparedRoute own =
        prepare_route(logits, bias, top_k, score_func, route_norm, route_scale, route_norm_eps, num_groups,
                      num_limited_groups, group_score, given_ids, num_tokens, expert_scale);
    run_route(begin_call("route", own.logits), own.p);
    return {own.scores, own.ids};
}

Tensor route_backward(const Tensor &dscores_, const Tensor &logits_, const Tensor &ids_, int64_t score_func,
                      bool route_norm, double route_scale, double route_norm_eps,
                      const OptTensor &expert_scale) {
    const char *op = "route_backward";
    check_dim(op, "logits", logits_, 2);
    check_size(op, "score_func", score_func, FUSED_MOE_SOFTMAX, FUSED_MOE_SQRTSOFTPLUS);
    Tensor logits = dense(logits_), ids = index_tensor(op, "ids", ids_, logits, 2);
    int64_t T = logits.size(0), E = logits.size(1), K = ids.size(1);
    check_size(op, "experts", E, 1, MAX_ROUTED_EXPERTS);
    check_size(op, "top_k", K, 1, MAX_TOP_K);
    check_shape(op, "ids", ids, {T, K});
    Tensor dscores = *scores_of(op, dscores_, logits, {T, K});
    OptTensor scale = scale_of(op, expert_scale, logits);

    FusedMoeRouteBackward p = {};
    p.dtype = float_dtype(op, logits);
    Call call = begin_call(op, logits);
    Tensor dlogits = new_tensor(logits, {T, E});
    p.dscores = data(dscores);
    p.logits = data(logits);
    p.ids = ints(ids);
    p.expert_scale = data(scale);
    p.dlogits = dlogits.mutable_data_ptr();
    p.score_func = (FusedMoeScoreFunc)score_func;
    p.route_norm = route_norm;
    p.route_scale = route_scale;
    p.norm_eps = route_norm_eps;
    p.T = T;
    p.E = (int32_t)E;
    p.K = (int32_t)K;
    run(call, p, fused_moe_cpu_route_backward, CUDA(fused_moe_cuda_route_backward));
    return dlogits;
}

/* What every plan of E experts has; the kernel's params point into it. */
struct PlanTensors {
    Tensor counts, offsets, schedule;
};

template <typename Params>
static PlanTensors new_plan(const Tensor &like, int64_t E, Params *p) {
    PlanTensors plan = {new_tensor(like, {E}, ScalarType::Int), new_tensor(like, {E + 1}, ScalarType::Int),
                        new_tensor(like, {fused_moe_schedule_words(E)}, ScalarType::Int)};
    p->counts = mutable_ints(plan.counts);
    p->offsets = mutable_ints(plan.offsets);
    p->schedule = mutable_ints(plan.schedule);
    p->E = (int32_t)E;
    return plan;
}

/* The operands of a plan, checked; its results are the caller's. Makes ids and expert_map dense. */
static FusedMoeRoutePlan plan_of_ids(const char *op, Tensor &ids, int64_t num_experts,
                                     OptTensor &expert_map) {
    check_dim(op, "ids", ids, 2);
    check_size(op, "num_experts", num_experts, 1, MAX_EXPERTS);
    ids = dense(ids);
    check_size(op, "tokens", ids.size(0), 0, INT32_MAX);
    check_size(op, "ids of a token", ids.size(1), 0, INT32_MAX);
    check_size(op, "T*K", ids.size(0) * ids.size(1), 0, MAX_ROWS);
    FusedMoeRoutePlan p = {};
    p.ids = data(ids);
    p.ids_dtype = dtype_of(op, "ids", ids, false);
    if (expert_map) {
        expert_map = index_tensor(op, "expert_map", *expert_map, ids, 1);
        check_size(op, "ids in expert_map", expert_map->size(0), 1, INT32_MAX);
        p.expert_map = ints(*expert_map);
        p.map_size = expert_map->size(0);
    }
    p.T = ids.size(0);
    p.K = (int32_t)ids.size(1);
    p.E = (int32_t)num_experts;
    p.tile_rows = FUSED_MOE_TILE_ROWS;
    return p;
}

void run_route_plan(const Call &call, FusedMoeRoutePlan &p, const Tensor &ids) {
    OptTensor workspace;
#ifdef FUSED_MOE_WITH_CUDA
    int64_t bytes = call.is_cuda ? (int64_t)fused_moe_cuda_route_plan_workspace(&p) : 0;
    if (bytes > 0) {
        workspace = new_tensor(ids, {bytes}, ScalarType::Byte);
        p.workspace = workspace->mutable_data_ptr();
    }
#else
    (void)ids;
#endif
    run(call, p, fused_moe_cpu_route_plan, CUDA(fused_moe_cuda_route_plan));
}

FusedMoePlanner planner_of(const Call &call, const FusedMoeRoutePlan &p, const FusedMoeRoute *route,
                           const FusedMoeUpGate *up, const FusedMoeGroupedMM *down) {
#ifdef FUSED_MOE_WITH_CUDA
    if (call.is_cuda) return fused_moe_cuda_planner(&p, route, up, down);
#else
    (void)call, (void)p, (void)route, (void)up, (void)down;
#endif
    return FUSED_MOE_PLAN_BY_KERNELS;
}

void run_private_plan(const Call &call, PrivatePlan &plan, const FusedMoeRoute *route,
                      FusedMoePlanner planner) {
    const bool with_choice = planner == FUSED_MOE_PLAN_WITH_CHOICE;
    if (route && !with_choice) run_route(call, *route);
    if (planner == FUSED_MOE_PLAN_BY_KERNELS) run_route_plan(call, plan.p, plan.ids);
#ifdef FUSED_MOE_WITH_CUDA
    if (with_choice || planner == FUSED_MOE_PLAN_BY_CLUSTER)
        check_status(call, fused_moe_cuda_cluster_plan(&plan.p, with_choice ? route : nullptr, call.stream));
#endif
}

PlanResult route_plan(const Tensor &ids_, int64_t num_experts, const OptTensor &expert_map_) {
    const char *op = "route_plan";
    Tensor ids = ids_;
    OptTensor expert_map = expert_map_;
    FusedMoeRoutePlan p = plan_of_ids(op, ids, num_experts, expert_map);
    Call call = begin_call(op, ids);
    PlanTensors plan = new_plan(ids, num_experts, &p);
    Tensor row_token = new_tensor(ids, {p.T * p.K}, ScalarType::Int);
    Tensor row_slot = new_tensor(ids, {p.T * p.K}, ScalarType::Int);
    Tensor token_row = new_tensor(ids, {p.T, p.K}, ScalarType::Int);
    p.row_token = mutable_ints(row_token);
    p.row_slot = mutable_ints(row_slot);
    p.token_row = mutable_ints(token_row);
    run_route_plan(call, p, ids);
    return {plan.counts, plan.offsets, plan.schedule, row_token, row_slot, token_row};
}

PrivatePlan prepare_plan(const char *op, const Tensor &ids, const Tensor &x, int64_t num_experts,
                         const OptTensor &expert_map) {
    PrivatePlan plan = {{}, {}, ids, {}, {}, expert_map};
    FusedMoeRoutePlan &p = plan.p;
    p = plan_of_ids(op, plan.ids, num_experts, plan.expert_map);
    check_device(op, "ids", plan.ids, x);
    check_size(op, "rows of x", x.size(0), p.T, p.T);
    int64_t E = num_experts, R = p.T * p.K, words = fused_moe_schedule_words(E);
    plan.counts = new_tensor(x, {E}, ScalarType::Int);
    plan.memory = new_tensor(x, {E + 1 + words + 3 * R}, ScalarType::Int);
    p.counts = mutable_ints(plan.counts);
    p.offsets = mutable_ints(plan.memory);
    p.schedule = p.offsets + E + 1;
    p.row_token = p.schedule + words;
    p.row_slot = p.row_token + R;
    p.token_row = p.row_slot + R;
    plan.rows.p = {p.offsets + 1, p.row_token, p.row_slot, p.token_row, p.schedule, p.T, p.K, R, p.E};
    plan.rows.has_maps = true;
    return plan;
}

/* The last result is offsets, schedule, row_token, row_slot and token_row, one after the other. */
std::tuple<Tensor, Tensor, Tensor, Tensor>
private_plan(const OptTensor &logits, const OptTensor &ids, int64_t num_experts, const OptTensor &expert_map,
             const OptTensor &bias, int64_t top_k, int64_t score_func, bool route_norm, double route_scale,
             double route_norm_eps, int64_t num_groups, int64_t num_limited_groups, int64_t group_score,
             const OptTensor &num_tokens, const OptTensor &expert_scale) {
    const char *op = "private_plan";
    check(logits || ids, op, "logits or ids", "neither");
    check(!logits || !expert_map, op, "no expert_map with logits", "both");
    std::optional<PreparedRoute> route;
    if (logits)
        route = prepare_route(*logits, bias, top_k, score_func, route_norm, route_scale, route_norm_eps,
                              num_groups, num_limited_groups, group_score, ids, num_tokens, expert_scale);
    const Tensor &planned = route ? route->ids : *ids;
    PrivatePlan plan = prepare_plan(op, planned, planned, route ? logits->size(1) : num_experts, expert_map);
    const FusedMoeRoute *choice = route ? &route->p : nullptr;
    Call call = begin_call(op, planned);
    run_private_plan(call, plan, choice, planner_of(call, plan.p, choice));
    Tensor scores = route ? route->scores : new_empty_result(planned, ScalarType::Float);
    return {scores, planned, plan.counts, plan.memory};
}

/* A tensor of rows may tell their number instead of num_rows: torch.jit.trace makes integers constants. */
std::tuple<Tensor, Tensor, Tensor> count_plan(const Tensor &counts_, int64_t num_rows,
                                              const OptTensor &rows) {
    const char *op = "count_plan";
    check_dim(op, "counts", counts_, 1);
    if (rows) {
        check_dim(op, "rows", *rows, 2);
        num_rows = rows->size(0);
    }
    Tensor counts_in = dense(counts_);
    int64_t E = counts_in.size(0);
    check_size(op, "experts", E, 1, MAX_EXPERTS);
    check_size(op, "num_rows", num_rows, 0, MAX_ROWS);
    FusedMoeCountPlan p = {};
    p.counts_dtype = dtype_of(op, "counts", counts_in, false);
    Call call = begin_call(op, counts_in);
    PlanTensors plan = new_plan(counts_in, E, &p);
    p.counts_in = data(counts_in);
    p.R = num_rows;
    run(call, p, fused_moe_cpu_count_plan, CUDA(fused_moe_cuda_count_plan));
    return {plan.counts, plan.offsets, plan.schedule};
}
