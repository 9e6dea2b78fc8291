/* The experts with 8 bits on both operands of their GEMMs: x is quantised, up_gate makes a, which is
 * quantised by its epilogue or after it, and the down GEMM multiplies that. */
#include "sides.h"

#include "../eight_bit.h"

/* A weight of this kind is [data, scale], perhaps with what the rows are divided by behind them. Kernels read
 * float32 scales, and data that are not in tiles. */
static QuantizedWeight eight_bit_weight(const char *op, const char *name, const TensorList &given,
                                        size_t most, int64_t format, const Tensor &x) {
    if (given.size() < 2 || given.size() > most)
        fail(op, "expected ", name, " of 2 to ", (int64_t)most, " tensors with eight_bits, found ",
             (int64_t)given.size());
    check_size(op, "dimensions of data", given[0].dim(), 3, 3);
    check_dtype(op, "scale", given[1], ScalarType::Float);
    return quantized_weight(op, {aligned(given[0]), given[1], {}, format, {}, {}, {}}, x);
}

/* What the rows of experts are divided by before they are quantised. */
static OptTensor smooth_of(const char *op, const char *name, const TensorList &given, const Tensor &x,
                           int64_t E, int64_t width) {
    if (given.size() < 3) return {};
    check_shape(op, name, given[2], {E, width});
    check_dtype(op, name, given[2], ScalarType::Float);
    check_device(op, name, given[2], x);
    return aligned(given[2]);
}

Codes quantize_rows(const Call &call, FusedMoeQuantizeRows &p, const Tensor &like, const void *x,
                    FusedMoeCode code) {
    const int64_t R = p.row_map.R;
    Codes q = {new_tensor(like, {R, p.D},
                          code == FUSED_MOE_CODE_E4M3 ? ScalarType::Float8_e4m3fn : ScalarType::Char),
               new_tensor(like, {R}, ScalarType::Float)};
    p.x = x;
    p.codes = q.codes.mutable_data_ptr();
    p.scale = (float *)q.scale.mutable_data_ptr();
    p.code = code;
    p.dtype = float_dtype(call.op, like);
    run(call, p, fused_moe_cpu_quantize_rows, CUDA(fused_moe_cuda_quantize_rows));
    return q;
}

FusedMoeRowMap grouped(const FusedMoeRowMap &map) {
    FusedMoeRowMap rows = map;
    rows.row_token = rows.row_slot = rows.token_row = nullptr;
    rows.T = map.R;
    return rows;
}

std::tuple<Tensor, Tensor> run_eight_bits(const char *op, const ExpertsArguments &given, const Tensor &x,
                                          const ChosenExperts &chosen, const OptTensor &given_out) {
    const FusedMoeDtype dtype = float_dtype(op, x);
    check(dtype != FUSED_MOE_F64 && (dtype != FUSED_MOE_F32 || !x.is_cuda()), op,
          "bfloat16 or float16 x (on the CPU float32, too)", "another dtype");
    const int64_t format = given.formats[0];
    check_size(op, "format", format, FUSED_MOE_FORMAT_fp8_block, FUSED_MOE_FORMAT_int8);
    check((given.w3.empty() || given.formats[1] == format) && given.formats[2] == format, op,
          "weights of one format with eight_bits", "several");
    const bool in_blocks = format == FUSED_MOE_FORMAT_fp8_block;
    const FusedMoeCode code = fused_moe_format((FusedMoeFormat)format).code;

    const QuantizedWeight w1 = eight_bit_weight(op, "w1", given.w1, 3, format, x);
    const Width s = width_of(op, given.w1[0].size(0), w1.p.out, w1.p.in, !given.w3.empty(), given.layout);
    std::optional<QuantizedWeight> w3;
    if (!given.w3.empty()) {
        w3 = eight_bit_weight(op, "w3", given.w3, 2, format, x);
        check_shape(op, "w3", given.w3[0], {s.E, s.F, s.D});
        check_size(op, "rows that share a scale in w3", w3->p.block_out == 1, w1.p.block_out == 1,
                   w1.p.block_out == 1);
    }
    const QuantizedWeight w2 = eight_bit_weight(op, "w2", given.w2, 3, format, x);
    check_size(op, "experts of w2", given.w2[0].size(0), s.E, s.E);
    check_size(op, "in of w2", w2.p.in, s.F, s.F);
    check_size(op, "x's width", x.size(1), s.D, s.D);
    const int64_t out_dim = w2.p.out;
    const OptTensor b1 = operand(op, "b1", given.b1, x, {s.E, s.w1_rows}),
                    b3 = operand(op, "b3", given.b3, x, {s.E, s.F}),
                    b2 = operand(op, "b2", given.b2, x, {s.E, out_dim});
    check(w3 || !b3, op, "b3 with w3 and not without", "b3 without w3");
    const OptTensor smooth1 = smooth_of(op, "what x is divided by", given.w1, x, s.E, s.D),
                    smooth2 = smooth_of(op, "what a is divided by", given.w2, x, s.E, s.F);
    check(!in_blocks || !smooth2, op, "w2 of data and scale with scales of blocks", "a third tensor");

    const FusedMoeRoute *route = chosen.route ? &chosen.route->p : nullptr;
    const int64_t bytes = (int64_t)x.element_size(), a_bytes = in_blocks ? 1 : bytes;
    PrivatePlan plan = prepare_plan(op, chosen.ids, x, s.E, given.expert_map, s.F * a_bytes, out_dim * bytes);
    const FusedMoeRowMap &map = plan.rows.p;
    const int64_t T = map.T, R = map.R;
    const OptTensor scores = scores_of(op, chosen.scores, x, {T, map.K});
    const Shared shared_rows = shared_of(op, {given.shared, given.shared_gate}, x, T, out_dim);
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
    up.up.layout = (FusedMoeLayout)given.layout;
    up.up.activation = activation_of(op, given.activation, {given.constants[0], given.constants[1]});
    up.up.dtype = dtype;
    up.power_of_two = given.power_of_two;
    Tensor a_scale;
    up.up.a = plan.matrix[0];
    if (in_blocks) {
        a_scale = new_tensor(x, {(s.F + FUSED_MOE_BLOCK - 1) / FUSED_MOE_BLOCK, R}, ScalarType::Float);
        up.a_scale = (float *)a_scale.mutable_data_ptr();
    }

    const Tensor out = out_of(op, given_out, x, out_dim);
    FusedMoeEightBitMM down = {};
    down.down.b[0] = weight(w2);
    down.down.bias = data(b2);
    down.down.out = plan.matrix[1];
    down.down.offs = map.offs;
    down.down.schedule = map.schedule;
    down.down.R = R;
    down.down.M = out_dim;
    down.down.N[0] = s.F;
    down.down.E = map.E;
    down.down.dtype = dtype;

    const FusedMoeUnpermute combine =
        unpermute_of(plan.matrix[1], dtype, out_dim, given.score_on_input ? OptTensor() : scores, plan.rows,
                     out, shared_rows);

    bool in_gemm = false;
#ifdef FUSED_MOE_WITH_CUDA
    if (call.is_cuda) {
        up.up.x = data(x);
        fused_moe_cuda_select_eight_bit_up_gate(&up);
        fused_moe_cuda_select_eight_bit_mm(&down);
        in_gemm = up.gathers && !given.score_on_input && !smooth1 && !smooth2 &&
                  fused_moe_has_few_slots(T * map.K, s.E) &&
                  fused_moe_tier(up.up.workspace.tier).plans_in_gemm &&
                  fused_moe_tier(down.down.workspace.tier).plans_in_gemm;
    }
#endif
    const FusedMoePlanner planner = in_gemm ? FUSED_MOE_PLAN_IN_GEMM : planner_of(call, plan.p, route);
    if (in_gemm) up.up.unplanned = down.down.unplanned = &plan.p;
    if (chosen.logits) run_logits(call, *chosen.logits);
    const Counters counters = find_counters(call, x);
    plan.p.counters = counters.to_zero ? counters.data : nullptr; /* which the plan's kernel has to zero */
    plan.p.tile_rows = FUSED_MOE_TILE_ROWS;
    run_private_plan(call, plan, route, planner);
    up.up.workspace.counters = down.down.workspace.counters = counters.data;
    if (R == 0) {
        run_unpermute(call, combine);
        return {out, plan.counts};
    }

    const bool by_row =
        given.score_on_input || smooth1 || !up.gathers; /* x has codes for each row, not for a token */
    if (by_row) up.up.row_map = grouped(map);
    FusedMoeQuantizeRows of_x = {};
    of_x.row_map = by_row ? map : grouped(map);
    if (!by_row) of_x.row_map.R = of_x.row_map.T = T, of_x.row_map.offs = nullptr;
    of_x.D = s.D;
    of_x.scores = given.score_on_input ? data(scores) : nullptr;
    of_x.smooth = (const float *)data(smooth1);
    of_x.power_of_two = given.power_of_two;
    /* Experts of few rows: a GEMM begins while the kernel before it runs, and loads weights until that
     * ends. */
    const bool early = up.gathers && !by_row && fused_moe_down_reads_before_wait(R, s.E, s.F, true);
    of_x.pdl.lets_next_start = up.up.pdl.reads_before_wait = early;
    up.up.pdl.lets_next_start = down.down.pdl.reads_before_wait = early && in_blocks;
    const Codes qx = quantize_rows(call, of_x, x, data(x), code);
    up.up.x = data(qx.codes);
    up.x_scale = (const float *)data(qx.scale);
    run(call, up, fused_moe_cpu_eight_bit_up_gate, CUDA(fused_moe_cuda_eight_bit_up_gate));

    OptTensor a_codes; /* in_blocks, up_gate has made them */
    if (!in_blocks) {
        FusedMoeQuantizeRows of_a = {};
        of_a.row_map = grouped(map);
        if (in_gemm) of_a.row_map.offs = nullptr;
        of_a.D = s.F;
        of_a.smooth = (const float *)data(smooth2);
        of_a.power_of_two = given.power_of_two;
        const Codes qa = quantize_rows(call, of_a, x, plan.matrix[0], code);
        a_codes = qa.codes, a_scale = qa.scale;
    }
    down.down.a = a_codes ? data(*a_codes) : plan.matrix[0];
    down.a_scale = (const float *)data(a_scale);
    run(call, down, fused_moe_cpu_eight_bit_mm, CUDA(fused_moe_cuda_eight_bit_mm));
    run_unpermute(call, combine);
    return {out, plan.counts};
}
