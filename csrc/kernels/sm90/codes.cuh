/* Quantised weights on Hopper: codes in shared memory become wgmma's register operand A.
 *
 * The weight in 16 bits exists in registers alone. k keeps its order, and the values are those of
 * reference.dequantize, so results have the bits of a GEMM of the dequantised weight: which of the two is run
 * may depend on the number of rows.
 *
 * A row's 64 codes of a k-tile are 64 bytes, or 32 of 4 bits, as TMA writes them with a swizzle of as many. Of
 * eight codes along k, thread t of a quad has codes 2 t and 2 t + 1 (wgmma.cuh). So its four threads read the
 * same 16 bytes, which shared memory serves as one, and take different bytes of each word.
 *
 * A value is (code - zero) scale, rounded once. Where code - zero and scale are exact in T (`narrow`) that is
 * one product of T; else it is formed in float32. */
#pragma once

#include "epilogue.cuh"

namespace fused_moe {
namespace sm90 {

enum class Code { E4M3, INT8, INT4, E2M1 };

/* --- pairs: two neighbouring elements of k in a word ---------------------------------------------------- */

/* T's words for codes of 4 bits. INTEGER | n is the number 2^bits + n for n below 16; E2M1's bits, shifted to
 * T's exponent and fraction, are its value divided by E2M1_FACTOR. Twice each. */
template <typename T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
    using type = __nv_bfloat162;
    static constexpr uint32_t INTEGER = 0x43004300, E2M1_FACTOR = 0x7e807e80; /* 128; 2^126 */
    static constexpr int E2M1_SHIFT = 6;
};
template <>
struct PairOf<__half> {
    using type = __half2;
    static constexpr uint32_t INTEGER = 0x64006400, E2M1_FACTOR = 0x74007400; /* 1024; 2^14 */
    static constexpr int E2M1_SHIFT = 9;
};

template <typename T>
__device__ inline typename PairOf<T>::type pair_of(uint32_t word) {
    return *reinterpret_cast<const typename PairOf<T>::type *>(&word);
}

template <typename T>
__device__ inline uint32_t word_of(typename PairOf<T>::type pair) {
    return *reinterpret_cast<const uint32_t *>(&pair);
}

template <typename T>
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
    return word_of<T>(__hmul2(pair_of<T>(a), pair_of<T>(b)));
}

__device__ inline float2 floats_of(__nv_bfloat162 pair) {
    return __bfloat1622float2(pair);
}
__device__ inline float2 floats_of(__half2 pair) {
    return __half22float2(pair);
}

/* --- codes to values ------------------------------------------------------------------------------------ */

/* A scale of this dtype. */
__device__ inline float float_of(uint32_t bits, FusedMoeDtype dtype) {
    switch (dtype) {
    case FUSED_MOE_F32: return __uint_as_float(bits);
    case FUSED_MOE_BF16: return __uint_as_float(bits << 16);
    case FUSED_MOE_F16: return __half2float(__ushort_as_half((unsigned short)bits));
    default: return __uint_as_float(bits == 0 ? 0x400000 : bits == 255 ? 0x7fc00000 : bits << 23); /* e8m0 */
    }
}

/* What the codes of a row and a group are shifted and scaled by. */
template <bool NARROW>
struct Factor {
    uint32_t zero;                                     /* INT4: PairOf::INTEGER + 8 + zero, twice */
    std::conditional_t<NARROW, uint32_t, float> scale; /* narrow: of T, twice */
};

template <typename T_, Code CODE_, bool NARROW_>
struct Decoder {
    using T = T_;
    static constexpr Code CODE = CODE_;
    static constexpr bool NARROW = NARROW_;
    static constexpr bool IS_4_BIT = CODE == Code::INT4 || CODE == Code::E2M1;
    static constexpr int ROW_BYTES = IS_4_BIT ? 32 : 64; /* of a k-tile */
    static_assert(!NARROW || IS_4_BIT, "scales of 8-bit codes are multiplied in float32");
    using RowFactor = Factor<NARROW>;

    uint32_t selector; /* of this thread's bytes */
    uint32_t low_bits; /* 4 bits twice; in a register, as one of a LOP3's two constants has to be */

    __device__ Decoder() {
        uint32_t t = threadIdx.x % 4;
        low_bits = opaque(0x000f000f);
        selector = IS_4_BIT ? t | (t + 4) << 8 : 2 * t | (2 * t + 1) << 4;
    }

    /* Of a scale's bits, as RowScales has them, and a zero point. */
    __device__ static RowFactor factor(uint32_t bits, int zero, FusedMoeDtype dtype) {
        RowFactor f;
        f.zero = CODE == Code::INT4 ? PairOf<T>::INTEGER + (uint32_t)(8 + zero) * 0x10001 : 0;
        if constexpr (CODE == Code::E2M1 && NARROW) /* bf16 has the values of e8m0 */
            f.scale = (__float_as_uint(float_of(bits, FUSED_MOE_U8)) >> 16) * 0x10001;
        else if constexpr (NARROW)
            f.scale = bits * 0x10001;
        else if constexpr (CODE == Code::E2M1)
            f.scale = float_of(bits, FUSED_MOE_U8);
        else if constexpr (CODE == Code::INT4)
            f.scale = float_of(bits, dtype);
        else
            f.scale = __uint_as_float(bits);
        return f;
    }

    __device__ static uint32_t scaled(float low, float high, float scale) {
        return pack<T>(low * scale, high * scale);
    }

    /* This thread's pair of a word of eight 4-bit codes. */
    __device__ uint32_t pair(uint32_t word, const RowFactor &f) const {
        uint32_t nibbles =
            __byte_perm(word, word >> 4, selector); /* in bits 0-3 and 16-19; others are junk */
        uint32_t exact;
        if constexpr (CODE == Code::INT4) {
            uint32_t shifted = (nibbles & low_bits) | PairOf<T>::INTEGER;
            exact = word_of<T>(__hsub2(pair_of<T>(shifted), pair_of<T>(f.zero)));
        } else {
            constexpr int shift = PairOf<T>::E2M1_SHIFT;
            uint32_t bits = (nibbles << 12 & 0x80008000) | (nibbles << shift & 0x00070007u << shift);
            exact = multiply_pair<T>(bits, PairOf<T>::E2M1_FACTOR);
        }
        if constexpr (NARROW) {
            return multiply_pair<T>(exact, f.scale);
        } else {
            float2 v = floats_of(pair_of<T>(exact));
            return scaled(v.x, v.y, f.scale);
        }
    }

    /* Of two words of four 8-bit codes each. */
    __device__ uint32_t pair(uint32_t first, uint32_t second, const RowFactor &f) const {
        uint32_t bytes = __byte_perm(first, second, selector); /* in bits 0-15; others are junk */
        if constexpr (CODE == Code::E4M3) {
            float2 v = __half22float2(pair_of<__half>(cvt_f16x2_e4m3x2((uint16_t)bytes)));
            return scaled(v.x, v.y, f.scale);
        } else { /* 2^23 + 128 + code, less that */
            bytes ^= 0x8080;
            float low = __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440));
            float high = __uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7441));
            return scaled(low - 8388736.f, high - 8388736.f, f.scale);
        }
    }
};

/* --- scales --------------------------------------------------------------------------------------------- */

constexpr int ONE_BLOCK = 31;

typedef struct {        /* of a weight (E, rows, k) */
    const void *scale;  /* [E,row_blocks,col_blocks] */
    const int8_t *zero; /* like scale; NULL: zeros */
    FusedMoeDtype dtype;
    int32_t first_row, end_row; /* of the rows that the GEMM multiplies by */
    int32_t block_rows, row_blocks, col_blocks;
    int32_t k_shift; /* log2 of a block's columns; ONE_BLOCK: it has all */
} Scales;

/* Of two rows, eight apart, of one subtile: bits as they lie in memory, of 8-bit codes float32's, loaded a k-tile
 * ahead.
 *
 * In the main loop the dtype of scales is known at compile time, but for INT4 with scales of another dtype than
 * T: whatever branches or reads parameters between a load and its use makes the warp wait for the load. */
template <class Decoder>
struct RowScales {
    /* of a k-tile: only codes of 4 bits have scales of 32 columns */
    static constexpr int HALVES = Decoder::IS_4_BIT ? 2 : 1;
    uint32_t first[2]; /* of the rows' blocks; scales are fewer than 2^31 */
    uint32_t bits[2][HALVES];
    int zero[2][HALVES];

    __device__ void start(const Scales &s, int expert, int row) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = min(s.first_row + row + 8 * i, s.end_row - 1) / s.block_rows;
            first[i] = (uint32_t)((expert * s.row_blocks + r) * s.col_blocks);
#pragma unroll
            for (int half = 0; half < HALVES; half++) zero[i][half] = 0;
        }
        switch (s.dtype) {
        case FUSED_MOE_F32: load_as<uint32_t>(s, 0); break;
        case FUSED_MOE_U8: load_as<uint8_t>(s, 0); break;
        default: load_as<uint16_t>(s, 0);
        }
        if constexpr (!Decoder::IS_4_BIT)
            for (auto &row_bits : bits) row_bits[0] = __float_as_uint(float_of(row_bits[0], s.dtype));
    }

    __device__ void load(const Scales &s, int k_tile) {
        if (s.k_shift == ONE_BLOCK) return;
        if constexpr (Decoder::CODE == Code::E2M1)
            load_as<uint8_t>(s, k_tile);
        else if constexpr (Decoder::NARROW)
            load_as<uint16_t>(s, k_tile);
        else if (Decoder::CODE == Code::E4M3 || s.dtype == FUSED_MOE_F32) /* fp8_block's are float32 */
            load_as<uint32_t>(s, k_tile);
        else
            load_as<uint16_t>(s, k_tile);
    }

    template <typename Bits>
    __device__ void load_as(const Scales &s, int k_tile) {
        int column = s.k_shift == ONE_BLOCK ? 0 : 2 * k_tile >> (s.k_shift - 5);
        bool halves = s.k_shift == 5;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            if (half && !halves) break;
            uint32_t c = min(column + half, s.col_blocks - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) bits[i][half] = __ldg((const Bits *)s.scale + (first[i] + c));
            if (Decoder::CODE == Code::INT4 && s.zero)
#pragma unroll
                for (int i = 0; i < 2; i++) zero[i][half] = __ldg(s.zero + (first[i] + c));
        }
    }
};

/* --- fragments ------------------------------------------------------------------------------------------ */

/* Where this thread's rows of a subtile's codes are: its 16-byte chunk c is at offset ^ 16 c. The second row, eight
 * on, is swizzled alike. */
template <int ROW_BYTES>
__device__ inline uint32_t codes_offset() {
    uint32_t row = 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4, offset = ROW_BYTES * row;
    return offset ^ (offset >> 3 & (ROW_BYTES - 16));
}

/* A (64 x 64) of the subtile whose codes for this thread begin at `codes`: words 4 j .. 4 j + 3 are its columns 16 j
 * .. 16 j + 15. Loads the scales of k-tile next. */
template <class Decoder>
__device__ __forceinline__ void make_fragments(uint32_t (&a)[16], const Decoder &decoder, uint32_t codes,
                                               RowScales<Decoder> &scales, const Scales &s, int next) {
    constexpr int HALVES = RowScales<Decoder>::HALVES;
    typename Decoder::RowFactor factor[2][HALVES];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
            factor[i][half] = half && s.k_shift > 5
                                  ? factor[i][0]
                                  : Decoder::factor(scales.bits[i][half], scales.zero[i][half], s.dtype);
    scales.load(s, next);
#pragma unroll
    for (int c = 0; c < Decoder::ROW_BYTES / 16; c++) {
        uint4 q[2];
#pragma unroll
        for (int i = 0; i < 2; i++) q[i] = ld_shared_v4((codes ^ 16 * c) + 8 * Decoder::ROW_BYTES * i);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint4 &v = q[i];
            if constexpr (Decoder::IS_4_BIT) { /* a chunk is two steps of 16 columns */
                const auto &f = factor[i][c];
                a[8 * c + i] = decoder.pair(v.x, f);
                a[8 * c + i + 2] = decoder.pair(v.y, f);
                a[8 * c + i + 4] = decoder.pair(v.z, f);
                a[8 * c + i + 6] = decoder.pair(v.w, f);
            } else { /* a chunk is one */
                a[4 * c + i] = decoder.pair(v.x, v.y, factor[i][0]);
                a[4 * c + i + 2] = decoder.pair(v.z, v.w, factor[i][0]);
            }
        }
    }
}

} // namespace sm90
} // namespace fused_moe
