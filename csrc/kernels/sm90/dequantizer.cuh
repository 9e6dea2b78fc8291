/* Quantised weights on Hopper: codes in shared memory become the register operand A of MMAs.
 *
 * The weight in 16 bits exists in registers alone. k keeps its order, and the values are those of
 * reference.dequantize, so results have the bits of a GEMM of the dequantised weight: which of the two is run
 * may depend on the number of rows.
 *
 * A weight lies in memory in tiles of 64 rows and 64 columns (fused_moe/quantized/tiles.py), codes in the order of
 * A's fragments. A thread has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of each 16, t = lane % 4, of rows lane / 4 and
 * lane / 4 + 8 of its warp's sixteen, or of a gate and its up (row_of in weight_quantized.cuh):
 *
 *   tile [row half][warp][lane] of 8 bytes (codes of 4 bits) or 16: what a thread has of a row
 *   8 bits   word s: columns 16 s + 2 t, + 2 t + 1, + 2 t + 8, + 2 t + 9
 *   4 bits   word s / 2: pair n = 2 (s % 2) + u is columns 16 s + 8 u + 2 t and one more, of the lower and the upper half:
 *            of int4 bits 4 n on, of e2m1 those of quantized_tile.h
 *
 * A value is (code - zero) scale, rounded once. Where code - zero and scale are exact in T (`narrow`) that is
 * one product of T; else it is formed in float32. */
#pragma once

#include "../../quantized_tile.h"
#include "../common/pairs.cuh"
#include "writers.cuh"

namespace fused_moe {
namespace sm90 {

/* Of a stage. */
constexpr int MOST_COLUMNS = 128;

/* --- scales and zero points ------------------------------------------------------------------------------ */

/* Of a stage, as its codes are: [tile][group][row]; by column, of each box: [group][64 columns, as lanes have them].
 * A group is the columns, or by column the rows, that share a scale. */
typedef struct {
    FusedMoeDtype dtype;
    int32_t bytes;     /* of a scale                                                */
    int32_t rows;      /* of a group's scales in a tile: 64, or 4 equal ones        */
    int32_t groups;    /* in a stage, or by column in a box: 1, 2 or 4              */
    int32_t shift;     /* 2^shift stages, or boxes, share a group; 31: all          */
    bool has_zeros;    /* int8, as many as scales                                   */
    int32_t box_bytes; /* codes, scales and zero points                             */
} Scales;

/* What pairs of codes are shifted and scaled by: those of a row and a group; or, by columns, two columns'. */
template <bool NARROW, bool BY_COLUMN>
struct Factor {
    using Wide = std::conditional_t<BY_COLUMN, float2, float>;
    uint32_t zero; /* INT4: PairOf::INTEGER + 8 + zero, of both codes of a pair */
    std::conditional_t<NARROW, uint32_t, Wide> scale; /* narrow: of T, of both */
};

__device__ inline void ld_shared_words(uint32_t (&word)[2], uint32_t address) {
    uint2 v = ld_shared_v2(address);
    word[0] = v.x, word[1] = v.y;
}
__device__ inline void ld_shared_words(uint32_t (&word)[4], uint32_t address) {
    uint4 v = ld_shared_v4(address);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
}

/* --- codes to values ------------------------------------------------------------------------------------ */

/* GROUPED: a stage may have more than one group of columns. BY_COLUMN: the tiles are of a transposed weight, and a column
 * has scales of its own, one for each group of rows, of which a box may have more than one. */
template <typename T_, Code CODE_, bool NARROW_, bool GROUPED_, bool BY_COLUMN_ = false>
struct Decoder {
    using T = T_;
    static constexpr Code CODE = CODE_;
    static constexpr bool NARROW = NARROW_, GROUPED = GROUPED_, BY_COLUMN = BY_COLUMN_;
    static constexpr bool IS_4_BIT = CODE == Code::INT4 || CODE == Code::E2M1, HAS_ZEROS = CODE == Code::INT4;
    static_assert(!NARROW || IS_4_BIT, "scales of 8-bit codes are multiplied in float32");
    static constexpr int TILE_BYTES = IS_4_BIT ? 2048 : 4096;
    static constexpr int WORDS = IS_4_BIT ? 2 : 4; /* of a thread's codes of a row and a tile */
    static constexpr int GROUPS = GROUPED ? 4 : 1; /* in a stage, at most */
    /* Of a tile in a stage, at most. */
    static constexpr int SCALE_BYTES = SUBTILE * GROUPS * (CODE == Code::E2M1 ? 1 : NARROW ? 2 : 4);
    static constexpr int ZERO_BYTES = HAS_ZEROS ? SUBTILE * (GROUPED ? 4 : 2) : 0; /* TMA writes on 128 */
    using PairFactor = Factor<NARROW, BY_COLUMN>;
    uint32_t fp16_1024; /* INT8: 0x64, the high byte of 1024 in fp16, four times; else 0 */

    __device__ static Decoder make() { return {CODE == Code::INT8 ? opaque_constant(0x64646464) : 0}; }

    /* Of a row's scale and zero point in shared memory. */
    __device__ static PairFactor factor(uint32_t scale, uint32_t zero, const Scales &s) {
        PairFactor f = {};
        if constexpr (HAS_ZEROS)
            f.zero = PairOf<T>::INTEGER + (8 + (s.has_zeros ? ld_shared_s8(zero) : 0)) * 0x10001;
        if constexpr (CODE == Code::E2M1 && NARROW) {
            f.scale = power_pair(ld_shared_u8(scale) * 0x10001);
        } else if constexpr (CODE == Code::E2M1) {
            f.scale = float_of_e8m0(ld_shared_u8(scale));
        } else if constexpr (NARROW) {
            f.scale = ld_shared_u16(scale) * 0x10001;
        } else if (HAS_ZEROS && s.dtype == FUSED_MOE_BF16) {
            f.scale = __uint_as_float(ld_shared_u16(scale) << 16);
        } else if (HAS_ZEROS && s.dtype == FUSED_MOE_F16) {
            f.scale = __half2float(__ushort_as_half((unsigned short)ld_shared_u16(scale)));
        } else {
            f.scale = __uint_as_float(ld_shared_u32(scale));
        }
        return f;
    }

    /* Of columns 2 pair and 2 pair + 1 of 16 whose scales and zero points are in shared memory, for all eight pairs. Scales are
     * of float32 for codes of 8 bits; of int4 they are narrow, or of the other 16-bit dtype; zero points are -8 to 7. */
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
            if constexpr (CODE == Code::E2M1) {
                uint32_t two = __byte_perm(words[i / 2], 0, spread);
                if constexpr (NARROW)
                    f[i].scale = power_pair(two);
                else
                    f[i].scale = make_float2(float_of_e8m0(two & 255), float_of_e8m0(two >> 16));
            } else if constexpr (NARROW) {
                f[i].scale = words[i];
            } else if constexpr (CODE == Code::INT4) {
                using Other = std::conditional_t<std::is_same_v<T, __half>, __nv_bfloat16, __half>;
                f[i].scale = floats_of(pair_of<Other>(words[i]));
            } else {
                f[i].scale = make_float2(__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
            }
        }
    }

    /* To the left, or with a negative number to the right. */
    __device__ static uint32_t shifted(uint32_t word, int by) { return by < 0 ? word >> -by : word << by; }

    /* Pair n of a word of 4-bit codes. */
    __device__ uint32_t pair_of_nibbles(uint32_t word, int n, const PairFactor &f) const {
        uint32_t exact;
        if constexpr (CODE == Code::INT4) {
            uint32_t integer = lop3_and_or(word >> 4 * n, 0x000f000f, PairOf<T>::INTEGER);
            exact = word_of<T>(__hsub2(pair_of<T>(integer), pair_of<T>(f.zero)));
        } else {
            constexpr int SHIFT = PairOf<T>::E2M1_SHIFT;
            constexpr uint32_t SIGN = 0x80008000, MAGNITUDE = 0x00070007u << SHIFT;
            int sign = 15 - (FUSED_MOE_E2M1_SIGNS >> 4 * n & 15),
                magnitude = SHIFT - (FUSED_MOE_E2M1_MAGNITUDES >> 4 * n & 15);
            uint32_t bits = sign == magnitude ? shifted(word, sign) & (SIGN | MAGNITUDE)
                                              : lop3_and_or(shifted(word, sign), SIGN,
                                                            shifted(word, magnitude) & MAGNITUDE);
            exact = multiply_pair<T>(bits, PairOf<T>::E2M1_FACTOR);
        }
        if constexpr (NARROW) {
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

/* --- fragments ------------------------------------------------------------------------------------------ */

/* Where a stage has what a thread needs of its two rows, of the first k-tile and group. By columns the rows share scales and
 * zero points. */
typedef struct {
    uint32_t codes[2], scale[2], zero[2];
} CodeOffsets;

/* Factors of a thread's two rows: of the stage, or of two groups of a k-tile, which are 32 columns or of a larger group. */
template <class Decoder, int K_TILES>
struct RowFactors {
    static constexpr int GROUPS = Decoder::GROUPED ? 2 : 1;
    typename Decoder::PairFactor factor[2][GROUPS];

    __device__ void load(uint32_t stage, const CodeOffsets &at, int k_tile, const Scales &s) {
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                bool has_all =
                    Decoder::CODE == Code::E2M1; /* groups of 32 columns always, and scales of a byte */
                uint32_t group = GROUPS == 1                          ? 0
                                 : has_all || s.groups == 2 * K_TILES ? 2 * k_tile + i
                                 : s.groups == K_TILES                ? k_tile
                                                                      : 0;
                uint32_t offset = group * (has_all ? SUBTILE : s.rows);
                factor[row][i] = Decoder::factor(stage + at.scale[row] + offset * (has_all ? 1 : s.bytes),
                                                 stage + at.zero[row] + offset, s);
            }
    }

    /* Of columns 16 step + 8 u + 2 t and one more. */
    __device__ const auto &of(int row, int step, int) const { return factor[row][step / 2 % GROUPS]; }
};

/* Factors of a thread's columns of a stage, which is one k-tile. */
template <class Decoder>
struct ColumnFactors {
    typename Decoder::PairFactor factor[8];

    __device__ void load(uint32_t stage, const CodeOffsets &at, int, const Scales &s) {
        Decoder::column_factors(factor, stage + at.scale[0], stage + at.zero[0], s);
    }

    __device__ const auto &of(int, int step, int u) const { return factor[2 * step + u]; }
};

/* What a thread has of a stage: codes of two rows, and their factors. */
template <class Decoder, int K_TILES>
struct StageCodes {
    using Factors =
        std::conditional_t<Decoder::BY_COLUMN, ColumnFactors<Decoder>, RowFactors<Decoder, K_TILES>>;
    uint32_t words[K_TILES][2][Decoder::WORDS];
    Factors factors;

    __device__ void load(uint32_t stage, const CodeOffsets &at) {
#pragma unroll
        for (int k_tile = 0; k_tile < K_TILES; k_tile++)
#pragma unroll
            for (int row = 0; row < 2; row++)
                ld_shared_words(words[k_tile][row], stage + at.codes[row] + k_tile * Decoder::TILE_BYTES);
    }

    /* Words 16 k_tile + 4 j + .. of A are columns 16 j .. 16 j + 15 of a k-tile. */
    __device__ void make_fragments(uint32_t (&a)[16 * K_TILES], int k_tile, const Decoder &decoder) const {
#pragma unroll
        for (int j = 0; j < SUBTILE / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[16 * k_tile + 4 * j + i] =
                    decoder.pair(words[k_tile][i % 2], j, i / 2, factors.of(i % 2, j, i / 2));
    }
};

} // namespace sm90
} // namespace fused_moe
