/* FP8 training: what its GEMMs read, and its weight gradients. eight_bit.h has the arithmetic of codes, and
 * the layout by columns.
 *
 * A task is a block of 128 x 128, or a row block and some of its columns. Codes by columns are made row by
 * row in scratch, with the arithmetic of codes by rows, and then transposed. */
#include "../eight_bit.h"
#include "cpu.h"

#include <string.h>

enum { BLOCK = FUSED_MOE_BLOCK, SQUARE = BLOCK * BLOCK };

static bool is_supported(FusedMoeDtype dtype) {
    return dtype == FUSED_MOE_F32 || dtype == FUSED_MOE_BF16;
}

/* The scale of values whose largest magnitude is peak. */
static float scale_of(uint32_t peak) {
    return fused_moe_scale_of(peak, fused_moe_largest_code(FUSED_MOE_CODE_E4M3), false);
}

/* codes = values factor, of 128 values. */
static void encode_128(uint8_t *codes, float factor, const float *values) {
    float products[BLOCK];
    fm_encode(FUSED_MOE_CODE_E4M3, codes, factor, values, products, BLOCK);
}

/* 128 x 128 codes, dense, to rows that are `stride` apart. */
static void transpose(uint8_t *restrict to, int64_t stride, const uint8_t *restrict codes) {
    for (int64_t j = 0; j < BLOCK; j++)
        for (int64_t i = 0; i < BLOCK; i++) to[j * stride + i] = codes[i * BLOCK + j];
}

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* --- quantize_weight ------------------------------------------------------------------------------------ */

typedef struct {
    void *accum;
    float *values;  /* [128,128] */
    uint8_t *codes; /* likewise  */
} WeightBuffers;

static WeightBuffers take_weight(char *scratch, size_t *bytes) {
    WeightBuffers s;
    s.accum = fm_take(&scratch, bytes, SQUARE * sizeof(float));
    s.values = fm_take(&scratch, bytes, SQUARE * sizeof *s.values);
    s.codes = fm_take(&scratch, bytes, SQUARE * sizeof *s.codes);
    return s;
}

static int quantize_weight_block(int64_t i, const void *ctx, char *scratch) {
    const FusedMoeQuantizeWeight *p = ctx;
    const FmRows *v = fm_rows(p->dtype);
    const int64_t M = p->M[0] + p->M[1], N = p->N, m_blocks = M / BLOCK, n_blocks = N / BLOCK;
    const int64_t e = i / (m_blocks * n_blocks), m_block = i / n_blocks % m_blocks, n_block = i % n_blocks;
    const int64_t m = m_block * BLOCK, n = n_block * BLOCK;
    const int part = m >= p->M[0];
    size_t unused = 0;
    WeightBuffers s = take_weight(scratch, &unused);

    const FmMatrix all = fm_expert(&p->part[part], v->elem_bytes, (int32_t)e, p->M[part], N);
    const FmMatrix rows = fm_part(all, v->elem_bytes, m - (part ? p->M[0] : 0), BLOCK, n, BLOCK);
    const FmMatrix block = fm_to_accum(v, rows, s.accum);
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t c = 0; c < BLOCK; c++)
            s.values[r * BLOCK + c] = ((float *)block.data)[r * block.row_stride + c * block.col_stride];

    const float scale = scale_of(fm_peak(s.values, SQUARE));
    for (int64_t r = 0; r < BLOCK; r++) encode_128(s.codes + r * BLOCK, 1 / scale, s.values + r * BLOCK);
    if (p->codes) {
        p->scale[(e * m_blocks + m_block) * n_blocks + n_block] = scale;
        for (int64_t r = 0; r < BLOCK; r++)
            memcpy(fm_at(p->codes, 1, (e * M + m + r) * N + n), s.codes + r * BLOCK, BLOCK);
    }
    if (p->codes_t) {
        p->scale_t[(e * n_blocks + n_block) * m_blocks + m_block] = scale;
        transpose(fm_at(p->codes_t, 1, (e * N + n) * M + m), M, s.codes);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_quantize_weight(const FusedMoeQuantizeWeight *p) {
    if (!is_supported(p->dtype)) return FUSED_MOE_UNSUPPORTED_DTYPE;
    const int64_t elements = p->E * (p->M[0] + p->M[1]) * p->N;
    size_t bytes = 0;
    take_weight(NULL, &bytes);
    return fm_parallel(elements / SQUARE, elements, quantize_weight_block, p, bytes);
}

/* --- row blocks ----------------------------------------------------------------------------------------- */

typedef struct {
    int64_t first_row, num_rows; /* num_rows 0: no expert has this block */
} RowBlock;

/* Every expert's first block is after that of the expert before it, even if that one is empty. */
static RowBlock row_block_of(const int32_t *offs, int32_t E, int64_t index) {
    int32_t low = 0, high = E; /* the block is not before low's first, and before high's */
    while (high - low > 1) {
        const int32_t e = low + (high - low) / 2;
        if (fused_moe_first_row_block(fused_moe_expert_start(offs, e), e) <= index)
            low = e;
        else
            high = e;
    }
    const int64_t start = fused_moe_expert_start(offs, low);
    const int64_t first = start + (index - fused_moe_first_row_block((int32_t)start, low)) * BLOCK;
    return (RowBlock){first, first < offs[low] ? fm_min(BLOCK, offs[low] - first) : 0};
}

/* Places past the expert's last row. */
static void clear_past(uint8_t *codes, int64_t num_rows) {
    fm_clear(codes + num_rows * BLOCK, (BLOCK - num_rows) * BLOCK);
}

typedef struct {
    const void *p;
    const FmRows *v;
    int64_t parts; /* tasks per row block: each has some of its columns */
} Task;

/* --- transpose_codes ----------------------------------------------------------------------------------- */

static int transpose_codes_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeTransposeCodes *p = t->p;
    const FusedMoeRowMap *m = &p->row_map;
    const int64_t index = i / t->parts;
    const RowBlock block = row_block_of(m->offs, m->E, index);
    const FmCols cols = fm_cols_of(p->num_columns, t->parts, i % t->parts);
    uint8_t *codes = (uint8_t *)scratch;
    if (!block.num_rows) return FUSED_MOE_OK;

    clear_past(codes, block.num_rows);
    for (int64_t j = cols.first; j < cols.end; j += BLOCK) {
        for (int64_t r = 0; r < block.num_rows; r++) {
            const int64_t row = block.first_row + r, token = m->row_token ? m->row_token[row] : row;
            fm_copy(codes + r * BLOCK, fm_at(p->codes, 1, token * p->D + p->first + j), BLOCK);
        }
        transpose(fm_at(p->columns, 1, (index * p->num_columns + j) * BLOCK), BLOCK, codes);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_transpose_codes(const FusedMoeTransposeCodes *p) {
    const FusedMoeRowMap *m = &p->row_map;
    if (!fm_row_map_is_valid(m)) return FUSED_MOE_INVALID_ROWS;
    const int64_t blocks = fused_moe_num_row_blocks(m->R, m->E);
    const Task task = {p, NULL, fm_parts(blocks, p->num_columns)};
    return fm_parallel(blocks * task.parts, m->R * p->num_columns, transpose_codes_block, &task, SQUARE);
}

/* --- quantize_dh ---------------------------------------------------------------------------------------- */

/* 128 columns of dh's gates, of its ups, or of a', of a row block. */
typedef struct {
    float *values;   /* [128,128] */
    uint32_t *peaks; /* [128]     */
} Square;

typedef struct {
    Square gate, up, a;
    float *row[6]; /* [128] each */
    uint8_t *codes;
} DhBuffers;

static Square take_square(char **scratch, size_t *bytes) {
    Square s;
    s.values = fm_take(scratch, bytes, SQUARE * sizeof *s.values);
    s.peaks = fm_take(scratch, bytes, BLOCK * sizeof *s.peaks);
    return s;
}

static DhBuffers take_dh(char *scratch, size_t *bytes) {
    DhBuffers s;
    s.gate = take_square(&scratch, bytes);
    s.up = take_square(&scratch, bytes);
    s.a = take_square(&scratch, bytes);
    for (int i = 0; i < 6; i++) s.row[i] = fm_take(&scratch, bytes, BLOCK * sizeof(float));
    s.codes = fm_take(&scratch, bytes, SQUARE);
    return s;
}

static int64_t slot_of(const FusedMoeRowMap *m, int64_t row) {
    return m->row_slot ? m->row_slot[row] : row;
}

/* Rounds a row of 128 values and keeps its peak; stores it at (row, col) of `stored`, which may be NULL. */
static void finish_row(const FmRows *v, Square s, int64_t r, void *stored, int64_t row, int64_t width,
                       int64_t col) {
    float *values = s.values + r * BLOCK;
    v->round(values, BLOCK);
    s.peaks[r] = fm_peak(values, BLOCK);
    if (stored) v->store(fm_at(stored, v->elem_bytes, row * width + col), values, BLOCK);
}

/* dh, a' and the sums of dscores, of a block's rows and hidden columns [j, j + 128). */
static void compute_square(const Task *t, RowBlock block, int64_t j, const DhBuffers *s) {
    const FusedMoeQuantizeDh *p = t->p;
    const FmRows *v = t->v;
    const bool gated = p->layout != FUSED_MOE_UNGATED;
    const int64_t F = p->F, H = fm_h_width(p->layout, F);
    float *g = s->row[0], *sg = s->row[1], *gate = s->row[2], *up = gated ? s->row[3] : NULL;
    for (int64_t r = 0; r < block.num_rows; r++) {
        const int64_t row = block.first_row + r;
        const float score = p->scores ? p->scores[slot_of(&p->row_map, row)] : 1;
        float *a = s->a.values + r * BLOCK;
        v->load(g, fm_at(p->g, v->elem_bytes, row * F + j), BLOCK);
        v->load(gate, fm_at(p->h, v->elem_bytes, row * H + j), BLOCK);
        if (gated) v->load(up, fm_at(p->h, v->elem_bytes, row * H + F + j), BLOCK);
        v->scale(sg, score, g, BLOCK);
        v->dact(&p->activation, s->gate.values + r * BLOCK, gated ? s->up.values + r * BLOCK : NULL, a, sg,
                gate, up, BLOCK);
        if (p->dscores) p->partials[row * (F / BLOCK) + j / BLOCK] = (float)v->dot(g, a, BLOCK);
        v->scale(a, score, a, BLOCK);
        finish_row(v, s->gate, r, p->dh_rows, row, H, j);
        if (gated) finish_row(v, s->up, r, p->dh_rows, row, H, F + j);
        finish_row(v, s->a, r, p->a_rows, row, F, j);
    }
}

/* Codes by rows of columns [col, col + 128) of dh. */
static void encode_rows(const FusedMoeQuantizeDh *p, RowBlock block, Square s, int64_t col) {
    const int64_t H = fm_h_width(p->layout, p->F);
    for (int64_t r = 0; r < block.num_rows; r++) {
        const int64_t row = block.first_row + r;
        const float scale = scale_of(s.peaks[r]);
        p->dh_scale[col / BLOCK * p->row_map.R + row] = scale;
        encode_128(fm_at(p->dh, 1, row * H + col), 1 / scale, s.values + r * BLOCK);
    }
}

/* Codes by columns of a block's rows times their `factors`; their scale. */
static float encode_columns(uint8_t *to, RowBlock block, Square s, const float *factors, uint8_t *codes) {
    uint32_t peak = 0;
    for (int64_t r = 0; r < block.num_rows; r++)
        peak = larger(peak,
                      fused_moe_magnitude(factors[block.first_row + r] * fused_moe_bits_float(s.peaks[r])));
    const float scale = scale_of(peak), inverse = 1 / scale;
    clear_past(codes, block.num_rows);
    for (int64_t r = 0; r < block.num_rows; r++)
        encode_128(codes + r * BLOCK, factors[block.first_row + r] * inverse, s.values + r * BLOCK);
    transpose(to, BLOCK, codes);
    return scale;
}

static int quantize_dh_block(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeQuantizeDh *p = t->p;
    const FusedMoeRowMap *m = &p->row_map;
    const int64_t F = p->F, H = fm_h_width(p->layout, F), index = i / t->parts;
    const RowBlock block = row_block_of(m->offs, m->E, index);
    const FmCols cols = fm_cols_of(F, t->parts, i % t->parts);
    size_t unused = 0;
    const DhBuffers s = take_dh(scratch, &unused);
    if (!block.num_rows) return FUSED_MOE_OK;

    for (int64_t j = cols.first; j < cols.end; j += BLOCK) {
        compute_square(t, block, j, &s);
        for (int64_t col = j; col < H; col += F) {
            const Square half = col < F ? s.gate : s.up;
            if (p->dh) encode_rows(p, block, half, col);
            if (p->dh_t)
                p->dh_t_scale[(index * H + col) / BLOCK] = encode_columns(
                    fm_at(p->dh_t, 1, (index * H + col) * BLOCK), block, half, p->x_scale, s.codes);
        }
        if (p->a_t)
            p->a_t_scale[(index * F + j) / BLOCK] =
                encode_columns(fm_at(p->a_t, 1, (index * F + j) * BLOCK), block, s.a, p->dout_scale, s.codes);
    }
    return FUSED_MOE_OK;
}

/* A row past the last one is quantised as zeros. */
static void clear_past_last(const FusedMoeQuantizeDh *p, int64_t elem_bytes) {
    const int64_t R = p->row_map.R, num_rows = p->row_map.offs[p->row_map.E - 1], unused = R - num_rows;
    const int64_t F = p->F, H = fm_h_width(p->layout, F);
    if (p->dh) fm_clear(fm_at(p->dh, 1, num_rows * H), unused * H);
    for (int64_t b = 0; p->dh && b < H / BLOCK; b++)
        for (int64_t r = num_rows; r < R; r++) p->dh_scale[b * R + r] = 1;
    if (p->dh_rows) fm_clear(fm_at(p->dh_rows, elem_bytes, num_rows * H), unused * H * elem_bytes);
    if (p->a_rows) fm_clear(fm_at(p->a_rows, elem_bytes, num_rows * F), unused * F * elem_bytes);
}

static void sum_dscores(const FusedMoeQuantizeDh *p) {
    const FusedMoeRowMap *m = &p->row_map;
    const int64_t blocks = p->F / BLOCK;
    fm_clear(p->dscores, m->T * m->K * (int64_t)sizeof *p->dscores);
    for (int64_t r = 0; r < m->offs[m->E - 1]; r++) {
        float sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += p->partials[r * blocks + b];
        p->dscores[slot_of(m, r)] = sum;
    }
}

int fused_moe_cpu_quantize_dh(const FusedMoeQuantizeDh *p) {
    const FusedMoeRowMap *m = &p->row_map;
    if (!is_supported(p->dtype)) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(m)) return FUSED_MOE_INVALID_ROWS;
    const FmRows *v = fm_rows(p->dtype);
    clear_past_last(p, (int64_t)v->elem_bytes);
    const int64_t blocks = fused_moe_num_row_blocks(m->R, m->E);
    const Task task = {p, v, fm_parts(blocks, p->F)};
    size_t bytes = 0;
    take_dh(NULL, &bytes);
    const int64_t work = m->R * fm_h_width(p->layout, p->F);
    int status = fm_parallel(blocks * task.parts, work, quantize_dh_block, &task, bytes);
    if (status == FUSED_MOE_OK && p->dscores) sum_dscores(p);
    return status;
}

/* --- eight_bit_wgrad ------------------------------------------------------------------------------------ */

/* A task is an expert and a tile of 128 x FM_TILE_COLS of its dw. A row block's sums are exact in double:
 * multiples of 2^-18 below 2^25. They are scaled and added up in double, in the order of the blocks. */
typedef struct {
    double *a, *b, *slice, *sum;
    float *dw;
} WgradBuffers;

static WgradBuffers take_wgrad(char *scratch, size_t *bytes) {
    WgradBuffers s;
    s.a = fm_take(&scratch, bytes, SQUARE * sizeof *s.a);
    s.b = fm_take(&scratch, bytes, FM_TILE_COLS * BLOCK * sizeof *s.b);
    s.slice = fm_take(&scratch, bytes, BLOCK * FM_TILE_COLS * sizeof *s.slice);
    s.sum = fm_take(&scratch, bytes, BLOCK * FM_TILE_COLS * sizeof *s.sum);
    s.dw = fm_take(&scratch, bytes, BLOCK * FM_TILE_COLS * sizeof *s.dw);
    return s;
}

/* The sums of a row block are added to sum (128,cols). */
static int add_row_block(const FusedMoeEightBitWgrad *p, int64_t index, int64_t m, int64_t n, int64_t cols,
                         const WgradBuffers *s) {
    const FmRows *exact = fm_rows(FUSED_MOE_F64);
    const int64_t M = p->M[0] + p->M[1], N = p->N;
    fm_decode_exactly(exact, FUSED_MOE_CODE_E4M3, p->a, (index * M + m) * BLOCK, SQUARE, s->a);
    fm_decode_exactly(exact, FUSED_MOE_CODE_E4M3, p->b, (index * N + n) * BLOCK, cols * BLOCK, s->b);
    int status = fm_matmul(exact, fm_dense(s->slice, BLOCK, cols), fm_dense(s->a, BLOCK, BLOCK),
                           fm_transposed(fm_dense(s->b, cols, BLOCK)), false);
    if (status != FUSED_MOE_OK) return status;
    const float *scale = p->scale + index * ((p->scale_is_of_b ? N : M) / BLOCK);
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t c = 0; c < cols; c += BLOCK)
            exact->axpy(s->sum + r * cols + c, scale[(p->scale_is_of_b ? n + c : m) / BLOCK],
                        s->slice + r * cols + c, BLOCK);
    return FUSED_MOE_OK;
}

static int eight_bit_wgrad_tile(int64_t i, const void *ctx, char *scratch) {
    const FusedMoeEightBitWgrad *p = ctx;
    const FmRows *out = fm_rows(p->dw_dtype);
    const int64_t m_tiles = (p->M[0] + p->M[1]) / BLOCK, n_tiles = fm_blocks(p->N, FM_TILE_COLS);
    const int32_t e = (int32_t)(i / (m_tiles * n_tiles));
    const int64_t m = i / n_tiles % m_tiles * BLOCK, n = i % n_tiles * FM_TILE_COLS;
    const int64_t cols = fm_min(FM_TILE_COLS, p->N - n);
    const int part = m >= p->M[0];
    if (!p->dw[part].data) return FUSED_MOE_OK;
    size_t unused = 0;
    const WgradBuffers s = take_wgrad(scratch, &unused);

    const FmMatrix all = fm_expert(&p->dw[part], out->elem_bytes, e, p->M[part], p->N);
    const FmMatrix dw = fm_part(all, out->elem_bytes, m - (part ? p->M[0] : 0), BLOCK, n, cols);
    const int64_t start = fused_moe_expert_start(p->offs, e), num_rows = p->offs[e] - start;
    const int64_t first_block = fused_moe_first_row_block((int32_t)start, e);
    if (num_rows == 0) {
        if (!p->accumulate) fm_zero(out, dw);
        return FUSED_MOE_OK;
    }
    fm_clear(s.sum, BLOCK * cols * (int64_t)sizeof *s.sum);
    for (int64_t b = 0; b < fm_blocks(num_rows, BLOCK); b++) {
        int status = add_row_block(p, first_block + b, m, n, cols, &s);
        if (status != FUSED_MOE_OK) return status;
    }
    const FmMatrix sum = fm_dense_as(dw, s.dw);
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t c = 0; c < cols; c++)
            s.dw[r * sum.row_stride + c * sum.col_stride] = (float)s.sum[r * cols + c];
    (p->accumulate ? fm_add : fm_from_accum)(out, dw, sum);
    return FUSED_MOE_OK;
}

int fused_moe_cpu_eight_bit_wgrad(const FusedMoeEightBitWgrad *p) {
    if (!is_supported(p->dtype)) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (p->dw_dtype != FUSED_MOE_F32 && (p->accumulate || p->dw_dtype != p->dtype))
        return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(p->offs, p->E, p->R)) return FUSED_MOE_INVALID_ROWS;
    const int64_t M = p->M[0] + p->M[1], tiles = M / BLOCK * fm_blocks(p->N, FM_TILE_COLS);
    size_t bytes = 0;
    take_wgrad(NULL, &bytes);
    return fm_parallel(p->E * tiles, (p->R + p->E) * M * p->N, eight_bit_wgrad_tile, p, bytes);
}
