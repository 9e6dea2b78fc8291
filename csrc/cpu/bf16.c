/* GEMMs of bfloat16 matrices with float sums, on CPUs that multiply bfloat16: by MKL, which PyTorch brings,
 * where there is AMX, else by the kernel below, which takes AVX512_BF16. Without AMX, MKL is as slow as in
 * float; and PyTorch's own matmul would round the sums.
 *
 * The kernel's instruction multiplies pairs of neighbours along k, and takes subnormal numbers for zeros. An
 * output is one sum along k, in order, so its bits depend on its own row and column alone. */
#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__)

#include <immintrin.h>

#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

/* A tile of the output is ROWS x COLS, in 24 of 32 registers. Its part of b, PAIRS deep, takes 32 KiB; a's
 * part for BLOCK rows takes 120 KiB of L2. */
enum { ROWS = 6, VECTORS = 4, COLS = 16 * VECTORS, PAIRS = 128, BLOCK = 40 * ROWS };

/* --- pairs ---------------------------------------------------------------------------------------------- */

typedef struct { /* lines along k: rows of a, or columns of b; one of the strides is 1 */
    const uint16_t *data;
    int64_t line_stride, k_stride;
} Lines;

AVX512_BF16 FM_INLINE __mmask16 first_16(int64_t n) {
    return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1 << n) - 1 : 0);
}

/* Lines are dense: row 2i in the low halves, row 2i + 1 in the high ones. */
AVX512_BF16 static void pack_dense_lines(uint32_t *pairs, int64_t pitch, Lines x, int64_t lines,
                                         int64_t depth) {
    for (int64_t i = 0; 2 * i < depth; i++)
        for (int64_t line = 0; line < lines; line += 16) {
            const uint16_t *even = x.data + 2 * i * x.k_stride + line;
            const __mmask16 low = first_16(lines - line), high = 2 * i + 1 < depth ? low : 0;
            __m512i evens = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low, even));
            __m512i odds = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, even + x.k_stride));
            _mm512_storeu_si512(pairs + i * pitch + line,
                                _mm512_or_si512(evens, _mm512_slli_epi32(odds, 16)));
        }
}

/* k is dense: 16 x 16 pairs are transposed in registers. */
AVX512_BF16 static void pack_dense_k(uint32_t *pairs, int64_t pitch, Lines x, int64_t lines, int64_t depth) {
    for (int64_t line = 0; line < lines; line += 16)
        for (int64_t i = 0; 2 * i < depth; i += 16) {
            const int64_t rest = depth - 2 * i;
            const __mmask32 mask = rest >= 32 ? ~0u : (1u << rest) - 1;
            __m512i r[16], t[16];
#pragma GCC unroll 16
            for (int l = 0; l < 16; l++)
                if (line + l < lines) /* a mask of zeros would do, but is slow where no memory is */
                    r[l] = _mm512_maskz_loadu_epi16(mask, x.data + (line + l) * x.line_stride + 2 * i);
                else
                    r[l] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int l = 0; l < 16; l += 2) {
                t[l] = _mm512_unpacklo_epi32(r[l], r[l + 1]);
                t[l + 1] = _mm512_unpackhi_epi32(r[l], r[l + 1]);
            }
#pragma GCC unroll 4
            for (int l = 0; l < 16; l += 4) { /* r[l + j] has pair 4q + j of lines l to l + 3 in quarter q */
                r[l] = _mm512_unpacklo_epi64(t[l], t[l + 2]);
                r[l + 1] = _mm512_unpackhi_epi64(t[l], t[l + 2]);
                r[l + 2] = _mm512_unpacklo_epi64(t[l + 1], t[l + 3]);
                r[l + 3] = _mm512_unpackhi_epi64(t[l + 1], t[l + 3]);
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i even[2], odd[2]; /* quarters of lines 0 to 7, and 8 to 15 */
                for (int h = 0; h < 2; h++) {
                    even[h] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0x88);
                    odd[h] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0xdd);
                }
                uint32_t *row = pairs + (i + j) * pitch + line;
                _mm512_storeu_si512(row, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
                _mm512_storeu_si512(row + 4 * pitch, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
                _mm512_storeu_si512(row + 8 * pitch, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
                _mm512_storeu_si512(row + 12 * pitch, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
            }
        }
}

/* pairs[i * pitch + line] = elements 2i and 2i + 1 of a line, the second zero past depth. */
static void pack(uint32_t *pairs, int64_t pitch, Lines x, int64_t lines, int64_t depth) {
    (x.line_stride == 1 ? pack_dense_lines : pack_dense_k)(pairs, pitch, x, lines, depth);
}

/* --- the kernel ----------------------------------------------------------------------------------------- */

typedef struct {
    const uint32_t *a; /* [pairs, rows] in rows of BLOCK */
    const uint32_t *b; /* [pairs, COLS] */
    float *out;        /* [rows, cols] in rows of `stride` */
    int64_t stride, cols, pairs;
    bool accumulate;
} Tile;

AVX512_BF16 FM_INLINE void run_rows(const Tile *t, const int rows) {
    __m512 sum[ROWS][VECTORS];
    __mmask16 mask[VECTORS]; /* of columns that exist */
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) mask[v] = first_16(t->cols - 16 * v);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = t->accumulate ? _mm512_maskz_loadu_ps(mask[v], t->out + r * t->stride + 16 * v)
                                      : _mm512_setzero_ps();
    for (int64_t i = 0; i < t->pairs; i++) {
        __m512bh b[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) b[v] = (__m512bh)_mm512_load_si512(t->b + i * COLS + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512bh a = (__m512bh)_mm512_set1_epi32((int)t->a[i * BLOCK + r]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], a, b[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            _mm512_mask_storeu_ps(t->out + r * t->stride + 16 * v, mask[v], sum[r][v]);
}

AVX512_BF16 static void run_tile(const Tile *t, int64_t rows) {
    switch (rows) {
    case 1: run_rows(t, 1); break;
    case 2: run_rows(t, 2); break;
    case 3: run_rows(t, 3); break;
    case 4: run_rows(t, 4); break;
    case 5: run_rows(t, 5); break;
    default: run_rows(t, ROWS);
    }
}

static Lines rows_from(FmMatrix m, int64_t row, int64_t k) {
    return (Lines){(const uint16_t *)m.data + row * m.row_stride + k * m.col_stride, m.row_stride,
                   m.col_stride};
}

/* Rows of out are dense. */
static void multiply(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    static _Thread_local _Alignas(64) uint32_t a_pairs[PAIRS * BLOCK], b_pairs[PAIRS * COLS];
    const FmMatrix b_rows = fm_transposed(b);
    for (int64_t k = 0; k < a.cols; k += 2 * PAIRS) {
        int64_t depth = fm_min(2 * PAIRS, a.cols - k);
        for (int64_t block = 0; block < out.rows; block += BLOCK) {
            int64_t rows = fm_min(BLOCK, out.rows - block);
            pack(a_pairs, BLOCK, rows_from(a, block, k), rows, depth);
            for (int64_t col = 0; col < out.cols; col += COLS) {
                int64_t cols = fm_min(COLS, out.cols - col);
                pack(b_pairs, COLS, rows_from(b_rows, col, k), cols, depth);
                for (int64_t row = 0; row < rows; row += ROWS) {
                    Tile t = {.a = a_pairs + row,
                              .b = b_pairs,
                              .out = (float *)out.data + (block + row) * out.row_stride + col,
                              .stride = out.row_stride,
                              .cols = cols,
                              .pairs = (depth + 1) / 2,
                              .accumulate = accumulate || k};
                    run_tile(&t, fm_min(ROWS, rows - row));
                }
            }
        }
    }
}

/* --- MKL ------------------------------------------------------------------------------------------------ */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

/* Exported by PyTorch builds with MKL, whose integers have 32 bits. */
void cblas_gemm_bf16bf16f32(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha,
                            const void *a, int a_pitch, const void *b, int b_pitch, float beta, float *out,
                            int out_pitch) __attribute__((weak));

static bool has_amx(void) {
    return cblas_gemm_bf16bf16f32 && __builtin_cpu_supports("amx-bf16");
}

/* The distance of rows, which are dense; 0: they are not, or BLAS cannot say it. */
static int pitch_of(FmMatrix m) {
    int64_t pitch = m.rows > 1 ? m.row_stride : m.cols;
    return m.col_stride == 1 && pitch >= m.cols && pitch <= INT32_MAX ? (int)pitch : 0;
}

static bool multiply_by_mkl(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    const int out_pitch = pitch_of(out), a_pitch = pitch_of(a), b_pitch = pitch_of(b);
    const int a_t_pitch = pitch_of(fm_transposed(a)), b_t_pitch = pitch_of(fm_transposed(b));
    if (!out_pitch || !(a_pitch || a_t_pitch) || !(b_pitch || b_t_pitch)) return false;
    cblas_gemm_bf16bf16f32(ROW_MAJOR, a_pitch ? NO_TRANS : TRANS, b_pitch ? NO_TRANS : TRANS, (int)out.rows,
                           (int)out.cols, (int)a.cols, 1, a.data, a_pitch ? a_pitch : a_t_pitch, b.data,
                           b_pitch ? b_pitch : b_t_pitch, accumulate, out.data, out_pitch);
    return true;
}

/* --- either --------------------------------------------------------------------------------------------- */

bool fm_multiplies_bf16(void) {
    return __builtin_cpu_supports("avx512bf16");
}

const char *fused_moe_cpu_bf16(void) {
    return !fm_multiplies_bf16() ? "as float32" : has_amx() ? "by AMX" : "by AVX512_BF16";
}

int fm_bf16_matmul(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    if (out.col_stride != 1)
        return fm_bf16_matmul(fm_transposed(out), fm_transposed(b), fm_transposed(a), accumulate);
    if (!has_amx() || !multiply_by_mkl(out, a, b, accumulate)) multiply(out, a, b, accumulate);
    return FUSED_MOE_OK;
}

#else

bool fm_multiplies_bf16(void) {
    return false;
}

const char *fused_moe_cpu_bf16(void) {
    return "as float32";
}

int fm_bf16_matmul(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    (void)out, (void)a, (void)b, (void)accumulate;
    return FUSED_MOE_MATMUL_FAILED;
}

#endif
