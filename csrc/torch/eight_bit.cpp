/* The experts with 8 bits on both operands of their GEMMs: x is quantised, up_gate makes a, which is
 * quantised by its epilogue or after it, and the down GEMM multiplies that. */
#include "operators.h"

#include "../eight_bit.h"

/* Scales as the kernels read them: float32, and of weights that are not in tiles. */
static QuantizedWeight eight_bit_weight(const char *op, const Tensor &codes, const Tensor &scale,
                                        int64_t format, const Tensor &x) {
    check_size(op, "dimensions of data", codes.dim(), 3, 3);
    check_dtype(op, "scale", scale, ScalarType::Float);
    return quantized_weight(op, {aligned(codes), scale, {}, format, {}, {}, {}}, x);
}

static OptTensor smooth_of(const char *op, const char *name, const OptTensor &smooth, const Tensor &x,
                           int64_t E, int64_t width) {
    if (!smooth) return {};
    check_shape(op, name, *smooth, {E, width});
    check_dtype(op, name, *smooth, ScalarType::Float);
    check_device(op, name, *smooth, x);
    return aligned(*smooth);
}

Codes quantize_rows(const Call &call, FusedMoeQuantizeRows &p, const Tensor &x, FusedMoeCode code) {
    const int64_t R = p.row_map.R;
    Codes q = {
        new_tensor(x, {R, p.D}, code == FUSED_MOE_CODE_E4M3 ? ScalarType::Float8_e4m3fn : ScalarType::Char),
        new_tensor(x, {R}, ScalarType::Float)};
    p.x = data(x);
    p.codes = q.codes.mutable_data_ptr();
    p.scale = (float *)q.scale.mutable_data_ptr();
    p.code = code;
    p.dtype = float_dtype(call.op, x);
    run(call, p, fused_moe_cpu_quantize_rows, CUDA(fused_moe_cuda_quantize_rows));
    return q;
}

FusedMoeRowMap grouped(const FusedMoeRowMap &map) {
    FusedMoeRowMap rows = map;
    rows.row_token = rows.row_slot = rows.token_row = nullptr;
    rows.T = map.R;
    return rows;
}

std::tuple<Tensor, Tensor>
eight_bit_experts(const Tensor &x_, const Tensor &data1, const Tensor &scale1, const OptTensor &data3,
                  const OptTensor &scale3, const Tensor &data2, const Tensor &scale2, int64_t format,
                  const OptTensor &b1_, const OptTensor &b3_, const OptTensor &b2_, const Tensor &scores_,
                  const Tensor &ids, int64_t layout, int64_t activation, const Constants &constants,
                  bool score_on_input, const OptTensor &smooth1_, const OptTensor &smooth2_,
                  bool power_of_two, const OptTensor &expert_map, const OptTensor &shared,
                  const OptTensor &shared_gate) {
    const char *op = "eight_bit_experts";
    check_dim(op, "x", x_, 2);
    const Tensor x = aligned(x_);
    const FusedMoeDtype dtype = float_dtype(op, x);
    check(dtype != FUSED_MOE_F64 && (dtype != FUSED_MOE_F32 || !x.is_cuda()), op,
          "bfloat16 or float16 x (on the CPU float32, too)", "another dtype");
    check_size(op, "format", format, FUSED_MOE_FORMAT_fp8_block, FUSED_MOE_FORMAT_int8);
    const bool in_blocks = format == FUSED_MOE_FORMAT_fp8_block;
    const FusedMoeCode code = fused_moe_format((FusedMoeFormat)format).code;

    check(data3.has_value() == scale3.has_value(), op, "data3 with scale3", "one without the other");
    const QuantizedWeight w1 = eight_bit_weight(op, data1, scale1, format, x);
    const Width s = width_of(op, data1.size(0), w1.p.out, w1.p.in, data3.has_value(), layout);
    std::optional<QuantizedWeight> w3;
    if (data3) {
        w3 = eight_bit_weight(op, *data3, *scale3, format, x);
        check_shape(op, "data3", *data3, {s.E, s.F, s.D});
        check_size(op, "rows that share a scale in scale3", w3->p.block_out == 1, w1.p.block_out == 1,
                   w1.p.block_out == 1);
    }
    const QuantizedWeight w2 = eight_bit_weight(op, data2, scale2, format, x);
    check_size(op, "experts of data2", data2.size(0), s.E, s.E);
    check_size(op, "in of data2", w2.p.in, s.F, s.F);
    check_size(op, "x's width", x.size(1), s.D, s.D);
    const int64_t out_dim = w2.p.out;
    const OptTensor b1 = operand(op, "b1", b1_, x, {s.E, s.w1_rows}),
                    b3 = operand(op, "b3", b3_, x, {s.E, s.F}),
                    b2 = operand(op, "b2", b2_, x, {s.E, out_dim});
    check(data3 || !b3, op, "b3 with data3 and not without", "b3 without data3");
    const OptTensor smooth1 = smooth_of(op, "smooth1", smooth1_, x, s.E, s.D),
                    smooth2 = smooth_of(op, "smooth2", smooth2_, x, s.E, s.F);
    check(!in_blocks || !smooth2, op, "smooth2 with scales of rows", "format fp8_block");

    PrivatePlan plan = prepare_plan(op, ids, x, s.E, expert_map);
    const FusedMoeRowMap &map = plan.rows.p;
    const int64_t T = map.T, R = map.R;
    const OptTensor scores = scores_of(op, scores_, x, {T, map.K});
    const Shared shared_rows = shared_of(op, {shared, shared_gate}, x, T, out_dim);
    const Call call = begin_call(op, plan.ids);
    FusedMoeEightBitUpGate up = {};
    up.up.w1 = weight(w1);
    if (w3) up.up.w3 = weight(*w3);
    up.up.b1 = data(b1);
    up.up.b3 = data(b3);
    up.up.row_map = map;
    up.gathers = true;
    up.up.D = s.D;
    up.up.F = s.F;
    up.up.layout = (FusedMoeLayout)layout;
    up.up.activation = activation_of(op, activation, constants);
    up.up.dtype = dtype;
    up.power_of_two = power_of_two;
    Tensor a = new_tensor(x, {R, s.F}, in_blocks ? std::optional(ScalarType::Float8_e4m3fn) : std::nullopt),
           a_scale;
    up.up.a = a.mutable_data_ptr();
    if (in_blocks) {
        a_scale = new_tensor(x, {(s.F + FUSED_MOE_BLOCK - 1) / FUSED_MOE_BLOCK, R}, ScalarType::Float);
        up.a_scale = (float *)a_scale.mutable_data_ptr();
    }

    Tensor y = new_tensor(x, {R, out_dim}), out = new_tensor(x, {T, out_dim});
    FusedMoeEightBitMM down = {};
    down.down.b[0] = weight(w2);
    down.down.bias = data(b2);
    down.down.out = y.mutable_data_ptr();
    down.down.offs = map.offs;
    down.down.schedule = map.schedule;
    down.down.R = R;
    down.down.M = out_dim;
    down.down.N[0] = s.F;
    down.down.E = map.E;
    down.down.dtype = dtype;

    bool in_gemm = false;
#ifdef FUSED_MOE_WITH_CUDA
    if (call.is_cuda) {
        up.up.x = data(x);
        fused_moe_cuda_select_eight_bit_up_gate(&up);
        fused_moe_cuda_select_eight_bit_mm(&down);
        in_gemm = up.gathers && !score_on_input && !smooth1 && !smooth2 &&
                  fused_moe_has_few_slots(T * map.K, s.E) &&
                  fused_moe_tier(up.up.workspace.tier).plans_in_gemm &&
                  fused_moe_tier(down.down.workspace.tier).plans_in_gemm;
    }
#endif
    const FusedMoePlanner planner = in_gemm ? FUSED_MOE_PLAN_IN_GEMM : planner_of(call, plan.p, nullptr);
    if (in_gemm) up.up.unplanned = down.down.unplanned = &plan.p;
    const Counters counters = find_counters(call, x);
    plan.p.counters = counters.to_zero ? counters.data : nullptr; /* which the plan's kernel has to zero */
    plan.p.tile_rows = FUSED_MOE_TILE_ROWS;
    run_private_plan(call, plan, nullptr, planner);
    up.up.workspace.counters = down.down.workspace.counters = counters.data;
    if (R == 0) {
        run_unpermute(
            call, unpermute_of(op, y, score_on_input ? OptTensor() : scores, plan.rows, out, shared_rows));
        return {out, plan.counts};
    }

    const bool by_row =
        score_on_input || smooth1 || !up.gathers; /* x has codes for each row, not for a token */
    if (by_row) up.up.row_map = grouped(map);
    FusedMoeQuantizeRows of_x = {};
    of_x.row_map = by_row ? map : grouped(map);
    if (!by_row) of_x.row_map.R = of_x.row_map.T = T, of_x.row_map.offs = nullptr;
    of_x.D = s.D;
    of_x.scores = score_on_input ? data(scores) : nullptr;
    of_x.smooth = (const float *)data(smooth1);
    of_x.power_of_two = power_of_two;
    /* Experts of few rows: a GEMM begins while the kernel before it runs, and loads weights until that
     * ends. */
    const bool early = up.gathers && !by_row && fused_moe_down_reads_before_wait(R, s.E, s.F, true);
    of_x.pdl.lets_next_start = up.up.pdl.reads_before_wait = early;
    up.up.pdl.lets_next_start = down.down.pdl.reads_before_wait = early && in_blocks;
    const Codes qx = quantize_rows(call, of_x, x, code);
    up.up.x = data(qx.codes);
    up.x_scale = (const float *)data(qx.scale);
    run(call, up, fused_moe_cpu_eight_bit_up_gate, CUDA(fused_moe_cuda_eight_bit_up_gate));

    Codes qa = {a, a_scale};
    if (!in_blocks) {
        FusedMoeQuantizeRows of_a = {};
        of_a.row_map = grouped(map);
        if (in_gemm) of_a.row_map.offs = nullptr;
        of_a.D = s.F;
        of_a.smooth = (const float *)data(smooth2);
        of_a.power_of_two = power_of_two;
        qa = quantize_rows(call, of_a, a, code);
    }
    down.down.a = data(qa.codes);
    down.a_scale = (const float *)data(qa.scale);
    run(call, down, fused_moe_cpu_eight_bit_mm, CUDA(fused_moe_cuda_eight_bit_mm));
    run_unpermute(call,
                  unpermute_of(op, y, score_on_input ? OptTensor() : scores, plan.rows, out, shared_rows));
    return {out, plan.counts};
}
