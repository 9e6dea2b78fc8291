/* The plan of rows and tiles: of ids, of counts, and of a call without gradients, which makes its own. */
#include "operators.h"

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

static void run_route_plan(const Call &call, FusedMoeRoutePlan &p, const Tensor &ids, int64_t R,
                           int64_t *dropped) {
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
    FusedMoeBoundedPlan bounded = {p, R, dropped};
    run(call, bounded, fused_moe_cpu_route_plan, CUDA(fused_moe_cuda_route_plan));
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
    if (planner == FUSED_MOE_PLAN_BY_KERNELS) run_route_plan(call, plan.p, plan.ids, plan.rows.p.R, nullptr);
#ifdef FUSED_MOE_WITH_CUDA
    if (with_choice || planner == FUSED_MOE_PLAN_BY_CLUSTER)
        check_status(call, fused_moe_cuda_cluster_plan(&plan.p, with_choice ? route : nullptr, call.stream));
#endif
}

static PlanResult new_route_plan(const char *op, Tensor ids, int64_t num_experts, OptTensor expert_map,
                                 std::optional<int64_t> max_rows, int64_t *dropped) {
    FusedMoeRoutePlan p = plan_of_ids(op, ids, num_experts, expert_map);
    const int64_t R = std::min(max_rows.value_or(INT64_MAX), p.T * p.K);
    check_size(op, "max_rows", R, 0, INT64_MAX);
    Call call = begin_call(op, ids);
    PlanTensors plan = new_plan(ids, num_experts, &p);
    Tensor row_token = new_tensor(ids, {R}, ScalarType::Int);
    Tensor row_slot = new_tensor(ids, {R}, ScalarType::Int);
    Tensor token_row = new_tensor(ids, {p.T, p.K}, ScalarType::Int);
    p.row_token = mutable_ints(row_token);
    p.row_slot = mutable_ints(row_slot);
    p.token_row = mutable_ints(token_row);
    run_route_plan(call, p, ids, R, dropped);
    return {plan.counts, plan.offsets, plan.schedule, row_token, row_slot, token_row};
}

PlanResult route_plan(const Tensor &ids, int64_t num_experts, const OptTensor &expert_map,
                      const std::optional<int64_t> &max_rows) {
    return new_route_plan("route_plan", ids, num_experts, expert_map, max_rows, nullptr);
}

PlanResult route_plan_dropped(const Tensor &ids, int64_t num_experts, const OptTensor &expert_map,
                              int64_t max_rows, const Tensor &dropped_rows) {
    const char *op = "route_plan_dropped";
    check_dtype(op, "dropped_rows", dropped_rows, ScalarType::Long);
    check_shape(op, "dropped_rows", dropped_rows, {});
    check_device(op, "dropped_rows", dropped_rows, ids);
    return new_route_plan(op, ids, num_experts, expert_map, max_rows,
                          (int64_t *)dropped_rows.mutable_data_ptr());
}

int64_t part_end(int64_t bytes) {
    return (bytes + 255) / 256 * 256;
}

int64_t plan_words(int64_t E, int64_t R) {
    return E + 1 + fused_moe_schedule_words(E) + 3 * R;
}

FusedMoeRowMap row_map_in(const int32_t *packed, int64_t T, int64_t K, int64_t E) {
    const int32_t *schedule = packed + E + 1, *row_token = schedule + fused_moe_schedule_words(E);
    const int64_t R = T * K;
    return {packed + 1, row_token, row_token + R, row_token + 2 * R, schedule, T, K, R, (int32_t)E};
}

PrivatePlan prepare_plan(const char *op, const Tensor &ids, const Tensor &x, int64_t num_experts,
                         const OptTensor &expert_map, int64_t row_bytes0, int64_t row_bytes1) {
    PrivatePlan plan = {{}, {}, {}, ids, {}, {}, expert_map};
    FusedMoeRoutePlan &p = plan.p;
    p = plan_of_ids(op, plan.ids, num_experts, plan.expert_map);
    check_device(op, "ids", plan.ids, x);
    check_size(op, "rows of x", x.size(0), p.T, p.T);
    const int64_t E = num_experts, R = p.T * p.K, own_words = plan_words(E, R);
    plan.counts = new_tensor(x, {E}, ScalarType::Int);
    const int64_t first = part_end(4 * own_words), second = first + part_end(R * row_bytes0);
    const bool has_matrices = row_bytes0 || row_bytes1;
    const int64_t all_words = has_matrices ? (second + part_end(R * row_bytes1)) / 4 : own_words;
    plan.memory = new_tensor(x, {all_words}, ScalarType::Int);
    p.counts = mutable_ints(plan.counts);
    p.offsets = mutable_ints(plan.memory);
    plan.matrix[0] = (char *)p.offsets + first;
    plan.matrix[1] = (char *)p.offsets + second;
    const FusedMoeRowMap map = plan.rows.p = row_map_in(p.offsets, p.T, p.K, E);
    p.schedule = (int32_t *)map.schedule;
    p.row_token = (int32_t *)map.row_token;
    p.row_slot = (int32_t *)map.row_slot;
    p.token_row = (int32_t *)map.token_row;
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
        route = prepare_route(*logits, bias,
                              {top_k, score_func, route_norm, route_scale, route_norm_eps, num_groups,
                               num_limited_groups, group_score},
                              ids, num_tokens, expert_scale);
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
