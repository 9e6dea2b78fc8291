/* Quantised weights: their tensors, checked, and the grouped GEMM of one. */
#include "operators.h"

constexpr int64_t TILE = FUSED_MOE_QUANTIZED_TILE;

static ScalarType data_dtype(FusedMoeCode code) {
    switch (code) {
    case FUSED_MOE_CODE_E4M3: return ScalarType::Float8_e4m3fn;
    case FUSED_MOE_CODE_INT8: return ScalarType::Char;
    case FUSED_MOE_CODE_INT4:
    case FUSED_MOE_CODE_E2M1: break; /* two per byte */
    }
    return ScalarType::Byte;
}

/* Finds block_out, block_in and tile_scales from the scale's shape. */
static void find_blocks(const char *op, FusedMoeQuantizedWeight *w, const FusedMoeFormatFacts &format,
                        const Tensor &scale, int64_t E) {
    const int64_t out = w->out, in = w->in;
    const bool is_tiled = scale.dim() == 4, is_grouped = format.is_grouped;
    if (format.block == FUSED_MOE_BLOCK_SQUARE_128) {
        w->block_out = w->block_in = 128;
    } else {
        const int64_t blocks = scale.size(2), step = !is_grouped ? in : is_tiled ? 32 : 8 / format.bits;
        if (blocks < 1 || blocks > in / step || in % (step * blocks))
            fail(op, "expected scales of equal parts of a row, in columns by ", step, ", found ",
                 shape_text(scale), " for ", in, " columns");
        if (format.block == FUSED_MOE_BLOCK_GROUP_32 && in != 32 * blocks)
            fail(op, "expected scales of 32 columns for ", format.name, ", found ", shape_text(scale),
                 " for ", in, " columns");
        const bool is_of_matrix = !is_grouped && (is_tiled ? scale.size(3) == 4 : scale.size(1) == 1);
        w->block_in = in / blocks;
        w->block_out = is_of_matrix ? out : 1;
    }
    const int64_t col_blocks = (in + w->block_in - 1) / w->block_in;
    if (is_tiled) {
        w->tile_scales = w->block_out == 1 ? TILE : 4;
        check_shape(op, "scale", scale, {E, out / TILE, col_blocks, w->tile_scales});
    } else {
        check_shape(op, "scale", scale, {E, (out + w->block_out - 1) / w->block_out, col_blocks});
    }
}

/* Checks the weight's second packing, if it has one, and points into it. */
static void find_transposed(const char *op, const QuantizedTensors &given, QuantizedWeight *weight) {
    if (!given.data_t && !given.scale_t && !given.zero_t) return;
    FusedMoeQuantizedWeight &w = weight->p;
    const Tensor &codes = given.data, &scale = given.scale;
    const int64_t row_tiles = w.out / TILE, col_tiles = w.in / TILE;
    const int64_t E = codes.size(0);
    check(w.tile_scales != 0, op, "data in tiles, of 4 dimensions, beside data_t", "3 dimensions");
    check(given.data_t && given.scale_t, op, "data_t and scale_t together",
          "one of the second packing alone");
    check(given.zero.has_value() == given.zero_t.has_value(), op, "zero_t where there is zero",
          given.zero ? "zero alone" : "zero_t alone");
    /* A tensor has the dtype and device of its twin in the first packing. */
    auto checked = [&](const char *name, const Tensor &x, std::initializer_list<int64_t> shape,
                       const Tensor &twin) {
        check_shape(op, name, x, shape);
        check_dtype(op, name, x, twin.scalar_type());
        check_device(op, name, x, twin);
        return aligned(x);
    };
    const int64_t groups = scale.size(2);
    weight->data_t = checked("data_t", *given.data_t, {E, col_tiles, row_tiles, codes.size(3)}, codes);
    if (w.block_out == 1)
        weight->scale_t = checked("scale_t", *given.scale_t, {E, groups, row_tiles, TILE}, scale);
    else
        weight->scale_t = checked("scale_t", *given.scale_t,
                                  {E, col_tiles, (w.out + w.block_out - 1) / w.block_out, 4}, scale);
    w.data_t = data(*weight->data_t);
    w.scale_t = data(*weight->scale_t);
    if (given.zero_t) {
        weight->zero_t = checked("zero_t", *given.zero_t, {E, groups, row_tiles, TILE}, *given.zero);
        w.zero_t = (const int8_t *)data(*weight->zero_t);
    }
}

QuantizedWeight quantized_weight(const char *op, const QuantizedTensors &given, const Tensor &like,
                                 bool is_transposed) {
    check_size(op, "format", given.format, 0, FUSED_MOE_NUM_FORMATS - 1);
    const bool is_tiled = given.data.dim() == 4;
    check(!is_tiled || like.is_cuda(), op, "data of 3 dimensions: weights in tiles are for CUDA",
          "4 dimensions");
    check_dim(op, "data", given.data, is_tiled ? 4 : 3);
    check_dim(op, "scale", given.scale, is_tiled ? 4 : 3);
    QuantizedWeight weight = {{}, given.data, given.scale, given.zero, {}, {}, {}};
    const Tensor &codes = given.data, &scale = given.scale;
    FusedMoeQuantizedWeight &w = weight.p;
    w.format = (FusedMoeFormat)given.format;
    w.transposed = is_transposed;
    const FusedMoeFormatFacts format = fused_moe_format(w.format);
    const int64_t per_byte = 8 / format.bits;
    check_dtype(op, "data", codes, data_dtype(format.code));
    check_device(op, "data", codes, like);
    check_device(op, "scale", scale, like);
    const int64_t E = codes.size(0);
    w.out = codes.size(1) * (is_tiled ? TILE : 1);
    w.in = codes.size(2) * (is_tiled ? TILE : per_byte);
    if (is_tiled) {
        const int64_t bytes = TILE * TILE / per_byte;
        check_size(op, "bytes of a tile", codes.size(3), bytes, bytes);
    }
    check_size(op, "out of data", w.out, 1, MAX_WIDTH);
    check_size(op, "in of data", w.in, 1, MAX_WIDTH);
    find_blocks(op, &w, format, scale, E);
    const bool is_e8m0 = format.scales == FUSED_MOE_SCALES_E8M0;
    if (is_e8m0)
        check_dtype(op, "scale", scale, ScalarType::Byte);
    else if (format.scales == FUSED_MOE_SCALES_F32 || (is_tiled && format.bits == 8))
        check_dtype(op, "scale", scale, ScalarType::Float);
    w.scale_dtype = dtype_of(op, "scale", scale, !is_e8m0);
    check(w.scale_dtype != FUSED_MOE_F64, op, "scales of at most 32 bits", "Double");
    auto readable = [&](const Tensor &x) {
        return is_tiled ? aligned(x) : dense(x);
    }; /* tiles by words, or TMA */
    if (given.zero) {
        if (!format.has_zeros) fail(op, "expected no zero points with format ", format.name, ", found some");
        if (is_tiled)
            check_shape(op, "zero", *given.zero, {E, scale.size(1), scale.size(2), scale.size(3)});
        else
            check_shape(op, "zero", *given.zero, {E, scale.size(1), scale.size(2)});
        check_dtype(op, "zero", *given.zero, ScalarType::Char);
        check_device(op, "zero", *given.zero, like);
        weight.zero = readable(*given.zero);
        w.zero = (const int8_t *)data(*weight.zero);
    }
    weight.data = readable(codes);
    weight.scale = readable(scale);
    w.data = data(weight.data);
    w.scale = data(weight.scale);
    find_transposed(op, given, &weight);
    return weight;
}

FusedMoeWeight weight(const QuantizedWeight &w) {
    const FusedMoeQuantizedWeight &p = w.p;
    const int64_t stride_out = p.transposed ? 1 : p.in, stride_in = p.transposed ? p.in : 1;
    return {const_cast<void *>(p.data), p.out * p.in, stride_out, stride_in, &p};
}

Tensor quantized_mm(const Tensor &a_, const Tensor &codes, const Tensor &scale, const OptTensor &zero,
                    const Tensor &offsets, int64_t format, bool is_transposed, const OptTensor &data_t,
                    const OptTensor &scale_t, const OptTensor &zero_t, const OptTensor &bias_) {
    const char *op = "quantized_mm";
    check_dim(op, "a", a_, 2);
    Tensor a = aligned(a_), offs = offs_of(op, offsets, a);
    const QuantizedTensors given = {codes, scale, zero, format, data_t, scale_t, zero_t};
    const QuantizedWeight w = quantized_weight(op, given, a, is_transposed);
    const int64_t E = offs.size(0), N[2] = {is_transposed ? w.p.out : w.p.in, 0};
    const int64_t M = is_transposed ? w.p.in : w.p.out;
    const OptTensor bias = operand(op, "bias", bias_, a, {E, M});
    check_size(op, "experts of data", codes.size(0), E, E);
    check_size(op, "a's width", a.size(1), N[0], N[0]);
    (void)float_dtype(op, a);
    Call call = begin_call(op, a);
    Tensor out = new_tensor(a, {a.size(0), M});
    const FusedMoeWeight b[2] = {weight(w), {}};
    run_grouped_mm(call, a, b, N, bias, {ints(offs), nullptr, E}, out);
    return out;
}
