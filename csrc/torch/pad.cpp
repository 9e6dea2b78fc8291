/* The operator pad, and padded copies of the router's operands. */
#include "operators.h"

#include <algorithm>
#include <array>

using Sizes = std::array<int64_t, 3>;

/* x (E, a, b, c) with a last stride of 1, out (E, A, B, C) contiguous. */
static void run_pad(const Call &call, const Tensor &x, int64_t E, const Sizes &x_sizes,
                    const Sizes &x_strides, const Tensor &out, const Sizes &sizes) {
    FusedMoePad p = {};
    p.x = data(x);
    p.out = out.mutable_data_ptr();
    p.E = E;
    std::copy(x_sizes.begin(), x_sizes.end(), p.x_sizes);
    std::copy(x_strides.begin(), x_strides.end(), p.x_strides);
    std::copy(sizes.begin(), sizes.end(), p.sizes);
    p.elem_bytes = (int64_t)x.element_size();
    run(call, p, fused_moe_cpu_pad, CUDA(fused_moe_cuda_pad));
}

Tensor pad(const Tensor &x_, int64_t a, int64_t b, int64_t c) {
    const char *op = "pad";
    check_dim(op, "x", x_, 4);
    for (int64_t size : {x_.size(0), a, b, c}) check_size(op, "a size", size, 0, MAX_ROWS);
    const int64_t rows = x_.size(0) * a;
    check_size(op, "rows", rows > MAX_ROWS ? rows : rows * b, 0, MAX_ROWS);
    (void)float_dtype(op, x_);
    const Tensor x = x_.stride(3) == 1 ? x_ : dense(x_);
    Call call = begin_call(op, x);
    Tensor out = new_tensor(x, {x.size(0), a, b, c});
    run_pad(call, x, x.size(0), {x.size(1), x.size(2), x.size(3)}, {x.stride(0), x.stride(1), x.stride(2)},
            out, {a, b, c});
    return out;
}

/* --- the router's operands ------------------------------------------------------------------------------ */

int64_t zeros_behind(const Tensor &x, int64_t width) {
    return x.is_cuda() && is_16_bit(x) && width % PAD_CHUNK ? PAD_LINE - width % PAD_LINE : 0;
}

void pad_into(const Call &call, const Tensor &x, const Tensor &out) {
    run_pad(call, x, 1, {1, x.size(0), x.size(1)}, {0, 0, x.stride(0)}, out, {1, out.size(0), out.size(1)});
}

Tensor with_zeros(const Call &call, const Tensor &x, int64_t below, int64_t right) {
    if (!below && !right) return x;
    const Tensor wide = new_tensor(x, {x.size(0) + below, x.size(1) + right});
    pad_into(call, x, wide);
    return wide;
}
