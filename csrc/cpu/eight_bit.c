/* The operators of 8 bits on both operands: rows become codes, and codes are multiplied by codes.
 *
 * A GEMM converts at most FM_TILE_DEPTH columns of both operands in scratch, and takes slices of them that
 * share their scales. A slice's accumulators are exact: int8 gives integers below 2^24, in float, and e4m3
 * multiples of 2^-18 below 2^27, in double. They are scaled and added up in double, in the order of k. So a
 * row has the same bits in any batch. */
#include "../eight_bit.h"
#include "cpu.h"

#include <stdlib.h>

/* --- codes of rows -------------------------------------------------------------------------------------- */

/* To the nearest, ties to even; 448 is the largest, NaN stays NaN. Below 2^-6 codes are multiples of 2^-9:
 * adding 2^14 leaves them in the low bits, rounded by the adder. */
FM_INLINE uint8_t e4m3_from_float(float x) {
    uint32_t bits = fused_moe_float_bits(x), magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - (120u << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
    uint32_t subnormal = fused_moe_float_bits(fm_float_from_bits(magnitude) + 0x1p14f) - 0x46800000;
    uint32_t code = magnitude < 0x3c800000 ? subnormal : normal;
    code = magnitude > 0x43e00000 ? 0x7e : code;
    code = magnitude > 0x7f800000 ? 0x7f : code;
    return (uint8_t)(code | (bits >> 24 & 0x80));
}

/* Adding 1.5 2^23 leaves the integer in the low bits, in two's complement. NaN becomes 0. */
FM_INLINE uint8_t int8_from_float(float x) {
    return x != x ? 0 : (uint8_t)fused_moe_float_bits(x + 0x1.8p23f);
}

FM_ROW_FN uint32_t peak_of(const float *restrict values, int64_t n) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = fused_moe_magnitude(values[i]);
        peak = magnitude > peak ? magnitude : peak;
    }
    return peak;
}

uint32_t fm_peak(const float *values, int64_t n) {
    return peak_of(values, n);
}

FM_ROW_FN void encode(FusedMoeCode code, uint8_t *restrict codes, const float *restrict values, int64_t n) {
    if (code == FUSED_MOE_CODE_E4M3)
        for (int64_t i = 0; i < n; i++) codes[i] = e4m3_from_float(values[i]);
    else
        for (int64_t i = 0; i < n; i++) codes[i] = int8_from_float(values[i]);
}

/* A loop of its own multiplies, so that no compiler contracts it with the rounding's addition: products are
 * rounded first, as in every tier. */
void fm_encode(FusedMoeCode code, uint8_t *codes, float factor, const float *values, float *products,
               int64_t n) {
    fm_rows(FUSED_MOE_F32)->scale(products, factor, values, n);
    encode(code, codes, products, n);
}

/* Returns the scale of n values; they are divided by it. */
static float quantize(FusedMoeCode code, bool power_of_two, uint8_t *codes, float *values, int64_t n) {
    const float scale = fused_moe_scale_of(peak_of(values, n), fused_moe_largest_code(code), power_of_two);
    fm_encode(code, codes, 1 / scale, values, values, n);
    return scale;
}

/* --- quantize_rows -------------------------------------------------------------------------------------- */

enum { BLOCK = 64 }; /* rows per task */

FM_ROW_FN void smooth(float *restrict values, const float *restrict factors, int64_t n) {
    for (int64_t i = 0; i < n; i++) values[i] *= 1 / factors[i];
}

static int64_t rows_of(const FusedMoeRowMap *row_map) {
    return row_map->offs ? row_map->offs[row_map->E - 1] : row_map->R;
}

static void load_row(const FusedMoeQuantizeRows *p, const FmGather *gather, int64_t r, float *values) {
    fm_gather_row(fm_rows(p->dtype), gather, r, 0, p->D, values);
}

static int quantize_block(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeQuantizeRows *p = ctx;
    const FmGather gather = {p->x, p->D, p->row_map.row_token, p->row_map.row_slot, p->scores};
    const int64_t num_rows = rows_of(&p->row_map);
    size_t unused = 0;
    float *values = fm_take(&scratch, &unused, p->D * sizeof *values);
    int32_t e = 0;
    for (int64_t r = block * BLOCK; r < fm_min(p->row_map.R, (block + 1) * BLOCK); r++) {
        uint8_t *codes = fm_at(p->codes, 1, r * p->D);
        if (r >= num_rows) {
            fm_clear(codes, p->D);
            p->scale[r] = 1;
            continue;
        }
        load_row(p, &gather, r, values);
        if (p->smooth) {
            while (p->row_map.offs[e] <= r) e++;
            smooth(values, p->smooth + e * p->D, p->D);
        }
        p->scale[r] = quantize(p->code, p->power_of_two, codes, values, p->D);
    }
    return FUSED_MOE_OK;
}

/* The same codes, so a token has those of any of its rows. */
static int quantize_tokens(int64_t block, const void *ctx, char *scratch) {
    const FusedMoeQuantizeRows *p = ctx;
    const FusedMoeRowMap *m = &p->row_map;
    const FmGather gather = {.x = p->x, .width = p->D};
    size_t unused = 0;
    float *values = fm_take(&scratch, &unused, p->D * sizeof *values);
    for (int64_t t = block * BLOCK; t < fm_min(m->T, (block + 1) * BLOCK); t++) {
        uint8_t *codes = fm_at(p->token_codes, 1, t * p->D);
        int64_t slot = t * m->K;
        while (slot < (t + 1) * m->K && m->token_row[slot] < 0) slot++;
        if (slot < (t + 1) * m->K) {
            fm_copy(codes, fm_at(p->codes, 1, m->token_row[slot] * p->D), p->D);
        } else {
            load_row(p, &gather, t, values);
            (void)quantize(p->code, p->power_of_two, codes, values, p->D);
        }
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_quantize_rows(const FusedMoeQuantizeRows *p) {
    const FusedMoeRowMap *m = &p->row_map;
    if (!fm_rows(p->dtype) || p->dtype == FUSED_MOE_F64) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (m->offs ? !fm_row_map_is_valid(m) : !fm_map_is_valid(m->row_token, m->R, 0, m->T))
        return FUSED_MOE_INVALID_ROWS;
    const size_t scratch = p->D * sizeof(float);
    const int status = fm_parallel(fm_blocks(m->R, BLOCK), m->R * p->D, quantize_block, p, scratch);
    if (status != FUSED_MOE_OK || !p->token_codes) return status;
    return fm_parallel(fm_blocks(m->T, BLOCK), m->T * p->D, quantize_tokens, p, scratch);
}

/* --- GEMMs of codes ------------------------------------------------------------------------------------- */

typedef struct {
    const void *codes;        /* [., k] */
    const int32_t *row_token; /* NULL: contiguous rows */
    const float *scale;       /* [rows], or by blocks [blocks of columns,rows] */
    int64_t scale_stride;     /* from one block's scales to the next one's; 0: a row has one scale */
} Rows;

static int64_t row_index(const Rows *a, int64_t r) {
    return a->row_token ? a->row_token[r] : r;
}

typedef struct {
    void *a, *b, *slice;
    double *b_scale, *sum;
    float *bias;
} Buffers;

static FusedMoeCode code_of(const FusedMoeQuantizedWeight *w) {
    return fused_moe_format(w->format).code;
}

static bool has_blocks(const FusedMoeQuantizedWeight *w) {
    return fused_moe_format(w->format).block == FUSED_MOE_BLOCK_SQUARE_128;
}

/* The accumulation type in which a slice's sums are exact. */
static const FmRows *exact_rows(const FusedMoeQuantizedWeight *w) {
    return fm_rows(code_of(w) == FUSED_MOE_CODE_INT8 ? FUSED_MOE_F32 : FUSED_MOE_F64);
}

/* The scratch of a product of at most these rows and columns. */
static Buffers take_buffers(const FusedMoeQuantizedWeight *w, int64_t rows, int64_t cols, char **scratch,
                            size_t *bytes) {
    const size_t accum = exact_rows(w)->accum_bytes;
    const int64_t depth = fm_min(w->in, FM_TILE_DEPTH);
    Buffers s;
    s.a = fm_take(scratch, bytes, rows * depth * accum);
    s.b = fm_take(scratch, bytes, cols * depth * accum);
    s.slice = fm_take(scratch, bytes, rows * cols * accum);
    s.b_scale = fm_take(scratch, bytes, cols * sizeof *s.b_scale);
    s.sum = fm_take(scratch, bytes, rows * cols * sizeof *s.sum);
    s.bias = fm_take(scratch, bytes, cols * sizeof *s.bias);
    return s;
}

FM_ROW_FN void widen(double *restrict wide, const float *restrict values, int64_t n) {
    for (int64_t i = 0; i < n; i++) wide[i] = values[i];
}

void fm_decode_exactly(const FmRows *v, FusedMoeCode code, const void *codes, int64_t first, int64_t n,
                       void *accum) {
    float values[FM_TILE_COLS];
    double *wide = accum;
    if (v->accum_bytes == sizeof *values) {
        fm_decode(code, codes, first, n, accum);
        return;
    }
    for (int64_t j = 0, m; j < n; j += m) {
        m = fm_min(n - j, FM_TILE_COLS);
        fm_decode(code, codes, first + j, m, values);
        widen(wide + j, values, m);
    }
}

FM_ROW_FN void add_scaled_float(double *restrict sum, double s, const double *restrict scale,
                                const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i] * (s * scale[i]);
}

FM_ROW_FN void add_scaled_double(double *restrict sum, double s, const double *restrict scale,
                                 const double *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i] * (s * scale[i]);
}

FM_ROW_FN void add_bias(float *restrict out, const double *restrict sum, const float *restrict bias,
                        int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = (float)(sum[i] + bias[i]);
}

/* A GEMM of a tile's rows and n rows of its expert's weight. */
typedef struct {
    const Rows *a;
    const FusedMoeQuantizedWeight *w;
    FusedMoeWorkTile tile;
    int64_t row, n; /* rows [row, row + n) of the weight */
} Product;

/* Columns [k, k + width) of both operands, in scratch. */
static void convert(const Product *g, int64_t k, int64_t width, const Buffers *s) {
    const FusedMoeQuantizedWeight *w = g->w;
    const FmRows *exact = exact_rows(w);
    const int64_t e = g->tile.expert, row = g->row;
    for (int64_t r = 0; r < g->tile.num_rows; r++)
        fm_decode_exactly(exact, code_of(w), g->a->codes, row_index(g->a, g->tile.first_row + r) * w->in + k,
                          width, fm_at(s->a, exact->accum_bytes, r * width));
    for (int64_t j = 0; j < g->n; j++)
        fm_decode_exactly(exact, code_of(w), w->data, (e * w->out + row + j) * w->in + k, width,
                          fm_at(s->b, exact->accum_bytes, j * width));
}

/* sum += the product of `depth` columns from k on, which share their scales. Scratch has `width` columns,
 * from `first` on. */
static int add_slice(const Product *g, int64_t k, int64_t depth, int64_t first, int64_t width,
                     const Buffers *s) {
    const Rows *a = g->a;
    const FusedMoeQuantizedWeight *w = g->w;
    const FmRows *exact = exact_rows(w);
    const size_t accum = exact->accum_bytes;
    const int64_t rows = g->tile.num_rows, n = g->n, e = g->tile.expert, row = g->row;
    const FmMatrix a_part = fm_part(fm_dense(s->a, rows, width), accum, 0, rows, k - first, depth);
    const FmMatrix b_part = fm_part(fm_dense(s->b, n, width), accum, 0, n, k - first, depth);
    int status = fm_matmul(exact, fm_dense(s->slice, rows, n), a_part, fm_transposed(b_part), false);
    if (status != FUSED_MOE_OK) return status;
    const float *a_scale = a->scale + k / FUSED_MOE_BLOCK * a->scale_stride;
    for (int64_t j = 0; j < n; j++) s->b_scale[j] = fm_scale(w, e, row + j, k);
    for (int64_t r = 0; r < rows; r++) {
        const void *sums = fm_at(s->slice, accum, r * n);
        const double scale = a_scale[row_index(a, g->tile.first_row + r)];
        if (accum == sizeof(float))
            add_scaled_float(s->sum + r * n, scale, s->b_scale, sums, n);
        else
            add_scaled_double(s->sum + r * n, scale, s->b_scale, sums, n);
    }
    return FUSED_MOE_OK;
}

/* out (tile's rows, n) = a w[e]^T + bias[e], of rows [row, row + n) of the weight. bias is of v's dtype. */
static int multiply(const FmRows *v, float *out, const Rows *a, const FusedMoeQuantizedWeight *w,
                    const void *bias, FusedMoeWorkTile tile, int64_t row, int64_t n, const Buffers *s) {
    const Product g = {a, w, tile, row, n};
    const int64_t e = tile.expert;
    fm_clear(s->sum, tile.num_rows * n * (int64_t)sizeof *s->sum);
    for (int64_t first = 0, width; first < w->in; first += width) {
        width = fm_min(w->in - first, FM_TILE_DEPTH);
        convert(&g, first, width, s);
        for (int64_t k = first, depth; k < first + width; k += depth) {
            depth = fm_min(first + width - k, w->block_in);
            int status = add_slice(&g, k, depth, first, width, s);
            if (status != FUSED_MOE_OK) return status;
        }
    }
    fm_clear(s->bias, n * (int64_t)sizeof *s->bias);
    if (bias) v->load(s->bias, fm_at(bias, v->elem_bytes, e * w->out + row), n);
    for (int64_t r = 0; r < tile.num_rows; r++) add_bias(out + r * n, s->sum + r * n, s->bias, n);
    return FUSED_MOE_OK;
}

typedef struct {
    const void *p;
    const FmRows *v;
    const int32_t *schedule;
    int64_t parts; /* tasks per tile: each has some of its columns */
} Task;

/* --- eight_bit_up_gate ---------------------------------------------------------------------------------- */

typedef struct {
    Buffers product;
    float *h[2], *gate, *up, *pairs;
} UpBuffers;

static UpBuffers take_up(const FusedMoeUpGate *p, char *scratch, size_t *bytes) {
    const int64_t rows = fm_min(p->row_map.R, FM_TILE_ROWS), cols = fm_min(p->F, FM_TILE_COLS);
    UpBuffers s;
    s.product = take_buffers(p->w1.quantized, rows, 2 * cols, &scratch, bytes);
    for (int i = 0; i < 2; i++) s.h[i] = fm_take(&scratch, bytes, (2 - i) * rows * cols * sizeof(float));
    s.gate = fm_take(&scratch, bytes, cols * sizeof(float));
    s.up = fm_take(&scratch, bytes, cols * sizeof(float));
    s.pairs = fm_take(&scratch, bytes, 2 * cols * sizeof(float));
    return s;
}

static int up_gate_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeEightBitUpGate *p = t->p;
    const FusedMoeUpGate *up = &p->up;
    const FmRows *v = t->v, *f32 = fm_rows(FUSED_MOE_F32);
    size_t unused = 0;
    UpBuffers s = take_up(up, scratch, &unused);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, up->row_map.offs, up->row_map.E, i / t->parts);
    FmCols cols = fm_cols_of(up->F, t->parts, i % t->parts);
    const Rows x = {up->x, up->row_map.row_token, p->x_scale, 0};
    const FusedMoeLayout h_layout = up->layout == FUSED_MOE_UNGATED ? FUSED_MOE_UNGATED : FUSED_MOE_HALVES;
    const int64_t h_width = fm_h_width(up->layout, up->F);

    for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
        const int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
        FmPiece piece[2];
        const int num_pieces = fm_pieces(up, j, n, piece);
        for (int q = 0; q < num_pieces; q++) {
            const FmPiece *c = &piece[q];
            int status =
                multiply(v, s.h[q], &x, c->w->quantized, c->bias, tile, c->row, c->width, &s.product);
            if (status != FUSED_MOE_OK) return status;
        }
        for (int64_t r = 0; r < tile.num_rows; r++) {
            const int64_t row = tile.first_row + r;
            float *gates = s.h[0] + r * piece[0].width, *ups = s.h[1] + r * n;
            float *a = s.pairs; /* free again once the pair is loaded */
            fm_load_pair(f32, up->layout, gates, ups, 0, n, s.gate, s.up, s.pairs);
            if (up->h) {
                void *h = fm_at(up->h, v->elem_bytes, row * h_width);
                fm_store_pair(v, h_layout, h, fm_at(h, v->elem_bytes, up->F), j, n, s.gate, s.up, NULL);
            }
            f32->act(&up->activation, a, s.gate, up->layout == FUSED_MOE_UNGATED ? NULL : s.up, n);
            if (!p->a_scale) v->store(fm_at(up->a, v->elem_bytes, row * up->F + j), a, n);
            for (int64_t b = 0; p->a_scale && b < n; b += FUSED_MOE_BLOCK)
                p->a_scale[(j + b) / FUSED_MOE_BLOCK * up->row_map.R + row] =
                    quantize(FUSED_MOE_CODE_E4M3, p->power_of_two, fm_at(up->a, 1, row * up->F + j + b),
                             a + b, fm_min(FUSED_MOE_BLOCK, n - b));
        }
    }
    return FUSED_MOE_OK;
}

/* A row past the last one is quantised as zeros. */
static void clear_past_last(const FusedMoeEightBitUpGate *p, size_t elem_bytes) {
    const FusedMoeUpGate *up = &p->up;
    const int64_t R = up->row_map.R, num_rows = up->row_map.offs[up->row_map.E - 1];
    const int64_t bytes = up->F * (int64_t)(p->a_scale ? 1 : elem_bytes);
    fm_clear(fm_at(up->a, bytes, num_rows), (R - num_rows) * bytes);
    for (int64_t b = 0; p->a_scale && b < fm_blocks(up->F, FUSED_MOE_BLOCK); b++)
        for (int64_t r = num_rows; r < R; r++) p->a_scale[b * R + r] = 1;
    const int64_t h_bytes = fm_h_width(up->layout, up->F) * (int64_t)elem_bytes;
    if (up->h) fm_clear(fm_at(up->h, h_bytes, num_rows), (R - num_rows) * h_bytes);
}

int fused_moe_cpu_eight_bit_up_gate(const FusedMoeEightBitUpGate *p) {
    const FusedMoeUpGate *up = &p->up;
    const FusedMoeRowMap *m = &up->row_map;
    const FmRows *v = fm_rows(up->dtype);
    if (!v || up->dtype == FUSED_MOE_F64) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_row_map_is_valid(m)) return FUSED_MOE_INVALID_ROWS;
    clear_past_last(p, v->elem_bytes);
    int32_t *schedule = fm_make_schedule(m->offs, m->E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    Task task = {p, v, schedule, fm_parts(num_tiles, up->F)};
    size_t bytes = 0;
    take_up(up, NULL, &bytes);
    const int64_t work = m->offs[m->E - 1] * up->D * fm_h_width(up->layout, up->F);
    int status = fm_parallel(num_tiles * task.parts, work, up_gate_tile, &task, bytes);
    free(schedule);
    return status;
}

/* --- eight_bit_mm --------------------------------------------------------------------------------------- */

static Buffers take_mm(const FusedMoeGroupedMM *p, float **out, char *scratch, size_t *bytes) {
    const int64_t rows = fm_min(p->R, FM_TILE_ROWS), cols = fm_min(p->M, FM_TILE_COLS);
    *out = fm_take(&scratch, bytes, rows * cols * sizeof **out);
    return take_buffers(p->b[0].quantized, rows, cols, &scratch, bytes);
}

static int mm_tile(int64_t i, const void *ctx, char *scratch) {
    const Task *t = ctx;
    const FusedMoeEightBitMM *p = t->p;
    const FusedMoeGroupedMM *down = &p->down;
    const FusedMoeQuantizedWeight *w = down->b[0].quantized;
    size_t unused = 0;
    float *out;
    Buffers s = take_mm(down, &out, scratch, &unused);
    FusedMoeWorkTile tile = fm_row_tile(t->schedule, down->offs, down->E, i / t->parts);
    FmCols cols = fm_cols_of(down->M, t->parts, i % t->parts);
    const Rows a = {down->a, NULL, p->a_scale, has_blocks(w) && !p->a_has_row_scales ? down->R : 0};
    for (int64_t j = cols.first; j < cols.end; j += FM_TILE_COLS) {
        const int64_t n = fm_min(FM_TILE_COLS, cols.end - j);
        int status = multiply(t->v, out, &a, w, down->bias, tile, j, n, &s);
        if (status != FUSED_MOE_OK) return status;
        for (int64_t r = 0; r < tile.num_rows; r++)
            t->v->store(fm_at(down->out, t->v->elem_bytes, (tile.first_row + r) * down->M + j), out + r * n,
                        n);
    }
    return FUSED_MOE_OK;
}

int fused_moe_cpu_eight_bit_mm(const FusedMoeEightBitMM *p) {
    const FusedMoeGroupedMM *down = &p->down;
    const FmRows *v = fm_rows(down->dtype);
    if (!v || down->dtype == FUSED_MOE_F64) return FUSED_MOE_UNSUPPORTED_DTYPE;
    if (!fm_offs_are_valid(down->offs, down->E, down->R)) return FUSED_MOE_INVALID_ROWS;
    const int64_t num_rows = down->offs[down->E - 1];
    fm_clear(fm_at(down->out, v->elem_bytes, num_rows * down->M),
             (down->R - num_rows) * down->M * (int64_t)v->elem_bytes);
    int32_t *schedule = fm_make_schedule(down->offs, down->E);
    if (!schedule) return FUSED_MOE_OUT_OF_MEMORY;
    int64_t num_tiles = fused_moe_schedule_head(schedule)->num_row_tiles;
    Task task = {p, v, schedule, fm_parts(num_tiles, down->M)};
    size_t bytes = 0;
    float *unused;
    take_mm(down, &unused, NULL, &bytes);
    int status = fm_parallel(num_tiles * task.parts, num_rows * down->M * down->N[0], mm_tile, &task, bytes);
    free(schedule);
    return status;
}
