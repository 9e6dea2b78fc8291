/* Published codes to pairs of 16-bit values: two neighbouring elements of k in a word, as in mma's B
 * fragments.
 *
 * In every 16 k of a row a thread has k = 2 t, 2 t + 1 and 2 t + 8, 2 t + 9, t = lane % 4: byte t of two
 * words of 4-bit codes, or half of two words of 8-bit ones. PRMT's selector says which, at no cost.
 *
 * A value is that of reference.dequantize: (code - zero) scale, rounded once. Where code - zero and scale
 * are exact in T (IN_16_BITS) that is one product in T; else it is formed in float32. */
#pragma once

#include <type_traits>

#include "../common/pairs.cuh"

namespace fused_moe::sm80 {

template <typename T_, Code CODE, bool IN_16_BITS>
struct Dequantizer {
    using T = T_;
    static constexpr int PER_BYTE = 8 / BITS_OF<CODE>;
    static constexpr bool HAS_ZEROS = CODE == Code::INT4;
    static_assert(!IN_16_BITS || PER_BYTE == 2, "scales of 8-bit codes are multiplied in float32");

    /* A scale and a zero point as stored; none: zeros. */
    struct Stored {
        uint32_t scale;
        int32_t zero;
    };

    /* A group's, for arithmetic. */
    struct Factor {
        uint32_t zero;                                         /* INT4: PairOf::INTEGER + 8 + zero, twice */
        std::conditional_t<IN_16_BITS, uint32_t, float> scale; /* IN_16_BITS: in T, twice */
    };

    uint32_t selector[CODE == Code::INT8 ? 2 : 1];

    __device__ Dequantizer() {
        uint32_t t = threadIdx.x % 4, first = t % 2 * 2; /* byte of a half */
        if constexpr (PER_BYTE == 2) {
            selector[0] = 0x4440 + t; /* and zeros */
        } else if constexpr (CODE == Code::E4M3) {
            selector[0] = 0x9180 + first * 0x1111; /* each with its sign */
        } else {
            selector[0] = 0x7440 + first; /* and 4b0000 */
            selector[1] = 0x7441 + first;
        }
    }

    __device__ static Stored stored(const void *scale, const int8_t *zero, int64_t i, FusedMoeDtype dtype) {
        Stored s = {0, 0};
        if constexpr (CODE == Code::E2M1)
            s.scale = __ldg((const uint8_t *)scale + i);
        else if (!IN_16_BITS && dtype == FUSED_MOE_F32)
            s.scale = __ldg((const uint32_t *)scale + i);
        else
            s.scale = __ldg((const uint16_t *)scale + i);
        if (HAS_ZEROS && zero) s.zero = __ldg((const signed char *)zero + i);
        return s;
    }

    __device__ static Factor factor(const Stored &s, FusedMoeDtype dtype) {
        Factor f = {};
        if constexpr (HAS_ZEROS) f.zero = PairOf<T>::INTEGER + (8 + s.zero) * 0x10001;
        if constexpr (CODE == Code::E2M1 && IN_16_BITS) {
            f.scale = power_pair(s.scale * 0x10001);
        } else if constexpr (CODE == Code::E2M1) {
            f.scale = float_of_e8m0(s.scale);
        } else if constexpr (IN_16_BITS) {
            f.scale = s.scale * 0x10001;
        } else if (dtype == FUSED_MOE_BF16) {
            f.scale = __uint_as_float(s.scale << 16);
        } else if (dtype == FUSED_MOE_F16) {
            f.scale = __half2float(__ushort_as_half((unsigned short)s.scale));
        } else {
            f.scale = __uint_as_float(s.scale);
        }
        return f;
    }

    /* This thread's pair of a word of 8 or 4 codes. */
    __device__ uint32_t pair(uint32_t word, const Factor &f) const {
        if constexpr (CODE == Code::INT4) {
            /* the byte's codes to bits 0 and 16 */
            uint32_t integer =
                lop3_and_or(prmt(word, 0, selector[0]) * 0x1001, 0x000f000f, PairOf<T>::INTEGER);
            return times_scale(word_of<T>(__hsub2(pair_of<T>(integer), pair_of<T>(f.zero))), f);
        } else if constexpr (CODE == Code::E2M1) {
            constexpr int SHIFT = PairOf<T>::E2M1_SHIFT;
            uint32_t byte = prmt(word, 0, selector[0]);
            uint32_t magnitude = byte * (0x1001 << SHIFT) & 0x00070007u << SHIFT;
            uint32_t bits = lop3_and_or(byte * (0x1001 << 12), 0x80008000, magnitude);
            return times_scale(multiply_pair<T>(bits, PairOf<T>::E2M1_FACTOR), f);
        } else if constexpr (CODE == Code::E4M3) {
            /* fp16 of the value / 256. A NaN, and it alone, times 36864 is infinite, and that times 0 is
             * NaN. */
            using H = __half;
            uint32_t small = prmt(word, 0, selector[0]) << 7 & 0xbf80bf80;
            uint32_t zero_or_nan = multiply_pair<H>(multiply_pair<H>(small, 0x78807880), 0);
            float2 v = floats_of(__hfma2(pair_of<H>(small), pair_of<H>(0x5c005c00), pair_of<H>(zero_or_nan)));
            return scaled_pair<T>(v.x, v.y, f.scale);
        } else { /* 2^23 + 128 + code, less that */
            static_assert(CODE == Code::INT8);
            word ^= 0x80808080;
            float low = __uint_as_float(prmt(word, 0x4b000000, selector[0]));
            float high = __uint_as_float(prmt(word, 0x4b000000, selector[1]));
            return scaled_pair<T>(low - 8388736.f, high - 8388736.f, f.scale);
        }
    }

  private:
    __device__ static uint32_t times_scale(uint32_t exact, const Factor &f) {
        if constexpr (IN_16_BITS) {
            return multiply_pair<T>(exact, f.scale);
        } else {
            float2 v = floats_of(pair_of<T>(exact));
            return scaled_pair<T>(v.x, v.y, f.scale);
        }
    }
};

} // namespace fused_moe::sm80
