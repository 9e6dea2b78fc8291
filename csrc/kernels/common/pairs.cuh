/* Codes of a quantised weight as pairs of 16-bit values: two neighbouring elements of k in a word, as in
 * operands of MMAs. sm80/dequantizer.cuh makes them from the published layout, sm90/dequantizer.cuh from
 * tiles. */
#pragma once

#include "numeric.cuh"

namespace fused_moe {

/* FusedMoeCode, for templates. */
enum class Code {
#define X(code, bits) code,
    FUSED_MOE_CODES(X)
#undef X
};

/* The dequantizers take a format's zero points and kind of scales from its kind of code. */
#define X(name, code, zeros, scales, block)                                                                  \
    static_assert(Code::code == Code::INT4 || !zeros, #name ": expected zero points for INT4 alone");        \
    static_assert((Code::code == Code::E2M1) == (FUSED_MOE_SCALES_##scales == FUSED_MOE_SCALES_E8M0),        \
                  #name ": expected e8m0 scales for E2M1, and for E2M1 alone");
FUSED_MOE_FORMATS(X)
#undef X

template <Code CODE>
constexpr int BITS_OF = fused_moe_code_bits((FusedMoeCode)CODE);

/* Words of T for codes of 4 bits; each has its value twice. INTEGER | n is the number 2^bits + n for n
 * below 16. E2M1's bits, shifted to T's exponent and fraction, are its value divided by E2M1_FACTOR. */
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

/* The pair of two values, each multiplied by its scale in float32 and rounded. */
template <typename T>
__device__ inline uint32_t scaled_pair(float low, float high, float2 scale) {
    alignas(4) T pair[2];
    from_accums(pair, low * scale.x, high * scale.y);
    return *(const uint32_t *)pair;
}
template <typename T>
__device__ inline uint32_t scaled_pair(float low, float high, float scale) {
    return scaled_pair<T>(low, high, make_float2(scale, scale));
}

/* Two bf16 scales from e8m0, one in each halfword: 0 is subnormal, 255 NaN. */
__device__ inline uint32_t power_pair(uint32_t e8m0) {
    auto power = pair_of<__nv_bfloat16>(__vmaxu2(e8m0 * 128, 0x400040)), zero = pair_of<__nv_bfloat16>(0);
    return word_of<__nv_bfloat16>(__hfma2(power, zero, power));
}

__device__ inline float float_of_e8m0(uint32_t e8m0) {
    return __uint_as_float(e8m0 == 0 ? 0x400000 : e8m0 == 255 ? 0x7fc00000 : e8m0 << 23);
}

/* --- host ----------------------------------------------------------------------------------------------- */

/* Calls fn with std::integral_constant<FusedMoeFormat, format>. */
template <typename Fn>
int with_format(FusedMoeFormat format, Fn fn) {
    switch (format) {
#define X(name, ...)                                                                                         \
    case FUSED_MOE_FORMAT_##name:                                                                            \
        return fn(std::integral_constant<FusedMoeFormat, FUSED_MOE_FORMAT_##name>());
        FUSED_MOE_FORMATS(X)
#undef X
    default: return FUSED_MOE_UNSUPPORTED_DTYPE;
    }
}

/* Whether one kernel dequantises both. */
inline bool are_alike(const FusedMoeQuantizedWeight &a, const FusedMoeQuantizedWeight &b) {
    FusedMoeFormatFacts x = fused_moe_format(a.format), y = fused_moe_format(b.format);
    return x.code == y.code && x.is_grouped == y.is_grouped && a.scale_dtype == b.scale_dtype &&
           a.block_in == b.block_in && a.tile_scales == b.tile_scales && !a.zero == !b.zero;
}

} // namespace fused_moe
