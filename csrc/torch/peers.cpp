/* Sums over rows of several ranks, whose memory this process has mapped. */
#include "operators.h"

Tensor sum_peers(const TensorList &rows, const Tensor &index_, const OptTensor &scores_) {
    const char *op = "sum_peers";
    check_size(op, "ranks", static_cast<int64_t>(rows.size()), 1, FUSED_MOE_MAX_PEERS);
    const Tensor &first = rows[0];
    check_dim(op, "rows", first, 2);
    int64_t C = first.size(0), D = first.size(1);
    FusedMoeSumPeers p = {};
    p.dtype = float_dtype(op, first);
    for (size_t n = 0; n < rows.size(); n++) {
        check_shape(op, "rows", rows[n], {C, D});
        check_dtype(op, "rows", rows[n], first.scalar_type());
        check_device(op, "rows", rows[n], first);
        check(rows[n].is_contiguous(), op, "contiguous rows", "strides");
        p.rows[n] = data(rows[n]);
    }
    p.N = static_cast<int32_t>(rows.size());
    check_size(op, "rows of all ranks", p.N * C, 0, MAX_ROWS);
    check_size(op, "width of rows", D, 0, MAX_WIDTH);
    Tensor index = index_tensor(op, "index", index_, first, 2);
    int64_t T = index.size(0), K = index.size(1);
    check_size(op, "tokens", T, 0, MAX_ROWS);
    check_size(op, "rows per token", K, 0, MAX_ROWS);
    OptTensor scores = scores_of(op, scores_, first, {T, K});
    Call call = begin_call(op, first);
    Tensor out = new_tensor(first, {T, D});
    p.index = ints(index);
    p.scores = data(scores);
    p.out = out.mutable_data_ptr();
    p.T = T;
    p.D = D;
    p.C = C;
    p.K = static_cast<int32_t>(K);
    run(call, p, fused_moe_cpu_sum_peers, CUDA(fused_moe_cuda_sum_peers));
    return out;
}
