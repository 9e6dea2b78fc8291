/* The parts of FP8 training's operators, and fp8_weight, which quantises what they read. */
#include "fp8_gemms.h"

#include "../eight_bit.h"

enum { AS_IT_IS = 1, TRANSPOSED = 2, BOTH = 3 }; /* the argument orders */

/* --- checks --------------------------------------------------------------------------------------------- */

void check_blocks(const char *op, const char *name, int64_t width) {
    if (width < 1 || width % FUSED_MOE_BLOCK)
        fail(op, "expected ", name, " that is a multiple of ", FUSED_MOE_BLOCK, ", found ", width);
}

FusedMoeDtype trained_dtype(const char *op, const Tensor &x) {
    const FusedMoeDtype dtype = float_dtype(op, x);
    check(dtype == FUSED_MOE_BF16 || (dtype == FUSED_MOE_F32 && !x.is_cuda()), op,
          "bfloat16 (on the CPU float32, too)", "another dtype");
    return dtype;
}

void check_weight(const char *op, const char *name, const Tensor &w, const Tensor &x,
                  std::initializer_list<int64_t> shape) {
    check_shape(op, name, w, shape);
    check_device(op, name, w, x);
    if (w.scalar_type() != ScalarType::Float) check_dtype(op, name, w, x.scalar_type());
    for (int i = 1; i < 3; i++) check_size(op, "a weight's width", w.size(i), 0, MAX_WIDTH);
}

Tensor typed(const char *op, const char *name, const Tensor &x, const Tensor &like, ScalarType dtype,
             std::initializer_list<int64_t> shape) {
    check_shape(op, name, x, shape);
    check_dtype(op, name, x, dtype);
    check_device(op, name, x, like);
    return aligned(x);
}

BlockWeight block_weight(const char *op, const Tensor &codes, const Tensor &scale, const Tensor &like,
                         int64_t E, int64_t out, int64_t in) {
    BlockWeight w = {{},
                     typed(op, "codes of a weight", codes, like, ScalarType::Byte, {E, out, in}),
                     typed(op, "scales of a weight", scale, like, ScalarType::Float,
                           {E, out / FUSED_MOE_BLOCK, in / FUSED_MOE_BLOCK})};
    w.p.data = data(w.codes);
    w.p.scale = data(w.scale);
    w.p.out = out;
    w.p.in = in;
    w.p.block_out = w.p.block_in = FUSED_MOE_BLOCK;
    w.p.format = FUSED_MOE_FORMAT_fp8_block;
    w.p.scale_dtype = FUSED_MOE_F32;
    return w;
}

FusedMoeWeight weight(const BlockWeight &w) {
    return {const_cast<void *>(w.p.data), w.p.out * w.p.in, w.p.in, 1, &w.p};
}

void check_quantized(const char *op, const TensorList &quantized, bool backward) {
    if (quantized.size() != 2 && (backward || quantized.size() != 4))
        fail(op, "expected quantized of ",
             backward ? "[codes_t, scale_t]" : "[codes, scale] or [codes, scale, codes_t, scale_t]",
             ", found ", (int64_t)quantized.size(), " tensors");
}

Width up_width(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout) {
    check_dim(op, "w1", w1, 3);
    const Width s = width_of(op, w1.size(0), w1.size(1), w1.size(2), w3.has_value(), layout);
    check_blocks(op, "D", s.D);
    check_blocks(op, "F", s.F);
    return s;
}

void check_wgrad(const char *op, int64_t wgrad) {
    check_size(op, "wgrad", wgrad, WGRAD_FP8, WGRAD_16_BIT);
}

/* --- parts of both sides -------------------------------------------------------------------------------- */

void fill_absent(const Tensor &like, std::initializer_list<OptTensor *> results, ScalarType dtype) {
    for (OptTensor *result : results)
        if (!*result) *result = new_empty_result(like, dtype);
}

LinkT link_t_of(int64_t R, int64_t E, int64_t H, int64_t wgrad, const Tensor &like) {
    const int64_t blocks = fused_moe_num_row_blocks(R, E), tiles = H / FUSED_MOE_BLOCK;
    if (wgrad == WGRAD_16_BIT) return {R, H, 0, tiles};
    return {blocks, FUSED_MOE_BLOCK * H / (int64_t)like.element_size(), blocks, tiles};
}

Codes quantize_tokens(const Call &call, const Tensor &x, const RowMap &map, OptTensor *by_token) {
    FusedMoeQuantizeRows p = {};
    p.row_map = map.p;
    p.D = x.size(1);
    if (by_token) {
        *by_token = new_tensor(x, {map.p.T, p.D}, ScalarType::Float8_e4m3fn);
        p.token_codes = (*by_token)->mutable_data_ptr();
    }
    return quantize_rows(call, p, x, data(x), FUSED_MOE_CODE_E4M3);
}

/* The same codes, one row for each token. The up side's weight gradients make them again: kept from forward,
 * they would be as large as half of x. */
static Tensor token_codes(const Call &call, const Tensor &x) {
    FusedMoeQuantizeRows p = {};
    p.row_map.T = p.row_map.R = x.size(0);
    p.D = x.size(1);
    return quantize_rows(call, p, x, data(x), FUSED_MOE_CODE_E4M3).codes;
}

Tensor run_eight_bit_mm(const Call &call, const Tensor &like, const void *codes, const float *a_scale,
                        bool has_row_scales, const BlockWeight &w, const RowMap &map) {
    FusedMoeEightBitMM p = {};
    Tensor out = new_tensor(like, {map.p.R, w.p.out});
    p.down.a = codes;
    p.down.b[0] = weight(w);
    p.down.out = out.mutable_data_ptr();
    p.down.offs = map.p.offs;
    p.down.schedule = map.p.schedule;
    p.down.R = map.p.R;
    p.down.M = w.p.out;
    p.down.N[0] = w.p.in;
    p.down.E = map.p.E;
    p.down.dtype = float_dtype(call.op, like);
    p.a_scale = a_scale;
    p.a_has_row_scales = has_row_scales;
    if (map.p.R == 0) return out;
    WorkspaceTensors tensors;
#ifdef FUSED_MOE_WITH_CUDA
    if (call.is_cuda) {
        fused_moe_cuda_select_eight_bit_mm(&p);
        provide_workspace(call, like, &p.down.workspace, &tensors);
    }
#endif
    run(call, p, fused_moe_cpu_eight_bit_mm, CUDA(fused_moe_cuda_eight_bit_mm));
    return out;
}

/* A GEMM over row blocks, whose arguments are those of all chunks of a weight gradient but dw and N. */
static void run_eight_bit_wgrad(const Call &call, FusedMoeEightBitWgrad &p, const Tensor &like) {
    p.workspace = {}; /* its memory ends with the call */
    run_tiered(call, p, like, fused_moe_cpu_eight_bit_wgrad, CUDA(fused_moe_cuda_select_eight_bit_wgrad),
               CUDA(fused_moe_cuda_eight_bit_wgrad));
}

static Tensor part_at(const FusedMoeWeight &w, int64_t E, int64_t M, int64_t N, const Tensor &like,
                      ScalarType dtype) {
    return torch::stable::from_blob(w.data, {E, M, N}, {w.stride_expert, w.stride_out, w.stride_in},
                                    like.device(), dtype);
}

/* The same for parts in any strides, of which each may be absent: by way of a dense copy of both. */
static void run_wgrad_by_copy(const Call &call, FusedMoeEightBitWgrad &p, const FusedMoeWeight part[2],
                              const Tensor &x, const Tensor &copy) {
    const int64_t E = copy.size(0), N = copy.size(2), elem_bytes = (int64_t)copy.element_size();
    const ScalarType dtype = copy.scalar_type();
    p.dw[0] = p.dw[1] = weight(copy);
    p.dw[1].data = p.M[1] ? (char *)p.dw[0].data + p.M[0] * N * elem_bytes : nullptr;
    for (int i = 0; i < 2 && p.accumulate; i++) {
        if (!p.M[i]) continue;
        Tensor dense = part_at(p.dw[i], E, p.M[i], N, x, dtype);
        if (part[i].data)
            torch::stable::copy_(dense, part_at(part[i], E, p.M[i], N, x, dtype));
        else
            torch::stable::zero_(dense);
    }
    run_eight_bit_wgrad(call, p, x);
    for (int i = 0; i < 2; i++) {
        if (!part[i].data) continue;
        Tensor strided = part_at(part[i], E, p.M[i], N, x, dtype);
        torch::stable::copy_(strided, part_at(p.dw[i], E, p.M[i], N, x, dtype));
    }
}

void run_fp8_wgrad(const Call &call, const void *rows_t, const float *rows_t_scale, const WeightGrad &grad,
                   const Tensor &x, const RowMap &map, int64_t chunk, const OptTensor &given_codes) {
    if (!grad.part[0].data && !grad.part[1].data) return;
    const int64_t E = map.p.E, D = x.size(1);
    const bool wants_all = grad.part[0].data && (grad.part[1].data || !grad.M[1]);
    const bool is_direct =
        wants_all && grad.part[0].stride_in == 1 && (!grad.part[1].data || grad.part[1].stride_in == 1);
    const bool is_swapped = !is_direct && wants_all && !grad.M[1] && grad.part[0].stride_out == 1;
    const ScalarType dtype = grad.dtype == FUSED_MOE_F32 ? ScalarType::Float : x.scalar_type();
    const int64_t elem_bytes = grad.dtype == FUSED_MOE_F32 ? 4 : (int64_t)x.element_size();
    const Tensor columns =
        new_tensor(x, {fused_moe_num_row_blocks(map.p.R, E), chunk, FUSED_MOE_BLOCK}, ScalarType::Byte);

    const Tensor codes = given_codes ? *given_codes : token_codes(call, x);
    FusedMoeTransposeCodes of_x = {};
    of_x.codes = data(codes);
    of_x.columns = columns.mutable_data_ptr();
    of_x.row_map = map.p;
    of_x.D = D;
    FusedMoeEightBitWgrad p = {};
    p.a = is_swapped ? of_x.columns : rows_t;
    p.b = is_swapped ? rows_t : of_x.columns;
    p.scale = rows_t_scale;
    p.scale_is_of_b = is_swapped;
    p.M[1] = grad.M[1];
    p.dw_dtype = grad.dtype;
    p.accumulate = grad.accumulate;
    p.offs = map.p.offs;
    p.schedule = map.p.schedule;
    p.R = map.p.R;
    p.E = map.p.E;
    p.dtype = float_dtype(call.op, x);
    for (; of_x.first < D; of_x.first += chunk) {
        const int64_t N = D - of_x.first < chunk ? D - of_x.first : chunk;
        of_x.num_columns = N;
        p.M[0] = is_swapped ? N : grad.M[0];
        p.N = is_swapped ? grad.M[0] : N;
        run(call, of_x, fused_moe_cpu_transpose_codes, CUDA(fused_moe_cuda_transpose_codes));
        FusedMoeWeight part[2] = {grad.part[0], grad.part[1]};
        for (FusedMoeWeight &w : part)
            if (w.data) w.data = (char *)w.data + of_x.first * w.stride_in * elem_bytes;
        if (!is_direct && !is_swapped) {
            run_wgrad_by_copy(call, p, part, x, new_tensor(x, {E, grad.M[0] + grad.M[1], N}, dtype));
            continue;
        }
        for (int i = 0; i < 2; i++) p.dw[i] = is_swapped ? transposed(part[i]) : part[i];
        run_eight_bit_wgrad(call, p, x);
    }
}

WeightGrad up_grad(const FusedMoeWeight &dw1, const FusedMoeWeight &dw3, const Width &s, int64_t layout,
                   FusedMoeDtype dtype, bool accumulate) {
    WeightGrad grad = {{dw1, dw3}, {s.w1_rows, layout == FUSED_MOE_SEPARATE ? s.F : 0}, dtype, accumulate};
    if (layout != FUSED_MOE_INTERLEAVED) return grad;
    grad.M[0] = grad.M[1] = s.F;
    if (!dw1.data) return grad;
    const int64_t elem_bytes = dtype == FUSED_MOE_F32 ? 4 : 2;
    for (int i = 0; i < 2; i++) {
        grad.part[i] = dw1;
        grad.part[i].data = (char *)dw1.data + i * dw1.stride_out * elem_bytes;
        grad.part[i].stride_out = 2 * dw1.stride_out;
    }
    return grad;
}

/* --- weights -------------------------------------------------------------------------------------------- */

std::tuple<Tensor, Tensor, Tensor, Tensor> fp8_weight(const Tensor &w, const OptTensor &w3, int64_t layout,
                                                      int64_t orders) {
    const char *op = "fp8_weight";
    check_dim(op, "w", w, 3);
    const Width s = width_of(op, w.size(0), w.size(1), w.size(2), w3.has_value(), layout);
    check_blocks(op, "D", s.D);
    check_blocks(op, "F", s.F);
    check_size(op, "a weight's width", w.size(1), 1, MAX_WIDTH);
    check_size(op, "a weight's width", w.size(2), 1, MAX_WIDTH);
    check_size(op, "experts", s.E, 1, MAX_EXPERTS);
    check_size(op, "orders", orders, AS_IT_IS, BOTH);
    FusedMoeQuantizeWeight p = {};
    p.dtype = float_dtype(op, w);
    check(p.dtype == FUSED_MOE_F32 || p.dtype == FUSED_MOE_BF16, op, "w of dtype float32 or bfloat16",
          "another dtype");
    p.part[0] = weight(w);
    if (w3) p.part[1] = weight(op, "w3", *w3, w, {s.E, s.F, s.D});
    p.M[0] = s.w1_rows;
    p.M[1] = w3 ? s.F : 0;
    if (layout == FUSED_MOE_INTERLEAVED) {
        const WeightGrad parts = up_grad(p.part[0], {}, s, layout, p.dtype, false);
        for (int i = 0; i < 2; i++) p.part[i] = parts.part[i], p.M[i] = parts.M[i];
    }
    p.N = s.D;
    p.E = (int32_t)s.E;
    Call call = begin_call(op, w);
    check_trains_fp8(call);
    const int64_t row_tiles = s.H / FUSED_MOE_BLOCK, col_tiles = s.D / FUSED_MOE_BLOCK;
    OptTensor codes, scale, codes_t, scale_t;
    if (orders & AS_IT_IS) {
        codes = new_tensor(w, {s.E, s.H, s.D}, ScalarType::Byte);
        scale = new_tensor(w, {s.E, row_tiles, col_tiles}, ScalarType::Float);
        p.codes = codes->mutable_data_ptr();
        p.scale = (float *)scale->mutable_data_ptr();
    }
    if (orders & TRANSPOSED) {
        codes_t = new_tensor(w, {s.E, s.D, s.H}, ScalarType::Byte);
        scale_t = new_tensor(w, {s.E, col_tiles, row_tiles}, ScalarType::Float);
        p.codes_t = codes_t->mutable_data_ptr();
        p.scale_t = (float *)scale_t->mutable_data_ptr();
    }
    run(call, p, fused_moe_cpu_quantize_weight, CUDA(fused_moe_cuda_quantize_weight));
    fill_absent(w, {&codes, &codes_t}, ScalarType::Byte);
    fill_absent(w, {&scale, &scale_t}, ScalarType::Float);
    return {*codes, *scale, *codes_t, *scale_t};
}
