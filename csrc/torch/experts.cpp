/* Both sides of the experts in one call, with the router or without it. With `keeps` it returns what backward
 * reads. */
#include <utility>

#include "sides.h"

/* --- PDL ------------------------------------------------------------------------------------------------ */

/* The first two launches of one call's experts; down_side has said what the combine may do. */
struct ExpertsPdl {
    FusedMoePdl up_gate, down;
};

/* down_reads_before_wait: it reads plan and weights while up_gate runs. plans: the down GEMM makes the
 * plan. */
static ExpertsPdl pdl_of(bool down_reads_before_wait, bool plans) {
    ExpertsPdl pdl = {};
    pdl.up_gate.lets_next_start = pdl.down.reads_before_wait = down_reads_before_wait;
    pdl.down.lets_next_start = plans;
    return pdl;
}

/* --- both sides ----------------------------------------------------------------------------------------- */

/* Both sides in one launch, if a tier has a kernel for these few rows. make_plan(tile_rows) runs before it.
 * The combine is part of the launch if the launch makes the plan, and else a second launch. */
template <typename MakePlan>
static bool run_together(const Call &call, const UpSide &up, const DownSide &down, const Tensor &x,
                         MakePlan make_plan) {
#ifdef FUSED_MOE_WITH_CUDA
    FusedMoeExperts p = {up.p, down.p, down.combine, {}, 0};
    if (!call.is_cuda || !fused_moe_cuda_select_experts(&p)) return false;
    const Tensor memory = new_tensor(x, {p.workspace.bytes}, ScalarType::Byte);
    p.workspace.data = memory.mutable_data_ptr();
    make_plan(p.tile_rows);
    check_status(call, fused_moe_cuda_experts(&p, call.stream));
    if (!up.p.unplanned) run_unpermute(call, down.combine);
    return true;
#else
    (void)call, (void)up, (void)down, (void)x, (void)make_plan;
    return false;
#endif
}

static ChosenExperts chosen_experts(const char *op, const ExpertsArguments &given, const Tensor &x,
                                    int64_t E) {
    if (!given.gate) {
        check(given.scores && given.ids, op, "scores and ids, or a gate", "neither");
        check(!given.gate_bias && !given.expert_bias && !given.expert_scale && !given.num_tokens &&
                  !given.routing,
              op, "arguments of a router beside a gate alone", "no gate");
        return {*given.scores, *given.ids, {}, {}};
    }
    check(!given.scores && !given.expert_map, op, "no scores and no expert_map beside a gate", "one of them");
    check_dim(op, "gate", *given.gate, 2);
    check_size(op, "experts of gate", given.gate->size(0), E, E);
    PreparedLogits logits = prepare_logits(x, *given.gate, given.gate_bias);
    PreparedRoute route = prepare_route(logits.logits, given.expert_bias,
                                        routing_of(op, given.routing, given.constants[2], given.constants[3]),
                                        given.ids, given.num_tokens, given.expert_scale);
    const Tensor scores = route.scores, ids = route.ids;
    return {scores, ids, std::move(logits), std::move(route)};
}

/* Both sides' results: kept is [h, packed] if the call keeps them for backward. */
struct Sides {
    Tensor out, counts;
    TensorList kept;
};

/* Both sides by the launches of experts_up and experts_down, after the plan. a and y are freed at the end.
 * Kernels make the plan, as in route_plan: a cluster would wait for eight free SMs of one GPC, which work on
 * other streams may hold while a model trains. */
static Sides keep_sides(const char *op, const ExpertsArguments &given, const Tensor &x,
                        const ChosenExperts &chosen, const UpWeights &weights, const Width &s,
                        const FusedMoeWeight &w2, int64_t D) {
    const int64_t bytes = (int64_t)x.element_size();
    PrivatePlan plan = prepare_plan(op, chosen.ids, x, s.E, {});
    const int64_t R = plan.rows.p.R, y_offset = part_end(R * s.F * bytes);
    const Tensor h = new_tensor(x, {R, s.H});
    const Tensor both = new_tensor(x, {y_offset + R * D * bytes}, ScalarType::Byte);
    char *const a = (char *)both.mutable_data_ptr();
    const Tensor out = new_tensor(x, {x.size(0), D});
    UpSide up = up_side(op, x, weights, s, given.b1, given.b3, {}, plan.rows, given.layout, given.activation,
                        {given.constants[0], given.constants[1]}, a, h);
    DownSide down = down_side(op, x, a, s.F, w2, D, given.b2, chosen.scores, plan.rows,
                              {given.shared, given.shared_gate}, a + y_offset, out);
    down.p.pdl = {}; /* up_gate comes before it, and lets no kernel begin early */
    const Call call = begin_call(op, plan.ids);
    run_logits(call, *chosen.logits);
    run_private_plan(call, plan, &chosen.route->p, FUSED_MOE_PLAN_BY_KERNELS);
    run_up_side(call, up, x);
    run_down_side(call, down, x);
    return {out, plan.counts, {h, plan.memory}};
}

/* Out and counts in one call, which keeps nothing for backward.
 *
 * If up_gate and the down GEMM are two launches, they share counters. The plan's kernel zeroes counters that
 * are not zeros, so no memset comes between two kernels, and each may begin before the one before it has
 * ended (PDL). */
static std::tuple<Tensor, Tensor> run_sides(const char *op, const ExpertsArguments &given, const Tensor &x,
                                            const ChosenExperts &chosen, const UpWeights &weights,
                                            const Width &s, const FusedMoeWeight &w2, int64_t D,
                                            const OptTensor &given_out) {
    const int64_t bytes = (int64_t)x.element_size();
    PrivatePlan plan = prepare_plan(op, chosen.ids, x, s.E, given.expert_map, s.F * bytes, D * bytes);
    FusedMoeRoutePlan &p = plan.p;
    const FusedMoeRoute *route = chosen.route ? &chosen.route->p : nullptr;
    Call call = begin_call(op, plan.ids);
    OptTensor of_x, of_y;
    (given.score_on_input ? of_x : of_y) = chosen.scores;
    void *const a = plan.matrix[0], *const y = plan.matrix[1];
    const Tensor out = out_of(op, given_out, x, D);
    UpSide up = up_side(op, x, weights, s, given.b1, given.b3, of_x, plan.rows, given.layout,
                        given.activation, {given.constants[0], given.constants[1]}, a);
    DownSide down =
        down_side(op, x, a, s.F, w2, D, given.b2, of_y, plan.rows, {given.shared, given.shared_gate}, y, out);
    const FusedMoePlanner planner = planner_of(call, p, route, &up.p, &down.p);
    const bool in_gemm = planner == FUSED_MOE_PLAN_IN_GEMM;
    if (in_gemm) up.p.unplanned = down.p.unplanned = &p;
    auto make_plan = [&](int32_t tile_rows) {
        p.tile_rows = tile_rows;
        run_private_plan(call, plan, route, planner);
    };
    if (chosen.logits) run_logits(call, *chosen.logits);
    if (run_together(call, up, down, x, make_plan)) return {out, plan.counts};

    const Counters counters = find_counters(call, x);
    p.counters = counters.to_zero ? counters.data : nullptr; /* which the plan's kernel has to zero */
    make_plan(FUSED_MOE_TILE_ROWS);
    up.p.workspace.counters = down.p.workspace.counters = counters.data;
    const bool is_quantized = weights.w1.quantized || w2.quantized;
    const ExpertsPdl pdl =
        pdl_of(fused_moe_down_reads_before_wait(p.T * p.K, p.E, s.F, is_quantized), in_gemm && !is_quantized);
    up.p.pdl = pdl.up_gate;
    down.p.pdl = pdl.down;
    run_up_side(call, up, x);
    run_down_side(call, down, x);
    return {out, plan.counts};
}

static Sides run_float(const char *op, const ExpertsArguments &given, const Tensor &x,
                       const ChosenExperts &chosen, const OptTensor &out) {
    check(given.w1.size() == 1 && given.w3.size() <= 1 && given.w2.size() == 1, op,
          "w1, w3 and w2 of one tensor each (w3 of none) without formats", "another number");
    const Tensor &w1 = given.w1[0], &w2 = given.w2[0];
    const OptTensor w3 = given.w3.empty() ? OptTensor() : given.w3[0];
    check_dim(op, "w2", w2, 3);
    const Width s = width_of(op, w1, w3, given.layout);
    check_size(op, "experts of w2", w2.size(0), s.E, s.E);
    const UpWeights up = up_weights(op, w1, w3, x, s);
    const FusedMoeWeight down = down_weight(op, w2, x, s.F);
    if (given.keeps) return keep_sides(op, given, x, chosen, up, s, down, w2.size(1));
    const auto [y, counts] = run_sides(op, given, x, chosen, up, s, down, w2.size(1), out);
    return {y, counts, {}};
}

static std::tuple<Tensor, Tensor> run_quantized(const char *op, const ExpertsArguments &given,
                                                const Tensor &x, const ChosenExperts &chosen,
                                                const OptTensor &out) {
    const QuantizedUp up(op, given.w1, given.formats[0], given.w3, given.formats[1], x, given.layout);
    const QuantizedWeight w2 = quantized_weight(op, tensors_of(op, "w2", given.w2, given.formats[2]), x);
    check_size(op, "experts of w2", given.w2[0].size(0), up.s.E, up.s.E);
    check_size(op, "in of w2", w2.p.in, up.s.F, up.s.F);
    return run_sides(op, given, x, chosen, up.weights, up.s, weight(w2), w2.p.out, out);
}

static ExpertsResult run_experts(const char *op, const ExpertsArguments &given, const OptTensor &out) {
    check_dim(op, "x", given.x, 2);
    check(!given.w1.empty() && !given.w2.empty(), op, "w1 and w2 of a tensor at least", "an empty list");
    check(given.formats.empty() || given.formats.size() == 3, op, "formats of w1, w3 and w2, or none",
          "another number");
    check(!given.eight_bits || !given.formats.empty(), op, "formats with eight_bits", "none");
    check_size(op, "dimensions of w1", given.w1[0].dim(), 3, 4);
    const size_t num_constants = given.gate ? 4 : 2;
    check(given.constants.size() == num_constants, op,
          "constants of [alpha, limit], beside a gate with route_scale and route_norm_eps", "another number");
    check(!given.keeps || (given.gate && given.formats.empty() && !given.score_on_input && !out), op,
          "keeps beside a gate, with float weights, scored outputs and a new result", "another call");
    const Tensor x = aligned(given.x);
    const ChosenExperts chosen = chosen_experts(op, given, x, given.w1[0].size(0));
    TensorList routed;
    if (chosen.logits) routed = {chosen.ids, chosen.logits->logits};
    if (given.formats.empty()) {
        const Sides sides = run_float(op, given, x, chosen, out);
        if (given.keeps) routed.insert(routed.end(), {chosen.scores, sides.kept[0], sides.kept[1]});
        return {sides.out, sides.counts, std::move(routed)};
    }
    const auto [y, counts] = given.eight_bits ? run_eight_bits(op, given, x, chosen, out)
                                              : run_quantized(op, given, x, chosen, out);
    return {y, counts, std::move(routed)};
}

#define PARAMETER(type, name) , const type &name
#define NAME(type, name) , name

ExpertsResult experts(const Tensor &x EXPERTS_ARGUMENTS(PARAMETER)) {
    return run_experts("experts", {x EXPERTS_ARGUMENTS(NAME)}, {});
}

/* out shares no memory with an input. */
std::tuple<Tensor, Tensor, Tensor> experts_out(const Tensor &out,
                                               const Tensor &x EXPERTS_ARGUMENTS(PARAMETER)) {
    const auto [y, counts, routed] = run_experts("experts_out", {x EXPERTS_ARGUMENTS(NAME)}, out);
    if (gate) return {counts, routed[0], routed[1]};
    return {counts, new_empty_result(x, ScalarType::Int), new_empty_result(x, score_dtype(x))};
}
