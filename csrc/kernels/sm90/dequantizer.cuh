/* Codes to values on Hopper: a lane's codes of a row of a quantised weight's tile become pairs of 16-bit
 * values, the register operand A of MMAs.
 *
 * The weight in 16 bits exists in registers alone. k keeps its order, and the values are those of
 * reference.dequantize, so results have the bits of a GEMM of the dequantised weight: which of the two is run
 * may depend on the number of rows.
 *
 * In memory a weight is tiles of 64 rows and 64 columns (fused_moe/quantized/tiles.py), codes in the order of
 * A's fragments. A lane has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16, t = lane % 4, of rows lane
 * / 4 and lane / 4 + 8 of its warp's sixteen, or of a gate and its up (QuantizedWeight::row_of):
 *
 *   tile [row half][warp][lane] of 8 bytes (codes of 4 bits) or 16: what a lane has of a row
 *   8 bits   word s: columns 16 s + 2 t, + 2 t + 1, + 2 t + 8, + 2 t + 9
 *   4 bits   word s / 2: pair n = 2 (s % 2) + u is columns 16 s + 8 u + 2 t and one more, in lower and upper
 *            half: int4's bits 4 n on, e2m1's those of quantized_tile.h
 *
 * A value is (code - zero) scale, rounded once. If code - zero and scale are exact in T (IN_16_BITS), that is
 * one multiplication in T; else it is computed in float32. So are codes of 8 bits, and int4 whose scales have
 * another dtype than T. */
#pragma once

#include "../../quantized_tile.h"
#include "../common/pairs.cuh"
#include "../common/ptx_sm90.cuh"

namespace fused_moe {
namespace sm90 {

/* Columns of a stage, at most. */
constexpr int MAX_STAGE_COLUMNS = 128;

/* A stage's scales and zero points, ordered like its codes: [tile][group][row]; by column, for each box:
 * [group][64 columns in lanes' order]. A group is the columns, or by column the rows, that share a scale. */
typedef struct {
    int32_t bytes;     /* of a scale                                                */
    int32_t rows;      /* of a group's scales in a tile: 64, or 4 equal ones        */
    int32_t groups;    /* in a stage, or by column in a box: 1, 2 or 4              */
    int32_t shift;     /* 2^shift stages, or boxes, share a group; 31: all          */
    bool has_zeros;    /* int8, one for each scale                                  */
    int32_t box_bytes; /* codes, scales and zero points                             */
} Scales;

/* What pairs of codes are shifted and scaled by: a row's in a group; by columns, two columns'. */
template <bool IN_16_BITS, bool BY_COLUMN>
struct Factor {
    using Wide = std::conditional_t<BY_COLUMN, float2, float>;
    uint32_t zero; /* INT4: PairOf::INTEGER + 8 + zero, of both codes of a pair */
    std::conditional_t<IN_16_BITS, uint32_t, Wide> scale; /* IN_16_BITS: in T, twice */
};

/* The same for one multiplication a pair. */
typedef struct {
    uint32_t scale, offset;
} QuickFactor;

__device__ inline void ld_shared_words(uint32_t (&word)[2], uint32_t address) {
    uint2 v = ld_shared_v2(address);
    word[0] = v.x, word[1] = v.y;
}
__device__ inline void ld_shared_words(uint32_t (&word)[4], uint32_t address) {
    uint4 v = ld_shared_v4(address);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
}

/* --- codes to values ------------------------------------------------------------------------------------ */

/* GROUPED: a stage may have more than one group of columns. BY_COLUMN: the tiles are a transposed weight's,
 * and a column has scales of its own, one for each group of rows. A box may have several groups. */
template <typename T_, Code CODE_, bool GROUPED_, bool BY_COLUMN_ = false, bool OTHER_SCALES_ = false>
struct Dequantizer {
    using T = T_;
    static constexpr Code CODE = CODE_;
    static constexpr bool GROUPED = GROUPED_, BY_COLUMN = BY_COLUMN_;
    static constexpr bool IS_4_BIT = CODE == Code::INT4 || CODE == Code::E2M1, HAS_ZEROS = CODE == Code::INT4;
    static constexpr bool OTHER_SCALES = OTHER_SCALES_, IN_16_BITS = IS_4_BIT && !OTHER_SCALES;
    static_assert(CODE == Code::INT4 || (std::is_same_v<T, __nv_bfloat16> && !OTHER_SCALES),
                  "fp16 has kernels for int4 alone, whose scales alone have several dtypes");
    static_assert(!OTHER_SCALES || (GROUPED && !BY_COLUMN));
    static constexpr int TILE_BYTES = IS_4_BIT ? 2048 : 4096;
    static constexpr int WORDS = IS_4_BIT ? 2 : 4; /* of a thread's codes of a row and a tile */
    static constexpr int GROUPS = GROUPED ? 4 : 1; /* in a stage, at most */
    /* A tile's in a stage, at most. */
    static constexpr int SCALE_BYTES = SUBTILE * GROUPS * (CODE == Code::E2M1 ? 1 : IN_16_BITS ? 2 : 4);
    static constexpr int ZERO_BYTES = HAS_ZEROS ? SUBTILE * (GROUPED ? 4 : 2) : 0; /* TMA writes on 128 */
    using PairFactor = Factor<IN_16_BITS, BY_COLUMN>;
    /* Whether one multiplication makes a pair, where all scales are in a range (quick_factor). */
    static constexpr bool HAS_QUICK =
        std::is_same_v<T, __nv_bfloat16> && IN_16_BITS && !BY_COLUMN && (CODE == Code::E2M1 || !GROUPED);
    using Other =
        std::conditional_t<std::is_same_v<T, __half>, __nv_bfloat16, __half>; /* a scale's dtype beside T */
    uint32_t fp16_1024; /* INT8: 0x64, the high byte of 1024 in fp16, four times; else 0 */

    __device__ static Dequantizer make() { return {CODE == Code::INT8 ? opaque_constant(0x64646464) : 0}; }

    /* From a row's scale and zero point in shared memory. */
    __device__ static PairFactor factor(uint32_t scale, uint32_t zero, const Scales &s) {
        PairFactor f = {};
        if constexpr (HAS_ZEROS)
            f.zero = PairOf<T>::INTEGER + (8 + (s.has_zeros ? ld_shared_s8(zero) : 0)) * 0x10001;
        if constexpr (CODE == Code::E2M1) {
            f.scale = power_pair(ld_shared_u8(scale) * 0x10001);
        } else if constexpr (IN_16_BITS) {
            f.scale = ld_shared_u16(scale) * 0x10001;
        } else if constexpr (
            OTHER_SCALES) { /* no branch: ptxas would have each wgmma wait for the one before */
            uint32_t word =
                ld_shared_u32(scale & ~3u) >> 8 * (scale & 2); /* its lower half, if it has 16 bits */
            float from_16_bits = floats_of(pair_of<Other>(word)).x;
            f.scale = s.bytes == 4 ? __uint_as_float(word) : from_16_bits;
        } else {
            f.scale = __uint_as_float(ld_shared_u32(scale));
        }
        return f;
    }

    /* All eight pairs' factors, from the scales and zero points of 16 columns in shared memory: pair i has
     * columns 2 i and 2 i + 1. Scales are float32 for codes of 8 bits; zero points are -8 to 7. */
    __device__ static void column_factors(PairFactor (&f)[8], uint32_t scale, uint32_t zero,
                                          const Scales &s) {
        constexpr int WORDS = CODE == Code::E2M1 ? 4 : CODE == Code::INT4 ? 8 : 16;
        uint32_t words[WORDS], zeros[4] = {};
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) ld_shared_words(*(uint32_t (*)[4])(words + i), scale + 4 * i);
        if (HAS_ZEROS && s.has_zeros) ld_shared_words(zeros, zero);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t spread = i % 2 ? 0x4342 : 0x4140; /* a halfword's two bytes to two halfwords */
            if constexpr (CODE == Code::INT4) {
                uint32_t plus_8 = (zeros[i / 2] ^ 0x08080808) & 0x0f0f0f0f;
                f[i].zero = PairOf<T>::INTEGER | __byte_perm(plus_8, 0, spread);
            }
            if constexpr (CODE == Code::E2M1)
                f[i].scale = power_pair(__byte_perm(words[i / 2], 0, spread));
            else if constexpr (CODE == Code::INT4)
                f[i].scale = words[i];
            else
                f[i].scale = make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
        }
    }

    /* In place of a bf16's last eight bits int4's code is a multiple of 2^-133, subnormal or among the first
     * normal numbers; e2m1's bits become an exponent's last two and a mantissa's first. So one multiplication
     * makes the value: by the scale and the power of two that makes up for the place. quick_factor says
     * whether this scale, whose bits f has, has the range for that. The value is rounded once, as ever. */
    __device__ static bool quick_factor(QuickFactor &f) {
        uint32_t bits = f.scale;
        if constexpr (CODE == Code::E2M1) { /* 2^126 scale; the scale is below 2 */
            f.scale = bits * 0x00800080 + 0x3f003f00;
            return bits < 128;
        } else { /* 2^129 scale, and -8 scale; the scale is normal and below 1/2 */
            f.scale = bits * 0x10001 + 0x40804080;
            f.offset = multiply_pair<T>(f.scale, 0x80808080);
            return (bits << 17) - (1u << 24) < 125u << 24;
        }
    }

    __device__ static uint32_t scale_bits(uint32_t scale) {
        return CODE == Code::E2M1 ? ld_shared_u8(scale) : ld_shared_u16(scale);
    }

    __device__ static uint32_t quick_pair(const uint32_t (&words)[WORDS], int step, int u,
                                          const QuickFactor &f) {
        uint32_t word = words[step / 2];
        int n = 2 * (step % 2) + u;
        if constexpr (CODE == Code::E2M1) return multiply_pair<T>(e2m1_bits(word, n), f.scale);
        uint32_t code = shifted(word, 4 - 4 * n) & 0x00f000f0; /* 2^-129 times */
        return word_of<T>(__hfma2(pair_of<T>(code), pair_of<T>(f.scale), pair_of<T>(f.offset)));
    }

    /* To the left, or with a negative number to the right. */
    __device__ static uint32_t shifted(uint32_t word, int by) { return by < 0 ? word >> -by : word << by; }

    /* Pair n of a word of e2m1, divided by E2M1_FACTOR. */
    __device__ static uint32_t e2m1_bits(uint32_t word, int n) {
        constexpr int SHIFT = PairOf<T>::E2M1_SHIFT;
        constexpr uint32_t SIGN = 0x80008000, MAGNITUDE = 0x00070007u << SHIFT;
        int sign = 15 - (FUSED_MOE_E2M1_SIGNS >> 4 * n & 15),
            magnitude = SHIFT - (FUSED_MOE_E2M1_MAGNITUDES >> 4 * n & 15);
        return sign == magnitude
                   ? shifted(word, sign) & (SIGN | MAGNITUDE)
                   : lop3_and_or(shifted(word, sign), SIGN, shifted(word, magnitude) & MAGNITUDE);
    }

    /* Pair n of a word of 4-bit codes. */
    __device__ uint32_t pair_of_nibbles(uint32_t word, int n, const PairFactor &f) const {
        uint32_t exact;
        if constexpr (CODE == Code::INT4) {
            uint32_t integer = lop3_and_or(word >> 4 * n, 0x000f000f, PairOf<T>::INTEGER);
            exact = word_of<T>(__hsub2(pair_of<T>(integer), pair_of<T>(f.zero)));
        } else {
            exact = multiply_pair<T>(e2m1_bits(word, n), PairOf<T>::E2M1_FACTOR);
        }
        if constexpr (IN_16_BITS) {
            return multiply_pair<T>(exact, f.scale);
        } else {
            float2 v = floats_of(pair_of<T>(exact));
            return scaled_pair<T>(v.x, v.y, f.scale);
        }
    }

    /* The lower or the upper pair of a word of 8-bit codes. */
    __device__ uint32_t pair_of_bytes(uint32_t word, int u, const PairFactor &f) const {
        if constexpr (CODE == Code::E4M3) {
            float2 v = __half22float2(pair_of<__half>(cvt_f16x2_e4m3x2((uint16_t)(word >> 16 * u))));
            return scaled_pair<T>(v.x, v.y, f.scale);
        } else { /* in fp16 2^10 + 128 + code, less that */
            uint32_t integers = __byte_perm(word ^ 0x80808080, fp16_1024, u ? 0x4342 : 0x4140);
            __half2 exact = __hsub2(pair_of<__half>(integers), pair_of<__half>(0x64806480));
            float2 v = __half22float2(exact);
            return scaled_pair<T>(v.x, v.y, f.scale);
        }
    }

    /* Columns 16 step + 8 u + 2 t and one more of a tile, t = lane % 4. */
    __device__ uint32_t pair(const uint32_t (&words)[WORDS], int step, int u, const PairFactor &f) const {
        if constexpr (IS_4_BIT)
            return pair_of_nibbles(words[step / 2], 2 * (step % 2) + u, f);
        else
            return pair_of_bytes(words[step], u, f);
    }
};

} // namespace sm90
} // namespace fused_moe
