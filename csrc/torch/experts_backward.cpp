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
static UpGrads run_up_backward(const char *op, const Tensor &dh_, const Tensor &x_, const Tensor &w1,
                               const OptTensor &w3, const OptTensor &scores_, const TensorList &plan,
                               int64_t layout, bool need_dx, bool need_dw1, bool need_dw3, bool need_db1,
                               bool need_db3, bool need_dscores, const OptTensor &main_grad1,
                               const OptTensor &main_grad3, const OptTensor &dlogits_,
                               const OptTensor &gate_) {
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
    return run_up_backward("experts_up_backward", dh, x, w1, w3, scores, plan, layout, need_dx, need_dw1,
                           need_dw3, need_db1, need_db3, need_dscores, {}, {}, dlogits, gate);
}

UpGrads experts_up_backward_accumulate(const Tensor &dh, const Tensor &x, const Tensor &w1,
                                       const OptTensor &w3, const OptTensor &scores, const TensorList &plan,
                                       int64_t layout, bool need_dx, bool need_dw1, bool need_dw3,
                                       bool need_db1, bool need_db3, bool need_dscores,
                                       const OptTensor &main_grad1, const OptTensor &main_grad3,
                                       const OptTensor &dlogits, const OptTensor &gate) {
    return run_up_backward("experts_up_backward_accumulate", dh, x, w1, w3, scores, plan, layout, need_dx,
                           need_dw1, need_dw3, need_db1, need_db3, need_dscores, main_grad1, main_grad3,
                           dlogits, gate);
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

/* dw2 is added to main_grad2 where there is one; it is then empty. */
static DownGrads run_down_backward(const char *op, const Tensor &dout, const Tensor &h, const Tensor &w2,
                                   const OptTensor &b2, const OptTensor &scores, const TensorList &plan,
                                   int64_t layout, int64_t activation, const Constants &constants,
                                   bool need_dh, bool need_dw2, bool need_db2, bool need_dscores,
                                   const OptTensor &main_grad2) {
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
    return run_down_backward("experts_down_backward", dout, h, w2, b2, scores, plan, layout, activation,
                             constants, need_dh, need_dw2, need_db2, need_dscores, {});
}

DownGrads experts_down_backward_accumulate(const Tensor &dout, const Tensor &h, const Tensor &w2,
                                           const OptTensor &b2, const OptTensor &scores,
                                           const TensorList &plan, int64_t layout, int64_t activation,
                                           const Constants &constants, bool need_dh, bool need_dw2,
                                           bool need_db2, bool need_dscores, const OptTensor &main_grad2) {
    return run_down_backward("experts_down_backward_accumulate", dout, h, w2, b2, scores, plan, layout,
                             activation, constants, need_dh, need_dw2, need_db2, need_dscores, main_grad2);
}
