/* The gradients of both sides of the experts. */
#include <utility>

#include "sides.h"

/* --- up side -------------------------------------------------------------------------------------------- */

/* A copy: with one expert the view would be dense itself, and two gradients would share memory. */
static Tensor columns(Tensor &db, int64_t first, int64_t count) {
    Tensor copy = new_tensor(db, {db.size(0), count});
    return torch::stable::copy_(copy, torch::stable::narrow(db, 1, first, count));
}

/* dx_rows = dh w1, or dgate w1 + dup w3. */
static Tensor run_up_dgrad(const Call &call, const Tensor &dh, const UpWeights &weights, const Width &s,
                           const RowMap &map, bool after_any) {
    const FusedMoeWeight b[2] = {transposed(weights.w1), transposed(weights.w3)};
    const int64_t N[2] = {s.w1_rows, weights.w3.data ? s.F : 0};
    Tensor dx_rows = new_tensor(dh, {map.p.R, s.D});
    FusedMoeGroupedMM p = grouped_mm_of(data(dh), float_dtype(call.op, dh), map.p.R, b, N, {},
                                        grouping_of(map), dx_rows.mutable_data_ptr(), s.D);
    p.pdl.after_any = after_any;
    run_grouped_mm(call, p, dh);
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
    return run_up_dgrad(begin_call(op, dh), dh, weights, s, map, true);
}

/* Those that are needed. */
struct NeededUpGrads {
    OptTensor dx, dw1, dw3, db1, db3, dscores;
};
struct NeededDownInputGrads {
    OptTensor dh, a_scaled, dscores; /* dw2 = dout^T a_scaled */
};
struct NeededDownWeightGrads {
    OptTensor dw2, db2;
};

struct UpNeeds {
    bool dx, dw1, dw3, db1, db3, dscores;
};

/* The up side's operands of backward, checked; without dh, which an earlier kernel of the call may write. */
struct UpBackward {
    const Tensor &w1;
    const OptTensor &w3;
    Tensor x;
    OptTensor scores;
    RowMap map;
    Width s;
    UpWeights weights;
    UpNeeds needs;
    std::optional<FusedMoeWeight> main_grad1, main_grad3;
    bool after_any = true; /* up_dgrad may follow another library's kernel: FusedMoePdl */
};

static UpBackward up_backward_of(const char *op, const Tensor &x_, const Tensor &w1, const OptTensor &w3,
                                 const OptTensor &scores, const TensorList &plan, int64_t layout,
                                 const UpNeeds &needs, const OptTensor &main_grad1,
                                 const OptTensor &main_grad3) {
    check_dim(op, "x", x_, 2);
    (void)float_dtype(op, x_);
    const Tensor x = aligned(x_);
    const Width s = width_of(op, w1, w3, layout);
    RowMap map = row_map_of(op, x, RowsOf::TOKENS, s.E, plan);
    UpBackward up = {w1,
                     w3,
                     x,
                     scores_of(op, scores, x, {map.p.T, map.p.K}),
                     std::move(map),
                     s,
                     up_weights(op, w1, w3, x, s),
                     needs,
                     {},
                     {}};
    check_size(op, "x's width", x.size(1), s.D, s.D);
    check_scores(op, up.scores, up.map);
    check((w3 || !(needs.dw3 || needs.db3)) && (up.scores || !needs.dscores), op,
          "w3 and scores where their gradients are needed", "one of them absent");
    if (needs.dw1 && main_grad1)
        up.main_grad1 = main_grad(op, "main_grad1", *main_grad1, x, {s.E, s.w1_rows, s.D});
    if (needs.dw3 && main_grad3) up.main_grad3 = main_grad(op, "main_grad3", *main_grad3, x, {s.E, s.F, s.D});
    return up;
}

/* A weight's gradient is added to its main_grad where there is one; dw1 and dw3 are then absent. The
 * router's gradient of x, dlogits gate, is added to dx. dh, dlogits and gate are checked, as x is. */
static NeededUpGrads run_up_backward(const Call &call, const UpBackward &up, const Tensor &dh,
                                     const OptTensor &dlogits, const OptTensor &gate) {
    const auto &[w1, w3, x, scores, map, s, weights, needs, main_grad1, main_grad3, after_any] = up;
    const int64_t T = map.p.T, K = map.p.K, R = map.p.R;
    OptTensor dx, dw1, dw3, db1, db3, dscores;
    if (needs.dx || needs.dscores) {
        Tensor dx_rows = run_up_dgrad(call, dh, weights, s, map, after_any);
        if (needs.dscores) {
            dscores = new_tensor(x, {T, K}, score_dtype(x));
            run_unpermute_backward(call, x, dx_rows, {}, map, {}, dscores);
        }
        if (needs.dx && map.has_maps) {
            dx = new_tensor(x, {T, s.D});
            run_unpermute(call, unpermute_of(call.op, dx_rows, scores, map, *dx));
        } else if (needs.dx) {
            dx = dx_rows;
        }
        if (needs.dx && dlogits) run_router_dgrad(call, *dlogits, *gate, *dx, true);
    }
    FusedMoeWeight sums[2] = {}, fresh[2] = {};
    if (main_grad1) sums[0] = *main_grad1;
    if (main_grad3) sums[1] = *main_grad3;
    if (needs.dw1 && !main_grad1) fresh[0] = weight(*(dw1 = new_grad(w1)));
    if (needs.dw3 && !main_grad3) fresh[1] = weight(*(dw3 = new_grad(*w3)));
    const int64_t M[2] = {s.w1_rows, w3 ? s.F : 0};
    const GatheredRows x_rows = {&x, map.p.row_token, map.p.row_slot, scores ? &*scores : nullptr};
    run_wgrad(call, dh, x_rows, fresh, M, false, grouping_of(map));
    run_wgrad(call, dh, x_rows, sums, M, true, grouping_of(map));
    if (needs.db1 || needs.db3) {
        Tensor db = new_tensor(x, {s.E, s.H});
        run_bias_grad(call, {&dh, nullptr, nullptr, nullptr}, R, grouping_of(map), db);
        if (needs.db1) db1 = w3 ? columns(db, 0, s.F) : db;
        if (needs.db3) db3 = columns(db, s.F, s.F);
    }
    return {dx, dw1, dw3, db1, db3, dscores};
}

static UpGrads run_up_backward(const char *op, const UpBackward &up, const Tensor &dh_,
                               const OptTensor &dlogits_, const OptTensor &gate_) {
    const Tensor &x = up.x, dh = operand(op, "dh", dh_, x, {up.map.p.R, up.s.H});
    check(dlogits_.has_value() == gate_.has_value(), op, "dlogits with gate", "one without the other");
    if (gate_) check_dim(op, "gate", *gate_, 2);
    const int64_t num_logits = gate_ ? gate_->size(0) : 0;
    const OptTensor gate = operand(op, "gate", gate_, x, {num_logits, up.s.D});
    const OptTensor dlogits = operand(op, "dlogits", dlogits_, x, {x.size(0), num_logits});
    auto [dx, dw1, dw3, db1, db3, dscores] = run_up_backward(begin_call(op, x), up, dh, dlogits, gate);
    for (OptTensor *grad : {&dx, &dw1, &dw3, &db1, &db3})
        if (!*grad) *grad = new_empty_result(x);
    if (!dscores) dscores = new_empty_result(x, score_dtype(x));
    return {*dx, *dw1, *dw3, *db1, *db3, *dscores};
}

UpGrads experts_up_backward(const Tensor &dh, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                            const OptTensor &scores, const TensorList &plan, int64_t layout, bool need_dx,
                            bool need_dw1, bool need_dw3, bool need_db1, bool need_db3, bool need_dscores,
                            const OptTensor &dlogits, const OptTensor &gate) {
    const char *op = "experts_up_backward";
    const UpNeeds needs = {need_dx, need_dw1, need_dw3, need_db1, need_db3, need_dscores};
    return run_up_backward(op, up_backward_of(op, x, w1, w3, scores, plan, layout, needs, {}, {}), dh,
                           dlogits, gate);
}

UpGrads experts_up_backward_accumulate(const Tensor &dh, const Tensor &x, const Tensor &w1,
                                       const OptTensor &w3, const OptTensor &scores, const TensorList &plan,
                                       int64_t layout, bool need_dx, bool need_dw1, bool need_dw3,
                                       bool need_db1, bool need_db3, bool need_dscores,
                                       const OptTensor &main_grad1, const OptTensor &main_grad3,
                                       const OptTensor &dlogits, const OptTensor &gate) {
    const char *op = "experts_up_backward_accumulate";
    const UpNeeds needs = {need_dx, need_dw1, need_dw3, need_db1, need_db3, need_dscores};
    return run_up_backward(op,
                           up_backward_of(op, x, w1, w3, scores, plan, layout, needs, main_grad1, main_grad3),
                           dh, dlogits, gate);
}

/* --- down side ------------------------------------------------------------------------------------------ */

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

struct DownNeeds {
    bool dh, dw2, db2, dscores;
};

/* The down side's operands of backward, checked. */
struct DownBackward {
    const Tensor &w2;
    DownDgrad d;
    DownNeeds needs;
    std::optional<FusedMoeWeight> main_grad2;
};

static DownBackward down_backward_of(const char *op, const Tensor &dout, const Tensor &h, const Tensor &w2,
                                     const OptTensor &b2, const OptTensor &scores, const TensorList &plan,
                                     int64_t layout, int64_t activation, const Constants &constants,
                                     const DownNeeds &needs, const OptTensor &main_grad2) {
    DownBackward down = {
        w2, down_dgrad_of(op, dout, w2, b2, h, scores, plan, layout, activation, constants), needs, {}};
    const auto &p = down.d.p;
    if (needs.dw2 && main_grad2)
        down.main_grad2 = main_grad(op, "main_grad2", *main_grad2, down.d.dout, {p.row_map.E, p.D, p.F});
    return down;
}

static NeededDownInputGrads run_down_dgrad(const Call &call, DownBackward &down) {
    auto &[w2, d, needs, main_grad2] = down;
    const FusedMoeRowMap &map = d.map.p;
    OptTensor dh, a_scaled, dscores;
    if (needs.dh) {
        dh = new_tensor(d.h, {d.h.size(0), d.h.size(1)});
        d.p.dh = dh->mutable_data_ptr();
    }
    if (needs.dscores) {
        dscores = new_tensor(d.dout, {map.T, map.K}, score_dtype(d.dout));
        d.p.dscores = dscores->mutable_data_ptr();
    }
    if (needs.dw2) {
        a_scaled = new_tensor(d.dout, {map.R, d.p.F});
        d.p.a_scaled = a_scaled->mutable_data_ptr();
    }
    if (needs.dh || needs.dscores || needs.dw2) run_down_dgrad(call, d);
    return {dh, a_scaled, dscores};
}

/* dw2 is added to main_grad2 where there is one; it is then absent. `down` and a_scaled are passed by value,
 * so their memory is freed at the end. */
static NeededDownWeightGrads run_down_wgrad(const Call &call, DownBackward down, OptTensor a_scaled) {
    auto &[w2, d, needs, main_grad2] = down;
    const FusedMoeRowMap &map = d.map.p;
    OptTensor dw2, db2;
    if (needs.dw2) {
        const FusedMoeWeight dw = main_grad2 ? *main_grad2 : weight(*(dw2 = new_grad(w2)));
        const FusedMoeWeight parts[2] = {transposed(dw), {}};
        const int64_t M[2] = {d.p.F, 0};
        const GatheredRows dout_rows = {&d.dout, map.row_token, nullptr, nullptr};
        run_wgrad(call, *a_scaled, dout_rows, parts, M, main_grad2.has_value(), grouping_of(d.map));
    }
    if (needs.db2) {
        db2 = new_tensor(d.dout, {map.E, d.p.D});
        const GatheredRows dout_rows = {&d.dout, map.row_token, map.row_slot,
                                        d.scores ? &*d.scores : nullptr};
        run_bias_grad(call, dout_rows, map.R, grouping_of(d.map), *db2);
    }
    return {dw2, db2};
}

static DownGrads run_down_backward(const char *op, DownBackward down) {
    const Tensor dout = down.d.dout;
    const Call call = begin_call(op, dout);
    auto [dh, a_scaled, dscores] = run_down_dgrad(call, down);
    auto [dw2, db2] = run_down_wgrad(call, std::move(down), std::move(a_scaled));
    for (OptTensor *grad : {&dh, &dw2, &db2})
        if (!*grad) *grad = new_empty_result(dout);
    if (!dscores) dscores = new_empty_result(dout, score_dtype(dout));
    return {*dh, *dw2, *db2, *dscores};
}

DownGrads experts_down_backward(const Tensor &dout, const Tensor &h, const Tensor &w2, const OptTensor &b2,
                                const OptTensor &scores, const TensorList &plan, int64_t layout,
                                int64_t activation, const Constants &constants, bool need_dh, bool need_dw2,
                                bool need_db2, bool need_dscores) {
    const char *op = "experts_down_backward";
    return run_down_backward(op,
                             down_backward_of(op, dout, h, w2, b2, scores, plan, layout, activation,
                                              constants, {need_dh, need_dw2, need_db2, need_dscores}, {}));
}

DownGrads experts_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                           const OptTensor &b2, const OptTensor &scores,
                                           const TensorList &plan, int64_t layout, int64_t activation,
                                           const Constants &constants, bool need_dh, bool need_dw2,
                                           bool need_db2, bool need_dscores, const OptTensor &main_grad2) {
    const char *op = "experts_down_backward_accumulate";
    return run_down_backward(op, down_backward_of(op, dout, h, w2, b2, scores, plan, layout, activation,
                                                  constants, {need_dh, need_dw2, need_db2, need_dscores},
                                                  main_grad2));
}

/* --- both sides and the router -------------------------------------------------------------------------- */

/* x in `like`'s dtype: itself, or a copy. */
static Tensor in_dtype_of(const Tensor &x, const Tensor &like) {
    if (x.scalar_type() == like.scalar_type()) return x;
    Tensor copy = new_tensor(x, {x.size(0), x.size(1)}, like.scalar_type());
    return torch::stable::copy_(copy, x);
}

/* The backward of experts with keeps: that of the down side, of route and of the up side, whose dx gets the
 * router's part. The gradients of the router's parameters are products of dlogits, which the caller makes. */
TensorList experts_backward(const Tensor &dout, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                            const Tensor &w2, const Tensor &gate, const Tensor &h, const Tensor &scores,
                            const Tensor &logits, const TensorList &plan, int64_t layout, int64_t activation,
                            const Constants &constants, const Ints &routing, const Ints &needs,
                            const OptTensor &b2, const OptTensor &expert_scale) {
    const char *op = "experts_backward";
    check(constants.size() == 4, op, "constants of [alpha, limit, route_scale, route_norm_eps]",
          "another number");
    check(routing.size() == 6, op, "routing of six integers", "another number");
    check(needs.size() == 7, op, "needs of dw1, dw3, dw2, db1, db3, db2 and dscores", "another number");
    check(plan.size() == 2 && plan[1].dim() == 2, op, "a packed plan", "another one");
    const Constants of_activation = {constants[0], constants[1]};
    DownBackward down = down_backward_of(op, dout, h, w2, b2, scores, plan, layout, activation, of_activation,
                                         {true, needs[2] != 0, needs[5] != 0, true}, {});
    const UpNeeds up_needs = {true, needs[0] != 0, needs[1] != 0, needs[3] != 0, needs[4] != 0, false};
    UpBackward up = up_backward_of(op, x, w1, w3, {}, plan, layout, up_needs, {}, {});
    PreparedRouteBackward route = prepare_route_backward(op, logits, plan[1], routing[1], routing[2] != 0,
                                                         constants[2], constants[3], expert_scale);
    const Width &s = up.s;
    check_size(op, "w2's width", w2.size(2), s.F, s.F);
    check_dtype(op, "dout", dout, x.scalar_type());
    check_device(op, "dout", dout, x);
    check_shape(op, "logits", logits, {x.size(0), s.E});
    check_dtype(op, "logits", logits, score_dtype(x));
    check_device(op, "logits", logits, x);
    check_shape(op, "gate", gate, {s.E, s.D});
    check_device(op, "gate", gate, x);
    if (gate.scalar_type() != ScalarType::Float) check_dtype(op, "gate", gate, x.scalar_type());

    const Call call = begin_call(op, x);
    /* route_backward follows dscores' launch, and computes the scores again beside it. */
    down.d.p.pdl.lets_next_start = route.p.pdl.reads_before_wait = true;
    up.after_any = false; /* kernels of this call come before it */
    auto [dh, a_scaled, dscores] = run_down_dgrad(call, down);
    const auto [dlogits, rounded] = run_route_backward(call, route, *dscores, x.scalar_type());
    const auto [dw2, db2] = run_down_wgrad(call, std::move(down), std::move(a_scaled));
    const auto up_grads = run_up_backward(call, up, *dh, rounded, aligned(in_dtype_of(gate, x)));
    TensorList grads = {*up_grads.dx, dlogits};
    if (dlogits.scalar_type() != x.scalar_type()) grads.push_back(rounded);
    for (const OptTensor *grad : {&up_grads.dw1, &up_grads.dw3, &dw2, &up_grads.db1, &up_grads.db3, &db2})
        if (*grad) grads.push_back(**grad);
    if (needs[6]) grads.push_back(*dscores);
    return grads;
}
