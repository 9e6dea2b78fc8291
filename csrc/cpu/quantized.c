/* Values of weights, quantised ones among them. decode() converts a run of codes to floats, shift_and_scale()
 * applies zero and scale block by block: two loops, so that blocks of 32 vectorise, too. */
#include "cpu.h"

#include <math.h>

/* --- codes ---------------------------------------------------------------------------------------------- */

/* The exponents' biases differ from float's by 120 and by 126. Subnormal codes are made of integers: a CPU
 * may be told to flush float's own subnormals. */
FM_INLINE float from_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7f;
    float normal = fm_float_from_bits((magnitude << 20) + (120u << 23));
    float value = magnitude < 8 ? (float)magnitude * 0x1p-9f : magnitude == 0x7f ? NAN : normal;
    return code & 0x80 ? -value : value;
}

FM_INLINE float from_e2m1(uint32_t code) {
    uint32_t magnitude = code & 7;
    float normal = fm_float_from_bits((magnitude << 22) + (126u << 23));
    float value = magnitude < 2 ? (float)magnitude * 0.5f : normal;
    return code & 8 ? -value : value;
}

static float from_e8m0(uint8_t code) {
    if (code == 255) return NAN;
    return code ? fm_float_from_bits((uint32_t)code << 23) : 0x1p-127f;
}

FM_ROW_FN void decode(FusedMoeCode code, const void *codes, int64_t first, int64_t n,
                      float *restrict values) {
    const uint8_t *restrict bytes = (const uint8_t *)codes + first,
                            *pairs = (const uint8_t *)codes + first / 2;
    switch (code) {
    case FUSED_MOE_CODE_E4M3:
        for (int64_t i = 0; i < n; i++) values[i] = from_e4m3(bytes[i]);
        break;
    case FUSED_MOE_CODE_INT8:
        for (int64_t i = 0; i < n; i++) values[i] = (float)(int8_t)bytes[i];
        break;
    case FUSED_MOE_CODE_INT4:
        for (int64_t i = 0; i < n / 2; i++) {
            values[2 * i] = (float)((pairs[i] & 15) - 8);
            values[2 * i + 1] = (float)((pairs[i] >> 4) - 8);
        }
        break;
    case FUSED_MOE_CODE_E2M1:
        for (int64_t i = 0; i < n / 2; i++) {
            values[2 * i] = from_e2m1(pairs[i]);
            values[2 * i + 1] = from_e2m1(pairs[i] >> 4);
        }
        break;
    }
}

void fm_decode(FusedMoeCode code, const void *codes, int64_t first, int64_t n, float *values) {
    decode(code, codes, first, n, values);
}

FM_ROW_FN void shift_and_scale(float *restrict values, int64_t n, float zero, float scale) {
    for (int64_t i = 0; i < n; i++) values[i] = (values[i] - zero) * scale;
}

/* --- rows ----------------------------------------------------------------------------------------------- */

/* The block that has element (row, col) of expert e. */
static int64_t block_of(const FusedMoeQuantizedWeight *w, int64_t e, int64_t row, int64_t col) {
    const int64_t row_blocks = fm_blocks(w->out, w->block_out), col_blocks = fm_blocks(w->in, w->block_in);
    return (e * row_blocks + row / w->block_out) * col_blocks + col / w->block_in;
}

static float scale_at(const FusedMoeQuantizedWeight *w, int64_t block) {
    if (w->scale_dtype == FUSED_MOE_U8) return from_e8m0(((const uint8_t *)w->scale)[block]);
    const FmRows *v = fm_rows(w->scale_dtype);
    float scale;
    v->load(&scale, fm_at(w->scale, v->elem_bytes, block), 1);
    return scale;
}

float fm_scale(const FusedMoeQuantizedWeight *w, int64_t e, int64_t row, int64_t col) {
    return scale_at(w, block_of(w, e, row, col));
}

static void decode_row(const FusedMoeQuantizedWeight *w, int64_t e, int64_t row, int64_t col, int64_t n,
                       float *values) {
    const int64_t first_block = block_of(w, e, row, 0);
    const int64_t first_code = (e * w->out + row) * w->in;
    decode(fused_moe_format(w->format).code, w->data, first_code + col, n, values);
    for (int64_t j = col, end; j < col + n; j = end) {
        int64_t block = j / w->block_in;
        end = fm_min(col + n, (block + 1) * w->block_in);
        float zero = w->zero ? w->zero[first_block + block] : 0;
        shift_and_scale(values + (j - col), end - j, zero, scale_at(w, first_block + block));
    }
}

FmMatrix fm_dequantize(const FmRows *v, const FusedMoeQuantizedWeight *w, int64_t e, int64_t row,
                       int64_t rows, int64_t col, int64_t cols, void *buffer) {
    float other[FM_TILE_COLS]; /* values of operands that are not float */
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0, n; j < cols; j += n) {
            n = fm_min(cols - j, FM_TILE_COLS);
            void *operand = fm_at(buffer, v->operand_bytes, i * cols + j);
            float *values = v->operand_bytes == sizeof(float) ? operand : other;
            decode_row(w, e, row + i, col + j, n, values);
            if (v->operand_bytes < sizeof(float))
                v->store(operand, values, n);
            else if (values == operand)
                v->round(values, n);
            else
                for (int64_t c = 0; c < n; c++) ((double *)operand)[c] = values[c];
        }
    return fm_dense(buffer, rows, cols);
}

FmMatrix fm_weight_part(const FmRows *v, const FusedMoeWeight *w, int32_t e, int64_t row, int64_t rows,
                        int64_t col, int64_t cols, void *buffer) {
    if (!w->quantized) {
        FmMatrix all = fm_expert(w, v->elem_bytes, e, row + rows, col + cols);
        return fm_operand(v, fm_part(all, v->elem_bytes, row, rows, col, cols), buffer);
    }
    return w->quantized->transposed
               ? fm_transposed(fm_dequantize(v, w->quantized, e, col, cols, row, rows, buffer))
               : fm_dequantize(v, w->quantized, e, row, rows, col, cols, buffer);
}
