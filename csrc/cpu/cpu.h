/* What the CPU kernels share.
 *
 * Arithmetic is in the accumulation type: float, for float64 tensors double. A kernel converts what it reads
 * in a thread's scratch, multiplies and sums there, and rounds once when it writes. So 16-bit tensors are as
 * accurate as float sums make them. A GEMM's operands are of the accumulation type, too, except bfloat16 on
 * CPUs with instructions for it (bf16.c); router_logits converts even there.
 *
 * FmRows is the table of row functions of one dtype (rows.c); with bf16.c the only code that knows elements.
 * torch.c is the only file that knows PyTorch: its thread pool and its matmul. */
#ifndef FUSED_MOE_CPU_H
#define FUSED_MOE_CPU_H

#include "../fused_moe.h"
#include "../rules.h"

#include <stddef.h>
#include <string.h>

/* Tiles of the CPU tier: rows of an expert per task, columns of its output at a time, and rows of a
 * reduction at a time. Chosen so that a converted weight tile is used by enough rows, and that the
 * buffers of a task stay in the L2 cache for common widths. */
enum { FM_TILE_ROWS = 256, FM_TILE_COLS = 256, FM_TILE_DEPTH = 512 };

/* --- loops over elements -------------------------------------------------------------------------------- */

/* Loops are plain, for the compiler to vectorise. On x86-64 it makes copies for AVX2 and AVX-512, and the
 * loader picks one by the CPU's features, so one binary serves every machine. (By a CPU's name, as
 * "arch=haswell", it would pick by the exact model.) */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FM_ROW_FN __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) static
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && defined(__GNUC__)
#define FM_ROW_FN __attribute__((target_clones("avx512f", "avx2", "default"))) static
#else
#define FM_ROW_FN static
#endif

/* What a vectorised loop calls must be inlined into each of its copies. */
#define FM_INLINE static inline __attribute__((always_inline))

FM_INLINE float fm_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* --- rows.c: rows of n elements ------------------------------------------------------------------------- */

typedef struct {
    size_t elem_bytes, accum_bytes;
    size_t operand_bytes; /* fm_matmul takes elements, or the accumulation type */
    bool is_accum;        /* elements are of the accumulation type: views need no conversion */
    void (*load)(void *accum, const void *elem, int64_t n);
    void (*store)(void *elem, const void *accum, int64_t n);
    void (*round)(void *accum, int64_t n);                      /* to elements' values */
    void (*add)(void *y, const void *x, int64_t n);             /* y += x     */
    void (*axpy)(void *y, double s, const void *x, int64_t n);  /* y += s x   */
    void (*sum)(double *y, double s, const void *x, int64_t n); /* y += s x, in double */
    void (*scale)(void *y, double s, const void *x, int64_t n); /* y = s x    */
    double (*dot)(const void *x, const void *y, int64_t n);
    void (*split)(void *even, void *odd, const void *pairs, int64_t n); /* n pairs */
    void (*merge)(void *pairs, const void *even, const void *odd, int64_t n);
    /* a = f(gate) m(up); up NULL: a = f(gate) */
    void (*act)(const FusedMoeActivation *f, void *a, const void *gate, const void *up, int64_t n);
    /* dgate, dup and a from da; up and dup NULL: ungated */
    void (*dact)(const FusedMoeActivation *f, void *dgate, void *dup, void *a, const void *da,
                 const void *gate, const void *up, int64_t n);
    double (*get)(const void *accum, int64_t i);
    void (*set)(void *accum, int64_t i, double value);
} FmRows;

const FmRows *fm_rows(FusedMoeDtype dtype);   /* NULL: not a floating dtype */
const FmRows *fm_accum_rows(const FmRows *v); /* those of the accumulation type */

static inline bool fm_operands_are_elements(const FmRows *v) {
    return v->operand_bytes == v->elem_bytes;
}

/* --- matrix.c: strided matrices, and tiles of rows ------------------------------------------------------ */

typedef struct { /* element (i, j) is data[i row_stride + j col_stride] */
    void *data;
    int64_t rows, cols, row_stride, col_stride;
} FmMatrix;

FmMatrix fm_dense(void *data, int64_t rows, int64_t cols);
FmMatrix fm_transposed(FmMatrix m);

static inline bool fm_is_row_major(FmMatrix m) {
    return m.col_stride == 1 && (m.rows == 1 || m.row_stride >= m.cols);
}

/* Rows [row, row+rows) and columns [col, col+cols). */
FmMatrix fm_part(FmMatrix m, size_t elem_bytes, int64_t row, int64_t rows, int64_t col, int64_t cols);
/* Expert e of a weight that is not quantised: (out, in). */
FmMatrix fm_expert(const FusedMoeWeight *w, size_t elem_bytes, int32_t e, int64_t out, int64_t in);

/* A matrix of m's shape in buffer, dense in m's orientation. */
FmMatrix fm_dense_as(FmMatrix m, void *buffer);
/* m itself where is_accum, else a copy in the accumulation type in buffer, dense in m's orientation. */
FmMatrix fm_to_accum(const FmRows *v, FmMatrix m, void *buffer);
/* m as an operand of fm_matmul: as fm_to_accum where operands are not elements; else m itself, or a copy in
 * buffer if m is neither row-major nor column-major. */
FmMatrix fm_operand(const FmRows *v, FmMatrix m, void *buffer);
/* A matrix of the accumulation type to compute m in: m itself where is_accum and one of its strides is 1,
 * else buffer. */
FmMatrix fm_accum_for(const FmRows *v, FmMatrix m, void *buffer);
/* Rounds what fm_accum_for gave into m; nothing to do where that was m itself. */
void fm_from_accum(const FmRows *v, FmMatrix m, FmMatrix accum);
/* m += accum, where is_accum. */
void fm_add(const FmRows *v, FmMatrix m, FmMatrix accum);
void fm_zero(const FmRows *v, FmMatrix m);

/* Rows that are read through row_token; with scores each is multiplied by its own and rounded to the dtype,
 * as the host library does before it calls an expert. */
typedef struct {
    const void *x;
    int64_t width;
    const int32_t *row_token; /* NULL: contiguous rows */
    const int32_t *row_slot;
    const void *scores; /* NULL: ones */
} FmGather;

/* Columns [col, col + cols) of row r, in the accumulation type. */
void fm_gather_row(const FmRows *v, const FmGather *g, int64_t r, int64_t col, int64_t cols, void *accum);
/* Columns [col, col + cols) of rows [first, first + rows), as an operand. */
FmMatrix fm_gather(const FmRows *v, const FmGather *g, int64_t first, int64_t rows, int64_t col, int64_t cols,
                   void *buffer);

/* --- quantized.c: tiles of a weight, which may be quantised --------------------------------------------- */

/* Rows [row, row + rows) and columns [col, col + cols) of expert e, rounded to the dtype, as an operand; col
 * and cols are even where two codes share a byte. */
FmMatrix fm_dequantize(const FmRows *v, const FusedMoeQuantizedWeight *w, int64_t e, int64_t row,
                       int64_t rows, int64_t col, int64_t cols, void *buffer);
/* Rows [row, row + rows) and columns [col, col + cols) of expert e of a weight (out, in), as an operand; a
 * quantised weight's is always made in buffer. */
FmMatrix fm_weight_part(const FmRows *v, const FusedMoeWeight *w, int32_t e, int64_t row, int64_t rows,
                        int64_t col, int64_t cols, void *buffer);

/* values[i] = codes[first + i]; codes of 4 bits begin at an even one. */
void fm_decode(FusedMoeCode code, const void *codes, int64_t first, int64_t n, float *values);
/* The scale of element (row, col) of expert e. */
float fm_scale(const FusedMoeQuantizedWeight *w, int64_t e, int64_t row, int64_t col);

/* --- eight_bit.c: values to codes of 8 bits and back ---------------------------------------------------- */

/* The largest fused_moe_magnitude. */
uint32_t fm_peak(const float *values, int64_t n);
/* products = factor values, rounded to float32, become codes. products may be values. */
void fm_encode(FusedMoeCode code, uint8_t *codes, float factor, const float *values, float *products,
               int64_t n);
/* As fm_decode, to numbers of the accumulation type. */
void fm_decode_exactly(const FmRows *v, FusedMoeCode code, const void *codes, int64_t first, int64_t n,
                       void *accum);

/* --- matrix.c: experts' rows ---------------------------------------------------------------------------- */

/* What a wrong caller could break: offs are within [0, R] and never decrease; a map's first n entries are in
 * [low, end), or there is no map; a row map has both. */
bool fm_offs_are_valid(const int32_t *offs, int32_t E, int64_t R);
bool fm_map_is_valid(const int32_t *map, int64_t n, int32_t low, int64_t end);
bool fm_row_map_is_valid(const FusedMoeRowMap *row_map);
/* A schedule of row tiles of FM_TILE_ROWS. Free it; NULL: no memory. */
int32_t *fm_make_schedule(const int32_t *offs, int32_t E);
FusedMoeWorkTile fm_row_tile(const int32_t *schedule, const int32_t *offs, int32_t E, int64_t index);

/* The columns of one of the parts that fm_parts splits a tile into. */
typedef struct {
    int64_t first, end;
} FmCols;
FmCols fm_cols_of(int64_t width, int64_t parts, int64_t part);

/* Gate and up of hidden columns [j, j+n) of a row. Its gates, or its interleaved pairs, begin at gates; its
 * ups begin at ups, in a row of h F columns later. pairs has room for 2 n. */
void fm_load_pair(const FmRows *v, FusedMoeLayout layout, const void *gates, const void *ups, int64_t j,
                  int64_t n, void *gate, void *up, void *pairs);
void fm_store_pair(const FmRows *v, FusedMoeLayout layout, void *gates, void *ups, int64_t j, int64_t n,
                   const void *gate, const void *up, void *pairs);

static inline int64_t fm_h_width(FusedMoeLayout layout, int64_t F) {
    return layout == FUSED_MOE_UNGATED ? F : 2 * F;
}

static inline int64_t fm_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t fm_blocks(int64_t n, int64_t block) {
    return (n + block - 1) / block;
}

/* memset to 0, which takes no NULL; a tensor without elements has one. */
static inline void fm_clear(void *data, int64_t bytes) {
    if (bytes > 0) memset(data, 0, (size_t)bytes);
}

/* memcpy likewise. */
static inline void fm_copy(void *dst, const void *src, int64_t bytes) {
    if (bytes > 0) memcpy(dst, src, (size_t)bytes);
}

static inline void *fm_at(const void *data, size_t bytes, int64_t index) {
    return (char *)data + (int64_t)bytes * index;
}

/* --- up_gate.c: rows of the weights --------------------------------------------------------------------- */

/* Rows of w1 or w3, and where they go in a row of h. */
typedef struct {
    const FusedMoeWeight *w;
    const void *bias;
    int64_t weight_rows; /* per expert */
    int64_t row, width;  /* rows [row, row + width) of w */
    int64_t h_col;
} FmPiece;

/* The pieces that give hidden columns [j, j+n): two where gate and up are apart, else one. */
int fm_pieces(const FusedMoeUpGate *p, int64_t j, int64_t n, FmPiece piece[2]);

/* --- torch.c: PyTorch's thread pool and matmul ---------------------------------------------------------- */

/* Runs task(i, ctx, scratch) for 0 <= i < n. Tasks are handed out one by one, so uneven ones balance;
 * each thread has scratch_bytes of its own, aligned to 64. `work` counts the elements touched or multiplied
 * by all tasks together: little of it is not worth waking a thread. Returns the first error of a task. */
typedef int FmTask(int64_t i, const void *ctx, char *scratch);
int fm_parallel(int64_t n, int64_t work, FmTask *task, const void *ctx, size_t scratch_bytes);

/* Into how many parts to split the columns of every tile, so that few tiles still keep every thread busy. */
int64_t fm_parts(int64_t tiles, int64_t width);

/* out = a b, or out += a b: out is of the accumulation type with a stride of 1, a and b are operands. */
int fm_matmul(const FmRows *v, FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate);

/* --- bf16.c: bfloat16 operands -------------------------------------------------------------------------- */

bool fm_has_bf16_gemm(void);
int fm_bf16_matmul(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate); /* as fm_matmul */

/* --- scratch -------------------------------------------------------------------------------------------- */

/* Carves up a thread's scratch: first the size of it all (scratch NULL), then the buffers. */
static inline void *fm_take(char **scratch, size_t *total, size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    *total += bytes;
    if (!*scratch) return NULL;
    void *taken = *scratch;
    *scratch += bytes;
    return taken;
}

#endif
