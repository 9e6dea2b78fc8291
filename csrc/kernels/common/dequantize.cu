/* Dequantises a weight: (code - zero) scale in float32, rounded to the GEMM's dtype. reference.dequantize
 * does the same in PyTorch. */
#include "dequantize.cuh"

#include "../../quantized_tile.h"
#include "launch.cuh"
#include "pairs.cuh"

namespace fused_moe {

typedef struct {
    FusedMoeQuantizedWeight weight;
    void *out;           /* [E,out,in] */
    const int32_t *offs; /* [E] experts without rows are skipped; NULL: none is */
    int64_t row_blocks, col_blocks;
    int32_t E;
} Dequantize;

/* --- codes ---------------------------------------------------------------------------------------------- */

/* The exponents' biases differ by 120, so 2^120 turns the bits of a code into its value, also if
 * subnormal. */
__device__ inline float from_e4m3(uint32_t code) {
    float magnitude = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    if ((code & 0x7f) == 0x7f) magnitude = __uint_as_float(0x7fc00000);
    return code & 0x80 ? -magnitude : magnitude;
}

__device__ inline float from_e2m1(uint32_t code) {
    float magnitude = __uint_as_float((code & 7) << 22) * 0x1p126f;
    return code & 8 ? -magnitude : magnitude;
}

/* The bytes of CHUNK codes. n of them exist; n is even for 4 bits. */
template <Code CODE>
__device__ inline uint2 load_codes(const uint8_t *bytes, int n, bool aligned) {
    uint32_t words[2] = {};
    if (aligned && BITS_OF<CODE> == 4) {
        words[0] = *(const uint32_t *)bytes;
    } else if (aligned) {
        return *(const uint2 *)bytes;
    } else {
#pragma unroll
        for (int i = 0; i < (BITS_OF<CODE> == 4 ? CHUNK / 2 : CHUNK); i++)
            if ((BITS_OF<CODE> == 4 ? 2 * i : i) < n) words[i / 4] |= (uint32_t)bytes[i] << 8 * (i % 4);
    }
    return make_uint2(words[0], words[1]);
}

/* The value of a code of 4 or 8 bits. Integers are put in the last bits of 2^23's fraction: that is faster
 * than converting them. */
template <Code CODE>
__device__ inline float value_of(uint32_t code) {
    if constexpr (CODE == Code::INT8) {
        return __uint_as_float(0x4b000000 | (code ^ 0x80)) - (0x1p23f + 128);
    } else if constexpr (CODE == Code::INT4) {
        return __uint_as_float(0x4b000000 | code) - (0x1p23f + 8);
    } else if constexpr (CODE == Code::E2M1) {
        return from_e2m1(code);
    } else {
        static_assert(CODE == Code::E4M3);
        return from_e4m3(code);
    }
}

/* Code i of a chunk. */
template <Code CODE>
__device__ inline float code_of(const uint2 &words, int i) {
    if (BITS_OF<CODE> == 4) return value_of<CODE>(words.x >> 4 * i & 15);
    return value_of<CODE>((i < 4 ? words.x : words.y) >> 8 * (i % 4) & 255);
}

__device__ inline float to_scale(uint8_t x) {
    return float_of_e8m0(x);
}
template <typename S>
__device__ inline float to_scale(S x) {
    return to_accum(x);
}

__device__ inline float load_scale(const FusedMoeQuantizedWeight &w, int64_t index) {
    switch (w.scale_dtype) {
    case FUSED_MOE_F32: return ((const float *)w.scale)[index];
    case FUSED_MOE_BF16: return to_scale(((const __nv_bfloat16 *)w.scale)[index]);
    case FUSED_MOE_F16: return to_scale(((const __half *)w.scale)[index]);
    default: return to_scale(((const uint8_t *)w.scale)[index]);
    }
}

/* The same of tiles. Those of codes of 8 bits have float32 scales. */
template <Code CODE>
__device__ inline float load_scale(const FusedMoeQuantizedWeight &w, int64_t index) {
    if constexpr (CODE == Code::E2M1) return to_scale(((const uint8_t *)w.scale)[index]);
    if constexpr (BITS_OF<CODE> == 8) return ((const float *)w.scale)[index];
    return load_scale(w, index);
}

/* --- kernels -------------------------------------------------------------------------------------------- */

constexpr int WARPS = 8;

__device__ inline bool is_skipped(const Dequantize &p, int expert) {
    return p.offs && p.offs[expert] == (expert ? p.offs[expert - 1] : 0);
}

/* Dequantises the published layout: one row per warp. */
template <typename T, Code CODE>
__global__ void __launch_bounds__(32 * WARPS, 4) dequantize_kernel(const __grid_constant__ Dequantize p) {
    const FusedMoeQuantizedWeight &w = p.weight;
    constexpr int CODES_PER_BYTE = BITS_OF<CODE> == 4 ? 2 : 1;
    int in = (int)w.in, block_in = (int)min(w.block_in, w.in);
    bool out_aligned = rows_are_aligned<T>(p.out, in);
    bool codes_aligned = in % CHUNK == 0 && (uintptr_t)w.data % CHUNK == 0;
    bool one_scale = in % CHUNK == 0 && block_in % CHUNK == 0; /* for a chunk */
    int64_t num_rows = p.E * w.out, step = (int64_t)gridDim.x * WARPS;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < num_rows; row += step) {
        int expert = (int)(row / w.out);
        if (is_skipped(p, expert)) continue;
        int64_t row_block = expert * p.row_blocks + (row - expert * w.out) / w.block_out;
        const uint8_t *codes = (const uint8_t *)w.data + row * in / CODES_PER_BYTE;
        for (int col = threadIdx.x % 32 * CHUNK; col < in; col += 32 * CHUNK) {
            int n = min(CHUNK, in - col), block = col / block_in, end = 0;
            uint2 words = load_codes<CODE>(codes + col / CODES_PER_BYTE, n, codes_aligned);
            float scale = 0, zero = 0;
            Accum<T> values[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                if (j == 0 || (!one_scale && j < n && col + j >= end)) {
                    if (j) block++;
                    int64_t index = row_block * p.col_blocks + block;
                    scale = load_scale(w, index);
                    zero = w.zero ? (float)w.zero[index] : 0;
                    end = (block + 1) * block_in;
                }
                values[j] = to_accum(from_accum<T>((code_of<CODE>(words, j) - zero) * scale));
            }
            store_chunk((T *)p.out + row * in + col, values, n, out_aligned);
        }
    }
}

/* A lane's codes of a row of a tile. */
template <Code CODE>
struct LaneCodes {
    static constexpr int WORDS = BITS_OF<CODE> / 2;
    uint32_t words[WORDS];

    __device__ void load(const uint32_t *p) {
        if constexpr (WORDS == 2) {
            uint2 v = __ldg((const uint2 *)p);
            words[0] = v.x, words[1] = v.y;
        } else {
            uint4 v = __ldg((const uint4 *)p);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
    }

    /* The value of column 16 s + 8 u + 2 t + i. */
    __device__ float value(int s, int u, int i) const {
        return value_of<CODE>(fused_moe_code_of_lane((FusedMoeCode)CODE, words, s, u, i));
    }
};

/* Stores columns 0, 1, 8 and 9 from the lane's p on. With 16-bit T two lanes exchange pairs, so that a quad
 * writes 32 bytes of a row at once. */
template <typename T>
__device__ inline void store_pairs(T *p, const float (&v)[2][2]) {
    if constexpr (is_half<T>) {
        uint32_t pair[2];
#pragma unroll
        for (int u = 0; u < 2; u++) from_accums((T *)&pair[u], v[u][0], v[u][1]);
        int odd = threadIdx.x % 2;
        uint32_t other = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
        uint2 four = odd ? make_uint2(other, pair[1]) : make_uint2(pair[0], other);
        *(uint2 *)(odd ? p + 6 : p) = four;
    } else {
#pragma unroll
        for (int u = 0; u < 2; u++) from_accums(p + 8 * u, Accum<T>(v[u][0]), Accum<T>(v[u][1]));
    }
}

/* Dequantises a lane's row of N neighbouring tiles. All loads come before the first store: the compiler would
 * not move a load before a store. */
template <int N, typename T, Code CODE>
__device__ inline void dequantize_lane(const FusedMoeQuantizedWeight &w, const uint32_t *codes,
                                       int64_t first_scale, unsigned col, unsigned block_in, T *out) {
    constexpr int TILE = FUSED_MOE_QUANTIZED_TILE, TILE_WORDS = 4 * TILE * LaneCodes<CODE>::WORDS;
    LaneCodes<CODE> lane_codes[N];
    float scale[2 * N], zero[2 * N]; /* one per half of a tile's row */
#pragma unroll
    for (int i = 0; i < N; i++) lane_codes[i].load(codes + i * TILE_WORDS);
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        int64_t index = first_scale + (int64_t)((col + TILE / 2 * i) / block_in) * w.tile_scales;
        scale[i] = load_scale<CODE>(w, index);
        zero[i] = CODE == Code::INT4 && w.zero ? (float)w.zero[index] : 0;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int s = 0; s < TILE / 16; s++) {
            int half = 2 * i + s / 2;
            float v[2][2];
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[j / 2][j % 2] = (lane_codes[i].value(s, j / 2, j % 2) - zero[half]) * scale[half];
            store_pairs(out + TILE * i + 16 * s, v);
        }
}

/* Dequantises a weight in tiles: eight rows per warp, one per quad, so a warp reads 256 or 512 contiguous
 * bytes. A group has 32 columns or a multiple of 32. */
template <typename T, Code CODE>
__global__ void __launch_bounds__(32 * WARPS, 4)
    dequantize_tiles_kernel(const __grid_constant__ Dequantize p) {
    constexpr int TILE = FUSED_MOE_QUANTIZED_TILE, WORDS = LaneCodes<CODE>::WORDS,
                  TILE_WORDS = 4 * TILE * WORDS;
    constexpr int AHEAD = 2; /* tiles */
    const FusedMoeQuantizedWeight &w = p.weight;
    unsigned in = (unsigned)w.in, block_in = (unsigned)min(w.block_in, w.in);
    int lane = threadIdx.x % 32;
    int64_t num_eights = p.E * w.out / 8, step = (int64_t)gridDim.x * WARPS;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; i < num_eights; i += step) {
        int64_t row = 8 * i + lane / 4, row_tile = row / TILE;
        if (is_skipped(p, (int)(row / w.out))) continue;
        const uint32_t *codes = (const uint32_t *)w.data + row_tile * (in / TILE) * TILE_WORDS;
        codes += fused_moe_first_word((FusedMoeCode)CODE, (int)(row % TILE), lane % 4);
        int64_t first_scale = row_tile * p.col_blocks * w.tile_scales;
        if (w.tile_scales == TILE) first_scale += row % TILE;
        T *out = (T *)p.out + row * in + lane % 4 * 2;
        unsigned col = 0;
        for (; col + AHEAD * TILE <= in; col += AHEAD * TILE, codes += AHEAD * TILE_WORDS)
            dequantize_lane<AHEAD, T, CODE>(w, codes, first_scale, col, block_in, out + col);
        for (; col < in; col += TILE, codes += TILE_WORDS)
            dequantize_lane<1, T, CODE>(w, codes, first_scale, col, block_in, out + col);
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

size_t dequantized_bytes(const FusedMoeQuantizedWeight &w, int32_t E, FusedMoeDtype dtype) {
    size_t bytes = dtype == FUSED_MOE_F64 ? 8 : dtype == FUSED_MOE_F32 ? 4 : 2;
    return (size_t)(E * w.out * w.in) * bytes;
}

int dequantize(void *out, const FusedMoeQuantizedWeight &w, const int32_t *offs, int32_t E,
               FusedMoeDtype dtype, void *stream) {
    Dequantize p = {};
    p.weight = w;
    p.out = out;
    p.offs = offs;
    p.row_blocks = ceil_div(w.out, w.block_out);
    p.col_blocks = ceil_div(w.in, w.block_in);
    p.E = E;
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        return with_format(w.format, [&](auto format) {
            constexpr Code CODE = Code(fused_moe_format(format.value).code);
            if (w.tile_scales)
                return launch(dequantize_tiles_kernel<T, CODE>, p, grid_for(E * w.out / 8, WARPS), 32 * WARPS,
                              0, stream);
            return launch(dequantize_kernel<T, CODE>, p, grid_for(E * w.out, WARPS), 32 * WARPS, 0, stream);
        });
    });
}

} // namespace fused_moe
