/* Experts whose GEMMs multiply e4m3 by e4m3, forward and backward, in two sides with h between them as in
 * experts.cpp. Weights are quantised by an operator of its own, once for all calls until they change; what
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

#include "operators.h"

#include "../eight_bit.h"

enum { WGRAD_FP8, WGRAD_16_BIT };                /* the argument wgrad */
enum { AS_IT_IS = 1, TRANSPOSED = 2, BOTH = 3 }; /* the argument orders */

/* --- checks --------------------------------------------------------------------------------------------- */

static void check_blocks(const char *op, const char *name, int64_t width) {
    if (width < 1 || width % FUSED_MOE_BLOCK)
        fail(op, "expected ", name, " that is a multiple of ", FUSED_MOE_BLOCK, ", found ", width);
}

/* x's dtype, of those that are trained. */
static FusedMoeDtype trained_dtype(const char *op, const Tensor &x) {
    const FusedMoeDtype dtype = float_dtype(op, x);
    check(dtype == FUSED_MOE_BF16 || (dtype == FUSED_MOE_F32 && !x.is_cuda()), op,
          "bfloat16 (on the CPU float32, too)", "another dtype");
    return dtype;
}

/* A weight whose values are not read: its gradient has its strides, and its dtype, x's or float32. */
static void check_weight(const char *op, const char *name, const Tensor &w, const Tensor &x,
                         std::initializer_list<int64_t> shape) {
    check_shape(op, name, w, shape);
    check_device(op, name, w, x);
    if (w.scalar_type() != ScalarType::Float) check_dtype(op, name, w, x.scalar_type());
    for (int i = 1; i < 3; i++) check_size(op, "a weight's width", w.size(i), 0, MAX_WIDTH);
}

/* operand, of another dtype than like's. */
static Tensor typed(const char *op, const char *name, const Tensor &x, const Tensor &like, ScalarType dtype,
                    std::initializer_list<int64_t> shape) {
    check_shape(op, name, x, shape);
    check_dtype(op, name, x, dtype);
    check_device(op, name, x, like);
    return aligned(x);
}

/* Codes and scales of a weight (E, out, in), checked. */
struct BlockWeight {
    FusedMoeQuantizedWeight p;
    Tensor codes, scale;
};

static BlockWeight block_weight(const char *op, const Tensor &codes, const Tensor &scale, const Tensor &like,
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

/* Points into w. */
static FusedMoeWeight weight(const BlockWeight &w) {
    return {const_cast<void *>(w.p.data), w.p.out * w.p.in, w.p.in, 1, &w.p};
}

/* The codes of forward may have backward's behind them; else backward makes its own. */
static void check_quantized(const char *op, const TensorList &quantized, bool backward) {
    if (quantized.size() != 2 && (backward || quantized.size() != 4))
        fail(op, "expected quantized of ",
             backward ? "[codes_t, scale_t]" : "[codes, scale] or [codes, scale, codes_t, scale_t]",
             ", found ", (int64_t)quantized.size(), " tensors");
}

static Width up_width(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout) {
    check_dim(op, "w1", w1, 3);
    const Width s = width_of(op, w1.size(0), w1.size(1), w1.size(2), w3.has_value(), layout);
    check_blocks(op, "D", s.D);
    check_blocks(op, "F", s.F);
    return s;
}

static void check_wgrad(const char *op, int64_t wgrad) {
    check_size(op, "wgrad", wgrad, WGRAD_FP8, WGRAD_16_BIT);
}

/* --- parts of both sides -------------------------------------------------------------------------------- */

/* Results that are not needed are empty. */
static void fill_absent(const Tensor &like, std::initializer_list<OptTensor *> results, ScalarType dtype) {
    for (OptTensor *result : results)
        if (!*result) *result = new_empty_result(like, dtype);
}

/* The shapes of link_t and link_t_scale. */
struct LinkT {
    int64_t rows, columns, scale_rows, scale_columns;
};

static LinkT link_t_of(int64_t R, int64_t E, int64_t H, int64_t wgrad, const Tensor &like) {
    const int64_t blocks = fused_moe_num_row_blocks(R, E), tiles = H / FUSED_MOE_BLOCK;
    if (wgrad == WGRAD_16_BIT) return {R, H, 0, tiles};
    return {blocks, FUSED_MOE_BLOCK * H / (int64_t)like.element_size(), blocks, tiles};
}

/* The codes of x's or dout's tokens, for each row; and in `by_token`, if it is given, for each token. */
static Codes quantize_tokens(const Call &call, const Tensor &x, const RowMap &map,
                             OptTensor *by_token = nullptr) {
    FusedMoeQuantizeRows p = {};
    p.row_map = map.p;
    p.D = x.size(1);
    if (by_token) {
        *by_token = new_tensor(x, {map.p.T, p.D}, ScalarType::Float8_e4m3fn);
        p.token_codes = (*by_token)->mutable_data_ptr();
    }
    return quantize_rows(call, p, x, FUSED_MOE_CODE_E4M3);
}

/* The same codes, one row for each token. The up side's weight gradients make them again: kept from forward,
 * they would be as large as half of x. */
static Tensor token_codes(const Call &call, const Tensor &x) {
    FusedMoeQuantizeRows p = {};
    p.row_map.T = p.row_map.R = x.size(0);
    p.D = x.size(1);
    return quantize_rows(call, p, x, FUSED_MOE_CODE_E4M3).codes;
}

/* out [R,M] = codes [R,N] times a weight (E,M,N). a_scale has row scales, or scales of 128 columns. */
static Tensor run_eight_bit_mm(const Call &call, const Tensor &like, const void *codes, const float *a_scale,
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

/* The gradient of a weight (E, M[0] + M[1], N), or of its transpose: where it is written, or added to. A part
 * may be absent. */
struct WeightGrad {
    FusedMoeWeight part[2];
    int64_t M[2];
    FusedMoeDtype dtype;
    bool accumulate;
};

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

/* dw = rows_t x^T, of rows_t [blocks,M,128] with scales of its own and of x's tokens, whose scales rows_t has
 * taken in. x becomes codes by columns in chunks. given_codes: x's by token, if they have been made.
 *
 * The kernel writes consecutive elements along its N. A part whose M is the dense side is written by the GEMM
 * of swapped operands, if it is the only one: N's rows of a block are dense. What is left takes a copy. */
static void run_fp8_wgrad(const Call &call, const void *rows_t, const float *rows_t_scale,
                          const WeightGrad &grad, const Tensor &x, const RowMap &map, int64_t chunk,
                          const OptTensor &given_codes = {}) {
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

/* The parts of w1's and w3's gradients that dh's gates and ups make: of interleaved rows every second one. */
static WeightGrad up_grad(const FusedMoeWeight &dw1, const FusedMoeWeight &dw3, const Width &s,
                          int64_t layout, FusedMoeDtype dtype, bool accumulate) {
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
