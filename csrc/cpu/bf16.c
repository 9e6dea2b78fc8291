/* GEMMs of bfloat16 operands with float accumulators, on CPUs that have instructions for them: MKL's, which
 * PyTorch brings, with AMX, else the micro-kernel below, with AVX512_BF16. Without AMX, MKL is as slow as in
 * float; and PyTorch's own matmul would round the accumulators.
 *
 * vdpbf16ps takes two elements along k at once, and reads subnormal ones as zeros. An output is accumulated
 * along k in order, so its bits depend on its own row and column alone. Packing and blocking are BLIS's. */
#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__)

#include <immintrin.h>

#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

/* The micro-kernel's MR x NR accumulators take 24 of 32 registers. b's packed panel, PAIRS of k by NR, takes
 * 32 KiB; a's, of MC rows, 120 KiB of L2. */
enum { MR = 6, VECTORS = 4, NR = 16 * VECTORS, PAIRS = 128, MC = 40 * MR };

/* --- packing -------------------------------------------------------------------------------------------- */

typedef struct { /* a, or b transposed: rows along m or n, columns along k; one of the strides is 1 */
    const uint16_t *data;
    int64_t mn_stride, k_stride;
} Operand;

AVX512_BF16 FM_INLINE __mmask16 first_16(int64_t n) {
    return (__mmask16)(n >= 16 ? 0xffff : n > 0 ? (1 << n) - 1 : 0);
}

/* MN-major: k = 2i in the low halves, 2i + 1 in the high ones. */
AVX512_BF16 static void pack_mn_major(uint32_t *pairs, int64_t pitch, Operand x, int64_t extent,
                                      int64_t depth) {
    for (int64_t i = 0; 2 * i < depth; i++)
        for (int64_t mn = 0; mn < extent; mn += 16) {
            const uint16_t *even = x.data + 2 * i * x.k_stride + mn;
            const __mmask16 low = first_16(extent - mn), high = 2 * i + 1 < depth ? low : 0;
            __m512i evens = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(low, even));
            __m512i odds = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(high, even + x.k_stride));
            _mm512_storeu_si512(pairs + i * pitch + mn, _mm512_or_si512(evens, _mm512_slli_epi32(odds, 16)));
        }
}

/* K-major: 16 x 16 pairs are transposed in registers. */
AVX512_BF16 static void pack_k_major(uint32_t *pairs, int64_t pitch, Operand x, int64_t extent,
                                     int64_t depth) {
    for (int64_t mn = 0; mn < extent; mn += 16)
        for (int64_t i = 0; 2 * i < depth; i += 16) {
            const int64_t rest = depth - 2 * i;
            const __mmask32 mask = rest >= 32 ? ~0u : (1u << rest) - 1;
            __m512i r[16], t[16];
#pragma GCC unroll 16
            for (int l = 0; l < 16; l++)
                if (mn + l < extent) /* a mask of zeros would do, but is slow where no memory is */
                    r[l] = _mm512_maskz_loadu_epi16(mask, x.data + (mn + l) * x.mn_stride + 2 * i);
                else
                    r[l] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int l = 0; l < 16; l += 2) {
                t[l] = _mm512_unpacklo_epi32(r[l], r[l + 1]);
                t[l + 1] = _mm512_unpackhi_epi32(r[l], r[l + 1]);
            }
#pragma GCC unroll 4
            for (int l = 0; l < 16; l += 4) { /* r[l + j]: in quarter q, pair 4q + j of rows l to l + 3 */
                r[l] = _mm512_unpacklo_epi64(t[l], t[l + 2]);
                r[l + 1] = _mm512_unpackhi_epi64(t[l], t[l + 2]);
                r[l + 2] = _mm512_unpacklo_epi64(t[l + 1], t[l + 3]);
                r[l + 3] = _mm512_unpackhi_epi64(t[l + 1], t[l + 3]);
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512i even[2], odd[2]; /* quarters for rows 0 to 7, and 8 to 15 */
                for (int h = 0; h < 2; h++) {
                    even[h] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0x88);
                    odd[h] = _mm512_shuffle_i32x4(r[8 * h + j], r[8 * h + 4 + j], 0xdd);
                }
                uint32_t *row = pairs + (i + j) * pitch + mn;
                _mm512_storeu_si512(row, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
                _mm512_storeu_si512(row + 4 * pitch, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
                _mm512_storeu_si512(row + 8 * pitch, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
                _mm512_storeu_si512(row + 12 * pitch, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
            }
        }
}

/* pairs[i * pitch + mn] = elements 2i and 2i + 1 of row mn, the second zero past depth. */
static void pack(uint32_t *pairs, int64_t pitch, Operand x, int64_t extent, int64_t depth) {
    (x.mn_stride == 1 ? pack_mn_major : pack_k_major)(pairs, pitch, x, extent, depth);
}

/* --- the micro-kernel ----------------------------------------------------------------------------------- */

typedef struct {
    const uint32_t *a; /* [pairs, rows] in rows of MC */
    const uint32_t *b; /* [pairs, NR] */
    float *out;        /* [rows, cols] in rows of `stride` */
    int64_t stride, cols, pairs;
    bool accumulate;
} Tile;

AVX512_BF16 FM_INLINE void micro_kernel(const Tile *t, const int rows) {
    __m512 sum[MR][VECTORS];
    __mmask16 mask[VECTORS]; /* a bit is 1 if its column exists */
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
        for (int v = 0; v < VECTORS; v++) b[v] = (__m512bh)_mm512_load_si512(t->b + i * NR + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            __m512bh a = (__m512bh)_mm512_set1_epi32((int)t->a[i * MC + r]);
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

AVX512_BF16 static void run_micro_kernel(const Tile *t, int64_t rows) {
    switch (rows) {
    case 1: micro_kernel(t, 1); break;
    case 2: micro_kernel(t, 2); break;
    case 3: micro_kernel(t, 3); break;
    case 4: micro_kernel(t, 4); break;
    case 5: micro_kernel(t, 5); break;
    default: micro_kernel(t, MR);
    }
}

static Operand rows_from(FmMatrix m, int64_t row, int64_t k) {
    return (Operand){(const uint16_t *)m.data + row * m.row_stride + k * m.col_stride, m.row_stride,
                     m.col_stride};
}

/* out is row-major. */
static void multiply(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    static _Thread_local _Alignas(64) uint32_t a_pairs[PAIRS * MC], b_pairs[PAIRS * NR];
    const FmMatrix b_rows = fm_transposed(b);
    for (int64_t k = 0; k < a.cols; k += 2 * PAIRS) {
        int64_t depth = fm_min(2 * PAIRS, a.cols - k);
        for (int64_t block = 0; block < out.rows; block += MC) {
            int64_t rows = fm_min(MC, out.rows - block);
            pack(a_pairs, MC, rows_from(a, block, k), rows, depth);
            for (int64_t col = 0; col < out.cols; col += NR) {
                int64_t cols = fm_min(NR, out.cols - col);
                pack(b_pairs, NR, rows_from(b_rows, col, k), cols, depth);
                for (int64_t row = 0; row < rows; row += MR) {
                    Tile t = {.a = a_pairs + row,
                              .b = b_pairs,
                              .out = (float *)out.data + (block + row) * out.row_stride + col,
                              .stride = out.row_stride,
                              .cols = cols,
                              .pairs = (depth + 1) / 2,
                              .accumulate = accumulate || k};
                    run_micro_kernel(&t, fm_min(MR, rows - row));
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

/* The leading dimension of a row-major matrix; 0: it is not, or MKL's integers are too small. */
static int pitch_of(FmMatrix m) {
    int64_t pitch = m.rows > 1 ? m.row_stride : m.cols;
    return fm_is_row_major(m) && pitch <= INT32_MAX ? (int)pitch : 0;
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

bool fm_has_bf16_gemm(void) {
    return __builtin_cpu_supports("avx512bf16");
}

const char *fused_moe_cpu_bf16(void) {
    return !fm_has_bf16_gemm() ? "float32" : has_amx() ? "AMX" : "AVX512_BF16";
}

int fm_bf16_matmul(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    if (out.col_stride != 1)
        return fm_bf16_matmul(fm_transposed(out), fm_transposed(b), fm_transposed(a), accumulate);
    if (!has_amx() || !multiply_by_mkl(out, a, b, accumulate)) multiply(out, a, b, accumulate);
    return FUSED_MOE_OK;
}

#else

bool fm_has_bf16_gemm(void) {
    return false;
}

const char *fused_moe_cpu_bf16(void) {
    return "float32";
}

int fm_bf16_matmul(FmMatrix out, FmMatrix a, FmMatrix b, bool accumulate) {
    (void)out, (void)a, (void)b, (void)accumulate;
    return FUSED_MOE_MATMUL_FAILED;
}

#endif
