/* B of a tile of few rows is a quantised weight: codes in shared memory become fragments in registers.
 *
 * A stage has 64 bytes of each row: one k-tile of 8-bit codes, or two of 4-bit codes. Chunk c of line l is
 * swizzled to c ^ (l / 2 % 4), so the eight rows of a fragment are in different banks. A warp reads only its
 * columns: each code is decoded once, by the thread whose fragment it is in.
 *
 * Scales. A group is the columns of a row that share a scale. The four lanes of a row hold the scales of four
 * groups, one each, and broadcast a scale at the first column of its group. The next four are loaded when the
 * first of these four is used.
 *
 * Past the depth A is zeros, and its factors have to be finite: there codes are zeros, and scales past the
 * last are zeros, too. codes_reason() lets no group of int4 reach past the depth, since there a code of zero
 * is a value. */
#pragma once

#include "../dispatch.cuh"
#include "codes.cuh"
#include "grouped_tile.cuh"

namespace fused_moe::sm80 {

constexpr int ROW_BYTES = 64; /* of a row's codes in a stage */

typedef struct {
    const uint8_t *codes; /* NULL: the row does not exist           */
    uint32_t scale;       /* index of the first one, and zero point */
    uint32_t weight;      /* 0 or 1: whose                          */
} CodeRow;

typedef struct {
    const CodeRow *row; /* shared [extent] */
    const void *scale[2];
    const int8_t *zero[2]; /* NULL: zeros */
    int32_t num_groups;    /* of a row                                           */
    int32_t log_group;     /* of a group's columns; LOG_WHOLE_ROW: all are a group */
    FusedMoeDtype scale_dtype;
} CodedOperand;

constexpr int LOG_WHOLE_ROW = 29; /* four such groups are 2^31 columns */

template <class Decoder, int ROWS>
struct CodedColumns {
    using T = typename Decoder::T;
    using Shape = FewRows<ROWS>;
    using Origin = CodeRow;
    using Operand = CodedOperand;
    static constexpr int K_TILES = Decoder::PER_BYTE;
    static constexpr int STAGES = ROWS == 16 ? (K_TILES == 2 ? 4 : 6) : (K_TILES == 2 ? 3 : 4);
    static constexpr bool MAY_SKIP_ROWS = true;
    static constexpr int STAGE_COLUMNS = K_TILES * Shape::BK, STEPS = STAGE_COLUMNS / 16;
    /* Blocks of 8 of a warp's columns. A thread has one row of the weight in each. */
    static constexpr int BLOCKS = 2 * Shape::GROUPS_N;
    static constexpr int CHUNKS = ROW_BYTES / 16, LINES = Shape::THREADS / CHUNKS, LOADS = Shape::BN / LINES;
    static constexpr int WORDS = K_TILES == 2 ? 4 : 2; /* read at once from a row: 32 or 16 columns */
    using Stage = uint8_t[Shape::BN * ROW_BYTES];
    using Stored = typename Decoder::Stored;
    using Factor = typename Decoder::Factor;

    const Operand operand;
    const Decoder decoder;

    /* State of the loads */
    const uint8_t *next[LOADS];
    unsigned exists = 0; /* bit i: load i has a row */
    int left;            /* columns from this thread's first to the depth */
    uint32_t dst;

    /* State of the fragments */
    int k = 0; /* first column of the stage */
    const CodeRow *rows;
    uint32_t address; /* of chunk 0 of this thread's first row in stage 0, and its word */
    uint32_t word[BLOCKS][WORDS];
    Stored next_group[BLOCKS];                 /* the lane's next group               */
    Factor lane_group[BLOCKS], factor[BLOCKS]; /* the lane's group; the columns' group */
    uint32_t fragment[Shape::GROUPS_N][4];     /* of a step                           */

    __device__ CodedColumns(const Operand &b, int depth, Stage &first) : operand(b) {
        int line = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        left = depth - chunk * 16 * Decoder::PER_BYTE;
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

    /* The offset in a stage of 16 bytes of a row. */
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

    /* Begins to load the factors of a group of each row. */
    __device__ void load_group(int group) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            CodeRow row = rows[8 * j];
            next_group[j] = {0, 0};
            if (row.codes && group < operand.num_groups)
                next_group[j] = Decoder::stored(row.weight ? operand.scale[1] : operand.scale[0],
                                                row.weight ? operand.zero[1] : operand.zero[0],
                                                (int64_t)row.scale + group, operand.scale_dtype);
        }
    }

    __device__ void begin_stage() {
        if (k % (4u << operand.log_group) == 0) {
#pragma unroll
            for (int j = 0; j < BLOCKS; j++)
                lane_group[j] = Decoder::factor(next_group[j], operand.scale_dtype);
            load_group((k >> operand.log_group) + 4 + threadIdx.x % 4);
        }
        k += STAGE_COLUMNS;
    }

    __device__ void read(uint32_t stage_offset, int step) {
        if (K_TILES == 2 && step % 2) return; /* the step before has read these words */
        uint32_t chunk = (address + stage_offset) ^ step / K_TILES * 16;
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            uint32_t row_chunk = chunk + 8 * j * ROW_BYTES;
            if constexpr (K_TILES == 2) {
                uint4 v = ld_shared_v4(row_chunk);
                word[j][0] = v.x, word[j][1] = v.y, word[j][2] = v.z, word[j][3] = v.w;
            } else {
                word[j][0] = ld_shared_u32(row_chunk), word[j][1] = ld_shared_u32(row_chunk + 8);
            }
        }
    }

    __device__ void make(int step) {
        constexpr int LEAST_GROUP = K_TILES == 2 ? 32 : STAGE_COLUMNS;
        bool may_begin = 16 * step % LEAST_GROUP == 0; /* a group, here; known when compiled */
        if (may_begin && (step == 0 || 1 << operand.log_group < STAGE_COLUMNS)) {
            int owner = (k - STAGE_COLUMNS + 16 * step) >> operand.log_group & 3;
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                factor[j].scale = __shfl_sync(~0u, lane_group[j].scale, owner, 4);
                if constexpr (Decoder::HAS_ZEROS)
                    factor[j].zero = __shfl_sync(~0u, lane_group[j].zero, owner, 4);
            }
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                fragment[j / 2][j % 2 * 2 + i] = decoder.pair(word[j][step % K_TILES * 2 + i], factor[j]);
    }
};

/* --- weights -------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *codes; /* [E,out,row_bytes] */
    int64_t row_bytes;
    int32_t out, block_out, row_blocks; /* block_out rows share scales; number of such blocks */
} CodedWeight;

typedef struct { /* one, or gate and up of the same format */
    CodedWeight weight[2];
    CodedOperand operand; /* but for its rows */
} CodedWeights;

/* The CodeRow of an expert's row. */
__device__ inline CodeRow code_row(const CodedWeights &w, int which, int64_t expert, int64_t row) {
    const CodedWeight weight = which ? w.weight[1] : w.weight[0];
    int64_t block = expert * weight.row_blocks + row / weight.block_out;
    return {weight.codes + (expert * weight.out + row) * weight.row_bytes,
            (uint32_t)(block * w.operand.num_groups), (uint32_t)which};
}

/* --- host ----------------------------------------------------------------------------------------------- */

inline bool has_4_bits(const FusedMoeQuantizedWeight &codes) {
    return fused_moe_format(codes.format).bits == 4;
}

inline void set_codes(CodedWeights &w, int which, const FusedMoeQuantizedWeight &codes) {
    CodedWeight &weight = w.weight[which];
    weight.codes = (const uint8_t *)codes.data;
    weight.row_bytes = codes.in / (has_4_bits(codes) ? 2 : 1);
    weight.out = (int32_t)codes.out;
    weight.block_out = (int32_t)codes.block_out;
    weight.row_blocks = (int32_t)ceil_div(codes.out, codes.block_out);
    w.operand.scale[which] = codes.scale;
    w.operand.zero[which] = codes.zero;
    w.operand.num_groups = (int32_t)ceil_div(codes.in, codes.block_in);
    w.operand.log_group = LOG_WHOLE_ROW;
    for (int log = 0; log < LOG_WHOLE_ROW && codes.block_in < codes.in; log++)
        if (codes.block_in >> log == 1) w.operand.log_group = log;
    w.operand.scale_dtype = codes.scale_dtype;
}

template <class Decoder_>
struct DecoderType { /* a Decoder is made on the device alone */
    using Decoder = Decoder_;
};

template <typename T, typename Fn>
int with_decoder(const FusedMoeQuantizedWeight &w, FusedMoeDtype dtype, Fn fn) {
    return with_format(w.format, [&](auto format) {
        constexpr FusedMoeFormatFacts FORMAT = fused_moe_format(format.value);
        constexpr Code CODE = Code(FORMAT.code);
        if constexpr (FORMAT.scales == FUSED_MOE_SCALES_E8M0) /* bf16 has each of them */
            return fn(DecoderType<Decoder<T, CODE, std::is_same_v<T, __nv_bfloat16>>>());
        else if constexpr (FORMAT.bits == 8)
            return fn(DecoderType<Decoder<T, CODE, false>>());
        else
            return w.scale_dtype == dtype ? fn(DecoderType<Decoder<T, CODE, true>>())
                                          : fn(DecoderType<Decoder<T, CODE, false>>());
    });
}

/* Calls fn with the tile for R rows of E experts, which are few. */
template <typename Fn>
int with_coded_tile(int64_t R, int32_t E, const FusedMoeQuantizedWeight &w, FusedMoeDtype dtype, Fn fn) {
    auto with_rows = [&](auto type) {
        using Decoder = typename decltype(type)::Decoder;
        return fused_moe_few_rows(R, E) == 16 ? fn(FewRowsTile<CodedColumns<Decoder, 16>>())
                                              : fn(FewRowsTile<CodedColumns<Decoder, 64>>());
    };
    return dtype == FUSED_MOE_BF16 ? with_decoder<__nv_bfloat16>(w, dtype, with_rows)
                                   : with_decoder<__half>(w, dtype, with_rows);
}

/* Whether a weight's codes are read, or why not, for a GEMM of R rows of E experts. */
inline FusedMoeReason codes_reason(const FusedMoeWeight &w, int64_t R, int32_t E, FusedMoeDtype dtype) {
    const FusedMoeQuantizedWeight *codes = w.quantized;
    const ScheduleOverride &asked = schedule_override();
    if (dtype != FUSED_MOE_BF16 && dtype != FUSED_MOE_F16) return FUSED_MOE_OTHER_DTYPE;
    if (R == 0) return FUSED_MOE_NO_ROWS;
    if (R > fused_moe_most_quantized_rows(false, false) * E || asked.no_tails ||
        (asked.quantized_rows >= 0 && R > (int64_t)asked.quantized_rows * E))
        return FUSED_MOE_MANY_ROWS;
    if (!codes || codes->transposed || codes->tile_scales) return FUSED_MOE_STRIDES;
    bool is_4_bit = has_4_bits(*codes), is_whole = codes->block_in >= codes->in; /* a group is the row */
    bool is_power = (codes->block_in & (codes->block_in - 1)) == 0;
    int64_t step = !is_4_bit                                                                 ? 64
                   : is_whole && fused_moe_format(codes->format).code == FUSED_MOE_CODE_INT4 ? 128
                                                                                             : 32;
    if (codes->in % step) return FUSED_MOE_WIDTH;
    if (!is_whole && !(is_power && codes->block_in >= (is_4_bit ? 32 : 64))) return FUSED_MOE_STRIDES;
    if ((uintptr_t)codes->data % 16) return FUSED_MOE_UNALIGNED;
    int64_t scales = E * ceil_div(codes->out, codes->block_out) * ceil_div(codes->in, codes->block_in);
    return scales <= UINT32_MAX ? FUSED_MOE_RUNS : FUSED_MOE_TOO_LARGE;
}

} // namespace fused_moe::sm80
