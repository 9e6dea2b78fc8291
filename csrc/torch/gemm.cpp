/* Grouped GEMMs: grouped_mm and weight gradients; and the gradient of a bias, a sum of rows. */
#include <utility>

#include "operators.h"

Grouping grouping_of(const RowMap &map) {
    return {map.p.offs, map.p.schedule, map.p.E};
}

static Grouping grouping_of(const Tensor &offs) {
    return {ints(offs), nullptr, offs.size(0)};
}

/* --- grouped_mm ----------------------------------------------------------------------------------------- */

FusedMoeGroupedMM grouped_mm_of(const void *a, FusedMoeDtype dtype, int64_t R, const FusedMoeWeight b[2],
                                const int64_t N[2], const OptTensor &bias, const Grouping &grouping,
                                void *out, int64_t M) {
    FusedMoeGroupedMM p = {};
    p.a = a;
    for (int i = 0; i < 2; i++) p.b[i] = b[i], p.N[i] = N[i];
    p.bias = data(bias);
    p.out = out;
    p.offs = grouping.offs;
    p.schedule = grouping.schedule;
    p.R = R;
    p.M = M;
    p.E = (int32_t)grouping.E;
    p.dtype = dtype;
    p.pdl.after_any = true;
    return p;
}

void run_grouped_mm(const Call &call, FusedMoeGroupedMM &p, const Tensor &like) {
    run_tiered(call, p, like, fused_moe_cpu_grouped_mm, CUDA(fused_moe_cuda_select_grouped_mm),
               CUDA(fused_moe_cuda_grouped_mm));
}

void run_grouped_mm(const Call &call, const Tensor &a, const FusedMoeWeight b[2], const int64_t N[2],
                    const OptTensor &bias, const Grouping &grouping, const Tensor &out) {
    FusedMoeGroupedMM p = grouped_mm_of(data(a), float_dtype(call.op, a), a.size(0), b, N, bias, grouping,
                                        out.mutable_data_ptr(), out.size(1));
    run_grouped_mm(call, p, a);
}

Tensor grouped_mm(const Tensor &a_, const Tensor &b_, const Tensor &offsets, const OptTensor &bias_) {
    const char *op = "grouped_mm";
    check_dim(op, "a", a_, 2);
    check_dim(op, "b", b_, 3);
    Tensor a = aligned(a_), offs = offs_of(op, offsets, a);
    int64_t E = offs.size(0), M = b_.size(1);
    const int64_t N[2] = {a.size(1), 0};
    check_widths(op, "b", b_, 1);
    const FusedMoeWeight b[2] = {weight(op, "b", b_, a, {E, M, N[0]}), {}};
    const OptTensor bias = operand(op, "bias", bias_, a, {E, M});
    Call call = begin_call(op, a);
    Tensor out = new_tensor(a, {a.size(0), M});
    run_grouped_mm(call, a, b, N, bias, grouping_of(offs), out);
    return out;
}

/* --- weight gradients ----------------------------------------------------------------------------------- */

void run_wgrad(const Call &call, const Tensor &a, const GatheredRows &b, const FusedMoeWeight dw[2],
               const int64_t M[2], bool accumulate, const Grouping &grouping,
               std::optional<FusedMoeDtype> dw_dtype) {
    if (!dw[0].data && !dw[1].data) return;
    FusedMoeWgrad p = {};
    p.a = data(a);
    p.b = data(*b.rows);
    p.b_row_token = b.row_token;
    p.row_slot = b.row_slot;
    p.b_scores = b.scores ? data(*b.scores) : nullptr;
    for (int i = 0; i < 2; i++) p.dw[i] = dw[i], p.M[i] = M[i];
    p.accumulate = accumulate;
    p.offs = grouping.offs;
    p.schedule = grouping.schedule;
    p.R = a.size(0);
    p.T = b.rows->size(0);
    p.K = b.scores ? b.scores->size(1) : 1;
    p.N = b.rows->size(1);
    p.E = (int32_t)grouping.E;
    p.dtype = float_dtype(call.op, a);
    p.dw_dtype = accumulate ? FUSED_MOE_F32 : dw_dtype.value_or(p.dtype);
    run_tiered(call, p, a, fused_moe_cpu_wgrad, CUDA(fused_moe_cuda_select_wgrad),
               CUDA(fused_moe_cuda_wgrad));
}

static void check_wgrad(const char *op, const Tensor &a, const Tensor &b, const Tensor &offsets,
                        const OptTensor &a_row_token, const OptTensor &b_row_token) {
    check_dim(op, "a", a, 2);
    check_dim(op, "b", b, 2);
    check_dim(op, "offsets", offsets, 1);
    check_widths(op, "a", a, 1);
    check_widths(op, "b", b, 1);
    check_dtype(op, "b", b, a.scalar_type());
    check_device(op, "b", b, a);
    check(!a_row_token || !b_row_token, op, "at most one of a_row_token and b_row_token", "both");
    (void)float_dtype(op, a);
}

static void wgrad_into(const char *op, const Tensor &a_, const Tensor &b_, const Tensor &offsets,
                       const OptTensor &a_row_token, const OptTensor &b_row_token, FusedMoeWeight dw,
                       bool accumulate) {
    Tensor a = aligned(a_), b = aligned(b_), offs = offs_of(op, offsets, a);
    const OptTensor *map = &b_row_token;
    if (a_row_token) { /* the kernel gathers its second operand, so a and b are swapped and dw transposed */
        std::swap(a, b);
        map = &a_row_token;
        dw = transposed(dw);
    }
    OptTensor row_token;
    if (*map) {
        row_token = index_tensor(op, "row_token", **map, a, 1);
        check_shape(op, "row_token", *row_token, {a.size(0)});
    } else {
        check_size(op, "rows of b", b.size(0), a.size(0), a.size(0));
    }
    const GatheredRows gathered = {&b, row_token ? ints(*row_token) : nullptr, nullptr, nullptr};
    const FusedMoeWeight out[2] = {dw, {}};
    const int64_t M[2] = {a.size(1), 0};
    run_wgrad(begin_call(op, a), a, gathered, out, M, accumulate, grouping_of(offs));
}

Tensor wgrad(const Tensor &a, const Tensor &b, const Tensor &offsets, const OptTensor &a_row_token,
             const OptTensor &b_row_token) {
    check_wgrad("wgrad", a, b, offsets, a_row_token, b_row_token);
    Tensor dw = new_tensor(a, {offsets.size(0), a.size(1), b.size(1)});
    wgrad_into("wgrad", a, b, offsets, a_row_token, b_row_token, weight(dw), false);
    return dw;
}

void wgrad_accumulate(const Tensor &a, const Tensor &b, const Tensor &offsets, const Tensor &dw,
                      const OptTensor &a_row_token, const OptTensor &b_row_token) {
    const char *op = "wgrad_accumulate";
    check_wgrad(op, a, b, offsets, a_row_token, b_row_token);
    FusedMoeWeight sum = main_grad(op, "dw", dw, a, {offsets.size(0), a.size(1), b.size(1)});
    wgrad_into(op, a, b, offsets, a_row_token, b_row_token, sum, true);
}

/* --- bias gradients ------------------------------------------------------------------------------------- */

void run_bias_grad(const Call &call, const GatheredRows &rows, int64_t R, const Grouping &grouping,
                   const Tensor &db) {
    FusedMoeBiasGrad p = {};
    p.rows = data(*rows.rows);
    p.row_token = rows.row_token;
    p.row_slot = rows.row_slot;
    p.scores = rows.scores ? data(*rows.scores) : nullptr;
    p.db = db.mutable_data_ptr();
    p.offs = grouping.offs;
    p.R = R;
    p.T = rows.rows->size(0);
    p.K = rows.scores ? rows.scores->size(1) : 1;
    p.N = rows.rows->size(1);
    p.E = (int32_t)grouping.E;
    p.dtype = float_dtype(call.op, *rows.rows);
    run(call, p, fused_moe_cpu_bias_grad, CUDA(fused_moe_cuda_bias_grad));
}

Tensor bias_grad(const Tensor &rows_, const Tensor &offsets) {
    const char *op = "bias_grad";
    check_dim(op, "rows", rows_, 2);
    Tensor rows = dense(rows_), offs = offs_of(op, offsets, rows);
    Call call = begin_call(op, rows);
    Tensor db = new_tensor(rows, {offs.size(0), rows.size(1)});
    run_bias_grad(call, {&rows, nullptr, nullptr, nullptr}, rows.size(0), grouping_of(offs), db);
    return db;
}
