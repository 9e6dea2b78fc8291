/* The grouped GEMM of a quantised weight. Only the CPU tier has it. */
#include "operators.h"

static ScalarType data_dtype(FusedMoeFormat format) {
    switch (format) {
    case FUSED_MOE_FP8_BLOCK:
    case FUSED_MOE_FP8: return ScalarType::Float8_e4m3fn;
    case FUSED_MOE_INT8: return ScalarType::Char;
    default: return ScalarType::Byte;
    }
}

static bool has_two_per_byte(int64_t format) {
    return format == FUSED_MOE_INT4 || format == FUSED_MOE_MXFP4;
}

/* Finds block_out and block_in from the scale's shape. */
static void find_blocks(const char *op, FusedMoeQuantizedWeight *w, const Tensor &scale, int64_t E,
                        int64_t out, int64_t in) {
    if (w->format == FUSED_MOE_FP8_BLOCK) {
        w->block_out = w->block_in = 128;
    } else {
        const bool is_grouped = has_two_per_byte(w->format);
        const int64_t blocks = scale.size(2), step = is_grouped ? 2 : in;
        if (blocks < 1 || blocks > in / step || in % (step * blocks))
            fail(op, "expected scales of equal parts of a row, in columns by ", step, ", found ",
                 shape_text(scale), " for ", in, " columns");
        w->block_in = in / blocks;
        w->block_out = !is_grouped && scale.size(1) == 1 ? out : 1;
    }
    check_shape(op, "scale", scale,
                {E, (out + w->block_out - 1) / w->block_out, (in + w->block_in - 1) / w->block_in});
}

static FusedMoeQuantizedWeight quantized_weight(const char *op, const Tensor &codes, const Tensor &scale,
                                                const OptTensor &zero, int64_t format, const Tensor &like) {
    check_size(op, "format", format, 0, FUSED_MOE_NUM_FORMATS - 1);
    FusedMoeQuantizedWeight w = {};
    w.format = (FusedMoeFormat)format;
    check_dim(op, "data", codes, 3);
    check_dim(op, "scale", scale, 3);
    check_dtype(op, "data", codes, data_dtype(w.format));
    check_device(op, "data", codes, like);
    check_device(op, "scale", scale, like);
    const int64_t E = codes.size(0), out = codes.size(1);
    const int64_t in = codes.size(2) * (has_two_per_byte(format) ? 2 : 1);
    check_size(op, "out of data", out, 1, MAX_WIDTH);
    check_size(op, "in of data", in, 1, MAX_WIDTH);
    find_blocks(op, &w, scale, E, out, in);
    if (format == FUSED_MOE_MXFP4) check_dtype(op, "scale", scale, ScalarType::Byte);
    w.scale_dtype = dtype_of(op, "scale", scale, format != FUSED_MOE_MXFP4);
    check(w.scale_dtype != FUSED_MOE_F64, op, "scales of at most 32 bits", "Double");
    if (zero) {
        check(format == FUSED_MOE_INT4, op, "zero points for int4 alone", "some for another format");
        check_shape(op, "zero", *zero, {E, out, scale.size(2)});
        check_dtype(op, "zero", *zero, ScalarType::Char);
        check_device(op, "zero", *zero, like);
        w.zero = (const int8_t *)data(*zero);
    }
    w.data = data(codes);
    w.scale = data(scale);
    return w;
}

Tensor quantized_mm(const Tensor &a_, const Tensor &codes_, const Tensor &scale_, const OptTensor &zero_,
                    const Tensor &offsets, int64_t format, bool is_transposed) {
    const char *op = "quantized_mm";
    check_dim(op, "a", a_, 2);
    Tensor a = dense(a_), codes = dense(codes_), scale = dense(scale_), offs = offs_of(op, offsets, a);
    OptTensor zero;
    if (zero_) zero = dense(*zero_);
    FusedMoeQuantizedMM p = {};
    p.b = quantized_weight(op, codes, scale, zero, format, a);
    p.E = (int32_t)offs.size(0);
    check_size(op, "experts of data", codes.size(0), p.E, p.E);
    p.b_out = codes.size(1);
    p.b_in = codes.size(2) * (has_two_per_byte(format) ? 2 : 1);
    p.R = a.size(0);
    const int64_t N = is_transposed ? p.b_out : p.b_in;
    check_size(op, "a's width", a.size(1), N, N);
    p.dtype = float_dtype(op, a);
    Tensor out = new_tensor(a, {p.R, is_transposed ? p.b_in : p.b_out});
    p.a = data(a);
    p.out = out.mutable_data_ptr();
    p.offs = ints(offs);
    p.transposed = is_transposed;
    check_status(begin_call(op, a), fused_moe_cpu_quantized_mm(&p));
    return out;
}
