/* What both sides of FP8 training are made of: checks, codes of tokens, GEMMs of codes. */
#ifndef FUSED_MOE_TORCH_FP8_GEMMS_H
#define FUSED_MOE_TORCH_FP8_GEMMS_H

#include <initializer_list>

#include "operators.h"

enum { WGRAD_FP8, WGRAD_16_BIT }; /* the argument wgrad */

/* --- checks --------------------------------------------------------------------------------------------- */

void check_blocks(const char *op, const char *name, int64_t width);

/* x's dtype, of those that are trained. */
FusedMoeDtype trained_dtype(const char *op, const Tensor &x);

/* A weight whose values are not read: its gradient has its strides, and its dtype, x's or float32. */
void check_weight(const char *op, const char *name, const Tensor &w, const Tensor &x,
                  std::initializer_list<int64_t> shape);

/* operand, of another dtype than like's. */
Tensor typed(const char *op, const char *name, const Tensor &x, const Tensor &like, ScalarType dtype,
             std::initializer_list<int64_t> shape);

/* Codes and scales of a weight (E, out, in), checked. */
struct BlockWeight {
    FusedMoeQuantizedWeight p;
    Tensor codes, scale;
};

BlockWeight block_weight(const char *op, const Tensor &codes, const Tensor &scale, const Tensor &like,
                         int64_t E, int64_t out, int64_t in);

/* Points into w. */
FusedMoeWeight weight(const BlockWeight &w);

/* The codes of forward may have backward's behind them; else backward makes its own. */
void check_quantized(const char *op, const TensorList &quantized, bool backward);

Width up_width(const char *op, const Tensor &w1, const OptTensor &w3, int64_t layout);
void check_wgrad(const char *op, int64_t wgrad);

/* --- parts of both sides -------------------------------------------------------------------------------- */

/* Results that are not needed are empty. */
void fill_absent(const Tensor &like, std::initializer_list<OptTensor *> results, ScalarType dtype);

/* The shapes of link_t and link_t_scale. */
struct LinkT {
    int64_t rows, columns, scale_rows, scale_columns;
};

LinkT link_t_of(int64_t R, int64_t E, int64_t H, int64_t wgrad, const Tensor &like);

/* The codes of x's or dout's tokens, for each row; and in `by_token`, if it is given, for each token. */
Codes quantize_tokens(const Call &call, const Tensor &x, const RowMap &map, OptTensor *by_token = nullptr);

/* out [R,M] = codes [R,N] times a weight (E,M,N). a_scale has row scales, or scales of 128 columns. */
Tensor run_eight_bit_mm(const Call &call, const Tensor &like, const void *codes, const float *a_scale,
                        bool has_row_scales, const BlockWeight &w, const RowMap &map);

/* The gradient of a weight (E, M[0] + M[1], N), or of its transpose: where it is written, or added to. A part
 * may be absent. */
struct WeightGrad {
    FusedMoeWeight part[2];
    int64_t M[2];
    FusedMoeDtype dtype;
    bool accumulate;
};

/* dw = rows_t x^T, of rows_t [blocks,M,128] with scales of its own and of x's tokens, whose scales rows_t has
 * taken in. x becomes codes by columns in chunks. given_codes: x's by token, if they have been made.
 *
 * The kernel writes gradients whose elements are contiguous along N. If there is one weight alone, and it is
 * contiguous along M, A and B are swapped. Any other gradient is computed contiguous, and copied. */
void run_fp8_wgrad(const Call &call, const void *rows_t, const float *rows_t_scale, const WeightGrad &grad,
                   const Tensor &x, const RowMap &map, int64_t chunk, const OptTensor &given_codes = {});

/* The parts of w1's and w3's gradients that dh's gates and ups make: of interleaved rows every second one. */
WeightGrad up_grad(const FusedMoeWeight &dw1, const FusedMoeWeight &dw3, const Width &s, int64_t layout,
                   FusedMoeDtype dtype, bool accumulate);

#endif
