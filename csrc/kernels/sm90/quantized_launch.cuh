/* The host's side of quantised weights: which ones the kernels take, and a launch's parameters. */
#pragma once

#include "gemm.cuh"
#include "launch.cuh"

namespace fused_moe {
namespace sm90 {

/* Whether int4's scales have another dtype than x. Those of GPTQ and AWQ are fp16, whatever the model's. */
inline bool has_other_scales(FusedMoeDtype dtype, const FusedMoeQuantizedWeight &w) {
    return fused_moe_format(w.format).code == FUSED_MOE_CODE_INT4 && w.scale_dtype != dtype;
}

/* The kernels that there are: of bf16 x for every code, of fp16 x for int4 with scales of fp16. With other
 * scales there are none by column. What has none is dequantised. (have_kernels of quantized/tiles.py) */
inline bool has_dequantizer(FusedMoeDtype dtype, const FusedMoeQuantizedWeight &w, bool by_column) {
    if (dtype == FUSED_MOE_F16)
        return fused_moe_format(w.format).code == FUSED_MOE_CODE_INT4 && !has_other_scales(dtype, w);
    return !by_column || !has_other_scales(dtype, w);
}

/* Whether a stage has several groups of columns. */
inline bool has_small_groups(const FusedMoeQuantizedWeight &w) {
    return w.block_in < MAX_STAGE_COLUMNS && w.block_in < w.in;
}

/* Calls fn with a dequantizer. int4 has two, one of them for small groups, and in bf16 a third one, for other
 * scales. */
template <bool BY_COLUMN = false, typename Fn>
int with_dequantizer(FusedMoeDtype dtype, const FusedMoeQuantizedWeight &w, Fn fn) {
    auto with_int4 = [&](auto t) {
        using T = decltype(t);
        if constexpr (!BY_COLUMN && std::is_same_v<T, __nv_bfloat16>)
            if (has_other_scales(dtype, w)) return fn(Dequantizer<T, Code::INT4, true, false, true>());
        if constexpr (!BY_COLUMN)
            if (!has_small_groups(w)) return fn(Dequantizer<T, Code::INT4, false>());
        return fn(Dequantizer<T, Code::INT4, true, BY_COLUMN>());
    };
    if (dtype == FUSED_MOE_F16) return with_int4(__half());
    return with_format(w.format, [&](auto format) {
        constexpr FusedMoeFormatFacts FORMAT = fused_moe_format(format.value);
        if constexpr (FORMAT.code == FUSED_MOE_CODE_INT4)
            return with_int4(__nv_bfloat16());
        else
            return fn(Dequantizer<__nv_bfloat16, Code(FORMAT.code), FORMAT.is_grouped, BY_COLUMN>());
    });
}

/* Calls fn with the configuration for tiles of more than 16 rows. */
template <class Dequantizer, bool GATHER, typename Fn>
int with_quantized_config(int32_t tile_rows, Fn fn) {
    if (tile_rows == 64) return fn(QuantizedConfig<Dequantizer, GATHER, Height::SOME>());
    if constexpr (!Dequantizer::OTHER_SCALES)
        if (tile_rows > FUSED_MOE_TILE_ROWS) return fn(QuantizedConfig<Dequantizer, GATHER, Height::TALL>());
    return fn(QuantizedConfig<Dequantizer, GATHER, Height::MANY>());
}

/* Whether the weight is dequantised first. */
inline bool has_many_rows(int64_t R, int32_t E, bool is_transposed) {
    int64_t asked = schedule_override().quantized_rows;
    return R > (asked < 0 ? fused_moe_most_quantized_rows(true, is_transposed) : asked) * E;
}

/* A map of `rows` tiles of 64 rows from the one at `data` on, of [E,out/64,count,width]: boxes of (1, tiles,
 * box, width) elements. */
inline int tiles_map(CUtensorMap *map, CUtensorMapDataType dtype, int bytes, const void *data, int32_t E,
                     int64_t out, int64_t rows, int64_t count, int64_t width, uint32_t box, uint32_t tiles) {
    const uint64_t sizes[] = {(uint64_t)width, (uint64_t)count, (uint64_t)rows, (uint64_t)E};
    const uint64_t row = (uint64_t)(width * bytes), tile = count * row;
    const uint64_t strides[] = {row, tile, (uint64_t)(out / SUBTILE) * tile};
    const uint32_t boxes[] = {(uint32_t)width, box, tiles, 1};
    return encode_tensor_map(map, dtype, 4, data, sizes, strides, boxes, CU_TENSOR_MAP_SWIZZLE_NONE);
}

/* A weight as a GEMM reads it: the second packing of a transposed one. */
inline FusedMoeQuantizedWeight packing_of(const FusedMoeQuantizedWeight &w) {
    if (!w.transposed) return w;
    FusedMoeQuantizedWeight t = w;
    t.data = w.data_t, t.scale = w.scale_t, t.zero = w.zero_t;
    t.out = w.in, t.in = w.out, t.block_out = w.block_in, t.block_in = w.block_out;
    return t;
}

/* Whether each column has scales: the weight is transposed, and its rows had them. */
inline bool is_by_column(const FusedMoeQuantizedWeight &packing) {
    return packing.block_in == 1;
}

/* Columns, or by column rows, that share a scale. */
inline int64_t group_of(const FusedMoeQuantizedWeight &packing) {
    if (is_by_column(packing)) return packing.block_out < packing.out ? packing.block_out : packing.out;
    return packing.block_in < packing.in ? packing.block_in : packing.in;
}

/* Sets part i of a GEMM's weight to rows [first_row, first_row + rows) of a quantised one; by column, to all
 * rows. */
template <class Config>
int set_weight(QuantizedParams &p, int i, const FusedMoeQuantizedWeight &codes, int32_t E, int64_t first_row,
               int64_t rows) {
    using Dequantizer = typename Config::Weight::Dequantizer;
    constexpr int64_t BOX_ROWS = Dequantizer::TILE_BYTES / BOX_ROW_BYTES; /* of a tile */
    constexpr uint32_t BOX = Config::BOX;                                 /* tiles */
    /* Columns, or by column rows, that one load of scales is for. */
    constexpr int64_t SPAN = Dequantizer::BY_COLUMN ? BOX * SUBTILE : Config::COLUMNS;
    int64_t block = group_of(codes);
    int64_t num_groups = ceil_div(Dequantizer::BY_COLUMN ? codes.out : codes.in, block),
            tile = first_row / SUBTILE, k_tiles = codes.in / SUBTILE;
    Scales &s = p.scales;
    s.bytes = codes.scale_dtype == FUSED_MOE_U8 ? 1 : codes.scale_dtype == FUSED_MOE_F32 ? 4 : 2;
    s.rows = codes.tile_scales;
    s.groups = block < SPAN && num_groups > 1 ? (int32_t)(SPAN / block) : 1;
    s.shift = 0;
    while (num_groups == 1 ? s.shift < 31 : SPAN << s.shift < block) s.shift++;
    s.has_zeros = codes.zero;
    int32_t num_scales = s.groups * (Dequantizer::BY_COLUMN ? SUBTILE : (int32_t)BOX * s.rows);
    s.box_bytes =
        (int32_t)BOX * Config::K_TILES * Dequantizer::TILE_BYTES + num_scales * (s.bytes + s.has_zeros);

    const char *data = (const char *)codes.data + tile * k_tiles * Dequantizer::TILE_BYTES;
    int status = tiles_map(&p.codes[i], CU_TENSOR_MAP_DATA_TYPE_UINT64, 8, data, E, codes.out, rows / SUBTILE,
                           k_tiles * BOX_ROWS, BOX_ROW_BYTES / 8, Config::K_TILES * BOX_ROWS, BOX);
    auto scales_map = [&](CUtensorMap *map, CUtensorMapDataType dtype, int bytes, const void *scales) {
        if (Dequantizer::BY_COLUMN)
            return tiles_map(map, dtype, bytes, scales, E, num_groups * SUBTILE, num_groups, k_tiles, SUBTILE,
                             1, s.groups);
        scales = (const char *)scales + tile * num_groups * s.rows * bytes;
        return tiles_map(map, dtype, bytes, scales, E, codes.out, rows / SUBTILE, num_groups, s.rows,
                         s.groups, BOX);
    };
    auto scale_dtype = s.bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                       : s.bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                      : CU_TENSOR_MAP_DATA_TYPE_UINT32;
    if (status == FUSED_MOE_OK) status = scales_map(&p.scale[i], scale_dtype, s.bytes, codes.scale);
    if (status == FUSED_MOE_OK && s.has_zeros)
        status = scales_map(&p.zero[i], CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, codes.zero);
    return status;
}

/* Whether kernels of x in this dtype read the weight: it is in tiles, and a scale is for 32 columns (by
 * column: rows), 64, 128 and so on, or for all. Past the last column a stage has codes of zero. In int4 these
 * are values, -8, which a large scale makes infinite, so an int4 weight of one group must fill its stages. By
 * column a stage is one k-tile, which is always full. */
inline bool is_readable_quantized(FusedMoeDtype dtype, const FusedMoeWeight &w) {
    if (!w.quantized || !w.quantized->tile_scales || (w.quantized->transposed && !w.quantized->data_t))
        return false;
    FusedMoeQuantizedWeight codes = packing_of(*w.quantized);
    bool by_column = is_by_column(codes),
         is_int4 = fused_moe_format(codes.format).code == FUSED_MOE_CODE_INT4;
    if (!has_dequantizer(dtype, codes, by_column)) return false;
    if (!is_aligned(codes.data) || !is_aligned(codes.scale) || !is_aligned(codes.zero)) return false;
    int64_t group = group_of(codes);
    if (group == (by_column ? codes.out : codes.in))
        return by_column || !is_int4 || codes.in % MAX_STAGE_COLUMNS == 0;
    return group >= 32 && (group & (group - 1)) == 0;
}

} // namespace sm90
} // namespace fused_moe
