/* wgmma: matrix multiply-accumulates (MMAs) of a warpgroup, 128 threads, from shared memory into registers.
 *
 * d (64xN, fp32) = a (64x16) b (16xN) [+ d]. A thread holds 4 elements of every 8 columns:
 *
 *   lane l of warp w, n = 8 j + 2 (l % 4):   d[4j], d[4j+1]      row 16 w + l / 4,      columns n, n + 1
 *                                            d[4j+2], d[4j+3]    row 16 w + l / 4 + 8,  columns n, n + 1
 *
 * An operand consists of subtiles of 64 of M or N by one k-tile, as TMA writes them with the 128-byte
 * swizzle: swizzled() in tensor_map.cuh.
 *
 *   Major::K     a subtile's 64 rows run along M or N, 64 elements of k each; the next subtile follows
 *   Major::MN    a subtile's 64 rows run along k, 64 elements of M or N each; the next subtile follows */
#pragma once

#include "../common/tensor_map.cuh"
#include "ptx.cuh"

namespace fused_moe {
namespace sm90 {

/* Descriptor of the operand that starts at `address`. In units of 16 bytes: from 8 rows to the next 8 is the
 * stride byte offset (SBO, bits 32 on), and for Major::MN from 64 of M or N to the next 64, a subtile, is the
 * leading byte offset (LBO, bits 16 on), which Major::K does not use. */
template <Major major>
__device__ inline uint64_t matrix_descriptor(uint32_t address) {
    constexpr uint64_t swizzle_128 = 1ull << 62, sbo = (uint64_t)(8 * SWIZZLE_BYTES >> 4) << 32;
    constexpr uint64_t lbo = (uint64_t)(major == Major::MN ? SUBTILE_BYTES >> 4 : 1) << 16;
    return swizzle_128 | sbo | lbo | (address >> 4 & 0x3fff);
}

/* One wgmma multiplies 32 bytes of k of each operand: 16 elements of 16 bits, 32 of 8. A k-tile takes
 * four. */
constexpr int WGMMA_K_BYTES = 32, NUM_K_STEPS = SWIZZLE_BYTES / WGMMA_K_BYTES;

/* The increment of a descriptor for one wgmma's k. */
template <Major major, typename T>
constexpr int K_STEP =
    (major == Major::MN ? WGMMA_K_BYTES / (int)sizeof(T) * SWIZZLE_BYTES : WGMMA_K_BYTES) >> 4;

/* Before the first wgmma, and after registers of d were written. */
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` groups are in flight. */
template <int pending>
__device__ inline void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Lists of operands: "%0, %1, .." for the text, "+f"(d[0]), .. for the registers. */
#define TEXT_2(t) "%" #t "0, %" #t "1"
#define TEXT_8(t) TEXT_2(t) ", %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7"
#define TEXT_10(t) TEXT_8(t) ", %" #t "8, %" #t "9"
#define TEXT_30 TEXT_10() ", " TEXT_10(1) ", " TEXT_10(2)
#define TEXT_60 TEXT_30 ", " TEXT_10(3) ", " TEXT_10(4) ", " TEXT_10(5)
#define TEXT_120                                                                                             \
    TEXT_60 ", " TEXT_10(6) ", " TEXT_10(7) ", " TEXT_10(8) ", " TEXT_10(9) ", " TEXT_10(10) ", " TEXT_10(11)
#define REGISTERS_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define REGISTERS_8(c, i) REGISTERS_4(c, i), REGISTERS_4(c, i + 4)
#define REGISTERS_16(c, i)                                                                                   \
    REGISTERS_4(c, i), REGISTERS_4(c, i + 4), REGISTERS_4(c, i + 8), REGISTERS_4(c, i + 12)
#define REGISTERS_24(c, i) REGISTERS_16(c, i), REGISTERS_8(c, i + 16)
#define REGISTERS_32(c, i) REGISTERS_16(c, i), REGISTERS_16(c, i + 16)
#define REGISTERS_64(c, i) REGISTERS_32(c, i), REGISTERS_32(c, i + 32)
#define REGISTERS_128(c, i) REGISTERS_64(c, i), REGISTERS_64(c, i + 64)

/* A, B, accumulate and the two transpositions are the operands after the N / 2 registers. Without accumulate
 * the registers are outputs only, so the compiler does not preserve their old values. */
#define WGMMA_ASM(TYPE, N, C, REGS, TEXT, A, B, P, TA, TB)                                                   \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT "}, " A ", " B    \
                 ", p, 1, 1, " TA ", " TB ";}"                                                               \
                 : REGS(C, 0)                                                                                \
                 : "l"(a), "l"(b), "n"(accumulate), "n"((int)a_major), "n"((int)b_major))
#define WGMMA(T, TYPE, N, ...)                                                                               \
    template <int accumulate, Major a_major, Major b_major>                                                  \
    __device__ inline void wgmma_m64n##N##k16(float *d, uint64_t a, uint64_t b, T) {                         \
        if constexpr (accumulate)                                                                            \
            WGMMA_ASM(TYPE, N, "+f", __VA_ARGS__);                                                           \
        else                                                                                                 \
            WGMMA_ASM(TYPE, N, "=f", __VA_ARGS__);                                                           \
    }
#define WGMMAS(T, TYPE)                                                                                      \
    WGMMA(T, TYPE, 8, REGISTERS_4, "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8")                           \
    WGMMA(T, TYPE, 16, REGISTERS_8, TEXT_8(), "%8", "%9", "%10", "%11", "%12")                               \
    WGMMA(T, TYPE, 32, REGISTERS_16, TEXT_10() ", %10, %11, %12, %13, %14, %15", "%16", "%17", "%18", "%19", \
          "%20")                                                                                             \
    WGMMA(T, TYPE, 64, REGISTERS_32, TEXT_30 ", " TEXT_2(3), "%32", "%33", "%34", "%35", "%36")              \
    WGMMA(T, TYPE, 128, REGISTERS_64, TEXT_60 ", %60, %61, %62, %63", "%64", "%65", "%66", "%67", "%68")     \
    WGMMA(T, TYPE, 256, REGISTERS_128, TEXT_120 ", " TEXT_8(12), "%128", "%129", "%130", "%131", "%132")
WGMMAS(__nv_bfloat16, "bf16")
WGMMAS(__half, "f16")

/* The same of 8-bit elements, 32 of k at a time: e4m3 into floats, int8 into integers, exactly. Both
 * operands are K-major. OVERWRITE is SET, but d is an operand, too: sums that begin anew then stay in the
 * same registers while others are made of the ones before. */
enum Accumulate { SET, ADD, OVERWRITE };

#define WGMMA_8_ASM(TYPES, N, C, REGS, TEXT, A, B, P, SIGNS)                                                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32." TYPES " {" TEXT "}, " A ", " B ", p" SIGNS    \
                 ";}"                                                                                        \
                 : REGS(C, 0)                                                                                \
                 : "l"(a), "l"(b), "n"((int)(how == ADD)))
#define WGMMA_8(T, ACC, C, TYPES, SIGNS, N, REGS, TEXT, A, B, P)                                             \
    template <Accumulate how>                                                                                \
    __device__ inline void wgmma_m64n##N##k32(ACC *d, uint64_t a, uint64_t b, T) {                           \
        if constexpr (how == SET)                                                                            \
            WGMMA_8_ASM(TYPES, N, "=" C, REGS, TEXT, A, B, P, SIGNS);                                        \
        else                                                                                                 \
            WGMMA_8_ASM(TYPES, N, "+" C, REGS, TEXT, A, B, P, SIGNS);                                        \
    }
#define WGMMAS_8(T, ACC, C, TYPES, SIGNS)                                                                    \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 8, REGISTERS_4, "%0, %1, %2, %3", "%4", "%5", "%6")                     \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 16, REGISTERS_8, TEXT_8(), "%8", "%9", "%10")                           \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 32, REGISTERS_16, TEXT_10() ", %10, %11, %12, %13, %14, %15", "%16",    \
            "%17", "%18")                                                                                    \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 64, REGISTERS_32, TEXT_30 ", " TEXT_2(3), "%32", "%33", "%34")          \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 128, REGISTERS_64, TEXT_60 ", %60, %61, %62, %63", "%64", "%65", "%66") \
    WGMMA_8(T, ACC, C, TYPES, SIGNS, 256, REGISTERS_128, TEXT_120 ", " TEXT_8(12), "%128", "%129", "%130")
WGMMAS_8(__nv_fp8_e4m3, float, "f", "f32.e4m3.e4m3", ", 1, 1")
WGMMAS_8(int8_t, int32_t, "r", "s32.s8.s8", "")

/* Selects the instruction by N. */
template <int columns, Accumulate how, typename T, typename Acc>
__device__ inline void wgmma_8(Acc *d, uint64_t a, uint64_t b, T t) {
    static_assert(columns == 256 || columns == 128 || columns == 64 || columns == 32 || columns == 16 ||
                  columns == 8);
    if constexpr (columns == 256) wgmma_m64n256k32<how>(d, a, b, t);
    if constexpr (columns == 128) wgmma_m64n128k32<how>(d, a, b, t);
    if constexpr (columns == 64) wgmma_m64n64k32<how>(d, a, b, t);
    if constexpr (columns == 32) wgmma_m64n32k32<how>(d, a, b, t);
    if constexpr (columns == 16) wgmma_m64n16k32<how>(d, a, b, t);
    if constexpr (columns == 8) wgmma_m64n8k32<how>(d, a, b, t);
}

/* Selects the instruction by N. */
template <int columns, int accumulate, Major a_major, Major b_major, typename T>
__device__ inline void wgmma(float *d, uint64_t a, uint64_t b, T t) {
    static_assert(columns == 256 || columns == 128 || columns == 64 || columns == 32 || columns == 16 ||
                  columns == 8);
    if constexpr (columns == 256) wgmma_m64n256k16<accumulate, a_major, b_major>(d, a, b, t);
    if constexpr (columns == 128) wgmma_m64n128k16<accumulate, a_major, b_major>(d, a, b, t);
    if constexpr (columns == 64) wgmma_m64n64k16<accumulate, a_major, b_major>(d, a, b, t);
    if constexpr (columns == 32) wgmma_m64n32k16<accumulate, a_major, b_major>(d, a, b, t);
    if constexpr (columns == 16) wgmma_m64n16k16<accumulate, a_major, b_major>(d, a, b, t);
    if constexpr (columns == 8) wgmma_m64n8k16<accumulate, a_major, b_major>(d, a, b, t);
}

/* A in registers: lane l of warp w holds rows 16 w + l / 4 and 16 w + l / 4 + 8 of columns n and n + 1, where
 * n = 2 (l % 4), then the same rows of columns n + 8 and n + 9. */
#define WGMMA_A_ASM(TYPE, N, C, REGS, TEXT, A, B, P, TB)                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT "}, {" A "}, " B  \
                 ", p, 1, 1, " TB ";}"                                                                       \
                 : REGS(C, 0)                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(accumulate), "n"((int)b_major))
#define WGMMA_A(T, TYPE, N, ...)                                                                             \
    template <int accumulate, Major b_major>                                                                 \
    __device__ inline void wgmma_m64n##N##k16(float *d, const uint32_t *a, uint64_t b, T) {                  \
        if constexpr (accumulate)                                                                            \
            WGMMA_A_ASM(TYPE, N, "+f", __VA_ARGS__);                                                         \
        else                                                                                                 \
            WGMMA_A_ASM(TYPE, N, "=f", __VA_ARGS__);                                                         \
    }
#define WGMMAS_A(T, TYPE)                                                                                    \
    WGMMA_A(T, TYPE, 32, REGISTERS_16, TEXT_10() ", %10, %11, %12, %13, %14, %15", "%16, %17, %18, %19",     \
            "%20", "%21", "%22")                                                                             \
    WGMMA_A(T, TYPE, 48, REGISTERS_24, TEXT_10() ", " TEXT_10(1) ", %20, %21, %22, %23",                     \
            "%24, %25, %26, %27", "%28", "%29", "%30")                                                       \
    WGMMA_A(T, TYPE, 64, REGISTERS_32, TEXT_30 ", " TEXT_2(3), "%32, %33, %34, %35", "%36", "%37", "%38")    \
    WGMMA_A(T, TYPE, 128, REGISTERS_64, TEXT_60 ", %60, %61, %62, %63", "%64, %65, %66, %67", "%68", "%69",  \
            "%70")                                                                                           \
    WGMMA_A(T, TYPE, 256, REGISTERS_128, TEXT_120 ", " TEXT_8(12), "%128, %129, %130, %131", "%132", "%133", \
            "%134")
WGMMAS_A(__nv_bfloat16, "bf16")
WGMMAS_A(__half, "f16")

template <int columns, int accumulate, Major b_major, typename T>
__device__ inline void wgmma(float *d, const uint32_t *a, uint64_t b, T t) {
    static_assert(columns == 256 || columns == 128 || columns == 64 || columns == 48 || columns == 32);
    if constexpr (columns == 256) wgmma_m64n256k16<accumulate, b_major>(d, a, b, t);
    if constexpr (columns == 128) wgmma_m64n128k16<accumulate, b_major>(d, a, b, t);
    if constexpr (columns == 64) wgmma_m64n64k16<accumulate, b_major>(d, a, b, t);
    if constexpr (columns == 48) wgmma_m64n48k16<accumulate, b_major>(d, a, b, t);
    if constexpr (columns == 32) wgmma_m64n32k16<accumulate, b_major>(d, a, b, t);
}

#undef WGMMAS_8
#undef WGMMA_8
#undef WGMMA_8_ASM
#undef WGMMAS_A
#undef WGMMA_A
#undef WGMMA_A_ASM
#undef WGMMAS
#undef WGMMA
#undef WGMMA_ASM
#undef TEXT_2
#undef TEXT_8
#undef TEXT_10
#undef TEXT_30
#undef TEXT_60
#undef TEXT_120
#undef REGISTERS_4
#undef REGISTERS_8
#undef REGISTERS_16
#undef REGISTERS_24
#undef REGISTERS_32
#undef REGISTERS_64
#undef REGISTERS_128

} // namespace sm90
} // namespace fused_moe
