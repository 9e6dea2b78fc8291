/* Experts whose GEMMs multiply e4m3 by e4m3, forward and backward, in two sides with h between them as in
 * sides.cpp. Weights are quantised by an operator of its own, once for all calls until they change; what
 * the GEMMs read are those codes, and the weights themselves are arguments because of their gradients.
 *
 * The up side is two operators: fp8_up, whose backward makes dx of dh by rows, and fp8_up_weights, whose
 * backward makes dw1 and dw3 of dh by columns. Autograd runs the node first that was made last, if both are
 * ready. So fp8_up_weights is called before fp8_up, and dh by rows is freed before weight gradients are made.
 *
 * Codes cannot be the gradient of h: they have another size. So both return links, zeros in one element's
 * memory, whose gradients are dh:
 *
 *   link      [R, H bytes]            link_scale    [H/128, R]
 *   link_t    [blocks, 128 H bytes]   link_t_scale  [blocks, H/128]; or with 16 bits [R, H] and [0, H/128]
 *
 * A link's dtype is x's. A bf16 or f32 made of e4m3 codes is NaN or infinite only where its highest code is
 * NaN, so anomaly mode sees no NaN that is none; the scales are floats for the same reason. */
#include <cstring>
#include <initializer_list>

#include "fp8_gemms.h"

#include "../eight_bit.h"

/* --- up side -------------------------------------------------------------------------------------------- */

/* Checks that x and the weights fit the plan. */
static RowMap up_row_map(const char *op, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                         const TensorList &plan, const Width &s) {
    check_size(op, "x's width", x.size(1), s.D, s.D);
    check_weight(op, "w1", w1, x, {s.E, s.w1_rows, s.D});
    if (w3) check_weight(op, "w3", *w3, x, {s.E, s.F, s.D});
    const RowMap map = full_row_map_of(op, x, RowsOf::TOKENS, plan);
    check_size(op, "experts of the plan", map.p.E, s.E, s.E);
    return map;
}

std::tuple<Tensor, Tensor> fp8_up_weights(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                          const TensorList &plan, int64_t layout, int64_t wgrad,
                                          const OptTensor &, const OptTensor &) {
    const char *op = "fp8_up_weights";
    check_dim(op, "x", x, 2);
    (void)trained_dtype(op, x);
    const Width s = up_width(op, w1, w3, layout);
    check_wgrad(op, wgrad);
    const RowMap map = up_row_map(op, x, w1, w3, plan, s);
    const LinkT t = link_t_of(map.p.R, s.E, s.H, wgrad, x);
    Call call = begin_call(op, x);
    return {new_zeros(call, x, {t.rows, t.columns}, x.scalar_type()),
            new_zeros(call, x, {t.scale_rows, t.scale_columns}, ScalarType::Float)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> fp8_up(const Tensor &x_, const Tensor &w1,
                                                                  const OptTensor &w3, const TensorList &plan,
                                                                  const TensorList &quantized, int64_t layout,
                                                                  int64_t activation,
                                                                  const Constants &constants, bool save_h) {
    const char *op = "fp8_up";
    check_dim(op, "x", x_, 2);
    const Tensor x = aligned(x_);
    FusedMoeEightBitUpGate p = {};
    p.up.dtype = trained_dtype(op, x);
    const Width s = up_width(op, w1, w3, layout);
    const RowMap map = up_row_map(op, x, w1, w3, plan, s);
    check_quantized(op, quantized, false);
    const BlockWeight w = block_weight(op, quantized[0], quantized[1], x, s.E, s.H, s.D);
    const int64_t R = map.p.R;
    p.up.activation = activation_of(op, activation, constants);

    Call call = begin_call(op, x);
    check_trains_fp8(call);
    Tensor link = new_zeros(call, x, {R, s.H / (int64_t)x.element_size()}, x.scalar_type()),
           link_scale = new_zeros(call, x, {s.H / FUSED_MOE_BLOCK, R}, ScalarType::Float),
           h = new_tensor(x, {save_h ? R : 0, s.H}), a = new_tensor(x, {R, s.F}, ScalarType::Byte),
           a_scale = new_tensor(x, {s.F / FUSED_MOE_BLOCK, R}, ScalarType::Float);
    const Codes codes = quantize_tokens(call, x, map);
    p.up.x = data(codes.codes);
    p.x_scale = (const float *)data(codes.scale);
    p.up.w1 = weight(w);
    p.up.h = save_h ? h.mutable_data_ptr() : nullptr;
    p.up.a = a.mutable_data_ptr();
    p.a_scale = (float *)a_scale.mutable_data_ptr();
    p.up.row_map = grouped(map.p);
    p.up.D = s.D;
    p.up.F = s.F;
    p.up.layout = layout == FUSED_MOE_UNGATED ? FUSED_MOE_UNGATED : FUSED_MOE_HALVES;
    if (R > 0) {
        WorkspaceTensors tensors;
#ifdef FUSED_MOE_WITH_CUDA
        if (call.is_cuda) {
            /* the kernel writes those of an expert's rows alone */
            check_status(call, fused_moe_cuda_zero(p.a_scale, (int64_t)a_scale.numel() * 4, call.stream));
            fused_moe_cuda_select_eight_bit_up_gate(&p);
            provide_workspace(call, x, &p.up.workspace, &tensors);
        }
#endif
        run(call, p, fused_moe_cpu_eight_bit_up_gate, CUDA(fused_moe_cuda_eight_bit_up_gate));
    }
    return {link, link_scale, h, a, a_scale, codes.scale};
}

/* `quantized` is of the weights' transpose, (E, D, H). x is an argument because dx depends on it: so a second
 * derivative raises. */
Tensor fp8_up_backward(const Tensor &dlink_, const Tensor &dlink_scale_, const Tensor &x,
                       const TensorList &plan, const TensorList &quantized) {
    const char *op = "fp8_up_backward";
    (void)trained_dtype(op, dlink_);
    check_dim(op, "x", x, 2);
    check_dtype(op, "x", x, dlink_.scalar_type());
    check_device(op, "x", x, dlink_);
    check_quantized(op, quantized, true);
    check_dim(op, "codes of a weight", quantized[0], 3);
    const RowMap map = full_row_map_of(op, x, RowsOf::TOKENS, plan);
    const int64_t R = map.p.R, D = x.size(1), H = quantized[0].size(2);
    check_blocks(op, "D", D);
    check_blocks(op, "H", H);
    for (int64_t width : {D, H}) check_size(op, "a weight's width", width, 0, MAX_WIDTH);
    const BlockWeight w_t = block_weight(op, quantized[0], quantized[1], x, map.p.E, D, H);
    const Tensor dlink = operand(op, "dlink", dlink_, x, {R, H / (int64_t)x.element_size()}),
                 dlink_scale =
                     typed(op, "dlink_scale", dlink_scale_, x, ScalarType::Float, {H / FUSED_MOE_BLOCK, R});

    Call call = begin_call(op, x);
    check_trains_fp8(call);
    const Tensor dx_rows =
        run_eight_bit_mm(call, x, data(dlink), (const float *)data(dlink_scale), false, w_t, map);
    Tensor dx = new_tensor(x, {map.p.T, D});
    run_unpermute(call, unpermute_of(op, dx_rows, {}, map, dx));
    return dx;
}

/* A weight's gradient is added to its main_grad where there is one; dw1 or dw3 is then empty. */
std::tuple<Tensor, Tensor>
fp8_up_weights_backward_accumulate(const Tensor &dlink_t_, const Tensor &dlink_t_scale_, const Tensor &x_,
                                   const Tensor &w1, const OptTensor &w3, const TensorList &plan,
                                   int64_t layout, int64_t wgrad, bool need_dw1, bool need_dw3,
                                   const OptTensor &main_grad1, const OptTensor &main_grad3) {
    const char *op = "fp8_up_weights_backward";
    check_dim(op, "x", x_, 2);
    const Tensor x = aligned(x_);
    (void)trained_dtype(op, x);
    const Width s = up_width(op, w1, w3, layout);
    const RowMap map = up_row_map(op, x, w1, w3, plan, s);
    if (w3) check_dtype(op, "w3", *w3, w1.scalar_type());
    check_wgrad(op, wgrad);
    const LinkT t = link_t_of(map.p.R, s.E, s.H, wgrad, x);
    const Tensor dlink_t = operand(op, "dlink_t", dlink_t_, x, {t.rows, t.columns}),
                 dlink_t_scale = typed(op, "dlink_t_scale", dlink_t_scale_, x, ScalarType::Float,
                                       {t.scale_rows, t.scale_columns});
    check(w3 || !need_dw3, op, "w3 where its gradient is needed", "none");
    FusedMoeWeight sums[2] = {}, fresh[2] = {};
    if (need_dw1 && main_grad1) sums[0] = main_grad(op, "main_grad1", *main_grad1, x, {s.E, s.w1_rows, s.D});
    if (need_dw3 && main_grad3) sums[1] = main_grad(op, "main_grad3", *main_grad3, x, {s.E, s.F, s.D});

    Call call = begin_call(op, x);
    check_trains_fp8(call);
    OptTensor dw1, dw3;
    if (need_dw1 && !main_grad1) fresh[0] = weight(*(dw1 = new_grad(w1)));
    if (need_dw3 && !main_grad3) fresh[1] = weight(*(dw3 = new_grad(*w3)));
    const WeightGrad of_fresh = up_grad(fresh[0], fresh[1], s, layout, float_dtype(op, w1), false),
                     of_sums = up_grad(sums[0], sums[1], s, layout, FUSED_MOE_F32, true);
    for (const WeightGrad *grad : {&of_fresh, &of_sums}) {
        if (wgrad == WGRAD_FP8) {
            run_fp8_wgrad(call, data(dlink_t), (const float *)data(dlink_t_scale), *grad, x, map,
                          fused_moe_fp8_column_chunk(map.p.T, map.p.R, s.E, s.D, s.F, s.H, false));
            continue;
        }
        const GatheredRows x_rows = {&x, map.p.row_token, nullptr, nullptr};
        run_wgrad(call, dlink_t, x_rows, grad->part, grad->M, grad->accumulate, grouping_of(map),
                  grad->dtype);
    }
    fill_absent(x, {&dw1, &dw3}, x.scalar_type());
    return {*dw1, *dw3};
}

std::tuple<Tensor, Tensor> fp8_up_weights_backward(const Tensor &dlink_t, const Tensor &dlink_t_scale,
                                                   const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                                   const TensorList &plan, int64_t layout, int64_t wgrad,
                                                   bool need_dw1, bool need_dw3) {
    return fp8_up_weights_backward_accumulate(dlink_t, dlink_t_scale, x, w1, w3, plan, layout, wgrad,
                                              need_dw1, need_dw3, {}, {});
}

/* --- down side ------------------------------------------------------------------------------------------ */

Tensor fp8_down(const Tensor &link, const Tensor &, const Tensor &, const Tensor &a_codes_,
                const Tensor &a_scale_, const Tensor &, const Tensor &w2, const OptTensor &,
                const OptTensor &, const OptTensor &scores_, const TensorList &plan,
                const TensorList &quantized, int64_t, int64_t, const Constants &, int64_t, const OptTensor &,
                const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "fp8_down";
    (void)trained_dtype(op, link);
    check_dim(op, "a_codes", a_codes_, 2);
    check_dim(op, "w2", w2, 3);
    const RowMap map = full_row_map_of(op, a_codes_, RowsOf::ROWS, plan);
    const int64_t T = map.p.T, R = map.p.R, E = map.p.E, D = w2.size(1), F = w2.size(2);
    check_blocks(op, "D", D);
    check_blocks(op, "F", F);
    check_weight(op, "w2", w2, link, {E, D, F});
    const Tensor a_codes = typed(op, "a_codes", a_codes_, link, ScalarType::Byte, {R, F}),
                 a_scale = typed(op, "a_scale", a_scale_, link, ScalarType::Float, {F / FUSED_MOE_BLOCK, R});
    check_quantized(op, quantized, false);
    const BlockWeight w = block_weight(op, quantized[0], quantized[1], link, E, D, F);
    const OptTensor scores = scores_of(op, scores_, link, {T, map.p.K});
    const Shared shared_rows = shared_of(op, {shared, shared_gate}, link, T, D);

    Call call = begin_call(op, link);
    check_trains_fp8(call);
    const Tensor y = run_eight_bit_mm(call, link, data(a_codes), (const float *)data(a_scale), false, w, map);
    Tensor out = new_tensor(link, {T, D});
    run_unpermute(call, unpermute_of(op, y, scores, map, out, shared_rows));
    return out;
}

Fp8DownGrads fp8_down_backward_accumulate(const Tensor &dout_, const Tensor &h_, const Tensor &x_scale_,
                                          const Tensor &w2, const OptTensor &scores_, const TensorList &plan,
                                          const TensorList &quantized, int64_t layout, int64_t activation,
                                          const Constants &constants, int64_t wgrad, bool need_dlink,
                                          bool need_dlink_t, bool need_dw2, bool need_dscores,
                                          const OptTensor &main_grad2) {
    const char *op = "fp8_down_backward";
    check_dim(op, "dout", dout_, 2);
    check_dim(op, "w2", w2, 3);
    check_size(op, "layout", layout, FUSED_MOE_SEPARATE, FUSED_MOE_UNGATED);
    const Tensor dout = aligned(dout_);
    FusedMoeQuantizeDh p = {};
    p.dtype = trained_dtype(op, dout);
    const RowMap map = full_row_map_of(op, dout, RowsOf::TOKENS, plan);
    const int64_t T = map.p.T, R = map.p.R, E = map.p.E, D = w2.size(1), F = w2.size(2);
    const int64_t H = layout == FUSED_MOE_UNGATED ? F : 2 * F;
    check_blocks(op, "D", D);
    check_blocks(op, "F", F);
    check_shape(op, "dout", dout, {T, D});
    check_weight(op, "w2", w2, dout, {E, D, F});
    check_quantized(op, quantized, true);
    const BlockWeight w_t = block_weight(op, quantized[0], quantized[1], dout, E, F, D);
    check_wgrad(op, wgrad);
    const bool is_fp8 = wgrad == WGRAD_FP8;
    const Tensor h = operand(op, "h", h_, dout, {R, H}),
                 x_scale = typed(op, "x_scale", x_scale_, dout, ScalarType::Float, {R});
    const OptTensor scores = scores_of(op, scores_, dout, {T, map.p.K});
    check(scores || !need_dscores, op, "scores where their gradient is needed", "none");
    p.activation = activation_of(op, activation, constants);
    WeightGrad grad = {{}, {F, 0}, FUSED_MOE_F32, main_grad2.has_value()};
    FusedMoeWeight dw = {};
    if (need_dw2 && main_grad2) dw = main_grad(op, "main_grad2", *main_grad2, dout, {E, D, F});

    Call call = begin_call(op, dout);
    check_trains_fp8(call);
    const int64_t blocks = fused_moe_num_row_blocks(R, E), col_tiles = F / FUSED_MOE_BLOCK;
    OptTensor dlink, dlink_scale, dlink_t, dlink_t_scale, dw2, dscores, a_t, a_t_scale, partials, g,
        dout_codes;
    Tensor dout_scale = new_empty_result(dout, ScalarType::Float);
    if (need_dlink || need_dlink_t || need_dw2 || need_dscores) {
        const Codes codes = quantize_tokens(call, dout, map, need_dw2 && is_fp8 ? &dout_codes : nullptr);
        dout_scale = codes.scale;
        g = run_eight_bit_mm(call, dout, data(codes.codes), (const float *)data(dout_scale), true, w_t, map);
    }
    if (need_dlink) {
        dlink = new_tensor(dout, {R, H / (int64_t)dout.element_size()});
        dlink_scale = new_tensor(dout, {H / FUSED_MOE_BLOCK, R}, ScalarType::Float);
        p.dh = dlink->mutable_data_ptr();
        p.dh_scale = (float *)dlink_scale->mutable_data_ptr();
    }
    if (need_dlink_t) {
        const LinkT t = link_t_of(R, E, H, wgrad, dout);
        dlink_t = new_tensor(dout, {t.rows, t.columns});
        dlink_t_scale = new_tensor(dout, {t.scale_rows, t.scale_columns}, ScalarType::Float);
        (is_fp8 ? p.dh_t : p.dh_rows) = dlink_t->mutable_data_ptr();
        if (is_fp8) p.dh_t_scale = (float *)dlink_t_scale->mutable_data_ptr();
        if (is_fp8 &&
            !call.is_cuda) { /* row blocks without rows are not written, and anomaly mode reads them */
            memset(p.dh_t, 0, blocks * H * FUSED_MOE_BLOCK);
            memset(p.dh_t_scale, 0, blocks * H / FUSED_MOE_BLOCK * sizeof(float));
        }
    }
    if (need_dw2 && is_fp8) {
        a_t = new_tensor(dout, {blocks, F, FUSED_MOE_BLOCK}, ScalarType::Byte);
        a_t_scale = new_tensor(dout, {blocks, col_tiles}, ScalarType::Float);
        p.a_t = a_t->mutable_data_ptr();
        p.a_t_scale = (float *)a_t_scale->mutable_data_ptr();
    } else if (need_dw2) {
        a_t = new_tensor(dout, {R, F});
        p.a_rows = a_t->mutable_data_ptr();
    }
    if (need_dscores) {
        dscores = new_tensor(dout, {T, map.p.K}, ScalarType::Float);
        partials = new_tensor(dout, {R, col_tiles}, ScalarType::Float);
        p.dscores = (float *)dscores->mutable_data_ptr();
        p.partials = (float *)partials->mutable_data_ptr();
    }
    if (g) {
        p.g = data(*g);
        p.h = data(h);
        p.scores = (const float *)data(scores);
        p.x_scale = (const float *)data(x_scale);
        p.dout_scale = (const float *)data(dout_scale);
        p.row_map = map.p;
        p.F = F;
        p.layout = layout == FUSED_MOE_UNGATED ? FUSED_MOE_UNGATED : FUSED_MOE_HALVES;
        if (R > 0) run(call, p, fused_moe_cpu_quantize_dh, CUDA(fused_moe_cuda_quantize_dh));
    }
    g.reset();
    partials.reset();
    if (need_dw2) {
        if (!main_grad2) {
            dw = weight(*(dw2 = new_grad(w2)));
            grad.dtype = float_dtype(op, w2);
        }
        grad.part[0] = transposed(dw);
        if (is_fp8) {
            run_fp8_wgrad(call, data(*a_t), (const float *)data(*a_t_scale), grad, dout, map,
                          fused_moe_fp8_column_chunk(T, R, E, D, F, H, true), dout_codes);
        } else {
            const GatheredRows dout_rows = {&dout, map.p.row_token, nullptr, nullptr};
            run_wgrad(call, *a_t, dout_rows, grad.part, grad.M, grad.accumulate, grouping_of(map),
                      grad.dtype);
        }
    }
    fill_absent(dout, {&dlink, &dlink_t, &dw2}, dout.scalar_type());
    fill_absent(dout, {&dlink_scale, &dlink_t_scale, &dscores}, ScalarType::Float);
    return {*dlink, *dlink_scale, *dlink_t, *dlink_t_scale, *dw2, *dscores};
}

Fp8DownGrads fp8_down_backward(const Tensor &dout, const Tensor &h, const Tensor &x_scale, const Tensor &w2,
                               const OptTensor &scores, const TensorList &plan, const TensorList &quantized,
                               int64_t layout, int64_t activation, const Constants &constants, int64_t wgrad,
                               bool need_dlink, bool need_dlink_t, bool need_dw2, bool need_dscores) {
    return fp8_down_backward_accumulate(dout, h, x_scale, w2, scores, plan, quantized, layout, activation,
                                        constants, wgrad, need_dlink, need_dlink_t, need_dw2, need_dscores,
                                        {});
}
