/* Moves rows between token order and expert order: permute, unpermute, and the latter's gradients. */
#include "operators.h"

Tensor permute(const Tensor &x_, const TensorList &plan) {
    const char *op = "permute";
    check_dim(op, "x", x_, 2);
    Tensor x = dense(x_);
    RowMap map = full_row_map_of(op, x, RowsOf::TOKENS, plan);
    FusedMoePermute p = {};
    p.dtype = float_dtype(op, x);
    Call call = begin_call(op, x);
    Tensor rows = new_tensor(x, {map.p.R, x.size(1)});
    p.x = data(x);
    p.rows = rows.mutable_data_ptr();
    p.row_map = map.p;
    p.D = x.size(1);
    run(call, p, fused_moe_cpu_permute, CUDA(fused_moe_cuda_permute));
    return rows;
}

FusedMoeUnpermute unpermute_of(const char *op, const Tensor &rows, const OptTensor &scores, const RowMap &map,
                               const Tensor &out, const Shared &shared) {
    return unpermute_of(data(rows), float_dtype(op, rows), rows.size(1), scores, map, out, shared);
}

FusedMoeUnpermute unpermute_of(const void *rows, FusedMoeDtype dtype, int64_t D, const OptTensor &scores,
                               const RowMap &map, const Tensor &out, const Shared &shared) {
    FusedMoeUnpermute p = {};
    p.rows = rows;
    p.scores = data(scores);
    p.shared = data(shared.rows);
    p.shared_gate = data(shared.gate);
    p.out = out.mutable_data_ptr();
    p.row_map = map.p;
    p.D = D;
    p.dtype = dtype;
    return p;
}

void run_unpermute(const Call &call, const FusedMoeUnpermute &p) {
    run(call, p, fused_moe_cpu_unpermute, CUDA(fused_moe_cuda_unpermute));
}

Tensor unpermute(const Tensor &rows_, const OptTensor &scores_, const TensorList &plan,
                 const OptTensor &shared_, const OptTensor &shared_gate) {
    const char *op = "unpermute";
    check_dim(op, "rows", rows_, 2);
    Tensor rows = dense(rows_);
    RowMap map = full_row_map_of(op, rows, RowsOf::ROWS, plan);
    OptTensor scores = scores_of(op, scores_, rows, {map.p.T, map.p.K});
    Shared shared = shared_of(op, {shared_, shared_gate}, rows, map.p.T, rows.size(1));
    Call call = begin_call(op, rows);
    Tensor out = new_tensor(rows, {map.p.T, rows.size(1)});
    run_unpermute(call, unpermute_of(op, rows, scores, map, out, shared));
    return out;
}

void run_unpermute_backward(const Call &call, const Tensor &dout, const OptTensor &rows,
                            const OptTensor &scores, const RowMap &map, const OptTensor &drows,
                            const OptTensor &dscores) {
    FusedMoeUnpermuteBackward p = {};
    p.dout = data(dout);
    p.rows = data(rows);
    p.scores = data(scores);
    p.drows = drows ? drows->mutable_data_ptr() : nullptr;
    p.dscores = dscores ? dscores->mutable_data_ptr() : nullptr;
    p.row_map = map.p;
    p.D = dout.size(1);
    p.dtype = float_dtype(call.op, dout);
    run(call, p, fused_moe_cpu_unpermute_backward, CUDA(fused_moe_cuda_unpermute_backward));
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor &dout_, const OptTensor &rows_,
                                              const OptTensor &scores_, const TensorList &plan,
                                              bool need_drows, bool need_dscores) {
    const char *op = "unpermute_backward";
    check_dim(op, "dout", dout_, 2);
    Tensor dout = dense(dout_);
    RowMap map = full_row_map_of(op, dout, RowsOf::TOKENS, plan);
    int64_t T = map.p.T, K = map.p.K, R = map.p.R, D = dout.size(1);
    OptTensor rows = operand(op, "rows", rows_, dout, {R, D}), scores = scores_of(op, scores_, dout, {T, K});
    check(rows || !need_dscores, op, "rows where dscores are needed", "none");
    Call call = begin_call(op, dout);
    OptTensor drows, dscores;
    if (need_drows) drows = new_tensor(dout, {R, D});
    if (need_dscores) dscores = new_tensor(dout, {T, K}, score_dtype(dout));
    run_unpermute_backward(call, dout, rows, scores, map, drows, dscores);
    if (!drows) drows = new_empty_result(dout);
    if (!dscores) dscores = new_empty_result(dout, score_dtype(dout));
    return {*drows, *dscores};
}

/* The gradients of unpermute's shared rows if they have a gate. Only dshared_gate needs shared. */
std::tuple<Tensor, Tensor> shared_backward(const Tensor &dout_, const OptTensor &shared_, const Tensor &gate_,
                                           bool need_dshared, bool need_dshared_gate) {
    const char *op = "shared_backward";
    check_dim(op, "dout", dout_, 2);
    check(shared_ || !need_dshared_gate, op, "shared where dshared_gate is needed", "none");
    Tensor dout = dense(dout_);
    int64_t T = dout.size(0), D = dout.size(1);
    OptTensor shared = operand(op, "shared", shared_, dout, {T, D});
    Tensor gate = shared_gate_of(op, gate_, dout, T);
    FusedMoeSharedBackward p = {};
    p.dtype = float_dtype(op, dout);
    Call call = begin_call(op, dout);
    OptTensor dshared, dgate;
    if (need_dshared) dshared = new_tensor(dout, {T, D});
    if (need_dshared_gate) dgate = gate.dim() == 1 ? new_tensor(gate, {T}) : new_tensor(gate, {T, 1});
    p.dout = data(dout);
    p.shared = data(shared);
    p.shared_gate = data(gate);
    p.dshared = dshared ? dshared->mutable_data_ptr() : nullptr;
    p.dshared_gate = dgate ? dgate->mutable_data_ptr() : nullptr;
    p.T = T;
    p.D = D;
    run(call, p, fused_moe_cpu_shared_backward, CUDA(fused_moe_cuda_shared_backward));
    if (!dshared) dshared = new_empty_result(dout);
    if (!dgate) dgate = new_empty_result(gate);
    return {*dshared, *dgate};
}
