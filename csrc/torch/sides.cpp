/* The two sides of the experts, with h between them: up_gate, and the down GEMM with the combine.
 *
 * The main_grads given to experts_up and experts_down are there for the autograd formula, which hands them to
 * the backward operators. No forward touches them. */
#include "sides.h"

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

Width width_of(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout) {
    check_dim(op, "w1", w1, 3);
    return width_of(op, w1.size(0), w1.size(1), w1.size(2), w3.has_value(), layout);
}

UpWeights up_weights(const char *op, const Tensor &w1, const OptTensor &w3, const Tensor &like,
                     const Width &s) {
    UpWeights weights = {weight(op, "w1", w1, like, {s.E, s.w1_rows, s.D}), {}};
    if (w3) weights.w3 = weight(op, "w3", *w3, like, {s.E, s.F, s.D});
    return weights;
}

void check_scores(const char *op, const OptTensor &scores, const RowMap &map) {
    check(!scores || map.has_maps, op, "a plan with row maps beside scores", "one without");
}

/* --- up side -------------------------------------------------------------------------------------------- */

UpSide up_side(const char *op, const Tensor &x, const UpWeights &weights, const Width &s,
               const OptTensor &b1_, const OptTensor &b3_, const OptTensor &scores_, const RowMap &map,
               int64_t layout, int64_t activation, const Constants &constants, void *a, const OptTensor &h,
               const OptTensor &addend_) {
    OptTensor b1 = operand(op, "b1", b1_, x, {s.E, s.w1_rows}), b3 = operand(op, "b3", b3_, x, {s.E, s.F});
    OptTensor scores = scores_of(op, scores_, x, {map.p.T, map.p.K});
    OptTensor addend = operand(op, "addend", addend_, x, {map.p.R, s.H});
    check_size(op, "x's width", x.size(1), s.D, s.D);
    check_scores(op, scores, map);
    check(weights.w3.data || !b3, op, "b3 with w3 and not without", "b3 without w3");
    FusedMoeUpGate p = {};
    p.activation = activation_of(op, activation, constants);
    p.dtype = float_dtype(op, x);
    p.x = data(x);
    p.scores = data(scores);
    p.w1 = weights.w1;
    p.w3 = weights.w3;
    p.b1 = data(b1);
    p.b3 = data(b3);
    p.addend = data(addend);
    p.h = h ? h->mutable_data_ptr() : nullptr;
    p.a = a;
    p.row_map = map.p;
    p.D = s.D;
    p.F = s.F;
    p.layout = (FusedMoeLayout)layout;
    return {p, b1, b3, scores, addend};
}

void run_up_side(const Call &call, UpSide &side, const Tensor &x) {
    run_tiered(call, side.p, x, fused_moe_cpu_up_gate, CUDA(fused_moe_cuda_select_up_gate),
               CUDA(fused_moe_cuda_up_gate));
}

static RowMap tokens_map(const char *op, const Tensor &x, const Tensor &w1, const OptTensor &w3,
                         const TensorList &plan, int64_t layout) {
    check_dim(op, "x", x, 2);
    return row_map_of(op, x, RowsOf::TOKENS, width_of(op, w1, w3, layout).E, plan);
}

static std::tuple<Tensor, Tensor> run_up(const char *op, const Tensor &x, const Tensor &w1,
                                         const OptTensor &w3, const OptTensor &b1, const OptTensor &b3,
                                         const OptTensor &scores, const TensorList &plan, int64_t layout,
                                         int64_t activation, const Constants &constants, bool save_h) {
    const RowMap map = tokens_map(op, x, w1, w3, plan, layout);
    const Width s = width_of(op, w1, w3, layout);
    const Tensor rows = aligned(x);
    const UpWeights weights = up_weights(op, w1, w3, x, s);
    const Tensor h = new_tensor(x, {save_h ? map.p.R : 0, s.H}), a = new_tensor(x, {map.p.R, s.F});
    UpSide side = up_side(op, rows, weights, s, b1, b3, scores, map, layout, activation, constants,
                          a.mutable_data_ptr(), save_h ? OptTensor(h) : OptTensor());
    run_up_side(begin_call(op, rows), side, rows);
    return {h, a};
}

std::tuple<Tensor, Tensor> experts_up(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                      const OptTensor &b1, const OptTensor &b3, const OptTensor &scores,
                                      const TensorList &plan, int64_t layout, int64_t activation,
                                      const Constants &constants, bool save_h, const OptTensor &,
                                      const OptTensor &) {
    return run_up("experts_up", x, w1, w3, b1, b3, scores, plan, layout, activation, constants, save_h);
}

std::tuple<Tensor, Tensor> up_gate(const Tensor &x, const Tensor &w1, const OptTensor &w3,
                                   const OptTensor &b1, const OptTensor &b3, const TensorList &plan,
                                   int64_t layout, int64_t activation, const Constants &constants) {
    return run_up("up_gate", x, w1, w3, b1, b3, {}, plan, layout, activation, constants, true);
}

QuantizedTensors tensors_of(const char *op, const char *name, const TensorList &list, int64_t format) {
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

QuantizedUp::QuantizedUp(const char *op, const TensorList &given1, int64_t format1, const TensorList &given3,
                         int64_t format3, const Tensor &x, int64_t layout)
    : w1(quantized_weight(op, tensors_of(op, "w1", given1, format1), x)) {
    s = width_of(op, given1[0].size(0), w1.p.out, w1.p.in, !given3.empty(), layout);
    if (!given3.empty()) {
        w3 = quantized_weight(op, tensors_of(op, "w3", given3, format3), x);
        check_size(op, "experts of w3", given3[0].size(0), s.E, s.E);
        check_size(op, "out of w3", w3->p.out, s.F, s.F);
        check_size(op, "in of w3", w3->p.in, s.D, s.D);
    }
    weights = {weight(w1), w3 ? weight(*w3) : FusedMoeWeight{}};
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
    const QuantizedUp up(op, w1, format1, w3, format3, x, layout);
    const RowMap map = row_map_of(op, x, RowsOf::TOKENS, up.s.E, plan);
    const Tensor h = new_tensor(x, {save_h ? map.p.R : 0, up.s.H}), a = new_tensor(x, {map.p.R, up.s.F});
    UpSide side = up_side(op, x, up.weights, up.s, b1, b3, scores, map, layout, activation, constants,
                          a.mutable_data_ptr(), save_h ? OptTensor(h) : OptTensor(), addend);
    run_up_side(begin_call(op, x), side, x);
    return {h, a};
}

/* --- down side ------------------------------------------------------------------------------------------ */

FusedMoeWeight down_weight(const char *op, const Tensor &w2, const Tensor &like, int64_t F) {
    check_dim(op, "w2", w2, 3);
    check_widths(op, "w2", w2, 0);
    return weight(op, "w2", w2, like, {w2.size(0), w2.size(1), F});
}

DownSide down_side(const char *op, const Tensor &like, const void *a, int64_t F, const FusedMoeWeight &w2,
                   int64_t D, const OptTensor &b2_, const OptTensor &scores_, const RowMap &map,
                   const Shared &shared_, void *y, const OptTensor &out) {
    const FusedMoeDtype dtype = float_dtype(op, like);
    OptTensor b2 = operand(op, "b2", b2_, like, {map.p.E, D});
    OptTensor scores = scores_of(op, scores_, like, {map.p.T, map.p.K});
    check_scores(op, scores, map);
    check(!shared_.rows || map.has_maps, op, "a plan with row maps beside shared", "one without");
    const Shared shared = shared_of(op, shared_, like, map.p.T, D);
    const FusedMoeWeight b[2] = {w2, {}};
    const int64_t N[2] = {F, 0};
    const FusedMoeGroupedMM p = grouped_mm_of(a, dtype, map.p.R, b, N, b2, grouping_of(map), y, D);
    DownSide side = {p, {}, b2, scores, shared};
    if (!out) return side;
    side.combine = unpermute_of(y, dtype, D, scores, map, *out, shared);
    /* It reads the plan while the down GEMM runs, which has waited for that. */
    side.combine.pdl.reads_before_wait = true;
    return side;
}

void run_down_side(const Call &call, DownSide &side, const Tensor &like) {
    run_grouped_mm(call, side.p, like);
    if (side.combine.out) run_unpermute(call, side.combine);
}

Tensor experts_down(const Tensor &a, const OptTensor &, const Tensor &w2, const OptTensor &b2,
                    const OptTensor &scores, const TensorList &plan, int64_t, int64_t, const Constants &,
                    const OptTensor &, const OptTensor &shared, const OptTensor &shared_gate) {
    const char *op = "experts_down";
    check_dim(op, "a", a, 2);
    const Tensor rows = aligned(a);
    const RowMap map = row_map_of(op, a, RowsOf::ROWS, w2.size(0), plan);
    const FusedMoeWeight w = down_weight(op, w2, a, a.size(1));
    const int64_t F = a.size(1), D = w2.size(1);
    const Tensor y = new_tensor(rows, {map.p.R, D});
    const OptTensor out = map.has_maps ? OptTensor(new_tensor(rows, {map.p.T, D})) : OptTensor();
    DownSide side = down_side(op, rows, data(rows), F, w, D, b2, scores, map, {shared, shared_gate},
                              y.mutable_data_ptr(), out);
    run_down_side(begin_call(op, rows), side, rows);
    return out ? *out : y;
}

Tensor out_of(const char *op, const OptTensor &given, const Tensor &x, int64_t D) {
    if (!given) return new_tensor(x, {x.size(0), D});
    check_shape(op, "out", *given, {x.size(0), D});
    check_dtype(op, "out", *given, x.scalar_type());
    check_device(op, "out", *given, x);
    check(given->is_contiguous(), op, "a contiguous out", "one in other strides");
    return *given;
}
