/* Few rows' B, a quantised weight as published: codes in shared memory become fragments in registers.
 *
 * A stage has 64 bytes of each row: one k-tile of 8-bit codes, or two of 4-bit codes. Chunk c of line l is
 * swizzled to c ^ (l / 2 % 4), so that the eight rows of a fragment are in different banks. A warp reads
 * its own columns alone: each code is dequantised once, by the thread whose fragment it is in.
 *
 * A group is the columns of a row that share a scale. A row's four lanes hold four groups' scales, one
 * each, and broadcast a group's where its columns begin. They load the next four when they begin to use
 * these, so loads have four groups' time.
 *
 * Past the depth A is zeros, so B must be finite there. Codes past the depth and scales past the last are
 * zeros. In int4 a code of zero is a value, so quantized_reason() lets no group of int4 reach past the
 * depth. */
#pragma once

#include "../dispatch.cuh"
#include "dequantizer.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {

constexpr int ROW_BYTES = 64; /* a row's codes in a stage */

typedef struct {
    const uint8_t *codes; /* NULL: no such row                               */
    uint32_t scale;       /* index of its first scale, and of its zero point */
    uint32_t weight;      /* 0 or 1: which of a QuantizedOperand's arrays    */
} QuantizedRow;

typedef struct {
    const QuantizedRow *row; /* shared [extent] */
    const void *scale[2];
    const int8_t *zero[2]; /* NULL: zeros */
    int32_t num_groups;    /* of a row                                          */
    int32_t log_group;     /* of a group's columns; LOG_WHOLE_ROW: a row is one */
    FusedMoeDtype scale_dtype;
} QuantizedOperand;

constexpr int LOG_WHOLE_ROW = 29; /* four such groups are 2^31 columns */

template <class Dequantizer, int ROWS>
struct QuantizedColumns {
    using T = typename Dequantizer::T;
    using Shape = FewRows<ROWS>;
    using Origin = QuantizedRow;
    using Operand = QuantizedOperand;
    static constexpr int K_TILES = Dequantizer::PER_BYTE;
    static constexpr int STAGES = ROWS == 16 ? (K_TILES == 2 ? 4 : 6) : (K_TILES == 2 ? 3 : 4);
    static constexpr bool MAY_SKIP_ROWS = true;
    static constexpr int STAGE_COLUMNS = K_TILES * Shape::BK, STEPS = STAGE_COLUMNS / 16;
    /* Blocks of 8 of a warp's columns. A thread has one row of the weight in each. */
    static constexpr int BLOCKS = 2 * Shape::GROUPS_N;
    static constexpr int CHUNKS = ROW_BYTES / 16, LINES = Shape::THREADS / CHUNKS, LOADS = Shape::BN / LINES;
    static constexpr int WORDS = K_TILES == 2 ? 4 : 2; /* of a row, read at once: 32 or 16 columns */
    using Stage = uint8_t[Shape::BN * ROW_BYTES];
    using Stored = typename Dequantizer::Stored;
    using Factor = typename Dequantizer::Factor;

    const Operand operand;
    const Dequantizer dequantizer;

    /* loads */
    const uint8_t *next[LOADS];
    unsigned exists = 0; /* bit i: load i has a row */
    int left;            /* columns from this thread's first to the depth */
    uint32_t dst;

    /* fragments */
    int k = 0; /* first column of the stage */
    const QuantizedRow *rows;
    uint32_t address; /* in stage 0: this thread's first row's chunk 0, and the thread's word of it */
    uint32_t word[BLOCKS][WORDS];
    Stored next_group[BLOCKS];                 /* of this lane's next group          */
    Factor lane_group[BLOCKS], factor[BLOCKS]; /* of this lane's group; of this step */
    uint32_t fragment[Shape::GROUPS_N][4];     /* of this step                       */

    __device__ QuantizedColumns(const Operand &b, int depth, Stage &first) : operand(b) {
        int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        left = depth - chunk * 16 * Dequantizer::PER_BYTE;
        dst = shared_address(first) + swizzled(line, chunk);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint8_t *codes = b.row[line + i * LINES].codes;
            if (codes) exists |= 1u << i;
            next[i] = codes + chunk * 16;
        }
        int row = threadIdx.x / 32 * Shape::WARP_COLUMNS + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        rows = b.row + row;
        address = shared_address(first) + swizzled(row, 0) + (K_TILES == 1 ? t / 2 * 4 : 0);
        load_group(t);
    }

    /* A chunk of 16 bytes in a stage. */
    __device__ static uint32_t swizzled(int line, int chunk) {
        return line * ROW_BYTES + (chunk ^ line / 2 % 4) * 16;
    }

    __device__ void load(uint32_t stage_offset) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            cp_async(dst + stage_offset + i * LINES * ROW_BYTES, next[i], left > 0 && exists >> i & 1);
            next[i] += ROW_BYTES;
        }
        left -= STAGE_COLUMNS;
    }

    /* Issues the loads of a group's scale and zero point, for each row. */
    __device__ void load_group(int group) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            QuantizedRow row = rows[8 * j];
            next_group[j] = {0, 0};
            if (row.codes && group < operand.num_groups)
                next_group[j] = Dequantizer::stored(row.weight ? operand.scale[1] : operand.scale[0],
                                                    row.weight ? operand.zero[1] : operand.zero[0],
                                                    (int64_t)row.scale + group, operand.scale_dtype);
        }
    }

    __device__ void begin_stage() {
        if (k % (4u << operand.log_group) == 0) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++)
                lane_group[j] = Dequantizer::factor(next_group[j], operand.scale_dtype);
            load_group((k >> operand.log_group) + 4 + threadIdx.x % 4);
        }
        k += STAGE_COLUMNS;
    }

    __device__ void read(uint32_t stage_offset, int step) {
        if (K_TILES == 2 && step % 2) return; /* the step before read them, too */
        uint32_t chunk = (address + stage_offset) ^ step / K_TILES * 16;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            uint32_t source = chunk + 8 * j * ROW_BYTES;
            if constexpr (K_TILES == 2) {
                uint4 v = ld_shared_v4(source);
                word[j][0] = v.x, word[j][1] = v.y, word[j][2] = v.z, word[j][3] = v.w;
            } else {
                word[j][0] = ld_shared_u32(source), word[j][1] = ld_shared_u32(source + 8);
            }
        }
    }

    __device__ void make(int step) {
        constexpr int LEAST_GROUP = K_TILES == 2 ? 32 : STAGE_COLUMNS;
        bool may_begin_group = 16 * step % LEAST_GROUP == 0; /* known at compile time */
        if (may_begin_group && (step == 0 || 1 << operand.log_group < STAGE_COLUMNS)) {
            int owner = (k - STAGE_COLUMNS + 16 * step) >> operand.log_group & 3;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                factor[j].scale = __shfl_sync(~0u, lane_group[j].scale, owner, 4);
                if constexpr (Dequantizer::HAS_ZEROS)
                    factor[j].zero = __shfl_sync(~0u, lane_group[j].zero, owner, 4);
            }
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                fragment[j / 2][j % 2 * 2 + i] = dequantizer.pair(word[j][step % K_TILES * 2 + i], factor[j]);
    }
};

/* --- weights -------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *codes; /* [E,out,row_bytes] */
    int64_t row_bytes;
    int32_t out;
    int32_t block_out, row_blocks; /* rows that share scales; such blocks in a matrix */
} QuantizedWeight;

typedef struct { /* one, or gate and up in the same format */
    QuantizedWeight weight[2];
    QuantizedOperand operand; /* without `row` */
} QuantizedWeights;

__device__ inline QuantizedRow quantized_row(const QuantizedWeights &w, int which, int64_t expert,
                                             int64_t row) {
    const QuantizedWeight weight = which ? w.weight[1] : w.weight[0];
    int64_t block = expert * weight.row_blocks + row / weight.block_out;
    return {weight.codes + (expert * weight.out + row) * weight.row_bytes,
            (uint32_t)(block * w.operand.num_groups), (uint32_t)which};
}

/* --- host ----------------------------------------------------------------------------------------------- */

inline void set_weight(QuantizedWeights &weights, int which, const FusedMoeQuantizedWeight &w) {
    QuantizedWeight &weight = weights.weight[which];
    weight.codes = (const uint8_t *)w.data;
    weight.row_bytes = w.in * fused_moe_format(w.format).bits / 8;
    weight.out = (int32_t)w.out;
    weight.block_out = (int32_t)w.block_out;
    weight.row_blocks = (int32_t)ceil_div(w.out, w.block_out);
    QuantizedOperand &operand = weights.operand;
    operand.scale[which] = w.scale;
    operand.zero[which] = w.zero;
    operand.num_groups = (int32_t)ceil_div(w.in, w.block_in);
    operand.log_group = LOG_WHOLE_ROW;
    for (int log = 0; log < LOG_WHOLE_ROW && w.block_in < w.in; log++)
        if (w.block_in >> log == 1) operand.log_group = log;
    operand.scale_dtype = w.scale_dtype;
}

template <class Dequantizer_>
struct DequantizerType { /* without a Dequantizer, which only device code can construct */
    using Dequantizer = Dequantizer_;
};

template <typename T, typename Fn>
int with_dequantizer(const FusedMoeQuantizedWeight &w, FusedMoeDtype dtype, Fn fn) {
    return with_format(w.format, [&](auto format) {
        constexpr FusedMoeFormatFacts FORMAT = fused_moe_format(format.value);
        constexpr Code CODE = Code(FORMAT.code);
        if constexpr (FORMAT.scales == FUSED_MOE_SCALES_E8M0) /* bf16 has every one */
            return fn(DequantizerType<Dequantizer<T, CODE, std::is_same_v<T, __nv_bfloat16>>>());
        else if constexpr (FORMAT.bits == 8)
            return fn(DequantizerType<Dequantizer<T, CODE, false>>());
        else
            return w.scale_dtype == dtype ? fn(DequantizerType<Dequantizer<T, CODE, true>>())
                                          : fn(DequantizerType<Dequantizer<T, CODE, false>>());
    });
}

/* Calls fn with the FewRowsTile for R rows of E experts. */
template <typename Fn>
int with_quantized_tile(int64_t R, int32_t E, const FusedMoeQuantizedWeight &w, FusedMoeDtype dtype, Fn fn) {
    auto with_rows = [&](auto type) {
        using Dequantizer = typename decltype(type)::Dequantizer;
        return fused_moe_few_rows(R, E) == 16 ? fn(FewRowsTile<QuantizedColumns<Dequantizer, 16>>())
                                              : fn(FewRowsTile<QuantizedColumns<Dequantizer, 64>>());
    };
    return dtype == FUSED_MOE_BF16 ? with_dequantizer<__nv_bfloat16>(w, dtype, with_rows)
                                   : with_dequantizer<__half>(w, dtype, with_rows);
}

/* Whether a GEMM of R rows of E experts reads the quantised weight, or why not. */
inline FusedMoeReason quantized_reason(const FusedMoeWeight &weight, int64_t R, int32_t E,
                                       FusedMoeDtype dtype) {
    const FusedMoeQuantizedWeight *w = weight.quantized;
    const ScheduleOverride &asked = schedule_override();
    if (dtype != FUSED_MOE_BF16 && dtype != FUSED_MOE_F16) return FUSED_MOE_OTHER_DTYPE;
    if (R == 0) return FUSED_MOE_NO_ROWS;
    if (R > fused_moe_most_quantized_rows(false, false) * E || asked.no_tails ||
        (asked.quantized_rows >= 0 && R > (int64_t)asked.quantized_rows * E))
        return FUSED_MOE_MANY_ROWS;
    if (!w || w->transposed || w->tile_scales) return FUSED_MOE_STRIDES;
    FusedMoeFormatFacts format = fused_moe_format(w->format);
    bool is_4_bit = format.bits == 4, is_int4 = format.code == FUSED_MOE_CODE_INT4;
    bool row_is_group = w->block_in >= w->in, is_power = (w->block_in & (w->block_in - 1)) == 0;
    int64_t step = !is_4_bit ? 64 : row_is_group && is_int4 ? 128 : 32;
    if (w->in % step) return FUSED_MOE_WIDTH;
    if (!row_is_group && !(is_power && w->block_in >= (is_4_bit ? 32 : 64))) return FUSED_MOE_STRIDES;
    if ((uintptr_t)w->data % 16) return FUSED_MOE_UNALIGNED;
    int64_t scales = E * ceil_div(w->out, w->block_out) * ceil_div(w->in, w->block_in);
    return scales <= UINT32_MAX ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace fused_moe::sm80
