/* The experts, in two sides with h between them: up_gate and its gradients, the down GEMM and its gradients.
 *
 * The main_grads given to experts_up and experts_down are there for the autograd formula, which hands them to
 * the backward operators. No forward touches them. */
#include <utility>

#include "operators.h"

/* --- shapes --------------------------------------------------------------------------------------------- */

Width width_of(const char *op, int64_t E, int64_t rows, int64_t D, bool has_w3, int64_t layout) {
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    check((layout == FUSED_MOE_SEPARATE) == has_w3, op, "w3 with layout separate and with no other",
          has_w3 ? "w3 with another" : "no w3 with layout separate");
    bool packed = layout == FUSED_MOE_HALVES || layout == FUSED_MOE_INTERLEAVED;
    int64_t F = packed ? rows / 2 : rows;
    if (E < 1 || D < 1 || rows < 1 || (packed && rows % 2))
        fail(op, "expected w1 of E, D, F >= 1 (2F even), found (", E, ", ", rows, ", ", D, ")");
    return {E, D, F, layout == FUSED_MOE_UNGATED ? F : 2 * F, rows};
}

static Width width_of(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout) {
    check_dim(op, "w1", w1, 3);
    return width_of(op, w1.size(0), w1.size(1), w1.size(2), w3.has_value(), layout);
}

/* The weights of the up side; w3's data is NULL where there is none. */
struct UpWeights {
    FusedMoeWeight w1, w3;
};

static UpWeights up_weights(const char *op, const Tensor &w1, const OptTensor &w3, const Tensor &like,
                            const Width &s) {
    UpWeights weights = {weight(op, "w1", w1, like, {s.E, s.w1_rows, s.D}), {}};
    if (w3) weights.w3 = weight(op, "w3", *w3, like, {s.E, s.F, s.D});
    return weights;
}

static void check_scores(const char *op, const OptTensor &scores, const RowMap &map) {
    check(!scores || map.has_maps, op, "a plan with row maps beside scores", "one without");
}

/* --- PDL ------------------------------------------------------------------------------------------------ */

/* The launches of one call's experts, in their order. */
struct ExpertsPdl {
    FusedMoePdl up_gate, down, combine;
};

/* down_reads_before_wait: it reads plan and weights while up_gate runs. plans: the down GEMM makes the plan.
 * The combine reads the plan while the down GEMM runs, which has waited for it. */
static ExpertsPdl pdl_of(bool down_reads_before_wait, bool plans) {
    ExpertsPdl pdl = {};
    pdl.up_gate.lets_next_start = pdl.down.reads_before_wait = down_reads_before_wait;
    pdl.down.lets_next_start = plans;
    pdl.combine.reads_before_wait = true;
    return pdl;
}

/* --- up side -------------------------------------------------------------------------------------------- */

/* A call of up_gate, and the tensors that it needs alive. */
struct UpSide {
    FusedMoeUpGate p;
    OptTensor b1, b3, scores, addend;
    OptTensor h; /* where it is kept */
    Tensor a;
};

/* x is aligned(). */
static UpSide up_side(const Tensor &x, const UpWeights &weights, const Width &s, const OptTensor &b1_,
                      const OptTensor &b3_, const OptTensor &scores_, const RowMap &map, int64_t layout,
                      int64_t activation, const Constants &constants, bool save_h,
                      const OptTensor &addend_ = {}) {
    const char *op = "experts_up";
    OptTensor b1 = operand(op, "b1", b1_, x, {s.E, s.w1_rows}), b3 = operand(op, "b3", b3_, x, {s.E, s.F});
    OptTensor scores = scores_of(op, scores_, x, {map.p.T, map.p.K});
    OptTensor addend = operand(op, "addend", addend_, x, {map.p.R, s.H});
    check_size(op, "x's width", x.size(1), s.D, s.D);
    check_scores(op, scores, map);
    check(weights.w3.data || !b3, op, "b3 with w3 and not without", "b3 without w3");
    FusedMoeUpGate p = {};
    p.activation = activation_of(op, activation, constants);
    p.dtype = float_dtype(op, x);

    OptTensor h;
    if (save_h) h = new_tensor(x, {map.p.R, s.H});
    Tensor a = new_tensor(x, {map.p.R, s.F});
    p.x = data(x);
    p.scores = data(scores);
    p.w1 = weights.w1;
    p.w3 = weights.w3;
    p.b1 = data(b1);
    p.b3 = data(b3);
    p.addend = data(addend);
    p.h = h ? h->mutable_data_ptr() : nullptr;
    p.a = a.mutable_data_ptr();
    p.row_map = map.p;
    p.D = s.D;
    p.F = s.F;
    p.layout = (FusedMoeLayout)layout;
    return {p, b1, b3, scores, addend, h, a};
}

static void run_up_side(UpSide &side, const Tensor &x) {
    Call call = begin_call("experts_up", x);
    run_tiered(call, side.p, x, fused_moe_cpu_up_gate, CUDA(fused_moe_cuda_select_up_gate),
               CUDA(fused_moe_cuda_up_gate));
}

static RowMap tokens_map(const char *op, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                         const TensorList &plan, int64_t layout) {
    check_dim(op, "x", x, 2);
    return row_map_of(op, x, RowsOf::TOKENS, width_of(op, w1, w3, layout).E, plan);
}

std::tuple<Tensor, Tensor> experts_up(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                      const OptTensor &b1, const OptTensor &b3, const OptTensor &scores,
                                      const TensorList &plan, int64_t layout, int64_t activation,
                                      const Constants &constants, bool save_h, const OptTensor &,
                                      const OptTensor &) {
    const RowMap map = tokens_map("experts_up", x, w1, w3, plan, layout);
    const Width s = width_of("experts_up", w1, w3, layout);
    const Tensor rows = aligned(x);
    UpSide side = up_side(rows, up_weights("experts_up", w1, w3, x, s), s, b1, b3, scores, map, layout,
                          activation, constants, save_h);
    run_up_side(side, rows);
    return {side.h ? *side.h : new_tensor(x, {0, s.H}), side.a};
}

std::tuple<Tensor, Tensor> up_gate(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                   const OptTensor &b1, const OptTensor &b3, const TensorList &plan,
                                   int64_t layout, int64_t activation, const Constants &constants) {
    const RowMap map = tokens_map("experts_up", x, w1, w3, plan, layout);
    const Width s = width_of("experts_up", w1, w3, layout);
    const Tensor rows = aligned(x);
    UpSide side = up_side(rows, up_weights("experts_up", w1, w3, x, s), s, b1, b3, {}, map, layout,
                          activation, constants, true);
    run_up_side(side, rows);
    return {*side.h, side.a};
}

/* Quantised weights, checked: what their up side's parameters point to. */
struct QuantizedUp {
    QuantizedWeight w1;
    std::optional<QuantizedWeight> w3;
    Width s;
    UpWeights weights;

    QuantizedUp(const char *op, const QuantizedTensors &given1, const std::optional<QuantizedTensors> &given3,
                const Tensor &x, int64_t layout)
        : w1(quantized_weight(op, given1, x)) {
        s = width_of(op, given1.data.size(0), w1.p.out, w1.p.in, given3.has_value(), layout);
        if (given3) {
            w3 = quantized_weight(op, *given3, x);
            check_size(op, "experts of data3", given3->data.size(0), s.E, s.E);
            check_size(op, "out of data3", w3->p.out, s.F, s.F);
            check_size(op, "in of data3", w3->p.in, s.D, s.D);
        }
        weights = {weight(w1), w3 ? weight(*w3) : FusedMoeWeight{}};
    }
    QuantizedUp(const QuantizedUp &) = delete; /* weights points into this one */
};

/* A quantised weight as one list: data, scale, zero where there are zero points, and the same of a second
 * packing where there is one. */
static QuantizedTensors tensors_of(const char *op, const char *name, const TensorList &list, int64_t format) {
    const size_t n = list.size();
    if (n != 2 && n != 3 && n != 4 && n != 6)
        fail(op, "expected ", name, " of data, scale and perhaps zero, in one packing or two, found ", n,
             " tensors");
    const bool has_zero = n % 3 == 0, has_packing = n > 3;
    const size_t packing = has_zero ? 3 : 2;
    QuantizedTensors given = {list[0], list[1], {}, format, {}, {}, {}};
    if (has_zero) given.zero = list[2];
    if (has_packing) given.data_t = list[packing], given.scale_t = list[packing + 1];
    if (has_packing && has_zero) given.zero_t = list[packing + 2];
    return given;
}

/* experts_up of quantised weights, with what adapters add to h. */
std::tuple<Tensor, Tensor> quantized_up(const Tensor &x_, const TensorList &w1, int64_t format1,
                                        const TensorList &w3, int64_t format3, const OptTensor &b1,
                                        const OptTensor &b3, const OptTensor &scores, const OptTensor &addend,
                                        const TensorList &plan, int64_t layout, int64_t activation,
                                        const Constants &constants, bool save_h) {
    const char *op = "quantized_up";
    check_dim(op, "x", x_, 2);
    const Tensor x = aligned(x_);
    std::optional<QuantizedTensors> given3;
    if (!w3.empty()) given3 = tensors_of(op, "w3", w3, format3);
    const QuantizedUp up(op, tensors_of(op, "w1", w1, format1), given3, x, layout);
    const RowMap map = row_map_of(op, x, RowsOf::TOKENS, up.s.E, plan);
    UpSide side =
        up_side(x, up.weights, up.s, b1, b3, scores, map, layout, activation, constants, save_h, addend);
    run_up_side(side, x);
    return {side.h ? *side.h : new_tensor(x, {0, up.s.H}), side.a};
}

/* A copy: with one expert the view would be dense itself, and two gradients would share memory. */
static Tensor columns(Tensor &db, int64_t first, int64_t count) {
    Tensor copy = new_tensor(db, {db.size(0), count});
    return torch::stable::copy_(copy, torch::stable::narrow(db, 1, first, count));
}

/* dx_rows = dh w1, or dgate w1 + dup w3. */
static Tensor run_up_dgrad(const Call &call, const Tensor &dh, const UpWeights &weights, const Width &s,
                           const RowMap &map) {
    const FusedMoeWeight b[2] = {transposed(weights.w1), transposed(weights.w3)};
    const int64_t N[2] = {s.w1_rows, weights.w3.data ? s.F : 0};
    Tensor dx_rows = new_tensor(dh, {map.p.R, s.D});
    run_grouped_mm(call, dh, b, N, {}, grouping_of(map), dx_rows);
    return dx_rows;
}

Tensor up_dgrad(const Tensor &dh_, const Tensor &w1, const OptTensor &w3, const TensorList &plan,
                int64_t layout) {
    const char *op = "up_dgrad";
    Width s = width_of(op, w1, w3, layout);
    check_dim(op, "dh", dh_, 2);
    Tensor dh = operand(op, "dh", dh_, dh_, {dh_.size(0), s.H});
    RowMap map = row_map_of(op, dh, RowsOf::ROWS, s.E, plan);
    UpWeights weights = up_weights(op, w1, w3, dh, s);
    (void)float_dtype(op, dh);
    return run_up_dgrad(begin_call(op, dh), dh, weights, s, map);
}

/* A weight's gradient is added to its main_grad where there is one; dw1 and dw3 are then empty. The
 * router's gradient of x, dlogits gate, is added to dx. */
UpGrads experts_up_backward_accumulate(const Tensor &dh_, const Tensor &x_, const Tensor &w1,
                                       const OptTensor &w3, const OptTensor &scores_, const TensorList &plan,
                                       int64_t layout, bool need_dx, bool need_dw1, bool need_dw3,
                                       bool need_db1, bool need_db3, bool need_dscores,
                                       const OptTensor &main_grad1, const OptTensor &main_grad3,
                                       const OptTensor &dlogits_, const OptTensor &gate_) {
    const char *op = "experts_up_backward";
    check_dim(op, "x", x_, 2);
    Tensor x = aligned(x_);
    Width s = width_of(op, w1, w3, layout);
    RowMap map = row_map_of(op, x, RowsOf::TOKENS, s.E, plan);
    int64_t T = map.p.T, K = map.p.K, R = map.p.R;
    Tensor dh = operand(op, "dh", dh_, x, {R, s.H});
    OptTensor scores = scores_of(op, scores_, x, {T, K});
    check(dlogits_.has_value() == gate_.has_value(), op, "dlogits with gate", "one without the other");
    const int64_t num_logits = gate_ ? gate_->size(0) : 0;
    OptTensor gate = operand(op, "gate", gate_, x, {num_logits, s.D});
    OptTensor dlogits = operand(op, "dlogits", dlogits_, x, {x.size(0), num_logits});
    check_size(op, "x's width", x.size(1), s.D, s.D);
    check_scores(op, scores, map);
    check((w3 || !(need_dw3 || need_db3)) && (scores || !need_dscores), op,
          "w3 and scores where their gradients are needed", "one of them absent");
    UpWeights weights = up_weights(op, w1, w3, x, s);
    FusedMoeWeight sums[2] = {}, fresh[2] = {};
    if (need_dw1 && main_grad1) sums[0] = main_grad(op, "main_grad1", *main_grad1, x, {s.E, s.w1_rows, s.D});
    if (need_dw3 && main_grad3) sums[1] = main_grad(op, "main_grad3", *main_grad3, x, {s.E, s.F, s.D});
    (void)float_dtype(op, x);

    Call call = begin_call(op, x);
    OptTensor dx, dw1, dw3, db1, db3, dscores;
    if (need_dx || need_dscores) {
        Tensor dx_rows = run_up_dgrad(call, dh, weights, s, map);
        if (need_dscores) {
            dscores = new_tensor(x, {T, K}, score_dtype(x));
            run_unpermute_backward(call, x, dx_rows, {}, map, {}, dscores);
        }
        if (need_dx && map.has_maps) {
            dx = new_tensor(x, {T, s.D});
            run_unpermute(call, unpermute_of(op, dx_rows, scores, map, *dx));
        } else if (need_dx) {
            dx = dx_rows;
        }
        if (need_dx && dlogits) run_router_dgrad(call, *dlogits, *gate, *dx, true);
    }
    if (need_dw1 && !main_grad1) fresh[0] = weight(*(dw1 = new_grad(w1)));
    if (need_dw3 && !main_grad3) fresh[1] = weight(*(dw3 = new_grad(*w3)));
    const int64_t M[2] = {s.w1_rows, w3 ? s.F : 0};
    const GatheredRows x_rows = {&x, map.p.row_token, map.p.row_slot, scores ? &*scores : nullptr};
    run_wgrad(call, dh, x_rows, fresh, M, false, grouping_of(map));
    run_wgrad(call, dh, x_rows, sums, M, true, grouping_of(map));
    if (need_db1 || need_db3) {
        Tensor db = new_tensor(x, {s.E, s.H});
        run_bias_grad(call, {&dh, nullptr, nullptr, nullptr}, R, grouping_of(map), db);
        if (need_db1) db1 = w3 ? columns(db, 0, s.F) : db;
        if (need_db3) db3 = columns(db, s.F, s.F);
    }
    for (OptTensor *grad : {&dx, &dw1, &dw3, &db1, &db3})
        if (!*grad) *grad = new_empty_result(x);
    if (!dscores) dscores = new_empty_result(x, score_dtype(x));
    return {*dx, *dw1, *dw3, *db1, *db3, *dscores};
}

UpGrads experts_up_backward(const Tensor &dh, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                            const OptTensor &scores, const TensorList &plan, int64_t layout, bool need_dx,
                            bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool need_dscores,
                            const OptTensor &dlogits, const OptTensor &gate) {
    return experts_up_backward_accumulate(dh, x, w1, w3, scores, plan, layout, need_dx, need_dw1, need_dw3,
                                          need_db1, need_db3, need_dscores, {}, {}, dlogits, gate);
}

/* --- down side ------------------------------------------------------------------------------------------ */

static FusedMoeWeight down_weight(const Tensor &w2, const Tensor &like, int64_t F) {
    const char *op = "experts_down";
    check_dim(op, "w2", w2, 3);
    check_widths(op, "w2", w2, 0);
    return weight(op, "w2", w2, like, {w2.size(0), w2.size(1), F});
}

/* Calls of the down GEMM and of unpermute, and the tensors that they need alive. */
struct DownSide {
    FusedMoeGroupedMM p;
    FusedMoeUnpermute combine; /* of a plan with row maps */
    OptTensor b2, scores;
    Shared shared;
    Tensor y;
    OptTensor out; /* none without row maps: y is the result */
};

/* w2: (E, D, a's width). a is aligned(). */
static DownSide down_side(const Tensor &a, const FusedMoeWeight &w2, int64_t D, const OptTensor &b2_,
                          const OptTensor &scores_, const RowMap &map, const Shared &shared_,
                          const OptTensor &given_out = {}) {
    const char *op = "experts_down";
    const int64_t N[2] = {a.size(1), 0};
    OptTensor b2 = operand(op, "b2", b2_, a, {map.p.E, D});
    OptTensor scores = scores_of(op, scores_, a, {map.p.T, map.p.K});
    check_scores(op, scores, map);
    check(!shared_.rows || map.has_maps, op, "a plan with row maps beside shared", "one without");
    const Shared shared = shared_of(op, shared_, a, map.p.T, D);
    const FusedMoeWeight b[2] = {w2, {}};
    (void)float_dtype(op, a);

    Tensor y = new_tensor(a, {map.p.R, D});
    DownSide side = {grouped_mm_of(op, a, b, N, b2, grouping_of(map), y), {}, b2, scores, shared, y, {}};
    side.p.pdl = pdl_of(false, false).down;
    if (!map.has_maps) return side;
    side.out = given_out ? *given_out : new_tensor(a, {map.p.T, D});
    side.combine = unpermute_of(op, y, scores, map, *side.out, shared);
    side.combine.pdl = pdl_of(false, false).combine;
    return side;
}

static Tensor run_down_side(DownSide &side, const Tensor &a) {
    Call call = begin_call("experts_down", a);
    run_grouped_mm(call, side.p, a);
    if (!side.out) return side.y;
    run_unpermute(call, side.combine);
    return *side.out;
}

Tensor experts_down(const Tensor &a, const OptTensor &, const Tensor &w2, const OptTensor &b2,
                    const OptTensor &scores, const TensorList &plan, int64_t, int64_t, const Constants &,
                    const OptTensor &, const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "experts_down";
    check_dim(op, "a", a, 2);
    const Tensor rows = aligned(a);
    const RowMap map = row_map_of(op, a, RowsOf::ROWS, w2.size(0), plan);
    DownSide side =
        down_side(rows, down_weight(w2, a, a.size(1)), w2.size(1), b2, scores, map, {shared, shared_gate});
    return run_down_side(side, rows);
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

/* Without gradients: from the ids to out and counts in one call, which keeps nothing for backward. route: the
 * choice of the ids, which has not run; or NULL.
 *
 * If up_gate and the down GEMM are two launches, they share counters. The plan's kernel zeroes counters that
 * are not zeros, so no memset comes between two kernels, and each may begin before the one before it has
 * ended (PDL). */
static std::tuple<Tensor, Tensor>
run_experts(const char *op, const Tensor &x, const UpWeights &weights, const Width &s,
            const FusedMoeWeight &w2, int64_t out_dim, const OptTensor &b1, const OptTensor &b3,
            const OptTensor &b2, const Tensor &scores, const Tensor &ids, int64_t layout, int64_t activation,
            const Constants &constants, bool score_on_input, const OptTensor &expert_map,
            const Shared &shared, const OptTensor &out, const FusedMoeRoute *route) {
    PrivatePlan plan = prepare_plan(op, ids, x, s.E, expert_map);
    FusedMoeRoutePlan &p = plan.p;
    Call call = begin_call(op, plan.ids);
    OptTensor of_x, of_y;
    (score_on_input ? of_x : of_y) = scores;
    UpSide up = up_side(x, weights, s, b1, b3, of_x, plan.rows, layout, activation, constants, false);
    DownSide down = down_side(up.a, w2, out_dim, b2, of_y, plan.rows, shared, out);
    const FusedMoePlanner planner = planner_of(call, p, route, &up.p, &down.p);
    const bool in_gemm = planner == FUSED_MOE_PLAN_IN_GEMM;
    if (in_gemm) up.p.unplanned = down.p.unplanned = &p;
    auto make_plan = [&](int32_t tile_rows) {
        p.tile_rows = tile_rows;
        run_private_plan(call, plan, route, planner);
    };
    if (run_together(call, up, down, x, make_plan)) return {*down.out, plan.counts};

    const Counters counters = find_counters(call, x);
    p.counters = counters.to_zero ? counters.data : nullptr; /* which the plan's kernel has to zero */
    make_plan(FUSED_MOE_TILE_ROWS);
    up.p.workspace.counters = down.p.workspace.counters = counters.data;
    const bool is_quantized = weights.w1.quantized || w2.quantized;
    const ExpertsPdl pdl =
        pdl_of(fused_moe_down_reads_before_wait(p.T * p.K, p.E, s.F, is_quantized), in_gemm && !is_quantized);
    up.p.pdl = pdl.up_gate;
    down.p.pdl = pdl.down;
    run_up_side(up, x);
    return {run_down_side(down, up.a), plan.counts};
}

static std::tuple<Tensor, Tensor> run_experts(const char *op, const Tensor &x_, const Tensor &w1,
                                              const OptTensor &w3, const Tensor &w2, const OptTensor &b1,
                                              const OptTensor &b3, const OptTensor &b2, const Tensor &scores,
                                              const Tensor &ids, int64_t layout, int64_t activation,
                                              const Constants &constants, bool score_on_input,
                                              const OptTensor &expert_map, const Shared &shared,
                                              const OptTensor &out, const FusedMoeRoute *route = nullptr) {
    check_dim(op, "x", x_, 2);
    check_dim(op, "w1", w1, 3);
    check_dim(op, "w2", w2, 3);
    check_size(op, "experts of w2", w2.size(0), w1.size(0), w1.size(0));
    Tensor x = aligned(x_);
    const Width s = width_of(op, w1, w3, layout);
    return run_experts(op, x, up_weights(op, w1, w3, x, s), s, down_weight(w2, x, s.F), w2.size(1), b1, b3,
                       b2, scores, ids, layout, activation, constants, score_on_input, expert_map, shared,
                       out, route);
}

std::tuple<Tensor, Tensor> experts(const Tensor &x, const Tensor &w1, const OptTensor &w3, const Tensor &w2,
                                   const OptTensor &b1, const OptTensor &b3, const OptTensor &b2,
                                   const Tensor &scores, const Tensor &ids, int64_t layout,
                                   int64_t activation, const Constants &constants, bool score_on_input,
                                   const OptTensor &expert_map, const OptTensor &shared,
                                   const OptTensor &shared_gate) {
    return run_experts("experts", x, w1, w3, w2, b1, b3, b2, scores, ids, layout, activation, constants,
                       score_on_input, expert_map, {shared, shared_gate}, {});
}

/* Writes out, which shares no memory with an input. */
Tensor experts_out(const Tensor &x, const Tensor &w1, const OptTensor &w3, const Tensor &w2,
                   const OptTensor &b1, const OptTensor &b3, const OptTensor &b2, const Tensor &scores,
                   const Tensor &ids, int64_t layout, int64_t activation, const Constants &constants,
                   bool score_on_input, const Tensor &out, const OptTensor &expert_map,
                   const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "experts_out";
    check_dim(op, "w2", w2, 3);
    check_shape(op, "out", out, {ids.size(0), w2.size(1)});
    check_dtype(op, "out", out, x.scalar_type());
    check_device(op, "out", out, x);
    check(out.is_contiguous(), op, "a contiguous out", "one in other strides");
    return std::get<1>(run_experts(op, x, w1, w3, w2, b1, b3, b2, scores, ids, layout, activation, constants,
                                   score_on_input, expert_map, {shared, shared_gate}, out));
}

/* The same of quantised weights, each in a format of its own. format3 counts with data3. */
std::tuple<Tensor, Tensor>
quantized_experts(const Tensor &x_, const Tensor &data1, const Tensor &scale1, const OptTensor &zero1,
                  int64_t format1, const OptTensor &data3, const OptTensor &scale3, const OptTensor &zero3,
                  int64_t format3, const Tensor &data2, const Tensor &scale2, const OptTensor &zero2,
                  int64_t format2, const OptTensor &b1, const OptTensor &b3, const OptTensor &b2,
                  const Tensor &scores, const Tensor &ids, int64_t layout, int64_t activation,
                  const Constants &constants, bool score_on_input, const OptTensor &expert_map,
                  const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "quantized_experts";
    check_dim(op, "x", x_, 2);
    Tensor x = aligned(x_);
    check(data3.has_value() == scale3.has_value(), op, "data3 with scale3", "one without the other");
    std::optional<QuantizedTensors> given3;
    if (data3) given3 = QuantizedTensors{*data3, *scale3, zero3, format3, {}, {}, {}};
    const QuantizedUp up(op, {data1, scale1, zero1, format1, {}, {}, {}}, given3, x, layout);
    const QuantizedWeight w2 = quantized_weight(op, {data2, scale2, zero2, format2, {}, {}, {}}, x);
    check_size(op, "experts of data2", data2.size(0), up.s.E, up.s.E);
    check_size(op, "in of data2", w2.p.in, up.s.F, up.s.F);
    return run_experts(op, x, up.weights, up.s, weight(w2), w2.p.out, b1, b3, b2, scores, ids, layout,
                       activation, constants, score_on_input, expert_map, {shared, shared_gate}, {}, nullptr);
}

/* The router, too: a layer's routed experts without gradients. */
std::tuple<Tensor, Tensor, Tensor, Tensor>
routed_experts(const Tensor &x, const Tensor &gate, const OptTensor &gate_bias, const OptTensor &expert_bias,
               const Tensor &w1, const OptTensor &w3, const Tensor &w2, const OptTensor &b1,
               const OptTensor &b3, const OptTensor &b2, int64_t top_k, int64_t score_func, bool route_norm,
               double route_scale, double route_norm_eps, int64_t num_groups, int64_t num_limited_groups,
               int64_t group_score, int64_t layout, int64_t activation, const Constants &constants,
               const OptTensor &given_ids, const OptTensor &num_tokens, const OptTensor &expert_scale,
               const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "routed_experts";
    check_dim(op, "gate", gate, 2);
    check_dim(op, "w1", w1, 3);
    check_size(op, "experts of gate", gate.size(0), w1.size(0), w1.size(0));
    Tensor logits = router_logits(x, gate, gate_bias);
    PreparedRoute route =
        prepare_route(logits, expert_bias, top_k, score_func, route_norm, route_scale, route_norm_eps,
                      num_groups, num_limited_groups, group_score, given_ids, num_tokens, expert_scale);
    auto [out, counts] = run_experts(op, x, w1, w3, w2, b1, b3, b2, route.scores, route.ids, layout,
                                     activation, constants, false, {}, {shared, shared_gate}, {}, &route.p);
    return {out, counts, route.ids, logits};
}

/* --- gradients of the down side ------------------------------------------------------------------------- */

/* What down_dgrad reads, checked; what it writes is filled in by the caller. */
struct DownDgrad {
    Tensor dout, h;
    OptTensor b2, scores;
    RowMap map;
    FusedMoeDownDgrad p;
};

static DownDgrad down_dgrad_of(const char *op, const Tensor &dout_, const Tensor &w2, const OptTensor &b2,
                               const Tensor &h, const OptTensor &scores, const TensorList &plan,
                               int64_t layout, int64_t activation, const Constants &constants) {
    check_dim(op, "dout", dout_, 2);
    check_dim(op, "w2", w2, 3);
    check_widths(op, "w2", w2, 0);
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    Tensor dout = aligned(dout_);
    int64_t E = w2.size(0), D = w2.size(1), F = w2.size(2), H = layout == FUSED_MOE_UNGATED ? F : 2 * F;
    check_shape(op, "dout", dout, {dout.size(0), D});
    RowMap map = row_map_of(op, dout, RowsOf::TOKENS, E, plan);
    DownDgrad d = {dout,
                   operand(op, "h", h, dout, {map.p.R, H}),
                   operand(op, "b2", b2, dout, {E, D}),
                   scores_of(op, scores, dout, {map.p.T, map.p.K}),
                   std::move(map),
                   {}};
    check_scores(op, d.scores, d.map);
    d.p.dout = data(d.dout);
    d.p.w2 = weight(op, "w2", w2, dout, {E, D, F});
    d.p.b2 = data(d.b2);
    d.p.h = data(d.h);
    d.p.scores = data(d.scores);
    d.p.row_map = d.map.p;
    d.p.D = D;
    d.p.F = F;
    d.p.layout = (FusedMoeLayout)layout;
    d.p.activation = activation_of(op, activation, constants);
    d.p.dtype = float_dtype(op, dout);
    return d;
}

static void run_down_dgrad(const Call &call, DownDgrad &d) {
    run_tiered(call, d.p, d.dout, fused_moe_cpu_down_dgrad, CUDA(fused_moe_cuda_select_down_dgrad),
               CUDA(fused_moe_cuda_down_dgrad));
}

std::tuple<Tensor, Tensor, Tensor> down_dgrad(const Tensor &dout, const Tensor &w2, const OptTensor &b2,
                                              const Tensor &h, const OptTensor &scores,
                                              const TensorList &plan, int64_t layout, int64_t activation,
                                              const Constants &constants) {
    const char *op = "down_dgrad";
    DownDgrad d = down_dgrad_of(op, dout, w2, b2, h, scores, plan, layout, activation, constants);
    Call call = begin_call(op, d.dout);
    Tensor dh = new_tensor(d.h, {d.h.size(0), d.h.size(1)}), a_scaled = new_tensor(d.h, {d.map.p.R, d.p.F});
    Tensor dscores = new_tensor(d.dout, {d.map.p.T, d.map.p.K}, score_dtype(d.dout));
    d.p.dh = dh.mutable_data_ptr();
    d.p.a_scaled = a_scaled.mutable_data_ptr();
    d.p.dscores = dscores.mutable_data_ptr();
    run_down_dgrad(call, d);
    return {dh, a_scaled, dscores};
}

DownGrads experts_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                           const OptTensor &b2, const OptTensor &scores,
                                           const TensorList &plan, int64_t layout, int64_t activation,
                                           const Constants &constants, bool need_dh, bool need_dw2,
                                           bool need_db2, bool need_dscores, const OptTensor &main_grad2) {
    const char *op = "experts_down_backward";
    DownDgrad d = down_dgrad_of(op, dout, w2, b2, h, scores, plan, layout, activation, constants);
    const FusedMoeRowMap &map = d.map.p;
    int64_t E = map.E, R = map.R, D = d.p.D, F = d.p.F;
    FusedMoeWeight dw = {};
    if (need_dw2 && main_grad2) dw = main_grad(op, "main_grad2", *main_grad2, d.dout, {E, D, F});

    Call call = begin_call(op, d.dout);
    OptTensor dh, a_scaled, dscores, dw2, db2;
    if (need_dh) {
        dh = new_tensor(d.h, {d.h.size(0), d.h.size(1)});
        d.p.dh = dh->mutable_data_ptr();
    }
    if (need_dscores) {
        dscores = new_tensor(d.dout, {map.T, map.K}, score_dtype(d.dout));
        d.p.dscores = dscores->mutable_data_ptr();
    }
    if (need_dw2) {
        a_scaled = new_tensor(d.dout, {R, F});
        d.p.a_scaled = a_scaled->mutable_data_ptr();
    }
    if (need_dh || need_dscores || need_dw2) run_down_dgrad(call, d);
    if (need_dw2) {
        if (!main_grad2) dw = weight(*(dw2 = new_grad(w2)));
        const FusedMoeWeight parts[2] = {transposed(dw), {}};
        const int64_t M[2] = {F, 0};
        const GatheredRows dout_rows = {&d.dout, map.row_token, nullptr, nullptr};
        run_wgrad(call, *a_scaled, dout_rows, parts, M, main_grad2.has_value(), grouping_of(d.map));
    }
    if (need_db2) {
        db2 = new_tensor(d.dout, {E, D});
        const GatheredRows dout_rows = {&d.dout, map.row_token, map.row_slot,
                                        d.scores ? &*d.scores : nullptr};
        run_bias_grad(call, dout_rows, R, grouping_of(d.map), *db2);
    }
    for (OptTensor *grad : {&dh, &dw2, &db2})
        if (!*grad) *grad = new_empty_result(d.dout);
    if (!dscores) dscores = new_empty_result(d.dout, score_dtype(d.dout));
    return {*dh, *dw2, *db2, *dscores};
}

DownGrads experts_down_backward(const Tensor &dout, const Tensor &h, const Tensor &w2, const OptTensor &b2,
                                const OptTensor &scores, const TensorList &plan, int64_t layout,
                                int64_t activation, const Constants &constants, bool need_dh, bool need_dw2,
                                bool need_db2, bool need_dscores) {
    return experts_down_backward_accumulate(dout, h, w2, b2, scores, plan, layout, activation, constants,
                                            need_dh, need_dw2, need_db2, need_dscores, {});
}
