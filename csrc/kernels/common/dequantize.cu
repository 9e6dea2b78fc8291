/* Dequantises a weight: (code - zero) scale in float32, rounded to the GEMM's dtype; reference.dequantize says the
 * same in PyTorch. */
#include "dequantize.cuh"
#include "launch.cuh"
#include "numeric.cuh"

namespace fused_moe {

typedef struct {
    FusedMoeQuantizedWeight codes;
    void *out;           /* [E,out,in] */
    const int32_t *offs; /* [E] experts without rows are left out; NULL: none is */
    int64_t row_blocks, col_blocks;
    int32_t E;
} Dequantize;

/* --- codes ---------------------------------------------------------------------------------------------- */

/* The exponents' biases differ by 120: 2^120 makes the bits of a code its value, subnormal ones too. */
__device__ inline float from_e4m3(uint32_t code) {
    float magnitude = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    if ((code & 0x7f) == 0x7f) magnitude = __uint_as_float(0x7fc00000);
    return code & 0x80 ? -magnitude : magnitude;
}

__device__ inline float from_e2m1(uint32_t code) {
    float magnitude = __uint_as_float((code & 7) << 22) * 0x1p126f;
    return code & 8 ? -magnitude : magnitude;
}

__device__ inline float from_e8m0(uint32_t code) {
    if (code == 255) return __uint_as_float(0x7fc00000);
    return __uint_as_float(code ? code << 23 : 0x400000);
}

template <FusedMoeFormat format>
constexpr bool IS_4_BIT = format == FUSED_MOE_INT4 || format == FUSED_MOE_MXFP4;

/* The bytes of CHUNK codes, of which n exist; of 4 bits n is even. */
template <FusedMoeFormat format>
__device__ inline uint2 load_codes(const uint8_t *bytes, int n, bool aligned) {
    uint32_t words[2] = {};
    if (aligned && IS_4_BIT<format>) {
        words[0] = *(const uint32_t *)bytes;
    } else if (aligned) {
        return *(const uint2 *)bytes;
    } else {
#pragma unroll
        for (int i = 0; i < (IS_4_BIT<format> ? CHUNK / 2 : CHUNK); i++)
            if ((IS_4_BIT<format> ? 2 * i : i) < n) words[i / 4] |= (uint32_t)bytes[i] << 8 * (i % 4);
    }
    return make_uint2(words[0], words[1]);
}

/* The same of a weight in tiles: CHUNK codes of a row from column `col` on. A tile has them in four words, those of
 * four lanes. */
template <FusedMoeFormat format>
__device__ inline uint2 load_tiled_codes(const void *data, int64_t row, int in, int col) {
    constexpr int WORDS = IS_4_BIT<format> ? 2 : 4, TILE = 256 * WORDS; /* of a lane's row; words */
    int in_tile = row % FUSED_MOE_CODE_TILE, step = col % FUSED_MOE_CODE_TILE / 16, u = col / 8 % 2;
    int64_t index = row / FUSED_MOE_CODE_TILE * (in / FUSED_MOE_CODE_TILE) + col / FUSED_MOE_CODE_TILE;
    const uint32_t *tile = (const uint32_t *)data + index * TILE;
    tile += in_tile / 8 % 2 * (TILE / 2) + (in_tile / 16 * 32 + in_tile % 8 * 4) * WORDS;
    uint32_t words[2] = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        if constexpr (IS_4_BIT<format>) {
            uint32_t pair = tile[t * WORDS + step / 2] >> 4 * (2 * (step % 2) + u) & 0x000f000f;
            words[0] |= ((pair | pair >> 12) & 0xff) << 8 * t;
        } else {
            words[t / 2] |= (tile[t * WORDS + step] >> 16 * u & 0xffff) << 16 * (t % 2);
        }
    }
    return make_uint2(words[0], words[1]);
}

/* Code i of a chunk. */
template <FusedMoeFormat format>
__device__ inline float code_of(const uint2 &words, int i) {
    uint32_t nibble = words.x >> 4 * i & 15, byte = (i < 4 ? words.x : words.y) >> 8 * (i % 4) & 255;
    switch (format) {
    case FUSED_MOE_INT8: return (float)(int8_t)byte;
    case FUSED_MOE_INT4: return (float)((int)nibble - 8);
    case FUSED_MOE_MXFP4: return from_e2m1(nibble);
    default: return from_e4m3(byte);
    }
}

__device__ inline float load_scale(const FusedMoeQuantizedWeight &w, int64_t index) {
    switch (w.scale_dtype) {
    case FUSED_MOE_F32: return ((const float *)w.scale)[index];
    case FUSED_MOE_BF16: return to_accum(((const __nv_bfloat16 *)w.scale)[index]);
    case FUSED_MOE_F16: return to_accum(((const __half *)w.scale)[index]);
    default: return from_e8m0(((const uint8_t *)w.scale)[index]);
    }
}

/* --- kernel --------------------------------------------------------------------------------------------- */

constexpr int WARPS = 8;

/* A row for each warp; of a weight in tiles eight, of which each quad has one: so a warp reads 256 or 512 bytes of a tile,
 * and writes 64 of each row. Groups of a weight in tiles have whole chunks. */
template <typename T, FusedMoeFormat format, bool TILED>
__global__ void __launch_bounds__(32 * WARPS, 4) dequantize_kernel(const __grid_constant__ Dequantize p) {
    const FusedMoeQuantizedWeight &w = p.codes;
    constexpr int CODES_PER_BYTE = IS_4_BIT<format> ? 2 : 1, LANES = TILED ? 4 : 32, ROWS = 32 / LANES;
    int in = (int)w.in, block_in = (int)min(w.block_in, w.in), lane = threadIdx.x % 32;
    bool out_aligned = rows_are_aligned<T>(p.out, in);
    bool codes_aligned = in % CHUNK == 0 && (uintptr_t)w.data % CHUNK == 0;
    bool one_scale = TILED || (in % CHUNK == 0 && block_in % CHUNK == 0); /* for a chunk */
    int64_t num_rows = p.E * w.out, step = (int64_t)gridDim.x * WARPS * ROWS;
    int64_t row = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS + lane / LANES;
    for (; row < num_rows; row += step) {
        int expert = (int)(row / w.out);
        if (p.offs && p.offs[expert] == (expert ? p.offs[expert - 1] : 0)) continue;
        int64_t row_block =
            TILED ? row / FUSED_MOE_CODE_TILE : expert * p.row_blocks + (row - expert * w.out) / w.block_out;
        int scales = TILED ? w.tile_scales : 1; /* of a block, and this row's of them */
        int own_scale = scales == FUSED_MOE_CODE_TILE ? (int)(row % FUSED_MOE_CODE_TILE) : 0;
        const uint8_t *codes = (const uint8_t *)w.data + row * in / CODES_PER_BYTE;
#pragma unroll(TILED ? 2 : 1)
        for (int col = lane % LANES * CHUNK; col < in; col += LANES * CHUNK) {
            int n = TILED ? CHUNK : min(CHUNK, in - col), block = col / block_in, end = 0;
            uint2 words = TILED ? load_tiled_codes<format>(w.data, row, in, col)
                                : load_codes<format>(codes + col / CODES_PER_BYTE, n, codes_aligned);
            float scale = 0, zero = 0;
            Accum<T> values[CHUNK];
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                if (j == 0 || (!one_scale && j < n && col + j >= end)) {
                    if (j) block++;
                    int64_t index = (row_block * p.col_blocks + block) * scales + own_scale;
                    scale = load_scale(w, index);
                    zero = w.zero ? (float)w.zero[index] : 0;
                    end = (block + 1) * block_in;
                }
                values[j] = to_accum(from_accum<T>((code_of<format>(words, j) - zero) * scale));
            }
            store_chunk((T *)p.out + row * in + col, values, n, out_aligned);
        }
    }
}

/* --- launcher ------------------------------------------------------------------------------------------- */

size_t dequantized_bytes(const FusedMoeQuantizedWeight &codes, int32_t E, FusedMoeDtype dtype) {
    size_t bytes = dtype == FUSED_MOE_F64 ? 8 : dtype == FUSED_MOE_F32 ? 4 : 2;
    return (size_t)(E * codes.out * codes.in) * bytes;
}

int dequantize(void *out, const FusedMoeQuantizedWeight &codes, const int32_t *offs, int32_t E,
               FusedMoeDtype dtype, void *stream) {
    Dequantize p = {};
    p.codes = codes;
    p.out = out;
    p.offs = offs;
    p.row_blocks = ceil_div(codes.out, codes.block_out);
    p.col_blocks = ceil_div(codes.in, codes.block_in);
    p.E = E;
    return with_dtype(dtype, [&](auto t) {
        using T = decltype(t);
        auto run = [&](auto format) {
            constexpr FusedMoeFormat FORMAT = decltype(format)::value;
            int64_t warps = codes.tile_scales ? E * codes.out / 8 : E * codes.out;
            auto kernel =
                codes.tile_scales ? dequantize_kernel<T, FORMAT, true> : dequantize_kernel<T, FORMAT, false>;
            return launch(kernel, p, grid_for(warps, WARPS), 32 * WARPS, 0, stream);
        };
        using std::integral_constant;
        switch (codes.format) {
        case FUSED_MOE_INT8: return run(integral_constant<FusedMoeFormat, FUSED_MOE_INT8>());
        case FUSED_MOE_INT4: return run(integral_constant<FusedMoeFormat, FUSED_MOE_INT4>());
        case FUSED_MOE_MXFP4: return run(integral_constant<FusedMoeFormat, FUSED_MOE_MXFP4>());
        default: return run(integral_constant<FusedMoeFormat, FUSED_MOE_FP8>());
        }
    });
}

} // namespace fused_moe
